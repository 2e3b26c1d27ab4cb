"""The step: forward, loss, backward and optimizer on fake tensors, with allocation tracking on.

The step is one from the middle of a training run, in the loop that `memory/loop.py` describes. What earlier steps have
left is there from the start:

- The optimizer has its state. It makes that in its first step, so the simulated one is stepped twice at the end, and
  what it made the first time is added to all that came before. Where it counts its steps, the second is a later one.
- The output of the step before is alive until the forward returns, if the loop holds it. What an output holds once its
  backward has ended is seen at the end of the simulated step, and added to all moments of the forward.
- Gradients are alive, if the loop accumulates or zeroes them in place, or if the optimizer does not hold their
  parameters, so that its `zero_grad` leaves them. A step that is not recorded makes them.
- An optimizer that steps in backward, from a hook of a parameter's gradient, has its state. A step that is not recorded
  makes that, too: what is alive after it is there from the start.
- Tensors that the model keeps from one call to the next are alive. Whether it does is seen at the end of a step, which
  is then simulated again, after steps that are not recorded.

The step that is recorded is the last of those that are accumulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _torch, errors
from .._torch.compiler import uncompiled
from .._torch.fakes import APART, FakeTensor, FakeTensorMode
from .._torch.graphs import gradient_hooks
from .._torch.tensors import each_tensor
from ..errors.text import at_work, counted, grouped, starred_path
from ..memory.batch import Batch, fresh, tensors_of_call
from ..memory.cuda_kernels import kept_by_cublas
from ..memory.ledger import (
    ACTIVATIONS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Block,
    Entry,
    Place,
    Sample,
    blocks_of,
    by_category,
    storages,
)
from ..memory.loop import Loop
from ..memory.measurement import Reading, weights_of
from ..memory.operations import ModuleStack
from ..memory.workspaces import keep
from ..plan.apply import Applied, apply, not_applicable
from ..plan.plan import Plan
from .context_parallel import share_context
from .copies import Faker, others_as_before, reached_as_before
from .devices import Roofline
from .experts import share_experts
from .fake_mode import FakeMode
from .fully_sharded import shard
from .recording import SHARDING, Recording, Unknown, Watch, uncounted
from .result import Moment, Simulation
from .training_step import MakeOptimizer, TrainingStep, check_loss, loss_in

Prepare = Callable[[nn.Module], object] | None
_WORTH_ADVICE = 0.1
_STATE = 0.001
"""The share of the peak from which on what the model keeps from call to call is there when the step begins."""
_LATER = 1000
"""The steps of an optimizer that are left out: RAdam takes another way from its sixth on. Periods mostly divide it."""
_STEPS_BEFORE = 8
"""The most steps before the recorded one, for a state that grows with each."""
_DOUBLED = (
    "The forward or the loss asks for gradients with create_graph=True, which runs the regions within it again before "
    "backward and keeps what they make: they lower no peak. Take a smaller batch, or regions outside it."
)


def simulate(
    model: nn.Module,
    args: Batch = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | Roofline | None = None,
    hold_output: bool = True,
    accumulate: int = 1,
    set_to_none: bool = True,
    rounding: int | None = None,
) -> Simulation:
    """Simulates a training step on fake tensors: its memory and its FLOPs, without running anything.

        result = simulate(model, batch, plan=plan, optimizer="adamw")
        print(result)
        result.peak_bytes, result.by_category, result.saved_by_module, result.flops["replay"]

    The step is one from the middle of training, in the loop

        for batch in loader:
            out = model(**batch)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    so the optimizer has its state from the start, the batch is on the device, and `out` keeps the model's output until
    the next forward returns, unless `hold_output=False`. What a model keeps from call to call is there too. It runs on
    a copy whose parameters are fake, so the model may be on the meta device and of any size; the model, its gradients
    and all random states are left as they were. Bytes are counted as `measure` counts them; `torch.autocast` around
    this call is around the step.

    Arguments of integers and booleans keep their values, so a model that looks at its attention mask does what it would
    do in a real run. Where a value depends on a weight (which expert a token goes to), an even choice is assumed. The
    kernels are those of the device; what one takes while it runs is found by running it once, alone, on made-up
    tensors. `result.assumed` says what was assumed.

    Args:
        model: The model. One with a plan in it is simulated with that; hooks are copied with it and run. Sharded
            parameters (`fully_shard`) are refused.
        args: A batch, see `make_plan`. Nothing in it is changed; it may be on the meta device, where integers are
            taken to be ones.
        kwargs: More keyword arguments of the call.
        plan: A plan to apply to the copy.
        loss: From the model's output to a scalar. It may be left out where the output has a `.loss` or `["loss"]`, or
            where one scalar in it requires grad.
        optimizer: A name ("adamw", "sgd"), a class, a function from a list of parameters to an optimizer, or an
            optimizer of the model's parameters; without one the step ends after backward.
        device: Where the step is to run: "cpu", the accelerator of this machine, or another by its data sheet, such as
            "h100", as in `make_plan`; by default where the model is, and for one on meta the accelerator if there is
            one, else the CPU.
        hold_output: Whether the output is alive until the next forward returns; else it is gone in backward.
        accumulate: How many forwards and backwards come before the optimizer's step. Bytes are those of the last, which
            finds the gradients of the others; FLOPs those of all.
        set_to_none: Whether the gradients are gone when forward begins; False for `zero_grad(set_to_none=False)`, and
            for a `zero_grad()` between forward and backward, of which the figure is an upper bound.
        rounding: What the size of each storage is rounded up to a multiple of, in bytes; by default 512 on CUDA, as its
            allocator does, and 1 elsewhere.

    Returns:
        The figures, as plain data.

    Raises:
        ArgumentError: An argument is not of its kind, the plan does not fit, a tensor cannot be copied as a fake, or
            there is no `loss` and the output does not tell.
        RecomputeError: The model reads values that a simulation cannot know, or its copy uses the model itself.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise errors.ArgumentError(not_applicable(model, plan))
    prepare = None if plan is None else partial(apply, plan=plan)
    if rounding is not None and (type(rounding) is not int or rounding < 1):
        raise errors.ArgumentError(errors.not_a_size("rounding", rounding))
    loop = Loop(hold_output, accumulate, set_to_none)
    step = TrainingStep.of("simulate", model, args, kwargs, loss, optimizer, device, loop)
    with at_work(f"simulating {type(model).__name__}"):
        return simulate_step(step, prepare=prepare, rounding=rounding)


