"""The predicted peak: the tensors it counts, of which loss and which training loop, and where a plan states them."""

from __future__ import annotations

import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocated import levels_in
from torch import nn
from torch.profiler import ProfilerActivity, profile

from support.models import Made
from support.zoo import build, scalar_loss
from torch_recompute import ArgumentError, Choice, Plan, Profile, apply, make_plan, measure, simulate, solve
from torch_recompute import profile as profile_of
from torch_recompute.integrations import huggingface, lightning
from torch_recompute.integrations.policies import check_loop
from torch_recompute.memory.loop import Loop
from torch_recompute.simulation.training_step import any_loss

SEEN = 64  # bytes: numbers that an optimizer makes where no mode watches
VOCABULARY = 4096


def head_over(vocabulary: int = VOCABULARY, width: int = 16) -> nn.Module:
    """Two layers and a head as wide as a vocabulary; returns logits, as the readme's users write them."""
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
    head = nn.Linear(width, vocabulary, bias=False)
    return Made(lambda m, x: m.head(m.layers(x)), layers=nn.Sequential(*layers), head=head)


LABELS = torch.zeros(32, dtype=torch.long)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, LABELS)


def logits() -> tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]:
    return head_over(), {"x": torch.ones(32, 16)}, entropy


def of_the_zoo(name: str) -> Callable[[], tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]]:
    def made() -> tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]:
        if name == "llama":
            pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
        return *build(name), scalar_loss

    return made


MODELS = {"logits": logits, "llama": of_the_zoo("llama"), "convnext": of_the_zoo("convnext")}
LOOPS: dict[str, dict[str, Any]] = {
    "held": {},
    "released": {"hold_output": False},
    "accumulated": {"accumulate": 3},
    "zeroed": {"set_to_none": False},
}


def allocated(make: Callable[[], Any], plan: Plan | None, loop: Loop) -> int:
    """The peak of the second step and the third, by the CPU allocator's own events from before the model is built."""
    import time

    second = 0
    gc.collect()  # what is freed inside counts, too
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, batch, loss_of = make()
        model.zero_grad()
        if plan is not None:
            apply(model, plan)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            second = time.time_ns() if number == 1 else second
            for _ in range(loop.accumulate):
                if loop.hold_output:
                    out = model(**batch)
                    loss = loss_of(out)
                    loss.backward()
                else:
                    loss_of(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=loop.set_to_none)
    return max(level for when, level in levels_in(profiler) if when > second)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        *(("logits", loop) for loop in LOOPS),
        ("convnext", "held"),
        pytest.param("llama", "held", marks=pytest.mark.nightly),
    ],
)
def test_no_loop_exceeds_its_promise(name: str, loop: str) -> None:
    """In the loop that it was made for, a planned step allocates what was promised, to some bytes."""
    (model, batch, loss), words = MODELS[name](), LOOPS[loop]
    settings: dict[str, Any] = {"loss": loss, "optimizer": torch.optim.AdamW, "device": "h100", **words}
    plan = make_plan(model, (), batch, budget=0.5, **settings)
    assert plan.predicted_peak_bytes is not None
    real = allocated(MODELS[name], plan, Loop(**words))
    outside = LABELS.nbytes if name == "logits" else 0  # made before the meter began
    assert plan.predicted_peak_bytes * 0.995 <= real + outside <= plan.predicted_peak_bytes + SEEN


class Mixed(nn.Module):
    """Wide layers under autocast, whose casts of weights are most of what a replay makes."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)]
        self.layers = nn.ModuleList(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = x + layer(x)
            return x.float().square().mean()


def test_casts_of_a_replay_are_gone_with_it() -> None:
    """In a loop that has left autocast before backward, a replay's casts of weights are there while it runs."""

    def make() -> tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]:
        return Mixed(), {"x": torch.ones(32, 64)}, lambda out: out

    (model, batch, loss), plan = make(), Plan(tuple(Choice((f"layers.{i}",)) for i in range(6)))
    said = simulate(model, kwargs=batch, loss=loss, plan=plan, optimizer=torch.optim.AdamW).peak_bytes
    assert said * 0.995 <= allocated(make, plan, Loop()) <= said + SEEN


