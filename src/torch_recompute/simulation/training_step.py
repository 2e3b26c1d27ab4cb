"""A training step that is asked about: a model, one call of it, its loss, its optimizer, a device and a loop.

Everything that simulates, plans or checks is asked about a `TrainingStep`. People say what they have: a batch in any
form, an optimizer by name, a loss that the output carries. `TrainingStep.of` reads that once, for every public
function.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from .. import _torch, errors
from .._torch.fakes import APART, CPU
from .._torch.graphs import gradient_hooks
from ..errors.text import close_to, listed
from ..memory.batch import Batch, call_of, labels_of, signature_of
from ..memory.collectives import several_ranks
from ..memory.free import CONTEXT, free_bytes, held_bytes, memory_of, reserve
from ..memory.loop import COMMON, Loop
from ..memory.measurement import weights_of
from ..plan.ranks import Ranks
from .devices import Device, GivenHost, Host, Where, read_host, typical, where

Loss = Callable[[Any], torch.Tensor] | None
ALONE = Ranks()
MakeOptimizer = Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer | str | None


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One step of training.

    Attributes:
        model: The model.
        args: The positional arguments of one call.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar; None to take the one in the output, see `loss_in`.
        optimizer: An optimizer of the model's parameters, or a function from these to one; None for a step that ends
            after backward.
        device: Where it is to run, as users name it.
        loop: The training loop around it.
        ranks: The ranks that train together; the model is what one of them computes, with whole weights.
        host: What launches the operations of its device, where that is no CPU.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    loss: Loss = None
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
    device: Device = None
    loop: Loop = COMMON
    ranks: Ranks = ALONE
    host: Host = field(default_factory=typical)

    @staticmethod
    def of(
        what: str,
        model: nn.Module,
        args: Batch,
        kwargs: Mapping[str, Any] | None,
        loss: Loss = None,
        optimizer: MakeOptimizer = None,
        device: Device = None,
        loop: Loop = COMMON,
        host: GivenHost = "typical",
    ) -> TrainingStep:
        """Reads the arguments of a public function; `what` is its name, for the texts of errors.

        Raises:
            ArgumentError: The call or the optimizer is not what it should be.
        """
        args, kwargs, loss = with_labels(what, model, args, kwargs, loss)
        call = call_of(what, model, args, kwargs, a_module=True)
        return TrainingStep(
            model, *call, loss, optimizer_of(what, optimizer, model), device, loop, host=read_host(host)
        )

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call."""
        return self.args, self.kwargs

    @property
    def where(self) -> Where:
        """Where it is to run."""
        return where(self.device, self.model)

    @property
    def host_memory(self) -> torch.device:
        """The device of simulated tensors in host memory: one apart where the step's own stand in on the CPU."""
        return APART if self.where.roofline is not None and self.runs_on.type == "cpu" else CPU

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """The bytes of DDP's buckets, all gradients once more: those that are counted, and those that are not.

        Not counted they are in a process that is one of several ranks of which nothing is said.
        """
        own = sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)
        return own * self.ranks.in_buckets, own * (self.ranks == ALONE and several_ranks())

    @property
    def memory(self) -> tuple[int, int]:
        """The bytes that its peak may reach, and those beside them that are left: of what its device has free.

        Of a device by its data sheet that is not here, all is free but a process's context. DDP's buckets that are not
        counted have room.

        Raises:
            ArgumentError: What is free is not known.
        """
        sheet = self.where.roofline
        if sheet is None or sheet.memory is None or self.runs_on.type == sheet.kind:
            free = free_bytes(self.model, self.runs_on, self.optimizer, self.call)
            return free - self.bucket_bytes[1], reserve(memory_of(self.runs_on)[1])
        spare = reserve(sheet.memory)
        return sheet.memory - CONTEXT - spare - self.bucket_bytes[1], spare

    def free_bytes(self) -> int:
        """The bytes that its peak may reach; see `memory`."""
        return self.memory[0]

    def held_bytes(self) -> int:
        """The bytes of its model, gradients, states and call that are alive now."""
        return held_bytes(self.model, self.runs_on, self.optimizer, self.call)

    @property
    def runs_on(self) -> torch.device:
        """The device of its tensors: the one asked for, else the model's, else (on meta) the accelerator or the CPU."""
        device = self.where.device
        if device is None:
            tensors = (*self.model.parameters(), *self.model.buffers())
            found = next((x.device for x in tensors if x.device.type != "meta"), None)
            return torch.device(_torch.accelerator() or "cpu") if found is None else found
        if device.type not in ("cpu", _torch.accelerator()):
            raise errors.ArgumentError(
                f"device={str(device)!r}: this build of PyTorch, on this machine, has no such device, and which "
                "kernels would run there cannot be asked.\n"
                "  Leave device= out to simulate the kernels of the CPU, or simulate on a machine that has one."
            )
        return device


