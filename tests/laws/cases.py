"""The table of programs that the laws run: layers as people train them, and programs that are hard to recompute.

The rows stand in `cases_layers.py` and `cases_shapes.py`; a new one (a function under `@case` that returns a program)
gains every law that is tried over the table.

Flags say what is special about a program. `inplace`: a stage changes its own input, so a region around that stage
alone may refuse. `double`: smooth, small and in float64, so that `gradgradcheck` can say something.
`backward_inside`: it takes a gradient in its forward, which needs grad, and a replay of its own.
"""

from __future__ import annotations

from laws import cases_layers as cases_layers
from laws import cases_shapes as cases_shapes
from laws.cases_shapes import Batch as Batch
from laws.cases_shapes import Result as Result
from laws.table import CASES as CASES
from laws.table import Case as Case
from laws.table import Program as Program

BY_NAME = {case.name: case for case in CASES}
