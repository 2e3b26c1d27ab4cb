"""Megatron's labels as regions and saved calls: what a word such as `core_attn` asks for in a model.

Each label is a function from the units of a model to choices. Two shapes are enough: a region around each unit of a
role, with the calls in it that are saved; and, for what has no module of its own (the norms and residual adds of a
layer), a region around the layer in which everything else is a saved call.;
`MEANS` says what each does.

Anything else is a path of a module, or a glob over paths: a region around each match, the outermost where they nest;
or a name that the model's author gave to calls (`wrappers.py`): a region around each call.

`merge` settles what happens when labels meet: asking for more must never free less. In one region a call is saved only
if every label that asked for the region saves it. Of two nested regions both stay if the inner one is in a call that
the outer one saves; else the outer one replays it anyway, so the two become one. A region with a router in it carries
the decisions, so that tokens are never routed twice.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence

from .choice import ATTENTION, DOWN, MATMUL, PRODUCT, Choice, Target, joined
from .roles import Unit, Units, inside, relative

KEEP_PRODUCTS, KEEP_ATTENTION = Target.of(calls=PRODUCT), Target.of(calls=ATTENTION)
PRODUCTS = ("product", "down_projection", "up_projection")
# What is worth saving whole around a norm: everything that holds a matrix.
WEIGHTY = (*PRODUCTS, "attention", "router", "experts", "moe", "mixer")
# Calls that a label for a part of a layer leaves alone.
PARTS = (*WEIGHTY, "mlp", "norm", "inner_norm")


def routed(units: Units, path: str) -> bool:
    """Returns whether tokens are routed in this module, so that a region around it carries the decisions."""
    return bool(units.by_role("router", within=path)) or any(
        inside(part, path) for unit in units.by_role("moe") for part in (unit.parts or (unit.path,))
    )


def _region(units: Units, label: str, path: str, keep: Iterable[str] = ()) -> Choice:
    return Choice((path,), tuple(keep), routed(units, path), (label,))


def _around(units: Units, unit: Unit, label: str, holding: tuple[str, ...], parts: Iterable[str]) -> Choice:
    """A region around a module in which only these parts, and what holds none of the roles, are recomputed."""
    parts = set(parts)
    whole = {other.path for other in units.by_role(*holding, within=unit.path) if not other.parts} - parts
    kept = units.maximal(unit.path, whole - {unit.path}, parts)
    calls = units.by_role("core_attention", within=unit.path)
    loose = any(not any(inside(call.path, path) for path in kept) for call in calls)
    names = [relative(path, unit.path) for path in kept]
    return _region(units, label, unit.path, [*names, *([KEEP_ATTENTION] if loose else [])])


def _attentions(label: str, keep: Sequence[str]) -> Callable[[Units], list[Choice]]:
    """A region around each attention. A fused call is kept: its backward makes the scores again in any case."""
    return lambda units: [_region(units, label, unit.path, keep) for unit in units.by_role("attention")]


def _whole(role: str) -> Callable[[Units], list[Choice]]:
    def placed(units: Units) -> list[Choice]:
        return [
            _around(units, unit, role, PARTS, unit.parts) if unit.parts else _region(units, role, unit.path)
            for unit in units.by_role(role)
        ]

    return placed


def _moe_act(units: Units) -> list[Choice]:
    known, blocks = set(units.modules), units.by_role("moe")
    paths: list[str] = []
    for unit in units.by_role("experts"):
        around = [block.path for block in blocks if inside(unit.path, block.path)]
        paths.append(unit.path if unit.path in known or not around else around[-1])
    return [_region(units, "moe_act", path, [KEEP_PRODUCTS]) for path in paths if path in known]


def _layernorm(units: Units) -> list[Choice]:
    found: list[Choice] = []
    for layer in units.layers:
        norms = [norm.path for norm in units.by_role("norm", within=layer.path)]
        if norms and layer.path not in norms:
            found.append(_around(units, layer, "layernorm", WEIGHTY, norms))
    return found


def _mla_up_proj(units: Units) -> list[Choice]:
    found: list[Choice] = []
    for unit in units.by_role("attention"):
        if units.by_role("up_projection", within=unit.path):
            kept = units.by_role("down_projection", "product", within=unit.path)
            names = [relative(one.path, unit.path) for one in kept]
            found.append(_region(units, "mla_up_proj", unit.path, [*names, KEEP_ATTENTION]))
    return found


MEANS: Mapping[str, str] = {
    "core_attn": "a region around each attention, matmuls and fused attention kept: explicit scores are recomputed",
    "attention_output": "a region around each attention, fused attention kept: projections before it are recomputed",
    "mlp": "a region around each dense MLP",
    "moe": "a region around each mixture of experts, router included, its decisions carried",
    "moe_act": "a region around the experts, matmuls kept",
    "shared_experts": "a region around each MLP that all tokens go through beside the experts",
    "layernorm": "a region around each layer, modules with matmuls kept: norms, residual adds, dropout are recomputed",
    "mla_up_proj": "a region around each MLA attention; down-projections, output projection and attention call kept",
}
"""What each label asks for."""
NOTES: Mapping[str, str] = {
    "core_attn": "where attention is fused (scaled_dot_product_attention, flex_attention), core_attn keeps the call "
    "and does not run it twice: its scores are never stored, so it frees nothing and may store more; attention_output "
    "frees q, k and v. Scores made by products and softmax are recomputed",
    "attention_output": "attention_output keeps the result of fused attention and recomputes q, k and v; scores made "
    "by products and softmax are recomputed, too",
}
"""What a label does with attention, which the structure of a model does not tell."""
LABELS: dict[str, Callable[[Units], list[Choice]]] = {
    "core_attn": _attentions("core_attn", [KEEP_PRODUCTS, KEEP_ATTENTION]),
    "attention_output": _attentions("attention_output", [KEEP_ATTENTION]),
    "mlp": _whole("mlp"),
    "moe": _whole("moe"),
    "moe_act": _moe_act,
    "shared_experts": _whole("shared_experts"),
    "layernorm": _layernorm,
    "mla_up_proj": _mla_up_proj,
}


def choices(units: Units, label: str) -> tuple[Choice, ...]:
    """The regions that a label, a module's path or a glob over paths (`*` also goes over dots) asks for, if any."""
    if label in LABELS:
        return tuple(LABELS[label](units))
    matches = [path for path in units.modules if path and fnmatch.fnmatchcase(path, label)]
    return tuple(_region(units, label, path) for path in ([label] if label in matches else _outermost(matches)))


