"""Two microbatches of one stage of a pipeline, on fake tensors: what is kept, and the most that is alive.

A plan for a pipeline is made from the whole model, which any rank can build on meta. The whole model's forward runs,
with gates at its layers: those before the stage return what they returned in a first run; the stage's first one gets a
new tensor for its input, and counting begins; after the stage's last layer the forward is left. The first stage counts
from the beginning, the last one to the loss. What the model computes between its layers is done, what it computed
before them (rotary tables, masks) counts on each stage that reads it, and parameters belong to the stages whose
operations read them, so tied weights are on both.

What the pipeline's runtime holds and releases is done as it does it. torch's keeps the last stage's outputs to the end
of the step, and of an output that is a view the graph, too. One that releases (`release`, Megatron's) keeps of what was
sent only its place in the graph, and of what was received what autograd keeps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import GraphExecGroup

from .. import _torch
from .._torch import tensors_in
from .._torch.fakes import FakeTensorMode
from .._torch.ranks import backward_for_inputs, backward_for_weights, detach_outputs, every_input_has_a_gradient
from .._torch.tensors import each_tensor
from ..memory.ledger import ACTIVATIONS, CATEGORIES, OTHER, Block, Entry, Place, largest, storages
from ..memory.measurement import weights_of
from ..memory.operations import ModuleStack, Operation, Storages
from ..plan.apply import apply
from ..plan.choice import joined
from ..plan.plan import Plan
from ..simulation import Moment
from ..simulation.context_parallel import share_context
from ..simulation.copies import Faker, reached_as_before
from ..simulation.experts import share_experts
from ..simulation.fake_mode import FakeMode
from ..simulation.fully_sharded import ShardedStages, dtype_of, stages_of
from ..simulation.made_up import floats
from ..simulation.recording import SHARDING, Recording
from ..simulation.step import held_by_libraries, step_as_there, where_it_runs
from ..simulation.training_step import TrainingStep, loss_of
from .hosts import SimulatedHostStore
from .ops import Op, StepLog, logging, op_of
from .rank_memory import StageBytes
from .schedules import BACKWARD, FORWARD, INPUTS, REDUCE, WEIGHTS
from .states import trained


class ActionPeak(NamedTuple):
    """When a microbatch takes the most: during which operation, and the largest tensors that it has made."""

    place: Place
    largest: tuple[Block, ...]


@dataclass(frozen=True)
class StageRun:
    """The figures of a stage that has run."""

    bytes: StageBytes
    timeline: tuple[Moment, ...]
    """The second microbatch's, without what was alive before it, up to the gradients of the stage's inputs."""
    log: StepLog  # the operations of one microbatch
    parameters: tuple[str, ...]  # those that it reads
    uses: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Of what the second microbatch takes where an action of each kind takes the most, the bytes that it does not keep,
    by what they are for."""
    peaks: Mapping[str, ActionPeak] = field(default_factory=dict[str, ActionPeak])  # of these actions, when that is
    more: Mapping[str, Counter[Op]] = field(default_factory=dict[str, Counter[Op]])
    """What is sent besides, of shared weights: in a forward by the kind of the action before it; in the reduction."""

    @property
    def ran(self) -> Counter[Op]:
        """Counts how often each operation ran."""
        return self.log.ops()