def llama(**switches: Any) -> tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]:
    """A Llama of two layers, whose configuration and checkpointing are as a user has left them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=switches.get("use_cache", True), **sizes)
    model, ids = LlamaForCausalLM(config).train(), torch.zeros(4, 64, dtype=torch.long)
    if "checkpoint" in switches:
        model.activation_checkpointing_enable({"use_reentrant": switches["checkpoint"]})
    call = {name: switches[name] for name in ("use_cache",) if "said" in switches}
    return model, {"input_ids": ids, "labels": ids, **call}, scalar_loss


@functools.cache
def bare(budget: float | str) -> Plan:
    """The plan for a model whose user has left nothing on."""
    model, batch, _ = llama(use_cache=False)
    return make_plan(model, (), batch, budget=budget, optimizer="adamw", device="h100")


CHECKPOINTING = r" \(turning its own checkpointing off alone takes [0-9.]+ MiB more\)"
CACHE = r" \(use_cache=False alone saves [0-9.]+ KiB\)"
# What a user has left on, a budget, and what the plan says of it.
SWITCHES: dict[str, tuple[dict[str, Any], float | str, str]] = {
    "a cache": ({}, 0.5, CACHE),
    "a cache, and no region": ({}, "1GiB", CACHE),
    "a cache that the call asks for": ({"use_cache": True, "said": True}, 0.5, ""),
    "no cache": ({"use_cache": False}, 0.5, ""),
    "checkpointing": ({"checkpoint": False}, 0.5, CHECKPOINTING),
    "reentrant checkpointing, and no region": ({"checkpoint": True}, "1GiB", CHECKPOINTING),
}


@pytest.mark.parametrize(
    "left",
    [
        *("a cache", "checkpointing", "reentrant checkpointing, and no region"),
        pytest.param("no cache", marks=pytest.mark.nightly),
        pytest.param("a cache, and no region", marks=pytest.mark.nightly),
        pytest.param("a cache that the call asks for", marks=pytest.mark.nightly),
    ],
)
def test_a_plan_is_compared_with_the_users_own_step(left: str) -> None:
    """The peak that a plan is said to lower is what the step allocates without it; what switches alone do is told."""
    pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
    switches, budget, said = SWITCHES[left]
    model, batch, _ = llama(**switches)
    plan = make_plan(model, (), batch, budget=budget, optimizer="adamw", device="h100")
    promise, again = plan.prediction, Plan.from_json(plan.to_json())
    assert promise is not None
    assert again == plan
    assert again.profile is None
    own, planned = (allocated(partial(llama, **switches), one, Loop()) for one in (None, plan))
    assert (promise.plain_peak_bytes, promise.peak_bytes) == (own, planned)
    assert bool(plan.choices) == (budget == 0.5)
    if "said" not in switches:
        assert bare(budget).choices == plan.choices
    assert re.match(rf"[0-9.]+ (\w+ )?of [0-9.]+ \w+ at the peak{said}, ", plan.summary)
    assert ("what every plan switches" in plan.explain()) == bool(said)
    if promise.switched is not None:
        saved = promise.plain_peak_bytes - promise.switched.saved_bytes
        assert saved == simulate(model, (), batch, plan=Plan(), optimizer="adamw").peak_bytes
    assert plan.profile is not None
    assert plan.profile.solve(budget=budget).prediction.plain_peak_bytes == own  # type: ignore[union-attr]


def test_a_plan_is_made_where_the_own_step_cannot_be_simulated() -> None:
    """A checkpoint function that fails is not in a plan's step; the plan says that its own could not be simulated."""
    pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
    model, batch, _ = llama(checkpoint=False)
    model.model._gradient_checkpointing_func = None  # type: ignore[union-attr]
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer._gradient_checkpointing_func = None  # type: ignore[union-attr]
    plan = make_plan(model, (), batch, budget=0.5, device="h100")
    assert "(turning its own checkpointing off, without which the step could not be simulated)" in plan.summary


def test_the_batch_and_the_whole_output_count() -> None:
    """A held output adds its bytes to forward and backward both; the batch lies there all the time."""
    model, batch, _ = logits()
    held, released = (simulate(model, (), batch, loss=entropy, hold_output=hold) for hold in (True, False))
    nbytes = 32 * VOCABULARY * 4
    assert (held.loop.output_bytes, released.loop.output_bytes) == (nbytes + 4, 0)  # with the loss
    assert held.loop.batch_bytes == released.loop.batch_bytes == 32 * 16 * 4
    assert held.timeline[0].live_bytes - released.timeline[0].live_bytes == nbytes + 4
    assert held.peak_bytes - released.peak_bytes == nbytes
    assert held.by_category["other"] == 32 * 16 * 4 + LABELS.nbytes
    forward = max(moment.live_bytes for moment in held.timeline if moment.phase == "forward")
    assert forward == 2 * nbytes + 4 + max(
        moment.live_bytes - nbytes for moment in released.timeline if moment.phase == "forward"
    )


