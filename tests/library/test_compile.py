"""compile() before the first call: it covers all launches of later calls, reports them, and needs no GPU."""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import OPTIONS, Case, posed, run

import cupy_flash
from cupy_flash import device
from cupy_flash.__main__ import main
from cupy_flash.gpu import ahead
from cupy_flash.jit import kernel_cache, nvrtc
from cupy_flash.plan.plan import plan
from cupy_flash.problem.records import DTYPES, Saved

ARCHS = ("sm_75", "sm_80", "sm_90a")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(folder))
    return folder


def kernels(launches):
    return {(launch.kernel, launch.constants, launch.threads, launch.shared_bytes) for launch in launches}


def planned(problem, on):
    return plan(problem._replace(device="cuda:0", backend=None), on)


def words(case):
    """Return the arguments of compile() for a case: dtypes in place of arrays."""
    given = {}
    for name, value in case.call().options.items():
        if isinstance(value, np.ndarray):
            given[name] = value.dtype.name if value.dtype.name in DTYPES else True
        elif name != "seed":
            given[name] = value
    sizes = dict(head_dim=case.head_dim, head_dim_v=case.head_dim_v, group=case.heads // case.kv_heads)
    return dict(dtype=case.dtype, packed=case.packed, return_lse=case.dlse) | sizes | given


@pytest.mark.parametrize("name", [name for name, case in OPTIONS.items() if case.head_dim <= 256])
def test_covers_the_call(name):
    """compile() covers the launches of a forward and a backward, for every option."""
    case, on = OPTIONS[name], device.named("sm_80", "cuda")
    covered = kernels(ahead.launches(on, **words(case)))
    call, result = case.call(), run(case)
    for saved in (None, Saved(call.dout, result.out, result.lse, call.dlse)):
        launched = kernels(planned(posed(case, saved)[0].problem, on).launches)
        assert launched <= covered


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype, head_dim", [("float32", 64), ("float32", 256), ("float64", 96), ("bfloat16", 128)])
def test_covers_every_length(dtype, head_dim, backward, arch):
    on = device.named(arch, "cuda")
    covered = kernels(ahead.launches(on, dtype=dtype, head_dim=head_dim, causal=True, backward=backward))
    case = Case(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, causal=True, dlse=False)
    problem = posed(case)[0].problem._replace(backward=backward)
    tiles = set()
    for batch, heads in ((1, 1), (1, 8), (5, 40), (200, 8)):
        for q_len in (0, 1, 7, 64, 100, 1000, 5000, 100_000):
            for kv_len in (0, 1, q_len, 3 * q_len):
                sizes = dict(batch=batch, heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len)
                chosen = planned(problem._replace(**sizes), on)
                tiles.add((chosen.block_q, chosen.block_kv, chosen.threads))
                assert kernels(chosen.launches) <= covered, sizes
    assert len(tiles) > 1 or head_dim > 64  # if several tiles fit, the plan's tile depends on the length


def test_compiles_into_the_cache(folder):
    made = cupy_flash.compile(dtype="float32", head_dim=16, arch="sm_75", backward=False)
    assert (
        made
        and {kernel.name for kernel in made} == {"simt/forward"}
        and {kernel.target for kernel in made} == {"sm_75"}
    )
    assert all(kernel.path.is_relative_to(folder) and kernel.path.read_bytes() == kernel.code for kernel in made)
    assert all(kernel.resources["forward"].registers > 0 for kernel in made)
    assert len({kernel.path for kernel in made}) == len(made)


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "float32", torch.float32], ids=repr)
def test_takes_every_spelling_of_a_dtype(dtype):
    on = device.named("sm_80", "cuda")
    assert ahead.launches(on, dtype=dtype, head_dim=8) == ahead.launches(on, dtype="float32", head_dim=8)
    assert ahead.element_dtype(ml_dtypes.bfloat16) == ahead.element_dtype("bfloat16") == ml_dtypes.bfloat16


def test_gradients_of_lse_cost_one_small_kernel():
    """Only the delta kernel depends on the presence of a gradient of lse."""
    on = device.named("sm_80", "cuda")
    without, both = (
        kernels(ahead.launches(on, dtype="float32", head_dim=8, return_lse=has_gradient))
        for has_gradient in (False, True)
    )
    assert without < both and {kernel for kernel, *_ in both - without} == {"delta"}


@pytest.mark.parametrize(
    "wrong, message",
    [
        pytest.param(dict(head_dim=0), "head_dim must be at least 1", id="no-dimension"),
        pytest.param(dict(dtype="int8"), "dtype must be one of", id="integers"),
        pytest.param(dict(dtype=None), "dtype must be one of .*, not None", id="no-dtype"),
        pytest.param(dict(dtype=[]), "(dtype must be one of|must be float16)", id="list-of-dtypes"),
        pytest.param(dict(head_dim="8"), "head_dim must be a whole number, not '8'", id="dimension-of-text"),
        pytest.param(dict(head_dim=True), "head_dim must be a whole number, not True", id="dimension-of-truth"),
        pytest.param(dict(group=2**63), r"group must be at least 1 and less than 2\*\*31", id="huge-group"),
        pytest.param(dict(packed=np.zeros(2)), "packed must be True or False", id="packed-array"),
        pytest.param(dict(arch=[]), "unknown GPU architecture", id="no-word"),
        pytest.param(dict(window=3), "window must be", id="a-call-would-refuse"),
        pytest.param(dict(colour=1), "unknown option 'colour'", id="unknown-option"),
        pytest.param(dict(head_dim=577), "larger than 576", id="no-engine"),
        pytest.param(dict(backend="cpu"), 'backend="cpu" was asked for', id="other-backend"),
        pytest.param(dict(arch="sm_42"), "unknown GPU architecture", id="unknown-gpu"),
        pytest.param(dict(packed=True, mask=True), "mask is for padded batches", id="packed-mask"),
    ],
)
def test_refuses(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cupy_flash.compile(**dict(dtype="float32", head_dim=8, arch="sm_80") | wrong)


def test_without_arch_a_gpu_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match='there is no GPU to compile for; name one, as in arch="sm_90a"'):
        cupy_flash.compile(dtype="float32", head_dim=8)


def test_command_without_nvrtc(folder, capsys, monkeypatch):
    def missing(*_):
        raise ImportError(nvrtc.MISSING)

    monkeypatch.setattr(nvrtc, "library", missing)
    monkeypatch.setattr(nvrtc, "identity", missing)  # patched too, because this process may have cached the identity
    kernel_cache.compiled.cache_clear()
    assert main(["compile", "--arch", "sm_75", "--dtype", "float32", "--head-dim", "8"]) == 1
    output = capsys.readouterr()
    assert output.err == f"{nvrtc.MISSING}\n" and output.out == ""


def test_command(folder, capsys):
    command = ["compile", "--arch", "sm_75", "--dtype", "float32", "--head-dim", "8", "--no-backward", "--causal"]
    assert main(command) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    count = len(lines)
    assert lines[0].startswith(f"1/{count} simt/forward, tile ") and "registers" in lines[0]
    assert last.startswith(f"{folder}, {count} entries")
    assert main(["compile", "--arch", "sm_75", "--head-dim", "577"]) == 1
    assert "larger than 576" in capsys.readouterr().err
