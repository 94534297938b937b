"""The oracle itself: values computed by hand, and PyTorch's own attention where the rules allow it."""

import ast
import inspect
import math
from itertools import accumulate, pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import splitkv
from splitkv import reference
from splitkv.testing import make_problem

DOUBLE = torch.float64
INF = math.inf


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def index_probe(*shape):
    """k = 0 and v = the token's index: outputs are the mean of the visible indices, exp(lse) is their number."""
    tokens = torch.arange(shape[1], dtype=torch.float32)
    return torch.zeros(*shape), tokens[None, :, None, None].expand(shape).clone()


def decode(q, kv, **rules):
    return reference.decode_with_lse(q, kv, dtype=DOUBLE, **rules)


def assert_rows(result, means, counts):
    out, lse = result
    for row, (mean, count) in enumerate(zip(means, counts, strict=True)):
        expected = torch.full_like(out.flatten(0, -3)[row], mean)
        torch.testing.assert_close(out.flatten(0, -3)[row], expected, rtol=1e-12, atol=0)
        expected = torch.full_like(lse.flatten(0, -2)[row], math.log(count) if count else -INF)
        torch.testing.assert_close(lse.flatten(0, -2)[row], expected, rtol=1e-12, atol=1e-12)


def test_imports_nothing_of_the_package():
    tree = ast.parse(inspect.getsource(reference))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or alias.name for node in imported for alias in node.names}
    assert names <= {"__future__", "math", "collections.abc", "itertools", "typing", "torch", "einops"}


# By hand.


def test_two_keys_by_hand():
    q = torch.tensor([[[2.0, 0.0]]])
    k = torch.tensor([[[[0.0, 5.0]], [[math.log(3) / 2, -7.0]]]])
    v = torch.tensor([[[[1.0, 10.0, 0.0]], [[5.0, 20.0, 8.0]]]])
    out, lse = decode(q, splitkv.ContiguousKV(k, v, ints(2)), sm_scale=1.0)
    # Scores 0 and ln 3, weights 1/4 and 3/4.
    torch.testing.assert_close(out, torch.tensor([[[4.0, 17.5, 6.0]]], dtype=DOUBLE), rtol=1e-7, atol=0)
    torch.testing.assert_close(lse, torch.tensor([[math.log(4)]], dtype=DOUBLE), rtol=1e-7, atol=0)


def test_sm_scale_is_one_over_the_root_of_the_key_width_by_default():
    q, k = torch.full((1, 1, 16), 2.0), torch.ones(1, 3, 1, 16)
    _, lse = decode(q, splitkv.ContiguousKV(k, torch.ones(1, 3, 1, 4), ints(1)))
    assert lse.item() == 32.0 / 4.0


def test_rows_of_no_key_are_zero():
    kv = splitkv.ContiguousKV(*index_probe(3, 5, 1, 4), ints(3, 0, 5))
    assert_rows(decode(torch.randn(3, 2, 4), kv), [1.0, 0.0, 2.0], [3, 0, 5])


def test_lengths_are_clamped():
    kv = splitkv.ContiguousKV(*index_probe(3, 5, 1, 4), ints(-2, 900, 2**31 - 1))
    assert_rows(decode(torch.randn(3, 1, 4), kv), [0.0, 2.0, 2.0], [0, 5, 5])


@pytest.mark.parametrize(("q_len", "tokens", "means", "counts"), [
    (2, 5, [1.5, 2.0], [4, 5]),
    (4, 2, [0.0, 0.0, 0.0, 0.5], [0, 0, 1, 2]),
    (1, 1, [0.0], [1]),
])  # fmt: skip
def test_causal_is_bottom_right(q_len, tokens, means, counts):
    kv = splitkv.ContiguousKV(*index_probe(1, tokens, 1, 4), ints(tokens))
    assert_rows(decode(torch.zeros(1, q_len, 1, 4), kv), means, counts)
    everything = [(tokens - 1) / 2] * q_len
    assert_rows(decode(torch.zeros(1, q_len, 1, 4), kv, causal=False), everything, [tokens] * q_len)


@pytest.mark.parametrize(
    ("window_left", "mean", "count"), [(3, 7.5, 4), (2, 8.0, 3), (0, 9.0, 1), (9, 4.5, 10), (99, 4.5, 10)]
)
def test_windows_count_the_query_besides(window_left, mean, count):
    kv = splitkv.ContiguousKV(*index_probe(1, 10, 1, 4), ints(10))
    assert_rows(decode(torch.zeros(1, 1, 4), kv, window_left=window_left), [mean], [count])


