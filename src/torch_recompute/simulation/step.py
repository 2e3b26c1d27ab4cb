"""The step: forward, loss, backward, optimizer, on fakes of everything, with the books of `measure` open.

The step is one from the middle of a training run: the optimizer has its state. An optimizer makes that state in its
first step, so the simulated one is stepped twice at the end, and what it made the first time is added to all that came
before. Gradients are set to None at the end of a step (`zero_grad()`), so a step begins without any; the model's output
is let go of before backward, as in `loss_of(model(x)).backward()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import _compat, errors
from .._compat.fakes import FakeTensorMode
from ..memory.blocks import blocks_of
from ..memory.ledger import ACTIVATIONS, Entry
from ..memory.workspaces import kept_by_cublas
from ..state import DEFAULT
from .advising import advise
from .faking import Faker
from .places import Places
from .pretending import Pretend
from .recording import Recording, Watch
from .result import Moment, Simulation

_WHAT = "simulate"


def simulate_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    prepare: Callable[[nn.Module], object] | None = None,
    watch: Watch | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    accumulate: int = 1,
    rounding: int | None = None,
    composed: str = "",
) -> Simulation:
    """Simulates one training step; `simulate` is this with a plan.

    Args:
        model: The model; only a fake copy of it is used.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        prepare: Called with the copy before the step.
        watch: Called with each operation of the step: its phase, overload, arguments, keyword arguments and result.
        loss: From the model's output to a scalar.
        optimizer: From a list of parameters to an optimizer, or an optimizer of the model's parameters.
        device: Where the step is to run.
        accumulate: How many forwards and backwards there are before the optimizer's step.
        rounding: What sizes are rounded up to.
        composed: The device that functions are composed for, as "cuda 9.0" (`composing.py`), where it is another one.

    Returns:
        The figures.

    Raises:
        ArgumentError: An argument is not of its kind, or the model cannot be copied.
        RecomputeError: The model reads more from its tensors than can be known.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(errors.not_a_model(_WHAT, model))
    if type(args) is not tuple:
        raise errors.ArgumentError(errors.args_not_a_tuple(_WHAT, args))
    if kwargs is not None and (not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs)):
        raise errors.ArgumentError(errors.kwargs_not_a_dict(_WHAT, kwargs))
    if type(accumulate) is not int or accumulate < 1:
        raise errors.ArgumentError(errors.bad_accumulate(accumulate))
    where = _device(model, device)
    states = [(ambient, ambient.capture()) for ambient in DEFAULT]
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            step = _Step(where, rounding, watch, composed)
            step.set_up(model, optimizer, prepare)
            return step.run(args, kwargs or {}, loss or loss_of, accumulate)
    finally:
        for ambient, state in states:
            ambient.restore(state)
        touched = [parameter for parameter, grad in before if parameter.grad is not grad]
        for parameter, grad in before:
            parameter.grad = grad
        if touched:
            raise errors.RecomputeError(errors.original_reached(type(model).__name__))


def loss_of(output: Any) -> torch.Tensor:
    """The loss of an output that has one, else the mean of its first floating tensor."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if isinstance(found, torch.Tensor):
        return found
    tensor = first_floating(output)
    if tensor is None:
        raise errors.ArgumentError(errors.no_loss(output))
    return tensor.mean()


def first_floating(output: Any) -> torch.Tensor | None:
    """The first floating tensor in an output."""
    leaves = _compat.tree_leaves(output)
    return next((x for x in leaves if isinstance(x, torch.Tensor) and x.dtype.is_floating_point), None)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where the step is to run: as asked, else where the model is, else (on meta) the accelerator or the CPU."""
    if device is None:
        found = next((p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != "meta"), None)
        if found is not None:
            return found
        return torch.device(_compat.accelerator() or "cpu")
    device = torch.device(device)
    if device.type not in ("cpu", _compat.accelerator()):
        raise errors.ArgumentError(errors.no_such_device(str(device)))
    return device


