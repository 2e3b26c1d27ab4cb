"""The command line: exit codes, what goes to stdout and what to stderr, and messages for what a user can mend."""

import argparse
import io
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import torch_recompute_cli
from support.acted import Terminal
from support.files import module_at
from torch_recompute import Plan, __version__
from torch_recompute.commands import cli, demo, doctor
from torch_recompute.commands.demo import SETTINGS, DemoSetting, run
from torch_recompute.commands.output import new_console
from torch_recompute.doctor.checks import Finding
from torch_recompute_cli import COMMANDS, SHELLS

TINY = ["demo", "--steps", "2", "--layers", "1", "--d-model", "8", "--seq", "16", "--batch", "2"]


pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture
def plain_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration with its first setting only, where it is not looked at."""
    monkeypatch.setattr(demo, "run", partial(run, settings=SETTINGS[:1]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--budget 50% --offload x", ("--offload x says neither", "Write --offload for as much", "--offload 64GiB")),
        ("--budget 50% --accumulate 0", ("--accumulate is how many forwards",)),
        ("--budget 50%", ("Let what MODEL names return the loss as well: (model, batch, loss)",)),
        ("--budget 1KiB", ("--budget 1KiB is too small",)),
    ],
)
def test_an_error_speaks_of_options(options: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a function that the command calls names options and what MODEL returns, not Python's arguments."""
    model = "support.models:with_a_loss" if "1KiB" in options else "support.models:without_a_loss"
    assert cli.main(["plan", model, *options.split()]) in (2, 3)
    text = capsys.readouterr().err
    assert all(words in text for words in said), text
    assert "offload=" not in text
    assert "loss=lambda" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version and succeeds."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"torch-recompute {__version__}\n"


def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The help of a parser and of all its commands, by name."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    below = [helps(each) for action in inner for each in action.choices.values()]
    return {parser.prog: parser.format_help(), **{key: text for found in below for key, text in found.items()}}


def test_the_description_without_torch_is_that_of_the_commands() -> None:
    """`options.json` is what the commands describe, and the parsers made of it print the same help, word for word."""
    wanted = module_at(Path(__file__).parents[2] / "tools" / "options.py").options()
    found = Path(cli.__file__).with_name("options.json").read_text("utf-8")
    assert found == wanted, "an option changed; write: PYTHONPATH=src python tools/options.py"
    assert helps(torch_recompute_cli.light_parser()) == helps(cli.build_parser())


# A command line, its exit code, and what its answer begins with.
ANSWERS = {
    "--help": (0, "usage: torch-recompute [-h]"),
    "--version": (0, f"torch-recompute {__version__}"),
    "plan --help": (0, "usage: torch-recompute plan [-h]"),
    "bench run --help": (0, "usage: torch-recompute bench run [-h]"),
    "": (2, "torch-recompute: error: the following arguments are required: COMMAND\nusage: "),
    "plam": (2, "torch-recompute: error: argument COMMAND: 'plam' is not known; close to it: plan. Known are demo, "),
    "plan gpt2-xl": (2, "torch-recompute plan: error: one of the arguments --budget --frontier --recompute is req"),
    "plan gpt2-xl --budgt 24GiB": (
        2,
        "torch-recompute plan: error: --budgt is no option of torch-recompute plan; close to it: --budget\nusage: ",
    ),
    "show gpt2-xl --frobnicate=1": (
        2,
        "torch-recompute show: error: --frobnicate is no option of torch-recompute show; torch-recompute show --help "
        "lists them\nusage: torch-recompute show",
    ),
    "show gpt2-xl again": (2, "torch-recompute show: error: torch-recompute show does not expect again\nusage: "),
    "plan gpt2-xl --budget 24GiB --device h1000": (
        2,
        "torch-recompute plan: error: argument --device: 'h1000' is not known; close to it: h100. Known are v100, ",
    ),
    "plan gpt2-xl --longest": (
        2,
        "torch-recompute plan: error: one of the arguments --budget --frontier --recompute is required. Write for "
        "example --budget 24GiB\nusage: ",
    ),
    **{
        f"plan gpt2-xl --budget 24GiB --batch {word}": (
            2,
            f"torch-recompute plan: error: argument --batch: '{word}' is not an integer. Write for example --batch 8\n",
        )
        for word in ("two", "2.5", "-2.5")
    },
    "plan gpt2-xl --budget 24GiB --imbalance much": (
        2,
        "torch-recompute plan: error: argument --imbalance: 'much' is not a number. Write for example --imbalance 1.5",
    ),
}


