"""Optimizers as people write them: in backward, with states of 8 bits, with master weights; simulated as measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from support.headed import batch, cross_entropy, model
from support.models import LLAMA, Residual
from support.training import mean_square
from torch_recompute import ArgumentError, Ranks, apply, make_plan, measure, peaks, saved_activations, simulate
from torch_recompute.commands.adapters import BASES, Lora, NF4Linear, adapted
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.states import STATES, OptimizerSpec
from torch_recompute.simulation.devices import DEVICES
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep, states_of

BLOCK = 256
Registered = Callable[[nn.Module], list[torch.optim.Optimizer]]


class EightBits(torch.optim.Optimizer):
    """AdamW whose moments are blocks of uint8 with a scale each, as bitsandbytes and torchao store them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[weight]
            if not state:
                count = -(-weight.numel() // BLOCK)
                for name in ("mean", "square"):
                    codes = torch.zeros(count, BLOCK, dtype=torch.uint8, device=weight.device)
                    state[name] = codes, torch.zeros(count, 1, device=weight.device)
            for name in ("mean", "square"):
                codes, scales = state[name]
                moment = codes.float().mul_(scales)
                moment.view(-1)[: weight.numel()].lerp_(weight.grad.float().view(-1), 0.1)
                scales.copy_(moment.amax(1, keepdim=True))
                codes.copy_(moment)
                del moment
            weight.add_(weight.grad, alpha=-1e-3)


class MasterWeights(torch.optim.Optimizer):
    """AdamW over copies of the weights in 32 bits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.of: torch.optim.Optimizer | None = None
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["master"] = weight.float() if weight.dtype != torch.float32 else weight.clone()
                state["mean"] = torch.zeros_like(state["master"])
            state["mean"].lerp_(weight.grad.float(), 0.1)
            state["master"].add_(state["mean"], alpha=-1e-3)
            weight.copy_(state["master"])


def by_closure(net: nn.Module, make: Any = torch.optim.AdamW) -> list[torch.optim.Optimizer]:
    """As PyTorch's tutorial, torchtune and transformers' Trainer (GaLore) write it."""
    optimizers = {weight: make([weight]) for weight in net.parameters() if weight.requires_grad}

    def hook(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(hook)
    return [*optimizers.values()]


OPTIMIZERS: dict[torch.Tensor, torch.optim.Optimizer] = {}


def step_and_free(weight: torch.Tensor) -> None:
    OPTIMIZERS[weight].step()
    weight.grad = None


def by_name(net: nn.Module) -> list[torch.optim.Optimizer]:
    OPTIMIZERS.clear()
    for weight in net.parameters():
        OPTIMIZERS[weight] = torch.optim.AdamW([weight])
        weight.register_post_accumulate_grad_hook(lambda weight: step_and_free(weight))
    return [*OPTIMIZERS.values()]


class Trainer:
    def __init__(self, net: nn.Module) -> None:
        self.optimizers = {weight: torch.optim.SGD([weight], momentum=0.9) for weight in net.parameters()}
        for weight in self.optimizers:
            weight.register_post_accumulate_grad_hook(self.step)

    def step(self, weight: torch.Tensor) -> None:
        self.optimizers[weight].step()
        weight.grad = None


def by_method(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [*Trainer(net).optimizers.values()]


def by_partial(net: nn.Module) -> list[torch.optim.Optimizer]:
    def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    made = [torch.optim.Adam([weight]) for weight in net.parameters()]
    for weight, optimizer in zip(net.parameters(), made, strict=True):
        weight.register_post_accumulate_grad_hook(partial(step, optimizer))
    return made


IN_BACKWARD: dict[str, Registered] = {
    "a closure": by_closure,
    "names of a module": by_name,
    "a method": by_method,
    "partial": by_partial,
    "8 bits": partial(by_closure, make=EightBits),
    "master weights": partial(by_closure, make=MasterWeights),
}


def measured(
    net: nn.Module,
    x: torch.Tensor,
    optimizers: list[torch.optim.Optimizer],
    step: Any = None,
    loss: Any = cross_entropy,
) -> Any:
    """The second of two steps, measured."""
    for _ in range(2):
        with measure(net).track(x, *optimizers) as memory:
            out = net(x)
            value = loss(out)
            value.backward()
            if step is not None:
                step.step()
                step.zero_grad()
    del out, value
    return memory


@pytest.mark.parametrize("case", IN_BACKWARD)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_in_backward(case: str, recompute: str) -> None:
    """Where hooks step in backward, gradients are freed one by one, and the measured peak is the simulated one."""
    net, x = model(), batch()
    optimizers = IN_BACKWARD[case](net)
    (one,) = peaks(net, x, recompute=recompute, loss=cross_entropy, device="h100")
    assert all(not optimizer.state for optimizer in optimizers)
    assert one.simulation.loop.frees_gradients
    assert "gradients freed in backward, one by one" in str(one)
    handle = apply(net, one.plan)
    memory = measured(net, x, optimizers)
    handle.remove()
    assert memory.peak_bytes == one.peak_bytes
    assert memory.by_category == one.simulation.by_category
    assert memory.live_by_category["optimizer"] == one.made_of["states"] > 0


class Lion(torch.optim.Optimizer):
    """Keeps its settings and its states in attributes of its own, as optimizers outside of torch do."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self.beta = 0.9
        self.means: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves each parameter by the sign of its mean gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.means.setdefault(weight, torch.zeros_like(weight))
                    weight.sub_(mean.lerp_(weight.grad, 1 - self.beta).sign(), alpha=group["lr"])


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("instance", [False, True])
def test_states_in_attributes_of_the_optimizers_own(instance: bool, budget: float | None) -> None:
    """They are counted, and a copy of the optimizer has them, though `state_dict` knows nothing of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))
    x, optimizer = torch.randn(64, 16), Lion(model.parameters())
    given: Any = optimizer if instance else Lion
    if budget is None:
        promise = simulate(model, (x,), loss=mean_square, optimizer=given).peak_bytes
    else:
        plan = make_plan(model, (x,), loss=mean_square, optimizer=given, budget=budget)
        promise = plan.predicted_peak_bytes or 0
        apply(model, plan)
    assert not optimizer.means
    for _ in range(2):
        with measure(model, optimizer).track(x, *optimizer.means.values()) as m:
            out = model(x)
            mean_square(out).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert m.peak_bytes == promise


def test_a_scheduler_steps_the_copy() -> None:
    """Schedulers put a `step` over their optimizer on it: the copy's own runs, and states count; nothing is trained."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(64, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    mean_square(model(x)).backward()
    before = [weight.detach().clone() for weight in model.parameters()]
    named = simulate(model, (x,), loss=mean_square, optimizer="adamw", set_to_none=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert simulate(model, (x,), loss=mean_square, optimizer=optimizer, set_to_none=False) == named
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("make", [EightBits, MasterWeights])
def test_states_of_its_own(make: Any) -> None:
    """An optimizer with states of 8 bits, or with copies of weights in 32, is simulated as it is measured."""
    net, x = model().bfloat16(), batch().bfloat16()
    found = simulate(net, x, loss=cross_entropy, optimizer=make)
    optimizer = make(net.parameters())
    memory = measured(net, x, [optimizer], optimizer)
    assert memory.peak_bytes == found.peak_bytes
    assert memory.by_category == found.by_category


def test_a_plan_of_a_step_in_backward() -> None:
    """A plan for a step whose optimizer steps in backward keeps its promise; it counts no gradients but those alive."""
    net, x = nn.Sequential(*(Residual(16) for _ in range(6))), torch.randn(24, 16)
    asked: Any = {"loss": mean_square, "device": "h100"}
    before = make_plan(net, x, budget=0, optimizer="adamw-fused", **asked)
    optimizers = by_closure(net)
    least, plan = (make_plan(net, x, budget=budget, **asked) for budget in (0, 0.3))
    for one in (least, plan):
        handle = apply(net, one)
        assert measured(net, x, optimizers, loss=mean_square).peak_bytes == one.predicted_peak_bytes
        handle.remove()
    gradients = sum(weight.nbytes for weight in net.parameters())
    assert (least.predicted_peak_bytes or 0) < (before.predicted_peak_bytes or 0) - gradients // 2


def test_mistakes() -> None:
    """A step in backward cannot be one of several backwards, and hooks of whole weights are not those of ranks."""
    net = model()
    by_closure(net)
    with pytest.raises(ArgumentError, match="accumulate=2, but AdamW steps in backward"):
        simulate(net, batch(), loss=cross_entropy, accumulate=2)


@pytest.mark.parametrize("states", ["", *STATES])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_command_lines_optimizers(states: str, in_backward: bool) -> None:
    """They take the bytes per parameter that they say, measured and simulated, and learn as AdamW does."""
    net, x, make = (
        nn.Linear(256, 64, bias=False).bfloat16(),
        torch.randn(40, 256),
        OptimizerSpec(None, states, in_backward),
    )
    found = simulate(net, x.bfloat16(), loss=mean_square, optimizer=make)
    optimizer = make(net.parameters())
    memory = measured(net, x.bfloat16(), [optimizer], optimizer, mean_square)
    assert memory.peak_bytes == found.peak_bytes
    assert memory.by_category == found.by_category
    each = {"": 4, "fp32-master": 12, "bf16": 4, "8bit": 2 + 8 / BLOCK}[states]
    assert memory.live_by_category["optimizer"] == each * net.weight.numel()


def test_moments_of_8_bits_learn() -> None:
    """A model that is trained with moments of 8 bits comes as far as with AdamW's own."""
    losses: list[float] = []
    for make in (
        torch.optim.AdamW,
        OptimizerSpec(states="8bit"),
        OptimizerSpec(states="fp32-master", in_backward=True),
    ):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)), torch.randn(64, 64)
        optimizer, wanted = make(net.parameters()), torch.sin(x @ torch.randn(64, 64) / 4)
        losses.append(0.0)
        for _ in range(60):
            value = nn.functional.mse_loss(net(x), wanted)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1] = value.item()
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_the_host(in_backward: bool, accumulate: int) -> None:
    """States and gradients are in host memory, and what goes there and comes back is in the seconds."""
    with torch.device("meta"):
        net, x = model(), batch()
    weights = sum(weight.nbytes for weight in net.parameters())
    asked: dict[str, Any] = {"recompute": "none", "loss": cross_entropy, "device": "h100", "accumulate": accumulate}
    if in_backward and accumulate > 1:
        with pytest.raises(ArgumentError, match="steps in backward"):
            peaks(net, x, optimizer=OptimizerSpec(states="bf16", in_backward=True, on_host=True), **asked)
        return
    (plain,) = peaks(net, x, **asked)
    (one,) = peaks(net, x, optimizer=OptimizerSpec(states="bf16", in_backward=in_backward, on_host=True), **asked)
    assert (one.made_of["states"], plain.host_bytes) == (0, 0)
    assert one.peak_bytes <= plain.peak_bytes
    gradients = 0 if in_backward else weights  # those of all at once
    assert 0 <= one.host_bytes - (2 * weights + gradients) <= in_backward * weights
    back = weights / (DEVICES["h100"].host_link or 1)  # gradients go there beside backward
    if accumulate == 1:
        more = one.step_seconds - plain.step_seconds
        assert more == pytest.approx(0 if in_backward else back, abs=1e-9)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, partial(torch.optim.AdamW, fused=True), torch.optim.SGD])
