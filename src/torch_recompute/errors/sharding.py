"""Texts for what lies in parts on several ranks, collectives, and the random streams of parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._say import kind, say


def no_ranks(what: str) -> str:
    """Text for something that needs ranks, made before there are any."""
    return (
        f"{what} needs a process group, and torch.distributed has not been initialised.\n"
        "  Write before it:  torch.distributed.init_process_group()   (and start the script with torchrun)"
    )


def not_a_member(what: str) -> str:
    """Text for a group that this process is not in."""
    return (
        f"{what} was given a process group that this process is not in.\n"
        '  Each rank passes the group it belongs to, for example device_mesh.get_group("tp").'
    )


def nothing_to_share() -> str:
    """Text for a group of one rank."""
    return (
        "ShardedOver was given a group of one rank, which would keep everything it is given: nothing is shared.\n"
        "  Pass the tensor parallel group, or leave the store out."
    )


def ranks_differ(rank: int, sides: Sequence[str]) -> str:
    """Text for a tensor that is another one on another rank; `sides` is what each rank holds."""
    if len(set(sides)) > 1:
        what = "; ".join(f"rank {i} has {side}" for i, side in enumerate(sides))
    else:
        what = f"all have {sides[rank]}, with other values"
    return (
        f"ShardedOver keeps one part of a tensor per rank, so all ranks of its group must hold the same tensor, but "
        f"they do not: {what}. Put together again, it would be none of theirs.\n"
        "  With sequence parallelism each rank has its own part of the input already, and nothing is to be shared: "
        "leave the store out.\n"
        "  Else the group is another one than that of the tensor parallel ranks, or something in the model (dropout, a "
        "kernel that is not deterministic to the bit) differs between ranks where it should not."
    )


def shards_out_of_step() -> str:
    """Text for parts of different tensors that were put together."""
    return (
        "ShardedOver gathered parts of different tensors: a graph that one rank still has was freed on another, so the "
        "ranks disagree about which tensor comes next.\n"
        "  Free the graphs of forwards that get no backward at the same moment on all ranks (leave no reference cycle "
        "around an output; call gc.collect() on every rank), or gather nothing ahead: ShardedOver(group, ahead=False)."
    )


def split_already(placement: str, dim: int) -> str:
    """Text for a DTensor that is split over the store's group."""
    return (
        f"ShardedOver was given a DTensor that is {placement} over dimension {dim} of its mesh, which is the store's "
        "group: each rank has its own part of it already (sequence parallelism), so there is nothing to share.\n"
        "  Leave the store out."
    )


def not_in_rows(value: object, why: str) -> str:
    """Text for a tensor whose memory is not one row of elements."""
    return (
        f"ShardedOver cannot cut {say(value)} in parts: {why}.\n"
        "  Leave the store out for this region, or make the tensor inside of the region."
    )


def store_of_a_group(value: object) -> str:
    """Text for pickling a store that belongs to a process group."""
    return (
        f"{kind(value)} cannot be pickled: it belongs to the process group of this run.\n"
        "  Save model.state_dict(), or take the plan out first: handle.remove()."
    )


def no_rank(what: str, value: object) -> str:
    """Text for a seed or a rank that is none."""
    kinds = "a whole number, 0 or more" if what == "seed" else "a process group or this rank's number in it"
    return (
        f"RngStreams: {what} is {say(value)}, where {kinds} is expected.\n"
        '  Write  RngStreams(1234, tensor=device_mesh.get_group("tp")).'
    )


def stream_twice(name: str, seed: int, known: str, other: int) -> str:
    """Text for a stream of the name or the seed of another one."""
    what = f"there is a stream {known!r} already" if name == known else f"the stream {known!r} has the seed {other} too"
    why = "" if name == known else ", so both would draw the same numbers"
    return f"add({name!r}, {seed}): {what}{why}.\n  Use another {'name' if name == known else 'seed'}."


def no_such_stream(name: object, known: Iterable[str]) -> str:
    """Text for a fork of a stream that there is not."""
    return (
        f"fork({name!r}): there is no such stream; known are {', '.join(map(repr, known))}.\n"
        "  Write one of these, or make it first, on all ranks:  streams.add(name, seed)"
    )


def no_such_collectives(given: object, known: Iterable[str]) -> str:
    """Text for a kind of collectives that there is not."""
    return f"keep_collectives: kind={given!r}, where one of {', '.join(map(repr, known))} is expected."
