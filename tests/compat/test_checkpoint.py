"""The drop-in: `checkpoint` and `checkpoint_sequential` with the signatures and meanings of `torch.utils.checkpoint`.

PyTorch's own tests run on the same functions with `tools/torch_conformance.py`; these are what must hold on a machine
that has no checkout of PyTorch.
"""

import contextlib
import functools
import gc
import inspect
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as theirs
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from laws.watch import Operations, Tally, Turns, equal, vector
from support.training import gradients
from torch_recompute import (
    ArgumentError,
    MismatchError,
    checkpoint,
    checkpoint_sequential,
    no_recompute,
    recompute,
    replay,
)
from torch_recompute.compat import _calling, paddle

aten = torch.ops.aten


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()


# --- signatures -------------------------------------------------------------------------------------------------------

# Named in torch 2.14's signature; before, torch took the first from **kwargs and did not have the second. `function`
# became optional in 2.14, with the decorator form. Ours is the signature of 2.14 under every torch.
SINCE_2_14 = {"preserve_rng_state": True, "respect_saved_tensors_hooks": None}


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_signature_is_that_of_torch(name: str) -> None:
    """Every parameter of torch's function is one of ours, of the same kind, order and default, and we add none."""
    wanted = inspect.signature(getattr(theirs, name)).parameters
    have = inspect.signature(
        {"checkpoint": checkpoint, "checkpoint_sequential": checkpoint_sequential}[name]
    ).parameters
    named = {key: value for key, value in wanted.items() if value.kind is not inspect.Parameter.VAR_KEYWORD}
    ours = {k: v for k, v in have.items() if v.kind is not inspect.Parameter.VAR_KEYWORD}
    assert [k for k in ours if k in named] == list(named)
    assert set(ours) - set(named) <= set(SINCE_2_14)
    assert all(ours[key].kind is value.kind for key, value in named.items())
    assert all(ours[key].default == value.default for key, value in named.items() if key != "function")
    assert all(have[key].default is value for key, value in SINCE_2_14.items() if name == "checkpoint" or key in have)


@pytest.mark.parametrize("use_reentrant", [False, None])
def test_no_warning(use_reentrant: bool | None) -> None:
    """Saying `use_reentrant=False`, or nothing, is the same and warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = gradients(functools.partial(checkpoint, torch.exp, use_reentrant=use_reentrant), X)
    assert equal(got, gradients(torch.exp, X))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.GELU())


class Passing(torch.autograd.Function):
    """Saves its input, as a Function of the user's own does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0].exp()


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 3)
    return y.exp()


def changed_in_place(c: Any, x: torch.Tensor) -> torch.Tensor:
    y = c(torch.exp, x)
    return y.mul_(2).sin() if c is not plainly else (y * 2).sin()  # autograd refuses it without a region


def plainly(function: Any, *args: Any) -> Any:
    """The call without a region."""
    return function(*args)


SHARED, drop = mlp(), nn.Dropout(0.5)
REENTRANT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "module": lambda c, x: c(SHARED, x),
    "one module twice": lambda c, x: c(SHARED, x) + c(SHARED, x),
    "regions in a region": lambda c, x: c(lambda x: c(torch.exp, c(torch.sin, x)), x),
    "random numbers": lambda c, x: drop(c(lambda x: drop(x).exp(), x)),
    "autocast": lambda c, x: torch.autocast("cpu", torch.bfloat16)(c)(SHARED, x).float(),
    "not only tensors": lambda c, x: c(lambda x, k, n: (k, None, x.argmax(), "s", (x * k).exp()), x, 3, None)[4],
    "output unused": lambda c, x: c(lambda x: (x.exp(), x.sin()), x)[0],
    "output detached": lambda c, x: sum(c(lambda x: (x.exp(), x.detach()), x)),
    "output is an input": lambda c, x: sum(c(lambda x: (x, x.exp()), x)),
    "output is a view": lambda c, x: c(lambda x: x.view(-1), x).exp(),
    "outputs are views": lambda c, x: c(lambda x: SHARED(x).chunk(2)[0], x),
    "output changed in place": changed_in_place,
    "work only with grad": lambda c, x: c(lambda x: x.exp() if torch.is_grad_enabled() else x.detach().exp(), x),
    "hooks": lambda c, x: c(hooked, x),
    "autograd Function": lambda c, x: c(lambda x: Passing.apply(x), x),
    "several modules": lambda c, x: (
        checkpoint_sequential([SHARED, torch.sin, torch.exp], 3, x, c is not plainly)
        if c is not reentrant
        else theirs.checkpoint_sequential([SHARED, torch.sin, torch.exp], 3, x, use_reentrant=True)
    ),
}
"""What torch's reentrant engine does right."""
reentrant = functools.partial(theirs.checkpoint, use_reentrant=True)
taken = functools.partial(checkpoint, use_reentrant=True)


