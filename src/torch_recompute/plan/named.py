"""Calls that the author of a model named: `no_recompute(fn, name="scores")`, as places where a plan may put a region.

Problem. A part worth recomputing need not be a module: a line or two in a `forward`. From outside it has no path, and
only the author knows where it begins and ends.

Idea. The author marks it with a saved call that has a name. As written that is the plain call outside of a region, and
is not repeated inside of one. A plan that lists the name turns it round: the call is recomputed, as a region of its own
or with the region that it is made in. A choice says so with the path of the module that makes the call, an at sign and
the name: `layers.0.attn@scores`.

How the call learns of it: while that module runs, `thread.overrides` decides about named calls; a replay finds there
what decided in its forward. So nothing is written into the call or into the author's function, and other modules
and threads do not see it.

A region that the author named is a region without any plan, so there is nothing to decide about it.

Which names there are cannot be seen without running the model: `find` calls it once and looks who calls what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ..memory import saved_activations
from ..values import Overrides, thread


def module_of(path: str) -> str:
    """The module that a path of a choice names."""
    return path.partition("@")[0]


def name_in(path: str) -> str:
    """The name of the calls that a path of a choice means; empty where it means the module."""
    return path.partition("@")[2]


class Listed(NamedTuple):
    """One name that a plan lists, and who decided about the others before."""

    name: str
    place: Callable[[Callable[..., Any]], Callable[..., Any]]
    around: Overrides | None

    def saved_call(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """What is called in the place of a saved call."""
        if name == self.name:
            return self.place(fn)
        return None if self.around is None else self.around.saved_call(name, fn)

    def region(self, name: str) -> None:
        """A region stays as it is written."""


@dataclass
class Found:
    """The named calls that one forward made.

    Attributes:
        calls: For each name of a saved call, the modules that make such calls, in the order of the first.
        regions: The same for regions.
    """

    calls: dict[str, list[str]] = field(default_factory=dict)
    regions: dict[str, list[str]] = field(default_factory=dict)


class _Looking:
    """Writes down who calls what."""

    def __init__(self) -> None:
        self.around = thread.overrides
        self.found = Found()
        self.path = [""]

    def saved_call(self, name: str, fn: Callable[..., Any]) -> None:
        self._note(self.found.calls, name)

    def region(self, name: str) -> None:
        self._note(self.found.regions, name)

    def _note(self, places: dict[str, list[str]], name: str) -> None:
        if self.path[-1] not in places.setdefault(name, []):
            places[name].append(self.path[-1])


def find(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Found:
    """The named calls of a model, found by calling it once on an example.

    Args:
        model: The model; it is as before afterwards.
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
    """
    looking = _Looking()

    def entered(path: str) -> Callable[..., None]:
        return lambda *_: looking.path.append(path)

    def left(*_: Any) -> None:
        looking.path.pop()

    hooks = [module.register_forward_pre_hook(entered(path)) for path, module in model.named_modules()]
    hooks += [module.register_forward_hook(left, always_call=True) for module in model.modules()]
    thread.overrides = looking
    try:
        saved_activations(model, args, None if kwargs is None else dict(kwargs))
    finally:
        thread.overrides = looking.around
        for hook in hooks:
            hook.remove()
    return looking.found
