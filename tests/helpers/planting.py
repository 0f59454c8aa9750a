"""Plants bugs in the kernels that a test compiles: a change of a step, which a comment `// @step` names in the kernel.

The comment stands behind the statement, on the line where it ends, or in the lines before it:

    rings.Q.wait();  // @wait-Q

Behind the brace of a block, it names what stands before the brace; before a block, it names the whole block.

A step may have several places, one in each kernel that has this step; a plant changes all of them. White space, line
breaks and comments mean nothing, and neither does the file or the function in which a step stands.
"""

import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cupy_flash.jit import source
from cupy_flash.jit.source import kernel_folder

MARKER = re.compile(r"(?<!\S)@([\w.-]*\w)")
COMMENT = re.compile(r"//[^\n]*")
WORD = re.compile(r"[a-z_]\w*|\.?\d(?:[ep][+-]|[\w.])*|[-+*/%&|^<>=!]=|&&|\|\||<<|>>|->|::|\+\+|--|\S", re.IGNORECASE)
TOKEN = re.compile(
    rf"""(?P<comment>{COMMENT.pattern})|(?P<directive>^[ \t]*\#(?:[^\n\\]|\\\n)*)|"(?:[^"\\\n]|\\.)*"|{WORD.pattern}""",
    re.MULTILINE | re.IGNORECASE,
)
CLOSED = {")": "(", "]": "[", "}": "{"}


class StalePlant(Exception):
    """A planted bug no longer applies: no kernel has its step, or the step lacks the text to change."""


# A bug is a tuple of pairs: the name of a step, and a function that turns the text of its statement into the wrong
# text. To change several steps, add the tuples.


def skip(step):
    """Plant a bug that leaves out the step; if the step is a function, its body."""

    def edit(statement):
        body = re.match(r"((?:__device__|template)\b.*?\{).*\}", statement, re.DOTALL)
        return f"{body[1]}}}" if body else ""

    return ((step, edit),)


def before(step, text):
    """Plant a bug that inserts a statement, or a condition of the step, before the step."""
    return ((step, lambda statement: f"{text} {statement}"),)


def after(step, text):
    """Plant a bug that inserts a statement after the step."""
    return ((step, lambda statement: f"{statement} {text}"),)


def change(step, old, new):
    """Plant a bug that replaces an expression, which must occur once in the step."""
    return ((step, lambda statement: _changed(statement, old, new)),)


def never(step):
    """Plant a bug that makes the condition of the step, an `if` statement, false."""
    return ((step, lambda statement: _with_condition(statement, "false")),)


def always(step):
    """Plant a bug that makes the condition of the step, an `if` statement, true."""
    return ((step, lambda statement: _with_condition(statement, "true")),)


@contextmanager
def planted(monkeypatch, bug):
    """Compile the kernels with a bug; StalePlant if it does not apply."""
    with TemporaryDirectory() as place, monkeypatch.context() as patch:
        folder = Path(place) / "kernels_cu"
        shutil.copytree(kernel_folder(), folder)
        for step, edit in bug:
            plant(folder, step, edit)
        patch.setattr(source, "kernel_folder", lambda: folder)
        yield


def plant(folder, step, edit):
    """Edit a step in all kernels of a folder."""
    is_found = False
    for path in folder.rglob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        if f"@{step}" in text:
            for start, end in reversed([(start, end) for name, start, end in steps(text) if name == step]):
                text = text[:start] + edit(text[start:end]) + text[end:]
                is_found = True
            path.write_text(text, encoding="utf-8")
    if not is_found:
        raise StalePlant(f"no kernel has a step @{step}")


def steps(text):
    """Yield (name, start, end) of every statement of a kernel that a comment names."""
    tokens, named = [], []
    for match in TOKEN.finditer(text):
        if match["comment"]:
            # A comment behind code names the statement that ends before it, and a comment line the next statement.
            behind = text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip() != ""
            named += [(name, len(tokens) - behind, behind) for name in MARKER.findall(match[0])]
        elif not match["directive"]:
            tokens.append(match)
    words = [token[0] for token in tokens]
    for name, place, behind in named:
        first, last = _ending_near(words, place) if behind else (place, _end(words, place))
        yield name, tokens[first].start(), tokens[last].end()


def _ending_near(words, place):
    """Return the first and the last token of the statement that ends at a place, or of the text before a brace."""
    last = place if words[place] in (";", "{", "}") else _end(words, place)
    first = _opening(words, last) if words[last] == "}" else last
    while first > 0 and words[first - 1] not in (";", "{") and not _ends_a_block(words, first - 1):
        first = _opening(words, first - 1) if words[first - 1] in CLOSED else first - 1
    return first, last


def _end(words, place):
    """Return the last token of the statement to which the token at a place belongs."""
    while words[place] != ";":
        if words[place] in CLOSED.values():
            place = next(n for n in range(place, len(words)) if words[n] in CLOSED and _opening(words, n) == place)
            if _ends_a_block(words, place):
                return place
        place += 1
    return place


def _ends_a_block(words, place):
    """Return whether the token is a brace that closes a block, not an initialiser."""
    return words[place] == "}" and re.match(r"[\w*+}-]|$", "".join(words[place + 1 : place + 2])) is not None


def _opening(words, place):
    """Return the place of the opening bracket that matches the closing one at `place`."""
    depth = 0
    while True:
        depth += (words[place] in CLOSED) - (words[place] in CLOSED.values())
        if depth == 0:
            return place
        place -= 1


def _words(text):
    """Return the tokens outside comments, also those inside a string, such as the instructions of an asm statement."""
    return list(WORD.finditer(COMMENT.sub(lambda comment: " " * len(comment[0]), text)))


def _changed(statement, old, new):
    tokens, pattern = _words(statement), [token[0] for token in _words(old)]
    words = [token[0] for token in tokens]
    places = [n for n in range(len(words)) if words[n : n + len(pattern)] == pattern]
    if len(places) != 1:
        raise StalePlant(f"the step\n{statement}\nhas {len(places)} times {old}, not once")
    start, end = tokens[places[0]].start(), tokens[places[0] + len(pattern) - 1].end()
    return statement[:start] + new + statement[end:]


def _with_condition(statement, value):
    tokens = _words(statement)
    words = [token[0] for token in tokens]
    if "if" not in words:
        raise StalePlant(f"the step\n{statement}\nhas no condition")
    opening = words.index("(", words.index("if"))
    closing = next(n for n, word in enumerate(words) if word == ")" and _opening(words, n) == opening)
    return f"{statement[: tokens[opening].end()]}{value}{statement[tokens[closing].start() :]}"
