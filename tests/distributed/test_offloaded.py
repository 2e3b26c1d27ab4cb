"""Modules that are offloaded without being recomputed, on two ranks."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_recompute import Choice, OnDisk, OnHost, Plan, apply

WIDTH, TOKENS = 16, 8
STORES = {"host": OnHost, "disk": lambda: OnDisk(tempfile.gettempdir())}


def train(where: str) -> tuple[list[torch.Tensor], int, int]:
    """The reduced gradients of a step under DDP, and the bytes in the store after forward and after backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    store = STORES[where]() if where else None
    if store is not None:
        apply(model, Plan(tuple(Choice((str(n),), store=where, offload=True) for n in (1, 2))), stores={where: store})
    wrapped = DistributedDataParallel(model)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = wrapped(x).square().sum()
    held = 0 if store is None else store._bytes
    loss.backward()
    del loss
    return [p.grad for p in model.parameters()], held, 0 if store is None else store._bytes


@pytest.mark.parametrize("where", STORES)
def test_offloaded_modules_on_two_ranks(ranks, where: str) -> None:
    """Each rank sends what two of its modules save, and the reduced gradients are the plain ones to the last bit."""
    for (wanted, *_), (found, held, left) in zip(ranks.run(train, ""), ranks.run(train, where), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        # The input of the first module, the result of each; what is the first's result is the second's input.
        assert (held, left) == (3 * TOKENS * WIDTH * 4, 0)
