"""Decode of one long request on one GPU and over several: `python -m splitkv.bench.sharded --ranks 2`.

Starts one process per rank and lets each hold a contiguous shard of the request's tokens. A call is
`splitkv.distributed.decode`: attention of the own shard, one collective, the merge. Answers are checked against float64
before anything is timed, and a replay against the eager call, bit by bit. Without GPUs, small sizes are checked over
gloo and nothing is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import splitkv
from splitkv import _interpreter, distributed
from splitkv.bench import timing
from splitkv.bench.record import describe_run
from splitkv.bench.table import TextTable, markdown, show
from splitkv.config import align_up, cdiv

FORMAT = "splitkv-sharded/1"
PAGE_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
TOKENS = (2**20, 2**17)
SMALL = (200, 33)
PATIENCE = 120.0  # seconds that a rank waits for the others
ERROR = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
"""Most of ‖error‖₂ / ‖out‖₂ against float64: about what the dtype of out itself costs."""


@dataclass(frozen=True)
class Row:
    """One request over some ranks.

    Attributes:
        tokens, ranks: Its KV tokens, and among how many ranks they lie.
        us: Microseconds of a call, the slowest rank's; None where nothing was timed.
        one_us: Of `splitkv.decode` over all tokens on one GPU, in the same run.
        limit_us: Of a pure read of a rank's share of keys and values.
        error: ‖error‖₂ / ‖out‖₂ against float64, the largest of all ranks.
        replays_equal: Whether graph replays gave the bits of the eager call on every rank; None without graphs.
    """

    tokens: int
    ranks: int
    us: float | None
    one_us: float | None
    limit_us: float | None
    error: float
    replays_equal: bool | None

    @property
    def speedup(self) -> float | None:
        return None if self.us is None or self.one_us is None else self.one_us / self.us

    @property
    def fraction(self) -> float | None:
        """Of the limit."""
        return None if self.us is None or self.limit_us is None else self.limit_us / self.us


def share(tokens: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, count) of the tokens of a rank: whole pages, evenly.

    >>> share(100, 0, 2), share(100, 1, 2)
    ((0, 64), (64, 36))
    """
    each = align_up(cdiv(tokens, ranks), PAGE_SIZE)
    first = min(rank * each, tokens)
    return first, min(each, tokens - first)


def view(first: int, count: int, device: torch.device, dtype: torch.dtype) -> splitkv.PagedKV:
    """Tokens first … first + count of the request, in pages placed at random; every rank makes its own."""
    pages = max(cdiv(count, PAGE_SIZE), 1)
    generator = torch.Generator(device).manual_seed(1 + first)
    k, v = torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device, generator=generator)
    table = torch.randperm(pages, device=device, generator=generator).to(torch.int32)[None]
    return splitkv.PagedKV(k, v, table, torch.tensor([count], dtype=torch.int32, device=device), len_hint=count)


def whole(tokens: int, ranks: int, device: torch.device, dtype: torch.dtype) -> splitkv.PagedKV:
    """All shards on one device, in order."""
    parts = [view(*share(tokens, rank, ranks), device, dtype) for rank in range(ranks)]
    offsets = [sum(part.k.shape[0] for part in parts[:i]) for i in range(ranks)]
    table = torch.cat(
        [part.page_table[0, : cdiv(n, PAGE_SIZE)] + offset for part, offset, n in zip(
            parts, offsets, (share(tokens, rank, ranks)[1] for rank in range(ranks)), strict=True
        )]
    )  # fmt: skip
    k, v = torch.cat([part.k for part in parts]), torch.cat([part.v for part in parts])
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    return splitkv.PagedKV(k, v, table[None].contiguous(), lens, len_hint=tokens)


def partial(q: Tensor, kv: splitkv.PagedKV, count: int) -> Tensor:
    """[heads, width + 1] float64: output and log-sum-exp over a rank's own tokens, a KV head at a time."""
    group, rows = Q_HEADS // KV_HEADS, torch.zeros(Q_HEADS, HEAD_DIM + 1, dtype=torch.float64, device=q.device)
    rows[:, HEAD_DIM] = -torch.inf
    if count:
        pages = kv.page_table[0].long()
        for head in range(KV_HEADS):
            k, v = (cache[:, :, head][pages].flatten(0, 1)[:count].double() for cache in (kv.k, kv.v))
            mine = slice(head * group, (head + 1) * group)
            scores = q[0, mine].double() @ k.T * HEAD_DIM**-0.5
            rows[mine, :HEAD_DIM] = torch.softmax(scores, -1) @ v
            rows[mine, HEAD_DIM] = torch.logsumexp(scores, -1)
    return rows


def expected(q: Tensor, kv: splitkv.PagedKV, count: int, ranks: int) -> Tensor:
    """[heads, width] float64: the answer, from every rank's own."""
    mine = partial(q, kv, count)
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    rows = torch.stack(parts)
    weights = torch.softmax(rows[..., HEAD_DIM], 0)
    return (weights[..., None] * rows[..., :HEAD_DIM]).sum(0)


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    number = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number.item())


