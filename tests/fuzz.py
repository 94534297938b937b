"""Whole decode problems from integer seeds, each checked for all that a call promises: on a GPU thousands a minute.

    python tests/fuzz.py --problems 20000 --seed 0 --processes 16 --json fuzz.json
    python tests/fuzz.py --replay 1234
    python tests/fuzz.py --compile-only --problems 256 --arch cuda:90

A seed means one problem. What kernels are compiled for (dtypes, widths, kind of view, rules) is its form, and 256
forms serve 65,536 seeds in a row: seed, seed + 256, seed + 512 … are values, lengths, tables, strides and garbage for
one form. Seeds from the next multiple of 65,536 on have other forms. Without a GPU, or with --small, sizes are such as
Triton's interpreter can take.

Each answer is computed again in float64 on the CPU and held against the error budget; every problem has guards around
its outputs and its workspace, which are full of NaN or garbage, and some are called again and looked at more closely.

A long run says every few seconds how far it is and writes what it found so far to the --json file, so that one that is
cut short leaves its counts.

With --compile-only nothing is run: what the calls would launch on a GPU that need not be here is compiled for it, and
must take no more shared memory than it has, and than was expected when tiles were chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import queue
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__" and "--compile-only" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton

import splitkv  # isort: skip # before anything imports triton: without a GPU it chooses the interpreter

import torch
import triton
from compiling import GPUS, Gpu, compile_launch, signature_of
from torch import Tensor

from splitkv import api, reference
from splitkv.config import DTYPES, QUANTIZED_DTYPES
from splitkv.testing import Expected, Guarded, PoisonedWorkspace, Problem, make_problem, same_bits, same_computation

FORMS = 256
BLOCK = 65536
"""So many seeds in a row share a pool of FORMS forms."""

FACES: dict[str, tuple[Any, ...]] = {
    "dtype": (*DTYPES, torch.bfloat16),
    "kind": ("paged", "paged", "paged", "csr", "contiguous", "ragged", "latent"),
    "alias_v": (False, False, False, True),
    "num_kv_heads": (1, 1, 2, 3, 8),
    "group_size": (1, 2, 3, 4, 5, 7, 8, 16, 24),
    "head_dim": (1, 16, 24, 59, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320, 576),
    "head_dim_v": (None, None, None, None, 16, 40, 72, 128),
    "page_size": (1, 3, 16, 16, 32, 64, 128),
    "rows": (False, True),
    "kv_start": (False, False, False, True),
    "query": ("one", "one", "several", "ragged"),
    "q_len": (1, 2, 3, 5, 17, 40),
    "mask": ("causal", "causal", "causal", "full", "tree"),
    "sinks": (None, None, None, "float32", "same"),
    "alibi": (False, False, False, True),
    "num_splits": (None, None, None, None, 1, 3, 8),
    "split_tokens": (None, None, None, 7, 16, 64),
    "max_parts": (1, 3, 32),
    "q_tile_rows": (None, None, 16, 64, 128),
    "cache": (None, None, None, *QUANTIZED_DTYPES[:3]),
    "k_scale": ("number", "tensor", "head", "token"),
    "v_scale": ("number", "tensor", "head", "token"),
}
"""What a form decides of a problem's choices, see `make_problem`."""

MORE_FACES: dict[str, tuple[Any, ...]] = {
    "window": (False, False, True),
    "softcap": (False, False, False, True),
    "kv_rows": ("aligned", "aligned", "odd"),
    "q_rows": ("aligned", "aligned", "odd"),
    "most_requests": (1, 4, 16, 16, 64, 300),
    "len_hint": (None, None, 0, 200, 10**6),
    "listed": (False, False, True),
    "shared": (False, False, True),
    "out": ("workspace", "workspace", "given", "odd", "float32"),
}
"""What else it decides: whether there is a window or a cap; whether rows of the caches and of q are aligned; how many
requests there may be; what is hinted; whether the view has a work list, and whether pages that requests have in common
are attended together, where that can be; and where the outputs go."""

ALIGNED_STRIDES = ("contiguous", "padded", "transposed")
ELEMENTS = 1 << 21
"""Most numbers of a cache, so that drawing them does not take longer than all else."""

