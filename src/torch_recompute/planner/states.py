"""Optimizers that the command line's options describe: types of states, a step in backward, states in host memory.

In Python these are a user's own optimizer; here are real ones that take the same memory, so both are simulated by being
run on tensors without data. None of them needs a package that a machine without a GPU lacks.

    AdamW(states="fp32-master")   a copy of each weight and two moments in 32 bits, as Apex's and Megatron's FusedAdam
    AdamW(states="bf16")          two moments in 16 bits
    AdamW(states="8bit")          two moments of 8 bits, in blocks of 256 with a scale in 32 bits: 2.03 bytes, as those
                                  of bitsandbytes and torchao
    InBackward                    each weight is updated as soon as its gradient is there, which is freed then
    SteppedOnHost                 gradients go to host memory as they come; weights come back from the step there, as in
                                  ZeRO-Offload and torchao's CPUOffloadOptimizer

An update is one operation that takes no memory, as a fused or a compiled kernel is. Moments of 8 bits are stored by
their root, so that small ones keep their digits: the 4th of the mean's, and the 8th of the square's, which is a square.
Rejected: bytes per parameter by a formula, which knows nothing of what is alive when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._torch.fakes import host_of
from ..memory.measurement import weights_of
from ..simulation.training_step import OPTIMIZERS, USUAL

Make = Callable[[Any], torch.optim.Optimizer]
STATES = ("fp32-master", "bf16", "8bit")
BLOCK, SMALLEST = 256, 4096  # elements that share a scale; weights with fewer keep moments of their own type
ROOTS = 4, 8  # of the mean, of the square
LEVELS = 127, 255
_CHUNK = 2**14  # elements that are updated at a time, a multiple of a block


class AdamW(torch.optim.Optimizer):
    """AdamW whose states have a type of their own, updated by one operation for each weight.

    Args:
        parameters: Those that it updates.
        states: One of `STATES`; "" for moments in the type of the weights.
        lr: The learning rate.
        betas: Of the moments.
        eps: Is added to the root of the square.
        weight_decay: Decoupled from the gradient.
    """

    def __init__(
        self,
        parameters: Any,
        states: str = "",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._states = states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            numbers = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state: dict[str, Any] = self.state[weight]
                    if not state:
                        state.update(step=0, held=new_states(weight, self._states))
                    state["step"] += 1
                    update(weight, weight.grad, state["held"], *numbers, state["step"])


def new_states(weight: torch.Tensor, states: str) -> list[torch.Tensor]:
    """The states of a weight that was never updated: two moments, after each its scales, and a copy in 32 bits."""
    if states == "8bit" and weight.numel() >= SMALLEST and weight.numel() % BLOCK == 0:
        return [
            made
            for _ in ROOTS
            for made in (
                torch.zeros_like(weight, dtype=torch.uint8),
                weight.new_zeros(weight.numel() // BLOCK, dtype=torch.float32),
            )
        ]
    types = {"bf16": torch.bfloat16, "fp32-master": torch.float32}
    moments = [torch.zeros_like(weight, dtype=types.get(states, weight.dtype)) for _ in ROOTS]
    copied = states == "fp32-master" and weight.dtype != torch.float32
    return [*moments, *([weight.detach().to(torch.float32)] if copied else [])]


@torch.library.custom_op("torch_recompute::adamw_", mutates_args=("weight", "states"), device_types="cpu")
def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    states: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step: int,
) -> None:
    """Updates a weight and its states by AdamW."""
    held = [states[-1] if len(states) == 3 else weight, grad, *states]
    flat = [one.reshape(-1) for one in held]
    moments = [flat[2:4], flat[4:6]] if states[0].dtype == torch.uint8 else [flat[2:3], flat[3:4]]
    for start in range(0, weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        own, slope = flat[0][part], flat[1][part].float()
        mean, square = (_read(one, start, which) for which, one in enumerate(moments))
        mean.lerp_(slope, 1 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(eps)
        own.copy_(own.float().mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step)))
        for which, (one, value) in enumerate(zip(moments, (mean, square), strict=True)):
            _write(one, start, which, value)
    for one, copied in zip(held, flat, strict=True):
        if one is not grad and one.data_ptr() != copied.data_ptr():  # which `reshape` had to lay out again
            one.copy_(copied.view_as(one))
    if held[0] is not weight:
        weight.copy_(held[0])


@update.register_fake
def _(weight: torch.Tensor, grad: torch.Tensor, states: list[torch.Tensor], *numbers: float) -> None:
    """An update makes nothing."""


def _read(moment: list[torch.Tensor], start: int, which: int) -> torch.Tensor:
    """A chunk of a moment in 32 bits."""
    codes, *scales = moment
    values = codes[start : start + _CHUNK].float()
    if not scales:
        return values
    blocks = values.sub_(LEVELS[0] + 1 if which == 0 else 0).div_(LEVELS[which]).view(-1, BLOCK)
    powers = blocks.abs().pow_(ROOTS[which]).mul_(scales[0][start // BLOCK :][: len(blocks), None])
    return powers.copysign_(blocks).view(-1)


def _write(moment: list[torch.Tensor], start: int, which: int, values: torch.Tensor) -> None:
    codes, *scales = moment
    if scales:
        blocks = values.view(-1, BLOCK)
        scale = blocks.abs().amax(1)
        scales[0][start // BLOCK :][: len(blocks)] = scale
        shares = blocks.abs().div_(scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None])
        levels = shares.pow_(1 / ROOTS[which]).mul_(LEVELS[which]).round_().copysign_(blocks)
        values = levels.add_(LEVELS[0] + 1 if which == 0 else 0).view(-1)
    codes[start : start + _CHUNK].copy_(values)


class InBackward(torch.optim.Optimizer):
    """Updates each parameter in backward, as soon as its gradient has been accumulated, and frees the gradient.

    Args:
        parameters: Those that it updates.
        make: Makes an optimizer of one of them.
    """

    def __init__(self, parameters: Any, make: Make) -> None:
        super().__init__(trained(parameters), {})
        self._own = {weight: make([weight]) for weight in weights_of(self)}
        for weight, optimizer in self._own.items():
            self.state[weight] = optimizer.state[weight]
            weight.register_post_accumulate_grad_hook(self._update)

    def _update(self, weight: torch.Tensor) -> None:
        self._own[weight].step()
        self._own[weight].zero_grad()

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing: the step is over when backward is."""