def simulate_step(
    step: TrainingStep, *, prepare: Prepare = None, watch: Watch | None = None, rounding: int | None = None
) -> Simulation:
    """Simulates a training step on a fake copy of its model; `simulate` is this with a plan, and says the rest.

    The step of a model that keeps tensors from call to call is one after others. With `watch` it is so where the step's
    `loop` says it: see `with_carried_state`.

    Args:
        step: The step.
        prepare: Called with the copy before the step.
        watch: Called with the place of each operation of the step, and with the operation.
        rounding: See `simulate`.

    Raises:
        ArgumentError: A part of the step is not of its kind, or the model cannot be copied.
        RecomputeError: The model reads more from its tensors than can be known.
    """
    before = [(parameter, parameter.grad) for parameter in step.model.parameters()]
    try:
        with torch.inference_mode(False), torch.enable_grad(), uncompiled(step.model):
            found = _simulated(step, prepare, watch, rounding)
            later = with_carried_state(step, found)
            if watch is None and later is not None:
                found = _simulated(later, prepare, watch, rounding)
            keep()
            return found
    finally:
        touched = [parameter for parameter, grad in before if parameter.grad is not grad]
        for parameter, grad in before:
            parameter.grad = grad
        if touched:
            raise errors.RecomputeError(
                f"the copy of {type(step.model).__name__} used parameters of the original, through a closure or a "
                "bound method that copy.deepcopy does not follow, so its figures mean nothing. The gradients of the "
                "original have been put back.\n"
                "  Let the modules reach their parameters through attributes, so that copy.deepcopy(model) is "
                "independent."
            )


def _simulated(step: TrainingStep, *how: Any) -> Simulation:
    with reached_as_before(step.model, step.loss, step.optimizer):
        return _SimulatedStep(step, *how).result()


