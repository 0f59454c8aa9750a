"""Every page of the built site, looked at in headless Chromium, wide and narrow, light and dark.

It needs the extra docs and a Chromium; a machine without one keeps the checks of test_pages.py and test_pictures.py.
`python tests/helpers/browser.py SITE OUT` writes the screenshots for a person.
"""

import re
import subprocess
import sys

import browser
import pytest
from pages import ROOT

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("width", browser.WIDTHS.values(), ids=browser.WIDTHS)
def test_nothing_is_cut_broken_or_fetched(site, width):
    found = browser.look(site, width)
    assert len(found) >= 30
    assert {page: of for page, of in found.items() if any(of.values())} == {}


@pytest.mark.parametrize("scheme", browser.SCHEMES)
@pytest.mark.parametrize("width", browser.WIDTHS.values(), ids=browser.WIDTHS)
def test_a_page_has_a_screenshot(site, width, scheme, tmp_path):
    file = tmp_path / "front.png"
    browser.screenshot(site, "index.html", width, 900, scheme, file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000


PAGE = """<article>{}
<pre style="width: 300px"><code style="display: block; overflow: auto">{}</code></pre>
<img src="gone.png" width="10" height="10"></article>"""


def test_a_bad_page_is_found(tmp_path):
    (tmp_path / "bad.html").write_text(
        PAGE.format('<div style="width: 3000px">wide</div>', 200 * "x"), encoding="utf-8"
    )
    (found,) = browser.look(tmp_path, 1280).values()
    assert found["scrolls"] and found["code"] and found["pictures"] and not found["hosts"]


def test_no_link_is_dead(site):
    """Links to files of the repository, which the build adds, are links of the site too."""
    dead = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'href="([^"#?]+)', page.read_text("utf-8")):
            if ":" not in link:
                target = site / link.lstrip("/") if link.startswith("/") else page.parent / link
                if not (target / "index.html" if target.is_dir() else target).exists():
                    dead.append((page.name, link))
    assert dead == []
