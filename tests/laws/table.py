"""The class of a case, a program of a few stages, and the table that cases are registered in.

A program is a few stages, called one after the other: the first with `args` and `kwargs`, each later one with what the
one before returned. `placements.py` puts regions and saved calls around them. `cases.py` is the table.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

Stage = Callable[..., Any]


def for_each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test: thousands of small ones take longer to tell than to run.

    The first value that fails is named in the error.
    """
    product = list(itertools.product(*values.values()))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            row: tuple[Any, ...] = ()
            try:
                for row in product:
                    test(**given, **dict(zip(values, row, strict=True)))
            except Exception as error:
                raise AssertionError(f"for {', '.join(str(getattr(v, 'name', v)) for v in row)}: {error}") from error

        functools.update_wrapper(run, test)
        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in values]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass
class Program:
    """Stages, the arguments of the first, and everything that holds parameters, buffers or leaves."""

    stages: tuple[Stage, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    holds: tuple[Any, ...] = ()

    def _held(self):
        for i, thing in enumerate((*self.stages, *self.holds)):
            yield f"{i}.", getattr(thing, "__self__", thing)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets a gradient, by name; each tensor once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, thing in self._held():
            if isinstance(thing, nn.Module):
                found.update((id(p), (prefix + n, p)) for n, p in thing.named_parameters() if p.requires_grad)
        tensors = _pytree.tree_leaves((self.args, self.kwargs, [t for t in self.holds if torch.is_tensor(t)]))
        for i, t in enumerate(tensors):
            if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf:
                found.setdefault(id(t), (f"input {i}", t))
        return dict(found.values())

    def buffers(self) -> dict[str, torch.Tensor]:
        """What modules update while they run, by name."""
        held = [(prefix, m) for prefix, m in self._held() if isinstance(m, nn.Module)]
        return {prefix + n: b for prefix, m in held for n, b in m.named_buffers()}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    make: Callable[[], Program]
    inplace: bool = False
    double: bool = False
    backward_inside: bool = False

    def build(self) -> Program:
        """The program, with the same weights and inputs each time."""
        torch.manual_seed(len(self.name))
        return self.make()


CASES: list[Case] = []


def case(make: Callable[[], Program] | None = None, **flags: bool):
    """Adds a program to the table under its function's name."""
    if make is None:
        return functools.partial(case, **flags)
    CASES.append(Case(make.__name__, make, **flags))
    return make


def rand(*size: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype).requires_grad_(grad)


def program(*stages: Stage, args: tuple | None = None, holds: tuple = (), **kwargs: Any) -> Program:
    """A program; by default its first stage takes one matrix that requires grad."""
    return Program(stages, (rand(4, 8),) if args is None else args, kwargs, holds)
