"""Measured tile sizes in a file: `splitkv tune` writes it, `Workspace.allocate(config, device, tiles=...)` takes it."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from splitkv.config import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    QUANTIZED_DTYPES,
    next_power_of_2,
    require_int,
)
from splitkv.tiles import Tiles

FORMAT = "splitkv-tiles/1"
_KV_DTYPE_NAMES = ("", *(str(dtype).removeprefix("torch.") for dtype in QUANTIZED_DTYPES))
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class TileKey:
    """What a choice of tiles holds for.

    Attributes:
        arch: As `Target.arch`: "cuda:90", "hip:gfx942".
        dtype: "bfloat16", "float16" or "float32", of queries.
        head_dim, head_dim_v: Key and value width.
        rows: Rows of a query tile.
        kv_dtype: Of caches, such as "float8_e4m3fn"; "": that of queries.
        latent: Whether they are those of a LatentKV.
    """

    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    rows: int
    kv_dtype: str = ""
    latent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.arch, str):
            raise TypeError(f"arch: expected text, given {self.arch!r}")
        if self.dtype not in _DTYPE_NAMES:
            raise ValueError(f"dtype: expected one of {', '.join(_DTYPE_NAMES)}, given {self.dtype!r}")
        if self.kv_dtype not in _KV_DTYPE_NAMES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(_KV_DTYPE_NAMES)}, given {self.kv_dtype!r}")
        if not isinstance(self.latent, bool):
            raise TypeError(f"latent: expected True or False, given {self.latent!r}")
        for name in ("head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), 1, MAX_HEAD_DIM)
        require_int("rows", self.rows, MIN_TILE_ROWS, MAX_TILE_ROWS)
        if self.rows != next_power_of_2(self.rows):
            raise ValueError(f"rows: expected a power of two, given {self.rows}")

    @classmethod
    def of(
        cls,
        arch: str,
        dtype: torch.dtype,
        head_dim: int,
        head_dim_v: int,
        rows: int,
        kv_dtype: torch.dtype | None = None,
        latent: bool = False,
    ) -> TileKey:
        cache = "" if kv_dtype in (None, dtype) else str(kv_dtype).removeprefix("torch.")
        return cls(arch, str(dtype).removeprefix("torch."), head_dim, head_dim_v, rows, cache, latent)


@dataclass
class TileTable:
    """Tiles by what they hold for.

    >>> table = TileTable({TileKey("cuda:90", "bfloat16", 128, 128, 16): Tiles(64, 4, 3, 2, 64)})
    >>> table.lookup("cuda:90", torch.bfloat16, 128, 128, 16).num_stages
    3
    >>> table.lookup("cuda:80", torch.bfloat16, 128, 128, 16) is None
    True

    Attributes:
        entries: Tiles by key.
        about: Per key, whatever else a file keeps of the entry, such as the times that led to it.
    """

    entries: dict[TileKey, Tiles] = field(default_factory=dict)
    about: dict[TileKey, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("entries", self.entries), ("about", self.about)):
            if not isinstance(values, dict):
                raise TypeError(f"{name}: expected a dict, given {type(values).__name__}")
        for key, tiles in self.entries.items():
            if not isinstance(key, TileKey) or not isinstance(tiles, Tiles):
                raise TypeError(
                    f"entries: expected Tiles by TileKey, given {type(tiles).__name__} by {type(key).__name__}"
                )

    def lookup(
        self,
        arch: str,
        dtype: torch.dtype,
        head_dim: int,
        head_dim_v: int,
        rows: int,
        kv_dtype: torch.dtype | None = None,
        latent: bool = False,
    ) -> Tiles | None:
        """The tiles for this case, or None where the table has none."""
        return self.entries.get(TileKey.of(arch, dtype, head_dim, head_dim_v, rows, kv_dtype, latent))

    def merged(self, newer: TileTable) -> TileTable:
        """Both tables as one; an entry of `newer` replaces that of the same key."""
        if not isinstance(newer, TileTable):
            raise TypeError(f"newer: expected a TileTable, given {type(newer).__name__}")
        about = {key: value for key, value in self.about.items() if key not in newer.entries}
        return TileTable({**self.entries, **newer.entries}, {**about, **newer.about})

    def save(self, path: str | Path) -> None:
        """Write as JSON, all or nothing."""
        entries = [
            {**dataclasses.asdict(key), "tiles": dataclasses.asdict(tiles), **self.about.get(key, {})}
            for key, tiles in self.entries.items()
        ]
        path = Path(path)
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: str | Path) -> TileTable:
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, or an entry that cannot be; names the entry and what was expected.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"tiles: expected a JSON file, given {path} ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
            raise ValueError(f"tiles: expected a file of format {FORMAT!r} with entries, given {path}")
        table = cls()
        for i, entry in enumerate(data["entries"]):
            try:
                key, tiles, about = _read_entry(entry)
            except (TypeError, ValueError) as error:
                raise ValueError(f"tiles: {path}, entry {i}: {error}") from error
            table.entries[key] = tiles
            if about:
                table.about[key] = about
        return table

    @classmethod
    def given(cls, tiles: TileTable | str | os.PathLike[str] | None) -> TileTable | None:
        """What a `tiles` argument means: a table, the path of a file, or nothing.

        Raises:
            TypeError: none of these. Else as `load`.
        """
        if isinstance(tiles, TileTable):
            tiles.__post_init__()  # its dicts may have been written to since it was made
        if tiles is None or isinstance(tiles, TileTable):
            return tiles
        if isinstance(tiles, (str, os.PathLike)):
            return cls.load(Path(tiles))
        raise TypeError(f"tiles: expected a TileTable, a path or None, given {type(tiles).__name__}")


def _read_entry(entry: Any) -> tuple[TileKey, Tiles, dict[str, Any]]:
    if not isinstance(entry, dict):
        raise TypeError(f"expected an object, given {entry!r}")
    rest = dict(entry)
    names = [f.name for f in dataclasses.fields(TileKey)]
    required = [f.name for f in dataclasses.fields(TileKey) if f.default is dataclasses.MISSING]
    missing = [name for name in (*required, "tiles") if name not in rest]
    if missing:
        raise ValueError(f"expected {', '.join((*required, 'tiles'))}, given none of {', '.join(missing)}")
    key = TileKey(**{name: rest.pop(name) for name in names if name in rest})
    values = rest.pop("tiles")
    fields = {f.name: f for f in dataclasses.fields(Tiles)}
    if not isinstance(values, dict) or values.keys() - fields.keys():
        raise ValueError(f"tiles: expected fields among {', '.join(fields)}, given {values!r}")
    needed = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    if needed - values.keys():
        raise ValueError(f"tiles: expected {', '.join(sorted(needed - values.keys()))} too, given {values!r}")
    return key, Tiles(**values), rest
