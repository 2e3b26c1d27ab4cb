"""Layers with fused kernels, as Megatron-Core and Liger have them: what each kernel keeps for backward, and no more.

A layer of transformers is written in single operations, of which autograd keeps what each needs. A trainer for large
models runs a part of a layer as one kernel, which keeps what its own backward reads. `SAVED` says what that is, kernel
by kernel; it is the only place that does. `fuse` gives the known parts of a model a forward of products, attention and
these kernels. The parts keep their paths, so all labels, regions, ranks and collectives are as they were.

    norm             RMSNorm: what it is given, its weights, a scale for each row
    rotary           of queries and keys: the positions alone, since a rotation is undone by the opposite one
    attention        flash attention: queries, keys and values, each by itself, its result, a log-sum-exp for each row,
                     a seed
    activation       SwiGLU and the like: gate and up, as the products have made them
    router           logits and scores in 32 bits, and of each choice its weight and its expert
    permutation      tokens in the order of their experts, and back: where each row has come from
    weighting        the router's weights times what experts return: both
    product          its input, with `fp8` in 8 bits, and its weights; grouped by experts also where each one's rows end
    residual         nothing: a sum needs nothing of what it adds

Sources: Transformer Engine (its LayerNormLinear, fused router and permutation), Megatron-Core (its fused SwiGLU and
rope, and the queries, keys and values of its MLA), Liger's RMSNorm, rope and SwiGLU. Where they differ, the fewest
bytes are taken: queries, keys and values of Megatron may share one tensor, of which the values keep all; they are
counted by themselves, as after Liger's products. With `efficient-permutation` experts are given the router's weights
with the activation, before their last product, as newer Megatron-Core does: its result is freed.

A kernel is one operation that reads and writes so many bytes, which is what a data sheet prices; there is nothing in it
to compute. Rejected: to run Megatron's or Liger's own modules, which need a CUDA device; a formula per layer, which
would have no peak, no region and no rank.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .. import errors
from ..errors.text import counted, listed
from ..plan.calls import declare_product
from ..plan.roles import Unit, Units, relative
from ..plan.units import find_units, product_of

SAVED: Mapping[str, tuple[str, ...]] = {
    "norm": ("input", "weight", "scale"),
    "rotary": ("positions",),
    "activation": ("gate", "up", "input", "bias", "weights"),
    "router": ("logits", "scores", "weights", "experts"),
    "permutation": ("order",),
    "weighting": ("input", "weights", "order"),
    "unpermutation": ("order",),
    "layout": (),
    "cast": (),
}
"""What autograd keeps of each kernel, by the names of what it reads and makes. A name that a call has not is none."""
FP8, EFFICIENT = "fp8", "efficient-permutation"
OPTIONS = (FP8, EFFICIENT)
_LAST = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")  # of stacked experts in transformers
_COPY, _8_BITS = "_in_8_bits", torch.float8_e4m3fn
_POSITIONS = ("cos", "sin", "freq", "pos", "emb")


# --- kernels ----------------------------------------------------------------------------------------------------------

_library = torch.library.Library("torch_recompute", "DEF")
_library.define("kernel(Tensor[] reads, int[] sizes, int[] strides, int[] dims, int[] dtypes) -> Tensor[]")
_DTYPES = [*dict.fromkeys(kind for kind in vars(torch).values() if isinstance(kind, torch.dtype))]
"""Types by number: torch 2.11 gives a list of types to Python as numbers of its own."""


def _allocated(
    reads: list[torch.Tensor], sizes: list[int], strides: list[int], dims: list[int], dtypes: list[int]
) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(dims, initial=0))
    places = [slice(*pair) for pair in itertools.pairwise(ends)]
    like = reads[0]
    return [
        torch.empty_strided(sizes[at], strides[at], dtype=_DTYPES[dtype], device=like.device)
        for at, dtype in zip(places, dtypes, strict=True)
    ]


_library.define("moves(Tensor(a!)[] tensors) -> ()")
_library.impl("moves", lambda tensors: None, "CompositeExplicitAutograd")
_library.impl("kernel", _allocated, "CompositeExplicitAutograd")
KERNEL: Any = torch.ops.torch_recompute.kernel.default
"""A fused kernel, as an operation."""


def run_copy_kernel(given: Sequence[Any]) -> None:
    """Runs a kernel that reads or writes each of some tensors, and makes none."""
    tensors = list({id(x): x for x in given if isinstance(x, torch.Tensor)}.values())
    if tensors:
        torch.ops.torch_recompute.moves.default(tensors)


class Dense(NamedTuple):
    """A tensor that a kernel makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> Dense:
        """A dense tensor whose dimensions lie in the order of another's."""
        order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
        stride, step = [0] * x.dim(), 1
        for dim in reversed(order):
            stride[dim], step = step, step * x.shape[dim]
        return Dense(tuple(x.shape), tuple(stride), dtype or x.dtype)

    @staticmethod
    def of(*shape: int, dtype: torch.dtype) -> Dense:
        """A contiguous tensor."""
        steps = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
        return Dense(shape, tuple(reversed([*steps])), dtype)


