"""Expert parallelism on one rank of a simulated step: a share of the experts, and the tokens that are sent to them.

The ranks of a group share the experts of each mixture. A rank's tokens go to the ranks of the experts that its router
chose, by an all-to-all, and their results come back by another. How many tokens a rank receives depends on the router:
with perfect balance as many as it sends, times `imbalance` on the rank whose experts are asked the most, which is the
one that is simulated.

The experts' module is the model's own, with a share of its weights. It is given what the rank receives, each row with
its expert and its weight, so it keeps for backward what it keeps of so many tokens. The rows that are sent are copies
of tokens in the order of their experts; the rows that come back are added up for each token. Weights are sent along and
are applied where the experts are, as in Megatron-Core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from .. import errors
from .._torch.ranks import functional
from ..plan.ranks import Ranks, size_of, those_that_fit
from ..plan.units import find_units

_collectives = functional()


def expert_paths(model: nn.Module) -> list[str]:
    """The paths of modules that hold experts, each as weights stacked by expert."""
    return [unit.path for unit in find_units(model).by_role("experts")]


def shared_experts(model: nn.Module, ranks: Ranks) -> list[str]:
    """Returns the paths of the experts that ranks share otherwise than layers.

    Raises:
        ArgumentError: There are none.
    """
    paths = expert_paths(model)
    if not paths:
        said = f"--ep is {ranks.ep}" if ranks.ep > 1 else f"--etp is {ranks.etp}"
        raise errors.ArgumentError(
            f"{said}, and {type(model).__name__} has no experts: it is no mixture. Leave {said[:5].strip()} out."
        )
    return paths


def share_experts(model: nn.Module, ranks: Ranks) -> None:
    """Makes a fake model's mixtures those of one rank of an expert-parallel group, in place.

    Args:
        model: The model, of which nothing has run.
        ranks: The ranks.

    Raises:
        ArgumentError: The model has no experts, or not as weights that are stacked by expert, or the ranks cannot share
            them evenly.
    """
    if not ranks.shares_experts:
        return
    paths = shared_experts(model, ranks)
    group = ranks.group("experts", ranks.ep)
    for path in paths:
        module = model.get_submodule(path)
        weights = dict(module.named_parameters(recurse=False))
        counts = {weight.shape[0] for weight in weights.values()}
        if len(counts) != 1 or [*module.parameters()] != [*weights.values()]:
            raise errors.ArgumentError(
                f"--ep: the experts of {path} are no weights stacked by expert, so a rank's share cannot be cut. Write "
                "the experts as transformers does, (experts, outputs, inputs), or leave --ep out."
            )
        (count,) = counts
        if count % ranks.ep:
            raise errors.ArgumentError(
                f"--ep is {ranks.ep}, and {path} has {count} experts, which {ranks.ep} ranks cannot share. Write --ep "
                f"{those_that_fit(range(1, count + 1), count)}."
            )
        for name, weight in weights.items():
            share: Any = nn.Parameter(weight.new_empty(count // ranks.ep, *weight.shape[1:]), weight.requires_grad)
            share.allreduce = False  # Megatron's word for a weight whose replicas are those of experts
            setattr(module, name, share)
        if hasattr(module, "num_experts"):
            module.__dict__["num_experts"] = count // ranks.ep
        if ranks.ep == 1:
            continue
        forward = partial(_dispatched, module.forward, group, ranks.imbalance, count // ranks.ep)
        module.__dict__["forward"] = forward


def _dispatched(
    forward: Callable[..., Any],
    group: str,
    imbalance: float,
    experts: int,
    /,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of experts, a share of which is here: (tokens, width), and of each token its experts and weights."""
    tokens, chosen = top_k_index.shape
    rows = torch.arange(tokens * chosen, device=hidden_states.device)
    received = math.ceil(tokens * chosen * imbalance)
    there = partial(_sent, group=group, rows=received)
    asked = torch.arange(received, device=hidden_states.device)[:, None] % experts
    out = forward(there(hidden_states[rows // chosen]), asked, there(top_k_weights.reshape(-1, 1)))
    back = _sent(out, group=group, rows=tokens * chosen)
    return back[rows].view(tokens, chosen, -1).sum(1)


def _sent(x: torch.Tensor, *, group: str, rows: int) -> torch.Tensor:
    """Returns the rows that a rank receives, so many, for those that it sends."""
    return cast("torch.Tensor", _AllToAll.apply(x, group, rows))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, rows: int) -> torch.Tensor:
        ctx.back = group, x.shape[0]
        return _exchanged(x, group, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchanged(grads[0].contiguous(), *ctx.back), None, None


def _exchanged(x: torch.Tensor, group: str, rows: int) -> torch.Tensor:
    size = size_of(group)
    return _collectives.all_to_all_single(x, _even(rows, size), _even(x.shape[0], size), group)


def _even(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]
