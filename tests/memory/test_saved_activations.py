"""`saved_activations`: bytes of a forward worked out by hand, by module and line; nothing is replayed or changed."""

import contextlib
import gc
import inspect
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from support.blocks import BLOCK, block
from torch_recompute import OnHost, errors, measure, no_recompute, recompute, replay, saved_activations
from torch_recompute.memory import Row, SavedActivations


def leaf() -> torch.Tensor:
    """One unit of memory that requires grad."""
    return block(requires_grad=True)


class Stash(torch.autograd.Function):
    """Keeps its result where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.result = {"y": [x.exp()]}
        return ctx.result["y"][0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.result["y"][0]


class Cache(nn.Module):
    """Keeps what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach() * 2
        return x + 1


class Tied(nn.Module):
    """An embedding that is the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(index))


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), activation, nn.Linear(256, 64))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def attend(probabilities: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Scores, probabilities, product."""
    return lambda scores, values: probabilities(scores + 1) @ values


def views(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return y.view(-1).sin().sum() + y.t().cos().sum() + y[:3].exp().sum() * 0


def two_layers(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., torch.Tensor]:
    """Twice the same function, which keeps the sine's and the cosine's input of its own."""
    layer = wrap(lambda x: (x + 1).sin().cos())
    return lambda x: layer(layer(x) + 1)


def region_with_a_saved_call(x: torch.Tensor) -> torch.Tensor:
    product = no_recompute(torch.exp, name="product")
    return recompute(lambda x: product(x.sin()).cos(), name="layer")(x)


def region_with_a_choice(x: torch.Tensor) -> torch.Tensor:
    choose = replay(lambda x: x.detach() * 2)
    return recompute(lambda x: (choose(x) * x.sin()).sin(), name="layer")(x)


def writes_to_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[:32].exp_()
    return y + 1


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x + 1, torch.tensor([0, 20, 64])).sin().values()


jagged(torch.ones(64, 1))  # PyTorch keeps a tensor of its own from the first on


