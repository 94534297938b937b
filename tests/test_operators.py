"""Case 36. Calls inside compiled graphs: one operator each, with the eager call's bits and errors, and no copies."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from conftest import COMPILED
from support import ints, no_synchronisation, view_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import splitkv
from splitkv import api, operators
from splitkv.kernels.prepared import PreparedLaunches
from splitkv.testing import same_bits
from splitkv.tiles import Tiles
from splitkv.tiles_io import TileKey, TileTable
from splitkv.workspace import read_spec

DEVICE = torch.device("cuda", 0) if COMPILED else torch.device("cpu")
WIDTH = 16
LENS = [9, 4, 0]
CONFIG = splitkv.WorkspaceConfig(
    4, num_q_heads=2, num_kv_heads=1, head_dim=WIDTH, max_total_q=16, max_splits=32, dtype=torch.float16
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def _fresh():
    read_spec.cache_clear()  # and with it what is remembered of calls
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def workspace():
    return splitkv.Workspace.allocate(CONFIG, DEVICE)


def queries(*shape, width=WIDTH):
    return torch.randn(*shape, 2, width, device=DEVICE).half()


def cache(layout, lens=LENS, **options):
    k, v = (torch.randn(len(lens), 12, 1, WIDTH, device=DEVICE).half() for _ in range(2))
    return view_of(layout, k, v, lens, **options)


def paged(pages=6, **options):
    """Caches of one storage, as engines allocate them, and a view of them: three requests of two pages of 4 tokens."""
    k, v = torch.randn(2, pages, 4, 1, WIDTH, device=DEVICE).half()
    table = ints([[0, 1], [3, 2], [5, 4]], DEVICE)
    return splitkv.PagedKV(k, v, table, ints([8, 5, 7], DEVICE), **options)


def bits(tensors):
    return [tensor.contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors]


def assert_as_eager(function, *arguments, state=(), backend="aot_eager"):
    """Compiled without a graph break, it returns the eager function's bits, and leaves them in `state`."""
    before = [tensor.clone() for tensor in state]
    want = bits(function(*arguments)), bits(state)
    for tensor, content in zip(state, before, strict=True):
        tensor.copy_(content)
    got = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    for ours, theirs in zip((bits(got), bits(state)), want, strict=True):
        assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert any(content.any() for content in want[0] + want[1])
    return got


@pytest.mark.parametrize("layout", ["paged", "hnd", "csr", "contiguous", "ragged"])
def test_every_layout(workspace, layout):
    kv = cache(layout)
    (out,) = assert_as_eager(lambda q: (splitkv.decode(q, kv, workspace),), queries(3))
    assert out.data_ptr() == workspace.out.data_ptr()


