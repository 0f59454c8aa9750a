"""Extensions that mkdocs.yml loads: links out of docs/, tables for phones, doctests.

A link such as ../bench/gpu_queue.md from a page of docs/ adds that file of the
repository to the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages in a subfolder of docs/ link to pages only.
LINK = re.compile(r"(\]\()\.\./([^)#\s]+)")
DOCTEST = re.compile(
    r"^( *)>>> .*\n(?:^\1\S.*\n?)*", re.MULTILINE
)  # until an empty line
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")


def on_files(files: Files, config: Any) -> Files:
    pages = files.documentation_pages()
    paths = {path for page in pages for _, path in LINK.findall(page.content_string)}
    for path in sorted(paths):
        if (ROOT / path).is_file() and files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links relative to the site: its root has docs/ and the files added above."""
    if "/" in page.file.src_uri:
        return markdown
    return LINK.sub(r"\1\2", markdown.replace("](docs/", "]("))


def on_page_content(html: str, **_: Any) -> str:
    """Name the column in each cell, which a phone shows in place of the head."""
    return TABLE.sub(lambda table: labelled(table[0]), html)


def labelled(table: str) -> str:
    headings = [TAG.sub("", heading).strip() for heading in HEADING.findall(table)]

    def label(row: re.Match[str]) -> str:
        names = iter(headings)
        return re.sub("<td", lambda _: f'<td data-label="{next(names, "")}"', row[0])

    return ROW.sub(label, table)


class Docstrings(griffe.Extension):
    """Turn doctests into fenced Markdown code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)


def fenced(doctest: re.Match[str]) -> str:
    return f"{doctest[1]}```pycon\n{doctest[0].rstrip()}\n{doctest[1]}```\n"
