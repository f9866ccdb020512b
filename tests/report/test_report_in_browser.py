"""The report of a real run in a real browser: no errors, no requests, and every control does what it says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Browser
from PIL import Image

from patchmix.evaluate import knn
from patchmix.interop.loading import load_backbone
from patchmix.report.curves import read_history
from patchmix.report.page import embedding, report
from patchmix.report.shown import open_shown, view

IMAGES = 120


@pytest.fixture(scope="module")
def page(run: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report([run, other], tmp_path_factory.mktemp("page") / "r.html", images=IMAGES, device="cpu")


@pytest.fixture(scope="module")
def truth(run: Path, other: Path) -> list[list[list[int]]]:
    """For each run and image the neighbours that kNN's own ranking gives."""
    viewed = view(open_shown("shapes:64", IMAGES), [load_backbone(run), load_backbone(other)], device="cpu")
    return [
        knn._nearest(vectors, torch.nn.functional.normalize(vectors, dim=1), 20, first=0)[1].tolist()
        for vectors in viewed.vectors
    ]


def shown(browser: Browser, run: int) -> list[int]:
    script = (
        f"[...document.querySelectorAll('[data-run=\"{run}\"] .neighbours button')].map((b) => Number(b.dataset.image))"
    )
    found: list[int] = browser.run(script)
    return found


def set_control(browser: Browser, selector: str, value: str, event: str) -> None:
    find = f"const control = document.querySelector({json.dumps(selector)})"
    browser.run(
        f"{{ {find}; control.value = {json.dumps(value)}; control.dispatchEvent(new Event({json.dumps(event)})); }}"
    )


def check_clean(browser: Browser) -> None:
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "file:"))] == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1


