"""Code in advice: each piece that a finding says to write is run, with stand-ins for what the reader has."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_recompute
from torch_recompute import Choice, checkpoint, doctor, make_plan
from torch_recompute.compiling import Partition

CODE = re.compile(r"`([^`]+)`")
LIKE_CODE = re.compile(r"[\w\])]\(|\w=[^ ]|\.\.\.|:$")
ENVIRONMENT = re.compile(r"\b[A-Z_]+=\S+")
TAKING = (torch_checkpoint, checkpoint, Choice, make_plan, torch.Tensor.backward, doctor.examine)


def printed_code_runs(write: str, names: dict[str, Any]) -> None:
    """Runs each piece of code in what a finding says to write, with a set-up's names; nothing else is like code."""
    assert not LIKE_CODE.search(ENVIRONMENT.sub("", CODE.sub("", write))), write
    given = names.get("given", {})
    known = {**stand_ins(), **{key: value for key, value in names.items() if not key.startswith("__")}, **given}
    own = names.get("Net")
    if hasattr(own, "head_and_loss"):
        model, tokens = given["model"], names["tokens"]
        known |= {"head_and_loss": model.head_and_loss, "hidden": model.hidden(tokens)}
        known["labels"] = known["hidden"] if hasattr(model, "teacher") else tokens
    known["loss"] = torch.ones((), requires_grad=True).sum()
    for code in CODE.findall(write):
        changed = dict(known)
        torch.manual_seed(0)
        exec(compile(code, "written.py", "exec"), changed)
        torch.use_deterministic_algorithms(False)  # which advice may turn on
        argument = re.fullmatch(r"(\w+)=[^=].*", code)
        if argument:  # of a call that is named beside it
            assert any(argument[1] in inspect.signature(call).parameters for call in TAKING), code
        if code.startswith("budget="):
            how = {"loss", "optimizer", "device", "hold_output", "accumulate", "set_to_none"} & given.keys()
            call = given["model"], given.get("args", ()), given.get("kwargs")
            make_plan(*call, budget=changed["budget"], **{name: given[name] for name in how})


def stand_ins() -> dict[str, Any]:
    """What the names are that advice uses for things of the reader's own."""
    x = torch.rand(2, 4, 8)
    return {
        **{name: getattr(torch_recompute, name) for name in torch_recompute.__all__},
        **vars(torch_recompute.state),
        **dict.fromkeys(("x", "scores", "hidden", "labels", "tensor", "out"), x),
        "torch": torch,
        "torch_recompute": torch_recompute,
        "Partition": Partition,
        "fn": torch.sin,
        "consumer": torch.cos,
        "args": (x,),
        "head_and_loss": lambda hidden, labels: (hidden - labels).sum(-1),
        "total": 0.0,
        "generator": torch.Generator(),
        "ctx": torch.autograd.function.FunctionCtx(),
        "model": nn.Linear(8, 8),
        "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
    }
