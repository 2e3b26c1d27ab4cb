"""What ranks send: bytes by purpose and link, and the seconds of FSDP that are hidden behind what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_recompute import Ranks
from torch_recompute._torch.fakes import APART
from torch_recompute._torch.ranks import functional
from torch_recompute.planner.ops import Meta, Op
from torch_recompute.planner.sent import overlapped, sent, unknown_network, what
from torch_recompute.simulation.devices import DEVICES, connected

SMALL, LARGE = Meta((64,), (1,), torch.bfloat16), Meta((512,), (1,), torch.bfloat16)


def op(name: str, group: str = "", given: Meta = SMALL, made: Meta = LARGE) -> Op:
    func: Any = getattr(functional(), name).default if group else getattr(torch.ops.aten, name).default
    return Op(func, (given, group) if group else (given,), (), (made,), 0)


GATHER, REDUCE = op("all_gather_into_tensor", "shard-8-8"), op("reduce_scatter_tensor", "shard-8-8", LARGE, SMALL)
COPY, WORK = op("split_with_sizes_copy"), op("gelu")
BACKWARD = (WORK, WORK, REDUCE)  # in which the weights of the next layer are on their way
STEP = (*(GATHER, COPY, WORK) * 4, GATHER, *(COPY, GATHER, *BACKWARD) * 3, COPY, *BACKWARD)


@pytest.mark.parametrize(
    ("compute", "link", "total", "hidden"),
    [
        (0.0, 1.0, 12.0, {"weights of FSDP": 0.0, "gradients of FSDP": 0.0}),  # nothing to hide behind
        (1.0, 0.0, 12.0, {"weights of FSDP": 0.0, "gradients of FSDP": 0.0}),  # nothing to hide
        (4.0, 1.0, 50.0, {"weights of FSDP": 7.0, "gradients of FSDP": 3.0}),  # all but the first and the last
        (1.0, 4.0, 48.0, None),  # the link is what takes the time
    ],
)
def test_what_is_hidden(compute: float, link: float, total: float, hidden: dict[str, float] | None) -> None:
    """Weights are gathered while the unit before computes, gradients are reduced while the next one does."""
    seconds = {GATHER: link, REDUCE: link, COPY: 0.0, WORK: compute}
    price: Any = seconds.__getitem__
    found, by_purpose = overlapped(STEP, price)
    assert found == total
    assert hidden is None or by_purpose == hidden
    assert all(0 <= part <= 8 * link for part in by_purpose.values())


@pytest.mark.parametrize(
    ("ranks", "compute", "host", "total", "hidden"),
    [
        (1, 4.0, 1.0, 56.0, 0.0),  # one rank waits for each of the eight
        (8, 4.0, 0.0, 50.0, 7.0),  # as without host memory
        (8, 4.0, 1.0, 51.0, 14.0),  # all but the first, fetched and gathered
        (8, 0.0, 1.0, 20.0, 0.0),  # nothing to hide behind
    ],
)
def test_what_is_hidden_of_weights_in_host_memory(
    ranks: int, compute: float, host: float, total: float, hidden: float
) -> None:
    """They are fetched before they are gathered, while the unit before computes; one rank alone waits for them."""
    fetch = Op(torch.ops.aten._to_copy.default, (Meta((64,), (1,), torch.bfloat16, APART.type),), (), (SMALL,), 0)
    some = [one for each in STEP for one in ([fetch, each] if each is GATHER else [each])]
    if ranks == 1:
        some = [one for one in some if one not in (GATHER, REDUCE)]
    seconds = {GATHER: 1.0, REDUCE: 1.0, COPY: 0.0, WORK: compute, fetch: host}
    found, by_purpose = overlapped(some, seconds.__getitem__)  # type: ignore[arg-type]
    coming = by_purpose["weights from host memory"] + by_purpose.get("weights of FSDP", 0.0)
    assert (found, coming) == (total, hidden)


def test_links_that_are_not_on_a_data_sheet() -> None:
    """A network of unknown speed is timed as the link, in one sentence; what is said of links is what is taken."""
    wide = Ranks(tp=8, fsdp=4).group("shard", 4)
    ran = {op("all_gather_into_tensor", wide): 1}
    ((unknown,), (known,)) = (sent(ran, DEVICES[name], {}) for name in ("mi300x", "h100"))
    assert unknown.seconds == DEVICES["mi300x"](next(iter(ran)))
    assert "Write --network IN-NODE,BETWEEN" in unknown_network([known, unknown], "mi300x")
    assert unknown_network([known], "h100") == ""
    said = connected(DEVICES["mi300x"], 100, 10, 4)
    assert (said.link_over(4), said.link_over(5)) == (("link", 100e9), ("network", 10e9))
    assert connected(DEVICES["h100"], None, None, None) == DEVICES["h100"]
    assert DEVICES["gb200"].link_over(72)[0] == "link"


def test_the_link_that_a_group_goes_over() -> None:
    """Ranks of one node use its link, more of them the network; the purpose is that of the group."""
    ranks, wide = Ranks(tp=2, cp=2, fsdp=2, ep=4), Ranks(tp=8, fsdp=4)
    names = [ranks.group("context", 2), ranks.group("experts", 4), ranks.group("shard", 4), wide.group("shard", 4)]
    assert names == ["context-4-2", "experts-8-4", "shard-8-4", "shard-32-4"]
    ran = {op("all_gather_into_tensor", name): 2 for name in names}
    assert [what(one) for one in ran] == ["by attention", "by experts", "weights of FSDP", "weights of FSDP"]
    found = sent(ran, DEVICES["h100"], {"weights of FSDP": 1e-6}, 3)
    assert [one.link for one in found] == ["link", "link", "link", "network"]
    assert [one.bytes for one in found] == [3 * 2 * (1024 - 1024 // size) for size in (2, 4, 4, 4)]
    assert found[3].seconds > found[2].seconds > found[2].hidden > 0
    assert "over the network" in str(found[3])
