"""The clamps of an index, folded into one, read the element that NumPy reads; also where sums wrap."""

import inspect
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from cupy_flash.gpu.captured import Captured
from cupy_flash.mods import clamps, cuda_code
from cupy_flash.mods.ir import ARGUMENTS, BOOL, INT, LONG, Element, Graph, Program
from cupy_flash.mods.numpy_code import function_of
from cupy_flash.mods.trace import Mod

LAST = 99
FAR = (ARGUMENTS[0], ARGUMENTS[-1], -77, 50, 130)  # run-time ints
NUMBERS = (-(2**31), 2**31 - 1, -(2**29) - 1, 0, 3, 64, LAST)  # constants in the program's text
IDS = np.array([-(2**31), -5, 7, 2**31 - 1, 2**30], np.int32)


def random_index(rng):
    """Return a chain of minima, maxima and sums with numbers; it starts from a value that differs between scores."""
    graph = Graph()
    make, q, kv = graph.make, graph.input("q"), graph.input("kv")
    ids = graph.load(0, [make("mod", kv, graph.const(5))], INT)
    starts = (make("sub", q, kv), make("abs", make("sub", q, kv)), make("mul", q, kv), make("add", ids, q), q)
    x = starts[rng.integers(len(starts))]
    for _ in range(rng.integers(1, 5)):
        op = ("min", "max", "add", "sub")[rng.integers(4)]
        argument = rng.integers(len(FAR))
        number = graph.argument(int(argument), INT)
        if rng.random() < 0.5:
            number = graph.const(NUMBERS[rng.integers(len(NUMBERS))])
        if rng.random() < 0.1:
            number = graph.cast(number, LONG)
        x = make(op, *((x, number) if op == "sub" or rng.random() < 0.7 else (number, x)))
    return x


def differences(fold, largest, count=600):
    """Return (number of folds that read a wrong element for at least one (q, kv) pair, number of folds)."""
    rng = np.random.default_rng(0)
    edges = np.array([0, 1, 40, 99, 100, 250, largest // 3, largest - 2, largest - 1], np.int32)
    q, kv = edges[:, None], edges[None]
    wrong = folds = 0
    for _ in range(count):
        index = random_index(rng)
        graph = index.graph
        program = Program(None, graph.cast(index, BOOL), (Element("int32", 1),), (INT,) * len(FAR))
        writer = cuda_code._Writer(program, None, largest, (), (), None, (), False, False, None)
        result = fold(index, graph.const(LAST), lambda x: cuda_code.stage(x) == cuda_code.BATCH, writer._may_wrap)
        if result is None:
            continue
        folds += 1
        with np.errstate(all="ignore"):
            of_index, x, low, high = function_of((index, *result))(
                None, np.int32(0), np.int32(0), q, kv, (IDS,), FAR, np.float32
            )
        wrong += not np.array_equal(np.clip(of_index, 0, LAST), np.minimum(np.maximum(x, low), high))
    return wrong, folds


@pytest.mark.parametrize("largest", [cuda_code.SMALL, cuda_code.LARGE])
def test_a_folded_clamp_reads_the_same_element(largest):
    wrong, folds = differences(clamps.folded, largest)
    assert wrong == 0 and folds > 100


def test_only_ints_whose_sums_cannot_wrap_are_arguments():
    def mod_with(limit):
        return lambda s, b, h, q, kv: s + np.minimum(q - kv, limit)

    assert [Mod(mod_with(limit)).numbers for limit in (2**29 - 1, 2**29, -(2**29), -(2**29) - 1, 2**31)] == [
        (2**29 - 1,), (), (-(2**29),), (), (2**31,),
    ]  # fmt: skip


@pytest.mark.parametrize("strides, refused", [((1, 2**29), True), ((1, 2**29 - 1), False), ((2**29, 1), False)])
def test_strides_that_kernels_cannot_index_are_refused(strides, refused):
    """Kernels index with 32 bits: by bytes in a dimension with a computed index, and by elements in the others."""
    table = np.zeros((1, 1), np.float32)
    mod = Mod(lambda s, b, h, q, kv: s + table[h, q - kv])
    array = SimpleNamespace(shape=(1, 1), strides=strides, dtype=np.dtype(np.float32))
    problem = SimpleNamespace(mods=mod.text, captured_gradient=(False,), derivative=False)
    captured = Captured(problem, SimpleNamespace(numbers=mod.numbers, captured=(array,)), ())
    if refused:
        with pytest.raises(ValueError, match="captured0 of a mod has strides .* 32 bits"):
            captured.members(lambda _: 0)
    else:
        assert captured.members(lambda _: 0) == (0, 1, 1, *strides)


PLANTS = {
    "the limit of an outer clamp": ('limit = make("add", right, shift)', "limit = right"),
    "a limit outside the dimension": ('limit = make("min", make("max", limit, low), high)', "pass"),
    "a minimum for a maximum": ('if x.op == "min" else', 'if x.op == "max" else'),
    "a difference for a sum": ("shift = make(x.op, shift", 'shift = make("add", shift'),
    "an inner sum that wraps": ("if may_wrap(x) or", "if"),
    "a limit that wraps": ("if _wraps(limit, may_wrap):", "if False:"),
    "a sum that wraps": (" and not _wraps(total, may_wrap)", ""),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_planted_bug_is_found(plant):
    text = inspect.getsource(clamps)
    assert text.count(plant[0]) == 1
    module = ModuleType("planted")
    module.__package__ = clamps.__package__
    exec(text.replace(*plant), module.__dict__)
    assert any(differences(module.folded, largest)[0] for largest in (cuda_code.SMALL, cuda_code.LARGE))
