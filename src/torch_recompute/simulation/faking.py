"""Copies of a model, its optimizer and its arguments in which every tensor that could be large is fake.

Idea. `copy.deepcopy` knows how to copy a model; only what it makes of a tensor is replaced. Parameters are put into
its memo beforehand, so those that are tied stay tied; any other tensor asks `Tensor.__deepcopy__`, which a function
mode answers. Tensors over one storage get fakes over one storage of the same size, whatever part of it they show.

Small tensors of integers, booleans and constants are copied with their values (see `pretending.py`). A tensor on the
meta device has none: there integers are taken to be ones, which as a mask hides nothing and as ids are valid.

Invariants. No data of a parameter is read, copied or allocated. What a closure reaches is not copied, as `deepcopy`
never does; the caller checks afterwards that nothing of the original was touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _compat, errors
from .._compat.fakes import FakeTensor, FakeTensorMode, fake_like, is_sharded, is_wrapper, over
from .pretending import FLOATS, INTEGERS


class Faker:
    """Makes fakes of tensors, one of each.

    Args:
        fakes: The mode that they belong to.
        device: Where they are to lie; None for where the originals do.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device | None) -> None:
        self._fakes = fakes
        self._device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, object]] = {}
        self.assumed: dict[str, None] = {}

    def copy(self, things: Any) -> Any:
        """A deep copy with fake tensors of modules, optimizers and what they hold."""
        for thing in things if isinstance(things, (list, tuple)) else [things]:
            if isinstance(thing, nn.Module):
                for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                    self.tensor(tensor, name)
        with _Copying(self):
            return copy.deepcopy(things, self._memo)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call: tensors as fakes, anything else as it is."""
        leaves, spec = _compat.tree_flatten((args, kwargs))
        names = _names(args, kwargs)
        made = [
            self.tensor(leaf, name) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return _compat.tree_unflatten(made, spec)

    def tensor(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """The fake of a tensor, or a copy of one that stays real; the same one each time."""
        made = self._memo.get(id(tensor))
        if made is None:
            made = self._memo[id(tensor)] = self._make(tensor, name)
            self._memo.setdefault(id(self._memo), []).append(tensor)  # alive as long as its identity is used
        return made

    def _make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if is_sharded(tensor):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is a DTensor: the model is sharded (fully_shard, tensor parallelism), "
                "and its collectives cannot be simulated on one process.\n"
                "  Simulate the model as it was before sharding."
            )
        if is_wrapper(tensor):
            made = fake_like(self._fakes, tensor)
        elif tensor.layout is not torch.strided or not _simple(tensor):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is {errors.say(tensor)}, of which no fake copy can be made: its class "
                "or layout says nothing of where its memory lies.\n"
                "  Simulate the model with plain tensors in its place (for a quantised module: before quantisation)."
            )
        else:
            made = self._plain(tensor, name)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
                if type(tensor) is nn.Parameter:
                    for attribute, value in vars(tensor).items():  # such as `sequence_parallel`, which others look at
                        setattr(made, attribute, value)
            else:
                made.requires_grad_(tensor.requires_grad)
        return made

    def _plain(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        device = self._device or tensor.device
        floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        parameter = isinstance(tensor, nn.Parameter)
        with torch.no_grad():
            if not parameter and tensor.numel() <= (FLOATS if floats else INTEGERS):
                known = tensor.device.type != "meta" and type(tensor) is not FakeTensor
                if known and not tensor.requires_grad:
                    return tensor.detach().clone().to(device)
                if not known and not floats:
                    self.assumed[f"{name or 'a tensor'} has no values: taken to be ones"] = None
                    return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            return self._over_storage(tensor, device)

    def _over_storage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        identity, whole = _compat.storage_id(tensor), tensor.untyped_storage()
        with self._fakes:
            if identity not in self._storages:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                place = made.untyped_storage()
                self._storages[identity] = place, whole
                if not tensor.storage_offset() and place.nbytes() == whole.nbytes():
                    return made
                place.resize_(whole.nbytes())
            place, _ = self._storages[identity]
            return over(place, tensor.storage_offset(), tensor, device)


class _Copying(TorchFunctionMode):
    """Answers `deepcopy` for tensors."""

    def __init__(self, faker: Faker) -> None:
        super().__init__()
        self._faker = faker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ or func is torch.Tensor.clone:  # the latter by nn.Parameter
            return self._faker.tensor(args[0])
        return func(*args, **(kwargs or {}))


def _simple(tensor: torch.Tensor) -> bool:
    return _compat.is_plain(tensor) or type(tensor) is nn.Buffer


def _names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    names: list[str] = []
    for i, arg in enumerate(args):
        names.extend([f"args[{i}]"] * len(_compat.tree_leaves(arg)))
    for key, value in kwargs.items():
        names.extend([key] * len(_compat.tree_leaves(value)))
    return names
