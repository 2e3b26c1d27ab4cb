"""Runs the trials of `torch-recompute bench run`: processes that build a model, apply a plan and train some steps.

Everything that is random depends on the number of the step and on the rank alone, so the losses of two settings differ
only by what the settings do. The timed steps come first; bytes are counted on a CPU in one more step, whose loss does
not count, because watching changes the order of sums. FLOPs are those of PyTorch's formulas in a simulation of the step
with its plan, which knows what is a replay.

Memory can be limited, so that a CPU plays a device of some capacity: on CUDA by the allocator, on a CPU by Linux's
RLIMIT_DATA, for what the step takes beyond libraries. A trial that runs out of memory may raise an error, be killed by
the system, or die of a signal; the process that started it (`launch`) lives on, and the trial has a `Record`. On a CPU
trials are forks of a server that has imported everything; with CUDA each starts afresh.

The processes that torchrun started (`Together`) train nothing, because a trial that dies must not end the job. They
meet in a store, stop their trial when another rank's has failed, and read the records of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import Plan, RecomputeConfig, apply, errors, make_plan, measure, simulate
from .._torch import tensors_in
from .._torch.tensors import each_tensor
from ..errors import ArgumentError, BudgetError, MismatchError
from ..memory.free import heap, host_memory
from ..plan.exhausted import Shortage
from ..simulation.training_step import OPTIMIZERS, USUAL, any_loss, optimizer_of
from ..stores.measured import name_of_cpu
from .models import DTYPES, load_with_batch, random_batch
from .small_models import VOCABULARY, Decoder, TransformerBlock, seeded

LOOK = 0.05  # seconds
TAIL = 2000  # characters of what a process wrote last
PATIENCE = timedelta(days=2)
STATUS = Path("/proc/self/status")
MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
SMALL = {"gpt-tiny": TransformerBlock.gpt, "llama-tiny": TransformerBlock.llama}
"""Four layers of width 128."""
LAYERS, WIDTH, TOKENS, BATCH = 4, 128, 128, 4
PRODUCT, PRODUCTS = {"cpu": 384, "cuda": 4096}, 10
"""The width and the number of the matrix products by which the speed of a machine is measured."""
SEED = 0
DEVICES = ("cpu", "cuda")
IMPORTED = (__name__, "torch._dynamo")
"""Modules that every trial needs; a process's first optimizer imports the latter, which takes seconds."""

DONE = "done"
OUT = "OOM"
REFUSED = "REFUSED"
NO_PLAN = "NO PLAN"
FAILED = "FAILED"
MISMATCH = "MISMATCH"
STOPPED = "stopped"
"""The status of a rank that was stopped because another one failed."""
WORST = (REFUSED, NO_PLAN, OUT, FAILED, MISMATCH, STOPPED, DONE)


@dataclass(frozen=True)
class Workload:
    """The model, batch, optimizer and device of a training; only figures of equal workloads are compared."""

    model: str
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str = USUAL
    device: str = "cpu"

    def check(self) -> None:
        """Refuses values that cannot run, and says which can."""
        for option, value in (("--batch", self.batch), ("--sequence", self.sequence)):
            if value is not None:
                whole_number(option, value)
        for option, value, known in (
            ("--dtype", self.dtype or "bf16", DTYPES),
            ("--device", self.device, DEVICES),
        ):
            if value not in known:
                raise ArgumentError(
                    f"{option} is {value}; expected one of {', '.join(known)}. Write for example {option} "
                    f"{next(iter(known))}"
                )
        optimizer_of("--optimizer", self.optimizer)


