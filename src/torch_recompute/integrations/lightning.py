"""Lightning: a callback that applies a plan before the strategy wraps the model.

    Trainer(callbacks=[Recompute("full")])
    Trainer(callbacks=[Recompute(budget="24GiB", loss=lambda out: out.loss)])    # planned with the first batch

It works with every strategy. `setup` is the hook that runs before the strategy takes the model. Layers that are made in
`configure_model`, as for FSDP2, are not there yet at that time: call `apply(self.model, "full")` in that method, before
`fully_shard`. With Fabric, call `apply(model, "full")` before `fabric.setup(model)`.

Without Lightning, which may be either of its packages, `Recompute` is a plain class with the same methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ..memory.loop import Loop
from ..planning import plan_first_call
from ..simulation.training_step import Loss
from .policies import Applied, Policy, StepFigures, apply, check_loop, held_for, one_of

if TYPE_CHECKING:

    class Callback:
        """Lightning's base class, of either package."""
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback
        except ImportError:
            Callback = object

__all__ = ["Applied", "Recompute", "apply", "training_loop"]


def training_loop(trainer: Any) -> dict[str, Any]:
    """Returns the options of `make_plan` for a Trainer under automatic optimization.

        plan = make_plan(model, (batch,), loss=..., budget="24GiB", **training_loop(trainer))

    `training_step` has returned when backward begins, so the output is gone. `zero_grad` is called between forward and
    backward, so gradients are alive in forward.

    Args:
        trainer: The Trainer.
    """
    return Loop(hold_output=False, accumulate=getattr(trainer, "accumulate_grad_batches", 1), set_to_none=False).words


class Recompute(Callback):
    """Applies a plan when fitting begins, and logs what it drops and costs.

    After two batches that are watched, the first two and with `every` two more now and then, `recompute_saved_bytes`
    and `recompute_replay_share` are logged, as by the callback for Hugging Face's Trainer.

    Attributes:
        handle: The plan in the model, once it is there.
        figures: The newest figures.

    Args:
        policy: A policy as for `apply`; module paths in it are those in the LightningModule.
        budget: Instead of a policy, the most bytes that a step may take, as for `auto`: the plan is then made in the
            Trainer, when the module is first called: the one that `training_step` calls. That is the only child with
            parameters, if there is one, or the LightningModule itself. The optimizer, accumulation and autocast are the
            Trainer's, and the first steps are compared with the plan, as `auto` does.
        loss: With a budget, how the loss is computed of what that module returns; by default the loss in it.
        remove: Whether to take the plan out when fitting ends.
        every: The number of batches from one watching of two to the next; None for the first two only.

    Raises:
        ArgumentError: `every` is not a number of at least 3; or there are both a policy and a budget, or neither.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        budget: int | float | str | None = None,
        loss: Loss = None,
        remove: bool = False,
        every: int | None = None,
    ) -> None:
        super().__init__()
        self.handle: Applied | None = None
        self.figures: dict[str, float] = {}
        self._every, self._taking = every, StepFigures(every)
        self._policy = policy
        self._budget, self._loss = one_of("Recompute", policy, budget, must=True), loss
        self._remove = remove

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Applies the plan, before the strategy takes the model."""
        if stage != "fit":
            return
        self.handle, self._taking = held_for(pl_module, self.handle), StepFigures(self._every)
        if self.handle is None and self._policy is not None:
            self.handle = apply(pl_module, self._policy)
            check_loop(self.handle.plan, training_loop(trainer))

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begins to look for the first call, with a budget."""
        if self._budget is None or self.handle is not None:
            return
        children = [child for child in pl_module.children() if next(child.parameters(), None) is not None]
        model = children[0] if len(children) == 1 else pl_module
        loop, optimizer = Loop(**training_loop(trainer)), trainer.optimizers[0] if trainer.optimizers else None
        self.handle = plan_first_call(model, self._budget, loss=self._loss, optimizer=optimizer, loop=loop)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins to watch the batch."""
        if self.handle is not None:
            self._taking.begin(self.handle)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends that, and logs the figures of batches that were watched."""
        self._taking.end()
        figures = self._taking.taken()
        if figures:
            self.figures = figures
            pl_module.log_dict(figures)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Removes the plan, if `remove` is set."""
        self._taking.close()
        if stage == "fit" and self._remove and self.handle is not None:
            self.handle.remove()
            self.handle = None
