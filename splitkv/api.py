"""The calls: check, choose tiles, launch. Everything that is refused is refused here, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splitkv import _interpreter, checks
from splitkv import tiles as tile_sizes
from splitkv.config import DTYPES, cdiv, next_power_of_2, tile_bound
from splitkv.kernels.launch import launch
from splitkv.kernels.merge import merge_kernel, merge_splits_kernel
from splitkv.kernels.split_decode import split_decode_kernel
from splitkv.kv import KVView
from splitkv.schedule import BALANCED, FIXED_PARTS, FIXED_TOKENS
from splitkv.workspace import Workspace

MAX_SPAN = 2**30  # a wider window is none, and a longer axis of work would outgrow 32 bits


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything but the stream."""

    kernel: Any
    grid: tuple[int, ...]
    operands: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    dependent: bool = False
    max_registers: int = 0

    def run(self, device: torch.device) -> None:
        launch(
            self.kernel,
            self.grid,
            device,
            self.operands,
            self.constants,
            self.num_warps,
            self.dependent,
            self.max_registers,
        )


@dataclass(frozen=True)
class Plan:
    """What a decode call will do: its outputs and its launches."""

    device: torch.device
    out: Tensor
    lse: Tensor | None
    launches: tuple[Launch, ...]

    def run(self) -> None:
        for step in self.launches:
            step.run(self.device)


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

    Args:
        q: [batch, num_q_heads, head_dim]; or [batch, q_len, num_q_heads, head_dim]; or
            [total_q, num_q_heads, head_dim] with qo_indptr. The workspace's dtype, any strides with the last 1.
        kv: The cache, of the same dtype; its num_kv_heads divides num_q_heads. The current tokens are in it.
        workspace: Scratch, arbitrary on entry. Use it from one stream at a time.
        qo_indptr: [batch + 1] int32, prefix sums of query tokens per request, read on the device.
        sm_scale: Logit multiplier; head_dim ** -0.5 by default.
        causal: Query token i of q_len sees keys up to seq_len - q_len + i, its position; False: all keys.
        window_left: Keys left of a query token's position that it sees besides its own, ≥ 0; None: all.
        softcap: Cap of the scaled scores, cap · tanh(score / cap); finite and > 0.
        sinks: [num_q_heads] float32 or the workspace's dtype: a logit per head that joins the softmax denominator.
        alibi_slopes: [num_q_heads] float32: slope · |position - key| is subtracted from the scaled scores.
        tree_mask: [batch, max_q_len, ceil(max_q_len / 32)] int32: bit j % 32 of word j // 32 of row i says whether
            draft token i sees draft token j. Replaces the causal rule among query tokens; all keys before them stay
            visible.
        num_splits: Force every tile into that many parts, part p of n being tokens p · len // n … (p + 1) · len // n.
            None: as the workspace's split_tokens says, or balanced over the GPU.
        out: [*q.shape[:-1], head_dim_v] of the workspace's dtype, any strides with the last 1. None: a view of
            workspace.out, valid until the next call on that workspace.
        lse: q.shape[:-1] float32, any strides: filled with the natural log-sum-exp of each row's scores, without the
            sink.

    Returns:
        The output, shaped like q with head_dim_v last. A query token that sees no key gets exactly 0, and -inf in lse.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    plan = plan_decode(
        q, kv, workspace, qo_indptr=qo_indptr, sm_scale=sm_scale, causal=causal, window_left=window_left,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, tree_mask=tree_mask, num_splits=num_splits,
        out=out, lse=lse,
    )  # fmt: skip
    plan.run()
    return plan.out


def decode_with_lse(q: Tensor, kv: KVView, workspace: Workspace, **rules: Any) -> tuple[Tensor, Tensor]:
    """As `decode`, and also returns the log-sum-exp.

    Args:
        q, kv, workspace, **rules: As for `decode`.

    Returns:
        (out, lse): lse is q.shape[:-1] float32, natural log, without the sink; by default a view of workspace.lse,
        valid until the next call on that workspace.
    """
    plan = plan_decode(q, kv, workspace, want_lse=True, **rules)
    plan.run()
    assert plan.lse is not None
    return plan.out, plan.lse


