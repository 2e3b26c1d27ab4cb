"""What `torch-recompute verify` looks like on a terminal: the text of the result, green or red."""

from __future__ import annotations

from .._face import new_console
from ..checking.verify import Verification


def show(found: Verification) -> None:
    """Print the result."""
    head, _, rest = str(found).partition("\n")
    console = new_console(highlight=False, soft_wrap=True)
    console.print(head, style="green" if found else "bold red", markup=False)
    if rest:
        console.print(rest, markup=False)