@pytest.mark.parametrize("name", REENTRANT)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:use_reentrant=True runs")
def test_reentrant_is_taken(name: str) -> None:
    """`use_reentrant=True` gives the gradients of torch's reentrant engine, and of no region, to the last bit."""
    results: list[list[torch.Tensor]] = []
    for call in (plainly, reentrant, taken):
        torch.manual_seed(3)
        SHARED.zero_grad()
        x = torch.randn(4, 6, requires_grad=True)
        REENTRANT[name](call, x).square().sum().backward()
        results.append([each.grad for each in (x, *SHARED.parameters()) if each.grad is not None])
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.filterwarnings("ignore:use_reentrant=True runs")
def test_reentrant_works_where_torchs_does_not() -> None:
    """Keyword arguments, `autograd.grad`, inputs without grad, and BatchNorm: one engine, with the plain gradients."""
    norm, x = nn.BatchNorm1d(6), torch.linspace(0, 1, 24).view(4, 6)
    taken(norm, x).exp().sum().backward()
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.weight.grad, torch.autograd.grad(norm(x).exp().sum(), norm.weight)[0])
    fn = Turns(lambda x, scale: (x * scale).exp())
    assert equal(gradients(lambda x: taken(fn, x, scale=2.0), X), gradients(lambda x: (x * 2.0).exp(), X))
    assert fn.calls == 2


def test_reentrant_is_said_once() -> None:
    """One warning in a process, at the line of the user, however many regions and functions ask for it."""
    _calling._say_reentrant.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            checkpoint(torch.exp, vector(), use_reentrant=True)
            paddle.recompute(torch.exp, vector(), use_reentrant=True)
            checkpoint_sequential([torch.sin, torch.exp], 2, vector(), use_reentrant=True)
    assert ["use_reentrant=True runs as use_reentrant=False" in str(warning.message) for warning in said] == [True]
    assert said[0].filename == __file__


class Scaled(nn.Module):
    """A block with checkpointed methods; an option's name is also a keyword of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tally = Tally()

    @checkpoint(use_reentrant=False, determinism_check="none")
    def forward(self, x: torch.Tensor, *, debug: float = 1.0) -> torch.Tensor:
        """The product, bent."""
        self.tally()
        return (self.linear(x).tanh() * debug).exp()


def test_decorator_form() -> None:
    """Without a function it returns a decorator, for functions, methods and modules."""
    torch.manual_seed(0)
    model = Scaled()
    plain = gradients(model, X, run=lambda x: (model.linear(x).tanh() * 2.0).exp())
    assert equal(gradients(model, X, debug=2.0), plain)
    assert model.tally.count == 2
    assert Scaled.forward.__doc__ == "The product, bent."
    module, decorate = mlp(), checkpoint(use_reentrant=False, preserve_rng_state=False)
    expected = gradients(module, X)
    assert equal(gradients(module, X, run=decorate(module)), expected)
    fn = Turns(module)
    assert equal(gradients(module, X, run=decorate(lambda x: fn(x))), expected)
    assert fn.calls == 2


def test_decorator_form_obeys_its_options() -> None:
    """What is passed to the decorator holds for each call: here the check that the two runs agree."""
    with pytest.raises(MismatchError, match="have different metadata"):
        checkpoint()(two_shapes().__call__)(vector()).sum().backward()
    checkpoint(determinism_check="none")(two_shapes().__call__)(vector()).sum().backward()


def test_decorator_form_in_a_compiled_function() -> None:
    """Inside `torch.compile(fullgraph=True)` the decorated function is traced, to the plain gradients."""
    module = mlp()
    expected = gradients(module, X)
    region = checkpoint(use_reentrant=False)(lambda x: module(x))
    compiled = torch.compile(lambda x: region(x), fullgraph=True, backend="aot_eager")
    assert equal(gradients(module, X, run=compiled), expected)


# --- options ----------------------------------------------------------------------------------------------------------


SELECTIVE = {
    "list of operations": [aten.addmm.default],
    "policy": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
    ),
}


@pytest.mark.parametrize("policy", SELECTIVE.values(), ids=SELECTIVE.keys())
def test_selective_checkpoint_contexts(policy: Any) -> None:
    """With torch's selective contexts the operations chosen are not run again, and gradients are the plain ones."""
    module = mlp()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    counts: dict[str, Counter[str]] = {}
    results = []
    for name, options in (("all", {}), ("selective", {"context_fn": contexts})):
        with Operations() as seen:
            results.append(gradients(module, X, run=functools.partial(checkpoint, module, **options)))
        counts[name] = seen.counts
    results.append(gradients(module, X))
    assert counts["selective"]["addmm"] == 2
    assert counts["all"]["addmm"] > 2
    assert counts["selective"]["tanh"] == counts["all"]["tanh"] == 2
    assert equal(results[0], results[2])
    assert equal(results[1], results[2])


