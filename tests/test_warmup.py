"""Calls that are not checked, prepared or compiled again: which those are, and that nothing else is."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from conftest import COMPILED
from support import H200, run_script
from torch import Tensor

import splitkv
from splitkv import api
from splitkv.testing import expect, same_bits
from splitkv.tiles import Target, Tiles
from splitkv.tiles_io import TileKey, TileTable
from splitkv.variants import Variant
from splitkv.workspace import MAX_CALLS

BATCH, HEADS, KV_HEADS, WIDTH, TOKENS = 2, 4, 2, 16, 24
CONFIG = splitkv.WorkspaceConfig(4, HEADS, KV_HEADS, WIDTH, max_total_q=16, dtype=torch.float16)


def ints(*values: int, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged(device: torch.device, pages: int = 12, **more: Any) -> splitkv.PagedKV:
    k, v = torch.randn(2, pages, 4, KV_HEADS, WIDTH, device=device).half()
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6) % pages
    return splitkv.PagedKV(k, v, table, ints(TOKENS, 7, device=device), **more)


def query(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, HEADS, WIDTH)), device=device).half()


class Counter:
    """Counts calls of a function that it stands for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts how often a call was checked and planned."""
    counter = Counter(api.plan_decode)
    monkeypatch.setattr(api, "plan_decode", counter)
    return counter


def test_a_call_of_a_known_form_is_not_planned_again(device: torch.device, plans: Counter) -> None:
    """Other tensors of the same form take part, those of an equal view too, and what they hold now is what counts."""
    workspace = splitkv.Workspace.allocate(CONFIG, device)
    for turn in range(3):
        q, kv, sinks = query(device), paged(device), torch.randn(HEADS, device=device)
        out, lse = splitkv.decode_with_lse(q, kv, workspace, sinks=sinks)
        expect(q, kv, sinks=sinks).check(out, lse)
        assert plans.calls == 1, f"planned again at call {turn}"
        assert out.data_ptr() == workspace.out.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()
    kv.seq_lens.copy_(ints(3, 0, device=device))
    q.neg_()
    expect(q, kv, sinks=sinks).check(*splitkv.decode_with_lse(q, kv, workspace, sinks=sinks))
    assert plans.calls == 1


def test_given_outputs_of_a_known_form_are_the_ones_that_are_written(device: torch.device, plans: Counter) -> None:
    workspace, kv = splitkv.Workspace.allocate(CONFIG, device), paged(device)
    for _ in range(2):
        q, out, lse = query(device), query(device), torch.empty(BATCH, HEADS, device=device)
        assert splitkv.decode(q, kv, workspace, out=out, lse=lse) is out
        expect(q, kv).check(out, lse)
    assert plans.calls == 1


def shifted(tensor: Tensor, elements: int = 1) -> Tensor:
    """A copy that begins so many elements past an aligned address."""
    buffer = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return buffer[elements:].view(tensor.shape).copy_(tensor)


def apart(tensor: Tensor) -> Tensor:
    """A copy with other strides."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype, device=tensor.device)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def rebuilt(kv: splitkv.PagedKV, **changes: Any) -> splitkv.PagedKV:
    parts = dict(k_cache=kv.k, v_cache=kv.v, page_table=kv.page_table, seq_lens=kv.seq_lens, rows=kv.rows,
                 kv_start=kv.kv_start)  # fmt: skip
    return splitkv.PagedKV(**{**parts, **changes})


