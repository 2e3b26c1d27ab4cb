"""Steps simulated for CUDA on a CPU: operations decompose as on CUDA, and save what they save there."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from laws.watch import Operations
from support.models import Made
from support.zoo import mean_loss
from torch_recompute import Choice, Plan, apply, doctor
from torch_recompute._torch.cuda import release
from torch_recompute.memory.loop import Loop
from torch_recompute.memory.operations import Operation
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation import Simulation, simulate_step
from torch_recompute.simulation.cuda_decompositions import AsOnCuda
from torch_recompute.simulation.devices import DEVICES, Roofline, Where, where
from torch_recompute.simulation.training_step import TrainingStep

WIDTH, ROWS = 64, 32
NONE = Plan()
RELEASED: dict[str, Any] = {"loss": mean_loss, "loop": Loop(hold_output=False)}


@pytest.fixture(autouse=True)
def without_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what cuBLAS keeps, beside which all of these steps are small (`test_workspaces.py` counts it)."""
    monkeypatch.setattr("torch_recompute.simulation.step.kept_by_cublas", lambda capability: 0)


def norms() -> nn.Module:
    """Norms and dropout between products, in bfloat16."""
    first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    parts = {"norm": nn.RMSNorm(WIDTH), "dropout": nn.Dropout(0.1)}
    return Made(lambda m, x: m.second(m.dropout(m.norm(m.first(x)))), first=first, second=second, **parts)


def simulated(fn: Any, target: str) -> tuple[Simulation, Counter[str]]:
    """A step with a module, or with a function between two products, and how often each operation ran."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(x * self.weight, self.weight)

    ran: Counter[str] = Counter()

    def watch(_: object, operation: Operation) -> None:
        ran[operation.func.overloadpacket.__name__] += 1

    model = fn if isinstance(fn, nn.Module) else Net()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    return simulate_step(TrainingStep(model, (x,), **RELEASED, device=Where(target=target)), watch=watch), ran


def test_a_norm_is_one_operation_that_keeps_its_input_and_a_number_per_row() -> None:
    """Beside the norm, one product keeps its input and one reads the norm's result; dropout keeps a byte each."""
    model = norms().to(torch.bfloat16)
    there, ran = simulated(model, "cuda")
    assert ran["_fused_rms_norm"] == ran["_fused_rms_norm_backward"] == 1
    assert ran["native_dropout"] == ran["native_dropout_backward"] == 1
    assert ran["pow"] == ran["bernoulli_"] == 0
    tensor, deviation, mask, loss = 2 * ROWS * WIDTH, 4 * ROWS, ROWS * WIDTH, 2
    # What is kept: the norm's input and deviation, the mask, and the second product's input; the batch is the caller's.
    assert there.saved_bytes == tensor + deviation + mask + tensor + loss


def test_without_cuda_as_the_target_the_step_is_the_one_of_this_machine() -> None:
    """The norm is then taken apart, and keeps more."""
    model = norms().to(torch.bfloat16)
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
    """What torch shows as one function is decomposed as its parts are, whoever else shows them."""
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
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own, of the same condition
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_cuda_takes_apart_too_is_left_as_it_is(name: str) -> None:
    """Where PyTorch would not take the one operation on CUDA either, the step is the same as without a target.

    It has the same operations and keeps the same; what these take while they run is each device's own.
    """
    there, then = simulated(OTHERWISE[name], "cuda")
    here, now = simulated(OTHERWISE[name], "")
    assert then == now
    assert there.saved_bytes == here.saved_bytes
    assert there.live_by_category == here.live_by_category
    assert then["_fused_rms_norm"] == then["native_dropout"] == 0


