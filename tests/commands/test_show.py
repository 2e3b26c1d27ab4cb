"""`torch-recompute show`: a model by name, its tree with labels, the JSON document, and one line for each failure."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from support.zoo import LIBRARY, build
from torch_recompute.commands import cli
from torch_recompute.commands.models import load
from torch_recompute.commands.show import labels_at
from torch_recompute.errors import ArgumentError
from torch_recompute.plan.units import find_units

INSTANCE = nn.Sequential(nn.Linear(2, 2))


def factory() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


pytestmark = pytest.mark.usefixtures("plain_terminal", "this_test")


def test_tree(capsys: pytest.CaptureFixture[str]) -> None:
    """The tree names every part once per kind of layer, with the labels that place a region there."""
    assert cli.main(["show", "this_test:factory"]) == cli.OK
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.splitlines() == [
        "TransformerEncoder; layers: layers 2",
        "  layers.0 x 2: layer, mlp of linear1 and linear2 (TransformerEncoderLayer)  [mlp layernorm]",
        "    self_attn: attention, core attention as a call (MultiheadAttention)  [core_attn attention_output]",
        "    linear1: product (Linear)",
        "    linear2: product (Linear)",
        "    norm1: norm (LayerNorm)",
        "    norm2: norm (LayerNorm)",
        "labels that match, with their number of regions: core_attn 2, attention_output 2, mlp 2, layernorm 2",
    ]


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    """A model without known parts is shown as what it is: no layers, no labels."""
    assert cli.main(["show", "this_test:INSTANCE"]) == cli.OK
    assert capsys.readouterr().out.splitlines() == [
        "Sequential; layers: none",
        "labels that match, with their number of regions: none",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The document has the stacks, the labels' counts, and every unit with its place and its labels."""
    assert cli.main(["show", "this_test:factory", "--json"]) == cli.OK
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema_version", "command", "model", "stacks", "labels", "units"]
    assert (document["schema_version"], document["command"], document["model"]) == (1, "show", "TransformerEncoder")
    assert document["stacks"] == [{"path": "layers", "layers": 2}]
    assert document["labels"] == {"core_attn": 2, "attention_output": 2, "mlp": 2, "layernorm": 2}
    units = find_units(factory())
    assert [unit["path"] for unit in document["units"]] == [unit.path for unit in units]
    assert document["units"][2] == {
        "path": "layers.0.self_attn",
        "role": "attention",
        "cls": "MultiheadAttention",
        "layer": 0,
        "stack": "layers",
        "parts": [],
        "labels": ["core_attn", "attention_output"],
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "bert", "t5", "vit", "whisper", "mamba"])
@pytest.mark.parametrize("folder", [False, True])
def test_configuration(name: str, folder: bool, tmp_path: Path) -> None:
    """A Hugging Face configuration, or its folder, gives the units of the model that it was saved from, on meta."""
    model = build(name)[0]
    assert name in LIBRARY
    model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    loaded = load(str(tmp_path if folder else tmp_path / "config.json")).model
    assert find_units(loaded) == find_units(model)
    assert all(parameter.is_meta for parameter in loaded.parameters())


def test_configuration_without_a_class(tmp_path: Path) -> None:
    """A configuration that names no architecture is built as the bare model of its type."""
    model = build("llama")[0]
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": None}))
    loaded = load(str(path)).model
    assert type(loaded).__name__ == "LlamaModel"
    assert len(find_units(loaded).layers) == 3


def test_labels_stand_where_their_regions_are() -> None:
    """A module's labels are those whose regions it is, in the order of the labels."""
    here = labels_at(find_units(build("deepseek_v3")[0]))
    assert here["model.layers.0.mlp"] == ("mlp",)
    assert here["model.layers.1.mlp"] == ("moe",)
    assert here["model.layers.1.self_attn"] == ("core_attn", "attention_output", "mla_up_proj")
    assert "model.embed_tokens" not in here


def test_the_current_folder_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the user can be named, as with `python -m`, and any attribute in it."""
    (tmp_path / "lies_here.py").write_text("import torch\n\n\nclass made:\n    net = torch.nn.LayerNorm(4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    try:
        assert isinstance(load("lies_here:made.net").model, nn.LayerNorm)
    finally:
        sys.modules.pop("lies_here", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "JSONDecodeError"),
        ("[]", "not the configuration of a Hugging Face model"),
        ('{"hidden_size": 3}', "it has no field model_type"),
        ('{"model_type": "no_such_type"}', "building it raises"),
    ],
)
def test_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    """A file that is no configuration of a known model is refused in one line that names it."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        load(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_is_a_factory() -> None:
    """A module class that needs no arguments can be named, and the model is on the device that it chose."""
    model = load("torch.nn:Identity").model
    assert isinstance(model, nn.Identity)
    assert torch.device("cpu") == next(load("this_test:factory").model.parameters()).device
