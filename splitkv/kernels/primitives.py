"""Device functions that kernels share: lengths, work shares, and the log-sum-exp algebra.

The schedule, in one paragraph. A *tile* is BLOCK_M packed query rows of one request and KV head. A request with n query
tokens has ceil(n · GROUP_SIZE / BLOCK_M) tiles per head, each attended in `parts` parts. A *unit* is one part of one tile
for all heads; program p works on unit p // num_kv_heads and head p % num_kv_heads, so that neighbouring programs read
neighbouring heads of the same tokens. Units are numbered request by request, and every program finds its own by a prefix
sum over the lengths on the device. `splitkv/schedule.py` holds the same arithmetic in plain Python.
"""

import triton
import triton.language as tl

PAGED: tl.constexpr = tl.constexpr(0)
CONTIGUOUS: tl.constexpr = tl.constexpr(1)
RAGGED: tl.constexpr = tl.constexpr(2)
CSR: tl.constexpr = tl.constexpr(3)

BALANCED: tl.constexpr = tl.constexpr(0)
FIXED_PARTS: tl.constexpr = tl.constexpr(1)
FIXED_TOKENS: tl.constexpr = tl.constexpr(2)

# The balanced schedule counts in grains of 8 tokens: 32-bit integers, whose divisions are fast, then hold the work of any
# batch that is worth cutting (4·10⁹ tokens times tiles; more is left uncut).
GRAIN: tl.constexpr = tl.constexpr(8)

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

    b is a scalar or a vector; dead lanes have no keys. Lengths are data that the caller may overwrite at any time, so they
    are clamped here to what the view can hold: whatever they say, no address outside the cache follows.
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
    if HAS_WINDOW:
        # A tile's first query token sees window_left keys further left than its last.
        TILE_TOKENS: tl.constexpr = (BLOCK_M - 2) // GROUP_SIZE + 2
        reach = tl.minimum(tokens, TILE_TOKENS) if RIGHT_BOUND else tl.maximum(tokens, 1)
        span = tl.minimum(span, window_left + reach)
    return tiles, span


@triton.jit
def safe_chunk(tiles, work, longest, budget, slots):
    """Length of parts so that all parts fit into `budget` units and those of cut tiles into `slots` partials.

    A tile of length s takes max(1, ceil(s / chunk)) parts. Two chunks are safe by construction, whatever the lengths: with
    ceil(work / (budget - tiles)) each tile adds at most one part to an even share; with
    ceil(longest / (budget // tiles)) no tile takes more than budget // tiles. The first suits uneven lengths, the second
    even ones. A tile that is cut at all takes at most 2 s / chunk parts, which bounds the slots. A longer chunk than a
    safe one is safe.
    """
    spare = budget - tiles
    each = budget // tiles
    uneven = tl.where(spare > 0, tl.cdiv(work, tl.maximum(spare, 1)), longest)
    even = tl.where(each > 0, tl.cdiv(longest, tl.maximum(each, 1)), longest)
    chunk = tl.minimum(uneven, even)
    if slots < budget:
        chunk = tl.maximum(chunk, tl.cdiv(2 * work, tl.maximum(slots, 1)))
    return tl.where(slots > 1, chunk, longest)