MASK = torch.ones(4, 4, dtype=torch.bool)
CHOSEN = {
    "nothing drops out": ("cuda 8.0", "flash", {}),
    "nothing drops out, on Hopper": ("cuda 9.0", "cudnn", {}),
    "Blackwell": ("cuda 10.0", "cudnn", {}),
    "Blackwell at home": ("cuda 12.0", "flash", {}),
    "unequal widths": ("cuda 8.0", "efficient", {"widths": (16, 16, 8)}),
    "unequal widths on Hopper": ("cuda 9.0", "cudnn", {"widths": (16, 16, 8)}),
    "the widths of multi-head latent attention": ("cuda 8.0", "efficient", {"widths": (192, 192, 128)}),
    "the same on Hopper": ("cuda 9.0", "cudnn", {"widths": (192, 192, 128)}),
    "as wide, but of other values, on Hopper": ("cuda 9.0", "efficient", {"widths": (192, 192, 64)}),
    "wide heads on Hopper": ("cuda 9.0", "flash", {"widths": (256, 256, 256)}),
    "wide heads on Blackwell": ("cuda 10.0", "flash", {"widths": (256, 256, 256)}),
    "wide heads that drop out on Ada": ("cuda 8.9", "efficient", {"widths": (256, 256, 256), "dropout_p": 0.1}),
    "wider heads": ("cuda 8.0", "efficient", {"widths": (264, 264, 264)}),
    "odd widths": ("cuda 8.0", "flash", {"widths": (20, 20, 20)}),
    "odd widths on Hopper": ("cuda 9.0", "flash", {"widths": (20, 20, 20)}),
    "odd and unequal widths": ("cuda 9.0", "math", {"widths": (20, 20, 12)}),
    "a mask": ("cuda 8.0", "efficient", {"attn_mask": MASK}),
    "a mask on Hopper": ("cuda 9.0", "cudnn", {"attn_mask": MASK}),
    "32 bits": ("cuda 9.0", "efficient", {"dtype": torch.float32}),
    "64 bits": ("cuda 9.0", "math", {"dtype": torch.float64}),
    "grouped heads": ("cuda 8.0", "flash", {"heads": (4, 2, 2), "enable_gqa": True}),
    "grouped heads on Hopper": ("cuda 9.0", "cudnn", {"heads": (4, 2, 2), "enable_gqa": True}),
    "grouped heads and a mask": ("cuda 8.0", "math", {"heads": (4, 2, 2), "enable_gqa": True, "attn_mask": MASK}),
    "heads that are spread": ("cuda 9.0", "math", {"heads": (4, 1, 1)}),
    "a share dropped that cuDNN does not know": ("cuda 9.0", "flash", {"dropout_p": 0.1}),
    "one that it knows": ("cuda 9.0", "cudnn", {"dropout_p": 0.125}),
    "a causal rectangle": ("cuda 8.0", "efficient", {"tokens": (4, 8, 8), "is_causal": True}),
    "Turing": ("cuda 7.5", "efficient", {"dtype": torch.float16}),
    "bfloat16 on Turing": ("cuda 7.5", "math", {}),
}


RELEASES = {  # what cuDNN is given depends on the release of torch; CHOSEN is by the rules of 2.13
    (2, 11): {
        "as wide, but of other values, on Hopper": "cudnn",
        "wide heads on Hopper": "cudnn",
        "a share dropped that cuDNN does not know": "cudnn",
        "the same on Hopper": "cudnn",
        "wide heads on Blackwell": "flash",
    },
    (2, 12): {
        "as wide, but of other values, on Hopper": "cudnn",
        "wide heads on Hopper": "cudnn",
        "a share dropped that cuDNN does not know": "flash",
    },
    (2, 13): {name: kernel for name, (_, kernel, _) in CHOSEN.items()},
    (2, 14): {
        "as wide, but of other values, on Hopper": "efficient",
        "wide heads on Hopper": "cudnn",
        "wide heads on Blackwell": "cudnn",
        "wide heads that drop out on Ada": "efficient",
    },
}


def fused(
    x: torch.Tensor,
    widths: tuple[int, int, int] = (16, 16, 16),
    heads: tuple[int, int, int] = (2, 2, 2),
    tokens: tuple[int, int, int] = (4, 4, 4),
    dtype: torch.dtype = torch.bfloat16,
    **given: Any,
) -> torch.Tensor:
    """Attention of queries, keys and values of these widths, heads, tokens and type, parts of one product."""
    one = x[0, 0].to(dtype)
    sides = zip(heads, tokens, widths, strict=True)
    return F.scaled_dot_product_attention(*(one.expand(2, *side).clone() for side in sides), **given)


