"""The caller-owned scratch of decode."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from splitkv import checks
from splitkv.config import ALIGNMENT, Section, WorkspaceConfig
from splitkv.tiles import Target, Tiles
from splitkv.tiles_io import TileKey, TileTable

MAX_CALLS = 256  # forms of calls that a workspace remembers; then it starts again


def carve(buffer: Tensor, sections: tuple[Section, ...]) -> dict[str, Tensor]:
    """Views of a uint8 buffer, one per section, as plain tensors also where the buffer was made in inference mode.

    Raises:
        TypeError, ValueError: wrong dtype or rank, an unaligned start, or fewer bytes than the sections need; the
            message then names the bytes needed and given, and the first section that no longer fits.
    """
    buffer = checks.check_tensor("buffer", buffer)
    checks.check_dtype("buffer", buffer, torch.uint8)
    checks.check_rank("buffer", buffer, 1)
    checks.check_last_stride("buffer", buffer)
    needed, given = sections[-1].end, buffer.numel()
    if given < needed:
        first = next(section for section in sections if section.end > given)
        raise ValueError(
            f"buffer: expected at least {needed} bytes, given {given}: section {first.name} "
            f"{checks.shape_text(first.shape)} ends at byte {first.end}"
        )
    has_memory = checks.has_memory(buffer)
    if has_memory and buffer.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"buffer: expected a start aligned to {ALIGNMENT} bytes, given address {buffer.data_ptr():#x} "
            f"({buffer.data_ptr() % ALIGNMENT} past a multiple)"
        )
    views = {}
    with torch.inference_mode(False):
        storage, start = buffer.untyped_storage(), int(buffer.storage_offset())
        for section in sections:
            offset = start + section.offset
            # A storage of its own over these bytes: a compiler copies a tensor that is written where another one of the
            # same storage is written too.
            part = storage
            if has_memory:
                part, offset = storage[offset : start + section.end], 0
            # set_ on a fresh tensor: a view made by slicing would stay an inference tensor where the buffer is one.
            view = torch.empty(0, dtype=section.dtype, device=buffer.device)
            stride, strides = 1, []
            for size in reversed(section.shape):
                strides.append(stride)
                stride *= size
            views[section.name] = view.set_(
                part, offset // section.dtype.itemsize, section.shape, tuple(reversed(strides))
            )
    return views


def spec_of(config: WorkspaceConfig, tiles: TileTable | None, target: Target) -> str:
    """All that a workspace or a schedule is besides its tensors, as text (see `read_spec`)."""
    fields = dataclasses.asdict(config) | {"dtype": str(config.dtype).removeprefix("torch.")}
    entries = None
    if tiles is not None:
        entries = [[dataclasses.asdict(key), dataclasses.asdict(entry)] for key, entry in tiles.entries.items()]
    return json.dumps([fields, entries, dataclasses.asdict(target)], separators=(",", ":"))


@functools.lru_cache(maxsize=64)
def read_spec(spec: str) -> tuple[WorkspaceConfig, TileTable | None, Target, dict[Hashable, Any]]:
    """What `spec_of` wrote down, and what is remembered of calls with it."""
    fields, entries, target = json.loads(spec)
    config = WorkspaceConfig(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    tiles = None
    if entries is not None:
        tiles = TileTable({TileKey(**key): Tiles(**entry) for key, entry in entries})
    return config, tiles, Target(**target), {}


class Workspace:
    """Scratch tensors of decode: sized once from a config, arbitrary on entry, at fixed addresses, never growing.

    Use one workspace from one stream at a time; all layers of a model share it.

    >>> config = WorkspaceConfig(max_batch_size=2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> workspace = Workspace.allocate(config, device="cpu")
    >>> workspace.out.shape, workspace.partial_out.shape
    (torch.Size([2, 4, 64]), torch.Size([2048, 16, 64]))

    Attributes:
        config: The `WorkspaceConfig`.
        partial_out: [max_splits, q_tile_rows, head_dim_v] float32, one part's normalised output per row.
        partial_lse: [max_splits, q_tile_rows] float32, natural log.
        out: [max_total_q, num_q_heads, head_dim_v] of the config's dtype.
        lse: [max_total_q, num_q_heads] float32, natural log.
        device: Where they live.
        spec: The rest of it as text, by which operators in compiled graphs know it.
    """

    partial_out: Tensor
    partial_lse: Tensor
    out: Tensor
    lse: Tensor
    spec: str

    def __init__(self, config: WorkspaceConfig, buffer: Tensor) -> None:
        """Use `allocate` or `from_buffer`."""
        if not isinstance(config, WorkspaceConfig):
            raise TypeError(f"config: expected a WorkspaceConfig, given {type(config).__name__}")
        self.config = config
        for name, view in carve(buffer, config.sections()).items():
            setattr(self, name, view)
        self.device = buffer.device
        self._target = Target.of(self.device)
        self._tiles: TileTable | None = None
        self._calls: dict[Hashable, Any] = {}
        self._changed()

    @classmethod
    def of_parts(cls, spec: str, partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> Workspace:
        """A workspace with this `spec` and these buffers, of any size. Such ones remember their calls together."""
        workspace = cls.__new__(cls)
        workspace.config, workspace._tiles, workspace._target, workspace._calls = read_spec(spec)
        workspace.partial_out, workspace.partial_lse, workspace.out, workspace.lse = partial_out, partial_lse, out, lse
        workspace.device, workspace.spec = partial_out.device, spec
        # Asked for only where both are contiguous, as those of a workspace are.
        first, first_lse = out.data_ptr(), lse.data_ptr()
        workspace.results = min(first, first_lse), max(first + out.nbytes, first_lse + lse.nbytes)
        return workspace

    def _changed(self) -> None:
        self.spec = spec_of(self.config, self._tiles, self._target)
        self._calls.clear()

    @property
    def target(self) -> Target:
        """What tiles are chosen by: the architecture and sizes of the device."""
        return self._target

    @target.setter
    def target(self, target: Target) -> None:
        self._target = Target.given(target)
        self._changed()

    @property
    def tiles(self) -> TileTable | None:
        """Measured tile sizes that replace the built-in choice where they have an entry, or None.

        Set it anew rather than change it: calls of a form that was seen keep the tiles that they had.
        """
        return self._tiles

    @tiles.setter
    def tiles(self, tiles: TileTable | str | os.PathLike[str] | None) -> None:
        self._tiles = TileTable.given(tiles)
        self._changed()

    @cached_property
    def results(self) -> tuple[int, int]:
        """The stretch of addresses that holds out and lse."""
        spans = checks.extent(self.out), checks.extent(self.lse)
        return min(spans)[0], max(last for _, last in spans)

    def recall(self, form: Hashable) -> Any:
        """What was remembered of calls of this form, or None."""
        return self._calls.get(form)

    def remember(self, form: Hashable, call: Any) -> None:
        """Keep what is known of calls of this form: they need not be checked and prepared again. Holds no tensor."""
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        self._calls[form] = call

    @classmethod
    def allocate(
        cls,
        config: WorkspaceConfig,
        device: torch.device | str,
        *,
        tiles: TileTable | str | os.PathLike[str] | None = None,
    ) -> Workspace:
        """Make the buffers in one allocation of `config.nbytes` bytes.

        Call it before the KV cache takes the rest of the memory.

        Args:
            config: The capacity.
            device: Where.
            tiles: Measured tile sizes: the path of a file that `python -m splitkv tune` wrote, or such a table. Cases
                that it does not list keep the built-in choice.

        Raises:
            TypeError, ValueError, FileNotFoundError: no config, no such device, or no such table.
        """
        if not isinstance(config, WorkspaceConfig):
            raise TypeError(f"config: expected a WorkspaceConfig, given {type(config).__name__}")
        table = TileTable.given(tiles)
        workspace = cls(config, aligned_bytes(config.nbytes, checks.as_device(device)))
        workspace.tiles = table
        return workspace

    @classmethod
    def from_buffer(cls, config: WorkspaceConfig, buffer: Tensor) -> Workspace:
        """Lay the buffers over one caller-supplied tensor.

        >>> config = WorkspaceConfig(max_batch_size=2, num_q_heads=4, num_kv_heads=2, head_dim=64)
        >>> buffer = aligned_bytes(config.nbytes, "cpu")  # memory from elsewhere, such as an engine's own pool
        >>> Workspace.from_buffer(config, buffer).partial_out.data_ptr() == buffer.data_ptr()
        True

        Args:
            config: The capacity.
            buffer: [≥ config.nbytes] uint8, contiguous, its start aligned to 256 bytes. Its content is irrelevant.

        Raises:
            TypeError, ValueError: dtype, rank, alignment, or size, naming the bytes needed and given.
        """
        return cls(config, buffer)


def aligned_bytes(nbytes: int, device: torch.device | str) -> Tensor:
    """[nbytes] uint8 whose start is aligned to 256 bytes, a plain tensor also in inference mode.

    The CPU allocator aligns to 64 bytes only: where that is not enough, a little more is taken and the start moved.
    """
    with torch.inference_mode(False):
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if checks.has_memory(buffer) and buffer.data_ptr() % ALIGNMENT:
            buffer = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            shift = -buffer.data_ptr() % ALIGNMENT
            buffer = buffer[shift : shift + nbytes]
        return buffer
