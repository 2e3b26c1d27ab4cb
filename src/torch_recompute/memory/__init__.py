"""The bytes of tensors that are alive, the peak, and what they are for.

Memory belongs to a *storage*, so storages are counted (`ledger.py`), each once, however many views there are. A
dispatch mode sees the result of every operation (`measurement.py`). `saved.py` lists what a forward keeps for backward,
and who keeps it. A storage has one category for its whole life: the first of this list that it ever was.

    parameters   of a tracked module, or in a tracked optimizer's groups
    buffers      of a tracked module
    gradients    delivered by backward to such a parameter, or its `.grad` (autograd takes a buffer over as `.grad`
                 without copying it, so the peak may well see it earlier than that)
    optimizer    state of a tracked optimizer, and whatever its `step` allocates
    other        tensors handed to `track`
    activations  everything else made while measuring: results kept for backward, results passing through, and what a
                 kernel takes while it runs (`workspaces.py`)

The CUDA allocator's figure does not say what for, rounds, and does not exist on CPU; it is given beside these. Where
the number alone is enough and has to be cheap, a meter gives it (`meter.py`), to the pool of elastic regions above all
(`elastic.py`). Budgets and limits as people write them are read by `budget.py`.
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
