"""Other implementations of the same decode call, behind one interface.

`peer(problem)` prepares whatever may be prepared once per step or once per cache (plans, metadata, dense copies: all
outside the timing, to the peer's advantage) and returns `(launch, out)`: `launch(i)` enqueues one decode over copy i,
and afterwards `out` is its result, a tensor of the shape of q or a function that returns it. It raises `Unavailable`
where the peer is not installed or cannot run the problem. `splitkv.bench.problem.Problem` says what a problem is; a
file given to `load` offers the same: a dict `PEERS` of such functions, an exception `Unavailable`, and perhaps a dict
`RULES` of what those of that name know besides plain decode (`Problem.asks`). A peer is given no problem that asks for
what it does not know.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from splitkv.bench.problem import Problem
from splitkv.config import align_up, cdiv

Launch = Callable[[int], object]
Result = Tensor | Callable[[], Tensor]
Peer = Callable[[Any], tuple[Launch, Result]]


class Unavailable(RuntimeError):
    """The peer is not installed, or cannot run this problem."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} is not installed ({error})") from error


def _dense(cache: Tensor, problem: Problem, requests: list[int], length: int) -> Tensor:
    """[requests, num_kv_heads, tokens, head_dim]: a contiguous copy of the tokens that these requests see."""
    page_size = cache.shape[1]
    index = torch.tensor(requests, device=cache.device)
    pages = problem.page_table[index, : cdiv(length, page_size)].long()
    visible = slice(problem.cell.first_visible(length), length)
    return cache[pages].flatten(1, 2)[:, visible].transpose(1, 2).contiguous()


def sdpa(problem: Problem) -> tuple[Launch, Result]:
    """PyTorch's scaled_dot_product_attention over dense keys and values: one call per distinct length.

    It takes neither page tables nor lengths, so the pages are gathered outside the timing, and requests of one length
    share a call: no padding is read, but every distinct length costs launches. Several query tokens have a mask, of the
    kind that its flash kernel knows where it is the causal one.
    """
    cell = problem.cell
    plainly_causal = not problem.asks - {"q_len"}
    by_length: dict[int, list[int]] = {}
    for b, length in enumerate(problem.lens):
        by_length.setdefault(length, []).append(b)
    groups = []
    for length, requests in by_length.items():
        index = torch.tensor(requests, device=problem.q.device)
        keys = [_dense(cache, problem, requests, length) for cache in problem.k_caches]
        values = [_dense(cache, problem, requests, length) for cache in problem.v_caches]
        mask: Any = None
        if cell.q_len > 1:
            mask = problem.sees(length)
            if plainly_causal and problem.q.is_cuda:
                mask = causal_lower_right(cell.q_len, length)
        groups.append((index, problem.tokens[index].transpose(1, 2), keys, values, mask))
    grouped = cell.num_q_heads != cell.num_kv_heads
    outs: list[Tensor] = []

    def launch(i: int) -> None:
        outs[:] = [
            F.scaled_dot_product_attention(q, k[i], v[i], attn_mask=mask, enable_gqa=grouped)
            for _, q, k, v, mask in groups
        ]

    def result() -> Tensor:
        out = torch.empty_like(problem.tokens)
        for (index, *_), part in zip(groups, outs, strict=True):
            out[index] = part.transpose(1, 2)
        return out

    return launch, result


FLEX_BLOCK = 128