def elements(weight: torch.Tensor) -> int:
    """The elements of a parameter; of one whose elements share bytes (`packed`), all that they mean."""
    return getattr(weight, "packed", weight.numel())


# --- losses ---


def needs(loss: object) -> int:
    """Returns the number of arguments that a loss has to be given; 1 where its signature is not known."""
    signature = None if loss is None else signature_of(loss)
    if signature is None:
        return 1
    return sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in signature.parameters.values()
    )


def _check_loss(what: str, loss: object) -> None:
    """Refuses a loss that is no function: a word, a number, the class of a loss."""
    if loss is not None and (not callable(loss) or isinstance(loss, type)):
        made = f"{loss.__name__}()" if isinstance(loss, type) else "lambda out: F.mse_loss(out, target)"
        raise errors.ArgumentError(
            f"{what}(loss=) takes a function from the model's output to the loss, or from output and labels, but got "
            f"{errors.say(loss)}\n  Write loss={made}"
        )


def with_labels(
    what: str, model: object, batch: Any, kwargs: Mapping[str, Any] | None, loss: Any
) -> tuple[Any, Mapping[str, Any] | None, Loss]:
    """Returns a batch, more keywords and a loss of the output alone; a loss of two arguments gets the batch's labels.

    Raises:
        ArgumentError: The loss needs more than the output, and the batch has no labels, or it needs three arguments.
    """
    _check_loss(what, loss)
    count = needs(loss)
    if count < 2:
        return batch, kwargs, loss
    labels, batch, kwargs = labels_of(model, batch, kwargs or {}) if count == 2 else (None, batch, kwargs)
    name = getattr(loss, "__name__", type(loss).__name__)
    if labels is None:
        why = f"{count} arguments" if count > 2 else "the output and labels, and the batch has no labels, targets or y"
        raise errors.ArgumentError(
            f"{what}(loss={name}) is called with the model's output, but {name} takes {why}.\n"
            "  Write what it is to be called with:  loss=lambda out: loss_fn(out, labels)"
        )

    @functools.wraps(loss, updated=())
    def of_output(output: Any) -> torch.Tensor:
        try:
            return loss(output, labels.to(output.device) if isinstance(output, torch.Tensor) else labels)
        except errors.RecomputeError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise errors.ArgumentError(
                f"the loss {name} cannot be called with the output, {errors.say(output)}, and the batch's labels, "
                f"{errors.say(labels)}: {str(error).partition(chr(10))[0]}\n"
                f"  Say how the loss is computed:  {_loss_for(output)}"
            ) from error

    of_output.__name__ = of_output.__qualname__ = name
    return batch, kwargs, of_output


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
        for tensor in _torch.tensors_in(output):
            if tensor.dtype.is_floating_point:
                return tensor.mean()
        raise


any_loss.words = "the output's .loss, or its mean"  # pyright: ignore[reportFunctionMemberAccess]


def _is_scalar(tensor: torch.Tensor) -> bool:
    trains = tensor.requires_grad or not torch.is_grad_enabled()
    return tensor.numel() == 1 and tensor.dtype.is_floating_point and trains


