"""Notes what a region is called with and what its function holds, and opens it for each replay.

A region's function is called twice with the same arguments, the second time long after the first. Between the two the
caller may have emptied a list that was passed, replaced an element, set an attribute or rebound a loop variable. So a
`Taking` looks at each value when the region is called. Most stay as they are. In the place of others stands an object
that a replay opens:

    Held       a tensor: its memory and version without its history, which may come to lead back to the region
    Box        a list, dict, set, deque or plain object, and what it held. A replay is given the same object; where
               its entries differ, those that were noted are in it for the length of the replay
    Node       a tuple, or another container of torch's pytrees that has no attributes
    Closure    a function, and what the cells of its closure held: a loop variable is that of its own turn
    PartialOf  a `functools.partial` with one of these in it

There are two ways to look at a value. What is *taken* is put back in a replay. What is only *looked at* is used where
it is: its tensors are watched, so that a change in place is an error, and modules and generators in it are passed on to
the guards of these. Arguments, closure variables and attributes of modules are taken; containers in closures, globals,
and the object of a method are looked at. Neither calls user code.

Objects are held weakly. A builtin container cannot be; it is held as it is, unless it holds a tensor with a history:
its results may lead back to the region, and nothing collects a cycle through the graph. Then its entries alone are
held, and wherever a replay would meet that container (an argument, a cell, an attribute) it meets one and the same
other, with these entries. A tensor may also come by a history later, by being changed in place; so each container is
asked again before Python collects garbage.

Rejected: copies of containers and objects for each replay. A function that is given a list which a module holds as well
would write into one and read the other.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .. import _torch, errors
from .._torch import is_parameter, storage_id, version_of_dict
from .._torch.tensors import apart, has_history, wants_grad
from ..stores import Hooks, Store, Stored
from .exchange import CONTAINERS, Exchange, alike, entries_of, note

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
ATOMS = PLAIN | frozenset(FUNCTIONS)
MANY = 1000
"""The most entries of a container that are noted. Of a larger one that has grown, a replay finds the old part."""
SMALL = 64 * 1024
"""Tensors up to this many bytes that a function reaches are copied, so that a replay finds their values again."""
_ORDINARY = frozenset({torch.Tensor, nn.Parameter})
EMPTY = object()
"""What a cell holds that nothing was assigned to."""


class Around(Hooks):
    """The region around this one, as its store.

    `put` is called once per occurrence of a tensor: the replay around may find two tensors there, as where one is a
    carried value, and has to count the same.
    """


class Role(enum.Enum):
    """The ways in which a region reaches a tensor: as an argument, in a closure's cell, through another object."""

    ARGUMENT = 0
    CELL = 1
    REACHED = 2


ARGUMENT, CELL, REACHED = Role


