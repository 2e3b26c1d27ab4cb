"""Texts for simulated steps."""

from __future__ import annotations

from collections.abc import Sequence

from ._say import say


def bad_accumulate(value: object) -> str:
    """Text for `accumulate=` that is no count."""
    return (
        "accumulate= is how many forwards and backwards come before a step of the optimizer, an integer from 1, but "
        f"got {say(value)}"
    )


def not_a_word_of_the_loop(name: str, value: object) -> str:
    """Text for a word of the training loop that is not True or False."""
    means = {
        "hold_output": "whether the model's output is alive in backward, as in `out = model(batch); "
        "out.loss.backward()`",
        "set_to_none": "that of zero_grad(set_to_none=...): whether gradients are gone when forward begins",
    }
    return f"{name}= is {means[name]}; it is True or False, but got {say(value)}"


def no_such_device(device: str) -> str:
    """Text for a device that this machine does not have."""
    return (
        f"simulate(device={device!r}): this build of PyTorch, on this machine, has no such device, and which kernels "
        "would run there cannot be asked.\n"
        "  Leave device= out to simulate the kernels of the CPU, or simulate on a machine that has one."
    )


def sharded_model(name: str) -> str:
    """Text for a model whose tensors lie on several ranks."""
    return (
        f"simulate: {name or 'a tensor'} is a DTensor: the model is sharded (fully_shard, tensor parallelism), and its "
        "collectives cannot be simulated on one process.\n"
        "  Simulate the model as it was before sharding."
    )


def cannot_fake(name: str, tensor: object) -> str:
    """Text for a tensor of a class or layout of which no fake can be made."""
    return (
        f"simulate: {name or 'a tensor'} is {say(tensor)}, of which no fake copy can be made: its class or layout says "
        "nothing of where its memory lies.\n"
        "  Simulate the model with plain tensors in its place (for a quantised module: before quantisation)."
    )


def too_large_to_read(what: str, where: str, shape: Sequence[int]) -> str:
    """Text for values that are read from a large tensor which has none."""
    return (
        f"simulate: {where or 'the model'} reads the values of a tensor of shape {tuple(shape)} ({what}), and "
        "simulated tensors have none.\n"
        "  Simulate a smaller batch, or pass arguments of integers and masks as real tensors, not on meta."
    )


def cannot_simulate(op: str, where: str, error: Exception) -> str:
    """Text for an operation that cannot be run on tensors without values."""
    return (
        f"simulate: {op} in {where or 'the model'} cannot be run on tensors without values: it depends on them, is of "
        "a layout without strides (sparse), or is an operation of a library that says nothing of its shapes "
        f"({type(error).__name__}).\n"
        "  Use RecomputeConfig, which simulates nothing, or measure() a real step; for an operation of your own, write "
        "torch.library.register_fake."
    )


def no_address(where: str, shape: Sequence[int]) -> str:
    """Text for a tensor without memory whose address is asked for."""
    return (
        f"simulate: {where or 'the model'} asks for the address of a tensor of shape {tuple(shape)}, and simulated "
        "tensors have no memory.\n"
        "  Make the call that needs it an operation of its own, by torch.library.custom_op and register_fake."
    )


def original_reached(model: str) -> str:
    """Text for a copy that uses the original."""
    return (
        f"simulate: the copy of {model} used parameters of the original, through a closure or a bound method that "
        "copy.deepcopy does not follow, so its figures mean nothing. The gradients of the original have been put back."
        "\n  Let the modules reach their parameters through attributes, so that copy.deepcopy(model) is independent."
    )


def no_loss(output: object, scalars: int) -> str:
    """Text for an output of which it cannot be told what is trained.

    Args:
        output: What the model returned.
        scalars: How many scalars in it require grad.
    """
    several = "no scalar that requires grad" if not scalars else f"{scalars} scalars that require grad"
    return (
        f"the model returned {say(output)}, and which loss it is trained with cannot be told: it has no `.loss` and "
        f"{several}. The peak depends on it: a loss over logits keeps several tensors of their size.\n"
        f"  Say how the loss is computed, where the plan or the figures are asked for:  {_loss_for(output)}"
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


def not_a_loss(value: object) -> str:
    """Text for a loss that backward cannot start from."""
    return (
        f"the loss must be a tensor with one element that requires grad, but is {say(value)}\n"
        "  Say how it is computed:  loss=lambda out: F.cross_entropy(out.logits.flatten(0, -2), labels.flatten())"
    )


def not_an_optimizer(factory: object, made: object) -> str:
    """Text for `optimizer=` that makes no optimizer."""
    return (
        "simulate(optimizer=...) takes an optimizer of the model's parameters, or a function from a list of parameters "
        f"to one, but {say(factory)} returned {say(made)}\n"
        "  Write optimizer=torch.optim.AdamW, or optimizer=lambda p: torch.optim.SGD(p, lr=0.1)."
    )
