"""The error budget on what attention sees in a real model: q, K and V of three layers of SmolLM2-135M-Instruct.

`data/README.md` says how they were captured. Random tensors give flat softmax weights; these have sharp ones, attention
sinks, and values of very different size.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMPILED

import splitkv
from splitkv.config import cdiv
from splitkv.testing import PoisonedWorkspace, expect

DEVICE = torch.device("cuda" if COMPILED else "cpu")
LAYERS = (0, 18, 28)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
PAGE_SIZE = 16
TOKENS, Q_HEADS, KV_HEADS, WIDTH = 1481, 9, 3, 64


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return torch.load(Path(__file__).parent / "data" / "smollm2_activations.pt", weights_only=True)


def cache(kind: str, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> Any:
    """A view in which every request has the same tokens, and as many of them as `lens` says."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    if kind == "contiguous":
        return splitkv.ContiguousKV(k[None], v[None], seq_lens, rows=torch.zeros_like(seq_lens))
    count = cdiv(TOKENS, PAGE_SIZE)
    places = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pages = torch.full((2, count, PAGE_SIZE, KV_HEADS, WIDTH), torch.nan, dtype=k.dtype, device=DEVICE)
    token = torch.arange(TOKENS, device=DEVICE)
    pages[0, places[token // PAGE_SIZE], token % PAGE_SIZE] = k
    pages[1, places[token // PAGE_SIZE], token % PAGE_SIZE] = v
    return splitkv.PagedKV(*pages, places.int()[None], seq_lens, rows=torch.zeros_like(seq_lens))


def config(batch: int, total_q: int, dtype: torch.dtype) -> splitkv.WorkspaceConfig:
    return splitkv.WorkspaceConfig(batch, Q_HEADS, KV_HEADS, WIDTH, max_total_q=total_q, max_splits=256, dtype=dtype)


# Interpreted, one layer goes every way and the others go one.
WAYS = [
    (layer, kind, num_splits)
    for layer in LAYERS
    for kind in ("paged", "contiguous")
    for num_splits in (1, 7)
    if COMPILED or layer == 18 or (kind, num_splits) == ("paged", 7)
]


@pytest.mark.parametrize(("layer", "kind", "num_splits"), WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(data, layer, dtype, kind, num_splits, record_ratios):
    """Two of the queries as two requests that share one cache, each with the tokens up to its own."""
    q, k, v = (data["layers"][layer][name].to(DEVICE, DTYPES[dtype]) for name in ("q", "k", "v"))
    picked = [0, 47]
    positions = data["query_positions"][picked].tolist()
    rules = dict(sm_scale=data["sm_scale"], num_splits=num_splits)
    kv = cache(kind, k, v, [position + 1 for position in positions])
    scratch = PoisonedWorkspace(config(2, 2, DTYPES[dtype]), DEVICE)
    out, lse = splitkv.decode_with_lse(q[picked], kv, scratch.workspace, **rules)
    # Each row of each head in as many partials as there are parts, or in none where there is one part.
    assert int(scratch.written("partial_lse").sum()) == (0 if num_splits == 1 else num_splits * len(picked) * Q_HEADS)
    scratch.check_guards()
    expected = expect(q[picked], kv, **rules)
    expected.check(out, lse, f"layer {layer} {dtype} {kind} {num_splits}")
    record_ratios(DTYPES[dtype], expected.error_ratio(out), expected.lse_error_ratio(lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_queries_at_once(data, dtype, record_ratios):
    """The last 48 tokens as one request of 48 query tokens, whose outputs the model's own attention gave."""
    for layer in LAYERS if COMPILED else (28,):
        layers = data["layers"][layer]
        q, k, v = (layers[name].to(DEVICE, DTYPES[dtype]) for name in ("q", "k", "v"))
        kv = cache("paged", k, v, [TOKENS])
        scratch = PoisonedWorkspace(config(1, 48, DTYPES[dtype]), DEVICE)
        rules = dict(sm_scale=data["sm_scale"], num_splits=1)
        out, lse = splitkv.decode_with_lse(q[None], kv, scratch.workspace, **rules)
        expected = expect(q[None], kv, **rules)
        expected.check(out, lse, f"layer {layer} {dtype}")
        record_ratios(DTYPES[dtype], expected.error_ratio(out), expected.lse_error_ratio(lse))
        if dtype != "bfloat16":
            # These operands are the model's own bits, so that its attention is what was to be computed.
            model = layers["out"].to(DEVICE).double()
            assert float((expected.out[0] - model).norm() / model.norm()) < 1e-6
            torch.testing.assert_close(expected.lse[0].float(), layers["lse"].to(DEVICE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_stretches(data, dtype):
    """The cache in four stretches, each decoded on its own, merged by `merge`."""
    layers = data["layers"][18]
    q, k, v = (layers[name].to(DEVICE, DTYPES[dtype]) for name in ("q", "k", "v"))
    workspace = PoisonedWorkspace(config(1, 1, DTYPES[dtype]), DEVICE).workspace
    outs, lses = [], []
    for first, last in pairwise([0, 1, 500, 1000, TOKENS]):
        lens = torch.tensor([last - first], dtype=torch.int32, device=DEVICE)
        part = splitkv.ContiguousKV(k[None, first:last], v[None, first:last], lens)
        out, lse = splitkv.decode_with_lse(q[-1:], part, workspace, sm_scale=data["sm_scale"])
        outs.append(out.float().clone())
        lses.append(lse.clone())
    out, lse = splitkv.merge(torch.stack(outs), torch.stack(lses))
    expected = expect(q[-1:], cache("contiguous", k, v, [TOKENS]), sm_scale=data["sm_scale"])
    expected.check(out.to(DTYPES[dtype]), lse)
