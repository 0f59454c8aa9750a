"""attn_implementation="cupy_fa" against sdpa or eager in every model of transformers that can be built tiny.

    PYTHONPATH=. python tests/adapters/sweep_transformers.py                    every model: half an hour on two cores
    PYTHONPATH=. python tests/adapters/sweep_transformers.py bert llama falcon  only these model types
    PYTHONPATH=. python tests/adapters/sweep_transformers.py --all --jobs 8     also lists the models that agree

Each model type is tested with its base model, or with its first model with a head if it has no base model; a model that
can be encoder or decoder is tested as both. Configurations are the defaults with tiny sizes; weights are random and
make attention non-uniform; the dtype is float64, or float32 if a model does not run in float64. cupy_fa and the
reference (sdpa, or eager if a model lacks sdpa) get the same weights and inputs, without padding and, if a model takes
an attention mask, with padding on the right and on the left. Outputs are compared only at tokens. Nothing is
downloaded.

    agree                  the outputs equal those of the reference
    agree, no attention    the outputs are equal, but the model never called cupy_fa
    refused                cupy_fa reports that it does not support the model
    no verdict             the reference does not run with the tiny configuration or the inputs
    disagree               the outputs differ
    error                  the reference runs, and cupy_fa raises an error that is not a refusal

The exit status is 1 if a model disagrees or an error is raised, else 0.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import inspect
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

import cupy_flash
from cupy_flash.adapters import transformers as adapter

BATCH, LENGTH, DECODER_LENGTH = 2, 12, 9
VOCABULARY = 96
LARGEST = 60_000_000  # parameters; larger models are not built
# Relative to the largest output. Models of any dtype compute parts in float32, and float32 models amplify rounding.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-2}
FAILURES = ("disagree", "error")

# Values of a tiny configuration, by parameter name.
TINY: dict[str, Any] = {}
for value, names in {
    VOCABULARY: "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size text_vocab_size input_vocab_size",
    32: """hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size projection_dim encoder_hidden_size emb_dim
        decoder_hidden_size word_embed_proj_dim rnn_hidden_dim image_size out_hidden_size conformer_hidden_size
        q_lora_rank attention_hidden_size cross_attention_hidden_size vision_output_dim lm_hidden_size
        """,
    16: """moe_intermediate_size shared_expert_intermediate_size kv_lora_rank num_mel_bins hidden_size_per_layer_input
        index_head_dim mamba_d_state ssm_state_size state_size expert_dim linear_key_head_dim linear_value_head_dim""",
    48: """intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim ffn_hidden_size
        feed_forward_proj_dim inner_dim intermediate_size_mlp decoder_intermediate_size""",
    2: """num_layers n_layer n_layers num_decoder_layers encoder_layers decoder_layers depth num_encoder_layers
        num_key_value_heads num_kv_heads n_kv_heads decoder_num_hidden_layers num_experts_per_tok num_kv_shared_layers
        encoder_num_hidden_layers num_global_layers num_shared_layers top_k moe_topk mamba_num_groups
        index_n_heads moe_top_k moe_k""",
    4: """num_hidden_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads num_experts patch_size
        decoder_attention_heads n_routed_experts num_local_experts index_topk conformer_num_attention_heads
        encoder_num_attention_heads decoder_num_attention_heads num_linear_heads linear_num_key_heads
        linear_num_value_heads moe_num_experts index_block_size index_topk_blocks""",
    8: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim kv_channels attention_head_dim
        d_head rotary_dim mamba_n_heads mamba_d_head""",
    5: "sliding_window attention_window local_attention window_size attention_chunk_size",
    1: """bos_token_id n_group topk_group n_shared_experts num_shared_experts decoder_start_token_id
        first_k_dense_replace num_nextn_predict_layers""",
    0: "pad_token_id",
    3: "image_token_id image_token_index image_token boi_token_id vision_start_token_id",
    6: "video_token_id video_token_index audio_token_id audio_token_index eoi_token_id vision_end_token_id",
    64: "max_position_embeddings n_positions max_source_positions n_ctx max_target_positions max_seq_len block_size",
}.items():  # fmt: skip
    TINY |= dict.fromkeys(names.split(), value)
