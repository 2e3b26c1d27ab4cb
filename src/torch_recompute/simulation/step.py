"""The step: forward, loss, backward, optimizer, on fakes of everything, with the books of `measure` open.

The step is one from the middle of a training run, in the loop that `memory/loop.py` describes. What earlier steps have
left is there from the start:

- The optimizer has its state. It makes that in its first step, so the simulated one is stepped twice at the end, and
  what it made the first time is added to all that came before.
- The output of the step before is alive until the forward returns, if the loop holds it. What an output holds once its
  backward has ended is seen at the end of the simulated step, and added to all moments of the forward.
- Gradients are alive, if the loop accumulates or zeroes them in place. A step that is not recorded makes them.

The step that is recorded is the last of those that are accumulated.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch, errors
from .._text import counted, listed
from .._torch.compiler import uncompiled
from .._torch.fakes import FakeTensorMode, resizes
from .._torch.flops import flops
from ..memory.ledger import (
    ACTIVATIONS,
    OTHER,
    Block,
    Entry,
    Ledger,
    Place,
    Sample,
    blocks_of,
    by_category,
    leaves,
)
from ..memory.loop import COMMON, Loop
from ..memory.measurement import Measurement
from ..memory.operations import PHASES, ModuleStack, Operation, Seen, Storages
from ..memory.workspaces import keep, kept_by_cublas
from ..observer import observing
from .fake_mode import FakeMode, Faker
from .result import Moment, Simulation

Watch = Callable[[str, Operation], object]
_WORTH_ADVICE = 0.1
MATTERS = 0.005
"""The share of a peak above which what is not known is said on the first line."""
_DOUBLED = (
    "The forward or the loss asks for gradients with create_graph=True, which runs the regions within it again before "
    "backward and keeps what they make: they lower no peak. Take a smaller batch, or regions outside it."
)
MakeOptimizer = Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer | str | None


def _fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": _fused_adamw,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "none": None,
}
"""The optimizers that have a name, in Python and on the command line."""
USUAL = "adamw-fused"
"""What the command line takes where none is said: the default of transformers' Trainer and of torchtitan.

