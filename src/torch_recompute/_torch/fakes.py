"""Fake tensors: tensors with a shape, a type, a device and a storage of a known size, and no memory.

PyTorch's compiler uses them; their names are private. `simulation/` is what uses them here.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import logging
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch
import torch._subclasses.fake_tensor as _fake_tensor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_C: Any = torch._C


below_autograd: Callable[[], AbstractContextManager[None]] = _C._AutoDispatchBelowAutograd
"""A context in which operations are run without autograd, and are not taken apart for it."""

_mode_of: Callable[[Any], object] = _C._get_dispatch_mode
_TRACERS = tuple(getattr(_C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def traced() -> bool:
    """Whether torch traces a function just now, as an operator of functions does with those that it is given."""
    return any(_mode_of(key) is not None for key in _TRACERS)


@contextmanager
def flex_uncompiled() -> Generator[None]:
    """A context in which `flex_attention` does not compile itself, which it cannot where a dispatch mode is active."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    before = getattr(module, _FLEX, None)
    if before is not None:
        setattr(module, _FLEX, True)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, _FLEX, before)


@contextmanager
def fakes_quiet() -> Generator[None]:
    """A context in which torch says nothing of fake tensors itself, unless our own log is verbose.

    It would log an operation that fails besides raising, and warn where a kernel such as cuDNN's LSTM reads an address.
    """
    log = logging.getLogger(_fake_tensor.__name__)
    before = log.disabled
    log.disabled = before or not logging.getLogger("torch_recompute").isEnabledFor(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.disabled = before


_FLEX = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

NOT_FAKED: tuple[type[Exception], ...] = (
    NotImplementedError,
    _fake_tensor.UnsupportedFakeTensorException,
    _fake_tensor.UnsupportedOperatorException,
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
)
"""The errors of an operation that runs on real tensors only."""

is_wrapper: Callable[[object], bool] = cast("Any", is_traceable_wrapper_subclass)
"""Whether a tensor is made of others that it can be taken apart into (`__tensor_flatten__`)."""


def writes(func: Any) -> bool:
    """Whether an operation's schema says that it writes to an argument; False where it has no schema."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operation: its name, its arguments and its results."""


def taken_by(func: Any) -> list[str]:
    """The names of the arguments of an operation."""
    return [argument.name for argument in schema_of(func).arguments]


def returned(func: Any) -> list[str]:
    """The names of the results of an operation, "" for one without."""
    return [result.name or "" for result in schema_of(func).returns]


def on_fakes(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool = True
) -> Any:
    """Runs an operation on fake tensors; the mode is not active.

    Where it will not run it `again`, the mode does not look for the result among those that it keeps, nor keeps it,
    which takes as long as the operation.
    """
    cached, mode.cache_enabled = mode.cache_enabled, mode.cache_enabled and again
    try:
        return mode.dispatch(func, (), args, kwargs)
    finally:
        mode.cache_enabled = cached


class Answers(Protocol):
    """Answers for fake tensors what needs their memory."""

    def values_of(self, fake: torch.Tensor, what: str) -> torch.Tensor:
        """Real values for a fake tensor, of which `what` asks."""
        ...

    def address_of(self, fake: torch.Tensor) -> int:
        """The address of its memory."""
        ...

    @property
    def host(self) -> torch.device:
        """The device of fakes in host memory."""
        ...


def answer_for(mode: FakeTensorMode, answers: Answers) -> None:
    """Lets fakes of a mode answer `numpy()`, `data_ptr()`, `format()` and `deepcopy()`, which those of others refuse.

    These methods of `FakeTensor` look for the answers at each call. A function mode would see these calls too, and
    every other one of the model besides, which takes a sixth of a simulation.
    """
    cast("Any", mode)._answers_of_torch_recompute = weakref.proxy(answers)
    fakes: Any = FakeTensor
    fakes.numpy, fakes.data_ptr, fakes.__format__, fakes.__deepcopy__ = _numpy, _data_ptr, _format, _deepcopy


def _answers(fake: Any) -> Answers | None:
    return getattr(fake.fake_mode, "_answers_of_torch_recompute", None)


CPU = torch.device("cpu")
APART = torch.device("meta")
"""The device of host memory where fakes on the CPU stand for tensors of a device that is not here."""


def host_of(tensor: torch.Tensor) -> torch.device:
    """The device of tensors in host memory, for a tensor that may be a fake."""
    answers = _answers(tensor) if type(tensor) is FakeTensor else None
    return CPU if answers is None else answers.host


def _numpy(fake: torch.Tensor, *, force: bool = False) -> Any:
    answers = _answers(fake)
    return torch.Tensor.numpy(fake if answers is None else answers.values_of(fake, "Tensor.numpy"), force=force)


def _data_ptr(fake: torch.Tensor) -> int:
    answers = _answers(fake)
    return torch.Tensor.data_ptr(fake) if answers is None else answers.address_of(fake)


def _format(fake: torch.Tensor, spec: str) -> str:
    answers = None if fake.dim() else _answers(fake)
    return torch.Tensor.__format__(fake if answers is None else answers.values_of(fake, "Tensor.__format__"), spec)


def _deepcopy(fake: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    if not fake.is_leaf or _answers(fake) is None:
        return torch.Tensor.__deepcopy__(fake, memo)
    made = memo.get(id(fake))
    if made is None:
        with torch.no_grad():
            if isinstance(fake, nn.Parameter):
                made = nn.Parameter(fake.clone(), fake.requires_grad)
            else:  # over a copy of its storage, which other copies share
                storage: Any = fake.untyped_storage()
                copies = memo.setdefault("torch", {})
                if storage._cdata not in copies:
                    flat = fake.as_strided((storage.nbytes() // fake.element_size(),), (1,), 0)
                    copies[storage._cdata] = flat.clone().untyped_storage()
                made = over(copies[storage._cdata], fake.storage_offset(), fake, device_of(fake))
        memo[id(fake)] = made.requires_grad_(fake.requires_grad)
    return made


class FakeMaker:
    """Makes fake tensors of a mode over tensors on meta as `FakeTensor(mode, meta, device)` does, ten times faster.

    A fake's attributes follow from its mode and its device, so they are taken over from the first one of each device.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        unsafe = cast("Any", mode)._allow_unsafe_data_ptr_access
        self._refuse_address = (
            _C._set_warn_deprecated_on_mutable_data_ptr if unsafe else _C._set_throw_on_mutable_data_ptr
        )

    def __call__(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the fake tensor."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self._mode, meta, device)
            self._attributes[device] = vars(made).copy()
            return made
        made = _C.TensorBase._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._refuse_address(made)
        vars(made).update(attributes)
        return made


def parameter(tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter over a tensor that nothing else refers to; a fake one becomes it, without the dispatcher."""
    if type(tensor) is not FakeTensor:
        return nn.Parameter(tensor, requires_grad)
    made: Any = tensor.requires_grad_(requires_grad)
    made._is_param = True  # as `nn.Parameter` says of a detached one
    return made


def device_of(tensor: torch.Tensor) -> torch.device:
    """A tensor's device; of a fake one, without the dispatcher."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def over(
    storage: torch.UntypedStorage, offset: Any, like: torch.Tensor, device: torch.device | str = "meta"
) -> torch.Tensor:
    """A tensor of the type, shape and strides of another over a storage; fake where a fake mode is active."""
    return lay(storage, offset, (like.shape, like.stride()), like.dtype, device)


def lay(
    storage: torch.UntypedStorage, offset: Any, layout: tuple[Any, Any], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A tensor with a shape and strides over a storage, which keeps its size."""
    made: Any = torch.empty(0, dtype=dtype, device=device)
    size = storage.nbytes()
    made.set_(storage, offset, *layout)
    if storage.nbytes() != size:  # memory that has been discarded can be viewed, and stays so
        storage.resize_(size)
    return made


@contextmanager
def resizes(note: Callable[[], None]) -> Generator[None]:
    """Calls `note` whenever a storage is resized by its own method in the block, which no dispatch mode is shown."""
    kind: Any = torch.UntypedStorage
    method, own = kind.resize_, "resize_" in vars(kind)

    def resize(storage: Any, size: int) -> Any:
        note()
        return method(storage, size)

    kind.resize_ = resize
    try:
        yield
    finally:
        if own:
            kind.resize_ = method
        else:
            del kind.resize_


@contextmanager
def converted(refuse: Callable[[str, torch.Tensor, torch.Tensor], Exception]) -> Generator[None]:
    """Lets modules with fake parameters be asked for the type or device that they have, `module.to(...)`, in the block.

    `Module.to` swaps a fake parameter for what it has been converted to, even for itself, and PyTorch cannot swap one
    that anything watches.

    Args:
        refuse: The error for a real conversion, from a parameter's name, itself, and what it was to become.
    """
    method: Any = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        named = list(module.named_parameters(recurse=recurse))
        if not any(isinstance(parameter, FakeTensor) for _, parameter in named):
            return method(module, fn, recurse)
        with torch.no_grad():
            for name, parameter in named:
                made = fn(parameter)
                if made is not parameter:
                    raise refuse(name, parameter, made)
        for one in module.modules() if recurse else (module,):
            one._buffers.update({name: fn(buffer) for name, buffer in one._buffers.items() if buffer is not None})
        return module

    cast("Any", nn.Module)._apply = apply
    try:
        yield
    finally:
        cast("Any", nn.Module)._apply = method


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a `DTensor`, a part of one that is on several ranks."""
    return any(kind.__name__ == "DTensor" and kind.__module__.startswith("torch.") for kind in type(tensor).__mro__)


def remade_of(tensor: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor made of others, put together of what `make` returns for each of them."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: make(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of a tensor made of others, taken apart and put together again."""
    return mode.from_tensor(tensor, static_shapes=True)
