"""Runs training steps that can be repeated, and compares what two of them leave.

A `ModelCall` captures everything that one call of a model can change: buffers, generators, and what Python code changes
on the side (`SideEffects`). `step` runs forward, loss and backward on copies of the arguments and returns the outputs,
gradients and state they leave; `go_back` restores the captured state. `differences` compares two steps tensor by
tensor.

Two tensors are the same if all their bits are. If they are not, their distance is the largest difference of two
elements, relative to the largest element. Where two plain steps differ, a tensor may differ by `NOISE` times its noise;
a sum in another order changes a tensor in one pair of runs and by luck not in another, so every tensor is then allowed
at least the noise that is usual in this step.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .. import _torch, errors
from .._torch.fakes import is_sharded
from ..engine.mismatch import digest
from ..memory.reach import Reach
from ..memory.saved import CallState, Container, contents, generators, module_names
from ..simulation.training_step import check_loss
from ..state import NumpyRng, PythonRng, same
from ..state.observer import observing

NOISE = 4.0
"""The factor by which noise may exceed that of two plain steps, which tell little of how large it can be."""
KINDS = ("outputs", "gradients", "buffers", "generators")
SAMPLE = 4096
"""The number of values of a large tensor that are kept, to say how far two are apart."""
DEPTH = 4
"""The depth to which objects that modules hold are searched."""


# --- two tensors ------------------------------------------------------------------------------------------------------


class TensorSample(NamedTuple):
    """A digest of all bits of a tensor, and all its values or evenly spaced ones, flat."""

    digest: torch.Tensor  # on the tensor's device until it is compared
    values: torch.Tensor
    size: int  # of the tensor

    def same(self, other: TensorSample) -> bool:
        """Returns whether all bits are the same."""
        return self.size == other.size and torch.equal(self.digest, other.digest)

    def difference(self, other: TensorSample) -> str:
        """Returns how far another sample is from this one, in words."""
        then, now = self.values, other.values
        some = "" if self.size == then.numel() else f" (of {then.numel():,} looked at)"
        if then.shape != now.shape:
            return f"{other.size:,} values instead of {self.size:,}"
        if not (then.is_floating_point() or then.is_complex()):
            return f"{int((then != now).sum()):,} of {then.numel():,} entries differ{some}"
        wide = torch.complex128 if then.is_complex() else torch.float64
        difference = (then.to(wide) - now.to(wide)).abs()
        finite = difference[difference.isfinite()]
        if finite.numel() == 0:
            return f"not a number, or infinite, where the other is not{some}"
        values = then.to(wide).abs()
        values = values[values.isfinite()]
        largest = float(values.max()) if values.numel() else 0.0
        return f"by up to {float(finite.max()):.2g}, in values of up to {largest:.2g}{some}"


def sample_of(tensor: torch.Tensor) -> TensorSample | None:
    """Returns a sample of a tensor; None for one that holds no values, or is of a subclass."""
    if tensor.device.type == "meta" or tensor.numel() == 0 or not _torch.is_plain(tensor):
        return None
    flat = _flat(tensor)
    return TensorSample(digest(tensor), flat[:: -(-flat.numel() // SAMPLE)].clone(), flat.numel())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = tensor.detach()
    flat = (local.to_local() if is_sharded(tensor) else local).resolve_conj().resolve_neg()  # shards may be uneven
    if flat.layout is not torch.strided:
        flat = flat.values() if flat.is_nested else flat.to_dense()
    return flat.reshape(-1)


def distance(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """Returns the largest difference relative to the largest element; infinite if a tensor is missing or not finite."""
    if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return math.inf
    a, b = _flat(mine), _flat(theirs)
    if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    relative = ((a - b).abs().max() / a.abs().max()).item()
    return relative if math.isfinite(relative) else math.inf


# --- two steps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference between two steps in one tensor, or in one other thing that a step leaves.

    Attributes:
        kind: "outputs", "gradients", "buffers", "generators", "attributes", "routing", or "error" for a step that
            raised.
        name: What it is, in words.
        distance: The largest difference of two elements, relative to the largest element; 0.0 for the same bits, and
            infinite where that cannot be said.
        allowed: What the noise of the plain step explains.
        detail: How it differs, in words; empty if it does not.
    """

    kind: str
    name: str
    distance: float = 0.0
    allowed: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.detail}" if self.detail else f"{self.name}: the same"


