"""Values where a simulation has none: which tensors stay real, and what is made up for the others.

A fake tensor has no values, and models read some: Hugging Face looks at the attention mask and gives none to the kernel
where nothing is masked, a mixture of experts reads which tokens go where, an optimizer the number of its step. What is
read is small and made of integers. So tensors of integers and booleans stay real as long as they come from real ones,
up to `INTEGERS` elements, and so do floating tensors of up to `FLOATS`, or `MASKS` if no larger than a real tensor that
they come from, as a mask that is added to scores. Where integers come out of fake ones, values are made up: indices are
spread evenly (`topk` of a router then sends as many tokens to each expert), booleans alternate, also where they are
counted or cast, a float that is read is 1, also where values leave PyTorch (`x.numpy()`), a factorization succeeds, and
no element is found to be infinite or not a number. Each such decision is recorded with the operation and the module
that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from .. import errors
from .._torch.fakes import APART, CPU, FakeTensor, is_wrapper, returned
from .._torch.modes import without_modes
from .._torch.tensors import each_tensor

INTEGERS = 2**24
FLOATS = 2**10
MASKS = 2**18
MADE_UP = 2**22

_CHOICES = {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "multinomial", "mode", "median", "kthvalue"}
NOWHERE: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default for name in ("isnan", "isinf", "isneginf", "isposinf")
)
"""Operations that ask for elements which a step that goes well does not have."""
_NO_CHOICE = (torch.bool, torch.uint64, torch.uint8)  # the last are states of generators, and codes of floats


def laid_as(fake: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in a tensor with the layout of a fake one."""
    device = CPU if fake.device == APART else fake.device
    values = values.view(fake.shape).to(device, fake.dtype)
    if 0 in fake.stride():  # which cannot be written to
        return values
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device).copy_(values)


def floats(tensor: torch.Tensor) -> bool:
    """Whether its elements are floating or complex."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_decided(result: torch.Tensor) -> bool:
    """Whether values are made up for the result of an operation on fake tensors."""
    return not floats(result) and result.dtype not in _NO_CHOICE and result.numel() <= MADE_UP


def keeps_real_values(tensor: torch.Tensor, given: int = 0) -> bool:
    """Whether a tensor that could be real is; `given` are the elements of the largest one that it comes from."""
    return tensor.numel() <= (max(FLOATS, min(given, MASKS)) if floats(tensor) else INTEGERS)


def counts(func: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether numbers are made of booleans alone, and not drawn: then values are made up for the booleans."""
    if torch.Tag.nondeterministic_seeded in func.tags or any(tensor.dtype is not torch.bool for tensor in given):
        return False
    most = max((tensor.numel() for tensor in given), default=0)
    return most <= MADE_UP and any(is_decided(x) or (floats(x) and keeps_real_values(x, most)) for x in results)


def is_code(tensor: torch.Tensor) -> bool:
    """Whether a tensor that comes from no other is taken to be made for codes of floats, which have no values here."""
    return tensor.dtype is torch.uint8 and tensor.numel() > FLOATS


def is_empty_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor that comes from no other has no elements, and so may come to be over a fake one's memory."""
    return floats(tensor) and not tensor.numel()


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether it has no values."""
    return tensor.device.type == "meta" or type(tensor) is FakeTensor


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether the copy of a tensor has its values, which the step may then depend on."""
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or is_wrapper(tensor):
        return False
    return tensor.layout is torch.strided and keeps_real_values(tensor) and not is_hollow(tensor)


@cache
def status_of(func: Any) -> int | None:
    """The place of the result that says whether an operation failed; None for most."""
    return next((place for place, name in enumerate(returned(func)) if name == "info"), None)


class MadeUp:
    """Values that are made up, and what was assumed with them.

    Args:
        where: Says which module is running.

    Attributes:
        assumed: What had to be assumed, in words, each once.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self.assumed: dict[str, None] = {}

    def decided(self, func: Any, args: Any, out: Any) -> Any:
        """The results, with made-up integers as far as they are small."""

        def decide(value: Any) -> Any:
            made_up = is_decided(value) or (func in NOWHERE and value.numel() <= INTEGERS)
            return self._choice(func, args, value) if type(value) is FakeTensor and made_up else value

        if isinstance(out, torch.Tensor):
            return decide(out)
        status = status_of(func)
        if status is not None:  # of a factorization, which went well
            info = out[status]
            with without_modes():
                well = torch.zeros(info.shape, dtype=info.dtype, device=info.device)
            out = tuple(well if place == status else x for place, x in enumerate(out))
        return each_tensor(out, decide)

    def _choice(self, func: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        name = func.overloadpacket.__name__
        if name not in _CHOICES:
            return self.values(out, str(func), nowhere=func in NOWHERE)
        source = args[0]
        n = source.shape[-1] if out.dim() == source.dim() else max(1, source.numel() // max(1, out.numel()))
        self._note(str(func), "chooses evenly")
        with without_modes():
            return laid_as(out, torch.arange(out.numel()) % max(1, n))

    def values(self, fake: torch.Tensor, what: str, nowhere: bool = False) -> torch.Tensor:
        """Values for a fake tensor that `what` reads; for a mask that holds `nowhere` these."""
        if fake.numel() > INTEGERS:
            raise errors.RecomputeError(
                f"simulate: {self._where() or 'the model'} reads the values of a tensor of shape {tuple(fake.shape)} "
                f"({what}), and simulated tensors have none.\n"
                "  Simulate a smaller batch, or pass arguments of integers and masks as real tensors, not on meta."
            )
        with without_modes():
            if nowhere:
                self._note(what, "holds nowhere")
                values = torch.zeros(fake.numel(), dtype=torch.bool)
            elif fake.dtype is torch.bool:
                self._note(what, "finds every other one true")
                values = torch.arange(fake.numel()) % 2 == 0
            else:
                self._note(what, "finds ones")
                values = torch.ones(fake.numel(), dtype=fake.dtype)
            return laid_as(fake, values)

    def _note(self, what: str, value: str) -> None:
        where = self._where()
        self.assumed[f"{what.removesuffix('.default')} {value}" + (f" in {where}" if where else "")] = None
