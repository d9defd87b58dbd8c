"""The interactive pieces compute what the package computes: their scripts run in node on the same inputs."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from nanoqwen import book, int4
from nanoqwen.book.facts import limit_ms
from nanoqwen.config import Dims, load_settings
from nanoqwen.model import bytes_per_token

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: the scripts' arithmetic is not checked here")


def node(script: str, expression: str, given: object) -> object:
    """Value of a JavaScript expression; ``M`` is the script's module and ``X`` the given data."""
    code = f"const M = require({json.dumps(str(STATIC / script))}), X = {json.dumps(given)}; console.log(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def config_of(name: str) -> dict:
    return json.loads(html.unescape(re.search(r'data-config="([^"]*)"', book.widget(name)._repr_html_()).group(1)))


@needs_node
def test_token_bytes_is_the_twin_of_bytes_per_token():
    rng = np.random.default_rng(3)
    models = [Dims.qwen2_5_coder_7b(), Dims(24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True)]
    models += [
        Dims(int(rng.integers(1, 90)), 128 * int(rng.integers(1, 64)), 128 * int(rng.integers(1, 200)), int(rng.integers(1, 9)) * 4, 4, 128, int(rng.integers(300, 200000)), 4096)
        for _ in range(20)
    ]
    cases = [(dims, group, context) for dims in models for group in load_settings().quant.allowed_groups for context in (0, 1, 49, 512, 32768)]
    given = [{**asdict(dims), "group": group, "context": context} for dims, group, context in cases]
    option = f"{{bits: 4, group: x.group, context: x.context, valueBytes: {load_settings().kv.value_bytes}}}"
    got = node("token_bytes.js", f"X.map((x) => M.bytesPerToken(x, {option}))", given)
    assert got == [bytes_per_token(*case) for case in cases]
    totals = [g["total"] for g in got]
    times = node("token_bytes.js", "X.map((n) => M.limitMs(n, 3350))", totals)
    assert times == pytest.approx([limit_ms(n, 3350) for n in totals], rel=1e-12)


@needs_node
def test_other_widths_scale_the_codes_and_drop_the_scales():
    dims = asdict(Dims.qwen2_5_coder_7b())
    four, eight, sixteen = node(
        "token_bytes.js", "[4, 8, 16].map((bits) => M.bytesPerToken(X, {bits, group: 128, context: 0, valueBytes: 2}))", dims
    )
    assert eight["int4"] == 2 * four["int4"] and sixteen["int4"] == 4 * four["int4"]
    assert eight["scales"] == four["scales"] > 0 == sixteen["scales"]
    assert sixteen["lm_head"] == four["lm_head"]


@needs_node
def test_the_nibble_map_packs_like_the_package():
    rng = np.random.default_rng(5)
    codes = np.vstack([rng.integers(-8, 8, (200, 8)), np.full((1, 8), -8), np.full((1, 8), 7), np.arange(8)[None] - 4]).astype(np.int8)
    words = int4.pack_codes(codes)[:, 0]
    shifts = config_of("nibble-map")["shuffle_bits"]
    assert node("nibble_map.js", f"X.map((c) => M.packWord(c, {shifts}))", codes.tolist()) == words.tolist()
    assert node("nibble_map.js", f"X.map((w) => M.unpackWord(w, {shifts}))", words.tolist()) == codes.tolist()
    pairs = node("nibble_map.js", "X.map((w) => [0, 1, 2, 3].map((j) => M.pair(w, j)))", words.tolist())
    for word, row, steps in zip(words, codes, pairs):
        for j, step in enumerate(steps):
            assert step["masked"] == int(word) >> 4 * j & 0x000F000F
            assert (step["low"], step["high"]) == (row[2 * j], row[2 * j + 1])
    plain = node("nibble_map.js", "X.map((w) => M.plainOrder(w))", words.tolist())
    assert plain == [[(n - 16 if n > 7 else n) for n in (int(w) >> 4 * i & 15 for i in range(8))] for w in words]


def test_the_pieces_carry_the_constants_of_the_configuration():
    settings = load_settings()
    assert tuple(config_of("nibble-map")["shuffle_bits"]) == settings.quant.shuffle_bits
    given = config_of("token-bytes")
    assert given["models"]["qwen2.5-coder-7b"]["intermediate"] == Dims.qwen2_5_coder_7b().intermediate
    assert (given["bits"], given["group"], given["context"]) == (settings.quant.bits, settings.quant.group, settings.benchmark.prompt_tokens)


@pytest.mark.parametrize("name, says", [("nibble-map", ["w7", "w0", "bits 31 to 28"]), ("token-bytes", ["INT4 weights", "3.263 GB", "1.090 GB"])])
def test_a_still_figure_stands_where_no_script_runs(name, says):
    made = book.widget(name)
    assert repr(made) == f"<widget: {name}>"
    still = made._repr_html_()
    assert "<figure" in still and all(word in still for word in says)


def test_an_unknown_widget_is_refused():
    with pytest.raises(ValueError, match="no widget is called 'chess'; there are: nibble-map, token-bytes"):
        book.widget("chess")
