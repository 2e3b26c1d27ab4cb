"""Copies of models, optimizers and batches with fake tensors.

`Faker` copies the model: `copy.deepcopy` does, and a function mode answers for its tensors. Tied parameters stay tied;
tensors over one storage get fakes over one storage of its size. On meta, integers are taken to be ones, which as a mask
hides nothing and as ids are valid. What a closure reaches is not copied; the caller checks afterwards that nothing of
the original was touched. No tensor of the caller's is written to, and of parameters none is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch.fakes import FakeMaker, FakeTensorMode, fake_like, is_sharded, is_wrapper, over
from .made_up import floats, is_hollow, keeps_values, stays


class Faker:
    """Makes fakes of tensors, one of each.

    Args:
        fakes: The mode that they belong to.
        device: Their device; None for that of the originals.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device | None) -> None:
        self._fakes, self._maker = fakes, FakeMaker(fakes)
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

        def faked(name: str, value: Any) -> Any:
            leaves, spec = _torch.tree_flatten(value)
            made = [self.tensor(leaf, name) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return _torch.tree_unflatten(made, spec)

        positional = tuple(faked(f"args[{i}]", arg) for i, arg in enumerate(args))
        return positional, {name: faked(name, value) for name, value in kwargs.items()}

    def forget(self) -> None:
        """Forgets the tensors and their fakes, so that one of these can die that a step replaces."""
        self._memo.clear()
        self._storages.clear()

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
        elif tensor.layout is not torch.strided or not (_torch.is_plain(tensor) or type(tensor) is nn.Buffer):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is {errors.say(tensor)}, of which no fake copy can be made: its class "
                "or layout does not tell which memory it uses.\n"
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
        with torch.no_grad():
            if keeps_values(tensor):
                return tensor.detach().clone().to(device)
            if not isinstance(tensor, nn.Parameter) and is_hollow(tensor) and not floats(tensor) and stays(tensor):
                self.assumed[f"{name or 'a tensor'} has no values: taken to be ones"] = None
                return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            return self._over_storage(tensor, device)

    def _over_storage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        identity, whole = _torch.storage_id(tensor), tensor.untyped_storage()
        if identity not in self._storages:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            place = made.untyped_storage()
            self._storages[identity] = place, whole
            if not tensor.storage_offset() and place.nbytes() == whole.nbytes():
                return self._maker(made, device)
            place.resize_(whole.nbytes())
        place, _ = self._storages[identity]
        return self._maker(over(place, tensor.storage_offset(), tensor), device)


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
