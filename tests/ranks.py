"""Processes of a torch.distributed group for tests, and what they run there.

Several tests share the processes, since starting one takes seconds: each is asked for one job after another.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import ints, no_synchronisation, view_of
from torch import Tensor

import splitkv
from splitkv import distributed
from splitkv.testing import PoisonedWorkspace, Problem, make_problem, same_bits

HOWS = ("contiguous", "round robin")
START = 60.0  # seconds that processes may take to start


class Failed(Exception):
    """A job raised on some rank; the message has its traceback.

    Attributes:
        answers: What the other ranks returned, by rank.
    """

    def __init__(self, message: str, answers: dict[int, Any]) -> None:
        super().__init__(message)
        self.answers = answers


class Ranks:
    """`count` processes of one group, and groups of the last n of them for every n.

    Args:
        count: Processes.
        folder: Where they meet, of their own.
        backend: "gloo" or "nccl".
        timeout: Seconds after which a collective gives up.
    """

    def __init__(self, count: int, folder: Path, backend: str = "gloo", timeout: float = 60.0) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, str(folder / "store"), backend, timeout, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        # No job before every rank is connected to every other: one that ends at once would break the others' start.
        for pipe in self._pipes:
            assert pipe.poll(START) and pipe.recv() == "connected"

    def ask(self, job: Callable[..., Any], *args: Any, size: int) -> list[Any]:
        """What job(group, rank, size, *args) returns on each rank of the group of `size`, or the exceptions' texts."""
        asked = self._pipes[len(self._pipes) - size :]
        for pipe in asked:
            pipe.send((job, size, args))
        answers = []
        for rank, pipe in enumerate(asked):
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionError):
                answers.append((False, f"rank {rank}: the process has ended"))
        failed = [text for fine, text in answers if not fine]
        if failed:
            raise Failed("\n".join(failed), {rank: answer for rank, (fine, answer) in enumerate(answers) if fine})
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, count: int, store: str, backend: str, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=datetime.timedelta(seconds=START)
    )  # fmt: skip
    groups = {n: dist.new_group(range(count - n, count), timeout=patience) for n in range(1, count + 1)}
    pipe.send("connected")
    while True:
        try:
            job, size, args = pipe.recv()
        except (EOFError, ConnectionError):
            break
        try:
            pipe.send((True, job(groups[size], rank - (count - size), size, *args)))
        except Exception:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)  # without waiting for ranks that a test has ended


# Shards.


