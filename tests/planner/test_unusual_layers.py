"""Models with unusual layers are planned: sizes that depend on values, kernels' own savings, parametrizations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models import Made
from torch_recompute import Profile, apply, make_plan, measure, profile, simulate, solve
from torch_recompute._torch.fakes import FakeTensor, FakeTensorMode
from torch_recompute.memory import workspaces
from torch_recompute.memory.cuda_kernels import kept_by_cublas
from torch_recompute.memory.operations import Operations
from torch_recompute.plan.plan import Choice, Plan
from torch_recompute.planner.cost import peak
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.solve import choose
from torch_recompute.simulation.fake_mode import FakeMode
from torch_recompute.simulation.training_step import TrainingStep

WIDTH = 16
Change = Callable[[torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """Two linear layers around something."""

    def __init__(self, middle: nn.Module | Change) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.middle(self.first(x))
        return self.last(made[0] if isinstance(made, tuple) else made).square().mean()


class Complex(nn.Module):
    """Layers that take and return complex numbers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in "ab"), Magnitude()) for _ in "abc"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.cfloat)
        for layer in self.layers:
            x = layer(x)
        return x.abs().square().mean()


class Magnitude(nn.Module):
    """Divides by one more than the magnitude."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + x.abs())


def batched() -> nn.Module:
    """A batch norm over a view with the channels in front."""
    return Made(lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(WIDTH))


def every_other(x: torch.Tensor) -> torch.Tensor:
    """Picks by a mask made of an activation, which holds for every other one."""
    with torch.no_grad():
        wanted = x.detach().argsort(-1).argsort(-1) % 2 == 0
    return x[wanted].view(*x.shape[:-1], -1).repeat(1, 1, 2)


def unpadded(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows that are kept, with as much padding as the longest needs, as Longformer's global attention."""
    lengths = kept.long().sum(1)
    inside = torch.arange(lengths.max()) < lengths[:, None]
    made = x.new_zeros(*inside.shape, x.shape[2])
    made[inside.nonzero(as_tuple=True)] = x[kept.nonzero(as_tuple=True)]
    return made


def first_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows by a mask that is added to scores, made of lengths."""
    mask = (torch.arange(x.shape[1]) < torch.tensor([[300], [40], [512], [7]])).long()
    return unpadded(x, (1.0 - mask) * torch.finfo(x.dtype).min == 0)


def alternating_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows by a mask of unknown values, which holds for every other one."""
    return unpadded(x, (torch.arange(float(4 * 512)) % 2 == 0).view(4, 512))


def matched(x: torch.Tensor) -> torch.Tensor:
    """Rows in an order that a library other than PyTorch chooses."""
    order = x.detach().cpu().numpy().sum((1, 2)).argsort()
    return x[torch.as_tensor(order.copy())]


def positive(x: torch.Tensor) -> torch.Tensor:
    """Matrices that are positive definite."""
    return x @ x.mT + 4 * torch.eye(x.shape[-2])


SQUARE = (4, WIDTH, WIDTH)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: Around(nn.LSTM(WIDTH, WIDTH, batch_first=True)), (4, 8, WIDTH)),
    "lstm of two layers, both ways": (lambda: Around(nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True)), (8, 4, WIDTH)),
    "gru": (lambda: Around(nn.GRU(WIDTH, WIDTH)), (8, 4, WIDTH)),
    "mask of an activation": (lambda: Around(every_other), (4, 8, WIDTH)),
    "unpadded by lengths": (lambda: Around(first_rows), (4, 512, WIDTH)),
    "unpadded by unknown values": (lambda: Around(alternating_rows), (4, 512, WIDTH)),
    "matcher": (lambda: Around(matched), (4, 8, WIDTH)),
    "cholesky": (lambda: Around(lambda x: torch.linalg.cholesky(positive(x))), SQUARE),
    "inverse": (lambda: Around(lambda x: torch.linalg.inv(positive(x))), SQUARE),
    "solve": (lambda: Around(lambda x: torch.linalg.solve(positive(x), x)), SQUARE),
    "determinant": (lambda: Around(lambda x: x * torch.linalg.slogdet(positive(x))[1][:, None, None]), SQUARE),
    "complex layers": (lambda: Complex(), (4, 8, WIDTH)),
    "batch norm of a view": (lambda: Around(batched()), (4, 50, WIDTH)),
    "spectral norm": (lambda: Around(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), (4, 8, WIDTH)),
    "spectral norm by hooks": (lambda: Around(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))), (4, 8, WIDTH)),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and its input."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(shape)


