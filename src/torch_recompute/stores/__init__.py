"""Where the tensors wait that a region keeps between forward and replay.

A region keeps its inputs, and what its saved calls store. Where these bytes are is a decision of its own: on the
device, in host memory, sharded over other ranks. A `Store` is that decision; the engine calls `put` once per tensor
in forward and `get` when backward needs it, and knows nothing else about it.

`store.py` is the protocol, and what the engine needs of a store. The rest is loaded when it is first used: `host.py`
is host memory, and which tensors go there; `transfers.py` copies them; `disk.py` is a file, to which they go in the
same order; `measured.py` measures how fast the copies are, and keeps all that is measured on this machine.
"""

from typing import TYPE_CHECKING

from .store import Hooks, OnDevice, Store, Stored

if TYPE_CHECKING:
    from .disk import OnDisk
    from .host import OnHost
    from .measured import Bandwidth, bandwidth
else:

    def __getattr__(name):
        from importlib import import_module

        module = {"OnDisk": "disk", "OnHost": "host", "Bandwidth": "measured", "bandwidth": "measured"}.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f"{__name__}.{module}"), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = ["Bandwidth", "Hooks", "Stored", "OnDevice", "OnDisk", "OnHost", "Store", "bandwidth"]
