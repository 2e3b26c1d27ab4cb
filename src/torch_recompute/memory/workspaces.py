"""Workspaces: the memory that one operation takes and gives back while it runs.

What a kernel takes besides what it returns may be most of a step's peak: on the CPU a convolution writes every patch of
its input out as a column, a norm copies what is not contiguous, attention has a block of scores for each thread. No
schema says so. So an operation takes what it was seen to take:

    measured   an operation on the CPU runs under the allocator's events (7 us), and what these say counts (`watched`)
    simulated  it is run once alone, on made-up tensors with the same layouts, under the same events (`workspace`); the
               figure is kept for the process, and for the next one beside the prices of the device, and so are the
               layouts and the memory of its results, which are not always those of fake tensors (`results`)

How far the events rise above what is left at the end is the workspace. It depends on the operation, the layouts, the
other arguments and the number of threads. Most operations take nothing, and are not asked: `takes_nothing.txt` says
which, and in which circumstances (types and layouts of their tensors). `benchmarks/catalogue.py` writes it, from every
operation and layer that it runs. What is not in it is asked. Rejected: a list of those that take something, which is
silent about what it lacks.

A GPU that is not at hand cannot be asked. For CUDA `takes_nothing_on_cuda.txt` is a list of the same kind, written on
an H100 (9.0), which stands in for the other capabilities. It also names each operation that was only seen to take
something, so that what is known of the CPU stands in for those alone that were never seen there; for AMD's devices it
stands in for all.

What CUDA's own kernels take is known for some without asking (`cuda_kernels.py`).

The operation runs on a thread of its own, on which no mode, no autocast and no profiler of the caller is active, and
changes no tensor of the caller. Values are ones; integers and masks are the caller's where these are real. Generators
that it draws from are put back; on a GPU what draws is not run. Nor is what could not be alive twice in the memory that
is free, would take longer than some seconds, or is not PyTorch's own: what another library's operation does besides
(communicate, count) is its own affair.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from .. import _torch, errors
from .._torch import is_operator
from .._torch.fakes import FakeTensor, device_of
from .._torch.flops import flops, fused_on_cpu
from .._torch.storages import cpu_bytes_between, profiling
from .._torch.tensors import each_tensor
from ..state import DEFAULT
from ..stores.measured import PriceFile, folder, full_name
from . import allocator
from .cuda_kernels import attention, has_formula, taken_on_cuda
from .free import host_memory
from .ledger import SCALARS, laid, leaves, storages

aten: Any = torch.ops.aten
_CUDNN: Any = aten._cudnn_rnn.default
_DROPOUT = 11  # which of its arguments
RECURRENT: dict[Any, int] = {aten.mkldnn_rnn_layer.default: 3, _CUDNN: 3}
"""Operations that keep for their backward what the kernel alone knows the size of, and which result that is."""

MOST_WORK = 10**11
"""Multiplications of an operation that is run alone, per thread: some five seconds."""
DRAWS = "it draws random numbers"
NO_MEMORY = "there is no memory to run it alone"

_LAYOUTS = "contiguous", "dense", "gaps", "unlike"
_PYTORCHS = frozenset({"aten", "torch_nn"})  # the latter are composed in Python, such as a cross entropy in chunks
_TAKING_NOTHING = frozenset({"c10d", "_c10d_functional", "torch_recompute"})  # collectives, kernels by their bytes


class Taken(NamedTuple):
    """The memory that an operation was seen to use.

    Attributes:
        nbytes: What it takes while it runs, beyond its arguments and its results.
        results: Of each result the bytes of its memory, then its strides.
    """

    nbytes: int
    results: tuple[tuple[int, ...], ...] = ()


_known: dict[Any, Taken | str] = {}
_NOTHING = Taken(0)


# --- what takes nothing ---


@functools.cache
def _nothing(where: str = "") -> Mapping[str, Mapping[str, bool]]:
    """The circumstances in which operations take nothing, by their names; whether results are as fake ones say."""
    lines = Path(__file__).with_name(f"takes_nothing{where}.txt").read_text("utf-8").splitlines()
    words = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return {name: {one.rstrip("*"): one[-1:] != "*" for one in said[1:].split(", ") if one} for name, _, said in words}


def takes_nothing(func: Any, inputs: Any, target: str = "") -> bool:
    """Whether it is known that an operation takes no more than some numbers.

    Args:
        func: Its overload.
        inputs: Its positional and its keyword arguments.
        target: The device, as "cuda 9.0", where that is asked for one that is not here. CUDA of any capability has the
            list of 9.0. What is not in it, and for a device without a capability all, is what is known of the CPU, by
            32 bits for 16, which the CPU computes by other means.
    """
    return _listed(func, inputs, target) is not None


def _listed(func: Any, inputs: Any, target: str = "") -> bool | None:
    """Whether results are as fake tensors say, for an operation that takes nothing; None for one not known to."""
    clear, like = _clear(func, target)
    if not clear:
        return True if clear is None else None
    found = circumstances(inputs, like)
    if found not in clear and like is _ON_CUDA and _of_any_type(func):
        found = next((one for one in clear if one.rpartition(" ")[2] == found.rpartition(" ")[2]), found)
    return clear.get(found)


@functools.cache
def _of_any_type(func: Any) -> bool:
    """Whether CUDA's kernel takes the same for all types: it moves or casts elements in registers, or reads none."""
    name = str(getattr(func, "overloadpacket", "")).removeprefix("aten.")
    return (
        torch.Tag.pointwise in func.tags
        or name in _MOVING
        or name.startswith(("new_", "empty", "full", "ones", "zeros"))
    )


