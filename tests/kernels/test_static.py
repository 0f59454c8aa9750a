"""The static gate: kernels of plans have no spills, warnings or bank conflicts; counts of their instructions."""

import functools
import inspect
import json
from dataclasses import replace

import numpy as np
import pytest

from bench.__main__ import main
from bench.kernel_development import sass, static, static_mods, static_tables
from bench.kernel_development.fingerprint import fingerprint
from bench.kernel_development.tables import block
from bench.results import ROOT
from cupy_flash import device
from cupy_flash.gpu import ahead
from cupy_flash.jit import kernel_cache, nvrtc
from cupy_flash.jit.source import assemble


def unseen(_):
    pass


@pytest.fixture(scope="module")
def problems(pytestconfig):
    """Return problems with high register pressure; `python -m bench static` compiles all problems."""
    return ["fp16 D 128", *(["fp64 D 64", "KV cache fp16 D 64"] if pytestconfig.option.exhaustive else [])]


SAMPLE = ("mma/forward", (64, 32, 128))


@pytest.fixture(scope="module")
def stored_result():
    """Return the stored result, of all compilers."""
    return static.Result.of(
        json.loads((ROOT / "bench" / "results" / "static.json").read_text(encoding="utf-8"))["static"]
    )


@pytest.fixture(scope="module")
def stored_kernels(stored_result):
    """Return the kernels of the stored result, of all compilers."""
    return stored_result.kernels


@pytest.fixture(scope="module")
def compiled(problems, stored_kernels, pytestconfig):
    """Return the kernels of `problems`; stored rows of the same text and compiler stand for kernels not compiled here.

    The default tier compiles SAMPLE, which `test_a_stored_row_is_what_the_compiler_gives` compares with its rows, and
    whatever changed since the result was stored.
    """
    tasks, release = static.tasks(problems, static.ARCHS), static._release()
    chosen = [row for row in stored_kernels if (row.problem, row.arch) in tasks and row.compiler == release]
    chosen = [row for row in chosen if (row.kernel, row.tile) != SAMPLE and not pytestconfig.option.exhaustive]
    return static.compile_all(problems, static.ARCHS, [None], 1, unseen, chosen)


SAMPLE_STEPS = ("mma/forward", "wgmma/forward")
OF_STEPS = ("fp32 D 64", "fp16 D 128", "Hopper bf16 D 128")
NEWEST = "13.5.37"  # the compiler whose code the stored steps count


@pytest.fixture(scope="module")
def steps(stored_result, pytestconfig):
    """Yield the steps of OF_STEPS; stored steps of the same text stand for steps not counted here.

    Kernels are compiled with the flags of a user's call, which unroll more than in tests. The default tier counts
    SAMPLE_STEPS, which `test_a_stored_step_is_what_the_simulator_counts` compares, and whatever changed since.
    """
    can_stand = static._release() == NEWEST and not pytestconfig.option.exhaustive
    chosen = [step for step in stored_result.steps if can_stand and step.problem in OF_STEPS]
    chosen = [step for step in chosen if step.kernel not in SAMPLE_STEPS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "flags", inspect.unwrap(nvrtc.flags))
        kernel_cache.compiled.cache_clear()
        yield static.count_steps(OF_STEPS, unseen, chosen)
    kernel_cache.compiled.cache_clear()


def test_gate(compiled, steps):
    assert static.complaints(compiled, steps) == []
    assert {record.arch for record in compiled} == {arch for arch in static.ARCHS if arch != static.BLACKWELL}
    assert all(0 < record.registers <= 255 and record.cubin_bytes > 0 and record.seconds > 0 for record in compiled)


def test_a_stored_row_is_what_the_compiler_gives(compiled, stored_kernels):
    """All columns of a kernel compiled here, but for the seconds and for the bytes, of which Params takes some."""
    today = {(row.problem, row.arch, row.compiler, row.fingerprint): row for row in compiled}
    pairs = [(today.get((row.problem, row.arch, row.compiler, row.fingerprint)), row) for row in stored_kernels]
    for row, kept in pairs:
        assert row is None or replace(row, seconds=kept.seconds, cubin_bytes=kept.cubin_bytes) == kept


