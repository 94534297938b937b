"""The calls: what each argument may not be, and what a call does that no reference is needed for.

Whatever is refused is refused before anything is launched: outputs and workspace keep their bits, and `supports` gives
the same reason without raising.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import COMPILED
from public import AUTOGRAD, shown

import splitkv
from splitkv import api
from splitkv.config import WorkspaceConfig
from splitkv.testing import Guarded, PoisonedWorkspace, expect, make_problem, same_bits

DEVICE = torch.device("cuda", 0) if COMPILED else torch.device("cpu")
BATCH, Q_HEADS, KV_HEADS, WIDTH, WIDTH_V, TOKENS = 2, 4, 2, 16, 24, 10
DTYPE = torch.float16
CONFIG = WorkspaceConfig(BATCH, Q_HEADS, KV_HEADS, WIDTH, WIDTH_V, max_total_q=6, max_splits=40, dtype=DTYPE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def cache(batch: int = BATCH, heads: int = KV_HEADS, width: int = WIDTH, dtype: torch.dtype = DTYPE) -> Any:
    lens = torch.full((batch,), TOKENS, dtype=torch.int32, device=DEVICE)
    return splitkv.ContiguousKV(
        zeros(batch, TOKENS, heads, width, dtype=dtype), zeros(batch, TOKENS, heads, WIDTH_V, dtype=dtype), lens
    )


def good() -> dict[str, Any]:
    """Every argument of decode that a call may have at once; out and lse full of NaN between guards."""
    return dict(
        q=zeros(BATCH, Q_HEADS, WIDTH),
        kv=cache(),
        sm_scale=0.5,
        causal=True,
        window_left=3,
        softcap=30.0,
        sinks=zeros(Q_HEADS, dtype=torch.float32),
        alibi_slopes=zeros(Q_HEADS, dtype=torch.float32),
        num_splits=2,
        out=Guarded((BATCH, Q_HEADS, WIDTH_V), DTYPE, DEVICE).tensor,
        lse=Guarded((BATCH, Q_HEADS), torch.float32, DEVICE).tensor,
    )


def ragged() -> dict[str, Any]:
    return good() | dict(
        q=zeros(5, Q_HEADS, WIDTH),
        qo_indptr=ints(0, 2, 5),
        out=zeros(5, Q_HEADS, WIDTH_V),
        lse=zeros(5, Q_HEADS, dtype=torch.float32),
    )


def several() -> dict[str, Any]:
    return good() | dict(
        q=zeros(BATCH, 3, Q_HEADS, WIDTH),
        tree_mask=zeros(BATCH, 3, 1, dtype=torch.int32),
        out=zeros(BATCH, 3, Q_HEADS, WIDTH_V),
        lse=zeros(BATCH, 3, Q_HEADS, dtype=torch.float32),
    )


@dataclasses.dataclass
class Bad:
    """`change` makes of the good argument called `name` one that is refused."""

    name: str
    change: Callable[[Any], Any]
    error: type[Exception]
    expected: str
    given: str
    base: Callable[[], dict[str, Any]] = good
    blamed: str = ""

    def __str__(self) -> str:
        return f"{self.base.__name__}-{self.name}-{self.given[:30]}"


def tensor_cases(name: str, base: Callable[[], dict[str, Any]] = good) -> Iterator[Bad]:
    """What no tensor argument may be."""
    yield Bad(name, lambda t: t.tolist(), TypeError, "a torch.Tensor", "list", base)
    yield Bad(name, lambda t: t.double(), TypeError, "torch.", "torch.float64", base)
    yield Bad(name, lambda t: t[None, None], ValueError, "", "shape [" if name in ("q", "tree_mask") else "[", base)
    yield Bad(name, lambda t: t.to("meta"), ValueError, f"device {DEVICE}", "meta", base)


def cases() -> Iterator[Bad]:
    yield Bad("q", lambda q: None, TypeError, "a torch.Tensor", "NoneType")
    for name in ("q", "sinks", "alibi_slopes", "out", "lse"):
        yield from tensor_cases(name)
    yield from tensor_cases("tree_mask", several)
    yield Bad("q", lambda q: q.bfloat16(), TypeError, "torch.float16", "torch.bfloat16")
    yield Bad("q", lambda q: q[0], ValueError, "3 or 4 dimensions", "shape [4, 16]")
    yield Bad("q", lambda q: q[:, None, None], ValueError, "3 or 4 dimensions", "shape [2, 1, 1, 4, 16]")
    yield Bad("q", lambda q: q[:, None], ValueError, "3 dimensions", "shape [5, 1, 4, 16]", ragged)
    yield Bad("q", lambda q: zeros(BATCH, 0, Q_HEADS, WIDTH), ValueError, "q_len ≥ 1", "shape [2, 0, 4, 16]")
    yield Bad("q", lambda q: q[..., :-1], ValueError, "head_dim 16 (that of kv)", "15")
    yield Bad("q", lambda q: q[:, :3], ValueError, "heads that are a multiple of kv's 2", "3")
    yield Bad("q", lambda q: q[:, :0], ValueError, "heads that are a multiple of kv's 2", "0")
    yield Bad("q", lambda q: q.mT.contiguous().mT, ValueError, "a last stride of 1", "strides [64, 1, 4]")
    yield Bad(
        "q", lambda q: zeros(BATCH, Q_HEADS, 1).expand(-1, -1, WIDTH), ValueError, "a last stride of 1", "strides ["
    )
    if AUTOGRAD:
        yield Bad("q", lambda q: q.requires_grad_(), ValueError, "a tensor outside autograd", "one that requires grad")
    yield Bad("q", lambda q: zeros(3, Q_HEADS, WIDTH), ValueError, "entries for a batch of 3", "2", blamed="seq_lens")

    yield Bad("kv", lambda kv: (kv.k, kv.v), TypeError, "a PagedKV, ContiguousKV, RaggedKV or LatentKV", "tuple")
    yield Bad("kv", lambda kv: None, TypeError, "a PagedKV, ContiguousKV, RaggedKV or LatentKV", "NoneType")
    yield Bad("kv", lambda kv: cache(heads=3), ValueError, "heads that are a multiple of kv's 3", "4", blamed="q")
    yield Bad("kv", lambda kv: cache(width=8), ValueError, "head_dim 8 (that of kv)", "16", blamed="q")
    yield Bad("kv", lambda kv: cache(batch=1), ValueError, "entries for a batch of 2", "1", blamed="seq_lens")
    yield Bad(
        "kv", lambda kv: cache(dtype=torch.float32), TypeError, "torch.float16 (that of the work", "torch.float32"
    )
    yield Bad("kv", lambda kv: splitkv.ContiguousKV(kv.k.to("meta"), kv.v.to("meta"), kv.seq_lens.to("meta")),
              ValueError, f"device {DEVICE} (that of the workspace)", "meta")  # fmt: skip

    yield Bad("qo_indptr", lambda t: t.tolist(), TypeError, "a torch.Tensor", "list", ragged)
    yield Bad("qo_indptr", lambda t: t.long(), TypeError, "torch.int32", "torch.int64", ragged)
    yield Bad("qo_indptr", lambda t: t[None], ValueError, "1 dimensions", "shape [1, 3]", ragged)
    yield Bad("qo_indptr", lambda t: t[:0], ValueError, "at least 1 elements", "0", ragged)
    yield Bad("qo_indptr", lambda t: ints(0, 0, 2, 2, 5, 5)[::2], ValueError, "a stride of 1", "2", ragged)
    yield Bad("qo_indptr", lambda t: t.to("meta"), ValueError, f"device {DEVICE} (that of q)", "meta", ragged)
    yield Bad("qo_indptr", lambda t: ints(0, 1, 2, 5), ValueError, "entries for a batch of 3", "2", ragged, "seq_lens")

    for name, bound in (("sm_scale", "finite in float32"), ("softcap", "finite and > 0 in float32")):
        for value in (math.nan, math.inf, -math.inf, 1e39):
            yield Bad(name, lambda _, value=value: value, ValueError, f"a number that is {bound}", str(value))
        for value in ("1", True, torch.tensor(1.0), 1j):
            yield Bad(name, lambda _, value=value: value, TypeError, "a real number", shown(value))
    for value in (0.0, -30.0, 0, 1e-50):
        yield Bad("softcap", lambda _, value=value: value, ValueError, "finite and > 0", str(value))
    for value in (1, 0, None, "yes", torch.tensor(True)):
        yield Bad("causal", lambda _, value=value: value, TypeError, "True or False", shown(value))
    yield Bad("window_left", lambda _: -1, ValueError, "an integer ≥ 0", "-1")
    for value in (3.0, True, "3", torch.tensor(3)):
        yield Bad("window_left", lambda _, value=value: value, TypeError, "an integer ≥ 0", shown(value))
    for value in (0, -1, 4097):
        yield Bad("num_splits", lambda _, value=value: value, ValueError, "an integer in 1…4096", str(value))
    for value in (2.0, True, "2"):
        yield Bad("num_splits", lambda _, value=value: value, TypeError, "an integer in 1…4096", shown(value))
    # 2 tiles of 2 heads. The workspace's 40 partial tiles have 64 rows each, and a call of one token needs but 16.
    yield Bad(
        "num_splits", lambda _: 41, ValueError, "at most 160 partial tiles", "164 (2 query tiles · 2 KV heads · 41"
    )

    for name in ("sinks", "alibi_slopes"):
        yield Bad(name, lambda t: t[:-1], ValueError, "shape [4]", "[3]")
        yield Bad(name, lambda t: zeros(2 * Q_HEADS, dtype=torch.float32)[::2], ValueError, "a stride of 1", "2")
        yield Bad(name, lambda t: 1.0, TypeError, "a torch.Tensor", "float")
        yield Bad(name, lambda t: t.bfloat16(), TypeError, "torch.float32", "torch.bfloat16")
    yield Bad("alibi_slopes", lambda t: t.half(), TypeError, "torch.float32", "torch.float16")

    shape = "shape [≥ 2, max_q_len ≥ 3, ceil(max_q_len / 32)]"
    yield Bad("tree_mask", lambda t: t[:1], ValueError, shape, "[1, 3, 1]", several)
    yield Bad("tree_mask", lambda t: t[:, :2], ValueError, shape, "[2, 2, 1]", several)
    yield Bad("tree_mask", lambda t: t.repeat(1, 1, 2), ValueError, shape, "[2, 3, 2]", several)
    yield Bad("tree_mask", lambda t: t.bool(), TypeError, "torch.int32", "torch.bool", several)
    yield Bad("tree_mask", lambda t: zeros(BATCH, 40, 4, dtype=torch.int32)[..., ::2], ValueError,
              "a last stride of 1", "strides [160, 4, 2]", several)  # fmt: skip
    yield Bad("causal", lambda _: False, ValueError, "causal=True (it replaces the", "causal=False", several,
              "tree_mask")  # fmt: skip

    yield Bad("out", lambda t: t.bfloat16(), TypeError, "torch.float16 or torch.float32", "torch.bfloat16")
    yield Bad("out", lambda t: t[:1], ValueError, "shape [2, 4, 24]", "[1, 4, 24]")
    yield Bad("out", lambda t: t[..., :WIDTH], ValueError, "shape [2, 4, 24]", "[2, 4, 16]")
    yield Bad("out", lambda t: t.mT.contiguous().mT, ValueError, "a last stride of 1", "strides [96, 1, 4]")
    yield Bad("out", lambda t: t[:1].expand(2, -1, -1), ValueError, "memory of its own per row", "strides [0, 24, 1]")
    yield Bad("lse", lambda t: t.half(), TypeError, "torch.float32", "torch.float16")
    yield Bad("lse", lambda t: t[:, :3], ValueError, "shape [2, 4]", "[2, 3]")
    yield Bad("lse", lambda t: t[:, :1].expand(-1, 4), ValueError, "memory of its own per row", "strides [4, 0]")


@pytest.mark.parametrize("bad", list(cases()), ids=str)
def test_decode_refuses_before_it_launches(bad: Bad) -> None:
    arguments = bad.base()
    scratch = PoisonedWorkspace(CONFIG, DEVICE, "garbage")
    assert splitkv.supports(workspace=scratch.workspace, **arguments) is None, "the base of the case is refused itself"
    outputs = [arguments["out"], arguments["lse"]]
    before = [output.clone() for output in outputs]
    arguments |= {bad.name: bad.change(arguments[bad.name])}
    with pytest.raises(bad.error) as raised:
        splitkv.decode(workspace=scratch.workspace, **arguments)
    message = str(raised.value)
    assert message.startswith(f"{bad.blamed or bad.name}: expected "), message
    expected, given = message.rsplit(", given ", 1)
    assert bad.expected in expected and given.startswith(bad.given), message
    assert splitkv.supports(workspace=scratch.workspace, **arguments) == message
    with pytest.raises(bad.error):
        splitkv.decode_with_lse(workspace=scratch.workspace, **arguments)
    assert all(same_bits(output, copy) for output, copy in zip(outputs, before, strict=True))
    assert not any(scratch.written(section.name).any() for section in CONFIG.sections())
    scratch.check_guards()


@pytest.mark.parametrize("workspace", [None, CONFIG, zeros(9)], ids=["none", "config", "tensor"])
def test_what_is_no_workspace_is_refused(workspace: Any) -> None:
    message = f"workspace: expected a splitkv.Workspace, given {type(workspace).__name__}"
    with pytest.raises(TypeError, match=f"^{message}$"):
        splitkv.decode(workspace=workspace, **good())
    assert splitkv.supports(workspace=workspace, **good()) == message


def test_capacities_of_the_workspace_are_named() -> None:
    arguments = good() | dict(out=None)
    small = splitkv.Workspace.allocate(dataclasses.replace(CONFIG, max_total_q=1), DEVICE)
    more = ": a larger max_total_q in its config makes room"
    reason = "workspace: expected out of at least 192 elements for [2, 4, 24], given 96 ([1, 4, 24])" + more
    assert splitkv.supports(workspace=small, **arguments) == reason
    with pytest.raises(ValueError) as raised:
        splitkv.decode_with_lse(workspace=small, **good() | dict(lse=None))
    assert str(raised.value) == "workspace: expected lse of at least 8 elements for [2, 4], given 4 ([1, 4])" + more
    assert splitkv.supports(workspace=small, **good()) is None  # both are given

    parts = dataclasses.replace(CONFIG, split_tokens=4, max_parts=8, q_tile_rows=16, max_splits=31)
    scratch = splitkv.Workspace.allocate(parts, DEVICE)
    reason = splitkv.supports(workspace=scratch, **good() | dict(num_splits=None))
    assert reason == (
        "split_tokens: expected at most 31 partial tiles (the workspace's capacity for 16 rows of width 24), "
        "given 32 (2 query tiles · 2 KV heads · 8 parts): a larger max_splits or q_tile_rows in its config makes room"
    )


def test_an_argument_that_does_not_exist_is_a_type_error() -> None:
    workspace = splitkv.Workspace.allocate(CONFIG, DEVICE)
    for call in (splitkv.decode, splitkv.decode_with_lse, splitkv.supports, splitkv.warmup):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument 'window'"):
            call(workspace=workspace, window=3, **good())
    for call in (splitkv.supports, splitkv.warmup):  # a keyword of plan_decode alone
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument 'want_lse'"):
            call(workspace=workspace, want_lse=True, **good())


def test_supports_takes_what_decode_takes() -> None:
    planned, plain, both, shared = (
        set(inspect.signature(call).parameters)
        for call in (api.plan_decode, splitkv.decode, splitkv.decode_with_lse, splitkv.decode_shared_prefix)
    )
    assert planned - {"want_lse"} == shared == plain | {"group_ids", "prefix_lens"} and plain == both


def test_a_larger_batch_fits_where_its_outputs_are_given() -> None:
    """Capacity is that of the buffers, and outputs of the caller's are not among them."""
    problem = make_problem(3, device=DEVICE, lens=(5, 9, 0), num_kv_heads=1, group_size=2, query="one", num_splits=None)
    small = dataclasses.replace(problem.config, max_batch_size=1, max_total_q=1, max_splits=40, split_tokens=None)
    workspace = splitkv.Workspace.allocate(small, DEVICE)
    out = problem.q.new_empty(*problem.q.shape[:-1], problem.kv.head_dim_v)
    lse = torch.empty(problem.q.shape[:-1], device=DEVICE)
    for given, missing in (({"lse": lse}, "out"), ({"out": out}, "lse")):
        with pytest.raises(ValueError, match=rf"workspace: expected {missing} of at least \d+ elements"):
            splitkv.decode_with_lse(problem.q, problem.kv, workspace, **given, **problem.rules)
    splitkv.decode(problem.q, problem.kv, workspace, out=out, lse=lse, **problem.rules)
    problem.expected().check(out, lse)


