"""`deepspeed.checkpointing` on this engine: `configure`, `checkpoint`, `non_reentrant_checkpoint`.

    from torch_recompute.compat import deepspeed as checkpointing

    checkpointing.configure(None, checkpoint_in_cpu=True)
    y = checkpointing.checkpoint(layer, x)

DeepSpeed sets its options once for the process, and so does this file; the setting is read when a region is called. The
options have one set of names in Python and another in JSON; a name of the wrong set, which DeepSpeed passes over, is an
error here, and so is an option that would do nothing.

If DeepSpeed has been imported, its random streams (`get_cuda_rng_tracker()`) are restored for the replay, as its own
functions do. `deepspeed.initialize` configures DeepSpeed's own module: pass the same configuration to `configure`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import errors
from ..state import Ambient
from ..stores import OnHost, Store
from ._calling import as_region, check_callable, check_switch, no_sharded_inputs, tracked

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

SECTION = "activation_checkpointing"
KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""The options, in the order of `configure`: the key in JSON, and the argument."""

# Argument -> why it is refused, and what to write.
_NOT_DONE = {
    "contiguous_checkpointing": (
        "it lays out what partition_activations leaves on a rank in one buffer, and that is not understood here",
        "Against fragmentation, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "num_checkpoints": (
        "it is the size of the buffer of contiguous_checkpointing, and there is none",
        "Write None (null in JSON)",
    ),
    "synchronize": (
        "no region waits for the device, and none has to",
        "To time regions, call torch.accelerator.synchronize() in the function",
    ),
    "profile": ("regions keep no timers", "Time them with torch.profiler"),
}


class _Settings:
    """The arguments of the last `configure`, for the whole process."""

    configured = False
    inputs: Store | None = None


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets the options of `checkpoint` for this process: DeepSpeed's `configure`. Earlier settings are dropped.

    Args:
        mpu_: Which ranks `partition_activations` would use. As that is refused, it may be anything.
        deepspeed_config: A DeepSpeed configuration, or the path of one in JSON; its section
            "activation_checkpointing" is read. The arguments below come before it.
        partition_activations: False or None. In place of True, use a store: `recompute(inputs=ShardedOver())`.
        contiguous_checkpointing: False or None. ("contiguous_memory_optimization" in JSON)
        num_checkpoints: None. ("number_checkpoints" in JSON)
        checkpoint_in_cpu: Whether the inputs of regions wait in host memory, by a blocking copy each way; unlike
            DeepSpeed's, without `partition_activations`. ("cpu_checkpointing" in JSON)
        synchronize: False or None. ("synchronize_checkpoint_boundary" in JSON)
        profile: False or None.

    Raises:
        ArgumentError: An option is not known, or would do nothing, or is not available; then the settings stay as they
            were.
    """
    values = partition_activations, contiguous_checkpointing, num_checkpoints, checkpoint_in_cpu, synchronize, profile
    given = dict(zip(KEYS.values(), values, strict=True))
    section = {} if deepspeed_config is None else _section(deepspeed_config)
    options = {argument: (key, section[key]) for key, argument in KEYS.items() if section.get(key) is not None}
    options.update({name: (name, value) for name, value in given.items() if value is not None})
    for argument, (name, value) in options.items():
        _check(argument, name, value)
    _Settings.inputs = OnHost() if options.get("checkpoint_in_cpu", ("", False))[1] else None
    _Settings.configured = True


def _section(config: Any) -> Mapping[str, Any]:
    """Returns the section of a configuration, empty if there is none."""
    if isinstance(config, (str, os.PathLike)):
        path = os.fspath(config)
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else str(error)) or ""
            raise errors.ArgumentError(
                f"{path} cannot be read as a DeepSpeed configuration: {why}.\n"
                "  Pass the path of a JSON file, or the dict that it holds."
            ) from None
    section = config.get(SECTION, {}) if isinstance(config, Mapping) else config
    if not isinstance(section, Mapping):
        what = "deepspeed_config" if section is config else "the section activation_checkpointing"
        raise errors.ArgumentError(
            f"configure: {what} is {errors.say(section)}, where keys and values are expected.\n"
            '  Write {"activation_checkpointing": {"cpu_checkpointing": True}}, with any other sections beside.'
        )
    for key in section:
        if key not in KEYS:
            write = f"The keys are {', '.join(KEYS)}."
            if key in KEYS.values():
                right = next(known for known, argument in KEYS.items() if argument == key)
                write = f"It is the argument of configure; the key in a configuration is {right}."
            raise errors.ArgumentError(
                f"{key!r} is not a key of activation_checkpointing, so it would have no effect.\n  {write}"
            )
    return section


def _check(argument: str, name: str, value: Any) -> None:
    """Raises if an option is not understood or not honoured."""
    if argument != "num_checkpoints":
        check_switch("configure", name, value, f"Write {name}=False (false in JSON), or leave it out.")
        if not value:
            return
    if argument == "partition_activations":
        write = "Write checkpoint_in_cpu=True (cpu_checkpointing in JSON) to keep them in host memory"
        raise errors.ArgumentError(no_sharded_inputs(f"{name}=True", write))
    if argument in _NOT_DONE:
        raise errors.ArgumentError(errors.no_effect(name, value, *_NOT_DONE[argument]))


def is_configured() -> bool:
    """Returns whether `configure` has been called. It need not be."""
    return _Settings.configured


def reset() -> None:
    """Does nothing: DeepSpeed drops the buffers of `contiguous_checkpointing` here, and there are none."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)` as a region: DeepSpeed's `checkpoint`.

    Args:
        function: The function to call, and to call again in backward.
        *args: Its positional arguments, of any kind.
        **kwargs: Its keyword arguments.

    Returns:
        What `function` returned; as in DeepSpeed, the one element of a tuple or list of one, and a tuple for a list.

    Raises:
        ArgumentError: `function` is not callable.
    """
    check_callable("checkpoint", function)
    result = as_region(function, args, kwargs, inputs=_Settings.inputs, state=_streams)
    if isinstance(result, (tuple, list)) and len(result) == 1:
        return result[0]
    return tuple(result) if isinstance(result, list) else result


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`: there is one engine here, and it is not reentrant."""
    return checkpoint(function, *args)


def _streams() -> Sequence[Ambient]:
    return tracked("deepspeed.runtime.activation_checkpointing.checkpointing")
