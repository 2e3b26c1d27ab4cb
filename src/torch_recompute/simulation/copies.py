"""Copies of models, optimizers and batches with fake tensors.

`Faker` copies the model: `copy.deepcopy` does, and a function mode answers for its tensors. Tied parameters stay tied;
tensors over one storage get fakes over one storage of its size. On meta, integers are taken to be ones, which as a mask
hides nothing and as ids are valid. A hook of a parameter's gradient, by which an optimizer steps in backward, is copied
with what its closure and its names reach. Other functions that reach what was copied, as a forward hook or the loss,
are made again over the copies, with the containers and plain objects between. What slots hold, or a function in an
object of the model, is not; the caller checks afterwards that nothing of the original was touched. What the user's code
fills or writes to besides, as a dict for activations or a running mean, is put back after the step, since a copy of it
would have to be shared by all that reaches it. Of parameters none is read.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch.fakes import FakeMaker, FakeTensorMode, fake_like, is_sharded, is_wrapper, over, parameter, remade_of
from .._torch.graphs import gradient_hooks
from .._torch.storages import is_fake
from .._torch.tensors import each_tensor
from ..engine.taken import EMPTY, MANY, content_of
from ..memory.operations import kind_of
from ..memory.saved import BeforeWrites, Container, contents, fill
from .made_up import floats, is_hollow, keeps_real_values, keeps_values


class Faker:
    """Makes fakes of tensors, one of each.

    Args:
        fakes: The mode that they belong to.
        device: Their device; None for that of the originals.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device | None) -> None:
        self._fakes, self._maker = fakes, FakeMaker(fakes)
        self._device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, object]] = {}
        self.assumed: dict[str, None] = {}

    def copy(self, things: Any) -> Any:
        """A deep copy with fake tensors of modules, optimizers and what they hold."""
        several = isinstance(things, (list, tuple))
        for thing in things if several else [things]:
            if isinstance(thing, nn.Module):
                _check_unwrapped(thing)
                for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                    self.tensor(tensor, name)
        with _Copying(self):
            made = copy.deepcopy(things, self._memo)
            for thing, copied in zip(things, made, strict=True) if several else [(things, made)]:
                if isinstance(thing, torch.optim.Optimizer):
                    # Its `__getstate__` leaves out what is a subclass's own, and a scheduler's `step` of the original.
                    kind, there = type(thing), vars(copied)
                    own = {name: value for name, value in vars(thing).items() if name not in there}
                    own = {name: value for name, value in own.items() if not callable(getattr(kind, name, None))}
                    there.update(copy.deepcopy(own, self._memo))
                if isinstance(thing, nn.Module):
                    reach_copies(copied, self._memo)
        return made

    def gradient_hooks(self, model: nn.Module) -> int:
        """Gives the copies of a model's parameters the hooks of its gradients, copied; returns how many there are."""
        found = [(weight, hook) for weight in model.parameters() for hook in gradient_hooks(weight)]
        for weight, hook in found:
            self.tensor(weight).register_post_accumulate_grad_hook(_function(hook, self._memo, self._reached))
        return len(found)

    def _reached(self, value: Any) -> Any:
        """The copy of what a function reaches; of a library's function, and of what cannot be copied, itself."""
        if isinstance(value, _FUNCTIONS):
            user = kind_of(getattr(getattr(value, "__code__", None), "co_filename", "")) == "user"
            library = isinstance(value, types.FunctionType) and not user
            return value if library else _function(value, self._memo, self._reached)
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return value
        try:
            return self.copy(value)
        except _NOT_COPIED:
            return value

    def loss(self, loss: Any) -> tuple[Any, list[nn.Module]]:
        """A loss over the copies of what it reaches, and those of modules besides, as a teacher or a discriminator."""
        modules = [one for one in _reached_from(loss) if isinstance(one, nn.Module)]
        beside = [self.copy(module) for module in modules if id(module) not in self._memo]
        return self.over(loss), beside

    def over(self, function: Any) -> Any:
        """A function over the copies of what it reaches."""
        return over_copies(function, self._memo)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call: tensors as fakes, anything else as it is."""

        def faked(name: str, value: Any) -> Any:
            return each_tensor(value, lambda tensor: self.tensor(tensor, name))

        positional = tuple(faked(f"args[{i}]", arg) for i, arg in enumerate(args))
        return positional, {name: faked(name, value) for name, value in kwargs.items()}

    def forget(self) -> None:
        """Forgets the tensors and their fakes, so that one of these can die that a step replaces."""
        self._memo.clear()
        self._storages.clear()

    def tensor(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """The fake of a tensor, or a copy of one that stays real; the same one each time."""
        made = self._memo.get(id(tensor))
        if made is None:
            made = self._memo[id(tensor)] = self._make(tensor, name)
            self._memo.setdefault(id(self._memo), []).append(tensor)  # alive as long as its identity is used
        return made

    def _make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if is_sharded(tensor):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is a DTensor: the model is sharded (fully_shard, tensor parallelism), "
                "and its collectives cannot be simulated on one process.\n"
                "  Simulate the model as it was before sharding."
            )
        plain = tensor.layout is torch.strided and not tensor.is_nested
        if is_wrapper(tensor):  # a jagged one is known by its lengths, which have values
            made = remade_of(tensor, self.tensor) if tensor.is_nested else fake_like(self._fakes, tensor)
        elif not plain or not (_torch.is_plain(tensor) or type(tensor) is nn.Buffer):
            kind = "nested and not layout=torch.jagged" if tensor.is_nested else errors.say(tensor)
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is {kind}, of which no fake copy can be made: its class "
                "or layout does not tell which memory it uses.\n"
                "  Simulate the model with plain tensors in its place (for a quantised module: before quantisation)."
            )
        else:
            made = self._plain(tensor, name)
            if isinstance(tensor, nn.Parameter):
                made = parameter(made, tensor.requires_grad)
                if type(tensor) is nn.Parameter:
                    for attribute, value in vars(tensor).items():  # such as `sequence_parallel`, which others look at
                        setattr(made, attribute, value)
            else:
                made.requires_grad_(tensor.requires_grad)
        return made

    def _plain(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        device = self._device or tensor.device
        with torch.no_grad():
            if keeps_values(tensor):
                return tensor.detach().clone().to(device)
            if (
                not isinstance(tensor, nn.Parameter)
                and is_hollow(tensor)
                and not floats(tensor)
                and keeps_real_values(tensor)
            ):
                self.assumed[f"{name or 'a tensor'} has no values: taken to be ones"] = None
                return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            return self._over_storage(tensor, device)

    def _over_storage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        identity, whole = _torch.storage_id(tensor), tensor.untyped_storage()
        if identity not in self._storages:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            place = made.untyped_storage()
            self._storages[identity] = place, whole
            if not tensor.storage_offset() and place.nbytes() == whole.nbytes():
                return self._maker(made, device)
            place.resize_(whole.nbytes())
        place, _ = self._storages[identity]
        return self._maker(over(place, tensor.storage_offset(), tensor), device)


def _check_unwrapped(model: nn.Module) -> None:
    """Refuses a model with a module that talks to other ranks, and would do so in a simulated step."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules():
        within = f"{path and f'{path} of '}the model is wrapped in {type(module).__name__}"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise errors.ArgumentError(
                f"{within}, whose reductions wait for the other ranks; a plan is of the module inside, and its step is "
                "simulated in this process alone.\n"
                "  Write make_plan(ddp.module, batch, ...) and apply(ddp.module, plan), before or after DDP(model)."
            )
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise errors.ArgumentError(
                f"{within}, whose weights are on the other ranks, too, and cannot be simulated in this process.\n"
                "  Plan the model as it was before it was wrapped: make_plan(model, batch, ranks=Ranks(fsdp=8), ...)."
            )


