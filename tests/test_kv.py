"""Views of a cache: what they hold, and what each argument may not be."""

import dataclasses

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.kv import CONTIGUOUS, CSR, PAGED, RAGGED

PAGES, SIZE, HEADS, WIDTH, WIDTH_V, BATCH = 6, 4, 3, 16, 24, 2


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def arguments(kind, device="cpu"):
    """Good arguments of a view, each once."""

    def cache(*shape):
        return torch.zeros(*shape, dtype=torch.float16, device=device)

    if kind == "latent":
        return dict(
            cache=cache(PAGES, SIZE, WIDTH_V),
            page_table=torch.zeros(BATCH, 3, dtype=torch.int32, device=device),
            seq_lens=ints(3, 12, device=device),
            head_dim_v=WIDTH,
        )
    if kind == "ragged":
        return dict(k=cache(30, HEADS, WIDTH), v=cache(30, HEADS, WIDTH_V), kv_indptr=ints(0, 10, 30, device=device))
    if kind == "contiguous":
        return dict(
            k=cache(BATCH, 20, HEADS, WIDTH), v=cache(BATCH, 20, HEADS, WIDTH_V), seq_lens=ints(3, 20, device=device)
        )
    pages = dict(k_cache=cache(PAGES, SIZE, HEADS, WIDTH), v_cache=cache(PAGES, SIZE, HEADS, WIDTH_V))
    if kind == "csr":
        return pages | dict(
            page_indptr=ints(0, 1, 4, device=device),
            page_indices=ints(5, 0, 1, 2, device=device),
            last_page_len=ints(3, 4, device=device),
        )
    return pages | dict(
        page_table=torch.zeros(BATCH, 3, dtype=torch.int32, device=device), seq_lens=ints(3, 12, device=device)
    )


MAKE = {
    "paged": splitkv.PagedKV,
    "csr": splitkv.PagedKV.from_csr,
    "contiguous": splitkv.ContiguousKV,
    "ragged": splitkv.RaggedKV,
    "latent": splitkv.LatentKV,
}
KIND = {"paged": PAGED, "csr": CSR, "contiguous": CONTIGUOUS, "ragged": RAGGED, "latent": PAGED}
EVERY = pytest.mark.parametrize("kind", list(MAKE))


@EVERY
def test_a_view_holds_the_callers_tensors_and_copies_nothing(kind):
    given = arguments(kind)
    kv = MAKE[kind](**given)
    if kind == "latent":
        for tensor in (kv.k, kv.v):
            assert tensor.data_ptr() == given["cache"].data_ptr()
        assert (kv.num_kv_heads, kv.head_dim, kv.head_dim_v) == (1, WIDTH_V, WIDTH)
        assert kv.k.shape == (PAGES, SIZE, 1, WIDTH_V) and kv.v.shape == (PAGES, SIZE, 1, WIDTH)
    else:
        assert kv.k is given.get("k", given.get("k_cache")) and kv.v is given.get("v", given.get("v_cache"))
        assert (kv.num_kv_heads, kv.head_dim, kv.head_dim_v) == (HEADS, WIDTH, WIDTH_V)
    for name, tensor in given.items():
        if name not in ("k", "v", "k_cache", "v_cache", "head_dim_v"):
            assert getattr(kv, name) is tensor
    assert (kv.dtype, kv.device) == (torch.float16, torch.device("cpu"))
    assert kv.addressing.kind == KIND[kind]


