"""Follows the quick start to the letter in an empty folder, and writes what was printed, and how long it took.

    python tools/first_minutes.py      # `make first-minutes`: minutes, and 2 GB in a folder that is removed after it

The lines of `docs/quick-start.md` are run as they are there: those for a shell in an environment that is made for it,
the Python blocks one after the other in one process of it. A block of text below one of them becomes the start of what
it printed; the times are in `benchmarks/results/first_minutes-cpu.json`, and in a table of the page. Two pictures are
taken in the browser of the tests: a terminal, and the report's page. `tests/project/test_pages.py` looks whether the
times are of today's commands; no test sees that printed words grow old, so run it after those have changed.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pages

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from _measure import save  # noqa: E402

from support.browser import Browser, find_browser, why_none  # noqa: E402

DOCS = ROOT / "docs"
PIP = "pip install torch "
# A heading, a line for a shell, a block of Python, or a block of what the one before it printed.
PART = re.compile(
    r"^## (?P<title>.+)$|^ {4}(?P<shell>\S.*?)(?: {2,}#.*)?$|^```python\n(?P<python>[\s\S]*?)^```$"
    r"|^```text\n(?P<output>[\s\S]*?)^```$",
    re.M,
)
LINES, WIDE = 5, 100  # of an output that are shown
SESSION = """
import json, sys, time
scope = {"__name__": "__main__"}
for line in sys.stdin:
    began = time.perf_counter()
    exec(compile(json.loads(line), "quick-start", "exec"), scope)
    print(f"\\0{time.perf_counter() - began}", flush=True)
"""


def parts() -> Iterator[tuple[str, str]]:
    """The quick start as what it is made of: "title", "shell", "python" or "output", and the text."""
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
        pre, code {{ font-family: Mono !important; font-size: 13px !important }}
        .terminal {{ margin: 0; padding: 14px; width: 120ch; background: #1e1e1e; color: #d4d4d4; line-height: 1.4;
            white-space: pre-wrap; overflow-wrap: anywhere }}"""


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
    """Takes the two pictures."""
    program = find_browser()
    if program is None:
        raise SystemExit(why_none())
    page = place.folder / "terminal.html"
    page.write_text(terminal(*planned), encoding="utf-8")
    with Browser(program, place.folder / "profile") as browser:
        take(browser, page, "terminal.png", "document.querySelector('pre')", 1100)
        take(browser, place.folder / "report.html", "report-page.png", "document.body", 1100)


def start_of(printed: str) -> str:
    """The first lines of an output, cut where they are wide."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    cut = [line if len(line) <= WIDE else f"{line[: WIDE - 4].rstrip()} ..." for line in lines[:LINES]]
    return "\n".join(cut + ["..."] * (len(lines) > LINES))


def main() -> None:
    """Follows the quick start, and writes outputs, times and pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="", metavar="LINE", help="install torch so: another index, or a wheel")
    instead = parser.parse_args().torch
    page = (DOCS / "quick-start.md").read_text("utf-8")
    rows, planned, section, printed = [], ("", ""), "", ""
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))

        def follow(part: re.Match[str]) -> str:
            nonlocal planned, section, printed
            kind, text = part.lastgroup, part[part.lastgroup or 0].rstrip()
            if kind == "output":
                return f"```text\n{start_of(printed)}\n```"
            if kind == "title":
                section = text
                return part[0]
            line = instead if instead and text.startswith(PIP) else text
            sys.stderr.write(f"{line.splitlines()[0]} ...\n")
            printed, seconds = place.shell(line) if kind == "shell" else place.python(line)
            rows.append((f"`{text}`" if kind == "shell" else section, seconds))
            if line.startswith("torch-recompute plan"):
                planned = line, printed
            return part[0]

        page = PART.sub(follow, page)
        torch, _ = place.shell("python -c 'import torch; print(torch.__version__)'")
        pictures(place, planned)
    times = [{"what": what, "seconds": round(seconds, 1)} for what, seconds in rows]
    save("first_minutes-cpu", {"torch": torch.strip(), "rows": times})
    (DOCS / "quick-start.md").write_text(pages.with_figures(page), encoding="utf-8")


if __name__ == "__main__":
    main()