def with_carried_state(step: TrainingStep, found: Simulation) -> TrainingStep | None:
    """The same step after others, if its model keeps tensors from call to call; None where `found` is of that one."""
    kept = found.loop.state_bytes
    return replace(step, loop=replace(step.loop, state_bytes=kept)) if kept and not step.loop.state_bytes else None


_DETERMINISTIC = (
    "what CUDA's deterministic algorithms take while they run (use_deterministic_algorithms: scatters, sums by index, "
    "the backward of attention) is not known and not counted"
)


def where_it_runs(step: TrainingStep) -> tuple[torch.device, int]:
    """Returns the device of a step's tensors, with its index, and what its allocator rounds sizes up to."""
    device = step.runs_on
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device, 512 if device.type == "cuda" else 1


def held_by_libraries(pretend: FakeMode, device: torch.device) -> int:
    """Returns the bytes that the libraries of a device hold from the first product on."""
    capability = pretend.capability
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    return 0 if capability is None else kept_by_cublas(capability)


def _loss_of_copy(
    model: nn.Module, output: Any, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[torch.Tensor, str]:
    """The loss of the copy's output and what it is called, by a function of the caller's or as in `loss_in`.

    Raises:
        ArgumentError: It is no loss, or differentiates by a tensor that the copy has not been given.
    """
    try:
        made = [output] if loss is None else [loss(output)]
        if not any(tensor.requires_grad for tensor in (*_torch.tensors_in(made), *model.parameters())):
            raise errors.ArgumentError(_nothing_trains(model))
        value, name = loss_in(output) if loss is None else (made[0], _called(loss))
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
    check_loss(value)
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


class _SimulatedStep:
    """A copy of a step's model and optimizer without data, which runs the step; the arguments are `simulate_step`'s."""

    def __init__(self, step: TrainingStep, prepare: Prepare, watch: Watch | None, rounding: int | None) -> None:
        device, usual = where_it_runs(step)
        self._step, self._device, self._watch = step, device, watch
        self._rounding = rounding or usual
        fakes = FakeTensorMode()
        self._faker = Faker(fakes, device)
        instance = isinstance(step.optimizer, torch.optim.Optimizer)
        if instance and step.ranks.fully_sharded:
            raise errors.ArgumentError(
                f"optimizer is a {type(step.optimizer).__name__} of whole weights, but ranks that share them have one "
                "of shards.\n"
                "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters to an "
                "optimizer."
            )
        self._model, self._optimizer = self._faker.copy((step.model, step.optimizer if instance else None))
        if self._faker.gradient_hooks(step.model) and (step.ranks.fully_sharded or step.ranks.ep > 1):
            raise errors.ArgumentError(OF_WHOLE_WEIGHTS)
        for parameter in self._model.parameters():
            parameter.grad = None
        modules = self._modules = ModuleStack({id(module): path for path, module in self._model.named_modules()})
        self._pretend = FakeMode(fakes, lambda: modules.now()[1], step.where.target, step.host_memory)
        with self._pretend:
            share_context(self._model, step.ranks)
            share_experts(self._model, step.ranks)
            shard(self._model, step.ranks, modules)
        if step.optimizer is not None and not instance:
            self._optimizer = self._made(step.optimizer)
        if self._optimizer is not None:
            step_as_there(self._optimizer, device, self._pretend)
        self._handle = prepare and prepare(self._model)
        self._call = self._faker.arguments(*step.call)
        loss, self._beside = self._faker.loss(step.loss)
        self._own, self._step = {*step.model.parameters()}, replace(step, loss=loss)
        self._faker.forget()
        self._first = self._recording()
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # in backward
        self._hooked = [weight for weight in self._model.parameters() if gradient_hooks(weight)]
        self._output: Any = None
        self._loss: Any = None

    def _made(self, optimizer: Any) -> torch.optim.Optimizer:
        with self._pretend:
            made = self._faker.over(optimizer)(list(self._model.parameters()))
        if not isinstance(made, torch.optim.Optimizer):
            raise errors.ArgumentError(
                "optimizer= takes an optimizer of the model's parameters, or a function from a list "
                f"of parameters to one, but {errors.say(optimizer)} returned {errors.say(made)}\n"
                "  Write optimizer=torch.optim.AdamW, or optimizer=lambda p: torch.optim.SGD(p, lr=0.1)."
            )
        if not {*self._step.model.parameters()}.isdisjoint(weights_of(made)):
            raise errors.ArgumentError(
                f"optimizer={errors.say(optimizer)} makes one of the model's own parameters, and not of those that it "
                "is given, which are those of a copy: its states would not be counted.\n"
                "  Write optimizer=lambda p: torch.optim.SGD(p, lr=0.1), which takes them."
            )
        return made

    def _recording(self, *, watched: bool = True) -> Recording:
        watch = self._watch if watched else None
        return Recording(self._pretend, self._modules, self._device, self._rounding, watch)

    def result(self) -> Simulation:
        """Runs the step."""
        loop, left, own = self._step.loop, None, self._state_bytes()
        if loop.keeps_gradients or self._hooked or loop.state_bytes or self._leaves_gradients():
            left = self._step_before()
        for _ in range(_STEPS_BEFORE if loop.state_bytes else 0):
            held, left = self._state_bytes(), self._step_before()
            if self._state_bytes() <= held:
                break
        if left is not None:
            there = [] if loop.keeps_gradients else [w.grad for w in self._model.parameters() if w.grad is not None]
            nbytes = sum(storage.nbytes() for grad in there for _, storage in storages(grad))
            freed = any(weight.grad is None for weight in self._hooked)
            loop = replace(loop, frees_gradients=freed, uncleared=len(there), uncleared_bytes=nbytes)
        batch_bytes = self._track_what_is_there(left)
        seen = self._run()
        parts = [self._first]
        if self._optimizer is not None:
            parts.append(self._step_again(self._optimizer))
        last = parts[-1].on(self._device)
        state = self._state_bytes() - own
        self._output = self._loss = None  # what this frees, the step before has left until here
        held = last.live_bytes - parts[-1].on(self._device).live_bytes
        autocast = _torch.autocast_dtype(self._step.where.target.partition(" ")[0], self._device.type)
        state = state if state > _STATE * last.peak_bytes else 0
        sizes = {"batch_bytes": batch_bytes, "output_bytes": held, "state_bytes": state}
        sizes |= dict(zip(("bucket_bytes", "more_bucket_bytes"), self._step.bucket_bytes, strict=True))
        loop = replace(loop, loss=seen.loss, autocast=autocast, training=self._model.training, **sizes)
        if isinstance(self._handle, Applied):
            self._handle.remove()  # so that the copy is gone with this, without the collector of cycles
        on_cuda = self._pretend.capability is not None or self._device.type == "cuda"
        slower = [_DETERMINISTIC] if on_cuda and torch.are_deterministic_algorithms_enabled() else []
        assumed = (*self._faker.assumed, *self._pretend.assumed, *slower)
        return _StepFigures(parts, seen, held).simulation(last, loop, assumed)._replace(on_cuda=on_cuda)

    def _leaves_gradients(self) -> bool:
        """Whether parameters are trained that the optimizer does not hold, so that its `zero_grad` leaves theirs."""
        held = None if self._optimizer is None else {*weights_of(self._optimizer)}
        return held is not None and any(p.requires_grad and p not in held for p in self._model.parameters())

    def _state_bytes(self) -> int:
        """The bytes of the tensors that modules hold in attributes that are not parameters."""
        sizes = {_torch.storage_id(one): one.untyped_storage().nbytes() for one in self._held()}
        return sum(sizes.values())

    def _held(self) -> list[torch.Tensor]:
        holders = [{**vars(module), "_parameters": None, "_modules": None} for module in self._model.modules()]
        return [one for one in tensors_of_call(holders) if not isinstance(one, nn.Parameter)]

    def _step_before(self) -> Recording:
        """Runs a step that is not part of the figures, for the gradients and states that it leaves; returns these."""
        before = self._recording(watched=False)
        with self._pretend, self._modules.following(), before, self._stepping(before):
            # Of another batch, where the model may keep some of it.
            args, kwargs = each_tensor(self._call, fresh) if self._step.loop.state_bytes else self._call
            value, _ = _loss_of_copy(self._model, self._forward(args, kwargs), self._step.loss)
            del args, kwargs
            torch.clear_autocast_cache()
            self._modules.step = "backward"
            self._backward(value)
            del value
            for optimizer in self._stepped.values():
                _skip_steps(optimizer)
        for leaf in tensors_of_call(self._call):
            leaf.grad = None
        if self._stepped and self._step.loop.accumulate > 1:
            raise errors.ArgumentError(_accumulates(self._step.loop.accumulate, next(iter(self._stepped.values()))))
        if not self._step.loop.keeps_gradients:
            (self._optimizer or self._model).zero_grad()
        return before

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the copy, and says where and with what if an operation refuses its arguments."""
        try:
            return self._model(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            path = self._pretend.failed_in
            if path is None or isinstance(error, errors.RecomputeError):
                raise
            given = [*map(errors.say, args), *(f"{name}={errors.say(value)}" for name, value in kwargs.items())]
            raise errors.ArgumentError(
                f"the forward of {type(self._step.model).__name__} fails when it is called with {', '.join(given)}"
                f"{path and f', in {path}'}: {str(error).partition(chr(10))[0]}\n"
                "  Pass a batch with which model(...) itself can be called. (sizes= and longest=True change the second "
                "dimension of its first tensor.)"
            ) from error

    @contextmanager
    def _stepping(self, recording: Recording) -> Generator[None]:
        """Notes the optimizers that step in backward, of which what they make is theirs."""

        def steps(begins: bool, optimizer: torch.optim.Optimizer) -> None:
            if any(type(weight) is FakeTensor for weight in weights_of(optimizer)):
                self._stepped[id(optimizer)] = optimizer
                step_as_there(optimizer, self._device, self._pretend)
                recording.stepping(begins)

        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: steps(True, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: steps(False, optimizer)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _track_what_is_there(self, left: Recording | None) -> int:
        """Counts the model, the batch, what a step before has left and what cuBLAS keeps; returns the batch's bytes."""
        first = self._first
        for path, weight in self._model.named_parameters():
            first.name(path, weight, PARAMETERS)
            for optimizer in self._stepped.values():
                first.name(path, optimizer.state.get(weight), OPTIMIZER)
        first.track(self._model, *self._beside)
        if left is not None:
            first.track(*self._held())
            first.take_over(left, lambda place: OPTIMIZER if place.phase == "backward" else OTHER)
        before = first.here.live
        first.track(*tensors_of_call(self._call))
        batch_bytes = first.here.live - before
        held = held_by_libraries(self._pretend, self._device)
        if held:
            first.hold(held)
        if self._step.ranks.in_buckets:
            first.hold(self._step.bucket_bytes[0], SHARDING)
        return batch_bytes

    def _run(self) -> _Seen:
        """Runs forward, loss, backward and the optimizer's first step."""
        first, modules, hold_output = self._first, self._modules, self._step.loop.hold_output
        with self._pretend, modules.following(), first, self._stepping(first):
            modules.step = "forward"
            self._output = self._forward(*self._call)
            returned = first.events
            modules.step = "loss"
            self._loss, name = _loss_of_copy(self._model, self._output, self._step.loss)
            skipped = _skipped(self._model, modules)
            if not hold_output:
                self._output = None
            torch.clear_autocast_cache()  # as a loop that leaves autocast before backward does
            first.forward_is_over()
            doubled = _DOUBLED if self._pretend.graph_of_gradients else ""
            modules.step = "backward"
            self._backward(self._loss)
            if not hold_output:
                self._loss = None
            if self._optimizer is not None:
                modules.step = "optimizer"
        return _Seen(returned, name, skipped, doubled)

    def _step_again(self, optimizer: torch.optim.Optimizer) -> Recording:
        """Steps the optimizer once for its state, and once more, which is recorded."""
        held = self._first.on(self._device).live_by_category["optimizer"]  # by those that step in backward
        makes = self._recording(watched=False)  # states may be kept elsewhere than in `optimizer.state`
        with self._pretend, makes:
            optimizer.step()
            _skip_steps(optimizer)
        second = self._recording()
        second.go_on_from(self._first, "optimizer")
        for path, weight in self._model.named_parameters():
            second.name(path, optimizer.state.get(weight), OPTIMIZER)
        second.track(self._model, optimizer)
        second.take_over(makes, lambda _: OPTIMIZER)
        second.state_bytes = second.on(self._device).live_by_category["optimizer"] - held
        with self._pretend, second:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self._step.loop.set_to_none)
        return second

    def _backward(self, value: torch.Tensor) -> None:
        try:
            with _outside_autocast(self._device.type), others_as_before(value, self._own):
                value.backward()
        except RuntimeError as error:
            if isinstance(error, errors.RecomputeError) or not self._pretend.assumed:
                raise
            name, assumed = type(self._step.model).__name__, "; ".join(self._pretend.assumed)
            raise errors.RecomputeError(_backward_fails(name, error, assumed)) from error


