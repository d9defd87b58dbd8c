"""Unit tier of the Hopper engines: each decode kernel, launched alone, against its float64 twin.

A check writes the kernel's input into the buffer that it reads, launches the engine's own launch object, and reads what came
of it. Activations between kernels are 16-bit fixed point with one scale a group (kernels/common/activations.cuh). So a projection
is compared with the product of the activations *as decoded*, which leaves FP32 sums as its only error; and a kernel that
writes activations is compared with the twin, element by element, with what half a step of that grid allows.

Every launch runs twice on the same input; the last check says where the bits differed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nanoqwen import model
from nanoqwen.config import Settings
from nanoqwen.cuda.choice import allowed_words
from nanoqwen.cuda.launch import Launch
from nanoqwen.cuda.persistent_plan import CHUNK
from nanoqwen.ladder import card_pack, card_prefill, layouts, twins
from nanoqwen.ladder.card import Card
from nanoqwen.ladder.report import Check, compare, none_wrong, within
from nanoqwen.ladder.unit import scales_finite
from nanoqwen.packfile import PackFile
from nanoqwen.synthetic_pack import is_planned

#: Projections whose norm is part of them: kernel, tensors that it stacks, gain, buffers of the residual before and behind, of the sums
#: that it adds to the residual, and of its own.
NORMED = (
    ("gemv_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm", "residual", "residual_mid", "down", "qkv"),
    ("gemv_gate_up", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm", "residual_mid", "residual", "o", "gate_up"),
)
#: Projections of activations that another kernel wrote: kernel, tensor, buffers of its input and of its sums.
PLAIN = (("gemv_o", "self_attn.o_proj", "x", "o"), ("gemv_down", "mlp.down_proj", "inner", "down"))


def checks(pack: PackFile, card: Card, settings: Settings) -> Iterator[Check]:
    """Every unit check of the card's kernels. ``pack`` is the file, or ``CardPack`` of a planned one."""
    spec, dims = settings.ladder, pack.dims
    rng, limit = np.random.default_rng(0), spec.unit_max_rel_error
    lengths = [n for n in spec.edge_lengths if n <= card.engine.context_limit]
    layers = sorted({0, dims.num_layers - 1})
    card.reserve(min(card.engine.context_limit, 2 * lengths[-1]))
    if not is_planned(pack):
        yield scales_finite(pack)
        yield from card_pack.weight_checks(pack, card.weights)
    with card.tidy():
        yield from _page_open(card, lengths)
        yield _embed(pack, card)
        for layer in layers:
            yield from _normed(pack, card, layer, rng, limit)
            yield from _plain(pack, card, layer, rng, limit)
            yield from _rope_append(pack, card, layer, rng, limit, lengths if layer == 0 else lengths[-1:])
            yield from _attention(card, layer, rng, limit, lengths if layer == 0 else lengths[-1:])
            yield from _swiglu(card, layer, rng, limit)
        yield from _head(pack, card, rng, limit)
        yield from _argmax(card, rng)
    with card.tidy():
        yield from card_prefill.checks(pack, card, rng, limit, lengths, layers)
    if card.engine._graphs:
        yield from _graphs(card)
    if card.engine.name == "persistent":
        yield from _persistent(card, lengths, spec.layer_max_rel_error)
    yield none_wrong("repeats are bit-equal", len(card.unequal), "results", "; ".join([f"{len(card.repeated)} kernels run twice", *card.unequal[:3]]))


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _activations(rng: np.random.Generator, cols: int, group: int) -> np.ndarray:
    """Random activations [cols] whose groups differ in size by orders of magnitude, with a few large elements."""
    x = _normal(rng, cols // group, group) * np.exp2(rng.integers(-8, 8, (cols // group, 1)))
    return x.reshape(-1) * np.where(rng.random(cols) < 0.01, 30, 1)


def records_match(name: str, records: np.ndarray, expected: np.ndarray, group: int, limit: float, detail: str = "") -> Check:
    """Records against float64 [cols]: each element within half a step of its group, and ``limit`` of the group's largest for FP32."""
    bound = layouts.record_bound(expected, group)
    return within(name, layouts.decode_records(records, len(expected), group), expected, bound * (1 + 2 * layouts.DIGIT_MAX * limit), detail)


def _sum(parts: np.ndarray) -> np.ndarray:
    """Partial sums float32 [parts, rows] added up, float64 [rows]: what the next kernel does, in its order or any other."""
    return parts.astype(np.float64).sum(axis=0)


# ------------------------------------------------------------------------------------------------ pages and embedding


def _page_open(card: Card, lengths: list[int]) -> Iterator[Check]:
    launch = card.launch("page_open")
    for position in sorted({(n - 1) // card.page_tokens * card.page_tokens for n in lengths}):
        page = int(card.lay_out(position + 1, np.random.default_rng(position))[-1])

        def prepare() -> None:
            card.lay_out(position + 1, np.random.default_rng(position))
            card.at(0, position)

        found = card.run([launch], prepare, {"page": card.pool[:, :, page]})["page"]
        with card.stream:
            others = int((card.pool == card.pool).sum()) - found.size  # NaN is not equal to itself
        wrong = int(np.count_nonzero(found)) + abs(others)
        yield none_wrong(f"page_open at position {position}", wrong, "values", "its page zero in every layer, no other page touched")


def _embed(pack: PackFile, card: Card) -> Check:
    vocab = pack.dims.vocab
    ids = sorted({0, 1, 15, 16, 17, vocab // 3, vocab // 2 + 1, vocab - 1})
    out = [card.run([card.launch("embed")], lambda: card.at(token, 0), {"residual": card.buffers.residual})["residual"] for token in ids]
    return compare("embed", np.stack(out), twins.embed(pack, ids), 0.0, f"{len(ids)} ids, bit for bit")


# --------------------------------------------------------------------------------------------------------- projections


def _normed(pack: PackFile, card: Card, layer: int, rng: np.random.Generator, limit: float) -> Iterator[Check]:
    """A norm and the projection behind it, one kernel: the residual that it leaves, and the product."""
    b, dims, prefix = card.buffers, pack.dims, f"model.layers.{layer}."
    for kernel, tensors, gain, before, behind, added, sums in NORMED:
        (launch,) = card.of(layer, name=kernel)
        first = added == "down" and layer == 0  # nothing to add yet
        into, out = getattr(b, sums), getattr(b, behind)
        shape = getattr(b, added).shape
        cases = [
            ("", _normal(rng, dims.hidden), _normal(rng, *shape)),
            (", one huge channel", _spiked(rng, dims.hidden), _normal(rng, *shape)),
            (", tiny values", 1e-4 * _normal(rng, dims.hidden), 1e-4 * _normal(rng, *shape)),  # so small that eps counts
        ]
        totals = np.stack([residual + (0 if first else _sum(parts)[: dims.hidden]) for _, residual, parts in cases]).astype(np.float64)
        y = twins.rms_norm(totals, twins.vector(pack, f"{prefix}{gain}.weight"), dims.rms_eps)
        digits = np.stack([layouts.decode_records(layouts.encode_records(row, card.group), dims.hidden, card.group) for row in y])
        products = twins.stacked(pack, [f"{prefix}{tensor}.weight" for tensor in tensors], np.concatenate([y, digits]))
        for (label, residual, parts), total, expected, rounded in zip(cases, totals, products, products[len(cases) :]):

            def prepare() -> None:
                card.write(getattr(b, before), residual)
                if not first:
                    card.write(getattr(b, added), parts)
                card.write(into, np.zeros(into.shape))

            found = card.run([launch], prepare, {"sums": into, "residual": out})
            yield compare(f"layer {layer} {kernel}{label}: residual", found["residual"], total, limit)
            # The kernel rounds the norm to digits on the way. What that may cost is what it costs the codec.
            allowed = limit + float(np.linalg.norm(rounded - expected) / np.linalg.norm(expected))
            total_sums = _sum(found["sums"])
            expected = np.concatenate([expected, np.zeros(len(total_sums) - len(expected))])  # padded rows
            yield compare(f"layer {layer} norm and {kernel}{label}", total_sums, expected, allowed, f"{len(total_sums)} rows x {dims.hidden}")
        if layer == 0:
            residual[5] = np.nan
            broken = _sum(card.run([launch], prepare, {"sums": into})["sums"])[: products.shape[1]]
            yield none_wrong(f"norm and {kernel} with a NaN", int(np.isfinite(broken).sum()), "finite rows")
        card.clear_parts()


def _spiked(rng: np.random.Generator, n: int) -> np.ndarray:
    """A residual with a single channel past FP16's range, as Qwen2 has them."""
    x = _normal(rng, n)
    x[n // 3] = 1e5
    return x


def _plain(pack: PackFile, card: Card, layer: int, rng: np.random.Generator, limit: float) -> Iterator[Check]:
    """A projection of activations that are fed as records. Where groups differ much in size, the weights of small ones hardly count; so there are two draws."""
    b = card.buffers
    for kernel, tensor, source, sums in PLAIN:
        name = f"model.layers.{layer}.{tensor}.weight"
        entry, (launch,) = pack.tensors[name], card.of(layer, name=kernel)
        into, parts = getattr(b, source), getattr(b, sums)
        draws = {"": _activations(rng, entry.cols, card.group), ", groups of one size": _normal(rng, entry.cols)}
        encoded = {label: layouts.encode_records(x, card.group) for label, x in draws.items()}
        products = twins.linear(pack, name, np.stack([layouts.decode_records(records, entry.cols, card.group) for records in encoded.values()]))
        for (label, records), expected in zip(encoded.items(), products):

            def prepare() -> None:
                card.write(into[: records.size], records)
                card.write(parts, np.zeros(parts.shape))

            found = _sum(card.run([launch], prepare, {"sums": parts})["sums"])
            expected = np.concatenate([expected, np.zeros(len(found) - len(expected))])  # padded rows
            yield compare(f"layer {layer} {kernel}{label}", found, expected, limit, f"{len(found)} rows x {entry.cols}")
        if layer == 0:
            records[2 * card.group : 2 * card.group + 4] = np.float32(np.nan).reshape(1).view(np.uint8)
            broken = _sum(card.run([launch], prepare, {"sums": parts})["sums"])[: entry.rows]
            yield none_wrong(f"{kernel} with NaN in one group", int(np.isfinite(broken).sum()), "finite rows")
    card.clear_parts()


# ---------------------------------------------------------------------------------------------- keys, values, attention


def _rope_append(pack: PackFile, card: Card, layer: int, rng: np.random.Generator, limit: float, lengths: list[int]) -> Iterator[Check]:
    b, dims, prefix = card.buffers, pack.dims, f"model.layers.{layer}.self_attn."
    launches = [launch for launch in card.of(layer, region="append_tail_kv") if launch.name != "page_open"]
    bias = np.concatenate([twins.vector(pack, f"{prefix}{x}_proj.bias") for x in "qkv"])
    for n in lengths:
        position, slot = n - 1, (n - 1) % card.page_tokens
        parts = _normal(rng, *b.qkv.shape)
        table: np.ndarray

        def prepare() -> None:
            nonlocal table
            table = card.lay_out(n, np.random.default_rng(n))
            card.write(b.qkv, parts)
            card.at(0, position)

        prepare()
        page = int(table[-1])
        found = card.run(launches, prepare, {"q": b.q, "keys": card.pool[layer, 0, page], "values": card.pool[layer, 1, page]})
        heads = (_sum(parts)[: len(bias)] + bias).reshape(1, -1, dims.head_dim)
        turned = twins.rope(heads[:, : -dims.num_kv_heads], np.array([position]), dims.rope_theta)[0]
        yield compare(f"layer {layer} rope_append, position {position}: q", found["q"], turned[: dims.num_heads], limit)
        expected = np.stack([turned[dims.num_heads :], heads[0, -dims.num_kv_heads :]])
        rows = np.stack([layouts.from_pages(found[kind], [0], card.page_tokens, dims, card.page_tokens)[slot] for kind in ("keys", "values")])
        yield within(
            f"layer {layer} rope_append, position {position}: key and value", rows, expected, card_prefill.row_bound(expected, limit), "once rounded to FP16, read from its page"
        )
        with card.stream:
            written = int((card.pool == card.pool).sum())
        yield none_wrong(f"layer {layer} rope_append, position {position}: nothing else", abs(written - 2 * dims.kv_size), "values written elsewhere")
    card.clear_parts()


def _attention(card: Card, layer: int, rng: np.random.Generator, limit: float, lengths: list[int]) -> Iterator[Check]:
    """One query over pages in shuffled order; every page that the sequence does not own is full of NaN."""
    b, dims, here = card.buffers, card.dims, slice(layer, layer + 1)
    launches = card.of(layer, region="paged_attention")
    for n in lengths:
        keys, values = (_normal(rng, n, dims.num_kv_heads, dims.head_dim).astype(np.float16) for _ in range(2))
        q = 2 * _normal(rng, 1, dims.num_heads, dims.head_dim)  # so that some tokens weigh much more than others
        table: np.ndarray

        def prepare() -> None:
            nonlocal table
            table = card.lay_out(n, np.random.default_rng(n))
            card.put(here, table, keys, values)
            card.write(b.q, q)
            card.at(0, n - 1)

        found = card.run(launches, prepare, {"records": b.x})["records"]
        with card.stream:
            pages = [card.pool[layer, kind] for kind in (0, 1)]
        expected = twins.paged_attention(q.astype(np.float64), *map(card.read, pages), table, n - 1, dims, card.page_tokens)[0]
        yield records_match(f"layer {layer} paged attention, token {n}", found, expected, card.group, limit, f"{len(table)} shuffled pages between NaN")


def _swiglu(card: Card, layer: int, rng: np.random.Generator, limit: float) -> Iterator[Check]:
    b, inner = card.buffers, card.dims.intermediate
    if not (launches := card.of(layer, name="swiglu")):
        return  # part of the projection before it
    parts = _normal(rng, *b.gate_up.shape) * 3
    parts[1:] *= 1e-3
    parts[0, :4] = [-200, -100, 100, 200]  # where a careless exponential overflows
    parts[0, [7, inner + 7]] = 300, 1000  # a product past FP16's range
    total = _sum(parts)
    found = card.run(launches, lambda: card.write(b.gate_up, parts), {"records": b.inner})["records"]
    yield records_match(f"layer {layer} swiglu", found, twins.swiglu(total[:inner], total[inner : 2 * inner]), card.group, limit)
    parts[0, inner + 5] = np.nan
    broken = layouts.decode_records(card.run(launches, lambda: card.write(b.gate_up, parts), {"records": b.inner})["records"], inner, card.group)
    yield none_wrong(f"layer {layer} swiglu with a NaN", int(np.isfinite(broken[: card.group]).sum()), "finite activations in its group")
    card.clear_parts()


# ----------------------------------------------------------------------------------------------------------- the head


def _head(pack: PackFile, card: Card, rng: np.random.Generator, limit: float) -> Iterator[Check]:
    b, dims = card.buffers, pack.dims
    gain = twins.vector(pack, model.FINAL_NORM)
    parts = _normal(rng, *b.down.shape)
    # A spike rules the sum of squares, and all other elements are then too small beside it to show a fault of theirs.
    for label, residual in (("", _normal(rng, dims.hidden)), (", with a spike", _spiked(rng, dims.hidden))):

        def prepare_norm() -> None:
            card.write(b.residual, residual)
            card.write(b.down, parts)

        total = residual.astype(np.float64) + _sum(parts)[: dims.hidden]
        halves = card.run([card.launch("final_norm")], prepare_norm, {"halves": b.halves})["halves"]
        yield compare(f"final_norm{label}", layouts.decode_halves(halves), twins.rms_norm(total[None], gain, dims.rms_eps)[0], limit)

    halves = layouts.encode_halves(_normal(rng, dims.hidden) * 4)

    def prepare_head() -> None:
        card.write(b.halves, halves)
        card.write(b.logit_parts, np.zeros(b.logit_parts.shape))

    found = _sum(card.run([card.launch("lm_head")], prepare_head, {"sums": b.logit_parts})["sums"])
    name = model.EMBED if dims.tied else model.LM_HEAD
    expected = twins.linear(pack, name, layouts.decode_halves(halves)[None])[0]
    expected = np.concatenate([expected, np.zeros(len(found) - len(expected))])
    yield compare("lm_head", found, expected, limit, f"{len(found)} rows x {dims.hidden}")


def _argmax(card: Card, rng: np.random.Generator) -> Iterator[Check]:
    """The lowest allowed id of the largest logit; -1 where an allowed logit is not finite; and the scalars of the next step."""
    b, launch, vocab = card.buffers, card.launch("argmax"), card.dims.vocab
    shape, before = b.logit_parts.shape, card.read(b.allowed)
    wrong = wrong_sums = missed = draws = 0
    for best in (0, vocab - 1, vocab // 2, None, None, None, None, None):
        banned = rng.integers(1, vocab - 1, vocab // 10)
        banned = banned[banned != best]
        parts = rng.integers(0, 8, shape).astype(np.float32)  # few values, so ties are common; small integers, so sums are exact
        parts[0, vocab:] = 1000  # padding rows look best, and so do ids without a token
        parts[0, banned] = np.where(rng.random(len(banned)) < 0.5, 900, np.nan)
        if best is not None:
            parts[0, best] = 100
        position = int(rng.integers(card.engine.context_limit - 1))
        card.write(b.allowed, allowed_words(vocab, vocab, banned))

        def prepare() -> None:
            card.write(b.logit_parts, parts)
            card.at(3, position)

        found = card.run([launch], prepare, {"logits": b.logits, "step": b.step})
        total = _sum(parts)
        usable = np.where(np.isin(np.arange(len(total)), banned) | (np.arange(len(total)) >= vocab), -np.inf, total)
        expected = int(usable.argmax())
        draws += 1
        wrong += found["step"].tolist() != [expected, position + 1, expected] or int(b.told[position]) != expected
        wrong_sums += int(np.count_nonzero(~((found["logits"] == total[: len(found["logits"])]) | np.isnan(total[: len(found["logits"])]))))
        parts[-1, rng.choice(np.flatnonzero(np.isfinite(usable)))] = rng.choice([np.nan, np.inf, -np.inf])
        missed += int(card.run([launch], prepare, {"step": b.step})["step"][2]) != -1
    card.write(b.allowed, before)
    yield none_wrong("argmax", wrong, "wrong picks", f"{draws} draws with ties, padding and ids that may not be chosen; the next step's scalars")
    yield none_wrong("argmax: logits", wrong_sums, "wrong sums")
    yield none_wrong("argmax: a logit that is not finite", missed, "missed", f"{draws} draws")
    card.clear_parts()


def _graphs(card: Card) -> Iterator[Check]:
    """Both captured variants of a step, and what ends a prompt, give the bits of their launches, run one by one."""
    engine, vocab = card.engine, card.dims.vocab
    ids = [pow(7, i, 9973) % vocab for i in range(2 * card.page_tokens)]

    def differ(captured: np.ndarray, launches: list[Launch]) -> int:
        for launch in launches:
            launch(card.stream)
        return int(np.count_nonzero(captured.view(np.uint32) != card.read(card.buffers.logits)[:vocab].view(np.uint32)))

    for opens, n in ((False, card.page_tokens + 1), (True, card.page_tokens)):
        engine.reset()
        engine.prefill(ids[:n])
        captured = engine.decode(ids[n])
        engine.rewind(n)
        engine._hold(n + 1)
        card.at(ids[n], n)
        different = differ(captured, card.step(opens))
        engine._rewind(n)
        yield none_wrong(f"captured graph, {'a page begins' if opens else 'no page begins'}", different, "logits with other bits")
    engine.reset()
    captured = engine.prefill(ids)
    card.at(ids[-1], len(ids) - 1)  # the end of the step has moved on
    yield none_wrong("captured graph, a prompt ends", differ(captured, engine._ends[False]), "logits with other bits")
    engine.reset()


def _persistent(card: Card, lengths: list[int], limit: float) -> Iterator[Check]:
    """A token by the persistent kernel against the same token by the launches above: its logits and the row that it leaves in the cache, at
    several lengths. And its bits: one launch of several tokens gives those of a launch a token."""
    engine, vocab = card.engine, card.dims.vocab
    logits, rows, other = [], [], 0
    for n in (n for n in lengths if n + CHUNK <= engine.context_limit):
        ids = [pow(7, i, 9973) % vocab for i in range(n + 1)]
        engine.reset()
        engine.prefill(ids[:n])
        ours = engine.decode(ids[n])
        page = int(engine._pages.table.pages[n // card.page_tokens])
        kept = card.read(card.pool[:, :, page]).astype(np.float32)
        engine.rewind(n)
        engine._hold(n + 1)
        card.at(ids[n], n)
        for launch in card.step(n % card.page_tokens == 0):
            launch(card.stream)
        logits.append((ours, card.read(card.buffers.logits)[:vocab]))
        rows.append((kept, card.read(card.pool[:, :, page]).astype(np.float32)))
        engine._rewind(n)
        told = []
        for sizes in ((1,) * CHUNK, (CHUNK,)):
            card.at(ids[n], n)
            for k, tokens in enumerate(sizes):
                engine._launch(n + k, tokens=tokens)
            told.append((card.read(card.buffers.logits)[:vocab], card.buffers.told[n : n + CHUNK].copy()))
            engine._rewind(n)
        other += sum(int(np.count_nonzero(one.view(np.uint32) != several.view(np.uint32))) for one, several in zip(*told))
    engine.reset()
    detail = f"{len(logits)} lengths"
    yield compare("persistent kernel: logits", *map(np.stack, zip(*logits)), limit, detail)
    yield compare("persistent kernel: rows of the cache", *map(np.stack, zip(*rows)), limit, detail)
    yield none_wrong("persistent kernel: several tokens a launch", other, "other bits of logits and ids", detail)
