"""The closure scan: tensors, modules and generators that a function reaches, and the function over fresh cells."""

import copy
import functools
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laws.watch import vector
from support.models import Made
from torch_recompute import ChangedError, no_recompute, recompute, replay
from torch_recompute.engine import captures
from torch_recompute.engine.captures import reach, rebuild

MODULE = nn.Linear(3, 3)
TENSOR = torch.full((3,), 2.0)
SOURCE = torch.Generator()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def uses_global_module(x: torch.Tensor) -> torch.Tensor:
    return MODULE(x)


def uses_global_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * TENSOR


def uses_global_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(3, generator=SOURCE)


def uses_globals_in_an_inner_function(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return MODULE(x) * TENSOR

    return inner()


class Model(nn.Module):
    """Two linear layers; the method beside `forward` uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class Plain:
    """A plain object with a module, a tensor and a generator; some deeper than the first level."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 3)
        self.tensor = torch.ones(3)
        self.source = torch.Generator()
        self.deeper = type("Deeper", (), {})()
        self.deeper.hidden = nn.Linear(3, 3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.tensor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def over(**contents: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function with one closure cell."""
    (thing,) = contents.values()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x if thing is None else x * 1

    return fn


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [plain, torch.sin, torch.Tensor.sin, len, int, lambda x: x])
def test_where_nothing_is_reached(fn: Any) -> None:
    """A builtin, a class, and a function without closure or state in its globals reach nothing."""
    assert reach(fn) is None


MODEL, OBJECT, OTHER = Model(), Plain(), nn.Linear(3, 3)
SELF = list(MODEL.modules())

MODULES: dict[str, tuple[Any, list[nn.Module]]] = {
    "module": (MODEL, SELF),
    "forward": (MODEL.forward, SELF),
    "method": (MODEL.part, SELF),
    "closure": (over(model=MODEL), SELF),
    "closure over a method": (over(method=MODEL.part), SELF),
    "closure over a function over it": (over(inner=over(model=MODEL)), SELF),
    "closure over a list": (over(models=[OTHER, MODEL.first]), [OTHER, MODEL.first]),
    "closure over a tuple": (over(models=(OTHER,)), [OTHER]),
    "closure over a dict": (over(models={"a": OTHER}), [OTHER]),
    "closure over a partial": (over(call=functools.partial(MODEL.part)), SELF),
    "module list": (over(models=nn.ModuleList([OTHER])), [OTHER]),
    "partial of a module": (functools.partial(MODEL), SELF),
    "module in a partial": (functools.partial(plain, OTHER), [OTHER]),
    "keyword of a partial": (functools.partial(plain, module=OTHER), [OTHER]),
    "global": (uses_global_module, [MODULE]),
    "global of an inner function": (uses_globals_in_an_inner_function, [MODULE]),
    "object that is called": (OBJECT, [OBJECT.module]),
    "method of an object": (OBJECT.method, [OBJECT.module]),
}


@pytest.mark.parametrize(("fn", "wanted"), MODULES.values(), ids=MODULES.keys())
def test_modules_are_found(fn: Any, wanted: list[nn.Module]) -> None:
    """A module is found wherever Python shows it, with its submodules, each once."""
    found = reach(fn)
    assert found is not None
    ids = [id(module) for module in found.modules]
    assert len(set(ids)) == len(ids)
    assert {id(module) for module in wanted} <= set(ids)


def test_modules_that_are_passed_are_reached() -> None:
    """A module among the arguments counts, although the function reaches nothing itself."""
    found = reach(plain, [MODEL])
    assert found is not None
    assert found.modules == SELF


TENSORS: dict[str, tuple[Any, torch.Tensor, str]] = {
    "closure": (over(scale=TENSOR), TENSOR, "closure variable 'thing'"),
    "closure over a list": (over(scales=[TENSOR]), TENSOR, "closure variable 'thing'"),
    "global": (uses_global_tensor, TENSOR, "global 'TENSOR'"),
    "partial": (functools.partial(torch.mul, TENSOR), TENSOR, "argument 0 of a partial"),
    "attribute": (OBJECT, OBJECT.tensor, "attribute 'tensor'"),
}


@pytest.mark.parametrize(("fn", "tensor", "name"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_are_found_and_named(fn: Any, tensor: torch.Tensor, name: str) -> None:
    """A tensor that may change is found with words that say where."""
    found = reach(fn)
    assert found is not None
    assert any(
        seen.tensor is tensor and seen.label() == name for seen in found.beside_parameters(grad=False, cells=True)
    )


@pytest.mark.parametrize(
    ("fn", "source"),
    [
        (uses_global_generator, SOURCE),
        (over(source=SOURCE), SOURCE),
        (over(sources=[SOURCE]), SOURCE),
        (functools.partial(plain, generator=SOURCE), SOURCE),
        (OBJECT, OBJECT.source),
    ],
    ids=["global", "closure", "list", "partial", "attribute"],
)
def test_generators_are_found(fn: Any, source: torch.Generator) -> None:
    """A generator in a global, closure, partial or attribute is found."""
    found = reach(fn)
    assert found is not None
    assert any(generator is source for generator in found.generators)


def test_what_cannot_be_seen() -> None:
    """The documented limits: attributes below the first level, and globals used by functions that are called."""
    found = reach(OBJECT)
    assert found is not None
    assert all(module is not OBJECT.deeper.hidden for module in found.modules)
    assert reach(calls_a_function_with_a_global) is None


def reads_an_attribute_of_that_name(x: torch.Tensor, held: Any) -> torch.Tensor:
    return x * held.TENSOR


def test_an_attribute_is_no_global_of_its_name() -> None:
    """What a function reads of an argument is not looked up among the globals."""
    assert reach(reads_an_attribute_of_that_name) is None


def calls_a_function_with_a_global(x: torch.Tensor) -> torch.Tensor:
    return uses_global_module(x)


def test_looking_calls_no_user_code() -> None:
    """Properties, `__getattr__` and `__eq__` of what is reached are never called."""

    class Touchy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        @property
        def value(self) -> Any:
            raise AssertionError("asked for value")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

        def __bool__(self) -> bool:
            raise AssertionError("asked for truth")

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.held(x)

    touchy = Touchy()
    touchy.held = MODEL  # type: ignore[attr-defined]
    for fn in (touchy, touchy.__call__):
        found = reach(fn)
        assert found is not None
        assert found.modules == SELF
    for fn in (over(thing=touchy), functools.partial(plain, touchy)):
        found = reach(fn)
        assert found is None or not found.modules


def test_containers_that_hold_themselves() -> None:
    """A list that holds itself, and functions that hold each other, do not hang the search."""
    loop: list[Any] = [MODEL]
    loop.append(loop)
    assert reach(over(loop=loop)) is not None

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    found = reach(even)
    assert found is not None
    assert rebuild(found.template, found.tensors)(10) is True


# --- made again -------------------------------------------------------------------------------------------------------


def test_the_function_comes_back() -> None:
    """Code, name, defaults, keyword defaults, attributes and cells are those of the original."""
    scale, offset = torch.tensor(2.0), 3

    def fn(x: torch.Tensor, power: int = 2, *, extra: int = 1) -> torch.Tensor:
        return x**power * scale + offset + extra

    fn.note = "kept"  # type: ignore[attr-defined]
    found = reach(fn)
    assert found is not None
    again = rebuild(found.template, found.tensors)
    x = torch.ones(3) * 3
    assert torch.equal(again(x), fn(x))
    assert torch.equal(again(x, 3, extra=5), fn(x, 3, extra=5))
    assert again.__name__ == "fn"
    assert again.__dict__ == {"note": "kept"}


def test_a_function_that_comes_back_has_its_names() -> None:
    """A wrapper rebuilt for a replay is called what it was, so that a saved call of it is found again."""
    weight = torch.ones(3, requires_grad=True)
    inner = recompute(lambda x: (x * weight).exp())
    outer = recompute(lambda x: no_recompute(inner)(x.sin()).cos())
    found = reach(outer)
    assert found is not None
    assert rebuild(found.template, found.tensors).__qualname__ == outer.__qualname__
    outer(vector()).sum().backward()


def test_tensors_in_cells_can_be_replaced() -> None:
    """Other tensors put in the places of the old ones are what the function then computes with, at any depth."""
    a, b = torch.tensor(2.0), torch.tensor(3.0)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * b

    def fn(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * a

    found = reach(fn)
    assert found is not None
    assert {id(t) for t in found.tensors} == {id(a), id(b)}
    doubled = rebuild(found.template, [t * 2 for t in found.tensors])
    assert float(doubled(torch.tensor(1.0))) == 24
    assert float(fn(torch.tensor(1.0))) == 6


def test_the_function_is_not_kept_alive() -> None:
    """What is held of a closure is not the function, which would hold the tensors in its cells."""

    def make() -> tuple[weakref.ref[Any], weakref.ref[Any], Any]:
        scale = torch.ones(3)

        def fn(x: torch.Tensor) -> torch.Tensor:
            return x * scale

        return weakref.ref(fn), weakref.ref(scale), reach(fn)

    function, tensor, found = make()
    assert function() is None
    assert tensor() is found.tensors[0]
    found.tensors.clear()
    assert tensor() is None


class Negated(functools.partial[torch.Tensor]):
    """A partial that does something of its own."""

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return -super().__call__(*args)


@pytest.mark.parametrize(("kind", "sign"), [(functools.partial, 1), (Negated, -1)])
def test_partials_come_back(kind: Any, sign: int) -> None:
    """A partial of a closure is made again around the closure made again, and is of the class that it was."""
    scale = torch.tensor(2.0)

    def fn(x: torch.Tensor, power: int, *, offset: int) -> torch.Tensor:
        return x**power * scale + offset

    found = reach(kind(fn, power=3, offset=1))
    assert found is not None
    again = rebuild(found.template, [torch.tensor(10.0)])
    assert float(again(torch.tensor(2.0))) == sign * 81


# --- regions over closures --------------------------------------------------------------------------------------------


def test_the_callers_cells_are_not_written() -> None:
    """A replay leaves the caller's variables, functions and their attributes as they are."""
    layer = nn.Linear(3, 3)
    scale = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (layer(x) * scale).sin().exp()

    before = [cell.cell_contents for cell in fn.__closure__ or ()]
    recompute(fn)(vector()).sum().backward()
    assert all(a is b for a, b in zip(before, [c.cell_contents for c in fn.__closure__ or ()], strict=True))


def test_a_tensor_with_grad_in_a_closure_gets_its_gradient() -> None:
    """A leaf or a result of other operations that is reached by closure is differentiated like an argument."""
    results = []
    for wrap in (recompute, lambda fn: fn):
        x, leaf, source = vector(), vector(), vector()
        scale = source * 2

        def fn(x: torch.Tensor, leaf: torch.Tensor = leaf) -> torch.Tensor:
            return (x * scale * leaf).sin().exp()  # noqa: B023 - called within its turn

        def over_leaf(x: torch.Tensor) -> torch.Tensor:
            return (x * leaf).cos().exp()  # noqa: B023 - called within its turn

        wrap(over_leaf)(wrap(fn)(x)).sum().backward()
        results.append((x.grad, leaf.grad, source.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["closure", "global", "list", "attribute"])
def test_a_reached_tensor_changed_before_backward_is_an_error(kind: str) -> None:
    """A weight reached by the function and changed in place before backward is named in an error."""
    weight = torch.ones(3, requires_grad=True)
    holder = Plain()
    holder.tensor = weight
    listed = [weight]
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "closure": lambda x: (x * weight).sin().exp(),
        "global": uses_global_weight,
        "list": lambda x: (x * listed[0]).sin().exp(),
        "attribute": holder,
    }
    target = WEIGHT if kind == "global" else weight
    y = recompute(calls[kind])(vector())
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(ChangedError, match="has been changed in place since the forward"):
        y.exp().sum().backward()


def attributed() -> nn.Module:
    """Has tensors that are neither parameters nor buffers."""
    parts = {"weight": nn.Parameter(torch.ones(3)), "scale": torch.ones(3)}
    return Made(lambda m, x: (x * m.weight).sin().exp() * m.scale, **parts)


@pytest.mark.parametrize("wrap", [recompute, lambda m: recompute(lambda x: m(x))], ids=["module", "closure"])
def test_a_plain_attribute_changed_before_backward(wrap: Any) -> None:
    """A tensor that a module holds without registering it, changed before backward: the plain gradient or an error."""
    plain, module = attributed(), attributed()
    x, y = vector(), vector()
    plain(y).sum().backward()
    loss = wrap(module)(x).sum()
    module.scale.add_(1)
    try:
        loss.backward()
    except ChangedError:
        return
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(module.scale, torch.full((3,), 2.0))


WEIGHT = torch.ones(3, requires_grad=True)


def uses_global_weight(x: torch.Tensor) -> torch.Tensor:
    return (x * WEIGHT).sin().exp()


# --- modules are scanned once -----------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a child, and an attribute that may become a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.cache: torch.Tensor | None = None


def deeper(holder: Holder) -> None:
    holder.child.add_module("inner", nn.Linear(2, 2))


def replaced(holder: Holder) -> None:
    holder._modules["child"] = nn.Linear(2, 2)


CHANGES: list[Callable[[Holder], None]] = [
    lambda holder: setattr(holder, "more", nn.Linear(2, 2)),
    deeper,
    replaced,
    lambda holder: delattr(holder, "child"),
    lambda holder: setattr(holder, "cache", torch.ones(2)),
    lambda holder: setattr(holder, "table", torch.ones(2)),
    lambda holder: holder.register_parameter("scale", nn.Parameter(torch.ones(2))),
    lambda holder: holder.child._parameters.update(bias=nn.Parameter(torch.ones(2))),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_what_a_module_reaches_is_seen_after_a_change(change: Callable[[Holder], None]) -> None:
    """Modules, parameters and plain tensors are those of the moment, whatever an earlier scan of the module found."""
    holder = Holder()
    reach(holder)
    change(holder)
    found = reach(holder)
    assert found is not None
    assert list(map(id, found.modules)) == list(map(id, holder.modules()))
    assert {id(seen.tensor) for seen in found.parameters(True)} == set(map(id, holder.parameters()))
    plain = {id(value) for value in vars(holder).values() if type(value) is torch.Tensor}
    assert {id(seen.tensor) for seen in found.beside_parameters(grad=False, cells=True)} == plain


def test_a_scan_keeps_no_module() -> None:
    """A module that was scanned is freed, also one whose child refers to it."""
    holder = Holder()
    holder.child.parent = [holder]  # pyright: ignore[reportAttributeAccessIssue]
    reach(holder)
    key, gone = id(holder), weakref.ref(holder)
    assert key in captures._scans
    del holder
    gc.collect()
    assert gone() is None
    assert key not in captures._scans


# --- wrappers that a model holds ---


class Wrapping(Model):
    """Holds a region of one layer, one of a method, a saved call and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.of_method = recompute(self.first, name="first"), recompute(self.part)
        self.kept, self.chosen = no_recompute(self.second), replay(self.choose)

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


def test_the_layer_of_a_wrapper_is_watched() -> None:
    """A region that calls another wrapper sees a change of the layer in that."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    inner = no_recompute(layer)
    result = recompute(lambda x: inner(x.sin()).cos())(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(ChangedError, match="weight"):
        result.sum().backward()


def of_inference(*size: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.linspace(0, 1, math.prod(size)).view(*size)


MADE_IN_INFERENCE = of_inference(3, 3)


class Holds(nn.Module):
    """Reads a buffer and an attribute that were made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = of_inference(3, 3)
        self.register_buffer("scores", of_inference(3, 3))
        self.register_buffer("large", of_inference(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.attribute + self.scores + self.large.sum()).sin()


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(lambda x, made: (x + made).sin())(x, of_inference(3, 3)),
        lambda f, x: (lambda made: f(lambda x: (x + made).sin())(x))(of_inference(3, 3)),
        lambda f, x: f(lambda x: (x + MADE_IN_INFERENCE).sin())(x),
        lambda f, x: f(Holds())(x),
        lambda f, x: f(lambda x: no_recompute(lambda x: (x + MADE_IN_INFERENCE).sin())(x).exp())(x),
    ],
    ids=["argument", "closure", "global", "module", "saved call"],
)
def test_tensors_made_in_inference_mode_may_be_read(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """What has no version, and is not saved for backward, is read in forward and replay as it is."""
    x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    found, expected = (torch.autograd.grad(call(f, x).sum(), x) for f in (recompute, lambda fn: fn))
    assert torch.equal(*found, *expected)
