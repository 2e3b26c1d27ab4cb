"""Training scripts with one known fault each, and sound ones: what the doctor is tried on, and what it must say.

A script is run as it is, and once more with one piece of it replaced. A new fault is a row of `FAULTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_recompute import doctor

PRELUDE = """
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_recompute
from torch_recompute import Choice, Plan, doctor, doing_recompute, recompute, replay


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, block=Block, vocabulary=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

    def hidden(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return x

    def run(self, block, x):
        return block(x)


def loss_of(out):
    return F.cross_entropy(out.flatten(0, 1), tokens.flatten()) if out.dim() > 2 else out.mean()


def train(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        loss = loss_of(model(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


tokens = torch.arange(64).view(2, 32)
random.seed(0)
"""


@dataclass(frozen=True)
class Fault:
    """A script with one fault.

    Attributes:
        name: What is wrong, in words.
        kind: The finding.
        where: Its place.
        script: The script; it follows the prelude, and `report` is the doctor's.
        wrong: The piece of the script that is wrong.
        right: What mends it.
        says: What of that the finding says, where it is not `right` itself.
        also: Kinds that are found with it, and may stay: they are true of the script.
        line: What mends it, for the page, where that is not `right`.
        after: Kinds that are found in the mended script: they are true of it, and could not be seen before.
    """

    name: str
    kind: str
    where: str
    script: str
    wrong: str
    right: str
    says: str = ""
    also: tuple[str, ...] = ()
    line: str = ""
    after: tuple[str, ...] = ()

    def row(self, report: doctor.Report, mended: doctor.Report) -> dict[str, Any]:
        """What the doctor found in the script and in the mended one, for the table on its page."""
        mend = self.line or f"`{self.right.removeprefix('return ').removeprefix('= ').rstrip('(')}`"
        places = [found.where for found in report.findings if found.kind == self.kind]
        also = sorted({found.kind for found in report.findings} - {self.kind})
        after = sorted({found.kind for found in mended.findings})
        return {"name": self.name, "kind": self.kind, "where": places, "also": also, "mend": mend, "after": after}


COPIED = """
        class Again(torch.autograd.Function):  # as it is copied from repository to repository
            @staticmethod
            def forward(ctx, run_function, length, *args):
                ctx.run_function = run_function
                ctx.input_tensors, ctx.input_params = list(args[:length]), list(args[length:])
                with torch.no_grad():
                    return ctx.run_function(*ctx.input_tensors)

            @staticmethod
            def backward(ctx, *gradients):
                ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
                with torch.enable_grad():
                    output = ctx.run_function(*[x.view_as(x) for x in ctx.input_tensors])
                inputs = ctx.input_tensors + ctx.input_params
                return (None, None, *torch.autograd.grad(output, inputs, gradients, allow_unused=True))


        def again(fn, x):
            return Again.apply(fn, 1, x, *fn.parameters())

"""
FAIRSCALE = """
        class Wrapped(torch.autograd.Function):  # as fairscale's: a dummy input, keyword arguments beside
            @staticmethod
            def forward(ctx, dummy, run_function, parent, names, *args):
                ctx.run_function, ctx.names, ctx.state = run_function, names, torch.get_rng_state()
                ctx.save_for_backward(*args)
                with torch.no_grad():
                    output = run_function(*args[: len(args) - len(names)], **dict(zip(names, args[-len(names) :])))
                parent["outputs"] = 1
                return output

            @staticmethod
            def backward(ctx, *gradients):
                inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
                with torch.random.fork_rng([]), torch.enable_grad():
                    torch.set_rng_state(ctx.state)
                    count = len(inputs) - len(ctx.names)
                    output = ctx.run_function(*inputs[:count], **dict(zip(ctx.names, inputs[count:])))
                torch.autograd.backward(output, gradients)
                return (None, None, None, None, *(x.grad for x in inputs))


        def again(fn, x):
            return Wrapped.apply(torch.tensor([], requires_grad=True), fn, {}, ["x"], x)

"""
DEEPSPEED = """
        class Stored(torch.autograd.Function):  # as DeepSpeed's: outputs go into a list, inputs onto the ctx
            @staticmethod
            def forward(ctx, run_function, all_outputs, *args):
                ctx.run_function, ctx.stored = run_function, [x.detach() for x in args]
                with torch.no_grad():
                    outputs = run_function(*args)
                all_outputs.append(outputs)
                return outputs

            @staticmethod
            def backward(ctx, *gradients):
                inputs = [x.requires_grad_() for x in ctx.stored]
                with torch.enable_grad():
                    output = ctx.run_function(*inputs)
                torch.autograd.backward([output], gradients)
                return (None, None, *(x.grad for x in inputs))


        def again(fn, x):
            return Stored.apply(fn, [], x)

"""
AROUND_UP = """
        class Net(Model):
            def run(self, block, x):
                return x + block.down(F.gelu(again(block.up, block.norm(x))))


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
"""
AROUND_LAST = """
        class Net(Model):
            def run(self, block, x):
                return again(block, x) if block is self.blocks[2] else block(x)


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
"""


FAULTS = [
    Fault(
        "LoRA with a reentrant checkpoint",
        "frozen_input",
        "blocks.*.up",
        """
        class Net(Model):
            def run(self, block, x):
                return checkpoint(block, x, use_reentrant=True)


        model = Net()
        model.embed.requires_grad_(False)  # as LoRA freezes it
        with doctor.watch(model) as watching:
            train(model)
        report = watching.report()
        """,
        "use_reentrant=True",
        "use_reentrant=False",
    ),
    Fault(
        "Python's random in a region",
        "updated_twice",
        "Skips",
        """
        class Skips(Block):
            def forward(self, x):
                return super().forward(x) if random.random() < 0.9 else x.sin()


        class Net(Model):
            def run(self, block, x):
                return recompute(block)(x)


        report = doctor.examine(Net(Skips), (tokens,), loss=loss_of, hold_output=False)
        """,
        "recompute(block)(x)",
        "recompute(block, state=[torch_recompute.state.PythonRng()])(x)",
        says="state=[PythonRng()]",
    ),
    Fault(
        "BatchNorm under torch's checkpoint",
        "updated_twice",
        "blocks.*.norm.running_mean",
        """
        class Normed(Block):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(32)


        class Net(Model):
            def run(self, block, x):
                return checkpoint(block, x, use_reentrant=False)


        model = Net(Normed)
        with doctor.watch(model) as watching:
            train(model)
        report = watching.report()
        """,
        "return checkpoint(",
        "return torch_recompute.checkpoint(",
        says="torch_recompute.checkpoint",
    ),
    Fault(
        ".item() in a region",
        "host_syncs",
        "blocks.*",
        """
        class Scales(Block):
            def forward(self, x):
                scale = x.abs().max().item()
                return super().forward(x) / max(scale, 1.0)


        class Net(Model):
            def run(self, block, x):
                return recompute(block)(x)


        report = doctor.examine(Net(Scales), (tokens,), loss=loss_of, hold_output=False)
        """,
        "x.abs().max().item()",
        "replay(lambda x: x.abs().max().item())(x)",
        says="replay(fn)",
    ),
    Fault(
        "a region that saves nothing",
        "saves_nothing",
        "blocks.0.up",
        """
        plan = Plan((Choice(("blocks.0.up",)), Choice(("blocks.1",), ("@product",))))
        report = doctor.examine(Model(), (tokens,), plan=plan, loss=loss_of, hold_output=False)
        """,
        '(Choice(("blocks.0.up",)), Choice(("blocks.1",), ("@product",)))',
        '(Choice(("blocks.1",), ("@product",)),)',
        says="a plan without blocks.*.up",
        line="a plan without `blocks.0.up`",
    ),
    Fault(
        "the optimizer's state fills the budget",
        "optimizer_state",
        "Model",
        """
        report = doctor.examine(
            Model(), (tokens,), budget="560KiB", optimizer=torch.optim.AdamW, loss=loss_of, hold_output=False
        )
        """,
        "torch.optim.AdamW",
        "torch.optim.Adafactor",
        says="Adafactor",
        also=("over_budget",),
    ),
    Fault(
        "a huge vocabulary, the model returns logits",
        "loss_head",
        "Net",
        """
        class Net(Model):
            def head_and_loss(self, hidden, labels):
                losses = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
                return losses.view_as(labels)

            def forward(self, tokens):
                return self.head(self.hidden(tokens))


        plan = Plan(tuple(Choice((f"blocks.{i}",), keep=("@product",)) for i in range(3)))
        report = doctor.examine(Net(vocabulary=4096), (tokens,), plan=plan, loss=loss_of, hold_output=False)
        """,
        "self.head(self.hidden(tokens))",
        "recompute(self.head_and_loss, tiles=8)(self.hidden(tokens), tokens)",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
    ),
    Fault(
        "a huge vocabulary, the model returns its loss",
        "loss_head",
        "Net",
        """
        class Net(Model):
            def head_and_loss(self, hidden, labels):
                losses = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
                return losses.view_as(labels)

            def forward(self, tokens):
                return self.head_and_loss(self.hidden(tokens), tokens).mean()


        plan = Plan(tuple(Choice((f"blocks.{i}",), keep=("@product",)) for i in range(3)))
        report = doctor.examine(Net(vocabulary=4096), (tokens,), plan=plan)
        """,
        "self.head_and_loss(",
        "recompute(self.head_and_loss, tiles=8)(",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
    ),
    Fault(
        "preserve_rng_state=False with dropout",
        "not_deterministic",
        "blocks.*.dropout",
        """
        class Net(Model):
            def run(self, block, x):
                return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


        report = doctor.examine(Net(lambda: Block(dropout=0.1)), (tokens,), loss=loss_of, hold_output=False)
        """,
        "preserve_rng_state=False",
        "preserve_rng_state=True",
        also=("updated_twice",),
    ),
    Fault(
        "activations collected in a list",
        "kept_alive",
        "global 'features' of script[*]",
        """
        features = []


        class Net(Model):
            def run(self, block, x):
                features.append(x)
                return block(x)


        model = Net()
        with doctor.watch(model) as watching:
            train(model)
        report = watching.report()
        """,
        "features.append(x)",
        "features.append(x.detach().mean().item())",
        says="x.detach().mean().item()",
    ),
    Fault(
        "graph breaks under torch.compile",
        "fallbacks",
        "OptimizedModule",
        """
        class Net(Model):
            def run(self, block, x):
                y = block(x)
                torch._dynamo.graph_break()
                return y


        model = torch.compile(Net(), backend="aot_eager")
        report = doctor.examine(model, (tokens,), loss=loss_of, hold_output=False)
        """,
        "torch._dynamo.graph_break()",
        "pass",
        says="outside the compiled part",
        line="the call outside of what is compiled",
    ),
    Fault(
        "a region that frees exactly what it keeps",
        "saves_nothing",
        "blocks.*.soft",
        """
        class Gated(Block):
            def __init__(self):
                super().__init__()
                self.soft = nn.Softmax(-1)

            def forward(self, x):
                return super().forward(x) + self.soft(self.up(self.norm(x)))[..., :32]


        plan = Plan(tuple(Choice((f"blocks.{i}.soft",)) for i in range(3)))
        report = doctor.examine(Model(Gated), (tokens,), plan=plan, loss=loss_of, hold_output=False)
        """,
        "plan=plan, ",
        "",
        says="a plan without blocks.*.soft",
        line="a plan without `blocks.*.soft`",
    ),
    Fault(
        "a region around a fused attention",
        "double_recompute",
        "model.layers.*.self_attn",
        """
        from transformers import LlamaConfig, LlamaForCausalLM

        size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3))
        plan = Plan(tuple(Choice((f"model.layers.{i}.self_attn",), ("@product",)) for i in range(3)))
        report = doctor.examine(model, (tokens,), {"labels": tokens}, plan=plan, hold_output=False)
        """,
        "plan=plan, ",
        "",
        says="a plan without model.layers.*.self_attn",
        line="a plan without it, or `attention_output` among `recompute_modules`",
    ),
    Fault(
        "a router that flips",
        "not_deterministic",
        "blocks.0",
        """
        import itertools

        flips = itertools.cycle([1, -1])


        def pick(scores):
            return (scores * next(flips)).argmax(-1)


        class Routed(Block):
            def forward(self, x):
                scores = self.up(x)[..., :4]
                chosen = pick(scores)
                y = x.clone()
                for expert in range(4):
                    y[chosen == expert] = super().forward(x[chosen == expert])
                return y


        class Net(Model):
            def run(self, block, x):
                return recompute(block)(x) if block is self.blocks[0] else block(x)


        report = doctor.examine(Net(Routed), (tokens,), loss=loss_of, hold_output=False)
        """,
        "= pick(scores)",
        "= replay(pick)(scores)",
        says="replay(fn)",
        also=("host_syncs",),
    ),
    Fault(
        "ZeRO-3 with frozen weights",
        "not_deterministic",
        "Net",
        """
        from support.zero3 import Block as Adapted, Partitioned, WIDTH

        class Net(nn.Sequential):
            def forward(self, x):
                for block in self:
                    x = checkpoint(block, x, use_reentrant=False)
                return x


        model = Net(*(Adapted(False) for _ in range(3)))
        zero = Partitioned(model)


        def loss_of(y):
            return y.square().mean()


        report = doctor.examine(model, (torch.randn(4, WIDTH),), loss=loss_of, hold_output=False)
        """,
        "= checkpoint(",
        "= torch_recompute.checkpoint(",
        says="torch_recompute.checkpoint",
    ),
    Fault(
        "a counter in a dict of dicts",
        "updated_twice",
        "Counts",
        """
        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.statistics = {"tokens": {"seen": 0}}

            def forward(self, x):
                self.statistics["tokens"]["seen"] += x.shape[1]
                return super().forward(x)


        class Net(Model):
            def run(self, block, x):
                return recompute(block)(x)


        report = doctor.examine(Net(Counts), (tokens,), loss=loss_of, hold_output=False)
        """,
        '["seen"] += x.shape[1]',
        '["seen"] += 0 if doing_recompute() else x.shape[1]',
        says="only if `not doing_recompute()`",
    ),
    Fault(
        "a list that the function empties",
        "not_deterministic",
        "Net",
        """
        class Net(Model):
            def run(self, block, x):
                return checkpoint(lambda xs: block(xs.pop()), [x], use_reentrant=False)


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
        """,
        "return checkpoint(",
        "return torch_recompute.checkpoint(",
        says="torch_recompute.checkpoint",
    ),
    Fault(
        "checkpoint wrappers inside checkpoint wrappers",
        "double_recompute",
        "blocks.*._checkpoint_wrapped_module.up._checkpoint_wrapped_module",
        """
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        model = Model()
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, (Block, nn.Linear)))
        with doctor.watch(model) as watching:
            train(model)
        report = watching.report()
        """,
        "(Block, nn.Linear)",
        "Block",
        says="in one place only",
        line="`check_fn=lambda m: isinstance(m, Block)`",
    ),
    Fault(
        "a reentrant checkpoint under DDP",
        "reentrant",
        "blocks.*",
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        class Net(Model):
            def run(self, block, x):
                return checkpoint(block, x, use_reentrant=True)


        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        report = doctor.examine(model, (tokens,), loss=loss_of, hold_output=False)
        """,
        "use_reentrant=True",
        "use_reentrant=False",
    ),
    Fault(
        "a lambda in a loop",
        "not_deterministic",
        "blocks.*.up",
        """
        class Net(Model):
            def forward(self, tokens):
                x = self.embed(tokens)
                for block in self.blocks:
                    x = checkpoint(lambda x: block(x), x, use_reentrant=False)
                return self.head(x)


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
        """,
        "= checkpoint(",
        "= torch_recompute.checkpoint(",
        says="torch_recompute.checkpoint",
    ),
    Fault(
        "the input of a checkpoint changed in place",
        "updated_twice",
        "Net.run.<locals>.<lambda>",
        """
        class Net(Model):
            def run(self, block, x):
                x = x + 0
                y = checkpoint(lambda x: block(x * 2.0), x, use_reentrant=False)
                return y + x.mul_(0.5)


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
        """,
        "x.mul_(0.5)",
        "x.mul(0.5)",
        says="on a clone",
    ),
    Fault(
        "retain_graph=True left on",
        "kept_alive",
        "the training loop",
        """
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with doctor.watch(model) as watching:
            for _ in range(3):
                loss = loss_of(model(tokens))
                loss.backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
        report = watching.report()
        """,
        "loss.backward(retain_graph=True)",
        "loss.backward()",
        says="`loss.backward()` without `retain_graph=True`",
    ),
    Fault(
        "losses summed with their graphs",
        "kept_alive",
        "the training loop",
        """
        model, total = Model(), 0.0
        with doctor.watch(model) as watching:
            for _ in range(3):  # validation, without torch.no_grad()
                total += loss_of(model(tokens))
        report = watching.report()
        """,
        "total += loss_of(model(tokens))",
        "total += loss_of(model(tokens)).item()",
        says=".item()",
    ),
    Fault(
        "checkpointing of a model in eval mode",
        "saves_nothing",
        "model",
        """
        from transformers import LlamaConfig, LlamaForCausalLM

        size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=3))
        model.eval()  # as from_pretrained returns it
        model.gradient_checkpointing_enable()
        report = doctor.examine(model, (tokens,), {"labels": tokens}, hold_output=False)
        """,
        "model.eval()",
        "model.train()",
    ),
    Fault(
        "gradients zeroed in place",
        "kept_alive",
        "the training loop",
        """
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with doctor.watch(model) as watching:
            for _ in range(3):
                loss_of(model(tokens)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        report = watching.report()
        """,
        "optimizer.zero_grad(set_to_none=False)",
        "optimizer.zero_grad()",
    ),
    Fault(
        "logits held through backward",
        "output_held",
        "the training loop",
        """
        class Net(Model):
            def forward(self, tokens):
                logits = super().forward(tokens)
                return {"loss": loss_of(logits), "logits": logits}


        report = doctor.examine(Net(vocabulary=4096), (tokens,), hold_output=True)
        """,
        "hold_output=True",
        "hold_output=False",
    ),
    Fault(
        "a cross-entropy by log_softmax and gather",
        "loss_head",
        "Net",
        """
        class Net(Model):
            def head_and_loss(self, hidden, labels):
                return -self.head(hidden).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

            def forward(self, tokens):
                return self.head_and_loss(self.hidden(tokens), tokens).mean()


        plan = Plan(tuple(Choice((f"blocks.{i}",), keep=("@product",)) for i in range(3)))
        report = doctor.examine(Net(vocabulary=4096), (tokens,), plan=plan)
        """,
        "self.head_and_loss(",
        "recompute(self.head_and_loss, tiles=8)(",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
    ),
    Fault(
        "a cross-entropy by logsumexp",
        "loss_head",
        "Net",
        """
        class Net(Model):
            def head_and_loss(self, hidden, labels):
                logits = self.head(hidden)
                return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]

            def forward(self, tokens):
                return self.head_and_loss(self.hidden(tokens), tokens).mean()


        plan = Plan(tuple(Choice((f"blocks.{i}",), keep=("@product",)) for i in range(3)))
        report = doctor.examine(Net(vocabulary=4096), (tokens,), plan=plan)
        """,
        "self.head_and_loss(",
        "recompute(self.head_and_loss, tiles=8)(",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
    ),
    Fault(
        "distillation from a teacher's logits",
        "loss_head",
        "Net",
        """
        class Net(Model):
            def __init__(self, **size):
                super().__init__(**size)
                self.teacher = Model(**size).requires_grad_(False)

            def head_and_loss(self, hidden, theirs):
                target = self.teacher.head(theirs).softmax(-1)
                return F.kl_div(self.head(hidden).log_softmax(-1), target, reduction="none").sum(-1)

            def forward(self, tokens):
                with torch.no_grad():
                    theirs = self.teacher.hidden(tokens)
                return self.head_and_loss(self.hidden(tokens), theirs).mean()


        plan = Plan(tuple(Choice((f"blocks.{i}",), keep=("@product",)) for i in range(3)))
        report = doctor.examine(Net(vocabulary=4096), (tokens,), plan=plan)
        """,
        "self.head_and_loss(",
        "recompute(self.head_and_loss, tiles=8)(",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
    ),
    Fault(
        "a budget that only tiles of the loss can meet",
        "over_budget",
        "Net",
        """
        class Net(Model):
            def head_and_loss(self, hidden, labels):
                return -self.head(hidden).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

            def forward(self, tokens):
                return self.head_and_loss(self.hidden(tokens), tokens).mean()


        report = doctor.examine(Net(vocabulary=4096), (tokens,), budget="2900KiB")
        """,
        "self.head_and_loss(",
        "recompute(self.head_and_loss, tiles=8)(",
        says="recompute(head_and_loss, tiles=8)(hidden, labels)",
        also=("loss_head",),
    ),
    Fault(
        "outputs collected in a list",
        "kept_alive",
        "global 'outs' of script[*]",
        """
        model, outs = Model(), []
        with doctor.watch(model) as watching:
            for _ in range(3):
                out = model(tokens)
                outs.append(out)
                loss_of(out).backward()
        report = watching.report()
        """,
        "outs.append(out)",
        "outs.append(out.detach().mean().item())",
        says="x.detach().mean().item()",
    ),
    Fault(
        "a loss cut off by a reentrant checkpoint",
        "frozen_input",
        "head",
        """
        class Net(Model):
            def run(self, block, x):
                return checkpoint(block, x, use_reentrant=True)

            def forward(self, tokens):
                return checkpoint(lambda x: loss_of(self.head(x)), self.hidden(tokens), use_reentrant=True)


        def checkpoint(fn, x, use_reentrant):
            return torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=REENTRANT)


        REENTRANT = True
        model = Net()
        model.embed.requires_grad_(False)
        report = doctor.examine(model, (tokens,), hold_output=False)
        """,
        "REENTRANT = True",
        "REENTRANT = False",
        says="use_reentrant=False",
        line="`use_reentrant=False`",
        after=("saves_nothing",),
    ),
    Fault(
        "torch's checkpoint around a linear layer",
        "saves_nothing",
        "blocks.*.up",
        """
        class Net(Model):
            def run(self, block, x):
                return x + block.down(F.gelu(checkpoint(block.up, block.norm(x), use_reentrant=False)))


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
        """,
        "checkpoint(block.up, block.norm(x), use_reentrant=False)",
        "block.up(block.norm(x))",
        says="the plain call instead of the region blocks.*.up",
        line="the plain call",
    ),
    Fault(
        "a validation loss kept every fourth step",
        "kept_alive",
        "the training loop",
        """
        model, seen = Model(), []
        with doctor.watch(model) as watching:
            for step in range(16):
                loss_of(model(tokens)).backward()
                model.zero_grad()
                if step % 4 == 3:  # validation, without torch.no_grad()
                    seen.append(loss_of(model(tokens)))
        report = watching.report()
        """,
        "seen.append(loss_of(model(tokens)))",
        "seen.append(loss_of(model(tokens)).item())",
        says=".item()",
    ),
    Fault(
        "microbatches summed before one backward",
        "kept_alive",
        "the training loop",
        """
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with doctor.watch(model) as watching:
            for _ in range(3):
                total = 0.0
                for part in tokens.view(4, 1, 16):
                    out = model(part)
                    loss = F.cross_entropy(out.flatten(0, 1), part.flatten())
                    total = total + loss
                (total / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
        report = watching.report()
        """,
        "total = total + loss\n                (total / 4).backward()",
        "(loss / 4).backward()",
        says="(loss / 4).backward()",
    ),
    Fault(
        "a region around layers that are regions",
        "double_recompute",
        "stack",
        """
        class Stack(nn.Sequential):
            pass


        class Net(Model):
            def __init__(self):
                super().__init__()
                self.stack = Stack(*self.blocks)
                del self.blocks

            def hidden(self, tokens):
                return self.stack(self.embed(tokens))


        plan = Plan((Choice(("stack",)), *(Choice((f"stack.{i}",)) for i in range(3))))
        report = doctor.examine(Net(), (tokens,), plan=plan, loss=loss_of, hold_output=False)
        """,
        '(Choice(("stack",)), *(Choice((f"stack.{i}",)) for i in range(3)))',
        'tuple(Choice((f"stack.{i}",)) for i in range(3))',
        says="a plan without stack",
        line="a plan without `stack`",
        also=("replay_share",),
    ),
    Fault(
        "regions in the code around layers that are regions",
        "double_recompute",
        "Net.all",
        """
        class Net(Model):
            def all(self, x):
                for block in self.blocks:
                    x = recompute(block)(x)
                return x

            def hidden(self, tokens):
                return recompute(self.all)(self.embed(tokens))


        report = doctor.examine(Net(), (tokens,), loss=loss_of, hold_output=False)
        """,
        "recompute(self.all)(",
        "self.all(",
        says="the plain call instead of the region Net.all",
        line="the plain call",
    ),
    Fault(
        "one region of three that saves nothing",
        "saves_nothing",
        "blocks.1",
        """
        model = Model()
        model.blocks[1] = nn.Linear(32, 32)
        plan = Plan(tuple(Choice((f"blocks.{i}",), ("@product",)) for i in (0, 1, 2)))
        report = doctor.examine(model, (tokens,), plan=plan, loss=loss_of, hold_output=False)
        """,
        "(0, 1, 2)",
        "(0, 2)",
        says="a plan without blocks.1",
        line="a plan without `blocks.1`",
    ),
    Fault(
        "a copied CheckpointFunction around a linear layer",
        "saves_nothing",
        "blocks.*.up",
        COPIED + AROUND_UP,
        "again(block.up, block.norm(x))",
        "block.up(block.norm(x))",
        says="the plain call instead of the region blocks.*.up",
        line="the plain call",
    ),
    Fault(
        "a checkpoint like fairscale's around the last layer",
        "saves_nothing",
        "blocks.2",
        FAIRSCALE + AROUND_LAST.replace("again(block, x)", "again(block.forward, x)"),
        "again(block.forward, x) if block is self.blocks[2] else block(x)",
        "block(x)",
        says="the plain call instead of the region blocks.2",
        line="the plain call",
    ),
    Fault(
        "a checkpoint like DeepSpeed's around the last layer",
        "saves_nothing",
        "blocks.2",
        DEEPSPEED + AROUND_LAST,
        "again(block, x) if block is self.blocks[2] else block(x)",
        "block(x)",
        says="the plain call instead of the region blocks.2",
        line="the plain call",
    ),
    Fault(
        "a copied CheckpointFunction inside another",
        "double_recompute",
        "blocks.*.up",
        COPIED
        + """
        class Twice(Block):
            def forward(self, x):
                return x + self.down(F.gelu(again(self.up, self.norm(x))))


        class Net(Model):
            def run(self, block, x):
                return again(block, x)


        report = doctor.examine(Net(Twice), (tokens,), loss=loss_of, hold_output=False)
        """,
        "again(self.up, self.norm(x))",
        "self.up(self.norm(x))",
        says="one of the two",
        line="one of the two",
    ),
]

