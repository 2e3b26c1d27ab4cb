"""Texts for configurations in Megatron's words, and for models that they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._say import kind, say


def unknown_granularity(value: object) -> str:
    """Text for an unknown `recompute_granularity`."""
    return (
        f"recompute_granularity={value!r} is not known. It says how much of a layer is recomputed:\n"
        "      None          nothing (null in a file; leave the flag out)\n"
        '      "full"        whole layers; recompute_method and recompute_num_layers say which\n'
        '      "selective"   the parts that recompute_modules names'
    )


def unknown_method(value: object) -> str:
    """Text for an unknown `recompute_method`."""
    return (
        f"recompute_method={value!r} is not known. It says which layers are recomputed:\n"
        '      "uniform"   all of them, recompute_num_layers at a time\n'
        '      "block"     the first recompute_num_layers, one by one; the others keep their activations'
    )


def incomplete_full(missing: Sequence[str]) -> str:
    """Text for whole layers without saying which."""
    return (
        f'recompute_granularity="full" needs {" and ".join(missing)}: without, there is no saying which layers.\n'
        '  For every layer by itself, write recompute_method="uniform", recompute_num_layers=1.'
    )


def not_a_count(field: str, value: object) -> str:
    """Text for a number of layers that is no whole number of at least 1."""
    return (
        f"{field} is {say(value)}, where a whole number of layers is expected, 1 or more.\n"
        f"  Write {field}=1, without quotes; leave it out, or write None (null in a file), for no number."
    )


def not_a_switch(field: str, value: object) -> str:
    """Text for a field that is True or False and holds something else."""
    return (
        f"{field} is {say(value)}, where True or False is expected.\n"
        f"  Write {field}=True ({field}: true in a file, without quotes)."
    )


def not_labels(field: str, value: object) -> str:
    """Text for a list of labels that is not a list of strings."""
    written = f"[{value!r}]" if isinstance(value, str) else '["core_attn", "layernorm"]'
    none = "recomputes nothing, which is the run to compare with" if field == "recompute_modules" else "moves nothing"
    return f"{field} is {say(value)}, where a list of strings is expected.\n  Write {field}={written}; [] {none}."


def no_effect(field: str, value: object, why: str, write: str) -> str:
    """Text for a field that nothing would look at."""
    return f"{field}={value!r} would have no effect: {why}.\n  {write}, or leave {field} out."


def sequence_parallel_shards_already() -> str:
    """Text for `distribute_saved_activations` with `sequence_parallel`."""
    return (
        "distribute_saved_activations=True does not go with sequence_parallel=True: with the latter the input of a "
        "layer is already split over the tensor parallel ranks, so each rank keeps its own part and there is nothing "
        "to distribute.\n"
        "  Leave distribute_saved_activations out."
    )


def in_two_places() -> str:
    """Text for inputs of regions that are to lie both on other ranks and in host memory."""
    return (
        "distribute_saved_activations=True does not go with cpu_offloading=True: the one keeps the inputs of regions "
        "in parts on the tensor parallel ranks, the other in host memory, and they lie in one place.\n"
        '  Leave one of the two out, or make the choices by hand:  Choice((path,), store="sharded")  for some layers, '
        'store="host"  for others.'
    )


def parts_are_not_shared() -> str:
    """Text for `distribute_saved_activations` with parts of layers."""
    return (
        'distribute_saved_activations=True does not go with recompute_granularity="selective": what goes into a layer '
        "is the same on all tensor parallel ranks, but what goes into its parts (the queries, keys and values of its "
        "attention) is not, so it cannot be kept in common. (Megatron-LM's arguments refuse it too; its "
        "TransformerConfig takes it, and does nothing with it.)\n"
        "  Leave it out, or write it with full granularity. For a part whose input is the same on all ranks:  "
        'Choice((path,), store="sharded").'
    )


def offload_without_regions(field: str, what: str) -> str:
    """Text for offloading where nothing is recomputed whose inputs could be moved."""
    granularity = '"full"' if field == "cpu_offloading" else '"selective"'
    return (
        f"{field}=True moves the inputs of {what}, that are recomputed, to host memory, and here there are none: it "
        f"needs recompute_granularity={granularity}. (What a module keeps without being recomputed is not moved; "
        "Megatron-LM does that in its own layers.)\n"
        f"  Write recompute_granularity={granularity} with it, or place a store by hand: "
        "no_recompute(fn, store=OnHost()) inside a region."
    )


def moe_layers_twice() -> str:
    """Text for `moe_layer_recompute` with whole layers."""
    return (
        'moe_layer_recompute=True asks for recompute_granularity="selective" with "moe" among recompute_modules, but '
        'recompute_granularity is "full", which recomputes the layers that the experts are in.\n'
        "  Leave moe_layer_recompute out."
    )


def inside_the_layer(field: str, value: object, why: str) -> str:
    """Text for a field of Megatron-LM that is carried out in its layers, not around them."""
    return f"{field}={value!r} cannot be applied from outside of a layer: {why}."


def unknown_field(name: str, nearest: str, where: str) -> str:
    """Text for a key or flag that can only be meant for us and is not known."""
    place = f" in {where}" if where else ""
    return (
        f"{name!r}{place} is not a field of RecomputeConfig, so it would have no effect; the nearest is {nearest!r}.\n"
        "  The fields are Megatron-LM's, written out: recompute_granularity, recompute_method, recompute_num_layers, "
        "recompute_modules."
    )


def said_twice(field: str, places: Sequence[str]) -> str:
    """Text for a field with two values in one file."""
    first, second = (place or "the top level" for place in places)
    return (
        f"{field} has one value in {first} and another in {second}; which of the two is meant cannot be told.\n"
        "  Pass one section: RecomputeConfig.from_dict(data['model'])."
    )


def not_a_mapping(what: str, value: object) -> str:
    """Text for a configuration that is not made of keys and values."""
    return (
        f"{what} is {say(value)}, where keys and values are expected.\n"
        '  Write {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, with any '
        "other keys beside, or inside of a section."
    )


def bad_file(path: str, why: str) -> str:
    """Text for a file that cannot be read as a configuration."""
    return (
        f"{path} is not a configuration: {why}.\n"
        "  from_file reads JSON from *.json and YAML from *.yaml and *.yml; pass what you read from another file to "
        "RecomputeConfig.from_dict(data)."
    )


def no_yaml(path: str) -> str:
    """Text for a YAML file where there is no PyYAML."""
    return (
        f"reading {path} needs the package PyYAML, which is not installed.\n"
        "  Write: pip install torch-recompute[config], or save the file as JSON."
    )


def bad_flags(why: str) -> str:
    """Text for a command line that cannot be."""
    return (
        f"these flags cannot be used: {why}.\n"
        "  For example: --recompute_granularity selective --recompute_modules core_attn layernorm\n"
        "           or: --recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
    )


def not_plannable(value: object) -> str:
    """Text for a model that is no module."""
    each = ""
    if isinstance(value, (list, tuple)):
        each = "\n  For the chunks of an interleaved pipeline, one plan each: [config.plan(chunk) for chunk in chunks]."
    return f"RecomputeConfig.plan(model) needs a torch.nn.Module, but got {kind(value)}.{each}"


def too_many_layers(layers: int, stack: str | None, length: int) -> str:
    """Text for more layers than the model has; `stack` is the path of the longest stack, None if there is none."""
    if stack is None:
        has = "this model is a single layer"
    else:
        has = f"the longest stack of layers in this model, {stack or 'the model itself'}, has {length}"
    write = f"Write a number from 1 to {length}" if length > 1 else "Write 1"
    return (
        f"recompute_num_layers={layers}, but {has}. (Under pipeline parallelism a model is one stage, or one chunk of "
        "it; the number is per stage.)\n"
        f"  {write}."
    )


def no_layers(model: str) -> str:
    """Text for a model in which no layers are found."""
    return (
        f"no layers were found in {model}. Looked for: a ModuleList, Sequential or ModuleDict of alike modules, each "
        "with at least two products (linear layers, convolutions, stacked experts) inside.\n"
        "  Say which class is a layer, before the plan is made:\n"
        "      from torch_recompute.plan.units import register\n"
        '      register("layer", MyLayer)\n'
        "  or name modules by their paths, as named_modules() gives them:\n"
        '      RecomputeConfig(recompute_granularity="selective", recompute_modules=["blocks.*"])'
    )


def matches_nothing(label: str, model: str, matching: Mapping[str, int], calls: Mapping[str, int] | None) -> str:
    """Text for a label that finds no part of the model; `calls` are the names that its author gave, if it was run."""
    matching = {**matching, **(calls or {})}
    if calls is None:
        names = (
            '\n  Names that the author gave to calls, no_recompute(fn, name="..."), match if plan is given an example '
            "call, which alone shows them: config.plan(model, args, kwargs)."
        )
    else:
        names = "" if calls else '\n  Its author gave no call a name: no_recompute(fn, name="...").'
    if matching:
        width = max(map(len, matching))
        rows = "".join(
            f"\n      {word:<{width}}   {count} place{'s' if count > 1 else ''}" for word, count in matching.items()
        )
        known = f"  These labels match:{rows}\n"
    else:
        known = "  No label does.\n"
    return (
        f"recompute_modules: {label!r} matches nothing in {model}, so nothing would be recomputed for it.\n"
        f"{known}"
        '  Paths of modules match too, as named_modules() gives them, and patterns of paths such as "layers.*.mlp"; a '
        f"ModuleList does not, since it is never called.{names}"
    )


def a_region_anyway(label: str, model: str, paths: Sequence[str]) -> str:
    """Text for a label that is the name of a region in the model's own code."""
    where = ", ".join(path or "the model itself" for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
    return (
        f"recompute_modules: {label!r} is a region in the code of {model} (in {where}): recompute(fn, name={label!r}) "
        "is recomputed whatever a plan says, so naming it would have no effect.\n"
        "  Leave it out. A call that is recomputed only where it is listed is written in the model as "
        f"no_recompute(fn, name={label!r}), which is the plain call otherwise."
    )


def frees_nothing(label: str, model: str, plain: int, kept: int, freeing: Mapping[str, int]) -> str:
    """Text for a label under which as much is kept for backward as without recomputation."""
    known = "".join(f"\n      {word}   {freed:,} bytes" for word, freed in freeing.items())
    others = f"\n  These free something:{known}" if freeing else ""
    return (
        f"{label!r} would cost time and free nothing in {model}: in the call given, {kept:,} bytes are kept for "
        f"backward with it and {plain:,} without.{others}\n"
        "  Leave it out, or place it around more: what a region keeps is its input."
    )
