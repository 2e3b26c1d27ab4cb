"""CUDA's way with an operation, told on any machine: its kernels of attention, its precision, its autocast."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.cuda.amp import common
from torch.library import Library

_C: Any = torch._C
_NAMES = ("math", "flash", "efficient", "cudnn")  # by the number that PyTorch knows them by


_DEFAULT = (1, 2, 0, 3, 4)


PREFERRING_CUDNN = (9, 10)
"""Major capabilities whose first choice is cuDNN: torch moves it to the front there at its first attention."""


def release() -> tuple[int, int]:
    """The release of torch, which has rules of its own for the cuDNN that it comes with."""
    major, minor, *_ = str(torch.__version__).split(".")
    return int(major), int(minor)


def enabled_backends(capability: tuple[int, int]) -> list[str]:
    """The kernels that the user has enabled, in the order in which they are tried on a device of a capability."""
    order = tuple(map(int, _C._get_sdp_priority_order()))
    if order[: len(_DEFAULT)] == _DEFAULT[: len(order)] and capability[0] in PREFERRING_CUDNN:
        order = (3, 1, 2, 0)
    backends = torch.backends.cuda
    on = {
        "math": backends.math_sdp_enabled(),
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
    }
    names = [_NAMES[number] for number in order if number < len(_NAMES)]
    return [name for name in names if on[name]]


def tf32(op: str) -> bool:
    """Whether an operation in 32 bits may be computed in TF32 on CUDA: by default a convolution may, a product not."""
    get: Any = getattr(_C, "_get_fp32_precision_getter", None)
    convolves = "convolution" in op
    if get is None:
        return bool(torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32)
    asked = (("cuda", "conv" if convolves else "matmul"), ("cuda", "all"), ("generic", "all"))
    return next((found for found in (get(*one) for one in asked) if found != "none"), "ieee") == "tf32"


_KINDS = ("cpu", "cuda")


_lock = threading.RLock()


def only_on_cuda() -> list[Any]:
    """The overloads that CUDA's autocast casts for and the CPU's does not, which is in every build of torch."""
    listed = _C._dispatch_get_registrations_for_dispatch_key
    names: set[str] = {*listed("AutocastCUDA")} - {*listed("AutocastCPU")}
    found = (name.partition("::")[2].partition(".") for name in names if name.startswith("aten::"))
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in found]


@functools.cache
def cast_on_cuda(name: str) -> bool:
    """Whether CUDA's autocast casts for an operation: for `rms_norm` it does from torch 2.12 on."""
    return f"aten::{name}" in _C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")


def below_autocast() -> AbstractContextManager[None]:
    """A context in which the CPU's autocast does nothing more."""
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.AutocastCPU))


@contextmanager
def casting(kernels: Iterable[tuple[Any, Callable[..., Any]]]) -> Generator[None]:
    """A context in which the CPU's autocast calls these for overloads that it has no cast for."""
    with _lock:  # two at once would replace each other's
        library = Library("aten", "IMPL")
        try:
            for overload, kernel in kernels:
                library.impl(overload, kernel, "AutocastCPU")
            yield
        finally:
            library._destroy()


@contextmanager
def autocast_as_one(is_on: Callable[[], None]) -> Generator[None]:
    """A context in which this thread's autocast of CUDA and that of the CPU are one, and CUDA's is there without CUDA.

    Turning either on or off turns both. One that is on before is on for both; CUDA's goes before.

    Args:
        is_on: Called whenever autocast has been turned on.
    """
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    here = threading.get_ident()
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype

    def both(setter: Callable[..., Any]) -> Callable[..., None]:
        def set_both(kind: Any, *value: Any) -> None:
            one = threading.get_ident() == here and kind in _KINDS
            for each in _KINDS if one else (kind,):
                setter(each, *value)
            if one and value[0] is True:
                is_on()

        return set_both

    patched = [
        (torch, "set_autocast_enabled", both(enable)),
        (torch, "set_autocast_dtype", both(choose)),
        (common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    dtype = next((dtype for _, on, dtype in reversed(before) if on), None)
    if dtype is not None:
        is_on()
        for kind in _KINDS:
            enable(kind, True)
            choose(kind, dtype)
    for owner, name, value in patched:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        for kind, on, dtype in before:
            enable(kind, on)
            choose(kind, dtype)
