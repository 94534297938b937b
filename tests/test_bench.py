"""The bench without a GPU: its cells, problems, peers, records, tables, plots, options and tile files."""

import dataclasses
import json
import math
import struct
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support import H200

import splitkv
from splitkv.bench import cells, cli, peers, plot, problem, record, run, table, timing, tune
from splitkv.bench.cells import FORMATS, GRID, PREFIX, RULES, Cell
from splitkv.bench.record import Figures, HostMeasured, Measured, Record, Timing
from splitkv.kernels.read import read_all
from splitkv.tiles import Target, Tiles, choose
from splitkv.tiles_io import TileKey, TileTable

MIB = 2**20
CPU = torch.device("cpu")
SMALL = Cell("small", (40, 7, 23), num_q_heads=4, num_kv_heads=2, head_dim=32)


# Cells


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("b1-1k", 4),
        ("b1-4k", 16),
        ("b1-32k", 128),
        ("b1-128k", 512),
        ("b8-4k", 128),
        ("b32-4k", 512),
        ("b64-512", 128),
        ("b128-1k", 512),
        ("b256-4k", 4096),
        ("skew", 764),
        ("ragged64", 723),
        ("tp8-b32-8k", 128),
        ("mha-b16-4k", 1024),
        ("q32b-b16-8k", 512),
    ],
)
def test_grid_reads_as_many_bytes_as_it_says(name: str, mib: int) -> None:
    (cell,) = cells.select([name])
    assert cell.kv_bytes // MIB == mib
    assert cell.kv_bytes == sum(cell.lens) * cell.num_kv_heads * cell.head_dim * 2 * 2


def test_grid_has_fourteen_names() -> None:
    assert len({cell.name for cell in GRID}) == len(GRID) == 14
    assert len(cells.NAMED) == len(GRID) + len(RULES) + len(FORMATS) + len(PREFIX)
    assert not cells.GROUPS.keys() & cells.NAMED.keys()


def test_groups_of_cells() -> None:
    assert cells.select(["skew", "rules"]) == [*cells.select(["skew"]), *RULES]
    assert cells.select(["grid"]) == list(GRID)
    # What is halved is beside its half.
    names = [cell.name for cell in cells.select(["formats"])]
    assert all(name.removeprefix("fp8-") in names for name in names if name.startswith("fp8-"))


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("fp8-b32-4k", 256),
        ("int8-b32-4k", 256),
        ("fp8-b128-1k", 256),
        ("fp8-b256-4k", 2048),
        ("mla-1x8k", 9),
        ("mla-32x8k", 288),
        ("mla-128x4k", 576),
        ("mla-h128-64x4k", 288),
        ("mla-fp8-32x8k", 144),
        ("mla-fp8-128x4k", 288),
    ],
)
def test_formats_read_each_byte_once(name: str, mib: int) -> None:
    (cell,) = cells.select([name])
    assert cell.kv_bytes == cell.cache_bytes == mib * MIB
    columns = 576 + 512 if cell.latent else 2 * 128
    assert cell.flops == 2 * sum(cell.lens) * cell.num_q_heads * columns


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("tree-b8-4k", 128 * 1024),  # as b8-4k and b32-4k
        ("tree-b32-4k", 512 * 1024),
        ("extend-512", 4 * 8704 * 4),
        ("extend-2048", 4 * 10240 * 4),
        ("gpt-oss-window", 32 * 128 * 2),
        ("gpt-oss-full", 32 * 8192 * 2),
        ("gemma-2-window", 32 * 4096 * 8),
        ("gemma-2-full", 32 * 8192 * 8),
    ],
)
def test_cells_of_rules_read_what_is_visible(name: str, kib: int) -> None:
    (cell,) = cells.select([name])
    assert cell.kv_bytes == kib * 1024 <= cell.cache_bytes


def test_operations_count_the_keys_that_each_query_token_sees() -> None:
    cell = Cell("x", (10, 7), num_q_heads=6, num_kv_heads=2, head_dim=16, q_len=3)
    assert cell.flops == 4 * 6 * 16 * (8 + 9 + 10 + 5 + 6 + 7)
    assert dataclasses.replace(cell, window_left=5).flops == 4 * 6 * 16 * (6 + 6 + 6 + 5 + 6 + 6)
    seen = [splitkv.reference.visible(3, 0, length, window_left=5).sum().item() for length in cell.lens]
    assert dataclasses.replace(cell, window_left=5).flops == 4 * 6 * 16 * sum(seen)
    # Of a chunk the products are the limit, of decode the memory.
    extend, plain = cells.select(["extend-2048", "b8-4k"])
    assert extend.flops / extend.kv_bytes > run.MULTIPLIED > plain.flops / plain.kv_bytes


def test_ragged64_is_the_drawn_lengths() -> None:
    drawn = (torch.randn(64, generator=torch.Generator().manual_seed(7)) + 7.6).exp().clamp(1, 32768)
    assert cells.RAGGED64 == tuple(int(x) for x in drawn)


def test_capacity_tells_nothing_about_a_cell() -> None:
    assert len({cells.capacity([cell]) for cell in GRID}) == 1
    assert cells.capacity([Cell("huge", (200_000,) * 300)]) == (300, 200_000)


def test_pages_and_cache_bytes() -> None:
    lens = (17, 16, 1)
    assert Cell("a", lens).num_pages == 4
    assert Cell("a", lens, page_size=1).num_pages == 34
    contiguous = Cell("a", lens, page_size=None)
    assert (contiguous.max_len, contiguous.num_pages) == (32, 6)
    assert contiguous.cache_bytes == 3 * 32 * contiguous.token_bytes
    assert contiguous.kv_bytes == Cell("a", lens).kv_bytes


