"""`measure`: bytes worked out by hand for small programs, those of the allocator for larger ones, and nothing left."""

import copy
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from laws.watch import no_collector, on_threads
from support.acted import ActedAllocator
from support.blocks import BLOCK, block
from support.models import Made
from support.zoo import each_row
from support.zoo_rows import Row, Steps, allocated
from torch_recompute import saved_activations, simulate
from torch_recompute._torch import storages
from torch_recompute._torch.storages import cpu_allocations
from torch_recompute.memory import CATEGORIES, Measurement, measure, operations

KIB = 1024


# --- programs whose bytes are known by hand ---------------------------------------------------------------------------


@dataclass
class Program:
    """What to run, the blocks alive at its peak, and those alive at its end while its result is held."""

    run: Callable[[], object]
    peak: float
    live: float


def resized(*, comes_back: bool) -> object:
    """Two blocks, of which one is freed behind the operators' back, and the other made then, or one is taken again."""
    x, y = block(), block() if comes_back else None
    x.untyped_storage().resize_(0)
    if comes_back:
        x.untyped_storage().resize_(BLOCK)
    return x, y, None if comes_back else block()


def set_to_another() -> object:
    """A block that leaves its own storage for the other's."""
    x, y = block(), block()
    return x, y.set_(x)


def views() -> object:
    """Any number of views of one block."""
    x = block()
    return x, x.view(-1), x[3:], x.t(), x.detach(), x.expand(2, 64, 64)


def product() -> torch.Tensor:
    """Saves both factors."""
    return (block(requires_grad=True) * block(requires_grad=True)).sum()


def freed_by_backward() -> torch.Tensor:
    """What was saved is gone, the gradient is there."""
    x = block(requires_grad=True)
    x.sin().sin().sum().backward()
    return x


def deep_copies() -> object:
    """Tensors over one block are copied over one; each is an empty scalar before it is put there."""
    x = block()
    return x, copy.deepcopy([x, x[3:], x])


SCALAR = 4 / BLOCK
PROGRAMS = {
    "views": Program(views, 1, 1),
    "chain of temporaries": Program(lambda: block().sin().cos().exp(), 2, 1),
    "in place": Program(lambda: block().sin_().add_(1).mul_(2), 1, 1),
    "a tensor grows": Program(lambda: block().resize_(128, 64), 3, 2),  # the old memory is there until it is copied
    "a storage is emptied": Program(lambda: resized(comes_back=False), 1, 1),
    "a storage comes back": Program(lambda: resized(comes_back=True), 2, 2),
    "a view keeps its whole base": Program(lambda: block()[0, 0], 1, 1),
    "set to another storage": Program(set_to_another, 2, 1),
    # The graph holds the leaf, to accumulate into it, and the saved result; of the sum, only the scalar.
    "softmax": Program(lambda: block(requires_grad=True).softmax(-1).sum(), 2 + SCALAR, 2 + SCALAR),
    # Both factors are leaves and saved; the product itself is not.
    "product": Program(product, 3 + SCALAR, 2 + SCALAR),
    # Inside the second sine's backward: x, sin x, its cosine, the product; the loss and its gradient are scalars.
    "freed by backward": Program(freed_by_backward, 4 + 2 * SCALAR, 2),
    "made outside of operators": Program(
        lambda: (torch.from_numpy(np.ones((64, 64), np.float32)), torch.tensor([1.0] * 4096)), 2, 2
    ),
    "deep copies": Program(deep_copies, 2 + SCALAR, 2),
}


@pytest.fixture(params=PROGRAMS, ids=str)
def program(request: pytest.FixtureRequest) -> Program:
    """Each program in turn, after a first measurement: PyTorch makes a reference cycle when a process has its first."""
    with measure():
        block()
    return PROGRAMS[request.param]


