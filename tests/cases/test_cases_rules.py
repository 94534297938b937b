"""Windows, caps, sinks and masks: which keys a query token sees, and how their scores are bent."""

import math

import pytest
import torch
from support import WHOLE, Cut, assert_cut, assert_rows, attend, each_way, index_probe, ints, view_of

import splitkv
from splitkv.api import plan_decode
from splitkv.schedule import Partition, Request

INF = math.inf


def zeros(device, *shape):
    return torch.zeros(*shape, 16, device=device)


@each_way(tokens=3)
def test_window(device, cut, layout):
    """Case 19: window_left is the keys left of the query's own, which it sees as well."""
    kv = view_of(layout, *index_probe(device, 1, 10), [10])
    for window_left, mean, count in (
        (3, 7.5, 4),
        (2, 8.0, 3),
        (0, 9.0, 1),
        (9, 4.5, 10),
        (2**40, 4.5, 10),
        (None, 4.5, 10),
    ):
        result = attend(torch.randn(1, 1, 16, device=device), kv, cut, window_left=window_left)
        assert_cut(result, cut, 10, all_seen=window_left is None or window_left >= 9)
        assert_rows(result, mean, math.log(count))


@pytest.mark.parametrize(
    ("window", "error"), [(-1, ValueError), (-(2**40), ValueError), (3.0, TypeError), (True, TypeError)]
)
def test_window_refused(device, window, error):
    """Case 19: a negative window is no spelling of none."""
    kv = view_of("paged", *index_probe(device, 1, 10), [10])
    with pytest.raises(error, match=rf"^window_left: expected an integer ≥ 0, given {window}"):
        attend(zeros(device, 1, 1), kv, window_left=window)


@each_way(tokens=3)
def test_window_of_each_draft_row(device, cut, layout):
    """Case 20: each query token's window is its own, in uniform and in ragged batches."""
    probe = index_probe(device, 3, 10)
    kv = view_of(layout, *(t[:1] for t in probe), [10])
    result = attend(torch.randn(1, 3, 1, 16, device=device), kv, cut, window_left=2)
    assert_cut(result, cut, 10, all_seen=False)
    assert_rows(result, [[[6.0], [7.0], [8.0]]], math.log(3))
    kv = view_of(layout, *probe, [10, 10, 10])
    q = torch.randn(5, 1, 16, device=device)  # the last row belongs to no request
    result = attend(q, kv, cut, window_left=2, qo_indptr=ints([0, 3, 4, 4], device), given=True)
    ln3 = math.log(3)
    assert_rows(result, [[6.0], [7.0], [8.0], [8.0], [0.0]], [[ln3], [ln3], [ln3], [ln3], [-INF]])


@each_way(tokens=3)
def test_window_without_a_right_bound(device, cut, layout):
    """Case 20 without causality: each query token sees its window and all that follows."""
    kv = view_of(layout, *index_probe(device, 1, 10), [10])
    q = torch.randn(1, 3, 1, 16, device=device)
    result = attend(q, kv, cut, window_left=2, causal=False)
    assert_cut(result, cut, 10, all_seen=False)
    assert_rows(result, [[[7.0], [7.5], [8.0]]], [[[math.log(5)], [math.log(4)], [math.log(3)]]])


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=2), Cut(split_tokens=2)], ids=str)
def test_window_of_a_tree(device, cut):
    """Cases 20 and 25: a window goes by positions, also where a tree says who sees whom."""
    kv = view_of("paged", *index_probe(device, 1, 7), [7])
    mask = ints([[[word] for word in TREE]], device)
    result = attend(torch.randn(1, 4, 1, 16, device=device), kv, cut, tree_mask=mask, window_left=2)
    # Node i stands at 3 + i and sees from 1 + i on: 1 2 3; 2 3 4; 3 5; 4, which is no ancestor of node 3, 5 6.
    assert_rows(result, [[[2.0], [3.0], [4.0], [5.5]]], [[[math.log(n)] for n in (3, 3, 2, 2)]])


