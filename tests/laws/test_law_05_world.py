"""Law 5: the replay finds the world as forward found it, and leaves it as backward found it."""

from __future__ import annotations

import contextlib
import contextvars
import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from laws.cases import BY_NAME
from laws.placements import PLACEMENTS, PLAIN
from laws.table import for_each
from laws.watch import Operations, assert_same, backward, left_by, ones
from support.acted import copies_as_on_cuda
from torch_recompute import no_recompute, recompute

places = for_each(placement=PLACEMENTS)


# --- settings that are active around forward only -------------------------------------------------------------------


class Doubled(TorchFunctionMode):
    """Turns every `exp` into `exp * 2`, as context parallelism replaces attention."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.exp, torch.Tensor.exp) else result


@contextlib.contextmanager
def evaluated(module):
    module.eval()
    yield
    module.train()


@contextlib.contextmanager
def hooked(modules):
    """Hooks that PEFT's aLoRA and the like register for one forward: they change what modules are given and return."""
    handles = []
    for module in modules:
        if not list(module.children()):
            handles += [
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: ((args[0] * 2, *args[1:]), kwargs), with_kwargs=True
                ),
                module.register_forward_hook(lambda _, args, result: result.sin()),
            ]
    yield
    for handle in handles:
        handle.remove()


SETTINGS = {
    "function mode": lambda program: Doubled(),
    "autocast": lambda program: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda program: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "sdpa kernel": lambda program: sdpa_kernel(SDPBackend.MATH),
    "hooks": lambda program: hooked(nn.ModuleList(m for m in program.stages if isinstance(m, nn.Module)).modules()),
    "eval": lambda program: evaluated(nn.ModuleList(m for m in program.stages if isinstance(m, nn.Module))),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["encoder_layer", "conv_batchnorm", "dropouts"])
@places
def test_a_setting_around_forward_only(name, setting, placement):
    """What was active around forward is active in the replay and in nothing else."""
    assert_same(left_after(name, setting, placement), once(name, setting, PLAIN))


def left_after(name, setting, placement):
    program = BY_NAME[name].build()
    with SETTINGS[setting](program):
        result = placement.put(*program.stages)(*program.args, **program.kwargs)
    before = outer_settings()
    backward(result)
    assert before == outer_settings()
    return left_by(program, result)


once = functools.cache(left_after)  # for the plain program


def outer_settings():
    return torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack(), torch._C._get_math_sdp_enabled()


@pytest.mark.parametrize("made", [torch.float16, torch.bfloat16])
@places
def test_the_default_dtype_is_that_of_the_forward(made, placement):
    """Tensors that a region makes have the dtype in a replay that they had in forward, whatever is made after it."""
    grads = []
    for where in (PLAIN, placement):
        x = torch.linspace(0, 1, 6).requires_grad_()
        result = where.put(torch.sin, lambda x: x * torch.tensor(1 / 3).to(x.dtype).sin(), torch.sin)(x)
        torch.set_default_dtype(made)
        try:
            result.sum().backward()
            assert torch.get_default_dtype() is made
        finally:
            torch.set_default_dtype(torch.float32)
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["mlp", "one_module_twice", "encoder_layer"])
@pytest.mark.parametrize("cache", [True, False])
@places
def test_autocast_changed_inside_and_around(name, cache, placement):
    """On around the region, off within it, another dtype around backward; one weight in two calls, cache or not."""

    def run(where):
        program = BY_NAME[name].build()
        a, b, c = program.stages

        def off(value):
            with torch.autocast("cpu", enabled=False):
                return b(value.float())

        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            placed = where.put(a, off, c)
            result = placed(placed(*program.args))
        with torch.autocast("cpu", torch.float16):
            backward(result)
        return left_by(program, result)

    wanted = run(PLAIN)
    for _ in range(5):
        assert_same(run(placement), wanted)


def test_one_weight_in_two_regions_under_autocast():
    """Two regions that share a weight under one autocast get the plain gradients, in both orders of use."""
    for regions in (1, 2):
        grads = []
        for wrap in (lambda fn: fn, recompute):
            torch.manual_seed(0)
            layer, x = nn.Linear(8, 8), torch.randn(4, 8)
            first = wrap(layer) if regions == 1 else wrap(lambda x: wrap(layer)(x.sin()))  # noqa: B023
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
                z = wrap(layer)(first(x).exp()) + y
            z.float().sum().backward()
            grads.append(layer.weight.grad)
        assert torch.equal(*grads)


def test_default_dtype_and_grad_mode_in_the_replay():
    """A backward under `no_grad` still rebuilds what it needs, with grad enabled inside the function."""
    seen = []

    def body(x):
        seen.append(torch.is_grad_enabled())
        with torch.no_grad():
            seen.append(torch.is_grad_enabled())
        return x.exp()

    x = ones(2)
    y = recompute(body, early_stop=False)(x).sum()
    with torch.no_grad():
        y.backward()
    assert seen == [True, False] * 2
    assert torch.equal(x.grad, x.detach().exp())


