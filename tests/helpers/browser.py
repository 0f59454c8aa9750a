"""Looks at a built site in headless Chromium: what is cut off or broken, what is too small to read, what is fetched.

`python tests/helpers/browser.py SITE OUT [PAGE ...]` writes a PNG of each page, wide and narrow, light and dark.
"""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = {"wide": 1280, "narrow": 390}
SCALE = 0.95  # of a picture, below which its words, of 11 pixels, are hard to read
SCHEMES = {"light": 1, "dark": 0}  # values of Blink's preferredColorScheme

# The page of the harness: a frame of a width shows one page after the other, and the findings become its text.
HARNESS = r"""<!doctype html><meta charset="utf-8"><style>body { margin: 0 } iframe { border: 0 }</style>
<iframe id="frame" width="%(width)d" height="%(height)d"></iframe><pre id="found"></pre><script>
const pages = %(pages)s, frame = document.getElementById("frame"), found = {};
const phone = %(width)d < 720, output = ".language-text, .language-console";  // scrolls in its frame on a phone
const overflows = e => e.scrollWidth > e.clientWidth + 1;
// Signs of words, as in -inf, at which a line ends.
function broken(inside) {
  const texts = inside.createTreeWalker(inside.querySelector("article"), NodeFilter.SHOW_TEXT), found = [];
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (text.parentElement.closest("pre")) continue;
    for (const word of text.data.matchAll(/(?<=^|[\s(])-\w+/g)) {
      const range = inside.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(e => e.top)).size > 1) found.push(word[0]);
    }
  }
  return found;
}
async function look(page) {
  await new Promise(done => { frame.onload = done; frame.src = page; });
  await new Promise(done => setTimeout(done, 50));
  const inside = frame.contentDocument, view = frame.contentWindow, words = e => e.textContent.trim().slice(0, 90);
  const all = selector => [...inside.querySelectorAll(selector)];
  all("details").forEach(e => { e.open = true; });
  all("img").forEach(e => { e.loading = "eager"; });
  const shown = all("img").filter(e => e.getClientRects().length);
  await Promise.all(shown.map(e => e.complete || new Promise(done => { e.onload = e.onerror = done; })));
  const tabs = all(".tabbed-set"), cut = [];
  for (let n = 0; n < Math.max(1, ...tabs.map(e => e.querySelectorAll("input").length)); n++) {
    tabs.forEach(e => { const input = e.querySelectorAll("input")[n]; if (input) input.checked = true; });
    all("pre > code").filter(overflows).filter(e => !(phone && e.closest(output))).forEach(e => cut.push(words(e)));
  }
  found[page] = {
    scrolls: overflows(inside.documentElement) ? [`${inside.documentElement.scrollWidth} pixels`] : [],
    code: [...new Set(cut)],
    tables: all("article table").filter(e => overflows(e.parentElement) || e.getBoundingClientRect().right
      > inside.querySelector("article").getBoundingClientRect().right + 1).map(words),
    titles: all(".md-nav .md-ellipsis").filter(overflows).map(words),
    signs: broken(inside),
    pictures: shown.filter(e => !e.naturalWidth).map(e => e.src),
    small: shown.filter(e => e.getBoundingClientRect().width < %(scale)s * e.naturalWidth).map(e => e.src),
    hosts: view.performance.getEntriesByType("resource").map(e => new URL(e.name).host)
      .filter(host => host && host != location.host),
  };
}
(async () => {
  for (const page of pages) await look(page);
  document.getElementById("found").textContent = JSON.stringify(found);
  document.title = "done";
})();
</script>"""


@contextmanager
def served(site, harness=""):
    """The address of a folder on this machine, with the harness at /harness.html."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/harness.html":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(harness.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def chromium(address, *options, scheme="light"):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout


def pages_of(site):
    return sorted(path.relative_to(site).as_posix() for path in Path(site).rglob("*.html") if path.name != "404.html")


def look(site, width, pages=None):
    """{page: {what: findings}} of the pages of a site in a frame of a width."""
    names = json.dumps(pages or pages_of(site))
    harness = HARNESS % {"width": width, "height": 900, "pages": names, "scale": SCALE}
    with served(site, harness) as address:
        options = ("--dump-dom", f"--window-size={max(width, 500)},900", "--virtual-time-budget=600000")
        text = chromium(f"{address}/harness.html", *options)
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', text, re.DOTALL)[1]))


def screenshot(site, page, width, height, scheme, file):
    """A PNG of the top of a page in a frame of a width; Chromium's own windows are at least 500 pixels wide."""
    harness = (
        "<!doctype html><style>body { margin: 0 } iframe { border: 0 }</style>"
        f'<iframe src="{page}" width="{width}" height="{height}"></iframe>'
    )
    with served(site, harness) as address:
        size = f"--window-size={max(width, 500)},{height}"
        options = (f"--screenshot={file}", size, "--virtual-time-budget=4000")
        chromium(f"{address}/harness.html", *options, scheme=scheme)


if __name__ == "__main__":
    site, out, *pages = sys.argv[1:]
    height = 1800
    Path(out).mkdir(parents=True, exist_ok=True)
    for page in pages or pages_of(site):
        for name, width in WIDTHS.items():
            for scheme in SCHEMES:
                file = Path(out, f"{page.replace('/', '-').removesuffix('-index.html')}-{name}-{scheme}.png")
                screenshot(site, page, width, height, scheme, file)
