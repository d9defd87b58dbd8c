"""Unit tier of the Hopper engines, prefill: its kernels watched while the engine's own launches run a chunk of a prompt.

A chunk is launched kernel by kernel. What one finds in the workspace is copied before it, what it leaves afterwards; the twin gets the
former and is compared with the latter. Some tokens and some rows of the matrices are looked at, those where tiles have their edges;
the kernels do all of them. How a product is cut depends on the chunk's length, so there is a length for every combination of kernels.

The tensor cores multiply weights that were rounded to FP16 once: code times scale, the scale brought up by a power of two
(kernels/prefill/gemm_int4.cuh). The twin rounds in the same place, which leaves the FP32 sums as the only error. Products of digits (gemm_digits.cuh) round no
weight, and neither does their twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import cupy
import numpy as np

from nanoqwen import model
from nanoqwen.cuda.attention_plan import ATTENTIONS
from nanoqwen.cuda.launch import Launch
from nanoqwen.cuda.prefill_plan import NORMS
from nanoqwen.kv import pages_for
from nanoqwen.ladder import layouts, twins
from nanoqwen.ladder.card import Card
from nanoqwen.ladder.report import Check, compare, none_wrong, within
from nanoqwen.packfile import PackFile

#: Chunks whose kernels are looked at, as far as the context allows: one of each way to make the four products, none a multiple of a tile.
CHUNKS = (5, 13, 21, 49, 110, 300, 1050)
#: (position, tokens) of chunks that follow what is in the cache already, as a conversation goes on: few queries on many pages have a kernel of
#: their own (nanoqwen/cuda/attention_plan.py), none a multiple of a step or a tile.
DEEP = ((70, 19), (501, 17), (1999, 66), (3500, 130))
#: Tokens of a chunk that are looked at: every edge of a 64- or 128-token tile, and of eight and sixteen.
EDGES = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 79, 80, 127, 128, 255, 256, 383, 447, 448, 495, 496, 510, 511)
#: Sums of up to 20,000 products inside the tensor cores, in one order.
PRODUCT_LIMIT = 4e-5
#: SiLU of such sums, by approximations that are good to a few units of FP32's last place, and rounded to FP16.
SWIGLU_LIMIT = 5e-4
#: Half a unit in the last place of FP16, relative, and half the step of its subnormal numbers.
FP16_ROUNDING, FP16_TINY = 2.0**-11, 2.0**-25


def tensors_of(layer: int) -> dict[str, tuple[str, ...]]:
    """The tensors that each product of a layer stacks."""
    p = f"model.layers.{layer}."
    return {
        "qkv": tuple(f"{p}self_attn.{x}_proj.weight" for x in "qkv"), "o": (p + "self_attn.o_proj.weight",),
        "gate_up": (p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"), "down": (p + "mlp.down_proj.weight",),
    }  # fmt: skip


def sample_rows(rows: int, size: int = 32) -> np.ndarray:
    """First and last rows of a matrix and some in the middle."""
    return np.unique(np.clip(np.r_[:size, rows // 2 + 5 : rows // 2 + 5 + size, rows - size : rows], 0, rows - 1))


def edges(n: int) -> np.ndarray:
    """Tokens of a chunk of ``n`` that are looked at."""
    return np.unique([t for t in (*EDGES, n - 2, n - 1) if 0 <= t < n])


def checks(pack: PackFile, card: Card, rng: np.random.Generator, limit: float, lengths: list[int], layers: list[int]) -> Iterator[Check]:
    """Every check of the prefill kernels; ``lengths`` are prompts whose last chunk meets attention's twin, ``layers`` those that are looked at."""
    chunk = card.engine._prefiller.chunk
    sizes = [n for n in CHUNKS if n <= chunk] or [chunk]
    square = lru_cache(maxsize=None)(lambda name: _largest_square(pack, name))
    for n in sizes:
        yield from _Chunk(pack, card, rng, limit, n, square).checks(layers if n == sizes[0] else layers[-1:])
    for n in lengths:
        position = (n - 1) // chunk * chunk
        yield from _attention(card, rng, limit, position, n - position, layers[-1] if n == lengths[-1] else 0)
    for position, n in DEEP:
        if position + n <= card.engine.context_limit:
            yield from _attention(card, rng, limit, position, n, layers[-1])


def _ids(card: Card, n: int) -> list[int]:
    """Varied ids: with one repeated token all values are equal, and page errors cancel."""
    return [pow(7, i, 9973) % card.dims.vocab for i in range(n)]


