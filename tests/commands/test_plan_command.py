"""`torch-recompute plan`: models by name and by file, the table, the JSON document, the curve, and each exit code.

A few commands plan a whole step. Of the others is tested what a planner or a search is given, and what is printed of a
result that is there already; `test_models.py` has the options of the step itself. The rest of the whole commands are
nightly.
"""

from __future__ import annotations

import gc
import io
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console
from torch import nn

from support.models import LLAMA, Made
from torch_recompute import Plan, SizeClass, apply, errors, make_plan, peaks
from torch_recompute.commands import cli, output
from torch_recompute.commands.models import PRESETS, batch_for, load
from torch_recompute.commands.plan import _point, _print_most
from torch_recompute.plan.plan import Prediction
from torch_recompute.planner.configurations import PEAK_WORDS
from torch_recompute.planner.hosts import PlanOptions
from torch_recompute.planner.layout import LayoutPlanner
from torch_recompute.planner.longest import Longest, LongestOnRanks
from torch_recompute.planner.states import OptimizerSpec
from torch_recompute.simulation.devices import HOSTS
from torch_recompute.simulation.training_step import TrainingStep


def block() -> nn.Module:
    return Made(lambda m, x: x + m.down(nn.functional.gelu(m.up(x))), up=nn.Linear(8, 32), down=nn.Linear(32, 8))


Task = tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]


def pair() -> Task:
    return nn.Sequential(*(block() for _ in range(3))), (torch.ones(256, 8),), torch.mean


def named_pair() -> Task:
    model, (x,), loss = pair()
    return model, {"input": x}, loss


def heavy() -> Task:
    """Of which weights and states are all of the peak."""
    return nn.Sequential(block()), (torch.ones(1, 8),), torch.mean


def only_a_model() -> nn.Module:
    return pair()[0]


def three() -> tuple[nn.Module, int, int]:
    return pair()[0], 1, 2


pytestmark = pytest.mark.usefixtures("plain_terminal", "this_test")
nightly = pytest.mark.nightly


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The path of a tiny configuration."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["plan", *argv, "--json"]) == cli.OK
    return json.loads(capsys.readouterr().out)


SIZES = {
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama4-scout": 107_769_861_120,  # without its tower of vision
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b": 79_674_391_296,  # without the layer that predicts a second token
    "mixtral-8x7b": 46_702_792_704,
    "mistral-small-24b": 23_572_403_200,
    "gemma3-27b": 27_009_346_304,  # without its tower of vision
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5-air": 106_852_245_504,  # without the layer that predicts a second token
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "minimax-m2": 228_689_748_992,
    "nemotron-h": 8_100_852_736,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "vit-h": 632_045_800,
    "whisper-large-v3": 1_543_490_560,
}


@pytest.mark.parametrize("name", PRESETS)
def test_models_by_name_have_their_published_size(name: str) -> None:
    """A model by name is built on meta, in bfloat16, with as many parameters as were published, and takes its batch."""
    pytest.importorskip("transformers")
    model = load(name).model
    assert type(model).__name__ == PRESETS[name]["architectures"][0]
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert {p.dtype for p in load(name, torch.float16).model.parameters()} == {torch.float16}
    assert "labels" in batch_for(model, name)


def test_positions_by_name() -> None:
    """The models of one size that differ in their positions have those of the release."""
    assert PRESETS["llama3-8b"]["max_position_embeddings"] == 8192
    assert PRESETS["llama3.1-8b"]["max_position_embeddings"] == 131072


def test_devices_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is not known is refused with names close to it; an alias is the device that it means."""
    for asked, near in (("gb20", "gb200"), ("MI300", "mi300x"), ("h100sxm", "h100")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", "this_test:pair", "--recompute", "none", "--device", asked])
        assert ended.value.code == cli.USAGE
        assert f"close to it: {near}" in capsys.readouterr().err
    argv = "this_test:pair", "--recompute", "0", "--device"
    seconds = {
        name: document(capsys, *argv, name)["configurations"][0]["step_seconds"]
        for name in ("rtx-a6000", "A6000", "b200", "gb200", "mi300x")
    }
    assert seconds["rtx-a6000"] == seconds["A6000"] > seconds["gb200"]
    assert document(capsys, *argv, "a6000")["device"] == "rtx-a6000"


def test_a_configuration(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is the plan's own, as it is in the file, and nothing goes to stderr."""
    monkeypatch.setattr(errors.text, "LINES", 1e9)  # on a busy machine work would be said to be long
    out = tmp_path / "plan.json"
    argv = ["--batch", "2", "--sequence", "256", "--dtype", "fp32", "--budget", "0.3", "--out", str(out)]
    assert cli.main(["plan", llama, *argv]) == cli.OK
    output = capsys.readouterr()
    plan = Plan.from_json(out.read_text())
    first, *table = output.out.splitlines()
    assert "LlamaForCausalLM" in first
    assert "in float32; input_ids 2 x 256, labels 2 x 256; layers eager; optimizer adamw-fused" in first
    assert table[: len(str(plan).splitlines())] == str(plan).splitlines()
    assert output.err == ""
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes < plan.prediction.plain_peak_bytes


