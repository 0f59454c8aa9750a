"""Dense reference implementation of attention and its gradients: the specification that every engine is tested against.

It shares nothing with the engines except the dropout bits and the names of options. Arrays are NumPy (bf16 and fp8
through ml_dtypes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import make_dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_flash.arrays import named_dtype
from cupy_flash.dropout import keep_mask, keep_scale
from cupy_flash.problem.records import FEATURES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.problem.argument_types import ReferenceOptions

Array = np.ndarray
FP8 = "float8_e4m3fn"


class Gradients(NamedTuple):
    """Gradients, shaped as their inputs; None for a bias or sink that was not given."""

    dq: Array
    dk: Array
    dv: Array | None  # None for values inside keys
    dbias: Array | None
    dsink: Array | None


_names = [(feature.name, object, feature.default) for feature in FEATURES if feature.definition]
_Options: Any = make_dataclass("Options", [*_names, ("dtype", object, None), ("order", object, 0)], frozen=True)


class Options(_Options):
    """Keyword options of this module's functions; all but `dtype` and `order` are those of cupy_flash.attention.

    `dtype` is the precision of the run:
    None: fp64, or np.longdouble for fp64 inputs.
    fp16, bf16, fp32, fp64: standard attention in that precision, whose error sets the tolerance of the tests. Matmuls
        accumulate in fp32 (fp64 for fp64); P and dS are rounded to dtype before their matmuls, out and gradients at
        the end.
    float8_e4m3fn (forward only): P is rounded unnormalised, with row maximum 256; matmuls truncate the accumulator to
        14 bits after every 32 products, as Hopper's wgmma does; out is rounded to bf16.

    `order` seeds the order of the terms of every sum, because the error of a single run in low precision depends on it
    by chance; 0 is the order of NumPy and its BLAS. Another order also computes the scores of a backward again, whose
    rounding then differs from that of lse.
    """


class Tangents(NamedTuple):
    """The tangents of the inputs, in the shapes of the inputs; None means 0."""

    tq: Array | None = None
    tk: Array | None = None
    tv: Array | None = None
    tbias: Array | None = None
    tsink: Array | None = None


class SecondGradients(NamedTuple):
    """Gradients of sum(tq * dq) + sum(tk * dk) + ..., shaped as their inputs; None for inputs that were not given."""

    dq: Array
    dk: Array
    dv: Array | None  # None for values inside keys
    dbias: Array | None
    dsink: Array | None
    ddout: Array
    ddlse: Array


class Scores(NamedTuple):
    """Scores after all modifications and masks, and the derivatives of the modifications."""

    scores: Array  # (B, Hq, Sq, Sk)
    softcap_slope: Array | float  # derivative of the capped score by the score before the cap, (B, Hq, Sq, Sk)
    softcap_curve: Array | float  # its second derivative
    mod_slope: Array | float  # derivative of score_mod's result by the score that it gets, (B, Hq, Sq, Sk)
    mod_curve: Array | float  # its second derivative


class Forward(NamedTuple):
    """Intermediate results that the backward needs; k and v are repeated for the query heads of their group."""

    q: Array  # (B, Hq, Sq, D)
    k: Array  # (B, Hq, Sk, D)
    v: Array  # (B, Hq, Sk, Dv)
    scale: np.floating
    scored: Scores
    probabilities: Array  # before dropout, (B, Hq, Sq, Sk)
    sink_probability: Array  # (B, Hq, Sq, 1)
    dropped: Array | float  # factors by which dropout multiplies the probabilities, 0 or keep_scale, (B, Hq, Sq, Sk)
    out: Array  # (B, Hq, Sq, Dv)
    lse: Array  # (B, Hq, Sq)
    sums: _Sums


def attention(
    q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike | None, **options: Unpack[ReferenceOptions[npt.ArrayLike]]
) -> tuple[Array, Array]:
    """Attention: out (B, Sq, Hq, Dv) and lse (B, Hq, Sq).

    Args:
        q: (B, Sq, Hq, D); with layout="bhsd", heads precede the sequence in q, k, v and out.
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, Dv).
        **options: the fields of `Options`.

    For one sequence and one head it is:

    >>> import numpy as np
    >>> from cupy_flash import reference
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.normal(size=(5, 8)), rng.normal(size=(7, 8)), rng.normal(size=(7, 4))
    >>> slope, bias, sink = 0.5, rng.normal(size=(5, 7)), 0.3
    >>> i, j, o = np.arange(5)[:, None], np.arange(7), 7 - 5           # o aligns the last query with the last key
    >>> S = 10 * np.tanh(Q @ K.T / np.sqrt(8) / 10) - slope * abs(i + o - j) + bias
    >>> S = np.where((j <= i + o) & (j >= i + o - 3), S, -np.inf)      # causal, window=(3, None)
    >>> denominator = np.exp(S).sum(axis=1, keepdims=True) + np.exp(sink)
    >>> P = np.exp(S) / denominator
    >>> out, lse = reference.attention(
    ...     Q[None, :, None], K[None, :, None], V[None, :, None], causal=True, window=(3, None), softcap=10.0,
    ...     alibi_slopes=[slope], bias=bias, sink=[sink])
    >>> np.allclose(out[0, :, 0], P @ V), np.allclose(lse[0, 0], np.log(denominator[:, 0]))
    (True, True)
    """
    settings = Options(**options)
    forward = _forward(settings, 0, *(_heads_first(x, settings.layout) for x in (q, k, _values(k, v, settings))))
    storage, _ = _precision(q, settings.dtype)
    return _from_heads_first(forward.out, settings.layout).astype(_out_dtype(storage)), forward.lse


def attention_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    *,
    dlse: npt.ArrayLike | None = None,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse) for the out and lse of `attention`; runs the forward itself.

    Args:
        dout: the shape and layout of out; rows where lse is -inf are ignored.
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        dlse: (B, Hq, Sq), likewise; None is 0.
        **options: those of the forward.
    """
    settings = Options(**options)
    arrays = (_heads_first(x, settings.layout) for x in (dout, q, k, _values(k, v, settings)))
    gradients = _backward(settings, 0, dlse, *arrays)
    dq, dk, dv = (_from_heads_first(x, settings.layout) for x in gradients[:3])
    return gradients._replace(dq=dq, dk=dk, dv=dv if settings.head_dim_v is None else None)


