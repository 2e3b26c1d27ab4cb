"""Caches of keys and values, which a layer writes to while it runs, in regions that are run again.

Problem. A layer of a Hugging Face model appends its keys and values to a cache that it is given, and reads the whole
back. When it is run again in backward, it would append a second time. The library's own checkpointing throws the cache
away, with a warning, and fails where it was filled before (the mask is made for it).

Idea. When a region begins, a note is taken of what the cache holds: references, no copies. The replay is given a cache
made from the note, so it reads what the forward read, and what it writes is forgotten. Keys of an earlier call keep
their gradient: the graph is that of the forward, and the replay only rebuilds values.

Invariants. The forward works on the caller's cache, which ends as it would without a region. What is noted must stay
as it is; a cache that is written in place is found by the versions of its tensors, and refused in words.

Cost. A cache keeps keys and values of every layer alive; regions do not change that. So in training, where the default
of most configurations is to fill one that nobody reads, a model that is called without a word on it is told
`use_cache=False` (`Root`), as the library's own checkpointing does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from .. import errors
from ..values import replay
from .placed import Placed

LIBRARY = "transformers"


def is_cache(value: object) -> bool:
    """Whether this is one of the library's caches, or a class derived from one."""
    return any(
        cls.__name__.endswith("Cache") and cls.__module__.partition(".")[0] == LIBRARY for cls in type(value).__mro__
    )


class Note:
    """What a cache held at one moment.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: object) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._cache = self._copied(cache, self._noted)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach().requires_grad_(tensor.requires_grad)  # shares memory and version, not the graph
        self._tensors.append((alias, alias._version))
        return alias

    def _copied(self, value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return leaf(value)
        if type(value) in (list, tuple):
            return type(value)(self._copied(v, leaf) for v in value)
        if type(value) is dict:
            return {k: self._copied(v, leaf) for k, v in cast("dict[Any, Any]", value).items()}
        kinds = {cls.__name__ for cls in type(value).__mro__}
        if not (is_cache(value) or any(name.endswith(("CacheLayerMixin", "Layer")) for name in kinds)):
            return value
        made = copy.copy(value)
        made.__dict__.update({name: self._copied(v, leaf) for name, v in vars(value).items()})
        return made

    def check(self, path: str) -> None:
        """Refuses a cache that was written in place since.

        Raises:
            ArgumentError: It was.
        """
        if any(tensor._version != version for tensor, version in self._tensors):
            raise errors.ArgumentError(
                f"the cache of keys and values that {path or 'the model'} was given with gradients on is written in "
                "place, so what it held when the region ran is gone when it is run again.\n"
                "  Pass use_cache=False, or a DynamicCache, which appends; a static cache is for torch.no_grad()."
            )

    def cache(self) -> Any:
        """A cache as it was then, to be written to."""
        return self._copied(self._cache, lambda tensor: tensor)


class Inside(Placed):
    """What stands as `forward` inside of a region: the module's own, given the caches that the forward was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        forward = self.plain
        if self.idle or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if getattr(self.module, "gradient_checkpointing", False) is True and self.module.training:
            raise errors.ArgumentError(errors.other_checkpointing_inside(self.path))
        if not any(map(is_cache, args)) and not any(map(is_cache, kwargs.values())):
            return forward(*args, **kwargs)
        first: list[bool] = []

        def note() -> list[Note]:
            first.append(True)
            return [Note(value) for value in (*args, *kwargs.values()) if is_cache(value)]

        notes = replay(note)()
        if first:
            result = forward(*args, **kwargs)
            for one in notes:
                one.check(self.path)
            return result
        for one in notes:
            one.check(self.path)
        caches = iter(notes)
        args = tuple(next(caches).cache() if is_cache(value) else value for value in args)
        kwargs = {name: next(caches).cache() if is_cache(value) else value for name, value in kwargs.items()}
        return forward(*args, **kwargs)


class Root(Placed):
    """What stands as `forward` on a whole model: in training, no cache unless the caller says something about it."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module, path)
        names = list(inspect.signature(module.forward).parameters)
        self._place = names.index("use_cache") if "use_cache" in names else -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if not self.idle and len(args) <= self._place and self.module.training and torch.is_grad_enabled():
            said = [kwargs.get(name) for name in ("use_cache", "past_key_values", "cache_params")]
            if all(value is None for value in said) and not any(map(is_cache, args)):
                kwargs["use_cache"] = False
        return self.plain(*args, **kwargs)
