"""The first call: a batch as people have it, and an optimizer by name, class or instance, in every public function."""

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torch_recompute import (
    ArgumentError,
    Choice,
    Plan,
    RecomputeConfig,
    audit,
    doctor,
    make_plan,
    profile,
    saved_activations,
    simulate,
    testing,
    verify,
)
from torch_recompute.arguments import call_of
from torch_recompute.report import report
from torch_recompute.simulation.step import OPTIMIZERS


class Net(nn.Module):
    """Two layers that may be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the loss."""
        for layer in self.layers:
            ids = layer(ids)
        return (ids if mask is None else ids * mask).square().mean()


class Item(NamedTuple):
    """An item of a dataloader, as `default_collate` returns a named tuple."""

    ids: torch.Tensor
    mask: torch.Tensor


X, MASK = torch.ones(4, 8), torch.ones(4, 8)
REGION = Plan((Choice(("layers.0",)),))
# What a batch may be, and the call that it means.
FORMS: dict[str, tuple[Any, Any]] = {
    "tensor": (X, ((X,), {})),
    "tuple": ((X, MASK), ((X, MASK), {})),
    "list": ([X, MASK], ((X, MASK), {})),
    "named tuple": (Item(X, MASK), ((X, MASK), {})),
    "dict": ({"ids": X, "mask": MASK}, ((), {"ids": X, "mask": MASK})),
    "BatchEncoding": (UserDict({"ids": X}), ((), {"ids": X})),
}
# The public functions that call a model, each returning figures that depend on the call.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "make_plan": lambda net, *call: make_plan(net, *call, budget=0.5, device="h100"),
    "profile": lambda net, *call: profile(net, *call, device="h100").costs,
    "simulate": lambda net, *call: simulate(net, *call),
    "verify": lambda net, *call: verify(net, *call, plan=REGION).as_data(),
    "audit": lambda net, *call: audit(net, *call, modules=["layers.0"]),
    "saved_activations": lambda net, *call: saved_activations(net, *call).by_module(),
    "doctor.examine": lambda net, *call: str(doctor.examine(net, *call, plan=REGION, run=False)),
    "report": lambda net, *call: report(REGION, net, *call, device="h100", points=0),
    "assert_same_gradients": lambda net, *call: testing.assert_same_gradients(net, *call, plan=REGION).as_data(),
    "RecomputeConfig.plan": lambda net, *call: RecomputeConfig(
        recompute_granularity="selective", recompute_modules=["layers.*"]
    ).plan(net, *call),
}
each_function = pytest.mark.parametrize("what", FUNCTIONS)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_means_the_call_that_people_make_with_it(form: str) -> None:
    """A tensor is one argument, tuples and lists are positional ones, mappings are keywords; more come besides."""
    batch, call = FORMS[form]
    assert call_of("f", Net(), batch) == call
    more = {} if "mask" in call[1] else {"mask": MASK}
    if len(call[0]) < 2:
        assert call_of("f", Net(), batch, more) == (call[0], {**call[1], **more})


@each_function
def test_every_function_takes_every_form(what: str) -> None:
    """A tensor, a list and a mapping give what the tuple of arguments, and what `kwargs`, have always given."""
    net = Net()
    forms = [(X,), [X], {"ids": X}, UserDict({"ids": X})]
    found = [FUNCTIONS[what](net, batch) for batch in (X, *forms)]
    assert all(one == found[0] for one in found)
    assert FUNCTIONS[what](net, (), {"ids": X}) == found[0]


@each_function
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([X, MASK, X], "'ids', 'mask', and the batch has 3 items"),
        ({"ids": X, "labels": X}, "the batch has 'labels', which it does not take"),
        ({"mask": MASK}, "missing a required argument: 'ids'"),
        (3, "but batch is int"),
    ],
)
def test_every_function_says_its_name(what: str, batch: Any, said: str) -> None:
    """A batch that the forward does not take is refused in the name of the function, with shapes and no values."""
    with pytest.raises(ArgumentError) as caught:
        FUNCTIONS[what](Net(), batch)
    text = str(caught.value)
    assert text.startswith(what)
    assert said in text
    assert "tensor(" not in text
    assert ("loss=" in text) == (
        what not in ("audit", "saved_activations", "RecomputeConfig.plan") and "labels" in text
    )


def test_a_forward_that_says_nothing_of_its_arguments_is_believed() -> None:
    """What a signature cannot say is left to the call: hooks, wrappers, functions in C, words of a decorator."""

    class Wrapper(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    hooked = Net()
    hooked.register_forward_pre_hook(lambda _module, args: (*args, MASK))
    assert call_of("f", Wrapper(), [X, X, X])[0] == (X, X, X)
    assert call_of("f", hooked, [X, X, X])[0] == (X, X, X)
    assert call_of("f", torch.add, (X, X))[0] == (X, X)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_a_name_is_the_class_and_an_optimizer_of_the_model(name: str) -> None:
    """An optimizer by name, in any case, by class and by instance have the same peak."""
    net, make = Net(), OPTIMIZERS[name]
    assert make is not None
    peaks = {simulate(net, X, optimizer=one).peak_bytes for one in (name, name.upper(), make, make(net.parameters()))}
    assert len(peaks) == 1


def test_no_optimizer_has_a_name() -> None:
    """The name "none" is a step without an optimizer, as on the command line."""
    assert simulate(Net(), X, optimizer="none").peak_bytes == simulate(Net(), X).peak_bytes
