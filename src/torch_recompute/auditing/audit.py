"""`audit`: one forward, then each region once more, last one first as backward would, and the rows that come of it.

A region inside another runs again on its own and within that one, as in a backward. All of it happens in one run of
the recorder, so that the modes around the second runs are those of the forward.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn

from .. import errors
from .._compat.storages import set_versions, versions_of
from .._reach import Reach
from .._tree import check_call
from ..memory.ledger import storages
from ..memory.saved import module_names
from ..plan import Choice, Plan, apply
from .findings import Findings
from .listing import Audit
from .recorder import Record, Recorder
from .rerun import run_again
from .surroundings import Generators, Places
from .waits import Calls

_WHAT = "audit"


def _no_regions(model: str) -> str:
    """Text for an audit of a model that calls no region."""
    return (
        f"audit: {model} called no region that backward would replay, so there is nothing to run twice.\n"
        '  Name the modules to look at, audit(model, (x,), modules=["layers.*"]), or place regions first: '
        "recompute(fn), apply(model, plan). A region whose inputs and parameters require no grad is never replayed."
    )


def audit(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    modules: Sequence[str] = (),
    perturb: float = 0.0,
) -> Audit:
    """Runs each region of a model twice and names what differs, what syncs, what mutates.

        found = audit(model, (batch,))
        print(found)
        assert found, found

    The model is called once, with grad, on its arguments as they are; then every region's function is run again under
    its recorded state, as a replay would, but to its end. No backward runs. Buffers, attributes, generators and tensors
    that operations wrote to are put back; gradients are not touched. Every operation is looked at: a small
    model takes about thirty times its forward.

    Found are operations whose results are not the same (the first of each region), choices of experts that come out
    otherwise, waits for the device, and what each run changes outside of itself. Not looked into are tensors of
    subclasses (`DTensor`), what runs on other threads, and what compiled code does inside.

    Args:
        model: A module with a plan, or any callable that calls regions.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        modules: Paths of modules, or globs over paths such as "layers.*": these are made regions for the time of the
            audit. For a model that has none yet.
        perturb: Run each region a third time with its floating inputs off by this much, relative to themselves (0.002
            is half a step of bfloat16), and report the choices of experts that come out otherwise.

    Returns:
        The rows. True if there are none.

    Raises:
        ArgumentError: `model` cannot be called, `args` is no tuple, `kwargs` no dict; nothing is called `modules`, or
            the model calls no region; `perturb` is no number from 0 to 1.
    """
    check_call(_WHAT, model, args, kwargs)
    if not isinstance(perturb, (int, float)) or isinstance(perturb, bool) or not 0 <= perturb <= 1:
        raise errors.ArgumentError(
            f"audit(perturb=...) is how much to change the inputs of each region relative to themselves, a number from "
            f"0 to 1, but got {errors.say(perturb)}\n"
            "  Write perturb=0.002, half a step of bfloat16."
        )
    with _placed(model, modules):
        found = _Audit(model, args, kwargs or {}, float(perturb)).run()
    if not found.regions:
        raise errors.ArgumentError(_no_regions(getattr(model, "__name__", type(model).__name__)))
    return found


@contextlib.contextmanager
def _placed(model: Any, patterns: Sequence[str]) -> Generator[None]:
    """Makes regions of the modules of these names for the time being."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise errors.ArgumentError(
            f"audit(modules=...) takes a list of paths or globs, but got {errors.say(patterns)}\n"
            '  Write audit(model, (x,), modules=["layers.*"]); paths are those of model.named_modules().'
        )
    if not patterns:
        yield
        return
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(
            "audit(model, modules=...) finds modules by their paths in a torch.nn.Module, but got "
            f"{errors.say(model)}\n"
            "  Pass the module, or a function that calls regions, without modules=."
        )
    called = {
        path: module
        for path, module in model.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
    }
    paths: dict[str, None] = {}
    for pattern in patterns:
        matching = [path for path in called if fnmatch.fnmatchcase(path, pattern)]
        if not matching:
            raise errors.ArgumentError(
                f"audit(modules=[{pattern!r}]): {type(model).__name__} has no module of this path that is called.\n"
                "  Paths are those of model.named_modules(); a glob matches whole paths, dots included; a ModuleList "
                "is never called."
            )
        paths.update(dict.fromkeys(matching))
    handle = apply(model, Plan(tuple(Choice((path,)) for path in paths), "audit"))
    try:
        yield
    finally:
        handle.remove()


class _Audit:
    """One audit."""

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], perturb: float
    ) -> None:
        self._call = model, args, kwargs
        values = [*args, *kwargs.values()]
        reach = self._reach = Reach(model, [value for value in values if isinstance(value, nn.Module)])
        self._names = module_names(model, reach)
        self._modules = [(module, self._names.get(id(module), "")) for module in reach.modules]
        self._generators = [*reach.generators, *(v for v in values if isinstance(v, torch.Generator))]
        self._perturb = perturb

    def run(self) -> Audit:
        """Forward, second runs, and everything as before."""
        recorder = Recorder(self._names)
        places, generators = Places(self._modules, [self._call[0]]), Generators(self._generators)
        namespaces = [(held, dict(held)) for held in self._reach.buffers()]
        stored = {id(s): s for held, _ in namespaces for buffer in held.values() for _, s in storages(buffer)}
        buffers = [(storage, storage.clone()) for storage in stored.values() if storage.device.type != "meta"]
        versions = versions_of(buffer for held, _ in namespaces for buffer in held.values() if buffer is not None)
        try:
            with torch.inference_mode(False), torch.enable_grad(), Calls(recorder):
                torch.clear_autocast_cache()
                found, _ = recorder.run(self._both, (recorder,), {})
                torch.clear_autocast_cache()
        finally:
            for held, before in namespaces:
                held.clear()
                held.update(before)
            for storage, content in [*buffers, *recorder.kept.values()]:
                storage.copy_(content)
            set_versions(versions)
            places.restore()
            generators.restore()
            recorder.end()
        return found

    def _both(self, recorder: Recorder) -> Audit:
        model, args, kwargs = self._call
        result = model(*args, **kwargs)  # alive to the end: its graph is what backward would replay
        firsts = [record for record in recorder.records.values() if record.frame.replays]
        findings = Findings(self._modules)
        for first in reversed(firsts):

            def around(fn: Any, first: Record = first) -> Places:
                return Places(self._modules, [fn], first.scopes.values())

            findings.add(first, run_again(recorder, first, around))
            if self._perturb:
                findings.add_flips(first, run_again(recorder, first, around, self._perturb))
        del result
        regions = tuple(record.frame.name for record in firsts)
        return Audit(findings.sorted(regions), regions, self._perturb)
