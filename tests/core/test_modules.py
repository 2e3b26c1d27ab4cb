"""A region's own modules: which are read, when, what a scan remembers, and the wrappers that a model holds."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_calls
from torch.utils.checkpoint import checkpoint as stock

from laws.watch import on_threads, vector
from support.models import Made
from torch_recompute import ChangedError, doing_recompute, no_recompute, recompute, replay
from torch_recompute.engine import modules as scans
from torch_recompute.engine.modules import Modules, Watching
from torch_recompute.engine.taken import Taking
from torch_recompute.state.tape import thread

HOOKS: dict[Any, Any] = module_calls._global_forward_pre_hooks


def plain(fn: Any) -> Any:
    return fn


def of_torch(fn: Any) -> Any:
    return functools.partial(stock, fn, use_reentrant=False)


# --- which modules are a region's own ---------------------------------------------------------------------------------


class Seen(nn.Module):
    """Says, when it is called, which modules the running region has read by then."""

    read: list[nn.Module] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules = getattr(thread.run, "modules", None)
        if modules is not None:
            Seen.read = [*modules.seen.values()]
        return x.sin().exp()


class Model(nn.Module):
    """Two blocks; the method beside `forward` runs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), Seen())
        self.second = nn.Sequential(nn.Linear(3, 3), Seen())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def turn(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return (self.first, self.second)[number](x)


class Runner:
    """An object of a user, whose method calls a part of a model that it holds."""

    def __init__(self, model: Model) -> None:
        self.model, self.lock = model, threading.Lock()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.first(x)

    __call__ = run


def names_it(model: Model) -> Any:
    """A function that names a model among its globals."""
    scope: dict[str, Any] = {"MODEL": model}
    exec("def fn(x):\n    return MODEL.first(x)", scope)
    return scope["fn"]


def of_list(model: Model) -> Any:
    blocks = [*model.children()]
    return lambda x: blocks[0](x)


ALL = ["", "first", "first.0", "first.1", "second", "second.0", "second.1"]
FIRST = ["first", "first.0", "first.1"]
FORMS: dict[str, tuple[Callable[[Model], Any], list[str]]] = {
    "module": (lambda model: model, ALL),
    "forward": (lambda model: model.forward, ALL),
    "partial of a module": (functools.partial, ALL),
    "method": (lambda model: model.part, ["", *FIRST]),
    "partial of a method": (lambda model: functools.partial(model.turn, 0), ["", *FIRST]),
    "closure that calls it": (lambda model: lambda x: model(x), ALL),
    "closure that calls a block": (lambda model: lambda x: model.first(x), ["", *FIRST]),
    "closure that calls a method": (lambda model: lambda x: model.part(x), ["", *FIRST]),
    "closure over a block": (lambda model: (lambda block: lambda x: block(x))(model.first), FIRST),
    "closure over a list": (of_list, FIRST),
    "function of a function": (lambda model: (lambda inner: lambda x: inner(x))(model.part), ["", *FIRST]),
    "object that is called": (Runner, ["", *FIRST]),
    "method of an object": (lambda model: Runner(model).run, ["", *FIRST]),
    "global": (names_it, ["", *FIRST]),
    "argument": (lambda model: functools.partial(lambda given, x: given.first(x), model), ["", *FIRST]),
}


@pytest.mark.parametrize(("form", "wanted"), FORMS.values(), ids=FORMS.keys())
def test_own_modules(form: Any, wanted: list[str]) -> None:
    """A function that is a module is read with all below it; else what it calls is, and what it holds is read alone."""
    model = Model()
    names = {id(module): name for name, module in model.named_modules()}
    Seen.read = None
    recompute(form(model))(vector()).sum().backward()
    assert Seen.read is not None
    assert sorted(names[id(module)] for module in Seen.read) == wanted


def test_a_module_among_the_arguments_is_read_alone_until_it_is_called() -> None:
    """What is passed is looked at without what is below it, and with that when it is called."""
    model, read = Model(), []

    def fn(x: torch.Tensor, model: Model) -> torch.Tensor:
        modules = thread.run.modules if thread.run is not None else None
        if modules is not None:
            read.append(len(modules.seen))
        y = model.first(x)
        if modules is not None:
            read.append(len(modules.seen))
        return y

    recompute(fn)(vector(), model).sum().backward()
    assert read == [1, 4]


def test_a_region_around_reads_what_a_region_within_it_reads() -> None:
    """The replay of an outer region comes to the modules of an inner one as well: both have read them."""
    model, read = Model(), []

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = recompute(model.first)(x)
        modules = getattr(thread.run, "modules", None)
        if modules is not None:
            read.extend(modules.seen.values())
        return y.sin()

    recompute(outer)(vector()).sum().backward()
    assert {id(module) for module in model.first.modules()} <= {*map(id, read)}


# --- when they are read -----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Reads a number, a list, a buffer and its training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.parts = nn.Linear(3, 3), 1.0, [1.0]
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.linear(x) + self.shift) * self.scale * sum(self.parts)
        return (y if self.training else y.neg()).sin()