@pytest.mark.parametrize(
    ("torchs", "name", "kernel"), [(torchs, *row) for torchs, rows in RELEASES.items() for row in rows.items()]
)
def test_attention_is_the_kernel_that_cuda_chooses(
    torchs: tuple[int, int], name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of PyTorch's choice: types, widths, heads, mask, dropout, and the capability of the device."""
    monkeypatch.setattr("torch_recompute.simulation.cuda_decompositions.release", lambda: torchs)
    target, _, given = CHOSEN[name]
    _, ran = simulated(lambda x, w: fused(x, **given), target)
    found = {name.removeprefix("_scaled_dot_product_").partition("_")[0] for name in ran if "_attention" in name}
    assert found == (set() if kernel == "math" else {kernel})
    assert (ran["_softmax"] + ran["_safe_softmax"] > 0) == (kernel == "math")


def test_attention_is_a_kernel_that_the_user_has_enabled() -> None:
    """`sdpa_kernel` decides among them, in its order where that is set."""
    for backends, order, wanted in (
        ([SDPBackend.EFFICIENT_ATTENTION], False, "efficient"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], False, "flash"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True, "efficient"),
    ):
        with sdpa_kernel(backends, set_priority=order):
            _, ran = simulated(lambda x, w: fused(x), "cuda 9.0")
        assert ran[f"_scaled_dot_product_{wanted}_attention"] == 1


def test_attention_of_unequal_widths_keeps_no_scores() -> None:
    """What is kept are queries, keys, values, the result and a sum per query."""
    there, _ = simulated(lambda x, w: fused(x, widths=(192, 192, 128), tokens=(64, 64, 64)), "cuda 9.0")
    here, _ = simulated(lambda x, w: fused(x, widths=(192, 192, 128), tokens=(64, 64, 64)), "")
    rows = 2 * 2 * 64
    kept = 2 * rows * (192 + 192 + 128 + 128) + 4 * rows
    assert there.saved_bytes == pytest.approx(kept, abs=64)
    assert here.saved_bytes > there.saved_bytes + 2 * rows * 64


def test_a_mask_of_booleans_is_kept_in_the_type_of_the_queries() -> None:
    """Fused kernels read a bias, so a mask is copied once, for all heads."""
    mask = torch.ones(8, 8, dtype=torch.bool)
    masked, _ = simulated(lambda x, w: fused(x, tokens=(8, 8, 8), attn_mask=mask), "cuda 9.0")
    plain, _ = simulated(lambda x, w: fused(x, tokens=(8, 8, 8)), "cuda 9.0")
    assert masked.saved_bytes - plain.saved_bytes == 2 * 8 * 8


TYPES = {
    "a product": (lambda x: F.linear(x, x), torch.bfloat16),
    "a product of a vector": (lambda x: torch.mv(x, x[0]), torch.bfloat16),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), torch.bfloat16),
    "a norm": (lambda x: F.layer_norm(x @ x.T, (ROWS,)), torch.float32),
    "an RMS norm": (
        lambda x: F.rms_norm(x @ x.T, (ROWS,)),
        torch.float32 if release() >= (2, 12) else torch.bfloat16,
    ),
    "groups": (lambda x: F.group_norm((x @ x.T)[None], 4), torch.float32),
    "softmax": (lambda x: (x @ x.T).softmax(-1), torch.float32),
    "softmax that is told": (lambda x: (x @ x.T).softmax(-1, dtype=torch.float64), torch.float64),
    "a sum": (lambda x: (x @ x.T).sum(0), torch.float32),
    "a power": (lambda x: (x @ x.T) ** 2, torch.float32),
    "exp": (lambda x: (x @ x.T).exp(), torch.float32),
    "addition": (lambda x: (x @ x.T) + (x @ x.T), torch.bfloat16),
    "the widest": (lambda x: torch.addcmul(x @ x.T, x @ x.T, (x @ x.T).float()), torch.float32),
    "the widest of narrow ones": (lambda x: torch.addcmul(x @ x.T, x @ x.T, x @ x.T), torch.bfloat16),
    "cross entropy": (lambda x: F.cross_entropy(x @ x.T, torch.zeros(ROWS, dtype=torch.long)), torch.float32),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), torch.bfloat16),
    "64 bits": (lambda x: x.double() @ x.double().T, torch.float64),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_under_autocast_are_those_of_cuda(name: str) -> None:
    """What an operation returns is by CUDA's list, and 64 bits stay."""
    fn, wanted = TYPES[name]
    assert under_autocast(fn) is wanted


def test_an_rms_norm_keeps_its_type_where_autocast_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.11 CUDA's autocast has no cast for it."""
    monkeypatch.setattr("torch_recompute.simulation.cuda_decompositions.cast_on_cuda", lambda name: False)
    assert under_autocast(TYPES["an RMS norm"][0]) is torch.bfloat16


