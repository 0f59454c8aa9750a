"""The expressions of mods: kinds, simplification, sharing of nodes, and the canonical text."""

import math

import pytest

from cupy_flash.mods.ir import Element, Graph, Program, expression, order, parse


@pytest.fixture
def graph():
    return Graph()


def test_equal_expressions_are_one_node(graph):
    q, kv = graph.input("q"), graph.input("kv")
    assert graph.make("sub", q, kv) is graph.make("sub", q, kv)
    assert graph.make("sub", q, kv) is not graph.make("sub", kv, q)
    assert graph.const(1) is not graph.const(True)
    assert graph.const(-0.0) is not graph.const(0.0)
    assert graph.const(math.nan) is graph.const(math.nan)


def test_inputs_of_a_node_are_those_it_depends_on(graph):
    q, kv = graph.input("q"), graph.input("kv")
    load = graph.load(0, (graph.input("h"), graph.make("sub", q, kv)), "real")
    assert load.inputs == {"h", "q", "kv"}
    assert graph.const(3).inputs == graph.argument(0, "int").inputs == frozenset()


@pytest.mark.parametrize(
    ("op", "kinds", "operand_kind", "kind"),
    [
        ("add", ("bool", "bool"), "int", "int"),
        ("add", ("int", "long"), "long", "long"),
        ("mul", ("int", "real"), "real", "real"),
        ("div", ("int", "int"), "real", "real"),
        ("lt", ("int", "real"), "real", "bool"),
        ("eq", ("bool", "bool"), "bool", "bool"),
        ("and", ("bool", "bool"), "bool", "bool"),
        ("and", ("bool", "int"), "int", "int"),
        ("exp", ("int",), "real", "real"),
        ("floor", ("long",), "real", "real"),
        ("neg", ("bool",), "int", "int"),
        ("shl", ("int", "long"), "long", "long"),
        ("shr", ("bool", "int"), "int", "int"),
    ],
)
def test_kinds_widen(graph, op, kinds, operand_kind, kind):
    made = graph.make(op, *(graph.argument(index, kind) for index, kind in enumerate(kinds)))
    assert made.kind == kind
    assert {arg.kind for arg in made.args} == {operand_kind}


def test_where_casts_its_condition_and_widens_its_branches(graph):
    chosen = graph.make("where", graph.input("q"), graph.input("kv"), graph.input("score"))
    condition, x, y = chosen.args
    assert condition is graph.make("ne", graph.input("q"), graph.const(0))
    assert (chosen.kind, x.op, y.op) == ("real", "real", "score")


def test_simplification(graph):
    make, const = graph.make, graph.const
    q, kv, s = graph.input("q"), graph.input("kv"), graph.input("score")
    less, truth = make("lt", q, kv), make("eq", graph.input("h"), const(3))
    zero, one = const(0), const(1)
    cases = [
        (make("add", q, zero), q),
        (make("add", s, const(0.0)), s),
        (make("sub", q, q), zero),
        (make("sub", zero, q), make("neg", q)),
        (make("sub", q, make("neg", kv)), make("add", q, kv)),
        (make("add", make("neg", q), kv), make("sub", kv, q)),
        (make("neg", make("sub", q, kv)), make("sub", kv, q)),
        (make("neg", make("neg", s)), s),
        (make("mul", s, one), s),
        (make("mul", const(-1), s), make("neg", s)),
        (make("mul", q, zero), zero),
        (make("div", s, const(8)), make("mul", s, const(0.125))),
        (make("floordiv", q, one), q),
        (make("mod", q, one), zero),
        (make("pow", s, const(2)), make("mul", s, s)),
        (make("pow", const(2), s), make("exp2", s)),
        (make("min", q, q), q),
        (make("abs", make("neg", s)), make("abs", s)),
        (make("not", make("not", truth)), truth),
        (make("not", less), make("le", kv, q)),
        (make("not", truth), make("ne", graph.input("h"), const(3))),
        (make("le", q, q), const(True)),
        (make("and", less, const(True)), less),
        (make("or", less, const(True)), const(True)),
        (make("and", less, less), less),
        (make("where", const(True), q, kv), q),
        (make("where", less, s, s), s),
        (make("where", less, truth, const(False)), make("and", less, truth)),
        (make("where", less, const(True), truth), make("or", less, truth)),
        (make("add", const(2), const(3)), const(5)),
        (make("div", const(1), const(4)), const(0.25)),
        (make("floordiv", const(-7), const(2)), const(-4)),
        (make("int", const(-1.5)), const(-1)),
        (make("real", make("int", less)), make("real", less)),
    ]
    for index, (simplified, expected) in enumerate(cases):
        assert simplified is expected, (index, simplified, expected)