def switches_grad_off(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.sin().cos().exp()


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin().cos()


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model and its arguments, the bytes that it keeps by kind, and the bytes that are alive for its result only."""

    model: Callable[[], Callable[..., Any]]
    args: Callable[[], tuple[Any, ...]] = lambda: (leaf(),)
    saved: int = 0
    region: int = 0
    escaped: int = 0
    result: int = 0


def projections() -> tuple[Any, ...]:
    return tuple(torch.randn(2, 4, 16, 32, requires_grad=True) for _ in range(3))


CASES = {
    # What the product saves, input and weight, was there before.
    "linear": Case(lambda: nn.Linear(64, 64), result=BLOCK),
    # ReLU saves its result, which the second product saves too; the others save their input, four blocks each.
    "relu": Case(lambda: mlp(nn.ReLU()), saved=4 * BLOCK, result=BLOCK),
    "tanh": Case(lambda: mlp(nn.Tanh()), saved=4 * BLOCK, result=BLOCK),
    "gelu": Case(lambda: mlp(nn.GELU()), saved=8 * BLOCK, result=BLOCK),
    "silu": Case(lambda: mlp(nn.SiLU()), saved=8 * BLOCK, result=BLOCK),
    # The probabilities, once.
    "softmax": Case(lambda: attend(softmax), lambda: (leaf(), leaf()), saved=BLOCK, result=BLOCK),
    # The naive way: the product saves the probabilities, and the checkpoint holds the scores on top.
    "softmax, torch's checkpoint": Case(
        lambda: attend(lambda x: checkpoint(softmax, x, use_reentrant=False)),
        lambda: (leaf(), leaf()),
        saved=BLOCK,
        region=BLOCK,
        result=BLOCK,
    ),
    "softmax, torch's reentrant checkpoint": Case(
        lambda: attend(lambda x: checkpoint(softmax, x, use_reentrant=True)),
        lambda: (leaf(), leaf()),
        saved=BLOCK,
        region=BLOCK,
        result=BLOCK,
    ),
    # A region that ends in it does the same; one that goes on to the product does not.
    "softmax, at the end of a region": Case(
        lambda: attend(recompute(lambda x: softmax(x.sin()))),
        lambda: (leaf(), leaf()),
        saved=BLOCK,
        region=BLOCK,
        result=BLOCK,
    ),
    "softmax, a region with the product as a saved call": Case(
        lambda: recompute(lambda x, v: no_recompute(torch.matmul)(softmax(x + 1), v)),
        lambda: (leaf(), leaf()),
        result=BLOCK,
    ),
    "softmax, a saved call": Case(
        lambda: recompute(lambda x, v: no_recompute(softmax)(x + 1) @ v),
        lambda: (leaf(), leaf()),
        region=BLOCK,
        result=BLOCK,
    ),
    # The result, which autograd saves, and a float per row.
    "attention": Case(
        lambda: lambda *qkv: F.scaled_dot_product_attention(*qkv),
        projections,
        saved=2 * 4 * 16 * 32 * 4 + 2 * 4 * 16 * 4,
    ),
    "batch norm": Case(lambda: nn.BatchNorm1d(64), saved=2 * 64 * 4, result=BLOCK),
    "layer norm": Case(lambda: nn.LayerNorm(64), saved=2 * 64 * 4, result=BLOCK),
    "dropout": Case(lambda: nn.Dropout(0.5), saved=BLOCK, result=BLOCK),  # the mask, in float32
    "views": Case(lambda: views, saved=BLOCK + 3 * 64 * 4, result=4),  # one storage; exp saves its result of [3, 64]
    "a leaf made inside": Case(lambda: lambda x: x * torch.ones(64, 64), saved=BLOCK, result=BLOCK),
    "an expanded tensor": Case(lambda: lambda x: (x[0] + 1).expand(64, 64).sin(), saved=256, result=BLOCK),
    "a slice": Case(lambda: lambda x: (x + 1)[0].sin(), saved=BLOCK, result=256),
    "a function that stashes": Case(lambda: Stash.apply, escaped=BLOCK, result=BLOCK),
    "a stash in a region": Case(lambda: recompute(lambda x: Stash.apply(x.sin())), escaped=BLOCK, result=BLOCK),
    "a module that caches": Case(lambda: nn.Sequential(nn.Tanh(), Cache()), saved=BLOCK, escaped=BLOCK, result=BLOCK),
    "tied weights": Case(Tied, lambda: (torch.arange(8),), saved=8 * 64 * 4, result=8 * 100 * 4),
    "two layers": Case(lambda: two_layers(lambda fn: fn), saved=4 * BLOCK, result=BLOCK),
    "two regions": Case(lambda: two_layers(recompute), region=BLOCK, result=BLOCK),
    "two of torch's": Case(
        lambda: two_layers(lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False)), region=BLOCK, result=BLOCK
    ),
    "two regions in a region": Case(lambda: recompute(two_layers(recompute)), result=BLOCK),
    # A store's copies are its own: of the first input too, which was there before.
    "inputs on the host": Case(
        lambda: two_layers(lambda fn: recompute(fn, inputs=OnHost())), region=2 * BLOCK, result=BLOCK
    ),
    "a saved call": Case(lambda: region_with_a_saved_call, region=BLOCK, result=BLOCK),
    "a choice": Case(lambda: region_with_a_choice, region=BLOCK, result=BLOCK),
    "saved on the CPU by hooks": Case(lambda: on_cpu, saved=BLOCK, result=BLOCK),
    # The result of the exponential, in the memory that it wrote to.
    "a write to a view": Case(lambda: writes_to_a_view, saved=BLOCK, result=BLOCK),
    # Both results of the layout, and the three offsets that they share.
    "a jagged tensor": Case(lambda: jagged, saved=2 * BLOCK + 3 * 8),
    "no grad inside": Case(lambda: switches_grad_off, result=BLOCK),
    "nothing requires grad": Case(lambda: mlp(nn.GELU()).requires_grad_(False), lambda: (block(),), result=BLOCK),
    "a result that is an input": Case(lambda: lambda x: x),
    # A node that has run keeps nothing.
    "a gradient taken inside": Case(
        lambda: lambda x: torch.autograd.grad((x + 1).sin().cos().sum(), x)[0] + x, result=BLOCK
    ),
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Each row of the table."""
    return CASES[request.param]


def the_row(kept: SavedActivations, **wanted: Any) -> Row:
    """The one row with these fields."""
    (row,) = (row for row in kept.rows if all(getattr(row, name) == value for name, value in wanted.items()))
    return row


def test_bytes_are_those_worked_out_by_hand(case: Case) -> None:
    """Bytes of each kind are the row's, all sums agree, each row is explained, and `measure` finds the same alive."""
    model, args = case.model(), case.args()
    kept = saved_activations(model, args)
    assert kept.by_kind() == {"saved": case.saved, "region": case.region, "escaped": case.escaped}
    assert kept.result_bytes == case.result
    assert kept.total_bytes == case.saved + case.region + case.escaped
    for sums in (kept.by_kind(), kept.by_line(), kept.by_module(), kept.by_op(), kept.by_device()):
        assert sum(sums.values()) == kept.total_bytes
    assert not any(row.bytes for row in kept.existing)
    for row in kept.rows:
        assert row.op.startswith("aten.")
        assert row.line.rpartition(":")[0].endswith(".py")
        assert row.saved_by if row.kind == "saved" else row.held_by
    assert str(kept).startswith(f"{errors.size(kept.total_bytes)} kept for backward in {len(kept.rows)} tensor")
    model = case.model()
    with measure() as m:
        result = model(*args)
    assert m.live_bytes == kept.total_bytes + kept.result_bytes
    del result


def test_nothing_is_left_behind(case: Case) -> None:
    """After the call every tensor that it made is gone at once, except for what the model itself has put aside."""
    model, args = case.model(), case.args()
    before = [t.grad for t in args]
    gc.disable()
    try:
        with measure() as m:
            saved_activations(model, args)
        for module in model.modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, Cache):
                module.last = None
        assert m.live_bytes == 0
    finally:
        gc.enable()
    assert [t.grad for t in args] == before


