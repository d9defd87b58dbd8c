"""What every kernel of a Hopper engine does, written in numpy from its contract, with the ladder's twins (cardkit.py plays the machine below)."""

from __future__ import annotations

import numpy as np

SMS = 4  # of the card


class FakeCard:
    """`kernels[name](launch)` is what a kernel does; a test may replace one. `engine` is the one that was opened last."""

    def __init__(self) -> None:
        names = [name for name in dir(self) if name.startswith("k_")]
        self.kernels = {name[2:]: getattr(self, name) for name in names}
        self.engine, self._pack = None, None

    # ----------------------------------------------------------------------------------------------------- helpers

    def place(self, launch) -> int:
        """The layer of a launch: how many launches of the same name come before it in its step. Those that end a prompt are of the last layer."""
        for launches in self.engine._launches.values():
            if launch in launches:
                return sum(other.name == launch.name for other in launches[: launches.index(launch)])
        assert any(launch in launches for launches in self.engine._ends.values())
        return self.dims.num_layers - 1

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

        out, count, key = (getattr(a, "value", a) for a in launch.given)
        out.reshape(-1)[:count] = words(key, 0, count)

    def k_fill_values(self, launch) -> None:
        from nanoqwen.synthetic import values

        out, count, key, size, centre = (getattr(a, "value", a) for a in launch.given)
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

        y = self.add_and_norm(self.b.residual, self.b.down, model.FINAL_NORM)
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
        work, operands = launch.given[:2]
        _, name, matrix = self.matrix(operands.blocks)
        p = self.engine._prefiller
        assert launch.grid == (work.grid(SMS),)
        if "digits" in launch.name:
            from nanoqwen.ladder import layouts

            x = p.inner_digits if name == "down" else p.x_digits
            assert operands.x == x.data.ptr and operands.splits > 0 and launch.name.endswith(f"digits{work.main_width}")
            x = layouts.undigit_x(x, np.arange(work.n), matrix.cols, work.main_width, self.engine.group)
            return x @ self.weights_exact(matrix).T
        x = p.x_inner if name == "down" else p.x
        assert operands.x == x.data.ptr and operands.tokens == x.shape[1]
        return self.read_x(x, work.n, matrix.cols) @ self.weights(matrix).T

    def sum_parts(self, parts, work, rows: int) -> np.ndarray:
        from nanoqwen.ladder import layouts

        return layouts.add_parts(parts[: work.slots * work.n * rows].reshape(-1, work.n, rows), work, np.arange(work.n))

    def k_largest_scale(self, launch) -> None:
        blocks, count, found = (getattr(a, "value", a) for a in launch.given)
        scales = blocks.reshape(-1).view(np.float16).reshape(-1, 4 * self.engine._weights.group + 16)[:count, -16:]
        found[:1].view(np.float32)[...] = np.abs(scales).max()

    def k_projection_bound(self, launch) -> None:
        blocks, _, first, found = (getattr(a, "value", a) for a in launch.given)
        rows = self.weights_exact(self.matrix(blocks.data.ptr)[2])[16 * first : 16 * (first + launch.grid[0])]
        found[:1].view(np.float32)[...] = np.sqrt(np.square(rows).sum(axis=1).max())

    def weights_exact(self, matrix) -> np.ndarray:
        from nanoqwen.cuda.weights import untile_int4
        from nanoqwen.ladder import twins

        return twins.dequantize(*map(np.asarray, untile_int4(matrix, self.engine._weights.group)))

    def k_embed_rows(self, launch) -> None:
        from nanoqwen import model

        (_, ids, residual), n = launch.given, launch.grid[0]
        residual[:n] = self.pack.fp16(model.EMBED)[ids[:n]]

    def k_norm_rows_tiled(self, launch) -> None:
        from nanoqwen.cuda.prefill_plan import norm_shape
        from nanoqwen.ladder import layouts, twins

        residual, parts, work, parts_factor, gain, x, tokens, factor, bound, inner = (getattr(a, "value", a) for a in launch.given)
        n, hidden = launch.grid[0] // norm_shape(launch.name, self.dims)[0], self.dims.hidden
        assert tokens in (8, 16) and tokens >= n if launch.name == "norm_rows_digits" else tokens == x.shape[1]
        total = residual[:n].astype(np.float64)
        if parts is not None:
            assert work.n == n
            total = total + self.sum_parts(parts, work, hidden) * (1 if parts_factor is None else parts_factor[:n, None])
        residual[:n] = total
        y = twins.rms_norm(total, np.asarray(gain, np.float64), self.dims.rms_eps)
        by = np.abs(y).max(axis=1) / 1024
        factor[:n] = np.where(by == 0, 1, by)
        if launch.name == "norm_rows_digits":
            layouts.digit_x(x, y / factor[:n, None], tokens, self.engine.group)
        else:
            self.write_x(x, y / factor[:n, None])
        if inner is not None:
            inner[:n] = np.maximum(bound * np.square(y).sum(axis=1) / 32768, 1e-30)

    k_norm_rows_spread = k_norm_rows_digits = k_norm_rows_tiled

    def k_gemm_parts(self, launch) -> None:
        from nanoqwen.ladder import layouts

        work, out, p = launch.given[0], launch.given[2], self.engine._prefiller
        y = self.product(launch)
        assert y.shape[1] == out.rows and out.out == p.parts.data.ptr
        counts = layouts.part_counts(work, out.rows)
        parts = p.parts[: work.slots * y.size].reshape(-1, *y.shape)
        parts[...] = np.nan  # what no CTA writes may be anything
        for slot, part in enumerate(parts):
            part[:, layouts.part_places(np.arange(out.rows))] = np.where(slot < counts, y / counts, np.nan)

    k_gemm_parts_middle = k_gemm_parts_few = k_gemm_parts_digits8 = k_gemm_parts_digits16 = k_gemm_parts

    def k_rope_append_parts(self, launch) -> None:
        parts, work, factor, q_bias, _, _, _, span, _, keys, values, q = (getattr(a, "value", a) for a in launch.given)
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
        assert (launch.given[2].factor, launch.given[2].inner, launch.given[2].out) == (p.factor.data.ptr, p.inner.data.ptr, p.x_inner.data.ptr)
        gate, up = np.split(y * p.factor[: len(y), None], 2, axis=1)
        self.write_x(p.x_inner, twins.swiglu(gate, up) / p.inner[: len(y), None])

    k_gemm_swiglu_middle = k_gemm_swiglu_few = k_gemm_swiglu_digits8 = k_gemm_swiglu_digits16 = k_gemm_swiglu

    def k_quantise_tiles(self, launch) -> None:
        from nanoqwen.ladder import layouts

        x, tokens, width, digits = (getattr(a, "value", a) for a in launch.given)
        n, units = launch.grid[0], -(-self.dims.intermediate // 128)
        assert tokens == x.shape[1] and n <= width and launch.grid[1] == -(-units // 4)
        layouts.digit_x(digits, self.read_x(x, n, self.dims.intermediate), width, self.engine.group)

    def k_prefill_attention(self, launch) -> None:
        from nanoqwen.ladder import twins

        q, key_map, value_map, table, span, out, tokens = (getattr(a, "value", a) for a in launch.given)
        layer = next(i for i, layer in enumerate(self.engine._pages.pool) if layer[0].data.ptr == key_map.opaque[0])
        self.appends_to(layer, key_map.opaque[0], value_map.opaque[0])
        assert tokens == out.shape[1] and key_map.opaque[1] * key_map.opaque[2] == self.engine._pages.pool[layer, 0].size
        position, n = map(int, span)
        rounded = q[:n].astype(np.float16).astype(np.float64)
        self.write_x(out, twins.paged_attention(rounded, *self.engine._pages.pool[layer], table, position, self.dims, 16))

    k_prefill_attention_spread = k_prefill_attention

    def k_last_row(self, launch) -> None:
        residual, q, ids, span, residual_mid, last_q, step = launch.given
        last = int(span[1]) - 1
        assert launch.grid == (-(-(residual_mid.size + last_q.size) // 1024),)
        residual_mid[...], last_q[...], step[...] = residual[last], q[last], (ids[last], span[0] + last, -1)
