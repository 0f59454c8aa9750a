"""Plans depend on problem and device alone and are cached by them; refusals list every engine's reasons; explain."""

import ast
import dataclasses
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import DTYPES, Case, posed
from forget import forget_plans

import cupy_flash
from cupy_flash.arrays import named_dtype
from cupy_flash.device import GPUS, Device, named
from cupy_flash.engines import MODULES, Engine, mma, mma_decode, simt
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.measure.checks.calls import trials
from cupy_flash.plan import measurements
from cupy_flash.plan.plan import candidates, launches_at_any_length, plan
from cupy_flash.plan.refusals import engine_refusals, refusals
from cupy_flash.problem import checks
from cupy_flash.problem.features import ARRAY, Feature
from cupy_flash.problem.records import (
    BACKENDS,
    CACHE_FEATURES,
    ENGINES,
    FEATURES,
    FP8,
    JVP,
    Cache,
    Problem,
    Saved,
    UnsupportedError,
)

DEVICE = Device("cpu", "x86_64", 8)
PROBLEM = posed(Case(q_len=1000, kv_len=1500, causal=True, heads=8, softcap=30.0, bias="1hqk", sink=True))[0].problem

CACHE = Cache("bshd", PROBLEM.dtype, blocks=4, page=16, appended=1, slots=False, rotary=None, split_size=None)
FLOAT8 = named_dtype(FP8)
COMMON_OF_CACHE = {feature.name for feature in CACHE_FEATURES if feature.common}


def test_plans_are_reproducible():
    """Plans are cached by value; after clearing the cache an equal plan is made."""
    first = plan(PROBLEM, DEVICE)
    assert plan(PROBLEM._replace(), Device("cpu", "x86_64", 8)) is first
    forget_plans()
    assert plan(PROBLEM, DEVICE) == first and hash(plan(PROBLEM, DEVICE)) == hash(first)


@pytest.mark.parametrize("record", [PROBLEM, DEVICE, plan(PROBLEM, DEVICE)], ids=["problem", "device", "plan"])
def test_records_are_frozen(record):
    assert record in {record}
    name = record._fields[0] if isinstance(record, tuple) else dataclasses.fields(record)[0].name
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        setattr(record, name, None)


def test_a_given_tile_replaces_the_best():
    """The plan has the given tile, with its cost and launches; refusals of other engines do not change."""
    problem = PROBLEM._replace(backend="simulator")
    best, tile = plan(problem, named("sm_80")), simt.Tile(8, 16, 64)
    forced = plan(problem, named("sm_80"), tile)
    assert (forced.tile, forced.block_q, forced.threads) == (tile, 8, 64)
    assert forced.launches == simt.launches(problem, named("sm_80"), tile) != best.launches
    assert forced.cost > best.cost and forced.refused == best.refused


@pytest.fixture
def toy(monkeypatch):
    """A toy engine, added by CONTRIBUTING's recipe: simt's kernels in one tile, for head dimension 16, at no cost. It
    names no option yet.
    """
    engine = SimpleNamespace(**{name: getattr(simt, name) for name in dir(Engine) if hasattr(simt, name)})
    for name in Engine.__annotations__:
        setattr(engine, name, getattr(simt, name))
    vars(engine).update(
        BACKENDS=("simulator",),
        OPTIONS=frozenset(),
        CACHE_OPTIONS=None,
        DERIVATIVES=(),
        HEAD_DIMS=((16, 16),),
        refusals=lambda problem, device: [] if problem.head_dim == 16 else ["toy takes head dimension 16"],
        tiles=lambda problem, device: [simt.Tile(16, 8, 64)],
        choices=lambda problem, device: [simt.Tile(16, 8, 64)],
        seconds=lambda problem, pairs, device, tile: 0.0,
    )
    monkeypatch.setitem(MODULES, "toy", engine)
    monkeypatch.setattr(checks, "ENGINES", (*ENGINES, "toy"))
    forget_plans()
    yield engine
    forget_plans()