def test_answers_need_no_torch() -> None:
    """Help, the version and wrong command lines are answered without torch: the cause first, no list twice."""
    code = f"""
import contextlib, io, json, sys
import torch_recompute_cli as cli
found = []
for line in {[*ANSWERS]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try: cli.main(line.split())
        except SystemExit as end: found.append((end.code, out.getvalue()))
assert "torch" not in sys.modules
print(json.dumps(found))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for (line, (status, begins)), (code, text) in zip(ANSWERS.items(), json.loads(run.stdout), strict=True):
        assert (line, code) == (line, status)
        assert text.startswith(begins)
        assert text.count("h100-pcie") <= 1


def test_the_entry_hands_a_command_over() -> None:
    """The script runs a command as `python -m torch_recompute` does, and what only draws and prints is not imported."""
    source = Path(torch_recompute_cli.__file__).read_text(encoding="utf-8")
    assert not re.search(r"(from|import) torch_recompute\b", source)
    code = """
import sys, torch_recompute_cli as cli
import torch_recompute.commands.cli
print({"rich", "matplotlib"} & set(sys.modules))
cli.main(["plan", "gpt2-xl", "--budget", "some"])"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (cli.USAGE, "set()\n")
    assert "--budget some is not a budget" in run.stderr


def test_garbage_is_looked_for_once_a_command_begins() -> None:
    """What was imported is frozen then, and Python's collector is on again."""
    code = """
import atexit, gc, torch_recompute_cli as cli
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 0))
cli.main(["plan", "gpt2", "--budget", "some"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (cli.USAGE, "True True\n")


def test_a_negative_size_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--budget -1GB` asks for is refused with the words for a budget, and a seed of too many bits."""
    assert cli.main(["demo", "--seed", str(2**64)]) == cli.USAGE
    assert cli.main(["plan", "gpt2-xl", "--budget", "-1GB"]) == cli.USAGE
    said = capsys.readouterr().err
    assert f"--seed is {2**64}, which has over 64 bits" in said
    assert "--budget -1GB is" in said


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


LONG = "as many words as do not fit into the width of a terminal " * 3
ROWS = f"{LONG}\n 12 x   1.50  {LONG}"


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """On a terminal lines break between words, a row's within its last column; in a pipe they stay whole."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    new_console().print(ROWS, markup=False)
    doctor._print(new_console(), LONG, doctor.Report("Model", (Finding(LONG, "", LONG, LONG, LONG),), (), ()))
    lines = sys.stdout.getvalue().splitlines()
    assert " ".join(" ".join(lines).split()).count(LONG.strip()) == 7
    assert (max(map(len, lines)) <= 60) is terminal
    if terminal:
        (row,) = [number for number, line in enumerate(lines) if "12 x" in line]
        assert [len(line) - len(line.lstrip()) for line in lines[row : row + 2]] == [1, 14]
    else:
        assert [len(line) > 60 for line in lines if LONG[:20] in line] == [True] * 7


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["demo", "--steps", "many"], ["demo", "--frobnicate"]])
def test_malformed_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be parsed ends with 2 and the usage on stderr."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert re.match(r"torch-recompute( demo)?: error: .*\nusage: torch-recompute", output.err)


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
