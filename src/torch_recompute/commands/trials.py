"""Trials of `torch-recompute bench run`: each a process that builds a model, applies a plan, and trains for some steps.

Everything that is random depends on the number of the step and on the rank alone, so the losses of two settings differ
only by what the settings do. The timed steps come first; bytes are counted on a CPU in one more step, whose loss does
not count, because watching changes the order of sums. FLOPs are those of PyTorch's formulas in a simulation of the step
with its plan, which knows what is a replay.

Memory can be limited, so that a CPU plays a device of some capacity. On CUDA the allocator is told a share of the
device. On a CPU Linux limits the private writable memory of a process (RLIMIT_DATA), and an allocation beyond it fails
as on a device. Memory that libraries took before the step is outside the limit. Rejected: RLIMIT_AS, which counts
what is only mapped: code, and arenas that nothing is written to.

A trial that runs out of memory may raise an error, be killed by the system, or die of a signal in code that cannot
raise; the process that started it (`Launcher`) lives on, and the trial has a `Record`. `python -m
torch_recompute.commands.trials` is the process that trials come from: it has imported everything and done nothing. On a
CPU a trial is a fork of it, without the seconds that imports take; CUDA does not survive a fork, so there it does the
trial itself, and another is started.

The processes that torchrun started (`Together`) train nothing, because a trial that dies must not end the job. They
meet in a store: each starts its rank's process, tells the others when that has ended badly, so that they give theirs
up, and reads what all of them say. So every rank has all records and comes to the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import Plan, RecomputeConfig, apply, errors, make_plan, measure, simulate
from .._torch import tree_flatten, tree_leaves, tree_unflatten
from ..errors import ArgumentError, BudgetError, MismatchError
from ..simulation.step import any_loss
from .models import DTYPES, OPTIMIZERS, batch_for, call_of, load, random_batch
from .small_models import MODELS, VOCABULARY

if TYPE_CHECKING:
    from typing_extensions import Self

PACKAGES = Path(__file__).resolve().parents[2]
LOOK = 0.05  # seconds
TAIL = 2000  # characters of what a process wrote last
PATIENCE = timedelta(days=2)
STATUS = Path("/proc/self/status")
MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
SMALL: Mapping[str, str] = MappingProxyType({"gpt-tiny": "gpt", "llama-tiny": "llama"})
"""Four layers of width 128."""
LAYERS, WIDTH, TOKENS, BATCH = 4, 128, 128, 4
SEED = 0
DEVICES = ("cpu", "cuda")

DONE = "done"
OUT = "OOM"
REFUSED = "REFUSED"
NO_PLAN = "NO PLAN"
FAILED = "FAILED"
MISMATCH = "MISMATCH"
STOPPED = "stopped"
"""On this rank nothing went wrong, but on another."""
WORST = (REFUSED, NO_PLAN, OUT, FAILED, MISMATCH, STOPPED, DONE)


@dataclass(frozen=True)
class Workload:
    """What is trained, in the words of the command line; figures of two runs are compared only where it is the same."""

    model: str
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    device: str = "cpu"

    def check(self) -> None:
        """Refuses what cannot run, and says what would."""
        for option, value in (("--batch", self.batch), ("--sequence", self.sequence)):
            if value is not None:
                whole_number(option, value)
        for option, value, known in (
            ("--dtype", self.dtype, (*DTYPES, None)),
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("--device", self.device, DEVICES),
        ):
            if value not in known:
                words = [word for word in known if word is not None]
                raise ArgumentError(
                    f"{option} is {value}; expected one of {', '.join(words)}. Write for example {option} {words[0]}"
                )


@dataclass(frozen=True)
class Setting:
    """What is recomputed: fields of `RecomputeConfig`, a budget to plan for, or a plan as JSON; by default nothing."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    budget: str | None = None
    plan: str | None = None

    @property
    def key(self) -> str:
        """A hash, the same for settings that say the same, whatever they are called."""
        plan = None if self.plan is None else Plan.from_json(self.plan).digest()
        return hashed([dict(self.fields), self.budget, plan])

    @property
    def words(self) -> str:
        """What it says, on one line."""
        if self.plan is not None:
            return "a plan"
        if self.budget is not None:
            return f"budget {self.budget}"
        return ", ".join(f"{name}={value}" for name, value in self.fields.items()) or "nothing recomputed"

    def on(self, model: nn.Module) -> Plan:
        """The plan that is applied to a model; one with a budget has been given its plan before."""
        if self.plan is not None:
            return Plan.from_json(self.plan)
        return RecomputeConfig(**dict(self.fields)).plan(model)