def together_us(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median microseconds per call over replays of a graph of calls, all ranks at once; of each the slowest rank's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(3):
        call()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    # As many calls on every rank, since each is a collective.
    calls = max(1, min(200, int(20.0 / max(slowest(begin.elapsed_time(end), device), 0.02))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for i in range(repeats + 2):
        dist.barrier()
        torch.cuda.synchronize(device)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        us = slowest(begin.elapsed_time(end) * 1e3 / calls, device)
        if i >= 2:
            times.append(us)
    return statistics.median(times)


def measure(tokens: int, rank: int, ranks: int, device: torch.device, repeats: int) -> Row:
    """One request over all ranks; every rank calls it and gets the same row."""
    timed, dtype = device.type == "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
    config = splitkv.WorkspaceConfig(1, Q_HEADS, KV_HEADS, HEAD_DIM, dtype=dtype)
    workspace = splitkv.Workspace.allocate(config, device)
    exchange = distributed.Exchange.allocate(config, device)
    q = torch.randn(1, Q_HEADS, HEAD_DIM, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
    first, count = share(tokens, rank, ranks)
    own = view(first, count, device, dtype)
    lens, starts = (torch.tensor([n], dtype=torch.int32, device=device) for n in (tokens, first))
    kv = own.shard(lens, starts=starts)
    right = expected(q, own, count, ranks)
    out = torch.empty(1, Q_HEADS, HEAD_DIM, dtype=dtype, device=device)

    def call() -> Tensor:
        return distributed.decode(q, kv, workspace, exchange, out=out)

    error = slowest(float((call()[0].double() - right).norm() / right.norm()), device)
    us = one_us = limit_us = None
    equal: bool | None = None
    if timed and error <= ERROR[dtype]:
        eager = out.clone()
        us = together_us(call, device, repeats)
        out.fill_(torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize(device)
        equal = slowest(float(not torch.equal(out, eager)), device) == 0
        del graph
        if rank == 0:
            halves = own.k.view(torch.int32).flatten()
            words = halves.as_strided((2 * halves.numel(),), (1,))  # keys and values lie in one stretch
            limit_us = timing.speed_of_light_us([words], repeats=repeats)
            both = own if ranks == 1 else whole(tokens, ranks, device, dtype)
            one = splitkv.decode(q, both, workspace)[0].double()
            if (one - right).norm() <= ERROR[dtype] * right.norm():
                one_us = timing.graph_time_us(
                    lambda i: splitkv.decode(q, both, workspace, out=out), 1, device, repeats=repeats
                )
            del both
        dist.barrier()
    row = Row(tokens, ranks, us, one_us, limit_us, error, equal)
    told: list[Row] = [row]
    dist.broadcast_object_list(told, src=0, device=device)
    return told[0]


def work(rank: int, ranks: int, store: str, device_type: str, tokens: tuple[int, ...], repeats: int, out: str) -> None:
    """What one process does; rank 0 leaves the rows in a file."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    more: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        more["device_id"] = device
    else:
        torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=patience, **more,
    )  # fmt: skip
    rows = []
    for n in tokens:
        rows.append(measure(n, rank, ranks, device, repeats))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        run = describe_run(device, f"CUDA graphs, median of {repeats} replays, of each the slowest rank's time")
        record = {"format": FORMAT, "run": run, "rows": [asdict(row) for row in rows]}
        Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def table(rows: list[Row]) -> TextTable:
    """One line per request."""

    def number(value: float | None, digits: int = 1) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    header = ("tokens", "ranks", "µs", "one GPU, µs", "faster", "limit, µs", "limit ÷ ours", "error", "replays")
    lines: list[tuple[str, ...]] = [
        (
            str(row.tokens), str(row.ranks), number(row.us), number(row.one_us), number(row.speedup, 2),
            number(row.limit_us), number(row.fraction, 2), f"{row.error:.1e}",
            "–" if row.replays_equal is None else "equal" if row.replays_equal else "differ",
        )
        for row in rows
    ]  # fmt: skip
    return TextTable("one request, its tokens over several GPUs", header, lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where an answer or a replay was wrong."""
    gpus = 0 if _interpreter.interpreting() else torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m splitkv.bench.sharded", description="Time one long request over several GPUs of this machine."
    )
    parser.add_argument("--ranks", type=int, default=max(gpus, 1), help="processes, one per GPU (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"of the request (default: {TOKENS}; on CPUs {SMALL})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--repeats", type=int, default=7, help="replays of which the median counts")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    parser.add_argument("--markdown", type=Path, default=None, help="also write the table there")
    options = parser.parse_args(arguments)
    tokens = tuple(options.tokens or (TOKENS if options.device == "cuda" else SMALL))
    if options.ranks < 1 or (options.device == "cuda" and options.ranks > gpus):
        parser.error(f"--ranks: expected 1…{gpus} (one GPU each), given {options.ranks}")
    if min(tokens) < 1 or options.repeats < 1:
        parser.error(f"--tokens, --repeats: expected numbers ≥ 1, given {min(*tokens, options.repeats)}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
            work,
            (options.ranks, str(Path(folder) / "store"), options.device, tokens, options.repeats, str(out)),
            nprocs=options.ranks,
        )
        record = json.loads(out.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in record["rows"]]
    shown = table(rows)
    show(shown)
    if options.device == "cpu":
        print("small sizes, answers only: nothing was timed")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(markdown(shown) + "\n", encoding="utf-8")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    wrong = [row for row in rows if not row.error <= ERROR[dtype] or row.replays_equal is False]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
