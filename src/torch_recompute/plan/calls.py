"""Calls inside a region that are found by their kind: saved ones (`Choice.keep`), and decisions that are carried.

A function that a module calls cannot be wrapped without editing the module. So while a planned region runs, in forward
and in every replay, a TorchFunctionMode looks at the functions called: a product with a parameter or an attention call
that the plan keeps becomes a saved call, and a decision becomes a carried value.

A router's scores, computed again by a kernel that is not deterministic to the bit, may order two near-equal experts the
other way; the shapes stay the same, so nothing fails, and the gradients are of other experts. So of `topk` and `sort`
the indices are carried and the values gathered by them, and values read from the device (`item`, `nonzero`) are carried
too. Where decisions are not carried, `Compare` counts those that a replay made otherwise.

A fused attention of another package shows itself to no mode: flash-attn's and TransformerEngine's are
`torch.autograd.Function`s. `RepeatedAttention` finds it afterwards, in the graph of a region's first call.

DTensor makes most collectives while it dispatches an operation, so `KeepCollectives` is a dispatch mode (about 20 us
per operation). It sees functional collectives only: `dist.all_reduce(x)` in place is left alone, because `fully_shard`
gathers parameters so. Not seen: what other Python functions do that torch treats as one call.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._torch import tracing
from .._torch.checkpoints import in_checkpoint
from .._torch.graphs import attention_in_parts, function_of
from .._torch.ranks import call_next_mode, dispatches
from ..memory.ledger import CountedOnce, storages
from ..region import keep
from ..state.observer import Observer, Running
from ..state.tape import Run, thread
from ..state.values import name_of, replay
from ..stores import Store

Function = Callable[..., Any]


def _named(*names: str) -> frozenset[Function]:
    """The functions of these dotted names below `torch` that this version of torch has."""
    found: set[Function] = set()
    for name in names:
        value: Any = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            found.add(value)
    return frozenset(found)


def _anywhere(*names: str, places: tuple[str, ...] = ("", "Tensor.")) -> frozenset[Function]:
    return _named(*(place + name for place in places for name in names))


ATTENTION = _named("nn.functional.scaled_dot_product_attention", "nn.attention.flex_attention.flex_attention")
LINEAR = _named("nn.functional.linear")
MATRICES = _anywhere("matmul", "mm", "bmm", "addmm", "baddbmm") | _named("nn.functional.grouped_mm", "_grouped_mm")
CONVOLUTIONS = _anywhere("conv1d", "conv2d", "conv3d", places=("", "nn.functional."))
PRODUCTS = LINEAR | MATRICES | CONVOLUTIONS | _named("nn.functional.bilinear", "einsum")
ALL_PRODUCTS = frozenset({"product", "down", "matmul"})
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "shard_dim_alltoall"})
COLLECTIVES: dict[str, frozenset[str]] = {
    "reduction": REDUCTIONS,
    "collective": REDUCTIONS | {"all_gather_into_tensor"},
}


_declared: set[Function] = set()
_name_of = functools.cache(name_of)  # of functions that are declared, or torch's


def declare_product(func: Function) -> None:
    """Makes calls of a function, which shows itself to function modes, count as products."""
    _declared.add(func)


def is_declared(func: Function) -> bool:
    """Returns whether `declare_product` has named the function."""
    return func in _declared


def kind_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], narrow: bool = True) -> str | None:
    """The kind of call of a plan that this one is of, the narrowest if asked for; None for none."""
    if func in ATTENTION:
        return "attention"
    if func in PRODUCTS or func in _declared:
        if torch.nn.Parameter not in map(type, args) and not _has_parameter(args, kwargs):
            return "matmul"
        return "down" if narrow and _narrows(func, args, kwargs) else "product"
    return None


@functools.cache
def _awaited(kinds: tuple[str, ...], declared: int) -> tuple[frozenset[str], frozenset[str], frozenset[Function]]:
    """Returns the kinds that are kept, those whose values are unused, and the functions that may be of either."""
    kept = frozenset(kinds) | ({"down"} if "product" in kinds else set())
    unused = ALL_PRODUCTS if "values_unused" in kinds else frozenset()
    functions = {F.multi_head_attention_forward}
    if (kept | unused) & ALL_PRODUCTS:
        functions |= PRODUCTS | _declared
    if "attention" in kept:
        functions |= ATTENTION
    return kept, unused, frozenset(functions)


class KeepCalls(TorchFunctionMode):
    """Makes saved calls of all calls of some of `choice.KINDS`; what is both unused and kept counts as unused."""

    def __init__(self, kinds: Iterable[str], store: Store | None = None) -> None:
        super().__init__()
        self._store = store
        self._kinds, self._unused, self._awaited = _awaited(tuple(kinds), len(_declared))

    def __torch_function__(
        self, func: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Of a module that the user has compiled nothing is kept, and Dynamo could not look into the set.
        if (torch.compiler.is_compiling() and not thread.untraced) or func not in self._awaited:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if "out" in kwargs:  # inductor's code writes over what it is given there, which no version shows
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return attention_in_parts(*args, **kwargs)
        kind = kind_of(func, args, kwargs, narrow="product" not in self._kinds)
        if kind in self._kinds or kind in self._unused:
            # A pure call takes no random numbers and changes nothing, as attention without dropout.
            pure = func in PRODUCTS and func not in _declared
            if func is F.scaled_dot_product_attention:
                pure = not (args[4] if len(args) > 4 else kwargs.get("dropout_p"))
            return keep(_name_of(func), func, args, kwargs, self._store, kind in self._unused, pure)
        return func(*args, **kwargs)


_keep_calls = functools.cache(lambda kinds, declared: KeepCalls(kinds))
"""The mode for some kinds of calls, as long as no more functions are declared; any number of threads may be in it."""


class KeepCollectives(_torch.TorchDispatchMode):
    """Makes saved calls of functional collectives of these kinds, which the user, DTensor or a Function calls."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a module that the user has compiled run compiled: its collectives are kept where its code calls them."""
        return True

    def __init__(self, kinds: Iterable[str]) -> None:
        super().__init__()
        self._names: frozenset[str] = frozenset().union(*(COLLECTIVES[kind] for kind in kinds))

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("_c10d_functional", "_dtensor"):
            if name.partition(".")[0].removesuffix("_coalesced") in self._names:
                return keep(name, func, args, kwargs or {})
        elif any(dispatches(kind) for kind in kinds):
            # A subclass that makes collectives of its own is to make them under this mode; the modes around it are
            # shown the subclass first, as they are without this one.
            return call_next_mode(self, func, kinds, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@functools.cache
def _split(kinds: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the kinds of functions, and those of collectives."""
    functions = tuple(kind for kind in kinds if kind not in COLLECTIVES)
    return functions, tuple(kind for kind in kinds if kind in COLLECTIVES)


@tracing.as_it_is
def run_keeping(
    fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: tuple[str, ...], carry: bool = False
) -> Any:
    """Calls a function in which all calls of some of `choice.KINDS` are saved calls, and decisions may be carried."""
    if torch.compiler.is_compiling():
        tracing.end_graph()  # the modes see what runs
    functions, collectives = _split(kinds)
    if not collectives and not carry:
        with _keep_calls(functions, len(_declared)):
            return fn(*args, **kwargs)
    with ExitStack() as stack:
        if functions:
            stack.enter_context(_keep_calls(functions, len(_declared)))
        if collectives:
            stack.enter_context(KeepCollectives(collectives))
        if carry:
            stack.enter_context(Carry())
        return fn(*args, **kwargs)


_FUSED = re.compile("attention|attn|fmha", re.IGNORECASE)
_LITTLE = 0.25  # of an attention's result: the sums of its rows, a seed


class RepeatedAttention(Observer):
    """Finds the fused attentions that the replays of a region run again, by the graph of its first call.

    A fused attention saves what it is given, its result and the sums of its rows. So a region around little else frees
    no more than the result, which whatever reads it holds in most models, and pays the whole kernel for it. One is
    known by the name of its node, or as a custom function of at least three tensors, none of which is a parameter. What
    saved calls have made is not run again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = _torch.sequence_number()
        self._kept: list[range] = []
        self._dropped = CountedOnce()

    def around(self, running: Running) -> AbstractContextManager[Any]:
        """Notes when saved calls of the region begin and end."""
        return self._saved() if running.kind == "saved call" and running.run.name == self._name else nullcontext()

    @contextmanager
    def _saved(self) -> Generator[None]:
        first = _torch.sequence_number()
        try:
            yield
        finally:
            self._kept.append(range(first, _torch.sequence_number()))

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor."""
        self._dropped.add(tensor)

    def found(self, result: Any) -> list[str]:
        """The attentions that are run again and known by their name, by that of what they are."""
        return [_said(node) for node in self._again(result) if _FUSED.search(node.name())]

    def alone(self, result: Any) -> tuple[str, int]:
        """An attention beside which the region frees little or nothing, and the bytes of the result; else ("", 0)."""
        results = {id(storage): int(storage.nbytes()) for _, storage in storages(result)}
        own = sum(nbytes for storage, nbytes in self._dropped.alive() if storage in results)
        if not own or self._dropped.nbytes - own > _LITTLE * own:
            return "", 0
        return next(((_said(node), own) for node in self._again(result) if _is_attention(node)), ("", 0))

    def _again(self, result: Any) -> Iterator[Any]:
        """The nodes of the region's graph that a replay makes again."""
        open_ = [tensor.grad_fn for tensor in _torch.tensors_in(result)]
        seen = set[Any]()
        while open_:
            node: Any = open_.pop()
            if node is None or node in seen or hasattr(node, "variable") or _torch.sequence_of(node) < self._first:
                continue
            seen.add(node)
            open_.extend(before for before, _ in node.next_functions)
            if not any(_torch.sequence_of(node) in kept for kept in self._kept):
                yield node


def _said(node: Any) -> str:
    return re.sub(r"(Backward\d*)$", "", node.name()).removeprefix("GeneratedBackwardFor_")


def _is_attention(node: Any) -> bool:
    given = [before for before, _ in node.next_functions if before is not None]
    if any(isinstance(getattr(before, "variable", None), torch.nn.Parameter) for before in given):
        return False
    custom = function_of(node) is not None
    return bool(_FUSED.search(node.name())) or (custom and len(given) >= 3)


def _has_parameter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a product is one with a parameter, or with a part of one (the matrix of one expert)."""
    operands = [*args, *kwargs.values()]
    for operand in operands:
        operands.extend(operand if isinstance(operand, (list, tuple)) else ())
    return any(isinstance(operand, torch.Tensor) and _torch.parameter_of(operand) is not None for operand in operands)


def _narrows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a product with a matrix makes less of each row than it reads, by the matrix on this rank."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    place = next((i for i, x in enumerate(tensors) if x.dim() > 1 and _torch.parameter_of(x) is not None), None)
    if place is None or func not in LINEAR | MATRICES:
        return False
    rows, columns = getattr(tensors[place], "_local_tensor", tensors[place]).shape[-2:]
    reads_columns = func in LINEAR or not any(x.dim() > 1 for x in tensors[:place])  # the matrix is the first operand
    return rows < columns if reads_columns else columns < rows


DECISIONS = (
    _anywhere("argmax", "argmin", "argsort", "multinomial", "nonzero", "bincount", "histc", "unique")
    | _anywhere("item", "tolist", "__bool__", "__int__", "__float__", "__index__", places=("Tensor.",))
    | _named("searchsorted", "bucketize")
)
ORDERED: dict[Function, Function] = {
    torch.topk: torch.return_types.topk,
    torch.Tensor.topk: torch.return_types.topk,
    torch.sort: torch.return_types.sort,
    torch.Tensor.sort: torch.return_types.sort,
}


def _decides(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func in DECISIONS or (func is torch.where and len(args) + len(kwargs) == 1)


class Carry(TorchFunctionMode):
    """Carries the decisions of a region from its forward to its replays."""

    def __torch_function__(
        self, func: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_decide(func, args, kwargs):
            return func(*args, **kwargs)
        run = thread.run
        if run is not None and in_checkpoint():
            if not run.replaying:
                warnings.warn(_not_carried(func.__name__, run.name), RuntimeWarning, stacklevel=2)
            return func(*args, **kwargs)
        return carried(func, args, kwargs, replay)


def carried(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], carry: Callable[[Function], Function]
) -> Any:
    """Calls one that `may_decide`; the decision is made by what `carry` returns for it, and copied for the caller."""
    if func in ORDERED:
        return _ordered(func, args, kwargs, carry)
    return _own(carry(func)(*args, **kwargs))


def may_decide(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes a decision that a region may carry."""
    return "out" not in kwargs and (func in ORDERED or _decides(func, args, kwargs))


def _not_carried(name: str, region: str) -> str:
    return (
        f"{region} calls {name} within torch.utils.checkpoint, so what it decides is not carried: that checkpoint "
        "runs the call again by itself, after the region's forward, and compares what is saved.\n"
        "  Take the inner checkpoint away; the region recomputes what is in it."
    )


TOPK = _anywhere("topk")
PICKS = _anywhere("argmax", "multinomial")


class Picks(list[torch.Tensor]):
    """The picks of one forward's decisions, in order; one leaf of a tree, which grows while the forward runs."""


class Compare(TorchFunctionMode):
    """Counts the decisions of a region that its replays make otherwise than its forward, and carries none.

    A decision is one row of a `topk` or `multinomial`, in any order, or one entry of an `argmax`: the experts of one
    token. Those of a region inside of this one, and of saved calls, are not looked at.

    Args:
        run: The forward, or a replay.
        picks: What the forward's decisions picked: filled in the forward, compared with in a replay.
        seen: Called in a replay with how many decisions differ (on their device) and how many there are.
    """

    def __init__(self, run: Run, picks: Picks, seen: Callable[[torch.Tensor, int], None] | None = None) -> None:
        super().__init__()
        self._run = run
        self._picks = picks
        self._seen = seen
        self._count = 0

    def __torch_function__(
        self, func: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "out" not in kwargs and thread.run is self._run:
            if func in TOPK:
                self._picked(result[1], _dim(func, args, kwargs))
            elif func in PICKS:
                self._picked(result, None if "argmax" in func.__name__ else -1)
        return result

    def _picked(self, picked: torch.Tensor, dim: int | None) -> None:
        if self._seen is None:
            self._picks.append(picked.clone())  # the caller may change what it got in place
            return
        if self._count == len(self._picks):
            return
        then = self._picks[self._count]
        self._count += 1
        if then.shape != picked.shape:
            rows = then.new_ones(then.shape if dim is None else then.select(dim, 0).shape)
        elif dim is None or not then.ndim:
            rows = then != picked
        else:
            rows = (then.sort(dim).values != picked.sort(dim).values).any(dim)
        self._seen(rows.sum(), rows.numel())


def _dim(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along which dimension `topk` or `sort` picks."""
    dim = kwargs.get("dim")
    if dim is None:
        place = 2 if func in TOPK else 1
        dim = args[place] if len(args) > place else -1
    return dim


def _ordered(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], carry: Callable[[Function], Function]
) -> Any:
    scores: torch.Tensor = args[0] if args else kwargs["input"]
    dim = _dim(func, args, kwargs)
    if isinstance(dim, bool):  # sort(input, stable) has no dimension there
        return func(*args, **kwargs)
    indices = carry(lambda *a, **k: func(*a, **k)[1])(*args, **kwargs)
    return ORDERED[func]((scores.gather(dim, indices), _own(indices)))


def _own(value: Any) -> Any:
    """Copies what was carried, so that the caller may change it in place, as routers do."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_own, value)) if type(value) is tuple else value
