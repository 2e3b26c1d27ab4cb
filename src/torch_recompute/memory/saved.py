"""`saved_activations`: what a forward keeps for backward, one row per storage, and the rows sum to the total.

The model runs once, while allocations are watched (`operations.py`). Then the graph alone is held and the result let
go. What was made in the forward and is alive now is what the forward keeps, whatever the reason: that is the total, and
it is exact before anything is explained. The explanation comes afterwards (`retainers.py`) and gives each row its kind,
the first of these that holds:

    saved     autograd saved it, for the nodes in `saved_by`
    region    a region holds it until its replay: an input, or what a saved call stores
    escaped   neither: it is alive because of a `ctx`, an attribute, a global, a closure; `held_by` says where. No
              recomputation frees it, because saved-tensor hooks do not see it

Parameters, buffers and inputs were there before: they cost nothing, and are listed apart (`existing`), with 0 bytes.

No region replays. Generators, buffers, hooks and the attributes of modules are put back; what else the model does to
the world stays done, as after any call. The table groups rows that differ only in the numbers within their module's
path, as the layers of a stack do.
"""

from __future__ import annotations

import gc
import json
import linecache
import operator
import os
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .. import _torch, errors
from .._torch.compiler import all_uncompiled
from .._torch.tensors import set_versions, versions_of
from ..engine.taken import EMPTY, content_of, labelled
from ..errors.text import counted, grouped, shown, starred, starred_path, table
from ..state import DEFAULT, Ambient, NumpyRng, PythonRng
from .batch import Batch, call_of
from .ledger import storages
from .operations import Allocation, Allocations
from .reach import Reach, put_back
from .retainers import Heap, Hold, Retainers

KINDS = ("saved", "region", "escaped")
_LINES = 40


def saved_activations(
    model: Callable[..., Any], args: Batch = (), kwargs: Mapping[str, Any] | None = None
) -> SavedActivations:
    """Lists what a forward keeps for backward: by module, by line, by storage.

        kept = saved_activations(model, batch)
        print(kept)
        kept.total_bytes, kept.by_module(), kept.by_line(), kept.by_kind()

    The model is called once, with grad, on its arguments as they are; fake and meta tensors will do, so a model of
    any size can be asked. Gradients, generators, hooks, weights and the buffers of its modules are left as they were
    (the buffers are copied for the time of the call); caches of autocast are emptied.

    Args:
        model: A module or another callable.
        args: A batch, see `make_plan`.
        kwargs: More keyword arguments of the call.

    Returns:
        The rows, one per storage, and their sums.

    Raises:
        ArgumentError: `model` cannot be called, or not with this batch.
    """
    call = call_of("saved_activations", model, args, kwargs, loss=False)
    values = [*call[0], *call[1].values()]
    reach = Reach(model, [value for value in values if isinstance(value, nn.Module)])
    kept = reach.keep()
    try:
        return _look(model, *call, reach)
    finally:
        put_back(kept)


def _look(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reach: Reach) -> SavedActivations:
    values = [*args, *kwargs.values()]
    names = module_names(model, reach)
    retainers = Retainers()
    with _state_as_before(reach, values), torch.inference_mode(False), torch.enable_grad():
        torch.clear_autocast_cache()  # a cast kept from before would not be seen, one kept from now is not the graph's
        result, made = Allocations(names).run(model, args, kwargs)
        torch.clear_autocast_cache()
        in_result = {id(storage) for tensor in retainers.start(result) for _, storage in storages(tensor)}
        with_result = _alive(made)
        del result
    alive = _alive(made)  # the graph alone holds these, and whatever escaped
    retainers.start(values)  # a tensor changed in place has a history too
    retainers.walk()
    cycles = _explain_the_rest(alive, made, retainers, lambda module: names.get(id(module), type(module).__name__))
    holds = {key: retainers.of.get(key, None if key in cycles else retainers.unseen) for key in alive}
    rows = [_row(made[key], n, holds[key], key in cycles, key in in_result) for key, n in alive.items()]
    rows.sort(key=lambda row: -row.bytes)
    known = _names_of_storages(reach, names, args, kwargs)
    existing: list[Row] = []
    for key, hold in retainers.of.items():
        if key not in alive:
            kind, name = known.get(key, ("other", ""))
            held_by = (*hold.regions, *hold.stashes)
            existing.append(Row(0, kind, "", tuple(hold.savers), held_by, name, "", *hold.about, False))
    result_only = sum(nbytes for key, nbytes in with_result.items() if key not in alive)
    return SavedActivations(tuple(rows), result_only, tuple(existing))


def _alive(made: Mapping[int, Allocation]) -> dict[int, int]:
    """Returns the bytes of the storages that are still there and not empty."""
    storages = ((key, one.storage()) for key, one in made.items())
    return {key: int(found.nbytes()) for key, found in storages if found is not None and found.nbytes()}


