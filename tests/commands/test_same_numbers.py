"""One fact has one number: a plan, a report, the doctor and the command line agree."""

import json
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_recompute import Plan, doctor, make_plan, simulate
from torch_recompute.commands import cli
from torch_recompute.commands.report_data import Clock, collect
from torch_recompute.simulation.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("free_launches")


class Step(NamedTuple):
    """A model, its batch and its loss."""

    model: nn.Module
    batch: torch.Tensor
    loss: Any


def wide() -> Step:
    """A language model whose logits are most of the peak."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(2000, 16), *layers, nn.Linear(16, 2000))
    ids = torch.arange(64).view(2, 32)
    return Step(model, ids, lambda out: F.cross_entropy(out.flatten(0, 1), ids.flatten()))


def deep() -> Step:
    """Layers that are most of the peak."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6)))
    return Step(model, torch.ones(256, 32), lambda out: out.square().mean())


def cached() -> Step:
    """A model of transformers that fills a cache in training, until a plan says that it need not."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).train()
    return Step(model, torch.ones(4, 64, dtype=torch.long), lambda out: out.logits.square().mean())


STEPS = {"wide": wide, "deep": deep, "cached": cached}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("wide", 0.7),
        ("deep", 0.2),
        ("cached", 0.2),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("wide", 0.2), ("deep", 0.7), ("cached", 0.7))),
    ],
)
def test_plan_simulation_report_and_doctor_agree(name: str, budget: float) -> None:
    """Peaks, FLOPs, seconds, what was counted and what the logits take are those of the plan in all four."""
    model, batch, loss = STEPS[name]()
    how: dict[str, Any] = {"loss": loss, "optimizer": "adamw"}
    plan = make_plan(model, batch, budget=budget, device="h100", **how)
    promise = plan.prediction
    assert promise is not None
    own, plain, planned = (simulate(model, batch, plan=one, **how) for one in (None, Plan(), plan))
    clock = Clock(TrainingStep(model, (batch,), {}, loss=loss, optimizer=torch.optim.AdamW, device="h100"))
    data = collect(plan, clock.frontier(plan, 3), clock).data
    chosen, without = (data["steps"][data[which]] for which in ("chosen", "plain"))
    found = doctor.examine(model, batch, plan=plan, budget="1B", device="h100", run=False, **how)
    (over,) = (finding for finding in found.findings if finding.kind == "over_budget")

    assert promise.peak_bytes == planned.peak_bytes == chosen["peak_bytes"] == over.figures["peak_bytes"]
    assert plain.peak_bytes == without["peak_bytes"]
    alone = [step["peak_bytes"] for step in data["steps"] if step["name"] == "without a plan"]
    assert promise.plain_peak_bytes == own.peak_bytes == (alone or [plain.peak_bytes])[0]
    assert promise.replay_flops == planned.flops["replay"] == chosen["replay_flops"]
    assert promise.step_seconds == pytest.approx(chosen["step_seconds"], rel=1e-9)
    assert promise.plain_step_seconds == pytest.approx(without["step_seconds"], rel=1e-9)
    assert promise.advice == planned.advice == chosen["advice"]
    assert plain.advice == without["advice"] == (plan.profile.advice if plan.profile is not None else None)
    assert promise.advice != plain.advice or name != "wide"
    assert bool(alone) == (name == "cached") == any(str(promise.switched) in note for note in data["notes"])
    assert str(promise.loop) == str(planned.loop) == data["counted"]
    assert chosen["promised"]["budget"] == promise.budget
    assert data["source"] == plan.source == f"a budget of {promise.budget}"
    assert [line["why"] for line in chosen["placements"]] == [line.why for line in promise.lines]


def test_the_command_line_says_what_python_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that is printed, and that in the document, are the plan of `make_plan`."""
    step = deep()
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(step=lambda: tuple(step)))  # type: ignore[arg-type]
    plan = make_plan(step.model, step.batch, loss=step.loss, budget="40%", optimizer="adamw-fused", device="h100")
    argv = ["plan", "mine:step", "--budget", "40%", "--device", "h100", "--quiet"]
    assert cli.main(argv) == cli.OK
    assert capsys.readouterr().out.split("\n", 1)[1].rstrip() == str(plan)
    assert cli.main([*argv, "--json"]) == cli.OK
    assert Plan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"])) == plan