def whole_number(option: str, value: object, least: int = 1) -> None:
    """Refuses what is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(errors.not_a_size(option, value, least))


def hashed(data: object) -> str:
    """A short name for plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """A trial on one rank, as plain data that goes through files and between ranks.

    Attributes:
        status: How it ended: one of `WORST`.
        detail: Where and why, unless it is done.
        losses: Of all steps, as exact hexadecimals.
        seconds: Of the timed steps.
        allocated_bytes: The most alive in a step.
        reserved_bytes: The most that the process has taken for it from the system or the device.
        flops: Of a step without replays; None where it was not, or could not be, counted.
        replay_flops: Of the replays; likewise.
        uncounted: Why there are no FLOPs, if that could be asked.
        items: How many tokens or samples (`unit`) a step has.
        unit: Which of both.
        device: The device's name.
        parameters: How many the model has.
        regions: How many the plan has.
        predicted_peak_bytes: What the plan promises, where it was made for a budget.
        plan: The plan as JSON, where it was to be made.
    """

    status: str
    detail: str = ""
    losses: Sequence[str] = ()
    seconds: Sequence[float] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    flops: int | None = None
    replay_flops: int | None = None
    uncounted: str = ""
    items: int = 0
    unit: str = "tokens"
    device: str = ""
    parameters: int = 0
    regions: int = 0
    predicted_peak_bytes: int | None = None
    plan: str | None = None


def worst(records: Sequence[Record]) -> Record:
    """The one that says what became of the trial."""
    return min(records, key=lambda record: WORST.index(record.status))


def name_of_cpu() -> str:
    """The processor's name, and how many threads there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = found or platform.processor() or platform.machine()
    return f"{name} (threads: {torch.get_num_threads()})"


def memory_status(field: str) -> int | None:
    """Bytes of a field of the system's own account of this process; None where it keeps none."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else int(found[1]) * 1024


def check_capacity(capacity: int | None, device: str) -> None:
    """Refuses a capacity that could not be kept to.

    Raises:
        ArgumentError: On a CPU the system does not limit this.
    """
    if capacity is not None and device == "cpu" and (sys.platform != "linux" or memory_status("VmData") is None):
        raise ArgumentError(
            f"--capacity limits a process's memory on a CPU by Linux's RLIMIT_DATA, and this system is {sys.platform}. "
            "Leave it out, or write --device cuda, where the allocator keeps to it."
        )


def limit(capacity: int, device: torch.device, held: int) -> None:
    """Lets no more than `capacity` bytes be taken, of which the step holds some already."""
    if device.type == "cuda":
        share = min(1.0, capacity / torch.cuda.get_device_properties(device).total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((memory_status("VmData") or 0) - held + capacity, hard))


def unlimit(device: torch.device) -> None:
    """Takes the limit back, for what is no part of the step."""
    if device.type != "cuda":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in MESSAGES)


class Ready(NamedTuple):
    """A model in training, and one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Of the call."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @property
    def items(self) -> tuple[str, int]:
        """What a step is counted in: the tokens of the first tensor of integers, else the samples of the first."""
        for tensor in self.tensors:
            if not tensor.dtype.is_floating_point and tensor.ndim > 1:
                return "tokens", tensor.numel()
        return "samples", next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)

    @property
    def nbytes(self) -> int:
        """Of parameters, buffers and batch."""
        tensors = (*self.model.parameters(), *self.model.buffers(), *self.tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def ready(workload: Workload, rank: int, device: torch.device) -> Ready:
    """The model of a workload, with the same weights each time, and a batch of the rank's own.

    Raises:
        ArgumentError: There is no such model, or it is not one that the options describe.
    """
    torch.manual_seed(SEED)
    dtype = None if workload.dtype is None else DTYPES[workload.dtype]
    if workload.model in SMALL:
        tokens, batch = workload.sequence or TOKENS, workload.batch or BATCH
        model, _ = MODELS[SMALL[workload.model]].build(LAYERS, WIDTH, tokens, batch)
        draw = torch.Generator().manual_seed(SEED + rank)
        model, call = model.to(dtype), (torch.randint(VOCABULARY, (batch, tokens + 1), generator=draw),)
    else:
        model, call, _ = load(workload.model, dtype, device)
        if call is None:
            described = batch_for(model, workload.model, workload.batch, workload.sequence)
            call = random_batch(described, model, device, SEED + rank)
        else:
            for option, value in (("--batch", workload.batch), ("--sequence", workload.sequence)):
                if value is not None:
                    raise ArgumentError(errors.made_by_a_function(option, workload.model))
    leaves, spec = tree_flatten(call)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Ready(model.to(device).train(), *call_of(tree_unflatten(moved, spec)))


@dataclass(frozen=True)
class TrialTask:
    """What a process is asked to do; a setting with a budget and no plan is planned, and not trained.

    `store` is where the ranks find each other, (host, port, prefix), None for one alone.
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
    def of(data: dict[str, Any]) -> TrialTask:
        """From what `dataclasses.asdict` made."""
        data["workload"], data["setting"] = Workload(**data["workload"]), Setting(**data["setting"])
        data["store"] = data["store"] and tuple(data["store"])
        return TrialTask(**data)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        kind = self.workload.device
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    @property
    def forks(self) -> bool:
        """Whether its process can be a fork of another, which then goes on; CUDA does not survive that."""
        return self.workload.device == "cpu" and hasattr(os, "fork")