@triton.jit
def choose_chunk(
    tiles,
    work,
    longest,
    resident,
    slots,
    NUM_KV_HEADS: tl.constexpr,
    MAX_WAVES: tl.constexpr,
    WAVE_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):
    """Length of parts: the best of a few numbers of waves, by an estimate of when the last program ends.

    Lengths are in grains here. `resident` programs run at a time, a wave. The candidates are the least number of whole
    waves that has a program for every tile, and up to MAX_WAVES - 1 more. With parts of at most c, n waves end by n · c at
    the latest, and by the even share plus c; starting a wave costs about WAVE_COST. Even lengths fit into few full waves;
    beside many short requests a long one needs several, so that its parts are not longer than what runs beside them.
    """
    tiles = tl.maximum(tiles, 1)
    least = tl.cdiv(tiles * NUM_KV_HEADS, resident)
    share = work // tl.maximum(resident // NUM_KV_HEADS, 1)
    best = longest
    best_cost = 0x7FFFFFFF
    for extra in tl.static_range(MAX_WAVES):
        waves = least + extra
        chunk = safe_chunk(tiles, work, longest, waves * resident // NUM_KV_HEADS, slots)
        chunk = tl.maximum(chunk, MIN_CHUNK)
        cost = tl.minimum(waves * chunk, share + chunk) + waves * WAVE_COST
        best = tl.where(cost < best_cost, chunk, best)
        best_cost = tl.minimum(cost, best_cost)
    return best


@triton.jit
def balanced_chunk(
    batch,
    lens_ptr,
    indptr_ptr,
    kv_start_ptr,
    qo_indptr_ptr,
    capacity,
    q_len,
    total_q,
    window_left,
    resident,
    slots,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RIGHT_BOUND: tl.constexpr,
    MAX_WAVES: tl.constexpr,
    WAVE_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Tokens per part for this batch: one pass over its lengths."""
    tiles_sum = tl.zeros([BLOCK_B], tl.int32)
    work_sum = tl.zeros([BLOCK_B], tl.int64)
    longest = tl.zeros([BLOCK_B], tl.int32)
    for first in range(0, batch, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        tiles, span = request_work(
            b, b < batch, lens_ptr, indptr_ptr, kv_start_ptr, qo_indptr_ptr, capacity, q_len, total_q, window_left,
            PAGE_SIZE, KV_KIND, GROUP_SIZE, BLOCK_M, HAS_WINDOW, RIGHT_BOUND,
        )  # fmt: skip
        grains = tl.where(tiles > 0, tl.cdiv(span, GRAIN), 0)
        tiles_sum += tiles
        work_sum += tiles.to(tl.int64) * grains
        longest = tl.maximum(longest, grains)
    tiles = tl.sum(tiles_sum, 0)
    work = tl.sum(work_sum, 0)
    longest_tile = tl.max(longest, 0)
    chunk = longest_tile
    if work < 1 << 29:
        chunk = choose_chunk(
            tiles, work.to(tl.int32), longest_tile, resident, slots,
            NUM_KV_HEADS, MAX_WAVES, WAVE_COST // GRAIN, MIN_CHUNK // GRAIN,
        )  # fmt: skip
    return tl.maximum(chunk, 1) * GRAIN


@triton.jit
def parts_of(tiles, span, seq_len, chunk, SCHEDULE: tl.constexpr, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """Parts that a tile is attended in, at least 1.

    BALANCED: by its visible span. FIXED_PARTS: always PARTS. FIXED_TOKENS: by the sequence's length alone.
    """
    if SCHEDULE == BALANCED:
        parts = tl.maximum(tl.cdiv(span, chunk), 1)
    elif SCHEDULE == FIXED_PARTS:
        parts = span * 0 + PARTS
    else:
        parts = tl.maximum(tl.cdiv(seq_len, part_tokens(seq_len, SPLIT_TOKENS, PARTS)), 1)
    return parts


@triton.jit
def part_tokens(seq_len, SPLIT_TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """With fixed split tokens: the distance of part edges, the least multiple with which PARTS parts suffice."""
    return SPLIT_TOKENS * tl.maximum(tl.cdiv(tl.cdiv(seq_len, SPLIT_TOKENS), PARTS), 1)


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

    WIDEN: under Triton's interpreter, which cuts the lower bits off where dtype is bfloat16; they are rounded away before.
    """
    if WIDEN:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """tanh in float32, to a few roundings of its size: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) cancels.

    A soft cap multiplies what it returns by the cap, which may be large, so that an error relative to 1 would not do. The
    quotient is exact at both ends: exp saturates to 0 and inf. The polynomial is a least-maximum fit of its own on 0…0.65
    (relative error 7e-9).
    """
    z = x * x
    cubic = -0.3333325982 + z * (0.1333083063 + z * (-0.0536880121 + z * (0.0204693936 + z * -0.0055151386)))
    quotient = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.65, x + x * z * cubic, quotient)


@triton.jit
def fold_partials(
    out_ptr,
    lse_ptr,
    stride_out_part,
    stride_lse_part,
    parts,
    sink,
    offs_d,
    d_mask,
    HAS_SINK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge `parts` partials of one row: returns its output [BLOCK_D] float32 and its natural log-sum-exp.

    Online over blocks of BLOCK_P partials. (0, -inf) is the identity: a partial without keys weighs 0 whatever its row
    holds, and if nothing has keys the result is (0, -inf) again. Only differences of log-sum-exps are taken to base 2: the
    maximum itself stays as it was read, so that the identity changes no bit. The sink, a logit, joins the denominator only.
    """
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        live = part < parts
        part = part.to(tl.int64)
        lse = tl.load(lse_ptr + part * stride_lse_part, mask=live, other=float("-inf")).to(tl.float32)
        keyed = live & (lse > float("-inf"))
        rows = tl.load(
            out_ptr + part[:, None] * stride_out_part + offs_d[None, :],
            mask=keyed[:, None] & d_mask[None, :],
            other=0.0,
        ).to(tl.float32)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2((lse - finite_or_zero(new_top)) * LOG2E)
        decay = tl.exp2((top - finite_or_zero(new_top)) * LOG2E)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(rows * weight[:, None], 0)
        top = new_top
    denominator = total
    if HAS_SINK:
        denominator = total + tl.where(total > 0, tl.exp2((sink - finite_or_zero(top)) * LOG2E), 0.0)
    out = acc / tl.where(denominator > 0, denominator, 1.0)
    lse_out = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    return out, tl.max(lse_out, 0)
