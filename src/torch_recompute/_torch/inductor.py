"""Inductor's generated code without its kernels: in which order a graph's buffers are allocated, reused and freed.

Private: `torch._inductor.graph.GraphLowering` and the step around it in `compile_fx`, the names in the Python that it
writes, and the pass over its schedule (`_post_fusion_custom_pass`). Run on torch 2.11, 2.13, 2.14.1 and 2.15; where one
of these is missing or other, `generated` raises, and the caller counts in the graph alone.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any, NoReturn, cast
from unittest import mock

import torch
import torch._dynamo.exc
import torch._functorch.config as functorch
from torch import fx
from torch._inductor import custom_graph_pass
from torch.utils import _python_dispatch

from .fakes import FakeTensor

no_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
"""A context without the dispatch modes that are active around it; fake tensors are as before."""

_active_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack

BackendError: type[Exception] = torch._dynamo.exc.TorchDynamoException
"""What Dynamo raises, be it about the code that it traces or from a backend."""

_PASS: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11 calls any callable
_COMPILER = "from torch._inductor.async_compile import AsyncCompile"


class InOrder(_PASS):
    """Keeps kernels in the order of the graph: each at the place of the latest operation that is fused into it.

    Inductor sorts a kernel that fuses an early operation and a late one to the place of the early one, and all that the
    late one needs before it. In the backward of an encoder and a decoder that share an embedding, this is the whole
    backward except for the gradients of weights, whose inputs then wait: 58 MiB where 34 are enough.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        maker = {name: node for node in nodes for name in node.get_buffer_names()}
        found: dict[Any, None] = {}
        for last in sorted(nodes, key=lambda node: node.max_order):
            todo = [(last, False)]
            while todo:
                node, ready = todo.pop()
                if node in found:
                    continue
                if ready:
                    found[node] = None
                    continue
                needs = sorted(dep.name for dep in node.unmet_dependencies if dep.name in maker)
                todo += [(node, True), *((maker[name], False) for name in reversed(needs) if maker[name] is not node)]
        return list(found)

    def __init__(self) -> None:
        self.version = 1  # torch 2.11 pickles the pass for the key of a cache; later ones ask for the `uuid`

    def uuid(self) -> str:
        """The part of the caches' keys that is about this."""
        return f"torch_recompute.InOrder {self.version}"

    def __deepcopy__(self, memo: dict[int, Any]) -> InOrder:
        return self


def in_order() -> dict[str, Any]:
    """The option of `torch.compile` that keeps kernels in the order of the graph."""
    return {"_post_fusion_custom_pass": InOrder()}


class _Text(BaseException):
    """Carries generated code out of the compiler."""


