"""The guard of a region's own modules: a replay finds in them what the forward found, and leaves what it found.

**Which modules.** A region's own modules are its function, with all below it, if that is a module; else those that the
function calls, with all below each: a region pays for what it runs, not for the model around it. What a function merely
holds (the object of a method, a module in a closure) is looked at alone, without what is below it: it may be the whole
model. Modules that cannot be seen being called (`module.forward(x)`, compiled code) behave as under PyTorch's
checkpoint. (`Modules`)

**What of them.** Attributes, parameters, buffers, children and forward hooks, each as the object that was there,
dictionary by dictionary. What differs at the replay is put back for its length (`exchange.py`); a module in which
nothing differs is not written to. What the module's own forward assigns is undone after a replay, too. (`Contents`)

**Values of buffers.** Buffers change in place, and `native_batch_norm` in training does not even raise their versions.
So their values are copied at the call and written into the buffers' own memory for the length of a replay: they are
updated once. A copy is dropped after the forward where a version says that the buffer did not change. Large buffers of
modules in evaluation are not copied; a change of one is an error. (`Buffer`)

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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

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
_FIVE = itertools.repeat(len(_TABLES))
_flat = itertools.chain.from_iterable
_present: Callable[[Any], Any] = weakref.ref.__call__
_is_there = functools.partial(operator.is_not, None)


def _tracks_phases(module: nn.Module) -> bool:
    return any(base.__module__.startswith(_WRAPPERS) for base in type(module).__mro__)


class _Tree:
    """Remembers, from one call to the next, which modules are below one and which attributes have to be taken.

    It holds none of them. A call asks whether the children and the types of attributes are still the same.

    Attributes:
        refs: Weak references to the modules, the root first.
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
        """Returns the tree of `new`, the part of its modules that a region has not seen yet."""
        if len(new) == len(modules):
            return self
        managed = frozenset(id(modules[i]) for i in self.managed)
        if len(new) < len(modules) - 1 or new[0] is modules[0]:
            return _Tree(new, managed)
        if self._rest is None:  # all but the root, which was read alone
            self._rest = _Tree(new, managed)
        return self._rest

    def look_at(self, own: list[dict[str, Any]], versions: list[int]) -> None:
        """Finds the special attributes of some dictionaries, unless all types are those of the last time."""
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
    """A buffer, or a large tensor in an attribute, with its values when the forward began.

    Attributes:
        tensor: The tensor while the forward runs; afterwards its memory, if it has no noted values, else None.
        then: Its values, with their number; None if the forward has left them as they were.
        version: Its version when it was noted.
        was: A weak reference to it.
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


def note_values(buffers: Sequence[Buffer]) -> None:
    """Notes the values of some buffers, those that are alike in one operation."""
    with torch.no_grad():
        tensors = [one.tensor for one in buffers if one.tensor is not None]
        for one, noted in zip(buffers, note(tensors), strict=True):
            one.then = noted


def _may_be_written(tensor: torch.Tensor) -> bool:
    """Whether a plain attribute is a large tensor that a forward may change, as a buffer."""
    large = tensor.layout is torch.strided and not _is_small(tensor)
    return large and not tensor.requires_grad and not _torch.is_emptied(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= SMALL


class OpenedContents(NamedTuple):
    """The dictionaries that an exchange looks after during a replay, and what is to be in some others.

    Attributes:
        versions: The versions of all dictionaries before the replay.
        places: The places of those that the exchange looks after.
        contents: What is to be in those of which entries were opened.
    """

    versions: list[int]
    places: Container[int] = ()
    contents: Mapping[int, dict[Any, Any]] = MappingProxyType({})


class Contents:
    """The dictionaries of some modules and what they held: notes it, has it put back for a replay, undoes that.

    A dictionary is known by its place in four lists. PyTorch has a version of each, so one that nobody has written to
    since is not looked at again.
    """

    __slots__ = ("_attributes", "_dicts", "_early", "_opens", "_owners", "_partial", "_then", "_versions")

    def __init__(self) -> None:
        self._attributes: set[int] = set()  # the places of those that hold a module's attributes
        self._dicts: list[dict[Any, Any]] = []
        self._owners: list[nn.Module] = []
        self._then: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._opens: dict[int, list[Any]] = {}  # by place, the names of entries in whose place something opens
        self._partial: set[int] = set()  # the places of those of which some entries alone are noted
        self._early: dict[int, dict[Any, Any]] = {}  # until the forward ends, what those held that were noted too late

    def _note(self, owners: Iterable[nn.Module], dicts: list[dict[Any, Any]], versions: list[int]) -> None:
        self._dicts += dicts
        self._owners += owners
        self._then += map(dict.copy, dicts)
        self._versions += versions

    def _put(self, place: int, name: Any, opens: Any) -> None:
        """Has a replay open something in the place of an entry."""
        self._then[place][name] = opens
        self._opens.setdefault(place, []).append(name)

    def _note_part(self, place: int, names: Container[Any] = ()) -> None:
        """Forgets of a dictionary all but some entries."""
        self._then[place] = {name: one for name, one in self._then[place].items() if name in names}
        self._opens.pop(place, None)
        self._partial.add(place)

    def _note_again(self, place: int) -> list[Any]:
        """Notes what an early dictionary holds now; returns the names of the entries that are other objects."""
        entries, then, noted = self._dicts[place], self._then[place], self._early[place]
        same = {name for name, value in entries.items() if name in noted and noted[name] is value}
        self._then[place] = {name: then[name] if name in same else value for name, value in entries.items()}
        self._opens[place] = [name for name in self._opens.get(place, ()) if name in same]
        self._versions[place] = version_of_dict(entries)
        return [name for name in entries if name not in same]

    def _complete(self, place: int, content: dict[Any, Any]) -> dict[Any, Any]:
        """Returns all that a dictionary is to hold: what was noted, and of what no replay depends on, what is there."""
        entries = self._dicts[place]
        if place in self._partial:
            return {**entries, **content}
        if place not in self._attributes:
            return content
        left = {key: one for key, one in entries.items() if key in _LEFT}
        return left | {key: one for key, one in content.items() if key not in _LEFT}

    def versions(self) -> list[int]:
        """The versions of all dictionaries."""
        return [*map(version_of_dict, self._dicts)]

    def open(self, exchange: Exchange) -> OpenedContents:
        """Has an exchange put back what differs."""
        now = [*map(version_of_dict, self._dicts)]
        if now == self._versions and not self._opens:
            return OpenedContents(now)
        places, contents = set[int](), dict[int, dict[Any, Any]]()
        for i, (entries, then) in enumerate(zip(self._dicts, self._then, strict=True)):
            names, owner = self._opens.get(i), self._owners[i]
            if names is None and now[i] == self._versions[i]:
                continue
            content = dict(then)
            for name in names or ():
                content[name] = _opened(then[name], entries.get(name), exchange, owner)
            content = self._complete(i, content)
            if names:
                contents[i] = content
            ordered = i not in self._attributes
            if not alike(entries, content, ordered) or exchange.is_busy(owner):
                exchange.want(owner, entries, content, ordered)
                places.add(i)
        return OpenedContents(now, places, contents)

    def undo(self, opened: OpenedContents, versions: list[int] | None) -> None:
        """Makes dictionaries that a replay found as the forward had, and has changed, what they were.

        Args:
            opened: What `open` returned.
            versions: The versions when the replay began, if they are not those of `opened`.
        """
        now = [*map(version_of_dict, self._dicts)]
        if now == (versions or opened.versions):
            return
        for i, (before, after) in enumerate(zip(versions or opened.versions, now, strict=False)):
            if before != after and i not in opened.places:
                content = opened.contents.get(i)
                content = self._complete(i, self._then[i]) if content is None else content
                ordered = i not in self._attributes
                if not alike(self._dicts[i], content, ordered):
                    put(self._dicts[i], content, ordered)

    def rewind(self) -> None:
        """Makes the dictionaries what they were before a forward that has failed and will run again."""
        exchange = Exchange("")
        for i, (entries, then) in enumerate(zip(self._dicts, self._then, strict=True)):
            if i in self._early:
                continue
            content = dict(then)
            for name in self._opens.get(i, ()):
                one, now = then[name], entries.get(name)
                mine = type(one) is Buffer and one.tensor is now
                content[name] = now if mine else _opened(one, now, exchange, None)
            put(entries, self._complete(i, content), ordered=i not in self._attributes)


AddGenerators = Callable[[Iterable[torch.Generator]], None]


class Modules(Contents):
    """Finds a region's own modules, and notes them when the region is entered, or when they are first called.

    A function may write to a module before it calls it; then the module is noted too late, and nobody knows what the
    forward had found in it. Each of its dictionaries that has been written to by then (its version says so) is noted
    again when the forward ends: a replay begins with what the forward left, as under PyTorch's checkpoint.

    Attributes:
        weights: Their parameters, and the buffers that they do not train. The region's function holds them anyway.
        weight_versions: Their versions.
        seen: The modules, by their identity.
    """

    __slots__ = (
        *("_add_generators", "_below", "_beside", "_buffers", "_hooks", "_late", "_outer", "_region", "_roots"),
        *("_since", "_taking", "_unchanged", "_written", "seen", "weight_versions", "weights"),
    )

    def __init__(
        self,
        taking: Taking,
        outer: Modules | None,
        add: AddGenerators | None = None,
        roots: Iterable[tuple[nn.Module, bool]] = (),
    ) -> None:
        super().__init__()
        self._outer, self._add_generators = outer, add
        self._region, self._beside = taking.region, taking
        self._taking: Taking | None = None  # what takes tensors, containers and objects in attributes
        self._buffers: list[Buffer] = []
        self._unchanged: Sequence[Buffer] = ()  # those of which the forward left no copy
        self._hooks: list[int] = []  # the places of tables of hooks, of which some may have removed themselves
        self._late = False  # whether the first call gives memory to parameters
        self._roots: list[tuple[nn.Module, bool]] = []
        self._below: set[int] = set()  # the modules that were added with all below them
        self.seen: dict[int, nn.Module] = {}
        self.weights: list[torch.Tensor] = []
        self.weight_versions: list[int] = []
        self._since = 0  # a version of dictionaries: that of one that is made as the forward begins
        self._written = range(0)  # the versions of dictionaries that have been written to since
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
        if self._since:  # up to here: the first look at an object's attributes makes their dictionary
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
        """Notes the attributes of some modules, then their tables of parameters, buffers, children and hooks."""
        own: list[dict[str, Any]] = [*map(_dict_of, modules)]
        each = [*map(_tables_of, own)]
        start, size, known = len(self._dicts), len(own), len(self._buffers)
        self._attributes.update(range(start, start + size))
        dicts = [*own, *_flat(each)]
        versions = [*map(version_of_dict, dicts)]
        self._note([*modules, *_flat(map(itertools.repeat, modules, _FIVE))], dicts, versions)
        if self._written:
            early = [i for i, version in enumerate(versions, start) if version in self._written]
            self._early.update((i, dict(self._dicts[i])) for i in early)
        if versions[:size] != tree.versions:
            tree.look_at(own, versions[:size])
        if self._taking is not None:
            self._taking.written = self._written
        special = tree.special
        if tree.tuples and not PLAIN.issuperset(map(type, _flat([own[i][name] for i, name in tree.tuples]))):
            special = [*special, *tree.tuples]
        for i, name in special:
            self._take(start + i, name)
        for i, (parameters, buffers, _, before, after) in enumerate(each):
            place = start + size + len(_TABLES) * i  # of the first table
            if buffers:
                self._note_buffers(place + 1, buffers, start + i)
            if before or after:
                self._note_hooks(place + 3, own[i])
            if not _ORDINARY.issuperset(map(type, parameters.values())):
                self._note_others(place, parameters)
        if new := self._buffers[known:]:
            note_values(new)
        for i in tree.managed:  # a wrapper of torch.distributed looks after all but these
            self._note_part(start + i, ("training",))
            for table in (0, 2, 3, 4):
                self._note_part(start + size + len(_TABLES) * i + table)
        if self._taking is not None:
            if self._taking.generators and self._add_generators is not None:
                self._add_generators(self._taking.generators)
            self._taking.generators, self._taking.modules = [], []

    def _take(self, place: int, name: str) -> None:
        """Takes an entry of a dictionary: a tensor, container, object or generator."""
        value = self._then[place][name]
        if is_plain_tuple(value) or type(value) in _LAZY or (isinstance(value, torch.Tensor) and value.is_inference()):
            return
        if isinstance(value, torch.Tensor) and self._then[place].get("training") and _may_be_written(value):
            self._buffers.append(Buffer(value, training=False))
            self._put(place, name, self._buffers[-1])
            return
        if self._taking is None:
            self._taking = Taking(self._region, None, beside=self._beside)
            self._taking.written = self._written
        owner, entries = self._owners[place], self._dicts[place]
        parameters, buffers = owner.__dict__["_parameters"], owner.__dict__["_buffers"]
        kind = "parameter" if entries is parameters else "buffer" if entries is buffers else "attribute"
        label = f"{kind} '{name}' of {type(owner).__name__}"
        taken = self._taking.take(value, label, REACHED, inside=True)
        if taken is not value:
            self._put(place, name, taken)

    def _note_buffers(self, place: int, buffers: dict[str, Any], own: int) -> None:
        training, then = self._dicts[own].get("training", True), self._then[place]
        names: list[str] = []
        for name, value in buffers.items():
            if value is None:
                continue
            if type(value) in _LAZY or not value.numel():
                self._late = True  # to which the first call gives memory
            elif value.is_inference() or _torch.is_emptied(value):
                continue
            elif value.requires_grad:
                self._take(place, name)
            elif training or _is_small(value):
                then[name] = buffer = Buffer(value, training, own)
                self._buffers.append(buffer)
                names.append(name)
            else:
                self.weights.append(value)
                self.weight_versions.append(value._version)
        if names:  # as `_put`, without its calls: a model has many buffers
            self._opens.setdefault(place, []).extend(names)

    def _note_hooks(self, place: int, own: dict[str, Any]) -> None:
        more = [own[name] for name in _MORE_HOOKS if name in own]
        self._hooks += [place, place + 1, *range(len(self._dicts), len(self._dicts) + len(more))]
        self._note([self._owners[place]] * len(more), more, [*map(version_of_dict, more)])

    def _note_others(self, place: int, parameters: dict[str, Any]) -> None:
        """Takes parameters that are no `Parameter`: lent by `functional_call`, of a subclass, or without memory yet."""
        for name, value in parameters.items():
            if type(value) in _LAZY:
                self._late = True
            elif value is not None and not _torch.is_parameter(value):
                self._take(place, name)

    # --- the forward is over ----------------------------------------------------------------------------------------

    def settled(self) -> Modules:
        """After the forward: drops copies of what did not change; returns what replays go by, for most this itself."""
        if self._late:  # a LazyModule is not what it was before its first call
            again = Modules(Taking(self._region, None), None, roots=self._roots)
            again._late = False
            return again.settled()
        self._beside = None
        for place in self._early.keys() - self._partial:  # a wrapper looks after what else is in those
            self._note_left(place)
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
        self._early = {}  # which holds all that was there, also what may lead to the graph
        return self

    def _note_left(self, place: int) -> None:
        """Notes what the forward has left in a dictionary that was written to too early."""
        before = self._then[place]
        names = self._note_again(place)
        now = self._then[place]
        gone = [id(one) for name, one in before.items() if type(one) is Buffer and now.get(name) is not one]
        if gone:
            self._buffers = [buffer for buffer in self._buffers if id(buffer) not in gone]
        is_buffers = self._dicts[place] is self._owners[place].__dict__["_buffers"]
        for name in names:
            value = self._then[place][name]
            if is_buffers and value is not None and not value.requires_grad:
                self._buffers.append(Buffer(value, training=True))
                note_values(self._buffers[-1:])
                self._put(place, name, self._buffers[-1])
            elif not isinstance(value, (nn.Module, Parameter)) and type(value) not in PLAIN:
                self._take(place, name)

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

    def rewind(self) -> None:
        """Makes the modules what they were before a forward that has failed and will run again."""
        super().rewind()
        with torch.no_grad(), _torch.versions_kept():
            for buffer in self._buffers:
                if buffer.tensor is not None and buffer.then is not None:
                    buffer.tensor.copy_(buffer.then[0])


def _opened(value: Any, now: Any, exchange: Exchange, owner: nn.Module | None) -> Any:
    """Returns what a replay finds in the place of an entry that holds `now`."""
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