def test_a_dispatch_mode_around_forward_only():
    """A dispatch mode of forward sees the operations of the replay too, and none of the backward's own."""
    with Operations() as seen:
        y = recompute(torch.exp)(ones(2))
    y.sum().backward()
    assert seen.counts["exp"] == 2
    assert seen.counts["mul"] == 0


def test_context_variables():
    """The replay reads the context variables of forward, on whatever thread; what it sets stays in it."""
    variable = contextvars.ContextVar("variable", default=1.0)

    def body(x):
        y = (x * variable.get()).exp()
        variable.set(variable.get() + 7)
        return y * variable.get()

    token = variable.set(2.0)
    x = ones(2)
    y = recompute(body, early_stop=False)(x)
    assert variable.get() == 9.0
    variable.reset(token)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0).exp() * 2 * 9)
    assert variable.get() == 1.0


def test_hooks_of_the_forward_alone_are_gone_again():
    """A replay runs the hooks that the forward found and left, in their order, and none that removed itself in it."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    seen = []

    def hook(name):
        return lambda *_: seen.append(name)

    first = module[0].register_forward_pre_hook(hook("first"))
    module[0].register_forward_pre_hook(hook("second"))

    def removes_itself(*_):
        seen.append("once")
        once.remove()

    once = module[1].register_forward_pre_hook(removes_itself)
    y = recompute(module)(ones(2, 3)).sum()
    first.remove()
    assert seen == ["first", "second", "once"]
    y.backward()
    assert seen[3:] == ["first", "second"]
    assert [len(one._forward_pre_hooks) for one in module] == [1, 0]


class Tripling(torch.Tensor):
    """Triples what `sin` returns, as a subclass with functions of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func in (torch.sin, torch.Tensor.sin) else result


@places
def test_functions_that_a_subclass_overrides(placement):
    """A replay calls the functions of a tensor's class, also where backward is called on a tensor of that class."""

    def grad(where):
        x = ones(3).detach().as_subclass(Tripling).requires_grad_()
        where.put(torch.cos, torch.sin, torch.exp)(x).sum().backward()
        return x.grad.as_subclass(torch.Tensor)

    assert torch.equal(grad(placement), grad(PLAIN))
    assert torch._C._is_torch_function_enabled()


def test_functions_that_are_switched_off_around_backward():
    """A replay leaves it as it is where functions of classes and modes are all switched off."""
    x = ones(3)
    out = recompute(lambda x: x.sin().exp())(x).sum()
    with torch._C.DisableTorchFunction():
        out.backward()
        assert torch._C._is_torch_function_all_disabled()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())


@places
def test_gradients_for_several_vectors_by_vmap(placement):
    """A replay within `torch.vmap` over a gradient is that of the forward, which was outside of it."""

    def rows(where):
        torch.manual_seed(0)
        x, layer = ones(4), nn.Linear(4, 4)
        y = where.put(layer, torch.tanh, nn.Dropout(0.5))(x)
        return torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(4))

    assert torch.equal(rows(placement), rows(PLAIN))


class Observed(nn.Module):
    """Keeps the largest value that it has seen, in a buffer to which its first forward gives memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x):
        seen = x.detach().max()
        seen = torch.maximum(self.largest, seen) if self.largest.numel() else seen
        self.largest.resize_(()).copy_(seen)
        return x * self.largest.clone()


@places
def test_a_buffer_that_the_first_forward_makes(placement):
    """A buffer of no elements that a forward resizes, as observers for quantization do, has a replay."""

    def grads(where):
        observed, x = Observed(), ones(3)
        for i in range(2):
            where.put(torch.sin, observed, torch.exp)(x * (i + 1)).sum().backward()
        return x.grad, observed.largest

    assert all(map(torch.equal, grads(placement), grads(PLAIN)))


def test_a_jagged_tensor_that_is_made_from_offsets():
    """A replay is given the offsets themselves, by which PyTorch knows lengths that are the same."""
    offsets = torch.tensor([0, 2, 3])

    def fn(x):
        made = torch.nested.nested_tensor_from_jagged(x.sin(), offsets)
        return (made * made.sin()).values().exp()

    def grad(wrap):
        x = ones(3, 2)
        wrap(fn)(x).sum().backward()
        return x.grad

    assert torch.equal(grad(recompute), grad(lambda fn: fn))


class Lazily(nn.Module):
    """Installs a hook in its first forward, as transformers does where hidden states are asked for."""

    def __init__(self):
        super().__init__()
        self.inner, self.ready = nn.Linear(4, 4), False

    def forward(self, x):
        if not self.ready:
            self.inner.register_forward_hook(lambda _, args, result: result * 2)
            self.ready = True
        return self.inner(x).tanh().sin()


@places
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_a_hook_that_a_forward_installs_is_installed_once(placement, before):
    """A replay of such a forward installs its hook for itself alone, whether the module had one before or not."""

    def grads(where):
        torch.manual_seed(0)
        module = Lazily()
        if before:
            module.inner.register_forward_hook(lambda _, args, result: result.cos())
        for _ in range(3):
            where.put(torch.cos, module, torch.exp)(torch.ones(2, 4)).sum().backward()
        return module.inner.weight.grad, len(module.inner._forward_hooks)

    (wanted, count), (got, found) = grads(PLAIN), grads(placement)
    assert found == count == 1 + before
    assert torch.equal(got, wanted)


@places
def test_a_hook_that_is_registered_after_the_forward(placement):
    """A hook that comes, with other changes of a module, between forward and backward is none of the replay's."""
    torch.manual_seed(0)
    module, x = Lazily(), ones(2, 4)
    stages = torch.cos, module, torch.exp
    wanted = torch.autograd.grad(PLAIN.put(*stages)(x).sum(), x)
    out = placement.put(*stages)(x)
    module.inner.register_forward_hook(lambda _, args, result: result * 5)
    module.ready = None
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted[0])
    assert len(module.inner._forward_hooks) == 2


