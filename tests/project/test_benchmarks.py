"""The programs in `benchmarks/` and `tools/` start, and what measures a claim prints and saves its verdict.

They are run by people, now and then, so nothing else would notice that a name they use has changed.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
TOOLS = [path for path in sorted((ROOT / "tools").glob("*.py")) if '__name__ == "__main__"' in path.read_text("utf-8")]

if not (BENCHMARKS and TOOLS):
    pytest.skip("the benchmarks and the tools are not part of this archive", allow_module_level=True)


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
    """The shortest of them runs to its end: a verdict is printed, figures are saved with what they were taken on."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("_measure.RESULTS", tmp_path)
    start(ROOT / "benchmarks" / "offload.py", monkeypatch, "--rounds", "1", "--save", "figures")
    assert "\nverdict: " in capsys.readouterr().out
    saved = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    assert len(saved["figures"]) == 4
    assert saved["reached"] in (True, False)
    assert {"torch", "python", "machine"} <= set(saved)


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
    plain, *ways = json.loads((tmp_path / "figures.json").read_text("utf-8"))["figures"]
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
