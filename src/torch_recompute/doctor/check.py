"""The parent of all checks, and what a check may look at.

A check is one kind of finding. It says which evidence it needs; where that cannot be had (a model on meta cannot be
run, a plain model has no regions to audit) it is not asked, and the report says so. It reads evidence only: what is
expensive is gathered once, for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..auditing import Audit
from ..plan.plan import Plan
from ..simulation import Simulation
from .finding import Finding
from .observing import Seen
from .regions import Account, Accounts, starred
from .words import mib


@dataclass(frozen=True)
class Simulated:
    """Steps on fake tensors.

    Attributes:
        step: The step as it is to be: with the plan, and with the regions in the model's own code.
        plain: The step without the plan.
        regions: What each region of `step` drops and runs again.
        gradient_bytes: Of the gradients of all trainable parameters.
        planned: The step with a part of the plan; None where there is no plan to take anything from.
        released: `step` in a loop that holds no output.
    """

    step: Simulation
    plain: Simulation
    regions: Accounts
    gradient_bytes: int = 0
    planned: Callable[[Plan], Simulation] | None = None
    released: Callable[[], Simulation] | None = None

    @property
    def accounts(self) -> list[Account]:
        """Those of the regions that were called."""
        return [account for account in self.regions.by_name.values() if account.calls]

    @property
    def outermost(self) -> list[Account]:
        """Those of the regions that lie in no other, and with which all that is dropped is booked."""
        return [account for account in self.accounts if not account.inside]


@dataclass(frozen=True)
class Evidence:
    """What is known of a model.

    Attributes:
        name: The name of the model's class.
        plan: The plan that is, or is to be, in the model.
        budget: Bytes that the step may take.
        simulated: Simulated steps.
        audit: Each region run twice.
        seen: Real steps, observed.
        best: The plan that the planner makes for a number of bytes.
        missing: Why there is none of the above, by its name.
    """

    name: str = ""
    plan: Plan | None = None
    budget: int | None = None
    simulated: Simulated | None = None
    audit: Audit | None = None
    seen: Seen | None = None
    best: Callable[[int], Plan] | None = None
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def without(self, name: str) -> Simulation | None:
        """The step without the plan's regions of a name (numbers as `*`); None where they are not the plan's."""
        if self.plan is None or self.simulated is None or self.simulated.planned is None:
            return None
        rest = tuple(one for one in self.plan.choices if starred(one.paths[0]) != name)
        return None if len(rest) == len(self.plan.choices) else self.simulated.planned(Plan(rest))

    def compared(self, name: str) -> str:
        """How the plan's regions of a name were made sure of: what is kept with them and without; "" for others."""
        plain = self.without(name)
        if plain is None or self.simulated is None:
            return ""
        kept = self.simulated.step.saved_bytes
        return f"; a step keeps {mib(kept)} for backward with it and {mib(plain.saved_bytes)} without"


class Check(ABC):
    """Looks for one kind of thing.

    Attributes:
        kind: The word for it.
        needs: The fields of `Evidence` of which at least one must be there.
    """

    kind: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def look(self, evidence: Evidence) -> Iterator[Finding]:
        """What there is to find."""

    def why_not(self, evidence: Evidence) -> str:
        """Why this cannot be looked for; "" where it can."""
        if any(getattr(evidence, need) is not None for need in self.needs):
            return ""
        return "; ".join(dict.fromkeys(evidence.missing.get(need, f"there is no {need}") for need in self.needs))

    def found(self, where: str, seen: str, confirmed: str, write: str, **figures: float) -> Finding:
        """A finding of this kind."""
        return Finding(self.kind, where, seen, confirmed, write, figures)
