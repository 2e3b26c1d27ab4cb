"""The actions of one stage of a pipeline, on fake tensors: a stage is cut out of the whole model while that runs.

Problem. A plan for a pipeline is made from the whole model, which any rank can build on meta; the stages are built
elsewhere, in as many ways as there are training scripts. What a stage takes must be known without them.

Idea. The whole model's forward runs, and gates stand at its segments. Before the stage, each segment answers with
the output it had in a first run, at no cost; at the stage's first segment the input is replaced by a buffer, as it is
received, and counting begins; behind its last segment the output is taken and the forward is left. So whatever the
model does between its layers is done. The first stage counts from the beginning, the last one to the loss. Parameters
and buffers belong to the stages whose operations read them, so tied weights lie on both.

Each stage runs two microbatches, one after the other (see `plan/stage_memory.py`).

Rejected: a copy of the model without the other layers, which only models that expect it can run; torch.export, which
not every model survives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.fakes import FakeTensorMode
from .._compat.pipelines import backward_for_inputs, backward_for_weights, let_go
from ..memory.ledger import storages
from ..plan.apply import apply
from ..plan.inflight import BACKWARD, FORWARD, INPUTS, WEIGHTS
from ..plan.plan import Plan
from ..plan.stage_memory import StageBytes
from ..simulation import Moment
from ..simulation.faking import Faker
from ..simulation.places import Places
from ..simulation.pretending import Pretend
from ..simulation.recording import Recording
from ..state import DEFAULT
from .ops import Op, op_of


@dataclass(frozen=True)
class Piece:
    """What was seen of a stage.

    Attributes:
        bytes: What its actions take.
        timeline: The second microbatch's, without what lived before it, up to the gradients of the stage's inputs.
        ran: The operations of one microbatch.
        parameters: Those that it reads, by name.
    """

    bytes: StageBytes
    timeline: tuple[Moment, ...]
    ran: Counter[Op]
    parameters: tuple[str, ...]


class _Left(Exception):
    """The forward is left behind a stage."""


class _Books(Recording):
    """A recording that counts only while it is told to."""

    counting = False

    def record(self, func: object, inputs: object, outputs: object) -> None:
        """Books one operation."""
        if self.counting:
            super().record(func, inputs, outputs)


@dataclass
class _Seen:
    """A segment as it was called in the first run: which of its arguments the segments before made, and its output."""

    places: list[int] = field(default_factory=list[int])
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    output: Any = None


class Pieces:
    """A model that can be run stage by stage.

    Args:
        model: The whole model.
        args: The positional arguments of a call with one microbatch.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar.
        device: Where it is to run.
        rounding: What sizes are rounded up to.
        paths: Its segments.
        stages: The segments of each stage: the first, and the first of the next.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        loss: Callable[[Any], torch.Tensor],
        device: torch.device,
        rounding: int,
        paths: Sequence[str],
        stages: Sequence[tuple[int, int]],
    ) -> None:
        fakes = FakeTensorMode()
        faker = Faker(fakes, device)
        self._model: nn.Module = faker.copy(model)
        for parameter in self._model.parameters():
            parameter.grad = None
        self._call = faker.arguments(args, kwargs or {})
        self._loss = loss
        self._device = device
        self._rounding = rounding
        self._places = Places({id(module): path for path, module in self._model.named_modules()})
        self._pretend = Pretend(fakes, lambda: self._places.now()[1])
        self._segments = [self._model.get_submodule(path) for path in paths]
        self._stages = stages
        self._seen = [_Seen() for _ in paths]
        with self._running():
            self._look()

    @contextlib.contextmanager
    def _running(self) -> Generator[None]:
        states = [(ambient, ambient.capture()) for ambient in DEFAULT]
        try:
            with torch.inference_mode(False), torch.enable_grad(), self._pretend:
                yield
        finally:
            for ambient, state in states:
                ambient.restore(state)

    def _look(self) -> None:
        """The first run: what each segment is given and returns."""

        def before(seen: _Seen) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                leaves = _compat.tree_leaves((args, kwargs))
                floats = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
                seen.places = [i for i in floats if leaves[i].requires_grad] or floats[:1]
                seen.inputs = [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in seen.places]

            return hook

        def after(seen: _Seen) -> Any:
            def hook(_: nn.Module, args: Any, result: Any) -> None:
                leaves, spec = _compat.tree_flatten(result)
                leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
                seen.output = _compat.tree_unflatten(leaves, spec)

            return hook

        with contextlib.ExitStack() as stack:
            for module, seen in zip(self._segments, self._seen, strict=True):
                stack.callback(module.register_forward_pre_hook(before(seen), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(seen)).remove)
            args, kwargs = self._call
            self._model(*args, **kwargs)

    def run(self, stage: int, plan: Plan, kinds: Iterable[str]) -> Piece:
        """Runs two microbatches through a stage.

        Args:
            stage: Its number.
            plan: What is recomputed, in the paths of the whole model.
            kinds: The kinds of its actions.
        """
        found = self._run(stage, plan, halves=INPUTS in kinds)
        if INPUTS in kinds and BACKWARD in kinds:
            own = {**self._run(stage, plan, halves=False).bytes.own, **found.bytes.own}
            found = replace(found, bytes=replace(found.bytes, own=own))
        return found

    def _run(self, stage: int, plan: Plan, *, halves: bool) -> Piece:
        with self._running():
            for parameter in self._model.parameters():
                parameter.grad = None
            handle = apply(self._model, plan)
            try:
                return _Actions(self, stage, halves).piece()
            finally:
                handle.remove()
                for parameter in self._model.parameters():
                    parameter.grad = None

    def optimizer(self, make: Callable[[Any], torch.optim.Optimizer], names: Iterable[str]) -> tuple[int, int]:
        """Bytes of an optimizer's state for some parameters, and the most that its step takes besides."""
        parameters = [self._model.get_parameter(name) for name in names]
        with self._running():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer = make(parameters)
            optimizer.step()
            books = _Books(self._pretend, self._places, self._device, self._rounding)
            books.track(optimizer)
            state = books.on(self._device).live_by_category["optimizer"]
            before = books.on(self._device).live_bytes
            books.counting = True
            with books:
                optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            return state, books.on(self._device).peak_bytes - before


