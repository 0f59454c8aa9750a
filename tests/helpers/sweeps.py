"""Builds sweep results in the format of bench/kernel_development/sweep.py."""

from bench import gpu


def case(regime, ours, *, others=None, matmul=800.0, clock=1700.0):
    """Return a record with the TFLOP/s of tiles, given by name (such as "mma 64x64 True"), and of other libraries."""
    tiles = [
        dict(name=name, engine=name.partition(" ")[0], size=name.split()[1], predicted_ms=1.0 + place)
        for place, name in enumerate(ours)
    ]
    tflops = {name: speed for name, speed in ((others or {}) | ours).items() if speed is not None}
    return dict(
        regime=regime.name,
        **regime._asdict(),
        tiles=tiles,
        tflops=tflops,
        milliseconds={name: [regime.flops / speed / 1e9] for name, speed in tflops.items()},
        left_out={},
        gpu=dict(samples=3, sm_clock_mhz=dict(median=clock, least=clock, most=clock)),
        matmul_tflops=matmul,
    )


def result(*cases):
    device = dict(gpu="a large GPU", cpu="a CPU", multiprocessors=132)
    return dict(command="python -m bench", date="2026-01-01", device=device, cases=list(cases))


def regime(head_dim=128, seqlen=16384, causal=False, backward=False, dtype="bfloat16", **more):
    return gpu.Regime(dtype, head_dim, seqlen, causal, backward, **more)
