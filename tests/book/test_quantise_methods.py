"""The page about the embedded checkpoint draws conclusions from a receipt; here they are checked against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoqwen.bench import quantise
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.book import demodoc
from nanoqwen.config import load_settings
from nanoqwen.demo import training_record
from nanoqwen.int4_search import METHODS

GROUPS = load_settings().quant.allowed_groups


@pytest.fixture(scope="module")
def results() -> dict:
    return read_receipt(receipts_folder() / f"{quantise.NAME}.json")["results"]


def test_every_combination_was_measured(results):
    assert set(results) == {"fp32", *(f"{method}_{group}" for method in METHODS for group in GROUPS)}
    assert len({row["tokens"] for row in results.values()}) == 1


def test_what_the_page_concludes(results):
    trained = load_settings().quant.group
    for group in GROUPS:
        usual, searched = results[f"absmax_{group}"], results[f"mse_{group}"]
        assert searched["weight_error"] < usual["weight_error"]
        assert (searched["perplexity"] < usual["perplexity"]) == (group != trained)
        if group != trained:
            assert usual["weight_error"] < results[f"absmax_{trained}"]["weight_error"]
            assert usual["perplexity"] > results[f"absmax_{trained}"]["perplexity"], "a smaller error, and yet new to the checkpoint"
    assert all(row["perplexity"] >= results["fp32"]["perplexity"] for row in results.values())


def test_the_receipt_and_the_training_record_agree(results):
    """Two programs, one on a GPU: the same perplexity in FP32 and, but for the FP16 cache, in INT4."""
    recorded = json.loads(training_record().read_text(encoding="utf-8"))["results"]["sample"]
    assert results["fp32"]["perplexity"] == pytest.approx(recorded["fp32"]["together"]["perplexity"], abs=1e-4)
    assert results["absmax_128"]["perplexity"] == pytest.approx(recorded["int4"]["together"]["perplexity"], rel=1e-3)


def test_the_table(results):
    table = demodoc.demo_part("methods")
    for row in results.values():
        assert f"{row['perplexity']:.3f}" in table
    assert quantise.COMMAND in table


def test_a_run_of_the_command(tmp_path, monkeypatch, capsys):
    """From end to end on one short module, into a folder of its own."""
    written = {}
    texts = quantise.held_out_texts
    monkeypatch.setattr(quantise, "held_out_texts", lambda tokenizer: [quantise.Text("bisect.py", text.ids[:80], 200) for text in texts(tokenizer)[:1]])
    monkeypatch.setattr(quantise, "write_receipt", lambda *parts, **named: written.update(parts=parts, **named) or Path("receipt.json"))
    quantise.main([])
    name, command, results, samples, sources, protocol = written["parts"]
    assert (name, command) == (quantise.NAME, quantise.COMMAND) and len(samples) == len(results) == 7
    assert results["mse_128"]["weight_error"] < results["absmax_128"]["weight_error"] and results["fp32"]["tokens"] == 79
    assert '"mse_32"' in capsys.readouterr().out
