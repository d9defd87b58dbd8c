"""A Hopper card played in numpy: enough of CuPy for the Hopper engines to run here, with kernels written from their contracts.

The engine, its buffers, launches, pages and prefill are the real ones; only the machine below them is not. So the ladder's own code can be
tried without a GPU, and a kernel can be spoiled to see that its check notices. What a kernel does is written with the ladder's twins: such a
card says nothing about the kernels in `kernels/`, which the same checks meet on a real one.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import time
import types
from contextlib import contextmanager

import numpy as np

SMS = 4


class Array(np.ndarray):
    """A numpy array with the few methods that CuPy's has on top."""

    def get(self, stream=None) -> np.ndarray:
        return np.array(self, copy=True).view(np.ndarray)

    def set(self, values, stream=None) -> None:
        assert isinstance(values, np.ndarray) and values.dtype == self.dtype and values.shape == self.shape and self.flags.c_contiguous
        self[...] = values

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class Stream:
    """Launches happen at once, or are collected while a graph is captured."""

    ptr, captured = 0, None

    def __init__(self, non_blocking: bool = False) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None: ...

    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self):
        launches, self.captured = self.captured, None
        return types.SimpleNamespace(launch=lambda stream: [launch(stream) for launch in launches], upload=lambda stream: None)


class Event:
    """Everything happens at once."""

    def __init__(self, **options) -> None: ...

    def record(self, stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...


class Launch:
    """Has the constructor of the real one; `kernels` below do the work."""

    def __init__(self, kernels, name, grid, threads, args, *, region="", shared=0, overlap=True) -> None:
        self.name, self.region, self.grid, self.args, self.card = name, region or name, grid, args, kernels.card

    def resize(self, grid) -> None:
        self.grid = grid

    def __call__(self, stream: Stream) -> None:
        if stream.captured is not None:
            stream.captured.append(self.frozen())
        else:
            self.card.kernels[self.name](self)

    def frozen(self):
        """This launch as a graph keeps it: with the grid and the arguments of now, whatever becomes of them."""
        grid, args = self.grid, [a if isinstance(a, np.ndarray) else copy.copy(a) for a in self.args]

        def launch(stream: Stream) -> None:
            now = self.grid, self.args
            self.grid, self.args = grid, args
            try:
                self(stream)
            finally:
                self.grid, self.args = now

        return launch


class FakeCard:
    """`kernels[name](launch)` is what a kernel does; a test may replace one. `engine` is the one that was opened last."""

    def __init__(self) -> None:
        names = [name for name in dir(self) if name.startswith("k_")]
        self.kernels = {name[2:]: getattr(self, name) for name in names}
        self.engine, self._pack = None, None

    # ----------------------------------------------------------------------------------------------------- helpers

    def place(self, launch) -> int:
        """How many launches of the same name come before this one in its step."""
        for launches in self.engine._launches.values():
            if launch in launches:
                return sum(other.name == launch.name for other in launches[: launches.index(launch)])
        return -1

    @property
    def pack(self):
        """The file whose model the card runs. Of a planned one it reads what the card itself has made."""
        from nanoqwen.ladder.card_pack import CardPack
        from nanoqwen.synthetic_pack import is_planned

        if is_planned(self._pack) and not isinstance(self._pack, CardPack):
            self._pack = CardPack(self._pack, self.engine._weights)
        return self._pack

    @pack.setter
    def pack(self, pack) -> None:
        self._pack = pack

    @property
    def b(self):
        return self.engine._buffers

    @property
    def dims(self):
        return self.engine.dims

    def names(self, layer: int, *tensors: str) -> list[str]:
        return [f"model.layers.{layer}.{tensor}.weight" for tensor in tensors]

    def add_and_norm(self, residual, parts, gain: str, behind=None) -> np.ndarray:
        from nanoqwen.ladder import twins

        total = residual.astype(np.float64) + (0 if parts is None else parts.astype(np.float64).sum(0)[: self.dims.hidden])
        if behind is not None:
            behind[...] = total
        return twins.rms_norm(total[None], twins.vector(self.pack, gain), self.dims.rms_eps)[0]

    def records(self, values) -> np.ndarray:
        from nanoqwen.ladder import layouts

        return layouts.encode_records(values, self.engine.group)

    def digits(self, buffer, values) -> None:
        records = self.records(values)
        buffer[: records.size] = records

    def project(self, launch, tensors, source, out) -> None:
        from nanoqwen.ladder import layouts, twins

        names = self.names(self.place(launch), *tensors)
        x = layouts.decode_records(source, self.pack.tensors[names[0]].cols, self.engine.group)
        y = twins.stacked(self.pack, names, x[None])[0]
        out[0, : len(y)] = y

    # -------------------------------------------------------------------------------------------- weights from a seed

    def k_fill_words(self, launch) -> None:
        from nanoqwen.synthetic import words

        out, count, key = (getattr(a, "value", a) for a in launch.args)
        out.reshape(-1)[:count] = words(key, 0, count)

    def k_fill_values(self, launch) -> None:
        from nanoqwen.synthetic import values

        out, count, key, size, centre = (getattr(a, "value", a) for a in launch.args)
        out.reshape(-1)[:count] = values(key, 0, count, size, centre)

    # ------------------------------------------------------------------------------------------------ decode kernels

    def k_page_open(self, launch) -> None:
        self.engine._pages.pool[:, :, self.b.block_table[self.b.step[1] // 16]] = 0

    def k_embed(self, launch) -> None:
        from nanoqwen import model

        self.b.residual[...] = self.pack.fp16(model.EMBED)[self.b.step[0]]

    def k_gemv_qkv(self, launch) -> None:
        layer = self.place(launch)
        parts = self.b.down if layer else None
        x = self.add_and_norm(self.b.residual, parts, f"model.layers.{layer}.input_layernorm.weight", self.b.residual_mid)
        self.project(launch, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), self.records(x), self.b.qkv)

    def k_gemv_o(self, launch) -> None:
        self.project(launch, ("self_attn.o_proj",), self.b.x, self.b.o)

    def k_gemv_gate_up(self, launch) -> None:
        gain = f"model.layers.{self.place(launch)}.post_attention_layernorm.weight"
        x = self.add_and_norm(self.b.residual_mid, self.b.o, gain, self.b.residual)
        self.project(launch, ("mlp.gate_proj", "mlp.up_proj"), self.records(x), self.b.gate_up)

    def k_gemv_down(self, launch) -> None:
        self.project(launch, ("mlp.down_proj",), self.b.inner, self.b.down)

    def k_rope_append(self, launch) -> None:
        position = int(self.b.step[1])
        layer = self.place(launch)
        self.b.q[...] = self.append(layer, self.b.qkv.astype(np.float64).sum(0)[None, : self.dims.q_size + 2 * self.dims.kv_size], position)[0]

    def append(self, layer: int, rows: np.ndarray, position: int) -> np.ndarray:
        """Bias, rotation, keys and values into their pages; returns q [n, H, D]."""
        from nanoqwen.ladder import layouts, twins

        d, p = self.dims, f"model.layers.{layer}.self_attn."
        heads = (rows + np.concatenate([twins.vector(self.pack, f"{p}{x}_proj.bias") for x in "qkv"])).reshape(len(rows), -1, d.head_dim)
        at = position + np.arange(len(rows))
        turned = twins.rope(heads[:, : -d.num_kv_heads], at, d.rope_theta)
        pages = self.engine._pages.pool[layer]
        token, kv_head, i = at[:, None, None], np.arange(d.num_kv_heads)[:, None], np.arange(d.head_dim)
        where = layouts.element(self.b.block_table[token // 16].astype(int), kv_head, token, i, d, 16)
        for kind, values in enumerate((turned[:, d.num_heads :], heads[:, -d.num_kv_heads :])):
            pages[kind].reshape(-1)[where] = values
        return turned[:, : d.num_heads]

    def k_paged_attention(self, launch) -> None: ...

    def k_attention_combine(self, launch) -> None:
        from nanoqwen.ladder import twins

        keys, values = self.engine._pages.pool[self.place(launch)]
        q = self.b.q[None].astype(np.float64)
        self.digits(self.b.x, twins.paged_attention(q, keys, values, self.b.block_table, int(self.b.step[1]), self.dims, 16)[0])

    def k_swiglu(self, launch) -> None:
        from nanoqwen.ladder import twins

        gate, up = np.split(self.b.gate_up.astype(np.float64).sum(0)[: 2 * self.dims.intermediate], 2)
        self.digits(self.b.inner, twins.swiglu(gate, up))

    def k_final_norm(self, launch) -> None:
        from nanoqwen import model
        from nanoqwen.ladder import layouts

        y = self.add_and_norm(self.b.residual, None if launch in self.engine._heads[False] else self.b.down, model.FINAL_NORM)
        self.b.halves.reshape(-1)[...] = layouts.encode_halves(y).reshape(-1)

    def k_lm_head(self, launch) -> None:
        from nanoqwen import model
        from nanoqwen.ladder import layouts, twins

        y = twins.linear(self.pack, model.EMBED if self.dims.tied else model.LM_HEAD, layouts.decode_halves(self.b.halves)[None])[0]
        self.b.logit_parts[0, : len(y)] = y

    def k_argmax(self, launch) -> None:
        self.b.logits[...] = self.b.logit_parts.sum(0)
        allowed = np.unpackbits(self.b.allowed.view(np.uint8), bitorder="little")[: len(self.b.logits)].astype(bool)
        chosen = np.where(allowed, self.b.logits, -np.inf).argmax() if np.isfinite(self.b.logits[allowed]).all() else -1
        position = self.b.step[1]
        self.b.told[position] = chosen
        self.b.step[...] = max(chosen, 0), position + 1, chosen

    # ----------------------------------------------------------------------------------------------- prefill kernels

    def matrix(self, blocks: int):
        """(layer, name, matrix) of the projection whose blocks begin at that address."""
        for i, layer in enumerate(self.engine._weights.layers):
            for name in ("qkv", "o", "gate_up", "down"):
                if getattr(layer, name).bundles.data.ptr == blocks:
                    return i, name, getattr(layer, name)
        raise AssertionError("no projection begins there")

    def weights(self, matrix) -> np.ndarray:
        """float64 [rows, cols], rounded as kernels/prefill/gemm_int4.cuh does: the largest scale is brought into [2^15, 2^16)."""
        from nanoqwen.cuda.weights import untile_int4
        from nanoqwen.ladder import twins

        words, scales = map(np.asarray, untile_int4(matrix, self.engine.group))
        up = 2.0 ** (15 - np.floor(np.log2(float(scales.max()))) - 24)
        return (twins.dequantize(words, scales) * up).astype(np.float16) / up

    def read_x(self, x, n: int, cols: int) -> np.ndarray:
        from nanoqwen.ladder import layouts

        return layouts.untile_x(x[:, :n], np.arange(n), cols, self.engine.group).astype(np.float64)

    def write_x(self, x, rows: np.ndarray) -> None:
        from nanoqwen.ladder import layouts

        with np.errstate(over="ignore"):
            layouts.tile_x(x, rows, self.engine.group)

    def product(self, launch) -> np.ndarray:
        """x . W^T [n, rows]."""
        work, operands = launch.args[:2]
        _, name, matrix = self.matrix(operands.blocks)
        p = self.engine._prefiller
        x = p.x_inner if name == "down" else p.x
        assert operands.x == x.data.ptr and operands.tokens == x.shape[1] and launch.grid == (work.grid(SMS),)
        return self.read_x(x, work.n, matrix.cols) @ self.weights(matrix).T

    def sum_parts(self, parts, work, rows: int) -> np.ndarray:
        from nanoqwen.ladder import layouts

        return layouts.add_parts(parts[: work.slots * work.n * rows].reshape(-1, work.n, rows), work, np.arange(work.n))

    def k_largest_scale(self, launch) -> None:
        blocks, count, found = (getattr(a, "value", a) for a in launch.args)
        scales = blocks.reshape(-1).view(np.float16).reshape(-1, 4 * self.engine._weights.group + 16)[:count, -16:]
        found[:1].view(np.float32)[...] = np.abs(scales).max()

    def k_projection_bound(self, launch) -> None:
        blocks, _, first, found = (getattr(a, "value", a) for a in launch.args)
        rows = self.weights_exact(self.matrix(blocks.data.ptr)[2])[16 * first : 16 * (first + launch.grid[0])]
        found[:1].view(np.float32)[...] = np.sqrt(np.square(rows).sum(axis=1).max())

    def weights_exact(self, matrix) -> np.ndarray:
        from nanoqwen.cuda.weights import untile_int4
        from nanoqwen.ladder import twins

        return twins.dequantize(*map(np.asarray, untile_int4(matrix, self.engine._weights.group)))

    def k_embed_rows(self, launch) -> None:
        from nanoqwen import model

        (_, ids, residual), n = launch.args, launch.grid[0]
        residual[:n] = self.pack.fp16(model.EMBED)[ids[:n]]

    def k_norm_rows_tiled(self, launch) -> None:
        from nanoqwen.ladder import twins

        residual, parts, work, parts_factor, gain, x, tokens, factor, bound, inner = (getattr(a, "value", a) for a in launch.args)
        n, hidden = launch.grid[0], self.dims.hidden
        assert tokens == x.shape[1]
        total = residual[:n].astype(np.float64)
        if parts is not None:
            assert work.n == n
            total = total + self.sum_parts(parts, work, hidden) * (1 if parts_factor is None else parts_factor[:n, None])
        residual[:n] = total
        y = twins.rms_norm(total, np.asarray(gain, np.float64), self.dims.rms_eps)
        by = np.abs(y).max(axis=1) / 1024
        factor[:n] = np.where(by == 0, 1, by)
        self.write_x(x, y / factor[:n, None])
        if inner is not None:
            inner[:n] = np.maximum(bound * np.square(y).sum(axis=1) / 32768, 1e-30)

    def k_gemm_parts(self, launch) -> None:
        from nanoqwen.ladder import layouts

        work, out, p = launch.args[0], launch.args[2], self.engine._prefiller
        y = self.product(launch)
        assert y.shape[1] == out.rows and out.out == p.parts.data.ptr
        counts = layouts.part_counts(work, out.rows)
        parts = p.parts[: work.slots * y.size].reshape(-1, *y.shape)
        parts[...] = np.nan  # what no CTA writes may be anything
        for slot, part in enumerate(parts):
            part[:, layouts.part_places(np.arange(out.rows))] = np.where(slot < counts, y / counts, np.nan)

    k_gemm_parts_middle = k_gemm_parts_few = k_gemm_parts

    def k_rope_append_parts(self, launch) -> None:
        parts, work, factor, q_bias, _, _, _, span, _, keys, values, q = (getattr(a, "value", a) for a in launch.args)
        layer = next(i for i, layer in enumerate(self.engine._weights.layers) if layer.q_bias is q_bias)
        self.appends_to(layer, keys, values)
        position, n = map(int, span)
        assert launch.grid[0] == work.n >= n
        q[:n] = self.append(layer, (self.sum_parts(parts, work, self.dims.q_size + 2 * self.dims.kv_size) * factor[: work.n, None])[:n], position)

    def appends_to(self, layer: int, keys: int, values: int) -> None:
        pool = self.engine._pages.pool
        assert (keys, values) == (pool[layer, 0].data.ptr, pool[layer, 1].data.ptr)

    def k_gemm_swiglu(self, launch) -> None:
        from nanoqwen.ladder import twins

        y, p = self.product(launch), self.engine._prefiller
        assert (launch.args[2].factor, launch.args[2].inner, launch.args[2].out) == (p.factor.data.ptr, p.inner.data.ptr, p.x_inner.data.ptr)
        gate, up = np.split(y * p.factor[: len(y), None], 2, axis=1)
        self.write_x(p.x_inner, twins.swiglu(gate, up) / p.inner[: len(y), None])

    k_gemm_swiglu_middle = k_gemm_swiglu_few = k_gemm_swiglu

    def k_prefill_attention(self, launch) -> None:
        from nanoqwen.ladder import twins

        q, key_map, value_map, table, span, out, tokens = (getattr(a, "value", a) for a in launch.args)
        layer = next(i for i, layer in enumerate(self.engine._pages.pool) if layer[0].data.ptr == key_map.opaque[0])
        self.appends_to(layer, key_map.opaque[0], value_map.opaque[0])
        assert tokens == out.shape[1] and key_map.opaque[1] * key_map.opaque[2] == self.engine._pages.pool[layer, 0].size
        position, n = map(int, span)
        rounded = q[:n].astype(np.float16).astype(np.float64)
        self.write_x(out, twins.paged_attention(rounded, *self.engine._pages.pool[layer], table, position, self.dims, 16))

    k_prefill_attention_spread = k_prefill_attention

    def k_last_row(self, launch) -> None:
        residual, parts, work, factor, span, out = (getattr(a, "value", a) for a in launch.args)
        last = int(span[1]) - 1
        out[...] = residual[last] + self.sum_parts(parts, work, self.dims.hidden)[last] * factor[last]


def _cupy(card: FakeCard) -> types.ModuleType:
    fake = types.ModuleType("cupy")
    for name in ("empty", "zeros", "ones", "empty_like", "zeros_like", "ascontiguousarray", "concatenate", "array"):
        setattr(fake, name, lambda *args, _f=getattr(np, name), **kwargs: _f(*args, **kwargs).view(Array))
    fake.asarray = lambda values, dtype=None: np.array(values, dtype=dtype).view(Array)
    fake.ndarray, fake.nan, fake.__version__ = Array, np.nan, "played in numpy"
    properties = {"name": b"a card played in numpy", "multiProcessorCount": SMS, "major": 9, "minor": 0}
    runtime = types.SimpleNamespace(
        free=lambda pointer: None, getDeviceProperties=lambda index: properties, memGetInfo=lambda: (1 << 37, 1 << 37), deviceSynchronize=lambda: None,
        getDeviceCount=lambda: 1, getDevice=lambda: 0,
    )  # fmt: skip
    fake.cuda = types.SimpleNamespace(
        Stream=Stream, Event=Event, alloc_pinned_memory=bytearray, runtime=runtime, Device=lambda *a: types.SimpleNamespace(id=0),
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError), get_current_stream=Stream, Graph=object,
        get_elapsed_time=lambda before, after: (after.at - before.at) * 1e3,
    )  # fmt: skip
    return fake


class StagingCard:
    """What `nanoqwen.cuda.staging` asks of CuPy, at once and in one memory."""

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def stream(self) -> None: ...

    def event(self) -> None: ...

    def copy(self, out, offset: int, source: np.ndarray, stream, event) -> None:
        out.reshape(-1).view(np.uint8)[offset : offset + source.nbytes] = source

    def wait(self, event) -> None: ...

    def release(self) -> None: ...


class Kernels:
    """Compiles nothing."""

    def __init__(self, constants: str, cache, sources=None) -> None:
        self.card = Kernels.current

    def allow_shared(self, name: str, nbytes: int) -> None: ...


@contextmanager
def played(monkeypatch):
    """Inside, `nanoqwen.engines` finds a Hopper card: yields the FakeCard. The modules that saw it are gone afterwards."""
    card = Kernels.current = FakeCard()

    def taken_out() -> dict[str, types.ModuleType]:
        """The modules that import CuPy or its users, removed from where `import` looks: among the modules and in their packages."""
        names = [n for n in sys.modules if n.startswith(("nanoqwen.cuda.", "nanoqwen.engines.hopper", "nanoqwen.ladder.card"))]
        modules = {name: sys.modules.pop(name) for name in names}
        for name in names:
            package, _, last = name.rpartition(".")
            vars(sys.modules[package]).pop(last, None)
        return modules

    real = taken_out()
    driver, nvrtc = types.ModuleType("driver"), types.ModuleType("nvrtc")
    stubs = {
        "cupy": _cupy(card), "cuda": types.ModuleType("cuda"),
        "cuda.bindings": types.SimpleNamespace(driver=driver, nvrtc=nvrtc),
    }  # fmt: skip
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    import nanoqwen.cuda.launch as launch

    launch.Launch, launch.Kernels = Launch, Kernels
    import nanoqwen.cuda.staging as staging

    staging.Card = StagingCard
    from nanoqwen.cuda import tensor_map

    def encoded(*described: int) -> int:
        """A map that says what it was asked for; the driver's is opaque."""
        card.map = (ctypes.c_uint64 * 16)(*described)
        return ctypes.addressof(card.map)

    tensor_map._encoded = encoded
    from nanoqwen.engines import hopper

    made = hopper.HopperEngine.__init__

    def remember(engine, *args, **kwargs) -> None:
        card.engine = engine
        made(engine, *args, **kwargs)

    hopper.HopperEngine.__init__ = remember
    monkeypatch.setattr(hopper, "kernel_cache", lambda: None)
    for module in ("nanoqwen.engines", "nanoqwen.engines.synthetic"):
        monkeypatch.setattr(f"{module}.hopper_problem", lambda: None)
    try:
        yield card
    finally:
        taken_out()
        for name, module in real.items():
            package, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], last, module)