def names_in(code: types.CodeType) -> set[str]:
    """The names of its module that a code, or one within it, looks up."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def reach_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """Has the functions that a copied model holds, as hooks or attributes, reach the copies of what they reach.

    Args:
        model: The copy.
        memo: The copies, by the identity of the originals, as `copy.deepcopy` has filled it.
    """
    for module in model.modules():
        for held, place in list(_functions_of(module)):
            held[place] = over_copies(held[place], memo)


def _functions_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yields the functions that a module holds, as hooks or attributes: what each is in, and where."""
    holders: list[Any] = [value for value in vars(module).values() if isinstance(value, (dict, list))]
    for held in (vars(module), *holders):
        places: Any = held.items() if isinstance(held, dict) else enumerate(held)
        yield from ((held, place) for place, value in places if isinstance(value, _FUNCTIONS))


def over_copies(value: Any, memo: dict[int, Any]) -> Any:
    """The copy of what has been copied; a function, container or object over it where it reaches any; else itself."""
    if id(value) in memo or not any(id(one) in memo for one in _reached_from(value)):
        return memo.get(id(value), value)
    over = partial(over_copies, memo=memo)
    if isinstance(value, _FUNCTIONS):
        return _function(value, memo, over)
    if isinstance(value, tuple):
        return tuple(map(over, cast("tuple[Any, ...]", value)))
    try:
        made = memo[id(value)] = copy.copy(value)  # before its elements, of which one may be itself
    except _NOT_COPIED:
        return value
    if made is value:
        return value
    if isinstance(value, _CONTAINERS):
        several = list(map(over, cast("list[Any]", value)))
        fill(made, zip(several, map(over, value.values()), strict=True) if isinstance(value, dict) else several)
    else:
        vars(made).update({key: over(one) for key, one in vars(made).items()})
    return made


