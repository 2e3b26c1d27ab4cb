"""The closure scan: everything a region's function reaches besides its arguments, since a replay reads it again.

It finds a closure's cells, the object of a bound method, the parts of a `functools.partial`, the globals
that the function names, and the modules among all these. What cannot be seen (attributes of plain objects below the
first level, globals used by functions that the function calls) is not guarded, and the manual says so.

Cells are special: `for layer in layers: x = recompute(lambda x: layer(x))(x)` rebinds one cell, so every replay would
run the last layer, and a tensor deleted by the caller would be missing. So a closure is taken apart: the contents its
cells had in forward are kept, its tensors like arguments of the region, and a replay runs the same code over fresh
cells; the caller's own cells are never written. A cell that the function itself writes (`nonlocal`) is its own state
and left alone. Looking never calls user code (no `getattr` on user objects beyond `__dict__`).

A module is scanned once (`_Scan`); each call takes a `Snapshot` of what it and the modules below it hold, object by
object where a dictionary has changed since the last look. Design note 015 says what that costs.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .._torch import version_of_dict
from .._torch.modes import call
from .._torch.tensors import apart, wants_grad
from .arguments import CONTAINERS, PLAIN, Call, is_config


class _Code(NamedTuple):
    """The globals that a code object names and the cells that it writes, found once."""

    names: tuple[str, ...]
    writes: frozenset[str]
    code: types.CodeType  # keeps the key of the cache alive


_codes: dict[int, _Code] = {}
_NO_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _look(code: types.CodeType, scope: dict[str, Any]) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        steps = [(i.opname, str(i.argval)) for i in dis.get_instructions(code)]
        writes = {name for op, name in steps if op in ("STORE_DEREF", "DELETE_DEREF")}
        read = {name for op, name in steps if op in ("LOAD_GLOBAL", "LOAD_NAME")}  # `co_names` has attributes, too
        names = {name for name in read if name in scope and not isinstance(scope[name], _NO_STATE)}
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                inner = _look(const, scope)
                names.update(inner.names)
                writes.update(inner.writes)
        found = _codes[id(code)] = _Code(tuple(sorted(names)), frozenset(writes), code)
    return found


class Held:
    """A function taken apart: its code, and what its closure cells held at one moment.

    The function object is not kept, since it would keep the tensors in its cells alive. `cells` holds, for each free
    variable, a `Held` (a function), a `Cell` (one that the function writes itself), an index into the closure's
    tensors wrapped in `Hole`, or the contents.
    """

    __slots__ = ("attributes", "cells", "code", "defaults", "kwdefaults", "name", "qualname", "scope")

    def __init__(self, fn: types.FunctionType, cells: list[Any]) -> None:
        self.code = fn.__code__
        self.scope = fn.__globals__
        self.name, self.qualname = fn.__name__, fn.__qualname__
        self.defaults = fn.__defaults__
        self.kwdefaults = fn.__kwdefaults__
        self.attributes = fn.__dict__
        self.cells = cells

    def function(self, tensors: Sequence[torch.Tensor]) -> types.FunctionType:
        """The function again, over fresh cells; `tensors` are the contents of the cells that held tensors."""
        cells = tuple([_cell(contents, tensors) for contents in self.cells])
        new = types.FunctionType(self.code, self.scope, self.name, self.defaults, cells)
        new.__qualname__ = self.qualname  # by which saved calls are known
        if self.kwdefaults:
            new.__kwdefaults__ = self.kwdefaults
        if self.attributes:
            new.__dict__.update(self.attributes)
        return new


class Hole(NamedTuple):
    """Stands for a tensor that a cell held: `tensors[number]`."""

    number: int


def _cell(contents: Any, tensors: Sequence[torch.Tensor]) -> types.CellType:
    kind = type(contents)
    if kind is types.CellType:
        return contents
    if kind is Held:
        return types.CellType(contents.function(tensors))
    if kind is Hole:
        return types.CellType(tensors[contents.number])
    return types.CellType() if contents is EMPTY else types.CellType(contents)


EMPTY = object()
_PLAIN = frozenset({int, float, bool, str, type(None), types.ModuleType, type})


def content_of(cell: types.CellType) -> Any:
    """The contents of a closure's cell; `EMPTY` where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


