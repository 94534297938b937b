"""Launches past Triton: they are those that Triton itself would make, of the same compiled kernels."""

from __future__ import annotations

import pytest
import torch
import triton
from support import run_script
from torch import Tensor

import splitkv
from splitkv.kernels import prepared
from splitkv.kernels.step import stage_kernel

# Compiled for Hopper by Triton itself; launches are noted and not made. Each call is first made as Triton makes it, by
# its plan, and then twice by the library: the first time prepares the call, the second one launches what is prepared.
SAME = """
import fake_gpu, itertools, math, torch, splitkv
from splitkv import api, append

Launcher = fake_gpu.Launcher

def launched(call):
    Launcher.launches.clear(), Launcher.launchers.clear()
    call()
    assert len(Launcher.launches) == len(Launcher.launchers) == 1
    (name, grid, arguments), = Launcher.launches
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    return name, grid, addresses, Launcher.launchers[0]

def check(plan, call, kernel):
    name, grid, wanted, compiled = launched(lambda: plan().run(torch.device("cpu")))
    for _ in range(2):
        again = launched(call)
        assert again[:2] == (name, grid) and again[3] is compiled, (again, name, grid)
        for parameter, value, expected in zip(kernel.arg_names, again[2], wanted, strict=True):
            # Where there was no tensor it is not read: compiled for None.
            assert expected is None or value == expected, (name, parameter, value, expected)

def shifted(shift, *shape, dtype=torch.float32):
    return torch.zeros(math.prod(shape) + shift, dtype=dtype)[shift:].view(shape)

ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
"""

APPEND = (
    SAME
    + """
def views():
    for k_shift, v_shift in ((0, 0), (1, 0), (0, 1)):
        k, v = shifted(k_shift, 4, 16, 2, 8), shifted(v_shift, 4, 16, 2, 8)
        yield splitkv.PagedKV(k, v, ints(2, 2), ints(2))
    yield splitkv.PagedKV(shifted(0, 4, 1, 2, 8), shifted(0, 4, 1, 2, 8), ints(2, 2), ints(2))
    yield splitkv.RaggedKV(shifted(0, 9, 2, 8), shifted(0, 9, 2, 8), ints(3))
    int8 = shifted(0, 4, 16, 2, 8, dtype=torch.int8)
    for shift in (0, 1):
        yield splitkv.PagedKV(int8, int8.clone(), ints(2, 2), ints(2), k_scale=shifted(shift, 2), v_scale=0.5)
    latent = shifted(0, 4, 16, 8)
    yield splitkv.LatentKV(latent, ints(2, 2), ints(2), head_dim_v=6)

for kv in views():
    for tokens, shift, slots_shift in ((1, 0, 0), (3, 0, 0), (3, 0, 1), (16, 1, 0)):
        fused = shifted(shift, tokens, 6, 8)
        new = fused[:, 2 : 2 + kv.num_kv_heads]
        more = None if kv.latent else fused[:, 4:]
        slots = shifted(slots_shift, 16, dtype=torch.int32)
        check(lambda: append._plan_append(new, more, kv, slots), lambda: splitkv.append_kv(new, more, kv, slots),
              append.append_kernel)
    source, target = slots[:3], slots[4:7]
    check(lambda: append._plan_move(kv, source, target), lambda: splitkv.move_kv(kv, source, target),
          append.move_kernel)
print("ok")
"""
)

MERGE = (
    SAME
    + """
def check_merge(outs, lses, out, lse, **rules):
    plan = lambda: api._plan_merge(outs, lses, rules.get("indptr"), rules.get("sinks"), rules.get("lse_base", math.e),
                                   rules.get("lse_layout", "NH"), out, lse)[0]
    check(plan, lambda: splitkv.merge(outs, lses, out=out, lse=lse, **rules), api.merge_kernel)

for parts, rows, shift, lses_shift in ((1, 3, 0, 0), (2, 3, 0, 0), (2, 3, 1, 0), (4, 1, 4, 1)):
    outs, lses = shifted(shift, parts, rows, 2, 16), shifted(lses_shift, parts, rows, 2)
    for own in (0, 1):
        out, lse = shifted(own, rows, 2, 16), shifted(own, rows, 2)
        check_merge(outs, lses, out, lse)
        check_merge(outs, lses, outs[-1], lses[-1], sinks=shifted(own, 2))
    check_merge(outs, lses.mT.contiguous(), out, lse.mT.contiguous(), lse_layout="HN", lse_base=2)
    check_merge(outs.flatten(0, 1), lses.flatten(0, 1), out, lse, indptr=ints(rows + 1))
print("ok")
"""
)