RULES = {
    "window and softcap": dict(window_left=3, softcap=20.0),
    "slopes and parts": dict(alibi_slopes=[0.5, 0.25], num_splits=3, sm_scale=1),
    "sinks": dict(sinks=[0.5, 2.0], causal=False),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rules(workspace, rules):
    rules = {
        name: torch.tensor(rule, device=DEVICE) if isinstance(rule, list) else rule for name, rule in rules.items()
    }
    kv = cache("paged", kv_start=ints([1, 0, 0], DEVICE), len_hint=9)
    assert_as_eager(lambda q: splitkv.decode_with_lse(q, kv, workspace, **rules), queries(3))


def test_several_query_tokens(workspace):
    kv = cache("contiguous")
    tree = torch.randint(0, 7, (3, 3, 1), dtype=torch.int32, device=DEVICE)
    indptr = ints([0, 2, 2, 5], DEVICE)

    def decode(q, ragged):
        first = splitkv.decode(q, kv, workspace, tree_mask=tree) + 0
        return first, splitkv.decode(ragged, kv, workspace, qo_indptr=indptr)

    assert_as_eager(decode, queries(3, 3), queries(5))


@pytest.mark.parametrize("given", [{"out"}, {"lse"}, {"out", "lse"}], ids=lambda given: " and ".join(sorted(given)))
def test_outputs_of_the_callers(workspace, given):
    kv = cache("paged")
    wide = torch.zeros(3, 2, WIDTH + 8, device=DEVICE)
    outputs = {"out": wide[..., :WIDTH], "lse": torch.zeros(3, 2, device=DEVICE)}
    kept = {name: outputs[name] for name in given}
    got = assert_as_eager(
        lambda q: splitkv.decode_with_lse(q, kv, workspace, **kept), queries(3), state=tuple(kept.values())
    )
    for tensor, name in zip(got, ("out", "lse"), strict=True):
        assert tensor.data_ptr() == kept.get(name, getattr(workspace, name)).data_ptr()


def test_shards_and_schedules(workspace):
    schedule = splitkv.Schedule.allocate(CONFIG, DEVICE)
    listed = cache("contiguous", schedule=schedule)
    turns = cache("paged").shard(ints([20, 9, 1], DEVICE), rank=1, size=2)
    stretch = cache("paged").shard(ints([20, 9, 1], DEVICE), starts=ints([4, 5, 0], DEVICE))

    def decode(q):
        schedule.update(listed)
        return [splitkv.decode(q, kv, workspace, num_splits=None) + 0 for kv in (listed, turns, stretch)]

    assert_as_eager(decode, queries(3), state=[schedule.buffer])


def test_latent_caches():
    config = dataclasses.replace(CONFIG, num_q_heads=4, head_dim=32)
    workspace = splitkv.Workspace.allocate(config, DEVICE)
    rows = torch.randn(6, 4, 32, device=DEVICE).half()
    kv = splitkv.LatentKV(
        rows, ints([[0, 1], [3, 2]], DEVICE), ints([8, 5], DEVICE), rows=ints([1, 0], DEVICE), head_dim_v=WIDTH
    )
    slots = ints([7, 12], DEVICE)

    def step(q, new):
        splitkv.append_kv(new, None, kv, slots)
        return (splitkv.decode(q, kv, workspace, sm_scale=0.1),)

    q = torch.randn(2, 4, 32, device=DEVICE).half()
    assert_as_eager(step, q, torch.randn(2, 1, 32, device=DEVICE).half(), state=[rows])


@pytest.mark.parametrize("scales", ["numbers", "tokens"])
def test_quantised_caches(workspace, scales):
    k, v = (torch.zeros(6, 4, 1, WIDTH, dtype=torch.int8, device=DEVICE) for _ in range(2))
    state = [k, v]
    if scales == "numbers":
        options = dict(k_scale=0.03, v_scale=0.02)
    else:
        state += [torch.zeros(6, 4, 1, device=DEVICE) for _ in range(2)]
        options = dict(k_scale=state[2], v_scale=state[3])
    kv = splitkv.PagedKV(k, v, ints([[0, 1], [3, 2], [5, 4]], DEVICE), ints([8, 5, 7], DEVICE), **options)

    def step(q, new, slots):
        splitkv.append_kv(new, new * 2, kv, slots)
        splitkv.move_kv(kv, slots, slots - 1)
        return (splitkv.decode(q, kv, workspace),)

    new = torch.randn(3, 1, WIDTH, device=DEVICE).half()
    assert_as_eager(step, queries(3), new, ints([7, 12, 22], DEVICE), state=state)


def test_mutations_keep_their_order(workspace):
    """A cache is read, written and read again, each decode overwrites the last one's output, and lengths grow."""
    kv = paged()

    def step(q, k_new, v_new, slots):
        before = splitkv.decode(q, kv, workspace) * 2
        splitkv.append_kv(k_new, v_new, kv, slots)
        kv.seq_lens.add_(1)
        after = splitkv.decode(q, kv, workspace)
        return before, after, after - before, kv.k.float().sum()

    new = [torch.randn(3, 1, WIDTH, device=DEVICE).half() for _ in range(2)]
    state = [kv.k, kv.v, kv.seq_lens]
    kv.seq_lens.copy_(ints([7, 4, 6], DEVICE))
    before, after, *_ = assert_as_eager(step, queries(3), *new, ints([7, 8, 18], DEVICE), state=state)
    assert not same_bits(before, after * 2)


def test_batches_share_a_graph_and_what_they_point_at_is_read_anew(workspace):
    kv = cache("paged", lens=[9, 4, 7, 12])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q: splitkv.decode(q, kv, workspace), fullgraph=True, backend=counter)
    for batch, lens in ((1, [5]), (2, [3, 1]), (3, [9, 0, 7]), (4, [0, 4, 6, 11]), (3, [2, 2, 2])):
        kv.seq_lens[:batch] = ints(lens, DEVICE)
        q = queries(batch)
        want = splitkv.decode(q, kv, workspace).clone()
        workspace.out.fill_(torch.nan)
        assert same_bits(compiled(q), want)
        assert bool(workspace.out[batch:].isnan().all())
    assert counter.frame_count == 2  # PyTorch keeps a size of 1 apart


