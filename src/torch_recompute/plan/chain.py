"""Modules that are recomputed together, and whether they can be: what lies between the members of a group.

The regions themselves are in `apply.py`. A chain holds what one member leaves for the next, on each thread by itself,
and refuses modules that are sharded apart: one is replayed while another's parameters are gathered.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from .. import errors
from .._discard import Discard

_FREED = ("FULL_SHARD", "HYBRID_SHARD")


class Chain:
    """Modules recomputed together, and the calls of them that run on this thread.

    Attributes:
        modules: The modules, in the order of their calls.
    """

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module | None = None) -> None:
        self.modules = list(modules)
        # Weak, and not in a copy: whoever copies one layer must not get the whole model with it.
        self._model = None if model is None else weakref.ref(model)
        self._local = threading.local()

    def __getstate__(self) -> Any:
        return self.modules  # a copy of the model has calls of its own

    def __setstate__(self, modules: list[nn.Module]) -> None:
        self.__init__(modules)

    def check(self) -> None:
        """Raises if the modules are sharded apart: one is replayed in the other's backward, without its parameters."""
        asked = (getattr(module, "_get_fsdp_state", None) for module in self.modules)
        states: list[Any] = [ask() for ask in asked if ask is not None]
        if any(state is not states[0] for state in states):
            raise errors.ArgumentError(
                f"the plan recomputes {len(self.modules)} layers together, but each of them was sharded on its own: in "
                "backward the earlier ones are replayed while only the last one's parameters are gathered.\n"
                "  Shard what is recomputed together as one unit:  fully_shard([layers[0], layers[1]])\n"
                "  or recompute them one by one:  recompute_num_layers=1"
            )
        model = None if self._model is None else self._model()
        if model is not None:
            around = [_wrapper_around(model, module) for module in self.modules]
            if any(wrapper is not around[0] for wrapper in around):
                raise errors.ArgumentError(
                    f"the plan recomputes {len(self.modules)} layers together, but FullyShardedDataParallel was put "
                    "around each of them alone: in backward the earlier ones are replayed while only the last one's "
                    "parameters are sure to be there.\n"
                    "  Wrap a module that holds all of them, or keep parameters after forward "
                    "(ShardingStrategy.SHARD_GRAD_OP),\n"
                    "  or recompute them one by one:  recompute_num_layers=1"
                )
            self._model = None  # a wrapper is found by looking for it, and stays: once is enough

    @property
    def waiting(self) -> Discard | None:
        """The call whose result the next member is about to take."""
        return getattr(self._local, "call", None)

    @waiting.setter
    def waiting(self, call: Discard | None) -> None:
        self._local.call = call


def _wrapper_around(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The innermost FullyShardedDataParallel around a module that frees its parameters between forward and backward.

    That of the first generation is a module of its own, and the module inside knows nothing of it.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    found: nn.Module | None = None
    for outer in model.modules():
        strategy: Any = outer.sharding_strategy if isinstance(outer, fsdp.FullyShardedDataParallel) else None
        if strategy is not None and strategy.name in _FREED:
            inside = outer is not module and any(inner is module for inner in outer.modules())
            found = outer if inside else found  # `modules()` names the outer ones first
    return found
