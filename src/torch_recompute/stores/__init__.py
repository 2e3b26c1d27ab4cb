"""Where the tensors wait that a region keeps between forward and replay.

A region keeps its inputs, and what its saved calls store. Where these bytes are is a decision of its own: on the
device, in host memory, sharded over other ranks. A `Store` is that decision; the engine calls `put` once per tensor
in forward and `get` when backward needs it, and knows nothing else about it.

`store.py` is the protocol, and what the engine asks of every store; `host.py` is host memory: which tensors go there;
`transfers.py` copies them; `disk.py` is a file, to which they go in the same order; `measured.py`
measures how fast the copies are, and keeps all that is measured on this machine.
"""

from .disk import OnDisk
from .host import OnHost
from .measured import Bandwidth, bandwidth
from .store import Hooks, Kept, OnDevice, Store

__all__ = ["Bandwidth", "Hooks", "Kept", "OnDevice", "OnDisk", "OnHost", "Store", "bandwidth"]
