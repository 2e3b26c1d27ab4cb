"""The notebooks of the manual run from top to bottom, and are kept without results."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs without an error; what is kept in the repository has no results, which would grow old.

    One kernel runs them all, one after the other, and forgets each one's names.
    """
    why = "the kernel of notebooks is not installed (its pin needs Python 3.11)"
    pytest.importorskip("ipykernel", reason=why)
    pytest.importorskip("transformers", reason=why)
    nbclient: Any = pytest.importorskip("nbclient", reason=why)
    nbformat: Any = pytest.importorskip("nbformat", reason=why)
    all_cells = nbformat.v4.new_notebook()
    parts: list[list[Any]] = []
    for path in NOTEBOOKS:
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert [cell for cell in code if cell.outputs or cell.execution_count] == [], path
        all_cells.cells += [*code, nbformat.v4.new_code_cell("%reset -f")]
        parts.append(code)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    nbclient.NotebookClient(all_cells, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for code in parts:
        assert any(output.output_type == "execute_result" for cell in code for output in cell.outputs)


def test_there_are_notebooks() -> None:
    """The three that the quick start names are there."""
    assert {path.stem for path in NOTEBOOKS} == {"fine-tune", "report", "experts"}
