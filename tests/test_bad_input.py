"""Every argument of every public call: what it may not be.

A table says for each call how a good one is made, and for each of its arguments what makes it bad. Each row is refused
with TypeError or ValueError that names the argument, what was expected and what was given, before anything is launched;
no tensor that the call could reach has changed by then; and `supports` says the same without raising. The table is held
against the signatures, so that an argument without rows fails.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from conftest import COMPILED
from hypothesis import given as examples
from hypothesis import strategies as st
from public import AUTOGRAD, public_calls, shown, tensors_in
from support import ints as vector
from torch import Tensor
from torch.autograd import forward_ad

import splitkv
from splitkv import checks, distributed, masks
from splitkv.distributed import Exchange
from splitkv.kernels import prepared
from splitkv.kv import KVView
from splitkv.testing import same_bits
from splitkv.tiles import Target, Tiles
from splitkv.tiles_io import TileKey, TileTable

DEVICE = torch.device("cuda", 0) if COMPILED else torch.device("cpu")
OTHER = "meta"
BATCH, Q_HEADS, KV_HEADS, WIDTH, WIDTH_V, TOKENS, PAGE = 2, 4, 2, 16, 24, 12, 4
DTYPE = torch.float16
CONFIG = splitkv.WorkspaceConfig(BATCH, Q_HEADS, KV_HEADS, WIDTH, WIDTH_V, max_total_q=6, max_splits=40, dtype=DTYPE)
STEP = splitkv.StepConfig(BATCH, max_total_q=6, max_mask_len=8, max_page_updates=4)
SPARE = 4096  # elements past a good tensor, so that others can be laid over its memory
NAN, INF = math.nan, math.inf

ints = functools.partial(vector, device=DEVICE)


class Bad(NamedTuple):
    """What makes an argument bad.

    Attributes:
        what: In a word or two.
        change: From the good value, or with `of_all` from all arguments, to the bad one.
        given: What the message says was given.
        error: TypeError or ValueError.
        blamed: A pattern of the names that the message may begin with, if not the argument's.
        base: Which good call it is a change of; "" is the call's first.
        of_all: Whether `change` takes all arguments.
    """

    what: str
    change: Callable[[Any], Any]
    given: str = ""
    error: type[Exception] = ValueError
    blamed: str = ""
    base: str = ""
    of_all: bool = False


class Call(NamedTuple):
    """A public call.

    Attributes:
        run: Makes it, of keyword arguments. A method's object is among them, as `self`.
        bases: Good arguments by name; the first serves rows without a base.
        rows: By argument.
        launches: Whether a good one launches kernels.
    """

    run: Callable[..., Any]
    bases: dict[str, Callable[[], dict[str, Any]]]
    rows: dict[str, list[Bad]]
    launches: bool = False


# What is bad whatever the argument.


def given(*values: Any, error: type[Exception] = TypeError) -> list[Bad]:
    """Values that are bad by themselves, written in the message as they are."""
    return [Bad(repr(value)[:30], lambda _, value=value: value, shown(value), error) for value in values]


def objects(*values: Any) -> list[Bad]:
    """Values of a wrong type, which the message names."""
    return [
        Bad(type(value).__name__, lambda _, value=value: value, type(value).__name__, TypeError) for value in values
    ]


def at(base: str, rows: list[Bad]) -> list[Bad]:
    """The same rows as changes of another good call."""
    return [row._replace(base=base) for row in rows]


def blaming(names: str, rows: list[Bad], *whats: str) -> list[Bad]:
    """The same rows, for which any of these arguments may be named; or those called `whats`, for which what was given
    is then said of another argument."""
    if not whats:
        return [row._replace(blamed=names) for row in rows]
    return [row._replace(blamed=names, given="") if row.what in whats else row for row in rows]


def integers(low: int, high: int | None = None, *, required: bool = True) -> list[Bad]:
    """What is no integer in low…high."""
    outside = [low - 1, *([] if high is None else [high + 1])]
    wrong = [True, low + 0.5, float(low), str(low), torch.tensor(low), *([None] if required else [])]
    return given(*wrong) + given(*outside, error=ValueError)


def numbers(*, positive: bool = False) -> list[Bad]:
    """What is no finite number."""
    outside = [NAN, INF, -INF, 1e39, *([0.0, -1.0, 1e-50] if positive else [])]
    wrong = given("1", True, 1j, torch.tensor(1.0))
    return wrong + [Bad(str(value), lambda _, value=value: value, str(value)) for value in outside]


ARRAY = np.array([1, 2])  # neither equal to anything nor not


def flags() -> list[Bad]:
    return given(1, 0, None, "yes", torch.tensor(True))


def spaced(tensor: Tensor) -> Tensor:
    """The same values, two elements apart in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


REQUIRES_GRAD = [Bad("requires grad", lambda t: t.requires_grad_(), "one that requires grad")] if AUTOGRAD else []


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor, tensor])


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def tensors(*dtypes: torch.dtype, required: bool = True) -> list[Bad]:
    """What no tensor may be, these dtypes included."""
    return [
        *objects([1], 1.5, "t", *([None] if required else [])),
        *(Bad(str(dtype), lambda t, dtype=dtype: t.to(dtype), str(dtype), TypeError) for dtype in dtypes),
        Bad("rank", lambda t: t[None, None]),
        Bad("device", lambda t: t.to(OTHER), OTHER),
        Bad("negated", torch._neg_view, "a negated view"),
        Bad("sparse", lambda t: t.to_sparse(), "a torch.sparse_coo layout"),
        Bad("nested", nested, "a nested tensor"),
        Bad("without memory", freed, "a Tensor without", TypeError),
    ]


def vectors(*, short: str | None = "", required: bool = True) -> list[Bad]:
    """What no int32 vector may be. Without the last element it needs, `short` is named, or by "" the argument itself;
    None: it may have any size."""
    return [
        *tensors(torch.int64, torch.int16, torch.float32, required=required),
        Bad("stride", spaced, "2"),
        *([] if short is None else [Bad("short", lambda t: t[: BATCH - 1], "1", blamed=short)]),
    ]


# Good tensors.