# --- who keeps it -----------------------------------------------------------------------------------------------------


def test_a_row_says_where_it_comes_from() -> None:
    """Operation, node, module, line, shape and type of a saved tensor are the true ones."""
    kept = saved_activations(nn.Sequential(mlp(nn.GELU()), Tanh()), (leaf(),))
    row = the_row(kept, op="aten.addmm", shape=(64, 256))
    assert row[:6] == (4 * BLOCK, "saved", "aten.addmm", ("GeluBackward0 (self)",), (), "0.0")
    assert row[7:] == ((64, 256), "float32", "cpu", False)
    row = the_row(kept, module="1")
    code, first = inspect.getsourcelines(Tanh.forward)
    assert row.line == f"{__file__}:{first + len(code) - 1}"
    assert row.saved_by == ("TanhBackward0 (result)",)
    assert row.in_result
    assert kept.by_module() == {"0.0": 4 * BLOCK, "0.1": 4 * BLOCK, "1": BLOCK}
    assert kept.by_op() == {"aten.addmm": 4 * BLOCK, "aten.gelu": 4 * BLOCK, "aten.tanh": BLOCK}


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def test_a_model_of_torchs_modules_has_lines_too() -> None:
    """Where no line of the user's lies between the model and the operation, it is torch's own."""
    kept = saved_activations(nn.Sequential(nn.Tanh()), (leaf(),))
    assert kept.rows[0].line.rpartition(":")[0].endswith("activation.py")


def test_all_nodes_that_saved_a_storage_are_named() -> None:
    """A storage saved through several views is one row, with each node."""
    row = the_row(saved_activations(views, (leaf(),)), op="aten.add")
    assert sorted(row.saved_by) == ["CosBackward0 (self)", "SinBackward0 (self)"]


def test_regions_are_named() -> None:
    """What a region holds has its name, and what a saved call in it stores has both."""
    kept = saved_activations(two_layers(lambda fn: recompute(fn, name="layer")), (leaf(),))
    assert the_row(kept, kind="region").held_by == ("layer",)
    row = the_row(saved_activations(region_with_a_saved_call, (leaf(),)), kind="region")
    assert row.held_by == ("layer / product",)
    assert row.saved_by == ("CosBackward0 (self)", "ExpBackward0 (result)")
    kept = saved_activations(CASES["two of torch's"].model(), (leaf(),))
    assert the_row(kept, kind="region").held_by == ("torch.utils.checkpoint",)