def flex_attention(problem: Problem) -> tuple[Launch, Result]:
    """PyTorch's FlexAttention, compiled, over dense keys and values with a block mask.

    All requests lie one after another in one row of keys, each from a multiple of 128 on, and the block mask lists each
    request's blocks: no padding is read beyond them, and one call serves uneven lengths. The copy and the mask are made
    outside the timing.
    """
    flex: Any = _module("torch.nn.attention.flex_attention")
    q, device = problem.q, problem.q.device
    if problem.cell.head_dim < 16:
        raise Unavailable("FlexAttention takes a head_dim of at least 16")
    starts, position = [], 0
    for length in problem.lens:
        starts.append(position)
        position += align_up(length, FLEX_BLOCK)
    total = position

    def gather(cache: Tensor) -> Tensor:
        row = torch.zeros(1, cache.shape[2], total, cache.shape[3], dtype=cache.dtype, device=device)
        for b, length in enumerate(problem.lens):
            row[:, :, starts[b] : starts[b] + length] = _dense(cache, problem, [b], length)
        return row

    keys = [gather(cache) for cache in problem.k_caches]
    values = [gather(cache) for cache in problem.v_caches]
    first = torch.tensor(starts, dtype=torch.int32, device=device)
    end = first + problem.seq_lens

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j >= first[b]) & (j < end[b])

    # Blocks that a request fills need no mask; its last one may.
    blocks = torch.arange(total // FLEX_BLOCK, dtype=torch.int32, device=device)
    full_count = problem.seq_lens // FLEX_BLOCK
    tail_count = (problem.seq_lens % FLEX_BLOCK != 0).to(torch.int32)
    first_block = (first // FLEX_BLOCK)[:, None]
    full = torch.remainder(first_block + blocks, len(blocks)).to(torch.int32)
    tail = torch.remainder(first_block + full_count[:, None] + blocks, len(blocks)).to(torch.int32)
    mask = flex.BlockMask.from_kv_blocks(
        tail_count[:, None, None],
        tail[:, None, None],
        full_count[:, None, None],
        full[:, None, None],
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(1, total),
    )
    queries = q.unsqueeze(2)
    grouped = q.shape[1] != problem.k_caches[0].shape[2]
    attend = flex.flex_attention
    if device.type == "cuda":
        # Shapes differ from problem to problem: each is compiled for itself, and none counts against a later one.
        torch._dynamo.reset()
        attend = torch.compile(attend, dynamic=False)
    outs: list[Tensor] = []

    def launch(i: int) -> None:
        outs[:] = [attend(queries, keys[i], values[i], block_mask=mask, enable_gqa=grouped)]

    if device.type != "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns once that it is not compiled
            launch(0)
    return launch, lambda: outs[0][:, :, 0]


def _flashinfer(problem: Problem, tensor_cores: bool) -> tuple[Launch, Result]:
    flashinfer = _module("flashinfer")
    q, device = problem.q, problem.q.device
    page_size, num_kv_heads = problem.k_caches[0].shape[1:3]
    counts = [cdiv(length, page_size) for length in problem.lens]
    indices = torch.cat([problem.page_table[b, :n] for b, n in enumerate(counts)])
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = torch.tensor(counts).cumsum(0)
    last = torch.tensor([(length - 1) % page_size + 1 for length in problem.lens], dtype=torch.int32)
    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        indptr.to(device),
        indices,
        last.to(device),
        q.shape[1],
        num_kv_heads,
        q.shape[2],
        page_size,
        window_left=problem.rules.get("window_left", -1),
        logits_soft_cap=problem.rules.get("softcap", 0.0),
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)

    def launch(i: int) -> None:
        wrapper.run(q, (problem.k_caches[i], problem.v_caches[i]), out=out)

    return launch, out


def flashinfer_cuda_cores(problem: Problem) -> tuple[Launch, Result]:
    """FlashInfer's paged batch decode on CUDA cores, planned outside the timing."""
    return _flashinfer(problem, tensor_cores=False)


def flashinfer_tensor_cores(problem: Problem) -> tuple[Launch, Result]:
    """FlashInfer's paged batch decode on tensor cores, planned outside the timing."""
    return _flashinfer(problem, tensor_cores=True)


def _flash_rules(problem: Problem) -> dict[str, Any]:
    """Window and cap as FlashAttention's functions take them."""
    window_left = problem.rules.get("window_left")
    return dict(
        causal=True,
        window_size=(-1, -1) if window_left is None else (window_left, 0),
        softcap=problem.rules.get("softcap", 0.0),
    )


def flash_attention_2(problem: Problem) -> tuple[Launch, Result]:
    """FlashAttention-2 with a KV cache: through the page table where pages are large enough, else over dense copies.

    Its pages are multiples of 256 tokens. Smaller ones are gathered outside the timing, one call per distinct length.
    """
    attend = _module("flash_attn").flash_attn_with_kvcache
    q, rules = problem.tokens, _flash_rules(problem)
    outs: list[tuple[Tensor, Tensor]] = []
    everyone = torch.arange(q.shape[0], device=q.device)
    if problem.k_caches[0].shape[1] % 256 == 0:

        def launch(i: int) -> None:
            out = attend(
                q,
                problem.k_caches[i],
                problem.v_caches[i],
                cache_seqlens=problem.seq_lens,
                block_table=problem.page_table,
                **rules,
            )
            outs[:] = [(everyone, out)]

    else:
        by_length: dict[int, list[int]] = {}
        for b, length in enumerate(problem.lens):
            by_length.setdefault(length, []).append(b)
        groups = []
        for length, requests in by_length.items():
            index = torch.tensor(requests, device=q.device)
            keys, values = (
                [_dense(cache, problem, requests, length).transpose(1, 2).contiguous() for cache in caches]
                for caches in (problem.k_caches, problem.v_caches)
            )
            lens = torch.full_like(problem.seq_lens[index], keys[0].shape[1])
            groups.append((index, q[index], keys, values, lens))

        def launch(i: int) -> None:
            outs[:] = [
                (index, attend(query, keys[i], values[i], cache_seqlens=lens, **rules))
                for index, query, keys, values, lens in groups
            ]

    def result() -> Tensor:
        out = torch.empty_like(q)
        for index, part in outs:
            out[index] = part
        return out

    return launch, result


def flash_attention_3(problem: Problem) -> tuple[Launch, Result]:
    """FlashAttention-3 with a paged KV cache, its scheduler metadata made outside the timing."""
    flash = _module("flash_attn_interface")
    q, page_size, rules = problem.tokens, problem.k_caches[0].shape[1], _flash_rules(problem)
    # The table's width is what it takes for the longest length.
    table = problem.page_table[:, : cdiv(max(problem.lens), page_size)].contiguous()
    metadata = flash.get_scheduler_metadata(
        q.shape[0],
        q.shape[1],
        table.shape[1] * page_size,
        q.shape[2],
        problem.k_caches[0].shape[2],
        q.shape[3],
        problem.seq_lens,
        qkv_dtype=q.dtype,
        page_size=page_size,
        causal=True,
        window_size=rules["window_size"],
        has_softcap=rules["softcap"] > 0,
    )
    outs: list[Tensor] = []

    def launch(i: int) -> None:
        outs[:] = [
            flash.flash_attn_with_kvcache(
                q,
                problem.k_caches[i],
                problem.v_caches[i],
                cache_seqlens=problem.seq_lens,
                page_table=table,
                scheduler_metadata=metadata,
                **rules,
            )
        ]

    return launch, lambda: outs[0]


BUILT_IN: dict[str, Peer] = {
    "SDPA": sdpa,
    "FlexAttention": flex_attention,
    "FlashInfer": flashinfer_cuda_cores,
    "FlashInfer tensor cores": flashinfer_tensor_cores,
    "FlashAttention-2": flash_attention_2,
    "FlashAttention-3": flash_attention_3,
}
RULES: dict[str, frozenset[str]] = {
    "SDPA": frozenset({"q_len", "tree_mask", "window_left"}),
    "FlashInfer": frozenset({"window_left", "softcap"}),
    "FlashInfer tensor cores": frozenset({"window_left", "softcap"}),
    "FlashAttention-2": frozenset({"q_len", "window_left", "softcap"}),
    "FlashAttention-3": frozenset({"q_len", "window_left", "softcap"}),
    "flashmla": frozenset({"latent"}),
    "sglang_triton": frozenset({"latent"}),
}
"""What a peer knows besides plain decode; of one that is not named here, or in the file that offers it, nothing."""
NEEDS = {
    "FlashInfer": "flashinfer",
    "FlashInfer tensor cores": "flashinfer",
    "FlashAttention-2": "flash_attn",
    "FlashAttention-3": "flash_attn_interface",
}
DENSE = ("SDPA", "FlexAttention", "FlashAttention-2")
DENSE_NOTE = (
    "SDPA and FlexAttention (and FlashAttention-2 with pages below 256) take no page table: they read dense copies of "
    "the keys and values, gathered outside the timing."
)


def installed() -> dict[str, Peer]:
    """The built-in peers whose packages are here: PyTorch's always."""
    return {
        name: peer
        for name, peer in BUILT_IN.items()
        if name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None
    }


@dataclass(frozen=True)
class PeerFile:
    """What a peers file offers.

    Attributes:
        peers: By name.
        unavailable: The exception by which they say that they cannot run.
        rules: What those of a name know besides plain decode.
    """

    peers: dict[str, Peer]
    unavailable: type[Exception]
    rules: dict[str, frozenset[str]] = field(default_factory=dict)


def load(path: str | Path) -> PeerFile:
    """Import a file that offers `PEERS` and `Unavailable`, and perhaps `RULES`.

    Args:
        path: A Python file; it is run.

    Raises:
        ValueError: no such file, or a file that does not offer both; says what is missing.
    """
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"splitkv_bench_peers_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"peers: expected a Python file, given {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks kernels' sources up through their modules
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    table, unavailable = getattr(module, "PEERS", None), getattr(module, "Unavailable", None)
    if not isinstance(table, dict) or not all(isinstance(k, str) and callable(v) for k, v in table.items()):
        raise ValueError(f"peers: expected a dict PEERS of functions by name in {path}, given {table!r}")
    if not (isinstance(unavailable, type) and issubclass(unavailable, Exception)):
        raise ValueError(f"peers: expected an exception class Unavailable in {path}, given {unavailable!r}")
    rules = getattr(module, "RULES", {})
    if not isinstance(rules, Mapping) or not all(isinstance(known, (set, frozenset)) for known in rules.values()):
        raise ValueError(f"peers: expected a dict RULES of sets by name in {path}, given {rules!r}")
    return PeerFile(dict(table), unavailable, {name: frozenset(known) for name, known in rules.items()})


class Peers:
    """The peers of a run: the built-in ones that are installed, and those of a file.

    Args:
        built_in: By name; None: `installed()`.
        file: A peers file, or None.

    Raises:
        ValueError: a file that offers a name that is taken, or what `load` raises.
    """

    def __init__(self, built_in: dict[str, Peer] | None = None, file: str | Path | None = None) -> None:
        self.table = dict(installed() if built_in is None else built_in)
        self.unavailable: tuple[type[Exception], ...] = (Unavailable,)
        self.rules = dict(RULES)
        if file is not None:
            given = load(file)
            taken = sorted(self.table.keys() & given.peers.keys())
            if taken:
                raise ValueError(
                    f"peers: expected names other than the built-in ones in {file}, given {', '.join(taken)}"
                )
            self.table.update(given.peers)
            self.unavailable += (given.unavailable,)
            self.rules.update(given.rules)

    def __len__(self) -> int:
        return len(self.table)

    def lacks(self, name: str, problem: Problem) -> str:
        """What a problem asks for that a peer does not know, as text; "" where it knows all."""
        return ", ".join(sorted(problem.asks - self.rules.get(name, frozenset())))


def result_of(out: Result) -> Tensor:
    """The tensor that a peer's last launch left."""
    return out if isinstance(out, Tensor) else out()
