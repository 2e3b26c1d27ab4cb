"""`RecomputeConfig`: Megatron's fields, with Megatron's meanings, for any model.

Four fields of Megatron-LM's configuration are the common language for what to recompute, but act on Megatron's own
layers only. Here they are plain data that is checked when it is made; `plan(model)` turns it into a `Plan` for the
model at hand and checks what depends on the model. Whole layers are counted in each stack that `units.py` finds; parts
are labels (`labels.py`).

Invariants: a field that would have no effect is an error, except what a dump of Megatron's own configuration holds by
default; `RecomputeConfig.from_dict(config.to_dict()) == config`; `eval(repr(config)) == config`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from .. import errors
from ..errors.text import starred_path
from ..memory import saved_activations
from ..memory.batch import Batch, call_of
from ..memory.operations import ModuleStack
from ..state.tape import thread
from . import fields, settings
from .apply import apply
from .choice import PRODUCT, Choice, Target, joined
from .fields import BLOCK, FULL, SELECTIVE, UNIFORM
from .labels import OFFLOADS, STACKED, choices, matching, merge, named, notes, offloaded, routed, stacked_experts
from .plan import Plan
from .roles import inside
from .units import find_units

T = TypeVar("T")
HOST, SHARDED = "host", "sharded"
FILES = (".json", ".yaml", ".yml")


@fields.documented
@dataclass(frozen=True, kw_only=True, repr=False)
class RecomputeConfig:
    """Settings of recomputation, in Megatron-LM's words.

    What each field means, what it does here and when it is refused stands in one table, `fields.FIELDS`, which is also
    that of `docs/config.md`.

    Raises:
        ArgumentError: A value is not known, or would have no effect, or does not go with another one.
    """

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Sequence[str] | None = None
    distribute_saved_activations: bool = False
    repeat_collectives: bool = False
    sequence_parallel: bool = False
    moe_layer_recompute: bool = False
    fine_grained_activation_offloading: bool = False
    offload_modules: Sequence[str] | None = None
    min_offloaded_tensor_size: int = 1024 * 1024
    delay_offload_until_cuda_graph: bool = False
    delta_offload_bytes_across_pp_ranks: int = 0
    activation_offload_fraction: float = 1.0
    fine_grained_offloading_max_inflight_offloads: int | None = None
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False

    def __post_init__(self) -> None:
        fields.check(self)
        if self.moe_layer_recompute and self.recompute_granularity != FULL:
            self._spell_out_moe()
        if self.recompute_modules is None and self.recompute_granularity == SELECTIVE:
            self._set("recompute_modules", ("core_attn",))
        if self.recompute_modules is not None:
            self._set("recompute_modules", tuple(self.recompute_modules))
        fields.check_together(self)
        # Empty lists that were let through, because that is how others write that there is nothing.
        if self.recompute_granularity != SELECTIVE:
            self._set("recompute_modules", None)
        self._set("offload_modules", tuple(self.offload_modules or ()) or None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    def _spell_out_moe(self) -> None:
        modules = ["core_attn"] if self.recompute_modules is None else list(self.recompute_modules)
        modules += [] if "moe" in modules else ["moe"]
        self._set("recompute_granularity", SELECTIVE)
        self._set("recompute_modules", tuple(modules))
        self._set("moe_layer_recompute", False)
        spelled = f'recompute_granularity="selective", recompute_modules={modules}'
        warnings.warn(f"moe_layer_recompute is deprecated; write {spelled}", DeprecationWarning, stacklevel=4)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"RecomputeConfig({said})"

    def plan(self, model: Any, args: Batch | None = None, kwargs: Mapping[str, Any] | None = None) -> Plan:
        """Finds the regions that these settings mean in a model.

        Args:
            model: The whole model, or one stage or chunk of a pipeline.
            args: A batch, see `make_plan`. With one, labels may be names of calls, and each label is tried by a forward
                of its own; without, nothing is run.
            kwargs: More keyword arguments of the call.

        Returns:
            A plan for `apply`; an empty one where the settings ask for nothing.

        Raises:
            ArgumentError: No layers are found, there are fewer of them than `recompute_num_layers`, a label matches
                nothing, or, where there is an example call, a label frees nothing.
        """
        if not isinstance(model, nn.Module):
            each = ""
            if isinstance(model, (list, tuple)):
                each = "\n  For the chunks of an interleaved pipeline, one plan each: "
                each += "[config.plan(chunk) for chunk in chunks]."
            raise errors.ArgumentError(
                f"RecomputeConfig.plan(model) needs a torch.nn.Module, but got {errors.kind(model)}.{each}"
            )
        example = None
        if args is not None or kwargs is not None:
            example = call_of("RecomputeConfig.plan", model, () if args is None else args, kwargs, loss=False)
        labels = tuple(dict.fromkeys(self.recompute_modules or ()))
        if self.recompute_granularity == FULL:
            found = _whole_layers(self, model)
        else:
            found = _parts(self, model, labels, example) if labels else ()
        found = _reductions_kept(self, model, found)
        if example is not None:
            _check_frees(model, found, *example)
        return Plan((*found, *_offloaded_parts(self, model, found)), source=repr(self))

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, ready for JSON and YAML; `from_dict` reads them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecomputeConfig:
        """Reads settings from the keys and values of a training configuration.

        Keys may be in sections, at any depth. Keys that have nothing to do with recomputation are left alone. None
        stands for the default.

        Raises:
            ArgumentError: A key can only be meant for recomputation and is no field, a field has two values, or the
                fields do not go together.
        """
        return cls(**settings.fields_in(data, cls.names()))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> RecomputeConfig:
        """Reads settings from a JSON or YAML file, as `from_dict` does from its content. YAML needs PyYAML.

        Raises:
            ArgumentError: The file cannot be read as either, or as for `from_dict`.
        """
        return cls.from_dict(settings.content_of(path))

    @classmethod
    def from_args(cls, args: Sequence[str] | argparse.Namespace | None = None) -> RecomputeConfig:
        """Reads settings from a command line.

        Args:
            args: The words of a command line, by default those of the process, where flags of others are left alone;
                or what a parser with `add_arguments`, or Megatron-LM's own, has made of them.

        Raises:
            ArgumentError: A flag is not known, or as for `from_dict`.
        """
        return cls.from_dict(settings.fields_in_args(args, cls.names()))

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the flags that `from_args` understands to a parser of your own.

        Each flag can be written with dashes or underscores; modules are separated by spaces or commas.
        `--recompute-activations` stands for `--recompute_granularity selective`, and Megatron-Bridge's `-rl N` for the
        first N layers ("full", "block"). `--recompute_num_layers N` is the field of that name and nothing else, as in
        Megatron-LM. `sequence_parallel` and offload fields are read if your parser has them.
        """
        settings.add_to(parser)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls))


