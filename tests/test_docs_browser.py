"""The documentation in a browser: every page opens, links lead somewhere, formulas are rendered.

Needs the documentation's tools (``pip install -e ".[docs]"``), Chromium and its driver
(Debian: ``apt-get install chromium chromium-driver``). ``DOCS_SITE`` names a site that is built
already; ``DOCS_SCREENSHOTS`` a folder for pictures of some pages.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
LOOKS = [
    pytest.param(width, scheme, id=f"{name}-{scheme}")
    for name, width in (("wide", 1440), ("phone", 390))
    for scheme in ("light", "dark")
]
SHOWN = (
    "index",
    "start",
    "results",
    "mpo",
    "equations/e-step",
    "equations/index",
    "diagnostics",
    "auto_tutorials/mpo_pipeline",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="Chromium or its driver is missing"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Folder and address of the built pages."""
    pytest.importorskip("sphinx")
    given = os.environ.get("DOCS_SITE")
    folder = Path(given) if given else tmp_path_factory.mktemp("site")
    if given is None:
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
        subprocess.run([*command, str(ROOT / "docs"), str(folder)], check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, and without any network but this machine."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


def pages(folder: Path) -> list[str]:
    """Addresses of all pages, but those of sources, relative to the site."""
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.html")))
    return [page for page in found if not page.startswith(("_modules/", "_static/"))]


def look(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


RENDERED = """
const done = arguments[arguments.length - 1];
const short = e => e.textContent.slice(0, 80);
const wanted = [...document.querySelectorAll('div.math, span.math')];
const count = () => done({
  formulas: wanted.length,
  missing: wanted.filter(e => !e.querySelector('mjx-container')).map(short),
  errors: [...document.querySelectorAll('mjx-merror')].map(short),
  flat: wanted.filter(e => !e.getBoundingClientRect().width).length,
  overflow: document.documentElement.scrollWidth - window.innerWidth,
});
if (wanted.length === 0) count();
else (function wait() {
  if (window.MathJax && MathJax.startup && MathJax.startup.promise)
    MathJax.startup.promise.then(count);
  else setTimeout(wait, 50);
})();
"""


PLACES = """
const done = arguments[arguments.length - 1];
const all = (what, name) => [...document.querySelectorAll(what)].map(e => e.getAttribute(name));
const places = () => done([all('[id]', 'id'), all('a[href]', 'href'), all('img[src]', 'src')]);
if (document.readyState === 'complete') places();
else window.addEventListener('load', places);
"""


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_page(site: tuple[Path, str], browser: Any, width: int, scheme: str) -> None:
    folder, address = site
    look(browser, width, scheme)
    browser.set_script_timeout(120)
    shots = os.environ.get("DOCS_SCREENSHOTS")
    problems: list[str] = []
    formulas = 0
    for page in pages(folder):
        browser.get(address + page)
        state = browser.execute_async_script(RENDERED)
        formulas += state["formulas"]
        for what in ("missing", "errors"):
            problems += [f"{page}: formula, {what}: {text}" for text in state[what]]
        if state["flat"]:
            problems.append(f"{page}: {state['flat']} formulas take no room")
        if state["overflow"] > 1:
            problems.append(f"{page}: {state['overflow']} pixels wider than the window")
        for entry in browser.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING"):
                problems.append(f"{page}: console: {entry['message']}")
        if shots and page.removesuffix(".html") in SHOWN:
            name = f"{page.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
            browser.save_screenshot(str(Path(shots) / name))
    assert problems == []
    assert formulas > 300


def test_every_internal_link(site: tuple[Path, str], browser: Any) -> None:
    folder, address = site
    look(browser, 1440, "light")
    anchors: dict[str, set[str]] = {}
    links: set[tuple[str, str]] = set()
    browser.set_script_timeout(120)
    for page in pages(folder):
        browser.get(address + page)
        ids, hrefs, images = browser.execute_async_script(PLACES)
        anchors[page] = set(ids)
        links |= {(page, target) for target in [*hrefs, *images]}
    broken = []
    for page, target in sorted(links):
        if target.startswith(("http://", "https://", "mailto:", "data:", "javascript:")):
            continue
        path, fragment = urldefrag(urljoin(address + page, target))
        file = unquote(path.removeprefix(address)) or "index.html"
        if not (folder / file).is_file():
            broken.append(f"{page} -> {target}")
        elif fragment and file in anchors and unquote(fragment) not in anchors[file]:
            broken.append(f"{page} -> {target}: no such place")
    assert not broken, "\n".join(broken)
    assert len(links) > 1000