_MOVING = {"cat", "copy_", "fill_", "floor_divide", "gather", "masked_fill_", "repeat", "scatter", "tril", "triu"}


_Types = Mapping[torch.dtype, torch.dtype]
_THEIR_OWN: _Types = {}
_ON_CPU: _Types = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_ON_CUDA: _Types = {torch.float16: torch.bfloat16}  # kernels are of one source for both


@functools.cache
def _clear(func: Any, target: str) -> tuple[Mapping[str, bool] | None, _Types]:
    """The circumstances in which an operation takes nothing, None for any; and types that stand in for others there."""
    if getattr(func, "is_view", False) or getattr(func, "namespace", "") in _TAKING_NOTHING:
        return None, _THEIR_OWN
    if target.startswith("cuda ") and has_formula(func):  # which depends on sizes, of which the list says nothing
        return {}, _ON_CUDA
    name = str(getattr(func, "overloadpacket", ""))
    if target.startswith("cuda ") and name in _nothing("_on_cuda"):
        return _nothing("_on_cuda")[name], _ON_CUDA
    return _nothing().get(name, {}), _ON_CPU if target else _THEIR_OWN


def circumstances(inputs: Any, like: _Types = _THEIR_OWN) -> str:
    """The types of some arguments and the worst of their layouts, such as "float32+int64 dense".

    Worst is that two of one shape have unlike ones: then a kernel that goes over both copies one. `like` has types that
    stand in for others.
    """
    found: dict[Any, Any] = {}
    worst = _look(inputs, found, 0)
    kinds = {like.get(kind, kind) for kind in found if type(kind) is torch.dtype}
    return f"{'+'.join(sorted(str(kind)[6:] for kind in kinds))} {_LAYOUTS[worst]}"


def _look(value: Any, found: dict[Any, Any], worst: int) -> int:
    """Adds the types and the strides by shape in a nest of arguments; returns the worst layout of it and before."""
    if type(value) is torch.dtype:
        found[value] = None
    elif type(value) in SCALARS:
        pass
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return len(_LAYOUTS) - 1
        if value.dim():
            found[value.dtype], shape, stride = None, value.shape, value.stride()
            other = found.setdefault(shape, stride)
            if other != stride and any(a != b for a, b, n in zip(other, stride, shape, strict=True) if n > 1):
                return len(_LAYOUTS) - 1
            worst = max(worst, laid(shape, stride))
    elif isinstance(value, (list, tuple, dict)):
        for item in cast("Sequence[Any]", value.values() if isinstance(value, dict) else value):
            worst = _look(item, found, worst)
    return worst


# --- what is taken ---