def check_loss(value: object) -> None:
    """Refuses what backward cannot start from."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        without = " that requires none" if isinstance(value, torch.Tensor) and not value.requires_grad else ""
        raise errors.ArgumentError(
            f"the loss must be a tensor with one element that requires grad, but is {errors.say(value)}{without}\n"
            "  Say how it is computed:  loss=lambda out: F.cross_entropy(out.logits.flatten(0, -2), labels.flatten())"
        )


# --- optimizers ---


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


def states_of(weights: Iterable[torch.Tensor], optimizer: Any, dtype: torch.dtype | None = None) -> Counter[str]:
    """Returns the least bytes of weights, of their gradients and of an optimizer's states, without a simulation.

    Of states those are counted that have as many elements as their weight; others, such as Adafactor's, are fewer.

    Args:
        weights: The weights; one that is there twice counts once.
        optimizer: A function from a list of parameters to an optimizer, or None.
        dtype: Of the weights; None for their own.
    """
    found: Counter[str] = Counter()
    each: dict[torch.dtype, int] = {}
    for weight in {id(weight): weight for weight in weights}.values():
        kind = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
        found["weights"] += weight.numel() * kind.itemsize
        if not weight.requires_grad or getattr(optimizer, "on_host", False):
            continue
        if not (getattr(optimizer, "in_backward", False) or gradient_hooks(weight)):  # which may free them one by one
            found["gradients"] += weight.numel() * kind.itemsize
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            each[kind] = each[kind] if kind in each else new_bytes_per_element(optimizer, kind) or 0
            found["states"] += weight.numel() * each[kind]
    return found


def new_bytes_per_element(optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> int | None:
    """The bytes of the states of an optimizer, which is made and steps once, for one element of a weight.

    None for one of other weights than the one that it is given, which are not to be changed.
    """
    with torch.inference_mode(False), torch.enable_grad():
        weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))  # enough for moments of 8 bits
        made = optimizer([weight])
        if any(other is not weight for other in weights_of(made)):
            return None
        weight.sum().backward()
        made.step()
    return bytes_per_element(made, weight)


def bytes_per_element(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> int:
    """The bytes of the states that an optimizer has made for a weight, for one element of it."""
    states = _torch.tensors_in(dict(optimizer.state[weight]))
    return sum(state.itemsize for state in states if state.numel() == weight.numel())


def _takes_a_list(make: object) -> bool:
    """Whether a function can be called with parameters, as far as its signature says."""
    signature = signature_of(make)
    return signature is None or bool(signature.parameters)


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
        raise errors.ArgumentError(
            f"{said} is {optimizer!r}, which is not the name of an optimizer.{close_to(name, OPTIMIZERS, 1)} "
            f"Known are {', '.join(OPTIMIZERS)}.\n"
            f"  Write one of these{'' if what.startswith('-') else f', or a class: {_CLASS}'}."
        )
    _check_counted(said, optimizer)
    known = optimizer is None or isinstance(optimizer, (type, torch.optim.Optimizer))
    if not known and not (callable(optimizer) and _takes_a_list(optimizer)):
        raise errors.ArgumentError(
            f"{said} is {errors.say(optimizer)}; expected a name, a class, a function from a list of parameters to an "
            f"optimizer, or an optimizer of the model's parameters.\n  Write {_CLASS}."
        )
    if isinstance(optimizer, torch.optim.Optimizer) and model is not None:
        own = {id(parameter) for parameter in model.parameters()}
        held = weights_of(optimizer)
        others = [tuple(parameter.shape) for parameter in held if id(parameter) not in own]
        if others:
            raise errors.ArgumentError(
                f"{said} is an optimizer of other parameters than the model's: {len(others)} of the {len(held)} that "
                f"it holds are not in {type(model).__name__}, the first of shape {others[0]}. Their state would be "
                "counted, and the model's would not.\n"
                f"  Make it of the model that is passed, or pass its class: {_CLASS}."
            )
    return optimizer


def _check_counted(said: str, optimizer: object) -> None:
    """Refuses what a step cannot count: several optimizers, and one that runs the model itself."""
    several = cast("Sequence[object]", optimizer if isinstance(optimizer, (list, tuple)) else ())
    if several and all(isinstance(one, torch.optim.Optimizer) for one in several):
        names = listed([type(one).__name__ for one in several])
        raise errors.ArgumentError(
            f"{said} is a list of optimizers ({names}), and a plan counts the states of one.\n"
            "  Pass the one with the most states, and a budget that is less by those of the others."
        )
    step: Any = getattr(optimizer, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise errors.ArgumentError(
            f"{said} is {name}, whose step calls a closure: the model and its backward, several times. A planned step "
            "calls the model once.\n"
            "  Write optimizer=None, and a budget that leaves room for what the optimizer keeps."
        )


_CLASS = "optimizer=torch.optim.AdamW"
