"""The doctor: a model with a fault gets its kind of finding, and a model without faults gets none."""

from __future__ import annotations

import ast
import gc
import itertools
import json
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from support.advice import printed_code_runs
from support.models import Made, deep_is_made
from support.unchanged import unchanged
from support.zoo import mean_loss
from torch_recompute import Choice, Plan, apply, doctor, make_plan, recompute, verify
from torch_recompute.commands import cli
from torch_recompute.doctor import step_watcher
from torch_recompute.doctor.checks import CHECKS, _budget, look_for
from torch_recompute.doctor.simulated import SimulatedSteps
from torch_recompute.doctor.step_watcher import AllocatorStats, Observations
from torch_recompute.memory.budget import read_budget
from torch_recompute.memory.free import heap
from torch_recompute.simulation.training_step import TrainingStep

SIZE = 32


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    """Attention and an MLP with a softmax in the place of its activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.core = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), Core()
        self.proj, self.up = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4 * SIZE)
        self.soft, self.down = nn.Softmax(-1), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.soft(self.up(x)))


def stack(layer: Callable[[], nn.Module] = Layer, count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(count)))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 32 * SIZE).view(2, 32, SIZE)


def each(*parts: str, keep: tuple[str, ...] = ()) -> Plan:
    """A plan with these parts of each layer as regions; "" is the layer itself."""
    return Plan(tuple(Choice((f"{i}.{part}".strip("."),), keep) for i in range(2) for part in parts))


def around(inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A module that is called in some way of its own."""
    return Made(lambda m, x: call(m.inner, x), inner=inner)


class Waits(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sin()
        return y * y.abs().max().item()


class Forgets(nn.Linear):
    """Each run draws numbers from a generator that nobody knows of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * next(NUMBERS)).sin()


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x).sin()


class Remembers(nn.Linear):
    """A list in a list, which is nobody's to put back."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.calls = [[0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0][0] += 1
        return super().forward(x).sin()


def head() -> nn.Module:
    """A tiny layer, and logits that are much wider."""
    return Made(lambda m, x: m.head(F.gelu(m.layer(x))), layer=nn.Linear(8, 8), head=nn.Linear(8, 4096, bias=False))


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits[..., 0].numel(), dtype=torch.long))


