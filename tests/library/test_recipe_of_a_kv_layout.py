"""CONTRIBUTING's recipe of a layout of KV caches, followed in a copy of the package with a toy: `page_rows` is a block
table whose entries are not pages but the rows of the pool at which they start.
"""

import pytest
from recipes import Copy, files_of

RECIPE = "Adding a layout of KV caches"

DECLARED = (
    (
        "cupy_flash/problem/records.py",
        "    slots: AnyArray | None = common(\n",
        '    page_rows: AnyArray | None = option(ARRAY, axes=("bp",), dtypes=INT32,\n'
        '        shape_text=OF_SEQUENCES, constant="PAGE_ROWS", leading_stride="page_rows_row", addresses="keys")\n'
        "    slots: AnyArray | None = common(\n",
    ),
    (
        "cupy_flash/problem/records.py",
        "    slots: Array | None = None\n",
        "    page_rows: Array | None = None\n    slots: Array | None = None\n",
    ),
    (
        "cupy_flash/problem/records.py",
        "    rotary_dtypes: tuple[str, str] | None = None",
        "    page_rows: bool = False\n    rotary_dtypes: tuple[str, str] | None = None",
    ),
    (
        "cupy_flash/problem/kv_cache.py",
        '        slots="slots" in arrays,\n',
        '        slots="slots" in arrays,\n        page_rows="page_rows" in arrays,\n',
    ),
    ("cupy_flash/kv_cache.py", "block_table, slots, positions,", "block_table, page_rows, slots, positions,"),
    (
        "cupy_flash/kv_cache.py",
        "    block_table: AnyArray | None = None,\n    slots:",
        "    block_table: AnyArray | None = None,\n    page_rows: AnyArray | None = None,\n    slots:",
    ),
    (
        "cupy_flash/problem/argument_types.py",
        "    slots: T | None\n",
        "    page_rows: T | None\n    slots: T | None\n",
    ),
    (
        "kernels_cu/config.cuh",
        "constexpr int SPLIT_SIZE",
        "constexpr bool PAGE_ROWS = false;\nconstexpr int SPLIT_SIZE",
    ),
    ("kernels_cu/params.cuh", "  long long* slots;\n", "  int* page_rows;\n  long long* slots;\n"),
    ("kernels_cu/params.cuh", "  long long cos_row;\n", "  long long page_rows_row;\n  long long cos_row;\n"),
)
IMPLEMENTED = (
    (
        "cupy_flash/problem/records.py",
        "page_rows: AnyArray | None = option(",
        "page_rows: AnyArray | None = common(",
    ),
    (
        "cupy_flash/problem/kv_cache_contents.py",
        "    if given.cache_batch_idx is not None:\n        sequences =",
        "    if given.page_rows is not None:\n"
        "        starts = given.page_rows.numpy()[sequences, keys // cache.page].astype(np.int64)\n"
        "        return starts // cache.page, keys % cache.page\n"
        "    if given.cache_batch_idx is not None:\n        sequences =",
    ),
    (
        "cupy_flash/problem/kv_cache_contents.py",
        "    blocks = range(problem.batch) if",
        "    if given.page_rows is not None:\n        return list(given.page_rows.numpy() // problem.cache.page)\n"
        "    blocks = range(problem.batch) if",
    ),
    (
        "kernels_cu/kv_cache.cuh",
        "table = p.block_table + b * p.table_row;",
        "table = PAGE_ROWS ? p.page_rows + b * p.page_rows_row : p.block_table + b * p.table_row;",
    ),
    (
        "kernels_cu/kv_cache.cuh",
        "table[key >> page_log2] :",
        "table[key >> page_log2] >> (PAGE_ROWS ? page_log2 : 0) :",
    ),
)

CALLS = """
import numpy as np
rng = np.random.default_rng(0)
q = rng.normal(size=(2, 3, 2, 16)).astype(np.float32)
k, v = rng.normal(size=(2, 2, 3, 1, 16)).astype(np.float32)
pages = rng.normal(size=(2, 8, 4, 1, 16)).astype(np.float32)
table = rng.permutation(8).reshape(2, 4).astype(np.int32)
lengths = np.array([5, 11], np.int32)
def result(backend, **layout):
    caches = pages.copy()
    out = cupy_flash.attention_with_kv_cache(q, *caches, k=k, v=v, cache_seqlens=lengths, backend=backend, **layout)
    return out, caches
"""
REFUSED = """
try:
    result("cpu", page_rows=4 * table)
except cupy_flash.UnsupportedError as error:
    assert "  - cpu_decode: it takes no page_rows" in str(error), error
else:
    raise AssertionError("no engine names the option")
"""
SERVED = """
for backend in ("cpu", "simulator"):
    expected = result(backend, block_table=table)
    for actual, wanted in zip(result(backend, page_rows=4 * table), expected):
        np.testing.assert_array_equal(actual, wanted)
"""
NOT_RECORDED = """
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions
from cupy_flash.problem.recorded_call import obstacle
reasons = [
    obstacle(pose_with_cache(q, *pages, CacheOptions(cache_seqlens=lengths, **layout))[0])
    for layout in (dict(block_table=table), dict(page_rows=4 * table))
]
assert reasons == ["", "the record of a call lacks an option of its cache"], reasons
"""


@pytest.fixture
def copy(tmp_path):
    copy = Copy(tmp_path, RECIPE)
    copy.edit(DECLARED)
    return copy


def test_a_layout_that_no_engine_names_is_refused(copy):
    copy.run(CALLS + REFUSED)


def test_a_layout_is_served_on_the_cpu_and_by_the_kernels(copy):
    copy.edit(IMPLEMENTED)
    copy.run(CALLS + SERVED + NOT_RECORDED)


def test_a_layout_takes_few_files():
    assert len(files_of(RECIPE)) <= 10
