"""The calls: check, choose tiles, launch. Everything that is refused is refused here, before anything is launched."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splitkv import _interpreter, checks, operators
from splitkv import tiles as tile_sizes
from splitkv.config import DTYPES, cdiv, next_power_of_2
from splitkv.kernels.groups import group_kernel
from splitkv.kernels.merge import merge_kernel, merge_splits_kernel
from splitkv.kernels.prepared import Launch, PreparedCalls, PreparedLaunches, Stretch
from splitkv.kernels.split_decode import split_decode_kernel
from splitkv.kv import CSR, OPERANDS, PAGED, KVView, check_view
from splitkv.variants import ALIGNED_BYTES, CallForm, SharedPass, Variant
from splitkv.workspace import Workspace

MAX_SPLITS = 4096  # of one tile
MAX_SPAN = 2**30  # a wider window is none, and a longer axis of work would outgrow 32 bits


# The kernels' names of the tensors that a call gives besides its view's.
GIVEN = (
    "q_ptr", "out_ptr", "lse_ptr", "qo_indptr_ptr", "sinks_ptr", "alibi_ptr", "tree_ptr", "group_ids_ptr",
    "prefix_lens_ptr", "partial_out_ptr", "partial_lse_ptr",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a decode call will do: its outputs and its launches.

    Attributes:
        device: Where.
        out, lse: Its outputs; lse None where none was asked for.
        launches: At most two; four over keys that requests share.
        form: What its kernels depend on, sizes aside.
        operands: Those of both kernels by name.
    """

    device: torch.device
    out: Tensor
    lse: Tensor | None
    launches: tuple[Launch, ...]
    form: CallForm
    operands: dict[str, Any]

    def run(self) -> None:
        for step in self.launches:
            step.run(self.device)


