"""Plants one-line faults into the package, one after the other, and says which test catches each.

    python tools/plant_faults.py                            # every row of `faults.py`; `make faults`
    python tools/plant_faults.py generators-of-two-threads room-for-one-less   # some of them
    python tools/plant_faults.py --list                     # only says which there are
    python tools/plant_faults.py --save faults              # and writes benchmarks/results/faults.json

Problem. Tests that pass do not say what they would see.

Idea. A fault is planted into a copy of `src`, and the tests that should see it run on that copy, up to the first that
fails: those of the fast tier, without `nightly` and `gpu`. It is caught if that test passes on the copy without the
fault. A fault that cannot be imported, and one at which tests cannot even be collected, is not caught but an error.

Exit status: 0 if each fault was caught, 1 if one was missed, 2 if one could not be tried, as where its text is gone.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "torch_recompute")
TOTAL = 3600  # seconds
PYTEST = (
    *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=120"),
    *("-m", "not nightly and not gpu"),
)
IMPORTS = (
    "import importlib, sys, torch_recompute\n"
    "importlib.import_module(sys.argv[1])\n"
    "assert torch_recompute.__file__.startswith(sys.argv[2]), torch_recompute.__file__"
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
CAUGHT, MISSED, ERROR = "caught", "MISSED", "ERROR"


class Tried(NamedTuple):
    """What became of a fault.

    Attributes:
        fault: The fault.
        outcome: Whether it was caught or missed, or could not be tried.
        test: The test that has caught it, or why none has.
        seconds: How long it took.
    """

    fault: Fault
    outcome: str
    test: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome}  {self.test}  {self.seconds:.0f} s  {self.fault.name}: {self.fault.breaks}"


def planted(fault: Fault, source: str) -> str:
    """A file with the fault in it.

    Raises:
        ValueError: Its text is gone, or is there more than once.
    """
    found = source.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.file} has {found} places, where one is expected, that read\n{fault.old}")
    return source.replace(fault.old, fault.new)


class Planter:
    """Tries faults, each on one of some copies of the sources.

    Args:
        folder: Where the copies are.
        jobs: How many faults are tried at once.
        limit: Seconds for one of them.
    """

    def __init__(self, folder: Path, jobs: int, limit: float) -> None:
        self._limit, self._ends = limit, time.monotonic() + TOTAL
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._running: set[subprocess.Popen[bytes]] = set()
        for number in range(jobs):
            copy = folder / str(number)
            shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
            self._copies.put(copy)

    def tried(self, fault: Fault) -> Tried:
        """Tries a fault."""
        copy, began = self._copies.get(), time.monotonic()
        try:
            outcome, test = self._outcome(fault, copy)
        finally:
            self._copies.put(copy)
        return Tried(fault, outcome, test, time.monotonic() - began)

    def stop(self) -> None:
        """Ends what runs, and lets nothing more begin."""
        self._ends = 0.0
        for process in [*self._running]:
            os.killpg(process.pid, signal.SIGKILL)

    def _outcome(self, fault: Fault, copy: Path) -> tuple[str, str]:
        ends, file = min(time.monotonic() + self._limit, self._ends), copy / PACKAGE / fault.file
        if ends <= time.monotonic():
            return MISSED, f"not tried, since {TOTAL // 60} minutes are over"
        source = file.read_text("utf-8")
        file.write_text(planted(fault, source), "utf-8")
        try:
            module = ".".join((PACKAGE.name, *Path(fault.file).with_suffix("").parts)).removesuffix(".__init__")
            status, said = self._run(["-c", IMPORTS, module, str(copy)], copy, ends)
            if status:
                return ERROR, f"cannot be imported: {_reason(said)}"
            status, said = self._run([*PYTEST, *(f"tests/{where}" for where in fault.tests.split())], copy, ends)
        finally:
            file.write_text(source, "utf-8")
        failed = FAILED.search(said)
        if status is None:
            return MISSED, f"not caught in time by {fault.tests}"
        if status == 0:
            return MISSED, f"not caught by {fault.tests}"
        if failed is None:
            return ERROR, f"no test has failed, and pytest ended with {status}: {_reason(said)}"
        status, _ = self._run([*PYTEST, failed[1]], copy, time.monotonic() + self._limit)
        return (CAUGHT, failed[1]) if status == 0 else (ERROR, f"{failed[1]} fails without the fault, too")

    def _run(self, arguments: Sequence[str], copy: Path, ends: float) -> tuple[int | None, str]:
        """Runs Python on a copy; returns its exit status, None where time ran out, and what it said.

        What it said goes to a file: a pipe stays open as long as any process that a test has left behind.
        """
        # Hypothesis takes the same examples every time under CI, and keeps none.
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "CI": "1"}
        env.pop("TORCH_RECOMPUTE_TEST_INSTALLED", None)
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            status: int | None = None
            try:
                status = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what tests have started
                process.wait()
            finally:
                self._running.discard(process)
            output.seek(0)
            return status, output.read().decode(errors="replace")


def _reason(said: str) -> str:
    """The line of an output that says what is wrong."""
    lines = said.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith(("ERROR", "FAILED"))), lines[-1])


def main() -> int:
    """Tries the faults, and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows of faults.py (all)")
    parser.add_argument("--list", action="store_true", help="print the rows, and look whether their texts are there")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once (2)")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each (180)")
    parser.add_argument("--save", metavar="NAME", help="write the lines into benchmarks/results/NAME.json")
    options = parser.parse_args()
    if unknown := {*options.names} - {fault.name for fault in FAULTS}:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; --list prints them")
    faults = [fault for fault in FAULTS if fault.name in options.names or not options.names]
    for fault in faults:
        try:
            planted(fault, (ROOT / PACKAGE / fault.file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{fault.name} cannot be planted: {error}\n")
            return 2
        if options.list:
            sys.stdout.write(f"{fault.name}  {fault.file}\n    {fault.breaks}\n    {fault.tests}\n")
    if options.list:
        return 0
    found: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="torch-recompute-faults-") as folder:
        planter, pool = Planter(Path(folder), options.jobs, options.limit), ThreadPoolExecutor(options.jobs)
        try:
            for done in as_completed([pool.submit(planter.tried, fault) for fault in faults]):
                found.append(done.result())
                sys.stdout.write(f"{found[-1]}\n")
                sys.stdout.flush()
        except BaseException:
            planter.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    count = Counter(one.outcome for one in found)
    sys.stdout.write(f"{count[CAUGHT]} caught, {count[MISSED]} missed, {count[ERROR]} not tried, of {len(found)}\n")
    if options.save:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from _measure import Goal, finish

        figures = [
            {**one.fault._asdict(), "outcome": one.outcome, "test": one.test, "seconds": round(one.seconds)}
            for one in found
        ]
        goal = Goal("planted faults caught", f"{count[CAUGHT]} of {len(found)}", "all", count[CAUGHT] == len(found))
        finish(options, figures, [goal])
    return 2 if count[ERROR] else int(count[MISSED] > 0)


if __name__ == "__main__":
    sys.exit(main())
