"""The page of a run in a real browser without a network. `make test-extras` installs what it needs but the browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from dtmega import __main__ as dtmega
from tests.report.test_page import HOSTILE, scored, start, step_line, write
from tests.report.test_profiles import profiled

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-extras)")
pytest.importorskip("plotly", reason="plotly is not installed (pip install -e '.[report]')")
Image: Any = pytest.importorskip("PIL.Image", reason="pillow is not installed (make test-extras)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)


class Opened(NamedTuple):
    """A page as it is in the browser: what it asked for, what went wrong, and itself, to be looked into."""

    page: Any
    requests: list[str]
    errors: list[str]


def wait_for(page: Any, expression: str) -> None:
    """Wait until this is true in the page, for a minute. playwright's own waiting would need 'unsafe-eval'."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never true: {expression}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return [step_line(step) for step in range(1, 41)]


@pytest.fixture(scope="module")
def opened(browser: Any, lines: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Two runs compared: one of a hostile name that was restarted, and another one."""
    folder = tmp_path_factory.mktemp("report")
    first = write(folder / HOSTILE.replace("/", "\\"), [*lines, {"step": 20, "val_loss": 3.5}])
    (first / "sample.json").write_text(json.dumps({"step": 40, "text": HOSTILE}))
    for step in (20, 40):
        scored(first, step, HOSTILE)
    (first / "exit.json").write_text(json.dumps({"code": 75, "reason": HOSTILE, "step": 40, "checkpoint": HOSTILE}))
    start(first, 0, tp=2)
    start(first, 20, pp=2)
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
    operator = {"name": kernel, "calls": 12_345, "self_s": 1.0, "self_device_s": 1.0}
    for rank in (0, 1):
        profiled(first, 20, rank, device="cuda", operators=[operator] * 12)
    write(folder / "other", lines[:20])
    assert dtmega.main(["report", str(first), str(folder / "other"), "--output", str(folder / "page.html")]) == 0
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 1600})
    page, requests, errors = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto((folder / "page.html").as_uri())
    wait_for(page, "document.querySelectorAll('.main-svg').length >= 4")
    return Opened(page, requests, errors)


def test_the_page_is_drawn_and_asks_nobody_for_anything(opened: Opened):
    assert opened.page.locator("#curves .main-svg").count() > 0
    assert opened.page.locator("#tail .main-svg").count() > 0
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert opened.requests[0].endswith("page.html")
    assert opened.errors == []


def test_what_one_hovers_over_is_what_stands_in_the_file(opened: Opened, lines: list[dict[str, Any]]):
    panel = opened.page.locator("#curves .draglayer .xy .nsewdrag")
    panel.scroll_into_view_if_needed()
    drawn = panel.bounding_box()
    opened.page.mouse.move(drawn["x"] + 0.4 * drawn["width"], drawn["y"] + 0.5 * drawn["height"])
    read = "Array.from(document.getElementById('curves')._hoverdata || [], point => [point.x, point.y])"
    wait_for(opened.page, f"{read}.length > 0")
    hovered = opened.page.evaluate(read)
    losses = {line["step"]: line["loss"] for line in lines}
    (step,) = {step for step, _ in hovered}
    assert [step, losses[step]] in hovered


def test_names_are_shown_letter_by_letter(opened: Opened):
    said = opened.page.locator("#curves .legendtext").all_text_contents()
    assert HOSTILE.replace("/", "\\")[:39] + "…" in said
    assert opened.page.locator("img, #curves a[href*='alert']").count() == 0
    assert HOSTILE in opened.page.locator("pre.sample").all_text_contents()


def test_a_link_to_a_trace_leads_to_its_file(opened: Opened):
    links = opened.page.evaluate("Array.from(document.querySelectorAll('a[href$=gz]'), link => link.href)")
    assert [Path(unquote(urlsplit(link).path)).stat().st_size for link in links] == [20, 21]


def test_the_bar_of_phases_is_filled_by_their_shares(opened: Opened):
    bar = opened.page.locator(".bar").first
    whole = bar.bounding_box()["width"]
    shares = [phase.bounding_box()["width"] / whole for phase in bar.locator("span").all()]
    assert shares == pytest.approx([0.0625, 0.5, 0.1875, 0.25], abs=0.01)


def test_a_script_that_is_not_the_pages_own_does_not_run(opened: Opened):
    ran = opened.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.body.append(script);
            return window.injected === true;
        }"""
    )
    assert not ran
    opened.errors.clear()  # the browser says that it has refused