class StepResult(NamedTuple):
    """The tensors that a step leaves, by kind (`KINDS`) and name, and the side effects.

    Gradients are in the order in which backward made them.
    """

    tensors: dict[str, dict[str, torch.Tensor]]
    side_effects: SideEffects


class Noise:
    """The distances between two plain steps, by the name of each tensor that differs."""

    def __init__(self, first: StepResult, second: StepResult) -> None:
        pairs = ((name, distance(a, b)) for _, name, a, b in _pairs(first, second))
        self.distances = {name: far for name, far in pairs if far}
        finite = [far for far in self.distances.values() if math.isfinite(far)]
        self._usual = statistics.median(finite) if finite else 0.0

    @property
    def largest(self) -> float:
        """The largest distance of all tensors."""
        return max(self.distances.values(), default=0.0)

    def allowed(self, name: str) -> float:
        """Returns the distance that a tensor may have from the plain step's."""
        return NOISE * max(self.distances.get(name, 0.0), self._usual)


def differences(plain: StepResult, other: StepResult, noise: Noise) -> Iterator[Difference]:
    """Yields the tensors that differ by more than the noise."""
    for kind, name, mine, theirs in _pairs(plain, other):
        found, allowed = distance(mine, theirs), noise.allowed(name)
        if found > allowed:
            yield Difference(kind, name, found, allowed, _in_words(mine, theirs, allowed))


def _in_words(mine: torch.Tensor | None, theirs: torch.Tensor | None, allowed: float) -> str:
    if mine is None:
        return "is there with regions only"
    if theirs is None:
        return "is missing with regions"
    if mine.dtype != theirs.dtype:
        return f"is {theirs.dtype} with regions, and {mine.dtype} without"
    a, b = (TensorSample(one, one, one.numel()) for one in (_flat(mine), _flat(theirs)))
    noisy = f"; noise of the plain step would explain {allowed:.2g} of the largest value" if allowed else ""
    return f"differs {a.difference(b)}{noisy}"


def _pairs(
    first: StepResult, second: StepResult
) -> Iterator[tuple[str, str, torch.Tensor | None, torch.Tensor | None]]:
    for kind in KINDS:
        mine, theirs = first.tensors.get(kind, {}), second.tensors.get(kind, {})
        for name in {**mine, **theirs}:
            yield kind, name, mine.get(name), theirs.get(name)