TINY |= dict(eos_token_id=7, sep_token_id=7, dropout=0.0, attention_dropout=0.0)
# If a configuration with all tiny values is inconsistent, one with fewer may work.
LAYERS = {name: value for name, value in TINY.items() if "layer" in name or name in ("depth", "vocab_size")}
PATIENT = {name: value for name, value in TINY.items() if not name.endswith(("_head_dim", "head_dim", "patch_size"))}
NO_GROUPS = {name: value for name, value in TINY.items() if "kv" not in name and "key_value" not in name}


class Verdict(NamedTuple):
    model: str
    status: str
    detail: str = ""


class Expired(BaseException):
    """A model took too long. It is no Exception, because a model or the sweep would catch that."""


class Unsuited(Exception):
    """No tiny configuration or no inputs were found with which the model runs."""


def attribute(config: Any, name: str) -> Any:
    """Return an attribute of a configuration; None if it has none, or has one per layer instead."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def tiny_config(config_class: type, values: dict[str, Any]) -> Any:
    default = config_class()
    changes = {}
    parameters = set(inspect.signature(config_class.__init__).parameters) | set(vars(default))
    for name in parameters & set(values):
        old = attribute(default, name)
        is_number = isinstance(old, (int, float)) and not isinstance(old, bool)
        if is_number or (old is None and name.endswith(("token_id", "vocab_size", "experts", "experts_per_tok"))):
            changes[name] = values[name] if not is_number else type(old)(values[name])
    layers = attribute(default, "num_hidden_layers")
    for name in parameters:  # a list with an entry per layer must keep every kind of layer
        old = attribute(default, name)
        if isinstance(old, list) and "num_hidden_layers" in changes and len(old) == layers:
            kinds = [kind for at, kind in enumerate(old) if kind not in old[:at]]
            changes[name] = (kinds * changes["num_hidden_layers"])[: changes["num_hidden_layers"]]
    rope = attribute(default, "rope_parameters")
    if "head_dim" in values and isinstance(rope, dict) and "mrope_section" in rope:
        half = int(values["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        changes["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    for name in getattr(default, "sub_configs", {}):
        part = attribute(default, name)
        if part is not None:
            changes[name] = tiny_config(type(part), values)
    try:
        return config_class(**changes)
    except TypeError:  # some classes accept only dictionaries for their parts
        return config_class(
            **{name: part.to_dict() if isinstance(part, transformers.PreTrainedConfig) else part
               for name, part in changes.items()}
        )  # fmt: skip


def build(model_class: type, config: Any, implementation: str) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return model_class(config).eval()


def count_parameters(model_class: type, config: Any, implementation: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(model_class, config, implementation).parameters())


def perturb(model: Any) -> None:
    """Add noise to the weights, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.1)


def first(config: Any, *names: str) -> Any:
    """Return the first of these attributes that a configuration or one of its parts has."""
    parts = [config] + [attribute(config, name) for name in getattr(config, "sub_configs", {})]
    for name in names:
        for part in parts:
            value = attribute(part, name)
            if value is not None:
                return value
    return None


