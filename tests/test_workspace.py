"""The caller's scratch: where its buffers lie in one stretch of memory, and what memory is refused."""

import contextlib
import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import splitkv
from splitkv.config import ALIGNMENT, WorkspaceConfig
from splitkv.testing import GUARD_BYTES, Guarded, PoisonedWorkspace, make_problem, same_bits
from splitkv.workspace import aligned_bytes

CONFIG = WorkspaceConfig(
    3, num_q_heads=6, num_kv_heads=2, head_dim=48, head_dim_v=40, max_total_q=5, max_splits=8, dtype=torch.float16
)
NAMES = ("partial_out", "partial_lse", "out", "lse")


def assert_laid_out(workspace, config):
    """Every buffer is where its section says, and writing it touches nothing else."""
    start = workspace.partial_out.data_ptr()
    for section in config.sections():
        buffer = getattr(workspace, section.name)
        assert buffer.shape == section.shape and buffer.dtype == section.dtype and buffer.is_contiguous()
        assert buffer.data_ptr() == start + section.offset
        assert buffer.data_ptr() % ALIGNMENT == 0
    for value, name in enumerate(NAMES):
        getattr(workspace, name).fill_(value)
    for value, name in enumerate(NAMES):
        assert bool((getattr(workspace, name) == value).all())


def test_allocate(device):
    workspace = splitkv.Workspace.allocate(CONFIG, device)
    assert workspace.config is CONFIG and workspace.device.type == device.type
    assert_laid_out(workspace, CONFIG)


def test_it_holds_its_buffers_and_nothing_else(device):
    workspace = splitkv.Workspace.allocate(CONFIG, device)
    tensors = {name for name, value in vars(workspace).items() if isinstance(value, torch.Tensor)}
    assert tensors == set(NAMES)
    assert_laid_out(workspace, CONFIG)  # one allocation, of which each buffer has a storage of its own
    storages = [getattr(workspace, name).untyped_storage() for name in NAMES]
    assert [storage.nbytes() for storage in storages] == [section.nbytes for section in CONFIG.sections()]


