"""How much sums in float32 round: over thousands of keys in one part, and over the columns of wide keys.

The bounds are of arithmetic, not measured in PyTorch, whose order of sums depends on the machine: numbers that are
added one after another, as ordinary instructions of a GPU do it, miss them by far.
"""

import math

import pytest
import torch
from conftest import COMPILED

import splitkv
from splitkv import reference
from splitkv.testing import PoisonedWorkspace, unit_in_last_place

DEVICE = torch.device("cuda", 0) if COMPILED else torch.device("cpu")


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def uniform(*shape: int) -> torch.Tensor:
    """Numbers of 1…2."""
    return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def workspace(batch: int, group: int, head_dim: int, head_dim_v: int, q_len: int = 1) -> splitkv.Workspace:
    total_q = batch * q_len
    config = splitkv.WorkspaceConfig(batch, group, 1, head_dim, head_dim_v, max_total_q=total_q, dtype=torch.float32)
    return PoisonedWorkspace(config, DEVICE).workspace


@pytest.mark.parametrize("q_len", [1, 16], ids=["low tile", "tall tile"])
@pytest.mark.parametrize("keys", [8000, pytest.param(300_000, marks=pytest.mark.gpu)])
def test_one_part_of_many_keys_rounds_no_more_than_a_few_numbers(keys, q_len):
    """All keys weigh the same but the last, whose score is the largest: sums are scaled where they are largest."""
    k = torch.zeros(1, keys, 1, 16)
    k[:, -1, :, 0] = 1.0
    q = torch.zeros(1, q_len, 4, 16)
    q[..., 0] = torch.linspace(0, 2, 4)
    q = q.to(DEVICE)
    kv = splitkv.ContiguousKV(k.to(DEVICE), uniform(1, keys, 1, 96).to(DEVICE), ints([keys]))
    rules = dict(sm_scale=1.0, causal=False)
    out, lse = splitkv.decode_with_lse(q, kv, workspace(1, 4, 16, 96, q_len), num_splits=1, **rules)
    exact, exact_lse = reference.decode_with_lse(q, kv, dtype=torch.float64, **rules)
    error = float((out.double() - exact).abs().max()) / unit_in_last_place(1.5, torch.float32)
    lse_error = float((lse.double() - exact_lse).abs().max()) / unit_in_last_place(math.log(keys), torch.float32)
    # What is left: both sums scaled and rounded, a quotient, and a logarithm.
    assert error <= 5 and lse_error <= 3, f"{error:.1f} and {lse_error:.1f} units in the last place"


@pytest.mark.parametrize("batch", [3, pytest.param(32, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("head_dim", "latent"), [(128, False), (320, False), (576, True)])
def test_products_of_wide_keys_round_less_than_their_terms_sum(head_dim, latent, batch):
    """The halves of a key cancel, so that its score is small and shows what was rounded on the way."""
    x, y = uniform(batch, 8, head_dim // 2), uniform(batch, 1, head_dim // 2)
    q = torch.cat([x, x], dim=-1).to(DEVICE)
    k = torch.cat([y, 1e-3 * uniform(*y.shape) - y], dim=-1).to(DEVICE)
    if latent:
        table = torch.arange(batch, dtype=torch.int32, device=DEVICE)[:, None]
        kv: splitkv.kv.KVView = splitkv.LatentKV(k, table, ints([1] * batch), head_dim_v=64)
    else:
        kv = splitkv.ContiguousKV(k[:, None], k[:, None, :, :64], ints([1] * batch))
    _, lse = splitkv.decode_with_lse(q, kv, workspace(batch, 8, head_dim, 64), sm_scale=1.0)
    terms = q.double() * k.double()
    rounded = (lse.double() - terms.sum(dim=-1)) / (terms.abs().sum(dim=-1) * torch.finfo(torch.float32).eps / 2)
    share = float(rounded.square().mean().sqrt())
    assert share <= 0.8, f"{share:.2f} roundings of the terms' sum"


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (256, 16),
        (576, 16),
        (272, 16),
        (300, 17),
        (576, 40),
        (320, 320),
        (257, 1),
        (128, 16),
        (129, 100),
        (17, 1),
        (1, 1),
    ],
)
@pytest.mark.parametrize("kv_format", ["plain", "float8"])
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "apart"])
def test_pieces_of_a_key_are_all_of_it_once(head_dim, head_dim_v, kv_format, latent):
    """Blocks that are narrower than a piece of other keys, beside tails that are wider; scores count the columns."""
    dtype = torch.float8_e4m3fn if kv_format == "float8" else torch.float32
    q = torch.ones(1, 2, head_dim, device=DEVICE)
    k = torch.ones(1, 16, head_dim, device=DEVICE).to(dtype)
    if latent:
        table, lens = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), ints([3])
        scale = 1.0 if kv_format == "float8" else None
        kv: splitkv.kv.KVView = splitkv.LatentKV(k, table, lens, head_dim_v=head_dim_v, scale=scale)
    else:
        scale = 1.0 if kv_format == "float8" else None
        kv = splitkv.ContiguousKV(k[:, :, None], k[:, :, None, :head_dim_v], ints([3]), k_scale=scale, v_scale=scale)
    out, lse = splitkv.decode_with_lse(q, kv, workspace(1, 2, head_dim, head_dim_v), sm_scale=1.0)
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, head_dim + math.log(3)))