Without `fused=True`, PyTorch's goes over lists on CUDA, whose temporaries take the bytes of a gradient of each weight.
"""


def optimizer_of(what: str, optimizer: object, model: nn.Module | None = None) -> Any:
    """The optimizer that is meant: one of the model's parameters, a function from these to one, or None.

    Args:
        what: The public function that was called, or the option; the error's text names it.
        optimizer: An optimizer, a class or a function that makes one, a name of `OPTIMIZERS`, or None.
        model: The model whose parameters an optimizer holds.

    Raises:
        ArgumentError: It is none of these, or an optimizer of other parameters.
    """
    said = what if what.startswith("-") else f"{what}(optimizer=...)"
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name in OPTIMIZERS:
            return OPTIMIZERS[name]
        near = "".join(f"; close to it: {one}" for one in difflib.get_close_matches(name, OPTIMIZERS, n=1))
        raise errors.ArgumentError(
            f"{said} is {optimizer!r}, which is not the name of an optimizer{near}. "
            f"Known are {', '.join(OPTIMIZERS)}.\n"
            f"  Write one of these{'' if what.startswith('-') else f', or a class: {_CLASS}'}."
        )
    if optimizer is not None and not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise errors.ArgumentError(
            f"{said} is {errors.say(optimizer)}; expected a name, a class, a function from a list of parameters to an "
            f"optimizer, or an optimizer of the model's parameters.\n  Write {_CLASS}."
        )
    if isinstance(optimizer, torch.optim.Optimizer) and model is not None:
        own = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = [tuple(parameter.shape) for parameter in held if id(parameter) not in own]
        if others:
            raise errors.ArgumentError(
                f"{said} is an optimizer of other parameters than the model's: {len(others)} of the {len(held)} that "
                f"it holds are not in {type(model).__name__}, the first of shape {others[0]}. Their state would be "
                "counted, and the model's would not.\n"
                f"  Make it of the model that is passed, or pass its class: {_CLASS}."
            )
    return optimizer


_CLASS = "optimizer=torch.optim.AdamW"


def simulate_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    prepare: Callable[[nn.Module], object] | None = None,
    watch: Watch | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | None = None,
    loop: Loop = COMMON,
    rounding: int | None = None,
    composed: str = "",
) -> Simulation:
    """Simulates one training step on a fake copy of the model; `simulate` is this with a plan, and says the rest.

    `prepare` is called with the copy before the step, `watch` with the phase of each operation of the step, and with
    the operation. `composed` is the device that functions are composed for, as "cuda 9.0",
    where it is another one than that of the step.

    Raises:
        ArgumentError: An argument is not of its kind, or the model cannot be copied.
        RecomputeError: The model reads more from its tensors than can be known.
    """
    where = device_of(model, device)
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.inference_mode(False), torch.enable_grad(), uncompiled(model):
            step = _Step(where, rounding, watch, composed)
            step.set_up(model, optimizer, prepare)
            found = step.run(args, kwargs or {}, loss, loop)
            keep()
            return found
    finally:
        touched = [parameter for parameter, grad in before if parameter.grad is not grad]
        for parameter, grad in before:
            parameter.grad = grad
        if touched:
            raise errors.RecomputeError(
                f"the copy of {type(model).__name__} used parameters of the original, through a closure or a "
                "bound method that copy.deepcopy does not follow, so its figures mean nothing. The gradients of the "
                "original have been put back.\n"
                "  Let the modules reach their parameters through attributes, so that copy.deepcopy(model) is "
                "independent."
            )


def _loss_for(output: object) -> str:
    """The line to write for an output of some kind."""
    logits = "F.cross_entropy({0}.flatten(0, -2), labels.flatten())"
    shape = getattr(output, "shape", None)
    if shape is not None:
        return "loss=lambda out: " + (logits.format("out") if len(shape) > 1 else "F.mse_loss(out, target)")
    if getattr(output, "logits", None) is not None:
        return f"loss=lambda out: {logits.format('out.logits')}, or pass labels to the model"
    if getattr(output, "last_hidden_state", None) is not None:
        return "loss=lambda out: loss_fn(head(out.last_hidden_state), labels)"
    if isinstance(output, dict):
        names = [str(name) for name in output]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return f"loss=lambda out: loss_fn(out[{names[0] if names else ''!r}], labels)"
    if isinstance(output, (tuple, list)):
        return "loss=lambda out: loss_fn(out[0], labels)"
    return "loss=lambda out: loss_fn(out, labels)"


def loss_in(output: Any) -> tuple[torch.Tensor, str]:
    """The loss of an output and what it is called: its `.loss`, or the one scalar in it that requires grad.

    Raises:
        ArgumentError: It has none, or several scalars.
    """
    found = getattr(output, "loss", None)
    if found is not None:
        return found, "the output's .loss"
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"], 'output["loss"]'
    if isinstance(output, torch.Tensor) and _is_scalar(output):
        return output, "the output"
    parts = _torch.tree_leaves(output)
    scalars = [(number, x) for number, x in enumerate(parts) if isinstance(x, torch.Tensor) and _is_scalar(x)]
    if len(scalars) != 1:
        several = "no scalar that requires grad" if not scalars else f"{len(scalars)} scalars that require grad"
        raise errors.ArgumentError(
            f"the model returned {errors.say(output)}, and which loss it is trained with cannot be told: it has no "
            f"`.loss` and {several}. The peak depends on it: a loss over logits keeps several tensors of their size.\n"
            f"  Say how the loss is computed, where the plan or the figures are asked for:  {_loss_for(output)}"
        )
    ((number, scalar),) = scalars
    return scalar, f"the one scalar in the output, tensor {number} of {len(parts)}"


def loss_of(output: Any) -> torch.Tensor:
    """The loss of an output, see `loss_in`."""
    return loss_in(output)[0]


def any_loss(output: Any) -> torch.Tensor:
    """The loss of an output that has one, else the mean of its first floating tensor, for what needs some gradient."""
    try:
        return loss_of(output)
    except errors.ArgumentError:
        tensor = first_floating(output)
        if tensor is None:
            raise
        return tensor.mean()


def _loss_of_copy(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> tuple[torch.Tensor, str]:
    """The loss of the copy's output and what it is called, by a function of the caller's or as in `loss_in`.

    Raises:
        ArgumentError: It is no loss, or differentiates by a tensor that the copy has not been given.
    """
    try:
        value, name = loss_in(output) if loss is None else (loss(output), _called(loss))
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise errors.ArgumentError(
            f"the loss ({_called(loss)}) asks for the gradient by a tensor that its output does not depend on. A step "
            "is simulated on a copy of the model and of the batch, so a tensor of the batch that the loss holds is not "
            "the one that the copy was given.\n"
            "  Let the model return its input too, and take it from there:  loss=lambda out: penalty(*out), where the "
            "forward returns (y, x) and penalty calls torch.autograd.grad(y.sum(), x, create_graph=True)."
        ) from error
    _check(value)
    return value, name


def _skipped(model: nn.Module, calls: ModuleStack) -> list[str]:
    """Of lists of like modules, those of which some ran and some did not, in words."""
    found: list[str] = []
    for path, module in model.named_modules():
        if not (isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and module.training):
            continue
        like: defaultdict[type, dict[str, bool]] = defaultdict(dict)
        for name, child in module.named_children():
            like[type(child)][name] = calls.has_called(child)
        for kind, ran in like.items():
            idle = [name for name, did in ran.items() if not did]
            if 0 < len(idle) < len(ran):
                found.append(
                    f"of {len(ran)} {kind.__name__} in {path or 'the model'}, {len(idle)} did not run in this forward "
                    f"({', '.join(idle)}), and the peak is of those that did; where layers are left out at random "
                    "(LayerDrop), another step takes more: set that probability to 0 here"
                )
    return found


def _is_scalar(tensor: torch.Tensor) -> bool:
    trains = tensor.requires_grad or not torch.is_grad_enabled()
    return tensor.numel() == 1 and tensor.dtype.is_floating_point and trains


def first_floating(output: Any) -> torch.Tensor | None:
    """The first floating tensor in an output."""
    return next((tensor for tensor in _torch.tensors_in(output) if tensor.dtype.is_floating_point), None)


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Chooses the step's device: as asked, else the model's, else (on meta) the accelerator or the CPU."""
    if device is None:
        found = next((p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != "meta"), None)
        if found is not None:
            return found
        return torch.device(_torch.accelerator() or "cpu")
    device = torch.device(device)
    if device.type not in ("cpu", _torch.accelerator()):
        raise errors.ArgumentError(
            f"device={str(device)!r}: this build of PyTorch, on this machine, has no such device, and which "
            "kernels would run there cannot be asked.\n"
            "  Leave device= out to simulate the kernels of the CPU, or simulate on a machine that has one."
        )
    return device


