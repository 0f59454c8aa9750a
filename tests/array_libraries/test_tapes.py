"""Each library's own gradients: by an adapter, or an error where the library would silently record none."""

import array_libraries
import numpy as np
import pytest

import cupy_flash

SHAPE = (2, 5, 4, 8)
REFUSED = "watches q|record a gradient of q|records no gradient of this call for q"


def values(seed, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, K, V, DOUT = map(values, range(4))
TABLE, DOCUMENT, BIAS = values(5, (4,)), np.array([0, 0, 1, 1, 1], np.int32), values(6, (4, 5, 5))
NEAR = values(8, (9, 4))
SINK, LENGTHS = values(7, (4,)), np.array([5, 3], np.int32)


def mods(table, document):
    return dict(
        score_mod=lambda s, b, h, q_idx, kv_idx: s * table[h],
        mask_mod=lambda b, h, q_idx, kv_idx: document[q_idx] >= document[kv_idx],
    )


def expected():
    """Return (out, lse) and the gradients of sum(out * DOUT) + sum(lse) by q, k, v, BIAS, SINK and TABLE."""
    options = dict(bias=BIAS, sink=SINK, kv_lengths=LENGTHS, **mods(TABLE, DOCUMENT), dropout=0.2, seed=7)
    results, vjp = cupy_flash.attention_vjp(Q, K, V, return_lse=True, engine="cpu", **options)
    gradients = vjp(DOUT, np.ones_like(results[1]))
    return results, (*gradients[:5], gradients.dcaptured[0])


def assert_same(actual, arrays):
    for a, b in zip(actual, arrays, strict=True):
        np.testing.assert_array_equal(np.array(a), b)


if "mlx" in array_libraries.INSTALLED:

    @pytest.fixture
    def mx():
        return array_libraries.mlx()

    def mlx_loss(mx):
        """Return (a loss of q, k, v, bias, sink and table, their values)."""
        from cupy_flash.adapters.mlx import attention

        def loss(q, k, v, bias, sink, table):
            options = dict(bias=bias, sink=sink, kv_lengths=mx.array(LENGTHS), dropout=0.2, seed=7)
            out, lse = attention(q, k, v, return_lse=True, **options, **mods(table, mx.array(DOCUMENT)))
            return mx.sum(out * mx.array(DOUT)) + mx.sum(lse)

        return loss, tuple(map(mx.array, (Q, K, V, BIAS, SINK, TABLE)))

    def test_mlx_differentiates_every_input(mx):
        loss, inputs = mlx_loss(mx)
        assert_same(mx.grad(loss, argnums=tuple(range(6)))(*inputs), expected()[1])
        assert_same(mx.grad(mx.checkpoint(loss))(*inputs)[None], expected()[1][0][None])

    def test_mlx_tangents(mx):
        from cupy_flash.adapters.mlx import attention

        options = dict(bias=BIAS, sink=SINK, **mods(TABLE, DOCUMENT), return_lse=True)
        tangents = dict(tbias=BIAS, tsink=SINK, tcaptured=(TABLE, None))
        results = cupy_flash.attention_jvp(Q, K, V, DOUT, K, V, **tangents, **options)

        def function(q, k, v, bias, sink, table):
            mod = mods(table, mx.array(DOCUMENT))
            return attention(q, k, v, bias=bias, sink=sink, return_lse=True, **mod)

        primals = [mx.array(x) for x in (Q, K, V, BIAS, SINK, TABLE)]
        _, actual = mx.jvp(function, primals, [mx.array(DOUT), *primals[1:]])
        assert_same(actual, (results[1], results[3]))

    def test_mlx_draws_one_seed_for_forward_and_backward(mx):
        from cupy_flash.adapters.mlx import attention

        identity = mx.array(np.broadcast_to(np.eye(5, dtype=np.float32)[:, None], (2, 5, 4, 5)))
        out, dv = mx.vjp(lambda v: attention(mx.array(Q), mx.array(K), v, dropout=0.5), [identity], [identity])
        np.testing.assert_array_equal(np.array(dv[0]).swapaxes(1, 3) != 0, np.array(out[0]) != 0)
        assert (np.array(out[0]) == 0).any()

    def test_mods_may_use_functions_of_mlx(mx):
        import mlx.nn as nn

        def score_mod(s, b, h, i, j):
            near = mx.clip(s, -1, 1) - mx.abs(i - j).astype(mx.float32)
            return mx.where(i > j, nn.gelu(s), near)

        def of_numpy(s, b, h, i, j):
            near = np.clip(s, -1, 1) - abs(i - j)
            return np.where(i > j, s.gelu(), near)

        assert str(cupy_flash.Mod(score_mod)) == str(cupy_flash.Mod(of_numpy))

    def test_mods_may_read_layers_of_mlx(mx):
        import mlx.nn as nn

        from cupy_flash.adapters.mlx import attention

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.near, self.factor = nn.Embedding(9, 4), mx.array(TABLE)
                self.near.weight = mx.array(NEAR)

            def score_mod(self, s, b, h, i, j):
                return s * self.factor[h] + self.near.weight[i - j + 4, h]

            def __call__(self, q):
                return (attention(q, q, q, score_mod=self.score_mod) * mx.array(DOUT)).sum()

        layer = Layer()
        _, gradients = nn.value_and_grad(layer, layer)(mx.array(Q))
        _, vjp = cupy_flash.attention_vjp(
            Q, Q, Q, score_mod=lambda s, b, h, i, j: s * TABLE[h] + NEAR[i - j + 4, h], engine="cpu"
        )
        assert_same((gradients["factor"], gradients["near"]["weight"]), vjp(DOUT).dcaptured)

    def test_mlx_refuses_other_arrays(mx):
        from cupy_flash.adapters.mlx import attention

        with pytest.raises(TypeError, match="q must be an mlx array, not ndarray: call cupy_flash.attention"):
            attention(Q, K, V)
        q = mx.array(Q)
        with pytest.raises(TypeError, match=r"(?s)score_mod .* must return one number.*kv_lengths must be int32"):
            attention(q, q, q, score_mod=lambda *_: None, kv_lengths=mx.array([5, 5], dtype=mx.int64))

    def test_mlx_refuses_second_derivatives_compile_and_vmap(mx):
        from cupy_flash.adapters.mlx import attention

        loss, (q, *rest) = mlx_loss(mx)
        gradient = mx.grad(lambda q: loss(q, *rest))
        with pytest.raises(NotImplementedError, match="differentiated once: call cupy_flash.attention_double_backward"):
            mx.grad(lambda q: gradient(q).sum())(q)
        with pytest.raises(NotImplementedError, match="differentiated once"):
            mx.jvp(gradient, [q], [q])
        for transformed in (mx.compile, mx.vmap):
            with pytest.raises(TypeError, match="transformations like compile or vmap is not allowed"):
                transformed(lambda q: attention(q, q, q))(mx.stack([q, q]) if transformed is mx.vmap else q)


if "tensorflow" in array_libraries.INSTALLED:

    @pytest.fixture
    def tf():
        return array_libraries.tensorflow()

    def tensorflow_gradients(tf):
        """Return (a function that returns the gradients of a loss, the inputs that it differentiates)."""
        from cupy_flash.adapters.tensorflow import attention

        def gradients(q, k, v, bias, sink, table, document, lengths):
            with tf.GradientTape() as tape:
                tape.watch([q, k, v, bias, sink, table])
                options = dict(bias=bias, sink=sink, kv_lengths=lengths, dropout=0.2, seed=7)
                out, lse = attention(q, k, v, return_lse=True, **options, **mods(table, document))
                loss = tf.reduce_sum(out * DOUT) + tf.reduce_sum(lse)
            return tape.gradient(loss, [q, k, v, bias, sink, table])

        return gradients, tuple(map(tf.constant, (Q, K, V, BIAS, SINK, TABLE, DOCUMENT, LENGTHS)))

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_tensorflow_differentiates_every_input(tf, in_graph):
        gradients, inputs = tensorflow_gradients(tf)
        assert_same((tf.function(gradients) if in_graph else gradients)(*inputs), expected()[1])

    @pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
    def test_tensorflow_differentiates_a_variable_that_a_mod_captures(tf, in_graph):
        """A tf.function rewrites the mods that are defined inside it, and a tf.Module wraps its lists."""
        import keras

        from cupy_flash.adapters.tensorflow import attention

        module, weight, numbers = tf.Module(), keras.Variable(TABLE), tf.constant([2**24 + 1], tf.uint32)
        module.tables = [tf.Variable(TABLE)]

        def gradients(q, k, v):
            def score_mod(s, b, h, q_idx, kv_idx):
                return tf.where(numbers[b * 0] - 2**24 == 1, s * module.tables[0][h] + weight[h], 0.0)

            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(attention(q, k, v, score_mod=score_mod) * DOUT)
            return tape.gradient(loss, [module.tables[0], weight.value])

        _, vjp = cupy_flash.attention_vjp(Q, K, V, score_mod=lambda s, b, h, i, j: s * TABLE[h] + SINK[h], engine="cpu")
        expected = vjp(DOUT).dcaptured
        weight.assign(SINK)
        actual = (tf.function(gradients) if in_graph else gradients)(*map(tf.constant, (Q, K, V)))
        assert_same(actual, expected)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_tensorflow_differentiates_slices_of_a_result(tf, axis):
        """The cotangent of tf.gather along the first axis is a tf.IndexedSlices."""
        from cupy_flash.adapters.tensorflow import attention

        q, dout = tf.Variable(Q), np.zeros_like(Q)
        dout[: 1 if axis == 0 else None, : 1 if axis == 1 else None] = 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(attention(q, K, V), [0], axis=axis))
        assert_same([tape.gradient(loss, q)], [cupy_flash.attention_vjp(Q, K, V, engine="cpu")[1](dout).dq])

    def test_tensorflow_results_have_a_shape_in_a_graph(tf):
        from cupy_flash.adapters.tensorflow import attention

        shapes = []

        @tf.function
        def function(q, seen):
            out = attention(q, q, q[..., :3], mask=seen)
            shapes.append(out.shape)
            return out

        seen = np.tri(5, dtype=bool)[None, None]
        out = function(tf.constant(Q), tf.constant(seen))
        assert_same([out], [cupy_flash.attention(Q, Q, Q[..., :3], mask=seen, engine="cpu")])
        assert shapes == [(2, 5, 4, 3)]

    def test_tensorflow_refuses_what_it_does_not_serve(tf, tmp_path):
        from cupy_flash.adapters.tensorflow import attention

        q = tf.Variable(Q)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(attention(q, q, q))
            gradient = inner.gradient(loss, q)
        with pytest.raises(NotImplementedError, match="differentiated once"):
            outer.gradient(gradient, q)
        with pytest.raises(tf.errors.InvalidArgumentError, match="cupy_flash_adapters_tensorflow_attention"):
            tf.function(lambda q: attention(q, q, q), jit_compile=True)(tf.constant(Q))
        module = tf.Module()
        module.call = tf.function(lambda q: attention(q, q, q), input_signature=[tf.TensorSpec(SHAPE)])
        with pytest.raises(AssertionError, match="cupy_flash_adapters_tensorflow_attention_runs_in_python_and_cannot"):
            tf.saved_model.save(module, str(tmp_path))
        with tf.GradientTape(persistent=True) as tape:
            out = attention(q, q, q)
        with pytest.raises(NotImplementedError, match="give tape.jacobian experimental_use_pfor=False"):
            tape.jacobian(out, q)
        with pytest.raises(TypeError, match=r"(?s)q \(RaggedTensor\) is no dense tensor.*bias \(SparseTensor\) is no"):
            attention(tf.RaggedTensor.from_tensor(Q), q, q, bias=tf.sparse.from_dense(Q))
        with pytest.raises(TypeError, match=r"(?s)score_mod .* must return one number.*kv_lengths must be int32"):
            attention(q, q, q, score_mod=lambda *_: None, kv_lengths=tf.constant([5, 5], tf.int64))
        with pytest.raises(TypeError, match=r"q \(.*EagerTensor\): dtype string is not supported"):
            cupy_flash.attention(tf.constant(["a"]), q, q)
        with pytest.raises(TypeError, match="symbolic tensor has no memory: inside a tf.function call cupy_flash.adap"):
            tf.function(lambda q: cupy_flash.attention(q, q, q), autograph=False)(tf.constant(Q))

    def test_a_tape_of_tensorflow_is_not_left_without_gradient(tf):
        from cupy_flash.adapters.tensorflow import attention

        for q in (tf.Variable(Q), tf.constant(Q)):
            with tf.GradientTape() as tape:
                tape.watch(q)
                with pytest.raises(TypeError, match=REFUSED):
                    cupy_flash.attention(q, tf.constant(K), tf.constant(V))
                with tape.stop_recording():
                    assert_same([cupy_flash.attention(q, q, q)], [cupy_flash.attention(Q, Q, Q, engine="cpu")])
                cupy_flash.attention_vjp(q, q, q)
                lse = tf.zeros((2, 4, 5))
                for function in (cupy_flash.attention_weights, cupy_flash.key_importance):
                    with pytest.raises(TypeError, match=REFUSED):
                        function(q, tf.constant(K), lse)
                cupy_flash.attention_weights_vjp(q, q, lse)
            with tf.autodiff.ForwardAccumulator(q, tf.ones_like(q)):
                with pytest.raises(TypeError, match=REFUSED):
                    cupy_flash.attention(q, tf.constant(K), tf.constant(V))
                with pytest.raises(NotImplementedError, match="differentiated once"):
                    attention(q, tf.constant(K), tf.constant(V))


