"""Real models' attention: geometry and rules from their cards, against the attention that the cards describe.

`card_attention` is that attention, written down from the cards and not from our rules: it knows sliding windows that
count the query itself, divisors instead of scales, biases per key, and a logit beside the others. README.md says which
arguments give the same, and is read here, so that what it says is what is tested.
"""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import attend, ints, view_of

import splitkv
from splitkv import reference, testing

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Card:
    """What a model's card says of its attention.

    Attributes:
        model: Its name in the README's table.
        num_q_heads, num_kv_heads, head_dim: The geometry.
        sliding_window: Keys that a query token sees, itself included; None: all.
        windowed: Which layers have that window: "all", or "even" ones, counted from 0.
        scalar: What scores are divided by the root of.
        softcap: Cap of the scores.
        sinks: Whether each head has a logit that joins the softmax.
        alibi: Whether scores have a bias per key instead of positions in the keys.
    """

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    windowed: str = "all"
    scalar: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        """One layer of each kind."""
        return (0, 1) if self.windowed == "even" else (0,)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.windowed == "all" or layer % 2 == 0 else None


CARDS = (
    Card("Llama-3-8B", 32, 8, 128),
    Card("Qwen2.5-7B", 28, 4, 128),
    Card("Mistral-7B-v0.1", 32, 8, 128, sliding_window=4096),
    Card("Phi-3-mini-4k", 32, 32, 96, sliding_window=2047),
    Card("Gemma-2-9B", 16, 8, 256, sliding_window=4096, windowed="even", scalar=256, softcap=50.0),
    Card("Gemma-2-27B", 32, 16, 128, sliding_window=4096, windowed="even", scalar=144, softcap=50.0),
    Card("gpt-oss", 64, 8, 64, sliding_window=128, windowed="even", sinks=True),
    Card("BLOOM-7B1", 32, 32, 128, alibi=True),
)
LAYERS = [(card, layer) for card in CARDS for layer in card.layers]
each_layer = pytest.mark.parametrize(("card", "layer"), LAYERS, ids=[f"{card.model}-{layer}" for card, layer in LAYERS])


def bloom_slopes(num_heads: int) -> torch.Tensor:
    """A geometric sequence that ends at 2⁻⁸; the steps between for heads beyond a power of two."""
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    between = [2.0 ** (-8 * i / (2 * whole)) for i in range(1, 2 * whole, 2)]
    return torch.tensor((slopes + between)[:num_heads], dtype=torch.float64)


def card_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, card: Card, layer: int, extras: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The last q tokens of a sequence attend to it, in float64.

    q [q_len, num_q_heads, head_dim]; k, v [tokens, num_kv_heads, head_dim].
    """
    q, k, v = (tensor.double() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,nhd->hqn", q, k) / math.sqrt(card.scalar or card.head_dim)
    if card.softcap is not None:
        scores = torch.tanh(scores / card.softcap) * card.softcap
    key = torch.arange(k.shape[0], device=q.device)
    position = key[-q.shape[0] :, None]
    if card.alibi:
        # A bias that grows with the key: the softmax does not see that it differs from a distance by a row's constant.
        scores = scores + extras["alibi_slopes"].double()[:, None, None] * key
    hidden = key > position
    window = card.window_of(layer)
    if window is not None:
        hidden = hidden | (key <= position - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if card.sinks:
        sink = extras["sinks"].double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sink], dim=2)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqn,nhd->qhd", weights, v)


def documented(card: Card, layer: int) -> str:
    """What the README's table tells to give decode on this layer."""
    rows = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("|")]
    [row] = [row for row in rows if row[0].strip() == card.model]
    heads, width, arguments = (cell.strip() for cell in row[1:4])
    assert heads == f"{card.num_q_heads} / {card.num_kv_heads}" and width == str(card.head_dim)
    codes = re.findall(r"`([^`]+)`", arguments)
    if len(codes) < 2:
        assert "layers" not in arguments
        return codes[0] if codes else ""
    assert re.fullmatch(r"even layers `[^`]+`, odd layers `[^`]+`", arguments)
    return codes[layer]