class Stash(torch.autograd.Function):
    """Keeps a tensor where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.cos = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.cos


STEP = {"device": "h100", "loss": mean_loss, "hold_output": False}
NUMBERS = iter(range(1, 10**6))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Sigmoid())


def region(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(fn)(x)


def reentrant(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(fn, x, use_reentrant=True)


def theirs(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(fn, x, use_reentrant=False)


def twice(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(lambda x: recompute(fn, name="inner")(x.sin()).sin(), name="outer")(x)


def around_theirs(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return recompute(lambda x: theirs(fn, x).sin())(x)


@dataclass(frozen=True)
class Case:
    """A model that has one thing wrong, and words that the finding must say."""

    kind: str
    model: Callable[[], nn.Module]
    where: str
    words: tuple[str, ...]
    options: Callable[[], dict[str, Any]] = dict
    x: Callable[[], torch.Tensor] = batch
    also: tuple[str, ...] = ()


def wrapped(call: Callable[[nn.Module, torch.Tensor], torch.Tensor], inner: Callable[[], nn.Module] = linear) -> Any:
    return lambda: stack(lambda: around(inner(), call))


def with_grad(out: torch.Tensor) -> torch.Tensor:
    return (out + torch.zeros((), requires_grad=True)).mean()


def inner() -> Plan:
    return Plan(tuple(Choice((f"{i}.inner",)) for i in range(2)))


CASES = [
    Case("saves_nothing", stack, "*.up", ("dropped 0 bytes",), lambda: {"plan": each("up")}),
    Case(
        "saves_nothing",
        wrapped(lambda fn, x: x * 2),
        "*.inner",
        ("2 regions of the plan never ran", "0.inner was not called"),
        lambda: {"plan": inner(), "loss": with_grad},
    ),
    Case(
        "output_pins",
        wrapped(lambda fn, x: fn(x)),
        "0.inner",  # what the last one drops, nobody holds
        ("are held by",),
        lambda: {"plan": inner()},
        also=("replay_share",),
    ),
    Case(
        "output_pins",
        wrapped(lambda fn, x: recompute(lambda x: Stash.apply(fn(x)), name="stashes")(x)),
        "stashes",
        ("keep 16,384 bytes in ctx.cos of StashBackward",),
    ),
    Case("made_worse", stack, "*.soft", ("65,536 bytes more is kept than by",), lambda: {"plan": each("soft")}),
    Case("double_recompute", stack, "*.core", ("fused attention", "AddmmBackward0"), lambda: {"plan": each("core")}),
    Case("double_recompute", wrapped(twice), "inner", ("which is a region too",)),
    Case("double_recompute", wrapped(around_theirs), "*.inner", ("which is a region too",)),
    Case("replay_share", stack, "*", ("of the step's FLOPs", "100% of them"), lambda: {"plan": each("")}),
    Case("host_syncs", wrapped(region, lambda: Waits(SIZE, SIZE)), "*.inner", ("waits", "item()")),
    Case("not_deterministic", wrapped(region, lambda: Forgets(SIZE, SIZE)), "*.inner", ("aten",)),
    Case("updated_twice", wrapped(theirs, Counts), "*.inner.count", ("again in 1 of 1 backward.",)),
    Case("updated_twice", wrapped(region, lambda: Remembers(SIZE, SIZE)), "Remembers", ("calls",)),
    Case(
        "reentrant",
        wrapped(reentrant),
        "*.inner",
        ("marks its parameters",),
        x=lambda: batch().requires_grad_(),
        also=("output_pins", "saves_nothing"),
    ),
    Case("frozen_input", wrapped(reentrant), "*.inner.*", ("got no gradient",)),
    Case("over_budget", stack, "Sequential", ("more than the budget",), lambda: {"budget": "300KiB"}),
    Case(
        "optimizer_state",
        stack,
        "Sequential",
        ("optimizer state",),
        lambda: {"plan": each("", keep=("@product",)), "optimizer": torch.optim.AdamW, "budget": "400KiB"},
        also=("over_budget",),
    ),
    Case(
        "output_held",
        lambda: nn.Sequential(head()),
        "the training loop",
        ("`out` of `out = model(...)` keeps 1.00 MiB alive",),
        lambda: {"loss": entropy, "hold_output": True},
        x=lambda: torch.ones(64, 8),
    ),
    Case(
        "loss_head",
        lambda: nn.Sequential(head()),
        "Sequential",
        ("logits-sized",),
        lambda: {"loss": entropy, "plan": Plan((Choice(("0.layer",)),))},
        x=lambda: torch.ones(64, 8),
        also=("saves_nothing",),
    ),
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.where}")
def test_provoked(case: Case) -> None:
    """The model gets the finding, at the place, with the figures, and no other but what goes with it."""
    given = {"model": case.model(), "args": (case.x(),), **STEP, **case.options()}
    report = doctor.examine(**given)
    found = [finding for finding in report.findings if finding.kind == case.kind]
    assert [finding.where for finding in found] == [case.where], report
    assert all(word in found[0].seen for word in case.words), report
    assert found[0].confirmed
    assert found[0].write
    for finding in report.findings:
        printed_code_runs(finding.write, {"given": given})
    assert {finding.kind for finding in report.findings} == {case.kind, *case.also}, report
    assert not report


def test_every_kind_is_provoked() -> None:
    """Each kind of finding has a model that provokes it, here or, for those that need a device or real steps, below."""
    elsewhere = {"fragmentation", "fallbacks", "masks_drawn_again", "kept_alive"}
    assert {case.kind for case in CASES} | elsewhere == set(doctor.KINDS)
    assert len(doctor.KINDS) == len(doctor.CHECKS)


class Swish(torch.autograd.Function):
    """Its backward computes again what its forward did, by hand and without a graph: no checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return gradient * (sigmoid + x * sigmoid * (1 - sigmoid))