class _Chunk:
    """A prompt of ``n`` tokens from nothing, kernel by kernel."""

    def __init__(self, pack: PackFile, card: Card, rng: np.random.Generator, limit: float, n: int, square: Callable[[str], float]) -> None:
        self.square = square
        self.pack, self.card, self.limit, self.n, self.dims, self.group = pack, card, limit, n, card.dims, card.group
        self.tokens, self.prefiller = edges(n), card.engine._prefiller
        self.table = card.lay_out(n, rng)
        card.zero(slice(0, self.dims.num_layers), self.table)

    # ---------------------------------------------------------------------------------------------------- the workspace

    def rows(self, array: cupy.ndarray) -> np.ndarray:
        """The looked-at tokens of an array [n, ...], float64."""
        with self.card.stream:
            some = array[cupy.asarray(self.tokens)]
        return _wide(self.card.read(some))

    def x(self, array: cupy.ndarray, cols: int) -> np.ndarray:
        """The looked-at rows [tokens, cols] of a tiled activation, float64."""
        with self.card.stream:
            some = array[:, cupy.asarray(self.tokens)]
        return _wide(layouts.untile_x(self.card.read(some), self.tokens, cols, self.group))

    def digits(self, array: cupy.ndarray, cols: int, width: int) -> np.ndarray:
        """The looked-at rows [tokens, cols] of an activation as digits for a product of ``width`` tokens, float64."""
        return layouts.undigit_x(self.card.read(array), self.tokens, cols, width, self.group)

    def parts(self, name: str, rows: int) -> np.ndarray:
        """The sums of product ``name`` that came in parts, [tokens, rows]."""
        work, p = self.prefiller.work[name], self.prefiller
        with self.card.stream:
            some = p.parts[: work.slots * self.n * rows].reshape(-1, self.n, rows)[:, cupy.asarray(self.tokens)]
        return layouts.add_parts(self.card.read(some), work, self.tokens)

    def factor(self, array: cupy.ndarray) -> np.ndarray:
        return self.rows(array)[:, None]

    def appended(self, layer: int) -> np.ndarray:
        """Keys and values of the looked-at tokens, [2, tokens, G, D]."""
        return np.stack([a[self.tokens] for a in self.card.take(layer, self.table, self.n)])

    # --------------------------------------------------------------------------------------------------------- the checks

    def checks(self, layers: list[int]) -> Iterator[Check]:
        card, p, n = self.card, self.prefiller, self.n
        chain = card.chunk(_ids(card, n), 0)
        chain[0](card.stream)
        expected = twins.vector(self.pack, model.EMBED)[np.asarray(_ids(card, n))[self.tokens]]
        yield compare(f"{n} tokens: embed_rows", self.rows(p.residual), expected, 0.0, "bit for bit")
        for layer in range(self.dims.num_layers):
            mine = card.layer_of(chain, layer)
            if layer in layers:
                yield from self._layer(layer, mine)
            else:
                for launch in mine:
                    launch(card.stream)
        yield from self._again()

    def _layer(self, layer: int, launches: list[Launch]) -> Iterator[Check]:
        names = [launch.name for launch in launches]
        norms = iter(("input_layernorm", "post_attention_layernorm"))
        products = iter(tensors_of(layer).items())
        for launch in launches:
            label = f"layer {layer}, {self.n} tokens: {launch.name}"
            if launch.name in NORMS:
                gain = next(norms)
                yield from self._norm(f"{label} {1 + (gain != 'input_layernorm')}", launch, f"model.layers.{layer}.{gain}.weight", layer)
            elif launch.name == "rope_append_parts":
                yield from self._rope(label, launch, layer)
            elif launch.name == "quantise_tiles":
                yield from self._quantise(label, launch)
            elif launch.name == "last_row":
                yield from self._last_row(label, launch)
            elif launch.name in ATTENTIONS:
                launch(self.card.stream)  # it has checks of its own
            else:
                name, tensors = next(products)
                yield from self._product(f"{label} {name}", launch, name, tensors)
        assert next(products, None) is None and next(norms, None) is None, names

    def _norm(self, label: str, launch: Launch, gain: str, layer: int) -> Iterator[Check]:
        p, first = self.prefiller, label.endswith("1")
        total = self.rows(p.residual)
        # The product before a first norm is the layer before's down projection with its factor; before a second it is o, unscaled.
        if layer > 0 or not first:
            total = total + self.parts("down" if first else "o", self.dims.hidden) * (self.factor(p.inner) if first else 1)
        launch(self.card.stream)
        yield compare(f"{label}: residual", self.rows(p.residual), total, self.limit)
        y = twins.rms_norm(total, twins.vector(self.pack, gain), self.dims.rms_eps)
        if launch.name == "norm_rows_digits":
            yield within(label, self.digits(p.x_digits, self.dims.hidden, p.work["qkv"].main_width) * self.factor(p.factor), y, digit_bound(y, self.limit, self.group))
        else:
            yield within(label, self.x(p.x, self.dims.hidden) * self.factor(p.factor), y, row_bound(y, self.limit))
        if not first:
            gate, up = (math.sqrt(self.square(name)) for name in tensors_of(layer)["gate_up"])
            bound = gate * up * np.square(y).sum(axis=1, keepdims=True) / 32768
            yield compare(f"{label}: bound of the MLP", self.factor(p.inner), bound, 10 * self.limit)

    def _product(self, label: str, launch: Launch, name: str, tensors: Sequence[str]) -> Iterator[Check]:
        p, dims = self.prefiller, self.dims
        cols = self.pack.tensors[tensors[0]].cols
        if "digits" in launch.name:
            x, of = self.digits(p.inner_digits if name == "down" else p.x_digits, cols, p.work[name].main_width), _exact_rows
        else:
            x, of = self.x(p.x_inner if name == "down" else p.x, cols), _rounded_rows
        launch(self.card.stream)
        if launch.name.startswith("gemm_parts"):
            total = sum(self.pack.tensors[t].rows for t in tensors)
            rows = sample_rows(total)
            yield compare(label, self.parts(name, total)[:, rows], x @ of(self.pack, tensors, rows).T, PRODUCT_LIMIT)
        else:
            rows = sample_rows(dims.intermediate)
            gate, up = (x @ of(self.pack, tensors, rows + k * dims.intermediate).T * self.factor(p.factor) for k in (0, 1))
            ours = self.x(p.x_inner, dims.intermediate)[:, rows] * self.factor(p.inner)
            yield compare(label, ours, twins.swiglu(gate, up), SWIGLU_LIMIT)

    def _quantise(self, label: str, launch: Launch) -> Iterator[Check]:
        p, cols = self.prefiller, self.dims.intermediate
        x = self.x(p.x_inner, cols)
        launch(self.card.stream)
        yield within(label, self.digits(p.inner_digits, cols, p.work["down"].main_width), x, digit_bound(x, self.limit, self.group))

    def _rope(self, label: str, launch: Launch, layer: int) -> Iterator[Check]:
        p, dims = self.prefiller, self.dims
        sums = self.parts("qkv", dims.q_size + 2 * dims.kv_size) * self.factor(p.factor)
        launch(self.card.stream)
        bias = np.concatenate([twins.vector(self.pack, f"model.layers.{layer}.self_attn.{x}_proj.bias") for x in "qkv"])
        heads = (sums + bias).reshape(len(sums), -1, dims.head_dim)
        turned = dims.num_heads + dims.num_kv_heads
        heads[:, :turned] = twins.rope(heads[:, :turned], self.tokens, dims.rope_theta)
        q, expected = heads[:, : dims.num_heads], heads[:, dims.num_heads :]
        yield compare(f"{label}: q", self.rows(p.q), q, self.limit)
        found = np.concatenate([*self.appended(layer)], axis=1)  # [tokens, key heads and value heads, D]
        yield within(f"{label}: keys and values", found, expected, row_bound(expected, self.limit))

    def handed_on(self) -> list[np.ndarray]:
        """What the decode step's launches go on with: residual, q, scalars."""
        b = self.card.buffers
        return [self.card.read(array) for array in (b.residual_mid, b.q, b.step)]

    def _last_row(self, label: str, launch: Launch) -> Iterator[Check]:
        card, p, last = self.card, self.prefiller, self.n - 1
        card.at(0, 0)
        launch(card.stream)
        expected = card.read(p.residual[last]), card.read(p.q[last]), np.array([_ids(card, self.n)[last], last, -1])
        for what, found, right in zip(("residual", "q", "scalars"), self.handed_on(), expected):
            yield compare(f"{label}: {what}", found, right, 0.0, "bit for bit")

    def _again(self) -> Iterator[Check]:
        """The chunk twice more as a prompt has it, one kernel starting before the other has ended: the bits that decode goes on with."""
        card, found = self.card, []
        for _ in range(2):
            for launch in self.prefiller.launches(self.n, 0, card.pool):
                launch(card.stream)
            found.append([*self.handed_on(), *card.take(self.dims.num_layers - 1, self.table, self.n)])
        wrong = sum(a.tobytes() != b.tobytes() for a, b in zip(*found))
        yield none_wrong(f"{self.n} tokens twice: the same bits", wrong, "arrays", "the last token's residual and q, keys and values of the last layer")


