"""From the word MODEL of a command line to a module, and to a batch for it.

Problem. `show`, `plan` and `verify` take a model that the user has not built: a file, a name, a size that everybody
knows. What is planned needs a batch as well, and a batch depends on the model.

Idea. `load` turns a word into a module (`loading.py`; the sizes that have a name are the table in `presets.py`), and
`batch_for` into a call for a model that transformers describes (`batches.py`); `asked` does both as a command line
says (`asked.py`). A model from a configuration lies on the meta device, where a weight has a shape and takes no memory,
unless it is to be run. Whoever has another model writes a function that returns it with its batch.

Rejected: guessing a batch from the signature of a forward. A wrong guess gives figures that look right.
"""

from .asked import (
    add_batch_options,
    add_loop_options,
    add_model_options,
    asked,
    autocasting,
    check_sizes,
    loop_of,
    model_help,
)
from .batches import batch_for, filled
from .loading import Loaded, load
from .presets import PRESETS
from .words import DTYPES, OPTIMIZERS

__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "PRESETS",
    "Loaded",
    "add_batch_options",
    "add_loop_options",
    "add_model_options",
    "asked",
    "autocasting",
    "batch_for",
    "check_sizes",
    "filled",
    "load",
    "loop_of",
    "model_help",
]
