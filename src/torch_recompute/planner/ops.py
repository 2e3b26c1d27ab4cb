"""Operations as keys: what ran, on which shapes; enough to price one, or to run it alone on a device.

A fake tensor has no values, so an operation is known by its overload, its other arguments, and the shape, strides and
dtype of each tensor. Equal layers run equal keys, so a model of a hundred layers has some fifty of them. An operation
that returns only views of its inputs costs nothing and has no key.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from .._torch import is_operator, tensors_in
from .._torch.fakes import APART, device_of, writes
from .._torch.flops import flops, fused_on_cpu
from ..engine.shape_only import ASK_FOR_LAYOUT
from ..memory.ledger import Place
from ..memory.operations import Operation, Operations
from ..plan.plan import Plan
from ..plan.roles import inside
from ..simulation.devices import Work
from ..state.observer import running


@dataclass(frozen=True)
class Meta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"  # type of the device

    @property
    def bytes(self) -> int:
        """Bytes of its elements; a dimension with stride 0 counts once."""
        sizes = (size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return math.prod(sizes) * self.dtype.itemsize


class RankGroup(NamedTuple):
    """A group of ranks by its name, as "tensor-4", or "shard-64-8" for 8 ranks among 64 in a row."""

    word: str
    span: int
    size: int


FROM_HOST = "weights from host memory"


@dataclass(frozen=True)
class Op:
    """One operation on tensors of given shapes."""

    func: Any  # the overload, such as `aten.mm.default`, or a higher-order operator, such as `flex_attention`
    args: tuple[Any, ...]  # tensors as `Meta`, lists as tuples
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Meta, ...]
    flops: int  # as PyTorch counts them: 0 except for products

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return sum(meta.bytes for meta in metas((self.args, self.kwargs, self.results)))

    @property
    def read(self) -> Iterator[Meta]:
        """The tensors that it reads."""
        return metas((self.args, self.kwargs))

    @property
    def all_flops(self) -> int:
        """The FLOPs, those of the CPU's fused attention too, which PyTorch does not count.

        A step for a device by name is simulated with the CPU's kernels, and attention is no cheaper there for that.
        """
        return self.flops or fused_on_cpu(self.func, self.args)

    @property
    def sent_bytes(self) -> int | None:
        """The bytes that each rank of a group sends for a collective of `_c10d_functional`; None for other operations.

        In a ring a gathering or a scattering of so many bytes sends all but a rank's own share of them, and an
        all-reduce is one of each; an all-to-all of uneven parts takes as long as the longer side. A group whose
        name does not say its size is taken to be large.
        """
        name = self.func.name().partition("::")
        kind = _RINGS.get(name[2].partition(".")[0]) if name[0] == "_c10d_functional" else None
        if kind is None:
            return None
        times, side = kind
        size = self.group.size
        ends = {"in": self.args, "out": self.results, "either": (self.args, self.results)}
        moved = max((meta.bytes for meta in metas(ends[side])), default=0)
        return times * (moved - moved // size if size else moved)

    @property
    def in_host_memory(self) -> bool:
        """Whether it reads or writes host memory beside a device by its data sheet."""
        read = () if self.func in ASK_FOR_LAYOUT else (self.args, self.kwargs)
        return any(meta.device == APART.type for meta in metas((read, self.results)))

    @property
    def moved(self) -> str:
        """Whether it goes to such memory, or comes from it, and what: in words; "" for what is done on one side."""
        devices = {meta.device for meta in metas((self.args, self.kwargs, self.results)) if meta.shape}
        if APART.type not in devices or len(devices) == 1:
            return ""
        return "gradients to host memory" if self.results[0].device == APART.type else FROM_HOST

    @property
    def group(self) -> RankGroup:
        """The group of a collective: that of its name, or of unknown size."""
        word, *numbers = str(self.args[-1]).split("-")
        sizes = [int(number) for number in numbers if number.isdigit()]
        return RankGroup(word, sizes[0], sizes[-1]) if sizes else RankGroup(word, 0, 0)


_RINGS = {
    "all_gather_into_tensor": (1, "out"),
    "reduce_scatter_tensor": (1, "in"),
    "all_reduce": (2, "in"),
    "all_reduce_": (2, "in"),
    "all_to_all_single": (1, "either"),
}


def metas(value: object) -> Iterator[Meta]:
    """The tensors in a nest of tuples."""
    if isinstance(value, Meta):
        yield value
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from metas(item)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return repr(value.shape)
        return Meta(tuple(value.shape), tuple(value.stride()), value.dtype, device_of(value).type)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in cast("Iterable[Any]", value))
    return None if isinstance(value, torch.Generator) else value


def op_of(ran: Operation) -> Op | None:
    """The key of an operation that has run; None for one that neither made nor wrote memory."""
    return ran.once(_op_of)


def _op_of(ran: Operation) -> Op | None:
    func, args, kwargs, out = ran.func, ran.args, ran.kwargs, ran.out
    if not writes(func) and not ran.made:
        return None
    counted = flops(func, args, kwargs, out)
    if not is_operator(func):  # the tensors of a higher-order operator are enough for its price
        args, kwargs = tuple(tensors_in((args, kwargs))), {}
    named = tuple((name, _plain(value)) for name, value in sorted(kwargs.items()))
    return Op(func, _plain(args), named, tuple(metas(_plain((out,)))), counted)


def logging(seen: Callable[[Op, Operation], None]) -> Operations:
    """The mode that shows the operations that run inside and make or write memory, each with its key."""

    def look(ran: Operation) -> None:
        op = op_of(ran)
        if op is not None:
            seen(op, ran)

    return Operations(look)


def work_of(counts: Mapping[Op, int], price: Callable[[Op], float]) -> Work:
    """The work of some operations, each so many times, for device and host."""
    launched = sum(count for op, count in counts.items() if not op.in_host_memory)
    return Work(sum(price(op) * count for op, count in counts.items()), launched)


def is_kept() -> bool:
    """Whether what runs now is part of a call that a region keeps, or of a decision that it carries."""
    inside = running()
    return bool(inside) and inside[-1].kind in ("saved call", "choice")


class Ran(NamedTuple):
    """An operation of a step: the phase and the segment ("" for none) in which it ran, and its key."""

    phase: str
    segment: str
    op: Op


class StepLog:
    """Counts the operations of a simulated step, by segment; its `see` is a watch of `simulate_step`.

    Args:
        segments: The paths of the segments.
        plan: The regions of the step.
        ordered: Whether the order of forward and backward counts, where ranks send beside them.

    Attributes:
        ran: How often each operation ran.
        order: Those of forward and backward in their order, if that counts.
    """

    def __init__(self, segments: Sequence[str], plan: Plan, ordered: bool = False) -> None:
        self._segments, self._ordered = sorted(segments, key=len, reverse=True), ordered
        self.segment_of = functools.cache(self._segment_of)
        self._regions = defaultdict[str, float](float)
        for choice in plan.choices:
            for path in choice.modules:
                self._regions[self.segment_of(path)] += 1 / len(choice.modules) + choice.nested
        self._keeping = {self.segment_of(path) for c in plan.choices if c.keep or c.carry for path in c.modules}
        self.ran: Counter[Ran] = Counter()
        self.order: list[Ran] = []
        self._times: dict[str, set[int]] = {}
        self._calls: Counter[str] = Counter()
        self._watched: Counter[str] = Counter()

    def _segment_of(self, module: str) -> str:
        return next((path for path in self._segments if inside(module, path)), "")

    def see(self, place: Place, operation: Operation) -> None:
        """Counts an operation."""
        op = op_of(operation)
        if op is None:
            return
        shared = op.sent_bytes is not None and op.group.word in ("shard", "replica")
        segment = "" if op.moved or shared else self.segment_of(place.module)
        ran = Ran(place.phase, segment, op)
        self.ran[ran] += 1
        if self._ordered and ran.phase != "optimizer":
            self.order.append(ran)
        if place.phase == "forward" and segment:
            self._times.setdefault(segment, set()).add(dict(place.calls).get(segment, 1))
        if segment in self._keeping and running():
            self._watched[segment] += 1
            self._calls[segment] += is_kept()

    def clear(self) -> None:
        """Forgets what has run."""
        for counted in (self.ran, self.order, self._times, self._calls, self._watched):
            counted.clear()

    def ops(self, *phases: str) -> Counter[Op]:
        """Counts how often each operation ran in some phases; in all, without any."""
        found: Counter[Op] = Counter()
        for ran, count in self.ran.items():
            if not phases or ran.phase in phases:
                found[ran.op] += count
        return found

    def parts(self, price: Callable[[Op], float], *, plain: bool = False) -> dict[str, Work]:
        """The work of each part of a forward and a backward, by segment; `plain` is what it is without replays."""
        found: dict[str, Work] = {"": Work()}
        for (phase, segment, op), count in self.ran.items():
            if phase != "optimizer" and not (plain and phase == "replay"):
                launched = 0 if op.in_host_memory else count
                again = phase == "replay"
                more = Work(price(op) * count, launched * (not again), launched * again)
                found[segment] = found.get(segment, Work()).plus(more)
        for segment, count in self._regions.items() if not plain else ():
            times = len(self._times.get(segment, ())) or 1
            calls = Work(regions=count * times, calls=self._calls[segment], watched=self._watched[segment])
            found[segment] = found.get(segment, Work()).plus(calls)
        return found