OF_WHOLE_WEIGHTS = (
    "the model's parameters have hooks of their gradients, which are of whole weights, but ranks that share the model "
    "have parts of them.\n"
    "  Pass what registers the hooks as the optimizer: a function from a list of parameters to an optimizer, which is "
    "called with the parts."
)


def _backward_fails(model: str, error: Exception, assumed: str) -> str:
    """Text for a backward that fails where something was assumed of values."""
    return (
        f"simulate: the backward of {model} fails: {str(error).partition(chr(10))[0]}. Simulated tensors have no "
        f"values, and what was assumed of them may not fit together: {assumed}.\n"
        "  If a real step does not fail, compute what selects elements, as masks and lengths, from arguments of "
        "integers or booleans, whose values are known; or use RecomputeConfig, which simulates nothing."
    )


def _accumulates(times: int, optimizer: torch.optim.Optimizer) -> str:
    """Text for an optimizer that steps in each of several backwards."""
    return (
        f"accumulate={times}, but {type(optimizer).__name__} steps in backward, from a hook of its parameters, so it "
        "steps in each of them, and no gradient is left to add to.\n"
        "  Write accumulate=1 and a larger batch, or let the optimizer step after the last backward."
    )


@contextmanager
def _outside_autocast(device: str) -> Generator[None]:
    """A context as in a loop that has left autocast, whatever is around it: a replay drops its casts when it is over.

    Inside of another autocast, the one that a replay enters would leave its casts of weights in the cache, and the next
    forward would find them there and not make them.
    """
    around = torch.autocast_increment_nesting()
    for _ in range(around + 1):  # with the context below, which counts too, there is none
        torch.autocast_decrement_nesting()
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for _ in range(around):
            torch.autocast_increment_nesting()


