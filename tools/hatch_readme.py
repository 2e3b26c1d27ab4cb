"""The readme that an index of packages shows: README.md, as a reader sees it who has no checkout.

A code host finds `docs/guide.md` beside the page; an index does not have the repository and shows a dead link. So the
build writes the repository's address before each link that is relative, at the tag of this version (a later commit may
move the file), and for a picture where its bytes are. What installs a checkout (`".[cli]"`) is written as what installs
the package.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:)")
CHECKOUT = re.compile(r'"\.(?=\[)')


class Readme(MetadataHookInterface):
    """Fills in `readme`, which `pyproject.toml` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the text to the metadata of both archives."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        home, tag = metadata["urls"]["Homepage"], f"v{metadata['version']}"
        text = CHECKOUT.sub(f'"{metadata["name"]}', text).replace("# from a checkout; ", "# ")
        text = PICTURE.sub(rf"\1{home}/raw/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE.sub(rf"{home}/blob/{tag}/\1", text)}
