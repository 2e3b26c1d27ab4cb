"""`torch-recompute plan`: models by name and by file, the table, the JSON document, the curve, and each exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.models import LLAMA, Made
from torch_recompute import Plan, apply, make_plan
from torch_recompute.commands import cli
from torch_recompute.commands.models import PRESETS, batch_for, load


def block() -> nn.Module:
    return Made(lambda m, x: x + m.down(nn.functional.gelu(m.up(x))), up=nn.Linear(8, 32), down=nn.Linear(32, 8))


Task = tuple[nn.Module, Any, Callable[[torch.Tensor], torch.Tensor]]


def pair() -> Task:
    return nn.Sequential(*(block() for _ in range(3))), (torch.ones(256, 8),), torch.mean


def named_pair() -> Task:
    model, (x,), loss = pair()
    return model, {"input": x}, loss


def only_a_model() -> nn.Module:
    return pair()[0]


def three() -> tuple[nn.Module, int, int]:
    return pair()[0], 1, 2


pytestmark = pytest.mark.usefixtures("plain_terminal", "this_test")


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
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "vit-h": 632_045_800,
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


def test_a_configuration(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is the plan's own, progress goes to stderr, and the file holds the plan that `make_plan` makes."""
    out = tmp_path / "plan.json"
    argv = ["--batch", "2", "--sequence", "256", "--dtype", "fp32", "--budget", "0.3", "--out", str(out)]
    assert cli.main(["plan", llama, *argv]) == cli.OK
    output = capsys.readouterr()
    plan = Plan.from_json(out.read_text())
    first, *table = output.out.splitlines()
    assert "LlamaForCausalLM" in first
    assert "in float32; input_ids 2 x 256, labels 2 x 256; optimizer adamw-fused" in first
    assert table[: len(str(plan).splitlines())] == str(plan).splitlines()
    assert output.err == ""

    model = load(llama, torch.float32).model
    ids = torch.ones(2, 256, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert plan == make_plan(model, (), batch, budget=0.3, optimizer="adamw-fused", device="h100")
    apply(model, plan).remove()


def test_json(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The document says the step, the plan as `Plan.from_json` reads it, and the step without it."""
    found = document(capsys, llama, "--sequence", "128", "--budget", "50%", "--optimizer", "sgd", "--device", "a100")
    assert list(found) == [
        *("schema_version", "command", "model", "class", "parameters", "dtypes", "inputs", "optimizer", "offload"),
        *("hold_output", "accumulate", "set_to_none", "device", "plain", "advice", "plan"),
    ]
    assert (found["schema_version"], found["command"], found["device"]) == (1, "plan", "a100")
    assert found["inputs"] == {"input_ids": [1, 128], "labels": [1, 128]}
    plan = Plan.from_json(json.dumps(found["plan"]))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= plan.prediction.budget_bytes < found["plain"]["peak_bytes"]
    assert plan.prediction.step_seconds >= found["plain"]["step_seconds"]


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


def test_a_function_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch may be a tuple or a dict, and the plan is the same."""
    argv = ["--budget", "40%", "--device", "h100"]
    by_place, by_name = (document(capsys, f"this_test:{name}", *argv) for name in ("pair", "named_pair"))
    assert by_place["plan"] == by_name["plan"]
    assert (by_place["inputs"], by_name["inputs"]) == ({"input": [256, 8]}, {"input": [256, 8]})
    assert by_place["dtypes"] == ["float32"]


def test_the_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of `make_plan` for the loop are options, and stand in the plan; a schedule leaves no room for them."""
    argv = ["--budget", "40%", "--device", "h100", "--no-hold-output", "--accumulate", "4", "--no-set-to-none"]
    found = document(capsys, "this_test:pair", *argv, "--autocast", "bf16")
    loop = found["plan"]["prediction"]["loop"]
    said = {"hold_output": False, "accumulate": 4, "set_to_none": False}
    assert loop == {**loop, **said, "autocast": "bfloat16", "loss": "loss=mean"}
    assert found == {**found, **said}
    assert cli.main(["plan", "this_test:pair", "--budget", "40%", "--accumulate", "0"]) == cli.USAGE
    assert "accumulate= is how many forwards and backwards" in capsys.readouterr().err
    assert cli.main(["plan", "gpt2-xl", "--budget", "40%", "--pp", "2", "--accumulate", "2"]) == cli.USAGE
    assert "--accumulate" in capsys.readouterr().err


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
    assert cli.main([*argv, "--budget", "1KiB"]) == cli.TOO_SMALL == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert "budget=1KiB is too small for a step of this model" in output.err
    assert "Write --budget " in output.err
    assert ".solution" not in output.err
    least = output.err.split(" bytes)")[0].split("(")[-1]
    assert document(capsys, *argv[1:], "--budget", least)["plan"]["prediction"]["peak_bytes"] == int(least)
    assert cli.main([*argv, "--budget", str(int(least) - 1)]) == cli.TOO_SMALL


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
        (["gpt2-xl", "--budget", "0.5", "--tp", "0"], "--tp is 0; expected a whole number"),
        (["gpt2-xl", "--budget", "0.5", "--vpp", "2"], "--vpp goes with --pp"),
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
        (["gpt2", "--fsdp", "2", "--pp", "2"], "--fsdp does not go with --pp"),
        (["gpt2", "--dp", "2", "--reshard-after-forward", "no"], "--reshard-after-forward goes with --fsdp"),
        (["gpt2", "--fsdp", "4", "--batch", "6"], "--batch is 6, which 4 replicas"),
        (["gpt2", "--fsdp", "4", "--reduce-dtype", "fp9"], "'fp9' is no floating type of PyTorch"),
    ],
)
def test_ranks_that_cannot_be_asked_for(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line whose ranks are not planned ends with 2 and what to write."""
    assert cli.main(["plan", *argv, "--budget", "0.5", "--sequence", "16"]) == cli.USAGE
    assert message in capsys.readouterr().err


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
