"""A plan's ways to call a module: regions, saved modules, and calls kept within a module.

A `ForwardWrapper` is an object in the instance dictionary of a module, in the place of its `forward`. It can be pickled
and deep-copied with the module, and knows the forward that was there before. Several may be on one module, one around
the other; they are taken out in the opposite order. `nn.DataParallel` copies that dictionary, so it is given a
`_replicate_for_data_parallel` that makes wrappers for the replica.

A region over several modules that the model calls one after the other is a chain: each is a region of its own, and
passes its result on to the next, which then keeps no input but rebuilds it (`engine/discard.py`). The model's own loop
stays as it is; only the first one's input is kept, and no layer runs more than once in forward and once in backward.

A named call is a saved call that the model's author gave a name. If a plan lists the name, `thread.overrides` makes
such calls regions, or parts of the region that they are in, while the module runs; a replay finds the overrides of its
forward.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch, errors
from .._torch import tracing
from .._torch.modes import transforming
from .._torch.storages import is_fake
from .._torch.tensors import each_tensor
from ..engine.discard import Discard
from ..engine.region_call import Options, RegionCall
from ..errors.text import starred_path
from ..region import Pool, keep, no_effect, run, trace
from ..state import DEFAULT
from ..state.observer import here, observing
from ..state.tape import Overrides, thread
from ..stores import Store
from . import traced
from .calls import KeepCalls, RepeatedAttention, run_keeping
from .choice import ATTENTION, KINDS, Choice, Target
from .observe import Figures
from .plan import Plan

REPLICATE = "_replicate_for_data_parallel"


def described(module: nn.Module) -> str:
    """A module in words: its class, how many parameters, and their elements, over all ranks if it is sharded."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    name = type(module).__name__.removeprefix("FSDP")  # fully_shard makes a subclass of that name
    return f"{name} with {len(sizes)} parameters of {sum(sizes):,} elements"


def wrappers_on(module: nn.Module) -> list[ForwardWrapper]:
    """The wrappers that a plan has put on a module, outermost first."""
    found: list[ForwardWrapper] = []
    forward = module.__dict__.get("forward")
    while isinstance(forward, ForwardWrapper):
        found.append(forward)
        forward = forward._before  # pyright: ignore[reportPrivateUsage]
    return found