# --- the choices that settings mean in one model ---


def _no_effect(config: RecomputeConfig, field: str, why: str, write: str) -> NoReturn:
    raise errors.ArgumentError(fields.no_effect(config, field, why, write))


def _whole_layers(config: RecomputeConfig, model: nn.Module) -> tuple[Choice, ...]:
    """The regions of `recompute_granularity="full"`."""
    method, number = config.recompute_method or "", config.recompute_num_layers or 0
    units = find_units(model)
    stacks: dict[str | None, list[str]] = {}
    for layer in units.layers:
        stacks.setdefault(layer.stack, []).append(layer.path)
    if not stacks:
        raise errors.ArgumentError(
            f"no layers were found in {type(model).__name__}. Looked for: a ModuleList, Sequential or ModuleDict of "
            "alike modules, each with at least two products (linear layers, convolutions, stacked experts) inside.\n"
            "  Say which class is a layer, before the plan is made:\n"
            '      torch_recompute.register("layer", MyLayer)\n'
            "  or name modules by their paths, as named_modules() gives them:\n"
            '      RecomputeConfig(recompute_granularity="selective", recompute_modules=["blocks.*"])'
        )
    stack = max(stacks, key=lambda stack: len(stacks[stack]))
    length = len(stacks[stack])
    if number > length:
        has = f"the longest stack of layers in this model, {stack or 'the model itself'}, has {length}"
        write = f"Write a number from 1 to {length}" if length > 1 else "Write 1"
        raise errors.ArgumentError(
            f"recompute_num_layers={number}, but {'this model is a single layer' if stack is None else has}. (Under "
            "pipeline parallelism a model is one stage, or one chunk of it; the number is per stage.)\n"
            f"  {write}."
        )
    moved = config.cpu_offloading_num_layers if config.cpu_offloading else 0
    if moved > length:
        why, write = f"the longest stack of layers here has {length}", f"Write cpu_offloading_num_layers={length}"
        _no_effect(config, "cpu_offloading_num_layers", why, write)
    chosen: list[Choice] = []
    for layers in stacks.values():
        for group in groups(layers, method, number):
            store = SHARDED if config.distribute_saved_activations else HOST if group[0] in layers[:moved] else ""
            carry = any(routed(units, path) for path in group)
            chosen.append(Choice(group, carry=carry, labels=(f"{FULL}/{method}",), store=store))
    return tuple(chosen)