def notes(choices: Iterable[Choice]) -> list[str]:
    """The notes on the labels of choices, each sentence once."""
    asked = {label for choice in choices if KEEP_ATTENTION in choice.keep for label in choice.labels}
    return [f"  {said}." for label, said in NOTES.items() if label in asked]


def _products(units: Units, path: str) -> list[str]:
    """The products in a module in the order of their calls: Megatron's attentions make `linear_proj` first."""
    found = dict.fromkeys(unit.path for unit in units.by_role(*PRODUCTS, within=path))
    return sorted(found, key=lambda name: name.endswith(".linear_proj"))


def stacked_experts(units: Units) -> list[str]:
    """The modules that hold the matrices of several experts themselves, so that no module in them is one product."""
    experts = (unit.path for unit in units.by_role("experts"))
    return [path for path in experts if path in units.modules and set(_products(units, path)) <= {path}]


def _of_experts(units: Units, role: str) -> list[str]:
    """The products of each expert but the last, or the activations, of experts that are modules."""
    inner: dict[str, list[str]] = {}
    stacked = stacked_experts(units)
    for unit in (unit for unit in units.by_role("experts") if unit.path not in stacked):
        paths = (
            _products(units, unit.path)
            if role == "product"
            else [u.path for u in units.by_role(role, within=unit.path)]
        )
        for path in (path for path in paths if path != unit.path):
            inner.setdefault(path.rpartition(".")[0], []).append(path)
    return [path for paths in inner.values() for path in (paths[:-1] if role == "product" else paths)]