class _Actions:
    """The two microbatches of one stage.

    Args:
        pieces: The model.
        stage: The number of the stage.
        halves: Whether its backwards come in halves.
    """

    def __init__(self, pieces: Pieces, stage: int, halves: bool) -> None:
        self._of = pieces
        self._halves = halves
        self._start, self._stop = pieces._stages[stage]
        self._is_first = stage == 0
        self._is_last = stage == len(pieces._stages) - 1
        self._storages = {id(storage): storage for _, storage in storages(_of_model(pieces._model))}
        self._read: set[int] = set()
        self._ran: Counter[Op] = Counter()
        self._books = _Books(pieces._pretend, pieces._places, pieces._device, pieces._rounding, self._told)
        self._given: list[torch.Tensor] = []
        self._out: Any = None
        self._kept: list[Any] = []
        self._own: dict[tuple[str, bool], int] = {}
        self._end = 0

    def _told(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._read.update(id(storage) for _, storage in storages((args, kwargs)) if id(storage) in self._storages)
        op = op_of(func, args, kwargs, out)
        if op is not None:
            self._ran[op] += 1

    @property
    def _live(self) -> int:
        return self._books.on(self._of._device).live_bytes

    @property
    def _timeline(self) -> tuple[Any, ...]:
        return self._books.on(self._of._device).timeline

    def piece(self) -> Piece:
        """Runs them."""
        with self._of._places.watching(), self._books, self._gates():
            self._microbatch(again=False)
            before, start = self._live, len(self._timeline)
            self._ran.clear()
            whole, half, through = self._microbatch(again=True)
        of, at = self._of, self._books.at
        timeline = tuple(
            Moment(s.event, s.op, s.live_bytes - before, at[s.event].phase, at[s.event].module)
            for s in self._timeline[start : self._end]
            if s.event in at
        )
        named = (*of._model.named_parameters(), *of._model.named_buffers())
        mine = {name: tensor for name, tensor in named if self._owns(tensor)}
        figures = StageBytes(
            static_bytes=self._bytes(mine.values()),
            gradient_bytes=self._bytes(p.grad for p in of._model.parameters() if p.grad is not None),
            input_bytes=0 if self._is_first else self._bytes(of._seen[self._start].inputs),
            output_bytes=self._sent_bytes,
            whole_bytes=whole,
            half_bytes=half,
            through_bytes=through,
            own=self._own,
        )
        return Piece(figures, timeline, self._ran, tuple(n for n, _ in of._model.named_parameters() if n in mine))

    def _owns(self, tensor: torch.Tensor) -> bool:
        segments = self._of._segments[self._start : self._stop]
        inside = any(tensor is x for segment in segments for x in (*segment.parameters(), *segment.buffers()))
        return inside or any(id(storage) in self._read for _, storage in storages(tensor))

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        found = {id(s): int(s.nbytes()) for t in tensors for device, s in storages(t) if device == self._of._device}
        return sum(-(-nbytes // self._of._rounding) * self._of._rounding for nbytes in found.values())

    @property
    def _sent_bytes(self) -> int:
        return 0 if self._is_last else self._bytes(_tensors(self._of._seen[self._stop - 1].output))

    def _microbatch(self, again: bool) -> tuple[int, int, int]:
        """Forward and backward; returns what is kept after the forward, between the halves, and in the end.

        Between the halves what has been sent is not counted, nor what is kept to the end.
        """
        seen = self._of._seen[self._start]
        self._given = [] if self._is_first else [_like(x) for x in seen.inputs]
        level, start = self._live, len(self._timeline)
        self._forward()
        self._note(FORWARD, again, start, level)
        whole = self._live - level
        if self._is_last:
            outputs, gradients = [self._kept[-1][-1]], None
        else:
            outputs = [x for x in _tensors(self._out) if x.requires_grad]
            gradients = [torch.empty_like(x) for x in outputs]
        half = 0
        self._of._places.step, self._books.counting = "backward", True
        start = len(self._timeline)
        if not self._halves:
            torch.autograd.backward(outputs, gradients)  # pyright: ignore[reportArgumentType]
            self._note(BACKWARD, again, start, level)
            self._end = len(self._timeline)
            for x in self._given:
                x.grad = None
        else:
            half = self._in_halves(outputs, gradients, again, level)
        self._books.counting = False
        self._given, self._out, outputs, gradients = [], None, [], None
        if self._is_last:
            let_go(self._kept[-1])
        through = self._live - level if again else 0
        between = max(0, half - level - self._sent_bytes - through)
        if self._halves and again:
            self._own = {(k, a): n - (self._sent_bytes + through) * (k == WEIGHTS) for (k, a), n in self._own.items()}
        return whole, between, through

    def _in_halves(self, outputs: Any, gradients: Any, again: bool, level: int) -> int:
        """The halves of a backward; returns what lives between them, without the gradients of inputs, which are sent.

        On the first stage there are none, and all is done in the second half.
        """
        start = len(self._timeline)
        weights = [parameter for parameter in self._of._model.parameters() if self._owns(parameter)]
        groups: Any = None
        if not self._is_first:
            groups = backward_for_inputs(outputs, gradients, self._given, weights)
        self._note(INPUTS, again, start, level)
        self._end = len(self._timeline)
        for x in self._given:
            x.grad = None
        half = self._live
        start = len(self._timeline)
        if groups is None:
            torch.autograd.backward(outputs, gradients)
        else:
            backward_for_weights(weights, groups)
        self._note(WEIGHTS, again, start, level)
        return half

    def _note(self, kind: str, again: bool, start: int, level: int) -> None:
        """Notes the most that lived since some sample above a level."""
        live = [sample.live_bytes for sample in self._timeline[start:]]
        self._own[kind, again] = max([*live, self._live]) - level

    def _forward(self) -> None:
        """The forward of the stage, on the last one with the loss; leaves its output in `_out`."""
        args, kwargs = self._of._call
        self._of._places.step, self._books.counting = "forward", self._is_first
        try:
            with torch.set_grad_enabled(self._is_first):
                self._out = self._of._model(*args, **kwargs)
        except _Left:
            pass
        if self._is_last:
            self._of._places.step = "loss"
            self._kept.append((*_tensors(self._out), self._of._loss(self._out)))
        self._books.counting = False

    @contextlib.contextmanager
    def _gates(self) -> Generator[None]:
        """Stands at the segments before the stage, at its first and behind its last."""
        segments, seen = self._of._segments, self._of._seen
        with contextlib.ExitStack() as stack:
            for module, before in zip(segments[: self._start], seen, strict=False):
                stack.enter_context(_instead(module, lambda *_args, before=before, **_kwargs: before.output))
            if not self._is_first:
                stack.enter_context(_instead(segments[self._start], self._entering(segments[self._start].forward)))
            if not self._is_last:
                stack.enter_context(_instead(segments[self._stop - 1], self._leaving(segments[self._stop - 1].forward)))
            yield

    def _entering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = _compat.tree_flatten((args, kwargs))
            for place, x in zip(self._of._seen[self._start].places, self._given, strict=True):
                leaves[place] = x
            args, kwargs = _compat.tree_unflatten(leaves, spec)
            del leaves
            torch.set_grad_enabled(True)
            self._books.counting = True
            return forward(*args, **kwargs)

        return enter

    def _leaving(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*args: Any, **kwargs: Any) -> Any:
            self._out = forward(*args, **kwargs)
            raise _Left

        return leave


def _of_model(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Another forward for a module."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in _compat.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
