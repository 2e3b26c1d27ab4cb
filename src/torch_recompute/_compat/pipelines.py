"""The backward of a stage in two halves, and its end, as `torch.distributed.pipelining` runs them.

The halves are private functions of torch, of which zero bubble schedules alone are made; a simulation of such a
schedule that did anything else would count other bytes. They are imported where they are called: torch may be built
without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def let_go(outputs: Iterable[torch.Tensor]) -> None:
    """Cuts the outputs of the last stage, which are kept until the step ends, off their graph: all that are no views.

    The graph of a view stays, with whatever the backward has not let go of.
    """
    for output in outputs:
        if not output._is_view():
            output.detach_()


def backward_for_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.nn.Parameter],
) -> Any:
    """Makes the gradients of the inputs; returns what the other half needs."""
    from torch.distributed.pipelining import _backward

    given = None if gradients is None else list(gradients)
    return _backward.stage_backward_input(list(outputs), given, list(inputs), iter(weights))[1]


def backward_for_weights(weights: Iterable[torch.nn.Parameter], groups: Any) -> None:
    """Makes the gradients of the weights."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), groups)
