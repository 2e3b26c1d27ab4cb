"""Law 4: any signature: positional, keyword and nested arguments, anything returned, closures over anything."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from laws.cases import Batch, Result
from laws.placements import PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Counted, ones
from torch_recompute import no_recompute, recompute

wraps = pytest.mark.parametrize(
    "wrap", [recompute, lambda fn: recompute(lambda *a, **k: no_recompute(fn)(*a, **k).cos())]
)


def test_arguments_arrive_unchanged_in_forward_and_in_the_replay():
    """Both runs get the same values: tensors equal, plain objects identical, containers of the same kind."""
    marker, seen = object(), []

    def body(a, b=2, *rest, c, d=None, **others):
        seen.append((a, b, rest, c, d, others))
        return a.exp() * b

    batch = Batch(ones(3), [None], 4)
    region = recompute(body)
    out = region(ones(3), 5, marker, "text", c={"k": (batch, [1, marker])}, check="mine", name=7, early_stop=marker)
    out.sum().backward()
    forward, replay = seen
    assert torch.equal(forward[0], replay[0])
    for run in seen:
        a, b, rest, c, d, others = run
        assert a.requires_grad
        assert (b, rest, d) == (5, (marker, "text"), None)
        assert others == {"check": "mine", "name": 7, "early_stop": marker}
        inner, listed = c["k"]
        assert type(inner) is Batch
        assert inner.size == 4
        assert torch.equal(inner.x, batch.x)
        assert listed == [1, marker]


def test_the_first_run_gets_the_callers_own_objects():
    """In forward nothing is copied or rewrapped: the function sees the very objects that the caller passed."""
    x, options = ones(3), {"list": [ones(3)]}
    seen = []

    def body(x, options):
        seen.append((x, options))
        return x.exp()

    recompute(body)(x, options)
    assert seen[0][0] is x
    assert seen[0][1] is options


def test_options_of_a_region_may_be_names_of_arguments():
    """Every option of `recompute` can be a keyword of the function; a region takes none of its own."""
    names = [name for name in inspect.signature(recompute).parameters if name != "fn"]
    seen = []

    def body(x, **kwargs):
        seen.append(kwargs)
        return x.exp()

    recompute(body)(ones(3), fn=0, self=1, **dict.fromkeys(names, 2)).sum().backward()
    assert seen == [{"fn": 0, "self": 1, **dict.fromkeys(names, 2)}] * 2


@pytest.mark.parametrize("wrapper", [recompute, no_recompute])
def test_the_wrapper_looks_like_the_function(wrapper):
    """Name, docstring and signature are the function's own."""

    def body(x, *, scale: float = 2.0):
        """Says what it does."""
        return x * scale

    wrapped = wrapper(body)
    assert wrapped.__name__ == "body"
    assert wrapped.__doc__ == body.__doc__
    assert inspect.signature(wrapped) == inspect.signature(body)


class Callable:
    def __init__(self):
        self.scale = ones(3)

    def __call__(self, x):
        return x.exp() * self.scale

    def method(self, x):
        return self(x)

    @staticmethod
    def static(x):
        return x.exp()

    @classmethod
    def of_class(cls, x):
        return x.exp()


@wraps
def test_all_kinds_of_callables(wrap):
    """Functions, builtins, methods, partials, modules and objects that can be called."""
    thing = Callable()
    kinds = [
        torch.exp,
        torch.Tensor.exp,
        thing,
        thing.method,
        thing.static,
        thing.of_class,
        nn.Softmax(-1),
        nn.Linear(3, 3),
    ]
    kinds += [nn.Linear(3, 3).forward, functools.partial(torch.mul, other=2), functools.partial(thing.method)]
    kinds += [functools.partial(functools.partial(torch.where, torch.tensor([True, False, True])), other=ones(3))]
    for fn in kinds:
        x = torch.arange(3.0, requires_grad=True)
        wrap(fn)(x).sum().backward()
        y = torch.arange(3.0, requires_grad=True)
        (fn(y).cos() if wrap is not recompute else fn(y)).sum().backward()
        assert torch.equal(x.grad, y.grad), fn


