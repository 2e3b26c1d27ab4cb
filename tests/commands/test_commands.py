"""Laws that every command keeps, over the table of all commands.

`COMMANDS` has a row for each; `test_every_command_has_a_row` fails for one without. What is asked is small.
"""

import argparse
import io
import itertools
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comparisons
import discard
import frontier
import pytest
import torch
from frontier import comparing, ways
from frontier.config import Config

from support.acted import Terminal
from torch_recompute import Choice, Plan, audit, simulate, verify
from torch_recompute.commands import bench, calibrate, cli, demo, demo_elastic, output
from torch_recompute.commands.output import Output, document
from torch_recompute.doctor import examine
from torch_recompute.errors import ArgumentError, text

HEAD = ["schema_version", "command"]


@dataclass(frozen=True)
class Command:
    """A row.

    Attributes:
        argv: A small question, that is answered with 0.
        keys: Of its document, those at the top.
        wrong: What may not be asked.
        otherwise: Options with which the answer is another exit code.
        plots: Options with which it draws; None if there is nothing to draw.
    """

    argv: str
    keys: str
    wrong: str
    otherwise: tuple[str, int] | None = None
    plots: str | None = None

    @property
    def name(self) -> str:
        """What is typed, without options that say of what size."""
        words = self.argv.split()
        said = [word for word in words if word in ("--check", "--elastic")]
        return " ".join([*words[: 1 + (words[0] in ("bench", "peers"))], *said])


BLOCKS = "peers discard --d-model 8 --d-ff 32 --seq 16 --iters 1 --n-layers 1 --only rms_norm --device cpu"
MADE_BY = "torch_recompute torch python machine"
TASK = "model class parameters dtypes inputs layers optimizer offload host_bandwidth tiles notes"
TASK += " hold_output accumulate set_to_none"
COMMANDS = (
    Command(
        "demo --steps 1 --layers 1 --d-model 8 --seq 16 --batch 2",
        "torch threads text config parameters identical settings",
        "--steps 0",
        plots="",
    ),
    Command(
        "demo --elastic --steps 3 --layers 1 --d-model 8 --seq 64",
        "torch text config limit_bytes least_bytes passed steps regions",
        "--elastic --steps 0",
        plots="",
    ),
    Command("show support.nondeterministic:pair", "model stacks labels units", "--frobnicate"),
    Command(
        "plan support.nondeterministic:pair --device h100 --budget 40%",
        f"{TASK} device plain advice plan",
        "--budget 24G",
        otherwise=("--budget 1KiB", cli.TOO_SMALL),
    ),
    Command(
        "plan support.nondeterministic:pair --device h100 --frontier",
        f"{TASK} device plain advice frontier flat",
        "--out a.json",
        plots="",
    ),
    Command(
        "plan support.nondeterministic:pair --device h100 --budget 40KiB --largest-batch --optimizer none",
        f"{TASK} found most points plan",
        "--budget 40%",
    ),
    Command(
        "plan support.nondeterministic:pair --device h100 --recompute none,0",
        f"{TASK} device configurations",
        "--recompute nothing",
    ),
    Command(
        "calibrate host.json --device cpu",
        "operation_seconds replayed_seconds region_seconds call_seconds watched_seconds launch_seconds date processor "
        "device torch note",
        "--device tpu",
    ),
    Command(
        "verify support.nondeterministic:pair --plan plan.json",
        "asked model device regions passed counts noise differences likely tried",
        "--device tpu",
        otherwise=("--plan other.json", cli.FAILED),
    ),
    Command(
        "report plan.json --model support.nondeterministic:pair --device h100 --points 2",
        "title source device layers chosen plain names steps counted notes",
        "--points 1",
        plots="",
    ),
    Command(BLOCKS, f"{MADE_BY} device config timed_size how rows", "--only gelu", plots=""),
    Command(f"{BLOCKS} --check", f"{MADE_BY} device config passed comparisons", "--scale 4"),
    Command(
        "peers frontier --layers 1 --width 64 --tokens 16 --batch 1 --rounds 1 --price flops",
        f"{MADE_BY} config how goals verdict passed noise peers failures ours matches",
        "--width 3",
        plots="",
    ),
    Command(
        "doctor support.nondeterministic:pair --device h100 --no-run --no-hold-output --optimizer sgd",
        "model ok findings looked_for not_looked_for watched",
        "--budget 24G",
        otherwise=("--budget 1KiB", cli.FAILED),
    ),
    Command(
        "bench run gpt-tiny --steps 1 --warmup 0 --rounds 1 --batch 1 --sequence 16 --device cpu",
        "torch_recompute torch device parameters config how noise_percent golden taken_from_results exit_code notes "
        "rows",
        "--steps 0",
        otherwise=("--budget 1KiB", cli.TOO_SMALL),
    ),
)
COMPUTING = (
    (demo, "run"),
    (demo_elastic, "run"),
    (discard, "run"),
    (discard, "compare"),
    (frontier, "run"),
    (bench, "run"),
    (calibrate, "measured_host"),
)


