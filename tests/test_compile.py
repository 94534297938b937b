"""What kernels take of GPUs that are not here: they are compiled for each, in processes of their own.

    python tests/test_compile.py --table      writes notebooks/data/kernel_resources.md

With SPLITKV_FULL=1 every combination is compiled (about an hour on two cores) instead of a set that covers them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import queue
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from compiling import GPUS, Case, Used, Worker
from test_presets import LAYERS, Card

from splitkv import tiles
from splitkv.config import cdiv

FULL = os.environ.get("SPLITKV_FULL") == "1"
WIDTHS = ((64, 64), (128, 128), (256, 256), (512, 512), (576, 512))
DTYPES = ("float16", "bfloat16", "float32")
SPILLED = 112
"""Bytes per thread that may spill where tiles are large, rows unaligned or rules many: registers around the loop."""
SHARED_TREE_SPILLED = 128
"""Likewise of a tree in a call over shared keys, under Triton 3.9."""
WIDE_ON_RDNA_SPILLED = 1024
"""Registers on gfx11, whose 256 per lane hold no tile of wider rows than 128, nor of converted ones."""
AROUND_LOOPS_SPILLED = 320
"""Likewise of tall tiles, around the loop alone; over shared keys they leave registers to the programs beside them."""
FEW_SPILLED = 16
"""Likewise in plain decode, there outside the loop over keys, and in the other kernels."""


class Compiler:
    """Worker processes: two, or one where tests are spread over processes already."""

    def __init__(self) -> None:
        count = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
        self._threads = ThreadPoolExecutor(count)
        self._workers = [Worker() for _ in range(count)]
        self._idle: queue.Queue[Worker] = queue.Queue()
        for worker in self._workers:
            self._idle.put(worker)

    def _compile(self, case: Case) -> list[Used] | str:
        worker = self._idle.get()
        try:
            return worker.compile(case)
        finally:
            self._idle.put(worker)

    def compile(self, cases: Iterable[Case]) -> Iterator[tuple[Case, list[Used] | str]]:
        """Each case with what its kernels take, or why it was refused."""
        cases = list(cases)
        return zip(cases, self._threads.map(self._compile, cases), strict=True)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    found = Compiler()
    yield found
    found.close()


# What must hold of whatever is compiled.

DEPENDENT = ("group_kernel", "split_decode_kernel", "merge_splits_kernel")
"""Kernels that start while the one before them ends, on sm_90 and newer."""


def faults(case: Case, used: Used) -> list[str]:
    """What is wrong with what a kernel takes."""
    gpu, target, found = case.gpu, case.gpu.target, []
    if used.shared > target.shared_memory:
        found.append(f"{used.shared} bytes of shared memory, of {target.shared_memory}")
    if used.waits_for_others != (used.kernel in DEPENDENT and not gpu.amd and int(gpu.backend[1]) >= 90):
        found.append(f"dependent launch: {used.waits_for_others}")
    if used.kernel != "split_decode_kernel":
        return found + [f"{used.spills} spilled"] * (used.spills > FEW_SPILLED)
    if used.shared > used.estimate:
        found.append(f"{used.shared} bytes of shared memory, of which the estimate knows {used.estimate}")
    if case.dtype == "float32" and used.continued:
        # The compiler may undo that pieces of float32 products have sums of their own, which no result here shows.
        found.append(f"{used.continued} float32 products that go on from the sum of others")
    shared = used.programs * (used.shared + gpu.reserved_shared)
    # A tree's words take more than the estimate knows: fewer programs run at a time then.
    if shared > target.sm_shared_memory and used.programs > 1 and "tree" not in case.rules:
        found.append(f"{used.programs} programs need {shared} bytes of shared memory, of {target.sm_shared_memory}")
    warps = used.programs * used.num_warps
    if gpu.amd:
        needed, limit = cdiv(warps, 4) * cdiv(used.registers, 8) * 8, gpu.lane_registers
    else:
        needed, limit = warps * 32 * cdiv(used.registers, 8) * 8, gpu.registers
    if needed > limit or warps > gpu.max_warps:
        found.append(f"{used.programs} programs need {needed} registers, of {limit}, and {warps} warps")
    most = SHARED_TREE_SPILLED if {"shared", "tree"} <= set(case.rules) else SPILLED
    if used.rows >= 64 and not case.latent and not used.spills_in_loop:
        most = max(most, AROUND_LOOPS_SPILLED)
    most = most // 4 if gpu.amd else most
    if target.rdna and (case.head_dim > 128 or case.cache or used.rows > 16):
        most = WIDE_ON_RDNA_SPILLED
    if case.cache or case.latent:
        most *= 2  # conversions that are no instructions, and results as wide as values
        if case.latent and used.rows == 64:
            # Results fill the registers, so that what stands around the loop is spilled, and some of its addresses.
            most = 512 if used.spills_in_loop <= 64 else 0
        # Every row of a block takes as many copies as it has pieces of 16 bytes.
        pieces = used.tiles[0] * case.head_dim * case.kv_dtype.itemsize // 16 // (32 * used.num_warps)
        plain = not case.cache or target.converts_float8
        if not gpu.amd and plain and used.tiles[1] > 1 and case.head_dim % 64 == 0 and used.copies < pieces:
            found.append(f"{used.copies} asynchronous copies of 16 bytes")
    elif (
        case.head_dim <= 128 and case.rows == 16 and case.aligned and case.dtype != "float32" and case.arch != "cuda:75"
    ):
        if not set(case.rules) - {"listed"} and (used.spills_in_loop or used.spills > FEW_SPILLED):
            found.append(f"{used.spills} bytes spilled, {used.spills_in_loop} times in the loop")
        if not gpu.amd and used.copies < 8:
            found.append(f"{used.copies} asynchronous copies of 16 bytes")
    if used.spills > most:
        found.append(f"{used.spills} spilled")
    return found


def check(compiler: Compiler, cases: Iterable[Case], what: str = "") -> None:
    """Compile the cases and fail with all that is wrong, or with all faults of which this is said."""
    wrong = []
    for case, answer in compiler.compile(cases):
        if isinstance(answer, str):
            wrong.append(f"{case}: {answer}")
        else:
            wrong += [
                f"{case}: {used.kernel}: {fault}" for used in answer for fault in faults(case, used) if what in fault
            ]
    assert not wrong, "\n".join(wrong)


# Which cases.


def fits(case: Case) -> bool:
    """Whether decode accepts the case's dtype and widths on its GPU; where not, tests below look at the refusal."""
    if case.arch != "cuda:75":
        return True
    return case.dtype != "bfloat16" and case.head_dim <= 256


