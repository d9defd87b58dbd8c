"""The Hopper engines: hand-written kernels, launched one by one ("eager") or as a captured CUDA graph ("graph").

Both hold the same weights, pages and list of launches; they differ in how a step reaches the card. The graph engine
captures that list twice, once with ``page_open`` in front (at a position that begins a page) and once without, and
picks by ``position % page_tokens``. Nothing is patched in a graph: token, position and page lie in device memory
and are written there before the launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cupy
import numpy as np

from nanoqwen import cache as folders
from nanoqwen.config import load_settings
from nanoqwen.cuda.constants import LaunchShape, check_supported, constants_header
from nanoqwen.cuda.decode import DecodeBuffers, decode_launches, head_launches
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.memory import check_fits
from nanoqwen.cuda.pages import DevicePages
from nanoqwen.cuda.prefill import CHUNK, Prefill
from nanoqwen.cuda.weights import DeviceModel, upload
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError, NonFiniteError
from nanoqwen.kv import pages_for
from nanoqwen.packfile import PackFile, Progress


class HopperEngine(Engine):
    """Weights, pages and launches of one model on one card. ``name`` is "eager" or "graph"."""

    def __init__(self, weights: DeviceModel, *, name: str = "graph", cache: Path | None = None, context_limit: int | None = None, shape: LaunchShape | None = None) -> None:
        check_supported(weights.dims, weights.group)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.name = name
        dims = weights.dims
        limit = context_limit or dims.max_position
        super().__init__(
            dims, weights.group, device=properties["name"].decode(), context_limit=limit,
            description=f"INT4 weights, FP16 KV pages, {'one CUDA graph a token' if name == 'graph' else 'one launch a kernel'}",
        )  # fmt: skip
        self._weights = weights
        self._shape = shape or LaunchShape(properties["multiProcessorCount"])
        self._stream = cupy.cuda.Stream(non_blocking=True)  # capture needs a non-blocking one
        self._kernels = Kernels(constants_header(dims, weights.group, self._shape), cache)
        spec = load_settings().kv
        with self._stream:
            self._buffers = DecodeBuffers(dims, weights.group, self._shape, pages_for(limit, spec.page_tokens))
            self._prefiller = Prefill(self._kernels, weights, self._buffers, min(CHUNK, limit))
            self._head = head_launches(self._kernels, weights, self._buffers, self._shape, None)
            self._pages = DevicePages(dims, spec, limit, cupy)
            self._make_launches()
        self._stream.synchronize()

    def _make_launches(self) -> None:
        """The launches of both variants, with page_open in front and without, and their graphs; again whenever the pool moved."""
        self._launches = {
            opens: decode_launches(self._kernels, self._weights, self._buffers, self._pages.pool, self._shape, opens_page=opens) for opens in (True, False)
        }
        self._graphs: dict[bool, cupy.cuda.Graph] = {}
        if self.name == "graph":
            self._graphs = {opens: self._capture(launches) for opens, launches in self._launches.items()}

    def _capture(self, launches: list[Launch]) -> cupy.cuda.Graph:
        self._stream.begin_capture()
        for launch in launches:
            launch(self._stream)
        return self._stream.end_capture()

    def _hold(self, tokens: int) -> list[int]:
        """Pages for ``tokens`` tokens; returns those newly taken."""
        fresh, moved = self._pages.ensure(tokens)
        if moved:
            self._make_launches()
        return fresh

    def _prefill(self, ids: list[int]) -> np.ndarray:
        start = self.position
        try:
            with self._stream:
                for i in range(0, len(ids), CHUNK):
                    chunk, at = ids[i : i + CHUNK], start + i
                    fresh = self._hold(at + len(chunk))
                    self._pages.clear(fresh)
                    if fresh:
                        held = len(self._pages.table.pages)
                        self._buffers.block_table[held - len(fresh) : held] = cupy.asarray(fresh, dtype=np.int32)
                    self._prefiller.run(chunk, at, self._pages.pool, self._stream)
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
        with self._stream:
            fresh = self._hold(self.position + 1)
        opens, page = bool(fresh), fresh[0] if fresh else 0  # page_open writes the block table and clears the page
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
        self._pages.truncate(position)

    def _close(self) -> None:
        self._stream.synchronize()
        self._graphs, self._launches, self._head = {}, {}, []
        self._kernels = None
        self._pages = self._buffers = self._prefiller = self._weights = None


def open_hopper(
    pack: PackFile, name: str, *, owns_pack: bool = False, context_limit: int | None = None, progress: Progress | None = None
) -> HopperEngine:
    """The "eager" or "graph" engine with the weights of ``pack`` copied to the card.

    The file is not needed afterwards and is closed if it is owned. Raises like ``open_on_card``.
    """
    engine = open_on_card(pack, name, context_limit, lambda shape: upload(pack, progress))
    if owns_pack:
        pack.close()
    return engine


def open_on_card(pack: PackFile, name: str, context_limit: int | None, make_weights: Callable[[LaunchShape], DeviceModel]) -> HopperEngine:
    """Check everything that can be known of ``pack``'s dimensions, then make the weights on the card and the engine on them.

    Raises InputError for dimensions that the kernels do not take and for a context beyond the model's, DeviceError when the card has
    too little memory: what is needed and what is free, before anything is made.
    """
    dims, group = pack.dims, pack.group_size
    check_supported(dims, group)
    limit = context_limit or dims.max_position
    if limit > dims.max_position:
        raise InputError(f"a context of {limit} tokens is more than the model's {dims.max_position}; ask for that or less")
    shape = LaunchShape(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"])
    check_fits(dims, group, shape, limit, min(CHUNK, limit), cupy.cuda.runtime.memGetInfo()[0], "cuda")
    try:
        weights = make_weights(shape)
        # They were made on CuPy's current stream, which the engine's own, non-blocking one does not wait for.
        cupy.cuda.runtime.deviceSynchronize()
        return HopperEngine(weights, name=name, cache=kernel_cache(), context_limit=limit)
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise DeviceError(f"the card has too little memory for weights, workspace and the first KV pages: {e}") from None


def kernel_cache() -> Path | None:
    """Where compiled kernels are kept, or None when no folder can be written: then each start compiles again."""
    try:
        return folders.cache_folder(os.environ, []) / "kernels"
    except InputError:
        return None