@each_way(tokens=2)
def test_alibi(device, cut, layout):
    """Each head's slope times the distance of the positions, to both sides, is taken from the scaled scores."""
    k, v = index_probe(device, 1, 5)
    kv = view_of(layout, k, v, [5])
    slopes = torch.tensor([0.5, 0.0, 2.0], device=device)
    q = torch.randn(1, 2, 3, 16, device=device)
    key = torch.arange(5, dtype=torch.float64)
    for causal, softcap in ((True, None), (False, None), (True, 0.5)):  # a cap comes first: it leaves scores of 0
        result = attend(q, kv, cut, alibi_slopes=slopes, causal=causal, softcap=softcap)
        assert_cut(result, cut, 5)
        outs, lses = torch.empty(1, 2, 3, dtype=torch.float64), torch.empty(1, 2, 3, dtype=torch.float64)
        for row, position in enumerate((3, 4)):
            for head, slope in enumerate(slopes.tolist()):
                scores = -slope * (key - position).abs()
                seen = scores[: position + 1] if causal else scores
                lses[0, row, head] = torch.logsumexp(seen, dim=0)
                outs[0, row, head] = torch.softmax(seen, dim=0) @ key[: len(seen)]
        assert_rows(result, outs, lses)


@pytest.mark.parametrize("cut", [Cut(num_splits=1), Cut(num_splits=3), Cut(split_tokens=64), Cut()], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 40])
def test_window_costs_what_its_keys_cost(device, cut, q_len):
    """A window of 128 at 128k tokens: all other pages are evicted, and no more keys are attended than at 128 tokens."""
    length, page_size, window_left, group = 2**17, 16, 127, 2
    live = math.ceil((window_left + q_len) / page_size) + 1
    first = length // page_size - live
    k = torch.zeros(live, page_size, 1, 16, device=device)
    v = torch.arange(first * page_size, length, device=device, dtype=torch.float32)
    v = v.view(live, page_size, 1, 1).repeat(1, 1, 1, 16)
    left_of_the_window = first * page_size + torch.arange(live * page_size) < length - q_len - window_left
    for cache, poison in ((k, math.nan), (v, INF)):
        cache.view(-1, 16)[left_of_the_window.to(device)] = poison
    table = torch.full((1, length // page_size), -1, dtype=torch.int32, device=device)
    table[0, first:] = torch.arange(live, device=device)
    kv = splitkv.PagedKV(k, v, table, ints([length], device))
    q = torch.randn(1, q_len, group, 16, device=device)
    result = attend(q, kv, cut, window_left=window_left)
    position = length - q_len + torch.arange(q_len, dtype=torch.float64)
    means = (position - window_left / 2)[:, None].expand(q_len, group)
    assert_rows(result, means, math.log(window_left + 1))

    def partition(seq_len, q_len):
        kv = splitkv.ContiguousKV(k[:1], v[:1], ints([seq_len], device))  # lengths count, and no key is read
        q = torch.zeros(1, q_len, group, 16, device=device)
        rules = dict(window_left=window_left, num_splits=cut.num_splits)
        launch = plan_decode(q, kv, result.scratch.workspace, **rules).launches[0]
        found = Partition.of_launch(launch.operands, launch.constants)
        return found, list(found.stretches([Request(seq_len, q_len)]))

    schedule, stretches = partition(length, q_len)
    tiles = schedule.request_work(Request(length, q_len))[0]
    # Each tile has its rows' windows, which lie a token apart, and nothing more.
    tokens_of_tile = min(q_len, (schedule.block_m - 1) // group + 1)
    attended = sum(stretch.tokens for stretch in stretches)
    assert window_left + q_len <= attended <= tiles * (window_left + tokens_of_tile)
    assert min(stretch.low for stretch in stretches if stretch.tokens) >= length - q_len - window_left
    # As many as where the cache holds no more than the window and the query tokens.
    _, short = partition(window_left + q_len, q_len)
    assert sum(stretch.tokens for stretch in short) == attended
    if cut.num_splits is None and cut.split_tokens is None:
        assert max(stretch.share for stretch in stretches) == max(stretch.share for stretch in short)


@each_way(tokens=1, splits=2)
def test_softcap_of_huge_scores(device, cut, layout):
    """Case 21: tanh saturates, and overflows nothing."""
    q, k = zeros(device, 1, 1), zeros(device, 1, 2, 1)
    q[..., 0], k[0, 0, 0, 0], k[0, 1, 0, 0] = 1.0, 5000.0, 10000.0
    kv = view_of(layout, k, index_probe(device, 1, 2)[1], [2])
    result = attend(q, kv, cut, softcap=50.0)
    assert_cut(result, cut, 2)
    assert_rows(result, 0.5, 50.693147)
    # And on the other side.
    result = attend(-q, kv, cut, softcap=50.0)
    assert_rows(result, 0.5, -50.0 + math.log(2))


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3), Cut(split_tokens=1)], ids=str)
@pytest.mark.parametrize(
    ("masked_by", "layout"),
    [
        ("nothing", "paged"),
        ("length", "csr"),
        ("length", "contiguous"),
        ("start", "contiguous"),
        ("window", "hnd"),
        ("window", "paged"),
        ("causal", "ragged"),
        ("tree", "paged"),
    ],
)
def test_softcap_before_the_mask(device, cut, layout, masked_by):
    """Case 21: the cap follows the scale and precedes the mask: two masked keys change nothing."""
    want = 0.873034, 2.063836
    live = torch.zeros(2, 1, 16, device=device)
    live[1, 0, 0] = 8.0
    values = index_probe(device, 1, 2)[1][0]
    masked, tens = torch.full_like(live, 8.0), torch.full_like(live, 10.0)
    left = masked_by in ("start", "window")
    k, v = (torch.cat([b, a] if left else [a, b])[None] for a, b in ((live, masked), (values, tens)))
    q = torch.zeros(1, 1, 16, device=device)
    q[..., 0] = 1.0
    options, rules, tokens = {}, {}, 4
    if masked_by == "nothing":
        k, v, tokens = live[None], values[None], 2
    elif masked_by == "length":
        tokens = 2
    elif masked_by == "start":
        options["kv_start"] = ints([2], device)
    elif masked_by == "window":
        rules["window_left"] = 1
    elif masked_by == "causal":
        q = q[:, None].expand(1, 3, 1, 16)
    else:
        # The draft tokens are keys 1 to 3, of which the first sees itself alone.
        q = q[:, None].expand(1, 3, 1, 16)
        rules["tree_mask"] = ints([[[1], [0b111], [0b111]]], device)
    kv = view_of(layout, k, v, [tokens], **options)
    result = attend(q, kv, cut, sm_scale=0.5, softcap=2.0, **rules)
    assert_cut(result, cut, tokens, all_seen=masked_by not in ("start", "window"))
    first = result.out.view(-1, 16)[0], result.lse.view(-1)[0]
    assert (first[0] - want[0]).abs().max() <= 1e-5 * want[0]
    assert (first[1] - want[1]).abs() <= 1e-5 * want[1]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_sinks(device, splits, layout):
    """Case 22: the sink joins the denominator once, however many splits there are, and the lse not at all."""
    k = zeros(device, 1, 128, 1)
    kv = view_of(layout, k, k + 1, [128], page_size=16)
    sinks = torch.tensor([math.log(128)], device=device)
    for cut in (Cut(num_splits=splits), Cut(split_tokens=128 // splits)):
        result = attend(torch.randn(1, 1, 16, device=device), kv, cut, sinks=sinks)
        assert_cut(result, cut, 128)
        assert_rows(result, 0.5, math.log(128))
    # Through merge: partials without the sink, which joins at the end.
    halves = [attend(zeros(device, 1, 1), view_of(layout, k[:, :64], k[:, :64] + 1, [64])) for _ in range(2)]
    out, lse = splitkv.merge(torch.stack([h.out for h in halves]), torch.stack([h.lse for h in halves]), sinks=sinks)
    assert (out - 0.5).abs().max() <= 0.5e-5 and (lse - math.log(128)).abs().max() <= 1e-5 * math.log(128)


@each_way(tokens=2)
def test_causal(device, cut, layout):
    """Case 23: causal is bottom-right: the last query token sees every key."""
    kv = view_of(layout, *index_probe(device, 1, 5), [5])
    q = torch.randn(1, 2, 1, 16, device=device)
    result = attend(q, kv, cut)
    assert_cut(result, cut, 5)
    assert_rows(result, [[[1.5], [2.0]]], [[[math.log(4)], [math.log(5)]]])
    assert_rows(attend(q, kv, cut, causal=False), 2.0, math.log(5))


@pytest.mark.parametrize(
    ("dtype", "cut"),
    [
        (torch.float32, WHOLE),
        (torch.float32, Cut(split_tokens=64)),
        (torch.float16, WHOLE),  # tiles of many rows have a loop of their own for blocks that all of them see whole
        (torch.float16, Cut(num_splits=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("window_left", [None, 40, 90])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_that_rows_see_in_part(device, dtype, cut, window_left, causal):
    """Each query token's own bounds hold wherever they lie in blocks of keys, of which others are seen whole."""
    length, q_len = 200, 50
    kv = view_of("contiguous", *index_probe(device, 1, length, dtype=dtype), [length])
    q = torch.randn(1, q_len, 2, 16, device=device).to(dtype)
    result = attend(q, kv, cut, window_left=window_left, causal=causal)
    position = length - q_len + torch.arange(q_len, dtype=torch.float64)
    first = torch.zeros_like(position) if window_left is None else position - window_left
    last = position if causal else torch.full_like(position, length - 1)
    want = ((first + last) / 2, (last - first + 1).log())
    assert_rows(result, *(each[None, :, None].expand(1, q_len, 2) for each in want))


@each_way(tokens=2)
@pytest.mark.parametrize("form", ["uniform", "packed"])
def test_rows_of_tables(device, cut, layout, form):
    """Case 24: a query token finds its own request's table row and length."""
    k, v = index_probe(device, 2, 6)
    v[1] += 100
    kv = view_of(layout, k, v, [4, 6])
    q = torch.randn(2, 3, 1, 16, device=device)
    if form == "packed":
        q = q.flatten(0, 1)
    result = attend(q, kv, cut, qo_indptr=ints([0, 3, 6], device) if form == "packed" else None)
    assert_cut(result, cut, 4, 6)
    want = torch.tensor([[0.5, 1.0, 1.5], [101.5, 102.0, 102.5]], dtype=torch.float64)
    count = torch.tensor([[2.0, 3.0, 4.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    assert_rows(result, want.view(result.lse.shape), count.log().view(result.lse.shape))


TREE = [0b0001, 0b0011, 0b0101, 0b1101]  # 1 and 2 are children of 0, 3 of 2
TREE_MEANS, TREE_COUNTS = [1.5, 2.0, 2.2, 17 / 6], [4, 5, 5, 6]


@pytest.mark.parametrize("layout", ["paged", "contiguous", "ragged"])
@pytest.mark.parametrize(
    "cut", [WHOLE, Cut(num_splits=2), Cut(num_splits=3), Cut(split_tokens=2), Cut(split_tokens=5)], ids=str
)
def test_tree_mask(device, cut, layout):
    """Case 25: each node sees the cached keys, its ancestors and itself; split edges inside the tree."""
    kv = view_of(layout, *index_probe(device, 1, 7), [7])
    mask = ints([[[word] for word in TREE]], device)
    logs = [[math.log(n)] for n in TREE_COUNTS]
    result = attend(torch.randn(1, 4, 1, 16, device=device), kv, cut, tree_mask=mask)
    assert_cut(result, cut, 7)
    assert_rows(result, [[[mean] for mean in TREE_MEANS]], [logs])
    # Packed, two heads, the second request with two roots; bits of absent nodes say nothing.
    kv = view_of(layout, *index_probe(device, 2, 7), [7, 5])
    mask = ints([[[word] for word in TREE], [[0b1101], [~0b0001], [0], [0]]], device)
    result = attend(
        torch.randn(6, 2, 16, device=device), kv, cut, tree_mask=mask, qo_indptr=ints([0, 4, 6], device), given=True
    )
    assert_rows(result, [[mean] for mean in [*TREE_MEANS, 1.5, 1.75]], [*logs, [math.log(4)], [math.log(4)]])


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3)], ids=str)
def test_tree_of_more_than_a_word(device, cut):
    """Case 25 with more nodes than a word has bits: node i sees every third node, back from itself."""
    cached, nodes = 3, 40
    node = torch.arange(nodes, device=device)
    sees = (node[None, :] <= node[:, None]) & ((node[:, None] - node[None, :]) % 3 == 0)
    mask = torch.empty(splitkv.masks.tree_mask_shape(1, nodes), dtype=torch.int32, device=device)
    splitkv.masks.pack_tree_mask(sees[None], mask)
    kv = view_of("paged", *index_probe(device, 1, cached + nodes), [cached + nodes])
    result = attend(torch.randn(1, nodes, 1, 16, device=device), kv, cut, tree_mask=mask)
    assert_cut(result, cut, cached + nodes)
    counts = cached + sees.sum(1).cpu().double()
    sums = sum(range(cached)) + (sees * (cached + node)).sum(1).cpu().double()
    assert_rows(result, (sums / counts)[None, :, None], counts.log()[None, :, None])


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3)], ids=str)
def test_query_tokens_past_the_tree_mask(device, cut, monkeypatch):
    """Bits that a mask lacks, because lengths on the device exceed it, are 0, whatever lies behind it in memory."""
    kv = view_of("paged", *index_probe(device, 2, 7), [7, 7])
    q = torch.randn(8, 9, 16, device=device)
    rules = dict(qo_indptr=ints([0, 4, 8], device))
    everything = torch.full((64,), -1, dtype=torch.int32, device=device)
    # Tokens 2 and 3 have no row: they see the three keys before the tree, and 0 and 1 do not see them.
    mask = everything[8:12].view(2, 2, 1)
    means, counts = [2.0, 2.0, 1.0, 1.0], [5, 5, 3, 3]
    result = attend(q, kv, cut, tree_mask=mask, **rules)
    want = torch.tensor(means * 2, dtype=torch.float64)[:, None].expand(8, 9)
    assert_rows(result, want, torch.tensor(counts * 2).double().log()[:, None].expand(8, 9))
    # None at all has a row.
    result = attend(q, kv, cut, tree_mask=everything[:0].view(2, 0, 0), **rules)
    assert_rows(result, 1.0, math.log(3))
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    with pytest.raises(ValueError, match=r"tree_mask: expected max_q_len ≥ 4 \(query tokens of row 0\), given 2"):
        attend(q, kv, cut, tree_mask=mask, **rules)


@pytest.mark.parametrize("writer", ["parents", "mask"])
@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3)], ids=str)
def test_tree_mask_that_was_written(device, cut, writer):
    """Cases 25 and 26: the words of both writers give decode the tree, also of a padded request with fewer nodes."""
    batch, q_len = 2, 4
    mask = torch.full(splitkv.masks.tree_mask_shape(batch, q_len), -1, dtype=torch.int32, device=device)
    if writer == "parents":
        splitkv.masks.tree_mask_from_parents(ints([[-1, 0, 0, 2], [-1, 0, -1, -1]], device), mask)
    else:
        sees = torch.tensor([[(word >> j) & 1 for j in range(q_len)] for word in TREE], device=device).bool()
        chain = torch.ones(q_len, q_len, dtype=torch.bool, device=device).tril()
        splitkv.masks.pack_tree_mask(torch.stack([sees, chain]), mask)
    kv = view_of("paged", *index_probe(device, batch, 7), [7, 5])
    q = torch.randn(6, 2, 16, device=device)
    result = attend(q, kv, cut, tree_mask=mask, qo_indptr=ints([0, 4, 6], device))
    logs = [[math.log(n)] for n in (*TREE_COUNTS, 4, 5)]
    assert_rows(result, [[mean] for mean in [*TREE_MEANS, 1.5, 2.0]], logs)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3), Cut(split_tokens=5)], ids=str)
