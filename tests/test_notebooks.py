"""Every notebook runs from top to bottom, and is kept with the outputs of such a run.

`make notebooks` runs this file as a script, which writes the outputs back. `python tests/test_notebooks.py 05` does so
for those whose names begin with 05.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def run_notebook(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    # Without the times of each cell, and with what a cell prints in one piece, so that running a notebook again changes
    # only what its outputs change.
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # that nothing is encrypted on its way within this machine
        resources={"metadata": {"path": str(path.parent)}},
    )
    return client.execute()


def printed(notebook: Any) -> dict[str, str]:
    """What its cells print, by the cell's id, without what another processor may round in another way."""
    texts = {}
    for cell in notebook.cells:
        outputs = cell.outputs if cell.cell_type == "code" else []
        text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
        texts[cell.id] = re.sub(r"\d+\.\d+(e[-+]\d+)?", "~", re.sub(r"\x1b\[[\d;]*m", "", text))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, device: torch.device) -> None:
    nbformat = pytest.importorskip("nbformat")
    fresh = printed(run_notebook(path))
    if device.type != "cpu" or any("Random weights" in text for text in fresh.values()):
        return  # kept is a run without a GPU, with everything installed
    kept = printed(nbformat.read(path, as_version=4))
    # Records of speed are measured elsewhere, and are not held to be drawn at once.
    assert fresh == kept or path.stem == "05_speed", "what is kept is not what it prints now: make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_as_one_clean_run_left_it(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" and cell.source]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]


if __name__ == "__main__":
    import nbformat

    for path in NOTEBOOKS:
        if not path.stem.startswith(tuple(sys.argv[1:]) or ""):
            continue
        print(f"running {path.name}", flush=True)
        nbformat.write(run_notebook(path), path)
