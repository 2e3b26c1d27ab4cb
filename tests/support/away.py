"""Host memory that is out of sight of `measure`: real copies, as a device's would be, on a machine without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_recompute import OnHost
from torch_recompute.stores.transfers import Direct, TransferQueue


class Copy:
    """A tensor's elements where no tensor is: `measure` does not see them."""

    def __init__(self, source: torch.Tensor) -> None:
        self.elements = source.numpy().copy()
        self.dtype, self.nbytes = source.dtype, source.nbytes

    def numel(self) -> int:
        return self.elements.size


class Lane(Direct):
    """Copies to such a place and back, in the order of a device's."""

    direct = False

    def same(self, held: Any, first: int, source: torch.Tensor) -> bool:
        return True

    def send(self, source: torch.Tensor) -> tuple[Any, None]:
        return Copy(source), None

    def fetch(self, host: Copy, after: None) -> tuple[torch.Tensor, None]:
        tensor = torch.empty(host.numel(), dtype=host.dtype)
        np.copyto(tensor.numpy(), host.elements)
        return tensor, None


class Away(OnHost):
    """`OnHost` with that lane; notes the most that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._own = TransferQueue(Lane())
        self.most = 0

    def _queue(self, tensor: torch.Tensor) -> TransferQueue:
        return self._own

    def put(self, tensor: torch.Tensor) -> Any:
        handle = super().put(tensor)
        self.most = max(self.most, self.host_bytes)
        return handle
