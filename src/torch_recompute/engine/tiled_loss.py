"""The head of a model and its loss, over tiles of tokens, though the loss is written somewhere else.

The logits of a large vocabulary, their copy in 32 bits and their gradients are often the most that is alive in a step.
A head acts on each token, and so does cross-entropy, but the call of the one is in the model and that of the other in a
library or a training loop. So the head returns `Logits`: a tensor with the shape and the dtype of its result that has
not been computed. What acts on each logit alone (a cast, a division, a tanh) and what picks or flattens tokens is
written down. `cross_entropy` then makes one region per tile of tokens, from what the head was given to one loss per
token, with all that was written down in between, and adds up. Whatever else reads the logits gets the whole result of
the head, as without tiles, and the reason is kept, so that a plan can say it.

A result that was asked for in vain costs nothing: the logits in a model's output are of no bytes. An operation that
`__torch_function__` does not see (a custom `autograd.Function`) is given the values and gets an error in its backward.

Rejected: a changed `forward` for each class of model (as Liger has it), which follows neither a new model nor a loss of
the user's own; the loss in the head's module, which needs the labels there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from .. import _torch, errors
from ..state.values import name_of
from . import tiles

Tokenwise = Callable[[torch.Tensor], torch.Tensor]
Hook = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Head:
    """A head in one call of its model.

    Attributes:
        name: Its name, for errors.
        run: Computes it.
        weight: Its matrix, of a row for each class.
        tiles: How many tiles of tokens its loss is made in.
        region: Calls a function as a region, with a tile's tensors and keywords.
        tell: Called with "" when a loss has been made in tiles, and with what else has read the whole result.
    """

    name: str
    run: Tokenwise
    weight: torch.Tensor
    tiles: int
    region: tiles.Region
    tell: Callable[[str], object]


@dataclass(frozen=True)
class _Recipe:
    """The way to compute some logits: from `hidden` [..., width], by the head and the steps that follow it."""

    head: Head
    hidden: torch.Tensor
    dtype: torch.dtype
    autocast: tuple[bool, torch.dtype]
    versions: tuple[int, ...]  # of the hidden states and the weight when the head was called
    steps: tuple[Tokenwise, ...] = ()
    turned: bool = False  # [batch, classes, tokens], as cross-entropy takes more than one dimension of tokens
    begins: OrderedDict[int, Hook] = field(default_factory=OrderedDict[int, "Hook"])  # told when backward begins

    @property
    def shape(self) -> torch.Size:
        before, classes = self.hidden.shape[:-1], self.head.weight.shape[0]
        return torch.Size((before[0], classes, *before[1:]) if self.turned else (*before, classes))

    def made(self) -> Logits:
        """The logits, to be computed."""
        return _Unmade.apply(self.hidden, self.head.weight, self)

    def compute(self) -> torch.Tensor:
        """The logits of all tokens."""
        found = self.of(self.hidden)
        return found.transpose(1, -1) if self.turned else found

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of some tokens."""
        with _autocast(hidden.device.type, *self.autocast):
            found = self.head.run(hidden)
        for step in self.steps:
            found = step(found)
        return found


def unmade(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits of some hidden states [..., width], to be computed when they are read."""
    kind = hidden.device.type
    autocast = _torch.autocast_on(kind), torch.get_autocast_dtype(kind)
    dtype = autocast[1] if autocast[0] else torch.promote_types(hidden.dtype, head.weight.dtype)
    return _Recipe(head, hidden, dtype, autocast, _versions(hidden, head.weight)).made()


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else _torch.version_of(tensor) for tensor in tensors)


def _read_late(name: str, by: str) -> str:
    return (
        f"{by} reads the logits of {name}, which are computed in tiles with their loss and otherwise when they are "
        "read, and the weights or the hidden states have been changed in place since: they would be those of another "
        "step.\n"
        "  Read the logits before optimizer.step(), or leave the tiles out of the plan."
    )


def _autocast(kind: str, enabled: bool, dtype: torch.dtype) -> AbstractContextManager[object]:
    now = _torch.autocast_on(kind), torch.get_autocast_dtype(kind)
    return nullcontext() if now == (enabled, dtype) else torch.autocast(kind, dtype=dtype, enabled=enabled)


class _Unmade(Function):
    """Puts logits that are not computed into autograd's graph, so that they count as what they are."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, recipe: _Recipe) -> Logits:
        ctx.set_materialize_grads(False)
        ctx.head = recipe.head.name
        return Logits(recipe)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if grads[0] is not None:
            raise errors.RecomputeError(
                f"the logits of {ctx.head} are computed in tiles with their loss, and something else than "
                "torch.nn.functional.cross_entropy has read them: a custom autograd.Function, which is not told that "
                "they are not there, or a gradient that was asked for by the logits.\n"
                "  Compute the loss by cross_entropy, or leave the tiles out of the plan."
            )
        return None, None, None


class Logits(torch.Tensor):
    """The result of a head that is computed when it is read, or in tiles by its loss."""

    recipe: _Recipe
    whole: torch.Tensor | None  # once it has been computed

    @staticmethod
    def __new__(cls: Any, recipe: _Recipe) -> Logits:
        """Makes the tensor, which has no storage."""
        strides = [math.prod(recipe.shape[place + 1 :]) for place in range(len(recipe.shape))]
        made = _torch.without_memory(cls, recipe.shape, strides, recipe.dtype, recipe.hidden.device)
        made.recipe, made.whole = recipe, None
        return made

    def __init__(self, recipe: _Recipe) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["hidden"], None

    @property
    def hidden(self) -> torch.Tensor:
        """The argument of the head."""
        return self.recipe.hidden

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"<logits of {self.recipe.head.name}, {tuple(self.recipe.shape)}, made in {self.recipe.head.tiles} tiles>"
        )

    def read(self, by: object) -> torch.Tensor:
        """The whole result, for a function that needs it."""
        if self.whole is not None:
            return self.whole
        if self.recipe.versions != _versions(self.recipe.hidden, self.recipe.head.weight):
            raise errors.ChangedError(_read_late(self.recipe.head.name, name_of(by)))
        self.recipe.head.tell(name_of(by))
        whole = self.recipe.compute()
        _tell(whole, self.recipe)
        if torch.is_grad_enabled():
            self.whole = whole
        return whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DESCRIBED:
            return super().__torch_function__(func, types, args, kwargs)
        follow = _FOLLOWED.get(func)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        places = [i for i, arg in enumerate(args) if isinstance(arg, Logits)]
        if follow is not None and len(places) == 1 and args[places[0]].whole is None:
            found = follow(func, args[places[0]].recipe, places[0], args, kwargs)
            if found is not None:
                return found
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _on_values(func, args, dict(kwargs or {}), torch.Tensor.detach)