def _explain_the_rest(
    alive: Iterable[int], made: Mapping[int, Allocation], retainers: Retainers, name: Callable[[nn.Module], str]
) -> set[int]:
    """Finds out who keeps what no node and no region was found to keep; returns what was a cycle's garbage."""
    unknown = {key for key in alive if key not in retainers.of}
    if not unknown:
        return unknown
    with Heap() as heap:
        tensors = heap.tensors_over(unknown)
        retainers.start(tensors)  # the graph behind a tensor that a module has put aside is kept as well
        retainers.walk()
        tensors[:] = [t for t in tensors if any(id(s) in unknown and id(s) not in retainers.of for _, s in storages(t))]
        for tensor, holder in heap.name_referrers(tensors, name):
            retainers.note(tensor, "stashes", holder)
    del tensors[:]
    gc.collect()
    return {key for key in unknown if made[key].storage() is None}


@contextmanager
def _state_as_before(reach: Reach, values: list[Any]) -> Generator[None]:
    """Puts back the buffers, weights and generators that a call reaches, PyTorch's own, Python's and NumPy's."""
    reached = CallState(reach, values)
    with generators_as_before():
        try:
            with reached.keeping_weights():
                yield
        finally:
            reached.restore()


def generators() -> list[tuple[Ambient, Any]]:
    """The generator of `random`, NumPy's where it has been imported, and PyTorch's default ones, with their states."""
    numpy = (NumpyRng(),) if "numpy.random" in sys.modules else ()
    return [(ambient, ambient.capture()) for ambient in (PythonRng(), *numpy, *DEFAULT)]


@contextmanager
def generators_as_before() -> Generator[None]:
    """Puts these back."""
    states = generators()
    try:
        yield
    finally:
        for ambient, state in states:
            ambient.restore(state)


class Container(NamedTuple):
    """A namespace or container, and its content when it was captured. It is read and written by its base type alone."""

    label: str  # of a change; `{key}` is the name that changed
    container: Any  # a dict, list, set, deque or closure cell
    then: dict[Any, Any]
    counts: Callable[[Any], bool] | None = None  # the names that count; None for all

    @staticmethod
    def of(container: Any, counts: Callable[[Any], bool] | None = None, label: str = "") -> Container:
        """A container as it is now."""
        made = Container(label, container, {}, counts)
        return made._replace(then=made.now())

    def now(self) -> dict[Any, Any]:
        """Its content now."""
        found = contents(self.container)
        return found if self.counts is None else {key: value for key, value in found.items() if self.counts(key)}

    def restore(self) -> None:
        """Gives it the content back, where that is another one."""
        then, now = self.then, self.now()
        container: Any = self.container
        pairs = [(now.values(), then.values()), *([(now, then)] if isinstance(container, dict) else ())]
        if all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs):
            return
        if isinstance(container, types.CellType):
            del container.cell_contents
            if then:
                container.cell_contents = then[""]
        elif self.counts is not None:
            for name in now.keys() - then.keys():
                del container[name]
            container.update(then)
        else:
            fill(container, then if isinstance(container, dict) else then.values())


_DICTS: tuple[Any, ...] = (OrderedDict, dict)


def _base_of(container: Any) -> Any:
    return next(kind for kind in (*_DICTS, list, set, deque, tuple) if isinstance(container, kind))


def fill(container: Any, entries: Any) -> None:
    """Gives a container other entries in the place of its own; those of a dict are another dict, or pairs."""
    kind = _base_of(container)
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, entries)


def contents(container: Any) -> dict[Any, Any]:
    """Returns the content of a container, by key or position."""
    if isinstance(container, types.CellType):
        content = content_of(container)
        return {} if content is EMPTY else {"": content}
    kind = _base_of(container)
    if kind in _DICTS:
        return dict(kind.items(container))
    if kind is set:
        return {id(value): value for value in set.__iter__(cast("set[Any]", container))}
    return dict(enumerate(kind.__iter__(container)))


