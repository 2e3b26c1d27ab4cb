"""The settings that decide how an operation runs: autocast, allowed kernels, precision, and the ambient modes.

Each flag is a getter and the setter that takes what it returned. Which kernels a process prefers is also set by torch
itself while it runs: the first attention on a Hopper GPU puts cuDNN at the head of the SDPA priority order.

The precision of float32 has two interfaces over one state. The newer one (`torch.backends.fp32_precision`, and the
same of cuda.matmul, cudnn.conv, mkldnn.matmul ...) is a tree: what is "none" inherits from its parent, and all that can
be read is the outcome. So it is written from the root down, only where the outcome differs, and "none" is tried first:
then a branch that inherited from its parent does so again. The older one (`torch.set_float32_matmul_precision`,
`torch.backends.cudnn.allow_tf32`) refuses to answer for a state that it cannot represent. Then it is left out, and is
not asked again for that state, for its refusal takes 16 us.

Invariants: nothing here raises or warns for a state that torch allows, and `set_flags(settings())` changes nothing.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.overrides as _overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules import module as _module_calls
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from .devices import ACCELERATOR

_C: Any = torch._C
Flag = tuple[Callable[[], Any], Callable[[Any], Any]]

# --- ambient modes ------------------------------------------------------------------------------------------------

_count_function_modes: Callable[[], int] = _C._len_torch_function_stack
_function_mode_at: Callable[[int], Any] = _C._get_function_stack_at
_count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack


def function_modes() -> tuple[Any, ...]:
    """The TorchFunctionModes active on this thread, outermost first."""
    return tuple(_function_mode_at(i) for i in range(_count_function_modes()))


def set_function_modes(modes: Sequence[Any]) -> None:
    """Make `modes` the active TorchFunctionModes, without entering or leaving any of them."""
    while _count_function_modes():
        _overrides._pop_mode()
    for mode in modes:
        _overrides._push_mode(mode)


def push_dispatch_mode(mode: Any) -> None:
    """Activate `mode` without entering it."""
    _push_mode(mode)


def pop_dispatch_mode() -> None:
    """Deactivate the innermost dispatch mode without leaving it."""
    _pop_mode()


without_modes: Callable[[], AbstractContextManager[None]] = _C._DisableTorchDispatch
"""A context in which operations run as they are, whatever dispatch modes are active."""

without_functions: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction
"""A context in which functions and methods run as they are, whatever function modes are active."""


# --- flags --------------------------------------------------------------------------------------------------------


def _flag(name: str, setter: str | None = None) -> Iterator[Flag]:
    get = getattr(_C, f"_get_{name}", None)
    put = getattr(_C, f"_set_{setter or name}", None)
    if get is not None and put is not None:
        yield get, put


def _autocast(device: str) -> list[Flag]:
    return [
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        (partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    ]


def autocast_on(device: str) -> bool:
    """Whether autocast is on for a type of device; False where it knows no autocast, such as "meta"."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_dtype(*devices: str) -> str:
    """The dtype of the autocast that is on for the first of some types of device that has one; "" for none."""
    found = next((torch.get_autocast_dtype(device) for device in devices if device and autocast_on(device)), "")
    return str(found).removeprefix("torch.")


_precision_of: Any = getattr(_C, "_get_fp32_precision_getter", None)


def _put_precision(backend: str, op: str, value: str) -> None:
    for attempt in ("none", value):
        if _precision_of(backend, op) != value:
            _C._set_fp32_precision_setter(backend, op, attempt)


def _precisions() -> list[Flag]:
    """The tree of the newer interface, from the root down."""
    if _precision_of is None:
        return []
    branches = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
    leaves = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
    return [(partial(_precision_of, *node), partial(_put_precision, *node)) for node in (*branches, *leaves)]


overriding: Callable[[], bool] = _C._is_torch_function_enabled
"""Whether classes of tensors may override functions; not in `loss.backward()` of a tensor of such a class."""
_STATES = _C._TorchFunctionState.SUBCLASSES_DISABLED, _C._TorchFunctionState.ENABLED

