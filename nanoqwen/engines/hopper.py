"""The Hopper engines: hand-written kernels, launched one by one ("eager") or as a captured CUDA graph ("graph"). The third, "persistent", has
a module of its own, ``nanoqwen/engines/persistent.py``.

Both hold the same weights, pages and list of launches; they differ in how a step reaches the card. The graph engine
captures that list twice, once with ``page_open`` in front (at a position that begins a page) and once without, and
picks by ``position % page_tokens``. Nothing is patched in a graph: token and position lie in device memory.

Who writes them there makes two ways to decode. ``step`` has the host write them before each launch: it must know the
token, so it waits for the step before. In a ``stream`` the last kernel of a step writes them for the next one, and leaves the
id in the host's memory: the host launches several steps ahead and reads ids as they arrive. It knows the position of
each of those steps, hence which variant to launch and when a page is due; it need not know a token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from nanoqwen import cache as folders
from nanoqwen.config import load_settings
from nanoqwen.cuda.choice import allowed_words, rule
from nanoqwen.cuda.constants import PREFILL_CHUNK, LaunchShape, check_supported, constants_header
from nanoqwen.cuda.decode import DecodeBuffers, decode_launches, end_launches
from nanoqwen.cuda.launch import Kernels, Launch
from nanoqwen.cuda.memory import check_fits
from nanoqwen.cuda.pages import DevicePages
from nanoqwen.cuda.persistent_plan import compile_persistent
from nanoqwen.cuda.prefill import Prefill
from nanoqwen.cuda.weights import DeviceModel, upload
from nanoqwen.engines.base import Engine
from nanoqwen.errors import DeviceError, InputError, NonFiniteError
from nanoqwen.kv import pages_for
from nanoqwen.packfile import PackFile, Progress
from nanoqwen.sampling import GREEDY, Sampler

#: Steps of a stream that are launched before the first of them has been read. Two would keep the card busy; the others bridge what a
#: caller does between two ids (printing, a collection of garbage). All but one are lost when a reply ends.
AHEAD = 4
#: Random numbers of a stream that go to the card together.
DRAWS = 256
_HOW = {"eager": "one launch a kernel", "graph": "one CUDA graph a token", "persistent": "one kernel for a few tokens"}


class HopperEngine(Engine):
    """Weights, pages and launches of one model on one card. ``name`` is "eager" or "graph".

    Tokens are chosen on the card: greedy, temperature, top-k, top-p. A repetition penalty, which needs the ids so far, and
    temperatures outside ``sampling.DEVICE_TEMPERATURES`` are left to the host, at the price of all logits and of working ahead.
    """

    works_ahead = True

    def __init__(self, weights: DeviceModel, *, name: str = "graph", cache: Path | None = None, context_limit: int | None = None, shape: LaunchShape | None = None) -> None:
        check_supported(weights.dims, weights.group)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.name = name
        dims = weights.dims
        limit = context_limit or dims.max_position
        super().__init__(
            dims, weights.group, device=properties["name"].decode(), context_limit=limit,
            description=f"INT4 weights, FP16 KV pages, {_HOW[name]}",
        )  # fmt: skip
        self._weights = weights
        self._shape = shape or LaunchShape(properties["multiProcessorCount"])
        self._stream = cupy.cuda.Stream(non_blocking=True)  # capture needs a non-blocking one
        self._kernels = Kernels(constants_header(dims, weights.group, self._shape), cache)
        self._kv = load_settings().kv
        self._arrivals = [cupy.cuda.Event(disable_timing=True) for _ in range(AHEAD)]
        self._told_by: Sampler | None = None  # whose rule lies on the card
        with self._stream:
            self._buffers = DecodeBuffers(dims, weights.group, self._shape, pages_for(limit, self._kv.page_tokens))
            self._prefiller = Prefill(self._kernels, weights, self._buffers, self._shape, min(PREFILL_CHUNK, limit), None if name == "eager" else self._capture)
            self._pages = DevicePages(dims, self._kv, limit, cupy)
            self._tell(Sampler(GREEDY, weights.entries))
            self._make_launches()
            self._prefiller.prepare(self._pages.pool, self._stream)
        self._stream.synchronize()

    # ------------------------------------------------------------------------------------------------------- launches

    def _make_launches(self) -> None:
        """The launches of a greedy step in both variants, with page_open in front and without, those that end a prompt, greedy and drawing, and their
        graphs. Those of a step that draws are made when the first one is asked for; all of them again after the pool moved."""
        launches = self._variants(draws=False)
        graphs = self._captured(launches)
        ends = {draws: end_launches(self._kernels, self._weights, self._buffers, self._pages.pool, self._shape, draws=draws) for draws in (False, True)}
        end_graphs = {} if self.name == "eager" else {draws: self._capture(end) for draws, end in ends.items()}
        self._launches, self._graphs, self._ends, self._end_graphs, self._drawing = launches, graphs, ends, end_graphs, None
        self._made_for = self._pages.pool  # last: an interruption before it makes them again

    def _variants(self, draws: bool) -> dict[bool, list[Launch]]:
        return {
            opens: decode_launches(self._kernels, self._weights, self._buffers, self._pages.pool, self._shape, opens_page=opens, draws=draws)
            for opens in (True, False)
        }

    # [capture]
    def _captured(self, variants: dict[bool, list[Launch]]) -> dict[bool, cupy.cuda.Graph]:
        return {opens: self._capture(launches) for opens, launches in variants.items()} if self.name == "graph" else {}

    def _capture(self, launches: list[Launch]) -> cupy.cuda.Graph:
        self._stream.begin_capture()
        try:
            for launch in launches:
                launch(self._stream)
        except BaseException:
            with suppress(Exception):  # a stream that goes on capturing would refuse everything else
                self._stream.end_capture()
            raise
        return self._stream.end_capture()
    # [/capture]

    def _follow_pool(self) -> None:
        """Make the launches again if the pool moved."""
        if self._made_for is not self._pages.pool:
            self._stream.synchronize()  # steps may be under way with the old ones
            self._make_launches()

    # [launch]
    def _launch(self, position: int, draws: bool = False) -> None:
        """Enqueue the step at ``position``, whose scalars lie on the card or will by then; returns at once."""
        self._hold(position + 1)
        self._follow_pool()
        if draws and self._drawing is None:
            launches = self._variants(draws=True)
            self._drawing = launches, self._captured(launches)
        launches, graphs = self._drawing if draws else (self._launches, self._graphs)
        self._enqueue(launches, graphs, position % self._kv.page_tokens == 0)

    def _enqueue(self, launches: dict[bool, list[Launch]], graphs: dict[bool, cupy.cuda.Graph], which: bool) -> None:
        if graphs:
            graphs[which].launch(self._stream)
        else:
            for launch in launches[which]:
                launch(self._stream)
    # [/launch]

    def _hold(self, tokens: int) -> list[int]:
        """Pages for ``tokens`` tokens, entered in the block table; returns those newly taken."""
        with self._stream:
            fresh, _ = self._pages.ensure(tokens)
        if fresh:
            held = len(self._pages.table.pages)
            self._buffers.block_table[held - len(fresh) : held].set(np.array(fresh, dtype=np.int32), stream=self._stream)
        return fresh

    # [place]
    def _place(self, token: int, position: int) -> None:
        """Write the scalars of a step: decode ``token`` at ``position``."""
        self._buffers.step.set(np.array([token, position, -1], dtype=np.int32), stream=self._stream)
    # [/place]

    # ------------------------------------------------------------------------------------------- one call, one step

    def _prefill(self, ids: list[int]) -> np.ndarray:
        with self._as_before_on_error():
            self._run_prompt(ids, draws=False)
            return self._logits(self.position + len(ids) - 1)

    def _prefill_next(self, ids: list[int], chooser: Sampler) -> int:
        if not chooser.on_device:
            return super()._prefill_next(ids, chooser)
        with self._as_before_on_error():
            at, draws = self.position + len(ids) - 1, self._tell(chooser)
            self._send_numbers(chooser, at, 1)
            self._run_prompt(ids, draws)
            self._stream.synchronize()
            return self._chosen(at, chooser)

    def _run_prompt(self, ids: list[int], draws: bool) -> None:
        start = self.position
        with self._stream:
            self._hold(start + len(ids))
            self._follow_pool()
            for i in range(0, len(ids), PREFILL_CHUNK):
                chunk, at = ids[i : i + PREFILL_CHUNK], start + i
                # Attention reads whole pages. Rows up to the chunk's end are written before; what others left behind them may be NaN.
                self._pages.clear_tail(at + len(chunk))
                self._prefiller.run(chunk, at, self._pages.pool, self._stream)
            self._enqueue(self._ends, self._end_graphs, draws)

    def _decode(self, token: int) -> np.ndarray:
        with self._as_before_on_error():
            self.step(token)
            return self._logits(self.position)

    def step(self, token: int) -> None:
        """Enqueue one greedy step at ``position`` with scalars that the host writes; returns at once.

        Nothing is held of it yet. ``decode`` and ``decode_next`` are this and a way to wait.
        """
        self._place(token, self.position)
        self._launch(self.position)

    def _decode_next(self, token: int, chooser: Sampler) -> int:
        if not chooser.on_device:
            return super()._decode_next(token, chooser)
        with self._as_before_on_error():
            at, draws = self.position, self._tell(chooser)
            self._send_numbers(chooser, at, 1)
            self._place(token, at)
            self._launch(at, draws)
            self._stream.synchronize()
            return self._chosen(at, chooser)

    def _logits(self, at: int) -> np.ndarray:
        logits = self._buffers.logits[: self.dims.vocab].get(stream=self._stream)
        self._check_finite(int(self._buffers.told[at]))
        return logits

    def _chosen(self, at: int, chooser: Sampler) -> int:
        """The id chosen after the token at ``at``, whose step has finished."""
        chosen = self._check_finite(int(self._buffers.told[at]))
        if chooser.params.temperature:
            chooser.drew()
        return chosen

    @staticmethod
    def _check_finite(chosen: int) -> int:
        if chosen < 0:
            raise NonFiniteError("the logits are not finite; run with --engine cpu to learn the layer")
        return chosen

    # --------------------------------------------------------------------------------------------------- many steps

    # [stream]
    def _stream_ids(self, token: int, count: int, chooser: Sampler) -> Generator[int, None, None]:
        if not chooser.on_device:
            yield from super()._stream_ids(token, count, chooser)
            return
        start, launched = self.position, 0
        with self._as_before_on_error():
            draws = self._tell(chooser)
            self._place(token, start)
            for read in range(count):
                while launched < min(count, read + AHEAD):
                    try:
                        if draws and launched % DRAWS == 0:
                            self._send_numbers(chooser, start + launched, min(DRAWS, count - launched), skip=launched - read)
                        self._launch(start + launched, draws)
                    except (DeviceError, cupy.cuda.memory.OutOfMemoryError):
                        if launched == read:
                            raise
                        break  # what is under way can still be read; then this one is tried again
                    self._arrivals[launched % AHEAD].record(self._stream)
                    launched += 1
                self._arrivals[read % AHEAD].synchronize()
                chosen = self._chosen(start + read, chooser)
                self._tokens.append(token)
                token = chosen
                yield token
    # [/stream]

    def run_ahead(self, token: int, count: int) -> None:
        """Enqueue ``count`` greedy steps from ``position`` on that follow each other without the host; returns at once.

        For measurements: nothing is held of them. ``drop_ahead`` puts the cache back.
        """
        self._place(token, self.position)
        for k in range(count):
            self._launch(self.position + k)

    def drop_ahead(self) -> None:
        """Drop what was computed behind ``position``."""
        self._rewind(self.position)

    def _tell(self, chooser: Sampler) -> bool:
        """Have the card choose as ``chooser`` does; returns whether that is a draw."""
        if chooser is not self._told_by:
            self._buffers.allowed.set(allowed_words(self.dims.vocab, chooser.valid_ids, chooser.banned_ids), stream=self._stream)
            self._buffers.rule.set(rule(chooser), stream=self._stream)
            self._told_by = chooser
        return chooser.params.temperature > 0

    def _send_numbers(self, chooser: Sampler, at: int, count: int, skip: int = 0) -> None:
        """The random numbers of ``count`` draws from position ``at`` on, those after the next ``skip``. They are used up as ids are read."""
        if chooser.params.temperature:
            self._buffers.random[at : at + count].set(chooser.upcoming(skip + count)[skip:], stream=self._stream)

    # --------------------------------------------------------------------------------------------------- housekeeping

    @contextmanager
    def _as_before_on_error(self) -> Iterator[None]:
        """Whatever goes wrong inside, the cache ends at ``position``; the card's own "out of memory" becomes one line."""
        try:
            yield
        except cupy.cuda.memory.OutOfMemoryError as e:
            self._rewind(self.position)
            raise DeviceError(f"the card has no memory left for more KV pages after {self.position} tokens ({str(e).rstrip('.')}); the engine goes on with these") from None
        except BaseException:
            self._rewind(self.position)
            raise

    def _rewind(self, position: int) -> None:
        self._pages.truncate(position)
        with self._stream:
            self._pages.clear_tail(position)

    def _close(self) -> None:
        self._stream.synchronize()
        self._graphs, self._launches, self._ends, self._end_graphs, self._drawing, self._made_for = {}, {}, {}, {}, None, None
        self._kernels = self._told_by = None
        self._pages = self._buffers = self._prefiller = self._weights = None


