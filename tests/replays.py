"""One CUDA graph of a whole step, replayed while requests join, grow and leave, against attention of other means.

    python tests/replays.py --replays 10000 --seed 0 --json replays.json

The graph holds three layers (plain; window and sinks; a quantised cache), each an append and a decode, the work list
and the step's advance. Between replays the host binds what has changed. The reference knows requests, pages and lengths
from the host, gathers their tokens itself, and computes in float64 on the device, in a second graph: some 300 small
kernels, of which each would take the host longer than the GPU. Errors are kept there as shares of the error budget, and
the host waits for them now and then only. Pages that nobody holds are full of NaN. Without a GPU the step is called and
not replayed, in small sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import splitkv  # isort: skip # before anything imports triton: without a GPU it chooses the interpreter

import torch
from torch import Tensor

LOOK_EVERY = 500
"""Replays after which the host looks at the errors so far, and says how far it is."""

LAYERS = 3


@dataclass(frozen=True)
class Sizes:
    batch: int = 16
    max_pages: int = 32
    page_size: int = 16
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    max_splits: int | None = None
    num_splits: int | None = None  # of all layers but the first

    @property
    def max_tokens(self) -> int:
        return self.max_pages * self.page_size

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size


SMALL = Sizes(
    batch=3, max_pages=5, page_size=4, num_kv_heads=1, group_size=2, head_dim=16, dtype=torch.float16, max_splits=4,
    num_splits=1,
)  # fmt: skip


@dataclass
class Layer:
    """A cache and how it is attended."""

    kv: splitkv.PagedKV
    rules: dict[str, Any]
    new: Tensor  # [2, batch, num_kv_heads, head_dim], this step's keys and values
    q: Tensor
    out: Tensor
    lse: Tensor


@dataclass
class Found:
    """What a run found.

    Attributes:
        replays, joined, left, binds: How often.
        lengths: The shortest and the longest at which a token was computed, and how many there were.
        worst: By layer, the largest errors of out and lse as shares of the error budget.
        failures: (replay, layer, share of the budget); a share of inf is a NaN or a row that is not exactly 0.
        seconds: In all.
    """

    replays: int = 0
    joined: int = 0
    left: int = 0
    binds: int = 0
    lengths: set[int] = field(default_factory=set)
    worst: list[list[float]] = field(default_factory=list)
    failures: list[tuple[int, int, float]] = field(default_factory=list)
    seconds: float = 0.0


class Engine:
    """A step of three layers at fixed addresses."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        s = sizes
        pages = s.batch * s.max_pages
        self.table = torch.full((s.batch, s.max_pages), -1, dtype=torch.int32, device=device)
        self.step = splitkv.StepState.allocate(splitkv.StepConfig(s.batch), self.table, s.page_size, device)
        config = splitkv.WorkspaceConfig(
            s.batch, s.num_q_heads, s.num_kv_heads, s.head_dim, max_splits=s.max_splits, dtype=s.dtype
        )
        self.workspace = splitkv.Workspace.allocate(config, device)
        self.schedule = splitkv.Schedule.allocate(config, device)
        # Of all layers together, so that a replay's are drawn and filled at once.
        self.new = torch.zeros(LAYERS, 2, s.batch, s.num_kv_heads, s.head_dim, dtype=s.dtype, device=device)
        self.q = torch.zeros(LAYERS, s.batch, s.num_q_heads, s.head_dim, dtype=s.dtype, device=device)
        self.out = torch.zeros_like(self.q)
        self.lse = torch.zeros(self.q.shape[:-1], device=device)
        # Prompts of one form, whatever their lengths: calls of another form are checked and prepared anew.
        self.prompt = torch.zeros(2, s.max_tokens, s.num_kv_heads, s.head_dim, dtype=s.dtype, device=device)
        self.prompt_slots = torch.zeros(s.max_tokens, dtype=torch.int32, device=device)
        generator = torch.Generator().manual_seed(0)
        sinks = torch.randn(s.num_q_heads, generator=generator).to(device)
        window = max(2, s.max_tokens // 5)
        kinds: list[tuple[dict[str, Any], torch.dtype]] = [
            ({}, s.dtype),
            (dict(window_left=window, sinks=sinks), s.dtype),
            (dict(softcap=20.0), torch.float8_e4m3fn),
        ]
        self.layers = []
        for (rules, cache), *tensors in zip(kinds, self.new, self.q, self.out, self.lse, strict=True):
            shape = (pages, s.page_size, s.num_kv_heads, s.head_dim)
            k, v = (torch.empty(shape, dtype=cache, device=device) for _ in range(2))
            scales = {}
            if cache != s.dtype:
                scales = dict(zip(("k_scale", "v_scale"), torch.empty(2, *shape[:-1], device=device), strict=True))
            kv = splitkv.PagedKV(
                k, v, self.table, self.step.seq_lens, rows=self.step.req_pool_indices,
                schedule=None if rules else self.schedule, **scales,
            )  # fmt: skip
            self.layers.append(Layer(kv, rules, *tensors))
        self.poison(range(pages))

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN."""
        index = sent(list(pages), torch.int64, self.device)
        for layer in self.layers:
            for tensor in (layer.kv.k, layer.kv.v, layer.kv.k_scale, layer.kv.v_scale):
                if isinstance(tensor, Tensor):
                    as_bytes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                    as_bytes.index_fill_(0, index, 0x7F if as_bytes.dtype == torch.uint8 else math.nan)

    def prefill(self, pages: Sequence[int], tokens: int, generator: torch.Generator) -> None:
        """Write random keys and values of a request's first tokens."""
        if tokens == 0:
            return
        size = self.sizes.page_size
        slots = [pages[t // size] * size + t % size for t in range(tokens)]
        slots += [-1] * (self.sizes.max_tokens - tokens)
        self.prompt_slots.copy_(sent(slots, torch.int32, self.device))
        for layer in self.layers:
            splitkv.append_kv(*self.prompt.normal_(generator=generator), layer.kv, self.prompt_slots)

    def draw(self, generator: torch.Generator) -> None:
        """New keys, values and queries; NaN where results and partials are to be written."""
        self.new.normal_(generator=generator)
        self.q.normal_(std=2.0, generator=generator)
        for tensor in (self.out, self.lse, self.workspace.partial_out, self.workspace.partial_lse):
            tensor.fill_(math.nan)

    def forward(self) -> None:
        """All layers, and the next step's state."""
        self.schedule.update(self.layers[0].kv, self.sizes.batch)
        for layer in self.layers:
            splitkv.append_kv(*layer.new, layer.kv, self.step.out_cache_loc)
            parts = None if layer is self.layers[0] else self.sizes.num_splits
            splitkv.decode(
                layer.q, layer.kv, self.workspace, num_splits=parts, out=layer.out, lse=layer.lse, **layer.rules
            )
        self.step.advance()


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A call as the replay of its graph, for which it is made once; without a GPU itself."""
    if device.type != "cuda":
        return call
    call()  # compiles, and makes what a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers on the device, for which the host does not wait."""
    # The allocator of pinned memory gives it to no other before the copy has run.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Check:
    """Looks at all layers of a step, each time for the next row of `shares`.

    Attributes:
        shares: [replays, layers, 2], see `errors`; NaN where nothing was looked at yet.
    """

    def __init__(self, engine: Engine, replays: int) -> None:
        self.engine = engine
        sizes, device = engine.sizes, engine.device
        self._table = torch.zeros(sizes.batch, sizes.max_pages, dtype=torch.int64, device=device)
        self._lens = torch.zeros(sizes.batch, dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self.shares = torch.full((replays, LAYERS, 2), math.nan, dtype=torch.float64, device=device)
        self._look = captured(self._forward, device)
        self.shares.fill_(math.nan)
        self._number.zero_()

    def bind(self, pages: Sequence[Sequence[int]], lens: Sequence[int]) -> None:
        """The requests of the next step: their pages, and their lengths with the token that it computes."""
        sizes, device = self.engine.sizes, self.engine.device
        spare = sizes.batch - len(lens)
        padded = [[*of_one, *[0] * (sizes.max_pages - len(of_one))] for of_one in pages]
        self._table.copy_(sent(padded + [[0] * sizes.max_pages] * spare, torch.int64, device))
        self._lens.copy_(sent([*lens, *[0] * spare], torch.int64, device))

    def __call__(self) -> None:
        """Look at a step that was just made; the next one's requests are one token longer."""
        self._look()

    def _forward(self) -> None:
        # Nothing here may wait for the device or copy from the host: it is captured.
        scale = self.engine.sizes.head_dim**-0.5
        shares = [errors(layer, self._table, self._lens, scale) for layer in self.engine.layers]
        self.shares[self._number] = torch.stack(shares)
        self._number += 1
        self._lens += self._lens > 0


def errors(layer: Layer, table: Tensor, lens: Tensor, sm_scale: float) -> Tensor:
    """[2]: errors of a layer's out and lse as shares of the error budget, on the device.

    Args:
        table: [batch, max_pages] int64 page ids, 0 where there is none.
        lens: [batch] int64; 0 for rows without a request.
    """
    kv, rules = layer.kv, layer.rules
    batch = len(lens)
    token = torch.arange(table.shape[1] * kv.page_size, device=table.device)
    last = (lens - 1).clamp(min=0)
    sees = token < lens[:, None]
    if "window_left" in rules:
        sees &= token >= last[:, None] - rules["window_left"]

    def numbers(cache: Tensor, scale: Any, new: Tensor) -> Tensor:
        """[batch, tokens, num_kv_heads, head_dim], 0 where not seen."""
        found = (cache.view(torch.uint8) if scale is not None else cache)[table].view(cache.dtype).flatten(1, 2)
        if scale is None:
            # The new token as it was given, and not as it was written.
            found[torch.arange(batch, device=last.device), last] = new
            return found.masked_fill(~sees[..., None, None], 0.0).double()
        return (found.double() * scale[table].flatten(1, 2)[..., None]).masked_fill(~sees[..., None, None], 0.0)

    k, v = numbers(kv.k, kv.k_scale, layer.new[0]), numbers(kv.v, kv.v_scale, layer.new[1])
    q = layer.q.double().unflatten(1, (kv.num_kv_heads, -1))

    def attend(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As splitkv.testing.same_computation in float32, weights rounded to q's dtype; in float64 nothing is."""
        scores = torch.einsum("bhgd,bnhd->bhgn", q.to(dtype), k.to(dtype)) * sm_scale
        if "softcap" in rules:
            scores = rules["softcap"] * torch.tanh(scores / rules["softcap"])
        scores = scores.masked_fill(~sees[:, None, None], -math.inf)
        logits = scores
        if "sinks" in rules:
            sink = rules["sinks"].to(dtype).view(1, *q.shape[1:3], 1).expand(batch, -1, -1, 1)
            logits = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : len(token)].masked_fill(~sees[:, None, None], 0.0)
        if dtype == torch.float32:
            weights = weights.to(layer.q.dtype).float()
        out = torch.einsum("bhgn,bnhd->bhgd", weights, v.to(dtype)).flatten(1, 2)
        return out, torch.logsumexp(scores, dim=-1).flatten(1)

    out, lse = attend(torch.float64)
    same, _ = attend(torch.float32)
    error, budget = layer.out.double() - out, same.to(layer.out.dtype).double() - out
    largest = out.abs().max()
    rounding = 2 * torch.finfo(layer.out.dtype).eps * torch.exp2(torch.frexp(largest)[1] - 1.0)
    tiny = 1e-300
    by_norm = error.norm() / (2 * budget.norm() + rounding / largest.clamp(min=tiny) * out.norm()).clamp(min=tiny)
    by_element = error.abs().max() / (2 * budget.abs().max() + rounding).clamp(min=tiny)
    empty = (lens == 0)[:, None]
    wrong = (empty[..., None] & (layer.out != 0)).any() | (empty & (layer.lse != -math.inf)).any()
    lse_error = (layer.lse.double() - lse).masked_fill(empty, 0.0).abs().max() / 1e-2
    found = torch.stack([torch.maximum(by_norm, by_element), lse_error])
    return found.masked_fill(wrong | ~found.isfinite(), math.inf)


def run(
    device: torch.device,
    replays: int,
    seed: int,
    sizes: Sizes,
    spoil: Callable[[Engine, int], None] | None = None,
    seconds: float = math.inf,
) -> Found:
    """Replay the step so often, check each, and stop at the first look that shows a failure.

    Args:
        spoil: Called before each replay, for tests of this very check.
        seconds: Time after which the next look is the last one.
    """
    engine = Engine(device, sizes)
    engine.step.bind([], [], pad_to=sizes.batch)
    replay, check = captured(engine.forward, device), Check(engine, replays)
    draw = random.Random(f"{seed} requests")
    generator = torch.Generator(device).manual_seed(seed)
    pool = splitkv.PagePool(sizes.batch * sizes.max_pages, sizes.page_size, sizes.batch, sizes.max_pages)
    found = Found()
    lens: dict[int, int] = {}  # of each request in the step's order, the token to be computed included
    reserved: dict[int, int] = {}
    names = iter(range(10**9))
    bound = False
    looked = 0
    start = time.perf_counter()
    for number in range(replays):
        # Who leaves, who joins, and who needs a page; now and then all leave at once.
        everyone = draw.random() < 0.002
        left: list[int] = []
        for name in list(lens):
            if everyone or lens[name] > sizes.max_tokens or draw.random() < 0.05:
                left += pool.pages(name)
                pool.release(name)
                del lens[name], reserved[name]
                found.left += 1
                bound = False
        if left:
            engine.poison(left)
        while not everyone and len(lens) < sizes.batch and draw.random() < 0.4:
            name = next(names)
            tokens = draw.choice((1, draw.randint(1, sizes.max_tokens), draw.randint(1, sizes.max_tokens)))
            ahead = min(draw.choice((0, 0, 1, 9)), sizes.max_tokens - tokens)
            pool.admit(name, tokens, reserve=ahead)
            engine.prefill(pool.pages(name), tokens - 1, generator)
            lens[name], reserved[name] = tokens, tokens + ahead
            found.joined += 1
            bound = False
        for name, tokens in lens.items():
            if tokens > reserved[name]:
                ahead = min(draw.choice((0, 7, 40)), sizes.max_tokens - tokens)
                pool.extend(name, tokens, reserve=ahead)
                reserved[name] = tokens + ahead
                bound = False
        if not bound:
            order = draw.sample(list(lens), len(lens))
            lens = {name: lens[name] for name in order}
            for name in order:
                pool.extend(name, lens[name], reserve=reserved[name] - lens[name])
            rows, bound_lens, updates = pool.binding(order)
            engine.step.bind(rows, bound_lens, tokens=[0] * len(rows), page_updates=updates, pad_to=sizes.batch)
            check.bind([pool.pages(name) for name in order], [*lens.values()])
            found.binds += 1
            bound = True
        engine.draw(generator)
        if spoil is not None:
            spoil(engine, number)
        replay()
        check()
        found.lengths |= set(lens.values())
        lens = {name: tokens + 1 for name, tokens in lens.items()}
        found.replays = number + 1
        if found.replays % LOOK_EVERY == 0 or found.replays == replays:
            shares = check.shares[looked : found.replays].cpu()
            found.seconds = time.perf_counter() - start
            print(
                f"{found.replays} of {replays} replays in {found.seconds:.1f} s, {found.joined} requests joined, "
                f"largest error over the budget {float(shares.max()):.3f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            over = ~(shares <= 1)
            if bool(over.any()):
                found.failures = [
                    (looked + n, layer, float(shares[n, layer].max()))
                    for n, layer in over.any(dim=-1).nonzero().tolist()
                ]
                break
            looked = found.replays
            if found.seconds > seconds:
                break
    found.worst = check.shares[: found.replays].amax(dim=0).tolist()
    found.seconds = time.perf_counter() - start
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay a graph of a step while requests join and leave.")
    parser.add_argument("--replays", type=int, default=10000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of requests, lengths and values: the same run again")
    parser.add_argument("--seconds", type=float, default=math.inf, help=f"end at the next {LOOK_EVERY} after this time")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    options = parser.parse_args(arguments)
    if options.replays < 1:
        parser.error(f"--replays: expected at least 1, given {options.replays}")
    gpu = torch.cuda.is_available()
    sizes, device = Sizes() if gpu else SMALL, torch.device("cuda" if gpu else "cpu")
    found = run(device, options.replays, options.seed, sizes, seconds=options.seconds)
    told = dict(
        replays=found.replays, replays_per_second=round(found.replays / found.seconds, 1), joined=found.joined,
        left=found.left, binds=found.binds, lengths=len(found.lengths),
        shortest=min(found.lengths, default=0), longest=max(found.lengths, default=0),
        worst_error_over_budget=[[round(x, 3) for x in pair] for pair in found.worst],
        failures=found.failures[:20], seconds=round(found.seconds, 2), seed=options.seed,
        gpu=torch.cuda.get_device_name() if gpu else None,
    )  # fmt: skip
    text = json.dumps(told)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if found.failures or (found.replays < options.replays and options.seconds == math.inf) else 0


if __name__ == "__main__":
    raise SystemExit(main())