def test_the_figure_can_be_taken_as_a_picture_under_the_policy(opened: Opened):
    url = opened.page.evaluate("Plotly.toImage('curves', {format: 'png', width: 300, height: 300})")
    assert url.startswith("data:image/png;base64,")


@pytest.mark.parametrize("width", [390, 1000, 1400])
def test_nothing_is_wider_than_the_window(opened: Opened, width: int):
    opened.page.set_viewport_size({"width": width, "height": 1200})
    wait_for(opened.page, f"document.documentElement.scrollWidth <= {width}")
    n_columns = 1 if width == 390 else 2
    starts = "new Set(['xaxis3', 'xaxis4'].map(name => document.getElementById('curves')._fullLayout[name].domain[0]))"
    wait_for(opened.page, f"{starts}.size == {n_columns}")
    # plotly draws the figure anew some time after the window has changed.
    place = "document.getElementById('curves')"
    wait_for(opened.page, f"{place}.querySelector('.main-svg').clientWidth == {place}.clientWidth")
    box = opened.page.locator("#curves .main-svg").first.bounding_box()
    assert box["x"] + box["width"] <= width
    titles = [title.bounding_box() for title in opened.page.locator("#curves .annotation-text").all()]
    assert len(titles) == 9  # loss, events, six numbers, a score
    assert all(title["x"] + title["width"] <= width for title in titles)
    assert len({round(title["x"]) for title in titles}) == n_columns


def test_no_short_word_of_a_table_is_broken_on_a_phone(opened: Opened):
    opened.page.set_viewport_size({"width": 390, "height": 1200})
    broken = opened.page.evaluate(
        r"""() => {
            const found = [];
            for (const cell of document.querySelectorAll("td, th, summary, .number, .verdict")) {
                const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
                while (texts.nextNode())
                    for (const word of texts.currentNode.data.matchAll(/[\p{L}\d]{2,12}/gu)) {
                        const range = document.createRange();
                        range.setStart(texts.currentNode, word.index);
                        range.setEnd(texts.currentNode, word.index + word[0].length);
                        if (range.getClientRects().length > 1) found.push(word[0]);
                    }
            }
            return found;
        }"""
    )
    assert broken == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_and_drawn_stands_out_from_its_ground(opened: Opened, scheme: str):
    opened.page.emulate_media(color_scheme=scheme)
    for place in ("#curves", ".verdict"):
        grey = Image.open(BytesIO(opened.page.locator(place).first.screenshot())).convert("L")
        ground = grey.getpixel((1, 1))
        darkest, brightest = grey.getextrema()
        assert isinstance(ground, int)
        assert (ground > 200) == (scheme == "light")
        assert max(brightest - ground, ground - darkest) > 150
    opened.page.emulate_media(color_scheme="light")


def test_zooming_into_one_panel_moves_the_steps_of_all(opened: Opened):
    opened.page.evaluate("Plotly.relayout('curves', {'xaxis3.range': [5, 15]})")
    ranges = opened.page.evaluate(
        "Object.entries(document.getElementById('curves')._fullLayout)"
        ".filter(([key]) => /^xaxis\\d*$/.test(key)).map(([, axis]) => axis.range)"
    )
    assert len(ranges) == 9  # loss, events, six numbers, a score
    assert all(json.dumps(found) == json.dumps([5, 15]) for found in ranges)
