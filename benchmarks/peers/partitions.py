"""What a partition of a joint graph came to, read from the two graphs that it made, whoever made it."""

from __future__ import annotations

from torch import fx

from torch_recompute._torch.partitioning import outputs_of, storages
from torch_recompute.compiling.joint import Joint


def saved_by(joint: Joint, forward: fx.GraphModule, outputs: int) -> list[int]:
    """The values, by number, that a forward hands to its backward besides inputs and outputs of the model.

    Args:
        joint: The joint graph, read before it was split; each value is counted once, however many views are handed on.
        forward: The graph of the forward.
        outputs: How many of its outputs the model returns.
    """
    nodes = [node for node in outputs_of(forward.graph)[outputs:] if isinstance(node, fx.Node)]
    keys = dict.fromkeys(key for node in nodes for key, _ in storages(node))
    found = (joint.index[key] for key in keys if key in joint.index)  # states of generators are none of them
    return [number for number in found if joint.values[number].maker is not None and not joint.values[number].output]


def replayed_by(joint: Joint, backward: fx.GraphModule) -> int:
    """FLOPs of the forward's operations that a backward has as well, by themselves or with their random state."""
    flops = {one.node.name: one.flops for one in joint.operations if one.required}
    found = 0
    for node in backward.graph.nodes:
        if "run_with_rng_state" in str(node.target):
            found += next(one.flops for one in joint.operations if one.node.target in node.args)
        elif node.op == "call_function":
            found += flops.get(node.name, 0)
    return found