def cuts_of(lens: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Where each request's contiguous shards begin, and the last ends: anywhere, so that some are empty."""
    rnd = random.Random(seed)
    return [[0, *sorted(rnd.choice((0, n, rnd.randint(0, n))) for _ in range(size - 1)), n] for n in lens]


def tokens_of(n: int, how: str, rank: int, size: int, cuts: Sequence[int]) -> list[int]:
    """The tokens of a sequence of n that a rank holds."""
    return list(range(rank, n, size)) if how == "round robin" else list(range(cuts[rank], cuts[rank + 1]))


def shard_of(
    k: Tensor,
    v: Tensor,
    lens: Sequence[int],
    how: str,
    rank: int,
    size: int,
    *,
    seed: int = 0,
    layout: str = "contiguous",
    kv_start: Sequence[int] | None = None,
) -> splitkv.kv.KVView:
    """A rank's shard of k and v [batch, max_len, heads, width]; kv_start counts tokens of whole sequences."""
    cuts = cuts_of(lens, size, seed)
    held = [tokens_of(n, how, rank, size, cuts[b]) for b, n in enumerate(lens)]
    longest = max(1, *map(len, held))
    own = []
    for cache in (k, v):
        part = cache.new_full((len(lens), longest, *cache.shape[2:]), math.nan)
        for b, tokens in enumerate(held):
            part[b, : len(tokens)] = cache[b, tokens]
        own.append(part)
    options = {}
    if kv_start is not None:
        hidden = [sum(token < start for token in tokens) for tokens, start in zip(held, kv_start, strict=True)]
        options["kv_start"] = ints(hidden, k.device)
    kv = view_of(layout, *own, [len(tokens) for tokens in held], **options)
    totals = ints(list(lens), k.device)
    if how == "round robin":
        return kv.shard(totals, rank=rank, size=size)
    return kv.shard(totals, starts=ints([cut[rank] for cut in cuts], k.device))


def problem_to_shard(seed: int, device: torch.device | str = "cpu", **choices: Any) -> Problem:
    """A problem over one contiguous cache, row b for request b."""
    fixed: dict[str, Any] = dict(kind="contiguous", clamped=False, rows=False, cache=None, k_scale=None, v_scale=None)
    return make_problem(seed, device=device, **{**fixed, **choices})


def shard_of_problem(problem: Problem, how: str, rank: int, size: int, layout: str) -> splitkv.kv.KVView:
    kv = problem.kv
    starts = None if kv.kv_start is None else kv.kv_start[: len(problem.lens)].tolist()
    return shard_of(kv.k, kv.v, problem.lens, how, rank, size, seed=problem.seed, layout=layout, kv_start=starts)


# Jobs.


def of_problem(
    group: dist.ProcessGroup, rank: int, size: int, seed: int, choices: dict[str, Any], how: str, layout: str,
    by_heads: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of a problem whose cache is sharded, and nothing but that written."""
    problem = problem_to_shard(seed, **choices)
    kv = shard_of_problem(problem, how, rank, size, layout)
    scratch = PoisonedWorkspace(problem.config, "cpu")
    exchange = distributed.Exchange.allocate(problem.config, "cpu", group, by_heads=by_heads)
    assert (exchange.rank, exchange.size) == (rank, size)
    exchange.sent.fill_(math.nan)
    exchange.received.fill_(math.nan)
    heads = problem.q.shape[-2] // (size if by_heads else 1)
    shape = (*problem.q.shape[:-2], heads)
    rules = dict(problem.rules, lse=torch.full(shape, math.nan))
    if by_heads:
        rules["out"] = torch.full((*shape, problem.kv.head_dim_v), math.nan, dtype=problem.q.dtype)
    out = distributed.decode(problem.q, kv, scratch.workspace, exchange, **rules)
    assert out is rules["out"] if by_heads else out.data_ptr() == scratch.workspace.out.data_ptr()
    scratch.check_guards()
    return out.clone(), rules["lse"]


def of_probes(
    group: dist.ProcessGroup, rank: int, size: int, how: str, probes: Sequence[tuple[Sequence[int], dict[str, Any]]]
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of index probes, each of given lengths and rules: k = 0, v[j] = j, or with "v" = 1 always 1."""
    results = []
    for lens, given in probes:
        rules = dict(given)
        heads, ones = rules.pop("heads", 2), rules.pop("ones", False)
        k = torch.zeros(len(lens), max(1, *lens), 1, 16)
        v = k + 1 if ones else k + torch.arange(k.shape[1])[:, None, None]
        kv = shard_of(k, v, lens, how, rank, size, seed=sum(lens), layout="paged")
        q = torch.randn(len(lens), *rules.pop("q_len", ()), heads, 16)
        total = q.shape[:-2].numel()
        config = splitkv.WorkspaceConfig(len(lens), heads, 1, 16, max_total_q=total, dtype=torch.float32)
        exchange = distributed.Exchange.allocate(config, "cpu", group)
        lse = torch.full(q.shape[:-1], math.nan)
        workspace = PoisonedWorkspace(config, "cpu").workspace
        out = distributed.decode(q, kv, workspace, exchange, sm_scale=1.0, lse=lse, **rules)
        results.append((out.clone(), lse))
    return results


def with_lengths_that_do_not_add_up(group: dist.ProcessGroup, rank: int, size: int) -> str:
    """The message of debug mode where the last rank holds a token too few."""
    os.environ["SPLITKV_DEBUG"] = "1"
    try:
        config = splitkv.WorkspaceConfig(2, 2, 1, 16, dtype=torch.float32)
        totals = ints([6, 8], torch.device("cpu"))
        k = torch.randn(2, 8, 1, 16)
        lens = distributed.round_robin_lens(totals, rank, size)
        lens[1] -= int(rank == size - 1)
        kv = splitkv.ContiguousKV(k, k, lens).shard(totals, rank=rank, size=size)
        workspace = splitkv.Workspace.allocate(config, "cpu")
        exchange = distributed.Exchange.allocate(config, "cpu", group)
        try:
            distributed.decode(torch.randn(2, 2, 16), kv, workspace, exchange)
        except ValueError as error:
            return str(error)
        return "nothing was raised"
    finally:
        del os.environ["SPLITKV_DEBUG"]


def where_a_rank_is_missing(group: dist.ProcessGroup, rank: int, size: int, how: str) -> tuple[str, str, float]:
    """(type, module, seconds) of what the first rank gets when the last has ended, or stays away."""
    if rank == size - 1:
        if how == "ended":
            os._exit(3)
        return "", "", 0.0
    config = splitkv.WorkspaceConfig(1, 2, 1, 16, dtype=torch.float32)
    totals = ints([6], torch.device("cpu"))
    k = torch.randn(1, 8, 1, 16)
    kv = splitkv.ContiguousKV(k, k, distributed.round_robin_lens(totals, rank, size))
    workspace = splitkv.Workspace.allocate(config, "cpu")
    exchange = distributed.Exchange.allocate(config, "cpu", group)
    begin = time.monotonic()
    try:
        distributed.decode(torch.randn(1, 2, 16), kv.shard(totals, rank=rank, size=size), workspace, exchange)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing was raised", "", time.monotonic() - begin


# Jobs on GPUs.


def of_graphs(group: dist.ProcessGroup, rank: int, size: int, how: str, by_heads: bool) -> list[Any]:
    """Replays of a captured call against eager ones, for one set of lengths after another: their results.

    The tensors live on this rank's device while another is current.
    """
    there = torch.device("cuda", rank)
    torch.cuda.set_device((rank + 1) % size)
    generator = torch.Generator().manual_seed(1)
    batch, heads, kv_heads, width, longest = 4, 16, 4, 128, 600
    k, v = torch.randn(2, batch, longest, kv_heads, width, generator=generator).bfloat16().to(there)
    q = torch.randn(batch, heads, width, generator=generator).bfloat16().to(there)
    sinks = torch.randn(heads, generator=generator).to(there)
    config = splitkv.WorkspaceConfig(batch, heads, kv_heads, width)
    workspace = PoisonedWorkspace(config, there).workspace
    exchange = distributed.Exchange.allocate(config, there, group, by_heads=by_heads)
    every = [[600, 600, 600, 600], [600, 0, 1, 17], [2, 3, 599, 300]]

    def contents(lens: list[int]) -> Any:
        return shard_of(k, v, lens, how, rank, size, layout="contiguous")

    capacity = max(contents(lens).k.shape[1] for lens in every)
    held = splitkv.ContiguousKV(
        *(k.new_zeros(batch, capacity, kv_heads, width) for _ in range(2)), ints([0] * batch, there)
    )
    totals, starts = ints([0] * batch, there), ints([0] * batch, there)
    kv = held.shard(totals, rank=rank, size=size) if how == "round robin" else held.shard(totals, starts=starts)

    def write(lens: list[int]) -> None:
        found = contents(lens)
        held.k[:, : found.k.shape[1]], held.v[:, : found.v.shape[1]] = found.k, found.v
        held.seq_lens.copy_(found.seq_lens)
        totals.copy_(ints(lens, there))
        if found.positions is not None and found.positions.starts is not None:
            starts.copy_(found.positions.starts)

    def call(out: Tensor, lse: Tensor) -> None:
        distributed.decode(q, kv, workspace, exchange, window_left=400, sinks=sinks, out=out, lse=lse)

    share = heads // size if by_heads else heads
    out, lse = q.new_empty(batch, share, width), torch.empty(batch, share, device=there)
    again, lse_again = torch.empty_like(out), torch.empty_like(lse)
    write(every[0])
    call(out, lse)  # sets up communication, and compiles
    torch.cuda.synchronize(there)
    with torch.cuda.device(there):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(out, lse)
    results = []
    for lens in every:
        write(lens)
        for tensor in (out, lse, again, lse_again):
            tensor.fill_(math.nan)
        call(again, lse_again)
        torch.cuda.synchronize(there)
        graph.replay()
        torch.cuda.synchronize(there)
        assert same_bits(out, again) and same_bits(lse, lse_again), lens
        results.append((lens, out.cpu(), lse.cpu()))
    before = torch.cuda.memory_stats(there)["allocation.all.allocated"]
    with no_synchronisation():
        call(out, lse)
    assert torch.cuda.memory_stats(there)["allocation.all.allocated"] == before
    assert torch.cuda.current_device() == (rank + 1) % size
    return [(q.cpu(), k.cpu(), v.cpu(), sinks.cpu()), results]


def all_ways(sizes: Sequence[int]) -> list[tuple[int, str]]:
    return list(itertools.product(sizes, HOWS))
