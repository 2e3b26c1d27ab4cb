"""FSDP2 on one rank of a simulated step: what it holds of weights and gradients, and from when to when.

Added up, FSDP's memory is wrong by gigabytes, because its buffers do not exist at one time. So a rank's copy of the
model does what `torch.distributed.fsdp.fully_shard` does, in its order, with collectives of a group that is only named:

    weights            a shard of each, 1 / ranks of its rows, rounded up; the optimizer has these
    before a forward   one buffer for all weights of the unit is gathered, then each weight is copied out of it; the
                       buffer stays until the next unit has copied its own, so that the next gather overlaps
    after it           the whole weights are freed, unless the unit is the root or `zero` is 2
    before a backward  gathered again, if the unit before has not done it: each unit gathers the next one ahead, of
                       which there is only the buffer then
    after it           weights are freed; gradients are copied into one buffer in the reduction's type, which stays
                       until the next unit reduces, and this rank's share becomes the gradient of its shards

A unit is a layer, and what is left is the root's, as PyTorch's tutorial wraps a model; the experts of a layer that an
expert-parallel group shares are a unit of their own, over the ranks that have the same ones. The root's weights are
whole from its forward to the end of backward, and its gradients, whose modules are the first and the last, as long.

Rejected: `fully_shard` itself on fake tensors. It needs a process group for the whole process, and its weights are
DTensors, which no copy of a model can hold beside the group of a user's own run. A test compares both to the byte.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from .. import _torch, errors
from .._torch.ranks import copy_all, functional, into_chunks
from ..memory.operations import ModuleStack
from ..plan.ranks import Ranks
from ..plan.units import find_units
from .experts import expert_paths
from .recording import SHARDING

FORWARD, BACKWARD, REDUCED = "forward", "backward", "reduced"
_collectives = functional()


def dtype_of(word: str) -> torch.dtype | None:
    """The type that a field of `Ranks` names; None for none."""
    if not word:
        return None
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise errors.ArgumentError(
            f"{word!r} is no floating type of PyTorch; param_dtype= and reduce_dtype= of Ranks are names as in "
            'MixedPrecisionPolicy. Write Ranks(fsdp=8, param_dtype="bfloat16", reduce_dtype="float32").'
        )
    return found


def computing(model: nn.Module, ranks: Ranks) -> None:
    """Gives a fake model the types that it computes in on these ranks: whole weights, as they are when gathered."""
    dtype = dtype_of(ranks.param_dtype)
    if dtype is None:
        return
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if weight.is_floating_point():
                found = made.get(id(weight))
                if found is None:
                    found = made[id(weight)] = nn.Parameter(torch.empty_like(weight, dtype=dtype), weight.requires_grad)
                setattr(module, name, found)
    model.register_forward_pre_hook(lambda _, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True)


def _cast(things: Any, dtype: torch.dtype | None) -> Any:
    leaves, spec = _torch.tree_flatten(things)
    return _torch.tree_unflatten(
        [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves], spec
    )


def shard(model: nn.Module, ranks: Ranks, modules: ModuleStack) -> None:
    """Shards a fake model in place, if these ranks do. Its parameters are then the shards of the first rank.

    Args:
        model: The model, of which nothing has run.
        ranks: The ranks.
        modules: Follows the modules of the step; FSDP's buffers are booked as those of a part of the running one.

    Raises:
        ArgumentError: Two units share a weight, which FSDP2 refuses, or a type is none.
    """
    if ranks.fully_sharded:
        _Fsdp(model, ranks, modules)


class _Weight:
    """One weight: this rank's shard, and the whole, whose memory comes and goes."""

    def __init__(self, places: list[tuple[nn.Module, str]], weight: nn.Parameter, ranks: int) -> None:
        if weight.dim() == 0:
            raise errors.ArgumentError(
                "a weight of the model is a scalar, which fully_shard does not shard. Write it as a tensor of one "
                "element."
            )
        rows, *rest = weight.shape
        self._places, self._shape = places, weight.shape
        self.shard = nn.Parameter(weight.new_empty(-(-rows // ranks), *rest), weight.requires_grad)
        self.whole: nn.Parameter | None = None
        self._flat: Any = None
        self._bytes = 0
        self.put(self.shard)

    def put(self, weight: nn.Parameter) -> None:
        """Makes the modules hold the shard, or the whole."""
        for module, name in self._places:
            setattr(module, name, weight)

    def allocate(self, ranks: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes room for the whole weight, with its padding; returns that as a row per rank."""
        if self.whole is None:
            self._flat = self.shard.detach().new_empty(self.shard.numel() * ranks, dtype=dtype)
            self._bytes = self._flat.untyped_storage().nbytes()
            whole = self._flat[: self._shape.numel()].view(self._shape)
            self.whole = nn.Parameter(whole, self.shard.requires_grad)
        else:
            self._flat.untyped_storage().resize_(self._bytes)
        return self._flat.view(ranks, -1)

    def free(self) -> None:
        """Frees the whole weight; what autograd has saved of it is there again when it is gathered."""
        self._flat.untyped_storage().resize_(0)


class FullyShardedModule:
    """A base of the classes of modules that are sharded, as FSDP2 makes one: a replay leaves their weights to them."""


class _Unit:
    """Weights that are gathered and reduced together."""

    def __init__(self, of: _Fsdp, module: nn.Module, weights: list[_Weight], ranks: int, stays: bool) -> None:
        self._of, self._weights, self._ranks, self._stays = of, weights, ranks, stays
        self._group = of.all_ranks.group("shard", ranks)
        self._state = ""
        self._gathered: torch.Tensor | None = None
        self._whole = False
        self._calls: list[int] = []
        self._reduced: torch.Tensor | None = None
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (FullyShardedModule, kind), {})
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _cast((args, kwargs), self._of.dtype) if self._of.dtype else (args, kwargs)
        self.gather()
        if self._state == BACKWARD:  # a replay within a unit around this one
            self._copy_out(overlaps=False)
            return args, kwargs
        self._state = FORWARD
        self._copy_out(overlaps=True)
        leaves, spec = _torch.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if places and torch.is_grad_enabled():
            after: Any = _AfterBackward.apply(self, *(leaves[i] for i in places))
            for i, x in zip(places, after, strict=True):
                leaves[i] = x
        args, kwargs = _torch.tree_unflatten(leaves, spec)
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._state == BACKWARD:
            return
        self._state = ""
        if not _torch.in_backward():  # nor a replay
            if not self._stays:
                self._free()
            self._calls.append(len(self._of.order))
            self._of.order.append(self)
        for x in _torch.tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(self._before_backward)
        if self is self._of.units[-1]:
            self._of.overlapped = None

    def _before_backward(self, _: object) -> None:
        self._of.end_with_backward()
        if self._state == BACKWARD:
            return
        self._state = BACKWARD
        self.gather()
        self._copy_out(overlaps=False)
        if self._calls and (call := self._calls.pop()) > 0:
            self._of.order[call - 1].gather()

    def gather(self) -> None:
        """Gathers the weights into one buffer, unless they are there or on their way."""
        if self._whole or self._gathered is not None or not self._weights:
            return
        of = self._of
        shards = [weight.shard.detach().view(-1) for weight in self._weights]
        sizes = [shard.numel() for shard in shards]
        dtype = of.dtype or shards[0].dtype
        with of.booking(), torch.no_grad():
            if self._ranks == 1:
                self._gathered = shards[0].new_empty(0, dtype=dtype)
                return
            if dtype == shards[0].dtype:  # they are copied into the buffer, which takes nothing more
                own = shards[0].as_strided((sum(sizes),), (0,))
            else:
                own = shards[0].new_empty(sum(sizes), dtype=dtype)
                copy_all(own.split(sizes), shards)
            self._gathered = _collectives.all_gather_into_tensor(own, self._ranks, self._group)

    def _copy_out(self, *, overlaps: bool) -> None:
        if self._gathered is None:
            return
        of, gathered = self._of, self._gathered
        if overlaps:
            of.overlapped = None
        sizes = [weight.shard.numel() for weight in self._weights]
        with of.booking(), torch.no_grad():
            rows = [weight.allocate(self._ranks, gathered.dtype) for weight in self._weights]
            if self._ranks == 1:
                copy_all(rows, [weight.shard.detach().view(1, -1) for weight in self._weights])
            else:
                torch.split_with_sizes_copy(gathered.view(self._ranks, -1), sizes, 1, out=rows)
        for weight in self._weights:
            weight.put(cast("nn.Parameter", weight.whole))
        self._whole = True
        of.overlapped = gathered if overlaps else None
        self._gathered = None

    def _free(self) -> None:
        if self._whole:
            for weight in self._weights:
                weight.put(weight.shard)
                weight.free()
        self._whole = False

    def after_backward(self) -> None:
        """Frees the weights and reduces their gradients, once per backward."""
        if self._state == REDUCED:
            return
        self._state = REDUCED
        weights = [weight for weight in self._weights if weight.whole is not None and weight.whole.grad is not None]
        grads: list[torch.Tensor] = []
        for weight in weights:
            whole = cast("nn.Parameter", weight.whole)
            grads.append(cast("torch.Tensor", whole.grad))
            whole.grad = None
        self._free()
        self._of.reducing = None
        if grads:
            with self._of.booking(), torch.no_grad():
                self._reduce(weights, grads)

    def _reduce(self, weights: list[_Weight], grads: list[torch.Tensor]) -> None:
        of = self._of
        sizes = [weight.shard.numel() for weight in weights]
        given = grads[0].new_empty(sum(sizes) * self._ranks, dtype=of.reduce_dtype or grads[0].dtype)
        into_chunks(grads, given.view(self._ranks, -1))
        grads.clear()
        if self._ranks == 1:
            own = given.clone()
        else:
            own = _collectives.reduce_scatter_tensor(given, "avg", self._ranks, self._group)
        if of.replicas > 1:
            _collectives.all_reduce_(own, "avg", of.all_ranks.group("replica", of.replicas))
            self._reduced = own
        own = own.to(weights[0].shard.dtype)
        for weight, share in zip(weights, own.split(sizes), strict=True):
            share = share.view(weight.shard.shape)
            if weight.shard.grad is None:
                weight.shard.grad = share
            else:
                weight.shard.grad.add_(share)
        of.reducing = given

    def ended(self) -> None:
        """Forgets the backward. The next step makes whole weights of its own, so that a recording sees them made."""
        for weight in self._weights:
            weight.whole = None
        self._state, self._gathered, self._reduced = "", None, None
        self._calls.clear()


class _AfterBackward(torch.autograd.Function):
    """The inputs of a unit; their backward comes after that of all that the unit computes."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.unit.after_backward()
        return None, *grads


class _Fsdp:
    """The units of a model, in the order of their modules with the root last, and what they hold together."""

    def __init__(self, model: nn.Module, ranks: Ranks, modules: ModuleStack) -> None:
        self.all_ranks, self.replicas, self._modules = ranks, ranks.replicas, modules
        self.dtype, self.reduce_dtype = dtype_of(ranks.param_dtype), dtype_of(ranks.reduce_dtype)
        self.order: list[_Unit] = []  # in which their forwards ended
        self.overlapped: torch.Tensor | None = None  # the buffer of the unit that runs forward
        self.reducing: torch.Tensor | None = None  # the buffer of the last unit that was reduced
        self._ends = False
        self.units: list[_Unit] = []
        experts = expert_paths(model) if ranks.ep > 1 else []
        paths = [*experts, *(unit.path for unit in find_units(model).layers), ""]
        taken: set[int] = set()
        for path in paths:
            module, count = model.get_submodule(path), ranks.shards // (ranks.ep if path in experts else 1)
            weights = self._weights(module, taken, count)
            self.units.append(_Unit(self, module, weights, count, stays=not path or ranks.zero == 2))

    def _weights(self, module: nn.Module, taken: set[int], ranks: int) -> list[_Weight]:
        """Shards the weights of a unit, which are all of its module's that no unit before it has `taken`."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        weights: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False) if id(part) not in taken else ():
                places.setdefault(id(weight), []).append((part, name))
                weights[id(weight)] = weight
        taken.update(id(part) for part in module.modules())
        return [_Weight(places[key], weight, ranks) for key, weight in weights.items()]

    def booking(self) -> Any:
        """A context whose memory is FSDP's."""
        return self._modules.within(SHARDING)

    def end_with_backward(self) -> None:
        """Reduces what is left when the running backward has ended."""
        if not self._ends:
            self._ends = True
            _torch.after_backward(self._end)

    def _end(self) -> None:
        self._ends = False
        for unit in (self.units[-1], *self.units[:-1]):
            unit.after_backward()
        for unit in self.units:
            unit.ended()
        self.reducing = None
        self.order.clear()
