"""Bytes and seconds that a rank sends in a step, by purpose: over which link, and how much of that is hidden.

Collectives are operations of the simulated step, so what they send is counted and priced as any operation is. Most of
them are waited for where they are: a layer goes on with what it has received. FSDP2 sends beside the computation:
each unit's weights are gathered while the unit before it computes, and its gradients are reduced while the next one
does. So the operations are laid on two lines in their order, one that computes and one that sends, and what the first
waits for is not hidden:

    a gather            begins when the weights before it have been copied out, and what was sent before it has ended
    a copy out          waits for its gather
    a reduction         begins when its gradients are there; the next one waits for it, as does the end of backward

What a pipeline's stages and Megatron's optimizer send is no operation of the model; it is counted from their bytes, and
is waited for, except between stages of interleaved 1F1B, where Megatron overlaps it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import errors
from ..devices import UNKNOWN_NETWORK, Roofline
from .ops import Op
from .prices import Measured, hidden_in

_WORDS = {
    "tensor": "within layers",
    "context": "by attention",
    "experts": "by experts",
    "shard": "weights of FSDP",
    "replica": "gradients over replicas",
}
_COPY_OUT = "aten::split_with_sizes_copy"
Price = Roofline | Measured


@dataclass(frozen=True)
class Sent:
    """The bytes that a rank sends in a step for one purpose.

    Attributes:
        what: The purpose, in words.
        bytes: By each rank.
        seconds: Of the link.
        hidden: How many of these are hidden behind what is computed.
        link: The slowest that it goes over, in words.
    """

    what: str
    bytes: int
    seconds: float
    hidden: float
    link: str

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        hidden = f", {1000 * self.hidden:,.1f} of them hidden" if self.hidden else ""
        return f"{self.what} {errors.size(self.bytes)} over the {self.link} in {1000 * self.seconds:,.1f} ms{hidden}"


def between(nbytes: int, ranks: int, price: Price, word: str, *, overlaps: bool = False) -> Sent:
    """Returns what is sent between ranks that lie among so many in a row, waited for unless it overlaps."""
    link, speed = link_over(price, ranks)
    return Sent(word, nbytes, nbytes / speed, nbytes / speed if overlaps else 0.0, link)


def link_over(price: Price, ranks: int) -> tuple[str, float]:
    """The slowest link between so many ranks in a row, in words, and its bytes per second."""
    return price.link_over(ranks) if isinstance(price, Roofline) else price.roofline.link_over(ranks)


def what(op: Op) -> str:
    """The purpose of a collective, in words."""
    if op.group.word == "shard" and "reduce" in op.func.name():
        return "gradients of FSDP"
    return _WORDS.get(op.group.word, "by other collectives")


def sent(ran: Mapping[Op, int], price: Price, hidden: Mapping[str, float], times: int = 1) -> tuple[Sent, ...]:
    """Counts what the collectives among operations send in a step that runs them so many times.

    Args:
        ran: The operations, and how often each runs at a time.
        price: Seconds of an operation.
        hidden: By purpose, seconds at a time that are hidden.
        times: How often all of them run in a step.
    """
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for op, count in ran.items():
        nbytes = op.results[0].bytes if op.moved else op.sent_bytes
        if nbytes is not None:
            key = (op.moved, "link to the host") if op.moved else (what(op), link_over(price, op.group.span)[0])
            before = found.get(key, (0, 0.0))
            found[key] = before[0] + nbytes * count, before[1] + price(op) * count
    return tuple(
        Sent(word, times * nbytes, times * seconds, times * hidden.get(word, 0.0), link)
        for (word, link), (nbytes, seconds) in found.items()
    )


def unknown_network(several: Iterable[Sent], device: str) -> str:
    """Returns what is to be said where something goes over a network whose speed is not known, else ""."""
    if all(one.link != UNKNOWN_NETWORK for one in several):
        return ""
    return (
        f"How fast the network between nodes with {device} is depends on who has built it, so what goes over it is "
        "timed as over the link within a node. Write --network IN-NODE,BETWEEN in GB/s of one device."
    )


def together(several: Iterable[Sent]) -> list[Sent]:
    """Returns what is sent for the same purpose over the same link as one."""
    found: dict[tuple[str, str], Sent] = {}
    for one in several:
        old = found.get((one.what, one.link), Sent(one.what, 0, 0.0, 0.0, one.link))
        sums = old.bytes + one.bytes, old.seconds + one.seconds, old.hidden + one.hidden
        found[one.what, one.link] = Sent(one.what, *sums, one.link)
    return [*found.values()]


def overlapped(ran: Iterable[Op], price: Price) -> tuple[float, dict[str, float]]:
    """Seconds of operations in their order where FSDP sends beside them, and by purpose the seconds that are hidden."""
    computed = sending = copied = reduced = 0.0  # when each line ended; the last copy out; the last reduction
    hosted: dict[str, float] = {}  # seconds of copies to host memory and back, which are beside all else
    gathers: deque[float] = deque()
    total: dict[str, float] = {}
    waited: dict[str, float] = {}
    last = ""

    def wait(until: float, word: str) -> None:
        nonlocal computed
        waited[word] = waited.get(word, 0.0) + max(0.0, until - computed)
        computed = max(computed, until)

    for op in ran:
        seconds = price(op)
        if op.moved:
            hosted[op.moved] = hosted.get(op.moved, 0.0) + seconds
            continue
        word = what(op) if op.sent_bytes is not None else ""
        if word in ("weights of FSDP", "gradients of FSDP", "gradients over replicas"):
            total[word] = total.get(word, 0.0) + seconds
        if word == "weights of FSDP":
            sending = max(sending, copied) + seconds
            gathers.append(sending)
        elif word == "gradients of FSDP":
            wait(reduced, last)
            reduced = sending = max(sending, computed) + seconds
            last = word
        elif word == "gradients over replicas":
            reduced = sending = sending + seconds
            last = word
        else:
            if op.func.name().startswith(_COPY_OUT) and gathers:
                wait(gathers.popleft(), "weights of FSDP")
            computed += seconds
            copied = computed if op.func.name().startswith(_COPY_OUT) else copied
    wait(reduced, last)
    hidden = {word: max(0.0, seconds - waited.get(word, 0.0)) for word, seconds in total.items()}
    return max(computed, sum(hosted.values())), {**hidden, **hidden_in(computed, hosted)}
