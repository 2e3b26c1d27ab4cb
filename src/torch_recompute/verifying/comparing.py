"""What two steps left, laid side by side; and how far two runs of the same step are apart by themselves.

Two tensors are the same if all their bits are. If they are not, their distance is the largest difference of two
elements, relative to the largest element. The noise of a tensor is its distance between two plain steps; what is
allowed is `NOISE` times that. A sum in another order changes a tensor in one pair of runs and by luck not in another,
so where there is noise at all, a tensor is allowed at least what is usual in this step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping

import torch

from .. import _tree
from ..auditing.comparing import Print
from .result import Row
from .steps import Left

NOISE = 4.0
"""Times the noise of the plain step is allowed: two runs tell little of how large noise can be."""
KINDS = ("outputs", "gradients", "buffers", "generators")


class Noise:
    """How far two plain steps are apart.

    Attributes:
        distances: Of each tensor that differs.
        generators: The global generators that are left in another state each time.
        attributes: The attributes that are.
    """

    def __init__(self, first: Left, second: Left, changes: tuple[list[str], list[str]]) -> None:
        pairs = (pair for kind in KINDS for pair in _pairs(first, second, kind))
        distances = {name: distance(a, b) for name, a, b in pairs}
        self.distances = {name: found for name, found in distances.items() if found}
        self.generators, self.attributes = changes
        finite = [found for found in self.distances.values() if math.isfinite(found)]
        self._usual = statistics.median(finite) if finite else 0.0

    @property
    def largest(self) -> float:
        """Of all tensors."""
        return max(self.distances.values(), default=0.0)

    def allowed(self, name: str) -> float:
        """How far a tensor may be from the plain step's."""
        return NOISE * max(self.distances.get(name, 0.0), self._usual)


def rows(plain: Left, other: Left, noise: Noise) -> Iterator[Row]:
    """A row for each tensor: whether it is the plain step's, and how far from it."""
    for kind in KINDS:
        for name, mine, theirs in _pairs(plain, other, kind):
            apart, allowed = distance(mine, theirs), noise.allowed(name)
            words = "" if apart <= allowed else _words(mine, theirs, allowed)
            yield Row(kind, name, apart, allowed, words)


def distance(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """The largest difference relative to the largest element; infinite where it is no number, or one is missing."""
    if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return math.inf
    a, b = _flat(mine), _flat(theirs)
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = ((a - b).abs().max() / a.abs().max()).item()
    return apart if math.isfinite(apart) else math.inf


def _words(mine: torch.Tensor | None, theirs: torch.Tensor | None, allowed: float) -> str:
    if mine is None:
        return "is there with regions only"
    if theirs is None:
        return "is missing with regions"
    if mine.dtype != theirs.dtype:
        return f"is {theirs.dtype} with regions, and {mine.dtype} without"
    a, b = (Print(_tree.digest(one), one, one.numel()) for one in (_flat(mine), _flat(theirs)))
    noisy = f"; noise of the plain step would explain {allowed:.2g} of the largest value" if allowed else ""
    return f"differs {a.apart(b)}{noisy}"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _pairs(first: Left, second: Left, kind: str) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    mine: Mapping[str, torch.Tensor] = getattr(first, kind)
    theirs: Mapping[str, torch.Tensor] = getattr(second, kind)
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        yield name, mine.get(name), theirs.get(name)
