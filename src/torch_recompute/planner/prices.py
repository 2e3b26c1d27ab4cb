"""Prices of operations, in seconds: measured on a device, or by a data sheet (`simulation/devices.py`).

Measured means: the operation is run alone on made-up inputs, once to warm up and three times for its price, and the
fastest counts. One that the roofline puts above `LONGEST`, or that cannot be run alone, is priced by the roofline,
scaled by what the measured ones took of theirs, and named in `Measured.timing`. What was measured is kept in a file
(`stores/measured.py`). Prices decide between plans, so what counts is how they compare; `clock.py` times whole steps.

On a CPU a replay takes more than its operations do alone: the modules' Python, the dispatcher, the hooks of saved
tensors, a fixed part for each region, and the search for calls that are kept. Where layers are small they prevail,
and many small regions would look cheap. So what a region adds to 2 and to 18 tiny operations is measured. A device that
is told what to do by a host has that host's figures; one rule makes seconds of both (`simulation/devices.py`).

Many operations expect more of their inputs than shapes: a workspace that a forward wrote, the seed of a dropout,
probabilities. Made-up inputs then end the process or break the CUDA context, and no schema says which operations are
like that. So only operations that are known to be safe are run: pointwise ones and those of the core of ATen, by
PyTorch's own tags, and those named below; none draws random numbers or has results whose size depends on values. A list
of those that are not run would end the process at the first one that it lacks. The made-up inputs are valid: floats are
in (0.01, 0.99), indices are spread evenly over what they index, offsets cut a batch into equal groups.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch

from .. import errors
from .._torch import is_operator
from .._torch.fakes import taken_by
from .._torch.modes import without_modes
from ..plan.apply import apply
from ..plan.choice import Choice
from ..plan.plan import Plan
from ..simulation.devices import DEVICES, LAUNCH, Host, Roofline, data_sheet_of, typical
from ..simulation.training_step import TrainingStep
from ..stores.measured import PriceFile, full_name
from .ops import Meta, Op, StepLog, logging, metas

LONGEST = 0.5  # seconds
TIMES = 3
CPU = torch.device("cpu")


@functools.cache
def processor() -> Roofline:
    """The roofline of this machine's processor, measured once by a product and a copy, and kept."""
    kept = PriceFile(full_name(CPU))
    if not {"product", "copy", "launch"} <= kept.seconds.keys():
        with without_modes(), torch.no_grad():
            a, big, small = torch.ones(512, 512), torch.ones(1 << 22), torch.ones(4)
            kept.seconds["product"] = min(_seconds(lambda: a @ a, 5, CPU))
            kept.seconds["copy"] = min(_seconds(big.clone, 5, CPU))
            kept.seconds["launch"] = statistics.median(_seconds(lambda: small + small, 50, CPU))
        kept.save()
    speed, moved = 2 * 512**3 / kept.seconds["product"], 2 * 4 * (1 << 22)
    return Roofline("cpu", {2: speed, 4: speed}, moved / kept.seconds["copy"], kept.seconds["launch"])


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a device is the current one of its kind, where its kind knows several."""
    several = None if device.type == "cpu" else getattr(torch.get_device_module(device), "device", None)
    return nullcontext() if several is None else several(device)


def now(device: torch.device) -> float:
    """The present moment, after all that the current device of this kind has been told to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def _seconds(call: Any, times: int, device: torch.device) -> list[float]:
    call()
    found: list[float] = []
    for _ in range(times):
        start = now(device)
        call()
        found.append(now(device) - start)
    return found


def key_of(op: Op) -> str:
    """The key of an operation in a file of prices."""
    return hashlib.sha256(repr((str(op.func), op.args, op.kwargs)).encode()).hexdigest()[:32]


_REGION_FIGURES = "replayed", "region", "call", "watched"


