"""FLOPs of an operation, counted so that counting can neither fail a step nor change it.

PyTorch's formulas (`torch.utils.flop_counter`) were written for a counter that a user asks for: some raise (torch 2.11
has none for attention with fewer heads of keys than of queries), and that of packed sequences reads their lengths,
which waits for the device. So attention is counted here, from shapes alone, and any other formula that raises counts as
none. They are imported when an operation is first counted: with them torch 2.14 imports Triton, where it is there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class _Attention(NamedTuple):
    """The positions of an attention operation's arguments: the queries, and how many products over each width it makes.

    `longest` is that of the longest sequence of keys, in operations whose tensors are [..., tokens, heads, width];
    None where they are [batch, heads, tokens, width].
    """

    first: int
    keys: int
    values: int
    longest: int | None = None


_FORWARD, _BACKWARD = _Attention(0, 1, 1), _Attention(1, 3, 2)
_SDPA = "aten::_scaled_dot_product"
_ATTENTION = {
    **{f"{_SDPA}_{kind}_attention": _FORWARD for kind in ("flash", "efficient", "cudnn")},
    **{f"{_SDPA}_{kind}_attention_backward": _BACKWARD for kind in ("flash", "efficient", "cudnn")},
    "aten::_flash_attention_forward": _Attention(0, 1, 1, longest=6),
    "aten::_flash_attention_backward": _Attention(1, 3, 2, longest=9),
    "aten::_efficient_attention_forward": _Attention(0, 1, 1, longest=7),
    "aten::_efficient_attention_backward": _Attention(1, 3, 2, longest=9),
    "torch_attn::_varlen_attn": _Attention(0, 1, 1, longest=6),
    "torch_attn::_varlen_attn_backward": _Attention(1, 3, 2, longest=9),
}
_FLEX = {"FlexAttentionHOP": _FORWARD, "FlexAttentionBackwardHOP": _Attention(0, 3, 2)}
"""Has a formula of PyTorch's own from torch 2.13 on."""
_ON_CPU = {
    f"{_SDPA}_flash_attention_for_cpu": _FORWARD,
    f"{_SDPA}_flash_attention_for_cpu_backward": _BACKWARD,
}


@functools.cache
def _formulas() -> Mapping[Any, Any]:
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Returns the FLOPs of an operation, as PyTorch counts them; 0 where it has no formula, or one that fails.

    Args:
        func: An overload, or an operator of other functions such as `flex_attention`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    packet = getattr(func, "overloadpacket", func)
    formula: Any = _formulas().get(packet)
    if formula is None:
        way = _FLEX.get(type(packet).__name__)
        return 0 if way is None else _attention(way, args)
    way = _ATTENTION.get(getattr(packet, "_qualified_op_name", ""))
    try:
        return _attention(way, args) if way is not None else int(formula(*args, **kwargs, out_val=out))
    except Exception:
        return 0


def fused_on_cpu(func: Any, args: tuple[Any, ...]) -> int:
    """Returns the FLOPs of the CPU's fused attention, which PyTorch does not count; 0 for any other operation."""
    way = _ON_CPU.get(func.name())
    return 0 if way is None else _attention(way, args)


def _attention(way: _Attention, args: tuple[Any, ...]) -> int:
    query, key, value = (tuple(x.shape) for x in args[way.first : way.first + 3])
    tokens = key[-2]
    if way.longest is not None:  # as many queries as there are in all, each with the longest sequence of keys
        longest = args[way.longest] if way.longest < len(args) else None
        tokens = longest if type(longest) is int and longest > 0 else key[-3]
    return math.prod(query[:-1]) * tokens * 2 * (way.keys * query[-1] + way.values * value[-1])