VIEWS: dict[str, Callable[[splitkv.PagedKV], splitkv.kv.KVView]] = {
    "wider table": lambda kv: rebuilt(kv, page_table=torch.cat([kv.page_table, kv.page_table], 1)),
    "strided table": lambda kv: rebuilt(kv, page_table=apart(kv.page_table)),
    "K misaligned": lambda kv: rebuilt(kv, k_cache=shifted(kv.k)),
    "V misaligned": lambda kv: rebuilt(kv, v_cache=shifted(kv.v)),
    "K strided": lambda kv: rebuilt(kv, k_cache=apart(kv.k)),
    "V strided": lambda kv: rebuilt(kv, v_cache=apart(kv.v)),
    "narrower V": lambda kv: rebuilt(kv, v_cache=kv.v[..., :8]),
    "rows": lambda kv: rebuilt(kv, rows=ints(1, 0, device=kv.device)),
    "kv_start": lambda kv: rebuilt(kv, kv_start=ints(1, 2, device=kv.device)),
    "other page size": lambda kv: rebuilt(kv, k_cache=kv.k[:, :2], v_cache=kv.v[:, :2]),
    "a schedule": lambda kv: rebuilt(kv, schedule=splitkv.Schedule.allocate(CONFIG, kv.device)),
    "contiguous": lambda kv: splitkv.ContiguousKV(kv.k, kv.v, kv.seq_lens % 4),
}
RULES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "sm_scale": lambda device: dict(sm_scale=0.5),
    "causal": lambda device: dict(causal=False),
    "window_left": lambda device: dict(window_left=3),
    "softcap": lambda device: dict(softcap=2.0),
    "num_splits": lambda device: dict(num_splits=2),
    "sinks": lambda device: dict(sinks=torch.ones(HEADS, device=device)),
    "alibi_slopes": lambda device: dict(alibi_slopes=torch.ones(HEADS, device=device)),
    "tree_mask": lambda device: dict(tree_mask=torch.ones(BATCH, 1, 1, dtype=torch.int32, device=device)),
    "qo_indptr": lambda device: dict(qo_indptr=ints(0, 1, 2, device=device)),
}
QUERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "smaller batch": lambda q: q[:1],
    "several tokens": lambda q: q[:, None],
    "misaligned": shifted,
    "strided": apart,
    "more heads": lambda q: torch.cat([q, q], 1),
}


@pytest.mark.parametrize("change", [*VIEWS, *RULES, *QUERIES])
def test_whatever_differs_is_planned_anew(device: torch.device, plans: Counter, change: str) -> None:
    workspace = splitkv.Workspace.allocate(CONFIG, device)
    q, kv = query(device), paged(device)
    splitkv.decode_with_lse(q, kv, workspace)
    other_q = QUERIES[change](q) if change in QUERIES else q
    other_kv = VIEWS[change](kv) if change in VIEWS else kv
    rules = RULES[change](device) if change in RULES else {}
    for repeats in range(2):
        expect(other_q, other_kv, **rules).check(*splitkv.decode_with_lse(other_q, other_kv, workspace, **rules))
        assert plans.calls == 2, f"{repeats} repeats"
    expect(q, kv).check(*splitkv.decode_with_lse(q, kv, workspace))
    assert plans.calls == 2


def test_layouts_that_look_alike_are_told_apart(device: torch.device) -> None:
    """As many heads as tokens in a page: the same shapes and strides either way."""
    workspace, q = splitkv.Workspace.allocate(CONFIG, device), query(device)
    k, v = torch.randn(2, 12, KV_HEADS, KV_HEADS, WIDTH, device=device).half()
    table, lens = torch.arange(12, dtype=torch.int32, device=device).view(2, 6), ints(12, 7, device=device)
    for layout in ("NHD", "HND", "NHD"):
        kv = splitkv.PagedKV(k, v, table, lens, layout=layout)
        expect(q, kv).check(*splitkv.decode_with_lse(q, kv, workspace))