def test_bytes_by_hand(program: Program) -> None:
    """Peak and live bytes are those counted by hand; all figures agree; what is given up is free without the gc."""
    with no_collector():
        with measure() as m:
            kept = program.run()
            inside = m.on()
        after = m.on()
        assert (m.peak_bytes / BLOCK, m.live_bytes / BLOCK) == (program.peak, program.live)
        assert inside == after
        assert list(after.by_category) == list(after.live_by_category) == list(CATEGORIES)
        assert sum(after.by_category.values()) == after.peak_bytes
        assert sum(after.live_by_category.values()) == after.live_bytes <= after.peak_bytes
        assert max(sample.live_bytes for sample in after.timeline) == after.peak_bytes
        assert [sample.event for sample in after.timeline] == sorted({sample.event for sample in after.timeline})
        del kept
        assert m.live_bytes == 0


def test_nesting(program: Program) -> None:
    """A measurement inside another sees what it would see alone, and so does the outer one."""
    with measure() as outer:
        first = block()
        with measure() as inner:
            kept = program.run()
        alone = inner.on()
        between = outer.live_bytes
    assert (alone.peak_bytes / BLOCK, alone.live_bytes / BLOCK) == (program.peak, program.live)
    assert outer.peak_bytes == BLOCK + alone.peak_bytes
    assert between == BLOCK + alone.live_bytes
    del first, kept


# --- the allocator as referee -----------------------------------------------------------------------------------------


def allocator(path: Path, run: Callable[[], object]) -> tuple[int, int, object]:
    """Peak and final bytes of `run` by the CPU allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak, live, result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(4, 16, 32))


def checkpointed(inner: nn.Module) -> nn.Module:
    """Without the generator's state, 5,056 bytes that no operator returns."""
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return Made(lambda m, x: checkpoint(m.inner, x, **options), inner=inner)


def mlp() -> nn.Module:
    """The usual two layers."""
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear_relu": lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()),
    "mlp": mlp,
    "attention": Attention,
    "softmax": lambda: nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1)),
    "checkpointed": lambda: nn.Sequential(*(checkpointed(mlp()) for _ in range(3))),
    "shared": lambda: nn.Sequential(*[nn.Linear(32, 32)] * 3),
}


@pytest.fixture(params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Each model in turn, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.mark.parametrize("step", ["backward", "accumulate", "sgd", "adamw"])
def test_allocator_agrees(model: nn.Module, step: str, tmp_path: Path) -> None:
    """Peak and live bytes are those of the CPU allocator's events, from forward to the optimizer."""
    x = torch.ones(4, 16, 32)
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }.get(step, lambda: None)()

    def run() -> Measurement:
        with measure() as m:
            model(x).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
        return m

    if step == "accumulate":
        model(x).square().sum().backward()
    peak, live, m = allocator(tmp_path / "trace.json", run)
    assert isinstance(m, Measurement)
    assert m.live_bytes == live
    # Some kernels (layer norm's backward, the flash kernel) hold a workspace that no operator returns.
    assert m.peak_bytes <= peak <= m.peak_bytes + 8 * KIB


def test_what_a_module_comes_to_hold_counts() -> None:
    """Also a tensor that no operation made, as a random state, and as often as the module replaces it."""

    def keep(module: Any) -> None:
        module.state = torch.get_rng_state()

    model, size = Made(keep), torch.get_rng_state().nbytes
    with measure(model) as memory:
        assert memory.live_bytes == 0
        for _ in range(2):
            model()
            assert memory.live_by_category["other"] == memory.live_bytes == size


@each_row
def test_measure_is_what_the_allocator_says(row: Row) -> None:
    """Over the zoo the peak is that of the allocator's own events."""
    found, said = row.measured.peak_bytes, allocated(row.build)
    assert said * 0.995 <= found <= said * 1.005


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_a_weight_that_is_computed_in_every_forward(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The measured peak is that of the allocator's own events, which see the weight and what it is computed from."""

    def made() -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(64, 64)), nn.GELU(), norm(nn.Linear(64, 64))), {"input": torch.ones(8, 64)}

    found, said = Steps(*made()).measured().peak_bytes, allocated(made)
    assert said * 0.995 <= found <= said * 1.005