class _Step:
    """One simulated step; the arguments are those of `simulate_step`."""

    def __init__(self, device: torch.device, rounding: int | None, watch: Watch | None, composed: str) -> None:
        self._watch, self._composed = watch, composed
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._rounding = rounding or (512 if device.type == "cuda" else 1)
        self._fakes = FakeTensorMode()
        self._faker = Faker(self._fakes, device)

    def set_up(self, model: nn.Module, optimizer: Any, prepare: Callable[[nn.Module], object] | None) -> None:
        """Copies the model and the optimizer."""
        instance = isinstance(optimizer, torch.optim.Optimizer)
        self._model, self._optimizer = self._faker.copy((model, optimizer if instance else None))
        for parameter in self._model.parameters():
            parameter.grad = None
        self._modules = ModuleStack({id(module): path for path, module in self._model.named_modules()})
        self._pretend = FakeMode(self._fakes, lambda: self._modules.now()[1], self._composed)
        if optimizer is not None and not instance:
            with self._pretend:
                self._optimizer = optimizer(list(self._model.parameters()))
            if not isinstance(self._optimizer, torch.optim.Optimizer):
                raise errors.ArgumentError(
                    "optimizer= takes an optimizer of the model's parameters, or a function from a list "
                    f"of parameters to one, but {errors.say(optimizer)} returned {errors.say(self._optimizer)}\n"
                    "  Write optimizer=torch.optim.AdamW, or optimizer=lambda p: torch.optim.SGD(p, lr=0.1)."
                )
        if self._optimizer is not None:
            step_as_there(self._optimizer, self._device, self._pretend)
        if prepare is not None:
            prepare(self._model)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        loop: Loop,
    ) -> Simulation:
        """Runs the step."""
        args, kwargs = self._faker.arguments(args, kwargs)
        self._faker.forget()
        batch = _torch.tensors_in((args, kwargs))
        if loop.keeps_gradients:
            with self._pretend, self._modules.following():
                value, _ = _loss_of_copy(self._model(*args, **kwargs), loss)
                torch.clear_autocast_cache()
                self._backward(value)
                del value
            for leaf in batch:
                leaf.grad = None
        books = self._recording()
        books.track(self._model)
        before = books.here.live
        books.track(*batch)
        batch_bytes = books.here.live - before
        capability = self._pretend.capability
        if capability is None and self._device.type == "cuda":
            capability = torch.cuda.get_device_capability(self._device)
        if capability is not None:
            books.hold(kept_by_cublas(capability))
        with self._pretend, self._modules.following(), books:
            self._modules.step = "forward"
            output = self._model(*args, **kwargs)
            returned = books.events
            self._modules.step = "loss"
            value, name = _loss_of_copy(output, loss)
            skipped = _skipped(self._model, self._modules)
            if not loop.hold_output:
                del output
            torch.clear_autocast_cache()  # as a loop that leaves autocast before backward does
            books.forward_is_over()
            doubled = _DOUBLED if self._pretend.graph_of_gradients else ""
            self._modules.step = "backward"
            self._backward(value)
            if not loop.hold_output:
                del value
            if self._optimizer is not None:
                self._modules.step = "optimizer"
        parts, state = [books], 0
        if self._optimizer is not None:
            with self._pretend:
                self._optimizer.step()
            second = self._recording()
            second.go_on_from(books, "optimizer")
            second.track(self._model, self._optimizer)
            state = second.on(self._device).live_by_category["optimizer"]
            with self._pretend, second:
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=loop.set_to_none)
            parts.append(second)
        last = parts[-1].on(self._device)
        output = value = None  # what this frees, the step before has left until here
        held = last.live_bytes - parts[-1].on(self._device).live_bytes
        autocast = _torch.autocast_dtype(self._composed.partition(" ")[0], self._device.type)
        loop = replace(loop, loss=name, autocast=autocast, batch_bytes=batch_bytes, output_bytes=held)

        def left(event: int) -> int:
            """The output of the step before, which goes when the forward returns."""
            return held if event <= returned else 0

        timeline = [
            *(_moment(sample, books.at, state + left(sample.event), "forward") for sample in books.here.timeline),
            *(_moment(sample, part.at, 0, "optimizer") for part in parts[1:] for sample in part.here.timeline),
        ]
        peak = max(timeline, key=lambda moment: moment.live_bytes)
        in_first = peak in timeline[: len(books.here.timeline)]
        alive = parts[0 if in_first else -1].here.alive_after(peak.event)
        activations = [(entry, nbytes) for entry, nbytes in alive if entry.rank == ACTIVATIONS]
        wide, width = books.heads.wide(activations)
        categories = by_category(alive)
        if in_first:
            categories["optimizer"] += state
            categories["other"] += left(peak.event)
        unknown: dict[str, Unknown] = {}
        for part in parts:
            for (kind, _), one in part.unknown.items():
                one = one._replace(level=one.level + (state + left(one.event) if part is books else 0))
                unknown[kind] = max(unknown.get(kind, one), one, key=lambda each: each.level)
        assumed, words = uncounted(unknown, peak.live_bytes)
        blocks = blocks_of(*(part.here.changes for part in parts))
        if held:
            blocks = (Block("other", held, 0, returned + 1, Place(0, "forward")), *blocks)
        return Simulation(
            device=self._device,
            peak_bytes=peak.live_bytes,
            live_bytes=last.live_bytes,
            by_category=categories,
            activations_by_use=books.by_use(activations),
            live_by_category=last.live_by_category,
            timeline=tuple(timeline),
            blocks=blocks,
            operations=tuple(place for part in parts for place in part.at.values() if place.op),
            peak=peak,
            peak_by_module=_by_module(activations),
            saved_bytes=sum(nbytes for _, nbytes in books.kept),
            saved_by_module=_by_module(books.kept),
            flops={phase: count * loop.accumulate for phase, count in books.flops.items()},
            rounding=self._rounding,
            assumed=(*self._faker.assumed, *self._pretend.assumed, *assumed, *skipped),
            uncounted=words,
            logits_bytes=sum(wide),
            advice=" ".join(filter(None, [_advise(wide, width, peak.live_bytes), doubled])),
            loop=loop,
        )

    def _backward(self, value: torch.Tensor) -> None:
        with torch.autocast(self._device.type, enabled=False):
            value.backward()

    def _recording(self) -> Recording:
        return Recording(self._pretend, self._modules, self._device, self._rounding, self._watch)