def test_another_view_or_workspace_is_not_mistaken_for_the_first(workspace):
    fixed = splitkv.Workspace.allocate(dataclasses.replace(CONFIG, split_tokens=4), DEVICE)
    compiled = torch.compile(splitkv.decode, fullgraph=True, backend="aot_eager")
    q, first = queries(2), cache("paged", [9, 4])
    for kv, scratch in (
        (first, workspace),
        (cache("paged", [7, 5]), workspace),
        (cache("contiguous"), workspace),
        (first, fixed),
    ):
        want = splitkv.decode(q, kv, scratch).clone()
        scratch.out.fill_(torch.nan)
        assert same_bits(compiled(q, kv, scratch), want)


def test_calls_that_differ_in_a_number_alone(workspace):
    """Operators remember calls by their form: all of these have the same tensors, and none may go by another's."""
    k, v = (torch.randn(3, 2, 2, WIDTH, device=DEVICE).to(torch.float8_e5m2) for _ in range(2))  # 2 tokens, 2 heads
    table, lens, slots = ints([[0], [1], [2]], DEVICE), ints([2, 1, 2], DEVICE), ints([1, 2, 4], DEVICE)
    q, new = torch.randn(3, 4, WIDTH, device=DEVICE).half() * 3, torch.randn(3, 2, WIDTH, device=DEVICE).half()
    rules = [{}, {"window_left": 0}, {"sm_scale": 0.7}, {"softcap": 0.5}, {"num_splits": 2, "sm_scale": 0.3}]
    views = [{}, {"layout": "HND"}, {"k_scale": 2.0}, {"v_scale": 0.5}]
    results = []
    for options, given in [({}, rule) for rule in rules] + [(options, {}) for options in views[1:]]:
        kv = splitkv.PagedKV(k, v, table, lens, **options)

        def step(q, new, kv=kv, given=given):
            splitkv.append_kv(new, new, kv, slots)
            return (splitkv.decode(q, kv, workspace, **given),)

        assert_as_eager(step, q, new, state=[k, v], backend="eager")
        results.append(torch.cat([*bits([workspace.out]), *bits([k, v])]))
        torch._dynamo.reset()
    distinct = {result.numpy(force=True).tobytes() for result in results}
    assert len(distinct) == len(results)  # or the test would see nothing


def test_tiles_of_a_workspace_are_those_of_the_graph(workspace, monkeypatch):
    kv, q, chosen = cache("paged"), queries(3), []
    plan_decode = api.plan_decode

    def recorded(q, kv, workspace, **rules):
        chosen.append((workspace.config, workspace.tiles, workspace.target))
        return plan_decode(q, kv, workspace, **rules)

    monkeypatch.setattr(api, "plan_decode", recorded)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda q: splitkv.decode(q, kv, workspace), fullgraph=True, backend=counter)
    tiles = {TileKey(workspace.target.arch, "float16", WIDTH, WIDTH, 16): Tiles(16, 4, 1, 1, 32)}
    changes = [
        ("tiles", TileTable(tiles)),
        ("target", dataclasses.replace(workspace.target, num_sms=workspace.target.num_sms + 1)),
        ("tiles", None),
    ]
    for name, value in [("tiles", None), *changes]:
        setattr(workspace, name, value)
        compiled(q)
        compiled(q)
        assert chosen == [(workspace.config, workspace.tiles, workspace.target)]  # planned once
        chosen.clear()
    assert counter.frame_count == 4


def test_prefixes_that_requests_share(workspace):
    kv = paged()
    kv.addressing.table[1, 0] = 0
    groups, prefixes = ints([1, 1, -1], DEVICE), ints([4, 4, 0], DEVICE)
    assert_as_eager(lambda q: (splitkv.decode_shared_prefix(q, kv, workspace, groups, prefixes),), queries(3))