def rows(of: Iterable[Command], *nightly: str) -> pytest.MarkDecorator:
    """Parametrizes a test by commands, of which those that begin with one of some words are nightly."""
    marks = {row: [pytest.mark.nightly] if row.argv.startswith(nightly) else [] for row in of}
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.argv[:40], marks=marks[row]) for row in marks])


each = rows(COMMANDS, "peers")


def run(argv: str, *more: str) -> int:
    """Runs a command; those of `peers` are programs of the benchmarks."""
    words = [*argv.split(), *more]
    return comparisons.main(words[1:]) if words[0] == "peers" else cli.main(words)


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which computes the same thing only once."""
    known: dict[str, Any] = {}

    def call(config: Any, *args: Any, **kwargs: Any) -> Any:
        if repr(config) not in known:
            known[repr(config)] = function(config, *args, **kwargs)
        return known[repr(config)]

    return call


@pytest.fixture(scope="module")
def once() -> Iterator[None]:
    """What all commands compute is computed once in this file, without the peers that compile."""
    with pytest.MonkeyPatch.context() as patch:
        few = [way for way in ways.peers(Config(layers=1)) if way.family != ways.COMPILED][:3]
        patch.setattr(comparing, "peers", lambda config: few)
        patch.setattr("torch_recompute.planner.longest.SIZES", 1)
        for module, name in COMPUTING:
            patch.setattr(module, name, remembered(getattr(module, name)))
        yield


@pytest.fixture(autouse=True)
def surroundings(once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in, the model can be imported by its name, and nothing says how to colour."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, path in (("plan", "0"), ("other", "1")):
        Path(f"{name}.json").write_text(Plan((Choice((path,)),)).to_json())


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """What can be typed."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield words
    for name, child in itertools.chain.from_iterable(action.choices.items() for action in below):
        yield from commands(child, (*words, name))


def test_every_command_has_a_row() -> None:
    """Each command that can be typed is in the table, and has the options that all have."""
    typed = (*commands(cli.build_parser()), *commands(comparisons.build_parser(), ("peers",)))
    assert {" ".join(words) for words in typed} == {row.name.partition(" --")[0] for row in COMMANDS}
    for row in COMMANDS:
        parser, words = cli.build_parser(), row.argv.split()
        if words[0] == "peers":
            parser, words = comparisons.build_parser(), words[1:]
        args = vars(parser.parse_args(words))
        assert {"json", "quiet", "command"} <= set(args)


@each
def test_colours_are_for_those_who_want_them(
    row: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal gets colours and a word on the work; with NO_COLOR there is no escape, and with --quiet no word."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(row.argv) == cli.OK
    coloured = capsys.readouterr()
    assert "\x1b[" in coloured.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(row.argv, "--quiet") == cli.OK
    plain = capsys.readouterr()
    assert "\x1b" not in plain.out
    assert plain.err == ""
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.out) == plain.out