def test_page_sizes_and_strides_of_both_layouts():
    nhd = splitkv.PagedKV(**arguments("paged"))
    given = arguments("paged")
    given |= {name: given[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
    hnd = splitkv.PagedKV(**given, layout="HND")
    assert (nhd.page_size, nhd.num_kv_heads) == (hnd.page_size, hnd.num_kv_heads) == (SIZE, HEADS)
    # Elements between pages, tokens and heads.
    assert nhd.addressing.stride_k == (SIZE * HEADS * WIDTH, HEADS * WIDTH, WIDTH)
    assert hnd.addressing.stride_k == (SIZE * HEADS * WIDTH, WIDTH, SIZE * WIDTH)
    assert hnd.addressing.stride_v == (SIZE * HEADS * WIDTH_V, WIDTH_V, SIZE * WIDTH_V)
    assert nhd.addressing.capacity == 3 * SIZE


def test_capacities():
    assert splitkv.ContiguousKV(**arguments("contiguous")).addressing.capacity == 20
    assert splitkv.RaggedKV(**arguments("ragged")).addressing.capacity == 30
    assert splitkv.PagedKV.from_csr(**arguments("csr")).addressing.capacity == 4  # page indices


def test_strided_caches_are_taken_as_they_are():
    wide = torch.zeros(PAGES, SIZE, HEADS, 2 * WIDTH, dtype=torch.float16)
    given = arguments("paged") | dict(k_cache=wide[..., :WIDTH], v_cache=wide[..., WIDTH:])
    kv = splitkv.PagedKV(**given)
    assert kv.addressing.stride_k == kv.addressing.stride_v == (SIZE * HEADS * 2 * WIDTH, HEADS * 2 * WIDTH, 2 * WIDTH)
    table = torch.zeros(BATCH, 10, dtype=torch.int32)
    assert splitkv.PagedKV(**given | dict(page_table=table[:, :3])).addressing.stride_table_row == 10


def test_an_empty_pool_is_a_pool():
    none = dict(k=torch.zeros(0, HEADS, WIDTH), v=torch.zeros(0, HEADS, WIDTH_V), kv_indptr=ints(0, 0))
    assert splitkv.RaggedKV(**none).addressing.capacity == 0


@EVERY
def test_a_view_serves_every_batch_up_to_its_vectors(kind):
    kv = MAKE[kind](**arguments(kind), kv_start=ints(0, 0, 0))
    for batch in (0, 1, BATCH):
        kv.check_batch(batch)
    name = {"csr": "last_page_len", "ragged": "kv_indptr"}.get(kind, "seq_lens")
    with pytest.raises(ValueError, match=f"{name}: expected entries for a batch of 3, given 2"):
        kv.check_batch(3)


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("paged", dict(seq_lens=ints(1, 1, 1)), "page_table"),
        ("paged", dict(seq_lens=ints(1, 1, 1), rows=ints(0, 1)), "rows"),
        ("paged", dict(seq_lens=ints(1, 1, 1), rows=ints(0, 1, 0), kv_start=ints(0, 0)), "kv_start"),
        ("csr", dict(last_page_len=ints(1, 1, 1)), "page_indptr"),
        ("contiguous", dict(seq_lens=ints(1, 1, 1)), "k"),
        ("contiguous", dict(seq_lens=ints(1, 1, 1), rows=ints(0, 1)), "rows"),
        ("ragged", dict(kv_indptr=ints(0, 1, 2, 3), kv_start=ints(0, 0)), "kv_start"),
    ],
)
def test_a_vector_that_is_too_short_for_the_batch_is_named(kind, changes, name):
    kv = MAKE[kind](**arguments(kind) | changes)
    with pytest.raises(ValueError, match=f"^{name}: expected entries for a batch of 3, given 2$"):
        kv.check_batch(3)


@dataclasses.dataclass
class Bad:
    """What an argument may not be: `change` makes it from the good one."""

    kind: str
    name: str
    change: object
    error: type[Exception]
    expected: str
    given: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}-{self.given[:24]}"