HEALTHY: list[tuple[str, Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]]]] = [
    ("plain", stack, lambda model: {}),
    ("products kept", stack, lambda model: {"plan": each("", keep=("@product", "@attention"))}),
    ("planned", stack, lambda model: planned(model)),
    (
        "a Function",
        lambda: nn.Sequential(linear(), around(linear(), lambda fn, x: Swish.apply(fn(x)))),
        lambda model: {},
    ),
    ("counting buffers", wrapped(region, Counts), lambda model: {"run": True, "plan": None}),
    (
        "theirs, not reentrant",
        wrapped(theirs, lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())),
        lambda model: {},
    ),
]


def planned(model: nn.Module) -> dict[str, Any]:
    plan = make_plan(model, (batch(),), budget=0.5, optimizer=torch.optim.AdamW, device="h100", loss=mean_loss)
    return {"plan": plan, "budget": plan.predicted_peak_bytes, "optimizer": torch.optim.AdamW}


@pytest.mark.parametrize(("name", "model", "options"), HEALTHY, ids=[name for name, _, _ in HEALTHY])
def test_healthy(name: str, model: Any, options: Any) -> None:
    """A model with nothing wrong gets no finding."""
    made = model()
    report = doctor.examine(made, (batch(),), **{**STEP, **options(made)})
    kinds = {finding.kind for finding in report.findings}
    assert kinds <= ({"replay_share"} if name == "counting buffers" else set()), report


PLANS = [*(each(part) for part in ("", "core", "soft", "up", "norm")), each("", "core"), each("", keep=("@product",))]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(map(str, plan.choices[:2])))
def test_what_regions_free_is_what_the_step_keeps_less(plan: Plan) -> None:
    """What regions free by their accounts is, to the byte, what a step keeps less with them than without."""
    steps = SimulatedSteps(TrainingStep(stack(), (batch(),), loss=mean_loss), plan)
    steps.run()
    freed = sum(account.freed_bytes for account in steps.regions.by_name.values())
    assert freed == steps.plain.saved_bytes - steps.step.saved_bytes


@pytest.mark.parametrize("budget", [300_001, 123_457])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_budget_that_is_said_is_the_one_that_was_tried(share: float, budget: int) -> None:
    """A budget in advice is read as exactly the bytes that the plan was made for, and the line runs."""
    model, call = stack(), {"optimizer": None, **STEP}
    least = make_plan(model, (batch(),), budget=share, **call).predicted_peak_bytes
    assert least is not None
    for limit in (least, budget):
        assert read_budget(ast.literal_eval(_budget(limit))).bytes == limit
    report = doctor.examine(model, (batch(),), budget=least, **STEP)
    said = [found.write for found in report.findings if found.kind == "over_budget"]
    for text in said:
        written = re.search(r"`budget=([^`]+)`", text)
        assert written is not None
        make_plan(model, (batch(),), budget=ast.literal_eval(written[1]), **call)
    assert len(said) == 1


LENGTHS = itertools.cycle([3, 5])


