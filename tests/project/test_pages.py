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
