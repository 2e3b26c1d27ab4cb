"""Plans in models: the same training, less memory, and a model that is otherwise as before."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.utils.flop_counter import FlopCounterMode

from laws.watch import Tally, on_threads
from support.replicas import replicas
from support.training import assert_same
from torch_recompute import ArgumentError, Choice, OnHost, Plan, apply, measure, recompute
from torch_recompute.plan.exhausted import planned_models

LAYERS, WIDTH = 6, 16


class Layer(nn.Module):
    """A pre-norm block with dropout, a buffer and a count of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.tally = Tally()

    @property
    def runs(self) -> int:
        return self.tally.count

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.tally()
        self.steps += 1
        h = self.down(self.drop(torch.relu(self.up(self.norm(x)))))
        return x + (h if scale is None else h + scale)


class Model(nn.Module):
    """Layers in a loop of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return x


def data() -> torch.Tensor:
    return torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(2))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, x: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The output, the gradients and the buffers of one step."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    y = model(data() if x is None else x)
    y.square().mean().backward()
    found = {"output": y.detach()}
    found.update((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    found.update((name, b.clone()) for name, b in model.named_buffers())
    return found


def layers(*groups: tuple[int, ...], **options: Any) -> Plan:
    return Plan(tuple(Choice(tuple(f"layers.{i}" for i in group), **options) for group in groups))


ONE_BY_ONE = [(i,) for i in range(LAYERS)]
PLANS: dict[str, Plan] = {
    "nothing": Plan(),
    "the model": Plan((Choice(("",)),)),
    "each layer": layers(*ONE_BY_ONE),
    "the first two": layers((0,), (1,)),
    "pairs": layers((0, 1), (2, 3), (4, 5)),
    "four and two": layers((0, 1, 2, 3), (4, 5)),
    "all as one": layers(tuple(range(LAYERS))),
    "products kept": layers(*ONE_BY_ONE, keep=("@product",)),
    "modules kept": layers(*ONE_BY_ONE, keep=("up", "down")),
    "products of a module kept": layers(*ONE_BY_ONE, keep=("up@product", "drop@product")),
    "products of another kept": layers(*ONE_BY_ONE, keep=("down@product", "@matmul")),
    "carried": layers(*ONE_BY_ONE, carry=True),
    "one part of each": Plan(tuple(Choice((f"layers.{i}.up",)) for i in range(LAYERS))),
    "a layer and a part of it": Plan((Choice(("layers.0",)), Choice(("layers.0.norm",)))),
    "a saved call that is a region": Plan((Choice(("layers.0",), keep=("up",)), Choice(("layers.0.up",)))),
}


@pytest.mark.parametrize("name", PLANS)
def test_training_is_the_same(name: str) -> None:
    """Losses, gradients and buffers equal those without the plan to the last bit, over two steps."""
    plain, ours = model(), model()
    apply(ours, PLANS[name])
    for _ in range(2):
        assert_same(train(ours), train(plain))


@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_as_before(name: str) -> None:
    """Keys, paths, classes, hooks and the signature of forward are untouched."""

    def looks(m: nn.Module) -> list[Any]:
        return [
            list(m.state_dict()),
            [(path, type(module)) for path, module in m.named_modules()],
            [path for path, _ in m.named_parameters()],
            [str(inspect.signature(module.forward)) for module in m.modules()],
            repr(m),
        ]

    plain, ours = model(), model()
    handle = apply(ours, PLANS[name])
    assert looks(ours) == looks(plain)
    ours.load_state_dict(plain.state_dict())
    handle.remove()
    assert all("forward" not in module.__dict__ for module in ours.modules())
    assert [m.__dict__.keys() for m in ours.modules()] == [m.__dict__.keys() for m in plain.modules()]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", PLANS)
def test_copies_are_recomputed_too(name: str, way: str) -> None:
    """A copy of the model has the plan, trains the same, and shares nothing with the original."""

    def saved(m: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    copies = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}
    ours = model()
    apply(ours, PLANS[name])
    other = copies[way](ours)
    assert_same(train(other), train(model()))
    assert sum(layer.runs for layer in ours.layers) == 0
    assert kept(other) == kept(ours)


def kept(m: nn.Module) -> int:
    """The bytes between forward and backward."""
    torch.manual_seed(1)
    x = data()
    with measure() as watched:
        y = m(x)
        return watched.live_bytes - y.nbytes


ROW = 4 * 4 * 32 * WIDTH


@pytest.mark.parametrize("name", PLANS)
def test_replicas_use_their_own_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that `DataParallel` makes have the plan and weights of their own; remove leaves nothing."""
    plain, ours = model(), model()
    handle = apply(ours, PLANS[name])

    def step(m: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        m.zero_grad(set_to_none=True)
        outputs = [replica(data()) for replica in replicas(m, monkeypatch)]
        torch.stack(outputs).square().mean().backward()
        return {str(i): y.detach() for i, y in enumerate(outputs)} | {n: p.grad for n, p in m.named_parameters()}

    with handle.watch():
        found = step(ours)
    assert_same(found, step(plain))
    assert not torch.equal(found["0"], found["1"])
    assert all(row.replays > 1 for row in handle.report().rows if row.saved_bytes)
    assert [row.saved_bytes is None for row in handle.report().rows] == [False] * len(PLANS[name])
    handle.remove()
    assert [m.__dict__.keys() for m in ours.modules()] == [m.__dict__.keys() for m in plain.modules()]
    assert_same(step(ours), step(plain))


@pytest.mark.parametrize(
    ("name", "rows"), [("each layer", LAYERS), ("pairs", 3), ("four and two", 2), ("all as one", 1), ("the model", 0)]
)
def test_what_is_kept(name: str, rows: int) -> None:
    """Between forward and backward there is the input of each region and nothing else."""
    ours = model()
    apply(ours, PLANS[name])
    buffers = 4 * LAYERS  # each layer's counter, copied
    assert kept(ours) - buffers == rows * ROW
    assert kept(model()) > 8 * LAYERS * ROW


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("nothing", [1] * LAYERS),
        ("each layer", [2] * LAYERS),
        ("the first two", [2, 2, 1, 1, 1, 1]),
        ("pairs", [2] * LAYERS),
        ("four and two", [2] * LAYERS),
        ("all as one", [2] * LAYERS),
    ],
)
def test_run_counts(name: str, runs: list[int]) -> None:
    """A layer in a region runs once in forward and once in backward, alone or in a group; others once."""
    ours = model()
    apply(ours, PLANS[name])
    train(ours)
    assert [layer.runs for layer in ours.layers] == runs