def loss(out: torch.Tensor) -> torch.Tensor:
    """The models return theirs."""
    return out


def stepped(model: nn.Module, x: torch.Tensor) -> tuple[int, list[Any]]:
    """The measured peak of a step, and its gradients."""
    torch.manual_seed(1)
    with measure(model).track(x) as m:
        model(x).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return m.peak_bytes, gradients


@pytest.mark.parametrize("name", MODELS)
def test_it_is_planned_and_the_promise_is_kept(name: str) -> None:
    """A plan is made, its peak is the measured one, the gradients are bitwise those of the plain step."""
    model, x = made(name)
    stepped(model, x)  # vectors of a spectral norm settle in pairs of steps that are compared
    copy, _ = made(name)
    stepped(copy, x)  # a weight that hooks compute is memory of its own from then on
    copy.load_state_dict(model.state_dict())
    plan = make_plan(model, (x,), budget=0.3, loss=loss, hold_output=False)
    simulated = simulate(model, (x,), loss=loss, hold_output=False).peak_bytes
    peak, wanted = stepped(model, x)
    apply(copy, plan)
    planned, gradients = stepped(copy, x)
    # the gradients of a bidirectional LSTM's biases are one tensor for fakes, and two for the kernel
    assert simulated == pytest.approx(peak, rel=0.005)
    assert plan.predicted_peak_bytes == pytest.approx(planned, rel=0.005)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("name", ["spectral norm", "spectral norm by hooks", "batch norm of a view"])
def test_buffers_stay_as_they_are(name: str) -> None:
    """A weight that is computed when it is asked for is not asked for: planning leaves its vectors alone."""
    model, x = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    make_plan(model, (x,), budget=0.3, loss=loss)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.long, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [8, 4096])
def test_a_mask_is_counted_as_it_is_indexed(kind: torch.dtype, rows: int) -> None:
    """Every other entry of a mask of unknown values holds, in whatever type it is summed."""
    counted: list[tuple[int, int, float]] = []
    note = counted.append  # a list that the loss reached would be as before afterwards

    def hits(x: torch.Tensor) -> torch.Tensor:
        hit = x[:, 0] > 0
        note((int(hit.to(kind).sum().long()), len(x[hit]), float(hit.to(torch.float32).mean())))
        return x.sum()

    for _ in range(2):  # the second time operations are answered from what is remembered
        simulate(nn.Linear(WIDTH, WIDTH), (torch.ones(rows, WIDTH),), loss=hits)
    assert set(counted) == {(rows // 2, rows // 2, 0.5)}


@pytest.mark.parametrize("plan", [Plan(), Plan((Choice(("1",)),))])
def test_a_jagged_batch_is_simulated(plan: Plan) -> None:
    """A batch of sequences of several lengths in one nested tensor takes what it takes in a step, plain and planned."""
    layers = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3))
    model, values = nn.Sequential(*layers), torch.randn(96, WIDTH)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 20, 96]))

    def mean(out: torch.Tensor) -> torch.Tensor:
        return out.values().square().mean()

    found = simulate(model, x, loss=mean, plan=plan, hold_output=False)
    apply(model, plan)
    with measure(model).track(x) as real:
        mean(model(x)).backward()
    assert found.peak_bytes == real.peak_bytes


