"""Generated parts of the documentation (figures, pictures, the API) are up to date, and complete."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import torch_recompute
from project.test_messages import ROWS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

if not ((ROOT / "tools" / "pages.py").is_file() and DOCS.is_dir()):
    pytest.skip("the tools and the documentation are not part of this archive", allow_module_level=True)


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """`tools/pages.py`."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("pages")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def made(tool: ModuleType) -> dict[Path, str]:
    """All files that it makes, as they should be."""
    return tool.all_pages()


def test_made_pages_are_what_the_tool_makes(made: dict[Path, str]) -> None:
    """Every table, text and picture that stands in the repository is the one that `make pages` writes."""
    stale = [path.relative_to(ROOT).as_posix() for path, text in made.items() if path.read_text("utf-8") != text]
    assert not stale, "python tools/pages.py writes them again"


def test_a_changed_figure_is_stale(tool: ModuleType, made: dict[Path, str]) -> None:
    """A figure that someone types over in a marked table is made again from the results, and only that."""
    page = DOCS / "what-it-saves.md"
    typed = re.sub(r"\d+\.\d GiB", "0.1 GiB", made[page]) + "0.2 GiB elsewhere"
    assert tool.with_figures(typed) == made[page] + "0.2 GiB elsewhere"


BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
MADE = re.compile(r"\d{1,2} [A-Z][a-z]{2} \d{4}, ([0-9a-f]{8}(\+changes)?|not recorded)")
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "design")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_has_its_date_and_machine(page: Path) -> None:
    """Each table of results says when and at which commit it was made, and ends with a line that names the machine."""
    for name, text in BLOCK.findall(page.read_text("utf-8")):
        *_, last = text.strip().splitlines()
        assert MADE.search(text), name
        assert re.fullmatch(r"_.*(not recorded|NVIDIA|\d cores).*_", last), name


def test_a_missed_goal_is_marked_in_its_column(tool: ModuleType) -> None:
    """Each goal of a comparison that is not reached is said to be missed in its own column, and no other is."""
    figures = importlib.import_module("figures")
    table = figures.TABLES["frontier_goals"]()
    for title, result in figures._frontiers():
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {title} |"))
        cells = row.split(" | ")[1:5]
        goals = {goal["name"]: goal["reached"] for goal in result["goals"]}
        assert ["not reached" not in cell for cell in cells] == [
            goals[name] for name in ("flops", "time", "between", "peak")
        ]
    gaps = {line.split(" | ")[0][2:]: line for line in figures.TABLES["gaps"]().splitlines() if "gap " in line}
    for goal in figures._result("gap-cpu")["goals"]:
        assert gaps[goal["claim"].partition(":")[0]].endswith("**not reached** |") is not goal["reached"]


VERDICT = re.compile(r"\b(reached|exact|none)\b", re.IGNORECASE)
FIGURE = re.compile(r"\bgoals?\b|\d ?%|\d ?[KMGT]i?B\b|\b\d+ of \d", re.IGNORECASE)
ONLY_FIGURES = re.compile(r"[+-]?\d[\d.,]*( ?(%|x|[mun]?s|[KMGT]i?B))?")