@pytest.mark.parametrize(
    ("name", "products"),
    [
        *(("nothing", 0), ("each layer", 1), ("pairs", 1.5), ("modules kept", 0), ("products kept", 0)),
        *(("products of a module kept", 0), ("products of another kept", 1)),
    ],
)
def test_replayed_flops(name: str, products: float) -> None:
    """Of a layer's two products the first is repeated, and the last where another layer of the group needs it."""

    def flops(m: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            train(m)
        return counter.get_total_flops()

    ours = model()
    apply(ours, PLANS[name])
    product = 2 * 4 * 32 * WIDTH * 4 * WIDTH
    assert flops(ours) - flops(model()) == products * LAYERS * product


def test_hooks_stay_outside() -> None:
    """Hooks on a placed module run once per step, as without the plan."""
    ours = model()
    counts = [0, 0]
    for layer in ours.layers:
        layer.register_forward_pre_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
        layer.register_forward_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
    apply(ours, PLANS["each layer"])
    train(ours)
    assert counts == [LAYERS, LAYERS]


def test_a_forward_that_was_set_on_the_instance_is_kept() -> None:
    """A `forward` that somebody has set on the instance runs inside the region, and is there again afterwards."""
    plain, ours = model(), model()
    for m in (plain, ours):
        layer = m.layers[2]
        layer.forward = Doubled(layer)
    theirs = ours.layers[2].forward
    handle = apply(ours, PLANS["pairs"])
    assert_same(train(ours), train(plain))
    handle.remove()
    assert ours.layers[2].forward is theirs
    handle.remove()
    assert ours.layers[2].forward is theirs


class Doubled:
    """What another library puts in the place of a forward."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return Layer.forward(self.layer, 2 * x, **kwargs)


def test_a_forward_put_on_top_stays() -> None:
    """What another library has put over a placed forward is left there when the plan is taken out, and runs plainly."""
    ours = model()
    handle = apply(ours, PLANS["pairs"])
    layer = ours.layers[2]
    placed, runs = layer.forward, []

    def on_top(*args: Any, **kwargs: Any) -> torch.Tensor:
        runs.append(1)
        return placed(*args, **kwargs)

    layer.forward = on_top
    handle.remove()
    assert layer.forward is on_top
    assert_same(train(ours), train(model()))
    assert len(runs) == 1
    assert layer.runs == 1


def test_microbatches_interleave() -> None:
    """Several forwards before their backwards, in any order, as pipelines run them, with groups of layers."""
    plain, ours = model(), model()
    apply(ours, PLANS["four and two"])
    found = []
    for m in (plain, ours):
        torch.manual_seed(1)
        outputs = [m(data() * i) for i in range(1, 4)]
        for i in (1, 0, 2):
            outputs[i].square().mean().backward()
        found.append({name: p.grad for name, p in m.named_parameters()})
    assert_same(found[1], found[0])


def test_threads_do_not_meet() -> None:
    """Two threads that train copies of a model, or one model, at the same time do not see each other's groups."""
    ours = model()
    apply(ours, PLANS["pairs"])
    for layer in ours.layers:
        layer.drop.p = 0.0  # one generator serves all threads
    wanted = ours(data()).detach()
    results: list[torch.Tensor] = []

    def run(_: int) -> None:
        for _ in range(5):
            y = ours(data())
            torch.autograd.grad(y.sum(), list(ours.parameters()))
            results.append(y.detach())

    on_threads(run, 1, 2, 3)
    assert len(results) == 15
    assert all(torch.equal(result, wanted) for result in results)


def test_exception_in_a_group_leaves_the_next_step_right() -> None:
    """After a forward that failed half way through a group the next step is right and keeps what it should."""
    ours = model()
    apply(ours, PLANS["all as one"])
    hook = ours.layers[3].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ours(data())
    hook.remove()
    assert kept(ours) - 4 * LAYERS == ROW
    for layer in ours.layers:
        layer.steps.zero_()
    assert_same(train(ours), train(model()))


def test_result_changed_in_place_between_the_layers_of_a_group() -> None:
    """A model that changes a layer's result in place between two layers of a group is right all the same."""

    class InPlace(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, scale=self.scale)
                x *= 0.5
            return x

    torch.manual_seed(0)
    plain = InPlace()
    ours = copy.deepcopy(plain)
    apply(ours, PLANS["all as one"])
    assert_same(train(ours), train(plain))


def test_without_grad_and_in_eval() -> None:
    """Without grad the layers run plainly; in eval mode they are recomputed where grad flows."""
    ours = model()
    apply(ours, PLANS["pairs"])
    with torch.no_grad():
        ours(data())
    assert [layer.runs for layer in ours.layers] == [1] * LAYERS
    ours.eval()
    assert_same(train(ours), train_eval(ours.layers[0].steps))
    assert [layer.runs for layer in ours.layers] == [3] * LAYERS


def train_eval(steps: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = model().eval()
    for layer in plain.layers:
        layer.steps.copy_(steps - 1)
    return train(plain)


def test_without_grad_no_call_is_looked_at() -> None:
    """In evaluation a region that keeps calls and carries decisions enters no mode: it costs what the model costs."""
    entered: list[int] = []

    class Looks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            entered.append(_len_torch_function_stack())
            return super().forward(input)

    net = nn.Sequential(Looks(WIDTH, WIDTH))
    apply(net, Plan((Choice(("0",), keep=("@product",), carry=True),)))
    with torch.no_grad():
        net(data())
    net(data())
    assert entered == [0, 2]


def test_plan_inside_a_region_of_the_user() -> None:
    """A model with a plan may be called inside a region: nested, and right."""
    plain, ours = model(), model()
    apply(ours, PLANS["pairs"])
    outer = recompute(ours)
    torch.manual_seed(1)
    outer(data()).square().mean().backward()
    wanted = train(plain)
    assert all(torch.equal(p.grad, wanted[name]) for name, p in ours.named_parameters())


@pytest.mark.parametrize(
    "name", ["modules kept", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("each layer", "pairs"))]
)
def test_compiled_without_a_break(name: str) -> None:
    """A placed model compiles in one graph, with the gradients of the plain one."""

    class Pure(nn.Module):
        """A layer without effects on itself: the compiler refuses those in anything that is checkpointed."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).sin()) * scale

    ours = model()
    ours.layers = nn.ModuleList(Pure() for _ in range(LAYERS))
    plain = copy.deepcopy(ours)
    apply(ours, PLANS[name])
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found, wanted = train(compiled), train(plain)
    for (_, a), (_, b) in zip(found.items(), wanted.items(), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_is_changed_where_the_plan_does_not_fit() -> None:
    """A plan with a path that is not there leaves the model untouched."""
    ours = model()
    with pytest.raises(ArgumentError, match=r"has no module 'layers\.9'"):
        apply(ours, layers((0,), (9,)))
    assert all("forward" not in module.__dict__ for module in ours.modules())


def test_a_module_with_an_at_sign_in_its_name_is_refused_for_it() -> None:
    """What a plan takes for calls in a module is said to be that, where a module's own name looks like it."""
    ours = nn.Sequential()
    ours.add_module("a@b", nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=r"no module 'a'.*path@calls.*rename it"):
        apply(ours, Plan((Choice(("a@b",)),)))


def test_advice_for_a_wrapped_model_and_for_a_copy_can_be_followed() -> None:
    """A plan with descriptions of its modules is refused for a wrapper as one by hand; a copy has no handle."""
    model = nn.Sequential(nn.Linear(4, 4))
    plan = Plan((Choice(("0",)),), modules=(("0", "Linear with 2 parameters of 20 elements"),))
    for wrapped, right in ((nn.DataParallel(model), "module"), (torch.compile(model, backend="eager"), "_orig_mod")):
        with pytest.raises(ArgumentError, match=rf"no module '0'.*\.{right}"):
            apply(wrapped, plan)  # pyright: ignore[reportArgumentType]
        apply(getattr(wrapped, right), plan).remove()
    handle = apply(model, plan)
    planned = copy.deepcopy(model)
    handle.remove()
    with pytest.raises(ArgumentError, match="No handle takes it out: this is a copy"):
        apply(planned, plan)
    apply(copy.deepcopy(model), plan).remove()


def test_one_module_under_two_paths() -> None:
    """A module that the model calls under two names is placed once; naming both is refused."""
    ours = model()
    ours.layers[1] = ours.layers[0]
    with pytest.raises(ArgumentError, match="one and the same module"):
        apply(ours, layers((0,), (1,)))
    apply(ours, layers((0,)))
    plain = model()
    plain.layers[1] = plain.layers[0]
    assert_same(train(ours), train(plain))


def test_repr_says_what_is_there() -> None:
    """A handle says how many regions it placed, and that they are gone."""
    handle = apply(model(), PLANS["pairs"])
    assert repr(handle) == "<plan applied to Model: 3 regions>"
    handle.remove()
    assert repr(handle) == "<plan applied to Model: removed>"


class Counting(OnHost):
    """A store that counts what is put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[torch.Size] = []

    def put(self, tensor: torch.Tensor) -> Any:
        self.puts.append(tensor.shape)
        return super().put(tensor)


def test_inputs_lie_in_the_store_that_the_plan_names() -> None:
    """One input per region or group goes to the store, none of other regions, and gradients are those without it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])
    x = torch.randn(3, 4, requires_grad=True)
    layers(x).sum().backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    store = Counting()
    plan = Plan((Choice(("0",)), Choice(("1",), store="mine"), Choice(("2", "3", "4"), store="mine")))
    apply(layers, plan, stores={"mine": store})
    layers(x).sum().backward()
    assert store.puts == [x.shape] * 2
    assert [torch.equal(p.grad, e) for p, e in zip(layers.parameters(), expected, strict=True)] == [True] * 10


def test_host_needs_no_store_given() -> None:
    """The word "host" alone keeps a copy of the inputs: a change of the caller's tensor in place does not reach it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    apply(model, Plan((Choice(("",), store="host"),)))
    y = model(x)
    x.zero_()
    y.sum().backward()
    assert torch.equal(model[0].weight.grad, expected)


def test_a_plan_that_is_removed_is_no_longer_the_models() -> None:
    """What asks for the plan of a model, as the doctor and texts of errors do, finds none after `remove`."""
    model = nn.Sequential(nn.Linear(2, 2))
    handle = apply(model, Plan((Choice(("0",)),)))
    assert planned_models[model] == handle.plan
    handle.remove()
    assert model not in planned_models