def open_hopper(
    pack: PackFile, name: str, *, owns_pack: bool = False, context_limit: int | None = None, progress: Progress | None = None
) -> HopperEngine:
    """The Hopper engine of that name with the weights of ``pack`` copied to the card.

    The file is not needed afterwards and is closed if it is owned. Raises like ``open_on_card``.
    """
    engine = open_on_card(pack, name, context_limit, lambda shape: upload(pack, progress))
    if owns_pack:
        pack.close()
    return engine


def open_on_card(pack: PackFile, name: str, context_limit: int | None, make_weights: Callable[[LaunchShape], DeviceModel]) -> HopperEngine:
    """Check everything that can be known of ``pack``'s dimensions, then make the weights on the card and the engine on them.

    Raises InputError for dimensions that the kernels do not take and for a context beyond the model's, DeviceError for those that only the
    persistent one does not take, and when the card has too little memory: what is needed and what is free, before anything is made.
    """
    dims, group = pack.dims, pack.group_size
    check_supported(dims, group)
    limit = context_limit or dims.max_position
    if limit > dims.max_position:
        raise InputError(f"a context of {limit} tokens is more than the model's {dims.max_position}; ask for that or less")
    shape = LaunchShape(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"])
    if name == "persistent":
        compile_persistent(dims, group, shape, kernel_cache())  # says whether it takes this model; the engine finds it in the cache
    check_fits(dims, group, shape, limit, min(PREFILL_CHUNK, limit), cupy.cuda.runtime.memGetInfo()[0], "cuda")
    try:
        weights = make_weights(shape)
        # They were made on CuPy's current stream, which the engine's own, non-blocking one does not wait for.
        cupy.cuda.runtime.deviceSynchronize()
        return make_engine(weights, name, cache=kernel_cache(), context_limit=limit)
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise DeviceError(f"the card has too little memory for weights, workspace and the first KV pages: {e}") from None


def make_engine(weights: DeviceModel, name: str, **options: Any) -> HopperEngine:
    """The engine of that name on ``weights``; ``options`` are those of its constructor."""
    if name == "persistent":
        from nanoqwen.engines.persistent import PersistentEngine  # it builds on this module

        return PersistentEngine(weights, **options)
    return HopperEngine(weights, name=name, **options)


def kernel_cache() -> Path | None:
    """Where compiled kernels are kept, or None when no folder can be written: then each start compiles again."""
    try:
        return folders.cache_folder(os.environ, []) / "kernels"
    except InputError:
        return None
