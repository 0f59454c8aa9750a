"""Extensions that mkdocs.yml loads: links out of docs/, pictures and tables for phones.

A link such as ../bench/gpu_queue.md from a page of docs/ adds that file of the
repository to the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
# Code keeps its lines; tags are matched so that the words between them are found.
SIGNED = re.compile(r"<pre\b.*?</pre>|<[^>]*>|(?<![^\s(])-\w+", re.DOTALL)
IMAGE = re.compile(r'<img [^>]*src="([^"]+\.svg)"[^>]*>')


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


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Name the column in each cell, which a phone shows in place of the head.

    A picture has a frame, which scrolls where it is too narrow for the picture, and is
    a link to the picture alone. A sign stays on the line of its word.
    """
    for heading in headings(page.toc):
        heading.title = heading.title.replace("_", "_<wbr>")
    html = TABLE.sub(lambda table: labelled(table[0]), html)
    html = IMAGE.sub(r'<a class="picture" href="\1">\g<0></a>', html)
    return SIGNED.sub(together, html)


def headings(toc: Iterable[Any]) -> Iterator[Any]:
    """Return the entries of a table of contents, in which long names may break."""
    for heading in toc:
        yield heading
        yield from headings(heading.children)


def labelled(table: str) -> str:
    columns = [TAG.sub("", heading).strip() for heading in HEADING.findall(table)]

    def label(row: re.Match[str]) -> str:
        names = iter(columns)
        return re.sub("<td", lambda _: f'<td data-label="{next(names, "")}"', row[0])

    return ROW.sub(label, table)


def together(match: re.Match[str]) -> str:
    word = match[0]
    return word if word.startswith("<") else f'<span class="together">{word}</span>'


class Docstrings(griffe.Extension):
    """Turn doctests into fenced Markdown code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)


def fenced(doctest: re.Match[str]) -> str:
    return f"{doctest[1]}```pycon\n{doctest[0].rstrip()}\n{doctest[1]}```\n"
