"""Shape-only tensors: what a saved call returns in a replay when nothing that backward needs reads its values.

Problem. Dropout ends an attention and an MLP. Backward needs its mask, which follows from the generator and a shape;
to draw it again, a replay of the code as it is written computes the product in front of it too, or keeps its result.

Idea. That product is a saved call of which nothing is kept (`no_recompute(fn, values_unused=True)`). In the replay it
returns a `ShapeOnly`, which has the shape, strides, type and device of the result and no memory. What is computed from
it element by element is shape-only as well; what asks for its shape alone (`empty_like`, the mask of a dropout) gets a
real answer.

Any other operation on it needs values: a product, a reduction, autograd that saves it, `item()`. That raises
`Read`, and the replay is run once more with the call repeated. So a wrong mark costs one replay and warns, and never a
wrong gradient.

Rejected: values computed when they are first read, which keeps all that they would be computed from alive, and has to
know of every change in place in between; tensors of one element expanded to the shape, of which a kernel that is
not intercepted would read garbage.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _torch, errors
from .._torch import is_operator
from .._torch.modes import without_modes
from .._torch.tensors import each_tensor
from ..state.tape import thread
from .slots import Read, Unread

aten: Any = torch.ops.aten
ASK_FOR_LAYOUT = frozenset(
    getattr(aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_MOVES = frozenset(
    getattr(aten, name).default
    for name in ("_to_copy", "clone", "_unsafe_view", "cat", "stack", "repeat", "roll", "flip")
)
_refusing: list[bool] = []
_said: set[tuple[str, str]] = set()
DROPOUT = aten.native_dropout.default


class TensorLayout(NamedTuple):
    """Shape, strides, type and device of a tensor."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        """A tensor's."""
        return TensorLayout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class ShapeOnly(torch.Tensor):
    """A tensor without values.

    Attributes:
        call: The saved call that it is the result of, or computed from.
    """

    __slots__ = ("call",)
    __torch_function__ = _torch.no_torch_function
    call: Unread

    @staticmethod
    def make(layout: TensorLayout, call: Unread) -> ShapeOnly:
        """Returns a shape-only tensor, without grad."""
        made: ShapeOnly = _torch.without_memory(ShapeOnly, *layout)
        made.call = call
        return made

    def missing(self, op: str) -> BaseException:
        """Returns the error for an operation that needs values."""
        if thread.run is not None and thread.run.replaying:
            return Read(self.call, op)
        return errors.MismatchError(_read_outside(self.call.name, op))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The tensors that it is made of, for those who count bytes: none. Compiled code would be compiled for it."""
        if _torch.being_traced():
            raise self.missing("compiled code")
        return [], None

    __tensor_unflatten__: Any = None

    def tolist(self) -> Any:
        """Raises, for it needs values and runs no operation; as the next three do."""
        raise self.missing("tolist()")

    def numpy(self, **_: Any) -> Any:
        """Raises, as `tolist` does."""
        raise self.missing("numpy()")

    def data_ptr(self) -> int:
        """Raises, as `tolist` does."""
        raise self.missing("data_ptr()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raises, as `tolist` does."""
        raise self.missing("__array__()")

    def __repr__(self, **_: Any) -> str:
        return f"<a tensor without values, from {self.call.name}>"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = next(x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, ShapeOnly))
        if func in ASK_FOR_LAYOUT and args[0] is tensor:
            return func(_on_meta(tensor), *args[1:], **{**kwargs, "device": kwargs.get("device") or tensor.device})
        if func is DROPOUT and args[0] is tensor:  # a mask depends on the layout
            _, mask = func(_blank(tensor, tensor.device), *args[1:], **kwargs)
            return ShapeOnly.make(TensorLayout.of(tensor), tensor.call), mask
        if not goes_through(func):
            raise tensor.missing(str(func))
        written = _torch.written_by(func, args, kwargs)
        if written:
            if not all(isinstance(x, ShapeOnly) for x in written):
                raise tensor.missing(str(func))
            return written[0]
        with without_modes():
            made = func(*each_tensor(args, _on_meta), **each_tensor(kwargs, _on_meta))
        call, device = tensor.call, tensor.device
        return each_tensor(made, lambda x: ShapeOnly.make(TensorLayout.of(x)._replace(device=device), call))


def _read_outside(call: str, op: str) -> str:
    """Text for values of an unread call that are asked for where no replay can be run again."""
    return (
        f"{op} needs the values of what {call} returned in a replay, where it is marked values_unused and has none; "
        "and no replay can make them, because the tensor was taken out of the one that it belongs to (into an "
        "attribute, a list, another region).\n"
        "  Keep its output: no_recompute(fn) without values_unused=True; in a plan, @product in the place of "
        "@values_unused."
    )


def give_values(region: str, read: Read) -> None:
    """Has the next replay of a region repeat the call whose values were missing; says so once.

    Raises:
        MismatchError: It repeated it already, and what is without values is left of an earlier one.
    """
    if not read.call.make_again():
        raise errors.MismatchError(_read_outside(read.call.name, read.op)) from None
    if _refusing:
        raise errors.MismatchError(read.op)
    said = (region, read.call.name)
    if said not in _said:
        _said.add(said)
        warnings.warn(
            f"In {region} the output of {read.call.name} is marked values_unused, but the replay needs its values; "
            f"they are read by {read.op}. The replay is run once more with the call repeated, which costs time in "
            "every step. Keep the output instead (no_recompute(fn) without values_unused=True; in a plan, @product "
            "in the place of @values_unused), or let the call be recomputed. (Said once.)",
            RuntimeWarning,
            stacklevel=3,
        )


@contextlib.contextmanager
def refusing() -> Generator[None]:
    """Makes it an error, in the block, to read a call that is marked values_unused; for trying what could be marked."""
    _refusing.append(True)
    try:
        yield
    finally:
        _refusing.pop()


def goes_through(func: Any) -> bool:
    """Whether an operation is elementwise, a view, or moves elements, so that the shape of its result is enough."""
    if not is_operator(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func.is_view or torch.Tag.pointwise in func.tags or func in _MOVES


def _blank(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the same layout, with whatever is in its memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    with without_modes():
        return _blank(tensor, "meta")
