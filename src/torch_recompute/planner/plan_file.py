"""A plan in a file, and what it was made for: `auto(..., cache=)` reads it again as long as that is the same.

What decides on a plan is written beside it as simple facts that a person can compare: parameters and modules with their
plain attributes, the source of their classes and of the loss, shapes of the batch, optimizer, budget, loop, settings,
device and host. The next process compares them, and says which changed.

Code that a class or the loss calls elsewhere, and objects that they read, are no facts. Rejected: to follow code and
closures to all that they reach. That was a third walker of Python objects, it still missed what a call decides, and who
plans again in one process keeps a `Profile`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import errors
from .._torch.graphs import gradient_hooks
from .._torch.modes import settings, split_settings
from ..engine.taken import MANY
from ..memory.batch import tensors_of_call
from ..plan.plan import Plan
from ..simulation.training_step import TrainingStep
from ..stores.measured import full_name

if TYPE_CHECKING:
    from .hosts import PlanOptions

MADE_FOR = "made_for"
CHANGED = {
    "model": "the model's parameters or modules",
    "code": "the model's code",
    "batch": "the batch's shapes",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "budget": "the budget",
    "loop": "the training loop",
    "sizes": "sizes",
    "settings": "autocast, another setting of PyTorch, offload=, host_bandwidth= or tiles=",
    "device": "the device, or the version of torch",
    "host": "the host that launches operations, host=",
}
"""The facts that a plan in a file was made for, in words."""
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


def made_for(
    step: TrainingStep, budget: object, plan_options: PlanOptions, sizes: Sequence[int] | str = ()
) -> dict[str, Any]:
    """Returns the facts that a plan depends on, as text that JSON holds and that is the same in another process.

    Classes, and functions that are a loss or an optimizer, go by their source; what these call or enclose is not read.
    """
    model, optimizer, loss = step.model, step.optimizer, step.loss
    tensors = [*model.named_parameters(), *model.named_buffers()]
    layout = [(name, str(t.dtype), list(t.shape), t.requires_grad) for name, t in tensors]
    modules = [(path, _name(type(one)), one.training, *_attributes(one)) for path, one in model.named_modules()]
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    device = step.device or next((t.device for _, t in tensors), torch.device("cpu"))
    hooks = sum(len(gradient_hooks(weight)) for weight in model.parameters())
    make, given = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    given = optimizer.defaults if isinstance(optimizer, torch.optim.Optimizer) else given
    # Learning rates change, and nothing in memory with them.
    given = {name: bool(value) for name, value in given.items() if not isinstance(value, torch.Tensor)}
    return {
        "model": _hash(modules, layout, getattr(getattr(model, "config", None), "to_dict", dict)()),
        "code": _hash(sorted(map(_source, kinds))),
        "batch": _shapes(step.call),
        "loss": _hash(*_loss(loss)),
        "optimizer": [_name(make if inspect.isroutine(make) else type(make)), _source(make), str(given), hooks],
        "budget": str(budget),
        "loop": step.loop.words,
        "settings": _hash(split_settings(settings())[0], torch.get_default_dtype(), plan_options),
        "device": full_name(device) if isinstance(device, torch.device) else f"{device}, torch {torch.__version__}",
        "host": dataclasses.asdict(step.host),
        **({"sizes": sizes if isinstance(sizes, str) else [*sizes]} if sizes else {}),
    }


class PlanFile:
    """A file with a plan, and what it was made for.

    Args:
        path: The file; it need not be there.
        facts: What a plan is wanted for, see `made_for`.

    Attributes:
        plan: The plan in it, if it was made for the same.
        said: What was found, in words; "" where there is no file.

    Raises:
        ArgumentError: The file holds something else, or is in no folder.
    """

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise errors.ArgumentError(
                f"cache= takes the path of a file to keep the plan in, but got {errors.say(path)}\n"
                '  Write cache="plan.json".'
            )
        path = Path(path)
        self._path, self._facts = path, json.loads(json.dumps(facts))
        self.plan: Plan | None = None
        self.said = ""
        if not path.parent.is_dir():
            raise errors.ArgumentError(
                f"cache= is {str(path)!r}, and there is no folder {str(path.parent)!r}.\n"
                "  Write the path of a file in a folder that is there; the plan is written into it."
            )
        if not path.exists():
            return
        then: dict[str, Any] | None = None
        try:
            text = path.read_text(encoding="utf-8")
            then, plan = json.loads(text)[MADE_FOR], Plan.from_json(text)
        except (OSError, ValueError, KeyError, TypeError):
            raise errors.ArgumentError(
                f"cache= is {str(path)!r}, which holds something else than a plan of torch_recompute.auto and is not "
                "written over.\n  Name another file, or remove this one."
            ) from None
        changed = [words for name, words in CHANGED.items() if cast("Any", then).get(name) != self._facts.get(name)]
        if changed:
            self.said = f"planned again: {' and '.join(changed[:2])} changed"
        else:
            self.plan, self.said = plan, f"plan read from {path}"

    def write(self, plan: Plan) -> None:
        """Writes the plan, and what it was made for; the file is replaced as a whole."""
        data = {**json.loads(plan.to_json()), MADE_FOR: self._facts}
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)
        self.said = self.said or f"plan written to {self._path}"


def _hash(*things: Any) -> str:
    return hashlib.sha256(repr(things).encode()).hexdigest()[:16]


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _source(thing: Any) -> str:
    """A class or function by its source; a library's, and one without source, by its name."""
    if (getattr(thing, "__module__", None) or "").partition(".")[0] in ("torch", "builtins"):
        return _name(thing)
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return _name(thing)


