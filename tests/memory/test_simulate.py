"""`simulate`: the bytes of the real step, no change to the user's model, and warnings for what it cannot know."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.models import Made
from support.zoo import ZOO, build, each_row, mean_loss, scalar_loss
from support.zoo_rows import Row, Steps, tensors_in
from torch_recompute import (
    ArgumentError,
    Choice,
    Plan,
    RecomputeError,
    apply,
    errors,
    make_plan,
    measure,
    saved_activations,
    simulate,
)
from torch_recompute.memory import CATEGORIES
from torch_recompute.simulation import recipes
from torch_recompute.simulation.step import where_it_runs

# Which tokens go to which expert depends on the values of weights; a simulation sends them evenly.
ROUTED = {"megatron_moe"}


@each_row
def test_equals_the_measurement_of_the_real_step(row: Row) -> None:
    """Peak and categories are those of the real step to the byte: plain with its output held, and planned without.

    The batch counts as "other"; so does the output that the step before has left, which dies when the forward returns.
    """
    model, inputs = row.build()
    known = [*row.plans.values()]
    plan = known[-1 - [*ZOO].index(row.name) % len(known)]
    plain = simulate(model, (), inputs, loss=scalar_loss)
    planned = simulate(model, (), inputs, plan=plan, loss=scalar_loss, hold_output=False)
    apply(model, plan)
    for simulated, real in ((plain, row.measured), (planned, Steps(model, inputs, hold=False).measured())):
        if row.name in ROUTED:
            assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)
        else:
            assert (simulated.peak_bytes, simulated.by_category) == (real.peak_bytes, real.by_category), str(plan)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_the_step_is_one_from_the_middle_of_training(optimizer: Any) -> None:
    """The optimizer's state is there from the start, whichever way the optimizer is given."""
    model, inputs = build("handmade_gpt")
    real = Steps(model, inputs, optimizer=optimizer(model.parameters())).measured()
    made = simulate(model, (), inputs, loss=scalar_loss, optimizer=optimizer)
    given = simulate(model, (), inputs, loss=scalar_loss, optimizer=optimizer(model.parameters()))
    assert made.by_category == given.by_category == real.by_category
    assert made.timeline[0].live_bytes == real.timeline[0].live_bytes


@pytest.mark.parametrize("given", [False, True])
def test_an_optimizer_is_where_it_is_after_many_steps(given: bool) -> None:
    """RAdam, which takes less in its first five steps, takes what it takes afterwards, also if it has not stepped."""
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    optimizer = torch.optim.RAdam(model.parameters())
    simulated = simulate(model, x, loss=mean_loss, optimizer=optimizer if given else torch.optim.RAdam)
    for _ in range(7):
        with measure(model, optimizer).track(x) as real:
            mean_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (simulated.peak.phase, simulated.by_category["optimizer"]) == ("optimizer", real.by_category["optimizer"])


@pytest.mark.parametrize("trained", ["head", "matrices", "frozen"])
@pytest.mark.parametrize("made", [False, True])
def test_gradients_that_the_optimizer_does_not_hold_stay(trained: str, made: bool) -> None:
    """Those of trained parameters that `optimizer.zero_grad()` does not clear are alive in forward, and are said."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*layers, nn.Linear(64, 8)), torch.randn(256, 64)
    model[:4].requires_grad_(trained != "frozen")

    def adam(parameters: Any) -> torch.optim.Optimizer:
        some = list(parameters)
        return torch.optim.AdamW([p for p in some if p.ndim > 1] if trained == "matrices" else some[-2:])

    optimizer = adam(model.parameters())
    given = adam if made else optimizer
    plan = make_plan(model, x, loss=mean_loss, optimizer=given, budget=0.5, device="h100")
    apply(model, plan)
    out = loss = None
    for _ in range(2):
        with measure(model, optimizer).track(x, *tensors_in(out, loss)) as real:
            out = model(x)
            loss = mean_loss(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert plan.predicted_peak_bytes == real.peak_bytes
    loop: Any = plan.prediction and plan.prediction.loop
    assert loop.uncleared == {"head": 16, "matrices": 9, "frozen": 0}[trained]
    assert ("that optimizer.zero_grad() does not clear" in str(plan)) == (trained != "frozen")
    assert loop.uncleared_bytes == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}])
def test_an_optimizer_that_goes_over_lists_takes_what_it_does(options: dict[str, Any]) -> None:
    """Where its lists of temporaries are the peak, that is the real step's, whatever layouts are in them."""
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), {"input": torch.randn(1, 64)}
    model[2].weight = nn.Parameter(torch.randn(64, 64).t())
    make = partial(torch.optim.Adam, foreach=True, **options)
    real = Steps(model, inputs, optimizer=make(model.parameters())).measured()
    made = simulate(model, (), inputs, loss=scalar_loss, optimizer=make)
    assert made.peak.phase == "optimizer"
    assert (made.peak_bytes, made.by_category) == (real.peak_bytes, real.by_category)


