"""Training memory: an estimate, a measurement, and a search for tensors that an autograd graph retains too long.

A transformer block saves m = alpha b s d + beta b h s^2 + gamma b s bytes for its backward: b sequences of s tokens,
width d, h query heads and k key/value heads of D = d / h dimensions, MLP width f. With 2-byte activations (fp16, bf16):

    saved tensor                                      elements    bytes  GPT-2 (f = 4 d)   Llama 2 7B (f = 2.6875 d)
    input of the first norm                           b s d           2          2                 2
    input of the projections to q, k, v               b s d           2          2                 2
    q                                                 b s h D         2          2                 2
    k and v                                           2 b s k D       2          4                 4
    out, the input of the output projection           b s h D         2          2                 2
    mask of the dropout after it                      b s d           1          1                 -
    input of the second norm                          b s d           2          2                 2
    input of the MLP                                  b s d           2          2                 2
    input of the activation function (not for relu)   b s f           2          8                 5.375
    its result and the gate's factor (gated MLP)      2 b s f         2          -                10.75
    input of the MLP's last projection                b s f           2          8                 5.375
    mask of the dropout after it                      b s d           1          1                 -
                                                                         alpha = 34        alpha = 37.5
    with standard attention only:
    probabilities                                     b h s^2         2          2                 2
    mask of their dropout                             b h s^2         1          1                 -
    probabilities after dropout                       b h s^2         2          2                 -
                                                                          beta = 5          beta = 2
    statistics of the two norms (rms norm: one each)  4 b s           4         16                 8
    lse, with flash attention only                    b s h           4         4 h               4 h
                                                                         gamma = 16 + 4 h  gamma = 8 + 4 h

Flash attention has beta = 0. fp32 activations take twice as many bytes; masks and statistics do not. alpha and beta are
those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", which omits gamma.
Assumptions: residual stream, norms and softmax in the activations' dtype; norms, dropout, activation functions and
rotary embeddings are one operator each; keys and values are not repeated for the query heads. `measure` counts what a
model actually saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .adapters.torch.retained_memory import Retained

GB = 10**9
ATTENTIONS = ("standard", "flash")
ACTIVATIONS = ("gelu", "relu", "swiglu")
ITEMSIZE = {"float32": 4, "mixed": 2}  # {precision: bytes of an activation}
# Kinds of tensors that a block saves with each checkpointing mode; the rest is recomputed, one block at a time.
KEPT = {
    "none": ("input", "channels", "statistics", "scores"),
    "selective": ("input", "channels", "statistics"),
    "full": ("input",),
}


def _not_whole(sizes: Mapping[str, object]) -> list[str]:
    """Return an error message for each size that is not an integer; a config.json may contain such sizes."""
    invalid = {name: size for name, size in sizes.items() if not isinstance(size, int) or isinstance(size, bool)}
    return [f"{name} must be a whole number, not {size!r}" for name, size in invalid.items()]


def _out_of_range(sizes: dict[str, int]) -> list[str]:
    """Return an error message for each size that is not positive or not below 2**63."""
    reasons = [f"{name} must be positive, not {size}" for name, size in sizes.items() if size < 1]
    return reasons + [f"{name} must be less than 2**63" for name, size in sizes.items() if size >= 2**63]


def _refuse(where: str, reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"{where}: {'; '.join(reasons)}")


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a decoder-only language model; the defaults are GPT-2's design.

    Raises ValueError with every reason.
    """

    layers: int  # L
    embed_dim: int  # d
    heads: int  # h
    vocab_size: int  # V
    context: int  # tokens per training sequence
    kv_heads: int = 0  # k; 0 for as many as heads
    head_dim: int = 0  # D; 0 for embed_dim // heads
    mlp_dim: int = 0  # f; 0 for 4 * embed_dim
    activation: str = "gelu"  # "gelu", "relu" or "swiglu", whose gate is a third matrix in the MLP
    layer_norm: bool = True  # False for RMS norm, which has one parameter vector and one statistic instead of two
    bias: bool = True  # every projection of a block has a bias
    learned_positions: bool = True  # False for rotary embeddings
    tied: bool = True  # head and embedding share weights
    dropout: bool = True  # on embeddings, attention probabilities and the outputs of attention and MLP
    counted: tuple[int, int] | None = None  # parameters per block and outside of blocks; None to compute both

    def __post_init__(self) -> None:
        names = ("layers", "embed_dim", "heads", "vocab_size", "context", "kv_heads", "head_dim", "mlp_dim")
        sizes = {name: getattr(self, name) for name in names}
        _refuse("Transformer", _not_whole(sizes))
        for name, value in {
            "kv_heads": self.heads,
            "head_dim": self.embed_dim // max(self.heads, 1),
            "mlp_dim": 4 * self.embed_dim,
        }.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        reasons = _out_of_range({name: getattr(self, name) for name in names})
        if not reasons and self.heads % self.kv_heads:
            reasons.append(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.activation not in ACTIVATIONS:
            reasons.append(f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}")
        _refuse("Transformer", reasons)

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        if self.counted is not None:
            return self.counted[0]
        d, f, q, kv = self.embed_dim, self.mlp_dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = d * (q + 2 * kv) + q * d + (3 if self.activation == "swiglu" else 2) * d * f
        biases = (q + 2 * kv) + d + f + d if self.bias else 0
        return matrices + biases + 2 * self._norm_parameters

    @property
    def end_parameters(self) -> int:
        """Number of parameters outside the blocks: embeddings, final norm, head."""
        if self.counted is not None:
            return self.counted[1]
        embedding = self.vocab_size * self.embed_dim
        positions = self.context * self.embed_dim if self.learned_positions else 0
        return embedding + positions + self._norm_parameters + (0 if self.tied else embedding)

    @property
    def parameters(self) -> int:
        """Number of parameters N of the model."""
        return self.layers * self.block_parameters + self.end_parameters

    @property
    def _norm_parameters(self) -> int:
        return (2 if self.layer_norm else 1) * self.embed_dim


_LLAMA: dict[str, Any] = dict(
    activation="swiglu", layer_norm=False, bias=False, learned_positions=False, tied=False, dropout=False
)

# Published dimensions.
PRESETS = {
    "gpt2": Transformer(12, 768, 12, 50257, 1024),
    "llama2-7b": Transformer(32, 4096, 32, 32000, 4096, mlp_dim=11008, **_LLAMA),
    "llama2-70b": Transformer(80, 8192, 64, 32000, 4096, kv_heads=8, mlp_dim=28672, **_LLAMA),
    "llama3-8b": Transformer(32, 4096, 32, 128256, 8192, kv_heads=8, mlp_dim=14336, **_LLAMA),
    "mt-530b": Transformer(105, 20480, 128, 51200, 2048),  # Megatron-Turing NLG
}


def load(name: str) -> Transformer:
    """Load a model by its name in PRESETS, or from a transformers config.json.

    Model types gpt2, llama and mistral are read without transformers. Another causal language model is built by
    transformers on torch's meta device, which takes no memory, and its parameters are counted; experts that a token
    does not pass through have parameters but no activations.

    Args:
        name: a name in PRESETS, or the path of a config.json or of the folder that holds it.

    Raises:
        ValueError: the config is not of such a model (the message names the file), or the name is unknown.
        OSError: the file cannot be read.
        ImportError: the model needs transformers.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    elif path.suffix != ".json":
        raise ValueError(f"{name!r} is neither a model folder, a config.json nor one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2(config)
        if kind in ("llama", "mistral"):
            return _llama(config)
        from .adapters import model_config

        return Transformer(**model_config.dimensions(config))
    except KeyError as missing:
        raise ValueError(f"{path} has no {missing}") from missing
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    except ImportError as error:
        raise ImportError(
            f"{path} describes a model of type {kind!r}, which needs transformers: python -m pip install "
            f'"cupy-flash[transformers]" ({error}); gpt2, llama and mistral do not'
        ) from error


def _gpt2(config: dict[str, Any]) -> Transformer:
    drops = (config.get(name, 0.1) > 0 for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"))
    return Transformer(
        config["n_layer"], config["n_embd"], config["n_head"], config["vocab_size"], config["n_positions"],
        mlp_dim=config.get("n_inner") or 0,
        activation="relu" if config.get("activation_function") == "relu" else "gelu",
        tied=config.get("tie_word_embeddings", True),
        dropout=any(drops),
    )  # fmt: skip


def _llama(config: dict[str, Any]) -> Transformer:
    return Transformer(
        config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"], config["vocab_size"],
        config["max_position_embeddings"],
        kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
        mlp_dim=config["intermediate_size"],
        **_LLAMA | {"tied": config.get("tie_word_embeddings", False)},
    )  # fmt: skip


@dataclass(frozen=True)
class Training:
    """Training configuration; raises ValueError with every reason.

    batch and seqlen are per group of tensor * ring GPUs; with data parallelism every such group has its own batch.
    """

    batch: int  # b
    seqlen: int  # s
    attention: str = "flash"  # or "standard", which stores the probabilities
    checkpoint: str = "none"  # "selective": recompute the probabilities; "full": recompute the whole block
    precision: str = "mixed"  # bf16 activations and working weights, fp32 master weights; or "float32"
    fsdp: int = 1  # GPUs that shard parameters, gradients and optimizer (ZeRO 3)
    tensor: int = 1  # GPUs of tensor parallelism
    sequence_parallel: bool = True  # shard the activations that tensor parallelism alone replicates
    ring: int = 1  # GPUs that shard a sequence, by ring attention

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("batch", "seqlen", "fsdp", "tensor", "ring")}
        _refuse("Training", _not_whole(sizes))
        reasons = _out_of_range(sizes)
        for name, known in (("attention", ATTENTIONS), ("checkpoint", tuple(KEPT)), ("precision", tuple(ITEMSIZE))):
            if getattr(self, name) not in known:
                reasons.append(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.ring > 1 and self.attention == "standard":
            reasons.append(f"ring {self.ring} needs flash attention: standard attention needs all keys on one GPU")
        _refuse("Training", reasons)


class Saved(NamedTuple):
    """One GPU's part of a tensor that a block saves for its backward."""

    name: str
    kind: str  # "input" (of the block) or "channels" for alpha, "scores" for beta, "statistics" for gamma
    elements: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.itemsize


def saved_by_block(model: Transformer, training: Training) -> list[Saved]:
    """Return the tensors that a block saves on one GPU without checkpointing: the table in this module's docstring.

    Tensor parallelism shards the tensors between the projections, sequence_parallel also all other tensors; ring
    attention shards the sequence.

    Args:
        model: the dimensions of the model.
        training: batch, lengths and parallelism.

    Raises:
        ValueError: `training.tensor` does not divide the heads or mlp_dim.
    """
    _check_shares(model, training)
    size, t = ITEMSIZE[training.precision], training.tensor
    tokens, rows = _tokens(training)
    heads, kv_heads, f = model.heads // t, max(1, model.kv_heads // t), model.mlp_dim // t
    width, q, kv = rows * model.embed_dim, tokens * heads * model.head_dim, tokens * kv_heads * model.head_dim
    statistics = rows * (2 if model.layer_norm else 1)
    mask = [Saved("mask of dropout", "channels", width, 1)] if model.dropout else []

    if training.attention == "flash":
        scores = [Saved("lse", "statistics", tokens * heads, 4)]
    else:
        scores = [Saved("probabilities", "scores", tokens * heads * training.seqlen, size)]
        if model.dropout:
            scores.append(Saved("mask of their dropout", "scores", scores[0].elements, 1))
            scores.append(Saved("probabilities after dropout", "scores", scores[0].elements, size))
    activation = {
        "gelu": [Saved("input of gelu", "channels", tokens * f, size)],
        "relu": [],  # the derivative of relu follows from its result
        "swiglu": [
            Saved("input of silu", "channels", tokens * f, size),
            Saved("silu", "channels", tokens * f, size),
            Saved("factor of silu", "channels", tokens * f, size),
        ],
    }[model.activation]
    return [
        Saved("input of the first norm", "input", width, size),
        Saved("statistics of the first norm", "statistics", statistics, 4),
        Saved("input of q, k, v", "channels", width, size),
        Saved("q", "channels", q, size),
        Saved("k and v", "channels", 2 * kv, size),
        *scores,
        Saved("out", "channels", q, size),
        *mask,
        Saved("input of the second norm", "channels", width, size),
        Saved("statistics of the second norm", "statistics", statistics, 4),
        Saved("input of the MLP", "channels", width, size),
        *activation,
        Saved("input of the last projection", "channels", tokens * f, size),
        *mask,
    ]


class Coefficients(NamedTuple):
    """Coefficients of bytes = alpha b s d + beta b h s^2 + gamma b s on one GPU, where b, s, d and h are unsharded."""

    alpha: float
    beta: float
    gamma: float


def coefficients(model: Transformer, training: Training) -> Coefficients:
    """Return the coefficients of the memory that one block saves with `training.checkpoint`.

    Args:
        model: the dimensions of the model.
        training: batch, lengths and parallelism.

    >>> coefficients(PRESETS["gpt2"], Training(1, 1024, attention="standard"))
    Coefficients(alpha=34.0, beta=5.0, gamma=16.0)
    """
    saved = dict.fromkeys(KEPT["none"], 0)
    for tensor in saved_by_block(model, training):
        saved[tensor.kind] += tensor.bytes if tensor.kind in KEPT[training.checkpoint] else 0
    b, s, d, h = training.batch, training.seqlen, model.embed_dim, model.heads
    return Coefficients(
        (saved["input"] + saved["channels"]) / (b * s * d),
        saved["scores"] / (b * h * s**2),
        saved["statistics"] / (b * s),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, without operators' temporary memory and allocator overhead."""

    parameters: int  # parameters in fp32
    working: int  # weight copies for matmuls; with FSDP also unsharded gradients before the reduce-scatter
    gradients: int
    optimizer: int
    blocks: int  # saved by all blocks
    recomputed: int  # recomputed by checkpointing, one block at a time
    ends: int  # saved by the embedding and the language-model head

    @property
    def states(self) -> int:
        """Bytes that do not depend on batch and seqlen."""
        return self.parameters + self.working + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """Bytes that depend on batch and seqlen."""
        return self.blocks + self.recomputed + self.ends

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.states + self.activations


# Labels of the parts of a Memory.
PARTS = {
    "parameters": "parameters",
    "working": "working copies of parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "blocks": "saved by the blocks",
    "recomputed": "one block, recomputed",
    "ends": "saved by embedding and head",
}


def estimate(model: Transformer, training: Training) -> Memory:
    """Estimate the memory of one GPU at the start of the backward.

    States, for N parameters with Adam: 4 N bytes of parameters, 4 N of gradients and 8 N of optimizer, in fp32. Mixed
    precision adds a bf16 copy, 2 N. Tensor parallelism divides N. FSDP shards everything except the copy, which then
    consists of what is gathered at a time: the embedding and the head, the running block and the next one; plus the
    gradients of the embedding, the head and one block.

    Ends: the token ids (8 bytes each) and the dropout mask of the embedding; then the final norm, the input of the
    head, the targets, and the log-softmax over the vocabulary, in fp32.

    The recomputed block and the head are not in memory at the same time. Both are counted, in place of the gradients of
    activations, which are not.

    Args:
        model: the dimensions of the model.
        training: batch, lengths and parallelism.

    Raises:
        ValueError: `training.tensor` does not divide heads and mlp_dim.
    """
    saved = saved_by_block(model, training)
    block = sum(tensor.bytes for tensor in saved)
    checkpointed = sum(tensor.bytes for tensor in saved if tensor.kind in KEPT[training.checkpoint])

    size, t = ITEMSIZE[training.precision], training.tensor
    tokens, rows = _tokens(training)
    width = rows * model.embed_dim
    embedding = 8 * tokens + (width if model.dropout else 0)
    head = 2 * size * width + 4 * rows * (2 if model.layer_norm else 1) + 8 * tokens
    logits = 4 * tokens * -(-model.vocab_size // t)

    shard = -(-model.parameters // (t * training.fsdp))
    if training.fsdp > 1:
        working = size * (2 * model.end_parameters + 3 * model.block_parameters) // t
    else:
        working = 2 * shard if training.precision == "mixed" else 0
    return Memory(
        parameters=4 * shard,
        working=working,
        gradients=4 * shard,
        optimizer=8 * shard,
        blocks=model.layers * checkpointed,
        recomputed=block - checkpointed,
        ends=embedding + head + logits,
    )


def largest_batch(model: Transformer, training: Training, memory: float) -> int:
    """Return the largest batch whose `estimate` fits, or 0.

    Args:
        model: the dimensions of the model.
        training: its `batch` is ignored.
        memory: bytes of the GPU.
    """
    return _largest(lambda batch: estimate(model, replace(training, batch=batch)).total, memory)


def longest_sequence(model: Transformer, training: Training, memory: float) -> int:
    """Return the longest sequence whose `estimate` fits, or 0.

    Args:
        model: the dimensions of the model.
        training: its `seqlen` is ignored.
        memory: bytes of the GPU.
    """
    return _largest(lambda seqlen: estimate(model, replace(training, seqlen=seqlen)).total, memory)


def _largest(total: Callable[[int], int], memory: float) -> int:
    """Return the largest n >= 1 with total(n) <= memory, or 0, for a total that grows with n."""
    if not math.isfinite(memory):
        raise ValueError(f"memory must be a number of bytes, not {memory}")
    below, above = 0, 1
    while total(above) <= memory:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if total(middle) <= memory else (below, middle)
    return below


def _tokens(training: Training) -> tuple[int, int]:
    """Return (tokens, rows) on one GPU; rows are the tokens of operations that sequence_parallel shards."""
    tokens = training.batch * -(-training.seqlen // training.ring)
    return tokens, -(-tokens // training.tensor) if training.sequence_parallel else tokens


def _check_shares(model: Transformer, training: Training) -> None:
    t, reasons = training.tensor, []
    for name in ("heads", "mlp_dim"):
        if getattr(model, name) % t:
            reasons.append(f"{name} {getattr(model, name)} must be a multiple of tensor {t}")
    if model.kv_heads % t and t % model.kv_heads:
        reasons.append(f"kv_heads {model.kv_heads} must be a multiple or a divisor of tensor {t}")
    _refuse("estimate", reasons)


def measure(
    model: torch.nn.Module, batch: torch.Tensor | tuple[object, ...] | list[object] | dict[str, object]
) -> dict[str, int]:
    """Run the forward of a torch module once, and return the bytes that it saves for its backward, by submodule.

    Args:
        model: a torch.nn.Module.
        batch: its arguments: a tensor, a tuple or list of arguments, or a dict of keyword arguments.

    Returns:
        {name of a submodule ("" is the model itself): bytes of the tensors that it was the first to save}. Tensors that
        share memory count once. Parameters and buffers do not count; the input does if it is saved. Inside a
        checkpoint, only what checkpointing saves counts. Works on any device, also meta.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    from .adapters.torch import retained_memory

    return retained_memory.measure(model, batch)


def find_retained(loss: torch.Tensor) -> list[Retained]:
    """Return the tensors that the autograd graph of a torch tensor still holds, each with its module.

    Call it after the backward, when the graph should hold none: before it, or with retain_graph=True, the tensors saved
    by autograd are still held and listed. A graph exists as long as something refers to it: the loss, an output, a
    hook. Autograd frees the tensors that a node saved once the node has run, but not a tensor that a
    torch.autograd.Function stores on ctx or in an object on ctx: every layer then keeps its activations, even with
    checkpointing.

    Args:
        loss: a tensor from which all nodes of the graph are reachable.

    Returns:
        Retained(module, path, shape, dtype, bytes) per tensor. `module` is the full name of the module whose parameters
        are nearest before the node; "" if there is none. `path` leads from the node to the tensor. Parameters, leaves,
        their gradients and `loss` itself are not listed.

    Raises:
        TypeError: loss is not a torch.Tensor.
    """
    from .adapters.torch import retained_memory

    return retained_memory.find_retained(loss)


def plot(model: Transformer, training: Training, path: Path, memory: float | None = None, title: str = "") -> None:
    """Plot the memory of one GPU over the sequence length, and its parts at `training.seqlen`.

    Args:
        model: the dimensions of the model.
        training: batch, lengths and parallelism.
        path: a PNG or SVG file.
        memory: bytes of the GPU, drawn as a line.
        title: title of the figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    lengths_axes, parts_axes = figure.subplots(1, 2)
    attentions = ATTENTIONS if training.ring == 1 else ("flash",)
    setups = [
        replace(training, attention=attention, checkpoint=checkpoint)
        for attention in attentions
        for checkpoint in KEPT
        if (attention, checkpoint) != ("flash", "selective")  # flash attention stores no scores, so nothing changes
    ]
    names = [f"{setup.attention}, checkpoint {setup.checkpoint}" for setup in setups]

    lengths = sorted({max(1, int(training.seqlen * 2.0**power)) for power in range(-3, 4)})
    for setup, name in zip(setups, names, strict=True):
        totals = [estimate(model, replace(setup, seqlen=length)).total / GB for length in lengths]
        lengths_axes.plot(
            lengths, totals, marker="o", linestyle="--" if setup.attention == "standard" else "-", label=name
        )
    lengths_axes.axhline(estimate(model, training).states / GB, color="grey", label="states alone")
    lengths_axes.set(xlabel="sequence length s", ylabel="GB per GPU", xscale="log", yscale="log")
    lengths_axes.set_xticks(lengths, [str(length) for length in lengths])
    lengths_axes.minorticks_off()

    estimates = [estimate(model, setup) for setup in setups]
    left = [0.0] * len(estimates)
    for part, label in PARTS.items():
        sizes = [getattr(estimated, part) / GB for estimated in estimates]
        parts_axes.barh(names, sizes, left=left, label=label)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    parts_axes.invert_yaxis()
    parts_axes.set(xlabel=f"GB per GPU at s = {training.seqlen}")
    if memory is not None:
        lengths_axes.axhline(memory / GB, color="black", linestyle=":", label=f"{memory / GB:g} GB")
        parts_axes.axvline(memory / GB, color="black", linestyle=":")
    for axes in (lengths_axes, parts_axes):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
