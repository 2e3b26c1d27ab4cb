"""Modules that are offloaded without being recomputed, on two ranks."""

from __future__ import annotations

import datetime
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_recompute import Choice, OnDisk, OnHost, Plan, apply, is_recomputing

WIDTH, TOKENS = 16, 8
PATIENCE = datetime.timedelta(seconds=5)
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


class Dies(nn.Module):
    """A layer in whose replay one rank may end, with files of both ranks on the disk."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.linear, self.dies = nn.Linear(WIDTH, WIDTH), dies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing() and self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x).tanh()


def through(folder: str, dies: bool, planned: bool = True) -> tuple[list[torch.Tensor], int, int]:
    """The reduced gradients of a step whose inputs are on the disk, where rank 1 may be killed in it, and bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Dies(dies and number == 2 and dist.get_rank() == 1) for number in range(4)))
    store = OnDisk(folder, ahead=0)
    if planned:
        apply(model, Plan(tuple(Choice((str(n),), store="disk") for n in range(4))), stores={"disk": store})
    # The processes after a death are new: what they import at first may take longer than a patience for the dead one.
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(timeout=PATIENCE if dies else None))
    # A run reads what it has written: each has inputs of its own, so that those of the dead one would show.
    seed = dist.get_rank() + 2 * dies
    loss = wrapped(torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(seed))).square().sum()
    held = store.file_bytes
    loss.backward()
    del loss
    return [p.grad for p in model.parameters()], held, store.file_bytes


@pytest.mark.nightly
def test_a_rank_that_is_killed_leaves_no_file(ranks, tmp_path: Path) -> None:
    """One rank of two is killed in its backward; no file of either is left, and the next run has its own gradients."""
    folder = str(tmp_path)
    wanted = ranks.run(through, folder, False, False)
    outcomes = ranks.outcomes(through, folder, True)
    assert "exit code -9" in outcomes[1].error
    assert "Error" in outcomes[0].error
    assert list(tmp_path.iterdir()) == []
    for (plain, *_), (found, held, left) in zip(wanted, ranks.run(through, folder, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        assert held >= 4 * 512 * WIDTH * 4
        assert left == 0
    assert list(tmp_path.iterdir()) == []