def _run(reads: Sequence[torch.Tensor], makes: Sequence[Dense]) -> list[torch.Tensor]:
    sizes, strides = [n for one in makes for n in one.shape], [n for one in makes for n in one.stride]
    dims, dtypes = [len(one.shape) for one in makes], [_DTYPES.index(one.dtype) for one in makes]
    return KERNEL(list(reads), sizes, strides, dims, dtypes)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, given: tuple[str, ...], made: tuple[str, ...], makes: tuple[Dense, ...], *tensors: Any
    ) -> Any:
        results = _run(tensors, makes)
        known = [*zip(given, tensors, strict=True), *zip(made, results, strict=True)]
        ctx.save_for_backward(*(tensor for word, tensor in known if word.lstrip("_") in SAVED[name]))
        ctx.layouts = [Dense.like(x) for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(x for word, x in zip(made, results, strict=True) if not word.startswith("_"))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        reads = [*(grad for grad in grads if grad is not None), *ctx.saved_tensors]
        found = iter(_run(reads, [ctx.layouts[place] for place in wanted]))
        return None, None, None, None, *(next(found) if n in wanted else None for n in range(len(ctx.layouts)))


Given = Sequence[tuple[str, torch.Tensor | None]]


def kernel(name: str, given: Given, makes: Mapping[str, Dense]) -> Any:
    """Runs a kernel.

    Args:
        name: One of `SAVED`.
        given: What it reads, each with a name; None is not there.
        makes: What it makes, by name. What a name with an underscore in front says is not returned.

    Returns:
        The results, one alone by itself.
    """
    words, tensors = zip(*((word, x) for word, x in given if x is not None), strict=True)
    made: Any = _Kernel.apply(name, words, tuple(makes), tuple(makes.values()), *tensors)
    return made[0] if len(made) == 1 else made


def in_8_bits(x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """The copy of a product's input in 8 bits, which all products that read this input share.

    Args:
        x: The input.
        own: Gives the part of it that is copied.
    """
    known = getattr(x, _COPY, None)
    found: torch.Tensor | None = None if known is None else known()
    if found is None:
        with torch.no_grad():
            part = own(x)
            found = cast("torch.Tensor", kernel("cast", [("input", part)], {"output": Dense.like(part, _8_BITS)}))
        setattr(x, _COPY, weakref.ref(found))  # where no graph keeps it, it is not kept
    return found


def out_of_8_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An input again as it is multiplied."""
    return x if x.dtype is dtype else kernel("cast", [("input", x)], {"output": Dense.like(x, dtype)})


class _ProductOfCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, bias: Any, ends: Any) -> Any:
        ctx.save_for_backward(kept, weight, ends)
        ctx.dtype, ctx.bias = x.dtype, bias is not None
        return F.linear(x, weight, bias) if ends is None else F.grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, weight, ends = ctx.saved_tensors
        grad = grads[0]
        full, flat = out_of_8_bits(kept, ctx.dtype).flatten(0, -2), grad.flatten(0, -2)
        if ends is None:
            return grad @ weight, None, flat.t() @ full, flat.sum(0) if ctx.bias else None, None
        of_x = F.grouped_mm(grad, weight.transpose(-2, -1), offs=ends)
        return of_x, None, F.grouped_mm(full.t(), flat, offs=ends), None, None


def product_in_8_bits(
    x: torch.Tensor,
    kept: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """A product that keeps a copy of its input; with `ends` one that is grouped by experts, whose rows end there."""
    if has_torch_function((x, weight)):
        return handle_torch_function(product_in_8_bits, (x, weight), x, kept, weight, bias, ends)
    return _ProductOfCopy.apply(x, kept, weight, bias, ends)  # pyright: ignore[reportReturnType]


declare_product(product_in_8_bits)


# --- parts of a layer, as forwards of their modules -------------------------------------------------------------------


@functools.cache
def _norm(weight: str, bias: str) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        weights = [getattr(self, name) for name in (weight, bias) if name]
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in weights), x.dtype)
        rows = Dense.of(x.numel() // x.shape[-1], dtype=torch.float32)
        given = [("input", x), *(("weight", one) for one in weights)]
        return kernel("norm", given, {"output": Dense.like(x, dtype), "_scale": rows})

    return forward


@functools.cache
def _mlp(first: tuple[str, ...], last: str, halved: bool, dropout: str) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = [self.get_submodule(path)(hidden_states) for path in first]
        inner = activated(list(zip(("gate", "up") if len(wide) > 1 else ("input",), wide, strict=True)), halved)
        del wide
        out = self.get_submodule(last)(inner)
        return self.get_submodule(dropout)(out) if dropout else out

    return forward


def activated(given: Given, halved: bool) -> torch.Tensor:
    """The activation of what the first products of an MLP have made; `halved` where gate and up are one tensor."""
    like = given[0][1]
    assert like is not None
    width = like.shape[-1] // (2 if halved else 1)
    return kernel("activation", given, {"output": Dense.of(*like.shape[:-1], width, dtype=like.dtype)})


class _Flash:
    """Stands for `ALL_ATTENTION_FUNCTIONS` of transformers: whatever is asked for, it is flash attention."""

    @staticmethod
    def get_interface(*_: Any) -> Callable[..., Any]:
        return _flash_attention

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _flash_attention


def _flash_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (_by_itself(x) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=bool(causal) and q.shape[2] > 1, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _by_itself(x: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values (batch, heads, tokens, d) in memory of their own, in which tokens come before heads."""
    batch, heads, tokens, d = x.shape
    if x.untyped_storage().nbytes() <= x.numel() * x.element_size() and (heads == 1 or x.stride(1) < x.stride(2)):
        return x
    by_tokens = Dense((batch, heads, tokens, d), (tokens * heads * d, d, heads * d, 1), x.dtype)
    return kernel("layout", [("input", x)], {"output": by_tokens})


def _rotated(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """A rotation of queries and keys as one kernel; None where it is not known which arguments are positions."""
    signature = inspect.signature(own)
    names = list(signature.parameters)
    first = next((n for n, name in enumerate(names) if any(word in name for word in _POSITIONS)), 0)
    if not first:
        return None

    def rotate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        turned = [bound[name] for name in names[:first]]
        positions = [bound[name] for name in names[first:] if isinstance(bound.get(name), torch.Tensor)]
        given = [*(("turned", x) for x in turned), *(("positions", x) for x in positions)]
        return kernel("rotary", given, {f"output {n}": Dense.like(x) for n, x in enumerate(turned)})

    return rotate


@functools.cache
def _attention(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The forward of an attention of transformers with other functions; None for one that does not call them."""
    own = inspect.unwrap(kind.forward)
    if not isinstance(own, types.FunctionType) or "ALL_ATTENTION_FUNCTIONS" not in own.__code__.co_names:
        return None
    names: dict[str, Any] = {**own.__globals__, "ALL_ATTENTION_FUNCTIONS": _Flash()}
    for name in own.__code__.co_names:
        if "rotary" in name and isinstance(names.get(name), types.FunctionType):
            names[name] = _rotated(names[name]) or names[name]
    made = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


@functools.cache
def _router(chosen: int, dtype: torch.dtype, bias: bool) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        x = hidden_states.reshape(-1, self.weight.shape[1])
        logits = F.linear(x, self.weight, self.bias if bias else None)
        with torch.no_grad():
            experts = logits.topk(chosen, -1).indices
        wide = Dense.of(*logits.shape, dtype=torch.float32)
        makes = {"_logits": wide, "_scores": wide, "weights": Dense.of(*experts.shape, dtype=dtype)}
        weights = kernel("router", [("narrow", logits), ("experts", experts)], makes)
        return logits, weights, experts

    return forward


@functools.cache
def _experts(
    first: str, transposed: bool, halved: bool, biased: bool, options: tuple[str, ...]
) -> Callable[..., torch.Tensor]:
    """The forward of stacked experts: (tokens, width), of each token the experts and their weights."""
    early = EFFICIENT in options

    def product(self: Any, x: torch.Tensor, name: str, offsets: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        weight = weight if transposed else weight.transpose(-2, -1)
        if FP8 in options:
            return product_in_8_bits(x, in_8_bits(x), weight, ends=offsets)
        return F.grouped_mm(x, weight, offs=offsets)

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x, rows = hidden_states, top_k_index.numel()
        bias = [getattr(self, f"{name}_bias") if biased else None for name in (first, _LAST)]
        count = getattr(self, first).shape[0]
        offsets = torch.arange(1, count + 1, dtype=torch.int32, device=x.device) * (rows // count)
        order = torch.arange(rows, dtype=torch.int32, device=x.device)
        sorted_ = Dense.of(rows, x.shape[-1], dtype=x.dtype)
        dispatched = kernel("permutation", [("input", x), ("order", order)], {"output": sorted_})
        wide = product(self, dispatched, first, offsets)
        del dispatched
        given = [("input", wide), ("bias", bias[0]), ("weights", top_k_weights if early else None)]
        del wide
        returned = product(self, activated(given, halved), _LAST, offsets)
        del given
        given = [("input", returned), ("bias", bias[1]), ("order", order)]
        weights = [] if early else [("weights", top_k_weights)]
        makes = {"output": Dense.of(*x.shape, dtype=x.dtype)}
        return kernel("unpermutation" if early else "weighting", [*given, *weights], makes)

    return forward


# --- which parts of a model are known ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedLayers:
    """The parts of a model that have fused kernels, and those that run as they are written.

    Attributes:
        options: Of `OPTIONS`, those that were asked for.
        fused: The classes of parts with fused kernels, and how many of each there are.
        eager: The same of parts that no kernel is known of, which run as they are written; and why.
    """

    options: tuple[str, ...]
    fused: Mapping[str, int]
    eager: Mapping[tuple[str, str], int]

    def as_data(self) -> dict[str, Any]:
        """The parts as plain data."""
        eager = [{"class": name, "count": count, "why": why} for (name, why), count in self.eager.items()]
        return {"run": "fused", "options": list(self.options), "fused": dict(self.fused), "eager": eager}

    def __str__(self) -> str:
        named = "".join(f", {option}" for option in self.options)
        return f"fused{named} ({listed([f'{count} {name}' for name, count in self.fused.items()])})"

    @property
    def notes(self) -> list[str]:
        """A sentence on each kind of parts that run as they are written."""
        return [
            f"{count} {name} run as they are written, not fused: {why}. Their bytes and seconds are those of single "
            "operations."
            for (name, why), count in self.eager.items()
        ]


def fuse(model: nn.Module, options: Sequence[str] = (), what: str = "--layers fused") -> FusedLayers:
    """Gives the known parts of a model forwards with fused kernels, in place: their classes get another `forward`.

    Args:
        model: The model. What it computes means nothing afterwards: it is for simulation alone.
        options: Some of `OPTIONS`.
        what: What asked for it, for the text of an error.

    Raises:
        ArgumentError: No part of any layer is known.
    """
    units = find_units(model)
    fused: Counter[str] = Counter()
    eager: Counter[tuple[str, str]] = Counter()
    work = 0
    for unit in units.by_role(*_WAYS):
        find, why = _WAYS[unit.role]
        module = model.get_submodule(unit.path)
        forward = None if unit.parts else find(_KnownPart(module, unit, units, tuple(options)))
        if forward is None:
            eager[unit.cls, why] += 1
            continue
        if unit.role in _PARTS:
            fused[unit.cls] += 1
            work += "norm" not in unit.role
        if forward is not type(module).forward:
            module.__class__ = class_with(type(module), forward)
    if not work:
        layers = counted(len(units.layers), "layer")
        seen = f": {listed([f'{count} {name} ({why})' for (name, why), count in eager.items()])}" if eager else ""
        raise errors.ArgumentError(
            f"{what}: no fused kernel is known for what the {layers} of {type(model).__name__} are made of{seen}. "
            "Leave it out."
        )
    return FusedLayers(tuple(options), dict(fused), dict(eager))


class _KnownPart(NamedTuple):
    module: nn.Module
    unit: Unit
    units: Units
    options: tuple[str, ...]

    @property
    def takes_one(self) -> bool:
        """Whether its forward is given one tensor and nothing else."""
        return len(inspect.signature(type(self.module).forward).parameters) == 2


@functools.cache
def class_with(kind: type[nn.Module], forward: Callable[..., Any], **more: Any) -> type[nn.Module]:
    """A subclass of a class of modules, under its name, with another forward and `more` attributes."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, **more})


def _norm_of(part: _KnownPart) -> Callable[..., Any] | None:
    module = part.module
    if type(module).__module__.startswith("torch.nn."):
        return type(module).forward  # one kernel already
    weights = [name for name, _ in module.named_parameters(recurse=False)]
    return _norm(*weights, *[""] * (2 - len(weights))) if part.takes_one and len(weights) <= 2 else None


def _mlp_of(part: _KnownPart) -> Callable[..., Any] | None:
    module, path = part.module, part.unit.path
    roles = ("product", "down_projection", "up_projection")
    inner = dict.fromkeys(relative(unit.path, path) for unit in part.units.by_role(*roles, within=path))
    products = {name: product_of(module.get_submodule(name)) for name in inner}
    rest = {name: child for name, child in module.named_children() if name not in products}
    dropout = next((name for name, child in rest.items() if isinstance(child, nn.Dropout)), "")
    acts = [name for name in (*rest, *vars(module)) if "act" in name]
    plain = all(not [*child.parameters()] for child in rest.values()) and not [*module.parameters(recurse=False)]
    last = next(reversed(products), "")
    first = tuple(name for name in products if name != last)
    down, ups = products.get(last), [products[name] for name in first]
    if not (plain and acts and part.takes_one and down and 1 <= len(first) <= 2 and None not in ups):
        return None
    widths = {(up.takes, up.gives) for up in cast("list[Any]", ups)}
    halved = widths == {(down.gives, 2 * down.takes)} and len(first) == 1
    return _mlp(first, last, halved, dropout) if halved or widths == {(down.gives, down.takes)} else None


def _linear_in_8_bits(self: Any, input: torch.Tensor) -> torch.Tensor:
    return product_in_8_bits(input, in_8_bits(input), self.weight, self.bias)


def keeps_8_bits(module: nn.Module) -> bool:
    """Whether a product keeps its input in 8 bits."""
    return type(module).forward is _linear_in_8_bits


def _product_of(part: _KnownPart) -> Callable[..., Any] | None:
    if FP8 not in part.options:
        return type(part.module).forward
    return _linear_in_8_bits if type(part.module) is nn.Linear else None


def _router_of(part: _KnownPart) -> Callable[..., Any] | None:
    module = part.module
    weight = getattr(module, "weight", None)
    if not (isinstance(weight, torch.Tensor) and weight.dim() == 2 and part.takes_one):
        return None
    rows = torch.empty(2, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad(), suppress(Exception):  # of whatever a user's router does with a tensor on meta
        logits, weights, experts = module(rows)
        if logits.shape == (2, weight.shape[0]) and experts.shape == weights.shape and experts.dtype is torch.int64:
            return _router(experts.shape[1], weights.dtype, getattr(module, "bias", None) is not None)
    return None


def _experts_of(part: _KnownPart) -> Callable[..., Any] | None:
    module: Any = part.module
    weights = dict(module.named_parameters(recurse=False))
    first = next((name for name in _FIRST if name in weights), "")
    names = {first, _LAST}
    biased = {f"{name}_bias" for name in names} <= {*weights}
    transposed, halved = getattr(module, "is_transposed", False), first == _FIRST[0]
    known = {*weights} == (names | {f"{name}_bias" for name in names} if biased else names)
    several = len(inspect.signature(type(module).forward).parameters)
    stacked = known and all(weights[name].dim() == 3 for name in names)
    normed = getattr(module, "has_post_expert_norm", False)
    return (
        _experts(first, transposed, halved, biased, part.options) if stacked and not normed and several >= 3 else None
    )


_WAYS: Mapping[str, tuple[Callable[[_KnownPart], Callable[..., Any] | None], str]] = {
    "norm": (_norm_of, "it is given more than one tensor"),
    "inner_norm": (_norm_of, "it is given more than one tensor"),
    "attention": (lambda part: _attention(type(part.module)), "it calls no attention function of transformers"),
    "mlp": (_mlp_of, "it is not two or three products around an activation"),
    "shared_experts": (_mlp_of, "it is not two or three products around an activation"),
    "router": (_router_of, "it does not return logits, weights and experts"),
    "experts": (_experts_of, "it is not stacked weights that are given tokens, experts and weights"),
    **dict.fromkeys(
        ("product", "down_projection", "up_projection"),
        (_product_of, "products in 8 bits are known of nn.Linear alone"),
    ),
    "mixer": (lambda part: None, "no kernel of it is known"),
}
"""How a role gets its kernels, and why a module of that role may have none."""
_PARTS = ("norm", "inner_norm", "attention", "mlp", "shared_experts", "router", "experts")