def test_each_query_token_has_its_own_window():
    kv = splitkv.ContiguousKV(*index_probe(1, 10, 1, 4), ints(10))
    assert_rows(decode(torch.zeros(1, 3, 1, 4), kv, window_left=2), [6.0, 7.0, 8.0], [3, 3, 3])
    # Without the causal rule there is no right bound: 5…9, 6…9, 7…9.
    result = decode(torch.zeros(1, 3, 1, 4), kv, window_left=2, causal=False)
    assert_rows(result, [7.0, 7.5, 8.0], [5, 4, 3])


def test_left_padding_is_invisible():
    kv = splitkv.ContiguousKV(*index_probe(3, 10, 1, 4), ints(10, 10, 4), kv_start=ints(4, 0, 7))
    assert_rows(decode(torch.zeros(3, 1, 4), kv), [6.5, 4.5, 0.0], [6, 10, 0])


def test_softcap_by_hand():
    q = torch.full((1, 1, 1), 1.0)
    kv = splitkv.ContiguousKV(
        torch.tensor([0.0, 8.0]).view(1, 2, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1), ints(2)
    )
    out, lse = decode(q, kv, sm_scale=0.5, softcap=2.0)
    assert out.item() == pytest.approx(0.873034, abs=1e-6) and lse.item() == pytest.approx(2.063836, abs=1e-6)


def test_alibi_by_hand():
    """Slope ln 2: the keys at distances 3…0 weigh 1, 2, 4, 8 of 15."""
    kv = splitkv.ContiguousKV(*index_probe(1, 4, 1, 4), ints(4))
    slopes = torch.tensor([math.log(2), 0.0])
    out, lse = decode(torch.zeros(1, 2, 4), kv, alibi_slopes=slopes)
    assert out[0, :, 0].tolist() == pytest.approx([34 / 15, 1.5], rel=1e-6)
    assert lse[0].tolist() == pytest.approx([math.log(15 / 8), math.log(4)], rel=1e-6)


def test_sinks_join_the_denominator_and_not_the_lse():
    kv = splitkv.ContiguousKV(torch.zeros(2, 8, 1, 4), torch.ones(2, 8, 1, 4), ints(8, 0))
    out, lse = decode(torch.zeros(2, 2, 4), kv, sinks=torch.tensor([math.log(8), math.log(24)]))
    assert out[0, :, 0].tolist() == pytest.approx([0.5, 0.25], rel=1e-6)
    assert lse[0].tolist() == pytest.approx([math.log(8)] * 2, rel=1e-12)
    assert not out[1].any() and bool((lse[1] == -INF).all())


def test_tree_mask_by_hand():
    """Three cached keys, four nodes: 1 and 2 are children of 0, 3 of 2."""
    kv = splitkv.ContiguousKV(*index_probe(1, 7, 1, 4), ints(7))
    words = ints(0b0001, 0b0011, 0b0101, 0b1101).view(1, 4, 1)
    result = decode(torch.zeros(1, 4, 1, 4), kv, tree_mask=words)
    assert_rows(result, [1.5, 2.0, 2.2, 17 / 6], [4, 5, 5, 6])