def test_layers_that_exchange_a_jagged_batch_are_planned() -> None:
    """Residual layers between which a nested tensor goes are tried, and the plan's peak is that of the step."""
    made = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(6))
    layers = (Made(lambda module, x: x + module.inner(x), inner=inner) for inner in made)
    model, values = nn.Sequential(*layers), torch.randn(96, WIDTH)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 20, 96]))

    def mean(out: torch.Tensor) -> torch.Tensor:
        return out.values().square().mean()

    plan = make_plan(model, x, loss=mean, budget=0.3, hold_output=False)
    assert plan.choices
    apply(model, plan)
    with measure(model).track(x) as real:
        mean(model(x)).backward()
    assert plan.predicted_peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)


def guarded(out: torch.Tensor) -> torch.Tensor:
    """A loss that refuses what is not finite, and leaves it out."""
    value = out[~out.isnan()].square().mean()
    if out.isinf().any() or value.isnan() or value.isinf():
        raise ValueError("the loss is not finite")
    return value


@pytest.mark.parametrize("detects", [False, True])
def test_no_element_is_found_to_be_not_a_number(detects: bool) -> None:
    """A guard against values that are not finite passes, that of anomaly detection too, and a mask of them is empty."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(64, WIDTH)
    with torch.autograd.set_detect_anomaly(detects):
        found = simulate(model, x, loss=guarded, hold_output=False)
        for _ in range(2):
            with measure(model).track(x) as real:
                guarded(model(x)).backward()
            model.zero_grad()
    assert found.peak_bytes == real.peak_bytes
    assert "aten.isnan holds nowhere" in found.assumed


def test_a_deep_copy_in_a_forward_takes_one_copy_of_each_storage() -> None:
    """A simulated tensor is copied as a real one: once, with its views, its flag and its class."""

    def copied(m: Any, x: torch.Tensor) -> torch.Tensor:
        part, one, other, layer = copy.deepcopy([x[:, :4], x, x, m.up])
        assert one is other
        assert not one.requires_grad
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.requires_grad
        return part.sum() + layer(one.mul_(2)).sum()

    def cloned(m: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (nn.Parameter(p.detach().clone()) for p in (m.up.weight, m.up.bias))
        one = x.clone()
        return one[:, :4].sum() + F.linear(one.mul_(2), weight, bias).sum()

    peaks = [simulate(Made(does, up=nn.Linear(8, 8)), (torch.ones(4096, 8),)).peak_bytes for does in (copied, cloned)]
    assert peaks[0] == peaks[1]


def test_what_is_assumed_of_values_is_said() -> None:
    """Values that leave PyTorch, as numbers or as text, are ones, and the simulation names who read them."""
    model, x = made("matcher")
    assert simulate(model, (x,), loss=loss).assumed == ("Tensor.numpy finds ones",)
    layers = [Made(lambda m, x: m.up(x) * float(x.detach().numpy().max()), up=nn.Linear(8, 8)) for _ in range(3)]
    # the values of the batch itself are known
    several = simulate(nn.Sequential(*layers), (torch.ones(4, 8),), loss=torch.mean).assumed
    assert several == ("Tensor.numpy finds ones in * (2 times)",)
    said: list[str] = []
    note = said.append  # a list that the forward reached would be as before afterwards
    logged = Made(lambda m, x: note(f"{m.up(x).mean():.3f}") or m.up(x), up=nn.Linear(8, 8))
    assert simulate(logged, (torch.ones(4, 8),), loss=torch.mean).assumed == ("Tensor.__format__ finds ones",)
    assert said == ["1.000"]
    model, x = made("cholesky")
    assert simulate(model, (x,), loss=loss).assumed == ()


@pytest.mark.parametrize("place", ["numpy", "__array__"])
def test_a_gradient_is_asked_about_as_ever(place: str) -> None:
    """A tensor with a gradient does not leave PyTorch, in a simulation as in a step."""
    model = Around(lambda x: x * float(getattr(x, place)().max()))
    with pytest.raises(RuntimeError, match="requires grad"):
        simulate(model, (torch.ones(4, WIDTH),), loss=loss)


def test_what_a_long_lstm_keeps_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an LSTM is too long to be run alone, what it keeps for backward follows from fewer steps, within 2 %."""
    model, x = Around(nn.LSTM(WIDTH, 64)), torch.randn(400, 8, WIDTH)
    model.last = nn.Linear(64, WIDTH)
    exact = simulate(model, (x,), loss=loss).peak_bytes
    workspaces._known.clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(workspaces, "MOST_WORK", 8 * 64 * 4 * 64 * 100 // torch.get_num_threads())
    assert simulate(model, (x,), loss=loss).peak_bytes == pytest.approx(exact, rel=0.02)
    workspaces._known.clear()  # pyright: ignore[reportPrivateUsage]


def test_an_lstm_for_a_gpu_by_name_says_what_it_stands_on() -> None:
    """What cuDNN keeps for backward cannot be asked without one: the CPU's is counted, and the simulation says so."""
    model, x = Around(nn.LSTM(WIDTH, WIDTH)), torch.ones(8, 4, WIDTH)
    here = simulate(model, (x,), loss=loss)
    there = Planner(TrainingStep(model.to("meta"), (x.to("meta"),), loss=loss, device="h100")).plain
    assert there.saved_bytes == here.saved_bytes > 50_000
    assert "aten.mkldnn_rnn_layer keeps as much for its backward on a GPU as on the CPU" in there.assumed


def test_a_tensor_without_elements_can_be_put_over_a_weight() -> None:
    """`torch.empty(0).set_(memory)` of a weight that is simulated is simulated, too, and takes nothing."""
    ways = (
        lambda m, x: x + torch.empty(0).set_(m.inner.weight.untyped_storage())[:WIDTH],
        lambda m, x: x + m.inner.weight.detach().view(-1)[:WIDTH],
    )
    models = [Around(Made(way, inner=nn.Linear(WIDTH, WIDTH))) for way in ways]
    over, view = (simulate(model, (torch.ones(4, WIDTH),), loss=loss) for model in models)
    assert over.peak_bytes == view.peak_bytes


def test_cudnn_finds_the_memory_of_weights() -> None:
    """What torch asks before it calls cuDNN's LSTM, acted: one tensor over all weights, and where dropout stands."""
    fakes, cuda, seen = FakeTensorMode(), torch.device("cuda", 0), []
    weight = FakeTensor(fakes, torch.empty(64, device="meta"), cuda)
    mode = FakeMode(fakes, lambda: "")
    with torch.no_grad(), mode, mode.showing(lambda ran: seen.append(ran.func)):
        whole = torch.ops.aten.empty.memory_format([0], device=cuda)
        whole.set_(weight.untyped_storage())
        assert whole.narrow(0, 0, 48).shape == (48,)
        # It is run, as torch keeps the result for good; a torch that is built for CUDA has it, and no device here.
        with pytest.raises(RuntimeError, match=r"'CUDA' backend|no NVIDIA driver|no CUDA-capable device"):
            torch.ops.aten._cudnn_init_dropout_state(0.1, True, 3, dtype=torch.uint8, device=cuda)
    assert type(whole) is FakeTensor
    assert whole.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert torch.ops.aten._cudnn_init_dropout_state.default not in seen


# With torch 2.11, torch asks cuDNN where in the memory of the weights each of them lies, and finds no addresses in a
# simulation. It warns of that, and that the weights are not one piece; neither is said of a step with data.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part", "ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_cudnn_keeps_is_asked_of_it(dropout: float) -> None:
    """On a GPU an LSTM's reserve is that of cuDNN, or at most a mask per layer more where it drops out.

    What cuBLAS keeps is in a prediction alone, as no operation's; the state of cuDNN's dropout, which torch keeps for
    the process, is in a measurement alone.
    """
    model = Around(nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout)).cuda()
    x = torch.randn(64, 8, WIDTH, device="cuda")
    predicted = simulate(model, (x,), loss=loss).peak_bytes - kept_by_cublas(torch.cuda.get_device_capability())
    state = torch._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=x.device) if dropout else x[:0]
    measured = stepped(model, x)[0] - state.nbytes
    assert measured <= predicted * 1.005
    assert predicted <= measured * 1.05 + (2 * x.nbytes if dropout else 0)


