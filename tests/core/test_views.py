"""Views rebuilt over other memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_recompute.engine.views import geometry

BASES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(24.0).view(4, 6),
    "transposed": lambda: torch.arange(24.0).view(6, 4).mT,
    "offset": lambda: torch.arange(30.0)[6:].view(4, 6),
    "slices": lambda: torch.arange(48.0).view(4, 12)[:, ::2],
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda b: b.detach(),
    "row": lambda b: b[1],
    "rows": lambda b: b[1:3],
    "column": lambda b: b[:, 2],
    "every other": lambda b: b[::2, 1::2],
    "transposed": lambda b: b.mT,
    "flipped order": lambda b: b.unflatten(1, (2, 3)).permute(2, 0, 1),
    "one more dimension": lambda b: b[:, None],
    "expanded": lambda b: b[0].expand(3, 6),
    "diagonal": lambda b: b.diagonal(),
    "windows": lambda b: b.unfold(1, 3, 1),
    "nothing": lambda b: b[:0],
    "number": lambda b: b[1, 2],
}


@pytest.mark.parametrize("make", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_is_rebuilt_over_other_memory(make: Any, look: Any) -> None:
    """A view placed relative to its base is found again over another base that is laid out like the first."""
    base = make()
    view = look(base)
    place = geometry(view, base)
    assert place is not None
    new = torch.empty_strided(base.shape, base.stride())
    new.copy_(base + 100)
    rebuilt = place.of(new)
    assert rebuilt is not None
    assert torch.equal(rebuilt, look(new))
    assert rebuilt.stride() == view.stride()
    if rebuilt.numel():
        assert rebuilt.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()


@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_may_lie_outside_of_its_base(look: Any) -> None:
    """Two views of one memory are placed relative to each other also where neither holds the other."""
    memory = torch.arange(48.0).view(8, 6)
    base, other = memory[4:], look(memory[:4])
    place = geometry(other, base)
    assert place is not None
    copy = memory.clone() + 100
    assert torch.equal(place.of(copy[4:]), look(copy[:4]))


def test_a_base_laid_out_otherwise() -> None:
    """Over a base with other strides the view has the same elements; where the old one was expanded, none."""
    base = torch.arange(24.0).view(4, 6)
    place = geometry(base[1], base)
    assert place is not None
    again = place.of(base.mT.contiguous().mT)
    assert again is not None
    assert torch.equal(again, base[1])
    expanded = torch.arange(6.0).expand(4, 6)
    place = geometry(expanded[:, 1], expanded)
    assert place is not None
    assert place.of(expanded.contiguous()) is None


class Wrapped(torch.Tensor):
    """A subclass, whose memory may be anywhere."""


NOT_PLACED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "another dtype": lambda b: (b.view(torch.int32), b),
    "a part of complex numbers": lambda b: (torch.view_as_real(b.to(torch.complex64)), b.to(torch.complex64)),
    "a conjugate": lambda b: (b.to(torch.complex64).conj(), b.to(torch.complex64)),
    "a negative": lambda b: (b.to(torch.complex64).conj().imag, b),
    "a subclass": lambda b: (b.as_subclass(Wrapped), b),
    "a sparse matrix": lambda b: (b.to_sparse(), b),
}


@pytest.mark.parametrize("make", NOT_PLACED.values(), ids=NOT_PLACED.keys())
def test_what_strides_cannot_say_is_refused(make: Any) -> None:
    """A view of another dtype, with a lazy bit, of a subclass or a sparse layout has no place."""
    view, base = make(torch.arange(24.0).view(4, 6))
    assert geometry(view, base) is None
    assert geometry(base, view) is None