def arguments(card: Card, layer: int, device: torch.device, heads: int) -> dict[str, Any]:
    """The README's arguments, with tensors for its names."""
    names = {"sinks": torch.randn(card.num_q_heads, dtype=torch.bfloat16), "torch": torch}
    names["slopes"] = bloom_slopes(card.num_q_heads).float()
    rules = eval(f"dict({documented(card, layer)})", names)
    return {
        name: value[:heads].to(device) if isinstance(value, torch.Tensor) else value for name, value in rules.items()
    }


def test_every_model_is_in_the_table_and_has_a_test():
    table = README[README.index("## What models need") :].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    models = [row.split("|")[1].strip() for row in rows[1:]]
    assert models == [card.model for card in CARDS]


def test_the_slopes_in_the_readme_are_those_of_the_card():
    [code] = re.findall(r"`slopes = (.*?)`", README)
    torch.testing.assert_close(eval(code), bloom_slopes(32).float(), rtol=1e-6, atol=0)
    assert bloom_slopes(112)[64] == 2.0 ** (-8 / 128)  # as the largest model's 112 heads have them


@each_layer
def test_all_heads_on_short_caches(device, card, layer):
    """One token of each request, all heads."""
    lens = [40, 0, 7]
    k, v = torch.randn(2, 3, 40, card.num_kv_heads, card.head_dim, dtype=torch.bfloat16, device=device)
    q = torch.randn(3, card.num_q_heads, card.head_dim, dtype=torch.bfloat16, device=device)
    kv = view_of("paged", k, v, lens, page_size=16)
    rules = {"sm_scale": None, **arguments(card, layer, device, card.num_q_heads)}
    result = attend(q, kv, **rules)
    testing.expect(q, kv, **rules).check(result.out, result.lse)
    right = reference.decode(q, kv, dtype=torch.float64, **rules)
    for b in (0, 2):
        whole = card_attention(q[b : b + 1], k[b, : lens[b]], v[b, : lens[b]], card, layer, rules)
        torch.testing.assert_close(right[b], whole[0], rtol=1e-6, atol=1e-9)
    assert (result.out[1] == 0).all() and (result.lse[1] == -math.inf).all()


@each_layer
def test_caches_longer_than_the_window(device, card, layer):
    """A chunk, a few drafts and a single token beside each other, on one KV head; what the window hides is evicted."""
    group = card.num_q_heads // card.num_kv_heads
    window = card.window_of(layer)
    longest = (window or 60) + 37
    lens, q_lens = [longest, 30, longest - 20, 5], [5, 3, 1, 0]
    k, v = torch.randn(2, 4, longest, 1, card.head_dim, dtype=torch.bfloat16, device=device)
    q = torch.randn(sum(q_lens), group, card.head_dim, dtype=torch.bfloat16, device=device)
    indptr = [0, *itertools.accumulate(q_lens)]
    poisoned_k, poisoned_v = k.clone(), v.clone()
    kv = view_of("paged", poisoned_k, poisoned_v, lens, page_size=16)
    if window is not None:
        for b, (n, q_len) in enumerate(zip(lens, q_lens, strict=True)):
            gone = max(n - q_len - window + 1, 0)  # keys that not even the first query token sees
            poisoned_k[b, :gone], poisoned_v[b, :gone] = math.nan, math.inf
        kv = view_of("paged", poisoned_k, poisoned_v, lens, page_size=16)
        for b, (n, q_len) in enumerate(zip(lens, q_lens, strict=True)):
            kv.page_table[b, : max(n - q_len - window + 1, 0) // 16] = -1
    rules = arguments(card, layer, device, group)
    config = splitkv.WorkspaceConfig(4, group, 1, card.head_dim, max_total_q=len(q), dtype=torch.bfloat16)
    workspace = testing.PoisonedWorkspace(config, device).workspace
    rules["qo_indptr"] = ints(indptr, device)
    out, lse = splitkv.decode_with_lse(q, kv, workspace, **rules)
    testing.expect(q, kv, **rules).check(out, lse)
    right = reference.decode(q, kv, dtype=torch.float64, **rules)
    for b, (first, last) in enumerate(itertools.pairwise(indptr)):
        if last > first:
            whole = card_attention(q[first:last], k[b, : lens[b]], v[b, : lens[b]], card, layer, rules)
            torch.testing.assert_close(right[first:last], whole, rtol=1e-6, atol=1e-9)
