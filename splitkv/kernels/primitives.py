"""Device functions that kernels share: lengths, work shares, and the log-sum-exp algebra.

The schedule, in one paragraph. A *tile* is BLOCK_M packed query rows of one request and KV head; a request with n
query tokens has ceil(n · GROUP_SIZE / BLOCK_M) of them per head. Lay all tiles of a head on one axis, request by
request (the causal ones of a request in turn from its beginning and its end, see tile_at), each as long as its
weight, and cut the axis into equal shares: program p attends share p // num_kv_heads of head p % num_kv_heads, so
that neighbouring programs read neighbouring heads of the same tokens. A tile that lies in one share is finished by
its program; one that is cut leaves a partial per share. Every program finds its share by a prefix sum over the
lengths on the device. `splitkv/schedule.py` holds the same arithmetic in plain Python.
"""

import triton
import triton.language as tl

PAGED: tl.constexpr = tl.constexpr(0)
CONTIGUOUS: tl.constexpr = tl.constexpr(1)
RAGGED: tl.constexpr = tl.constexpr(2)
CSR: tl.constexpr = tl.constexpr(3)
# No layout, but a way to count: "requests" are groups of them, and those without keys have no tile of their own.
GROUPS: tl.constexpr = tl.constexpr(4)

BALANCED: tl.constexpr = tl.constexpr(0)
FIXED_PARTS: tl.constexpr = tl.constexpr(1)
FIXED_TOKENS: tl.constexpr = tl.constexpr(2)

# The balanced schedule weighs keys in grains of 8 tokens, in 32-bit integers, whose divisions are fast.
GRAIN: tl.constexpr = tl.constexpr(8)

# Longer lengths and later positions are clamped to it: sums of two still fit 32 bits.
MAX_TOKENS: tl.constexpr = tl.constexpr(2**30)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def load_kv_range(
    b, live, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE: tl.constexpr, KV_KIND: tl.constexpr
):
    """Where request b's keys begin to be visible, how many it has, and its first entry in the pool (RAGGED, CSR).

    b is a scalar or a vector; dead lanes have no keys. Lengths are data that the caller may overwrite at any time, so
    they are clamped here to what the view can hold: whatever they say, no address outside the cache follows.
    """
    if KV_KIND == RAGGED or KV_KIND == CSR:
        first = clamp(tl.load(indptr_ptr + b, mask=live, other=0), 0, capacity)
        count = clamp(tl.load(indptr_ptr + b + 1, mask=live, other=0), first, capacity) - first
        if KV_KIND == CSR:
            tail = clamp(tl.load(lens_ptr + b, mask=live, other=0), 0, PAGE_SIZE)
            seq_len = tl.where(count > 0, (count - 1) * PAGE_SIZE + tail, 0)
        else:
            seq_len = count
    else:
        first = b * 0
        seq_len = clamp(tl.load(lens_ptr + b, mask=live, other=0), 0, capacity)
    if kv_start_ptr is not None:
        start = clamp(tl.load(kv_start_ptr + b, mask=live, other=0), 0, seq_len)
    else:
        start = seq_len * 0
    return start, seq_len, first


@triton.jit
def load_q_range(b, live, qo_indptr_ptr, q_len, total_q):
    """First query token of request b in the packed query (0 for a uniform batch), and its number of query tokens."""
    if qo_indptr_ptr is not None:
        first = clamp(tl.load(qo_indptr_ptr + b, mask=live, other=0), 0, total_q)
        count = clamp(tl.load(qo_indptr_ptr + b + 1, mask=live, other=0), first, total_q) - first
    else:
        first = b * 0
        count = tl.where(live, q_len, 0)
    return first, count


@triton.jit
def request_work(
    b,
    live,
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
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
):
    """Query tiles per head of request b, and an upper bound of the keys that one of its tiles can see."""
    start, seq_len, _ = load_kv_range(b, live, lens_ptr, indptr_ptr, kv_start_ptr, capacity, PAGE_SIZE, KV_KIND)
    _, tokens = load_q_range(b, live, qo_indptr_ptr, q_len, total_q)
    tiles = tl.cdiv(tokens * GROUP_SIZE, BLOCK_M)
    span = seq_len - start
    if KV_KIND == GROUPS:
        tiles = tl.where(span > 0, tiles, 0)
    if HAS_WINDOW:
        # A tile's first query token sees window_left keys further left than its last.
        TILE_TOKENS: tl.constexpr = (BLOCK_M - 2) // GROUP_SIZE + 2
        reach = tl.minimum(tokens, TILE_TOKENS) if RIGHT_BOUND else tl.maximum(tokens, 1)
        span = tl.minimum(span, window_left + reach)
    return tiles, span