def attention_jvp(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    tangents: Tangents,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> tuple[Array, Array, Array, Array]:
    """out, lse and their tangents in a direction: (out, lse, tout, tlse).

    Args:
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        tangents: the direction. Arrays that score_mod captures have no tangent.
        **options: those of `attention`.

    For one sequence and one head it is:

    >>> import numpy as np
    >>> from cupy_flash import reference
    >>> Q, K, V, tQ, tK, tV = np.random.default_rng(0).normal(size=(6, 5, 8))
    >>> S, tS = (x / np.sqrt(8) for x in (Q @ K.T, tQ @ K.T + Q @ tK.T))
    >>> P = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    >>> mu = (P * tS).sum(axis=1, keepdims=True)
    >>> tout = (P * (tS - mu)) @ V + P @ tV
    >>> direction = reference.Tangents(*(x[None, :, None] for x in (tQ, tK, tV)))
    >>> results = reference.attention_jvp(*(x[None, :, None] for x in (Q, K, V)), direction)
    >>> np.allclose(results[2][0, :, 0], tout), np.allclose(results[3][0, 0], mu[:, 0])
    (True, True)
    """
    settings = Options(**options)
    storage, _ = _precision(q, settings.dtype)
    heads_first = _direction_heads_first(tangents, settings.layout)
    jvp = _jvp(settings, 0, heads_first, *(_heads_first(x, settings.layout) for x in (q, k, _values(k, v, settings))))
    out, tout = (_from_heads_first(x, settings.layout).astype(storage) for x in (jvp.forward.out, jvp.tout))
    return out, jvp.forward.lse, tout, jvp.tlse[..., 0]


def attention_double_backward(
    tangents: Tangents,
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    *,
    dlse: npt.ArrayLike | None = None,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> SecondGradients:
    """Gradients of sum(tq * dq) + sum(tk * dk) + ... for the gradients of `attention_backward`.

    Args:
        tangents: the cotangents of the gradients.
        dout: as in `attention_backward`.
        q: as in `attention`.
        k: as in `attention`.
        v: as in `attention`.
        dlse: as in `attention_backward`.
        **options: those of the forward.
    """
    settings = Options(**options)
    arrays = (_heads_first(x, settings.layout) for x in (dout, q, k, _values(k, v, settings)))
    gradients = _double_backward(settings, 0, _direction_heads_first(tangents, settings.layout), dlse, *arrays)
    dq, dk, dv, ddout = (_from_heads_first(x, settings.layout) for x in (*gradients[:3], gradients.ddout))
    return gradients._replace(dq=dq, dk=dk, dv=dv if settings.head_dim_v is None else None, ddout=ddout)


def attention_varlen(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> tuple[Array, Array]:
    """Attention of packed sequences: out (Tq, Hq, Dv) and lse (Hq, Tq).

    Sequence b is rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of q, and likewise of k and v. Rows past the last sequence
    get out 0 and lse -inf.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: (B + 1,).
        cu_seqlens_k: (B + 1,).
        **options: those of `attention` except mask, q_lengths, kv_lengths and layout; bias broadcasts to
            (B, Hq, max_seqlen_q, max_seqlen_k), and only the elements inside the sequences are read.
    """
    settings, storage, compute, (q, k, v) = _packed(_varlen_options(options), q, k, v)
    out = np.zeros((*q.shape[:2], v.shape[2]), _out_dtype(storage))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, compute)
    for b, rows, columns, options_b in _sequences(settings, cu_seqlens_q, cu_seqlens_k):
        arrays = (_packed_heads_first(x) for x in (q[rows], k[columns], v[columns]))
        forward = _forward(options_b, b, *arrays)
        out[rows], lse[:, rows] = forward.out[0].swapaxes(0, 1), forward.lse[0]
    return out, lse


def attention_varlen_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse) for the out and lse of `attention_varlen`.

    Args:
        dout: (Tq, Hq, Dv).
        q: as in `attention_varlen`.
        k: as in `attention_varlen`.
        v: as in `attention_varlen`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: as in `attention_varlen`.
        dlse: (Hq, Tq); None is 0.
        **options: those of the forward.
    """
    settings, storage, compute, (dout, q, k, v) = _packed(_varlen_options(options), dout, q, k, v)
    dq, dk, dv = (np.zeros(x.shape, storage) for x in (q, k, v))
    dsink, dbias = (None if x is None else np.zeros(np.shape(x), compute) for x in (settings.sink, settings.bias))
    for b, rows, columns, options_b in _sequences(settings, cu_seqlens_q, cu_seqlens_k):
        arrays = (_packed_heads_first(x) for x in (dout[rows], q[rows], k[columns], v[columns]))
        dlse_b = None if dlse is None else np.asarray(dlse)[None, :, rows]
        gradients = _backward(options_b, b, dlse_b, *arrays)
        for whole, part, here in zip((dq, dk, dv), gradients[:3], (rows, columns, columns), strict=True):
            whole[here] = np.asarray(part)[0].swapaxes(0, 1)
        if dsink is not None:
            dsink += gradients.dsink
        if dbias is not None:
            dbias[_inside_sequence(dbias.shape, b, rows, columns)] += gradients.dbias
    return Gradients(dq, dk, dv if settings.head_dim_v is None else None, dbias, dsink)


def attention_varlen_jvp(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    tangents: Tangents,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> tuple[Array, Array, Array, Array]:
    """`attention_jvp` of packed sequences: out, tout (Tq, Hq, Dv), lse, tlse (Hq, Tq), as (out, lse, tout, tlse).

    Args:
        q: as in `attention_varlen`.
        k: as in `attention_varlen`.
        v: as in `attention_varlen`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: as in `attention_varlen`.
        tangents: the direction, tq, tk and tv packed too.
        **options: those of `attention_varlen`.
    """
    settings, storage, compute, (q, k, v) = _packed(_varlen_options(options), q, k, v)
    out, tout = (np.zeros((*q.shape[:2], v.shape[2]), storage) for _ in range(2))
    lse, tlse = np.full((q.shape[1], q.shape[0]), -np.inf, compute), np.zeros((q.shape[1], q.shape[0]), compute)
    for b, rows, columns, options_b in _sequences(settings, cu_seqlens_q, cu_seqlens_k):
        arrays = (_packed_heads_first(x) for x in (q[rows], k[columns], v[columns]))
        jvp = _jvp(options_b, b, _direction_of_sequence(tangents, b, rows, columns), *arrays)
        out[rows], tout[rows] = jvp.forward.out[0].swapaxes(0, 1), jvp.tout[0].swapaxes(0, 1)
        lse[:, rows], tlse[:, rows] = jvp.forward.lse[0], jvp.tlse[0, ..., 0]
    return out, lse, tout, tlse


def attention_varlen_double_backward(
    tangents: Tangents,
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike | None,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    **options: Unpack[ReferenceOptions[npt.ArrayLike]],
) -> SecondGradients:
    """`attention_double_backward` of packed sequences.

    Args:
        tangents: the cotangents of the gradients, tq, tk and tv packed too.
        dout: (Tq, Hq, Dv).
        q: as in `attention_varlen`.
        k: as in `attention_varlen`.
        v: as in `attention_varlen`.
        cu_seqlens_q: as in `attention_varlen`.
        cu_seqlens_k: as in `attention_varlen`.
        dlse: (Hq, Tq); None is 0.
        **options: those of the forward.
    """
    settings, storage, compute, (dout, q, k, v) = _packed(_varlen_options(options), dout, q, k, v)
    dq, dk, dv, ddout = (np.zeros(x.shape, storage) for x in (q, k, v, dout))
    ddlse = np.zeros((q.shape[1], q.shape[0]), compute)
    dsink, dbias = (None if x is None else np.zeros(np.shape(x), compute) for x in (settings.sink, settings.bias))
    for b, rows, columns, options_b in _sequences(settings, cu_seqlens_q, cu_seqlens_k):
        arrays = (_packed_heads_first(x) for x in (dout[rows], q[rows], k[columns], v[columns]))
        dlse_b = None if dlse is None else np.asarray(dlse)[None, :, rows]
        direction = _direction_of_sequence(tangents, b, rows, columns)
        gradients = _double_backward(options_b, b, direction, dlse_b, *arrays)
        for whole, part, here in zip((dq, dk, dv), gradients[:3], (rows, columns, columns), strict=True):
            whole[here] = np.asarray(part)[0].swapaxes(0, 1)
        ddout[rows], ddlse[:, rows] = gradients.ddout[0].swapaxes(0, 1), gradients.ddlse[0]
        if dsink is not None:
            dsink += gradients.dsink
        if dbias is not None:
            dbias[_inside_sequence(dbias.shape, b, rows, columns)] += gradients.dbias
    return SecondGradients(dq, dk, dv if settings.head_dim_v is None else None, dbias, dsink, ddout, ddlse)


def attention_with_kv_cache(
    q: npt.ArrayLike,
    k_cache: npt.ArrayLike,
    v_cache: npt.ArrayLike | None,
    *,
    k: npt.ArrayLike | None = None,
    v: npt.ArrayLike | None = None,
    cache_seqlens: npt.ArrayLike | None = None,
    cache_batch_idx: npt.ArrayLike | None = None,
    cache_leftpad: npt.ArrayLike | None = None,
    block_table: npt.ArrayLike | None = None,
    slots: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    rotary_cos: npt.ArrayLike | None = None,
    rotary_sin: npt.ArrayLike | None = None,
    rotary_interleaved: bool = True,
    mask: npt.ArrayLike | None = None,
    layout: str = "bshd",
    dtype: npt.DTypeLike | None = None,
    **options: Any,
) -> tuple[Array, Array, Array, Array]:
    """Attention on a KV cache: (out, lse, k_cache, v_cache), the caches with the appended rows.

    Arguments as in `cupy_flash.attention_with_kv_cache`; `dtype` as in `Options`. Every key is looked up separately.
    """
    q, k, v = np.asarray(q), *(None if x is None else np.asarray(x) for x in (k, v))
    given = [x for x in (k_cache, v_cache) if x is not None]
    caches = [np.array(_heads_first(x, "bshd" if layout == "bhsd" else "")) for x in given]
    caches = [caches[0], caches[-1][..., : options.get("head_dim_v")]]  # of values inside keys a view
    if layout == "bhsd" and cu_seqlens_q is None:
        q, k, v = q.swapaxes(1, 2), *(None if x is None else x.swapaxes(1, 2) for x in (k, v))
    (storage, compute), width = _precision(q, dtype), caches[0].shape[1]
    # The rows after the last packed sequence are treated as one more sequence, number `batch`, with length 0.
    bounds = [*np.asarray([] if cu_seqlens_q is None else cu_seqlens_q).tolist(), len(q)]
    batch = len(q) if cu_seqlens_q is None else len(bounds) - 2
    capacity = width if block_table is None else width * np.asarray(block_table).shape[1]
    lengths = [*np.broadcast_to(capacity if cache_seqlens is None else cache_seqlens, batch).tolist(), 0]

    def rows_of(x: Any, b: int) -> Any:
        return None if x is None else x[b] if cu_seqlens_q is None else x[bounds[b] : bounds[b + 1]]

    def place(b: int, j: int) -> tuple[int, int]:
        if block_table is not None:
            return int(np.asarray(block_table)[b, j // width]), j % width
        return (b if cache_batch_idx is None else int(np.asarray(cache_batch_idx)[b])), j

    def rotate(rows: Array, first: int, b: int) -> Array:
        """Multiply pairs of columns of rows (S, H, D), as complex numbers, by exp(i angle) of the row's position."""
        rows = np.asarray(rows).astype(compute)
        if rotary_cos is None:
            return rows
        cos, sin = np.asarray(rotary_cos).astype(compute), np.asarray(rotary_sin).astype(compute)
        half = cos.shape[1]
        x, y = np.arange(half), np.arange(half) + half
        if rotary_interleaved:
            x, y = 2 * np.arange(half), 2 * np.arange(half) + 1
        at = np.maximum(first + np.arange(len(rows)), 0) * (b < batch)  # rows past the last sequence have position 0
        if positions is not None and b < batch:
            at = np.asarray(rows_of(np.asarray(positions), b))
        turned = (rows[..., x] + 1j * rows[..., y]) * (cos[at] + 1j * sin[at])[:, None]
        rows[..., x], rows[..., y] = turned.real, turned.imag
        return rows

    slot = 0
    for b in range(0 if k is None else batch + (cu_seqlens_q is not None and slots is not None)):
        new = (rotate(rows_of(k, b), lengths[b] - (len(rows_of(k, b)) if slots is not None else 0), b), rows_of(v, b))
        for i in range(len(new[0])):
            where = place(b, lengths[b] + i) if slots is None else divmod(int(np.asarray(slots).ravel()[slot]), width)
            slot += 1
            for cache, rows, name in zip(caches, new, ("k_descale", "v_descale"), strict=True):
                if where[0] >= 0 and rows is not None:
                    descale = 1 if b == batch or options.get(name) is None else np.asarray(options[name])[b, :, None]
                    row = np.asarray(rows[i]).astype(compute) / descale
                    cache[where] = (np.clip(row, -448, 448) if cache.dtype.name == FP8 else row).astype(cache.dtype)
        lengths[b] += len(new[0]) if slots is None else 0

    out = np.zeros((*q.shape[:-1], caches[1].shape[-1]), storage)
    shape = (q.shape[1], len(q)) if cu_seqlens_q is not None else (batch, q.shape[2], q.shape[1])
    lse = np.full(shape, -np.inf, compute)
    for b in range(batch):
        rows, length = rows_of(q, b), lengths[b]
        keys = [place(b, j) for j in range(length)]
        pad = 0 if cache_leftpad is None else int(np.asarray(cache_leftpad)[b])
        K, V = (
            np.array([cache[at] if j >= pad else np.zeros(cache.shape[2:]) for j, at in enumerate(keys)])
            .reshape(length, *cache.shape[2:])
            .astype(compute)
            for cache in caches
        )
        seen = np.ones((q.shape[-2], len(rows), length), np.bool_)
        seen[..., :pad] = False
        if mask is not None:
            tail = np.asarray(mask)[b if len(np.asarray(mask)) > 1 else 0]
            known = min(tail.shape[-1], length)
            seen[..., length - known :] &= tail[..., tail.shape[-1] - known :]
        rotated = rotate(rows, length - len(rows), b).astype(storage)
        q_idx = np.maximum(length - len(rows) + np.arange(len(rows)), 0)
        if positions is not None:
            q_idx = np.asarray(rows_of(np.asarray(positions), b))
        mods = _mods_of_sequence(options, b, q_idx)
        settings = _options_of_sequence(Options(mask=seen, dtype=dtype, **{"causal": True} | options | mods), b)
        one = _forward(settings, 0, *map(_packed_heads_first, (rotated, K, V)))
        here = b if cu_seqlens_q is None else slice(bounds[b], bounds[b + 1])
        out[here] = one.out[0].swapaxes(0, 1)
        lse[(b,) if cu_seqlens_q is None else (slice(None), here)] = one.lse[0]
    if layout == "bhsd":
        caches = [cache.swapaxes(1, 2) for cache in caches]
        out = out if cu_seqlens_q is not None else out.swapaxes(1, 2)
    return out, lse, caches[0], caches[1]


def _mods_of_sequence(options: dict[str, Any], b: int, q_idx: Array) -> dict[str, Any]:
    """Return the mods for one sequence: they get its number as `b`, and the position of query i as `q_idx[i]`."""
    mods: dict[str, Any] = {}
    if (score_mod := options.get("score_mod")) is not None:
        mods["score_mod"] = lambda s, _, h, i, j: score_mod(s, b, h, q_idx[i], j)
    if (mask_mod := options.get("mask_mod")) is not None:
        mods["mask_mod"] = lambda _, h, i, j: mask_mod(b, h, q_idx[i], j)
    return mods


class _Sums:
    """Matmuls and sums that permute their terms, each in an order that `seed` determines; 0 keeps NumPy's order."""

    def __init__(self, seed: int, multiply: Callable[[Array, Array], Array] = np.matmul) -> None:
        self._rng = np.random.default_rng(seed) if seed else None
        self._multiply = multiply

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a @ b."""
        order = self._order(a.shape[-1])
        return self._multiply(a[..., order], b[..., order, :])

    def sum(self, x: Array, axes: tuple[int, ...] = (-1,), keepdims: bool = True) -> Array:
        """Return the sum over `axes`."""
        for axis in axes:
            x = x.swapaxes(axis, 0)[self._order(x.shape[axis])].swapaxes(axis, 0)
        return np.asarray(x.sum(axis=axes, keepdims=keepdims))

    def _order(self, terms: int) -> slice | Array:
        return slice(None) if self._rng is None else self._rng.permutation(terms)


def _forward(options: Options, first_batch: int, q: Array, k: Array, v: Array) -> Forward:
    """Run the forward of q, k, v (B, H, S, D), with dropout bits of batch indices first_batch, first_batch + 1, ..."""
    storage, compute = _precision(q, options.dtype)
    sums = _Sums(options.order, _multiply_in_14_bits if storage.name == FP8 else np.matmul)
    batch, q_heads, q_length, head_dim = q.shape
    kv_length, group = k.shape[2], q_heads // k.shape[1]
    i, j = np.arange(q_length)[:, None], np.arange(kv_length)
    q_lengths = _lengths(options.q_lengths, q_length)
    kv_lengths = _lengths(options.kv_lengths, kv_length)

    # Zero the padding instead of only masking it: it may hold NaN, and 0 * NaN is NaN.
    q = np.where(i < q_lengths, q.astype(storage).astype(compute), 0)
    k = np.where(j[:, None] < kv_lengths, k.astype(storage).astype(compute), 0).repeat(group, axis=1)
    v = np.where(j[:, None] < kv_lengths, v.astype(storage).astype(compute), 0).repeat(group, axis=1)

    scale = 1 / np.sqrt(compute.type(head_dim)) if options.scale is None else compute.type(options.scale)
    scored = _scores(options, first_batch, q, k, scale, sums)
    scores = scored.scores

    sink = np.full(q_heads, -np.inf) if options.sink is None else np.asarray(options.sink)
    sink = np.where(i < q_lengths, sink.astype(compute)[:, None, None], -np.inf)  # (1 or B, Hq, Sq, 1)
    row_max = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    row_max = np.where(np.isneginf(row_max), 0, row_max)  # a row that sees no key: exp(-inf - 0) is 0, not NaN
    exponentials = np.exp(scores - row_max)
    row_sum = sums.sum(exponentials) + np.exp(sink - row_max)
    probabilities = exponentials / np.where(row_sum == 0, 1, row_sum)
    sink_probability = np.exp(sink - row_max) / np.where(row_sum == 0, 1, row_sum)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(row_sum))[..., 0]

    dropped: Array | float = 1.0
    if options.dropout > 0:
        if options.seed is None:
            raise ValueError("dropout needs a seed")
        heads = range(first_batch * q_heads, (first_batch + batch) * q_heads)
        bits = [keep_mask(options.seed, head, 0, q_length, 0, kv_length, options.dropout) for head in heads]
        keep = np.array(bits, bool).reshape(batch, q_heads, q_length, kv_length)
        dropped = keep * compute.type(keep_scale(options.dropout))
    # For fp8, scale P to unnormalised probabilities of at most 256 before rounding, and undo the factor in out.
    factor = 256 * row_sum / keep_scale(options.dropout) if storage.name == FP8 else compute.type(1)
    weights = (probabilities * dropped * factor).astype(storage).astype(compute)
    v_descale = _per_query_head(options.v_descale, q_heads, compute)
    out = v_descale * sums.matmul(weights, v) / np.where(factor == 0, 1, factor)
    out = out.astype(_out_dtype(storage)).astype(compute)
    return Forward(q, k, v, scale, scored, probabilities, sink_probability, dropped, out, lse, sums)


def _scores(options: Options, first_batch: int, q: Array, k: Array, scale: np.floating, sums: _Sums) -> Scores:
    """Return the scores of q and k (B, Hq, S, D), whose padding is 0."""
    compute = q.dtype
    batch, q_heads, q_length, _ = q.shape
    i, j = np.arange(q_length)[:, None], np.arange(k.shape[2])
    q_lengths = _lengths(options.q_lengths, q_length)
    kv_lengths = _lengths(options.kv_lengths, k.shape[2])
    offset = 0 if options.causal == "top_left" else kv_lengths - q_lengths

    q_descale, k_descale = (_per_query_head(x, q_heads, compute) for x in (options.q_descale, options.k_descale))
    scores = scale * q_descale * k_descale * sums.matmul(q, k.swapaxes(2, 3))
    softcap_slope: Array | float = 1.0
    softcap_curve: Array | float = 0.0
    if options.softcap not in (None, np.inf):
        capped = np.tanh(scores / options.softcap)
        scores, softcap_slope = options.softcap * capped, 1 - capped**2
        softcap_curve = -2 * capped * softcap_slope / options.softcap
    if options.alibi_slopes is not None:
        slopes = np.asarray(options.alibi_slopes).astype(compute).reshape(-1, q_heads, 1, 1)
        scores = scores - slopes * np.abs(i + offset - j).astype(compute)
    if options.bias is not None:
        bias = np.asarray(options.bias).astype(compute)
        scores = np.where(np.isneginf(bias), bias, scores + bias)  # -inf masks even where q.k is NaN

    sequence, head = np.arange(first_batch, first_batch + batch)[:, None, None, None], np.arange(q_heads)[:, None, None]
    mod_slope: Array | float = 1.0
    mod_curve: Array | float = 0.0
    if options.score_mod is not None:
        modified = _Dual.of(options.score_mod(_Dual(scores, np.ones_like(scores)), sequence, head, i, j))
        scores = np.broadcast_to(modified.value, scores.shape).astype(compute)
        mod_slope, mod_curve = modified.slope, modified.curve

    visible = _visible(options, i, j, q_lengths, kv_lengths, offset)
    if options.mask_mod is not None:
        visible = visible & options.mask_mod(sequence, head, i, j)
    scores = np.where(visible, scores, -np.inf)
    return Scores(scores, softcap_slope, softcap_curve, mod_slope, mod_curve)


def _scores_again(options: Options, first_batch: int, forward: Forward) -> Scores:
    """Return the scores of a backward, which are rounded differently because its tiles differ from the forward's."""
    if options.order == 0:
        return forward.scored
    return _scores(options, first_batch, forward.q, forward.k, forward.scale, forward.sums)


def _per_query_head(descale: npt.ArrayLike | None, q_heads: int, compute: np.dtype) -> Array:
    """Return a descale (B, Hk) as (B, Hq, 1, 1); (1, 1, 1, 1) with value 1 if there is none."""
    if descale is None:
        return np.ones((1, 1, 1, 1), compute)
    descale = np.asarray(descale, compute)
    return descale.repeat(q_heads // descale.shape[1], axis=1)[..., None, None]


def _backward(
    options: Options, first_batch: int, dlse: npt.ArrayLike | None, dout: Array, q: Array, k: Array, v: Array
) -> Gradients:
    storage, compute = _precision(q, options.dtype)
    if storage.name == FP8 or any(x is not None for x in (options.q_descale, options.k_descale, options.v_descale)):
        raise TypeError("fp8 and its descales have no gradient")
    forward = _forward(options, first_batch, q, k, v)
    scored, sums = _scores_again(options, first_batch, forward), forward.sums
    lse = forward.lse[..., None]  # (B, Hq, Sq, 1)
    # Recompute P from lse, as a backward does, so that the tolerance includes the rounding of lse.
    probabilities = np.exp(scored.scores - np.where(np.isneginf(lse), np.inf, lse))
    dout = np.where(np.isneginf(lse), 0, dout.astype(storage).astype(compute))
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse).astype(compute)[..., None]
    dlse = np.where(np.isneginf(lse), 0, dlse)

    dropped_probabilities = (probabilities * forward.dropped).astype(storage).astype(compute)
    dv = sums.matmul(dropped_probabilities.swapaxes(2, 3), dout)
    dprobabilities = sums.matmul(dout, forward.v.swapaxes(2, 3)) * forward.dropped
    delta = sums.sum(dout * forward.out)
    dscores = probabilities * (dprobabilities - delta + dlse)
    dscores = np.where(dscores == 0, 0, dscores * scored.mod_slope)  # a hidden score may have an infinite slope
    dproducts = (dscores * scored.softcap_slope).astype(storage).astype(compute)  # of scale * q.k
    dq = forward.scale * sums.matmul(dproducts, forward.k)
    dk = forward.scale * sums.matmul(dproducts.swapaxes(2, 3), forward.q)

    dbias = dsink = None
    if options.bias is not None:
        bias = np.asarray(options.bias)
        dbias = _sum_to_shape(dscores, bias.shape, sums).astype(compute if options.dtype is None else bias.dtype)
    if options.sink is not None:
        sink = np.asarray(options.sink).astype(compute)[:, None, None]
        sink_probability = np.exp(sink - np.where(np.isneginf(lse), np.inf, lse))
        dsink = -sums.sum(sink_probability * (delta - dlse), (0, 2, 3), keepdims=False)
        dsink = dsink.astype(compute if options.dtype is None else np.asarray(options.sink).dtype)
    dk, dv = (_sum_groups(x, k.shape[1], sums) for x in (dk, dv))
    dk[..., : options.head_dim_v or 0] += dv[..., : options.head_dim_v or 0]  # values inside keys
    return Gradients(dq.astype(storage), dk.astype(storage), dv.astype(storage), dbias, dsink)


class _Jvp(NamedTuple):
    """A forward with the tangents of its inputs and results; tk and tv are repeated for the query heads."""

    forward: Forward
    tsink: Array
    tk: Array
    tv: Array
    tq: Array
    tout: Array
    tlse: Array  # (B, Hq, Sq, 1)


def _jvp(options: Options, first_batch: int, tangents: Tangents, q: Array, k: Array, v: Array) -> _Jvp:
    """Return a forward and its JVP. In low precision, P, P (ts - tlse) and tout are rounded to the dtype."""
    storage, compute = _precision(q, options.dtype)
    forward = _forward(options, first_batch, q, k, v)
    sums = forward.sums
    group, q_heads = q.shape[1] // k.shape[1], q.shape[1]
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[:, None]
    rows, columns = i < _lengths(options.q_lengths, len(i)), j < _lengths(options.kv_lengths, len(j))
    tv = tangents.tv if options.head_dim_v is None or tangents.tk is None else tangents.tk[..., : options.head_dim_v]
    tq, tk, tv = (
        np.zeros(x.shape, compute) if t is None else np.where(here, t.astype(storage).astype(compute), 0)
        for t, x, here in zip((*tangents[:2], tv), (q, k, v), (rows, columns, columns), strict=True)
    )
    tk, tv = (x.repeat(group, axis=1) for x in (tk, tv))
    probabilities = forward.probabilities
    _, _, tscores = _score_tangents(forward, tq, tk, tangents.tbias)
    tsink = np.asarray(np.zeros(q_heads) if tangents.tsink is None else tangents.tsink).astype(compute)[:, None, None]

    tlse = sums.sum(probabilities * tscores) + forward.sink_probability * tsink
    weights = (probabilities * forward.dropped).astype(storage).astype(compute)
    moving = (probabilities * forward.dropped * (tscores - tlse)).astype(storage).astype(compute)
    tout = sums.matmul(moving, forward.v) + sums.matmul(weights, tv)
    tout = tout.astype(storage).astype(compute)
    return _Jvp(forward, tsink, tk, tv, tq, tout, tlse)


def _score_tangents(forward: Forward, tq: Array, tk: Array, tbias: npt.ArrayLike | None) -> tuple[Array, Array, Array]:
    """Return the tangents of scale * q.k, of the scores that score_mod gets, and of those that the softmax sees.

    The tangents that the softmax sees are 0 where P is 0. With `order`, each call permutes the terms of its sums anew.
    """
    sums = forward.sums
    with np.errstate(invalid="ignore"):  # at hidden scores
        tproducts = sums.matmul(tq, forward.k.swapaxes(2, 3)) + sums.matmul(forward.q, tk.swapaxes(2, 3))
        tproducts = forward.scale * tproducts
        tmodified = tproducts * forward.scored.softcap_slope
        if tbias is not None:
            tmodified = tmodified + np.asarray(tbias).astype(forward.q.dtype)
        return tproducts, tmodified, np.where(forward.probabilities == 0, 0, tmodified * forward.scored.mod_slope)


def _double_backward(
    options: Options,
    first_batch: int,
    tangents: Tangents,
    dlse: npt.ArrayLike | None,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
) -> SecondGradients:
    """Return the tangents of `_backward` in the direction, which are the gradients because the Hessian is symmetric."""
    storage, compute = _precision(q, options.dtype)
    jvp = _jvp(options, first_batch, tangents, q, k, v)
    forward, lse = jvp.forward, jvp.forward.lse[..., None]
    scored, sums = _scores_again(options, first_batch, forward), forward.sums
    # Recompute P from lse, as an engine does, so that the tolerance includes the rounding of lse.
    infinite = np.where(np.isneginf(lse), np.inf, lse)
    p = np.exp(scored.scores - infinite)
    dout = np.where(np.isneginf(lse), 0, dout.astype(storage).astype(compute))
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse).astype(compute)[..., None]
    dlse = np.where(np.isneginf(lse), 0, dlse)

    tproducts, tmodified, tscores = _score_tangents(forward, jvp.tq, jvp.tk, tangents.tbias)
    tp = p * (tscores - jvp.tlse)
    dp = sums.matmul(dout, forward.v.swapaxes(2, 3)) * forward.dropped
    tdp = sums.matmul(dout, jvp.tv.swapaxes(2, 3)) * forward.dropped
    delta = sums.sum(dout * forward.out) - dlse
    tdelta = sums.sum(dout * jvp.tout)
    ds = p * (dp - delta)
    tds = tp * (dp - delta) + p * (tdp - tdelta)
    with np.errstate(invalid="ignore"):  # at hidden scores
        tds = np.where(p == 0, 0, tds * scored.mod_slope + ds * scored.mod_curve * tmodified)
        ds = np.where(p == 0, 0, ds * scored.mod_slope)
        tdx = np.where(p == 0, 0, tds * scored.softcap_slope + ds * scored.softcap_curve * tproducts)
        dx = np.where(p == 0, 0, ds * scored.softcap_slope)
    tdx, dx = (x.astype(storage).astype(compute) for x in (tdx, dx))
    dq = forward.scale * (sums.matmul(tdx, forward.k) + sums.matmul(dx, jvp.tk))
    dk = forward.scale * (sums.matmul(tdx.swapaxes(2, 3), forward.q) + sums.matmul(dx.swapaxes(2, 3), jvp.tq))
    dv = sums.matmul((tp * forward.dropped).astype(storage).astype(compute).swapaxes(2, 3), dout)

    dbias = dsink = None
    if options.bias is not None:
        bias = np.asarray(options.bias)
        dbias = _sum_to_shape(tds, bias.shape, sums).astype(compute if options.dtype is None else bias.dtype)
    if options.sink is not None:
        sink_probability = np.exp(np.asarray(options.sink).astype(compute)[:, None, None] - infinite)
        tsink_probability = sink_probability * (jvp.tsink - jvp.tlse)
        dsink = -sums.sum(tsink_probability * delta + sink_probability * tdelta, (0, 2, 3), keepdims=False)
        dsink = dsink.astype(compute if options.dtype is None else np.asarray(options.sink).dtype)
    dk, dv = (_sum_groups(x, k.shape[1], sums) for x in (dk, dv))
    dk[..., : options.head_dim_v or 0] += dv[..., : options.head_dim_v or 0]  # values inside keys
    dq, dk, dv, ddout = (x.astype(storage) for x in (dq, dk, dv, jvp.tout))
    return SecondGradients(dq, dk, dv, dbias, dsink, ddout, jvp.tlse[..., 0])


