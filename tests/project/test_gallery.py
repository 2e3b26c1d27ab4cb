"""The gallery: its examples run, lower the peak, keep the loss, and end in a picture that its page shows."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^!\[.+\]\((pictures/gallery/(\w+)\.svg)\)\n\n    (.+)\n", re.MULTILINE)

# The smallest sizes, and the packages of others that an example needs.
EXAMPLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lora": ({"layers": 6, "width": 64, "tokens": 64, "device": "h100"}, ("transformers", "peft")),
    "vit": ({"layers": 2, "width": 24, "images": 2, "device": "h100"}, ("transformers",)),
    "unet": ({"size": 16, "channels": 8, "images": 2, "device": "h100"}, ("diffusers",)),
    "experts": ({"layers": 2, "width": 32, "tokens": 64}, ("transformers",)),
    "long_context": ({"layers": 2, "width": 16, "tokens": 128, "vocabulary": 256}, ()),
    "elastic": ({"layers": 3, "width": 16, "lengths": (8, 8, 128, 16, 64)}, ()),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run of an example trains the same and has a lower peak than the first, and the picture names them all."""
    sizes, packages = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "examples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what packages of others say of each other
        runs = importlib.import_module(name).main(tmp_path / "made.svg", **sizes)
    first, *others = runs.values()
    for run in others:
        assert run.losses == (pytest.approx(first.losses, rel=1e-5) if name == "long_context" else first.losses)
        assert run.peak < first.peak
    drawn = "".join(ElementTree.parse(tmp_path / "made.svg").getroot().itertext())
    printed = capsys.readouterr().out
    for kind, run in runs.items():
        figure = f"{kind}: {{}}{run.peak / 2**20:.1f} MiB"
        assert figure.format("") in drawn
        assert figure.format("peak ") in printed
    if most := re.search(r"at most ([\d.]+) MiB", drawn):
        assert [*runs.values()][1].peak <= (float(most.group(1)) + 0.05) * 2**20 < first.peak


def test_the_page_shows_every_example() -> None:
    """The page has each example's picture, which is small, and the command that its docstring gives."""
    shown = {name: (picture, command) for picture, name, command in SECTION.findall(PAGE)}
    assert shown.keys() == {*EXAMPLES, "fsdp2", "pipeline"}
    for name, (picture, command) in shown.items():
        assert (ROOT / "docs" / picture).stat().st_size < 2**14
        (source,) = re.findall(r"examples/\S+\.py", command)
        assert f"\n    {command}\n" in (ROOT / source).read_text(encoding="utf-8").split('"""')[1]
        assert f"(../{source})" in PAGE
        assert command.endswith(f" {name}.svg")
