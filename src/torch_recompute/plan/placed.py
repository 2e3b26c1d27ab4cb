"""What stands as `forward` on a module while a plan is in it, and how it comes and goes.

Everything that a plan does to a model goes through `Placed`: an object in the instance dictionary of a module, which
can be pickled and deep-copied with it and which knows the forward that was there before. Several may lie on one module,
one over the other; they are taken out in the opposite order.

`nn.DataParallel` makes a replica of a module by copying its dictionary, and gives the replica weights of its own. What
is placed knows its module, so each replica gets a copy that knows the replica: `DataParallel` asks each module for
`_replicate_for_data_parallel`, which is placed beside `forward`.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import _compat
from .plan import Plan

REPLICATE = "_replicate_for_data_parallel"


def described(module: nn.Module) -> str:
    """A module in words: its class, how many parameters, and their elements, over all ranks if it is sharded."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    name = type(module).__name__.removeprefix("FSDP")  # fully_shard makes a subclass of that name
    return f"{name} with {len(sizes)} parameters of {sum(sizes):,} elements"


def placed_on(module: nn.Module) -> list[Placed]:
    """What a plan has put on a module, outermost first."""
    found: list[Placed] = []
    forward = module.__dict__.get("forward")
    while isinstance(forward, Placed):
        found.append(forward)
        forward = forward._before  # pyright: ignore[reportPrivateUsage]
    return found


class Promised:
    """Compares the autocast that a plan was made under with that of the first training step, once.

    Args:
        plan: The plan; one that promises nothing is not compared.
    """

    def __init__(self, plan: Plan) -> None:
        loop = None if plan.prediction is None else plan.prediction.loop
        self._autocast = None if loop is None else loop.autocast

    def compare(self, module: nn.Module) -> None:
        """Warns if the autocast that a region's module finds is another one."""
        planned, self._autocast = self._autocast, None
        found = _compat.autocast_dtype(next((p.device.type for p in module.parameters()), "cpu"))
        if planned is not None and found != planned:
            made, trained = (
                f"inside torch.autocast ({x})" if x else "outside torch.autocast" for x in (planned, found)
            )
            warnings.warn(
                f"The plan was made {made}, and the model is trained {trained}: what layers keep, and so the peak and "
                "the seconds that the plan promises, are of another dtype. Make the plan where the model is trained: "
                "with torch.autocast(...): plan = make_plan(model, ...). (Said once.)",
                RuntimeWarning,
                stacklevel=3,
            )


class Placed:
    """What stands as `forward` on a module: the module's own forward, called in some way.

    Attributes:
        module: The module.
        path: Its path in the model that the plan was applied to.
        out: Whether it has been taken out again.
        when: Whether it is to act in the present call of the model; None for in every one.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self._before: Callable[..., Any] | None = None
        self.out = False
        self.when: Callable[[], bool] | None = None

    @property
    def idle(self) -> bool:
        """Whether it is the plain call now."""
        return self.out or (self.when is not None and not self.when())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._before or types.MethodType(type(self.module).forward, self.module))

    def put(self) -> None:
        """Takes the place of the module's forward."""
        here = self.module.__dict__
        self._before = here.get("forward")
        here["forward"] = self
        here.setdefault(REPLICATE, self.replica)

    def take_out(self) -> None:
        """Gives the module its forward back; one that somebody has put on top stays, and calls the plain one."""
        self.out = True
        here = self.module.__dict__
        if here.get(REPLICATE) == self.replica:
            del here[REPLICATE]
        if here.get("forward") is not self:
            return
        if self._before is None:
            del here["forward"]
        else:
            here["forward"] = self._before

    def replica(self) -> nn.Module:
        """A replica of the module for `nn.DataParallel`, recomputed as the module is."""
        made: nn.Module = getattr(type(self.module), REPLICATE)(self.module)
        here = made.__dict__
        if isinstance(here["forward"], Placed):
            top = here["forward"] = here["forward"]._on(made)
            here[REPLICATE] = top.replica
        return made

    def _on(self, module: nn.Module) -> Placed:
        """The same on a replica, and what lies below it."""
        made: Any = copy.copy(self)
        before = self._before
        made.module = module
        made._before = before._on(module) if isinstance(before, Placed) else before
        return made

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
