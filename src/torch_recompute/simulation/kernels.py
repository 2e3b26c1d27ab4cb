"""What an operation makes of fake tensors, asked once of PyTorch and remembered.

Problem. PyTorch takes a third of a millisecond to say what an operation returns, its own cache included, and the step
of a large model has tens of thousands of operations, almost all of them the same as in the layer before.

Idea. What comes out depends on the operation, the layout of the tensors that go in and the other arguments. So the
first answer is taken down as a recipe: new tensors of some layout, views over the memory of an argument, an argument
itself. Whatever does not fit one of these (results over each other's memory, sizes that change) is asked each time.

This is why identical layers need not be recognised: the second one costs only the books.

Where PyTorch's answer is not what its kernels do (the layout of a batch norm's result, the memory of a loss, one tensor
twice), theirs is taken.

Invariants. A recipe holds no tensor. Nothing here makes a reference cycle, which would keep an operation's arguments
alive until the garbage collector runs, and would be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _compat
from .._compat.fakes import FakeTensor, FakeTensorMode, lay, on_fakes

aten: Any = torch.ops.aten


class _Made(NamedTuple):
    """How one tensor of a result is made; `source` is the argument whose memory it lies over, None for its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None


_UNREDUCED = {  # losses that write every element into the memory of their result; where `reduction` is
    aten.binary_cross_entropy.default: 3,
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
}
_LAID_OUT_AS = {aten.copysign.Tensor: aten.atan2.default}
"""Operations whose fakes have another layout than their results, and one with the same result whose fakes have it."""
_BATCH_NORMS = {aten.native_batch_norm.default, aten.native_batch_norm_backward.default}
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_ASK = object()
_NOTHING = object()
_MOST = 2**16
_recipes: dict[Any, Any] = {}


def _dense(out: Sequence[Any]) -> tuple[Any, ...]:
    """What a batch norm returns: its kernels lay it out densely, and fakes as the input is."""
    first, *rest = out
    formats = (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim() if first is not None else 0, ()))
    if first is not None and not any(first.is_contiguous(memory_format=each) for each in formats):
        first = first.new_empty(first.shape)
    return (first, *rest)


class Kernels:
    """Simulates operations.

    Args:
        mode: What answers the first time.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation none of whose arguments is a real tensor."""
        out = self._answer(_LAID_OUT_AS.get(func, func), args, kwargs)
        if func in _UNREDUCED and (args[_UNREDUCED[func] :] or (kwargs.get("reduction", 1),))[0]:
            out.untyped_storage().resize_(args[0].nbytes)
        if func in _BATCH_NORMS:
            with self._mode:
                return _dense(out)
        return out

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        try:
            key = (func, torch.get_default_dtype(), _layout(args, tensors), _layout(tuple(kwargs.items()), tensors))
            recipe = _recipes.get(key)
        except TypeError:  # an argument that cannot be looked up
            return on_fakes(self._mode, func, args, kwargs)
        if recipe is None:
            before = [_layout(t, []) for t in tensors]
            out = self._apart(on_fakes(self._mode, func, args, kwargs), tensors)
            same = before == [_layout(t, []) for t in tensors]
            if len(_recipes) >= _MOST:
                _recipes.clear()
            _recipes[key] = _recipe(out, tensors) if same else _ASK
            return out
        if recipe is _ASK:
            return on_fakes(self._mode, func, args, kwargs)
        return self._made(recipe, tensors)

    def _apart(self, out: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The results, of which no two are one tensor: some fakes return the gradient of two biases so."""
        if type(out) is not tuple:
            return out
        made: list[Any] = []
        for value in out:
            again = type(value) is FakeTensor and any(value is other for other in made)
            if again and not any(value is tensor for tensor in tensors):
                with self._mode:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            made.append(value)
        return tuple(made)

    def _made(self, recipe: Any, tensors: Sequence[FakeTensor]) -> Any:
        if recipe is _NOTHING:
            return None
        if type(recipe) is int:
            return tensors[recipe]
        if type(recipe) is not _Made:
            kind, parts = recipe
            return kind(self._made(part, tensors) for part in parts)
        shape, stride, offset, dtype, device, source = recipe
        if source is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = lay(tensors[source].untyped_storage(), offset, (shape, stride), dtype, "meta")
        return FakeTensor(self._mode, made, device)


def _layout(value: Any, tensors: list[FakeTensor]) -> Any:
    """What of an argument decides; adds its tensors to a list."""
    if type(value) is FakeTensor:
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_layout(item, tensors) for item in value)
    return type(value), value


def _recipe(out: Any, tensors: Sequence[FakeTensor]) -> Any:
    """How to make this result again; `_ASK` where that is not known."""
    sources = {_compat.storage_id(t): i for i, t in reversed(list(enumerate(tensors)))}
    return _recipe_of(out, tensors, sources, set())


def _recipe_of(out: Any, tensors: Sequence[FakeTensor], sources: dict[int, int], taken: set[int]) -> Any:
    if out is None:
        return _NOTHING
    if type(out) in (list, tuple):
        parts = [_recipe_of(item, tensors, sources, taken) for item in out]
        return _ASK if any(part is _ASK for part in parts) else (type(out), parts)
    if type(out) is not FakeTensor or out.dtype.is_complex:
        return _ASK
    index = next((i for i, tensor in enumerate(tensors) if tensor is out), None)
    if index is not None:
        return index
    storage = _compat.storage_id(out)
    offset = int(out.storage_offset())
    made = _Made(tuple(out.shape), out.stride(), offset, out.dtype, out.fake_device, sources.get(storage))
    if made.source is not None:
        return made
    size = out.untyped_storage().nbytes()
    exact = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta").untyped_storage().nbytes()
    if storage in taken or made.offset or size != exact:
        return _ASK
    taken.add(storage)
    return made


def grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """A product of groups; what PyTorch has for fake tensors takes bfloat16 alone."""
    if offs is not None and a.dim() == b.dim() == 2:
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