@nightly
def test_a_configuration_in_python(llama: str, tmp_path: Path) -> None:
    """The file holds the plan that `make_plan` makes of the model and the batch, and it can be applied."""
    out = tmp_path / "plan.json"
    argv = ["--batch", "2", "--sequence", "256", "--dtype", "fp32", "--budget", "0.3", "--out", str(out), "--quiet"]
    assert cli.main(["plan", llama, *argv]) == cli.OK
    model = load(llama, torch.float32).model
    ids = torch.ones(2, 256, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = make_plan(model, (), batch, budget=0.3, optimizer="adamw-fused", device="h100")
    assert plan == Plan.from_json(out.read_text())
    apply(model, plan).remove()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The document says the step, the plan as `Plan.from_json` reads it, and the step without it."""
    found = document(capsys, "this_test:pair", "--budget", "50%", "--optimizer", "sgd", "--device", "a100")
    assert list(found) == [
        *("schema_version", "command", "model", "class", "parameters", "dtypes", "inputs", "layers", "optimizer"),
        *("offload", "host_bandwidth", "tiles", "notes", "hold_output", "accumulate", "set_to_none", "device"),
        *("plain", "advice", "plan"),
    ]
    assert (found["schema_version"], found["command"], found["device"]) == (1, "plan", "a100")
    assert found["inputs"] == {"input": [256, 8]}
    plan = Plan.from_json(json.dumps(found["plan"]))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes < found["plain"]["peak_bytes"]
    assert plan.prediction.step_seconds >= found["plain"]["step_seconds"] == plan.prediction.plain_step_seconds


def test_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Along the curve the budget rises and the step gets shorter, to that of the step without recomputation."""
    found = document(capsys, "this_test:pair", "--frontier", "--optimizer", "none", "--device", "h100")
    plans = [Plan.from_json(json.dumps(plan)) for plan in found["frontier"]]
    promises = [plan.prediction for plan in plans if plan.prediction is not None]
    budgets = [promise.budget_bytes for promise in promises]
    seconds = [promise.step_seconds for promise in promises]
    assert 3 <= len(plans) == len(promises) <= 10
    assert budgets == sorted(set(budgets))
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == found["plain"]["step_seconds"]
    assert all(promise.peak_bytes <= promise.budget_bytes for promise in promises)

    picture = tmp_path / "curve.png"
    argv = ["--frontier", "--optimizer", "none", "--device", "h100", "--plot", str(picture)]
    assert cli.main(["plan", "this_test:pair", *argv]) == cli.OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [f"{1000 * s:,.1f}" for s in seconds] == [cells[1] for cells in lines if cells and cells[-1].endswith("%")]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_curve_with_nothing_to_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no plan lowers the peak, it is said what holds it and which option lowers it, to what; else nothing is."""
    argv = ["this_test:heavy", "--frontier", "--device", "h100", "--optimizer", "adamw"]
    found = document(capsys, *argv)
    assert found["plain"]["peak_bytes"] - found["frontier"][0]["prediction"]["peak_bytes"] < 1000
    held, lower = found["flat"]
    assert held.startswith("No plan lowers the peak by more than 2%")
    fused = lower.split("--optimizer adamw-fused (")[1].split(")")[0]
    (fitting,) = document(capsys, "this_test:heavy", "--recompute", "0", "--device", "h100")["configurations"]
    assert errors.size(fitting["peak_bytes"], up=True) == fused
    assert cli.main(["plan", *argv]) == cli.OK
    assert held in capsys.readouterr().out
    assert document(capsys, "this_test:pair", "--frontier", "--device", "h100")["flat"] == []


def test_configurations(llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks of `--recompute` are those of `peaks` in Python, in the table and in the document, also if repeated."""
    argv = [llama, "--batch", "2", "--sequence", "1024", "--dtype", "fp32", "--no-hold-output"]
    words = ["--recompute", "none,full,core_attn,mlp", "--recompute", "mlp"]
    found = document(capsys, *argv, *words)
    (note,) = found["notes"]
    assert "1,024 tokens are more than the 512 positions" in note
    batch = batch_for(model := load(llama, torch.float32).model, "it", 2, 1024)
    names = ["none", "full", "core_attn,mlp", "mlp"]
    same = peaks(model, batch, recompute=words[1::2], optimizer="adamw-fused", device="h100", hold_output=False)
    assert found["configurations"] == [json.loads(json.dumps(one.as_data())) for one in same]
    assert [one["recompute"] for one in found["configurations"]] == names
    assert found["device"] == "h100"
    for one in found["configurations"]:
        assert one["peak_bytes"] == sum(one["made_of"].values())
    monkeypatch.setattr("torch_recompute.commands.plan.peaks_of", lambda *_: same)
    assert cli.main(["plan", *argv, *words, "--explain"]) == cli.OK
    output = capsys.readouterr().out
    assert str(same) in output
    assert note in output
    assert all(f"\n{word}" in output for word in PEAK_WORDS)


class Reached(Exception):
    """What a command has given to that which plans or searches: its name and the arguments."""


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Runs a command up to where something is planned, searched for or simulated; returns what that is given."""

    def stop(name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise Reached(name, *args, *kwargs.values())

    for name in ("Planner", "peaks_of", "Longest", "LayoutPlanner", "LayoutRanks", "LongestOnRanks"):
        monkeypatch.setattr(f"torch_recompute.commands.plan.{name}", partial(stop, name))

    def run(*argv: str) -> tuple[Any, ...]:
        with pytest.raises(Reached) as caught:
            cli.main(["plan", *argv])
        return caught.value.args

    return run


def test_what_is_planned_with(reached: Callable[..., tuple[Any, ...]]) -> None:
    """A budget and a curve have a planner of the step, with what else a plan may use; configurations are simulated."""
    for asked in (["--budget", "0.5"], ["--frontier"]):
        name, step, plan_options = reached("this_test:pair", *asked, "--offload", "1GiB", "--device", "a100")
        assert (name, step.device, plan_options) == ("Planner", "a100", PlanOptions("1GiB"))
    name, step, plans, plan_options, dashes = reached("this_test:pair", "--recompute", "none,full", "--recompute", "0")
    assert (name, [*plans], plan_options, dashes) == ("peaks_of", ["none", "full", "0"], PlanOptions(), "--")
    assert [choice.paths for choice in plans["0"]] == [("0",)]


def test_autocast_is_on_where_a_step_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype of `--autocast` is that of the block in which a step is profiled, simulated and searched."""
    seen: list[torch.dtype | None] = []

    def stop(*_: Any, **__: Any) -> NoReturn:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        raise Reached

    for name in ("Planner", "peaks_of", "Longest.plan"):
        monkeypatch.setattr(f"torch_recompute.commands.plan.{name}", stop)
    for asked in ("--budget 0.5", "--recompute full", "--budget 1GiB --largest-batch"):
        for autocast in ("", " --autocast bf16", " --autocast fp16"):
            with pytest.raises(Reached):
                cli.main(["plan", "this_test:pair", *(asked + autocast).split()])
    assert seen == [None, torch.bfloat16, torch.float16] * 3


@pytest.mark.parametrize("asked", [[], ["--recompute", "full"]], ids="".join)
def test_what_a_search_is_given(
    asked: list[str], llama: str, tmp_path: Path, reached: Callable[..., tuple[Any, ...]]
) -> None:
    """The longest and the largest are searched for within the budget, up to the end of a table of positions."""
    name, step, budget, plan_options, batch, most, dashes = reached(
        llama, "--longest", "--budget", "1GiB", "--fsdp", "2", "--cp", "2", *asked
    )
    assert (name, budget, plan_options, batch, most, dashes) == ("Longest", "1GiB", PlanOptions(), False, None, "--")
    assert step.ranks.cp == 2
    _, _, budget, plan_options, batch, most, _ = reached(
        "this_test:pair", "--largest-batch", "--budget", "fit", "--tiles", *asked
    )
    assert (budget, plan_options, batch, most) == ("fit", PlanOptions(tiles=True), True, None)
    config = tmp_path / "config.json"
    sizes = {"n_positions": 96, "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    assert reached(str(config), "--longest", "--budget", "1GiB", *asked)[5] == 96


def test_what_ranks_are_planned_with(llama: str, reached: Callable[..., tuple[Any, ...]]) -> None:
    """Ranks have the model, their layout, the tokens, the optimizer with its states, the device, and what else."""
    argv = [llama, "--pp", "3", "--dp", "2", "--mbs", "2", "--batch", "24", "--sequence", "64"]
    states = ["--optimizer-on-host", "--offload", "--device", "a100"]
    name, model, word, layout, *others = reached(*argv, *states, "--budget", "50%")
    assert (name, type(model).__name__, word) == ("LayoutPlanner", "LlamaForCausalLM", llama)
    assert (layout.ranks.pp, layout.ranks.dp, layout.mbs, layout.microbatches) == (3, 2, 2, 6)
    assert others == [
        64,
        "adamw",
        "a100",
        OptimizerSpec(None, "", on_host=True),
        PlanOptions(offload=True),
        HOSTS["typical"],
    ]
    assert reached(*argv, "--frontier", "--states", "8bit")[0] == "LayoutPlanner"
    name, _, _, layout, tokens, *_ = reached(*argv, "--recompute", "full")
    assert (name, layout.mbs, tokens) == ("LayoutRanks", 2, 64)
    name, make, budget, batch, most = reached(*argv, "--budget", "1GiB", "--longest")
    assert (name, budget, batch, most) == ("LongestOnRanks", "1GiB", False, None)
    layout, tokens = make(lambda *args: args[2:4], 128)
    assert (layout.mbs, layout.batch, tokens) == (2, 24, 128)
    name, make, _, batch, _ = reached(*argv, "--budget", "1GiB", "--largest-batch")
    assert (name, batch) == ("LongestOnRanks", True)
    layout, tokens = make(lambda *args: args[2:4], 4)
    assert (layout.mbs, layout.batch, layout.microbatches, tokens) == (4, 48, 6, 64)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Ends searches at once, with a plan for some shapes whose steps take a MiB and a quarter of a second each."""
    model, batch, loss = pair()
    promise = make_plan(model, batch, budget=0.5, loss=loss, device="h100", optimizer="none").prediction
    assert promise is not None

    def end(*shapes: tuple[int, ...], at: int = 0) -> Plan:
        taken = {"peak_bytes": 2**20, "step_seconds": 0.25, "plain_step_seconds": 0.2}
        parts = ({name: figure * number for name, figure in taken.items()} for number in range(1, len(shapes) + 1))
        promises = [replace(promise, **part) for part in parts]
        found = Plan(sizes=tuple(SizeClass(shape, (), one) for shape, one in zip(shapes, promises, strict=True)))

        def plan(search: Longest) -> Plan:
            search.best = shapes[-1][at]
            return found

        monkeypatch.setattr(Longest, "plan", plan)
        return found

    return end


def test_what_a_search_prints(ended: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most that was found is printed with a row for each size; the document and the file have the plan."""
    plan, out = ended((512, 8), (1500, 8)), tmp_path / "plan.json"
    argv = ["this_test:pair", "--largest-batch", "--budget", "3MiB", "--device", "h100", "--out", str(out)]
    found = document(capsys, *argv)
    assert (found["found"], found["most"]) == ("batch", 1500)
    assert [point["shape"] for point in found["points"]] == [[512, 8], [1500, 8]]
    assert [point["items_per_second"] for point in found["points"]] == [512 * 8 / 0.25, 1500 * 8 / 0.5]
    assert Plan.from_json(json.dumps(found["plan"])) == Plan.from_json(out.read_text()) == plan
    assert cli.main(["plan", *argv]) == cli.OK
    said = capsys.readouterr().out
    assert "at most 1,500 items in a batch: peak 2.00 MiB" in said
    rows = [line.split() for line in said.splitlines() if "%" in line and "x 8" in line]
    assert [(row[0], *row[3:6]) for row in rows] == [
        ("512", "1.00", "250.0", "+25.0%"),
        ("1500", "2.00", "500.0", "+25.0%"),
    ]


@pytest.mark.parametrize(
    ("model", "tokens", "note"),
    [
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 1}, 96, "96 tokens are all the positions that"),
        (LLAMA, 600, "600 tokens are more than the 96 positions that"),
        (LLAMA, 80, ""),
    ],
)
def test_what_is_said_of_positions_that_a_search_has_met(
    model: dict[str, Any],
    tokens: int,
    note: str,
    ended: Callable[..., Plan],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That the longest sequence ends a table of positions, or is beyond rotary ones, is printed beside it."""
    pytest.importorskip("transformers")
    head = {"architectures": ["GPT2LMHeadModel"], "n_positions": 96, "max_position_embeddings": 96, "vocab_size": 16}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**head, **model, "max_position_embeddings": 96}))
    ended((1, tokens), at=1)
    argv = [str(config), "--longest", "--budget", "1GiB", "--sequence", "32"]
    found = document(capsys, *argv)
    assert found["most"] == tokens
    assert [one.partition(" that")[0] + " that" for one in found["notes"]] == ([note] if note else [])
    assert cli.main(["plan", *argv]) == cli.OK
    assert note in capsys.readouterr().out


@nightly
def test_the_longest_sequence(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most tokens that a budget holds, five lengths with seconds and tokens per second, and a plan for all."""
    out = tmp_path / "plan.json"
    argv = [llama, "--longest", "--batch", "2", "--budget", "800KiB", "--optimizer", "sgd", "--out", str(out)]
    found = document(capsys, *argv, "--device", "cpu")
    plan = Plan.from_json(out.read_text())
    assert plan == Plan.from_json(json.dumps(found["plan"]))
    assert (found["found"], plan.sizes[-1].shape) == ("sequence", (2, found["most"]))
    assert len(found["points"]) == len(plan.sizes) == 5
    for point, size in zip(found["points"], plan.sizes, strict=True):
        assert size.prediction is not None
        assert tuple(point["shape"]) == size.shape
        assert point["peak_bytes"] == size.prediction.peak_bytes <= 800 * 2**10
        assert point["items_per_second"] == pytest.approx(2 * size.shape[1] / size.prediction.step_seconds)
    assert any("more than the 512 positions" in note for note in found["notes"]) == (found["most"] > 512)


@nightly
def test_the_longest_of_ranks_that_share_a_sequence(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most is of whole sequences, of which each rank holds its part; so are the lengths with seconds."""
    monkeypatch.setattr("torch_recompute.planner.longest.SIZES", 1)
    argv = [llama, "--cp", "2", "--zero", "3", "--budget", "800KiB", "--device", "cpu", "--sequence", "64"]
    found = document(capsys, *argv, "--longest")
    sizes = [Plan.from_json(json.dumps(found["plan"])).sizes[-1].shape, tuple(found["points"][-1]["shape"])]
    assert sizes == [(1, found["most"] // 2), (1, found["most"])]
    (stated,) = document(capsys, *argv, "--longest", "--recompute", "full")["configurations"]
    assert stated["most"] == pytest.approx(found["most"], rel=0.1)
    argv = [*argv[:5], *argv[7:-1], str(stated["most"]), "--recompute", "full"]
    (one,) = document(capsys, *argv)["configurations"]
    assert one["peak_bytes"] == stated["peak_bytes"] <= 800 * 2**10


@nightly
def test_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest batch is found for a function of the user, too, and printed with a row for each size."""
    argv = ["this_test:pair", "--largest-batch", "--budget", "100KiB", "--device", "h100", "--optimizer", "none"]
    found = document(capsys, *argv)
    assert (found["found"], found["points"][-1]["shape"]) == ("batch", [found["most"], 8])
    assert cli.main(["plan", *argv]) == cli.OK
    output = capsys.readouterr().out
    assert (
        f"at most {found['most']:,} items in a batch: peak {errors.size(found['points'][-1]['peak_bytes'])}" in output
    )
    for point in found["points"]:
        assert f"{1000 * point['step_seconds']:,.1f}" in output


GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "figures", "peak", "reserves"),
    [
        ("fit (21 GiB)", {"room_bytes": 24 * GIB, "limited_bytes": 23 * GIB}, "20.00 GiB", "reserves 23.0 of 24.0 GiB"),
        ("22GiB", {"room_bytes": 22 * GIB}, "20.00 GiB within 22GiB", "reserves 25.0 GiB for it, more than the budget"),
        ("26GiB", {"room_bytes": 26 * GIB}, "20.00 GiB within 26GiB", ""),
    ],
)
def test_the_first_line_says_what_the_allocator_reserves(
    budget: str, figures: dict[str, int], peak: str, reserves: str
) -> None:
    """What decides with "fit" is beside what there is; a number of bytes is compared; the table has the same figure."""
    promise = Prediction(
        *(20 * GIB, 20 * GIB, 40 * GIB, 1.0, 1.0, 0, 1.0, "a card", "", ()),
        budget=budget,
        reserved_bytes=25 * GIB,
        **figures,
    )
    plan = Plan((), "", promise, sizes=(SizeClass((28, 8), (), promise),))
    search = Longest(TrainingStep(nn.Linear(8, 8), (torch.ones(1, 8),), {}), budget, batch=True)
    search.best = 28
    console = Console(file=io.StringIO(), width=200)
    _print_most(console, search, plan)
    first, *lines = console.file.getvalue().splitlines()
    more = reserves and f"; PyTorch's allocator {reserves}"
    assert first == f"at most 28 items in a batch: peak {peak} on a card{more}"
    assert any(line.startswith("the largest: ") and line.endswith(more) for line in lines)
    assert any("reserved GiB" in line for line in lines) is ("limited_bytes" in figures)
    assert _point(plan.sizes[0], 1).get("limited_bytes") == figures.get("limited_bytes")


