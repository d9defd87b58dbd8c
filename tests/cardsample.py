"""The sampling kernel alone, on logits that a test makes. Needs a Hopper GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import cupy
import numpy as np

from nanoqwen.config import Dims
from nanoqwen.cuda.choice import SAMPLE_CTAS, SAMPLE_THREADS, allowed_words, rule, sample_shared_bytes
from nanoqwen.cuda.constants import LaunchShape, constants_header, padded_rows
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.sampling import Sampler


class CardSample:
    """``pick`` is what the card gives for ``Sampler.pick``; it uses up the same random number."""

    def __init__(self, dims: Dims, cache: Path | None = None) -> None:
        self.vocab, rows = dims.vocab, padded_rows(dims.vocab)
        sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
        kernels = Kernels(constants_header(dims, 128, LaunchShape(sms)), cache, ["decode/sample.cu"])
        self.logits, self.step = cupy.full(rows, np.nan, dtype=np.float32), cupy.zeros(3, dtype=np.int32)
        self.allowed, self.rule, self.random = cupy.zeros(-(-rows // 32), dtype=np.uint32), cupy.zeros(3), cupy.zeros(8, dtype=np.uint64)
        self.told = np.frombuffer(cupy.cuda.alloc_pinned_memory(32), dtype=np.int32, count=8)
        shared = sample_shared_bytes(dims.vocab)
        kernels.allow_shared("sample", shared)
        arguments = [self.logits, self.allowed, self.rule, self.random, self.step, ctypes.c_uint64(self.told.ctypes.data)]
        self.launch = Launch(kernels, "sample", (SAMPLE_CTAS,), SAMPLE_THREADS, arguments, shared=shared)
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def set(self, logits: np.ndarray, chooser: Sampler) -> None:
        """Logits and rule of the draws that follow; rows past the vocabulary stay NaN."""
        with self.stream:
            self.logits[: self.vocab] = cupy.asarray(logits, dtype=np.float32)
            self.allowed[...] = cupy.asarray(allowed_words(self.vocab, chooser.valid_ids, chooser.banned_ids))
            self.rule[...] = cupy.asarray(rule(chooser))
        words = allowed_words(self.vocab, chooser.valid_ids, chooser.banned_ids)
        may = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab])
        self.best = int(may[np.argmax(logits[may])])
        self.stream.synchronize()

    def pick(self, chooser: Sampler, position: int = 5) -> int:
        self.place(position)
        self.random[position : position + 1].set(chooser.upcoming(1), stream=self.stream)
        chooser.drew()
        self.launch(self.stream)
        self.stream.synchronize()
        chosen = int(self.told[position])
        assert self.step.get().tolist() == [chosen, position + 1, chosen], "the next step begins with what was drawn"
        return chosen

    def place(self, position: int, best: int | None = None) -> None:
        """The step as argmax leaves it."""
        self.step.set(np.array([0, position, self.best if best is None else best], dtype=np.int32), stream=self.stream)