class Memory:
    """The values of a small tensor that a function reaches; tensors that share its memory share this."""

    __slots__ = ("_flat", "_then", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._flat = tensor.detach().as_strided((size,), (1,), 0)
        (self._then,) = note([self._flat])
        self._version = tensor._version

    def put_back(self, exchange: Exchange) -> None:
        """Has the replay find the values of the forward in it."""
        changed = self._flat._version != self._version
        exchange.want_values(self._flat.untyped_storage(), self._flat, self._then, changed)


class Held:
    """A tensor that a region was given, or that its function reaches.

    Attributes:
        label: What errors call it; a number is that of an argument.
        version: Its version when it was taken.
        held: Its memory, without its history; or what a store keeps of it.
        given: Whether the graph of the forward may hold the tensor directly.
    """

    __slots__ = ("_attributes", "_grad", "_in_place", "_memory", "_was", "given", "held", "label", "version")

    def __init__(self, tensor: torch.Tensor, label: Any, role: Role, store: Store | None, region: str) -> None:
        self.label, self.version = label, tensor._version
        self.given = store is None and role is not REACHED
        attributes = tensor.__dict__
        self._attributes = dict(attributes) if attributes else None
        self._memory = self._was = None
        self._in_place = False
        self._grad = False
        if store is not None and not is_parameter(tensor):
            self.held: Any = Stored(store, tensor, region)
        elif type(tensor) in _ORDINARY and tensor.requires_grad and not tensor._is_view():  # as `apart`, for most
            self._grad = not tensor.is_leaf
            self.held = tensor.detach() if self._grad else tensor
        else:
            self.held = apart(tensor)
            self._grad = self.held is not tensor and wants_grad(tensor)
            if not self._grad and not self.held.requires_grad:
                self._was = weakref.ref(tensor)

    def note_values(self, memory: Memory) -> None:
        """Has replays find the values that its memory has now."""
        self._memory = memory

    def is_in_place(self, tensor: torch.Tensor) -> None:
        """Notes that an object or container holds the tensor, and that a replay is given the tensor itself."""
        self._was, self._in_place = weakref.ref(tensor), True

    @property
    def has_values(self) -> bool:
        """Whether replays find the values that it had."""
        return self._memory is not None

    @property
    def is_constant(self) -> bool:
        """Whether it has no gradient and is not in a store."""
        return type(self.held) is not Stored and not self._grad and not self.held.requires_grad

    @property
    def with_history(self) -> bool:
        """Whether the tensor itself may not be held by the region, as it has a history or is in a store."""
        return self._grad or type(self.held) is Stored

    def open(self, exchange: Exchange) -> torch.Tensor:
        """The tensor for a replay: a leaf over the same memory, or the tensor itself."""
        tensor = exchange.tensors.get(id(self))
        if tensor is None:
            if self._was is not None or self._attributes or type(self.held) is Stored:
                tensor = self._open(exchange)
            else:  # as that does, for most
                tensor = self.held.detach() if self._grad or not self.held.requires_grad else self.held
                if self._grad:
                    tensor.requires_grad_()
            exchange.tensors[id(self)] = tensor
            if self.given:
                exchange.given.add(id(tensor))
        return tensor

    def _open(self, exchange: Exchange) -> torch.Tensor:
        held = self.held
        there = None if self._was is None else self._was()
        if self._memory is not None and (held._version != self.version or held.is_floating_point()):
            self._memory.put_back(exchange)
        if there is not None and (self._in_place or not has_history(there)):
            return there
        if type(held) is Stored:
            tensor = held.open()
        elif self._grad:
            tensor = held.detach().requires_grad_()
        elif not held.requires_grad and (held.is_floating_point() or held.is_complex()):
            tensor = held.detach()  # what the replay does to it must not stay
        else:
            return held  # the caller's own, with the attributes that it has now
        if self._attributes:
            vars(tensor).update(self._attributes)
        return tensor


class Box:
    """A container or a plain object, and what it held.

    It keeps a plain object by a weak reference (`_weak`), and a container itself (`_object`) until that leads to a
    graph; from then on an empty one of its class (`_empty`), which each replay fills.

    Attributes:
        label: What errors call it.
    """

    __slots__ = ("__weakref__", "_content", "_empty", "_id", "_kind", "_length", "_object", "_weak", "label")

    def __init__(self, value: Any, label: Any) -> None:
        self.label, self._kind, self._id = label, type(value), id(value)
        self._content: Any = None
        self._object, self._weak = value, None
        if not isinstance(value, CONTAINERS) and is_attributes_alone(self._kind):
            self._object, self._weak = None, weakref.ref(value)
        self._length = len(inside_of(value))

    def fill(self, value: Any, take: Callable[[Any, Any], Any]) -> None:
        """Notes what it holds."""
        if self._length > MANY:
            return
        self._content = found = entries_of(inside_of(value))
        label = _element_of(self.label)
        if PLAIN.issuperset(map(type, _values(found))):
            return
        for key, one in found.items() if isinstance(found, dict) else enumerate(found):
            if type(one) not in PLAIN:
                found[key] = take(one, label or f"attribute '{key}'")

    def settle(self) -> None:
        """After the forward: lets go of what holds tensors with a history, or in a store, and cannot be held weakly."""
        if self._object is None or self._content is None:
            return
        if isinstance(self._object, CONTAINERS) or self._kind is types.SimpleNamespace:
            seen: set[int] = set()
            if any(_leads_on(one, seen) for one in (*_values(inside_of(self._object)), *_values(self._content))):
                self._empty, self._object = _emptied(self._object), None
            elif not TAKEN.isdisjoint(map(type, _values(self._content))):
                _ASKED[id(self)] = weakref.ref(self, functools.partial(forget, _ASKED, id(self)))

    def leads_on(self, seen: set[int]) -> bool:
        """Whether it may lead to a graph, or is not held itself."""
        if self.there() is None:
            return True
        return self._content is not None and any(_leads_on(one, seen) for one in _values(self._content))

    def there(self) -> Any:
        """The object itself, if it is held, or if somebody else holds it."""
        return self._object if self._weak is None else self._weak()

    def open(self, exchange: Exchange, now: Any = None) -> Any:
        """The object for a replay; `now` is what is in a place where it was."""
        made = exchange.objects.get(id(self))
        if made is not None:
            return made
        there = self.there()
        if there is None and id(now) == self._id and type(now) is self._kind:
            there = now
        fresh = there is None
        if fresh:
            there = object.__new__(self._kind) if self._weak else _emptied(self._empty)
        exchange.objects[id(self)] = there
        inside = inside_of(there)
        content = self._opened(exchange, inside)
        if not fresh:
            exchange.want(there, inside, content)
        elif isinstance(inside, (dict, set)):
            inside.update(content)
        else:
            inside.extend(content)
        return there

    def _opened(self, exchange: Exchange, inside: Any) -> Any:
        content = self._content
        if isinstance(content, dict):
            return {key: open_in(inside.get(key), one, exchange) for key, one in content.items()}
        if content is not None:
            there = inside if isinstance(inside, list) else ()
            return [open_in(now, one, exchange) for now, one in itertools.zip_longest(there, content)][: len(content)]
        if len(inside) < self._length or (isinstance(inside, set) and len(inside) > self._length):
            raise errors.ChangedError(
                f"{said(self.label)}, which {exchange.region} may read, has changed since the forward: {self._length} "
                f"entries then, {len(inside)} now. Containers with more than {MANY} entries are not copied; of a list "
                "or dict that has grown the replay finds the old part, but what was removed, or put into a set, cannot "
                "be undone.\n"
                "  Change it after backward; or pass what the region reads of it as an argument."
            )
        old = itertools.islice(inside.items() if isinstance(inside, dict) else inside, self._length)
        return dict(old) if isinstance(inside, dict) else [*old]


class SmallTensors(Box):
    """The small tensors among the attributes of an object whose method a region calls; no other one is put back."""

    __slots__ = ()

    def __init__(self, owner: Any, tensors: dict[str, Held]) -> None:
        super().__init__(owner, "")
        self._content = tensors

    def _opened(self, exchange: Exchange, inside: Any) -> Any:
        return {**inside, **super()._opened(exchange, inside)}


def inside_of(value: Any) -> Any:
    """Returns the container itself, or the dictionary of an object's attributes."""
    return value if isinstance(value, CONTAINERS) else value.__dict__


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _leads_on(value: Any, seen: set[int]) -> bool:
    """Whether a container that holds this may lead to a graph; one that was `seen` is asked once."""
    if type(value) is Held:
        return value.with_history
    if isinstance(value, torch.Tensor):
        return has_history(value)
    if isinstance(value, (Box, Node, tuple, *CONTAINERS)):
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, Box):
            return value.leads_on(seen)
        if type(value) is Node:
            return any(_leads_on(child, seen) for child in value.children)
        many = not isinstance(value, (Box, Node)) and len(value) > MANY
        return not many and any(_leads_on(one, seen) for one in _values(value))
    return False