@dataclass(frozen=True)
class Setting:
    """A choice of what to recompute: `RecomputeConfig` fields, a budget or a plan as JSON; by default nothing."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    budget: str | None = None
    plan: str | None = None

    @property
    def key(self) -> str:
        """A hash of the content, the same for equal settings of different names."""
        plan = None if self.plan is None else Plan.from_json(self.plan).digest()
        return hashed([dict(self.fields), self.budget, plan])

    @property
    def words(self) -> str:
        """The content, on one line."""
        if self.plan is not None:
            return "a plan"
        if self.budget is not None:
            return f"budget {self.budget}"
        return ", ".join(f"{name}={value}" for name, value in self.fields.items()) or "nothing recomputed"

    def on(self, model: nn.Module) -> Plan:
        """Returns the plan to apply to a model; a setting with a budget has got its plan before."""
        if self.plan is not None:
            return Plan.from_json(self.plan)
        return RecomputeConfig(**dict(self.fields)).plan(model)


def whole_number(option: str, value: object, least: int = 1) -> None:
    """Refuses a value that is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(errors.not_a_size(option, value, least))


def hashed(data: object) -> str:
    """Returns a short hash of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """A trial on one rank, as plain data that goes through files and between ranks."""

    status: str  # one of WORST
    detail: str = ""  # where and why, unless it is done
    losses: Sequence[str] = ()  # of all steps, as exact hexadecimals
    seconds: Sequence[float] = ()  # of the timed steps
    allocated_bytes: int | None = None  # the most alive in a step
    reserved_bytes: int | None = None  # the most that the process has taken for it from the system or the device
    flops: int | None = None  # of a step without replays; None where it was not, or could not be, counted
    replay_flops: int | None = None  # likewise
    uncounted: str = ""  # why there are no FLOPs
    items: int = 0  # tokens or samples of a step
    unit: str = "tokens"
    dtype: str = ""  # the narrowest of the parameters, as one of DTYPES
    device: str = ""
    parameters: int = 0
    regions: int = 0
    predicted_peak_bytes: int | None = None  # where the plan was made for a budget
    plan: str | None = None  # as JSON, where it was to be made
    digest: str = ""  # of the plan that was in the model
    pace: Sequence[float] = ()  # seconds of one fixed piece of work, before and after the steps
    by_category: Mapping[str, int] = field(default_factory=dict[str, int])  # of the tensors alive at the peak
    shortage: Mapping[str, Any] | None = None  # where memory ran out: `Shortage.as_data`


def worst(records: Sequence[Record]) -> Record:
    """Returns the record with the worst status."""
    return min(records, key=lambda record: WORST.index(record.status))


# --- memory of a process ----------------------------------------------------------------------------------------------


def cpu_and_threads() -> str:
    """Returns the processor's name, and the number of threads."""
    return f"{name_of_cpu().strip()} (threads: {torch.get_num_threads()})"


def memory_status(name: str) -> int | None:
    """Returns the bytes of a field in the system's status of this process; None where there is none."""
    found = re.search(rf"(?m)^{name}:\s*(\d+) kB", STATUS.read_text(encoding="utf-8") if STATUS.exists() else "")
    return int(found[1]) * 1024 if found else None


def check_capacity(capacity: int | None, device: str) -> None:
    """Refuses a capacity that the system cannot limit a process to."""
    if capacity is not None and device == "cpu" and (sys.platform != "linux" or memory_status("VmData") is None):
        raise ArgumentError(
            f"--capacity limits a process's memory on a CPU by Linux's RLIMIT_DATA, and this system is {sys.platform}. "
            "Leave it out, or write --device cuda, where the allocator keeps to it."
        )


def limit(capacity: int, device: torch.device, held: int) -> None:
    """Limits this process to `capacity` bytes for the step, of which `held` are taken already."""
    if device.type == "cuda":
        share = min(1.0, capacity / torch.cuda.get_device_properties(device).total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((memory_status("VmData") or 0) - held + capacity, hard))


