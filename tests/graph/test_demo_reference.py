"""The reference decoder on the embedded checkpoint: the same logits as transformers, and text that is worth reading."""

import ast

import numpy as np
import pytest
import torch

from nanoqwen import demo
from nanoqwen.engines import open_engine
from nanoqwen.generate import generate
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.reference import ReferenceModel
from nanoqwen.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
HELD_OUT = demo.checkpoint_dir().parent / "heldout"
TEXTS = {
    "a signature": "def fibonacci(n):",
    "a class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "a file": (HELD_OUT / "textwrap.py").read_text(encoding="utf-8")[:4000],
}


@pytest.fixture(scope="module")
def oracle():
    folder = demo.checkpoint_dir()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval(), load(folder, dtype=torch.float64).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_logits_equal_those_of_transformers(oracle, text):
    """Within 1e-4, unless transformers itself is further than half of that from its own FP64 result: logits here reach 36, so
    a last bit of FP32 is 4e-6 and many of them add up."""
    single, double, tokenizer = oracle
    ids = tokenizer(text, return_tensors="pt").input_ids
    reference = ReferenceModel.from_checkpoint(demo.checkpoint_dir(), weights="fp32", kv_dtype=torch.float32)
    with torch.no_grad():
        theirs, exact, ours = single(ids).logits[0], double(ids).logits[0], reference.forward(ids[0], 0)
    rounding = float((theirs.double() - exact).abs().max())
    assert float((ours - theirs).abs().max()) <= max(1e-4, 2 * rounding)
    assert float((ours.double() - exact).abs().max()) <= max(1e-4, 2 * rounding)
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.nanoqwen"
    pack(demo.checkpoint_dir(), path)
    return path


def test_the_packed_checkpoint_writes_a_correct_fibonacci(packed):
    prompt = "def fibonacci(n):"
    with open_pack(packed) as file, open_engine(file, "cpu") as engine:
        tokenizer = Tokenizer.from_pack(file)
        result = generate(engine, tokenizer, tokenizer.encode(prompt), max_tokens=96, stop=["\ndef ", "\nclass "]).run()
    assert result.finish_reason == "stop"
    names: dict = {}
    exec(compile(ast.parse(prompt + result.text), "generated", "exec"), names)  # our own model's few lines, greedy and so always these
    assert [names["fibonacci"](n) for n in range(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]


def test_prefill_in_one_go_and_token_by_token_agree(packed):
    text = (HELD_OUT / "heapq.py").read_text(encoding="utf-8")[:6000]
    with open_pack(packed) as file, open_engine(file, "cpu") as engine:
        ids = Tokenizer.from_pack(file).encode(text)[:600]
        whole = engine.prefill(ids)
        engine.rewind(500)
        for token in ids[500:]:
            stepped = engine.decode(token)
    assert whole.argmax() == stepped.argmax() and np.abs(whole - stepped).max() < 0.05