_ASKED: dict[int, weakref.ref[Box]] = {}
"""The boxes that hold a container with tensors, which may come by a history."""


def _ask_again(phase: str, info: dict[str, int]) -> None:
    if phase == "start" and info["generation"]:
        for box in [ref() for ref in [*_ASKED.values()]]:
            if box is not None:
                box.settle()


gc.callbacks.append(_ask_again)


def _emptied(value: Any) -> Any:
    """Makes a container of the same class with nothing in it."""
    if isinstance(value, collections.deque):
        return type(value)(maxlen=value.maxlen)
    if isinstance(value, collections.defaultdict):
        return type(value)(value.default_factory)
    return type(value)()


class Node:
    """A tuple, or an object of a class that is registered as a pytree and has no attributes."""

    __slots__ = ("_context", "_kind", "_make", "children")

    def __init__(self, value: Any, children: list[Any], context: Any, make: Callable[..., Any]) -> None:
        self._kind, self._context, self._make = type(value), context, make
        self.children = children

    def open(self, exchange: Exchange, now: Any = None) -> Any:
        """The same for a replay; `now`, what is in its place, if it is that."""
        children = [open_(child, exchange) for child in self.children]
        if type(now) is self._kind and isinstance(now, tuple) and alike(now, children):
            return now
        return self._make(children, self._context)


class Closure:
    """A function over what its cells held. The function is not held: it would keep the tensors in its cells alive.

    A cell that another function has written to while the forward ran (a hook, a setter beside it) is the replay's own
    cell as well, as one that the function itself writes to.
    """

    __slots__ = ("_attributes", "_cells", "_code", "_defaults", "_fn", "_keywords", "_name", "_qualname", "_scope")

    def __init__(self, fn: types.FunctionType, cells: list[Any], defaults: Any, keywords: Any) -> None:
        self._code, self._scope, self._attributes = fn.__code__, fn.__globals__, fn.__dict__
        self._name, self._qualname = fn.__name__, fn.__qualname__
        self._cells, self._defaults, self._keywords = cells, defaults, keywords
        self._fn = weakref.ref(fn)

    def settle(self, cells: Sequence[types.CellType], contents: Sequence[Any], written: Container[int]) -> None:
        """After the forward: keeps the cells that others write to, unless what they hold may lead to the graph.

        Others do where it holds something else by now, and where one of the functions that the region reaches can.
        """
        for i, (cell, now, content) in enumerate(zip(cells, contents_of(cells), contents, strict=True)):
            if (now is not content or id(cell) in written) and not _leads_on(now, set()):
                self._cells[i] = cell

    def open(self, exchange: Exchange) -> types.FunctionType:
        """The function itself, if its cells hold what they held; else one of the same code over fresh cells."""
        made = exchange.objects.get(id(self))
        if made is not None:
            return made
        contents = [one if type(one) is types.CellType else open_(one, exchange) for one in self._cells]
        defaults = self._defaults and tuple([open_(one, exchange) for one in self._defaults])
        keywords = self._keywords and {name: open_(one, exchange) for name, one in self._keywords.items()}
        made = self._fn()
        if made is not None and _holds(made, contents, defaults, keywords):
            exchange.objects[id(self)] = made
            return made
        cells = [one if type(one) is types.CellType else _cell(one) for one in contents]
        made = types.FunctionType(self._code, self._scope, self._name, defaults, tuple(cells))
        made.__qualname__ = self._qualname  # by which saved calls are known
        if keywords:
            made.__kwdefaults__ = keywords
        if self._attributes:
            made.__dict__.update(self._attributes)
        exchange.objects[id(self)] = made
        return made


