"""The first steps of a training, compared with the step that its plan was made for.

A plan promises the peak of one loop around one call. The loop that runs may be another one: gradients are accumulated,
autocast is on, a longer batch comes, LayerDrop leaves out other layers. Nothing fails then; the peak is another. So the
handle of `auto` looks at the first `STEPS` steps: at what is alive when a forward begins, at which layers are called,
at which optimizer steps, and on CUDA at the allocator's peak. Between two steps it says once what differs and what to
write, or lets the plan be made again. Then it is gone, with its hooks.

Only what raises the peak is a difference, and another autocast: a smaller step is within the promise. Rejected: a
measurement of the peak where the allocator has no counter (the CPU), since it needs a mode in every operation.

Invariants: nothing is exchanged while a graph of the model is alive, or while a region runs. The plan is made for the
forward below this wrapper, in the ambient state of a call, so what others have put on top (autocast of accelerate) is
around the planned step as it is around the real one. A copy of the model is not watched.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _torch, errors
from .._torch import tracing
from ..errors.text import counted, listed
from ..memory import allocator
from ..memory.batch import ExampleCall, tensors_of_call
from ..memory.loop import COMMON
from ..memory.measurement import weights_of
from ..memory.saved import generators
from .apply import Applied
from .choice import joined
from .plan import Plan
from .sizes import in_order, parameters
from .wrappers import ForwardWrapper

STEPS = 3
TOLERANCE = 0.005  # of the promise
MOST_VALUES = 2**16  # of a tensor of integers in a call, to plan with them: offsets and lengths fit no others
MOST_CALLS = 64  # of a step whose end shows neither in an optimizer nor in gradients
COUNTING = ("cuda",)  # devices whose allocator counts a peak
ALONE = "another plan would not change it"
_ONE_BACKWARD = "and one backward(), of the sum of the losses (a gradient penalty needs both)"


@dataclass(frozen=True)
class Deviation:
    """Something of a training that is not as in the planned step.

    Attributes:
        what: What it is, in words.
        argument: What to write among the arguments of `auto`, if it is said there.
        otherwise: What to write where it is not.
        options: What another planning is given for it; None where it would change nothing.
    """

    what: str
    argument: str = ""
    otherwise: str = ""
    options: dict[str, Any] | None = field(default_factory=dict[str, Any])


class Planning(Protocol):
    """Plans for what has been seen of a training."""

    optimizer: Any

    def __call__(self, call: ExampleCall, **options: Any) -> Plan:
        """The plan for a call; `options` are those of the differences."""
        ...

    def keeps_less_than(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the planned optimizer has smaller states than one that has stepped."""
        ...

    def on_plan_applied(self, handle: Applied) -> None:
        """Called with the handle when a plan is in the model."""
        ...

    def together(self, mine: Sequence[str]) -> set[str]:
        """The words of all ranks."""
        ...

    @property
    def speaks(self) -> bool:
        """Whether this rank prints."""
        ...


def _trainable(model: nn.Module) -> int:
    """The elements of the parameters that require grad and have a shape."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p))


def shapes_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of the tensors of a call, in an order that does not depend on that of its keywords."""
    return [x.shape for x in tensors_of_call(in_order(parameters(model), args, dict(sorted(kwargs.items()))))]


class _Mark:
    """A hook of a call's graph: says when backward goes through it, and is alive as long as the graph is."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, gradient: torch.Tensor) -> None:
        call, task = self._call, _torch.graph_task_id()
        call.again |= call.retained and task != call.task
        if task != call.task:
            _torch.after_backward(partial(call.ended, call.versions()))
        call.backward, call.task = True, task
        call.retained = _torch.graph_is_kept()  # of the last one: an earlier one may have had to keep it


@dataclass(frozen=True)
class _Layout:
    """The layout of a tensor, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def ones(self) -> torch.Tensor:
        """A tensor of it."""
        return torch.ones(self.shape, dtype=self.dtype, device=self.device)


