"""The comparison itself: rounds in which the control and every setting take turns, each in a process of its own.

A setting with a budget is planned first, once, in a process too, so that all its rounds run the same plan. A setting
that ended in any way but well is not run again: memory that is short in one round is short in the next. FLOPs are
counted in the first round only.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ...errors import ArgumentError
from .golden import Golden
from .journal import Journal
from .launching import Launcher
from .ranks import Ranks
from .record import DONE, REFUSED, Record, worst
from .result import Result, judged
from .settings import Config, Setting
from .trial import Task

PLANNING = -1
"""The number of the round in which plans are made."""


def ticks(config: Config) -> int:
    """How often `run` reports progress."""
    return len(config.settings) * config.rounds + sum(_has_budget(setting) for setting in config.settings)


def run(
    config: Config,
    *,
    journal: Journal,
    ranks: Ranks,
    golden: Golden | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Compare all settings with the control.

    Args:
        config: What is asked for.
        journal: What has been run already.
        ranks: Those that run it together.
        golden: Figures to compare with.
        progress: Called after each of the `ticks(config)` pieces of work, with a word on it.

    Returns:
        What was seen.

    Raises:
        ArgumentError: The workload cannot be run at all, or the golden figures are of something else.
    """
    with Launcher() as launcher:
        work = _Work(config, journal, ranks, launcher, progress or _quiet)
        trials: dict[str, list[list[Record]]] = {setting.name: [] for setting in config.settings}
        settings = list(config.settings)
        for number in range(config.rounds):
            for place, setting in enumerate(settings):
                rounds = trials[setting.name]
                if number == 0 and _has_budget(setting):
                    settings[place] = setting = work.planned(setting, rounds)
                if rounds and worst(rounds[-1]).status != DONE:
                    work.tick(f"{setting.name}: {worst(rounds[-1]).status}, not run again")
                    continue
                records = work.records(setting, number)
                rounds.append(records)
                if setting is settings[0] and worst(records).status == REFUSED:
                    raise ArgumentError(worst(records).detail)
                if golden is not None and worst(records).status == DONE:
                    golden.check_machine(records[0].device, records[0].parameters)
    return judged(config, trials, golden, work.taken)


class _Work:
    """Trials, run or known already."""

    def __init__(
        self, config: Config, journal: Journal, ranks: Ranks, launcher: Launcher, tick: Callable[[str], None]
    ) -> None:
        self._config, self._journal, self._ranks, self._launcher = config, journal, ranks, launcher
        self.tick = tick
        self.taken = 0

    def planned(self, setting: Setting, rounds: list[list[Record]]) -> Setting:
        """The setting, with a plan where it has a budget; where none fits, that is its first and last round."""
        if not _has_budget(setting):
            return setting
        records = self.records(setting, PLANNING)
        if worst(records).status != DONE:
            rounds.append(records)
            return setting
        plan = records[0].plan
        assert plan is not None
        return setting.planned(plan)

    def records(self, setting: Setting, number: int) -> list[Record]:
        """What the ranks say of a trial."""
        config = self._config
        key = config.key(setting, self._ranks.count)
        known = self._known(key, number)
        where = f"{setting.name}: " + ("planning" if number == PLANNING else f"round {number + 1} of {config.rounds}")
        if known is not None:
            self.taken += 1
            self.tick(f"{where}: known from the results")
            return known
        task = Task(config.workload, setting, config.steps, config.warmup, config.capacity, count=number == 0)
        records = self._ranks.run(self._launcher, task)
        self._journal.add(key, setting.name, number, records)
        self.tick(f"{where}: {worst(records).status}")
        return records

    def _known(self, key: str, number: int) -> list[Record] | None:
        """What rank 0 has in its file."""

        def said() -> str:
            found = self._journal.get(key, number)
            return json.dumps(found and [record.as_data() for record in found])

        data = json.loads(self._ranks.shared(said))
        return data and [Record(**record) for record in data]


def _has_budget(setting: Setting) -> bool:
    return setting.budget is not None


def _quiet(_: str) -> None:
    pass