def product(arch: str) -> Iterator[Case]:
    """All tile configurations of a GPU."""
    for dtype, (k, v), rows, aligned, few in itertools.product(DTYPES, WIDTHS, (16, 64), (True, False), (True, False)):
        yield Case(arch, dtype, k, v, rows, aligned, few, merge=dtype == "bfloat16")


def half_of(arch: str) -> str:
    """The 16-bit dtype that models have on a GPU."""
    return "float16" if arch == "cuda:75" else "bfloat16"


def covering(arch: str) -> Iterator[Case]:
    """Each tile configuration that a GPU gets for a width of 128, and the largest."""
    half = half_of(arch)
    yield Case(arch, half, merge=arch in ("cuda:75", "cuda:90", "hip:gfx942"))
    if arch == "cuda:89":
        return  # as sm_86
    yield Case(arch, "float32", 128)
    yield Case(arch, half, 256 if arch == "cuda:75" else 512, rows=64)
    if arch in ("cuda:80", "cuda:90", "cuda:100"):
        yield Case(arch, "float16", 128, few=True)
    if arch in ("cuda:90", "cuda:100", "hip:gfx942"):
        yield Case(arch, half, 128, rows=64)
    if arch in ("cuda:86", "cuda:90", "hip:gfx942"):
        yield Case(arch, half, 576, 512)
    if arch == "cuda:90":
        yield Case(arch, half, 256, rows=64)
        yield Case(arch, "float32", 512, rows=64)
        yield Case(arch, half, 128, aligned=False)


@pytest.mark.parametrize("arch", GPUS)
def test_tiles_fit(compiler: Compiler, arch: str) -> None:
    """Case 18: shared memory, registers and spills of the tiles that each GPU gets."""
    check(compiler, filter(fits, product(arch) if FULL else covering(arch)))


def layouts(arch: str) -> list[Case]:
    base = Case(arch, merge=True)
    return [
        dataclasses.replace(base, page_size=1),
        dataclasses.replace(base, page_size=64, schedule="tokens"),
        dataclasses.replace(base, page_size=12, schedule="parts"),
        dataclasses.replace(base, layout="contiguous"),
        dataclasses.replace(base, layout="ragged", schedule="tokens"),
        dataclasses.replace(base, layout="csr", schedule="parts"),
    ]


