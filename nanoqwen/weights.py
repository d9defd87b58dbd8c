"""Where the reference decoder's weights come from: a pack file or a checkpoint, held whole or streamed.

``reference.py`` computes in FP32 and does not care how a matrix is stored. It calls a *linear*, an
object that maps x [n, in] to x @ W.T [n, out]. There are three kinds:

* ``DenseLinear``   W as FP32 in memory: fast, 4 bytes a weight;
* ``Int4Linear``    W as packed INT4 words, dequantised a few rows at a time during each use: 0.52 bytes a
  weight, so that the 7B runs (slowly) on a laptop with 16 GB;
* ``HalfLinear``    W as FP16, widened a few rows at a time: an output head that stays in the mapped file.

INT4 code times FP16 scale is exact in FP32, so all kinds hold the very same weights. Their products may
differ in the last bits, because BLAS may sum a block of rows in another order than the whole matrix
(measured: 5e-7 of the largest output of one product, 2e-6 of the largest logit after four layers of the
7B's widths; up to 2e-4 with an FP16 cache, where such a bit can decide how a key rounds).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from nanoqwen import int4, model
from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.packfile import INT4, PackFile

Linear = Callable[[torch.Tensor], torch.Tensor]
Progress = Callable[[int, int, str], None]

#: Weights a streaming linear dequantises at once: 4 MiB as FP32, so that a block is multiplied while it is
#: still in a cache. Dequantising 3584 x 3584 weights at once took four times as long as in such blocks.
BLOCK_WEIGHTS = 1 << 20
#: The same on a GPU, where each block costs a dozen launches: 128 MiB as FP32.
GPU_BLOCK_WEIGHTS = 1 << 25

POLICIES = ("auto", "resident", "streamed")


# [dequantize]
def dequantize(words: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """ValueShuffle words int32 [rows, cols // 8], scales float16 [rows, cols // group] -> float32 [rows, cols].

    Same values, bit for bit, as ``int4.dequantize``, by the trick the kernels use. Flipping the top bit of
    every nibble turns the code c in [-8, 7] into c + 8 in [0, 15]. ``word >> 4j & 0x000F000F`` leaves pair
    j, one code in each half. Or-ing 0x6400 into a half makes it the FP16 number 1024 + (c + 8): there a
    step of the last mantissa bit is exactly 1. Read as FP16, the pairs are the eight weights in order, and
    subtracting 1032 leaves c.
    """
    rows, n = words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
    pairs = (words ^ -0x77777778).unsqueeze(-1) >> shifts  # -0x77777778 is 0x88888888 as int32
    pairs = pairs.bitwise_and_(0x000F000F).bitwise_or_(0x64006400)  # int32 [rows, cols // 8, 4]
    codes = pairs.view(torch.float16).view(rows, n * 8 // group, group).float().sub_(1032.0)
    return codes.mul_(scales.float().unsqueeze(-1)).view(rows, n * 8)
# [/dequantize]


class DenseLinear:
    """W held as float32 [out, in]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [n, in] -> float32 [n, out]."""
        return F.linear(x, self.weight)


class _BlockLinear:
    """Base of linears that widen their rows block by block; ``rows(a, b)`` gives float32 [b - a, in]."""

    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [n, in] -> float32 [n, out]."""
        out_features, in_features = self.shape
        out = x.new_empty(x.shape[0], out_features)
        for start, stop in row_blocks(out_features, in_features, x.device):
            out[:, start:stop] = F.linear(x, self.rows(start, stop))
        return out


# [int4_linear]
class Int4Linear(_BlockLinear):
    """W as ValueShuffle words int32 [out, in // 8] and FP16 scales [out, in // group]; may be views of a mapped file."""

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, group: int) -> None:
        self.words, self.scales, self.group = words, scales, group
        self.shape = (words.shape[0], words.shape[1] * 8)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` as float32 [stop - start, in]."""
        return dequantize(self.words[start:stop], self.scales[start:stop], self.group)
# [/int4_linear]


class HalfLinear(_BlockLinear):
    """W as float16 [out, in]; may be a view of a mapped file."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.shape = tuple(weight.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` as float32 [stop - start, in]."""
        return self.weight[start:stop].float()


class StackedLinear:
    """Several linears on the same x; their outputs side by side, as if their rows were one matrix."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = list(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [n, in] -> float32 [n, sum of the parts' outs]."""
        return torch.cat([part(x) for part in self.parts], dim=1)


