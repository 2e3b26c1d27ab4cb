"""`torch-recompute bench run`: each verdict provoked in one sweep, exact and golden figures, going on, exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_recompute import ArgumentError, Choice, Plan, RecomputeConfig
from torch_recompute.commands import bench as run
from torch_recompute.commands import cli, trials
from torch_recompute.commands.bench import CONTROL, OK, BenchConfig, Golden, Journal
from torch_recompute.commands.models import batch_for, load
from torch_recompute.commands.trials import (
    DONE,
    FAILED,
    MISMATCH,
    NO_PLAN,
    OUT,
    REFUSED,
    STOPPED,
    Record,
    Setting,
    TrialTask,
    Workload,
)

ROWS, WIDTH, INNER = 256, 32, 128
MODULE = f"""
import os, signal, torch
from torch import nn
from torch_recompute import doing_recompute

class Layer(nn.Module):
    def __init__(self, twist=None):
        super().__init__()
        self.twist, self.up, self.down = twist, nn.Linear({WIDTH}, {INNER}), nn.Linear({INNER}, {WIDTH})

    def forward(self, x):
        hidden = self.up(x)
        if self.twist and doing_recompute():
            hidden = self.twist(hidden)
        return x + self.down(torch.relu(hidden))

def dies(x):
    os.kill(os.getpid(), signal.SIGKILL)

def fails(x):
    raise KeyError("lost")

def widens(x):
    return torch.cat([x, x], 1).sin()[:, : x.shape[1]]

def hungers(x):
    return x + torch.empty(2**30)[0]  # 4 GiB

TWISTS = {{"doubles": lambda x: x * 2, "widens": widens, "hungers": hungers, "dies": dies, "fails": fails}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        for name, twist in TWISTS.items():
            self.add_module(name, Layer(twist))

    def forward(self, x):
        for layer in (*self.layers, *(self.get_submodule(name) for name in TWISTS)):
            x = layer(x)
        return x

def pair():
    print("whatever a model prints")
    return Net(), (torch.randn({ROWS}, {WIDTH}),)
"""
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERIMENTS = [
    {"name": "every layer", **FULL},
    *({"name": name, **SELECTIVE, "recompute_modules": [name]} for name in ("doubles", "widens", "hungers", "dies")),
    {"name": "fails", **SELECTIVE, "recompute_modules": ["fails"]},
    {"name": "no such label", **SELECTIVE, "recompute_modules": ["experts"]},
    {"name": "too small", "budget": "1KiB"},
    {"name": "half", "budget": "50%"},
    {"name": "by hand", "plan": "plan.json"},
]
VERDICTS = {
    "control": (OK, ""),
    "every layer": (OK, ""),
    "doubles": (MISMATCH, "round 1, rank 0, step 2: the loss is "),
    "widens": (MISMATCH, "step 1 of 3: MismatchError: the replay of widens saved"),
    "hungers": (OUT, "step 1 of 3: RuntimeError: "),
    "dies": (OUT, "killed by SIGKILL"),
    "fails": (FAILED, "exit code 1: KeyError: 'lost'"),
    "no such label": (REFUSED, "recompute_modules: 'experts' matches nothing"),
    "too small": (NO_PLAN, "budget=1KiB is too small"),
    "half": (OK, ""),
    "by hand": (OK, ""),
}


pytestmark = pytest.mark.usefixtures("plain_terminal")


@dataclass(frozen=True)
class Seen:
    """What the sweep has left behind."""

    folder: Path
    code: int
    document: dict[str, Any]
    lines: list[dict[str, Any]]

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.document["rows"] if row["name"] == name)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One sweep of everything that can happen to a setting, two rounds, in a folder with the model."""
    if sys.platform != "linux":
        pytest.skip("a limit of memory for one process is Linux's")
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "twisted.py").write_text(MODULE)
    (folder / "plan.json").write_text(Plan((Choice(("layers.0",)), Choice(("layers.1",)))).to_json())
    options = {"model": "twisted:pair", "steps": 2, "warmup": 1, "rounds": 2, "capacity": "1GiB"}
    (folder / "sweep.json").write_text(json.dumps({**options, "device": "cpu", "experiments": EXPERIMENTS}))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
        monkeypatch.chdir(folder)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        code = cli.main(["bench", "run", "--sweep", "sweep.json", "--save-golden", "golden.json", "--json", "--quiet"])
    lines = [json.loads(line) for line in (folder / "sweep.results.jsonl").read_text().splitlines()]
    return Seen(folder, code, json.loads(said.getvalue()), lines)


class FakeLauncher:
    """Answers tasks without a process, and remembers them."""

    def __init__(self, answer: Callable[[Any], Record]) -> None:
        self.answer = answer
        self.tasks: list[Any] = []

    def __call__(self, task: Any) -> Record:
        self.tasks.append(task)
        return self.answer(task)


