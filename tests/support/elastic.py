"""Elastic regions whose evictions are scripted, in the place of a pool that watches memory."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from torch_recompute.engine.elastic import ElasticCall


class Script:
    """Memory of elastic regions that evicts by a script.

    Args:
        when: "never"; "forward", when a forward has ended; "half", when a backward that retains its graph has ended;
            "inside", when the forward of another region begins or ends, so also in the middle of an outer one.
        saved: Whether what saved calls keep goes too.
        keep: Whether calls keep what they save at all.
    """

    def __init__(self, when: str = "never", saved: bool = False, keep: bool = True) -> None:
        self.when, self.saved, self.keep = when, saved, keep
        self.evicted = self.replays = self.failures = 0
        self.retries = 0
        self._calls: list[weakref.ref[ElasticCall]] = []
        self._lock = threading.RLock()

    def calls(self, fn: Any, name: str, what: Any = None) -> Any:
        """As `Elastic.calls`."""
        return functools.partial(ElasticCall, self)

    def evict(self) -> None:
        """Evicts what can be evicted."""
        with self._lock:
            for ref in self._calls:
                call = ref()
                self.evicted += call is not None and call.evict(self.saved)

    def watch(self, call: ElasticCall) -> None:
        pass

    def agree(self, call: ElasticCall) -> None:
        pass

    def forward(self, call: ElasticCall) -> bool:
        if self.when == "inside":
            self.evict()
        self._calls = [*(ref for ref in self._calls if ref() is not None), weakref.ref(call)]
        return self.keep

    def forward_ended(self, call: ElasticCall) -> None:
        if self.when in ("forward", "inside"):
            self.evict()

    def interrupted(self, call: ElasticCall) -> None:
        pass

    def backward(self, call: ElasticCall) -> None:
        pass

    def waits(self, call: ElasticCall) -> None:
        if self.when == "half":
            self.evict()

    def replay(self, call: ElasticCall) -> None:
        self.replays += 1

    def replay_ended(self, call: ElasticCall) -> None:
        pass

    def failed(self, call: ElasticCall, attempt: int) -> bool:
        self.failures += 1
        return attempt < self.retries

    def unrepeatable(self, replaying: bool = False) -> str:
        return ""

    def shortage(self) -> str:
        return "Nothing is left."
