"""`docs/errors.md`: every text that an error of torch-recompute can have, one heading per text.

The headings are what the functions of `torch_recompute/errors/` say of themselves ("Text for ..."), grouped by their
files; the texts are the first row that `tests/test_messages.py` has for each, where a test raises them word for word.
So the page can neither miss a text nor quote one that is not raised.
"""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import NamedTuple

import torch

from test_messages import CASES, functions_of_errors
from torch_recompute import errors

HEAD = """\
# Every error text

Written by `python tools/pages.py` from the texts that the tests pin; do not edit it. Names, numbers and shapes in the
examples are those of the tests. Search this page for words of the message at hand: the first line says what was passed
and what was expected, the indented ones why, and what to write. For what is behind the most common ones see
[troubleshooting](troubleshooting.md).
"""


class Text(NamedTuple):
    """One heading of the page."""

    topic: str
    heading: str
    kind: str
    example: str


def _first_line(of: object, prefix: str) -> str:
    """The first sentence of a docstring, without what all of them begin with and without what is said of arguments."""
    line = (inspect.getdoc(of) or "").split("\n\n")[0].replace("\n", " ").split("; ")[0]
    line = re.sub(rf"^{prefix} (for|about) ", "", line).removesuffix(".")
    return line[:1].upper() + line[1:]


def texts() -> list[Text]:
    """All texts, in the order of the files of `torch_recompute/errors/` and of the functions in them."""
    modules = {name: module for name, module in vars(errors).items() if isinstance(module, ModuleType)}
    first = {case.of: case for case in reversed(CASES)}
    found: list[Text] = []
    for name in sorted(modules):
        topic = _first_line(modules[name], "Texts")
        made_here = [one for one in functions_of_errors() if getattr(errors, one).__module__ == modules[name].__name__]
        for one in sorted(made_here, key=lambda one: getattr(errors, one).__code__.co_firstlineno):
            case = first[one]
            example = case.text.replace(torch.__version__, "2.13.0")  # the page is the same on every torch
            found.append(Text(topic, _first_line(getattr(errors, one), "Text"), case.kind.__name__, example))
    return found


def page() -> str:
    """The page."""
    parts, topic = [HEAD], ""
    for text in texts():
        if text.topic != topic:
            topic = text.topic
            parts.append(f"## {topic}\n")
        parts.append(f"### {text.heading}\n\n```text\n{text.kind}: {text.example}\n```\n")
    return "\n".join(parts)
