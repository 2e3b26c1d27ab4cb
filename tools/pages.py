"""Writes what the documentation does not leave to hands: tables of figures and pictures.

    python tools/pages.py           # writes; `make pages`
    python tools/pages.py --check   # only says which pages are not those of the results, and ends with 1 if any is
    python tools/pages.py --stale   # says how many commits each result is behind the code that it measures

Problem. A figure that is typed into a page is wrong after the next run of its benchmark, and a picture that no one can
edit stays as it is.

Idea. Each is a function of something else: of `benchmarks/results/*.json`, of a few lines of drawing. This tool is that
function, `tests/project/test_pages.py` holds the pages to it, and the result
is in the repository, so that it can be read there without building anything.

A table is between `<!-- figures: NAME -->` and `<!-- end of figures -->`, in any page. `figures.py` makes the
tables, `pictures.py` and `step_picture.py` the pictures. The fields of `RecomputeConfig` are between `<!-- fields -->`
and `<!-- end of fields -->`; the package has them as a table.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import figures
import pictures
import step_picture

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # tools run where the package is not installed

from _measure import ages, has_history

from torch_recompute.plan import fields

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
FIELDS = re.compile(r"(<!-- fields -->\n).*?(<!-- end of fields -->)", re.DOTALL)


def with_figures(text: str) -> str:
    """A page with its tables made again."""
    text = MARKED.sub(lambda match: f"{match[1]}\n{figures.TABLES[match[2]]()}\n\n{match[3]}", text)
    return FIELDS.sub(lambda match: f"{match[1]}\n{_fields()}\n\n{match[2]}", text)


def _fields() -> str:
    head = "field", "Megatron-LM's meaning", "here", "an error"
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *fields.table()))


def pages_with_figures() -> dict[Path, str]:
    """The pages that hold tables, as they should be."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return {page: with_figures(text) for page, text in texts.items() if MARKED.search(text) or FIELDS.search(text)}


def all_pages() -> dict[Path, str]:
    """Every file that this tool writes, as it should be."""
    return {
        **pages_with_figures(),
        **{ROOT / "docs" / "pictures" / name: picture for name, picture in pictures.PICTURES.items()},
        ROOT / "docs" / "pictures" / "step.svg": step_picture.memory_over_step(),
    }


def say_ages() -> None:
    """Says of each result how old it is, and the command that makes it again."""
    if not has_history():
        sys.stdout.write("no git history here, so how old results are is not known\n")
        return
    for age in ages():
        sys.stdout.write(f"{age.name:30} {age}\n")


def main() -> int:
    """Writes the pages, or says which are not those of the results, or how old the results are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if a page is another")
    parser.add_argument("--stale", action="store_true", help="write nothing, say how old each result is")
    options = parser.parse_args()
    if options.stale:
        say_ages()
        return 0
    other = {path: text for path, text in all_pages().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in other.items():
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{'to be written' if options.check else 'written'}: {path.relative_to(ROOT)}\n")
    return int(options.check and bool(other))


if __name__ == "__main__":
    sys.exit(main())
