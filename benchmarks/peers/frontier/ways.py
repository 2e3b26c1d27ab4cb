"""The peers of `peers frontier`: every way to run a step that is not a plan of ours for a budget, at every setting.

Each is what its user would write. `prepare` changes a copy of the model that shares its parameters with all others, so
that all ways can take turns.

Torch's selective checkpointing has the save list that torchtitan uses: attention, and every second matrix product.
Two operations are added so that it means on this model and device what it means there: `addmm`, which is a product with
a bias, and the attention that a CPU runs.

Torch's planner has a file of its own (`sac_ilp.py`), and so has torch_remat (`remat.py`). A peer whose package is not
installed raises when it is prepared, and is then named among those left out.

`torch.compile` takes one graph for the whole model, and one per layer, which is its strong form. Its backend is
"aot_eager", which partitions as the default backend does and then runs PyTorch's own kernels, so that what is compared
is the choice of what to keep. Compiled code is cached by the code that it was made from, whatever the setting; each way
therefore compiles a copy of that code.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_recompute import Plan, RecomputeConfig, apply
from torch_recompute._torch.compiler import activation_memory_budget

from . import remat, sac_ilp
from .config import PRICES, Config
from .models import MODELS, build, skeleton, stacks

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""Settings of `torch.compile`."""
PLAIN = "plain"
COMPILED, COMPILED_WHOLE = "torch.compile", "torch.compile whole"


def _as_it_is(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        family: Whose it is.
        setting: Which of the family's.
        prepare: Turns a copy of the model into one that runs in this way.
        first: What the first step must run in, where something is compiled; None if it is not available.
    """

    family: str
    setting: str = ""
    prepare: Callable[[nn.Module], None] = _as_it_is
    first: Callable[[], Any] | None = None

    @property
    def title(self) -> str:
        """Both in words."""
        return f"{self.family} {self.setting}".strip()


def peers(config: Config) -> list[Way]:
    """Every peer at every setting, for one model; the plain step comes first."""
    name, layers = config.model, config.layers
    model, most = MODELS[name], max(map(len, skeleton(name, layers)))
    size = name, layers, config.width, config.tokens, config.batch, config.dropout
    statistics = sac_ilp.Statistics(partial(build, *size), PRICES[config.price])
    return [
        Way(PLAIN),
        Way("torch checkpoint", "every layer", checkpointed),
        *(_ours_by_hand("uniform", k) for k in range(1, most + 1)),
        *(_ours_by_hand("block", k) for k in range(1, most + 1)),
        *(
            Way("selective", " ".join(labels), partial(_configured, recompute_granularity="selective", labels=labels))
            for labels in model.labels
        ),
        Way("torch selective", "torchtitan's list", selective),
        *(
            Way(
                "torch_remat",
                " ".join(parts) + " kept" if parts else "every layer",
                partial(remat.prepare, parts=parts),
            )
            for parts in remat.settings(name, layers)
        ),
        *(
            Way("sac_ilp", f"{share:g}", partial(sac_ilp.prepare, statistics=statistics, share=share))
            for share in sac_ilp.SHARES
        ),
        *(
            Way(family, f"{share:g}", prepare, partial(_budget, share))
            for family, prepare in ((COMPILED, _compiled), (COMPILED_WHOLE, compiled_whole))
            for share in SHARES
            if activation_memory_budget(share) is not None
        ),
    ]


def planned(family: str, setting: str, plan: Plan) -> Way:
    """A plan as a way."""
    return Way(family, setting, partial(_planned, plan=plan))


def _planned(model: nn.Module, plan: Plan) -> None:
    apply(model, plan)


def _ours_by_hand(method: str, number: int) -> Way:
    settings: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": method}
    return Way(method, str(number), partial(_configured, **settings, recompute_num_layers=number))


def _configured(model: nn.Module, labels: tuple[str, ...] | None = None, **settings: Any) -> None:
    apply(model, RecomputeConfig(recompute_modules=labels, **settings).plan(model))


def _layers(model: nn.Module) -> list[Any]:
    return [layer for stack in stacks(model) for layer in stack]


def checkpointed(model: nn.Module, every: int = 1) -> None:
    """Checkpoints every layer, or every so many-th."""
    for layer in _layers(model)[every - 1 :: every]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}


def _contexts() -> Any:
    seen: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _PRODUCTS:
            seen[context.is_recompute] += 1
            save = seen[context.is_recompute] % 2 == 1
        else:
            save = func in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def selective(model: nn.Module) -> None:
    """Checkpoints every layer, saving what torchtitan's list says."""
    for layer in _layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_contexts)


def _budget(share: float) -> Any:
    return activation_memory_budget(share)


def _compiled(model: nn.Module) -> None:
    for stack in stacks(model):
        for kind in dict.fromkeys(map(type, stack)):
            own = _copied(kind.forward)
            for layer in stack:
                if type(layer) is kind:
                    layer.forward = torch.compile(types.MethodType(own, layer), backend="aot_eager")


def compiled_whole(model: nn.Module, backend: str = "aot_eager") -> None:
    """Compiles the whole model as one graph."""
    whole: Any = model
    whole.forward = torch.compile(types.MethodType(_copied(type(model).forward), model), backend=backend)


def _copied(function: Any) -> Any:
    """A function with code of its own."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
