"""`audit` names each kind of fault in a region, with its operation and advice, and finds none where there is none."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from laws.cases import CASES
from laws.placements import PLACEMENTS, chain
from laws.watch import Bytes, no_collector
from support import zoo
from support.unchanged import unchanged
from torch_recompute import (
    ArgumentError,
    Audit,
    Choice,
    Plan,
    RecomputeConfig,
    apply,
    audit,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)
from torch_recompute.doctor import recorder
from torch_recompute.state import GeneratorRng, NumpyRng, PythonRng, TensorState

WIDTH = 8
PLACED = ("dropouts", "conv_batchnorm", "attention_with_dropout", "running_averages")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(3)).requires_grad_()


def rows(found: Audit, *fields: str) -> list[tuple[Any, ...]]:
    """The rows, reduced to some fields."""
    return [tuple(getattr(row, field) for field in fields) for row in found.rows]


def code_of(line: str) -> str:
    path, _, number = line.rpartition(":")
    with open(path, encoding="utf-8") as file:
        return file.readlines()[int(number) - 1].strip()


class Holder:
    """Holds something, two attributes deep."""

    def __init__(self, value: Any) -> None:
        self.inner = {"value": [value]}

    def get(self) -> Any:
        return self.inner["value"][0]


class Handle(Holder):
    """Hides what it holds from the engine, which leaves objects with more than plain data alone."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.lock = threading.Lock()