def good(seconds: float = 1.0, **changes: Any) -> Record:
    """The record of a trial in which all went well."""
    record = Record(DONE, "", ["0x1.0p+0", "0x1.8p-1"], [seconds] * 3, 2**20, 2**21, flops=10**12, replay_flops=10**11)
    more: dict[str, Any] = {"items": 100, "device": "a device", "parameters": 7, "dtype": "fp32", "pace": [1.0]}
    more["digest"] = "a plan's"
    more["by_category"] = {"parameters": 2**19, "activations": 2**19}
    return replace(record, **{**more, **changes})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Record]], FakeLauncher]:
    """Puts a launcher without processes into the command."""

    def put(answer: Callable[[Any], Record]) -> FakeLauncher:
        launcher = FakeLauncher(answer)
        monkeypatch.setattr(trials, "launch", launcher)
        return launcher

    return put


def bench(*argv: str) -> int:
    return cli.main(["bench", "run", *argv, "--quiet"])


@pytest.mark.parametrize("name", VERDICTS)
def test_each_end_of_a_trial_is_understood(seen: Seen, name: str) -> None:
    """Equal and other losses, a named mismatch, short memory, signals, errors, labels and budgets are told apart."""
    wanted, why = VERDICTS[name]
    row = seen.row(name)
    assert row["result"] == wanted
    assert row["detail"].startswith(why) if why else not row["detail"]


def test_the_sweep_as_a_whole(seen: Seen) -> None:
    """All settings took turns, bad ones were not run again, a budget was planned once, and the exit code is 2."""
    assert [row["name"] for row in seen.document["rows"]] == list(VERDICTS)
    first = [name if name != "half" else ("half", "half") for name in VERDICTS]
    again = [name for name, (result, why) in VERDICTS.items() if result == OK or why.startswith("round")]
    wanted = [*(name for entry in first for name in ([entry] if isinstance(entry, str) else entry)), *again]
    assert [line["name"] for line in seen.lines] == wanted
    assert [line["round"] for line in seen.lines if line["name"] == "half"] == [run.PLANNING, 0, 1]
    assert seen.code == seen.document["exit_code"] == 2
    assert seen.document["taken_from_results"] == 0
    assert seen.document["command"] == "bench run"


def test_figures_are_exact(seen: Seen) -> None:
    """FLOPs of the model and of replays are those of its products, and a plan's promise of bytes is kept."""
    product = 2 * ROWS * WIDTH * INNER
    control, full, half = (seen.row(name) for name in ("control", "every layer", "half"))
    assert control["flops"] == full["flops"] == (8 * 2 * 3 - 1) * product  # no gradient of the input is made
    assert (control["replay_flops"], control["regions"]) == (0, 0)
    assert (full["replay_flops"], full["regions"]) == (3 * product, 3)  # what comes after the last saved tensor is not
    assert full["allocated_bytes"] < control["allocated_bytes"]
    assert half["allocated_bytes"] == half["predicted_peak_bytes"] < control["allocated_bytes"]
    assert seen.row("by hand")["replay_flops"] == 2 * product
    for row in (control, full, half):
        (rank,) = row["ranks"]
        assert row["tflops"] == rank["tflops"] == row["flops"] / row["step_seconds"] / 1e12
        assert (row["unit"], row["per_second"]) == ("samples", ROWS / row["step_seconds"])
        assert row["reserved_bytes"] >= 0
    assert full["control_memory_percent"] == pytest.approx(
        100 * full["allocated_bytes"] / control["allocated_bytes"] - 100
    )
    losses = {tuple(line["ranks"][0]["losses"]) for line in seen.lines if line["name"] in ("control", "every layer")}
    assert len(losses) == 1
    assert len(next(iter(losses))) == 3


def test_memory_that_is_asked_for_is_in_the_record(seen: Seen) -> None:
    """A trial that ran out of memory says at which step and what was asked for, and has no figures of time."""
    row = seen.row("hungers")
    assert "you tried to allocate 4294967296 bytes" in row["detail"]
    assert row["tflops"] is row["step_seconds"] is row["allocated_bytes"] is None
    assert row["reserved_bytes"] < 2**30
    short = row["shortage"]
    assert (short["requested_bytes"], short["capacity_bytes"], short["verdict"]) == (2**32, 2**30, "capacity")
    assert 0 <= short["allocated_bytes"] <= short["reserved_bytes"] < 2**30
    assert seen.row("dies")["shortage"] is seen.row("control")["shortage"] is None


def test_golden_figures_of_what_ran_are_saved(seen: Seen) -> None:
    """The file holds a figure for each setting that is OK, found by what it says, and for no other."""
    figures = Golden.read(seen.folder / "golden.json")
    assert sorted(figure.name for figure in figures.figures.values()) == ["by hand", "control", "every layer", "half"]
    assert figures.of(Setting("of another name", FULL)).name == "every layer"
    assert figures.of(Setting("unknown", {**FULL, "recompute_num_layers": 2})).name == "control"
    assert (figures.workload, figures.ranks, figures.items) == (Workload("twisted:pair", device="cpu"), 1, ROWS)
    saved = figures.of(CONTROL)
    assert saved.plan == Plan().digest() != figures.of(Setting("planned", budget="50%")).plan
    assert sum(saved.by_category.values()) == saved.allocated_bytes == seen.row("control")["allocated_bytes"]
    assert saved.per_second == pytest.approx(ROWS / saved.step_seconds)
    assert saved.pace_seconds > 0
    assert len(saved.losses[0]) == 3