TELL_EVERY = 10.0
"""Seconds after which a run says again how far it is."""
KEPT_BYTES = 2**31  # of a GPU's memory that one of many processes keeps between two problems
TRIES = 4  # of a problem for which other processes left no memory


@dataclasses.dataclass(frozen=True)
class Form:
    """What kernels are compiled for.

    Attributes:
        choices: Choices of `make_problem`.
        more: One option of each of MORE_FACES.
    """

    choices: dict[str, Any]
    more: dict[str, Any]

    @classmethod
    def of(cls, seed: int, small: bool) -> Form:
        """That of a seed's problem."""
        number = seed // BLOCK * FORMS + seed % FORMS
        draw = random.Random(f"form {number}")
        choices = {name: draw.choice(options) for name, options in FACES.items()}
        more = {name: draw.choice(options) for name, options in MORE_FACES.items()}
        if choices["head_dim"] > 128 or more["most_requests"] > 16:
            choices["num_kv_heads"] = min(choices["num_kv_heads"], 2)
        if choices["kind"] == "latent" and draw.random() < 0.5:
            choices["head_dim"], choices["head_dim_v"] = 576, 512
        if small:
            for name, most in (("num_kv_heads", 2), ("group_size", 5), ("head_dim", 128), ("q_len", 5)):
                choices[name] = min(choices[name], most)
            more["most_requests"] = min(more["most_requests"], 3)
        if more["most_requests"] > 16:
            choices["q_len"] = min(choices["q_len"], 3)
        return cls(choices, more)

    @property
    def shares_prefix(self) -> bool:
        """Whether keys that requests have in common are attended for all of them at once."""
        return bool(self.more["shared"]) and self.choices["kind"] in ("paged", "csr")


def problem_of(seed: int, device: torch.device | str, small: bool) -> Problem:
    """The problem of a seed, the same on any device."""
    form = Form.of(seed, small)
    c, more, draw = dict(form.choices), form.more, random.Random(f"{seed} sizes")
    most = more["most_requests"]
    # Requests of one form are scanned in blocks of one size: 1, 16, 64 or 256.
    c["batch"] = most if most == 1 else draw.randint({4: 2, 16: 2, 64: 17, 300: 65}.get(most, 2), most)
    if form.shares_prefix:
        c["batch"] = max(c["batch"], 2)
    width = c["head_dim"] + (c["head_dim_v"] or c["head_dim"])
    longest = draw.choice((1, 60)) if small else draw.choice((1, 37, 140, 140, 140, 140, 600, 2500, 9000))
    room = ELEMENTS // (c["batch"] * c["num_kv_heads"] * width)
    c["max_len"] = draw.randint(1, max(1, min(longest, room)))
    for rows, strides in (("kv_rows", "kv_strides"), ("q_rows", "q_strides")):
        # Rows padded by 8 elements of one byte would not be aligned.
        aligned = [how for how in ALIGNED_STRIDES if how != "padded" or rows == "q_rows" or c["cache"] is None]
        c[strides] = draw.choice(aligned) if more[rows] == "aligned" else "odd"
    c["window_left"] = draw.choice((0, 3, 50, 500)) if more["window"] else None
    c["softcap"] = draw.choice((1.5, 50.0)) if more["softcap"] else None
    if form.shares_prefix:
        c["shared_pages"] = True
    problem = make_problem(seed, device=device, **c)
    if form.shares_prefix:
        # Both passes' partials and the results of whole tiles find room in it.
        tiles = problem.config.max_q_tiles * problem.config.num_kv_heads * 3 * max(c["num_splits"] or c["max_parts"], 3)
        config = dataclasses.replace(problem.config, max_splits=max(problem.config.max_splits, tiles, 1500))
        problem = dataclasses.replace(problem, config=config)
    return problem