@dataclass
class _Layer:
    """A layer, and how it was called in the first run: which arguments the layers before made, and its output."""

    module: nn.Module
    places: list[int] = field(default_factory=list[int])
    inputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    output: Any = None
    ran: list[Op] = field(default_factory=list[Op])  # in its forward
    running: bool = False

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.running = True
        leaves = _torch.tree_leaves((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and floats(x)]
        self.places = [i for i in places if leaves[i].requires_grad] or places[:1]
        self.inputs = [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in self.places]

    def leave(self, _: nn.Module, args: Any, result: Any) -> None:
        self.output, self.running = each_tensor(result, torch.Tensor.detach), False

    @property
    def kind(self) -> tuple[object, ...]:
        """The key of layers that are alike: the operations of a forward, and which tensors are trained."""
        weights = (weight.requires_grad for weight in self.module.parameters())
        return tuple(self.ran), tuple(weights), self.module.training

    @contextlib.contextmanager
    def replaced(self, forward: Callable[..., Any]) -> Generator[None]:
        """Another forward for the module."""
        own = self.module.__dict__
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before


class StageRunner:
    """A model that can be run stage by stage.

    Args:
        step: A step with one microbatch.
        paths: The layers, in their order.
        stages: The layers of each stage: the first, and the first of the next.
        release: Whether the runtime releases what it has sent and what it receives as soon as autograd does.
    """

    def __init__(
        self, step: TrainingStep, paths: Sequence[str], stages: Sequence[tuple[int, int]], release: bool
    ) -> None:
        fakes = FakeTensorMode()
        self.device, self._rounding = where_it_runs(step)
        faker = Faker(fakes, self.device)
        self.model: nn.Module = faker.copy(step.model)
        self.call, self._ranks = faker.arguments(*step.call), step.ranks
        self.loss, self.stages, self.release = faker.loss(step.loss or loss_of)[0], stages, release
        self.modules = ModuleStack({id(module): path for path, module in self.model.named_modules()})
        self.pretend = FakeMode(fakes, lambda: self.modules.now()[1], step.where.target, step.host_memory)
        with self.pretend:
            share_context(self.model, self._ranks)
            share_experts(self.model, self._ranks)
            self.sharded = stages_of(self.model, self._ranks, self.modules)
        self.held = held_by_libraries(self.pretend, self.device)
        self.left = set[str]() if release or self.sharded else self._left_by(step.optimizer)
        self._reads: tuple[set[int], set[int]] = set(), set()  # of the root's weights, before and after the layers
        self.paths, self.layers = paths, [_Layer(self.model.get_submodule(path)) for path in paths]
        with self._running(), contextlib.ExitStack() as stack:  # the first run
            stack.enter_context(logging(self._first_ran))
            for layer in self.layers:
                stack.callback(layer.module.register_forward_pre_hook(layer.enter, with_kwargs=True).remove)
                stack.callback(layer.module.register_forward_hook(layer.leave).remove)
            args, kwargs = self.call
            if self.sharded is not None:
                args, kwargs = self.sharded.root.before_forward(self.model, args, kwargs)
            self.model(*args, **kwargs)
            if self.sharded is not None:
                self.sharded.forget()

    def _left_by(self, make: Any) -> set[str]:
        """The names of the trained parameters that an optimizer does not hold, whose gradients it never clears."""
        with self.pretend:
            alike = {n: nn.Parameter(torch.empty_like(p), p.requires_grad) for n, p in self.model.named_parameters()}
            made = make and _made(make, [*alike.values()])
        held = {*weights_of(made)} if made is not None else {*alike.values()}
        return {name for name, weight in alike.items() if weight.requires_grad and weight not in held}

    def _first_ran(self, op: Op, ran: Operation) -> None:
        for layer in self.layers:
            if layer.running:
                layer.ran.append(op)
        if self.sharded is not None and not self.modules.now()[1].endswith(SHARDING):
            begun, ended = (one.running or one.output is not None for one in (self.layers[0], self.layers[-1]))
            for _, storage in ran.given:
                number = self.sharded.root_weight(storage)
                if number is not None:
                    for part, runs in zip(self._reads, (not ended, begun), strict=True):
                        part.update((number,) if runs else ())

    def _weights_of_root(self, stage: int) -> set[int]:
        """The numbers of the weights outside of layers that a stage reads; those between layers are on each."""
        first, last = self._reads
        ends = (first - last if stage == 0 else set[int]()) | (last - first if stage == len(self.stages) - 1 else set())
        return ends | (first & last)

    def recording(self, watch: Any) -> _StageRecording:
        """Returns an empty recording."""
        return _StageRecording(self.pretend, self.modules, self.device, self._rounding, watch)

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """The bytes of tensors on the device, each storage once."""
        return self.rounded({id(s): s for x in tensors for device, s in storages(x) if device == self.device}.values())

    def gradient_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """The bytes of the gradients that some weights have, in the type in which microbatches are added up."""
        grads = [weight.grad for weight in weights if weight.grad is not None]
        dtype = dtype_of(self._ranks.reduce_dtype)
        if dtype is None:
            return self.bytes_of(grads)
        return sum(-(-grad.numel() * dtype.itemsize // self._rounding) * self._rounding for grad in grads)

    def rounded(self, found: Iterable[torch.UntypedStorage]) -> int:
        """The bytes of storages."""
        return sum(-(-int(storage.nbytes()) // self._rounding) * self._rounding for storage in found)

    @contextlib.contextmanager
    def _running(self) -> Generator[None]:
        """Runs operations on the fakes, with grad; the parameters have no gradients before and after."""
        self.model.zero_grad()
        try:
            with (
                reached_as_before(self.model, self.loss),
                torch.inference_mode(False),
                torch.enable_grad(),
                self.pretend,
            ):
                yield
        finally:
            self.model.zero_grad()

    def run(self, stage: int, plan: Plan, kinds: Iterable[str]) -> StageRun:
        """Runs two microbatches through a stage, under a plan in the paths of the whole model.

        A stage whose actions are of such `kinds` that it has whole backwards and halves is run both ways.
        """
        found = self._run(stage, plan, halves=INPUTS in kinds)
        if INPUTS in kinds and BACKWARD in kinds:
            own = {**self._run(stage, plan, halves=False).bytes.own, **found.bytes.own}
            found = replace(found, bytes=replace(found.bytes, own=own))
        return found

    def _run(self, stage: int, plan: Plan, *, halves: bool) -> StageRun:
        host = SimulatedHostStore()
        with self._running():
            handle = apply(self.model, plan, stores={"host": host} if any(choice.store for choice in plan) else {})
            try:
                if self.sharded is None:
                    return _Microbatches(self, stage, plan, halves, host).result()
                layers = [layer.module for layer in self.layers[slice(*self.stages[stage])]]
                self.sharded.run(layers, self._weights_of_root(stage))
                return _ShardedMicrobatches(self, stage, plan, self.sharded, host).result()
            finally:
                handle.remove()

    def optimizer(
        self, make: Callable[[Any], torch.optim.Optimizer], names: Iterable[str]
    ) -> tuple[tuple[int, int], Counter[Op]]:
        """Bytes of an optimizer's state for some parameters, and the most that its step takes besides; what it runs."""
        parameters = [self.model.get_parameter(name) for name in names]
        ran: Counter[Op] = Counter()
        with self._running():
            for parameter in trained(parameters):
                parameter.grad = torch.empty_like(parameter)
            optimizer = _made(make, parameters)
            if optimizer is None:
                return (0, 0), ran
            step_as_there(optimizer, self.device, self.pretend)
            optimizer.step()
            recording = self.recording(lambda _, operation: ran.update(filter(None, [op_of(operation)])))
            recording.track(optimizer)
            before = recording.on(self.device)
            recording.counting = True
            with recording:
                optimizer.step()
                peak = recording.on(self.device).peak_bytes
                optimizer.zero_grad()
            return (before.live_by_category["optimizer"], peak - before.live_bytes), ran


def _made(make: Callable[[Any], torch.optim.Optimizer], parameters: list[Any]) -> torch.optim.Optimizer | None:
    """An optimizer of some parameters; None where its function takes none of these, as where nothing is trained."""
    try:
        return make(parameters)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        return None


class _StageRecording(Recording):
    """A recording that counts only while it is told to."""

    counting = False
    preparing = False  # whether the model computes what comes before the stage

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prepared: dict[int, torch.UntypedStorage] = {}  # made then; counted when the stage reads them
        self.labels: dict[int, torch.UntypedStorage] = {}  # read by the loss, and made by no operation; never counted

    def _book(self, ran: Operation) -> None:
        if self.counting:
            for device, storage in ran.given:
                if id(storage) in self.prepared:
                    self._ledgers[device].mark(storage, OTHER)
            super()._book(ran)
        elif self.preparing:
            self.prepared.update({id(storage): storage for _, storage in ran.made})

    def _mark_new(self, found: Storages) -> None:
        for device, storage in found:
            if not self._ledgers[device].touch(storage):
                self.labels[id(storage)] = storage


class _Microbatches:
    """The two microbatches of one stage, whose backwards may come in halves."""

    def __init__(self, runner: StageRunner, stage: int, plan: Plan, halves: bool, host: SimulatedHostStore) -> None:
        self._of, self._halves, self._host = runner, halves, host
        self._start, self._stop = runner.stages[stage]
        modules = [layer.module for layer in runner.layers[self._start : self._stop]]
        self._own_tensors = {id(x) for module in modules for x in (*module.parameters(), *module.buffers())}
        self._is_first, self._is_last = stage == 0, stage == len(runner.stages) - 1
        self._read: set[int] = set()
        self._log = StepLog(runner.paths, plan, ordered=runner.sharded is not None)
        self._uses: dict[str, dict[str, int]] = {}
        self._began = 0  # the event before the microbatch
        self._recording = runner.recording(self._seen)
        self._given: list[torch.Tensor] = []
        self._entered: list[torch.Tensor] = []  # the same as the root of a sharded stage gives them on
        self._out: Any = None
        self._kept: list[Any] = []
        self._peaks: dict[str, ActionPeak] = {}
        self._own: dict[tuple[str, bool], int] = {}
        self._end = self._returned_bytes = 0

    def _seen(self, place: Place, ran: Operation) -> None:
        self._read.update(id(storage) for _, storage in ran.given)
        self._log.see(place, ran)

    @property
    def _live(self) -> int:
        return self._recording.on(self._of.device).live_bytes

    @property
    def _timeline(self) -> tuple[Any, ...]:
        return self._recording.on(self._of.device).timeline

    def result(self) -> StageRun:
        """Runs them."""
        of, at = self._of, self._recording.at
        with of.modules.following(), self._recording, self._gates():
            before, start, (whole, half, through) = self._run()
        timeline = tuple(
            Moment(s.event, s.op, s.live_bytes - before, at[s.event].phase, at[s.event].module)
            for s in self._timeline[start : self._end]
            if s.event in at
        )
        mine = self._mine()
        received = [] if self._is_first else of.layers[self._start].inputs
        asked = every_input_has_a_gradient()  # this stage's, and the next one's
        back = of.bytes_of(x for x in received if x.requires_grad or asked)
        returned = self._sent_bytes if asked else self._returned_bytes
        # One that releases has no buffers for what it sends and receives, nor for the batch.
        there = self._batch_bytes(), of.bytes_of(received), self._sent_bytes, returned, back
        buffers = (0,) * len(there) if of.release else there
        figures = StageBytes(
            static_bytes=of.bytes_of(mine.values()),
            batch_bytes=buffers[0],
            gradient_bytes=of.gradient_bytes(mine.values()),
            input_bytes=buffers[1],
            output_bytes=buffers[2],
            returned_bytes=buffers[3],
            back_bytes=buffers[4],
            whole_bytes=whole,
            half_bytes=half,
            through_bytes=through,
            own=self._own,
            left_bytes=of.gradient_bytes(tensor for name, tensor in mine.items() if name in of.left),
        )
        names = tuple(name for name, tensor in mine.items() if isinstance(tensor, nn.Parameter))
        return StageRun(figures, timeline, self._log, names, self._uses, self._peaks)

    def _run(self) -> tuple[int, int, tuple[int, int, int]]:
        """Runs the microbatches; returns what is alive before the last, where it begins, and what it keeps."""
        self._recording.counting = True
        for parameter in map(self._of.model.get_parameter, self._of.left):
            parameter.grad = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._of.device
            )
        self._recording.counting = False
        self._microbatch(again=False)
        before, start = self._live, len(self._timeline)
        self._log.clear()
        return before, start, self._microbatch(again=True)

    def _mine(self) -> dict[str, torch.Tensor]:
        """The weights and buffers of the stage, by name."""
        named = (*self._of.model.named_parameters(), *self._of.model.named_buffers())
        return {name: tensor for name, tensor in named if self._owns(tensor)}

    def _owns(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._own_tensors or any(id(storage) in self._read for _, storage in storages(tensor))

    def _batch_bytes(self) -> int:
        """Bytes of the call's tensors that operations of the stage read, and of what the loss reads besides."""
        of = self._of
        weights = {id(storage) for _, storage in storages([*of.model.parameters(), *of.model.buffers()])}
        known = {**{id(storage): storage for _, storage in storages(of.call)}, **self._recording.labels}
        return of.rounded(s for key, s in known.items() if key in self._read and key not in weights)

    @property
    def _sent_bytes(self) -> int:
        return 0 if self._is_last else self._of.bytes_of(tensors_in(self._of.layers[self._stop - 1].output))

    def _microbatch(self, again: bool) -> tuple[int, int, int]:
        """Forward and backward; returns what is kept after the forward, between the halves, and in the end.

        Between the halves what has been sent is not counted, nor what is kept to the end.
        """
        of = self._of
        level, start, self._began = self._live, len(self._timeline), self._recording.events
        self._given = [] if self._is_first else [_like(x) for x in of.layers[self._start].inputs]
        if of.release:
            self._recording.track(*self._given)
        self._forward()
        self._note(FORWARD, again, start, level)
        outputs: list[Any] = (
            self._kept[-1][-1:] if self._is_last else [x for x in tensors_in(self._out) if x.requires_grad]
        )
        like = [] if self._is_last else [(x.shape, x.stride(), x.dtype) for x in outputs]
        if of.release:
            self._out, self._kept = None, []
            outputs = list(outputs) if self._is_last else [torch.autograd.graph.get_gradient_edge(x) for x in outputs]
        whole = self._kept_after_forward(level)
        if of.release and not again:  # gradients have buffers, which no first backward has to make
            self._given, outputs, self._recording.counting = [], [], True
            for parameter in filter(self._owns, of.model.parameters()):
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            return whole, 0, 0
        of.modules.step, self._recording.counting = "backward", of.release
        gradients = [torch.empty_strided(*shape, dtype=dtype, device=of.device) for *shape, dtype in like] or None
        half, self._returned_bytes = 0, of.bytes_of(gradients or ())
        self._recording.counting = True
        start = len(self._timeline)
        if self._halves:
            with GraphExecGroup():  # as plans for such schedules say: each region replays once for both
                half = self._in_halves(outputs, gradients, again, level)
        else:
            torch.autograd.backward(outputs, gradients)
            self._gradients_made(BACKWARD, again, start, level)
        self._recording.counting = False
        self._given, self._out, outputs, gradients = [], None, [], None
        if self._kept:
            detach_outputs(self._kept[-1])
        through = self._live - level if again else 0
        between = max(0, half - level - self._sent_bytes - through)
        if self._halves and again:
            self._own = {(k, a): n - (self._sent_bytes + through) * (k == WEIGHTS) for (k, a), n in self._own.items()}
        return whole, between, through

    def _kept_after_forward(self, level: int) -> int:
        """The bytes above a level when the next action begins: what is sent to host memory is there."""
        self._host.settle()
        return self._live - level

    def _in_halves(self, outputs: Any, gradients: Any, again: bool, level: int) -> int:
        """The halves of a backward; returns what is alive between them, without the gradients that are sent.

        On the first stage there are none, and all is done in the second half.
        """
        start = len(self._timeline)
        weights = [parameter for parameter in self._of.model.parameters() if self._owns(parameter)]
        groups: Any = None
        if not self._is_first:
            groups = backward_for_inputs(outputs, gradients, self._given, weights)
        self._gradients_made(INPUTS, again, start, level)
        half = self._live
        start = len(self._timeline)
        if groups is None:
            torch.autograd.backward(outputs, gradients)
        else:
            backward_for_weights(weights, groups)
        self._note(WEIGHTS, again, start, level)
        return half

    def _gradients_made(self, kind: str, again: bool, start: int, level: int) -> None:
        """Ends the timeline where the gradients of the inputs have been made, which are then sent."""
        self._note(kind, again, start, level)
        self._end = len(self._timeline)
        for x in self._given:
            x.grad = None

    def _note(self, kind: str, again: bool, start: int, level: int) -> None:
        """Notes the most that was alive since some sample above a level."""
        if kind == FORWARD:
            self._recording.forward_is_over()
        self._own[kind, again] = self._most(start, level)
        if again and (samples := self._timeline[start:]):
            peak = max(samples, key=lambda sample: sample.live_bytes)
            new = self._made(peak.event)
            self._uses[kind] = self._used(new)
            made = [Block(CATEGORIES[one.rank], nbytes, one.place.event, None, one.place) for one, nbytes in new]
            place = self._recording.at.get(peak.event, Place())
            self._peaks[kind] = ActionPeak(place._replace(op=peak.op), largest(made))

    def _most(self, start: int, level: int) -> int:
        """The most that was alive since some sample above a level."""
        return max([*(sample.live_bytes for sample in self._timeline[start:]), self._live]) - level

    def _made(self, event: int) -> list[tuple[Entry, int]]:
        """The activations of the microbatch that are alive after an event."""
        alive = self._recording.here.alive_after(event)
        return [(one, nbytes) for one, nbytes in alive if one.rank == ACTIVATIONS and one.place.event > self._began]

    def _used(self, new: list[tuple[Entry, int]]) -> dict[str, int]:
        """Bytes of activations besides those that are kept, by what they are for."""
        found = self._recording.by_use(new)
        del found["saved"]
        return found

    def _forward(self) -> None:
        """The forward of the stage, on the last one with the loss; leaves its output in `_out`."""
        of, recording = self._of, self._recording
        args, kwargs = of.call
        of.modules.step, recording.counting, recording.preparing = "forward", self._is_first, not self._is_first
        try:
            with torch.set_grad_enabled(self._is_first):
                self._out = of.model(*args, **kwargs)
        except _StageEnded:
            pass
        if self._is_last:
            of.modules.step = "loss"
            self._kept.append((*tensors_in(self._out), of.loss(self._out)))
        recording.counting = recording.preparing = False
        recording.prepared.clear()

    @contextlib.contextmanager
    def _gates(self) -> Generator[None]:
        """Gates at the layers before the stage, at its first and after its last."""
        layers = self._of.layers
        with contextlib.ExitStack() as stack:
            for before in layers[: self._start]:
                stack.enter_context(before.replaced(lambda *_args, before=before, **_kwargs: before.output))
            for layer, gate, is_end in (
                (layers[self._start], self._entering, self._is_first),
                (layers[self._stop - 1], self._leaving, self._is_last),
            ):
                if not is_end:
                    stack.enter_context(layer.replaced(gate(layer.module.forward)))
            yield

    def _entering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = _torch.tree_flatten((args, kwargs))
            for place, x in zip(self._of.layers[self._start].places, self._entered or self._given, strict=True):
                leaves[place] = x
            args, kwargs = _torch.tree_unflatten(leaves, spec)
            del leaves
            torch.set_grad_enabled(True)
            self._entered, self._recording.counting = [], True
            args, kwargs = self._enters(args, kwargs)
            return forward(*args, **kwargs)

        return enter

    def _enters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the stage's first layer."""
        return args, kwargs

    def _leaving(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*args: Any, **kwargs: Any) -> Any:
            self._out = forward(*args, **kwargs)
            raise _StageEnded

        return leave


class _Flight(NamedTuple):
    """A microbatch between its forward and its backward."""

    given: list[torch.Tensor]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor] | None  # of the outputs
    whole: int  # bytes that it keeps
    kept: Any  # to the end of the step


class _ShardedMicrobatches(_Microbatches):
    """Three microbatches of a stage whose weights are sharded, in torch's runtime, and the reduction of its gradients.

    What is gathered in an action depends on the one before it, so there are two forwards, two backwards, and one of
    each in turn.
    """

    def __init__(
        self, runner: StageRunner, stage: int, plan: Plan, sharded: ShardedStages, host: SimulatedHostStore
    ) -> None:
        super().__init__(runner, stage, plan, False, host)
        self._sharded = sharded
        self._more: dict[str, Counter[Op]] = {}
        self._after: dict[tuple[str, bool, str], int] = {}
        self._gathered: dict[str, int] = {}
        self._entry = next((unit for unit in sharded.units if unit.module is runner.layers[self._start].module), None)
        self._exit = next((unit for unit in sharded.units if unit.module is runner.layers[self._stop - 1].module), None)

    def _mine(self) -> dict[str, torch.Tensor]:
        of, paths = self._of, {id(module): path for path, module in self._of.model.named_modules()}
        shards = {joined(paths[id(module)], name): weight for module, name, weight in self._sharded.shards()}
        return {**shards, **{name: x for name, x in of.model.named_buffers() if self._owns(x)}}

    def result(self) -> StageRun:
        found = super().result()
        bytes_ = replace(found.bytes, gradient_bytes=self._whole_gradients, reduced_bytes=self._reduced)
        bytes_ = replace(bytes_, after=self._after, gathered=self._gathered)
        return replace(found, bytes=bytes_, more=self._more)

    def _run(self) -> tuple[int, int, tuple[int, int, int]]:
        of, flying, last, whole, through, before, start = self._of, list[_Flight](), "", 0, 0, 0, 0
        for kind in (FORWARD, FORWARD, BACKWARD, BACKWARD, FORWARD, BACKWARD):
            if kind == FORWARD:
                before, start, self._began = self._live, len(self._timeline), self._recording.events
                self._log.clear()
                flying.append(self._flight(last))
                whole = flying[-1].whole
                self._more.setdefault(last, self._collectives())
            else:
                through = self._end_of(flying.pop(0), last)
            self._gathered[kind] = of.bytes_of(self._sharded.held)
            last = kind
        self._whole_gradients, level, first = of.bytes_of(self._sharded.gradients), self._live, len(self._timeline)
        log, self._log = self._log, StepLog((), Plan(), ordered=True)
        self._recording.counting, of.modules.step = True, "backward"
        self._sharded.reduce()
        self._recording.counting = False
        self._more[REDUCE], self._log = self._collectives(), log
        self._reduced = of.bytes_of(self._sharded.gradients)
        most = self._most(first, level)
        self._own |= {(REDUCE, had): most for had in (False, True)}
        self._uses[REDUCE] = {SHARDING: most}
        return before, start, (whole, 0, through)

    def _collectives(self) -> Counter[Op]:
        """Those that have been counted."""
        return Counter(ran.op for ran in self._log.order if ran.op.sent_bytes is not None)

    def _flight(self, last: str) -> _Flight:
        """A forward after an action of some kind."""
        of, level, start = self._of, self._live, len(self._timeline)
        held = of.bytes_of(self._sharded.held)
        self._given = [] if self._is_first else [_like(x) for x in of.layers[self._start].inputs]
        self._forward()
        self._note(FORWARD, True, start, level)
        for had in (False, True):
            self._own[FORWARD, had] = self._after[FORWARD, had, last] = self._own[FORWARD, True]
        out = self._kept[-1][-1:] if self._is_last else [x for x in tensors_in(self._out) if x.requires_grad]
        shapes = [] if self._is_last else [(x.shape, x.stride(), x.dtype) for x in out]
        gradients = [torch.empty_strided(*shape, dtype=dtype, device=of.device) for *shape, dtype in shapes]
        self._returned_bytes = self._sent_bytes
        whole = self._live - level - (of.bytes_of(self._sharded.held) - held)
        return _Flight(self._given, list(out), gradients or None, whole, self._kept[-1] if self._is_last else ())

    def _end_of(self, flight: _Flight, last: str) -> int:
        """A backward after an action of some kind; returns what stays of the microbatch."""
        of, sharded, had = self._of, self._sharded, bool(self._sharded.gradients)
        level, start = self._live - flight.whole, len(self._timeline)
        stays = of.bytes_of([*sharded.held, *sharded.gradients])
        self._given, self._out, of.modules.step, self._recording.counting = flight.given, None, "backward", True
        torch.autograd.backward(flight.outputs, flight.gradients)
        self._gradients_made(BACKWARD, True, start, level)
        self._after[BACKWARD, had, last] = self._own[BACKWARD, had] = self._own[BACKWARD, True]
        self._recording.counting, self._given, kept = False, [], flight.kept
        del flight
        detach_outputs(kept)
        return self._live - level - (of.bytes_of([*sharded.held, *sharded.gradients]) - stays)

    def _forward(self) -> None:
        of, recording, root = self._of, self._recording, self._sharded.root
        args, kwargs = of.call
        of.modules.step, recording.counting = "forward", True
        if self._is_first:
            args, kwargs = root.before_forward(of.model, args, kwargs)
        else:
            given, _ = root.before_forward(of.model, tuple(self._given), {})
            self._entered, recording.counting, recording.preparing = list(given), False, True
            if self._entry is not None:
                self._entry.active = False
        try:
            with torch.set_grad_enabled(self._is_first):
                self._out = of.model(*args, **kwargs)
        except _StageEnded:
            if self._exit is not None:
                self._exit.after_forward(self._exit.module, None, self._out)
        with torch.enable_grad():
            root.after_forward(of.model, None, self._out)
        if self._is_last:
            of.modules.step = "loss"
            self._kept.append((*tensors_in(self._out), of.loss(self._out)))
        recording.counting = recording.preparing = False
        recording.prepared.clear()

    def _enters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._entry is None:
            return args, kwargs
        self._entry.active = True
        return self._entry.before_forward(self._entry.module, args, kwargs)


class _StageEnded(Exception):
    """The forward is left after a stage."""


def _like(x: torch.Tensor) -> torch.Tensor:
    grad = x.requires_grad or every_input_has_a_gradient()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=grad)
