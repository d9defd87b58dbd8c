"""A GGUF file of a model's shapes with random weights, so that llama.cpp can be measured beside us without a download.

``python -m nanoqwen.bench.synthetic_gguf OUT`` writes the tensors of Qwen2.5-Coder-7B in the mixture that ``llama-quantize`` calls
Q4_K_M: the output head, and in the layers that its rule ``use_more_bits`` picks the value and the down projection, in Q6_K, everything else
in Q4_K, norms and biases in FP32. How fast a dense model decodes does not depend on the numbers in it. The text it writes means nothing.

Needs the package ``gguf``, llama.cpp's own writer of the format.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanoqwen.config import Dims
from nanoqwen.errors import InputError, NanoqwenError
from nanoqwen.synthetic import synthetic_dims

COMMAND = "python -m nanoqwen.bench.synthetic_gguf"
#: Weights of a block of either type, and blocks that are drawn and then repeated: only the number of bytes matters.
BLOCK, DRAWN = 256, 4096
#: Scales of the random blocks, small enough that 28 layers stay finite in FP16.
SCALE = np.float16(2e-4)


def use_more_bits(layer: int, layers: int) -> bool:
    """The rule of ``llama-quantize`` for Q4_K_M: the first eighth, the last eighth, and every third layer between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(dims: Dims) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, "Q4_K", "Q6_K" or "F32") of every tensor, in the order of the file.

    Raises InputError for dimensions that do not divide into blocks of 256: llama.cpp stores those tensors otherwise.
    """
    if wrong := next((n for n in (dims.hidden, dims.q_size, dims.intermediate) if n % BLOCK), None):
        raise InputError(f"{wrong} input columns do not divide into the {BLOCK} of a K-quant block: this model has no plain Q4_K_M file")
    yield "token_embd.weight", (dims.vocab, dims.hidden), "Q4_K" if not dims.tied else "Q6_K"
    for layer in range(dims.num_layers):
        more = "Q6_K" if use_more_bits(layer, dims.num_layers) else "Q4_K"
        name = f"blk.{layer}."
        yield name + "attn_norm.weight", (dims.hidden,), "F32"
        for part, rows, kind in (("q", dims.q_size, "Q4_K"), ("k", dims.kv_size, "Q4_K"), ("v", dims.kv_size, more)):
            yield f"{name}attn_{part}.weight", (rows, dims.hidden), kind
            yield f"{name}attn_{part}.bias", (rows,), "F32"
        yield name + "attn_output.weight", (dims.hidden, dims.q_size), "Q4_K"
        yield name + "ffn_norm.weight", (dims.hidden,), "F32"
        yield name + "ffn_gate.weight", (dims.intermediate, dims.hidden), "Q4_K"
        yield name + "ffn_up.weight", (dims.intermediate, dims.hidden), "Q4_K"
        yield name + "ffn_down.weight", (dims.hidden, dims.intermediate), more
    yield "output_norm.weight", (dims.hidden,), "F32"
    if not dims.tied:
        yield "output.weight", (dims.vocab, dims.hidden), "Q6_K"


def blocks(kind: str, seed: int) -> np.ndarray:
    """uint8 [DRAWN, bytes of a block]: random codes, finite scales. Q4_K is {d, dmin, 12 bytes of scales, 128 of codes}, Q6_K is
    {128 + 64 bytes of codes, 16 of scales, d}, d and dmin FP16 (ggml-common.h)."""
    width = {"Q4_K": 144, "Q6_K": 210}[kind]
    drawn = np.random.default_rng(seed).integers(0, 256, (DRAWN, width), dtype=np.uint8)
    scale = np.frombuffer(SCALE.tobytes(), dtype=np.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,):
        drawn[:, at : at + 2] = scale
    return drawn


def write(path: Path, dims: Dims, name: str) -> int:
    """Write the file, whole or not at all, and return its size. Raises InputError without the package ``gguf`` and like ``tensors``."""
    try:
        import gguf
    except ImportError:
        raise InputError("the package gguf is not installed: pip install gguf") from None
    wanted = list(tensors(dims))
    temporary = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(temporary, "qwen2")
    try:
        writer.add_name(name)
        writer.add_context_length(dims.max_position)
        writer.add_embedding_length(dims.hidden)
        writer.add_block_count(dims.num_layers)
        writer.add_feed_forward_length(dims.intermediate)
        writer.add_head_count(dims.num_heads)
        writer.add_head_count_kv(dims.num_kv_heads)
        writer.add_key_length(dims.head_dim)
        writer.add_value_length(dims.head_dim)
        writer.add_layer_norm_rms_eps(dims.rms_eps)
        writer.add_rope_freq_base(dims.rope_theta)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        # A vocabulary that spells nothing: the benchmark draws ids.
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([f"<{i}>" for i in range(dims.vocab)])
        writer.add_token_types([1] * dims.vocab)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(False)
        kinds = {kind: getattr(gguf.GGMLQuantizationType, kind) for kind in ("Q4_K", "Q6_K")}
        drawn = {kind: blocks(kind, seed) for seed, kind in enumerate(kinds)}
        for label, shape, kind in wanted:
            if kind == "F32":
                writer.add_tensor_info(label, shape, np.dtype(np.float32), 4 * shape[0])
            else:
                width = drawn[kind].shape[1] * (shape[1] // BLOCK)
                writer.add_tensor_info(label, (shape[0], width), np.dtype(np.uint8), shape[0] * width, raw_dtype=kinds[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for label, shape, kind in wanted:
            if kind == "F32":
                writer.write_tensor_data(np.full(shape, 1.0 if "norm" in label else 0.0, dtype=np.float32))
            else:
                count = shape[0] * (shape[1] // BLOCK)
                writer.write_tensor_data(np.resize(drawn[kind], (count, drawn[kind].shape[1])))
        writer.close()
        os.replace(temporary, path)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def main(arguments: list[str] | None = None) -> int:
    """Write the file and say how large it is."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="A GGUF file (Q4_K_M) of the 7B's shapes with random weights, for llama-bench.")
    parser.add_argument("out", metavar="OUT", type=Path, help="where to write it (4.7 GB for the 7B)")
    parser.add_argument("--model", default="7b", help="which synthetic model's shapes (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        size = write(options.out, synthetic_dims(options.model), f"synthetic {options.model}, random weights")
    except (NanoqwenError, OSError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
