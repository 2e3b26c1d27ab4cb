"""The first call: a batch as people have it, and an optimizer by name, class or instance, in every public function."""

import copy
import logging
import os
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.training import gradients
from torch_recompute import (
    ArgumentError,
    Choice,
    Plan,
    RecomputeConfig,
    audit,
    auto,
    doctor,
    make_plan,
    profile,
    saved_activations,
    simulate,
    testing,
    verify,
)
from torch_recompute.memory.batch import call_of
from torch_recompute.planner.hosts import NO_OPTIONS
from torch_recompute.planner.plan_file import made_for
from torch_recompute.report import report
from torch_recompute.simulation.training_step import OPTIMIZERS, TrainingStep


class Net(nn.Module):
    """Three layers that may be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss."""
        for layer in self.layers:
            ids = layer(ids)
        return (ids if mask is None else ids * mask).square().mean()


class Item(NamedTuple):
    """An item of a dataloader, as `default_collate` returns a named tuple."""

    ids: torch.Tensor
    mask: torch.Tensor


X, MASK = torch.ones(64, 8), torch.ones(64, 8)
REGION = Plan((Choice(("layers.0",)),))
# What a batch may be, and the call that it means.
FORMS: dict[str, tuple[Any, Any]] = {
    "tensor": (X, ((X,), {})),
    "tuple": ((X, MASK), ((X, MASK), {})),
    "list": ([X, MASK], ((X, MASK), {})),
    "named tuple": (Item(X, MASK), ((X, MASK), {})),
    "dict": ({"ids": X, "mask": MASK}, ((), {"ids": X, "mask": MASK})),
    "BatchEncoding": (UserDict({"ids": X}), ((), {"ids": X})),
}
# The public functions that call a model, each returning figures that depend on the call.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "make_plan": lambda net, *call: make_plan(net, *call, budget=0.5, device="h100"),
    "profile": lambda net, *call: profile(net, *call, device="h100").costs,
    "simulate": lambda net, *call: simulate(net, *call),
    "verify": lambda net, *call: verify(net, *call, plan=REGION).as_data(),
    "audit": lambda net, *call: audit(net, *call, modules=["layers.0"]),
    "saved_activations": lambda net, *call: saved_activations(net, *call).by_module(),
    "doctor.examine": lambda net, *call: str(doctor.examine(net, *call, plan=REGION, run=False)),
    "report": lambda net, *call: report(REGION, net, *call, device="h100", points=0),
    "assert_same_gradients": lambda net, *call: testing.assert_same_gradients(net, *call, plan=REGION).as_data(),
    "auto": lambda net, *call: auto(net, *call, budget=0.5, device="h100").plan,
    "RecomputeConfig.plan": lambda net, *call: RecomputeConfig(
        recompute_granularity="selective", recompute_modules=["layers.*"]
    ).plan(net, *call),
}
each_function = pytest.mark.parametrize("what", FUNCTIONS)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_means_the_call_that_people_make_with_it(form: str) -> None:
    """A tensor is one argument, tuples and lists are positional ones, mappings are keywords; more come besides."""
    batch, call = FORMS[form]
    assert call_of("f", Net(), batch) == call
    more = {} if "mask" in call[1] else {"mask": MASK}
    if len(call[0]) < 2:
        assert call_of("f", Net(), batch, more) == (call[0], {**call[1], **more})


@each_function
def test_every_function_takes_every_form(what: str) -> None:
    """A tensor, a list and a mapping give what the tuple of arguments, and what `kwargs`, have always given."""
    net = Net()
    forms = [X, (X,), [X], {"ids": X}, UserDict({"ids": X})]
    found = [FUNCTIONS[what](copy.deepcopy(net), batch) for batch in forms]
    assert all(one == found[0] for one in found)
    assert FUNCTIONS[what](net, (), {"ids": X}) == found[0]


@each_function
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([X, MASK, X], "'ids', 'mask', and the batch has 3 items"),
        ({"ids": X, "labels": X}, "the batch has 'labels', which it does not take"),
        ({"mask": MASK}, "missing a required argument: 'ids'"),
        (3, "but batch is int"),
    ],
)
def test_every_function_says_its_name(what: str, batch: Any, said: str) -> None:
    """A batch that the forward does not take is refused in the name of the function, with shapes and no values."""
    with pytest.raises(ArgumentError) as caught:
        FUNCTIONS[what](Net(), batch)
    text = str(caught.value)
    assert text.startswith(what)
    assert said in text
    assert "tensor(" not in text
    assert ("loss=" in text) == (
        what not in ("audit", "saved_activations", "RecomputeConfig.plan") and "labels" in text
    )


