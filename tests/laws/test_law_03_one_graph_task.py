"""Law 3: no backward inside backward, so hooks, `inputs=`, DDP and gradient release see what they would without us."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laws.cases import BY_NAME, CASES
from laws.placements import PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import backward, floating, weights_of
from torch_recompute import no_recompute, recompute

places = for_each(placement=PLACEMENTS)
SAMPLE = [
    "mlp",
    "encoder_layer",
    "conv_batchnorm",
    "lstm",
    "one_module_twice",
    "routed_to_experts",
    "keywords_and_nests",
]
sample = pytest.mark.parametrize("case", [BY_NAME[name] for name in SAMPLE], ids=lambda case: case.name)


@sample
@places
def test_every_hook_fires_as_often_as_without_regions(case, placement):
    """Tensor, accumulation and node hooks of leaves and outputs fire as without us, in one task."""

    def fired(where):
        program, seen, tasks = case.build(), [], set()

        def note(what):
            def hook(*_):
                seen.append(what)
                tasks.add(torch._C._current_graph_task_id())

            return hook

        for name, leaf in program.leaves().items():
            leaf.register_hook(note(f"tensor {name}"))
            leaf.register_post_accumulate_grad_hook(note(f"accumulated {name}"))
            node = torch.autograd.graph.get_gradient_edge(leaf).node
            node.register_prehook(note(f"before node {name}"))
            node.register_hook(note(f"after node {name}"))
        result = where.put(*program.stages)(*program.args, **program.kwargs)
        for i, tensor in enumerate(floating(result)):
            tensor.register_hook(note(f"output {i}"))
        backward(result)
        assert len(tasks) == 1
        return seen

    assert fired(placement) == fired(PLAIN)


@sample
@places
def test_autograd_grad_over_some_leaves(case, placement):
    """`autograd.grad` and `backward(inputs=)` reach the leaves they name, with plain gradients, and no other."""
    for chosen in (slice(0, 1), slice(-1, None), slice(None, None, 2)):
        grads = []
        for where in (PLAIN, placement):
            program = case.build()
            leaves = list(program.leaves().values())
            outputs = floating(where.put(*program.stages)(*program.args, **program.kwargs))
            options = {"allow_unused": True, "retain_graph": True}
            grads.append(list(torch.autograd.grad(outputs, leaves[chosen], weights_of(outputs), **options)))
            torch.autograd.backward(outputs, weights_of(outputs), inputs=leaves[chosen])
            grads[-1] += [leaf.grad for leaf in leaves]
        for wanted, got in zip(*grads, strict=True):
            assert (wanted is None) == (got is None)
            assert wanted is None or torch.equal(wanted, got)


def test_a_hook_registered_inside_a_region_fires_once():
    """A hook that the function puts on an intermediate tensor fires for the forward's and not for the replay's."""
    seen = []

    def body(x):
        y = x.exp()
        y.register_hook(lambda grad: seen.append(torch._C._current_graph_task_id()))
        return y.sin()

    recompute(body)(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(seen) == 1


def test_a_hook_that_changes_the_gradient():
    """A hook registered inside a region that scales the gradient scales it once."""

    def body(x):
        y = x.exp()
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    grads = []
    for run in (body, recompute(body)):
        x = torch.ones(3, requires_grad=True)
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@places
def test_module_backward_hooks(placement):
    """Full backward hooks of the stages' modules fire once each, with the plain gradients."""

    def fired(where):
        torch.manual_seed(0)
        layers, seen = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], []
        for i, layer in enumerate(layers):
            layer.register_full_backward_hook(lambda m, gi, go, i=i: seen.append((i, go[0].clone())))
        where.put(*layers)(torch.ones(2, 4, requires_grad=True).sin()).sum().backward()
        return seen

    got, wanted = fired(placement), fired(PLAIN)
    assert [i for i, _ in got] == [i for i, _ in wanted]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, wanted, strict=True))


@pytest.mark.parametrize("closure", ["own layer", "whole model"])
@places
def test_gradient_release(placement, closure):
    """An optimizer that steps each weight as soon as its gradient is there, and frees it, trains as without regions."""

    def train(where):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

            def release(p, optimizer=optimizer):
                optimizer.step()
                p.grad = None

            p.register_post_accumulate_grad_hook(release)

        def stage(i):
            return (lambda x: model[i](x).exp()) if closure == "whole model" else chain(model[i], torch.exp)

        for _ in range(2):
            first, last = where.put(*map(stage, (0, 1, 2))), where.put(*map(stage, (3, 4, 5)))
            last(first(torch.ones(2, 4))).sum().backward()
        return list(model.parameters())

    assert all(map(torch.equal, train(placement), train(PLAIN)))


def test_unused_parameters_stay_without_gradient():
    """A weight that the function does not use in this call has no gradient and runs no hook."""
    used, unused, seen = nn.Linear(4, 4), nn.Linear(4, 4), []
    for p in unused.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    recompute(lambda x, which=0: (used, unused)[which](x).exp())(torch.ones(2, 4)).sum().backward()
    assert unused.weight.grad is None
    assert seen == []
    (wanted,) = torch.autograd.grad(used(torch.ones(2, 4)).exp().sum(), used.weight)
    assert torch.equal(used.weight.grad, wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_replay_makes_no_gradients(case):
    """Backward runs each backward node of the forward's graph and accumulates once per leaf; the replay adds none."""
    program, counts = case.build(), {}
    for name, leaf in program.leaves().items():
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: counts.update({name: counts.get(name, 0) + 1}))
    backward(recompute(chain(*program.stages))(*program.args, **program.kwargs))
    assert set(counts.values()) <= {1}


@pytest.fixture
def process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel(process_group, options):
    """DDP's reducer sees each gradient once, with a layer that two regions share, a saved call, and unused weights."""

    class Model(nn.Module):
        def __init__(self, wrap, save):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4) if options.get("find_unused_parameters") else None
            self.wrap, self.save = wrap, save

        def block(self, x):
            return self.shared(self.save(self.first)(x).exp()).tanh()

        def forward(self, x):
            return self.wrap(self.block)(self.wrap(self.block)(x))

    results = []
    for wrap, save in ((lambda fn: fn, lambda fn: fn), (recompute, no_recompute)):
        model = nn.parallel.DistributedDataParallel(Model(wrap, save), bucket_cap_mb=0.00001, **options)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        results.append([p.grad for p in model.parameters()])
    for wanted, got in zip(*results, strict=True):
        assert (wanted is None) == (got is None)
        assert wanted is None or torch.equal(wanted, got)