def test_internals_of_a_saved_call_are_named() -> None:
    """A tensor that is saved inside a saved call and not returned by it carries the names of call and region."""
    call = no_recompute(lambda x: x.sin().exp().sum(), name="inner")
    kept = saved_activations(recompute(lambda x: call(x + 1), name="outer"), (leaf(),))
    assert [(row.bytes, row.held_by) for row in kept.rows] == [(BLOCK, ("outer / inner",))]


def test_a_region_in_a_region_has_the_inner_name() -> None:
    """What an inner region inside a saved call of an outer one holds is the inner one's."""
    inner = recompute(lambda x: x.sin().cos(), name="inner")
    kept = saved_activations(recompute(lambda x: no_recompute(lambda x: inner(x + 1))(x), name="outer"), (leaf(),))
    assert the_row(kept, kind="region").held_by == ("inner",)


def escapes() -> Iterator[tuple[Callable[..., Any], str]]:
    """Ways past saved-tensor hooks, with the words that name each."""
    yield Stash.apply, "ctx.result of StashBackward"
    yield nn.Sequential(Cache()), "0.last"

    class Keeper:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = {"seen": (x + 1).detach()}
            return x.sin()

    yield Keeper(), f"{Keeper.__qualname__}.kept['seen']"
    hidden: list[torch.Tensor] = []

    def closure(x: torch.Tensor) -> torch.Tensor:
        hidden[:] = [x.detach(), (x + 1).detach()]
        return x.sin()

    yield closure, f"closure variable 'hidden' of {closure.__qualname__}[1]"

    def module_global(x: torch.Tensor) -> torch.Tensor:
        GLOBAL["x"] = (x + 1).detach()
        return x.sin()

    yield module_global, f"global 'GLOBAL' of {__name__}['x']"


GLOBAL: dict[str, torch.Tensor] = {}


def test_what_escapes_is_named() -> None:
    """Memory that no node saved is called escaped, with the operation that made it and the place that refers to it."""
    for model, name in escapes():
        if "GLOBAL" in name:
            gc.unfreeze()  # this module is older than its tests
        row = the_row(saved_activations(model, (leaf(),)), kind="escaped")
        assert row.bytes == BLOCK
        assert row.op in ("aten.exp", "aten.add", "aten.mul")
        assert name in row.held_by
    GLOBAL.clear()
    gc.freeze()


def test_a_reference_cycle_is_named() -> None:
    """Memory that only the garbage collector would free counts, and is called that."""

    def cyclic(x: torch.Tensor) -> torch.Tensor:
        garbage: list[Any] = [(x + 1).detach()]
        garbage.append(garbage)
        return x.sin()

    gc.collect()
    gc.disable()
    try:
        row = the_row(saved_activations(cyclic, (leaf(),)), kind="escaped")
    finally:
        gc.enable()
    assert row.bytes == BLOCK
    assert row.held_by[-1] == "a reference cycle, until the garbage collector runs"