class Shared(nn.Module):
    """A block that is called several times, in between two linear layers or not."""

    def __init__(self, *, alone: bool, attends: bool = False) -> None:
        super().__init__()
        self.first, self.last = (nn.Identity() if alone else nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if attends:
            self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(5):
            x = x + self.block(x)
        return self.last(x).square().mean()


@pytest.mark.parametrize(("alone", "attends"), [(False, False), (True, False), (False, True)])
def test_a_layer_that_is_called_several_times_has_a_region_per_call(alone: bool, attends: bool) -> None:
    """Each call is a region: the peak falls as promised, gradients stay the same, and the plan names the layer once."""
    torch.manual_seed(0)
    model, x = Shared(alone=alone, attends=attends), torch.randn(4, 16, WIDTH)
    plain, wanted = stepped(model, x)
    peaks: list[int] = []
    for budget in (0.6, 0.05):
        plan = make_plan(model, (x,), budget=budget, loss=loss, device="h100", hold_output=False)
        inside = [path for choice in plan.choices for path in choice.paths if path.startswith("block")]
        assert len(inside) == len(set(inside)) > 0
        assert attends or inside == ["block"]
        assert plan.prediction is not None
        assert sum(line.count for line in plan.prediction.lines if line.where.startswith("block")) == 5
        handle = apply(model, plan)
        peak, gradients = stepped(model, x)
        handle.remove()
        assert peak == plan.predicted_peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
        peaks.append(peak)
    assert plain > peaks[0] >= peaks[1]
    assert peaks[1] < 0.6 * plain


def test_a_profile_knows_that_calls_share_a_choice() -> None:
    """What solves a profile without the model gives all calls of a layer one choice, too."""
    model, x = Shared(alone=False), torch.randn(64, WIDTH)
    found = profile(model, (x,), loss=loss, device="h100")
    assert [segment.path for segment in found.costs.segments] == ["first", *["block"] * 5, "last"]
    plan = solve(Profile.from_json(found.to_json()), budget=0.3)
    assert [choice.paths for choice in plan.choices if "block" in choice.paths[0]] == [("block",)]


def test_no_choice_for_all_calls_is_better() -> None:
    """Of all choices that are the same in every call, the one that fits and costs the fewest seconds is taken."""
    model, x = Shared(alone=True), torch.randn(64, WIDTH)
    costs = profile(model, (x,), loss=loss, device="h100").costs
    by_kind = [{o.regions: o for o in costs.kinds[segment.kind].options} for segment in costs.segments]
    every = [[options[regions] for options in by_kind] for regions in by_kind[0]]
    peaks = [peak(costs, options).bytes for options in every]
    assert len(set(peaks)) > 2
    for budget in peaks:
        fitting = [options for options, most in zip(every, peaks, strict=True) if most <= budget]
        best = min(sum(option.seconds for option in options) for options in fitting)
        assert choose(costs, budget).seconds == pytest.approx(best)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_loss_of_sequences_in_an_applied_region(tensors: bool) -> None:
    """Lengths as tensors or as numbers: a plan's region around `ctc_loss` replays the kernel that its forward ran."""

    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths: Any = ([12] * 4, [5] * 4)
            if tensors:
                lengths = [torch.tensor(each) for each in lengths]
            targets = torch.arange(20).view(4, 5) % 19 + 1
            return F.ctc_loss(self.head(x).log_softmax(-1), targets, *lengths)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), Spoken())
    x = torch.randn(12, 4, WIDTH)
    _, wanted = stepped(model, x)
    apply(model, Plan((Choice(("3",)),)))
    _, gradients = stepped(model, x)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_lengths_of_sequences_are_read_on_the_host() -> None:
    """What is seen is the kernel that a plain step runs, with numbers: CUDA's takes no tensors of lengths of the host.

    While a mode is on, PyTorch calls the kernel with these tensors.
    """
    layer, targets = nn.Linear(WIDTH, 20), torch.arange(20).view(4, 5) % 19 + 1
    lengths = torch.tensor([12] * 4), torch.tensor([5] * 4)
    ran: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(layer(x).log_softmax(-1), targets, *lengths)

    x = torch.randn(12, 4, WIDTH)
    with Operations(lambda one: ran.append(one.func)):
        step(x).backward()
    assert {one for one in ran if "ctc" in str(one)} == {
        torch.ops.aten._ctc_loss.default,
        torch.ops.aten._ctc_loss_backward.default,
    }
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), layer)
    loss = partial(F.ctc_loss, targets=targets, input_lengths=lengths[0], target_lengths=lengths[1])
    for device in ("h100", None):
        plan = make_plan(model, (x,), loss=lambda out: loss(out.log_softmax(-1)), budget="1GiB", device=device)
        assert plan.prediction is not None
        assert plan.prediction.assumed == ("aten._ctc_loss finds ones",)


