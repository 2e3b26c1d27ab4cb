"""Law 7: regions in regions, saved calls in regions, regions in saved calls, to any depth and in any tree."""

from __future__ import annotations

import random

import pytest
import torch

from laws.cases import BY_NAME
from laws.placements import PLAIN, chain
from laws.table import for_each
from laws.watch import Counted, assert_same, backward, left_by, ones, step
from torch_recompute import doing_recompute, get_recompute_data, no_recompute, recompute, replay, save_for_recompute

NAMES = [
    "mlp",
    "attention_with_dropout",
    "conv_batchnorm",
    "spectral_norm",
    "dropouts",
    "in_place_inside",
    "multiple_outputs",
]
NAMES += [
    "views",
    "routed_to_experts",
    "rrelu_last",
    "one_module_twice",
    "view_of_the_input_returned",
    "custom_function",
    "lstm",
]


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
@pytest.mark.parametrize("kinds", ["R", "S", "RS", "SR", "RRS"])
def test_towers(kinds, depth):
    """A function wrapped many times over gives the plain gradients; under a saved call it never runs again."""
    count = Counted()
    fn = count("fn", lambda x: x.sin().exp())
    for i in range(depth):
        fn = recompute(fn) if kinds[i % len(kinds)] == "R" else no_recompute(fn)
    x = ones(3)
    recompute(lambda x: fn(x).cos())(x).sum().backward()
    y = ones(3)
    y.sin().exp().cos().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert count.calls["fn"] <= 2 + depth


@pytest.mark.parametrize("wrapped", [no_recompute, lambda fn: no_recompute(no_recompute(fn))])
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_a_saved_call_at_the_bottom_runs_once(wrapped, depth):
    """However many regions are around it and whatever follows it in each, a saved call runs once."""
    count = Counted()
    fn = wrapped(count("fn", lambda x: x.sin().exp()))
    for _ in range(depth):
        fn = recompute(chain(torch.cos, fn, lambda x: x.sin().exp()))
    x = ones(3)
    fn(x).sum().backward(retain_graph=True)
    assert count.calls["fn"] == 1
    fn(x).sum().backward()
    assert count.calls["fn"] == 2


def wrap_at_random(stages, draw):
    """Puts random regions and saved calls around random stretches of `stages`, several deep."""
    stages = list(stages)
    for _ in range(draw.randint(2, 7)):
        start = draw.randrange(len(stages))
        stop = draw.randint(start + 1, len(stages))
        wrap = draw.choice([recompute, recompute, no_recompute, lambda fn: fn])
        stages[start:stop] = [wrap(chain(*stages[start:stop]))]
    return chain(*stages)


@pytest.mark.parametrize("name", NAMES)
@for_each(seed=range(40))
def test_random_trees(name, seed):
    """Any tree of regions and saved calls leaves what the plain program leaves, also after two backwards."""
    results = []
    for wrap in (lambda stages, _: chain(*stages), wrap_at_random):
        program = BY_NAME[name].build()
        result = wrap(program.stages, random.Random(seed))(*program.args, **program.kwargs)
        backward(result, retain_graph=True)
        backward(result)
        results.append(left_by(program, result))
    assert_same(results[1], results[0])


def test_each_call_of_an_inner_region_has_its_own_values():
    """What inner calls save for their replay stays with that call, in an outer region that is replayed as well."""
    seen = []

    @recompute
    def inner(x, tag):
        if doing_recompute():
            (kept,) = get_recompute_data()
            seen.append((tag, kept))
        else:
            save_for_recompute(tag)
        return x.exp().sin()

    @recompute
    def outer(x):
        save_for_recompute("outer")
        y = inner(x, 1)
        if doing_recompute():
            assert get_recompute_data() == ("outer",)
        return inner(inner(y, 2), 3).cos()

    outer(ones(3)).sum().backward()
    assert seen
    assert all(tag == kept for tag, kept in seen)


def test_choices_in_nested_regions_are_made_once():
    """`replay(fn)` anywhere in a tree of regions is called in forward and never again."""
    count = Counted()
    choose = replay(count("choose", lambda x: (x > 0.5).nonzero()))

    def body(x):
        return x.sin().index_add(0, choose(x)[:, 0], x.cos()[choose(x)[:, 0]])

    x = ones(4)
    recompute(chain(recompute(chain(body, recompute(body))), no_recompute(recompute(body)), torch.exp))(
        x
    ).sum().backward()
    assert count.calls["choose"] == 6
    y = ones(4)
    chain(body, body, body, torch.exp)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_recursion():
    """A region that calls itself, thirty levels deep."""
    count = Counted()

    def down(x, level):
        y = x.sin()
        return step_(y, level - 1).cos() if level else y.exp()

    step_ = recompute(count("level", down))
    x = ones(3)
    step_(x, 30).sum().backward()
    y = ones(3)
    z = y
    for _ in range(31):
        z = z.sin()
    z = z.exp()
    for _ in range(30):
        z = z.cos()
    z.sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_regions_called_in_a_saved_call_after_it_changed_the_world():
    """A region inside a saved call is replayed with the random numbers of its own place in forward."""
    torch.manual_seed(0)
    drop = torch.nn.Dropout(0.5)
    program = [drop, lambda x: x * torch.rand(8), drop, torch.exp]
    grads = []
    for wrap, save in ((lambda fn: fn, lambda fn: fn), (recompute, no_recompute)):
        torch.manual_seed(1)
        x = ones(4, 8)
        inner = save(chain(program[0], wrap(chain(program[1], program[2])), program[3]))
        wrap(chain(drop, inner, drop, torch.sin))(x).sum().backward()
        grads.append((x.grad, torch.rand(2)))
    assert all(map(torch.equal, *grads))


def test_the_random_trees_are_not_plain():
    """The generator of trees makes trees that replay: a stage runs more than once in most of them."""
    more = 0
    for seed in range(40):
        count = Counted()
        wrap_at_random([count(n) for n in "abc"], random.Random(seed))(ones(2)).sum().backward()
        more += max(count.calls.values()) > 1
    assert more > 20
    assert step(BY_NAME["mlp"], PLAIN)