def _reached_from(value: Any, parts: Callable[[Any], Iterable[Any]] | None = None) -> Iterator[Any]:
    """Yields a value and all that it reaches, each thing once, but nothing within modules and optimizers."""
    parts = parts or _parts
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            waiting.extend(parts(one))


@contextlib.contextmanager
def reached_as_before(*things: Any) -> Generator[BeforeWrites]:
    """Leaves as it is what the user's code writes to beside what it is given, as a dict that a hook fills.

    That is containers, attributes of objects and functions, and variables of functions and modules; of tensors those
    that a simulation writes to. Installed code is not looked into, and none of the user's is called.

    Args:
        things: Models, of which hooks, classes and functions count, and functions.
    """
    reached = list(_reached_from(things, _of_users))
    places = [Container.of(place, names) for one in reached for place, names in _places(one)]
    watching = BeforeWrites(one for one in reached if type(one) is torch.Tensor)
    try:
        with watching.simulated_ones():
            yield watching
    finally:
        watching.restore()
        for place in places:
            place.restore()


def _of_users(value: Any) -> Iterable[Any]:
    """All that the user's code reaches from a value; of a model, its functions and classes."""
    if isinstance(value, nn.Module):
        modules = list(value.modules())
        return [*map(type, modules), *(held[place] for module in modules for held, place in _functions_of(module))]
    if isinstance(value, type):
        functions = (getattr(x, "__func__", x) for x in vars(value).values())
        return (*value.__bases__, *functions) if is_own(_file_of(value)) else ()
    if isinstance(value, types.FunctionType):
        return _of_function(value, names=is_own(value.__code__.co_filename))
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, (*_CONTAINERS, tuple)):
        return contents(value).values() if len(cast("list[Any]", value)) <= MANY else ()
    return (*_parts(value), type(value)) if isinstance(value, partial) or _is_users(value) else ()


def _places(value: Any) -> Iterable[Any]:
    """The containers and namespaces that code may write to in a value, with the names that it may for a module's."""
    if isinstance(value, types.FunctionType) and is_own(value.__code__.co_filename):
        stored = _stored_in(value.__code__)
        scope = [(value.__globals__, stored.__contains__)] if stored else []
        return [(place, None) for place in (vars(value), *(value.__closure__ or ()))] + scope
    if isinstance(value, _CONTAINERS):
        return [(value, None)] if len(cast("list[Any]", value)) <= _HELD else ()
    return [(vars(value), None)] if _is_users(value) else ()


def _is_users(value: Any) -> bool:
    """Whether a value is an object of a class of the user's own, or a namespace."""
    return _is_plain(value) and "-packages" not in _file_of(type(value))