class Captured(NamedTuple):
    """A tensor that a function reaches.

    Attributes:
        kind: "parameter" or "buffer" of `owner`; "" for a tensor whose `name` says all.
        name: Its name there.
        owner: The module it belongs to.
        tensor: The tensor.
        surely: Whether the function is known to read it; not so for what else belongs to a module in a closure,
            which may be the whole model.
        training: Whether its owner is in training mode.
    """

    kind: str
    name: str
    owner: type
    tensor: torch.Tensor
    surely: bool
    training: bool

    def label(self) -> str:
        """Returns its name, for errors."""
        return f"{self.kind} '{self.name}' of {self.owner.__name__}" if self.kind else self.name


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_TABLES = ("_parameters", "_buffers", "_modules")
_NOT_READ = _OF_EVERY_MODULE - {"training"}  # which an OptimizedModule does not have
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
MANY = 1000
"""The most entries that a container may have to be put back; of a larger one only the number of entries is compared."""

_dict_of, values_of = operator.attrgetter("__dict__"), operator.methodcaller("values")
_parameters_in, _buffers_in, _children_in = map(operator.itemgetter, _TABLES)
_hooks_before, _hooks_after = map(operator.itemgetter, ("_forward_pre_hooks", "_forward_hooks"))
_flat = itertools.chain.from_iterable
_present: Callable[[Any], Any] = weakref.ref.__call__
Values = list[Any]
"""What several dictionaries held at one moment, one after the other."""


