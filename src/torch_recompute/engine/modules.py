"""The guard of a region's own modules: a replay finds in them what the forward found, and leaves what it found.

A region's own modules are its function, with all below it, if that is a module; else those that the function calls,
with all below each: a region pays for what it runs, not for the model around it. What a function merely holds (the
object of a method, a module in a cell) is looked at alone, without what is below it: it may be the whole model. Modules
that cannot be seen being called (`module.forward(x)`, compiled code) behave as under PyTorch's checkpoint.

Read are attributes, parameters, buffers, children, forward hooks and generators, each by its identity, table by table:
PyTorch has a version of every dictionary, so one that nobody has written to is not looked at again. What differs at the
replay is put back for its length (`exchange.py`); modules in which nothing differs are not written to. What a module's
own forward assigns is undone after a replay, too.

Buffers change in place, and `native_batch_norm` in training does not even raise their versions. So a module lends its
replay copies of its buffers, and they are updated once. Where a version says that the forward did not change a buffer,
its copy is dropped, but for small ones of modules in training. Large ones of modules in evaluation are watched alone.

Modules inside of wrappers of torch.distributed are left to these, but for `training` and buffers: they track forward
and backward by attributes of their own, and replace parameters.

Rejected: to watch large buffers only once they have changed, without a copy before. One that is first updated at step
3, a codebook with a warm-up, would be an error in that step of every run.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from .. import _torch, errors
from .._torch import version_of, version_of_dict
from .._torch.modes import unwatch_calls, watch_calls
from ..state.tape import thread
from .exchange import CONTAINERS, Exchange, Noted, alike, note, put
from .taken import PLAIN, REACHED, SMALL, Taking, changed_weight, forget, is_plain_tuple, may_be_config, open_in

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_MORE_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_LEFT = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
"""What every module has besides, and no replay depends on."""
_LAZY = frozenset({UninitializedParameter, UninitializedBuffer})
_ORDINARY = frozenset({Parameter, type(None)})
_WRAPPERS = (
    *("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.nn.parallel."),
    "torch_recompute.simulation.fully_sharded",
)

_dict_of, _values_of = operator.attrgetter("__dict__"), operator.methodcaller("values")
_tables_of, _parameters_of = operator.itemgetter(*_TABLES), operator.itemgetter("_parameters")
_children_in = operator.itemgetter("_modules")
_flat = itertools.chain.from_iterable
_present: Callable[[Any], Any] = weakref.ref.__call__
_is_there = functools.partial(operator.is_not, None)


def _tracks_phases(module: nn.Module) -> bool:
    return any(base.__module__.startswith(_WRAPPERS) for base in type(module).__mro__)


class _Tree:
    """The modules below one, found once; a later call only asks whether they are the same. Holds none of them.

    Attributes:
        refs: The modules, the root first.
        ids: The identities of their children.
        managed: Which of them belong to a wrapper of torch.distributed.
        versions: The versions of the dictionaries of attributes when `kinds` were last compared.
        kinds: The types of all attributes.
        special: The attributes that hold more than plain values: number of the module, and name.
        tuples: Those that hold tuples, likewise.
    """

    __slots__ = ("_rest", "ids", "kinds", "managed", "refs", "special", "tuples", "versions")

    def __init__(self, modules: Sequence[nn.Module], managed: Container[int] = ()) -> None:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                from .mismatch import of_torchscript

                raise of_torchscript(module)
        self.refs = [*map(weakref.ref, modules)]
        self.ids = _children_of(modules)
        inside = {id(m) for wrapper in modules if _tracks_phases(wrapper) for m in wrapper.modules()}
        self.managed = frozenset(i for i, m in enumerate(modules) if id(m) in inside or id(m) in managed)
        self._rest: _Tree | None = None
        self.versions: list[int] = []
        self.kinds: list[type] = []
        self.special: list[tuple[int, str]] = []
        self.tuples: list[tuple[int, str]] = []

    def without(self, modules: Sequence[nn.Module], new: Sequence[nn.Module]) -> _Tree:
        """Returns the tree of some of the modules."""
        if len(new) == len(modules):
            return self
        managed = frozenset(id(modules[i]) for i in self.managed)
        if len(new) < len(modules) - 1 or new[0] is modules[0]:
            return _Tree(new, managed)
        if self._rest is None:  # all but the root, which was read alone
            self._rest = _Tree(new, managed)
        return self._rest

    def look_at(self, own: list[dict[str, Any]], versions: list[int]) -> None:
        """Finds the special attributes, if some dictionary has got or lost any."""
        self.versions, kinds = versions, [*map(type, _flat(map(_values_of, own)))]
        if kinds != self.kinds:
            self.kinds = kinds
            every = [
                (i, name, value)
                for i, attributes in enumerate(own)
                for name, value in attributes.items()
                if name not in _NOT_READ and name != "forward" and i not in self.managed
            ]
            self.tuples = [(i, name) for i, name, value in every if isinstance(value, tuple)]
            self.special = [(i, name) for i, name, value in every if _is_special(value)]


_NOT_READ = _LEFT | frozenset({"_parameters", "_buffers", "_modules"})


def _is_special(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.Generator, *CONTAINERS)) or may_be_config(value)


def _children_of(modules: Iterable[nn.Module]) -> list[int]:
    return [*map(id, _flat(map(_values_of, map(_children_in, map(_dict_of, modules)))))]


_trees: dict[int, tuple[Any, _Tree]] = {}
_single: dict[int, tuple[Any, _Tree]] = {}


def _modules_below(root: nn.Module) -> tuple[list[nn.Module], _Tree]:
    """The modules below one, itself first."""
    found = _trees.get(id(root))
    if found is not None and found[0]() is root:
        modules: list[Any] = [*map(_present, found[1].refs)]
        if (
            None not in modules
            and [*map(id, _flat(map(_values_of, map(_children_in, map(_dict_of, modules)))))] == found[1].ids
        ):
            return modules, found[1]
    modules = list(root.modules())
    tree = _Tree(modules)
    _trees[id(root)] = weakref.ref(root, functools.partial(forget, _trees, id(root))), tree
    return modules, tree


def _alone(root: nn.Module) -> _Tree:
    """The tree of a module without what is below it."""
    found = _single.get(id(root))
    if found is None or found[0]() is not root:
        found = _single[id(root)] = weakref.ref(root, functools.partial(forget, _single, id(root))), _Tree([root])
    return found[1]


class Buffer:
    """A buffer, and what it held when the forward began.

    Attributes:
        tensor: The buffer: itself while the forward runs; later its memory, where it holds the same still.
        then: What it held; None where it holds the same still.
        version: Its version then.
        was: The buffer, if somebody has it still.
    """

    __slots__ = ("_place", "_training", "tensor", "then", "version", "was")

    def __init__(self, tensor: torch.Tensor, training: bool, place: int = -1) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version, self._training, self._place = tensor._version, training, place
        self.then: Noted | None = None
        self.was = weakref.ref(tensor)

    def settle(self, written: Container[int]) -> None:
        """After the forward: drops the values of a buffer that did not change, if its version can be trusted.

        It cannot where its module trains, or may have trained meanwhile: where attributes of that have been `written`.
        """
        tensor = self.tensor
        training = self._training or self._place in written
        if tensor is not None and tensor._version == self.version and not (training and _is_small(tensor)):
            self.tensor, self.then = tensor.detach(), None
        else:
            self.tensor = None

    def changed(self) -> bool:
        """Whether the buffer has been changed in place since, where no values were noted."""
        return self.then is None and self.tensor is not None and self.tensor._version != self.version


def _may_be_written(tensor: torch.Tensor) -> bool:
    """Whether a plain attribute is a large tensor that a forward may change, as a buffer."""
    large = tensor.layout is torch.strided and not _is_small(tensor)
    return large and not tensor.requires_grad and not _torch.is_emptied(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= SMALL


AddGenerators = Callable[[Iterable[torch.Generator]], None]


class Modules:
    """Notes the contents of a region's own modules when it is entered, or when they are first called.

    Attributes:
        weights: Their parameters, and the buffers that they do not train. The region's function holds them anyway.
        weight_versions: Their versions.
        seen: The modules, by their identity.
    """

    __slots__ = (
        *(
            "_below",
            "_beside",
            "_early",
            "_since",
            "_written",
            "_dicts",
            "_add_generators",
            "_hooks",
            "_late",
            "_buffers",
            "_loose",
            "_outer",
            "_owners",
        ),
        *("_partial", "_region", "_roots", "_taking", "_then", "_unchanged", "_versions"),
        *("seen", "weight_versions", "weights"),
    )

    def __init__(
        self,
        taking: Taking,
        outer: Modules | None,
        add: AddGenerators | None = None,
        roots: Iterable[tuple[nn.Module, bool]] = (),
    ) -> None:
        self._outer, self._add_generators = outer, add
        self._since = 0  # the version of a dictionary that is made as the forward begins
        self._written = range(0)  # the versions of dictionaries that the function has written to by now
        self._early: dict[int, dict[Any, Any]] = {}  # those that it wrote to before they were noted, as they were then
        self.seen: dict[int, nn.Module] = {}
        self._below: set[int] = set()
        self._roots: list[tuple[nn.Module, bool]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._then: list[Any] = []
        self._owners: list[nn.Module] = []  # of the dictionaries
        self._versions: list[int] = []
        self._partial: frozenset[int] | set[int] = frozenset()  # of which dictionaries only some entries are noted
        self._loose: dict[int, list[Any]] = {}  # entries that were taken, by the place of their dictionary
        self._hooks: list[int] = []
        self._buffers: list[Buffer] = []
        self._unchanged: list[Buffer] = []  # those of which the forward left no copy
        self._late = False
        self._beside, self._taking = taking, None
        self._region = taking.region
        self.weights: list[torch.Tensor] = []
        self.weight_versions: list[int] = []
        for root, below in roots:
            self.add(root, below)
        self._since = version_of_dict({})

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._below

    def add(self, root: nn.Module, below: bool = True) -> None:
        """Notes a module, with all below it or alone; for the region around too, whose replay runs it as well."""
        key = id(root)
        if key in self._below or (not below and key in self.seen):
            return
        if self._outer is not None:
            self._outer.add(root, below)
        if self._since:  # up to here; the first look at an object's attributes makes their dictionary
            self._written = range(self._since, version_of_dict({}))
        self._roots.append((root, below))
        if below:
            modules, tree = _modules_below(root)
            weights = modules
            if self.seen:
                weights = [module for module in modules if id(module) not in self._below]
                new = [module for module in weights if id(module) not in self.seen]
                modules, tree = new, tree.without(modules, new) if new else tree
            self._below.update(map(id, weights))
        else:
            modules, weights, tree = [root], [], _alone(root)
        self.seen.update(zip(map(id, modules), modules, strict=True))
        if modules:
            self._read(modules, tree)
        parameters = map(_parameters_of, map(_dict_of, weights))
        found = [*filter(_is_there, _flat(map(_values_of, parameters)))]
        if not _ORDINARY.issuperset(map(type, found)):
            found = [weight for weight in found if type(weight) not in _LAZY and _torch.is_parameter(weight)]
        self.weights += found
        self.weight_versions += map(version_of, found)

    def _read(self, modules: list[nn.Module], tree: _Tree) -> None:
        own: list[dict[str, Any]] = [*map(_dict_of, modules)]
        each = [*map(_tables_of, own)]
        start, size = len(self._dicts), len(own)
        dicts = [*own, *_flat(each)]
        versions = [*map(version_of_dict, dicts)]
        self._dicts += dicts
        self._then += map(dict.copy, dicts)
        self._versions += versions
        if self._written:
            early = [i for i, version in enumerate(versions, start) if version in self._written]
            self._early.update((i, dict(self._dicts[i])) for i in early)
        self._owners += [*modules, *_flat(map(itertools.repeat, modules, itertools.repeat(len(_TABLES))))]
        if versions[:size] != tree.versions:
            tree.look_at(own, versions[:size])
        known = len(self._buffers)
        if self._taking is not None:
            self._taking.written = self._written
        special = tree.special
        if tree.tuples and not PLAIN.issuperset(map(type, _flat([own[i][name] for i, name in tree.tuples]))):
            special = [*special, *tree.tuples]
        for i, name in special:
            self._take(start + i, name, f"attribute '{name}' of {type(modules[i]).__name__}")
        for i, (parameters, buffers, _, before, after) in enumerate(each):
            if buffers:
                self._note_buffers(start + size + 5 * i + 1, modules[i], buffers, start + i)
            if before or after:
                self._note_hooks(start + size + 5 * i + 3, modules[i], own[i])
            if not _ORDINARY.issuperset(map(type, parameters.values())):
                self._note_others(start + size + 5 * i, modules[i], parameters)
        if new := self._buffers[known:]:
            with torch.no_grad():
                tensors = [one.tensor for one in new if one.tensor is not None]
                for one, noted in zip(new, note(tensors), strict=True):
                    one.then = noted
        if tree.managed:
            self._leave_to_wrappers(tree, start, size)
        taking = self._taking
        if taking is not None:
            if taking.generators and self._add_generators is not None:
                self._add_generators(taking.generators)
            taking.generators, taking.modules = [], []

    def _take(self, place: int, name: str, label: str) -> None:
        """Takes an entry of a dictionary."""
        value = self._then[place][name]
        if is_plain_tuple(value) or type(value) in _LAZY or (isinstance(value, torch.Tensor) and value.is_inference()):
            return
        if isinstance(value, torch.Tensor) and self._then[place].get("training") and _may_be_written(value):
            self._then[place][name] = buffer = Buffer(value, training=False)
            self._buffers.append(buffer)
            self._loose.setdefault(place, []).append(name)
            return
        if self._taking is None:
            self._taking = Taking(self._region, None, beside=self._beside)
            self._taking.written = self._written
        taken = self._taking.take(value, label, REACHED, inside=True)
        if taken is not value:
            self._then[place][name] = taken
            self._loose.setdefault(place, []).append(name)

    def _note_buffers(self, place: int, module: nn.Module, buffers: dict[str, Any], own: int) -> None:
        training = vars(module).get("training", True)
        for name, value in buffers.items():
            if value is None:
                continue
            if type(value) in _LAZY or not value.numel():
                self._late = True  # to which the first call gives memory
            elif value.is_inference() or _torch.is_emptied(value):
                continue
            elif value.requires_grad:
                self._take(place, name, f"buffer '{name}' of {type(module).__name__}")
            elif training or _is_small(value):
                self._then[place][name] = buffer = Buffer(value, training, own)
                self._buffers.append(buffer)
                self._loose.setdefault(place, []).append(name)
            else:
                self.weights.append(value)
                self.weight_versions.append(value._version)

    def _note_hooks(self, place: int, module: nn.Module, own: dict[str, Any]) -> None:
        more = [own[name] for name in _MORE_HOOKS if name in own]
        self._hooks += [place, place + 1, *range(len(self._dicts), len(self._dicts) + len(more))]
        self._dicts += more
        self._then += map(dict.copy, more)
        self._versions += map(version_of_dict, more)
        self._owners += [module] * len(more)

    def _note_others(self, place: int, module: nn.Module, parameters: dict[str, Any]) -> None:
        """Takes parameters that are no `Parameter`: lent by `functional_call`, of a subclass, or without memory yet."""
        for name, value in parameters.items():
            if type(value) in _LAZY:
                self._late = True
            elif value is not None and not _torch.is_parameter(value):
                self._take(place, name, f"parameter '{name}' of {type(module).__name__}")

    def _leave_to_wrappers(self, tree: _Tree, start: int, size: int) -> None:
        """Forgets of the modules in a wrapper all but whether they train, and buffers."""
        self._partial = {*self._partial}
        for i in tree.managed:
            own = self._then[start + i]
            self._then[start + i] = {"training": own["training"]} if "training" in own else {}
            for table in (0, 2, 3, 4):
                self._then[start + size + 5 * i + table] = {}
            self._partial |= {start + i, *(start + size + 5 * i + table for table in (0, 2, 3, 4))}

    # --- the forward is over ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """After the forward: drops copies of what did not change, and hooks that have removed themselves."""
        self._beside = None
        if self._late:  # a LazyModule is not what it was before its first call
            roots, self._roots = self._roots, []
            again = Modules(Taking(self._region, None), None, roots=roots)
            for name in self.__slots__:
                setattr(self, name, getattr(again, name))
        for place, noted in self._early.items():
            self._note_end(place, noted)
        for place in self._hooks:
            table = self._dicts[place]
            self._then[place] = {key: hook for key, hook in self._then[place].items() if key in table}
        if self._buffers:
            differs = map(operator.ne, self._versions, map(version_of_dict, self._dicts))
            written = {*self._early, *itertools.compress(itertools.count(), differs)}
            for buffer in self._buffers:
                buffer.settle(written)
        self._unchanged = [buffer for buffer in self._buffers if buffer.then is None]
        if self._taking is not None:
            self._taking.settle()

    def _note_end(self, place: int, noted: dict[Any, Any]) -> None:
        """Has a replay find in a dictionary what the forward left there.

        The function had written to it before its module was called, so nobody knows what the forward had found.
        """
        entries, then = self._dicts[place], self._then[place]
        same = {name for name, value in entries.items() if name in noted and noted[name] is value}
        self._then[place] = {name: then[name] if name in same else value for name, value in entries.items()}
        gone = [one for name, one in then.items() if name not in same and type(one) is Buffer]
        self._buffers = [buffer for buffer in self._buffers if not any(buffer is one for one in gone)]
        if place in self._loose:
            self._loose[place] = [name for name in self._loose[place] if name in same]
        for name in entries.keys() - same:
            value = entries[name]
            if entries is vars(self._owners[place])["_buffers"] and value is not None and not value.requires_grad:
                self._then[place][name] = buffer = Buffer(value, training=True)
                (buffer.then,) = note([value])
                self._buffers.append(buffer)
                self._loose.setdefault(place, []).append(name)
            elif not isinstance(value, (nn.Module, Parameter)) and type(value) not in PLAIN:
                self._take(place, name, f"'{name}' of {type(self._owners[place]).__name__}")
        self._versions[place] = version_of_dict(entries)
        if place in self._partial:
            self._then[place] = {}

    def changed(self) -> str:
        """Names a weight or buffer that has been changed in place since, with its versions; "" without one."""
        now = [*map(version_of, self.weights)]
        if now != self.weight_versions:
            for tensor, then, version in zip(self.weights, self.weight_versions, now, strict=True):
                if version != then:
                    return changed_weight(self._name_of(tensor), self._region, then, version)
        for buffer in self._unchanged:
            tensor = buffer.tensor
            if tensor is not None and buffer.changed():
                return changed_weight(self._name_of(tensor), self._region, buffer.version, tensor._version)
        return "" if self._taking is None else self._taking.changed()

    def check(self) -> None:
        """Raises a `ChangedError` if a weight, or a buffer without noted values, has been changed in place since."""
        same = [*map(version_of, self.weights)] == self.weight_versions and not any(
            map(Buffer.changed, self._unchanged)
        )
        if not same or (self._taking is not None and self._taking.changed()):
            raise errors.ChangedError(self.changed())

    def put_back(self) -> frozenset[int]:
        """The storages of the buffers whose values a replay puts back."""
        buffers = [buffer.was() for buffer in self._buffers if buffer.then is not None]
        return frozenset(_torch.storage_id(tensor) for tensor in buffers if tensor is not None)

    def _name_of(self, tensor: torch.Tensor) -> str:
        return name_in(self.seen.values(), tensor) or "a weight"

    # --- replay -----------------------------------------------------------------------------------------------------

    def open(self, exchange: Exchange) -> Container[int]:
        """Has an exchange put back what differs; returns the places of the dictionaries that it looks after."""
        now = exchange.versions = [*map(version_of_dict, self._dicts)]
        if now == self._versions and not self._loose:
            return ()
        places: list[int] = []
        for i, (entries, then) in enumerate(zip(self._dicts, self._then, strict=True)):
            names = self._loose.get(i)
            if names is None and now[i] == self._versions[i]:
                continue
            content = then
            if names is not None:
                content = dict(then)
                for name in names:
                    content[name] = _opened(then[name], entries.get(name), exchange, self._owners[i])
            content = self._complete(i, entries, content)
            if names is not None:
                exchange.contents[i] = content
            if not alike(entries, content) or exchange.is_busy(self._owners[i]):
                exchange.want(self._owners[i], entries, content)
                places.append(i)
        return frozenset(places)

    def _complete(self, place: int, entries: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
        """Returns what a dictionary is to hold: what was noted, and of what is left alone the present entries."""
        if place in self._partial:
            return {**entries, **content}
        if "_parameters" in content:
            left = {key: one for key, one in entries.items() if key in _LEFT}
            return left | {key: one for key, one in content.items() if key not in _LEFT}
        return content

    def undo(self, exchange: Exchange) -> None:
        """Makes dictionaries that a replay found as the forward had, and has changed, what they were."""
        now = [*map(version_of_dict, self._dicts)]
        if now == exchange.versions:
            return
        for i, (before, after) in enumerate(zip(exchange.versions, now, strict=False)):
            if before != after and i not in exchange.places:
                content = exchange.contents.get(i)
                if content is None:
                    content = self._complete(i, self._dicts[i], self._then[i])
                if not alike(self._dicts[i], content):
                    put(self._dicts[i], content)

    def versions(self) -> list[int]:
        """The versions of all dictionaries."""
        return [*map(version_of_dict, self._dicts)]

    def rewind(self) -> None:
        """Makes the modules what they were before a forward that has failed and will run again."""
        exchange = Exchange(self._region)
        for i, (entries, then) in enumerate(zip(self._dicts, self._then, strict=True)):
            if i in self._early:
                continue
            content = dict(then)
            for name in self._loose.get(i, ()):
                one = then[name]
                now = entries.get(name)
                mine = type(one) is Buffer and one.tensor is now
                content[name] = now if mine else _opened(one, now, exchange, None)
            put(entries, self._complete(i, entries, content))
        with torch.no_grad(), _torch.versions_kept():
            for buffer in self._buffers:
                if buffer.tensor is not None and buffer.then is not None:
                    buffer.tensor.copy_(buffer.then[0])


def _opened(value: Any, now: Any, exchange: Exchange, owner: nn.Module | None) -> Any:
    if type(value) is not Buffer:
        return open_in(now, value, exchange)
    if value.then is None:
        return now if _is_memory_of(now, value.tensor) else value.tensor
    there = value.was()
    if there is not None:
        exchange.want_values(owner, there, value.then)
        return there
    exchange.copies.append(value.then[0].clone())  # its module holds another one now, and nobody this
    return exchange.copies[-1]


def _is_memory_of(now: Any, tensor: Any) -> bool:
    return isinstance(now, torch.Tensor) and _torch.storage_id(now) == _torch.storage_id(tensor)


def name_in(modules: Iterable[nn.Module], tensor: torch.Tensor) -> str:
    """Names a parameter or buffer of some modules; "" if it is none."""
    storage = _torch.storage_id(tensor)
    for module in modules:
        for kind in ("parameter", "buffer"):
            for name, value in vars(module)[f"_{kind}s"].items():
                if value is not None and type(value) not in _LAZY and _torch.storage_id(value) == storage:
                    return f"{kind} '{name}' of {type(module).__name__}"
    return ""


# --- modules that are called ------------------------------------------------------------------------------------------


def _called(module: nn.Module, _: Any) -> None:
    """A hook of all modules, while a region runs whose function is no module."""
    if torch.compiler.is_compiling():  # first: the compiler looks into hooks
        return
    modules = thread.modules
    if modules is not None and module not in modules:
        modules.add(module)


_HOOK = "torch_recompute"
_watching = 0
_lock = threading.Lock()


class Watching:
    """A block in which the modules that this thread calls are added to those of a region.

    The replay of such a region is in one too, with nothing to add to: what is compiled in it is then what was compiled
    in the forward.
    """

    __slots__ = ("_before", "_modules")

    def __init__(self, modules: Modules | None) -> None:
        self._modules = modules

    def __enter__(self) -> None:
        global _watching
        self._before, thread.modules = thread.modules, self._modules
        with _lock:
            _watching += 1
            if _watching == 1:
                watch_calls(_HOOK, _called)

    def __exit__(self, *_: object) -> None:
        global _watching
        thread.modules = self._before
        with _lock:
            _watching -= 1
            if not _watching:
                unwatch_calls(_HOOK)
