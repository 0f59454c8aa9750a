"""attn_implementation="cupy_fa" in tiny models of transformers, against sdpa, or the formula if a model refuses
sdpa.
"""

import contextlib
import copy
import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import (
    BATCH,
    DECODERS,
    GROUPED,
    LENGTH,
    REFUSED_BY_SDPA,
    SIZES,
    VOCABULARY,
    formula,
    formula_mask,
    model_of,
    three_runs,
    token_mask,
    tokens,
)
from tolerance import assert_matches_reference
from torch_orders import furthest, in_several_orders
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskGeneration,
    BertConfig,
    BloomConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    FalconConfig,
    Gemma4TextConfig,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedModel,
    RoFormerConfig,
    SamConfig,
    T5Config,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
    XGLMConfig,
)
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    packed_sequence_compatibility_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import cupy_flash
from cupy_flash.adapters import transformers as adapter


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", formula_mask)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    return model(**inputs)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("case", DECODERS)
def test_logits(case, padding):
    valid = token_mask(padding)
    where = torch.ones(BATCH, LENGTH, dtype=torch.bool) if valid is None else valid.bool()
    with torch.no_grad():
        logits = three_runs(model_of(case), case, lambda model: model(tokens(), attention_mask=valid).logits[where])
    assert logits[0].std() > 0.1
    assert_matches_reference(*logits, "float32", "logits")


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("case", DECODERS)
def test_greedy_generation_with_cache(case, padding):
    model = model_of(case)
    valid = token_mask(padding)
    said = []
    for implementation in ("cupy_fa", "formula" if case in REFUSED_BY_SDPA else "sdpa"):
        model.set_attn_implementation(implementation)
        said.append(
            model.generate(
                tokens(), attention_mask=torch.ones_like(tokens()) if valid is None else valid,
                max_new_tokens=10, do_sample=False, use_cache=True,
            )
        )  # fmt: skip
    assert said[0].shape == (BATCH, LENGTH + 10)
    assert torch.equal(*said)


@pytest.mark.parametrize("case", ["llama", "mistral-window"])
def test_generation_with_a_cache_of_fixed_size(case, monkeypatch):
    # generate() would compile the step, which is not tested here.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = model_of(case)
    said = []
    for implementation in ("cupy_fa", "sdpa"):
        model.set_attn_implementation(implementation)
        said.append(
            model.generate(
                tokens(), attention_mask=token_mask("left"), max_new_tokens=10, do_sample=False,
                cache_implementation="static",
            )
        )  # fmt: skip
    assert torch.equal(*said)


@pytest.mark.parametrize("case", ["llama", "mistral-window"])
def test_chunked_prefill(case):
    valid = token_mask("left")

    def in_pieces(model):
        first = model(tokens()[:, :8], attention_mask=valid[:, :8], use_cache=True)
        rest = model(tokens()[:, 8:], attention_mask=valid, past_key_values=first.past_key_values)
        return torch.cat([first.logits, rest.logits], dim=1)[valid.bool()]

    def whole(model):
        return model(tokens(), attention_mask=valid).logits[valid.bool()]

    with torch.no_grad():
        actual, exact, low = three_runs(model_of(case), case, in_pieces)
        assert_matches_reference(actual, exact, low, "float32", "logits")
        assert_matches_reference(actual, three_runs(model_of(case), case, whole)[1], low, "float32", "logits")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # deprecated until version 6
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("case", ["llama", "mistral-window", "gpt2", "gpt-oss-sinks-window"])
def test_gradients_with_checkpointing(case, padding):
    model = model_of(case)
    valid = token_mask(padding)
    labels = tokens() if valid is None else tokens().masked_fill(valid == 0, -100)

    def gradients(model):
        model = copy.deepcopy(model).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if model.config._attn_implementation == "cupy_fa":
            model.gradient_checkpointing_enable()
        model(tokens(), attention_mask=valid, labels=labels, use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]
    runs = three_runs(model, case, gradients)
    assert runs[0].shape == (sum(sizes),)
    for name, *three in zip(names, *(run.split(sizes) for run in runs), strict=True):
        assert_matches_reference(*three, "float32", name)


