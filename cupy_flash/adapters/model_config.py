"""Dimensions of a language model, counted on a model that transformers builds on the meta device from its config."""

from __future__ import annotations

from typing import Any

WIDTHS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")  # fields of a config with the width of the MLP
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CONTEXT = 2048  # tokens, for a config without any field of CONTEXTS


def dimensions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of memory.Transformer for the contents of a config.json.

    The experts that a token passes through count as one MLP. Raises ImportError without torch or transformers,
    ValueError if transformers cannot build a causal language model, KeyError for a missing size.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"transformers {__version__} knows no model of type {kind!r}")
    try:
        sizes = CONFIG_MAPPING[kind].from_dict(config).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(sizes)
    except Exception as error:  # a model's code may raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"transformers {__version__} builds no causal language model of type {kind!r}: "
            f"{type(error).__name__}: {reason[:200]}"
        ) from error

    def size(*names: str) -> Any:
        """Return the value of the first of these fields that the config has; None without one."""
        return next((value for name in names if (value := getattr(sizes, name, None))), None)

    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if size(name) is None:
            raise KeyError(name)
    layers = size("num_hidden_layers")
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == layers]
    if not lists:
        raise ValueError(f"a model of type {kind!r} has no list of {layers} blocks")
    blocks = max(lists, key=_parameters)
    block = _parameters(blocks) // layers

    width = size(*WIDTHS) or 4 * size("hidden_size")
    experts, expert = 1, width
    if size("num_experts_per_tok") and size(*EXPERTS):
        experts, expert = size(*EXPERTS), size("moe_intermediate_size") or width
        shared = size("shared_expert_intermediate_size") or (size("n_shared_experts") or 0) * expert
        width = size("num_experts_per_tok") * expert + shared
    matrices = _mlp_elements(blocks[-1], expert) / (size("hidden_size") * expert * experts)
    multi_query = size("multi_query") and not size("new_decoder_architecture")  # Falcon, StarCoder
    plain = "relu" if size("hidden_act", "activation_function") == "relu" else "gelu"
    drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    return dict(
        layers=layers,
        embed_dim=size("hidden_size"),
        heads=size("num_attention_heads"),
        vocab_size=size("vocab_size"),
        context=size(*CONTEXTS) or CONTEXT,
        kv_heads=1 if multi_query else size("num_key_value_heads", "num_kv_heads") or 0,
        head_dim=size("qk_head_dim", "head_dim") or 0,
        mlp_dim=width,
        activation="swiglu" if matrices > 2.5 else plain,
        layer_norm=any(isinstance(module, torch.nn.LayerNorm) for module in blocks.modules()),
        dropout=drops or bool(size("attention_dropout")),
        counted=(block, _parameters(model) - layers * block),
    )


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _mlp_elements(block: Any, width: int) -> int:
    """Return the number of elements of the matrices of a block's MLP.

    They are the matrices outside attention with `width` columns or rows, or 2 * width for gate and up in one matrix.
    """
    return sum(
        parameter.numel()
        for name, parameter in block.named_parameters()
        if "att" not in name and parameter.dim() > 1 and {width, 2 * width} & set(parameter.shape)
    )