def test_an_engine_is_a_module_and_an_entry(toy):
    """An engine serves only the options that its OPTIONS name: no call at first; then calls with them, whether the plan
    chooses it or the caller names it.
    """
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 20, 2, 16)).astype(np.float32)
    text = cupy_flash.explain(q, k, v, causal=True, softcap=2.0, backend="simulator")
    assert "engine     simt on simulator" in text
    lines = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith("not toy")]
    assert lines == ["it takes no scale", "it takes no softcap", "it takes no layout"]
    with pytest.raises(UnsupportedError, match="toy: it takes no scale"):
        cupy_flash.attention(q, k, v, backend="simulator", engine="toy")
    toy.OPTIONS = simt.OPTIONS - {"softcap"}
    forget_plans()
    assert "engine     toy on simulator" in cupy_flash.explain(q, k, v, backend="simulator")
    out = cupy_flash.attention(q, k, v, causal=True, backend="simulator", engine="toy")
    np.testing.assert_allclose(out, cupy_flash.attention(q, k, v, causal=True), atol=1e-6)
    with pytest.raises(UnsupportedError, match="toy: it takes no softcap"):
        cupy_flash.attention(q, k, v, softcap=2.0, backend="simulator", engine="toy")
    wide = np.zeros((1, 4, 1, 32), np.float32)
    assert "not toy    toy takes head dimension 16" in cupy_flash.explain(wide, wide, wide, backend="simulator")
    with pytest.raises(UnsupportedError, match="toy takes head dimension 16"):
        cupy_flash.attention(wide, wide, wide, backend="simulator", engine="toy")


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        (dict(ARCHES=("sm_90a",)), {}, "sm_80 lacks the instructions of sm_90a"),
        (dict(), dict(derivative=JVP, tangents=("q",)), "it computes no JVP in this version"),
        (dict(), dict(cache=CACHE), "it reads no KV cache in this version"),
        (dict(CACHE_OPTIONS=COMMON_OF_CACHE - {"block_table"}), dict(cache=CACHE), "it takes no block_table"),
        (dict(CACHE_OPTIONS=simt.CACHE_OPTIONS), dict(cache=CACHE._replace(split_size=64)), "pieces of split_size"),
        (dict(CACHE_OPTIONS=simt.CACHE_OPTIONS), dict(cache=CACHE._replace(dtype=FLOAT8)), "as mma_decode does"),
        (dict(OPTIONS=None), {}, "it serves attention on a KV cache alone"),
        (dict(ON_REQUEST=True), {}, "no check has passed on this card yet"),
    ],
    ids=["arch", "derivative", "cache", "cache-option", "split", "cache-dtype", "no-cache", "request"],
)
def test_what_an_engine_does_not_name_is_refused(toy, changes, asked, reason):
    """The toy engine serves the problem as long as it names its options, dtypes and derivatives."""
    named_by_all = dict(OPTIONS=simt.OPTIONS, CACHE_OPTIONS=simt.CACHE_OPTIONS | {"split_size"}, CACHE_DTYPES=(FP8,))
    vars(toy).update(named_by_all, DERIVATIVES=(JVP,))
    problem = PROBLEM._replace(backend="simulator", head_dim=16, head_dim_v=16, bias=None, **asked)
    assert refusals("toy", problem, named("sm_80")) == ()
    vars(toy).update(dict(OPTIONS=simt.OPTIONS, CACHE_OPTIONS=None, CACHE_DTYPES=(), DERIVATIVES=()) | changes)
    (found,) = refusals("toy", problem, named("sm_80"))
    assert reason in found


