"""The Hopper engines under test: their launches one by one, their buffers and pages, whole blocks.

Like nanoqwen/bench/card.py this looks behind the Engine contract on purpose. What is launched are the very objects that the
engine runs or has captured; they are found by name and region, and their arguments are never touched: an input is written into
the named buffer that a kernel reads, a result is read from the buffer that it writes.

Everything goes through the engine's own stream, so it happens in the order in which it is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import cupy
import numpy as np

from nanoqwen.config import load_settings
from nanoqwen.cuda.launch import Launch
from nanoqwen.engines.hopper import HopperEngine
from nanoqwen.kv import pages_for
from nanoqwen.ladder import layouts

#: The buffers that projections leave their partial sums in. Parts that no CTA writes are zero from the beginning and must stay it.
PARTS = ("qkv", "o", "gate_up", "down", "logit_parts")


class Card:
    """An open Hopper engine, seen from inside. It is left without tokens, with its parts zero, and usable."""

    def __init__(self, engine: HopperEngine) -> None:
        self.engine, self.dims, self.group = engine, engine.dims, engine.group
        self.page_tokens = load_settings().kv.page_tokens
        self.buffers, self.stream, self.weights = engine._buffers, engine._stream, engine._weights
        self.name = f"engine {engine.name} on {engine.device}: {engine.description}"
        #: Kernels that were run twice on the same input, and results of theirs that then differed.
        self.repeated: set[str] = set()
        self.unequal: list[str] = []
        engine.reset()

    # ---------------------------------------------------------------------------------------------------- launches

    def step(self, opens_page: bool = False) -> list[Launch]:
        """All launches of one token."""
        return self.engine._launches[opens_page]

    def launch(self, name: str) -> Launch:
        """The one launch of that name outside the layers (embed, final_norm, lm_head, argmax, page_open)."""
        return next(launch for launch in self.step(True) if launch.name == name)

    def layer(self, layer: int) -> list[Launch]:
        """The launches of decoder block ``layer``: what lies between the embedding and the final norm, in equal shares."""
        step = self.step()
        first = next(k for k, launch in enumerate(step) if launch.name != "embed")
        last = next(k for k, launch in enumerate(step) if launch.name in ("final_norm", "lm_head"))
        each, rest = divmod(last - first, self.dims.num_layers)
        assert rest == 0, "every layer has the same launches"
        return step[first + layer * each : first + (layer + 1) * each]

    def of(self, layer: int, *, name: str | None = None, region: str | None = None) -> list[Launch]:
        """The launches of a layer that have this name or count for this region of a token's latency."""
        return [launch for launch in self.layer(layer) if name == launch.name or (region is not None and region == launch.region)]

    def run(self, launches: Sequence[Launch], prepare: Callable[[], None], outputs: dict[str, cupy.ndarray]) -> dict[str, np.ndarray]:
        """Prepare, launch and read ``outputs``; all of it twice, to see whether the bits are the same."""
        runs = []
        for _ in range(2):
            prepare()
            for launch in launches:
                launch(self.stream)
            runs.append({name: self.read(array) for name, array in outputs.items()})
        names = "+".join(dict.fromkeys(launch.name for launch in launches))
        self.repeated.add(names)
        self.unequal += [f"{names}: {name}" for name in outputs if runs[0][name].tobytes() != runs[1][name].tobytes()]
        return runs[0]

    # --------------------------------------------------------------------------------------------- buffers and pages

    def write(self, array: cupy.ndarray, values: np.ndarray) -> None:
        """Values into a contiguous array of the same number of elements, rounded to its type."""
        array.set(np.ascontiguousarray(np.asarray(values), dtype=array.dtype).reshape(array.shape), stream=self.stream)

    def read(self, array: cupy.ndarray) -> np.ndarray:
        """A copy on the host, when everything before it is done."""
        with self.stream:
            found = array.get()
        self.stream.synchronize()
        return found

    def at(self, token: int, position: int) -> None:
        """What changes from token to token."""
        self.write(self.buffers.step, np.array([token, position, -1]))

    def clear_parts(self) -> None:
        """Zeros in all partial sums."""
        with self.stream:
            for name in PARTS:
                getattr(self.buffers, name).fill(0)

    @property
    def pool(self) -> cupy.ndarray:
        """float16 [layers, 2, pages, page]."""
        return self.engine._pages.pool

    def reserve(self, tokens: int) -> None:
        """Let the pool have pages for that many tokens. The launches are other objects afterwards if it had to grow."""
        with self.stream:
            self.engine._hold(tokens)
            self.engine._follow_pool()
            self.engine._rewind(0)

    def lay_out(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """A sequence of ``tokens`` tokens in shuffled pages: NaN in every page, the block table written. Returns the table.

        Entries of the table past the sequence name a page that it does not own, where the pool has one.
        """
        pages = self.pool.shape[2]
        order = rng.permutation(pages)
        count = pages_for(tokens, self.page_tokens)
        table = np.full(self.buffers.block_table.shape, order[count] if count < pages else order[0])
        table[:count] = order[:count]
        self.write(self.buffers.block_table, table)
        with self.stream:
            self.pool.fill(np.nan)
        return table[:count]

    def put(self, layers: slice, table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Keys and values [n, G, D] of ``layers`` into the pages that ``table`` begins with; rows past the end of a page are zero."""
        for kind, rows in enumerate((keys, values)):
            pages = layouts.to_pages(rows, self.dims, self.page_tokens)
            with self.stream:
                self.pool[layers, kind][:, cupy.asarray(table[: len(pages)])] = cupy.asarray(pages)

    def zero(self, layers: slice, pages: np.ndarray) -> None:
        """What whoever takes a page does: zeros in it."""
        if len(pages):
            with self.stream:
                self.pool[layers][:, :, cupy.asarray(pages)] = 0

    def take(self, layer: int, table: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values float16 [n, G, D] of a layer, read from their pages."""
        with self.stream:
            pages = [self.pool[layer, kind][cupy.asarray(table)] for kind in (0, 1)]
        order = np.arange(len(table))
        return tuple(layouts.from_pages(self.read(p), order, n, self.dims, self.page_tokens) for p in pages)

    # ------------------------------------------------------------------------------------------------------- prefill

    def chunk(self, ids: Sequence[int], position: int) -> list[Launch]:
        """The launches of the engine's prefill of one chunk, for exactly its tokens, with span and ids on the card, and behind them the rest of the last
        layer, which prompts do not need. They are the engine's own: good until the next chunk."""
        prefiller = self.engine._prefiller
        prefiller.tell(ids, position, self.stream)
        return prefiller.launches(len(ids), position, self.pool, whole=True)

    def layer_of(self, chunk: Sequence[Launch], layer: int) -> list[Launch]:
        """The launches of decoder block ``layer``: what lies behind embed_rows, in equal shares. The last layer has last_row among its own."""
        each, rest = divmod(len(chunk) - 2, self.dims.num_layers)
        assert rest == 0, "every layer has the same launches"
        return list(chunk[1 + layer * each :][: each + (layer == self.dims.num_layers - 1)])

    @contextmanager
    def tidy(self) -> Iterator[Card]:
        """Whatever happens inside, the engine is without tokens and its parts are zero afterwards."""
        try:
            self.clear_parts()
            yield self
        finally:
            self.clear_parts()
            self.engine.reset()


class CardBlocks:
    """Decoder blocks run one at a time by the engine's own launches. The methods are those of ``subject.TorchBlocks``.

    A chunk of one token goes through the decode launches of its layer, a longer one through prefill. Pages lie in shuffled order
    between pages full of NaN.
    """

    decodes = True  # so the layer tier also feeds all tokens one by one

    def __init__(self, card: Card) -> None:
        self.card, self.dims = card, card.dims
        self.name = f"{card.name}, one layer's launches at a time"
        self._rng = np.random.default_rng(0)

    def run(self, layer: int, x: np.ndarray, chunks: Sequence[int]) -> np.ndarray:
        """Block ``layer`` on x float32 [n, hidden] from position 0, fed in ``chunks`` of tokens -> float32 [n, hidden]."""
        card, outputs, at = self.card, [], 0
        with card.tidy():
            table = card.lay_out(sum(chunks), self._rng)
            for n in chunks:
                card.zero(slice(layer, layer + 1), table[pages_for(at, card.page_tokens) : pages_for(at + n, card.page_tokens)])
                rows = x[at : at + n]
                outputs.append(self._decode(layer, rows, at) if n == 1 else self._prefill(layer, rows, at))
                at += n
        return np.concatenate(outputs)

    def _decode(self, layer: int, row: np.ndarray, position: int) -> np.ndarray:
        card, b = self.card, self.card.buffers
        with card.stream:
            b.down.fill(0)  # the first norm of a layer adds the projection before it, which is not there
        card.write(b.residual, row)
        card.at(0, position)
        for launch in card.layer(layer):
            launch(card.stream)
        return (card.read(b.residual) + card.read(b.down).sum(axis=0, dtype=np.float64)[: self.dims.hidden]).astype(np.float32)[None]

    def _prefill(self, layer: int, rows: np.ndarray, position: int) -> np.ndarray:
        card, n, hidden = self.card, len(rows), self.dims.hidden
        p = card.engine._prefiller
        launches = card.layer_of(card.chunk([0] * n, position), layer)
        with card.stream:
            p.parts.fill(0)  # the first norm of a layer adds the projection before it, which is not there
            p.inner.fill(1)
        card.write(p.residual[:n], rows)
        for launch in launches:
            launch(card.stream)
        # The down projection's parts wait for the next norm to be added; here they are added on the host.
        work = p.work["down"]
        parts = card.read(p.parts[: work.slots * n * hidden]).reshape(-1, n, hidden)
        return (card.read(p.residual[:n]) + layouts.add_parts(parts, work, np.arange(n)) * card.read(p.inner[:n])[:, None]).astype(np.float32)

    def head(self, x: np.ndarray) -> np.ndarray:
        """Residual float32 [n, hidden] -> logits float32 [n, vocab], through the launches that end a step; the parts that they add to it are zero."""
        card, out = self.card, []
        with card.tidy():
            for row in x:
                card.write(card.buffers.residual, row)
                card.at(0, 0)
                for name in ("final_norm", "lm_head", "argmax"):
                    card.launch(name)(card.stream)
                out.append(card.read(card.buffers.logits)[: self.dims.vocab])
        return np.stack(out)
