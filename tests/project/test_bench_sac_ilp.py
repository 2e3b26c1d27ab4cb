"""Torch's own planner as a peer: its policies do what they say, and nothing of it is heard or missed in silence."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from frontier import Config
from frontier.config import PRICES
from frontier.measuring import Seen, Step
from frontier.models import build
from frontier.sac_ilp import NoPolicyError, Policy, Statistics, prepare
from frontier.ways import PLAIN, Way, peers

pytestmark = pytest.mark.nightly

SIZE = ("gpt", 2, 64, 32, 2)


class Given:
    """Statistics that always say the same."""

    def __init__(self, policies: list[Policy]) -> None:
        self._policies = policies

    def policies(self, share: float) -> list[Policy]:
        return self._policies


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    return Statistics(partial(build, *SIZE), PRICES["flops"])


@pytest.fixture(scope="module")
def policies(statistics: Statistics) -> list[Policy]:
    """The policies of both layers."""
    return statistics.policies(0.9)


def ran(policies: list[Policy]) -> Seen:
    """A step under these policies."""
    model, batch = build(*SIZE)
    return Step(model, batch, Way("sac_ilp", "", partial(prepare, statistics=Given(policies), share=1.0))).seen()


def test_policies(statistics: Statistics, capfd: pytest.CaptureFixture[str]) -> None:
    """It chooses the layers, saves products but not all, all random numbers or none; it is quiet and leaves no seed."""
    before = np.random.get_state()[1].copy()
    found = statistics.policies(0.9)
    assert np.array_equal(before, np.random.get_state()[1])
    assert [policy.path for policy in found] == ["layers.0", "layers.1"]
    for policy in found:
        products = [saved for name, saved in zip(policy.names, policy.saved, strict=True) if name == "addmm"]
        assert len(products) == 6
        assert any(products)
        drawn = [saved for name, saved in zip(policy.names, policy.saved, strict=True) if name == "bernoulli_"]
        assert len(drawn) == 2
        assert len(set(drawn)) == 1
    with pytest.raises(NoPolicyError, match="sac_milp finds no policy for so small a budget"):
        statistics.policies(0.1)
    out, err = capfd.readouterr()
    assert "Estimated" not in out
    assert "Solver failed" not in err


def test_what_is_saved_is_not_replayed(policies: list[Policy]) -> None:
    """Policies that save nothing are torch's checkpoint of every layer; the more products they save, the less runs."""
    by_hand = next(way for way in peers(Config()) if way.family == "torch checkpoint")
    model, batch = build(*SIZE)
    plain, whole = (Step(model, batch, way).seen() for way in (Way(PLAIN), by_hand))
    nothing = ran([replace(policy, saved=[False] * len(policy.saved)) for policy in policies])
    assert (nothing.flops, nothing.peak_bytes) == (whole.flops, whole.peak_bytes)
    products = ran([replace(policy, saved=[name == "addmm" for name in policy.names]) for policy in policies])
    assert products.flops == plain.flops < nothing.flops
    masks = ran([replace(policy, saved=["bernoulli" in name for name in policy.names]) for policy in policies])
    assert masks.flops == nothing.flops


def test_another_operation_is_noticed(policies: list[Policy]) -> None:
    """A policy for other operations than those that come is an error, and so is one for fewer."""
    first, second = policies
    other = replace(first, names=["mm" if name == "addmm" else name for name in first.names])
    with pytest.raises(RuntimeError, match=r"operation 3 of layers.0 is addmm, and the policy was made for mm"):
        ran([other, second])
    with pytest.raises(RuntimeError, match=r"operation 2 of layers.0 is \w+, and the policy was made for nothing"):
        ran([replace(first, names=first.names[:2], saved=first.saved[:2])])


@pytest.mark.parametrize(
    ("package", "reason"), [("pulp", "install pulp"), ("torch.distributed._tools.sac_ilp", "sac_ilp")]
)
def test_without_it(package: str, reason: str, monkeypatch: pytest.MonkeyPatch, statistics: Statistics) -> None:
    """Without pulp, or in a torch without the planner, the peer says what is missing when it is asked to run."""
    monkeypatch.delitem(sys.modules, "torch.distributed._tools.sac_ilp", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    model, _ = build(*SIZE)
    with pytest.raises(ImportError, match=reason):
        prepare(model, statistics, 0.9)
