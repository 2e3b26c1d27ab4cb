"""Every private PyTorch name that the library uses, each behind one plain function.

PyTorch offers no public way to push saved-tensor hooks without a context manager object, to ask which backward
call is running, or to see the stacks of ambient modes. The engine needs these on its hot path. They are gathered
here so that a new torch release is answered in one file, and `tests/project/test_architecture.py` keeps them from
spreading. Supported: torch 2.11 and later. Where a name is newer than 2.11 the fallback is beside it, and
`tests/core/test_torch_shims.py` takes the newer name away to run it.

Invariants: nothing here decides anything; a function either answers a question about PyTorch's state or changes
that state and nothing else.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext as _TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .devices import ACCELERATOR as ACCELERATOR
from .devices import accelerator as accelerator
from .devices import device_generators as device_generators
from .devices import device_states as device_states
from .devices import in_use as in_use
from .devices import on_streams as on_streams
from .devices import set_device_state as set_device_state
from .devices import stream_for as stream_for
from .devices import streams_of as streams_of
from .devices import wait_for as wait_for
from .modes import KERNEL_ORDERS as KERNEL_ORDERS
from .modes import autocast_dtype as autocast_dtype
from .modes import autocast_on as autocast_on
from .modes import function_modes as function_modes
from .modes import pop_dispatch_mode as pop_dispatch_mode
from .modes import push_dispatch_mode as push_dispatch_mode
from .modes import set_flags as set_flags
from .modes import set_function_modes as set_function_modes
from .modes import settings as settings
from .modes import split_settings as split_settings

_C: Any = torch._C
_autograd: Any = _C._autograd

# --- the running backward -----------------------------------------------------------------------------------------

graph_task_id: Callable[[], int] = _C._current_graph_task_id
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Whether the running backward call was asked to retain its graph. To be asked within one."""


def in_backward() -> bool:
    """Whether a backward call runs on this thread."""
    return graph_task_id() != -1


def graph_is_kept() -> bool:
    """Whether the running backward call was asked to retain its graph. False outside of backward."""
    return in_backward() and keeps_graph()


current_node: Callable[[], Any] = _C._current_autograd_node
"""The autograd node that runs now on this thread, or None outside of backward."""


_engine: Any = cast("Any", torch.autograd.Variable)._execution_engine
after_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Runs a function when the running backward call has ended."""


_MOST_NODES = 10_000  # to look at before giving up


def nodes_from(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of a graph from some of them on (None is none), each once, nearest first."""
    queue = deque(filter(None, roots))
    seen = set(queue)
    while queue:
        node = queue.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def upstream() -> Iterator[Any]:
    """The nodes that the running backward is at and has yet to reach, nearest first."""
    return islice(nodes_from([current_node()]), _MOST_NODES)


exec_group: Callable[[], Any] = getattr(_C, "_get_graph_exec_group", lambda: None)
"""The `torch.utils.checkpoint.GraphExecGroup` that several backward calls were put in, or None."""


sequence_number: Callable[[], int] = _autograd._get_sequence_nr
"""The number that the next autograd node of this thread will get: equal for all tensors saved by one operation."""


def sequence_of(node: Any) -> int:
    """The sequence number of an autograd node, by which older nodes come first; larger than all for leaves."""
    return node._sequence_nr()


set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled

# --- tensors ----------------------------------------------------------------------------------------------------


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is an `nn.Parameter`, also one whose data is a tensor subclass."""
    kind = type(tensor)
    if kind is torch.Tensor:
        return False
    return kind is torch.nn.Parameter or bool(getattr(tensor, "_is_param", False))


def parameter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The `nn.Parameter` that `tensor` is, or is a view of (`F.linear` saves `weight.t()`); else None."""
    if is_parameter(tensor):
        return tensor
    if tensor._is_view():
        base: Any = tensor._base
        return base if base is not None and is_parameter(base) else None
    return None


_PLAIN: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain(value: Any) -> bool:
    """Whether `value` is a tensor whose strides say where its elements are: no subclass, but a fake one may be."""
    return type(value) in _PLAIN


def is_plain_kind(kind: type) -> bool:
    """Whether a tensor of a class is plain: see `is_plain`."""
    return kind in _PLAIN


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the memory behind `tensor`, shared by its views; 0 where it has none (sparse layouts).

    An identity is meaningful only while the memory is alive, as with `id`.
    """
    try:
        storage: Any = tensor.untyped_storage()
        return storage._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def is_emptied(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has been taken away (`untyped_storage().resize_(0)`), as ZeRO does meanwhile."""
    return tensor.layout is torch.strided and storage_id(tensor) != 0 and not tensor.untyped_storage().nbytes()


def being_traced() -> bool:
    """Whether torch.compile is tracing the code that calls this."""
    return _TracingContext.try_get() is not None


no_torch_function: Any = _C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that does nothing with functions of its own."""


def without_memory(kind: type, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has a layout and no memory, and answers for itself in `__torch_dispatch__`."""
    make = torch.Tensor._make_wrapper_subclass
    return make(kind, shape, strides=stride, dtype=dtype, device=device)  # pyright: ignore[reportArgumentType]


def _differ(a: int, b: int, size: int) -> bool:
    return ctypes.string_at(a, size) != ctypes.string_at(b, size)


