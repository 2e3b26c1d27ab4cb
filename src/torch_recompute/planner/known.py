"""Results of earlier calls about a step, found again if model, batch, loss, optimizer and settings are the same.

Most of the time of a plan goes into simulations and trials, which know nothing of the budget. So what a planner finds
is kept, for the last `MOST` steps of this process, under a digest of all that decides on it: the model's structure and
attributes, classes and hooks with the code of their functions, the layouts of all tensors (and the values of those that
a simulation reads), the arguments of the call, the flags of PyTorch. What is kept is plain data, and keeps neither a
model nor a tensor alive.

The digest is that of a pickle in which tensors are described, and functions and classes are their code. What cannot be
pickled has no digest, and its step is simulated again each time; so is one under a mode or hook that is active for
the whole process, because what that does is unknown.

A plan in a file is found again by other processes, so what it was made for is written beside it in words that a person
can compare (`PlanFile`): the next process says which of them changed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import inspect
import io
import json
import os
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .. import _torch, errors
from .._torch.fakes import is_wrapper
from .._torch.graphs import gradient_hooks
from .._torch.modes import settings, split_settings
from ..engine.taken import MANY
from ..memory.batch import tensors_of_call
from ..memory.ledger import storages
from ..memory.operations import kind_of
from ..plan.plan import Plan
from ..simulation.copies import enclosed_by, is_own, names_in
from ..simulation.made_up import keeps_values
from ..simulation.training_step import TrainingStep
from ..stores.measured import full_name

if TYPE_CHECKING:
    from ..simulation import Simulation
    from .clock import Clocked
    from .cost import Kind
    from .hosts import Leave
    from .ops import StepLog
    from .tiling import InTiles

MOST = 8
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_VALUES = _PLAIN | {list, tuple, dict, set, frozenset, torch.Tensor}


@dataclass
class Known:
    """The results of a planner about one step.

    Attributes:
        simulations: Simulated steps, by the choices of their plans.
        own_peak_bytes: The peak of the step without a plan, where a plan switches something in the model.
        log: The operations of the step without recomputation.
        written: The weights that the forward writes to.
        segments: The paths and kinds of the segments, the routers, and the dtype of autocast in the first segment.
        tiling: What may be in tiles, and in how many.
        ways: The options of each kind of segment.
        refused: The kinds of segments that allow no region, each with the reason.
        clocked: Steps that were run, by the choices of their plans.
        plans: Plans, by budget in bytes; those of the ranks of a layout by the layout, the optimizer and the budget.
        stages: Runs of the stages of a pipeline, by how it is cut and by its runtime; see `PipelinePlanner.run`.
    """

    simulations: dict[Any, Simulation] = field(default_factory=dict[Any, "Simulation"])
    own_peak_bytes: int | None = None
    log: StepLog | None = None
    written: frozenset[str] = frozenset()
    segments: tuple[list[str], list[str], tuple[str, ...], str] | None = None
    tiling: InTiles | None = None
    ways: dict[str, Kind] = field(default_factory=dict[str, "Kind"])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    clocked: dict[Any, Clocked] = field(default_factory=dict[Any, "Clocked"])
    plans: dict[Any, Any] = field(default_factory=dict[Any, Any])
    stages: dict[Any, dict[Any, Any]] = field(default_factory=dict[Any, dict[Any, Any]])


_last: OrderedDict[bytes, Known] = OrderedDict()


def known(*things: Any) -> Known:
    """Returns what is known of the step that some things decide on: what an earlier call has kept, or nothing yet."""
    key = digest(*things)
    if key is None:
        return Known()
    found = _last.pop(key, None) or Known()
    _last[key] = found
    while len(_last) > MOST:
        _last.popitem(last=False)
    return found


def forget() -> None:
    """Forgets all, where a step depends on more than is described: on what its forward draws."""
    _last.clear()


def digest(*things: Any) -> bytes | None:
    """Returns a digest of some things, the same for equal ones; None where they cannot be described.

    Args:
        things: What decides on a step; PyTorch's settings are added.
    """
    flags, *modes = split_settings(settings())
    if any(modes) or _torch.ambient_hooks() is not None or _torch.any_global_hook():
        return None
    written = io.BytesIO()
    try:
        _Describer(written).dump((things, list(flags), torch.get_default_dtype(), torch.get_num_threads()))
    except Exception:  # whatever an object raises that is not made to be pickled
        return None
    return hashlib.sha256(written.getbuffer()).digest()


def _described() -> None:
    """Stands in the pickle for what is described by its parts."""


class _Describer(pickle.Pickler):
    """Writes a pickle that is only compared, never read."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # as long as its identity is used

    def reducer_override(self, obj: Any) -> Any:
        parts = self._parts(obj)
        return NotImplemented if parts is None or obj is _described else (_described, (), parts)

    def _parts(self, obj: Any) -> Any:
        """The parts that describe an object; None to pickle it normally."""
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, nn.Module):
            return {"class": type(obj), "attributes": vars(obj)}
        if isinstance(obj, types.FunctionType):
            return _function(obj)
        if isinstance(obj, type):
            return _class(obj)
        if isinstance(obj, types.ModuleType):
            return {"module": obj.__name__}
        if isinstance(obj, types.CodeType):
            return {"code": obj.co_code, "constants": obj.co_consts, "names": (obj.co_names, obj.co_freevars)}
        return None

    def _tensor(self, tensor: torch.Tensor) -> Any:
        found: dict[str, Any] = {
            "kind": str(type(tensor)),
            "layout": (tuple(tensor.shape), tensor.dtype, tensor.layout),
        }
        found["grad"], found["attributes"] = tensor.requires_grad, vars(tensor)
        found["hooks"] = gradient_hooks(tensor)
        for device, storage in storages(tensor):
            self._alive.append(storage)
            number = self._storages.setdefault(id(storage), len(self._storages))
            found[f"storage {len(found)}"] = number, storage.nbytes(), str(device)
        if tensor.layout is torch.strided and not is_wrapper(tensor):
            found["place"] = tensor.stride(), tensor.storage_offset()
        if keeps_values(tensor):
            values = tensor.detach().cpu().contiguous()
            found["values"] = ctypes.string_at(values.data_ptr(), values.nbytes)
        return found