class FirstCalls:
    """Looks at the first calls of a plan's regions in training, and says each thing that it finds once.

    Is the autocast that of the plan, and is a fused attention run again for nothing?

    Attributes:
        autocast: The dtype of the plan's autocast; None where it is not compared.
    """

    def __init__(self, plan: Plan) -> None:
        loop = None if plan.prediction is None else plan.prediction.loop
        self.autocast = None if loop is None else loop.autocast
        self._said: set[str] = set()

    def compare(self, module: nn.Module) -> None:
        """Warns if the autocast around a region's module is another one."""
        planned, self.autocast = self.autocast, None
        found = _torch.autocast_dtype(next((p.device.type for p in module.parameters()), "cpu"))
        if planned is not None and found != planned:
            inside = (f"inside torch.autocast ({x})" if x else "outside torch.autocast" for x in (planned, found))
            made, trained = inside
            warnings.warn(
                f"The plan was made {made}, and the model is trained {trained}: what layers keep, and so the peak and "
                "the seconds that the plan promises, are of another dtype. Make the plan where the model is trained: "
                "with torch.autocast(...): plan = make_plan(model, ...). (Said once.)",
                RuntimeWarning,
                stacklevel=3,
            )

    def run(self, region: Region, options: Options, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the first call of a region that nobody else observes: the doctor has findings of its own."""
        self.compare(region.module)
        figures = [] if region.figures is None else [region.figures]
        if here.observers is not None or transforming():  # a tensor of torch.func has no memory to look at
            with observing(*figures):
                return region.called(options, fn, args, kwargs)
        region.first, looks = None, RepeatedAttention(options.name)
        with observing(looks, *figures):
            result = region.called(options, fn, args, kwargs)
        if not any(map(is_fake, _torch.tensors_in(result))):
            self._say(region, looks, result)
        return result

    def _say(self, region: Region, looks: RepeatedAttention, result: Any) -> None:
        """Warns if a fused attention is run again though the plan keeps attention, or for little more than nothing."""
        where = starred_path(region.name)
        everywhere = any(keep.calls == ATTENTION and not keep.module for keep in region.choice.kept)
        named = looks.found(result) if everywhere else []
        kernel, freed = looks.alone(result)
        if named:
            text = (
                f"The plan keeps attention in {where} ({Target.of(calls=ATTENTION)}), and {named[0]} there is run "
                "again in every backward: of fused attentions a plan knows scaled_dot_product_attention and "
                "flex_attention. Keep the module that calls it, by its path below the region: "
                f"Choice(({region.name!r},), keep=('core_attention',)); or write the call in the model as "
                "no_recompute(fn)(q, k, v). (Said once.)"
            )
        elif kernel:
            text = (
                f"The region {where} is one fused attention ({kernel}) and little else: its scores are not stored "
                f"without the region either, so it runs the kernel again in every backward and frees at most the "
                f"result, {errors.size(freed)}, which the product behind it holds in most models. Leave it out; or "
                "place the region around the whole attention and keep this in it (attention_output among "
                "recompute_modules). (Said once.)"
            )
        else:
            return
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


class ForwardWrapper:
    """The `forward` of a module under a plan: the module's own, called in some way.

    Attributes:
        module: The module.
        path: Its path in the model that the plan was applied to.
        out: Whether it has been taken out again.
        owner: All that the call reaches: the module; None where another forward was put on it, which may reach more.
        when: Returns whether it acts in the present call of the model; None for in every one.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = str(path)  # of a plan's own class, which the compiler does not trace
        self._before: Callable[..., Any] | None = None
        self.owner: nn.Module | None = module
        self.out = False
        self.when: Callable[[], bool] | None = None

    @property
    def idle(self) -> bool:
        """Returns whether it is the plain call now."""
        return self.out or (self.when is not None and not self.when())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._before or types.MethodType(type(self.module).forward, self.module))

    def put(self) -> None:
        """Takes the place of the module's forward."""
        here = self.module.__dict__
        self._before = here.get("forward")
        self.owner = self.module if self._before is None else None
        here["forward"] = self
        here.setdefault(REPLICATE, self.replica)

    def take_out(self) -> None:
        """Gives the module its forward back; a wrapper that was put on top stays, and calls it."""
        self.out = True
        here = self.module.__dict__
        if here.get(REPLICATE) == self.replica:
            del here[REPLICATE]
        if here.get("forward") is self:
            del here["forward"]
            here.update({} if self._before is None else {"forward": self._before})

    def replica(self) -> nn.Module:
        """Makes a replica of the module for `nn.DataParallel`, recomputed as the module is."""
        made: nn.Module = getattr(type(self.module), REPLICATE)(self.module)
        here = made.__dict__
        if isinstance(here["forward"], ForwardWrapper):
            top = here["forward"] = here["forward"]._on(made)
            here[REPLICATE] = top.replica
        return made

    def _on(self, module: nn.Module) -> ForwardWrapper:
        """The same on a replica, with the wrappers below it."""
        made: Any = copy.copy(self)
        made.module, made.owner = module, None if self.owner is None else module
        made._before = self._before._on(module) if isinstance(self._before, ForwardWrapper) else self._before
        return made

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that was there before."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        module = self.module  # read once: Dynamo gives two readings two names, and a marked forward the first's weights
        return type(module).forward(module, *args, **kwargs)