def _holds(fn: types.FunctionType, contents: Sequence[Any], defaults: Any, keywords: Any) -> bool:
    """Whether a function's cells hold these, or are these, and its defaults are these."""
    cells = fn.__closure__ or ()
    there = zip(cells, contents_of(cells), contents, strict=True)
    if not all(now is one or cell is one for cell, now, one in there):
        return False
    return alike(fn.__defaults__ or (), defaults or ()) and alike(fn.__kwdefaults__ or {}, keywords or {})


def _cell(content: Any) -> types.CellType:
    return types.CellType() if content is EMPTY else types.CellType(content)


_content_of: Callable[[types.CellType], Any] = operator.attrgetter("cell_contents")


def contents_of(cells: Sequence[types.CellType]) -> list[Any]:
    """The contents of a closure's cells."""
    try:
        return [*map(_content_of, cells)]
    except ValueError:  # one has none yet
        return [*map(content_of, cells)]


def content_of(cell: types.CellType) -> Any:
    """The contents of a closure's cell; `EMPTY` where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


class PartialOf:
    """A `functools.partial` of what is taken."""

    __slots__ = ("_args", "_attributes", "_inner", "_keywords", "_kind", "_partial")

    def __init__(self, partial: functools.partial[Any], inner: Any, args: list[Any], keywords: dict[str, Any]) -> None:
        self._kind, self._attributes = type(partial), partial.__dict__
        self._inner, self._args, self._keywords = inner, args, keywords
        self._partial = weakref.ref(partial)

    def open(self, exchange: Exchange) -> Any:
        """The partial itself, if it holds what it held; else one like it."""
        args = [open_(one, exchange) for one in self._args]
        keywords = {name: open_(one, exchange) for name, one in self._keywords.items()}
        inner, made = open_(self._inner, exchange), self._partial()
        if made is not None and inner is made.func and alike(made.args, args) and alike(made.keywords, keywords):
            return made
        made = self._kind(inner, *args, **keywords)
        if self._attributes:
            made.__dict__.update(self._attributes)
        return made


TAKEN = frozenset({Held, Box, Node, Closure, PartialOf})


def open_(value: Any, exchange: Exchange) -> Any:
    """A value that was taken, for a replay."""
    return value.open(exchange) if type(value) in TAKEN else value


def open_in(now: Any, value: Any, exchange: Exchange) -> Any:
    """Opens a value that was taken out of a place; `now` is what the place holds at present."""
    kind = type(value)
    return value.open(exchange, now) if kind is Node or kind is Box else open_(value, exchange)


# --- which objects are looked into -----------------------------------------------------------------------------------

_WRITTEN_IN_PYTHON = 1 << 9  # a class that Python has made: `Py_TPFLAGS_HEAPTYPE`


def written_in_c(kind: type[Any]) -> bool:
    """Whether a class is no Python code's, so that an object of it may have more than its attributes."""
    return not kind.__flags__ & _WRITTEN_IN_PYTHON


def is_attributes_alone(kind: type[Any]) -> bool:
    """Whether an object of a class is what its attributes are: no base has slots or is written in C."""
    return not any(written_in_c(base) or base.__dict__.get("__slots__") for base in kind.__mro__[:-1])


_CALLED = (*FUNCTIONS, types.MethodType, functools.partial)


def may_be_config(value: Any) -> bool:
    """Whether an object may be a config by its class, whatever it holds at present."""
    if type(value) in PLAIN or isinstance(value, (nn.Module, torch.Tensor, torch.Generator, enum.Enum, *_CALLED)):
        return False
    return type(value).__module__[:6] != "torch." and getattr(value, "__dict__", None) is not None


def is_config(value: Any, deep: int = 2) -> bool:
    """Whether an object holds plain data alone, as a config does. A handle or a trainer does not, and is left alone."""
    if not deep or not may_be_config(value):
        return False
    plain = (enum.Enum, tuple, torch.Tensor, torch.Generator, *CONTAINERS, *FUNCTIONS)
    data = value.__dict__.values()
    return all(type(one) in PLAIN or isinstance(one, plain) or is_config(one, deep - 1) for one in data)