def hinted(problem: Problem, form: Form) -> splitkv.kv.KVView:
    """The problem's view with the form's hints: a typical length, and a work list that is up to date, stale or new."""
    kv = problem.kv
    listed = form.more["listed"] and not form.shares_prefix
    if form.more["len_hint"] is None and not listed:
        return kv
    schedule = splitkv.Schedule.allocate(problem.config, kv.device) if listed else None
    hints: dict[str, Any] = dict(len_hint=form.more["len_hint"], schedule=schedule, kv_start=kv.kv_start)
    if isinstance(kv, splitkv.LatentKV):
        view: Any = splitkv.LatentKV(
            kv.cache, kv.page_table, kv.seq_lens, head_dim_v=kv.head_dim_v, rows=kv.rows, scale=kv.scale, **hints
        )
    else:
        hints |= dict(k_scale=kv.k_scale, v_scale=kv.v_scale)
        if isinstance(kv, splitkv.RaggedKV):
            view = splitkv.RaggedKV(kv.k, kv.v, kv.kv_indptr, **hints)
        elif isinstance(kv, splitkv.ContiguousKV):
            view = splitkv.ContiguousKV(kv.k, kv.v, kv.seq_lens, rows=kv.rows, **hints)
        elif hasattr(kv, "page_indptr"):
            view = splitkv.PagedKV.from_csr(
                kv.k, kv.v, kv.page_indptr, kv.page_indices, kv.last_page_len, layout=kv.layout, **hints
            )
        else:
            view = splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, rows=kv.rows, layout=kv.layout, **hints)
    if schedule is not None:
        draw = random.Random(f"{problem.seed} list")
        age = draw.choice(("new", "fresh", "fresh", "stale"))
        if age == "fresh":
            schedule.update(view, len(problem.lens))
        elif age == "stale":
            # The list of a step with other requests of other lengths.
            batch = draw.randint(0, problem.config.max_batch_size)
            lens = torch.tensor([draw.choice((0, 1, 300, 20000)) for _ in range(batch)], dtype=torch.int32)
            cache = torch.zeros(1, 1, 1, 1, device=kv.device).expand(batch, 20000, 1, 1)
            schedule.update(splitkv.ContiguousKV(cache, cache, lens.to(kv.device)), batch)
    return view


