"""What is compared of a tensor: its meta, its layout, and fingerprints of its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_recompute._torch.tensors import layout, meta, say
from torch_recompute.engine.mismatch import digest


def test_meta_in_words() -> None:
    """What is compared, and what an error says of it, is dtype, shape and device."""
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert say(meta(tensor)) == "bfloat16[2, 3] on cpu"
    assert meta(tensor) == meta(torch.ones(3, 2, dtype=torch.bfloat16).mT)
    for other in (tensor[:1], tensor.float(), tensor.to("meta")):
        assert meta(other) != meta(tensor)


def test_layout() -> None:
    """Strides tell dense tensors apart; of sparse and nested ones, which may have none, something can be compared."""
    assert layout(torch.zeros(2, 3)) == (3, 1)
    assert layout(torch.zeros(3, 2).mT) == (1, 2)
    for other in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        assert layout(other) == layout(other.clone())


DIGESTED: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.linspace(-1, 1, 5000),
    "short": lambda: torch.arange(3.0),
    "number": lambda: torch.tensor(2.0),
    "half": lambda: torch.linspace(-1, 1, 700).bfloat16(),
    "integers": lambda: torch.arange(2000),
    "flags": lambda: torch.arange(100) % 3 == 0,
    "complex": lambda: torch.complex(torch.arange(5.0), torch.ones(5)),
    "rows": lambda: torch.linspace(0, 1, 3000).view(30, 100),
}

each_digested = pytest.mark.parametrize("make", DIGESTED.values(), ids=DIGESTED.keys())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@each_digested
def test_equal_bits_have_equal_fingerprints(make: Any) -> None:
    """The fingerprint depends on the bits alone: not on memory, strides or whether grad is required."""
    tensor = make()
    assert torch.equal(digest(tensor), digest(tensor.clone()))
    wide = torch.stack([tensor, tensor], -1)[..., 0]
    assert torch.equal(digest(tensor), digest(wide))
    if tensor.is_floating_point():
        assert torch.equal(digest(tensor), digest(tensor.clone().requires_grad_().exp().log().detach() * 0 + tensor))
    assert digest(tensor).shape == (2,)


@each_digested
def test_any_changed_byte_shows(make: Any) -> None:
    """A fingerprint changes with any single bit; every byte of a sample of positions is tried."""
    tensor = make()
    whole = digest(tensor)
    count = bits(tensor).numel()
    for position in {0, count - 1, count // 2, *range(0, count, max(1, count // 40))}:
        changed = tensor.clone()
        bits(changed)[position] ^= 1
        assert not torch.equal(digest(changed), whole)


@each_digested
def test_any_exchange_shows(make: Any) -> None:
    """A fingerprint changes when two different elements change places."""
    tensor = make().reshape(-1)
    whole = digest(tensor)
    for i, j in ((0, -1), (0, tensor.numel() // 2), (tensor.numel() // 3, -1)):
        changed = tensor.clone()
        changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
        if not torch.equal(changed, tensor):
            assert not torch.equal(digest(changed), whole)


def test_special_values_are_told_apart() -> None:
    """Zero and minus zero, and two NaNs with other bits, have other fingerprints; a NaN equals itself."""
    nan = torch.tensor([float("nan")])
    other = nan.clone()
    bits(other)[0] ^= 1
    assert torch.equal(digest(nan), digest(nan.clone()))
    assert not torch.equal(digest(nan), digest(other))
    assert not torch.equal(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])))


def test_other_layouts_have_fingerprints() -> None:
    """Sparse and nested tensors are compared by their contents."""
    a, b = torch.eye(3).to_sparse(), (torch.eye(3) * 2).to_sparse()
    assert torch.equal(digest(a), digest(a.clone()))
    assert not torch.equal(digest(a), digest(b))
    rows = [torch.arange(2.0), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert torch.equal(digest(nested), digest(nested.clone()))
    assert not torch.equal(digest(nested), digest(nested * 2))


def test_digest_of_one_element_with_a_stride():
    """A single element has a digest whatever its stride is, the same one."""
    base = torch.arange(4.0)
    assert torch.equal(digest(base[1:2]), digest(base[1::3]))
    assert not torch.equal(digest(base[1:2]), digest(base[2:3]))