def test_a_stored_step_is_what_the_simulator_counts(steps, stored_result):
    """The sample's numbers, of the simulator and of the machine code of the compiler that counted the stored ones."""
    today = {(step.problem, step.fingerprint): step for step in steps}
    for kept in stored_result.steps:
        step = today.get((kept.problem, kept.fingerprint))
        assert step is None or static._release() != NEWEST or step == kept


def test_every_kernel_that_a_plan_may_choose_is_compiled(compiled, problems):
    for problem, arch in static.tasks(problems, static.ARCHS):
        launches = ahead.launches(device.named(arch, "cuda"), **static.PROBLEMS[problem])
        kernels = {
            (record.kernel, record.tile) for record in compiled if (record.arch, record.problem) == (arch, problem)
        }
        of_plans = {(launch.kernel, launch.tile) for launch in launches}
        assert of_plans <= kernels
        # A tune also chooses among decodes with a producer warp or in clusters.
        assert {kernel for kernel, _ in kernels - of_plans} <= {"mma/decode"}


def test_fma_per_score(steps):
    """FMAs per score: 2 D in the forward, 4 D in the dK/dV kernel, 3 D in the dQ kernel."""
    fma = {step.kernel: step.per_score["fma"] for step in steps if step.sass is None}
    for kernel, products in {"simt/forward": 2, "simt/backward_kv": 4, "simt/backward_q": 3}.items():
        assert 64 * products <= fma[kernel] < 64 * products * 1.05


def test_instructions_of_the_steady_loop(steps):
    """An mma.m16n8k16 has 2048 products, so 2 D products per score are D / 32 instructions of a warp per 32 scores.

    There is one exponential per score, and at D 128 the number of other instructions is bounded.
    """
    sass = {step.kernel: step.sass.per_score for step in steps if step.kernel.startswith("mma/")}
    for kernel, products, most in (
        ("mma/forward", 2, 8.6),
        ("mma/backward_kv", 4, 20.2),
        ("mma/backward_q", 3, 12.1),
        ("mma/backward", 5, 19.8),
    ):
        assert sass[kernel]["products"] == 128 * products / 64
        assert sass[kernel]["exp"] == 1
        assert 5 < sum(sass[kernel].values()) - sass[kernel]["products"] <= most