def unlimit() -> None:
    """Removes the limit, for work that is no part of the step."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in MESSAGES)


# --- one trial --------------------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A model in training, and one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def items(self) -> tuple[str, int]:
        """The unit and size of a step: the tokens of the first tensor of integers, else the samples of the first."""
        for tensor in self.tensors:
            if not tensor.dtype.is_floating_point and tensor.ndim > 1:
                return "tokens", tensor.numel()
        return "samples", next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)

    @property
    def nbytes(self) -> int:
        """The bytes of parameters, buffers and batch."""
        tensors = (*self.model.parameters(), *self.model.buffers(), *self.tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def ready(workload: Workload, rank: int, device: torch.device) -> Ready:
    """Builds the model of a workload, with the same weights each time, and a batch of the rank's own."""
    torch.manual_seed(SEED)
    if workload.model in SMALL:
        tokens, batch = workload.sequence or TOKENS, workload.batch or BATCH
        model = seeded(lambda: Decoder(LAYERS, WIDTH, tokens, SMALL[workload.model]))
        draw = torch.Generator().manual_seed(SEED + rank)
        model = model.to(None if workload.dtype is None else DTYPES[workload.dtype])
        call = (torch.randint(VOCABULARY, (batch, tokens + 1), generator=draw),), dict[str, Any]()
    else:
        model, call, _, built_here = load_with_batch(workload, device)
        if built_here:
            call = (), random_batch(call[1], model, device, SEED + rank)
    return Ready(model.to(device).train(), *each_tensor(call, lambda tensor: tensor.to(device)))


