"""How each figure is obtained: bytes and FLOPs computed on tensors without data, times and CUDA's peak measured.

Problem. The published size needs 6 GiB and a GPU; the claim is about bytes, which no GPU is needed to count.

Idea. On the device `meta` a tensor is a shape and a storage of the right length without memory. The stack, its
regions and their replays run there as they do anywhere, and the lens (`memory`) counts every storage after every
operation, so the peak is exact and takes a second. Where CUDA is, the same steps run there as well, and the
allocator's own peak is what is shown.

Rejected. `FakeTensorMode`: a mode more to enter, for the same figures. FLOPs are those of matrix products, by PyTorch's
counter.

What a device decides stays unseen on `meta`. There a norm is several operations, as on the CPU, where CUDA has one, so
the computed peaks of rms_norm are above the published ones; what a kernel allocates for itself is not counted.

Invariants. All forms of a stack use the same weights and input. One iteration of each form follows the other, so that
noise hits all alike, and figures are medians. Gradients are None at the beginning of every iteration.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from torch_recompute.memory import measure

from .blocks import Run, Stack, loss_of
from .forms import Form

WARM_UP = 3


class Computed(NamedTuple):
    """What a step needs, computed on tensors without data."""

    peak_bytes: int
    flops: int


class Times(NamedTuple):
    """Median seconds of a step, and on CUDA the most bytes that the allocator had allocated in one."""

    forward: float
    backward: float
    total: float
    peak_bytes: int | None


def compute(stack: Stack, run: Run) -> Computed:
    """The peak of one step, weights and input included, and the FLOPs of its matrix products.

    Args:
        stack: A stack on the device `meta`.
        run: How each block is run.
    """
    peak_bytes = computed_peak(stack, run)
    with FlopCounterMode(display=False) as counter:
        _step(stack, run)
    stack.drop_gradients()
    return Computed(peak_bytes, counter.get_total_flops())


def computed_peak(stack: Stack, run: Run) -> int:
    """The peak of one step of a stack on the device `meta`, weights and input included."""
    stack.drop_gradients()
    with measure(stack, device="meta") as lens:
        lens.track(stack.x)
        _step(stack, run)
    stack.drop_gradients()
    return lens.peak_bytes


def clock(stack: Stack, forms: Sequence[Form], iters: int, tick: Callable[[str], None]) -> dict[str, Times]:
    """Times of every form on the stack's own device, by the form's name; `tick` is called after each round."""
    device = stack.x.device
    step = _cuda_step if device.type == "cuda" else _cpu_step
    seen: dict[str, list[Times]] = {form.name: [] for form in forms}
    for iteration in range(WARM_UP + iters):
        for form in forms:
            stack.drop_gradients()
            times = step(stack, form.run)
            if iteration >= WARM_UP:
                seen[form.name].append(times)
        tick("timing")
    stack.drop_gradients()
    return {name: _median(all_of_them) for name, all_of_them in seen.items()}


def rounds(iters: int) -> int:
    """How often `clock` reports progress."""
    return WARM_UP + iters


def _median(seen: Sequence[Times]) -> Times:
    forward, backward, total = (statistics.median(column) for column in list(zip(*seen, strict=True))[:3])
    peaks = [times.peak_bytes for times in seen if times.peak_bytes is not None]
    return Times(forward, backward, total, max(peaks) if peaks else None)


def _step(stack: Stack, run: Run) -> None:
    y = stack(run)
    loss_of(y).backward()
    del y  # not before: the published benchmark has it in a variable


def _cpu_step(stack: Stack, run: Run) -> Times:
    start = time.perf_counter()
    y = stack(run)
    loss = loss_of(y)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    del y
    return Times(middle - start, end - middle, end - start, None)


def _cuda_step(stack: Stack, run: Run) -> Times:
    with torch.cuda.device(stack.x.device):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start.record()
        y = stack(run)
        loss = loss_of(y)
        middle.record()
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del y
    seconds = [first.elapsed_time(second) / 1000 for first, second in ((start, middle), (middle, end), (start, end))]
    return Times(*seconds, peak_bytes=peak)
