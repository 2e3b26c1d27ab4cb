"""Counts the tests, for the table of `docs/how-we-know.md`.

    PYTHONPATH=src python tools/count_tests.py      # collects all tests; `make pages` then makes the table

`tests/project/test_pages.py` fails where there are fewer than are written in `benchmarks/results/tests.json`. More are
no error, so a new test needs no new table.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

from _measure import RESULTS, save  # noqa: E402

COUNTS = RESULTS / "tests.json"
GROUPS = {
    "laws": "laws/test_law_*.py",
    "planner_laws": "laws/test_planner.py",
    "odd_models": "planner/test_odd_models.py",
    "ranks": "distributed/test_*.py",
    "names": "core/test_torch_shims.py",
    "others": "compat/test_*.py",
}
"""Files whose tests are counted."""


def in_tables() -> dict[str, int]:
    """How many rows the tables have that a test goes through, and how many programs are drawn."""
    drawn = re.compile(r'"TORCH_RECOMPUTE_PROGRAMS", "(\d+)"')
    program, elastic = (
        int(drawn.findall((TESTS / "laws" / f"test_{name}.py").read_text("utf-8"))[0])
        for name in ("random_programs", "elastic")
    )
    return {
        "programs": len(importlib.import_module("laws.cases").CASES),
        "placements": len(importlib.import_module("laws.placements").PLACEMENTS),
        "random": program,
        "elastic": elastic // 4,
        "messages": (TESTS / "project" / "messages.txt").read_text("utf-8").count("\n### "),
    }


def in_groups(paths: Iterable[Path]) -> dict[str, int]:
    """How many tests, each given by its file, are in each group; groups of which a file is missing are left out."""
    found = Counter(paths)
    groups = {name: [*TESTS.glob(pattern)] for name, pattern in GROUPS.items()}
    return {name: sum(found[file] for file in files) for name, files in groups.items() if all(map(found.get, files))}


def collected() -> list[Path]:
    """The file of each test."""
    found: list[Path] = []

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.extend(item.path for item in session.items)

    pytest.main(["--collect-only", "-qq", str(TESTS)], plugins=[Plugin()])
    return found


def main() -> None:
    """Counts, and writes the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(TESTS))
    groups = in_groups(collected())  # first: pytest rewrites assertions of what it imports itself
    found = {**in_tables(), **groups}
    written = save(COUNTS.stem, {"counts": found}, command="PYTHONPATH=src python tools/count_tests.py")
    sys.stdout.write(f"written: {written}\n")


if __name__ == "__main__":
    main()