def test_weights_on_the_host(make: Any) -> None:
    """Optimizers step where the weights are, also those that read values: no state or gradient stays on the device."""
    step = TrainingStep(model(), (batch(),), {}, cross_entropy, make, "h100", Loop(), Ranks(on_host=True))
    found = simulate_step(step)
    assert found.live_by_category["gradients"] == 0
    assert found.live_by_category["optimizer"] <= 4 * len([*model().parameters()])  # a number of steps for each
    weights = sum(parameter.nbytes for parameter in model().parameters())
    assert found.host_bytes >= 2 * weights


def test_it_really_steps_on_the_host() -> None:
    """Where host memory is the device's own, the step does the same as without."""
    found: list[torch.Tensor] = []
    for on_host in (False, True):
        torch.manual_seed(0)
        net, x = model(), batch()
        optimizer = OptimizerSpec(torch.optim.AdamW, on_host=on_host)(net.parameters())
        for _ in range(3):
            for _ in range(2):
                cross_entropy(net(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([weight.detach().flatten() for weight in net.parameters()]))
    assert torch.equal(*found)


def test_adapters() -> None:
    """A model of PEFT, also with linear layers of 4 bits, is simulated on meta as it is measured on the CPU."""
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    ids = torch.ones(2, 64, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    for base in BASES:
        made: list[nn.Module] = []
        for device in ("meta", "cpu"):
            config = transformers.AutoConfig.for_model(**LLAMA)
            with torch.device(device):
                net = transformers.LlamaForCausalLM(config).bfloat16()
            made.append(adapted(net, "it", Lora.of("4:q_proj,up_proj"), base).train())
        on_meta, real = made
        assert [(name, w.shape, w.dtype) for name, w in on_meta.named_parameters()] == [
            (name, w.shape, w.dtype) for name, w in real.named_parameters()
        ]
        found = simulate(on_meta, call, optimizer=torch.optim.AdamW, device="cpu", hold_output=False)
        optimizer = torch.optim.AdamW([w for w in real.parameters() if w.requires_grad])
        for _ in range(2):
            with measure(real, optimizer).track(ids) as memory:
                real(**call).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert memory.peak_bytes == found.peak_bytes
        assert memory.by_category == found.by_category


def test_a_weight_of_4_bits() -> None:
    """It takes 4.5 bits an element in any storage, its product is near that of the weight, and no whole one is kept."""
    linear, x = nn.Linear(128, 96), torch.randn(300, 128, requires_grad=True)
    exact = linear(x)
    for storage in (torch.uint8, torch.bfloat16):
        made = NF4Linear(linear, torch.float32, storage)
        assert made.weight.nbytes + made.scales.nbytes == linear.weight.numel() * 9 // 16
        assert (made(x) - exact).norm() < 0.12 * (exact - linear.bias).norm()
        (near,) = torch.autograd.grad(made(x).sum(), x)
        (wanted,) = torch.autograd.grad(linear(x).sum(), x)
        assert (near - wanted).norm() < 0.12 * wanted.norm()
        assert saved_activations(made, x).total_bytes < linear.weight.nbytes


def test_a_function_that_makes_the_optimizer_of_a_model_that_it_reaches() -> None:
    """It may leave out the parameters that it is given, as `lambda _: model.configure_optimizers()` does."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(4, 16)

    def configured(_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    found = simulate(model, x, loss=mean_square, optimizer=configured)
    assert found.peak_bytes == simulate(model, x, loss=mean_square, optimizer=torch.optim.AdamW).peak_bytes
    before, model[0].weight.grad = model[0].weight.clone(), torch.ones(64, 16)
    assert states_of(model.parameters(), configured)["states"] == 0
    assert torch.equal(model[0].weight, before)  # it is asked of a weight of its own, and steps no other