class Region(ForwardWrapper):
    """A module that is recomputed.

    Attributes:
        choice: The choice that asks for it.
        name: The region's name.
        store: Where its inputs are kept; None for where they are.
        disabled: Whether it is a plain call, because the model's own checkpointing switch was turned off.
        figures: What it drops and costs, while it is watched; else None.
        first: Looks at its first call in training, then None.
        memory: What it shares with other elastic regions; None where it is recomputed in every step.
        makes: What makes the calls of an elastic region, and of regions within it.
        kept: What is not recomputed in it, as `torch.compile` is told.
    """

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None) -> None:
        super().__init__(module, path)
        self.choice = choice
        self.name = str(path) or type(module).__name__
        self.store = store
        self._kinds = tuple(keep.calls for keep in choice.kept if keep.calls and not keep.module)
        self._carry = choice.carry
        self._contexts: tracing.Contexts | None = None
        self._bare = not (self._kinds or self._carry)
        self.disabled = False
        self.figures: Figures | None = None
        self.first: FirstCalls | None = None
        self.memory: Pool | None = None
        self.makes: dict[str, Callable[..., RegionCall]] = {}
        self.kept: Sequence[traced.Kept] = ()

    def put(self) -> None:
        """Takes the place of the module's forward."""
        super().put()
        self._contexts = self._tags()
        self.make()

    def make(self, within: str = "") -> Callable[..., RegionCall] | None:
        """Returns what makes the calls of an elastic region, or of one `within` it; None where it is not elastic.

        One that is put there again has what was learned of it.
        """
        if self.memory is not None and within not in self.makes:
            name = f"{self.name}, {within}" if within else self.name
            self.makes[within] = self.memory.calls(self.module, name, self.choice)
        return self.makes.get(within)

    def _on(self, module: nn.Module) -> ForwardWrapper:
        """The same on a replica, whose device is another one: it is recomputed in every step."""
        made: Any = super()._on(module)
        made.memory, made.makes = None, {}
        return made

    def _tags(self, first: bool | None = None) -> tracing.Contexts | None:
        words = f"{self.choice.keep} {self._carry}"
        return traced.contexts(self.module, self.kept, self._carry, words, first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contexts": None, "makes": {}}  # of this module, not of a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._contexts = self._tags()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a region."""
        if self.idle or self.disabled:
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.traced(self.plain, args, kwargs, self)
        make = None if self.memory is None else self.make()
        options = Options(self.name, self.store, owner=self.owner, make=make, tile=self.choice.tiles > 0)
        fn = self.plain if self._bare else self.body
        if self.first is not None and torch.is_grad_enabled():
            return self.first.run(self, options, fn, args, kwargs)
        call = self.called if self.choice.tiles else run
        if self.figures is None:
            return call(options, fn, args, kwargs)
        with observing(self.figures):
            return call(options, fn, args, kwargs)

    def called(self, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function as one region, or as one for each tile of tokens, which are the last dimension but one."""
        if not self.choice.tiles or not torch.is_grad_enabled() or transforming():
            return run(options, fn, args, kwargs)
        from ..engine import tiles

        return tiles.run(partial(run, options), fn, self.name, self.choice.tiles, tiles.TOKENS, args, kwargs)

    def traced(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: Callable[..., Any]
    ) -> Any:
        """Calls a function as the region does, where `torch.compile` traces it; `region` is called where it cannot."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if self.choice.tiles:
            tracing.say(no_effect(self.name, f"tiles={self.choice.tiles}", "has all tokens at once"))
        make = None if self.memory is None else RegionCall  # what is said of any elastic region
        return trace(Options(self.name, self.store, DEFAULT, make=make), fn, args, kwargs, self._contexts, region)

    def changed(self) -> str:
        """Text for a replay that came out otherwise because the plan was taken out meanwhile; "" if it was not."""
        if not self.out:
            return ""
        return (
            f"the plan was taken out of the model (handle.remove()) between the forward of {self.name} and its "
            "backward, so the replay repeats calls that the plan keeps.\n"
            "  Call handle.remove() after backward(), or before the forward."
        )

    def watched(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """A region whose calls are shown to the figures, if there are any now."""
        figures = self.figures
        if figures is None:
            return region

        def call(*args: Any, **kwargs: Any) -> Any:
            with observing(figures):
                return region(*args, **kwargs)

        return call

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in forward, and again in a replay."""
        return self.run(self.plain, args, kwargs)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function as the region does, in forward and in a replay."""
        if thread.run is None or not (self._kinds or self._carry):  # without gradients there is no region
            return fn(*args, **kwargs)
        return run_keeping(fn, args, kwargs, self._kinds, self._carry)


class NamedCalls(Region):
    """A module in which calls of one name are recomputed, or run again with the region that they are in."""

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None) -> None:
        super().__init__(module, path, choice, store)
        self._name = Target(path).calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and decides about calls in it."""
        if self.idle or self.disabled:
            return self.plain(*args, **kwargs)
        around = thread.overrides
        thread.overrides = Listed(self._name, self.region, around)
        try:
            return self.plain(*args, **kwargs)
        finally:
            thread.overrides = around

    def region(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a call with the name."""
        if thread.run is not None or thread.traced:
            return fn
        if torch.compiler.is_compiling():
            return lambda *args, **kwargs: self.traced(fn, args, kwargs, lambda *a, **k: self.region(fn)(*a, **k))

        def body(*args: Any, **kwargs: Any) -> Any:
            return self.run(fn, args, kwargs)

        options = Options(self.path, self.store, make=self.make())
        return self.watched(lambda *args, **kwargs: run(options, body, args, kwargs))


class HeadWithLoss(Region):
    """A head whose loss is made in tiles of tokens, with it (`engine/tiled_loss.py`).

    Attributes:
        asked: What has read the whole result instead; "" once a loss has been made in tiles; None before.
    """

    asked: str | None = None
    _warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the logits, which are computed when they are read."""
        hidden: Any = args[0] if args else None
        weight: Any = getattr(self.module, "weight", None)
        compiling = torch.compiler.is_compiling()
        if compiling and not self.idle:
            tracing.say(no_effect(self.name, f"tiles={self.choice.tiles}", "makes the loss of all tokens at once"))
        apart = compiling or not torch.is_grad_enabled() or transforming() or thread.run is not None
        known = isinstance(hidden, torch.Tensor) and isinstance(weight, torch.Tensor) and len(args) == 1 and not kwargs
        if self.idle or self.disabled or apart or not known or hidden.dim() < 2 or weight.dim() != 2:
            return self.plain(*args, **kwargs)
        from ..engine.tiled_loss import Head, unmade

        if self.first is not None:
            self.first.compare(self.module)
        return unmade(Head(self.name, self.plain, weight, self.choice.tiles, self._region, self._told), hidden)

    def _region(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.watched(partial(run, Options(self.name, tile=True)))(fn, args, kwargs)

    def _told(self, by: str) -> None:
        if by and not self._warned and not any(map(is_fake, self.module.parameters())):
            self._warned = True
            warnings.warn(
                f"The plan makes {self.name} with its loss in {self.choice.tiles} tiles of tokens, and {by} reads the "
                "logits of all tokens, which are there at once then. Tiles are for what reads them by "
                "torch.nn.functional.cross_entropy alone; leave them out of the plan, or do not read the logits. (Said "
                "once.)",
                RuntimeWarning,
                stacklevel=5,
            )
        self.asked = by if self.asked is None or not by else self.asked


class Listed(NamedTuple):
    """One name that a plan lists, and the overrides around."""

    name: str
    place: Callable[[Callable[..., Any]], Callable[..., Any]]
    around: Overrides | None

    def saved_call(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """Replaces a saved call that has the name."""
        if name == self.name:
            return self.place(fn)
        return None if self.around is None else self.around.saved_call(name, fn)

    def region(self, name: str) -> None:
        """Leaves a region as it is written."""


def _traced_whole() -> bool:
    """Whether `torch.compile` traces this, and the region around it; then tags say what is kept."""
    return torch.compiler.is_compiling() and not thread.untraced


class SavedModule(ForwardWrapper):
    """A module whose call is not repeated when a region around it is.

    The model gets a copy of the result: it may change results in place, and the replay returns what the call returned.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a saved call."""
        if self.idle or _traced_whole() or thread.run is None:
            return self.plain(*args, **kwargs)
        return each_tensor(keep(self.path, self.plain, args, kwargs), copied)


class Offloaded(ForwardWrapper):
    """A module that is not recomputed, or calls in it: what they save for backward is in a store.

    Attributes:
        choice: The choice that asks for it.
        name: Its path.
        store: The store.
        figures: What it gives the store, while it is watched; else None.
    """

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None) -> None:
        super().__init__(module, Target(path).module)
        self.choice = choice
        self.name = str(path)
        self.store = store
        self.figures: Figures | None = None
        self._calls = Target(path).calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if self.idle or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        store = self.store
        if self.figures is not None and store is not None and not torch.compiler.is_compiling():
            store = self.figures.counting(store)
        if self._calls in KINDS:
            with KeepCalls((self._calls,), store):
                return self.plain(*args, **kwargs)
        if not self._calls:
            return _stored(self.path, self.plain, args, kwargs, store)
        around = thread.overrides
        thread.overrides = Listed(self._calls, lambda fn: lambda *a, **k: _stored(self._calls, fn, a, k, store), around)
        try:
            return self.plain(*args, **kwargs)
        finally:
            thread.overrides = around


def _stored(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], store: Store | None
) -> Any:
    result = keep(name, fn, args, kwargs, store)
    return result if thread.run is None else each_tensor(result, copied)  # as with a `SavedModule`


class KeepCallsWithin(ForwardWrapper):
    """A module in which the calls of a kind are saved when a region around it runs."""

    def __init__(self, module: nn.Module, path: str, kind: str) -> None:
        super().__init__(module, path)
        self._kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if self.idle or _traced_whole() or thread.run is None:
            return self.plain(*args, **kwargs)
        return run_keeping(self.plain, args, kwargs, (self._kind,))


class ChainedRegion(Region):
    """One of several modules that are recomputed together. Only the first one's inputs are kept, and need a store."""

    def __init__(self, module: nn.Module, path: str, choice: Choice, store: Store | None, chain: Chain) -> None:
        self._first, self._last = path == choice.paths[0], path == choice.paths[-1]
        super().__init__(module, path, choice, store if self._first else None)
        self._bare = self._bare and not choice.nested
        self._chain = chain

    def _tags(self, first: bool | None = None) -> tracing.Contexts | None:
        return super()._tags(self._first)

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in forward, and again in a replay; of nested members, as a region in that replay."""
        if not self.choice.nested or thread.run is None:
            return super().body(*args, **kwargs)
        return run(Options(self.path, make=self.make("nested")), super().body, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as a region whose result the next member rebuilds."""
        alone = not torch.is_grad_enabled() or torch.compiler.is_compiling() or transforming()
        if self.idle or self.disabled or alone:
            return super().__call__(*args, **kwargs)
        if self._first:
            self._chain.check()
        before, self._chain.waiting = None if self._first else self._chain.waiting, None
        if self._last:
            result = super().__call__(*args, **kwargs)
        else:
            begin = Discard if self.figures is None else self.watched(Discard)
            call = begin(Options(self.name, self.store, owner=self.owner, make=self.make()), self.body, args, kwargs)
            result = call.result
            self._chain.waiting = call
        if before is not None:
            before.hand_over()
        return result


class Chain:
    """Modules recomputed together, in the order of their calls.

    Attributes:
        modules: The modules.
    """

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module | None = None) -> None:
        self.modules = list(modules)
        # Weak, and not in a copy: a copy of one layer must not bring the whole model with it.
        self._model = None if model is None else weakref.ref(model)
        self._local = threading.local()

    def __getstate__(self) -> Any:
        return self.modules  # a copy of the model has calls of its own

    def __setstate__(self, modules: list[nn.Module]) -> None:
        self.__init__(modules)

    @property
    def waiting(self) -> Discard | None:
        """The call on this thread whose result the next member is about to take."""
        return getattr(self._local, "call", None)

    @waiting.setter
    def waiting(self, call: Discard | None) -> None:
        self._local.call = call

    def check(self) -> None:
        """Raises if the modules are sharded apart: one is replayed in the other's backward, without its parameters."""
        asked = (getattr(module, "_get_fsdp_state", None) for module in self.modules)
        if len({id(ask()) for ask in asked if ask is not None}) > 1:
            raise errors.ArgumentError(
                f"the plan recomputes {len(self.modules)} layers together, but each of them was sharded on its own: in "
                "backward the earlier ones are replayed while only the last one's parameters are gathered.\n"
                "  Shard what is recomputed together as one unit:  fully_shard([layers[0], layers[1]])\n"
                "  or recompute them one by one:  recompute_num_layers=1"
            )
        model = None if self._model is None else self._model()
        if model is not None and len({id(_fsdp_around(model, module)) for module in self.modules}) > 1:
            raise errors.ArgumentError(
                f"the plan recomputes {len(self.modules)} layers together, but FullyShardedDataParallel was put "
                "around each of them alone: in backward the earlier ones are replayed while only the last one's "
                "parameters are sure to be there.\n"
                "  Wrap a module that holds all of them, or keep parameters after forward "
                "(ShardingStrategy.SHARD_GRAD_OP),\n"
                "  or recompute them one by one:  recompute_num_layers=1"
            )
        self._model = None  # a wrapper is found by looking for it, and stays: once is enough


def _fsdp_around(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The innermost FullyShardedDataParallel around a module that frees its parameters between forward and backward."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found: nn.Module | None = None
    if fsdp is not None:
        for outer in model.modules():  # the outer ones first
            strategy: Any = outer.sharding_strategy if isinstance(outer, fsdp.FullyShardedDataParallel) else None
            frees = strategy is not None and strategy.name in ("FULL_SHARD", "HYBRID_SHARD")
            if frees and outer is not module and any(inner is module for inner in outer.modules()):
                found = outer
    return found


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as `clone` makes it; but that of a DTensor has the same placements, where `clone` reduces a partial one.

    Duck typing keeps torch.distributed, which need not be there, out of `import torch_recompute`.
    """
    placements: Any = getattr(tensor, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return tensor.clone()
    from torch.distributed.tensor import Replicate

    d: Any = tensor
    local = d.to_local(grad_placements=[Replicate() if p.is_partial() else p for p in placements])
    layout = {"run_check": False, "shape": d.shape, "stride": d.stride()}
    return type(d).from_local(local.clone(), d.device_mesh, placements, **layout)
