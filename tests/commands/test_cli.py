"""The command line: exit codes, what goes to stdout and what to stderr, and messages for what a user can mend."""

import argparse
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import torch_recompute_cli
from torch_recompute import Plan, __version__
from torch_recompute.commands import cli, demo
from torch_recompute.commands.demo import SETTINGS, DemoSetting, run
from torch_recompute_cli import COMMANDS, SHELLS

TINY = ["demo", "--steps", "2", "--layers", "1", "--d-model", "8", "--seq", "16", "--batch", "2"]


pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture
def plain_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration with its first setting only, where it is not looked at."""
    monkeypatch.setattr(demo, "run", partial(run, settings=SETTINGS[:1]))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version and succeeds."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"torch-recompute {__version__}\n"


def test_help_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of commands is printed without importing torch, and is the one that the commands have."""
    code = (
        "import sys, torch_recompute_cli as cli\ntry: cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (light.returncode, light.stderr) == (0, "")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert light.stdout.split() == capsys.readouterr().out.split()


def test_a_wrong_command_needs_no_torch() -> None:
    """What is no command is refused with the nearest one, without importing torch."""
    code = "import sys, torch_recompute_cli as cli\ntry: cli.main(['plam'])\nfinally: assert 'torch' not in sys.modules"
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert light.returncode == cli.USAGE
    assert "'plam' is no command; close to it: plan" in light.stderr


def test_the_entry_hands_a_command_over() -> None:
    """The script runs a command as `python -m torch_recompute` does, and imports nothing of the package for it."""
    source = Path(torch_recompute_cli.__file__).read_text(encoding="utf-8")
    assert not re.search(r"(from|import) torch_recompute\b", source)
    code = "import torch_recompute_cli as cli; cli.main(['plan', 'gpt2-xl'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == cli.USAGE
    assert "one of the arguments --budget --frontier --recompute is required" in run.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script for a shell has each command and the options of each."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--completion", shell])
    assert exit_.value.code == 0
    script = capsys.readouterr().out
    assert [word for word in (*COMMANDS, "budget", "frontier", "explain") if word not in script] == []


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without shtab the option is refused with what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        cli.main(["--completion", "bash"])
    assert "pip install torch-recompute[cli]" in capsys.readouterr().err


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
    assert cli.main(TINY) == cli.OK
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert output.err.splitlines()[-1] == "100%  counting FLOPs"
    rows = {cells[0]: cells[1:] for line in output.out.splitlines() if len(cells := re.split("  +", line.strip())) == 6}
    assert rows["same bits"] == ["yes"] * 5
    assert rows["of a plain step"][0] == "0.0%"
    assert {"peak MiB", "activations", "parameters", "gradients", "optimizer", "seconds per step"} <= rows.keys()
    assert "2 steps of 2 x 16 bytes of the Python standard library" in output.out


@pytest.mark.usefixtures("plain_alone")
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

    def nearly(model, *_):
        model.norm.register_forward_hook(lambda module, args, x: x + torch.linspace(0, 1, x.shape[-1]))
        return Plan()

    broken = (SETTINGS[0], DemoSetting("nearly", "nearly the same", nearly))
    monkeypatch.setattr(demo, "run", partial(run, settings=broken))
    assert cli.main([*TINY, "--quiet"]) == cli.FAILED
    out = capsys.readouterr().out
    assert "NOT IDENTICAL: nearly the same: the loss of step 1 is " in out
    assert "0x1." in out


@pytest.mark.usefixtures("plain_alone")
def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without rich the table is refused with what to install; the quiet JSON form needs no rich."""
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


def test_what_draws_and_prints_is_imported_late() -> None:
    """The command line starts without the packages that only draw and print."""
    text = "import sys, torch_recompute.commands.cli; print({'rich', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
