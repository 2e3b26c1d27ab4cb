"""`apply` for models of other libraries: the plan, and what keeps it right there.

A model that has a checkpointing switch of its own gets, besides the regions, a switch that keeps the plan
(`switch.py`), and regions that can be given a cache (`caches.py`). A model without one gets the plan and nothing else.
From the inside out a module's `forward` is then: its own, `Inside`, the region, `Gate`.
"""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from .. import errors, plan
from ..plan.apply import Region
from ..plan.report import Report
from .caches import Inside, Root
from .policies import Policy, plan_of
from .switch import Switch, roots


class Applied(plan.Applied):
    """A plan in a model of another library.

    Attributes:
        model: The model.
        plan: The plan.
    """

    def __init__(self, inner: plan.Applied, undo: ExitStack) -> None:
        super().__init__(inner.model, inner.plan, [])
        self._inner = inner
        self._undo = undo

    def remove(self) -> None:
        """Gives the model everything back that it had; calling it again does nothing."""
        self._undo.close()

    def report(self) -> Report:
        """What each region frees and what its replays cost, measured since `apply` or the last report."""
        return self._inner.report()

    def __repr__(self) -> str:
        return repr(self._inner)


def apply(model: nn.Module, policy: Policy) -> Applied:
    """Makes the regions of a plan in a model, so that they stay whatever the training loop turns on.

        handle = apply(model, "full")

    Args:
        model: The model, before a trainer, `torch.compile` or a wrapper for several devices takes it.
        policy: A `Plan`, a `RecomputeConfig`, its fields as a mapping, or a string as in
            `torch_recompute.integrations.policies`.

    Returns:
        A handle; its `remove()` undoes it all.

    Raises:
        ArgumentError: The policy cannot be met by this model, or the model is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(errors.not_applicable(model, policy))
    chosen = plan_of(policy, model)
    modules = dict(model.named_modules(remove_duplicate=False))
    wrapped = next((path for path, module in modules.items() if type(module).__name__ == "CheckpointWrapper"), None)
    if wrapped is not None:
        raise errors.ArgumentError(errors.other_checkpointing_inside(wrapped))
    tops = list(roots(model))
    paths = [path for choice in chosen for path in choice.paths]
    with ExitStack() as undo:
        for path in paths:
            if tops and path in modules and not any(modules[path] is top for top in tops):
                inside = Inside(modules[path], path)
                inside.put()
                undo.callback(inside.take_out)
        inner = plan.apply(model, chosen)
        undo.callback(inner.remove)
        if tops:
            found = [modules[path].__dict__["forward"] for path in paths]
            switch = Switch(model, [one for one in found if isinstance(one, Region)])
            undo.callback(switch.take_out)
        for top in tops:
            root = Root(top, "")
            root.put()
            undo.callback(root.take_out)
        return Applied(inner, undo.pop_all())
    raise AssertionError  # an ExitStack's `with` lets nothing pass; type checkers do not know
