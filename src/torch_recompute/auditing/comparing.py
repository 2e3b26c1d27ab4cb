"""Two runs of a region as lists of operations, and the first place where they are not the same.

Of each result a digest of all bits is kept, and some of its values, to say how far two results are apart: all of a
small tensor, evenly spaced ones of a large one. Keeping the results themselves would need the memory that
recomputation saves. Of a choice of experts (`topk`, `argmax`) all indices are kept.

Where a function asks `doing_recompute()` or has saved a value for its replay, the second run may leave out work of the
first; then what the second run does must be there in the first, in this order.

Invariants. Digests stay on their device until they are compared. An entry holds none of the tensors it tells of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _compat, _tree

SAMPLE = 4096
"""How many values of a large tensor are kept."""


class Print(NamedTuple):
    """What is kept of one tensor.

    Attributes:
        digest: A fingerprint of all its bits.
        values: All of its values, or evenly spaced ones, flat.
        size: How many values the tensor has.
    """

    digest: torch.Tensor
    values: torch.Tensor
    size: int

    def same(self, other: Print) -> bool:
        """Whether all bits are the same."""
        return self.size == other.size and torch.equal(self.digest, other.digest)

    def apart(self, other: Print) -> str:
        """How far another one is from this one, in words."""
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


class Chosen(NamedTuple):
    """What a choice came to.

    Attributes:
        indices: Those of one token in the last dimension.
        ordered: Whether their order is the choice, as in a sort, and not which they are.
    """

    indices: torch.Tensor
    ordered: bool

    def moved(self, other: Chosen) -> tuple[int, int] | None:
        """How many tokens of how many another choice sends elsewhere; None where they cannot be compared."""
        if self.indices.shape != other.indices.shape or self.indices.numel() == 0:
            return None
        then, now = (c.indices if c.ordered else c.indices.sort(-1)[0] for c in (self, other))
        differ = (then != now).any(-1)
        return int(differ.sum()), differ.numel()

    def say(self, moved: int, of: int) -> str:
        """What `moved` found, in words."""
        what = "rows come in another order" if self.ordered else "tokens go elsewhere"
        return f"{moved:,} of {of:,} {what}"


class Entry:
    """One operation of a run.

    Attributes:
        op: Its name, as `aten.topk`.
        module: Path of the module that ran it.
        line: `file:line` of the code that ran it.
        near: The same, if it lies inside the region; else "".
        region: The innermost region it ran in.
        metas: Shape and type of each tensor it returned; numbers as they are.
        prints: What is kept of its results; none of a view, which shows memory that has been looked at.
        chosen: The indices, where it is a choice.
        random: Whether it draws random numbers; the name of the argument where from a generator it was given.
    """

    __slots__ = ("chosen", "line", "metas", "module", "near", "op", "prints", "random", "region")

    def __init__(self, op: str, module: str, line: str, region: str) -> None:
        self.op, self.module, self.line, self.near, self.region = op, module, line, "", region
        self.metas: list[Any] = []
        self.prints: list[Print] = []
        self.chosen: Chosen | None = None
        self.random = ""

    def is_like(self, other: Entry) -> bool:
        """Whether the other is the same operation at the same place."""
        return self.op == other.op and self.near == other.near


class Difference(NamedTuple):
    """The first place where two runs are not the same.

    Attributes:
        entry: The operation, in the first run if it is there.
        what: "value", "shape" or "operation".
        detail: In words.
    """

    entry: Entry
    what: str
    detail: str


def print_of(tensor: torch.Tensor) -> Print | None:
    """What to keep of a tensor; None of one that holds no values, or is of a subclass."""
    if tensor.device.type == "meta" or tensor.numel() == 0 or not (_compat.is_plain(tensor)):
        return None
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.layout is not torch.strided:
        flat = flat.values() if flat.is_nested else flat.to_dense()
    flat = flat.reshape(-1)
    step = -(-flat.numel() // SAMPLE)
    return Print(_tree.digest(tensor), flat[::step].clone(), flat.numel())


def _say(metas: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(meta[1]).removeprefix('torch.')}{list(meta[0])}" if type(meta) is tuple else repr(meta) for meta in metas
    )


def first_difference(then: Sequence[Entry], now: Sequence[Entry], shorter: bool) -> Difference | None:
    """The first place where a second run is not as the first was.

    Args:
        then: The operations of the first run.
        now: Those of the second.
        shorter: Whether the second run may leave out operations of the first.
    """
    place = 0
    for entry in now:
        start = place
        while shorter and place < len(then) and not (entry.is_like(then[place]) and entry.metas == then[place].metas):
            place += 1
        if place == len(then):
            place = start
        if place == len(then):
            return Difference(entry, "operation", "the first run had ended before it")
        first = then[place]
        found = _compare(first, entry)
        if found is not None:
            return found
        place += 1
    if place < len(then) and not shorter:
        return Difference(then[place], "operation", "the second run ended before it")
    return None


def _compare(then: Entry, now: Entry) -> Difference | None:
    if not then.is_like(now):
        where = f" at {now.near.rpartition('/')[2]}" if now.near != then.near else ""
        return Difference(then, "operation", f"in its place the second run did {now.op}{where}")
    if then.metas != now.metas:
        words = f"returned {_say(now.metas)} in the second run, {_say(then.metas)} in the first"
        return Difference(then, "shape" if any(type(m) is tuple for m in then.metas) else "value", words)
    if then.chosen is not None and now.chosen is not None:
        moved = then.chosen.moved(now.chosen)
        if moved is not None and moved[0]:
            return Difference(then, "value", f"its indices differ: {then.chosen.say(*moved)}")
    for i, (a, b) in enumerate(zip(then.prints, now.prints, strict=False)):
        if not a.same(b):
            which = f"output {i} of {len(then.prints)} differs " if len(then.prints) > 1 else "its output differs "
            return Difference(then, "value", which + a.apart(b))
    return None


def flips(then: Sequence[Entry], now: Sequence[Entry]) -> list[tuple[Entry, str]]:
    """The choices that came out otherwise: each with how many tokens moved, in words."""
    found: list[tuple[Entry, str]] = []
    later = [entry for entry in now if entry.chosen is not None]
    for entry in then:
        match = next((other for other in later if entry.is_like(other)), None) if entry.chosen is not None else None
        if match is None or entry.chosen is None or match.chosen is None:
            continue
        later.remove(match)
        moved = entry.chosen.moved(match.chosen)
        if moved is not None and moved[0]:
            found.append((entry, entry.chosen.say(*moved)))
    return found