def test_merge():
    outs, lses = torch.randn(3, 2, 4, WIDTH, device=DEVICE), torch.randn(3, 2, 4, device=DEVICE)
    indptr = ints([0, 2, 3], DEVICE)

    def merge(outs, lses):
        first = splitkv.merge(outs, lses)
        heads_first = splitkv.merge(outs, lses.transpose(1, 2).contiguous(), lse_layout="HN", lse_base=2)
        ragged = splitkv.merge(outs[:, 0], lses[:, 0], indptr=indptr, sinks=lses[0, 0])
        splitkv.merge(outs, lses, out=outs[1], lse=lses[1])
        return *first, *heads_first, *ragged, outs + 1

    assert_as_eager(merge, outs, lses, state=[outs, lses])


@pytest.mark.parametrize("counts", [None, [2, 0, 1]])
def test_a_whole_step(workspace, counts):
    """What an engine captures: the next lengths and slots, a schedule, a layer, and the sampled tokens."""
    table = ints([[0, 1], [3, 2], [5, -1]], DEVICE)
    step = splitkv.StepState.allocate(splitkv.StepConfig(3, max_total_q=6, max_mask_len=12), table, 4, DEVICE)
    step.bind([0, 1, 2], [4, 7, 4], q_lens=None if counts is None else [2, 1, 2])
    schedule = splitkv.Schedule.allocate(CONFIG, DEVICE)
    k, v = torch.randn(2, 6, 4, 1, WIDTH, device=DEVICE).half()
    kv = splitkv.PagedKV(k, v, table, step.seq_lens, rows=step.req_pool_indices, schedule=schedule)
    num_new = None if counts is None else torch.tensor(counts, device=DEVICE)

    def run(q, new, sampled):
        step.advance(num_new)
        schedule.update(kv)
        splitkv.append_kv(new, new, kv, step.out_cache_loc)
        out = splitkv.decode(q, kv, workspace)
        return out, step.fill_input_ids_from_device(sampled), step.decode_mask(step.position_ids[:3], 9)

    written = ("position_ids", "seq_lens", "pending", "kv_indptr", "out_cache_loc", "needs_page", "input_ids")
    state = [getattr(step, name) for name in written] + [k, v, schedule.buffer]
    before = step.seq_lens.clone()
    new = torch.randn(3, 1, WIDTH, device=DEVICE).half()
    assert_as_eager(run, queries(3), new, torch.tensor([7, 8, 9], device=DEVICE), state=state)
    assert not torch.equal(step.seq_lens, before) and int(step.needs_page) == 1
    if counts is not None:
        with pytest.raises(ValueError, match="num_new: expected at most 3 counts"):
            torch.compile(step.advance, fullgraph=True, backend="aot_eager")(torch.ones(4, device=DEVICE).int())


def test_masks():
    lens, starts, indptr = ints([3, 5], DEVICE), ints([1, 0], DEVICE), ints([0, 1, 3], DEVICE)
    shapes = {torch.bool: [(2, 6), (2, 2, 6), (4, 6), (2, 1, 6)], torch.int32: [(2, 3, 1), (2, 3, 1)]}
    outs = [torch.zeros(shape, dtype=dtype, device=DEVICE) for dtype, found in shapes.items() for shape in found]
    valid, square, ragged, before, packed, tree = outs
    parents = ints([[-1, 0, 0], [-1, 0, 1]], DEVICE)

    def write(seen, positions):
        splitkv.masks.validity_mask(valid, lens, kv_start=starts)
        splitkv.masks.attention_mask(square, lens, window_left=2, kv_start=starts)
        splitkv.masks.ragged_mask(ragged, indptr, lens, causal=False)
        splitkv.masks.position_mask(before, positions)
        splitkv.masks.pack_tree_mask(seen > 0, packed)
        return [out + 0 for out in (splitkv.masks.tree_mask_from_parents(parents, tree), packed, before)]

    assert_as_eager(write, torch.randn(2, 3, 3, device=DEVICE), torch.tensor([4, 0], device=DEVICE), state=outs)
    assert all(bool(out.any()) and not bool(out.all()) for out in outs[:4])


def test_views_may_be_made_inside(workspace):
    kv = paged()

    def decode(q, k, v, table, lens, new, slots):
        view = splitkv.PagedKV(k, v, table, lens)
        splitkv.append_kv(new, new, view, slots)
        dense = splitkv.ContiguousKV(k, v, lens)
        return splitkv.decode(q, view, workspace) + 0, splitkv.decode(q, dense, workspace)

    new = torch.randn(3, 1, WIDTH, device=DEVICE).half()
    arguments = (kv.k, kv.v, kv.page_table, kv.seq_lens, new, ints([7, 12, 22], DEVICE))
    assert_as_eager(decode, queries(3), *arguments, state=[kv.k, kv.v])