def test_results_of_any_kind():
    """What the function returns comes back as it is: the same object, with integer, constant and input parts."""
    x, marker = ones(3), object()
    made = []

    def body(x):
        y = x.exp()
        made.append({"y": y, "int": y.argmax(), "none": None, "x": x, "same": marker, "named": Result(y, x.long())})
        return made[-1]

    result = recompute(body)(x)
    assert result is made[0]
    assert result["x"] is x
    assert result["same"] is marker
    assert result["int"].dtype is torch.int64
    assert not result["int"].requires_grad
    assert type(result["named"]) is Result
    result["y"].sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_a_result_that_no_pytree_knows():
    """A plain object as the result, also of a saved call, keeps its tensors in the graph."""

    def body(x):
        return SimpleNamespace(y=x.exp(), text="t")

    grads = []
    for run in (body, recompute(body), recompute(lambda x: SimpleNamespace(y=no_recompute(torch.exp)(x)))):
        x = ones(3)
        run(x).y.sin().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_containers_emptied_by_the_caller():
    """A list or dict that the caller changes after the forward does not change the replay."""
    tensors, options = [ones(3), ones(3)], {"scale": 2.0, "more": [ones(3)]}
    out = recompute(lambda t, o: (t[0] * t[1]).exp() * o["scale"] * o["more"][0])(tensors, options)
    first = tensors[0]
    tensors.clear()
    options.clear()
    out.sum().backward()
    assert torch.equal(first.grad, torch.ones(3).exp() * 2)


def test_containers_emptied_by_the_function():
    """A function that pops from its own argument finds it whole again in the replay."""
    x = ones(3)
    recompute(lambda stack, table: (stack.pop() * table.pop("y")).exp())([1, x], {"y": x.detach() + 1}).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0).exp() * 2)


def test_closure_variables_deleted_or_rebound():
    """A closure's tensor, number, function or module may be gone or replaced by the time of backward."""
    x, scale, power, act, layer = ones(3), ones(3), 2, torch.exp, nn.Linear(3, 3)
    kept = scale

    def inner(y):
        return act(y) * scale

    out = recompute(lambda x: layer(inner(x)).pow(power))(x)
    wanted = torch.autograd.grad(layer(inner(x)).pow(power).sum(), [x, scale, layer.weight])
    weight = layer.weight
    scale, power, act, layer = None, 5, torch.sin, nn.Linear(3, 3)
    got = torch.autograd.grad(out.sum(), [x, kept, weight])
    assert all(map(torch.equal, got, wanted))
    assert (scale, power) == (None, 5)


def test_loop_variables():
    """Lambdas over a loop's variable replay with the value of their own turn."""
    grads = []
    for wrap in (lambda fn: fn, recompute):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        x = ones(2, 3)
        for i, layer in enumerate(layers):
            x = wrap(lambda x: layer(x).exp() / (i + 3))(x)  # noqa: B023
        x.sum().backward()
        grads.append([p.grad for p in layers.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_variable_that_the_function_writes():
    """A `nonlocal` counter is the function's own state: it counts both runs, and the caller sees it."""
    calls = 0

    def body(x):
        nonlocal calls
        calls += 1
        return x.exp()

    recompute(body)(ones(3)).sum().backward()
    assert calls == 2


def test_keyword_tensors_get_gradients_and_none_is_forgotten():
    """Tensors by keyword, in dicts and in dataclasses get the gradients that positional ones would."""
    for pass_it in (
        lambda f, t: f(t),
        lambda f, t: f(x=t),
        lambda f, t: f(x={"t": t})["t"],
        lambda f, t: f(Batch(t, [], 0)).x,
    ):
        t = ones(3)

        def body(x):
            if isinstance(x, dict):
                return {"t": x["t"].exp()}
            return Batch(x.x.exp(), [], 1) if isinstance(x, Batch) else x.exp()

        pass_it(recompute(body), t).sin().sum().backward()
        assert torch.equal(t.grad, t.detach().exp().cos() * t.detach().exp())


def test_an_input_without_grad_and_weights_inside():
    """Nothing that is passed requires grad; the weights inside get their gradients all the same."""
    layer, count = nn.Linear(3, 3), Counted()
    recompute(count("fn", chain(layer, torch.exp)))(torch.ones(2, 3)).sum().backward()
    (wanted,) = torch.autograd.grad(layer(torch.ones(2, 3)).exp().sum(), layer.weight)
    assert torch.equal(layer.weight.grad, wanted)
    assert count.calls["fn"] == 2


@for_each(placement=PLACEMENTS)
@pytest.mark.parametrize("base", ["leaf", "result"])
@pytest.mark.parametrize("given", ["argument", "closure"])
def test_a_view_made_without_grad_is_given(placement, given, base):
    """A view made under `no_grad` of what requires grad has no gradient, and what is made of it is recorded."""

    def grad(where):
        x, factor = ones(2, 3), ones(3)
        of = x if base == "leaf" else x.sin()
        with torch.no_grad():
            view = of[0]

        def first(v):
            return torch.tanh(v if given == "argument" else view) * factor

        where.put(first, torch.sin, torch.exp)(view).sum().backward()
        return factor.grad

    assert torch.equal(grad(placement), grad(PLAIN))