def test_simplification_respects_nan_and_overflow(graph):
    make, const, s = graph.make, graph.const, graph.input("score")
    assert make("mul", s, const(0)).op == "mul"
    assert make("sub", s, s).op == "sub"
    assert make("ne", s, s).op == "ne"
    assert make("not", make("lt", s, const(1))).op == "not"
    assert make("add", const(2**31 - 1), const(1)).op == "add"
    assert make("log", const(-1)).op == "log"
    assert make("div", s, const(3)).op == "div"
    assert make("int", const(math.inf)).op == "int"


def test_order_has_operands_first_and_each_node_once(graph):
    q, kv = graph.input("q"), graph.input("kv")
    distance = graph.make("sub", q, kv)
    root = graph.make("mul", distance, graph.make("abs", distance))
    ordered = order((root, distance))
    assert ordered == [q, kv, distance, graph.make("abs", distance), root]
    deep = q
    for _ in range(5000):
        deep = graph.node("neg", "int", (deep,))
    assert len(order((deep,))) == 5001


def program(graph):
    make, q, kv, h = graph.make, graph.input("q"), graph.input("kv"), graph.input("h")
    table = graph.load(0, (h, make("max", make("sub", q, kv), graph.argument(0, "int"))), "real")
    score = make("add", make("mul", graph.input("score"), graph.argument(1, "real")), table)
    score = make("where", make("lt", kv, graph.const(4)), score, graph.const(-0.1))
    mask = make("and", make("eq", graph.load(1, (q,), "int"), graph.load(1, (kv,), "int")), make("le", kv, q))
    return Program(score, mask, (Element("bfloat16", 2), Element("int32", 1)), ("int", "real"))


def test_the_text_is_parsed_into_the_same_program(graph):
    text = program(graph).text
    parsed = parse(text)
    assert parsed.text == text
    assert parsed.arrays == (Element("bfloat16", 2), Element("int32", 1))
    assert parsed.numbers == ("int", "real")
    assert (parsed.score.kind, parsed.mask.kind) == ("real", "bool")
    assert str(parsed) == str(program(graph))
    mask_only = Program(None, program(graph).mask, program(graph).arrays)
    assert parse(mask_only.text).score is None


def test_the_text_does_not_depend_on_the_order_of_construction(graph):
    graph.make("mul", graph.input("kv"), graph.input("score"))
    assert program(graph).text == program(Graph()).text


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1, -0.0, 1e300, 2**40, -3, True, False])
def test_every_constant_survives_the_text(graph, value):
    const = graph.const(value)
    root = graph.node("where", const.kind, (graph.make("lt", graph.input("q"), graph.input("kv")), const, const))
    again = parse(Program(root, None).text).score.args[1]
    assert (again.kind, repr(again.value)) == (const.kind, repr(const.value))


def test_str_of_an_expression_is_its_source(graph):
    score, mask = program(graph).roots
    assert expression(score) == "where((kv < 4), ((score * n1) + array0[h, max((q - kv), n0)]), -0.1)"
    assert expression(mask) == "(array1[q] == array1[kv]) & (kv <= q)"
    root = score
    for _ in range(30):
        root = graph.make("add", root, graph.make("exp", root))
    assert len(expression(root)) < 500
