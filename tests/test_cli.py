"""The command line: exit codes, what goes to stdout and what to stderr, and messages for what a user can mend."""

import argparse
import json
import re
import sys
from functools import partial

import pytest
import torch

from torch_recompute import Plan, __version__
from torch_recompute.commands import cli, demo
from torch_recompute.commands.demo import SETTINGS, Setting, run

TINY = ["demo", "--steps", "2", "--layers", "1", "--d-model", "8", "--seq", "16", "--batch", "2"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in, the output is 100 columns wide and without colour."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version and succeeds."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"torch-recompute {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["demo", "--steps", "many"], ["demo", "--frobnicate"]])
def test_malformed_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be parsed ends with 2 and the usage on stderr."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("usage: torch-recompute")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The demonstration prints its progress on stderr, one table on stdout, and no escape codes."""
    pytest.importorskip("rich")
    assert cli.main(TINY) == cli.OK
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert output.err.splitlines()[-1] == "100%  counting FLOPs"
    rows = {cells[0]: cells[1:] for line in output.out.splitlines() if len(cells := re.split("  +", line.strip())) == 6}
    assert rows["same bits"] == ["yes"] * 5
    assert rows["of a plain step"][0] == "0.0%"
    assert {"peak MiB", "activations", "parameters", "gradients", "optimizer", "seconds per step"} <= rows.keys()
    assert "2 steps of 2 x 16 bytes of the Python standard library" in output.out


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """`--quiet` leaves the table and nothing else."""
    pytest.importorskip("rich")
    assert cli.main([*TINY, "--quiet"]) == cli.OK
    output = capsys.readouterr()
    assert output.err == ""
    assert "same bits" in output.out


def test_json(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    """`--json` prints one document on stdout and nothing else there; options reach the configuration."""
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, " * 10)
    assert cli.main([*TINY, "--seed", "7", "--text", str(text), "--json", "--quiet"]) == cli.OK
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert output.err == ""
    assert document["config"] == {"steps": 2, "layers": 1, "d_model": 8, "seq": 16, "batch": 2, "seed": 7}
    assert document["text"] == str(text)


def test_a_difference_is_loud(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that differs ends with 1 and is named with both values."""
    pytest.importorskip("rich")

    def nearly(model, *_):
        model.norm.register_forward_hook(lambda module, args, x: x + torch.linspace(0, 1, x.shape[-1]))
        return Plan()

    broken = (SETTINGS[0], Setting("nearly", "nearly the same", nearly))
    monkeypatch.setattr(demo, "run", partial(run, settings=broken))
    assert cli.main([*TINY, "--quiet"]) == cli.FAILED
    out = capsys.readouterr().out
    assert "NOT IDENTICAL: nearly the same: the loss of step 1 is " in out
    assert "0x1." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps is 0; expected a whole number of at least 1"),
        (["--d-model", "30"], "--d-model is 30; expected a multiple of 4"),
        (["--text", "no/such/file"], "--text no/such/file: no such file or directory; expected a readable file"),
        (["--text", "."], "--text .: is a directory; expected a readable file"),
        (["--seq", "10000000"], "the Python standard library has "),
    ],
)
def test_what_a_user_can_mend(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value ends with 2 and one message on stderr, before anything is computed."""
    assert cli.main([*TINY, *options]) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"torch-recompute: error: {message}")
    assert "Traceback" not in output.err


def test_short_text(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    """A text shorter than a sequence is refused with its length and the sequence length that would do."""
    text = tmp_path / "text"
    text.write_bytes(b"short")
    assert cli.main([*TINY, "--text", str(text)]) == cli.USAGE
    error = capsys.readouterr().err
    assert "has 5 bytes; expected at least 17" in error
    assert "--seq 4 or less" in error


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without rich the table is refused with what to install; the quiet JSON form needs no rich."""
    monkeypatch.delitem(sys.modules, "torch_recompute.demo.view", raising=False)
    monkeypatch.delattr(demo, "view", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(TINY) == cli.USAGE
    assert "pip install torch-recompute[cli]" in capsys.readouterr().err
    assert cli.main([*TINY, "--json", "--quiet"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["identical"]


def test_missing_modules_are_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is missing where none may be stays an error of its own."""

    def missing(_: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(demo, "command", missing)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        cli.main(TINY)


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130 and without a traceback."""

    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "command", interrupted)
    assert cli.main(TINY) == cli.INTERRUPTED
