"""What to write against each finding."""

from __future__ import annotations

from collections.abc import Sequence

from .comparing import Difference

CARRY = (
    "have the choice carried to the replay: carry=True in the plan's Choice, or replay(fn) around it "
    "(indices = replay(lambda s: s.topk(2).indices)(scores))"
)
WAIT = (
    "replay(fn) around what is read from the device, or carry=True in the plan's Choice: the replay then takes the "
    "value of the forward and does not wait; best is to read it before the region and pass it in"
)
_GENERATORS = {"random": ("Python's random", "PythonRng()"), "numpy": ("NumPy's global generator", "NumpyRng()")}
ARGUMENT = "x = x.mul(2) in place of x.mul_(2), or a clone of it: a replay needs the argument as it was"
TENSOR = (
    "recompute(fn, state=[TensorState(tensor)]), from torch_recompute.state, or the update in no_recompute(fn), or "
    "under `if not doing_recompute():`"
)
BUFFER = (
    "the update outside of the region or in no_recompute(fn), or the module in training mode: buffers of modules in "
    "training mode are put back"
)
ATTRIBUTE = "the update outside of the region or in no_recompute(fn), or under `if not doing_recompute():`"
FAILS = "a function that can be called again with the same arguments, or no_recompute(fn) around the part that cannot"
CHANGED = "the change after backward, or on a clone: a replay needs the tensor as it was in the forward"


def of_generator(name: str) -> tuple[str, str]:
    """What to call a generator, and what to write where a region advances it."""
    return _GENERATORS.get(name, ("PyTorch's default generator", ""))[0], of_generators([name])


def of_generators(names: Sequence[str]) -> str:
    """What to write where a region advances these."""
    states = [_GENERATORS[name][1] for name in names if name in _GENERATORS]
    if states:
        return f"recompute(fn, state=[{', '.join(states)}]), from torch_recompute.state"
    return "preserve_rng_state=True, which is the default"


def of_difference(found: Difference, generators: Sequence[str], places: Sequence[str]) -> str:
    """What to write where two runs differ, and these were changed by the second."""
    if generators:
        return of_generators(generators)
    if places and found.entry.chosen is None:
        return f"{ATTRIBUTE}; {places[0]} is not in the second run what it was in the first"
    if found.entry.chosen is not None:
        return CARRY
    if found.entry.random:
        return (
            "recompute(fn, state=[GeneratorRng(generator)]), from torch_recompute.state, for a generator that the "
            "region cannot see in its function's arguments, closure or globals"
        )
    if found.what == "operation":
        return (
            "replay(fn) around what decides the branch, or pass it to the region as an argument; a global or attribute "
            "that it depends on must not change before backward"
        )
    if found.what == "shape":
        return "replay(fn) around what decides the shape, or pass it to the region as an argument"
    return (
        "replay(fn) or no_recompute(fn) around it where the operation is not deterministic "
        "(torch.use_deterministic_algorithms(True) finds out); where it depends on a global or attribute, pass that to "
        "the region as an argument"
    )