def is_plain_tuple(value: Any) -> bool:
    """Whether a value is a tuple of plain values."""
    return type(value) is tuple and PLAIN.issuperset(map(type, value))


def said(label: Any) -> str:
    """A label, for errors: `argument 0`, `argument 'mask'`, `an element of argument 1`, `closure variable 't'`."""
    if type(label) is _Element:
        return f"an element of {said(label.of)}"
    return f"argument {label!r}" if isinstance(label, (int, Name)) else str(label)


class Name(str):
    """The label of an argument that is passed by its name."""

    __slots__ = ()


class _Element:
    """The label of what is inside of an argument."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of


def _element_of(label: Any) -> Any:
    return _Element(label) if isinstance(label, (int, Name)) else label


# --- taking -----------------------------------------------------------------------------------------------------------


class Taking:
    """Takes the arguments and the function of one call of a region, or what its modules hold.

    Args:
        region: The region's name, for errors.
        store: Where the tensors are kept; None for where they are.
        left: The storages of tensors that something else puts back, in place.
        beside: That of the call, where this one takes what the call's modules hold. An object that both meet is taken
            once. Functions, and containers that hold plain values within other containers, stay as they are.

    Attributes:
        region: The region's name, for errors.
        store: Where the tensors are kept; None for where they are.
        given: The tensors themselves, while the forward runs.
        ids: The version of each by its identity while the forward runs; empty where a store keeps copies.
        views: Whether a tensor that is no view of an input may share its memory, since an input is a view itself.
        boxes: The containers and objects that were taken.
        may_call_modules: Whether the function may call modules: it names or holds something besides plain values,
            tensors and what belongs to torch.
        modules: The modules that are passed, or that the function holds.
        generators: The generators, likewise.
        written: The versions of dictionaries that the function has written to by the time that they are taken.
    """

    __slots__ = (
        *("_closures", "_early", "_held", "_left", "_memories", "_own_cells", "_of_modules", "_spoiled", "_storages"),
        *("_taken", "_watched", "boxes", "generators", "given", "ids", "may_call_modules", "modules", "region"),
        *("store", "views", "written"),
    )

    def __init__(
        self, region: str, store: Store | None, left: Container[int] = (), beside: Taking | None = None
    ) -> None:
        self.region, self.store, self._of_modules = region, store, beside is not None
        self._held: list[Held] = []
        self.boxes: list[Box] = []
        self._spoiled: tuple[Any, int, int] | None = None  # a tensor in a store that the region itself has changed
        self._closures: list[tuple[Closure, tuple[types.CellType, ...], list[Any]]] = []
        self._watched: list[tuple[Any, torch.Tensor, int]] = []  # label, tensor, version: a change of these is an error
        self._taken: dict[int, Any] = {} if beside is None else beside._taken
        self._left = left if beside is None else beside._left
        self._memories: dict[int, Memory] = {}
        self.written = range(0)
        self._early: list[tuple[Box, Any]] = []  # dicts and objects that were written to too early
        self._own_cells: set[int] = set()  # cells that the functions write to
        self._storages: set[int] | None = None
        self.given: list[torch.Tensor] = []
        self.ids: dict[int, int] = {}
        self.views = self.may_call_modules = False
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []

    @property
    def storages(self) -> set[int]:
        """The storages of the tensors, where there is no store."""
        if self._storages is None:
            self._storages = {storage_id(held.held) for held in self._held if held.given} - {0}
        return self._storages

    def argument(self, value: Any, label: Any) -> Any:
        """Takes an argument.

        Raises:
            ArgumentError: It can be consumed only once.
        """
        if type(value) not in PLAIN:
            self.may_call_modules = True
        taken = self.take(value, label)
        if taken is value and type(value) not in ATOMS and isinstance(value, Iterator):
            raise errors.ArgumentError(
                f"{said(label)} of {self.region} is a {errors.kind(value)}, which can be consumed only once: the "
                "forward would leave nothing for the replay.\n"
                "  Pass a list instead: list(...)."
            )
        return taken

    def take(self, value: Any, label: Any, role: Role = ARGUMENT, inside: bool = False) -> Any:
        """Takes a value. A replay is given a tensor itself that is `inside` a container or object."""
        kind = type(value)
        if kind in ATOMS and (kind is not types.FunctionType or role is ARGUMENT or self._of_modules):
            return value
        if isinstance(value, torch.Tensor):
            held = self.tensor(value, label, role)
            if inside and type(held) is Held:
                held.is_in_place(value)
            return held
        taken = self._taken.get(id(value))
        if taken is not None:
            return taken
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif role is REACHED and not self._of_modules and not isinstance(value, (tuple, functools.partial, *_CALLED)):
            self.look(label, value)
        elif kind in _BUILTIN or (isinstance(value, CONTAINERS) and _torch.is_container(value)):
            return self._box(value, label, role)
        elif isinstance(value, tuple) or _torch.is_container(value):
            return self._node(value, label, role, inside)
        elif is_config(value):
            return self._box(value, label, role)
        elif role is REACHED and not self._of_modules:
            return self._called(value, label)
        return value

    def _box(self, value: Any, label: Any, role: Role) -> Box:
        box = self._taken[id(value)] = Box(value, label)
        self.boxes.append(box)
        inside = inside_of(value) if self.written else None
        if isinstance(inside, dict) and version_of_dict(inside) in self.written:
            self._early.append((box, value))
        box.fill(value, functools.partial(self._entry, _within(role)))
        return box

    def _entry(self, role: Role, value: Any, label: Any) -> Any:
        """Takes what is in a container or object."""
        if self._of_modules and isinstance(value, CONTAINERS) and _nothing_to_take(_values(value)):
            return value
        return self.take(value, label, role, inside=True)

    def _node(self, value: Any, label: Any, role: Role, inside: bool) -> Any:
        if is_plain_tuple(value):
            return value
        node = _torch.node_of(value)
        if node is None:
            return value
        if not isinstance(value, tuple) and is_attributes_alone(type(value)):
            return self._box(value, label, role)
        children, context = node.flatten_fn(value)
        label = _element_of(label)
        taken = [self.take(child, label, _within(role), inside) for child in children]
        if all(map(operator.is_, taken, children)):
            return value
        return Node(value, taken, context, node.unflatten_fn)

    def tensor(self, tensor: torch.Tensor, label: Any, role: Role = ARGUMENT) -> Any:
        """Takes a tensor."""
        held = self._taken.get(id(tensor))
        if held is not None:
            stored = type(held) is Held and type(held.held) is Stored
            if stored and type(self.store) is Around and role is not REACHED:
                self.store.put(tensor)
            return held
        key = id(tensor)
        if tensor.is_inference():  # it has no version; a copy has, and what reads it now reads the tensor itself
            if role is REACHED:
                return tensor
            tensor = tensor.clone()
        store = None if role is REACHED or (type(self.store) is Around and _is_small_constant(tensor)) else self.store
        held = self._taken[key] = Held(tensor, label, role, store, self.region)
        self._held.append(held)
        self.given.append(tensor)
        if held.given:
            self.ids[key] = held.version
        if role is not REACHED and tensor._is_view():
            self.views = True
        if type(held.held) is not Stored and (role is ARGUMENT or not self._notes_values(held, tensor)):
            self._watched.append((label, held.held, held.version))
        return held

    def _notes_values(self, held: Held, tensor: torch.Tensor) -> bool:
        """Notes the values of a small tensor, which the function may change in place; False for one to be watched."""
        if not held.is_constant or type(tensor) is not torch.Tensor:
            return False
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage = storage_id(tensor)
        if storage in self._left:
            return True
        if not 0 < tensor.untyped_storage().nbytes() <= SMALL or tensor.is_conj() or tensor.is_neg():
            return False
        memory = self._memories.get(storage)
        if memory is None:
            memory = self._memories[storage] = Memory(tensor)
        held.note_values(memory)
        return True

    # --- functions ------------------------------------------------------------------------------------------------

    def function(self, fn: Any) -> Any:
        """Takes the region's function. A module, or a method of one, is held as it is."""
        if isinstance(fn, types.FunctionType):
            return self._closure(fn)
        if isinstance(fn, functools.partial):
            return self._called(fn, "")
        self.may_call_modules = not isinstance(fn, _SIMPLE)
        owner = fn.__self__ if isinstance(fn, types.MethodType) else fn
        if isinstance(owner, nn.Module):
            self.modules.append(owner)
        elif not isinstance(fn, _SIMPLE):
            self._attributes(owner)
        return fn

    def _called(self, value: Any, label: Any) -> Any:
        """Takes a function, a partial or a method; of other objects nothing is known."""
        if isinstance(value, types.FunctionType):
            taken = self._taken[id(value)] = self._closure(value, label)
            return taken
        if isinstance(value, functools.partial):
            self.may_call_modules = True
            take = functools.partial(self.take, role=REACHED)
            args = [take(one, label or f"argument {i} of a partial") for i, one in enumerate(value.args)]
            keywords = {
                key: take(one, label or f"argument {key!r} of a partial") for key, one in value.keywords.items()
            }
            inner = self._variable(value.func, label)
            given = (*value.args, *value.keywords.values(), value.func)
            if all(map(operator.is_, given, (*args, *keywords.values(), inner))):
                return value
            return PartialOf(value, inner, args, keywords)
        if isinstance(value, types.MethodType):
            if isinstance(value.__self__, nn.Module):
                self.modules.append(value.__self__)
            else:
                self._attributes(value.__self__)
        return value

    def _attributes(self, owner: Any) -> None:
        """Looks at the attributes of an object whose method is called; takes the small tensors among them."""
        if id(owner) in self._taken:
            return
        self._taken[id(owner)] = owner
        tensors: dict[str, Held] = {}
        for name, value in getattr(owner, "__dict__", {}).items():
            label = f"attribute '{name}'"
            if type(value) is torch.Tensor and id(value) not in self._taken:
                held = self.tensor(value, label, REACHED)
                if type(held) is Held and held.has_values:
                    tensors[name] = held
            elif type(value) not in ATOMS:
                self.look(label, value)
        if tensors:
            self.boxes.append(SmallTensors(owner, tensors))

    def _closure(self, fn: types.FunctionType, label: Any = "") -> Any:
        """Takes a function: what its cells and defaults hold. The globals that it names are looked at."""
        self._taken[id(fn)] = fn  # if it holds itself
        names, writes = _look_at(fn.__code__)
        if names:
            self._globals(fn, names, label)
        defaults: Any = fn.__defaults__
        keywords: Any = fn.__kwdefaults__
        if defaults or keywords:
            defaults, keywords = self._defaults(fn, label)
        there = fn.__closure__
        if there is None and defaults is fn.__defaults__ and keywords is fn.__kwdefaults__:
            return fn
        cells: list[Any] = []
        contents = contents_of(there or ())
        for name, cell, value in zip(fn.__code__.co_freevars, there or (), contents, strict=True):
            if name in writes:  # its own state
                cells.append(cell)
                self._own_cells.add(id(cell))
            elif type(value) in PLAIN:
                cells.append(value)
            elif isinstance(value, torch.Tensor):
                cells.append(self.tensor(value, label or f"closure variable '{name}'", REACHED if label else CELL))
            else:
                self.may_call_modules = self.may_call_modules or not _is_of_torch(value)
                cells.append(self._variable(value, label or f"closure variable '{name}'"))
        closure = Closure(fn, cells, defaults, keywords)
        self._closures.append((closure, there or (), contents))
        return closure

    def _globals(self, fn: types.FunctionType, names: Sequence[str], label: Any) -> None:
        scope = fn.__globals__
        for name in names:
            value = scope.get(name)
            if type(value) not in ATOMS:
                self.look(label or f"global '{name}'", value)
                self.may_call_modules = True
            elif type(value) not in PLAIN and not _is_of_torch(value):
                self.may_call_modules = True

    def _defaults(self, fn: types.FunctionType, label: Any) -> tuple[Any, Any]:
        """Takes a function's defaults; returns its own ones where there is nothing to open."""
        self.may_call_modules = True
        take = functools.partial(self.take, label=label or f"a default of {fn.__name__}", role=REACHED)
        defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
        taken, by_name = [*map(take, defaults)], {name: take(one) for name, one in keywords.items()}
        same = all(map(operator.is_, defaults, taken)) and all(map(operator.is_, keywords.values(), by_name.values()))
        return (fn.__defaults__, fn.__kwdefaults__) if same else (taken, by_name)

    def _variable(self, value: Any, label: Any) -> Any:
        """Takes what a cell holds: functions, partials, tuples. A container or object there is only looked at."""
        taken = self._taken.get(id(value))
        if taken is not None:
            return taken
        if type(value) is types.FunctionType:
            return self._called(value, "")
        if isinstance(value, (*CONTAINERS, nn.Module, torch.Generator)) or not (
            isinstance(value, (tuple, functools.partial, types.MethodType)) or type(value) in FUNCTIONS
        ):
            self.look(label, value)
            return value
        return self.take(value, label, REACHED)

    def look(self, label: Any, value: Any) -> None:
        """Looks at a value that is not taken: notes the tensors, generators and modules in it."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._taken:
            return
        if isinstance(value, torch.Tensor):
            self._taken[id(value)] = value
            if not value.is_inference() and storage_id(value) not in self._left:
                self._watched.append((label, apart(value), value._version))
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        elif kind is torch.Generator:
            self.generators.append(value)
        elif kind in _BUILTIN or kind is tuple:
            inside = _values(value)
            if not _nothing_to_take(inside):
                self._taken[id(value)] = value
                for one in inside:
                    self.look(label, one)

    # --- the forward is over ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """After the forward: lets go of the tensors themselves, and of containers with histories."""
        if self.store is not None:
            for held, tensor in zip(self._held, self.given, strict=True):
                if type(held.held) is Stored and tensor._version != held.version:
                    self._spoiled = held.label, held.version, tensor._version
        for closure, cells, contents in self._closures:
            if self._own_cells or not all(map(operator.is_, contents_of(cells), contents)):
                closure.settle(cells, contents, self._own_cells)
        for box, value in self._early:  # nobody knows what the forward found in them
            box.fill(value, functools.partial(self._entry, REACHED))
        self.given, self.ids, self._taken, self._memories, self._closures, self._early = [], {}, {}, {}, [], []
        for box in self.boxes:
            box.settle()

    def forget(self) -> None:
        """Drops everything: there will be no replay."""
        self._held, self.boxes, self._watched, self.given = [], [], [], []

    def given_labels(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors with what errors call them, while the forward runs."""
        return [(said(held.label), tensor) for held, tensor in zip(self._held, self.given, strict=True)]

    def holds_results(self) -> bool:
        """Whether there is a tensor with a history, or in a store, among what was taken."""
        return any(held.with_history for held in self._held)

    def changed(self) -> str:
        """Names a tensor that has been changed in place, by the region itself or since; "" without one."""
        spoiled = self._spoiled
        for label, tensor, version in self._watched:
            if tensor._version != version:
                spoiled = label, version, tensor._version
                break
        if spoiled is None:
            return ""
        label, then, version = spoiled
        if isinstance(label, (int, Name, _Element)):
            return errors.changed_input(self.region, said(label), then, version)
        return changed_weight(label, self.region, then, version)

    def check(self) -> None:
        """Raises a `ChangedError` if a tensor has been changed in place, by the region itself or since."""
        changed = self._spoiled is not None
        for _, tensor, version in self._watched:
            changed = changed or tensor._version != version
        if changed:
            raise errors.ChangedError(self.changed())


