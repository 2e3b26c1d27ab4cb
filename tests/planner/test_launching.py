"""What the host of a device costs: one rule for guesses, options, plans and stated configurations."""

from dataclasses import replace
from functools import partial

import pytest

from support import zoo
from support.zoo import build, scalar_loss
from torch_recompute.memory.loop import Loop
from torch_recompute.planner import planner as planning
from torch_recompute.planner.candidates import all_guesses, record
from torch_recompute.planner.configurations import peaks_of
from torch_recompute.planner.known import forget
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.solve import choose, smallest
from torch_recompute.simulation.devices import ITSELF, SLOW, Host, Work
from torch_recompute.simulation.training_step import TrainingStep

# Operations that a replay runs beside those of the forward: a dropout after the last product, whose values nothing
# reads, is not drawn again; routers choose experts once more for what is made of the choice.
OTHERWISE = {"gpt2": 2, "mixtral": 7}


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have two layers, and a few choices are tried."""
    monkeypatch.setattr(zoo, "LAYERS", 2)
    monkeypatch.setattr(planning, "TRIED", 12)


def planner(name: str) -> Planner:
    """What a model of the zoo costs on a device by name with the slow host."""
    model, inputs = build(name)
    loop = Loop(hold_output=False)
    return Planner(TrainingStep(model, (), inputs, loss=scalar_loss, device="h100", loop=loop, host=SLOW))


def test_a_part_takes_the_longer_of_both_sides() -> None:
    """A device and its host work at the same time; a processor that launches for itself does both in turn."""
    host = Host(operation=1.0, replayed=2.0, region=10.0, call=100.0, watched=1000.0, apart=True)
    plain, more = Work(device=5.0, launched=4), Work(3.0, 0, 1, 2, 3, 4)
    assert host.launches(more) == 2 + 20 + 300 + 4000
    assert (host.seconds(plain), host.waited(plain)) == (5.0, 0.0)
    assert (host.seconds(plain.plus(more)), host.waited(plain.plus(more))) == (4326.0, 4318.0)
    assert host.added(plain, more) == 4321.0
    assert host.added(plain.times(3), more.times(3)) == 3 * 4321.0
    itself = replace(host, apart=False)
    assert (itself.seconds(plain), itself.added(plain, more), itself.waited(plain)) == (9.0, 4325.0, 0.0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_guess_costs_what_its_option_does_and_a_plan_what_its_step_does(name: str) -> None:
    """Guess, trial, solution and the simulated step count the same work, so one rule makes the same seconds of it."""
    found = planner(name)
    host, tried = found.price.host, 0
    for kind, options in ((kind, found.costs.kinds[kind].options[1:]) for kind in found.costs.kinds):
        number, plain = found._kinds.index(kind), found.costs.kinds[kind].work
        call, carries = found._captured.calls[number], partial(found._carries, found.paths[number])
        with found._captured.running():
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in call.inputs]
            seen = record(call.steps[0][0], partial(call.run, inputs), inputs)
        guessed = {one.regions: one for one in all_guesses(seen, found.price, host, plain, carries)}
        for option in options:
            assert option.seconds == pytest.approx(host.added(plain.times(option.span), option.work))
            if option.span == 1:
                guess, tried = guessed[option.regions], tried + 1
                assert guess.seconds == host.added(plain, guess.work)
                others = abs(guess.work.replayed - option.work.replayed)
                assert others <= OTHERWISE.get(name, 0)
                assert others or (guess.seconds, guess.work.calls) == (pytest.approx(option.seconds), option.work.calls)
    assert tried
    for share in (0.0, 0.5):
        plan = found.plan(share)
        promise = plan.prediction
        (stated,) = peaks_of(found.step, {"the plan": plan})
        assert promise is not None
        assert stated.step_seconds == pytest.approx(promise.step_seconds, rel=1e-3)
        assert stated.step_seconds - stated.replay_seconds == pytest.approx(promise.plain_step_seconds, rel=1e-9)
        assert promise.step_seconds > promise.plain_step_seconds


def test_choices_are_guessed_with_the_prices_that_they_are_paid_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that knew the device alone left out the choices that are cheap for its host."""

    def added(host: Host | None) -> float:
        """What a plan adds at a tenth of the activation memory, with guesses priced by another host."""
        guess = all_guesses if host is None else lambda found, price, _, *more: all_guesses(found, price, host, *more)
        monkeypatch.setattr(planning, "all_guesses", guess)
        forget()
        found = planner("megatron_moe")
        least = smallest(found.costs).peak_bytes
        return choose(found.costs, least + (found.plain.peak_bytes - least) // 10).seconds

    assert added(None) < 0.75 * added(ITSELF)