@pytest.mark.parametrize("cell", (*GRID, *RULES, *FORMATS), ids=lambda cell: cell.name)
def test_shrunk_keeps_the_kind(cell: Cell) -> None:
    small = cell.shrunk()
    assert (small.kv_dtype, small.latent is None) == (cell.kv_dtype, cell.latent is None)
    assert small.head_dim_v < small.head_dim if cell.latent else small.head_dim_v == small.head_dim
    assert (small.q_len > 1, small.q_len > run.SHORT) == (cell.q_len > 1, cell.q_len > run.SHORT)
    assert (small.tree, small.softcap, small.sinks) == (cell.tree, cell.softcap, cell.sinks)
    assert (small.window_left is None) == (cell.window_left is None) and small.first_visible(small.longest) in (0, 70)
    assert small.even == cell.even
    assert small.num_q_heads // small.num_kv_heads == cell.num_q_heads // cell.num_kv_heads
    assert small.batch <= 3 and small.longest <= 96


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cells.select(["b1-2k"]), ["cells", "b1-1k", "'b1-2k'"]),
        (lambda: cells.custom(3, [1, 2]), ["lens", "3", "2"]),
        (lambda: cells.custom(0, [4]), ["batch", "≥ 1", "0"]),
        (lambda: Cell("x", ()), ["lens", "none"]),
        (lambda: Cell("x", (0,)), ["lens", "0"]),
        (lambda: Cell("x", (4,), num_q_heads=7, num_kv_heads=2), ["num_q_heads", "2", "7"]),
        (lambda: Cell("x", (4,), dtype="float8"), ["dtype", "float8"]),
        (lambda: Cell("x", (9, 3), q_len=4), ["lens", "≥ 4", "3"]),
        (lambda: Cell("x", (4,), q_len=0), ["q_len", "≥ 1", "0"]),
        (lambda: Cell("x", (4,), window_left=-1), ["window_left", "≥ 0", "-1"]),
        (lambda: Cell("x", (4,), kv_dtype="float8"), ["kv_dtype", "float8_e4m3fn", "'float8'"]),
        (lambda: Cell("x", (4,), latent=64), ["latent", "num_kv_heads = 1", "8"]),
        (lambda: Cell("x", (4,), num_kv_heads=1, latent=64, page_size=None), ["latent", "pages", "contiguous"]),
        (lambda: Cell("x", (4,), num_kv_heads=1, latent=129), ["latent", "1…128", "129"]),
    ],
)
def test_cells_refuse(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words)


# Problems and the right answer


def build(cell: Cell, device: torch.device = CPU) -> problem.Problem:
    return problem.build(cell, problem.Buffers(device, cell.torch_kv_dtype), max_len=cell.longest + 50, copies=2)


@pytest.mark.parametrize("page_size", [1, 16, 64, None])
def test_expected_answer_is_the_reference(page_size: int | None) -> None:
    made = build(dataclasses.replace(SMALL, page_size=page_size))
    for copy in range(2):
        expected = problem.expect(made, copy)
        right = splitkv.reference.decode(made.q, made.views[copy], dtype=torch.float64)
        torch.testing.assert_close(expected.out, right, rtol=1e-12, atol=1e-12)
    assert not torch.equal(made.k_caches[0], made.k_caches[1])


RULED: dict[str, dict[str, Any]] = {
    "tokens": dict(q_len=5),
    "tree": dict(q_len=5, tree=True),
    "window": dict(window_left=9),
    "window of tokens": dict(q_len=4, window_left=9),
    "window of a tree": dict(q_len=7, tree=True, window_left=3),
    "softcap": dict(softcap=0.5),
    "sinks": dict(sinks=True),
    "all": dict(q_len=7, tree=True, window_left=20, softcap=0.5, sinks=True),
}


@pytest.mark.parametrize("name", RULED)
def test_expected_answer_follows_the_rules(name: str) -> None:
    made = build(dataclasses.replace(SMALL, num_q_heads=6, **RULED[name]))
    expected = problem.expect(made, 1)
    right = splitkv.reference.decode(made.q, made.views[1], dtype=torch.float64, **made.rules)
    torch.testing.assert_close(expected.out, right, rtol=1e-12, atol=1e-12)
    # And what ignores one of them is no right answer.
    for rule in made.rules:
        rest = {key: value for key, value in made.rules.items() if key != rule}
        assert expected.error_ratio(splitkv.reference.decode(made.q, made.views[1], **rest)) > 1, rule


def test_a_tree_mask_of_the_bench_is_a_binary_tree() -> None:
    made = build(dataclasses.replace(SMALL, q_len=5, tree=True))
    assert made.rules["tree_mask"].tolist() == [[[0b1], [0b11], [0b101], [0b1011], [0b10011]]] * 3


def test_copies_follow_what_is_read() -> None:
    l2 = 50 * MIB
    assert problem.copies_for(512 * MIB, l2, 2**40, 8 * MIB) == 25
    with pytest.raises(problem.DoesNotFit):
        problem.copies_for(512 * MIB, l2, 4 * 512 * MIB, 8 * MIB)


def test_expected_answer_in_chunks_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(dataclasses.replace(SMALL, num_q_heads=6, num_kv_heads=3, q_len=2, sinks=True))
    whole = problem.expect(made, 0)
    monkeypatch.setattr(problem, "REFERENCE_BYTES", 1)
    chunked = problem.expect(made, 0)
    torch.testing.assert_close(chunked.out, whole.out, rtol=1e-12, atol=1e-12)