_compare: Any = getattr(ctypes.pythonapi, "memcmp", _differ)  # Windows has it elsewhere
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous CPU tensors of bytes are equal; a tenth of the time of `torch.equal`."""
    size = a.numel()
    return size == b.numel() and not _compare(a.data_ptr(), b.data_ptr(), size)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The contents of a contiguous CPU tensor of bytes, outside of PyTorch's memory."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def holds_bytes(tensor: torch.Tensor, content: bytes) -> bool:
    """Whether a contiguous CPU tensor of bytes holds these."""
    size = tensor.numel()
    return size == len(content) and not _compare(tensor.data_ptr(), content, size)


def write_bytes(tensor: torch.Tensor, content: bytes) -> torch.Tensor:
    """Writes bytes into a contiguous CPU tensor of as many, and returns it."""
    ctypes.memmove(tensor.data_ptr(), content, tensor.numel())
    return tensor


def _clone_each(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    into = [*map(torch.empty_like, tensors)]
    torch._foreach_copy_(into, tensors)
    return into


clone_each: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = getattr(torch, "_foreach_clone", _clone_each)
"""Copies each tensor; on a device in one launch if they are alike. Since torch 2.12."""


def copy_each(tensors: Sequence[torch.Tensor], values: Any) -> None:
    """Copies each tensor of the second list into that of the first; on a device in one launch if they are alike.

    CUDA's launch raises versions itself, within `versions_kept` too: it gets aliases, which have versions of their own.
    """
    torch._foreach_copy_([tensor.data for tensor in tensors], values)


versions_kept: Callable[[], contextlib.AbstractContextManager[None]] = _C._AutoDispatchBelowADInplaceOrView
"""A context without autograd, in which no version rises: another thread may read one at any moment."""


assert_on_device: Callable[[torch.Tensor, str], None] = torch._assert_async
"""Fails once the device has found a tensor of one element to be zero: the next wait for the device raises."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def _dict_version() -> Callable[[dict[Any, Any]], int]:
    """Torch's version of dictionaries, if it sees attributes that are set: on Python 3.13 it does not."""
    version: Any = getattr(_C._dynamo.guards, "dict_version", None)
    if version is not None:
        probe = torch.nn.Module()
        before = version(vars(probe))
        probe.training = False
        if version(vars(probe)) != before:
            return version
    return cast("Any", partial(next, count()))


version_of_dict: Callable[[dict[Any, Any]], int] = _dict_version()
"""The version of a dictionary, which changes when that does; where torch has none, a new number at each call."""


def is_operator(func: object) -> bool:
    """Whether a dispatch mode is shown one operator, not an operator of other functions."""
    return isinstance(func, torch._ops.OpOverload)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operation that its schema says it writes to; empty where it has no schema."""
    if not getattr(getattr(func, "_schema", None), "is_mutable", False):
        return []
    arguments = enumerate(func._schema.arguments)
    written = ((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


# --- diagnosis ----------------------------------------------------------------------------------------------------


_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_Pack = TypeVar("_Pack", bound=Callable[..., Any])

push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None]
push_hooks = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
ambient_hooks: Callable[[], _Hooks | None] = partial(_autograd._top_saved_tensors_default_hooks, True)
"""The innermost saved-tensor hooks now active on this thread, or None."""


class _Beneath:
    """Finds the user's hooks, where torch asks one of this library's pack hooks for the hooks around it."""

    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> _Hooks | None:
        ours: list[_Hooks] = []
        while (hooks := ambient_hooks()) is not None and getattr(hooks[0], "_user_hooks", None) is _BENEATH:
            ours.append(hooks)
            pop_hooks()
        for hook in reversed(ours):
            push_hooks(*hook)
        return hooks


_BENEATH = (_Beneath(), None)


SEE_THROUGH: dict[str, Any] = {"_checkpoint_internal": True, "_user_hooks": _BENEATH}
"""Attributes that mark a pack hook as torch 2.14 marks its own: the user's are those beneath it.

The selective contexts of `torch.utils.checkpoint` store tensors outside the graph. They pass them through the
user's saved-tensor hooks if asked to, else they warn that they do not; neither is meant for a hook of ours.
"""


def see_through(pack: _Pack) -> _Pack:
    """Marks a pack hook as one of this library's, with `SEE_THROUGH`."""
    pack.__dict__.update(SEE_THROUGH)
    return pack


_NODES: Any = _pytree.SUPPORTED_NODES


def node_of(value: Any) -> Any:
    """The functions that take a pytree container apart and put it together; None for a leaf."""
    kind = type(value)
    node = _NODES.get(kind)
    if node is None and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        node = _NODES[namedtuple]
    return node


def is_container(value: Any) -> bool:
    """Whether `value` is a pytree node: a tuple, list, dict, named tuple or a registered class."""
    return node_of(value) is not None


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree, and its structure for `tree_unflatten`.

    PyTorch's own functions of these names define a recursive closure, seven objects of cyclic garbage per call.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> Any:
    node = node_of(tree)
    if node is None:
        leaves.append(tree)
        return None
    children, context = node.flatten_fn(tree)
    return node.unflatten_fn, context, [_flatten(child, leaves) for child in children]


def tree_unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """A pytree of the structure `spec` with these leaves."""
    return _unflatten(iter(leaves), spec)


def _unflatten(leaves: Iterator[Any], spec: Any) -> Any:
    if spec is None:
        return next(leaves)
    unflatten, context, children = spec
    return unflatten([_unflatten(leaves, child) for child in children], context)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree."""
    return tree_flatten(tree)[0]
