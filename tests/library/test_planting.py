"""Planted bugs: steps are found wherever they stand, and a bug that no longer applies is an error."""

import ast
import re
from pathlib import Path

import planting
import pytest
from planting import StalePlant, after, always, before, change, never, plant, planted, skip, steps

from cupy_flash.jit import source

TESTS = Path(__file__).parents[1]
KERNEL = """
__device__ int f(int n) {
  if (n < 0) return 0;  // @empty
  load(n), wait<1>();  // @loads: both are needed
#pragma unroll
  for (int i = 0; i < n; ++i) g(i);  // @all
  // A sentence. @last
  float x[2] = {1, 2};
  asm("st.release.gpu [%0]; // no comment" ::"r"(n));  // @store
  if (n > 1) {  // @many
    return 1;
  }
  // @few
  if (n) {
    return h([](int i) { return i; });
  }
  return 2;
}
__device__ int size() { return 2 * n; }  // @size
"""
# The same steps in another order and format
MOVED = """
__device__ int other(int k) {
  // @few
  if (n)
  { return h([](int i) { return i; }); }
  for (int i = 0;
       i < n; ++i)
    g(i);  // @all
  load(n),
      wait<1>();  // @loads
}
// @size
__device__ int size() {
  return 2 * n;
}
"""


def joined(text):
    """Return the text without comments, with one space between tokens."""
    return " ".join(token[0] for token in planting._words(text))


def with_bug(text, bug, folder):
    """Return the text of a kernel in which a bug is planted."""
    path = folder / "kernel.cuh"
    path.write_text(text)
    for step, edit in bug:
        plant(folder, step, edit)
    return path.read_text()


# name -> (bug, text that it replaces, new text)
ANYWHERE = {
    "a loop": (skip("all"), "for (int i = 0; i < n; ++i) g(i);", ""),
    "a block": (skip("few"), "if (n) { return h([](int i) { return i; }); }", ""),
    "a function": (skip("size"), "size() { return 2 * n; }", "size() {}"),
    "an expression": (change("size", "2*n", "n"), "2 * n", "n"),
    "a template argument": (change("loads", "wait< 1 >", "wait<2>"), "wait<1>", "wait<2>"),
    "a condition": (before("all", "if (x)"), "for", "if (x) for"),
    "a statement": (after("loads", "wait();"), "wait<1>();", "wait<1>(); wait();"),
}
INSIDE = {
    "one line": (skip("empty"), "if (n < 0) return 0;", ""),
    "never": (never("empty"), "n < 0", "false"),
    "always": (always("many"), "n > 1", "true"),
    "before a brace": (change("many", "1", "2"), "n > 1", "n > 2"),
    "initialiser": (change("last", "{1, 2}", "{}"), "{1, 2}", "{}"),
    "string": (change("store", "st.release", "st.relaxed"), "st.release", "st.relaxed"),
}
STALE = {
    "step": (skip("renamed"), "no kernel has a step @renamed"),
    "expression": (change("loads", "wait<0>", "wait<1>"), "has 0 times wait<0>, not once"),
    "ambiguous expression": (change("all", "i", "j"), "has 4 times i, not once"),
    "condition": (never("loads"), "has no condition"),
}


@pytest.mark.parametrize(("bug", "old", "new"), ANYWHERE.values(), ids=ANYWHERE)
def test_a_step_is_found_wherever_it_stands(bug, old, new, tmp_path):
    for text in (KERNEL, MOVED):
        plain = joined(text)
        assert plain.count(joined(old)) == 1
        assert joined(with_bug(text, bug, tmp_path)) == joined(plain.replace(joined(old), joined(new)))


def test_a_bug_of_two_steps(tmp_path):
    moved = with_bug(KERNEL, skip("loads") + before("all", "load(n);"), tmp_path)
    assert joined("load(n); for (int i = 0; i < n; ++i) g(i);") in joined(moved) and "wait" not in moved


@pytest.mark.parametrize(("bug", "old", "new"), INSIDE.values(), ids=INSIDE)
def test_changes_of_a_step(bug, old, new, tmp_path):
    assert with_bug(KERNEL, bug, tmp_path).split() == KERNEL.replace(old, new).split()


@pytest.mark.parametrize(("bug", "message"), STALE.values(), ids=STALE)
def test_a_stale_plant_is_an_error(bug, message, tmp_path):
    with pytest.raises(StalePlant, match=message):
        with_bug(KERNEL, bug, tmp_path)


def test_a_stale_plant_does_not_pass_for_a_bug_that_is_found(monkeypatch):
    """Tests enter `planted` before pytest.raises, so a StalePlant is not taken for the expected error."""
    with pytest.raises(StalePlant), planted(monkeypatch, skip("renamed")), pytest.raises(AssertionError):
        raise AssertionError


def plants_of_tests():
    """Yield (place in a test, name of the step, its edit or None if that depends on variables) of all planted bugs."""
    operations = {each.__name__: each for each in (skip, before, after, change, never, always)}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if path == Path(__file__) or not re.search(r"^from (helpers\.)?planting import", text, re.MULTILINE):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in operations:
                values = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
                edit = None if None in values else operations[node.func.id](*values)[0][1]
                yield f"{path.name}:{node.lineno}", values[0], edit


def test_all_plants_apply():
    """Stale plants fail here even if their test is exhaustive, and each step named in a kernel has a plant."""
    statements = {}
    for path in source.kernel_folder().rglob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        for name, start, end in steps(text):
            statements.setdefault(name, []).append(text[start:end])
    plants = list(plants_of_tests())
    stale = {place: step for place, step, _ in plants if step is not None and step not in statements}
    for place, step, edit in plants:
        for statement in statements.get(step, ()) if edit else ():
            try:
                assert edit(statement) != statement, place
            except StalePlant as error:
                stale[place] = str(error)
    assert stale == {}
    named = {step for _, step, _ in plants}
    assert statements.keys() - named == set()
