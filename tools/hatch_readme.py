"""The readme that an index of packages shows: README.md, whose links lead to the repository.

A code host finds `docs/guide.md` beside the page; an index does not have the repository and shows a dead link. So the
build writes `Homepage` of `[project.urls]` before each link that is relative, and for a picture where its bytes are.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:)")


class Readme(MetadataHookInterface):
    """Fills in `readme`, which `pyproject.toml` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the text to the metadata of both archives."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        home = metadata["urls"]["Homepage"]
        text = PICTURE.sub(rf"\1{home}/raw/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE.sub(rf"{home}/blob/main/\1", text)}
