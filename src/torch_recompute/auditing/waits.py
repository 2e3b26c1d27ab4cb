"""Which calls wait for the device, under the name that the code calls them by.

An operation whose result is a number or whose shape depends on values has to wait; torch marks both with tags. A
function mode adds the name under which the code called it (`item()`), and the calls that wait for an accelerator but
run no operation on a CPU (`.cpu()`, `.tolist()`), so that an audit on a CPU says what a GPU will do.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode

from ..memory.operations import leaves

_INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
_WAITS: dict[Any, str] = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.nonzero: "nonzero()",
    torch.Tensor.__bool__: "bool(tensor)",
    torch.Tensor.__int__: "int(tensor)",
    torch.Tensor.__float__: "float(tensor)",
    torch.Tensor.__index__: "a tensor as an index of Python",
}


class Wait(NamedTuple):
    """A wait for the device."""

    what: str
    module: str
    line: str
    region: str


def wait_of(op: str, func: Any, args: Any, kwargs: Any, out: Any) -> str:
    """What an operation that waits for the device is to be called; "" for one that does not."""
    tags = getattr(func, "tags", ())
    if op in _INDEXING:
        masks = [t for t in leaves(args[1]) if t.dtype in (torch.bool, torch.uint8)]
        return "a mask as an index" if masks else ""
    if op == "aten.repeat_interleave" and kwargs.get("output_size") is not None:
        return ""
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return op
    if op in ("aten._to_copy", "aten.copy_") and out.device.type == "cpu":
        source = args[1] if op == "aten.copy_" else args[0]
        return "a copy to the host" if source.device.type != "cpu" else ""
    return ""


class Waiting(Protocol):
    """What notes waits.

    Attributes:
        calling: The call that runs, as the code writes it.
        waited: How many operations that wait have been seen.
    """

    calling: str
    waited: int

    def wait(self, what: str) -> None:
        """Notes a call that waits for the device and ran no operation that was seen to."""
        ...


class Calls(TorchFunctionMode):
    """Names the calls that wait for the device as the code does."""

    def __init__(self, recorder: Waiting) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _WAITS.get(func)
        if what is None:
            return func(*args, **(kwargs or {}))
        recorder = self._recorder
        before, recorder.calling = recorder.calling, what
        count = recorder.waited
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            recorder.calling = before
        if recorder.waited == count:
            recorder.wait(what)
        return result
