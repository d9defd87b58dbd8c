"""Pages that are rendered from the repository: configuration, scoreboard, chapter list, facts in prose."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from nanoqwen import demo
from nanoqwen.book import contents, demodoc, facts, receipts, scoreboard
from nanoqwen.book.configdoc import config_markdown, documented_keys, readers
from nanoqwen.config import data_path, load_settings
from nanoqwen.errors import InputError

YAML = data_path("config", "nanoqwen.yaml").read_text(encoding="utf-8")


# ---- configuration ----------------------------------------------------------------------------------------------------


def leaves(node, path=()):
    if not isinstance(node, dict):
        return [path]
    return [leaf for name, value in node.items() for leaf in leaves(value, (*path, name))]


def test_every_key_of_the_configuration_is_on_its_page():
    page = config_markdown()
    expected = leaves(yaml.safe_load(YAML))
    assert [key.path for key in documented_keys(YAML)] == expected
    for path in expected:
        section = page.split(f"## `{path[0]}`")[1].split("\n## ")[0]
        assert re.search(rf"^\| `{re.escape(path[-1])}` \| `", section, re.M), path


def test_comments_are_the_documentation():
    (key,) = documented_keys("a:\n  # First line,\n  # and second.\n  b: 3\n")
    assert key.path == ("a", "b") and key.value == 3 and key.doc == "First line, and second."


@pytest.mark.parametrize(
    "text, key",
    [
        ("a:\n  # Yes.\n  b: 1\n  c: 2\n", "a.c"),
        ("a:\n  # A comment apart\n\n  b: 1\n", "a.b"),
        ("a:\n  b: 1  # behind the value\n", "a.b"),
        ("# The section's own comment documents no key.\na:\n  b: 1\n", "a.b"),
    ],
)
def test_an_undocumented_key_is_refused(text, key):
    with pytest.raises(InputError, match=rf"{re.escape(key)} has no comment above it"):
        documented_keys(text)


def test_one_comment_may_document_a_table_of_its_own():
    keys = documented_keys("models:\n  # Dimensions.\n  big:\n    layers: 2\n")
    assert [(key.path, key.doc) for key in keys] == [(("models", "big", "layers"), "")]


def test_readers_name_modules_that_read_the_section():
    assert "packfile" in readers("format") and "kv" in readers("kv")
    assert all(readers(section) for section in ("format", "quant", "kv", "models", "ladder"))


# ---- scoreboard -------------------------------------------------------------------------------------------------------


class Rows(HTMLParser):
    """Class, label, note and value of each body row."""

    def __init__(self, markup):
        super().__init__()
        self.rows, self.widths = [], []
        self.feed(markup.split("<tbody>")[1].split("</tbody>")[0])

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([dict(attrs)["class"]])
        if "--w:" in dict(attrs).get("style", ""):
            self.widths.append(float(re.search(r"--w:([\d.]+)", dict(attrs)["style"]).group(1)))

    def handle_data(self, data):
        if data.strip():
            self.rows[-1].append(data.strip())


def test_rows_without_a_receipt_show_no_number():
    rows = Rows(scoreboard.scoreboard_html()).rows
    made = {name: receipts.receipt(name) for name in receipts.available()}
    opened = {
        row["label"] for row in facts.quoted()["to_measure"]
        if row["receipt"] not in made or scoreboard.measured_ms(made[row["receipt"]], row["of"]) is None
    }  # fmt: skip
    for kind, label, note, value in (row if len(row) == 4 else (row[0], row[1], " ".join(row[2:-1]), row[-1]) for row in rows):
        if label in opened:
            assert kind.startswith("nq-open") and value == "not measured yet" and note.startswith("to be measured in chapter ")
        elif kind.startswith("nq-reported"):
            assert note == "H100, reported by the original article" and value.endswith(" ms")
    assert sum(row[0].startswith("nq-open") for row in rows) == len(opened)


def write_e2e(folder, monkeypatch, hidden=3584):
    """A receipt as `nanoqwen bench e2e` writes it, cut to what the scoreboard reads."""
    results = {
        "ceiling_gb_s": 4567.0, "model": {"name": "synthetic:7b", "layers": 28, "hidden": hidden, "vocab": 152064},
        "engines": {"graph": {"itl_ms": 2.5}}, "peers": {"llama.cpp": {"itl_ms": 3.58}},
    }  # fmt: skip
    raw = dict(name="e2e", command="nanoqwen bench e2e", date="2026-02-01", device={"name": "NVIDIA H200"}, versions={}, sources={}, protocol={}, samples={}, results=results)
    (folder / "e2e.json").write_text(json.dumps(raw), encoding="utf-8")
    monkeypatch.setattr(receipts, "receipts_folder", lambda: folder)
    return Rows(scoreboard.scoreboard_html()).rows


def test_a_receipt_fills_the_rows_it_measured_and_no_other(tmp_path, monkeypatch):
    rows = {row[1]: row for row in write_e2e(tmp_path, monkeypatch)}
    labels = {row["of"]: row["label"] for row in facts.quoted()["to_measure"]}
    graph, peer = rows[labels["engines.graph"]], rows[labels["peers.llama.cpp"]]
    assert graph[0].startswith("nq-measured") and graph[-1] == "2.5 ms" and graph[2:-1] == ["NVIDIA H200, 2026-02-01"]
    assert scoreboard.scoreboard_html().split("</caption>")[0].count("nanoqwen bench e2e") == 1, "the command of all measured rows, once"
    assert peer[0].startswith("nq-measured") and peer[-1] == "3.58 ms"
    assert rows[labels["engines.eager"]][0].startswith("nq-open") and rows[labels["engines.eager"]][-1] == "not measured yet"


def test_a_receipt_of_another_model_fills_no_row(tmp_path, monkeypatch):
    assert not any(row[0].startswith("nq-measured") for row in write_e2e(tmp_path, monkeypatch, hidden=384))


def test_bars_stand_on_a_logarithmic_scale():
    at = scoreboard.position
    assert at(10) - at(1) == pytest.approx(at(100) - at(10)) and 0 < at(0.6) < at(199) < 100
    every = [row["ms_per_token"] for row in facts.quoted()["articles"]["rows"]]
    parsed = Rows(scoreboard.scoreboard_html())
    assert parsed.widths[: len(every)] == pytest.approx([at(ms) for ms in every], abs=0.01)


def test_a_value_beside_its_bar_keeps_clear_of_the_bound():
    """It would be crossed out by the line otherwise."""

    def clear(ms: float) -> float:
        found = re.search(r"--w:([\d.]+)%(?:;--clear:([\d.]+)%)?", scoreboard._row("a", "graph", ms, "", "measured", 1.34))
        return float(found[1]) * (1 + float(found[2] or 0) / 100)

    at = scoreboard.position
    rounded = 0.005 * (1 + at(1.34) / at(0.7))  # two decimals, of the width and of what is added to it
    assert [clear(ms) for ms in (0.7, 0.9, 1.21)] == pytest.approx([at(1.34)] * 3, abs=rounded)
    assert [clear(ms) for ms in (1.34, 1.6)] == pytest.approx([at(1.34), at(1.6)], abs=0.005)


# ---- chapters and facts -----------------------------------------------------------------------------------------------


def test_chapters_link_exactly_to_the_pages_that_exist():
    listed = {page for page in contents.pages() if page.startswith("notebooks/")}
    text = contents.chapters_markdown()
    assert {link.removesuffix(".ipynb") for link in re.findall(r"\]\(\.\./([^)]+)\)", text)} == listed
    rows = text.splitlines()[2:]
    assert len(rows) == 11 and [row[2:4] for row in rows] == [f"{n:02d}" for n in range(1, 12)]
    assert sum("(to come)" in row for row in rows) == 11 - len(listed)


def test_facts_agree_with_the_arithmetic_of_the_story():
    """Worked out by hand from the published dimensions, not with the package."""
    rows, h, i, kv = 28, 3584, 18944, 512
    weights = rows * (2 * h * h + 2 * kv * h + 3 * h * i)
    head = 152064 * h * 2
    small = 2 * (rows * (2 * h + h + 2 * kv) + h) + 2 * h
    total = weights // 2 + weights // 128 * 2 + head + small
    known = facts.facts()
    assert known["gb-per-token"] == f"{total / 1e9:.2f}" == "4.46"
    assert known["kv-kib-per-token"] == "56" and known["page-kib"] == "16"
    assert known["limit-ms-h100"] == f"{(total + 512 * 57344) / 3350e9 * 1e3:.2f}"
    assert known["article-gb-s"] == "267" and known["article-share"] == "8"
    assert known["bench-prompt"] == str(load_settings().benchmark.prompt_tokens)


def test_an_unknown_fact_is_refused():
    with pytest.raises(InputError, match="no fact is called 'speed'"):
        facts.fact("speed")


# ---- the embedded checkpoint ------------------------------------------------------------------------------------------


def score(loss):
    return {"loss": loss, "perplexity": 2 * loss, "bits_per_byte": loss / 3}


RECORD = {
    "command": "python -m nanoqwen.demo.train --out OUT --seed 0", "date": "2026-02-03", "device": {"name": "NVIDIA H200"},
    "recipe": {"batch_tokens": 262144}, "tokens_seen": {"total": 17_000_000}, "timing": {"train_s": 74.4}, "final": {"train": 1.25, "validation": 1.5},
    "earlier_stage": {
        "command": "python -m nanoqwen.demo.train --out EARLIER", "recipe": {"batch_tokens": 131072}, "tokens_seen": {"total": 1_730_150_400},
        "timing": {"train_s": 744.0}, "final": {"train": 1.3, "validation": 1.6}, "curve": [{"tokens": 1e6, "train": 7.5, "validation": 7.4}],
    },
    "shape": dict(hidden=384, layers=6, heads=3, kv_heads=1, head_dim=128, mlp=1024, rows=2048, context=2048, parameters=11_000_000),
    "corpus": {
        "train_files": 12345, "train_bytes": 98_000_000,
        "packages": [{"name": f"p{i}", "version": "1", "licence": "MIT", "files": i, "bytes": i * 1_000_000} for i in range(1, 20)],
    },
    "curve": [{"tokens": 17e6, "train": 1.25, "validation": 1.5}],
    "results": {
        "held_out": {"fp32": score(1.5), "int4": score(1.53)},
        "sample": {"fp32": {"together": score(1.75)}, "int4": {"together": score(1.78)}},
        "samples": {"int4": [
            {"kind": "completion", "prompt": "def f(n):", "text": "\n    return n\n"},
            {"kind": "completion", "prompt": "x = ", "text": "?$ ```"},
            {"kind": "chat", "prompt": "Who are you?", "text": "Python."},
            {"kind": "fill", "prompt": ["a", "b"], "text": "c"},
        ]},
    },
}  # fmt: skip


@pytest.fixture
def trained(tmp_path, monkeypatch):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(RECORD), encoding="utf-8")
    monkeypatch.setattr(demo, "training_record", lambda: path)
    demodoc.record.cache_clear()
    yield path
    demodoc.record.cache_clear()


def test_the_page_of_the_checkpoint_takes_its_numbers_from_the_record(trained):
    assert "| hidden size | 384 | 3,584 |" in demodoc.demo_part("shape")
    data = demodoc.demo_part("data")
    assert "| p19 1 | MIT | 19 | 19.0 |" in data and "| p7 " not in data
    assert "12,345 files, 98 MB in all; 7 smaller packages are in the record." in data
    training = demodoc.demo_part("training")
    assert "11.0 million parameters" in training and "| tokens seen, millions | 1,730 | 17 |" in training and "| minutes of training | 12.4 | 1.2 |" in training
    assert "stage 1: `python -m nanoqwen.demo.train --out EARLIER`; stage 2: `python -m nanoqwen.demo.train --out OUT --seed 0`. NVIDIA H200" in training
    loss = demodoc.demo_part("loss")
    assert "| held-out files | INT4, as packed | 1.5300 | 3.060 | 0.5100 |" in loss and "| five shipped modules | FP32 | 1.7500 |" in loss
    assert "NVIDIA H200, 2026-02-03, `python -m nanoqwen.demo.train --out OUT --seed 0`" in loss


def test_its_curve_is_a_figure_with_a_description(trained):
    pytest.importorskip("matplotlib")
    markup = demodoc.demo_part("curve")._repr_html_()
    assert "Training loss falls from 7.50 to 1.25 over 1,747 million tokens." in markup and "held-out files" in markup


def test_its_samples_are_shown_as_they_are(trained):
    text = demodoc.demo_part("samples")
    listings = re.findall(r"`````(\w+)\n(.*?)\n`````", text, re.S)
    # What no Python lexer accepts would be a warning, and so an error of the build: it is shown as plain text.
    assert listings == [("python", "def f(n):\n    return n"), ("text", "x = ?$ ```"), ("text", "Python.")]
    assert "> Who are you?" in text


def test_a_checkpoint_without_a_record_is_refused(tmp_path, monkeypatch):
    demodoc.record.cache_clear()
    monkeypatch.setattr(demo, "training_record", lambda: tmp_path / "training.json")
    with pytest.raises(InputError, match="has no training record"):
        demodoc.demo_part("loss")
    with pytest.raises(ValueError, match="no part is called 'price'; there are: shape"):
        demodoc.demo_part("price")
