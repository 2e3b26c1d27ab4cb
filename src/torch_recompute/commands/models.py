"""Builds the model, the batch and the training step that the options of a command line describe.

MODEL is `pkg.module:name`, which is imported, with the current folder on the path as for `python -m`, and called unless
it is a module already; or the path of a Hugging Face configuration; or a name in `presets.json`, which holds such
configurations. The latter two are built on the meta device, where a weight has a shape and takes no memory, or, to be
run, with random weights on another. Nothing is downloaded and no code that comes with a configuration is run.

A batch for a model of transformers is what its forward takes, with labels, so that the step has a loss. Its token ids
are real tensors, because models look at their values for padding. A user with another model writes a function that
returns it with its batch: guessing a batch from the signature of a forward gives figures that only look right.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from .. import _torch, errors
from ..errors.text import close_to
from ..memory.batch import ExampleCall, call_of
from ..memory.budget import Limit
from ..memory.loop import Loop
from ..plan.plan import Plan
from ..plan.ranks import Ranks
from ..planner.hosts import NO_OPTIONS, PlanOptions
from ..planner.layout import Layout, one_rank
from ..planner.profile import Profile
from ..planner.solve import frontier, planned
from ..planner.states import STATES, OptimizerSpec
from ..simulation.devices import DEVICES, HOSTS, Device, connected, read_host
from ..simulation.experts import shared_experts
from ..simulation.fused import OPTIONS, FusedLayers, fuse
from ..simulation.training_step import (
    ALONE,
    OPTIMIZERS,
    USUAL,
    Loss,
    TrainingStep,
    any_loss,
    elements,
    optimizer_of,
    with_labels,
)
from .adapters import ALL, BASES, Lora, adapted

if TYPE_CHECKING:
    from ..compiling.layers import CompiledLayers

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRESETS: Mapping[str, dict[str, Any]] = json.loads((files(__package__ or "") / "presets.json").read_text("utf-8"))
"""Configurations by name; fields that are the default of their `model_type` are left out."""
SEQUENCE = 4096
POINTS = 10
"""The most points of a curve of budget against seconds."""
RANK_WORDS = {
    "tp": "ranks that share each layer: tensor parallel (1)",
    "pp": "ranks that share the layers: pipeline parallel, by 1F1B (1)",
    "vpp": "chunks of layers on each of these, by interleaved 1F1B (1)",
    "cp": "ranks that share the tokens of each sequence: context parallel (1)",
    "ep": "ranks that share the experts of each mixture: expert parallel, by all-to-all (1)",
    "etp": "ranks that share each expert: expert tensor parallel (those of --tp)",
    "dp": "replicas; they share what --zero says (1)",
    "fsdp": "ranks that share weights, gradients and states: FSDP2; with --dp, replicas of so many (1)",
    "zero": "what replicas share: 0 nothing, 1 the optimizer's states (the default), 2 gradients, 3 weights as well",
    "mbs": "sequences in a microbatch (1); --batch over --dp, --fsdp and this is how many microbatches a step has",
}
"""The options of ranks that are numbers, and what they mean."""
RANK_KINDS: Mapping[str, type] = {
    "sequence_parallel": bool,
    "cp_kind": str,
    "imbalance": float,
    "reshard_after_forward": str,
    "reduce_dtype": str,
}
"""The other options of ranks."""
LAYERS = ("eager", "fused", "compiled")
HowLayersRun: TypeAlias = "FusedLayers | CompiledLayers | None"
IS_HOST = "its memory is host memory already"
LAYER_WORDS = (
    "how layers run: eager, as they are written (the default); compiled, one by one, by torch.compile; or fused, with "
    "the kernels of Megatron-Core and Liger. fused+fp8: products keep their inputs in 8 bits; "
    "fused+efficient-permutation: experts are given the router's weights before their last product"
)
STATE_KINDS: Mapping[str, Any] = {
    "states": STATES,
    "optimizer_in_backward": (True,),
    "optimizer_on_host": (True,),
    "lora": str,
    "base": BASES,
}
"""The options of the optimizer's states and of adapters, and what they may be."""
STEP_WORDS = (
    *("model", "batch", "sequence", "dtype", "optimizer", "device", "host", "layers"),
    *(*STATE_KINDS, *RANK_WORDS, *RANK_KINDS),
)
"""The options that describe a step, on the command line and in the file of a plan."""

_MODEL = "Write pkg.module:name, or the path of a Hugging Face config.json or of its folder."
_OWN = (
    "a function pkg.module:name that returns (model, batch), or (model, batch, loss), the batch a tensor, a tuple of "
    "arguments or a dict of keywords"
)