def _function(fn: types.FunctionType) -> dict[str, Any]:
    """A library's function by its name; the user's by its code, what it encloses, its defaults and what it names."""
    if kind_of(fn.__code__.co_filename) != "user":
        return {"function": f"{fn.__module__}.{fn.__qualname__}", "closure": enclosed_by(fn)}
    return {"code": _code(fn), "closure": enclosed_by(fn), "defaults": (fn.__defaults__, fn.__kwdefaults__)}


def _code(fn: types.FunctionType) -> Any:
    """The code of a function and what it names: all that a function of the user's own does, of their modules too.

    Of a package's functions it is plain values, tensors, and the code of other functions.
    """
    names, own = names_in(fn.__code__), is_own(fn.__code__.co_filename)
    modules = [one for name, one in fn.__globals__.items() if name in names and isinstance(one, types.ModuleType)]
    places = [vars(one) for one in modules if own and is_own(getattr(one, "__file__", None) or torch.__file__)]
    named = {name: place[name] for place in (*places, fn.__globals__) for name in sorted(names & place.keys())}
    values = {name: one for name, one in named.items() if own or type(one) in _VALUES}
    return fn.__code__, values, [other.__code__ for other in named.values() if isinstance(other, types.FunctionType)]


def _own(thing: Any) -> bool:
    """Whether it is a function of the user's own, or decorates one."""
    code: Any = getattr(inspect.unwrap(thing), "__code__", None) if isinstance(thing, types.FunctionType) else None
    return code is not None and is_own(code.co_filename)


def _method(fn: types.FunctionType, deep: int = 4) -> Any:
    """A method of the user's own as any function; else its code, and the functions and values in its decorators."""
    if is_own(fn.__code__.co_filename):
        return _function(fn)
    cells = enclosed_by(fn)
    inner = [_method(cell, deep - 1) for cell in cells if deep and isinstance(cell, types.FunctionType)]
    return _code(fn), inner, [cell for cell in cells if type(cell) in _PLAIN]


def _class(kind: type) -> dict[str, Any]:
    """A class by its name, and the code of its methods and of those of its bases where they are not torch's."""
    code: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins") or base.__module__ in sys.stdlib_module_names:
            continue
        code[f"{base.__module__}.{base.__qualname__}"] = dict(_of_class(base))
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "code": code}