def test_forms_of_outputs_are_told_apart(device: torch.device, plans: Counter) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    outs = [None, query(device), apart(query(device)), shifted(query(device))]
    lses = [None, torch.empty(BATCH, HEADS, device=device), torch.empty(HEADS, BATCH, device=device).mT]
    for out in outs:
        for lse in lses:
            splitkv.decode(q, kv, workspace, out=out, lse=lse)
    assert plans.calls == len(outs) * len(lses)
    splitkv.decode_with_lse(q, kv, workspace)
    assert plans.calls == len(outs) * len(lses) + 1
    for lse in lses[1:]:
        assert lse is not None and same_bits(lse.contiguous(), workspace.lse[:BATCH].contiguous())


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({}, dict(causal=1), TypeError),
        (dict(num_splits=1), dict(num_splits=True), TypeError),
        (dict(num_splits=1), dict(num_splits=1.0), TypeError),
        (dict(window_left=5), dict(window_left=5.0), TypeError),
        (dict(sm_scale=1.0), dict(sm_scale=True), TypeError),
        (dict(softcap=1.0), dict(softcap=True), TypeError),
        ({}, dict(softcap=0.0), ValueError),
        ({}, dict(sinks=[0.0] * HEADS), TypeError),
        ({}, dict(sm_scale=[1.0]), TypeError),
    ],
    ids=str,
)
def test_what_equals_a_good_call_is_still_refused(
    device: torch.device, good: dict[str, Any], bad: dict[str, Any], error: type[Exception]
) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    splitkv.decode(q, kv, workspace, **good)
    with pytest.raises(error, match=rf"^{next(iter(bad))}: expected"):
        splitkv.decode(q, kv, workspace, **bad)


def test_a_known_form_with_another_q_is_still_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    splitkv.decode(q, kv, workspace)
    for bad, error in ((q.bfloat16(), TypeError), (q[..., :8], ValueError), (q.clone().requires_grad_(), ValueError),
                       (q.to("meta"), ValueError), (q.tolist(), TypeError), (q[:, :3], ValueError)):  # fmt: skip
        with pytest.raises(error, match=r"^q: expected"):
            splitkv.decode(bad, kv, workspace)
    with pytest.raises(TypeError, match=r"^kv: expected"):
        splitkv.decode(q, kv.k, workspace)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^workspace: expected"):
        splitkv.decode(q, kv, CONFIG)  # type: ignore[arg-type]
    kv.seq_lens.copy_(ints(TOKENS, 1000, device=device))
    splitkv.decode(q, kv, workspace)
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    with pytest.raises(ValueError, match=r"^seq_lens: expected values in 0…24, given 1000 in row 1"):
        splitkv.decode(q, kv, workspace)


def test_views_cannot_be_changed(device: torch.device) -> None:
    kv = paged(device)
    for name in ("k", "seq_lens", "rows", "len_hint", "addressing", "form"):
        with pytest.raises(AttributeError, match=rf"^{name}: expected no change of a view"):
            setattr(kv, name, None)


def test_a_view_in_the_place_of_a_dead_one_is_another(device: torch.device) -> None:
    """Python gives a new view the identity of one that was collected."""
    workspace, q = splitkv.Workspace.allocate(CONFIG, device), query(device)
    for pages in (12, 3, 12, 5, 3):
        kv = paged(device, pages, rows=ints(1, 0, device=device) if pages == 5 else None)
        expect(q, kv).check(*splitkv.decode_with_lse(q, kv, workspace))
        del kv
        gc.collect()


def test_a_workspace_keeps_no_tensor_of_a_call(device: torch.device) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    sinks, out = torch.ones(HEADS, device=device), query(device)
    held = [weakref.ref(x) for x in (q, kv, kv.k, kv.seq_lens, kv.page_table, sinks, out)]
    splitkv.decode(q, kv, workspace, sinks=sinks, out=out)
    splitkv.decode(q, kv, workspace, sinks=sinks, out=out)
    del q, kv, sinks, out
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_the_memory_of_a_workspace_is_bounded(device: torch.device, plans: Counter) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device, 0, HEADS, WIDTH), paged(device)
    for turn in range(MAX_CALLS + 3):
        splitkv.decode(q, kv, workspace, sm_scale=1.0 + turn)
    assert plans.calls == MAX_CALLS + 3
    assert len(workspace._calls) == 3


