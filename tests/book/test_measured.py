"""The tables of measured numbers: the README shows what the receipts say, in their words."""

from __future__ import annotations

import pytest

from nanoqwen.bench.receipts import receipts_folder, write_receipt
from nanoqwen.book import measured, receipts
from nanoqwen.book.facts import quoted
from nanoqwen.errors import InputError

README = receipts_folder().parents[1] / "README.md"


def test_the_readme_shows_the_receipts():
    text = README.read_text(encoding="utf-8")
    assert text == measured.readme_with(text, measured.measured_markdown()), "run python -m nanoqwen.book.measured"
    assert "ms" in text.split(measured.BEGIN)[1].split(measured.END)[0], "no number is shown"


def test_a_readme_without_marks_is_refused():
    with pytest.raises(InputError, match="lacks the marks"):
        measured.readme_with("# Title", "table")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (measured, receipts):
        monkeypatch.setattr(module, "receipts_folder", lambda: tmp_path)
    return tmp_path


def write(folder, name: str, results: dict) -> None:
    protocol = {"batch": 1, "prompt_tokens": 512, "gen_tokens": 128}
    write_receipt(name, f"nanoqwen bench {name}", results, [1], ["nanoqwen/int4.py"], protocol, device={"name": "A CARD"}, folder=folder)


def test_no_receipt_is_an_error(folder):
    with pytest.raises(InputError, match="no receipt of a Hopper card"):
        measured.measured_markdown()


def test_every_number_comes_from_a_receipt(folder):
    engine = {"itl_ms": 1.5, "tokens_per_s": 666.6, "mbu": 0.65, "datasheet_share": 0.6, "ttft_ms": 20.04}
    peer = {"itl_ms": 3.5, "tokens_per_s": 285.7, "mbu": None, "ttft_ms": 50.0}
    write(folder, "e2e", {"ceiling_gb_s": 4500.4, "engines": {"graph": engine, "eager": {**engine, "itl_ms": 1.625}}, "peers": {"llama.cpp": peer, "another": peer}})
    write(folder, "gemv", {"shapes": {"down": {"rows": 3584, "cols": 18944, "us": 9.5, "gb_s": 3682.4, "mbu": 0.8123}}})
    write(folder, "context", {"engines": {"graph": {"512": {"itl_ms": 1.5, "mbu": 0.65}, "4096": {"itl_ms": 1.75, "mbu": 0.6}}}})
    first, product = {"cold_ms": 43.21, "ttft_ms": 48.76, "tokens_per_s": 42040.1}, {"cold_ms": 36.125, "cublas_cold_ms": 36.5}
    write(folder, "prefill", {"engines": {"graph": {"lengths": {"16": first, "2048": first}, "products": {"2048": product}}}})
    text = measured.measured_markdown()
    assert "| 2,048 | 43.2 ms | 48.8 ms | 42,040 | 36.12 ms | 36.50 ms |" in text and "| 16 | 43.2 ms | 48.8 ms | 42,040 |  |  |" in text
    assert "4,500 GB/s" in text and text.count("A CARD") == 4 and "`nanoqwen bench gemv`" in text
    assert "| `graph` | 1.500 ms | 667 | 65.0% | 60.0% | 20.0 ms |" in text and text.index("`graph`") < text.index("`eager`")
    (label,) = (row["label"] for row in quoted()["to_measure"] if row["of"] == "peers.llama.cpp")  # as chapter 11 calls it
    assert f"| {label} | 3.500 ms | 286 |  |  | 50.0 ms |" in text and "| another | 3.500 ms" in text
    assert "| down | 3,584 x 18,944 | 9.50 us | 3,682 | 81.2% |" in text
    assert "| 4,096 | 1.750 ms, 60.0% |" in text
