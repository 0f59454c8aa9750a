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


PAGE = """<nav class="md-nav"><div class="md-ellipsis" style="width: 40px; overflow: hidden">{long}</div></nav>
<article><div style="width: 3000px">wide</div><p style="width: 1em">-inf</p>
<pre style="width: 300px"><code style="display: block; overflow: auto">{long}</code></pre>
<img src="gone.png" width="10" height="10"><img src="small.svg" width="70"></article>"""
SMALL = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="10"/>'


def test_a_bad_page_is_found(tmp_path):
    (tmp_path / "bad.html").write_text(PAGE.format(long=200 * "x"), encoding="utf-8")
    (tmp_path / "small.svg").write_text(SMALL, encoding="utf-8")
    (found,) = browser.look(tmp_path, 1280).values()
    assert found.pop("hosts") == [] and found.pop("tables") == []
    assert {what: len(of) for what, of in found.items()} == dict.fromkeys(found, 1)


def test_the_reference_lists_public_names_and_one_result_a_function(site):
    results = []
    for page in (site / "api").rglob("index.html"):
        text = page.read_text("utf-8")
        assert re.findall(r'id="[^"]*\b(__\w+__)"', text) == [], page
        results += re.findall(r"Returns:</span></p>\s*<ul>(.*?)</ul>", text, re.DOTALL)
    assert len(results) > 30
    assert [result for result in results if not re.match(r"\s*<li[^>]*>\s*<code>", result)] == []
    assert [result for result in results if result.count("<li") > 1] == []


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
