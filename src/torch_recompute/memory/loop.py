"""The training loop that a peak belongs to: the parts of a step that the model and its call do not show.

Two loops over one model and one batch differ in memory by gigabytes. In the loop most people write,

    for batch in loader:
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

the name `out` keeps the logits alive through backward and the optimizer's step, and through the next forward, too,
because Python runs `model(**batch)` before it gives the name to its result. A figure that is promised says which loop
it is of: the words of the loop go into a simulation, come back with what was seen, and are in the plan beside the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import errors
from ..errors.text import counted

_MEANS = {
    "hold_output": "whether the model's output is alive in backward, as in `out = model(batch); out.loss.backward()`",
    "set_to_none": "that of zero_grad(set_to_none=...): whether gradients are gone when forward begins",
}


@dataclass(frozen=True)
class Loop:
    """The loop around a model's call. The first three fields are asked for, the others were seen.

    Attributes:
        hold_output: Whether the model's output is alive until the next forward returns, as in `out = model(batch)`;
            else it is gone when backward begins, as in `loss_of(model(batch)).backward()`.
        accumulate: How many forwards and backwards there are in a step of the optimizer. With more than one, gradients
            are alive during forward.
        set_to_none: Whether gradients are gone when forward begins: that of `zero_grad(set_to_none=...)`.
        loss: Which loss was counted, in words.
        autocast: The dtype of `torch.autocast` around the forward, as "bfloat16"; "" for none.
        batch_bytes: The bytes of the call's tensors on the device.
        output_bytes: The bytes that the held output keeps alive once backward has ended.
        frees_gradients: Whether hooks of parameters free their gradients in backward, as an optimizer does that steps
            there.
        state_bytes: The bytes that the model keeps from one call to the next, as Transformer-XL does; 0 where they are
            less than a thousandth of the peak.
        training: Whether the model was in train mode.
        uncleared: How many parameters have gradients when forward begins, because the optimizer does not hold them.
        uncleared_bytes: The bytes of these gradients.
        bucket_bytes: The bytes of DDP's buckets, which are no views of gradients by default and hold them once more
            from `DDP(model)` on; 0 where DDP is not known of.
        more_bucket_bytes: Those that are not counted, since nothing was said of the ranks.
    """

    hold_output: bool = True
    accumulate: int = 1
    set_to_none: bool = True
    loss: str = ""
    autocast: str = ""
    batch_bytes: int = 0
    output_bytes: int = 0
    frees_gradients: bool = False
    state_bytes: int = 0
    training: bool = True
    uncleared: int = 0
    uncleared_bytes: int = 0
    bucket_bytes: int = 0
    more_bucket_bytes: int = 0

    def __post_init__(self) -> None:
        for name, means in _MEANS.items():
            value = getattr(self, name)
            if type(value) is not bool:
                raise errors.ArgumentError(f"{name}= is {means}; it is True or False, but got {errors.say(value)}")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise errors.ArgumentError(
                "accumulate= is how many forwards and backwards come before a step of the optimizer, an integer from "
                f"1, but got {errors.say(self.accumulate)}"
            )

    @property
    def words(self) -> dict[str, Any]:
        """The fields that are asked for, as the keyword arguments of `make_plan` and its like."""
        return {"hold_output": self.hold_output, "accumulate": self.accumulate, "set_to_none": self.set_to_none}

    @property
    def asked(self) -> Loop:
        """The same loop, without what was seen."""
        return Loop(**self.words)

    @property
    def not_counted(self) -> str:
        """The words for memory beside the tensors of the step."""
        size = errors.size(self.more_bucket_bytes)
        buckets = f", and under DDP its buckets ({size}; ranks=Ranks(dp=2, zero=0) counts them)"
        return NOT_COUNTED + buckets * (self.more_bucket_bytes > 0)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are alive when forward begins."""
        return self.accumulate > 1 or not self.set_to_none

    def __str__(self) -> str:
        held = (
            f"the output ({errors.size(self.output_bytes)}) until the next forward returns"
            if self.hold_output
            else "no output in backward (hold_output=False)"
        )
        parts = [
            f"the batch ({errors.size(self.batch_bytes)}), {held}",
            *(
                [f"what the model keeps from call to call ({errors.size(self.state_bytes)})"]
                if self.state_bytes
                else []
            ),
            *([f"DDP's buckets ({errors.size(self.bucket_bytes)})"] if self.bucket_bytes else []),
            f"loss: {self.loss or 'not known'}",
            f"{self.accumulate} backwards per step, gradients alive in forward"
            if self.accumulate > 1
            else "gradients freed in backward, one by one"
            if self.frees_gradients
            else f"gradients {'set to None' if self.set_to_none else 'zeroed and alive in forward'}",
            *(
                [
                    f"{counted(self.uncleared, 'parameter')} with gradients that optimizer.zero_grad() does not clear "
                    f"({errors.size(self.uncleared_bytes)}): freeze them, or call model.zero_grad()"
                ]
                if self.uncleared
                else []
            ),
            f"autocast {self.autocast}" if self.autocast else "no autocast",
            *([] if self.training else ["in eval mode (in train mode, dropout keeps more: model.train())"]),
        ]
        return "; ".join(parts)


NOT_COUNTED = "memory that the allocator holds and does not use, the device's context, the next batch of a loader"
"""Memory that no peak of a step counts, in words."""
COMMON = Loop()
"""The loop that most people write."""
