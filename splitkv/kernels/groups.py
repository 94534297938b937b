"""The kernel that finds out which keys the requests of a group have in common."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from splitkv.kernels.jit import unspecialized
from splitkv.kernels.primitives import CSR, load_kv_range, load_q_range

NEVER: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def member_range(
    b,
    batch,
    group_ids_ptr,
    prefix_lens_ptr,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """What requests b share with others: (group or -1, query tokens, first key, end, whether there is any key).

    The first key is the first that one of its query tokens sees, and the end that of the keys of its prefix that none
    of them is too early for.
    """
    live = b < batch
    start, seq_len, _ = load_kv_range(b, live, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
    _, tokens = load_q_range(b, live, qo_indptr_ptr, q_len, total_q)
    low, end = start, seq_len
    if HAS_WINDOW:
        low = tl.maximum(low, seq_len - tokens - window_left)
    if CAUSAL:
        end = seq_len - tokens + (0 if HAS_TREE else 1)
    end = tl.minimum(end, tl.minimum(tl.load(prefix_lens_ptr + b, mask=live, other=0), seq_len))
    group = tl.load(group_ids_ptr + b, mask=live, other=-1)
    shares = live & (group >= 0) & (group < batch) & (tokens > 0) & (low < end)
    return tl.where(shares, group, -1), tokens, low, end, shares


@unspecialized
def group_kernel(
    groups_ptr,
    members_ptr,
    places_ptr,
    group_ids_ptr,
    prefix_lens_ptr,
    lens_ptr,
    indptr_ptr,
    rows_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    batch: tl.int32,
    q_len: tl.int32,
    total_q: tl.int32,
    capacity: tl.int32,
    window_left: tl.int32,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Say which keys the members of each group have in common, and where each query token is gathered.

    Grid: (ceil((batch + 1) / BLOCK_G),). Common to a group are the keys before the least end of its members'. A group
    of one member has none.

    Reads:  group ids and prefix lengths [batch], lengths
    Writes: groups [5 * batch + 1] int32: [batch + 1] where the query tokens of each group begin among the gathered
                ones, then [batch] each: end of its common keys (0: none), first of them that a member sees, table row
                of that member (CSR: its first page index), and first key that a request attends on its own
            members [3, total_q] int32: of each gathered query token its index in q, position and first visible key
            places [2, total_q] int32: of each query token in q its place among the gathered ones, or -1, and its group
    Members of groups without common keys have places too, so that places follow from group ids alone; they are not
    written there.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)  # numbers of requests, and those of groups
    live = mine < batch
    group, tokens, _low, _end, shares = member_range(
        mine, batch, group_ids_ptr, prefix_lens_ptr, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity,
        q_len, total_q, window_left, PAGE_SIZE, KV_KIND, HAS_WINDOW, CAUSAL, HAS_TREE,
    )  # fmt: skip

    begin = tl.zeros([BLOCK_G], tl.int32)
    group_size = tl.zeros([BLOCK_G], tl.int32)
    group_end = tl.full([BLOCK_G], NEVER, tl.int32)
    leader = tl.full([BLOCK_G], NEVER, tl.int64) << 32  # the first key that a member sees, above the member's number
    place = tl.zeros([BLOCK_G], tl.int32)
    my_group_size = tl.zeros([BLOCK_G], tl.int32)
    my_group_end = tl.full([BLOCK_G], NEVER, tl.int32)
    my_group_low = tl.full([BLOCK_G], NEVER, tl.int32)
    for first in range(0, batch, BLOCK_B):
        # A row from the start: of vectors that become rows below, Triton 3.6 uses some before it has made them.
        b = (first + tl.arange(0, BLOCK_B))[None, :]
        b_group, b_tokens, low, end, member = member_range(
            b, batch, group_ids_ptr, prefix_lens_ptr, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity,
            q_len, total_q, window_left, PAGE_SIZE, KV_KIND, HAS_WINDOW, CAUSAL, HAS_TREE,
        )  # fmt: skip
        b_tokens = tl.where(member, b_tokens, 0)
        tagged = (low.to(tl.int64) << 32) | b.to(tl.int64)
        # Of groups with these numbers.
        in_group = b_group == mine[:, None]
        begin += tl.sum(tl.where(b_group < mine[:, None], b_tokens, 0), 1)
        group_size += tl.sum(in_group.to(tl.int32), 1)
        group_end = tl.minimum(group_end, tl.min(tl.where(in_group, end, NEVER), 1))
        leader = tl.minimum(leader, tl.min(tl.where(in_group, tagged, leader[:, None]), 1))
        # Of requests with these numbers.
        with_me = member & (b_group == group[:, None])
        earlier = (b_group < group[:, None]) | (with_me & (b < mine[:, None]))
        place += tl.sum(tl.where(earlier, b_tokens, 0), 1)
        my_group_size += tl.sum(with_me.to(tl.int32), 1)
        my_group_end = tl.minimum(my_group_end, tl.min(tl.where(with_me, end, NEVER), 1))
        my_group_low = tl.minimum(my_group_low, tl.min(tl.where(with_me, low, NEVER), 1))

    group_low = (leader >> 32).to(tl.int32)
    common = (group_size > 1) & (group_low < group_end)
    lead = tl.where(common, leader & NEVER, 0).to(tl.int32)
    row = lead
    if KV_KIND == CSR:
        _, _, row = load_kv_range(lead, live, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
    elif rows_ptr is not None:
        row = tl.load(rows_ptr + lead, mask=live, other=0)
    tl.store(groups_ptr + mine, begin, mask=mine <= batch)
    tl.store(groups_ptr + batch + 1 + mine, tl.where(common, group_end, 0), mask=live)
    tl.store(groups_ptr + 2 * batch + 1 + mine, tl.where(common, group_low, 0), mask=live)
    tl.store(groups_ptr + 3 * batch + 1 + mine, row, mask=live)

    start, seq_len, _ = load_kv_range(mine, live, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
    shares = shares & (my_group_size > 1) & (my_group_low < my_group_end)
    tl.store(groups_ptr + 4 * batch + 1 + mine, tl.where(shares, tl.maximum(start, my_group_end), start), mask=live)
    q_first, _ = load_q_range(mine, live, qo_indptr_ptr, q_len, total_q)
    if qo_indptr_ptr is None:
        q_first = mine * q_len
    for i in range(tl.max(tokens, 0)):
        # Whatever qo_indptr holds, nothing is written past the query tokens.
        here = live & (i < tokens) & (q_first + i < total_q)
        gathered = here & shares & (place + i < total_q)
        position = seq_len - tokens + i
        first_key = start
        if HAS_WINDOW:
            first_key = tl.maximum(start, position - window_left)
        tl.store(members_ptr + place + i, q_first + i, mask=gathered)
        tl.store(members_ptr + total_q + place + i, position, mask=gathered)
        tl.store(members_ptr + 2 * total_q + place + i, first_key, mask=gathered)
        tl.store(places_ptr + q_first + i, tl.where(gathered, place + i, -1), mask=here)
        tl.store(places_ptr + total_q + q_first + i, group, mask=here)