class _Step:
    """One simulated step.

    Args:
        device: Where it is to run.
        rounding: What sizes are rounded up to; None for the device's own.
        watch: Called with each operation.
        composed: The type of device that functions are composed for, where it is another one.
    """

    def __init__(self, device: torch.device, rounding: int | None, watch: Watch | None, composed: str) -> None:
        self._watch, self._composed = watch, composed
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._rounding = rounding or (512 if device.type == "cuda" else 1)
        self._fakes = FakeTensorMode()
        self._faker = Faker(self._fakes, device)
        self._optimizer: torch.optim.Optimizer | None = None

    def set_up(self, model: nn.Module, optimizer: Any, prepare: Callable[[nn.Module], object] | None) -> None:
        """Copies the model and the optimizer."""
        instance = isinstance(optimizer, torch.optim.Optimizer)
        self._model, self._optimizer = self._faker.copy((model, optimizer if instance else None))
        for parameter in self._model.parameters():
            parameter.grad = None
        self._places = Places({id(module): path for path, module in self._model.named_modules()})
        self._pretend = Pretend(self._fakes, lambda: self._places.now()[1], self._composed)
        if optimizer is not None and not instance:
            with self._pretend:
                self._optimizer = optimizer(list(self._model.parameters()))
            if not isinstance(self._optimizer, torch.optim.Optimizer):
                raise errors.ArgumentError(errors.not_an_optimizer(optimizer, self._optimizer))
        if self._optimizer is not None and (self._device.type == "cuda" or self._pretend.capability is not None):
            _as_on_cuda(self._optimizer)
        if prepare is not None:
            prepare(self._model)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor], accumulate: int
    ) -> Simulation:
        """Runs the step."""
        args, kwargs = self._faker.arguments(args, kwargs)
        books = Recording(self._pretend, self._places, self._device, self._rounding, self._watch)
        books.track(self._model)
        capability = self._pretend.capability
        if capability is None and self._device.type == "cuda":
            capability = torch.cuda.get_device_capability(self._device)
        if capability is not None:
            books.hold(kept_by_cublas(capability))
        logits: tuple[int, int] | None = None
        with self._pretend, self._places.watching(), books:
            for _ in range(accumulate):
                self._places.step = "forward"
                output = self._model(*args, **kwargs)
                self._places.step = "loss"
                logits = books.width_of(output, first_floating)
                value = loss(output)
                del output
                if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise errors.ArgumentError(errors.not_a_loss(value))
                torch.clear_autocast_cache()  # as a loop that leaves autocast before backward does
                books.forward_is_over(self._device)
                self._places.step = "backward"
                with torch.autocast(self._device.type, enabled=False):
                    value.backward()
                del value
            state, second = 0, None
            if self._optimizer is not None:
                self._places.step = "optimizer"
        if self._optimizer is not None:
            with self._pretend:
                self._optimizer.step()
            second = Recording(self._pretend, self._places, self._device, self._rounding, self._watch)
            second.go_on_from(books, "optimizer")
            second.track(self._model, self._optimizer)
            state = second.on(self._device).live_by_category["optimizer"]
            with self._pretend, second:
                self._optimizer.step()
                self._optimizer.zero_grad()
        return self._result(books, second, state, logits)

    def _result(
        self, books: Recording, second: Recording | None, state: int, logits: tuple[int, int] | None
    ) -> Simulation:
        device = self._device
        recordings = [books] if second is None else [books, second]
        parts = [recording.on(device) for recording in recordings]
        timeline = [_moment(sample, books.at, state, "forward") for sample in parts[0].timeline]
        ledger, peak_of = books.books(device), parts[0]
        extra = state
        if second is not None:
            timeline += [_moment(sample, second.at, 0, "optimizer") for sample in parts[1].timeline]
            if parts[1].peak_bytes > parts[0].peak_bytes + state:
                ledger, peak_of, extra = second.books(device), parts[1], 0
        categories = dict(peak_of.by_category)
        categories["optimizer"] += extra
        peak_bytes = peak_of.peak_bytes + extra
        peak = next(moment for moment in timeline if moment.live_bytes == peak_bytes)
        activations = [(entry, nbytes) for entry, nbytes in ledger.at_peak() if entry.rank == ACTIVATIONS]
        return Simulation(
            device=device,
            peak_bytes=peak_bytes,
            live_bytes=parts[-1].live_bytes,
            by_category=categories,
            activations_by_use=books.by_use(activations),
            live_by_category=parts[-1].live_by_category,
            timeline=tuple(timeline),
            blocks=blocks_of(*(recording.books(device).changes for recording in recordings)),
            operations=tuple(place for recording in recordings for place in recording.at.values() if place.op),
            peak=peak,
            peak_by_module=_by_module(activations),
            saved_bytes=sum(nbytes for _, nbytes in books.kept),
            saved_by_module=_by_module(books.kept),
            flops=books.flops,
            rounding=self._rounding,
            assumed=(*self._faker.assumed, *self._pretend.assumed),
            advice=advise(activations, peak_bytes, logits),
        )


def _as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer take the way over lists of tensors that it takes by itself on CUDA, where it knows one.

    It looks at the class of its parameters, and does not know that of fakes.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def _moment(sample: Any, places: dict[int, Any], more: int, first: str) -> Moment:
    """A sample as it is shown; what no operation has made, as the level at the start, is of the phase `first`."""
    place = places.get(sample.event)
    phase, module = (place.phase, place.module) if place is not None else (first, "")
    calls = place.calls if place is not None else ()
    return Moment(sample.event, sample.op, sample.live_bytes + more, phase, module, calls)


def _by_module(entries: list[tuple[Entry, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for entry, nbytes in entries:
        sums[entry.place.module] = sums.get(entry.place.module, 0) + nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
