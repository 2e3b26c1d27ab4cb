"""Parameters that are not trained, because a reentrant checkpoint is given inputs that need no gradient.

Such a checkpoint makes a node in the graph only if one of its *inputs* needs a gradient. Behind a frozen embedding, as
with LoRA, or on the first stage of a pipeline none does: the parameters in it get no gradient, and training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..check import Check, Evidence
from ..finding import Finding
from ..regions import starred


class FrozenInput(Check):
    """Counts the gradients of real steps."""

    kind = "frozen_input"
    needs = ("seen",)

    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """Trainable parameters without a gradient whose modules ran without grad, inside a model that ran with it."""
        seen = evidence.seen
        assert seen is not None
        if not seen.backwards and seen.trained_plainly is None:
            return  # no gradient has been due yet
        groups: dict[str, list[str]] = {}
        for name in seen.untrained:
            if seen.trained_plainly is None or name in seen.trained_plainly:
                groups.setdefault(starred(seen.owners[name]), []).append(name)
        for where, names in groups.items():
            confirmed = f"{seen.steps} real step{'s' if seen.steps > 1 else ''}, in which gradients were counted"
            if seen.trained_plainly is not None:
                confirmed += "; with plain calls in the place of torch's reentrant checkpoints they are handed one"
            yield self.found(
                where,
                f"{len(names)} trainable parameter{'' if len(names) == 1 else 's'} ({names[0]}) got no gradient: the "
                "module ran without grad, as inside a reentrant checkpoint none of whose inputs needs a gradient.",
                f"{confirmed}.",
                "torch_recompute.checkpoint in the place of the reentrant one, or use_reentrant=False.",
                parameters=len(names),
            )
