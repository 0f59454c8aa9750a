"""The lines of code of the package, without the simulator, and of the bench stay within a budget.

`python tests/helpers/code_lines.py` prints today's numbers. A feature adds its lines to these numbers, with a comment
that says why.
"""

import code_lines
import pytest

BUDGET = {
    "cupy_flash": [
        (21711, "the package when the budget began"),
        (351, "the engine aten: torch's flash operators on the CPU, with the semantics of attention over them"),
        (287, "micro-kernels with results that the PTX ISA states; ptx --evidence, which names what confirms a form"),
        (83, "torch's flex_attention: the checks of its signature, and lse in the layout of a query"),
        (70, "torch's varlen_attn: the checks of its signature, and packed keys in use as pages of one key"),
        (50, "diffusers: a backend by the name cupy_flash, added to its closed Enum and taken away again"),
        (270, "xFormers' functions: six signatures, 22 classes of masks, lse padding, merged parts"),
        (408, "keyed plans: keys and entries of repeated calls on CuPy and torch, and the node of autograd"),
        (160, "keyed plans of calls on KV caches, and under autograd of calls with other arrays and of packed batches"),
        (49, "keyed plans of calls with mods: numbers in the key, captured arrays, their gradients in the node"),
        (4, "aten: a backward that is computed again has its own out and lse"),
        (30, "bias in packed batches: its shape, its part of each sequence, the lengths of the dbias kernel"),
        (91, "explain() in 80 columns, as a table and as a plot of the tiles of the call; the GPU in a row of info"),
        (1216, "attention_weights, top_weights, key_importance: functions and poses 350, CPU 313, torch 212, jax 201"),
        (745, "statistics= of attention: functions and poses 255, CPU 190, torch 130, jax 100, ring 50, hosts 25"),
        (61, "output_attentions of transformers 22, and multi_head_attention_forward with its weights 39"),
        (130, "attention_weights, top_weights, key_importance on simt: launches 29, their arguments 62, Params 39"),
        (141, "gradients of statistics and weights on kernels, merge() of statistics on a GPU, weights on mma"),
        (224, "array libraries: export, import and tapes of four, and gradients in mlx's and TensorFlow's"),
        (22, "mma: the tiles of a backward whose warps share their scores, and what they read of shared memory"),
        (119, "the engine tcgen05: what it refuses, its tiles, cost model, share of polynomials and launch"),
        (28, "tcgen05 with a strict order of mma, forward and backward, beside the others in check and tune"),
        (182, "micro-kernels of tcgen05: products, order, commits, shapes of loads and stores, allocation in turns"),
        (24, "check with ptxas's checks of tensor memory"),
        (48, "the backward of tcgen05: what it refuses, its tiles, cost model and launches"),
        (625, "selected=: the option, its types and checks 275, on the CPU 250, on its caches 55, torch and jax 35"),
        (
            123,
            "values inside keys: views and their checks 55, backends 20, torch and jax 35, compile and its command 13",
        ),
        (16, "pages of any number of keys: their reciprocal, and when kernels divide by it"),
        (50, "array libraries: variables and tensors of a graph in mods, forward mode and dtypes that are refused"),
        (18, "selected keys: one list's rows in parts, rows and blocks cut at lengths; which arrays a kept call has"),
        (34, "selected_from_block_mask: the lists of torch's BlockMask"),
        (80, "attention_weights of selected keys: on the CPU 59, the width of results and the lists of heads 21"),
        (33, "transformers: lists of keys and of blocks as options, or as a mask for weights and GPUs"),
        (610, "select_keys, selection_loss: functions and poses 230, CPU 178, torch 90, jax 112"),
        (240, "selected keys on simt and mma: launches and workspaces 165, mma 60, checks of lists on a GPU 15"),
        (
            201,
            "quantised caches: options and checks 85, on the CPU 70, torch and jax 15, the kernels' constants, Params "
            "and tiles 30",
        ),
        (90, "shared prefixes: options and checks 50, tiles of a group on the chunks of its prefix 40"),
        (38, "prompts on quantised caches by mma: refusals, legal tiles, and conversions in the predicted times"),
        (122, "shared prefixes in kernels: passes, tiles and workspaces 85, constants and Params 15; compile 22"),
        (145, "aten: kept calls, groups of few queries as rows, and bits that do not depend on threads for few rows"),
        (58, "keyed plans: forms, by which one look-up of the types of all arguments tells what the key reads"),
        (14, "cpu_decode: larger chunks of keys that need no copy"),
        (54, "cpu_decode: kept calls on KV caches; the default backend by C's getenv"),
        (232, "FlashMLA's functions 141, flash-attention 3's qv 34, checks that nothing is broadcast 57"),
        (27, "statistics of selected keys on the CPU"),
        (14, "torch: tangents are refused by operators that have a backward alone"),
        (
            160,
            "keyed plans of SDPA's arguments 70, of append_to_kv_cache 35, of cpu_decode 28; aten: one thread, and the "
            "check of few results 27",
        ),
        (161, "JVP and double backward of selected keys on the CPU"),
        (
            310,
            "select_keys, selection_loss on simt and mma: tiles, launches and workspaces 143, runs 45, Params 60, "
            "pose, dispatch and jax 62",
        ),
        (10, "JVP and double backward of selected keys on simt"),
        (38, "mma_decode: tiles, registers and cost of values inside keys, of which each tile is loaded once"),
        (49, "mma: tiles, registers and cost of the forward of wide values inside keys"),
        (12, "refusals of blocks without lists, and of rows that TMA cannot load; scales in predicted times"),
        (41, "micro-kernels of tcgen05.cp: its shapes with and without swizzling, and products of what it copied"),
        (7, "tcgen05: which tiles store P over S, by the constant of the kernel"),
        (8, "mma_decode: tiles, registers and cost of values inside keys on two warpgroups of wgmma"),
        (40, "records of calls with values inside keys, and tune of them; records of another problem are refused"),
    ],
    "bench": [
        (4163, "the bench when the budget began"),
        (17, "tables mark the fastest, and split in two where a page is too narrow"),
        (9, "overhead: the function that a backend repeats launches with"),
        (12, "overhead: a decode step on a paged cache"),
        (63, "sass: the mainloops of other implementations' cubins beside ours, on the same counters; MAY_SPILL"),
        (8, "overhead: a score_mod that captures a table"),
        (1, "overhead: out and lse of a forward that may return statistics"),
        (16, "torch tensors beside NumPy arrays, medians of ratios, and a budget for implementations beside others"),
        (340, "Blackwell: its model of events 270; rows of static and the softmax's loop in SASS 70"),
        (305, "the backward of Blackwell: its model of events, and the loop of bulk reductions in SASS"),
        (95, "selected: counted bytes and instructions of the look-up of selected keys"),
        (2, "static: MAY_SPILL has two rows of the mma backward whose warps share their scores"),
        (107, "packed: the order of blocks in packed batches, and how evenly they end"),
        (4, "static: MAY_SPILL has four rows of the tcgen05 forward"),
        (30, "Blackwell: a strict order in the models of events, and two loops of the backward in static"),
        (35, "Blackwell: pairs of CTAs, and K and V by turns, in the models of events"),
        (176, "latent: bytes of decodes of values inside keys, and the model of their mainloop"),
        (150, "instructions that convert codes of quantised caches, and predicted times of their decodes"),
        (2, "static rows of decodes of values inside keys"),
        (11, "the decode of values inside keys on wgmma, and P in columns of its own in the model of events"),
    ],
}
LARGEST = 500
# Files that are larger. A number may only fall; a file that no longer exceeds the limit is removed.
LARGER = {
    "cupy_flash/mods/cuda_code.py": 656,
    "cupy_flash/mods/values.py": 523,
    "cupy_flash/problem/records.py": 503,
    "cupy_flash/reference.py": 675,
}