def _attention(card: Card, rng: np.random.Generator, limit: float, position: int, n: int, layer: int) -> Iterator[Check]:
    """A chunk of ``n`` tokens at ``position``, random keys and values before it, over pages in shuffled order between pages full of NaN."""
    dims, p = card.dims, card.engine._prefiller
    table, everywhere = card.lay_out(position + n, rng), slice(0, dims.num_layers)
    if position:
        before = [rng.standard_normal((position, dims.num_kv_heads, dims.head_dim)).astype(np.float16) for _ in range(2)]
        card.put(everywhere, table, *before)
    card.zero(everywhere, table[pages_for(position, card.page_tokens) :])
    chain, done = card.chunk(_ids(card, n), position), False
    upto = next(launch for launch in card.layer_of(chain, layer) if launch.name in ATTENTIONS)
    for launch in chain:
        if not done:
            launch(card.stream)
        done = done or launch is upto
    tokens = edges(n)
    with card.stream:
        q, out = p.q[cupy.asarray(tokens)], p.x[:, cupy.asarray(tokens)]
    q, out = card.read(q), layouts.untile_x(card.read(out), tokens, dims.q_size, card.group)
    keys, values = (rows.astype(np.float64) for rows in card.take(layer, table, position + n))
    # One query at a time: the tokens that are looked at do not follow each other.
    expected, bound = (np.concatenate(rows) for rows in zip(*(
        rounded_attention(q[k : k + 1], keys[: position + r + 1], values[: position + r + 1], position + r, limit) for k, r in enumerate(tokens)
    )))  # fmt: skip
    yield within(
        f"layer {layer} {upto.name}, prompt of {position + n}", out.astype(np.float64), expected, bound,
        f"{len(tokens)} rows of the chunk at {position}, {len(table)} shuffled pages between NaN",
    )  # fmt: skip


