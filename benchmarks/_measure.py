"""How every benchmark here takes its times, and how every result is saved: what was measured, when, where and how.

Times are interleaved, in one process, medians, so that noise hits all alike.

A result is a file of `results/` that says of itself the date, the commit, the processor or GPU, the version of torch
and the command that made it; `save` is the one function that writes one. Its goals are in it, and `reached` is true
where all of them are met.

A result is as old as the code that it measures: `SOURCES` names, for each that any machine can make, the folders that
its figures depend on, and `python tools/pages.py --stale` counts the commits to these since. A result that was measured
elsewhere says so at the end of its command, and is never stale.

Nothing here imports torch before it is needed: the release is checked without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ELSEWHERE = "  # elsewhere: "
"""What follows in a command is why the result cannot be made again on any machine."""
UNKNOWN = "not recorded"
MOST_BEHIND = 30
"""A release has no result with more commits to its folders since."""


class Source(NamedTuple):
    """Where a result comes from: the command that makes it again, and the folders that its figures depend on."""

    command: str
    folders: tuple[str, ...]


def _source(command: str, *rooms: str) -> Source:
    """Returns a source; rooms are of the package, in words with blanks between."""
    return Source(command, tuple(f"src/torch_recompute/{room}" for room in " ".join(rooms).split()))


_ENGINE = "engine state _torch region.py"
_PLANNER = "memory plan planner simulation"
_FRONTIER = "OMP_NUM_THREADS=1 python benchmarks/peers frontier --model {} --price flops --rounds 3 --save {}"
SOURCES: Mapping[str, Source] = {
    "block_cost-cpu": _source("python benchmarks/block_cost.py --save block_cost-cpu", _ENGINE, "plan"),
    "catalogue": _source("python benchmarks/catalogue.py --save catalogue", _PLANNER),
    "compiled-cpu": _source(
        "python benchmarks/compiled.py --rounds 10 --save compiled-cpu", "compiling _torch/partitioning.py"
    ),
    "discard-cpu": _source("python benchmarks/peers discard --save discard-cpu", _ENGINE, "compat memory"),
    "doctor-cpu": _source("PYTHONPATH=tests python tests/doctor/test_doctor_faults.py", "doctor"),
    "elastic-cpu": _source(
        "python benchmarks/elastic.py --rounds 2 --only lengths --widths 512 --save elastic-cpu", _ENGINE, "memory plan"
    ),
    "elastic_counts-cpu": _source(
        "python benchmarks/elastic.py --only routed 1F1B --save elastic_counts-cpu", _ENGINE, "memory"
    ),
    "first_minutes-cpu": _source("python tools/first_minutes.py", "commands", _PLANNER),
    **{
        f"frontier-{name}-cpu": _source(_FRONTIER.format(options, f"frontier-{name}-cpu"), _ENGINE, _PLANNER)
        for name, options in {
            "convnext": "convnext",
            "encoder-decoder": "encoder-decoder",
            "gpt": "gpt",
            "gpt-12": "gpt --layers 12",
            "gpt-dropout-0": "gpt --dropout 0",
            "llama": "llama",
            "moe": "moe",
        }.items()
    },
    "gap-cpu": _source("python benchmarks/gap.py --save gap-cpu", _PLANNER),
    "idle_costs-cpu": _source("python benchmarks/idle_costs.py --save idle_costs-cpu", _ENGINE, "compat"),
    "memory_over_step-cpu": _source(
        "python benchmarks/memory_over_step.py --rounds 10 --save memory_over_step-cpu", _ENGINE, _PLANNER
    ),
    "offload-cpu": _source("python benchmarks/offload.py --save offload-cpu", _ENGINE, "stores"),
    "on_gpu-h100-planned": _source("python benchmarks/on_gpu.py --predict h100", _PLANNER),
    "planning_time-cpu": _source("python benchmarks/planning_time.py --save planning_time-cpu", _PLANNER),
    "predicted_time-cpu": _source(
        "python benchmarks/predicted_time.py --rounds 20 --save predicted_time-cpu", _PLANNER, "compiling"
    ),
    "promise-cpu": _source("python benchmarks/promise.py --save promise-cpu", _PLANNER),
    "published": _source(
        "python benchmarks/published.py torchtune DeepSeek torchtitan ALST Megatron --save published", _PLANNER
    ),
    "region_overhead-cpu": _source("python benchmarks/region_overhead.py --save region_overhead-cpu", _ENGINE),
    "reserved": _source("python benchmarks/reserved.py --save reserved", "memory simulation"),
    "saved_call_overhead-cpu": _source(
        "python benchmarks/saved_call_overhead.py --save saved_call_overhead-cpu", _ENGINE
    ),
    "side_by_side-cpu": _source(
        "OMP_NUM_THREADS=1 python benchmarks/side_by_side.py --rounds 7 --save side_by_side-cpu", _ENGINE, _PLANNER
    ),
    "simulated_peak-cpu": _source("python benchmarks/simulated_peak.py --save simulated_peak-cpu", "memory simulation"),
    "solver-cpu": _source("python benchmarks/solver.py --save solver-cpu", "planner"),
    "tests": Source("PYTHONPATH=src python tools/count_tests.py", ("tests",)),
    "what_it_saves-h100-sheet": _source("python benchmarks/what_it_saves.py --save what_it_saves-h100-sheet", _PLANNER),
}


def medians(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant over `rounds` rounds, each round running all of them once."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def arguments(description: str, words: str = "", **lists: str) -> argparse.Namespace:
    """The options that every benchmark takes; words without an option; and options that take lists of words."""
    parser = argparse.ArgumentParser(description=description)
    if words:
        parser.add_argument("words", nargs="*", metavar="CASE", help=words)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of interleaved runs (default 100)")
    parser.add_argument("--save", metavar="NAME", help="write the figures to benchmarks/results/NAME.json")
    for name, says in lists.items():
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME", help=says)
    return parser.parse_args()


@dataclass(frozen=True)
class Goal:
    """What a benchmark claims.

    Attributes:
        claim: What is measured.
        figure: What it came to, with its unit.
        goal: What it is to be.
        reached: Whether it is.
    """

    claim: str
    figure: str
    goal: str
    reached: bool


def finish(
    options: argparse.Namespace, figures: list[dict[str, Any]], goals: Sequence[Goal], gpu: str = "", **more: Any
) -> None:
    """Prints each goal and the verdict, and saves the figures, with what else there is to save.

    Args:
        options: Those that `arguments` returned.
        figures: What was measured, a row for each.
        goals: What was claimed of them.
        gpu: The name of the GPU that the figures are of; "" for the processor.
        more: What else is saved.
    """
    for goal in goals:
        missed = "" if goal.reached else ", NOT reached"
        print(f"{goal.claim}: {goal.figure} (goal: {goal.goal}{missed})")
    reached = all(goal.reached for goal in goals)
    print("verdict:", "reached" if reached else "NOT reached")
    if options.save:
        data = {"reached": reached, "goals": [asdict(goal) for goal in goals], **more, "figures": figures}
        print("saved to", save(options.save, data, gpu=gpu))


def save(name: str, data: Mapping[str, Any], *, gpu: str = "", elsewhere: str = "", command: str = "") -> Path:
    """Writes a result, after when, where and how it was made.

    Args:
        name: That of the file, without its ending.
        data: What was measured.
        gpu: The name of the GPU that it was measured on; "" for the processor.
        elsewhere: Why it cannot be made again on any machine; "" if it can, or if a GPU says so.
        command: How the program was started, where that is not what its arguments say.
    """
    import torch

    sys.path.append(str(ROOT / "src"))  # tools run where the package is not installed
    from torch_recompute.stores.measured import name_of_cpu

    elsewhere = elsewhere or (f"on an {gpu}" if gpu else "")
    made = {
        "date": today(),
        "commit": checked_out(),
        **({"gpu": gpu} if gpu else {"processor": name_of_cpu()}),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": (command or _started_as()) + (f"{ELSEWHERE}{elsewhere}" if elsewhere else ""),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**made, **data}, indent=1) + "\n", encoding="utf-8")
    return path


def _started_as() -> str:
    """Returns how this program was started, as a reader would type it in the repository."""
    program = Path(sys.argv[0]).resolve()
    named = program.parent if program.name == "__main__.py" else program
    words = ["python", str(named.relative_to(ROOT)) if named.is_relative_to(ROOT) else named.name, *sys.argv[1:]]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join(words)


def _git(*words: str) -> str | None:
    """Returns what git says of the repository; None where it fails, or this is a copy without a history."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_history() -> bool:
    """Returns whether this is a checkout: an archive may be unpacked in another project's."""
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == ROOT


