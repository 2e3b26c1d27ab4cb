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
