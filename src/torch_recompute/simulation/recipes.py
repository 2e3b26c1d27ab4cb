"""Results of operations on fake tensors, remembered by the layouts of their arguments.

PyTorch takes a third of a millisecond to say what an operation returns, and almost all operations are the same as in
the layer before. So its first answer is kept as a recipe: new tensors of some layout, views over the memory of an
argument, an argument itself; what fits none of these is asked each time. Where the answer is not what kernels do (the
layout of a batch norm's result, the memory of a loss, one tensor twice), theirs is taken. No recipe holds a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from .. import _torch
from .._torch.fakes import FakeMaker, FakeTensor, FakeTensorMode, lay, on_fakes, writes
from .._torch.tensors import each_tensor
from ..memory.ledger import leaves
from ..memory.workspaces import RECURRENT, results
from .made_up import NOWHERE, counts, is_decided, status_of

aten: Any = torch.ops.aten
MASKED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
DRAWS: set[Any] = {  # whose integers are states of generators
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
GROUPED: Any = aten._grouped_mm.default
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@cache
def kind_of(func: Any) -> tuple[bool, bool, bool]:
    """Whether an operation returns views, writes to its arguments, reads values."""
    return func.is_view, writes(func), not _READS.isdisjoint(func.tags)


class _MadeTensor(NamedTuple):
    """The recipe of one tensor; `source` is the argument whose memory it views, None for its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    nbytes: int | None = None  # of its memory, where this is larger than it looks


_UNREDUCED = {  # losses that write every element into the memory of their result; where `reduction` is
    aten.binary_cross_entropy.default: 3,
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
}
_LAID_OUT_AS = dict.fromkeys(
    (aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default), aten.atan2.default
)
"""Operations whose fakes have another layout than their results, and one with the same result whose fakes have it."""
_BATCH_NORMS = {aten.native_batch_norm.default, aten.native_batch_norm_backward.default}
_BESIDES = frozenset({*MASKED, *RECURRENT, *_BATCH_NORMS, *NOWHERE, GROUPED})
"""Operations of which more is to be found out than what the fake ones return."""
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_ASK = object()
_NOTHING = object()
_MOST = 2**16
_recipes: tuple[dict[Any, tuple[Any, dict[Any, Any] | None, bool, Any]], ...] = {}, {}
"""For this machine, and for another target, by layouts: the recipe; what `Operation.once` knows of such
operations; whether the recipe is all there is to do; the operation, which the key has by `id`."""
UNKNOWN = None, None, False, None


