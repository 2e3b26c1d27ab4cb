"""A tape with the prices of its operations: their work for host and device, and the graph that the bound is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property

from ..simulation.devices import Work
from .cost import Graph, Node
from .ops import Op
from .tape import Tape, Values, What


class PricedTape:
    """A tape, with the prices of its operations.

    Args:
        tape: The tape.
        price: Gives the seconds of an operation.

    Attributes:
        work: What the segment gives device and host to do without regions.
        flops: The FLOPs of that.
    """

    def __init__(self, tape: Tape, price: Callable[[Op], float]) -> None:
        self.tape = tape
        self._seconds = [price(op) for op in tape.keys]
        self._launches = [not op.in_host_memory for op in tape.keys]
        self._flops = [op.flops for op in tape.keys]
        self.work, self.flops = self.of(tape.counts)

    def of(self, counts: Mapping[int, int]) -> tuple[Work, int]:
        """The work and the FLOPs of some operations, by their numbers in the tape."""
        seconds = sum(self._seconds[key] * count for key, count in counts.items())
        launched = sum(count for key, count in counts.items() if self._launches[key])
        return Work(seconds, launched), sum(self._flops[key] * count for key, count in counts.items())

    @cached_property
    def forward_work(self) -> Work:
        """The work of its forward alone."""
        counts = Counter(op.key for op in self.tape.made)
        return self.of(counts)[0]

    @property
    def graph(self) -> Graph:
        """The forward as plain data, for the bound."""
        tape = self.tape
        sources = {s for op in tape.ops if op.surrounding for s in op.made} & tape.known
        index = dict.fromkeys(sources, -1)
        inputs, seconds, counts, sizes = list[set[int]](), list[float](), list[int](), list[int]()
        for op in tape.made:
            reads = set[int]() if op.needs == Values.NONE else {index[s] for s in op.read if s in index}
            wrote = [index[s] for s in op.wrote if index.get(s, -1) >= 0]
            owner = len(inputs) if op.made else wrote[0] if wrote else None
            if wrote and not op.made:
                inputs[wrote[0]] |= {read for read in reads if read < wrote[0]}
            drawn = op.needs == Values.MASK and len(op.made) == 2  # first the mask, which follows from the layout
            for place, storage in enumerate(op.made):
                index[storage] = len(inputs)
                inputs.append(set() if drawn and not place else set(reads))
                seconds.append(0.0)
                counts.append(0)
                sizes.append(tape.sizes[storage])
                if drawn and not place:
                    reads.add(index[storage])
            if owner is not None:
                seconds[owner] += self._seconds[op.key]
                counts[owner] += 1
        needed = {index.get(tape.saves[k].storage, -2) for k in self._alive_at_turn()}
        nodes = tuple(
            Node(cost, nbytes, tuple(sorted(read)), i in needed, count)
            for i, (cost, nbytes, read, count) in enumerate(zip(seconds, sizes, inputs, counts, strict=True))
        )
        output = max((index.get(storage, -1) for storage in tape.results), default=-1)
        input_bytes = sum(tape.sizes[storage] for storage in sources)
        return Graph(nodes, output, input_bytes, -1 in needed, self._most_at_once())

    def _alive_at_turn(self) -> set[int]:
        """The saved tensors that the graph holds when backward begins."""
        found = set[int]()
        for what, number in self.tape.events[: self.tape.turn]:
            if what == What.SAVE:
                found.add(number)
            elif what == What.RELEASE:
                found.discard(number)
        return found

    def _most_at_once(self) -> int:
        """The most bytes that one operation of the backward reads and makes, besides those of `known`."""
        tape = self.tape
        ops = (tape.ops[number] for what, number in tape.events[tape.back :] if what == What.MAKE)
        met = ({*op.made, *op.wrote, *op.read} - tape.known for op in ops)
        return max((sum(tape.sizes[storage] for storage in each) for each in met), default=0)