def row_blocks(rows: int, cols: int, device: torch.device) -> list[tuple[int, int]]:
    """(start, stop) of consecutive blocks of rows with about BLOCK_WEIGHTS (on a GPU GPU_BLOCK_WEIGHTS) weights each."""
    step = max(1, (BLOCK_WEIGHTS if device.type == "cpu" else GPU_BLOCK_WEIGHTS) // cols)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


# [layer_weights]
@dataclass
class LayerWeights:
    """What one decoder block needs. Norm weights and bias are float32 vectors, the rest are linears.

    q, k and v are fused into one linear, and so are gate and up: one call instead of three and two.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> q_size + 2 * kv_size, rows in the order q, k, v
    qkv_bias: torch.Tensor  # [q_size + 2 * kv_size]
    o: Linear  # q_size -> hidden
    post_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate, gate first
    down: Linear  # intermediate -> hidden


@dataclass
class DecoderWeights:
    """A whole model, ready for ``ReferenceModel``; ``description`` says in words how it is held."""

    dims: Dims
    embedding: torch.Tensor  # [vocab, hidden], float32 or float16: rows are widened on lookup
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    head: Linear  # hidden -> vocab
    device: torch.device
    description: str
# [/layer_weights]


class _Source:
    """Reads tensors by name; ``assemble`` turns them into DecoderWeights."""

    dims: Dims
    device: torch.device

    def vector(self, *names: str) -> torch.Tensor:
        """float32 [sum of lengths]: the named vectors end to end."""
        raise NotImplementedError

    def projection(self, *names: str) -> Linear:
        """One linear with the rows of all the named projections."""
        raise NotImplementedError

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden], float32 or float16."""
        raise NotImplementedError

    def head(self, embedding: torch.Tensor) -> Linear:
        """The output head; for a tied model, made of ``embedding``."""
        raise NotImplementedError


def assemble(source: _Source, description: str, progress: Progress | None = None) -> DecoderWeights:
    """Read every tensor of ``source``, block after block."""
    layers = []
    for i in range(source.dims.num_layers):
        p = f"model.layers.{i}."
        a, m = p + "self_attn.", p + "mlp."
        layers.append(
            LayerWeights(
                input_norm=source.vector(p + "input_layernorm.weight"),
                qkv=source.projection(a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"),
                qkv_bias=source.vector(a + "q_proj.bias", a + "k_proj.bias", a + "v_proj.bias"),
                o=source.projection(a + "o_proj.weight"),
                post_norm=source.vector(p + "post_attention_layernorm.weight"),
                gate_up=source.projection(m + "gate_proj.weight", m + "up_proj.weight"),
                down=source.projection(m + "down_proj.weight"),
            )
        )
        if progress:
            progress(i + 1, source.dims.num_layers, "loading layers")
    embedding = source.embedding()
    return DecoderWeights(
        source.dims, embedding, layers, source.vector(model.FINAL_NORM), source.head(embedding), source.device, description
    )


# [pack_source]
class PackSource(_Source):
    """Tensors of a ``.nanoqwen`` file. ``resident`` widens them to FP32 once; otherwise they stay as they are.

    On the CPU a tensor that stays as it is remains a view of the mapped file: the operating system reads
    it when needed and may drop it again. On a GPU it is copied there, still packed.
    """

    def __init__(self, pack: PackFile, *, resident: bool, device: torch.device) -> None:
        self.pack, self.dims, self.resident, self.device = pack, pack.dims, resident, device

    def vector(self, *names: str) -> torch.Tensor:
        return torch.cat([self._fp16(name) for name in names]).float()

    def projection(self, *names: str) -> Linear:
        parts = [self._int4(name) for name in names]
        if self.resident:
            return DenseLinear(_widen(parts, self.device))
        return parts[0] if len(parts) == 1 else StackedLinear(parts)

    def embedding(self) -> torch.Tensor:
        return self._fp16(model.EMBED)

    def head(self, embedding: torch.Tensor) -> Linear:
        half = HalfLinear(embedding if self.dims.tied else self._fp16(model.LM_HEAD))
        return DenseLinear(_widen([half], self.device)) if self.resident else half

    def _fp16(self, name: str) -> torch.Tensor:
        return _borrow(self.pack.fp16(name)).to(self.device)

    def _int4(self, name: str) -> Int4Linear:
        words, scales = self.pack.int4(name)
        return Int4Linear(_borrow(words.view(np.int32)).to(self.device), _borrow(scales).to(self.device), self.pack.group_size)
# [/pack_source]


def _widen(parts: Sequence[_BlockLinear], device: torch.device) -> torch.Tensor:
    """The rows of all parts as one float32 [out, in], filled block by block so that little else is in memory."""
    weight = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], device=device)
    base = 0
    for part in parts:
        for start, stop in row_blocks(*part.shape, device):
            weight[base + start : base + stop] = part.rows(start, stop)
        base += part.shape[0]
    return weight