# Merging.


def good_merge() -> dict[str, Any]:
    return dict(
        outs=zeros(3, 5, Q_HEADS, WIDTH),
        lses=zeros(3, 5, Q_HEADS, dtype=torch.float32),
        sinks=zeros(Q_HEADS, dtype=torch.float32),
        out=Guarded((5, Q_HEADS, WIDTH), DTYPE, DEVICE).tensor,
        lse=Guarded((5, Q_HEADS), torch.float32, DEVICE).tensor,
        indptr=None,
        lse_base=math.e,
        lse_layout="NH",
    )


def good_ragged_merge() -> dict[str, Any]:
    return good_merge() | dict(
        outs=zeros(9, Q_HEADS, WIDTH), lses=zeros(9, Q_HEADS, dtype=torch.float32), indptr=ints(0, 2, 2, 5, 6, 9)
    )


def merge_cases() -> Iterator[Bad]:
    base = good_merge
    for name in ("outs", "lses", "sinks", "out", "lse"):
        yield Bad(name, lambda t: t.tolist(), TypeError, "a torch.Tensor", "list", base)
        yield Bad(name, lambda t: t.double(), TypeError, "torch.", "torch.float64", base)
        yield Bad(name, lambda t: t.int(), TypeError, "torch.", "torch.int32", base)
    for name in ("lses", "sinks", "out", "lse"):
        yield Bad(name, lambda t: t[..., None], ValueError, "shape [", "[", base)
        yield Bad(name, lambda t: t.to("meta"), ValueError, f"device {DEVICE} (that of outs)", "meta", base)
    yield Bad("outs", lambda t: t[:0], ValueError, "shape [n ≥ 1, …, head_dim_v ≥ 1]", "[0, 5, 4, 16]", base)
    yield Bad("outs", lambda t: t[..., :0], ValueError, "shape [n ≥ 1, …, head_dim_v ≥ 1]", "[3, 5, 4, 0]", base)
    yield Bad("outs", lambda t: t[0, 0, 0], ValueError, "shape [n ≥ 1, …, head_dim_v ≥ 1]", "[16]", base)
    yield Bad("outs", lambda t: t.mT.contiguous().mT, ValueError, "a last stride of 1", "strides [320, 64, 1, 4]", base)
    yield Bad("outs", lambda t: zeros(3, 5, 6, Q_HEADS, WIDTH)[:, :, :4], ValueError, "shape [3, 5, 4, 4]", "[3, 5, 4]",
              base, "lses")  # fmt: skip
    yield Bad("lses", lambda t: t[:2], ValueError, "shape [3, 5, 4]", "[2, 5, 4]", base)
    yield Bad("lses", lambda t: t.half(), TypeError, "torch.float32", "torch.float16", base)
    yield Bad("sinks", lambda t: t[:3], ValueError, "shape [4]", "[3]", base)
    yield Bad("sinks", lambda t: zeros(8, dtype=torch.float32)[::2], ValueError, "a stride of 1", "2", base)
    yield Bad("sinks", lambda t: t.bfloat16(), TypeError, "torch.float32 or torch.float16", "torch.bfloat16", base)
    yield Bad("out", lambda t: t[:4], ValueError, "shape [5, 4, 16]", "[4, 4, 16]", base)
    yield Bad("out", lambda t: t.mT.contiguous().mT, ValueError, "a last stride of 1", "strides [64, 1, 4]", base)
    yield Bad("out", lambda t: t[:1].expand(5, -1, -1), ValueError, "memory of its own per row", "strides [0, ", base)
    yield Bad("lse", lambda t: t[:4], ValueError, "shape [5, 4]", "[4, 4]", base)
    yield Bad("lse", lambda t: t[:1].expand(5, -1), ValueError, "memory of its own per row", "strides [0, 1]", base)
    for value in (10, 1.0, True, "e", torch.tensor(2.0)):
        yield Bad("lse_base", lambda _, value=value: value, ValueError, "math.e or 2", shown(value), base)
    for value in ("NHD", None, 0):
        yield Bad("lse_layout", lambda _, value=value: value, ValueError, '"NH" or "HN"', shown(value), base)
    yield Bad("lse_layout", lambda _: "HN", ValueError, "shape [3, 4, 5]", "[3, 5, 4]", base, "lses")
    yield Bad("indptr", lambda _: ints(0, 3), ValueError, "3 dimensions", "shape [3, 5, 4, 16]", base, "outs")
    ragged = good_ragged_merge
    yield Bad("indptr", lambda t: t.tolist(), TypeError, "a torch.Tensor", "list", ragged)
    yield Bad("indptr", lambda t: t.long(), TypeError, "torch.int32", "torch.int64", ragged)
    yield Bad("indptr", lambda t: t[None], ValueError, "1 dimensions", "shape [1, 6]", ragged)
    yield Bad("indptr", lambda t: t[:0], ValueError, "at least 1 elements", "0", ragged)
    yield Bad("indptr", lambda t: t.to("meta"), ValueError, f"device {DEVICE} (that of outs)", "meta", ragged)
    yield Bad("indptr", lambda t: t[:-1], ValueError, "shape [4, 4, 16]", "[5, 4, 16]", ragged, "out")