SETS: dict[str, Callable[[Scaled, float], Any]] = {
    "attribute": lambda layer, value: setattr(layer, "scale", value),
    "entry": lambda layer, value: layer.parts.__setitem__(0, value),
    "another list": lambda layer, value: setattr(layer, "parts", [value]),
    "another buffer": lambda layer, value: setattr(layer, "shift", torch.full((3,), value)),
    "buffer in place": lambda layer, value: layer.shift.fill_(value),
    "training": lambda layer, value: layer.train(value > 2),
    "another child": lambda layer, value: setattr(layer, "linear", Made(lambda m, x: x * m.by, by=value)),
    "hook": lambda layer, value: layer.register_forward_hook(lambda m, args, out: out * value),
}
HOLDS: dict[str, Callable[[Scaled], Callable[[], Any]]] = {
    "list of a list": lambda layer: (lambda held: lambda: held[0][0])([[layer]]),
    "object": lambda layer: (lambda held: lambda: held.layer)(SimpleNamespace(layer=layer)),
    "parent": lambda layer: (lambda held: lambda: held.layer)(Made(plain, layer=layer)),
}


@pytest.mark.parametrize("change", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_a_called_module_is_read_when_it_is_first_called(change: Any, hold: Any) -> None:
    """What a region's function sets before it calls a module is found by the replay, and is there once afterwards."""
    found = []
    for wrap in (recompute, plain):
        torch.manual_seed(0)
        layer = Scaled()
        get, x = hold(layer), vector()

        def block(x: torch.Tensor, value: float, get: Callable[[], Any] = get) -> torch.Tensor:
            change(get(), value)
            return get()(x)

        call = wrap(block)
        call(call(x, 2.0), 3.0).sum().backward()
        found.append([x.grad, layer.shift.clone(), layer.scale, layer.parts, layer.training, len(layer._forward_hooks)])
    (gradient, shift, *rest), (wanted, other, *more) = found
    assert torch.equal(gradient, wanted)
    assert torch.equal(shift, other)
    assert rest == more


class Counts(nn.Module):
    """Counts its calls in a buffer, as BatchNorm does, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count.add_(1)
        return x.sin().exp()


@pytest.mark.parametrize(("by_name", "times"), [(False, 1), (True, 2)], ids=["called", "forward by name"])
def test_a_forward_that_is_called_by_its_name(by_name: bool, times: int) -> None:
    """A module below a held one counts once where it is called; by `.forward()` twice, as under torch's checkpoint."""

    def step(wrap: Any) -> tuple[int, float]:
        layer = Counts()
        held = Made(plain, layer=layer)
        run = (lambda x: held.layer.forward(x)) if by_name else (lambda x: held.layer(x))
        wrap(run)(vector()).sum().backward()
        return layer.calls, layer.count.item()

    assert step(recompute) == (times, times)
    assert step(of_torch) == (2, 2)


class Counter(nn.Module):
    """Counts its calls in place in a tensor, and reads it: a buffer, an attribute, or an entry of a list."""

    def __init__(self, kind: str, size: int = 3, training: bool = True) -> None:
        super().__init__()
        count = torch.ones(size)
        if kind == "buffer":
            self.register_buffer("count", count)
        self.kind, self.held = kind, count if kind == "attribute" else [count] if kind == "list" else None
        self.train(training)

    def counted(self) -> torch.Tensor:
        held: Any = self.count if self.kind == "buffer" else self.held
        return held[0] if self.kind == "list" else held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.counted()
        with torch.no_grad():
            count.add_(1)
        return (x * count[:3].clone()).sin().exp()


COUNTERS: dict[str, Callable[[], Counter]] = {
    "buffer": lambda: Counter("buffer"),
    "large buffer": lambda: Counter("buffer", 20_000),
    "buffer in evaluation": lambda: Counter("buffer", training=False),
    "attribute": lambda: Counter("attribute"),
    "list": lambda: Counter("list"),
}


@pytest.mark.parametrize("make", COUNTERS.values(), ids=COUNTERS.keys())
@pytest.mark.parametrize("called", [False, True])
def test_each_replay_begins_where_the_forward_did(make: Callable[[], Counter], called: bool) -> None:
    """However often a retained graph is read, replays find the tensors of a module with the forward's values."""
    module, x = make(), vector()
    (wanted,) = torch.autograd.grad((x * torch.full((3,), 2.0)).sin().exp().sum(), x)
    loss = recompute((lambda x: module(x)) if called else module)(x).sum()
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
        assert module.counted().unique().tolist() == [2.0]


class Read(nn.Module):
    """Reads weights and buffers of which autograd saves none."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("large", torch.ones(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self
        return (x + held.trained + held.frozen + held.mean + held.large[:3]).sin().exp()


class Parent(nn.Module):
    """Runs a child by a method of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


READERS: dict[str, Callable[[Read], Any]] = {
    "module": lambda layer: layer,
    "forward": lambda layer: layer.forward,
    "closure": lambda layer: lambda x: layer(x),
    "parent": lambda layer: nn.Sequential(layer),
    "method of a parent": lambda layer: Parent(layer).run,
}


@pytest.mark.parametrize("form", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["trained", "frozen", "mean", "large"])
def test_what_a_module_reads_is_changed_before_backward(form: Any, training: bool, name: str) -> None:
    """A weight, frozen or not, is named in an error, and so is a buffer; a small one in training is put back."""
    layer, x, y = Read().train(training), vector(), vector()
    form(layer)(y).sum().backward()
    loss = recompute(form(layer))(x).sum()
    with torch.no_grad():
        getattr(layer, name).add_(1)
    if name == "mean" and training:
        loss.backward()
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(layer.mean, torch.full((3,), 2.0))
    else:
        with pytest.raises(ChangedError, match=f"'{name}' of Read, which .* has been changed in place"):
            loss.backward()


# --- the hook of all modules ------------------------------------------------------------------------------------------


def test_the_hook_is_there_while_a_region_runs() -> None:
    """In forward and replay of a region whose function may call modules; before, between and after there is none."""
    layer, there = nn.Linear(3, 3), []

    def fn(x: torch.Tensor) -> torch.Tensor:
        there.append(len(HOOKS))
        return layer(x).sin().exp()

    before = dict(HOOKS)
    y = recompute(fn)(vector())
    assert before == HOOKS
    y.sum().backward()
    assert before == HOOKS
    assert there == [len(before) + 1] * 2


def fails(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("in the region")


LEFT_BY: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "its end": lambda layer: recompute(lambda x: layer(x)),
    "an exception": lambda layer: recompute(lambda x: fails(layer(x))),
    "an exception in a nested one": lambda layer: recompute(lambda x: recompute(lambda x: fails(layer(x)))(layer(x))),
    "a nested one": lambda layer: recompute(lambda x: recompute(lambda x: layer(x))(x)),
    "twice": lambda layer: recompute(recompute(lambda x: layer(x))),
    "a module": recompute,
}


@pytest.mark.parametrize("make", LEFT_BY.values(), ids=LEFT_BY.keys())
def test_no_hook_is_left(make: Any) -> None:
    """However regions end, in forward or replay, no hook of all modules is left, and nothing watches."""
    layer = nn.Linear(3, 3)
    with contextlib.suppress(KeyError):
        make(layer)(vector()).sin().sum().backward()
    assert not HOOKS
    assert (scans._watching, thread.modules) == (0, None)


def test_no_hook_is_left_by_a_failing_replay() -> None:
    """A replay that raises leaves no hook."""
    layer, runs = nn.Linear(3, 3), []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(HOOKS))
        return layer(x if len(runs) == 1 else fails(x)).sin().exp()

    y = recompute(fn)(vector())
    with pytest.raises(KeyError):
        y.sum().backward()
    assert runs == [1, 1]
    assert not HOOKS
    assert (scans._watching, thread.modules) == (0, None)