def _is_small_constant(tensor: torch.Tensor) -> bool:
    """Whether a region inside another one holds a tensor itself, since to rebuild it would save next to nothing."""
    plain = type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.layout is torch.strided
    return plain and not tensor.is_nested and tensor.nbytes <= SMALL


def _is_of_torch(value: Any) -> bool:
    """Whether a function or a module of Python is torch's."""
    kind = type(value)
    name = value.__name__ if kind is types.ModuleType else value.__module__ if kind in FUNCTIONS else None
    return name is not None and name.partition(".")[0] in ("torch", "math", "builtins")


def _within(role: Role) -> Role:
    """The role of what is inside of what has one."""
    return ARGUMENT if role is ARGUMENT else REACHED


_BUILTIN = frozenset(CONTAINERS)
_SIMPLE = (types.BuiltinFunctionType, type)


def _nothing_to_take(values: Any) -> bool:
    """Whether there is nothing but modules and plain values among some; asks no Python function for each."""
    if len(values) > MANY:
        return True
    kinds = {*map(type, values)} - ATOMS | ({types.FunctionType} & {*map(type, values)})
    return all(issubclass(kind, nn.Module) for kind in kinds)


_codes: dict[int, tuple[weakref.ref[types.CodeType], tuple[str, ...], frozenset[str]]] = {}


