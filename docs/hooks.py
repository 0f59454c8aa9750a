"""Two extensions that mkdocs.yml loads: links out of docs/, and doctests in the API reference.

A link such as ../bench/gpu_queue.md from a page of docs/ adds that file of the repository to the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()\.\./([^)#\s]+)")  # pages in a subfolder of docs/ link to pages only
DOCTEST = re.compile(r"^( *)>>> .*\n(?:^\1\S.*\n?)*", re.MULTILINE)  # ends at an empty line


def on_files(files: Files, config: Any) -> Files:
    paths = {path for page in files.documentation_pages() for _, path in LINK.findall(page.content_string)}
    for path in sorted(paths):
        if (ROOT / path).is_file() and files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links relative to the site, whose root holds the pages of docs/ and the files added above."""
    if "/" in page.file.src_uri:
        return markdown
    return LINK.sub(r"\1\2", markdown.replace("](docs/", "]("))


class Docstrings(griffe.Extension):
    """Turn doctests into fenced Markdown code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)


def fenced(doctest: re.Match[str]) -> str:
    return f"{doctest[1]}```pycon\n{doctest[0].rstrip()}\n{doctest[1]}```\n"