@pytest.mark.parametrize("allocated", ["apart", "together", "interleaved", "layers"])
def test_nothing_is_copied(workspace, monkeypatch, allocated):
    """Inductor runs the operators on the caller's own memory, whether K and V share theirs or not."""
    sizes = {"interleaved": (6, 2, 4, 1, WIDTH), "layers": (2, 2, 6, 4, 1, WIDTH)}
    memory = torch.randn(sizes.get(allocated, (2, 6, 4, 1, WIDTH)), device=DEVICE).half()
    pairs = (
        list(memory) if allocated == "layers" else [memory.transpose(0, 1) if allocated == "interleaved" else memory]
    )
    if allocated == "apart":
        pairs = [[memory[0].clone(), memory[1].clone()]]
    table, lens = ints([[0, 1], [3, 2], [5, 4]], DEVICE), ints([8, 5, 7], DEVICE)
    views = [splitkv.PagedKV(k, v, table, lens) for k, v in pairs]
    out, lse = torch.zeros(3, 2, WIDTH, device=DEVICE), torch.zeros(3, 2, device=DEVICE)

    def step(q, new, slots, others):
        for kv in views:
            splitkv.append_kv(new, new, kv, slots)
            splitkv.decode(q, kv, workspace, out=out, lse=lse)
            splitkv.append_kv(new, new, kv, others)
            got = splitkv.decode_with_lse(q, kv, workspace)
        return got

    # Without arithmetic of its own the graph needs no C++ compiler on a CPU.
    slots = ints([0, 12, 22], DEVICE), ints([1, 13, 23], DEVICE)
    arguments = queries(3), torch.randn(3, 1, WIDTH, device=DEVICE).half(), *slots
    caches = [cache for kv in views for cache in (kv.k, kv.v)]
    buffers = [workspace.partial_out, workspace.partial_lse, workspace.out, workspace.lse]
    known = {tensor.data_ptr() for tensor in (*caches, *buffers, out, lse)}
    launched, run = [], PreparedLaunches.__call__

    def recorded(launches, tensors, *rest):
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        launched.append([address for address in addresses if address in known])
        return run(launches, tensors, *rest)

    monkeypatch.setattr(PreparedLaunches, "__call__", recorded)
    with torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1):
        assert_as_eager(step, *arguments, state=[*caches, out, lse], backend="inductor")
    count = 4 * len(views)
    assert len(launched) == 2 * count and all(len(call) >= 2 for call in launched)
    assert launched[:count] == launched[count:]