def test_watching_nests() -> None:
    """The inner block's modules take the calls, then the outer one's again; the hook goes with the outer block."""
    layers = [nn.Identity() for _ in range(3)]
    outer, inner = (Modules(Taking("block", None), None) for _ in range(2))
    with Watching(outer):
        layers[0](1)
        with pytest.raises(KeyError), Watching(inner):
            layers[1](1)
            raise KeyError
        assert HOOKS
        layers[2](1)
    assert not HOOKS
    layers[1](1)
    assert ([*outer.seen.values()], [*inner.seen.values()]) == ([layers[0], layers[2]], [layers[1]])


def test_calls_on_other_threads_are_not_a_regions() -> None:
    """While regions run on two threads, each has the modules that its own thread calls, and a third none of both."""
    layers, gate = [nn.Identity() for _ in range(3)], threading.Barrier(3, timeout=20)

    def run(number: int) -> list[nn.Module]:
        modules = Modules(Taking("block", None), None)
        if number == 2:
            gate.wait()
            layers[number](1)
            gate.wait()
            return [*modules.seen.values()]
        with Watching(modules):
            gate.wait()
            layers[number](1)
            gate.wait()
        return [*modules.seen.values()]

    assert on_threads(run, 0, 1, 2) == [[layers[0]], [layers[1]], []]
    assert not HOOKS


