"""The notebooks of the manual run from top to bottom, in a kernel of their own, and are kept without results."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs without an error; what is kept in the repository has no results, which would grow old."""
    why = "the kernel of notebooks is not installed (its pin needs Python 3.11)"
    pytest.importorskip("ipykernel", reason=why)
    pytest.importorskip("transformers", reason=why)
    nbclient: Any = pytest.importorskip("nbclient", reason=why)
    nbformat: Any = pytest.importorskip("nbformat", reason=why)
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(output.output_type == "execute_result" for cell in code for output in cell.outputs)


def test_there_are_notebooks() -> None:
    """The three that the quick start names are there."""
    assert {path.stem for path in NOTEBOOKS} == {"fine-tune", "report", "experts"}