def _reader(keys: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Returns what reads these keys of a dictionary."""
    return operator.itemgetter(*keys) if len(keys) > 1 else lambda entries: tuple([entries[key] for key in keys])


Undo = tuple[Any, ...]
"""A function and its arguments."""


def undo(kept: Iterable[Undo]) -> None:
    """Calls each function."""
    for fn, *args in kept:
        fn(*args)


class Aside(NamedTuple):
    """A value that a module held, its tensors without their history, which might come to lead back to the region.

    Attributes:
        was: The tensor, if it is one.
        held: A tensor, or a container or plain object with some, as the arguments of a call are held.
        grads: Whether they require grad, for those in it that have no history now.
    """

    was: weakref.ref[torch.Tensor] | None
    held: Call
    grads: dict[int, bool]

    def there(self) -> Any:
        """The tensor that was held, if it was one and somebody else still holds it."""
        was = None if self.was is None else self.was()
        return self if was is None else was

    def open(self) -> Any:
        """The same, for a replay."""
        leaves = list(self.held.leaves)
        for i, grad in self.grads.items():
            leaves[i] = leaves[i].detach().requires_grad_(grad)
        return self.held.arguments(leaves)[0][0]


_LOOSE = (torch.Tensor, tuple)


def set_apart(value: Any) -> Any:
    """A value of a module as it may be held: itself, where no tensor in it has a history."""
    held, grads = Call((value,), {}), dict[int, bool]()
    for i in held.tensors:
        tensor = held.leaves[i]
        held.leaves[i] = tensor if type(tensor) is nn.Parameter else apart(tensor)
        if held.leaves[i] is not tensor:
            grads[i] = wants_grad(tensor)
    return Aside(weakref.ref(value) if isinstance(value, torch.Tensor) else None, held, grads) if grads else value


def _write(entries: dict[str, Any], then: dict[str, Any], whole: bool = True) -> None:
    """Has a dictionary hold what it held; if that is the whole, nothing else."""
    for key in [key for key in entries if key not in then] if whole else ():
        del entries[key]
    for key, value in then.items():
        now = entries.get(key, EMPTY)
        if type(value) is Aside:
            if now is not value.there():
                entries[key] = value.open()
        elif now is not value:
            entries[key] = value


class Snapshot:
    """The contents of the modules below one: their parameters, buffers, children and attributes, each by its identity.

    Where no dictionary has changed since the scan was last compared, nothing else is: only what a replay may have to
    put back is read.

    Attributes:
        modules: The modules, the root first.
        own: The values of their attributes when this was made; shared with others where nothing was set aside.
        inside: The values in all their tables.
        dicts: The dictionaries of their attributes, then their tables.
        versions: The versions of these.
        hooked: Whether a module has forward hooks.

    Raises:
        LookupError: They have other names, kinds of attributes or children than the scan found.
    """

    __slots__ = ("_aside", "_full", "dicts", "hooked", "inside", "modules", "own", "scan", "versions")

    def __init__(self, scan: _Scan) -> None:
        self.scan, self._aside = scan, False
        self.modules: list[Any] = [*map(_present, scan.refs)]
        if None in self.modules:
            raise LookupError
        dicts: list[dict[str, Any]] = [*map(_dict_of, self.modules)]
        tables = [*map(_parameters_in, dicts), *map(_buffers_in, dicts), *map(_children_in, dicts)]
        self.dicts, self._full = [*dicts, *tables], [*filter(None, tables)]
        self.versions = versions = [*map(version_of_dict, self.dicts)]
        self.inside: Values = [*_flat(map(values_of, self._full))]
        self.hooked = any(map(_hooks_before, dicts)) or any(map(_hooks_after, dicts))
        then, own = scan.seen
        if versions == then and own is not None:
            self.own = own
            return
        self.own = own = [*_flat(map(call, scan.getters, dicts))]
        if versions != then:
            if [*map(len, self.dicts)] != scan.sizes or [*_flat(self._full)] != scan.names:
                raise LookupError
            if [*map(type, own)] != scan.kinds or [*map(id, self.inside[scan.children :])] != scan.ids:
                raise LookupError
            scan.seen = versions, own if scan.plain(own) else None

    def same(self) -> bool:
        """Whether the modules hold what they held. Not known, and so false, where tensors were set aside."""
        if self._aside:
            return False
        if [*map(version_of_dict, self.dicts)] == self.versions:
            return True
        scan, count = self.scan, len(self.modules)
        if [*map(len, self.dicts)] != scan.sizes:
            return False
        dicts = self.dicts[:count]
        own, inside = _flat(map(call, scan.getters, dicts)), _flat(map(values_of, self._full))
        now = itertools.chain(own, inside, map(_parameters_in, dicts), map(_buffers_in, dicts))
        try:
            return all(map(operator.is_, now, [*self.own, *self.inside, *self.dicts[count : 3 * count]]))
        except KeyError:
            return False

    def hooks(self) -> list[dict[Any, Any]]:
        """The dictionaries that hold forward hooks, of the modules that have some."""
        dicts = self.dicts[: len(self.modules)]
        some = [*filter(_hooks_before, dicts), *filter(_hooks_after, dicts)]
        return [own[name] for own in some for name in _HOOKS if name in own] if some else some

    def set_aside(self, weights: bool, unchanged: Container[int]) -> None:
        """Holds what may get a history without it: after the forward, which knows tensors by their identity.

        Args:
            weights: Whether some parameter is no `Parameter`.
            unchanged: The identities of containers with tensors that hold what they held.
        """
        places = [(self.own, i) for i, x in enumerate(self.own) if isinstance(x, _LOOSE) or id(x) in unchanged]
        if weights:
            places += [(self.inside, place) for place in range(self.scan.weights)]
        for values, place in places:
            held = values[place]
            values[place] = set_apart(held)
            self._aside = self._aside or values[place] is not held

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
        """Each dictionary, what it held, and whether that is the whole; of what is left to a wrapper see `_Scan`."""
        scan, place, count = self.scan, 0, len(self.modules)
        dicts, tables = self.dicts[:count], self.dicts[count:]
        for i, (entries, keys, managed) in enumerate(zip(dicts, scan.keys, scan.managed, strict=True)):
            read = dict(zip(keys, self.own[place : place + len(keys)], strict=True))
            if managed:
                yield entries, {key: read[key] for key in ("training",) if key in read}, False
            else:
                left = {key: one for key, one in entries.items() if key in _NOT_READ}
                yield entries, left | {"_parameters": tables[i], "_buffers": tables[count + i]} | read, True
            place += len(keys)
        place, managed = 0, [*scan.managed, *([False] * count), *scan.managed]  # buffers are not
        for table, size, left in zip(tables, scan.sizes[count:], managed, strict=True):
            if not left:
                held = slice(place, place + size)
                yield table, dict(zip(scan.names[held], self.inside[held], strict=True)), True
            place += size

    def restore(self) -> None:
        """Has the modules hold what they held."""
        for entries, then, whole in self._pairs():
            _write(entries, then, whole)

    def keep(self) -> list[Undo]:
        """Returns calls that make the modules hold again what they hold now."""
        return [
            (_write, entries, dict(entries) if whole else {key: entries[key] for key in then}, whole)
            for entries, then, whole in self._pairs()
        ]


class Contents:
    """The entries of a container or a config, each entry by its identity; of a large one only the number of entries.

    A large list or dict that has grown loses what is new for a replay; other changes of large ones cannot be undone.

    Attributes:
        label: How errors call it.
        large: Whether it is a large one.
        then: What it held when this was made: keys, then values.
        value: The container or config.
    """

    __slots__ = ("_inside", "label", "large", "then", "value")

    def __init__(self, label: str, value: Any) -> None:
        self.label, self.value = label, value
        self._inside = value if isinstance(value, CONTAINERS) else value.__dict__
        self.large = len(self._inside) > MANY
        self.then = self.now()

    def now(self) -> Values:
        """Returns the entries that it holds."""
        inside: Any = self._inside
        if self.large:
            return [len(inside)]
        return [*inside, *inside.values()] if isinstance(inside, dict) else [*inside]

    def same(self) -> bool:
        """Whether it holds what it held."""
        now = self.now()
        if self.large:
            return now == self.then
        return len(now) == len(self.then) and all(map(operator.is_, now, self.then))

    def is_apart(self) -> bool:
        """Whether tensors in it have a history, and it holds what it held, so that it is held in another way."""
        return torch.Tensor in map(type, self.then) and self.same() and set_apart(self.value) is not self.value

    def lost(self) -> bool:
        """Whether it is a large one that has changed in a way that cannot be put back."""
        if not isinstance(self._inside, (list, dict)):
            return self.large and not self.same()
        return self.large and len(self._inside) < self.then[0]

    def _new(self) -> list[Any]:
        """Returns what a large list or dict holds beyond what it held."""
        inside: Any = self._inside
        return [*itertools.islice(inside.items() if isinstance(inside, dict) else inside, self.then[0], None)]

    def _regrow(self, new: Sequence[Any]) -> None:
        """Has a large list or dict hold what it held, and what is new."""
        inside: Any = self._inside
        if isinstance(inside, dict):
            for key, _ in self._new():
                del inside[key]
            inside.update(new)
        elif isinstance(inside, list):
            inside[self.then[0] :] = new

    def restore(self) -> None:
        """Has it hold what it held."""
        if self.large:
            self._regrow(())
        else:
            self._put(self.then)

    def _put(self, values: Values) -> None:
        inside: Any = self._inside
        if isinstance(inside, dict):
            half = len(values) // 2
            _write(cast("dict[str, Any]", inside), dict(zip(values[:half], values[half:], strict=True)))
            return
        inside.clear()
        (inside.update if isinstance(inside, set) else inside.extend)(values)

    def keep(self) -> list[Undo]:
        """Returns calls that make it hold again what it holds now."""
        return [(self._regrow, self._new())] if self.large else [(self._put, self.now())]


class _Scan:
    """The modules below one and the names of what they hold, found once; a later call only reads the values.

    Modules are held weakly, so that a scan keeps nothing alive.

    Attributes:
        root: The module.
        keys: The names that are read of each module: whether it trains, its own attributes.
        kinds: The types of these.
        names: The names in all the tables: those of parameters, then of buffers, then of children.
        refs: The modules.
        getters: What reads `keys` of each module.
        sizes: How many attributes each module has, then how many names each table.
        ids: The identities of the children.
        weights: How many parameters there are, the first values in the tables.
        children: Where among these the children begin.
        buffers: Whether there are any.
        tensors: Where tensors are that are plain attributes.
        tuples: Where tuples are.
        holds: Where tensors, generators, containers and configs are, and what errors call them.
        managed: Which modules belong to a wrapper of torch.distributed (FSDP), which tracks forward and backward by its
            own attributes and replaces parameters; they are left to it.
        seen: The versions of all dictionaries when a snapshot was last compared with this, and the values of `keys`
            then; None for values that might lead back to a module, which nothing here may keep alive.
    """

    __slots__ = (
        *("buffers", "children", "getters", "holds", "ids", "keys", "kinds", "managed", "names", "refs", "root"),
        *("_plain", "seen", "sizes", "tensors", "tuples", "weights"),
    )
    seen: tuple[Sequence[int], Values | None]

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        if scripted := [module for module in modules if isinstance(module, torch.jit.ScriptModule)]:
            from .mismatch import of_torchscript

            raise of_torchscript(scripted[0])
        self.root = weakref.ref(root, functools.partial(_forget, _scans, id(root)))
        self.refs = [*map(weakref.ref, modules)]
        dicts: list[dict[str, Any]] = [*map(_dict_of, modules)]
        self.keys = [tuple(name for name in own if name not in _NOT_READ) for own in dicts]
        self.getters = [*map(_reader, self.keys)]
        tables = [own[name] for name in _TABLES for own in dicts]
        self.names = [*_flat(tables)]
        sizes = [*map(len, tables)]
        self.sizes = [*map(len, dicts), *sizes]
        values = [own[key] for own, keys in zip(dicts, self.keys, strict=True) for key in keys]
        self.kinds = [*map(type, values)]
        self.seen = (), None
        self._plain = all(kind in PLAIN or kind is tuple for kind in self.kinds)
        self.tuples = [i for i, kind in enumerate(self.kinds) if kind is tuple]
        self.weights, self.children = sum(sizes[: len(modules)]), sum(sizes[: 2 * len(modules)])
        self.buffers = self.children > self.weights
        self.ids = [*map(id, _flat(map(values_of, tables[2 * len(modules) :])))]
        inside = {id(m) for wrapper in modules if _tracks_phases(wrapper) for m in wrapper.modules()}
        self.managed = [id(module) in inside for module in modules]
        self.tensors: list[int] = []
        self.holds: list[tuple[int, str]] = []
        places = [(module, key) for module, keys in zip(modules, self.keys, strict=True) for key in keys]
        for place, ((module, key), value) in enumerate(zip(places, values, strict=True)):
            label = f"attribute '{key}' of {type(module).__name__}"
            if isinstance(value, torch.Tensor):
                self.tensors.append(place)
            inner = id(module) not in inside and (isinstance(value, CONTAINERS) or is_config(value))
            if inner or isinstance(value, (torch.Tensor, torch.Generator)):
                self.holds.append((place, label))

    def plain(self, own: Values) -> bool:
        """Whether values of `keys` lead to no other object."""
        return self._plain and PLAIN.issuperset(map(type, _flat(map(own.__getitem__, self.tuples))))


_WRAPPERS = (
    *("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.nn.parallel."),
    "torch_recompute.simulation.fully_sharded",
)


def _tracks_phases(module: nn.Module) -> bool:
    return any(base.__module__.startswith(_WRAPPERS) for base in type(module).__mro__)


_scans: dict[int, _Scan] = {}


def _forget(scans: dict[int, _Scan], key: int, ref: Any) -> None:
    scan = scans.get(key)  # an argument, since the module's names are gone when the interpreter ends
    if scan is not None and scan.root is ref:
        del scans[key]


def snapshot(root: nn.Module) -> Snapshot:
    """Reads what `root` and the modules below it hold now."""
    scan = _scans.get(id(root))
    if scan is not None and scan.root() is root:
        try:
            return Snapshot(scan)
        except LookupError:
            pass  # it has changed since it was scanned
    scan = _scans[id(root)] = _Scan(root)
    return Snapshot(scan)


class Captures:
    """Everything that a function was seen to reach at one moment.

    Attributes:
        modules: Every module reached, submodules included.
        snapshots: What they hold, for each module at which the search began.
        contents: What the containers and configs hold that are attributes of modules.
        generators: `torch.Generator`s in closures and globals, and held by modules.
        tensors: Tensors that closure cells hold, in order.
        others: Further tensors that belong to no module, with what errors call them.
        whole: How many of the modules belong to the function itself, not merely to its closure; they come first.
    """

    whole = 0
    template: Any
    modules: Sequence[torch.nn.Module] = ()
    contents: list[Contents]
    generators: list[torch.Generator]
    tensors: list[torch.Tensor]
    others: list[tuple[str, torch.Tensor]]
    snapshots = contents = generators = tensors = others = _names = cast("Any", ())

    def __init__(self, fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = ()) -> None:
        self.snapshots: list[Snapshot] = []
        self.contents, self.generators, self.tensors, self.others = [], [], [], []
        self._names: list[str] = []
        seen: dict[int, Any] = {}
        self.template = self._function(fn, seen)
        for module in modules:
            self._module(module, seen)

    @property
    def empty(self) -> bool:
        """Whether nothing was found that a replay depends on."""
        return not (self.modules or self.generators or self.others or isinstance(self.template, (Held, _Partial)))

    def keep(self) -> list[Undo]:
        """Returns calls, for `undo`, that make the modules hold again what they hold now."""
        return [one for place in (*self.snapshots, *self.contents) for one in place.keep()]

    def buffers(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """The dictionaries in which the modules hold their buffers."""
        for module in self.modules:
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                yield module._buffers  # pyright: ignore[reportPrivateUsage]

    def parameters(self, cells: bool) -> Iterator[Captured]:
        """Parameters, and other tensors that require grad: in buffers, in closures (`cells`)."""
        yield from parameters_of(self.modules, self.whole)
        yield from self.beside_parameters(grad=True, cells=cells)

    def beside_parameters(self, *, grad: bool, cells: bool) -> Iterator[Captured]:
        """Tensors that are no parameters, and require grad or do not: in buffers, in closures (`cells`)."""
        for i, module in enumerate(self.modules):
            if module._buffers:  # pyright: ignore[reportPrivateUsage]
                for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]
                    if buffer is not None and buffer.requires_grad == grad:
                        yield Captured("buffer", name, type(module), buffer, i < self.whole, module.training)
        for name, tensor in self._named(cells):
            if wants_grad(tensor) == grad:
                yield Captured("", name, type(None), tensor, True, True)

    def _named(self, cells: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if cells:
            yield from zip(self._names, self.tensors, strict=True)
        yield from self.others

    # --- looking --------------------------------------------------------------------------------------------------

    def _function(self, fn: Any, seen: dict[int, Any]) -> Any:
        """Looks at `fn`; returns what `rebuild` makes it from."""
        if isinstance(fn, types.FunctionType):
            return self._closure(fn, seen)
        if isinstance(fn, functools.partial):
            for i, value in enumerate((*fn.args, *fn.keywords.values())):
                self._value(f"argument {i} of a partial", value, seen)
            inner = self._function(fn.func, seen)
            return _Partial(type(fn), inner, fn.args, fn.keywords) if isinstance(inner, Held) else fn
        owner = fn.__self__ if isinstance(fn, types.MethodType) else fn
        if isinstance(owner, torch.nn.Module):
            self._module(owner, seen)
            self.whole = len(self.modules)
        elif owner is not fn or not isinstance(fn, _SIMPLE):
            self._object(owner, seen)
        return fn

    def _closure(self, fn: types.FunctionType, seen: dict[int, Any]) -> Any:
        code = _look(fn.__code__, fn.__globals__)
        for name in code.names:
            self._value(f"global '{name}'", fn.__globals__.get(name), seen)
        if fn.__defaults__ or fn.__kwdefaults__:
            for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
                self._value(f"a default of {fn.__name__}", value, seen)
        if not fn.__closure__:
            return fn
        cells: list[Any] = []
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True):
            value = content_of(cell)
            kind = type(value)
            if name in code.writes:
                cells.append(cell)
            elif kind in _PLAIN:
                cells.append(value)
            elif isinstance(value, torch.Tensor):
                cells.append(Hole(len(self.tensors)))
                self.tensors.append(value)
                self._names.append(f"closure variable '{name}'")
            elif kind is types.FunctionType and id(value) not in seen:
                seen[id(value)] = value
                cells.append(self._closure(value, seen))
            else:
                self._value(f"closure variable '{name}'", value, seen)
                cells.append(value)
        return Held(fn, cells)

    def _object(self, value: Any, seen: dict[int, Any]) -> None:
        for name, attribute in getattr(value, "__dict__", {}).items():
            self._value(f"attribute '{name}'", attribute, seen)

    def _value(self, name: str, value: Any, seen: dict[int, Any]) -> None:
        if isinstance(value, torch.nn.Module):
            self._module(value, seen)
        elif isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen[id(value)] = value
                self.others.append((name, value))
        elif type(value) is torch.Generator:
            self.generators.append(value)
        elif (type(value) in _FOLLOWED or isinstance(value, functools.partial)) and id(value) not in seen:
            seen[id(value)] = value
            if type(value) is types.MethodType and not isinstance(value.__self__, torch.nn.Module):
                self._object(value.__self__, seen)
            for element in _parts(value):
                if type(element) not in _PLAIN:
                    self._value(name, element, seen)

    def _module(self, root: torch.nn.Module, seen: dict[int, Any]) -> None:
        if id(root) in seen:
            return
        found = snapshot(root)
        self.snapshots.append(found)
        modules = found.modules
        if self.modules:
            modules = [*self.modules, *(module for module in modules if id(module) not in seen)]
        self.modules = modules
        seen.update(zip(map(id, modules), modules, strict=True))
        self._look_into(found, seen)

    def _look_into(self, found: Snapshot, seen: dict[int, Any]) -> None:
        """Looks at the attributes of modules: tensors, generators, and what containers and configs hold."""
        for place, name in found.scan.holds:
            value = found.own[place]
            if isinstance(value, (torch.Tensor, torch.Generator)):
                self._value(name, value, seen)
            elif id(value) not in seen:
                seen[id(value)] = value
                inside = Contents(name, value)
                self.contents.append(inside)
                for one in inside.then:
                    if isinstance(one, (torch.Tensor, torch.Generator)) and type(one) is not nn.Parameter:
                        self._value(name, one, seen)


def parameters_of(modules: Sequence[torch.nn.Module], whole: int) -> Iterator[Captured]:
    """The parameters of modules, of which the first `whole` belong to the function itself."""
    for i, module in enumerate(modules):
        for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if parameter is not None:
                yield Captured("parameter", name, type(module), parameter, i < whole, module.training)


_FOLLOWED = frozenset({list, tuple, dict, types.FunctionType, types.MethodType})


def _parts(value: Any) -> Iterator[Any]:
    """Yields the elements of a container or a function."""
    if isinstance(value, types.FunctionType):
        yield from map(content_of, value.__closure__ or ())
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield from (value.values() if isinstance(value, dict) else value)


_SIMPLE = (types.BuiltinFunctionType, type)


class _Partial(NamedTuple):
    """A `functools.partial` around a function that was taken apart."""

    kind: type[functools.partial[Any]]
    inner: Held
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def rebuild(template: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The function that `Captures.template` was made of, with `tensors` in the cells that held tensors."""
    if isinstance(template, Held):
        return template.function(tensors)
    if isinstance(template, _Partial):
        return template.kind(template.inner.function(tensors), *template.args, **template.keywords)
    return template


def reach(
    fn: Callable[..., Any], modules: Sequence[torch.nn.Module] = (), owner: nn.Module | None = None
) -> Captures | None:
    """Finds what `fn` and the `modules` passed to it reach; None where that is nothing.

    Args:
        fn: The function.
        modules: Modules among its arguments.
        owner: The module that is known to be all that it reaches, though not all of it may be read.
    """
    root = fn if owner is None else owner
    if not modules:
        if isinstance(root, nn.Module):  # the short way, since most regions are modules
            found, seen = Captures.__new__(Captures), snapshot(root)
            found.template, found.modules, found.snapshots = root, seen.modules, [seen]
            if seen.scan.holds:
                found.contents, found.generators, found.others = [], [], []
                found._look_into(seen, {})  # pyright: ignore[reportPrivateUsage]
            if owner is None:
                found.whole = len(seen.modules)
            return found
        if isinstance(fn, types.FunctionType):
            code = _look(fn.__code__, fn.__globals__)
            if not (code.names or code.writes or fn.__defaults__ or fn.__kwdefaults__):
                cells = [*map(content_of, fn.__closure__ or ())]
                if _PLAIN.issuperset(map(type, cells)):  # it reaches nothing
                    if not cells:
                        return None
                    found = Captures.__new__(Captures)
                    found.template = Held(fn, cells)
                    return found
        elif isinstance(fn, _SIMPLE):
            return None
    found = Captures(root, modules)
    if owner is not None:
        found.whole = 0
    return None if found.empty else found
