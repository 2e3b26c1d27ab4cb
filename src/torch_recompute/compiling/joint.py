"""The joint graph of a compiled step: what its forward makes, what its backward needs, and what lives when.

AOTAutograd traces forward and backward as one graph, and a partition says which values of the forward are saved for the
backward; what backward needs besides is made there again. `Joint` reads such a graph once, by storages: a view costs
nothing and is made again from what it views. `Joint.simulate` then counts, for any set of saved values, the bytes
that live at each operation of both graphs, and what is run again.

Counted as the compiler runs it: a value made by an operation on each element, and read by such operations alone, is a
part of their kernel and takes no memory. Operations are run again just before backward first reads what they make. What
is alive before the step (parameters, buffers, the batch) is not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from .._torch.partitioning import backward_of, flops_of, is_pointwise, may_run_again, outputs_of, storages

# FLOPs that a byte counts as which an operation reads or writes when it runs again. What is a part of other kernels is
# nearly free, and a sum over elements costs a pass of its own.
BYTE, FUSED_BYTE = 1.0, 0.001


@dataclass
class Value:
    """A storage that the forward makes, or is given.

    Attributes:
        node: The node that makes it.
        bytes: Its size; 0 for what is alive before the step.
        maker: The operation that makes it, by number; None for what is given.
        output: Whether the forward returns it, so that it is alive anyway.
        readers: The operations of the forward that read it.
        uses: The operations of backward that read it, in order.
        inside: Whether it takes no memory, as a part of the kernels that read it.
    """

    node: fx.Node
    bytes: int
    maker: int | None
    output: bool = False
    readers: list[int] = field(default_factory=list[int])
    uses: list[int] = field(default_factory=list[int])
    inside: bool = False


@dataclass
class GraphOperation:
    """An operation of the forward that makes new memory.

    Attributes:
        node: Its node.
        reads: The values that it reads.
        makes: The values that it makes.
        flops: Its FLOPs.
        cost: What running it again costs, in FLOPs and a share for each byte.
        again: Whether it may run again: it draws no random numbers, changes and sends nothing.
        required: Whether the forward's outputs need it; else it runs once, in whichever of the two graphs needs it.
    """

    node: fx.Node
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    cost: float
    again: bool
    required: bool = False


class Use(NamedTuple):
    """An operation of backward: the forward's values that it reads, and the storages of backward it reads and makes."""

    node: fx.Node
    values: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]


class Lives(NamedTuple):
    """The bytes alive with a set of saved values.

    Attributes:
        forward: Bytes alive at each operation of the forward; 0 for one that runs in backward alone.
        backward: Bytes alive at each operation of backward, what is run again for it included.
        again: The operations that are run again.
        saved: Bytes that backward keeps from the forward.
    """

    forward: list[int]
    backward: list[int]
    again: tuple[int, ...]
    saved: int

    @property
    def peak(self) -> int:
        """The most bytes alive at any time."""
        return max([*self.forward, *self.backward], default=0)


