"""`torch-recompute verify`: a plan from the other command, real weights, the text, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from support.models import LLAMA as LONGER
from torch_recompute import Choice, Plan
from torch_recompute.commands import cli, output, verify
from torch_recompute.commands.models import batch_for, load, random_batch

LLAMA = LONGER | {"num_hidden_layers": 2, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, without colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    Path("good.json").write_text(Plan((Choice(("0",)),)).to_json())
    Path("bad.json").write_text(Plan((Choice(("0",)), Choice(("1",)))).to_json())


def test_from_the_plan_to_the_proof(capsys: pytest.CaptureFixture[str]) -> None:
    """The file that `plan` writes for a configuration passes `verify` of the same, with weights and random tokens."""
    pytest.importorskip("transformers")
    Path("config.json").write_text(json.dumps(LLAMA))
    size = ["--batch", "2", "--sequence", "32", "--dtype", "fp32", "--quiet"]
    words = {"model": "config.json", "batch": 2, "sequence": 32, "dtype": "fp32"}
    output.write_plan(Path("plan.json"), Plan((Choice(("model.layers.0",)), Choice(("model.layers.1",)))), words)
    assert cli.main(["verify", "config.json", "--plan", "plan.json", "--device", "cpu", "--json", *size]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"], found["model"], found["device"]) == ("config.json", "LlamaForCausalLM", "cpu")
    assert found["regions"] == 2
    assert found["counts"]["gradients"] == len(list(load("config.json").model.parameters()))


def test_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """A region whose replay differs ends with 1, and the output names the first gradient and the region."""
    assert cli.main(["verify", "support.nondeterministic:pair", "--plan", "bad.json", "--quiet"]) == cli.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert " differ (" in lines[0]
    assert "Sequential on cpu, a step with the plan (2 regions) beside one without" in " ".join(" ".join(lines).split())
    assert any(line.startswith("  the gradient of 1.scale differs by up to ") for line in lines)
    assert "Likely: 1 (the step differs with this alone)." in lines
    assert cli.main(["verify", "support.nondeterministic:pair", "--plan", "good.json", "--quiet"]) == cli.OK
    assert "the same to the last bit" in " ".join(capsys.readouterr().out.split())


def test_what_does_not_fit_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is too large is refused before it is built, with 3; what a step takes counts, too."""
    pytest.importorskip("transformers")
    assert cli.main(["verify", "llama3-405b", "--plan", "good.json", "--quiet", "--device", "cpu"]) == cli.TOO_SMALL
    assert "llama3-405b is too large to run here: " in capsys.readouterr().err
    Path("config.json").write_text(json.dumps(LLAMA))
    weights = sum(p.numel() * p.element_size() for p in load("config.json").model.parameters())
    monkeypatch.setattr(verify, "free_bytes", lambda model, device: 4 * weights)
    argv = ["verify", "config.json", "--plan", "good.json", "--quiet", "--device", "cpu", "--sequence", "64"]
    assert cli.main([*argv, "--batch", "64"]) == cli.TOO_SMALL
    error = capsys.readouterr().err
    assert "a step without a plan need " in error
    assert "at least" not in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plan", "none.json"], "--plan is none.json: no such file or directory"),
        (["--plan", "text.json"], "--plan is text.json: this is not a plan: no JSON"),
        (["--plan", "good.json", "--device", "cpu"], "--device is for models that are built here"),
        (["--plan", "good.json", "--batch", "2"], "--batch is for models that are built here"),
        (["--plan", "other.json"], "has no module 'layers.7'"),
    ],
)
def test_what_cannot_be_asked(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be answered ends with 2, nothing on stdout, and what to write."""
    Path("text.json").write_text("a plan")
    Path("other.json").write_text(Plan((Choice(("layers.7",)),)).to_json())
    assert cli.main(["verify", "support.nondeterministic:pair", *argv]) == cli.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


@pytest.mark.parametrize("name", ["gpt2-xl", "vit-h"])
def test_batches_have_contents(name: str) -> None:
    """A batch to run has the shapes of the one to plan with, and ids and classes that the model knows."""
    pytest.importorskip("transformers")
    model = load(name).model
    planned = batch_for(model, name)
    batch = random_batch(planned, model, "cpu")
    for key, value in planned.items():
        if isinstance(value, torch.Tensor):
            assert (batch[key].shape, batch[key].dtype, batch[key].device.type) == (value.shape, value.dtype, "cpu")
            assert key == "labels" or len(batch[key].unique()) > 10
    known = model.config.num_labels if name == "vit-h" else model.config.vocab_size
    assert 0 <= int(batch["labels"].min()) <= int(batch["labels"].max()) < known
