"""Finds who keeps memory alive after a forward: nodes of the graph, regions, a custom Function's `ctx`, Python objects.

Saved tensors are in C++. Saved-tensor hooks would have to be there before, and a region takes the hooks around it for
its store: watching that way changes what is kept. Reading `node.saved_tensors` or `node._saved_*` afterwards replays
regions. So `_raw_saved_*` gives the place without opening it, and what is there: the tensor, or what a pack hook made
of it. From that Python's garbage-collector interface leads on: a slot to its region call, the region call to the inputs
and stored outputs, the closure of a foreign hook to what it holds. Nothing here knows the fields of any of them.

The reverse direction is for memory that no node saved: of all Python tensors, those over that memory, and who refers to
them, up to something with a name: an attribute, a global, a closure variable, a `ctx`.

Nothing is opened or run. Modules, types, and the globals of functions are not searched: that is where the whole program
would be found. What a C++ node without `_raw_saved_*` (extensions) holds is not found; `CopySlices`, the node of a
write to a view, is one around another, so what nothing else is found to hold in its graph is taken to be that one's.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from .._torch import TorchDispatchMode, sequence_of
from .._torch.graphs import SavedTensor, packed_of, unpack_hook_of
from ..engine import slots
from ..engine.region_call import RegionCall
from ..engine.saved_call import SavedCall
from .ledger import shape_of, storages

if TYPE_CHECKING:
    from typing_extensions import Self

_CLOSED = (nn.Module, type, types.ModuleType, types.CodeType, types.FrameType, TorchDispatchMode)
_LIMIT = 20_000  # objects to look at from one saved tensor
_DEPTH = 6  # referrers to go up from a tensor that escaped
_WATCHERS = f"{__name__.partition('.')[0]}.doctor"  # what it remembers of a model is there before it looks
_TORCH_CHECKPOINT = "torch.utils.checkpoint"
_WRITES_TO_VIEW = "CopySlices"
_CHECKPOINT_NODES = ("CheckpointFunctionBackward", "_NoopSaveInputsBackward")


class Hold:
    """All that keeps one storage alive.

    Attributes:
        savers: Nodes that saved it, as `GeluBackward0 (self)`.
        regions: Regions that hold it, as `layer 3`, or `layer 3 / attention` for a saved call.
        stashes: Places outside of what autograd saves, as `ctx.y of FnBackward` or `encoder.cache`.
        plain: Whether a node saved it outside of every region.
        in_region: Whether a node saved it inside of one, whose name may not be known from there.
        about: Shape, type and device of the first tensor found over it.
    """

    __slots__ = ("about", "in_region", "plain", "regions", "savers", "stashes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.savers: list[str] = []
        self.regions: list[str] = []
        self.stashes: list[str] = []
        self.plain = self.in_region = False
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.about = shape_of(tensor), dtype, str(tensor.device)


def _name_of(node: Node) -> str:
    """The name of a node; before torch 2.12, of one that is gone though an object is left of it, that of its class."""
    try:
        return node.name()
    except RuntimeError:
        return type(node).__name__


class Retainers:
    """Finds who keeps which storage: `of`, by `id` of the storage's Python object. It holds the graph it has seen.

    Attributes:
        of: The holds that were found.
        unseen: That of storages which are alive and have none there; None where nothing is known to have them.
    """

    def __init__(self) -> None:
        self.of: dict[int, Hold] = {}
        self.unseen: Hold | None = None
        self._nodes: set[Node] = set()
        self._edges: list[Any] = []  # which own their nodes; before torch 2.12 a node of Python does not own itself
        self._queue: deque[Node] = deque()
        self._searched: set[Any] = set()  # region calls and foreign hooks

    def start(self, value: object) -> list[torch.Tensor]:
        """Remembers the nodes that an object's tensors come from, for `walk`; returns these tensors."""
        return [tensor for tensor, _ in self._search(value)]

    def walk(self) -> None:
        """Looks at every node that can be reached from its starts and that it has not seen."""
        while self._queue:
            node = self._queue.popleft()
            label = _name_of(node).removeprefix("torch::autograd::")
            if label == _WRITES_TO_VIEW and self.unseen is None:
                self.unseen = Hold(torch.empty(0))
                self.unseen.savers, self.unseen.plain = [label], True
            for attribute in dir(node):
                if attribute.startswith("_raw_saved_"):
                    field = attribute.removeprefix("_raw_saved_")
                    self._saved(node, attribute, label if field == "tensors" else f"{label} ({field})")
            variable = getattr(node, "variable", None)  # the leaf that a gradient is accumulated into
            if isinstance(variable, torch.Tensor):
                self.note(variable, "savers", label, plain=True)
            for name, value in getattr(node, "__dict__", {}).items():
                for tensor, _ in self._search(value):
                    self.note(tensor, "stashes", f"ctx.{name} of {label}")
            with contextlib.suppress(RuntimeError):  # the node is gone
                self._enqueue(following for following, _ in node.next_functions if following is not None)

    def _enqueue(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node not in self._nodes:
                self._nodes.add(node)
                self._queue.append(node)

    def _saved(self, node: Node, attribute: str, label: str) -> None:
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # freed, by a backward inside the forward
            return
        torchs = label in _CHECKPOINT_NODES
        for place in cast("Iterable[Any]", saved) if isinstance(saved, (tuple, list)) else (saved,):
            packed, hook = packed_of(place), unpack_hook_of(place)
            if packed is None:
                continue
            if hook is None and torchs:
                self.note(packed, "regions", _TORCH_CHECKPOINT)
            elif hook is None:
                self.note(packed, "savers", label, plain=True)
            elif type(packed) is slots.Slot:
                if isinstance(packed.content, torch.Tensor):  # filled already
                    self.note(packed.content, "savers", label)
                    self.note(packed.content, "regions", packed.owner.name)
                self._region(packed.owner, packed.owner.name)
            elif hook is slots.unpack:
                for tensor, _ in self._search(packed):
                    self.note(tensor, "savers", label, in_region=True)
            else:  # a foreign hook; torch's checkpoint keeps its arguments in the closure of its own
                for tensor, _ in self._search(packed):
                    self.note(tensor, "savers", label, plain=True)
                self._region(hook, getattr(hook, "__module__", None) or type(hook).__name__)

    def _region(self, owner: Any, name: str) -> None:
        if owner not in self._searched:
            self._searched.add(owner)
            for tensor, region in self._search(owner, name):
                self.note(tensor, "regions", region)

    def note(
        self, tensor: torch.Tensor, where: str, label: str, *, plain: bool = False, in_region: bool = False
    ) -> None:
        """Notes who holds a tensor, each of its storages; `where` is "savers", "regions" or "stashes"."""
        for _, storage in storages(tensor):
            hold = self.of.setdefault(id(storage), Hold(tensor))
            hold.plain, hold.in_region = hold.plain or plain, hold.in_region or in_region
            labels: list[str] = getattr(hold, where)
            if label not in labels:
                labels.append(label)

    def _search(self, start: object, name: str = "") -> Iterator[tuple[torch.Tensor, str]]:
        """Yields the tensors that an object leads to, nearest first, and the region on the way; nodes are queued."""
        seen: dict[int, object] = {}  # holds what it has seen, so that no identity is used twice
        queue: deque[tuple[object, str]] = deque([(start, name)])
        while queue and len(seen) < _LIMIT:
            value, region = queue.popleft()
            if id(value) in seen or isinstance(value, _CLOSED):
                continue
            seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    self._edges.append(torch.autograd.graph.get_gradient_edge(value))
                    self._enqueue([value.grad_fn])
                yield value, region
                continue
            if isinstance(value, Node):
                self._enqueue([value])
                continue
            if isinstance(value, RegionCall):
                region = value.name
            elif isinstance(value, SavedCall):
                region = f"{region} / {value.name}"
            if isinstance(value, types.FunctionType):
                inner: Iterable[Any] = (value.__closure__, value.__defaults__, value.__kwdefaults__)
            elif isinstance(value, SavedTensor):
                inner = (packed_of(value), unpack_hook_of(value))
            else:
                inner = gc.get_referents(value)
            queue.extend((item, region) for item in inner if gc.is_tracked(item) or isinstance(item, SavedTensor))


# --- sums -------------------------------------------------------------------------------------------------------------


def separate_parts(roots: Iterable[Node], marked: Collection[int]) -> list[set[int]]:
    """Finds the summands of some roots that could go backward one by one, because their graphs share no node.

    Returns:
        For each group of summands that need each other, which of the sequence numbers `marked` are in its graph.
        Groups without any are left out.
    """
    summands: list[Node] = []
    todo = list(roots)
    while todo:
        node = todo.pop()
        inputs = _inputs(node)
        linear = node.name() in _ADDED or (
            node.name() in _SCALED and len(inputs) == 1 and node.next_functions[0][0] is inputs[0]
        )
        if linear and sequence_of(node) not in marked:
            todo += inputs
        else:
            summands.append(node)
    group_of: dict[Node, int] = {}
    joined = list(range(len(summands)))

    def group(number: int) -> int:
        while joined[number] != number:
            number = joined[number]
        return number

    for number, summand in enumerate(summands):
        todo = [summand]
        while todo:
            node = todo.pop()
            if node in group_of:
                joined[group(group_of[node])] = group(number)
            elif node.name() not in _OF_PARAMETERS:
                group_of[node] = number
                todo += _inputs(node)
    found: dict[int, set[int]] = {}
    for node, number in group_of.items():
        if sequence_of(node) in marked:
            found.setdefault(group(number), set()).add(sequence_of(node))
    return list(found.values())


def _inputs(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


_ADDED = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Sub", "Neg", "Sum", "Mean", "Stack", "Cat", "View", "Unsqueeze", "Squeeze", "ToCopy", "Clone")
    for number in (0, 1)
)
_SCALED = ("MulBackward0", "DivBackward0")  # by a number: the other input has no gradient
_OF_PARAMETERS = ("torch::autograd::AccumulateGrad", "ToCopyBackward0")  # autocast's casts are of several forwards


# --- the other direction: from memory to who refers to it -------------------------------------------------------------


class Heap:
    """All objects that the garbage collector knows at one moment, and who refers to whom: one walk, whatever is asked.

    It keeps them alive until its block ends. What is made in the block is not in it, so a search finds nothing of its
    own.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def __enter__(self) -> Self:
        self._objects = gc.get_objects()
        return self

    def __exit__(self, *exception: object) -> None:
        self._objects.clear()  # itself is among them

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields all Python tensors."""
        return (value for value in self._objects if issubclass(type(value), torch.Tensor))

    def tensors_over(self, wanted: Collection[int]) -> list[torch.Tensor]:
        """Returns all Python tensors over the storages with these identities."""
        found: list[torch.Tensor] = []
        for value in self.tensors():
            with contextlib.suppress(RuntimeError):  # a tensor of functorch, or one that is only half made
                if any(id(storage) in wanted for _, storage in storages(value)):
                    found.append(value)
        return found

    @cached_property
    def _referrers(self) -> dict[int, list[int]]:
        """By `id` of an object, the places of those that refer to it."""
        index: dict[int, list[int]] = {}
        for place, holder in enumerate(self._objects):
            if type(holder) is not types.FrameType:  # isinstance asks objects that answer with a warning
                for child in gc.get_referents(holder):
                    if gc.is_tracked(child):
                        index.setdefault(id(child), []).append(place)
        return index

    def name_referrers(
        self, tensors: list[torch.Tensor], names: Callable[[nn.Module], str]
    ) -> Iterator[tuple[torch.Tensor, str]]:
        """Yields each tensor with the named things that refer to it, nearest first."""
        level: list[Any] = list(tensors)
        paths: dict[int, list[tuple[int, str]]] = {id(tensor): [(i, "")] for i, tensor in enumerate(tensors)}
        for _ in range(_DEPTH):
            above: list[Any] = []
            found: dict[int, list[tuple[int, str]]] = {}
            for place in sorted({place for child in level for place in self._referrers.get(id(child), ())}):
                holder = self._objects[place]
                ways: list[tuple[int, str]] = []
                for child in gc.get_referents(holder):
                    for index, path in paths.get(id(child), ()):
                        name, done = _name(holder, child, path, names)
                        if name is None:
                            continue
                        if done:
                            yield tensors[index], name
                        else:
                            ways.append((index, name))
                if ways:
                    found[id(holder)] = ways
                    above.append(holder)
            if not above:
                return
            level, paths = above, found


def holders_of(wanted: Collection[int], names: Callable[[nn.Module], str]) -> tuple[dict[int, str], dict[int, str]]:
    """Finds who keeps the storages with these identities.

    Local variables have no names here.

    Returns:
        By identity, the name of what refers to a tensor over it, where it has one; and, of those that a graph holds,
        the name of what refers to a tensor with that graph, or "".
    """
    named: dict[int, str] = {}
    graphs: dict[int, str] = {}
    if not wanted:
        return named, graphs
    with Heap() as heap:
        for tensor, holder in heap.name_referrers(heap.tensors_over(wanted), names):
            for _, storage in storages(tensor):
                named.setdefault(id(storage), holder)
        alive: list[torch.Tensor] = []
        for value in heap.tensors():
            with contextlib.suppress(RuntimeError):  # a tensor of functorch, or a view whose base was changed in place
                if value.grad_fn is not None:
                    alive.append(value)
        graphs.update(dict.fromkeys(_held_by_graphs(alive, wanted), ""))
        for tensor, holder in heap.name_referrers(alive, names) if graphs else ():
            if not holder.startswith("ctx."):
                for key in _held_by_graphs([tensor], wanted):
                    graphs[key] = graphs[key] or holder
    return named, graphs


def _held_by_graphs(tensors: list[torch.Tensor], wanted: Collection[int]) -> list[int]:
    """Returns which of these identities the graphs of some tensors hold, in what autograd saves or in regions."""
    retainers = Retainers()
    retainers.start(tensors)
    retainers.walk()
    holds = ((key, retainers.of[key]) for key in wanted if key in retainers.of)
    return [key for key, hold in holds if hold.savers or hold.regions]


def _name(holder: Any, child: Any, path: str, names: Callable[[nn.Module], str]) -> tuple[str | None, bool]:
    """Returns the name of `path` seen from `holder`, and whether one can look for it; None to give up."""
    if isinstance(holder, dict):
        key = next((key for key, value in cast("dict[Any, Any]", holder).items() if value is child), None)
        return f"[{key!r}]{path}", False
    if isinstance(holder, types.FunctionType):
        cells = holder.__closure__ or ()
        if cells is not child or holder.__module__ == nn.Module.__module__:  # of the call of a module that runs now
            return None, False
        index, _, rest = path.removeprefix("[").partition("]")
        return f"closure variable '{holder.__code__.co_freevars[int(index)]}' of {holder.__qualname__}{rest}", True
    if isinstance(holder, (list, tuple)):
        index = next((i for i, value in enumerate(cast("list[Any]", holder)) if value is child), 0)
        return f"[{index}]{path}", False
    if isinstance(holder, types.CellType) or type(holder) in (set, frozenset, deque):
        return path, False
    try:
        attributes: Any = vars(holder)
    except TypeError:
        attributes = {}
    if attributes is child:  # `path` begins with the key in the instance's dict
        key, _, rest = path.removeprefix("['").partition("']")
    else:
        key, rest = next((str(key) for key, value in attributes.items() if value is child), ""), path
    if not key or isinstance(holder, type) or type(holder).__module__.startswith(_WATCHERS):
        return None, False
    if isinstance(holder, nn.Module):
        return f"{names(holder)}.{key}{rest}".removeprefix("."), True
    if isinstance(holder, types.ModuleType):
        return f"global '{key}' of {holder.__name__}{rest}", True
    if isinstance(holder, Node):
        return f"ctx.{key} of {_name_of(holder)}{rest}", True
    return f"{type(holder).__qualname__}.{key}{rest}", True
