"""What is simulated for CUDA where there is none: the operations that CUDA's way leads to, and what those keep."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_recompute import doctor
from torch_recompute.planning.planner import Planner
from torch_recompute.planning.prices import DEVICES, Roofline, where
from torch_recompute.simulation import Simulation, simulate_step
from torch_recompute.simulation.composing import AsOnCuda

WIDTH, ROWS = 64, 32


class Norms(nn.Module):
    """Norms and dropout between products, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.dropout = nn.RMSNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(self.norm(self.first(x))))


def simulated(fn: Any, composed: str) -> tuple[Simulation, Counter[str]]:
    """A step with a module, or with a function between two products, and how often each operation ran."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(x * self.weight, self.weight)

    ran: Counter[str] = Counter()

    def watch(phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        ran[func.overloadpacket.__name__] += 1

    model = fn if isinstance(fn, nn.Module) else Net()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    return simulate_step(model, (x,), watch=watch, composed=composed), ran


def test_a_norm_is_one_operation_that_keeps_its_input_and_a_number_per_row() -> None:
    """Beside the norm, one product keeps its input and one reads the norm's result; dropout keeps a byte each."""
    model = Norms().to(torch.bfloat16)
    there, ran = simulated(model, "cuda")
    assert ran["_fused_rms_norm"] == ran["_fused_rms_norm_backward"] == 1
    assert ran["native_dropout"] == ran["native_dropout_backward"] == 1
    assert ran["pow"] == ran["bernoulli_"] == 0
    tensor, deviation, mask, loss = 2 * ROWS * WIDTH, 4 * ROWS, ROWS * WIDTH, 2
    # What is kept: the norm's input and deviation, the mask, and the second product's input; the batch is the caller's.
    assert there.saved_bytes == tensor + deviation + mask + tensor + loss


def test_without_cuda_as_the_target_the_step_is_the_one_of_this_machine() -> None:
    """The norm is then taken apart, and keeps more."""
    model = Norms().to(torch.bfloat16)
    here, ran = simulated(model, "")
    there, _ = simulated(model, "cuda")
    assert ran["_fused_rms_norm"] == ran["native_dropout"] == 0
    assert here.saved_bytes > there.saved_bytes


@pytest.mark.parametrize("weight", [True, False])
def test_gradients_have_the_shapes_of_what_they_are_of(weight: bool) -> None:
    """A norm with and without a weight gives a gradient to each parameter, of its size."""
    there, ran = simulated(lambda x, w: F.rms_norm(x, (WIDTH,), w if weight else None), "cuda")
    here, _ = simulated(lambda x, w: F.rms_norm(x, (WIDTH,), w if weight else None), "")
    assert ran["_fused_rms_norm_backward"] == 1
    assert there.live_bytes == here.live_bytes
    assert there.live_by_category["gradients"] == 2 * WIDTH


HEADS = (2, 2, 4, 8)


def attention(x: torch.Tensor, p: float = 0.1, **given: Any) -> torch.Tensor:
    """Attention of what is given, as queries, keys and values."""
    x = x.flatten()[:128].view(HEADS)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=p, **given)


def test_attention_that_drops_out_keeps_no_scores() -> None:
    """What is kept are queries, keys, values, the result, a sum per query and where the generator stood."""
    there, ran = simulated(lambda x, w: attention(x, is_causal=True), "cuda")
    assert ran["_scaled_dot_product_flash_attention"] == ran["_scaled_dot_product_flash_attention_backward"] == 1
    assert ran["bernoulli_"] == ran["native_dropout"] == 0
    tensor, sums, generator, loss = 2 * 128, 4 * 16, 3 * 8, 2
    inputs = 2 * ROWS * WIDTH  # of which queries, keys and values are a view
    assert there.saved_bytes == inputs + tensor + sums + generator + loss
    assert not any("attention" in assumed for assumed in there.assumed)


def test_multi_head_attention_is_looked_into() -> None:
    """What torch shows as one function is composed as its parts are, whoever else shows them."""
    model = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, dtype=torch.bfloat16)
    _, ran = simulated(nn.Sequential(nn.Unflatten(0, (1, ROWS)), model), "cuda")
    assert ran["_scaled_dot_product_flash_attention"] == 1
    assert ran["native_dropout"] == 3
    assert ran["bernoulli_"] == 0


