"""The engine: regions that are recomputed, and saved calls inside them that are not.

`recompute(fn)` runs `fn` under saved-tensor hooks that keep none of the tensors autograd saves: each becomes a `Slot`,
an empty place in the graph. When backward first opens a slot, the `RegionCall` of that call runs `fn` again under other
hooks that fill the slots in order. From then on the rebuilt tensors live in the graph itself, exactly where plain
autograd would have kept them, and die when their node has read them: no table of recomputed tensors, no key per
backward call, and the order in which memory is freed is autograd's own.

What is never a slot: a parameter or an input of the region, and any view of one. These are alive anyway; the graph
holds them directly, with their version, and a region that saves nothing else is never replayed. They are counted as
slots are, so a replay knows by its place in the order what a tensor was in forward.

`no_recompute(fn)` in a region is a saved call. What autograd saves inside it is sorted by storage: parameters and
region inputs cost nothing; views of the call's own inputs become slots too, filled from the replayed input; the rest
is stored. A replay skips the call and returns its stored output. Outputs that no replay gets as far as needing are
dropped when the region ends.

A replay ends at the last slot that is still open (law 6): at once if the tensor in it is an input or a finished
output of its operation (it requires grad), else at the next event or the end of a module, because some operations save
a buffer that their kernel fills afterwards (RReLU: such a buffer requires no grad, and was saved at the same sequence
number as what follows in the same operation). It ends by an exception that derives from BaseException, so user code
that says `except Exception` cannot swallow it.

Invariants: hooks and `thread.run` are restored by the code that set them. Nothing in the graph refers to a run, only to
a region call; a region call refers to slots weakly; so the whole dies by reference counting (law 8).
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from . import errors
from ._torch import ambient_hooks, tracing
from ._torch.modes import dual_level, transform_level, transforming
from .engine.region_call import Options, Recording, RegionCall, Replay
from .engine.saved_call import SavedCall, Then, call_again, record_call, stored_call, tensors_of
from .state import DEFAULT, Ambient
from .state.observer import Observer, Running, here, observing
from .state.tape import Run, Tape, inside, thread
from .state.values import kept_in_graph, name_of, named_as
from .stores import OnDevice, Store

P = ParamSpec("P")
R = TypeVar("R")


@tracing.as_it_is
def call(options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `fn` as a region. The caller has seen to it that grad is enabled."""
    if transform_level() is not None or dual_level() >= 0:  # `transforming`, without its call
        warnings.warn(_under_a_transform(options.name), RuntimeWarning, stacklevel=2)
        return fn(*args, **kwargs)
    outer = thread.run
    return (options.make or RegionCall)(options, fn, args, kwargs, outer).forward(fn, args, kwargs, outer)


def _under_a_transform(name: str) -> str:
    return (
        f"{name} is recomputed inside a transform of torch.func (grad, vjp, jacrev, hessian, jvp, vmap) or in "
        "forward_ad.dual_level(), where nothing can be: these have no saved-tensor hooks, or tensors and tangents that "
        "are gone when backward runs. So it is the plain call there, with the same results, and keeps what it saves.\n"
        "  Take gradients with backward() or torch.autograd.grad, and call the model with the whole batch instead of "
        "vmap; or leave the region out there: handle.remove() for a plan"
    )