def model_help(weights: str) -> str:
    """Returns the help text of MODEL; `weights` says how one from a configuration is built."""
    return (
        f"one of {', '.join(PRESETS)}; or the path of a config.json of any Hugging Face model, or of its folder, "
        f"which is built {weights}; or pkg.module:name of a function that returns (model, batch) or (model, batch, "
        "loss), where batch is a tensor, a tuple of arguments or a dict of keyword arguments, and loss makes a scalar "
        "of the output"
    )


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command the options for the size of the batch and the type of the weights."""
    parser.add_argument("--batch", type=int, metavar="N", help="sequences or pictures in a step (1)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (the model's, at most 4096)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (bf16 for a model by name, else what its configuration says)"
    )


def add_model_options(parser: argparse.ArgumentParser, *, weights: str) -> None:
    """Gives a command MODEL, and the options of its batch; `weights` says how a configuration is built."""
    parser.add_argument("model", metavar="MODEL", help=model_help(weights))
    add_batch_options(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command the options for the optimizer and the device."""
    parser.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} ({USUAL})")
    parser.add_argument(
        "--device",
        type=str.lower,
        choices=(*DEVICES, "cpu"),
        metavar="NAME",
        help=f"what the seconds are of: {', '.join(DEVICES)}, cpu (h100; for a model with weights, its own)",
    )


def add_host_option(parser: argparse.ArgumentParser) -> None:
    """Gives a command the option for the host of the device."""
    parser.add_argument(
        "--host",
        metavar="WHICH",
        help=f"what launches the operations of --device: {', '.join(HOSTS)} (the slowest that was seen), or a file of "
        "torch-recompute calibrate (typical)",
    )


def run_as(model: nn.Module, layers: str | None, ranks: Ranks) -> HowLayersRun:
    """Gives the layers of a model the kernels that `--layers` asks for; None for layers as they are written.

    Raises:
        ArgumentError: It is no way to run layers, or no kernel is known for any of these.
    """
    how, *options = (layers or LAYERS[0]).split("+")
    unknown = next((word for word in options if word not in OPTIONS), how if how not in LAYERS else "")
    if unknown or (options and how != "fused"):
        raise errors.ArgumentError(
            f"--layers is {layers!r}; expected {', '.join(LAYERS)}, or fused with options, as "
            f"{' or '.join(f'fused+{word}' for word in OPTIONS)}.{close_to(unknown, [*LAYERS, *OPTIONS], 1)}"
        )
    if how == "compiled":
        from ..compiling.layers import compile_layers  # loads torch's compiler, which no other layers need

        return compile_layers(model, ranks)
    return fuse(model, options, f"--layers {layers}") if how == "fused" else None


def device_of(args: argparse.Namespace, default: str | None) -> Device:
    """Returns the device of a command line, with the links that it has there."""
    word = args.device or default
    node, said = getattr(args, "node", None), getattr(args, "network", None)
    if node is None and said is None:
        return word
    link, network = (None, None) if said is None else _two_speeds(said)
    if word is None or word.lower() not in DEVICES:
        option = "--node" if node is not None else "--network"
        raise errors.ArgumentError(errors.goes_with(option, "--device, one of " + ", ".join(DEVICES)))
    if node is not None and node < 1:
        raise errors.ArgumentError(errors.not_a_size("--node", node))
    return connected(DEVICES[word.lower()], link, network, node)


def _two_speeds(word: str) -> tuple[float, float]:
    try:
        link, network = map(float, word.split(","))
    except ValueError:
        link = network = 0.0
    if min(link, network) <= 0:
        raise errors.ArgumentError(
            f"--network is {word!r}; expected two speeds in GB/s of one device, within a node and between nodes, such "
            "as 450,50."
        )
    return link, network