def test_nothing_of_the_users_is_changed() -> None:
    """Parameters, gradients, arguments, random state and the plan in place are as before."""
    model, inputs = build("convnext")
    model.zero_grad()
    scalar_loss(model(**inputs)).backward()
    state, grads = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    simulate(model, (), inputs, loss=scalar_loss, optimizer=torch.optim.AdamW)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_on_meta_is_simulated_where_it_could_run() -> None:
    """A model that was never allocated has the figures of the real one, also with tied weights."""
    model, inputs = build("gpt2")
    real = simulate(model, (), inputs, loss=mean_loss)
    meta: Any = model.to("meta")
    meta.tie_weights()
    assert inputs["labels"] is inputs["input_ids"]
    on_meta = dict.fromkeys(inputs, inputs["labels"].to("meta"))
    without = simulate(meta, (), on_meta, device="cpu", loss=mean_loss)
    assert without.by_category == real.by_category
    assert without.assumed == ("input_ids has no values: taken to be ones",)


def stack(width: int, vocabulary: int) -> nn.Module:
    """Two layers and a head as wide as a vocabulary."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))
    return Made(lambda m, x: m.head(m.layers(x)), layers=layers, head=nn.Linear(width, vocabulary))


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1].numel(), dtype=torch.long))


def test_says_which_module_keeps_what() -> None:
    """What is kept for backward is given by module and sums to the total; the phases follow each other."""
    result = simulate(stack(8, 8), (torch.randn(4, 8),), loss=mean_loss)
    assert result.saved_by_module == {"layers.0.1": 128, "layers.1.1": 128, "": 4} | (
        {"head": 128} if "head" in result.saved_by_module else {}
    )
    assert sum(result.saved_by_module.values()) == result.saved_bytes
    phases = [moment.phase for moment in result.timeline]
    assert phases == sorted(phases, key=["forward", "loss", "backward"].index)
    assert result.peak in result.timeline
    assert result.peak.live_bytes == result.peak_bytes == sum(result.by_category.values())
    assert set(result.by_category) == set(CATEGORIES)


def test_says_what_activations_are_for() -> None:
    """Those of the peak are saved, of the loss or transient; a plan turns what is saved into what passes.

    Of the loss are what it makes and what is as wide as the logits: here these, their softmax and two gradients.
    """
    model, x = stack(8, 4096), torch.randn(64, 8)
    logits = 64 * 4096 * 4
    results = [
        simulate(model, (x,), plan=plan, loss=cross_entropy, hold_output=False)
        for plan in (None, Plan((Choice(("layers",)),)), Plan())
    ]
    for result in results:
        assert sum(result.activations_by_use.values()) == result.by_category["activations"]
        assert result.activations_by_use["loss"] == 3 * logits + 4 == result.logits_bytes + 4
        saved = result.activations_by_use["saved"]
        assert (f"{errors.size(saved)}    saved" in str(result)) == (saved > 0)
    plain, planned, again = (result.activations_by_use for result in results)
    assert plain == again
    assert planned["saved"] < plain["saved"] == 2 * 64 * 8 * 4
    assert planned["transient"] == plain["transient"] < logits
    inside = Made(lambda m, x: {"loss": cross_entropy(m.layers(x))}, layers=model)
    assert simulate(inside, (x,), hold_output=False).activations_by_use["loss"] == 3 * logits


def test_weights_and_states_have_names() -> None:
    """A block of a parameter, or of its optimizer's state, is of the parameter's path and has a shape."""
    model = stack(8, 16)
    result = simulate(model, (torch.randn(4, 8),), loss=mean_loss, optimizer="adamw")
    for category, each in (("parameters", 1), ("optimizer", 2)):
        named = [block.made.module for block in result.blocks if block.category == category and block.made.shape]
        assert all(named.count(path) == each for path, _ in model.named_parameters())


def test_flops_of_replays_are_predicted() -> None:
    """A region around the layers adds its products but the last, which backward does not need, to the replay."""
    model, x = stack(8, 8), torch.randn(4, 8)
    plain = simulate(model, (x,), loss=mean_loss)
    planned = simulate(model, (x,), plan=Plan((Choice(("layers",)),)), loss=mean_loss)
    product = 2 * 4 * 8 * 8
    assert (plain.flops["forward"], plain.flops["backward"], plain.flops["replay"]) == (3 * product, 5 * product, 0)
    assert planned.flops == plain.flops | {"replay": 2 * product}
    assert planned.saved_bytes < plain.saved_bytes


def test_a_wide_loss_is_pointed_out() -> None:
    """Logits that are much of the peak are named with their share and what helps, whatever the loss; not small ones."""
    assert simulate(stack(256, 8), (torch.randn(64, 256),), loss=cross_entropy).advice == ""
    for loss in (cross_entropy, lambda out: (out.logsumexp(-1) - out[:, 0]).mean(), mean_loss):
        wide = simulate(stack(8, 4096), (torch.randn(64, 8),), loss=loss)
        assert "logits-sized tensors of the loss (width 4,096)" in wide.advice
        assert "tiles=8" in wide.advice
        assert wide.advice in str(wide)
    regression = simulate(stack(256, 256), (torch.randn(64, 256),), loss=mean_loss)
    assert (regression.advice, regression.logits_bytes) == ("", 0)


def test_gradients_of_several_batches_meet() -> None:
    """With accumulation the second forward finds the gradients of the first, and so the peak is higher."""
    model, x = stack(64, 64), torch.randn(256, 64)
    once, twice, zeroed = (
        simulate(model, (x,), **words, loss=mean_loss) for words in ({}, {"accumulate": 2}, {"set_to_none": False})
    )
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert twice.flops["forward"] == 2 * once.flops["forward"]
    assert once.peak_bytes < twice.peak_bytes <= once.peak_bytes + parameters
    assert twice.timeline == zeroed.timeline


def test_sizes_are_rounded_as_asked() -> None:
    """With `rounding=512` every storage counts in whole blocks, as in the allocator of CUDA."""
    result = simulate(stack(8, 8), (torch.randn(4, 8),), rounding=512, loss=mean_loss)
    assert all(moment.live_bytes % 512 == 0 for moment in result.timeline)
    assert result.by_category["parameters"] == 6 * 512


class Attentive(nn.Module):
    """Layers that attend to what they were given in earlier calls, as Transformer-XL's do; at most `length` calls."""

    def __init__(self, length: int, where: str = "a list") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.length, self.where = length, where
        self.memory: Any = SimpleNamespace(of=[[] for _ in self.layers])
        if where == "a buffer":
            self.register_buffer("buffer", torch.zeros(0, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (layer, earlier) in enumerate(zip(self.layers, self.memory.of, strict=True)):
            seen = torch.cat([*earlier, x])
            if self.where == "a list":
                self.memory.of[i] = [*earlier, x.detach()][-self.length :]
            elif i == 0:
                seen = torch.cat([self.buffer, x])
                self.buffer = seen.detach()[-self.length * len(x) :].clone()
            x = x + layer(seen)[-len(x) :]
        return x.square().mean()


@pytest.mark.parametrize("budget", [None, 0.01])
@pytest.mark.parametrize(("length", "where"), [(1, "a list"), (3, "a list"), (2, "a buffer")])
def test_what_a_model_keeps_from_call_to_call_is_there(length: int, where: str, budget: float | None) -> None:
    """The step comes after others: it finds what the model has kept of them, of other batches, as a real one does."""
    model = Attentive(length, where)
    optimizer = torch.optim.AdamW(model.parameters())
    if budget is None:
        simulated = simulate(model, (torch.randn(64, 16),), loss=lambda out: out, optimizer=optimizer)
        peak, loop = simulated.peak_bytes, simulated.loop
    else:
        words: dict[str, Any] = {"optimizer": optimizer, "budget": budget, "device": "h100"}
        plan = make_plan(model, (torch.randn(64, 16),), loss=lambda out: out, **words)
        assert plan.prediction is not None
        apply(model, plan)
        peak, loop = plan.prediction.peak_bytes, plan.prediction.loop
    assert 0 < loop.state_bytes <= 3 * length * 64 * 16 * 4
    assert f"from call to call ({errors.size(loop.state_bytes)})" in str(loop)
    for _ in range(length + 2):
        x = torch.randn(64, 16)
        with measure(model, optimizer).track(x, *tensors_in(model.memory.of)) as m:
            out = model(x)
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert m.peak_bytes == peak


def test_a_model_that_keeps_nothing_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is replaced by one of its size, as a running mean is, is no state that a step has to come after."""
    runs: list[int] = []
    model = Made(lambda m, x: m.norm(m.up(x)), up=nn.Linear(16, 16), norm=nn.BatchNorm1d(16))
    note = runs.append  # a list that the hook reached would be as before afterwards
    model.up.register_forward_hook(lambda *_: note(1))
    assert simulate(model, (torch.randn(8, 16),), loss=mean_loss).loop.state_bytes == 0
    assert len(runs) == 1


@pytest.mark.parametrize("how", ["itself", "a dict", "a list in a dict", "a tuple", "a list in itself"])
def test_a_tensor_of_the_batch_counts_once(how: str) -> None:
    """However the loss reaches it: by its name, or in a container that the batch came from."""
    x, model = torch.randn(64, 8), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    held: Any = {"itself": x, "a dict": {"x": x}, "a list in a dict": {"x": [x]}, "a tuple": (x,)}.get(how, [x])
    if how == "a list in itself":
        held.append(held)

    def target() -> torch.Tensor:
        found = held
        while not isinstance(found, torch.Tensor):
            found = found["x"] if isinstance(found, dict) else found[0]
        return found

    simulated = simulate(model, (x,), loss=lambda out: (out - target()).square().mean())
    for _ in range(2):
        with measure(model).track(x) as m:
            out = model(x)
            loss = (out - target()).square().mean()
            loss.backward()
            model.zero_grad()
    assert simulated.peak_bytes == m.peak_bytes


CRITIC = nn.Linear(8, 1)  # which a forward reaches by its name


class Trainer:
    """A user's own, which leads to itself, to its model and to a critic, and counts what it does."""

    def __init__(self, model: nn.Module, critic: nn.Module) -> None:
        self.model, self.critics, self.calls, self.trainer = model, [critic], 0, self

    def compute_loss(self, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.critics[0](out).sigmoid().mean() + 0 * next(self.model.parameters()).sum()

    __call__ = compute_loss


def calls(trainer: Trainer, out: torch.Tensor) -> torch.Tensor:
    return trainer.compute_loss(out)


BESIDE: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "a closure": lambda _, critic: lambda out: critic(out).sigmoid().mean(),
    "a module": lambda _, critic: nn.Sequential(critic, Mean()),
    "a dict": lambda _, critic: partial(
        lambda held, out: held["critics"][0](out).sigmoid().mean(), {"critics": [critic]}
    ),
    "a method of an object": lambda model, critic: Trainer(model, critic).compute_loss,
    "an object that is called": Trainer,
    "a partial over an object": lambda model, critic: partial(calls, Trainer(model, critic)),
    "a name of the forward": lambda _, __: mean_loss,
}


@pytest.mark.parametrize("where", BESIDE)
@pytest.mark.parametrize("filled", [False, True])
def test_modules_besides_the_model_are_left_alone(where: str, filled: bool) -> None:
    """A loss may train a module of its own, as a discriminator: it is copied, it counts, and no gradient is written."""
    critic, x = (CRITIC if "name" in where else nn.Linear(8, 1)), torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    if "name" in where:
        model.append(Made(lambda m, x: CRITIC(x)))
    loss = BESIDE[where](model, critic)
    critic.zero_grad()
    if filled:
        critic(x).mean().backward()
    before = [parameter.grad for parameter in critic.parameters()]
    values = [None if grad is None else grad.clone() for grad in before]
    simulated = simulate(model, (x,), loss=loss)
    plan = make_plan(model, (x,), budget=0.5, loss=loss, optimizer="adamw", device="h100")
    assert plan.prediction is not None
    for parameter, grad, value in zip(critic.parameters(), before, values, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, value)
    if where == "a name of the forward" or filled:
        return
    for _ in range(2):
        with measure(model).track(x, *critic.parameters()) as m:
            out = model(x)
            loss(out).backward()
            model.zero_grad()
            critic.zero_grad()
    assert simulated.peak_bytes == m.peak_bytes


class Mean(nn.Module):
    """The mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().mean()


@pytest.mark.parametrize("reads", ["the forward", "the loss"])
def test_a_module_that_the_model_hides_in_a_list_counts(reads: str) -> None:
    """A teacher is kept from the optimizer so; its weights are in memory as those of the model are."""
    teacher = nn.Linear(8, 64).requires_grad_(False)
    model = Made(
        lambda m, x: (m.net(x), m.hidden[0]["teacher"](x)) if reads == "the forward" else m.net(x),
        net=nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)),
    )
    model.hidden = [{"teacher": teacher}]

    def loss(out: Any) -> torch.Tensor:
        return out[0].mean() - out[1].mean() if reads == "the forward" else model.hidden[0]["teacher"](out).mean()

    x = torch.randn(64, 8)
    simulated = simulate(model, (x,), loss=loss)
    for tracked in ((model, *teacher.parameters()), (model,)):
        for _ in range(2):
            with measure(*tracked[:1]).track(x, *tracked[1:]) as m:
                out = model(x)
                value = loss(out)
                value.backward()
                model.zero_grad()
        assert simulated.peak_bytes == m.peak_bytes


class Reaching(nn.Module):
    """Reaches its weight through a closure in an object, which a copy does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        inner = self.inner
        self.calls = SimpleNamespace(inner=lambda x: inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls.inner(x)


def test_a_copy_that_uses_the_original_is_refused() -> None:
    """Parameters that a closure reaches are an error, and their gradients are put back."""
    model = Reaching()
    with pytest.raises(RecomputeError, match="used parameters of the original"):
        simulate(model, (torch.randn(2, 4),), loss=mean_loss)
    assert model.inner.weight.grad is None


def test_a_second_plan_is_refused() -> None:
    """A plan that is in the model already is simulated with it; another one on top is an error."""
    model, x = stack(8, 8), torch.randn(4, 8)
    plan = Plan((Choice(("layers",)),))
    expected = simulate(model, (x,), plan=plan, loss=mean_loss)
    apply(model, plan)
    assert simulate(model, (x,), loss=mean_loss).by_category == expected.by_category
    with pytest.raises(ArgumentError, match="has a plan already"):
        simulate(model, (x,), plan=plan, loss=mean_loss)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that simulate for "cuda" do not all open a context on the first device."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    step: Any = SimpleNamespace(runs_on=torch.device("cuda"))
    assert where_it_runs(step) == (torch.device("cuda", 3), 512)


LOOKS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "simulate": lambda model, x: simulate(model, (x,), loss=mean_loss),
    "make_plan": lambda model, x: make_plan(model, (x,), loss=mean_loss, budget=0.5, device="h100"),
    "saved_activations": lambda model, x: saved_activations(model, (x,)),
    "measure": lambda model, x: measured_step(model, x),
}


def measured_step(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of a step; that a compiled model is called is said."""
    with pytest.warns(RuntimeWarning, match="runs uncompiled"), measure(model) as m:
        mean_loss(model(x)).backward()
    model.zero_grad()
    return m.peak_bytes


@pytest.mark.filterwarnings("ignore:Using `torch.compile\\(module\\)` when there are global hooks:UserWarning")
@pytest.mark.parametrize("look", LOOKS)
def test_a_compiled_model_is_compiled_after_it_was_looked_at(look: str) -> None:
    """The compiler does not see a step under a dispatch mode: what it sees there, it never compiles."""
    torch._dynamo.reset()
    frames: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(1)
        return graph.forward

    model, x = torch.compile(stack(8, 8), backend=backend), torch.randn(4, 8)
    LOOKS[look](model, x)
    assert not frames
    model(x)
    assert frames


def test_a_measurement_says_once_that_a_compiled_step_is_measured_uncompiled() -> None:
    """Its bytes are those of the model as it is, whether it is compiled as a whole or in place."""
    torch._dynamo.reset()
    model, x = stack(8, 8), torch.randn(4, 8)
    with measure(model) as m:
        mean_loss(model(x)).backward()
    model.zero_grad()
    peaks = {measured_step(torch.compile(model, backend="eager"), x)}
    model.compile(backend="eager")
    assert peaks | {measured_step(model, x)} == {m.peak_bytes}


def test_a_device_is_named_as_in_make_plan() -> None:
    """On a machine without it, a model on meta is simulated for a device by its data sheet as it is planned for it."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plan = make_plan(model, torch.ones(4, 8), budget="1GiB", loss=mean_loss, device="h100")
    assert simulate(model, torch.ones(4, 8), loss=mean_loss, device="h100").peak_bytes == plan.predicted_peak_bytes


class Remembering(nn.Module):
    """Replaces a tensor that it holds as a plain attribute, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.memory = torch.zeros(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory = self.layer(x + self.memory).detach()
        return self.layer(self.memory * x).square().mean()


def test_a_tensor_that_a_module_replaces_dies() -> None:
    """What the model held before the step is alive until its forward replaces it, and no longer."""
    x = torch.ones(64, 16)
    found = simulate(Remembering(), (x,), hold_output=False)
    model = Remembering()
    model(x).backward()
    model.zero_grad()
    with measure(model).track(x) as real:
        model(x).backward()
    assert (found.peak_bytes, found.live_bytes) == (real.peak_bytes, real.live_bytes)


class Skipping(nn.Module):
    """Runs those of its layers that it is told to."""

    def __init__(self, ran: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 8)])
        self.ran = ran

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.ran:
            layer = self.layers[int(name)]
            x = layer[0](x) if name == "0" else layer(x)  # a layer counts as run where a part of it is
        return x.square().mean()


@pytest.mark.parametrize(
    ("ran", "training", "said"),
    [
        ("01234", True, None),
        ("0123", True, None),  # the only one of its class: a head that is not used
        ("024", True, "of 4 Sequential in layers, 2 did not run in this forward (1, 3)"),
        ("024", False, None),
    ],
)
def test_layers_that_did_not_run_are_said(ran: str, training: bool, said: str | None) -> None:
    """Of like layers some of which are left out, the peak is of one draw, and that is said in training."""
    assumed = simulate(Skipping(ran).train(training), (torch.ones(2, 8),)).assumed
    assert [words.partition(", and")[0] for words in assumed] == ([said] if said else [])
    plan = make_plan(Skipping(ran).train(training), (torch.ones(2, 8),), budget=0.5, device="h100")
    assert (said in str(plan)) if said else ("did not run" not in str(plan))


def test_a_penalty_on_a_tensor_of_the_caller_is_explained() -> None:
    """A loss that differentiates by a tensor of the batch is simulated; by one that slots hold gets a sentence."""
    x = torch.ones(4, 8, requires_grad=True)

    def penalty(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return grad.square().sum()

    class Both(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input), input

    inside = simulate(Both(8, 8), (x,), loss=lambda out: penalty(*out), hold_output=False)
    assert simulate(nn.Linear(8, 8), (x,), loss=lambda out: penalty(out, x), hold_output=False).flops == inside.flops
    plain = SimpleNamespace(x=x)
    assert (
        simulate(nn.Linear(8, 8), (x,), loss=lambda out: penalty(out, plain.x), hold_output=False).flops == inside.flops
    )

    class Slotted:
        __slots__ = ("x",)

    held = Slotted()
    held.x = x
    for accumulate in (1, 2):
        with pytest.raises(ArgumentError, match="on a copy of the model and of the batch"):
            simulate(nn.Linear(8, 8), (x,), loss=lambda out: penalty(out, held.x), accumulate=accumulate)


def test_torch_is_asked_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second simulation of the same layers asks for no result again, not those that come in a named tuple either."""
    asked: list[str] = []

    def on_fakes(mode: Any, func: Any, *given: Any, **how: Any) -> Any:
        asked.append(str(func))
        return ask(mode, func, *given, **how)

    ask = recipes.on_fakes
    monkeypatch.setattr(recipes, "on_fakes", on_fakes)
    model = nn.Sequential(nn.Linear(11, 11), nn.LayerNorm(11), nn.Dropout(0.1), nn.Linear(11, 11))
    peaks = []
    for norms in (1, 0):
        peaks.append(simulate(model, torch.ones(3, 11), loss=torch.sum, optimizer="adamw").peak_bytes)
        assert asked.count("aten.native_layer_norm.default") == norms
        assert ([name for name in asked if "profiler" not in name] == []) == (norms == 0)
        asked.clear()
    assert peaks[0] == peaks[1]


def test_the_copy_is_gone_when_a_plan_was_in_it() -> None:
    """Nothing of it waits for the collector of cycles: a library's switch refers to its model while a plan is there."""

    class Library(nn.Sequential):
        def gradient_checkpointing_enable(self) -> None: ...

    model = Library(nn.Linear(4, 4), nn.BatchNorm1d(4))
    gc.collect()
    gc.disable()
    try:
        with measure() as memory:
            simulate(model, torch.ones(4, 4), loss=torch.sum, plan=Plan((Choice(("0",)),)))
        assert memory.live_bytes == 0
    finally:
        gc.enable()