@pytest.mark.parametrize("width", [400, 1280, 2200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_clean_at_every_width(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert browser.run("document.querySelectorAll('.thumbs button').length") == IMAGES
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) is dark
    browser.place(".thumbs")  # images load when they come into view
    browser.wait("[...document.querySelectorAll('.thumbs img')].slice(0, 5).every((i) => i.naturalWidth === 64)")
    check_clean(browser)


def test_hovering_a_curve_shows_its_value(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    browser.hover('[data-panel="oto"] svg', 0.98)
    readout = browser.run("document.querySelector('[data-panel=\"oto\"] .readout').textContent")
    last = read_history(run).points("oto")[1][-1]
    assert f"epoch 2: tiny {last:.4g}".removesuffix("0") in readout and "chance 3.466" in readout
    browser.hover("h1")
    assert browser.run("document.querySelector('[data-panel=\"oto\"] .readout').textContent") == ""


def test_zoom_toggle_axis_and_smoothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    places = "document.querySelectorAll('[data-panel=\"lr\"] text[text-anchor=middle]')"
    ticks = f"[...{places}].map((t) => t.textContent).join()"
    whole = browser.run(ticks)
    browser.drag('[data-panel="oto"] svg', 0.3, 0.6)
    assert browser.run(ticks) != whole  # all panels zoom together
    browser.run("document.querySelector('[data-panel=\"lr\"] svg').focus()")
    browser.press("Escape")
    assert browser.run(ticks) == whole
    curves = "document.querySelectorAll('[data-panel=\"oto\"] .curve').length"
    assert browser.run(curves) == 1
    browser.click(".legend button")
    assert browser.run(curves) == 0
    assert browser.run("document.querySelector('.legend button').ariaPressed") == "false"
    browser.click(".legend button")
    set_control(browser, "#curves select", "images", "change")
    set_control(browser, "#curves input[type=range]", "0.5", "input")
    assert browser.run(curves) == 2  # raw and smoothed
    browser.hover('[data-panel="lr"] svg', 0.98)
    assert "images seen 128:" in browser.run("document.querySelector('[data-panel=\"lr\"] .readout').textContent")
    check_clean(browser)


def test_curves_by_keyboard(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('[data-panel=\"knn\"] svg').focus()")
    values = read_history(run).points("knn")[1]
    for value in values[:2]:
        browser.press("ArrowRight")
        readout = browser.run("document.querySelector('[data-panel=\"knn\"] .readout').textContent")
        assert f"tiny {100 * value:.4g}" in readout
    browser.press("ArrowLeft")
    assert "epoch 0:" in browser.run("document.querySelector('[data-panel=\"knn\"] .readout').textContent")


def test_clicking_a_thumbnail_gives_the_neighbours_of_knn(browser: Browser, page: Path, truth: list) -> None:
    browser.open(page)
    for query in (0, 3, 57, IMAGES - 1):
        browser.click(f'.thumbs button[data-image="{query}"]')
        for run in (0, 1):
            assert shown(browser, run) == truth[run][query][:10]
    for query in range(IMAGES):  # every image, by the same handler
        browser.run(f"document.querySelector('.thumbs button[data-image=\"{query}\"]').click()")
        assert [shown(browser, run) for run in (0, 1)] == [truth[run][query][:10] for run in (0, 1)]
    check_clean(browser)


def test_eight_bits_and_repairs_give_the_neighbours_of_knn(
    browser: Browser, run: Path, other: Path, truth: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "WIDE_BYTES", 0)  # as if the page had too many bytes for 16 bits
    browser.open(report([run, other], tmp_path / "narrow.html", images=IMAGES, device="cpu"))
    packed = "JSON.parse(document.getElementById('data').textContent).explorer.runs[0]"
    assert browser.run(f"{packed}.bits") == 8
    assert len(browser.run(f"{packed}.repairs")) > 10
    for query in range(IMAGES):
        browser.run(f"document.querySelector('.thumbs button[data-image=\"{query}\"]').click()")
        assert [shown(browser, run) for run in (0, 1)] == [truth[run][query][:10] for run in (0, 1)]


def test_a_neighbour_becomes_the_query_and_charts_follow(browser: Browser, page: Path, truth: list) -> None:
    browser.open(page)
    browser.click('[data-run="0"] .neighbours button')
    first = truth[0][0][0]
    assert shown(browser, 0) == truth[0][first][:10]
    assert browser.run("document.querySelector('.thumbs [aria-pressed=true]').dataset.image") == str(first)
    counts = browser.run(
        "[...document.querySelectorAll('[data-run=\"0\"] .histogram li span:last-child')].map((s) => +s.textContent)"
    )
    labels = open_shown("shapes:64", IMAGES).labels
    assert labels is not None
    assert sorted(counts) == sorted(np.unique(labels[truth[0][first][:10]], return_counts=True)[1].tolist())
    common = len(set(truth[0][first][:10]) & set(truth[1][first][:10]))
    status = browser.run("document.querySelector('#explorer .explorer [role=region] [role=status]').textContent")
    assert f"The runs agree on {common} of 10." in status
    assert browser.run("document.querySelectorAll('[data-run=\"0\"] .charts rect').length") == 10


def test_a_click_on_the_map_chooses_the_image_there(browser: Browser, page: Path, truth: list) -> None:
    browser.open(page)
    assert browser.run("document.querySelectorAll('[data-run=\"0\"] .dot').length") == IMAGES
    assert browser.run("document.querySelectorAll('[data-run=\"0\"] .dot-near').length") == 10
    browser.click('[data-run="0"] .dot-near')  # rings stand in the order of the neighbours
    chosen = int(browser.run("document.querySelector('.thumbs [aria-pressed=true]').dataset.image"))
    places = browser.run("JSON.parse(document.getElementById('data').textContent).explorer.runs[0].map")
    nearest = truth[0][0][0]
    assert places[2 * chosen : 2 * chosen + 2] == pytest.approx(places[2 * nearest : 2 * nearest + 2], abs=0.01)
    assert shown(browser, 0) == truth[0][chosen][:10]
    assert chosen != 0


def test_search_by_class(browser: Browser, page: Path) -> None:
    browser.open(page)
    source = open_shown("shapes:64", IMAGES)
    assert source.labels is not None and source.classes is not None
    browser.click('#explorer input[type="search"]')
    browser.type("star")
    visible = "[...document.querySelectorAll('.thumbs button')].filter((b) => !b.hidden).map((b) => +b.dataset.image)"
    stars = np.flatnonzero(source.labels == source.classes.index("star")).tolist()
    assert browser.run(visible) == stars
    assert (
        browser.run("document.querySelector('#explorer .note[role=status]').textContent")
        == f"{len(stars)} of 120 images"
    )


def test_the_explorer_by_keyboard(browser: Browser, page: Path, truth: list) -> None:
    browser.open(page)
    focused = "Number(document.activeElement.dataset.image ?? -1)"
    browser.run("document.querySelector('.thumbs button').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run(focused) == 2
    browser.press("Enter")
    assert shown(browser, 0) == truth[0][2][:10]
    browser.press("ArrowDown")
    columns = browser.run(focused) - 2
    assert columns > 2
    browser.press("ArrowUp")
    browser.press("ArrowLeft")
    assert browser.run(focused) == 1
    browser.press("Tab")  # the grid is one stop: the next is the first neighbour
    assert browser.run("document.activeElement.closest('.neighbours') !== null")
    browser.press("Tab", shift=True)
    assert browser.run(focused) == 1


def test_every_control_and_picture_has_a_name(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "combobox", "searchbox", "slider", "checkbox", "link", "image", "img", "figure", "heading"}
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in roles - {"figure"}
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    assert browser.run(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); "
        "return ids.length === new Set(ids).size; })()"
    )


def test_theme_button_and_print(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.thumbs')).display") == "none"
    assert browser.pdf().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="")


def test_names_that_look_like_code_do_not_run(browser: Browser, run: Path, tmp_path: Path) -> None:
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
    page = report([evil_run], tmp_path / "e.html", data=str(tmp_path / "data"), device="cpu")
    browser.open(page)
    browser.click(".thumbs button:nth-child(2)")
    assert name in browser.run("document.querySelector('.query').textContent")
    assert browser.run("document.querySelectorAll('main b, [onload], [onerror]').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == "patchmix report: <svg onload=alert(2)>"
    check_clean(browser)