@dataclass(frozen=True)
class TrialTask:
    """The task of one process: to train with a setting, or to plan for a setting with a budget and no plan.

    `store` is the address at which the ranks find each other, (host, port, prefix); None for one alone.
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


def run_task(task: TrialTask) -> Record:
    """Runs a task and returns its record; an error that the setting causes is part of it."""
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
        text = str(error) if status == MISMATCH else _first_line(error)
        detail = f"{trial.where}: {type(error).__name__}: {text}"
        shortage = trial.shortage(str(error)).as_data() if out else None
        return replace(trial.record, status=status, detail=detail, reserved_bytes=trial.reserved(), shortage=shortage)


class _Trial:
    """A model, its training steps, and the record that grows with them; `where` is the present piece of work."""

    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._cuda = task.workload.device == "cuda"
        self._device = torch.device("cuda", task.local_rank) if self._cuda else torch.device("cpu")
        self._optimizer: torch.optim.Optimizer | None = None
        self._resident: int | None = None  # bytes, before the step takes any
        self._heap: int | None = None  # likewise, in use of the process's heap
        self.where = "building the model"
        self.record = Record(DONE, device=torch.cuda.get_device_name(self._device) if self._cuda else cpu_and_threads())

    def planned(self) -> Record:
        """Makes the plan for a budget and returns it in a record."""
        made = self._built()
        optimizer = OPTIMIZERS[self._task.workload.optimizer]
        step: dict[str, Any] = {"loss": any_loss, "optimizer": optimizer, "hold_output": False}
        plan = make_plan(*made, budget=self._task.setting.budget or "", **step)
        return replace(self.record, plan=plan.to_json())

    def run(self) -> Record:
        """Runs the steps and returns the record."""
        task = self._task
        x = torch.ones(64, 64, device=self._device, requires_grad=True)
        (x @ x).sum().backward()  # starts the threads of a process's first operation, before memory is limited
        self._measure_pace()
        made = self._built()
        resident = memory_status("VmRSS")
        self._resident = None if resident is None else resident - made.nbytes
        found = heap()
        self._heap = None if found is None else found[0] - made.nbytes
        plan = task.setting.on(made.model)
        handle = apply(made.model, plan)
        self.record = replace(
            self.record, regions=len(plan), digest=plan.digest(), predicted_peak_bytes=plan.predicted_peak_bytes
        )
        if task.capacity is not None:
            limit(task.capacity, self._device, made.nbytes)
        try:
            self._train(made)
            if dist.is_initialized():
                dist.destroy_process_group()  # not after an error: it may wait for ranks that wait for this one
        finally:
            if task.capacity is not None and not self._cuda:
                unlimit()
        handle.remove()
        self._measure_pace()
        if task.count:
            self._count(made, plan)
        return self.record

    def reserved(self) -> int | None:
        """Returns the most memory taken from the system or driver for the step; None where that is not known."""
        if self._cuda:
            return torch.cuda.max_memory_reserved(self._device)
        peak = memory_status("VmHWM")
        return None if peak is None or self._resident is None else max(0, peak - self._resident)

    def shortage(self, text: str) -> Shortage:
        """Returns the bytes at the time that memory ran out, from the text of the error where it has them."""
        capacity = self._task.capacity
        if self._cuda:
            allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
            capacity = capacity or torch.cuda.get_device_properties(self._device).total_memory
            return Shortage.of(text, allocated, reserved, capacity, cuda=True)
        now, base = heap(), self._heap
        allocated, reserved = (None, None) if now is None or base is None else (now[0] - base, now[1] - base)
        return Shortage.of(text, allocated, reserved, capacity or host_memory()[1], cuda=False)

    def _measure_pace(self) -> None:
        """Times matrix products, the same ones in every trial, to measure how fast the machine is at present."""
        x = torch.ones(PRODUCT[self._device.type], PRODUCT[self._device.type], device=self._device)
        seconds: list[float] = []
        for _ in range(PRODUCTS + 1):
            start = self._clock()
            torch.mm(x, x)
            seconds.append(self._clock() - start)
        del x
        if self._cuda:
            torch.cuda.empty_cache()
        self.record = replace(self.record, pace=[*self.record.pace, *seconds[1:]])

    def _built(self) -> Ready:
        if self._cuda:
            torch.cuda.set_device(self._device)
        made = ready(self._task.workload, self._task.rank, self._device)
        unit, items = made.items
        parameters = sum(parameter.numel() for parameter in made.model.parameters())
        found = {parameter.dtype for parameter in made.model.parameters()}
        dtype = next(
            (name for name, dtype in sorted(DTYPES.items(), key=lambda p: p[1].itemsize) if dtype in found), ""
        )
        self.record = replace(self.record, unit=unit, items=items, parameters=parameters, dtype=dtype)
        return made

    def _train(self, made: Ready) -> None:
        task = self._task
        make = OPTIMIZERS[task.workload.optimizer]
        self._optimizer = None if make is None else make(made.model.parameters())
        trained = made.model
        if task.store is not None:
            group: dict[str, Any] = {"store": _meet(*task.store), "rank": task.rank, "world_size": task.ranks}
            dist.init_process_group("nccl" if self._cuda else "gloo", **group)
            trained = DistributedDataParallel(trained)
        losses: list[str] = []
        seconds: list[float] = []
        for number in range(task.warmup + task.steps):
            self.where = f"step {number + 1} of {task.warmup + task.steps}"
            if number == task.warmup and self._cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            start = self._clock()
            loss = self._step(trained, made, number)
            seconds.append(self._clock() - start)
            losses.append(loss.hex())
        seconds = seconds[task.warmup :]
        self.record = replace(self.record, losses=losses, seconds=seconds, reserved_bytes=self.reserved())
        self.where = "the step in which bytes are counted"
        allocated = torch.cuda.max_memory_allocated(self._device) if self._cuda else None
        with measure(made.model, self._optimizer).track(*made.tensors) as m:
            self._step(trained, made, task.warmup + task.steps)
        seen = m.on(self._device)
        peak = seen.peak_bytes if allocated is None else allocated
        self.record = replace(self.record, allocated_bytes=peak, by_category=seen.by_category)

    def _step(self, model: nn.Module, made: Ready, number: int) -> float:
        """Runs a training step; its random numbers depend on its number and the rank."""
        torch.manual_seed(SEED + number * self._task.ranks + self._task.rank)
        loss = any_loss(model(*made.args, **made.kwargs))
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        made.model.zero_grad()
        return loss.detach().float().item()

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _count(self, made: Ready, plan: Plan) -> None:
        """Counts the FLOPs of the step, and those of its replays."""
        made.model.zero_grad()
        try:
            flops = dict(simulate(*made, plan=plan, loss=any_loss).flops)
            replayed = flops.pop("replay")
            self.record = replace(self.record, flops=sum(flops.values()), replay_flops=replayed)
        except Exception as error:  # a model may fail on fake tensors in any way, and the trial is worth more
            self.record = replace(self.record, uncounted=_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


# --- processes --------------------------------------------------------------------------------------------------------


def launch(task: TrialTask, given_up: Callable[[], bool] = lambda: False) -> Record:
    """Runs a task in a process of its own, which is killed once it is `given_up`, and returns its record."""
    # A server whose forks are the trials: it never starts CUDA, but libraries might, so there a new process is safer.
    context: Any = multiprocessing.get_context("forkserver" if task.workload.device == "cpu" else "spawn")
    if task.workload.device == "cpu":
        context.set_forkserver_preload(list(IMPORTED))
    reader, writer = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="torch-recompute-") as output, reader:
        process = context.Process(target=_send_record, args=(task, writer, output.name), daemon=False)
        process.start()
        writer.close()
        try:
            while not wait([reader, process.sentinel], LOOK):
                if given_up():
                    return Record(STOPPED, "another rank had ended")
            with suppress(EOFError):
                if reader.poll():
                    return reader.recv()
            process.join()
            return ended_badly(process.exitcode, output.read().decode(errors="replace")[-TAIL:].strip())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.kill()
            process.join()
            process.close()


def _send_record(task: TrialTask, to: Connection, output: str) -> None:
    """Runs a task in a session of its own; everything it prints goes to the file `output`."""
    os.setsid()
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    to.send(run_task(task))


def ended_badly(code: int, text: str) -> Record:
    """Returns the record of a process that sent none, from its exit code (negative for a signal) and its output."""
    last = text.splitlines()[-1] if text else "it wrote nothing"
    if code >= 0:
        return Record(FAILED, f"exit code {code}: {last}")
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return Record(OUT, f"killed by {name}, as the system does where memory runs out")
    out = any(message in text.lower() for message in MESSAGES)
    return Record(OUT if out else FAILED, f"died of {name}: {last}")


def _meet(host: str, port: int, prefix: str, *, hosts: bool = False) -> Any:
    """Connects to torch's store at an address, or `hosts` it; the prefix lets several groups share it."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=hosts, wait_for_workers=False, timeout=PATIENCE
    )
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