def under_autocast(fn: Any) -> torch.dtype:
    """The type of what a function of a float32 tensor returns in a step on an "h100", under autocast."""
    found: list[torch.dtype] = []
    note = found.append  # a list that the function reached would be as before afterwards

    def seen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = fn(x.float())
        note(result.dtype)
        return result

    simulated(seen, "cuda 9.0")
    (dtype,) = found
    return dtype


class Layer(nn.Module):
    """A product, a norm and a product in 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class Inside(nn.Module):
    """Turns autocast on for the layers in it."""

    def __init__(self, layers: nn.Module, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = layers, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.kind, dtype=torch.bfloat16):
            return self.layers(x)


def under(kind: str, model: nn.Module, plan: Plan = NONE, around: bool = True) -> Simulation:
    """A step on an "h100" in which autocast of a kind is on around the step, or inside the model."""
    x = torch.randn(ROWS, WIDTH)
    step = TrainingStep(model if around else Inside(model, kind), (x,), **RELEASED, device=Where(target="cuda 9.0"))
    if not around:
        return simulate_step(step, prepare=lambda copy: apply(copy, plan))
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)  # as `torch.autocast` does where there is such a device
    torch.set_autocast_dtype(kind, torch.bfloat16)
    try:
        return simulate_step(step, prepare=lambda copy: apply(copy, plan))
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("around", [True, False])
def test_a_step_under_autocast_keeps_what_it_keeps_on_cuda(kind: str, around: bool) -> None:
    """Products keep inputs and weights in 16 bits, a norm its input in 32, whoever turned autocast on."""
    seen = under(kind, Layer(), around=around)
    inputs, weight = 2 * 2 * ROWS * WIDTH, 2 * WIDTH * WIDTH  # that of the first product is not needed
    norm = 4 * (ROWS * WIDTH + 2 * ROWS)
    assert seen.saved_bytes == pytest.approx(inputs + weight + norm, abs=16)


@pytest.mark.parametrize("around", [True, False])
def test_a_region_s_replay_is_under_the_autocast_of_its_forward(around: bool) -> None:
    """Regions in a step under autocast are replayed under it, and drop what they keep."""
    model = nn.Sequential(Layer(), Layer())
    place = "" if around else "layers."
    plan = Plan((Choice((f"{place}0",)), Choice((f"{place}1",))))
    assert under("cuda", model, plan, around).saved_bytes < 0.5 * under("cuda", model, around=around).saved_bytes


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_layers_are_tried_under_the_autocast_of_their_call(kind: str) -> None:
    """What a layer keeps and costs is that of its call, also where the model itself turns autocast on."""
    x = torch.empty(ROWS, WIDTH, device="meta")
    planners = [
        Planner(TrainingStep(model.to("meta"), (x,), loss=torch.sum, device="h100"))
        for model in (Inside(nn.Sequential(Layer(), Layer()), kind), nn.Sequential(Layer(), Layer()))
    ]
    under, plain = ([kind.options[0].saved_bytes for kind in planner.costs.kinds.values()] for planner in planners)
    inputs, weights = 2 * 2 * ROWS * WIDTH, 2 * 2 * WIDTH * WIDTH
    assert max(under) == pytest.approx(inputs + weights + 4 * (ROWS * WIDTH + 2 * ROWS), abs=2 * ROWS * WIDTH)
    assert max(under) != max(plain)


def test_autocast_is_afterwards_what_it_was() -> None:
    """The CPU casts by its own list again, both are off, and without CUDA there is no autocast of it."""
    under("cuda", Layer(), around=False)
    under("cpu", Layer())
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cpu"):
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        assert F.layer_norm(product, (4,)).dtype is torch.bfloat16
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
            assert not torch.is_autocast_enabled("cuda")


def test_dropout_is_that_of_the_function() -> None:
    """Under a function mode dropout keeps its share and scales the rest, by either name."""
    x = torch.ones(10_000)
    for call in (lambda: F.dropout(x, 0.25), lambda: torch.dropout(x, 0.25, True)):
        with AsOnCuda((9, 0)):
            out = call()
        assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert 0.2 < (out == 0).float().mean() < 0.3


def test_a_plan_for_a_gpu_is_for_its_operations_where_the_model_has_no_weights() -> None:
    """A model on meta is planned as on CUDA; one with weights as it runs here, of which its peak is promised."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    real = norms().to(torch.bfloat16)
    here = Planner(TrainingStep(real, (x,), device="h100", loss=mean_loss)).plain.peak_bytes
    there = Planner(TrainingStep(real.to("meta"), (x,), device="h100", loss=mean_loss)).plain.peak_bytes
    step = TrainingStep(norms().to(torch.bfloat16), (x,), loss=mean_loss)
    assert here == simulate_step(step).peak_bytes
    assert there == simulate_step(replace(step, device=Where(target="cuda"))).peak_bytes < here


