"""The roles of a model's parts, as plain data: units with a path and a role.

`units.py` looks at a model and writes this; labels, plans and reports read it and never see the model. A role says what
a part does in a transformer, whatever its class is called; `ROLES` says which there are. One path may have several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..errors.text import shown
from .choice import Target

ROLES: Mapping[str, str] = {
    "layer": "one step of the residual stream, repeated; its container is a stack",
    "attention": "the projections and what is between them, self or cross",
    "core_attention": "what is between the projections: a module of its own, or a call inside the attention",
    "down_projection": "into the latents of multi-head latent attention (MLA)",
    "up_projection": "out of these latents; without a latent for the queries, their projection too",
    "mlp": "the dense feed-forward part",
    "moe": "a mixture of experts: router and experts together",
    "router": "what chooses, experts for tokens or tokens for queries",
    "experts": "the experts of a mixture",
    "shared_experts": "those that all tokens go through",
    "mixer": "several products that are neither attention nor MLP, such as a state space model",
    "norm": "a norm of the residual stream",
    "inner_norm": "any other norm in a layer: of heads, of latents, inside an MLP",
    "product": "a linear layer or convolution in a layer; with an adapter (LoRA) around it, both together",
    "activation": "an activation that is a module",
    "embedding": "before the first stack",
    "head": "after the last stack",
}
"""What a part of a model does, and what that means."""


def inside(path: str, around: str) -> bool:
    """Returns whether a module path is `around` or below it; the empty path is the model itself."""
    return not around or path == around or path.startswith(around + ".")


def relative(path: str, around: str) -> str:
    """A path below `around` as seen from there."""
    return path[len(around) + 1 :] if around else path


@dataclass(frozen=True)
class Unit:
    """One part of a model.

    Attributes:
        path: The module, as `named_modules()` names it.
        role: One of `ROLES`.
        cls: The name of the module's class.
        layer: The number of the layer it is or is in, counted in its stack; None outside of layers.
        stack: The path of the container of that layer.
        parts: Empty if the unit is the module; else the parts of `path` that it is: the paths of modules (the two
            linear layers of an MLP that a layer calls itself), or a call (`@attention`).
    """

    path: str
    role: str
    cls: str
    layer: int | None = None
    stack: str | None = None
    parts: tuple[str, ...] = ()


@shown
@dataclass(frozen=True, repr=False)
class Units:
    """The parts of one model, in the order in which the model defines them.

    Attributes:
        model: The name of the model's class.
        units: All parts.
        stacks: The paths of the containers of layers; several where there is an encoder and a decoder, or stages.
        modules: The paths of all modules that can be called, known or not.
    """

    model: str
    units: tuple[Unit, ...]
    stacks: tuple[str, ...]
    modules: tuple[str, ...]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def __str__(self) -> str:
        return self.tree()

    @property
    def layers(self) -> tuple[Unit, ...]:
        """All layers, stack by stack."""
        return self.by_role("layer")

    def by_role(self, *roles: str, within: str = "") -> tuple[Unit, ...]:
        """The units of these roles, in order; with `within`, only those at that path or below it."""
        return tuple(unit for unit in self.units if unit.role in roles and inside(unit.path, within))

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        """Finds the modules that each module calls, or could: containers that cannot be called are passed through."""
        below: dict[str, list[str]] = {path: [] for path in ("", *self.modules)}
        for path in filter(None, self.modules):
            above = path.rpartition(".")[0]
            while above not in below:
                above = above.rpartition(".")[0]
            below[above].append(path)
        return below

    def maximal(self, around: str, holding: set[str], without: set[str]) -> tuple[str, ...]:
        """The largest modules below `around` that hold one of `holding` and none of `without`."""
        found: list[str] = []
        for path in self._below[around]:
            if not any(inside(other, path) for other in holding):
                continue
            if any(inside(other, path) for other in without):
                found.extend(self.maximal(path, holding, without))
            else:
                found.append(path)
        return tuple(found)

    def tree(self, notes: Mapping[str, str] | None = None) -> str:
        """The units as indented text; consecutive layers that are made alike are shown once.

        Args:
            notes: What to write behind a module, by path; of layers shown once, the first one's.
        """
        return "\n".join([self.model, *(line.text() for line in self.lines(notes or {}))])

    def lines(self, notes: Mapping[str, str]) -> list[TreeRow]:
        """The rows of the tree."""
        lines: list[TreeRow] = []
        for path, unit, times in self._shown():
            around = [line for line in lines if inside(path, line.path)]
            above = max(around, key=lambda line: len(line.path), default=None)
            name = path if above is None else relative(path, above.path)
            depth = 0 if above is None else above.depth + 1
            roles = tuple(_said(other) for other in self.units if other.path == path)
            lines.append(TreeRow(path, name or "(model)", depth, times, roles, unit.cls, notes.get(path, "")))
        return lines

    def _shown(self) -> Iterator[tuple[str, Unit, int]]:
        """Finds the paths to show, each with its first unit and the number of layers that it represents."""
        shapes: dict[str, list[tuple[str, str, str]]] = {}
        for layer in self.layers:
            below = self.by_role(*ROLES, within=layer.path)
            shapes[layer.path] = [(relative(unit.path, layer.path), unit.role, unit.cls) for unit in below]
        times: dict[str, int] = {}
        first: Unit | None = None
        for layer in self.layers:
            if first is None or first.stack != layer.stack or shapes[first.path] != shapes[layer.path]:
                first = layer
            times[first.path] = times.get(first.path, 0) + 1
        hidden = [layer.path for layer in self.layers if layer.path not in times]
        experts = [unit.path for unit in self.by_role("experts")]
        seen: set[str] = set()
        for unit in self.units:
            below = unit.path not in experts and any(inside(unit.path, path) for path in experts)
            if unit.path in seen or below or any(inside(unit.path, path) for path in hidden):
                continue
            seen.add(unit.path)
            yield unit.path, unit, times.get(unit.path, 1)


@dataclass(frozen=True)
class TreeRow:
    """One row of the tree of a model: a module, what it is, and how many alike it stands for."""

    path: str
    name: str
    depth: int
    times: int
    roles: tuple[str, ...]
    cls: str
    note: str

    def text(self) -> str:
        """The row as text."""
        times = f" x {self.times}" if self.times > 1 else ""
        note = f"  [{self.note}]" if self.note else ""
        return f"{'  ' * (self.depth + 1)}{self.name}{times}: {', '.join(self.roles)} ({self.cls}){note}"


def _said(unit: Unit) -> str:
    role = unit.role.replace("_", " ")
    if not unit.parts:
        return role
    if Target(unit.parts[0]).calls:
        return f"{role} as a call"
    return f"{role} of {' and '.join(relative(part, unit.path) for part in unit.parts)}"
