"""The pictures of the pages are what their scripts draw, small, and shown."""

import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from pages import PAGES, ROOT

PICTURES = ROOT / "docs" / "pictures"
LARGEST = 150_000  # bytes
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]*)\)")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """{name: text} of the pictures that `python docs/pictures` draws from today's code and results."""
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, PICTURES, folder], cwd=folder, check=True)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_the_pictures_are_those_that_the_scripts_draw(drawn):
    stored = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert stored.keys() == drawn.keys()
    assert [name for name, text in stored.items() if text != drawn[name]] == [], "run: python docs/pictures"


def test_pictures_have_a_title_two_schemes_and_fetch_nothing(drawn):
    for name, text in drawn.items():
        picture = xml.etree.ElementTree.fromstring(text)
        assert picture.find("{http://www.w3.org/2000/svg}title").text, name
        assert "prefers-color-scheme:dark" in text, name
        assert re.findall(r"(?:https?:)?//[^\s\"'<]+", text) == ["http://www.w3.org/2000/svg"], name
        assert "url(" not in text and "href" not in text, name


def test_words_and_shapes_are_inside_their_picture(drawn):
    for name, text in drawn.items():
        picture = xml.etree.ElementTree.fromstring(text)
        width, height = float(picture.get("width")), float(picture.get("height"))
        for shape in picture.iter():
            if shape.get("x") is None or shape.get("transform"):
                continue
            words = 0.53 * float(shape.get("font-size", 0)) * len(shape.text or "")
            left = {"middle": words / 2, "end": words}.get(shape.get("text-anchor"), 0.0)
            first = float(shape.get("x")) - left
            last = first + max(words, float(shape.get("width", 0)))
            assert first >= 0 and last <= width, (name, shape.text)
            assert float(shape.get("y")) >= 0 and float(shape.get("y")) + float(shape.get("height", 0)) <= height, name


def test_images_of_pages_are_small_described_and_all_shown():
    shown = set()
    for page in PAGES:
        for words, target in SHOWN.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert len(words) > 10, (page, target)
            assert path.stat().st_size <= LARGEST, target
            shown.add(path)
    assert set(PICTURES.glob("*.svg")) <= shown