INDICES = torch.tensor([[3, 1], [0, 2], [1, 1]])
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda x: x.gather(1, INDICES),
    "index": lambda x: x[INDICES[:, 0]],
    "mask": lambda x: x[torch.arange(64) % 2 == 0],
    "index_select": lambda x: x.index_select(0, INDICES[0]),
    "take": lambda x: x.take(INDICES),
    "max": lambda x: x.max(1)[0],
    "trace": lambda x: x.trace(),
    "weighted logits": lambda x: nn.functional.binary_cross_entropy_with_logits(
        x, HALVES, HALVES[0], pos_weight=HALVES
    ),
    "linear of a view": lambda x: x.sum() + WIDE(x.detach().view(8, 8, 256).mT.contiguous().mT).sum(),
    # The engine sums the gradients of what is used more than once.
    "twice": lambda x: twice(x * 1, lambda y: y * 3),
    "three times": lambda x: twice(x * 1, lambda y: twice(y, lambda y: y * 3)),
    "both sides of a sum": lambda x: twice(x * 1, lambda y: (y + y) * 3),
    "turned": lambda x: twice(x * 1, lambda y: y.mT * 3),
    "in halves": lambda x: twice(x * 1, lambda y: torch.cat(y.chunk(2)[::-1])),
    "in another type": lambda x: twice(x * 1, lambda y: y.bfloat16().sin().float()),
    "one number for all": lambda x: twice(x * 1, torch.sum),
    "a formula that adds": lambda x: twice(x * 1, lambda y: torch.atan2(y, y + 2)),
    "a gradient that is held": lambda x: twice(x * 1, held),
}
WIDE = nn.Linear(256, 1024).requires_grad_(False)
HALVES = torch.full((64, 256), 0.5)