class SimulatedMeasurement(Measurement):
    """A measurement of operations on fake tensors.

    Args:
        device: The device whose figures the properties show.
        pretend: What runs the operations.
        booked: Called with each operation when it is booked.
    """

    def __init__(self, device: torch.device | None, pretend: FakeMode, booked: Seen | None = None) -> None:
        super().__init__(device)
        self._ledgers = defaultdict(partial(Ledger, told=True))
        self._pretend, self._booked = pretend, booked

    @contextmanager
    def _watching(self) -> Generator[None]:
        def resized() -> None:
            for ledger in self._ledgers.values():
                ledger.resized()

        with observing(), self._pretend.showing(self._book), resizes(resized):
            yield

    def _workspace(self, ran: Operation) -> int:
        taken = self._pretend.workspace(ran)
        if isinstance(taken, str):
            self._uncounted(ran, taken)
            return 0
        return taken

    def _uncounted(self, ran: Operation, why: str) -> None:
        """Is called with an operation of which is not known what it takes while it runs, and why not."""

    def _place(self, func: object) -> Place:
        return Place()

    def _book(self, ran: Operation) -> None:
        super()._book(ran)
        if self._booked is not None:
            self._booked(ran)


class Recording(SimulatedMeasurement):
    """The books of one simulated step: those of `measure`, where the step is, what it keeps for backward, and FLOPs.

    Attributes:
        at: Where each event was.
        flops: FLOPs of products by phase, by PyTorch's own formulas.
        kept: What the (last) forward keeps for backward: entries of activations and their bytes.
        heads: The products that no other consumes, and what was made of them.
        unknown: What is not known to be taken, by operation and phase; of several the one whose `level` is highest.
    """

    def __init__(
        self, pretend: FakeMode, modules: ModuleStack, device: torch.device, rounding: int, watch: Watch | None = None
    ) -> None:
        super().__init__(device, pretend)
        self._here = device
        self._held: torch.UntypedStorage | None = None
        self._ledgers = defaultdict(partial(Ledger, rounding, told=True))
        self._modules, self._watched = modules, watch
        self.flops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.kept: list[tuple[Entry, int]] = []
        self.at: dict[int, Place] = {}
        self.heads = _Heads()
        self.unknown: dict[tuple[str, str], Unknown] = {}

    @property
    def events(self) -> int:
        """The number of the last operation."""
        return self._events

    @property
    def here(self) -> Ledger:
        """The books of the device."""
        return self._ledgers[self._here]

    def hold(self, nbytes: int) -> None:
        """Books memory that is there from the beginning and stays, which no forward keeps for its backward."""
        self._held = torch.UntypedStorage(nbytes, device="meta")
        self.here.mark(self._held, ACTIVATIONS, Place())

    def _book(self, ran: Operation) -> None:
        phase, module = self._modules.now()
        op, shape, count = ran.once(_described)
        place = Place(self._events + 1, phase, module, op, shape, calls=self._modules.calls)
        for device, _ in ran.results:
            self._ledgers[device].place = place
        for ledger in self._ledgers.values():
            ledger.place = place
        self.at[place.event] = place
        self.heads.follow(ran, place)
        if phase == "loss":  # reads labels, which the caller holds
            self._mark_new(ran.given)
        super()._book(ran)
        if self._watched is not None:
            self._watched(phase, ran)
        self.flops[phase] += count

    def _uncounted(self, ran: Operation, why: str) -> None:
        sizes = {id(storage): storage.nbytes() for _, storage in (*ran.given, *ran.results)}
        found = Unknown(why, sum(sizes.values()), self._events, self.here.live + sum(sizes.values()))
        kind = str(ran.func).partition(".default")[0].removesuffix("_backward"), self.at[self._events].phase
        self.unknown[kind] = max(self.unknown.get(kind, found), found, key=lambda one: one.level)

    def _mark_new(self, found: Storages) -> None:
        """Books storages that no operation has made, as from now on."""
        for device, storage in found:
            if not self._ledgers[device].touch(storage):
                self._mark(storage, OTHER)

    def _place(self, func: object) -> Place:
        return self.at[self._events]

    def _take(self, op: str, nbytes: int, device: torch.device, place: Place) -> None:
        super()._take(op, nbytes, device, place)
        self.at[self._events] = place._replace(event=self._events, op="")

    def forward_is_over(self) -> None:
        """Notes what is kept for backward."""
        self.here.book_deaths()
        alive = ((entry, nbytes) for entry, nbytes in self.here.alive() if entry.rank == ACTIVATIONS)
        self.kept = [(entry, nbytes) for entry, nbytes in alive if self._held is None or entry() is not self._held]

    def by_use(self, activations: Iterable[tuple[Entry, int]]) -> dict[str, int]:
        """Bytes of activations, by what they are there for."""
        kept = {id(entry) for entry, _ in self.kept}
        sums = {"saved": 0, "loss": 0, "transient": 0}
        for entry, nbytes in activations:
            of_loss = entry.place.phase == "loss"
            sums["loss" if of_loss else "saved" if id(entry) in kept else "transient"] += nbytes
        return sums

    def go_on_from(self, other: Recording, phase: str) -> None:
        """Takes over what another recording knows of the storages that are alive, as an event that begins a phase."""
        self._events = other._events + 1
        self.at[self._events] = Place(self._events, phase)
        for device, books in other._ledgers.items():
            books.book_deaths()
            books.stamp(self._events)
            mine = self._ledgers[device]
            for entry, _ in books.alive():
                storage = entry()
                if storage is not None:
                    mine.mark(storage, entry.rank, entry.place)