def cases():
    for kind in MAKE:
        paged = kind in ("paged", "csr")
        k, v = ("k_cache", "v_cache") if paged else ("k", "v")
        rank = 3 if kind in ("ragged", "latent") else 4
        for name in (k, v) if kind != "latent" else ("cache",):
            yield Bad(kind, name, lambda t: t.tolist(), TypeError, "a torch.Tensor", "list")
            yield Bad(kind, name, lambda t: None, TypeError, "a torch.Tensor", "NoneType")
            yield Bad(kind, name, lambda t: t[0], ValueError, f"{rank} dimensions", "shape [")
            yield Bad(kind, name, lambda t: t[None], ValueError, f"{rank} dimensions", "shape [1, ")
            yield Bad(
                kind, name, lambda t: t.double(), TypeError, "torch.float16 or torch.bfloat16 or", "torch.float64"
            )
            yield Bad(kind, name, lambda t: t.to(torch.uint8), TypeError, ".view(torch.float8_e4m3fn) or",
                      "torch.uint8")  # fmt: skip
            yield Bad(kind, name, lambda t: t.to(torch.int16), TypeError, "torch.float8_e5m2 or torch.int8",
                      "torch.int16")  # fmt: skip
            yield Bad(kind, name, lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), ValueError,
                      "a last stride of 1", "strides [")  # fmt: skip
            yield Bad(kind, name, lambda t: t.new_zeros(*t.shape[:-1], 577), ValueError, "a width in 1…576", "577")
            yield Bad(kind, name, lambda t: t[..., :0], ValueError, "a width in 1…576", "0")
            yield Bad(kind, name, lambda t: t[:, :0], ValueError, "no empty dimension", "shape [")
        if kind != "latent":
            yield Bad(kind, v, lambda t: t.float(), TypeError, "torch.float16", "torch.float32")
            yield Bad(kind, v, lambda t: t.to("meta"), ValueError, f"device cpu (that of {k})", "meta")
            yield Bad(kind, v, lambda t: t[:-1], ValueError, "shape [", "[")
            yield Bad(kind, v, lambda t: t[..., :2, :], ValueError, "head_dim_v]", "[")
        vectors = {"csr": ["page_indptr", "page_indices", "last_page_len", "kv_start"],
                   "ragged": ["kv_indptr", "kv_start"]}.get(kind, ["seq_lens", "rows", "kv_start"])  # fmt: skip
        for name in vectors:
            yield Bad(kind, name, lambda t: [0, 1], TypeError, "a torch.Tensor", "list")
            yield Bad(kind, name, lambda t: ints(0, 1).long(), TypeError, "torch.int32", "torch.int64")
            yield Bad(kind, name, lambda t: ints(0, 1).short(), TypeError, "torch.int32", "torch.int16")
            yield Bad(kind, name, lambda t: torch.zeros(2), TypeError, "torch.int32", "torch.float32")
            yield Bad(kind, name, lambda t: ints(0, 1)[None], ValueError, "1 dimensions", "shape [1, 2]")
            yield Bad(kind, name, lambda t: ints(0, 0, 0, 0, 0)[::2], ValueError, "a stride of 1", "2")
            yield Bad(kind, name, lambda t: ints(0, 1).to("meta"), ValueError, "device cpu (that of", "meta")
        for name in {"csr": ["page_indptr"], "ragged": ["kv_indptr"]}.get(kind, []):
            yield Bad(kind, name, lambda t: t[:0], ValueError, "at least 1 elements", "0")
        yield Bad(kind, "len_hint", lambda t: -1, ValueError, "an integer ≥ 0", "-1")
        yield Bad(kind, "len_hint", lambda t: 4096.0, TypeError, "an integer ≥ 0", "4096.0")
        yield Bad(kind, "len_hint", lambda t: torch.tensor(3), TypeError, "an integer ≥ 0", "tensor(3)")
        if paged:
            yield Bad(kind, "layout", lambda t: "nhd", ValueError, '"NHD" or "HND"', "'nhd'")
            yield Bad(kind, "layout", lambda t: None, ValueError, '"NHD" or "HND"', "None")
    for given, error in ((0, ValueError), (WIDTH_V + 1, ValueError), (2.0, TypeError)):
        yield Bad("latent", "head_dim_v", lambda t, given=given: given, error, f"an integer in 1…{WIDTH_V}", str(given))
    yield Bad("latent", "page_table", lambda t: t[0], ValueError, "2 dimensions", "shape [3]")
    yield Bad("latent", "page_table", lambda t: t.to("meta"), ValueError, "device cpu (that of cache)", "meta")
    table = "page_table"
    yield Bad("paged", table, lambda t: t.tolist(), TypeError, "a torch.Tensor", "list")
    yield Bad("paged", table, lambda t: t.long(), TypeError, "torch.int32", "torch.int64")
    yield Bad("paged", table, lambda t: t.float(), TypeError, "torch.int32", "torch.float32")
    yield Bad("paged", table, lambda t: t[0], ValueError, "2 dimensions", "shape [3]")
    yield Bad("paged", table, lambda t: t[None], ValueError, "2 dimensions", "shape [1, 2, 3]")
    yield Bad("paged", table, lambda t: t.t().contiguous().t(), ValueError, "a last stride of 1", "strides [1, 2]")
    yield Bad("paged", table, lambda t: t.to("meta"), ValueError, "device cpu (that of k_cache)", "meta")


@pytest.mark.parametrize("bad", list(cases()), ids=str)
def test_an_argument_that_will_not_do_is_named_with_expected_and_given(bad):
    good = arguments(bad.kind)
    good |= {bad.name: bad.change(good.get(bad.name))}
    with pytest.raises(bad.error) as raised:
        MAKE[bad.kind](**good)
    message = str(raised.value)
    assert message.startswith(f"{bad.name}: expected "), message
    expected, given = message.rsplit(", given ", 1)
    assert bad.expected in expected and given.startswith(bad.given), message


