"""`make_plan`: a planned step has the predicted bytes and FLOPs, and gradients equal to the last bit."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.models import DEEP, Gpt, InTurn, Residual, deep_is_made
from support.recorded import segment_options
from support.training import gradients, promise_is_kept
from support.zoo import mean_loss
from torch_recompute import (
    ArgumentError,
    BudgetError,
    Choice,
    Plan,
    Profile,
    apply,
    make_plan,
    measure,
    profile,
    simulate,
    solve,
)
from torch_recompute.errors import brief
from torch_recompute.memory.loop import Loop
from torch_recompute.planner import options as planner_options
from torch_recompute.planner.options import SegmentOptions
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.solve import smallest
from torch_recompute.simulation.devices import NO_WORK, Host, Roofline
from torch_recompute.simulation.training_step import TrainingStep

WIDTH, TOKENS, BATCH = 32, 16, 2


IDS = torch.randint(64, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "gpt": (Gpt, (IDS,)),
    "gpt by hand": (lambda: Gpt(by_hand=True), (IDS,)),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    build_, args = MODELS[name]
    return build_(), args


@pytest.fixture(scope="module")
def gpt(free_launches: None) -> Planner:
    """What several tests ask of: the planner of a small GPT for a data sheet, which has measured its options once."""
    model, args = made("gpt")
    return Planner(TrainingStep(model, args, device="h100", loss=mean_loss))


@pytest.mark.parametrize("name", ["gpt by hand", pytest.param("gpt", marks=pytest.mark.nightly)])
def test_the_promise_is_kept(name: str) -> None:
    """With an optimizer the measured peak is the predicted one, and FLOPs and gradients are as they should be."""
    model, args = made(name)

    def fresh() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, args = made(name)
        return model, lambda: model(*args)

    adam, loop = torch.optim.AdamW, Loop(hold_output=False)
    planner = Planner(TrainingStep(model, args, optimizer=adam, device="h100", loop=loop))
    for share in (0.7, 0.02):
        promise_is_kept(fresh, planner.plan(share), args, adam)


def test_prices_may_be_given_as_a_roofline(gpt: Planner) -> None:
    """A planner that is given a device by its speeds spares by them: one that counts FLOPs replays no more of them."""
    model, args = made("gpt")
    counting = Planner(TrainingStep(model, args, device=Roofline("counting", {1: 1e12}, 1e18, 1e-12), loss=mean_loss))
    for share in (0.2, 0.5, 0.8):
        plan, peer = counting.plan(share), gpt.plan(share)
        assert plan.prediction is not None
        assert plan.prediction.device == "counting"
        assert (plan.predicted_replay_flops or 0) <= (peer.predicted_replay_flops or 0)


def test_an_infeasible_budget_names_the_smallest_and_its_plan(gpt: Planner) -> None:
    """The error carries the least budget and a plan; asking for that budget gives a plan that keeps it."""
    with pytest.raises(BudgetError, match="is too small for a step of this model") as caught:
        gpt.plan("1 KiB")
    least = caught.value.smallest
    plan = gpt.plan(least)
    assert plan.predicted_peak_bytes == least
    assert isinstance(caught.value.solution, Plan)
    assert caught.value.solution.predicted_peak_bytes == least
    with pytest.raises(BudgetError):
        gpt.plan(least - 1)


def test_a_generous_budget_leaves_the_model_alone(gpt: Planner) -> None:
    """With more than the plain step needs there is no region, and the step costs nothing more."""
    plan = gpt.plan("10 GiB")
    assert len(plan) == 0
    assert plan.predicted_replay_flops == 0
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes == plan.prediction.plain_peak_bytes


def test_a_model_on_meta_is_planned_without_memory() -> None:
    """A model far larger than this machine is planned; nothing of it is ever made."""
    with torch.device("meta"):
        parts = [nn.Sequential(nn.Linear(16384, 65536), nn.GELU(), nn.Linear(65536, 16384)) for _ in range(6)]
    model = InTurn(parts, residual=True)
    x = torch.empty(65536, 16384, device="meta")
    plan = make_plan(model, (x,), budget=0.3, device="h100", loss=mean_loss)
    assert plan.prediction is not None
    assert plan.prediction.plain_peak_bytes > 128 * 2**30
    assert len(plan) > 0


def test_a_profile_is_data(gpt: Planner) -> None:
    """What is written as JSON and read back solves to the same plans, without the model."""
    model, args = made("gpt")
    taken = profile(model, args, device="h100", loss=mean_loss)
    read = Profile.from_json(taken.to_json())
    assert read == taken
    for budget in (0.8, 0.2):
        plan = solve(read, budget=budget)
        assert plan == solve(taken, budget=budget)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.predicted_peak_bytes is not None
        assert plan.prediction is not None
        assert gpt.plan(plan.prediction.budget_bytes).choices == plan.choices
    with pytest.raises(BudgetError) as caught:
        solve(read, budget="1B")
    assert isinstance(caught.value.solution, Plan)


def test_a_plan_is_for_one_model(gpt: Planner) -> None:
    """A plan that was written and read applies to the same model made again; another is refused by its difference."""
    plan = Plan.from_json(gpt.plan(0.3).to_json())
    again, _ = made("gpt")
    apply(again, plan).remove()
    again.blocks.append(copy.deepcopy(again.blocks[0]))
    with pytest.warns(RuntimeWarning, match=r"promises \(.*\) is not that of this model"):
        apply(again, plan).remove()
    again.blocks[1].mlp[0] = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    with pytest.raises(ArgumentError, match=r"made for a model with Block with .* at 'blocks.1'; this model has Block"):
        apply(again, plan)


class Expert(nn.Module):
    """Both products of two MLPs side by side, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, 4 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(2, 4 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, width), each of which goes through both."""
        made = torch.bmm(F.gelu(torch.bmm(x.expand(2, *x.shape), self.up)), self.down)
        return (made * made.sigmoid()).sum(0)


class Experts(nn.Module):
    """A few of them with their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.square().mean()