def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Zeros, with more of them behind."""
    count = math.prod(shape)
    return torch.zeros(count + SPARE, dtype=dtype, device=DEVICE)[:count].view(shape)


def roomy(values: Any) -> Tensor:
    """An int32 tensor with more memory behind."""
    filled = ints(values)
    tensor = zeros(*filled.shape, dtype=torch.int32)
    return tensor.copy_(filled)


def over(memory: Tensor, like: Tensor, first: int = 0) -> Tensor:
    """A tensor like this one over the memory of another, from its element `first`."""
    offset = (memory.storage_offset() + first) * memory.element_size() // like.element_size()
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    return view.set_(memory.untyped_storage(), offset, like.shape, like.stride())


def overlapping(name: str, *others: str) -> list[Bad]:
    """The output `name` over the memory of each other argument, or of what is written behind a dot of it."""

    def memory_of(arguments: dict[str, Any], path: str) -> Tensor:
        value = functools.reduce(getattr, path.split(".")[1:], arguments[path.split(".")[0]])
        assert isinstance(value, Tensor)
        return value

    def on(other: str) -> Callable[[dict[str, Any]], Tensor]:
        return lambda arguments: over(memory_of(arguments, other), arguments[name])

    return [Bad(f"over {other}", on(other), "shares memory", of_all=True) for other in others]


def written(*dtypes: torch.dtype, rows: int = 1) -> list[Bad]:
    """What no output may be, besides what no tensor may be: rows that share memory."""
    return [
        *tensors(*dtypes, required=False),
        Bad("expanded", lambda t: t[:1].expand(t.shape), "strides [0, "),
        Bad("rows within rows", lambda t: t.as_strided(t.shape, [max(1, s // 2) for s in t.stride()]), "strides ["),
        *REQUIRES_GRAD,
        Bad("short", lambda t: t[:rows]),
    ]


def changing_stride(memory: Tensor) -> Tensor:
    return memory.mT.contiguous().mT


# Decode.


def paged(dtype: torch.dtype = DTYPE, heads: int = KV_HEADS, width: int = WIDTH, batch: int = BATCH, **options: Any):
    pages = 8
    return splitkv.PagedKV(
        zeros(pages, PAGE, heads, width, dtype=dtype),
        zeros(pages, PAGE, heads, WIDTH_V, dtype=dtype),
        roomy([[3, 1, 2], [0, 5, 6], [0, 1, 2]][:batch]),
        roomy([TOKENS] * batch),
        **options,
    )


def on_meta(kv: KVView) -> KVView:
    return splitkv.ContiguousKV(
        *(torch.zeros(BATCH, 4, KV_HEADS, w, dtype=DTYPE, device=OTHER) for w in (WIDTH, WIDTH_V)),
        torch.zeros(BATCH, dtype=torch.int32, device=OTHER),
    )


@functools.cache
def workspace_of(base: str) -> splitkv.Workspace:
    """One for all calls of a base: that it remembers the good one helps no bad one."""
    return splitkv.Workspace.allocate(CONFIG, DEVICE)


def one() -> dict[str, Any]:
    return dict(
        q=zeros(BATCH, Q_HEADS, WIDTH), kv=paged(), workspace=workspace_of("one"), sm_scale=0.5, causal=True,
        window_left=3, softcap=30.0, sinks=zeros(Q_HEADS, dtype=torch.float32),
        alibi_slopes=zeros(Q_HEADS, dtype=torch.float32), num_splits=2, out=zeros(BATCH, Q_HEADS, WIDTH_V),
        lse=zeros(BATCH, Q_HEADS, dtype=torch.float32),
    )  # fmt: skip


def ragged() -> dict[str, Any]:
    return one() | dict(
        q=zeros(5, Q_HEADS, WIDTH), qo_indptr=roomy([0, 2, 5]), workspace=workspace_of("ragged"),
        out=zeros(5, Q_HEADS, WIDTH_V), lse=zeros(5, Q_HEADS, dtype=torch.float32),
    )  # fmt: skip


def several() -> dict[str, Any]:
    return one() | dict(
        q=zeros(BATCH, 3, Q_HEADS, WIDTH), tree_mask=zeros(BATCH, 3, 1, dtype=torch.int32),
        workspace=workspace_of("several"), out=zeros(BATCH, 3, Q_HEADS, WIDTH_V),
        lse=zeros(BATCH, 3, Q_HEADS, dtype=torch.float32),
    )  # fmt: skip


def latent() -> dict[str, Any]:
    kv = splitkv.LatentKV(zeros(8, PAGE, WIDTH), roomy([[3, 1, 2], [0, 5, 6]]), roomy([9, 5]), head_dim_v=WIDTH)
    return dict(q=zeros(BATCH, Q_HEADS, WIDTH), kv=kv, workspace=workspace_of("latent"), sm_scale=0.5)


TREE_SHAPE = "[≥ 2, max_q_len ≥ 3, ceil(max_q_len / 32)]"
HEAD_ROWS = [
    Bad("short", lambda t: t[:-1], "[3]"),
    Bad("stride", spaced, "2"),
]
SCRATCH = ("workspace.partial_out", "workspace.partial_lse")
VIEW = ("kv.k", "kv.v", "kv.page_table", "kv.seq_lens")

RULES: dict[str, list[Bad]] = {
    "qo_indptr": at("ragged", [
        *vectors(short=None, required=False),
        Bad("empty", lambda t: t[:0], "0"),
        Bad("longer than kv", lambda t: ints([0, 1, 2, 5]), "2", blamed="seq_lens|page_table"),
    ]),
    "sm_scale": [*numbers(), *at("latent", given(None, error=ValueError))],
    "causal": [*flags(), Bad("with a tree", lambda _: False, "causal=False", blamed="tree_mask", base="several")],
    "window_left": integers(0, required=False),
    "softcap": numbers(positive=True),
    "sinks": [*tensors(torch.float64, torch.bfloat16, required=False), *HEAD_ROWS],
    "alibi_slopes": [*tensors(torch.float64, torch.float16, required=False), *HEAD_ROWS],
    "tree_mask": at("several", [
        *tensors(torch.int64, torch.bool, required=False),
        Bad("batch", lambda t: t[:1], "[1, 3, 1]"),
        Bad("short", lambda t: t[:, :2], "[2, 2, 1]"),
        Bad("words", lambda t: t.repeat(1, 1, 2), "[2, 3, 2]"),
        Bad("stride", lambda t: spaced(zeros(BATCH, 40, 2, dtype=torch.int32)), "strides ["),
    ]),
    "num_splits": [
        *integers(1, 4096, required=False),
        # The workspace's 40 partial tiles have 64 rows each, of which a call of one token needs but 16.
        Bad("more than fit", lambda _: 41, "164 (2 query tiles · 2 KV heads · 41"),
    ],
}  # fmt: skip
OUTPUTS: dict[str, list[Bad]] = {
    "out": [
        *written(torch.float64, torch.bfloat16),
        Bad("width", lambda t: t[..., :WIDTH], "[2, 4, 16]"),
        Bad("last stride", changing_stride, "strides [96, 1, 4]"),
        *overlapping("out", "q", "lse", "sinks", "alibi_slopes", *SCRATCH, *VIEW),
        *at("ragged", overlapping("out", "qo_indptr")),
        *at("several", overlapping("out", "tree_mask")),
    ],
    "lse": [
        *written(torch.float64, torch.float16),
        Bad("heads", lambda t: t[:, :3], "[2, 3]"),
        *overlapping("lse", "q", "sinks", "alibi_slopes", *SCRATCH, *VIEW),
        *blaming("out|lse", overlapping("lse", "out")),
        *at("ragged", overlapping("lse", "qo_indptr")),
        *at("several", overlapping("lse", "tree_mask")),
    ],
}
Q = [
    *tensors(torch.float64, torch.bfloat16, torch.float32),
    Bad("no batch", lambda q: q[0], "shape [4, 16]"),
    Bad("four dimensions and qo_indptr", lambda q: q[:, None], "shape [5, 1, 4, 16]", base="ragged"),
    Bad("no token", lambda q: zeros(BATCH, 0, Q_HEADS, WIDTH), "shape [2, 0, 4, 16]", base="several"),
    Bad("width", lambda q: q[..., :-1], "15"),
    Bad("heads", lambda q: q[:, :3], "3"),
    Bad("no heads", lambda q: q[:, :0], "0"),
    Bad("last stride", changing_stride, "strides [64, 1, 4]"),
    Bad("expanded", lambda q: q[..., :1].expand(q.shape), "strides [64, 16, 0]"),
    *REQUIRES_GRAD,
    Bad("larger than the view", lambda q: zeros(3, Q_HEADS, WIDTH), "2", blamed="seq_lens|page_table"),
    Bad("larger than the workspace", lambda q: zeros(BATCH, 4, Q_HEADS, WIDTH), "", blamed="workspace", base="no out"),
]
KV = [
    *objects(None, (1, 2), torch.zeros(1)),
    Bad("heads", lambda kv: paged(heads=3), "4", blamed="q"),
    Bad("width", lambda kv: paged(width=8), "16", blamed="q"),
    Bad("batch", lambda kv: paged(batch=1), "1", blamed="seq_lens|page_table"),
    Bad("dtype", lambda kv: paged(torch.float32), "torch.float32", TypeError),
    Bad("device", on_meta, OTHER),
]
WORKSPACE = [
    *objects(None, "workspace", CONFIG),
    Bad("device", lambda w: splitkv.Workspace.allocate(CONFIG, OTHER), blamed="q"),
    Bad("dtype", lambda w: splitkv.Workspace.allocate(splitkv.WorkspaceConfig(2, 4, 2, 16), DEVICE),
        "torch.float16", TypeError, blamed="q"),
    Bad("size", lambda w: splitkv.Workspace.allocate(splitkv.WorkspaceConfig(1, 4, 2, 8, dtype=DTYPE), DEVICE),
        blamed="workspace", base="no out"),
]  # fmt: skip


def no_out() -> dict[str, Any]:
    return {name: value for name, value in one().items() if name not in ("out", "lse")}


DECODE_BASES = {"one": one, "ragged": ragged, "several": several, "latent": latent, "no out": no_out}
DECODE_ROWS = {"q": Q, "kv": KV, "workspace": WORKSPACE, **RULES, **OUTPUTS}


def grouped(base: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: base() | dict(group_ids=roomy([0, 0]), prefix_lens=roomy([4, 4]))


def contiguous(kv: KVView) -> KVView:
    return splitkv.ContiguousKV(zeros(BATCH, 8, KV_HEADS, WIDTH), zeros(BATCH, 8, KV_HEADS, WIDTH_V), ints([8, 8]))


SHARED_ROWS = DECODE_ROWS | {
    "num_splits": [
        *integers(1, 4096, required=False),
        Bad("more than fit", lambda _: 41),
    ],
    "group_ids": [*vectors()],
    "prefix_lens": [*vectors()],
    "kv": [
        *KV,
        Bad("not paged", contiguous, "ContiguousKV", TypeError),
        Bad("a shard", lambda kv: kv.shard(kv.seq_lens, rank=0, size=2), "a shard"),
    ],
    "out": [*OUTPUTS["out"], *overlapping("out", "group_ids", "prefix_lens")],
    "lse": [*OUTPUTS["lse"], *overlapping("lse", "group_ids", "prefix_lens")],
}


def says(**arguments: Any) -> None:
    """`supports`, raising what it says."""
    reason = splitkv.supports(**arguments)
    if reason is not None:
        raise ValueError(reason)


# `supports` says what it says without a type.
SUPPORTS_ROWS = {name: [row._replace(error=ValueError) for row in rows] for name, rows in SHARED_ROWS.items()}


# Views.


def cache_rows(beside: str = "") -> list[Bad]:
    """Of a cache; on another device, the argument `beside` it is named."""
    return [
        *blaming(beside, tensors(torch.float64, torch.int32, torch.uint8), "device"),
        Bad("last stride", changing_stride, "strides ["),
        Bad("too wide", lambda t: zeros(*t.shape[:-1], 577), "577"),
        Bad("no width", lambda t: t[..., :0], "0"),
        Bad("no heads", lambda t: t[..., :0, :], "shape ["),
    ]


def second_cache_rows() -> list[Bad]:
    return [
        *cache_rows(),
        Bad("other dtype", lambda t: t.float(), "torch.float32", TypeError),
        Bad("other size", lambda t: t[:-1], "["),
        Bad("other heads", lambda t: t[..., :1, :], "["),
    ]


def scale_rows(per_token: tuple[int, ...], *, heads: bool = True) -> list[Bad]:
    """Of a cache of int8, which needs both."""
    wrong = [0.0, -1.0, NAN, INF, 1e39]
    return [
        *given("1", True, error=TypeError),
        *[Bad(str(value), lambda _, value=value: value, str(value)) for value in wrong],
        Bad("none", lambda _: None, "none"),
        Bad("dtype", lambda _: zeros(dtype=torch.float16), "torch.float16", TypeError),
        Bad("device", lambda _: torch.ones((), device=OTHER), OTHER),
        Bad("negated", lambda _: torch._neg_view(torch.ones((), device=DEVICE)), "a negated view"),
        Bad("heads", lambda _: torch.ones(KV_HEADS + 1, device=DEVICE), f"[{KV_HEADS + 1}]"),
        Bad("tokens", lambda _: torch.ones(*per_token[:-1], per_token[-1] + 1, device=DEVICE), "["),
        Bad("of a cache that is not quantised", lambda _: 0.5, "one", base="plain"),
    ]  # fmt: skip


VIEW_OPTIONS: dict[str, list[Bad]] = {
    "kv_start": [*vectors(short=None, required=False)],
    "len_hint": integers(0, required=False),
    "schedule": [
        *objects("s", 3, CONFIG),
        Bad("device", lambda _: splitkv.Schedule.allocate(CONFIG, OTHER), OTHER),
    ],
}
ROWS = {"rows": vectors(short=None, required=False)}


def paged_arguments(dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    scales = {} if dtype == DTYPE else dict(k_scale=0.5, v_scale=0.5)
    return dict(
        k_cache=zeros(8, PAGE, KV_HEADS, WIDTH, dtype=dtype), v_cache=zeros(8, PAGE, KV_HEADS, WIDTH_V, dtype=dtype),
        page_table=roomy([[3, 1, 2], [0, 5, 6]]), seq_lens=roomy([9, 5]), rows=roomy([1, 0]), kv_start=roomy([0, 1]),
        layout="NHD", len_hint=8, schedule=splitkv.Schedule.allocate(CONFIG, DEVICE), **scales,
    )  # fmt: skip


def csr_arguments(dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    kept = {k: v for k, v in paged_arguments(dtype).items() if k not in ("page_table", "seq_lens", "rows")}
    return kept | dict(page_indptr=roomy([0, 3, 5]), page_indices=roomy([3, 1, 2, 0, 5]), last_page_len=roomy([1, 1]))


def contiguous_arguments(dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    kept = {k: v for k, v in paged_arguments(dtype).items() if k not in ("page_table", "layout", "k_cache", "v_cache")}
    k, v = (zeros(BATCH, 8, KV_HEADS, width, dtype=dtype) for width in (WIDTH, WIDTH_V))
    return kept | dict(k=k, v=v)


def ragged_arguments(dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    kept = {k: v for k, v in contiguous_arguments(dtype).items() if k not in ("seq_lens", "rows")}
    k, v = (zeros(11, KV_HEADS, width, dtype=dtype) for width in (WIDTH, WIDTH_V))
    return kept | dict(k=k, v=v, kv_indptr=roomy([0, 6, 11]))


def latent_arguments(dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    kept = {k: v for k, v in paged_arguments(dtype).items() if k in ("page_table", "seq_lens", "rows", "kv_start")}
    scale = {} if dtype == DTYPE else dict(scale=0.5)
    schedule = splitkv.Schedule.allocate(CONFIG, DEVICE)
    cache = zeros(8, PAGE, WIDTH, dtype=dtype)
    return kept | dict(cache=cache, head_dim_v=8, len_hint=8, schedule=schedule) | scale


def scaled(arguments: Callable[..., dict[str, Any]]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {"int8": arguments, "plain": functools.partial(arguments, DTYPE)}


TABLE = [
    *tensors(torch.int64, torch.float32),
    Bad("last stride", changing_stride, "strides ["),
]
PAGES = {"k_cache": cache_rows("v_cache"), "v_cache": second_cache_rows(),
         "k_scale": scale_rows((8, PAGE, KV_HEADS)), "v_scale": scale_rows((8, PAGE, KV_HEADS)),
         "layout": given("NDH", None, 1, ARRAY, error=ValueError), **VIEW_OPTIONS}  # fmt: skip
LENS = vectors(short=None)


# Appending.


def appending() -> dict[str, Any]:
    return dict(
        k_new=zeros(BATCH, KV_HEADS, WIDTH), v_new=zeros(BATCH, KV_HEADS, WIDTH_V), kv=paged(), slots=roomy([1, 5])
    )


def appending_latent() -> dict[str, Any]:
    return dict(k_new=zeros(BATCH, 1, WIDTH), v_new=None, kv=latent()["kv"], slots=roomy([1, 5]))


def with_scales(k_scale: Tensor, v_scale: Tensor, same_memory: bool = False) -> KVView:
    kv = paged(torch.int8, k_scale=k_scale, v_scale=v_scale)
    v = kv.k if same_memory else kv.v
    return splitkv.PagedKV(kv.k, v, kv.page_table, kv.seq_lens, k_scale=k_scale, v_scale=v_scale)


def token_scales() -> Tensor:
    return zeros(8, PAGE, KV_HEADS, dtype=torch.float32) + 1


def one_scale_for_both(_: KVView) -> KVView:
    scales = token_scales()
    return with_scales(scales, scales)


def one_scale_for_heads(_: KVView) -> KVView:
    return with_scales(token_scales(), token_scales()[..., :1].expand(-1, -1, KV_HEADS))


def scales_in_keys(_: KVView) -> KVView:
    kv, scales = with_scales(token_scales(), token_scales()), token_scales()
    k_scale = over(kv.k, scales)
    return splitkv.PagedKV(kv.k, kv.v, kv.page_table, kv.seq_lens, k_scale=k_scale, v_scale=scales)


def shared_pages(kv: KVView) -> KVView:
    k, v = zeros(1, PAGE, KV_HEADS, WIDTH).expand(8, -1, -1, -1), kv.v
    return splitkv.PagedKV(k, v, kv.page_table, kv.seq_lens)


def interleaved_pages(kv: KVView) -> KVView:
    step = kv.k.stride(0) // 2
    k = kv.k.as_strided(kv.k.shape, (step, *kv.k.stride()[1:]))
    return splitkv.PagedKV(k, kv.v, kv.page_table, kv.seq_lens)


def lengths_in_the_list(arguments: dict[str, Any]) -> KVView:
    kv, schedule = arguments["kv"], arguments["self"]
    lens = schedule.buffer[1:][: kv.seq_lens.shape[0]]
    return splitkv.PagedKV(kv.k, kv.v, kv.page_table, lens)


def values_in_keys(kv: KVView) -> KVView:
    return splitkv.PagedKV(kv.k, over(kv.k, kv.v, first=WIDTH // 2), kv.page_table, kv.seq_lens)


CACHES = [
    *objects(None, (1, 2)),
    Bad("pages that are one", shared_pages, "strides [0, ", blamed=r"kv\.k"),
    Bad("pages within pages", interleaved_pages, "strides [", blamed=r"kv\.k"),
    Bad("values in keys", values_in_keys, "shares memory", blamed=r"kv\.v"),
    *at(
        "scaled",
        [
            Bad("one scale for both", one_scale_for_both, "shares memory", blamed=r"kv\.v_scale"),
            Bad("one scale for all heads", one_scale_for_heads, "strides [", blamed=r"kv\.v_scale"),
            Bad("scales in keys", scales_in_keys, "shares memory", blamed=r"kv\.k_scale"),
            Bad(
                "two scales for the same numbers",
                lambda _: with_scales(token_scales(), token_scales(), True),
                "the same",
                blamed=r"kv\.v",
            ),
        ],
    ),
]


def new_rows() -> list[Bad]:
    return [
        *tensors(torch.float64, torch.float32),
        Bad("heads", lambda t: t[:, :1], "["),
        Bad("width", lambda t: t[..., :-1], "["),
        Bad("last stride", changing_stride, "strides ["),
        *REQUIRES_GRAD,
    ]


# Merge.


def merging() -> dict[str, Any]:
    return dict(
        outs=zeros(3, 5, Q_HEADS, WIDTH), lses=zeros(3, 5, Q_HEADS, dtype=torch.float32),
        sinks=zeros(Q_HEADS, dtype=torch.float32), lse_base=2, lse_layout="NH", out=zeros(5, Q_HEADS, WIDTH),
        lse=zeros(5, Q_HEADS, dtype=torch.float32),
    )  # fmt: skip


def merging_ragged() -> dict[str, Any]:
    kept = merging() | dict(out=zeros(3, Q_HEADS, WIDTH), lse=zeros(3, Q_HEADS, dtype=torch.float32))
    return kept | dict(
        outs=zeros(5, Q_HEADS, WIDTH), lses=zeros(5, Q_HEADS, dtype=torch.float32), indptr=roomy([0, 1, 3, 5])
    )


MERGE = Call(
    splitkv.merge,
    {"merging": merging, "ragged": merging_ragged},
    {
        "outs": [
            *blaming("lses", tensors(torch.float64, torch.int32), "rank", "device"),
            Bad("no partial", lambda t: t[:0], "["),
            Bad("no width", lambda t: t[..., :0], "["),
            Bad("last stride", changing_stride, "strides ["),
            *REQUIRES_GRAD,
            Bad("other size", lambda t: t[:, :4], "[", blamed="lses"),
        ],
        "lses": [
            *tensors(torch.float64, torch.float16),
            Bad("other size", lambda t: t[:2], "["),
            *REQUIRES_GRAD,
        ],
        "indptr": at("ragged", [
            *vectors(short=None, required=False),
            Bad("empty", lambda t: t[:0], "0"),
            Bad("other rows", lambda t: t[:-1], "[", blamed="out"),
        ]),
        "sinks": [*tensors(torch.float64, torch.bfloat16, required=False), *HEAD_ROWS],
        "lse_base": given(10, 1.0, True, "e", None, NAN, torch.tensor(2.0), error=ValueError),
        "lse_layout": [
            *given("NHD", None, 0, ARRAY, error=ValueError),
            Bad("of other lses", lambda _: "HN", "[", blamed="lses"),
        ],
        "out": [
            *written(torch.float64, torch.int32),
            Bad("last stride", changing_stride, "strides ["),
            *overlapping("out", "lses", "lse", "sinks"),
            Bad("across partials", lambda a: over(a["outs"], a["out"], 8), "shares memory", of_all=True),
            *at("ragged", overlapping("out", "outs", "indptr")),
        ],
        "lse": [
            *written(torch.float64, torch.float16),
            *overlapping("lse", "outs", "sinks"),
            *blaming("out|lse", overlapping("lse", "out")),
            Bad("across partials", lambda a: over(a["lses"], a["lse"], 8), "shares memory", of_all=True),
            *at("ragged", overlapping("lse", "lses", "indptr")),
        ],
    },
    launches=True,
)  # fmt: skip


# Step state.


def step_state() -> splitkv.StepState:
    return splitkv.StepState.allocate(STEP, roomy([[3, 1, 2], [0, 5, 6], [7, -1, -1]]), PAGE, DEVICE)


def making_step() -> dict[str, Any]:
    return dict(config=STEP, page_table=roomy([[3, 1, 2], [0, 5, 6]]), page_size=PAGE, device=DEVICE)


def step_over_buffer() -> dict[str, Any]:
    kept = {name: value for name, value in making_step().items() if name != "device"}
    return kept | dict(buffer=splitkv.workspace.aligned_bytes(STEP.nbytes, DEVICE).zero_())


def binding() -> dict[str, Any]:
    return dict(
        self=step_state(), rows=[1, 0], seq_lens=[5, 9], q_lens=[2, 2], tokens=[1, 2, 3, 4],
        page_updates=[(1, 0, 4), (1, 1, 5)], pad_to=2,
    )  # fmt: skip


def host_integers(low: int, high: int | None, *, required: bool = True, bits: int = 32, host: str = "") -> list[Bad]:
    """What no list of integers on the host may be: of two or more, in low…high."""

    def with_first(value: int) -> Callable[[Any], Any]:
        return lambda good: [value, *good[1:]]

    return [
        *objects("12", 3, 1.5, {0: 1}, *([None] if required else [])),
        Bad("floats", lambda good: [float(n) for n in good], "other elements", TypeError),
        Bad("a float tensor", lambda good: torch.tensor(good, dtype=torch.float32), "torch.float32", TypeError),
        Bad("a boolean tensor", lambda good: torch.tensor(good).bool(), "torch.bool", TypeError),
        Bad("another device", lambda good: torch.tensor(good, device=OTHER), OTHER),
        Bad("rank", lambda good: torch.tensor([good]), "shape [1, "),
        Bad("negated", lambda good: torch._neg_view(torch.tensor(good)), "a negated view"),
        Bad("too large", with_first(2**bits), "one past that"),
        Bad("below", with_first(low - 1), str(low - 1)),
        *([] if high is None else [Bad("above", with_first(high + 1), str(high + 1))]),
    ]


def with_update(*update: int) -> Callable[[Any], Any]:
    return lambda good: [*good, update]


BUFFER_ROWS = [
    *objects([1], None, "b"),
    Bad("dtype", lambda t: t.view(torch.int8), "torch.int8", TypeError),
    Bad("rank", lambda t: t[None], "shape [1, "),
    Bad("short", lambda t: t[:-1], ""),
    Bad("stride", lambda t: splitkv.workspace.aligned_bytes(2 * t.numel(), DEVICE)[::2], "strides [2]"),
    Bad("unaligned", lambda t: splitkv.workspace.aligned_bytes(t.numel() + 8, DEVICE)[8:], "address "),
    Bad("sparse", lambda t: t.to_sparse(), "a torch.sparse_coo layout"),
]
DEVICE_ROWS = [
    *given(None, 1.5, ["cpu"], True),
    Bad("no device", lambda _: "gpu", "'gpu'"),
    Bad("one that is not here", lambda _: "cuda:77", "cuda:77"),
    Bad("one that splitkv knows nothing of", lambda _: "xla", "xla"),
]  # fmt: skip
TILES_ROWS = [
    *objects(3, {}, [1]),
    Bad("a table of other things", lambda _: spoilt_table(), "str", TypeError, blamed="tiles|entries"),
]  # fmt: skip


def spoilt_table() -> TileTable:
    table = TileTable()
    table.entries["b1"] = Tiles(16, 4, 1, 1, 16)  # type: ignore[index]
    return table


CONFIG_ROWS = objects(None, {}, "c", STEP)


# Masks.


def mask_out(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return zeros(*shape, dtype=dtype)


def mask_rows(*others: str, dtype: torch.dtype = torch.int32) -> list[Bad]:
    return [
        *[row for row in written(torch.uint8, dtype) if row.what not in ("short", "requires grad")],
        *objects(None),
        Bad("last stride", spaced, "strides ["),
        *overlapping("out", *others),
    ]


def size_rows() -> list[Bad]:
    return integers(0)


# The pool.


def pool() -> splitkv.PagePool:
    made = splitkv.PagePool(num_pages=8, page_size=PAGE, max_requests=3, max_pages=4)
    made.admit("a", 6)
    return made


UNHASHABLE = objects([1], {})


# The table.


def exchange() -> Exchange:
    return Exchange.allocate(CONFIG, DEVICE)


def shard(kv: KVView) -> KVView:
    return kv.shard(kv.seq_lens, rank=0, size=1)


def sharded(base: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def arguments() -> dict[str, Any]:
        good = base()
        return good | dict(kv=shard(good["kv"]), exchange=exchange())

    return arguments


def without(rows: list[Bad], *whats: str) -> list[Bad]:
    return [row for row in rows if row.what not in whats]


def shard_first(row: Bad) -> Bad:
    """The same row of a call that takes a shard."""
    return row._replace(change=lambda value: shard(row.change(value)))


def integer_fields(**bounds: tuple[int, int | None, bool]) -> dict[str, list[Bad]]:
    return {name: integers(low, high, required=required) for name, (low, high, required) in bounds.items()}


MANY = 2**30
CONFIG_FIELDS = integer_fields(
    max_batch_size=(1, MANY, True), num_q_heads=(1, 65535, True), num_kv_heads=(1, 65535, True),
    head_dim=(1, 576, True), head_dim_v=(1, 576, False), max_total_q=(1, MANY, False), max_splits=(1, MANY, False),
    q_tile_rows=(16, 128, False), split_tokens=(1, MANY, False), max_parts=(1, MANY, True),
)  # fmt: skip
CONFIG_FIELDS["num_q_heads"] += given(3, error=ValueError)
CONFIG_FIELDS["q_tile_rows"] += given(48, error=ValueError)
CONFIG_FIELDS["dtype"] = [
    *(
        Bad(str(wrong), lambda _, wrong=wrong: wrong, str(wrong))
        for wrong in (torch.float64, torch.int8, None, "float16", ARRAY)
    )
]


def call_table() -> dict[str, Call]:
    shared_bases = {name: grouped(base) for name, base in DECODE_BASES.items()}
    distributed_bases = {name: sharded(base) for name, base in DECODE_BASES.items()}
    table = {
        "WorkspaceConfig": Call(
            splitkv.WorkspaceConfig,
            {"good": lambda: {name: getattr(CONFIG, name) for name in CONFIG_FIELDS}},
            CONFIG_FIELDS,
        ),
        "WorkspaceConfig.cover": Call(
            lambda configs: splitkv.WorkspaceConfig.cover(*configs),
            {"good": lambda: dict(configs=[CONFIG])},
            {
                "configs": [
                    Bad("none", lambda _: [], "none"),
                    Bad("another config", lambda good: [*good, STEP], "StepConfig", TypeError),
                    Bad("another dtype", lambda good: [*good, splitkv.WorkspaceConfig(1, 1, 1, 16)], "torch."),
                ]
            },
        ),
        "StepConfig": Call(
            splitkv.StepConfig,
            {"good": lambda: dict(max_batch_size=2)},
            integer_fields(
                max_batch_size=(1, MANY, True),
                max_total_q=(1, MANY, False),
                tile_tokens=(1, MANY, True),
                max_mask_len=(0, MANY, True),
                max_page_updates=(1, MANY, False),
            ),
        ),
        "Workspace.allocate": Call(
            splitkv.Workspace.allocate,
            {"good": lambda: dict(config=CONFIG, device=DEVICE)},
            {"config": CONFIG_ROWS, "device": DEVICE_ROWS, "tiles": TILES_ROWS},
        ),
        "Workspace.from_buffer": Call(
            splitkv.Workspace.from_buffer,
            {"good": lambda: dict(config=CONFIG, buffer=splitkv.workspace.aligned_bytes(CONFIG.nbytes, DEVICE))},
            {"config": CONFIG_ROWS, "buffer": BUFFER_ROWS},
        ),
        "Workspace.tiles": Call(
            lambda self, value: setattr(self, "tiles", value),
            {"good": lambda: dict(self=splitkv.Workspace.allocate(CONFIG, DEVICE), value=None)},
            {"value": blaming("tiles|entries", TILES_ROWS)},
        ),
        "Workspace.target": Call(
            lambda self, value: setattr(self, "target", value),
            {"good": lambda: dict(self=splitkv.Workspace.allocate(CONFIG, DEVICE), value=Target("cpu", 4, 1 << 30))},
            {"value": blaming("target", objects(None, "cuda:90", DEVICE))},
        ),
        "decode": Call(splitkv.decode, DECODE_BASES, DECODE_ROWS, launches=True),
        "decode_with_lse": Call(splitkv.decode_with_lse, DECODE_BASES, DECODE_ROWS, launches=True),
        "decode_shared_prefix": Call(splitkv.decode_shared_prefix, shared_bases, SHARED_ROWS, launches=True),
        "supports": Call(says, shared_bases, SUPPORTS_ROWS),
        "warmup": Call(splitkv.warmup, shared_bases, SHARED_ROWS),
        "merge": MERGE,
        "append_kv": Call(
            splitkv.append_kv,
            {
                "paged": appending,
                "latent": appending_latent,
                "scaled": lambda: appending() | dict(kv=with_scales(token_scales(), token_scales())),
            },
            {
                "k_new": [
                    *new_rows(),
                    Bad("one token more", lambda t: zeros(3, *t.shape[1:]), "2", blamed="v_new|slots"),
                    Bad("in the cache", lambda a: over(a["kv"].k, a["k_new"]), "shares memory", of_all=True),
                ],
                "v_new": [
                    *new_rows(),
                    *at("latent", objects(zeros(BATCH, 1, WIDTH))),
                    Bad("in the cache", lambda a: over(a["kv"].v, a["v_new"]), "shares memory", of_all=True),
                ],
                "kv": CACHES,
                "slots": [
                    *vectors(),
                    Bad("in the cache", lambda a: over(a["kv"].k, a["slots"]), "shares memory", of_all=True),
                    Bad(
                        "in scales",
                        lambda a: over(a["kv"].k_scale, a["slots"]),
                        "shares memory",
                        base="scaled",
                        of_all=True,
                    ),
                ],
            },
            launches=True,
        ),
        "move_kv": Call(
            splitkv.move_kv,
            {
                "paged": lambda: dict(kv=paged(), src_slots=roomy([1, 5]), dst_slots=roomy([2, 6])),
                "scaled": lambda: dict(
                    kv=with_scales(token_scales(), token_scales()), src_slots=roomy([1, 5]), dst_slots=roomy([2, 6])
                ),
            },
            {
                "kv": CACHES,
                "src_slots": [
                    *vectors(short=None),
                    Bad("short", lambda t: t[:1], "[2]", blamed="dst_slots"),
                    Bad("in the cache", lambda a: over(a["kv"].k, a["src_slots"]), "shares memory", of_all=True),
                ],
                "dst_slots": [
                    *vectors(),
                    Bad("in the cache", lambda a: over(a["kv"].v, a["dst_slots"]), "shares memory", of_all=True),
                ],
            },
            launches=True,
        ),
        "PagedKV": Call(
            splitkv.PagedKV,
            scaled(paged_arguments),
            PAGES | ROWS | {"page_table": TABLE, "seq_lens": LENS},
        ),
        "PagedKV.from_csr": Call(
            splitkv.PagedKV.from_csr,
            scaled(csr_arguments),
            PAGES
            | {
                "page_indptr": [*vectors(short=None), Bad("empty", lambda t: t[:0], "0")],
                "page_indices": vectors(short=None),
                "last_page_len": vectors(short=None),
            },
        ),
        "ContiguousKV": Call(
            splitkv.ContiguousKV,
            scaled(contiguous_arguments),
            {
                "k": cache_rows("v"),
                "v": second_cache_rows(),
                "seq_lens": LENS,
                "k_scale": scale_rows((BATCH, 8, KV_HEADS)),
                "v_scale": scale_rows((BATCH, 8, KV_HEADS)),
                **ROWS,
                **VIEW_OPTIONS,
            },
        ),
        "RaggedKV": Call(
            splitkv.RaggedKV,
            scaled(ragged_arguments),
            {
                "k": cache_rows("v"),
                "v": second_cache_rows(),
                "kv_indptr": [*vectors(short=None), Bad("empty", lambda t: t[:0], "0")],
                "k_scale": scale_rows((11, KV_HEADS)),
                "v_scale": scale_rows((11, KV_HEADS)),
                **VIEW_OPTIONS,
            },
        ),
        "LatentKV": Call(
            splitkv.LatentKV,
            scaled(latent_arguments),
            {
                "cache": cache_rows("rows"),
                "page_table": TABLE,
                "seq_lens": LENS,
                "head_dim_v": integers(1, WIDTH),
                "scale": scale_rows((8, PAGE), heads=False),
                **ROWS,
                **VIEW_OPTIONS,
            },
        ),
        "KVView.shard": Call(
            KVView.shard,
            {
                "in turn": lambda: dict(self=paged(), seq_lens=roomy([30, 30]), rank=1, size=3),
                "apart": lambda: dict(self=paged(), seq_lens=roomy([30, 30]), starts=roomy([4, 0])),
            },
            {
                "seq_lens": LENS,
                "starts": [
                    *at("apart", vectors(short=None, required=False)),
                    *at("apart", [Bad("none", lambda _: None, "neither")]),
                    Bad("with a rank", lambda _: roomy([4, 0]), "both"),
                ],
                "rank": integers(0, 2),
                "size": [*integers(1, 2**30), Bad("the rank", lambda _: 1, "1", blamed="rank")],
            },
        ),
        "Schedule.allocate": Call(
            splitkv.Schedule.allocate,
            {"good": lambda: dict(config=CONFIG, device=DEVICE)},
            {"config": CONFIG_ROWS, "device": DEVICE_ROWS, "tiles": TILES_ROWS},
        ),
        "Schedule.tiles": Call(
            lambda self, value: setattr(self, "tiles", value),
            {"good": lambda: dict(self=splitkv.Schedule.allocate(CONFIG, DEVICE), value=None)},
            {"value": blaming("tiles|entries", TILES_ROWS)},
        ),
        "Schedule.target": Call(
            lambda self, value: setattr(self, "target", value),
            {"good": lambda: dict(self=splitkv.Schedule.allocate(CONFIG, DEVICE), value=Target("cpu", 4, 1 << 30))},
            {"value": blaming("target", objects(None, "cuda:90", DEVICE))},
        ),
        "Schedule.update": Call(
            splitkv.Schedule.update,
            {"good": lambda: dict(self=splitkv.Schedule.allocate(CONFIG, DEVICE), kv=paged(), batch=2)},
            {
                "kv": [
                    *objects(None, (1, 2)),
                    Bad("device", on_meta, OTHER),
                    Bad("batch", lambda kv: paged(batch=1), "1", blamed="seq_lens|page_table"),
                    Bad("lengths in the list", lengths_in_the_list, "shares memory", blamed="schedule", of_all=True),
                ],
                "batch": integers(0, 2, required=False),
            },
            launches=True,
        ),
        "StepState.allocate": Call(
            splitkv.StepState.allocate,
            {"good": making_step},
            {
                "config": objects(None, {}, CONFIG),
                "page_table": [
                    *tensors(torch.int64, torch.float32),
                    Bad("empty", lambda t: t[:, :0], "shape [2, 0]"),
                    Bad("last stride", changing_stride, "strides ["),
                    Bad("expanded", lambda t: t[:1].expand(2, -1), "strides [0, 1]"),
                    Bad("rows within rows", lambda t: t.as_strided((2, 3), (1, 1)), "strides [1, 1]"),
                ],
                "page_size": integers(1, 2**31 - 1),
                "device": blaming("device|page_table", DEVICE_ROWS),
            },
        ),
        "StepState.from_buffer": Call(
            splitkv.StepState.from_buffer,
            {"good": step_over_buffer},
            {
                "config": objects(None, {}, CONFIG),
                "page_table": [
                    *tensors(torch.int64, torch.float32),
                    Bad("in the buffer", lambda a: over(a["buffer"], a["page_table"]), "shares memory", of_all=True),
                ],
                "page_size": integers(1, 2**31 - 1),
                "buffer": [
                    *BUFFER_ROWS,
                    Bad("device", lambda t: t.to(OTHER), "", blamed="page_table"),
                ],
            },
        ),
        "StepState.bind": Call(
            splitkv.StepState.bind,
            {"good": binding},
            {
                "rows": [
                    *host_integers(0, 2),
                    Bad("more than fit", lambda _: [0, 1, 2], "3"),
                    Bad("one twice", lambda _: [1, 1], "1 twice"),
                ],
                "seq_lens": [
                    *host_integers(0, 12),
                    Bad("one short", lambda _: [5], "1"),
                    Bad("less than its new tokens", lambda _: [1, 9], "1"),
                ],
                "q_lens": [
                    *host_integers(0, 6, required=False),
                    Bad("one short", lambda _: [2], "1"),
                    Bad("more than fit", lambda _: [4, 3], "7"),
                ],
                "tokens": [
                    *without(host_integers(0, None, required=False, bits=64), "negated"),
                    Bad("one short", lambda _: [1, 2, 3], "3"),
                ],
                "page_updates": blaming(
                    r"page_updates( \(\w+\))?",
                    [
                        *objects(3, 1.5),
                        Bad("integers", lambda _: [1, 2], "list", TypeError),
                        Bad("text", lambda _: "abc", "tuples of 1"),
                        Bad("pairs", lambda _: [(1, 2)], "tuples of 2"),
                        Bad("triples and pairs", lambda _: [(1, 2, 3), (1, 2)], "list", TypeError),
                        Bad("an array of pairs", lambda _: torch.zeros(2, 2, dtype=torch.int32), "[2, 2]"),
                        Bad("floats", lambda _: [(1.0, 0, 0)], "other elements", TypeError),
                        Bad("a float tensor", lambda _: torch.zeros(1, 3), "torch.float32", TypeError),
                        Bad("another device", lambda _: torch.zeros(1, 3, dtype=torch.int32, device=OTHER), OTHER),
                        Bad(
                            "negated", lambda _: torch._neg_view(torch.ones(1, 3, dtype=torch.int32)), "a negated view"
                        ),
                        Bad("row", lambda _: [(3, 0, 0)], "3"),
                        Bad("no row", lambda _: [(-1, 0, 0)], "-1"),
                        Bad("column", lambda _: [(0, 3, 0)], "3"),
                        Bad("page", lambda _: [(0, 0, -2)], "-2"),
                        Bad("slots past 32 bits", lambda _: [(0, 0, 2**29)], str(2**29)),
                        Bad("too large", lambda _: [(0, 0, 2**31)], "one past that"),
                        Bad("an entry twice", lambda _: [(0, 0, 1), (0, 0, 2)], "several of (0, 0)"),
                        Bad("more than fit", lambda _: [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 0, 1), (1, 1, 1)], "5"),
                    ],
                ),
                "pad_to": integers(2, 2, required=False),
            },
            launches=True,
        ),
        "StepState.advance": Call(
            splitkv.StepState.advance,
            {"good": lambda: dict(self=step_state(), num_new=roomy([1, 1]))},
            {
                "num_new": [
                    *tensors(torch.int16, torch.float32, required=False),
                    Bad("stride", spaced, "strides [2]"),
                    Bad("more than fit", lambda t: roomy([1, 1, 1]), "3"),
                    *(
                        Bad(
                            f"over {name}",
                            lambda a, name=name: getattr(a["self"], name)[:2],
                            "shares memory",
                            of_all=True,
                        )
                        for name in ("seq_lens", "position_ids", "pending", "kv_indptr", "out_cache_loc", "needs_page")
                    ),
                ]
            },
            launches=True,
        ),
        "StepState.fill_input_ids": Call(
            splitkv.StepState.fill_input_ids,
            {"good": lambda: dict(self=step_state(), ids=[5, 6])},
            {"ids": [*host_integers(0, None, bits=64), Bad("more than fit", lambda _: [1] * 7, "7")]},
            launches=True,
        ),
        "StepState.fill_input_ids_from_device": Call(
            splitkv.StepState.fill_input_ids_from_device,
            {"good": lambda: dict(self=step_state(), tokens=roomy([5, 6]))},
            {
                "tokens": [
                    *tensors(torch.float32, torch.bool),
                    Bad("more than fit", lambda t: roomy([1] * 7), "7"),
                    Bad("some of the ids", lambda a: a["self"].input_ids[1:], "shares memory", of_all=True),
                ]
            },
        ),
        "StepState.decode_mask": Call(
            splitkv.StepState.decode_mask,
            {"good": lambda: dict(self=step_state(), position_ids=roomy([5, 6]), total_len=8)},
            {
                "position_ids": [
                    *tensors(torch.int16, torch.float32),
                    Bad("more than fit", lambda t: roomy([1, 2, 3]), "3"),
                    Bad("two columns", lambda t: roomy([[1, 2], [3, 4]]), "[2, 2]"),
                ],
                "total_len": integers(0, 8),
            },
            launches=True,
        ),
        "PagePool": Call(
            splitkv.PagePool,
            {"good": lambda: dict(num_pages=8, page_size=4, max_requests=2, max_pages=4)},
            integer_fields(**{n: (1, None, True) for n in ("num_pages", "page_size", "max_requests", "max_pages")}),
        ),
        "PagePool.admit": Call(
            splitkv.PagePool.admit,
            {"good": lambda: dict(self=pool(), request="b", seq_len=5, reserve=1)},
            {
                "request": [*UNHASHABLE, Bad("in use", lambda _: "a", "'a'")],
                "seq_len": integers(0, 16),
                "reserve": integers(0, 11),
            },
        ),
        "PagePool.extend": Call(
            splitkv.PagePool.extend,
            {"good": lambda: dict(self=pool(), request="a", seq_len=7, reserve=1)},
            {
                "request": UNHASHABLE,
                "seq_len": [*integers(0, 16), Bad("shorter", lambda _: 5, "5")],
                "reserve": integers(0, 9),
            },
        ),
        "PagePool.fork": Call(
            splitkv.PagePool.fork,
            {"good": lambda: dict(self=pool(), request="a", new="b", seq_len=5)},
            {
                "request": UNHASHABLE,
                "new": [*UNHASHABLE, Bad("in use", lambda _: "a", "'a'")],
                "seq_len": integers(0, 6, required=False),
            },
        ),
        "PagePool.release": Call(
            splitkv.PagePool.release, {"good": lambda: dict(self=pool(), request="a")}, {"request": UNHASHABLE}
        ),
        "PagePool.binding": Call(
            splitkv.PagePool.binding,
            {"good": lambda: dict(self=pool(), requests=["a"])},
            {"requests": [*objects(None, 3), Bad("unhashable", lambda _: [["a"]], "list", TypeError, "request")]},
        ),
        "PagePool.seq_len": Call(
            splitkv.PagePool.seq_len, {"good": lambda: dict(self=pool(), request="a")}, {"request": UNHASHABLE}
        ),
        "PagePool.pages": Call(
            splitkv.PagePool.pages, {"good": lambda: dict(self=pool(), request="a")}, {"request": UNHASHABLE}
        ),
        "masks.validity_mask_shape": Call(
            masks.validity_mask_shape,
            {"good": lambda: dict(batch=2, max_len=9)},
            {"batch": size_rows(), "max_len": size_rows()},
        ),
        "masks.attention_mask_shape": Call(
            masks.attention_mask_shape,
            {"good": lambda: dict(batch=2, q_len=3, max_len=9)},
            {"batch": size_rows(), "q_len": size_rows(), "max_len": size_rows()},
        ),
        "masks.ragged_mask_shape": Call(
            masks.ragged_mask_shape,
            {"good": lambda: dict(total_q=2, max_len=9)},
            {"total_q": size_rows(), "max_len": size_rows()},
        ),
        "masks.position_mask_shape": Call(
            masks.position_mask_shape,
            {"good": lambda: dict(batch=2, total_len=9)},
            {"batch": size_rows(), "total_len": size_rows()},
        ),
        "masks.tree_mask_shape": Call(
            masks.tree_mask_shape,
            {"good": lambda: dict(batch=2, max_q_len=9)},
            {"batch": size_rows(), "max_q_len": size_rows()},
        ),
        "masks.validity_mask": Call(
            masks.validity_mask,
            {"good": lambda: dict(out=mask_out(2, 9), seq_lens=roomy([3, 9]), kv_start=roomy([0, 1]))},
            {
                "out": mask_rows("seq_lens", "kv_start"),
                "seq_lens": vectors(),
                "kv_start": vectors(required=False),
            },
            launches=True,
        ),
        "masks.attention_mask": Call(
            masks.attention_mask,
            {
                "good": lambda: dict(
                    out=mask_out(2, 3, 9), seq_lens=roomy([3, 9]), causal=True, window_left=2, kv_start=roomy([0, 1])
                )
            },
            {
                "out": mask_rows("seq_lens", "kv_start"),
                "seq_lens": vectors(),
                "causal": flags(),
                "window_left": integers(0, required=False),
                "kv_start": vectors(required=False),
            },
            launches=True,
        ),
        "masks.ragged_mask": Call(
            masks.ragged_mask,
            {
                "good": lambda: dict(
                    out=mask_out(5, 9),
                    qo_indptr=roomy([0, 2, 5]),
                    seq_lens=roomy([3, 9]),
                    causal=True,
                    window_left=2,
                    kv_start=roomy([0, 1]),
                )
            },
            {
                "out": mask_rows("seq_lens", "kv_start", "qo_indptr"),
                "qo_indptr": [*vectors(short=None), Bad("empty", lambda t: t[:0], "0")],
                "seq_lens": vectors(),
                "causal": flags(),
                "window_left": integers(0, required=False),
                "kv_start": vectors(required=False),
            },
            launches=True,
        ),
        "masks.position_mask": Call(
            masks.position_mask,
            {"good": lambda: dict(out=mask_out(2, 1, 9), position_ids=roomy([5, 6]))},
            {
                "out": mask_rows("position_ids"),
                "position_ids": [
                    *tensors(torch.int16, torch.float32),
                    Bad("two columns", lambda t: roomy([[1, 2], [3, 4]]), "[2, 2]"),
                ],
            },
            launches=True,
        ),
        "masks.pack_tree_mask": Call(
            masks.pack_tree_mask,
            {"good": lambda: dict(mask=mask_out(2, 3, 3), out=mask_out(2, 3, 1, dtype=torch.int32))},
            {
                "mask": [
                    *tensors(torch.uint8, torch.int32),
                    Bad("not square", lambda t: t[..., :2], "[2, 3, 2]"),
                    Bad("other size", lambda t: t[:, :2, :2], "[2, 3, 1]", blamed="out"),
                ],
                "out": without(mask_rows("mask", dtype=torch.int64), "last stride"),
            },
            launches=True,
        ),
        "masks.tree_mask_from_parents": Call(
            masks.tree_mask_from_parents,
            {"good": lambda: dict(parents=roomy([[-1, 0, 1], [-1, 0, 0]]), out=mask_out(2, 3, 1, dtype=torch.int32))},
            {
                "parents": [
                    *tensors(torch.int16, torch.float32),
                    Bad("other size", lambda t: t[:, :2], "[2, 3, 1]", blamed="out"),
                ],
                "out": without(mask_rows("parents", dtype=torch.int64), "last stride"),
            },
            launches=True,
        ),
        "distributed.Exchange.allocate": Call(
            Exchange.allocate,
            {"good": lambda: dict(config=CONFIG, device=DEVICE, group=None, by_heads=False)},
            {
                "config": CONFIG_ROWS,
                "device": DEVICE_ROWS,
                "group": objects("g", 3),
                "by_heads": flags(),
            },
        ),
        "distributed.round_robin_lens": Call(
            distributed.round_robin_lens,
            {"good": lambda: dict(seq_lens=roomy([5, 6]), rank=1, size=3, out=roomy([0, 0]))},
            {
                "seq_lens": blaming("out", without(tensors(torch.int64, torch.float32), "rank"), "device"),
                "rank": integers(0, 2),
                "size": integers(1, 2**30),
                "out": [
                    *tensors(torch.int64, torch.float32, required=False),
                    Bad("size", lambda t: roomy([0, 0, 0]), "[3]"),
                    Bad("expanded", lambda t: t[:1].expand(2), "strides [0]"),
                    Bad(
                        "some of the lengths", lambda a: over(a["seq_lens"], a["out"], 1), "shares memory", of_all=True
                    ),
                ],
            },
        ),
        "distributed.decode": Call(
            distributed.decode,
            distributed_bases,
            {
                **RULES,
                "q": blaming(
                    "q|out|sinks",
                    without(Q, "larger than the view", "larger than the workspace", "heads"),
                    "four dimensions and qo_indptr",
                    "no token",
                    "no heads",
                    "width",
                ),
                "kv": [
                    *objects(None, (1, 2)),
                    *map(shard_first, KV[3:]),
                    Bad("a whole view", lambda kv: paged(), "a whole view"),
                    Bad("another rank's", lambda kv: paged().shard(kv.seq_lens, rank=1, size=2), "that of rank 1 of 2"),
                ],
                "workspace": blaming("q|out", WORKSPACE, "dtype"),
                "exchange": [
                    *objects(None, "e", CONFIG),
                    Bad("small", lambda _: Exchange.allocate(splitkv.WorkspaceConfig(1, 4, 2, 8), DEVICE), ""),
                    Bad("device", lambda _: Exchange.allocate(CONFIG, OTHER), "", blamed="q"),
                ],
                "out": [*OUTPUTS["out"], *overlapping("out", "exchange.sent", "exchange.received")],
                "lse": [*OUTPUTS["lse"], *overlapping("lse", "exchange.sent", "exchange.received")],
            },
            launches=True,
        ),
        "TileKey": Call(
            TileKey,
            {"good": lambda: dict(arch="cuda:90", dtype="float16", head_dim=16, head_dim_v=16, rows=16)},
            {
                "arch": given(90, None),
                "dtype": given("half", None, torch.float16, error=ValueError),
                "head_dim": integers(1, 576),
                "head_dim_v": integers(1, 576),
                "rows": [*integers(16, 128), *given(48, error=ValueError)],
                "kv_dtype": given("half", None, torch.int8, error=ValueError),
                "latent": flags(),
            },
        ),
        "Tiles": Call(
            Tiles,
            {"good": lambda: dict(block_n=32, num_warps=4, num_stages=2, programs_per_sm=2, min_chunk=16)},
            {
                "block_n": [*integers(16, 1024), *given(48, error=ValueError)],
                "num_warps": [*integers(1, 32), *given(3, error=ValueError)],
                "num_stages": integers(1, 16),
                "programs_per_sm": integers(1, 32),
                "min_chunk": integers(1, MANY),
                "segment_cost": integers(0, MANY),
                "tile_cost": [*integers(0, MANY), *given(12, error=ValueError)],
                "max_registers": integers(0, 255),
            },
        ),
        "TileTable": Call(
            TileTable,
            {"good": lambda: dict(entries={TILE_KEY: TILES}, about={})},
            {
                "entries": [
                    *objects(None, [1]),
                    Bad("another key", lambda _: {"b1": TILES}, "str", TypeError),
                    Bad("another value", lambda _: {TILE_KEY: (16, 4, 1, 1, 16)}, "tuple", TypeError),
                ],
                "about": objects(None, [1]),
            },
        ),
        "TileTable.merged": Call(
            TileTable.merged,
            {"good": lambda: dict(self=TileTable(), newer=TileTable())},
            {"newer": objects(None, {})},
        ),
    }
    return table  # fmt: skip


TILE_KEY, TILES = TileKey("cuda:90", "float16", 16, 16, 16), Tiles(16, 4, 1, 1, 16)
CALLS = call_table()


# What is held against the table.


NOT_CALLED_BY_USERS = {
    "Section": "a result",
    "PoolExhausted": "an error",
    "KVView": "the base of views",
    "KVView.check_batch": "what decode checks",
    "KVView.check_shared": "what decode checks",
    "KVView.check_values": "what decode checks",
    "KVView.lengths": "what decode checks",
    "Schedule.of_spec": "what an operator puts together again",
    "Workspace.of_parts": "what an operator puts together again",
    "Workspace.recall": "what decode remembers",
    "Workspace.remember": "what decode remembers",
    "distributed.Views": "what decode remembers",
    "distributed.Exchange.views": "what decode remembers",
    "TileKey.of": "from what was checked",
    "TileTable.given": "what `tiles` means: rows of those who take it",
    "TileTable.lookup": "from what was checked",
    "TileTable.save": "a path, which the system checks",
    "TileTable.load": "a file: tests/test_bench.py",
}


def arguments_of(name: str, function: Callable[..., Any]) -> set[str]:
    arguments = set(inspect.signature(function).parameters) - {"self", "cls"}
    if "rules" in arguments:
        arguments = arguments - {"rules"} | set(inspect.signature(splitkv.decode).parameters)
        if name in ("supports", "warmup"):
            arguments |= set(inspect.signature(splitkv.decode_shared_prefix).parameters)
    return {"value"} if arguments in ({"tiles"}, {"target"}) else arguments


def test_every_argument_of_every_public_call_has_rows() -> None:
    public = {name: function for name, _, _, function in public_calls()}
    assert public.keys() - NOT_CALLED_BY_USERS.keys() == CALLS.keys()
    assert NOT_CALLED_BY_USERS.keys() <= public.keys()
    for name, call in CALLS.items():
        rows = {argument for argument, bad in call.rows.items() if bad}
        assert arguments_of(name, public[name]) == rows, name
        assert {row.base for bad in call.rows.values() for row in bad} - {""} <= call.bases.keys(), name


def memory_of(arguments: dict[str, Any]) -> dict[int, Tensor]:
    """Copies of all memory that a call could write to, by address."""
    copies = {}
    for tensor in tensors_in(arguments):
        if tensor.device.type == DEVICE.type and tensor.layout == torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).clone()
    return copies


class Launched(AssertionError):
    pass


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Launched("a kernel was launched")

    for kernel in (triton.runtime.jit.KernelInterface, triton.compiler.CompiledKernel):
        monkeypatch.setattr(kernel, "__getitem__", lambda *_: fail)
    monkeypatch.setattr(prepared._Compiled, "start", fail)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Of one rank, for `splitkv.distributed`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ARGUMENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}") for name, call in CALLS.items() for argument in call.rows
]
BASES = [pytest.param(name, base, id=f"{name}-{base}") for name, call in CALLS.items() for base in call.bases]


@pytest.mark.parametrize(("name", "base"), BASES)
def test_a_good_call_launches(name: str, base: str, no_launch: None) -> None:
    """It gets past all checks, or its rows would be refused for something else; and a launch is noticed."""
    call = CALLS[name]
    if COMPILED and name == "warmup" and base != "one":
        pytest.skip("compiles for minutes: see test_warmup.py")
    with pytest.raises(Launched) if call.launches else contextlib.nullcontext():
        call.run(**call.bases[base]())


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_refused(name: str, argument: str) -> None:
    call, wrong = CALLS[name], []
    for base in call.bases.values():
        if call.launches:
            with contextlib.suppress(Launched):
                call.run(**base())  # the workspace remembers it
    for row in call.rows[argument]:
        fault = why_not_refused(call, argument, row)
        if fault is not None:
            wrong.append(f"{row.what} {row.base}: {fault}")
    assert not wrong, "\n".join(wrong)


def why_not_refused(call: Call, argument: str, row: Bad) -> str | None:
    """What is wrong with how a call takes a bad argument, or None."""
    good = call.bases[row.base or next(iter(call.bases))]()
    bad = good | {argument: row.change(good if row.of_all else good.get(argument))}
    before = memory_of({"good": good, "bad": bad})
    pool_before = copy.deepcopy(vars(good["self"])) if isinstance(good.get("self"), splitkv.PagePool) else None
    try:
        call.run(**bad)
    except row.error as error:
        message = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "not refused"
    given = re.escape(row.given)
    if not re.match(rf"({row.blamed or argument}): expected .*given .*{given}", message, re.DOTALL):
        return message
    after = memory_of({"good": good, "bad": bad})
    if before.keys() != after.keys() or not all(torch.equal(before[place], after[place]) for place in before):
        return "memory was written"
    if pool_before is not None and vars(good["self"]) != pool_before:
        return "the pool was changed"
    return None


# What shares memory.

LAID = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(
        st.lists(st.integers(0, 4), min_size=rank, max_size=rank),
        st.lists(st.integers(0, 12), min_size=rank, max_size=rank),
        st.integers(0, 12),
        st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    )
)


def laid(how: tuple[list[int], list[int], int, torch.dtype]) -> Tensor:
    shape, strides, first, dtype = how
    return MEMORY.view(dtype).as_strided(shape, strides, first)


MEMORY = torch.zeros(1024, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> list[int]:
    """The addresses of all bytes of all elements, one by one."""
    offsets = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    size = tensor.element_size()
    return [tensor.data_ptr() + offset * size + byte for offset in offsets for byte in range(size)]


def refuses(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


@examples(LAID, LAID)
def test_whatever_shares_memory_is_refused(one_way: Any, other_way: Any) -> None:
    """By how tensors are laid out alone; and nothing that lies in a stretch of its own is."""
    one, other = laid(one_way), laid(other_way)
    places, others = bytes_of(one), bytes_of(other)
    if len(set(places)) < len(places):
        assert refuses(checks.check_no_overlap, "out", one)
    shared = bool(set(places) & set(others))
    if shared:
        assert refuses(checks.check_apart, "out", one, [("q", other)])
    elif not places or not others or max(places) < min(others) or max(others) < min(places):
        assert not refuses(checks.check_apart, "out", one, [("q", other)])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_apart_are_taken_in_any_order(order: tuple[int, ...], padding: int) -> None:
    whole = torch.zeros(3, 4, 5 + padding)[..., :5]
    assert not refuses(checks.check_no_overlap, "out", whole.permute(order))
    assert not refuses(checks.check_no_overlap, "out", whole[:, :1].permute(order))


def test_columns_of_one_buffer_are_apart() -> None:
    """Queries, outputs and log-sum-exps side by side, as fused layers have them: right, and nothing else is written."""
    arguments = one()
    good = splitkv.decode(**arguments).clone(), arguments["lse"].clone()
    row = torch.full((BATCH, Q_HEADS, WIDTH + WIDTH_V + 4), 7.0, dtype=DTYPE, device=DEVICE)
    q, out = row[..., :WIDTH], row[..., WIDTH : WIDTH + WIDTH_V]
    lse = row[..., -4:-2].view(torch.float32)[..., 0]
    q.copy_(arguments["q"])
    for _ in range(2):
        splitkv.decode(**arguments | dict(q=q, out=out, lse=lse))
        assert same_bits(out.contiguous(), good[0]) and same_bits(lse.contiguous(), good[1])
        assert bool((row[..., -2:] == 7).all()) and same_bits(q.contiguous(), arguments["q"])
        out.fill_(0)
    assert splitkv.supports(**arguments | dict(q=q, out=row[..., 8 : 8 + WIDTH_V])) is not None


class Wrapper(Tensor):
    """As a DTensor is one: of a shape, a device and strides, and without memory."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} of what was to be refused")