class Flips(nn.Linear):
    """A replay of it saves other shapes than its forward did."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, : next(LENGTHS)].sin().sum(1)


def popped(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint(lambda xs: fn(xs.pop()), [x], use_reentrant=False)


AS_BEFORE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a plan": (
        lambda: stack(lambda: around(nn.Sequential(Counts(), nn.Dropout()), theirs)),
        {"plan": Plan((Choice(("0.inner.0",)),))},
    ),
    "torch's checkpoint raises": (wrapped(popped, lambda: nn.Sequential(Counts(), nn.Dropout())), {}),
    "a replay raises": (lambda: stack(lambda: around(Flips(SIZE, SIZE), region), 1), {}),
}


@pytest.mark.parametrize("name", AS_BEFORE)
def test_everything_is_as_before(name: str) -> None:
    """An examination changes no weight, gradient, buffer, random state or forward, and leaves no hook."""
    made, options = AS_BEFORE[name]
    model = made()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with unchanged(model):
        report = doctor.examine(model, (batch(),), device="h100", loss=mean_loss, **options)
    assert ("not_deterministic" in {finding.kind for finding in report.findings}) == ("raises" in name)


def test_what_a_model_raises_by_itself_is_raised() -> None:
    """An error that does not come from recomputation is the caller's, under a checkpoint too."""

    def broken(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return theirs(fn, x) + x[:, :3]

    with pytest.raises(RuntimeError, match="must match the size"):
        doctor.examine(wrapped(broken)(), (batch(),), loss=mean_loss)


def test_a_step_that_does_not_fit_is_simulated() -> None:
    """Where memory runs out in the real step, the findings of the simulation come out."""

    class Large(nn.Softmax):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if type(input) is torch.Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(input)

    model = stack()
    model[0].soft = Large(-1)
    report = doctor.examine(model, (batch(),), plan=each("soft"), device="h100", loss=mean_loss)
    assert [finding.kind for finding in report.findings] == ["made_worse"]
    assert "memory ran out in the step (CUDA out of memory." in dict(report.not_looked_for)["frozen_input"]


def test_nothing_is_kept_alive() -> None:
    """After an examination and a watch the model dies by reference counting."""
    model = stack()
    with doctor.watch(model) as watching:
        model(batch()).sum().backward()
    report = doctor.examine(model, (batch(),), plan=each("soft"), device="h100", loss=mean_loss)
    assert watching.report()
    assert not report
    del watching
    gone = weakref.ref(model)
    gc.collect()
    del model
    assert gone() is None


# --- on meta, and what was not looked for ---------------------------------------------------------------------------


def test_a_model_on_meta_is_simulated() -> None:
    """On meta the findings of the simulation come out, and the report says which kinds were not looked for, and why."""
    with torch.device("meta"):
        model = stack()
    report = doctor.examine(model, (batch().to("meta"),), plan=each("soft"), device="h100", loss=mean_loss)
    assert [finding.kind for finding in report.findings] == ["made_worse"]
    assert dict(report.not_looked_for)["host_syncs"] == "no step was run (the model is on meta)"
    assert set(report.looked_for) | {kind for kind, _ in report.not_looked_for} == set(doctor.KINDS)
    assert "not looked for, because no step was run (the model is on meta): frozen_input" in str(report)


def test_a_step_that_cannot_be_simulated_is_run() -> None:
    """A model that no copy can be made of is run all the same, and the report says what is missing for it."""

    class Slotted:
        __slots__ = ("layer",)

    outside = Slotted()
    outside.layer = linear()
    layers = nn.Sequential(around(outside.layer, lambda fn, x: outside.layer(x)))
    report = doctor.examine(layers, (batch(),), loss=mean_loss)
    assert report
    assert dict(report.not_looked_for)["made_worse"].startswith("the step cannot be simulated (")


# --- watching -------------------------------------------------------------------------------------------------------


def train(model: nn.Module, steps: int = 2, x: torch.Tensor | None = None) -> None:
    for _ in range(steps):
        out = model(batch() if x is None else x)
        out.mean().backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("kind", "model", "x"),
    [
        ("updated_twice", wrapped(theirs, Counts), batch),
        ("reentrant", wrapped(reentrant), lambda: batch().requires_grad_()),
        ("frozen_input", lambda: nn.Sequential(*wrapped(reentrant)(), nn.Linear(SIZE, SIZE)), batch),
        ("double_recompute", wrapped(around_theirs), batch),
    ],
)
def test_watched(kind: str, model: Callable[[], nn.Module], x: Callable[[], torch.Tensor]) -> None:
    """Real steps show what an examination's one step shows, and the hooks are gone afterwards."""
    made = model()
    with doctor.watch(made) as watching:
        train(made, 2, x())
    assert [finding.kind for finding in watching.report().findings] == [kind]
    assert not any(module._forward_pre_hooks for module in made.modules())


