"""`nanoqwen eval perplexity`: pack files and checkpoint folders, the table, the JSON, and refusals of one line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tiny
from clikit import make_pack

from nanoqwen.cli import eval_perplexity as command
from nanoqwen.evals import perplexity

TEXT = "def area(width, height):\n    return width * height\n" * 8


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "é text.py"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_defaults_are_those_of_the_library():
    assert (command.WINDOW, command.STRIDE) == (perplexity.WINDOW, perplexity.STRIDE)


def test_a_pack_file(run, plain, source):
    outcome = run("eval", "perplexity", plain, "--text", source, "--window", "64", "--stride", "16")
    assert outcome.status == 0
    head, line = outcome.out.splitlines()
    assert head.split() == ["tokens", "loss", "perplexity", "bits/byte", "text"] and line.endswith(str(source))
    assert "int4 weights, fp16 cache, cpu; windows of 64 tokens every 16" in outcome.err
    answer = json.loads(run("eval", "perplexity", plain, "--text", source, "--window", "64", "--stride", "16", "--json").out)
    assert answer["texts"][0]["name"] == str(source) and answer["bytes"] == len(TEXT.encode())
    assert (answer["weights"], answer["method"], answer["group"], answer["kv"], answer["window"], answer["stride"]) == ("int4", "absmax", 128, "fp16", 64, 16)
    assert answer["perplexity"] == pytest.approx(math.exp(answer["loss"])) and f"{answer['perplexity']:.4f}" == line.split()[2]
    assert answer["tokens"] > 300 and answer["bits_per_byte"] == pytest.approx(answer["loss"] * answer["tokens"] / math.log(2) / answer["bytes"])


def test_a_folder_in_three_precisions(run, tmp_path, source):
    folder = tiny.make(tmp_path / "S", tiny.Sizes(context=128))
    short = run("eval", "perplexity", folder, "--text", source, "--json")
    fp32, fp16, int4 = (
        json.loads(run("eval", "perplexity", folder, "--text", source, "--json", *more).out) for more in ([], ["--weights", "fp16"], ["--weights", "int4"])
    )
    assert (fp32["weights"], fp32["kv"], int4["weights"]) == ("fp32", "fp32", "int4")
    assert (fp32["window"], fp32["stride"]) == (128, 64), "the context is shorter than the usual window"
    assert fp16["loss"] == pytest.approx(fp32["loss"], rel=1e-3) and int4["loss"] != pytest.approx(fp32["loss"], rel=1e-6)
    assert json.loads(short.out)["loss"] == fp32["loss"]
    packed = json.loads(run("eval", "perplexity", make_pack(tmp_path, "p", tiny.Sizes(context=128)), "--text", source, "--json").out)
    assert packed["loss"] == pytest.approx(int4["loss"], rel=1e-3), "the same weights, an FP16 cache"


def test_several_texts_standard_input_and_together(run, plain, source):
    outcome = run("eval", "perplexity", plain, "--text", source, "-", "--json", stdin=b"hello, world")
    answer = json.loads(outcome.out)
    first, second = answer["texts"]
    assert (second["name"], second["tokens"], second["bytes"]) == ("standard input", 11, 12)
    losses = first["loss"] * first["tokens"] + second["loss"] * second["tokens"]
    assert answer["loss"] == pytest.approx(losses / (first["tokens"] + second["tokens"]))
    again = run("eval", "perplexity", plain, "--text", source, "--text", "-", stdin=b"hello, world")
    assert again.out.splitlines()[-1].endswith("together") and len(again.out.splitlines()) == 4


def test_short_files_are_left_out_with_a_note(run, plain, source, tmp_path):
    (tmp_path / "__init__.py").touch()
    outcome = run("eval", "perplexity", plain, "--text", tmp_path / "__init__.py", source, "--json")
    assert [text["name"] for text in json.loads(outcome.out)["texts"]] == [str(source)]
    assert f"{tmp_path / '__init__.py'}: 0 tokens, left out" in outcome.err


def test_the_shipped_checkpoint_is_the_default(run, source, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path / "cache"))
    answer = json.loads(run("eval", "perplexity", "--text", source, "--json").out)
    assert "nanoqwen-demo" in answer["model"] and 1 < answer["perplexity"] < 50


def test_an_engine_by_name_predicts_token_by_token(run, plain, source):
    words = ["eval", "perplexity", plain, "--text", source, "--window", "64", "--stride", "48"]
    whole = json.loads(run(*words, "--json").out)
    outcome = run(*words, "--json", "--engine", "cpu")
    stepped = json.loads(outcome.out)
    assert stepped["engine"] == "cpu" and stepped["device"].startswith("CPU") and "engine" not in whole
    assert stepped["loss"] == pytest.approx(whole["loss"], rel=1e-5) and stepped["tokens"] == whole["tokens"]
    assert "engine cpu on CPU" in run(*words, "--engine", "cpu").err


@pytest.mark.parametrize("argv, words", [
    (["--engine", "fast"], "there is no engine 'fast'"),
    (["--engine", "cpu", "--device", "cuda"], "engine cpu does not run on cuda"),
    (["--engine", "graph", "--device", "cpu"], "engine graph does not run on the CPU"),
])  # fmt: skip
def test_engines_that_cannot_be(run, plain, source, argv, words):
    assert words in run("eval", "perplexity", plain, "--text", source, *argv).error_line()


def test_a_hopper_engine_without_a_card_is_one_line(run, plain, source):
    from nanoqwen.engines import hopper_problem

    if hopper_problem() is None:
        pytest.skip("a Hopper card is here")
    assert run("eval", "perplexity", plain, "--text", source, "--engine", "graph").error_line().startswith("engine graph: ")


def test_a_folder_has_no_engine(run, tmp_path, source):
    folder = tiny.make(tmp_path / "S", tiny.Sizes(context=128))
    assert "engines run .nanoqwen files" in run("eval", "perplexity", folder, "--text", source, "--engine", "cpu").error_line()


def test_a_text_longer_than_the_context(run, tmp_path):
    packed, text = make_pack(tmp_path, "short", tiny.Sizes(context=32)), tmp_path / "long"
    text.write_bytes(b"a\n" * 300)
    assert json.loads(run("eval", "perplexity", packed, "--text", text, "--json").out)["tokens"] == 599


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--window", "10000"], "context of 8192"),
        (["--window", "64", "--stride", "64"], "from 1 to 63"),
        (["--stride", "0"], "--stride"),
        (["--window", "1"], "--window"),
        (["--weights", "int4"], "checkpoint folders"),
        (["--weights", "int8"], "int8"),
        (["--device", "cuda"], "no NVIDIA GPU"),
        (["--device", "cpu:1"], "'cpu:1'"),
        (["--device", "tpu"], "'tpu'"),
        (["--window-size", "4"], "--window-size"),
    ],
)
def test_refusals(run, plain, source, argv, words):
    if argv == ["--device", "cuda"]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    assert words in run("eval", "perplexity", plain, "--text", source, *argv).error_line()


def test_texts_that_cannot_be_read(run, plain, tmp_path):
    assert "--text" in run("eval", "perplexity", plain).error_line()
    assert "nothing.py: No such file" in run("eval", "perplexity", plain, "--text", tmp_path / "nothing.py").error_line()
    assert "FILE stands before --text" in run("eval", "perplexity", "--text", plain, plain).error_line()
    assert "is a folder; name its files" in run("eval", "perplexity", plain, "--text", tmp_path).error_line()
    assert "read once" in run("eval", "perplexity", plain, "--text", "-", "-").error_line()
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    assert "offset 0 is not valid UTF-8" in run("eval", "perplexity", plain, "--text", tmp_path / "latin").error_line()
    assert "nothing to predict" in run("eval", "perplexity", plain, "--text", "-", stdin=b"").err


def test_a_model_of_nan_is_an_error(run, tmp_path, source):
    tensors = tiny.weights()
    tensors["model.layers.0.mlp.down_proj.weight"].values[3] = np.nan
    folder = tiny.make(tmp_path / "S", tensors=tensors)
    assert "not finite after layer 0" in run("eval", "perplexity", folder, "--text", source).error_line()