class _Dual(np.lib.mixins.NDArrayOperatorsMixin):
    """Values of a score_mod of NumPy functions, with their first and second derivatives by the score."""

    def __init__(self, value: Any, slope: Array | float, curve: Array | float = 0.0) -> None:
        self.value, self.slope, self.curve = value, slope, curve

    @staticmethod
    def of(x: object) -> _Dual:
        return x if isinstance(x, _Dual) else _Dual(x, 0.0)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> _Dual | Array:
        x, y = (*map(_Dual.of, inputs), _Dual(0.0, 0.0))[:2]
        value = ufunc(*(_Dual.of(operand).value for operand in inputs))
        if value.dtype == np.bool_:
            return value
        with np.errstate(all="ignore"):
            partials = _PARTIALS[ufunc](x.value, y.value, value)
            # 0 times an infinite partial derivative is 0: that operand does not depend on the score.
            slope = sum(_times(s, p) for s, p in zip((x.slope, y.slope), partials, strict=False))
            curve = sum(_times(c, p) for c, p in zip((x.curve, y.curve), partials, strict=False))
            if ufunc in _SECOND:
                xx, xy, yy = _SECOND[ufunc](x.value, y.value, value)
                curve = curve + _times(x.slope**2, xx) + _times(2 * x.slope * y.slope, xy) + _times(y.slope**2, yy)
        return _Dual(value, slope, curve)

    def __array_function__(self, function: Any, types: object, args: tuple[Any, ...], kwargs: object) -> _Dual:
        if function is np.clip:
            x, low, high = (_Dual.of(arg) for arg in args)
            inside = (x.value >= low.value) & (x.value <= high.value)
            clipped = np.clip(x.value, low.value, high.value)
            return _Dual(clipped, np.where(inside, x.slope, 0), np.where(inside, x.curve, 0))
        if function is not np.where:
            raise TypeError(f"the reference does not differentiate {function.__name__}")
        condition, x, y = args[0], _Dual.of(args[1]), _Dual.of(args[2])
        pairs = ((x.value, y.value), (x.slope, y.slope), (x.curve, y.curve))
        return _Dual(*(np.where(condition, a, b) for a, b in pairs))


