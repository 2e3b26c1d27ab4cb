"""Ring attention on one rank of a context-parallel group: keys and values go round, one block at a time.

Each rank has the queries of its own tokens. A block of keys and values is passed on to the next rank while attention to
it runs, so at any time there are the block that is computed with, a copy of it that is on its way, and the one that
arrives; the parts of attention are merged by their log-sum-exp, in 32 bits. Autograd keeps a rank's own queries, keys
and values, the merged result and its log-sum-exp. In backward the blocks go round again, and their gradients follow
them, in 32 bits, one rank behind. It is PyTorch's own ring of context parallelism, which all-to-all rotates, with its
load balance for causal attention: each rank has an early and a late part of the tokens, so of another rank's block half
of the keys meet all queries. The rank that is simulated is the last, of which all blocks are so.

The kernel is the one that `scaled_dot_product_attention` takes; it is seen when it is called, and the kernel of its
backward is called with what the ring has merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from .. import errors
from .._torch import TorchDispatchMode
from .._torch.fakes import schema_of
from .._torch.ranks import functional

_collectives = functional()
_SAME = {"out": "output", "logsumexp": "log_sumexp", "philox_seed": "rng_state", "philox_offset": "unused"}


def over_ring(
    group: str, size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention of a rank's queries to the tokens of all ranks.

    Raises:
        ArgumentError: It has a mask, or no kernel that gives its log-sum-exp takes it.
    """
    kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
    if kwargs.pop("attn_mask", None) is not None:
        raise errors.ArgumentError(
            "--cp-kind ring: attention is given a mask, and blocks of keys that go round have none of their own. Write "
            "--cp-kind all-gather, or leave the mask out (is_causal=True)."
        )
    return cast("torch.Tensor", _Ring.apply(group, size, kwargs, q, k, v))


class AttentionCall(NamedTuple):
    """One call of a kernel: its arguments and results by name."""

    func: Any
    given: dict[str, Any]

    @staticmethod
    def of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> AttentionCall:
        """Names the arguments of a call."""
        schema = schema_of(func)
        given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        return AttentionCall(func, given | {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | kwargs)

    def returned(self, result: Sequence[Any]) -> AttentionCall:
        """The same with what it has returned."""
        return self._replace(given=self.given | dict(zip(self.results, result, strict=True)))

    @property
    def is_backward(self) -> bool:
        """Whether it is that of a backward."""
        return schema_of(self.func).name.endswith("_backward")

    @property
    def results(self) -> list[str]:
        """The names of what it returns, in order."""
        return [result.name for result in schema_of(self.func).returns]

    @property
    def out(self) -> torch.Tensor:
        """The result of attention."""
        return self.given["output"]

    @property
    def sums(self) -> torch.Tensor:
        """The log-sum-exp of each query, as wide as the result has dimensions."""
        sums = self.given["logsumexp"] if "logsumexp" in self.given else self.given["log_sumexp"]
        return sums if sums.dim() == self.out.dim() else sums.unsqueeze(-1)

    def gradients(self, grad: torch.Tensor, **merged: Any) -> list[torch.Tensor]:
        """Calls the kernel of the backward, with a merged result."""
        back = getattr(torch.ops.aten, f"{schema_of(self.func).name.partition('::')[2]}_backward").default
        known = {**self.given, **merged, "grad_out": grad, "grad_out_": grad, "grad_input_mask": [True] * 3 + [False]}
        values: dict[str, Any] = {}
        for argument in schema_of(back).arguments:
            name = argument.name if argument.name in known else _SAME.get(argument.name, argument.name)
            if name in known:
                values[argument.name] = known[name]
        if "attn_bias" in values and values["attn_bias"] is None:
            values["attn_bias"] = grad.new_empty(0)
        return list(back(**values))[:3]


class _Seeing(TorchDispatchMode):
    """Sees the kernel that attention takes."""

    seen: AttentionCall | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in schema_of(func).name and isinstance(result, tuple):
            self.seen = AttentionCall.of(func, args, kwargs or {}).returned(result)
        return result


def _nothing(_: Any) -> Any:
    return None


def _block(q: torch.Tensor, how: dict[str, Any], k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> AttentionCall:
    """Attention to one block, of which autograd keeps nothing."""
    causally: dict[str, Any] = {**how, "is_causal": is_causal}
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))  # so that the kernel gives its log-sum-exp
    with (
        torch.enable_grad(),
        _Seeing() as seeing,
        torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing),
    ):
        F.scaled_dot_product_attention(q, k, v, **causally)
    if seeing.seen is None or "output" not in seeing.seen.given:
        raise errors.ArgumentError(
            "--cp-kind ring: no kernel that gives the log-sum-exp takes this attention, and parts of attention are "
            "merged by it. Write --cp-kind all-gather."
        )
    return seeing.seen