@pytest.mark.parametrize("poison", [math.nan, INF], ids=["nan", "inf"])
def test_tree_node_that_nobody_sees(device, cut, layout, poison):
    """Cases 12 and 25: a pruned node's slot, which no row sees, never enters arithmetic, whatever it holds."""
    k, v = index_probe(device, 1, 7)
    k[:, 4], v[:, 4] = poison, poison
    pruned = [word & ~0b0010 for word in TREE]  # node 1 is token 4; its own row sees what its parent sees
    kv = view_of(layout, k, v, [7])
    mask = ints([[[word] for word in pruned]], device)
    for heads in (1, 9):  # one tile, and two (32 rows are the most that a tree has)
        result = attend(torch.randn(1, 4, heads, 16, device=device), kv, cut, tree_mask=mask)
        assert_cut(result, cut, 7)
        means, counts = [1.5, 1.5, 2.2, 17 / 6], [4, 4, 5, 6]
        assert_rows(result, [[[mean] for mean in means]], [[[math.log(n)] for n in counts]])


@pytest.mark.parametrize("cut", [WHOLE, Cut(num_splits=3)], ids=str)
@pytest.mark.parametrize("poison", [math.nan, INF], ids=["nan", "inf"])
def test_scale_of_a_tree_node_that_nobody_sees(device, cut, poison):
    """Cases 12 and 25: nor does its scale, where every token has its own."""
    k, v = index_probe(device, 1, 7)
    scale = torch.ones(1, 7, 1, device=device)
    scale[:, 4] = poison
    cache = torch.float8_e4m3fn
    kv = view_of("contiguous", k.to(cache), v.to(cache), [7], k_scale=scale, v_scale=scale.clone())
    mask = ints([[[word & ~0b0010] for word in TREE]], device)
    result = attend(torch.randn(1, 4, 1, 16, device=device), kv, cut, tree_mask=mask)
    assert_cut(result, cut, 7)
    assert_rows(result, [[[mean] for mean in (1.5, 1.5, 2.2, 17 / 6)]], [[[math.log(n)] for n in (4, 4, 5, 6)]])