class Sound(nn.Linear):
    """A linear layer with a buffer that is not a number yet, a counter of the loss's, and a teacher that is trained."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("seen", torch.full((3,), math.nan))
        self.register_buffer("losses", torch.zeros(()))
        self.teacher = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return super().forward(x) - target

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        self.losses += 1
        return out.square().mean()


def test_nothing_else_is_taken_for_a_checkpoint() -> None:
    """A buffer that the loss changes or that is NaN is no finding, nor is a teacher's forward without grad."""
    model = Sound()
    with doctor.watch(model) as watching:
        for _ in range(2):
            model.loss(model(batch())).backward()
    assert watching.report(), watching.report()
    assert (found := doctor.examine(model, batch(), loss=model.loss, hold_output=False)), found


def test_a_healthy_training_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with a plan, buffers and two backwards gets no finding, and learns what it learns unwatched."""
    monkeypatch.setattr(
        step_watcher, "stamp", itertools.count(0.0, 100.0).__next__
    )  # long steps, on a busy machine too

    def trained(watched: bool) -> tuple[list[torch.Tensor], Any]:
        model = stack(lambda: nn.Sequential(Counts(), nn.Dropout(0.1), nn.BatchNorm1d(32)))
        handle = apply(model, Plan((Choice(("1.0",)),)))
        watching = doctor.watch(model, closely=1) if watched else None
        for _ in range(3):
            out = model(batch())
            out.mean().backward(retain_graph=True)
            out.square().mean().backward()
        handle.remove()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*gradients, *model.buffers()], watching

    plain, _ = trained(False)
    watched, watching = trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert watching.report(), watching.report()
    watching.remove()
    watching.remove()


def test_after_the_close_look_one_hook_is_left() -> None:
    """From the step after the last close one there are no hooks on inner modules and parameters."""
    model = stack(linear)
    watching = doctor.watch(model, closely=2)
    train(model, 2)
    assert any(module._forward_pre_hooks for module in model[0].modules())
    train(model, 1)
    assert not any(module._forward_pre_hooks for module in model[0].modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert model._forward_pre_hooks
    watching.remove()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("count", [2, 40])
def test_the_heap_is_walked_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds what outlived its step is read from one walk of all objects, however much it is."""
    kept: list[torch.Tensor] = []
    model = stack(lambda: around(linear(), lambda fn, x: [kept.append(y := fn(x)), y][1]), count)
    walks: list[int] = []
    everything = gc.get_objects

    def walk() -> list[Any]:
        walks.append(1)
        return everything()

    monkeypatch.setattr(gc, "get_objects", walk)
    monkeypatch.setattr(gc, "get_referrers", None)
    report = doctor.examine(model, (batch(),), **STEP)
    found = [finding for finding in report.findings if finding.kind == "kept_alive"]
    assert [finding.where for finding in found] == [
        "closure variable 'kept' of test_the_heap_is_walked_once.<locals>.<lambda>.<locals>.<lambda>[*]"
    ]
    assert len(walks) == 1


