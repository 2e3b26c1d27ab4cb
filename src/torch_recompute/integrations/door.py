"""`apply` for policies in words: `apply(model, "full")`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .. import errors, plan
from ..plan import Applied
from ..stores import Store
from .policies import Policy, plan_of

__all__ = ["Applied", "apply"]


def apply(model: nn.Module, policy: Policy, *, stores: Mapping[str, Store] | None = None) -> Applied:
    """Makes the regions of a plan in a model.

        handle = apply(model, "full")

    Args:
        model: The model, before a trainer, `torch.compile` or a wrapper for several devices takes it.
        policy: A `Plan`, a `RecomputeConfig`, its fields as a mapping, or a string as in
            `torch_recompute.integrations.policies`.
        stores: The store for each word that a plan's choices name.

    Returns:
        A handle; its `remove()` undoes it all.

    Raises:
        ArgumentError: The policy cannot be met by this model, or the model is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(errors.not_applicable(model, policy))
    return plan.apply(model, plan_of(policy, model), stores=stores)
