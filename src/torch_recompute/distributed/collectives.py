"""Keeps the results of collectives, so that a replay does not communicate again.

A replay repeats what the region did, communication included, on all ranks in the same order. With the result kept from
the forward there is less communication, and no rank waits for another in the replay; but the result is memory, and that
of an all-gather is N times as large as what went in. So the user chooses: in a plan by a word in `keep` (`@reduction`,
`@collective`), in a function by `keep_collectives`. `plan/calls.py` implements it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .. import errors
from .._torch import tracing
from ..plan.calls import COLLECTIVES, KeepCollectives
from ..plan.choice import Target
from ..plan.traced import collectives_saved
from ..state.tape import thread

P = ParamSpec("P")
R = TypeVar("R")
_TAGS = {kind: collectives_saved(kind) for kind in COLLECTIVES}


def keep_collectives(fn: Callable[P, R], *, kind: str = "@collective") -> Callable[P, R]:
    """Makes saved calls of the collectives in `fn`: a replay of the region around it does not repeat them.

        layer = recompute(keep_collectives(block))

    For functional collectives, those of `torch.distributed._functional_collectives` and what DTensor calls when it lays
    out a tensor again. Collectives in place (`dist.all_reduce(x)`) are repeated; make a saved call of the function that
    makes one, `no_recompute(reduce)(x)`. What backward itself communicates is as before.

    Args:
        fn: The region's function, or a part of it. Outside of a region it is the plain call.
        kind: "@collective" for all, or "@reduction" for all but all-gathers: those whose result is no larger than what
            goes in.

    Returns:
        A callable with `fn`'s signature. While it runs in a region, each operation takes some 20 us more.

    Raises:
        ArgumentError: `fn` is not callable, or there is no such kind.
    """
    if not callable(fn):
        raise errors.ArgumentError(errors.not_callable("keep_collectives", fn))
    known: dict[str, str] = {Target.of(calls=name): name for name in COLLECTIVES}
    if kind not in known:
        raise errors.ArgumentError(
            f"keep_collectives: kind={kind!r}, where one of {', '.join(map(repr, known))} is expected."
        )

    @functools.wraps(fn, updated=())
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        if thread.traced:
            return tracing.call(lambda *args: fn(*args, **kwargs), args, _TAGS[known[kind]])
        if thread.run is None:
            return fn(*args, **kwargs)
        with KeepCollectives((known[kind],)):
            return fn(*args, **kwargs)

    return kept