class BeforeWrites(_torch.TorchDispatchMode):
    """Copies each storage of some tensors before the first operation that writes to it.

    Attributes:
        open: Those of this process that are shown what simulations run on real tensors.
        waiting: The storages that are not copied yet, by identity.
        kept: Each storage that was copied, with the copy.
    """

    open: ClassVar[list[BeforeWrites]] = []

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        tensors = list(tensors)
        self.waiting = {id(one): one for _, one in storages(tensors) if one.device.type != "meta"}
        self._versions = versions_of(tensors)  # a graph around may have saved them
        self.kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def see(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copies what an operation is going to write to."""
        if not self.waiting:
            return
        for _, storage in storages(_torch.written_by(func, args, kwargs)):
            if self.waiting.pop(id(storage), None) is not None:
                self.kept.append((storage, storage.clone()))

    @contextmanager
    def simulated_ones(self) -> Generator[None]:
        """A context in which it is shown what simulations run."""
        self.open.append(self)
        try:
            yield
        finally:
            self.open.remove(self)

    def restore(self) -> None:
        """Gives the storages their content back."""
        with torch.no_grad():
            for storage, content in self.kept:
                storage.copy_(content)
        set_versions(self._versions)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)


class CallState:
    """The buffers, weights, generators and tables of hooks that a call reaches, as they are now.

    Attributes:
        generators: Each generator, with its state.
    """

    def __init__(self, reach: Reach, values: Iterable[Any]) -> None:
        # The first call of a LazyModule, which removes a hook, stays done.
        own = [vars(module) for module in reach.modules if not isinstance(module, LazyModuleMixin)]
        hooks = [held for names in own for name, held in names.items() if name in _HOOKS]
        self._namespaces = [(held, dict(held)) for held in (*reach.buffers(), *hooks)]
        buffers = [buffer for held in reach.buffers() for buffer in held.values() if buffer is not None]
        stored = {id(storage): storage for buffer in buffers for _, storage in storages(buffer)}.values()
        self._contents = [(storage, storage.clone()) for storage in stored if storage.device.type != "meta"]
        self._weights = [weight for module in reach.modules for weight in module.parameters(recurse=False)]
        self._versions = versions_of([*buffers, *self._weights])  # a graph around may have saved them
        generators = [*reach.generators, *(value for value in values if isinstance(value, torch.Generator))]
        self.generators = [(generator, generator.get_state()) for generator in generators]

    @contextmanager
    def keeping_weights(self) -> Generator[None]:
        """Copies the weights that a call within writes to, as a momentum encoder's, before it does."""
        mode = BeforeWrites(self._weights)
        try:
            with all_uncompiled(), mode:
                yield
        finally:
            self._contents += mode.kept

    def restore(self, *written: tuple[torch.UntypedStorage, torch.UntypedStorage]) -> None:
        """Makes them as they were; storages `written` to get the content beside them."""
        with torch.no_grad():
            for held, before in self._namespaces:
                held.clear()
                held.update(before)
            for storage, content in [*self._contents, *written]:
                storage.copy_(content)
            set_versions(self._versions)
        for generator, state in self.generators:
            generator.set_state(state)


def _row(one: Allocation, nbytes: int, hold: Hold | None, in_cycle: bool, in_result: bool) -> Row:
    kind, savers, holders = "escaped", (), ()
    if hold is not None:
        regions = hold.regions or ([one.region or "a region"] if hold.in_region else [])
        kind = "saved" if hold.plain else "region" if regions else "escaped"
        savers, holders = tuple(hold.savers), (*regions, *hold.stashes)
    if in_cycle:
        holders = (*holders, "a reference cycle, until the garbage collector runs")
    about = one.shape, one.dtype, one.device
    return Row(nbytes, kind, one.op, savers, holders, one.module, one.line, *about, in_result)


def module_names(model: object, reach: Reach) -> dict[int, str]:
    """Returns paths by `id`: of a model's modules, or a function's, below their class if it has several."""
    inner = {id(child) for module in reach.modules for child in module.children()}
    tops = [module for module in reach.modules if id(module) not in inner]
    if isinstance(model, nn.Module):
        tops.insert(0, model)
    names: dict[int, str] = {}
    for top in tops:
        alone = top is model or len(tops) == 1
        for path, module in top.named_modules(prefix="" if alone else type(top).__name__):
            names.setdefault(id(module), path)
    return names


def _names_of_storages(
    reach: Reach, names: Mapping[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, tuple[str, str]]:
    """Returns kind and name of what was there before the call, by `id` of its storage."""
    found: dict[int, tuple[str, str]] = {}
    for module in reach.modules:
        path = names.get(id(module), "")
        for kind, tensors in (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        ):
            for name, tensor in tensors:
                for _, storage in storages(tensor):
                    found.setdefault(id(storage), (kind, f"{path}.{name}".removeprefix(".")))
    for label, tensor in labelled(args, kwargs):
        for _, storage in storages(tensor):
            found.setdefault(id(storage), ("input", label))
    return found


# --- the result -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One storage that a forward keeps.

    Attributes:
        bytes: Its size in bytes.
        kind: "saved", "region" or "escaped"; "parameter", "buffer", "input" or "other" if it was there before.
        op: The operation that made it, as `aten.gelu`.
        saved_by: The nodes of the graph that saved it, as `GeluBackward0 (self)`.
        held_by: Regions that hold it; of one that escaped, the places that were found to refer to it.
        module: Path of the module that ran the operation, "" for the model itself; its own name if it was there before.
        line: `file:line` of the code that ran the operation.
        shape: Shape of the tensor as it was made.
        dtype: Its type, as `float32`.
        device: Its device, as `cuda:0`.
        in_result: Whether the model's result contains it too.
    """

    bytes: int
    kind: str
    op: str
    saved_by: tuple[str, ...]
    held_by: tuple[str, ...]
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    in_result: bool


@shown
class SavedActivations(NamedTuple):
    """The tensors that a forward keeps for backward; made by `saved_activations`. `print` shows a table.

    Attributes:
        rows: One per storage that was made in the forward and is alive without its result, largest first.
        result_bytes: Bytes made in the forward that are alive only as long as its result is; not in any row.
        existing: Parameters, buffers and inputs that the forward keeps too, with 0 bytes each.
    """

    rows: tuple[Row, ...]
    result_bytes: int
    existing: tuple[Row, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of the rows, in bytes."""
        return sum(row.bytes for row in self.rows)

    def by_module(self) -> dict[str, int]:
        """Bytes by path of the module that made them ("" is the model itself); they sum to the total, as all these."""
        return self._by(lambda row: row.module)

    def by_line(self) -> dict[str, int]:
        """Bytes by `file:line` of the code that made them."""
        return self._by(lambda row: row.line)

    def by_op(self) -> dict[str, int]:
        """Bytes by the operation that made them."""
        return self._by(lambda row: row.op)

    def by_device(self) -> dict[str, int]:
        """Bytes by device."""
        return self._by(lambda row: row.device)

    def by_kind(self) -> dict[str, int]:
        """Bytes "saved" by autograd, held by a "region", "escaped" from both; all three are always there."""
        return {**dict.fromkeys(KINDS, 0), **self._by(lambda row: row.kind)}

    def to_json(self) -> str:
        """Everything as JSON, with the sums by kind."""
        plain = {
            "total_bytes": self.total_bytes,
            "result_bytes": self.result_bytes,
            "by_kind": self.by_kind(),
            "rows": [row._asdict() for row in self.rows],
            "existing": [row._asdict() for row in self.existing],
        }
        return json.dumps(plain)

    def _by(self, key: Callable[[Row], str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[key(row)] = sums.get(key(row), 0) + row.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        kinds = [f"{kind} {errors.size(nbytes)}" for kind, nbytes in self.by_kind().items() if nbytes]
        title = f"{errors.size(self.total_bytes)} kept for backward in {counted(len(self.rows), 'tensor')}"
        lines = [f"{title}: {', '.join(kinds)}" if len(kinds) > 1 else title]
        if self.result_bytes:
            lines.append(f"{errors.size(self.result_bytes)} more as long as the output is alive")
        if not self.rows:
            return "\n".join(lines)
        listed = sorted(grouped(self.rows, _alike).values(), key=lambda rows: -sum(row.bytes for row in rows))
        head = ("bytes", "", "kind", "made by", "tensor", "module", "line", "kept by")
        lines += table([head, *map(_cells, listed[:_LINES])], right=2)
        rest = [row for rows in listed[_LINES:] for row in rows]
        if rest:
            lines.append(f"{sum(row.bytes for row in rest):,} bytes more in {counted(len(rest), 'smaller tensor')}")
        return "\n".join(lines)


def _alike(row: Row) -> tuple[Any, ...]:
    """Returns a key that is the same for the rows of one line of the table."""
    return row._replace(module=starred_path(row.module), held_by=tuple(map(starred, row.held_by)), in_result=False)


def _cells(rows: list[Row]) -> tuple[str, ...]:
    row = rows[0]
    several = len(rows) > 1 and len({(row.module, row.held_by) for row in rows}) > 1
    shown = _alike(row) if several else row
    return (
        f"{sum(row.bytes for row in rows):,}",
        f"{len(rows)} x" if len(rows) > 1 else "",
        row.kind,
        row.op,
        f"{row.dtype}{list(row.shape)}" + ("" if row.device == "cpu" else f" {row.device}"),
        shown[5],
        short_line(row.line),
        _join(row.saved_by if row.kind == "saved" else shown[4]),
    )


def short_line(line: str) -> str:
    """Returns the file's name, the number, and the code there."""
    file, _, number = line.rpartition(":")
    if not file:
        return ""
    code = linecache.getline(file, int(number)).strip()
    return f"{os.path.basename(file)}:{number}  {code if len(code) <= 40 else code[:37] + '...'}".rstrip()


def _join(names: Iterable[str]) -> str:
    """Joins names; `A (x), A (y)` becomes `A (x, y)`."""
    fields: dict[str, list[str]] = {}
    for name in names:
        node, _, field = name.partition(" (")
        fields.setdefault(node, []).append(field.removesuffix(")"))
    merged = [f"{node} ({', '.join(filter(None, found))})" if any(found) else node for node, found in fields.items()]
    return ", ".join(merged[:3]) + (f" and {len(merged) - 3} more" if len(merged) > 3 else "")
