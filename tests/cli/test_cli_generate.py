"""`nanoqwen generate`: what goes in, what comes out, on which stream, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys

import pytest
import tiny
from clikit import make_pack, nanoqwen, subprocess_env

from nanoqwen.cli import main


# ------------------------------------------------------------------------------------------------------------ streams


def test_stdout_is_the_text_and_nothing_else(run, letters):
    outcome = run("generate", letters, "--prompt", "111")
    assert (outcome.status, outcome.out) == (0, "ABCDEFGHIJK")
    assert outcome.err.count("nanoqwen: engine cpu on CPU") == 1
    assert "3 prompt tokens, 11 generated (stop), greedy" in outcome.err


def test_json_is_one_object(run, letters):
    outcome = run("generate", letters, "--prompt", "111", "--json")
    answer = json.loads(outcome.out)
    assert answer["prompt_ids"] == [49, 49, 49]
    assert answer["ids"] == list(b"ABCDEFGHIJK")
    assert (answer["text"], answer["finish_reason"], answer["stopped_by"]) == ("ABCDEFGHIJK", "stop", "<|im_end|>")
    assert answer["engine"] == "cpu" and answer["device"].startswith("CPU")
    assert answer["timings"]["prompt_tokens"] == 3 and answer["timings"]["ttft_ms"] > 0


def test_stop_strings_are_repeatable_and_never_shown(run, letters):
    assert run("generate", letters, "--prompt", "1", "--stop", "DEFG").out == "ABC"
    assert run("generate", letters, "--prompt", "1", "--stop", "HIJ", "--stop", "EF").out == "ABCD"


def test_special_is_a_switch(run, plain):
    text = "<|im_end|>"
    assert json.loads(run("generate", plain, "--prompt", text, "--max-tokens", "0", "--json").out)["prompt_ids"] == list(text.encode())
    assert json.loads(run("generate", plain, "--prompt", text, "--max-tokens", "0", "--json", "--special").out)["prompt_ids"] == [tiny.IM_END]


def test_ignore_eos_goes_on(run, letters):
    answer = json.loads(run("generate", letters, "--prompt", "1", "--ignore-eos", "--max-tokens", "20", "--json").out)
    assert len(answer["ids"]) == 20 and answer["finish_reason"] == "length"
    assert answer["text"].startswith("ABCDEFGHIJK") and "<|" not in answer["text"]


# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\ufeffabc", "a\0b", " hello ", "é👩\u200d💻"])
def test_every_way_in_gives_the_same_bytes(run, plain, tmp_path, text):  # D03, D15
    path = tmp_path / "prompt.txt"
    path.write_bytes(text.encode())
    ways = [["--prompt-file", path], ["--prompt-file", "-"], ["--prompt", "-"], []]
    if "\0" not in text:  # an argument cannot hold one
        ways.append(["--prompt", text])
    for way in ways:
        answer = json.loads(run("generate", plain, *way, "--max-tokens", "0", "--json", stdin=text.encode()).out)
        assert answer["prompt_ids"] == list(text.encode()), way


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"abc\xff", ["0xFF", "offset 3", "UTF-8"]),
        ("abc".encode("utf-16"), ["offset 0", "UTF-16"]),
        ("é".encode("latin-1"), ["0xE9", "offset 0"]),
        (b"ab\xe2\x82", ["0xE2", "offset 2"]),
    ],
)
def test_other_encodings_are_refused_with_the_offset(run, plain, tmp_path, raw, words):  # D15
    path = tmp_path / "prompt é.txt"
    path.write_bytes(raw)
    from_file = run("generate", plain, "--prompt-file", path).error_line()
    from_pipe = run("generate", plain, stdin=raw).error_line()
    assert str(path) in from_file and "standard input" in from_pipe
    for word in words:
        assert word in from_file and word in from_pipe


@pytest.mark.parametrize("argv", [["--prompt", ""], ["--prompt-file", "-"], []])
def test_an_empty_prompt_is_one_plain_line(run, plain, argv):  # D13
    assert "the prompt is empty" in run("generate", plain, *argv, stdin=b"").error_line()


def test_an_empty_prompt_file(run, plain, tmp_path):
    (tmp_path / "empty").touch()
    assert "the prompt is empty" in run("generate", plain, "--prompt-file", tmp_path / "empty").error_line()


def test_a_missing_prompt_file_and_a_folder(run, plain, tmp_path):
    assert "nothing.txt: No such file" in run("generate", plain, "--prompt-file", tmp_path / "nothing.txt").error_line()
    assert "directory" in run("generate", plain, "--prompt-file", tmp_path).error_line()


def test_no_prompt_at_a_terminal(run, plain, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", str(plain)]) == 2


def test_surrogates_of_a_c_locale_are_read_as_utf8(run, plain):
    """Under LC_ALL=C Python hands over the bytes of an argument as lone surrogates."""
    typed = "é".encode().decode("ascii", "surrogateescape")
    answer = json.loads(run("generate", plain, "--prompt", typed, "--max-tokens", "0", "--json").out)
    assert answer["prompt_ids"] == list("é".encode())
    assert "--prompt" in run("generate", plain, "--prompt", b"ab\xff".decode("ascii", "surrogateescape")).error_line()


# -------------------------------------------------------------------------------------------------------------- limits


def test_zero_tokens_is_nothing_and_fine(run, plain):  # F06
    outcome = run("generate", plain, "--prompt", "12", "--max-tokens", "0")
    assert (outcome.status, outcome.out) == (0, "")
    assert "2 prompt tokens, 0 generated (length)" in outcome.err
    answer = json.loads(run("generate", plain, "--prompt", "12", "--max-tokens", "0", "--json").out)
    assert (answer["ids"], answer["text"], answer["finish_reason"]) == ([], "", "length")


def test_one_token(run, letters):  # F07
    outcome = run("generate", letters, "--prompt", "1", "--max-tokens", "1")
    assert outcome.out == "A" and "(length)" in outcome.err


@pytest.fixture(scope="module")
def short_context(tmp_path_factory):
    """ABAB... without end, in a context of 16 tokens."""
    sizes = tiny.Sizes(hidden=512, intermediate=512, layers=1, context=16)
    return make_pack(tmp_path_factory.mktemp("short"), "short", sizes, tensors=tiny.scripted({49: 65, 65: 66, 66: 65}, sizes))


@pytest.mark.parametrize("limit", ["100", "1000000000000"])
def test_the_context_is_the_end(run, short_context, limit):  # F07
    answer = json.loads(run("generate", short_context, "--prompt", "1", "--max-tokens", limit, "--json").out)
    assert (len(answer["ids"]), answer["finish_reason"]) == (15, "length")


def test_a_prompt_longer_than_the_context(run, short_context):  # F08
    line = run("generate", short_context, "--prompt", tiny.digits(200)).error_line()
    assert "200" in line and "16" in line


# --------------------------------------------------------------------------------------------------------------- seeds


def test_seeds(run, plain):  # F12
    def text(seed: int) -> list[int]:
        return json.loads(run("generate", plain, "--prompt", "12", "--max-tokens", "8", "--temperature", "1.0", "--seed", seed, "--json").out)["ids"]

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(1, 6)}) > 1


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_run(run, plain):
    argv = ["generate", plain, "--prompt", "12", "--max-tokens", "8", "--temperature", "1.0", "--json"]
    first = json.loads(run(*argv).out)
    again = json.loads(run(*argv, "--seed", first["sampling"]["seed"]).out)
    assert again["ids"] == first["ids"]


def test_greedy_whatever_else_is_given(run, plain):  # F10
    argv = ["generate", plain, "--prompt", "12", "--max-tokens", "8", "--json"]
    plain_greedy = json.loads(run(*argv).out)
    with_filters = json.loads(run(*argv, "--temperature", "0", "--top-p", "0.9", "--top-k", "5", "--seed", "3").out)
    assert with_filters["ids"] == plain_greedy["ids"]


# -------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--device", "tpu"], ["tpu", "cpu, cuda"]),
        (["--engine", "warp"], ["'warp'", "cpu", "reference"]),
        (["--engine", "graph"], ["graph", "--engine cpu"]),
        (["--engine", "cpu", "--device", "cuda"], ["cpu", "cuda"]),
    ],
)
def test_an_engine_that_is_not_there(run, letters, argv, words):
    line = run("generate", letters, "--prompt", "1", *argv).error_line()
    for word in words:
        assert word in line


def test_a_gpu_that_is_not_there_is_never_replaced(run, letters, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu" in run("generate", letters, "--prompt", "1", "--device", "cuda").error_line()
    assert run("generate", letters, "--prompt", "1").out == "ABCDEFGHIJK"  # nothing asked for: the CPU, and it says so


# ------------------------------------------------------------------------------------------ encodings, pipes, Ctrl-C


@pytest.fixture(scope="module")
def smile(tmp_path_factory):
    """A model that answers `1` with 😀 in four tokens."""
    chain = [49, *"😀".encode(), tiny.IM_END]
    return make_pack(tmp_path_factory.mktemp("smile"), "smile", tiny.SCRIPTED, tensors=tiny.scripted(dict(zip(chain, chain[1:]))))


@pytest.mark.parametrize("encoding, shown", [("cp1252", b"\\U0001f600"), ("ascii", b"\\U0001f600"), ("utf-8", "😀".encode())])
def test_a_stream_that_is_not_utf8(smile, monkeypatch, encoding, shown):  # D16
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["generate", str(smile), "--prompt", "1"]) == 0
    assert stream.buffer.getvalue() == shown


def test_json_stays_json_on_a_stream_that_is_not_utf8(smile, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["generate", str(smile), "--prompt", "1", "--json"]) == 0
    assert json.loads(stream.buffer.getvalue())["text"] == "😀"


def test_a_c_locale_from_end_to_end(smile):  # D16
    env = subprocess_env(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    env.pop("PYTHONIOENCODING", None)
    done = nanoqwen("generate", smile, "--prompt", "1", env=env)
    assert (done.returncode, done.stdout) == (0, b"\\U0001f600")


def test_ctrl_c_keeps_what_was_said(run, letters, monkeypatch):
    from nanoqwen.engines.cpu import ReferenceEngine

    decode = ReferenceEngine._decode

    def interrupted(self, token):
        if token == ord("C"):
            raise KeyboardInterrupt
        return decode(self, token)

    monkeypatch.setattr(ReferenceEngine, "_decode", interrupted)
    outcome = run("generate", letters, "--prompt", "1")
    assert (outcome.status, outcome.out) == (130, "ABC")
    assert "3 generated (cancelled)" in outcome.err and "Traceback" not in outcome.err
    outcome = run("generate", letters, "--prompt", "1", "--json")
    assert outcome.status == 130
    assert (json.loads(outcome.out)["text"], json.loads(outcome.out)["finish_reason"]) == ("ABC", "cancelled")


def endless_process(endless) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "nanoqwen", "generate", str(endless), "--prompt", "1", "--max-tokens", "1000000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=subprocess_env(),
    )


def test_a_real_ctrl_c(endless):
    process = endless_process(endless)
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first == b"AB" * 10 and set(rest) <= set(b"AB")
    assert b"cancelled" in err and b"Traceback" not in err


def test_a_reader_that_goes_away(endless):
    process = endless_process(endless)
    process.stdout.read(2)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err.count(b"\n") == 1 and b"engine cpu" in err  # no traceback, no "Exception ignored"


def test_the_hopper_engines_name_what_chooses_the_card(run, endless):
    line = run("generate", endless, "--prompt", "1", "--engine", "graph", "--device", "cuda:1").error_line()
    assert "first visible card" in line and "CUDA_VISIBLE_DEVICES=1" in line
    assert "does not run on the CPU" in run("generate", endless, "--prompt", "1", "--engine", "eager", "--device", "cpu").error_line()


def test_a_smaller_context_can_be_asked_for_and_a_larger_one_is_refused(run, endless):
    done = run("generate", endless, "--prompt", "1", "--context", "16", "--max-tokens", "100", "--json")
    reply = json.loads(done.out)
    assert len(reply["ids"]) == 15 and reply["finish_reason"] == "length"
    line = run("generate", endless, "--prompt", "1", "--context", "1000000000").error_line()
    assert "1000000000" in line and "more than the model's" in line
