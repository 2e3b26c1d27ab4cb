"""The fields of `RecomputeConfig` as a table: what each means, what it does here, and when it is refused.

Of the fields of Megatron's configuration on recomputation and offloading six are always refused, and four do nothing.
The checks of `RecomputeConfig`, the texts of their errors, its `help()` and the table of `docs/config.md` are made from
the rows below, so that a field says the same everywhere. A rule that depends on the model is with the plan that is made
of the settings (`config.py`).

Invariants: rows are in the order of the fields, and so are the checks, values before rules. A field at its default
has no effect to speak of, so only rules that say the whole text (`Conflict`) look at it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from .. import errors

Settings = Any  # a `RecomputeConfig`, whose file reads this one
FULL, SELECTIVE = "full", "selective"
UNIFORM, BLOCK = "uniform", "block"
T = TypeVar("T")
Text = str | Callable[[Settings], str]
When = Callable[[Settings], bool]


def _said(text: Text, config: Settings) -> str:
    return text if isinstance(text, str) else text(config)


class NoEffect(NamedTuple):
    """Settings under which a value that is not the default would have no effect.

    Attributes:
        case: The settings, in words for a table.
        when: Whether these are the settings.
        why: Why the value would have no effect.
        write: What to write instead.
    """

    case: str
    when: When
    why: Text
    write: Text

    def text(self, config: Settings, field: str) -> str:
        """The text of the error."""
        return no_effect(config, field, _said(self.why, config), _said(self.write, config))


class Conflict(NamedTuple):
    """Settings that do not go together, or lack something.

    Attributes:
        case: The settings, in words for a table.
        when: Whether these are the settings.
        says: The text of the error.
    """

    case: str
    when: When
    says: Text

    def text(self, config: Settings, _: str) -> str:
        """The text of the error."""
        return _said(self.says, config)


# --- kinds of values ---


class Words(NamedTuple):
    """One of some words, or None: what the field says, and what each word means."""

    says: str
    meanings: Mapping[str | None, str]

    def wrong(self, field: str, value: object) -> str:
        """The text for a value that is none of them; "" for one that is."""
        if value is None or value in self.meanings:
            return ""
        words = {"None" if word is None else f'"{word}"': meaning for word, meaning in self.meanings.items()}
        rows = (f"      {word:{max(map(len, words))}}   {meaning}" for word, meaning in words.items())
        return f"{field}={value!r} is not known. It says {self.says}:\n" + "\n".join(rows)


class Names(NamedTuple):
    """A list of names, or None; and what an empty one does."""

    nothing: str

    def wrong(self, field: str, value: object) -> str:
        """The text for a value that is no list of names; "" for one that is."""
        listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if value is None or (listed and all(isinstance(one, str) and one for one in cast("Sequence[object]", value))):
            return ""
        names = [one.strip() for one in value.split(",")] if isinstance(value, str) else ["core_attn", "mlp"]
        return (
            f"{field} is {errors.say(value)}, where a list of strings is expected.\n"
            f"  Write {field}={names}; [] {self.nothing}."
        )


class Switch(NamedTuple):
    """True or False."""

    def wrong(self, field: str, value: object) -> str:
        """The text for another value; "" for one of the two."""
        if isinstance(value, bool):
            return ""
        return (
            f"{field} is {errors.say(value)}, where True or False is expected.\n"
            f"  Write {field}=True ({field}: true in a file, without quotes)."
        )


class Count(NamedTuple):
    """A number of layers from 1 on, or `none` for no number."""

    none: int | None = None

    def wrong(self, field: str, value: object) -> str:
        """The text for another value; "" for such a number."""
        if value is self.none or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return ""
        return not_a_count(field, value)


def not_a_count(field: str, value: object) -> str:
    """Text for a value that is no number of layers."""
    return (
        f"{field} is {errors.say(value)}, where a whole number of layers is expected, 1 or more.\n"
        f"  Write {field}=1, without quotes; leave it out, or write None (null in a file), for no number."
    )


@dataclass(frozen=True)
class Field:
    """A field of `RecomputeConfig`.

    Attributes:
        name: Its name.
        means: What it means in Megatron-LM.
        effect: What it does here; "" where a value that is not the default is always refused.
        holds: The kind of its values; None for any, where only the default goes.
        switch: The field without which it is not looked at; "" for none.
        rules: When it is refused, the first that is met.
    """

    name: str
    means: str
    effect: str
    holds: Words | Names | Switch | Count | None = None
    switch: str = ""
    rules: tuple[NoEffect | Conflict, ...] = ()

    def refused(self) -> Iterable[str]:
        """The settings under which it is refused, in words; of one that always is, the reason."""
        if self.switch and self.effect:
            yield f"without `{self.switch}`"
        yield from (rule.case for rule in self.rules)


def no_effect(config: Settings, field: str, why: str, write: str) -> str:
    """Text for a field that nothing would look at."""
    value = getattr(config, field)
    return errors.no_effect(field, list(value) if isinstance(value, tuple) else value, why, write)


def check(config: Settings) -> None:
    """Raises ArgumentError for the first value that its field does not hold."""
    for field in FIELDS:
        wrong = field.holds.wrong(field.name, getattr(config, field.name)) if field.holds is not None else ""
        if wrong:
            raise errors.ArgumentError(wrong)


def check_together(config: Settings) -> None:
    """Raises ArgumentError for the first field that is refused beside the others."""
    for field in FIELDS:
        default = _is_default(config, field.name)
        if field.switch and not getattr(config, field.switch):
            if not default:
                why, write = f"{field.switch} is False", f"Write {field.switch}=True with it"
                raise errors.ArgumentError(no_effect(config, field.name, why, write))
            continue
        for rule in field.rules:
            if not (default and isinstance(rule, NoEffect)) and rule.when(config):
                raise errors.ArgumentError(rule.text(config, field.name))


def _is_default(config: Settings, field: str) -> bool:
    """Whether a field says nothing: at its default, an empty list, or what Megatron's default once was."""
    value = getattr(config, field)
    once = (field, value) == ("cpu_offloading_weights", True)
    return value == getattr(type(config), field) or value in ([], ()) or once


