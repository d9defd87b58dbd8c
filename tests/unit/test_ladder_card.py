"""The ladder of the Hopper engines on a card that numpy plays (``cardkit``): sound kernels pass, each fault is found by its check."""

from __future__ import annotations

import dataclasses
import json

import cardkit
import numpy as np
import pytest
import tiny

from nanoqwen import synthetic_pack
from nanoqwen.bench.receipts import check_receipt, read_receipt
from nanoqwen.config import Dims
from nanoqwen.engines import fastest_hopper
from nanoqwen.errors import InputError
from nanoqwen.ladder import receipt, run_ladder
from nanoqwen.ladder.report import Check, Report, Tier
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same weights with a context of 640, which has two chunks, and of 96, which is soon done."""
    folder = tmp_path_factory.mktemp("card")
    for context in (640, 96):
        pack(tiny.make(folder / f"source-{context}", tiny.Sizes(context=context)), folder / f"{context}.nanoqwen")
    return folder


@pytest.fixture
def file(files):
    return files / "96.nanoqwen"


@pytest.fixture
def card(monkeypatch):
    with cardkit.played(monkeypatch) as played:
        yield played


def climb(card, file, tier: str = "unit", engine: str = "eager") -> Report:
    with open_pack(file) as opened:
        card.pack = opened
        return run_ladder(opened, tier, engine=engine, prompts=4, tokens=6)


def failed(report: Report) -> list[str]:
    return [check.name for tier in report.tiers for check in tier.checks if not check.passed]


# -------------------------------------------------------------------------------------------------------- sound cards


@pytest.mark.parametrize("engine", ["eager", "graph", "persistent"])
def test_a_sound_card_passes_every_tier(card, files, engine):
    report = climb(card, files / "640.nanoqwen", "graph", engine)
    assert report.passed, failed(report)
    names = [check.name for check in report.tiers[1].checks]
    for kernel in ("page_open", "embed", "norm and gemv_qkv", "gemv_o", "gemv_gate_up", "gemv_down", "rope_append", "paged attention", "swiglu", "final_norm",
                   "lm_head", "argmax", "embed_rows", "norm_rows_tiled 1", "norm_rows_tiled 2", "norm_rows_spread 1", "norm_rows_spread 2", "norm_rows_digits 1", "norm_rows_digits 2", "rope_append_parts", "prefill_attention",
                   "gemm_parts_digits8 qkv", "gemm_parts_digits16 qkv", "gemm_parts_few qkv", "gemm_swiglu_digits8 gate_up", "gemm_swiglu_digits16 gate_up", "gemm_parts_digits8 down", "quantise_tiles",
                   "gemm_parts_few o", "gemm_parts down", "gemm_swiglu_few", "gemm_swiglu_middle gate_up", "gemm_swiglu gate_up", "last_row", "the same bits"):
        assert any(kernel in name for name in names), kernel
    for n in (1, 15, 16, 17, 49, 511, 512, 513):
        assert {f"layer 0 paged attention, token {n}"} <= set(names) and any(name.endswith(f"prefill_attention, prompt of {n}") for name in names)
    assert any("captured graph" in name for name in names) == (engine == "graph")
    assert any("persistent kernel" in name for name in names) == (engine == "persistent")
    assert "layer 1, 49 tokens one by one" in [check.name for check in report.tiers[2].checks]
    assert report.tiers[3].facts["tokens"] == 24 and report.tiers[3].facts["mismatches"] == 0
    assert "HumanEval" in report.tiers[3].subject or "own prompts" in report.tiers[3].subject


@pytest.mark.parametrize("sizes", [tiny.GQA7, tiny.TIED], ids=["7:1", "tied"])
def test_other_shapes_pass(card, tmp_path, sizes):
    pack(tiny.make(tmp_path / "source", dataclasses.replace(sizes, context=96)), tmp_path / "m.nanoqwen")
    report = climb(card, tmp_path / "m.nanoqwen", "layer")
    assert report.passed, failed(report)


@pytest.mark.parametrize("small", [Dims(2, 256, 384, 2, 1, 128, 2064, 640), Dims(2, 448, 1024, 7, 1, 64, 2100, 96, tied=True)], ids=["", "group 64, tied"])
def test_a_planned_model_is_read_back_from_the_card(card, monkeypatch, small):
    monkeypatch.setattr(synthetic_pack, "synthetic_dims", lambda name: small)
    plan = card.pack = synthetic_pack.planned("synthetic:demo")
    report = run_ladder(plan, "graph", engine="graph", prompts=6, tokens=5)
    assert report.passed, failed(report)
    assert report.tiers[0].subject.startswith("no file") and any(("embed_tokens" if small.tied else "lm_head") in check.name for check in report.tiers[0].checks)
    assert "varied ids of the whole vocabulary" in report.tiers[3].facts["source"]


def test_without_a_named_engine_a_planned_model_takes_the_card(card, monkeypatch):
    small = Dims(1, 256, 384, 2, 1, 128, 96, 64)
    monkeypatch.setattr(synthetic_pack, "synthetic_dims", lambda name: small)
    plan = card.pack = synthetic_pack.planned("synthetic:demo")
    report = run_ladder(plan, "unit")
    assert report.passed and f"engine {fastest_hopper()}" in report.tiers[1].subject
    for kernel in ("prefill_attention", "gemm_parts_middle o", "gemm_swiglu_middle gate_up", " down", "last_row"):
        assert any(kernel in check.name for check in report.tiers[1].checks), f"a prompt of one layer does without, the ladder does not: {kernel}"


# -------------------------------------------------------------------------------------------------------------- faults


def spoil(card, name: str, change) -> None:
    """`change(launch)` runs after the kernel and spoils what it left."""
    sound = card.kernels[name]

    def spoiled(launch) -> None:
        sound(launch)
        change(launch)

    card.kernels[name] = spoiled


def drop(array: np.ndarray, at: int):
    array.reshape(-1)[at] = 0


def one_more_token(card) -> None:
    """Attention that reads a token past the end: a row of zeros that takes a share, or NaN."""
    sound = card.kernels["attention_combine"]

    def longer(launch) -> None:
        card.b.step[1] += 1
        sound(launch)
        card.b.step[1] -= 1

    card.kernels["attention_combine"] = longer


def wrong_pairs(card) -> None:
    def turn(launch) -> None:
        card.b.q[...] = card.b.q.reshape(*card.b.q.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(card.b.q.shape)

    spoil(card, "rope_append", turn)


def last_of_equals(card) -> None:
    def choose(launch) -> None:
        best = np.flatnonzero(card.b.logits == card.b.logits[card.b.step[2]])[-1] if card.b.step[2] >= 0 else -1
        card.b.step[0], card.b.step[2] = max(best, 0), best

    spoil(card, "argmax", choose)


def noise(card) -> None:
    rng = np.random.default_rng()
    spoil(card, "swiglu", lambda launch: card.b.inner.__setitem__(slice(0, 1), rng.integers(0, 255, 1)))


def not_causal(card, kernel: str = "prefill_attention") -> None:
    """A warp that masks by its tile instead of by its rows: query 16 sees token 17."""

    def one_more(launch) -> None:
        from nanoqwen.ladder import twins

        q, key_map, _, table, span, out, _ = (getattr(a, "value", a) for a in launch.given)
        position, n = map(int, span)
        if n > 17:
            pools = next(layer for layer in card.engine._pages.pool if layer[0].data.ptr == key_map.opaque[0])
            rows = card.read_x(out, n, card.dims.q_size)
            rows[16] = twins.paged_attention(q[16:17].astype(np.float64), *pools, table, position + 17, card.dims, 16)[0]
            card.write_x(out, rows)

    spoil(card, kernel, one_more)


def slightly_more(array) -> None:
    with np.errstate(invalid="ignore"):  # slots that nobody wrote
        array *= np.float32(1.0001)


def slot_of_the_neighbour(card) -> None:
    def shift(launch) -> None:
        for layer in card.engine._pages.pool:
            layer[0] = np.roll(layer[0], 64, -1)

    spoil(card, "rope_append_parts", shift)


def hand_on(launch, to, source: int) -> None:
    """The row before the last one of ``launch.given[source]``."""
    to[...] = launch.given[source][int(launch.given[3][1]) - 2]


FAULTS = {
    "a page is not cleared": ("page_open at", lambda c: spoil(c, "page_open", lambda _: c.engine._pages.pool[-1, 1].fill(np.nan))),
    "another page is cleared": ("page_open at", lambda c: spoil(c, "page_open", lambda _: c.engine._pages.pool.fill(0))),
    "an embedding of the neighbour": ("embed", lambda c: spoil(c, "embed", lambda _: c.b.residual.__setitem__(..., np.roll(c.b.residual, 1)))),
    "the residual is not passed on": ("gemv_qkv", lambda c: spoil(c, "gemv_qkv", lambda _: drop(c.b.residual_mid, 9))),
    "a product is off by a thousandth": ("norm and gemv_qkv", lambda c: spoil(c, "gemv_qkv", lambda _: c.b.qkv.__imul__(np.float32(1.001)))),
    "a row of the down projection is lost": ("gemv_down", lambda c: spoil(c, "gemv_down", lambda _: drop(c.b.down[0], 17))),
    "a row of the last tile is lost": ("gemv_gate_up", lambda c: spoil(c, "gemv_gate_up", lambda _: drop(c.b.gate_up[0], -1))),
    "q is rotated in the wrong pairs": ("rope_append", wrong_pairs),
    "attention sees one token too many": ("paged attention", one_more_token),
    "a NaN is swallowed": ("swiglu with a NaN", lambda c: spoil(c, "swiglu", lambda _: c.digits(c.b.inner, np.nan_to_num(decoded(c))))),
    "the head loses a row": ("lm_head", lambda c: spoil(c, "lm_head", lambda _: drop(c.b.logit_parts[0], 511))),
    "the last of equal logits wins": ("argmax", last_of_equals),
    "a kernel that races": ("repeats are bit-equal", noise),
    "a chunk's embedding of the neighbour": ("embed_rows", lambda c: spoil(c, "embed_rows", lambda launch: launch.given[2].__imul__(np.float32(-1)))),
    "prefill norm without its factor": ("norm_rows_spread 1", lambda c: spoil(c, "norm_rows_spread", lambda launch: launch.given[7].__imul__(np.float32(1.01)))),
    "a bound that is half": ("bound of the MLP", lambda c: spoil(c, "norm_rows_spread", lambda launch: launch.given[9] is None or launch.given[9].__imul__(np.float32(0.5)))),
    "a norm's digits of one token are another's": ("norm_rows_digits 1", lambda c: spoil(c, "norm_rows_digits", lambda launch: launch.given[5].__setitem__(..., np.roll(launch.given[5], 16)))),
    "down's digits of one token are another's": ("quantise_tiles", lambda c: spoil(c, "quantise_tiles", lambda launch: launch.given[3].__setitem__(..., np.roll(launch.given[3], 16)))),
    "a product of digits is off": ("gemm_parts_digits16 qkv", lambda c: spoil(c, "gemm_parts_digits16", lambda _: slightly_more(c.engine._prefiller.parts))),
    "gate and up of digits lose a column": ("gemm_swiglu_digits8", lambda c: spoil(c, "gemm_swiglu_digits8", lambda _: drop(c.engine._prefiller.x_inner[0, 0], slice(0, 8)))),
    "a product of a few tokens is off": ("gemm_parts_few qkv", lambda c: spoil(c, "gemm_parts_few", lambda _: slightly_more(c.engine._prefiller.parts))),
    "prefill attention sees the future": ("prefill_attention", not_causal),
    "swiglu of a prefill loses a column": ("gemm_swiglu_middle", lambda c: spoil(c, "gemm_swiglu_middle", lambda _: drop(c.engine._prefiller.x_inner[0, 0], slice(0, 8)))),
    "prefill appends to the wrong slot": ("rope_append_parts", slot_of_the_neighbour),
    "the row before the last is handed on": ("last_row: residual", lambda c: spoil(c, "last_row", lambda launch: hand_on(launch, c.b.residual_mid, 0))),
    "the query before the last is handed on": ("last_row: q", lambda c: spoil(c, "last_row", lambda launch: hand_on(launch, c.b.q, 1))),
    "the last token's place is off by one": ("last_row: scalars", lambda c: spoil(c, "last_row", lambda _: c.b.step.__setitem__(1, c.b.step[1] + 1))),
}  # fmt: skip


def decoded(card) -> np.ndarray:
    from nanoqwen.ladder import layouts

    return layouts.decode_records(card.b.inner, card.dims.intermediate, card.engine.group)


@pytest.mark.parametrize("fault", FAULTS)
def test_unit_finds(card, file, fault):
    check, break_it = FAULTS[fault]
    break_it(card)
    report = climb(card, file)
    assert report.tiers[1].status == "FAILED"
    assert any(check in name for name in failed(report)), failed(report)


def test_the_attention_of_few_tokens_is_checked_where_it_is_chosen(card, file, monkeypatch):
    from nanoqwen.cuda import prefill
    from nanoqwen.cuda.attention_plan import SPREAD

    monkeypatch.setattr(prefill, "attention_kernel", lambda *_: SPREAD)
    assert climb(card, file).passed
    not_causal(card, SPREAD)
    assert any(SPREAD in name for name in failed(climb(card, file)))


def test_unit_finds_a_weight_that_is_not_the_file_s(card, file, monkeypatch):
    from nanoqwen.cuda import weights
    from nanoqwen.engines import hopper

    def damaged(pack, progress=None):
        made = weights.upload(pack, progress)
        made.layers[-1].down.bundles.reshape(-1)[1] ^= 1 << 20
        return made

    monkeypatch.setattr(hopper, "upload", damaged)
    assert failed(climb(card, file))[0] == "on the card: model.layers.1.mlp.down_proj.weight"


def test_unit_finds_a_graph_that_is_not_its_launches(card, file, monkeypatch):
    """The graph lacks attention, its launches do not."""
    from nanoqwen.engines import hopper

    made = hopper.HopperEngine._make_launches

    def wrong(engine) -> None:
        made(engine)
        engine._end_graphs = dict.fromkeys((False, True), engine._capture(engine._ends[False][2:]))

    monkeypatch.setattr(hopper.HopperEngine, "_make_launches", wrong)
    assert "captured graph, a prompt ends" in failed(climb(card, file, engine="graph"))


def test_layer_finds_what_no_kernel_shows_alone(card, file):
    """The second norm of a layer with the first one's gain would be right as a norm; here it adds the wrong projection twice."""
    from nanoqwen.ladder.card import Card

    sound = Card.layer
    try:
        Card.layer = lambda self, layer: sound(self, layer)[:-1]  # the down projection is never launched
        with open_pack(file) as opened:
            card.pack = opened
            from nanoqwen.config import load_settings
            from nanoqwen.engines import open_engine
            from nanoqwen.ladder import layer
            from nanoqwen.ladder.card import CardBlocks

            with open_engine(opened, "eager") as engine:
                found = list(layer.checks(opened, CardBlocks(Card(engine)), list(range(1, 50)), load_settings()))
    finally:
        Card.layer = sound
    assert [check.name for check in found if not check.passed] == [f"layer {i}, 49 tokens {how}" for i in (0, 1) for how in ("in pieces", "one by one")]


