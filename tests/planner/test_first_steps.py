"""A promise that watches itself: the first steps are compared with the planned one, and the plan is made again."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import types
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizers

from support.models import Made
from torch_recompute import Applied, Plan, apply, auto, measure
from torch_recompute.memory import allocator
from torch_recompute.memory.loop import COMMON
from torch_recompute.plan.first_steps import FirstSteps
from torch_recompute.planning import plan_first_call

pytest.importorskip("numpy", reason="numpy is not installed (planning needs it)")

WIDTH, LAYERS = 32, 4


def block() -> nn.Module:
    inside = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return Made(lambda m, x: x + m.drop(m.inside(x)), inside=inside, drop=nn.Dropout(0.1))


class Stack(nn.Module):
    """Layers that may be left out at random, by a probability that libraries call `layerdrop`."""

    def __init__(self, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)
        self.layerdrop = layerdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or torch.rand([]) >= self.layerdrop:
                x = layer(x)
        return F.cross_entropy(self.head(x).float(), torch.zeros(len(x), dtype=torch.long))


class Training:
    """A model under `auto`, and a loop that may differ from the one that was told.

    Attributes:
        model: The model.
        handle: What `auto` returned.
    """

    def __init__(self, loop: str, *, replan: bool = True, budget: Any = 0.3, planned: bool = True) -> None:
        torch.manual_seed(3)
        self.loop = loop
        self.model = Stack(0.3 if loop == "layerdrop" else 0.0)
        self.adam = torch.optim.AdamW((self.model.head if loop == "a part" else self.model).parameters())
        self.x = torch.randn(64, WIDTH)
        named = {"an optimizer": None, "a part": "sgd", "another optimizer": "sgd"}.get(loop, self.adam)
        self.model.train(loop != "train mode")
        self.model.layers[:4].requires_grad_(loop != "unfreezing")
        torch.manual_seed(0)  # leaves out two layers of the planned step
        if planned:
            self.handle = auto(self.model, self.x, budget=budget, optimizer=named, device="h100", replan=replan)
        self.model.train().requires_grad_()
        self.x = torch.randn(128, WIDTH) if loop == "a larger batch" else self.x

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if "autocast" in self.loop else nullcontext()

    def step(self) -> None:
        for _ in range(2 if "accumulation" in self.loop else 1):
            with self.autocast():
                loss = self.model(self.x)
            loss.backward(retain_graph=self.loop == "retain_graph")
            self.kept = loss if self.loop == "retain_graph" else None
        self.adam.step()
        self.adam.zero_grad(set_to_none=self.loop != "zeroed")

    def peak(self) -> int:
        with measure(self.model, self.adam).track(self.x) as memory:
            self.step()
        return memory.peak_bytes

    @property
    def promise(self) -> int:
        assert self.handle.plan.predicted_peak_bytes is not None
        return self.handle.plan.predicted_peak_bytes


SAID = {
    "accumulation": "2 backwards come before a step of the optimizer. Write auto(..., accumulate=2).",
    "zeroed": "gradients are alive when forward begins. Write auto(..., set_to_none=False).",
    "autocast": "under torch.autocast (bfloat16). Write auto(...) under torch.autocast (bfloat16).",
    "accumulation and autocast": "Write auto(..., accumulate=2) under torch.autocast (bfloat16).",
    "an optimizer": "AdamW steps, which was not named. Write auto(..., optimizer=optimizer).",
    "another optimizer": "AdamW steps, which keeps larger states than the one that was named. Write auto(",
    "a part": "AdamW steps, which does not clear the gradients of all parameters. Write auto(..., optimizer=",
    "a larger batch": "a larger batch came ([128, 32]). Write auto(...) with the largest batch.",
    "train mode": "in train mode, and was planned in eval mode. Write auto(...) after model.train().",
    "unfreezing": "more parameters require grad than then. Write auto(...) once all that will be trained does.",
    "layerdrop": "ran more often than in the planned step. Write auto(...) with the probability",
}


# Where planning again has to do what it does in others, too.
LIKE_OTHERS = {"accumulation and autocast", "another optimizer", "a part", "unfreezing"}


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=[pytest.mark.nightly] * (loop in LIKE_OTHERS)) for loop in SAID]
)
def test_the_fourth_step_is_within_the_new_promise(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a loop that `auto` was not told of, the plan is made again, and the fourth step takes what it promises."""
    training = Training(loop)
    first = training.handle.plan
    for _ in range(3):
        training.step()
    training.model.layerdrop = 0.0  # the step that takes most
    assert training.peak() == pytest.approx(training.promise, rel=0.005)
    assert training.handle.history[0] is first
    assert training.handle.history[-1] is training.handle.plan is not first
    assert "planned again in " in capsys.readouterr().out