OTHERWISE = {
    "a weight of another type": lambda x, w: F.rms_norm(x, (WIDTH,), w.float()),
    "channels last": lambda x, w: F.rms_norm(
        x.view(2, 4, 4, WIDTH).to(memory_format=torch.channels_last), (4, 4, WIDTH)
    ),
    "complex numbers": lambda x, w: F.rms_norm(torch.complex(x.float(), x.float()), (WIDTH,)).real,
    "dropout in place": lambda x, w: F.dropout(x, 0.5, inplace=True) * 1,
    "dropout out of training": lambda x, w: F.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x, w: F.dropout(x, 0.0),
    "dropout of everything": lambda x, w: F.dropout(x, 1.0),
    "attention that drops nothing": lambda x, w: attention(x, 0.0),
    "attention with a mask": lambda x, w: attention(x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
    "attention in 32 bits": lambda x, w: attention(x.float()),
    "attention of grouped heads": lambda x, w: attention(x, enable_gqa=True),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own, of the same condition
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_cuda_takes_apart_too_is_left_as_it_is(name: str) -> None:
    """Where PyTorch would not take the one operation on CUDA either, the step is the same as without a target."""
    there, then = simulated(OTHERWISE[name], "cuda")
    here, now = simulated(OTHERWISE[name], "")
    assert then == now
    assert there.peak_bytes == here.peak_bytes
    assert then["_fused_rms_norm"] == then["native_dropout"] == 0


def test_under_autocast_a_norm_is_left_as_it_is() -> None:
    """Autocast casts what goes into a norm, so nothing is decided before it."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return F.rms_norm(x, (WIDTH,), weight)

    assert not simulated(norm, "cuda")[1]["_fused_rms_norm"]


@pytest.mark.parametrize("call", [F.rms_norm, torch.rms_norm])
def test_the_result_is_that_of_the_function(call: Any) -> None:
    """Values are the same on real tensors, with a weight and without, given by place or by name."""
    x, weight = torch.randn(4, 3, WIDTH), torch.randn(WIDTH)
    for args, kwargs in (((x, (WIDTH,)), {}), ((x, (WIDTH,), weight), {"eps": 0.5}), ((x, (3, WIDTH)), {})):
        expected = call(*args, **kwargs)
        with AsOnCuda():
            assert torch.equal(call(*args, **kwargs), expected)


def test_dropout_is_that_of_the_function() -> None:
    """Under a function mode dropout keeps its share and scales the rest, by either name."""
    x = torch.ones(10_000)
    for call in (lambda: F.dropout(x, 0.25), lambda: torch.dropout(x, 0.25, True)):
        with AsOnCuda():
            out = call()
        assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert 0.2 < (out == 0).float().mean() < 0.3


def test_a_plan_for_a_gpu_is_for_its_operations_where_the_model_has_no_weights() -> None:
    """A model on meta is planned as on CUDA; one with weights as it runs here, of which its peak is promised."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    real = Norms().to(torch.bfloat16)
    here = Planner(real, (x,), None, device="h100").plain.peak_bytes
    there = Planner(real.to("meta"), (x,), None, device="h100").plain.peak_bytes
    assert here == simulate_step(Norms().to(torch.bfloat16), (x,)).peak_bytes
    assert there == simulate_step(Norms().to(torch.bfloat16), (x,), composed="cuda").peak_bytes < here


def test_a_device_of_which_nothing_is_said_changes_nothing() -> None:
    """Every data sheet is of a CUDA device; a roofline of the user's own is of none unless it says so."""
    meta = Norms().to("meta")
    assert {where(name, meta).composed for name in DEVICES} == {"cuda"}
    mine = Roofline("mine", {1: 1e12}, 1e12, 1e-6)
    assert where(mine, meta).composed == where(None, meta).composed == where("h100", Norms()).composed == ""


def test_the_doctor_examines_the_step_that_a_plan_is_for() -> None:
    """What fits a GPU by its own operations fits in the doctor's simulation, too, and does not as the CPU's."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    meta = Norms().to(torch.bfloat16).to("meta")
    budget = Planner(meta, (x,), None, device="h100").plain.peak_bytes
    found = [
        {finding.kind for finding in doctor.examine(meta, (x,), budget=budget, device=device).findings}
        for device in ("h100", "cpu")
    ]
    assert [("over_budget" in kinds) for kinds in found] == [False, True]
