"""`python -m torch_recompute` is the command `torch-recompute`, for `torchrun -m` and machines without its script."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
