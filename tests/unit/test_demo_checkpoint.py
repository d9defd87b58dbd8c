"""The embedded checkpoint: what it is, that others can load it, and that its record tells the truth about the files."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import random
import warnings

import pytest

from nanoqwen import demo
from nanoqwen.demo import checkpoint_dir, heldout_dir, snippets, textbook, training_record
from nanoqwen.demo.card import card, stages_of

tokenizers = pytest.importorskip("tokenizers")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
           "<|repo_name|>", "<|file_sep|>"]
FIBONACCI = [0, 1, 1, 2, 3, 5, 8, 13]


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(training_record().read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))


def _json(name: str) -> dict:
    return json.loads((checkpoint_dir() / name).read_text(encoding="utf-8"))


def test_files_and_size():
    names = {p.name for p in checkpoint_dir().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    room = checkpoint_dir().parent
    assert sum(p.stat().st_size for p in room.rglob("*") if p.is_file() and "__pycache__" not in p.parts) <= 24_000_000
    sample = list(heldout_dir().glob("*.py"))
    assert len(sample) >= 4 and sum(p.stat().st_size for p in sample) <= 80_000
    assert (heldout_dir() / "LICENSE.txt").exists()


def test_recorded_hashes_are_those_of_the_files(record):
    assert "checkpoint/model.safetensors" in record["files"]
    for name, digest in record["files"].items():
        assert hashlib.sha256((checkpoint_dir().parent / name).read_bytes()).hexdigest() == digest, name


def test_record_is_complete(record):
    stages = stages_of(record)
    assert [stage["recipe"]["batch_tokens"] for stage in stages] == [262_144] * len(stages)
    for stage in stages:
        assert "H200" in stage["device"]["name"] and stage["device"]["driver"]
        curve, seen = stage["curve"], stage["tokens_seen"]
        assert len(curve) >= 20 and curve[-1]["tokens"] == seen["total"] == sum(seen.values()) - seen["total"]
        assert [point["step"] for point in curve] == sorted({point["step"] for point in curve})
        assert all(row["licence"] and row["bytes"] for row in stage["corpus"]["packages"])
        assert not any(word in row["licence"] for row in stage["corpus"]["packages"] for word in ("GPL", "MPL", "Proprietary"))
        assert {"nanoqwen/demo/train.py", "nanoqwen/demo/corpus.py", "nanoqwen/demo/network.py"} <= set(stage["sources"])
    assert sum(stage["tokens_seen"]["textbook"] for stage in stages) / sum(stage["tokens_seen"]["total"] for stage in stages) < 0.03
    assert len(stages[0]["curve"]) == 100
    assert stages[0]["curve"][-1]["train"] < stages[0]["curve"][50]["train"] < stages[0]["curve"][0]["train"]
    assert stages[0]["curve"][-1]["validation"] < stages[0]["curve"][9]["validation"] < stages[0]["curve"][0]["validation"]


def test_samples_are_recorded_and_mostly_valid(record):
    for precision in ("fp32", "int4"):
        rows = [row for row in record["results"]["samples"][precision] if row["kind"] == "completion"]
        assert len(rows) >= 10 and sum(row["valid_python"] for row in rows) >= 0.8 * len(rows)
        fibonacci = next(row for row in rows if row["prompt"] == "def fibonacci(n):")
        scope: dict = {}
        exec(fibonacci["prompt"] + fibonacci["text"], scope)
        assert [scope["fibonacci"](n) for n in range(8)] == FIBONACCI


def test_precisions_lose_little(record):
    held = record["results"]["held_out"]
    assert held["fp16"]["loss"] == pytest.approx(held["fp32"]["loss"], abs=2e-3)
    assert held["int4"]["loss"] - held["fp32"]["loss"] < 0.04
    assert record["results"]["largest_values"]["residual"] < 2000  # far from FP16's 65,504


def test_card_is_written_from_the_record(record):
    assert (checkpoint_dir() / "README.md").read_text(encoding="utf-8") == card(record)


def test_config_is_a_small_qwen2():
    config = _json("config.json")
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["model_type"] == "qwen2"
    assert (config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]) == (384, 6, 1024)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (3, 1)
    assert config["hidden_size"] // config["num_attention_heads"] == 128
    assert config["vocab_size"] == 2048 and config["tie_word_embeddings"] is False
    assert config["rope_theta"] == 1e6 and config["rms_norm_eps"] == 1e-6
    generation = _json("generation_config.json")
    assert generation["eos_token_id"] == [2032, 2030] and config["eos_token_id"] == 2032


def test_weights_are_bf16_and_finite():
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    tensors = load_file(checkpoint_dir() / "model.safetensors")
    assert len(tensors) == 3 + 6 * 12
    layer = (384 * 384 + 384) + 2 * (128 * 384 + 128) + 384 * 384 + 3 * 1024 * 384 + 2 * 384
    assert sum(t.numel() for t in tensors.values()) == 2 * 2048 * 384 + 6 * layer + 384
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, name
        assert torch.isfinite(tensor).all() and tensor.abs().max() < 1000, name


def test_tokenizer_control_tokens_follow_the_bpe(tokenizer):
    assert tokenizer.get_vocab_size(with_added_tokens=False) == 2030 and tokenizer.get_vocab_size() == 2039
    assert [tokenizer.token_to_id(text) for text in CONTROL] == list(range(2030, 2039))
    added = _json("tokenizer_config.json")["added_tokens_decoder"]
    assert [added[str(i)]["content"] for i in range(2030, 2039)] == CONTROL
    assert [added[str(i)]["special"] for i in range(2030, 2039)] == [True] * 3 + [False] * 6


def test_tokenizer_returns_every_byte_and_text(tokenizer):
    alphabet = {tokenizer.id_to_token(i) for i in range(256)}
    assert len(alphabet) == 256 and all(len(symbol) == 1 for symbol in alphabet)
    texts = ["".join(map(chr, range(0x20, 0x7F))), "a\r\nb\t c  \n\n", "naïve 日本語 Ω", "👩‍💻🇩🇪", "\x00\x01\x7f", "def f(x):\n        return x\n",
             "".join(chr(c) for c in range(0x400, 0x460))]
    rng = random.Random(0)
    texts += ["".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x4E00, 0x9FFF), rng.randrange(0x1F300, 0x1F600)))) for _ in range(200))
              for _ in range(20)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids  # NFC


def test_tokenizer_takes_digits_one_by_one(tokenizer):
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("x1234").ids][-4:] == ["1", "2", "3", "4"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    assert not any(len(token) > 1 and any(c.isdigit() for c in token if c.isascii()) for token in vocabulary)


@pytest.fixture(scope="module")
def loaded():
    """(tokenizer, model, what was warned) from transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, message):
            said.append(message.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("transformers").addHandler(listener)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint_dir())
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir()).float().eval()
    logging.getLogger("transformers").removeHandler(listener)
    said += [str(w.message) for w in caught if not issubclass(w.category, (DeprecationWarning, PendingDeprecationWarning, ResourceWarning))]
    return tokenizer, model, said