def test_error_ratio_tells_right_from_wrong() -> None:
    made = build(SMALL)
    expected = problem.expect(made, 0)
    right = splitkv.reference.decode(made.q, made.views[0])
    assert expected.error_ratio(right) < 1
    assert expected.error_ratio(splitkv.reference.decode(made.q, made.views[1])) > 10
    one_off = right.clone()
    one_off[1, 2, 3] += 0.5
    assert expected.error_ratio(one_off) > 1
    one_off[1, 2, 3] = math.nan
    assert expected.error_ratio(one_off) == math.inf


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_placed_apart_and_at_random(page_size: int) -> None:
    cell = dataclasses.replace(SMALL, lens=(400, 33), page_size=page_size)
    made = build(cell)
    live = [made.page_table[b, : -(-length // page_size)] for b, length in enumerate(cell.lens)]
    pages = torch.cat(live)
    assert sorted(pages.tolist()) == list(range(cell.num_pages))
    assert pages.tolist() != sorted(pages.tolist())
    assert made.page_table.shape == (2, -(-450 // page_size))


def test_the_limit_reads_as_many_bytes_as_the_cell() -> None:
    for cell in (SMALL, dataclasses.replace(SMALL, page_size=None), dataclasses.replace(SMALL, dtype="float32")):
        made = build(cell)
        assert [words.numel() * 4 for words in made.words] == [cell.kv_bytes] * 2
        assert len({words.data_ptr() for words in made.words}) == 2


def test_problem_refuses_a_table_that_is_too_narrow() -> None:
    with pytest.raises(ValueError, match=r"max_len: expected at least 40 .* given 39"):
        problem.build(SMALL, problem.Buffers(CPU, torch.bfloat16), max_len=39, copies=1)


def test_copies_exceed_the_l2_cache_or_the_cell_does_not_fit() -> None:
    l2 = 50 * MIB
    for cache in (4 * MIB, 16 * MIB, 128 * MIB, 4096 * MIB):
        assert problem.copies_for(cache, l2, 2**40) * cache >= 4 * l2
        assert problem.copies_for(cache, l2, 2**40) >= 2
    assert problem.copies_for(4096 * MIB, l2, 5000 * MIB) == 1
    with pytest.raises(problem.DoesNotFit, match=r"4\.00 GiB"):
        problem.copies_for(4096 * MIB, l2, 4000 * MIB)
    with pytest.raises(problem.DoesNotFit):
        problem.copies_for(16 * MIB, l2, 64 * MIB)


@pytest.mark.parametrize("n", [1, 256, 1000, 4096 + 3])
@pytest.mark.parametrize("programs", [1, 3, 64])
def test_read_kernel_reads_everything_once(n: int, programs: int, device: torch.device) -> None:
    x = torch.randint(-(2**18), 2**18, (n,), dtype=torch.int32).to(device)
    sink = torch.zeros(64, dtype=torch.int32, device=device)
    read_all(x, sink, block=256, programs=programs, num_stages=1, num_warps=4)
    assert sink.sum().item() == x.sum().item()


# Measuring


def test_ours_is_checked_and_a_wrong_peer_is_found(device: torch.device) -> None:
    def wrong(made: problem.Problem) -> tuple[Any, Any]:
        out = torch.zeros_like(made.q)
        return (lambda i: None), out

    def absent(made: problem.Problem) -> tuple[Any, Any]:
        raise peers.Unavailable("not here")

    def broken(made: problem.Problem) -> tuple[Any, Any]:
        raise KeyError("nobody knows")

    told: list[str] = []
    crowd = peers.Peers({"wrong": wrong, "absent": absent, "broken": broken})
    session = run.Session([SMALL], device, timed=False)
    measured = run.time_decode(SMALL, session=session, peers=crowd, tell=told.append)
    assert measured.sol_us is None
    ratio = measured.ours["scan"].error_ratio
    assert ratio is not None and 0 < ratio < 1
    assert measured.peers["wrong"].note == "wrong answer"
    assert measured.peers["absent"].note == "unavailable: not here"
    assert measured.peers["broken"].note.startswith("failed: KeyError")
    assert len(told) == run.steps([SMALL], crowd, session)


def test_a_shared_beginning_is_stored_and_read_once(device: torch.device) -> None:
    (cell,) = cells.select(["prefix-32k-b64"])
    assert cell.kv_bytes == (32768 + 64 * 512) * cell.token_bytes == cell.cache_bytes
    small, session = run.dry_session([dataclasses.replace(cell, lens=(32770, 32796, 32799))], device)
    made, (cell,) = session.problem(small[0]), small
    table = made.page_table.tolist()
    assert cell.shared == 64 and cell.lens == (96, 11 + 64, 96) and cell.num_pages == 4 + 2 + 1 + 2
    assert [row[:4] for row in table] == [table[0][:4]] * 3
    used = [page for row, length in zip(table, cell.lens, strict=True) for page in row[: -(-length // 16)]]
    assert set(used) == set(range(cell.num_pages))
    measured = run.time_decode(cell, session=session)
    assert measured.ours.keys() == {"scan", "list", "shared"}
    for timing_ in measured.ours.values():
        assert timing_.note == "not timed" and timing_.error_ratio is not None and timing_.error_ratio < 1, measured
    for shared, why in ((8, "whole pages"), (96, "integer in 0…95")):
        with pytest.raises(ValueError, match=f"shared: .*{why}"):
            Cell("x", (97, 96), shared=shared)


@pytest.mark.parametrize(
    "cell",
    [cell for cell in RULES if cell.name not in ("tree-b32-4k", "extend-2048")],  # in small others are the same
    ids=lambda cell: cell.name,
)
def test_cells_of_rules_are_measured_in_every_way(cell: Cell, device: torch.device) -> None:
    """And peers that know a rule get them right, the others are left out by name."""
    small, session = run.dry_session([cell], device)
    told: list[str] = []
    crowd = peers.Peers({name: peers.BUILT_IN[name] for name in ("SDPA", "FlexAttention")})
    measured = run.time_decode(small[0], session=session, peers=crowd, tell=told.append)
    assert len(told) == run.steps(small, crowd, session)
    wanted = {"scan"}
    if cell.window_left is None:
        wanted |= set() if cell.q_len > 4 else {"list"}
    assert measured.ours.keys() == wanted
    for timing_ in measured.ours.values():
        assert timing_.note == "not timed" and timing_.error_ratio is not None and timing_.error_ratio < 1, measured
    sdpa = measured.peers["SDPA"]
    lacks = ", ".join([*["sinks"] * cell.sinks, *["softcap"] * (cell.softcap is not None)])
    assert sdpa.note == (f"unavailable: does not take {lacks}" if lacks else "not timed")
    assert lacks or (sdpa.error_ratio is not None and sdpa.error_ratio < 1)
    assert measured.peers["FlexAttention"].note.startswith("unavailable: does not take ")


@pytest.mark.parametrize(
    "name",
    ["fp8-b32-4k", "int8-b32-4k", "mla-32x8k", "mla-fp8-32x8k"],  # in small others are the same
)
def test_cells_of_formats_are_measured_in_every_way(name: str, device: torch.device) -> None:
    small, session = run.dry_session(cells.select([name]), device)
    crowd = peers.Peers({"SDPA": peers.sdpa, "flashmla": _latent_peer})
    measured = run.time_decode(small[0], session=session, peers=crowd)
    assert measured.ours.keys() == {"scan", "list"}
    for timing_ in measured.ours.values():
        assert timing_.note == "not timed" and timing_.error_ratio is not None and timing_.error_ratio < 1, measured
    asked = ", ".join([*[small[0].kv_dtype] * bool(small[0].kv_dtype), *["latent"] * ("mla" in name)])
    assert measured.peers["SDPA"].note == f"unavailable: does not take {asked}"
    knows = name == "mla-32x8k"
    assert (measured.peers["flashmla"].note == "not timed") == knows
    made = session.problem(small[0])
    expected = problem.expect(made, 1)
    right = splitkv.reference.decode(made.q, made.views[1], dtype=torch.float64, **made.rules)
    torch.testing.assert_close(expected.out, right, rtol=1e-12, atol=1e-12)
    assert (made.views[0].latent, made.views[0].k_scale is None) == ("mla" in name, not small[0].kv_dtype)


def _latent_peer(made: Any) -> tuple[Any, torch.Tensor]:
    """A peer that knows latent rows."""
    out = made.q.new_empty(made.shape_out)
    return lambda i: out.copy_(splitkv.reference.decode(made.q, made.views[i], **made.rules)), out


def test_chunks_are_given_larger_tiles(device: torch.device) -> None:
    small, session = run.dry_session(cells.select(["extend-512"]), device)
    rows = []
    for q_len in (4, 31, 32):
        cell = dataclasses.replace(small[0], q_len=q_len)
        made = session.problem(cell)
        workspace = session.workspace(cell, q_tile_rows=64)
        plan = splitkv.api.plan_decode(made.q, made.views[0], workspace, num_splits=None)
        fixed = splitkv.api.plan_decode(made.q, made.views[0], workspace, num_splits=1)
        rows.append((plan.launches[0].constants["BLOCK_M"], fixed.launches[0].constants["BLOCK_M"]))
    assert rows == [(16, 16), (64, 64), (128, 64)]


@pytest.mark.parametrize(
    ("read", "rate", "bound"), [(10.0, 1e3, "arithmetic"), (1e9, 1e3, "memory"), (10.0, 1e30, "memory")]
)
def test_the_limit_is_what_takes_longer(
    read: float, rate: float, bound: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    small, session = run.dry_session(cells.select(["extend-512", "b8-4k"]), device)
    monkeypatch.setattr(timing, "speed_of_light_us", lambda words, **_: read)
    monkeypatch.setattr(timing, "product_flops_per_us", lambda dtype, device: rate)
    made = session.problem(small[0])
    assert small[0].flops > run.MULTIPLIED * small[0].kv_bytes
    assert session.limit(made) == ((small[0].flops / rate if bound == "arithmetic" else read), bound)
    assert session.limit(session.problem(small[1])) == (read, "memory")


def test_a_wrong_answer_shows_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(SMALL)
    expected = problem.expect(made, 1)
    session = run.Session([SMALL], CPU)
    session.timed = True
    monkeypatch.setattr(session, "time", lambda launch, copies: 5.0)
    right = splitkv.reference.decode(made.q, made.views[1])

    def answering(*answers: torch.Tensor) -> Any:
        """A peer whose first launch and whose timed launches leave these answers."""

        def prepare(made: problem.Problem) -> tuple[Any, Any]:
            queue, out = list(answers), torch.empty_like(right)
            monkeypatch.setattr(session, "time", lambda launch, copies: (launch(1), 5.0)[1])
            return (lambda i: out.copy_(queue.pop(0))), out

        return prepare

    good = run.measure(answering(right, right), made, expected, session)
    assert good.us == 5.0 and good.error_ratio is not None and good.error_ratio < 1
    bad = run.measure(answering(right + 1, right), made, expected, session)
    assert bad.us is None and bad.note == "wrong answer"
    under_replay = run.measure(answering(right, right + 1), made, expected, session)
    assert under_replay.us is None and under_replay.note == "wrong answer under graph replay"


@pytest.mark.parametrize("name", ["tokens", "tree", "window", "window of tokens", "window of a tree"])
def test_sdpa_takes_tokens_trees_and_windows(name: str) -> None:
    made = build(dataclasses.replace(SMALL, lens=(40, 9, 40, 128), **RULED[name]))
    expected = problem.expect(made, 1)
    launch, out = peers.sdpa(made)
    launch(1)
    assert expected.error_ratio(peers.result_of(out)) < 1


def test_flash_attention_is_given_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both of its generations are called with, by stand-ins that decode by reference."""
    calls: list[dict[str, Any]] = []

    def with_kvcache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cache_seqlens: Any, **rules: Any) -> Any:
        table = rules.get("block_table", rules.get("page_table"))
        calls.append({"metadata": rules.get("scheduler_metadata"), "paged": table is not None})
        window_left, right = rules["window_size"]
        assert rules["causal"] and (window_left, right) in ((-1, -1), (window_left, 0))
        kv: Any = splitkv.ContiguousKV(k, v, cache_seqlens) if table is None else None
        if kv is None:
            kv = splitkv.PagedKV(k, v, table, cache_seqlens)
        cap = rules["softcap"] or None
        return splitkv.reference.decode(q, kv, window_left=None if window_left < 0 else window_left, softcap=cap)

    def metadata(batch: int, q_len: int, *sizes: Any, **rules: Any) -> Any:
        return batch, q_len, rules["window_size"], rules["has_softcap"]

    class Module:
        flash_attn_with_kvcache = staticmethod(with_kvcache)
        get_scheduler_metadata = staticmethod(metadata)

    monkeypatch.setattr(peers, "_module", lambda name: Module)
    for rules in (dict(q_len=5), dict(window_left=9, softcap=0.5), dict(q_len=3, window_left=9, softcap=0.5)):
        for page_size in (16, 256):
            cell = dataclasses.replace(SMALL, page_size=page_size, **rules)
            made = build(cell)
            expected = problem.expect(made, 1)
            for peer in (peers.flash_attention_2, peers.flash_attention_3):
                calls.clear()
                launch, out = peer(made)
                launch(1)
                assert expected.error_ratio(peers.result_of(out)) < 1
                if peer is peers.flash_attention_3:
                    assert calls[0]["metadata"] == (
                        3, cell.q_len, (-1, -1) if cell.window_left is None else (9, 0), cell.softcap is not None
                    )  # fmt: skip
                else:
                    assert calls[0]["paged"] == (page_size == 256)


@pytest.mark.parametrize("page_size", [16, 64, None])
def test_peers_of_pytorch_are_right(page_size: int | None) -> None:
    cell = dataclasses.replace(SMALL, lens=(40, 7, 40, 128), page_size=page_size)
    made = build(cell)
    expected = problem.expect(made, 1)
    for name in ("SDPA", "FlexAttention"):
        launch, out = peers.BUILT_IN[name](made)
        launch(0)
        assert expected.error_ratio(peers.result_of(out)) > 1
        launch(1)
        assert expected.error_ratio(peers.result_of(out)) < 1, name


def test_peers_of_packages_say_that_they_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers.importlib, "import_module", nothing)
    made = build(SMALL)
    for name in peers.NEEDS:
        with pytest.raises(peers.Unavailable, match="not installed"):
            peers.BUILT_IN[name](made)


PEERS_FILE = """
    import torch
    import splitkv

    class Unavailable(RuntimeError):
        pass

    def reference(problem):
        out = torch.empty_like(problem.q)
        return (lambda i: out.copy_(splitkv.reference.decode(problem.q, problem.views[i]))), out

    def picky(problem):
        raise Unavailable("only on Sundays")

    PEERS = {"reference": reference, "picky": picky}
"""


def test_peers_file(tmp_path: Path, device: torch.device) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(PEERS_FILE))
    crowd = peers.Peers({}, file=path)
    measured = run.time_decode(SMALL, session=run.Session([SMALL], device, timed=False), peers=crowd)
    assert measured.peers["reference"].error_ratio is not None
    assert measured.peers["picky"].note == "unavailable: only on Sundays"
    with pytest.raises(ValueError, match="reference"):
        peers.Peers({"reference": peers.sdpa}, file=path)
    # It is asked for no rules unless it says that it knows them.
    ruled = build(dataclasses.replace(SMALL, q_len=2, softcap=3.0))
    assert crowd.lacks("reference", ruled) == "q_len, softcap" and crowd.lacks("reference", build(SMALL)) == ""
    path.write_text(textwrap.dedent(PEERS_FILE) + '\nRULES = {"reference": {"softcap"}}\n')
    assert peers.Peers({}, file=path).lacks("reference", ruled) == "q_len"
    path.write_text(textwrap.dedent(PEERS_FILE) + '\nRULES = {"reference": "softcap"}\n')
    with pytest.raises(ValueError, match="RULES of sets"):
        peers.Peers({}, file=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("PEERS = [1]\nUnavailable = ValueError", "PEERS"), ("PEERS = {}", "Unavailable"), (None, "Python file")],
)
def test_peers_file_that_offers_nothing(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words):
        peers.load(path)


def test_host_time_is_counted_per_call() -> None:
    calls: list[int] = []
    waits: list[int] = []
    found = timing.host_time_us(
        calls.append, lambda: None, lambda: waits.append(len(calls)), calls=64, group=32, queue=4
    )
    assert len(calls) == 96  # one group is not timed
    assert waits[1:9] == list(range(4, 36, 4))
    assert 0 < found.median <= found.p90


def test_host_mode_names_everyone(device: torch.device) -> None:
    session = run.Session([SMALL], device, timed=False)
    measured = run.time_host(SMALL, session, peers.Peers({"SDPA": peers.sdpa}), calls=2, group=1)
    assert measured.times.keys() == {"ours", "SDPA"}
    assert all(0 < times["median"] <= times["p90"] for times in measured.times.values())


@pytest.mark.gpu
def test_times_on_a_gpu() -> None:
    (cell,) = cells.select(["b1-4k"])
    measured = run.time_decode(cell, peers=peers.Peers({"SDPA": peers.sdpa, "FlexAttention": peers.flex_attention}))
    ours = measured.ours["scan"].us
    assert measured.sol_us is not None and ours is not None, measured
    assert 1 < measured.sol_us < ours
    assert all(timing.us is not None and timing.us > measured.sol_us for timing in measured.peers.values()), measured


@pytest.mark.gpu
def test_the_limit_grows_with_the_bytes() -> None:
    sizes = (16 * MIB, 64 * MIB, 256 * MIB)
    limits = []
    for nbytes in sizes:
        copies = max(2, 512 * MIB // nbytes)
        buffers = [torch.ones(nbytes // 4, dtype=torch.int32, device="cuda") for _ in range(copies)]
        limits.append(timing.speed_of_light_us(buffers, budget_ms=5.0, repeats=3))
    assert limits == sorted(limits) and limits[2] > 2 * limits[1]


# Records


RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "method": timing.METHOD,
}


def measured_grid() -> Record:
    """Invented times in the grid's own shape: arithmetic, not measurements."""
    found = []
    for i, cell in enumerate(GRID):
        limit = 1.5 + cell.kv_bytes / 4.5e6
        found.append(
            Measured(
                cell,
                copies=2,
                sol_us=limit,
                ours={"scan": Timing(limit * 1.2, 0.5)},
                peers={
                    "SDPA": Timing(limit * (1.1 if i == 0 else 1.5), 0.4),
                    "FlexAttention": Timing(None, None, "out of memory"),
                },
            )
        )
    return Record([dict(RUN)], found, [HostMeasured(GRID[0], 0, {"ours": {"median": 20.0, "p90": 25.0}})])


def test_record_round_trip(tmp_path: Path) -> None:
    made = measured_grid()
    made.cells += [Measured(cell, sol_us=9.0, bound="arithmetic") for cell in RULES]
    made.cells[3].ours["scan"] = Timing(None, math.inf, "wrong answer")
    path = tmp_path / "record.json"
    made.save(path)
    back = Record.load(path)
    assert back.cells[3].ours["scan"].note == "wrong answer"
    ratio = back.cells[3].ours["scan"].error_ratio
    assert ratio is not None and ratio > 1e20
    made.cells[3] = back.cells[3]
    assert back == made
    entry = json.loads(path.read_text())["cells"][4]
    assert entry["cell"]["lens"] == [[8, 4096]] and entry["cell"]["kv_bytes"] == 128 * MIB
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_merging_replaces_what_was_measured_again() -> None:
    old = measured_grid()
    again = Measured(GRID[0], sol_us=3.0, ours={"scan": Timing(6.0, 0.1)})
    other_page = Measured(dataclasses.replace(GRID[0], page_size=1), sol_us=3.0)
    split = Measured(GRID[0], split_tokens=256, sol_us=3.0)
    newer = Record([{**RUN, "date": "later"}], [again, other_page, split])
    both = old.merged(newer)
    assert len(both.cells) == 14 + 2
    (first,) = [m for m in both.cells if m.label == "b1-1k"]
    assert first.sol_us == 3.0 and both.runs[first.run]["date"] == "later"
    assert {m.label for m in both.cells} >= {"b1-1k, page 1", "b1-1k, split 256"}
    elsewhere = Record([{**RUN, "gpu": "another"}], [again])
    assert len(old.merged(elsewhere).cells) == 15


def test_merging_drops_runs_that_nothing_refers_to() -> None:
    old = Record([{**RUN, "date": "old"}], [Measured(GRID[0])])
    both = old.merged(Record([{**RUN, "date": "new"}], [Measured(GRID[0])]))
    assert [r["date"] for r in both.runs] == ["new"] and both.cells[0].run == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}', '{"format": "splitkv-bench/1", "cells": [{}]}'])
def test_record_refuses_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="record"):
        Record.load(path)


def test_run_description_names_versions() -> None:
    described = record.describe_run(CPU, timing.METHOD)
    assert described["versions"]["torch"] == torch.__version__ and described["gpu"] is None
    json.dumps(described)


# Listed figures


@pytest.fixture
def figures() -> Figures:
    if not cli.FIGURES.is_file():
        pytest.skip("the listed figures are the repository's, and the tests run outside of it")
    return Figures.load(cli.FIGURES)


def test_listed_figures_are_of_the_grid(figures: Figures) -> None:
    names = {cell.name for cell in GRID}
    assert {f.cell for f in figures.figures} <= names
    keys = [(f.peer, f.cell, f.page_size) for f in figures.figures]
    assert len(keys) == len(set(keys))


def test_listed_figures_count_for_their_own_case_alone(figures: Figures) -> None:
    (cell,) = cells.select(["b8-4k"])
    gpu = figures.gpu
    assert figures.for_cell(Measured(cell), gpu, GRID).keys() == {"XQA (listed)", "FlashInfer (listed)"}
    paged = Measured(dataclasses.replace(cell, page_size=64))
    assert figures.for_cell(paged, gpu, GRID).keys() == {"XQA (listed)"}
    assert figures.for_cell(Measured(cell), "another", GRID) == {}
    assert figures.for_cell(Measured(dataclasses.replace(cell, dtype="float16")), gpu, GRID) == {}
    assert figures.for_cell(Measured(dataclasses.replace(cell, lens=(4096,) * 7)), gpu, GRID) == {}


def test_a_measured_peer_displaces_its_listed_figure(figures: Figures) -> None:
    made = measured_grid()
    assert "FlashInfer (listed)" in table.rivals(made.cells[4], made, figures)
    made.cells[4].peers["FlashInfer"] = Timing(60.0, 0.1)
    assert "FlashInfer (listed)" not in table.rivals(made.cells[4], made, figures)


# Tables and plots


def test_summary_is_the_geometric_mean() -> None:
    made = measured_grid()
    summary = table.summarise(made)
    assert summary.cells == 14
    assert summary.mean == pytest.approx(((1.1 / 1.2) * (1.5 / 1.2) ** 13) ** (1 / 14))
    assert list(summary.behind) == ["b1-1k"]
    made.cells[2].ours["scan"] = Timing(None, 9.0, "wrong answer")
    assert table.summarise(made).without == ("b1-32k",)
    assert table.summarise(made).cells == 13


def test_main_table_shows_every_column() -> None:
    made = measured_grid()
    made.cells[1].ours["scan"] = Timing(None, 9.0, "wrong answer")
    shown = table.main_table(made)
    assert all(len(row) == len(shown.header) for row in shown.rows)
    first, second = shown.rows[:2]
    limit = 1.5 + 4 * MIB / 4.5e6
    assert first == (
        "b1-1k", "4 MiB", f"{limit:.1f}", f"{limit * 1.2:.1f}", "0.83", f"{limit * 1.1:.1f} SDPA", "0.92", "0.50"
    )  # fmt: skip
    assert second[3] == "wrong answer" and second[4] == "–" and second[6] == "–"


def test_limits_of_arithmetic_are_marked() -> None:
    (cell,) = cells.select(["extend-512"])
    made = Record([dict(RUN)], [Measured(cell, sol_us=9.0, bound="arithmetic", ours={"scan": Timing(18.0, 0.5)})])
    assert table.main_table(made).rows[0][2] == "9.0 (arithmetic)" and table.main_table(made).rows[0][4] == "0.50"
    assert any("limits of arithmetic" in line for line in table.notes(made))
    assert not any("arithmetic" in line for line in table.notes(measured_grid()))
    # Records from before there were any are read as they were.
    old = json.loads(json.dumps(measured_grid().to_json()))
    for entry in old["cells"]:
        del entry["bound"]
        for name in ("q_len", "tree", "window_left", "softcap", "sinks"):
            del entry["cell"][name]
    assert Record.from_json({**old, "host": []}).cells == measured_grid().cells


@pytest.mark.parametrize("rich", [True, False])
def test_tables_render(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(table, "has_rich", lambda: rich)
    table.show_record(measured_grid())
    text = capsys.readouterr().out
    for cell in GRID:
        assert cell.name in text
    for words in ("limit ÷ ours", "geometric mean of best peer ÷ ours", "FlexAttention: out of memory", "NVIDIA H200"):
        assert words in text


@pytest.mark.parametrize("rich", [True, False])
def test_progress_tells(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(table, "has_rich", lambda: rich)
    with table.progress(2, "work") as tell:
        tell("one")
        tell("two")
    if not rich:
        assert capsys.readouterr().err.splitlines() == ["[1/2] one", "[2/2] two"]


def test_markdown_has_one_line_per_cell() -> None:
    lines = table.markdown(table.main_table(measured_grid())).splitlines()
    assert len(lines) == 2 + 14
    assert {line.count("|") for line in lines} == {9}


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    plot.save(measured_grid(), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 500


def test_plot_says_what_its_axes_are() -> None:
    pytest.importorskip("matplotlib")
    left, right = plot.figure(measured_grid()).axes
    assert "time ÷ limit" in left.get_xlabel() and "TB/s" in right.get_ylabel() and "tokens" in right.get_xlabel()
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert "splitkv" in names and "SDPA" in names
    assert len(left.get_yticklabels()) == 14
    with pytest.raises(ValueError, match="given none"):
        plot.figure(Record())
    (cell,) = cells.select(["extend-512"])
    timed = [Measured(cell, sol_us=9.0, bound="arithmetic", ours={"scan": Timing(18.0, 0.5)})]
    left, right = plot.figure(Record([dict(RUN)], timed)).axes
    assert "product" in left.get_legend().get_texts()[0].get_text() and not right.get_visible()


# The command line


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--dry-run", "--cells", "skew", "tp8-b32-8k", "--page-size", "4"]) == 0
    text = capsys.readouterr().out
    assert "skew, page 4" in text and "8/1" in text and "SDPA" in text and "nothing was timed" in text


def test_dry_run_of_cells_with_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--dry-run", "--cells", "tree-b8-4k", "gpt-oss-window"]) == 0
    text = capsys.readouterr().out
    assert "tree-b8-4k" in text and "SDPA: unavailable: does not take sinks (gpt-oss-window)" in text


def test_dry_run_of_own_sizes_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--lens", "70", "5", "--q-heads", "6", "--kv-heads", "3", "--head-dim", "24", "--layout", "contiguous"]
    assert cli.run(["--dry-run", "--no-peers", "--split-tokens", "16", "--dtype", "float32", *own]) == 0
    assert "2x5-70, contiguous, split 16, float32" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run([]) == 1
    text = capsys.readouterr().err
    assert "no GPU" in text and "--dry-run" in text


def test_a_recorded_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source, picture, text = (str(tmp_path / name) for name in ("r.json", "p.png", "t.md"))
    measured_grid().save(source)
    assert cli.run(["--from", source, "--plot", picture, "--markdown", text]) == 0
    assert "geometric mean" in capsys.readouterr().out
    assert Path(picture).stat().st_size > 1000
    assert Path(text).read_text(encoding="utf-8").count("\n| b1-1k") == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cells", "nonsense"], ["cells", "nonsense", "b1-1k"]),
        (["--cells", "skew", "--lens", "4"], ["--cells", "--lens"]),
        (["--batch", "4"], ["--batch", "--lens"]),
        (["--head-dim", "64"], ["--head-dim", "--lens"]),
        (["--lens", "1", "2", "--batch", "3"], ["lens", "3"]),
        (["--layout", "contiguous", "--page-size", "16"], ["--page-size", "contiguous"]),
        (["--no-peers", "--peers", "x.py"], ["--peers", "--no-peers"]),
        (["--dry-run", "--json", "x.json"], ["--json", "--dry-run"]),
        (["--dry-run", "--host"], ["--host", "--dry-run"]),
        (["--from", "x.json", "--host"], ["--host", "--from"]),
        (["--from", "missing.json"], ["missing.json"]),
        (["--plot", "x.pdf"], ["--plot", ".png", "x.pdf"]),
        (["--json", "no/such/folder/x.json"], ["--json", "folder"]),
        (["--repeats", "0"], ["--repeats", "0"]),
        (["--page-size", "0"], ["page_size", "0"]),
    ],
)
def test_options_that_contradict_are_refused(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words)


# Tiles


def test_tiles_file_round_trip(tmp_path: Path) -> None:
    key = TileKey("cuda:90", "bfloat16", 128, 128, 16)
    made = TileTable({key: Tiles(32, 2, 3, 4, 32)}, {key: {"measured": {"us": {"b8-4k": 39.0}}}})
    path = tmp_path / "tiles.json"
    made.save(path)
    back = TileTable.load(path)
    assert back == made
    other = TileKey("cuda:80", "float16", 64, 64, 16)
    both = back.merged(TileTable({other: Tiles(64, 4, 2, 2, 64), key: Tiles(64, 4, 3, 2, 64)}))
    assert both.entries[key].block_n == 64 and other in both.entries and key not in both.about


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int8"}, ["dtype", "int8"]),
        ({"rows": 0}, ["rows", "0"]),
        ({"tiles": dataclasses.asdict(Tiles(32, 4, 1, 1, 48)) | {"block_n": 48}}, ["block_n", "48"]),
        ({"tiles": {"block_n": 64}}, ["num_warps"]),
        ({"tiles": {"block_k": 64}}, ["block_k"]),
        ({"kv_dtype": "bfloat16"}, ["kv_dtype", "float8_e4m3fn", "'bfloat16'"]),
        ({"latent": 1}, ["latent", "True or False", "1"]),
    ],
)  # fmt: skip
def test_tiles_file_refuses(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "tiles.json"
    key = TileKey("cuda:90", "bfloat16", 128, 128, 16)
    TileTable({key: Tiles(32, 2, 3, 4, 32)}).save(path)
    data = json.loads(path.read_text())
    data["entries"][0].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="entry 0") as error:
        TileTable.load(path)
    assert all(word in str(error.value) for word in words)


def test_workspace_takes_a_tiles_file(tmp_path: Path, device: torch.device) -> None:
    config = splitkv.WorkspaceConfig(2, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float16)
    target = Target.of(device)
    key = tune.tile_key(config, target)
    wanted = dataclasses.replace(choose(target, torch.float16, 32, 32, 16), block_n=16)
    path = tmp_path / "tiles.json"
    TileTable({key: wanted}).save(path)
    made = build(dataclasses.replace(SMALL, lens=(40, 7), dtype="float16"), device)
    built_in = choose(target, torch.float16, 32, 32, 16).block_n
    assert built_in != 16
    for tiles, block_n in ((path, 16), (str(path), 16), (TileTable.load(path), 16), (None, built_in)):
        workspace = splitkv.Workspace.allocate(config, device, tiles=tiles)
        plan = splitkv.api.plan_decode(made.q, made.views[0], workspace)
        assert plan.launches[0].constants["BLOCK_N"] == block_n
    with pytest.raises(TypeError, match="tiles"):
        splitkv.Workspace.allocate(config, device, tiles=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp8-b32-4k", "mla-32x8k", "mla-fp8-32x8k"])
def test_tiles_are_told_apart_by_cache(tmp_path: Path, device: torch.device, name: str) -> None:
    """A table's entry holds for caches of its dtype, and for latent rows or for others."""
    small, session = run.dry_session(cells.select([name]), device)
    made, config = session.problem(small[0]), cells.workspace_config(small[0], 3)
    target = Target.of(device)
    key = tune.tile_key(config, target, small[0])
    other = dataclasses.replace(key, kv_dtype="float8_e5m2" if key.kv_dtype else "int8")
    path = tmp_path / "tiles.json"
    candidates = tune.candidates(target, key, {"block_n": [16]})
    TileTable({key: candidates[1], other: dataclasses.replace(candidates[1], block_n=128)}).save(path)
    plan = splitkv.api.plan_decode(
        made.q, made.views[0], splitkv.Workspace.allocate(config, device, tiles=path), **made.rules
    )
    assert plan.launches[0].constants["BLOCK_N"] == 16 != candidates[0].block_n
    plain = dataclasses.replace(key, kv_dtype="", latent=False)
    assert TileTable.load(path).entries.keys() == {key, other} and plain not in (key, other)


def test_candidates_fit_and_start_with_the_built_in_choice() -> None:
    key = TileKey("cuda:90", "bfloat16", 128, 128, 16)
    found = tune.candidates(H200, key, tune.SWEEP)
    assert found[0] == choose(H200, torch.bfloat16, 128, 128, 16)
    assert len(set(found)) == len(found) > 100
    assert any(t.block_n == 128 and t.num_stages == 4 for t in found)
    small = dataclasses.replace(H200, shared_memory=101376)
    assert not any(t.block_n == 128 and t.num_stages >= 3 for t in tune.candidates(small, key, tune.SWEEP))
    with pytest.raises(ValueError, match="blocks"):
        tune.candidates(H200, key, {"blocks": [1]})


def test_sweep_takes_the_fastest_right_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device
) -> None:
    """Times are invented by tile size; answers are real."""
    tiny = dataclasses.replace(SMALL, lens=(20,), num_q_heads=1, num_kv_heads=1, head_dim=16)
    small = [tiny, dataclasses.replace(tiny, name="other", lens=(9,))]
    session = run.Session(small, device, timed=False)
    session.timed = True
    current: list[Tiles] = []
    make = session.workspace

    def workspace(cell: Cell, tiles: TileTable) -> splitkv.Workspace:
        current[:] = tiles.entries.values()
        return make(cell, tiles)

    monkeypatch.setattr(session, "workspace", workspace)
    monkeypatch.setattr(session, "time", lambda launch, copies: (launch(1), 100.0 / current[0].block_n)[1])
    monkeypatch.setattr(tune, "FINALISTS", 2)
    monkeypatch.setattr(session, "copies", lambda cell: 2)
    tuned = tune.sweep_tiles(small, session, {"block_n": (16, 64)})
    assert tuned.tiles.block_n == 64 and not tuned.refused
    assert {t.block_n for t in tuned.times} == {64, tuned.built_in.block_n}  # 16 was left behind on the first cell
    path = tmp_path / "tiles.json"
    tuned.table({"gpu": "none"}).save(path)
    back = TileTable.load(path)
    assert back.entries[tuned.key] == tuned.tiles
    assert back.about[tuned.key]["measured"]["us"] == {"small": 100 / 64, "other": 100 / 64}


def test_tune_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--dry-run", "--cells", "skew", "--block-n", "16", "64", "--programs-per-sm", "2"]
    assert tune.run(argv) == 0
    assert "block_n 64" in capsys.readouterr().out
    assert tune.run([*argv, "--json", "x.json"]) == 2


def test_tune_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.run([]) == 1
    assert "no GPU" in capsys.readouterr().err