class Faulty(nn.Module):
    """A module with one fault, by name."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.calls = Holder([0])
        self.log = Holder([])
        self.names = Holder({})
        self.plain_calls, self.plain_log, self.plain_names = 0, [], {}
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.hidden = Handle(torch.zeros(WIDTH))
        self.generator = Handle(torch.Generator())
        self.turns = Holder(iter(range(100)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.fault)(self.linear(x).sin().exp()).sin().exp()

    def counts(self, h: torch.Tensor) -> torch.Tensor:
        self.calls.get()[0] += 1
        return h

    def lists(self, h: torch.Tensor) -> torch.Tensor:
        self.log.get().append(1)
        return h

    def fills(self, h: torch.Tensor) -> torch.Tensor:
        self.names.get()[f"{len(self.names.get())}"] = 1
        return h

    def changes_what_is_put_back(self, h: torch.Tensor) -> torch.Tensor:
        self.plain_calls += 1
        self.plain_log.append(1)
        self.plain_names[f"{len(self.plain_names)}"] = 1
        return h * self.plain_calls * len(self.plain_log) * len(self.plain_names)

    def depends_on_a_count(self, h: torch.Tensor) -> torch.Tensor:
        self.calls.get()[0] += 1
        return h * self.calls.get()[0]

    def python_random(self, h: torch.Tensor) -> torch.Tensor:
        return h * random.random()

    def numpy_random(self, h: torch.Tensor) -> torch.Tensor:
        import numpy

        return h * float(numpy.random.rand())

    def hidden_generator(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.rand(WIDTH, generator=self.generator.get())

    def hidden_tensor(self, h: torch.Tensor) -> torch.Tensor:
        self.hidden.get().add_(1.0)
        return h

    def other_shape(self, h: torch.Tensor) -> torch.Tensor:
        return h + h.new_ones(4, 1 + 7 * (next(self.turns.get()) % 2)).sin()

    def other_branch(self, h: torch.Tensor) -> torch.Tensor:
        if next(self.turns.get()) % 2:
            return h.cos()
        return h.tanh()

    def routes(self, h: torch.Tensor) -> torch.Tensor:
        tilt = torch.arange(WIDTH) * (next(self.turns.get()) % 2)
        values, chosen = torch.topk(h.detach() * 1e-3 + tilt, 2)
        return h.gather(-1, chosen) + values

    def reads(self, h: torch.Tensor) -> torch.Tensor:
        return h * h.detach().sum().item()

    def asks(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if h.detach().sum() > 0 else h

    def reads_a_list(self, h: torch.Tensor) -> torch.Tensor:
        return h * len(h.detach().tolist())

    def to_the_host(self, h: torch.Tensor) -> torch.Tensor:
        return h * h.detach().cpu()

    def selects(self, h: torch.Tensor) -> torch.Tensor:
        return h[h.detach() > 1].sum() + h

    def finds(self, h: torch.Tensor) -> torch.Tensor:
        return h * (h.detach() > 1).nonzero().sum()

    def twice(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = h * h.detach().sum().item()
        return h


@dataclass(frozen=True)
class Fault:
    """The name of a fault, and what of the rows there has to be: kind, operation, words of detail and advice."""

    name: str
    kinds: tuple[str, ...]
    op: str
    line: str
    detail: str
    advice: str
    times: int = 1


FAULTS = [
    Fault("counts", ("mutates",), "", "", "attribute 'calls' of Faulty", "`no_recompute(fn)`"),
    Fault("lists", ("mutates",), "", "", "attribute 'log' of Faulty", "doing_recompute()"),
    Fault("fills", ("mutates",), "", "", "attribute 'names' of Faulty", "doing_recompute()"),
    Fault(
        "depends_on_a_count", ("differs", "mutates"), "aten.mul", "self.calls.get()", "by up to", "'calls' of Faulty"
    ),
    Fault("python_random", ("differs", "mutates"), "aten.mul", "random.random()", "by up to", "state=[PythonRng()]"),
    Fault("numpy_random", ("differs", "mutates"), "aten.mul", "numpy.random", "by up to", "state=[NumpyRng()]"),
    Fault("hidden_generator", ("differs",), "aten.rand", "torch.rand(", "by up to", "state=[GeneratorRng(generator)]"),
    Fault("hidden_tensor", ("mutates",), "aten.add_", ".add_(1.0)", "outside of the region", "TensorState(tensor)"),
    Fault("other_shape", ("differs",), "aten.new_ones", "h.new_ones(", "float32[4, 8] in the second", "replay(fn)"),
    Fault("other_branch", ("differs",), "aten.tanh", "h.tanh()", "did aten.cos at", "decides the branch"),
    Fault("reads", ("syncs",), "item()", ".item()", "device once", "replay(fn)"),
    Fault("asks", ("syncs",), "bool(tensor)", "> 0 else h", "device once", "carry=True"),
    Fault("reads_a_list", ("syncs",), "tolist()", ".tolist()", "device once", "replay(fn)"),
    Fault("to_the_host", ("syncs",), ".cpu()", ".cpu()", "device once", "replay(fn)"),
    Fault("selects", ("syncs",), "a mask as an index", "h[h.detach()", "device once", "replay(fn)"),
    Fault("finds", ("syncs",), "nonzero()", ".nonzero()", "device once", "replay(fn)"),
    Fault("twice", ("syncs",), "item()", ".item()", "2 times", "replay(fn)", 2),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault: Fault) -> None:
    """The row has the fault's kind, its operation and line, what was found and what to write; and there is no other."""
    model = Faulty(fault.name)
    found = audit(recompute(model, name="part"), (leaf(),))
    assert not found
    assert tuple(row.kind for row in found.rows) == fault.kinds
    row = found.rows[0]
    assert (row.region, row.op, row.times) == ("part", fault.op, fault.times)
    assert fault.detail in row.detail
    assert fault.advice in row.advice
    if fault.line:
        assert fault.line in code_of(row.line)
        assert row.module == ""  # the model itself
    else:
        assert row.line == ""


def test_attributes_that_a_replay_finds_as_the_forward_did_are_no_fault() -> None:
    """A count, a list and a dict of a module, which each run changes and reads, are put back and not named."""
    assert audit(recompute(Faulty("changes_what_is_put_back"), name="part"), (leaf(),))


def test_a_router_that_routes_otherwise_is_named_by_its_choice() -> None:
    """Where scores differ, the first operation is named, and the choice that comes of it with its number of tokens."""
    torch.manual_seed(0)
    found = audit(recompute(Faulty("routes"), name="router"), (leaf(),))
    first, choice = found.rows
    assert (first.kind, first.op) == ("differs", "aten.mul")
    assert (choice.kind, choice.op, choice.detail) == ("flips", "aten.topk", "4 of 4 tokens go elsewhere")
    assert "carry=True" in choice.advice
    assert "torch.topk(" in code_of(choice.line)


MENDED: dict[str, Callable[[Faulty], Any]] = {
    "python_random": lambda model: [PythonRng()],
    "numpy_random": lambda model: [NumpyRng()],
    "hidden_generator": lambda model: [GeneratorRng(model.generator.get())],
    "hidden_tensor": lambda model: [TensorState(model.hidden.get())],
}