def test_graph_finds_a_host_that_mixes_up_tokens(card, file):
    """Every kernel is right; the first step after a prompt is handed another token than the one that was chosen."""
    from nanoqwen.engines.hopper import HopperEngine

    place = HopperEngine._place
    HopperEngine._place = lambda self, token, position: place(self, token + 7 * (position > 0), position)
    try:
        report = climb(card, file, "graph")
    finally:
        HopperEngine._place = place
    assert [tier.status for tier in report.tiers] == ["passed", "passed", "passed", "FAILED"]
    assert "margin between its two best" in report.tiers[3].lines[0] and "standard deviation" in "".join(report.tiers[3].lines)


def test_the_engine_is_usable_after_the_ladder(card, file):
    from nanoqwen.config import load_settings
    from nanoqwen.engines import open_engine
    from nanoqwen.ladder import card_unit
    from nanoqwen.ladder.card import Card

    with open_pack(file) as opened:
        card.pack = opened
        with open_engine(opened, "graph") as engine:
            before = engine.prefill([1, 2, 3]).copy(), engine.decode(4).copy()
            assert all(check.passed for check in card_unit.checks(opened, Card(engine), load_settings()))
            assert engine.position == 0
            after = engine.prefill([1, 2, 3]), engine.decode(4)
    assert all(np.array_equal(a, b) for a, b in zip(before, after))


