"""A plan's choices by the size of a call: the set for the smallest size that the call fits into.

The size of a call is the shape of the first tensor it is given. A set of choices was made for one shape, and holds for
every call that is no larger in any dimension: less of everything is saved. A call takes the first set that holds for
it; one that is larger than all takes the plan's own choices, and a warning says once that no promise holds for it.

`BySize` is on the model, outermost, and notes the set among the thread's overrides while the model runs. Each wrapper
of the plan asks whether the set is one of its own (`ForwardWrapper.when`). A replay finds the overrides of its forward,
whatever other calls of the model came in between. A part of the model that is called by itself goes by the plan's own
choices. (The number of elements is no size: attention scores of one row of 4096 are eight times those of 8 x 512.)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch
from ..state.tape import Overrides, thread
from .choice import Choice
from .plan import Plan, fits, shape_in_words
from .wrappers import ForwardWrapper

Shape = tuple[int, ...]


def parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of a model's arguments, in their order."""
    return tuple(inspect.signature(module.forward).parameters)


def in_order(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call, in the order of the model's arguments `names`; others come last."""
    rest = [value for name, value in kwargs.items() if name not in names]
    return [*args, *(kwargs[name] for name in names if name in kwargs), *rest]


def size_of(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape | None:
    """The shape of the first tensor of a call, in the order of the model's arguments `names`; None without one."""
    leaves = _torch.tree_leaves(in_order(names, args, kwargs))
    found = next((x for x in leaves if isinstance(x, torch.Tensor)), None)
    return None if found is None else tuple(found.shape)


class Sizes:
    """The sets of choices of a plan in a model: those of its sizes in order, then the plan's own.

    Attributes:
        shapes: The sizes.
        silent: Whether a call that is larger than all of them gives no warning: it was given, or nothing was promised.
    """

    def __init__(self, plan: Plan) -> None:
        self.silent = plan.prediction is None
        self.shapes = tuple(size.shape for size in plan.sizes)
        self._sets = [frozenset(one) for one in (*(size.choices for size in plan.sizes), plan.choices)]

    def of(self, choice: Choice) -> list[int]:
        """The numbers of the sets that a choice is in."""
        return [number for number, one in enumerate(self._sets) if choice in one]

    def when(self, choices: Iterable[Choice]) -> Callable[[], bool] | None:
        """Returns whether the present call goes by a set with one of these choices; None if every set has one."""
        numbers = frozenset(number for choice in choices for number in self.of(choice))
        return None if len(numbers) == len(self._sets) else partial(self.current_in, numbers)

    def current_in(self, numbers: frozenset[int]) -> bool:
        """Returns whether the present call of the model, on this thread, goes by one of these sets."""
        at = thread.overrides
        while at is not None and not (isinstance(at, _Set) and at.sizes is self):
            at = at.around
        return (len(self.shapes) if at is None else at.number) in numbers

    def number(self, shape: Shape | None) -> int:
        """The number of the set for a call."""
        fitting = (number for number, size in enumerate(self.shapes) if shape is not None and fits(shape, size))
        return next(fitting, len(self.shapes))


class _Set(NamedTuple):
    """The set of choices that a call of the model goes by. It leaves named calls to the overrides around."""

    sizes: Sizes
    number: int
    around: Overrides | None

    def saved_call(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """Passes it on."""
        return None if self.around is None else self.around.saved_call(name, fn)

    def region(self, name: str) -> None:
        """Passes it on."""
        if self.around is not None:
            self.around.region(name)


class BySize(ForwardWrapper):
    """The `forward` of a whole model, which notes the set of choices that the call goes by."""

    def __init__(self, module: nn.Module, path: str, sizes: Sizes) -> None:
        super().__init__(module, path)
        self._sizes = sizes
        self._names = parameters(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if self.out:
            return self.plain(*args, **kwargs)
        shape = size_of(self._names, args, kwargs)
        number = self._sizes.number(shape)
        if number == len(self._sizes.shapes) and not self._sizes.silent and torch.is_grad_enabled():
            self._warn(shape)
        around = thread.overrides
        thread.overrides = _Set(self._sizes, number, around)
        try:
            return self.plain(*args, **kwargs)
        finally:
            thread.overrides = around

    def _warn(self, shape: Shape | None) -> None:
        if torch.compiler.is_compiling():
            return
        self._sizes.silent = True
        given = "no tensor" if shape is None else f"a first tensor of {shape_in_words(shape)}"
        warnings.warn(
            f"{type(self.module).__name__} is called with {given}; the largest that its plan was made for is "
            f"{shape_in_words(self._sizes.shapes[-1])}. The choices for that are used, and the step may take more "
            "memory than was promised. Give make_plan an example of this size, too. (Said once.)",
            RuntimeWarning,
            stacklevel=3,
        )