def _borrow(array: np.ndarray) -> torch.Tensor:
    """A tensor over the bytes of ``array``, which may be read-only: nothing here writes to weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def load_pack(pack: PackFile, *, device: str | torch.device = "cpu", policy: str = "auto", progress: Progress | None = None) -> DecoderWeights:
    """Weights of an open pack file.

    ``policy`` is "resident" (FP32 copies), "streamed" (packed, dequantised at each use) or "auto": resident
    when the copies fit into half of the memory that is free now. Raises InputError for a file whose tensors
    are not the ones its dimensions ask for.
    """
    if policy not in POLICIES:
        raise InputError(f"weights={policy!r} is not known, use one of {', '.join(POLICIES)}")
    check_tensors(pack)
    device = torch.device(device)
    need, free = resident_bytes(pack.dims), available_memory(device)
    resident = policy == "resident" or (policy == "auto" and need <= free // 2)
    if resident:
        how = f"FP32 weights in memory ({gigabytes(need)})"
    else:
        how = "INT4 weights, dequantised at each use"
        if policy == "auto":
            how += f" (as FP32 they need {gigabytes(need)}, half of the free memory is {gigabytes(free // 2)})"
    return assemble(PackSource(pack, resident=resident, device=device), how, progress)


def check_tensors(pack: PackFile) -> None:
    """Raise InputError unless the file holds every tensor of its dimensions in the right shape and storage."""
    for spec in model.schema(pack.dims):
        entry = pack.tensors.get(spec.name)
        if entry is None:
            raise InputError(f"{pack.path}: tensor {spec.name} is missing; pack the checkpoint again")
        if (entry.rows, entry.cols, entry.storage == INT4) != (spec.rows, spec.cols, spec.int4):
            raise InputError(
                f"{pack.path}: tensor {spec.name} is {entry.rows} x {entry.cols} with storage tag {entry.storage}, the dimensions in the "
                f"header need {spec.rows} x {spec.cols}{' as INT4' if spec.int4 else ' as FP16'}; pack the checkpoint again"
            )


# [checkpoint_source]
class CheckpointSource(_Source):
    """Tensors of a Hugging Face checkpoint, as FP32, with the rounding that ``weights`` names.

    "fp32" none; "fp16" every tensor rounded to FP16; "int4" what a pack file would hold: the seven
    projections through ``int4.quantize``, the rest rounded to FP16. The last is the simulation that
    token-match tests compare with; it uses codes and scales, not packed words, so equality with a pack
    file also tests the packing.
    """

    def __init__(self, checkpoint: object, weights: str, group: int, device: torch.device) -> None:
        self.checkpoint, self.weights, self.group = checkpoint, weights, group
        self.dims, self.device = checkpoint.dims, device

    def vector(self, *names: str) -> torch.Tensor:
        return torch.cat([self._plain(name) for name in names])

    def projection(self, *names: str) -> Linear:
        read = self._quantized if self.weights == "int4" else self._plain
        return DenseLinear(torch.cat([read(name) for name in names]))

    def embedding(self) -> torch.Tensor:
        return self._plain(model.EMBED)

    def head(self, embedding: torch.Tensor) -> Linear:
        return DenseLinear(embedding if self.dims.tied else self._plain(model.LM_HEAD))

    def _plain(self, name: str) -> torch.Tensor:
        values = self.checkpoint.read(name)
        if self.weights != "fp32":
            with np.errstate(over="ignore"):
                half = values.astype(np.float16).astype(np.float32)
            if not np.isfinite(half).all():  # a pack file refuses it too
                raise InputError(f"{name}: holds a value that FP16 (largest {int4.FP16_MAX:g}) cannot; use weights fp32 for this checkpoint")
            values = half
        return torch.from_numpy(values).to(self.device)

    def _quantized(self, name: str) -> torch.Tensor:
        codes, scales = int4.quantize(self.checkpoint.read(name), self.group, name)
        rows, cols = codes.shape
        values = codes.reshape(rows, cols // self.group, self.group) * scales.astype(np.float32)[..., None]
        return torch.from_numpy(values.reshape(rows, cols)).to(self.device)
# [/checkpoint_source]


# [memory]
def resident_bytes(dims: Dims) -> int:
    """Bytes of the FP32 copies that "resident" makes: every weight but the embedding, whose rows are looked up in the file."""
    weights = sum(s.rows * s.cols for s in model.schema(dims) if s.name != model.EMBED)
    return 4 * (weights + (dims.vocab * dims.hidden if dims.tied else 0))


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken on ``device`` now. Linux says; elsewhere it is half of the installed memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:  # a container may own less than the machine has free
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such control group, or "max"
        return free


def gigabytes(count: int) -> str:
    """``count`` bytes for people: "41 MB", "28.3 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
# [/memory]
