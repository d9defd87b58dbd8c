"""The persistent engine: one kernel decodes a few tokens, from the embedding of the first to the id of the last (kernels/persistent/).

It is the graph engine with another way to decode. Prompts, pages, buffers, the choice of a token and all of the contract's housekeeping are
that engine's. A launch decodes up to ``CHUNK`` tokens and leaves each id in the host's memory as soon as it is chosen, behind a
fence that reaches the host: the host reads it there while the kernel goes on with the next token. So a stream costs one launch a
chunk, and text still appears token by token.

A draw needs all logits, which the kernel leaves behind its last token: such a step is a launch of one token and, behind it, the sampling kernel.

All CTAs of the kernel wait for each other, so all must be on the card at once. The launch is a cooperative one, which the driver refuses when
they cannot; nothing else of this process runs beside it, because everything goes through one stream. Another process may: it delays the
kernel, and only one that holds an SM for seconds would wake the kernel's watchdog, which ends the kernel rather than waiting for ever.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import cupy

from nanoqwen.cuda.constants import LaunchShape, check_supported
from nanoqwen.cuda.launch import is_busy
from nanoqwen.cuda.persistent import PersistentKernel
from nanoqwen.cuda.persistent_plan import CHUNK
from nanoqwen.cuda.weights import DeviceModel
from nanoqwen.engines.hopper import HopperEngine
from nanoqwen.errors import DeviceError
from nanoqwen.sampling import Sampler

#: A stream's next chunk is launched while so many tokens of the one before are still to be read: the card does not wait when the host is busy elsewhere
#: for some milliseconds. The price is paid at a stop, where what is under way is computed for nobody.
LEAST = 5
#: What stands in the host's memory where an id will come. No id, and not the -1 of logits that are not finite.
UNTOLD = -2
#: Looks at that memory between two questions whether the kernel has failed.
LOOKS = 200


class PersistentEngine(HopperEngine):
    """Weights, pages and the persistent kernel of one model on one card.

    ``settings`` are overrides of ``persistent_plan.SETTINGS``. Raises like ``PersistentKernel`` for a model or a card that the kernel does not
    take. When its watchdog has ended the kernel, every call is a DeviceError that says who waited for what: the driver then refuses
    this process anything more on the card.
    """

    def __init__(
        self, weights: DeviceModel, *, cache: Path | None = None, context_limit: int | None = None, shape: LaunchShape | None = None,
        settings: dict[str, int | bool] | None = None,
    ) -> None:
        check_supported(weights.dims, weights.group)
        shape = shape or LaunchShape(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["multiProcessorCount"])
        self._kernel = PersistentKernel(weights, shape, cache, settings)
        self._chunks: dict[tuple[int, bool], cupy.cuda.Graph] = {}
        super().__init__(weights, name="persistent", cache=cache, context_limit=context_limit, shape=shape)

    # ------------------------------------------------------------------------------------------------------- launches

    def _make_launches(self) -> None:
        """The graph engine's launches, uncaptured: what the ladder compares the kernel with. And graphs of this kernel's."""
        self._chunks = {}
        super()._make_launches()
        for tokens in (1, CHUNK):
            self._chunk(tokens, draws=False)

    def _chunk(self, tokens: int, draws: bool) -> cupy.cuda.Graph:
        """The graph of a launch of ``tokens`` tokens, captured when it is first needed."""
        found = self._chunks.get((tokens, draws))
        if found is None:
            launches = [self._kernel.launch(self._buffers, self._pages.pool, tokens, chooses=not draws)]
            if draws:
                launches.append(self._ends[True][-1].serial())  # `sample`; it must not begin while CTAs before it still wait for each other
            try:
                found = self._chunks[tokens, draws] = self._capture(launches)
            except Exception as e:
                self._explain(e)
                raise
        return found

    # [launch]
    def _launch(self, position: int, draws: bool = False, tokens: int = 1) -> None:
        """Enqueue ``tokens`` steps from ``position`` on, the first of whose scalars lies on the card or will by then; returns at once."""
        self._hold(position + tokens)
        self._follow_pool()
        self._chunk(tokens, draws).launch(self._stream)
    # [/launch]

    def run_ahead(self, token: int, count: int) -> None:
        self._place(token, self.position)
        launched = 0
        while launched < count:
            tokens = self._room(self.position + launched, count - launched)
            self._launch(self.position + launched, tokens=tokens)
            launched += tokens

    def _room(self, position: int, most: int) -> int:
        """Tokens of the next chunk. None reaches into a second page: so one that finds no memory has none of its tokens' pages."""
        return min(CHUNK, most, self._kv.page_tokens - position % self._kv.page_tokens)

    # --------------------------------------------------------------------------------------------------- many steps

    # [stream]
    def _stream_ids(self, token: int, count: int, chooser: Sampler) -> Generator[int, None, None]:
        if not chooser.on_device or chooser.params.temperature:
            yield from super()._stream_ids(token, count, chooser)
            return
        start, launched = self.position, 0
        with self._as_before_on_error():
            self._tell(chooser)
            self._stream.synchronize()  # a chunk of a stream that was left may still be telling ids
            self._place(token, start)
            for read in range(count):
                while launched < count and launched <= read + LEAST:
                    at = start + launched
                    tokens = self._room(at, count - launched)
                    self._buffers.told[at : at + tokens] = UNTOLD
                    try:
                        self._launch(at, tokens=tokens)
                    except (DeviceError, cupy.cuda.memory.OutOfMemoryError):
                        if launched == read:
                            raise
                        break  # what is under way can still be read; then this one is tried again
                    launched += tokens
                self._await(start + read)
                chosen = self._chosen(start + read, chooser)
                self._tokens.append(token)
                token = chosen
                yield token
    # [/stream]

    # [await]
    def _await(self, at: int) -> None:
        """Return when the id after the token at ``at`` has been told. Raises DeviceError when it will not be."""
        told = self._buffers.told
        while True:
            for _ in range(LOOKS):
                if told[at] != UNTOLD:
                    return
                time.sleep(0)  # lets other threads run
            if not is_busy(self._stream) and told[at] == UNTOLD:
                raise DeviceError("the persistent kernel ended without an id; use --engine graph")
    # [/await]

    # --------------------------------------------------------------------------------------------------- when it fails

    def _explain(self, error: Exception) -> None:
        """Raise the one line that says more than ``error``, if there is one."""
        if story := self._kernel.story():
            raise DeviceError(story) from None
        if "cooperativelaunchtoolarge" in str(error).replace("_", "").lower():
            raise DeviceError(
                f"the card cannot have the {self._kernel.size['ctas']} CTAs of the persistent kernel at once (MPS may have given this process a part of it); use --engine graph"
            ) from None

    @contextmanager
    def _as_before_on_error(self) -> Iterator[None]:
        try:
            with super()._as_before_on_error():
                yield
        except Exception as e:
            self._explain(e)
            raise

    def _check_open(self) -> None:
        super()._check_open()
        if story := self._kernel.story():
            raise DeviceError(story)

    def _close(self) -> None:
        try:
            super()._close()
        except Exception:
            if not self._kernel.story():  # after that nothing on the card answers
                raise
        self._chunks, self._kernel = {}, None
