"""The actions of one stage of a pipeline, on fake tensors: a stage is cut out of the whole model while that runs.

Problem. A plan for a pipeline is made from the whole model, which any rank can build on meta; the stages are built
elsewhere, in as many ways as there are training scripts. What a stage takes must be known without them.

Idea. The whole model's forward runs, and only what lies between the first and the last layer of the stage counts
(`actions.py`). So whatever the model does between its layers is done. Parameters and buffers belong to the stages whose
operations read them, so tied weights lie on both.

Each stage runs two microbatches, one after the other (see `plan/stage_memory.py`).

Rejected: a copy of the model without the other layers, which only models that expect it can run; torch.export, which
not every model survives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import _compat
from .._compat.fakes import FakeTensorMode
from ..plan.apply import apply
from ..plan.inflight import BACKWARD, INPUTS
from ..plan.plan import Plan
from ..simulation.faking import Faker
from ..simulation.places import Places
from ..simulation.pretending import Pretend
from ..state import DEFAULT
from .actions import Actions, Books, Piece, Seen, Whole


class Pieces:
    """A model that can be run stage by stage.

    Args:
        model: The whole model.
        args: The positional arguments of a call with one microbatch.
        kwargs: Its keyword arguments.
        loss: From the model's output to a scalar.
        device: Where it is to run.
        rounding: What sizes are rounded up to.
        paths: Its segments.
        stages: The segments of each stage: the first, and the first of the next.
        composed: See `simulate_step`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        loss: Callable[[Any], torch.Tensor],
        device: torch.device,
        rounding: int,
        paths: Sequence[str],
        stages: Sequence[tuple[int, int]],
        composed: str = "",
    ) -> None:
        fakes = FakeTensorMode()
        faker = Faker(fakes, device)
        copy: nn.Module = faker.copy(model)
        for parameter in copy.parameters():
            parameter.grad = None
        places = Places({id(module): path for path, module in copy.named_modules()})
        self._whole = Whole(
            copy,
            faker.arguments(args, kwargs or {}),
            loss,
            device,
            rounding,
            places,
            Pretend(fakes, lambda: places.now()[1], composed),
            [copy.get_submodule(path) for path in paths],
            stages,
            [Seen() for _ in paths],
        )
        with self._running():
            self._look()

    @contextlib.contextmanager
    def _running(self) -> Generator[None]:
        states = [(ambient, ambient.capture()) for ambient in DEFAULT]
        try:
            with torch.inference_mode(False), torch.enable_grad(), self._whole.pretend:
                yield
        finally:
            for ambient, state in states:
                ambient.restore(state)

    def _look(self) -> None:
        """The first run: what each segment is given and returns."""

        def before(seen: Seen) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
                leaves = _compat.tree_leaves((args, kwargs))
                floats = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
                seen.places = [i for i in floats if leaves[i].requires_grad] or floats[:1]
                seen.inputs = [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in seen.places]

            return hook

        def after(seen: Seen) -> Any:
            def hook(_: nn.Module, args: Any, result: Any) -> None:
                leaves, spec = _compat.tree_flatten(result)
                leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
                seen.output = _compat.tree_unflatten(leaves, spec)

            return hook

        with contextlib.ExitStack() as stack:
            for module, seen in zip(self._whole.segments, self._whole.seen, strict=True):
                stack.callback(module.register_forward_pre_hook(before(seen), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(seen)).remove)
            args, kwargs = self._whole.call
            self._whole.model(*args, **kwargs)

    def run(self, stage: int, plan: Plan, kinds: Iterable[str]) -> Piece:
        """Runs two microbatches through a stage.

        Args:
            stage: Its number.
            plan: What is recomputed, in the paths of the whole model.
            kinds: The kinds of its actions.
        """
        found = self._run(stage, plan, halves=INPUTS in kinds)
        if INPUTS in kinds and BACKWARD in kinds:
            own = {**self._run(stage, plan, halves=False).bytes.own, **found.bytes.own}
            found = replace(found, bytes=replace(found.bytes, own=own))
        return found

    def _run(self, stage: int, plan: Plan, *, halves: bool) -> Piece:
        with self._running():
            for parameter in self._whole.model.parameters():
                parameter.grad = None
            handle = apply(self._whole.model, plan)
            try:
                return Actions(self._whole, stage, halves).piece()
            finally:
                handle.remove()
                for parameter in self._whole.model.parameters():
                    parameter.grad = None

    def optimizer(self, make: Callable[[Any], torch.optim.Optimizer], names: Iterable[str]) -> tuple[int, int]:
        """Bytes of an optimizer's state for some parameters, and the most that its step takes besides."""
        parameters = [self._whole.model.get_parameter(name) for name in names]
        with self._running():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer = make(parameters)
            optimizer.step()
            books = Books(self._whole.pretend, self._whole.places, self._whole.device, self._whole.rounding)
            books.track(optimizer)
            state = books.on(self._whole.device).live_by_category["optimizer"]
            before = books.on(self._whole.device).live_bytes
            books.counting = True
            with books:
                optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            return state, books.on(self._whole.device).peak_bytes - before
