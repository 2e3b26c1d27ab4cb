"""The two tiers of tests: `make test` and `make test-all` run every test between them, and a part says how it ended."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.files import module_at

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "test_all.py"

if not TOOL.is_file():
    pytest.skip("the tools are not part of this archive", allow_module_level=True)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/test_all.py`, with a folder of its own for what parts print."""
    module = module_at(TOOL)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    return module


def test_every_test_is_in_a_tier(tool: ModuleType) -> None:
    """`make test` leaves out what is marked nightly and nothing else; of each folder a part runs what is marked."""
    (fast,) = re.findall(r"^\t.*-m pytest.*--timeout 300.*$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert '-m "not nightly"' in fast
    assert "--dist loadgroup" in fast
    commands = [list(part.command) for part in tool.parts("2")]
    assert [command for command in commands if command[-2:] == ["-m", "not nightly"]] != []
    nightly = {command[-1] for command in commands if command[-3:-1] == ["-m", "nightly"]}
    folders = {f"tests/{path.parent.relative_to(ROOT / 'tests')}" for path in (ROOT / "tests").rglob("test_*.py")}
    assert nightly == folders


@pytest.mark.parametrize(
    ("code", "line", "passed"),
    [
        ("print('== 2 passed, 1 skipped in 0.1s ==')", r"passed  part +\d s  2 passed, 1 skipped\n", True),
        ("print('why'); raise SystemExit(1)", r"FAILED  part +\d s  \n        why\n", False),
        ("raise SystemExit(5)", r"FAILED  part +\d s  \n        \n", False),
    ],
)
def test_a_part_is_a_line(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], code: str, line: str, passed: bool
) -> None:
    """A part that passes is one line with its counts; one that fails shows its last lines, and fails the whole."""
    assert tool.run(tool.Part("part", (sys.executable, "-c", code))) is passed
    assert re.fullmatch(line, capsys.readouterr().out)


def test_a_folder_without_nightly_tests_passes(tool: ModuleType) -> None:
    """That pytest selected nothing is no failure where the marked tests of a folder are asked for."""
    assert tool.run(tool.Part("nightly tests of a folder", (sys.executable, "-c", "raise SystemExit(5)")))
