"""What is under test in the unit and layer tiers: the operations of the PyTorch engines, with numpy on both sides.

The only file of the ladder that imports PyTorch. The Hopper engines, with kernels of their own, bring theirs (``card.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nanoqwen import reference
from nanoqwen.config import load_settings
from nanoqwen.errors import NonFiniteError
from nanoqwen.kv import PagedKV
from nanoqwen.packfile import PackFile
from nanoqwen.reference import ReferenceModel
from nanoqwen.weights import Int4Linear, dequantize, load_pack


class TorchOperations:
    """FP32 operations of `reference.py` and `weights.py` on a PyTorch device ("cpu", "cuda"). Arrays in, float32 out."""

    def __init__(self, pack: PackFile, device: str):
        self.pack, self.device = pack, torch.device(device)
        self.name = f"PyTorch {torch.__version__}, FP32, {device}"

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.device)  # a copy: views of the mapped file are read-only

    def _float(self, array: np.ndarray) -> torch.Tensor:
        return self._tensor(np.asarray(array, np.float32))

    def dequantize(self, words: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """words uint32 [rows, cols / 8], scales float16 [rows, groups] -> [rows, cols]."""
        return dequantize(self._tensor(words.view(np.int32)), self._tensor(scales), self.pack.group_size).cpu().numpy()

    def int4_linear(self, words: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
        """x [n, cols] times the transposed packed matrix -> [n, rows]."""
        packed = Int4Linear(self._tensor(words.view(np.int32)), self._tensor(scales), self.pack.group_size)
        return packed(self._float(x)).cpu().numpy()

    def rms_norm(self, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
        return reference.rms_norm(self._float(x), self._float(gain), eps).cpu().numpy()

    def rope(self, x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
        """x [n, heads, D] rotated to integer positions [n]."""
        tables = reference.rope_tables(self._tensor(positions), x.shape[-1], theta)
        return reference.apply_rope(self._float(x), *tables).cpu().numpy()

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
        """q [m, H, D] at positions first .. ; k, v [first + m, G, D] -> [m, H * D]."""
        return reference.attention(self._float(q), self._float(k), self._float(v), first).cpu().numpy()

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return reference.swiglu(torch.cat([self._float(gate), self._float(up)], dim=-1)).cpu().numpy()

    def through_cache(self, k: np.ndarray, v: np.ndarray, chunks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Append k, v [n, G, D] to a fresh paged cache in `chunks` of tokens and read all of it back.

        Slots without a token hold NaN, so one slot too many shows.
        """
        kv = PagedKV(self.pack.dims, load_settings().kv, device=self.device, poison=True)
        at = 0
        for n in chunks:
            kv.append(0, self._float(k[at : at + n]), self._float(v[at : at + n]), at)
            at += n
        return tuple(t.float().cpu().numpy() for t in kv.gather(0, at))


class TorchBlocks:
    """Decoder blocks of a pack file run one at a time, as the engine runs them: FP32, paged FP16 cache."""

    decodes = False  # a single token takes the same path as a chunk

    def __init__(self, pack: PackFile, device: str):
        self.dims = pack.dims
        self.model = ReferenceModel.from_pack(pack, device=device, poison=True)
        self.name = f"PyTorch {torch.__version__}, {self.model.weights.description}, paged FP16 KV cache, {device}"

    @torch.inference_mode()
    def run(self, layer: int, x: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
        """Block `layer` on x float32 [n, hidden] from position 0, fed in `chunks` of tokens -> float32 [n, hidden]."""
        model, outputs, at = self.model, [], 0
        model.truncate(0)
        for n in chunks:
            rope = reference.rope_tables(torch.arange(at, at + n, device=model.device), self.dims.head_dim, self.dims.rope_theta)
            rows = torch.tensor(x[at : at + n], device=model.device)
            outputs.append(reference.block(rows, model.weights.layers[layer], model.kv, layer, at, rope, self.dims))
            at += n
        return torch.cat(outputs).cpu().numpy()

    @torch.inference_mode()
    def head(self, x: np.ndarray) -> np.ndarray:
        """Residual float32 [n, hidden] -> logits float32 [n, vocab]."""
        weights = self.model.weights
        h = reference.rms_norm(torch.tensor(x, device=self.model.device), weights.final_norm, self.dims.rms_eps)
        return weights.head(h).cpu().numpy()


class TorchOracle:
    """Logits of whole sequences, dense and uncached in FP32: the oracle of models too large for float64 on a CPU.

    Several sequences go through a layer together, as in ``twins.block``: their tokens are the rows of one x, and only attention
    has to know which rows belong together. So a large matrix is read once for many prompts.
    """

    #: Rows that go through together; one longer sequence goes alone.
    ROWS = 4096

    def __init__(self, pack: PackFile, device: str):
        self.dims = pack.dims
        self.weights = load_pack(pack, device=device)
        self.name = f"PyTorch {torch.__version__} simulation of the same INT4 weights, FP32, whole sequences at once, {device}"

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Logits float32 [len(ids) - start, vocab] of the positions from `start` on."""
        return next(self.all([ids], [start]))

    def all(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[np.ndarray]:
        """``logits`` of each sequence, in order."""
        batch: list[int] = []
        for k, ids in enumerate(sequences):
            if batch and sum(len(sequences[i]) for i in batch) + len(ids) > self.ROWS:
                yield from self._together([sequences[i] for i in batch], [starts[i] for i in batch])
                batch = []
            batch.append(k)
        if batch:
            yield from self._together([sequences[i] for i in batch], [starts[i] for i in batch])

    @torch.inference_mode()
    def _together(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[np.ndarray]:
        d, weights, device = self.dims, self.weights, self.weights.device
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        positions = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
        rope = reference.rope_tables(positions, d.head_dim, d.rope_theta)
        x = torch.nn.functional.embedding(ids, weights.embedding).float()
        ends = np.cumsum([len(sequence) for sequence in sequences]).tolist()
        spans = list(zip([0, *ends], ends))
        for layer in weights.layers:
            qkv = layer.qkv(reference.rms_norm(x, layer.input_norm, d.rms_eps)) + layer.qkv_bias
            heads = qkv.view(len(ids), -1, d.head_dim)
            turned, v = reference.apply_rope(heads[:, : -d.num_kv_heads], *rope), heads[:, -d.num_kv_heads :]
            q, k = turned[:, : d.num_heads], turned[:, d.num_heads :]
            x = x + layer.o(torch.cat([reference.attention(q[a:b], k[a:b], v[a:b], 0) for a, b in spans]))
            x = x + layer.down(reference.swiglu(layer.gate_up(reference.rms_norm(x, layer.post_norm, d.rms_eps))))
        for (a, b), start in zip(spans, starts):
            logits = weights.head(reference.rms_norm(x[a + start : b], weights.final_norm, d.rms_eps))
            if not bool(logits.isfinite().all()):
                raise NonFiniteError("the oracle's logits are not finite: the weights are damaged or out of range")
            yield logits.cpu().numpy()
