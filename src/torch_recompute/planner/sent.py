"""Bytes and seconds that a rank sends in a step, by purpose: over which link, and how much of that is hidden.

Collectives are operations of the simulated step, so what they send is counted and priced as any operation is. Most of
them are waited for where they are: a layer goes on with what it has received. FSDP2 sends beside the computation:
each unit's weights are gathered while the unit before it computes, and its gradients are reduced while the next one
does. So the operations are laid on two lines in their order, one that computes and one that sends, and what the first
waits for is not hidden:

    a gather            begins when the weights before it have been copied out, and what was sent before it has ended
    a copy out          waits for its gather
    a reduction         begins when its gradients are there; the next one waits for it, as does the end of backward
    weights on the host are fetched by the line that sends, before they are gathered; one rank alone, which gathers
                        nothing, waits for them

What a pipeline's stages and Megatron's optimizer send is no operation of the model; it is counted from their bytes, and
is waited for, except between stages of interleaved 1F1B, where Megatron overlaps it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from .. import errors
from ..simulation.devices import UNKNOWN_NETWORK, Host, Roofline, Work
from .ops import FROM_HOST, Op, StepLog
from .prices import Measured, hidden_copies, hidden_in

GATHERED, REDUCED, ADDED_UP = "weights of FSDP", "gradients of FSDP", "gradients over replicas"
_WORDS = {
    "tensor": "within layers",
    "context": "by attention",
    "experts": "by experts",
    "shard": GATHERED,
    "replica": ADDED_UP,
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
        return REDUCED
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


class StepParts(NamedTuple):
    """The work of the parts of a forward and a backward, and by purpose the seconds of what is sent meanwhile."""

    parts: Mapping[str, Work]  # by segment; "" for what is in none
    hidden: Mapping[str, float]

    def seconds(self, host: Host) -> float:
        """The seconds of all parts; see `simulation/devices.py`."""
        return sum(map(host.seconds, self.parts.values()))


def parts_of(log: StepLog, price: Price, *, plain: bool = False) -> StepParts:
    """Returns the parts of a forward and a backward that have been counted; `plain` without their replays."""
    parts = log.parts(price, plain=plain)
    rest = parts[""]
    if log.order:
        whole, hidden = overlapped((ran.op for ran in log.order if not (plain and ran.phase == "replay")), price)
        device = whole - sum(part.device for segment, part in parts.items() if segment)
    else:
        hidden = hidden_copies(log, price)
        device = rest.device - sum(hidden.values())
    return StepParts({**parts, "": replace(rest, device=max(0.0, device))}, hidden)


def update_seconds(log: StepLog, price: Price) -> float:
    """Returns the seconds of an optimizer's step that has been counted."""
    return sum(price(op) * count for op, count in log.ops("optimizer").items())


def overlapped(ran: Iterable[Op], price: Price) -> tuple[float, dict[str, float]]:
    """Seconds of operations in their order where FSDP sends beside them, and by purpose the seconds that are hidden."""
    ran = [*ran]
    lines = _Lines(alone=all(op.sent_bytes is None or what(op) != GATHERED for op in ran))
    for op in ran:
        lines.take(op, price(op))
    return lines.ended()


class _Lines:
    """The line that computes and the one that sends: when each has ended, and what the first has waited for."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone  # one rank, which gathers nothing
        self.computed = self._sending = self._copied = self._reduced = 0.0  # the ends; of the last copy out, reduction
        self._gathers: deque[float] = deque()
        self._hosted: defaultdict[str, float] = defaultdict(
            float
        )  # seconds of gradients that go to host memory, which is beside all else
        self._total: defaultdict[str, float] = defaultdict(float)
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._last = ""

    def _wait(self, until: float, word: str) -> None:
        self._waited[word] += max(0.0, until - self.computed)
        self.computed = max(self.computed, until)

    def take(self, op: Op, seconds: float) -> None:
        """Lays the next operation on its line."""
        word = op.moved or (what(op) if op.sent_bytes is not None else "")
        if word == FROM_HOST and self._alone:
            self._total[word] += seconds
            self._wait(self.computed + seconds, word)
        elif word in (FROM_HOST, GATHERED):
            self._total[word] += seconds
            self._sending = max(self._sending, self._copied) + seconds
            if word == GATHERED:
                self._gathers.append(self._sending)
        elif op.moved:
            self._hosted[word] += seconds
        elif word in (REDUCED, ADDED_UP):
            self._total[word] += seconds
            if word == REDUCED:
                self._wait(self._reduced, self._last)
                self._sending = max(self._sending, self.computed)
            self._reduced = self._sending = self._sending + seconds
            self._last = word
        elif op.func.name().startswith(_COPY_OUT):
            if self._gathers:
                self._wait(self._gathers.popleft(), GATHERED)
            self._copied = self.computed = self.computed + seconds
        else:
            self.computed += seconds

    def ended(self) -> tuple[float, dict[str, float]]:
        """The seconds, and by purpose those that are hidden."""
        self._wait(self._reduced, self._last)
        longer = self._waited[GATHERED] - self._total[GATHERED]  # than gathering took: for what came from the host
        if longer > 0:
            self._waited[FROM_HOST] += longer
        hidden = {word: max(0.0, seconds - self._waited[word]) for word, seconds in self._total.items()}
        return max(self.computed, sum(self._hosted.values())), {**hidden, **hidden_in(self.computed, self._hosted)}