def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    """Runs an operation, and returns its result and the bytes that it took on the CPU.

    They are None where it was not watched: it takes nothing, or the caller is profiling, and no tensor was moved.
    """
    if takes_nothing(func, (args, kwargs)):
        return func(*args, **kwargs), None
    if profiling():  # there cannot be two; what an operation had before it moved can be asked no more
        before = _sizes((args, kwargs))
        out = func(*args, **kwargs)
        return out, sum(size for _, size in _moved(before)) or None
    made: list[Any] = []
    taken = _on_cpu(lambda: made.append(func(*args, **kwargs)), (args, kwargs))
    return made[0], taken


def workspace(func: Any, inputs: Any) -> int | str:
    """Returns the most bytes that an operation takes while it runs, beyond its arguments and its results.

    Args:
        func: Its overload.
        inputs: Its positional and its keyword arguments; tensors may be fake.

    Returns:
        The bytes, or why they are not known, in words. 0 for real tensors that are not on the CPU, whose allocator
        says what was taken.
    """
    if takes_nothing(func, inputs, target_of(inputs)):
        return 0
    known = _by_formula(func, inputs)
    if known is not None:
        return known
    found = _seen(func, inputs)
    return found if isinstance(found, str) else found.nbytes


def _by_formula(func: Any, inputs: Any, capability: tuple[int, int] | None = None) -> int | None:
    """The bytes that an operation takes on CUDA by a formula, one for all devices or also for a capability's."""
    return taken_on_cuda(func, inputs[0], inputs[1] or {}, capability) if target_of(inputs) else None


def target_of(inputs: Any) -> str:
    """Returns the device of some arguments, fake ones too, as `takes_nothing` has it: CUDA, or "" for the CPU."""
    away = any(device_of(tensor).type == "cuda" for tensor in _torch.tensors_in(inputs))
    return "cuda 9.0" if away else ""


