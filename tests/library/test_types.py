"""Errors that a type checker reports for calls of the public functions, and how much of the package has types."""

import ast
import os
import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import cupy_flash
from cupy_flash import reference
from cupy_flash.explanation import Explanation
from cupy_flash.problem.records import Options
from cupy_flash.problem.records import Cache, CacheOptions
from cupy_flash.problem.records import Operands, Problem, Saved, Tangents

Halves = npt.NDArray[np.float16]


class Exported:  # as the stubs of jax.Array have it
    def __dlpack__(self) -> Any:
        return None


def calls(q: Halves, bias: npt.NDArray[np.float32], bounds: npt.NDArray[np.int32], x: Exported, flag: bool) -> None:
"""
RECORDS = """
def records(
    o: Options,
    c: CacheOptions,
    p: Problem,
    cache: Cache,
    operands: Operands,
    saved: Saved,
    t: Tangents,
    g: cupy_flash.Gradients[Halves],
    s: cupy_flash.SecondGradients[Halves],
) -> None:
"""

RIGHT = (
    "assert_type(cupy_flash.attention(q, q, q), Halves)",
    "assert_type(cupy_flash.attention(q, q, q, causal='top_left', bias=bias, window=(3, None)), Halves)",
    "assert_type(cupy_flash.attention(q, q, q, layout='bhsd', softcap=None, return_lse=True), tuple[Halves, Halves])",
    "assert_type(cupy_flash.attention(q, q, q, return_lse=flag), Halves | tuple[Halves, Halves])",
    "assert_type(cupy_flash.attention(x, x, x, backend='cpu', seed=1, dropout=0.1, sink=bias), Exported)",
    "assert_type(cupy_flash.attention_varlen(q, q, q, bounds, bounds, 5, 5, scale=0.5), Halves)",
    "out, vjp = cupy_flash.attention_vjp(q, q, q, causal=True)",
    "assert_type(vjp(out).dq, Halves)",
    "gradients = cupy_flash.attention_backward(q, q, q, q, out=q, lse=bias, alibi_slopes=bias)",
    "assert_type(gradients, cupy_flash.Gradients[Halves])",
    "assert_type(cupy_flash.merge(q, q, q, q), tuple[Halves, Halves])",
    "assert_type(cupy_flash.explain(q, q, q, engine='simt'), Explanation)",
    "cupy_flash.compile(dtype='bfloat16', head_dim=64, bias='float32', mask=True, softcap=1.0)",
    "reference.attention([[[[1.0]]]], q, q, mask=[[True]], dtype=np.float32)",
    "options: dict[str, Any] = dict(causal=True)",
    "cupy_flash.attention(q, q, q, **options)",
    "cupy_flash.memory.load('llama2-7b')",
    "assert_type(cupy_flash.attention_with_kv_cache(q, q, q, k=q, v=q, cache_seqlens=3), Halves)",
    "assert_type(cupy_flash.attention_with_kv_cache(q, q, q, return_lse=True), tuple[Halves, Halves])",
    "mod = cupy_flash.Mod(mask_mod=cupy_flash.and_masks(cupy_flash.noop_mask))",
    "assert_type(cupy_flash.attention(q, q, q, mask_mod=mod, score_mod=lambda s, b, h, i, j: s + 1), Halves)",
)

WRONG = (
    "cupy_flash.attention(q, q, q, causal='botom')",
    "cupy_flash.attention(q, q, q, casual=True)",
    "cupy_flash.attention(q, q, q, scale='0.5')",
    "cupy_flash.attention(q, q, q, window=3)",
    "cupy_flash.attention(q, q, q, layout='sbhd')",
    "cupy_flash.attention(q, q, q, bias=0.5)",
    "cupy_flash.attention([1.0], q, q)",
    "cupy_flash.attention(q, q)",
    "cupy_flash.attention(q, q, q, return_lse=True).shape",
    "cupy_flash.attention_varlen(q, q, q, bounds, bounds, 5, 5, mask=bounds)",
    "cupy_flash.attention_vjp(q, q, q, causal='botom')",
    "cupy_flash.attention_backward(q, q, q, q, q, q, causal='botom')",
    "cupy_flash.merge(q, q, q, q, layout='thd')",
    "cupy_flash.compile(dtype='bfloat16', head_dim='64')",
    "cupy_flash.explain(q, q, q, dropout=None)",
    "reference.attention(q, q, q, backend='cpu')",
    "cupy_flash.atention(q, q, q)",
    "cupy_flash.attention_with_kv_cache(q, q, q, causal='bottom_right')",
    "cupy_flash.append_to_kv_cache(q, q, q, q, cache_seqlens='3')",
    "cupy_flash.attention(q, q, q, score_mod=3)",
)


# Expressions with errors: reads of fields that no record has, and values of a wrong type.
NO_FIELDS = (
    "o.casual",
    "c.block_tables",
    "p.nonsense_field",
    "p._replace(head_dimm=3)",
    "p._replace(head_dim='3')",
    "Options(windows=(3, 0))",
    "operands.qq",
    "operands._replace(kk=operands.k)",
    "operands.bias.shape",
    "saved.dlsee",
    "t.tdropout",
    "g.dqq",
    "s.dddout",
    "cache.pages",
)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Return mypy's errors for each call, from one run; torch and jax count as untyped, as in setup.cfg."""
    folder = tmp_path_factory.mktemp("types")
    calls = {"right": (HEAD, RIGHT), "wrong": (HEAD, WRONG), "records": (HEAD + "    pass\n" + RECORDS, NO_FIELDS)}
    for name, (head, lines) in calls.items():
        (folder / f"{name}.py").write_text(head + "".join(f"    {line}\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        files = [str(folder / f"{name}.py") for name in calls]
        report, trouble, _ = api.run(["--config-file", str(ROOT / "setup.cfg"), "--cache-dir", os.devnull, *files])
    assert trouble == ""
    by_call = {}
    for name, number, message in re.findall(r"^.*?(right|wrong|records)\.py:(\d+): error: (.*)$", report, re.MULTILINE):
        head, lines = calls[name]
        by_call.setdefault(lines[int(number) - head.count("\n") - 1], []).append(message)
    assert sum(map(len, by_call.values())) == report.count(" error: ")  # the package itself has no error
    return by_call


def test_results_have_the_type_of_the_arrays(errors):
    assert {call: errors[call] for call in RIGHT if call in errors} == {}


@pytest.mark.parametrize("call", (*WRONG, *NO_FIELDS))
def test_wrong_calls_are_errors(errors, call):
    assert call in errors


# How often the word Any occurs outside adapters/, simulator/ and the module that calls other array libraries, which
# have no types: a number that only falls, but for what a kept plan of a call on KV caches returns, an array or two,
# for the tensors that a kept call of torch's operators reads, for imports of modules that were parts of others, and for
# the arguments of any type that the key of a kept plan meets.
# C's getenv of ctypes, and the fields of a record by name, add 5.
MOST = 270 + 4 + 4 + 4 + 5
UNTYPED = ("adapters", "simulator", "array_libraries.py")
SOURCES = {path.relative_to(ROOT / "cupy_flash"): path for path in sorted((ROOT / "cupy_flash").rglob("*.py"))}
TYPED = [path for name, path in SOURCES.items() if name.parts[0] not in UNTYPED]


def words(text):
    return re.findall(r"\w+", text)


def fields_of_records(path):
    """Return {class.field: annotation} of the NamedTuples, TypedDicts and dataclasses of a module."""
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return {
        f"{record.name}.{ast.unparse(field.target)}": ast.unparse(field.annotation)
        for record in classes
        if {"NamedTuple", "TypedDict", "dataclass"}
        & {words(ast.unparse(origin))[0] for origin in (*record.bases, *record.decorator_list)}
        for field in record.body
        if isinstance(field, ast.AnnAssign)
    }


def test_few_values_have_no_type():
    assert sum(words(path.read_text()).count("Any") for path in TYPED) <= MOST


def test_no_field_of_a_record_is_without_a_type():
    fields = {name: annotation for path in TYPED for name, annotation in fields_of_records(path).items()}
    assert {"Problem.head_dim", "Options.causal", "Array.owner", "Definition.window"} <= fields.keys()
    assert {name: annotation for name, annotation in fields.items() if "Any" in words(annotation)} == {}
