"""What a function reaches, whole models with it: modules, generators, and tensors that belong to no module."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torch_recompute.memory.reach import Reach, put_back

MODULE = nn.Linear(3, 3)
TENSOR = torch.full((3,), 2.0)
WEIGHT = torch.ones(3, requires_grad=True)
SOURCE = torch.Generator()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def uses_global_module(x: torch.Tensor) -> torch.Tensor:
    return MODULE(x)


def uses_global_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * TENSOR


def uses_global_weight(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def uses_global_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(3, generator=SOURCE)


def uses_globals_in_an_inner_function(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        return MODULE(x) * TENSOR

    return inner()


def calls_a_function_with_a_global(x: torch.Tensor) -> torch.Tensor:
    return uses_global_module(x)


def reads_an_attribute_of_that_name(x: torch.Tensor, held: Any) -> torch.Tensor:
    return x * held.TENSOR


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
        self.deeper = SimpleNamespace(hidden=nn.Linear(3, 3))

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


def with_a_default(thing: Any) -> Callable[..., Any]:
    def fn(x: torch.Tensor, held: Any = thing) -> Any:
        return x, held

    return fn


def with_a_keyword_default(thing: Any) -> Callable[..., Any]:
    def fn(x: torch.Tensor, *, held: Any = thing) -> Any:
        return x, held

    return fn


def tensors_of(reach: Reach) -> list[torch.Tensor]:
    """All that it has found, parameters too."""
    return [found.tensor for found in (*reach.parameters(), *reach.beside_parameters(grad=False))]


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [plain, torch.sin, torch.Tensor.sin, len, int, lambda x: x])
def test_where_nothing_is_reached(fn: Any) -> None:
    """A builtin, a class, and a function without closure or state in its globals reach nothing."""
    reach = Reach(fn)
    assert (reach.modules, reach.generators, tensors_of(reach)) == ([], [], [])


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
    "default": (with_a_default(OTHER), [OTHER]),
    "default of a keyword": (with_a_keyword_default([OTHER]), [OTHER]),
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
    """A module is found wherever Python shows it, with its submodules, each once, and no other module is."""
    found = [module for module in Reach(fn).modules if not isinstance(module, nn.ModuleList)]
    assert sorted(map(id, found)) == sorted(map(id, wanted))


def test_modules_that_are_passed_are_reached() -> None:
    """A module among the arguments counts, although the function reaches nothing itself, and counts once."""
    assert Reach(plain, [MODEL, MODEL.first]).modules == SELF


TENSORS: dict[str, tuple[Any, torch.Tensor, str]] = {
    "closure": (over(scale=TENSOR), TENSOR, "closure variable 'thing'"),
    "closure over a list": (over(scales=[TENSOR]), TENSOR, "closure variable 'thing'"),
    "closure over a dict in a tuple": (over(scales=({"a": TENSOR},)), TENSOR, "closure variable 'thing'"),
    "closure over a function over it": (over(inner=over(scale=TENSOR)), TENSOR, "closure variable 'thing'"),
    "default": (with_a_default(TENSOR), TENSOR, "a default of fn"),
    "global": (uses_global_tensor, TENSOR, "global 'TENSOR'"),
    "partial": (functools.partial(torch.mul, TENSOR), TENSOR, "argument 0 of a partial"),
    "attribute": (OBJECT, OBJECT.tensor, "attribute 'tensor'"),
}


@pytest.mark.parametrize(("fn", "tensor", "name"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors_are_found_and_named(fn: Any, tensor: torch.Tensor, name: str) -> None:
    """A tensor that belongs to no module is found once, with words that say where."""
    found = [one for one in Reach(fn).beside_parameters(grad=False) if one.tensor is tensor]
    assert [one.label() for one in found] == [name]


class Holds(nn.Module):
    """Holds a tensor in each way in which a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("shift", torch.ones(3, requires_grad=True))
        self.register_buffer("nothing", None)
        self.plain = torch.ones(3)
        self.trained = torch.ones(3, requires_grad=True)
        self.listed = [torch.ones(3), self.weight]
        self.config = SimpleNamespace(table=torch.ones(3))


def test_tensors_of_a_module_are_told_apart() -> None:
    """Each tensor of a module is a parameter, or a buffer, or beside both, and requires grad or does not."""
    module = Holds()
    reach = Reach(module)
    trained = {one.label(): one.tensor for one in reach.parameters()}
    others = {one.label(): one.tensor for one in reach.beside_parameters(grad=False)}
    held: Any = module
    assert trained == {
        "parameter 'weight' of Holds": held.weight,
        "buffer 'shift' of Holds": held.shift,
        "attribute 'trained' of Holds": held.trained,
    }
    assert others == {
        "buffer 'mean' of Holds": held.mean,
        "attribute 'plain' of Holds": held.plain,
        "attribute 'listed' of Holds": held.listed[0],
        "attribute 'config' of Holds": held.config.table,
    }
    assert [*map(dict, reach.buffers())] == [dict(module.named_buffers(recurse=False)) | {"nothing": None}]


def test_a_trained_tensor_of_a_function_is_a_parameter() -> None:
    """A leaf that requires grad is found among the parameters, and not beside them."""
    reach = Reach(uses_global_weight)
    assert [found.tensor for found in reach.parameters()] == [WEIGHT]
    assert not [*reach.beside_parameters(grad=False)]