def _times(factor: Array | float, partial: Array | float) -> Array:
    """Return factor * partial, but 0 where the factor is 0, even if `partial` is infinite."""
    return np.where(factor == 0, 0, factor * partial)


# Partial derivatives of f = ufunc(x, y) by x and y.
_PARTIALS: dict[np.ufunc, Callable[..., tuple[Array | float, ...]]] = {
    np.add: lambda x, y, f: (1, 1),
    np.subtract: lambda x, y, f: (1, -1),
    np.multiply: lambda x, y, f: (y, x),
    np.divide: lambda x, y, f: (1 / y, -f / y),
    np.power: lambda x, y, f: (y * x ** (y - 1),),
    np.maximum: lambda x, y, f: ((np.sign(x - y) + 1) / 2, (np.sign(y - x) + 1) / 2),
    np.minimum: lambda x, y, f: ((np.sign(y - x) + 1) / 2, (np.sign(x - y) + 1) / 2),
    np.negative: lambda x, y, f: (-1,),
    np.absolute: lambda x, y, f: (np.sign(x),),
    np.square: lambda x, y, f: (2 * x,),
    np.sqrt: lambda x, y, f: (0.5 / f,),
    np.exp: lambda x, y, f: (f,),
    np.exp2: lambda x, y, f: (f * np.log(2),),
    np.log: lambda x, y, f: (1 / x,),
    np.log1p: lambda x, y, f: (1 / (1 + x),),
    np.sin: lambda x, y, f: (np.cos(x),),
    np.cos: lambda x, y, f: (-np.sin(x),),
    np.tanh: lambda x, y, f: (1 - f * f,),
}