def supports(q: Tensor, kv: KVView, workspace: Workspace, **rules: Any) -> str | None:
    """Why `decode` would refuse this call, or None. Launches nothing.

    Args:
        q, kv, workspace, **rules: As for `decode`.
    """
    try:
        plan_decode(q, kv, workspace, **rules)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


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
) -> Plan:
    """Check a decode call and say which kernels it launches, with what. Arguments as for `decode`."""
    # The query, the cache and the workspace belong together.
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a splitkv.Workspace, given {type(workspace).__name__}")
    if not isinstance(kv, KVView):
        raise TypeError(f"kv: expected a PagedKV, ContiguousKV or RaggedKV, given {type(kv).__name__}")
    config = workspace.config
    q = checks.check_tensor("q", q)
    checks.check_dtype("q", q, config.dtype)
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("q: expected a tensor outside autograd (decode has no backward), given one that requires grad")
    batch, q_len, total_q, q_strides = _query_shape(q, qo_indptr)
    ragged = qo_indptr is not None
    checks.check_last_stride("q", q)
    num_q_heads, head_dim = q.shape[-2:]
    if head_dim != kv.head_dim:
        raise ValueError(f"q: expected head_dim {kv.head_dim} (that of kv), given {head_dim}")
    if num_q_heads == 0 or num_q_heads % kv.num_kv_heads:
        raise ValueError(f"q: expected heads that are a multiple of kv's {kv.num_kv_heads}, given {num_q_heads}")
    if kv.dtype != config.dtype:
        raise TypeError(f"kv: expected {config.dtype} (that of the workspace), given {kv.dtype}")
    checks.check_device("q", q, workspace.device, "the workspace")
    if kv.device != workspace.device:
        raise ValueError(f"kv: expected device {workspace.device} (that of the workspace), given {kv.device}")
    kv.check_batch(batch)
    refusal = _interpreter.why_not(q.device.type)
    if refusal is not None:
        raise ValueError(f"q: {refusal}")

    # The score rules.
    sm_scale = head_dim**-0.5 if sm_scale is None else checks.check_finite("sm_scale", sm_scale)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, given {causal!r}")
    if window_left is not None:
        checks.require_int("window_left", window_left, 0)
    if softcap is not None:
        softcap = checks.check_finite("softcap", softcap, above=0.0)
    if sinks is not None:
        _check_heads("sinks", sinks, q, "q", torch.float32, config.dtype)
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
    if num_splits is not None:
        checks.require_int("num_splits", num_splits, 1, 4096)

    if checks.debugging() and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        q_lens = [q_len] * batch
        if qo_indptr is not None:
            bounds = qo_indptr.tolist()
            checks.check_prefix_sums("qo_indptr", bounds, total_q)
            q_lens = [last - first for first, last in pairwise(bounds)]
        kv.check_values(q_lens, window_left)

    # Outputs.
    head_dim_v = kv.head_dim_v
    out_shape = (*q.shape[:-1], head_dim_v)
    if out is None:
        out = _view_of(workspace.out, "out", out_shape)
    else:
        out = checks.check_tensor("out", out)
        checks.check_dtype("out", out, config.dtype)
        checks.check_shape("out", out, out_shape)
        checks.check_device("out", out, q.device, "q")
        checks.check_last_stride("out", out)
        checks.check_no_overlap("out", out)
    if lse is not None:
        lse = checks.check_tensor("lse", lse)
        checks.check_dtype("lse", lse, torch.float32)
        checks.check_shape("lse", lse, q.shape[:-1])
        checks.check_device("lse", lse, q.device, "q")
        checks.check_no_overlap("lse", lse)
    elif want_lse:
        lse = _view_of(workspace.lse, "lse", q.shape[:-1])

    # Query tiles, and the partials that they may leave.
    num_kv_heads = kv.num_kv_heads
    group_size = num_q_heads // num_kv_heads
    rows = config.q_tile_rows
    if not ragged:
        rows = min(rows, max(16, next_power_of_2(q_len * group_size)))
    kv_vector = _vector(16, kv.k, kv.v)
    if kv_vector == 1 or tree_mask is not None:
        # Warp-group products (64 rows on Hopper) of values that come through registers, not by an asynchronous copy,
        # read wrong shared memory where key and value widths differ (seen with Triton 3.6).
        rows = min(rows, 32)
    target = workspace.target
    tile_sizes.check_dtype(target, config.dtype)
    rows = tile_sizes.fit_rows(target, config.dtype, head_dim, head_dim_v, rows, aligned=kv_vector > 1)
    q_tiles = tile_bound(batch, total_q, group_size, rows) if ragged else batch * cdiv(q_len * group_size, rows)
    slots = min(workspace.partial_out.numel() // (rows * head_dim_v), workspace.partial_lse.numel() // rows)
    fixed = num_splits is not None or config.split_tokens is not None
    tiles = None
    if workspace.tiles is not None:
        tiles = workspace.tiles.lookup(target.arch, config.dtype, head_dim, head_dim_v, rows)
    if tiles is None:
        tiles = tile_sizes.choose(
            target,
            config.dtype,
            head_dim,
            head_dim_v,
            rows,
            aligned=kv_vector > 1,
            # Never with fixed parts: a row's bits must not depend on how many others there are.
            few_tiles=not fixed and 2 * q_tiles * num_kv_heads <= target.num_sms,
        )
    dependent = target.arch.startswith("cuda:") and int(target.arch[5:]) >= 90
    if fixed:
        schedule = FIXED_TOKENS if num_splits is None else FIXED_PARTS
        parts = config.max_parts if num_splits is None else num_splits
        units = q_tiles * parts
        if parts > 1 and units * num_kv_heads > slots:
            name = "split_tokens" if num_splits is None else "num_splits"
            raise ValueError(
                f"{name}: expected at most {slots} partial tiles (the workspace's capacity for {rows} rows of width "
                f"{head_dim_v}), given {units * num_kv_heads} "
                f"({q_tiles} query tiles · {num_kv_heads} KV heads · {parts} parts)"
            )
    else:
        schedule, parts = BALANCED, 0
        units = tile_sizes.share_count(target.num_sms * tiles.programs_per_sm, num_kv_heads, slots)

    where = kv.addressing
    has_window = window_left is not None
    reach = min(window_left, MAX_SPAN) if window_left is not None else 0
    several = ragged or q_len > 1 or tree_mask is not None
    block_d, block_d_tail = tile_sizes.split_width(head_dim)
    block_dv, block_dv_tail = tile_sizes.split_width(head_dim_v)
    out_strides = _row_strides(out, ragged, last=True)
    lse_strides = (0, 0, 0) if lse is None else _row_strides(lse, ragged, last=False)
    shared_operands = dict(
        partial_out_ptr=workspace.partial_out,
        partial_lse_ptr=workspace.partial_lse,
        out_ptr=out,
        lse_ptr=lse,
        lens_ptr=where.lens,
        indptr_ptr=where.indptr,
        kv_start_ptr=kv.kv_start,
        qo_indptr_ptr=qo_indptr,
        sinks_ptr=sinks,
        batch=batch,
        q_len=max(q_len, 1),
        total_q=total_q,
        capacity=where.capacity,
        window_left=reach,
        shares=units,
        heaviest=max(1, MAX_SPAN // max(q_tiles, 1)),
        stride_out_batch=out_strides[0],
        stride_out_token=out_strides[1],
        stride_out_head=out_strides[2],
        stride_lse_batch=lse_strides[0],
        stride_lse_token=lse_strides[1],
        stride_lse_head=lse_strides[2],
    )
    shared_constants = dict(
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM_V=head_dim_v,
        PAGE_SIZE=where.page_size,
        KV_KIND=where.kind,
        SCHEDULE=schedule,
        SPLIT_TOKENS=(config.split_tokens or 0) if schedule == FIXED_TOKENS else 0,
        PARTS=parts,
        MIN_CHUNK=tiles.min_chunk,
        SEGMENT_COST=tiles.segment_cost,
        DEPENDENT_LAUNCH=dependent,
        HAS_WINDOW=has_window,
        HAS_LSE=lse is not None,
        BLOCK_B=1 if batch <= 1 else 16 if batch <= 16 else 64 if batch <= 64 else 256,
        WIDEN=_widen(config.dtype),
        BLOCK_M=rows,
    )
    stride_k = _steps("k", where.stride_k, kv_vector)
    stride_v = _steps("v", where.stride_v, kv_vector)
    split = Launch(
        kernel=split_decode_kernel,
        grid=(units * num_kv_heads,),
        operands=dict(
            q_ptr=q,
            k_ptr=kv.k,
            v_ptr=kv.v,
            table_ptr=where.table,
            rows_ptr=kv.rows,
            alibi_ptr=alibi_slopes,
            tree_ptr=tree_mask,
            sm_scale=sm_scale,
            softcap=softcap if softcap is not None else 1.0,
            stride_q_batch=q_strides[0],
            stride_q_token=q_strides[1],
            stride_q_head=q_strides[2],
            stride_k_page=stride_k[0],
            stride_k_token=stride_k[1],
            stride_k_head=stride_k[2],
            stride_v_page=stride_v[0],
            stride_v_token=stride_v[1],
            stride_v_head=stride_v[2],
            stride_table_row=where.stride_table_row,
            stride_tree_batch=0 if tree_mask is None else tree_mask.stride(0),
            stride_tree_row=0 if tree_mask is None else tree_mask.stride(1),
            **shared_operands,
        ),
        constants=dict(
            HEAD_DIM=head_dim,
            MULTI_TOKEN=several,
            CAUSAL=causal,
            HAS_SOFTCAP=softcap is not None,
            Q_VECTOR=_vector(16, q, out),
            SAME_STRIDES=stride_k == stride_v,
            KV_VECTOR=kv_vector,
            BLOCK_N=tiles.block_n,
            BLOCK_D=block_d,
            BLOCK_D_TAIL=block_d_tail,
            BLOCK_DV=block_dv,
            BLOCK_DV_TAIL=block_dv_tail,
            NUM_STAGES=tiles.num_stages,
            **shared_constants,
        ),
        num_warps=tiles.num_warps,
        dependent=dependent,
        max_registers=tiles.max_registers,
    )
    launches = [split] if q_tiles else []
    # Nothing is left to merge where every tile has one part by construction; rows past qo_indptr[-1] are the merge's.
    if ragged or not (schedule != BALANCED and parts == 1):
        # Most parts that one tile is likely to have: all are loaded at once where they are many.
        likely = parts if schedule != BALANCED else units // max(q_tiles, 1) + 1
        block_p = min(128, max(4, next_power_of_2(likely)))
        block = min(max(16, next_power_of_2(head_dim_v)), 2048 // max(block_p, 16))
        launches.append(
            Launch(
                kernel=merge_splits_kernel,
                grid=(total_q, num_q_heads, cdiv(head_dim_v, block)),
                operands=shared_operands,
                constants=dict(
                    RIGHT_BOUND=causal and tree_mask is None, BLOCK_P=block_p, BLOCK_DV=block, **shared_constants
                ),
                num_warps=1,
                dependent=dependent,
            )
        )
    return Plan(device=workspace.device, out=out, lse=lse, launches=tuple(launches))


def _view_of(buffer: Tensor, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The first elements of a workspace buffer in this shape."""
    needed = 1
    for size in shape:
        needed *= size
    if needed > buffer.numel():
        raise ValueError(
            f"workspace: expected {name} of at least {needed} elements for {checks.shape_text(shape)}, "
            f"given {buffer.numel()} ({checks.shape_text(buffer.shape)})"
        )
    return buffer.view(-1)[:needed].view(shape)


def merge(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys into the result over all of them.

    >>> outs = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])  # two partials of one row; the second saw no key
    >>> out, lse = merge(outs, torch.tensor([[0.5], [-torch.inf]]))
    >>> out, lse
    (tensor([[1., 2.]]), tensor([0.5000]))

    Associative and commutative up to rounding; (0, -inf) is the identity, exactly. Partials that are to be merged are
    made without sinks; the sink joins at the last merge.

    Args:
        outs: [n, …, heads, head_dim_v] float16, bfloat16 or float32, n ≥ 1, any strides with the last 1 in which the
            dimensions between the first and the heads lie evenly. What a partial of lse -inf holds is ignored.
        lses: [n, …, heads] float32, natural log.
        sinks: [heads] float32 or the dtype of outs: a logit per head that joins the denominator (not the returned lse).
        out: [..., heads, head_dim_v] of the dtype of outs; made where None.
        lse: [..., heads] float32; made where None.

    Returns:
        (out, lse): out is exactly 0 and lse -inf where no partial saw a key.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
    """
    outs = checks.check_tensor("outs", outs)
    lses = checks.check_tensor("lses", lses)
    checks.check_dtype("outs", outs, *DTYPES)
    checks.check_dtype("lses", lses, torch.float32)
    if outs.dim() < 2 or outs.shape[0] < 1 or outs.shape[-1] < 1:
        raise ValueError(f"outs: expected shape [n ≥ 1, …, head_dim_v ≥ 1], given {checks.shape_text(outs.shape)}")
    checks.check_last_stride("outs", outs)
    checks.check_shape("lses", lses, outs.shape[:-1])
    checks.check_device("lses", lses, outs.device, "outs")
    refusal = _interpreter.why_not(outs.device.type)
    if refusal is not None:
        raise ValueError(f"outs: {refusal}")
    if sinks is not None:
        if outs.dim() < 3:
            raise ValueError(f"sinks: expected outs with a dimension of heads, given {checks.shape_text(outs.shape)}")
        _check_heads("sinks", sinks, outs, "outs", torch.float32, outs.dtype)
    if out is not None:
        checks.check_tensor("out", out)
        checks.check_dtype("out", out, outs.dtype)
        checks.check_shape("out", out, outs.shape[1:])
        checks.check_device("out", out, outs.device, "outs")
        checks.check_last_stride("out", out)
        checks.check_no_overlap("out", out)
    if lse is not None:
        checks.check_tensor("lse", lse)
        checks.check_dtype("lse", lse, torch.float32)
        checks.check_shape("lse", lse, outs.shape[1:-1])
        checks.check_device("lse", lse, outs.device, "outs")
        checks.check_no_overlap("lse", lse)
    rows, heads = _rows_and_heads("outs", outs.shape[1:-1], outs.stride()[1:-1])
    lses_rows, lses_heads = _rows_and_heads("lses", lses.shape[1:], lses.stride()[1:])
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device) if out is None else out
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device) if lse is None else lse
    out_rows, out_heads = _rows_and_heads("out", out.shape[:-1], out.stride()[:-1])
    lse_rows, lse_heads = _rows_and_heads("lse", lse.shape, lse.stride())
    head_dim_v = outs.shape[-1]
    block = min(128, max(16, next_power_of_2(head_dim_v)))
    Launch(
        kernel=merge_kernel,
        grid=(rows[0], heads[0], cdiv(head_dim_v, block)),
        operands=dict(
            outs_ptr=outs,
            lses_ptr=lses,
            out_ptr=out,
            lse_ptr=lse,
            sinks_ptr=sinks,
            parts=outs.shape[0],
            stride_outs_part=outs.stride(0),
            stride_outs_row=rows[1],
            stride_outs_head=heads[1],
            stride_lses_part=lses.stride(0),
            stride_lses_row=lses_rows[1],
            stride_lses_head=lses_heads[1],
            stride_out_row=out_rows[1],
            stride_out_head=out_heads[1],
            stride_lse_row=lse_rows[1],
            stride_lse_head=lse_heads[1],
        ),
        constants=dict(HEAD_DIM_V=head_dim_v, HAS_LSE=True, WIDEN=_widen(outs.dtype), BLOCK_P=16, BLOCK_DV=block),
        num_warps=1,
    ).run(outs.device)
    return out, lse


def _rows_and_heads(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Leading dimensions as (rows, stride) and (heads, stride); raises where the rows do not lie evenly."""
    if not shape:
        return (1, 0), (1, 0)
    heads = (shape[-1], strides[-1])
    size, stride = 1, 0
    for n, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if n == 1:
            continue
        if size > 1 and step != size * stride:
            raise ValueError(
                f"{name}: expected leading dimensions that lie evenly in memory, given shape "
                f"{checks.shape_text(shape)} with strides {checks.shape_text(strides)}"
            )
        stride = step if size == 1 else stride
        size *= n
    return (size, stride), heads
