"""Law 1 where one tensor is reached in several ways: as an argument, a carried value, a global, a saved call's output.

In forward they are one tensor; a replay may meet several. Which of the tensors that autograd saves are dropped is
decided in forward, and a replay goes by their order alone, so that no other name of a tensor moves the rest.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_recompute as tr

HELD = types.SimpleNamespace(tensor=torch.empty(0))
GIVEN = torch.empty(0)


def carried(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The value of `fn`, by `save_for_recompute`."""

    def get(x: torch.Tensor) -> torch.Tensor:
        if tr.doing_recompute():
            return tr.get_recompute_data()[0]
        value = fn(x)
        tr.save_for_recompute(value)
        return value

    return get


def kept_for_later(x: torch.Tensor) -> torch.Tensor:
    """A saved call is left out in the replay, with the code that makes it; its output is carried."""
    if tr.doing_recompute():
        return tr.get_recompute_data()[0]
    value = tr.no_recompute(torch.sin)(x).detach()
    tr.save_for_recompute(value)
    return value


def given_away(x: torch.Tensor) -> torch.Tensor:
    """A saved call returns a tensor that was made before it, and that it was not given."""
    HELD.tensor = x + 1
    tr.no_recompute(lambda: HELD.tensor)()
    return HELD.tensor


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "replay of the argument": tr.replay(lambda x: x),
    "replay that converts nothing": tr.replay(lambda x: x.float().contiguous()),
    "replay of a view": tr.replay(lambda x: x[:]),
    "replay of its data": tr.replay(lambda x: x.data),
    "carried argument": carried(lambda x: x),
    "carried view": carried(lambda x: x.view(-1).view_as(x)),
    "carried detached": carried(torch.Tensor.detach),
    "carried sine": carried(torch.sin),
    "a global": lambda x: GIVEN,
    "data of a global": lambda x: GIVEN.data,
    "an attribute": lambda x: HELD.tensor,
    "a saved call that returns its argument": tr.no_recompute(lambda x: x),
    "a saved call that returns a global": tr.no_recompute(lambda x: GIVEN),
    "a saved call that returns what it was not given": given_away,
    "a carried output of a saved call": kept_for_later,
    "a carried argument in a nested region": tr.recompute(carried(lambda x: x.detach())),
    "the result of a nested region": tr.recompute(lambda x: x * GIVEN),
    "a nested region that returns its argument": tr.recompute(lambda x: x),
}


def _mix(x: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Every saved tensor has one shape, so that one in the place of another is not noticed by its shape."""
    h = (w.sin() * other).cos() * x
    h = h.exp() * other.sigmoid() + other * w
    return (h.tanh() * w).square() * other.exp()


@pytest.mark.parametrize("place", ["argument", "keyword", "element", "closure"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_a_tensor_with_two_names(way: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are the plain call's to the bit, whatever else the region's input is."""
    x = torch.linspace(-1.0, 1.0, 6).reshape(2, 3).clone()  # no view: those are known by their memory
    monkeypatch.setitem(globals(), "GIVEN", x)
    monkeypatch.setattr(HELD, "tensor", x)

    def gradients(region: Callable[..., Any]) -> list[torch.Tensor]:
        w = torch.linspace(0.5, 1.5, 6).reshape(2, 3).clone().requires_grad_()

        def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return _mix(x, WAYS[way](x), w)

        if place == "closure":
            out = region(lambda w: body(x, w))(w)
        elif place == "keyword":
            out = region(lambda *, x, w: body(x, w))(x=x, w=w)
        elif place == "element":
            out = region(lambda box, w: body(box["x"], w))({"x": x}, w)
        else:
            out = region(body)(x, w)
        out.sum().backward()
        assert w.grad is not None
        return [out.detach(), w.grad]

    for ours, plain in zip(gradients(tr.recompute), gradients(lambda fn: fn), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("way", WAYS)
def test_a_nested_region_is_given_both(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor that a region inside is given twice in forward, and two in the replay, are counted alike."""
    x = torch.linspace(-1.0, 1.0, 6).reshape(2, 3).clone()
    monkeypatch.setitem(globals(), "GIVEN", x)
    monkeypatch.setattr(HELD, "tensor", x)

    def gradient(region: Callable[..., Any]) -> torch.Tensor:
        w = torch.linspace(0.5, 1.5, 6).reshape(2, 3).clone().requires_grad_()

        def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            other = WAYS[way](x)
            h = (other * w).sin()
            return region(lambda a, b: (other * a * h).exp() * b)(x, other).sin() * h

        region(body)(x, w).sum().backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(gradient(tr.recompute), gradient(lambda fn: fn))


def test_a_replay_that_saves_an_input_where_the_forward_saved_another_tensor() -> None:
    """Work that is done in the replay alone is an error that says so, and no other gradient."""
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if tr.doing_recompute():
            _ = x * w
        return (w.sin() * w.cos()).exp()

    out = tr.recompute(body, name="uneven")(x, w)
    with pytest.raises(
        tr.MismatchError, match=r"(?s)the replay of uneven saved another tensor.*an input of the region"
    ):
        out.sum().backward()


LEAVES: dict[str, Callable[[], torch.Tensor]] = {
    "a leaf": lambda: torch.linspace(-1.0, 1.0, 6).view(2, 3).clone().requires_grad_(),
    "a leaf that is a view of a constant": lambda: torch.linspace(-1.0, 1.0, 6).view(2, 3).requires_grad_(),
    "a result": lambda: torch.linspace(-1.0, 1.0, 6).requires_grad_().view(2, 3) * 1,
}

ANSWERS: list[bool] = []


def answer(view: torch.Tensor) -> None:
    """Notes an answer where no replay puts the list back."""
    ANSWERS.append(view.requires_grad)


@pytest.mark.parametrize("place", ["in a region", "in a nested region", "in a region with a store"])
@pytest.mark.parametrize("kind", LEAVES)
def test_whether_a_view_made_without_grad_requires_it(kind: str, place: str) -> None:
    """PyTorch answers for such a view as for its base; a replay, whose inputs are made again, answers alike."""
    x = LEAVES[kind]()
    ANSWERS.clear()

    def body(p: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = p[:, :2]
        answer(view)
        return (view.sin() * p[:, :2]).sin().sin()

    inner = tr.recompute(body, inputs=tr.OnHost() if place.endswith("store") else None, early_stop=False)
    region = tr.recompute(lambda p: inner(p).exp()) if place == "in a nested region" else inner
    region(x).sum().backward()
    assert len(ANSWERS) > 1
    assert set(ANSWERS) == {kind != "a leaf that is a view of a constant"}
