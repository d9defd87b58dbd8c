"""The Hopper engines: hand-written kernels, launched one by one ("eager") or as a captured CUDA graph ("graph").

Both hold the same weights, pages and list of launches; they differ in how a step reaches the card. The graph engine
captures that list twice, once with ``page_open`` in front (at a position that begins a page) and once without, and
picks by ``position % page_tokens``. Nothing is patched in a graph: token, position and page lie in device memory
and are written there before the launch.
"""

from __future__ import annotations

import os
from pathlib import Path

import cupy
import numpy as np

from nanoqwen import cache as folders
from nanoqwen.config import load_settings
from nanoqwen.cuda.constants import LaunchShape, check_supported, constants_header
from nanoqwen.cuda.decode import DecodeBuffers, decode_launches, head_launches
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.prefill import CHUNK, Prefill
from nanoqwen.cuda.weights import DeviceModel, upload
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError, NonFiniteError
from nanoqwen.kv import pages_for
from nanoqwen.packfile import PackFile, Progress

#: Tokens the page pool holds at first; it doubles when a sequence outgrows it.
FIRST_POOL_TOKENS = 4096


class HopperEngine(Engine):
    """Weights, pages and launches of one model on one card. ``name`` is "eager" or "graph"."""

    def __init__(self, weights: DeviceModel, *, name: str = "graph", cache: Path | None = None, context_limit: int | None = None, shape: LaunchShape | None = None) -> None:
        check_supported(weights.dims, weights.group)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.name = name
        dims = weights.dims
        limit = min(context_limit or dims.max_position, dims.max_position)
        super().__init__(
            dims, weights.group, device=properties["name"].decode(), context_limit=limit,
            description=f"INT4 weights, FP16 KV pages, {'one CUDA graph a token' if name == 'graph' else 'one launch a kernel'}",
        )  # fmt: skip
        self._weights = weights
        self._shape = shape or LaunchShape(properties["multiProcessorCount"])
        self._stream = cupy.cuda.Stream(non_blocking=True)  # capture needs a non-blocking one
        self._kernels = Kernels(constants_header(dims, weights.group, self._shape), cache)
        self._page_tokens = load_settings().kv.page_tokens
        with self._stream:
            self._buffers = DecodeBuffers(dims, weights.group, self._shape, pages_for(limit, self._page_tokens))
            self._prefiller = Prefill(self._kernels, weights, self._buffers, min(CHUNK, limit))
            self._head = head_launches(self._kernels, weights, self._buffers, self._shape, None)
            self._pool = None
            self._grow(min(FIRST_POOL_TOKENS, limit))
        self._pages: list[int] = []  # the block table: physical page of each logical page
        self._free: list[int] = list(range(self._pool.shape[2] - 1, -1, -1))
        self._stream.synchronize()

    # ------------------------------------------------------------------------------------------ pages

    def _grow(self, tokens: int) -> None:
        """(Re)allocate the page pool for ``tokens`` tokens and make the launches that point into it."""
        dims = self.dims
        pages = pages_for(tokens, self._page_tokens)
        pool = cupy.empty((dims.num_layers, 2, pages, self._page_tokens * dims.kv_size), dtype=np.float16)
        if self._pool is not None:
            pool[:, :, : self._pool.shape[2]] = self._pool
            self._free[:0] = range(pages - 1, self._pool.shape[2] - 1, -1)
        self._pool = pool
        self._launches = {
            opens: decode_launches(self._kernels, self._weights, self._buffers, pool, self._shape, opens_page=opens) for opens in (True, False)
        }
        self._graphs: dict[bool, cupy.cuda.Graph] = {}
        if self.name == "graph":
            self._graphs = {opens: self._capture(launches) for opens, launches in self._launches.items()}

    def _capture(self, launches: list[Launch]) -> cupy.cuda.Graph:
        self._stream.begin_capture()
        for launch in launches:
            launch(self._stream)
        return self._stream.end_capture()

    def _take_page(self) -> int:
        if not self._free:
            self._grow(min(2 * self._pool.shape[2] * self._page_tokens, self.context_limit))
        page = self._free.pop()
        self._pages.append(page)
        return page

    # ------------------------------------------------------------------------------------------ steps

    def _prefill(self, ids: list[int]) -> np.ndarray:
        start = self.position
        try:
            with self._stream:
                for i in range(0, len(ids), CHUNK):
                    chunk, at = ids[i : i + CHUNK], start + i
                    fresh = []
                    while len(self._pages) < pages_for(at + len(chunk), self._page_tokens):
                        fresh.append(self._take_page())
                    if fresh:
                        self._pool[:, :, fresh] = 0  # a page may hold NaN of another sequence
                        first = len(self._pages) - len(fresh)
                        self._buffers.block_table[first : len(self._pages)] = cupy.asarray(fresh, dtype=np.int32)
                    self._prefiller.run(chunk, at, self._pool, self._stream)
                for launch in self._head:
                    launch(self._stream)
            return self._logits()
        except BaseException:
            self._rewind(start)
            raise

    def _decode(self, token: int) -> np.ndarray:
        start = self.position
        self.step(token)
        try:
            return self._logits()
        except BaseException:
            self._rewind(start)
            raise

    def step(self, token: int) -> None:
        """Enqueue one decode step at ``position``; returns at once. The caller reads ``_logits`` or the greedy token."""
        opens = self.position % self._page_tokens == 0
        page = self._take_page() if opens else 0
        self._buffers.step.set(np.array([token, self.position, page, -1], dtype=np.int32), stream=self._stream)
        if self._graphs:
            self._graphs[opens].launch(self._stream)
        else:
            for launch in self._launches[opens]:
                launch(self._stream)

    def _logits(self) -> np.ndarray:
        logits = self._buffers.logits[: self.dims.vocab].get(stream=self._stream)
        if int(self._buffers.step[3].get(stream=self._stream)) < 0:
            raise NonFiniteError("the logits are not finite; run with --engine cpu to learn the layer")
        return logits

    def _rewind(self, position: int) -> None:
        keep = pages_for(position, self._page_tokens)
        self._free += reversed(self._pages[keep:])
        del self._pages[keep:]

    def _close(self) -> None:
        self._stream.synchronize()
        self._graphs, self._launches, self._head = {}, {}, []
        self._kernels = None
        self._pool = self._buffers = self._prefiller = self._weights = None