class SteppedOnHost(torch.optim.Optimizer):
    """Keeps gradients, states and a copy of each weight in host memory, and steps there.

    A gradient moves when it has been accumulated, and is added to what is there; weights move back after the step.

    Args:
        parameters: Those that it updates.
        make: Makes an optimizer of their copies.
    """

    def __init__(self, parameters: Any, make: Make) -> None:
        super().__init__(trained(parameters), {})
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        for weight in weights_of(self):
            self._copies[weight] = torch.empty_like(weight, device=host_of(weight), requires_grad=False)
            self._copies[weight].copy_(weight.detach())
            weight.register_post_accumulate_grad_hook(self._send)
        self._own = make([*self._copies.values()])
        for weight, copied in self._copies.items():
            self.state[weight] = {"copy": copied, "own": self._own.state[copied]}

    @torch.no_grad()
    def _send(self, weight: torch.Tensor) -> None:
        copied, grad = self._copies[weight], weight.grad
        assert grad is not None
        weight.grad = None
        sent = torch.empty_like(copied, dtype=grad.dtype).copy_(grad, non_blocking=True)
        copied.grad = sent if copied.grad is None else copied.grad.add_(sent)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the copies, and fetches the weights."""
        self._own.step()
        for weight, copied in self._copies.items():
            if copied.grad is not None:
                weight.copy_(copied, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients."""
        super().zero_grad(set_to_none)
        self._own.zero_grad()


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of some parameters those that are trained."""
    return [weight for weight in parameters if weight.requires_grad]


@dataclass(frozen=True)
class OptimizerSpec:
    """Makes the optimizer that options describe.

    Attributes:
        make: Makes it of parameters, without the options that follow; None for the `AdamW` here.
        states: Those of `AdamW`.
        in_backward: Whether it steps in backward.
        on_host: Whether its states are in host memory.
    """

    make: Make | None = None
    states: str = ""
    in_backward: bool = False
    on_host: bool = False

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Makes it of some parameters."""
        makes: list[Make] = [self._plain]
        makes += [lambda some: SteppedOnHost(some, makes[0])] if self.on_host else []
        own = makes[-1]
        return InBackward(parameters, own) if self.in_backward else own(parameters)

    def _plain(self, parameters: Any) -> torch.optim.Optimizer:
        own = self.make is None or (self.on_host and self.make is OPTIMIZERS[USUAL])  # whose kernel is not everywhere
        return AdamW(parameters, self.states) if own or self.make is None else self.make(parameters)

    def __str__(self) -> str:
        """The options in words, each after a comma."""
        said = [f"states {self.states}"] if self.states else []
        said += ["steps in backward"] if self.in_backward else []
        return "".join(f", {words}" for words in [*said, *(["on the host"] if self.on_host else [])])