class _Heads:
    """The products of a forward that no other product consumes, and which operations follow them.

    Their results are what a loss is of, by whatever operations it is written: a cross-entropy, a divergence from a
    teacher's. Each storage is known by the products before it that none has consumed yet; a product ends that.
    """

    def __init__(self) -> None:
        self._products: dict[int, tuple[int, ...]] = {}  # the shape of its result, where that is wider than its input
        self._consumed: set[int] = set()
        self._before: dict[int, frozenset[int]] = {}  # by `id` of the storage: one of a new storage replaces it
        self._of: dict[int, frozenset[int]] = {}  # by operation

    def follow(self, ran: Operation, place: Place) -> None:
        """Is told of each operation, before it is booked."""
        before = [found for _, storage in ran.given if (found := self._before.get(id(storage)))]
        after = frozenset[int]().union(*before) - self._consumed if before else frozenset[int]()
        if place.op.startswith(_PRODUCTS):
            if place.phase in ("forward", "loss"):
                self._consumed |= after
            after = self._product(ran, place)
        for _, storage in ran.results:
            self._before[id(storage)] = after
        if after:
            self._of[place.event] = after

    def _product(self, ran: Operation, place: Place) -> frozenset[int]:
        left = ran.args["addmm" in place.op or "baddbmm" in place.op]
        if place.op.startswith(_CONVOLUTION) or not place.shape or place.shape[-1] <= left.shape[-1]:
            return frozenset()
        if place.phase in ("forward", "loss"):
            self._products[place.event] = place.shape
            return frozenset((place.event,))
        again = place.phase == "replay"
        return frozenset(event for event, shape in self._products.items() if again and shape == place.shape)

    def wide(self, activations: Iterable[tuple[Entry, int]]) -> tuple[list[int], int]:
        """The bytes of each activation that has as many elements as the result of a head before it, and their width."""
        found: list[tuple[int, int]] = []
        for entry, nbytes in activations:
            shapes = [self._products[event] for event in self._of.get(entry.place.event, frozenset()) - self._consumed]
            if any(math.prod(entry.place.shape) >= math.prod(shape) for shape in shapes):
                found.append((nbytes, max(shape[-1] for shape in shapes)))
        return [nbytes for nbytes, _ in found], max((width for _, width in found), default=0)