def groups_of(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """(group_ids, prefix_lens) of a problem whose requests have pages in common: some in some groups."""
    draw = random.Random(f"{problem.seed} groups")
    batch, size = len(problem.lens), problem.choices["page_size"]
    common = [min(problem.lens[0] // size, n // size) * size for n in problem.lens]
    ids = [draw.choice((0, 0, 0, batch - 1, -1, batch)) for _ in range(batch)]
    prefix = [draw.choice((n, n, n, draw.randint(0, n), 0)) for n in common]
    group_ids, prefix_lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in (ids, prefix))
    return group_ids, prefix_lens


class Call:
    """A problem's decode call into poisoned memory between guards."""

    def __init__(self, problem: Problem, form: Form, poison: str) -> None:
        self.problem, self.form = problem, form
        device = problem.q.device
        self.scratch = PoisonedWorkspace(problem.config, device, poison, problem.seed)
        self.kv = hinted(problem, form)
        where, shape = form.more["out"], (*problem.q.shape[:-1], problem.kv.head_dim_v)
        self.given: list[Guarded] = []
        self.rules = dict(problem.rules)
        if where != "workspace" or form.shares_prefix:
            dtype = torch.float32 if where == "float32" else problem.q.dtype
            odd = where == "odd"
            out = Guarded(shape, dtype, device, padding=3 if odd else 8, shift=int(odd))
            lse = Guarded(shape[:-1], torch.float32, device, padding=problem.seed % 3, step=1 + int(odd))
            self.given = [out, lse]
            self.rules |= dict(out=out.tensor, lse=lse.tensor)
        self.groups = groups_of(problem, device) if form.shares_prefix else None

    def run(self) -> tuple[Tensor, Tensor]:
        """Copies of (out, lse) on the CPU."""
        q, workspace = self.problem.q, self.scratch.workspace
        if self.groups is not None:
            out = splitkv.decode_shared_prefix(q, self.kv, workspace, *self.groups, **self.rules)
            lse = self.rules["lse"]
        else:
            out, lse = splitkv.decode_with_lse(q, self.kv, workspace, **self.rules)
        return out.to("cpu", copy=True), lse.to("cpu", copy=True)

    def plan(self) -> api.Plan:
        """What `run` would launch."""
        rules = dict(self.rules)
        if self.groups is not None:
            rules |= dict(zip(("group_ids", "prefix_lens"), self.groups, strict=True))
        return api.plan_decode(self.problem.q, self.kv, self.scratch.workspace, want_lse=True, **rules)

    def check_memory(self) -> None:
        """Raise AssertionError where anything but outputs and scratch was written."""
        self.scratch.check_guards()
        for guarded in self.given:
            guarded.check_guards()

    def check_rows(self) -> None:
        """Raise AssertionError unless exactly the call's rows of the workspace's outputs were written."""
        rows = math.prod(self.problem.q.shape[:-1])
        for name, width in (("out", self.problem.kv.head_dim_v), ("lse", 1)):
            count = 0 if self.given else rows * width
            written = self.scratch.written(name).flatten()
            if not bool(written[:count].all()) or bool(written[count:].any()):
                raise AssertionError(f"workspace.{name}: expected its first {count} elements written, no others")


def expected_of(problem: Problem, out: Tensor, lse: Tensor) -> tuple[float, float]:
    """Errors of the results as shares of the error budget.

    The budget of `splitkv.testing.expect` takes the largest error over several orders of summation: one is enough for
    nearly all answers, and the others are looked at for the rest only.
    """
    exact = reference.decode_with_lse(problem.q, problem.kv, dtype=torch.float64, **problem.rules)
    wide = problem.q.dtype == torch.float32
    same = same_computation(problem.q, problem.kv, 0, **problem.rules)[0]
    tolerance = 1e-5 if wide else 1e-2
    quick = Expected.of(*exact, [same], lse_absolute=tolerance, lse_relative=tolerance if wide else 0.0)
    ratios = quick.error_ratio(out), quick.lse_error_ratio(lse)
    if max(ratios) <= 1:
        return ratios
    expected = problem.expected()
    expected.check(out, lse)
    return expected.error_ratio(out), expected.lse_error_ratio(lse)


def check(seed: int, device: torch.device, small: bool) -> tuple[float, float]:
    """Check all that a seed's call promises; its errors as shares of the error budget.

    Raises:
        AssertionError: a promise is not kept.
        Exception: whatever else went wrong; a refusal too, since every problem is one that decode accepts.
    """
    form = Form.of(seed, small)
    problem = problem_of(seed, device, small)
    closely = seed // FORMS % 4 == seed % 4
    poison = random.Random(f"{seed} poison").choice(("nan", "nan", "zero", "garbage" if small else "nan"))
    before = {name: tensor.clone() for name, tensor in problem.inputs().items()} if closely else {}
    call = Call(problem, form, poison)
    out, lse = call.run()
    call.check_memory()
    on_cpu = problem if device.type == "cpu" else problem_of(seed, "cpu", small)
    ratios = expected_of(on_cpu, out, lse)
    if closely:
        if poison == "nan":
            call.check_rows()
        for name, tensor in problem.inputs().items():
            if not same_bits(tensor, before[name]):
                raise AssertionError(f"{name}: expected no change of an input, given one that was written")
        # Again over what the first left, and elsewhere over something else.
        for again in (call, Call(problem, form, "zero")):
            for name, first, second in zip(("out", "lse"), (out, lse), again.run(), strict=True):
                if not same_bits(first, second):
                    raise AssertionError(f"{name}: expected the same bits of a call repeated, given others")
            again.check_memory()
    return ratios


# Without a GPU.


REFUSALS = ("q: ", "kv: ", "head_dim: ")
"""How refusals begin for what a GPU lacks: numbers, or memory for wide rows."""


def launches_of(seed: int, gpu: Gpu) -> list[api.Launch]:
    """What the call of a seed's problem, and the update of its work list, would launch on a GPU.

    Raises:
        TypeError, ValueError: the call is refused.
    """
    with (
        mock.patch.object(splitkv.tiles.Target, "of", lambda _: gpu.target),
        mock.patch.object(splitkv._interpreter, "why_not", lambda _: None),
        mock.patch.object(splitkv.Schedule, "update"),
    ):
        problem = problem_of(seed, "cpu", False)
        call = Call(problem, Form.of(seed, False), "zero")
        found = list(call.plan().launches)
        if call.kv.schedule is not None:
            found.append(call.kv.schedule._plan(call.kv, len(problem.lens)))
    return found


def compile_only(
    seeds: Sequence[int], arch: str, seconds: float = math.inf, tell: Callable[[Report], None] | None = None
) -> Report:
    """Compile what these seeds' problems would launch on a GPU, each kernel once.

    Args:
        seeds: Of problems of full size.
        arch: A key of GPUS.
        seconds: Time after which no more are begun.
        tell: Called now and then with what was found so far.
    """
    report, seen, gpu = Report(), set(), GPUS[arch]
    with report.watching_compiler():
        for seed in report.in_time(seeds, seconds, tell):
            ratios = None
            try:
                for launch in launches_of(seed, gpu):
                    form = f"{launch.kernel.__name__} {signature_of(launch)} {launch.num_warps} {launch.max_registers}"
                    if form not in seen:
                        seen.add(form)
                        check_launch(launch, gpu)
                ratios = 0.0, 0.0
            except Exception as error:
                # Problems are such as a Hopper accepts; what another lacks is refused, and no failure.
                refused = isinstance(error, (TypeError, ValueError)) and str(error).startswith(REFUSALS)
                if not refused or arch == "cuda:90":
                    report.failures.append((seed, describe(seed, f" --compile-only --arch {arch}", error)))
                    print(report.failures[-1][1], file=sys.stderr, flush=True)
            report.count(seed, False, ratios)
    return report


def check_launch(launch: api.Launch, gpu: Gpu) -> None:
    """Raise AssertionError for a kernel that takes more shared memory than there is, or than tiles were chosen for."""
    used = compile_launch(launch, gpu, 0)
    room = min(gpu.target.shared_memory, used.estimate or gpu.target.shared_memory)
    if used.shared > room:
        raise AssertionError(f"{used.kernel}: expected at most {room} bytes of shared memory, given {used.shared}")


# Many of them.


@dataclasses.dataclass
class Report:
    """What a run found.

    Attributes:
        problems: That were checked.
        seconds: That it took.
        failures: (seed, what was wrong).
        worst: By dtype and cache dtype, the largest errors of out and lse as shares of the error budget.
        kinds: Problems by kind of view, dtype, cache dtype, query and rules.
        unchecked: Seeds that were to be checked and were not, since time was up or a process had died.
        compiled: Kernels that were compiled, and not found in Triton's cache; in all processes together.
        compile_seconds: That it took, likewise.
    """

    problems: int = 0
    seconds: float = 0.0
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    worst: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    unchecked: int = 0
    compiled: int = 0
    compile_seconds: float = 0.0

    def in_time(
        self, seeds: Sequence[int], seconds: float, tell: Callable[[Report], None] | None = None
    ) -> Iterator[int]:
        """These seeds until time is up; keeps the time, and calls `tell` every TELL_EVERY seconds."""
        start = told = time.perf_counter()
        for seed in seeds:
            now = time.perf_counter()
            self.seconds, self.unchecked = now - start, len(seeds) - self.problems
            if self.seconds > seconds:
                return
            if tell is not None and now - told > TELL_EVERY:
                told = now
                tell(self)
            yield seed
        self.seconds, self.unchecked = time.perf_counter() - start, len(seeds) - self.problems

    @contextlib.contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Counts what Triton compiles meanwhile."""

        def listener(*, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                self.compiled += 1
                self.compile_seconds += times.total / 1e6

        knobs = triton.knobs.compilation
        before, knobs.listener = knobs.listener, listener
        try:
            yield
        finally:
            knobs.listener = before

    def count(self, seed: int, small: bool, ratios: tuple[float, float] | None) -> None:
        """Add a problem with its errors, or None where it failed."""
        form = Form.of(seed, small)
        c, more = form.choices, form.more
        dtype, cache = (str(each).removeprefix("torch.") for each in (c["dtype"], c["cache"] or c["dtype"]))
        self.problems += 1
        self.kinds.update([c["kind"], dtype, f"cache {cache}", f"query {c['query']}", f"mask {c['mask']}"])
        self.kinds.update(name for name in ("window", "softcap", "listed") if more[name])
        self.kinds.update(name for name in ("sinks", "alibi", "kv_start", "num_splits", "split_tokens") if c[name])
        self.kinds["shared prefix"] += form.shares_prefix
        if ratios is not None:
            worst = self.worst.setdefault(f"{dtype} over {cache}", [0.0, 0.0])
            worst[:] = map(max, worst, ratios)

    def add(self, other: Report) -> None:
        """Add another's problems."""
        self.problems += other.problems
        self.failures += other.failures
        self.kinds += other.kinds
        self.compiled += other.compiled
        self.compile_seconds += other.compile_seconds
        for name, ratios in other.worst.items():
            self.worst[name] = [*map(max, self.worst.get(name, [0.0, 0.0]), ratios)]


def run(
    seeds: Sequence[int],
    device: torch.device,
    small: bool,
    seconds: float = math.inf,
    tell: Callable[[Report], None] | None = None,
) -> Report:
    """Check these seeds here, one after another; stops where the device no longer answers.

    Args:
        seconds: Time after which no more are begun.
        tell: Called now and then with what was found so far.
    """
    report = Report()
    with report.watching_compiler():
        for seed in report.in_time(seeds, seconds, tell):
            ratios = None
            try:
                ratios = patiently(check, seed, device, small)
            except Exception as error:
                report.failures.append((seed, describe(seed, " --small" if small else "", error)))
                print(report.failures[-1][1], file=sys.stderr, flush=True)
            report.count(seed, small, ratios)
            if report.failures and not answers(device):
                report.unchecked = len(seeds) - report.problems
                break
    return report


def patiently(check: Callable[..., Any], seed: int, device: torch.device, small: bool, pause: float = 2.0) -> Any:
    """Check a seed, and again after a pause where other processes had taken all of the GPU's memory."""
    tries = 0
    while True:
        tries += 1
        try:
            return check(seed, device, small)
        except RuntimeError as error:  # PyTorch's, or of a kernel that finds no room to be loaded
            if tries == TRIES or "out of memory" not in str(error):
                raise
        finally:
            # What one problem leaves cached would be missing to the others.
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > KEPT_BYTES:
                torch.cuda.empty_cache()
        time.sleep(pause)


def answers(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal access a process gets nothing from a GPU any more."""
    try:
        return bool(torch.ones(1, device=device).cpu() == 1)
    except Exception:
        return False


def describe(seed: int, how: str, error: Exception) -> str:
    """A failure with all that replays it, of which `how` are the options."""
    small = "--small" in how
    try:
        problem = repr(problem_of(seed, "cpu", small))
    except Exception as fault:
        problem = f"the problem itself cannot be made: {fault!r}"
    more = Form.of(seed, small).more
    what = str(error) if isinstance(error, AssertionError) else "".join(traceback.format_exception(error)).rstrip()
    return f"{what}\n  {problem}\n  {more}\n  python tests/fuzz.py --replay {seed}{how}"


def work(tasks: Any, results: Any, current: Any, device_index: int | None, small: bool) -> None:
    """A process: check the seeds of one task after another, and say after each what was found."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if device_index is None else torch.device("cuda", device_index)
    while True:
        try:
            seeds = tasks.get(timeout=1)
        except queue.Empty:
            return
        for seed in seeds:
            current.value = seed
            found = run([seed], device, small)
            results.put(found)
            if found.failures and not answers(device):
                return


def run_everywhere(
    seeds: Sequence[int],
    processes: int,
    small: bool,
    seconds: float,
    patience: float = 300,
    tell: Callable[[Report], None] | None = None,
) -> Report:
    """Check these seeds in so many processes, those of a form in one of them, over all GPUs.

    Args:
        seconds: Time after which the processes are ended.
        patience: Seconds after which a process that says nothing is ended, and its seed counts as failed.
        tell: Called now and then with what was found so far.
    """
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    tasks.cancel_join_thread()  # what is left of them when time is up is read by nobody
    by_form: dict[tuple[int, int], list[int]] = {}
    for seed in seeds:
        by_form.setdefault((seed // BLOCK, seed % FORMS), []).append(seed)
    for same_form in by_form.values():
        tasks.put(same_form)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    report, start = Report(), time.perf_counter()
    deadline = start + seconds
    workers: list[tuple[Any, Any]] = []

    def add_worker(index: int) -> None:
        current = context.Value("q", -1)
        arguments = (tasks, results, current, index % gpus if gpus else None, small)
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        workers.append((process, current))

    for index in range(min(processes, len(by_form))):
        add_worker(index)
    heard = told = time.perf_counter()

    def update() -> None:
        report.seconds = time.perf_counter() - start
        report.unchecked = len(seeds) - report.problems

    while report.problems < len(seeds) and time.perf_counter() < deadline:
        try:
            found = results.get(timeout=1)
        except queue.Empty:
            dead = [(process, current) for process, current in workers if not process.is_alive()]
            silent = time.perf_counter() - heard > patience
            for process, current in dead:
                workers.remove((process, current))
                if process.exitcode:
                    report.failures.append((current.value, f"the process ended with exit status {process.exitcode}"))
            if silent:
                report.failures += [(current.value, f"no answer in {patience:g} s") for _, current in workers]
            if silent or not workers:
                if not workers and not tasks.empty() and not silent:
                    add_worker(0)
                    continue
                break
            continue
        heard = time.perf_counter()
        report.add(found)
        if tell is not None and heard - told > TELL_EVERY:
            told = heard
            update()
            tell(report)
    for process, _ in workers:
        process.terminate()
    for process, _ in workers:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    update()
    return report


def summary(report: Report, options: argparse.Namespace) -> dict[str, Any]:
    """A report as JSON."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict(
        problems=report.problems,
        unchecked=report.unchecked,
        failures=[dict(seed=seed, text=text) for seed, text in report.failures],
        seconds=round(report.seconds, 1),
        problems_per_second=round(report.problems / max(report.seconds, 1e-9), 1),
        compiled=report.compiled,
        compile_seconds=round(report.compile_seconds, 1),
        seed=options.seed,
        processes=options.processes,
        small=options.small,
        worst_error_over_budget={name: [round(x, 3) for x in pair] for name, pair in sorted(report.worst.items())},
        kinds=dict(sorted(report.kinds.items())),
        gpu=gpu,
        torch=torch.__version__,
        triton=triton.__version__,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check decode on whole problems that are drawn from integer seeds.")
    parser.add_argument("--problems", type=int, default=1000, help="how many, seeds in a row")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed")
    parser.add_argument("--processes", type=int, default=1, help="1: in this one")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after this time")
    parser.add_argument("--small", action="store_true", help="small sizes, as always without a GPU")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--replay", type=int, metavar="SEED", help="check this seed alone, and print its problem")
    parser.add_argument("--compile-only", action="store_true", help="compile what would be launched, and run nothing")
    parser.add_argument("--arch", choices=GPUS, help="the GPU that --compile-only is for (cuda:90)")
    options = parser.parse_args(arguments)
    if options.compile_only and (options.small or options.processes > 1):
        parser.error("--compile-only: expected neither --small nor --processes")
    if options.arch and not options.compile_only:
        parser.error("--arch: expected --compile-only too")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.small = options.small or (device.type == "cpu" and not options.compile_only)
    seeds: Sequence[int] = range(options.seed, options.seed + options.problems)
    if options.replay is not None:
        print(problem_of(options.replay, "cpu", options.small), Form.of(options.replay, options.small).more)
        seeds = [options.replay]

    def write(report: Report) -> dict[str, Any]:
        found = summary(report, options)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return found

    def tell(report: Report) -> None:
        write(report)
        print(
            f"{report.problems} of {len(seeds)} problems in {report.seconds:.0f} s, {len(report.failures)} failures",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    if options.compile_only:
        report = compile_only(seeds, options.arch or "cuda:90", options.seconds, tell)
    elif options.processes == 1 or options.replay is not None:
        report = run(seeds, device, options.small, options.seconds, tell)
    else:
        report = run_everywhere(seeds, options.processes, options.small, options.seconds, tell=tell)
    found = write(report)
    shown = ("problems", "unchecked", "seconds", "problems_per_second", "compile_seconds", "worst_error_over_budget")
    print(json.dumps({name: found[name] for name in shown}), f"failures: {len(report.failures)}")
    return 1 if report.failures or (report.unchecked and options.seconds == math.inf) else 0


if __name__ == "__main__":
    raise SystemExit(main())
