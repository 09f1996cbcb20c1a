"""The documentation builds as a site without a warning, and a reader's browser loads only it."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
LOADED = {  # attributes whose URL a browser loads by itself
    *(("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")),
    *(("link", "href"), ("use", "href"), ("object", "data"), ("img", "srcset")),
}


class Page(html.parser.HTMLParser):
    """The links, the loaded files, the anchors and the classes of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADED:
                self.loaded.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif name == "class":
                self.classes.update((value or "").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_each_page_of_the_contents_is_built(site: Path) -> None:
    named = re.findall(r"^\s+- (?:.*: )?(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(named) > 40
    for name in named:
        page = site / ("index.html" if name == "index" else f"{name}/index.html")
        assert page.exists(), f"{name}.md is no page of the site"


def test_the_reference_is_generated(site: Path, pages: dict[Path, Page]) -> None:
    api = pages[site / "reference" / "api" / "index.html"]
    assert {"tidemill.Tidemill.enqueue", "tidemill.Job.result", "tidemill.JobFailed"} <= api.anchors
    commands = pages[site / "reference" / "cli" / "index.html"]
    assert {"tidemill-worker", "tidemill-schedule-add", "tidemill-doctor"} <= commands.anchors
    assert "--stuck-grace" in commands.path.read_text()


def test_a_role_of_a_docstring_is_a_link(site: Path, pages: dict[Path, Page]) -> None:
    api = pages[site / "reference" / "api" / "index.html"]
    text = api.path.read_text()
    assert not re.search(r":(?:class|meth|func|mod):", text)
    assert "#tidemill.typing.Found" in api.links


def test_no_page_loads_anything_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    for page in pages.values():
        assert not [url for url in page.loaded if ELSEWHERE.match(url)], page.path
        assert "mermaid" not in page.classes, f"{page.path}: the theme loads mermaid from a CDN"
        for style in re.findall(r"<style.*?</style>", page.path.read_text(), re.DOTALL):
            assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", style), page.path
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"(?:@import\s*|url\(\s*)['\"]?(?:https?:)?//", text), sheet


def test_each_link_within_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    for page in pages.values():
        if page.path.name == "404.html":  # its links begin at the root of the server
            continue
        for url in [*page.links, *page.loaded]:
            path, _, anchor = urllib.parse.unquote(url).partition("#")
            if ELSEWHERE.match(url) or url.startswith(("mailto:", "data:")):
                continue
            target = (page.path.parent / path).resolve() if path else page.path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.path} links to {url}"
            if anchor and target.suffix == ".html":
                assert anchor in pages[target].anchors, f"{page.path} links to {url}"
