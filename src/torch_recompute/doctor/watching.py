"""`watch`: the doctor beside a training that is running anyway.

What is found is what real steps show: the allocator's books, the seconds of replays, buffers, gradients, graph nodes,
calls of modules, the compiler's counters. Bytes by region need a simulation; `examine` does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .. import errors
from ..plan.exhausted import planned_models
from .check import Evidence
from .checks import CHECKS
from .examining import looked_at
from .finding import Report
from .observing import CLOSELY, Observer

if TYPE_CHECKING:
    from typing_extensions import Self

_EXAMINE = "doctor.examine(model, batch) looks for it"


class Watching:
    """A model that is being watched; made by `watch`. Also a context manager, which removes it at the end."""

    def __init__(self, model: nn.Module, closely: int) -> None:
        self._model = model
        self._observer = Observer(model, closely)

    def report(self) -> Report:
        """What the steps so far have shown. The watching goes on."""
        seen = self._observer.seen
        if not seen.steps:
            raise errors.ArgumentError(
                f"doctor.watch has seen no step of {type(self._model).__name__} yet: it was not called with gradients "
                "since.\n"
                "  Ask for the report after a step: loss(model(batch)).backward(); watching.report(). Watch the model "
                "that the training calls, with its wrappers; a compiled one as torch.compile(model) returns it, for "
                "model.compile() calls no hook."
            )
        missing = {"simulated": _EXAMINE, "audit": _EXAMINE}
        plan = planned_models.get(self._model)
        return looked_at(CHECKS, Evidence(type(self._model).__name__, plan, seen=seen, missing=missing))

    def remove(self) -> None:
        """Takes every hook away; `report` goes on to work. Calling it again does nothing."""
        self._observer.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def watch(model: nn.Module, *, closely: int = CLOSELY) -> Watching:
    """Watches the steps of a model that is being trained.

        with doctor.watch(model) as watching:
            for batch in batches:
                train(batch)
        print(watching.report())

    The first steps are looked at closely: a hook on each module and parameter, and a copy of the buffers. After those
    one hook takes the time, and the allocator and the compiler count by themselves.

    Args:
        model: The model as the training calls it, with its wrappers.
        closely: How many steps to look at closely.

    Returns:
        A handle: `.report()` at any time, `.remove()` at the end.

    Raises:
        ArgumentError: `model` is no module, or `closely` no number of at least 1.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(
            "doctor.watch(model) needs a torch.nn.Module, whose steps it can see by hooks, but got "
            f"{errors.say(model)}\n"
            "  Pass the model that the training calls, with its wrappers."
        )
    if type(closely) is not int or closely < 1:
        raise errors.ArgumentError(
            f"closely={closely!r} is not a number of steps.\n"
            "  Write a whole number of at least 1, or leave it out: three steps are enough."
        )
    return Watching(model, closely)