if "paddle" in array_libraries.INSTALLED:

    def test_a_gradient_of_paddle_is_not_lost():
        paddle = array_libraries.paddle()
        q, k, v = (paddle.to_tensor(x, stop_gradient=False) for x in (Q, K, V))
        with pytest.raises(TypeError, match="record a gradient of q and k and v, but not of this call"):
            cupy_flash.attention(q, k, v)
        with pytest.raises(TypeError, match=REFUSED):
            cupy_flash.attention_with_kv_cache(q, k, v)
        with pytest.raises(TypeError, match=REFUSED):
            cupy_flash.top_weights(q, k, paddle.zeros((2, 4, 5)), 1)
        with paddle.no_grad():
            assert_same([cupy_flash.attention(q, k, v)], [cupy_flash.attention(Q, K, V, engine="cpu")])
        out, vjp = cupy_flash.attention_vjp(q, k, v)
        assert out.stop_gradient
        dq = cupy_flash.attention_vjp(Q, K, V, engine="cpu")[1](DOUT).dq
        assert_same([vjp(paddle.to_tensor(DOUT)).dq], [dq])


if "warp" in array_libraries.INSTALLED:

    def test_a_tape_of_warp_is_not_left_without_gradient():
        wp = array_libraries.warp()
        q = wp.array(Q, requires_grad=True)
        assert_same([cupy_flash.attention(q, q, q).numpy()], [cupy_flash.attention(Q, Q, Q, engine="cpu")])
        with wp.Tape(), pytest.raises(TypeError, match=REFUSED):
            cupy_flash.attention(q, q, q)
        plain = wp.array(Q)
        with wp.Tape():
            cupy_flash.attention(plain, plain, plain)