def groups(layers: Sequence[T], method: str, number: int) -> list[tuple[T, ...]]:
    """The layers of a stack that are recomputed, by region: "uniform" all, `number` at a time; else the first ones."""
    if method == UNIFORM:
        return [tuple(layers[first : first + number]) for first in range(0, len(layers), number)]
    return [(layer,) for layer in layers[:number]]


def _matches_nothing(label: str, model: str, matching: Mapping[str, int], calls: Mapping[str, int] | None) -> str:
    """Text for a label that finds no part of the model; `calls` are the names that its author gave, if it was run."""
    matching = {**matching, **(calls or {})}
    names = "" if calls else '\n  Its author gave no call a name: no_recompute(fn, name="...").'
    if calls is None:
        names = (
            '\n  Names that the author gave to calls, no_recompute(fn, name="..."), match if plan is given an example '
            "call, which alone shows them: config.plan(model, args, kwargs)."
        )
    width = max(map(len, matching), default=0)
    rows = [f"      {word:<{width}}   {count} place{'s' * (count > 1)}\n" for word, count in matching.items()]
    known = f"  These labels match:\n{''.join(rows)}" if rows else "  No label does.\n"
    return (
        f"recompute_modules: {label!r} matches nothing in {model}, so nothing would be recomputed for it.\n"
        f"{known}"
        '  Paths of modules match too, as named_modules() gives them, and patterns of paths such as "layers.*.mlp"; a '
        f"ModuleList does not, since it is never called.{names}"
    )


