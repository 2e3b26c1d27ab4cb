"""`tools/release_check.py`: each check finds the fault that it is for, and the table says what was not possible."""

import io
import re
import sys
import tarfile
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.files import module_at

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "release_check.py"
HOME = "https://host/project"

if not TOOL.is_file():
    pytest.skip("the tools are not part of this archive", allow_module_level=True)


@pytest.fixture
def tool() -> ModuleType:
    """The tool, as a module."""
    return module_at(TOOL)


@pytest.fixture
def release(tool: ModuleType, tmp_path: Path) -> Any:
    """A release 0.1.0 whose source archive has one page, and whose description leads to it."""
    made = tool.Release(tmp_path, tmp_path, tag=None, any_torch=False)
    made.metadata = Message()
    made.metadata["Version"] = "0.1.0"
    made.metadata["Project-URL"] = f"Homepage, {HOME}"
    made.metadata.set_payload(f"[a page]({HOME}/blob/v0.1.0/docs/page.md#part) and [a site](https://elsewhere/x)")
    made.dist.mkdir()
    with tarfile.open(made.dist / "project-0.1.0.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("project-0.1.0/docs/page.md"), io.BytesIO())
    return made


def test_a_description_leads_to_files(tool: ModuleType, release: Any) -> None:
    """Links into the repository are counted, and those elsewhere are said not to have been fetched."""
    assert tool.description(release) == "1 links lead to files of the source archive; 2 elsewhere, not fetched"


@pytest.mark.parametrize(
    "text",
    [
        f"[moved]({HOME}/blob/v0.1.0/docs/old.md)",
        f"![picture]({HOME}/raw/v0.1.0/docs/old.svg)",
        f"[a page]({HOME}/blob/v0.1.0/docs/page.md) [relative](docs/page.md)",
        "[nothing of the repository](https://elsewhere/x)",
    ],
)
def test_a_broken_link_is_found(tool: ModuleType, release: Any, text: str) -> None:
    """A link to a file that the source archive lacks, a relative one, and a description without links fail."""
    release.metadata.set_payload(text)
    with pytest.raises(tool.FailedError, match="lead nowhere: "):
        tool.description(release)


def test_a_tag_is_the_version(tool: ModuleType, release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of another version fails; without one, the notes are what the changelog has for the next version."""
    monkeypatch.setattr(tool, "run", lambda *argv, **options: "")
    said = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if "## [0.1.0]" not in said:
        with pytest.raises(tool.InPartError, match=r"no section 0\.1\.0 yet"):
            tool.project(release)
    notes = (release.folder / "notes.md").read_text("utf-8")
    assert notes.strip() in said
    assert not re.search(r"^## ", notes, re.MULTILINE)
    release.tag = "v0.2.0"
    with pytest.raises(tool.FailedError, match=r"the tag is v0\.2\.0, the version 0\.1\.0"):
        tool.project(release)


def test_a_stale_result_stops_a_release(tool: ModuleType, release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result too many commits behind fails with its command; a GPU's never does; without a history it is in part."""
    measure = tool._measure
    far = measure.Age("far-h100", "1234abcd", None, f"python far.py{measure.ELSEWHERE}on an NVIDIA H100")
    near = measure.Age("near-cpu", "1234abcd", measure.MOST_BEHIND, "python near.py")
    monkeypatch.setattr(measure, "has_history", lambda: True)
    monkeypatch.setattr(measure, "ages", lambda: [far, near])
    said = tool.results(release)
    assert (said.startswith("1 are at most 30 "), said.endswith("far-h100 not run since 1234abcd")) == (True, True)
    for behind in (measure.MOST_BEHIND + 1, None):
        old = near._replace(name="old-cpu", behind=behind)
        monkeypatch.setattr(measure, "ages", lambda old=old: [old, far])
        with pytest.raises(tool.FailedError, match=r"^1 results [^\n]*\nold-cpu .*python near\.py"):
            tool.results(release)
    monkeypatch.setattr(measure, "has_history", lambda: False)
    with pytest.raises(tool.InPartError, match="no git history"):
        tool.results(release)


def test_a_python_is_found_by_its_name(tool: ModuleType, release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python is itself; one that is not on the path is no fault, and its row says that nothing was installed."""
    assert tool.find_python("{}.{}".format(*sys.version_info)) == Path(sys.executable)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(tool.InPartError, match=r"python3\.99 is not on the path: nothing was installed"):
        tool.in_empty_environment(release, "3.99")


def test_a_program_that_fails_is_quoted(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines of a program that fails are in the complaint, and no module search path of ours reaches it."""
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    asks = "import os, sys; sys.exit(f'path: {os.environ.get(\"PYTHONPATH\")}')"
    with pytest.raises(tool.FailedError, match="path: None"):
        tool.run(sys.executable, "-c", asks)


@pytest.mark.parametrize(
    ("tag", "states", "ends"),
    [
        (None, ["passed", "in part"], 0),
        ("v0.1.0", ["passed", "in part"], "Not ready: second."),
        (None, ["failed", "passed"], "Not ready: first."),
    ],
)
def test_how_it_ends(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tag: str | None,
    states: list[str],
    ends: int | str,
) -> None:
    """Every row is printed and written; a fault ends with 1, and so does a row in part when there is a tag."""

    def one(state: str) -> Any:
        def check(release: Any) -> str:
            errors = {"failed": ValueError("broken\nat line 1"), "in part": tool.InPartError("half")}
            if state in errors:
                raise errors[state]
            return "all"

        return check

    rows = list(zip(["first", "second"], map(one, states), strict=True))
    monkeypatch.setattr(tool, "checks", lambda release: iter(rows))
    monkeypatch.setattr(sys, "argv", ["it", "--out", str(tmp_path / "release"), *(["--tag", tag] if tag else [])])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == ends
    printed, written = capsys.readouterr().out, (tmp_path / "release" / "report.md").read_text("utf-8")
    for (name, _), state in zip(rows, states, strict=True):
        assert re.search(rf"^{name} +{state} ", printed, re.MULTILINE)
        assert f"| {name} | {state} |" in written