def _inner(value: Any) -> Any:
    """The function of a static or class method or a property; else the value."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        inner = _inner(value)
        if isinstance(inner, types.FunctionType):
            yield name, _method(inner)
        elif type(inner) in _VALUES and not name.startswith("__"):
            yield name, inner


# --- a plan in a file ---

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
"""The parts of a step that a plan in a file was made for, in words."""


def made_for(step: TrainingStep, budget: object, leave: Leave, sizes: Sequence[int] | str = ()) -> dict[str, Any]:
    """Returns what decides on a plan, as text that JSON holds and that is the same in another process.

    Functions go by their code and what they enclose, modules and objects also by their attributes.
    """
    model, optimizer = step.model, step.optimizer
    tensors = [*model.named_parameters(), *model.named_buffers()]
    layout = [(name, str(t.dtype), list(t.shape), t.requires_grad) for name, t in tensors]
    modules = [(path, _name(type(module)), module.training) for path, module in model.named_modules()]
    attributes = [_text(module) for module in model.modules()]
    kinds = {type(module) for module in model.modules()}
    device = step.device or next((t.device for _, t in tensors), torch.device("cpu"))
    hooks = sum(len(gradient_hooks(weight)) for weight in model.parameters())
    make, given = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    given = optimizer.defaults if isinstance(optimizer, torch.optim.Optimizer) else given
    # Learning rates change, and nothing in memory with them.
    given = {name: bool(value) for name, value in given.items() if not isinstance(value, torch.Tensor)}
    return {
        "model": _hash(modules, layout, getattr(getattr(model, "config", None), "to_dict", dict)(), attributes),
        "code": _hash(*(sorted(text(base) for kind in kinds for base in kind.__mro__) for text in (_source, _reached))),
        "batch": _shapes(step.call),
        "loss": _hash(_source(type(step.loss)), _text(step.loss)),
        "optimizer": [_name(make if inspect.isroutine(make) else type(make)), _source(make), str(given), hooks],
        "budget": str(budget),
        "loop": step.loop.words,
        "settings": _hash(split_settings(settings())[0], torch.get_default_dtype(), leave),
        "device": full_name(device) if isinstance(device, torch.device) else f"{device}, torch {torch.__version__}",
        "host": asdict(step.host),
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
    """A class or function by its source; a library's by its name."""
    if (getattr(thing, "__module__", None) or "").partition(".")[0] in ("torch", "builtins"):
        return _name(thing)
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return _name(thing)


def _text(thing: Any, deep: int = 4) -> str:
    """A thing as text: plain values, the layout of tensors, the code of functions, and what they and others reach."""
    if type(thing) in _PLAIN:
        return repr(thing)
    if isinstance(thing, torch.Tensor):
        return str(_shapes(thing))
    held = [_text(part, deep - 1) for part in _held(thing)] if deep else []
    name = _source(thing) if inspect.isroutine(thing) else _name(thing if isinstance(thing, type) else type(thing))
    return f"{name}: {sorted(held) if isinstance(thing, (set, frozenset)) else held}"


def _reached(kind: type) -> str:
    """The text of all that the functions of a class reach: they call functions, which read objects."""
    return _text(kind, 5)


def _held(thing: Any) -> Iterable[Any]:
    """The parts of a thing: what a function encloses and, of the user's own, names, and what others hold."""
    if isinstance(thing, types.MethodType):
        return _held(thing.__func__)
    if isinstance(thing, types.FunctionType):
        return *enclosed_by(thing), thing.__defaults__, thing.__kwdefaults__, *_code(thing)[1].values()
    if isinstance(thing, type):
        return [one for one in map(_inner, vars(thing).values()) if type(one) in _VALUES or _own(one)]
    if isinstance(thing, partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, Mapping):  # hooks have numbers for names, which are others in another process
        items = cast("Mapping[Any, Any]", thing).items()
        return [part for name, value in items for part in (name if isinstance(name, str) else None, value)]
    if isinstance(thing, (list, tuple, set, frozenset)):
        several = cast("list[Any]", thing)
        return several if len(several) <= MANY else ()
    if isinstance(thing, nn.Module):
        others = ("_modules", "_parameters", "_buffers")
        return _held({name: value for name, value in vars(thing).items() if name not in others})
    file = getattr(sys.modules.get(type(thing).__module__), "__file__", None) or torch.__file__
    plain = isinstance(thing, (types.SimpleNamespace, argparse.Namespace)) or is_own(file)
    return _held(vars(thing)) if plain and hasattr(thing, "__dict__") else ()


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