def louder(card, tokens: int) -> None:
    card.b.logits *= np.float32(1.01)


def other_row(card, tokens: int) -> None:
    position = int(card.b.step[1]) - 1
    rows = card.engine._pages.pool.reshape(card.dims.num_layers, 2, -1, card.dims.num_kv_heads, 16, card.dims.head_dim)
    rows[-1, 1, card.b.block_table[position // 16], 0, position % 16] *= 2


def other_in_a_row(card, tokens: int) -> None:
    if tokens > 1:
        card.b.logits[3] += np.float32(1e-4)


@pytest.mark.parametrize("spoil, named", [(louder, ["logits"]), (other_row, ["rows of the cache"]), (other_in_a_row, ["several tokens a launch"])])
def test_a_persistent_kernel_that_computes_something_else_is_named(card, files, monkeypatch, spoil, named):
    monkeypatch.setattr(cardkit.PersistentKernel, "spoil", staticmethod(spoil))
    found = failed(climb(card, files / "640.nanoqwen", "unit", "persistent"))
    assert found and all(name.startswith("persistent kernel") for name in found) and any(word in name for word in named for name in found)


# ------------------------------------------------------------------------------------------------------------ receipts


def report_of(match: float = 0.999) -> Report:
    unit = Tier("unit", "kernels", "float64", [Check("a", True, 2e-6, 1e-5), Check("b", True, 0.5, 1.0, "of the bound"), Check("c", True, 0, 0, "rows")], ran=True)
    graph = Tier("graph", "engine", "oracle", [Check("token match", match >= 0.995, match, 0.995, "share, at least")], ["a line"], {"tokens": 6400}, 3.21, True)
    return Report("m", [unit, graph])


def test_a_receipt_holds_every_model_and_engine(tmp_path):
    device = {"name": "NVIDIA H200"}
    for model, engine in (("embedded checkpoint", "graph"), ("embedded checkpoint", "eager"), ("synthetic:7b", "graph")):
        path = receipt.merge(report_of(), model, engine, f"nanoqwen validate {model} {engine}", device, {"cupy": "14"}, tmp_path)
    found = read_receipt(path)
    assert check_receipt(path) == [] and found["name"] == path.stem == "validate"
    assert {name: set(engines) for name, engines in found["results"]["models"].items()} == {"embedded checkpoint": {"graph", "eager"}, "synthetic:7b": {"graph"}}
    unit = found["results"]["models"]["synthetic:7b"]["graph"]["tiers"]["unit"]
    assert unit["checks"] == 3 and unit["failed"] == 0 and unit["worst"] == {"check": "b", "value": 0.5, "limit": 1.0, "unit": "of the bound"}
    graph = found["results"]["models"]["synthetic:7b"]["graph"]["tiers"]["graph"]
    assert graph["tokens"] == 6400 and graph["lines"] == ["a line"] and "worst" not in graph
    assert found["command"].count("&&") == 2 and len(found["samples"]) == 3
    assert {"kernels/decode/final_norm.cu", "nanoqwen/cuda/decode.py", "nanoqwen/ladder/twins.py", "nanoqwen/engines/hopper.py"} <= set(found["sources"])
    again = receipt.merge(report_of(0.5), "synthetic:7b", "graph", "nanoqwen validate synthetic:7b graph", device, {}, tmp_path)
    found = read_receipt(again)
    assert found["results"]["models"]["synthetic:7b"]["graph"]["passed"] is False and found["command"].count("&&") == 2


@pytest.mark.parametrize("change", ["sources", "device"])
def test_a_receipt_never_mixes_two_states(tmp_path, change):
    path = receipt.merge(report_of(), "a", "graph", "first", {"name": "NVIDIA H200"}, {}, tmp_path)
    if change == "sources":
        held = json.loads(path.read_text(encoding="utf-8"))
        held["sources"]["nanoqwen/ladder/twins.py"] = "0" * 64
        path.write_text(json.dumps(held), encoding="utf-8")
    receipt.merge(report_of(), "b", "graph", "second", {"name": "NVIDIA H200" if change == "sources" else "NVIDIA H100"}, {}, tmp_path)
    found = read_receipt(path)
    assert set(found["results"]["models"]) == {"b"} and found["command"] == "second" and len(found["samples"]) == 1


def test_only_a_whole_ladder_of_a_hopper_engine_gets_a_receipt():
    for engine, whole, word in ((None, True, "--engine"), ("cpu", True, "--engine"), ("graph", False, "--tier")):
        with pytest.raises(InputError, match=word):
            receipt.check_request(engine, whole=whole)