# Second partial derivatives: by x twice, by x and y, and by y twice. For functions that are not listed they are 0.
_SECOND: dict[np.ufunc, Callable[..., tuple[Array | float, ...]]] = {
    np.multiply: lambda x, y, f: (0, 1, 0),
    np.divide: lambda x, y, f: (0, -1 / y**2, 2 * f / y**2),
    np.power: lambda x, y, f: (y * (y - 1) * x ** (y - 2), 0, 0),
    np.square: lambda x, y, f: (2, 0, 0),
    np.sqrt: lambda x, y, f: (-0.25 / f**3, 0, 0),
    np.exp: lambda x, y, f: (f, 0, 0),
    np.exp2: lambda x, y, f: (f * np.log(2) ** 2, 0, 0),
    np.log: lambda x, y, f: (-1 / x**2, 0, 0),
    np.log1p: lambda x, y, f: (-1 / (1 + x) ** 2, 0, 0),
    np.sin: lambda x, y, f: (-f, 0, 0),
    np.cos: lambda x, y, f: (-f, 0, 0),
    np.tanh: lambda x, y, f: (-2 * f * (1 - f * f), 0, 0),
}


def _visible(
    options: Options, i: Array, j: Array, q_lengths: Array, kv_lengths: Array, offset: Array | int
) -> npt.NDArray[np.bool_]:
    """Return the mask, True where query i sees key j, broadcastable to (B, Hq, Sq, Sk)."""
    visible: npt.NDArray[np.bool_] = (i < q_lengths) & (j < kv_lengths)
    left, right = options.window or (None, None)
    if options.causal:
        visible = visible & (j <= i + offset)
    if left not in (None, -1):
        visible = visible & (j >= i + offset - left)
    if right not in (None, -1):
        visible = visible & (j <= i + offset + right)
    if options.mask is not None:
        visible = visible & np.asarray(options.mask)
    return visible