def open_hopper(
    pack: PackFile, name: str, device: str = "cuda", *, owns_pack: bool = False, context_limit: int | None = None, progress: Progress | None = None
) -> HopperEngine:
    """The "eager" or "graph" engine on ``device``, with the weights of ``pack`` copied to the card.

    The file is not needed afterwards and is closed if it is owned. Raises InputError for dimensions that the kernels do not
    take, DeviceError when the card has too little memory: what is needed and what is free, before anything is copied.
    """
    check_supported(pack.dims, pack.group_size)
    index = int(device.partition(":")[2] or 0)
    if index >= cupy.cuda.runtime.getDeviceCount():
        raise DeviceError(f"there is no device {device}: {cupy.cuda.runtime.getDeviceCount()} NVIDIA GPU(s), counted from cuda:0")
    with cupy.cuda.Device(index):
        need = sum(nbytes for e in pack.tensors.values() for _, nbytes, _ in e.spans)
        free = cupy.cuda.runtime.memGetInfo()[0]
        if need > free:
            raise DeviceError(f"the weights need {need / 1e9:.2f} GB on {device}, {free / 1e9:.2f} GB are free; free some, or use --device cpu")
        try:
            weights = upload(pack, progress)
            engine = HopperEngine(weights, name=name, cache=kernel_cache(), context_limit=context_limit)
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise DeviceError(f"the card has too little memory for weights, workspace and the first KV pages: {e}") from None
    if owns_pack:
        pack.close()
    return engine


def kernel_cache() -> Path | None:
    """Where compiled kernels are kept, or None when no folder can be written: then each start compiles again."""
    try:
        return folders.cache_folder(os.environ, []) / "kernels"
    except InputError:
        return None
