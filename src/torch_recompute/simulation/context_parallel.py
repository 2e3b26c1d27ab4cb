"""Context parallelism on one rank of a simulated step: a share of the tokens, and attention to all of them.

The ranks of a group share each sequence. Everything works on a rank's own tokens, only attention needs the others' keys
and values. The model is called with a share of the tokens; its calls of
`scaled_dot_product_attention` are found while its attentions run, whatever kernel they take:

    all-gather   keys and values are gathered, as PyTorch's `context_parallel` and Llama 3's training do. Autograd keeps
                 the share; backward gathers again, and its gradients of all keys and values are reduce-scattered
    ulysses      tokens are exchanged for heads before attention and back after it, by all-to-all, as DeepSpeed does;
                 autograd keeps as much as without
    ring         blocks of keys and values go round (`ring.py`)

A gather is deferred as in `planner/tensor_parallel.py`: the kernel is given tensors of the shape of all tokens over the
memory of this rank's own, which is what autograd keeps, and what has been gathered is alive while the kernel runs.

A compiled layer (`compiling/layers.py`) is traced with its own tokens alone, and its graph keeps what it keeps of them.
When its code runs, the kernels of attention that it calls are those of a rank (`SharedKernels`), as in PyTorch, where
they are what DTensor replaces.

Rejected: PyTorch's own `context_parallel` on fake tensors, which needs a process group and patches torch for the whole
process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import errors
from .._torch import TorchDispatchMode
from .._torch.fakes import schema_of
from .._torch.ranks import functional
from ..plan.ranks import Ranks, size_of, those_that_fit
from ..plan.roles import inside
from ..plan.units import find_units
from .ring import AttentionCall, backward_over_ring, forward_over_ring, over_ring

_collectives = functional()


ONE_GRAPH = "attention_of"
"""Of modules that run as one graph: the group and the kind of ranks that share their attention; None for one rank."""


def share_context(model: nn.Module, ranks: Ranks) -> None:
    """Makes a model's attentions those of one rank of a context-parallel group, in place.

    Args:
        model: The model, which will be called with a share of the tokens.
        ranks: The ranks.

    Raises:
        ArgumentError: The model has no attention that is known.
    """
    if ranks.cp == 1:
        return
    attentions = find_units(model).by_role("attention")
    if not attentions:
        raise errors.ArgumentError(
            f"--cp: {type(model).__name__} has no attention that is known, so what its ranks exchange is not. Name it "
            'with torch_recompute.register("attention", MyAttention), or leave --cp out.'
        )
    group = ranks.group("context", ranks.cp)
    graphs = {path: module for path, module in model.named_modules() if hasattr(module, ONE_GRAPH)}
    for unit in attentions:
        module = model.get_submodule(unit.path)
        graph = next((whole for path, whole in graphs.items() if inside(unit.path, path)), None)
        if graph is not None:
            setattr(graph, ONE_GRAPH, (group, ranks.cp_kind))
        else:
            module.__dict__["forward"] = partial(_shared, module.forward, group, ranks.cp_kind)


def _shared(forward: Callable[..., Any], group: str, kind: str, /, *args: Any, **kwargs: Any) -> Any:
    with _SharedAttention(group, kind):
        return forward(*args, **kwargs)


class _SharedAttention(TorchFunctionMode):
    """Makes calls of attention those of a rank."""

    def __init__(self, group: str, kind: str) -> None:
        super().__init__()
        ring = partial(over_ring, *_ring_of(group))
        ways = {"ulysses": partial(_ulysses, group), "all-gather": partial(_over_gathered, group), "ring": ring}
        self._attention = ways[kind]

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _ring_of(group: str) -> tuple[str, int]:
    """The group as each sends all of a block, and how many there are."""
    return f"{group.rpartition('-')[0]}-0", size_of(group)


class _WhileItRuns:
    """Holds what is gathered for a kernel, while it runs."""

    full: Any = None


def _over_gathered(group: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    held = _WhileItRuns()
    q, k, v = cast("Any", _Gather.apply(held, group, q, k, v))
    kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = torch.cat([kwargs["attn_mask"]] * size_of(group), -1)
    out = F.scaled_dot_product_attention(q, k, v, **kwargs)
    held.full = None
    return _Release.apply(held, group, out, k, v)


def _gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    """The tokens of all ranks, in their own order in memory."""
    return _collectives.all_gather_into_tensor(x.permute(2, 0, 1, 3).contiguous(), size_of(group), group)


def _reduced(full: list[Any], group: str) -> list[torch.Tensor]:
    """This rank's share of the gradients of all keys and values, each of which is freed then."""
    own: list[torch.Tensor] = []
    while full:
        each = full.pop(0).permute(2, 0, 1, 3).contiguous()
        share = _collectives.reduce_scatter_tensor(each, "sum", size_of(group), group)
        own.append(share.permute(1, 2, 0, 3))
        del each
    return own