def today() -> str:
    """Returns the date, in UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def checked_out() -> str:
    """Names the commit that is checked out, and says if tracked sources differ from it."""
    commit = _git("rev-parse", "--short=8", "HEAD") if has_history() else None
    if commit is None:
        return UNKNOWN
    tracked = "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", ":!benchmarks/results"
    return f"{commit}+changes" if _git(*tracked) else commit


class Age(NamedTuple):
    """How old a result is.

    Attributes:
        name: The result.
        commit: The commit that it was made at.
        behind: Commits since to what it depends on; None for one measured elsewhere, and for an unknown commit.
        command: What makes it again; with why it cannot be made here.
    """

    name: str
    commit: str
    behind: int | None
    command: str

    @property
    def stale(self) -> bool:
        """Whether a release may not have it."""
        return ELSEWHERE not in self.command and (self.behind is None or self.behind > MOST_BEHIND)

    def __str__(self) -> str:
        if ELSEWHERE in self.command:
            return f"not run since {self.commit}: {self.command}"
        behind = f"{self.behind} commits behind" if self.behind is not None else "is of no commit of this history"
        return f"{behind} ({self.commit}): {self.command}"


def ages() -> Iterator[Age]:
    """Yields how old each result is, of those that any machine can make the oldest first."""
    found: list[Age] = []
    for path in sorted(RESULTS.glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        source, commit = SOURCES.get(path.stem), made["commit"].removesuffix("+changes")
        if source is None or ELSEWHERE in made["command"]:
            found.append(Age(path.stem, commit, None, made["command"]))
            continue
        since = _git("rev-list", "--count", f"{commit}..HEAD", "--", *source.folders)
        found.append(Age(path.stem, commit, None if since is None else int(since), source.command))
    yield from sorted(found, key=lambda age: (ELSEWHERE in age.command, age.behind is not None, -(age.behind or 0)))