def test_what_wraps_tensors_is_refused_whatever_the_workspace_remembers() -> None:
    arguments = one()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    splitkv.decode(**arguments)
    for name, tensor in tensors.items():
        bad = arguments | {name: Wrapper(tensor)}
        with pytest.raises(TypeError, match=rf"^{name}: expected .* of its own, given a Wrapper without") as refused:
            splitkv.decode(**bad)
        assert splitkv.supports(**bad) == str(refused.value)
    with pytest.raises(TypeError, match=r"^q: expected .* of its own, given a Tensor without"):
        torch.vmap(lambda q: splitkv.decode(**arguments | dict(q=q)))(arguments["q"][None])


@pytest.mark.skipif(not AUTOGRAD, reason="nothing is derived")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # which PyTorch itself calls
def test_what_is_derived_forwards_is_refused_whatever_was_seen_before() -> None:
    """Else its derivative would be lost."""
    calls: list[tuple[Any, dict[str, Any]]] = [(splitkv.decode, one()), (splitkv.merge, merging())]
    calls += [(splitkv.append_kv, appending())]
    for call, arguments in calls:
        names = [name for name in ("q", "out", "lse", "outs", "lses", "k_new", "v_new") if name in arguments]
        call(**arguments)
        with torch.inference_mode(False), forward_ad.dual_level():
            for name in names:
                tangent = torch.ones_like(arguments[name])
                dual = forward_ad.make_dual(torch.zeros_like(arguments[name]), tangent)  # type: ignore[no-untyped-call]
                with pytest.raises(ValueError, match=rf"^{name}: expected .*, given one that has a tangent"):
                    call(**arguments | {name: dual})


def test_a_result_in_the_workspace_is_no_query_of_the_next_call() -> None:
    config = splitkv.WorkspaceConfig(BATCH, Q_HEADS, KV_HEADS, WIDTH, WIDTH, dtype=DTYPE)
    workspace, kv = splitkv.Workspace.allocate(config, DEVICE), latent()["kv"]
    rules: dict[str, Any] = dict(kv=kv, workspace=workspace, sm_scale=0.5)
    q = torch.ones(BATCH, Q_HEADS, WIDTH, dtype=DTYPE, device=DEVICE)
    result = splitkv.decode(q, **rules)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out: expected memory apart from q, given"):
            splitkv.decode(result, **rules)
    apart = torch.empty_like(q)
    assert splitkv.decode(result, out=apart, **rules) is apart