def test_parts_of_a_part_are_recomputed_by_themselves() -> None:
    """Of a mixture the shared expert alone, the stack of experts alone, and both apart are choices of their own."""
    x = torch.randn(64, WIDTH, requires_grad=True)
    shared = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    block = nn.Sequential(OrderedDict(mlp=nn.Sequential(OrderedDict(shared=shared, experts=Expert()))))
    segment = segment_options(block, x, host=Host(call=1e12))
    assert segment.candidates.inner == {"mlp": ["mlp.shared", "mlp.experts"]}
    options = {option.regions: option for option in segment.evaluated()}
    one, other, keeps = Choice(("mlp.shared",)), Choice(("mlp.experts",)), Choice(("mlp.experts",), ("@product",))
    both, one, other, keeps = (options[regions] for regions in ((one, other), (one,), (other,), (keeps,)))
    assert max(one.seconds, other.seconds) < both.seconds < 1e12 <= keeps.seconds
    assert both.saved_bytes < min(one.saved_bytes, other.saved_bytes)


def test_choices_grow_in_number_with_the_parts_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of many parts some combinations are evaluated, twice as many for twice the parts, and plans hold."""

    class Parts(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(number))
            for i in range(number):
                self.add_module(f"part_{i}", nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, norm in enumerate(self.norms):
                x = x + self.get_submodule(f"part_{i}")(norm(x))
            return x

    evaluated = list[int]()
    plain = planner_options.evaluate
    monkeypatch.setattr(planner_options, "evaluate", lambda *a: evaluated.append(1) or plain(*a))
    counts = list[int]()
    for number in (2, 4, 8):
        evaluated.clear()
        segment_options(Parts(number), torch.randn(4, 16, requires_grad=True)).evaluated()
        counts.append(len(evaluated))
    assert 50 < counts[0] < counts[1] < counts[2] < 3 * counts[1]


def test_products_of_one_module_are_kept_apart_where_one_narrows() -> None:
    """What `@down` keeps in a module is read from its record, and a step with it keeps its promise."""
    torch.manual_seed(0)
    model, args = Experts(), (torch.randn(64, WIDTH),)
    x = torch.randn(64, WIDTH, requires_grad=True)
    segment = segment_options(model.layers[0], x)
    assert segment.candidates.calls == [("@product",), ("@down",)]
    assert segment.candidates.within == [{1}, set()]
    options = {option.regions: option for option in segment.evaluated()}
    assert set(options) == {(), *((Choice(("",), keep),) for keep in ((), ("@down",), ("@product",)))}
    none, down, every = (options[Choice(("",), keep),] for keep in ((), ("@down",), ("@product",)))
    rows = 64 * WIDTH * 4
    assert (down.saved_bytes - none.saved_bytes, every.saved_bytes - none.saved_bytes) == (2 * rows, 10 * rows)
    both = 2 * 2 * 2 * 64 * WIDTH * 4 * WIDTH
    assert (none.flops, down.flops, every.flops) == (both, both // 2, 0)

    plan = Plan(tuple(Choice((f"layers.{i}",), ("@down",)) for i in range(3)))
    plain = torch.autograd.grad(model(*args), [*model.parameters()])
    simulated = simulate(model, args, plan=plan, hold_output=False)
    handle = apply(model, plan)
    with measure(model).track(*args) as memory:
        model(*args).backward()
    handle.remove()
    assert memory.peak_bytes == simulated.peak_bytes
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), plain, strict=True))
    assert simulated.flops["replay"] == 3 * both / 2


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_model_that_fills_a_cache(training: bool) -> None:
    """A Hugging Face model with the cache that its configuration asks for is planned, and keeps the promise."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train(training)
    ids = torch.randint(0, 50, (2, 16))
    call = {"input_ids": ids, "labels": ids}
    plan = make_plan(model, kwargs=call, budget=0.3, device="h100", hold_output=False)
    assert plan.choices

    plain = gradients(model, loss=mean_loss, **call, use_cache=not training)  # in training a plan fills none
    apply(model, plan)
    model.zero_grad()
    with measure(model).track(ids) as m:
        torch.manual_seed(1)
        model(**call).loss.backward()
    assert m.peak_bytes <= plan.prediction.budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, loss=mean_loss, **call), strict=True))