def test_dropout_follows_the_mode():
    config = copy.deepcopy(DECODERS["llama"])
    config.attention_dropout = 0.5
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cupy_fa")
    with torch.no_grad():
        model.train()
        assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
        model.eval()
        assert torch.equal(model(tokens()).logits, model(tokens()).logits)


ENCODERS = {
    "bert": BertConfig(**SIZES),
    "modernbert-window": ModernBertConfig(
        **SIZES | dict(eos_token_id=2), cls_token_id=1, sep_token_id=2, local_attention=6, global_attn_every_n_layers=2
    ),
}


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("case", ENCODERS)
def test_encoder(case, padding):
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS[case]).eval()
    valid = token_mask(padding)
    where = torch.ones(BATCH, LENGTH, dtype=torch.bool) if valid is None else valid.bool()
    with torch.no_grad():
        states = three_runs(model, case, lambda model: model(tokens(), attention_mask=valid).last_hidden_state[where])
    assert_matches_reference(*states, "float32", "last_hidden_state")


VISION = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
)  # fmt: skip


def test_vision_transformer():
    torch.manual_seed(0)
    model = AutoModel.from_config(ViTConfig(**VISION)).eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        states = three_runs(model, "vit", lambda model: model(pixels.to(model.dtype)).last_hidden_state)
    assert_matches_reference(*states, "float32", "last_hidden_state")


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_encoder_and_decoder_with_position_bias(padding):
    # There are as many decoder tokens as encoder tokens, so that a padding mask of the wrong sequence would fit.
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()

    def states_and_gradient(model):
        out = model(
            input_ids=tokens(), attention_mask=token_mask(padding), decoder_input_ids=tokens().flip(1)
        ).last_hidden_state
        bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        (gradient,) = torch.autograd.grad(out.square().sum(), bias)
        return torch.cat([out.detach().flatten(), gradient.flatten()])

    runs = three_runs(model, "t5", states_and_gradient)
    for name, *three in zip(
        ("last_hidden_state", "gradient of the position bias"),
        *(run.split([BATCH * LENGTH * 32, run.numel() - BATCH * LENGTH * 32]) for run in runs),
        strict=True,
    ):
        assert_matches_reference(*three, "float32", name)


