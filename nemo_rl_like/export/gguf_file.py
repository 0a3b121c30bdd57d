"""One GGUF file of a Hugging Face folder: the families llama, qwen2 and qwen3, with byte-level BPE tokenizers, one tensor in memory at a time.

Source: GGUF version 3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ; names of tensors are the `gguf` package's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.export.problems import Problem
from nemo_rl_like.model.hf_config import ModelConfig
from nemo_rl_like.model.hf_io import SafetensorsReader
from nemo_rl_like.spec.export import GgufTarget

FILE = "model.gguf"
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
FAMILIES = tuple(_ARCHITECTURES)
_TYPES = {"float32": Type.F32, "float16": Type.F16, "bfloat16": Type.BF16}
_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
}
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {_GPT2: "gpt-2", _LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
"""llama.cpp's name by the expression that cuts text into words."""


def write_gguf(hf: Path, folder: Path, target: GgufTarget) -> None:
    """Write `model.gguf` of the Hugging Face folder `hf`.

    Raises InputError for a family, rope scaling or tokenizer that this writer does not have.
    """
    config = _supported(hf)
    writer = gguf.GGUFWriter(str(folder / FILE), gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.family]])
    _add_shape(writer, config)
    writer.add_file_type(_FILE_TYPES[target.dtype])
    _add_tokenizer(writer, hf, config.vocab_size)
    with SafetensorsReader(hf) as reader:
        names = _names(reader, config)
        for name, theirs in names.items():
            shape, kind = reader.shape(name), _type_of(len(reader.shape(name)), target)
            item = np.dtype(np.float32 if kind == Type.F32 else np.float16)
            writer.add_tensor_info(theirs, shape, item, int(np.prod(shape)) * item.itemsize, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            writer.write_tensor_data(_array(_permuted(name, reader.get(name), config), target))
    writer.close()


def gguf_problems(folder: Path) -> list[Problem]:
    """What llama.cpp would stumble on in the folder's only GGUF file: header, architecture, vocabulary, tensors."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        return [Problem(".", f"has {len(files)} .gguf files, must have one; export again")]
    try:
        reader = gguf.GGUFReader(str(files[0]))
    except (ValueError, IndexError, KeyError, OSError) as error:
        return [Problem(files[0].name, f"is no whole GGUF file: {error}; copy it again")]
    name, fields = files[0].name, reader.fields
    lost = [key for key in ("general.architecture", "tokenizer.ggml.tokens") if key not in fields]
    if lost:
        return [Problem(name, f"has no {lost[0]}; export again")]
    architecture = fields["general.architecture"].contents()
    blocks = fields.get(f"{architecture}.block_count")
    held = {tensor.name for tensor in reader.tensors}
    problems = []
    wanted = {"token_embd.weight", "output_norm.weight"}
    wanted |= {f"blk.{i}.attn_q.weight" for i in range(int(blocks.contents()) if blocks else 0)}
    if blocks is None or not wanted <= held:
        problems.append(
            Problem(name, f"lacks {min(wanted - held, default=f'{architecture}.block_count')}; export again")
        )
    rows = next((int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"), 0)
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    if rows != tokens:
        problems.append(Problem(name, f"has {rows} rows of embeddings and {tokens} tokens; export again"))
    return problems


def _supported(hf: Path) -> ModelConfig:
    raw = json.loads((hf / "config.json").read_bytes())
    if raw.get("use_sliding_window"):
        raise InputError(f"{hf}: layers with a window (`use_sliding_window`) have no GGUF writer; export it as hf")
    config = ModelConfig.from_hf_folder(hf)
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise InputError(f"{hf}: rope scaling of type {kind} has no GGUF writer; export it as hf")
    return config


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_name(f"{config.family} model")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, hf: Path, vocab: int) -> None:
    """Tokens by id, their kinds, merges, special tokens and the chat template."""
    raw = json.loads((hf / "tokenizer.json").read_bytes())
    said = json.loads((hf / "tokenizer_config.json").read_bytes())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(raw, hf))
    added = {entry["id"]: entry for entry in raw.get("added_tokens") or ()}
    by_id = {i: token for token, i in raw["model"]["vocab"].items()} | {i: e["content"] for i, e in added.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab)]
    kinds = [_kind(i, by_id, added) for i in range(vocab)]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in raw["model"]["merges"]])
    ids = {token: i for i, token in by_id.items()}
    for key, add in {
        "bos_token": writer.add_bos_token_id,
        "eos_token": writer.add_eos_token_id,
        "pad_token": writer.add_pad_token_id,
        "unk_token": writer.add_unk_token_id,
    }.items():
        token = said.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    writer.add_add_bos_token(False)
    template = hf / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else said.get("chat_template")
    if text:
        writer.add_chat_template(text)


def _pre_tokenizer(raw: Mapping[str, Any], hf: Path) -> str:
    """llama.cpp's name of the way that the tokenizer cuts text. Raises InputError for one that it does not have."""
    if raw["model"].get("type") != "BPE":
        raise InputError(
            f"{hf}: a {raw['model'].get('type')} tokenizer has no GGUF writer, only byte-level BPE has; export it as hf"
        )
    given = raw.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    *cuts, last = [
        (step.get("type"), _GPT2 if step.get("use_regex") else (step.get("pattern") or {}).get("Regex"))
        for step in steps
    ]
    regexes = [regex for kind, regex in [*cuts, last] if kind in ("Split", "ByteLevel") and regex]
    if last[0] != "ByteLevel" or len(cuts) > 1 or len(regexes) != 1 or regexes[0] not in _PRE_TOKENIZERS:
        raise InputError(f"{hf}: the tokenizer cuts text in a way that GGUF readers do not know; export it as hf")
    return _PRE_TOKENIZERS[regexes[0]]


def _kind(token: int, by_id: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> gguf.TokenType:
    if token not in by_id:
        return gguf.TokenType.UNUSED
    if token not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[token].get("special") else gguf.TokenType.USER_DEFINED


def _names(reader: SafetensorsReader, config: ModelConfig) -> dict[str, str]:
    """GGUF's name of each tensor. Raises InputError for one without."""
    known = gguf.get_tensor_name_map(_ARCHITECTURES[config.family], config.layers)
    found = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in reader.keys()}
    lost = [name for name, theirs in found.items() if theirs is None]
    if lost:
        raise InputError(f"the tensor {lost[0]!r} has no name in GGUF files of {config.family}; export it as hf")
    return {name: str(theirs) for name, theirs in found.items()}


def _permuted(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """GGUF's llama has the two halves of each rotated head interleaved."""
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if config.family != "llama" or heads is None:
        return tensor
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _type_of(dimensions: int, target: GgufTarget) -> Type:
    return _TYPES[target.dtype] if dimensions > 1 else Type.F32


def _array(tensor: Tensor, target: GgufTarget) -> NDArray[Any]:
    kind = _type_of(tensor.dim(), target)
    if kind == Type.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return tensor.to(torch.float16 if kind == Type.F16 else torch.float32).contiguous().numpy()
