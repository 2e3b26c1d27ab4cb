"""The notebooks of the manual run from top to bottom, and hold the outputs of such a run."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def kinds(notebook: Any) -> list[list[tuple[str, ...]]]:
    """The kinds of the outputs of each cell of code."""

    def kind(output: Any) -> tuple[str, ...]:
        return output["output_type"], *sorted(output.get("data", {})), output.get("name", "")

    return [[kind(one) for one in cell["outputs"]] for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.nightly
def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs without an error, and has the kinds of outputs that the repository keeps."""
    why = "the kernel of notebooks is not installed (its pin needs Python 3.11)"
    for package in ("ipykernel", "transformers", "nbclient", "nbformat"):
        pytest.importorskip(package, reason=why)
    if not (ROOT / "tools" / "notebooks.py").is_file():
        pytest.skip("the tools are not part of this archive")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    slow = tmp_path / "slow.ipynb"
    cell = {"cell_type": "code", "execution_count": None, "id": "slow", "metadata": {}, "outputs": []}
    cell["source"] = "import time\nprint(1, flush=True)\ntime.sleep(0.5)\nprint(2)"
    slow.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), "utf-8")
    made = importlib.import_module("notebooks").executed([*NOTEBOOKS, slow], tmp_path)
    assert kinds(made.pop(slow)) == [[("stream", "stdout")]], "what a cell prints is one output, however slowly"
    for path, notebook in made.items():
        assert kinds(notebook) == kinds(json.loads(path.read_text("utf-8"))), "python tools/notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_keep_their_outputs(path: Path) -> None:
    """A reader sees results without running anything: no error, nothing on stderr, nothing of the machine."""
    notebook = json.loads(path.read_text("utf-8"))
    found = [one for cell in kinds(notebook) for one in cell]
    assert any(one[0] == "execute_result" and "text/html" in one for one in found)
    assert not [one for one in found if one[0] == "error" or one[-1] == "stderr"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [word for word in ("/home/", "/tmp/", "/work/", "site-packages") if word in path.read_text("utf-8")]


def test_there_are_notebooks() -> None:
    """The three that the quick start names are there."""
    assert {path.stem for path in NOTEBOOKS} == {"fine-tune", "report", "experts"}