def test_groups_of_layers_need_less_than_any_single_ones() -> None:
    """Where inputs of layers do not fit, several are recomputed together, nested, and the promise is kept."""
    model, _ = deep_is_made()
    x = torch.randn(512, 16)
    loop = Loop(hold_output=False)
    planner = Planner(TrainingStep(model, (x,), loss=lambda y: y.square().mean(), device="h100", loop=loop))
    single = {
        name: replace(kind, options=tuple(option for option in kind.options if option.span == 1))
        for name, kind in planner.costs.kinds.items()
    }
    least = planner.least[1].peak_bytes
    assert least < 0.9 * smallest(replace(planner.costs, kinds=single)).peak_bytes
    plans = [planner.plan(least), planner.plan(0.05)]
    for plan in plans:
        promise_is_kept(deep_is_made, plan, DEEP)
        assert Plan.from_json(plan.to_json()) == plan
    assert any(choice.nested and len(choice.paths) > 1 for choice in plans[0])
    assert "recomputed together, then each again" in str(plans[0])


def test_a_share_that_nothing_fits_begins_at_the_least_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs may say a floor that no plan reaches: then a share begins at the least peak that was simulated."""
    planner = Planner(TrainingStep(*made("gpt"), device="h100", loss=mean_loss))
    monkeypatch.setattr(planner, "floor", planner.least[1].peak_bytes // 2)
    plan, least = planner.plan(0.01), planner.least[1].peak_bytes
    assert plan.prediction is not None
    assert plan.prediction.budget_bytes == least + int(0.01 * (planner.plain.peak_bytes - least))
    assert plan.predicted_peak_bytes == least


@pytest.mark.parametrize("kind", ["deep", pytest.param("gpt", marks=pytest.mark.nightly)])
def test_records_of_three_and_four_tell_of_larger_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What eight layers in one region take follows from records of three and of four, whatever is largest in them."""
    if kind == "gpt":  # gradients of weights
        model, batch = Gpt(layers=8), torch.zeros(2, 16, dtype=torch.long)
    else:  # inputs of layers
        model, batch = deep_is_made()[0], DEEP
    planner = Planner(TrainingStep(model, (batch,), device="h100", loss=mean_loss if kind == "deep" else None))
    segment = SegmentOptions(planner._captured, 0, planner.price, planner.price.host, frees=False)
    monkeypatch.setattr(planner_options, "spans", lambda *_: (0, [2, 3, 4, 8]))
    grown = {(o.regions, o.span): o for o in segment.grouped() if o.nested}
    monkeypatch.setattr(planner_options, "spans", lambda *_: (0, [8, 8]))
    recorded = {(o.regions, o.span): o for o in segment.grouped() if o.nested}
    assert recorded
    for key, option in recorded.items():
        assert replace(grown[key], seconds=0, work=NO_WORK) == replace(option, seconds=0, work=NO_WORK)
        assert grown[key].seconds == pytest.approx(option.seconds)


