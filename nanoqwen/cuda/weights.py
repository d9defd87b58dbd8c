"""A model's weights on the card, from a pack file or from a seed.

Layout on the device: q/k/v stacked to one matrix and gate/up to another, rows padded to whole tiles of 16, and codes, scales
and the output head re-tiled into the order in which the streaming GEMV reads them. The file stays row-major.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import cupy
import numpy as np

from nanoqwen import model
from nanoqwen.config import Dims
from nanoqwen.cuda.constants import BUNDLE, HEAD_SLICE, TILE_ROWS, padded_rows
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.staging import Stager
from nanoqwen.packfile import PackFile, Progress
from nanoqwen.synthetic import recipe, stream_key


@dataclass
class Int4Matrix:
    """One streamed projection: ``bundles`` uint32 [bundles, 8 * group + 32], made by ``tile_int4``; ``rows`` with padding, ``cols``."""

    bundles: cupy.ndarray
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """Bytes a token reads of it."""
        return self.bundles.nbytes


@dataclass
class DeviceLayer:
    """One decoder block on the card."""

    input_norm: cupy.ndarray
    qkv: Int4Matrix
    q_bias: cupy.ndarray
    k_bias: cupy.ndarray
    v_bias: cupy.ndarray
    o: Int4Matrix
    post_norm: cupy.ndarray
    gate_up: Int4Matrix
    down: Int4Matrix


@dataclass
class DeviceModel:
    """All weights. A tied head is stored once, tiled, and ``embedding`` is that array; ``entries`` are the ids that may be produced."""

    dims: Dims
    group: int
    entries: int
    embedding: cupy.ndarray
    layers: list[DeviceLayer]
    final_norm: cupy.ndarray
    head: cupy.ndarray

    @property
    def nbytes(self) -> int:
        """Device memory that the weights take, in bytes."""
        arrays = {id(a): a.nbytes for a in (self.embedding, self.final_norm, self.head)}
        for layer in self.layers:
            for value in vars(layer).values():
                arrays[id(value)] = value.nbytes
        return sum(arrays.values())


def tile(matrix: cupy.ndarray, slice_width: int) -> cupy.ndarray:
    """[rows, cols], rows a multiple of 16 -> blocks [rows // 16 * (cols // slice_width), 16, slice_width], padded with zeros to whole bundles.

    The order in which the streaming GEMV reads: a warp takes 16 rows of one slice at a time (kernels/common/stream_gemv.cuh). The FP16
    head is sliced by 32; ``tile_int4`` puts projections into the same order.
    """
    rows, cols = matrix.shape
    tiles, slices = rows // TILE_ROWS, cols // slice_width
    out = cupy.zeros((-(-tiles * slices // BUNDLE) * BUNDLE, TILE_ROWS, slice_width), dtype=matrix.dtype)
    out[: tiles * slices].reshape(tiles, slices, TILE_ROWS, slice_width)[...] = matrix.reshape(tiles, TILE_ROWS, slices, slice_width).transpose(0, 2, 1, 3)
    return out


def tile_int4(codes: cupy.ndarray, scales: cupy.ndarray) -> Int4Matrix:
    """Codes uint32 [rows, cols // 8] and scales float16 [rows, cols // group] -> blocks of 16 rows x one group, four to a bundle.

    A block holds its codes [16 rows][group // 8 words] and then its scales [g = 0..7][rows g, g + 8], the two rows of a tensor-core lane
    side by side (kernels/common/int4_block.cuh). Blocks that fill the last bundle are zeros.
    """
    (rows, slices), per_row = scales.shape, codes.shape[1] // scales.shape[1]
    out = cupy.zeros((-(-rows // TILE_ROWS * slices // BUNDLE), BUNDLE * (TILE_ROWS * per_row + TILE_ROWS // 2)), dtype=np.uint32)
    matrix = Int4Matrix(out, rows, codes.shape[1] * 8)
    to_codes, to_scales = _block_views(matrix, per_row)
    to_codes[...] = codes.reshape(-1, TILE_ROWS, slices, per_row).transpose(0, 2, 1, 3)
    to_scales[...] = scales.reshape(-1, 2, TILE_ROWS // 2, slices).transpose(0, 3, 2, 1)
    return matrix


def untile_int4(matrix: Int4Matrix, group: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """The inverse of ``tile_int4``: (codes uint32 [rows, cols // 8], scales float16 [rows, cols // group])."""
    codes, scales = _block_views(matrix, group // 8)
    return codes.transpose(0, 2, 1, 3).reshape(matrix.rows, -1), scales.transpose(0, 3, 2, 1).reshape(matrix.rows, -1)


def _block_views(matrix: Int4Matrix, per_row: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Views into the blocks: codes uint32 [row tiles, slices, 16, per_row] and scales float16 [row tiles, slices, g = 0..7, rows g, g + 8]."""
    tiles, slices, words = matrix.rows // TILE_ROWS, matrix.cols // 8 // per_row, TILE_ROWS * per_row
    blocks = matrix.bundles.reshape(-1, words + TILE_ROWS // 2)[: tiles * slices].reshape(tiles, slices, -1)
    codes, scales = blocks[..., :words], blocks.view(np.float16)[..., 2 * words :]
    # To split an axis needs no copy, whatever its stride: these are views.
    return codes.reshape(tiles, slices, TILE_ROWS, per_row), scales.reshape(tiles, slices, TILE_ROWS // 2, 2)


def upload(pack: PackFile, progress: Progress | None = None) -> DeviceModel:
    """Copy a pack file to the current device."""
    total = sum(nbytes for e in pack.tensors.values() for _, nbytes, _ in e.spans)
    done = 0
    with Stager() as stager:

        def send(array: np.ndarray, out: cupy.ndarray, label: str) -> None:
            nonlocal done
            stager.send(array, out)
            done += array.nbytes
            if progress:
                progress(done, total, label)

        return _read(pack, send)


def _read(pack: PackFile, send: Callable[[np.ndarray, cupy.ndarray, str], None]) -> DeviceModel:
    dims, group = pack.dims, pack.group_size

    def fp16(name: str, rows: int | None = None) -> cupy.ndarray:
        values = pack.fp16(name)
        out = cupy.zeros((rows, *values.shape[1:]) if rows else values.shape, dtype=np.float16)
        send(values, out[: len(values)], name)
        return out

    def int4(*names: str) -> Int4Matrix:
        parts = [pack.int4(n) for n in names]
        rows = padded_rows(sum(len(w) for w, _ in parts))
        codes = cupy.zeros((rows, parts[0][0].shape[1]), dtype=np.uint32)
        scales = cupy.zeros((rows, parts[0][1].shape[1]), dtype=np.float16)
        at = 0
        for name, (w, s) in zip(names, parts):
            send(w, codes[at : at + len(w)], name)
            send(s, scales[at : at + len(w)], name)
            at += len(w)
        return tile_int4(codes, scales)

    layers = []
    for i in range(dims.num_layers):
        p = f"model.layers.{i}."
        layers.append(
            DeviceLayer(
                input_norm=fp16(p + "input_layernorm.weight"),
                qkv=int4(*(f"{p}self_attn.{x}_proj.weight" for x in "qkv")),
                q_bias=fp16(p + "self_attn.q_proj.bias"),
                k_bias=fp16(p + "self_attn.k_proj.bias"),
                v_bias=fp16(p + "self_attn.v_proj.bias"),
                o=int4(p + "self_attn.o_proj.weight"),
                post_norm=fp16(p + "post_attention_layernorm.weight"),
                gate_up=int4(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
                down=int4(p + "mlp.down_proj.weight"),
            )
        )
    embedding = fp16(model.EMBED, padded_rows(dims.vocab))
    head = tile(embedding if dims.tied else fp16(model.LM_HEAD, padded_rows(dims.vocab)), HEAD_SLICE)
    embedding = head if dims.tied else embedding
    return DeviceModel(dims, group, pack.header.tokenizer_entries or dims.vocab, embedding, layers, fp16(model.FINAL_NORM), head)


def synthesise(dims: Dims, group: int, kernels: Kernels, seed: int = 0) -> DeviceModel:
    """Seeded random weights made on the card, bit for bit those of ``nanoqwen.synthetic``."""

    def values(spec: model.TensorSpec, rows: int | None = None) -> cupy.ndarray:
        r = recipe(spec, dims)
        out = cupy.zeros((rows, *spec.shape[1:]) if rows else spec.shape, dtype=np.float16)
        _fill(kernels, "fill_values", out, spec.rows * spec.cols, stream_key(seed, spec.name), ctypes.c_float(r.size), ctypes.c_float(r.centre))
        return out

    def int4(*specs: model.TensorSpec) -> Int4Matrix:
        rows = padded_rows(sum(s.rows for s in specs))
        codes = cupy.zeros((rows, specs[0].cols // 8), dtype=np.uint32)
        scales = cupy.zeros((rows, specs[0].cols // group), dtype=np.float16)
        at = 0
        for s in specs:
            r = recipe(s, dims)
            _fill(kernels, "fill_words", codes[at : at + s.rows], s.rows * s.cols // 8, stream_key(seed, s.name))
            key = stream_key(seed, s.name + ".scales")
            _fill(kernels, "fill_values", scales[at : at + s.rows], s.rows * s.cols // group, key, ctypes.c_float(r.size), ctypes.c_float(r.centre))
            at += s.rows
        return tile_int4(codes, scales)

    layers = []
    for i in range(dims.num_layers):
        norm, q, k, v, qb, kb, vb, o, post, gate, up, down = model.block_schema(dims, i)
        layers.append(
            DeviceLayer(values(norm), int4(q, k, v), values(qb), values(kb), values(vb), int4(o), values(post), int4(gate, up), int4(down))
        )
    specs = {s.name: s for s in model.schema(dims)}
    embedding = values(specs[model.EMBED], padded_rows(dims.vocab))
    head = tile(embedding if dims.tied else values(specs[model.LM_HEAD], padded_rows(dims.vocab)), HEAD_SLICE)
    embedding = head if dims.tied else embedding
    return DeviceModel(dims, group, dims.vocab, embedding, layers, values(specs[model.FINAL_NORM]), head)


def _fill(kernels: Kernels, name: str, out: cupy.ndarray, count: int, key: int, *more: object) -> None:
    stream = cupy.cuda.get_current_stream()
    Launch(kernels, name, (1024,), 256, [out, ctypes.c_longlong(count), ctypes.c_uint64(key), *more], overlap=False)(stream)