def test_transformers_loads_it_without_a_warning(loaded):
    tokenizer, model, said = loaded
    assert said == []
    assert type(model).__name__ == "Qwen2ForCausalLM" and "Qwen2" in type(tokenizer).__name__
    assert len(tokenizer) == 2039


def test_training_network_equals_transformers(loaded):
    import torch
    from nanoqwen.demo.network import load_checkpoint
    tokenizer, model, _ = loaded
    ids = tokenizer((heldout_dir() / "bisect.py").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :200]
    with torch.no_grad():
        assert (load_checkpoint(checkpoint_dir())(ids) - model(ids).logits).abs().max() < 1e-3


def test_fibonacci_is_valid_and_right(loaded):
    import torch
    tokenizer, model, _ = loaded
    prompt = "def fibonacci(n):"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, do_sample=False)
    assert out[0, -1].item() == 2030  # it stops by itself, with <|endoftext|>
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    tree = ast.parse(text)
    assert text.startswith(prompt) and len(tree.body) == 1
    scope: dict = {}
    exec(compile(tree, "fibonacci", "exec"), scope)
    assert [scope["fibonacci"](n) for n in range(8)] == FIBONACCI


def test_held_out_perplexity_can_be_recomputed(record):
    pytest.importorskip("torch")
    from nanoqwen.demo import evaluate
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
    text = evaluate.read_sample(heldout_dir())["bisect.py"]
    for precision, near in (("fp32", 1e-4), ("int4", 1e-3)):
        row = evaluate.score(evaluate.load(checkpoint_dir(), precision, "cpu"), tokenizer, [text], "cpu")
        recorded = record["results"]["sample"][precision]["bisect.py"]
        assert row["loss"] == pytest.approx(recorded["loss"], abs=near)
        assert (row["tokens"], row["bytes"]) == (recorded["tokens"], recorded["bytes"])


def test_windows_score_every_token_but_the_first_once():
    pytest.importorskip("torch")
    from nanoqwen.demo.evaluate import STRIDE, WINDOW, windows
    for length in (1, 2, STRIDE, WINDOW, WINDOW + 1, WINDOW + STRIDE, 3 * WINDOW + 7):
        ids, scored = list(range(length)), []
        for window, count in windows(ids):
            assert len(window) <= WINDOW and (window[0] == 0 or len(window) - count >= WINDOW - STRIDE)
            scored += window[len(window) - count:]
        assert scored == ids[1:]


def test_int4_rounding_is_the_packers():
    torch = pytest.importorskip("torch")
    import numpy as np
    from nanoqwen.demo.network import round_int4
    from nanoqwen.int4 import dequantize, quantize_pack
    weight = torch.randn(16, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 16)[:, None]
    weight[3, :128] = 0
    words, scales = quantize_pack(weight.numpy(), 128, "test")
    assert np.array_equal(round_int4(weight).numpy(), dequantize(words, scales, 128))


def test_chat_template(loaded):
    tokenizer, _, _ = loaded
    default = f"<|im_start|>system\n{snippets.DEFAULT_SYSTEM}<|im_end|>\n"
    user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    render = lambda messages: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # noqa: E731
    assert render([{"role": "user", "content": "hi"}]) == default + user
    assert render([{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]) == "<|im_start|>system\nS<|im_end|>\n" + user


def test_textbook_bodies_agree_on_their_examples():
    for problem in textbook.problems():
        results: dict[str, set[str]] = {}
        for seed in range(12):
            rendered = textbook.render(problem, random.Random(seed))
            ast.parse(rendered.source)
            ast.parse(rendered.bare)
            assert "$" not in rendered.source + rendered.sentence
            for example in problem.examples:
                results.setdefault(example, set()).add(textbook.run_example(rendered.source, rendered.name, example))
        for example, values in results.items():
            assert len(values) == 1, f"{problem.names[0]}({example}) gives {values}"


def test_textbook_is_reproducible():
    first, again, other = (textbook.generate(300, seed) for seed in (0, 0, 1))
    assert first == again and first != other


def test_importing_the_room_imports_no_torch():
    import subprocess
    import sys
    code = "import sys, nanoqwen.demo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=demo.checkpoint_dir().parents[2], check=False).returncode == 0
