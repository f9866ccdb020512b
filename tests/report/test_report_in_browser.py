"""The report of a real run in a real browser: no errors, no requests, and every control does what it says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page

from patchmix.evaluate import knn
from patchmix.interop.loading import load_backbone
from patchmix.report.curves import read_history
from patchmix.report.gallery import load_gallery, open_images
from patchmix.report.page import report
from patchmix.settings import Report

IMAGES = 120


@pytest.fixture(scope="module")
def file(run: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "r.html"
    return report(Report((run, other), out, images=IMAGES, device="cpu"))


@pytest.fixture(scope="module")
def truth(run: Path, other: Path) -> list[list[list[int]]]:
    """For each run and image the neighbors that kNN's own ranking gives."""
    backbones = [load_backbone(run), load_backbone(other)]
    gallery = load_gallery(backbones, "shapes:64", IMAGES, device="cpu")
    return [
        knn.nearest(vectors, torch.nn.functional.normalize(vectors, dim=1), 20, first=0)[1].tolist()
        for _, vectors in gallery.runs
    ]


class Tab:
    """A report in the browser, with the addresses that it requested and the errors of its console."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url[:200]))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning", "assert") else None)
        page.on("dialog", lambda dialog: (self.errors.append(f"a dialog: {dialog.message}"), dialog.accept()))
        page.goto(file.as_uri())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.page.evaluate(script)

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript expression is true. (`wait_for_function` repeats it by `eval`, which the page forbids.)"""
        for _ in range(200):
            if self.run(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"after 10 s it is still not so: {condition}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.text_content() or ""

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A point of an element in the window, after scrolling it there; x and y are shares of its size."""
        target = self.page.locator(selector).first
        target.evaluate("(e) => e.scrollIntoView({block: 'center', behavior: 'instant'})")
        box = target.bounding_box()
        assert box is not None
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    def hover(self, selector: str, x: float = 0.5) -> None:
        self.page.mouse.move(*self.point(selector, x))

    def click(self, selector: str) -> None:
        self.page.mouse.click(*self.point(selector))

    def drag(self, selector: str, start: float, end: float) -> None:
        self.page.mouse.move(*self.point(selector, start))
        self.page.mouse.down()
        self.page.mouse.move(*self.point(selector, end))
        self.page.mouse.up()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def neighbors(self, run: int) -> list[int]:
        buttons = f"document.querySelectorAll('[data-run=\"{run}\"] .neighbors button')"
        found: list[int] = self.run(f"[...{buttons}].map((b) => Number(b.dataset.image))")
        return found

    def check_clean(self) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("data:", "file:"))] == []
        assert len([url for url in self.requests if url.startswith("file:")]) == 1


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    pages: list[Page] = []

    def open_tab(file: Path, *, width: int = 1280, dark: bool = False) -> Tab:
        scheme = "dark" if dark else "light"
        viewport = {"width": width, "height": 900}
        # Smooth scrolling would move targets under a click.
        pages.append(browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce"))
        return Tab(pages[-1], file)

    yield open_tab
    for page in pages:
        page.close()


@pytest.fixture
def tab(open_tab: Callable[..., Tab], file: Path) -> Tab:
    return open_tab(file)


@pytest.mark.parametrize("width", [400, 1280, 2200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_clean_at_every_width(open_tab: Callable[..., Tab], file: Path, width: int, dark: bool) -> None:
    tab = open_tab(file, width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert tab.run("document.querySelectorAll('.thumbs button').length") == IMAGES
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark
    tab.point(".thumbs")  # images load when they come into view
    loaded = "[...document.querySelectorAll('.thumbs img')].slice(0, 5).every((i) => i.naturalWidth === 64)"
    tab.wait_for(loaded)
    tab.check_clean()


def test_hovering_a_curve_shows_its_value(tab: Tab, run: Path) -> None:
    tab.hover('[data-panel="oto"] svg', 0.98)
    readout = tab.text('[data-panel="oto"] .readout')
    last = read_history(run).last("oto")
    assert f"epoch 2: tiny {last:.4g}".removesuffix("0") in readout and "chance 3.466" in readout
    tab.hover("h1")
    assert tab.text('[data-panel="oto"] .readout') == ""


def test_zoom_toggle_axis_and_smoothing(tab: Tab) -> None:
    places = "document.querySelectorAll('[data-panel=\"lr\"] text[text-anchor=middle]')"
    ticks = f"[...{places}].map((t) => t.textContent).join()"
    whole = tab.run(ticks)
    tab.drag('[data-panel="oto"] svg', 0.3, 0.6)
    assert tab.run(ticks) != whole  # all panels zoom together
    tab.run("document.querySelector('[data-panel=\"lr\"] svg').focus()")
    tab.press("Escape")
    assert tab.run(ticks) == whole
    curves = "document.querySelectorAll('[data-panel=\"oto\"] .curve').length"
    assert tab.run(curves) == 1
    tab.click(".legend button")
    assert tab.run(curves) == 0
    assert tab.run("document.querySelector('.legend button').ariaPressed") == "false"
    tab.click(".legend button")
    tab.page.select_option("#curves select", "images")
    tab.page.fill("#curves input[type=range]", "0.5")
    assert tab.run(curves) == 2  # raw and smoothed
    tab.hover('[data-panel="lr"] svg', 0.98)
    assert "images seen 128:" in tab.text('[data-panel="lr"] .readout')
    tab.check_clean()


def test_curves_by_keyboard(tab: Tab, run: Path) -> None:
    tab.run("document.querySelector('[data-panel=\"knn\"] svg').focus()")
    values = [row["knn"] for row in read_history(run).rows if row.get("knn") is not None]
    for value in values[:2]:
        tab.press("ArrowRight")
        readout = tab.text('[data-panel="knn"] .readout')
        assert f"tiny {100 * value:.4g}" in readout
    tab.press("ArrowLeft")
    assert "epoch 0:" in tab.text('[data-panel="knn"] .readout')


def test_clicking_a_thumbnail_gives_the_neighbors_of_knn(tab: Tab, truth: list) -> None:
    for query in (0, 3, 57, IMAGES - 1):
        tab.click(f'.thumbs button[data-image="{query}"]')
        for run in (0, 1):
            assert tab.neighbors(run) == truth[run][query][:10]
    for query in range(IMAGES):  # every image, by the same handler
        tab.run(f"document.querySelector('.thumbs button[data-image=\"{query}\"]').click()")
        assert [tab.neighbors(run) for run in (0, 1)] == [truth[run][query][:10] for run in (0, 1)]
    tab.check_clean()


def test_a_neighbor_becomes_the_query_and_charts_follow(tab: Tab, truth: list) -> None:
    tab.click('[data-run="0"] .neighbors button')
    first = truth[0][0][0]
    assert tab.neighbors(0) == truth[0][first][:10]
    assert tab.run("document.querySelector('.thumbs [aria-pressed=true]').dataset.image") == str(first)
    counts = tab.run(
        "[...document.querySelectorAll('[data-run=\"0\"] .histogram li span:last-child')].map((s) => +s.textContent)"
    )
    labels = open_images("shapes:64", IMAGES).labels
    assert labels is not None
    assert sorted(counts) == sorted(np.unique(labels[truth[0][first][:10]], return_counts=True)[1].tolist())
    common = len(set(truth[0][first][:10]) & set(truth[1][first][:10]))
    status = tab.text("#explorer .explorer [role=region] [role=status]")
    assert f"The runs agree on {common} of 10." in status
    assert tab.run("document.querySelectorAll('[data-run=\"0\"] .charts rect').length") == 10


def test_a_click_on_the_map_chooses_the_image_there(tab: Tab, truth: list) -> None:
    assert tab.run("document.querySelectorAll('[data-run=\"0\"] .dot').length") == IMAGES
    assert tab.run("document.querySelectorAll('[data-run=\"0\"] .dot-near').length") == 10
    tab.click('[data-run="0"] .dot-near')  # rings stand in the order of the neighbors
    chosen = int(tab.run("document.querySelector('.thumbs [aria-pressed=true]').dataset.image"))
    places = tab.run("JSON.parse(document.getElementById('data').textContent).explorer.runs[0].map")
    nearest = truth[0][0][0]
    assert places[2 * chosen : 2 * chosen + 2] == pytest.approx(places[2 * nearest : 2 * nearest + 2], abs=0.01)
    assert tab.neighbors(0) == truth[0][chosen][:10]
    assert chosen != 0


def test_search_by_class(tab: Tab) -> None:
    source = open_images("shapes:64", IMAGES)
    assert source.labels is not None and source.classes is not None
    tab.page.fill('#explorer input[type="search"]', "star")
    visible = "[...document.querySelectorAll('.thumbs button')].filter((b) => !b.hidden).map((b) => +b.dataset.image)"
    stars = np.flatnonzero(source.labels == source.classes.index("star")).tolist()
    assert tab.run(visible) == stars
    assert tab.text("#explorer .note[role=status]") == f"{len(stars)} of 120 images"


def test_the_explorer_by_keyboard(tab: Tab, truth: list) -> None:
    focused = "Number(document.activeElement.dataset.image ?? -1)"
    tab.run("document.querySelector('.thumbs button').focus()")
    tab.press("ArrowRight", "ArrowRight")
    assert tab.run(focused) == 2
    tab.press("Enter")
    assert tab.neighbors(0) == truth[0][2][:10]
    tab.press("ArrowDown")
    columns = tab.run(focused) - 2
    assert columns > 2
    tab.press("ArrowUp")
    tab.press("ArrowLeft")
    assert tab.run(focused) == 1
    tab.press("Tab")  # the grid is one stop: the next is the first neighbor
    assert tab.run("document.activeElement.closest('.neighbors') !== null")
    tab.press("Shift+Tab")
    assert tab.run(focused) == 1


def test_every_control_and_picture_has_a_name(tab: Tab) -> None:
    nodes = tab.page.context.new_cdp_session(tab.page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "combobox", "searchbox", "slider", "checkbox", "link", "image", "img", "figure", "heading"}
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in roles - {"figure"}
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    assert tab.run(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); "
        "return ids.length === new Set(ids).size; })()"
    )


def test_theme_button_and_print(tab: Tab) -> None:
    before = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.run("getComputedStyle(document.body).backgroundColor") != before
    tab.page.emulate_media(media="print")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.querySelector('.thumbs')).display") == "none"
    assert tab.page.pdf().startswith(b"%PDF")


def test_an_encoder_without_training_has_an_explorer(open_tab: Callable[..., Tab], other: Path, tmp_path: Path) -> None:
    tab = open_tab(report(Report((other,), tmp_path / "o.html", data="shapes:64", images=12, device="cpu")))
    assert tab.run("document.querySelectorAll('.thumbs button').length") == 12
    assert tab.run("document.querySelector('#curves')") is None
    tab.check_clean()


def test_names_that_look_like_code_do_not_run(open_tab: Callable[..., Tab], run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "<b>bold<⁄b>"
    folder.mkdir(parents=True)
    other = tmp_path / "data" / "x' onload='alert(3)"
    other.mkdir()
    name = "<img src=x onerror=alert(1)>.png"
    for i in range(5):
        Image.fromarray(np.full((40, 40, 3), 40 * i, np.uint8)).save(folder / f"{i}{name}")
        Image.fromarray(np.full((40, 40, 3), 50 * i, np.uint8)).save(other / f"{i}.png")
    evil_run = tmp_path / "<svg onload=alert(2)>"
    shutil.copytree(run, evil_run)
    tab = open_tab(report(Report((evil_run,), tmp_path / "e.html", data=str(tmp_path / "data"), device="cpu")))
    tab.click(".thumbs button:nth-child(2)")
    assert name in tab.text(".query")
    assert tab.run("document.querySelectorAll('main b, [onload], [onerror]').length") == 0
    assert tab.text("h1") == "patchmix report: <svg onload=alert(2)>"
    tab.check_clean()
