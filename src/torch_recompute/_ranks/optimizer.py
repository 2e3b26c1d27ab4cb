"""Megatron's optimizer as far as memory goes: gradients that are always there, a state that is shared by the replicas.

Gradients lie in buffers from the first step to the last, because several microbatches add to them. The optimizer's
state is sharded over the replicas (ZeRO-1, `--use-distributed-optimizer`): a rank keeps and updates its share of each
weight, and the replicas exchange the rest. Of weights of 16 bits the state holds a copy in 32 bits, beside the two
moments in 32 bits: 12 bytes per parameter, divided by the replicas.

It is run only on fake tensors. The exchange between replicas is not part of it: it overlaps with the microbatches or
follows them, and does not depend on a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

MOMENTS = ("mean", "square")


class Sharded(torch.optim.Optimizer):
    """An optimizer that a simulated step ends with.

    Args:
        parameters: The rank's parameters.
        replicas: How many share the state.
        word: "adamw", "sgd", which has no state, or "none", which has gradients and no step.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], replicas: int, word: str) -> None:
        super().__init__(parameters, {})
        self._replicas = replicas
        self._word = word
        for parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Keeps the buffers."""
        super().zero_grad(set_to_none=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates this replica's share of each parameter."""
        if self._word == "none":
            return
        for parameter in self._parameters():
            grad = parameter.grad
            assert grad is not None
            share = -(-parameter.numel() // self._replicas)
            own, gradient = parameter.view(-1)[:share], grad.view(-1)[:share]
            if self._word == "sgd":
                own.add_(gradient, alpha=-1e-3)
                continue
            state: dict[str, torch.Tensor] = self.state[parameter]
            if not state:
                state["weight"] = own.float() if own.dtype != torch.float32 else own
                for name in MOMENTS:
                    state[name] = torch.zeros(share, dtype=torch.float32, device=own.device)
            for name in MOMENTS:
                state[name].mul_(0.9).add_(gradient)
            state["weight"].addcdiv_(state["mean"], state["square"])
            if state["weight"] is not own:
                own.copy_(state["weight"])


def sharded(word: str, replicas: int) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer of a rank."""
    return functools.partial(Sharded, replicas=replicas, word=word)