def check_regions(layers: HowLayersRun, plans: Mapping[str, Plan]) -> None:
    """Refuses configurations, by name, that layers cannot have as they run."""
    if layers is not None and not isinstance(layers, FusedLayers):
        layers.check(plans)


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command the options for what the optimizer keeps, and for adapters."""
    group = parser.add_argument_group("what the optimizer keeps, and what is trained")
    group.add_argument(
        "--states",
        choices=STATES,
        help="of AdamW in one kernel, in bytes per parameter: fp32-master 12 (a copy of 16-bit weights, and both "
        "moments in 32 bits), bf16 4, 8bit 2.03 (blocks of 256 with a scale) (moments in the type of the weights)",
    )
    group.add_argument(
        "--optimizer-in-backward",
        action="store_true",
        default=None,
        help="each weight is updated when its gradient is there, which is freed then",
    )
    group.add_argument(
        "--optimizer-on-host",
        action="store_true",
        default=None,
        help="gradients go to host memory, where the states are and the step is; weights come back",
    )
    group.add_argument(
        "--lora",
        metavar="RANK[:MODULES]",
        help=f"adapters of PEFT over a frozen model: 16, 16:q_proj,v_proj, 16:{ALL} (the modules that PEFT takes)",
    )
    group.add_argument(
        "--base",
        choices=BASES,
        help="the frozen model under --lora: nf4 has linear layers of 4 bits, all else in 32 bits, as PEFT prepares it "
        "for training; with --autocast bf16, as most loops do (bf16)",
    )


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """Gives a command the options for the training loop."""
    group = parser.add_argument_group("the training loop that the peak is of")
    group.add_argument(
        "--no-hold-output",
        dest="hold_output",
        action="store_false",
        help="the model's output is gone in backward (default: held, as in `out = model(**b); out.loss.backward()`)",
    )
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="backwards per step of the optimizer (1)")
    group.add_argument(
        "--no-set-to-none",
        dest="set_to_none",
        action="store_false",
        help="gradients are zeroed, or there until after the forward (default: gone when forward begins)",
    )
    group.add_argument("--autocast", choices=("bf16", "fp16"), help="dtype of torch.autocast around the step (none)")


def loop_of(args: argparse.Namespace) -> Loop:
    """Returns the training loop of a command line."""
    return Loop(args.hold_output, args.accumulate, args.set_to_none)


@contextlib.contextmanager
def autocasting(model: nn.Module, dtype: str | None) -> Generator[None]:
    """Runs a block under autocast to a dtype, by a word of `DTYPES` or its name; without one, as it is."""
    if not dtype:
        yield
        return
    where = next((p.device.type for p in model.parameters() if not p.is_meta), _torch.ACCELERATOR or "cpu")
    with torch.autocast(where, DTYPES[dtype] if dtype in DTYPES else getattr(torch, dtype)):
        yield


def check_sizes(args: Any) -> None:
    """Refuses a batch or a sequence of no length."""
    for option in ("batch", "sequence"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise errors.ArgumentError(errors.not_a_size(f"--{option}", value))


def optimizer_asked(args: argparse.Namespace, ranks: Ranks = ALONE, usual: str = USUAL) -> tuple[Any, str]:
    """Returns the optimizer of a command line and its name; refuses options that do not go together.

    Args:
        args: The command line.
        ranks: Its ranks.
        usual: The optimizer where none is said, which is the one whose states may be said.

    Raises:
        ArgumentError: It is not known, or has no such states, or cannot step so.
    """
    optimizer_of("--optimizer", args.optimizer)
    name = (args.optimizer or usual).lower()
    states = getattr(args, "states", None) or ""
    flags = {word: bool(getattr(args, word, None)) for word in ("optimizer_in_backward", "optimizer_on_host")}
    in_backward, on_host = flags.values()
    option = next((f"--{word.replace('_', '-')}" for word, given in flags.items() if given), f"--states {states}")
    if ranks.on_host and (args.device or "").lower() == "cpu":
        raise errors.ArgumentError(goes_without("--weights-on-host", "--device cpu", IS_HOST))
    if ranks.on_host and on_host:
        why = "states are in host memory beside weights that are there"
        raise errors.ArgumentError(goes_without("--optimizer-on-host", "--weights-on-host", why))
    if not (states or in_backward or on_host):
        return OPTIMIZERS[name], name
    if name == "none" or (states and name != usual):
        has = "there is no optimizer" if name == "none" else f"it is of {usual}"
        raise errors.ArgumentError(goes_without(option, f"--optimizer {name}", has))
    if in_backward:
        _check_in_backward(args, ranks)
    if on_host and args.device == "cpu":
        raise errors.ArgumentError(goes_without(option, "--device cpu", IS_HOST))
    return OptimizerSpec(None if states else OPTIMIZERS[name], states, in_backward, on_host), name


def _check_in_backward(args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuses an optimizer in backward where there are several backwards before its step, or gradients stay."""
    option = "--optimizer-in-backward"
    several = "it steps in each backward, so no gradient is left to add to"
    if getattr(args, "accumulate", 1) > 1:
        raise errors.ArgumentError(goes_without(option, f"--accumulate {args.accumulate}", several))
    if not getattr(args, "set_to_none", True):
        raise errors.ArgumentError(goes_without(option, "--no-set-to-none", "gradients are freed in backward"))
    if ranks.pp > 1:
        why = (
            "gradients of its microbatches are added up, and are there until the last one's backward: no peak is lower"
        )
        raise errors.ArgumentError(goes_without(option, "--pp", why))
    if ranks != ALONE and not ranks.fully_sharded:
        why = "their optimizer is Megatron's, which keeps gradients in buffers"
        raise errors.ArgumentError(goes_without(option, "ranks without --fsdp", why))
    if ranks.fully_sharded and Layout(ranks, args.mbs or 1, args.batch).microbatches > 1:
        what = f"--batch {args.batch}"
        raise errors.ArgumentError(goes_without(option, what, f"that is several microbatches (--mbs); {several}"))


