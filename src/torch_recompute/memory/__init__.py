"""The lens: how many bytes of tensors are alive, how many at the peak, and what they are for.

Problem. Every claim of this library is a number of bytes, and the usual sources of that number do not serve. The
CUDA allocator says how much but not what for, rounds, and does not exist on CPU; a sum of `tensor.nbytes` counts a
view as if it were memory; saved tensors live in C++ where no Python list of tensors finds them.

Idea. Memory belongs to a *storage*, so storages are what is counted (`ledger.py`), each once, however many views there
are. A dispatch mode sees the result of every operation (`measurement.py`); autograd carries it to its own threads.
What of it a forward keeps for backward, and who keeps it, is `saved.py`.

What each category means. A storage has one category for its whole life: the first of this list that it ever was.

    parameters   of a tracked module, or in a tracked optimizer's groups
    buffers      of a tracked module
    gradients    delivered by backward to such a parameter, or its `.grad` (autograd takes a buffer over as `.grad`
                 without copying it, so the peak may well see it earlier than that)
    optimizer    state of a tracked optimizer, and whatever its `step` allocates
    other        tensors handed to `track`
    activations  everything else made while measuring: results kept for backward, results passing through, and what a
                 kernel takes while it runs (`workspaces.py`)

Rejected: the profiler's allocation events, which know addresses but not purposes (they are the referee in the
tests), and patching `UntypedStorage.resize_` for the whole process to hear of sizes that change.
"""

from .ledger import CATEGORIES, Block, Place, Sample
from .measurement import Measurement, Reading, measure
from .saved import Row, SavedActivations, saved_activations

__all__ = [
    "CATEGORIES",
    "Block",
    "Measurement",
    "Place",
    "Reading",
    "Row",
    "Sample",
    "SavedActivations",
    "measure",
    "saved_activations",
]