def inputs_of(model: Any, has_image: bool = False, is_time_last: bool = False) -> dict[str, Any]:
    """Return inputs without padding, by the name of forward's parameter."""
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    required = {name for name, one in parameters.items() if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    generator = torch.Generator().manual_seed(2)

    def tokens(length: int) -> Any:
        top = first(config, "vocab_size") or VOCABULARY
        return torch.randint(8, min(top, VOCABULARY), (BATCH, length), generator=generator)

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=model.dtype)

    def pixels() -> Any:
        size = first(config, "image_size", "img_size") or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = first(config, "num_channels", "in_channels", "in_chans") or 3
        frames = first(config, "num_frames", "frames_per_clip", "num_image_with_embedding")
        if model.main_input_name in ("pixel_values_videos", "video_values") or (frames and frames > 1):
            return noise(BATCH, int(frames or 4), channels, height, width)
        return noise(BATCH, channels, height, width)

    def features() -> Any:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
        mels = first(config, *names) or 80
        frames = 2 * (first(config, "max_source_positions") or 32)
        return noise(BATCH, mels, frames) if is_time_last else noise(BATCH, frames, mels)

    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in required), None)
    if grid is not None:
        sides = torch.tensor([[1, 4, 4], [1, 4, 8]])
        patch, time = config.patch_size, getattr(config, "temporal_patch_size", 1)
        name = next(iter(parameters))
        channels = first(config, "in_channels", "num_channels", "in_chans") or 3
        return {name: noise(int(sides.prod(-1).sum()), channels * time * patch * patch), grid: sides}
    given: dict[str, Any] = {}
    if "input_ids" in parameters:
        given["input_ids"] = tokens(LENGTH)
        if has_image or "pixel_values" in required:
            given["pixel_values"] = pixels()
        if "bbox" in parameters:
            given["bbox"] = torch.zeros(BATCH, LENGTH, 8 if config.model_type == "bros" else 4, dtype=torch.long)
    elif "pixel_values" in parameters:
        given["pixel_values"] = pixels()
    elif "pixel_values_videos" in parameters:
        given["pixel_values_videos"] = pixels()
    elif "input_values" in parameters:
        given["input_values"] = noise(BATCH, 4000)
    elif "input_features" in parameters:
        given["input_features"] = features()
    elif "inputs_embeds" in parameters:
        given["inputs_embeds"] = noise(BATCH, LENGTH, first(config, "hidden_size", "d_model"))
    elif "hidden_states" in parameters:
        given["hidden_states"] = noise(BATCH, LENGTH, first(config, "hidden_size", "d_model"))
    if "decoder_input_ids" in parameters:
        given["decoder_input_ids"] = tokens(DECODER_LENGTH)
    for name in required - set(given):
        if name.endswith("input_ids"):
            given[name] = tokens(LENGTH)
        elif name.endswith("attention_mask"):
            given[name] = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if not given:
        raise Unsuited(f"no inputs for {sorted(parameters)[:6]}")
    if "use_cache" in parameters:
        given["use_cache"] = False
    return given


