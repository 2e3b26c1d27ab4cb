"""For tests of compiled code: filters for torch's warnings, and a backend that runs the graphs as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COMPILES = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # the compiler looks at inputs
]


def as_they_are(partition: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A backend that runs the two graphs of a partition without compiling them further."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, **options)