def twice(y: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The sums of two functions of a tensor, which keep nothing: the peak is where their gradients are added."""
    return torch.stack([call(y).sum(), (y * 2).sum()])


def held(y: torch.Tensor) -> torch.Tensor:
    """A sum whose gradient, which is that of its parts too, is held by a hook while others are added."""
    found: list[torch.Tensor] = []

    def check(_: torch.Tensor) -> None:
        assert len(found) == 2
        assert torch.equal(*found)
        found.clear()

    cosine, total = y.cos(), y + 1
    total.register_hook(lambda grad: found.extend((grad, grad.clone())))
    y.register_hook(check)
    return total * 3 + cosine


class Scatters(torch.autograd.Function):
    """Copies; its backward, in Python, scatters into a copy of zeros and uses the zeros again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(grads[0].shape)
        return grads[0] + zeros.scatter(0, torch.zeros(1, 256, dtype=torch.long), 1.0) + zeros


def hooked(x: torch.Tensor) -> torch.Tensor:
    """Has a hook that scatters into a copy of zeros and uses the zeros again, between nodes of PyTorch's own."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(grad)
        return grad + zeros.index_fill(0, INDICES[0], 1.0) + zeros

    y = x * 2
    y.register_hook(hook)
    return y


def assert_peak_of_plain_events(step: Callable[[], torch.Tensor]) -> None:
    """Measures a step, whose peak has to be that of the allocator's events in a plain one; its result is the same."""
    wanted = step()
    peak = max(accumulate(cpu_allocations(step), initial=0))
    with measure() as m:
        assert torch.equal(step(), wanted)
    assert abs(m.peak_bytes - peak) <= 64  # numbers that become tensors do not count


@pytest.mark.parametrize("name", [*FORMULAS, "function of the user", "hook"])
def test_formulas_write_where_a_plain_step_writes(name: str) -> None:
    """PyTorch copies less where no mode is on; the measured peak is that of the plain step's events."""
    call = {**FORMULAS, "function of the user": Scatters.apply, "hook": hooked}[name]
    x = torch.linspace(0, 1, 64 * 256).view(64, 256).requires_grad_()

    def step() -> torch.Tensor:
        call(x).square().mean().backward()
        grad, x.grad = x.grad, None
        assert grad is not None
        return grad

    assert_peak_of_plain_events(step)


def test_references_are_counted_alike_wherever_a_process_begins() -> None:
    """What tells a sum in place is the same in any mode, in backward, and where Dynamo evaluates frames."""
    fresh: Any = operations._uses_of_a_sum.__wrapped__  # pyright: ignore[reportPrivateUsage]
    wanted, found = fresh(), list[Any]()
    for around in (
        torch.inference_mode(),
        torch.device("meta"),
        FakeTensorMode(),
        torch.autograd.set_detect_anomaly(True),
    ):
        with around:
            found.append(fresh())
    y = torch.ones(2, requires_grad=True) * 2
    y.register_hook(lambda _: found.append(fresh()))
    y.sum().backward()
    torch.vmap(lambda x: found.append(fresh()) or x)(torch.ones(2))
    torch._dynamo.run(lambda: found.extend(fresh() for _ in range(20)))()
    assert set(found) == {wanted}
    y = torch.ones(2)
    references, memories, objects = storages.uses((y,))
    held = y
    assert storages.uses((held,)) == (references, memories, objects + 1)


def test_an_event_of_older_memory_with_the_size_of_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may tell that older memory is freed with the size of what was there before: that is not the new."""
    tell = cpu_allocations
    monkeypatch.setattr(storages, "cpu_allocations", lambda call: [*tell(call), -2 * BLOCK])
    with measure() as m:
        kept = PROGRAMS["a tensor grows"].run()
    assert (m.peak_bytes / BLOCK, m.live_bytes / BLOCK) == (3, 2)
    del kept


def test_measuring_changes_neither_values_nor_bytes(tmp_path: Path) -> None:
    """Where no tensor is used twice, a step allocates and computes the same with and without a measurement."""
    torch.manual_seed(0)
    net, x = mlp(), torch.ones(4, 16, 32)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        net(x).sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        return gradients

    def measured() -> list[torch.Tensor]:
        with measure(net):
            return run()

    run()
    *plain_bytes, plain = allocator(tmp_path / "plain.json", run)
    *measured_bytes, watched = allocator(tmp_path / "measured.json", measured)
    assert plain_bytes == measured_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


# --- what the bytes are for -------------------------------------------------------------------------------------------


def categories(**blocks: float) -> dict[str, float]:
    """All categories, zero where nothing is said."""
    return dict.fromkeys(CATEGORIES, 0) | blocks


def in_blocks(figures: dict[str, int]) -> dict[str, float]:
    """Bytes in units of a block."""
    return {name: count / BLOCK for name, count in figures.items()}


def layers() -> nn.Module:
    """Two 64x64 matrices without bias, a buffer, and a relu: every tensor is one block."""
    first, second = (nn.Linear(64, 64, bias=False) for _ in range(2))
    return Made(lambda m, x: m.second((m.first(x) + m.shift).relu()), {"shift": block()}, first=first, second=second)


def test_categories_in_forward() -> None:
    """Parameters and buffers count from the start; a linear layer and a relu between them save one block."""
    net, x = layers(), block()
    with measure(net) as m:
        start = m.live_by_category
        y = net(x)
    assert in_blocks(start) == categories(parameters=2, buffers=1)
    # Saved: the relu's result, once, by the relu and by the second layer. y is held here.
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, activations=2)
    del y
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)


def test_categories_in_backward() -> None:
    """Gradients are gradients already at the peak, though they became `.grad` after it."""
    net, x = layers(), block()
    with measure(net) as m:
        net(x).backward(block())
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, gradients=2)
    # At the relu: its result, y and the gradient of y (held by this caller), the gradients after and before the relu.
    assert in_blocks(m.by_category) == categories(parameters=2, buffers=1, gradients=1, activations=5)


def test_gradients_that_exist() -> None:
    """A `.grad` from before counts from the start; accumulating into it makes one that passes and adds none."""
    net, x = layers(), block()
    net(x).backward(block())
    with measure(net) as m:
        assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, gradients=2)
        net(x).backward(block())
        assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, gradients=2)
        net.zero_grad()
        assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)


def test_gradients_released_by_a_hook() -> None:
    """A gradient that the user's own hook gives up at once, before ours could look, was a gradient all the same."""
    net, x = layers(), block()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with measure(net) as m:
        net(x).backward(block())
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)
    assert in_blocks(m.by_category) == categories(parameters=2, buffers=1, gradients=1, activations=4)


