"""Follows the quick start to the letter in an empty folder, and writes what was seen: `docs/first-minutes.md`.

    python tools/first_minutes.py      # `make first-minutes`: ten minutes, and 2 GB in a folder that goes after it

The lines of `docs/quick-start.md` are run as they are there: those for a shell in an environment that is made for it,
the Python blocks one after the other in one process of it. The page has each with its seconds and what it printed.
Three pictures are taken in the browser of the tests: a terminal, the report's page, and the notebook of
`docs/notebooks` about reports, run and drawn by Jupyter's own nbconvert. `tests/project/test_pages.py` looks whether
the page is of today's quick start; no test sees that seconds and printed words grow old, so run it after those have
changed.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser, find_browser, why_none  # noqa: E402

DOCS = ROOT / "docs"
PIP = "pip install torch "
# A heading, a line for a shell, or a block of Python.
PART = re.compile(r"^## (?P<title>.+)$|^ {4}(?P<shell>\S.*?)(?: {2,}#.*)?$|^```python\n(?P<python>[\s\S]*?)^```$", re.M)
SESSION = """
import json, sys, time
scope = {"__name__": "__main__"}
for line in sys.stdin:
    began = time.perf_counter()
    exec(compile(json.loads(line), "quick-start", "exec"), scope)
    print(f"\\0{time.perf_counter() - began}", flush=True)
"""
PAGE = """# The first minutes

The output of the [quick start](quick-start.md), step by step, with times. `make first-minutes` runs it in an empty
folder and writes this page. Recorded on {machine}.

{table}

## Screenshots

A terminal, with the plan of step 5:

![The command torch-recompute plan in a terminal: peak, time, a row for each kind of layer](pictures/terminal.png)

The report that `torch-recompute report` wrote; its slider shows the plans for other budgets:

![The report's page: memory over the step, the curve of budget and time, and the placements](pictures/report-page.png)

A notebook, [reading a report](notebooks/report.ipynb), which shows a plan as a table:

![A notebook whose cell shows a plan](pictures/notebook.png)

{parts}"""


def parts() -> Iterator[tuple[str, str]]:
    """The quick start as what it is made of: "title", "shell" or "python", and the text."""
    for match in PART.finditer((DOCS / "quick-start.md").read_text("utf-8")):
        yield match.lastgroup or "", match[match.lastgroup or 0].rstrip()


class Place:
    """An environment in an empty folder, its shell and its one session of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / ".venv", with_pip=True)
        path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
        self._environment.pop("PYTHONPATH", None)
        self._session: subprocess.Popen[str] | None = None

    def shell(self, line: str) -> tuple[str, float]:
        """What a line prints, and its seconds. A line that asks for the checkout is run in it."""
        began = time.perf_counter()
        run = subprocess.run(
            line, shell=True, cwd=ROOT if '".[' in line else self.folder, env=self._environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        if run.returncode not in (0, 1):  # 1: the doctor found something
            raise RuntimeError(f"{line} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
        return run.stdout, time.perf_counter() - began

    def python(self, block: str) -> tuple[str, float]:
        """What a block prints, and its seconds."""
        if self._session is None:
            self._session = subprocess.Popen(
                [self.folder / ".venv" / "bin" / "python", "-c", SESSION], cwd=self.folder, env=self._environment,
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._session.stdin
        assert self._session.stdout
        self._session.stdin.write(json.dumps(block) + "\n")
        self._session.stdin.flush()
        printed = ""
        for line in self._session.stdout:
            before, ended, seconds = line.partition("\0")
            printed += before
            if ended:
                return printed, float(seconds)
        raise RuntimeError(f"the session ended in\n{block}")


def style() -> str:
    """The letters of terminals and cells: matplotlib's, as a browser of tests has none of equal width."""
    font = base64.b64encode((Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf").read_bytes()).decode()
    return f"""
        @font-face {{ font-family: Mono; src: url(data:font/ttf;base64,{font}) }}
        pre, code, .jp-InputPrompt, .jp-OutputPrompt {{ font-family: Mono !important; font-size: 13px !important }}
        .terminal {{ margin: 0; padding: 14px; width: 120ch; background: #1e1e1e; color: #d4d4d4; line-height: 1.4;
            white-space: pre-wrap; overflow-wrap: anywhere }}
        [data-mime-type$="stderr"] {{ display: none }}"""  # of long work: in a live notebook the line is gone


def terminal(line: str, printed: str) -> str:
    """A page that looks as a terminal of 120 columns does after a line."""
    text = html.escape(f"$ {line}\n{printed}$ ")
    return f'<!doctype html><meta charset="utf-8"><body style="margin: 0"><pre class="terminal">{text}</pre>'


def take(browser: Browser, page: Path, picture: str, find: str, width: int) -> None:
    """Writes a picture of an element of a page."""
    browser.look(width=width, height=1000)
    browser.open(page)
    browser.evaluate(f"document.head.appendChild(document.createElement('style')).textContent = `{style()}`")
    time.sleep(1)  # until the letters are there
    box = f"const b = ({find}).getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height]"
    x, y, wide, high = browser.evaluate(f"(() => {{ {box} }})()")
    clip = {"x": x, "y": y, "width": wide, "height": high, "scale": 1}
    shot = browser.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    (DOCS / "pictures" / picture).write_bytes(base64.b64decode(shot["data"]))


def pictures(place: Place, planned: tuple[str, str]) -> None:
    """Takes the three pictures."""
    program = find_browser()
    if program is None:
        raise SystemExit(why_none())
    page = place.folder / "terminal.html"
    page.write_text(terminal(*planned), encoding="utf-8")
    place.shell("pip install --quiet nbconvert ipykernel")
    links = "--HTMLExporter.require_js_url= --HTMLExporter.mathjax_url="
    notebook = DOCS / "notebooks" / "report.ipynb"
    place.shell(f"jupyter nbconvert --execute --to html {links} --output-dir . --output notebook {notebook}")
    with Browser(program, place.folder / "profile") as browser:
        take(browser, page, "terminal.png", "document.querySelector('pre')", 1100)
        take(browser, place.folder / "report.html", "report-page.png", "document.body", 1100)
        cell = "[...document.querySelectorAll('.jp-CodeCell')].find((one) => one.querySelector('table'))"
        take(browser, place.folder / "notebook.html", "notebook.png", cell, 1300)


def shown(kind: str, text: str, printed: str) -> str:
    """A line or a block with what it printed, as Markdown."""
    printed = "" if text.startswith("pip ") else "\n".join(map(str.rstrip, printed.splitlines()))
    fence = f"```py\n{text}\n```" if kind == "python" else f"```text\n$ {text}\n```"
    return fence + (f"\n\n```text\n{printed.rstrip()}\n```" if printed.strip() else "")


def main() -> None:
    """Follows the quick start, and writes the page and its pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="", metavar="LINE", help="install torch so: another index, or a wheel")
    instead = parser.parse_args().torch
    rows, written, planned, section = [], [], ("", ""), ""
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        place = Place(Path(name))
        rows.append(("an empty environment", time.perf_counter() - began))
        for kind, text in parts():
            if kind == "title":
                section = text
                written.append(f"## {text}")
                continue
            line = instead if instead and text.startswith(PIP) else text
            sys.stderr.write(f"{line.splitlines()[0]} ...\n")
            printed, seconds = place.shell(line) if kind == "shell" else place.python(line)
            rows.append((f"`{line}`" if kind == "shell" else section, seconds))
            written.append(shown(kind, line, printed))
            if line.startswith("torch-recompute plan"):
                planned = line, printed
        torch, _ = place.shell("python -c 'import torch; print(torch.__version__)'")
        pictures(place, planned)
    rows.append(("all of it", sum(seconds for _, seconds in rows)))
    table = "\n".join(["| | seconds |", "|---|---:|", *(f"| {what} | {seconds:.1f} |" for what, seconds in rows)])
    machine = f"{os.cpu_count()} cores without a GPU, Python {platform.python_version()}, torch {torch.strip()}"
    page = PAGE.format(machine=machine, table=table, parts="\n\n".join(written))
    (DOCS / "first-minutes.md").write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