# --- rules that several fields share ---


def _always(config: Settings) -> bool:
    return True


def _nothing(config: Settings) -> bool:
    return config.recompute_granularity is None


def _selective(config: Settings) -> bool:
    return config.recompute_granularity == SELECTIVE


NOTHING = "recompute_granularity is None, which recomputes nothing"
_WRITE_FULL = 'Write recompute_granularity="full" with it'
_WHICH_LAYERS = (
    NoEffect(
        'with `"selective"`',
        _selective,
        'recompute_granularity="selective" recomputes parts of every layer, whichever recompute_modules names',
        'For a part of some layers, name it by paths: recompute_modules=["layers.0.mlp", "layers.1.mlp"]',
    ),
    NoEffect(
        "without a granularity",
        _nothing,
        NOTHING,
        'Write recompute_granularity="full", recompute_method="block", recompute_num_layers=N for the first N layers '
        '(what Megatron-Bridge means by --recompute_num_layers alone), or recompute_method="uniform" for all, N at a '
        "time",
    ),
)
_PARTS, _LAYERS = "fine_grained_activation_offloading", "cpu_offloading"


def _of_the_store(option: str) -> tuple[NoEffect, ...]:
    """An option of Megatron's settings that is one of the store here."""
    return (
        NoEffect(
            f"`{option.partition(' ')[0]}` is an option of the store",
            _always,
            "a plan says whose inputs are in host memory, and the store how many of them",
            f'Write apply(model, plan, stores={{"host": store}}) with store = {option}',
        ),
    )


_OF_MEGATRONS_SCHEDULE = (
    NoEffect(
        "it is about Megatron-LM's own schedule",
        _always,
        "it is about Megatron-LM's own schedule",
        "Write nothing in its place",
    ),
)


def _missing(config: Settings) -> list[str]:
    return [name for name in ("recompute_method", "recompute_num_layers") if getattr(config, name) is None]