def goes_without(option: str, other: str, why: str) -> str:
    """Returns the text of the error for an option that excludes another one."""
    return f"{option} does not go with {other}: {why}. Leave one of them out."


def lora_of(args: argparse.Namespace) -> Lora | None:
    """Reads the adapters of a command line; None for none.

    Raises:
        ArgumentError: They are none, or go with an option that they cannot go with.
    """
    words, base = getattr(args, "lora", None), getattr(args, "base", None)
    if words is None:
        if base is not None:
            raise errors.ArgumentError(errors.goes_with(f"--base {base}", "--lora"))
        return None
    if base == "bf16" and args.dtype not in (None, "bf16"):
        raise errors.ArgumentError(
            goes_without("--base bf16", f"--dtype {args.dtype}", "it is the type of the weights")
        )
    if getattr(args, "tp", None) not in (None, 1):
        why = "a slice of a layer has collectives for its products, and none for adapters. --fsdp and --pp need none"
        raise errors.ArgumentError(goes_without("--lora", "--tp", why))
    layers = getattr(args, "layers", None)
    if layers == "fused":
        why = "its kernels take a layer's weights without adapters"
        raise errors.ArgumentError(goes_without("--lora", "--layers fused", why))
    if layers == "compiled" and base == "nf4":
        why = "whether a compiled layer keeps weights that it has made of 4 bits is not known"
        raise errors.ArgumentError(goes_without("--base nf4", "--layers compiled", why))
    return Lora.of(words)


def with_adapters(model: nn.Module, args: argparse.Namespace, *, sharded: bool = False) -> nn.Module:
    """Returns a model with the adapters of a command line; as it is where there are none."""
    lora = lora_of(args)
    if lora is None:
        return model
    storage = torch.bfloat16 if sharded else torch.uint8  # which FSDP gathers with the rest
    return adapted(model, args.model, lora, args.base or BASES[0], storage)


def with_usual_adapters(step: AskedStep) -> Iterator[tuple[str, str, AskedStep]]:
    """Yields a step of a model that is built here with adapters on frozen weights, as an option and in words."""
    fused = isinstance(step.layers, FusedLayers)
    if not step.built_here or "lora" in step.asked_states or step.ranks.tp > 1 or step.ranks.fully_sharded or fused:
        return
    for base, option in zip(BASES, ("--lora 16", "--lora 16 --base nf4"), strict=True):
        with contextlib.suppress(errors.ArgumentError):  # without PEFT, or layers of a class that cannot be of 4 bits
            model = adapted(copy.deepcopy(step.model), step.word, Lora.of("16"), base)
            yield option, "adapters", replace(step, model=model)


