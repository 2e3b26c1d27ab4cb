"""What lets one set of pages be read on a code host and in the manual that mkdocs builds.

Two things differ. A code host makes the anchor of a heading by replacing each blank by a hyphen, and Python's Markdown
by collapsing them. And a link may leave `docs/` there (to an example, a result of a benchmark), which a site cannot:
such files are taken into the site, under `repository/`, and the links lead to them. A code host also draws notebooks;
the site has a page of each, with the outputs that are in it.
"""

# pyright: reportMissingImports=false
# The tools of the manual are in an extra of their own (`docs`).
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

LEAVES = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)")
NOTEBOOK = re.compile(r"(\]\([^)\s#]+)\.ipynb(?=\))")
FOLDER = "repository"


def on_config(config: Any) -> None:
    """Makes anchors as code hosts do."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")


def _outside(page: File, link: str, docs: Path) -> Path | None:
    """The file that a link of a page names, if it is in the repository and not in `docs/`."""
    target = (docs / page.src_uri).parent.joinpath(link).resolve()
    within = target.is_relative_to(docs.parent) and not target.is_relative_to(docs)
    return target.relative_to(docs.parent) if within and target.is_file() else None


def _shown(output: dict[str, Any]) -> str:
    """An output of a cell as Markdown."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```"


def _page_of(notebook: Path) -> str:
    """A notebook as Markdown."""
    parts: list[str] = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(_shown, cell.get("outputs", []))
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Makes a page of each notebook, and takes the files that pages link to, outside of `docs/`, into the site."""
    docs = Path(config.docs_dir)
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = notebook.src_uri.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=_page_of(docs / notebook.src_uri)))
    for page in list(files.documentation_pages()):
        for match in LEAVES.finditer(page.content_string):
            path = _outside(page, match[2], docs)
            if path is None:
                continue
            name = f"{FOLDER}/{path.as_posix()}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(docs.parent / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads the links that leave `docs/` to where the site has those files; the search leaves design notes out."""
    if page.file.src_uri.startswith("design/"):
        page.meta["search"] = {"exclude": True}
    docs = Path(config.docs_dir)

    def replace(match: re.Match[str]) -> str:
        path = _outside(page.file, match[2], docs)
        up = "../" * page.file.src_uri.count("/")
        return match[0] if path is None else f"{match[1]}{up}{FOLDER}/{path.as_posix()}"

    return NOTEBOOK.sub(r"\1.md", LEAVES.sub(replace, markdown))