def _without_memory(leaf: Any, integers: bool) -> Any:
    """Returns an argument without the memory of its tensor; with `integers`, a copy of a small one of these."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not integers or leaf.is_floating_point() or leaf.is_complex() or leaf.numel() > MOST_VALUES:
        return _Layout(leaf.shape, leaf.dtype, leaf.device)
    return leaf.detach().clone()


class _Call:
    """One call of a model: its shapes, the layers that ran, what was there when it began, and its graph."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        beside: Sequence[_Call],
        planned: Sequence[tuple[int, ...]],
    ) -> None:
        self.beside = beside  # the calls whose graphs wait for a backward when it begins
        self.shapes = shapes_of(model, args, kwargs)
        leaves, self._spec = _torch.tree_flatten((args, kwargs))
        larger = self.exceeds(planned)  # than the planned call, and so to be planned for
        self._leaves = [_without_memory(leaf, integers=larger) for leaf in leaves]
        self.layers: Counter[str] = Counter()
        self._weights = [weight for weight in model.parameters() if weight.is_leaf]
        self.gradients = any(weight.grad is not None for weight in self._weights)
        self.device = next((p.device.type for p in model.parameters()), "cpu")
        self.autocast = _torch.autocast_dtype(self.device)
        self.draws, self.training = generators(), model.training
        self.backward = self.retained = self.again = self.accumulated = False
        self.task = -1  # of autograd's engine, for the last backward through it
        self._graph: weakref.ref[_Mark] | None = None

    def runs(self, path: str) -> None:
        """Counts a layer. The autocast around the first is that of the call: the model's forward may turn it on."""
        if not self.layers:
            self.autocast = _torch.autocast_dtype(self.device)
        self.layers[path] += 1

    def ends(self, output: Any) -> None:
        """Looks out for the backward through what the model returned."""
        mark = _Mark(self)
        self._graph = weakref.ref(mark)
        for tensor in _torch.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(mark)

    def versions(self) -> list[tuple[int, int]]:
        """The versions of weights and gradients, of which a backward changes some unless it is `autograd.grad`."""
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        return [(id(tensor), _torch.version_of(tensor)) for tensor in (*self._weights, *gradients)]

    def ended(self, versions: list[tuple[int, int]]) -> None:
        """Called after a backward through it, with the versions before it."""
        self.accumulated |= versions != self.versions()

    @property
    def in_flight(self) -> bool:
        """Whether its graph waits for a backward."""
        return not self.backward and self._graph is not None and self._graph() is not None

    @property
    def outlives(self) -> bool:
        """Whether its graph is alive after a backward that retains it."""
        return self.retained and self._graph is not None and self._graph() is not None

    def exceeds(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether a tensor of it is larger than that of another call."""
        return any(math.prod(a) > math.prod(b) for a, b in zip(self.shapes, shapes, strict=False))

    def example(self) -> ExampleCall:
        """Arguments of these shapes, with the small ones of its integers, and ones."""
        made = [leaf.ones() if isinstance(leaf, _Layout) else leaf for leaf in self._leaves]
        return _torch.tree_unflatten(made, self._spec)


def _no_plan(model: str) -> str:
    """Text for a first call that is to be planned, where it is compiled."""
    return (
        f"{model} was to be planned in its first call, but torch.compile traces that call, where nothing can be "
        "planned. It runs without a plan.\n"
        '  Plan before it is compiled:  auto(model, batch, budget=...)  or  apply(model, "full")'
    )


class FirstSteps(ForwardWrapper):
    """The forward of a model in the first steps under a plan.

    Args:
        handle: The plan in the model.
        planning: Makes it again.
        shapes: Those of the tensors in the planned call; None where the first call is to be planned.
        replan: Whether to plan again; else to say what to write.
    """

    def __init__(
        self, handle: Applied, planning: Planning, shapes: Sequence[tuple[int, ...]] | None, *, replan: bool = True
    ) -> None:
        super().__init__(handle.model, "")
        self._handle, self._planning, self._replan, self._shapes = handle, planning, replan, shapes
        self._steps = 0
        self._calls: list[_Call] = []  # of the present step
        self._running: _Call | None = None
        self._stepped: list[torch.optim.Optimizer] = []  # of the present step
        self._hooks: list[Any] = []  # of layers
        self._peaks: dict[int, allocator.Peak] = {}

    def put(self) -> None:
        """Begins to look."""
        super().put()
        _looking.add(self)
        if not _hook:
            _hook.append(register_optimizer_step_post_hook(_stepped))
        self._watch_layers_of_plan()

    def take_out(self) -> None:
        """Stops looking."""
        self.out = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _looking.discard(self)
        if _hook and not _looking:
            _hook.pop().remove()
        self._calls.clear()
        allocator.end(self._peaks)
        super().take_out()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "path": "", "_before": self._before, "out": True, "when": None}  # a copy

    def _on(self, module: nn.Module) -> ForwardWrapper:
        made = super()._on(module)
        made.out = True
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        compiling = torch.compiler.is_compiling()
        if compiling and self._shapes is None and not self.out:
            tracing.say(_no_plan(type(self.module).__name__))
        if self.out or compiling or not torch.is_grad_enabled() or _torch.in_backward():
            return self.plain(*args, **kwargs)
        beside = [one for one in self._calls if one.in_flight]
        call = _Call(self.module, args, kwargs, beside, self._shapes or ())
        self._begins(call, (args, kwargs))
        if self.out:
            return self.plain(*args, **kwargs)
        self._calls.append(call)
        around, self._running = self._running, call
        try:
            result = self.plain(*args, **kwargs)
        finally:
            self._running = around
        call.ends(result)
        return result

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer; one within backward is of a part of the model."""
        if _torch.in_backward():
            return
        own = {id(parameter) for parameter in self.module.parameters()}
        known = any(one is optimizer for one in self._stepped)
        if not known and any(id(weight) in own for weight in weights_of(optimizer)):
            self._stepped.append(optimizer)

    # --- layers ---------------------------------------------------------------------------------------------------

    def _watch_layers_of_plan(self) -> None:
        """Counts the calls of the layers that are in the plan, and of those beside them that its step left out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._handle.first.autocast = None  # is spoken of here
        self._planning.on_plan_applied(self._handle)
        self._trainable = _trainable(self.module)
        plan: Any = self._handle.plan
        paths = [path for path, _ in plan.modules]
        profile = plan.profile
        self._planned = Counter(paths if profile is None else [one.path for one in profile.costs.segments])
        self._often_known = profile is not None
        modules = dict(self.module.named_modules())
        for path in dict.fromkeys([*filter(None, paths), *_beside(modules, paths)]):
            self._hooks.append(modules[path].register_forward_pre_hook(_Counter(self, path)))
        allocator.end(self._peaks)
        self._peaks = {}
        allocator.begin(self._peaks)

    def ran(self, path: str) -> None:
        """Counts a call of a layer, if it is one of a call of the model that trains."""
        if self._running is not None and not _torch.in_backward():
            self._running.runs(path)

    # --- between two steps ----------------------------------------------------------------------------------------

    def _begins(self, call: _Call, given: ExampleCall) -> None:
        """Called before a forward: where a step is over, compares it, and stops looking after the last."""
        if self._shapes is None:
            self._plan_again([], call, given)
            return
        cleared = not call.gradients and any(one.accumulated for one in self._calls)
        over = bool(self._stepped) or cleared or len(self._calls) >= MOST_CALLS
        if not over or any(one.in_flight for one in self._calls):
            return
        calls = self._calls = [one for one in self._calls if one.backward]
        if not calls or call.training != _trained(calls)[0].training:  # the plan is of the mode that it is made in
            return
        self._steps += 1
        found = list(self._differences(calls, call)) or list(_together(calls))
        mine = [one.what for one in found]
        if not self._replan or any(one.options is None for one in found) or any(one.outlives for one in calls):
            mine += [ALONE] if found else []
        words = self._planning.together(mine)
        if ALONE in words:
            self._say(found, "")
        elif words:
            self._plan_again(found, call, given)
        self._calls, self._stepped = [], []
        if self._steps >= STEPS and not self.out:
            self.take_out()

    def _differences(self, calls: Sequence[_Call], following: _Call) -> Iterator[Deviation]:
        """Yields the differences between a step and the planned one."""
        prediction = self._handle.plan.prediction
        loop = (prediction and prediction.loop) or COMMON
        trained = _trained(calls)
        first, many = trained[0], len(trained)
        zeroed = any(weight.grad is not None for one in self._stepped for weight in weights_of(one))
        uncleared = following.gradients and not (zeroed or loop.keeps_gradients or loop.uncleared)
        if not loop.keeps_gradients and any(call.gradients for call in trained[1:]):
            what = f"{many} backwards come before a step of the optimizer"
            yield Deviation(what, f"accumulate={many}", options={"accumulate": many})
        elif not loop.keeps_gradients and zeroed:
            what = "gradients are alive when forward begins"
            yield Deviation(what, "set_to_none=False", options={"set_to_none": False})
        if first.autocast != loop.autocast:
            inside = f"under torch.autocast ({first.autocast})" if first.autocast else "outside torch.autocast"
            yield Deviation(f"the model runs {inside}", otherwise=inside)
        if first.training and not loop.training:
            yield Deviation("the model is in train mode, and was planned in eval mode", otherwise="after model.train()")
        if _trainable(self.module) > self._trainable:
            yield Deviation("more parameters require grad than then", otherwise="once all that will be trained does")
        if len(self._stepped) > 1:
            names = listed([*dict.fromkeys(type(one).__name__ for one in self._stepped)])
            what = f"{len(self._stepped)} optimizers step ({names}), and a plan counts the states of one"
            yield Deviation(what, otherwise="with a budget that is less by the states of the others", options=None)
        elif self._stepped and (why := self._unlike(self._stepped[0], uncleared)):
            what = f"{type(self._stepped[0]).__name__} steps, which {why}"
            yield Deviation(what, "optimizer=optimizer", options={"optimizer": self._stepped[0]})
        larger = next((call for call in calls if call.exceeds(self._shapes or ())), None)
        if larger is not None:
            shapes = ", ".join(str(list(shape)) for shape in larger.shapes)
            yield Deviation(f"a larger batch came ({shapes})", otherwise="with the largest batch")
        yield from self._of_layers(calls)
        if any(call.outlives for call in calls):
            what = "a backward retains its graph into the next step"
            yield Deviation(what, otherwise="and backward() without retain_graph=True in the last use", options=None)
        elif any(call.again for call in calls) and self._handle.plan.modules:
            what = "a second backward goes through one forward, and the first keeps all that it rebuilds"
            yield Deviation(what, otherwise=_ONE_BACKWARD, options=None)
        yield from self._of_peak()

    def _unlike(self, optimizer: torch.optim.Optimizer, uncleared: bool) -> str:
        """The reason why an optimizer takes more than the planned one, in words; "" where it takes no more."""
        if uncleared:
            return "does not clear the gradients of all parameters"
        if self._planning.optimizer is None:
            return "was not named"
        return "keeps larger states than the one that was named" if self._planning.keeps_less_than(optimizer) else ""

    def _of_layers(self, calls: Sequence[_Call]) -> Iterator[Deviation]:
        """Layers that ran, or ran more often, than in the planned step."""
        fullest = max(calls, key=lambda call: call.layers.total())
        planned, known = self._planned, self._often_known
        ran = fullest.layers.items()
        more = [path for path, times in ran if times > planned[path] and (known or not planned[path])]
        if self._planned and more:
            rest = f" and {counted(len(more) - 1, 'more layer')}" if len(more) > 1 else ""
            what = f"{more[0]}{rest} ran more often than in the planned step"
            write = "with the probability of leaving layers out at 0 (LayerDrop), and no loop that ends by a value"
            yield Deviation(what, otherwise=write, options={"draws": fullest.draws})

    def _of_peak(self) -> Iterator[Deviation]:
        """The allocator's peak, where it counts one (CUDA)."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        promise = self._handle.plan.predicted_peak_bytes
        allocator.read(self._peaks)
        peak = self._peaks.get(device.index or 0, allocator.Peak()).allocated
        if self._handle.elastic is not None:  # whose promise is a limit, which the regions keep themselves
            return
        if device.type in COUNTING and promise is not None and peak > (1 + TOLERANCE) * promise:
            more = errors.size(peak - promise)
            what = f"the allocator's peak was {errors.size(peak)}, {more} more than promised"
            yield Deviation(what, f"budget={promise - (peak - promise)}", options=None)

    def _say(self, found: Sequence[Deviation], why: str) -> None:
        """Says what differs and what to write, and stops looking."""
        self.take_out()
        if found:
            what = "; ".join(one.what for one in found)
            words = ["auto(" + ", ".join(["...", *(one.argument for one in found if one.argument)]) + ")"]
            words += [one.otherwise for one in found if one.otherwise]
            warnings.warn(
                f"The training is not the step that was planned, and its peak not the promised one: {what}. "
                f"{why}Write {' '.join(words)}. (Said once.)",
                RuntimeWarning,
                stacklevel=2,
            )

    def _plan_again(self, found: Sequence[Deviation], call: _Call, given: ExampleCall) -> None:
        """Makes the plan again for the largest call so far, and exchanges it; says so."""
        began = time.perf_counter()
        options = {name: value for one in found for name, value in (one.options or {}).items()}
        largest = max([call, *self._calls], key=lambda one: sum(map(math.prod, one.shapes)))
        example = largest.example() if largest.exceeds(call.shapes) else given
        here = vars(self.module)
        top = here.pop("forward")  # this wrapper, or what others have put on it
        here.update({} if self._before is None else {"forward": self._before})
        failed, before, planned = "", self._handle.plan, self._shapes is not None
        try:
            self._handle._exchange(  # pyright: ignore[reportPrivateUsage]
                lambda: self._planning(example, **options)
            )
            self._shapes = largest.shapes
        except Exception as error:  # whatever it is, the training goes on with the plan that it has
            if self._shapes is None:
                raise
            failed = str(error).partition("\n")[0] or type(error).__name__
        finally:
            self._before = here.get("forward")
            here["forward"] = top
        if failed:
            self._say(found, f"It was planned again, without success: {failed} ")
            return
        plan = self._handle.plan
        same = (plan.all_choices, plan.predicted_peak_bytes) == (before.all_choices, before.predicted_peak_bytes)
        self._watch_layers_of_plan()
        left_out = list(self._of_layers(self._calls)) if "draws" in options else []
        words = [] if same else ["another plan", *(["of other layers"] if left_out else [])]
        words = self._planning.together(words) if planned else words
        if planned and not words:
            self._say(found, "It was planned again, and the plan is the same. ")
        elif "of other layers" in words:
            self._say(left_out, "It was planned again, and other layers ran in that step, too. ")
        elif self._planning.speaks:
            why = "; ".join(one.what for one in found)
            again = f"planned again in {time.perf_counter() - began:.1f} s" + (f" ({why})" if why else "")
            sys.stdout.write(f"{self._handle.plan.summary}; {again if found else again.replace('again ', '')}\n")


def _trained(calls: Sequence[_Call]) -> Sequence[_Call]:
    """The calls whose backward adds to gradients, which that of an adversarial example does not."""
    return [call for call in calls if call.accumulated] or calls


def _together(calls: Sequence[_Call]) -> Iterator[Deviation]:
    """Forwards that come before their backwards, which no other plan of one call would change."""
    several = max(1 + sum(one.backward for one in call.beside) for call in calls)
    if several > 1:
        what = f"{several} forwards come before their backward, and the activations of all are alive at once"
        write = f"with a module whose forward makes all {several} calls, or call the model once with a batch of all"
        yield Deviation(what, otherwise=write, options=None)


class _Counter:
    """A hook of a layer, which counts its calls; a copy of the layer, or what is saved of it, counts nothing."""

    def __init__(self, steps: FirstSteps | None, path: str) -> None:
        self._steps, self._path = steps, path

    def __call__(self, *_: Any) -> None:
        if self._steps is not None:
            self._steps.ran(self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counter, (None, self._path)


def _beside(modules: dict[str, nn.Module], paths: Sequence[str]) -> Iterator[str]:
    """The layers that are of the class of some layers beside them, and hold weights but none of these layers."""
    names = [path.split(".") for path in paths]
    above = {".".join(some[:length]) for some in names for length in range(1, len(some) + 1)}
    for around, kind in dict.fromkeys((path.rpartition(".")[0], type(modules[path])) for path in paths if path):
        for name, child in modules[around].named_children():
            beside = joined(around, name)
            if type(child) is kind and beside not in above and any(weight.ndim > 1 for weight in child.parameters()):
                yield beside


_looking: weakref.WeakSet[FirstSteps] = weakref.WeakSet()
_hook: list[Any] = []  # of all optimizers, while something looks; one that is collected could be among hooks that run


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tells all that look at the first steps of a training."""
    for looking in _looking:
        looking.stepped(optimizer)
