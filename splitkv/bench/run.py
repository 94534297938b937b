"""Measuring cells: ours, the peers and the limit on one problem, each checked before it is timed."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import splitkv
from splitkv.bench import timing
from splitkv.bench.cells import Cell, capacity, workspace_config
from splitkv.bench.peers import Launch, Peers, Result, result_of
from splitkv.bench.problem import Buffers, DoesNotFit, Expected, Problem, build, expect
from splitkv.bench.record import HostMeasured, Measured, Timing

PEER_ALLOWANCE = 4.0
"""A peer is no longer timed above so many error budgets: it is not held to ours, only to being right."""

SHORT = 16
"""Most query tokens of a cell that is none of chunks."""
LARGE_TILE = 128
"""Rows of query tiles that hold tokens of many requests, for which workspaces then have room."""
MULTIPLIED = 32
"""Operations per byte from which on arithmetic may be the limit."""

Tell = Callable[[str], None]
Tiles = Any  # whatever Workspace.allocate takes as tiles


class Session:
    """What the cells of one run share: the device, the memory of the caches, one workspace per geometry, one capacity.

    Args:
        cells: Cells that the run may measure; they set the capacity.
        device: A CUDA device, or the CPU, where answers are checked and nothing is timed.
        split_tokens: Of the workspaces.
        tiles: Of the workspaces: a file that `splitkv tune` wrote, or None.
        timed: Time; False only checks answers. None: on a CUDA device.
        budget_ms, repeats: As for `graph_time_us`.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        device: torch.device | str,
        *,
        split_tokens: int | None = None,
        tiles: Tiles = None,
        timed: bool | None = None,
        budget_ms: float = 30.0,
        repeats: int = 7,
    ) -> None:
        device = torch.device(device)
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.timed = device.type == "cuda" if timed is None else timed
        if self.timed and device.type != "cuda":
            raise ValueError(f"device: expected a CUDA device for timing, given {device}")
        self.split_tokens, self.tiles = split_tokens, tiles
        self.budget_ms, self.repeats = budget_ms, repeats
        # Untimed runs are small ones under the interpreter: their tables need not be as wide as a server's.
        self.max_batch_size, self.max_len = (
            capacity(cells)
            if self.timed
            else (max(cell.batch for cell in cells), max(cell.longest for cell in cells) + 100)
        )
        self._buffers: dict[torch.dtype, Buffers] = {}
        self._workspaces: dict[splitkv.WorkspaceConfig, splitkv.Workspace] = {}
        self._rates: dict[torch.dtype, float] = {}
        # The memory is filled once, for the largest.
        for cell in cells:
            buffers = self.buffers(cell.torch_kv_dtype)
            try:
                buffers.reserve(self.copies(cell) * cell.cache_bytes)
            except DoesNotFit:
                continue  # said again, and recorded, when its turn comes
        if self.timed:
            for buffers in self._buffers.values():
                words = buffers.data[: 2**27].view(torch.int32)
                if words.numel():
                    timing.wake([words])

    def buffers(self, dtype: torch.dtype) -> Buffers:
        """The memory for caches of this dtype."""
        if dtype not in self._buffers:
            self._buffers[dtype] = Buffers(self.device, dtype)
        return self._buffers[dtype]

    def copies(self, cell: Cell) -> int:
        """Caches of this cell to rotate over; raises DoesNotFit."""
        return self.buffers(cell.torch_kv_dtype).copies(cell) if self.timed else 2

    def problem(self, cell: Cell) -> Problem:
        """The cell on the device. All problems of a dtype lie over the same memory, which nothing writes to."""
        return build(cell, self.buffers(cell.torch_kv_dtype), max_len=self.max_len, copies=self.copies(cell))

    def workspace(self, cell: Cell, tiles: Tiles = None, q_tile_rows: int | None = None) -> splitkv.Workspace:
        """The workspace for a cell: one for all cells that ask for the same, unless tiles of its own are given."""
        config = workspace_config(cell, self.max_batch_size, self.split_tokens, q_tile_rows)
        if tiles is not None:
            return splitkv.Workspace.allocate(config, self.device, tiles=tiles)
        if config not in self._workspaces:
            self._workspaces[config] = splitkv.Workspace.allocate(config, self.device, tiles=self.tiles)
        return self._workspaces[config]

    def limit(self, problem: Problem) -> tuple[float, str]:
        """(µs, "memory" or "arithmetic"): what a call takes that only reads what is visible, or only multiplies."""
        read = timing.speed_of_light_us(problem.words, budget_ms=self.budget_ms, repeats=self.repeats)
        cell = problem.cell
        if cell.flops < MULTIPLIED * cell.kv_bytes:
            return read, "memory"
        if cell.torch_dtype not in self._rates:
            self._rates[cell.torch_dtype] = timing.product_flops_per_us(cell.torch_dtype, self.device)
        products = cell.flops / self._rates[cell.torch_dtype]
        return (read, "memory") if read > products else (products, "arithmetic")

    def time(self, launch: Launch, copies: int) -> float:
        return timing.graph_time_us(launch, copies, self.device, budget_ms=self.budget_ms, repeats=self.repeats)


