"""Decode over a KV cache that is sharded along the sequence over the ranks of a `torch.distributed` group.

Every rank holds some tokens of every request and attends the queries to these; outputs and log-sum-exps are exchanged
in one collective and merged. A rank that is missing or has failed shows as torch.distributed's own error, within the
group's timeout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from splitkv import api, checks
from splitkv.config import WorkspaceConfig, align_up
from splitkv.kv import MAX_TOKENS, KVView
from splitkv.workspace import Workspace, aligned_bytes

# The same under its newer and its older name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

ROW_ELEMENTS = 8  # rows of what is exchanged are a multiple of so many float32 numbers, so that rows of out are aligned


MAX_VIEWS = 256  # shapes of calls whose views are kept; then it starts again


class Views(NamedTuple):
    """Parts of an exchange's buffers that a call uses.

    Attributes:
        sent, received: What the collective reads and writes.
        out, lse: The rank's own results in what is sent, shaped as those of `splitkv.decode`.
        outs, lses: Those that came in, as `splitkv.merge` takes them.
    """

    sent: Tensor
    out: Tensor
    lse: Tensor
    received: Tensor
    outs: Tensor
    lses: Tensor


class Exchange:
    """What the ranks of a group need to exchange results: buffers, made once, at fixed addresses.

    Partial results travel in float32, an output and its log-sum-exp side by side.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one of n processes
    >>> exchange = Exchange.allocate(WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64), "cpu")
    >>> exchange.rank, exchange.size, exchange.sent.shape
    (0, 1, torch.Size([576]))
    >>> dist.destroy_process_group()

    Attributes:
        config: The `WorkspaceConfig` that it was sized by, the same on all ranks.
        group: The process group.
        rank, size: This process's rank in it, and its ranks.
        by_heads: Whether each rank gets the merged rows of its share of the query heads alone.
        sent: [num_q_heads · max_total_q · row] float32, this rank's partial results; a row is head_dim_v + 1, rounded
            up to a multiple of 8.
        received: The same of all ranks; with by_heads, of this rank's heads from all ranks.
        device: Where.
    """

    def __init__(
        self, config: WorkspaceConfig, device: torch.device | str, group: dist.ProcessGroup | None, by_heads: bool
    ) -> None:
        """Use `allocate`."""
        if not isinstance(config, WorkspaceConfig):
            raise TypeError(f"config: expected a WorkspaceConfig, given {type(config).__name__}")
        if not isinstance(by_heads, bool):
            raise TypeError(f"by_heads: expected True or False, given {by_heads!r}")
        device = checks.as_device(device)
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group: expected torch.distributed.init_process_group() to have been called, given no group"
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, given {type(group).__name__}")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("group: expected a group that this process is a member of, given another")
        if by_heads and config.num_q_heads % size:
            raise ValueError(
                f"by_heads: expected query heads that are a multiple of the group's {size} ranks, given "
                f"{config.num_q_heads}"
            )
        self.config, self.group, self.rank, self.size, self.by_heads = config, group, rank, size, by_heads
        elements = config.num_q_heads * config.max_total_q * _row(config.head_dim_v)
        buffer = aligned_bytes(4 * align_up(elements, 64) * (2 if by_heads else 1 + size), device)
        with torch.inference_mode(False):
            # What no result lies in travels too: no NaN of another's memory, in case someone looks.
            numbers = buffer.zero_().view(torch.float32)
            self.sent = numbers[:elements]
            self.received = numbers[align_up(elements, 64) :][: elements * (1 if by_heads else size)]
        self.device = self.sent.device
        self._views: dict[tuple[int, ...], Views] = {}

    @classmethod
    def allocate(
        cls,
        config: WorkspaceConfig,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        by_heads: bool = False,
    ) -> Exchange:
        """Make the buffers, in one allocation.

        Args:
            config: The capacity, that of the workspace or smaller; the same on all ranks.
            device: Where, one that the group's backend serves.
            group: The ranks; None: all.
            by_heads: False: every rank gets every row (one all-gather). True: rank r of n gets those of query heads
                r · num_q_heads / n … (r + 1) · num_q_heads / n (one all-to-all, which moves 1 / n of the bytes).

        Raises:
            TypeError, ValueError: no config, no process group, or heads that the ranks do not divide.
        """
        return cls(config, device, group, by_heads)

    def views(self, tokens: tuple[int, ...], heads: int, width: int) -> Views:
        """Of the buffers for results of these dimensions of query tokens, query heads and this width; made once."""
        key = (*tokens, heads, width)
        views = self._views.get(key)
        if views is None:
            row = _row(width)
            used = math.prod(tokens) * heads * row
            share = heads // self.size if self.by_heads else heads
            with torch.inference_mode(False):
                sent, received = self.sent[:used], self.received[: used if self.by_heads else used * self.size]
                # Heads are outermost, so that what a rank gets lies in one stretch.
                rows = sent.view(heads, *tokens, row).movedim(0, -2)
                parts = received.view(self.size, share, *tokens, row).movedim(1, -2)
                views = Views(
                    sent, rows[..., :width], rows[..., width], received, parts[..., :width], parts[..., width]
                )
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views


def _row(head_dim_v: int) -> int:
    """float32 numbers of one row of a partial result: its output, its log-sum-exp, and what aligns the next row."""
    return align_up(head_dim_v + 1, ROW_ELEMENTS)


def round_robin_lens(seq_lens: Tensor, rank: int, size: int, *, out: Tensor | None = None) -> Tensor:
    """How many tokens of each sequence a rank holds where token i lies on rank i mod size, as its token i // size.

    >>> round_robin_lens(torch.tensor([0, 1, 7, 8], dtype=torch.int32), rank=1, size=3)
    tensor([0, 0, 2, 3], dtype=torch.int32)

    Args:
        seq_lens: int32 lengths of the whole sequences.
        rank, size: As for `KVView.shard`.
        out: Shaped like seq_lens, int32, filled and returned; made where None. It may be seq_lens itself.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given.
    """
    seq_lens = checks.check_tensor("seq_lens", seq_lens)
    checks.check_dtype("seq_lens", seq_lens, torch.int32)
    checks.require_int("size", size, 1, MAX_TOKENS)
    checks.require_int("rank", rank, 0, size - 1)
    if out is not None:
        out = checks.check_tensor("out", out)
        checks.check_dtype("out", out, torch.int32)
        checks.check_shape("out", out, seq_lens.shape)
        checks.check_device("out", out, seq_lens.device, "seq_lens")
        checks.check_no_overlap("out", out)
        if out.data_ptr() != seq_lens.data_ptr() or out.stride() != seq_lens.stride():
            checks.check_apart("out", out, [("seq_lens", seq_lens)])
    out = torch.add(seq_lens, size - 1 - rank, out=out)
    return out.div_(size, rounding_mode="floor")


def decode(
    q: Tensor,
    kv: KVView,
    workspace: Workspace,
    exchange: Exchange,
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
    """Attend each request's query tokens to a KV cache of which every rank of a group holds a shard.

    All ranks call it together, with the same queries, rules and sizes. What comes out is what `splitkv.decode` computes
    over the whole cache, up to rounding.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one of n processes
    >>> config = WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    >>> workspace, exchange = Workspace.allocate(config, "cpu"), Exchange.allocate(config, "cpu")
    >>> seq_lens = torch.tensor([40, 17], dtype=torch.int32)  # of the whole sequences
    >>> k, v = torch.randn(2, 2, 40, 2, 64, dtype=torch.float16)  # this rank's tokens: i with i mod n = rank
    >>> from splitkv import ContiguousKV
    >>> own = ContiguousKV(k, v, round_robin_lens(seq_lens, exchange.rank, exchange.size))
    >>> kv = own.shard(seq_lens, rank=exchange.rank, size=exchange.size)
    >>> decode(torch.randn(2, 4, 64, dtype=torch.float16), kv, workspace, exchange).shape
    torch.Size([2, 4, 64])
    >>> dist.destroy_process_group()

    Reads no device value on the host, allocates nothing and launches at most three kernels and one collective, on the
    current stream. With NCCL it can be captured in a CUDA graph, once a first call has set up communication, and
    replayed after other lengths, pages and queries were written, on all ranks alike. With SPLITKV_DEBUG=1 the ranks
    also compare how many tokens they hold of each sequence with its length.

    Args:
        q: As for `splitkv.decode`, all query heads, the same on all ranks.
        kv: This rank's tokens: a view with its `shard` method applied. Uneven and empty shards are fine.
        workspace: As for `splitkv.decode`.
        exchange: Made once for this group; use it from one stream at a time.
        qo_indptr, sm_scale, causal, window_left, softcap, alibi_slopes, tree_mask, num_splits: As for `splitkv.decode`;
            the same on all ranks. Positions are those of whole sequences; kv_start of the view counts its own tokens,
            and num_splits and the config's split_tokens cut them.
        sinks: As for `splitkv.decode`, of all query heads. They join once, when shards are merged.
        out: [*q.shape[:-2], heads, head_dim_v], heads being all query heads, or with by_heads the rank's: the
            workspace's dtype or float32. None: a view of workspace.out, valid until the next call on that workspace.
        lse: [*q.shape[:-2], heads] float32: filled with the natural log-sum-exp over all shards, without the sink.

    Returns:
        The output.

    Raises:
        TypeError, ValueError: naming the argument, what was expected, and what was given; nothing was launched.
        Whatever the process group's backend raises where a rank is missing.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange: expected a splitkv.distributed.Exchange, given {type(exchange).__name__}")
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a splitkv.Workspace, given {type(workspace).__name__}")
    if not isinstance(kv, KVView):
        raise TypeError(
            f"kv: expected a shard of a PagedKV, ContiguousKV, RaggedKV or LatentKV, given {type(kv).__name__}"
        )
    rank, size = exchange.rank, exchange.size
    if kv.positions is None:
        raise ValueError(
            "kv: expected a shard of longer sequences (its shard method says of which), given a whole view"
        )
    if kv.positions.starts is None and (kv.positions.first, kv.positions.step) != (rank, size):
        raise ValueError(
            f"kv: expected the shard of rank {rank} of {size} (that of exchange), given that of rank "
            f"{kv.positions.first} of {kv.positions.step}"
        )
    q = checks.check_tensor("q", q)
    checks.check_rank("q", q, 3, 4)
    checks.check_device("q", q, exchange.device, "exchange")
    *tokens, heads, _ = q.shape
    width, row = kv.head_dim_v, _row(kv.head_dim_v)
    used = math.prod(tokens) * heads * row
    if used > exchange.sent.numel():
        raise ValueError(
            f"exchange: expected room for {used} numbers ({math.prod(tokens)} query tokens · {heads} heads · rows of "
            f"{row}), given {exchange.sent.numel()}"
        )
    share = heads // size if exchange.by_heads else heads
    if exchange.by_heads and heads % size:
        raise ValueError(f"q: expected heads that are a multiple of the exchange's {size} ranks, given {heads}")
    if sinks is not None:
        api.check_sinks(sinks, q, workspace.config.dtype)
        if exchange.by_heads:
            sinks = sinks[rank * share : (rank + 1) * share]
    given = out is not None or lse is not None
    if out is None:
        out = api.view_of(workspace.out, "out", (*tokens, share, width))
    else:
        api.check_out(out, (*tokens, share, width), q, "q", workspace.config.dtype, torch.float32)
    if lse is None:
        lse = api.view_of(workspace.lse, "lse", (*tokens, share))
    else:
        api.check_lse(lse, (*tokens, share), q, "q")
    if given:
        api.check_outputs_apart(
            kv.tensors, workspace, q, out, lse, qo_indptr, sinks, alibi_slopes, tree_mask, None, None,
            exchange.sent, exchange.received,
        )  # fmt: skip
    if checks.debugging(q.device):
        _check_lengths(kv, exchange, q.shape[0] if qo_indptr is None else qo_indptr.shape[0] - 1)

    views = exchange.views(tuple(tokens), heads, width)
    api.decode(
        q, kv, workspace, qo_indptr=qo_indptr, sm_scale=sm_scale, causal=causal, window_left=window_left,
        softcap=softcap, alibi_slopes=alibi_slopes, tree_mask=tree_mask, num_splits=num_splits, out=views.out,
        lse=views.lse,
    )  # fmt: skip
    if exchange.by_heads:
        dist.all_to_all_single(views.received, views.sent, group=exchange.group)
    else:
        _all_gather(views.received, views.sent, group=exchange.group)
    api.merge(views.outs, views.lses, sinks=sinks, out=out, lse=lse)
    return out


def _check_lengths(kv: KVView, exchange: Exchange, batch: int) -> None:
    """Raise on all ranks where the shards of a sequence do not together have its length. Waits for all of them."""
    assert kv.positions is not None
    kv.check_batch(batch)
    held = torch.tensor(kv.lengths(batch), dtype=torch.int64, device=exchange.device)
    dist.all_reduce(held, group=exchange.group)
    for b, (count, total) in enumerate(zip(held.tolist(), kv.positions.seq_lens[:batch].tolist(), strict=True)):
        if count != total:
            raise ValueError(f"seq_lens: expected {count} in row {b}, the tokens of all ranks, given {total}")