def test_training_flag_turned_off_before_backward():
    """`model.eval()` between forward and backward changes neither the gradients nor the flags."""
    grads = []
    for wrap in (lambda fn: fn, recompute, lambda fn: recompute(recompute(fn))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh())
        x = torch.randn(4, 8)
        y = wrap(model)(x)
        model.eval()
        model[2].training = True
        y.sin().sum().backward()
        assert [m.training for m in model] == [False, False, True, False]
        grads.append((model[0].weight.grad, model[2].running_mean, model[2].num_batches_tracked))
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))


@pytest.mark.parametrize("wrap", [recompute, lambda fn: recompute(recompute(fn))], ids=["region", "nested"])
def test_buffers_that_are_put_back_by_a_kernel_that_raises_versions(wrap):
    """On CUDA too a replay leaves the versions of a module's buffers, which another call's backward reads as well."""

    def grads(wrap):
        norm, x = nn.BatchNorm1d(3), ones(4, 3)
        with copies_as_on_cuda():
            (norm(x).sin() + wrap(lambda y: norm(y).sin())(x)).sum().backward()
        return x.grad, norm.weight.grad, norm.running_mean, norm.running_var

    assert all(map(torch.equal, grads(wrap), grads(lambda fn: fn)))


def test_nothing_is_copied_that_was_not_touched():
    """Without random numbers and without buffers, a region keeps nothing but its inputs: no byte is made in forward."""
    drawn = []

    class Watched:
        def capture(self):
            drawn.append("capture")
            return 0

        def restore(self, value):
            drawn.append("restore")

    before = torch.get_rng_state()
    recompute(torch.exp, state=[Watched()])(ones(2)).sum().backward()
    assert drawn == ["capture", "capture", "restore", "restore"]
    assert torch.equal(before, torch.get_rng_state())


class Sine(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight.sin() * 2


@pytest.mark.parametrize("backward_inside", [True, False])
def test_weights_that_are_computed_once(backward_inside):
    """`parametrize.cached()` around a step, or its forward: a replay computes what its forward did."""

    def step(wrap):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", Sine())
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with parametrize.cached():
            y = wrap(lambda x: layers[0](layers[1](x).tanh()).exp())(layers[0](x))
            loss = wrap(lambda y: layers[1](y).sin())(y).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return [x.grad, *(p.grad for p in layers.parameters())]

    for got, wanted in zip(step(recompute), step(lambda fn: fn), strict=True):
        assert torch.equal(got, wanted)


class Reads(nn.Module):
    """Changes its buffer, which a saved call then reads."""

    def __init__(self, keep):
        super().__init__()
        self.register_buffer("count", torch.ones(8))
        self.keep = keep

    def forward(self, x):
        self.count.add_(1)
        return self.keep(lambda y: y * self.count)(x * self.count).sin().exp()


def test_a_saved_call_reads_a_buffer_that_the_region_changes():
    """What the call saved of the buffer is what it read, though a replay changes the buffer and puts it back."""

    def step(wrap, keep):
        layer, x = Reads(keep), torch.linspace(-1, 1, 8).requires_grad_()
        wrap(layer)(x).sum().backward()
        return x.grad, layer.count

    for got, wanted in zip(step(recompute, no_recompute), step(lambda fn: fn, lambda fn: fn), strict=True):
        assert torch.equal(got, wanted)