KEPT = {
    "an attribute": """
        class Keeps(Block):
            def forward(self, x):
                self.last = super().forward(x)
                return self.last

        model = Model(Keeps)
        """,
    "a result on ctx": """
        class Exp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.y = y = x.exp()
                return y

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.y

        class Grows(Block):
            def __init__(self):
                super().__init__()
                self.act = Act()

            def forward(self, x):
                return super().forward(self.act(x))

        class Act(nn.Module):
            def forward(self, x):
                return Exp.apply(x)

        model = Model(Grows)
        """,
}


LOOPS = {
    "accumulation": """
        for _ in range(2):
            for _ in range(2):
                loss_of(model(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "one backward through two views": """
        for _ in range(2):
            one, other = model(tokens), model(tokens.flip(1))
            scores = one.mean(1) @ other.mean(1).T
            (F.cross_entropy(scores, torch.arange(2)) + loss_of(one) + loss_of(other)).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "one backward through two passes of shared states": """
        table, model.embed = model.embed, nn.Identity()
        for _ in range(2):
            x = table(tokens).relu()
            (loss_of(model(x)) + loss_of(model(x.flip(2)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "two backwards through one forward": """
        for _ in range(3):
            out = model(tokens)
            loss_of(out).backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "the output is held": """
        for _ in range(3):
            out = model(tokens)
            loss = loss_of(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "validation without grad": """
        losses = []
        for _ in range(3):
            loss_of(model(tokens)).backward()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(model(tokens)))
        """,
}