def results(func: Any, inputs: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the bytes of the memory of each of an operation's results, then its strides.

    Some kernels leave a result in the larger memory that they computed it in, or lay it out in another way than fake
    tensors say. The arguments are those of `workspace`.

    Returns:
        One tuple for each result; nothing where they are as fake tensors say, or are not known.
    """
    if _listed(func, inputs, target_of(inputs)) or _by_formula(func, inputs) is not None:
        return ()
    found = _seen(func, inputs)
    return () if isinstance(found, str) else found.results


def _seen(func: Any, inputs: Any) -> Taken | str:
    """The bytes that an operation was seen to take, or why they are not known."""
    tensors = _torch.tensors_in(inputs)
    away = [tensor for tensor in tensors if device_of(tensor).type != "cpu"]
    if not tensors or any(type(tensor) is not FakeTensor for tensor in away):
        return _NOTHING
    device = device_of((away or tensors)[0])
    threads = torch.get_num_threads()
    key = (func, _layout(inputs), torch.backends.mkldnn.enabled, torch.is_grad_enabled(), str(device), threads)
    try:
        if key in _known:
            return _known[key]
    except TypeError:
        return "an argument cannot be made up"
    formula = attention(func, inputs[0])
    drops_out = any(isinstance(value, float) and 0 < value < 1 for value in inputs[0])  # of attention's the only such
    draws = drops_out if formula is not None else torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    kept = _file(device)
    name = hashlib.sha256(repr((str(func), *key[1:4])).encode()).hexdigest()[:32]
    found: Taken | str | None = None
    if kept is not None and name in kept.taken:
        (nbytes,), *made = kept.taken[name]
        found = Taken(nbytes, tuple(map(tuple, made)))
    else:
        found = DRAWS if draws and device.type != "cpu" else _asked(func, inputs, tensors, device, threads)
        if isinstance(found, str) and formula is None and device.type == "cuda" and torch.cuda.is_available():
            formula = _by_formula(func, inputs, torch.cuda.get_device_capability(device))
        if isinstance(found, str) and formula is not None:
            found = Taken(formula)
        elif not isinstance(found, str) and kept is not None:
            kept.taken[name] = [[found.nbytes], *map(list, found.results)]
    if found != NO_MEMORY:  # which may be different the next time
        _known[key] = found
    return found


_files: dict[tuple[Path, str], PriceFile] = {}


def _file(device: torch.device) -> PriceFile | None:
    """The file with figures of a device; None for one that is not here."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        key = folder(), _full_name(device, torch.get_num_threads())
        if key not in _files:
            _files[key] = PriceFile(key[1])
        return _files[key]
    return None


@functools.cache
def _full_name(device: torch.device, threads: int) -> str:
    return full_name(device)


def keep() -> None:
    """Writes what was seen since to the files of prices."""
    for file in _files.values():
        file.save()


def reserve(func: Any, inputs: Any) -> int | str:
    """Returns the bytes that a recurrent layer keeps for its backward, or why they are not known.

    It is run alone, as for a workspace. Where that takes too long it is run on fewer steps of the sequence, and the
    bytes grow with their number.

    Args:
        func: Its overload, of `RECURRENT`.
        inputs: Its positional and its keyword arguments; tensors may be fake.
    """
    args: Any = inputs[0]
    kwargs = inputs[1]
    device, threads = device_of(args[0]), torch.get_num_threads()
    masks = 0
    if func is _CUDNN and args[_DROPOUT]:  # it is run without, so as to draw nothing; a mask has the size of its layer
        masks = args[0].shape[0] * args[0].shape[1] * args[4].numel() // args[4].shape[1] * args[0].itemsize
        args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 : -1], None)
    tensors = _torch.tensors_in(args)
    steps = int(args[0].shape[0])
    work = tensors[0].numel() // tensors[0].shape[-1] * sum(tensor.numel() for tensor in tensors[1:])
    fewer = max(2, min(steps, MOST_WORK * threads * steps // max(1, work)))

    def bytes_of(steps: int) -> int | str:
        first = torch.empty((steps, *args[0].shape[1:]), dtype=args[0].dtype, device="meta")
        key = (func, "reserve", _layout(((first, *args[1:]), kwargs)), str(device), threads)
        if key not in _known:
            with torch.enable_grad():  # without, the CPU's keeps nothing
                _known[key] = _alone(func, ((first, *args[1:]), kwargs), device, threads, _on_cpu)
        found = _known[key]
        return found if isinstance(found, str) else found.results[RECURRENT[func]][0]

    one, two = (0, bytes_of(steps)) if steps <= fewer else (bytes_of(fewer // 2), bytes_of(fewer))
    if isinstance(one, str) or isinstance(two, str):
        return two
    return two + (two - one) * max(0, steps - fewer) // (fewer - fewer // 2) + masks


def _asked(func: Any, inputs: Any, tensors: list[torch.Tensor], device: torch.device, threads: int) -> Taken | str:
    """Runs an operation alone, if it can be; returns what it takes, or why that is not known."""
    if not is_operator(func):
        return "it runs functions of the caller"
    if func.namespace not in _PYTORCHS:
        return f"it is an operation of {func.namespace}, and what it does besides is not known"
    if any(type(x) is not FakeTensor and not _torch.is_plain_kind(type(x)) for x in tensors):
        return "a tensor is of a class of its own"
    if any(x.layout is not torch.strided for x in tensors):
        return "a tensor has a layout without strides"
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} does not say what it allocates"
    free = _free_bytes(device)
    if free is None:
        return "what is free here is not known"
    if 2 * sum(tensor.untyped_storage().nbytes() for tensor in tensors) > free:
        return NO_MEMORY
    if _work(func, inputs[0], inputs[1] or {}, tensors) > MOST_WORK * threads:
        return "it would take too long to run it alone"
    ask = _on_cpu if device.type == "cpu" else partial(_on_cuda, device=device)
    return _alone(func, inputs, device, threads, ask)


def _alone(
    func: Any, inputs: Any, device: torch.device, threads: int, ask: Callable[[Callable[[], Any], Any], int]
) -> Taken | str:
    """Measures an operation that runs on made-up tensors, on a thread of its own; looks at its results, too."""
    found: list[Taken] = []
    graded = torch.is_grad_enabled()
    on_cpu = torch.device("cpu")  # where arguments stay that a kernel reads on the host
    draws = torch.Tag.nondeterministic_seeded in func.tags
    states = [(ambient, ambient.capture()) for ambient in DEFAULT if draws]

    def run() -> None:
        try:
            torch.set_num_threads(threads)  # a new thread has the environment's number until it is set
            with torch.set_grad_enabled(graded):
                args, kwargs = each_tensor(
                    (tuple(inputs[0]), inputs[1] or {}),
                    lambda tensor: _made_up(tensor, on_cpu if device_of(tensor).type == "cpu" else device),
                )
                if kwargs.get("generator") is not None:
                    kwargs["generator"] = torch.Generator(kwargs["generator"].device)
                out: list[Any] = []
                nbytes = ask(lambda: out.append(func(*args, **kwargs)), (args, kwargs))
                made = leaves(out)
                strided = all(tensor.layout is torch.strided for tensor in made)
                laid = ((int(x.untyped_storage().nbytes()), *x.stride()) for x in (made if strided else ()))
                found.append(Taken(nbytes, tuple(laid)))
        except Exception:  # no memory after all, no kernel, values that do not fit: the caller says so
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for ambient, state in states:
        ambient.restore(state)
    return found[0] if found else "it cannot be run alone"


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> int:
    """Estimates the multiplications of an operation; of a convolution's backward those of either gradient."""
    name = str(func)
    if "convolution" in name:
        back = "backward" in name
        x, weight = tensors[back : back + 2]
        stride, transposed = args[3 + back], args[6 + back]
        places = x.numel() // max(1, x.shape[1]) // (1 if transposed else math.prod(stride))
        return places * weight.numel()
    counted = flops(func, args, kwargs, None) or fused_on_cpu(func, args)
    return max(counted // 2, *(tensor.numel() for tensor in tensors))


def _on_cpu(call: Callable[[], object], inputs: Any) -> int:
    before = _sizes(inputs)
    taken = cpu_bytes_between(call, lambda: sum(storage.nbytes() for storage, _ in _moved(before)))
    return taken + sum(size for _, size in _moved(before))


_Sizes = list[tuple[torch.UntypedStorage, int]]


def _sizes(inputs: Any) -> _Sizes:
    return [(storage, storage.nbytes()) for _, storage in storages(inputs)]


def _moved(before: _Sizes) -> _Sizes:
    """The storages that an operation gave other memory, and the bytes they had until then, of which no event tells."""
    return [(storage, size) for storage, size in before if storage.nbytes() not in (0, size)]


def _on_cuda(call: Callable[[], object], inputs: Any, device: torch.device) -> int:
    call()  # what libraries keep for good is made now
    peaks: dict[int, allocator.Peak] = {}
    torch.cuda.synchronize(device)
    allocator.begin(peaks)
    result = call()
    torch.cuda.synchronize(device)
    allocator.end(peaks)
    left = torch.cuda.memory_allocated(device)
    del result
    return peaks[device.index or 0].allocated - left


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return host_memory()[0]
    except errors.ArgumentError:
        return None


def _layout(value: Any) -> Any:
    """Returns the part of an argument that a workspace depends on; of a real mask, how much it lets through."""
    if isinstance(value, torch.Tensor):
        real = value.dtype is torch.bool and type(value) is not FakeTensor and value.device.type == "cpu"
        return tuple(value.shape), value.stride(), value.dtype, int(value.count_nonzero()) if real else None
    if isinstance(value, dict):
        return tuple((name, _layout(item)) for name, item in cast("dict[str, Any]", value).items())
    if isinstance(value, (list, tuple)):
        return tuple(_layout(item) for item in cast("tuple[Any, ...]", value))
    return type(value), None if isinstance(value, torch.Generator) else value


def _made_up(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the layout of another: its values where these are integers or masks and real, else ones."""
    made = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=device)
    whole = (made.untyped_storage().nbytes() // made.itemsize,), (1,)  # some of it may repeat
    flat, floats = made.as_strided(*whole), made.dtype.is_floating_point or made.dtype.is_complex
    if not floats and type(like) is not FakeTensor and like.device == device:
        flat.copy_(like.as_strided(*whole, like.storage_offset()))
    else:
        flat.fill_(floats)
        flat[::2] = 1 if floats or made.dtype is torch.bool else 0
    return made