def test_a_sweep_goes_on(seen: Seen, monkeypatch: pytest.MonkeyPatch, launched: Any, capsys: Any) -> None:
    """What is in the file is not run again but what failed; a line that is cut off is; with --fresh everything is."""
    monkeypatch.chdir(seen.folder)
    path = seen.folder / "sweep.results.jsonl"
    text = path.read_text()
    try:
        path.write_text(text[:-30])  # the second round of the last setting
        launcher = launched(lambda task: good(plan=Plan().to_json()))
        bench("--sweep", "sweep.json", "--json")
        again = [task.setting.name for task in launcher.tasks]
        assert again == ["fails", "no such label", "fails", "no such label", "by hand"]
        assert json.loads(capsys.readouterr().out)["taken_from_results"] == len(seen.lines) - 3
        bench("--sweep", "sweep.json", "--json", "--steps", "3")
        assert launcher.tasks[-1].steps == 3
        assert json.loads(capsys.readouterr().out)["taken_from_results"] == 0
        launcher.tasks.clear()
        path.write_text(text)
        bench("--sweep", "sweep.json", "--json", "--fresh")
        assert launcher.tasks[0].setting == CONTROL
    finally:
        path.write_text(text)


def test_a_regression(launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the golden figure by more than the threshold is a regression, and ends with 1; by less is none."""
    path = str(tmp_path / "golden.json")
    launched(lambda task: good(1.0))
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", path) == cli.OK
    assert "Golden figures of control written to" in capsys.readouterr().out
    launched(lambda task: good(1.04))
    assert bench("gpt-tiny", "--device", "cpu", "--golden", path) == cli.OK
    launched(lambda task: good(1.06))
    assert bench("gpt-tiny", "--device", "cpu", "--golden", path) == cli.FAILED
    out = capsys.readouterr().out
    said = "throughput 5.7 % below the golden figure of control; allowed are 5 %; after 3 rounds, noise 0.0 %"
    assert f"PERF REGRESSION: control: {said}" in " ".join(out.split())
    assert "-5.7%" in out
    assert bench("gpt-tiny", "--device", "cpu", "--golden", path, "--threshold", "6") == cli.OK


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("step_seconds",), float("nan"), "setting 'control': step_seconds is nan; expected a finite number above 0"),
        (("step_seconds",), float("inf"), "step_seconds is inf; expected"),
        (("step_seconds",), None, "step_seconds is None; expected"),
        (("step_seconds",), "1.0", "step_seconds is '1.0'; expected"),
        (("step_seconds",), 0, "step_seconds is 0; expected"),
        (("step_seconds",), -1, "step_seconds is -1; expected"),
        (("step_seconds",), True, "step_seconds is True; expected"),
        (("tflops",), float("nan"), "tflops is nan; expected"),
        (("tflops",), None, "tflops is None, which step_seconds, flops and items make 1.0"),
        (("tflops",), 1.5, "tflops is 1.5, which step_seconds, flops and items make 1.0"),
        (("tflops",), "1", "tflops is '1'; expected"),
        (("tflops",), -1, "tflops is -1; expected"),
        (("flops",), 0, "flops is 0; expected a whole number above 0, or null where they were not counted"),
        (("flops",), None, "tflops is 1.0, which step_seconds, flops and items make None"),
        (("per_second",), float("inf"), "per_second is inf; expected"),
        (("per_second",), 150.0, "per_second is 150.0, which step_seconds, flops and items make 100.0"),
        (("noise_percent",), -1, "noise_percent is -1; expected a finite number from 0 on"),
        (("pace_seconds",), 0, "pace_seconds is 0; expected"),
        (("allocated_bytes",), 1.5, "allocated_bytes is 1.5; expected a whole number above 0"),
        (("allocated_bytes",), 7, "allocated_bytes is 7, which is not the sum of by_category"),
        (("by_category",), {"parameters": None}, "by_category is {'parameters': None}; expected whole numbers"),
        (("losses",), [["nan"]], "losses is [['nan']]; expected for each rank the losses"),
        (("losses",), 3, "losses is 3; expected"),
        (("name",), "", "setting '': name is ''; expected a name"),
        (("plan",), None, "plan is None; expected the digest of a plan"),
        (("more",), 1, "setting 'control': more is not known"),
        (("allocated_bytes",), ..., "setting 'control': allocated_bytes is missing; expected a whole number above 0"),
        ((), 3, "setting None is 3; expected fields by name"),
    ],
)
def test_broken_golden_figures(
    where: tuple[str, ...], value: Any, message: str, launched: Any, tmp_path: Path, capsys: Any
) -> None:
    """A figure that is not finite, not positive or not the others' own ends with 2: the file, setting and field."""
    path = tmp_path / "golden.json"
    launcher = launched(lambda task: good())
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", str(path)) == cli.OK
    data = json.loads(path.read_text())
    if not where:
        data["figures"][CONTROL.key] = value
    elif value is ...:
        del data["figures"][CONTROL.key][where[0]]
    else:
        data["figures"][CONTROL.key][where[0]] = value
    path.write_text(json.dumps(data))
    launcher.tasks.clear()
    assert bench("gpt-tiny", "--device", "cpu", "--golden", str(path)) == cli.USAGE
    assert f"--golden is {path}: " in (said := capsys.readouterr().err)
    assert message in said
    assert launcher.tasks == []


@pytest.mark.parametrize(
    ("changes", "argv", "code", "message"),
    [
        ({}, [], 0, ""),
        ({"allocated_bytes": 2**20 + 2**12}, [], 0, ""),  # 0.4 %
        (
            {"allocated_bytes": 2**20 + 2**16, "by_category": {"parameters": 2**19, "activations": 2**19 + 2**16}},
            [],
            1,
            "MEMORY REGRESSION: control: the peak is 1.06 MiB (1114112), 6.25 % above the golden 1.00 MiB (1048576); "
            "allowed are 0.5 %; more is in: activations 64.00 KiB; after 3 rounds",
        ),
        ({"allocated_bytes": 2**20 + 2**16}, ["--memory-threshold", "7"], 0, ""),
        (  # as of another torch
            {"losses": ["0x1.0p+0", (0.75 + 1e-7).hex()]},
            [],
            0,
            "Losses of control are the golden ones but for the last bits, first on rank 0, step 2: the loss is 0.75",
        ),
        (
            {"losses": ["0x1.0p+0", "0x1.81p-1"]},
            [],
            1,
            "LOSS CHANGED: control: rank 0, step 2: the loss is 0.751953125 (0x1.81p-1), the golden one 0.75 "
            "(0x1.8p-1); allowed is a share of 1e-05; after 3 rounds",
        ),
        (
            {"digest": "another's", "allocated_bytes": 2**21},
            [],
            1,
            "The plan of control is another than in its golden figure: its label or fields mean something else by now.",
        ),
        (
            {"losses": ["0x1.0p+0", "nan"], "allocated_bytes": 2**21},
            [],
            1,
            "; and MEMORY REGRESSION: the peak is 2.00 MiB",
        ),
        # 1 % more TFLOP/s, because FLOPs are counted otherwise: the throughput of the same FLOPs is what is compared
        (
            {"flops": 1_050_000_000_000, "seconds": [1.04] * 3},
            [],
            0,
            "as 1,050,000,000,000 FLOPs, in the golden figure",
        ),
        ({"seconds": [1 / 1.01] * 3}, [], 0, "+1.0%"),
    ],
)
def test_memory_losses_and_throughput(
    changes: dict[str, Any], argv: list[str], code: int, message: str, launched: Any, tmp_path: Path, capsys: Any
) -> None:
    """More bytes and other losses are failures of their own, with what grew; the sign of a change is right."""
    path = str(tmp_path / "golden.json")
    launched(lambda task: good())
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", path) == cli.OK
    launched(lambda task: replace(good(), **changes))
    assert bench("gpt-tiny", "--device", "cpu", "--golden", path, *argv) == code
    out = " ".join(capsys.readouterr().out.split())
    assert message in out
    assert bool(code) == ("REGRESSION" in out or "CHANGED" in out)


def test_a_plan_that_is_made_anew(launched: Any, tmp_path: Path, capsys: Any) -> None:
    """Peaks of a budget are compared where its plan is the golden one; another plan is said, with both peaks."""
    path, argv = str(tmp_path / "golden.json"), ["gpt-tiny", "--device", "cpu", "--budget", "50%"]

    def answer(peak: int, digest: str) -> Callable[[Any], Record]:
        now = {"allocated_bytes": peak, "by_category": {"activations": peak}, "digest": digest}
        return lambda task: good(plan=Plan().to_json(), **now if task.setting.budget else {})

    launched(answer(2**20, "one"))
    assert bench(*argv, "--save-golden", path) == cli.OK
    assert Golden.read(Path(path)).of(Setting("of another name", budget="50%")).plan == "one"
    launched(answer(2**21, "one"))
    assert bench(*argv, "--golden", path) == cli.FAILED
    out = capsys.readouterr().out
    assert "MEMORY REGRESSION: setting" in out
    assert "is another" not in out
    launched(answer(2**21, "other"))
    assert bench(*argv, "--golden", path) == cli.OK
    said = "The plan of setting is another than in its golden figure: it is made anew in each run. Peaks of two plans "
    said += "are not compared; this one is 2.00 MiB (2097152), the golden one 1.00 MiB (1048576)."
    assert said in " ".join(capsys.readouterr().out.split())
    bench(*argv, "--golden", path, "--json")
    assert said in json.loads(capsys.readouterr().out)["notes"]


@pytest.mark.parametrize(
    ("control", "setting", "rounds", "verdicts", "notes"),
    [
        # seconds by round, the last goes on; the golden figures are of 1.0
        ([1.0], [1.0], (3, 3), (OK, OK), ""),
        ([1.0], [1.0, 1.08, 1.09], (8, 8), (OK, run.REGRESSION), "after 8 rounds"),
        ([1.0], [1.0, 1.08, 1.09, 1.0], (4, 4), (OK, OK), ""),
        ([1.0], [0.9, 1.08, 1.2, 1.08, 0.9, 1.2], (9, 9), (OK, run.UNSURE), "after 9 rounds"),
        ([1.2], [1.2], (3, 3), (run.REGRESSION, OK), "The control has moved by -16.7 % against its golden figure"),
        ([0.8], [1.0], (3, 3), (OK, run.REGRESSION), "20.0 % below the golden figure of setting relative to the"),
    ],
)
def test_what_is_unsure(
    control: list[float],
    setting: list[float],
    rounds: tuple[int, int],
    verdicts: tuple[str, str],
    notes: str,
    launched: Any,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """A drop within the noise has more rounds, at most three times as many; a control that moved is the measure."""
    path = str(tmp_path / "golden.json")
    argv = ["gpt-tiny", "--device", "cpu", "-rl", "1"]
    launched(lambda task: good())
    assert bench(*argv, "--save-golden", path) == cli.OK
    seconds = {CONTROL.name: iter(control), "setting": iter(setting)}
    last: dict[str, float] = {}

    def answer(task: Any) -> Record:
        last[task.setting.name] = next(seconds[task.setting.name], last.get(task.setting.name, 0.0))
        return good(last[task.setting.name])

    launched(answer)
    capsys.readouterr()
    code = bench(*argv, "--golden", path, "--json")
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert tuple(row["result"] for row in rows) == verdicts
    assert tuple(row["rounds"] for row in rows) == rounds
    assert code == (run.REGRESSION in verdicts)
    seconds.update({CONTROL.name: iter(control), "setting": iter(setting)})
    assert bench(*argv, "--golden", path) == code
    assert notes in " ".join(capsys.readouterr().out.split())


def test_a_machine_that_is_slower(launched: Any, tmp_path: Path, capsys: Any) -> None:
    """A control as much slower as a fixed piece of work is no regression of anything, but unsure."""
    path = str(tmp_path / "golden.json")
    launched(lambda task: good())
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", path) == cli.OK
    launched(lambda task: good(1.2, pace=[1.2]))
    assert bench("gpt-tiny", "--device", "cpu", "--golden", path) == cli.OK
    assert "UNSURE: control: throughput 16.7 % below" in " ".join(capsys.readouterr().out.split())


def test_golden_figures_of_something_else(launched: Any, tmp_path: Path, capsys: Any) -> None:
    """Figures of another model, batch, device or size are refused in words, before the first round is over."""
    path = str(tmp_path / "golden.json")
    launcher = launched(lambda task: good())
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", path) == cli.OK
    launcher.tasks.clear()
    for argv, what in (
        (["llama-tiny"], "another model: gpt-tiny, here llama-tiny"),
        (["gpt-tiny", "--batch", "2"], "another batch: None, here 2"),
    ):
        assert bench(*argv, "--device", "cpu", "--golden", path) == cli.USAGE
        assert what in capsys.readouterr().err
    assert launcher.tasks == []
    for changes, what in (
        ({"device": "H200"}, "another device: a device, here H200"),
        ({"parameters": 8}, "here 8."),
        ({"items": 7}, "here 7."),
    ):
        launcher = launched(lambda task, changes=changes: replace(good(), **changes))
        assert bench("gpt-tiny", "--device", "cpu", "--golden", path) == cli.USAGE
        assert what in capsys.readouterr().err
        assert len(launcher.tasks) == 1


def test_the_published_way(launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting without a figure of its own is compared with the control's, as was published, and that is said."""
    path = str(tmp_path / "golden.json")
    launched(lambda task: good(1.0))
    assert bench("gpt-tiny", "--device", "cpu", "--save-golden", path) == cli.OK
    launched(lambda task: good(1.0 if task.setting == CONTROL else 1.196))
    argv = ["--recompute-activations", "--recompute_modules", "mlp", "--golden", path]
    assert bench("gpt-tiny", "--device", "cpu", *argv) == cli.FAILED
    out = " ".join(capsys.readouterr().out.split())
    assert "PERF REGRESSION: setting: throughput 16.4 % below the golden figure of control;" in out
    assert "Compared with a golden figure of another name: setting." in out


def test_the_table(launched: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table fits into 80 columns, has no escape codes, and shows what the control costs less."""
    monkeypatch.setenv("COLUMNS", "80")

    def answer(task: Any) -> Record:
        return good() if task.setting == CONTROL else good(2.0, allocated_bytes=2**19)

    launched(lambda task: replace(answer(task), plan=Plan().to_json()))
    assert cli.main(["bench", "run", "gpt-tiny", "--device", "cpu", "--budget", "0.5"]) == cli.OK
    output = capsys.readouterr()
    assert "\x1b" not in output.out
    assert "…" not in output.out
    rows = [line.split() for line in output.out.splitlines()]
    assert ["control", "1.0000", "100", "1.0", "2.0", "–", "–", "10.0%", "3", "OK"] in rows
    assert ["setting", "0.5000", "50", "0.5", "2.0", "-50.0%", "+100.0%", "10.0%", "3", "OK"] in rows
    assert "gpt-tiny, 7 parameters, adamw-fused, on a device" in output.out
    said = " ".join(output.out.split())
    assert "Noise: rounds of one setting, or the two halves of its run, differ by up to 0.0 %." in said
    assert output.err.splitlines()[-1] == "100%  setting: round 3 of 3: done"


def rows_of(*records: Record, device: str = "cpu", rounds: int = 1, dtype: str | None = None) -> run.Result:
    """The result of a control and other settings that each end as a record says."""
    names = ["control", *(f"setting {number}" for number in range(1, len(records)))]
    asked = BenchConfig(Workload("gpt-tiny", device=device, dtype=dtype), tuple(map(Setting, names)), rounds=rounds)
    trials = {name: [[record]] * rounds for name, record in zip(names, records, strict=True)}
    return run.judged(asked, trials, None)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ((DONE,), 0),
        ((OUT,), 1),
        ((OUT, DONE), 0),  # that is what the others are there for
        ((DONE, OUT), 1),
        ((FAILED, DONE), 1),
        ((DONE, NO_PLAN), 3),
        ((DONE, NO_PLAN, MISMATCH), 1),
        ((DONE, NO_PLAN, OUT, REFUSED), 2),
        ((DONE, STOPPED), 1),
    ],
)
def test_exit_codes(ends: tuple[str, ...], code: int) -> None:
    """2 comes before 1 and 1 before 3; a control that runs out of memory is no failure of the others."""
    assert rows_of(*(replace(good(), status=end) for end in ends)).exit_code == code


def test_losses_and_tolerances() -> None:
    """On a CPU the last bit counts; on CUDA a loss may differ by the tolerance of its dtype, which is said."""
    near, far = good(losses=["0x1.0p+0", (0.75 * 1.001).hex()]), good(losses=["0x1.0p+0", (0.75 * 1.1).hex()])

    def verdicts(device: str, dtype: str | None) -> list[str]:
        return [row.result for row in rows_of(good(), good(), near, far, device=device, dtype=dtype).rows]

    assert verdicts("cpu", "bf16") == [OK, OK, MISMATCH, MISMATCH]
    assert verdicts("cuda", "fp32") == [OK, OK, MISMATCH, MISMATCH]
    assert verdicts("cuda", "bf16") == verdicts("cuda", None) == [OK, OK, OK, MISMATCH]
    said = rows_of(good(), near, far, device="cuda", dtype="bf16").how["losses"]
    assert said == "equal within 0.01 of each to those of control: setting 1"
    assert "losses" not in rows_of(good()).how
    nan = good(losses=["nan", "nan"])
    assert [row.result for row in rows_of(nan, nan, good()).rows] == [OK, OK, MISMATCH]


def test_without_a_control_the_first_that_ran_is_compared_with() -> None:
    """Where the control runs out of memory, losses are compared with the first setting that finished, by name."""
    other = good(losses=["0x1.0p+0", "0x1.0p+0"])
    rows = rows_of(replace(good(), status=OUT), good(), other).rows
    assert [row.result for row in rows] == [OUT, OK, MISMATCH]
    assert rows[2].compared_with == "setting 1"
    notes = [run.notes(rows_of(replace(good(), status=OUT), *others)) for others in ([good(), other], [good()])]
    assert notes[0][1:] == ["The control did not finish, so losses are compared with those of setting 1."]
    assert notes[1][1:] == ["The control did not finish, so no losses could be compared."]


def test_nothing_is_said_of_what_did_not_run() -> None:
    """Where neither control nor setting finished, that is said, and of times, bytes and losses nothing."""
    result = rows_of(replace(good(), status=OUT, seconds=[]), replace(good(), status=OUT, seconds=[]))
    assert result.how == {}
    assert run.notes(result) == ["Nothing finished, so no time, memory or loss is compared."]


def test_figures_of_several_ranks() -> None:
    """The slowest rank is the job's time, memory is the most of any, and tokens are those of all."""
    ranks = [good(1.0, allocated_bytes=5), good(2.0, allocated_bytes=4, reserved_bytes=9)]
    asked = BenchConfig(Workload("gpt-tiny"), (CONTROL,), rounds=1)
    row = run.judged(asked, {"control": [ranks]}, None).rows[0]
    assert (row.step_seconds, row.tflops, row.per_second) == (2.0, 0.5, 100.0)
    assert (row.allocated_bytes, row.reserved_bytes) == (5, 2**21)
    bad = [[replace(good(), status=STOPPED), replace(good(), status=OUT, detail="step 1")]]
    row = run.judged(asked, {"control": bad}, None).rows[0]
    assert (row.result, row.detail, [rank.status for rank in row.ranks]) == (OUT, "step 1", [STOPPED, OUT])


@pytest.mark.parametrize(
    ("code", "text", "status", "detail"),
    [
        (-signal.SIGKILL, "", OUT, "killed by SIGKILL, as the system does where memory runs out"),
        (-signal.SIGABRT, "terminate called\nwhat(): std::bad_alloc", OUT, "died of SIGABRT: what(): std::bad_alloc"),
        (-signal.SIGSEGV, "", FAILED, "died of SIGSEGV: it wrote nothing"),
        (1, "Traceback\nTypeError: no", FAILED, "exit code 1: TypeError: no"),
        (0, "", FAILED, "exit code 0: it wrote nothing"),
    ],
)
def test_ends_without_a_record(code: int, text: str, status: str, detail: str) -> None:
    """A process that could not say what happened is understood by its signal, its exit code, and its last words."""
    assert trials.ended_badly(code, text) == Record(status, detail)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "experiments: []; expected a list"),
        ([{"name": "a", "recompute_granularty": "full"}], "experiment 1: 'recompute_granularty' is not known"),
        ([{"name": "a", "recompute_granularty": "full"}], "the nearest is 'recompute_granularity'"),
        ([{"name": "a", "plann": "p.json"}], "the nearest is 'plan'"),
        ([{"name": "control", **FULL}], "experiment 1: its name is 'control', the control's own"),
        ([{"name": "a", **FULL}, {"name": "a", **FULL}], "experiment 2: its name is 'a', that of another experiment"),
        ([{**FULL}], "experiment 1: it has no name"),
        ([{"name": 3, **FULL}], "experiment 1: its name is 3"),
        ([{"name": "a"}], "experiment 1: it says nothing but its name"),
        ([3], "experiment 1: it is 3"),
        ([{"name": "a", "budget": "1GiB", **FULL}], "a: budget and recompute_granularity both say what is recomputed"),
        ([{"name": "a", "budget": "24G"}], "'g' is not a unit of memory"),
        ([{"name": "a", "plan": "no.json"}], "no such file"),
        ([{"name": "a", "recompute_granularity": "full"}], 'a: recompute_granularity="full" needs recompute_method'),
    ],
)
def test_sweeps_that_are_refused(fields: list[Any], message: str, tmp_path: Path, capsys: Any) -> None:
    """A file that says nothing, or something that means nothing, ends with 2 before anything runs."""
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"model": "gpt-tiny", "experiments": fields}))
    assert bench("--sweep", str(path)) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert message in " ".join(output.err.split())
    assert not path.with_suffix(".results.jsonl").exists()