def test_other_tiles_are_used_at_once(device: torch.device, plans: Counter) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    splitkv.decode(q, kv, workspace)
    arch = workspace.target.arch
    workspace.tiles = TileTable({TileKey(arch, "float16", WIDTH, WIDTH, 16): Tiles(16, 4, 1, 1, 16)})
    splitkv.decode(q, kv, workspace)
    assert plans.calls == 2
    workspace.target = Target(arch, 1, workspace.target.shared_memory)
    splitkv.decode(q, kv, workspace)
    assert plans.calls == 3


def test_warmup_refuses_what_decode_refuses(device: torch.device) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    with pytest.raises(ValueError, match=r"^softcap: expected"):
        splitkv.warmup(q, kv, workspace, softcap=0.0)
    with pytest.raises(TypeError, match=r"^q: expected"):
        splitkv.warmup(q.float(), kv, workspace)


# Which kernels there are to compile.

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several tokens": dict(q_len=4),
    "ragged": dict(ragged=True),
    "a work list": dict(listed=True, q_len=40),
    "parts of fixed size": dict(split_tokens=256),
    "a number of parts, ragged": dict(num_splits=2, ragged=True),
    "shared beginnings": dict(shared=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_kernels_of_every_batch_are_listed(device: torch.device, name: str) -> None:
    """Those of an H200, wherever this runs: what `warmup` compiles is what any call of the form launches."""
    how = dict(q_len=1, ragged=False, listed=False, split_tokens=None, num_splits=None, shared=False) | FORMS[name]
    most, q_len = 300, how["q_len"]
    config = splitkv.WorkspaceConfig(
        most, 32, 8, 128, max_total_q=most * max(q_len, 4), max_splits=6000, split_tokens=how["split_tokens"],
        max_parts=2, dtype=torch.float16,
    )  # fmt: skip
    workspace = splitkv.Workspace.allocate(config, device)
    workspace.target = H200
    page = torch.zeros(1, 16, 8, 128, device=device).half()
    # Made for one query token per request: calls with more tiles than it was sized for do without.
    sized = splitkv.WorkspaceConfig(most, 32, 8, 128, dtype=torch.float16)
    schedule = splitkv.Schedule.allocate(sized, device) if how["listed"] else None
    kv = splitkv.PagedKV(page, page, ints(0, 0, device=device)[:, None], ints(0, 0, device=device), schedule=schedule)
    q = torch.zeros(2, q_len, 32, 128, device=device).half()
    rules: dict[str, Any] = dict(num_splits=how["num_splits"])
    if how["ragged"]:
        q, rules["qo_indptr"] = q.flatten(0, 1), ints(0, 1, 2, device=device)
    if how["shared"]:
        rules |= dict(group_ids=ints(0, 0, device=device), prefix_lens=ints(0, 0, device=device))
    form = api.plan_decode(q, kv, workspace, **rules).form

    def kernels(variant: Variant) -> set[str]:
        passes = [variant] if variant.shared is None else [variant, variant.shared]
        found = {repr((each.split, each.num_warps, each.max_registers, variant.listed)) for each in passes}
        return found | ({repr((variant.merge, variant.listed))} if variant.merges else set())

    listed = {kernel for variant in form.variants(most) for kernel in kernels(variant)}
    calls = 0
    for batch in range(1, most + 1):
        for total_q in (batch, 2 * batch, 4 * most) if how["ragged"] else (batch * q_len,):
            for q_vector, kv_vector, same_strides in ((8, 8, True), (8, 8, False), (1, 8, True), (1, 1, False)):
                tiles = form.q_tiles(batch, total_q, kv_vector)
                vectors = q_vector, kv_vector, same_strides
                if how["shared"] and batch > 1:
                    launched = form.choose_shared(batch, tiles, total_q, *vectors)
                else:
                    launched = form.choose(batch, tiles, *vectors)
                assert kernels(launched) <= listed, (batch, total_q, vectors)
                calls += 1
    assert calls >= 4 * most and len(listed) > 4


# Compiled kernels, without a GPU.

SWEEP = """
import fake_gpu, splitkv, torch, triton
from splitkv.api import plan_decode
from splitkv.kernels import merge, split_decode

kind, rules = {kind!r}, {rules!r}
latent = kind == "latent"
dtype = torch.float16 if latent else torch.float32
config = splitkv.WorkspaceConfig(40, 4, 1 if latent else 2, 16, dtype=dtype, split_tokens={split_tokens!r})
workspace = fake_gpu.workspace(config)

def shifted(elements, *shape):
    return torch.zeros(torch.Size(shape).numel() + elements, dtype=dtype)[elements:].view(shape)

def call(batch, q_offset=0, kv_offset=0, width=3, same=True):
    q = shifted(q_offset, batch, 4, 16)
    lens = torch.zeros(batch, dtype=torch.int32)
    if latent:
        rows = torch.zeros(5 * 64 * 32 + kv_offset, dtype=torch.uint8)[kv_offset:].view(torch.float8_e4m3fn)
        rows = rows[: 5 * 64 * 16].view(5, 64, 16) if same else rows.view(5, 64, 32)[..., :16]
        return q, splitkv.LatentKV(
            rows, torch.zeros(batch, width, dtype=torch.int32), lens, head_dim_v=16, scale=torch.ones(5, 64)
        )
    if kind == "contiguous":
        k = shifted(kv_offset, batch, width, 2, 16)
        v = torch.zeros(batch, width, 2, 16) if same else torch.zeros(batch, 2, width, 16).mT.mT.transpose(1, 2)
        return q, splitkv.ContiguousKV(k, v, lens)
    k = shifted(kv_offset, 5, 8, 2, 16)
    v = torch.zeros(5, 8, 2, 16) if same else torch.zeros(5, 2, 8, 16).transpose(1, 2)
    return q, splitkv.PagedKV(k, v, torch.zeros(batch, width, dtype=torch.int32), lens)

splitkv.warmup(*call(3), workspace, **rules)
warm = len(fake_gpu.compiled)
assert warm >= 4 and not fake_gpu.Launcher.launches
for batch in (1, 2, 7, 16, 17, 33, 40):
    for q_offset, kv_offset in ((0, 0), (1, 0), (8, 8), (0, 1), (1, 1)):
        for width, same in ((1, True), (3, False), (16, True)):
            q, kv = call(batch, q_offset, kv_offset, width, same)
            fake_gpu.Launcher.launches.clear()
            splitkv.decode(q, kv, workspace, **rules)
            splitkv.decode_with_lse(q, kv, workspace, **rules)
            calls = [fake_gpu.Launcher.launches[:2], fake_gpu.Launcher.launches[2:]]
            for want_lse, launched in enumerate(calls):
                planned = plan_decode(q, kv, workspace, want_lse=bool(want_lse), **rules).launches
                assert len(planned) == len(launched) == 2
                for step, (name, grid, arguments) in zip(planned, launched, strict=True):
                    assert name == step.kernel.__name__ and grid == (*step.grid, 1, 1)[:3]
                    for parameter, argument in zip(step.kernel.arg_names, arguments, strict=True):
                        wanted = {{**step.operands, **step.constants}}[parameter]
                        if parameter == "list_ptr":
                            continue  # not read: compiled for None
                        wanted = wanted.data_ptr() if isinstance(wanted, torch.Tensor) else wanted
                        assert argument == wanted, (parameter, argument, wanted)
assert len(fake_gpu.compiled) == warm, fake_gpu.compiled[warm:]

heard = []
hook = lambda metadata: heard.append(metadata.get()["name"])
triton.knobs.runtime.launch_enter_hook.add(hook)
splitkv.decode(q, kv, workspace, **rules)
triton.knobs.runtime.launch_enter_hook.remove(hook)
splitkv.decode(q, kv, workspace, **rules)
assert heard == ["split_decode_kernel", "merge_splits_kernel"], heard
print("ok")
"""


@pytest.mark.parametrize(
    ("kind", "split_tokens", "rules"),
    [("contiguous", None, {}), ("paged", 64, dict(softcap=30.0)), ("latent", None, dict(sm_scale=0.1))],
    ids=["contiguous", "paged-fixed", "latent"],
)
def test_nothing_is_compiled_after_warmup(kind: str, split_tokens: int | None, rules: dict[str, Any]) -> None:
    """Compiled for Hopper by Triton itself; launches are noted and not made, each as Triton itself would make it."""
    assert run_script(SWEEP.format(kind=kind, split_tokens=split_tokens, rules=rules), TRITON_INTERPRET="0") == "ok"


SHARED_SWEEP = """
import fake_gpu, splitkv, torch
from splitkv.api import plan_decode

config = splitkv.WorkspaceConfig(40, 4, 2, 16, dtype=torch.float32, q_tile_rows=64, max_splits=600)
workspace = fake_gpu.workspace(config)

def call(batch, kv_offset=0):
    def ints(*shape):
        return torch.zeros(*shape, dtype=torch.int32)

    k = torch.zeros(5 * 8 * 2 * 16 + kv_offset)[kv_offset:].view(5, 8, 2, 16)
    kv = splitkv.PagedKV(k, torch.zeros(5, 8, 2, 16), ints(batch, 3), ints(batch))
    return dict(q=torch.zeros(batch, 4, 16), kv=kv, group_ids=ints(batch), prefix_lens=ints(batch))

given = call(3)
splitkv.warmup(workspace=workspace, window_left=7, **given)
warm = len(fake_gpu.compiled)
assert not fake_gpu.Launcher.launches
for batch in (1, 2, 16, 17, 40):
    for kv_offset in (0, 1):
        for again in range(2):
            given = call(batch, kv_offset)
            fake_gpu.Launcher.launches.clear()
            splitkv.decode_shared_prefix(workspace=workspace, window_left=7, **given)
            planned = plan_decode(workspace=workspace, window_left=7, **given).launches
            launched = fake_gpu.Launcher.launches
            assert len(planned) == len(launched) == (4 if batch > 1 else 2)
            for step, (name, grid, arguments) in zip(planned, launched, strict=True):
                assert name == step.kernel.__name__ and grid == (*step.grid, 1, 1)[:3]
                for parameter, argument in zip(step.kernel.arg_names, arguments, strict=True):
                    wanted = {**step.operands, **step.constants}[parameter]
                    if wanted is None:
                        continue  # not read: compiled for None
                    wanted = wanted.data_ptr() if isinstance(wanted, torch.Tensor) else wanted
                    assert argument == wanted, (name, parameter, argument, wanted)
assert len(fake_gpu.compiled) == warm, fake_gpu.compiled[warm:]
print("ok")
"""


def test_nothing_is_compiled_for_shared_keys_after_warmup() -> None:
    """Likewise of the four launches of a call, whose operands are stretches of the workspace in part."""
    assert run_script(SHARED_SWEEP, TRITON_INTERPRET="0") == "ok"


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_warm_calls_compile_nothing_and_are_right(
    device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, width, page = 8, 2, 64, 16
    config = splitkv.WorkspaceConfig(40, heads, kv_heads, width, dtype=torch.bfloat16)
    workspace = splitkv.Workspace.allocate(config, device)

    def values(offset: int, *shape: int) -> Tensor:
        return torch.randn(torch.Size(shape).numel() + offset, device=device).bfloat16()[offset:].view(shape)

    def call(lens: list[int], offset: int = 0, kv_offset: int = 0, more: int = 0) -> tuple[Tensor, splitkv.kv.KVView]:
        q, batch, longest = values(offset, len(lens), heads, width), len(lens), max(lens) + more
        if kind == "contiguous":
            k, v = (values(kv_offset, batch, longest, kv_heads, width) for _ in range(2))
            return q, splitkv.ContiguousKV(k, v, ints(*lens, device=device))
        pages = -(-longest // page)
        k, v = (values(kv_offset, batch * pages, page, kv_heads, width) for _ in range(2))
        table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        return q, splitkv.PagedKV(k, v, table, ints(*lens, device=device))

    compiled: list[str] = []
    splitkv.warmup(*call([5, 5]), workspace)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    cases = [([n] * batch, offset, kv_offset, 16 * (batch % 3))
             for batch in (1, 2, 16, 17, 40)
             for n in (1, 15, 16, 17, 32, 300)
             for offset, kv_offset in ((0, 0), (1, 0), (8, 1), (1, 8))
             if n * batch <= 5000]  # fmt: skip
    for lens, *offsets in cases:
        q, kv = call(lens, *offsets)
        expect(q, kv).check(*splitkv.decode_with_lse(q, kv, workspace))
        out = torch.full_like(q, torch.nan)
        assert same_bits(splitkv.decode(q, kv, workspace, out=out), workspace.out[: len(lens)])
    assert compiled == []


@pytest.mark.gpu
def test_hot_and_cold_calls_agree_on_another_stream_and_view(device: torch.device) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    cold = splitkv.decode(q, kv, workspace).clone()
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        hot = splitkv.decode(q, kv, workspace).clone()
    side.synchronize()
    assert same_bits(cold, hot)
    other = paged(device)
    q = query(device)
    expect(q, other).check(*splitkv.decode_with_lse(q, other, workspace))
    expect(q, other).check(*splitkv.decode_with_lse(q, other, workspace))


CAPTURE = """
import warnings, splitkv, torch
from splitkv import reference

device = torch.device("cuda", 0)
config = splitkv.WorkspaceConfig(8, 8, 2, 64, dtype=torch.bfloat16)
workspace = splitkv.Workspace.allocate(config, device)
k, v = torch.randn(2, 40, 16, 2, 64, device=device).bfloat16()
table = torch.arange(40, dtype=torch.int32, device=device).view(8, 5)
kv = splitkv.PagedKV(k, v, table, torch.tensor([80, 1, 0, 17, 33, 5, 64, 79], dtype=torch.int32, device=device))
q = torch.randn(8, 8, 64, device=device).bfloat16()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    q.clone()  # whatever torch itself does at a first capture
graph = torch.cuda.CUDAGraph()
splitkv.warmup(q, kv, workspace)
torch.cuda.synchronize()
warnings.filterwarnings("ignore", message=".*prototype feature.*")
torch.cuda.set_sync_debug_mode("error")
try:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = splitkv.decode(q, kv, workspace)
        graph.capture_end()
finally:
    torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
for turn in range(3):
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    want = reference.decode(q, kv, dtype=torch.float64)
    assert (out.double() - want).norm() <= 1e-2 * want.norm(), turn
    kv.seq_lens.copy_(kv.seq_lens.flip(0) + turn)
    kv.seq_lens.clamp_(max=80)
    q.copy_(torch.randn(8, 8, 64, device=device))
print("ok")
"""


@pytest.mark.gpu
def test_the_first_call_may_be_inside_a_capture() -> None:
    """Case 31."""
    assert run_script(CAPTURE) == "ok"


@pytest.mark.skipif(COMPILED, reason="the interpreter has nothing to compile")
def test_warmup_launches_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, q, kv = splitkv.Workspace.allocate(CONFIG, device), query(device), paged(device)
    monkeypatch.setattr("splitkv.kernels.prepared.launch", None)
    splitkv.warmup(q, kv, workspace, softcap=3.0)