@EVERY
def test_arguments_that_a_view_does_not_have_are_refused(kind):
    for name in ("block_table", "schedule_", "page_size"):
        with pytest.raises(TypeError, match=name):
            MAKE[kind](**arguments(kind), **{name: 1})


@EVERY
@pytest.mark.parametrize("name", ["layout", "rows"])
def test_options_that_mean_nothing_to_a_view_are_refused(kind, name):
    known = {"layout": ("paged", "csr"), "rows": ("paged", "contiguous", "latent")}[name]
    value: object = "NHD" if name == "layout" else ints(0, 1)
    if kind in known:
        assert isinstance(getattr(MAKE[kind](**arguments(kind), **{name: value}), name), str | Tensor)
    else:
        with pytest.raises(TypeError, match=name):
            MAKE[kind](**arguments(kind), **{name: value})


# Quantised caches.


def quantised(kind, dtype):
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments(kind).items()
    }


def per_token(kind):
    """The shape of a scale per token and head."""
    given = arguments(kind)
    return next(given[name] for name in ("k_cache", "k", "cache") if name in given).shape[:-1]


def scale_names(kind):
    return ("scale",) if kind == "latent" else ("k_scale", "v_scale")


@EVERY
def test_scales_are_held_as_given(kind):
    shapes = [(), per_token(kind), *([(HEADS,)] if kind != "latent" else [])]
    for scale in (0.5, 2, *(torch.ones(shape) for shape in shapes)):
        kv = MAKE[kind](**quantised(kind, torch.int8), **dict.fromkeys(scale_names(kind), scale))
        assert kv.k_scale is scale and kv.v_scale is scale and kv.quantized
    kv = MAKE[kind](**quantised(kind, torch.float8_e5m2))
    assert kv.k_scale is None and kv.v_scale is None and kv.dtype == torch.float8_e5m2


def test_strides_of_scales():
    given = quantised("paged", torch.int8)
    given |= {name: given[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
    heads = torch.ones(2 * HEADS)[::2]
    own = torch.ones(PAGES, HEADS, SIZE + 1)[..., :SIZE]
    kv = splitkv.PagedKV(**given, layout="HND", k_scale=heads, v_scale=own)
    # Elements between pages, tokens and heads.
    assert [scale.strides for scale in kv.scales] == [(0, 0, 2), (HEADS * (SIZE + 1), 1, SIZE + 1)]
    assert [scale.per_token for scale in kv.scales] == [False, True]


@EVERY
def test_scales_that_will_not_do_are_refused(kind):
    name = scale_names(kind)[-1]
    good = dict.fromkeys(scale_names(kind), 1.0)
    shape = per_token(kind)
    for bad, error, text in (
        (None, ValueError, "a scale, since the cache is of torch.int8, given none"),
        (0.0, ValueError, r"finite and > 0 in float32, given 0\.0"),
        (-1.0, ValueError, "given -1"),
        (float("nan"), ValueError, "given nan"),
        (float("inf"), ValueError, "given inf"),
        (True, TypeError, "a real number, given True"),
        ("1", TypeError, "a real number, given '1'"),
        (torch.ones(shape).half(), TypeError, "torch.float32, given torch.float16"),
        (torch.ones(shape, device="meta"), ValueError, "device cpu"),
        (torch.ones(HEADS + 1), ValueError, r"shape \[\] or .*given \[4\]"),
        (torch.ones(*shape, 1), ValueError, r"shape \[\] or"),
        (torch.ones(*shape[:-1], shape[-1] + 1), ValueError, r"shape \[\] or"),
    ):
        with pytest.raises(error, match=f"^{name}: expected .*{text}"):
            MAKE[kind](**quantised(kind, torch.int8), **good | {name: bad})


@EVERY
@pytest.mark.parametrize("scale", [1.0, torch.ones(())], ids=["number", "tensor"])
def test_scales_of_a_16_bit_cache_are_refused(kind, scale):
    """Case 27."""
    for name in scale_names(kind):
        with pytest.raises(ValueError, match=f"^{name}: expected none, .* not quantised .torch.float16., given one"):
            MAKE[kind](**arguments(kind), **{name: scale})
