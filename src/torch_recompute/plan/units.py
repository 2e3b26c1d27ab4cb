"""The parts of a model: `find_units(model)` names the layers, attentions, norms, MLPs, experts ... of any model.

`_fact` looks at each module by itself: is it a product with a matrix, a norm, a list, and how wide. `RoleFinder` sees
only these facts and finds roles (`roles.py`) by how they are nested, each step from what the earlier ones left over:

    experts     weights stacked by expert, or a list of alike MLPs, next to a router: a product with an output for each
    attention   the innermost module that holds the products for queries, keys and values, apart or fused; if it has no
                output projection, the module around it that has one
    stack       the container of alike modules with at least two products; if these hold a stack themselves and little
                else, they are stages, and the stack is the inner one
    mlp         of what is left in a layer, the smallest module that holds two or three products, one of which ends in
                the width that another begins with; a layer may hold them itself (`nn.TransformerEncoderLayer`)
    norm        of the residual stream, if it is inside none of the above

Names are looked at only where shape does not tell (queries from keys): words of the field, never the name of a model.
What structure cannot show, a user registers, and it comes before everything else:

    torch_recompute.register("attention", MyAttention)
    torch_recompute.register("norm", "MyScale*")

Invariants: nothing runs, nothing is changed, no value of a parameter is read, and a weight that is computed when it is
asked for (a parametrization, a property) is not asked for. What is not understood is left out, never guessed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from torch import Tensor, nn

from .. import errors
from .choice import ATTENTION, Target
from .roles import ROLES, Unit, Units

__all__ = ["Unit", "Units", "find_units", "register"]

Match = type[nn.Module] | str | Callable[[nn.Module], bool]
NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The other roles follow from these.
REGISTRABLE = ("layer", "attention", "mlp", "router", "experts", "norm", "product", "activation", "embedding")


class _Registered(NamedTuple):
    role: str
    match: Match

    def fits(self, module: nn.Module) -> bool:
        if isinstance(self.match, str):
            return any(fnmatch.fnmatchcase(name, self.match) for name in _class_names(module))
        if isinstance(self.match, type):
            return isinstance(module, self.match)
        return self.match(module)


def _class_names(module: nn.Module) -> list[str]:
    """Names a module's class and the bases: FSDP2 replaces the class of a module by a subclass of its own."""
    return [base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)]


def _is_norm(module: nn.Module) -> bool:
    named = any("norm" in name.lower() for name in _class_names(module))
    return named and not [*module.children()] and all(parameter.ndim <= 1 for parameter in module.parameters())


def _is_activation(module: nn.Module) -> bool:
    named = re.search("gelu|relu|silu|swish|activation|mish|sigmoid|tanh|softplus", type(module).__name__.lower())
    return named is not None and not [*module.children()] and not [*module.parameters()]


_BUILT_IN = (
    _Registered("attention", nn.MultiheadAttention),
    _Registered("embedding", nn.Embedding),
    _Registered("embedding", nn.EmbeddingBag),
    _Registered("norm", nn.LayerNorm),
    _Registered("norm", nn.RMSNorm),
    _Registered("norm", _is_norm),
    _Registered("activation", nn.PReLU),
    _Registered("activation", _is_activation),
    _Registered("mlp", "LayerNormMLP"),  # Transformer Engine's: a norm, two products and the activation in one
)
_registered: list[_Registered] = []


def register(role: str, match: Match) -> Callable[[], None]:
    """Teaches `find_units` what a module is.

    Args:
        role: `layer`, `attention`, `mlp`, `router`, `experts`, `norm`, `product`, `activation` or `embedding`.
        match: A class (with its subclasses), a glob over class names (`"My*Attention"`), or a function from a module
            to a bool.

    Returns:
        A function that forgets this again.

    Raises:
        ArgumentError: The role is unknown, or `match` is none of these.
    """
    if role not in REGISTRABLE:
        raise errors.ArgumentError(
            f"register: {role!r} is not a role of a module.\n  Write one of {', '.join(REGISTRABLE)}."
        )
    if (not isinstance(match, str) and not callable(match)) or isinstance(match, nn.Module):
        raise errors.ArgumentError(
            f"register: {errors.say(match)} says nothing about a module.\n"
            '  Pass a class (MyNorm), a glob over class names ("My*Norm"), or a function from a module to a bool.'
        )
    entry = _Registered(role, match)
    _registered.insert(0, entry)

    def forget() -> None:
        _registered[:] = [other for other in _registered if other is not entry]

    return forget


