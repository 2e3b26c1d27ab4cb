"""`tools/get_browser.py`: what is fetched is what was pinned, and where there is no browser the tests can say why."""

import platform
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import browser
from support.files import module_at

TOOL = Path(__file__).resolve().parents[2] / "tools" / "get_browser.py"

if not TOOL.is_file():
    pytest.skip("the tools are not part of this archive", allow_module_level=True)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, told to write into the folder `browser`, on a machine that the package is for."""
    module = module_at(TOOL)
    monkeypatch.setattr(sys, "argv", ["get_browser.py", str(tmp_path / "browser")])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return module


def acted_npm(folder: Path, does: str) -> list[str]:
    """A program in the place of npm; `to` is where it is to leave the archive."""
    program = folder / "npm.py"
    program.write_text(
        "import pathlib, sys\n"
        "to = next(word.partition('=')[2] for word in sys.argv if word.startswith('--pack-destination='))\n" + does
    )
    return [sys.executable, str(program)]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("(pathlib.Path(to) / 'some.tgz').write_text('something else')", "has the digest "),
        ("sys.exit('npm error code ECONNREFUSED\\nnpm error more')", "npm pack @sparticuz/chromium@.* ECONNREFUSED$"),
        ("sys.exit('killed')", "failed: killed$"),
        ("pass", "npm left 0 archives"),
    ],
    ids=["another archive", "no network", "another failure", "nothing"],
)
def test_no_browser_is_said(
    tool: ModuleType, does: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong ends with 1, leaves no browser, and is what skipped tests say."""
    monkeypatch.setattr(tool, "programs", lambda: ("node", acted_npm(tmp_path, does)))
    assert tool.main() == 1
    folder = tmp_path / "browser"
    assert [path.name for path in folder.iterdir()] == ["why-not.txt"]
    assert re.search(why, (folder / "why-not.txt").read_text())
    monkeypatch.setattr(browser, "OURS", folder)
    monkeypatch.delenv(browser.VARIABLE, raising=False)
    assert browser.why_none().endswith((folder / "why-not.txt").read_text())


def test_another_machine_is_told(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package has no browser for the machine, nothing is fetched."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(tool, "programs", lambda: pytest.fail("it looked for npm"))
    assert tool.main() == 1
    assert (tmp_path / "browser" / "why-not.txt").read_text().endswith("this is linux on riscv64")


def test_the_pinned_browser_comes_before_that_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests take the browser that a variable names, else the pinned one, else one on the path, else none."""
    for folder in ("ours", "path", "named"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chromium").write_text("#!/bin/sh\n")
        (tmp_path / folder / "chromium").chmod(0o755)
    monkeypatch.setattr(browser, "OURS", tmp_path / "ours")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv(browser.VARIABLE, str(tmp_path / "named" / "chromium"))
    assert browser.find_browser() == str(tmp_path / "named" / "chromium")
    monkeypatch.delenv(browser.VARIABLE)
    assert browser.find_browser() == str(tmp_path / "ours" / "chromium")
    (tmp_path / "ours" / "chromium").unlink()
    assert browser.find_browser() == str(tmp_path / "path" / "chromium")
    (tmp_path / "path" / "chromium").unlink()
    assert browser.find_browser() is None
