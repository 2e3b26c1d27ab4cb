"""One trial: a model is built, put under its plan and trained for some steps, in a process that does nothing else.

Invariants. Everything that is random depends on the number of the step and on the rank alone, so the losses of two
settings differ only by what the settings do. The timed steps come first; bytes are counted on a CPU in one more step,
whose loss does not count, because watching changes the order of sums. FLOPs are those of PyTorch's formulas in a
simulation of the step with its plan, which knows what is a replay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ... import Plan, apply, make_plan, measure, simulate
from ..._models import OPTIMIZERS
from ...errors import ArgumentError, BudgetError, MismatchError
from ...simulation.step import any_loss
from . import capacity
from .machine import name_of
from .meeting import meet
from .models import SEED, Ready, ready
from .record import DONE, FAILED, MISMATCH, NO_PLAN, OUT, REFUSED, Record
from .settings import Setting, Workload


@dataclass(frozen=True)
class Task:
    """What a process is asked to do.

    Attributes:
        workload: What to train.
        setting: How; one with a budget and no plan is planned, and not trained.
        steps: Timed steps.
        warmup: Steps before these.
        capacity: Bytes that may be taken.
        count: Whether to count FLOPs.
        rank: This process's.
        ranks: How many there are.
        local_rank: Which of its machine's devices it has.
        store: Where the ranks find each other, (host, port, prefix); None for one alone.
    """

    workload: Workload
    setting: Setting
    steps: int
    warmup: int
    capacity: int | None = None
    count: bool = True
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    store: tuple[str, int, str] | None = None

    @staticmethod
    def of(data: dict[str, Any]) -> Task:
        """From what `dataclasses.asdict` made."""
        data["workload"], data["setting"] = Workload(**data["workload"]), Setting(**data["setting"])
        data["store"] = data["store"] and tuple(data["store"])
        return Task(**data)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        kind = self.workload.device
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    @property
    def forks(self) -> bool:
        """Whether its process can be a fork of another, which then goes on; CUDA does not survive that."""
        return self.workload.device == "cpu" and hasattr(os, "fork")


def carried_out(task: Task) -> Record:
    """What came of a task; an error that says something of the setting is part of that."""
    trial = _Trial(task)
    try:
        return trial.planned() if task.setting.budget and not task.setting.plan else trial.run()
    except BudgetError as error:
        return Record(NO_PLAN, str(error))
    except ArgumentError as error:
        return Record(REFUSED, str(error))
    except (RuntimeError, MemoryError) as error:
        out = capacity.is_out_of_memory(error)
        status = OUT if out else MISMATCH if isinstance(error, MismatchError) else FAILED
        said = str(error) if status == MISMATCH else first_line(error)
        detail = f"{trial.where}: {type(error).__name__}: {said}"
        return replace(trial.record, status=status, detail=detail, reserved_bytes=trial.reserved())
    finally:
        trial.unlimit()


class _Trial:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._device = task.device
        self._optimizer: torch.optim.Optimizer | None = None
        self._limited = False
        self.where = "building the model"
        self.reserved: Callable[[], int | None] = lambda: None
        self.record = Record(DONE, device=name_of(self._device))

    def planned(self) -> Record:
        """The plan that a budget leads to."""
        made = self._built()
        optimizer = OPTIMIZERS[self._task.workload.optimizer]
        assert self._task.setting.budget is not None
        step: dict[str, Any] = {"loss": any_loss, "optimizer": optimizer, "hold_output": False}
        plan = make_plan(made.model, made.args, made.kwargs, budget=self._task.setting.budget, **step)
        return replace(self.record, plan=plan.to_json())

    def run(self) -> Record:
        """The steps, and what they show."""
        task = self._task
        _wake(self._device)
        made = self._built()
        self.reserved = capacity.Reserved(self._device, made.nbytes).bytes
        plan = task.setting.on(made.model)
        handle = apply(made.model, plan)
        self.record = replace(self.record, regions=len(plan), predicted_peak_bytes=plan.predicted_peak_bytes)
        if task.capacity is not None:
            capacity.limit(task.capacity, self._device, made.nbytes)
            self._limited = True
        self._train(made)
        if dist.is_initialized():
            dist.destroy_process_group()  # not after an error: it may wait for ranks that wait for this one
        self.unlimit()
        handle.remove()
        if task.count:
            self._count(made, plan)
        return self.record

    def unlimit(self) -> None:
        """Give the process back what memory there is."""
        if self._limited:
            capacity.unlimit(self._device)
            self._limited = False

    def _built(self) -> Ready:
        task = self._task
        if task.device.type == "cuda":
            torch.cuda.set_device(task.device)
        made = ready(task.workload, task.rank, task.device)
        unit, items = made.items
        parameters = sum(parameter.numel() for parameter in made.model.parameters())
        self.record = replace(self.record, unit=unit, items=items, parameters=parameters)
        return made

    def _train(self, made: Ready) -> None:
        task = self._task
        make = OPTIMIZERS[task.workload.optimizer]
        self._optimizer = None if make is None else make(made.model.parameters())
        trained = self._joined(made.model)
        losses: list[str] = []
        seconds: list[float] = []
        for number in range(task.warmup + task.steps):
            self.where = f"step {number + 1} of {task.warmup + task.steps}"
            if number == task.warmup and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            start = self._clock()
            loss = self._step(trained, made, number)
            taken = self._clock() - start
            losses.append(loss.hex())
            if number >= task.warmup:
                seconds.append(taken)
        self.record = replace(self.record, losses=losses, seconds=seconds, reserved_bytes=self.reserved())
        self.where = "the step in which bytes are counted"
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
        else:
            with measure(made.model, self._optimizer).track(*made.tensors) as m:
                self._step(trained, made, task.warmup + task.steps)
            allocated = m.peak_bytes
        self.record = replace(self.record, allocated_bytes=allocated)

    def _joined(self, model: nn.Module) -> nn.Module:
        """The model, averaging its gradients with the other ranks'."""
        task = self._task
        if task.store is None:
            return model
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=meet(*task.store), rank=task.rank, world_size=task.ranks)
        return DistributedDataParallel(model)

    def _step(self, model: nn.Module, made: Ready, number: int) -> float:
        """A training step; its random numbers depend on its number and the rank."""
        torch.manual_seed(SEED + number * self._task.ranks + self._task.rank)
        loss = any_loss(model(*made.args, **made.kwargs))
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        made.model.zero_grad()
        return loss.detach().float().item()

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _count(self, made: Ready, plan: Plan) -> None:
        """The FLOPs of the step, those of replays apart."""
        made.model.zero_grad()
        try:
            flops = dict(simulate(made.model, made.args, made.kwargs, plan=plan, loss=any_loss).flops)
            replayed = flops.pop("replay")
            self.record = replace(self.record, flops=sum(flops.values()), replay_flops=replayed)
        except Exception as error:  # a model may do on fakes what nobody has foreseen, and the trial is worth more
            self.record = replace(self.record, uncounted=first_line(error))


def _wake(device: torch.device) -> None:
    """Start the threads that the first operation of a process starts, before memory is limited."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()


def first_line(error: BaseException) -> str:
    """What an error says first, or what it is."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