def test_gradients_are_alive_in_forward() -> None:
    """With accumulation, and with gradients that are zeroed, every moment of the forward has them."""
    model, batch, _ = logits()
    plain = simulate(model, (), batch, loss=entropy)
    gradients = sum(p.numel() * 4 for p in model.parameters())
    for words in ({"accumulate": 2}, {"set_to_none": False}):
        found = simulate(model, (), batch, loss=entropy, **words)
        assert found.timeline[0].live_bytes == plain.timeline[0].live_bytes + gradients
        assert found.peak_bytes > plain.peak_bytes


def returning(what: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Returns something made of a linear layer's result."""
    return Made(lambda m, x: what(m.body(x)), body=nn.Sequential(nn.Linear(4, 4)))


ASKED = {
    "logits": (lambda y: y, "loss=lambda out: F.cross_entropy(out.flatten(0, -2), labels.flatten())"),
    "a vector": (lambda y: y[0], "loss=lambda out: F.mse_loss(out, target)"),
    "a tuple": (lambda y: (y, y), "loss=lambda out: loss_fn(out[0], labels)"),
    "a dictionary": (lambda y: {"scores": y}, "loss=lambda out: loss_fn(out['scores'], labels)"),
    "two scalars": (lambda y: (y.sum(), y.mean()), "2 scalars that require grad"),
    "no grad": (lambda y: y.sum().detach(), "no scalar that requires grad"),
    "an output without labels": (
        lambda y: SimpleNamespace(loss=None, logits=y),
        "loss=lambda out: F.cross_entropy(out.logits.flatten(0, -2), labels.flatten()), or pass labels to the model",
    ),
    "a body": (lambda y: SimpleNamespace(last_hidden_state=y), "loss_fn(head(out.last_hidden_state), labels)"),
}


@pytest.mark.parametrize("what", ASKED)
def test_no_loss_is_invented(what: str) -> None:
    """Where the output does not tell, `loss=` is asked for by all that speak of a peak, with the line."""
    returns, says = ASKED[what]
    model, x = returning(returns), torch.ones(2, 4)
    for ask in (
        lambda: simulate(model, (x,)),
        lambda: make_plan(model, (x,), budget=0.5, device="h100"),
        lambda: profile_of(model, (x,), device="h100"),
    ):
        with pytest.raises(ArgumentError) as caught:
            ask()
        assert says in str(caught.value)


TOLD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "the output": (lambda y: y.sum(), "the output"),
    "one element": (lambda y: y.sum()[None], "the output"),
    "the first of a tuple": (lambda y: (y.sum(), y), "the one scalar in the output, tensor 0 of 2"),
    "the last of a tuple": (lambda y: (y, y.sum()), "the one scalar in the output, tensor 1 of 2"),
    "an attribute": (lambda y: SimpleNamespace(loss=y.sum(), logits=y), "the output's .loss"),
    "a key": (lambda y: {"loss": y.sum(), "aux": y.mean()}, 'output["loss"]'),
}


@pytest.mark.parametrize("what", TOLD)
def test_a_loss_that_is_there_is_taken_and_named(what: str) -> None:
    """A loss in the output, or its one scalar, needs no word, and the plan says which was counted."""
    returns, words = TOLD[what]
    plan = make_plan(returning(returns), (torch.ones(2, 4),), budget=0.5, device="h100")
    assert plan.prediction is not None
    assert plan.prediction.loop is not None
    assert plan.prediction.loop.loss == words
    assert f"loss: {words}; " in str(plan)


def test_the_loss_that_commands_take_is_named_in_words() -> None:
    """What a command line trains with is said as it is in a plan, not by the name of a function."""
    simulated = simulate(nn.Linear(4, 4), (torch.ones(2, 4),), loss=any_loss)
    assert simulated.loop.loss == "the output's .loss, or its mean"


def test_a_plan_says_what_it_counts() -> None:
    """The loop stands in the printed plan, its JSON and the profile's, and a plan solved from a profile has it, too."""
    model, batch, _ = logits()
    words: dict[str, Any] = {"loss": entropy, "device": "h100", "accumulate": 4, "hold_output": False}
    plan = make_plan(model, (), batch, budget=0.5, **words)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.loop == Loop(hold_output=False, accumulate=4)
    assert (
        "counted: the batch (2.00 KiB), no output in backward (hold_output=False); loss: loss=entropy; "
        "4 backwards per step, gradients alive in forward; no autocast" in str(again)
    )
    known = Profile.from_json(profile_of(model, (), batch, **words).to_json())
    solved = solve(known, budget=0.5)
    assert solved.prediction is not None
    assert plan.prediction is not None
    assert solved.prediction.loop == plan.prediction.loop
    assert Plan.from_json(Plan().to_json()).loop == Loop()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_casts_of_weights_count_in_each_accumulated_forward(accumulate: int) -> None:
    """Under autocast the casts of weights that a replay made are gone when the next forward begins, as in a loop."""
    model, batch, _ = logits()
    adam = torch.optim.AdamW(model.parameters())
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    plan = Plan(tuple(Choice((f"layers.{number}",)) for number in range(3)))
    with autocast():
        said = simulate(model, (), batch, loss=entropy, plan=plan, optimizer=adam, accumulate=accumulate)
    apply(model, plan)
    for _ in range(2):
        with measure(model, adam).track(batch["x"], LABELS) as memory:
            for _ in range(accumulate):
                with autocast():
                    out = model(**batch)
                    value = entropy(out)
                value.backward()
            adam.step()
            adam.zero_grad()
    assert memory.peak_bytes == said.peak_bytes


