"""Texts about CUDA graphs: what a captured region cannot do."""

from __future__ import annotations


def host_in_graph() -> str:
    """Text for offloading while a CUDA graph is captured."""
    return (
        "OnHost was given a tensor while a CUDA graph is captured. What is copied in one graph could not be waited for "
        "in another, and pinned memory would be the same at every launch.\n"
        "  Keep the tensors of captured regions on the device: leave out inputs=OnHost() and store=OnHost() there, or "
        "capture only parts of the model that hold no such region."
    )


def drawn_in_another_graph(region: str) -> str:
    """Text for a replay that would draw other random numbers than its forward."""
    return (
        f"the replay of {region} draws random numbers, but is not captured in the CUDA graph in which its forward was. "
        "Each graph is launched from the generator's offset at that moment, so the replay would draw other numbers "
        "than the forward, and the gradients would be wrong.\n"
        "  Capture forward and backward in one graph (torch.cuda.graph around the whole step); or keep what is drawn: "
        "no_recompute(F.dropout) is not repeated; or leave the region out of make_graphed_callables."
    )


def through_the_host(region: str, value: object) -> str:
    """Text for a carried value that lies in host memory."""
    return (
        f"{region} carries {value} from its forward to its replay while a CUDA graph is captured. Every launch of the "
        "graph would use this one: what is decided on the host is decided once, when the graph is captured.\n"
        "  Carry a tensor on the device (a mask, indices) instead, or decide before the capture and pass the decision "
        "as an argument of the region."
    )


def read_in_graph(name: str, error: object) -> str:
    """Text for a choice that reads from the device while a CUDA graph is captured."""
    return (
        f"{name} failed while a CUDA graph is captured: {error}\n"
        "  Nothing can be read from the device then (.item(), .tolist(), a branch on a tensor), because nothing runs. "
        "Let it return a tensor on the device (a mask, indices), or decide before the capture."
    )


def values_in_graph() -> str:
    """Text for `check="values"` while a CUDA graph is captured."""
    return (
        'check="values" was asked for while a CUDA graph is captured; it reads the values that it compares, and '
        "nothing can be read from the device then.\n"
        '  Check the model once without a graph, and capture it with check="metadata", the default.'
    )


def fork_in_graph(name: str) -> str:
    """Text for another random stream while a CUDA graph is captured."""
    return (
        f"fork({name!r}) was entered while a CUDA graph is captured. It would set the seed of the device's generator, "
        "which a capture does not allow.\n"
        "  Capture only parts of the model without a fork, or draw from a generator of your own that the graph knows: "
        "graph.register_generator_state(generator), then torch.rand(..., generator=generator)."
    )