def find_units(model: nn.Module) -> Units:
    """Finds what the model is made of.

    Args:
        model: Any module, on any device, the meta device included.

    Returns:
        Its units, in the order in which the model defines them.

    Raises:
        ArgumentError: It is not a module.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(f"find_units(model) needs a torch.nn.Module, but got {errors.say(model)}.")
    facts = {path: _fact(module) for path, module in model.named_modules()}
    return RoleFinder(facts).units(type(model).__name__)


def _fact(module: nn.Module) -> Fact:
    role = next((entry.role for entry in (*_registered, *_BUILT_IN) if entry.fits(module)), None)
    own = list(module.parameters(recurse=False))
    return Fact(
        cls=type(module).__name__,
        role=role,
        product=product_of(module, registered=role == "product") if role in (None, "product") else None,
        container=isinstance(module, (*NOT_CALLED, nn.Sequential)),
        listed=isinstance(module, NOT_CALLED),
        called=not isinstance(module, NOT_CALLED) or type(module).forward is not nn.Module.forward,
        opaque=isinstance(module, nn.MultiheadAttention),
        heavy=any(True for _ in module.parameters()),
        stacked=tuple(parameter.shape[0] for parameter in own if parameter.ndim == 3),
        matrices=sum(parameter.ndim >= 2 for parameter in own),
    )


def product_of(module: nn.Module, *, registered: bool = False) -> Product | None:
    base = getattr(module, "base_layer", None)  # PEFT: an adapter around a layer
    if isinstance(base, nn.Module):
        return product_of(base)
    if isinstance(module, CONVOLUTIONS):
        pointwise = all(size == 1 for size in module.kernel_size)
        return Product(module.in_channels, module.out_channels, pointwise)
    if isinstance(module, nn.Linear):
        return Product(module.in_features, module.out_features, pointwise=True)
    for takes, gives in (("in_features", "out_features"), ("nx", "nf")):  # quantised layers; GPT-2's Conv1D
        widths = getattr(module, takes, None), getattr(module, gives, None)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            return Product(widths[0], widths[1], pointwise=True)
    weight = _weight(module)
    inner = [_weight(child) for child in module.modules() if child is not module]
    alone = not any(isinstance(other, Tensor) and other.ndim >= 2 for other in inner)
    named = "embed" not in type(module).__name__.lower()
    if alone and named and isinstance(weight, Tensor) and weight.ndim == 2:
        return Product(weight.shape[1], weight.shape[0], pointwise=True)
    return Product(0, 0, pointwise=True) if registered else None


def _weight(module: nn.Module) -> object:
    """A module's weight, or what one with a parametrization is made of: to ask for that one changes it."""
    made = dict(module.named_children()).get("parametrizations")
    if isinstance(made, nn.ModuleDict) and "weight" in made:
        return next(made["weight"].parameters(recurse=False), None)
    own = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    return own.get("weight", vars(module).get("weight"))


# --- words of the field in names ---