@pytest.mark.parametrize("name", MENDED)
def test_what_the_advice_says_mends_it(name: str) -> None:
    """The region with the state that the advice names is audited without a finding."""
    model = Faulty(name)
    found = audit(recompute(model, state=MENDED[name](model)), (leaf(),))
    assert found.ok, found


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sin().exp()


def changed_later(x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    y = recompute(lambda h: h.sin().exp(), name="early")(h)
    h.add_(1)
    return y + h


def test_a_changed_argument_is_named() -> None:
    """One that the region changes, with the operation; one that is changed before backward, in the engine's words."""
    found = audit(lambda x: recompute(in_place)(x * 1), (leaf(),))
    assert rows(found, "kind", "op", "detail") == [("mutates", "aten.mul_", "argument 0 is changed in place")]
    assert "x.mul(2)" in found.rows[0].advice
    assert "x.mul_(2)" in code_of(found.rows[0].line)
    (row,) = audit(changed_later, (leaf(),)).rows
    assert (row.kind, row.region) == ("mutates", "early")
    assert row.detail.startswith("argument 0 of early has been changed in place")


@pytest.mark.parametrize("arrives", [True, False])
def test_what_a_collective_returns_is_looked_at_once_it_is_there(arrives: bool) -> None:
    """What an asynchronous collective returns holds anything until the wait; only what the wait returns is compared."""
    library, numbers = torch.library.Library("_c10d_functional", "FRAGMENT"), itertools.count(1)
    library.define("sent(Tensor x) -> Tensor")
    library.impl("sent", lambda x: torch.full_like(x, next(numbers)), "CompositeExplicitAutograd")
    sent, wait = torch.ops._c10d_functional.sent, torch.ops._c10d_functional.wait_tensor

    def shared(x: torch.Tensor) -> torch.Tensor:
        got = sent(x.detach())
        return x * wait(got.copy_(x.detach()) if arrives else got)

    try:
        found = audit(recompute(shared, name="shared"), (leaf(),))
    finally:
        library._destroy()
    expected = [] if arrives else [("differs", "_c10d_functional.wait_tensor")]
    assert rows(found, "kind", "op") == expected


def test_the_line_in_a_model_of_torchs_modules() -> None:
    """Where no code of the user's runs in the model, the line is that in torch's module, not the audit's own call."""
    inner = nn.Sequential(nn.Embedding(4, WIDTH, max_norm=0.1), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    found = audit(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), (torch.arange(4),), modules=["0"])
    assert [row.op for row in found.rows] == ["aten.embedding_renorm_"]
    assert "nn/functional.py:" in found.rows[0].line


def test_a_buffer_in_evaluation_mode_is_named() -> None:
    """A large buffer that a module in evaluation mode changes is named by its path: the engine does not put it back."""

    class Tracks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(5000, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.detach().sum(0)
            return (x * 2).sin().exp()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Tracks())
    assert audit(model, (leaf(),), modules=["1"]).ok
    found = audit(model.eval(), (leaf(),), modules=["1"])
    assert rows(found, "kind", "op", "module", "detail") == [
        ("mutates", "aten.add_", "1", "buffer '1.seen' is changed in place")
    ]


step = 0


def counts_globally(x: torch.Tensor) -> torch.Tensor:
    global step
    step += 1
    return x.sin().exp()


def test_globals_and_closures_are_looked_at() -> None:
    """A global and a closure variable that each run changes are named; of a global the forward's change stays."""
    calls = 0

    def counts(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.sin().exp()

    assert "global 'step' is changed" in [row.detail for row in audit(recompute(counts_globally), (leaf(),)).rows]
    assert "closure variable 'calls' is changed" in [row.detail for row in audit(recompute(counts), (leaf(),)).rows]
    assert (step, calls) == (1, 0)  # a global keeps what the forward did


def test_a_generator_that_is_not_kept_is_named() -> None:
    """Dropout in a checkpoint that does not keep the generator's state differs, and the advice says so."""
    found = audit(lambda x: checkpoint(F.dropout, x.sin(), use_reentrant=False, preserve_rng_state=False), (leaf(),))
    assert "differs" in [row.kind for row in found.rows]
    assert {row.advice for row in found.rows} == {"`preserve_rng_state=True`, which is the default"}


def test_a_function_that_cannot_run_twice_is_named() -> None:
    """What the second run raises is a row, and the audit goes on with the other regions."""
    turns = iter([1])

    def once(x: torch.Tensor) -> torch.Tensor:
        return (x * next(turns)).sin().exp()

    found = audit(lambda x: recompute(Faulty("reads"))(recompute(once)(x)), (leaf(),))
    assert [(row.kind, row.detail[:13]) for row in found.rows] == [
        ("fails", "StopIteration"),
        ("syncs", "the replay wa"),
    ]


def rounded(x: torch.Tensor) -> torch.Tensor:
    if doing_recompute():
        (mask,) = get_recompute_data()
    else:
        mask = (x.detach() * 3).cos() > 0
        save_for_recompute(mask)
    return (x * mask).sin().exp()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.norm(self.linear(x))).sin().exp()


def attends(x: torch.Tensor) -> torch.Tensor:
    q = (x * 2)[None, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)[0, 0].sin().exp()


def kept(x: torch.Tensor) -> torch.Tensor:
    return no_recompute(lambda h: h.tanh() * h.detach().sum().item())(x.sin()).exp().exp()


def decided(x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    size = replay(lambda h: int((h > 0).sum()))(h.detach())
    return (h[:, : size % WIDTH]).exp().sum() + h.exp()


KEEPS_PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
SOUND: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "dropout and BatchNorm": lambda: (recompute(Norm()), (leaf(),)),
    "attention": lambda: (recompute(attends), (leaf(),)),
    "nested": lambda: (recompute(lambda x: recompute(attends)(recompute(attends)(x) * 2)), (leaf(),)),
    "a saved call": lambda: (recompute(kept), (leaf(),)),
    "a saved call in a nested region": lambda: (recompute(lambda x: recompute(kept)(x.cos()).exp()), (leaf(),)),
    "a region in a saved call": lambda: (
        recompute(lambda x: no_recompute(lambda h: recompute(kept)(h))(x.sin()).exp()),
        (leaf(),),
    ),
    "a choice": lambda: (recompute(decided), (leaf(),)),
    "a saved value": lambda: (recompute(rounded), (leaf(),)),
    "without grad inside": lambda: (recompute(lambda x: torch.no_grad()(recompute(attends))(x) * x.sin()), (leaf(),)),
    "memory that is not defined": lambda: (recompute(lambda x: (torch.empty_like(x) * 0 + x).sin().exp()), (leaf(),)),
    "tiles": lambda: (recompute(lambda x: x.sin().exp(), tiles=2, tile_dim=0), (leaf(),)),
    "values checked": lambda: (recompute(attends, check="values"), (leaf(),)),
    "a selective context": lambda: (partial(checkpoint, Norm(), context_fn=KEEPS_PRODUCTS), (leaf(),)),
}


def test_the_files_of_the_engine_are_there() -> None:
    """What these files do by themselves is no operation of a region; one that was moved would go unseen."""
    assert [name for name in sorted(recorder._ENGINE) if not Path(name).is_file()] == []


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_sound_is_not_listed(name: str, autocast: bool) -> None:
    """Nothing is found in a region that does the same when it runs again, however it is built; also under autocast."""
    fn, args = SOUND[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = audit(fn, args)
        assert torch.is_autocast_cache_enabled()
    assert found.ok, found
    assert found.regions


@pytest.mark.parametrize("case", [case for case in CASES if not case.inplace], ids=lambda case: case.name)
def test_the_cases_of_the_laws_are_sound(case: Any) -> None:
    """In every program that the laws of a region hold for, an audit finds waits for the device at the most."""
    program = case.build()
    whole = recompute(chain(*program.stages))
    if case.name == "nothing_saved":
        with pytest.raises(ArgumentError, match="called no region"):
            audit(whole, program.args, program.kwargs)
        return
    found = audit(whole, program.args, program.kwargs)
    assert {row.kind for row in found.rows} <= {"syncs"}, found


@pytest.mark.parametrize(
    "placement", [p for p in PLACEMENTS if p.name != "saved everything"], ids=lambda placement: placement.name
)
@pytest.mark.parametrize("name", PLACED)
def test_regions_are_sound_wherever_they_are_placed(name: str, placement: Any) -> None:
    """Nested regions and saved calls, in any order and depth, give no finding in a program that has no fault."""
    (program,) = [case.build() for case in CASES if case.name == name]
    found = audit(placement.put(*program.stages), program.args, program.kwargs)
    assert found.ok, found


def test_the_region_with_the_fault_is_blamed_and_no_other() -> None:
    """Where layers rebuild each other's inputs, a fault is a row of its own layer alone."""
    model = nn.Sequential(Norm(), Faulty("depends_on_a_count"), Norm(), Norm())
    apply(model, Plan((Choice(("0", "1", "2", "3")),)))
    found = audit(model, (leaf(),))
    assert rows(found, "kind", "region", "module") == [("differs", "1", "1"), ("mutates", "1", "")]
    assert found.regions == ("0", "1", "2", "3")


# --- models -----------------------------------------------------------------------------------------------------------


TOKENS = 256  # so many that some are near a tie


def layers_of(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules() if path.startswith("model.layers.") and path.count(".") == 2]


@pytest.mark.parametrize(("name", "dtype"), [("mixtral", torch.float32), ("qwen3_moe", torch.bfloat16)])
def test_carrying_keeps_tokens_with_their_experts(name: str, dtype: torch.dtype) -> None:
    """Under noise a router with near-ties sends tokens elsewhere, which the audit names; carried, none moves."""
    model = zoo.build(name)[0].to(dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(3, zoo.VOCABULARY, (TOKENS // 32, 32), generator=generator)}
    paths = layers_of(model)

    def look(carry: bool) -> Audit:
        handle = apply(model, Plan(tuple(Choice((path,), carry=carry) for path in paths)))
        try:
            assert audit(model, (), inputs).ok
            return audit(model, (), inputs, perturb=0.01)
        finally:
            handle.remove()

    free, carried = look(carry=False), look(carry=True)
    assert carried.ok, carried
    assert free.perturb == 0.01
    assert free.rows
    for row in free.rows:
        assert (row.kind, row.op) == ("flips", "aten.topk")
        assert row.module == f"{row.region}.mlp.gate"
        assert "topk" in code_of(row.line)
        assert row.detail.startswith("with inputs slightly off ")
        assert row.detail.endswith(f" of {TOKENS} tokens go elsewhere")
        assert "carry=True" in row.advice


@pytest.mark.parametrize(("name", "carry"), [("mixtral", False), ("qwen3_moe", True)])
def test_scores_that_are_not_deterministic_flip_unless_carried(name: str, carry: bool) -> None:
    """Where a router's input differs from run to run, that is named, and its `topk` too unless it is carried."""
    model = zoo.build(name)[0].bfloat16()
    inputs = {"input_ids": torch.randint(3, zoo.VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(0))}
    generator = torch.Generator().manual_seed(0)

    def disturb(gate: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * (1 + 0.1 * torch.randn(args[0].shape, generator=generator)).bfloat16(),)

    for path, module in model.named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_pre_hook(disturb)
    apply(model, Plan(tuple(Choice((path,), carry=carry) for path in layers_of(model))))
    found = audit(model, (), inputs)
    differing, flipped = ([row for row in found.rows if row.kind == kind] for kind in ("differs", "flips"))
    assert {(row.op, "randn" in code_of(row.line)) for row in differing} == {("aten.randn", True)}
    assert "GeneratorRng" in differing[0].advice
    assert ({row.op for row in flipped} == {"aten.topk"}) if not carry else not flipped


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "torch_encoder", "deepseek_v3"])
def test_whole_models_are_sound(name: str) -> None:
    """Every layer as a region, and pairs of layers as one, give no finding in models that have no fault."""
    model, inputs = zoo.build(name)
    plan = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2).plan(model)
    paths = [path for choice in plan for path in choice.paths]
    found = audit(model, (), inputs, modules=paths)
    assert found.ok, found
    assert set(found.regions) == set(paths)
    apply(model, plan)
    assert audit(model, (), inputs).ok


# --- nothing is changed ----------------------------------------------------------------------------------------------


def test_nothing_of_the_model_is_changed() -> None:
    """Buffers, attributes, gradients, generators and hidden tensors are as before, whatever the regions do to them."""
    names = ["counts", "lists", "fills", "hidden_tensor", "python_random", "numpy_random"]
    model = nn.Sequential(*map(Faulty, names), Norm())
    model(leaf()).sum().backward()
    with unchanged(model, model[3].hidden.get()):
        found = audit(model, (leaf(),), modules=["?"], perturb=0.1)
    assert {row.kind for row in found.rows} == {"mutates", "differs"}


def there_before(region: Any) -> set[int]:
    """The storages of the buffers of a region's module: what is written to them is no new byte."""
    module = region.__wrapped__
    return {b.untyped_storage()._cdata for b in module.buffers()} if isinstance(module, nn.Module) else set()


@pytest.mark.parametrize("name", ["dropout and BatchNorm", "nested", "a saved call in a nested region", "a choice"])
def test_nothing_is_left_behind(name: str) -> None:
    """Not a byte is alive after an audit, with the garbage collector off."""
    fn, args = SOUND[name]()
    audit(fn, args, perturb=0.01)
    with no_collector(), Bytes() as seen:
        audit(fn, args, perturb=0.01)
        assert seen.live_except(there_before(fn)) == 0


def test_nothing_is_left_behind_by_a_fault() -> None:
    """Not a byte is alive after an audit with findings or after one whose model raised, with the collector off."""
    model, x = Faulty("hidden_tensor"), leaf()

    def raises(x: torch.Tensor) -> torch.Tensor:
        recompute(attends)(x)
        raise KeyError("x")

    audit(recompute(model), (x,))
    with no_collector(), Bytes() as seen:
        assert not audit(recompute(model), (x,))
        with pytest.raises(KeyError):
            audit(raises, (x,))
        assert seen.live_except({model.hidden.get().untyped_storage()._cdata, *there_before(recompute(model))}) == 0


# --- what comes back -------------------------------------------------------------------------------------------------


def test_the_text_says_it_once_for_a_stack() -> None:
    """Rows of layers that differ by their number are one entry: kind, operation, module, line, detail, advice."""
    found = audit(nn.Sequential(*(Faulty("reads") for _ in range(3))), (leaf(),), modules=["?"])
    assert len(found.rows) == 3
    title, blank, head, detail, *advice = str(found).splitlines()
    assert title == "audit of 3 regions, each run twice: 3 x waits for the device"
    assert blank == ""
    assert head.split()[:4] == ["syncs", "3", "x", "item()"]
    assert "in *  region *" in head
    assert "test_audit.py:" in head
    assert detail == "    the replay waits for the device once"
    assert advice[0].startswith("    Fix: `replay(fn)` around")
    assert str(audit(recompute(attends), (leaf(),))) == "audit of 1 region, each run twice: nothing to report"


def test_an_audit_is_plain_data() -> None:
    """The JSON text holds the rows, the regions and the verdict."""
    found = audit(recompute(Faulty("reads"), name="part"), (leaf(),))
    data = json.loads(found.to_json())
    assert data["ok"] is False
    assert data["regions"] == ["part"]
    assert data["rows"] == [row._asdict() for row in found.rows]


def test_modules_are_regions_for_the_time_being() -> None:
    """Paths and globs make regions of modules; the model is as before, also after an error."""
    model = nn.Sequential(Norm(), Norm(), nn.Sequential(Norm()))
    assert audit(model, (leaf(),), modules=["1", "0"]).regions == ("0", "1")
    assert audit(model, (leaf(),), modules=["*.0"]).regions == ("2.0",)
    with pytest.raises(RuntimeError, match="shapes"):
        audit(model, (leaf(4, 3),), modules=["*"])
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_call_of_no_region_is_refused() -> None:
    """A model that calls no region, or one that no backward replays, is an error and not a clean bill."""
    with pytest.raises(ArgumentError, match="called no region"):
        audit(nn.Linear(WIDTH, WIDTH), (leaf(),))
    with pytest.raises(ArgumentError, match="reads nothing but these, as around one linear layer"):
        audit(recompute(nn.Linear(WIDTH, WIDTH)), (leaf(),))
    with pytest.raises(ArgumentError, match="called no region"):
        audit(recompute(torch.sin), (leaf().detach(),))


def test_what_the_engine_cannot_watch_is_found_where_the_model_changes_it() -> None:
    """A tensor two attributes deep, changed in place by a later layer, is named by the audit."""
    holder = Holder(torch.ones(WIDTH))

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * holder.get()).exp()

    class Changes(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            holder.get().mul_(2)
            return super().forward(x)

    found = audit(nn.Sequential(Scaled(), Changes()), (leaf(),), modules=["0", "1"])
    assert ("differs", "0", "aten.mul") in rows(found, "kind", "region", "op")