def users_hooks() -> Any:
    """What torch 2.14's selective contexts take for the hooks of the user, written as torch writes it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = hooks[0]._user_hooks
    return hooks


def test_torch_sees_the_users_hooks_through_ours() -> None:
    """The hooks of regions, saved calls and replays are not taken for hooks of the user."""
    found: list[Any] = []
    mine = (lambda tensor: tensor.clone(), lambda tensor: tensor)

    def fn(x: torch.Tensor) -> torch.Tensor:
        found.append(users_hooks())
        return replay(lambda: found.append(users_hooks()) or x.detach() * 2)() * x.sin()

    nested = recompute(lambda x: no_recompute(fn)(recompute(fn)(x).cos()))
    for around in (None, mine):
        with contextlib.nullcontext() if around is None else torch.autograd.graph.saved_tensors_hooks(*around):
            y = nested(vector())
        assert found == [around] * 4
        found.clear()
        y.sum().backward()  # no hooks are around backward
        assert set(found) == {None}
        found.clear()


AWARE = hasattr(theirs, "_current_user_saved_tensors_hooks")


@pytest.mark.skipif(not AWARE, reason="selective contexts respect hooks from torch 2.14 on")
@pytest.mark.parametrize("respect", [None, False, True])
def test_respect_saved_tensors_hooks(respect: bool | None) -> None:
    """What a policy saves passes through the user's hooks if asked to; unsaid, torch warns."""
    module, packed = mlp(), []
    contexts = functools.partial(create_selective_checkpoint_contexts, SELECTIVE["list of operations"])
    options = {} if respect is None else {"respect_saved_tensors_hooks": respect}
    expected = gradients(module, X)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    def call(function: Any) -> list[torch.Tensor]:
        packed.clear()

        def inner(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return function(module, x, use_reentrant=False, context_fn=contexts, **options)

        return gradients(module, X, run=inner)

    with pytest.warns(FutureWarning) if respect is None else contextlib.nullcontext():
        assert equal(call(checkpoint), expected)
    assert ((4, 8) in packed) is (respect is True)  # the first product; the hooks see the region's input, too
    with pytest.warns(FutureWarning) if respect is None else contextlib.nullcontext():
        assert equal(call(theirs.checkpoint), expected)
    assert ((4, 8) in packed) is (respect is True)


def test_hooks_that_torch_cannot_respect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.14 asking for it is refused where something would be stored past the hooks, and only there."""
    contexts = functools.partial(create_selective_checkpoint_contexts, SELECTIVE["policy"])
    module = mlp()
    expected = gradients(module, X)
    for options in (
        {"respect_saved_tensors_hooks": True},
        {"respect_saved_tensors_hooks": False, "context_fn": contexts},
    ):
        assert equal(gradients(module, X, run=functools.partial(checkpoint, module, **options)), expected)
    monkeypatch.delattr(theirs, "_current_user_saved_tensors_hooks", raising=False)
    with pytest.raises(ArgumentError, match=r"needs torch 2\.14"):
        checkpoint(module, vector(), context_fn=contexts, respect_saved_tensors_hooks=True)


def test_context_fn_is_called_once_per_call() -> None:
    """Its two contexts are entered around the forward and around the replay, each once, without grad too."""
    log: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Any:
        log.append(f"enter {name}")
        yield
        log.append(f"leave {name}")

    def contexts() -> Any:
        log.append("context_fn")
        return noted("forward"), noted("replay")

    def fn(x: torch.Tensor) -> torch.Tensor:
        log.append("run")
        return x.sin().exp()

    y = checkpoint(fn, vector(), context_fn=contexts, early_stop=False)
    assert log == ["context_fn", "enter forward", "run", "leave forward"]
    log.clear()
    y.sum().backward()
    assert log == ["enter replay", "run", "leave replay"]
    log.clear()
    with torch.no_grad():
        checkpoint(fn, vector(), context_fn=contexts)
    assert log == ["context_fn", "run"]


def test_the_forward_context_sees_the_exception() -> None:
    """An exception of the function passes through the forward's context and out of `checkpoint`, unchanged."""
    seen: list[Any] = []

    class Watch(contextlib.AbstractContextManager[None]):
        def __exit__(self, *exception: Any) -> None:
            seen.append(exception[1])

    error = KeyError("key")

    def fn(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(KeyError) as caught:
        checkpoint(fn, vector(), context_fn=lambda: (Watch(), contextlib.nullcontext()))
    assert caught.value is error
    assert seen == [error]


def two_shapes() -> Turns:
    """In the replay it saves tensors of another shape."""
    return Turns(lambda x: (x.sin() * torch.ones(3)).exp(), lambda x: (x.sin() * torch.ones(1)).exp())


class Counted:
    """sin, cos, then a counter, then something that saves nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin().cos()
        self.count += 1
        return x.clone()


@pytest.mark.parametrize(
    ("argument", "ambient", "stops"),
    [
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
        (True, True, True),
        (False, False, False),
    ],
)
def test_early_stop(argument: bool, ambient: bool | None, stops: bool) -> None:
    """The replay ends at the last tensor needed; torch's `set_checkpoint_early_stop` overrules the argument."""
    fn = Counted()
    with contextlib.nullcontext() if ambient is None else set_checkpoint_early_stop(ambient):
        y = checkpoint(fn, vector(), early_stop=argument)
    y.sum().backward()
    assert fn.count == (1 if stops else 2)


def test_early_stop_is_read_in_forward() -> None:
    """What counts is the setting around the forward, not the one around backward; the innermost wins."""
    for around, stops in ((False, False), (True, True)):
        fn = Counted()
        with set_checkpoint_early_stop(not around), set_checkpoint_early_stop(around):
            y = checkpoint(fn, vector())
        with set_checkpoint_early_stop(not around):
            y.sum().backward()
        assert fn.count == (1 if stops else 2)


@pytest.mark.parametrize("preserve", [True, False])
def test_preserve_rng_state(preserve: bool) -> None:
    """With it the replay draws the forward's random numbers and leaves the generator alone; without it, neither."""
    draws: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        draws.append(torch.rand(3))
        return (x.sin() * draws[-1]).exp()

    torch.manual_seed(0)
    y = checkpoint(fn, vector(), preserve_rng_state=preserve)
    before = torch.random.get_rng_state()
    y.sum().backward()
    assert len(draws) == 2
    assert torch.equal(draws[0], draws[1]) is preserve
    assert torch.equal(before, torch.random.get_rng_state()) is preserve


def test_preserve_rng_state_covers_generators_passed() -> None:
    """A `torch.Generator` among the arguments is rewound with it, and goes on without it."""
    for preserve in (True, False):
        draws: list[torch.Tensor] = []

        def fn(x: torch.Tensor, generator: torch.Generator, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
            mask = torch.rand(3, generator=generator)
            note(mask)
            return (x.sin() * mask).exp()

        generator = torch.Generator().manual_seed(5)
        checkpoint(fn, vector(), generator, draws.append, preserve_rng_state=preserve).sum().backward()
        assert torch.equal(draws[0], draws[1]) is preserve


# --- debug ------------------------------------------------------------------------------------------------------------


def diverging() -> Turns:
    """The second operation differs, the number and order of saved tensors does not."""

    def first(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.exp().exp()

    def later(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.sum().exp()

    return Turns(first, later)


def test_debug_shows_the_first_operation_that_differs() -> None:
    """The error names the operation with its shapes in forward and replay, and the line of this file that ran it."""
    with pytest.raises(MismatchError) as caught:
        checkpoint(diverging(), vector(), debug=True).sum().backward()
    text = str(caught.value)
    trace = text[text.index("You are seeing this error because you passed `debug=True` to checkpoint.") :]
    forward, replay = trace.split("  replay (")
    assert "1: aten.exp.default(float32[3]) -> float32[3]" in forward
    assert "1: aten.sum.default(float32[3]) -> float32[]" in replay
    assert "0: aten.sin.default(float32[3]) -> float32[3]" in forward
    assert "0: aten.sin.default(float32[3]) -> float32[3]" in replay
    assert "return y.exp().exp()" in forward
    assert "return y.sum().exp()" in replay
    assert __name__.rpartition(".")[2] + ".py" in forward


@pytest.mark.parametrize(
    ("argument", "ambient", "shown"),
    [(False, True, True), (True, False, False), (True, None, True), (False, None, False)],
)
def test_set_checkpoint_debug_enabled(argument: bool, ambient: bool | None, shown: bool) -> None:
    """PyTorch's `set_checkpoint_debug_enabled` overrules the argument in both directions."""
    with set_checkpoint_debug_enabled(ambient), pytest.raises(MismatchError) as caught:
        checkpoint(diverging(), vector(), debug=argument).sum().backward()
    assert ("debug=True" in str(caught.value)) is shown


def python_calls(function: Callable[[], object]) -> int:
    """How many Python and builtin functions a call enters: its cost, without a clock."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def log_filters() -> int:
    """How many filters and handlers all loggers have."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return sum(len(logger.filters) + len(logger.handlers) for logger in loggers)


def test_debug_costs_the_same_on_every_call() -> None:
    """Call 600 enters as many functions as call 20, adds no log filter and leaves no object behind."""
    x = vector()

    def call() -> None:
        checkpoint(lambda x: x.sin().exp().cos(), x, debug=True).sum().backward()

    for _ in range(19):
        call()
    gc.collect()  # what other tests have left dies now, and not in the middle of a count
    filters, early = log_filters(), python_calls(call)
    objects = len(gc.get_objects())
    for _ in range(579):
        call()
    gc.collect()
    late = python_calls(call)
    assert late == early
    assert log_filters() == filters
    gc.collect()
    assert len(gc.get_objects()) - objects < 100


# --- the graph --------------------------------------------------------------------------------------------------------


def test_checkpoint_is_recompute() -> None:
    """`checkpoint(fn, *args)` and `recompute(fn)(*args)` run the same operations as often."""
    counts = []
    for call in (lambda x: checkpoint(mlp(), x), lambda x: recompute(mlp())(x)):
        with Operations() as seen:
            gradients(call, X)
        counts.append(seen.counts)
    assert counts[0] == counts[1]


# --- checkpoint_sequential --------------------------------------------------------------------------------------------


class CountedLayer(nn.Module):
    """A linear layer that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tally = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally()
        return self.linear(x).tanh()


KINDS = {"nn.Sequential": lambda m: nn.Sequential(*m), "nn.ModuleList": nn.ModuleList, "list": list, "tuple": tuple}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("segments", range(1, 8))
def test_sequential(kind: Any, segments: int) -> None:
    """Segments of equal length are recomputed, all but the last, which takes the remainder; as torch cuts them."""
    runs: list[list[int]] = []
    results: list[list[torch.Tensor]] = []
    for function in (checkpoint_sequential, theirs.checkpoint_sequential):
        torch.manual_seed(0)
        modules = [CountedLayer() for _ in range(7)]
        functions = kind(modules)
        run = functools.partial(function, functions, segments, use_reentrant=False)
        results.append(gradients(nn.ModuleList(modules), X, run=run))
        runs.append([m.tally.count for m in modules])
    assert runs[0] == runs[1]
    assert equal(*results)


def test_sequential_takes_plain_functions_and_pytrees() -> None:
    """Functions need not be modules, and the one input may be a tuple that they take and return."""
    functions = [lambda p: (p[0].sin(), p[1]), lambda p: (p[0] * p[1], p[1].exp()), lambda p: p[0] + p[1]]
    expected = gradients(lambda x: functions[2](functions[1](functions[0]((x, x)))), X)
    assert equal(gradients(lambda x: checkpoint_sequential(functions, 3, (x, x)), X), expected)


# --- everything else that reaches a checkpoint ------------------------------------------------------------------------


def test_python_random_is_not_touched() -> None:
    """Generators that PyTorch does not know are left as they are: they are restored on request only."""
    drawn: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        drawn.append(random.random())
        return x.sin().exp()

    checkpoint(fn, vector()).sum().backward()
    assert drawn[0] != drawn[1]