def _parts(
    config: RecomputeConfig,
    model: nn.Module,
    labels: Sequence[str],
    example: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> tuple[Choice, ...]:
    """The regions of labels, paths, patterns and, with an example call, names of calls."""
    units, said = find_units(model), type(model).__name__
    moved = (config.offload_modules or ()) if config.fine_grained_activation_offloading else ()
    found: list[Choice] = []
    names: NamedCallsFound | None = None
    for label in labels:
        here = choices(units, label)
        if not here and example is not None:
            names = names or find(model, *example)
            here = named(units, label, names.calls.get(label, ()))
            if not here and label in names.regions:
                paths = names.regions[label]
                where = ", ".join(path or "the model itself" for path in paths[:3]) + " ..." * (len(paths) > 3)
                raise errors.ArgumentError(
                    f"recompute_modules: {label!r} is a region in the code of {said} (in {where}): recompute(fn, "
                    f"name={label!r}) is recomputed whatever a plan says, so naming it would have no effect.\n"
                    "  Leave it out. A call that is recomputed only where it is listed is written in the model as "
                    f"no_recompute(fn, name={label!r}), which is the plain call otherwise."
                )
        if not here:
            calls = None if names is None else {name: len(paths) for name, paths in names.calls.items()}
            raise errors.ArgumentError(_matches_nothing(label, said, matching(units), calls))
        store = HOST if label in moved else SHARDED if config.distribute_saved_activations else ""
        found.extend(replace(choice, store=store) for choice in here)
    merged = merge(units, found)
    for label in moved:
        if label in labels and not any(label in choice.labels and choice.store == HOST for choice in merged):
            why = f"all of {label!r} is inside of other regions, whose inputs stay on the device"
            write = "Name the label of those in offload_modules"
            _no_effect(config, "offload_modules", why, write)
    return merged


def _offloaded_parts(config: RecomputeConfig, model: nn.Module, regions: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices that offload parts without recomputing them: of whole layers, in those that are not recomputed."""
    whole = [path for region in regions for path in region.modules] if config.recompute_granularity == FULL else []
    recomputed = config.recompute_modules or ()
    labels = (config.offload_modules or ()) if config.fine_grained_activation_offloading else ()
    units, found = find_units(model), dict[tuple[str, ...], Choice]()
    for label in (label for label in labels if label not in recomputed):
        chosen = offloaded(units, label, HOST)
        if not chosen:
            known = {word: count for word in OFFLOADS if (count := len(offloaded(units, word, HOST)))}
            why = f"{label!r} matches nothing in {type(model).__name__}"
            write = (
                f"These match: {', '.join(known) or 'no label'}; or name modules by their paths, or patterns of paths"
            )
            stacked = list(dict.fromkeys(map(starred_path, stacked_experts(units))))
            if stacked and label in STACKED:
                why += f", whose experts are stacked in one module: {STACKED[label]}"
                calls = [str(Target.of(path, PRODUCT)) for path in stacked]
                write = f"Write {calls} for the inputs of their products, or {stacked} for all that they save"
            _no_effect(config, "offload_modules", why, write)
        left = [choice for choice in chosen if not any(inside(choice.modules[0], path) for path in whole)]
        if not left:
            why = f"all that {label!r} matches in {type(model).__name__} is inside of layers that are recomputed"
            write = f"Write a smaller recompute_num_layers than {config.recompute_num_layers}"
            _no_effect(config, "offload_modules", why, write)
        found.update((choice.paths, choice) for choice in left)
    return tuple(found.values())


# --- names of calls, found by calling the model once ---


class NamedCallsFound:
    """The named calls that one forward makes, written down while it runs.

    Attributes:
        calls: For each name of a saved call, the modules that make such calls, in the order of the first.
        regions: The same for regions.
    """

    def __init__(self, modules: ModuleStack) -> None:
        self.around = thread.overrides
        self.calls: dict[str, list[str]] = {}
        self.regions: dict[str, list[str]] = {}
        self._modules = modules

    def saved_call(self, name: str, fn: Callable[..., Any]) -> None:
        """Notes a saved call."""
        self._note(self.calls, name)

    def region(self, name: str) -> None:
        """Notes a region."""
        self._note(self.regions, name)

    def _note(self, places: dict[str, list[str]], name: str) -> None:
        if self._modules.module not in places.setdefault(name, []):
            places[name].append(self._modules.module)


def find(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> NamedCallsFound:
    """Finds the named calls of a model by calling it once; the model is as before afterwards."""
    modules = ModuleStack({id(module): path for path, module in model.named_modules()})
    found = thread.overrides = NamedCallsFound(modules)
    try:
        with modules.following():
            saved_activations(model, args, kwargs)
    finally:
        thread.overrides = found.around
    return found


# --- reductions of tensor parallel layers ---
#
# Under tensor parallelism a layer ends its attention and its MLP with a reduction over the ranks, whose result is no
# larger than the layer's input. Regions keep it ("@reduction"), so that replays do not communicate, unless
# `repeat_collectives` is set. All-gathers of sequence parallelism are repeated: their results are as many times as
# large as there are ranks (docs/design/005-collectives.md). With `distribute_saved_activations` nothing is kept whole.


def _reductions_kept(config: RecomputeConfig, model: nn.Module, chosen: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Makes regions with split layers keep reductions, unless the settings say that they are repeated."""
    if config.distribute_saved_activations:
        return chosen
    weights = _split_weights(model)
    splits = [_runs_one(choice, weights) for choice in chosen]
    if not config.repeat_collectives:
        pairs = zip(chosen, splits, strict=True)
        return tuple(
            replace(one, keep=(*one.keep, Target.of(calls="reduction"))) if split else one for one, split in pairs
        )
    if not any(splits):
        why = "no weight in what is recomputed is split over ranks as parallelize_module splits it"
        _no_effect(config, "repeat_collectives", why, "Plan after parallelize_module")
    return chosen


def _split_weights(model: nn.Module) -> list[str]:
    """The paths of parameters that are split for tensor parallelism, which `fully_shard` splits once more."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    def times(placements: Iterable[Any]) -> int:
        return sum(not (placement.is_replicate() or placement.is_partial()) for placement in placements)

    by_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    return [
        path
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor) and times(parameter.placements) > by_fsdp
    ]


def _runs_one(choice: Choice, weights: Iterable[str]) -> bool:
    """Returns whether a replay of this region runs a module with one of these weights."""
    regions = choice.modules
    skipped = [joined(regions[0], keep) for keep in choice.kept if not keep.calls]
    return any(
        any(inside(weight, region) for region in regions) and not any(inside(weight, path) for path in skipped)
        for weight in weights
    )


# --- whether labels free anything ---


def _check_frees(model: nn.Module, placed: Sequence[Choice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises for the first label that keeps as many bytes as no recomputation does, found by one forward per label.

    Structure does not show it: around a norm whose consumers are frozen nothing is saved that a region could drop, and
    around a single product everything saved is its input.
    """

    def kept(chosen: Sequence[Choice]) -> int:
        here = (replace(one, store="") if one.store == SHARDED else one for one in chosen)  # on one rank, by itself
        handle = apply(model, Plan(tuple(here)))
        try:
            return saved_activations(model, args, kwargs).total_bytes
        finally:
            handle.remove()

    def of(label: str) -> tuple[Choice, ...]:
        return merge(units, choices(units, label)) or tuple(c for c in placed if label in c.labels)

    units = find_units(model)
    plain = kept(())
    for label in dict.fromkeys(label for choice in placed for label in choice.labels):
        bytes_kept = kept(of(label))
        if bytes_kept < plain:
            continue
        why = "".join(f"\n{said}" for said in notes(choice for choice in placed if label in choice.labels))
        freed = {other: plain - kept(of(other)) for other in matching(units) if other != label}
        known = "".join(f"\n      {word}   {count:,} bytes" for word, count in freed.items() if count > 0)
        others = f"\n  These free something:{known}" if known else ""
        raise errors.ArgumentError(
            f"{label!r} would cost time and free nothing in {type(model).__name__}: in the call given, {bytes_kept:,} "
            f"bytes are kept for backward with it and {plain:,} without.{why}{others}\n"
            "  Leave it out, or place it around more: what a region keeps is its input."
        )


# --- configurations in one word ---

Policy = Plan | RecomputeConfig | str | Mapping[str, Any]


def _refuse(policy: object) -> NoReturn:
    raise errors.ArgumentError(
        f"{errors.say(policy)} does not say what to recompute.\n"
        '  Write "full" (every layer), "full:2" (two layers as one region), "block:3" (the first three layers), labels '
        'such as "core_attn,mlp", the path of a .json or .yaml file, Megatron\'s flags, or "none"; or pass a Plan or a '
        "RecomputeConfig."
    )


def plan_of(policy: Policy, model: nn.Module) -> Plan:
    """Makes the plan that a policy means in a model.

        "none"                   nothing
        "full", "full:2"         every layer; two layers as one region
        "block:3"                the first three layers
        "selective"              Megatron's default: the label `core_attn`
        "core_attn,mlp"          labels, module paths or patterns of paths
        "plan.json"              a file: a plan that was saved, or Megatron's fields in JSON or YAML
        "--recompute_granularity full ..."    Megatron's flags

    All but a saved plan are a `RecomputeConfig`, and its checks are the only checks.

    Args:
        policy: A plan, settings, a string as above, or a mapping of settings.
        model: The model that it is for.

    Raises:
        ArgumentError: It is none of these, or cannot be met by this model.
    """
    if isinstance(policy, Plan):
        return policy
    if isinstance(policy, RecomputeConfig):
        return policy.plan(model)
    if isinstance(policy, Mapping):
        return RecomputeConfig.from_dict(policy).plan(model)
    if not isinstance(policy, str):
        _refuse(policy)
    policy = policy.strip()
    word, _, number = policy.partition(":")
    if word.startswith("--"):
        return RecomputeConfig.from_args(shlex.split(policy)).plan(model)
    if policy.endswith(FILES):
        text = Path(policy).read_text(encoding="utf-8") if Path(policy).is_file() else ""
        if policy.endswith(".json") and '"choices"' in text:
            return Plan.from_json(text)
        content = settings.content_of(policy)
        if not settings.has_field(content, RecomputeConfig.names()):
            raise errors.ArgumentError(
                f"{policy} is no plan and has none of the fields that say what to recompute (recompute_granularity and "
                "so on), so nothing would be.\n"
                '  Pass a plan that plan.to_json() wrote, a file with {"recompute_granularity": "full", '
                '"recompute_method": "uniform", "recompute_num_layers": 1}, or "none".'
            )
        return RecomputeConfig.from_dict(content).plan(model)
    if policy == "none":
        return Plan(source="none")
    fields: dict[str, Any] = {"recompute_granularity": SELECTIVE}
    if word in ("full", "block"):
        if (number and not number.isdecimal()) or (word == "block" and not number):
            _refuse(policy)
        method = UNIFORM if word == "full" else BLOCK
        fields = {"recompute_granularity": FULL, "recompute_method": method, "recompute_num_layers": int(number or 1)}
    elif policy != "selective":
        fields["recompute_modules"] = [label.strip() for label in policy.split(",")]
        if not all(fields["recompute_modules"]):
            _refuse(policy)
    return RecomputeConfig(**fields).plan(model)