def _overhead(kept: PriceFile) -> Host:
    """Measures what a region takes on this machine's processor, which launches for itself, once."""
    if not {*_REGION_FIGURES} <= kept.seconds.keys():
        with _in_training(), torch.random.fork_rng([]):
            x = torch.ones(8, requires_grad=True, device=CPU)
            region, again = _added(x, torch.nn.Tanh)
            call, watched = _search(x, again)
            with without_modes(), torch.no_grad():
                again -= min(_seconds(x.tanh, 50, CPU))
        found = again, region, call, watched
        kept.seconds.update({name: max(value, 1e-9) for name, value in zip(_REGION_FIGURES, found, strict=True)})
    replayed, region, call, watched = (kept.seconds[name] for name in _REGION_FIGURES)
    return Host(replayed=replayed, region=region, call=call, watched=watched)


def measured_host(device: torch.device) -> Host:
    """Measures the host of a device, by steps of tiny layers that are longer for it than for the device.

    Of the CPU itself it is what the host of another device would take, but for the launch of a kernel.
    """
    with _in_training(), on(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        x = torch.ones(1, 4, _Layer.WIDTH, requires_grad=True, device=device)
        forward, backward = _Layer.operations(x)
        plain = [min(_seconds(_Layer.step(count, x), 100, device)) for count in (1, 3)]
        region, again = _added(x, _Layer, counts=(1, 3), times=100)
        tiny = torch.ones(8, requires_grad=True, device=device)
        call, watched = _search(tiny, _added(tiny, torch.nn.Tanh, times=100)[1], times=100)
    launch = LAUNCH if device.type == "cpu" else 0.0
    figures = (plain[1] - plain[0]) / 2 / (forward + backward) + launch, again / forward + launch, region, call, watched
    return Host("", *(max(value, 1e-9) for value in figures), apart=True)


class _Layer(torch.nn.Module):
    """A layer of a transformer, as small as its kernels allow."""

    WIDTH = 16

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(self.WIDTH) for _ in range(2))
        self.products = torch.nn.ModuleList(
            torch.nn.Linear(before * self.WIDTH, after * self.WIDTH)
            for before, after in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention with two heads and an MLP, each after its norm and beside a skip connection."""
        rows, tokens, width = x.shape
        inward, outward, up, down = self.products
        parts = inward(self.norms[0](x)).chunk(3, -1)
        heads = (part.view(rows, tokens, 2, width // 2).transpose(1, 2) for part in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + outward(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + down(torch.nn.functional.gelu(up(self.norms[1](x))))

    @classmethod
    def step(cls, count: int, x: torch.Tensor) -> Callable[[], object]:
        """A forward and a backward of so many, to gradients that are added to nothing."""
        model = _stack(cls, count, x.device)
        return lambda: torch.autograd.grad(model(x).sum(), [x, *model.parameters()])

    @classmethod
    def operations(cls, x: torch.Tensor) -> tuple[int, int]:
        """The number of operations of its forward and its backward."""
        counts: list[int] = []
        for layers in (1, 2):
            ran: list[Op] = []
            step, model = cls.step(layers, x), _stack(cls, layers, x.device)
            with logging(lambda op, _, ran=ran: ran.append(op)):
                model(x)
                counts.append(len(ran))
                step()
            counts.append(len(ran) - 2 * counts[-1])
        return counts[2] - counts[0], counts[3] - counts[1]


@contextmanager
def _in_training() -> Generator[None]:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def _stack(layer: Callable[[], torch.nn.Module], count: int, device: torch.device) -> torch.nn.Module:
    with device:
        return torch.nn.Sequential(torch.nn.Sequential(*(layer() for _ in range(count))))


def _step(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: model(x).sum().backward()


def _search(x: torch.Tensor, again: float, times: int = 20) -> tuple[float, float]:
    """Measures a call that is kept, and an operation among which calls are looked for, of which `again` is a replay."""
    looked = _added(x, torch.nn.Tanh, "@attention", times=times)[1] - again  # in forward and in the replay
    call = _added(x, functools.partial(torch.nn.Linear, 8, 8), "@product", times=times)[1] - looked
    return call, looked / 2


def _added(
    x: torch.Tensor,
    layer: Callable[[], torch.nn.Module],
    *keep: str,
    counts: tuple[int, int] = (2, 18),
    times: int = 20,
) -> tuple[float, float]:
    """Measures what a region that keeps some calls adds to a step by itself, and for each of the layers in it."""
    found: list[float] = []
    for count in counts:
        model = _stack(layer, count, x.device)
        plain = min(_seconds(_step(model, x), times, x.device))
        apply(model, Plan((Choice(("0",), keep),)))
        found.append(min(_seconds(_step(model, x), times, x.device)) - plain)
    each = (found[1] - found[0]) / (counts[1] - counts[0])
    return found[0] - counts[0] * each, each


class Measured:
    """Prices by running each operation on a device, once; what was measured before is read from a file."""

    _known: ClassVar[dict[tuple[str, Op], float | None]] = {}
    """Prices that this process has asked for, by what they depend on; None for what cannot be measured."""

    def __init__(self, device: torch.device, host: Host | None = None) -> None:
        self._full_name, self._host = full_name(device), host or typical()
        self._kept = PriceFile(self._full_name)
        self.name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._device = device
        self.roofline = roofline_of(device)
        self._scales: list[float] = []
        self._not_run: dict[str, None] = {}

    def __call__(self, op: Op) -> float:
        """Seconds of an operation."""
        key = (self._full_name, op)
        expected = self.roofline(op)
        if key not in self._known:
            self._known[key] = self._measured(op) if expected < LONGEST and is_operator(op.func) else None
        seconds = self._known[key]
        if seconds is not None:
            self._scales.append(seconds / expected)
            return seconds
        self._not_run[str(getattr(op.func, "overloadpacket", op.func))] = None
        return expected * (statistics.median(self._scales) if self._scales else 1.0)

    @property
    def timing(self) -> str:
        """The source of its seconds, in words."""
        others = ", ".join(sorted(self._not_run))
        return f"operations timed one by one on {self.name}{others and f' ({others} estimated)'}"

    @property
    def timing_with_regions(self) -> str:
        """The same, and what regions take besides where a device launches for itself."""
        host = self.host
        each = f"{1000 * host.region:.2f} ms per region, {1e6 * host.call:.0f} us per kept call"
        each += f" and {1e6 * host.replayed:.0f} us per replayed operation"
        return self.timing if host.apart else f"{self.timing}, {each}"

    @property
    def host(self) -> Host:
        """The host that launches its operations: a CPU itself, which takes time for regions besides them."""
        return _overhead(self._kept) if self._device.type == "cpu" else self._host

    def keep(self) -> None:
        """Writes what was measured to a file."""
        self._kept.save()

    def _measured(self, op: Op) -> float | None:
        name = key_of(op)
        if name in self._kept.seconds:
            return self._kept.seconds[name]
        seconds = self._run(op)
        if seconds:  # what could not be run is not kept, since another time there may be more memory
            self._kept.seconds[name] = seconds
        return seconds

    def _run(self, op: Op) -> float | None:
        if not runs_alone(op):
            return None
        try:
            with without_modes(), torch.no_grad():  # prices are asked for while fake tensors are about
                args, kwargs = made_up(op, self._device)
                return min(self._times(lambda: op.func(*args, **kwargs)))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None

    def _times(self, call: Any) -> list[float]:
        with on(self._device):
            if self._device.type != "cuda":
                return _seconds(call, TIMES, self._device)
            call()
            found: list[float] = []
            for _ in range(TIMES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / 1000)
            return found


def prices_for(step: TrainingStep, device: torch.device) -> Roofline | Measured:
    """Prices for a step whose tensors are on a device of this machine.

    A device by its data sheet has prices of its own. Here a model with its weights on the device is measured. One on
    the meta device has sizes that this machine may not be able to run, so its operations are priced by the roofline.
    """
    real = any(parameter.device.type == device.type for parameter in step.model.parameters())
    sheet = step.where.roofline
    if sheet is None and real:
        _check_host(step, device.type)
        return Measured(device, step.host)
    sheet = sheet or roofline_of(device)
    _check_host(step, sheet.kind or "cpu")
    return replace(sheet, host=step.host) if sheet.kind else sheet


def _check_host(step: TrainingStep, kind: str) -> None:
    """Refuses a host that somebody has named for a CPU."""
    if kind == "cpu" and step.host != typical():
        why = "the seconds are of a CPU, which launches its operations itself, and what that takes is measured"
        raise errors.ArgumentError(errors.no_effect("host", step.host.name, why, 'Write device="h100"'))


def hidden_copies(log: StepLog, price: Callable[[Op], float]) -> dict[str, float]:
    """Seconds of an optimizer's copies to host memory and back that backward hides, by purpose.

    They go beside it, as ZeRO-Offload and torchao send them.
    """
    moved: dict[str, float] = {}
    room = 0.0
    for op, count in log.ops("backward").items():
        if op.moved:
            moved[op.moved] = moved.get(op.moved, 0.0) + price(op) * count
        else:
            room += price(op) * count
    return hidden_in(room, moved)


def hidden_in(room: float, moved: Mapping[str, float]) -> dict[str, float]:
    """Of the seconds of copies by purpose, those that so many others hide."""
    hidden: dict[str, float] = {}
    for word, seconds in moved.items():
        hidden[word] = min(seconds, room)
        room -= hidden[word]
    return hidden


def roofline_of(device: torch.device) -> Roofline:
    """The roofline of a device of this machine; that of an h100, which says so, where no data sheet of it is known."""
    if device.type == "cpu":
        return processor()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = data_sheet_of(name) if device.type == "cuda" else None
    return known or replace(DEVICES["h100"], name=f"an h100, since no data sheet of {name} is known")


# --- inputs that are made up for an operation ---

_NAMED = frozenset(
    {
        # products
        *("addbmm", "addmv", "addr", "baddbmm", "dot", "linear", "mv", "vdot"),
        *("_addmm_activation", "_grouped_mm", "_int_mm", "_scaled_mm"),
        # norms
        *("native_batch_norm", "native_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        *("linalg_vector_norm", "_weight_norm_interface", "_weight_norm_interface_backward"),
        # activations
        *("_log_softmax_backward_data", "_safe_softmax", "_softmax_backward_data"),
        *("_prelu_kernel", "_prelu_kernel_backward", "elu_backward", "glu", "glu_backward", "hardsigmoid_backward"),
        *("hardswish", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward"),
        *("log_sigmoid_forward", "mish_backward", "softplus_backward", "softshrink_backward"),
        # losses
        *("huber_loss", "huber_loss_backward", "mse_loss", "mse_loss_backward", "nll_loss2d_backward"),
        *("nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward", "smooth_l1_loss", "smooth_l1_loss_backward"),
        # pictures
        *("_adaptive_avg_pool3d_backward", "avg_pool3d_backward", "grid_sampler_2d_backward", "im2col"),
        *("pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle"),
        *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        *(f"upsample_{kind}{back}" for kind in ("bicubic2d", "linear1d", "trilinear3d") for back in ("", "_backward")),
        *(f"upsample_nearest{n}d{back}" for n in (1, 2, 3) for back in ("", "_backward")),
        "upsample_bilinear2d_backward",
        # sums
        *("all", "cumprod", "logcumsumexp", "logsumexp", "std", "std_mean", "var_mean"),
        # moving, filling
        *("_unsafe_index", "_unsafe_view", "index_add", "index_copy", "index_fill", "new_full", "new_ones"),
        *("ones", "ones_like", "roll", "select_backward", "slice_backward", "stack", "tril", "triu", "zero", "zeros"),
        *("zeros_like", "new_zeros", "_fft_c2c"),
        # optimizers
        *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"),
    }
)
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}attention{place}{back}"
    for kernel, place in (("flash_", ""), ("efficient_", ""), ("cudnn_", ""), ("flash_", "_for_cpu"))
    for back in ("", "_backward")
)
_UNSAFE = frozenset({"_embedding_bag", "masked_scatter", "resize"})  # of the core, and their inputs have to fit
_FROM_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
_SAFE = (torch.Tag.core, torch.Tag.pointwise)
_ENDS = frozenset({"offs", "cum_seq_q", "cum_seq_k"})
NUMBERS = 2**12  # floats that are drawn; a tensor repeats them


def runs_alone(op: Op) -> bool:
    """Whether an operation can be run on inputs that are made up."""
    space, _, name = op.func.name().partition("::")
    name, _, overload = name.partition(".")
    if space != "aten":
        return False
    given = _given(op)
    if name in _ATTENTION:
        return not given.get("dropout_p")
    if name in ("index", "index_put", "index_put_"):  # by a mask the size of the result depends on values
        return not any(meta.dtype in (torch.bool, torch.uint8) for meta in metas(given["indices"]))
    if any(tag in op.func.tags for tag in _FROM_VALUES):
        return False
    plain = name.removesuffix("_")
    same = getattr(getattr(torch.ops.aten, plain, None), overload or "default", op.func)  # of what works in place
    safe = any(tag in func.tags for tag in _SAFE for func in (op.func, same))
    return (safe or plain in _NAMED or name.startswith("_foreach_")) and plain not in _UNSAFE


def made_up(op: Op, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Inputs for an operation on a device: the positional and the keyword arguments."""
    given = _given(op)

    def made(name: str, value: Any, place: int | None = None) -> Any:
        if isinstance(value, Meta):
            return _tensor(value, name, _count(given, name, place), device)
        if isinstance(value, tuple):
            return [made(name, item, i) for i, item in enumerate(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return device if isinstance(value, torch.device) and value.type == device.type else value

    args = [made(name, value) for name, value in zip(taken_by(op.func), op.args, strict=False)]
    return args, {name: made(name, value) for name, value in op.kwargs}


def _given(op: Op) -> dict[str, Any]:
    """The arguments by the names of the schema."""
    return {**dict(zip(taken_by(op.func), op.args, strict=False)), **dict(op.kwargs)}


def _count(given: dict[str, Any], name: str, place: int | None) -> int:
    """The number that an integer argument may index, or that its offsets end at; else the smallest dimension."""
    tensors = [meta for meta in metas(tuple(given.values())) if meta.shape]
    first = tensors[0].shape if tensors else (1,)
    dim = given.get("dim")
    if name == "offs":  # the rows or columns that a grouped product cuts
        a, b = given["self"].shape, given["mat2"].shape
        return b[1] if len(a) != 2 else a[0 if len(b) == 3 else 1]
    if name in _ENDS:  # the tokens of a batch
        return given["query" if name == "cum_seq_q" else "key"].shape[0]
    if name == "index" and isinstance(dim, int):
        return first[dim]
    if name == "indices" and place is not None:
        return first[place]
    if name == "indices" and "weight" in given:
        return first[0]
    if name == "indices" and "num_weights" in given:
        return given["num_weights"]
    if name == "target" and isinstance(given.get("self"), Meta):
        return given["self"].shape[min(1, len(given["self"].shape) - 1)]
    return min((size for meta in tensors for size in meta.shape), default=1)


def _tensor(meta: Meta, name: str, count: int, device: torch.device) -> torch.Tensor:
    here = device if meta.device == device.type else torch.device(meta.device)
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=here)
    flat = made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,))  # some of it may repeat
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten() if meta.dtype.is_complex else flat
        numbers = torch.rand(NUMBERS, generator=torch.Generator().manual_seed(0), device="cpu") * 0.98 + 0.01
        rows = flat.numel() // NUMBERS
        flat[: rows * NUMBERS].view(-1, NUMBERS).copy_(numbers)
        flat[rows * NUMBERS :].copy_(numbers[: flat.numel() % NUMBERS])
    elif name in _ENDS:
        starts = name != "offs"  # those of sequences begin with 0
        ends = torch.arange(meta.shape[0], device=here) + (not starts)
        made.copy_(ends * count // max(1, meta.shape[0] - starts))
    else:
        flat.copy_(torch.arange(flat.numel(), device=here) % (2 if meta.dtype is torch.bool else max(1, count)))
    return made