class Unknown(NamedTuple):
    """An operation of which is not known what it takes."""

    why: str
    nbytes: int  # of all its arguments and results
    event: int
    level: int  # with a copy of these


def uncounted(unknown: Mapping[str, Unknown], peak: int) -> tuple[tuple[str, ...], str]:
    """What is not known of operations, in words: each, and those that could raise the peak by over `MATTERS`."""
    most = {kind: one.level / peak - 1 for kind, one in unknown.items() if one.level > peak * (1 + MATTERS) > 0}
    little: defaultdict[str, list[str]] = defaultdict(list)
    for kind, one in unknown.items():
        if kind not in most:
            little[one.why].append(kind)
    unasked = "takes while it runs is not known and counted as 0 bytes"
    said = [
        f"what {kind} {unasked}: {unknown[kind].why}; a copy of its arguments and results "
        f"({errors.size(unknown[kind].nbytes)}) would raise the peak by {more:.1%}"
        for kind, more in most.items()
    ]
    said += [
        f"what each of {listed(kinds)} {unasked}: {why}; a copy of its arguments and results would not raise the peak "
        f"by {MATTERS:.1%}"
        for why, kinds in little.items()
    ]
    named = listed(sorted(most, key=lambda kind: -most[kind])[:3])
    words = (
        f"not counted: what {named} takes while it runs, perhaps {max(most.values()):.1%} of the peak" if most else ""
    )
    return tuple(said), words


