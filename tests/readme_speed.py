"""The README's table of speed, made from the record: `python tests/readme_speed.py` writes it anew."""

import dataclasses
import re
from pathlib import Path

from splitkv.bench import table
from splitkv.bench.cells import GRID
from splitkv.bench.peers import DENSE
from splitkv.bench.record import Figures, Measured, Record, Timing

ROOT = Path(__file__).parents[1]
DATA = ROOT / "notebooks" / "data"
PEERS = {
    "FA3": "fa3",
    "vLLM": "vllm_triton",
    "SGLang": "sglang_triton",
    "XQA*": "XQA (listed)",
    "FlashInfer*": "FlashInfer (listed)",
    "SDPA†": "SDPA",
}
TABLE = re.compile(r"(?<=<!-- speed table: begin -->\n)(.*?\n\n)(\| cell .*?)(?=\n\n)", re.DOTALL)


def load() -> tuple[Record, Figures, list[Measured]]:
    """The record, listed figures, and the cells of the grid as the table has them."""
    record, figures = Record.load(DATA / "h200_decode.json"), Figures.load(DATA / "reference_figures.json")
    names = [cell.name for cell in GRID]
    cells = sorted((m for m in record.cells if m.label in names), key=lambda m: names.index(m.label))
    return record, figures, cells


def microseconds(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def speed_table() -> str:
    """The table in Markdown."""
    record, figures, cells = load()
    header = ("cell", "limit", "ours, list", "ours, scan", "limit ÷ ours", *PEERS)
    rows = []
    for m in cells:
        best, rivals = m.best_of_ours(), table.rivals(m, record, figures)
        assert m.sol_us is not None and best is not None and best[1].us is not None
        ours = [microseconds(m.ours.get(name, Timing()).us) for name in ("list", "scan")]
        peers = [microseconds(rivals.get(name, Timing()).us) for name in PEERS.values()]
        rows.append((m.label, microseconds(m.sol_us), *ours, f"{m.sol_us / best[1].us:.2f}", *peers))
    return table.markdown(table.TextTable("", header, rows))


def mean_over_paged_peers() -> float:
    """Geometric mean of the best paged peer's time over ours."""
    record, figures, cells = load()
    paged = [
        dataclasses.replace(m, peers={name: timing for name, timing in m.peers.items() if name not in DENSE})
        for m in cells
    ]
    mean = table.summarise(Record(record.runs, paged), figures).mean
    assert mean is not None
    return mean


if __name__ == "__main__":
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(TABLE.sub(lambda found: found[1] + speed_table(), text), encoding="utf-8")
    print(f"geometric mean of the best paged peer's time over ours: {mean_over_paged_peers():.2f}")
