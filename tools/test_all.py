"""Runs all that checks the project, the parts that `make test` leaves out included, and prints one line for each part.

    python tools/test_all.py                    # `make test-all`; hours on two cores
    python tools/test_all.py distributed docs   # only parts whose names hold one of these words

`make test` answers in minutes, so it runs the tests that are not marked `nightly`. This program runs them, then the
marked ones folder by folder, a thousand random programs in place of three hundred, and the planted faults of
`plant_faults.py`; last it prints how old each committed result is. What a part printed is in `test-all/`; a part that
fails is shown with its last lines, and the next one runs.

Exit status: 0 if every part passed, 1 if one failed, 2 if no part has such a name.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LOGS = ROOT / "test-all"
BIN = Path(sys.executable).parent
PYTEST = (sys.executable, "-m", "pytest", "-q", "--dist", "loadgroup", "--timeout", "900", "-r", "fE")
INSTALLED = {"OMP_NUM_THREADS": "1", "TORCH_RECOMPUTE_TEST_INSTALLED": "1"}
NOTHING_SELECTED = 5  # pytest's exit status where no test is selected
COUNTED = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)
TAIL = 15  # lines of a part that failed


class Part(NamedTuple):
    """A command and what its environment has besides.

    Attributes:
        name: Stands in the table.
        command: The program and its arguments, run in the root of the repository.
        environment: Variables that are set for it.
        shown: Whether its own lines are printed, too.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    shown: bool = False


def parts(jobs: str) -> list[Part]:
    """The parts in the order in which they run: what fails soonest first."""
    pytest = (*PYTEST, "-n", jobs)
    folders = sorted(path.name for path in TESTS.iterdir() if next(path.glob("test_*.py"), None))
    pyright = (str(BIN / "pyright"), "--pythonpath", sys.executable)
    return [
        Part("lint", (str(BIN / "ruff"), "check", ".")),
        Part("format", (str(BIN / "ruff"), "format", "--check", ".")),
        Part("spelling", (str(BIN / "codespell"),)),
        Part("types of src", pyright),
        Part("types of benchmarks and tools", (*pyright, "-p", "benchmarks")),
        Part("tests of `make test`", (*pytest, "-m", "not nightly"), INSTALLED),
        *(Part(f"nightly tests of {name}", (*pytest, "-m", "nightly", f"tests/{name}"), INSTALLED) for name in folders),
        Part(
            "1,000 random programs",
            (*pytest, "tests/laws/test_random_programs.py", "tests/laws/test_elastic.py"),
            {**INSTALLED, "TORCH_RECOMPUTE_PROGRAMS": "1000"},
        ),
        Part("planted faults", (sys.executable, "tools/plant_faults.py", "--jobs", jobs), shown=True),
        Part("age of results", (sys.executable, "tools/pages.py", "--stale"), shown=True),
    ]


def run(part: Part) -> bool:
    """Runs a part and prints its line: whether it passed, what its last line counts, and how long it took."""
    log = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', part.name.lower()).strip('-')}.txt"
    began = time.monotonic()
    environment = {**os.environ, **part.environment}
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(part.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    printed = log.read_text(encoding="utf-8", errors="replace")
    seconds = time.monotonic() - began
    counted = COUNTED.findall(printed)
    passed = done.returncode == 0 or (done.returncode == NOTHING_SELECTED and "nightly" in part.name)
    said = counted[-1] if counted else ""
    sys.stdout.write(f"{'passed' if passed else 'FAILED'}  {part.name:34} {seconds:6.0f} s  {said}\n")
    lines = printed.rstrip("\n").split("\n")
    if part.shown or not passed:
        sys.stdout.write("".join(f"        {line}\n" for line in (lines if part.shown else lines[-TAIL:])))
    sys.stdout.flush()
    return passed


def main() -> int:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only parts whose names hold one of these")
    parser.add_argument("--jobs", default="2", help="processes of pytest (2)")
    parser.add_argument("--list", action="store_true", help="print the names of the parts, and run none")
    options = parser.parse_args()
    every = parts(options.jobs)
    chosen = [part for part in every if not options.words or any(word in part.name for word in options.words)]
    if not chosen:
        sys.stderr.write(f"no part's name holds {' or '.join(options.words)}; the parts are:\n")
    if options.list or not chosen:
        sys.stdout.write("".join(f"{part.name}\n" for part in every))
        return 0 if chosen else 2
    LOGS.mkdir(exist_ok=True)
    passed = [run(part) for part in chosen]
    sys.stdout.write(f"{sum(passed)} of {len(passed)} parts passed; what they printed is in {LOGS.name}/\n")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