def decode_launch(problem: Problem, workspace: splitkv.Workspace) -> tuple[Launch, Result]:
    """Ours, in the form of a peer."""
    out = problem.q.new_empty(problem.shape_out)

    def launch(i: int) -> None:
        splitkv.decode(problem.q, problem.views[i], workspace, out=out, **problem.rules)

    return launch, out


def listed_launch(problem: Problem, workspace: splitkv.Workspace) -> tuple[Launch, Result]:
    """Ours with a work list, made beforehand, as a step makes it once for all layers."""
    schedule = splitkv.Schedule.allocate(workspace.config, workspace.device, tiles=workspace.tiles)
    views = problem.views_with(schedule)
    schedule.update(views[0], batch=problem.q.shape[0])
    out = problem.q.new_empty(problem.shape_out)

    def launch(i: int) -> None:
        splitkv.decode(problem.q, views[i], workspace, out=out, **problem.rules)

    return launch, out


def shared_launch(problem: Problem, workspace: splitkv.Workspace) -> tuple[Launch, Result]:
    """Ours, with the tokens that all requests share read once for many of them."""
    batch = problem.cell.batch
    group_ids = torch.zeros(batch, dtype=torch.int32, device=workspace.device)
    prefix_lens = torch.full((batch,), problem.cell.shared, dtype=torch.int32, device=workspace.device)
    out = problem.q.new_empty(problem.shape_out)

    def launch(i: int) -> None:
        splitkv.decode_shared_prefix(
            problem.q, problem.views[i], workspace, group_ids, prefix_lens, out=out, **problem.rules
        )

    return launch, out


def ours(cell: Cell, session: Session) -> dict[str, Callable[[Problem], tuple[Launch, Result]]]:
    """Ways in which a caller may use decode for this cell, by name; each is timed and the best is shown."""
    ways: dict[str, Callable[[Problem], tuple[Launch, Result]]] = {
        "scan": lambda problem: decode_launch(problem, session.workspace(cell))
    }
    if cell.window_left is None and cell.q_len <= SHORT:  # decode reads no list with a window, and chunks need none
        ways["list"] = lambda problem: listed_launch(problem, session.workspace(cell))
    if cell.shared:
        ways["shared"] = lambda problem: shared_launch(problem, session.workspace(cell, q_tile_rows=LARGE_TILE))
    return ways