@triton.jit
def tile_at(place, tiles):
    """Which of a request's tiles stands at a place among them: the first, the last, the second, the last but one, …

    Where later query tokens see more keys, any stretch of two or more tiles then has about as many as others.
    """
    return tl.where(place % 2 == 0, place // 2, tiles - 1 - place // 2)


@triton.jit
def place_of(tile, tiles):
    """Where a tile stands among a request's: the inverse of tile_at."""
    return tl.where(2 * tile < tiles, 2 * tile, 2 * (tiles - 1 - tile) + 1)


@triton.jit
def tile_weight(span, by_work, each, heaviest, TILE_COST: tl.constexpr):
    """Length of a tile on the axis: its keys and its own cost in grains where shares follow the work, else `each`.

    At least 1, so that the rows of a tile without keys are written too. At most `heaviest`, with which the axis stays
    within 32 bits; a weight that is too small costs balance only.
    """
    grains = clamp(tl.cdiv(span + TILE_COST, GRAIN), 1, heaviest)
    return tl.where(by_work, grains, each)


@triton.jit
def choose_shares(
    batch,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    shares,
    heaviest,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    SCHEDULE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    SEGMENT_COST: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """How this batch is shared: (by_work, each, share, length of the axis), from one pass over its lengths.

    Even lengths: every tile weighs the same and is cut into `each` parts, so that a program attends one part of one
    tile, or several whole tiles. Uneven lengths: shares of equal work, wherever they begin and end. The latter is
    always balanced, but a program then begins and ends within tiles, which costs about SEGMENT_COST tokens and a merge;
    so it is taken where the longest program of the former would take longer than that.

    Every program waits for this before it can ask for its first keys, and a division takes as long as fifty additions:
    what depends on lengths is therefore decided by products, in 64 bits, and divided only where it must be.
    """
    if qo_indptr_ptr is None:
        tiles_sum = batch * tl.cdiv(q_len * GROUP_SIZE, BLOCK_M)
    if SCHEDULE != BALANCED and qo_indptr_ptr is None:
        by_work, each, share, total = False, PARTS, 1, tiles_sum * PARTS
    else:
        tiles_seen = tl.zeros([BLOCK_B], tl.int32)
        work_seen = tl.zeros([BLOCK_B], tl.int32)
        longest_seen = tl.zeros([BLOCK_B], tl.int32)
        for first in range(0, batch, BLOCK_B):
            b = first + tl.arange(0, BLOCK_B)
            tiles, span = request_work(
                b, b < batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
                PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
            )  # fmt: skip
            tiles_seen += tiles
            work_seen += tiles * tile_weight(span, True, 1, heaviest, TILE_COST)
            longest_seen = tl.maximum(longest_seen, tl.where(tiles > 0, span, 0))
        if qo_indptr_ptr is not None:
            tiles_sum = tl.sum(tiles_seen, 0)
        if SCHEDULE != BALANCED:
            by_work, each, share, total = False, PARTS, 1, tiles_sum * PARTS
        else:
            # As many parts per tile as there are shares for, or fewer where they would be too short; in the latter case
            # there are more shares than parts.
            most = tl.maximum(shares // tl.maximum(tiles_sum, 1), 1)
            most_share = tl.cdiv(tiles_sum * most, shares)
            work = tl.sum(work_seen, 0)
            longest = tl.max(longest_seen, 0)
            each = tl.minimum(most, tl.maximum(longest // MIN_CHUNK, 1))
            tile_share = tl.where(each == most, most_share, 1)
            # Is longest / each + TILE_COST, tile_share times, more than the tokens of a share of the work?
            longest_program = tile_share.to(tl.int64) * shares * (longest + each * TILE_COST)
            work_program = tl.maximum(work.to(tl.int64), shares * (MIN_CHUNK // GRAIN)) * GRAIN + shares * SEGMENT_COST
            by_work = longest_program > each * work_program
            if by_work:
                share = tl.maximum(tl.cdiv(work, shares), MIN_CHUNK // GRAIN)
                total = work
            else:
                share = tile_share
                total = tiles_sum * each
    return by_work, each, share, total


# A work list: how a batch was shared when the list was made (by_work, each, share), then where each request begins on
# an axis with one tile per request and head, and where the last ends.
LIST_HEADER: tl.constexpr = tl.constexpr(3)


@triton.jit
def listed_shares(list_ptr, batch, tiles_each, shares):
    """As choose_shares, from a work list.

    Whatever the lengths are by now, the listed weights say where every tile lies, both kernels read the same, and the
    keys of a tile are cut by its weight, so that each is attended once: a stale list costs balance. Shares grow where
    the batch or its tiles outgrew those of the list, so that `shares` of them still hold the axis.
    """
    total = tl.load(list_ptr + LIST_HEADER + batch) * tiles_each
    share = tl.load(list_ptr + 2)
    if share.to(tl.int64) * shares < total:
        share = tl.cdiv(total, shares)
    return tl.load(list_ptr) != 0, tl.load(list_ptr + 1), share, total


@triton.jit
def listed_request(list_ptr, place, batch, tiles_each, by_work, each, BLOCK_B: tl.constexpr):
    """As locate, from a work list."""
    request = 0
    begin = 0
    if by_work:
        for first in range(0, batch, BLOCK_B):
            b = first + tl.arange(0, BLOCK_B)
            live = b < batch
            ends = tl.load(list_ptr + LIST_HEADER + 1 + b, mask=live, other=0) * tiles_each
            request += tl.sum((live & (ends <= place)).to(tl.int32), 0)
        begin = tl.load(list_ptr + LIST_HEADER + request) * tiles_each
    else:
        # All requests are equally long on the axis.
        length = tiles_each * each
        request = place // length
        begin = request * length
    return request, begin


@triton.jit
def listed_weight(list_ptr, request, by_work, each):
    """As tile_weight, from a work list."""
    weight = each
    if by_work:
        weight = tl.load(list_ptr + LIST_HEADER + 1 + request) - tl.load(list_ptr + LIST_HEADER + request)
    return weight


@triton.jit
def locate(
    place,
    batch,
    by_work,
    each,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    heaviest,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The request at a place on the axis, and where it begins there."""
    request = 0
    begin = 0
    if qo_indptr_ptr is None and not by_work:
        # All requests are equally long on the axis.
        length = tl.cdiv(q_len * GROUP_SIZE, BLOCK_M) * each
        request = place // length
        begin = request * length
    else:
        # Count the requests that end at or before the place.
        # Inside a condition that always holds: after a bare loop here Triton 3.9 knows nothing of alignments, and does
        # without the asynchronous copies of all keys and values.
        end = 0
        if batch > 0:
            for first in range(0, batch, BLOCK_B):
                b = first + tl.arange(0, BLOCK_B)
                live = b < batch
                tiles, span = request_work(
                    b, live, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
                    PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
                )  # fmt: skip
                lengths = tiles * tile_weight(span, by_work, each, heaviest, TILE_COST)
                ends = end + tl.cumsum(lengths, 0)
                earlier = live & (ends <= place)
                request += tl.sum(earlier.to(tl.int32), 0)
                begin = tl.maximum(begin, tl.max(tl.where(earlier, ends, 0), 0))
                end += tl.sum(lengths, 0)
    return request, begin


@triton.jit
def request_begin(
    request,
    by_work,
    each,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    heaviest,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Where a request begins on the axis: the length of all before it."""
    begin = 0
    if qo_indptr_ptr is None and not by_work:
        begin = request * tl.cdiv(q_len * GROUP_SIZE, BLOCK_M) * each
    else:
        for first in range(0, request, BLOCK_B):
            b = first + tl.arange(0, BLOCK_B)
            live = b < request
            tiles, span = request_work(
                b, live, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
                PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
            )  # fmt: skip
            begin += tl.sum(tiles * tile_weight(span, by_work, each, heaviest, TILE_COST), 0)
    return begin


@triton.jit
def part_tokens(seq_len, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """With fixed split tokens: the distance of part edges, the least multiple with which PARTS parts suffice."""
    return SPLIT_TOKENS * tl.maximum(tl.cdiv(tl.cdiv(seq_len, SPLIT_TOKENS), PARTS), 1)


@triton.jit
def keys_before(position, shard_first, shard_step, SHARDED: tl.constexpr):
    """How many of a request's keys stand before a position: in a shard, key j stands at shard_first + j · shard_step.

    Not clamped to the keys that there are.
    """
    if SHARDED:
        position = tl.cdiv(tl.maximum(position - shard_first, 0), shard_step)
    return position


@triton.jit
def even_edge(part, parts, tokens):
    """floor(part · tokens / parts), without a product that outgrows 32 bits."""
    return part * (tokens // parts) + part * (tokens % parts) // parts


@triton.jit
def finite_or_zero(top):
    """A maximum to subtract: 0 instead of -inf, the maximum over nothing, since -inf - -inf is no number."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def round_to(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """float32 numbers in another dtype, to nearest, ties to even.

    WIDEN: under Triton's interpreter, which cuts the lower bits off where dtype is bfloat16; they are rounded away
        before.
    """
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """tanh in float32, to a few roundings of its size: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) cancels.

    A soft cap multiplies what it returns by the cap, which may be large, so that an error relative to 1 would not do.
    The quotient is exact at both ends: exp saturates to 0 and inf. The polynomial is a least-maximum fit of its own on
    0…0.65 (relative error 7e-9).
    """
    z = x * x
    cubic = -0.3333325982 + z * (0.1333083063 + z * (-0.0536880121 + z * (0.0204693936 + z * -0.0055151386)))
    quotient = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.65, x + x * z * cubic, quotient)


@triton.jit
def power(difference, BASE2: tl.constexpr):
    """The weight that a difference of log-sum-exps means; they are natural, or with BASE2 to base 2."""
    return tl.exp2(difference if BASE2 else difference * LOG2E)


@triton.jit
def no_partials(BLOCK_D: tl.constexpr):
    """What fold_partials begins with: the largest log-sum-exp, the sum of weights, the weighted sum of rows."""
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    return top, total, acc


@triton.jit
def fold_partials(
    top,
    total,
    acc,
    out_ptr,
    lse_ptr,
    stride_out_part,
    stride_lse_part,
    first_slot,
    next_slot,
    parts,
    offs_d,
    d_mask,
    BASE2: tl.constexpr,
    FOREIGN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Take `parts` partials of one row into what is folded already: returns (top, total, acc).

    The first lies at first_slot, part i after it at next_slot + i - 1.

    Online over blocks of BLOCK_P partials. (0, -inf) is the identity: a partial without keys weighs 0 whatever its row
    holds, and if nothing has keys the result is (0, -inf) again. Only differences of log-sum-exps are raised to a
    power: the maximum itself stays as it was read, so that the identity changes no bit. FOREIGN: partials may be those
    of other libraries, some of which mark a row without keys by +inf. VECTOR: elements to whose multiple every row of
    partials is known to be aligned.
    """
    for first in tl.range(0, parts, BLOCK_P, num_stages=1):
        part = first + tl.arange(0, BLOCK_P)
        live = part < parts
        slot = tl.where(part == 0, first_slot, next_slot + part - 1).to(tl.int64)
        lse = tl.load(lse_ptr + slot * stride_lse_part, mask=live, other=float("-inf")).to(tl.float32)
        if FOREIGN:
            lse = tl.where(lse == float("inf"), float("-inf"), lse)
        keyed = live & (lse != float("-inf"))  # NaN is not without keys
        row_ptrs = out_ptr + slot[:, None] * stride_out_part + offs_d[None, :]
        if VECTOR > 1:
            row_ptrs = tl.multiple_of(row_ptrs, [1, VECTOR * out_ptr.dtype.element_ty.primitive_bitwidth // 8])
        # Zeroed here and not by the load's mask, so that rows and log-sum-exps travel at the same time.
        rows = tl.load(row_ptrs, mask=live[:, None] & d_mask[None, :], other=0.0).to(tl.float32)
        rows = tl.where(keyed[:, None], rows, 0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = power(lse - finite_or_zero(new_top), BASE2)
        decay = power(top - finite_or_zero(new_top), BASE2)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(rows * weight[:, None], 0)
        top = new_top
    return top, total, acc


@triton.jit
def folded(top, total, acc, sink, HAS_SINK: tl.constexpr, BASE2: tl.constexpr):
    """The output and the log-sum-exp of what was folded. The sink, a natural logit, joins the denominator only."""
    denominator = total
    if HAS_SINK:
        denominator = total + tl.where(
            total != 0, power((sink * LOG2E if BASE2 else sink) - finite_or_zero(top), BASE2), 0.0
        )
    out = acc / tl.where(denominator != 0, denominator, 1.0)
    some = tl.where(total != 0, total, 1.0)
    lse = tl.where(total != 0, top + (tl.log2(some) if BASE2 else tl.log(some)), float("-inf"))
    return out, tl.max(lse, 0)


@triton.jit
def find_request(token, indptr_ptr, batch, steps):
    """The request that each of these query tokens belongs to; `batch` for tokens past the last.

    That is the number of requests that end at or before it, found by bisection, so requests without tokens are passed
    over. Whatever the prefix sums hold, the result is in 0…batch.

    Args:
        token: Indices of query tokens.
        indptr_ptr: [batch + 1] int32 prefix sums.
        batch: Requests.
        steps: At least the bits of `batch`.
    """
    low = token * 0
    high = low + batch
    for _ in range(steps):
        middle = (low + high) // 2
        end = tl.load(indptr_ptr + 1 + middle, mask=low < high, other=0x7FFFFFFF)
        ends_before = end <= token
        low = tl.where(ends_before, middle + 1, low)
        high = tl.where(ends_before, high, middle)
    return low