def every_layout(arch: str) -> Iterator[Case]:
    for layout, page, schedule in itertools.product(
        ("paged", "csr", "contiguous", "ragged"), (1, 16, 64, 12), ("balanced", "tokens", "parts")
    ):
        if layout in ("paged", "csr") or page == 16:
            yield Case(arch, layout=layout, page_size=page, schedule=schedule, merge=True)


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "cuda:75"] if FULL else ["cuda:90"])
def test_layouts_and_schedules_neither_spill_nor_lose_copies(compiler: Compiler, arch: str) -> None:
    check(compiler, every_layout(arch) if FULL else layouts(arch))


RULES = (("window", "sinks", "lse"), ("softcap", "noncausal", "alibi"), ("tree",), ("listed",))


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "cuda:75"] if FULL else ["cuda:90"])
def test_score_rules_fit(compiler: Compiler, arch: str) -> None:
    rows = (16, 64) if FULL else (16,)
    check(compiler, (Case(arch, rows=r, rules=rules, merge=True) for rules in RULES for r in rows))


@pytest.mark.parametrize("arch", ["cuda:80", "cuda:90", "cuda:100"] if FULL else ["cuda:90"])
def test_chunks_keep_their_long_blocks_in_registers(compiler: Compiler, arch: str) -> None:
    """Of 64 and of 128 rows: masks are applied at the edges only, and nothing spills within the loop."""
    cases = [Case(arch, rows=rows, rules=rules) for rows in (64, 128) for rules in ((), ("window",), ("softcap",))]
    check(compiler, cases)
    for case, answer in compiler.compile(cases):
        assert not isinstance(answer, str) and not answer[0].spills_in_loop, case
        assert answer[0].rows == case.rows and answer[0].copies >= 8, case
        if arch == "cuda:90":
            assert answer[0].tiles == (64, 3) and answer[0].num_warps == case.rows // 16, case


def trees(arch: str) -> Iterator[Case]:
    """Tree masks over the widest rows, whose blocks leave the least room."""
    half = half_of(arch)
    if FULL:
        for dtype, (k, v), rows in itertools.product(("float32", half), (*WIDTHS, (320, 320), (576, 576)), (16, 32)):
            yield Case(arch, dtype, k, v, rows=rows, rules=("tree",))
        for cache, widths in itertools.product(("", E4M3), ({"head_dim": 320}, LATENT)):
            yield Case(arch, half, cache=cache, rows=32, rules=("tree",), **widths)
    elif arch in ("cuda:86", "cuda:90", "hip:gfx942"):
        yield Case(arch, "float32", 576, rules=("tree",))
        yield Case(arch, half, *((320, 320) if arch == "cuda:90" else (576, 512)), rows=32, rules=("tree",))
    elif arch in ("cuda:80", "cuda:100"):
        yield Case(arch, half, 320, rows=32, rules=("tree",))


@pytest.mark.parametrize("arch", GPUS if FULL else ["cuda:80", "cuda:86", "cuda:90", "cuda:100", "hip:gfx942"])
def test_tree_masks_fit(compiler: Compiler, arch: str) -> None:
    """Their words are copied ahead too, and a GPU refuses to start what takes more memory than it has."""
    check(compiler, filter(fits, trees(arch)), "shared memory")


def test_ragged_queries_and_shared_keys_copy_asynchronously(compiler: Compiler) -> None:
    ragged = Case("cuda:90", rules=("qo_indptr",), merge=True)
    shared = [("shared",), ("shared", "window", "sinks", "lse"), ("shared", "kv_start", "softcap", "alibi"),
              ("shared", "tree")]  # fmt: skip
    csr = Case("cuda:90", layout="csr", schedule="parts", rules=("shared",), merge=True)
    check(compiler, [ragged, csr, *(Case("cuda:90", rules=rules, merge=True) for rules in shared)])


@pytest.mark.parametrize("arch", ["cuda:86", "cuda:100", "hip:gfx942"])
def test_passes_over_shared_keys_fit(compiler: Compiler, arch: str) -> None:
    check(compiler, [Case(arch, rules=("shared", "window"), merge=True), Case(arch, "float32", rules=("shared",))])