JVP_LIMITS = {("q", "k", "v"): 3.2, ("q", "v"): 2.7, ("q",): 2.2}  # by the inputs that have tangents
LIMITS_OF_128 = {  # bench/NOTES.md has the reasons
    "bfloat16": JVP_LIMITS | {("q",): 3.2}, "float16": JVP_LIMITS | {("q", "v"): 2.8, ("q",): 3.4},
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tangents", JVP_LIMITS, ids="-".join)
def test_instructions_of_derivatives(tangents, dtype, head_dim):
    """Instructions per score on sm_80, in the tiles of plans, relative to the forward and the backward.

    A JVP has 6, 5 or 4 products where the forward has 2; a double backward has 15 where a backward with a kernel for
    dQ has 7.
    """

    def per_score(*kernels, **config):
        chosen = [
            launch
            for backward in (False, True)
            for launch in static._chosen(config, backward, "sm_80", deterministic=True).launches
        ]
        counts = [static._sass(x, "sm_80").per_score for x in chosen if x.kernel in kernels]
        assert len(counts) == len(kernels)
        return np.array([sum(count["products"] for count in counts), sum(sum(count.values()) for count in counts)])

    first = functools.partial(per_score, dtype=dtype, head_dim=head_dim, engine="mma")
    derivatives = functools.partial(first, tangents=tangents)
    backward, second = first("mma/backward_kv", "mma/backward_q"), derivatives("mma/second_kv", "mma/second_q")
    jvp = derivatives("mma/jvp")
    limits = JVP_LIMITS if head_dim == 64 else LIMITS_OF_128[dtype]
    assert (jvp <= limits[tangents] * first("mma/forward")).all()
    assert (second <= 2.3 * backward).all()
    assert (jvp + second <= 3.3 * backward).all()


def test_wgmma_per_score(steps):
    """wgmma of sm_90a is 64 x N x 16. The counts are for D 128.

    In the mainloop of the forward a warpgroup issues 8 wgmmas for S of a tile, and one per 16 keys for P V. In the
    backward it issues 8 each for S and dP, one per 16 queries for dV and dK, and one per 16 keys for dQ.
    """
    name = "Hopper bf16 D 128"
    assert name in OF_STEPS
    assert [static.is_served(name, arch) for arch in static.ARCHS] == [False, False, True, False]
    assert static.counted([name], ["sm_80"]) == []
    forward, backward, in_order = (step for step in steps if step.problem == name)
    block_q, block_kv, _ = forward.tile
    assert forward.sass.per_score["products"] == (8 + block_kv / 16) * 2 * block_q / (block_q * block_kv)
    block_q, block_kv, _ = backward.tile
    per_warpgroup = 2 * 8 + 2 * block_q / 16 + block_kv / 16
    assert backward.sass.per_score["products"] == per_warpgroup * 256 / (block_q * block_kv)
    # The backward also adds dQ to global memory: 8 instructions and their addresses per 32 scores of a thread. A
    # deterministic one also waits for its turn, signals the next, and reads and writes the semaphore of dQ.
    for step, most in ((forward, 7), (backward, 15), (in_order, 16)):
        per_score = step.sass.per_score
        assert per_score["exp"] == 1
        assert 4 < sum(per_score.values()) - per_score["products"] <= most
        assert sum(per_score.values()) < step.sass.longest < 2 * sum(per_score.values())
        assert static.complaints([], [step]) == [] and 1 <= step.bytes_over_least <= 1 + 2e-4 * (step is in_order)
    # Exponentials overlap with wgmma: the forward computes all exponentials of a tile before it waits for the last
    # product (P V), and the backward before it waits for the second product (dP).
    for step, number in ((forward, -1), (backward, 1), (in_order, 1)):
        waits = [wait for wait in step.sass.waits if "WARPGROUP" in wait.instruction]
        assert waits[number].exps == step.tile[0] * step.tile[1] / 256


MASKED, RESCALED = 1.3, 0.08  # instructions a score: of a limit that cuts a tile, and of a row max that grows


def test_blackwell_softmax_per_score():
    """A step has one exponential a score and at most 2.6 other instructions, without masks and polynomials.

    The longest path has two limits, the first and the last key.
    """
    name = "Blackwell bf16 D 128"
    (each,) = (x for x in static.counted([name]) if x.launch.kernel == "tcgen05/forward")
    assert (each.arch, each.launch.tile) == ("sm_100a", (256, 128, 512))
    plain = each.launch._replace(constants=tuple((dict(each.launch.constants) | {"POLYNOMIALS": 0}).items()))
    step = static._sass(plain, each.arch)
    assert step.per_score["exp"] == 1 and 3 < sum(step.per_score.values()) <= 3.6
    assert step.longest - sum(step.per_score.values()) <= 2 * MASKED + RESCALED
    assert [static.knows(arch, "12.8.93") for arch in ("sm_100a", "sm_103a")] == [True, False]


def gpu_scope_fences(kernel, **constants):
    """Return the number of GPU-scope memory fences (MEMBAR) after the first wgmma of a kernel."""
    on = device.named("sm_90a", "cuda")
    launches = ahead.launches(on, dtype="bfloat16", head_dim=128, engine="wgmma")
    launch = next(each for each in launches if each.kernel == kernel)
    text = assemble(kernel, dict(launch.constants) | constants)
    instructions, _ = sass.disassemble(nvrtc.compile(text, kernel, on.arch).code)
    first = next(n for n, instruction in enumerate(instructions) if sass.opcode(instruction) == "HGMMA")
    return sum("MEMBAR" in instruction and "CTA" not in instruction for instruction in instructions[first:])


def test_fences_of_global_memory():
    """A GPU-scope fence takes as long as a read of global memory, so each kernel has only one in its mainloop or
    epilogue.

    With KV multicast it precedes the exit of the pair, and releases of slots need none. In a deterministic backward it
    precedes the release of a turn.
    """
    assert gpu_scope_fences("wgmma/forward", KV_MULTICAST=True, PERSISTENT=False, PINGPONG=False) == 1
    assert gpu_scope_fences("wgmma/backward", DQ_IN_ORDER=True, DQ_IN_BULK=False) == 1


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   ISETP.GT.AND P0, PT, R2, R3, PT ;
        /*0020*/              @P0 BRA `(.L_x_2) ;
        /*0030*/                   LDGSTS.E.128 [R4], [R6.64] ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R8, R12, R16, R8 ;
        /*0048*/                   BRA.DIV ~URZ, `(.L_x_4) ;
        /*0050*/             @!P1 BRA `(.L_x_3) ;
        /*0060*/                   FMUL R20, R20, R21 ;
        /*0070*/                   FMUL R22, R22, R21 ;
.L_x_3:
        /*0080*/                   MUFU.EX2 R24, R24 ;
        /*0090*/              @P2 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_3) ;
"""


def test_the_shortest_path_through_a_loop():
    """The shortest path through the loop includes the predicated copy and skips the rescaling of O; lanes do not
    diverge.
    """
    instructions, labels = sass.parse(LISTING)
    assert sass.loops(instructions, labels)[0] == (1, 10)
    executed = [sass.opcode(x) for x in sass.shortest_round(instructions, labels, 1, 10)]
    assert executed == ["ISETP", "BRA", "LDGSTS", "HMMA", "BRA", "BRA", "MUFU", "BRA"]


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(dict(spills=4), "spills 4 bytes", id="spills"),
        pytest.param(dict(warnings=("warning: C7510",)), "warning: C7510", id="warnings"),
    ],
)
def test_gate_fails_for_a_kernel(change, words):
    launch = ahead.launches(device.named("sm_75", "cuda"), dtype="float32", head_dim=8, backward=False)[0]
    kernel = static._compile_launch("tiny", launch, "sm_75")
    assert static.complaints([kernel], []) == []
    (complaint,) = static.complaints([replace(kernel, **change)], [])
    assert words in complaint and kernel.arch in complaint


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(dict(bank_conflicts=1), "1 bank conflicts", id="conflicts"),
        pytest.param(dict(bytes_over_least=1.2), "1.20 times the minimum", id="bytes"),
    ],
)
def test_gate_fails_for_a_step(change, words):
    step = static.Step(
        "fp32 D 64", "simt/forward", (64, 64, 128), "", {}, bank_conflicts=0, bytes_over_least=1.0, sass=None
    )
    assert static.complaints([], [step]) == []
    (complaint,) = static.complaints([], [replace(step, **change)])
    assert words in complaint


TINY = {name: dict(dtype="float32", head_dim=dim, backward=False) for name, dim in (("tiny", 8), ("small", 16))}


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Return (arguments of the command, list of compiled kernels) for two problems on one architecture.

    A function replaces the compiler. There are no tile steps and no mods.
    """
    compiled = []

    def compile_launch(name, launch, arch):
        compiled.append((name, launch.kernel, launch.tile))
        return static.Kernel(
            name, launch.kernel, launch.tile, arch, fingerprint(launch), 0, "13.5.37", 8, 0, 9, 0.5, ()
        )

    monkeypatch.setattr(static, "PROBLEMS", TINY)
    monkeypatch.setattr(static, "ARCHS", ("sm_75",))
    monkeypatch.setattr(static, "MAINLOOPS", ())
    monkeypatch.setattr(static_mods, "MODS", {})
    monkeypatch.setattr(static, "ProcessPoolExecutor", ThisProcess)
    monkeypatch.setattr(static, "_compile_launch", compile_launch)
    monkeypatch.setattr(static, "_release", lambda: "13.5.37")
    return ["static", "--out", str(tmp_path)], compiled


class ThisProcess:
    """A ProcessPoolExecutor without a process."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, function, *arguments):
        return map(function, *arguments)

    def shutdown(self, **_):
        pass


def stored(folder):
    return json.loads((folder / "static.json").read_text())["static"]


def test_command(tiny, tmp_path, capsys, monkeypatch):
    """The JSON holds the contents of the tables; the exit status is 1 if the gate fails."""
    arguments, compiled = tiny
    assert main(arguments) == 0
    (table,) = static_tables.tables(stored(tmp_path))
    assert table.rows[0][:2] == ["tiny", "simt/forward"] and table.markdown() in block("static", tmp_path)
    assert f"{len(compiled)} kernels." in capsys.readouterr().out
    monkeypatch.setattr(static, "complaints", lambda *_: ["something spills"])
    assert main(arguments) == 1
    assert "something spills" in capsys.readouterr().out


def test_a_result_is_read_as_it_was_written(compiled, steps):
    rows = [replace(compiled[0], compiler="12.8.93", registers=77, warnings=("warning: C7510",)), *compiled[:3]]
    row = static_mods.Added("ALiBi", "wgmma/forward", (128, 96, 384), "1f", 6.0, 4.5, 20.0, 5.0, 0)
    result = static.Result(rows, steps, [row])
    section = json.loads(json.dumps(result.record()))
    assert static.Result.of(section) == result
    assert section["columns"][-2:] == ["12.8.93", compiled[0].compiler] and len(section["kernels"]) == 3


def changed(monkeypatch, problem):
    """Change every kernel of a problem."""
    launches = static._launches

    def changed_launches(name, arch):
        chosen = launches(name, arch).values()
        if name == problem:
            chosen = [launch._replace(shared_bytes=launch.shared_bytes + 16) for launch in chosen]
        return {fingerprint(launch): launch for launch in chosen}

    monkeypatch.setattr(static, "_launches", changed_launches)


def test_stale_rows_are_named_and_made_again(tiny, tmp_path, capsys, monkeypatch):
    """--check compiles nothing and names the rows whose kernels have changed; --update compiles these alone.

    A row of another compiler that has no successor is stale until a run with that compiler.
    """
    arguments, compiled = tiny
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    small = [row for row in compiled if row[0] == "small"]
    assert 1 < len(small) < len(compiled)
    compiled.clear()
    changed(monkeypatch, "small")
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1 and compiled == []
    output = capsys.readouterr().out
    assert f"{len(set(small))} stale rows" in output and "tiny" not in output
    assert "simt/forward, small" in output and "sm_75" in output
    assert main([*arguments, "--update"]) == 0
    assert compiled == small
    assert main([*arguments, "--check"]) == 0

    section = stored(tmp_path)
    section["columns"].append("12.8.93")
    section["kernels"] = [json.dumps([*row, row[-1]]) for row in map(json.loads, section["kernels"])]
    row = json.loads(section["kernels"][0])
    section["kernels"][0] = json.dumps([*row[:-1], None])
    (tmp_path / "static.json").write_text(json.dumps({"static": section}))
    compiled.clear()
    assert main([*arguments, "--update"]) == 1 and compiled == []
    assert "stale, NVRTC 12.8.93: simt/forward, tiny" in capsys.readouterr().out


def test_an_interrupted_run_is_continued(tiny, tmp_path, monkeypatch):
    """Rows are written as they are made, and --update makes those that are missing."""
    arguments, compiled = tiny
    compile_launch = static._compile_launch

    def interrupted(name, launch, arch):
        if name == "small":
            raise KeyboardInterrupt
        return compile_launch(name, launch, arch)

    with monkeypatch.context() as patch:
        patch.setattr(static, "_compile_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    done = len(compiled)
    assert done == len(stored(tmp_path)["kernels"]) > 0 and {name for name, *_ in compiled} == {"tiny"}
    assert main([*arguments, "--update"]) == 0
    assert {name for name, *_ in compiled[done:]} == {"small"}


def test_steps_and_mods_are_counted_again_only_if_stale(steps, monkeypatch):
    monkeypatch.setattr(static, "_count", lambda each: replace(steps[0], kernel="counted again"))
    others = [replace(steps[-1], problem="another")]
    old = [replace(steps[0], fingerprint="of another kernel"), *steps[1:], *others]
    again = static.count_steps(OF_STEPS, unseen, old)
    assert [step.kernel for step in again if step not in old] == ["counted again"]
    assert len(again) == len(old) and set(map(id, others)) <= set(map(id, again))

    (case, *_) = static_mods.cases_of("mma", "sm_80", "ALiBi", False)
    row = static_mods.Added("ALiBi", case.launch.kernel, case.launch.tile, case.fingerprint, 6.0, 4.5, 20.0, 5.0, 0)
    monkeypatch.setattr(static_mods, "cases", lambda _: [case])
    monkeypatch.setattr(static_mods, "measure", lambda _: "measured")
    assert static_mods.count(["ALiBi"], unseen, [row]) == [row]
    assert static_mods.count(["ALiBi"], unseen, [replace(row, fingerprint="1f")]) == ["measured"]


STORED = ROOT / "bench" / "results"
RELEASES = {"12.8.93", "12.9.86", "13.5.37"}  # of NVRTC


def test_stored_result_has_no_spill():
    """bench/results/static.json covers every architecture with NVRTC 12 and 13.

    `test_stored_results_are_not_stale` names the rows that are missing, and those of older kernels.
    """
    result = static.Result.of(stored(STORED))
    assert {kernel.arch for kernel in result.kernels} == set(static.EVERY_ARCH)
    assert {"12.8.93", "13.5.37"} <= {kernel.compiler for kernel in result.kernels} <= RELEASES
    assert {kernel.problem for kernel in result.kernels} <= set(static.SCARCE)
    assert static.complaints(result.kernels, result.steps) + static_mods.complaints(result.mods) == []
    assert len({(kernel.kernel, kernel.arch, kernel.fingerprint) for kernel in result.kernels}) > 500


@pytest.mark.parametrize(("name", "compiler"), static.MAY_SPILL)
def test_only_named_rows_may_spill_and_do(name, compiler):
    _, problem, _, arch = name.split(", ")
    rows = [kernel for kernel in static.Result.of(stored(STORED)).kernels if kernel.name == name]
    if not rows:  # of a problem that is not stored: only the compiler itself can tell
        if compiler != static._release():
            return
        launches = [
            each for each in static._launches(problem, arch).values() if static._name(problem, each, arch) == name
        ]
        rows = [static._compile_launch(problem, launch, arch) for launch in launches]
    spilling = max((kernel for kernel in rows if kernel.compiler == compiler), key=lambda kernel: kernel.spills)
    assert spilling.spills == static.MAY_SPILL[name, compiler], "remove the row of MAY_SPILL, or lower its bytes"
    for kernel in replace(spilling, compiler="99.0.0"), replace(spilling, spills=spilling.spills + 1):
        expected = f"{name}, NVRTC {kernel.compiler}: spills {kernel.spills} bytes"
        assert static.complaints([kernel], []) == [expected]


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["static --all", "predict"])
def test_stored_results_are_not_stale(command, capsys):
    """`bench static --all --update` and `bench predict` make the rows again whose kernels have changed."""
    status = main([*command.split(), "--check", "--out", str(STORED)])
    assert status == 0, capsys.readouterr().out