def states_words(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of states and adapters that a command line has."""
    return {word: given for word in STATE_KINDS if (given := getattr(args, word, None)) is not None}


def words_of(args: argparse.Namespace) -> dict[str, str | int]:
    """Returns the options of the step that a command line has, without those that were left out."""
    return {name: value for name in STEP_WORDS if (value := getattr(args, name, None)) is not None}


class Loaded(NamedTuple):
    """A model, and its call and loss where the user's function returns them."""

    model: nn.Module
    call: ExampleCall | None = None
    loss: Loss = None


def load(model: str, dtype: torch.dtype | None = None, device: torch.device | str = "meta") -> Loaded:
    """Builds or imports the model that a command line names.

    Args:
        model: `pkg.module:name`, the path of a `config.json` or of its folder, or a name of `PRESETS`.
        dtype: Of the weights of a model that is built here; by default what its configuration says, and bfloat16 for
            one of `PRESETS`.
        device: Of a model that is built here; its weights are random, or none on meta.

    Raises:
        ArgumentError: There is no such thing, or it does not make a module, or what makes it decides its dtype.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            fields: Any = json.loads(path.read_text(encoding="utf-8"))
            kind = fields.pop("model_type")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            missing = isinstance(error, KeyError)
            what = "it has no field model_type" if missing else f"{errors.kind(error)}: {_first_line(error)}"
            raise errors.ArgumentError(
                f"{path} is not the configuration of a Hugging Face model: {what}. {_MODEL}"
            ) from error
        return Loaded(_built(str(path), kind, fields, dtype, device))
    if model in PRESETS:
        fields = dict(PRESETS[model])
        return Loaded(_built(model, fields.pop("model_type"), fields, dtype or torch.bfloat16, device))
    where, colon, name = model.partition(":")
    if not (where and colon and name):
        raise errors.ArgumentError(_unknown(model))
    if dtype is not None:
        raise errors.ArgumentError(made_by_a_function("--dtype", model))
    return _from_python(model, where, name)


def _unknown(model: str) -> str:
    """Returns the text of the error for an unknown model, with names close to it and what to write."""
    plain = {"".join(filter(str.isalnum, name.lower())): name for name in PRESETS}
    word = "".join(filter(str.isalnum, model.rpartition("/")[2].lower()))
    close = close_to(word, plain, say=plain.__getitem__)
    write = _MODEL
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        write = (
            "If it is a name of the Hugging Face hub: nothing is downloaded here. Write hf download "
            f"{model} config.json --local-dir model, then torch-recompute plan model."
        )
    return (
        f"MODEL is {model!r}, which is no file, no folder, not of the form pkg.module:name and not known by name."
        f"{close} {write} Known by name are {', '.join(PRESETS)}."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [errors.kind(error)])[0].rstrip(".")


def _makes_no_module(model: str, made: object) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"MODEL is {model!r}, which gives {errors.say(made)}; expected a torch.nn.Module, or a function that returns "
        "one, or one and its batch (a tensor, a tuple of arguments, or a dict of keyword arguments), and a function "
        "for its loss."
    )


def _not_built(model: str, why: Exception) -> errors.ArgumentError:
    return errors.ArgumentError(f"MODEL is {model!r}, and building it raises {errors.kind(why)}: {_first_line(why)}")


def _from_python(model: str, where: str, name: str) -> Loaded:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made: Any = reduce(getattr, name.split("."), importlib.import_module(where))
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(f"MODEL is {model!r}: {_first_line(error)}. {_MODEL}") from error
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise _makes_no_module(model, made)
        try:
            made = made()
        except Exception as error:
            raise _not_built(model, error) from error
    if isinstance(made, nn.Module):
        return Loaded(made)
    parts: list[Any] = [*cast("tuple[Any, ...]", made)] if isinstance(made, tuple) else []
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module) or not all(map(callable, parts[2:])):
        raise _makes_no_module(model, made)
    try:
        batch, more, loss = with_labels(name, parts[0], parts[1], None, parts[2] if parts[2:] else None)
        call = call_of(name, parts[0], batch, more)
    except errors.ArgumentError as error:
        raise errors.ArgumentError(f"MODEL is {model!r}, and its batch does not fit: {_first_line(error)}.") from error
    return Loaded(parts[0], call, loss)


def _built(
    model: str, kind: str, fields: dict[str, Any], dtype: torch.dtype | None, device: torch.device | str
) -> nn.Module:
    """Builds a model of transformers with random weights, from the fields of its configuration."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise errors.ArgumentError(
            f"{model} is built with the package transformers, which is not installed. Write: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        if dtype is not None:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)  # the latter before 4.56
        named = getattr(transformers, (fields.get("architectures") or ["AutoModel"])[0], None)
        build = getattr(named, "_from_config", None) or transformers.AutoModel.from_config
        with torch.device(device):
            built = build(config)
        if getattr(built, "loss_type", "") is None:  # transformers takes this one then, and warns of it (GPT-2)
            built.loss_type = "ForCausalLM"
        return built
    except Exception as error:
        raise _not_built(model, error) from error


def batch_for(model: nn.Module, word: str, batch: int | None = None, sequence: int | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of one call.

    Args:
        model: A model of transformers.
        word: Its name on the command line.
        batch: The number of sequences or pictures; 1 by default.
        sequence: The number of tokens in each; by default as many as the model has positions, and at most 4096.

    Returns:
        `input_ids` (batch, sequence), `pixel_values` (batch, channels, height, width) or `input_features` (batch,
        bins, frames) of sound, with as many tokens of text as `sequence`; and `labels` where the model takes them.

    Raises:
        ArgumentError: It is not known what the model takes, or it has no such positions.
    """
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    size = 1 if batch is None else batch
    if getattr(model, "main_input_name", "") == "pixel_values" and isinstance(getattr(config, "image_size", 0), int):
        if sequence is not None:
            raise errors.ArgumentError(
                f"--sequence is a number of tokens, and {word} takes pixel_values. Leave it out."
            )
        dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
        shape = size, config.num_channels, config.image_size, config.image_size
        found: dict[str, Any] = {"pixel_values": torch.empty(shape, dtype=dtype, device="meta")}
        labels = torch.zeros(size, dtype=torch.long)
    elif getattr(model, "main_input_name", "") == "input_features" and hasattr(config, "num_mel_bins"):
        length = config.max_target_positions if sequence is None else sequence
        beyond(model, word, length)
        dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
        shape = size, config.num_mel_bins, 2 * config.max_source_positions  # a first convolution halves them
        found = {"input_features": torch.empty(shape, dtype=dtype, device="meta")}
        labels = torch.ones(size, length, dtype=torch.long)
    elif getattr(model, "main_input_name", "") == "input_ids" and "input_ids" in takes:
        positions = _positions_of(model)
        length = min(SEQUENCE, positions or SEQUENCE) if sequence is None else sequence
        beyond(model, word, length)
        found = {"input_ids": torch.ones(size, length, dtype=torch.long)}
        labels = found["input_ids"]
        if "SequenceClassification" in type(model).__name__:
            labels = torch.zeros(size, dtype=torch.long)
    else:
        raise errors.ArgumentError(
            f"MODEL is {word!r}, which is {type(model).__name__}: no model of transformers that takes input_ids, "
            f"pixel_values or input_features, so there is no batch for it. Write {_OWN}."
        )
    if "labels" in takes:
        found["labels"] = labels
    if "use_cache" in takes:
        found["use_cache"] = False
    return found


def _positions_of(model: nn.Module) -> int | None:
    """The positions that a configuration names; of a model of several parts that of its text."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)


def _table_of_positions(model: nn.Module) -> str | None:
    """Returns the path of a model's table of positions, if it has one."""
    built: Any = model
    tokens = built.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    positions = _positions_of(model) or 0
    for path, module in model.named_modules():  # some tables begin with one or two places for padding
        if isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - positions <= 2:
            return path
    return None


def most_tokens(model: nn.Module) -> int | None:
    """Returns the longest sequence that a model of transformers takes; None for no limit."""
    return _positions_of(model) if _table_of_positions(model) is not None else None


def beyond(model: nn.Module, word: str, length: int) -> str:
    """Returns what is to be said of a sequence that is longer than a model's positions, "" where it is not.

    Args:
        model: A model of transformers.
        word: Its name on the command line.
        length: The number of tokens.

    Raises:
        ArgumentError: The positions are a table, which has no more.
    """
    positions = _positions_of(model)
    if positions is None or length <= positions:
        return ""
    table = _table_of_positions(model)
    if table is not None:
        raise errors.ArgumentError(
            f"--sequence is {length}, and {word} has {positions} positions, in a table ({table}). Write --sequence "
            f"{positions} or less."
        )
    how = "rotary" if any("Rotary" in type(module).__name__ for module in model.modules()) else "computed"
    return (
        f"{length:,} tokens are more than the {positions:,} positions that {word} names (max_position_embeddings). "
        f"They are no table but {how}, so the step is planned for all tokens; whether the model learns from them is "
        "another question."
    )


KERNELS: Mapping[str, str] = {"GatedDelta": "fla", "KimiDelta": "fla", "Mamba": "mamba_ssm"}
"""Layers by a part of their class's name, and the package that has their kernel; without it reference code runs."""


def _without_kernels(model: nn.Module) -> list[str]:
    """Returns what is to be said of layers whose fast kernel is not installed."""
    found: dict[tuple[str, str], int] = {}
    for module in model.modules():
        name = type(module).__name__
        package = next((package for part, package in KERNELS.items() if part in name), None)
        if package is not None and any(module.children()) and find_spec(package) is None:
            found[name, package] = found.get((name, package), 0) + 1
    return [
        f"{count} {name} are planned from the reference code of transformers, since the package {package}, which has "
        "their kernel, is not installed here: their bytes and seconds are not those of the kernel."
        for (name, package), count in found.items()
    ]


def notes_on(model: nn.Module, word: str, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what is to be said of a model of transformers and its batch beside the figures of a step."""
    ids = batch.get("input_ids")
    said = "" if ids is None else beyond(model, word, ids.shape[1])
    return tuple(filter(None, [said, *_without_kernels(model)]))


def random_batch(
    batch: Mapping[str, Any], model: nn.Module, device: torch.device | str, seed: int = 0
) -> dict[str, Any]:
    """Returns a batch of the same shapes with random contents on a device, for a step that is really run.

    Args:
        batch: From `batch_for`. Labels that are the tokens stay the tokens.
        model: The model; token ids and classes are those that it knows.
        device: The device of the tensors.
        seed: The seed of the contents.
    """
    config: Any = model.config
    draw = torch.Generator().manual_seed(seed)
    drawn: dict[int, torch.Tensor] = {}
    for value in batch.values():
        if isinstance(value, torch.Tensor) and id(value) not in drawn:
            if value.is_floating_point():
                made = torch.randn(value.shape, generator=draw).to(value.dtype)
            else:
                known = getattr(config, "vocab_size", 1) if value.ndim > 1 else config.num_labels
                made = torch.randint(known, value.shape, generator=draw)
            drawn[id(value)] = made.to(device)
    return {name: drawn.get(id(value), value) for name, value in batch.items()}


def check_head(model: nn.Module, word: str, batch: Mapping[str, Any]) -> None:
    """Refuses a model that takes no labels, as it is built where a configuration names no class with a head."""
    if "labels" in batch:
        return
    config: Any = model.config
    names: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = (names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, names.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
    heads = [table[config.model_type] for table in tables if config.model_type in table]
    head = next((head for head in heads if isinstance(head, str)), "a class of transformers with a head")
    raise errors.ArgumentError(
        f"MODEL is {word!r}, whose configuration names {errors.listed(config.architectures or ())} in its field "
        f"architectures, so {type(model).__name__} is built, which has no head and returns no loss. Write "
        f'"architectures": ["{head}"] into the configuration, or {_OWN}.'
    )


def load_with_batch(args: Any, device: torch.device | str = "meta") -> tuple[nn.Module, ExampleCall, Loss, bool]:
    """Returns the model of a command line or a workload, its call and loss, and whether it was built here."""
    check_sizes(args)
    model, call, loss = load(args.model, None if args.dtype is None else DTYPES[args.dtype], device)
    if call is None:
        return model, ((), batch_for(model, args.model, args.batch, args.sequence)), loss, True
    for option in ("batch", "sequence"):
        if getattr(args, option) is not None:
            raise errors.ArgumentError(made_by_a_function(f"--{option}", args.model))
    return model, call, loss, False


@dataclass(frozen=True, eq=False)
class AskedStep(TrainingStep):
    """The training step that a command line describes; `device` is what its seconds are of, None for the model's.

    Attributes:
        word: The model, as it is written there.
        optimizer_word: The optimizer.
        plan_options: What a plan may use besides recomputation.
        notes: What is to be said of the model and its batch beside the figures.
        built_here: Whether the batch is made here too, and not by a function of the user.
        layers: The parts with fused kernels, or the compiled layers; None where layers run as they are written.
        again: Builds it for other ranks.
    """

    word: str = ""
    optimizer_word: str = ""
    plan_options: PlanOptions = NO_OPTIONS
    notes: tuple[str, ...] = ()
    built_here: bool = False
    layers: HowLayersRun = None
    again: Callable[[Ranks], AskedStep] | None = None
    asked_states: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def asked(args: argparse.Namespace) -> AskedStep:
        """Reads the step of a command line; of ranks that share it, that of one."""
        ranks, loop, as_asked = ranks_of(args), loop_of(args), args

        def again(other: Ranks) -> AskedStep:
            return AskedStep.asked(argparse.Namespace(**{**vars(as_asked), "tp": other.tp, "cp": other.cp}))

        (optimizer, name), lora = optimizer_asked(args, ranks), lora_of(args)
        if getattr(args, "base", None) == "bf16" and args.dtype is None:
            args = argparse.Namespace(**{**vars(args), "dtype": "bf16"})
        if ranks.fully_sharded:
            layout = Layout(ranks, args.mbs or 1, args.batch)
            loop = replace(loop, accumulate=max(loop.accumulate, layout.microbatches))
            args = argparse.Namespace(**{**vars(args), "batch": args.mbs})
        model, call, loss, built_here = load_with_batch(args)
        if ranks.shares_experts:
            shared_experts(model, ranks)
        if built_here:
            check_head(model, args.model, call[1])
        elif lora is not None:
            raise errors.ArgumentError(made_by_a_function("--lora", args.model))
        meta = all(parameter.is_meta for parameter in model.parameters())
        device = device_of(args, "h100" if meta else None)
        if device is None:
            _check_no_data_sheet(args)
        how = getattr(args, "layers", None)
        layers = run_as(model, how, ranks) if lora is None else None
        if built_here and ranks.fully_sharded:
            if ranks.tp * ranks.cp > 1:
                model, _, batch = one_rank(model, args.model, ranks, args.mbs or 1, call[1]["input_ids"].shape[1])
                call, loss = ((), batch), any_loss
            ranks = mixed_precision(model, args, ranks)
        notes = notes_on(model, args.model, call[1]) if built_here else ()
        if lora is not None:
            model = with_adapters(model, args, sharded=ranks.fully_sharded)
            layers = run_as(model, how, ranks)
        notes += () if layers is None else tuple(layers.notes)
        host = read_host(getattr(args, "host", None) or "typical")
        words: Any = host, args.model, name, plan_options_of(args), notes, built_here, layers, again
        return AskedStep(model, *call, loss, optimizer, device, loop, ranks, *words, asked_states=states_words(args))

    def __str__(self) -> str:
        data = self.as_data()
        shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in data["inputs"].items())
        return (
            f"{self.word}: {data['class']}, {data['parameters']:,} parameters in {' and '.join(data['dtypes'])}; "
            f"{shapes or 'no tensors'}; layers {self.layers or LAYERS[0]}; optimizer {self.optimizer_word}"
            f"{self.optimizer if isinstance(self.optimizer, OptimizerSpec) else ''}"
            f"{f'; {self.ranks}' if self.ranks != ALONE else ''}"
        )

    def as_data(self) -> dict[str, Any]:
        """Returns the step as plain data."""
        args, kwargs = self.call
        parameters = inspect.signature(self.model.forward).parameters.values()
        takes = (one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)
        named: dict[Any, Any] = {**{next(takes, place): one for place, one in enumerate(args)}, **kwargs}
        weights = list(self.model.parameters())
        return {
            "model": self.word,
            "class": type(self.model).__name__,
            "parameters": sum(map(elements, weights)),
            "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for weight in weights}),
            "inputs": {
                str(name): list(value.shape) for name, value in named.items() if isinstance(value, torch.Tensor)
            },
            "layers": layers_as_data(self.layers),
            "optimizer": self.optimizer_word,
            **self.asked_states,
            "offload": self.plan_options.offload,
            "host_bandwidth": self.plan_options.bandwidth and self.plan_options.bandwidth._asdict(),
            "tiles": self.plan_options.tiles,
            **({"ranks": self.ranks.as_data()} if self.ranks != ALONE else {}),
            "notes": list(self.notes),
            **self.loop.words,
        }


def layers_as_data(layers: HowLayersRun) -> dict[str, Any]:
    """Returns how layers run as plain data."""
    return {"run": LAYERS[0]} if layers is None else layers.as_data()


def _check_no_data_sheet(args: argparse.Namespace) -> None:
    """Refuses options that need a data sheet, for a step whose seconds are measured where its weights are."""
    if getattr(args, "optimizer_on_host", None):
        raise errors.ArgumentError(
            f"--optimizer-on-host: copies to host memory are priced by a data sheet, and {args.model}, which has "
            "weights, is where these are. Write the --device that is meant: --device h100."
        )
    layers = getattr(args, "layers", None)
    if layers not in (None, LAYERS[0]):
        raise errors.ArgumentError(
            f"--layers {layers}: its kernels are priced by a data sheet, and the seconds of {args.model}, which has "
            "weights, would be measured. Write the --device that is meant, as --device h100."
        )


def curve(profile: Profile, most: int = POINTS) -> list[Plan]:
    """Returns at most so many plans along the whole curve of budget against seconds, the least budget first."""
    points = frontier(profile.costs, most)
    return [planned(profile, profile.costs, point, Limit(point.peak_bytes)) for point in points]


def plan_options_of(args: argparse.Namespace) -> PlanOptions:
    """Reads what a plan may use besides recomputation; for a command without such options that is nothing."""
    offload, bandwidth = getattr(args, "offload", False), getattr(args, "host_bandwidth", None)
    return PlanOptions.of(offload, bandwidth, getattr(args, "tiles", False), "--")


def ranks_of(args: argparse.Namespace) -> Ranks:
    """Reads the ranks of a command line; those of a command without such options are one."""
    names = [field.name for field in fields(Ranks)]
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    reshard = getattr(args, "reshard_after_forward", None)
    try:
        if reshard is not None and Ranks(**given).fully_sharded:
            given["zero"] = 2 if reshard == "no" else 3
        elif reshard == "no":
            raise errors.ArgumentError(errors.goes_with("--reshard-after-forward", "--fsdp"))
        return Ranks(**given)
    except errors.ArgumentError:
        ep = given.get("ep", 1)
        if ep > 1:  # a model without experts is the first to be named
            shared_experts(load(args.model)[0], Ranks(dp=ep, ep=ep))
        raise


def mixed_precision(model: nn.Module, args: argparse.Namespace, ranks: Ranks) -> Ranks:
    """Gives a model that is built here float32 weights, and has ranks compute in bfloat16, unless --dtype says more.

    Weights stay as they are under adapters, and where the optimizer's states are smaller.
    """
    adapters = getattr(args, "lora", None) is not None
    small = args.dtype is not None or getattr(args, "states", None) in ("bf16", "8bit")
    if args.dtype == "fp32" or (small and not adapters):
        return ranks
    if not adapters:
        model.float()
    return replace(ranks, param_dtype="bfloat16", reduce_dtype=ranks.reduce_dtype or "float32")


def made_by_a_function(option: str, model: str) -> str:
    """Returns the text of the error for an option that a user's function decides."""
    return f"{option} is for models that are built here; {model} makes its own. Leave it out, and have it say so there."
