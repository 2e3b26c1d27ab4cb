"""Runs the tests under each supported release of torch, each in an environment of its own, and prints one table.

    python tools/matrix.py                            # 2.11 to the newest that the index has; `make matrix`
    python tools/matrix.py 2.11.0 2.14.1 --save       # these, into benchmarks/results/matrix.json
    python tools/matrix.py 2.11.0 tests/core tests/laws   # only some tests

Of each minor release the last patch is taken. `make TORCH=2.14.1` makes the environment in `.venv-2.14.1` and installs
the built wheel there. It takes 5 GB: what the index has for Linux is a build for CUDA, which runs without a device as
well. With `--save`, the rows of other releases stay as they are, and `tools/pages.py` writes the table of
docs/compatibility.md again.

Exit status: 0 if nothing failed, 1 if a test failed, 2 if an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _measure import RESULTS, checked_out, save, today  # noqa: E402

SAVED = RESULTS / "matrix.json"
ELSEWHERE = "under other releases of torch, each in an environment of its own"
OLDEST = 2, 11


def releases(listed: str) -> list[str]:
    """The last patch of each supported minor release, the oldest first, of what `pip index versions torch` prints."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for text in re.findall(r"\d+\.\d+\.\d+(?![\w.+])", listed.partition("Available versions:")[2].splitlines()[0]):
        major, minor, patch = map(int, text.split("."))
        if (major, minor) >= OLDEST:
            found[major, minor] = max(found.get((major, minor), ()), (major, minor, patch))
    return [".".join(map(str, found[minor])) for minor in sorted(found)]


def counted(report: Path) -> dict[str, Any]:
    """The tests of a report in JUnit's format: how many passed, failed and were skipped, and those that failed."""
    cases = [*ElementTree.parse(report).iter("testcase")]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname', '')}::{case.get('name', '')}" for case in failed],
    }


def tried(release: str, tests: list[str], jobs: str) -> dict[str, Any] | None:
    """The row of a release; None where its environment could not be made."""
    pinned = f"torch=={release}" in (ROOT / "constraints.txt").read_text("utf-8").split()
    venv = ROOT / (".venv" if pinned else f".venv-{release}")
    stamps = [f"{venv.name}/.stamp-{what}" for what in ("installed", "dev")]
    if subprocess.run(["make", *([] if pinned else [f"TORCH={release}"]), *stamps], cwd=ROOT).returncode:
        return None
    report, python = venv / "junit.xml", str(venv / "bin" / "python")
    report.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "-n",
            jobs,
            "--dist",
            "worksteal",
            "--timeout",
            "600",
            f"--junitxml={report}",
            *tests,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_RECOMPUTE_TEST_INSTALLED": "1"},
    )
    minutes = round((time.monotonic() - began) / 60, 1)
    said = subprocess.run(
        [python, "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {
        "torch": said[1],
        "python": said[0],
        "tests": tests or ["all"],
        **counted(report),
        "minutes": minutes,
        "date": today(),
        "commit": checked_out(),
    }


def main() -> int:
    """Runs the tests and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help="releases of torch, as 2.14.1, and paths of tests (all of both)")
    parser.add_argument("--jobs", default="2", help="processes of pytest (2)")
    parser.add_argument("--save", action="store_true", help="write the rows into benchmarks/results/matrix.json")
    options = parser.parse_args()
    wanted = [one for one in options.what if re.fullmatch(r"\d+\.\d+\.\d+", one)]
    tests = [one for one in options.what if one not in wanted]
    if not wanted:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True
        )
        wanted = releases(listed.stdout) if "Available versions:" in listed.stdout else []
        if not wanted:
            sys.stderr.write(f"the index does not say which releases of torch it has: {listed.stderr.strip()}\n")
            return 2
    rows = [(release, tried(release, tests, options.jobs)) for release in wanted]
    for release, row in rows:
        if row is None:
            sys.stdout.write(f"{release:10} no environment could be made\n")
            continue
        sys.stdout.write(
            f"{row['torch']:14} Python {row['python']:8} {row['passed']:6} passed {row['failed']:4} failed "
            f"{row['skipped']:4} skipped, {row['minutes']} minutes\n"
        )
        sys.stdout.write("".join(f"    {name}\n" for name in row["failures"]))
    found = [row for _, row in rows if row is not None]
    if options.save:
        known = json.loads(SAVED.read_text("utf-8"))["rows"] if SAVED.is_file() else []
        new = {row["torch"]: row for row in [*known, *found]}
        ordered = sorted(
            new.values(), key=lambda row: [int(part) for part in row["torch"].partition("+")[0].split(".")]
        )
        of_torch = ", ".join(row["torch"] for row in ordered)
        save(SAVED.stem, {"torch": of_torch, "rows": ordered}, elsewhere=ELSEWHERE)
    return 2 if len(found) < len(rows) else int(any(row["failed"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