def test_gradients_by_assignment() -> None:
    """Gradients taken with `autograd.grad`, or assigned by hand, are gradients."""
    net, x = layers(), block()
    with measure(net) as m:
        gradients = torch.autograd.grad(net(x).sum(), tuple(net.parameters()))
        assert in_blocks(m.live_by_category)["gradients"] == 2
        del gradients
        net.first.weight.grad = block()
        assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, gradients=1)


@pytest.mark.parametrize("foreach", [False, True])
def test_adam(foreach: bool) -> None:
    """Adam keeps two blocks per parameter and a step counter; what its step allocates is the optimizer's too."""
    net, x = layers(), block()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    net(x).backward(block())
    with measure(net, optimizer) as m:
        optimizer.step()
    counters = 2 * 4 / BLOCK
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1, gradients=2, optimizer=4 + counters)
    assert m.by_category["activations"] == 0
    # Beside the states: the square root of the second moment and its quotient for one parameter, or for all of them.
    assert in_blocks(m.by_category)["optimizer"] > 4 + counters
    with measure(optimizer=optimizer) as again:
        assert in_blocks(again.live_by_category) == categories(parameters=2, gradients=2, optimizer=4 + counters)


def test_model_made_inside() -> None:
    """A model that the block makes is renamed from activations to parameters when it is tracked."""
    with measure() as m:
        net = layers()
        assert in_blocks(m.live_by_category) == categories(activations=3)
        m.track(net)
        assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)


def test_a_tensor_by_name() -> None:
    """A tensor from before counts as "other" when named, once under all its views, and not at all when not."""
    x, y = block(), block()
    with measure().track(x, x.t(), x[1:]) as m:
        z = (x + y.view(4096).view(64, 64)) + y
    assert in_blocks(m.live_by_category) == categories(other=1, activations=1)
    del z


def test_tied_weights_count_once() -> None:
    """A parameter that two modules share, or that the optimizer names too, is one storage."""
    net = layers()
    net.second.weight = net.first.weight
    with measure(net, torch.optim.SGD(net.parameters())) as m:
        pass
    assert in_blocks(m.live_by_category) == categories(parameters=1, buffers=1)


def test_checkpoint_moves_the_peak() -> None:
    """What `torch.utils.checkpoint` drops is not there after forward, and its replay inside backward is seen."""
    net = nn.Sequential(*(layers() for _ in range(4)))
    x = block()
    with measure(net) as plain:
        net(x).backward(block())
    with measure(net) as m:
        y = x.requires_grad_()
        for layer in net:
            y = checkpoint(layer, y, use_reentrant=False)
        assert in_blocks(m.live_by_category)["activations"] == 4
        events = len(m.timeline)
        y.backward(block())
        assert len(m.timeline) > events
    assert m.by_category["activations"] < plain.by_category["activations"]


# --- other tensors, other threads -------------------------------------------------------------------------------------


def test_wrapper_subclass_stands_for_its_parts() -> None:
    """A nested tensor's bytes are those of its values and offsets."""
    with measure() as m:
        nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
        values = nested.values()
    assert m.live_bytes == values.untyped_storage().nbytes() + nested.offsets().untyped_storage().nbytes()