def test_compiled_model():
    where = token_mask("left").bool()

    def logits(model, transform=lambda model: model):
        return transform(model)(tokens(), attention_mask=token_mask("left"), use_cache=False).logits[where]

    model = model_of("mistral-window")
    with torch.no_grad():
        _, exact, low = three_runs(model, "mistral-window", logits)
        model.set_attn_implementation("cupy_fa")
        actual = logits(model, functools.partial(torch.compile, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    assert_matches_reference(actual, exact, low, "float32", "logits")


def test_bfloat16_under_autocast():
    where = token_mask("left").bool()

    def logits(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype != torch.float64):
            return model(tokens(), attention_mask=token_mask("left")).logits[where]

    with torch.no_grad():
        actual, exact, low = three_runs(model_of("llama"), "llama", logits)
    assert actual.dtype == torch.bfloat16
    assert_matches_reference(actual.double(), exact, low, "bfloat16", "logits")


CALLS = {
    "llama-none": ("llama", "none", {("attention", "causal")}),
    "llama-right": ("llama", "right", {("attention", "causal", "q_lengths", "kv_lengths")}),
    "llama-left": ("llama", "left", {("attention_varlen", "causal")}),
    "llama-holes": ("llama", "holes", {("attention", "causal", "mask")}),
    "mistral-none": ("mistral-window", "none", {("attention", "causal", "window")}),
    "mistral-left": ("mistral-window", "left", {("attention_varlen", "causal", "window")}),
    "gemma2-left": (
        "gemma2-softcap-window",
        "left",
        {("attention_varlen", "causal", "softcap"), ("attention_varlen", "causal", "softcap", "window")},
    ),
    "gpt-oss-none": (
        "gpt-oss-sinks-window",
        "none",
        {("attention", "causal", "sink"), ("attention", "causal", "sink", "window")},
    ),
}


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the calls that reach cupy_flash.

    A call is (function, shape of k, options, names of the options that are set, except scale and dropout).
    """
    seen = []

    def recorded(name, function):
        def record(*arrays, **options):
            given = {option for option, value in options.items() if value is not None and value is not False}
            seen.append((name, arrays[1].shape, options, frozenset(given - {"scale", "dropout"})))
            return function(*arrays, **options)

        return record

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(adapter, name, recorded(name, getattr(adapter, name)))
    return seen


def refuse(**_):
    raise AssertionError("a mask was written out")


@pytest.mark.parametrize("case", CALLS)
def test_masks_stay_lazy(case, calls, monkeypatch):
    name, padding, expected = CALLS[case]
    monkeypatch.setattr(adapter, "sdpa_mask", refuse)
    with torch.no_grad():
        run(model_of(name), "cupy_fa", input_ids=tokens(), attention_mask=token_mask(padding))
    assert {(function, given) for function, _, _, given in calls} == {
        (function, frozenset(options)) for function, *options in expected
    }
    kv_heads = 4 if name == "gpt2" else 2
    assert {shape[-2] for _, shape, _, _ in calls} == {kv_heads}  # keys are not repeated for the query heads
    masks = [options["mask"] for _, _, options, _ in calls if options.get("mask") is not None]
    assert all(mask.shape == (BATCH, 1, 1, LENGTH) for mask in masks)


def test_batches_with_little_padding_are_not_packed(calls):
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[0, :2] = 0
    with torch.no_grad():
        run(model_of("llama"), "cupy_fa", input_ids=tokens(), attention_mask=valid)
    assert {given for _, _, _, given in calls} == {frozenset({"causal", "mask"})}


def test_padded_encoders_pass_lengths(calls):
    model = AutoModel.from_config(ENCODERS["bert"]).eval()
    with torch.no_grad():
        run(model, "cupy_fa", input_ids=tokens(), attention_mask=token_mask("right"))
    assert {given for _, _, _, given in calls} == {frozenset({"kv_lengths"})}


def mask_arguments(**changes):
    return dict(
        batch_size=BATCH, q_length=LENGTH, kv_length=LENGTH, q_offset=0, kv_offset=0, device="cpu",
        mask_function=causal_mask_function,
    ) | changes  # fmt: skip


WINDOW = dict(local_size=4, config=MistralConfig(**GROUPED, sliding_window=4))


def chunk_mask(b, h, i, j):
    return (j <= i) & (i // 4 == j // 4)


CHUNKS = dict(mask_function=chunk_mask, local_size=4)
PREFIX = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[0] * 5 + [-1] * 3 + [1] * 4] * BATCH)))
PACKED = packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 7] * BATCH))
# The mask function as a Mod.
BY_FUNCTION = {
    "asked-for": dict(allow_is_causal_skip=False),
    "chunks": CHUNKS | dict(config=Llama4TextConfig(**GROUPED, head_dim=8, attention_chunk_size=4)),
    "chunks-as-long-as-the-window": CHUNKS
    | dict(config=Llama4TextConfig(**GROUPED, head_dim=8, attention_chunk_size=4, sliding_window=4)),
    "chunks-after-padding": dict(
        mask_function=chunked_causal_mask_function(4, torch.tensor([0, 2, 7])), local_size=4,
        attention_mask=token_mask("left").bool(),
    ),
    "without-config": dict(mask_function=sliding_window_causal_mask_function(4), local_size=4),
    "window-of-a-cache": WINDOW
    | dict(mask_function=sliding_window_causal_mask_function(4), q_length=3, kv_length=6, q_offset=9, kv_offset=4),
    "prefix": dict(mask_function=PREFIX, allow_is_causal_skip=False),
    "prefix-right": dict(
        mask_function=PREFIX, allow_is_causal_skip=False, attention_mask=token_mask("right").bool()
    ),
    "with-vmap": CHUNKS
    | dict(mask_function=and_masks(bidirectional_mask_function, chunk_mask), use_vmap=True, allow_is_causal_skip=False),
    "packed": dict(mask_function=and_masks(PACKED, causal_mask_function), allow_is_causal_skip=False),
    "packed-positions": dict(
        mask_function=packed_sequence_compatibility_function(
            sliding_window_causal_mask_function(4), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * BATCH),
            torch.tensor([[0] * 5 + [1] * 7] * BATCH),
        ),
        allow_is_causal_skip=False,
    ),
}  # fmt: skip
LAZY = {
    **BY_FUNCTION,
    "left": dict(attention_mask=token_mask("left").bool()),
    "right": dict(attention_mask=token_mask("right").bool()),
    "holes": dict(attention_mask=token_mask("holes").bool()),
    "short": dict(attention_mask=token_mask("left").bool()[:, :9]),
    "window": WINDOW | dict(mask_function=sliding_window_causal_mask_function(4)),
    "window-of-full-cache": WINDOW
    | dict(
        mask_function=sliding_window_causal_mask_function(4), q_length=3, kv_length=6, q_offset=20, kv_offset=17,
        attention_mask=torch.arange(23).expand(BATCH, 23) > torch.tensor([[0], [18], [19]]),
    ),
    "after-a-prefix": dict(q_length=4, q_offset=8, attention_mask=token_mask("left").bool()),
    "after-a-prefix-alone": dict(q_length=4, q_offset=8),
    "of-layers-that-slice-it": dict(config=SimpleNamespace(num_kv_shared_layers=1)),
    "encoder": dict(
        mask_function=bidirectional_mask_function, allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
        attention_mask=token_mask("left").bool(),
    ),
    "encoder-window": WINDOW
    | dict(
        mask_function=sliding_window_bidirectional_mask_function(4), allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True, attention_mask=token_mask("right").bool(),
    ),
    "encoder-hint-of-a-size": WINDOW
    | dict(
        mask_function=bidirectional_mask_function, allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
        attention_mask=token_mask("right").bool(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAZY)
def test_lazy_mask_attends_as_its_elements(case):
    arguments = mask_arguments(**LAZY[case])
    mask = adapter.attention_mask(**arguments)
    assert type(mask) is adapter.LazyMask
    dense = sdpa_mask(**arguments | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))
    assert mask.shape == dense.shape and mask.dtype == dense.dtype and mask.device == dense.device
    assert torch.equal(mask[:, 0], dense[:, 0])

    mask = adapter.attention_mask(**arguments)  # a second mask, whose elements have not been read
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, 4, mask.shape[2], 8, generator=generator)
    k, v = torch.randn(2, BATCH, 2, mask.shape[3], 8, generator=generator)
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
    exact, _ = formula(None, q.double(), k.double(), v.double(), dense)
    low = furthest(exact, *in_several_orders(lambda: formula(None, q, k, v, dense)[0]))
    # Rows of padding tokens are not compared: they may be 0 instead of the formula's result.
    is_token = torch.ones(BATCH, mask.shape[2], dtype=torch.bool)
    if arguments.get("attention_mask") is not None and arguments["mask_function"] is not bidirectional_mask_function:
        valid = formula_mask(**arguments | dict(mask_function=bidirectional_mask_function))
        is_token = valid[:, 0, 0, -mask.shape[2] :]
    assert_matches_reference(out[is_token], exact[is_token], low[is_token], "float32", "out")


def elementwise(b, h, i, j):
    return (j <= i) & (torch.cumsum(j >= 0, -1) > 0)


WRITTEN_OUT = {
    "integers": dict(attention_mask=token_mask("left")),
    "one-query": dict(allow_is_causal_skip=False, q_length=1, q_offset=3),
    "no-elementwise-function": dict(mask_function=elementwise, allow_is_causal_skip=False),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_masks_that_are_computed_in_full(case):
    arguments = mask_arguments(**WRITTEN_OUT[case])
    mask = adapter.attention_mask(**arguments)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, sdpa_mask(**arguments))


@pytest.mark.parametrize("case", BY_FUNCTION)
def test_masks_by_a_function_take_memory_linear_in_the_sequence(case, calls, monkeypatch):
    monkeypatch.setattr(adapter, "sdpa_mask", refuse)
    mask = adapter.attention_mask(**mask_arguments(**BY_FUNCTION[case]))
    q, k = (torch.randn(BATCH, 2, length, 8) for length in mask.shape[2:])
    adapter.attention_forward(torch.nn.Module(), q, k, k, mask)
    ((_, _, options, given),) = calls
    assert given == {"mask_mod"}
    assert all(array.numel() <= BATCH * LENGTH for array in options["mask_mod"].arrays)


def test_elements_that_a_model_writes_are_the_mask():
    mask = adapter.attention_mask(**mask_arguments(**BY_FUNCTION["packed"]))
    mask[:, :, :, 0] = True
    q, k = (torch.randn(BATCH, 2, LENGTH, 8) for _ in range(2))
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, k, mask)
    dense = sdpa_mask(**mask_arguments(**BY_FUNCTION["packed"])).clone()
    dense[:, :, :, 0] = True
    expected, _ = adapter.attention_forward(torch.nn.Module(), q, k, k, dense)
    torch.testing.assert_close(out, expected)


def test_masks_without_hidden_keys_are_none():
    full = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    assert adapter.attention_mask(**mask_arguments()) is None
    assert adapter.attention_mask(**mask_arguments(attention_mask=full)) is None
    assert adapter.attention_mask(**mask_arguments(q_length=1, q_offset=LENGTH - 1, attention_mask=full)) is None
    window = WINDOW | dict(mask_function=sliding_window_causal_mask_function(4), q_length=4, kv_length=4)
    assert adapter.attention_mask(**mask_arguments(**window)) is None
    encoder = dict(mask_function=bidirectional_mask_function, allow_is_causal_skip=False, q_length=5)
    assert adapter.attention_mask(**mask_arguments(**encoder, allow_is_bidirectional_skip=True)) is None


def test_packed_sequences_do_not_see_each_other():
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    ids = tokens()[:1]

    def packed(model):
        return model(ids, position_ids=positions, use_cache=False).logits[0]

    def apart(model):
        return torch.cat([model(part, use_cache=False).logits[0] for part in ids.split([5, 7], 1)])

    model = model_of("mistral-window")
    with torch.no_grad():
        actual, _, low = three_runs(model, "mistral-window", packed)
        _, exact, _ = three_runs(model, "mistral-window", apart)
    assert_matches_reference(actual, exact, low, "float32", "logits")


@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
def test_operations_on_a_mask_apply_to_its_elements(create):
    config = copy.deepcopy(DECODERS["mistral-window"])
    config._attn_implementation = "cupy_fa"
    embeddings = torch.zeros(BATCH, LENGTH, 1)
    mask = create(config, embeddings, token_mask("left"), None)
    config._attn_implementation = "sdpa"
    dense = create(config, embeddings, token_mask("left"), None)
    assert type(mask) is adapter.LazyMask and type(mask.clone()) is torch.Tensor
    assert torch.equal(mask.logical_not(), ~dense)
    assert torch.equal(mask[..., :3], dense[..., :3])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert mask.to("cpu") is mask


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_mask_of_the_caller(kind):
    model = model_of("llama")
    allowed = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    mask = allowed if kind == "boolean" else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    cast = {dtype: torch.bool if kind == "boolean" else dtype for dtype in (torch.float32, torch.float64)}
    with torch.no_grad():
        logits = three_runs(
            model, "llama", lambda model: model(tokens(), attention_mask=mask.to(cast[model.dtype])).logits
        )
    assert_matches_reference(*logits, "float32", "logits")


REFUSED = {
    "bloom": (AutoModelForCausalLM, BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4), False),
    "xglm": (
        AutoModelForCausalLM,
        XGLMConfig(vocab_size=VOCABULARY, d_model=32, ffn_dim=48, num_layers=1, attention_heads=4),
        False,
    ),
    "roformer": (AutoModel, RoFormerConfig(**SIZES), False),
    "gptj": (
        AutoModelForCausalLM,
        GPTJConfig(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
        False,
    ),
    "gpt-neo": (
        AutoModelForCausalLM,
        GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_layers=1, attention_types=[[["global"], 1]], num_heads=4
        ),
        False,
    ),
    # These two models declare sdpa but choose an attention class by the name of the implementation.
    "falcon": (
        AutoModelForCausalLM,
        FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
        True,
    ),
    "sam": (AutoModelForMaskGeneration, SamConfig(vision_config=dict(num_hidden_layers=1)), True),
}  # fmt: skip


def refusal(has_sdpa):
    return rf'attn_implementation="cupy_fa": .*_supports_sdpa={has_sdpa}, _supports_attention_backend=False'


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_without_the_attention_interface_is_refused_when_built(case):
    auto, config, has_sdpa = REFUSED[case]
    with torch.device("meta"), pytest.raises(cupy_flash.UnsupportedError, match=refusal(has_sdpa)):
        auto.from_config(copy.deepcopy(config), attn_implementation="cupy_fa")


def test_a_model_without_the_attention_interface_is_refused_when_loaded(tmp_path):
    auto, config, has_sdpa = REFUSED["bloom"]
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(cupy_flash.UnsupportedError, match=refusal(has_sdpa)):
        auto.from_pretrained(tmp_path, attn_implementation="cupy_fa")
    assert auto.from_pretrained(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"


def test_a_submodel_without_the_attention_interface_is_refused():
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**VISION), TrOCRConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_ffn_dim=48)
    )
    build = AutoModelForImageTextToText.from_config
    with torch.device("meta"):
        with pytest.raises(cupy_flash.UnsupportedError, match=r"TrOCR\w+ does not .*\n?.*" + refusal(False)):
            build(copy.deepcopy(config), attn_implementation="cupy_fa")
        model = build(config, attn_implementation={"encoder": "cupy_fa", "decoder": "eager"})
        assert model.encoder.config._attn_implementation == "cupy_fa"
        with pytest.raises(cupy_flash.UnsupportedError, match="TrOCR"):
            model.decoder.get_correct_attn_implementation("cupy_fa")


def test_other_implementations_are_checked_as_before():
    before = PreTrainedModel.get_correct_attn_implementation
    adapter.register()
    assert PreTrainedModel.get_correct_attn_implementation is before  # the hook is installed once
    auto, config, _ = REFUSED["bloom"]
    with torch.device("meta"):
        assert auto.from_config(copy.deepcopy(config)).config._attn_implementation == "eager"
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            auto.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        with pytest.raises(ValueError, match="no_such_attention"):
            auto.from_config(copy.deepcopy(config), attn_implementation="no_such_attention")


SPARSE = {
    # Only for eager and sdpa does the model write the key indices that a query may see into the mask.
    "deepseek-v3.2": (
        "sdpa",
        DeepseekV32Config(
            **SIZES | dict(num_hidden_layers=1), q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
            qk_rope_head_dim=8, v_head_dim=8, index_topk=3, index_n_heads=2, index_head_dim=16, n_routed_experts=2,
            num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
        ),
    ),
    # The keys of compressed tokens are appended, and the mask hides some of them with -inf.
    "deepseek-v4": (
        "eager",
        DeepseekV4Config(
            vocab_size=VOCABULARY, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8,
            num_attention_heads=4, q_lora_rank=16, o_lora_rank=16, o_groups=2, n_routed_experts=2,
            num_experts_per_tok=1, layer_types=["compressed_sparse_attention"], mlp_layer_types=["moe"],
            sliding_window=5, index_n_heads=2, index_head_dim=16, index_topk=2, partial_rotary_factor=1.0,
            pad_token_id=0, hc_mult=2,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_attention(case, padding):
    reference, config = SPARSE[case]
    torch.manual_seed(0)
    model = AutoModel.from_config(config, experts_implementation="eager").eval()
    valid = token_mask(padding)
    where = torch.ones(BATCH, LENGTH, dtype=torch.bool) if valid is None else valid.bool()
    states = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        for implementation in ("cupy_fa", reference):
            states.append(run(model, implementation, input_ids=tokens(), attention_mask=valid)[0][where])
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


def test_layers_that_get_only_the_last_queries():
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **GROUPED | dict(num_hidden_layers=4), head_dim=8, global_head_dim=8, sliding_window=64, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        last, exact, low = three_runs(model, "gemma4", lambda model: model(tokens(), logits_to_keep=3).logits)
    assert last.shape == (BATCH, 3, VOCABULARY)
    assert_matches_reference(last, exact, low, "float32", "logits")


@pytest.mark.parametrize(("k_heads", "v_heads"), [(2, 4), (4, 1)])
def test_keys_and_values_with_different_numbers_of_heads(k_heads, v_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, heads, LENGTH, 8, generator=generator) for heads in (4, k_heads, v_heads))
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=False)
    exact, _ = formula(None, q.double(), k.double(), v.double(), None)
    low = furthest(exact, *in_several_orders(lambda: formula(None, q, k, v, None)[0]))
    assert_matches_reference(out, exact, low, "float32", "out")


@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "lazy"])
def test_indices_of_keys(mask):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, BATCH, 4, LENGTH, 8, generator=generator)
    indices = torch.rand(BATCH, LENGTH, LENGTH, generator=generator).topk(5).indices.int()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH)
    given = {
        "none": None,
        "boolean": causal,
        "additive": torch.where(causal, 0.0, -torch.inf),
        "lazy": adapter.attention_mask(**mask_arguments(attention_mask=token_mask("left").bool())),
    }[mask]
    seen = (indices[..., None] == torch.arange(LENGTH)).any(2)[:, None]
    seen = seen & (torch.where(given, True, False) if mask == "lazy" else causal)
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, given, indices=indices)
    exact, _ = formula(None, q.double(), k.double(), v.double(), seen)
    low = furthest(exact, *in_several_orders(lambda: formula(None, q, k, v, seen)[0]))
    assert_matches_reference(out, exact, low, "float32", "out")


WORDS = {
    "output_attentions on the pages": dict(output_attentions=True, cache=object()),
    "sinks": dict(sinks=torch.zeros(1, 2, 3, 1)),
    "unheard_of, other": dict(unheard_of=0.5, unused=None, other=1),
    "block_indices": dict(block_indices=torch.zeros(1, 1, 3, 1)),
    "position_ids that restart": dict(cu_seq_lens_q=torch.tensor([0, 1, 3]), cu_seq_lens_k=torch.tensor([0, 1, 3])),
}


@pytest.mark.parametrize("case", WORDS)
def test_arguments_that_would_change_the_result_are_refused(case):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(cupy_flash.UnsupportedError, match=case):
        adapter.attention_forward(torch.nn.Module(), q, q, q, None, **WORDS[case])


def eager_with_sinks(module, query, key, value, attention_mask, scaling, sinks=None, **kwargs):
    raise AssertionError("the attention of the model's own")


@pytest.mark.parametrize(("word", "is_served"), [("sinks", False), ("block_indices", False), ("image_sizes", True)])
def test_an_argument_is_refused_if_the_models_own_attention_takes_it(word, is_served, monkeypatch):
    # A model passes on all arguments of its caller, also those meant for other parts of the model.
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(eager_attention_forward=eager_with_sinks))
    attention = type("Attention", (torch.nn.Module,), {"__module__": "made_up"})()
    q = torch.zeros(1, 2, 3, 8)
    refused = pytest.raises(cupy_flash.UnsupportedError, match=f"Attention passes {word}")
    with contextlib.nullcontext() if is_served else refused:
        adapter.attention_forward(attention, q, q, q, None, is_causal=True, **{word: torch.zeros(1, 2, 3, 1)})


def test_arguments_without_effect_are_accepted():
    q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    sequences = dict(cu_seq_lens_q=torch.tensor([0, 1, 3]), cu_seq_lens_k=torch.tensor([0, 1, 3]))
    words = dict(
        cache=None, output_attentions=False, sinks=None, sliding_window=2, position_ids=torch.tensor([[0, 0, 1]]),
        use_cache=True, num_items_in_batch=torch.tensor(3), deterministic=True, max_length_q=2, max_length_k=2,
    ) | sequences  # fmt: skip
    plain, _ = adapter.attention_forward(torch.nn.Module(), q, q, q, mask[None, None])
    taken, _ = adapter.attention_forward(torch.nn.Module(), q, q, q, mask[None, None], **words)
    assert torch.equal(plain, taken)