class ModelCall:
    """One call of a model or another callable, with the present state of everything that the call can change."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Mapping[int, str] = types.MappingProxyType({}),
    ) -> None:
        """Captures the state; modules in `known`, by `id`, have the names that they have there."""
        self.model, self._args, self._kwargs = model, args, kwargs
        values = [*args, *kwargs.values()]
        self._reach = reach = Reach(model, [value for value in values if isinstance(value, nn.Module)])
        self.names = {**module_names(model, reach), **known}
        self.modules = [(module, self.names.get(id(module), "")) for module in reach.modules]
        self._leaves = self._trainable()
        self._state = CallState(reach, values)
        self._start = SideEffects(self.modules, [self.model])

    @property
    def device(self) -> torch.device:
        """The device that the step runs on."""
        tensors = [*self._leaves.values(), *_torch.tensors_in((self._args, self._kwargs))]
        return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))

    def step(self, loss: Callable[[Any], Any], *, needs_grad: bool = True) -> StepResult:
        """Runs forward, loss and backward on copies of the arguments; gradients are put back at once.

        With `needs_grad`, a loss that needs no gradient is an error.
        """
        before = {name: leaf.grad for name, leaf in self._leaves.items()}
        handles: list[Any] = []
        order: dict[str, None] = {}

        def noting(name: str) -> Callable[[torch.Tensor], None]:
            return lambda _: order.setdefault(name)

        try:
            # Observed, so that plans say nothing of their first calls: what they would say is found here.
            with torch.inference_mode(False), torch.enable_grad(), observing():
                args, kwargs, inputs = self._copies()
                leaves = {**self._leaves, **inputs}
                for name, leaf in leaves.items():
                    leaf.grad = None
                    if leaf.is_leaf and leaf.requires_grad:
                        handles.append(leaf.register_post_accumulate_grad_hook(noting(name)))
                output = self.model(*args, **kwargs)
                value = loss(output)
                if needs_grad:
                    self._check(value, leaves)
                outputs = {**_outputs(output), "the loss": value.detach()}
                del output
                if needs_grad or value.requires_grad:
                    value.backward()
            gradients = {name: leaves[name].grad for name in {**order, **dict.fromkeys(leaves)}}
            return self._result(outputs, gradients)
        finally:
            for handle in handles:
                handle.remove()
            for name, leaf in self._leaves.items():
                leaf.grad = before[name]

    def keep_weights(self, loss: Callable[[Any], Any]) -> None:
        """Calls model and loss once, so that weights that these write to are put back from now on."""
        args, kwargs, _ = self._copies()
        try:
            with torch.inference_mode(False), torch.enable_grad(), observing(), self._state.keeping_weights():
                loss(self.model(*args, **kwargs))
        finally:
            self.go_back()

    def _check(self, value: Any, leaves: Mapping[str, torch.Tensor]) -> None:
        """Refuses a step that has no gradients to compare."""
        if not leaves and not (isinstance(value, torch.Tensor) and value.requires_grad):
            raise errors.ArgumentError(
                f"no parameter of {getattr(self.model, '__name__', type(self.model).__name__)} requires grad, nor does "
                "the batch: nothing is trained, and there are no gradients to compare.\n"
                "  Unfreeze what is to be trained: model.requires_grad_(), or the adapters alone."
            )
        check_loss(value)

    def _result(self, outputs: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor | None]) -> StepResult:
        """Returns the outputs and gradients of a step, and the buffers and generators as they are now."""
        states = [generator.get_state() for generator, _ in self._state.generators]
        tensors = {
            "outputs": outputs,
            "gradients": {f"the gradient of {name}": grad for name, grad in gradients.items() if grad is not None},
            "buffers": {
                f"buffer {name}": buffer.detach().clone()
                for module, path in self.modules
                for name, buffer in module.named_buffers(path, recurse=False)
            },
            "generators": {f"generator {number} of the model": state for number, state in enumerate(states)},
        }
        return StepResult(tensors, SideEffects(self.modules, [self.model]))

    def go_back(self, *written: tuple[torch.UntypedStorage, torch.UntypedStorage]) -> None:
        """Restores the captured state; storages that were `written` to get the content beside them."""
        self._start.restore()
        self._state.restore(*written)

    def _trainable(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that get a gradient, by name; of one in two places the first name counts."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for module, path in self.modules:
            for name, parameter in module.named_parameters(path, recurse=False):
                found.setdefault(id(parameter), (name, parameter))
        for seen in self._reach.parameters():
            if seen.tensor.is_leaf:
                found.setdefault(id(seen.tensor), (seen.label(), seen.tensor))
        return {name: tensor for name, tensor in found.values() if tensor.requires_grad}

    def _copies(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
        """Returns the call with copies of its tensors, and those of them that get a gradient."""
        leaves, spec = _torch.tree_flatten((self._args, self._kwargs))
        inputs: dict[str, torch.Tensor] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                leaves[number] = copy = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                if copy.requires_grad:
                    inputs[f"argument {number}"] = copy
        args, kwargs = _torch.tree_unflatten(leaves, spec)
        return args, kwargs, inputs


def _outputs(output: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors in an output, detached and by name."""
    found = _torch.tensors_in(output)
    names = [f"output {number}" for number in range(len(found))] if len(found) > 1 else ["the output"]
    return {name: one.detach() for name, one in zip(names, found, strict=False)}


# --- side effects -----------------------------------------------------------------------------------------------------


