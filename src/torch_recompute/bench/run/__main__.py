"""The process that trials come from: `python -m torch_recompute.bench.run`, started by `launching.py`.

It has imported everything and done nothing. Each line on stdin names a file with a task and one for its record. On a
CPU the trial is a fork of this process, so that it begins as a new one would, without the seconds that imports take;
CUDA does not survive a fork, so there this process does the trial itself, is then spent, and another is started.

The answer on stdout is the exit code of the trial, negative for a signal. What a model prints goes to stderr, which is
a file.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from .record import Record
from .trial import Task, carried_out


def _serve() -> None:
    torch.optim.SGD([torch.zeros(1)])  # a process's first optimizer imports torch's compiler: seconds, and 100 MiB
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        given, to = line.rstrip("\n").split("\t")
        task = Task.of(json.loads(Path(given).read_text(encoding="utf-8")))
        if not task.forks:
            _carry_out(task, Path(to))
            answers.write("0\n")
            return
        child = os.fork()
        if not child:
            answers.close()
            _end(task, Path(to))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _carry_out(task: Task, to: Path) -> None:
    record: Record = carried_out(task)
    half = to.with_suffix(".half")
    half.write_text(json.dumps(record.as_data()), encoding="utf-8")
    half.replace(to)


def _end(task: Task, to: Path) -> None:
    """Carries out a task and ends the process, without what it has inherited to be done at exit."""
    code = 1
    try:
        _carry_out(task, to)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
