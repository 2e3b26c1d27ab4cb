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

With `on_host` the shards, their gradients and states are in host memory: each is copied to the device when it is
gathered, and a gradient's share back when it is reduced.

In a pipeline (`stages_of`) torch's runtime has each stage as a root of its own. What a backward has gathered stays
until after the next forward, or with `zero` 2 to the end of the step; gradients of microbatches are added up whole, in
the reduction's type, and are reduced once.

A unit is a layer, and what is left is the root's, as PyTorch's tutorial wraps a model; the experts of a layer that an
expert-parallel group shares are a unit of their own, over the ranks that have the same ones. The root's weights are
whole from its forward to the end of backward, and its gradients, whose modules are the first and the last, as long.

Rejected: `fully_shard` itself on fake tensors. It needs a process group for the whole process, and its weights are
DTensors, which no copy of a model can hold beside the group of a user's own run. A test compares both to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from .. import _torch, errors
from .._torch.fakes import host_of
from .._torch.graphs import gradient_hooks
from .._torch.ranks import copy_all, functional, into_chunks
from .._torch.tensors import each_tensor
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
    return each_tensor(things, lambda x: x.to(dtype) if x.is_floating_point() else x)


def stages_of(model: nn.Module, ranks: Ranks, modules: ModuleStack) -> ShardedStages | None:
    """Shards a fake model in place whose stages a pipeline runs, if these ranks do; see `shard`."""
    return ShardedStages(model, ranks, modules) if ranks.fully_sharded else None


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

    def __init__(
        self, places: list[tuple[nn.Module, str]], weight: nn.Parameter, ranks: int, home: torch.device
    ) -> None:
        if weight.dim() == 0:
            raise errors.ArgumentError(
                "a weight of the model is a scalar, which fully_shard does not shard. Write it as a tensor of one "
                "element."
            )
        rows, *rest = weight.shape
        self.places, self._shape, self._device = places, weight.shape, weight.device
        self.shard = nn.Parameter(weight.new_empty(-(-rows // ranks), *rest, device=home), weight.requires_grad)
        self.whole: nn.Parameter | None = None
        self.added: torch.Tensor | None = None  # of gradients, in the type in which they are reduced
        self._flat: Any = None
        self._bytes = 0
        self.put(self.shard)

    def put(self, weight: nn.Parameter) -> None:
        """Makes the modules hold the shard, or the whole."""
        for module, name in self.places:
            setattr(module, name, weight)

    def allocate(self, ranks: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes room for the whole weight, with its padding; returns that as a row per rank."""
        if self.whole is None:
            size = self.shard.numel() * ranks
            self._flat = self.shard.detach().new_empty(size, dtype=dtype, device=self._device)
            self._bytes = self._flat.untyped_storage().nbytes()
            whole = self._flat[: self._shape.numel()].view(self._shape)
            self.whole = nn.Parameter(whole, self.shard.requires_grad)
        else:
            self._flat.untyped_storage().resize_(self._bytes)
        return self._flat.view(ranks, -1)

    def local(self) -> torch.Tensor:
        """Returns the shard in one dimension where it is gathered: itself, or a copy of one in host memory."""
        return self.shard.detach().view(-1).to(self._device, non_blocking=True)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The whole one, as it is to be reduced."""
        return self.added if self.added is not None or self.whole is None else self.whole.grad

    def free(self) -> None:
        """Frees the whole weight; what autograd has saved of it is there again when it is gathered."""
        self._flat.untyped_storage().resize_(0)


class FullyShardedModule:
    """A base of the classes of modules that are sharded, as FSDP2 makes one: a replay leaves their weights to them."""


class _Unit:
    """Weights that are gathered and reduced together."""

    def __init__(self, of: _Fsdp, module: nn.Module, weights: list[_Weight], ranks: int, stays: bool) -> None:
        self._of, self.all_weights, self._ranks, self._stays = of, weights, ranks, stays
        self.module = module
        self._group = of.all_ranks.group("shard", ranks)
        self._state = ""
        self.gathered: torch.Tensor | None = None
        self._whole = False
        self._calls: list[int] = []
        self._reduced: torch.Tensor | None = None
        self.active = True
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (FullyShardedModule, kind), {})
        if not of.by_hand(module):
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)

    @property
    def weights(self) -> list[_Weight]:
        """Those that the running stage has."""
        return [weight for weight in self.all_weights if self._of.has(weight)]

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gathers the weights; the module's inputs then lead to the end of its backward."""
        if not self.active:
            return args, kwargs
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
        return _torch.tree_unflatten(leaves, spec)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Frees the weights, unless they stay; the module's outputs then lead to the beginning of its backward."""
        if self._state == BACKWARD or not self.active:
            return
        self._state = ""
        if not _torch.in_backward():  # nor a replay
            if not self._stays:
                self.free()
            self._calls.append(len(self._of.order))
            self._of.order.append(self)
        for x in _torch.tensors_in(output):
            if x.requires_grad:
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
        if self._whole or self.gathered is not None or not self.weights:
            return
        of = self._of
        with of.booking(), torch.no_grad():
            if self._ranks == 1:  # each weight is copied by itself, when it is wanted
                first = self.weights[0].shard.detach()
                self.gathered = first.new_empty(0, dtype=of.dtype or first.dtype)
                return
            shards = [weight.local() for weight in self.weights]
            sizes = [shard.numel() for shard in shards]
            dtype = of.dtype or shards[0].dtype
            if dtype == shards[0].dtype:  # they are copied into the buffer, which takes nothing more
                own = shards[0].as_strided((sum(sizes),), (0,))
            else:
                own = shards[0].new_empty(sum(sizes), dtype=dtype)
                copy_all(own.split(sizes), shards)
            self.gathered = _collectives.all_gather_into_tensor(own, self._ranks, self._group)

    def _copy_out(self, *, overlaps: bool) -> None:
        if self.gathered is None:
            return
        of, gathered = self._of, self.gathered
        if overlaps:
            of.overlapped = None
        with of.booking(), torch.no_grad():
            if self._ranks == 1:
                for weight in self.weights:
                    own = weight.local().to(gathered.dtype)
                    copy_all([weight.allocate(1, gathered.dtype)], [own.view(1, -1)])
                    del own
            else:
                rows = [weight.allocate(self._ranks, gathered.dtype) for weight in self.weights]
                sizes = [weight.shard.numel() for weight in self.weights]
                torch.split_with_sizes_copy(gathered.view(self._ranks, -1), sizes, 1, out=rows)
        for weight in self.weights:
            weight.put(cast("nn.Parameter", weight.whole))
        self._whole = True
        of.overlapped = gathered if overlaps else None
        self.gathered = None

    def free(self) -> None:
        """Frees the whole weights."""
        if self._whole:
            for weight in self.weights:
                weight.put(weight.shard)
                weight.free()
        self._whole = False

    def after_backward(self) -> None:
        """Frees the weights and reduces their gradients, once per backward."""
        if self._state == REDUCED:
            return
        self._state = REDUCED
        if self._of.adds_up:
            with self._of.booking(), torch.no_grad():
                self.add_up()
            return
        self.reduce()

    def add_up(self) -> None:
        """Adds the gradients of a microbatch to those before, in the type in which they are reduced."""
        dtype = self._of.reduce_dtype
        for weight in self.weights:
            grad = None if weight.whole is None else weight.whole.grad
            if grad is None or dtype in (None, grad.dtype):
                continue
            cast("nn.Parameter", weight.whole).grad = None
            if weight.added is None:
                weight.added = grad.to(dtype)
            else:
                weight.added += grad

    def reduce(self) -> None:
        """Frees the weights and reduces their gradients."""
        weights = [weight for weight in self.weights if weight.gradient is not None]
        grads: list[torch.Tensor] = []
        for weight in weights:
            grads.append(cast("torch.Tensor", weight.gradient))
            cast("nn.Parameter", weight.whole).grad = weight.added = None
        self.free()
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
            share = share.view(weight.shard.shape).to(weight.shard.device, non_blocking=True)
            if weight.shard.grad is None:
                weight.shard.grad = share
            else:
                weight.shard.grad.add_(share)
            for hook in gradient_hooks(weight.shard):
                hook(weight.shard)
        of.reducing = given

    def rest(self) -> None:
        """Ends the backward of one microbatch, of which more follow."""
        self._state = ""

    def ended(self) -> None:
        """Forgets the backward. The next step makes whole weights of its own, so that a recording sees them made."""
        for weight in self.weights:
            weight.whole = None
        self._state, self.gathered, self._reduced = "", None, None
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

    adds_up = False  # whether gradients wait, whole, for a reduction at the end

    def __init__(self, model: nn.Module, ranks: Ranks, modules: ModuleStack) -> None:
        self.all_ranks, self.replicas, self._modules = ranks, ranks.replicas, modules
        self.dtype, self.reduce_dtype = dtype_of(ranks.param_dtype), dtype_of(ranks.reduce_dtype)
        self.order: list[_Unit] = []  # in which their forwards ended
        self.overlapped: torch.Tensor | None = None  # the buffer of the unit that runs forward
        self.reducing: torch.Tensor | None = None  # the buffer of the last unit that was reduced
        self._ends = False
        self.units: list[_Unit] = []
        experts = expert_paths(model) if ranks.shares_experts else []
        paths = [*experts, *(unit.path for unit in find_units(model).layers), ""]
        taken: set[int] = set()
        for path in paths:
            module, count = model.get_submodule(path), ranks.expert_shards if path in experts else ranks.shards
            weights = self._weights(module, taken, count)
            self.units.append(_Unit(self, module, weights, count, stays=not path or ranks.keeps_gathered))

    def _weights(self, module: nn.Module, taken: set[int], ranks: int) -> list[_Weight]:
        """Shards the weights of a unit, which are all of its module's that no unit before it has `taken`."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        weights: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False) if id(part) not in taken else ():
                places.setdefault(id(weight), []).append((part, name))
                weights[id(weight)] = weight
        taken.update(id(part) for part in module.modules())
        on_host = self.all_ranks.on_host
        return [_Weight(places[k], w, ranks, host_of(w) if on_host else w.device) for k, w in weights.items()]

    def by_hand(self, module: nn.Module) -> bool:
        """Whether a module's unit is told of its forward by a runner, instead of by hooks."""
        return False

    def has(self, weight: _Weight) -> bool:
        """Whether the running stage has a weight of the root."""
        return True

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


class ShardedStages(_Fsdp):
    """The units of a model of which one stage at a time runs, as torch's pipeline runs stages that are sharded."""

    adds_up = True

    def __init__(self, model: nn.Module, ranks: Ranks, modules: ModuleStack) -> None:
        self._model, self._elsewhere = model, frozenset[int]()
        super().__init__(model, ranks, modules)

    @property
    def root(self) -> _Unit:
        """The unit of what is in no layer."""
        return self.units[-1]

    def by_hand(self, module: nn.Module) -> bool:
        """The root's: a stage is a root of its own."""
        return module is self._model

    def has(self, weight: _Weight) -> bool:
        """Whether the running stage has a weight of the root."""
        return id(weight) not in self._elsewhere

    def root_weight(self, storage: torch.UntypedStorage) -> int | None:
        """The number of the root's weight whose whole lies in a storage."""
        for number, weight in enumerate(self.root.all_weights):
            if weight.whole is not None and weight.whole.untyped_storage() is storage:
                return number
        return None

    def run(self, layers: Iterable[nn.Module], own: Collection[int] | None = None) -> None:
        """Says which layers run, and which of the root's weights are with them; None for all."""
        parts = {id(part) for layer in layers for part in layer.modules()}
        for unit in self.units:
            unit.active = unit is self.root or id(unit.module) in parts
        others = (
            weight for number, weight in enumerate(self.root.all_weights) if own is not None and number not in own
        )
        self._elsewhere = frozenset(map(id, others))

    def _running(self) -> Iterator[_Weight]:
        return (weight for unit in self.units if unit.active for weight in unit.weights)

    def shards(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Of the stage that runs: each shard with a place."""
        return ((*weight.places[0], weight.shard) for weight in self._running())

    @property
    def held(self) -> list[torch.Tensor]:
        """Whole weights that are there, and buffers on their way."""
        found = [weight.whole for weight in self._running() if weight.whole is not None]
        gathered = [unit.gathered for unit in self.units if unit.active]
        return [x for x in (*found, *gathered, self.overlapped, self.reducing) if x is not None]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Whole gradients, and those of shards."""
        pairs = ((weight.gradient, weight.shard.grad) for weight in self._running())
        return [grad for pair in pairs for grad in pair if grad is not None]

    def _end(self) -> None:
        self._ends = False
        for unit in filter(lambda unit: unit.active, (self.root, *self.units[:-1])):
            unit.after_backward()
            unit.rest()

    def reduce(self) -> None:
        """Reduces what the microbatches have added up, which ends the step."""
        for unit in filter(lambda unit: unit.active, (self.root, *self.units[:-1])):
            unit.reduce()
        self.forget()

    def forget(self) -> None:
        """Ends the step: whole weights are gone."""
        for unit in self.units:
            unit.free()
            unit.ended()
            for weight in unit.all_weights:
                weight.added = None
        self.reducing = self.overlapped = None
        self.order.clear()