def groupings(arch: str) -> Iterator[Case]:
    """Ways to find out what requests share; with SPLITKV_FULL=1 all there are."""
    for layout, window, tokens, rule, starts in itertools.product(
        ("paged", "csr"), ("", "window"), ("", "qo_indptr"), ("", "noncausal", "tree"), ("", "kv_start")
    ):
        found = Case(arch, layout=layout, rules=("shared", *filter(None, (window, tokens, rule, starts))),
                     only="group_kernel")  # fmt: skip
        some = window and (tokens or layout == "csr") and rule != "noncausal" and (rule == "tree") == bool(starts)
        if (FULL or some) and not (layout == "csr" and starts):
            yield found


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "cuda:75"] if FULL else ["cuda:90"])
def test_whatever_requests_share_is_found(compiler: Compiler, arch: str) -> None:
    """Triton 3.6 has failed to compile this kernel for windows."""
    check(compiler, groupings(arch))


E4M3, LATENT = "float8_e4m3fn", dict(head_dim=576, head_dim_v=512, layout="latent", page_size=64)


def formats(arch: str) -> Iterator[Case]:
    """Quantised caches and latent rows: conversions by instructions and without, and the tiles that they get."""
    half = half_of(arch)
    yield Case(arch, half, cache=E4M3)
    if arch == "cuda:75":
        return
    yield Case(arch, half, cache=E4M3, **LATENT)
    if FULL or arch in ("cuda:80", "cuda:90", "cuda:100"):
        yield Case(arch, half, cache="int8")
        yield Case(arch, half, cache=E4M3, rows=64, rules=("token_scales",))
        yield Case(arch, half, **LATENT)
    if FULL or arch == "cuda:90":
        yield from (Case(arch, half, width, cache="float8_e5m2") for width in (64, 96, 256))
        yield Case(arch, half, cache=E4M3, aligned=False)
        if not arch.startswith("hip:"):
            yield Case(arch, "float32", cache=E4M3)
            yield Case(arch, "float32", cache=E4M3, **LATENT)
        yield Case(arch, half, cache=E4M3, layout="contiguous", rules=("listed",) if FULL else ())
        yield from (Case(arch, half, rows=rows, rules=("gaps",) * gaps, **LATENT) for rows, gaps in ((64, 0), (32, 1)))
        yield Case(arch, half, few=True, **LATENT)
        yield Case(arch, half, 320, 256, layout="latent", page_size=1)
        yield Case(arch, half, 24, rows=128, layout="latent")
        yield Case(arch, half, cache=E4M3, rules=("token_scales", "listed"), **LATENT)
    if arch == "hip:gfx942":
        yield from (Case(arch, half, cache=cache) for cache in ("float8_e4m3fnuz", "float8_e5m2fnuz"))


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "hip:gfx90a" or FULL])
def test_formats_fit(compiler: Compiler, arch: str) -> None:
    """Case 28: quantised caches compile for GPUs with and without 8-bit floats."""
    check(compiler, formats(arch))


@pytest.mark.parametrize("arch", GPUS if FULL else ["cuda:75", "cuda:90", "hip:gfx942"])
def test_other_kernels_compile(compiler: Compiler, arch: str) -> None:
    cases = [Case(arch, half_of(arch), others=True)]
    [(_, answer)] = compiler.compile(cases)
    assert not isinstance(answer, str), answer
    assert {used.kernel for used in answer} == {
        "merge_kernel", "append_kernel", "move_kernel", "attention_mask_kernel", "position_mask_kernel", "read_kernel",
        "pack_tree_mask_kernel", "tree_mask_from_parents_kernel",
        "work_list_kernel",
        "stage_kernel", "bind_kernel", "advance_kernel", "new_tokens_kernel",
    }  # fmt: skip
    assert not [fault for used in answer for fault in faults(cases[0], used)]


def preset(arch: str, card: Card, layer: int) -> Case:
    """A layer of a model: its geometry and rules, as in the README's table."""
    rules = [name for name, on in (
        ("window", card.window_of(layer)), ("softcap", card.softcap), ("sinks", card.sinks), ("alibi", card.alibi),
    ) if on]  # fmt: skip
    heads, group = card.num_kv_heads, card.num_q_heads // card.num_kv_heads
    return Case(arch, half_of(arch), card.head_dim, rules=tuple(rules), heads=heads, group=group)


def presets() -> Iterator[Case]:
    """Every layer of every model on some GPU, and every GPU with some; with SPLITKV_FULL=1 all of them on all."""
    for number, (card, layer) in enumerate(LAYERS):
        for place, arch in enumerate(GPUS):
            if FULL or number % len(GPUS) == place:
                yield preset(arch, card, layer)