def _offloading(config: Settings) -> str:
    """The switch of the inputs or parts that are kept in host memory; "" for none."""
    return _LAYERS if config.cpu_offloading else _PARTS if config.fine_grained_activation_offloading else ""


def _without_attention(config: Settings) -> bool:
    labels = config.offload_modules or ()
    return "attn_proj" in labels and "core_attn" not in (*labels, *(config.recompute_modules or ()))


# --- the table ---
#
# Megatron's `cpu_offloading` moves what layers keep; here it moves the inputs of regions, so it goes with whole layers
# that are recomputed (where Megatron forbids it). `fine_grained_activation_offloading` moves what parts save that are
# not recomputed, as Megatron's does, and the inputs of those that are.

FIELDS = (
    Field(
        "recompute_granularity",
        "how much of a layer is recomputed",
        '`None`: nothing; `"full"`: whole layers; `"selective"`: the parts that `recompute_modules` names',
        Words(
            "how much of a layer is recomputed",
            {
                None: "nothing (null in a file; leave the flag out)",
                FULL: "whole layers; recompute_method and recompute_num_layers say which",
                SELECTIVE: "the parts that recompute_modules names",
            },
        ),
        rules=(
            Conflict(
                '`"full"` without a method or a number of layers',
                lambda c: c.recompute_granularity == FULL and bool(_missing(c)),
                lambda c: (
                    f'recompute_granularity="full" needs {" and ".join(_missing(c))}: without, there is no saying '
                    'which layers.\n  For every layer by itself, write recompute_method="uniform", '
                    "recompute_num_layers=1."
                ),
            ),
        ),
    ),
    Field(
        "recompute_method",
        'with `"full"`: which layers are recomputed',
        '`"uniform"`: all, `recompute_num_layers` of them as one region, which keeps one input; `"block"`: the first '
        "`recompute_num_layers`, each by itself",
        Words(
            "which layers are recomputed",
            {
                UNIFORM: "all of them, recompute_num_layers at a time",
                BLOCK: "the first recompute_num_layers, one by one; the others keep their activations",
            },
        ),
        rules=_WHICH_LAYERS,
    ),
    Field(
        "recompute_num_layers",
        'with `"full"`: the number above',
        "from 1 to the layers of this model (of a pipeline: of this stage, or chunk); it holds for each stack of "
        "layers, and a shorter stack is recomputed whole",
        Count(),
        rules=_WHICH_LAYERS,
    ),
    Field(
        "recompute_modules",
        'with `"selective"`: which parts are recomputed',
        "labels, module paths, patterns of paths, or names that the model's author gave to calls; `None` means "
        '`["core_attn"]`, and `[]` recomputes nothing, to compare with',
        Names("recomputes nothing, which is the run to compare with"),
        rules=(
            NoEffect(
                'without `"selective"`',
                lambda c: not _selective(c),
                lambda c: NOTHING if _nothing(c) else 'recompute_granularity="full" recomputes whole layers',
                'Write recompute_granularity="selective" for these parts',
            ),
        ),
    ),
    Field(
        "distribute_saved_activations",
        "each tensor parallel rank keeps a part of the input of each region",
        'the same, of parts of layers too: `apply(model, plan, stores={"sharded": ShardedOver(group)})`',
        Switch(),
        rules=(
            Conflict(
                "with `sequence_parallel`",
                lambda c: c.distribute_saved_activations and c.sequence_parallel,
                "distribute_saved_activations=True does not go with sequence_parallel=True: with the latter the input "
                "of a layer is already split over the tensor parallel ranks, so each rank keeps its own part and there "
                "is nothing to distribute.\n"
                "  Leave distribute_saved_activations out.",
            ),
            NoEffect(
                "without a granularity",
                _nothing,
                f"{NOTHING}, so there are no inputs to distribute",
                _WRITE_FULL,
            ),
            Conflict(
                "with offloading",
                lambda c: c.distribute_saved_activations and bool(_offloading(c)),
                lambda c: (
                    f"distribute_saved_activations=True does not go with {_offloading(c)}=True: the one keeps the "
                    "inputs of regions in parts on the tensor parallel ranks, the other in host memory, and they are "
                    "in one place.\n"
                    '  Leave one of the two out, or make the choices by hand:  Choice((path,), store="sharded")  for '
                    'some layers, store="host"  for others.'
                ),
            ),
        ),
    ),
    Field(
        "repeat_collectives",
        "(not Megatron's; `True` is what it does)",
        "replays repeat the reductions of layers that `parallelize_module` has split; without, their results are kept",
        Switch(),
        rules=(
            NoEffect("without a granularity", _nothing, f"{NOTHING}, so nothing is repeated", _WRITE_FULL),
            NoEffect(
                "with `distribute_saved_activations`",
                lambda c: c.distribute_saved_activations,
                "with distribute_saved_activations=True nothing is kept whole, so collectives are repeated anyway",
                "Write one of the two",
            ),
        ),
    ),
    Field(
        "sequence_parallel",
        "the model splits sequences over tensor parallel ranks",
        "none; for the check of `distribute_saved_activations` only",
        Switch(),
    ),
    Field(
        "moe_layer_recompute",
        'an older spelling of `"moe"` among `recompute_modules`',
        "the same, with a warning that it is deprecated",
        Switch(),
        rules=(
            Conflict(
                'with `"full"`',
                lambda c: c.moe_layer_recompute,
                'moe_layer_recompute=True asks for recompute_granularity="selective" with "moe" among '
                'recompute_modules, but recompute_granularity is "full", which recomputes the layers that the experts '
                "are in.\n"
                "  Leave moe_layer_recompute out.",
            ),
        ),
    ),
    Field(
        _PARTS,
        "what the parts in `offload_modules` save is moved to host memory",
        'the same (`OnHost`), and the inputs of parts that are among `recompute_modules`; with `"block"`, of parts of '
        "the layers that are left",
        Switch(),
        rules=(
            Conflict(
                "without `offload_modules`, or where all layers are recomputed",
                lambda c: (
                    c.fine_grained_activation_offloading
                    and ((c.recompute_granularity == FULL and c.recompute_method != BLOCK) or not c.offload_modules)
                ),
                lambda c: (
                    "fine_grained_activation_offloading=True moves to host memory what the parts in offload_modules "
                    "save, and here "
                    f"{'all layers are recomputed, which save nothing' if c.offload_modules else 'it names none'}.\n"
                    '  Write offload_modules=["core_attn", "expert_fc1"], without recompute_granularity="full" or '
                    'with recompute_method="block", which leaves layers; for the inputs of whole layers, '
                    "cpu_offloading=True."
                ),
            ),
        ),
    ),
    Field(
        "offload_modules",
        "these parts",
        "labels (`attn_norm`, `qkv_linear`, `core_attn`, `attn_proj`, `mlp_norm`, `expert_fc1`, `moe_act`), module "
        "paths or patterns; the store's `ahead` is how many of them are in flight",
        Names("moves nothing"),
        switch=_PARTS,
        rules=(
            NoEffect(
                "`attn_proj` without `core_attn`",
                _without_attention,
                "what the projection saves is the result of the attention, which core_attn keeps on the device all the "
                "same",
                lambda c: f"Write offload_modules={['core_attn', *(c.offload_modules or ())]}",
            ),
        ),
    ),
    Field(
        "min_offloaded_tensor_size",
        "the smallest tensor that is moved, in elements",
        "",
        switch=_PARTS,
        rules=_of_the_store("OnHost(smallest=...) (bytes, not elements)"),
    ),
    Field(
        "delay_offload_until_cuda_graph",
        "when copies begin under CUDA graphs",
        "",
        switch=_PARTS,
        rules=_OF_MEGATRONS_SCHEDULE,
    ),
    Field(
        "delta_offload_bytes_across_pp_ranks",
        "how many bytes fewer each later pipeline rank moves",
        "",
        switch=_PARTS,
        rules=_OF_MEGATRONS_SCHEDULE,
    ),
    Field(
        "activation_offload_fraction",
        "the share of the activations that is moved",
        "",
        switch=_PARTS,
        rules=_of_the_store("OnHost(fraction=...)"),
    ),
    Field(
        "fine_grained_offloading_max_inflight_offloads",
        "how many tensors are on their way at once",
        "",
        switch=_PARTS,
        rules=_of_the_store("OnHost(ahead=...) (regions, not tensors)"),
    ),
    Field(
        _LAYERS,
        "what the first layers keep is moved to host memory; not beside recomputation",
        'with `"full"`: the inputs of the first layers are moved (`OnHost`)',
        Switch(),
        rules=(
            Conflict(
                'without `"full"`',
                lambda c: c.cpu_offloading and c.recompute_granularity != FULL,
                "cpu_offloading=True moves the inputs of whole layers, that are recomputed, to host memory, and here "
                'there are none: it needs recompute_granularity="full".\n'
                '  Write recompute_granularity="full" with it; or, for parts that are not recomputed, '
                'fine_grained_activation_offloading=True, offload_modules=["core_attn"].',
            ),
        ),
    ),
    Field(
        "cpu_offloading_num_layers",
        "how many layers",
        "how many of each stack; of a region of several layers the first counts",
        switch=_LAYERS,
        rules=(
            Conflict(
                "below 1",
                lambda c: bool(Count().wrong("", c.cpu_offloading_num_layers)),
                lambda c: not_a_count("cpu_offloading_num_layers", c.cpu_offloading_num_layers),
            ),
            NoEffect(
                'above the `recompute_num_layers` of `"block"`',
                lambda c: c.recompute_method == BLOCK and c.cpu_offloading_num_layers > (c.recompute_num_layers or 0),
                lambda c: (
                    f"only the first {c.recompute_num_layers} layers are recomputed, and only their inputs are moved"
                ),
                lambda c: f"Write cpu_offloading_num_layers={c.recompute_num_layers}",
            ),
        ),
    ),
    Field(
        "cpu_offloading_activations",
        "whether activations are moved",
        "none: `True` is the default, and there is nothing else to move",
        switch=_LAYERS,
        rules=(
            NoEffect(
                "`False`",
                _always,
                "weights stay on the device, so nothing would be moved",
                "Write cpu_offloading_activations=True",
            ),
        ),
    ),
    Field(
        "cpu_offloading_weights",
        "whether weights are moved",
        "",
        switch=_LAYERS,
        rules=(
            Conflict(
                "weights stay on the device",
                lambda c: c.cpu_offloading_weights,
                lambda c: no_effect(
                    c,
                    "cpu_offloading_weights",
                    "only inputs of regions are moved; weights stay on the device",
                    "Write cpu_offloading_weights=False",
                ),
            ),
        ),
    ),
    Field(
        "cpu_offloading_double_buffering",
        "whether a layer is fetched while another runs",
        "none: inputs always come back one region ahead",
        switch=_LAYERS,
    ),
    Field(
        "cpu_offloading_retain_pinned_cpu_buffers",
        "whether pinned memory is kept for the next step",
        "none: torch always keeps it",
        switch=_LAYERS,
    ),
)
"""A row for each field, in their order."""

SWITCHES = tuple(field.name for field in FIELDS if isinstance(field.holds, Switch))
LISTS = tuple(field.name for field in FIELDS if isinstance(field.holds, Names))


def table() -> list[tuple[str, str, str, str]]:
    """The fields, what they mean, what they do here, and what is refused, as text for a page."""
    return [(f"`{f.name}`", f.means, f.effect or "refused", "; ".join(f.refused())) for f in FIELDS]


def documented(kind: type[T]) -> type[T]:
    """Adds the fields to the docstring of their class."""
    rows = (f"    {field.name}: {field.means}. Here: {field.effect or 'refused'}." for field in FIELDS)
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Attributes:", *rows])
    return kind