def _stored_in(code: types.CodeType) -> set[str]:
    """The names of its module that a code, or one within it, binds."""
    stored = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return stored.union(*(_stored_in(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def is_own(file: str) -> bool:
    """Whether a file is the user's own, and no library's or package's."""
    return kind_of(file) == "user" and "-packages" not in file


def _file_of(kind: type) -> str:
    """The file that a class is in; one made in a notebook is in none, and the user's."""
    built_in = torch.__file__ if kind.__module__ in sys.builtin_module_names else ""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or built_in


@contextlib.contextmanager
def others_as_before(value: torch.Tensor, own: Collection[torch.Tensor]) -> Generator[None]:
    """Leaves the gradients as they are of what a backward reaches besides what is its own."""
    reached = (getattr(node, "variable", None) for node in _torch.nodes_from([value.grad_fn]))
    leaves = [leaf for leaf in reached if leaf is not None and leaf not in own and not is_fake(leaf)]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def _parts(value: Any) -> Iterable[Any]:
    """All that a function reaches by closure, names, defaults or object, or that a container or plain object holds."""
    if type(value) in (list, tuple, dict, set, deque, defaultdict, OrderedDict):
        several = cast("list[Any]", value)
        keyed: Any = value.values() if isinstance(value, dict) else ()
        return (*several, *keyed) if len(several) <= MANY else ()
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    return vars(value).values() if _is_plain(value) else ()


def enclosed_by(fn: types.FunctionType) -> list[Any]:
    """The contents of a function's closure; a cell may be empty still."""
    return [content for content in map(content_of, fn.__closure__ or ()) if content is not EMPTY]


def _of_function(fn: types.FunctionType, names: bool = True) -> Iterator[Any]:
    yield from enclosed_by(fn)
    of_module = (fn.__globals__[name] for name in names_in(fn.__code__) if names and name in fn.__globals__)
    functions = types.FunctionType
    yield from (one for one in of_module if not isinstance(one, functions) or one.__globals__ is fn.__globals__)
    yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of a class that neither torch nor Python has, or a namespace."""
    of_its_own = isinstance(value, (nn.Module, torch.optim.Optimizer, torch.Tensor, type, types.ModuleType))
    if of_its_own or not hasattr(value, "__dict__"):
        return False
    return kind_of(_file_of(type(value))) == "user" or isinstance(value, types.SimpleNamespace)


def _function(fn: Any, memo: dict[int, Any], reached: Callable[[Any], Any]) -> Any:
    """A function over other things: what it reaches by its closure, by names of its module, by its object."""
    if isinstance(fn, partial):
        keywords = {name: reached(value) for name, value in fn.keywords.items()}
        return partial(_function(fn.func, memo, reached), *map(reached, fn.args), **keywords)
    if isinstance(fn, types.MethodType):
        return types.MethodType(fn.__func__, reached(fn.__self__))
    if not isinstance(fn, types.FunctionType):
        return reached(fn)
    if id(fn) not in memo:
        cells = tuple(memo.setdefault(id(cell), types.CellType()) for cell in fn.__closure__ or ())  # shared as before
        names = {**fn.__globals__}
        made = types.FunctionType(fn.__code__, names, fn.__name__, None, cells)
        memo[id(fn)] = made  # before what it reaches, which may be itself
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty one
                cell.cell_contents = reached(old.cell_contents)
        names.update({name: reached(names[name]) for name in names_in(fn.__code__) if name in names})
        made.__defaults__ = fn.__defaults__ and tuple(map(reached, fn.__defaults__))
        vars(made).update({name: reached(one) for name, one in vars(fn).items()})
        made.__kwdefaults__ = fn.__kwdefaults__ and {name: reached(one) for name, one in fn.__kwdefaults__.items()}
    return memo[id(fn)]


_CONTAINERS = (dict, list, set, deque)
_HELD = 100 * MANY
"""The most entries of a container that is put back; one with more, as of a data set, takes a simulation's time."""
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_NOT_COPIED = (TypeError, RuntimeError, AttributeError, copy.Error)  # raised for a file, a lock, a logger's


class _Copying(TorchFunctionMode):
    """Answers `deepcopy` for tensors."""

    def __init__(self, faker: Faker) -> None:
        super().__init__()
        self._faker = faker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ or func is torch.Tensor.clone:  # the latter by nn.Parameter
            return self._faker.tensor(args[0])
        return func(*args, **(kwargs or {}))