def test_yaml_and_the_command_line(tmp_path: Path, launched: Any) -> None:
    """A sweep may be YAML; all recompute fields can be pasted; an option on the command line wins over the file's."""
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "model: gpt-tiny\nrounds: 1\ndevice: cpu\nbatch: 3\nexperiments:\n"
        "  - name: a\n    recompute_granularity: full\n    recompute_method: block\n    recompute_num_layers: 2\n"
        "    cpu_offloading: true\n    cpu_offloading_num_layers: 1\n  - {name: b, budget: 50%}\n"
    )
    _, found = run.read_sweep(path)
    config = RecomputeConfig(
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        cpu_offloading=True,
        cpu_offloading_num_layers=1,
    )
    assert [dict(found[0].fields), found[1].budget] == [config.to_dict(), "50%"]
    launcher = launched(lambda task: replace(good(), plan=Plan().to_json()))
    assert bench("--sweep", str(path), "--batch", "5", "--json") == cli.OK
    assert {task.workload.batch for task in launcher.tasks} == {5}
    assert [task.setting.name for task in launcher.tasks] == ["control", "a", "b", "b"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--recompute_granularity", "full", "--recompute_method", "block", "--recompute_num_layers", "2"],
        ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2"],
        ["-rl", "2"],
    ],
)
def test_flags_in_every_spelling(argv: list[str], launched: Any) -> None:
    """The fields can be written as Megatron-LM and Megatron-Bridge write them."""
    launcher = launched(lambda task: good())
    assert bench("gpt-tiny", "--device", "cpu", *argv, "--json", "--rounds", "1") == cli.OK
    assert [dict(task.setting.fields) for task in launcher.tasks] == [{}, {**FULL, "recompute_method": "block"} | {
        "recompute_num_layers": 2
    }]  # fmt: skip