class Names(TorchDispatchMode):
    """The operators that are dispatched meanwhile."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_eager_calls_dispatch_no_operator(workspace):
    kv, q, new = paged(), queries(3), torch.randn(3, 1, WIDTH, device=DEVICE).half()
    slots = ints([7, 12, 22], DEVICE)
    with Names() as names:
        for _ in range(2):
            splitkv.append_kv(new, new, kv, slots)
            splitkv.decode_with_lse(q, kv, workspace)
            splitkv.merge(torch.zeros(2, 3, WIDTH, device=DEVICE), torch.zeros(2, 3, device=DEVICE))
        outs, lses = torch.zeros(2, 3, WIDTH, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
        assert not any(name.startswith("splitkv") for name in names.seen) and "aten::zeros" in names.seen
        torch.ops.splitkv.merge(outs, lses, None, None, 2.0, "NH", outs[0], lses[0], None)
    assert names.seen[-1] == "splitkv::merge"  # so it would have been seen


def test_errors_are_those_of_eager_calls(workspace):
    kv, schedule = cache("paged"), splitkv.Schedule.allocate(CONFIG, DEVICE)
    calls = [
        (ValueError, "q: expected head_dim 16", lambda q: splitkv.decode(q[..., :8], kv, workspace)),
        (TypeError, "causal: expected True or False", lambda q: splitkv.decode(q, kv, workspace, causal=1)),
        (TypeError, "sm_scale: expected a real number", lambda q: splitkv.decode(q, kv, workspace, sm_scale=True)),
        (
            ValueError,
            "window_left: expected an integer ≥ 0",
            lambda q: splitkv.decode(q, kv, workspace, window_left=-1),
        ),
        (
            ValueError,
            "workspace: expected out of at least",
            lambda q: splitkv.decode(q[:, None].repeat(1, 9, 1, 1), kv, workspace),
        ),
        (
            ValueError,
            "seq_lens: expected entries for a batch of 6",
            lambda q: splitkv.decode(q.repeat(2, 1, 1), kv, workspace),
        ),
        (
            ValueError,
            "softcap: expected a number that is finite",
            lambda q: splitkv.decode(q, kv, workspace, softcap=-1.0),
        ),
        (
            ValueError,
            "slots: expected at least 3",
            lambda q: splitkv.append_kv(q[:, :1], q[:, :1], kv, ints([1], DEVICE)),
        ),
        (ValueError, "lse_base: expected math.e or 2", lambda q: splitkv.merge(q, q.float()[..., 0], lse_base=3.0)),
        (
            TypeError,
            "causal: expected True or False",
            lambda q: splitkv.masks.attention_mask(q[..., 0, :3, None] > 0, kv.seq_lens, causal=1),
        ),
        (
            TypeError,
            "window_left: expected an integer ≥ 0",
            lambda q: splitkv.masks.ragged_mask(q[..., 0] > 0, ints([0, 3], DEVICE), kv.seq_lens, window_left=True),
        ),
        (TypeError, "batch: expected an integer in 0…", lambda q: (schedule.update(kv, True), q + 1)),
    ]
    for error, text, call in calls:
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            with pytest.raises(error, match=text):
                function(queries(3))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_requires_grad_is_refused(workspace, fullgraph):
    kv = paged()
    calls = {
        "q": lambda t: splitkv.decode(t[:, :2] * 1, kv, workspace),
        "k_new": lambda t: splitkv.append_kv(t[:, :1], t[:, :1].detach(), kv, kv.seq_lens),
        "outs": lambda t: splitkv.merge(t[None], t.detach()[None, ..., 0].float())[0],
    }
    for name, call in calls.items():
        compiled = torch.compile(call, fullgraph=fullgraph, backend="aot_eager")
        given = queries(3).requires_grad_()
        with pytest.raises(ValueError, match=f"{name}: expected a tensor outside autograd"):
            compiled(given)
        with torch.no_grad():
            want, got = call(given), compiled(given)
            assert want is got is None or same_bits(want, got)


def test_debug_mode_names_the_row_there_too(workspace, monkeypatch):
    kv = cache("contiguous")
    compiled = torch.compile(lambda q: splitkv.decode(q, kv, workspace), fullgraph=True, backend="aot_eager")
    compiled(queries(3))
    kv.seq_lens[1] = 99
    compiled(queries(3))
    monkeypatch.setenv("SPLITKV_DEBUG", "1")
    with pytest.raises(ValueError, match="seq_lens: expected values in 0…12, given 99 in row 1"):
        compiled(queries(3))


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_memory_get_shapes_and_launch_nothing(kind):
    device = torch.device("meta") if kind == "meta" else DEVICE
    with FakeTensorMode() if kind == "fake" else nullcontext():
        workspace = splitkv.Workspace.allocate(CONFIG, device)
        k, v = torch.empty(2, 6, 4, 1, WIDTH, dtype=torch.float16, device=device)
        lens = torch.empty(3, dtype=torch.int32, device=device)
        kv = splitkv.PagedKV(k, v, torch.empty(3, 2, dtype=torch.int32, device=device), lens)
        q = torch.empty(3, 5, 2, WIDTH, dtype=torch.float16, device=device)
        splitkv.append_kv(k[0, :3], v[0, :3], kv, lens)
        out, lse = splitkv.decode_with_lse(q, kv, workspace)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.float16, device.type)
        assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
        merged, merged_lse = splitkv.merge(torch.stack([out, out]), torch.stack([lse, lse]))
        assert merged.shape == out.shape and merged_lse.shape == lse.shape
        if kind == "fake":
            words = torch.empty(3, 5, 1, dtype=torch.int32, device=device)
            assert splitkv.masks.pack_tree_mask(torch.empty(3, 5, 5, dtype=torch.bool, device=device), words) is words


@pytest.mark.parametrize("strict", [False, True])
def test_export(workspace, strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = paged()

        def forward(self, q):
            return splitkv.decode(q * 2, self.kv, workspace) + 1

    layer, q = Layer(), queries(3)
    program = torch.export.export(layer, (q,), strict=strict)
    assert same_bits(program.module()(q), layer(q))
    assert [str(node.target) for node in program.graph.nodes if "splitkv" in str(node.target)] == [
        "splitkv.decode.default"
    ]


def operator_samples():
    workspace = splitkv.Workspace.allocate(dataclasses.replace(CONFIG, max_splits=4), DEVICE)
    kv, q = paged(), queries(3)
    new, slots = torch.randn(3, 1, WIDTH, device=DEVICE).half(), ints([7, 12, 22], DEVICE)
    schedule = splitkv.Schedule.allocate(CONFIG, DEVICE)
    view = list(operators.take_apart(kv))
    view[:2] = [view[0].clone(), view[1].clone()]
    ops = torch.ops.splitkv
    decode = (
        q, None, None, None, None, None, None, workspace.partial_out, workspace.partial_lse, workspace.out,
        workspace.lse, False, False, workspace.spec, None, True, None, None, 1, None, *view,
    )  # fmt: skip
    yield ops.decode, decode
    yield ops.append_kv, (new, new.clone(), slots, None, *view)
    yield ops.move_kv, (slots, slots - 1, *view)
    yield ops.update_schedule, (schedule.buffer, schedule.spec, 3, None, *view)
    outs, lses = torch.randn(2, 3, 2, WIDTH, device=DEVICE), torch.randn(2, 3, 2, device=DEVICE)
    yield ops.merge, (outs, lses, None, None, 2.0, "NH", torch.zeros_like(outs[0]), torch.zeros_like(lses[0]), None)

    step = splitkv.StepState.allocate(splitkv.StepConfig(3), view[6], 4, DEVICE)
    step.bind([0, 1, 2], [4, 7, 0])
    yield ops.advance, (
        ints([1, 1], DEVICE), step.page_table, step.req_pool_indices, step.qo_indptr, step.position_ids, step.seq_lens,
        step.pending, step.kv_indptr, step.out_cache_loc, step.needs_page, 4,
    )  # fmt: skip

    mask, words = torch.zeros(2, 3, 6, dtype=torch.bool, device=DEVICE), torch.zeros(2, 3, 1, device=DEVICE).int()
    lens, indptr = ints([3, 5], DEVICE), ints([0, 1, 3], DEVICE)
    yield ops.validity_mask, (mask[0], ints([3, 5, 1], DEVICE), None)
    yield ops.attention_mask, (mask, lens, True, 2, None, None)
    yield ops.ragged_mask, (mask[0], indptr, lens, True, None, ints([1, 0], DEVICE), None)
    yield ops.position_mask, (mask[:, :1], lens)
    yield ops.pack_tree_mask, (mask[..., :3], words)
    yield ops.tree_mask_from_parents, (ints([[-1, 0, 0], [-1, 0, 1]], DEVICE), words)


def test_opcheck():
    checked = set()
    for operator, arguments in operator_samples():
        results = torch.library.opcheck(operator.default, arguments)
        assert set(results.values()) == {"SUCCESS"} and len(results) >= 4
        checked.add(str(operator))
    assert checked == {f"splitkv.{name}" for name in operators.NAMES}


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_inductor_and_a_cuda_graph_around_it(workspace, batch):
    kv = paged()

    def step(q, new, slots):
        splitkv.append_kv(new, new * 2, kv, slots)
        out, lse = splitkv.decode_with_lse(q * 2, kv, workspace, window_left=5)
        return out + 1, lse * 2

    arguments = (
        queries(batch), torch.randn(batch, 1, WIDTH, device=DEVICE).half(), ints([7, 12, 22][:batch], DEVICE),
    )  # fmt: skip
    assert_as_eager(step, *arguments, state=[kv.k, kv.v], backend="inductor")
    compiled = torch.compile(step, fullgraph=True)
    compiled(*arguments)
    with no_synchronisation():
        compiled(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compiled(*arguments)
    for lens in ([8, 5, 7], [3, 0, 1], [1, 8, 2]):
        kv.seq_lens.copy_(ints(lens, DEVICE))
        arguments[0].copy_(queries(batch))
        arguments[1].copy_(torch.randn_like(arguments[1]))
        graph.replay()
        replayed = bits(got)
        assert all(torch.equal(a, b) for a, b in zip(replayed, bits(step(*arguments)), strict=True))