def test_a_replay_leaves_the_generator_to_a_forward_on_another_thread() -> None:
    """A forward that draws while another thread replays has its own numbers, and each replay those of its forward."""
    noises: dict[str, list[torch.Tensor]] = {"replays": [], "goes forward": []}
    ready, entered, inside, done = (threading.Event() for _ in range(4))

    def first(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            inside.set()
            done.wait(20)
        noises["replays"].append(torch.rand(3))
        return (x * noises["replays"][-1]).sin().exp()

    def second(x: torch.Tensor) -> torch.Tensor:
        if not doing_recompute():
            entered.set()
            inside.wait(20)
        noises["goes forward"].append(torch.rand(3))
        return (x * noises["goes forward"][-1]).sin().exp()

    def run(role: str) -> None:
        if role == "replays":
            loss = recompute(first)(vector()).sum()
            ready.set()
            entered.wait(20)
            loss.backward()
        else:
            ready.wait(20)
            recompute(lambda x: (x * torch.rand(3)).sin())(vector())
            loss = recompute(second)(vector()).sum()
            done.set()
            loss.backward()

    on_threads(run, *noises)
    for then, now in noises.values():
        assert torch.equal(then, now)


# --- modules are scanned once -----------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a child, and an attribute that may become a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return (x if self.cache is None else x + self.cache).sin()


CHANGES: list[Callable[[Holder], Any]] = [
    lambda holder: setattr(holder, "more", nn.Linear(3, 3)),
    lambda holder: holder.child.add_module("inner", nn.Linear(3, 3)),
    lambda holder: holder._modules.update(child=nn.Linear(3, 3)),
    lambda holder: delattr(holder, "child"),
    lambda holder: setattr(holder, "cache", torch.ones(3)),
    lambda holder: setattr(holder, "table", torch.ones(3)),
    lambda holder: holder.register_parameter("scale", nn.Parameter(torch.ones(3))),
    lambda holder: holder.child._parameters.update(bias=nn.Parameter(torch.ones(3))),
]


def read(root: nn.Module) -> Modules:
    """What a region reads of a module with all below it."""
    modules = Modules(Taking("block", None), None)
    modules.add(root)
    return modules


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_what_a_module_holds_is_seen_after_a_change(change: Callable[[Holder], Any]) -> None:
    """Modules and weights are those of the moment, whatever an earlier scan of the module found."""
    holder = Holder()
    read(holder)
    change(holder)
    found = read(holder)
    assert list(map(id, found.seen.values())) == list(map(id, holder.modules()))
    assert {*map(id, found.weights)} == {*map(id, holder.parameters())}


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_what_a_module_held_is_in_the_replay(change: Callable[[Holder], Any]) -> None:
    """Another child, weight or attribute than an earlier call found is read in the forward, and found by its replay."""
    found = []
    for wrap in (recompute, plain):
        torch.manual_seed(0)
        holder, x = Holder(), vector()
        call = wrap(holder)
        first = call(x)
        change(holder)
        second = call(x)
        holder.cache = torch.full((3,), 5.0)
        (first.sum() + second.sum()).backward()
        found.append([x.grad, *(p.grad for p in holder.parameters() if p.grad is not None)])
        assert torch.equal(holder.cache, torch.full((3,), 5.0))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("below", [True, False], ids=["with all below it", "alone"])
def test_a_scan_keeps_no_module(below: bool) -> None:
    """A module that was scanned is freed, also one whose child refers to it, and what is known of it with it."""
    holder = Holder()
    holder.child.parent = [holder]  # pyright: ignore[reportAttributeAccessIssue]
    Modules(Taking("block", None), None).add(holder, below)
    key, known = id(holder), scans._trees if below else scans._single
    gone = weakref.ref(holder), weakref.ref(holder.child)
    assert key in known
    del holder
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert key not in known


# --- wrappers that a model holds --------------------------------------------------------------------------------------


class Wrapping(nn.Module):
    """Holds a region of one layer, one of a method, a saved call and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.region, self.of_method = recompute(self.first, name="first"), recompute(self.part)
        self.kept, self.chosen = no_recompute(self.second), replay(self.choose)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        return x > self.first.bias

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(self.region(x).sin() * self.of_method(x)).tanh() * self.chosen(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recompute(self.both)(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_model_has_wrappers_of_its_own(copied: Callable[[Wrapping], Wrapping]) -> None:
    """What a model has wrapped in its constructor runs the copy's layers in a copy, and trains those alone."""
    model, x = Wrapping(), torch.randn(2, 3)
    twin = copied(model)
    with torch.no_grad():
        twin.first.weight.add_(1)
    expected = twin.second(twin.first(x).sin() * twin.first(x)).tanh() * (x > twin.first.bias)
    result = twin(x)
    assert torch.equal(result, expected)
    found = torch.autograd.grad(result.sum(), twin.parameters())
    assert all(map(torch.equal, found, torch.autograd.grad(expected.sum(), twin.parameters())))


@pytest.mark.parametrize(
    ("wrap", "said"),
    [(recompute, "parameter 'weight' of Linear"), (no_recompute, "modified by an inplace operation")],
    ids=["region", "saved call"],
)
def test_the_layer_of_a_wrapper_is_watched(wrap: Any, said: str) -> None:
    """A region that calls another wrapper sees a change of the layer in that; the weight of a region's has a name."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    inner = wrap(layer)
    result = recompute(lambda x: inner(x.sin()).cos().exp())(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(ChangedError, match=said):
        result.sum().backward()


def attributed() -> nn.Module:
    """Has tensors that are neither parameters nor buffers."""
    parts = {"weight": nn.Parameter(torch.ones(3)), "scale": torch.ones(3)}
    return Made(lambda m, x: (x * m.weight).sin().exp() * m.scale, **parts)


@pytest.mark.parametrize("wrap", [recompute, lambda m: recompute(lambda x: m(x))], ids=["module", "closure"])
def test_a_plain_attribute_changed_before_backward(wrap: Any) -> None:
    """A tensor that a module holds without registering it, changed before backward: the plain gradient or an error."""
    module, other = attributed(), attributed()
    x, y = vector(), vector()
    other(y).sum().backward()
    loss = wrap(module)(x).sum()
    module.scale.add_(1)
    try:
        loss.backward()
    except ChangedError:
        return
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(module.scale, torch.full((3,), 2.0))


class Gathers(nn.Module):
    """Takes the place of a wrapper of torch.distributed, which lends the module below what it has gathered."""

    __module__ = "torch.distributed.fsdp._fully_shard._fully_shard"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self.inner._parameters
        own, parameters["weight"] = parameters["weight"], self.inner.weight * 1.0
        try:
            return self.inner(x).tanh()
        finally:
            parameters["weight"] = own


@pytest.mark.parametrize("wrapped", ["the module", "a function", "a module around it"])
@pytest.mark.parametrize("lent", [False, True])
def test_what_a_wrapper_lends_to_its_modules_is_its_own(wrapped: str, lent: bool) -> None:
    """Entries that a wrapper of torch.distributed looks after are forgotten, also those that are no parameters."""
    ways: dict[str, Any] = {
        "the module": recompute,
        "a function": lambda module: recompute(lambda x: module(x)),
        "a module around it": lambda module: recompute(nn.Sequential(module)),
    }

    def gradients(way: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module, x = Gathers(), torch.randn(2, 4, requires_grad=True)
        outside = torch.randn(4, 4, requires_grad=True)
        leaves = [x, outside, *module.parameters()]
        if lent:  # throughout the step
            module.inner._parameters["weight"] = outside * 2
        way(module)(x).sum().backward()
        return [leaf.grad for leaf in leaves]

    for plain, found in zip(gradients(lambda module: module), gradients(ways[wrapped]), strict=True):
        assert (plain is None and found is None) or torch.equal(plain, found)