def test_gradients_of_a_nested_tensor_are_summed() -> None:
    """Those of a nested tensor that is used twice are added in memory of their own, as the plain step's events say."""
    values, offsets = torch.linspace(0, 1, 64 * 256).view(64, 256).requires_grad_(), torch.tensor([0, 24, 64])

    def step() -> torch.Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, offsets).sin()
        (x + x.exp()).values().sum().backward()
        grad, values.grad = values.grad, None
        assert grad is not None
        return grad

    assert_peak_of_plain_events(step)


def test_zeros_that_are_never_allocated() -> None:
    """The zeros that stand for a tangent take no memory, measured, simulated or kept for backward."""
    model, x = Made(lambda _, x: x * torch._efficientzerotensor((256,)) + x.exp()), torch.randn(256)
    x.requires_grad_()
    with measure(model).track(x) as memory:
        model(x)
    assert memory.peak_bytes == 3 * x.nbytes  # x, its exponential, and the copy of that which is the sum with zeros
    assert simulate(model, (x,), loss=torch.sum).saved_bytes == 2 * x.nbytes + 4  # and the loss
    assert saved_activations(model, x).total_bytes == x.nbytes


def test_sparse_gradient() -> None:
    """A tensor without a storage of its own does no harm."""
    table = nn.Embedding(100, 8, sparse=True)
    with measure(table) as m:
        table(torch.tensor([1, 2, 1])).sum().backward()
    assert m.live_bytes >= m.live_by_category["parameters"] == 100 * 8 * 4


def test_devices_have_books_of_their_own() -> None:
    """Devices are counted apart: the busiest accelerator is shown, any other can be asked for."""
    with FakeTensorMode():
        with measure() as m:
            x, y, z = block(), block(device="cuda:1"), torch.ones(128, 64, device="cuda:1")
        assert m.devices == (x.device, y.device)
        assert (m.device, m.peak_bytes) == (y.device, 3 * BLOCK)
        assert m.on("cpu").peak_bytes == BLOCK
        del z
        assert m.on("cuda").live_bytes == BLOCK
        with measure(device="cpu") as m:
            x, y = block(), block(device="cuda:1")
        assert (m.device, m.peak_bytes) == (torch.device("cpu"), BLOCK)
    assert m.on("cuda:7").peak_bytes == 0
    assert m.allocator_peak_bytes is None
    assert m.reserved_peak_bytes is None


def test_allocated_against_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device's peaks of bytes handed out and of bytes held are its own, and a nested measurement ends neither."""
    allocator = ActedAllocator(monkeypatch)
    allocator.hold(0, 70, 90)
    allocator.hold(0, 10, 90)
    with measure() as outer:
        allocator.hold(0, 50, 96)
        allocator.hold(1, 7, 8)
        allocator.hold(0, 20, 96)
        with measure() as m:
            allocator.hold(0, 30, 64)
            inside = m.on("cuda:0")
        allocator.hold(0, 40, 128)
    assert (inside.allocator_peak_bytes, inside.reserved_peak_bytes) == (30, 96)
    assert m.on("cuda:0")[-2:] == (30, 96)
    assert outer.on("cuda:0")[-2:] == (50, 128)
    assert outer.on("cuda:1")[-2:] == (7, 8)
    with FakeTensorMode(), measure() as m:
        x = block(device="cuda:1")
    assert (m.device, m.allocator_peak_bytes, m.reserved_peak_bytes) == (x.device, 7, 8)
    assert repr(m).endswith("; the allocator 7, of 8 reserved>")


def test_storages_that_die_on_another_thread() -> None:
    """Deaths on other threads, in the middle of operations here, are all booked."""
    with measure() as m:
        boxes = [[block()] for _ in range(200)]
        thread = threading.Thread(target=lambda: [box.clear() for box in boxes])
        thread.start()
        for _ in range(200):
            block().add_(1)
        thread.join()
    assert m.live_bytes == 0
    assert 200 * BLOCK <= m.peak_bytes <= 201 * BLOCK


def test_measurements_on_two_threads() -> None:
    """Two threads measure at the same time and each sees its own operations only."""
    peaks: dict[int, int] = {}

    def work(size: int) -> None:
        with measure() as m:
            for _ in range(50):
                torch.ones(size).sin()
        peaks[size] = m.peak_bytes

    on_threads(work, 1000, 3000)
    assert peaks == {1000: 8000, 3000: 24000}


