"""Regions and saved calls while `torch.compile` traces: what they say, as tags on the operations of the graph.

Dynamo traces `torch.utils.checkpoint` as a call of a subgraph. AOTAutograd runs it under the contexts that come with
the call, which tag each operation: "save" or "recompute". The partitioner, which splits the joint graph into forward
and backward, reads the tags. Calls nest, and the innermost tag wins.

Tags are not part of the key of AOTAutograd's cache, the `cache_hash` of the contexts is: two that tag differently need
two hashes. A view in a saved call is never kept for itself, nor is a cast: both are made again from what they were made
of. Modules that are recomputed together share one number, or the partitioner would keep what one passes to the next
(`cleanup_recompute_tags` keeps what crosses to a region of a higher number).

Dynamo cannot break a graph inside a subgraph. Where it would have to, the function that it has begun to trace runs as
it is, and each function that is called there is traced on its own, down to the one that calls `checkpoint`. That one,
`region.trace`, is marked `within_caller`: it is traced as a part of its callers only, so where it runs at all, the
region cannot be traced, and it calls the engine.

Private: `ac_graph_id`, the number: torch 2.13 gives it to the contexts, torch 2.11 writes it onto the subgraph, from
where the metadata of what runs has it. The graph that is being made, and the fake tensor of a parameter in it: without
them no product is known to be one with a parameter. How Dynamo treats a function, and the callback by which it sees one
called.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.fx.traceback
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_C: Any = torch._C
Contexts = Callable[[], Any]
Saves = Callable[[Any, Sequence[Any]], bool]


class _Tags:
    """The parts of the contexts of one kind of call; pickled, as for a key of a cache, it is its name alone.

    Dynamo of torch 2.11 and 2.12 would take a tuple apart.
    """

    def __init__(self, name: Callable[[], str], begin: Callable[[], Saves], first: bool | None) -> None:
        self.name, self.begin, self.first = name, begin, first

    def __reduce__(self) -> Any:
        return str, (f"torch_recompute: {self.name()} {self.first}",)


class _Contexts(functools.partial[Any]):
    """A `context_fn` that is known to Dynamo, and has a name in AOTAutograd's cache."""

    @property
    def cache_hash(self) -> str:
        return self.args[0].__reduce__()[1][0]


def contexts(name: Callable[[], str], begin: Callable[[], Saves], first: bool | None = None) -> Contexts:
    """Makes contexts for `call`.

    Args:
        name: Returns the key in AOTAutograd's cache: what tags otherwise has another name.
        begin: Called when a region is traced; returns what says of each operation in it whether it is saved.
        first: Of modules that are recomputed together, whether this is the first; None where it is alone.
    """
    return _Contexts(_tagged, _Tags(name, begin, first))


def _tagged(tags: _Tags) -> Any:
    """Makes torch's contexts of a region, the first of which tags the nodes of an operation once they are there.

    Torch 2.13 tags so, too. Torch 2.11 tags before, when the operands are not known and the outermost says last. What
    `around` has of nested regions, and `said` of one inside that has no contexts, is there in torch 2.11 alone.
    """
    saves, around = tags.begin(), torch.fx.traceback.current_meta.get("ac_graph_id")

    def kept(operation: Any, nodes: Sequence[Any]) -> bool:
        return not (getattr(operation, "is_view", False) or str(operation) in _CASTS) and saves(operation, nodes)

    def dispatch(mode: Any, operation: Any, *given: Any) -> Any:
        proxies = _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY)
        graph = [] if proxies is None else proxies.tracer.graph.nodes  # in a first pass, no graph is made
        meta, before = torch.fx.traceback.current_meta, len(graph)
        said, number = meta.get("recompute"), around or getattr(mode, "ac_graph_id", None) or meta.get("ac_graph_id")
        _chain[0] = number if tags.first else _chain[0]
        meta["ac_graph_id"] = mode.ac_graph_id = _chain[0] if tags.first is False else number
        out = plain.__torch_dispatch__(mode, operation, *given)
        meta["recompute"] = said
        nodes = [*itertools.islice(reversed(graph), len(graph) - before)][::-1]
        for node in nodes:
            node.meta["recompute"] = said or (Policy.MUST_SAVE if kept(operation, nodes) else Policy.PREFER_RECOMPUTE)
        return out

    forward, replay = create_selective_checkpoint_contexts(lambda _, operation, *args, **kwargs: kept(operation, ()))
    plain: Any = type(forward)
    tagging = {"__torch_dispatch__": dispatch, "supports_higher_order_operators": True}  # no rule knows a class of ours
    forward.__class__ = type("Tagging", (plain,), tagging)
    return forward, replay


_chain: list[Any] = [None]  # the number of the region that was traced last of those that begin a chain
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
SAVED = contexts(lambda: "saved call", lambda: lambda operation, nodes: True)


def call(fn: Callable[..., Any], args: tuple[Any, ...], tagged: Contexts | None) -> Any:
    """Calls `fn(*args)` with its operations tagged, all as recomputed where `tagged` is None."""
    from .partitioning import in_next_graph

    in_next_graph()
    more: dict[str, Any] = {} if tagged is None else {"context_fn": tagged}
    # The second setting is torch's own. It is said for AOTAutograd's cache, whose key has it, and not the copies.
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=True, **more)


def exporting() -> bool:
    """Returns whether a graph is exported; Dynamo of torch 2.11 takes torch's own function for true in each graph."""
    return torch.compiler.is_exporting()


cut: Counter[str] = Counter()
"""How often each region ran by the engine in compiled code, because something in it could not be compiled."""

_F = TypeVar("_F", bound=Callable[..., Any])
_frames = _C._dynamo.eval_frame
_strategy, _action = _frames._FrameExecStrategy, _frames._FrameAction

set_compiler: Callable[[Any], Any] = _frames.set_eval_frame
"""Sets what compiles the functions that this thread calls, None for nothing; returns what did before."""


def within_caller(fn: _F) -> _F:
    """Marks a function that Dynamo traces as a part of its callers only. What it calls is compiled all the same."""
    _frames.set_code_exec_strategy(fn.__code__, _strategy(_action.SKIP, _action.DEFAULT))
    return fn


@torch._disable_dynamo
def end_graph() -> None:
    """Ends the graph that is traced: what called this runs as it is, between two graphs."""


def as_it_is(fn: _F) -> _F:
    """Marks a function, and those written in it, as above. What it calls is not compiled then, either."""
    for code in (fn.__code__, *fn.__code__.co_consts):
        if isinstance(code, types.CodeType):
            _frames.set_code_exec_strategy(code, _strategy(_action.SKIP, _action.SKIP))
    return fn


def say(text: str) -> None:
    """Warns of something while a graph is traced; of this call nothing is in the graph."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


# What `torch.compiler.assume_constant_result` sets, which imports Dynamo: a second.
exporting._dynamo_marked_constant = say._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