@pytest.mark.parametrize("loop", [*SAID, "retain_graph"])
def test_without_planning_again_it_is_said_once(loop: str) -> None:
    """With `replan=False` one sentence says what differs and what to write, and the plan stays."""
    training = Training(loop, replan=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            training.step()
    (warning,) = caught
    said = SAID.get(loop, "a backward retains its graph into the next step. Write")
    assert said in str(warning.message)
    assert training.handle.history == (training.handle.plan,)
    assert training.peak() > 1.005 * training.promise or loop in ("autocast", "layerdrop")


def calls_in(step: Any) -> int:
    """Python calls while a step runs."""
    counted = [0]

    def count(_: Any, event: str, __: Any) -> None:
        counted[0] += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counted[0]


@pytest.mark.parametrize("loop", ["as planned", "accumulation"])
def test_nothing_is_left_after_three_steps(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the fourth step on no hook, no wrapper and no Python call are there that `apply` alone has not."""
    running, before = list(allocator._running), dict(optimizers._global_optimizer_post_hooks)
    training = Training(loop)
    assert optimizers._global_optimizer_post_hooks != before
    for _ in range(4):
        training.step()
    assert ("planned again" in capsys.readouterr().out) == (loop == "accumulation")
    assert optimizers._global_optimizer_post_hooks == before
    assert allocator._running == running
    assert not any(isinstance(m.__dict__.get("forward"), FirstSteps) for m in training.model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in training.model.modules())
    plain = Training(loop, planned=False)
    apply(plain.model, training.handle.plan)
    for _ in range(4):
        plain.step()
    assert calls_in(training.step) == calls_in(plain.step)


def test_planning_again_changes_nothing() -> None:
    """Weights, optimizer and all generators after five steps are those of a training without `auto`, to the bit."""
    import numpy

    ends = []
    for planned in (True, False):
        training = Training("accumulation", planned=planned)
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        for _ in range(5):
            training.step()
        state = training.adam.state_dict()["state"]
        moments = [value for one in state.values() for value in one.values()]
        draws = torch.rand(1), torch.tensor(random.random()), torch.tensor(numpy.random.rand())
        ends.append([*training.model.state_dict().values(), *moments, *draws])
        assert not planned or len(training.handle.history) == 2
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_nothing_is_exchanged_while_a_graph_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two forwards come before one backward, the plan is exchanged before the first of them."""
    training = Training("an optimizer")
    alive: list[bool] = []
    exchange = Applied._exchange
    held: list[torch.Tensor] = []
    monkeypatch.setattr(Applied, "_exchange", lambda of, make: alive.append(bool(held)) or exchange(of, make))

    def steps() -> None:
        for _ in range(4):
            held.extend([training.model(training.x), training.model(training.x)])
            sum(held).backward()
            held.clear()
            training.adam.step()
            training.adam.zero_grad()

    with pytest.warns(RuntimeWarning, match="2 forwards come before their backward") as said:
        steps()
    assert len(said) == 1
    assert alive == [False]
    assert len(training.handle.history) == 2


def test_a_graph_that_no_backward_goes_through_is_not_counted() -> None:
    """A forward that is looked at and not trained by is no second one before a backward."""
    training = Training("as planned")
    for _ in range(4):
        seen = training.model(training.x)
        training.step()
        assert seen.grad_fn is not None


def test_where_no_plan_is_found_the_first_one_stays() -> None:
    """A budget that the real loop cannot meet is said in one sentence with its cause, and training goes on."""
    least = Training("as planned", budget=0.0).promise
    training = Training("accumulation", budget=least)
    training.step()
    with pytest.warns(RuntimeWarning, match="without success: .*is too small.* Write auto.*accumulate=2"):
        training.step()
    training.step()
    assert training.handle.history == (training.handle.plan,)
    training.step()
    training.handle.remove()
    assert "forward" not in vars(training.model)


def test_a_model_that_is_collected_while_hooks_run() -> None:
    """Python may collect what looked at another model between two hooks of an optimizer's step."""
    gone, training = [Training("as planned")], Training("as planned")

    def collect(*_: Any) -> None:
        gone.clear()
        gc.collect()

    hooks = [optimizers.register_optimizer_step_post_hook(hook) for hook in (collect, lambda *_: None)]
    training.step()
    for hook in hooks:
        hook.remove()
    training.handle.remove()
    assert not optimizers._global_optimizer_post_hooks


def test_a_copy_is_not_watched() -> None:
    """What a copy of the model does says nothing of the model, and `remove` ends the looking."""
    before = dict(optimizers._global_optimizer_post_hooks)
    training = Training("as planned")
    twin = copy.deepcopy(training.model)
    for _ in range(4):
        twin(training.x).backward()
    assert isinstance(vars(training.model)["forward"], FirstSteps)
    assert len(training.handle.history) == 1
    training.handle.remove()
    assert "forward" not in vars(training.model)
    assert optimizers._global_optimizer_post_hooks == before


def test_figures_go_on_with_the_new_regions() -> None:
    """A plan that is exchanged while it is watched is reported on as it is then."""
    training = Training("accumulation")
    with training.handle.watch():
        for _ in range(3):
            training.step()
    report = training.handle.report()
    assert report.watched
    assert [row.choice for row in report.rows] == list(training.handle.plan.all_choices)
    assert all(row.saved_bytes for row in report.rows)


def test_the_order_of_keywords_is_no_difference() -> None:
    """A tensor of a call is compared with that of its own name, whatever the order of the keywords."""
    net = Made(lambda m, x, y, **others: (m.inside(x) * y * others["w"]).mean() + others["b"].sum(), inside=block())
    call = {"x": torch.randn(64, WIDTH), "y": torch.ones(64, 1), "w": torch.randn(64, WIDTH), "b": torch.ones(1)}
    handle = auto(net, call, budget=0.3, device="h100", optimizer=(adam := torch.optim.AdamW(net.parameters())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            net(**dict(reversed(call.items()))).backward()
            adam.step()
            adam.zero_grad()
    assert handle.history == (handle.plan,)


def test_a_smaller_step_is_within_the_promise() -> None:
    """A smaller batch, and accumulation that was told and is not there, are no difference."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, device="h100", accumulate=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(x[:8]).backward()
            adam.step()
            adam.zero_grad()
    assert handle.history == (handle.plan,)
    assert handle.looking is None or handle.looking.out


def test_a_peak_above_the_promise_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the allocator counts a peak, one above the promise is said with the budget to write."""
    training = Training("as planned")
    promise = training.promise

    def read(*running: dict[int, allocator.Peak]) -> None:
        for peaks in running:
            peaks[0] = allocator.Peak(promise + promise // 10, 0)

    monkeypatch.setattr(allocator, "read", read)
    monkeypatch.setattr("torch_recompute.plan.first_steps.COUNTING", ("cpu",))
    training.step()
    written = f"budget={promise - promise // 10}"
    with pytest.warns(RuntimeWarning, match=rf"more than promised.*Write auto\(..., {written}\)"):
        training.step()
    assert training.handle.plan != Plan()


def test_a_second_backward_through_one_forward_is_said() -> None:
    """The first backward retains the graph, so all that it rebuilds stays: the peak is not the promised one."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, device="h100")

    def step() -> None:
        out = model(x)
        out.backward(retain_graph=True)
        (2 * out).backward()
        adam.step()
        adam.zero_grad()

    step()
    with pytest.warns(RuntimeWarning, match="a second backward goes through one forward.*of the sum of the losses"):
        step()
    with measure(model, adam).track(x) as memory:
        step()
    assert handle.plan.predicted_peak_bytes is not None
    assert memory.peak_bytes > 1.05 * handle.plan.predicted_peak_bytes


def test_two_losses_of_two_outputs_are_no_difference() -> None:
    """Graphs that share nothing are freed by a backward each."""
    torch.manual_seed(0)
    model = Made(lambda m, x: (m.a(x), m.b(x)), a=Stack(), b=Stack())
    x, adam = torch.randn(64, WIDTH), torch.optim.AdamW(model.parameters())
    auto(model, x, budget=0.3, optimizer=adam, device="h100", loss=sum, replan=False)
    for _ in range(4):  # a warning is an error
        for loss in model(x):
            loss.backward()
        adam.step()
        adam.zero_grad()


def test_adversarial_examples_are_of_the_step_that_trains_on_them() -> None:
    """Forwards whose `autograd.grad` adds to no gradient end no step; the plan is then of the mode that trains."""
    training = Training("zeroed")
    first = training.handle.plan
    for _ in range(3):
        training.model.eval()
        x = training.x.clone().requires_grad_()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(training.model(x), x)
            x = (x + gradient.sign()).detach().requires_grad_()
        training.model.train()
        training.step()
    assert training.handle.plan is not first
    assert training.handle.plan.loop.training
    assert training.handle.plan.loop.accumulate == 1
    assert training.peak() == pytest.approx(training.promise, rel=0.005)


@pytest.mark.parametrize("grad", [False, True])
def test_calls_beside_the_training_are_not_counted(grad: bool) -> None:
    """Validation between two steps, and a layer that is called by itself, make no layer run more often."""
    training = Training("as planned")
    for _ in range(4):
        training.step()
        training.model.eval()
        with torch.set_grad_enabled(grad):
            training.model.layers[1](training.x)
        with torch.no_grad():
            training.model(training.x)
        training.model.train()
    assert len(training.handle.history) == 1
    assert training.handle.looking is None or training.handle.looking.out


def test_a_copy_can_be_saved() -> None:
    """A model and a copy of it can be pickled while the first steps are looked at, and what comes back trains."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in "123"
    )
    model, x = nn.Sequential(*layers), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, loss=lambda out: out.square().mean(), device="h100")
    twin = copy.deepcopy(model)
    model(x).square().mean().backward()
    for saved in (twin, model):
        again = pickle.loads(pickle.dumps(saved))
        again(x).square().mean().backward()
        assert torch.equal(again[0][1].weight.grad, model[0][1].weight.grad)
    adam.step()
    adam.zero_grad()
    model(x)
    assert len(handle.history) == 1


def test_two_optimizers_are_said() -> None:
    """A plan counts one optimizer's states; a second one that steps is named."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, WIDTH)
    head = torch.optim.AdamW(model.head.parameters())
    rest = torch.optim.SGD(model.layers.parameters(), momentum=0.9)
    auto(model, x, budget=0.3, optimizer=rest, device="h100")

    def step() -> None:
        model(x).backward()
        for one in (head, rest):
            one.step()
            one.zero_grad()

    step()
    with pytest.warns(RuntimeWarning, match=r"2 optimizers step \(AdamW and SGD\), and a plan counts .* a budget that"):
        step()


class Halting(nn.Module):
    """A layer that runs until its result says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = block(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.layer(x)
            if bool((self.head(x) > 1e6).all()):
                break
        return x.square().mean()


def test_a_loop_that_no_plan_can_follow_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Where another planning makes the same plan, it is said once, and it is not planned a third time."""
    torch.manual_seed(0)
    model, x = Halting(), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, device="h100")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model(x).backward()
            adam.step()
            adam.zero_grad()
    assert ["the plan is the same. " in str(one.message) for one in caught] == [True]
    assert "planned again" not in capsys.readouterr().out
    assert len(handle.history) <= 2


@pytest.mark.parametrize(
    "around", ["root", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sequential", "attributes"))]
)
def test_layers_that_were_left_out_are_noticed_wherever_they_are(around: str) -> None:
    """A layer that ran in no planned step is seen beside those that did, in whichever module they are."""
    layers = [block() for _ in range(LAYERS)]
    named = {f"layer{number}": layer for number, layer in enumerate(layers)}
    named["small"] = Made(lambda _, x: x)  # of the same class, and no layer
    inside = {"sequential": {"held": nn.Sequential(*layers)}, "attributes": {"held": Made(print, **named)}}
    count = 2

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in layers_of(model)[:count]:
            x = layer(x)
        return model.small(x).square().mean() if around == "root" else x.square().mean()

    def layers_of(model: Any) -> list[nn.Module]:
        return list((model if around == "root" else model.held).children())[:LAYERS]

    model, x = Made(run, **inside.get(around, named)), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, device="h100")
    for number in range(4):
        count = 2 if number < 1 else LAYERS
        with measure(model, adam).track(x) as memory:
            model(x).backward()
            adam.step()
            adam.zero_grad()
        assert len(handle.history) == (1 if number < 2 else 2)
    assert memory.peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.005)


class Skipping(Stack):
    """Layers that are left out at random, by a probability whose name no library uses, with dropout between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                x = layer(x)
        return self.head(x).square().mean()


def test_a_draw_that_no_simulation_repeats_is_said() -> None:
    """Where the step that is planned again calls other layers than the fullest, that is said, and it is the last."""
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(64, WIDTH)
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, x, budget=0.3, optimizer=adam, device="h100")
    torch.manual_seed(2)

    def steps() -> None:
        for _ in range(4):
            model(x).backward()
            adam.step()
            adam.zero_grad()

    with pytest.warns(RuntimeWarning, match="other layers ran in that step.*leaving layers out at 0") as said:
        steps()
    assert len(said) == 1
    assert len(handle.history) == 2


@dataclass
class Labelled:
    """A batch as some loaders make it, which PyTorch's pytrees know nothing of."""

    x: torch.Tensor
    further: Any = None


@pytest.mark.parametrize("larger", [False, True])
def test_tensors_in_objects_are_of_the_batch(larger: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch in a dataclass, and what an object in it holds, is counted, and a larger one is noticed."""

    def batch(rows: int) -> Labelled:
        return Labelled(torch.randn(rows, WIDTH), types.SimpleNamespace(noise=[torch.randn(rows, 10 * WIDTH)]))

    torch.manual_seed(0)
    model = Made(lambda m, b: m.stack(b.x + b.further.noise[0][:, :WIDTH]), stack=Stack())
    adam = torch.optim.AdamW(model.parameters())
    handle = auto(model, (batch(64),), budget=0.3, optimizer=adam, device="h100")
    given = batch(128 if larger else 64)
    for _ in range(3):
        with measure(model, adam).track(given.x, *given.further.noise) as memory:
            model(given).backward()
            adam.step()
            adam.zero_grad()
    assert memory.peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.005)
    assert ("a larger batch came ([128, 32], [128, 320])" in capsys.readouterr().out) == larger


def test_a_larger_batch_is_planned_with_its_integers(capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths, which must sum to the rows, are those of the call that was larger, not ones; it is planned with them."""

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, WIDTH), torch.tensor([rows // 4, rows - rows // 4])

    torch.manual_seed(0)
    model = Made(lambda m, x, lengths: m.stack(torch.cat(x.split(lengths.tolist()))), stack=Stack())
    adam = torch.optim.AdamW(model.parameters())
    auto(model, batch(64), budget=0.3, optimizer=adam, device="h100")
    for rows in (128, 64):
        model(*batch(rows)).backward()
        adam.step()
        adam.zero_grad()
    assert "a larger batch came ([128, 32], [2])" in capsys.readouterr().out


def test_looking_at_the_first_steps_takes_no_memory() -> None:
    """The second has the promised peak to the byte: integers are kept only of a call that is larger than planned."""
    torch.manual_seed(0)
    ids, rows = torch.randint(10, (64,)), nn.Embedding(10, WIDTH)
    model = Made(lambda m, ids: m.stack(m.rows(ids)), stack=Stack(), rows=rows)
    adam = torch.optim.AdamW(model.parameters())
    plan = auto(model, ids, budget=0.3, optimizer=adam).plan

    def step() -> None:
        loss = model(ids)
        loss.backward()
        adam.step()
        adam.zero_grad()

    step()
    with measure(model, adam) as found:
        found.track(ids)
        step()
    assert found.peak_bytes == plan.predicted_peak_bytes


def test_a_first_call_that_is_compiled_is_said_to_have_no_plan() -> None:
    """Where torch.compile traces the call that was to be planned, one warning says what to write, and no plan is in."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    handle = plan_first_call(model, 0.3, loss=torch.sum, optimizer=None, loop=COMMON)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def train() -> None:
        for _ in range(3):
            compiled(torch.ones(2, 8)).sum().backward()

    with pytest.warns(RuntimeWarning, match=r"runs without a plan\.\n  Plan before it is compiled:  auto") as said:
        train()
    assert len(said) == 1
    assert not handle.plan.choices