def _precision(q: npt.ArrayLike, dtype: npt.DTypeLike | None) -> tuple[np.dtype, np.dtype]:
    """Return (storage dtype that values are rounded to, dtype of the arithmetic)."""
    if dtype is None:
        wide = np.asarray(q).dtype in (np.dtype(np.float64), np.dtype(np.longdouble))
        exact = np.dtype(np.longdouble if wide else np.float64)
        return exact, exact
    storage = np.dtype(dtype)
    return storage, np.dtype(np.float64 if storage == np.float64 else np.float32)


def _out_dtype(storage: np.dtype) -> np.dtype:
    """Return the dtype of out: `storage`, or bfloat16 for fp8."""
    return named_dtype("bfloat16") if storage.name == FP8 else storage


def _multiply_in_14_bits(a: Array, b: Array) -> Array:
    """Return a @ b in Hopper's fp8 arithmetic.

    32 products and the accumulator are aligned to the largest of them, truncated to 14 bits and added; their sum is
    truncated to 14 bits.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for first in range(0, a.shape[-1], 32):
        columns = range(first, min(first + 32, a.shape[-1]))
        terms = [total, *(a[..., k, None] * b[..., k, None, :] for k in columns)]
        largest = reduce(np.maximum, map(np.abs, terms))
        total = _truncate(np.asarray(sum(_truncate(x, largest) for x in terms)))
    return total


def _truncate(x: Array, largest: Array | None = None) -> Array:
    """Truncate x to 14 bits, counted from the leading bit of `largest` or, by default, of x itself."""
    exponent = np.frexp(x if largest is None else largest)[1] - 14
    return np.asarray(np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent))


def _lengths(lengths: npt.ArrayLike | None, whole: int) -> Array:
    """Return the lengths in the shape (B, 1, 1, 1) or, if there are none, `whole` in the shape (1, 1, 1, 1)."""
    return np.asarray(whole if lengths is None else lengths, np.int64).reshape(-1, 1, 1, 1)


def _values(k: npt.ArrayLike, v: npt.ArrayLike | None, options: Options) -> npt.ArrayLike:
    """Return v, or the values inside the keys k."""
    return np.asarray(k)[..., : options.head_dim_v] if v is None else v


def _heads_first(x: npt.ArrayLike, layout: str) -> Array:
    return np.asarray(x).swapaxes(1, 2) if layout == "bshd" else np.asarray(x)


def _from_heads_first(x: Array | None, layout: str) -> Array:
    return np.asarray(x).swapaxes(1, 2) if layout == "bshd" else np.asarray(x)


def _direction_heads_first(tangents: Tangents, layout: str) -> Tangents:
    tq, tk, tv = (None if x is None else _heads_first(x, layout) for x in tangents[:3])
    return tangents._replace(tq=tq, tk=tk, tv=tv)


def _direction_of_sequence(tangents: Tangents, b: int, rows: slice, columns: slice) -> Tangents:
    """Return the tangents of packed sequence b, with tq, tk and tv as (1, H, S, D)."""
    here = zip(tangents[:3], (rows, columns, columns), strict=True)
    tq, tk, tv = (None if x is None else _packed_heads_first(np.asarray(x)[part]) for x, part in here)
    return tangents._replace(tq=tq, tk=tk, tv=tv, tbias=_bias_of_sequence(tangents.tbias, b, rows, columns))


def _bias_of_sequence(bias: npt.ArrayLike | None, b: int, rows: slice, columns: slice) -> Array | None:
    """Return the part of a bias, or of its tangent, that packed sequence b reads.

    It is float64, so that the gradient of a bias that sequences share is not rounded before their sum.
    """
    return None if bias is None else np.asarray(bias, np.float64)[_inside_sequence(np.shape(bias), b, rows, columns)]


def _inside_sequence(shape: tuple[int, ...], b: int, rows: slice, columns: slice) -> tuple[slice, ...]:
    """Return the slices of packed sequence b in an array that broadcasts to (B, Hq, max_seqlen_q, max_seqlen_k)."""
    inside = (slice(b, b + 1), slice(None), *(slice(x.stop - x.start) for x in (rows, columns)))
    return tuple(slice(None) if n == 1 else part for n, part in zip(shape, inside[4 - len(shape) :], strict=True))


def _packed_heads_first(x: Array) -> Array:
    return x.swapaxes(0, 1)[None]  # (T, H, D) -> (1, H, T, D)


def _sum_groups(x: Array, kv_heads: int, sums: _Sums) -> Array:
    """Sum (B, Hq, Sk, D) over the query heads of each GQA group -> (B, Hk, Sk, D)."""
    batch, q_heads, length, dim = x.shape
    return sums.sum(x.reshape(batch, kv_heads, q_heads // kv_heads, length, dim), (2,), keepdims=False)


def _sum_to_shape(x: Array, shape: tuple[int, ...], sums: _Sums) -> Array:
    """Sum over the dimensions that broadcasting `shape` to x.shape added or expanded."""
    aligned = (1,) * (x.ndim - len(shape)) + shape
    expanded = tuple(axis for axis, size in enumerate(aligned) if size == 1)
    return sums.sum(x, expanded).reshape(shape)


def _packed(settings: Options, *given: npt.ArrayLike | None) -> tuple[Options, np.dtype, np.dtype, list[Array]]:
    """Return the options, storage and compute dtype of a packed call, and its arrays, which end with q, k and v."""
    arrays = [np.asarray(x) for x in given[:-1]]
    arrays.append(np.asarray(_values(arrays[-1], given[-1], settings)))
    return settings, *_precision(arrays[-3], settings.dtype), arrays


def _varlen_options(options: ReferenceOptions[npt.ArrayLike]) -> Options:
    dense_only = sorted({"mask", "q_lengths", "kv_lengths", "layout"} & options.keys())
    if dense_only:
        raise TypeError(f"packed sequences do not support {', '.join(dense_only)}")
    return Options(**options)


def _options_of_sequence(options: Options, b: int) -> Options:
    """Return the options with the slopes and descales of sequence b."""
    slopes = options.alibi_slopes
    arrays = {} if slopes is None or np.ndim(slopes) == 1 else {"alibi_slopes": np.asarray(slopes)[b]}
    for name in ("q_descale", "k_descale", "v_descale"):
        if (descale := getattr(options, name)) is not None:
            arrays[name] = np.asarray(descale)[b : b + 1]
    return replace(options, **arrays)


def _sequences(
    options: Options, cu_seqlens_q: npt.ArrayLike, cu_seqlens_k: npt.ArrayLike
) -> Iterator[tuple[int, slice, slice, Options]]:
    """Yield (b, rows of q, rows of k, options) of each sequence."""
    ends = [np.asarray(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    for b, (rows, columns) in enumerate(zip(*(map(slice, x[:-1], x[1:]) for x in ends), strict=True)):
        bias = _bias_of_sequence(options.bias, b, rows, columns)
        yield b, rows, columns, replace(_options_of_sequence(options, b), bias=bias)