@pytest.mark.parametrize("bad", list(merge_cases()), ids=str)
def test_merge_refuses_before_it_launches(bad: Bad) -> None:
    arguments = bad.base()
    splitkv.merge(**bad.base())  # or the base of the case is refused itself
    outputs = [arguments["out"], arguments["lse"]]
    before = [output.clone() for output in outputs]
    arguments |= {bad.name: bad.change(arguments[bad.name])}
    with pytest.raises(bad.error) as raised:
        splitkv.merge(**arguments)
    message = str(raised.value)
    assert message.startswith(f"{bad.blamed or bad.name}: expected "), message
    expected, given = message.rsplit(", given ", 1)
    assert bad.expected in expected and given.startswith(bad.given), message
    assert all(same_bits(output, copy) for output, copy in zip(outputs, before, strict=True))


def test_merge_refuses_rows_that_lie_unevenly() -> None:
    outs, lses = zeros(3, 5, 6, 2, Q_HEADS, WIDTH)[:, :, :4], zeros(3, 5, 4, 2, Q_HEADS, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^outs: expected leading dimensions that lie evenly in memory, given shape"):
        splitkv.merge(outs, lses)
    out = zeros(5, 6, 2, Q_HEADS, WIDTH)[:, :4]
    with pytest.raises(ValueError, match=r"^out: expected leading dimensions that lie evenly in memory, given shape"):
        splitkv.merge(outs.contiguous(), lses, out=out)


def test_merge_refuses_a_sink_without_heads() -> None:
    with pytest.raises(ValueError, match=r"^sinks: expected outs with a dimension of heads, given"):
        splitkv.merge(zeros(3, WIDTH), zeros(3, dtype=torch.float32), sinks=zeros(1, dtype=torch.float32))


@pytest.mark.parametrize("shape", [(3, 16), (1, 1, 1), (2, 0, 3, 8), (2, 3, 8), (2, 2, 3, 2, 4)], ids=str)
def test_merge_takes_any_number_of_dimensions(device: torch.device, shape: tuple[int, ...]) -> None:
    outs, lses = torch.randn(shape, device=device), torch.randn(shape[:-1], device=device)
    out, lse = splitkv.merge(outs, lses)
    assert out.shape == shape[1:] and lse.shape == shape[1:-1]
    weights = lses.double().softmax(dim=0)
    torch.testing.assert_close(out.double(), (weights[..., None] * outs.double()).sum(dim=0), atol=1e-6, rtol=1e-6)


def test_merge_takes_strided_partials_and_writes_strided_outputs(device: torch.device) -> None:
    outs = torch.randn(5, 3, Q_HEADS, WIDTH + 3, device=device).transpose(0, 1)[..., 1 : WIDTH + 1]
    lses = torch.randn(Q_HEADS, 5, 3, device=device).permute(2, 1, 0)
    out = Guarded((5, Q_HEADS, WIDTH), torch.float32, device, padding=3, shift=1)
    lse = Guarded((5, Q_HEADS), torch.float32, device, step=2)
    returned = splitkv.merge(outs, lses, out=out.tensor, lse=lse.tensor)
    assert returned[0] is out.tensor and returned[1] is lse.tensor
    out.check_guards()
    lse.check_guards()
    plain = splitkv.merge(outs.contiguous(), lses.contiguous())
    assert all(same_bits(a.contiguous(), b) for a, b in zip(returned, plain, strict=True))


# Calls that need no reference.


@pytest.mark.parametrize("form", ["one", "several", "ragged"])
def test_an_empty_batch_gives_an_empty_output(device: torch.device, form: str) -> None:
    kv = splitkv.PagedKV(
        torch.zeros(3, 4, KV_HEADS, WIDTH, device=device, dtype=DTYPE),
        torch.zeros(3, 4, KV_HEADS, WIDTH_V, device=device, dtype=DTYPE),
        torch.zeros(0, 2, device=device, dtype=torch.int32),
        torch.zeros(0, device=device, dtype=torch.int32),
    )
    shape = {"one": (0, Q_HEADS), "several": (0, 3, Q_HEADS), "ragged": (2, Q_HEADS)}[form]
    rules = {"qo_indptr": torch.zeros(1, dtype=torch.int32, device=device)} if form == "ragged" else {}
    scratch = PoisonedWorkspace(CONFIG, device)
    q = torch.ones(*shape, WIDTH, device=device, dtype=DTYPE)
    out, lse = splitkv.decode_with_lse(q, kv, scratch.workspace, **rules)
    assert out.shape == (*shape, WIDTH_V) and lse.shape == shape
    assert not out.any() and bool((lse == -math.inf).all())
    scratch.check_guards()
    nothing = {"qo_indptr": rules["qo_indptr"]} if form == "ragged" else {}
    assert splitkv.decode(q[:0], kv, scratch.workspace, **nothing).numel() == 0


def test_every_integer_argument_may_be_1(device: torch.device) -> None:
    for split in (dict(num_splits=1), dict(split_tokens=1, max_parts=1), dict(num_splits=None, split_tokens=None)):
        problem = make_problem(
            0, device=device, batch=1, lens=(1,), num_kv_heads=1, group_size=1, head_dim=1, head_dim_v=1, page_size=1,
            kind="paged", query="one", mask="causal", max_splits=1, spare=0, softcap=None, window_left=None, rows=True,
            kv_start=False, sinks=None, alibi=False, q_strides="contiguous", kv_strides="contiguous", clamped=False,
            **split,
        )  # fmt: skip
        problem.expected().check(*problem.decode(problem.workspace()), problem)


def test_outputs_default_to_views_of_the_workspace(device: torch.device) -> None:
    problem = make_problem(1, device=device, lens=(5, 9), num_kv_heads=1, group_size=2, query="one", spare=3)
    workspace = problem.workspace()
    out, lse = problem.decode(workspace)
    assert out.data_ptr() == workspace.out.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert splitkv.decode(problem.q, problem.kv, workspace, **problem.rules).data_ptr() == out.data_ptr()


def test_the_lse_changes_no_bit_of_the_output(device: torch.device) -> None:
    """Case 8, whatever the rules."""
    for seed in range(3):
        problem = make_problem(seed, device=device, max_len=40, batch=2, num_kv_heads=1, group_size=3, q_len=2)
        with_lse, _ = problem.decode(problem.workspace())
        assert same_bits(splitkv.decode(problem.q, problem.kv, problem.workspace(), **problem.rules), with_lse)


def test_q_may_not_need_a_gradient_but_may_be_a_parameter_under_no_grad(device: torch.device) -> None:
    problem = make_problem(2, device=device, lens=(4,), query="one", q_strides="contiguous")
    parameter = dataclasses.replace(problem, q=problem.q.clone().requires_grad_())
    with torch.no_grad():
        expect(problem.q, problem.kv, **problem.rules).check(*parameter.decode(parameter.workspace()))


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_in_a_seen_key_shows_in_the_output(device, num_splits, bad):
    """It must not pass for a part without keys, which would drop the part and leave a plausible result."""
    config = splitkv.WorkspaceConfig(1, 2, 1, 16, dtype=torch.float32)
    k = torch.ones(1, 300, 1, 16, device=device)
    k[0, 7, 0, 0] = bad
    kv = splitkv.ContiguousKV(k, torch.ones_like(k), torch.tensor([300], dtype=torch.int32, device=device))
    workspace = splitkv.Workspace.allocate(config, device)
    q = torch.ones(1, 2, 16, device=device)
    out, lse = splitkv.decode_with_lse(q, kv, workspace, num_splits=num_splits)
    assert out.isnan().all() and lse.isnan().all()


def test_a_negated_view_is_refused(device):
    config = splitkv.WorkspaceConfig(1, 2, 1, 16, dtype=torch.float32)
    k = torch.ones(1, 8, 1, 16, device=device)
    lens = torch.tensor([8], dtype=torch.int32, device=device)
    workspace, kv = splitkv.Workspace.allocate(config, device), splitkv.ContiguousKV(k, k, lens)
    q = torch.ones(1, 2, 16, device=device)
    splitkv.decode(q, kv, workspace)
    with pytest.raises(ValueError, match="q: expected numbers as they lie in memory"):
        splitkv.decode(torch._neg_view(q), kv, workspace)
    with pytest.raises(ValueError, match="k: expected numbers as they lie in memory"):
        splitkv.ContiguousKV(torch._neg_view(k), k, lens)