def test_a_workload_that_cannot_be_run(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the control itself is refused, as for a model that does not exist, that is the answer, with 2."""
    launcher = launched(lambda task: Record(REFUSED, "MODEL is nothing"))
    assert bench("gpt-tinny", "--device", "cpu", "-rl", "1") == cli.USAGE
    assert capsys.readouterr().err == "torch-recompute: error: MODEL is nothing\n"
    assert len(launcher.tasks) == 1


def test_small_models_are_there() -> None:
    """The models that need nothing installed have the size asked for, a batch for each rank, and the same weights."""
    cpu = torch.device("cpu")
    workload = Workload("gpt-tiny", batch=2, sequence=8, dtype="bf16")
    one, other = (trials.ready(workload, rank, cpu) for rank in (0, 1))
    assert [tuple(one.args[0].shape), one.items, one.model.training] == [(2, 9), ("tokens", 18), True]
    assert {p.dtype for p in one.model.parameters()} == {torch.bfloat16}
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert not torch.equal(one.args[0], other.args[0])
    assert torch.equal(trials.ready(workload, 1, cpu).args[0], other.args[0])
    assert one.nbytes == 2 * sum(p.numel() for p in one.model.parameters()) + 8 * 18


def test_models_of_transformers_run(tmp_path: Path) -> None:
    """A configuration becomes a model with weights, and random tokens that are their own labels."""
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_head": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "vocab_size": 50, "n_positions": 16}))
    made = trials.ready(Workload(str(path), batch=2), 0, torch.device("cpu"))
    ids = made.kwargs["input_ids"]
    assert (tuple(ids.shape), made.kwargs["labels"] is ids, made.items) == ((2, 16), True, ("tokens", 32))
    assert len(ids.unique()) > 1
    assert 0 < made.model(**made.kwargs).loss.item() < 10
    assert batch_for(load(str(path)).model, "it")["input_ids"].unique().tolist() == [1]


def test_a_file_of_results_that_is_none(tmp_path: Path) -> None:
    """A line that is no result is an error that names it, unless it is one of ours that was cut off."""
    path = tmp_path / "results.jsonl"
    kept = Journal(path)
    kept.add("key", "name", 0, [good()])
    path.write_text(path.read_text() + '{"schema_version": 1, "key": "oth')
    again = Journal(path)
    again.add("other", "name", 0, [replace(good(), status=FAILED)])
    last = Journal(path)
    assert last.get("key", 0) == [good()]
    assert last.get("key", 1) is last.get("other", 0) is None
    for other in ("hello", "\udcff"):  # the latter is no text
        path.write_text(f"{other}\n", errors="surrogateescape")
        with pytest.raises(ArgumentError, match="whose line 1 is no result of bench run"):
            Journal(path)


def test_the_limit_is_beyond_what_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is limited is what the step takes: libraries are outside of it, the model that is there is inside."""
    if sys.platform != "linux":
        pytest.skip("the limit is Linux's")
    import resource

    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, values: limits.append(values))
    before = trials.memory_status("VmData")
    trials.limit(2**30, torch.device("cpu"), held=2**20)
    assert before is not None
    assert abs(limits[0][0] - (before + 2**30 - 2**20)) < 2**26
    assert [trials.is_out_of_memory(error) for error in (MemoryError(), RuntimeError("CUDA out of memory"))] == [
        True,
        True,
    ]
    assert not trials.is_out_of_memory(ValueError("out of memory"))