def paddings(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return int64 masks (BATCH, LENGTH) by name, 1 = token; the second row is shorter."""
    masks: dict[str, Any] = {"none": None}
    if "input_ids" in given and "attention_mask" in inspect.signature(model.forward).parameters:
        places, lengths = torch.arange(LENGTH), torch.tensor([[LENGTH], [7]])
        masks |= {"right": (places < lengths).long(), "left": (places >= LENGTH - lengths).long()}
    return masks


def tensors(output: Any, name: str = "") -> dict[str, Any]:
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, dict):
        pairs = list(output.items())
    elif isinstance(output, (tuple, list)):
        pairs = list(enumerate(output))
    else:
        return {}
    return {key: value for label, part in pairs for key, value in tensors(part, f"{name}.{label}").items()}


def outputs_of(model: Any, given: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Return floating-point outputs; with a mask only those with a row per token, and only the rows of tokens."""
    torch.manual_seed(3)
    arguments = copy.deepcopy(given) | ({} if mask is None else {"attention_mask": mask.clone()})
    with torch.no_grad():
        results = tensors(dict(model(**arguments, return_dict=True)))
    if mask is None:
        return results
    kept = {}
    for name, result in results.items():
        if result.dim() > 1 and result.shape[:2] == (BATCH, LENGTH):
            kept[name] = result[mask.bool()]
        elif result.dim() > 1 and result.shape[1] == DECODER_LENGTH:
            kept[name] = result
    return kept


def largest_difference(actual: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference, relative to the largest number of the output, and the name of that output."""
    if actual.keys() != expected.keys():
        return float("inf"), f"outputs {sorted(actual.keys() ^ expected.keys())}"
    worst = (0.0, "")
    for name in expected:
        a, b = actual[name].double(), expected[name].double()
        if a.shape != b.shape:
            return float("inf"), name
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            return float("inf"), name
        if finite.any():
            difference = (a - b)[finite].abs().max() / b[finite].abs().max().clamp_min(1e-30)
            worst = max(worst, (difference.item(), name))
    return worst


def refused(name: str, model_class: type, config_class: type, refusal: Exception) -> Verdict:
    """Return the verdict on a refused class: building its model must raise the refusal too, before it has weights."""
    try:
        with torch.device("meta"):
            build(model_class, config_class(), adapter.NAME)
    except cupy_flash.UnsupportedError as error:
        return Verdict(name, "refused", str(error))
    return Verdict(name, "error", f"is built although {refusal}")


# The additive masks of these models are float32 even for float64 queries. torch's sdpa on a CPU then returns wrong
# numbers.
MASKS_IN_FLOAT32 = {"EomtForUniversalSegmentation"}


def references(model_class: type) -> list[str]:
    is_sdpa_first = model_class._supports_sdpa and model_class.__name__ not in MASKS_IN_FLOAT32
    return ["sdpa", "eager"] if is_sdpa_first else ["eager", "sdpa"]


def given_to(model: Any) -> dict[str, Any]:
    """Return inputs with which the model runs.

    Candidates are tried in order: text alone, then text and an image; features with times last come first.
    """
    parameters = set(inspect.signature(model.forward).parameters)
    variants: list[dict[str, bool]] = [{}]
    variants += [{"has_image": True}] if {"input_ids", "pixel_values"} <= parameters else []
    variants += [{"is_time_last": True}] if "input_features" in parameters else []
    for variant in variants:
        try:
            given = inputs_of(model, **variant)
            outputs_of(model, given, None)
            return given
        except Exception:
            if variant is variants[-1]:
                raise
    raise AssertionError


def reference_of(model_class: type, config_class: type, changes: dict[str, Any]) -> tuple[Any, Any, Any, str]:
    """Return (model, config, inputs, implementation) of the first tiny configuration that runs; raises Unsuited if none
    does.
    """
    reasons = []
    for values in (TINY, NO_GROUPS, PATIENT, LAYERS):
        for implementation, dtype in itertools.product(references(model_class), (torch.float64, torch.float32)):
            try:
                config = tiny_config(config_class, values)
                for name, value in changes.items():
                    setattr(config, name, value)
                count = count_parameters(model_class, config, implementation)
                if count > LARGEST:
                    raise Unsuited(f"{count / 1e6:.0f} million parameters")
                model = build(model_class, config, implementation).to(dtype)
                perturb(model)
                return model, config, given_to(model), implementation
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    raise Unsuited("; ".join(dict.fromkeys(reasons)))


def examine(model_class: type, config_class: type, changes: dict[str, Any]) -> Verdict:
    name = model_class.__name__ + ("" if not changes else " as a decoder")
    try:
        adapter.check_model(model_class)
    except cupy_flash.UnsupportedError as refusal:
        return refused(name, model_class, config_class, refusal)
    try:
        reference, config, given, implementation = reference_of(model_class, config_class, changes)
    except Unsuited as unsuited:
        return Verdict(name, "no verdict", str(unsuited))
    try:
        model = build(model_class, config, adapter.NAME).to(reference.dtype)
    except cupy_flash.UnsupportedError as error:  # a part of the model is refused
        return Verdict(name, "refused", str(error))
    model.load_state_dict(reference.state_dict())
    calls = collections.Counter()
    original = transformers.AttentionInterface._global_mapping[adapter.NAME]

    def counted(*arguments: Any, **words: Any) -> Any:
        calls["attention"] += 1
        for word, value in words.items():
            if value is not None:
                calls[word] += 1
        return original(*arguments, **words)

    transformers.AttentionInterface.register(adapter.NAME, counted)
    compared, worst = [], (0.0, "")
    for padding, mask in paddings(reference, given).items():
        try:
            expected = outputs_of(reference, given, mask)
        except Exception:
            continue  # the model takes no such mask
        if not expected:
            continue
        if not all(one.isfinite().all() for one in expected.values()) and padding != "none":
            continue
        try:
            actual = outputs_of(model, given, mask)
        except cupy_flash.UnsupportedError as error:
            return Verdict(name, "refused", f"{padding}: {error}")
        difference, output = largest_difference(actual, expected)
        compared.append(padding)
        worst = max(worst, (difference, f"padding {padding}, {output}"))
    words = " ".join(sorted(word for word in calls if word != "attention"))
    detail = f"{implementation}, padding {'/'.join(compared)}, {calls['attention']} calls, {worst[0]:.1e} [{words}]"
    if not compared:
        return Verdict(name, "no verdict", "no output to compare")
    if worst[0] > TOLERANCES[reference.dtype]:
        return Verdict(name, "disagree", f"{implementation}, {worst[0]:.1e} at {worst[1]}")
    return Verdict(name, "agree" if calls["attention"] else "agree, no attention", detail)


def cases(chosen: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Yield (model_type, name of the model class, changes of the configuration)."""
    mappings = {name: getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")}
    mappings.pop("CONFIG_MAPPING_NAMES")
    bases = mappings.pop("MODEL_MAPPING_NAMES")
    decoders = mappings["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]
    selected: dict[tuple[str, str], dict[str, Any]] = {}
    types = sorted({*bases, *(kind for mapping in mappings.values() for kind in mapping)})
    for kind in types:
        if chosen and kind not in chosen:
            continue
        heads = [mapping[kind] for mapping in mappings.values() if kind in mapping]
        classes = bases.get(kind) or heads[0]
        for name in (classes,) if isinstance(classes, str) else classes:
            selected[kind, name] = {}
        if isinstance(decoders.get(kind), str) and hasattr(transformers.CONFIG_MAPPING[kind], "is_decoder"):
            selected.setdefault((kind, decoders[kind]), {"is_decoder": True})
    return [(kind, name, changes) for (kind, name), changes in selected.items()]


def verdict_of(case: tuple[str, str, dict[str, Any]], timeout: int) -> Verdict:
    kind, name, changes = case

    def expire(*_: Any) -> None:
        raise Expired(f"{timeout} seconds")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(timeout)
    try:
        model_class = getattr(transformers, name, None)
        if model_class is None or not issubclass(model_class, transformers.PreTrainedModel):
            return Verdict(name, "no verdict", "it is not exported, or needs a library that is not installed")
        config_class = transformers.CONFIG_MAPPING[kind]
        return examine(model_class, config_class, changes)
    except ImportError as error:  # the model needs a library that is missing
        return Verdict(name, "no verdict", " ".join(str(error).split()))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        return Verdict(name, "error", f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({place})")
    finally:
        signal.alarm(0)


def work(task: tuple[tuple[str, str, dict[str, Any]], int]) -> Verdict:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        try:
            return verdict_of(*task)
        except Expired as expired:
            return Verdict(task[0][1], "no verdict", str(expired))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; every one without")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one model")
    parser.add_argument("--all", action="store_true", help="name the models that agree too")
    arguments = parser.parse_args()

    adapter.register()
    tasks = [(case, arguments.timeout) for case in cases(arguments.types)]
    counts: collections.Counter[str] = collections.Counter()
    # Each model gets a process of its own, so that models do not affect each other.
    with multiprocessing.get_context("fork").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for verdict in pool.imap_unordered(work, tasks):
            counts[verdict.status] += 1
            if arguments.all or not verdict.status.startswith("agree"):
                print(f"{verdict.status:20} {verdict.model:44} {verdict.detail}", flush=True)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"\ntransformers {transformers.__version__}: {summary}")
    return any(counts[status] for status in FAILURES)


if __name__ == "__main__":
    sys.exit(main())
