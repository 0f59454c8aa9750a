"""The public functions: each poses its problem, runs it, and returns the result in the caller's type of array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from . import dispatch, keyed_plan
from .arrays import AnyArray, Array, ArrayT, as_array, copied, is_torch
from .problem.build import ARRAY_NAMES, pose
from .problem.merge import pose_merge
from .problem.records import Gradients, Options, Packed, Saved, SecondGradients, Statistics, Tangents, applied
from .problem.statistics import selected

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .device import Device
    from .explanation import Explanation
    from .jit.nvrtc import Compiled
    from .problem.argument_types import (
        Causal,
        CompileOptions,
        DType,
        Layout,
        MaskMod,
        Names,
        PackedBackwardOptions,
        PackedOptions,
        PackedOptionsWithoutLse,
        PaddedBackwardOptions,
        PaddedOptions,
        PaddedOptionsWithoutLse,
        Presence,
        ScoreMod,
        Statistic,
        Window,
    )
    from .problem.records import CacheOptions, Problem

    Inputs: TypeAlias = tuple[ArrayT, ArrayT, ArrayT | None]  # q, k and v
    Results: TypeAlias = ArrayT | tuple[ArrayT, ArrayT] | tuple[ArrayT, ArrayT, Statistics[ArrayT]]


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, return_lse: Literal[False] = False,
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> ArrayT: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, return_lse: Literal[True],
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[AnyArray]]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, return_lse: Literal[True], statistics: Sequence[Statistic],
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT, Statistics[ArrayT]]: ...  # fmt: skip


def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    *,
    causal: Causal = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: AnyArray | None = None,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    sink: AnyArray | None = None,
    q_lengths: AnyArray | None = None,
    kv_lengths: AnyArray | None = None,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    selected: AnyArray | None = None,
    selected_block: int = 1,
    selected_rows: int = 1,
    check_selected: bool = False,
    dropout: float = 0.0,
    seed: int | AnyArray | None = None,
    q_descale: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    head_dim_v: int | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    statistics: Names = None,
    deterministic: bool = False,
    backend: str | None = None,
    engine: str | None = None,
) -> Results[ArrayT]:
    """Compute exact softmax attention, softmax(scale Q K^T + ...) V, in memory linear in the sequence length.

    Arrays are of NumPy, torch (with gradients), jax, or any type with `__dlpack__` or `__cuda_array_interface__`, all
    of one type and on one device; the result has that type and device. A subclass of numpy.ndarray counts as
    numpy.ndarray, which results then are; masked arrays and matrices are refused. Shapes are given for B sequences of
    Sq queries and Sk keys, Hq query heads that share Hk key/value heads (query head h reads h // (Hq // Hk)) and head
    dimensions D and Dv.

    Args:
        q: (B, Sq, Hq, D), float16, bfloat16, float32 or float64, with any strides, here and below; float8_e4m3fn (of
            ml_dtypes, torch, jax or DLPack) has a forward only, on Hopper.
        k: (B, Sk, Hk, D), the dtype of q.
        v: (B, Sk, Hk, Dv), the dtype of q; None with head_dim_v.
        causal: True or "bottom_right" hides the keys after a query, so that the last query sees all keys; "top_left"
            aligns the first query with the first key instead (as in torch's SDPA). The masks of True and of "top_left"
            (1 = seen) for 2 queries x 5 keys, then for 5 queries x 2 keys:

                1 1 1 1 0     1 0 0 0 0          0 0     1 0
                1 1 1 1 1     1 1 0 0 0          0 0     1 1
                                                 0 0     1 1
                                                 1 0     1 1
                                                 1 1     1 1

        window: (left, right): query i sees the keys i + o - left <= j <= i + o + right, with the diagonal offset
            o = Sk - Sq (0 for "top_left"); None or -1 leaves a side unbounded. Intersected with causal. (1, 1) for
            3 queries x 4 keys:

                1 1 1 0
                0 1 1 1
                0 0 1 1

        scale: factor of q.k, default 1 / sqrt(D), finite in the accumulation dtype (float32; float64 for float64).
            It may be negative or 0.
        softcap: c > 0: scores become c tanh(s / c). A c that is infinite in the accumulation dtype means no softcap.
        alibi_slopes: float32 (Hq,) or (B, Hq): adds -slope |i + o - j|. No gradient.
        bias: floating, broadcastable to (B, Hq, Sq, Sk), added to the scores; -inf hides a key.
        mask: bool, broadcastable to (B, Hq, Sq, Sk); True = attend.
        sink: floating (Hq,): the score of a virtual key without a value, which adds to every row's denominator; neither
            scaled nor capped.
        q_lengths: int32 (B,): the number of valid queries of each sequence of a padded batch, which the offset o uses.
            Rows from that number on are never read; in out they are 0, with lse -inf.
        kv_lengths: int32 (B,): likewise for the keys.
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> number, as in FlexAttention; masks and softmax use
            its result. It is traced by one call with symbolic arguments, and may use arithmetic, comparisons and
            functions of NumPy, torch or jax on numbers, and elements of arrays that it captures: `table[h, q_idx -
            kv_idx]`. h is the query head, b the sequence; q_idx and kv_idx are int32 row numbers inside the sequence,
            from 0, without the offset o. Captured arrays have gradients if they are floating, and indices are clamped
            to their dimensions. -inf hides a key. A `Mod` holds traced functions.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool, True = attend; likewise. Intersected with all other
            masks.
        selected: int32 (B or 1, Hs, ceil(Sq / selected_rows), n), Hs 1, Hk or Hq: lists of the
            keys that rows see, intersected with all masks. Entry e >= 0 names the keys e kb to e kb + kb - 1 with kb =
            selected_block, cut at Sk; entries below 0, in any place, name none. Nothing of the size Sq x Sk is
            allocated. Packed: (Hs, Tq // selected_rows + B, n), where row i of sequence b has the list
            cu_seqlens_q[b] // selected_rows + b + i // selected_rows, and entries count within the sequence. Lists in
            host memory that name a key twice, or one past the longest sequence, are refused; on a GPU the results of
            their rows are unspecified.
        selected_block: kb, 1 or a multiple of 8.
        selected_rows: the number of neighbouring rows that share a list.
        check_selected: on a GPU too, refuse what is refused in host memory, which waits for the GPU.
        dropout: probability p in [0, 1) of dropping an element of the softmax, rounded to 65536ths; kept elements are
            scaled by 1 / (1 - p).
        seed: seed of dropout, an int in [0, 2**64) or an int64 array of one element on the same device. The same seed
            drops the same elements on every backend. None draws a seed from torch's or NumPy's generator; jax requires
            one.
        q_descale: only for float8_e4m3fn, float32 (B, Hk), finite and not negative: the factor of q for each sequence
            and GQA group. None is 1.
        k_descale: float32 (B, Hk), likewise for k.
        v_descale: float32 (B, Hk), likewise for v.
        head_dim_v: Dv, at most D, if v is None: the values are inside the keys, v = k[..., :head_dim_v], as in
            multi-head latent attention (DeepSeek, Kimi, GLM). The gradient of k then has that of v. The default scale
            stays 1 / sqrt(D): a model whose keys are absorbed into a latent passes its own scale.
        layout: "bshd" as above, or "bhsd": (B, H, S, D) for q, k, v and out.
        return_lse: also return lse (B, Hq, Sq), float32 (float64 for float64): the natural logarithm of every row's
            denominator, with the sink and before dropout.
        statistics: with return_lse=True, some of ("max", "argmax", "entropy") in any order: also return Statistics(max,
            argmax, entropy), each (B, Hq, Sq), None where not asked. max is the largest score that the softmax sees of
            any key, without the sink; argmax, int32, is its key, the lowest one of equal scores; entropy, in nats and
            never negative, is that of the probabilities before dropout, with the sink's. -inf, -1 and 0 for a row that
            sees no key. A visible NaN makes max and entropy NaN, and is the argmax.
        deterministic: make gradients bitwise equal from run to run. Those of a CPU engine always are, and do not
            depend on the number of threads, except for large torch tensors in the engine cpu.
        backend: "cpu", "cuda" or "simulator"; None selects the arrays' own. There is no fallback to another backend.
            "simulator:sm_90a" simulates a GPU of that architecture; "simulator" is sm_80.
        engine: an engine of the backend by name; None chooses the one with the smallest predicted time.

    Returns:
        out (B, Sq, Hq, Dv) in the dtype of q (bfloat16 for float8_e4m3fn), or (out, lse), or (out, lse, Statistics). A
        row that sees no key is 0; its lse is -inf, or the sink if there is one.

    Raises:
        TypeError: at least one requirement about a type is not met. Like ValueError, it is one error that lists every
            requirement that is not met, with all shapes and dtypes.
        ValueError: only requirements about values are not met.
        UnsupportedError: the problem is legal, but no engine of this version serves it; lists each engine's reasons.

    The definition, for one head (`cupy_flash.reference` has all of it):

        s = scale * q @ k.T                                     # (Sq, Sk)
        s = np.where(visible, softcap * np.tanh(s / softcap) + bias, -np.inf)
        lse = np.logaddexp(np.logaddexp.reduce(s, axis=1), sink)
        P = np.exp(s - lse[:, None])
        out = dropped(P) @ v
        max, argmax = s.max(axis=1), s.argmax(axis=1)
        entropy = -(P * (s - lse[:, None])).sum(axis=1)         # + P_sink (lse - sink), hidden keys left out

    Algorithm: online softmax over tiles, Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
    """
    options = Options(
        causal, window, scale, softcap, alibi_slopes, bias, mask, sink, q_lengths, kv_lengths, score_mod, mask_mod,
        selected, selected_block, selected_rows, check_selected, dropout, seed, q_descale, k_descale, v_descale,
        head_dim_v, layout, return_lse, statistics, deterministic, backend, engine,
    )  # fmt: skip
    return _forward("attention", (q, k, v), options)


@overload
def attention_varlen(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = False, **options: Unpack[PackedOptionsWithoutLse[AnyArray]],
) -> ArrayT: ...  # fmt: skip


@overload
def attention_varlen(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], **options: Unpack[PackedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_varlen(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: bool, **options: Unpack[PackedOptionsWithoutLse[AnyArray]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_varlen(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], statistics: Sequence[Statistic], **options: Unpack[PackedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT, Statistics[ArrayT]]: ...  # fmt: skip


def attention_varlen(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Unpack[PackedOptions[AnyArray]],
) -> Results[ArrayT]:
    """Compute `attention` on sequences of different lengths, packed along the token axis without padding.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv); None with head_dim_v.
        cu_seqlens_q: int32 (B + 1,): sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. Lengths of 0
            are legal. Rows past cu_seqlens_q[-1] belong to no sequence: their out is 0, their lse -inf.
        cu_seqlens_k: likewise for the rows of k and v.
        max_seqlen_q: at least the longest sequence of queries, at most 2**31 - 1.
        max_seqlen_k: likewise for keys.
        **options: those of `attention` except mask, q_lengths, kv_lengths and layout. Positions, the diagonal offset
            and dropout count within each sequence. bias broadcasts to (B, Hq, max_seqlen_q, max_seqlen_k): its element
            [b, h, i, j] is added to the score of query i and key j of sequence b; elements past the lengths of a
            sequence are never read, and their gradient is 0.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse (Hq, Tq), or (out, lse, Statistics) with statistics (Hq, Tq), whose
        argmax counts the keys of the row's sequence.
    """
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _forward("attention_varlen", (q, k, v), Options.of("attention_varlen", options), packed)


def attention_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    out: ArrayT,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    statistics: Statistics[AnyArray] | None = None,
    dmax: AnyArray | None = None,
    dentropy: AnyArray | None = None,
    **options: Unpack[PaddedBackwardOptions[AnyArray]],
) -> Gradients[ArrayT]:
    """Compute the gradients of `attention`.

    The probabilities are recomputed from q, k and lse, so that memory stays linear in the sequence length.

    Args:
        dout: the gradient of out, its shape and dtype.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: the first result of the forward.
        lse: its second result, with `return_lse=True`.
        dlse: the gradient of lse, its shape and dtype; None is 0.
        statistics: those of the forward. dmax needs its argmax, dentropy its entropy.
        dmax: the gradient of the statistic max, its shape and dtype, which reaches the score of its argmax; None is 0.
        dentropy: the gradient of the entropy, likewise: dS = -dentropy P (S - mean of S under P).
        **options: those of the forward except statistics; with dropout its seed, too.

    Returns:
        Gradients(dq, dk, dv, dbias, dsink, dcaptured), each in the shape and dtype of its input; dbias and dsink None
        without a bias or sink; dcaptured a tuple in the order of `Mod.arrays`, None without a score_mod, and None in
        the place of an array that is not floating. Sums over heads of a group, over broadcast dimensions and over
        reads of one element are in float32 (float64 for float64), rounded once. With head_dim_v, dv is None and dk is
        the whole gradient of the keys, summed likewise.
    """
    saved = Saved(dout, out, lse, dlse, statistics=statistics, dmax=dmax, dentropy=dentropy)
    return _backward("attention_backward", (q, k, v), Options.of("attention_backward", options), saved)


def attention_varlen_backward(
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    out: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: AnyArray | None = None,
    statistics: Statistics[AnyArray] | None = None,
    dmax: AnyArray | None = None,
    dentropy: AnyArray | None = None,
    **options: Unpack[PackedBackwardOptions[AnyArray]],
) -> Gradients[ArrayT]:
    """Compute the gradients of `attention_varlen`.

    Args:
        dout: the gradient of out, its shape and dtype.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: the first result of the forward.
        lse: its second result, with `return_lse=True`.
        cu_seqlens_q: as in the forward.
        cu_seqlens_k: as in the forward.
        max_seqlen_q: as in the forward.
        max_seqlen_k: as in the forward.
        dlse: the gradient of lse, its shape and dtype; None is 0.
        statistics: those of the forward. dmax needs its argmax, dentropy its entropy.
        dmax: the gradient of the statistic max, its shape and dtype, which reaches the score of its argmax; None is 0.
        dentropy: the gradient of the entropy, likewise: dS = -dentropy P (S - mean of S under P).
        **options: those of the forward except statistics; with dropout its seed, too.

    Returns:
        Gradients, as `attention_backward`; gradients of rows past cu_seqlens[-1], and of the elements of bias past the
        lengths of a sequence, are 0.
    """
    name = "attention_varlen_backward"
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    saved = Saved(dout, out, lse, dlse, statistics=statistics, dmax=dmax, dentropy=dentropy)
    return _backward(name, (q, k, v), Options.of(name, options), saved, packed)


@overload
def attention_vjp(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, copy: bool = False, return_lse: Literal[False] = False,
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, Callable[..., Gradients[ArrayT]]]: ...  # fmt: skip


@overload
def attention_vjp(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, copy: bool = False, return_lse: Literal[True],
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[tuple[ArrayT, ArrayT], Callable[..., Gradients[ArrayT]]]: ...  # fmt: skip


@overload
def attention_vjp(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, copy: bool = False, return_lse: bool,
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT | tuple[ArrayT, ArrayT], Callable[..., Gradients[ArrayT]]]: ...  # fmt: skip


@overload
def attention_vjp(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, copy: bool = False, return_lse: Literal[True],
    statistics: Sequence[Statistic],
    **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[tuple[ArrayT, ArrayT, Statistics[ArrayT]], Callable[..., Gradients[ArrayT]]]: ...  # fmt: skip


def attention_vjp(
    q: ArrayT, k: ArrayT, v: ArrayT | None, *, copy: bool = False, **options: Unpack[PaddedOptions[AnyArray]]
) -> tuple[Results[ArrayT], Callable[..., Gradients[ArrayT]]]:
    """Return the result of `attention`, and a function that computes its gradients.

    The gradients are computed from q, k, v, the arrays among the options and in mods, out and lse, all of which the
    function keeps by reference: with copy=False they must not change before its last call, else the gradients are wrong
    without an error.

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        copy: True keeps copies of these arrays, except immutable ones (jax), in as much memory.
        **options: those of `attention`. A seed that is drawn for the forward is the backward's too.

    Returns:
        (out, vjp), ((out, lse), vjp) with return_lse, or ((out, lse, Statistics), vjp) with statistics.
        vjp(dout, dlse=None, dmax=None, dentropy=None) returns the Gradients of `attention`.

    >>> import numpy as np, cupy_flash
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8)).astype(np.float32)
    >>> out, vjp = cupy_flash.attention_vjp(q, k, v, causal=True)
    >>> vjp(np.ones_like(out)).dq.shape
    (1, 4, 2, 8)
    """
    settings = Options.of("attention_vjp", options)
    problem, operands = pose("attention_vjp", (q, k, v), settings)
    names = problem.statistics
    if "max" in names:  # its gradient needs argmax
        problem = problem._replace(statistics=tuple(x for x in Statistics._fields if x in (*names, "argmax")))
    since = dispatch.device_of(problem)  # an import of torch between the two does not change the backward's engine
    out, lse, *others = (array.result() for array in dispatch.forward(problem, operands))
    statistics: Statistics[ArrayT] = Statistics(**dict(zip(problem.statistics, others, strict=True)))
    results = selected((out, lse, *(getattr(statistics, name) for name in names)), settings)
    # The backward must use the seed that was drawn for the forward.
    settings.seed = operands.seed.owner if isinstance(operands.seed, Array) else operands.seed
    settings.statistics = None  # an option of the forward
    kept: Any = (q, k, v, out, lse)
    if copy:
        kept, statistics = applied(_copied, kept), Statistics(*applied(_copied, statistics))
        _copy_options(settings)

    def vjp(
        dout: ArrayT, dlse: AnyArray | None = None, dmax: AnyArray | None = None, dentropy: AnyArray | None = None
    ) -> Gradients[ArrayT]:
        q, k, v, out, lse = kept
        saved = Saved(dout, out, lse, dlse, statistics=statistics, dmax=dmax, dentropy=dentropy)
        return _backward("vjp", (q, k, v), settings, saved, since=since)

    return results, vjp


@overload
def attention_jvp(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    tq: ArrayT | None = None, tk: ArrayT | None = None, tv: ArrayT | None = None, *,
    tbias: AnyArray | None = None, tsink: AnyArray | None = None, tcaptured: Sequence[AnyArray | None] | None = None,
    return_lse: Literal[False] = False, **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def attention_jvp(
    q: ArrayT, k: ArrayT, v: ArrayT | None,
    tq: ArrayT | None = None, tk: ArrayT | None = None, tv: ArrayT | None = None, *,
    tbias: AnyArray | None = None, tsink: AnyArray | None = None, tcaptured: Sequence[AnyArray | None] | None = None,
    return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[AnyArray]],
) -> tuple[ArrayT, ...]: ...  # fmt: skip


def attention_jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    tq: ArrayT | None = None,
    tk: ArrayT | None = None,
    tv: ArrayT | None = None,
    *,
    tbias: AnyArray | None = None,
    tsink: AnyArray | None = None,
    tcaptured: Sequence[AnyArray | None] | None = None,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> tuple[ArrayT, ...]:
    """Compute `attention` and its directional derivative (forward mode) in one pass, in memory linear in the sequence.

    With s the scores that the softmax sees, ts their tangent and P the probabilities, for one head:

        tlse = (P * ts).sum(axis=1)                                     # + P_sink * tsink
        tout = dropped(P * ts) @ v + dropped(P) @ tv - tlse[:, None] * out

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        tq: the tangent of q, with its shape and dtype; None means 0 and skips its terms, here and below.
        tk: the tangent of k.
        tv: the tangent of v; None with head_dim_v, as tk has it.
        tbias: the tangent of the option bias.
        tsink: the tangent of the option sink.
        tcaptured: the tangents of the arrays that score_mod captures, in the order of `Mod.arrays`; None for an array
            whose tangent is 0, or that is not floating.
        **options: those of `attention`.

    Returns:
        (out, tout), or (out, tout, lse, tlse) with return_lse. A row that sees no key has tout 0 and tlse 0 (tsink with
        a sink).

    Raises:
        UnsupportedError: no engine of the backend computes it; the error has the reasons of each.

    >>> import numpy as np, cupy_flash
    >>> q, k, v, tq = np.random.default_rng(0).normal(size=(4, 1, 4, 2, 8))
    >>> out, tout = cupy_flash.attention_jvp(q, k, v, tq, causal=True)
    >>> nearby = cupy_flash.attention(q + 1e-6 * tq, k, v, causal=True)
    >>> bool(abs((nearby - out) / 1e-6 - tout).max() < 1e-5)
    True
    """
    tangents = Tangents(tq, tk, tv, tbias, tsink, tcaptured)
    return _jvp("attention_jvp", (q, k, v), tangents, Options.of("attention_jvp", options))


def attention_varlen_jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    tq: ArrayT | None = None,
    tk: ArrayT | None = None,
    tv: ArrayT | None = None,
    *,
    tbias: AnyArray | None = None,
    tsink: AnyArray | None = None,
    tcaptured: Sequence[AnyArray | None] | None = None,
    **options: Unpack[PackedOptions[AnyArray]],
) -> tuple[ArrayT, ...]:
    """Compute `attention_varlen` and its directional derivative, as `attention_jvp`.

    Args:
        q: as in `attention_varlen`.
        k: as in `attention_varlen`.
        v: as in `attention_varlen`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: as in `attention_varlen`.
        max_seqlen_q: as in `attention_varlen`.
        max_seqlen_k: as in `attention_varlen`.
        tq: the tangent of q, its shape and dtype; None is 0.
        tk: the tangent of k.
        tv: the tangent of v.
        tbias: the tangent of the option bias.
        tsink: the tangent of the option sink.
        tcaptured: as in `attention_jvp`.
        **options: those of `attention_varlen`.

    Returns:
        (out, tout), or (out, tout, lse, tlse) with return_lse.
    """
    name = "attention_varlen_jvp"
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tangents = Tangents(tq, tk, tv, tbias, tsink, tcaptured)
    return _jvp(name, (q, k, v), tangents, Options.of(name, options), packed)


def attention_double_backward(
    tq: ArrayT | None,
    tk: ArrayT | None,
    tv: ArrayT | None,
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    out: ArrayT,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    tbias: AnyArray | None = None,
    tsink: AnyArray | None = None,
    tcaptured: Sequence[AnyArray | None] | None = None,
    **options: Unpack[PaddedOptions[AnyArray]],
) -> SecondGradients[ArrayT]:
    """Compute the backward of `attention_backward`, for Hessian-vector products, gradient penalties or meta-learning.

    With (dq, dk, dv, dbias, dsink, dcaptured) the Gradients of `attention_backward`, it differentiates
    sum(tq * dq) + sum(tk * dk) + ... with respect to every input. Since the Hessian is symmetric, the results dq, dk,
    dv are also the directional derivative of `attention_backward` along (tq, tk, tv, ...) at constant dout. For
    tangents tdout and tdlse, add attention_backward(tdout, ..., dlse=tdlse). Memory is linear in the sequence length.

    Args:
        tq: the cotangent of dq, of the shape and dtype of q; None is 0, here and below.
        tk: the cotangent of dk.
        tv: the cotangent of dv.
        dout: as in `attention_backward`.
        q: as in `attention_backward`.
        k: as in `attention_backward`.
        v: as in `attention_backward`.
        out: as in `attention_backward`.
        lse: as in `attention_backward`.
        dlse: as in `attention_backward`.
        tbias: the cotangent of dbias.
        tsink: the cotangent of dsink.
        tcaptured: the cotangents of dcaptured, as in `attention_jvp`.
        **options: those of `attention_backward`.

    Returns:
        SecondGradients(dq, dk, dv, dbias, dsink, dcaptured, ddout, ddlse), each in the shape and dtype of its input.

    Raises:
        UnsupportedError: no engine of the backend computes it; the error has the reasons of each.
    """
    name = "attention_double_backward"
    tangents, saved = Tangents(tq, tk, tv, tbias, tsink, tcaptured), Saved(dout, out, lse, dlse)
    return _double_backward(name, (q, k, v), tangents, Options.of(name, options), saved)


def attention_varlen_double_backward(
    tq: ArrayT | None,
    tk: ArrayT | None,
    tv: ArrayT | None,
    dout: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT | None,
    out: ArrayT,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: AnyArray | None = None,
    tbias: AnyArray | None = None,
    tsink: AnyArray | None = None,
    tcaptured: Sequence[AnyArray | None] | None = None,
    **options: Unpack[PackedOptions[AnyArray]],
) -> SecondGradients[ArrayT]:
    """Compute the backward of `attention_varlen_backward`, as `attention_double_backward`.

    Args:
        tq: the cotangent of dq; None is 0.
        tk: the cotangent of dk.
        tv: the cotangent of dv.
        dout: as in `attention_varlen_backward`.
        q: as in `attention_varlen_backward`.
        k: as in `attention_varlen_backward`.
        v: as in `attention_varlen_backward`.
        out: as in `attention_varlen_backward`.
        lse: as in `attention_varlen_backward`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: as in `attention_varlen`.
        max_seqlen_q: as in `attention_varlen`.
        max_seqlen_k: as in `attention_varlen`.
        dlse: as in `attention_varlen_backward`.
        tbias: the cotangent of dbias.
        tsink: the cotangent of dsink.
        tcaptured: as in `attention_jvp`.
        **options: those of `attention_varlen_backward`.

    Returns:
        SecondGradients, as `attention_double_backward`.
    """
    name = "attention_varlen_double_backward"
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tangents, saved = Tangents(tq, tk, tv, tbias, tsink, tcaptured), Saved(dout, out, lse, dlse)
    return _double_backward(name, (q, k, v), tangents, Options.of(name, options), saved, packed)


@overload
def merge(
    out_a: ArrayT, lse_a: ArrayT, out_b: ArrayT, lse_b: ArrayT, *, layout: Layout = "bshd"
) -> tuple[ArrayT, ArrayT]: ...


@overload
def merge(
    out_a: ArrayT, lse_a: ArrayT, out_b: ArrayT, lse_b: ArrayT, *, layout: Layout = "bshd",
    statistics_a: Statistics[ArrayT], statistics_b: Statistics[ArrayT], key_offset_b: int = 0,
) -> tuple[ArrayT, ArrayT, Statistics[ArrayT]]: ...  # fmt: skip


def merge(
    out_a: ArrayT,
    lse_a: ArrayT,
    out_b: ArrayT,
    lse_b: ArrayT,
    *,
    layout: Layout = "bshd",
    statistics_a: Statistics[ArrayT] | None = None,
    statistics_b: Statistics[ArrayT] | None = None,
    key_offset_b: int = 0,
) -> tuple[ArrayT, ArrayT] | tuple[ArrayT, ArrayT, Statistics[ArrayT]]:
    """Merge the results of attention over two disjoint sets of keys.

    The result is that of one call over both sets:

        lse = np.logaddexp(lse_a, lse_b)
        out = np.exp(lse_a - lse) * out_a + np.exp(lse_b - lse) * out_b        # lse with the axes of out

    It is computed in the dtype of lse. A row that saw no key in one part has the other part's result, and one that saw
    none in both has 0 and -inf. Pass a sink to exactly one of the two calls. No gradients are recorded.

    Args:
        out_a: (B, Sq, Hq, Dv) in `layout`, or packed (T, Hq, Dv).
        lse_a: (B, Hq, Sq) or (Hq, T), float32 (float64 for float64).
        out_b: the shape of out_a.
        lse_b: the shape and dtype of lse_a.
        layout: "bshd", or "bhsd" for out (B, Hq, Sq, Dv).
        statistics_a: those of part a; argmax needs max beside it.
        statistics_b: those of part b, with the same fields.
        key_offset_b: the number that is added to the argmax of part b, such as the keys of part a.

    Returns:
        (out, lse), out in the dtype of out_a, or with statistics (out, lse, Statistics).
    """
    given = (statistics_a, statistics_b)
    chosen, parts, statistics = pose_merge((out_a, lse_a, out_b, lse_b), layout, given, key_offset_b)
    out, lse, *merged = (x.result() for x in dispatch.merge(parts, chosen, statistics, key_offset_b))
    if statistics_a is None:
        return out, lse
    present = (name for name in Statistics._fields if getattr(statistics_a, name) is not None)
    return out, lse, Statistics(**dict(zip(present, merged, strict=True)))


def compile(
    *,
    dtype: DType,
    head_dim: int,
    head_dim_v: int | None = None,
    shared_kv: bool = False,
    group: int = 1,
    arch: str | None = None,
    backward: bool = True,
    packed: bool = False,
    cache: bool = False,
    kv_dtype: DType | None = None,
    kv_scale: DType | None = None,
    page: int | None = None,
    prefixes: bool = False,
    split_size: int | None = None,
    rotary: Presence = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = True,
    **options: Unpack[CompileOptions[Presence]],
) -> tuple[Compiled, ...]:
    """Compile the kernels of later calls on a GPU ahead of time.

    It needs no GPU, no arrays and no lengths. Kernels do not depend on batch and lengths, but the choice of a tile
    does, so every tile that a plan may choose is compiled, a few per kernel. The cubins are stored in the cache folder;
    without `arch` they are also loaded, so that a CUDA graph can capture the first call. With CuPy, capture in a memory
    pool of its own (cupy.cuda.using_allocator), because every replay writes to workspaces that the capture has freed.

    Args:
        dtype: dtype of q, k and v: "bfloat16", np.float32, torch.float16, ... float8_e4m3fn needs backward=False.
        head_dim: D.
        head_dim_v: Dv; None means D.
        shared_kv: compile for v=None, with head_dim_v: the values are inside the keys.
        group: Hq // Hk.
        arch: an architecture such as "sm_80", or "sm_90a" for Hopper. None means the current GPU of this machine.
        backward: also compile the backward, and with return_lse=True the backward that takes a gradient of lse.
        packed: compile for `attention_varlen`.
        cache: compile for `attention_with_kv_cache` with causal=True, contiguous and paged, and for
            `append_to_kv_cache`; forward only.
        kv_dtype: with cache, the dtype of the caches: that of q (None), float8_e4m3fn, or with kv_scale also int8,
            float8_e5m2 or uint8, for codes of 4 bits.
        kv_scale: with cache, the dtype of k_scale and v_scale, float16 or float32; None for caches without them.
        page: with cache, the keys of a page, if they are no power of two: compile for pages of any such number.
        prefixes: with cache, compile for calls with shared prefixes.
        split_size: with cache, the split_size of the calls.
        rotary: with cache, compile for calls with rotary tables: True for tables in the dtype of q, or the name of
            their dtype.
        rotary_dim: number of dimensions that the tables rotate; None means D.
        rotary_interleaved: as in `attention_with_kv_cache`.
        **options: those of `attention`. For an array, pass True, or the name of its dtype if that is not the usual one,
            such as bias="float32" with bfloat16. For a number (scale, softcap, dropout, the sides of a window) pass any
            value: the kernels serve all values.

    Returns:
        A record for every kernel: name, target, path (None if it could not be stored), resources, warnings.

    Raises:
        TypeError: as the call itself.
        ValueError: as the call itself.
        UnsupportedError: no engine serves the problem.
        CompileError: NVRTC refuses the source, which is a bug in cupy_flash.
        ImportError: NVRTC is missing.
        RuntimeError: `arch` is None and this machine has no GPU.
    """
    from .gpu import ahead
    from .gpu.run_plan import compile_launch  # lazily: calls on a CPU need neither compiler nor cache

    on = ahead.device_for(arch)
    launches = ahead.launches(
        on, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, shared_kv=shared_kv, group=group, backward=backward,
        packed=packed, cache=cache, kv_dtype=kv_dtype, kv_scale=kv_scale, page=page, prefixes=prefixes,
        split_size=split_size, rotary=rotary, rotary_dim=rotary_dim, rotary_interleaved=rotary_interleaved, **options,
    )  # fmt: skip
    results = tuple(compile_launch(launch, on.arch) for launch in launches)
    if arch is None:
        dispatch.load(launches, on)
    return results


def explain(q: AnyArray, k: AnyArray, v: AnyArray | None, **options: Unpack[PaddedOptions[AnyArray]]) -> Explanation:
    """Describe how `attention` with these arguments would run, without computing it.

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        **options: those of `attention`.

    Returns:
        Text with the engine and its tiles, the reason for the choice, and the reasons against the other engines; for
        jax how a jitted call runs; the expressions of score_mod and mask_mod, the derivative of the score and the
        captured arrays; for a mask_mod the number of tiles that are skipped, unmasked and masked, if lengths and
        captured arrays are in host memory. `print` wraps it to 80 columns, a notebook shows it as a table, and its
        method `plot` draws the tiles with matplotlib.

    Raises:
        UnsupportedError: no engine serves the problem.
    """
    settings = Options.of("explain", options)
    problem, operands = pose("explain", (q, k, v), settings)
    text = dispatch.explain(dispatch.plan_for(problem), operands)
    text += host_line(problem, (q, k, v), settings)
    if problem.framework == "jax":
        from .adapters.jax import ffi_structs

        text = f"{text}\njit        {ffi_structs.described()}"
    if problem.mods:
        from .mods import explain as mods
        from .mods.trace import mod_of

        text = f"{text}\n{mods.explain(mod_of(settings.score_mod, settings.mask_mod))}"
        if problem.mask_mod:
            chosen, counts = dispatch.tile_counts(problem, operands)
            text = f"{text}\n{mods.explain_tiles(counts, chosen.block_q, chosen.block_kv)}"
    from .explanation import Explanation

    return Explanation(text, lambda: dispatch.tiles(problem, operands))


def _forward(function: str, arrays: Inputs[ArrayT], options: Options, packed: Packed | None = None) -> Results[ArrayT]:
    results: Results[ArrayT]
    if is_torch(arrays[0]):
        import cupy_flash.adapters.torch.transforms as adapter  # Python takes more than twice the time for `from .`

        results = adapter.forward(function, arrays, options, packed)
        return results
    results = selected(keyed_plan.forward(function, arrays, options, packed), options)
    return results


def _backward(
    function: str,
    arrays: Inputs[ArrayT],
    options: Options,
    saved: Saved,
    packed: Packed | None = None,
    since: Device | None = None,
) -> Gradients[ArrayT]:
    problem, operands = pose(function, arrays, options, packed, saved)
    gradients = dispatch.backward(problem, operands, since)
    return gradients.map(Array.result)


def _copied(x: object) -> Array:
    return copied(as_array(x, "operand"))


def _copy_options(options: Options) -> None:
    """Replace the arrays of options and those that their mods capture by copies."""
    for name in (*ARRAY_NAMES, "seed"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, int):
            setattr(options, name, _copied(value))
    if options.score_mod is not None or options.mask_mod is not None:
        from .mods.trace import mod_of

        mod = mod_of(options.score_mod, options.mask_mod)
        options.score_mod, options.mask_mod = mod.with_arrays(tuple(map(_copied, mod.arrays))), None


def _jvp(
    function: str, arrays: Inputs[ArrayT], tangents: Tangents, options: Options, packed: Packed | None = None
) -> tuple[ArrayT, ...]:
    problem, operands = pose(function, arrays, options, packed, tangents=tangents)
    out, lse, tout, tlse = (array.result() for array in dispatch.jvp(problem, operands))
    return (out, tout, lse, tlse) if options.return_lse else (out, tout)


def _double_backward(
    function: str,
    arrays: Inputs[ArrayT],
    tangents: Tangents,
    options: Options,
    saved: Saved,
    packed: Packed | None = None,
) -> SecondGradients[ArrayT]:
    problem, operands = pose(function, arrays, options, packed, saved, tangents=tangents)
    return dispatch.double_backward(problem, operands).map(Array.result)


def host_line(problem: Problem, arrays: Inputs[AnyArray], options: Options | CacheOptions) -> str:
    """Return the line of `explain` about the entry of a call, which one on the CPU does not have."""
    if dispatch.device_of(problem).backend not in dispatch.LAUNCHERS:
        return ""
    call_of = keyed_plan.call_on_cupy
    if is_torch(arrays[0]):
        from .adapters.torch.keyed_plan import call_on_tensors as call_of
    return f"\n{keyed_plan.described(call_of(arrays, options))}"