def _look_at(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that a code object names and the cells that it writes, found once for each code object."""
    found = _codes.get(id(code))
    if found is not None and found[0]() is code:
        return found[1:]
    steps = [(i.opname, str(i.argval)) for i in dis.get_instructions(code)]
    names = {name for op, name in steps if op in ("LOAD_GLOBAL", "LOAD_NAME")}  # `co_names` has attributes, too
    writes = {name for op, name in steps if op in ("STORE_DEREF", "DELETE_DEREF")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            more, written = _look_at(const)
            names.update(more)
            writes.update(written)
    entry = weakref.ref(code, functools.partial(forget, _codes, id(code))), tuple(sorted(names)), frozenset(writes)
    _codes[id(code)] = entry
    return entry[1:]


def globals_of(fn: types.FunctionType) -> tuple[str, ...]:
    """The globals that a function names, and those that functions in it name."""
    return _look_at(fn.__code__)[0]


def labelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors among arguments, in containers and objects too, each once with what errors call it."""
    taking = Taking("", None)
    for label, value in (*enumerate(args), *((Name(key), one) for key, one in kwargs.items())):
        taking.take(value, label)
    return taking.given_labels()


def forget(cache: dict[int, Any], key: int, ref: Any) -> None:
    """Drops an entry of a cache by identity, or of one that begins with the weak reference, when its object dies."""
    found = cache.get(key)  # an argument, since the names of this module are gone when the interpreter ends
    if found is ref or (type(found) is tuple and found[0] is ref):
        del cache[key]


def changed_weight(label: str, region: str, then: int, now: int) -> str:
    """Text for something that a region reads where it is, and that has been changed in place."""
    return (
        f"{label}, which {region} reads, has been changed in place since the forward (version {then} then, {now} now): "
        "its replay would compute with other values than its forward.\n"
        "  Change it after backward (optimizer.step() after loss.backward()). What changes it in the region itself, as "
        "Embedding(max_norm=) does, goes before the region; or let it be a buffer."
    )