class Mapped(nn.Module):
    """Maps over matrices, or a layer over a batch."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.weights, self.layer = nn.Parameter(torch.randn(4, 16, 16)), layer
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer:
            return self.outer(torch.vmap(self.inner)(x).tanh())
        return self.outer(torch.vmap(lambda weight: (x @ weight).tanh(), out_dims=-1)(self.weights).flatten(-2))


@pytest.mark.parametrize("layer", [False, True])
def test_layers_that_map(layer: bool) -> None:
    """What is in `vmap` is planned with its layer, and the promise is kept."""
    model, x = nn.Sequential(*(Mapped(layer) for _ in range(3))), torch.randn(8, 16, 16)
    plan = make_plan(model, (x,), budget=0.3, loss=lambda out: out.square().mean())
    apply(model, plan)
    for _ in range(2):
        with measure(model).track(x) as m:
            out = model(x)
            loss = out.square().mean()
            loss.backward()
            model.zero_grad()
    assert plan.choices
    assert m.peak_bytes == plan.predicted_peak_bytes


class Differentiates(Mapped):
    """Asks for a gradient by `torch.func`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(torch.func.grad(lambda x: x.sin().sum())(x)).tanh()).square().mean()


@pytest.mark.parametrize("tiles", [False, True])
def test_a_layer_that_allows_no_region_leaves_the_others(tiles: bool) -> None:
    """Where one kind of layer calls `torch.func.grad`, the others are planned, the promise is kept, and it is said."""
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    model, x = nn.Sequential(*layers, Differentiates(layer=True)), torch.randn(64, 16)
    plan = make_plan(model, (x,), budget=0.0, loss=loss, device="h100", hold_output=False, tiles=tiles)
    apply(model, plan)
    assert stepped(model, x)[0] == plan.predicted_peak_bytes
    assert plan.choices
    assert "Differentiates calls torch.func.grad or one of its kind" in str(plan)