def test_a_forward_that_says_nothing_of_its_arguments_is_believed() -> None:
    """What a signature cannot say is left to the call: hooks, wrappers, functions in C, words of a decorator."""

    class Wrapper(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    hooked = Net()
    hooked.register_forward_pre_hook(lambda _module, args: (*args, MASK))
    assert call_of("f", Wrapper(), [X, X, X])[0] == (X, X, X)
    assert call_of("f", hooked, [X, X, X])[0] == (X, X, X)
    assert call_of("f", torch.add, (X, X))[0] == (X, X)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_a_name_is_the_class_and_an_optimizer_of_the_model(name: str) -> None:
    """An optimizer by name, in any case, by class and by instance have the same peak."""
    net, make = Net(), OPTIMIZERS[name]
    assert make is not None
    peaks = {simulate(net, X, optimizer=one).peak_bytes for one in (name, name.upper(), make, make(net.parameters()))}
    assert len(peaks) == 1


def test_no_optimizer_has_a_name() -> None:
    """The name "none" is a step without an optimizer, as on the command line."""
    assert simulate(Net(), X, optimizer="none").peak_bytes == simulate(Net(), X).peak_bytes


# --- one line that does it all ---


def square(out: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return out.square().mean()


# --- a loss of two arguments, parameters without a shape, a batch of another shape ---


def classifier(first: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))


class Keywords(nn.Module):
    """Takes the labels, and makes nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input)


Y = torch.arange(64) % 5
CLASSES = nn.CrossEntropyLoss()
LABELLED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "two items": (classifier, (X, Y), {}),
    "a list of two": (classifier, [X, Y], {}),
    **{name: (classifier, {"input": X, name: Y}, {}) for name in ("labels", "targets", "y")},
    "a keyword": (classifier, X, {"labels": Y}),
    "labels that the forward takes": (Keywords, {"input": X, "labels": Y}, {}),
    "labels that the forward takes by place": (Keywords, (X, Y), {}),
}


@pytest.mark.parametrize("form", LABELLED)
@pytest.mark.parametrize("loss", [CLASSES, F.cross_entropy, lambda out, y: F.cross_entropy(out, y)])
def test_a_loss_of_two_arguments_gets_the_labels(form: str, loss: Any) -> None:
    """The step is that of the loss with the labels in it, to the byte and the FLOP."""
    make, batch, kwargs = LABELLED[form]
    wanted = simulate(make(), X, loss=lambda out: F.cross_entropy(out, Y))
    found = simulate(make(), batch, kwargs, loss=loss)
    assert (found.peak_bytes, found.flops) == (wanted.peak_bytes, wanted.flops)


def test_every_function_takes_a_loss_of_two_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever takes a loss takes one of output and labels; a cache does not take one for another."""
    batch, region = (X, Y), Plan((Choice(("0",)),))
    assert make_plan(classifier(), batch, budget=0, loss=CLASSES, device="h100").predicted_peak_bytes
    assert profile(classifier(), batch, loss=CLASSES, device="h100").to_json()
    assert verify(classifier(), batch, plan=region, loss=CLASSES)
    assert testing.assert_same_gradients(classifier(), batch, plan=region, loss=CLASSES)
    assert doctor.examine(classifier(), batch, loss=CLASSES, device="h100", run=False) is not None
    auto(classifier(), batch, loss=CLASSES, budget=0).remove()
    steps = [TrainingStep.of("auto", classifier(), batch, None, loss) for loss in (CLASSES, nn.MSELoss())]
    assert len({made_for(step, 0, False)["loss"] for step in steps}) == 2


def test_a_failing_operation_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    """An operation that refuses its arguments is said once, in the error; torch's log of it is for --verbose."""
    with pytest.raises(ArgumentError, match=r"with Tensor of shape \(64, 9\), in 0: "):
        simulate(classifier(), torch.ones(64, 9), loss=torch.sum)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "torch_recompute"), pytest.raises(ArgumentError):
        simulate(classifier(), torch.ones(64, 9), loss=torch.sum)
    assert [record.name for record in caplog.records] == ["torch._subclasses.fake_tensor"]


def test_auto_plans_applies_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The handle has the plan of `make_plan`, its summary is printed, and the step is the plain one to the bit."""
    net = Net()
    plain, plan = gradients(net, X), make_plan(net, X, budget=0.1, optimizer="sgd", device="h100")
    handle = auto(net, {"ids": X}, budget=0.1, optimizer="sgd", device="h100")
    assert handle.plan.choices == plan.choices != ()
    assert capsys.readouterr().out == f"{handle.plan.summary}\n"
    assert all(map(torch.equal, gradients(net, X), plain))
    with pytest.raises(ArgumentError, match="has a plan already"):
        auto(net, X)
    handle.remove()
    assert auto(net, X).plan.choices == ()  # "fit", and there is room
    assert capsys.readouterr().out.endswith("at the peak, and nothing is recomputed\n")


def frozen() -> nn.Module:
    """A net of which a weight is not trained."""
    net = Net()
    next(net.parameters()).requires_grad_(False)
    return net


class Other(Net):
    """The same parameters, and other code."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns another loss."""
        return super().forward(ids, mask) * 2