_CONVOLUTION = "aten.convolution"
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", _CONVOLUTION)


def _check(value: object) -> None:
    """Refuses what backward cannot start from."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise errors.ArgumentError(
            f"the loss must be a tensor with one element that requires grad, but is {errors.say(value)}\n"
            "  Say how it is computed:  loss=lambda out: F.cross_entropy(out.logits.flatten(0, -2), labels.flatten())"
        )


def _called(loss: Any) -> str:
    """A loss that was given, in words."""
    return f"loss={getattr(loss, '__name__', type(loss).__name__)}"


def step_as_there(optimizer: torch.optim.Optimizer, device: torch.device, pretend: FakeMode) -> None:
    """Makes an optimizer take the way over lists of tensors where that is its own way, which it is on CUDA.

    It looks at the class of its parameters, and does not know that of fakes.
    """
    on_cuda = device.type == "cuda" or pretend.capability is not None
    for group in optimizer.param_groups if on_cuda else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def _described(ran: Operation) -> tuple[str, tuple[int, ...], int]:
    """The name of an operation, the shape of its first result, and its FLOPs."""
    shape = next((tuple(map(int, tensor.shape)) for tensor in leaves(ran.out)), ())
    return str(ran.func), shape, flops(ran.func, ran.args, ran.kwargs, ran.out)


def _moment(sample: Sample, places: dict[int, Any], more: int, first: str) -> Moment:
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


def _advise(wide: list[int], width: int, peak_bytes: int) -> str:
    """The advice on the loss head's share of the peak, which no plan can free; "" where that is small.

    A loss over a large vocabulary keeps the logits, their copy in float32, the logarithm of their softmax, and in
    backward their gradients alive at once. `width`: that of the logits.
    """
    share = sum(wide) / peak_bytes if peak_bytes else 0.0
    if share < _WORTH_ADVICE:
        return ""
    return (
        f"{share:.0%} of the peak ({errors.size(sum(wide))}) are {counted(len(wide), 'tensor')} of the loss as wide as "
        f"the logits ({width:,}), which no recomputation of layers frees. Compute the head and the loss for some "
        "tokens at a time: recompute(head_and_loss, tiles=8)(hidden, labels), where head_and_loss returns a loss per "
        "token."
    )
