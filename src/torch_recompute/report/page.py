"""The page: a template, a style and two scripts beside this file, and the document, in one text.

Nothing is fetched: what the page needs is in it, and its own security policy forbids the rest. The pictures are SVG
that some two hundred lines of JavaScript draw from the document.

Rejected: a library for plots. The one most used is more than four megabytes in each page, which is ten times the data,
its pictures do not follow the reader's colour scheme, and a stack of areas and a curve are no reason for it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    """The page of a document, see `collect`."""
    # In a script a "<" might begin its end, or a comment.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"STYLE": _read("page.css"), "LOGIC": _read("logic.js"), "SCRIPT": _read("page.js")}
    return Template(_read("page.html")).substitute(parts, TITLE=html.escape(str(data["title"])), DATA=text)


def _read(name: str) -> str:
    return files("torch_recompute.report").joinpath(name).read_text(encoding="utf-8").rstrip()