def _tell(made: torch.Tensor, recipe: _Recipe) -> None:
    """Calls the hooks of FSDP when the backward of what was made of logits begins; they want no gradient."""
    for hook in recipe.begins.values() if made.requires_grad else ():
        made.register_hook(partial(_told, hook))


def _told(hook: Hook, grad: torch.Tensor) -> None:
    hook(grad)


def _on_values(func: Any, args: Any, kwargs: Any, value: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Calls a function with the whole results."""
    leaves, spec = _torch.tree_flatten((args, kwargs))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Logits):
            whole = leaf.read(func)
            leaves[i] = whole if value is None else value(whole)
    args, kwargs = _torch.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


# --- what is written down, and what becomes of it ---

Args = tuple[Any, ...]
T = torch.Tensor


def _cast(dtype: torch.dtype | None) -> Callable[..., Any]:
    """Follows a cast to a dtype, or to the one among the arguments."""

    def follow(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
        to = dtype
        for given in (*args[1:], *kwargs.values()):
            if isinstance(given, torch.dtype) and to is None:
                to = given
            elif isinstance(given, (str, torch.device)) and torch.device(given) == recipe.hidden.device:
                continue
            elif not isinstance(given, bool):
                return None
        to = recipe.dtype if to is None else to
        if place or not to.is_floating_point:
            return None
        return replace(recipe, dtype=to, steps=(*recipe.steps, partial(_to, to))).made()

    return follow


def _to(dtype: torch.dtype, logits: torch.Tensor) -> torch.Tensor:
    return logits.to(dtype)


def _each(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows what acts on each logit alone, with numbers and with tensors of one element, or of one for each class."""
    classes, dtype = recipe.head.weight.shape[0], recipe.dtype
    others = list(args)
    for i, other in enumerate(args):
        if i == place:
            continue
        if isinstance(other, torch.Tensor) and other.is_floating_point() and not recipe.turned:
            if other.dim() and (other.shape[-1] not in (1, classes) or other.numel() != other.shape[-1]):
                return None
            others[i] = other.reshape(other.shape[-1:])
            dtype = torch.promote_types(dtype, other.dtype) if other.dim() else dtype
        elif type(other) not in (int, float, bool):
            return None
    if any(type(value) not in (int, float, bool, type(None)) for value in kwargs.values()):
        return None
    before, after = tuple(others[:place]), tuple(others[place + 1 :])

    def step(logits: torch.Tensor) -> torch.Tensor:
        return func(*before, logits, *after, **kwargs)

    return replace(recipe, dtype=dtype, steps=(*recipe.steps, step)).made()


def _same(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows what returns the same values."""
    return recipe.made()


def _reshaped(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows what gives the tokens another shape and leaves their classes together."""
    shape = list(recipe.shape)
    if func in (T.flatten, torch.flatten):
        names = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
        start, end = (names.get(name, other) % len(shape) for name, other in (("start_dim", 0), ("end_dim", -1)))
        shape[start : end + 1] = [-1]
    else:
        (given,) = args[1:2] or (kwargs.get("shape"),)
        shape = list(args[1:] if isinstance(given, int) else given or ())
        if not shape or not all(isinstance(size, int) for size in shape):
            return None
    classes = recipe.head.weight.shape[0]
    known = 1
    for size in shape:
        known *= 1 if size == -1 else size
    whole = recipe.shape.numel()
    shape = [whole // max(1, known) if size == -1 else size for size in shape]
    if recipe.turned or len(shape) < 2 or shape[-1] != classes or torch.Size(shape).numel() != whole:
        return None
    return replace(recipe, hidden=recipe.hidden.reshape(*shape[:-1], recipe.hidden.shape[-1])).made()


def _picked(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows an index that picks tokens: the last dimension is left as it is."""
    if recipe.turned or place:
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    ellipses = [i for i, one in enumerate(index) if one is Ellipsis]
    after = index[ellipses[0] + 1 :] if ellipses else index
    named = sum(
        one.dim() if isinstance(one, torch.Tensor) and one.dtype == torch.bool else one is not None for one in after
    )
    reaches = bool(after) if ellipses else named >= recipe.hidden.dim()
    if reaches and not (isinstance(after[-1], slice) and after[-1] == slice(None)):
        return None
    hidden = recipe.hidden[args[1]]
    return replace(recipe, hidden=hidden).made() if hidden.dim() > 1 else None


def _turned(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows the turn that cross-entropy asks for: [batch, tokens, classes] to [batch, classes, tokens]."""
    order = args[1] if len(args) == 2 else args[1:]
    names = (T.permute, torch.permute)
    right = (tuple(order) == (0, 2, 1)) if func in names else {d % 3 for d in order} == {1, 2}
    if kwargs or recipe.turned or recipe.hidden.dim() != 3 or not right:
        return None
    return replace(recipe, turned=True).made()


def _hooked(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Follows a hook of FSDP, by which it learns that the backward of its module begins."""
    hook: Any = args[1] if len(args) == 2 else kwargs.get("hook")
    if not str(getattr(hook, "__module__", "")).startswith(_OF_FSDP):
        return None
    handle = RemovableHandle(recipe.begins)
    recipe.begins[handle.id] = hook
    return handle


def _cross_entropy(func: Any, recipe: _Recipe, place: int, args: Args, kwargs: dict[str, Any]) -> Any:
    """Computes the loss in tiles."""
    given = dict(zip(_LOSS, args, strict=False)) | kwargs
    target, weight, how = given.get("target"), given.get("weight"), given.get("reduction", "mean")
    if place or not isinstance(target, torch.Tensor) or target.is_floating_point() or recipe.hidden.dim() < 2:
        return None
    flat = recipe.turned or recipe.hidden.dim() == 2
    if not flat or target.shape != recipe.hidden.shape[:-1] or how not in ("mean", "sum", "none"):
        return None
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    ignored, options = given.get("ignore_index", -100), {"label_smoothing": given.get("label_smoothing", 0.0)}

    def head_and_loss(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = recipe.of(hidden)
        return F.cross_entropy(logits, target, weight, ignore_index=ignored, reduction="none", **options)

    head, flat_target = recipe.head, target.reshape(-1)
    hidden = recipe.hidden.reshape(-1, recipe.hidden.shape[-1])
    each = tiles.run(head.region, head_and_loss, head.name, head.tiles, 0, (hidden, flat_target), {})
    _tell(each, recipe)
    head.tell("")
    if how == "none":
        return each.reshape(target.shape)
    counts = flat_target != ignored
    total = each.where(counts, 0).sum()  # whose gradient is laid out as the labels are, which no kernel has to copy
    if how == "sum":
        return total
    return total / (counts if weight is None else weight.gather(0, flat_target.where(counts, 0)).where(counts, 0)).sum()


_OF_FSDP = ("torch.distributed.", "torch_recompute.simulation.")
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_BINARY = ("mul", "div", "true_divide", "add", "sub", "multiply", "divide", "__rmul__", "__radd__")
_UNARY = ("tanh", "neg", "clamp")
_VIEWS = (T.view, T.reshape, T.flatten, torch.flatten, torch.reshape)
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    T.register_hook: _hooked,
    **dict.fromkeys((T.contiguous, T.clone, torch.clone), _same),
    **dict.fromkeys(_VIEWS, _reshaped),
    **dict.fromkeys((T.transpose, torch.transpose, T.permute, torch.permute), _turned),
    T.__getitem__: _picked,
    **{getattr(of, name): _each for name in (*_BINARY, *_UNARY) for of in (T, torch) if hasattr(of, name)},
    T.float: _cast(torch.float32),
    T.double: _cast(torch.float64),
    T.half: _cast(torch.float16),
    T.bfloat16: _cast(torch.bfloat16),
    T.to: _cast(None),
}
_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "grad_fn",
    "is_meta",
    "_base",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "element_size",
    "ndimension",
    "get_device",
)
_DESCRIBED = {
    *(
        getattr(T, name).__get__
        for name in (*_PROPERTIES, "is_sparse", "is_quantized", "is_nested", "is_mps", "is_cpu")
    ),
    *(getattr(T, name) for name in (*_METHODS, "__len__", "__hash__", "__repr__", "is_inference")),
    torch.is_floating_point,
    torch.numel,
}
"""What is read of a tensor that is not computed, without its values."""