def measure(
    prepare: Callable[[Problem], tuple[Launch, Result]],
    problem: Problem,
    expected: Expected,
    session: Session,
    *,
    allowance: float = 1.0,
    unavailable: tuple[type[Exception], ...] = (),
    tidy: bool = True,
) -> Timing:
    """Check an implementation's answer and, if it is right, time it.

    Args:
        prepare: As a peer.
        problem: What to run it on.
        expected: The answer over the problem's last copy.
        session: Says whether and how long to time.
        allowance: Error, as a fraction of the budget, up to which an answer counts as right.
        unavailable: Exceptions by which it says that it cannot run.
        tidy: Give back afterwards the memory that it took.

    Raises:
        RuntimeError: the device is no longer usable.
    """
    last = problem.copies - 1
    ratio = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a peer warns of is its own matter
            launch, out = prepare(problem)
            launch(last)
        ratio = expected.error_ratio(result_of(out))
        if not ratio <= allowance:
            return Timing(None, ratio, "wrong answer")
        if not session.timed:
            return Timing(None, ratio, "not timed")
        if isinstance(out, torch.Tensor):
            out.fill_(torch.nan)
        us = session.time(launch, problem.copies)
        if isinstance(out, torch.Tensor):
            # The last call of a replay is on the last copy too: what was timed is as right as what was checked.
            ratio = max(ratio, expected.error_ratio(out))
            if not ratio <= allowance:
                return Timing(None, ratio, "wrong answer under graph replay")
        return Timing(us, ratio)
    except unavailable as error:
        return Timing(None, ratio, f"unavailable: {_first_line(error)}")
    except torch.cuda.OutOfMemoryError:
        return Timing(None, ratio, "out of memory")
    except Exception as error:  # whatever a peer raises is its own, and the others are still to be measured
        if session.device.type == "cuda":
            try:
                torch.cuda.synchronize(session.device)
            except Exception as broken:
                raise RuntimeError(f"the device is no longer usable after: {_first_line(error)}") from broken
        return Timing(None, ratio, f"failed: {type(error).__name__}: {_first_line(error)}")
    finally:
        launch = out = None  # type: ignore[assignment]
        if tidy and session.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def time_decode(
    cell: Cell,
    *,
    session: Session | None = None,
    device: torch.device | str = "cuda",
    peers: Peers | None = None,
    split_tokens: int | None = None,
    tiles: Tiles = None,
    tell: Tell | None = None,
) -> Measured:
    """Measure one cell: the limit of the memory, ours and the peers, each answer checked before its time is taken.

    >>> from splitkv.bench.cells import Cell
    >>> measured = time_decode(Cell("small", (40, 7), num_q_heads=4, num_kv_heads=2, head_dim=32), device="cpu")
    >>> measured.ours["scan"].error_ratio < 1, measured.sol_us  # without a GPU answers are checked and nothing is timed
    (True, None)

    Args:
        cell: What to measure.
        session: Shared by the cells of a run; None makes one for this cell from the arguments that follow.
        device, split_tokens, tiles: As for `Session`; not together with a session.
        peers: Whom to measure too; None: nobody.
        tell: Called with a line of text before each step.

    Raises:
        ValueError: a session together with what only a new one takes.
        RuntimeError: the device is no longer usable.
    """
    if session is None:
        session = Session([cell], device, split_tokens=split_tokens, tiles=tiles)
    elif split_tokens is not None or tiles is not None:
        raise ValueError("session: expected none together with split_tokens or tiles, given one")
    tell = tell or (lambda text: None)
    peers = peers or Peers({})
    label = None if session.tiles is None else "given"
    if isinstance(session.tiles, (str, os.PathLike)):
        label = os.path.basename(session.tiles)
    measured = Measured(cell, split_tokens=session.split_tokens, tiles=label)
    ways = ours(cell, session)
    tell(f"{measured.label}: limit")
    try:
        problem = session.problem(cell)
    except (DoesNotFit, torch.cuda.OutOfMemoryError) as error:
        measured.note = f"does not fit: {_first_line(error)}"
        for name in (*ways, *peers.table):
            tell(f"{measured.label}: {name} left out")
        return measured
    measured.copies = problem.copies
    if session.timed:
        measured.sol_us, measured.bound = session.limit(problem)
    expected = expect(problem, problem.copies - 1)
    for name, prepare in ways.items():
        tell(f"{measured.label}: ours ({name})")
        measured.ours[name] = measure(prepare, problem, expected, session)
    for name, peer in peers.table.items():
        tell(f"{measured.label}: {name}")
        lacking = peers.lacks(name, problem)
        if lacking:
            measured.peers[name] = Timing(None, None, f"unavailable: does not take {lacking}")
            continue
        measured.peers[name] = measure(
            peer, problem, expected, session, allowance=PEER_ALLOWANCE, unavailable=peers.unavailable
        )
    return measured


def steps(cells: Sequence[Cell], peers: Peers, session: Session) -> int:
    """How often `time_decode` calls `tell` over these cells."""
    return sum(1 + len(ours(cell, session)) + len(peers) for cell in cells)


def time_host(
    cell: Cell,
    session: Session,
    peers: Peers | None = None,
    *,
    calls: int = 512,
    group: int = 32,
    tell: Tell | None = None,
) -> HostMeasured:
    """Host time of an eager call: ours with a new query tensor each call, peers on one that they know.

    The queue is kept short: after every fourth call the device is waited for, outside the timing.

    Args:
        cell: Its kernels should be short; what they take is not measured.
        session: As for `time_decode`; a CUDA device's, or a CPU's (where the kernels themselves run in the call).
        peers: Whom to measure too; those that cannot run it are left out.
        calls: Calls that are timed.
        group: Query tensors that are made at a time, each used once.
        tell: Called with a line of text before each step.
    """
    tell = tell or (lambda text: None)
    peers = peers or Peers({})
    problem, workspace = session.problem(cell), session.workspace(cell)
    queries: list[torch.Tensor] = []

    def new_queries() -> None:
        queries[:] = [problem.q.clone() for _ in range(group)]

    def wait() -> None:
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)

    def call(i: int) -> None:
        splitkv.decode(queries[i], problem.views[i % problem.copies], workspace, **problem.rules)

    def host_time(call: Launch, prepare: Callable[[], None]) -> dict[str, float]:
        measured = timing.host_time_us(call, prepare, wait, calls=calls, group=group)
        return {"median": measured.median, "p90": measured.p90}

    tell(f"{cell.name}: host time of ours")
    times = {"ours": host_time(call, new_queries)}
    for name, peer in peers.table.items():
        tell(f"{cell.name}: host time of {name}")
        if peers.lacks(name, problem):
            continue
        try:
            launch, _ = peer(problem)
            times[name] = host_time(lambda i, f=launch: f(i % problem.copies), lambda: None)  # type: ignore[misc]
        except peers.unavailable:
            continue
    return HostMeasured(cell, 0, times)


def dry_session(
    cells: Iterable[Cell], device: torch.device | str, *, split_tokens: int | None = None
) -> tuple[list[Cell], Session]:
    """Every kind of cell in small, and a session that only checks answers: what works without a GPU."""
    small = [cell.shrunk() for cell in cells]
    return small, Session(small, device, split_tokens=split_tokens, timed=False)
