"""Ranks as data: who shares what, and which numbers of them are refused."""

from __future__ import annotations

from typing import Any

import pytest

from torch_recompute import ArgumentError, Ranks

CASES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "one": ({}, (1, 1, 1, 1)),
    "ZeRO-1": ({"dp": 8}, (8, 1, 8, 8)),
    "replicas that share nothing": ({"dp": 8, "zero": 0}, (8, 1, 8, 1)),
    "ZeRO-3": ({"dp": 8, "zero": 3}, (8, 8, 1, 8)),
    "FSDP": ({"fsdp": 8}, (8, 8, 1, 8)),
    "ZeRO-2": ({"fsdp": 8, "zero": 2}, (8, 8, 1, 8)),
    "HSDP": ({"dp": 4, "fsdp": 8}, (32, 8, 4, 8)),
    "context": ({"cp": 4, "dp": 2}, (8, 1, 2, 8)),
    "context and FSDP": ({"cp": 4, "fsdp": 2}, (8, 8, 1, 8)),
    "FSDP over context alone": ({"cp": 8, "zero": 3}, (8, 8, 1, 8)),
    "ZeRO-3, its gradients reduced in 16 bits": ({"dp": 4, "zero": 3, "reduce_dtype": "bfloat16"}, (4, 4, 1, 4)),
    "one with its weights on the host": ({"on_host": True, "zero": 2}, (1, 1, 1, 1)),
    "experts": ({"dp": 64, "ep": 64, "pp": 4}, (256, 1, 64, 64)),
    "stages that add gradients up in 32 bits": ({"dp": 4, "pp": 4, "reduce_dtype": "float32"}, (16, 1, 4, 4)),
    "Megatron": ({"tp": 8, "sequence_parallel": True, "pp": 4, "vpp": 5, "dp": 2}, (64, 1, 2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_who_shares_what(case: str) -> None:
    """The world, those that share weights, those with the same shard, and those that share the optimizer's states."""
    given, counts = CASES[case]
    ranks = Ranks(**given)
    assert (ranks.world, ranks.shards, ranks.replicas, ranks.state_shards) == counts
    assert Ranks(**ranks.as_data()) == ranks
    assert str(ranks).endswith(f": {ranks.world} ranks" if ranks.world > 1 else "1 rank")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp": 0}, "--dp is 0"),
        ({"fsdp": 2.0}, "--fsdp is 2.0"),
        ({"vpp": 2}, "--vpp goes with --pp"),
        ({"sequence_parallel": True}, "--sequence-parallel goes with --tp"),
        ({"zero": 4}, "expected 0, 1, 2 or 3"),
        ({"dp": 64, "ep": 48}, "Write --ep 1, 2, 4, ..., 64"),
        ({"dp": 4, "ep": 4, "imbalance": 0.9}, "Write 1 or more"),
        ({"cp_kind": "ring"}, "--cp-kind goes with --cp"),
        ({"dp": 4, "imbalance": 2.0}, "--imbalance goes with --ep"),
        ({"dp": 4, "reduce_dtype": "float32"}, "--reduce-dtype goes with --fsdp"),
        ({"tp": 2, "zero": 1}, "--zero goes with --dp"),
        ({"fsdp": 8, "zero": 1}, "expected 2 or 3, since gradients and states are sharded at least"),
    ],
)
def test_ranks_that_cannot_be(given: dict[str, Any], message: str) -> None:
    """Sizes that are none, words that go with others, and ZeRO's numbers that FSDP does not have."""
    with pytest.raises(ArgumentError, match=message):
        Ranks(**given)