def test_an_option_of_kv_caches_that_no_engine_names_is_refused(monkeypatch):
    """The toy option is a row of CACHE_FEATURES whose fact is a field of Cache."""
    toy = Feature("toy_slots", ARRAY, fact="slots")
    monkeypatch.setattr("cupy_flash.plan.refusals.CACHE_FEATURES", (*CACHE_FEATURES, toy))
    problem = PROBLEM._replace(dtype=np.dtype("float16"), cache=CACHE._replace(dtype=np.dtype("float16")))
    for engine, module in MODULES.items():
        device = DEVICE if "cpu" in module.BACKENDS else named("sm_90a")
        without, given = (problem._replace(cache=problem.cache._replace(slots=slots)) for slots in (False, True))
        assert not any("toy" in reason for reason in engine_refusals(engine, without, device))
        assert ("it takes no toy_slots" in engine_refusals(engine, given, device)) == (module.CACHE_OPTIONS is not None)


def test_a_check_and_a_compilation_take_every_engine(toy):
    """A check makes calls with the options that the engine names, and finds its kernels by the name of their folder."""
    toy.OPTIONS, toy.HEAD_DIMS = simt.OPTIONS, ((16, 16), (32, 32))
    covering = trials("toy", named("sm_80"), True, quick=False)
    assert {trial.dtype for trial in covering} == set(toy.DTYPES) and {trial.head_dim for trial in covering} == {16}
    assert measurements.text_of("toy") == measurements.text_of("simt")
    toy.OPTIONS, toy.CACHE_OPTIONS, toy.GROUP_ROWS = None, simt.CACHE_OPTIONS, (48,)
    assert not any(trial.backward for trial in trials("toy", named("sm_80"), True, quick=False))
    lengths = {each.q_len for each in ahead.problems(dtype="float32", head_dim=16, cache=True)}
    assert lengths == {*mma_decode.ROWS, 48, mma_decode.ROWS[-1] + 1}


def test_the_registry_is_the_only_list_of_engines():
    """Outside engines/ only problem/records.py lists the engines' names, in the order of the registry."""
    assert tuple(MODULES) == ENGINES
    names = set(ENGINES) - set(BACKENDS)
    others = {  # modules that speak of PTX instructions, or of torch's library of operators, with these names
        "measure/checks/micro_kernels.py": {"mma", "wgmma", "tcgen05"},
        "measure/checks/evidence.py": {"mma", "wgmma"},
        "adapters/torch/registry.py": {"aten"},
    }
    package = Path(cupy_flash.__file__).parent
    for path in package.rglob("*.py"):
        where = path.relative_to(package).as_posix()
        # The simulator names instructions of PTX, too.
        if where.startswith(("engines/", "simulator/")) or where == "problem/records.py":
            continue
        tree = ast.parse(path.read_text("utf-8"))
        found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names}
        assert found <= others.get(where, set()), where


def test_every_option_is_named_by_an_engine():
    """Engines name all options of the tables, and no others.

    A plan cannot refuse an option that it does not see, because it is part of another fact or an array that is only
    read: such a row needs an entry here.
    """
    part_of_a_fact = {"causal", "window", "seed", "selected_block", "selected_rows"}
    only_read = {"v", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "positions", "rotary_sin", "out"}
    only_read |= {"cu_seqlens_q", "max_seqlen_q", "rotary_interleaved"}
    part_of_a_fact |= {"v_scale", "k_zero", "v_zero"}  # that of k_scale, and of the dtype of the caches
    only_read |= {"prefix_lengths", "prefix_group"}
    for table, attribute, fields in (
        (FEATURES, "OPTIONS", {*Problem._fields}),
        (CACHE_FEATURES, "CACHE_OPTIONS", {*Problem._fields, *Cache._fields}),
    ):
        options = {feature.name for feature in table if feature.definition}
        named = set().union(*(getattr(module, attribute) or () for module in MODULES.values()))
        assert named == options
        facts = {feature.field for feature in FEATURES} | {feature.field for feature in table}
        hidden = {x.name for x in table if x.definition and x.field not in fields & facts}
        assert hidden <= part_of_a_fact | only_read


