"""The state of `torch.compile`: counts of what it left out, its settings, and the graph it traces."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from . import tracing

# The counter has no reasons; torch's log has them.
NO_CUDA_GRAPH = "no CUDA graph (cudagraph_skips)"


CUT_REGION = "the plan is not in the compiled graph: region "


def fallbacks() -> dict[str, int]:
    """Counts what was not compiled, or not captured, so far, by its reason."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters: Mapping[str, Mapping[str, int]] = utils.counters
    found = {f"{CUT_REGION}{name}": count for name, count in tracing.cut.items()}
    found |= {f"graph break: {_first_line(why)}": count for why, count in counters["graph_break"].items()}
    inductor = counters["inductor"]
    if inductor.get("cudagraph_skips"):
        found[NO_CUDA_GRAPH] = inductor["cudagraph_skips"]
    return found


def resumed() -> dict[str, int]:
    """Counts where compiled code goes on after a break of its graph, so far: `forward, line 30`."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counts: Mapping[str, int] = {} if utils is None else utils.counters["resumes"]
    places = {re.sub(r"^torch_dynamo_resume_in_(.*)_at_(\d+)$", r"\1, line \2", key): n for key, n in counts.items()}
    return {place: count for place, count in places.items() if ", line " in place}


def compilations() -> int:
    """A number that grows whenever the compiler is given something, by its own counters."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values()) + sum(utils.counters["stats"].values())


def _first_line(text: str) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def is_compiled(module: Any) -> bool:
    """Returns whether a module is what `torch.compile(model)` returned."""
    return type(module).__name__ == "OptimizedModule"


def any_compiled(model: torch.nn.Module) -> bool:
    """Returns whether a model, or a module in it, is to be compiled."""
    return any(module.__dict__.get("_compiled_call_impl") or is_compiled(module) for module in model.modules())


def uncompiled(model: Any) -> AbstractContextManager[Any]:
    """A context in which what is to be compiled in a model runs as it is.

    The compiler leaves code that it first sees under a dispatch mode uncompiled for the rest of the process.
    """
    return all_uncompiled() if isinstance(model, torch.nn.Module) and any_compiled(model) else nullcontext()


_open: list[Any] = []  # for each block of this process that is open, what sets the compiler's stance for all of them
_opening = threading.Lock()


@contextmanager
def all_uncompiled() -> Generator[None]:
    """A context in which all that is to be compiled runs as it is; see `uncompiled`. Two threads' may overlap."""
    if "torch._dynamo" not in sys.modules:  # loaded by the first torch.compile, and slow to import
        yield
        return
    with _opening:
        _open.append(_open[0] if _open else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _opening:
            stance = _open.pop()
            if not _open:
                stance.__exit__(None, None, None)


def calls_compiled() -> bool:
    """Returns whether this is called by what `torch.compile` returned, compiled or not."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if frames is None else sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != "compile_wrapper" or frame.f_globals is not vars(frames)):
        frame = frame.f_back
    return frame is not None


def compilers_share() -> float:
    """Returns the share of activations that compiled code may keep, by torch's own setting; 1.0 by default."""
    return float(getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0))


def activation_memory_budget(share: float) -> AbstractContextManager[Any] | None:
    """A context in which what is compiled keeps at most a share of what it would keep; None where torch has no such.

    Args:
        share: From 0 to 1, of the bytes that are kept without the setting.
    """
    try:
        config: Any = import_module("torch._functorch.config")
    except ImportError:
        return None
    return config.patch(activation_memory_budget=share) if hasattr(config, "activation_memory_budget") else None


def called() -> tuple[frozenset[str], frozenset[Any]]:
    """Returns the modules around the operation that is traced, as `str(id(module))`, and the functions around it."""
    from torch.fx import traceback

    meta = traceback.current_meta
    return (
        frozenset(map(str, meta.get("nn_module_stack") or ())),
        frozenset(function for _, function in meta.get("source_fn_stack") or ()),
    )


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Returns the storages that stand for these tensors in the graph that is traced."""
    from torch._guards import TracingContext

    context: Any = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return frozenset()
    fake: Any = context.fake_mode
    made = (fake.fake_tensor_converter.from_real_tensor(fake, tensor) for tensor in tensors)
    return frozenset(storage for tensor in made for storage in _storages(tensor))


def _storages(tensor: Any) -> list[int]:
    """The storages of a tensor, or of the tensors that a subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [key for name in tensor.__tensor_flatten__()[0] for key in _storages(getattr(tensor, name))]
    return [tensor.untyped_storage()._cdata]


def operands(operation: Any, nodes: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Of an operation and its nodes: what storage each operand is a view or a cast of, and its shape."""
    made = [node for node in nodes if node.target is operation] or nodes  # others where it is decomposed
    found: list[tuple[int, tuple[int, ...]]] = []
    for given in dict.fromkeys(given for node in made for given in node.all_input_nodes if given not in made):
        source = given
        while source.op == "call_function" and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        value, tensor = given.meta.get("val"), source.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.append((_storages(tensor)[0] if isinstance(tensor, torch.Tensor) else 0, tuple(value.shape)))
    return found
