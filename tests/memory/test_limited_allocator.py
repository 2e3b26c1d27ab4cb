"""The allocator with a limit counts what the profiler sees, fails where it is told to, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support import limited as module
from torch_recompute._torch.storages import cpu_allocations

X = torch.randn(64, 64)
IMAGES, KERNELS = torch.randn(2, 8, 32, 32), torch.randn(8, 8, 3, 3)


def step(model: nn.Module | None = None) -> None:
    """A forward and a backward that leave nothing."""
    model = model or nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
    model(X).square().mean().backward()
    model.zero_grad()


def resized() -> torch.Tensor:
    """Memory that grows twice, shrinks in place and is given up."""
    tensor = torch.zeros(100)
    tensor.resize_(1000).resize_(50)
    tensor.untyped_storage().resize_(0)
    return tensor.resize_(300)


CALLS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no bytes": lambda: torch.empty(0, 7),
    "a result": lambda: X + 1,
    "a view": lambda: X[1:],
    "workspaces": lambda: F.conv2d(IMAGES, KERNELS),
    "a copy that a kernel makes": lambda: X @ X[:, ::2] + F.log_softmax(X.T, 0)[:, :32],
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], is_causal=True),
    "sorting": lambda: X.sort(dim=0),
    "resizing": resized,
    "a training step": step,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_counts_what_the_profiler_sees(name: str, limited: Any) -> None:
    """Allocations, bytes left and the most bytes alive are those of the allocator's events."""
    CALLS[name]()  # what is made once per process
    kept: list[Any] = []
    with limited() as memory:
        events = cpu_allocations(lambda: kept.append(CALLS[name]()))
        levels = [0, *accumulate(events)]
        assert (memory.count, memory.live(), memory.lap()) == (sum(e > 0 for e in events), levels[-1], max(levels))
        memory.reset_lap()
        assert memory.lap() == memory.live() == levels[-1]
        kept.clear()
        assert (memory.live(), memory.lap()) == (0, levels[-1])


def test_what_was_there_before_is_freed_rightly(limited: Any) -> None:
    """Blocks from before and from within are freed on either side, by tensors and by oneDNN, which knows an address."""
    tensors = [torch.ones(1000), torch.ones(1000).to_mkldnn()]
    with limited() as memory:
        tensors.clear()
        assert memory.live() == 0
        tensors += [torch.ones(1000), torch.ones(1000).to_mkldnn()]
        assert memory.live() == 8000
    tensors.clear()
    again = [torch.ones(1000).to_mkldnn().to_dense() for _ in range(10)]
    assert all(torch.equal(one, torch.ones(1000)) for one in again)


def test_beyond_the_limit_it_raises_what_a_device_raises(limited: Any) -> None:
    """The error is `torch.OutOfMemoryError` with the bytes; what failed takes nothing, and what is freed is there."""
    with limited(1000) as memory:
        first = torch.empty(600, dtype=torch.int8)
        said = "500 bytes were wanted, 600 are alive, and the limit of a test is 1000"
        with pytest.raises(torch.OutOfMemoryError, match=said):
            torch.empty(500, dtype=torch.int8)
        assert (memory.live(), memory.lap(), memory.count) == (600, 600, 1)
        del first
        second = torch.empty(1000, dtype=torch.int8)
        memory.limit = None
        third = torch.empty(1000, dtype=torch.int8)
        assert (memory.limit, memory.live()) == (None, 2000)
        del second, third


def test_each_allocation_can_fail(limited: Any) -> None:
    """Of a training step each allocation fails in turn, in forward and in backward, and nothing is left after any."""
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    with limited() as memory:
        step(model)
        (before, whole), memory.limit = (memory.live(), memory.count), 10**9
        for nth in range(1, whole + 1):
            memory.fail_at(nth)
            with pytest.raises(torch.OutOfMemoryError, match="a test asked that it fail"):
                step(model)
            model.zero_grad()
            assert memory.live() == before
        memory.fail_at(whole + 1)
        step(model)
        memory.fail_at(2, forever=True)
        kept = X.sin()
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                X.sin()
        memory.fail_at(None)
        assert torch.equal(X.sin(), kept)


def test_blocks_outlive_their_context(limited: Any) -> None:
    """Tensors of the block are valid after it, whole and resized, and have no limit any more."""
    with limited(1000) as memory:
        kept = torch.arange(100)
        shrunk = torch.arange(10)
    assert (torch.arange(1000).sum().item(), memory.live()) == (499_500, 880)
    kept.resize_(1000)
    assert (kept[:100].sum().item(), memory.live()) == (4950, 8080)
    del shrunk
    assert memory.live() == 8000
    del kept
    assert memory.live() == 0


def test_nested_and_on_several_threads(limited: Any) -> None:
    """Contexts nest and both count what several threads take in backward; the limit of the outer one holds."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                step()
        except BaseException as error:
            failed.append(error)

    with limited() as outer:
        held = torch.empty(1000, dtype=torch.int8)
        with limited() as inner:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failed == []
            assert (inner.live(), outer.live(), outer.count) == (0, 1000, inner.count + 1)
            outer.limit = 1500
            with pytest.raises(torch.OutOfMemoryError, match="1000 are alive, and the limit of a test is 1500"):
                torch.empty(600, dtype=torch.int8)
            assert inner.live() == 0
        before = inner.count
        assert torch.zeros(100, dtype=torch.int8).numel() + before == 100 + inner.count
        del held


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C++ compiler skips the tests that need the allocator, and says which is missing."""
    monkeypatch.setattr(module, "_COMPILER", "no-such-compiler")
    assert "compiled by no-such-compiler, which is not on the path" in module.missing()