class SideEffects:
    """The state of all that Python code can change outside of its arguments.

    That is attributes of modules, closures, globals, and the global generators (Python's, NumPy's, PyTorch's). No user
    code is called: containers are copied by their base types, objects read through `__dict__`. Rebinding a name to
    something equal is no change.

    Args:
        modules: The modules, with their names.
        functions: Functions whose closures count.
        scopes: Code and globals of functions that run.
    """

    def __init__(
        self,
        modules: Iterable[tuple[nn.Module, str]] = (),
        functions: Iterable[Any] = (),
        scopes: Iterable[tuple[types.CodeType, dict[str, Any]]] = (),
    ) -> None:
        self._generators = generators()
        self._places: list[Container] = []
        self._seen: dict[int, Any] = {}
        for module, name in modules:
            self._seen[id(module)] = module
            where = f"of {name} ({type(module).__name__})" if name else f"of {type(module).__name__}"
            self._namespace(f"attribute '{{key}}' {where}", vars(module), lambda key: key not in _OF_EVERY_MODULE)
        for function in functions:
            self._function(function)
        for code, scope in scopes:
            names = {name for name in code.co_names if name in scope and not isinstance(scope[name], _FIXED)}
            self._namespace("global '{key}'", scope, names.__contains__)

    def changed_places(self) -> list[str]:
        """Returns a label for each attribute, closure variable and global that has changed."""
        found: dict[str, None] = {}
        for place in self._places:
            then, now = place.then, place.now()
            for key in {**then, **now}:
                if key not in then or key not in now or not _same(then[key], now[key], DEPTH):
                    found[place.label.format(key=key)] = None
        return list(found)

    def advanced_generators(self) -> list[str]:
        """Returns the names of the global generators whose state has changed."""
        present = {type(ambient): state for ambient, state in generators()}
        advanced = (type(one) for one, then in self._generators if not _same_state(then, present[type(one)]))
        return [_NAMES.get(kind, kind.__name__) for kind in advanced]

    def restore(self) -> None:
        """Restores the captured state."""
        for place in self._places:
            place.restore()
        for ambient, then in self._generators:
            ambient.restore(then)

    def _namespace(self, label: str, container: dict[str, Any], counts: Callable[[Any], bool]) -> None:
        place = Container(label, container, {key: value for key, value in container.items() if counts(key)}, counts)
        self._places.append(place)
        for key, value in place.then.items():
            self._look(label.format(key=key), value, 1)

    def _function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        if isinstance(function, types.MethodType):
            self._look("the object of a bound method", function.__self__, 0)
            self._function(function.__func__)
        elif isinstance(function, types.FunctionType):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._hold(f"closure variable '{name}'", cell, 0)
        elif hasattr(function, "func"):
            self._function(function.func)
        elif not isinstance(function, nn.Module):
            self._look("the region's function", function, 0)

    def _look(self, label: str, value: Any, depth: int) -> None:
        if depth > DEPTH or id(value) in self._seen or isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)):
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(value)
        elif isinstance(value, (list, dict, set, tuple)) or _is_plain_object(value):
            self._seen[id(value)] = value
            self._hold(label, value if isinstance(value, (list, dict, set, tuple)) else vars(value), depth)

    def _hold(self, label: str, container: Any, depth: int) -> None:
        then = contents(container)
        if not isinstance(container, tuple):
            self._places.append(Container(label.replace("{", "{{").replace("}", "}}"), container, then))
        for inner in then.values():
            self._look(label, inner, depth + 1)


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_FIXED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, nn.Module)


def _is_plain_object(value: Any) -> bool:
    """Returns whether a value is an object of the user's, or of a library that is neither torch nor Python's own."""
    top = type(value).__module__.partition(".")[0]
    known = top in ("torch", "torch_recompute", "builtins", "numpy") or top in sys.stdlib_module_names
    return not known and isinstance(getattr(value, "__dict__", None), dict)


def _same(then: Any, now: Any, depth: int) -> bool:
    """Returns whether two values are equal; True also for values that cannot be compared."""
    if then is now or depth == 0:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, _PLAIN):
        return then == now or (then != then and now != now)
    if isinstance(then, torch.Tensor):
        if (then.shape, then.dtype, then.device) != (now.shape, now.dtype, now.device):
            return False
        a, b = sample_of(then), sample_of(now)
        return a is None or b is None or a.same(b)
    if isinstance(then, set):
        return then == now
    if isinstance(then, (list, tuple, dict)):
        a, b = contents(then), contents(now)
    elif _is_plain_object(then):
        a, b = vars(then), vars(now)
    else:
        return True
    return a.keys() == b.keys() and all(_same(a[key], b[key], depth - 1) for key in a)


_NAMES: Mapping[type, str] = {PythonRng: "random", NumpyRng: "numpy"}


def _same_state(a: Any, b: Any) -> bool:
    """Whether two states of a generator are the same, NumPy's included."""
    if isinstance(a, tuple):
        return all(_same_state(x, y) for x, y in zip(cast("tuple[Any, ...]", a), b, strict=True))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else same(a, b)
