"""`torch-recompute report`: from a plan's file to page, snapshot, picture and table; and what is refused."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import report_cases
from support.zoo import mean_loss
from torch_recompute import Plan, simulate
from torch_recompute.commands import cli

MADE_BY = ["plan", "cases:task", "--device", "h100", "--optimizer", "sgd", "--budget", "40%"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The output is plain, the model can be imported by a name, and files lie in an empty folder."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setitem(sys.modules, "cases", report_cases)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, free_launches: None) -> str:
    """What `torch-recompute plan --out` writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cases", report_cases)
        path = tmp_path_factory.mktemp("made") / "plan.json"
        assert cli.main([*MADE_BY, "--out", str(path), "--json", "--quiet"]) == cli.OK
        return path.read_text()


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["report", *argv, "--json", "--quiet"]) == cli.OK
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def test_a_file_is_enough(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan's file says which step it is for: its promise is met, and page, snapshot, picture and table are of it."""
    capsys.readouterr()
    Path("plan.json").write_text(made)
    assert json.loads(made)["task"] == {"model": "cases:task", "optimizer": "sgd", "device": "h100"}
    files = ["-o", "report.html", "--snapshot", "step.pickle", "--png", "step.svg"]
    assert cli.main(["report", "plan.json", "--points", "3", *files]) == cli.OK
    output = capsys.readouterr()
    words = [line.split()[0] for line in output.err.splitlines()]
    assert words[-1] == "100%"

    plan = Plan.from_json(made)
    assert plan.prediction is not None
    page = Path("report.html").read_text()
    found = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    step = found["steps"][found["chosen"]]
    assert step["peak_bytes"] == step["promised"]["peak_bytes"] == plan.prediction.peak_bytes
    assert found["notes"] == []
    assert f"{plan.prediction.peak_bytes / 2**20:,.1f}" in output.out
    assert "without recomputation" in output.out

    live = most = 0
    for entry in pickle.loads(Path("step.pickle").read_bytes())["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        most = max(most, live)
    assert most == plan.prediction.peak_bytes
    drawn = Path("step.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "#ee964b" in drawn  # what replays rebuild


def test_a_plan_comes_through_a_pipe(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that can be read only once, as `<(...)` of a shell, says both plan and step."""
    capsys.readouterr()
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write(made)
    with open(reading):
        found = document(capsys, f"/dev/fd/{reading}", "--points", "0")
    assert found["title"].startswith("cases:task")


def test_any_plan_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of any origin is shown when the command line says the step."""
    Path("plan.json").write_text(report_cases.BY_HAND.to_json())
    argv = ["plan.json", "--model", "cases:task", "--device", "a100", "--points", "0"]
    found = document(capsys, *argv)
    assert (found["schema_version"], found["command"], found["device"]) == (1, "report", "a100")
    assert [step["name"] for step in found["steps"]] == ["the plan", "without recomputation"]
    model, args = report_cases.pair()
    expected = simulate(model, args, plan=report_cases.BY_HAND, optimizer=torch.optim.AdamW, loss=mean_loss)
    assert found["steps"][0]["peak_bytes"] == expected.peak_bytes


def test_the_command_line_comes_first(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A word of the command line replaces the file's; that it is then another step is noted."""
    capsys.readouterr()
    Path("plan.json").write_text(made)
    found = document(capsys, "plan.json", "--optimizer", "adamw", "--points", "0")
    assert "optimizer" in found["steps"][0]["samples"]["layers"]
    (note,) = found["notes"]
    assert note.startswith("The plan has promised a peak of")


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        (None, [], "no such file or directory. Write the path of a file that torch-recompute plan"),
        ("{}", [], "this is not a plan"),
        (Plan().to_json(), [], "does not say for which model and batch"),
        (Plan().to_json(), ["--model", "no-such-model"], "Known by name are"),
        (Plan().to_json(), ["--model", "cases:task", "--batch", "2"], "--batch is for models that are built here"),
        ('{"task": {"model": "cases:task", "batch": "2"}, ', [], "says batch='2' of its step"),
        ('{"task": {"model": "cases:task", "optimizer": "lion"}, ', [], "says optimizer='lion' of its step"),
        ('{"task": {"model": "cases:task", "sharded": true}, ', [], "says sharded=True of its step"),
        (Plan().to_json(), ["--points", "1"], "--points is 1; expected 0"),
        (Plan().to_json(), ["-o", "no/such/folder/a.html"], "--out is no/such/folder/a.html: there is no folder"),
        (Plan().to_json(), ["--snapshot", "no/a.pickle"], "--snapshot is no/a.pickle: there is no folder"),
        (Plan().to_json(), ["--plot", "a.bmp"], "ends in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_asked(
    text: str | None, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command line that cannot be answered ends with 2, nothing on stdout, and what to write."""
    if text is not None:
        Path("plan.json").write_text(text + Plan().to_json()[1:] if text.endswith(", ") else text)
    assert cli.main(["report", "plan.json", *argv]) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_files_that_cannot_be_written(made: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder in place of a file is refused in words."""
    Path("plan.json").write_text(made)
    Path("folder").mkdir()
    for option in ("--out", "--snapshot"):
        assert cli.main(["report", "plan.json", "--points", "0", option, "folder"]) == cli.USAGE
        assert f"{option} is folder: is a directory" in capsys.readouterr().err