def _loss(loss: Any) -> Iterator[str]:
    """A loss by its source and the plain values that it is given: attributes, or arguments of a partial."""
    if isinstance(loss, partial):
        yield from (*_loss(loss.func), *_plain([*loss.args, loss.keywords]))
    elif isinstance(loss, types.MethodType):
        yield from (_source(loss), *_loss(loss.__self__))
    elif inspect.isroutine(loss):
        yield _source(loss)
    else:
        yield from (_name(type(loss)), _source(type(loss)), *_attributes(loss))


def _attributes(thing: Any) -> Iterator[str]:
    """The plain attributes of an object by name, and the functions that a module has as hooks or attributes."""
    for name, value in sorted(getattr(thing, "__dict__", {}).items()):
        if name not in ("_modules", "_parameters", "_buffers"):
            yield from (f"{name}={text}" for text in _plain(value))


def _plain(value: Any, deep: int = 3) -> Iterator[str]:
    """The plain values in a value as text; a container's and a plain record's to a depth, a function by its source."""
    if type(value) in _PLAIN:
        yield repr(value)
    elif inspect.isroutine(value):
        yield _source(value)
    elif isinstance(value, (list, tuple, set, frozenset, Mapping)) and len(cast("list[Any]", value)) > MANY:
        yield str(len(cast("list[Any]", value)))
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [" ".join(_plain(part, deep - 1)) for part in cast("list[Any]", value)] if deep else []
        yield str(parts if isinstance(value, (list, tuple)) else sorted(parts))
    elif isinstance(value, Mapping):  # hooks have numbers for names, which are others in another process
        items = cast("Mapping[Any, Any]", value).items() if deep else ()
        yield str([(key if isinstance(key, str) else "", *_plain(part, deep - 1)) for key, part in items])
    elif isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value):
        yield str([_name(type(value)), *_plain(getattr(value, "__dict__", {}), deep)])


def _shapes(call: Any) -> Any:
    """The arguments of a call as JSON, with the dtypes and shapes of tensors."""
    if isinstance(call, torch.Tensor):
        return [str(call.dtype), list(call.shape)]
    if isinstance(call, (tuple, list)):
        return [_shapes(part) for part in cast("list[Any]", call)]
    if isinstance(call, Mapping):
        return {str(name): _shapes(part) for name, part in cast("Mapping[Any, Any]", call).items()}
    if type(call) in (int, float, bool, str, type(None)):
        return call
    return [_name(type(call)), *(_shapes(tensor) for tensor in tensors_of_call(call))]