@nightly
def test_a_search_ends_at_a_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No sequence is longer than the table of positions, however large the budget."""
    config = tmp_path / "config.json"
    sizes = {"n_positions": 96, "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    found = document(capsys, str(config), "--longest", "--budget", "1GiB")
    assert found["most"] == 96
    assert any("96 tokens are all the positions" in note for note in found["notes"])


def test_an_interrupted_search_says_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted, the search prints the most that is known to fit, and ends as an interrupted command does."""
    before = signal.getsignal(signal.SIGINT)

    def plan(self: Longest) -> Plan:
        self.best, self.best_peak_bytes = 1500, 3 * 2**20
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert self.interrupted
        raise KeyboardInterrupt

    monkeypatch.setattr(Longest, "plan", plan)
    monkeypatch.setattr(Longest, "stated", lambda self, plans: plan(self))
    argv = ["plan", "this_test:pair", "--largest-batch", "--budget", "1MiB", "--device", "h100"]
    assert cli.main(argv) == output.INTERRUPTED
    assert "interrupted: 1,500 items in a batch fit, with a peak of 3.00 MiB" in capsys.readouterr().out
    assert cli.main([*argv, "--recompute", "full"]) == output.INTERRUPTED
    assert "1,500 items in a batch fit, with a peak of 3.00 MiB under full" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_garbage_is_looked_for_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that looks for cyclic garbage rarely leaves the process as it was, whether there is a plan or not."""
    before = gc.get_threshold()
    with output.collecting_rarely():
        assert gc.get_threshold() > before
    document(capsys, "this_test:pair", "--budget", "40%", "--device", "h100")
    assert cli.main(["plan", "this_test:pair", "--budget", "8B", "--device", "h100"]) != cli.OK
    assert gc.get_threshold() == before


def test_a_function_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch may be a tuple or a dict, and the plan is the same."""
    argv = ["--budget", "40%", "--device", "h100"]
    by_place, by_name = (document(capsys, f"this_test:{name}", *argv) for name in ("pair", "named_pair"))
    assert by_place["plan"] == by_name["plan"]
    assert (by_place["inputs"], by_name["inputs"]) == ({"input": [256, 8]}, {"input": [256, 8]})
    assert by_place["dtypes"] == ["float32"]