def figures(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All that stands in a document, each with its key."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from figures(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from figures(one, key)
    else:
        yield key, value


@each
def test_documents(row: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one document and nothing else: its keys are pinned, bytes are whole, and seconds are floats."""
    assert run(row.argv, "--json", "--quiet") == cli.OK
    output = capsys.readouterr()
    assert output.err == ""
    found = json.loads(output.out)
    assert list(found) == [*HEAD, *row.keys.split()]
    assert found["command"] == row.name
    assert type(found["schema_version"]) is int
    seen = list(figures(found))
    assert {type(value) for key, value in seen if key.endswith("_bytes") and value is not None} <= {int}
    assert {type(value) for key, value in seen if key.endswith("_seconds") and value is not None} <= {float}


@rows(COMMANDS)
def test_what_may_not_be_asked(row: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option ends with 2, whatever finds it, and leaves stdout empty."""
    try:
        code = run(row.argv, *row.wrong.split())
    except SystemExit as exit_:
        code = exit_.code
    output = capsys.readouterr()
    assert (code, output.out) == (cli.USAGE, "")
    assert "torch-recompute" in output.err or "benchmarks/peers" in output.err


@rows([row for row in COMMANDS if row.otherwise], "bench run")
def test_other_answers(row: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A check that fails ends with 1, and what does not fit with 3."""
    assert row.otherwise is not None
    options, code = row.otherwise
    assert run(row.argv, *options.split()) == code
    if row.name == "doctor":
        assert run(row.argv, *options.split(), "--exit-zero") == cli.OK


@rows([row for row in COMMANDS if row.plots is not None], "peers")
def test_pictures(row: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--plot` draws into a file, in the form that its name says, beside what is printed."""
    path = tmp_path / "picture.svg"
    assert run(row.argv, *str(row.plots).split(), "--plot", str(path), "--json", "--quiet") == cli.OK
    assert json.loads(capsys.readouterr().out)
    assert path.read_text().startswith("<?xml")
    assert path.stat().st_size > 5000


def test_what_is_no_number_is_null() -> None:
    """A document can be read by any reader: what is not finite is null."""
    made = document("some", 3, {"a": (float("inf"), 1.5), "b": {"c": float("nan")}})
    assert json.loads(made) == {"schema_version": 3, "command": "some", "a": [None, 1.5], "b": {"c": None}}


def test_a_bar_moves_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the progress moves; where colours are not wanted, it is lines without an escape."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for no_color, moves in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("FORCE_COLOR", "1")
        with Output().progress(1) as advance:
            advance("word")
        error = capsys.readouterr().err
        assert ("\x1b" in error) is moves
        assert moves or error.splitlines() == ["100%  word"]


class Notebook(io.StringIO):
    """A stderr as a notebook's."""

    __module__ = "ipykernel.iostream"


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """What is shown in a notebook's cell: the text, the output's identity, and whether it is one that is there."""
    outputs: list[tuple[str, str, bool]] = []

    def publish(data: dict[str, str], transient: dict[str, str], update: bool) -> None:
        assert bool(data["text/html"]) is bool(data["text/plain"])
        outputs.append((data["text/plain"], transient["display_id"], update))

    shell = types.SimpleNamespace(display_pub=types.SimpleNamespace(publish=publish))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    return outputs


@pytest.mark.parametrize("where", [Terminal, Notebook])
@pytest.mark.parametrize("quiet", [False, True])
def test_long_work_says_what_it_does(
    where: type[io.StringIO], quiet: bool, cell: list[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while a line says what is done and how far it is, and goes; quiet shows none."""
    stderr = where()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(text, "SILENT", 0.01)
    with Output(quiet=quiet).at_work("planning"):
        with text.at_work("inner"):
            text.doing("trying choices", 3, 7)
        deadline = time.monotonic() + (0.1 if quiet else 5)
        while "3 of 7" not in stderr.getvalue() + str(cell) and time.monotonic() < deadline:
            time.sleep(0.01)
    written, said = stderr.getvalue(), "planning: trying choices, 3 of 7 (0 s)"
    if quiet:
        assert (written, cell) == ("", [])
    elif where is Terminal:
        assert f"\r{said}" in written
        assert written.endswith(" \r")
    else:
        assert written == ""  # stderr has a red ground
        assert said in [text for text, _, _ in cell]
        assert cell[-1][0] == ""
        assert len({identity for _, identity, _ in cell}) == 1
        assert [update for *_, update in cell] == [False] + [True] * (len(cell) - 1)
    with Output(quiet=True).progress(10), text.at_work("inside a bar"):
        time.sleep(0.05)
    text.doing("nothing is under way")
    with text.at_work("short"):
        pass
    assert stderr.getvalue() == written


@pytest.mark.parametrize("quiet", [False, True])
def test_long_work_in_a_pipe_says_a_line_now_and_then(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose stderr is no terminal says what it does in whole lines, unless it is quiet."""
    assert text.LINES == 10
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(text, "LINES", 0.02)
    with Output(quiet=quiet).at_work("planning"):
        text.doing("trying choices", 3, 7)
        deadline = time.monotonic() + (0.1 if quiet else 5)
        while sys.stderr.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = sys.stderr.getvalue().splitlines()
    assert set(lines) == (set() if quiet else {"planning: trying choices, 3 of 7 (0 s)"})
    assert quiet or len(lines) >= 2


class Waiting(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deadline = time.monotonic() + 5
        while "ing Sequential" not in sys.stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().forward(x).tanh().sin()


def test_long_work_in_python_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called in Python says so, too."""
    monkeypatch.setattr(text, "SILENT", 0.01)
    work = {"simulating": simulate, "examining": partial(examine, run=False)}
    work |= {"verifying": partial(verify, plan=Plan()), "auditing": partial(audit, modules=["0"])}
    for word, fn in work.items():
        monkeypatch.setattr(sys, "stderr", Terminal())
        fn(torch.nn.Sequential(Waiting(2, 1)), (torch.ones(2),))
        assert sys.stderr.getvalue().startswith(f"\r{word} Sequential (0 s)")


def test_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that could not be drawn, and a table that could not be printed, are refused at once."""
    for name, message in (("a.bmp", "ends in .png"), ("no/a.png", "there is no folder")):
        with pytest.raises(ArgumentError, match=message):
            Output.of(argparse.Namespace(json=False, quiet=False, plot=tmp_path / name))
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"torch-recompute\[cli\]"):
        Output.of(argparse.Namespace(json=False, quiet=False))
    assert Output.of(argparse.Namespace(json=True, quiet=False)) == Output(json=True)