STEP = """
import fake_gpu, torch, splitkv
from splitkv.kernels import step as kernels

def launched(call):
    fake_gpu.Launcher.launches.clear()
    call()
    assert all(not isinstance(value, torch.Tensor) for _, _, given in fake_gpu.Launcher.launches for value in given)
    return [(name, grid, dict(zip(getattr(kernels, name).arg_names, given, strict=True)))
            for name, grid, given in fake_gpu.Launcher.launches]

table = torch.zeros(8, 4, dtype=torch.int32)
state = splitkv.StepState.allocate(splitkv.StepConfig(4, max_total_q=600), table, 16, "cpu")
compiled = len(fake_gpu.compiled)
assert compiled == 3, fake_gpu.compiled  # stage, bind, advance
at = lambda tensor: tensor.data_ptr()
slots = [at(slot.words) for buffer in state._staging for slot in buffer.slots]

((stage, bind),) = [launched(lambda: state.bind([1, 2], [17, 5], q_lens=[16, 5], tokens=[3] * 21,
                                                page_updates=[(1, 0, 7), (1, 2, 3)], pad_to=3))]
assert stage[:2] == ("stage_kernel", (3, 1, 1)) and bind[:2] == ("bind_kernel", (3, 1, 1))
assert stage[2] == dict(source_ptr=slots[0], target_ptr=at(state.staged), table_ptr=at(table), words=10 + 42,
                        updates_at=52, updates=2, fresh=1, max_pages=4, stride_table_row=4, BLOCK=512)
wanted = dict(staged_ptr=state.staged, staged_ids_ptr=state.staged, table_ptr=table, input_ids_ptr=state.input_ids,
              position_ids_ptr=state.position_ids, rows_ptr=state.req_pool_indices, seq_lens_ptr=state.seq_lens,
              pending_ptr=state.pending, kv_indptr_ptr=state.kv_indptr, qo_indptr_ptr=state.qo_indptr,
              tile_batch_ptr=state.q_tile_to_batch, tile_index_ptr=state.q_tile_to_index,
              out_cache_loc_ptr=state.out_cache_loc, needs_page_ptr=state.needs_page)
sizes = dict(max_batch=4, max_total_q=600, page_size=16, max_pages=4, steps=3, stride_table_row=4)
numbers = dict(sizes, live=2, total_q=21, padded_q=21, tokens_at=5, max_tiles=13, BLOCK_B=32, BLOCK_T=512)
assert bind[2] == {**{name: at(tensor) for name, tensor in wanted.items()}, **numbers}, bind

((fill,),) = [launched(lambda: state.fill_input_ids([5, 6, 7]))]
assert fill[:2] == ("stage_kernel", (1, 1, 1))
assert fill[2] == dict(stage[2], source_ptr=slots[1], target_ptr=at(state.input_ids), words=6, updates_at=0, updates=0,
                       fresh=0)

counts = torch.zeros(5, dtype=torch.int32)[1:]
for num_new in (None, counts, counts[:3], counts[1:]):
    ((advance,),) = [launched(lambda: state.advance(num_new))]
    assert advance[:2] == ("advance_kernel", (1, 1, 1))
    assert advance[2]["num_new_ptr"] == (None if num_new is None else at(num_new))
    assert advance[2]["counts"] == (0 if num_new is None else num_new.numel())
    names = [name for name in wanted if name in advance[2]]
    assert len(names) == 9 and all(advance[2][name] == at(wanted[name]) for name in names)
    assert all(advance[2][name] == number for name, number in sizes.items())
assert len(fake_gpu.compiled) == compiled + 1  # counts of int32, wherever they lie
print("ok")
"""


