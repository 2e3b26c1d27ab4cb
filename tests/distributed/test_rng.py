"""Random streams of parallel ranks: which agree, which differ, and that a replay draws from each what forward drew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from torch_recompute import Choice, Plan, apply, no_recompute, recompute
from torch_recompute.distributed import RngStreams

NAMES = ("default", "model-parallel", "expert")


def draws(streams: RngStreams) -> dict[str, list[float]]:
    found = {}
    for name in NAMES:
        with streams.fork(name):
            found[name] = torch.rand(3).tolist()
    return found


def drawn_on_a_mesh() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    streams = RngStreams(1234, tensor=mesh.get_group("tp"), expert=mesh.get_group("dp"))
    return streams.seeds, draws(streams)


def test_which_ranks_agree(ranks) -> None:
    """Default and expert agree on the ranks of a tensor parallel group, model-parallel differs."""
    (seeds, first), (others, second) = ranks.run(drawn_on_a_mesh)
    assert seeds == {"default": 1234, "model-parallel": 1234 + 2718, "expert": 1234 + 1024}
    assert others == {**seeds, "model-parallel": 1234 + 2719}
    assert [first[name] == second[name] for name in NAMES] == [True, False, True]


def test_seeds_of_every_rank() -> None:
    """Each stream has the seed of the reference, for every place of a rank in its groups."""
    for tensor, expert, part in ((0, 0, 0), (3, 0, 0), (0, 2, 0), (1, 2, 3)):
        seeds = RngStreams(7, tensor=tensor, expert=expert, expert_tensor=part).seeds
        assert list(seeds.values()) == [7, 7 + 2718 + tensor, 7 + 1024 + 100 * expert + part]


def test_seeds_do_not_meet() -> None:
    """The three streams of a rank draw different numbers, and what they draw depends on the seed alone."""
    one, other = draws(RngStreams(7, tensor=1)), draws(RngStreams(7, tensor=1))
    assert one == other
    assert len({tuple(numbers) for numbers in one.values()}) == 3


def test_streams_go_on_where_they_were() -> None:
    """What is drawn from a stream in several forks, nested or not, is what it gives in one; others do not move it."""
    whole = {name: torch.rand(6, generator=torch.Generator().manual_seed(s)) for name, s in RngStreams(3).seeds.items()}
    streams = RngStreams(3)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}

    def draw(name: str) -> None:
        parts[name].append(torch.rand(1))

    draw("default")
    with streams.fork():
        draw("model-parallel")
        with streams.fork("default"):
            draw("default")
            with streams.fork("model-parallel"), streams.fork("model-parallel"):
                draw("model-parallel")
            draw("default")
        draw("model-parallel")
        with streams.fork("expert"):
            draw("expert")
    draw("default")
    for name in NAMES:
        numbers = torch.cat(parts[name])
        assert torch.equal(numbers, torch.stack([whole[name][i] for i in range(len(numbers))]))


def attention(streams: RngStreams, x: torch.Tensor) -> torch.Tensor:
    """Draws from the streams in turn, with something saved around each."""
    x = F.dropout(x.sin(), 0.5)
    with streams.fork():
        x = F.dropout(x.exp(), 0.5)
        with streams.fork("default"):
            x = F.dropout(x.sin(), 0.5)
            with streams.fork("model-parallel"):
                x = F.dropout(x.sin(), 0.3)
        x = F.dropout(x.tanh(), 0.5)
    with streams.fork("expert"):
        x = F.dropout(x.sin(), 0.5)
    return x.exp()


def only_forks(streams: RngStreams, x: torch.Tensor) -> torch.Tensor:
    with streams.fork():
        return F.dropout(x.sin(), 0.5).exp()


def forked_around(streams: RngStreams, x: torch.Tensor) -> torch.Tensor:
    with streams.fork("default"):
        x = F.dropout(x.sin(), 0.5)
    return x.exp()


def saved_inside(streams: RngStreams, x: torch.Tensor) -> torch.Tensor:
    x = no_recompute(lambda x: only_forks(streams, x))(x.sin())
    return only_forks(streams, x)


def nested(streams: RngStreams, x: torch.Tensor) -> torch.Tensor:
    return recompute(lambda x: attention(streams, x))(attention(streams, x))


BODIES: dict[str, Callable[[RngStreams, torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (attention, only_forks, forked_around, saved_inside, nested)
}


def trained(body: Any, region: Callable[..., Any], around: str) -> Any:
    """The gradient over three regions, and what each stream gives after them."""
    streams = RngStreams(5)
    x = torch.linspace(-1, 1, 64).requires_grad_()
    with streams.fork(around):
        y = x
        for _ in range(3):
            y = region(lambda x: body(streams, x))(y)
    forward = draws(streams)
    y.sum().backward()
    return x.grad.tolist(), forward, draws(streams)


@pytest.mark.parametrize("around", ["default", "model-parallel"])
@pytest.mark.parametrize("name", BODIES)
def test_a_replay_draws_what_the_forward_drew(name: str, around: str) -> None:
    """Gradients are the plain ones, in forks, around forks and with saved calls, and no stream is moved by backward."""
    plain = trained(BODIES[name], lambda f: f, around)
    assert trained(BODIES[name], recompute, around) == plain


def test_as_a_state_too() -> None:
    """Given as `state=`, the streams still come out as without; captured and restored, they draw the same again."""
    streams = RngStreams(5)
    x = torch.linspace(-1, 1, 64).requires_grad_()
    captured, generator = streams.capture(), torch.get_rng_state()
    grads = []
    for region in (lambda f: f, lambda f: recompute(f, state=[streams])):
        streams.restore(captured)
        torch.set_rng_state(generator)
        (grad,) = torch.autograd.grad(region(lambda x: attention(streams, x))(x).sum(), x)
        grads.append((grad.tolist(), draws(streams)))
    assert grads[0] == grads[1]


class Layer(torch.nn.Module):
    """Dropout that differs inside, and agrees outside."""

    def __init__(self, streams: RngStreams) -> None:
        super().__init__()
        self.streams = streams
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.masks: list[tuple[bool, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.streams.fork():
            inner = F.dropout(torch.relu(self.a(x)) + 1, 0.5)
        outer = F.dropout(torch.ones_like(x), 0.5)
        self.masks.append((*(inner != 0).flatten().tolist(), *(outer != 0).flatten().tolist()))
        return x + outer * self.b(inner).sin()


def in_a_plan() -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[Layer(None) for _ in range(4)])
    found = []
    for plan in (
        Plan(),
        Plan(tuple(Choice((str(i),)) for i in range(4))),
        Plan((Choice(("0", "1")), Choice(("2", "3")))),
    ):
        model = copy.deepcopy(layers)
        streams = RngStreams(9, tensor=dist.get_rank())
        for layer in model:
            layer.streams = streams
        apply(model, plan)
        model(torch.linspace(-1, 1, 128).view(8, 16)).square().sum().backward()
        runs = [layer.masks for layer in model]
        found.append(([p.grad for p in model.parameters()], [masks[0] for masks in runs], runs))
    (plain, masks, _), *others = found
    same = [all(map(torch.equal, plain, grads)) and masks == first for grads, first, _ in others]
    again = [[len(set(run)) for run in runs] for _, _, runs in others]
    return same, again, masks


def test_regions_of_a_plan_find_the_streams(ranks) -> None:
    """Nothing is told to a plan: masks of the replay are the forward's; inner ones differ by rank, outer ones agree."""
    answers = ranks.run(in_a_plan)
    for same, again, _ in answers:
        assert same == [True, True]
        assert again == [[1] * 4] * 2
    (_, _, first), (_, _, second) = answers
    assert [mask[128:] for mask in first] == [mask[128:] for mask in second]
    assert [a[:128] == b[:128] for a, b in zip(first, second, strict=True)] == [False] * 4