class Joint:
    """A joint graph, read.

    Args:
        graph: The graph, as a partitioner is given it.
        outputs: How many of its outputs the forward returns; the others are gradients.

    Attributes:
        gradient_bytes: At each operation of backward, bytes of the gradients to be returned that are made by then.
    """

    def __init__(self, graph: fx.Graph, outputs: int) -> None:
        self.graph = graph
        self.values: list[Value] = []
        self.operations: list[GraphOperation] = []
        self.uses: list[Use] = []
        self.index: dict[int, int] = {}  # values by their storage
        leaves = outputs_of(graph)
        self.returned = [node for node in leaves[:outputs] if isinstance(node, fx.Node)]
        self._gradients = {key for node in leaves[outputs:] if isinstance(node, fx.Node) for key, _ in storages(node)}
        self.backward = backward_of(graph)
        for node in graph.nodes:
            if node.op == "placeholder" and node not in self.backward:
                for key, _ in storages(node):
                    self._value(key, node, 0, None)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in self.backward:
                self._operation(node)
        for key in (key for node in self.returned for key, _ in storages(node)):
            self.values[self.index[key]].output = True
        for node in graph.nodes:
            if node.op == "call_function" and node in self.backward:
                self._use(node)
        for node in leaves[outputs:]:
            if isinstance(node, fx.Node) and node not in self.backward:  # a gradient that the forward makes
                for value in self._reads([node]):
                    self.values[value].uses.append(len(self.uses) - 1)
        self._mark()
        self._readers = [sum(self.operations[r].required for r in value.readers) for value in self.values]
        self._last_read = {key: at for at, use in enumerate(self.uses) for key in use.reads}
        returned = (sum(size for key, size in use.makes if key in self._gradients) for use in self.uses)
        self.gradient_bytes = list(accumulate(returned))

    def _value(self, key: int, node: fx.Node, size: int, maker: int | None) -> int:
        self.index[key] = len(self.values)
        self.values.append(Value(node, size, maker))
        return self.index[key]

    def _reads(self, nodes: list[fx.Node]) -> tuple[int, ...]:
        found = dict.fromkeys(self.index[k] for node in nodes for k, _ in storages(node) if k in self.index)
        return tuple(found)

    def _operation(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return
        new = [(key, size) for key, size in storages(node) if key not in self.index]
        if not new:
            return
        number, reads = len(self.operations), self._reads(node.all_input_nodes)
        makes: list[int] = []
        for key, size in new:
            maker = next((user for user in node.users if user.target is operator.getitem and _has(user, key)), node)
            makes.append(self._value(key, maker, size, number))
        for value in reads:
            self.values[value].readers.append(number)
        count = flops_of(node)
        moved = sum(size for _, size in new) + sum(self.values[value].bytes for value in reads)
        cost = count + moved * (FUSED_BYTE if is_pointwise(node) else BYTE)
        self.operations.append(GraphOperation(node, reads, tuple(makes), count, cost, may_run_again(node)))

    def _use(self, node: fx.Node) -> None:
        values = self._reads(node.all_input_nodes)
        reads = dict.fromkeys(
            key for given in node.all_input_nodes if given in self.backward for key, _ in storages(given)
        )
        own = [pair for pair in storages(node) if pair[0] not in self.index and pair[0] not in reads]
        for value in values:
            self.values[value].uses.append(len(self.uses))
        self.uses.append(Use(node, values, tuple(reads), tuple(own)))

    def _mark(self) -> None:
        wanted = set(self.returned)
        todo = list(wanted)
        while todo:
            for node in todo.pop().all_input_nodes:
                if node not in wanted:
                    wanted.add(node)
                    todo.append(node)
        for one in self.operations:
            one.required = one.node in wanted
        fusible = [is_pointwise(one.node) for one in self.operations]
        for value in self.values:
            if value.maker is not None and fusible[value.maker] and not value.output:
                readers = [fusible[reader] for reader in value.readers]
                readers += [is_pointwise(self.uses[use].node) for use in value.uses]
                value.inside = all(readers) and len(readers) == 1

    def simulate(self, saved: Collection[int]) -> Lives:
        """Counts what lives with a set of saved values.

        Args:
            saved: Values that backward keeps from the forward; what is given, and what the forward returns, is there
                anyway.
        """
        kept = set(saved)
        forward, live = list[int](), 0
        left = [*self._readers]
        for one in self.operations:
            if not one.required and not any(value in kept for value in one.makes):
                forward.append(0)
                continue
            made = [self.values[value] for value in one.makes]
            live += sum(value.bytes for value in made)
            forward.append(live)
            for value in one.makes:
                live -= self._dies(value, left, kept)
            for value in one.reads:
                if one.required:
                    left[value] -= 1
                    if left[value] == 0 and self.values[value].maker is not None:
                        live -= self._dies(value, left, kept)
        return self._backward(kept, forward)

    def _dies(self, number: int, left: list[int], kept: set[int]) -> int:
        value = self.values[number]
        return 0 if left[number] > 0 or number in kept or value.output else value.bytes

    def _backward(self, kept: set[int], forward: list[int]) -> Lives:
        again = self.again(kept)
        last = self._last_uses(kept, again)
        there = {number for number, value in enumerate(self.values) if value.maker is None or value.output}
        there |= kept
        ends: dict[int, list[int]] = {}
        for number, use in last.items():
            ends.setdefault(use, []).append(number)
        live = sum(self.values[number].bytes for number in there)
        saved = sum(self.values[number].bytes for number in kept)
        backward: list[int] = []
        alive: dict[int, int] = {}
        for at, use in enumerate(self.uses):
            for number in self._order(use.values, there):
                there.add(number)
                if not self.values[number].inside:
                    live += self.values[number].bytes
            for key, size in use.makes:
                alive[key] = size
                live += size
            backward.append(live)
            for number in ends.get(at, ()):
                value = self.values[number]
                if number in there and value.maker is not None and not value.output:
                    live -= value.bytes if number in kept or not value.inside else 0
            gone = [key for key in (*use.reads, *(key for key, _ in use.makes)) if self._last_read.get(key, at) <= at]
            for key in dict.fromkeys(gone):
                if key in alive and key not in self._gradients:
                    live -= alive.pop(key)
        return Lives(forward, backward, again, saved)

    def again(self, kept: Collection[int]) -> tuple[int, ...]:
        """The operations that backward runs again, in order, if these values are saved."""
        wanted, found = {number for number, value in enumerate(self.values) if value.uses}, list[int]()
        for number in reversed(range(len(self.operations))):
            one = self.operations[number]
            if any(value in wanted and value not in kept and not self.values[value].output for value in one.makes):
                found.append(number)
                wanted.update(one.reads)
        return tuple(reversed(found))

    def _last_uses(self, kept: set[int], again: tuple[int, ...]) -> dict[int, int]:
        """When backward reads each value for the last time, by its own operations or by those that it runs again."""
        first = [value.uses[0] if value.uses else len(self.uses) for value in self.values]
        last = {number: value.uses[-1] for number, value in enumerate(self.values) if value.uses}
        for number in reversed(again):
            one = self.operations[number]
            at = min((first[value] for value in one.makes if value not in kept), default=len(self.uses))
            for value in one.reads:
                last[value] = max(last.get(value, -1), at)
                first[value] = min(first[value], at)
        return last

    def _order(self, values: tuple[int, ...], there: set[int]) -> list[int]:
        """The values to be made again before these can be read, in order."""
        found: dict[int, None] = {}
        todo = [(value, False) for value in reversed(values)]
        while todo:
            number, ready = todo.pop()
            if number in there or number in found:
                continue
            maker = self.values[number].maker
            assert maker is not None
            if ready:
                found.update(dict.fromkeys(self.operations[maker].makes))
                continue
            todo.append((number, True))
            todo += [(value, False) for value in self.operations[maker].reads]
        return [number for number in found if number not in there]


def _has(node: fx.Node, key: int) -> bool:
    return any(key == one for one, _ in storages(node))