def test_tree_masks_of_more_than_a_word():
    """Draft token i sees itself alone, beside the one key before; bit 31 is the sign."""
    kv = splitkv.ContiguousKV(*index_probe(1, 41, 1, 4), ints(41))
    words = torch.zeros(1, 40, 2, dtype=torch.int64)
    for i in range(40):
        words[0, i, i // 32] = 1 << (i % 32)
    words = (words - (words >> 31 << 32)).to(torch.int32)
    result = decode(torch.zeros(1, 40, 1, 4), kv, tree_mask=words)
    assert_rows(result, [(1 + i) / 2 for i in range(40)], [2] * 40)


def test_ragged_queries_and_rows_past_the_last():
    kv = splitkv.ContiguousKV(*index_probe(3, 10, 1, 4), ints(10, 10, 10))
    result = decode(torch.zeros(6, 1, 4), kv, qo_indptr=ints(0, 3, 4, 4), window_left=2)
    assert_rows(result, [6.0, 7.0, 8.0, 8.0, 0.0, 0.0], [3, 3, 3, 3, 0, 0])


def test_groups_share_a_head():
    v = torch.arange(1.0, 4.0).view(1, 1, 3, 1).repeat(1, 5, 1, 2)
    out, _ = decode(torch.randn(1, 12, 8), splitkv.ContiguousKV(torch.randn(1, 5, 3, 8), v, ints(5)))
    assert out[0, :, 0].tolist() == pytest.approx([1.0] * 4 + [2.0] * 4 + [3.0] * 4)


def test_only_visible_keys_are_read():
    k, v = index_probe(1, 10, 1, 4)
    k[:, :6] = v[:, :6] = k[:, 9:] = v[:, 9:] = math.nan
    kv = splitkv.ContiguousKV(k, v, ints(9))
    assert_rows(decode(torch.ones(1, 1, 4), kv, window_left=2), [7.0], [3])


# One cache, told in every form.


def test_every_view_of_the_same_tokens_is_the_same():
    generator = torch.Generator().manual_seed(0)
    lens, size = [7, 0, 4, 12], 4
    k, v = torch.randn(2, 4, 12, 2, 8, generator=generator)
    q = torch.randn(4, 4, 8, generator=generator)
    views = {"contiguous": splitkv.ContiguousKV(k, v, ints(*lens))}
    views["rows"] = splitkv.ContiguousKV(k[[2, 0, 3, 1]], v[[2, 0, 3, 1]], ints(*lens), rows=ints(1, 3, 0, 2))
    indptr = ints(0, 7, 7, 11, 23)
    views["ragged"] = splitkv.RaggedKV(
        torch.cat([k[b, :n] for b, n in enumerate(lens)]), torch.cat([v[b, :n] for b, n in enumerate(lens)]), indptr
    )
    places = torch.randperm(12, generator=generator).to(torch.int32).view(4, 3)
    pages = torch.empty(2, 12, size, 2, 8)
    for b in range(4):
        for i in range(3):
            pages[0, places[b, i]] = k[b, i * size : (i + 1) * size]
            pages[1, places[b, i]] = v[b, i * size : (i + 1) * size]
    views["paged"] = splitkv.PagedKV(*pages, places, ints(*lens))
    views["paged rows"] = splitkv.PagedKV(*pages, places[[3, 1, 0, 2]], ints(*lens), rows=ints(2, 1, 3, 0))
    views["hnd"] = splitkv.PagedKV(*pages.transpose(2, 3).contiguous(), places, ints(*lens), layout="HND")
    counts = [-(-n // size) for n in lens]
    flat = torch.cat([places[b, :count] for b, count in enumerate(counts)])
    views["csr"] = splitkv.PagedKV.from_csr(*pages, ints(0, 2, 2, 3, 6), flat, ints(3, 0, 4, 4))
    expected = decode(q, views["contiguous"])
    for name, kv in views.items():
        out, lse = decode(q, kv)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]), name


# Against PyTorch.


def mask_of(q_len, start, seq_len, causal, window_left):
    """[q_len, seq_len] bool, written as loops."""
    rows = []
    for i in range(q_len):
        p = seq_len - q_len + i
        rows.append(
            [
                j >= start and (not causal or j <= p) and (window_left is None or j >= p - window_left)
                for j in range(seq_len)
            ]
        )
    return torch.tensor(rows, dtype=torch.bool).view(q_len, seq_len)


@pytest.mark.parametrize("seed", range(24))
def test_scaled_dot_product_attention_agrees(seed):
    """Everything that PyTorch's attention can say with a mask and a bias: all rules but softcap and sinks."""
    query, mask = ("one", "several", "ragged")[seed % 3], ("causal", "full")[seed % 2]
    problem = make_problem(
        seed, dtype=torch.float32, softcap=None, sinks=None, mask=mask, query=query, lens=(37, 5, 0), q_lens=(2, 0, 3)
    )
    rules, kv, q = problem.rules, problem.kv, problem.q
    out, _ = decode(q, kv, **rules)
    flat = q.flatten(0, 1) if q.dim() == 4 else q
    flat_out = out.flatten(0, 1) if out.dim() == 4 else out
    edges = rules["qo_indptr"].tolist() if query == "ragged" else list(accumulate(problem.q_lens, initial=0))
    starts = [0] * len(problem.lens) if kv.kv_start is None else kv.kv_start.tolist()
    compared = 0
    for b, (first, last) in enumerate(pairwise(edges)):
        n, q_len = problem.lens[b], last - first
        if not n or not q_len:
            assert not flat_out[first:last].any()
            continue
        mask = mask_of(q_len, starts[b], n, rules.get("causal", True), rules.get("window_left"))
        keys = mask.any(dim=0).nonzero()[:, 0]
        k, v = (x.transpose(0, 1)[None] for x in reference.gather(kv, b, keys, torch.float64))
        bias = torch.zeros(q.shape[-2], q_len, len(keys), dtype=DOUBLE).masked_fill(~mask[:, keys], -INF)
        if "alibi_slopes" in rules:
            position = torch.arange(n - q_len, n)
            bias -= rules["alibi_slopes"].double()[:, None, None] * (position[:, None] - keys[None]).abs()
        seen = mask.any(dim=1)
        expected = scaled_dot_product_attention(
            flat[first:last].double().transpose(0, 1)[None, :, seen], k, v, attn_mask=bias[None, :, seen],
            scale=rules.get("sm_scale"), enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        torch.testing.assert_close(flat_out[first:last][seen], expected, rtol=1e-9, atol=1e-10)
        assert not flat_out[first:last][~seen].any()
        compared += int(seen.sum())
    assert compared


def test_sinks_are_a_key_of_value_zero():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 9, 4, 16, generator=generator) for _ in range(3))
    sinks = torch.randn(4, generator=generator)
    out, _ = decode(q[:, :1], splitkv.ContiguousKV(k, v, ints(9)), sinks=sinks)
    scores = torch.einsum("hd,nhd->hn", q[0, 0].double(), k[0].double()) / 4
    weights = torch.cat([scores, sinks.double()[:, None]], dim=1).softmax(dim=1)[:, :-1]
    torch.testing.assert_close(out[0, 0], torch.einsum("hn,nhd->hd", weights, v[0].double()), rtol=1e-12, atol=1e-12)