def _norm_before(units: Units, mlp: bool) -> list[str]:
    """The norm in front of the attention of each layer, or of its MLP; with norms behind both, every other one."""
    found: list[str] = []
    for layer in units.layers:
        norms = [norm.path for norm in units.by_role("norm", within=layer.path)]
        if len(norms) in (2, 4):
            found.append(norms[len(norms) // 2 if mlp else 0])
    return found


def _core_attention(units: Units) -> list[str]:
    return [Target.of(u.path, ATTENTION) if u.parts else u.path for u in units.by_role("core_attention")]


OFFLOADS: Mapping[str, Callable[[Units], list[str]]] = {
    "attn_norm": lambda units: _norm_before(units, mlp=False),
    "qkv_linear": lambda units: [p for a in units.by_role("attention") for p in _products(units, a.path)[:-1]],
    "core_attn": _core_attention,
    "attn_proj": lambda units: [p for a in units.by_role("attention") for p in _products(units, a.path)[-1:]],
    "mlp_norm": lambda units: _norm_before(units, mlp=True),
    "expert_fc1": lambda units: _of_experts(units, "product"),
    "moe_act": lambda units: _of_experts(units, "activation"),
}
"""Which parts each of Megatron's `offload_modules` means."""
STACKED: Mapping[str, str] = {
    "expert_fc1": "no module there is the first product alone",
    "moe_act": "gate and up are parts of one result, and what follows the activation keeps it on the device",
}
"""Why a label means nothing where experts are stacked."""


def offloaded(units: Units, label: str, store: str) -> tuple[Choice, ...]:
    """The modules or calls that a label of `OFFLOADS`, a path or a pattern of paths offloads."""
    if label in OFFLOADS:
        paths = OFFLOADS[label](units)
    else:
        module, calls = Target(label).module, Target(label).calls
        found = choices(units, module) if calls in ("", ATTENTION, PRODUCT, DOWN, MATMUL) else ()
        paths = [Target.of(choice.paths[0], calls) for choice in found]
    return tuple(Choice((path,), labels=(label,), store=store, offload=True) for path in dict.fromkeys(paths))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Returns the paths that are not below another."""
    every = list(paths)
    return [path for path in every if not any(inside(path, other) and path != other for other in every)]


def named(units: Units, label: str, paths: Iterable[str]) -> tuple[Choice, ...]:
    """The regions around calls with this name, which the modules with these paths make."""
    return tuple(Choice((Target.of(path, label),), (), routed(units, path), (label,)) for path in paths)


def matching(units: Units) -> dict[str, int]:
    """Counts the regions that each label makes in this model; labels that match nothing are left out."""
    counts = {label: len(placed(units)) for label, placed in LABELS.items()}
    return {label: count for label, count in counts.items() if count}


def merge(units: Units, choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Makes one plan of the choices of several labels: one per path, in the model's order, none replayed twice."""
    order = {path: number for number, path in enumerate(units.modules)}
    merged: list[Choice] = []

    def place(choice: Choice) -> tuple[int, str]:
        target = Target(choice.paths[0])
        return order.get(target.module, len(order)), target.calls

    # The outer ones first, so that each is complete before one inside it is looked at.
    for choice in sorted(choices, key=place):
        around = next((other for other in reversed(merged) if _replays(other, choice)), None)
        if around is None:
            merged.append(choice)
        else:
            merged[merged.index(around)] = _united(units, around, choice)
    return tuple(merged)


def _replays(outer: Choice, inner: Choice) -> bool:
    """Returns whether the outer region runs the inner one's module again, rather than saving it."""
    (top, *more), (low, *others) = outer.paths, inner.paths
    if more or others or Target(top).calls or Target(low).calls:  # a named call finds out for itself
        return False
    return inside(low, top) and not any(inside(low, path) for path in _saved_paths(outer))


def _saved_paths(choice: Choice) -> list[str]:
    """The paths in the model that a choice saves, without kinds of calls that it saves everywhere."""
    return [joined(choice.paths[0], keep) for keep in choice.kept if keep.module or not keep.calls]


def _united(units: Units, outer: Choice, inner: Choice) -> Choice:
    """One region around both that saves, where the inner one is, only what both save."""
    top, low = outer.paths[0], inner.paths[0]
    mine = _SavedBy(units, outer)
    theirs = _SavedBy(units, inner)
    products = [unit.path for unit in units.by_role(*PRODUCTS, within=top)]
    kept = [path for path in mine.paths if not inside(path, low) or theirs.keeps(path)]
    kept += [path for path in theirs.paths if mine.keeps(path)]
    kept += [path for path in products if mine.keeps(path) and (not inside(path, low) or theirs.keeps(path))]
    words: list[str] = []
    if mine.products and (theirs.products or not units.by_role(*WEIGHTY, within=low)):
        words.append(KEEP_PRODUCTS)
        kept = [path for path in kept if path not in products]
    chosen = set(kept)
    outermost = _outermost(path for path in units.modules if path in chosen)
    calls = [call.path for call in units.by_role("core_attention", within=top)]
    loose = [call for call in calls if not any(inside(call, path) for path in outermost)]
    if loose and all(mine.calls(call) and (theirs.calls(call) or not inside(call, low)) for call in calls):
        words.append(KEEP_ATTENTION)
    labels = tuple(dict.fromkeys((*outer.labels, *inner.labels)))
    names = [relative(path, top) for path in outermost]
    return Choice((top,), (*names, *words), outer.carry or inner.carry, labels, outer.store)


class _SavedBy:
    """The work that one choice saves, with paths as the model has them."""

    def __init__(self, units: Units, choice: Choice) -> None:
        self.paths = _saved_paths(choice)
        self.products = KEEP_PRODUCTS in choice.keep
        self.attention = KEEP_ATTENTION in choice.keep
        self._leaves = {unit.path for unit in units.by_role(*PRODUCTS, within=choice.paths[0])}

    def keeps(self, path: str) -> bool:
        """Returns whether all the work of this module is saved."""
        return any(inside(path, kept) for kept in self.paths) or (self.products and path in self._leaves)

    def calls(self, path: str) -> bool:
        """Returns whether the attention call in this module is saved."""
        return self.attention or any(inside(path, kept) for kept in self.paths)
