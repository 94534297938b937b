"""An optional work list, made once per step on the device, that saves decode its own look at all lengths."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splitkv import checks
from splitkv import tiles as tile_sizes
from splitkv.config import WorkspaceConfig, next_power_of_2
from splitkv.kernels.prepared import Launch, PreparedCalls, PreparedLaunches
from splitkv.kernels.work_list import work_list_kernel
from splitkv.tiles_io import TileTable
from splitkv.variants import choose_tiles
from splitkv.workspace import read_spec, spec_of

if TYPE_CHECKING:
    from splitkv.kv import KVView

HEADER = 3  # by_work, each, share
MAX_AXIS = 2**30  # the axis of work stays within 32 bits
NAMES = "list_ptr", "lens_ptr", "indptr_ptr", "kv_start_ptr"


@functools.lru_cache(maxsize=64)
def _calls_of(spec: str) -> PreparedCalls[PreparedLaunches]:
    """What is remembered of updates in graphs of schedules with this `spec`."""
    return PreparedCalls()


class Schedule:
    """How the requests of a step are shared among programs, written down once for all layers.

    Without it every program of decode finds its share by a prefix sum over the lengths. A view takes one as
    `schedule=`; plain calls (no qo_indptr, no window_left, no fixed parts) then read it, others keep to their own
    prefix sum.

    It is a hint: it holds weights, never lengths or page ids. Whatever lengths are written after `update`, decode
    attends every key once, and only the balance suffers. With fixed parts (num_splits, split_tokens) it is not read at
    all.

    >>> import splitkv
    >>> config = WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> schedule = Schedule.allocate(config, device="cpu")
    >>> k, v = torch.randn(2, 2, 40, 2, 64, dtype=torch.float16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.tensor([40, 17], dtype=torch.int32), schedule=schedule)
    >>> schedule.update(kv)
    >>> splitkv.decode(torch.randn(2, 4, 64).half(), kv, splitkv.Workspace.allocate(config, "cpu")).shape
    torch.Size([2, 4, 64])

    Attributes:
        config: The `WorkspaceConfig` that it was sized by.
        buffer: [3 + max_batch_size + 1] int32: the list.
        spec: The rest of it as text, by which operators in compiled graphs know it.
    """

    spec: str

    def __init__(
        self, config: WorkspaceConfig, device: torch.device | str, tiles: TileTable | str | os.PathLike[str] | None
    ) -> None:
        """Use `allocate`."""
        if not isinstance(config, WorkspaceConfig):
            raise TypeError(f"config: expected a WorkspaceConfig, given {type(config).__name__}")
        self.config, self._tiles = config, TileTable.given(tiles)
        device = checks.as_device(device)
        with torch.inference_mode(False):
            # Until the first update: every request weighs 1, in shares as large as the axis needs.
            self.buffer = torch.arange(-HEADER, config.max_batch_size + 1, dtype=torch.int32, device=device)
            self.buffer[:HEADER] = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
        self.device = self.buffer.device
        self.target = tile_sizes.Target.of(self.device)

    @classmethod
    def allocate(
        cls,
        config: WorkspaceConfig,
        device: torch.device | str,
        *,
        tiles: TileTable | str | os.PathLike[str] | None = None,
    ) -> Schedule:
        """Make a list for up to config.max_batch_size requests. It is right, if not balanced, before any `update`.

        Args:
            config, device, tiles: As for `Workspace.allocate`; those of the workspace that decode is given, so that
                work is shared among as many programs as it will launch.

        Raises:
            TypeError, ValueError: as `Workspace.allocate`.
        """
        return cls(config, device, tiles)

    @classmethod
    def of_spec(cls, spec: str, buffer: Tensor) -> Schedule:
        """The schedule with this `spec` whose list is `buffer`. Such ones remember their calls together."""
        schedule = cls.__new__(cls)
        schedule.config, schedule._tiles, schedule._target, _ = read_spec(spec)
        schedule.buffer, schedule.device = buffer, buffer.device
        schedule.spec, schedule._calls = spec, _calls_of(spec)
        return schedule

    @property
    def target(self) -> tile_sizes.Target:
        """What tiles are chosen by, as for a workspace."""
        return self._target

    @target.setter
    def target(self, target: tile_sizes.Target) -> None:
        self._target = tile_sizes.Target.given(target)
        self._changed()

    @property
    def tiles(self) -> TileTable | None:
        """Measured tile sizes, as for a workspace."""
        return self._tiles

    @tiles.setter
    def tiles(self, tiles: TileTable | str | os.PathLike[str] | None) -> None:
        self._tiles = TileTable.given(tiles)
        self._changed()

    def _changed(self) -> None:
        self.spec = spec_of(self.config, self._tiles, self._target)
        self._calls = PreparedCalls[PreparedLaunches]()

    @property
    def max_batch_size(self) -> int:
        """Most requests of a call that reads the list."""
        return self.config.max_batch_size

    def update(self, kv: KVView, batch: int | None = None) -> None:
        """Make the list for the lengths that the device holds now: one launch on the current stream, no host traffic.

        Call it once per step, after the lengths were written; it can be captured in a CUDA graph.

        Args:
            kv: A view with the step's lengths; all layers' views share them.
            batch: Requests that will be decoded. None: as many as the view has entries for, at most max_batch_size.

        Raises:
            TypeError, ValueError: naming the argument, what was expected, and what was given; with SPLITKV_DEBUG=1 also
                lengths that would be clamped. Nothing was launched.
        """
        from splitkv import operators
        from splitkv.kv import check_view

        check_view(kv)
        if operators.tracing(self.buffer):
            refusal = operators.refused(self._check_batch, batch)
            torch.ops.splitkv.update_schedule(
                self.buffer, self.spec, batch if refusal is None else None, refusal,
                *operators.take_apart(kv, scheduled=False),
            )  # fmt: skip
            return
        self._check_batch(batch)
        form = kv.form, batch
        call = self._calls.recall(form)
        if call is None or checks.debugging():
            step = self._plan(kv, batch)
            if call is None:
                call = PreparedLaunches([step], NAMES, self.device)
                self._calls.remember(form, call)
        where = kv.addressing
        read = where.lens, where.indptr, kv.kv_start
        call(
            (self.buffer, *read),
            lambda: checks.check_apart("schedule", self.buffer, [("the lengths of kv", tensor) for tensor in read]),
        )

    def _check_batch(self, batch: object) -> None:
        if batch is not None:
            checks.require_int("batch", batch, 0, self.max_batch_size)

    def _plan(self, kv: KVView, batch: int | None) -> Launch:
        """Check a call of `update` and say what it launches."""
        if kv.device != self.device:
            raise ValueError(f"kv: expected device {self.device} (that of the schedule), given {kv.device}")
        if batch is None:
            batch = min(kv.max_batch, self.max_batch_size)
        kv.check_batch(batch)
        if checks.debugging(self.device):
            kv.check_values([0] * batch, None)
        config, where = self.config, kv.addressing
        rows = min(config.q_tile_rows, max(16, next_power_of_2(config.group_size)))
        rows = tile_sizes.fit_rows(
            self.target, config.dtype, config.head_dim, config.head_dim_v, rows, kv_dtype=kv.dtype, latent=kv.latent
        )
        q_tiles = batch * -(-config.group_size // rows)
        blocks = tile_sizes.prefer_blocks(self.target, q_tiles * config.num_kv_heads, kv.len_hint, latent=kv.latent)
        tiles = choose_tiles(
            self.target, self.tiles, config.dtype, config.head_dim, config.head_dim_v, rows, True, blocks, kv.dtype,
            kv.latent,
        )  # fmt: skip
        slots = config.max_splits * config.q_tile_rows // rows
        return Launch(
            work_list_kernel,
            (1,),
            operands=dict(
                list_ptr=self.buffer,
                lens_ptr=where.lens,
                indptr_ptr=where.indptr,
                kv_start_ptr=kv.kv_start,
                batch=batch,
                rows=self.max_batch_size,
                capacity=where.capacity,
                shares=tile_sizes.share_count(self.target, tiles, config.num_kv_heads, q_tiles, slots, kv.len_hint),
                heaviest=max(1, MAX_AXIS // config.max_q_tiles),
            ),
            constants=dict(
                PAGE_SIZE=where.page_size,
                KV_KIND=where.kind,
                GROUP_SIZE=config.group_size,
                BLOCK_M=rows,
                MIN_CHUNK=tiles.min_chunk,
                SEGMENT_COST=tiles.segment_cost,
                TILE_COST=tiles.tile_cost,
                BLOCK_B=256,
            ),
            num_warps=4,
        )
