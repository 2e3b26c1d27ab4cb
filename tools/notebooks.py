"""Runs the notebooks of the manual, and keeps their outputs in them: `docs/notebooks/*.ipynb`.

    python tools/notebooks.py      # half a minute

A reader sees what each cell prints without running it. One kernel runs all notebooks, one after the other, and forgets
each one's names. `tests/project/test_notebooks.py` runs them again and compares the kinds of outputs, not the figures.
`mkdocs_hooks.py` makes a page of each.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def executed(paths: Iterable[Path], folder: Path) -> dict[Path, Any]:
    """The notebooks with the outputs of their cells.

    Args:
        paths: The notebooks.
        folder: Where they run, and where IPython keeps its files.
    """
    import nbclient
    import nbformat

    notebooks = {path: nbformat.read(path, as_version=4) for path in paths}
    together = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        together.cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]
    # The kernel sends what a cell prints in parts, by the clock: one output of each stream, on a busy machine too.
    run = nbclient.NotebookClient(
        together,
        timeout=240,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    # A warning is of the packages on this machine.
    run.execute(env={**os.environ, "IPYTHONDIR": str(folder), "PYTHONWARNINGS": "ignore"})
    for notebook in notebooks.values():
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for number, cell in enumerate(code, 1):
            cell.execution_count, cell.metadata = number, {}
            cell.outputs = [one for one in cell.outputs if one.get("data", {}).get("text/html", "...")]  # said and gone
            for output in cell.outputs:
                output.pop("transient", None)
                if "execution_count" in output:
                    output.execution_count = number
    return notebooks


def main() -> None:
    """Runs the notebooks, and writes them."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        for path, notebook in executed(sorted(NOTEBOOKS.glob("*.ipynb")), Path(folder)).items():
            path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"written: docs/notebooks/{path.name}\n")


if __name__ == "__main__":
    main()
