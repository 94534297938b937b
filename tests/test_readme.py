"""Every Python block of README.md runs, in order, and does what the text says."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import readme_speed
import torch

import splitkv
from splitkv import testing
from splitkv.bench.record import Record

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = [str(path.relative_to(ROOT)) for path in ROOT.glob("notebooks/*.ipynb")]
BLOCKS = list(re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def left() -> list[dict[str, Any]]:
    """The names that there are after each block, which uses those of the blocks before it."""
    names: dict[str, Any] = {}
    after = []
    torch.manual_seed(0)
    for block in BLOCKS:
        line = README[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], "README.md", "exec"), names)  # errors name the README's own line
        after.append({name: value.clone() if name == "out" else value for name, value in names.items()})
    return after


def test_every_python_block_is_run() -> None:
    assert len(BLOCKS) == README.count("```python") == 7


def test_the_example_decodes(left: list[dict[str, Any]]) -> None:
    names = left[0]
    assert names["out"].shape == (4, 32, 128)
    testing.expect(names["q"], names["kv"]).check(names["out"])


def test_the_parts_merge_into_the_whole(left: list[dict[str, Any]]) -> None:
    names = left[1]
    whole = splitkv.ContiguousKV(names["k"], names["v"], 2 * names["lens"])
    testing.expect(names["q"], whole).check(names["merged"], names["lse"])


@pytest.mark.parametrize("block", range(2, 7), ids=["FlashAttention", "FlashInfer", "SGLang", "vLLM", "AstrAI"])
def test_calls_of_other_libraries_become_these(left: list[dict[str, Any]], block: int) -> None:
    names = left[block]
    caches, lens, table = (names["k_cache"], names["v_cache"]), names["seq_lens"], names["page_table"]
    if block == 6:
        caches = tuple(names[name].view(64, 16, 8, 128) for name in ("k_buffer", "v_buffer"))
    if block in (4, 6):
        rows = names["req_pool_indices"]
        lens, table = lens[rows], table[rows]
    expected = testing.expect(names["q"][: len(lens)], splitkv.PagedKV(*caches, table, lens))
    expected.check(names["out"].view_as(expected.out), names["lse2"] * math.log(2) if block == 3 else None)
    if block == 6:
        last = [int(table[b, (n - 1) // 16]) * 16 + (n - 1) % 16 for b, n in enumerate(lens.tolist())]
        assert torch.equal(names["k_buffer"][last], names["new_k"]) and torch.equal(
            names["v_buffer"][last], names["new_v"]
        )


def test_figures_of_speed_are_the_records() -> None:
    """`python tests/readme_speed.py` writes the table; the words around it are written by hand."""
    found = readme_speed.TABLE.search(README)
    assert found is not None and found[2] == readme_speed.speed_table()
    assert f"geometric mean of {readme_speed.mean_over_paged_peers():.2f}" in README
    assert all(run["date"][:10] in found[1] for run in readme_speed.load()[0].runs)


OTHER_CELLS = {
    "tree of 4 draft tokens, b8-4k": ("rules", "tree-b8-4k"),
    "gpt-oss, 64/8 heads of 64, sinks, 32 × 8192": ("rules", "gpt-oss-full"),
    "gpt-oss, its window of 128": ("rules", "gpt-oss-window"),
    "Gemma-2, 16/8 heads of 256, softcap, 32 × 8192": ("rules", "gemma-2-full"),
    "Gemma-2, its window of 4096": ("rules", "gemma-2-window"),
    "chunks of 512 tokens over 8192, 4 requests": ("rules", "extend-512"),
    "chunks of 2048 tokens over 8192, 4 requests": ("rules", "extend-2048"),
    "e4m3 cache, b32-4k": ("formats", "fp8-b32-4k"),
    "e4m3 cache, b128-1k": ("formats", "fp8-b128-1k"),
    "MLA, 16 heads, 1 × 8192": ("formats", "mla-1x8k"),
    "MLA, 16 heads, 32 × 8192": ("formats", "mla-32x8k"),
    "MLA, 16 heads, 128 × 4096": ("formats", "mla-128x4k"),
    "MLA, 128 heads, 64 × 4096": ("formats", "mla-h128-64x4k"),
}
PEERS = {"FA3": "fa3", "vLLM": "vllm_triton", "vLLM's tree": "vllm_triton", "FlashMLA": "flashmla"}


@pytest.mark.parametrize("label", OTHER_CELLS)
def test_other_figures_of_speed_are_the_records(label: str) -> None:
    """The limit, ours and peers that are named, as far as they are written out."""
    file, name = OTHER_CELLS[label]
    record = Record.load(readme_speed.DATA / f"h200_{file}.json")
    measured = next(m for m in record.cells if m.cell.name == name)
    row = re.search(rf"^\| {re.escape(label)} \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", README, re.MULTILINE)
    best = measured.best_of_ours()
    assert row is not None and best is not None
    beside = re.findall(rf"({'|'.join(PEERS)}) ([\d.]+)", row[3])
    told = [(row[1], measured.sol_us), (row[2], best[1].us)]
    told += [(text, measured.peers[PEERS[peer]].us) for peer, text in beside]
    for text, us in told:
        digits = len(text.partition(".")[2])
        assert us is not None and float(text) == round(us, digits), (text, us)


def test_engine_table_is_the_record():
    rows = json.loads((readme_speed.DATA / "h200_engine.json").read_text(encoding="utf-8"))["rows"]
    names = {
        "transformers' SDPA, static cache, compiled": "transformers, sdpa, compiled",
        'the same with `attn_implementation="splitkv"`': "transformers, splitkv, compiled",
        "the engine, a CUDA graph per step": "engine, CUDA graph",
        "the engine, compiled as well": "engine, CUDA graph, compiled",
    }
    for label, way in names.items():
        speeds = {row["batch"]: row["tokens_per_s"] for row in rows if row["way"] == way}
        assert f"| {label} | {speeds[1]:,.0f} | {speeds[32]:,.0f} |" in README


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARGUMENTS.md", "SECURITY.md", *sorted(NOTEBOOKS)])
def test_files_that_a_page_links_to_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_every_notebook_is_in_the_readme() -> None:
    assert NOTEBOOKS and all(f"]({page})" in README for page in NOTEBOOKS)


def test_names_that_contributing_gives_exist() -> None:
    """Of files, and of what stands in them: whoever renames one finds the page that speaks of it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text[text.index("## Where things are added") :]
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("splitkv/**/*.py")))
    names = set(re.findall(r"`([\w./]+)`", text)) - {"make"}
    assert len(names) > 40
    for name in names:
        if "/" in name or name.endswith(".py"):
            assert (ROOT / name).exists() or any(ROOT.glob(f"splitkv/**/{name}")), name
        else:
            assert re.search(rf"\b{name.rpartition('.')[2]}\b", sources), name