def test_presets_fit(compiler: Compiler) -> None:
    cases = list(presets())
    assert {case.arch for case in cases} == set(GPUS) and len({str(case).split(" ", 2)[2] for case in cases}) >= 10
    check(compiler, cases)


# What is refused.


def test_bfloat16_is_refused_before_sm_80(compiler: Compiler) -> None:
    [(_, answer)] = compiler.compile([Case("cuda:75", "bfloat16")])
    assert isinstance(answer, str)
    for word in ("TypeError", "cuda:75", "bfloat16"):
        assert word in answer


def test_numbers_that_a_gpu_lacks_are_refused(compiler: Compiler) -> None:
    cases = [Case(arch, cache="float8_e4m3fnuz") for arch in ("cuda:90", "hip:gfx90a")]
    for case, answer in compiler.compile(cases):
        assert isinstance(answer, str), answer
        for word in ("TypeError: kv", case.arch, case.cache):
            assert word in answer


def test_widths_without_room_are_refused_with_the_limit(compiler: Compiler) -> None:
    for case, answer in compiler.compile([Case("cuda:75", "float16", 512), Case("cuda:75", "float32", 576, 512)]):
        assert isinstance(answer, str), answer
        for word in ("head_dim", str(case.head_dim), "65536", "cuda:75"):
            assert word in answer


def test_choices_measured_on_hopper_stay() -> None:
    target = GPUS["cuda:90"].target
    for dtype in (torch.float16, torch.bfloat16):
        few = tiles.choose(target, dtype, 128, 128, 16, blocks=tiles.Blocks.LONG)
        many = tiles.choose(target, dtype, 128, 128, 16)
        assert few == tiles.Tiles(64, 4, 3, 2, 64, tile_cost=128)
        assert many == tiles.Tiles(32, 4, 3, 4, 32, tile_cost=64, max_registers=128)
        assert tiles.choose(target, dtype, 128, 128, 64) == tiles.Tiles(64, 4, 3, 2, 64, tile_cost=128)


# The table.


def table(versions: str, compiler: Compiler) -> str:
    cases = [
        Case(arch, dtype, k, v, rows, aligned, few)
        for dtype, k, v, rows, aligned, few in (
            ("bfloat16", 64, 64, 16, True, False),
            ("bfloat16", 128, 128, 16, True, False),
            ("bfloat16", 128, 128, 16, True, True),
            ("bfloat16", 128, 128, 64, True, False),
            ("bfloat16", 128, 128, 128, True, False),
            ("bfloat16", 128, 128, 16, False, False),
            ("bfloat16", 256, 256, 16, True, False),
            ("bfloat16", 256, 256, 64, True, False),
            ("bfloat16", 576, 512, 16, True, False),
            ("bfloat16", 576, 512, 64, True, False),
            ("float32", 128, 128, 16, True, False),
        )
        for arch in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
    ]
    lines = [
        "# What split_decode_kernel takes of a GPU",
        "",
        f"Compiled by {versions} for GPUs that were not there: `python tests/test_compile.py --table`. Paged, pages of",
        "16 tokens, balanced schedule. Tiles are tokens per block × stages × warps; programs are those meant to share",
        "a multiprocessor. Registers are per thread, shared memory per program, spills in bytes per thread (gfx942:",
        "registers); last how many loads and stores of spilled ones the loops over keys have (gfx942: all).",
        "",
        "| widths | dtype | rows | K, V rows | query tiles | GPU | tiles | programs | registers | shared | spills "
        "| in loops |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, answer in compiler.compile(cases):
        if isinstance(answer, str):
            raise RuntimeError(f"{case}: {answer}")
        used = answer[0]
        lines.append(
            f"| {case.head_dim}, {case.width_v} | {case.dtype} | {used.rows} "
            f"| {'aligned' if case.aligned else 'unaligned'} | {'few' if case.few else 'many'} | {case.arch} "
            f"| {used.tiles[0]} × {used.tiles[1]} × {used.num_warps} | {used.programs} | {used.registers} "
            f"| {used.shared} | {used.spills} | {used.spills_in_loop} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What kernels take of GPUs that are not here.")
    parser.add_argument("--table", action="store_true", required=True, help="write notebooks/data/kernel_resources.md")
    parser.parse_args()
    compiler = Compiler()
    try:
        text = table(f"Triton {triton.__version__}", compiler)
    finally:
        compiler.close()
    path = Path(__file__).parent.parent / "notebooks" / "data" / "kernel_resources.md"
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