def test_a_graph_behind_an_attribute_is_walked() -> None:
    """What the graph of a tensor saved that the model put aside, such as an auxiliary loss, is saved, not escaped."""

    class Auxiliary(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.loss = (x + 1).exp().sum()
            return x + 1

    kept = saved_activations(Auxiliary(), (leaf(),))
    assert {(row.bytes, row.kind, row.saved_by) for row in kept.rows} == {
        (BLOCK, "saved", ("ExpBackward0 (result)",)),
        (4, "escaped", ()),
    }
    assert the_row(kept, kind="escaped").held_by == ("loss",)


def test_a_node_without_its_graph_keeps_nothing() -> None:
    """A node that is put aside without the tensor may be gone while its object is left; nothing fails."""

    class Aside(nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            self.node = Stash.apply(x.detach().requires_grad_()).grad_fn
            return [(x + 1).sin(), self.node]

    kept = saved_activations(Aside(), (leaf(),))
    assert BLOCK in {row.bytes for row in kept.rows if row.saved_by == ("SinBackward0 (self)",)}


def test_a_result_of_any_class_leads_to_its_graph() -> None:
    """Tensors are found in a result that is no pytree."""

    class Output:
        def __init__(self, x: torch.Tensor) -> None:
            self.hidden = [{"last": x}]

    kept = saved_activations(lambda x: Output((x + 1).sin()), (leaf(),))
    assert [(row.bytes, row.kind) for row in kept.rows] == [(BLOCK, "saved")]
    assert kept.result_bytes == BLOCK


def test_an_argument_changed_in_place_leads_to_its_graph() -> None:
    """A forward that writes its result into an argument keeps what that needs."""

    def into(x: torch.Tensor, out: torch.Tensor) -> None:
        out.add_((x + 1).exp())

    kept = saved_activations(into, (leaf(), block()))
    assert [(row.bytes, row.kind) for row in kept.rows] == [(BLOCK, "saved")]


def test_what_was_there_before_costs_nothing_and_is_listed() -> None:
    """Parameters, buffers and inputs that are kept have a row of 0 bytes with their kind, name and nodes."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64).eval())
    existing = {(row.kind, row.module): row for row in saved_activations(model, (leaf(),)).existing}
    assert ("input", "argument 0") in existing
    assert ("buffer", "1.running_var") in existing
    assert "AddmmBackward0 (mat2)" in existing["parameter", "0.weight"].saved_by
    tied = saved_activations(Tied(), (torch.arange(8),)).existing
    assert [row.module for row in tied if row.kind == "parameter"] == ["embed.weight"]


def test_functions_name_the_modules_they_reach() -> None:
    """A plain function may be the model: paths are those of the module in its closure, or begin with its class."""
    one, other = mlp(nn.GELU()), nn.Sequential(nn.Tanh())
    assert set(saved_activations(lambda x: one(x).sin(), (leaf(),)).by_module()) == {"0", "1", "2"}
    assert set(saved_activations(lambda x: other(one(x)), (leaf(),)).by_module()) == {"Sequential.0", "Sequential.1"}


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [recompute, lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False)])
def test_nothing_is_replayed(wrap: Callable[..., Any]) -> None:
    """The function in a region runs once."""
    runs = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.shape)
        return x.sin().cos()

    saved_activations(lambda x: wrap(layer)(x + 1), (leaf(),))
    assert len(runs) == 1


def test_random_numbers_and_buffers_are_put_back() -> None:
    """Generators, running statistics and buffers that were replaced are as before; gradients are not touched."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))
            self.register_buffer("wide", torch.zeros(1).expand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps = self.steps + 1
            return x * self.steps + self.wide

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), Counting())
    model(leaf()).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    steps, state = model[3].steps, torch.default_generator.get_state()
    saved_activations(model, (leaf(),))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[3].steps is steps
    assert all(parameter.grad is grads[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(parameter.grad, values[name]) for name, parameter in model.named_parameters())
    assert torch.equal(state, torch.default_generator.get_state())


OWN = torch.Generator()


def test_a_generator_that_is_reached_is_put_back() -> None:
    """A function's own generator, and one among the arguments, are as before."""
    other = torch.Generator()
    states = OWN.get_state(), other.get_state()
    saved_activations(
        lambda x, g: x * torch.rand(64, generator=OWN) * torch.rand(64, generator=g), (leaf(),), {"g": other}
    )
    assert torch.equal(states[0], OWN.get_state())
    assert torch.equal(states[1], other.get_state())


def test_an_error_of_the_model_leaves_nothing() -> None:
    """An exception of the model comes through; hooks and modes are gone, and so are its tensors."""
    refs: list[weakref.ref[torch.Tensor]] = []

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(1)
            y = (x + 1).sin()
            refs.append(weakref.ref(y))
            raise ValueError("broken")

    state = torch.default_generator.get_state()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            saved_activations(nn.Sequential(nn.Tanh(), Broken()), (leaf(),))
        assert refs[0]() is None
    finally:
        gc.enable()
    assert torch.equal(state, torch.default_generator.get_state())
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert saved_activations(torch.exp, (leaf(),)).total_bytes == BLOCK


def test_modes_of_the_caller_do_not_matter() -> None:
    """Called under no_grad, in inference mode or while measuring, the rows are the same."""
    model = mlp(nn.GELU())
    x = leaf()
    plain = saved_activations(model, (x,)).rows
    with torch.no_grad():
        assert saved_activations(model, (x,)).rows == plain
    with torch.inference_mode():
        assert saved_activations(model, (x,)).rows == plain
    with measure():
        assert saved_activations(model, (x,)).rows == plain
    assert saved_activations(model, (), {"input": x}).rows == plain


def test_casts_of_autocast_count_each_time() -> None:
    """Under autocast the casts of weights are kept by the graph, and a second look finds the same bytes."""
    model, x = nn.Linear(64, 64, bias=False), leaf()
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (saved_activations(model, (x,)) for _ in range(2))
    assert first.total_bytes == second.total_bytes == 2 * BLOCK // 2
    assert first.result_bytes == BLOCK // 2


# --- without memory ---------------------------------------------------------------------------------------------------


def test_fake_and_meta_tensors_give_the_same_bytes() -> None:
    """A model that exists only in outline keeps the same bytes, of the same rows, as the real one."""

    def model() -> nn.Module:
        first, second = mlp(nn.GELU()), mlp(nn.ReLU())
        return nn.Sequential(first, nn.Dropout(), nn.BatchNorm1d(64), Region(second))

    class Region(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return recompute(self.inner)(x).softmax(-1)

    real = saved_activations(model(), (leaf(),))
    state = torch.default_generator.get_state()
    with FakeTensorMode():
        fake_model, x = model(), leaf()
        inside = saved_activations(fake_model, (x,))
    outside = saved_activations(fake_model, (x,))
    with torch.device("meta"):
        meta = saved_activations(model(), (leaf(),))
    assert torch.equal(state, torch.default_generator.get_state())
    for other in (inside, outside, meta):
        assert other.by_kind() == real.by_kind()
        assert other.by_module() == real.by_module()
        assert other.by_line() == real.by_line()
    assert real.total_bytes > 10 * BLOCK


def test_a_model_of_any_size() -> None:
    """A layer with gigabytes of activations is looked at without having them."""
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1024, requires_grad=True)
        kept = saved_activations(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), (x,))
    assert kept.total_bytes == 2 * (1 << 20) * 4096 * 4


# --- how it reads -----------------------------------------------------------------------------------------------------


def test_json_says_all_of_it() -> None:
    """The JSON holds the same rows and sums as the object."""
    kept = saved_activations(mlp(nn.GELU()), (leaf(),))
    plain = json.loads(kept.to_json())
    assert plain["total_bytes"] == kept.total_bytes == sum(row["bytes"] for row in plain["rows"])
    assert plain["by_kind"] == kept.by_kind()
    assert plain["result_bytes"] == kept.result_bytes
    assert [Row(**row).module for row in plain["rows"]] == [row.module for row in kept.rows]
    assert len(plain["existing"]) == len(kept.existing)


def test_the_table_groups_alike_layers() -> None:
    """Layers of a stack share a line of the table; its columns are aligned; the largest comes first."""
    kept = saved_activations(nn.Sequential(*(mlp(nn.GELU()) for _ in range(5))), (leaf(),))
    title, result, head, *lines = str(kept).splitlines()
    assert title == f"{errors.size(kept.total_bytes)} kept for backward in 14 tensors"
    assert result == f"{errors.size(BLOCK)} more as long as the output is alive"
    assert [line.split()[:5] for line in lines] == [
        ["327,680", "5", "x", "saved", "aten.addmm"],
        ["327,680", "5", "x", "saved", "aten.gelu"],
        ["65,536", "4", "x", "saved", "aten.addmm"],
    ]
    assert all(line[head.index("module") :].startswith("*.") for line in lines)
    assert "GeluBackward0 (self)" in lines[0]


def test_a_long_table_says_what_it_leaves_out() -> None:
    """Beyond 40 lines the rest is one line, with its bytes."""
    kept = saved_activations(lambda x: [torch.sin(x[:i] + 1) for i in range(1, 51)], (leaf(),))
    lines = str(kept).splitlines()
    assert len(lines) == 2 + 1 + 40 + 1
    assert lines[-1] == f"{sum(range(1, 11)) * 256:,} bytes more in 10 smaller tensors"