# Another device than that of the tensors is current: what is compiled, loaded or launched must make theirs so first.
ELSEWHERE = """
import contextlib, torch, fake_gpu, splitkv
from splitkv.kernels.launch import launch

current, loaded, launched = [0], [], []

@contextlib.contextmanager
def made_current(device):
    current.append(device.index)
    yield
    current.pop()

class Driver(fake_gpu.Driver):
    def get_current_device(self):
        return current[-1]

    def get_current_stream(self, device):
        return 7 if device is None else 8  # None: the index of CPU tensors' device

def load_binary(name, kernel, shared, device):
    loaded.append(device)
    return object(), name, 32, 0, 1024

class Launcher(fake_gpu.Launcher):
    def __call__(self, *given):
        launched.append(current[-1])
        super().__call__(*given)

torch.cuda.device, Driver.utils.load_binary, Driver.launcher_cls = made_current, load_binary, Launcher
fake_gpu.triton.runtime.driver.set_active(Driver())

ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
k, v = torch.zeros(2, 4, 16, 2, 32)
kv = splitkv.PagedKV(k, v, ints(2, 4), ints(2))
q, slots, new = torch.zeros(2, 4, 32), ints(2), torch.zeros(2, 2, 32)
outs, lses = torch.zeros(3, 2, 4, 32), torch.zeros(3, 2, 4)
workspace = fake_gpu.workspace(splitkv.WorkspaceConfig(2, 4, 2, 32, dtype=torch.float32))
calls = dict(
    warmup=lambda: splitkv.warmup(q, kv, workspace, num_splits=1),
    decode=lambda: splitkv.decode(q, kv, workspace, num_splits=1),
    merge=lambda: splitkv.merge(outs, lses),
    append=lambda: splitkv.append_kv(new, new, kv, slots),
    allocate=lambda: globals().update(state=splitkv.StepState.allocate(splitkv.StepConfig(2), ints(2, 4), 16, "cpu")),
    bind=lambda: state.bind([0], [3]),
    advance=lambda: state.advance(),
)
for name, call in calls.items():
    for _ in range(2):
        loaded.clear(), launched.clear()
        call()
        assert set(loaded) <= {None} and set(launched) <= {None} and current == [0], (name, loaded, launched, current)
        assert launched or name in ("warmup", "allocate"), name

class Kernel:
    def __getitem__(self, grid):
        return lambda **options: launched.append(current[-1])

launched.clear()
launch(Kernel(), (2,), torch.device("cuda", 1), {}, {}, 4)
assert launched == [1] and current == [0], (launched, current)
print("ok")
"""


@pytest.mark.parametrize("script", [APPEND, MERGE, STEP], ids=["append and move", "merge", "step"])
def test_launches_are_those_of_triton(script: str) -> None:
    assert run_script(script, TRITON_INTERPRET="0") == "ok"


def test_launches_are_made_on_the_device_of_their_tensors() -> None:
    """Case 34, without a second GPU: which device is current when kernels are compiled, loaded and launched."""
    assert run_script(ELSEWHERE, TRITON_INTERPRET="0") == "ok"


def test_integers_that_are_specialised_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may vary from call to call must not be something that the compiled kernel relies on."""
    kernel = triton.JITFunction(stage_kernel.fn, do_not_specialize=["words"])
    monkeypatch.setattr(prepared, "compiled_by_hand", lambda device: True)
    ints = torch.zeros(8, dtype=torch.int32)
    operands = dict(source_ptr=ints, target_ptr=ints, table_ptr=ints)
    names = ("words", "updates_at", "updates", "fresh", "max_pages", "stride_table_row")

    def prepare(integers: tuple[str, ...], given: tuple[str, ...]) -> None:
        prepared.PreparedLaunch(kernel, torch.device("cpu"), operands, integers, dict(BLOCK=8), 4, given)

    with pytest.raises(ValueError, match=r"integers: .*'updates_at'"):
        prepare(names, ())
    with pytest.raises(ValueError, match=r"given: .*'source_ptr'"):
        prepare(names[:1], ("source_ptr",))
    with pytest.raises(ValueError, match="kernel: expected parameters"):
        prepare(names[:1], ())


@pytest.mark.parametrize("kind", ["pageable", "other device"])
def test_only_memory_that_kernels_can_read_is_read_in_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4, dtype=torch.int32)
    assert prepared.read_in_place(memory, torch.device("cpu"))  # kernels run where it lies
    monkeypatch.setattr(prepared, "compiled_by_hand", lambda device: kind == "pageable")
    assert not prepared.read_in_place(memory, torch.device("cuda:0"))


def test_prepared_calls_start_again_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_CALLS", 2)
    calls = prepared.PreparedCalls[int]()
    for form in range(3):
        calls.remember(form, form * form)
    assert calls.recall(2) == 4 and calls.recall(0) is None and calls.recall(1) is None


def test_a_call_of_a_known_form_is_still_checked_where_its_tensors_lie(device: torch.device) -> None:
    """Addresses are no part of a form: an output that lies between partials is refused whatever went before."""
    buffer = torch.randn(6, 4, 2, 16, device=device)
    lses = torch.zeros(3, 4, 2, device=device)
    outs = buffer[:3]

    def merged(out: Tensor) -> Tensor:
        return splitkv.merge(outs, lses, out=out)[0]

    expected = splitkv.merge(outs, lses)[0]
    torch.testing.assert_close(merged(buffer[4]), expected)
    torch.testing.assert_close(merged(buffer[5]), expected)
    with pytest.raises(ValueError, match="out: expected memory apart"):
        merged(buffer.view(-1)[8 : 8 + 128].view(4, 2, 16))
    torch.testing.assert_close(merged(buffer[1]), expected)  # in place of a partial