@pytest.mark.parametrize("engine", MODULES)
def test_an_engine_serves_the_dtypes_that_it_names(engine):
    module = MODULES[engine]
    cache = CACHE._replace(page=None) if module.OPTIONS is None else None
    on_cpu = "cpu" in module.BACKENDS
    devices = [DEVICE._replace(torch_flash="")] if on_cpu else [named(arch) for arch in GPUS]
    for name in (*DTYPES, FP8, "int8"):
        plain = dict(softcap=None, bias=None, sink=False, head_dim=64, head_dim_v=64, q_len=8, equal_lengths=True)
        dtype = named_dtype(name)
        problem = PROBLEM._replace(dtype=dtype, cache=cache and cache._replace(dtype=dtype), **plain)
        served = [device for device in devices if not engine_refusals(engine, problem, device)]
        assert bool(served) == (name in module.DTYPES), name
        if not on_cpu and served and module.ARCHES is not None:
            assert {device.arch for device in served} == set(module.ARCHES)


def test_backend_names_the_simulated_gpu():
    """ "simulator" is sm_80; "simulator:ARCH" also runs engines that need that architecture."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 40, 2, 64)).astype(np.float16)
    for backend, arch in (("simulator", "sm_80"), ("simulator:sm_75", "sm_75"), ("simulator:sm_90a", "sm_90a")):
        assert f"on simulator ({arch}," in cupy_flash.explain(q, k, v, backend=backend)
    out = cupy_flash.attention(q, k, v, backend="simulator:sm_90a", engine="wgmma")
    np.testing.assert_allclose(out, cupy_flash.attention(q, k, v), atol=2e-3)


def test_equal_calls_are_one_problem():
    """Calls with equal shapes and options have equal problems, whatever the arrays contain."""
    one, other, different = (
        posed(case)[0].problem
        for case in (Case(causal=True, seed=1), Case(causal=True, seed=2), Case(causal="top_left"))
    )
    assert plan(one, DEVICE) is plan(other, DEVICE)
    assert one != different


@pytest.mark.parametrize("units", [1, 2, 8, 64])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("length", [0, 1, 100, 1000, 100_000, 1_000_000])
def test_any_size_has_a_plan(length, backward, units):
    """Planning allocates nothing, so any length can be planned. An empty problem uses one thread, a large one all."""
    problem = PROBLEM._replace(q_len=length, kv_len=length, backward=backward, bias=None)
    chosen = plan(problem, DEVICE._replace(units=units))
    assert (chosen.device.backend, chosen.engine) == ("cpu", "cpu")
    assert chosen.block_q >= 1 and chosen.block_kv >= 1
    assert 1 <= chosen.threads <= units
    assert 0 <= chosen.cost < np.inf
    if length == 0:
        assert chosen.threads == 1
    if length >= 100_000:
        assert chosen.threads == units


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_tiles_do_not_depend_on_the_number_of_threads(backward):
    """Tile sizes affect rounding, so they must not depend on the number of threads."""
    for batch, heads, length, head_dim in product((1, 3), (1, 4, 32), (1, 100, 300, 512, 1500, 4096), (64, 128)):
        sizes = dict(batch=batch, heads=heads, kv_heads=1, q_len=length, kv_len=length, head_dim=head_dim, bias=None)
        problem = PROBLEM._replace(backward=backward, head_dim_v=head_dim, **sizes)
        plans = [plan(problem, DEVICE._replace(units=units)) for units in (1, 2, 3, 4, 8, 16, 64)]
        assert len({(each.block_q, each.block_kv) for each in plans}) == 1, problem
        assert [each.threads for each in plans] == sorted(each.threads for each in plans)


def test_cost_grows_with_the_length():
    costs = [plan(PROBLEM._replace(kv_len=length, q_len=length), DEVICE).cost for length in (256, 512, 4096, 8192)]
    assert costs == sorted(costs) and costs[-1] > 3 * costs[-2]
    full = PROBLEM._replace(mask=type(PROBLEM.mask)(), q_len=8192, kv_len=8192)
    assert plan(full, DEVICE).cost > 1.5 * costs[-1]  # the causal mask hides half of the pairs


def test_str_is_one_line():
    text = str(plan(PROBLEM, DEVICE))
    assert "\n" not in text
    words = ("forward", "float32 bshd (numpy on cpu)", "batch 2", "1000 queries x 1500 keys", "causal (bottom-right)")
    words += (
        "8 query and 2 key/value heads",
        "D 16",
        "softcap 30",
        "sink",
        "bias (1, 8, 1000, 1500)",
        "x86_64, 8 threads",
    )
    for word in words:
        assert word in text, f"{word!r} not in {text}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            dict(device="cuda:1"), ["cpu: the arrays are on cuda:1, and arrays never change device"], id="device"
        ),
        pytest.param(dict(backend="cuda"), ['cpu: backend="cuda" was asked for'], id="backend"),
        pytest.param(
            dict(engine="wgmma"),
            ['cpu: engine="wgmma" was asked for', "wgmma: the call goes to backend cpu", "wgmma: float32 is not"],
            id="engine",
        ),
        pytest.param(dict(dtype=np.dtype(np.int8)), ["cpu: int8 is not one of float16,"], id="dtype"),
        pytest.param(
            dict(device="cuda:0", backend="simulator", engine="mma"),
            ['engine="mma" was', 'backend="simulator" was', "on cuda:0", 'simt: engine="mma" was'],
            id="all-reasons",
        ),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(UnsupportedError) as caught:
        plan(PROBLEM._replace(**changes), DEVICE)
    message = str(caught.value)
    for word in (*words, "no engine of this version serves this problem", *(f"{engine}: " for engine in MODULES)):
        assert word in message, f"{word!r} not in:\n{message}"


def test_an_explicit_choice_is_kept():
    chosen = plan(PROBLEM._replace(backend="cpu", engine="cpu"), DEVICE)
    assert (chosen.device.backend, chosen.engine) == ("cpu", "cpu")
    assert dict(chosen.refused)["mma"][0] == 'engine="cpu" was asked for'


def test_explain():
    """The text has the engine, its tiles, the reason, and a line per reason against each other engine."""
    case = Case(q_len=300, kv_len=500, causal=True, dropout=0.1)
    q, k, v, options, *_ = case.call()
    text = cupy_flash.explain(q, k, v, **options)
    chosen = posed(case)[0]
    assert text == chosen.explain()
    for word in (
        str(chosen.problem),
        "engine",
        "backend cpu",
        f"{chosen.block_q} queries x {chosen.block_kv} keys",
        "why",
    ):
        assert word in text, f"{word!r} not in:\n{text}"
    lines = text.splitlines()
    assert all(any(line.startswith(f"not {engine} ") for line in lines) for engine in MODULES if engine != "cpu")


# Plans for a GPU that is not present


def on_gpu(arch="sm_80", **changes):
    return plan(PROBLEM._replace(**changes), named(arch))


def test_planning_needs_no_gpu():
    """For every architecture the launches fit the shared memory, and the grid has a block per output tile."""
    for arch in GPUS:
        for backward in (False, True):
            chosen = on_gpu(arch, backward=backward, q_len=5000, head_dim=256, head_dim_v=256)
            assert (chosen.device.arch, chosen.engine) == (arch, "simt")
            for launch in chosen.launches:
                assert launch.shared_bytes <= chosen.device.shared_bytes
                assert launch.threads == chosen.threads
    forward = on_gpu().launches[0]
    assert forward.grid == (-(-1000 // on_gpu().block_q), 8, 2)


def test_a_grid_that_is_too_large_is_refused():
    on_gpu(batch=65535, backward=True)
    with pytest.raises(UnsupportedError, match="simt: 65536 sequences are more than the 65535"):
        on_gpu(batch=65536)
    with pytest.raises(UnsupportedError, match="simt: 65536 sequences"):
        on_gpu(batch=65535, layout="thd")
    with pytest.raises(UnsupportedError, match="simt: 65536 heads"):
        on_gpu(heads=65536)
    long = dict(q_len=10_000_000, kv_len=10_000_000)
    assert on_gpu(**long).launches
    with pytest.raises(UnsupportedError, match="simt/backward_bias needs a grid of .* x 1 x 1 blocks; the limits are"):
        on_gpu(**long, bias=(10_000_000, 10_000_000), backward=True, bias_gradient=True)


def test_kernels_without_blocks_are_not_launched():
    """CUDA refuses an empty grid, so no such kernel is launched; kernels that write non-empty outputs still are."""
    assert on_gpu(batch=0).launches == ()
    kernels = [launch.function for launch in on_gpu(batch=0, backward=True, bias_gradient=True).launches]
    assert kernels == ["backward_bias", "dsink"]
    for bias in ((2, 8, 0, 1500), (0,)):
        kernels = [launch.function for launch in on_gpu(bias=bias, backward=True, bias_gradient=True).launches]
        assert kernels == ["delta", "backward_kv", "backward_q", "dsink"]


BFLOAT16 = DTYPES["bfloat16"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", GPUS)
def test_half_precision_goes_to_tensor_cores(arch, backward):
    for dtype in (np.float16, BFLOAT16, np.float32, np.float64):
        has_them = dtype == np.float16 or (dtype == BFLOAT16 and arch != "sm_75")
        chosen = on_gpu(arch, dtype=np.dtype(dtype), backward=backward, head_dim=64, head_dim_v=64)
        assert chosen.engine == ("mma" if has_them else "simt")
        assert all(launch.shared_bytes <= chosen.device.shared_bytes for launch in chosen.launches)


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        pytest.param("sm_90", {}, "float32 is not float16 or bfloat16", id="dtype"),
        pytest.param(
            "sm_75", dict(dtype=BFLOAT16), "the tensor cores of sm_75 multiply float16, not bfloat16", id="turing"
        ),
        pytest.param(
            "sm_90", dict(dtype=BFLOAT16, head_dim=577), "head dimension 577 is larger than 576", id="head-dim"
        ),
        pytest.param(
            "sm_75",
            dict(dtype=np.dtype(np.float16), head_dim=512, head_dim_v=512, backward=True),
            "no tile of head dimension 512 fits the 65536 bytes of shared memory",
            id="shared-memory",
        ),
    ],
)
def test_mma_refuses_what_tensor_cores_do_not_support(arch, changes, words):
    with pytest.raises(UnsupportedError, match=f"mma: {words}"):
        on_gpu(arch, **{"engine": "mma"} | changes)


def test_deterministic_has_no_unordered_additions():
    """With deterministic=True no tile adds dQ atomically; without it some do."""
    for arch in GPUS:
        problem = PROBLEM._replace(dtype=np.dtype(np.float16), backward=True, head_dim=64, head_dim_v=64)
        adds = [tile.q_tile is None for tile in mma.tiles(problem, named(arch))]
        assert any(adds) and not all(adds)
        problem = problem._replace(deterministic=True)
        assert all(tile.q_tile is not None for tile in mma.tiles(problem, named(arch)))
        kernels = [launch.kernel for launch in plan(problem, named(arch)).launches]
        assert "mma/backward_q" in kernels and "dq" not in kernels


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("q_len", [70, 300])
def test_small_problems_run_on_tensor_cores(q_len, backward):
    """mma is cheaper even here: latency costs more than products, and simt waits for two tiles per step."""
    problem = posed(Case(q_len, q_len, kv_heads=4, head_dim=32, head_dim_v=32, dtype="float16"))[0].problem
    assert plan(problem._replace(backward=backward), named("sm_80")).engine == "mma"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_workspaces_are_linear_in_the_length(packed):
    """The backward allocates lse2 and delta per row, and fp32 sums of dQ if it adds them; a packed sequence gets 16
    more rows.
    """
    tile = mma.Tiles(64, 64, q_tile=None, kv_tile=mma.Tile(64, 64, 128, 1, 1, add_dq=True), bias_tile=None)
    for length in (1, 100, 1000, 2000):
        lengths = dict(q_lengths=(length,) * 2, kv_lengths=(length,) * 2, packed=True) if packed else {}
        case = Case(length, length, heads=2, kv_heads=1, head_dim=40, dtype="bfloat16", **lengths)
        call = case.call()
        on_cpu, operands = posed(case, Saved(call.dout, call.dout, call.dlse, None))
        chosen, works = plan(on_cpu.problem._replace(engine="mma"), named("sm_90"), tile), []
        run_plan.backward(chosen, operands, works.append)
        names = [workspace.name for workspace in chosen.workspaces(length, length)]
        assert names == ["delta", "lse2", "dq_sums"]
        bytes_of = {name: works[0].results[name].numpy().nbytes for name in names}
        rows = 2 * len(call.q) if packed else 2 * 2 * length  # rows of all heads
        assert bytes_of["delta"] == bytes_of["lse2"] == 4 * rows
        assert bytes_of["dq_sums"] <= 4 * 48 * (rows + 2 * 2 * 16)


@pytest.mark.parametrize(
    ("factor", "chosen", "other"), [(0.5, "mma", "simt"), (2, "simt", "mma")], ids=["less", "more"]
)
def test_the_smallest_cost_of_all_engines_is_chosen(factor, chosen, other, monkeypatch):
    """The cheapest engine is chosen; explain() shows the cost of the other one, and compile() builds the kernels of
    both, because at another length the other one may be cheaper.
    """

    def seconds(problem, pairs, device, tile):
        return factor * simt.seconds(problem, pairs, device, tile)

    def launches(problem, device, tile):
        return tuple(
            launch._replace(kernel=launch.kernel.replace("simt", "mma"))
            for launch in simt.launches(problem, device, tile)
        )

    alone = on_gpu()
    monkeypatch.setitem(MODULES, "mma", SimpleNamespace(**{**vars(simt), "seconds": seconds, "launches": launches}))
    forget_plans()
    both = on_gpu()
    assert (both.engine, both.launches[0].kernel) == (chosen, f"{chosen}/forward")
    assert (both.block_q, both.block_kv, both.threads) == (alone.block_q, alone.block_kv, alone.threads)
    assert both.cost == pytest.approx(min(factor, 1) * alone.cost)
    slower = f"its smallest predicted time is {max(factor, 1) * alone.cost * 1e3:.3g} ms"
    assert dict(both.refused)[other] == (slower,)
    assert f"not {other:<7}{slower}" in both.explain()
    assert {launch.kernel for launch in launches_at_any_length(PROBLEM, both.device)} == {"simt/forward", "mma/forward"}
    assert on_gpu(engine="simt").engine == "simt"
    forget_plans()


def test_candidates_are_every_tile_and_the_plans_first():
    half = dict(dtype=np.dtype(np.float16), head_dim=64, head_dim_v=64)
    for chosen in (on_gpu(**half), on_gpu(**half, backward=True), on_gpu()):
        tiles, plans = zip(*candidates(chosen, chosen.engine), strict=True)
        assert set(tiles) == set(MODULES[chosen.engine].tiles(chosen.problem, chosen.device)) and len(tiles) > 3
        assert plans[0] == chosen and all(each.problem == chosen.problem for each in plans)
        assert [each.cost for each in plans] == sorted(each.cost for each in plans)
        assert len({each.launches for each in plans}) == len(tiles)
    assert {each.engine for _, each in candidates(on_gpu(**half), "simt")} == {"simt"}