class OneProcess:
    """The ranks of a run, here one alone: the number of this one, and how many there are."""

    rank = 0
    count = 1

    def run(self, task: TrialTask) -> list[Record]:
        """Runs a trial on all ranks and returns their records."""
        return [launch(task)]

    def shared(self, make: Callable[[], str]) -> str:
        """Returns on all ranks what `make` returns on rank 0."""
        return make()

    def leave(self) -> None:
        """Called at the end."""


class Together(OneProcess):
    """Several ranks, from torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK and an address."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.rank, self.count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._local_rank = int(environment.get("LOCAL_RANK", "0"))
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        hosts = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"torch-recompute/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        self._store = _meet(*self._address, self._prefix, hosts=hosts)
        self._turn = 0

    def run(self, task: TrialTask) -> list[Record]:
        """Runs a trial on all ranks and returns their records."""
        self._turn += 1
        turn = self._turn
        group = (*self._address, f"{self._prefix}/{turn}/group")
        task = replace(task, rank=self.rank, ranks=self.count, local_rank=self._local_rank, store=group)
        record = launch(task, lambda: self._store.add(f"{turn}/bad", 0) > 0)
        if record.status != DONE:
            self._store.add(f"{turn}/bad", 1)
        self._store.set(f"{turn}/{self.rank}", json.dumps(asdict(record)))
        texts = [self._store.get(f"{turn}/{rank}") for rank in range(self.count)]
        return [Record(**json.loads(text)) for text in texts]

    def shared(self, make: Callable[[], str]) -> str:
        """Returns on all ranks what `make` returns on rank 0."""
        self._turn += 1
        if self.rank == 0:
            self._store.set(f"{self._turn}/shared", make())
        return self._store.get(f"{self._turn}/shared").decode()

    def leave(self) -> None:
        """Waits until no rank needs the store any more."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"left/{rank}" for rank in range(self.count)])


def ranks_of_environment() -> OneProcess:
    """Returns the ranks that this process belongs to."""
    return Together(os.environ) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else OneProcess()