class Recipes:
    """Answers operations whose arguments are fake tensors.

    Args:
        fakes: The mode that simulates.
        target: See `FakeMode`.

    Attributes:
        make: Makes fakes of tensors on meta.
        by_layout: What is remembered: for this machine, or for another target.
        known: What `Operation.once` knows of the operation that was answered last; None for one that is not remembered.
    """

    def __init__(self, fakes: FakeTensorMode, target: str) -> None:
        self._fakes, self._target, self.make = fakes, target, FakeMaker(fakes)
        self.by_layout = _recipes[bool(target)]
        self.known: dict[Any, Any] | None = None

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation none of whose arguments is a real tensor."""
        out = self._answer(func, args, kwargs)
        if func in _BATCH_NORMS:
            with self._fakes:
                return _dense(out)
        return out

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        like = _LAID_OUT_AS.get(func, func)
        try:
            key = key_of(func, args, kwargs, tensors)
            recipe, self.known, *_ = self.by_layout.get(key, UNKNOWN)
        except TypeError:  # an argument that cannot be looked up
            return on_fakes(self._fakes, like, args, kwargs)
        if recipe is None:
            before = [(_layout(t, []), _torch.storage_id(t)) for t in tensors]
            recipe = None if kwargs else self._in_lists(func, args)
            if recipe is None:
                out = self._apart(on_fakes(self._fakes, like, args, kwargs, again=False), tensors)
                out = self._as_made(func, args, kwargs, out, tensors)
                recipe = _recipe(out, tensors, set())
            else:
                out = self.remade(recipe, tensors)
            if before != [(_layout(t, []), _torch.storage_id(t)) for t in tensors]:
                recipe = _ASK
            if len(self.by_layout) >= _MOST:
                self.by_layout.clear()
            self.known = None if recipe is _ASK else {}
            is_all = recipe is not _ASK and bool(tensors) and _is_all(func, tensors, out)
            self.by_layout[key] = recipe, self.known, is_all, func
            return out
        if recipe is _ASK:
            return on_fakes(self._fakes, like, args, kwargs)
        return self.remade(recipe, tensors)

    def _as_made(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The results, laid out and in memory as large as their kernel makes them."""
        made = leaves(out)
        if func in _UNREDUCED:
            whole = (args[_UNREDUCED[func] :] or (kwargs.get("reduction", 1),))[0]
            seen: Sequence[tuple[int, ...]] = ((args[0].nbytes, *made[0].stride()),) if whole else ()
        else:
            seen = () if self._target else results(func, (args, kwargs))
        given = {_torch.storage_id(tensor) for tensor in tensors}
        new = {id(x): each for x, each in zip(made, seen, strict=False) if _torch.storage_id(x) not in given}
        if len(seen) != len(made) or not new:
            return out
        return each_tensor(out, lambda x: self._made_as(x, *new[id(x)]) if id(x) in new else x)

    def _made_as(self, fake: torch.Tensor, nbytes: int, *stride: int) -> torch.Tensor:
        """A result with these strides, if they are others, in memory of at least these bytes.

        What an LSTM keeps for its backward has no shape of which the bytes are known in torch 2.11, but memory.
        """
        same_dims = fake.dim() == len(stride)
        if same_dims and any(a != b and n > 1 for a, b, n in zip(fake.stride(), stride, fake.shape, strict=True)):
            with self._fakes:
                fake = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
        if fake.untyped_storage().nbytes() < nbytes:
            fake.untyped_storage().resize_(nbytes)
        return fake

    def _in_lists(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The recipe of an operation that treats each place of some lists alone; None for another one.

        An optimizer's lists have hundreds of places and some ten layouts, so torch is asked for one place of each.
        """
        lists = [value for value in args if isinstance(value, (list, tuple))]
        if not func.name().startswith("aten::_foreach_") or len({*map(len, lists)}) != 1:
            return None
        kinds: dict[Any, int] = {}
        like = [kinds.setdefault(_layout(place, []), len(kinds)) for place in zip(*lists, strict=True)]
        firsts = [like.index(kind) for kind in range(len(kinds))]
        fewer = tuple([v[i] for i in firsts] if isinstance(v, (list, tuple)) else v for v in args)
        out = on_fakes(self._fakes, func, fewer, {}, again=False)
        recipe = _recipe(out, [tensor for tensor in leaves(fewer) if type(tensor) is FakeTensor], set())
        if recipe is _NOTHING:
            return recipe
        parts = [] if recipe is _ASK else recipe[1]
        alone = parts and all(type(part) is _MadeTensor and part.source is None for part in parts)
        return (list, [parts[kind] for kind in like]) if alone else None

    def _apart(self, out: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The results, in a tuple without names, of which no two are one tensor.

        Some fakes return the gradient of two biases as one, and some a named tuple, where kernels do neither.
        """
        if not isinstance(out, tuple):
            return out
        made: list[Any] = []
        for value in out:
            again = type(value) is FakeTensor and any(value is other for other in made)
            if again and not any(value is tensor for tensor in tensors):
                with self._fakes:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            made.append(value)
        return tuple(made)

    def remade(self, recipe: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The result of a recipe for these arguments."""
        if type(recipe) is _MadeTensor:
            shape, stride, offset, dtype, device, source, nbytes = recipe
            if source is None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if nbytes is not None:
                    made.untyped_storage().resize_(nbytes)
            else:
                made = lay(tensors[source].untyped_storage(), offset, (shape, stride), dtype, "meta")
            return self.make(made, device)
        if recipe is _NOTHING:
            return None
        if type(recipe) is int:
            return tensors[recipe]
        kind, parts = recipe
        return kind([self.remade(part, tensors) for part in parts])


def _dense(out: Sequence[Any]) -> tuple[Any, ...]:
    """Lays a batch norm's result out densely, as its kernels do and fakes do not."""
    first, *rest = out
    formats = (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim() if first is not None else 0, ()))
    if first is not None and not any(first.is_contiguous(memory_format=each) for each in formats):
        first = first.new_empty(first.shape)
    return (first, *rest)


def _is_all(func: Any, tensors: Sequence[torch.Tensor], out: Any) -> bool:
    """Whether nothing but what an operation on fake tensors returns is to be found out for it."""
    views, writing, reads = kind_of(func)
    if reads or func in _BESIDES or status_of(func) is not None:
        return False
    made = leaves(out)
    return views or writing or func in DRAWS or not (any(map(is_decided, made)) or counts(func, tensors, made))


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Any:
    """The key of an operation: what its result depends on. Adds its tensors to a list."""
    named = tuple([(name, _layout(value, tensors)) for name, value in kwargs.items()]) if kwargs else ()
    return id(func), torch.get_default_dtype(), tuple([_layout(value, tensors) for value in args]), named


def _layout(value: Any, tensors: list[FakeTensor]) -> Any:
    """The part of an argument that the result depends on; adds its tensors to a list."""
    if type(value) is FakeTensor:
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_layout(item, tensors) for item in value])
    if isinstance(value, torch.UntypedStorage):
        raise TypeError("a key would keep the memory alive")
    return type(value), value


def _recipe(out: Any, tensors: Sequence[FakeTensor], taken: set[int]) -> Any:
    """The recipe of this result, from these arguments; `_ASK` where there is none."""
    if out is None:
        return _NOTHING
    if type(out) in (list, tuple):
        parts = [_recipe(item, tensors, taken) for item in out]
        return _ASK if any(part is _ASK for part in parts) else (type(out), parts)
    if type(out) is not FakeTensor or out.dtype.is_complex:
        return _ASK
    index = next((i for i, tensor in enumerate(tensors) if tensor is out), None)
    if index is not None:
        return index
    storage, offset = _torch.storage_id(out), int(out.storage_offset())
    source = next((i for i, tensor in enumerate(tensors) if _torch.storage_id(tensor) == storage), None)
    made = _MadeTensor(tuple(out.shape), out.stride(), offset, out.dtype, out.fake_device, source)
    if source is not None:
        return made
    size = out.untyped_storage().nbytes()
    exact = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta").untyped_storage().nbytes()
    if storage in taken or offset or size < exact:
        return _ASK
    taken.add(storage)
    return made if size == exact else made._replace(nbytes=size)