@pytest.mark.parametrize("folder", BUDGET)
def test_the_code_stays_within_its_budget(folder):
    allowed = sum(lines for lines, _ in BUDGET[folder])
    assert code_lines.total(folder) <= allowed, "remove code, or add to the budget the lines of a feature and why"


def test_no_file_is_large():
    lines = {path: n for folder in BUDGET for path, n in code_lines.of_files(folder).items()}
    assert {path: n for path, n in lines.items() if n > LARGER.get(path, LARGEST)} == {}
    assert [path for path in LARGER if lines.get(path, 0) <= LARGEST] == []


CODE = '''"""Two lines

of docstring."""

import os  # counts

# a comment


class A:
    """Docstring."""

    def f(
        self, x
    ):
        """Docstring

        of f."""
        text = """two
lines"""

        def g():
            return """no docstring"""

        return text, g
'''


def test_lines_of_code():
    text = CODE
    assert [text.splitlines()[line - 1].split()[0] for line in sorted(code_lines.code_lines(text))] == [
        "import", "class", "def", "self,", "):", "text", 'lines"""', "def", "return", "return",
    ]  # fmt: skip
    assert code_lines.of_functions(text) == [("A.f", 8), ("A.f.g", 2)]


def test_the_simulator_is_left_out(tmp_path):
    for path in ("cupy_flash/a.py", "cupy_flash/b/c.py", "cupy_flash/simulator/d.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n\n# y\n")
    assert code_lines.total("cupy_flash", tmp_path) == 2