@nightly
def test_what_fits_on_each_rank_of_a_pipeline_is_of_its_device(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "fit" each rank has what the device by name has, and not what the machine that plans has free."""
    argv = [llama, "--pp", "3", "--sequence", "32", "--device", "h100", "--budget", "fit"]
    ranks = document(capsys, *argv)["ranks"]
    assert all(rank["peak_bytes"] == rank["plain_peak_bytes"] for rank in ranks)
    free = 66 * 2**20  # cuBLAS keeps nearly all of it
    monkeypatch.setattr(TrainingStep, "memory", (free, 0))
    (full,) = document(capsys, *argv, "--longest", "--recompute", "full")["configurations"]
    assert full["most"] > 32
    assert free * 0.99 < full["peak_bytes"] <= free


@nightly
def test_the_most_of_configurations_on_ranks(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On ranks of a pipeline, the most under a configuration is what the rank that needs the most holds."""
    argv = [llama, "--pp", "3", "--sequence", "32", "--device", "h100", "--recompute", "full"]
    budget = 2 * document(capsys, *argv)["configurations"][0]["peak_bytes"]
    (full,) = document(capsys, *argv, "--budget", f"{budget}B", "--longest")["configurations"]
    argv[4] = str(full["most"])
    (again,) = document(capsys, *argv)["configurations"]
    assert full["most"] > 32
    assert again["peak_bytes"] == full["peak_bytes"] <= budget
    assert cli.main(["plan", *argv, "--budget", f"{full['peak_bytes']}B", "--largest-batch"]) == cli.OK
    assert "full     1     0" in capsys.readouterr().out


@nightly
def test_ranks_of_a_sequence_beyond_the_positions(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of a model's positions is printed above the plans of ranks, too."""
    assert cli.main(["plan", llama, "--sequence", "1024", "--budget", "0.5", "--pp", "3"]) == cli.OK
    assert "1,024 tokens are more than the 512 positions" in capsys.readouterr().out


@nightly
def test_where_the_peak_of_a_rank_is(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks without a pipeline have the peak, its operation and the largest tensor of the step on one device."""
    argv = llama, "--sequence", "512", "--batch", "2", "--device", "h100", "--recompute", "none,full"
    ranks = document(capsys, *argv, "--mbs", "1", "--dp", "2")["configurations"]
    alone = document(capsys, *argv[:4], "1", *argv[5:], "--no-hold-output")["configurations"]
    assert [one["peak"] for one in ranks] == [one["peak"] for one in alone]
    for one, same in zip(ranks, alone, strict=True):
        own, other = one["largest"][0], same["largest"][1]  # after what cuBLAS keeps
        assert (own["tensor_bytes"], own["op"]) == (other["tensor_bytes"], other["op"])
    assert cli.main(["plan", *argv, "--mbs", "1", "--dp", "2"]) == cli.OK
    said = capsys.readouterr().out
    assert "none: the peak is in a backward, by " in said
    assert "stage" not in said
    assert "in flight" not in said
    assert "counted: as in Megatron-Core: no output in backward" in said
    assert cli.main(["plan", *argv, "--mbs", "1"]) == cli.OK
    assert "\n1 rank; 2 microbatches of 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--recompute", "none,full"], "none: rank 0 needs the most"),
        (["--frontier"], "budget MiB"),
        (["--largest-batch"], "at most 4 sequences"),
    ],
)
def test_what_is_asked_of_ranks(
    asked: list[str], says: str, llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stated configurations, the curve and the most that fits are those of the rank that needs the most."""

    def plans(search: LongestOnRanks, start: int) -> Any:  # which has a test of its own
        search.best = 2 * start
        return [(size, search.make(LayoutPlanner, start).plans("50%")) for size in (start, 2 * start)]

    monkeypatch.setattr(LongestOnRanks, "plans", plans)
    argv = [llama, "--pp", "3", "--dp", "2", "--mbs", "2", "--sequence", "64", *asked]
    argv += ["--budget", "1GiB"] if asked == ["--largest-batch"] else []
    found = document(capsys, *argv)
    rows = found.get("configurations") or found.get("frontier") or found["points"]
    seconds = [row["step_seconds"] for row in rows]
    assert seconds == sorted(seconds, reverse="frontier" in found)
    for row in rows if "points" not in found else [found]:
        most = max(rank["peak_bytes"] for rank in row["ranks"])
        assert all(sum(rank["made_of"].values()) == rank["peak_bytes"] for rank in row["ranks"])
        assert row.get("peak_bytes", most) == most <= row.get("budget_bytes", most)
    if "points" in found:
        assert [row["size"] for row in rows] == [2, found["most"]] == [2, 4]
    assert cli.main(["plan", *argv]) == cli.OK
    assert says in capsys.readouterr().out


def test_the_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of `make_plan` for the loop are options, and stand in the plan; a schedule leaves no room for them."""
    argv = ["--budget", "40%", "--device", "h100", "--no-hold-output", "--accumulate", "4", "--no-set-to-none"]
    found = document(capsys, "this_test:pair", *argv, "--autocast", "bf16")
    loop = found["plan"]["prediction"]["loop"]
    said = {"hold_output": False, "accumulate": 4, "set_to_none": False}
    assert loop == {**loop, **said, "autocast": "bfloat16", "loss": "loss=mean"}
    assert found == {**found, **said}
    assert cli.main(["plan", "this_test:pair", "--budget", "40%", "--accumulate", "0"]) == cli.USAGE
    assert "--accumulate is how many forwards and backwards" in capsys.readouterr().err
    assert cli.main(["plan", "gpt2-xl", "--budget", "40%", "--pp", "2", "--accumulate", "2"]) == cli.USAGE
    assert "--accumulate" in capsys.readouterr().err


@nightly
def test_layers_with_fused_kernels(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says how layers run, and with fused kernels they keep less, on a rank of a group too."""
    argv = llama, "--sequence", "64", "--recompute", "none"
    eager, fused = (document(capsys, *argv, *more) for more in ((), ("--layers", "fused")))
    assert eager["layers"] == {"run": "eager"}
    assert fused["layers"]["run"] == "fused"
    assert fused["layers"]["eager"] == []
    assert {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} == {*fused["layers"]["fused"]}
    kept = [found["configurations"][0]["made_of"]["kept_by_layers_bytes"] for found in (eager, fused)]
    assert kept[1] < kept[0]
    assert cli.main(["plan", *argv, "--layers", "fused"]) == cli.OK
    assert "layers fused (3 LlamaAttention" in capsys.readouterr().out.splitlines()[0]

    Path(llama).write_text(json.dumps({**LLAMA, "num_key_value_heads": 2}))
    ranks = llama, "--tp", "2", "--pp", "3", "--sequence", "64", "--budget", "1GiB"
    found = [document(capsys, *ranks, *more) for more in ((), ("--layers", "fused"))]
    assert found[1]["layers"] == fused["layers"]
    for before, after in zip(*(one["ranks"] for one in found), strict=True):
        assert after["activation_bytes"] < before["activation_bytes"]


def test_a_step_over_ranks(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is a plan for each rank of the pipeline, in a file and in the document, and a row and a word for each."""
    out = tmp_path / "plan.json"
    argv = [llama, "--pp", "3", "--dp", "2", "--mbs", "2", "--sequence", "64", "--budget", "50%", "--out", str(out)]
    found = document(capsys, *argv)
    assert found["layout"]["microbatches"] == 6
    assert [rank["layers"] for rank in found["ranks"]] == [[[0]], [[1]], [[2]]]
    assert [rank["held"] for rank in found["ranks"]] == [[3], [2], [1]]
    for rank in found["ranks"]:
        plan = Plan.from_json((tmp_path / f"plan-rank{rank['rank']}.json").read_text())
        assert plan == Plan.from_json(json.dumps(rank["plan"]))
        assert plan.predicted_peak_bytes == rank["peak_bytes"]
    assert not out.exists()

    assert cli.main(["plan", *argv]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert "data parallel 2: 6 ranks; 6 microbatches of 2" in lines[1]
    assert [line.split()[:2] for line in lines[3:6]] == [["0", "3"], ["1", "2"], ["2", "1"]]
    assert sum(line.startswith("rank ") and ": layers " in line for line in lines) == 3


def test_a_budget_that_no_plan_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 3, and stderr says which budget would do, which then does."""
    argv = ["plan", "this_test:pair", "--device", "h100"]
    assert cli.main([*argv, "--budget", "10KiB"]) == cli.TOO_SMALL == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert "--budget 10KiB is too small for a step of this model" in output.err
    assert "Write --budget " in output.err
    assert ".solution" not in output.err
    least = output.err.split(" bytes)")[0].split("(")[-1]
    assert document(capsys, *argv[1:], "--budget", least)["plan"]["prediction"]["peak_bytes"] == int(least)
    assert cli.main([*argv, "--budget", str(int(least) - 1)]) == cli.TOO_SMALL


def test_a_budget_below_the_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that the weights alone exceed is refused with their bytes, before anything is simulated."""
    weights = sum(parameter.nbytes for parameter in pair()[0].parameters())
    argv = ["plan", "this_test:pair", "--device", "h100", "--budget"]
    monkeypatch.setattr("torch_recompute.commands.plan.Planner", lambda *_, **__: pytest.fail("simulated"))
    monkeypatch.setattr("torch_recompute.commands.plan.peaks_of", lambda *_, **__: pytest.fail("simulated"))
    monkeypatch.setattr(Longest, "plan", lambda *_: pytest.fail("simulated"))
    monkeypatch.setattr(Longest, "stated", lambda *_: pytest.fail("simulated"))
    for asked in ([], ["--largest-batch"], ["--largest-batch", "--recompute", "full"]):
        assert cli.main([*argv, str(weights - 1), *asked]) == cli.TOO_SMALL
        said = capsys.readouterr().err
        assert f"{errors.size(weights, up=True)} ({weights} bytes): {errors.size(weights, up=True)} of weights." in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-model", "--budget", "1GiB"], "Known by name are llama3-8b, "),
        (["this_test:pair", "--budget", "24G"], "'g' is not a unit of memory"),
        (["this_test:pair", "--budget", "0.5", "--batch", "2"], "--batch is for models that are built here"),
        (["this_test:pair", "--budget", "0.5", "--dtype", "bf16"], "--dtype is for models that are built here"),
        (["this_test:pair", "--budget", "0.5", "--sequence", "0"], "--sequence is 0; expected a whole number"),
        (["this_test:only_a_model", "--budget", "0.5"], "that returns (model, batch)"),
        (["this_test:three", "--budget", "0.5"], "or one and its batch"),
        (["this_test:pair", "--budget", "0.5", "--plot", "a.png"], "--plot goes with --frontier"),
        (["this_test:pair", "--frontier", "--out", "a.json"], "--out goes with --budget"),
        (["this_test:pair", "--budget", "0.5", "--pp", "2"], "are for language models of transformers"),
        (["vit-h", "--budget", "0.5", "--dp", "2"], "are for language models of transformers"),
        (["this_test:pair", "--recompute", "ful"], "Close to it: full"),
        (["this_test:pair", "--recompute", "none,,full"], "which says no configuration"),
        (["this_test:pair", "--recompute", "no.json"], "--recompute is 'no.json': no such file"),
        (["this_test:pair", "--recompute", "none", "--offload", "--device", "h100"], "none has no region"),
        (
            ["this_test:pair", "--recompute", "full", "--offload", "1GiB", "--device", "h100"],
            "--offload 1GiB is the most",
        ),
        (["this_test:pair", "--recompute", "full", "--out", "a.json"], "--out goes with --budget"),
        (["this_test:pair", "--frontier", "--longest"], "--longest goes with --budget"),
        (["this_test:pair", "--frontier", "--recompute", "full"], "--recompute does not go with --frontier"),
        (["this_test:pair", "--budget", "1GiB", "--recompute", "full"], "so no plan is made for --budget"),
        (
            ["this_test:pair", "--budget", "1GiB", "--recompute", "full", "--largest-batch", "--out", "a.json"],
            "--out does not go with --recompute",
        ),
        (["this_test:pair", "--recompute", "full", "--largest-batch"], "--largest-batch goes with --budget"),
        (["this_test:pair", "--longest", "--budget", "0.5"], "is a share of the activation memory"),
        (["vit-h", "--longest", "--budget", "1GiB"], "--longest is a number of tokens, and vit-h takes pixel_values"),
        (["gpt2-xl", "--frontier", "--plot", "a.png", "--pp", "2"], "--plot does not go with --pp"),
        (
            ["gpt2", "--longest", "--recompute", "full", "--budget", "0.5", "--pp", "2"],
            "is a share of the activation memory",
        ),
        (["gpt2-xl", "--budget", "0.5", "--tp", "0"], "--tp is 0; expected a whole number"),
        (["gpt2-xl", "--budget", "0.5", "--vpp", "2"], "--vpp goes with --pp"),
        (["gpt2-xl", "--budget", "0.5", "--pp", "2", "--weights-on-host"], "--weights-on-host does not go with --pp 2"),
        (["gpt2-xl", "--budget", "0.5", "--zero", "1", "--weights-on-host"], "expected 2 or 3"),
        (["gpt2-xl", "--budget", "0.5", "--device", "cpu", "--weights-on-host"], "its memory is host memory already"),
        (["gpt2-xl", "--budget", "0.5", "--optimizer-on-host", "--weights-on-host"], "beside weights that are there"),
        (["gpt2-xl", "--budget", "0.5", "--sequence-parallel"], "--sequence-parallel goes with --tp"),
        (["this_test:pair", "--frontier", "--plot", "a.bmp"], "ends in .png, .svg, .pdf"),
        (["this_test:pair", "--budget", "0.5", "--out", "no/such/folder/a.json"], "there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_asked(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be answered ends with 2, nothing on stdout, and what to write."""
    assert cli.main(["plan", *argv]) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpt2", "--dp", "2", "--reshard-after-forward", "no"], "--reshard-after-forward goes with --fsdp"),
        (["gpt2", "--fsdp", "4", "--batch", "6"], "--batch is 6, which 4 replicas"),
        (["gpt2", "--fsdp", "4", "--reduce-dtype", "fp9"], "'fp9' is no floating type of PyTorch"),
    ],
)
def test_ranks_that_cannot_be_asked_for(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line whose ranks are not planned ends with 2 and what to write."""
    assert cli.main(["plan", *argv, "--budget", "0.5", "--sequence", "16"]) == cli.USAGE
    assert message in capsys.readouterr().err


@nightly
def test_ranks_that_share_weights(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks of FSDP hold less of weights and states; the plan's file says the ranks, and a report is of them."""
    peaks: list[int] = []
    out = tmp_path / "plan.json"
    for ranks in ("2", "4"):
        argv = [llama, "--fsdp", ranks, "--mbs", "2", "--sequence", "64", "--batch", "16", "--budget", "1GiB"]
        assert cli.main(["plan", *argv, "--out", str(out), "--json"]) == cli.OK
        found = json.loads(capsys.readouterr().out)
        assert found["ranks"]["fsdp"] == int(ranks)
        assert found["inputs"]["input_ids"] == [2, 64]
        assert found["accumulate"] == 8 // int(ranks)
        peaks.append(found["plan"]["prediction"]["peak_bytes"])
    assert peaks[0] > peaks[1]
    assert cli.main(["report", str(out), "--points", "0", "--json"]) == cli.OK
    assert str(peaks[1]) in capsys.readouterr().out