class _Seen(NamedTuple):
    """Facts of a forward and a backward besides their memory."""

    returned: int  # the event with which the forward returned
    loss: str
    skipped: list[str]  # modules that did not run, in words
    doubled: str  # advice where a backward was recorded for another one


def _of_alike(words: Sequence[str]) -> tuple[str, ...]:
    """Sentences, each once; those that differ in the number of a layer are one, with a star for it."""
    groups = grouped(dict.fromkeys(words), starred_path)
    return tuple(some[0] if len(some) == 1 else f"{one} ({len(some)} times)" for one, some in groups.items())


class _StepFigures:
    """The figures of a step, from its recordings.

    Args:
        parts: The recording of forward and backward, and that of the optimizer's second step if there is one.
        seen: Facts of the first.
        held: The bytes of the output of the step before, which go when the forward returns.
    """

    def __init__(self, parts: Sequence[Recording], seen: _Seen, held: int) -> None:
        self._parts, self._seen, self._held = parts, seen, held
        first, state = parts[0], parts[-1].state_bytes
        self._state = state
        self.timeline = (
            *(_moment(s, first.at, state + self._left(s.event), "forward") for s in first.here.timeline),
            *(_moment(s, part.at, 0, "optimizer") for part in parts[1:] for s in part.here.timeline),
        )
        self.peak = max(self.timeline, key=lambda moment: moment.live_bytes)
        self._in_first = self.peak in self.timeline[: len(first.here.timeline)]
        self._alive = parts[0 if self._in_first else -1].here.alive_after(self.peak.event)

    def _left(self, event: int) -> int:
        """The bytes of the output of the step before."""
        return self._held if event <= self._seen.returned else 0

    def _by_category(self) -> dict[str, int]:
        found = by_category(self._alive)
        if self._in_first:
            found["optimizer"] += self._state
            found["other"] += self._left(self.peak.event)
        return found

    def _uncounted(self) -> tuple[tuple[str, ...], str]:
        """See `uncounted`."""
        unknown: dict[str, Unknown] = {}
        for part in self._parts:
            for (kind, _), one in part.unknown.items():
                more = self._state + self._left(one.event) if part is self._parts[0] else 0
                one = one._replace(level=one.level + more)
                unknown[kind] = max(unknown.get(kind, one), one, key=lambda each: each.level)
        return uncounted(unknown, self.peak.live_bytes)

    def _blocks(self) -> tuple[Block, ...]:
        blocks = blocks_of(*(part.here.changes for part in self._parts))
        left = Block("other", self._held, 0, self._seen.returned + 1, Place(0, "forward"))
        return (left, *blocks) if self._held else blocks

    def simulation(self, last: Reading, loop: Loop, assumed: Sequence[str]) -> Simulation:
        """Returns all figures, given those of the end, and what was assumed of values."""
        first, peak = self._parts[0], self.peak
        activations = [(entry, nbytes) for entry, nbytes in self._alive if entry.rank == ACTIVATIONS]
        entries, width = first.heads.wide(activations)
        wide = [nbytes for _, nbytes in entries]
        of_kernels, words = self._uncounted()
        return Simulation(
            device=first.device,
            peak_bytes=peak.live_bytes,
            live_bytes=last.live_bytes,
            by_category=self._by_category(),
            activations_by_use=first.by_use(activations),
            live_by_category=last.live_by_category,
            timeline=self.timeline,
            blocks=self._blocks(),
            operations=tuple(place for part in self._parts for place in part.at.values() if place.op),
            peak=peak,
            peak_by_module=_by_module(activations),
            saved_bytes=sum(nbytes for _, nbytes in first.kept),
            saved_by_module=_by_module(first.kept),
            flops={phase: count * loop.accumulate for phase, count in first.flops.items()},
            rounding=first.rounding,
            assumed=_of_alike((*assumed, *of_kernels, *self._seen.skipped)),
            uncounted=words,
            logits_bytes=sum(wide),
            advice=" ".join(filter(None, [_advise(wide, width, peak.live_bytes), self._seen.doubled])),
            loop=loop,
            host_bytes=max(part.on(APART).peak_bytes for part in self._parts),
        )