def generated(
    graph: fx.GraphModule, backward: bool, kernel: Callable[[Sequence[Any]], object] | None = None
) -> Callable[[list[Any]], Sequence[Any]]:
    """The code that inductor writes for a forward or a backward, to be called on fake tensors.

    It allocates, views and frees as the compiled graph does, and calls products and what else inductor leaves to torch.
    The kernels that inductor writes do nothing. Nothing is compiled. As in the compiled graph, the list that it is
    called with is emptied.

    Args:
        graph: The graph; not changed.
        backward: Which of the two it is.
        kernel: Called with the arguments of each kernel that would run.

    Raises:
        Exception: Whatever a compiler may raise.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    def stop(lowering: Any) -> NoReturn:
        raise _Text(lowering.codegen()[0].value)

    graph = copy.deepcopy(graph)
    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    how: Any = {"cudagraphs": BoxedBool(False), "is_backward": backward, "graph_id": 0}
    virtual: Any = V
    with (
        no_modes(),
        config.patch({"cpp.simdlen": 1}),  # to try vectors takes a third of the time, and no kernel is compiled
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        virtual.set_debug_handler(DebugContext()),
    ):
        try:
            compile_fx._InProcessFxCompile().codegen_and_compile(graph, given, (), how)
        except _Text as text:
            return _callable(str(text), kernel or _nothing)
    raise NotImplementedError("inductor wrote no Python")


def _callable(text: str, kernel: Callable[[Sequence[Any]], object]) -> Callable[[list[Any]], Sequence[Any]]:
    assert _COMPILER in text
    names: dict[str, Any] = {"AsyncCompile": lambda: _Kernels(kernel), "__name__": "generated"}
    fakes: list[torch.Tensor] = []
    exec(compile(text.replace(_COMPILER, ""), "generated", "exec"), names)
    for name in [*names]:
        if name.startswith("empty_strided_"):
            names[name] = _Empty(fakes)
        elif name.startswith("assert_"):
            names[name] = _nothing
    names["reinterpret_tensor"] = _view

    def call(args: list[Any]) -> Sequence[Any]:
        fakes[:] = [next(x for x in args if isinstance(x, FakeTensor)).new_empty(0)]
        return names["call"](args)

    return call


class _Empty:
    """Allocates a fake tensor, beside another one: alone, one of few elements would be real in a simulated step."""

    def __init__(self, beside: list[torch.Tensor]) -> None:
        self._beside = beside

    def __call__(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._beside[0].new_empty_strided(size, stride, dtype=dtype)


def _view(tensor: torch.Tensor, size: Any, stride: Any, further: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + further)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Kernels:
    """Makes kernels of source code, in whatever language that is; they write nothing."""

    def __init__(self, called: Callable[[Sequence[Any]], object]) -> None:
        self._called = called

    def __getattr__(self, language: str) -> Any:
        return lambda *args, **kwargs: self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._called(args)

    run = __call__

    def wait(self, names: dict[str, Any]) -> None:
        """Waits for kernels that are compiled in processes of their own; here for none."""


def _under(modes: Sequence[Any], code: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Code under dispatch modes, as far as they are not active where it is called."""

    def run(args: list[Any]) -> Any:
        with ExitStack() as stack:
            active = _active_modes()
            for mode in modes:
                if mode not in active:
                    stack.enter_context(mode)
            return code(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def on_fakes(
    function: Callable[..., Any], options: dict[str, Any], kernel: Callable[[Sequence[Any]], object]
) -> Callable[..., Any]:
    """A function as inductor compiles it with some options, except for the kernels, to be called with fake tensors.

    Its operations are shown to the dispatch modes that are active where it is called.

    Args:
        function: The function; it is traced as one graph.
        options: As for `torch.compile(options=...)`.
        kernel: Called with the arguments of each kernel that would run.
    """
    from torch._inductor.compile_fx import compile_fx

    modes: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def compiled(graph: fx.GraphModule, given: Any, **more: Any) -> Callable[[list[Any]], Any]:
        return _under(modes, generated(graph, bool(more.get("is_backward")), kernel))

    def backend(graph: fx.GraphModule, given: Any) -> Any:
        return compile_fx(graph, given, inner_compile=compiled, config_patches=options)  # type: ignore[arg-type]

    # Dynamo keeps what it compiles with the code object, and the function's own is the user's.
    fresh = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    compile_it: Any = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        modes[:] = _active_modes()
        # A cached graph has kernels.
        with no_modes(), functorch.patch(enable_autograd_cache=False):
            return compile_it(*args, **kwargs)

    return run


def graph_on_fakes(
    function: Callable[..., Any], given: Sequence[torch.Tensor], kernel: Callable[[Sequence[Any]], object]
) -> Callable[..., Any]:
    """A function of tensors as AOTAutograd and inductor compile it, except for the kernels, to be called with fakes.

    It is traced here, once; torch's partitioner says what its backward keeps. Its operations are shown to the dispatch
    modes that are active where it is called.

    Args:
        function: From tensors to a list of tensors.
        given: Fake tensors of the layouts that it will be called with.
        kernel: Called with the arguments of each kernel that would run.

    Raises:
        Exception: Whatever a compiler may raise.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    modes: list[Any] = [cast("Any", given[0]).fake_mode]  # while it is traced, nobody is shown what runs

    def compiler(backward: bool) -> Callable[..., Any]:
        def compiled(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            return _under(modes, generated(graph, backward, kernel))

        return compiled

    made: Any = aot_function(
        function,
        compiler(False),
        compiler(True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # and not those of a region around it
    with no_modes(), functorch.patch(enable_autograd_cache=False, donated_buffer=False), plain:
        made(*(x.detach().requires_grad_(x.requires_grad) for x in given))

    def run(*args: torch.Tensor) -> Any:
        modes[:] = _active_modes()
        # A region finds what it keeps by a function mode, and inductor's products are none of the layer's own calls.
        with functorch.patch(enable_autograd_cache=False, donated_buffer=False), torch._C.DisableTorchFunction():
            return made(*args)

    return run