@settings(max_examples=20)
@given(
    heads=st.sampled_from([(1, 1), (9, 3), (128, 1)]),
    width=st.sampled_from([1, 59, 512]),
    batch=st.integers(1, 5),
    splits=st.integers(1, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_exactly_nbytes_suffice_and_one_byte_less_does_not(heads, width, batch, splits, dtype):
    config = WorkspaceConfig(batch, *heads, width, max_splits=splits, dtype=dtype)
    memory = aligned_bytes(config.nbytes + 2 * GUARD_BYTES, "cpu").fill_(0xA5)
    inside = memory[GUARD_BYTES : GUARD_BYTES + config.nbytes]
    assert_laid_out(splitkv.Workspace.from_buffer(config, inside), config)
    assert bool((memory[:GUARD_BYTES] == 0xA5).all()) and bool((memory[GUARD_BYTES + config.nbytes :] == 0xA5).all())
    before = memory.clone()
    with pytest.raises(ValueError) as raised:
        splitkv.Workspace.from_buffer(config, inside[:-1])
    message = str(raised.value)
    assert message.startswith(
        f"buffer: expected at least {config.nbytes} bytes, given {config.nbytes - 1}: section lse"
    )
    assert torch.equal(memory, before)


@pytest.mark.parametrize("name", NAMES)
def test_too_small_a_buffer_names_the_first_section_that_does_not_fit(name):
    section = next(section for section in CONFIG.sections() if section.name == name)
    with pytest.raises(ValueError) as raised:
        splitkv.Workspace.from_buffer(CONFIG, aligned_bytes(section.end - 1, "cpu"))
    message = str(raised.value)
    assert f"expected at least {CONFIG.nbytes} bytes, given {section.end - 1}: section {name} " in message
    assert message.endswith(f"ends at byte {section.end}")


BYTES = CONFIG.nbytes
BAD = [
    ("a list", lambda: [0] * BYTES, TypeError, "expected a torch.Tensor, given list"),
    ("signed", lambda: torch.empty(BYTES, dtype=torch.int8), TypeError, "expected torch.uint8, given torch.int8"),
    ("float", lambda: torch.empty(BYTES), TypeError, "expected torch.uint8, given torch.float32"),
    ("two rows", lambda: aligned_bytes(2 * BYTES, "cpu").view(2, BYTES), ValueError, "expected 1 dimensions, given"),
    ("every other", lambda: aligned_bytes(2 * BYTES, "cpu")[::2], ValueError, "expected a last stride of 1, given"),
    ("empty", lambda: torch.empty(0, dtype=torch.uint8), ValueError, f"at least {BYTES} bytes, given 0: section"),
    ("one off", lambda: aligned_bytes(BYTES + 1, "cpu")[1:], ValueError, "a start aligned to 256 bytes, given"),
    ("128 off", lambda: aligned_bytes(BYTES + 128, "cpu")[128:], ValueError, "256 bytes, given address 0x"),
]  # fmt: skip


@pytest.mark.parametrize(("buffer", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_buffer_that_will_not_do_is_refused(buffer, error, message):
    with pytest.raises(error) as raised:
        splitkv.Workspace.from_buffer(CONFIG, buffer())
    assert str(raised.value).startswith("buffer: ") and message in str(raised.value)


def test_a_config_that_is_none_is_refused():
    for make in (splitkv.Workspace.from_buffer, splitkv.Workspace.allocate):
        with pytest.raises(TypeError, match="config: expected a WorkspaceConfig, given dict"):
            make({}, torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("past", [0, 4, 64])
def test_a_view_into_a_larger_buffer_is_laid_out_from_its_own_start(past):
    """Also where the storage starts between two multiples of the alignment, as memory from elsewhere does."""
    memory = storage_at(past)
    inside = memory[-memory.data_ptr() % ALIGNMENT :][: CONFIG.nbytes]
    assert inside.storage_offset() == -past % ALIGNMENT
    workspace = splitkv.Workspace.from_buffer(CONFIG, inside)
    assert workspace.partial_out.data_ptr() == inside.data_ptr()
    assert_laid_out(workspace, CONFIG)
    assert not bool(memory[: inside.storage_offset()].any())


@pytest.mark.parametrize("past", [1, 2, 131])
def test_a_storage_may_start_between_two_elements(past):
    """PyTorch counts elements from the start of the storage: an aligned view into this one could not be of floats."""
    memory = storage_at(past)
    inside = memory[-memory.data_ptr() % ALIGNMENT :][: CONFIG.nbytes]
    workspace = splitkv.Workspace.from_buffer(CONFIG, inside)
    assert workspace.partial_out.data_ptr() == inside.data_ptr()
    assert_laid_out(workspace, CONFIG)


def test_buffers_outlive_the_memory_that_they_were_laid_over():
    workspace = splitkv.Workspace.from_buffer(CONFIG, aligned_bytes(CONFIG.nbytes, "cpu").zero_())
    gc.collect()
    others = [aligned_bytes(CONFIG.nbytes, "cpu").fill_(255) for _ in range(8)]
    assert len(others) == 8 and not any(bool(getattr(workspace, name).any()) for name in NAMES)


def storage_at(past):
    """Zeros whose storage starts `past` bytes past a multiple of the alignment."""
    numpy = pytest.importorskip("numpy")
    memory = numpy.zeros(CONFIG.nbytes + 3 * ALIGNMENT, dtype=numpy.uint8)
    return torch.from_numpy(memory[(past - memory.ctypes.data) % ALIGNMENT :])


@pytest.mark.parametrize("made", [torch.inference_mode, contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("used", [torch.inference_mode, contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("form", ["allocate", "from_buffer"])
def test_inference_mode_in_and_out(device, made, used, form):
    """Case 32: buffers are plain tensors wherever they were made, so that every mode can write them."""
    problem = make_problem(
        4, device=device, lens=(5, 20), num_kv_heads=1, group_size=2, query="one", num_splits=2, dtype=torch.float16
    )
    expected = problem.expected()
    with made():
        if form == "allocate":
            workspace = splitkv.Workspace.allocate(problem.config, device)
        else:
            workspace = splitkv.Workspace.from_buffer(problem.config, aligned_in_mode(problem.config.nbytes, device))
        assert not any(getattr(workspace, name).is_inference() for name in NAMES)
        out = torch.empty(*problem.q.shape[:-1], problem.kv.head_dim_v, dtype=problem.q.dtype, device=device)
        lse = torch.empty(problem.q.shape[:-1], device=device)
    with used():
        expected.check(*problem.decode(workspace))
        expected.check(*problem.decode(workspace, out=out, lse=lse))
        workspace.out.zero_()


def aligned_in_mode(nbytes, device):
    """As `aligned_bytes`, but of the mode that is on: an inference tensor inside inference mode."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


def test_a_larger_workspace_serves_a_smaller_call_and_a_smaller_one_is_refused(device):
    problem = make_problem(5, device=device, lens=(9, 3), num_kv_heads=2, group_size=2, query="one", split_tokens=None)
    large = WorkspaceConfig(
        50, num_q_heads=8, num_kv_heads=4, head_dim=256, max_splits=64, q_tile_rows=64, dtype=problem.q.dtype
    )
    problem.expected().check(*problem.decode(PoisonedWorkspace(large, device).workspace))
    small = WorkspaceConfig(1, 4, 2, problem.q.shape[-1], problem.kv.head_dim_v, dtype=problem.q.dtype)
    scratch = PoisonedWorkspace(small, device)
    with pytest.raises(ValueError, match=r"workspace: expected out of at least \d+ elements for \[2, 4, \d+\], given"):
        problem.decode(scratch.workspace)
    assert not any(scratch.written(name).any() for name in NAMES)
    # A given out and lse are not counted.
    shape = (*problem.q.shape[:-1], problem.kv.head_dim_v)
    out, lse = Guarded(shape, problem.q.dtype, device), Guarded(shape[:-1], torch.float32, device)
    problem.expected().check(*problem.decode(scratch.workspace, out=out.tensor, lse=lse.tensor))


# The tools that tests of memory lean on.


def test_poison_is_nan_in_every_buffer(device):
    workspace = PoisonedWorkspace(CONFIG, device).workspace
    assert all(bool(getattr(workspace, name).isnan().all()) for name in NAMES)


@pytest.mark.parametrize("kind", ["nan", "garbage", "zero"])
def test_a_write_beside_a_buffer_is_seen(device, kind):
    scratch = PoisonedWorkspace(CONFIG, device, kind)
    scratch.check_guards()
    scratch.workspace.out[1] = 2.0
    scratch.check_guards()
    assert scratch.written("out").nonzero()[:, 0].unique().tolist() == [1]
    last = scratch.workspace.lse
    end = last.data_ptr() + 4 * last.numel() - scratch._memory.data_ptr()
    scratch._memory[end : end + 4] = 0
    with pytest.raises(AssertionError, match="workspace: 4 elements around it were written"):
        scratch.check_guards()


def test_a_write_beside_a_guarded_tensor_is_seen(device):
    guarded = Guarded((2, 3, 5), torch.float16, device, padding=1, shift=1)
    assert bool(guarded.tensor.isnan().all()) and guarded.tensor.stride() == (18, 6, 1)
    guarded.tensor.fill_(1.0)
    guarded.check_guards()
    guarded.tensor.as_strided((2, 3, 6), (18, 6, 1)).fill_(1.0)
    with pytest.raises(AssertionError, match="tensor: 6 elements around it were written"):
        guarded.check_guards()


def test_bits_tell_zeros_and_nans_apart():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
