"""The reference decoder as an engine: on the CPU ("cpu"), or on a CUDA device through PyTorch ("reference").

Both run ``nanoqwen/reference.py``, line by line, with an FP16 KV cache as the CUDA engines have it.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError
from nanoqwen.packfile import PackFile
from nanoqwen.reference import ReferenceModel
from nanoqwen.weights import Progress, available_memory, gigabytes, resident_bytes

#: Prompt tokens that run through the layers together. Bounds the memory of activations (for the 7B, the
#: MLP's gate and up of 512 tokens are 78 MB); larger chunks are hardly faster.
PREFILL_CHUNK = 512


class ReferenceEngine(Engine):
    """Runs ``ReferenceModel`` on any PyTorch device.

    ``weights`` is the memory policy ("auto", "resident", "streamed"), see ``ReferenceModel.from_pack``. The
    pack file must stay open as long as the engine; with ``owns_pack`` the engine closes it.
    """

    def __init__(
        self,
        pack: PackFile,
        *,
        name: str,
        device: torch.device,
        device_text: str,
        weights: str = "auto",
        kv_dtype: torch.dtype = torch.float16,
        context_limit: int | None = None,
        poison: bool = False,
        owns_pack: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self._model: ReferenceModel | None = ReferenceModel.from_pack(
            pack, device=device, kv_dtype=kv_dtype, weights=weights, context_limit=context_limit, poison=poison, progress=progress
        )
        self._pack = pack if owns_pack else None
        cache = "FP16" if kv_dtype == torch.float16 else "FP32"
        super().__init__(
            pack.dims,
            pack.group_size,
            device=device_text,
            description=f"{self._model.weights.description}, {cache} KV cache",
            context_limit=self._model.context_limit,
        )

    def _prefill(self, ids: list[int]) -> np.ndarray:
        start = self.position
        try:
            for i in range(0, len(ids), PREFILL_CHUNK):
                logits = self._forward(ids[i : i + PREFILL_CHUNK], start + i)
        except BaseException:  # a later chunk failed, or Ctrl-C: earlier chunks go too
            self._model.truncate(start)
            raise
        return logits

    def _decode(self, token: int) -> np.ndarray:
        return self._forward([token], self.position)

    def _forward(self, ids: list[int], position: int) -> np.ndarray:
        logits = self._model.forward(torch.tensor(ids), position, last_only=True)
        return logits[0].cpu().numpy()

    def _rewind(self, position: int) -> None:
        self._model.truncate(position)

    def _close(self) -> None:
        self._model = None  # drops the views of the mapped file, so that it can be closed
        if self._pack is not None:
            self._pack.close()


def open_cpu(pack: PackFile, **options: object) -> ReferenceEngine:
    """The "cpu" engine. ``options`` are those of ``ReferenceEngine``."""
    threads = torch.get_num_threads()
    text = f"CPU, {threads} thread{'s' if threads != 1 else ''}"
    return ReferenceEngine(pack, name="cpu", device=torch.device("cpu"), device_text=text, **options)


def open_cuda(pack: PackFile, device: str = "cuda", **options: object) -> ReferenceEngine:
    """The "reference" engine on ``device`` ("cuda" or "cuda:1"). Raises DeviceError when PyTorch sees no such GPU."""
    if problem := cuda_problem():
        raise DeviceError(f"{problem}; use --device cpu, or see `nanoqwen doctor`")
    where = torch.device(device)
    if (where.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"there is no device {device}: PyTorch sees {torch.cuda.device_count()} NVIDIA GPU(s), counted from cuda:0")
    try:
        return ReferenceEngine(pack, name="reference", device=where, device_text=f"{torch.cuda.get_device_name(where)} ({device})", **options)
    except torch.OutOfMemoryError:
        need, free = resident_bytes(pack.dims), available_memory(where)
        raise DeviceError(f"the weights do not fit on {device}: {gigabytes(need)} as FP32, {gigabytes(free)} are free; use --device cpu") from None


def cuda_problem() -> str | None:
    """Why PyTorch cannot use an NVIDIA GPU here, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no NVIDIA GPU is visible to PyTorch (this PyTorch, {torch.__version__}, is built without CUDA)"
    return f"no NVIDIA GPU is visible to PyTorch (built for CUDA {torch.version.cuda}; is the driver loaded, is CUDA_VISIBLE_DEVICES empty?)"
