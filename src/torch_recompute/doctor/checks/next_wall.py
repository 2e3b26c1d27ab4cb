"""What no recomputation frees and is the next wall: the optimizer's state, a loss over a large vocabulary, its logits.

Recomputation frees activations. Once they are few, the peak lies in the optimizer's step, or parameters, gradients and
optimizer state fill the budget by themselves; or it lies in the loss, in tensors as wide as the vocabulary. One of
these the training loop may hold without need: the logits in `out`, when backward needs the loss alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..words import mib

FILLED = 0.8  # of the budget
SAVED = 0.1  # of the plain peak: regions that lower it by less have met something else
OF_LOSS = 0.4  # of the peak: tensors that the loss made
HELD = 0.02  # of the peak: what it falls by if the loop lets go of the output


class OptimizerState(Check):
    """Looks at what lies in memory for the whole step, and at where the peak is."""

    kind = "optimizer_state"
    needs = ("simulated",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, where persistent bytes fill the budget or the peak is in the optimizer's step."""
        assert evidence.simulated is not None
        step, budget = evidence.simulated.step, evidence.budget
        kept = {name: step.live_by_category[name] for name in ("parameters", "buffers", "optimizer")}
        gradients = evidence.simulated.gradient_bytes
        lasting = sum(kept.values()) + gradients
        in_step = step.peak.phase == "optimizer" and bool(evidence.simulated.accounts)
        fills = budget is not None and lasting > FILLED * budget
        if not fills and not (in_step and (budget is None or step.peak_bytes > budget)):
            return
        of = f" of a budget of {mib(budget)}" if budget is not None else f" of a peak of {mib(step.peak_bytes)}"
        where = " The peak is in the optimizer's step, where no activation is alive." if in_step else ""
        yield self.found(
            evidence.name,
            f"parameters and buffers {mib(kept['parameters'] + kept['buffers'])}, gradients {mib(gradients)}, "
            f"optimizer state {mib(kept['optimizer'])}: {mib(lasting)}{of}. No recomputation frees any of it.{where}",
            "one simulated step, with every storage counted by what it is for.",
            "fully_shard(model), an optimizer with less state (8-bit, or factored as Adafactor), or gradients that are "
            "released in backward (register_post_accumulate_grad_hook).",
            lasting_bytes=lasting,
            optimizer_bytes=kept["optimizer"],
            peak_bytes=step.peak_bytes,
        )


class LossHead(Check):
    """Looks at tensors as wide as the logits at the peak."""

    kind = "loss_head"
    needs = ("simulated",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, where regions lower the peak by little and the loss is why, or the budget is exceeded."""
        assert evidence.simulated is not None
        step, plain = evidence.simulated.step, evidence.simulated.plain
        over = evidence.budget is not None and step.peak_bytes > evidence.budget
        little = bool(evidence.plan) and step.peak_bytes > (1 - SAVED) * plain.peak_bytes
        loss = step.peak_by_module.get("", 0)  # what no module made
        if not step.advice or loss < OF_LOSS * step.peak_bytes or not (over or little):
            return
        yield self.found(
            evidence.name,
            f"the peak is {mib(step.peak_bytes)}, and {mib(plain.peak_bytes)} without the plan. "
            + step.advice.partition(" Compute ")[0],
            "two simulated steps, with the plan and without, and the tensors alive at the peak.",
            "recompute(head_and_loss, tiles=8)(hidden, labels), where head_and_loss returns a loss per token.",
            peak_bytes=step.peak_bytes,
            plain_peak_bytes=plain.peak_bytes,
        )


class OutputHeld(Check):
    """Looks at what a step takes in a loop that lets go of the model's output before backward."""

    kind = "output_held"
    needs = ("simulated",)

    def why_not(self, evidence: Evidence) -> str:
        """As of any check; and the loop must hold an output."""
        held = evidence.simulated is None or evidence.simulated.step.loop.hold_output
        return super().why_not(evidence) or ("" if held else "the training loop holds no output (hold_output=False)")

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, where the peak falls by as much as is worth a line."""
        assert evidence.simulated is not None
        step = evidence.simulated.step
        if evidence.simulated.released is None or step.loop.output_bytes < HELD * step.peak_bytes:
            return
        released = evidence.simulated.released()
        if step.peak_bytes - released.peak_bytes < HELD * step.peak_bytes:
            return
        yield self.found(
            "the training loop",
            f"`out` of `out = model(...)` keeps {mib(step.loop.output_bytes)} alive through backward, the optimizer's "
            f"step and the next forward, where the loss alone is needed: the peak is {mib(step.peak_bytes)}, and "
            f"{mib(released.peak_bytes)} if the output is let go of.",
            "two simulated steps, with the output held and without.",
            "loss = model(**batch).loss; loss.backward(), or `del out` before backward; and plan with "
            "hold_output=False. The Trainers of Hugging Face and Lightning let go of it by themselves: say "
            "hold_output=False there, too.",
            held_bytes=step.loop.output_bytes,
            peak_bytes=step.peak_bytes,
            released_peak_bytes=released.peak_bytes,
        )
