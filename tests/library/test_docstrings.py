"""All examples run: the doctests of all modules, and the Python blocks of README.md and docs/.

Docstrings of public functions describe exactly their arguments, and `help` shows them unchanged.
"""

import doctest
import importlib
import inspect
import pkgutil
import pydoc
import re
from pathlib import Path

import array_libraries
import pytest
from pages import BLOCKS, CUPY_BLOCKS, PAGES, ROOT, python_blocks, run_block

import cupy_flash

# Adapters whose libraries are not installed here
LEFT_OUT = {f"cupy_flash.adapters.{name}" for name in array_libraries.MISSING}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(cupy_flash.__path__, "cupy_flash.")
    if "__main__" not in module.name and module.name not in LEFT_OUT
)


def documented():
    """Return the functions, classes and methods of the API reference, by full name."""
    items = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        name = re.search(r"^::: (\S+)$", text, re.M)[1]
        if name in LEFT_OUT:
            continue
        module = importlib.import_module(name)
        members = text.partition("members:")[2]
        for name in re.findall(r"\w+", members):
            item = items[f"{module.__name__}.{name}"] = getattr(module, name)
            for method in vars(item) if inspect.isclass(item) else ():
                if inspect.isfunction(vars(item)[method]) and not method.startswith("_"):
                    items[f"{module.__name__}.{name}.{method}"] = vars(item)[method]
    return items


DOCUMENTED = documented()
WITH_ARGUMENTS = {
    name: item for name, item in DOCUMENTED.items() if not inspect.isclass(item) or "Args:" in inspect.getdoc(item)
}


def described_arguments(item):
    """Return the names in the Args section of a docstring, in order; **name for keyword arguments."""
    section = re.search(r"^Args:\n((?:(?: {4}.*)?\n)*)", inspect.getdoc(item) + "\n", re.M)
    return re.findall(r"^ {4}(\*{0,2}\w+): ", section[1], re.M) if section else []


def accepted_arguments(item):
    parameters = inspect.signature(item).parameters.values()
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return [stars.get(x.kind, "") + x.name for x in parameters if x.name != "self"]


@pytest.mark.parametrize("name", ["cupy_flash", *MODULES])
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_docstrings_describe_the_arguments(name):
    assert described_arguments(WITH_ARGUMENTS[name]) == accepted_arguments(WITH_ARGUMENTS[name])


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_every_argument_has_a_type(name):
    parameters = inspect.signature(WITH_ARGUMENTS[name]).parameters.values()
    assert [x.name for x in parameters if x.name != "self" and x.annotation in (x.empty, "Any")] == []


def test_every_public_name_is_in_the_api_reference():
    names = {name.partition(".")[2] for name in DOCUMENTED if name.count(".") == 1}
    # the modules in MODULES have pages of their own in docs/api
    assert names | set(cupy_flash.MODULES) == set(cupy_flash.__all__)


def test_the_api_reference_is_found():
    names = {"cupy_flash.attention", "cupy_flash.adapters.torch.CausalSelfAttention.forward", "cupy_flash.memory.load"}
    assert names <= WITH_ARGUMENTS.keys()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_help_shows_the_docstring_as_it_is_written(name):
    text = inspect.getdoc(DOCUMENTED[name])
    shown = pydoc.render_doc(DOCUMENTED[name], renderer=pydoc.plaintext)
    assert [line for line in text.splitlines() if line not in shown] == []
    markup = re.findall(r"::$|``|^:\w+|^\.\. |\t", text, re.M)  # markup of Sphinx, which a terminal shows literally
    assert markup == []


def test_there_are_docstring_examples():
    attempted = {
        name: doctest.testmod(importlib.import_module(name)).attempted
        for name in ("cupy_flash.api", "cupy_flash.reference")
    }
    assert min(attempted.values()) > 0, attempted


# torch's forward mode uses torch.jit.script
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("page", "line", "code"), BLOCKS)
def test_page(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "fp8.md":  # fp8 needs Hopper
        monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator:sm_90a")
    run_block(page, line, code)


def test_there_are_examples():
    pages = {block.values[0].stem for block in BLOCKS}
    assert {"README", "index", "torch", "transformers", "jax", "memory", "long_sequences", "fp8", "kernels"} <= pages
    assert CUPY_BLOCKS
    assert python_blocks("a\n```python\nx\n```\n\n```\ny\n```\n```python\nz\n```\n") == [(3, "x\n"), (10, "z\n")]
    assert python_blocks('=== "A"\n\n    ```python\n    if x:\n        y\n    ```\n') == [(4, "if x:\n    y\n")]
    front = [block for block in (*BLOCKS, *CUPY_BLOCKS) if block.values[0].stem == "index"]
    assert len(front) == 7 and all(len(block.values[2].splitlines()) <= 9 for block in front)


def test_readme_is_short():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    """mkdocs also checks links and anchors, but runs in CI only, and does not read the README in place."""
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_quoted_messages_are_in_the_code():
    """The first column of docs/troubleshooting.md quotes error messages, so that users can search for them."""
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [match for row in rows for match in re.findall(r'`\w+(?:Error|Warning): ([^`]+)`|"([^"]{12,})"', row)]
    code = "".join(path.read_text(encoding="utf-8") for path in Path(cupy_flash.__file__).parent.rglob("*.py"))
    assert len(quoted) >= 3
    assert [text for pair in quoted if (text := "".join(pair)) not in code] == []


def test_every_path_of_the_map_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"^    ((?:cupy_flash|kernels_cu|bench|tests)/\S*)  ", text, re.MULTILINE)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
