"""`RecomputeConfig`: Megatron's fields, with Megatron's meanings.

The problem: four fields of Megatron-LM's configuration have become the common language for what to recompute, but they
work on Megatron's own layers only, and much of what they cannot do they do not say: a number of layers beyond the
stage, a label that no module answers to, a sharding that selective recomputation never looks at.

The idea: the fields are plain data that prints, compares and is checked as soon as it is made; `plan(model)` turns it
into a `Plan` for the model at hand, and that is where everything is checked that depends on the model. Nothing here
changes a model or runs one.

Rejected: one class per granularity, each with its own fields. It would make most of the rules needless, but then a
configuration could not be pasted, which is what these names are for.

Invariants: a field that would have no effect is an error; a field that is not available yet is refused with the
reason; `RecomputeConfig.from_dict(config.to_dict()) == config`; `eval(repr(config)) == config`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..plan import Plan
from ..plan.named import find
from . import flags, reading, trying
from .placing import placed
from .rules import SELECTIVE, check, check_types


@dataclass(frozen=True, kw_only=True, repr=False)
class RecomputeConfig:
    """What to recompute, in Megatron-LM's words.

    Attributes:
        recompute_granularity: None for nothing, "full" for whole layers, "selective" for the parts that
            `recompute_modules` names.
        recompute_method: For "full": "uniform" recomputes every layer, `recompute_num_layers` of them as one region
            (the last region of a stack may be shorter), so that one input per region is kept; "block" recomputes the
            first `recompute_num_layers` layers of a stack, each by itself, and leaves the others as they are.
        recompute_num_layers: For "full": the number above, from 1 to the layers of this model. Under pipeline
            parallelism the model is one stage, and under interleaving one chunk, as in Megatron. In a model with
            several stacks (encoder and decoder, or towers) the method is applied to each; the number may not be
            larger than the longest of them, and a shorter stack is one region ("uniform") or recomputed as a whole
            ("block").
        recompute_modules: For "selective": labels (`core_attn`, `mlp`, `layernorm`, `moe`, `moe_act`,
            `shared_experts`, `mla_up_proj`), module paths, patterns of paths, or names that the model's author gave to
            calls (`no_recompute(fn, name="scores")`). None stands for ["core_attn"]; [] recomputes nothing.
        distribute_saved_activations: For "full": the input of each region is kept in parts on the tensor parallel
            ranks, which all hold it whole: `apply(model, plan, stores={"sharded": ShardedOver(group)})`.
        repeat_collectives: Not Megatron's. Layers that `parallelize_module` has split keep the results of their
            reductions, which replays then do not repeat; True repeats them, as Megatron does, and keeps nothing. With
            `distribute_saved_activations` they are repeated anyway.
        sequence_parallel: Whether the model splits sequences over tensor parallel ranks; for checks only.
        moe_layer_recompute: Megatron's older spelling of "moe" among `recompute_modules`, and spelled so here.
        fine_grained_activation_offloading: Keep the inputs of some recomputed parts in host memory (`OnHost`).
        offload_modules: Which: labels that are among `recompute_modules` too.
        min_offloaded_tensor_size: An option of the store here, `OnHost(smallest=)`; refused.
        delay_offload_until_cuda_graph: About Megatron's own schedule; refused.
        delta_offload_bytes_across_pp_ranks: Likewise.
        activation_offload_fraction: An option of the store here, `OnHost(fraction=)`; refused.
        fine_grained_offloading_max_inflight_offloads: An option of the store here, `OnHost(ahead=)`; refused.
        cpu_offloading: Keep the inputs of some recomputed layers in host memory (`OnHost`); with "full".
        cpu_offloading_num_layers: Which: the first so many layers of each stack, from 1. Of a region of several
            layers the first counts.
        cpu_offloading_activations: Whether inputs are moved; there is nothing else to move.
        cpu_offloading_weights: Refused: weights stay on the device.
        cpu_offloading_double_buffering: Always so: inputs come back one region ahead.
        cpu_offloading_retain_pinned_cpu_buffers: Always so: torch keeps pinned memory for the next step.

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
        check_types(self)
        if self.moe_layer_recompute:
            self._spell_out_moe()
        if self.recompute_modules is None and self.recompute_granularity == SELECTIVE:
            self._set("recompute_modules", ("core_attn",))
        if self.recompute_modules is not None:
            self._set("recompute_modules", tuple(self.recompute_modules))
        check(self)
        # Empty lists that were let through, because that is how others write that there is nothing.
        if self.recompute_granularity != SELECTIVE:
            self._set("recompute_modules", None)
        self._set("offload_modules", tuple(self.offload_modules or ()) or None)

    def _set(self, name: str, value: object) -> None:
        # The one way past `frozen`, for the time until the object is made.
        object.__setattr__(self, name, value)

    def _spell_out_moe(self) -> None:
        if self.recompute_granularity == "full":
            raise errors.ArgumentError(
                'moe_layer_recompute=True asks for recompute_granularity="selective" with "moe" among '
                'recompute_modules, but recompute_granularity is "full", which recomputes the layers that the experts '
                "are in.\n"
                "  Leave moe_layer_recompute out."
            )
        modules = ("core_attn",) if self.recompute_modules is None else tuple(self.recompute_modules)
        self._set("recompute_granularity", SELECTIVE)
        self._set("recompute_modules", modules if "moe" in modules else (*modules, "moe"))
        self._set("moe_layer_recompute", False)
        spelled = f'recompute_granularity="selective", recompute_modules={list(self.recompute_modules or ())}'
        warnings.warn(f"moe_layer_recompute is deprecated; write {spelled}", DeprecationWarning, stacklevel=4)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"RecomputeConfig({said})"

    def plan(self, model: Any, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None) -> Plan:
        """The regions that these settings mean in this model.

        Args:
            model: A `torch.nn.Module`: the whole model, or one stage or chunk of a pipeline. Without an example call
                it is only looked at.
            args: Positional arguments of an example call. With one, each label is tried by a forward of its own, and
                labels may be names of calls, which are found by one more.
            kwargs: Keyword arguments of the example call.

        Returns:
            A plan for `apply`; an empty one where the settings ask for nothing.

        Raises:
            ArgumentError: No layers are found, there are fewer of them than `recompute_num_layers`, a label matches
                nothing, or, where there is an example call, a label frees nothing.
        """
        if args is None and kwargs is None:
            return Plan(placed(self, model, None), source=repr(self))
        choices = placed(self, model, lambda: find(model, args or (), kwargs))
        trying.check(model, choices, args or (), kwargs)
        return Plan(choices, source=repr(self))

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their default, ready for JSON and YAML; `from_dict` reads them."""
        values = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value, default in values
            if value != default
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecomputeConfig:
        """Settings from keys and values: a part of, or a whole, training configuration.

        Keys may lie inside sections, at any depth. Keys that have nothing to do with recomputation are left alone; one
        that can only be meant for it and is not a field is an error. None stands for the default.

        Raises:
            ArgumentError: As above, or a field has two values, or the fields do not go together.
        """
        return cls(**reading.fields_of(data, cls.names()))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> RecomputeConfig:
        """Settings from a JSON or YAML file, read as `from_dict` reads its content. YAML needs PyYAML.

        Raises:
            ArgumentError: The file cannot be read as either, or as `from_dict` says.
        """
        return cls.from_dict(reading.content_of(path))

    @classmethod
    def from_args(cls, args: Sequence[str] | argparse.Namespace | None = None) -> RecomputeConfig:
        """Settings from a command line.

        Args:
            args: The words of a command line, by default those of the process, where flags of others are left alone;
                or what a parser with `add_arguments` has made of them. Megatron-LM's own arguments can be passed too.

        Raises:
            ArgumentError: A flag is not known, or as `from_dict` says.
        """
        return cls.from_dict(flags.fields_of(args, cls.names()))

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags that `from_args` understands to a parser of your own.

        Each flag can be written with dashes or underscores. Modules are separated by spaces or commas;
        `--recompute-activations` stands for `--recompute_granularity selective`. `-rl N` is Megatron-Bridge's, which
        means the first N layers ("full", "block"). Megatron-Bridge gives `--recompute_num_layers N` the same meaning;
        here, as in Megatron-LM, it is the field of that name and nothing else. `sequence_parallel` and offload fields
        are read from the parsed arguments if your parser has them.
        """
        flags.add_to(parser)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls))