def test_a_device_of_which_nothing_is_said_changes_nothing() -> None:
    """Every data sheet is of a CUDA device; a roofline of the user's own is of none unless it says so."""
    meta = norms().to("meta")
    assert {where(name, meta).target.partition(" ")[0] for name in DEVICES} == {"cuda"}
    assert where("h100", meta).target == "cuda 9.0"
    mine = Roofline("mine", {1: 1e12}, 1e12, 1e-6)
    assert where(mine, meta).target == where(None, meta).target == where("h100", norms()).target == ""


def test_the_doctor_examines_the_step_that_a_plan_is_for() -> None:
    """What fits a GPU by its own operations fits in the doctor's simulation, too, and does not as the CPU's."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    meta = norms().to(torch.bfloat16).to("meta")
    budget = Planner(TrainingStep(meta, (x,), device="h100", loss=mean_loss)).plain.peak_bytes
    found = [
        {finding.kind for finding in doctor.examine(meta, (x,), budget=budget, device=device, loss=mean_loss).findings}
        for device in ("h100", "cpu")
    ]
    assert [("over_budget" in kinds) for kinds in found] == [False, True]


def test_a_layer_of_latent_attention_keeps_what_it_keeps_on_hopper() -> None:
    """One DeepSeek-V3 layer of experts at 4,096 tokens keeps 2.9 GiB there; with the CPU's kernels it is 11.2."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=0, vocab_size=8)
    with torch.device("meta"):
        whole = transformers.DeepseekV3Model(config).to(torch.bfloat16)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rotary = whole.layers[0], whole.rotary_emb

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1])[None]
            return self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)

    x = torch.empty(1, 4096, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    on_h100 = Where(device=torch.device("cpu"), target=DEVICES["h100"].target)
    there = simulate_step(TrainingStep(Layer(), (x,), **RELEASED, device=on_h100))
    assert 2.85 < there.saved_bytes / 2**30 < 2.95


def test_an_optimizer_goes_over_lists_as_on_cuda() -> None:
    """What its step takes besides is then a list of tensors, not one tensor after the other."""
    model, x = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), torch.ones(1, 64)
    step = TrainingStep(model, (x,), optimizer=torch.optim.AdamW, **RELEASED)
    there, here = simulate_step(replace(step, device=Where(target="cuda"))), simulate_step(step)
    assert there.peak.phase == "optimizer"
    assert "_foreach" in there.peak.op
    assert there.peak_bytes > here.peak_bytes + 4 * 64 * 64


@pytest.mark.gpu
def test_a_device_chooses_the_same_kernels_and_types() -> None:
    """Attention of each kind runs there as the kernel that is simulated for its capability, and autocast casts so."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    here = "cuda {}.{}".format(*torch.cuda.get_device_capability(cuda))
    wrong: list[str] = []
    for name, (_, _, given) in CHOSEN.items():
        simulated_ran = simulated(lambda x, w, given=given: fused(x, **given), here)[1]
        seen = Operations()
        moved = {key: value.to(cuda) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        with seen:
            fused(torch.ones(1, 1, device=cuda, requires_grad=True), **moved)
        kernels, said = ([op for op in ran if _is_kernel(op)] for ran in (seen.counts, simulated_ran))
        if kernels != said:
            wrong.append(f"{name}: simulated {said or 'products'}, ran {kernels or 'products'}")
    for name, (fn, wanted) in TYPES.items():
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.device(cuda):
            found = fn(torch.ones(ROWS, WIDTH, device=cuda)).dtype
        if found is not wanted:
            wrong.append(f"{name}: {wanted} by CUDA's list, {found} there")
    assert not wrong, "\n".join([f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", *wrong])


def _is_kernel(op: str) -> bool:
    return op.startswith("_scaled_dot_product") and "backward" not in op