def _passed_on(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the block of the rank before, for one that is sent to the next."""
    return _collectives.all_to_all_single(x, [x.shape[0]], [x.shape[0]], group)


def _sent_on(x: torch.Tensor, y: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends two tensors on as one; returns the copy that is on its way, and the block of the rank before."""
    sent = torch.cat([x.flatten(), y.flatten()])
    return sent, _passed_on(sent, group)


def _half(x: torch.Tensor, causal: bool) -> torch.Tensor:
    return x.chunk(2, 2)[0] if causal else x


def _split(buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [part.view(x.shape) for part, x in zip(buffer.split([k.numel(), v.numel()]), (k, v), strict=True)]


def forward_over_ring(
    group: str, size: int, causal: bool, k: torch.Tensor, v: torch.Tensor, block: Callable[..., AttentionCall]
) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """Calls a kernel for each block of keys and values; returns its first call, and what is merged of all of them.

    Args:
        group: The ranks.
        size: How many there are.
        causal: Whether attention is.
        k: This rank's keys, in one piece.
        v: Its values.
        block: Calls the kernel for keys, values and whether it is causal.
    """
    key, value, sent, got = k, v, None, None
    first = out = sums = cast("Any", None)
    for step in range(size):
        if step:
            key, value = _split(cast("torch.Tensor", got), k, v)
        sent = got = None
        if step < size - 1:
            sent, got = _sent_on(key, value, group)
        if step == 0:
            first = block(key, value, causal)
            out, sums = first.out.float(), first.sums.float()
            continue
        part = block(_half(key, causal), _half(value, causal), False)
        out, sums = _merged(out, sums, part.out.float(), part.sums.float())
        del part
    del sent, got, key, value
    return first, out.to(first.out.dtype), sums.to(first.sums.dtype)


def backward_over_ring(
    group: str,
    size: int,
    causal: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block: Callable[..., list[torch.Tensor]],
) -> tuple[torch.Tensor, ...]:
    """Calls the kernel of the backward for each block; returns the gradients of a rank's queries, keys and values."""
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    key, value, sent, got, on_its_way, followed = k, v, None, None, None, None
    for step in range(size):
        if step:
            key, value = _split(cast("torch.Tensor", got), k, v)
        sent = got = None
        if step < size - 1:
            sent, got = _sent_on(key, value, group)
        parts = block(*(_half(x, causal and step > 0) for x in (key, value)), causal and step == 0)
        if step:
            of_k, of_v = _split(cast("torch.Tensor", followed), k, v)
        on_its_way = followed = None
        of_k, of_v = (_added(x, _grouped(y, x), causal and step > 0) for x, y in ((of_k, parts[1]), (of_v, parts[2])))
        on_its_way, followed = _sent_on(of_k, of_v, group)
        of_q += parts[0][..., : q.shape[-1]]
        del parts
    del sent, got, on_its_way, key, value
    of_k, of_v = _split(cast("torch.Tensor", followed).to(k.dtype), k, v)
    return of_q.to(q.dtype), of_k, of_v


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: str, size: int, how: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        own, causal = (k.contiguous(), v.contiguous()), bool(how.get("is_causal"))
        first, out, sums = forward_over_ring(group, size, causal, *own, partial(_block, q, how))
        given = first.given
        ctx.how, ctx.func = (group, size, causal), first.func
        ctx.given = {n: x for n, x in given.items() if not isinstance(x, torch.Tensor)}
        ctx.small = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.numel() < 8 and n != "output"]
        ctx.save_for_backward(q, *own, out, sums, *(given[n] for n in ctx.small))
        return out[..., : v.shape[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, sums, *small = ctx.saved_tensors
        grad = F.pad(grads[0], (0, out.shape[-1] - grads[0].shape[-1])) if out.shape != grads[0].shape else grads[0]
        call = AttentionCall(ctx.func, {**ctx.given, **dict(zip(ctx.small, small, strict=True))})
        flat = sums.squeeze(-1) if sums.shape[-1] == 1 else sums
        seen = {"query": q, "output": out, "logsumexp": flat, "log_sumexp": flat}

        def block(key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> list[torch.Tensor]:
            return call.gradients(grad, **seen, key=key, value=value, is_causal=is_causal)

        group, size, causal = ctx.how
        return None, None, None, *backward_over_ring(group, size, causal, q, k, v, block)


def _merged(out: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, of_part: torch.Tensor) -> Any:
    """Two parts of attention as one, by their log-sum-exp."""
    out = out - F.sigmoid(of_part - sums) * (out - part)
    return out, sums - F.logsigmoid(sums - of_part)


def _grouped(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of keys that several heads of queries share, without padding."""
    grad = grad[..., : like.shape[-1]]
    return grad if grad.shape[1] == like.shape[1] else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _added(x: torch.Tensor, grad: torch.Tensor, half: bool) -> torch.Tensor:
    """A block's gradient with one more part of it, or of its first half."""
    if not half:
        return x.add_(grad)
    first, second = x.chunk(2, 2)
    return torch.cat([first + grad, second], 2)
