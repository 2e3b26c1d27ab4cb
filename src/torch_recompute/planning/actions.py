"""Two microbatches of one stage, forward and backward, on fake tensors: what is kept, and the most that lives.

Gates stand at the layers of the whole model while its forward runs. Those before the stage answer with what they
returned in a first run; the stage's first one puts a buffer in the place of its input, and counting begins; behind the
last one the forward is left. The first stage counts from the beginning, the last one to the loss.

What torch's own stages hold and let go of is done as they do it: gradients of inputs go at once, the last stage keeps
its outputs to the end of the step, and of an output that is a view the graph, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.pipelines import backward_for_inputs, backward_for_weights, let_go
from ..memory.ledger import storages
from ..plan.inflight import BACKWARD, FORWARD, INPUTS, WEIGHTS
from ..plan.stage_memory import StageBytes
from ..simulation import Moment
from ..simulation.places import Places
from ..simulation.pretending import Pretend
from ..simulation.recording import Recording
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


class Books(Recording):
    """A recording that counts only while it is told to.

    Attributes:
        labels: The storages that the loss reads and no operation made, by identity. They are not in the books.
    """

    counting = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.labels: dict[int, torch.UntypedStorage] = {}

    def record(self, func: object, inputs: object, outputs: object) -> None:
        """Books one operation."""
        if self.counting:
            super().record(func, inputs, outputs)

    def _mark_new(self, values: object) -> None:
        for device, storage in storages(values):
            if not self._ledger(device).touch(storage):
                self.labels[id(storage)] = storage


@dataclass
class Seen:
    """A segment as it was called in the first run: which of its arguments the segments before made, and its output."""

    places: list[int] = field(default_factory=list[int])
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    output: Any = None


@dataclass
class Whole:
    """A model on fake tensors, and what is known of how it is cut.

    Attributes:
        model: The model.
        call: The arguments of a call with one microbatch.
        loss: From its output to a scalar.
        device: Where it is to run.
        rounding: What sizes are rounded up to.
        places: Knows which module runs.
        pretend: The mode of the fakes.
        segments: Its layers.
        stages: The layers of each stage: the first, and the first of the next.
        seen: The layers as they were called in the first run.
    """

    model: nn.Module
    call: tuple[tuple[Any, ...], dict[str, Any]]
    loss: Callable[[Any], torch.Tensor]
    device: torch.device
    rounding: int
    places: Places
    pretend: Pretend
    segments: list[nn.Module]
    stages: Sequence[tuple[int, int]]
    seen: list[Seen]


class Actions:
    """The two microbatches of one stage.

    Args:
        whole: The model.
        stage: The number of the stage.
        halves: Whether its backwards come in halves.
    """

    def __init__(self, whole: Whole, stage: int, halves: bool) -> None:
        self._of = whole
        self._halves = halves
        self._start, self._stop = whole.stages[stage]
        self._is_first = stage == 0
        self._is_last = stage == len(whole.stages) - 1
        self._storages = {id(storage): storage for _, storage in storages(_of_model(whole.model))}
        self._batch = {id(storage): storage for _, storage in storages(whole.call)}
        self._read: set[int] = set()
        self._ran: Counter[Op] = Counter()
        self._books = Books(whole.pretend, whole.places, whole.device, whole.rounding, self._told)
        self._given: list[torch.Tensor] = []
        self._out: Any = None
        self._kept: list[Any] = []
        self._own: dict[tuple[str, bool], int] = {}
        self._end = 0

    def _told(self, _: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._read.update(id(storage) for _, storage in storages((args, kwargs)))
        op = op_of(func, args, kwargs, out)
        if op is not None:
            self._ran[op] += 1

    @property
    def _live(self) -> int:
        return self._books.on(self._of.device).live_bytes

    @property
    def _timeline(self) -> tuple[Any, ...]:
        return self._books.on(self._of.device).timeline

    def piece(self) -> Piece:
        """Runs them."""
        with self._of.places.watching(), self._books, self._gates():
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
        named = (*of.model.named_parameters(), *of.model.named_buffers())
        mine = {name: tensor for name, tensor in named if self._owns(tensor)}
        figures = StageBytes(
            static_bytes=self._bytes(mine.values()),
            batch_bytes=self._batch_bytes(),
            gradient_bytes=self._bytes(p.grad for p in of.model.parameters() if p.grad is not None),
            input_bytes=0 if self._is_first else self._bytes(of.seen[self._start].inputs),
            output_bytes=self._sent_bytes,
            whole_bytes=whole,
            half_bytes=half,
            through_bytes=through,
            own=self._own,
        )
        return Piece(figures, timeline, self._ran, tuple(n for n, _ in of.model.named_parameters() if n in mine))

    def _owns(self, tensor: torch.Tensor) -> bool:
        segments = self._of.segments[self._start : self._stop]
        inside = any(tensor is x for segment in segments for x in (*segment.parameters(), *segment.buffers()))
        return inside or any(id(storage) in self._read for _, storage in storages(tensor))

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        found = {id(s): int(s.nbytes()) for t in tensors for device, s in storages(t) if device == self._of.device}
        return self._rounded(found.values())

    def _batch_bytes(self) -> int:
        """Bytes of the call's tensors that operations of the stage read, and of what the loss reads besides."""
        known = {**self._batch, **self._books.labels}
        read = {key: s for key, s in known.items() if key in self._read and key not in self._storages}
        return self._rounded(int(storage.nbytes()) for storage in read.values())

    def _rounded(self, sizes: Iterable[int]) -> int:
        return sum(-(-nbytes // self._of.rounding) * self._of.rounding for nbytes in sizes)

    @property
    def _sent_bytes(self) -> int:
        return 0 if self._is_last else self._bytes(_tensors(self._of.seen[self._stop - 1].output))

    def _microbatch(self, again: bool) -> tuple[int, int, int]:
        """Forward and backward; returns what is kept after the forward, between the halves, and in the end.

        Between the halves what has been sent is not counted, nor what is kept to the end.
        """
        seen = self._of.seen[self._start]
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
        self._of.places.step, self._books.counting = "backward", True
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
        weights = [parameter for parameter in self._of.model.parameters() if self._owns(parameter)]
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
        args, kwargs = self._of.call
        self._of.places.step, self._books.counting = "forward", self._is_first
        try:
            with torch.set_grad_enabled(self._is_first):
                self._out = self._of.model(*args, **kwargs)
        except _Left:
            pass
        if self._is_last:
            self._of.places.step = "loss"
            self._kept.append((*_tensors(self._out), self._of.loss(self._out)))
        self._books.counting = False

    @contextlib.contextmanager
    def _gates(self) -> Generator[None]:
        """Stands at the segments before the stage, at its first and behind its last."""
        segments, seen = self._of.segments, self._of.seen
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
            for place, x in zip(self._of.seen[self._start].places, self._given, strict=True):
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