def test_settings_are_found_by_what_they_say() -> None:
    """A key depends on the fields, the budget and the plan's choices, and not on the name or on a plan's source."""
    plans = [Plan((Choice(("a",)),), source).to_json() for source in ("one", "two")]
    assert Setting("a", plan=plans[0]).key == Setting("b", plan=plans[1]).key != Setting("b").key
    assert Setting("a", FULL).key != Setting("a", {**FULL, "recompute_num_layers": 2}).key
    config = BenchConfig(Workload("gpt-tiny"))
    keys = [config.key(CONTROL, 1), config.key(CONTROL, 2), replace(config, steps=6).key(CONTROL, 1)]
    keys.append(replace(config, rounds=9).key(CONTROL, 1))
    assert len(set(keys)) == 3
    assert keys[3] == keys[0]
    assert CONTROL.words == "nothing recomputed"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "bench run needs a MODEL"),
        (["gpt-tiny", "--steps", "0"], "--steps is 0; expected a whole number of at least 1"),
        (["gpt-tiny", "--warmup", "-1"], "--warmup is -1; expected a whole number of at least 0"),
        (["gpt-tiny", "--threshold", "5"], "--threshold goes with --golden"),
        (["gpt-tiny", "--memory-threshold", "1"], "--memory-threshold goes with --golden"),
        (
            ["gpt-tiny", "--golden", "no.json", "--threshold", "101"],
            "--threshold is 101.0; expected a number of percent",
        ),
        (["gpt-tiny", "--golden", "no.json", "--threshold", "nan"], "--threshold is nan; expected a number of percent"),
        (["gpt-tiny", "--golden", "no.json", "--memory-threshold", "inf"], "--memory-threshold is inf; expected a num"),
        (["gpt-tiny", "--fresh"], "--fresh goes with --results"),
        (["gpt-tiny", "--capacity", "50%"], "--capacity is 50%; expected the bytes that there are"),
        (["gpt-tiny", "--capacity", "x"], "--capacity is x; expected the bytes that there are"),
        (["gpt-tiny", "--golden", "no.json"], "--golden is no.json: no such file or directory"),
        (["gpt-tiny", "--save-golden", "no/folder/a.json"], "there is no folder no/folder"),
        (["gpt-tiny", "--plan", "a.json", "--budget", "1GiB"], "budget and plan both say what is recomputed"),
        (
            ["gpt-tiny", "--sweep", "a.yaml", "--budget", "1GiB"],
            "--budget says what is recomputed, and so does the file",
        ),
        (["gpt-tiny", "--sweep", "a.yaml", "-rl", "1"], "--recompute_granularity says what is recomputed, and so"),
        (["gpt-tiny", "--recompute_method", "block"], "recompute_method='block' would have no effect"),
    ],
)
def test_what_cannot_be_asked(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be answered ends with 2, nothing on stdout, and what to write."""
    assert bench(*argv) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_a_trial_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is given up, because another rank has ended, is killed with all that it has started."""
    monkeypatch.chdir(tmp_path)
    pids = tmp_path / "pids"
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "def pair():\n"
        "    other = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{other.pid}}')\n"
        "    time.sleep(600)\n"
    )
    record = trials.launch(TrialTask(Workload("sleeps:pair"), CONTROL, 1, 0), pids.exists)
    assert record.status == STOPPED
    for pid in map(int, pids.read_text().split()):
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()