def _nothing_trains(model: nn.Module) -> str:
    """Text for a step without a gradient."""
    return (
        f"no parameter of {type(model).__name__} requires grad, nor does the batch or what the loss reads: nothing is "
        "trained, and a forward without gradients keeps no activations that a plan could drop.\n"
        "  Unfreeze what is to be trained before you plan (model.requires_grad_(), or add the adapters); a plan is of "
        "the model as it is when it is made."
    )


def _called(loss: Any) -> str:
    """A loss that was given, in words: its own, or its name."""
    return getattr(loss, "words", f"loss={getattr(loss, '__name__', type(loss).__name__)}")


def step_as_there(optimizer: torch.optim.Optimizer, device: torch.device, pretend: FakeMode) -> None:
    """Makes an optimizer take the way over lists of tensors where that is its own way, which it is on CUDA.

    It looks at the class of its parameters, and does not know that of fakes.
    """
    on_cuda = device.type == "cuda" or pretend.capability is not None
    for group in optimizer.param_groups:
        if APART in {weight.device for weight in group["params"]}:  # in host memory, which no kernel here knows
            group |= {"fused": False, "foreach": False}
        elif on_cuda and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def _skip_steps(optimizer: torch.optim.Optimizer) -> None:
    """Leaves out steps of an optimizer that counts them by weight, as those of PyTorch do."""
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            state["step"] += _LATER


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
        f"{share:.0%} of the peak ({errors.size(sum(wide))}) is {counted(len(wide), 'logits-sized tensor')} of the "
        f"loss (width {width:,}), which recomputing layers does not free. Compute the head and the loss in tiles: "
        "tiles=True (--tiles), or recompute(head_and_loss, tiles=8)(hidden, labels), where head_and_loss returns a "
        "loss per token."
    )