class Checkpointed(nn.Module):
    """Runs a part of itself twice, the second time in a checkpoint of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, self.run(x), use_reentrant=False)  # pyright: ignore[reportReturnType]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def test_no_trial_keeps_a_call_within_other_hooks() -> None:
    """A layer with a checkpoint of its own is planned without a warning, and no call that is in it is kept."""
    model, x = nn.Sequential(*(Checkpointed() for _ in range(3))), torch.randn(256, WIDTH)
    found = profile(model, (x,), loss=lambda out: out.square().mean(), device="h100")
    options = [option for kind in found.costs.kinds.values() for option in kind.options]
    assert any(option.regions for option in options)
    assert not any(choice.keep for option in options for choice in option.regions)


class Routed(nn.Module):
    """Two experts behind a router, all in a checkpoint of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        experts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.run, x.sin().cos(), use_reentrant=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        scores, picked = self.router(x).softmax(-1).topk(1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (picked[:, 0] == number).nonzero()[:, 0]
            made = made.index_add(0, rows, expert(x[rows]) * scores[rows])
        return made


@pytest.mark.filterwarnings("ignore:.*, so what it decides is not carried:RuntimeWarning")
def test_a_router_within_another_checkpoint_is_planned() -> None:
    """A trial carries none of its decisions, which that checkpoint makes again and compares."""
    model, x = nn.Sequential(*(Routed() for _ in range(3))), torch.randn(256, WIDTH)
    plan = make_plan(model, (x,), loss=lambda out: out.square().mean(), budget=0.0, device="h100")
    assert any(choice.carry for choice in plan)


# --- layers whose result is not what they make ---


@dataclass
class Result:
    """What a layer returns."""

    hidden: Any


class Returns(nn.Module):
    """A layer that returns its result in some way, or what it was given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inside, self.way = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), way
        self.out: Any = None

    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> Any:
        skips = {"Python's draw": random.random, "torch's draw": lambda: torch.rand([])}.get(
            self.way, lambda: 1
        )() < 0.5
        y = x if skips or self.way == "nothing new" else x + self.inside(x)
        if self.way == "an attribute":
            self.out = y
            return None
        if self.way == "a list that it is given":
            into.append(y)
            return None
        return Result(y) if self.way == "a dataclass" else y


class Reads(nn.Module):
    """Runs layers, and reads their results."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Returns, ways))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            into: list[torch.Tensor] = []
            y = layer(x, into)
            x = layer.out if layer.way == "an attribute" else into[0] if into else getattr(y, "hidden", y)
        return x.square().mean()


WAYS = ("nothing new", "an attribute", "a list that it is given", "a dataclass", "Python's draw", "torch's draw")


class Wrapped(nn.Module):
    """A layer around another, as libraries put around one of several."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


class TwoResiduals(nn.Module):
    """A layer of two halves, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.second = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def test_a_layer_whose_parts_have_other_names_is_of_its_own_kind() -> None:
    """One layer in a wrapper runs the same operations as those beside it, and a part that these choose is not there."""
    model, x = nn.Sequential(*(TwoResiduals() for _ in range(4))), torch.randn(128, 16)
    model[2] = Wrapped(model[2])
    plan = make_plan(model, (x,), loss=torch.sum, budget=0.1, device="h100")
    assert apply(model, plan).plan is plan


@pytest.mark.parametrize("seed", [0, 1])
def test_two_layers_that_draw_may_do_less_than_twice_one(seed: int) -> None:
    """One region around both is planned where its second layer leaves itself out, which the first did not."""
    model, x = Reads(*(["torch's draw"] * 3), "its result"), torch.randn(128, 16)
    torch.manual_seed(seed)
    plan = make_plan(model, (x,), budget=0.01, optimizer="sgd", device="h100")
    assert plan.prediction is not None
    assert plan.prediction.replay_flops >= 0


@pytest.mark.parametrize("budget", [0.5, 0.01])
@pytest.mark.parametrize("way", WAYS)
def test_layers_that_return_something_else(way: str, budget: float) -> None:
    """They have a plan, whose promise is that of a real step; a layer that draws is planned as it drew."""
    random.seed(1)
    torch.manual_seed(1)
    model, x = Reads(*([way] * 3), "its result"), torch.randn(128, 16)
    plan = make_plan(model, (x,), budget=budget, loss=lambda out: out, optimizer="sgd")
    assert plan.prediction is not None
    if "draw" in way:
        return
    optimizer = torch.optim.SGD(model.parameters())
    apply(model, plan)
    for _ in range(2):
        with measure(model, optimizer).track(x) as m:
            out = model(x)
            out.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert m.peak_bytes == plan.predicted_peak_bytes
