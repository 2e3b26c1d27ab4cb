"""The documentation: its code runs, its links lead somewhere, and its lists are complete."""

import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_recompute
from support.files import module_at

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# Packages that not every machine of tests has.
OF_OTHERS = {
    *("transformers", "accelerate", "peft", "trl", "datasets", "tokenizers", "lightning", "diffusers"),
    *("timm", "torchtitan", "deepspeed"),
}

# Pages whose code takes seconds.
LONG_PAGES = {
    *("docs/index.md", "docs/plan.md", "docs/compile.md", "docs/distributed.md", "docs/elastic.md"),
    *("docs/huggingface.md", "docs/solved/budgets-with-dropout.md"),
}


def page_name(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def pages_with_code() -> Iterator[Any]:
    """Yields the pages with Python in them, those that take seconds for the nightly run."""
    for page in PAGES:
        if BLOCK.search(page.read_text(encoding="utf-8")):
            long = page_name(page) in LONG_PAGES or page.parent.name == "integrations"
            yield pytest.param(page, marks=pytest.mark.nightly if long else (), id=page_name(page))


each_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in BLOCK.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def no_process_group() -> Iterator[None]:
    """Ends the process group that a page has started."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", [*pages_with_code()])
@pytest.mark.usefixtures("no_process_group")
def test_code_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of a page run from top to bottom, without a warning, and what is said of output is so."""
    imported = {name for _, code in blocks(page) for name in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)}
    missing = [name for name in sorted(imported & OF_OTHERS) if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (see docs/integrations.md)")
    scope: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # What packages say of each other is not ours.
        warnings.simplefilter("ignore" if page.parent.name == "integrations" else "error")
        warnings.filterwarnings(
            "ignore", r".torch\.jit\.script_method. is deprecated", DeprecationWarning
        )  # torch's own
        warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec", FutureWarning)  # torch's own, in its copies
        warnings.filterwarnings("ignore", "OnHost: torch sees no CUDA device", RuntimeWarning)  # which is so in tests
        for line, code in blocks(page):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), scope)
            printed = capsys.readouterr().out
            for said in re.findall(r"print\(.*?\) +# (.+?) \.\.\.$", code, re.MULTILINE):
                assert printed.startswith(said)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """A link inside the repository names a file that is there and a heading that it has."""
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_pages_speak_of_what_is_there(page: Path) -> None:
    """Each name that a page imports from the package, or writes with its prefix, exists."""
    text = page.read_text(encoding="utf-8")
    for module, names in re.findall(r"from (torch_recompute[\w.]*) import ([\w, ]+)", text):
        for name in names.split(","):
            found = hasattr(importlib.import_module(module), name.strip())
            assert found or importlib.util.find_spec(f"{module}.{name.strip()}"), name
    for dotted in re.findall(r"torch_recompute\.([\w.]+)", text):
        first = dotted.strip(".").split(".")[0]
        assert hasattr(torch_recompute, first) or importlib.util.find_spec(f"torch_recompute.{first}"), dotted


def test_every_public_name_is_documented() -> None:
    """Each name of `__all__` is found on a page."""
    if not (ROOT / "docs").is_dir():
        pytest.skip("the documentation is not part of this archive")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    unsaid = {name for name in torch_recompute.__all__ if not re.search(rf"\b{name}\b", text)}
    # Synonyms and protocols, described with the things that they are for.
    assert unsaid <= {"is_recomputing"}


def test_every_exception_of_the_conformance_run_is_listed() -> None:
    """`docs/compatibility.md` lists exactly the tests of PyTorch that `tools/torch_conformance.py` leaves out."""
    tool, page = ROOT / "tools" / "torch_conformance.py", ROOT / "docs" / "compatibility.md"
    if not (tool.is_file() and page.is_file()):
        pytest.skip("the tool and the documentation are not part of this archive")
    listed = re.findall(r"^\| `(test_\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(module_at(tool).EXCEPTIONS)


def test_the_readme_begins_with_what_one_needs() -> None:
    """The first screen holds both commands, the installation and a short example; the licence is named."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = "\n".join(text.splitlines()[:50])
    assert all(words in first for words in ("make demo", "make test", "pip install", "```python"))
    assert len(blocks(ROOT / "README.md")[0][1].splitlines()) <= 16
    assert "Apache-2.0" in text


# Words of an older dialect of these pages, which a reader has to guess at. `stand for` and `stand in for` are English.
DIALECT = re.compile(
    r"\b(dear|anew|whoever|hand(?:s|ed)? out|what of|lies?|stood|stands?(?!-in| for| in for))\b", re.IGNORECASE
)


def test_the_words_are_those_of_the_field() -> None:
    """The glossary has fifteen terms at most, each is used on other pages, and no page has words of the old dialect."""
    text = {page: FENCED.sub("", page.read_text(encoding="utf-8")) for page in PAGES if "design" not in page.parts}
    assert {page.name: found for page, words in text.items() if (found := DIALECT.findall(words))} == {}
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", text[ROOT / "docs" / "glossary.md"], re.MULTILINE)
    assert 10 <= len(terms) <= 15
    used = {term: [page for page, words in text.items() if term.lower() in words.lower()] for term in terms}
    assert [term for term, pages in used.items() if len(pages) < 2] == []