class Draws(nn.Module):
    """Holds a generator, or a list of one."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source


@pytest.mark.parametrize(
    ("fn", "source"),
    [
        (uses_global_generator, SOURCE),
        (over(source=SOURCE), SOURCE),
        (over(sources=[SOURCE]), SOURCE),
        (functools.partial(plain, generator=SOURCE), SOURCE),
        (OBJECT, OBJECT.source),
        (Draws(SOURCE), SOURCE),
        (nn.Sequential(Draws([SOURCE])), SOURCE),
    ],
    ids=["global", "closure", "list", "partial", "attribute", "module", "list of a submodule"],
)
def test_generators_are_found(fn: Any, source: torch.Generator) -> None:
    """A generator in a global, closure, partial or attribute is found, once."""
    assert [generator is source for generator in Reach(fn).generators] == [True]


# --- what is not ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_seen() -> None:
    """The documented limits: attributes below the first level, and globals used by functions that are called."""
    assert all(module is not OBJECT.deeper.hidden for module in Reach(OBJECT).modules)
    assert not Reach(calls_a_function_with_a_global).modules


def test_an_attribute_is_no_global_of_its_name() -> None:
    """What a function reads of an argument is not looked up among the globals."""
    assert not tensors_of(Reach(reads_an_attribute_of_that_name))


class Touchy:
    """An object that must not be asked for anything."""

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


def test_looking_calls_no_user_code() -> None:
    """Properties, `__getattr__` and `__eq__` of what is reached are never called."""
    touchy = Touchy()
    vars(touchy)["held"] = MODEL
    for fn in (touchy, touchy.__call__):
        assert Reach(fn).modules == SELF
    for fn in (over(thing=touchy), functools.partial(plain, touchy)):
        assert not Reach(fn).modules


def test_containers_that_hold_themselves() -> None:
    """A list that holds itself, and functions that hold each other, do not hang the search."""
    loop: list[Any] = [MODEL]
    loop.append(loop)
    assert Reach(over(loop=loop)).modules == SELF

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1) and MODEL is not None

    assert not Reach(even).generators


# --- whole models -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a child, and an attribute that may become a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.cache: torch.Tensor | None = None


CHANGES: list[Callable[[Holder], Any]] = [
    lambda holder: setattr(holder, "more", nn.Linear(2, 2)),
    lambda holder: holder.child.add_module("inner", nn.Linear(2, 2)),
    lambda holder: holder._modules.update(child=nn.Linear(2, 2)),
    lambda holder: delattr(holder, "child"),
    lambda holder: setattr(holder, "cache", torch.ones(2)),
    lambda holder: setattr(holder, "table", torch.ones(2)),
    lambda holder: holder.register_parameter("scale", nn.Parameter(torch.ones(2))),
    lambda holder: holder.child._parameters.update(bias=nn.Parameter(torch.ones(2))),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_what_a_module_reaches_is_seen_after_a_change(change: Callable[[Holder], None]) -> None:
    """Modules, parameters and plain tensors are those of the moment, whatever an earlier look has found."""
    holder = Holder()
    Reach(holder)
    change(holder)
    reach = Reach(holder)
    assert list(map(id, reach.modules)) == list(map(id, holder.modules()))
    assert {id(found.tensor) for found in reach.parameters()} == set(map(id, holder.parameters()))
    plain = {id(value) for value in vars(holder).values() if type(value) is torch.Tensor}
    assert {id(found.tensor) for found in reach.beside_parameters(grad=False)} == plain


class Kept(nn.Module):
    """A module of everything that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.other, self.calls = nn.BatchNorm1d(3), nn.Identity(), 0
        self.listed, self.queue, self.names = [1.0, 2.0], deque([1.0]), {"a"}
        self.config = SimpleNamespace(scale=2.0)
        self.options = {"b": 1.0, "a": 2.0}


def state_of(module: Kept) -> list[Any]:
    """What a module and its child hold: the objects, and, in order, what is in those that have entries."""
    held: list[Any] = []
    for one in module.modules():
        held.append({name: id(value) for name, value in vars(one).items()})  # an attribute's place says nothing
        held += [[(name, id(v)) for name, v in vars(one)[t].items()] for t in ("_parameters", "_buffers", "_modules")]
    entries: list[Any] = [module.listed, module.queue, module.names, module.options, vars(module.config)]
    return [*held, [[*one.items()] if isinstance(one, dict) else [*one] for one in entries]]


STEPS: dict[str, Callable[[Kept], Any]] = {
    "an attribute": lambda m: setattr(m, "calls", 1),
    "a new attribute": lambda m: setattr(m, "cache", torch.ones(3)),
    "an attribute that is gone": lambda m: delattr(m, "calls"),
    "training": lambda m: m.eval(),
    "another buffer": lambda m: setattr(m.child, "running_mean", torch.ones(3)),
    "another weight": lambda m: m.child._parameters.update(weight=nn.Parameter(torch.ones(3))),
    "another child": lambda m: m._modules.update(child=nn.Identity()),
    "no child": lambda m: m._modules.clear(),
    "a list": lambda m: m.listed.append(3.0),
    "a list that is reversed": lambda m: m.listed.reverse(),
    "a deque": lambda m: m.queue.clear(),
    "a set": lambda m: m.names.add("b"),
    "a dict": lambda m: m.options.update(c=3.0),
    "a dict in another order": lambda m: m.options.update(b=m.options.pop("b")),
    "children in another order": lambda m: m._modules.update(child=m._modules.pop("child")),
    "an object": lambda m: setattr(m.config, "scale", 5.0),
    "another list": lambda m: setattr(m, "listed", []),
}


@pytest.mark.parametrize("change", STEPS.values(), ids=STEPS.keys())
def test_what_is_kept_is_put_back(change: Callable[[Kept], Any]) -> None:
    """Modules hold what they held, and containers among their attributes, too: the same objects, in order."""
    module = Kept()
    before, kept = state_of(module), Reach(module).keep()
    change(module)
    changed = [dict(vars(one)) for one in module.modules()]
    assert state_of(module) != before
    put_back(kept)
    assert state_of(module) == before
    del changed  # till now, so that no identity was used again