def carry_out(task: TrialTask) -> Record:
    """What came of a task; an error that says something of the setting is part of that."""
    trial = _Trial(task)
    try:
        return trial.planned() if task.setting.budget and not task.setting.plan else trial.run()
    except BudgetError as error:
        return Record(NO_PLAN, str(error))
    except ArgumentError as error:
        return Record(REFUSED, str(error))
    except (RuntimeError, MemoryError) as error:
        out = is_out_of_memory(error)
        status = OUT if out else MISMATCH if isinstance(error, MismatchError) else FAILED
        said = str(error) if status == MISMATCH else _first_line(error)
        detail = f"{trial.where}: {type(error).__name__}: {said}"
        return replace(trial.record, status=status, detail=detail, reserved_bytes=trial.reserved())
    finally:
        trial.unlimit()


class _Trial:
    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._device = task.device
        self._optimizer: torch.optim.Optimizer | None = None
        self._limited = False
        self.where = "building the model"
        self._resident: int | None = None
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else name_of_cpu()
        self.record = Record(DONE, device=name)

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
        x = torch.ones(64, 64, device=self._device, requires_grad=True)
        (x @ x).sum().backward()  # starts the threads of a process's first operation, before memory is limited
        made = self._built()
        resident = memory_status("VmRSS")
        self._resident = None if resident is None else resident - made.nbytes
        plan = task.setting.on(made.model)
        handle = apply(made.model, plan)
        self.record = replace(self.record, regions=len(plan), predicted_peak_bytes=plan.predicted_peak_bytes)
        if task.capacity is not None:
            limit(task.capacity, self._device, made.nbytes)
            self._limited = True
        self._train(made)
        if dist.is_initialized():
            dist.destroy_process_group()  # not after an error: it may wait for ranks that wait for this one
        self.unlimit()
        handle.remove()
        if task.count:
            self._count(made, plan)
        return self.record

    def reserved(self) -> int | None:
        """The most taken from the system, or the device's driver, for the step; None where the system does not say."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        peak = memory_status("VmHWM")
        return None if peak is None or self._resident is None else max(0, peak - self._resident)

    def unlimit(self) -> None:
        """Give the process back what memory there is."""
        if self._limited:
            unlimit(self._device)
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
        dist.init_process_group(backend, store=_meet(*task.store), rank=task.rank, world_size=task.ranks)
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
            self.record = replace(self.record, uncounted=_first_line(error))


def _first_line(error: BaseException) -> str:
    """What an error says first, or what it is."""
    return (str(error).strip().splitlines() or [repr(error)])[0]


class Launcher:
    """Runs trials, one at a time; a context manager, which leaves no process behind."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch-recompute-")
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._folder.cleanup()

    def run(self, task: TrialTask, given_up: Callable[[], bool] = lambda: False) -> Record:
        """The record of a trial.

        Args:
            task: What is to be done.
            given_up: Asked while it runs; a trial that is given up is killed.
        """
        folder = Path(self._folder.name)
        given, to, said = folder / "task.json", folder / "record.json", folder / "said"
        given.write_text(json.dumps(asdict(task), default=list), encoding="utf-8")
        to.unlink(missing_ok=True)
        if self._process is None or self._process.poll() is not None:
            self._start(said)
        begins = said.stat().st_size
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{given}\t{to}\n")
            self._process.stdin.flush()
        code = self._wait(given_up)
        if not task.forks:
            self._close()
        if code is None:
            return Record(STOPPED, "another rank had ended")
        if code == 0 and to.is_file():
            return Record(**json.loads(to.read_text(encoding="utf-8")))
        with said.open("rb") as file:
            file.seek(begins)
            text = file.read().decode(errors="replace")[-TAIL:].strip()
        return ended_badly(code, text)

    def _start(self, said: Path) -> None:
        self._close()
        # The same package as here, whatever is installed.
        paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        with said.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__ if __name__ != "__main__" else __spec__.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
        self._reader.start()

    def _wait(self, given_up: Callable[[], bool]) -> int | None:
        """The exit code; None if the trial was given up."""
        while True:
            try:
                line = self._lines.get(timeout=LOOK)
            except queue.Empty:
                if given_up():
                    self._close()
                    return None
                continue
            if line is None:
                assert self._process is not None
                return self._process.wait()
            return int(line)

    def _close(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:  # which waits, and closes its pipes
            self._reader.join()
        self._process = None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def ended_badly(code: int, text: str) -> Record:
    """The record of a trial that could not write one.

    Args:
        code: Its exit code, negative for a signal.
        text: What it wrote last.
    """
    last = text.splitlines()[-1] if text else "it wrote nothing"
    if code >= 0:
        return Record(FAILED, f"exit code {code}: {last}")
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return Record(OUT, f"killed by {name}, as the system does where memory runs out")
    if any(said in text.lower() for said in MESSAGES):
        return Record(OUT, f"died of {name}: {last}")
    return Record(FAILED, f"died of {name}: {last}")


def _meet(host: str, port: int, prefix: str, *, hosts: bool = False) -> Any:
    """Torch's store at an address, behind a prefix, so that several groups can share it; or `hosts` it."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=hosts, wait_for_workers=False, timeout=PATIENCE
    )
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


class Ranks:
    """One rank alone: this one's number, and how many there are."""

    rank = 0
    count = 1

    def run(self, launcher: Launcher, task: TrialTask) -> list[Record]:
        """The records of a trial, one per rank."""
        return [launcher.run(task)]

    def shared(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on all ranks."""
        return make()

    def leave(self) -> None:
        """Called at the end."""


class Together(Ranks):
    """Several ranks, from the environment that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK and an address."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.rank, self.count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._local_rank = int(environment.get("LOCAL_RANK", "0"))
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        hosts = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"torch-recompute/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._store = _meet(*self._address, self._prefix, hosts=hosts)
        self._turn = 0

    def run(self, launcher: Launcher, task: TrialTask) -> list[Record]:
        """The records of a trial, one per rank."""
        turn = self._next()
        bad = f"{turn}/bad"
        task = replace(
            task,
            rank=self.rank,
            ranks=self.count,
            local_rank=self._local_rank,
            store=(*self._address, f"{self._prefix}/{turn}/group"),
        )
        record = launcher.run(task, lambda: self._store.add(bad, 0) > 0)
        if record.status != DONE:
            self._store.add(bad, 1)
        self._store.set(f"{turn}/{self.rank}", json.dumps(asdict(record)))
        said = [self._store.get(f"{turn}/{rank}") for rank in range(self.count)]
        return [Record(**json.loads(text)) for text in said]

    def shared(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on all ranks."""
        turn = self._next()
        if self.rank == 0:
            self._store.set(f"{turn}/shared", make())
        return self._store.get(f"{turn}/shared").decode()

    def leave(self) -> None:
        """Waits until nobody needs the store any more."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"left/{rank}" for rank in range(self.count)])

    def _next(self) -> int:
        self._turn += 1
        return self._turn


def ranks_of_environment() -> Ranks:
    """The ranks that this process is one of."""
    return Together(os.environ) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Ranks()


def _serve() -> None:
    """Reads lines with the paths of a task and of its record; answers with exit codes, negative for a signal."""
    torch.optim.SGD([torch.zeros(1)])  # a process's first optimizer imports torch's compiler: seconds, and 100 MiB
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        given, to = line.rstrip("\n").split("\t")
        task = TrialTask.of(json.loads(Path(given).read_text(encoding="utf-8")))
        if not task.forks:
            _write_record(task, Path(to))
            answers.write("0\n")
            return
        child = os.fork()
        if not child:
            answers.close()
            _end(task, Path(to))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _write_record(task: TrialTask, to: Path) -> None:
    record = carry_out(task)
    half = to.with_suffix(".half")
    half.write_text(json.dumps(asdict(record)), encoding="utf-8")
    half.replace(to)


def _end(task: TrialTask, to: Path) -> None:
    """Carries out a task and ends the process, without what it has inherited to be done at exit."""
    code = 1
    try:
        _write_record(task, to)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
