"""The page of a profile in Chromium: boxes fit all screens, zoom, tell numbers, and are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import PHONE, Visit, open_browser, open_visits

from tidemill.client.worker_reports import flame_graph

DEEP = ["walk (shop.py:16)"] * 40
STACKS = {
    "thumbnail (shop.py:22);resize (shop.py:5)": 600,
    "invoice (shop.py:28);render (shop.py:13);render.<locals>.<lambda> (shop.py:14)": 280,
    "invoice (shop.py:28);render (shop.py:13)": 20,
    ";".join(["invoice (shop.py:28)", *DEEP]): 100,
}


@pytest.fixture
def visit(tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    title = "a-worker-with-a-very-long-name-on-a-machine-with-another:4711, 2026-11-26 10:20:44"
    page = flame_graph(STACKS, title, "1 process, 10 s, 1,000 looks, 1,000 samples of jobs")
    (tmp_path / "out.html").write_text(page)
    with open_browser() as browser, open_visits(browser, f"file://{tmp_path}") as visit:
        yield visit


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_profile_is_read_on_a_wide_screen_and_on_a_phone(
    visit: Callable[..., Visit], scheme: str
) -> None:
    for options in ({}, {"viewport": PHONE}):
        visitor = visit(color_scheme=scheme, **options)
        page = visitor.go("/out.html")
        # A box of few samples is narrow by its meaning; "Find" reaches it, too.
        assert [fault for fault in visitor.faults() if not fault.startswith("target-size")] == []
        heights = page.eval_on_selector_all("button", "all => all.map(one => one.offsetHeight)")
        assert min(heights) >= 24
        width = page.evaluate("window.innerWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # a box is as wide as its part of the samples
        whole = page.locator("#flames").bounding_box()
        for name, part in (("thumbnail", 0.6), ("invoice", 0.4), ("render (", 0.3)):
            box = page.locator("#flames button", has_text=name).first.bounding_box()
            assert box["width"] == pytest.approx(whole["width"] * part, abs=3)


def test_a_tap_on_a_box_zooms_and_says_its_numbers(visit: Callable[..., Visit]) -> None:
    page = visit(viewport=PHONE, has_touch=True).go("/out.html")
    render = page.locator("#flames button", has_text="render (shop.py:13)")
    render.tap()
    assert page.locator("#said").inner_text() == "render (shop.py:13): 30.0%, 300 samples"
    whole, box = page.locator("#flames").bounding_box(), render.bounding_box()
    assert box["width"] == pytest.approx(whole["width"], abs=3)
    assert not page.locator("#flames button", has_text="thumbnail").is_visible()
    page.locator("#all").tap()
    assert page.locator("#said").inner_text() == ""
    assert page.locator("#flames button", has_text="thumbnail").is_visible()


def test_functions_are_found_by_a_part_of_their_name(visit: Callable[..., Visit]) -> None:
    page = visit().go("/out.html")
    page.locator("#find").fill("RENDER")
    assert page.locator("#said").inner_text() == "2 boxes"
    assert page.locator("#flames button.hit").count() == 2
    page.locator("#find").fill("resize")
    assert page.locator("#said").inner_text() == "1 box"