def watched_late(steps: int, keeps: Callable[[int], bool]) -> tuple[doctor.Report, nn.Module]:
    """A training in which some steps keep an inner result of 2 MiB without its graph, closely watched for two steps."""
    kept: list[torch.Tensor] = []
    number = itertools.count()

    def keep(fn: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = fn(x)
        if keeps(next(number)):
            kept.append(y.detach())
        return y * 2

    model = nn.Sequential(around(nn.Linear(SIZE, SIZE), keep))
    with doctor.watch(model, closely=2) as watching:
        train(model, steps, torch.ones(64, 256, SIZE))
    return watching.report(), model


def test_bytes_that_grow_later_are_looked_into() -> None:
    """Inner results that only later steps keep are found by the bytes alive, and the report says by which."""
    if heap() is None:
        pytest.skip("the C library says nothing of the heap")
    report, _ = watched_late(16, lambda number: number >= 5)
    assert [(found.kind, found.where) for found in report.findings] == [
        ("kept_alive", "closure variable 'kept' of watched_late.<locals>.keep[*]")
    ]
    said = "bytes in use of this process's heap, outputs and graphs that outlive their step"
    assert report.watched == json.loads(report.to_json())["watched"] == said
    assert f"compared after the first steps: {said}" in " ".join(str(report).split())
    sound, _ = watched_late(16, lambda number: False)
    assert sound, sound
    short, _ = watched_late(1, lambda number: False)
    assert short.watched == ""


@pytest.mark.parametrize("grows", [True, False])
def test_the_allocator_says_what_is_alive(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the allocator's bytes are compared: where they grow, all hooks are back."""
    alive = iter([*range(0, 300, 100), *([2**23] * 9 if grows else [200] * 9)])
    monkeypatch.setattr(step_watcher, "_cuda_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(step_watcher, "_allocator_stats", lambda model: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(alive))
    model = stack(linear)
    with doctor.watch(model, closely=2) as watching:
        train(model, 3)
        assert not any(module._forward_pre_hooks for module in model[0].modules())
        train(model, 1)
        assert any(module._forward_pre_hooks for module in model[0].modules()) == grows
        assert watching.report().watched.startswith("bytes alive by the allocator of cuda:0, outputs and graphs")


def test_where_nothing_says_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a meter outputs and graphs are compared alone, and that is said."""
    monkeypatch.setattr(step_watcher, "heap", lambda: None)
    report, _ = watched_late(4, lambda number: False)
    assert report.watched == "outputs and graphs that outlive their step"


def test_under_ddp() -> None:
    """Around DDP the finding says that it is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(wrapped(reentrant)())
        with doctor.watch(model) as watching:
            model(batch().requires_grad_())  # a backward is what DDP refuses
        (found,) = watching.report().findings
        del model, watching
    finally:
        dist.destroy_process_group()
    assert (found.kind, found.where, found.figures) == ("reentrant", "module.*.inner", {"calls": 2, "under_ddp": 1.0})
    assert "That is around this model." in found.seen


def test_a_plan_of_the_module_inside_ddp() -> None:
    """With a plan, too, the module inside DDP is examined and verified, whose paths the plan has."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model, plan = DistributedDataParallel(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())), Plan((Choice(("0",)),))
        report = doctor.examine(model, batch(), loss=torch.sum, plan=plan)
        assert verify(model, batch(), loss=torch.sum, plan=plan)
    finally:
        dist.destroy_process_group()
    assert report.model == "Sequential"


def test_fallbacks() -> None:
    """A graph break in a compiled region is found by its reason, and one before the watching is not."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    model = nn.Linear(SIZE, SIZE)
    compiled = torch.compile(breaks, backend="eager")
    compiled(batch())
    with doctor.watch(model) as watching:
        train(model, 1)
    assert watching.report()
    torch._dynamo.reset()
    with doctor.watch(model) as watching:
        train(model, 1)
        compiled(batch())
    (found,) = watching.report().findings
    assert found.kind == "fallbacks"
    assert found.seen.startswith("graph break: ")
    assert "cut in two (it goes on in breaks, line " in found.seen
    assert "fullgraph=True" in found.write


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_dropout_under_a_budget_of_the_compiler(part: str, share: float) -> None:
    """Dropout that is compiled under `activation_memory_budget` is found, and the setting at 1 is what mends it."""
    torch._dynamo.reset()
    model: Any = stack(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.1)))
    if part == "whole":
        model = torch.compile(model, backend="aot_eager")
    else:
        model[0].compile(backend="aot_eager")
    with torch._functorch.config.patch(activation_memory_budget=share), doctor.watch(model) as watching:
        train(model, 1)
        report = watching.report()
    assert [found.kind for found in report.findings] == ["masks_drawn_again"] * (share < 1)
    if report.findings:
        assert "Partition" in report.findings[0].write


@pytest.mark.filterwarnings("ignore:.* is recomputed inside torch.compile:RuntimeWarning")  # test_compiled_plans.py
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at inputs
def test_a_plan_that_is_not_in_the_compiled_graph() -> None:
    """A planned layer with a graph break in it is found by its name."""

    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    torch._dynamo.reset()
    model = nn.Sequential(Breaks(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    apply(model, Plan((Choice(("0",)), Choice(("1",)))))
    compiled = torch.compile(model, backend="aot_eager")
    with doctor.watch(compiled) as watching:
        train(compiled, 1)
    seen = [found.seen for found in watching.report().findings if "the plan is not in the compiled graph" in found.seen]
    assert len(seen) == 1
    assert "region 0: " in seen[0]


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_watching_breaks_no_graph(part: str) -> None:
    """A compiled model that is watched is compiled in one piece, as without, and its steps are seen."""

    class Normed(nn.Sequential):
        """Compiled alone, as a layer, a module of torch.nn itself stays uncompiled: its code is of torch."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    torch._dynamo.reset()
    model: Any = stack(lambda: Normed(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(32)))
    if part == "whole":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model[0].compile(backend="eager", fullgraph=True)
    with doctor.watch(model) as watching:
        train(model, 3)
    report = watching.report()
    assert not report.findings
    seen = watching._watcher.observations
    assert seen.steps == seen.backwards == 3
    assert set(seen.gradients.values()) == {3}


def test_no_cuda_graph() -> None:
    """What torch leaves out of CUDA graphs is found, once per compilation: here one with CPU tensors in it."""
    model = nn.Linear(SIZE, SIZE)
    compiled = torch.compile(model, backend="cudagraphs")
    with doctor.watch(compiled) as watching:
        train(compiled, 3)
    (found,) = watching.report().findings
    assert (found.kind, found.figures) == ("fallbacks", {"count": 1})
    assert found.seen.startswith("no CUDA graph (cudagraph_skips): once. ")
    assert "ran without a CUDA graph" in found.seen
    assert "TORCH_LOGS=cudagraphs" in found.write


def test_a_plan_with_host_memory_is_within_its_budget() -> None:
    """What a plan keeps in host memory does not count on another device: the doctor sees the peak that was promised."""
    model, x = deep_is_made()[0], torch.ones(512, 16)
    plan = make_plan(model, (x,), budget=0.02, offload=True, device="h100", loss=mean_loss)
    assert plan.prediction is not None
    assert plan.prediction.host_bytes > 0
    report = doctor.examine(
        model, (x,), plan=plan, budget=plan.predicted_peak_bytes, run=False, device="h100", loss=mean_loss
    )
    assert "over_budget" in report.looked_for
    assert "over_budget" not in {finding.kind for finding in report.findings}


# --- checks on evidence that cannot be had here ---------------------------------------------------------------------

GIB = 2**30
STATS = AllocatorStats("cuda:0", 40 * GIB, 70 * GIB, 3, 80 * GIB)


@pytest.mark.parametrize(
    ("books", "found"),
    [
        (STATS, True),
        (replace(STATS, allocated_bytes=65 * GIB), False),
        (replace(STATS, retries=0, reserved_bytes=60 * GIB), False),
        (replace(STATS, retries=0), True),
    ],
    ids=["pieces", "full", "room enough", "nearly full"],
)
def test_fragmentation(books: AllocatorStats, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much that is reserved and not allocated is found where memory is short, and only there."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    evidence = doctor.Evidence("Model", observed=Observations(allocator=books))
    findings = look_for(CHECKS, evidence).findings
    assert [f.figures["reserved_bytes"] for f in findings] == [books.reserved_bytes] * found
    for finding in findings:
        assert "30.00 GiB were unused, in fragments" in finding.seen
        assert finding.write.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert all("is on already" in finding.write for finding in look_for(CHECKS, evidence).findings)


def test_fragmentation_is_read_from_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks are those of `torch.cuda.memory_stats`; where there is no CUDA, the report says so."""
    model = nn.Linear(SIZE, SIZE)
    with doctor.watch(model) as watching:
        train(model, 1)
        assert "whose allocator it is about" in dict(watching.report().not_looked_for)["fragmentation"]
        stats = {"allocated_bytes.all.peak": 40 * GIB, "reserved_bytes.all.peak": 70 * GIB, "num_alloc_retries": 3}
        monkeypatch.setattr(step_watcher, "_cuda_device", lambda model: torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
        (found,) = watching.report().findings
    assert (found.kind, found.where) == ("fragmentation", "cuda:0")
    assert found.figures == {"allocated_bytes": 40 * GIB, "reserved_bytes": 70 * GIB, "retries": 3}


@pytest.mark.parametrize(("seconds", "found"), [(0.1, False), (0.2, True)])
def test_replay_seconds(seconds: float, found: bool) -> None:
    """Of a watched training it is seconds that are compared, and the heaviest unit is named."""
    observed = Observations(
        steps=4,
        seconds=1.0,
        replay_seconds={"layers.0": seconds * 0.4, "layers.1": seconds * 0.4, "head": seconds * 0.2},
    )
    findings = look_for(CHECKS, doctor.Evidence("Model", observed=observed)).findings
    assert [finding.where for finding in findings] == ["layers.*"] * found
    assert (
        not found or "replays take 20% of the step (200.0 of 1,000.0 ms), 80% of that in layers.*" in findings[0].seen
    )


# --- the command ----------------------------------------------------------------------------------------------------


def good_pair() -> tuple[nn.Module, tuple[torch.Tensor], Callable[[Any], torch.Tensor]]:
    return stack(), (batch(),), mean_loss


@pytest.mark.usefixtures("plain_terminal", "this_test")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 and no finding; 1 and the plan's findings, as text, as JSON or as nothing; only the result is on stdout."""
    arguments = ["--optimizer", "none", "--device", "h100", "--no-hold-output"]
    assert cli.main(["doctor", "this_test:good_pair", *arguments]) == cli.OK
    assert "nothing found; 14 kinds looked for" in capsys.readouterr().out
    path = tmp_path / "plan.json"
    path.write_text(each("soft").to_json())
    arguments += ["--plan", str(path), "--no-run"]
    assert cli.main(["doctor", "this_test:good_pair", *arguments]) == cli.FAILED
    output = capsys.readouterr()
    assert "made_worse  *.soft" in output.out
    assert "fix  a plan without *.soft" in output.out
    assert output.err == ""
    assert cli.main(["doctor", "this_test:good_pair", *arguments, "--json"]) == cli.FAILED
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["command"], document["ok"]) == (1, "doctor", False)
    (finding,) = document["findings"]
    assert set(finding) == {"kind", "where", "seen", "confirmed", "write", "figures"}
    assert finding["figures"] == {"regions": 2, "held_bytes": 65536, "freed_bytes": -65536}
    assert set(document["looked_for"]) | set(document["not_looked_for"]) == set(doctor.KINDS)
    assert cli.main(["doctor", "this_test:good_pair", *arguments, "--quiet"]) == cli.FAILED
    assert capsys.readouterr().err == ""


def test_memory_at_a_reused_address_is_watched() -> None:
    """A result whose storage has the identity of one that is gone is recorded like any other."""
    outputs, weight = step_watcher._ModelOutputs(), torch.ones(4, requires_grad=True)
    for _ in range(10):
        result = weight * 2
        outputs.add("layer", result)
        assert len(outputs.alive(False)) == 1
        del result