MODEL = "the model's parameters or modules"
# What another call may have changed, and the words for it.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a frozen weight": (lambda call: call.update(model=frozen()), MODEL),
    "another class": (lambda call: call.update(model=Other()), f"{MODEL} and the model's code"),
    "eval": (lambda call: call.update(model=Net().eval()), MODEL),
    "an attribute": (lambda call: setattr(call["model"], "repeats", 2), MODEL),
    "a hook": (lambda call: call["model"].register_forward_hook(lambda *_: None), MODEL),
    "a longer batch": (lambda call: call.update(batch=torch.ones(65, 8)), "the batch's shapes"),
    "another name": (lambda call: call.update(batch={"ids": X}), "the batch's shapes"),
    "a mask": (lambda call: call.update(kwargs={"mask": MASK}), "the batch's shapes"),
    "a loss": (lambda call: call.update(loss=square), "the loss"),
    "another optimizer": (lambda call: call.update(optimizer="adamw"), "the optimizer"),
    "another budget": (lambda call: call.update(budget=0.5), "the budget"),
    "another loop": (lambda call: call.update(hold_output=False), "the training loop"),
    "another host": (lambda call: call.update(host="slow"), "the host that launches operations, host="),
    "another device": (lambda call: call.update(device="a100"), "the device, or the version of torch"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_in_a_file_is_used_again(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read where nothing changed, other values and learning rates among it; else the sentence says what did."""
    file = tmp_path / "plan.json"
    call: dict[str, Any] = {"model": Net(), "batch": X, "budget": 0.1, "optimizer": "sgd", "device": "h100"}
    call["cache"] = file
    plan = auto(**call).plan
    assert capsys.readouterr().out == f"{plan.summary}; plan written to {file}\n"
    with monkeypatch.context() as without:
        without.setattr("torch_recompute.planning.Planner", None)
        again = auto(**{**call, "model": Net(), "batch": 2 * X, "budget": "0.1"})
    assert again.plan == plan == Plan.from_json(file.read_text())
    assert capsys.readouterr().out == f"{plan.summary}; plan read from {file}\n"
    change_it, words = CHANGES[change]
    change_it(call := {**call, "model": Net()})
    plan = auto(**call).plan
    assert capsys.readouterr().out == f"{plan.summary}; planned again: {words} changed\n"
    assert Plan.from_json(file.read_text()) == plan


def test_a_setting_of_torch_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that was made without autocast is not read under it; a rate of learning makes no difference."""
    net = Net()
    for rate, enabled in ((0.1, False), (0.2, False), (0.2, True)):
        with torch.autocast("cpu", enabled=enabled):
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            auto(net, X, budget=0.1, optimizer=optimizer, device="h100", cache=tmp_path / "plan.json").remove()
    said = [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said[1].startswith("plan read from")
    assert said[2].startswith("planned again: autocast")


def test_what_things_hold_decides_on_a_plan() -> None:
    """What a loss is given or has as attributes, settings of an optimizer, and tensors in an object of the batch."""

    def fact(name: str, **step: Any) -> object:
        return made_for(TrainingStep(**{"model": nn.Linear(8, 8), "args": (X,), **step}), "fit", NO_OPTIONS)[name]

    for loss in (partial(partial, torch.mul), lambda n: nn.HuberLoss(delta=n)):
        assert fact("loss", loss=loss(1)) == fact("loss", loss=loss(1)) != fact("loss", loss=loss(2))
    plain, rate, states = (partial(torch.optim.SGD, lr=lr, momentum=m) for lr, m in ((0.1, 0), (0.2, 0), (0.1, 0.9)))
    assert (
        fact("optimizer", optimizer=plain) == fact("optimizer", optimizer=rate) != fact("optimizer", optimizer=states)
    )
    short, other, long = (SimpleNamespace(x=torch.ones(n)) for n in (1, 1, 2))
    assert fact("batch", args=(short,)) == fact("batch", args=(other,)) != fact("batch", args=(long,))


def test_a_loss_of_no_module_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a method of a tensor, or what `exec` has made: it goes by its code."""
    loss, net = eval("lambda out: out", {"__name__": None}), Net()
    assert loss.__module__ is None
    for _ in range(2):
        auto(net, X, budget=0.1, loss=loss, device="h100", cache=tmp_path / "plan.json").remove()
    assert "plan read from" in capsys.readouterr().out


def test_less_room_plans_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "fit" a plan in a file is used as long as its peak still fits."""
    file, net = tmp_path / "plan.json", Net()
    auto(net, X, device="h100", cache=file).remove()
    auto(net, X, device="h100", cache=file).remove()
    assert "plan read from" in capsys.readouterr().out
    peak = simulate(net, X).peak_bytes
    monkeypatch.setattr("torch_recompute.simulation.training_step.TrainingStep.memory", (peak - 1, 0))
    assert auto(net, X, device="h100", cache=file).plan.predicted_peak_bytes < peak  # type: ignore[operator]
    assert "planned again: less memory is free" in capsys.readouterr().out


@pytest.mark.nightly
def test_what_a_plan_is_for_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Nothing of it depends on the order of sets or on addresses."""
    script = (
        "import json, torch; from torch_recompute.planner.plan_file import made_for;"
        "from torch_recompute.simulation.training_step import TrainingStep; net = torch.nn.Transformer(8, 2, 1, 1);"
        "step = TrainingStep(net, (torch.ones(2, 8),), {'mask': None}, torch.sum, torch.optim.SGD);"
        "print(json.dumps(made_for(step, 'fit', False)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
