"""One region as plain data: `Choice`, and `Target`, the words in it.

A choice names modules by their paths, as `named_modules()` does; `layers.0.attn@scores` are the calls that the model's
author named "scores", made while that module runs. Inside a region, `keep` names what is not repeated: modules by their
paths relative to the region, or all calls of a kind, in the whole region (`@product`) or in one module of it
(`mlp.up_proj@product`). `KINDS` lists the kinds.

Where a region's inputs are kept until the replay is a word, too: "host" is host memory, "sharded" one part on each rank
of a group, and any other word is a key of the stores given to `apply`. A `Target` is the string that a person writes;
nothing else in the package takes it apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..errors.text import grouped, listed

PRODUCT, DOWN, MATMUL, ATTENTION, VALUES_UNUSED = "product", "down", "matmul", "attention", "values_unused"
REDUCTION, COLLECTIVE = "reduction", "collective"
KINDS: Mapping[str, tuple[str, str]] = {
    ATTENTION: ("attention", "scaled dot product attention, and flex attention"),
    PRODUCT: ("matmuls", "products with a parameter: linear layers, convolutions, stacked experts"),
    DOWN: ("down-projections", "products with a matrix whose output is smaller than their input, as an MLP's last one"),
    MATMUL: ("matmuls without parameters", "such as attention scores written by hand"),
    VALUES_UNUSED: (
        "",
        "products whose values nothing that is rebuilt needs, such as the last one in front of a dropout that ends a "
        "region: neither kept nor repeated (shape-only tensors)",
    ),
    REDUCTION: (
        "reductions",
        "collectives, DTensor's among them, whose result is no larger than what goes in: all-reduce, reduce-scatter, "
        "all-to-all, broadcast",
    ),
    COLLECTIVE: ("collectives", "reductions, and all-gather"),
}
"""The kinds of calls that a region may keep: what is kept, in a word, and what they are."""
RECOMPUTED = "recomputed"
SHORT = f"{RECOMPUTED} when memory is short"
_WHERE = {"host": "in host memory", "sharded": "sharded over ranks"}


class Target(str):
    """A module by its path, or calls in it: `mlp.up_proj`, `mlp.up_proj@product`, `@attention`, `attn@scores`."""

    __slots__ = ()

    @staticmethod
    def of(module: str = "", calls: str = "") -> Target:
        """The target of some calls in a module; of the module itself without calls."""
        return Target(f"{module}@{calls}" if calls else module)

    @property
    def module(self) -> str:
        """The module's path; empty for the region or the model itself."""
        return self.partition("@")[0]

    @property
    def calls(self) -> str:
        """The kind of the calls, or the name their author gave them; empty where the module is meant."""
        return self.partition("@")[2]


def joined(path: str, below: str) -> str:
    """The path of a module below another."""
    return f"{path}.{below}".strip(".")


@dataclass(frozen=True)
class Choice:
    """One region.

    Attributes:
        paths: The module, or several that the model calls one after the other and that are recomputed together; or
            named calls in one.
        keep: Calls inside that are not repeated. Several modules take kinds of calls only, no modules to keep whole.
        carry: Whether decisions inside (`topk`, `argmax`, sizes read from the device) are carried from forward to the
            replay and not made again; for whatever routes tokens.
        labels: The words that asked for it.
        store: The store that keeps the region's inputs: "" for where they are, "host", "sharded", or another word for
            a store that `apply` is given.
        nested: Of several modules: whether each is a region of its own in the replay of them all. Then one of them at
            a time is whole, and of the others only the inputs, for which all but the last run once more.
        offload: Whether nothing is recomputed: what the module, or calls in it, save for backward is in the store.
        elastic: Whether the region keeps its activations while memory lasts, and is recomputed where it does not.
        tiles: How many tiles of tokens the module is called in, each a region of its own, at most one per token; 0 for
            all tokens at once. Gradients are then those without the plan up to the order of sums.
        with_loss: Of a module in tiles: whether it is the model's head, whose loss is made tile by tile too.
    """

    paths: tuple[str, ...]
    keep: tuple[str, ...] = ()
    carry: bool = False
    labels: tuple[str, ...] = ()
    store: str = ""
    nested: bool = False
    offload: bool = False
    elastic: bool = False
    tiles: int = 0
    with_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("paths", "keep", "labels"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise errors.ArgumentError(
                    f"Choice({name}={given!r}) takes several strings, in a tuple.\n  Write {name}=({str(given)!r},)"
                )
        object.__setattr__(self, "paths", tuple(map(Target, self.paths)))
        object.__setattr__(self, "keep", tuple(map(Target, self.keep)))
        if self.offload and not self.store:
            object.__setattr__(self, "store", "host")

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules."""
        return tuple(Target(path).module for path in self.paths)

    @property
    def kept(self) -> tuple[Target, ...]:
        """`keep`, as targets."""
        return tuple(map(Target, self.keep))

    def __str__(self) -> str:
        asked = f"  ({' '.join(self.labels)})" if self.labels else ""
        if self.offload:
            return f"offload {', '.join(self.paths) or 'the model'}: what it saves {stored_in(self.store)}{asked}"
        where = self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} to {self.paths[-1]}"
        again = ", then each again" if self.nested else ""
        kept = f", {kept_in_words(self.kept)}" if self.keep else ""
        carried = ", decisions carried" if self.carry else ""
        stored = f", inputs {stored_in(self.store)}" if self.store else ""
        tiled = f"{' with its loss' if self.with_loss else ''} in {self.tiles} tiles of tokens" if self.tiles else ""
        what = f"{where or 'the model'} {SHORT}" if self.elastic else f"recompute {where or 'the model'}"
        return f"{what}{tiled}{again}{kept}{carried}{stored}{asked}"


def kept_in_words(targets: Sequence[Target]) -> str:
    """Says what a region does not run again: `attention and matmuls in up kept, down not rerun`."""
    by_kind = grouped(targets, lambda target: target.calls)
    unused = [target.module or "matmuls that only feed a dropout" for target in by_kind.pop(VALUES_UNUSED, [])]
    kept: list[str] = []
    for calls, same in sorted(by_kind.items(), key=lambda kind: (kind[0] != "", any(one.module for one in kind[1]))):
        word = KINDS[calls][0] if calls else ""
        modules = listed([target.module for target in same if target.module])
        kept.append(" in ".join(filter(None, [word, modules])))
    said = [f"{listed(kept)} kept"] * bool(kept) + [f"{listed(unused)} not rerun"] * bool(unused)
    return ", ".join(said)


_NEWER = ("elastic", "tiles", "with_loss", "tiled", "switched")


def written(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a dataclass as a JSON object, for `dataclasses.asdict`; newer ones where they say something."""
    return {name: value for name, value in fields if value or name not in _NEWER}


def stored_in(word: str) -> str:
    """The place of a store, in words."""
    return _WHERE.get(word, f"in {word!r}")