def test_measurements_that_overlap_leave_the_compiler_as_it_was() -> None:
    """Of two threads' measurements the one that began first ends first; the compiler is off while one of them lasts."""
    begun, ended, frames = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        with measure():
            begun.set()
            ended.wait()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(1)
        return graph.forward

    run = torch.compile(lambda x: x.sin(), backend=backend)
    thread = threading.Thread(target=other)
    with measure():
        thread.start()
        begun.wait()
    run(torch.ones(4))
    compiled_within = len(frames)
    ended.set()
    thread.join()
    run(torch.ones(4))
    assert (compiled_within, len(frames)) == (0, 1)


# --- nothing stays ----------------------------------------------------------------------------------------------------


def test_no_cycle_and_no_hook_stays() -> None:
    """Model, optimizer, tensors and the measurement itself die without the garbage collector."""
    with no_collector():
        net = layers()
        optimizer = torch.optim.AdamW(net.parameters())
        with measure(net, optimizer) as m:
            y = net(block())
            y.sum().backward()
            optimizer.step()
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in net.parameters())
        watched = [weakref.ref(thing) for thing in (net, net.first.weight, optimizer, y, m)]
        del y, optimizer, net
        assert m.live_bytes == 0
        del m
        assert [reference() for reference in watched] == [None] * len(watched)


def test_exception_inside() -> None:
    """An exception passes through, the mode and the hooks are gone, and the figures so far are there."""
    net = layers()

    def breaks(m: Measurement) -> None:
        with m:
            net(block())
            raise ZeroDivisionError

    m = measure(net)
    with pytest.raises(ZeroDivisionError):
        breaks(m)
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)
    assert m.peak_bytes > 3 * BLOCK
    samples = len(m.timeline)
    net(block()).sum().backward()
    assert len(m.timeline) == samples
    assert in_blocks(m.live_by_category) == categories(parameters=2, buffers=1)


def test_after_the_block() -> None:
    """After the block no birth is counted, and every death is."""
    with measure() as m:
        x = block()
    y = x + 1
    assert m.live_bytes == m.peak_bytes == BLOCK
    x.untyped_storage().resize_(0)
    assert m.live_bytes == 0
    del y


def test_repr_says_the_peak() -> None:
    """The measurement prints as its device, its peak and what the peak was for."""
    net = layers()
    with measure(net) as m:
        pass
    assert repr(m) == "<measurement on cpu: peak 49,152 bytes (parameters 32,768, buffers 16,384)>"


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_allocator_agrees() -> None:
    """On CUDA the books and the allocator differ by rounding and library workspaces only, also when nested."""
    torch.manual_seed(0)
    net = nn.Sequential(*(mlp() for _ in range(4))).cuda()
    x = torch.ones(64, 64, 32, device="cuda")
    net(x).sum().backward()
    net.zero_grad()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    with measure() as outer:
        big = torch.empty(64 * KIB * KIB, dtype=torch.uint8, device="cuda")
        del big
        with measure() as m:
            net(x).sum().backward()
    allocator_peak = m.allocator_peak_bytes
    assert m.device == x.device
    assert allocator_peak is not None
    assert m.peak_bytes <= allocator_peak - base <= m.peak_bytes * 1.05 + KIB * KIB
    assert (m.reserved_peak_bytes or 0) >= allocator_peak
    assert outer.allocator_peak_bytes == base + 64 * KIB * KIB
    assert outer.peak_bytes == 64 * KIB * KIB


@pytest.mark.gpu
def test_host_memory_is_not_device_memory() -> None:
    """A tensor moved to the host leaves the device's books and enters the host's."""
    with measure() as m:
        x = block(device="cuda")
        y = x.cpu()
        del x
    assert (m.live_bytes, m.on("cpu").live_bytes) == (0, BLOCK)
    del y
