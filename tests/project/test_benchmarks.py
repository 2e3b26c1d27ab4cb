"""The programs in `benchmarks/` and `tools/` start, and each result says when, where and how it was made.

They are run by people, now and then, so nothing else would notice that a name they use has changed.
"""

import importlib
import json
import re
import runpy
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if '__name__ == "__main__"' in path.read_text("utf-8")]

if not (BENCHMARKS and TOOLS):
    pytest.skip("the benchmarks and the tools are not part of this archive", allow_module_level=True)


each_result = pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/_measure.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_measure")


def read(path: Path) -> dict[str, Any]:
    """The result in a file."""
    return json.loads(path.read_text("utf-8"))


def start(path: Path, patch: pytest.MonkeyPatch, *options: str) -> None:
    """Runs a program as its user does, in this process."""
    patch.syspath_prepend(str(path.parent))
    patch.setattr(sys, "argv", [str(path), *options])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", [*BENCHMARKS, *TOOLS], ids=lambda path: path.stem)
def test_help(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program loads, with all that it imports, and says what it does and which options it takes."""
    with pytest.raises(SystemExit) as end:
        start(path, monkeypatch, "--help")
    assert end.value.code in (0, None)
    described = capsys.readouterr().out.partition("options:")
    assert len(described[0].splitlines()) > 2
    assert ("--rounds" in described[2]) is (path in BENCHMARKS)


def test_one_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The shortest of them runs to its end: a verdict is printed, figures are saved with when and where they are of."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("_measure.RESULTS", tmp_path)
    start(ROOT / "benchmarks" / "offload.py", monkeypatch, "--rounds", "1", "--save", "figures")
    assert "\nverdict: " in capsys.readouterr().out
    saved = read(tmp_path / "figures.json")
    assert len(saved["figures"]) == 4
    assert saved["reached"] is all(goal["reached"] for goal in saved["goals"])
    assert saved["command"].removeprefix("OMP_NUM_THREADS=1 ").startswith("python benchmarks/offload.py --rounds 1")
    assert says_where(saved) == []


def says_where(result: dict[str, Any]) -> list[str]:
    """What a result does not say of its run, or says wrong."""
    wrong = [name for name in ("cores", "torch", "python", "command") if not result.get(name)]
    wrong += ["processor or gpu"] * (bool(result.get("processor")) is bool(result.get("gpu")))
    if not re.fullmatch(r"[0-9a-f]{8}(\+changes)?|not recorded", result.get("commit", "")):
        wrong.append("commit")
    if not date.fromisoformat(result.get("date", "0001-01-01")) > date(2026, 1, 1):
        wrong.append("date")
    programs = re.findall(r"python (\S+)|(make) ", result.get("command", ""))
    return wrong + ["program"] * (not programs or not (ROOT / (programs[0][0] or "Makefile")).exists())


@each_result
def test_results_say_when_and_where(path: Path) -> None:
    """Each result holds its date, commit, processor or GPU, cores, torch, and a command whose program is there."""
    result = read(path)
    assert says_where(result) == []
    assert bool(result.get("gpu")) <= ("# elsewhere: on an " in result["command"])
    assert "passed" not in result


@each_result
def test_reached_is_said_where_all_goals_are(path: Path) -> None:
    """A result is `reached` where each of its goals is, and it has goals where it is said to be."""
    result = read(path)
    assert ("reached" in result) is ("goals" in result)
    assert result.get("reached", True) is all(goal["reached"] for goal in result.get("goals", []))


def test_each_result_has_a_source(measure: ModuleType) -> None:
    """Each result that any machine can make has the folders that it depends on, and the command of its own program."""
    here = {path.stem: read(path)["command"] for path in RESULTS}
    here = {name: command for name, command in here.items() if measure.ELSEWHERE not in command}
    assert here.keys() == measure.SOURCES.keys()
    for name, source in measure.SOURCES.items():
        assert [folder for folder in source.folders if not (ROOT / folder).exists()] == []
        program = re.search(r"python \S+( frontier| discard)?", source.command)
        assert program is not None
        assert program[0] in here[name]
        assert ("--save" in source.command) <= source.command.endswith(f"--save {name}")


def test_pictures_of_results_have_their_result() -> None:
    """Beside results there are only pictures, each of the result of its name."""
    others = [path for path in RESULTS[0].parent.iterdir() if path.suffix != ".json"]
    assert [path.name for path in others if path.suffix != ".svg" or not path.with_suffix(".json").exists()] == []


def commit(folder: Path, name: str) -> str:
    """Commits a change of a file, and returns the commit."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.read_text() + "x" if path.exists() else "")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["add", "--all"], [*who, "commit", "--quiet", "--message", name], ["rev-parse", "--short=8", "HEAD"]):
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, measure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, in which `_measure` finds itself; each result depends on `src/a`."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(measure, "RESULTS", results)
    monkeypatch.setattr(
        measure, "SOURCES", {name: measure.Source("python a.py", ("src/a",)) for name in ("old", "lost")}
    )
    return tmp_path


def test_how_old_results_are(repository: Path, measure: ModuleType) -> None:
    """Commits to a result's folders since count, others do not; what was measured elsewhere is never stale."""
    first = commit(repository, "src/a/one.py")
    measure.save("old", {})
    measure.save("lost", {"commit": "00000000"})
    measure.save("far", {}, gpu="NVIDIA H100", command="python there.py")
    commit(repository, "src/b/one.py")
    for _ in range(measure.MOST_BEHIND):
        commit(repository, "src/a/one.py")
    lost, old, far = measure.ages()
    assert [(age.name, age.behind, age.stale) for age in (lost, old, far)] == [
        ("lost", None, True),
        ("old", measure.MOST_BEHIND, False),
        ("far", None, False),
    ]
    assert str(old) == f"{measure.MOST_BEHIND} commits behind ({first}): python a.py"
    assert str(far) == f"not run since {first}: python there.py  # elsewhere: on an NVIDIA H100"
    commit(repository, "src/a/one.py")
    assert [age.name for age in measure.ages() if age.stale] == ["lost", "old"]


def test_a_commit_with_changes_says_so(repository: Path, measure: ModuleType) -> None:
    """A result says that tracked sources differ from its commit; new results and files of no commit do not count."""
    commit(repository, "benchmarks/results/old.json")
    head = commit(repository, "src/a/one.py")
    (repository / "benchmarks" / "results" / "old.json").write_text("other")
    (repository / "src" / "a" / "new.py").write_text("")
    assert measure.checked_out() == head
    (repository / "src" / "a" / "one.py").write_text("other")
    assert measure.checked_out() == f"{head}+changes"


def test_an_archive_has_no_history(
    tmp_path: Path, measure: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of no repository, or inside another one, a result has no commit and `pages.py --stale` says why."""
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert measure.checked_out() == "not recorded"
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, "project/one.py")
    monkeypatch.setattr(measure, "ROOT", tmp_path / "project")
    assert (measure.has_history(), measure.checked_out()) == (False, "not recorded")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    with pytest.raises(SystemExit) as end:
        start(ROOT / "tools" / "pages.py", monkeypatch, "--stale")
    assert end.value.code == 0
    assert "no git history" in capsys.readouterr().out


def test_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each way has its row with a plan at its peak: the same gradients, no more bytes, no more FLOPs."""
    for folder in ("", "peers"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    import side_by_side

    for name, value in {"LAYERS": 2, "WIDTH": 64, "TOKENS": 32, "BATCH": 2, "SHARES": ()}.items():
        monkeypatch.setattr(side_by_side, name, value)
    monkeypatch.setattr("_measure.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "--rounds", "1", "--models", "GPT", "--save", "figures"])
    side_by_side.main()
    plain, *ways = read(tmp_path / "figures.json")["figures"]
    assert [plain["plan"], len(ways)] == [None, 3]
    for row in ways:
        assert row["plan"]["peak_bytes"] <= (1 + side_by_side.SLACK) * row["peak_bytes"] < plain["peak_bytes"]
        assert row["plan"]["replay_percent"] <= row["replay_percent"]
        assert row["gradient_difference"] == row["plan"]["gradient_difference"] == 0


LISTED = """torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.11.0, 2.10.0, 1.13.1
  INSTALLED: 2.13.0+cpu
"""
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure message="no"/></testcase>
<testcase classname="tests.b" name="breaks"><error message="no"/></testcase>
<testcase classname="tests.b" name="waits"><skipped message="no browser"/></testcase>
</testsuite></testsuites>"""


def test_a_matrix_of_releases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of each release that is supported the last patch is tried, and what is broken counts as failed."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import matrix

    assert matrix.releases(LISTED) == ["2.11.0", "2.13.0", "2.14.1", "2.15.0"]
    (tmp_path / "junit.xml").write_text(REPORT, encoding="utf-8")
    row = matrix.counted(tmp_path / "junit.xml")
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 1)
    assert row["failures"] == ["tests.a::fails", "tests.b::breaks"]


def test_a_run_of_others_tests_replaces_itself(
    tmp_path: Path, measure: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of a run of others' tests are written in the place of those of the same run, the others stay."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    suites = importlib.import_module("suites_conformance")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(suites, "SAVED", tmp_path / "conformance.json")
    for plan, passed in ((None, 1), ("full", 2), (None, 3)):
        suites.keep({"project": "peft", "plan": plan, "stock": False, "passed": passed})
    saved = read(tmp_path / "conformance.json")
    assert [(row["plan"], row["passed"]) for row in saved["rows"]] == [("full", 2), (None, 3)]
    assert all({"date", "commit"} <= row.keys() for row in saved["rows"])
    assert saved["command"].endswith("on a checkout of each project")