class _Gather(torch.autograd.Function):
    """Before attention: keys and values of all tokens, over the memory of this rank's own; backward reduces theirs."""

    @staticmethod
    def forward(
        ctx: Any, held: _WhileItRuns, group: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.held, ctx.group = held, group
        held.full = _gathered(k, group), _gathered(v, group)
        batch, heads, tokens, _ = k.shape
        return (q.view_as(q), *(x[:, :, :1].expand(batch, heads, tokens * size_of(group), -1) for x in (k, v)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.held.full = None
        of_q, *full = grads
        del grads
        return None, None, of_q, *_reduced(full, ctx.group)


class _Release(torch.autograd.Function):
    """After attention; its backward comes before the kernel's, and gathers again."""

    @staticmethod
    def forward(
        ctx: Any, held: _WhileItRuns, group: str, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        ctx.held, ctx.group = held, group
        ctx.save_for_backward(k, v)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own = [x[:, :, : x.shape[2] // size_of(ctx.group)] for x in ctx.saved_tensors]
        ctx.held.full = [_gathered(x, ctx.group) for x in own]
        return None, None, grads[0], None, None


def _ulysses(group: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    size = size_of(group)
    for x in (q, k):
        if x.shape[1] % size:
            heads = q.shape[1], k.shape[1]
            fitting = those_that_fit(range(1, heads[1] + 1), *heads)
            raise errors.ArgumentError(
                f"--cp-kind ulysses: --cp is {size}, and attention has {heads[0]} heads of queries and {heads[1]} of "
                f"keys on a rank, which {size} ranks cannot share. Write --cp {fitting}, or --cp-kind all-gather."
            )
    q, k, v = (cast("torch.Tensor", _Exchange.apply(x, group, True)) for x in (q, k, v))
    kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = torch.cat([torch.cat([kwargs["attn_mask"]] * size, -1)] * size, -2)
    return _Exchange.apply(F.scaled_dot_product_attention(q, k, v, **kwargs), group, False)


class _Exchange(torch.autograd.Function):
    """A share of the tokens with all heads, for all tokens with a share of the heads; or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, to_heads: bool) -> torch.Tensor:
        ctx.how = group, to_heads
        return _exchanged(x, group, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, to_heads = ctx.how
        return _exchanged(grads[0], group, to_heads=not to_heads), None, None


def _exchanged(x: torch.Tensor, group: str, *, to_heads: bool) -> torch.Tensor:
    size = size_of(group)
    batch, heads, tokens, width = x.shape
    if to_heads:
        parts = x.view(batch, size, heads // size, tokens, width).permute(1, 3, 0, 2, 4)
    else:
        parts = x.view(batch, heads, size, tokens // size, width).permute(2, 1, 3, 0, 4)
    sent = parts.contiguous()
    split = [1] * size
    got = _collectives.all_to_all_single(sent, split, split, group)
    if to_heads:  # (ranks, tokens, batch, heads, d), in the order of all tokens
        return got.flatten(0, 1).permute(1, 2, 0, 3)
    return got.flatten(0, 1).permute(2, 0, 1, 3)


# --- kernels in the code of a compiled layer --------------------------------------------------------------------------


class SharedKernels(TorchDispatchMode):
    """Makes kernels of attention, and those of its backward, those of a rank.

    Attributes:
        met: Whether there was one.
    """

    def __init__(self, group: str, kind: str) -> None:
        super().__init__()
        self._group, self._ring = group, kind == "ring"
        self.met = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_scaled_dot_product" not in schema_of(func).name:
            return func(*args, **(kwargs or {}))
        self.met, call = True, AttentionCall.of(func, args, kwargs or {})
        return (_by_ring if self._ring else _by_gathering)(self._group, call)


def _by_gathering(group: str, call: AttentionCall) -> Any:
    whole = {name: _gathered(call.given[name], group).permute(1, 2, 0, 3) for name in ("key", "value")}
    mask = next((name for name in ("attn_bias", "attn_mask") if call.given.get(name) is not None), None)
    if mask is not None:
        whole[mask] = torch.cat([call.given[mask]] * size_of(group), -1)
    of_q, *full = call.func(**{**call.given, **whole})
    if not call.is_backward:
        return of_q, *full
    whole.clear()
    rest = full[2:]
    del full[2:]
    return of_q, *_reduced(full, group), *rest


def _by_ring(group: str, call: AttentionCall) -> Any:
    ring, given = _ring_of(group), call.given
    causal, own = bool(given["is_causal"]), (given["key"].contiguous(), given["value"].contiguous())

    def block(key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
        return call.func(**{**given, "key": key, "value": value, "is_causal": is_causal})

    if call.is_backward:
        rest = [None] * (len(call.results) - 3)
        return *backward_over_ring(*ring, causal, given["query"], *own, block), *rest
    first, out, sums = forward_over_ring(*ring, causal, *own, lambda *args: call.returned(block(*args)))
    results = [first.given[name] for name in call.results]
    return out, sums.view_as(results[1]), *results[2:]