def rounded_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """(what prefill's attention computes, how far its kernels may be from it), float64 [m, H * D]; q FP32 [m, H, D], otherwise as ``twins.attention``.

    The kernels round q to FP16, and so does this twin. They also round each share p, the exponential of a score less the largest so far, and divide
    the sum of p v by the sum of the p before rounding. A rounded p is off by at most 2^-11 p, or by 2^-25 below 2^-14, where FP16 is subnormal. What
    later maxima make of it is a factor of at most 1, and the sum of the p, the largest being 1, is at least 1. So the sum's error is at most
    2^-11 sum(p |v|) / sum(p) + 2^-25 sum(|v|): the first is attention to |v|. On top come the FP32 sums and the result's own rounding, ``row_bound``.
    """
    rounded = q.astype(np.float16).astype(np.float64)
    expected, size = (twins.attention(rounded, keys, rows, first) for rows in (values, np.abs(values)))
    seen = np.cumsum(np.abs(values), axis=0)[first : first + len(q)]  # sum(|v|) [m, G, D] of the tokens that each query sees
    tiny = np.repeat(seen, q.shape[1] // keys.shape[1], axis=1).reshape(expected.shape)
    return expected, row_bound(expected, limit) + FP16_ROUNDING * size + FP16_TINY * tiny


def row_bound(expected: np.ndarray, limit: float) -> np.ndarray:
    """One rounding to FP16 of each element [..., columns], and ``limit`` of the largest of a row for the FP32 before it."""
    size = np.abs(expected)
    return size * FP16_ROUNDING + limit * size.max(axis=-1, keepdims=True) + FP16_TINY


def digit_bound(expected: np.ndarray, limit: float, group: int) -> np.ndarray:
    """Rounding to digits of each element [rows, columns], and ``limit`` of the largest of a row for the FP32 before it."""
    rounding = np.stack([layouts.record_bound(row, group) for row in expected])
    return rounding + limit * np.abs(expected).max(axis=-1, keepdims=True)


def _wide(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a buffer that nothing has been written to may hold anything
        return np.asarray(array).astype(np.float64)


def _rounded_rows(pack: PackFile, names: Sequence[str], rows: np.ndarray) -> np.ndarray:
    """Rows of stacked projections as the tensor cores multiply them, float64: rounded to FP16 with the largest scale of all in [2^15, 2^16)."""
    peak = max(float(pack.int4(name)[1].max()) for name in names)
    up = 2.0 ** (min(30, 15 - math.floor(math.log2(peak))) - 24) if peak else 1.0
    return (_exact_rows(pack, names, rows) * up).astype(np.float16) / up


def _exact_rows(pack: PackFile, names: Sequence[str], rows: np.ndarray) -> np.ndarray:
    """Rows of stacked projections, float64: code times scale."""
    out, first = np.zeros((len(rows), pack.tensors[names[0]].cols)), 0
    for name in names:
        words, scales = pack.int4(name)
        mine = (rows >= first) & (rows < first + len(words))
        if mine.any():
            at = rows[mine] - first
            out[mine] = twins.dequantize(words[at], scales[at])
        first += len(words)
    return out


def _largest_square(pack: PackFile, name: str) -> float:
    """The largest squared norm of a row of a projection."""
    rows = pack.tensors[name].rows
    step = max(1, twins.BLOCK_WEIGHTS // pack.tensors[name].cols)
    return max(float(np.square(twins.weight_rows(pack, name, at, min(at + step, rows))).sum(axis=1).max()) for at in range(0, rows, step))