def test_softcap_agrees_with_its_formula():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 9, 4, 16, generator=generator) for _ in range(3))
    out, lse = decode(q[:, :1], splitkv.ContiguousKV(k, v, ints(9)), softcap=1.5, sm_scale=2.0)
    scores = 1.5 * torch.tanh(2.0 * torch.einsum("hd,nhd->hn", q[0, 0].double(), k[0].double()) / 1.5)
    expected = torch.einsum("hn,nhd->hd", scores.softmax(dim=1), v[0].double())
    torch.testing.assert_close(out[0, 0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(dim=1), rtol=1e-12, atol=1e-12)


def test_dtypes_of_results():
    problem = make_problem(3, dtype=torch.bfloat16)
    out, lse = reference.decode_with_lse(problem.q, problem.kv, **problem.rules)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact, exact_lse = decode(problem.q, problem.kv, **problem.rules)
    assert (exact.dtype, exact_lse.dtype) == (DOUBLE, DOUBLE)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.equal(reference.decode(problem.q, problem.kv, **problem.rules), out)


# Merging.


def test_merge_by_hand():
    outs = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]], [[math.nan, INF]]])
    out, lse = reference.merge(outs, torch.tensor([[0.0], [math.log(3)], [-INF]]), dtype=DOUBLE)
    torch.testing.assert_close(out, torch.tensor([[2.5, 5.0]], dtype=DOUBLE), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse, torch.tensor([math.log(4)], dtype=DOUBLE), rtol=1e-6, atol=0)
    out, _ = reference.merge(
        outs[:, :, None],
        torch.tensor([[[0.0]], [[math.log(3)]], [[-INF]]]),
        sinks=torch.tensor([math.log(4)]),
        dtype=DOUBLE,
    )
    torch.testing.assert_close(out, torch.tensor([[[1.25, 2.5]]], dtype=DOUBLE), rtol=1e-6, atol=0)


def test_merge_of_nothing_is_nothing():
    out, lse = reference.merge(torch.full((2, 1, 3), math.nan), torch.full((2, 1), -INF))
    assert not out.any() and lse.item() == -INF


def test_merged_parts_are_the_whole():
    k, v = torch.randn(2, 1, 40, 2, 8)
    q = torch.randn(1, 6, 8)
    whole = decode(q, splitkv.ContiguousKV(k, v, ints(40)))
    parts = [
        decode(q, splitkv.ContiguousKV(k[:, first:last], v[:, first:last], ints(last - first)), causal=False)
        for first, last in ((0, 13), (13, 14), (14, 40))
    ]
    out, lse = reference.merge(*(torch.stack(each) for each in zip(*parts, strict=True)), dtype=DOUBLE)
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)