def _words(name: str) -> set[str]:
    """The words of an attribute's name: `linear_kv_up_proj`, `toQ`, `wkv_a`."""
    parts = re.split(r"[_.\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return {part[1:] if part in {"wq", "wk", "wv", "wkv", "wqkv"} else part for part in parts}


def feeds(name: str) -> set[str]:
    """The queries, keys and values that a product with this name makes."""
    found = _words(name)
    if name == "c_attn" or any("qkv" in word for word in found) or {"query", "key", "value"} <= found:
        return {"q", "k", "v"}
    long = {"query": "q", "key": "k", "value": "v"}
    letters = {long.get(word, word) for word in found}
    return (letters & {"q", "k", "v"}) | ({"k", "v"} if "kv" in letters else set())


def says_router(path: str) -> bool:
    """Returns whether a module on this path is called a router; a `gate_proj` is not one."""
    return any("router" in _words(name) or name in {"gate", "wg", "gating"} for name in path.split("."))


# --- roles from structure ---


class Product(NamedTuple):
    """A matrix product with a parameter: its widths, and whether it looks at one position at a time."""

    takes: int
    gives: int
    pointwise: bool


class Fact(NamedTuple):
    """One module by itself.

    Attributes:
        cls: The name of its class.
        role: The role that it is registered for.
        product: The product that it is, if any.
        container: Whether it is a list, a dict or a sequence of modules.
        listed: Whether it is a list or a dict, which does not call what is in it by itself.
        called: Whether it can be called.
        opaque: Whether it uses the modules inside it without calling them.
        heavy: Whether there are parameters in it.
        stacked: The first dimension of each of its own parameters that has three.
        matrices: How many of its own parameters have two dimensions or more.
    """

    cls: str
    role: str | None
    product: Product | None
    container: bool
    listed: bool
    called: bool
    opaque: bool
    heavy: bool
    stacked: tuple[int, ...]
    matrices: int


def _up(path: str) -> str:
    return path.rpartition(".")[0]


def _is_mlp(products: Iterable[Product]) -> bool:
    """Two or three products that go out of a width and come back to it; a fused gate doubles the width between."""
    several = list(products)
    if not 2 <= len(several) <= 3 or not all(product.pointwise for product in several):
        return False
    pairs = itertools.permutations(several, 2)
    return any(up.takes == down.gives and up.gives in (down.takes, 2 * down.takes) for up, down in pairs)


class RoleFinder:
    """Finds the roles of modules from facts about them; each step fills a dict with the paths that it found."""

    def __init__(self, facts: dict[str, Fact]) -> None:
        self.facts = facts
        self.order = list(facts)
        self.position = {path: number for number, path in enumerate(self.order)}
        self.children: dict[str, list[str]] = {path: [] for path in facts}
        self.end = {path: number + 1 for path, number in self.position.items()}
        for path in reversed(self.order[1:]):
            above = _up(path)
            self.children[above].insert(0, path)
            self.end[above] = max(self.end[above], self.end[path])
        self.opaque = {path for path, fact in facts.items() if fact.opaque}
        self.products: dict[str, Product] = {}
        self.moes: dict[str, tuple[str, str]] = {}  # block -> experts, router
        self.lone: set[str] = set()  # experts without a router
        self.attentions: dict[str, str] = {}  # attention -> the module in which the call is
        self.stacks: dict[str, list[tuple[str, int]]] = {}  # container -> layers with their numbers
        self.found: list[Unit] = []
        for path, fact in facts.items():
            if fact.product is not None and not self.under(path, self.products, self.opaque):
                self.products[path] = fact.product

    def under(self, path: str, *others: Collection[str]) -> bool:
        """Returns whether the path is one of the others or below one."""
        while path and not any(path in one for one in others):
            path = _up(path)
        return any(path in one for one in others)

    def child(self, block: str, path: str) -> str:
        """The child of a module that the path is or is below."""
        while _up(path) != block:
            path = _up(path)
        return path

    @property
    def experts(self) -> set[str]:
        """The experts that have a router, as far as they are found."""
        return {experts for experts, _ in self.moes.values()}

    def within(self, path: str, others: Collection[str], *without: Collection[str]) -> list[str]:
        """Returns the paths that are this path or below it, in order, and not one of some modules or below one."""
        found = [other for other in self.order[self.position[path] : self.end[path]] if other in others]
        return [other for other in found if not self.under(other, *without)] if without else found

    def registered(self, role: str, path: str = "") -> list[str]:
        """The modules at a path or below it that are registered for a role."""
        return [other for other in self.within(path, self.facts) if self.facts[other].role == role]

    def units(self, model: str) -> Units:
        """Finds the units, in the model's order."""
        self._find_experts()
        self._find_attentions()
        self._find_stacks("", self.stacks)
        known = {layer for layers in self.stacks.values() for layer, _ in layers}
        for path in self.registered("layer"):
            if path not in known:
                layers = self.stacks.setdefault(_up(path), [])
                layers.append((path, len(layers)))
        layers = [(path, number, stack) for stack, paths in self.stacks.items() for path, number in paths]
        if not layers and 0 < len(self.attentions) <= 2 and self._is_layer("") and "" not in self.attentions:
            layers = [(self._innermost_layer(), 0, None)]
        for path, number, stack in layers:
            self._read_layer(path, number, stack)
        self._read_rest({path for path, _, _ in layers})
        ranks = {role: number for number, role in enumerate(ROLES)}
        found = sorted(dict.fromkeys(self.found), key=lambda unit: (self.position[unit.path], ranks[unit.role]))
        callable_ = tuple(path for path, fact in self.facts.items() if fact.called)
        return Units(model, tuple(found), tuple(self.stacks), callable_)

    def _innermost_layer(self) -> str:
        """Returns the smallest layer: the model, or a module in it with all attentions and an MLP besides."""

        def whole(path: str) -> bool:
            attentions, beside = self.within(path, self.attentions), self.within(path, self.products, self.attentions)
            return self._is_layer(path) and len(attentions) == len(self.attentions) and len(beside) >= 2

        path, inner = "", [""]
        while inner:
            path = inner[0]
            inner = [*filter(whole, self.children[path])]
        return path

    # --- experts ---

    def _find_experts(self) -> None:
        for path in self.order[1:]:
            if self.under(path, self.products, self.lone, self.experts):
                continue
            count = self._experts_in(path)
            found = self._router(path, count) if count else None
            if found is not None:
                block, router = found
                self.moes[block] = self.child(block, path), router
            elif count and self._says_experts(path):
                self.lone.add(path)

    def _says_experts(self, path: str) -> bool:
        name = path.rpartition(".")[2].lower() + self.facts[path].cls.lower()
        return self.facts[path].role == "experts" or ("expert" in name and "shared" not in name)

    def _experts_in(self, path: str) -> int:
        """Counts the experts that a module may be; 0 if it cannot be the experts of a mixture."""
        fact, below = self.facts[path], [child for child in self.children[path] if self.facts[child].heavy]
        if fact.role == "experts":
            return max(*fact.stacked, len(below), 1, 1)
        if fact.listed:
            alike = len(below) >= 2 and len({self.facts[child].cls for child in below}) == 1
            return len(below) if alike and all(map(self._looks_like_mlp, below)) else 0
        alike = len(set(fact.stacked)) == 1 or (fact.stacked and self._says_experts(path))
        return max(fact.stacked) if alike and fact.product is None else 0

    def _looks_like_mlp(self, path: str) -> bool:
        return path not in self.products and _is_mlp(self.products[inner] for inner in self.within(path, self.products))

    def _router(self, experts: str, count: int) -> tuple[str, str] | None:
        """The smallest module around the experts that has a router beside them, and that router."""
        block = experts
        while block:
            block = _up(block)
            beside = [p for p in self.within(block, self.products, {experts}) if "shared" not in p]
            named = [p for p in beside if says_router(p[len(block) :])]
            sized = [p for p in beside if self.products[p].gives == count]
            both = [p for p in sized if p in named]
            likely = both or (sized or named if self._says_experts(experts) else [])
            routers = self.registered("router", block) or likely
            if routers:
                return block, self.child(block, routers[0])
            if block and self.facts[_up(block)].container:
                return None  # that was a layer
        return None

    # --- attention ---

    def _find_attentions(self) -> None:
        taken = {path for pair in self.moes.values() for path in pair} | self.lone
        self.attentions.update({path: path for path in self.registered("attention")})
        free = [p for p, fact in self.facts.items() if fact.role is None and not self.under(p, self.products, taken)]
        for path in free:
            if not self.under(path, self.attentions):
                self._try_attention(path)
        for path in free:
            direct = any(child in self.products for child in self.children[path])
            near = self.within(path, self.attentions) or self.under(path, self.attentions)
            if direct and not near and re.search("Attention|Attn", self.facts[path].cls):
                self.attentions[path] = path

    def _try_attention(self, path: str) -> None:
        alone = [child for child in self.children[path] if len(self.within(child, self.products)) == 1]
        makes = [feeds(child.rpartition(".")[2]) for child in alone]
        if set[str]().union(*makes) != {"q", "k", "v"}:
            return
        above = _up(path)
        projected = path and all(makes) and len(self.within(above, self.products, {path})) == 1
        inside_layer = not (above and self.facts[_up(above)].container)
        self.attentions[above if projected and inside_layer else path] = path

    # --- stacks ---

    def _weight(self, path: str) -> int:
        """Counts the products in a module; experts count as two, and so does an opaque module."""
        twice = self.opaque | self.experts
        return len(self.within(path, self.products)) + 2 * len(self.within(path, twice))

    def _is_layer(self, path: str) -> bool:
        fact = self.facts[path]
        if fact.role is not None or self.registered("layer", path):
            return fact.role == "layer"
        return fact.called and path not in self.products and self._weight(path) >= 2

    def _find_stacks(self, path: str, stacks: dict[str, list[tuple[str, int]]]) -> None:
        if self.under(path, self.products, self.attentions, self.moes, self.lone):
            return
        inner: dict[str, list[tuple[str, int]]] = {}
        for child in self.children[path]:
            self._find_stacks(child, inner)
        layers = [(child, n) for n, child in enumerate(self.children[path]) if self.facts[child].heavy]
        alike = self.facts[path].container and self._alike([child for child, _ in layers])
        if alike and not any(self._is_stage(child, inner) for child, _ in layers):
            stacks[path] = layers
        else:
            stacks.update(inner)

    def _alike(self, paths: list[str]) -> bool:
        kinds = {self.facts[path].cls for path in paths}
        last = {(re.findall("[A-Z][a-z0-9]*", kind) or [kind])[-1] for kind in kinds}
        return bool(paths) and len(last) == 1 and all(self._is_layer(path) for path in paths)

    def _is_stage(self, path: str, stacks: dict[str, list[tuple[str, int]]]) -> bool:
        mine = self.within(path, stacks)
        found = self.within(path, self.attentions)
        apart = [attention for attention in found if not self.under(_up(attention), mine) or _up(attention) in mine]
        return bool(mine) and not apart and 2 * sum(map(self._weight, mine)) >= self._weight(path)

    # --- what is in a layer ---

    def _read_layer(self, path: str, number: int, stack: str | None) -> None:
        start = len(self.found)
        self._add(path, "layer")
        zones = self._read_attentions(path) | self._read_moes(path)
        apart = zones | self.attentions.keys()
        left = self.within(path, self.products, apart)
        mlps = self.within(path, self.registered("mlp", path), zones)
        groups = dict.fromkeys(mlps, "mlp") | self._groups(path, self.within(path, left, mlps))
        for group, role in groups.items():
            self._add(group, role)
        zones |= groups.keys()
        spread = tuple(product for product in self.within(path, left, groups) if self.products[product].pointwise)
        alone = not self.within(path, self.moes) and "mlp" not in groups.values()
        if alone and _is_mlp(self.products[product] for product in spread):
            self._add(path, "mlp", spread)
        for product in left:
            self._add(product, "product")
        for module in self.within(path, self.facts):
            role = self.facts[module].role
            if role == "norm":
                self._add(module, "inner_norm" if self.under(module, zones) else "norm")
            elif role == "activation":
                self._add(module, "activation")
            elif re.search("Router|Indexer", self.facts[module].cls):  # whatever it chooses, choose once
                self._add(module, "router")
        self.found[start:] = [dataclasses.replace(unit, layer=number, stack=stack) for unit in self.found[start:]]

    def _groups(self, path: str, products: list[str]) -> dict[str, str]:
        """The smallest modules below the path that hold several of these products together."""
        found: dict[str, str] = {}
        for child in self.children[path]:
            mine = set(self.within(child, set(products)))
            if len(mine) < 2:
                continue
            deeper = self._groups(child, products)
            parts = [p for p in self.within(child, self.attentions) if p != child] + self.within(child, self.moes)
            whole = not parts and self.facts[child].called
            if whole and any(set(self.within(group, mine)) == mine for group in deeper):
                found |= deeper
            elif whole and _is_mlp(map(self.products.__getitem__, mine)) and not self.facts[child].matrices:
                found[child] = "mlp"
            elif whole and "mlp" not in deeper.values():
                found[child] = "mixer"
            else:
                found |= deeper
        return found

    def _read_attentions(self, path: str) -> set[str]:
        zones: set[str] = set()
        for attention in self.within(path, self.attentions):
            inner = self.attentions[attention]
            zones.add(inner)
            self._add(attention, "attention")
            bare = [p for p in self.within(inner, self.facts) if p != inner and not self.facts[p].heavy]
            cores = [p for p in bare if re.search("Attention|Attn|SDPA", self.facts[p].cls)]
            self._add(cores[0] if cores else inner, "core_attention", () if cores else (Target.of("", ATTENTION),))
            names = {p: _words(p.rpartition(".")[2]) for p in self.within(attention, self.products)}
            down = {p for p, name in names.items() if name & {"a", "down"} and name & {"q", "kv", "qkv"}}
            up = {p for p, name in names.items() if name & {"b", "up"} and name & {"q", "kv"}}
            if down and up:
                up |= {p for p, name in names.items() if "q" in name and p not in down}
            for product in names:
                role = "down_projection" if product in down else "up_projection" if product in up else "product"
                self._add(product, role if down and up else "product")
        return zones

    def _read_moes(self, path: str) -> set[str]:
        zones = set(self.within(path, self.lone))
        for experts in zones:
            self._add(experts, "experts")
        for block in self.within(path, self.moes):
            experts, router = self.moes[block]
            spread = (router, experts) if block == path or not self.facts[block].called else ()
            self._add(block if self.facts[block].called else path, "moe", spread)
            self._add(router, "router")
            self._add(experts, "experts")
            zones |= {experts, router}
            if spread:
                continue
            zones.add(block)
            apart = self.within(block, self.products, {experts, router})
            for shared in self._groups(block, apart):
                self._add(shared, "shared_experts")
            for product in apart + self.within(experts, self.products):
                self._add(product, "product")
        return zones

    # --- what is outside ---

    def _read_rest(self, layers: set[str]) -> None:
        rest = self.within("", self.facts, layers)
        embeddings: set[str] = set()
        heads: set[str] = set()
        last = max((self.end[stack] for stack in self.stacks), default=len(self.order))
        for path in rest:
            fact = self.facts[path]
            if fact.role == "norm":
                self._add(path, "norm")
            outermost = not self.under(path, embeddings | heads) and fact.called and path
            if not outermost or not fact.heavy or any(self.within(path, found) for found in (layers, self.stacks)):
                continue
            if fact.role == "embedding" or "Embed" in fact.cls:
                embeddings.add(path)
                self._add(path, "embedding")
            elif self.position[path] >= last and self.within(path, self.products):
                heads.add(path)
                self._add(path, "head")
        if not layers:
            self._read_attentions("")
            self._read_moes("")
            return
        for path in [p for p in rest if p in self.attentions]:
            self._read_attentions(path)

    def _add(self, path: str, role: str, parts: tuple[str, ...] = ()) -> None:
        self.found.append(Unit(path, role, self.facts[path].cls, parts=parts))