def by_hand(page: Path) -> Iterator[str]:
    """The sentences and the rows of tables of a page that no result makes, without code."""
    text = BLOCK.sub("", FENCED.sub("", page.read_text("utf-8")))
    text = re.sub(r"`[^`]*`", "", re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE))
    for part in re.split(r"\n\s*\n", text):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        prose = " ".join(line.strip() for line in part.splitlines() if not line.startswith("|"))
        yield from [*rows, *re.split(r"(?<=[.;:!?])\s+", prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_verdicts_are_those_of_results(page: Path) -> None:
    """No sentence that is typed says of a goal or a figure that it is reached, exact or none: results say so."""
    assert [said for said in by_hand(page) if VERDICT.search(said) and FIGURE.search(said)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_of_figures_are_made(page: Path) -> None:
    """No row of a table that is typed has two cells that are figures and nothing else."""
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in by_hand(page) if row.startswith("|"))
    assert [row for row in cells if sum(bool(ONLY_FIGURES.fullmatch(cell)) for cell in row) > 1] == []


def test_typed_verdicts_and_tables_are_found(tmp_path: Path) -> None:
    """What these tests look for is found in what pages had, and code, made tables and plain words are not."""
    page = tmp_path / "page.md"
    page.write_text(
        "The goals, 2 %\nand 4 %, are reached.\nPeaks are exact to 0.3 %; it reached an end. `none 4 %`\n\n"
        "| budget | adds |\n|---|---|\n| 10 % | 1.3 % |\n\n"
        "<!-- figures: gaps -->\nA goal of 2 % is reached.\n<!-- end of figures -->\n",
        encoding="utf-8",
    )
    found = [said for said in by_hand(page) if VERDICT.search(said) and FIGURE.search(said)]
    assert found == ["The goals, 2 % and 4 %, are reached.", "Peaks are exact to 0.3 %;"]
    with pytest.raises(AssertionError):
        test_tables_of_figures_are_made(page)


def test_there_are_as_many_tests_as_a_page_says(tool: ModuleType, request: pytest.FixtureRequest) -> None:
    """The tables have the rows, and the files that are run whole the tests, that are counted there, or more."""
    counting = importlib.import_module("count_tests")
    option: Any = request.config.option
    found = counting.in_tables()
    if not (option.keyword or option.markexpr or any("::" in word for word in request.config.args)):
        found |= counting.in_groups(item.path for item in request.session.items)
    counts = json.loads(counting.COUNTS.read_text("utf-8"))["counts"]
    assert {name: count for name, count in found.items() if count < counts[name]} == {}


def test_figures_of_the_readme_are_made() -> None:
    """Outside of marked tables and of code, the README holds no figure with a unit."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert "<!-- figures: saves -->" in text
    text = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", FENCED.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"\d\s*(%|[kKMGT]i?B|[mun]?s\b|x\b|times)", text)


def test_the_times_are_of_this_quick_start(tool: ModuleType) -> None:
    """The table of times has each command of the quick start, each output is there, and so are the pictures."""
    parts = list(importlib.import_module("first_minutes").parts())
    page = (DOCS / "quick-start.md").read_text("utf-8")
    times = page.partition("<!-- figures: first_minutes -->")[2].partition("<!-- end of figures -->")[0]
    assert [text for kind, text in parts if kind == "shell" and f"| `{text}` |" not in times] == []
    assert [text for kind, text in parts if kind == "output" and not text] == []
    assert sum(kind == "python" for kind, _ in parts) >= 4
    for picture in re.findall(r"\]\((pictures/.+?)\)", page):
        assert (DOCS / picture).read_bytes().startswith(b"\x89PNG"), "make first-minutes"


def test_quotes_are_of_real_errors() -> None:
    """What `docs/troubleshooting.md` quotes in italics, between its dots, is part of a text that the tests pin."""
    texts = "\n".join(text for _, text, _ in ROWS)
    text = re.sub(r"`[^`]*`", "", FENCED.sub("", (DOCS / "troubleshooting.md").read_text("utf-8")))
    quotes = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", re.sub(r"\s+", " ", text))
    parts = [part.strip() for quote in quotes for part in quote.split("...") if len(part.strip()) > 3]
    assert len(parts) > 20
    assert not [part for part in parts if part not in texts]


def test_the_api_page_is_complete() -> None:
    """Each entry of the API page names something that exists, and each public name has an entry."""
    entries = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    for entry in entries:
        module, _, name = entry.rpartition(".")
        if "integrations" not in module:  # their libraries need not be installed
            assert hasattr(importlib.import_module(module), name), entry
    assert len(entries) == len(set(entries))
    assert {entry.rpartition(".")[2] for entry in entries} >= set(torch_recompute.__all__) - {"state"}


def _pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from _pages_of(value) if isinstance(value, list) else [value]


def test_the_manual_holds_every_page() -> None:
    """The contents of the manual name each page and notebook of `docs/` but design notes once, and nothing else."""
    contents = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "design")
    notebooks = [path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.rglob("*.ipynb")]
    assert sorted(_pages_of(contents["nav"])) == sorted(pages + notebooks)
    assert contents["not_in_nav"].split() == ["/design/"]
    assert "(docs/design/)" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert contents["strict"] is True


def test_the_manual_needs_no_network() -> None:
    """Nothing in its configuration is fetched from elsewhere, when it is built or read."""
    contents = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert contents["theme"]["font"] is False  # else Google's
    named = {next(iter(plugin)) if isinstance(plugin, dict) else plugin for plugin in contents["plugins"]}
    assert named == {"search", "mkdocstrings", "redirects"}  # `offline` and `privacy` download
    texts = [path.read_text("utf-8") for path in (ROOT / "mkdocs.yml", *DOCS.rglob("*.css"))]
    texts[0] = texts[0].replace(f"site_url: {contents['site_url']}", "")  # where it will be, which names the pages
    assert not [text for text in texts if re.search(r"https?://|@import", text)]


@pytest.mark.parametrize("name", ["region", "saved-call", "discard", "carry", "step"])
def test_picture_is_small_and_readable(name: str) -> None:
    """A picture is a few KB of SVG with a title, colours for light and dark, and no text beyond its edge."""
    text = (DOCS / "pictures" / f"{name}.svg").read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert len(text) < 8000
    assert root.findtext("{*}title")
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for words in root.findall("{*}text"):
        half = 4 * len(words.text or "")  # a letter of 14 px is about 8 wide
        start = float(words.attrib["x"]) - {"start": 0, "middle": half, "end": 2 * half}[words.attrib["text-anchor"]]
        assert start >= 0
        assert start + 2 * half <= float(root.attrib["width"])
