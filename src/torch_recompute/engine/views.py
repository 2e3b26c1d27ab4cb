"""Views described relative to another view of the same memory, from which they can be rebuilt."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from .. import _torch


class Geometry(NamedTuple):
    """A view of some memory, placed relative to `base`, another view of the same memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    base_stride: tuple[int, ...]
    whole: bool

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        if self.whole:
            return base.detach()
        if base.stride() != self.base_stride:
            return self._laid_out(base)
        return base.detach().as_strided(self.size, self.stride, base.storage_offset() + self.shift)

    def _laid_out(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over a copy of `base` with the strides that it had (a store may have returned it without gaps)."""
        try:
            copy = base.new_empty_strided(base.shape, self.base_stride).copy_(base.detach())
            return copy.as_strided(self.size, self.stride, self.shift)
        except RuntimeError:  # the elements of the old one overlapped, or the view reached beyond it
            return None


class SplitGeometry(NamedTuple):
    """A DTensor relative to another: as its part on this rank is, if the two are split alike on a mesh."""

    part: Geometry
    layout: dict[str, Any]
    base_stride: tuple[int, ...]

    def of(self, base: torch.Tensor) -> torch.Tensor | None:
        """The view, over the memory of a new `base`; None where that cannot be had."""
        part = _part(base.detach())
        view = None if part is None else self.part.of(part)
        return None if view is None else cast("Any", type(base)).from_local(view, **self.layout)


WHOLE = Geometry((), (), 0, (), True)
"""That of a tensor relative to itself."""


AnyGeometry = Geometry | SplitGeometry


def _part(tensor: Any) -> torch.Tensor | None:
    """Returns this rank's part of a DTensor, once a collective has delivered it; None for other subclasses."""
    if not hasattr(tensor, "placements"):
        return None
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local


def _split_geometry(view: Any, base: Any) -> SplitGeometry | None:
    part, whole = _part(view.detach()), _part(base.detach())
    if part is None or whole is None or _torch.storage_id(part) != _torch.storage_id(whole):
        return None
    found = geometry(part, whole)
    if not isinstance(found, Geometry):
        return None
    layout = {"device_mesh": view.device_mesh, "placements": view.placements, "run_check": False}
    return SplitGeometry(found, {**layout, "shape": view.shape, "stride": view.stride()}, base.stride())


def geometry(view: torch.Tensor, base: torch.Tensor) -> AnyGeometry | None:
    """Describes `view` relative to `base`; None where strides cannot say it (other dtype, subclass, layout)."""
    plain = view.layout is torch.strided and base.layout is torch.strided
    if not plain or view.dtype != base.dtype or view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg():
        return None
    if not _torch.is_plain(view) or not _torch.is_plain(base):
        return _split_geometry(view, base)
    shift = int(view.storage_offset() - base.storage_offset())
    whole = shift == 0 and view.shape == base.shape and view.stride() == base.stride()
    return Geometry(tuple(view.shape), view.stride(), shift, base.stride(), whole)