def run(options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `fn` as a region: traced where the compiler looks on, plainly where there is no grad."""
    if torch.is_grad_enabled():
        return (trace if torch.compiler.is_compiling() else call)(options, fn, args, kwargs)
    return fn(*args, **kwargs) if thread.run is None else _without_grad(options.name, fn, args, kwargs)


def _without_grad(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A region called under `no_grad` inside another: the plain call, with values and records of its own."""
    outer: Any = thread.run
    outer.event()
    tape = Tape()
    tape.reach = -1  # it has no replays of its own
    run = Run(name, tape, outer.ambients)
    run.follow(outer.enter(tape))
    with inside(run):
        return fn(*args, **kwargs)


def _not_an_ambient(value: object) -> str:
    """Text for an element of `state=` that is no ambient."""
    if hasattr(value, "capture") and hasattr(value, "restore"):
        name = value.__name__ if isinstance(value, type) else errors.kind(value)
        return f"state= takes a sequence of objects of classes such as {name}; write state=[{name}(...)]."
    return (
        f"state= holds {value!r:.80}, and {errors.kind(value)} has no capture() and restore(value).\n"
        "  Write state=[torch_recompute.state.NumpyRng()], or objects with these two methods."
    )


def recompute(
    fn: Callable[P, R],
    *,
    name: str | None = None,
    inputs: Store | None = None,
    state: Sequence[Ambient] = (),
    check: str = "metadata",
    early_stop: bool = True,
    tiles: int | None = None,
    tile_dim: int = 1,
    elastic: Pool | None = None,
) -> Callable[P, R]:
    """Wraps `fn` as a region: what autograd saves in it is dropped in forward and rebuilt, once, in backward.

        y = recompute(block)(x, mask=mask)

    Gradients are those of the plain call. `fn` may take and return anything; it runs once in forward and once in a
    backward call that needs it (twice where a saved call was marked wrongly, see `no_recompute`). Without grad, and in
    inference mode, it is the plain call. Inside `torch.compile` it is traced: the compiled step keeps and repeats the
    same, without a graph break. Wrapping takes no time to speak of; doing it again on every call is fine.

    Args:
        fn: A function, bound method or module. It must do the same work when it is called again with the same
            arguments; what it may depend on besides them is said in `torch_recompute.state`.
        name: How errors and reports call the region; by default the function's or module's name.
        inputs: A `Store` for the region's inputs, by default where they are.
        state: `Ambient` objects: state outside of PyTorch that `fn` reads and changes, such as `NumpyRng()`.
        check: What a replay is compared with: "metadata" (shape, dtype and device of each saved
            tensor), "values" (stride and bits too: one pass over each, for debugging), or "none" (their number only).
        early_stop: End the replay at the last tensor that backward still needs.
        tiles: Cut the positional tensors into this many parts of equal length (or one more), at most one per token,
            and make a region of each: what is fat inside `fn` exists for one tile at a time, in forward and backward.
            For functions that act on each token on its own and return one entry per token. Keyword arguments and
            closures are used whole by every tile. Gradients equal the plain call's up to the order in which a
            weight's gradient is summed; dropout draws other numbers than without tiles.
        tile_dim: Which dimension of the positional tensors and of the results holds the tokens.
        elastic: An `Elastic`: the region keeps its activations while its memory lasts, and is recomputed where it does
            not.

    Returns:
        A callable with `fn`'s signature.

    Raises:
        ArgumentError: An argument here is none of the above, or the region is called with an iterator or with
            arguments that cannot be cut into tiles.
        MismatchError: In backward, the replay saved other tensors than the forward.
        ChangedError: In backward, an input or weight has been changed in place since the forward.

    Recomputation in this form: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174).
    """
    later = types.FunctionType is type(fn) and fn.__code__.co_flags & 0x2A0  # a generator or a coroutine
    if later or not callable(fn):
        raise errors.ArgumentError(errors.not_callable("recompute", fn))
    if check not in ("metadata", "values", "none"):
        raise errors.ArgumentError(
            f"check={check!r} is not known. It says what a replay is compared with:\n"
            '      check="metadata"   shape, dtype and device of every saved tensor (the default)\n'
            '      check="values"     stride and contents too: slower, finds what is not deterministic\n'
            '      check="none"       only how many there are'
        )
    inputs = checked_store("inputs", inputs)
    if tiles is not None or type(tile_dim) is not int or tile_dim != 1:
        from .engine.tiles import check as check_tiles

        check_tiles(fn, tiles, tile_dim)
    given: tuple[Any, ...] = (state,) if hasattr(state, "capture") else tuple(state)
    for ambient in given:
        a_state = hasattr(ambient, "capture") and hasattr(ambient, "restore")
        if ambient is state or isinstance(ambient, type) or not a_state:
            raise errors.ArgumentError(_not_an_ambient(ambient))
    label = name or name_of(fn)
    make = None if elastic is None else checked_pool(elastic).calls(fn, label)
    options = Options(label, inputs, (*DEFAULT, *given), check, early_stop, tile=tiles is not None, make=make)

    def region(*args: P.args, **kwargs: P.kwargs) -> R:
        if name is not None and thread.overrides is not None:
            thread.overrides.region(name)
        if tiles is not None and torch.is_grad_enabled() and not transforming():
            from .engine.tiles import run as run_tiles

            return run_tiles(functools.partial(run, options), fn, options.name, tiles, tile_dim, args, kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # as `run` does, without its detours
            return call(options, fn, args, kwargs)
        return run(options, fn, args, kwargs)

    again = functools.partial(recompute, name=name, inputs=inputs, state=given, check=check, early_stop=early_stop)
    return named_as(fn, region, functools.partial(again, tiles=tiles, tile_dim=tile_dim, elastic=elastic))


@tracing.within_caller
def trace(
    options: Options,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: tracing.Contexts | None = None,
    region: Callable[..., Any] | None = None,
) -> Any:
    """Calls `fn` as a region of the graph that `torch.compile` is tracing; the caller has seen that grad is enabled.

    Where the region cannot be traced whole, the engine runs it, and what it calls is compiled.

    Args:
        options: What the graph has no place for is warned of. Without a name it is that of `fn`.
        fn: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        contexts: What the operations are tagged with, where it is not what every region's are.
        region: Calls the region by the engine, with the same arguments; by default that is `call`.
    """
    if not torch.compiler.is_compiling():
        compiler = tracing.set_compiler(None)
        try:
            whole = functools.partial(call, options, fn, args, kwargs)
            engine = functools.partial(region, *args, **kwargs) if region else whole
            return _run_untraced(options.name or name_of(fn), compiler, engine)
        finally:
            tracing.set_compiler(compiler)
    if tracing.exporting():  # one graph, which nobody partitions
        return fn(*args, **kwargs)
    if options.store is not None or options.make or len(options.ambients) > len(DEFAULT) or options.check == "values":
        tracing.say(_untraceable(options))
    if thread.untraced and not thread.traced:
        tracing.end_graph()

    def body(*args: Any) -> Any:
        return fn(*args, **kwargs)

    if thread.traced:  # a region in it: what is traced inside of a call may change nothing outside
        return tracing.call(body, args, contexts)
    thread.traced = True
    try:
        return tracing.call(body, args, contexts)
    finally:
        thread.traced = False


class _CompiledInside(Observer):
    """Compiles what a region calls, in its forward and in its replays; the engine around that is not looked at."""

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler

    def around(self, running: Running) -> AbstractContextManager[Any]:
        """Entered before the region's function, and before a replay as a whole."""
        if running.kind == "rebuild":
            return _saying_that_parts_are_compiled()
        return _Compiled(self._compiler) if running.kind in ("forward", "replay") else nullcontext()


@contextmanager
def _saying_that_parts_are_compiled() -> Generator[None]:
    try:
        yield
    except errors.MismatchError as error:
        error.args = (
            f"{error}\n  What the region calls is compiled in parts. If these are not the same in forward and replay "
            "(TORCH_LOGS=recompiles shows it; under a mode such as FlopCounterMode nothing is compiled), leave them "
            "uncompiled:  recompute(torch.compiler.disable(fn))",
        )
        raise


class _Compiled:
    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler

    def __enter__(self) -> None:
        self._untraced, thread.untraced = thread.untraced, True
        self._compiler = tracing.set_compiler(self._compiler)

    @tracing.within_caller
    def __exit__(self, *_: object) -> None:
        tracing.set_compiler(self._compiler)
        thread.untraced = self._untraced


def _run_untraced(name: str, compiler: Any, region: Callable[[], Any]) -> Any:
    tracing.cut[name] += 1
    warnings.warn(_cannot_be_traced(name), RuntimeWarning, stacklevel=3)
    observers = () if here.observers is None else here.observers.each
    if compiler is None or any(isinstance(observer, _CompiledInside) for observer in observers):
        return region()
    hidden, thread.calls_hidden = thread.calls_hidden, True
    try:
        with observing(_CompiledInside(compiler)):
            return region()
    finally:
        thread.calls_hidden = hidden


def _untraceable(options: Options) -> str:
    if options.store is not None:
        return no_effect(options.name, f"inputs={errors.kind(options.store)}()", STAYS)
    if options.make is not None:
        return no_effect(options.name, "elastic=", "keeps and repeats the same in every step")
    if options.check == "values":
        return no_effect(options.name, 'check="values"', "has one graph for both, and nothing to compare")
    state = errors.kind(options.ambients[-1])
    return no_effect(options.name, f"state=[{state}()]", "runs no Python in a replay that could read or change it")


STAYS = "keeps tensors where they are"


def no_effect(name: str, option: str, because: str) -> str:
    """Text for an option that cannot be said to the compiler."""
    return (
        f"{name} is in a function that torch.compile compiles, where {option} has no effect: the compiled step "
        f"{because}.\n"
        "  Leave it out, or compile what the region calls instead:  recompute(torch.compile(fn), ...)"
    )


def _cannot_be_traced(name: str) -> str:
    return (
        f"{name} is recomputed inside torch.compile, which cannot trace it whole: there is a graph break in it, or it "
        "assigns to something outside (self.ema = ...). So it runs as it would without torch.compile, with the same "
        "gradients, and what it calls is compiled in parts.\n"
        "  Find the line:  torch.compile(model, fullgraph=True)  or  TORCH_LOGS=graph_breaks"
    )


def no_recompute(
    fn: Callable[P, R],
    *,
    name: str | None = None,
    store: Store | None = None,
    values_unused: bool = False,
) -> Callable[P, R]:
    """Wraps a call whose work is not repeated when the region around it is recomputed.

        attention = no_recompute(F.scaled_dot_product_attention)
        layer = recompute(lambda x: x + proj(attention(*qkv(norm(x)))))

    What backward needs from inside the call is stored, except what the replay rebuilds anyway (views of the call's
    inputs). Its output is stored only if something recomputed later needs it. Outside of a region, and inside another
    saved call, it is the plain call; with a `store`, all that it saves for backward but parameters is put there.
    Inside `torch.compile` the compiled step does not repeat its work either.

    Args:
        fn: A function, bound method or module.
        name: How errors and reports call it, by default its own name; one that is given here can also stand among
            the labels of a `RecomputeConfig`, which then recomputes the call.
        store: A `Store` for what it keeps, by default where it is.
        values_unused: Say that nothing which the region rebuilds needs the values of its output, only the shape, as
            with a product whose output goes through dropout and out of the region. Then the output is not kept, and
            the replay goes on with a shape-only tensor. Where it does meet something that needs values, the call is
            repeated after all, in a second replay, with a warning. A sparse tensor and a subclass (`DTensor`) are kept.

    Returns:
        A callable with `fn`'s signature.

    Raises:
        ArgumentError: `fn` is not callable, or `store` is no store.
        ChangedError: In backward, the output has been changed in place and the replay needs it.

    The idea is that of selective activation recomputation: Korthikanti et al., 2022 (arXiv 2205.05198).
    """
    if not callable(fn):
        raise errors.ArgumentError(errors.not_callable("no_recompute", fn))
    store = checked_store("store", store)
    label = name or name_of(fn)

    def saved_call(*args: P.args, **kwargs: P.kwargs) -> R:
        if name is not None and thread.overrides is not None:
            instead = thread.overrides.saved_call(name, fn)
            if instead is not None:
                return instead(*args, **kwargs)
        return keep(label, fn, args, kwargs, store, values_unused)

    again = functools.partial(no_recompute, name=name, store=store, values_unused=values_unused)
    return named_as(fn, saved_call, again)


@tracing.as_it_is
def keep(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: Store | None = None,
    values_unused: bool = False,
    pure: bool = False,
) -> Any:
    """Makes a saved call; a `pure` one is known to draw no numbers, to change nothing, and to return new memory."""
    if torch.compiler.is_compiling():
        if store is not None:
            tracing.say(no_effect(name, f"store={errors.kind(store)}()", STAYS))
        return kept_in_graph(fn, args, kwargs)
    now = thread.run
    if now is None:
        thread.plain_calls += 1
        return fn(*args, **kwargs) if store is None else _keep_outside(store, name, fn, args, kwargs)
    pack, hooks = getattr(now, "pack", None), ambient_hooks()
    if pack is not None and hooks is not None and hooks[0] != pack:
        # The region's function has entered saved-tensor hooks of its own: what is saved in them is theirs. Such are
        # those of another checkpoint, which calls the function again itself and compares what is saved.
        if not now.replaying:
            warnings.warn(_not_kept_in_hooks(name, now.name), RuntimeWarning, stacklevel=3)
        return fn(*args, **kwargs)
    if now.replaying:
        return _pass_by(now, name, fn, args, kwargs)
    scope = now if isinstance(now, Recording) else None
    return record_call(now, scope, store, name, values_unused, pure, fn, args, kwargs)


def _not_kept_in_hooks(name: str, region: str) -> str:
    return (
        f"{region} calls {name} within saved-tensor hooks that it enters itself (save_on_cpu, torch.utils.checkpoint), "
        "so the call is not kept: what is saved there is the hooks', and each replay makes the call again.\n"
        "  Move the call out of the hooks, or enter them around the region."
    )


def _keep_outside(
    store: Store, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A saved call with a store, outside of every region."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if transforming():
        warnings.warn(_not_stored_under_a_transform(name), RuntimeWarning, stacklevel=3)
        return fn(*args, **kwargs)
    return stored_call(store, name, fn, args, kwargs)


def _not_stored_under_a_transform(name: str) -> str:
    return (
        f"{name} is called with a store inside a transform of torch.func (grad, vjp, jacrev, hessian, jvp, vmap), "
        "which has no saved-tensor hooks. So it is the plain call there, and keeps what it saves where it is.\n"
        "  Take gradients with backward() or torch.autograd.grad, or leave store= out there."
    )


def _pass_by(run: Run, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record = run.read(SavedCall, name)
    inputs = tensors_of(fn, args, kwargs)
    record.check(run.name, inputs)
    if isinstance(run, Replay):
        run.saved_call(record, inputs)
    if record.then in (Then.REPEATS, Then.REFILLS):
        return record.again(run, fn, args, kwargs)
    makes_again = record.then is Then.MAKES_AGAIN
    again = functools.partial(call_again, run, name, fn, args, kwargs) if makes_again else None
    result = record.result(run.name, inputs, again)
    if isinstance(run, Recording):
        run.alias(record)
    return result


class Pool(Protocol):
    """Memory that elastic regions share: `Elastic`."""

    def calls(self, fn: Callable[..., Any], name: str, what: Hashable = None) -> Callable[..., RegionCall]:
        """Returns what makes the calls of a region; `what` tells apart regions of one function and name."""
        ...


def checked_pool(pool: Any) -> Pool:
    """Returns what `elastic=` was given, where it is memory that regions can share."""
    if not hasattr(pool, "calls") or isinstance(pool, type):
        raise errors.ArgumentError(
            f"elastic= takes the memory that regions share, but got {errors.say(pool)}\n"
            '  Write memory = torch_recompute.Elastic("fit") once, and recompute(fn, elastic=memory) for each region; '
            "or apply(model, plan, elastic=memory)."
        )
    return pool


def checked_store(option: str, store: Any) -> Store | None:
    """Returns the store that an option was given; None for tensors that stay where they are."""
    if store is not None and (isinstance(store, type) or not (hasattr(store, "put") and hasattr(store, "get"))):
        raise errors.ArgumentError(errors.not_a_store(option, store))
    return None if type(store) is OnDevice else store