class PreparedCall:
    """A call that was checked, for further ones of the same form: whatever is not an address is the same."""

    __slots__ = ("_launches", "_lse_shape", "_out_shape", "_q_bytes")

    def __init__(self, plan: Plan) -> None:
        self._launches = PreparedLaunches(plan.launches, (*GIVEN, *OPERANDS), plan.device)
        self._out_shape = plan.out.shape, plan.out.stride()
        self._lse_shape = None if plan.lse is None else (plan.lse.shape, plan.lse.stride())
        self._q_bytes = checks.reach(plan.operands["q_ptr"])

    def run(
        self,
        q: Tensor,
        cache: tuple[Tensor | None, ...],
        workspace: Workspace,
        qo_indptr: Tensor | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        tree_mask: Tensor | None,
        group_ids: Tensor | None,
        prefix_lens: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch it for these tensors, `cache` being those of a view, and return its outputs."""
        # Where outputs lie is no matter of form. In the workspace's own memory nothing but a query can lie: that of a
        # call after the one whose result it is.
        first, last = workspace.results
        apart = out is None and lse is None and not first - self._q_bytes < q.data_ptr() < last
        if out is None:
            out = workspace.out.as_strided(*self._out_shape)
        if lse is None and self._lse_shape is not None:
            lse = workspace.lse.as_strided(*self._lse_shape)
        self._launches(
            (
                q,
                out,
                workspace.partial_lse if lse is None else lse,
                qo_indptr,
                sinks,
                alibi_slopes,
                tree_mask,
                group_ids,
                prefix_lens,
                workspace.partial_out,
                workspace.partial_lse,
                *cache,
            ),
            None
            if apart
            else lambda: check_outputs_apart(
                cache, workspace, q, out, lse, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens
            ),
        )
        return out, lse


def decode(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    *,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend each request's query tokens to its KV cache.

    >>> import torch, splitkv
    >>> config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> workspace = splitkv.Workspace.allocate(config, device="cpu")
    >>> k, v = torch.randn(2, 2, 40, 2, 64, dtype=torch.float16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.tensor([40, 17], dtype=torch.int32))
    >>> splitkv.decode(torch.randn(2, 4, 64, dtype=torch.float16), kv, workspace).shape
    torch.Size([2, 4, 64])

    Reads no device value on the host, allocates nothing and launches at most two kernels on the current stream, so that
    it can be captured in a CUDA graph and replayed after lengths, page ids, qo_indptr or tokens were overwritten.
    With SPLITKV_DEBUG=1 in the environment, lengths, rows and page ids are first read back (not during a capture); one
    that is out of range raises ValueError with its row.
    Under `torch.compile`, also with fullgraph=True, it is one operator of the graph, with the same bits and errors.

    Args:
        q: [batch, num_q_heads, head_dim]; or [batch, q_len, num_q_heads, head_dim]; or
            [total_q, num_q_heads, head_dim] with qo_indptr. The workspace's dtype, any strides with the last 1.
        kv: The cache, of the same dtype or quantised; its num_kv_heads divides num_q_heads. The current tokens are in
            it.
        workspace: Scratch, arbitrary on entry. Use it from one stream at a time.
        qo_indptr: [batch + 1] int32, prefix sums of query tokens per request, read on the device.
        sm_scale: Logit multiplier; head_dim ** -0.5 by default. A LatentKV has no default.
        causal: Query token i of q_len sees keys up to seq_len - q_len + i, its position; False: all keys.
        window_left: Keys left of a query token's position that it sees besides its own, ≥ 0; None: all.
        softcap: Cap of the scaled scores, cap · tanh(score / cap); finite and > 0.
        sinks: [num_q_heads] float32 or the workspace's dtype: a logit per head that joins the softmax denominator.
        alibi_slopes: [num_q_heads] float32: slope · |position - key| is subtracted from the scaled scores.
        tree_mask: [≥ batch, max_q_len ≥ q_len, ceil(max_q_len / 32)] int32: bit j % 32 of word j // 32 of row i says
            whether draft token i sees draft token j. Replaces the causal rule among query tokens (causal=False is
            refused); all keys before them stay visible. Where a request on the device has more than max_q_len query
            tokens, bits that the mask lacks count as 0: those tokens see the keys before the query tokens alone, and no
            token sees them.
        num_splits: Force every tile into that many parts, part p of n being tokens p · len // n … (p + 1) · len // n.
            None: as the workspace's split_tokens says, or balanced over the GPU.
        out: [*q.shape[:-1], head_dim_v] of the workspace's dtype, or float32 for a result that is to be merged; any
            strides with the last 1. None: a view of workspace.out, valid until the next call on that workspace.
        lse: q.shape[:-1] float32, any strides: filled with the natural log-sum-exp of each row's scores, without the
            sink. Neither output shares memory with the other or with what the call reads; a query that is an earlier
            call's result in workspace.out needs an out of its own.

    Returns:
        The output, shaped like q with head_dim_v last. A query token that sees no key gets exactly 0, and -inf in lse.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    return _attend(
        q, kv, workspace, False, qo_indptr, sm_scale, causal, window_left, softcap, sinks, alibi_slopes, tree_mask,
        num_splits, out, lse,
    )[0]  # fmt: skip


def decode_shared_prefix(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    group_ids: Tensor,
    prefix_lens: Tensor,
    *,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As `decode`, where requests share the first pages of their caches: those are read once for many of them.

    Query tokens of all requests of a group are attended to the keys that they have in common in tiles of up to 128 rows
    per KV head (with split_tokens or num_splits: the config's q_tile_rows), each request to the rest on its own, and
    both results are merged.
    What comes out is what `decode` computes, up to rounding.

    >>> import torch, splitkv
    >>> config = splitkv.WorkspaceConfig(3, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> workspace = splitkv.Workspace.allocate(config, device="cpu")
    >>> k, v = torch.randn(2, 8, 16, 2, 64, dtype=torch.float16)
    >>> table = torch.tensor([[5, 2, 7], [5, 2, 0], [1, 3, 6]], dtype=torch.int32)  # two requests begin with 5, 2
    >>> kv = splitkv.PagedKV(k, v, table, torch.tensor([40, 35, 48], dtype=torch.int32))
    >>> groups = torch.tensor([0, 0, -1], dtype=torch.int32)
    >>> prefix_lens = torch.tensor([32, 32, 0], dtype=torch.int32)
    >>> q = torch.randn(3, 4, 64, dtype=torch.float16)
    >>> splitkv.decode_shared_prefix(q, kv, workspace, groups, prefix_lens).shape
    torch.Size([3, 4, 64])

    Like `decode` it waits for nothing and allocates nothing; it launches four kernels. group_ids and prefix_lens are
    read on the device by each call, so that a CUDA graph is right after they were overwritten, as lengths and pages may
    be. A config with q_tile_rows=128 leaves room for as many programs as the GPU runs at a time; with less room there
    are fewer. With split_tokens a row's bits depend on its own inputs and on how many tokens its group has in common.
    Partials of both kinds of tiles lie side by side then, for which a default max_splits may be too small: the refusal
    says how many are enough.

    Args:
        q, workspace: As for `decode`.
        kv: A PagedKV, by table or CSR, or a LatentKV.
        group_ids: [≥ batch] int32, the group of each request in 0…batch - 1, in any order; requests of another number,
            such as -1, share nothing. Alone in its group, a request shares nothing either.
        prefix_lens: [≥ batch] int32, how many of its first tokens a request shares with its group, whole pages or not.
            The caller promises that any two requests of a group have the same page ids for as many tokens as both
            share. Attended together is what all of them share: the least length of the group, or less where the query
            tokens of one of them reach further left.
        qo_indptr, sm_scale, causal, window_left, softcap, sinks, alibi_slopes, tree_mask, num_splits, out, lse: As for
            `decode`. num_splits and the config's split_tokens cut both kinds of tiles.

    Returns:
        As `decode`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched. With
            SPLITKV_DEBUG=1 also where requests of a group have other pages.
    """
    for name, vector in (("group_ids", group_ids), ("prefix_lens", prefix_lens)):
        checks.check_tensor(name, vector)
    return _attend(
        q, kv, workspace, False, qo_indptr, sm_scale, causal, window_left, softcap, sinks, alibi_slopes, tree_mask,
        num_splits, out, lse, group_ids, prefix_lens,
    )[0]  # fmt: skip


def decode_with_lse(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    *,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `decode`, and also returns the log-sum-exp.

    >>> import torch, splitkv
    >>> config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> k, v = torch.zeros(2, 2, 40, 2, 64, dtype=torch.float16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.tensor([40, 0], dtype=torch.int32))
    >>> q, workspace = torch.randn(2, 4, 64, dtype=torch.float16), splitkv.Workspace.allocate(config, device="cpu")
    >>> out, lse = splitkv.decode_with_lse(q, kv, workspace)
    >>> lse[:, 0].exp().round()  # scores of 0: the number of keys
    tensor([40.,  0.])

    Args:
        q, kv, workspace and all others: As for `decode`.

    Returns:
        (out, lse): lse is q.shape[:-1] float32, natural log, without the sink; by default a view of workspace.lse,
        valid until the next call on that workspace.
    """
    out, lse = _attend(
        q, kv, workspace, True, qo_indptr, sm_scale, causal, window_left, softcap, sinks, alibi_slopes, tree_mask,
        num_splits, out, lse,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def _attend(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    want_lse: bool,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    group_ids: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Check the call, unless the workspace remembers one of its form, and launch it; (out, lse)."""
    if operators.tracing(q):
        if operators.shapes_only(q):
            plan_decode(
                q, kv, workspace, want_lse=want_lse, qo_indptr=qo_indptr, sm_scale=sm_scale, causal=causal,
                window_left=window_left, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, tree_mask=tree_mask,
                num_splits=num_splits, out=out, lse=lse, group_ids=group_ids, prefix_lens=prefix_lens,
            )  # fmt: skip
        return _trace(
            q, kv, workspace, want_lse, qo_indptr, sm_scale, causal, window_left, softcap, sinks, alibi_slopes,
            tree_mask, num_splits, out, lse, group_ids, prefix_lens,
        )  # fmt: skip
    form: Hashable = None
    call: PreparedCall | None = None
    try:
        # Everything that plan_decode looks at, but for values that change with the same tensors. Numbers together with
        # their types: 1, 1.0 and True are equal, and not all of them are accepted.
        form = (
            _form_of(q),
            kv.form, kv.k.data_ptr() % ALIGNED_BYTES, kv.v.data_ptr() % ALIGNED_BYTES,
            want_lse,
            sm_scale, sm_scale.__class__, causal, causal.__class__, window_left, window_left.__class__,
            softcap, softcap.__class__, num_splits, num_splits.__class__,
            None if qo_indptr is None else _form_of(qo_indptr),
            None if sinks is None else _form_of(sinks),
            None if alibi_slopes is None else _form_of(alibi_slopes),
            None if tree_mask is None else _form_of(tree_mask),
            None if group_ids is None else _form_of(group_ids),
            None if prefix_lens is None else _form_of(prefix_lens),
            None if out is None else _form_of(out),
            None if lse is None else _form_of(lse),
        )  # fmt: skip
        call = workspace.recall(form)
    except (AttributeError, TypeError, RuntimeError):
        form = None  # some argument is no such thing at all: plan_decode says which
    if call is None or checks.needs_grad(q, out, lse) or checks.debugging():
        plan = plan_decode(
            q, kv, workspace, want_lse=want_lse, qo_indptr=qo_indptr, sm_scale=sm_scale, causal=causal,
            window_left=window_left, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, tree_mask=tree_mask,
            num_splits=num_splits, out=out, lse=lse, group_ids=group_ids, prefix_lens=prefix_lens,
        )  # fmt: skip
        if form is None:
            plan.run()
            return plan.out, plan.lse
        if call is None:
            call = PreparedCall(plan)
            workspace.remember(form, call)
    return call.run(
        q, kv.tensors, workspace, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens, out, lse
    )  # fmt: skip


def _trace(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    want_lse: bool,
    qo_indptr: Tensor | None,
    sm_scale: float | None,
    causal: bool,
    window_left: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    tree_mask: Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    group_ids: Tensor | None,
    prefix_lens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The call as an operator of a graph that is being traced; (out, lse)."""
    _check_kinds(kv, workspace)
    refusal = operators.refused(_check_numbers, sm_scale, causal, window_left, softcap, num_splits)
    refusal = refusal or operators.followed(("q", q), ("out", out), ("lse", lse))
    if refusal is not None:
        sm_scale, causal, window_left, softcap, num_splits = None, True, None, None, None
    want_lse = want_lse or lse is not None
    torch.ops.splitkv.decode(
        q, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens, workspace.partial_out,
        workspace.partial_lse, workspace.out if out is None else out,
        (workspace.lse if lse is None else lse) if want_lse else None, out is not None, lse is not None,
        workspace.spec, sm_scale, causal, window_left, softcap, num_splits, refusal, *operators.take_apart(kv),
    )  # fmt: skip
    if out is None:
        out = _traced_view_of(workspace.out, "out", (*q.shape[:-1], kv.head_dim_v))
    if lse is None and want_lse:
        lse = _traced_view_of(workspace.lse, "lse", q.shape[:-1])
    return out, lse


def _traced_view_of(buffer: Tensor, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """As `view_of`, but where the buffer is too small: the operator before it will have refused the call."""
    needed = 1
    for size in shape:
        needed *= size
    return buffer.new_empty(shape) if needed > buffer.numel() else view_of(buffer, name, shape)


@operators.operator(
    "decode(Tensor q, Tensor? qo_indptr, Tensor? sinks, Tensor? alibi_slopes, Tensor? tree_mask, Tensor? group_ids, "
    "Tensor? prefix_lens, Tensor(a!) partial_out, Tensor(b!) partial_lse, Tensor(c!) out, Tensor(d!)? lse, "
    "bool out_given, bool lse_given, str workspace, float? sm_scale, bool causal, SymInt? window_left, "
    f"float? softcap, SymInt? num_splits, str? refusal, {operators.READ_VIEW})"
)
def _decode_operator(
    q: Tensor,
    qo_indptr: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    tree_mask: Tensor | None,
    group_ids: Tensor | None,
    prefix_lens: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    out_given: bool,
    lse_given: bool,
    workspace: str,
    sm_scale: float | None,
    causal: bool,
    window_left: int | None,
    softcap: float | None,
    num_splits: int | None,
    refusal: str | None,
    *view: Any,
) -> None:
    """The call in a graph. out and lse are the workspace's, of any size, unless they were given."""
    operators.refuse(refusal)
    scratch = Workspace.of_parts(workspace, partial_out, partial_lse, out, partial_lse if lse is None else lse)
    given_out, given_lse = out if out_given else None, lse if lse_given else None
    form = (
        out_given, lse_given, sm_scale, causal, window_left, softcap, num_splits, *view[operators.VIEW_TENSORS :],
        *(
            None if tensor is None else _form_of(tensor)
            for tensor in (
                q, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens, partial_out, partial_lse, out,
                lse, *view[: operators.VIEW_TENSORS],
            )
        ),
    )  # fmt: skip
    call: PreparedCall | None = scratch.recall(form)
    if call is None or checks.debugging():
        kv = operators.put_together(*view)
        cache = kv.tensors
        plan = plan_decode(
            q, kv, scratch, want_lse=lse is not None, qo_indptr=qo_indptr, sm_scale=sm_scale, causal=causal,
            window_left=window_left, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, tree_mask=tree_mask,
            num_splits=num_splits, out=given_out, lse=given_lse, group_ids=group_ids, prefix_lens=prefix_lens,
        )  # fmt: skip
        if call is None:
            call = PreparedCall(plan)
            scratch.remember(form, call)
    else:
        cache = operators.operands(*view)
    call.run(
        q, cache, scratch, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens, given_out, given_lse
    )  # fmt: skip


def check_outputs_apart(
    cache: tuple[Tensor | None, ...],
    workspace: Workspace,
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    qo_indptr: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    tree_mask: Tensor | None,
    group_ids: Tensor | None,
    prefix_lens: Tensor | None,
    *exchanged: Tensor,
) -> None:
    """Raise ValueError unless the outputs lie apart from each other and from all else that a call reads or writes."""
    others = (
        ("q", q), ("qo_indptr", qo_indptr), ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("tree_mask", tree_mask),
        ("group_ids", group_ids), ("prefix_lens", prefix_lens), ("workspace.partial_out", workspace.partial_out),
        ("workspace.partial_lse", workspace.partial_lse), *(("kv", tensor) for tensor in cache),
        *(("exchange", tensor) for tensor in exchanged),
    )  # fmt: skip
    checks.check_apart("out", out, (*others, ("lse", lse)))
    if lse is not None:
        checks.check_apart("lse", lse, others)


def _form_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """All that checks and constants depend on of a tensor."""
    address = tensor.data_ptr()  # 0 of no memory
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % ALIGNED_BYTES if address else -1,
        tensor.is_neg(),
    )  # fmt: skip


def warmup(q: Tensor, kv: KVView, workspace: Workspace, **rules: Any) -> None:
    """Compile and load everything that such a call can launch, whatever its lengths, batch, strides and alignment.

    Launches nothing. Afterwards `decode` and `decode_with_lse` compile nothing for calls with the same rules, q of as
    many dimensions and with the same q_len, heads and width, and a view of the same kind, dtype, heads, widths and page
    size, with or without the same optional tensors; so that the first one may be inside a capture of a CUDA graph.
    Under Triton's interpreter there is nothing to compile.

    >>> import torch, splitkv
    >>> config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> k, v = torch.zeros(2, 2, 40, 2, 64, dtype=torch.float16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.zeros(2, dtype=torch.int32))
    >>> splitkv.warmup(torch.zeros(2, 4, 64).half(), kv, splitkv.Workspace.allocate(config, "cpu"), softcap=30.0)

    Takes about a second per kernel, of which there are tens; Triton keeps them on disk for the next process.

    Args:
        q, kv, workspace, **rules: As for `decode`. Contents do not matter, nor do the values of sm_scale (but
            whether it is above 0), window_left (but None) and softcap (but None).

    Raises:
        TypeError, ValueError: as `decode` does.
    """
    _refuse_unknown("warmup", rules)
    plan = plan_decode(q, kv, workspace, **rules)
    if _interpreter.interpreting():
        return
    max_batch = None
    if plan.form.q_len is not None and rules.get("out") is None:
        # More do not fit the workspace's out.
        max_batch = workspace.out.numel() // (plan.form.q_len * q.shape[-2] * kv.head_dim_v)
    if plan.form.listed_tiles is not None and kv.schedule is not None:
        max_batch = min(max_batch or kv.schedule.max_batch_size, kv.schedule.max_batch_size)
    compiled = set()
    with torch.cuda.device(plan.device):
        for variant in plan.form.variants(max_batch):
            for step in _launches(variant, plan.operands, batch=1, total_q=1, num_q_heads=1):
                operands = tuple(name for name, value in step.operands.items() if value is not None)
                key = step.kernel, operands, tuple(step.constants.items()), step.num_warps, step.max_registers
                if key not in compiled:
                    compiled.add(key)
                    step.compile()


def supports(q: Tensor, kv: KVView, workspace: Workspace, **rules: Any) -> str | None:
    """Why `decode` would refuse this call, or None. Launches nothing.

    >>> import torch, splitkv
    >>> config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> k, v = torch.zeros(2, 2, 40, 2, 64, dtype=torch.float16)
    >>> kv = splitkv.ContiguousKV(k, v, torch.tensor([40, 17], dtype=torch.int32))
    >>> splitkv.supports(torch.zeros(2, 4, 64), kv, splitkv.Workspace.allocate(config, device="cpu"))
    'q: expected torch.float16, given torch.float32'

    Args:
        q, kv, workspace, **rules: As for `decode`; with group_ids and prefix_lens, as for `decode_shared_prefix`.

    Raises:
        TypeError: a keyword that neither knows.
    """
    _refuse_unknown("supports", rules)
    try:
        plan_decode(q, kv, workspace, **rules)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _refuse_unknown(call: str, rules: dict[str, Any]) -> None:
    """Raise TypeError, in the name of this function, for a keyword that no call of decode has."""
    unknown = rules.keys() - (inspect.signature(plan_decode).parameters.keys() - {"want_lse"})
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def _vector(align: int, *tensors: Tensor) -> int:
    """Elements up to `align` bytes that every row of these tensors is aligned to: all of them, or 1."""
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.data_ptr() % align or any(
            stride * size % align for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1
        ):
            return 1
    return align // tensors[0].element_size()


def _steps(name: str, strides: tuple[int, ...], vector: int) -> tuple[int, ...]:
    """Strides in steps of `vector` elements, which the kernel takes in 32 bits."""
    steps = tuple(stride // vector for stride in strides)
    if max(steps) >= 2**31:
        raise ValueError(
            f"{name}: expected strides below {2**31 * vector} elements, given {checks.shape_text(strides)}"
            + ("" if vector > 1 else "; rows aligned to 16 bytes may be further apart")
        )
    return steps


def _widen(dtype: torch.dtype) -> bool:
    """Whether kernels must compute in float32 and round by hand: Triton's interpreter gets bfloat16 wrong."""
    return dtype == torch.bfloat16 and _interpreter.interpreting()


def _query_shape(q: Tensor, qo_indptr: Tensor | None) -> tuple[int, int, int, tuple[int, int, int]]:
    """(batch, q_len, total_q, strides of batch, token and head); q_len is 0 where it varies."""
    if qo_indptr is not None:
        checks.check_rank("q", q, 3)
        checks.check_index_vector("qo_indptr", qo_indptr, q.device, "q", least=1)
        return qo_indptr.shape[0] - 1, 0, q.shape[0], (0, q.stride(0), q.stride(1))
    checks.check_rank("q", q, 3, 4)
    if q.dim() == 3:
        return q.shape[0], 1, q.shape[0], (q.stride(0), 0, q.stride(1))
    if q.shape[1] == 0:
        raise ValueError(f"q: expected q_len ≥ 1, given shape {checks.shape_text(q.shape)}")
    return q.shape[0], q.shape[1], q.shape[0] * q.shape[1], (q.stride(0), q.stride(1), q.stride(2))


def _row_strides(tensor: Tensor, ragged: bool, last: bool) -> tuple[int, int, int]:
    """Strides of batch, token and head of an out or, if not `last`, of an lse."""
    strides = tensor.stride()[:-1] if last else tensor.stride()
    if len(strides) == 3:
        return strides[0], strides[1], strides[2]
    return (0, strides[0], strides[1]) if ragged else (strides[0], 0, strides[1])


def _check_heads(name: str, value: object, rows: Tensor, of: str, *dtypes: torch.dtype) -> Tensor:
    """Check a vector of one number per head of `rows` [..., heads, width], the argument named by `of`."""
    value = checks.check_tensor(name, value)
    checks.check_dtype(name, value, *dtypes)
    checks.check_shape(name, value, [rows.shape[-2]])
    checks.check_device(name, value, rows.device, of)
    if value.shape[0] > 1 and value.stride(0) != 1:
        raise ValueError(f"{name}: expected a stride of 1, given {value.stride(0)}")
    return value


def check_sinks(sinks: object, q: Tensor, dtype: torch.dtype) -> None:
    """Check sinks of all heads of q."""
    _check_heads("sinks", sinks, q, "q", *dict.fromkeys((torch.float32, dtype)))


def check_out(out: object, shape: Sequence[int], beside: Tensor, of: str, *dtypes: torch.dtype) -> None:
    """Check a tensor that an output of this shape will be written to, on the device of `beside`, argument `of`."""
    out = checks.check_tensor("out", out)
    checks.check_dtype("out", out, *dict.fromkeys(dtypes))
    checks.check_shape("out", out, shape)
    checks.check_device("out", out, beside.device, of)
    checks.check_last_stride("out", out)
    checks.check_no_overlap("out", out)
    checks.check_no_grad("out", out)


def check_lse(lse: object, shape: Sequence[int], beside: Tensor, of: str) -> None:
    """Check a tensor that log-sum-exps of this shape will be written to, on the device of `beside`, argument `of`."""
    lse = checks.check_tensor("lse", lse)
    checks.check_dtype("lse", lse, torch.float32)
    checks.check_shape("lse", lse, shape)
    checks.check_device("lse", lse, beside.device, of)
    checks.check_no_overlap("lse", lse)
    checks.check_no_grad("lse", lse)


def _check_kinds(kv: object, workspace: object) -> None:
    """Raise TypeError unless these are a view and a workspace."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a splitkv.Workspace, given {type(workspace).__name__}")
    check_view(kv)


def _check_numbers(sm_scale: object, causal: object, window_left: object, softcap: object, num_splits: object) -> None:
    """Raise unless the arguments that are no tensors are of their types and within their bounds."""
    if sm_scale is not None:
        checks.check_finite("sm_scale", sm_scale)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, given {causal!r}")
    if window_left is not None:
        checks.require_int("window_left", window_left, 0)
    if softcap is not None:
        checks.check_finite("softcap", softcap, above=0.0)
    if num_splits is not None:
        checks.require_int("num_splits", num_splits, 1, MAX_SPLITS)


def plan_decode(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    *,
    want_lse: bool = False,
    qo_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    group_ids: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> Plan:
    """Check a decode call and say which kernels it launches, with what.

    Arguments as for `decode`, or with group_ids and prefix_lens as for `decode_shared_prefix`.
    """
    # The query, the cache and the workspace belong together.
    _check_kinds(kv, workspace)
    config = workspace.config
    q = checks.check_tensor("q", q)
    checks.check_dtype("q", q, config.dtype)
    checks.check_no_grad("q", q)
    batch, q_len, total_q, q_strides = _query_shape(q, qo_indptr)
    ragged = qo_indptr is not None
    checks.check_last_stride("q", q)
    num_q_heads, head_dim = q.shape[-2:]
    if head_dim != kv.head_dim:
        raise ValueError(f"q: expected head_dim {kv.head_dim} (that of kv), given {head_dim}")
    if num_q_heads == 0 or num_q_heads % kv.num_kv_heads:
        raise ValueError(f"q: expected heads that are a multiple of kv's {kv.num_kv_heads}, given {num_q_heads}")
    if kv.dtype != config.dtype and not kv.quantized:
        raise TypeError(f"kv: expected {config.dtype} (that of the workspace), given {kv.dtype}")
    checks.check_device("q", q, workspace.device, "the workspace")
    if kv.device != workspace.device:
        raise ValueError(f"kv: expected device {workspace.device} (that of the workspace), given {kv.device}")
    kv.check_batch(batch)
    refusal = None if q.is_meta else _interpreter.why_not(q.device.type)
    if refusal is not None:
        raise ValueError(f"q: {refusal}")

    # The score rules.
    if sm_scale is None and kv.latent:
        raise ValueError("sm_scale: expected a number with a LatentKV (that of the model, not 1/√width), given None")
    _check_numbers(sm_scale, causal, window_left, softcap, num_splits)
    sm_scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    score_scale = checks.check_finite("sm_scale · k_scale", sm_scale * kv.scales[0].number)
    if sinks is not None:
        check_sinks(sinks, q, config.dtype)
    if alibi_slopes is not None:
        _check_heads("alibi_slopes", alibi_slopes, q, "q", torch.float32)
    if tree_mask is not None:
        tree_mask = checks.check_tensor("tree_mask", tree_mask)
        checks.check_dtype("tree_mask", tree_mask, torch.int32)
        checks.check_rank("tree_mask", tree_mask, 3)
        checks.check_device("tree_mask", tree_mask, q.device, "q")
        checks.check_last_stride("tree_mask", tree_mask)
        longest = tree_mask.shape[1]
        if tree_mask.shape[0] < batch or longest < q_len or tree_mask.shape[2] != cdiv(longest, 32):
            raise ValueError(
                f"tree_mask: expected shape [≥ {batch}, max_q_len ≥ {max(q_len, 1)}, ceil(max_q_len / 32)], "
                f"given {checks.shape_text(tree_mask.shape)}"
            )
        if not causal:
            raise ValueError("tree_mask: expected causal=True (it replaces the causal rule), given causal=False")
    shares_keys = group_ids is not None or prefix_lens is not None
    if shares_keys:
        for name, vector in (("group_ids", group_ids), ("prefix_lens", prefix_lens)):
            checks.check_index_vector(name, vector, q.device, "q", least=batch)
        if kv.addressing.kind not in (PAGED, CSR):
            raise TypeError(
                f"kv: expected a PagedKV or LatentKV, whose requests can share pages, given {type(kv).__name__}"
            )
        if kv.positions is not None:
            raise ValueError("kv: expected a view of whole sequences, given a shard")

    if checks.debugging(q.device):
        q_lens = [q_len] * batch
        if qo_indptr is not None:
            bounds = qo_indptr.tolist()
            checks.check_prefix_sums("qo_indptr", bounds, total_q)
            q_lens = [last - first for first, last in pairwise(bounds)]
        if tree_mask is not None:
            for row, tokens in enumerate(q_lens):
                if tokens > tree_mask.shape[1]:
                    raise ValueError(
                        f"tree_mask: expected max_q_len ≥ {tokens} (query tokens of row {row}), given "
                        f"{tree_mask.shape[1]}"
                    )
        kv.check_values(q_lens, window_left)
        if group_ids is not None and prefix_lens is not None:
            kv.check_shared(group_ids[:batch].tolist(), prefix_lens[:batch].tolist(), q_lens, window_left)

    # Outputs.
    head_dim_v = kv.head_dim_v
    out_shape = (*q.shape[:-1], head_dim_v)
    if out is None:
        out = view_of(workspace.out, "out", out_shape)
    else:
        check_out(out, out_shape, q, "q", config.dtype, torch.float32)
    if lse is not None:
        check_lse(lse, q.shape[:-1], q, "q")
    elif want_lse:
        lse = view_of(workspace.lse, "lse", q.shape[:-1])
    check_outputs_apart(
        kv.tensors, workspace, q, out, lse, qo_indptr, sinks, alibi_slopes, tree_mask, group_ids, prefix_lens
    )

    # The kernels.
    tile_sizes.check_dtype(workspace.target, config.dtype)
    tile_sizes.check_cache_dtype(workspace.target, kv.dtype)
    kv_vector = _vector(ALIGNED_BYTES, kv.k, kv.v)
    where = kv.addressing
    stride_k = _steps("k", where.stride_k, kv_vector)
    stride_v = _steps("v", where.stride_v, kv_vector)
    list_capacity = None
    if kv.schedule is not None and not (ragged or num_splits or config.split_tokens) and window_left is None:
        if batch > kv.schedule.max_batch_size:
            raise ValueError(
                f"schedule: expected a batch of at most {kv.schedule.max_batch_size} (its capacity), given {batch}"
            )
        list_capacity = kv.schedule.config.max_q_tiles
    form = CallForm(
        config=config,
        target=workspace.target,
        tiles=workspace.tiles,
        partial_elements=workspace.partial_out.numel(),
        partial_rows=workspace.partial_lse.numel(),
        num_kv_heads=kv.num_kv_heads,
        group_size=num_q_heads // kv.num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        kind=where.kind,
        page_size=where.page_size,
        by_page=where.kind in (PAGED, CSR),
        q_len=None if ragged else q_len,
        causal=causal,
        has_window=window_left is not None,
        has_softcap=softcap is not None,
        has_tree=tree_mask is not None,
        num_splits=num_splits,
        listed_tiles=list_capacity,
        len_hint=kv.len_hint,
        kv_dtype=kv.dtype,
        kv_format=kv.format,
        latent=kv.latent,
        k_scale_per_token=kv.scales[0].per_token,
        v_scale_per_token=kv.scales[1].per_token,
        native=workspace.target.converts_float8 and not _interpreter.interpreting(),
        widen=_widen(config.dtype),
        positive_scale=score_scale > 0,
        shares_keys=shares_keys,
        has_kv_start=kv.kv_start is not None,
    )
    q_tiles = form.q_tiles(batch, total_q, kv_vector)
    # Kernels may count such strides in bytes, in 31 bits.
    near = kv.latent or where.stride_k[0] * kv.dtype.itemsize < 2**31
    same_strides = near and (where.stride_k[1] == head_dim if kv.latent else stride_k == stride_v)
    if shares_keys and batch > 1:
        variant = form.choose_shared(
            batch, q_tiles, total_q, _vector(ALIGNED_BYTES, q), kv_vector, same_strides
        )  # fmt: skip
    else:
        # As many elements of out as of q, which may be wider.
        out_bytes = ALIGNED_BYTES * out.element_size() // q.element_size()
        q_vector = min(_vector(ALIGNED_BYTES, q), _vector(out_bytes, out))
        variant = form.choose(batch, q_tiles, q_vector, kv_vector, same_strides)
    out_strides = _row_strides(out, ragged, last=True)
    lse_strides = (0, 0, 0) if lse is None else _row_strides(lse, ragged, last=False)
    scale_strides = [
        _steps(name, scale.strides, 1) for name, scale in zip(("k_scale", "v_scale"), kv.scales, strict=True)
    ]
    operands = dict(
        q_ptr=q,
        **dict(zip(OPERANDS, kv.tensors, strict=True)),
        partial_out_ptr=workspace.partial_out,
        partial_lse_ptr=workspace.partial_lse,
        out_ptr=out,
        lse_ptr=workspace.partial_lse if lse is None else lse,  # not written without has_lse
        qo_indptr_ptr=qo_indptr,
        sinks_ptr=sinks,
        alibi_ptr=alibi_slopes,
        tree_ptr=tree_mask,
        members_ptr=None,
        group_ids_ptr=group_ids,
        prefix_lens_ptr=prefix_lens,
        whole_out_ptr=None,
        whole_lse_ptr=None,
        shared_out_ptr=None,
        shared_lse_ptr=None,
        groups_ptr=None,
        places_ptr=None,
        batch=batch,
        q_len=max(q_len, 1),
        total_q=total_q,
        capacity=where.capacity,
        window_left=0 if window_left is None else min(window_left, MAX_SPAN),
        shares=variant.units,
        heaviest=max(1, MAX_SPAN // max(q_tiles, 1)),
        has_lse=int(lse is not None),
        tree_len=0 if tree_mask is None else tree_mask.shape[1],
        shard_first=0 if kv.positions is None else kv.positions.first,
        shard_step=1 if kv.positions is None else kv.positions.step,
        shared_shares=0,
        shared_heaviest=1,
        sm_scale=score_scale,
        softcap=1.0 if softcap is None else float(softcap),
        v_scale=kv.scales[1].number,
        stride_q_batch=q_strides[0],
        stride_q_token=q_strides[1],
        stride_q_head=q_strides[2],
        stride_out_batch=out_strides[0],
        stride_out_token=out_strides[1],
        stride_out_head=out_strides[2],
        stride_lse_batch=lse_strides[0],
        stride_lse_token=lse_strides[1],
        stride_lse_head=lse_strides[2],
        stride_k_page=stride_k[0],
        stride_k_token=stride_k[1],
        stride_k_head=stride_k[2],
        stride_v_page=stride_v[0],
        stride_v_token=stride_v[1],
        stride_v_head=stride_v[2],
        stride_k_scale_page=scale_strides[0][0],
        stride_k_scale_token=scale_strides[0][1],
        stride_k_scale_head=scale_strides[0][2],
        stride_v_scale_page=scale_strides[1][0],
        stride_v_scale_token=scale_strides[1][1],
        stride_v_scale_head=scale_strides[1][2],
        stride_table_row=where.stride_table_row,
        stride_tree_batch=0 if tree_mask is None else tree_mask.stride(0),
        stride_tree_row=0 if tree_mask is None else tree_mask.stride(1),
    )
    launches = _launches(variant, operands, batch, total_q, num_q_heads)
    return Plan(workspace.device, out, lse, launches, form, operands)


def _merge_grid(variant: Variant, total_q: int, num_q_heads: int) -> tuple[int, int, int]:
    """Programs of merge_splits_kernel."""
    sizes = variant.merge
    return cdiv(total_q, sizes["TOKENS"]), num_q_heads, cdiv(sizes["HEAD_DIM_V"], sizes["BLOCK_DV"])


def _launches(
    variant: Variant, operands: dict[str, Any], batch: int, total_q: int, num_q_heads: int
) -> tuple[Launch, ...]:
    """The launches of a call, from the operands of both its kernels."""
    if variant.shared is not None:
        return _shared_launches(variant, variant.shared, operands, batch, total_q, num_q_heads)
    if not variant.listed:
        operands = {**operands, "list_ptr": None}

    split = Launch(
        kernel=split_decode_kernel,
        grid=(variant.units * variant.split["NUM_KV_HEADS"],),
        operands=_operands_of(split_decode_kernel, operands),
        constants=variant.split,
        num_warps=variant.num_warps,
        dependent=variant.dependent,
        max_registers=variant.max_registers,
    )
    merge = Launch(
        kernel=merge_splits_kernel,
        grid=_merge_grid(variant, total_q, num_q_heads),
        operands=_operands_of(merge_splits_kernel, operands),
        constants=variant.merge,
        num_warps=1,
        dependent=variant.dependent,
    )
    # Without a query tile there is nothing to attend.
    return ((split,) if variant.q_tiles else ()) + ((merge,) if variant.merges else ())


def _operands_of(kernel: Any, operands: dict[str, Any]) -> dict[str, Any]:
    """Those of these operands that a kernel has parameters for."""
    return {name: operands[name] for name in kernel.arg_names if name in operands}


def _shared_launches(
    variant: Variant, shared: SharedPass, operands: dict[str, Any], batch: int, total_q: int, num_q_heads: int
) -> tuple[Launch, ...]:
    """The launches of a call over keys that requests share.

    What is shared; attention of whole groups to that; attention of each request to the rest; the merge of both. The
    lists that the first makes take the place of the lengths, starts and rows that the others would read of the view.
    """
    width, partial_out = variant.merge["HEAD_DIM_V"], operands["partial_out_ptr"]
    own_first, whole_first = shared.slot_rows, shared.slot_rows + shared.own_slot_rows
    words_first = partial_out.numel() - shared.words

    def out_rows(first: int) -> Stretch:
        return Stretch("partial_out_ptr", 4 * first * width, torch.float32)

    def lse_rows(first: int) -> Stretch:
        return Stretch("partial_lse_ptr", 4 * first, torch.float32)

    def words(first: int) -> Stretch:
        return Stretch("partial_out_ptr", 4 * (words_first + first), torch.int32)

    def launch(
        kernel: Any, grid: tuple[int, ...], stretches: dict[str, Stretch], changes: dict[str, Any], **how: Any
    ) -> Launch:
        views = {name: stretch.on(operands[stretch.of]) for name, stretch in stretches.items()}
        return Launch(
            kernel=kernel,
            grid=grid,
            operands=_operands_of(kernel, {**operands, **changes, **views}),
            stretches=stretches,
            dependent=variant.dependent,
            **how,
        )

    # The lists, as group_kernel writes them.
    groups, members = words(0), words(5 * batch + 1)
    places = words(5 * batch + 1 + 3 * total_q)
    group_lens, group_starts, group_rows, own_starts = (words(n * batch + 1) for n in (1, 2, 3, 4))
    head, token = width, num_q_heads * width
    q_len = operands["q_len"]
    ragged = operands["qo_indptr_ptr"] is not None
    whole = dict(
        list_ptr=None,
        sinks_ptr=None,  # joins at the merge
        has_lse=1,
        stride_out_batch=0 if ragged else q_len * token,
        stride_out_token=token,
        stride_out_head=head,
        stride_lse_batch=0 if ragged else q_len * num_q_heads,
        stride_lse_token=num_q_heads,
        stride_lse_head=1,
    )
    if ragged:
        # Gathered query tokens are found as those of requests with one token each.
        by_token = dict(
            stride_q_batch=operands["stride_q_token"],
            stride_q_token=0,
            stride_out_batch=token,
            stride_out_token=0,
            stride_lse_batch=num_q_heads,
            stride_lse_token=0,
        )
    else:
        by_token = {}
    shared_shares = dict(shares=shared.units, heaviest=max(1, MAX_SPAN // max(shared.q_tiles, 1)))
    split_heads = variant.split["NUM_KV_HEADS"]
    find = launch(
        group_kernel,
        (cdiv(batch + 1, shared.group["BLOCK_G"]),),
        dict(groups_ptr=groups, members_ptr=members, places_ptr=places),
        {},
        constants=shared.group,
        num_warps=4,
    )
    attend_shared = launch(
        split_decode_kernel,
        (shared.units * split_heads,),
        dict(
            out_ptr=out_rows(whole_first + shared.whole_rows // 2),
            lse_ptr=lse_rows(whole_first + shared.whole_rows // 2),
            lens_ptr=group_lens,
            kv_start_ptr=group_starts,
            rows_ptr=group_rows,
            qo_indptr_ptr=groups,
            members_ptr=members,
        ),
        {**whole, **by_token, **shared_shares, "tree_ptr": None, "capacity": MAX_SPAN, "window_left": 0},
        constants=shared.split,
        num_warps=shared.num_warps,
        max_registers=shared.max_registers,
    )
    attend_own = launch(
        split_decode_kernel,
        (variant.units * split_heads,),
        dict(
            partial_out_ptr=out_rows(own_first),
            partial_lse_ptr=lse_rows(own_first),
            out_ptr=out_rows(whole_first),
            lse_ptr=lse_rows(whole_first),
            kv_start_ptr=own_starts,
        ),
        whole,
        constants=variant.split,
        num_warps=variant.num_warps,
        max_registers=variant.max_registers,
    )
    merge = launch(
        merge_splits_kernel,
        _merge_grid(variant, total_q, num_q_heads),
        dict(
            partial_out_ptr=out_rows(own_first),
            partial_lse_ptr=lse_rows(own_first),
            kv_start_ptr=own_starts,
            whole_out_ptr=out_rows(whole_first),
            whole_lse_ptr=lse_rows(whole_first),
            shared_out_ptr=out_rows(0),
            shared_lse_ptr=lse_rows(0),
            groups_ptr=groups,
            places_ptr=places,
        ),
        dict(list_ptr=None, shared_shares=shared_shares["shares"], shared_heaviest=shared_shares["heaviest"]),
        constants=variant.merge,
        num_warps=1,
    )
    return (find, attend_shared, attend_own, merge) if variant.q_tiles else (merge,)


def view_of(buffer: Tensor, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The first elements of a workspace buffer in this shape."""
    needed = 1
    for size in shape:
        needed *= size
    if needed > buffer.numel():
        raise ValueError(
            f"workspace: expected {name} of at least {needed} elements for {checks.shape_text(shape)}, "
            f"given {buffer.numel()} ({checks.shape_text(buffer.shape)}): a larger max_total_q in its config makes room"
        )
    return buffer.view(-1)[:needed].view(shape)


MERGE_NAMES = "outs_ptr", "lses_ptr", "out_ptr", "lse_ptr", "sinks_ptr", "indptr_ptr"


class PreparedMerge:
    """A call of `merge` that was checked, for further ones of the same form."""

    def __init__(self, step: Launch, within: bool, out: Tensor, lse: Tensor, rules: tuple[float, str]) -> None:
        self._rules = rules
        self._launches = PreparedLaunches([step], MERGE_NAMES, out.device)
        self._out, self._lse, self._within = (out.shape, out.dtype), lse.shape, within

    def run(
        self,
        outs: Tensor,
        lses: Tensor,
        indptr: Tensor | None,
        sinks: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Launch it for these tensors, and return its outputs. Where outputs lie is no matter of form: see `merge`."""
        made = out is None and lse is None
        if out is None:
            out = torch.empty(self._out[0], dtype=self._out[1], device=outs.device)
            if out.data_ptr() % ALIGNED_BYTES:  # by another allocator than when this was prepared
                base, layout = self._rules
                return merge(outs, lses, indptr=indptr, sinks=sinks, lse_base=base, lse_layout=layout, out=out, lse=lse)
        if lse is None:
            lse = torch.empty(self._lse, dtype=torch.float32, device=outs.device)
        self._launches(
            (outs, lses, out, lse, sinks, indptr),
            None if made else lambda: _check_merged_apart(outs, lses, out, lse, sinks, indptr, self._within),
        )
        return out, lse


def _check_merged_apart(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, indptr: Tensor | None, within: bool
) -> None:
    """Raise ValueError unless results lie apart from what is merged, or `within` it where they may."""
    checks.check_in_place("out", out, "outs", outs, within)
    checks.check_in_place("lse", lse, "lses", lses, within)
    checks.check_apart("out", out, (("lse", lse), ("lses", lses), ("sinks", sinks), ("indptr", indptr)))
    checks.check_apart("lse", lse, (("outs", outs), ("sinks", sinks), ("indptr", indptr)))


_merges = PreparedCalls[PreparedMerge]()


def merge(
    outs: Tensor,
    lses: Tensor,
    *,
    indptr: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: float = math.e,
    lse_layout: str = "NH",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys into the result over all of them.

    >>> outs = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])  # two partials of one row; the second saw no key
    >>> out, lse = merge(outs, torch.tensor([[0.5], [-torch.inf]]))
    >>> out, lse
    (tensor([[1., 2.]]), tensor([0.5000]))

    Associative and commutative up to rounding; (0, -inf) is the identity, exactly. Partials that are to be merged are
    made without sinks; the sink joins at the last merge. A log-sum-exp of +inf, by which some libraries mark a row
    without keys, counts as -inf.

    Args:
        outs: [n, …, heads, head_dim_v] float16, bfloat16 or float32, n ≥ 1, any strides with the last 1 in which the
            dimensions between the first and the last three lie evenly. What a partial of lse -inf holds is ignored.
            With indptr: [total, heads, head_dim_v], total ≥ 0.
        lses: [n, …, heads] float32, any strides likewise.
        indptr: [rows + 1] int32, read on the device: row r is merged from partials indptr[r] … indptr[r + 1] of outs,
            so that rows may have different numbers of them, or none. None: each row has n.
        sinks: [heads] float32 or the dtype of outs or out: a logit per head, in natural units whatever the base, that
            joins the denominator (not the returned lse).
        lse_base: Of lses and lse: math.e, as decode's, or 2, as FlashInfer's.
        lse_layout: "NH": lses and lse have the heads last; "HN": last but one, [n, …, heads, rows] and
            […, heads, rows], as FlashAttention's.
        out: [..., heads, head_dim_v] float16, bfloat16 or float32; made with the dtype of outs where None. It may be
            one of the partials, outs[i], or lies apart from all of them.
        lse: Like lses without the first dimension (with indptr: of the rows), float32; made where None. It may be
            lses[i], or lies apart.

    Returns:
        (out, lse): out is exactly 0 and lse -inf where no partial saw a key.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    if operators.tracing(outs):
        if operators.shapes_only(outs):
            _plan_merge(outs, lses, indptr, sinks, lse_base, lse_layout, out, lse)
        out_shape, lse_shape = _merged_shapes(outs, indptr, lse_layout)
        out = torch.empty(out_shape, dtype=outs.dtype, device=outs.device) if out is None else out
        lse = torch.empty(lse_shape, dtype=torch.float32, device=outs.device) if lse is None else lse
        refusal = operators.followed(("outs", outs), ("lses", lses), ("out", out), ("lse", lse))
        torch.ops.splitkv.merge(outs, lses, indptr, sinks, lse_base, lse_layout, out, lse, refusal)
        return out, lse
    form: Hashable = None
    call: PreparedMerge | None = None
    try:
        form = (
            _form_of(outs), _form_of(lses),
            None if indptr is None else _form_of(indptr),
            None if sinks is None else _form_of(sinks),
            None if out is None else _form_of(out),
            None if lse is None else _form_of(lse),
            lse_base, lse_base.__class__, lse_layout,
        )  # fmt: skip
        call = _merges.recall(form)
    except (AttributeError, TypeError, RuntimeError):
        form = None  # some argument is no such thing at all: the checks say which
    if call is not None and not checks.needs_grad(outs, lses, out, lse) and not checks.debugging():
        return call.run(outs, lses, indptr, sinks, out, lse)
    step, within, out, lse = _plan_merge(outs, lses, indptr, sinks, lse_base, lse_layout, out, lse)
    if form is None:
        step.run(outs.device)
    else:
        if call is None:
            call = PreparedMerge(step, within, out, lse, (lse_base, lse_layout))
            _merges.remember(form, call)
        call.run(outs, lses, indptr, sinks, out, lse)
    return out, lse


def _plan_merge(
    outs: Tensor,
    lses: Tensor,
    indptr: Tensor | None,
    sinks: Tensor | None,
    lse_base: float,
    lse_layout: str,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Launch, bool, Tensor, Tensor]:
    """Check a call of `merge`: its launch, whether outputs may be partials, and the outputs, made where not given."""
    outs = checks.check_tensor("outs", outs)
    lses = checks.check_tensor("lses", lses)
    checks.check_dtype("outs", outs, *DTYPES)
    checks.check_dtype("lses", lses, torch.float32)
    if indptr is not None:
        checks.check_index_vector("indptr", indptr, outs.device, "outs", least=1)
    out_shape, lse_shape = _merged_shapes(outs, indptr, lse_layout)
    checks.check_last_stride("outs", outs)
    for name, partials in (("outs", outs), ("lses", lses)):
        checks.check_no_grad(name, partials)
    if isinstance(lse_base, bool) or not isinstance(lse_base, (int, float)) or lse_base not in (math.e, 2):
        raise ValueError(f"lse_base: expected math.e or 2, given {lse_base!r}")
    heads_last = lse_layout == "NH"
    checks.check_shape("lses", lses, _lse_shape(outs.shape[:-1], heads_last))
    checks.check_device("lses", lses, outs.device, "outs")
    refusal = None if outs.is_meta else _interpreter.why_not(outs.device.type)
    if refusal is not None:
        raise ValueError(f"outs: {refusal}")
    if sinks is not None:
        if outs.dim() < 3:
            raise ValueError(f"sinks: expected outs with a dimension of heads, given {checks.shape_text(outs.shape)}")
        also = {outs.dtype: None} | ({out.dtype: None} if isinstance(out, Tensor) and out.dtype in DTYPES else {})
        _check_heads("sinks", sinks, outs, "outs", *{torch.float32: None, **also})
    if indptr is not None and checks.debugging(outs.device):
        checks.check_prefix_sums("indptr", indptr.tolist(), outs.shape[0])
    head_dim_v = outs.shape[-1]
    block = min(1024, max(16, next_power_of_2(head_dim_v)))
    # With several blocks of columns, or partials of other rows, a program could overwrite what another has yet to read.
    within = head_dim_v <= block and indptr is None
    if out is None:
        out = torch.empty(out_shape, dtype=outs.dtype, device=outs.device)
    else:
        check_out(out, out_shape, outs, "outs", *DTYPES)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=outs.device)
    else:
        check_lse(lse, lse_shape, outs, "outs")
    _check_merged_apart(outs, lses, out, lse, sinks, indptr, within)
    if not heads_last:
        lses, written_lse = lses.transpose(-2, -1), lse.transpose(-2, -1)
    else:
        written_lse = lse
    if indptr is None:
        outs_strides = outs.stride(0), *_row_and_head_strides("outs", outs.shape[1:-1], outs.stride()[1:-1])
        lses_strides = lses.stride(0), *_row_and_head_strides("lses", lses.shape[1:], lses.stride()[1:])
    else:
        outs_strides, lses_strides = (outs.stride(0), 0, 0, outs.stride(1)), (lses.stride(0), 0, 0, lses.stride(1))
    out_strides = _row_and_head_strides("out", out.shape[:-1], out.stride()[:-1])
    lse_strides = _row_and_head_strides("lse", written_lse.shape, written_lse.stride())
    heads = out_shape[-2] if len(out_shape) > 1 else 1
    vector = min(_vector(ALIGNED_BYTES, outs), _vector(ALIGNED_BYTES, out))
    step = Launch(
        kernel=merge_kernel,
        grid=(math.prod(out_shape[:-2]), heads, cdiv(head_dim_v, block)),
        operands=dict(
            outs_ptr=outs,
            lses_ptr=lses,
            out_ptr=out,
            lse_ptr=lse,
            sinks_ptr=sinks,
            indptr_ptr=indptr,
            parts=outs.shape[0],
            inner=max(out_shape[-3], 1) if len(out_shape) > 2 else 1,
            stride_outs_part=outs_strides[0],
            stride_outs_outer=outs_strides[1],
            stride_outs_inner=outs_strides[2],
            stride_outs_head=outs_strides[3],
            stride_lses_part=lses_strides[0],
            stride_lses_outer=lses_strides[1],
            stride_lses_inner=lses_strides[2],
            stride_lses_head=lses_strides[3],
            stride_out_outer=out_strides[0],
            stride_out_inner=out_strides[1],
            stride_out_head=out_strides[2],
            stride_lse_outer=lse_strides[0],
            stride_lse_inner=lse_strides[1],
            stride_lse_head=lse_strides[2],
        ),
        constants=dict(
            HEAD_DIM_V=head_dim_v,
            BASE2=lse_base == 2,
            WIDEN=_widen(out.dtype),
            VECTOR=vector,
            BLOCK_P=min(16, 2048 // block),
            BLOCK_DV=block,
        ),
        num_warps=1,
    )
    return step, within, out, lse


@operators.operator(
    "merge(Tensor outs, Tensor lses, Tensor? indptr, Tensor? sinks, float lse_base, str lse_layout, Tensor(a!) out, "
    "Tensor(b!) lse, str? refusal)"
)
def _merge_operator(
    outs: Tensor,
    lses: Tensor,
    indptr: Tensor | None,
    sinks: Tensor | None,
    lse_base: float,
    lse_layout: str,
    out: Tensor,
    lse: Tensor,
    refusal: str | None,
) -> None:
    operators.refuse(refusal)
    merge(outs, lses, indptr=indptr, sinks=sinks, lse_base=lse_base, lse_layout=lse_layout, out=out, lse=lse)


def _lse_shape(shape: tuple[int, ...], heads_last: bool) -> tuple[int, ...]:
    """Of log-sum-exps of rows and heads of this shape."""
    return shape if heads_last else (*shape[:-2], shape[-1], shape[-2])


def _merged_shapes(outs: Tensor, indptr: Tensor | None, lse_layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse of a merge; raises where outs has none that could be merged."""
    if indptr is not None:
        checks.check_rank("outs", outs, 3)
    if outs.dim() < 2 or (outs.shape[0] < 1 and indptr is None) or outs.shape[-1] < 1:
        raise ValueError(f"outs: expected shape [n ≥ 1, …, head_dim_v ≥ 1], given {checks.shape_text(outs.shape)}")
    checks.check_choice("lse_layout", lse_layout, "NH", "HN")
    heads_last = lse_layout == "NH"
    if not heads_last and outs.dim() < (4 if indptr is None else 3):
        raise ValueError(
            f'lse_layout: expected "NH" for outs without a dimension of rows, given "HN" for '
            f"{checks.shape_text(outs.shape)}"
        )
    out_shape: tuple[int, ...] = outs.shape[1:]
    if indptr is not None:
        out_shape = (indptr.shape[0] - 1, *out_shape)
    return out_shape, _lse_shape(out_shape[:-1], heads_last)


def _row_and_head_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides of all row dimensions but the last, of that, and of the heads; raises where the first lie unevenly."""
    if not shape:
        return 0, 0, 0
    size, outer = 1, 0
    for n, step in zip(reversed(shape[:-2]), reversed(strides[:-2]), strict=True):
        if n == 1:
            continue
        if size > 1 and step != size * outer:
            raise ValueError(
                f"{name}: expected leading dimensions that lie evenly in memory, given shape "
                f"{checks.shape_text(shape)} with strides {checks.shape_text(strides)}"
            )
        outer = step if size == 1 else outer
        size *= n
    return outer, strides[-2] if len(shape) > 1 else 0, strides[-1]