def test_seconds_are_those_of_all_that_is_accumulated() -> None:
    """A step of four backwards takes four times as long, and so do its replays; the optimizer's part is paid once."""
    model, batch, _ = logits()
    words: dict[str, Any] = {"loss": entropy, "optimizer": torch.optim.SGD, "device": "h100", "set_to_none": False}
    once, often = (make_plan(model, (), batch, budget=0.3, accumulate=times, **words) for times in (1, 4))
    one, four = once.prediction, often.prediction
    assert one is not None
    assert four is not None
    assert (once.choices, one.peak_bytes) == (often.choices, four.peak_bytes)
    added = one.step_seconds - one.plain_step_seconds
    assert four.step_seconds - four.plain_step_seconds == pytest.approx(4 * added) != 0
    assert 2 * one.plain_step_seconds < four.plain_step_seconds < 4 * one.plain_step_seconds
    assert four.replay_flops == 4 * one.replay_flops > 0


def test_the_note_on_logits_is_of_the_plans_own_peak() -> None:
    """The share of the loss is that of the peak with the plan, not of the step without regions."""
    model, batch, _ = logits()
    plan = make_plan(model, (), batch, budget=0.1, loss=entropy, device="h100")
    assert plan.prediction is not None
    assert plan.prediction.advice == simulate(model, (), batch, loss=entropy, plan=plan).advice
    assert plan.prediction.advice != simulate(model, (), batch, loss=entropy).advice
    assert str(plan).endswith(plan.prediction.advice)


@pytest.fixture
def planned() -> Iterator[Callable[[bool], tuple[nn.Module, torch.Tensor]]]:
    """Makes a model with a plan in it, made inside of autocast or outside."""

    def made(inside: bool) -> tuple[nn.Module, torch.Tensor]:
        model, x = head_over(vocabulary=16), torch.ones(32, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            plan = make_plan(model, (x,), budget=0.1, loss=entropy, device="h100")
        assert plan.prediction is not None
        assert plan.prediction.loop is not None
        assert plan.prediction.loop.autocast == ("bfloat16" if inside else "")
        assert plan.choices
        apply(model, plan)
        return model, x

    return made


@pytest.mark.parametrize("inside", [True, False])
def test_another_autocast_is_said_once(inside: bool, planned: Callable[[bool], tuple[nn.Module, torch.Tensor]]) -> None:
    """A plan made inside autocast and run outside, or the reverse, warns at its first training step."""
    model, x = planned(inside)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        with torch.no_grad():
            model(x)  # evaluation may run as it likes
        with pytest.warns(RuntimeWarning, match="The plan was made (inside|outside) torch.autocast.*and the model is"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)


@pytest.mark.parametrize("inside", [True, False])
def test_the_same_autocast_is_not_spoken_of(
    inside: bool, planned: Callable[[bool], tuple[nn.Module, torch.Tensor]]
) -> None:
    """A plan that is run under the autocast that it was made under says nothing."""
    model, x = planned(inside)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside), warnings.catch_warnings():
        warnings.simplefilter("error")
        entropy(model(x)).backward()


def test_trainers_say_their_loop() -> None:
    """Integrations give `make_plan` the words for their trainer's loop, and warn of a plan for one that holds less."""
    model, batch, _ = logits()
    words = huggingface.training_loop(SimpleNamespace(gradient_accumulation_steps=2))
    assert words == {"hold_output": False, "accumulate": 2, "set_to_none": True}
    gradients_in_forward = lightning.training_loop(SimpleNamespace(accumulate_grad_batches=1))
    assert gradients_in_forward == {"hold_output": False, "accumulate": 1, "set_to_none": False}
    made = {"budget": 0.5, "loss": entropy, "device": "h100"}
    right, wrong = (make_plan(model, (), batch, **made, **said) for said in (words, {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_loop(right, words)
        check_loop(Plan(), words)
    with pytest.warns(RuntimeWarning, match="accumulate=2"):
        check_loop(wrong, words)