def test_layers_that_do_not_hand_on_are_not_grouped() -> None:
    """Where something lies between layers, a group would not free the inputs inside it, so none is offered."""
    model = InTurn((Residual(16, dropout=0.1) for _ in range(6)), residual=True)
    planner = Planner(TrainingStep(model, (torch.randn(64, 16),), device="h100", loss=mean_loss))
    assert {option.span for kind in planner.costs.kinds.values() for option in kind.options} == {1}


def test_a_part_is_recomputed_with_its_norm(gpt: Planner) -> None:
    """The output of a norm is rebuilt with the part that it feeds: it is no input that the region has to keep."""
    options = {option.regions: option for option in gpt.costs.kinds["0"].options}
    together = [regions for regions in options if any(choice.paths == ("norm1", "attn") for choice in regions)]
    assert together
    paths = {choice.paths for share in (0.1, 0.75) for choice in gpt.plan(share)}
    assert any(len(path) == 2 and path[0].endswith("norm1") and path[1].endswith("attn") for path in paths)


def test_the_turn_is_what_lives_before_backward(gpt: Planner) -> None:
    """An optimizer, whose step is simulated after backward, does not change what is said of the turn but its state."""
    model, args = made("gpt")
    with_adam = Planner(TrainingStep(model, args, optimizer=torch.optim.AdamW, device="h100", loss=mean_loss)).costs
    elements = sum(p.numel() for p in model.parameters())
    steps = len(list(model.parameters()))
    assert with_adam.turn_bytes - gpt.costs.turn_bytes == 4 * (2 * elements + steps)


def test_the_table_says_what_and_why(gpt: Planner) -> None:
    """A printed plan begins with a sentence, says what is counted and what not, and has a row per sort of treatment."""
    plan = gpt.plan(0.4)
    sentence, budget, counted, uncounted, step, titles, *rows = str(plan).split("\n")
    assert plan.prediction is not None
    assert sentence == plan.summary
    peaks = brief(plan.prediction.peak_bytes, plan.prediction.plain_peak_bytes)
    said = r"at the peak, \d+\.\d % slower, 3 of 3 layers partially recomputed \(attention kept\)"
    assert re.fullmatch(f"{re.escape(peaks)} {said}", sentence)
    assert budget == f"budget {plan.prediction.budget}"
    assert counted == f"counted: {plan.prediction.loop}"
    assert uncounted.startswith("not counted: memory that the allocator holds")
    assert " % of optimal" in step
    assert titles.split("  ")[-1] == "layers"
    assert all("blocks." in row for row in rows)
    assert sum(line.count * line.layers for line in plan.prediction.lines) == 3
    assert gpt.plan(10**9).summary.endswith("at the peak, and nothing is recomputed")


@pytest.mark.parametrize("written", [0.4, "0.4", "40%"])
def test_a_share_is_said_as_it_is_written(gpt: Planner, written: float | str) -> None:
    """The same share in other words makes the same plan, which repeats the words and says the bytes."""
    plan, least, most = gpt.plan(written), gpt.floor, gpt.plain.peak_bytes
    assert plan == replace(gpt.plan(0.4), source=plan.source, prediction=plan.prediction)
    assert plan.prediction is not None
    share, allowed = brief(most - least), brief(plan.prediction.budget_bytes)
    assert plan.prediction.budget == f"{written} of {share} of activations: {allowed}"
    assert plan.source == f"a budget of {plan.prediction.budget}"


@pytest.mark.parametrize("budget", [0.05, 0.4, 0.9])
def test_every_word_is_explained(gpt: Planner, budget: float) -> None:
    """What is said of a plan's words has each column, each kind of call and each word of its sentence."""
    plan = gpt.plan(budget)
    words = [line.split("  ")[0] for line in plan.explain().split("\n")]
    _, _, *lines = str(plan).split("\n")
    titles = [title.strip() for title in lines[3].split("  ") if title.strip()]
    for said in [*titles, *re.findall(r"@\w+", str(plan)), "at the peak", "slower", "budget", "counted", "not counted"]:
        assert any(word and word in said for word in words), said


def test_a_share_of_nothing_is_said_in_words() -> None:
    """Where no region frees anything, the plan says so, and not a share of 0 bytes."""
    plan = make_plan(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8), budget=0.4, loss=torch.sum, device="h100"
    )
    assert "0 bytes of activations" not in str(plan)
    assert "budget 0.4, but no plan lowers the peak: its layers keep little beside their inputs then" in str(plan)
