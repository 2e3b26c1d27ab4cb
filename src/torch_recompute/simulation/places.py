"""Where a simulated step is: its phase, the module that runs, or whose backward runs.

A module is on a stack while it is called. In backward no module runs; there the node of the graph tells, by the number
that autograd gave it when the operation of some module made it. In a replay modules are called again, below the region.
Calls of a module are numbered, in backward and in replays by that node, too. A replay ends by an exception, which no
hook of a module sees; so what lies on the stack belongs to a run of a region (or to none), and what does not belong to
the present one is not looked at. Runs are known by `id`, since whoever refers to one keeps alive what it has rebuilt.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import _compat
from ..values import thread

Calls = tuple[tuple[str, int], ...]
PHASES = ("forward", "loss", "backward", "replay", "optimizer")


class Places:
    """Knows where the step is.

    Args:
        names: The paths of modules, by `id`.

    Attributes:
        step: The part of the step that runs: any phase but "replay", which is found out.
        calls: Of the module that was last found to run and those around it, the path and the number of the call.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.step = "forward"
        self._names = names
        self.calls: Calls = ()
        self._stack: list[tuple[str, int, Calls]] = []
        self._nodes: dict[int, tuple[str, Calls]] = {}
        self._counts: Counter[str] = Counter()

    def now(self) -> tuple[str, str]:
        """The phase and the path of the module; "" where that is the model itself or none."""
        run = thread.run
        if self.step == "optimizer":
            self.calls = ()
            return "optimizer", ""
        replaying = run is not None and run.replaying
        if replaying or self.step == "backward":
            node = _compat.current_node()
            found = self._nodes.get(_compat.sequence_of(node)) if node is not None else None
            module, self.calls = found or ("", ())
            if replaying:
                return "replay", self._running(run)
            self._stack.clear()
            return "backward", module
        module, _, self.calls = self._stack[-1] if self._stack else ("", 0, ())
        self._nodes.setdefault(_compat.sequence_number() - 1, (module, self.calls))  # later ones may have made no node
        return self.step, module

    def _running(self, run: Any) -> str:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i][1] == id(run):
                del self._stack[i + 1 :]
                return self._stack[i][0]
        return run.name

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Follows the calls of modules."""

        def enter(module: nn.Module, _args: object) -> None:
            name = self._names.get(id(module))
            if name is not None:
                self._counts[name] += thread.run is None or not thread.run.replaying
                around = self._stack[-1][2] if self._stack else ()
                self._stack.append((name, id(thread.run), (*around, (name, self._counts[name]))))

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            name = self._names.get(id(module))
            if name is not None and any(name == on for on, *_ in self._stack):
                while self._stack.pop()[0] != name:
                    pass

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()
            self._nodes.clear()
            self._counts.clear()