_THREAD: list[Flag] = [
    (overriding, lambda on: _C._set_torch_function_state(_STATES[on])),
    *_autocast("cpu"),
    *(_autocast(ACCELERATOR) if ACCELERATOR is not None and torch.amp.is_autocast_available(ACCELERATOR) else ()),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
]
_PROCESS: list[Flag] = [
    *_flag("flash_sdp_enabled", "sdp_use_flash"),
    *_flag("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    *_flag("math_sdp_enabled", "sdp_use_math"),
    *_flag("cudnn_sdp_enabled", "sdp_use_cudnn"),
    *_flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    *_flag("sdp_priority_order"),
    *_flag("cudnn_enabled"),
    *_flag("mkldnn_enabled"),
    (torch.get_default_dtype, torch.set_default_dtype),
]
_PRECISIONS = _precisions()
_FLAGS = [*_THREAD, *_PROCESS, *_PRECISIONS]
_OLDER: list[Flag] = [
    *_flag("cublas_allow_tf32"),
    *_flag("float32_matmul_precision"),
    *_flag("cudnn_allow_tf32"),
]
_get_flags = [get for get, _ in _FLAGS]
_get_older = [get for get, _ in _OLDER]
_get_all = [*_get_flags, *_get_older]
_tree = slice(len(_FLAGS) - len(_PRECISIONS), len(_FLAGS))
_refused: dict[tuple[Any, ...], set[int]] = {}  # by state of the tree: which of the older interface cannot represent it


def _with_refusals() -> list[Any]:
    """Reads the settings where the older interface refuses to tell some of them: None there."""
    values = [*map(call, _get_flags)]
    tree = tuple(values[_tree])
    refused = _refused.get(tree)
    if refused is None:
        refused = _refused[tree] = {n for n, get in enumerate(_get_older) if _answer(get) is None}
    return [*values, *(None if number in refused else _answer(get) for number, get in enumerate(_get_older))]


def _answer(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return None


call: Callable[..., Any] = getattr(operator, "call", lambda fn, *args: fn(*args))  # Python 3.10 has no such


def settings() -> list[Any]:
    """Reads what decides how an operation runs: autocast, SDPA backends, cuDNN, precision; then the ambient modes."""
    try:
        values = _with_refusals() if _refused else [*map(call, _get_all)]
    except RuntimeError:
        values = _with_refusals()
    if _count_function_modes() or _count_dispatch_modes():
        values += [function_modes(), tuple(_get_current_dispatch_mode_stack())]
    return values


KERNEL_ORDERS = [(_get_flags.index(get), get) for get, _ in _flag("sdp_priority_order")]
"""Where among the settings the order is in which the process tries kernels of attention, and its getter."""


def split_settings(values: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...], tuple[Any, ...]]:
    """Splits what `settings` returned into flags, function modes and dispatch modes."""
    count = len(_get_all)
    if len(values) == count:
        return values, (), ()
    return values[:count], values[count], values[count + 1]


def set_flags(values: Sequence[Any]) -> None:
    """Puts back the flags among the settings."""
    flags, older = values[: len(_FLAGS)], values[len(_FLAGS) :]
    for (get, put), value in zip(_OLDER, older, strict=True):
        if value is not None and _answer(get) != value:  # first, for these setters write to the tree
            put(value)
    for (get, put), value in zip(_FLAGS, flags, strict=True):
        if get() != value:
            put(value)


transform_level: Callable[[], Any] = _C._functorch.maybe_current_level
"""The level of the innermost `torch.func` transform that this thread is in; None outside of one."""
dual_level: Callable[[], int] = partial(operator.itemgetter("_current_level"), vars(torch.autograd.forward_ad))
"""The level of forward-mode differentiation (`forward_ad.dual_level`) that this is in; -1 outside of one."""


def transforming() -> bool:
    """Whether this is in a transform of `torch.func` or in a dual level, where no region can be."""
    return transform_level() is not None or torch.autograd.forward_ad._current_level >= 0  # which Dynamo can trace


class ComputedWeights:
    """The cache of `parametrize.cached()`, as a state that a replay finds as the forward found it."""

    cached = staticmethod(partial(vars(parametrize).__getitem__, "_cache_enabled"))
    """How many such blocks this is in."""

    def capture(self) -> tuple[int, dict[Any, Any]]:
        """Returns how many blocks are entered, and what has been computed by now."""
        return parametrize._cache_enabled, dict(parametrize._cache)

    def restore(self, value: tuple[int, dict[Any, Any]]) -> None:
        """Makes this the cache; one that is computed for a replay is not seen by others."""
        parametrize._cache_enabled, parametrize._cache = value[0], dict(value[1])


compiler_at_work: Callable[[], Any] = _C._dynamo.eval_frame.get_eval_frame_callback
"""What compiles the functions that this thread calls; None for nothing."""


@torch._disable_dynamo
def unseen(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls `fn(*args)` as outside of what is around a backward: torch.compile, transforms, a class's own functions."""
    with temporarily_clear_interpreter_stack(), _C._EnableTorchFunction():
        return fn(*args)


def ends_silently(mode: Any) -> bool:
    """Whether leaving a dispatch or function mode runs no code of the user's, so that it may be entered again."""
    ends = type(mode).__exit__
    return ends in (TorchDispatchMode.__exit__, _overrides.TorchFunctionMode.__exit__) or ends.__module__.startswith(
        "torch."
    )


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode whose first use imports no compiler, which would leave cycles that hold the frames around it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def watch_calls(name: Any, hook: Callable[..., Any]) -> None:
    """Has a function called with each module before its forward, on all threads, until `unwatch_calls`."""
    _module_calls._global_forward_pre_hooks[name] = hook


def unwatch_calls(name: Any) -> None:
    """Ends what `watch_calls` began."""
    del _module_calls._global_forward_pre_hooks[name]
