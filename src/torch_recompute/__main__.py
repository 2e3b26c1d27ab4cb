"""`python -m torch_recompute` is the command `torch-recompute`, for `torchrun -m` and machines without its script."""

from __future__ import annotations

import gc
import sys

from .commands.cli import main

if __name__ == "__main__":
    gc.freeze()  # what is imported stays, so that it is not looked through again
    gc.enable()
    sys.exit(main())
