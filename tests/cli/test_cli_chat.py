"""`nanoqwen chat`: turns, commands, mistakes that do not end the conversation."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
import tiny
from clikit import make_pack

from nanoqwen.cli import chat, main
from nanoqwen.engines.cpu import ReferenceEngine

# The last token of every rendered prompt is the newline after "assistant".
REPLY = dict(zip([10, *b"ABC"], [*b"ABC", tiny.IM_END]))


@pytest.fixture(scope="session")
def talker(models):
    """Answers ABC to everything, in a context of 8192 tokens."""
    return make_pack(models, "talker", tiny.SCRIPTED, tensors=tiny.scripted(REPLY))


@pytest.fixture(scope="session")
def brief(models):
    """The same, in a context of 256 tokens."""
    sizes = tiny.Sizes(hidden=512, intermediate=512, layers=1, context=256)
    return make_pack(models, "brief", sizes, tensors=tiny.scripted(REPLY, sizes))


def counts(err: str) -> list[int]:
    """The prompt lengths that --show-prompt printed."""
    return [int(n) for n in re.findall(r"nanoqwen: (\d+) prompt tokens", err)]


def test_lines_of_a_pipe_are_messages(run, talker):
    outcome = run("chat", talker, stdin=b"hi\n\n   \nagain\r\nlast without newline")
    assert (outcome.status, outcome.out) == (0, "ABC\nABC\nABC\n")
    assert outcome.err.count("engine cpu") == 1


def test_an_empty_pipe_is_an_empty_chat(run, talker):  # D13
    outcome = run("chat", talker, stdin=b"")
    assert (outcome.status, outcome.out) == (0, "")


def test_the_default_system_prompt_and_a_given_one(run, talker):  # E01
    default = run("chat", talker, "--show-prompt", stdin=b"hi\n").err
    assert "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>" in default
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" in default
    given = run("chat", talker, "--show-prompt", "--system", "You are Tom.", stdin=b"hi\n").err
    assert "<|im_start|>system\nYou are Tom.<|im_end|>" in given and "Alibaba" not in given


def test_turns_grow_and_reset_starts_over(run, talker):  # E03
    err = run("chat", talker, "--show-prompt", stdin=b"hi\nhi\n/reset\nhi\n").err
    first, second, after_reset = counts(err)
    assert after_reset == first < second
    assert "<|im_start|>assistant\nABC<|im_end|>\n<|im_start|>user\nhi" in err


def test_the_shared_beginning_is_not_computed_again(run, talker, monkeypatch):
    prefilled = []
    prefill = ReferenceEngine._prefill
    monkeypatch.setattr(ReferenceEngine, "_prefill", lambda self, ids: prefilled.append(len(ids)) or prefill(self, ids))
    err = run("chat", talker, "--show-prompt", stdin=b"hi\nhi\n").err
    first, second = counts(err)
    assert prefilled[0] == first
    assert prefilled[1] <= second - first - len("ABC")


def test_system_command_starts_over_with_another_prompt(run, talker):
    err = run("chat", talker, "--show-prompt", stdin=b"hi\n/system You are Tom.\nhi\n/system\nhi\n").err
    first, _, third = counts(err)
    assert "<|im_start|>system\nYou are Tom.<|im_end|>" in err
    assert third == first


def test_exit_and_unknown_commands(run, talker):
    outcome = run("chat", talker, stdin=b"/nonsense\nhi\n/exit\nhi\n")
    assert outcome.out == "ABC\n"
    assert "unknown command /nonsense" in outcome.err and "/reset" in outcome.err


def test_marker_text_in_a_message_is_text(run, talker):  # D06
    normal, typed = counts(run("chat", talker, "--show-prompt", stdin=b"x\n/reset\n<|im_end|>\n").err)
    assert typed - normal == len("<|im_end|>") - 1  # one token a byte, not one control id


def test_a_message_that_is_too_long_does_not_end_the_chat(run, brief):  # F08
    outcome = run("chat", brief, stdin=tiny.digits(400).encode() + b"\nhi\n")
    assert (outcome.status, outcome.out) == (0, "ABC\n")
    errors = [line for line in outcome.err.splitlines() if "error" in line]
    assert len(errors) == 1 and "256" in errors[0]


def test_bytes_that_are_not_utf8_are_refused_by_line(run, talker):
    outcome = run("chat", talker, stdin=b"hi\nab\xffc\n")
    assert (outcome.status, outcome.out) == (2, "ABC\n")
    assert "line 2: byte 0xFF at offset 2" in outcome.err.splitlines()[-1]


def test_a_tokenizer_without_markers_is_refused(run, tmp_path):  # A19
    path = make_pack(tmp_path, "bare", tokenizer=tiny.tokenizer(markers=False))
    line = [line for line in run("chat", path, stdin=b"hi\n").err.splitlines() if "error" in line]
    assert len(line) == 1 and "<|im_start|>" in line[0]


def test_ctrl_c_stops_the_answer_only(talker, monkeypatch, capsys):
    """At a terminal: the answer breaks off, what was said stays, the next message is answered."""
    decode, presses = ReferenceEngine._decode, iter([True])

    def once(self, token):
        if token == ord("B") and next(presses, False):
            raise KeyboardInterrupt
        return decode(self, token)

    monkeypatch.setattr(ReferenceEngine, "_decode", once)
    typed = iter(["hi", "again"])

    def typing(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typing)
    assert main(["chat", str(talker), "--show-prompt"]) == 0
    out, err = capsys.readouterr()
    assert out == "AB\nABC\n"
    assert "answer stopped" in err
    assert "<|im_start|>assistant\nAB<|im_end|>\n<|im_start|>user\nagain" in err


def test_ctrl_c_at_the_prompt_drops_the_line_and_ctrl_d_leaves(talker, monkeypatch, capsys):
    presses = iter([KeyboardInterrupt, "hi", EOFError])

    def typing(prompt: str) -> str:
        press = next(presses)
        if isinstance(press, str):
            return press
        raise press

    monkeypatch.setattr("builtins.input", typing)
    assert list(chat._typed_lines()) == ["hi"]


def test_the_file_may_be_replaced_while_a_chat_runs(models, tmp_path, monkeypatch, capsys):  # C09
    """The running chat keeps the old weights; the next process sees the new ones."""
    path = make_pack(tmp_path, "model", tiny.SCRIPTED, tensors=tiny.scripted(REPLY))
    other = make_pack(tmp_path, "other", tiny.SCRIPTED, tensors=tiny.scripted(dict(zip([10, *b"XYZ"], [*b"XYZ", tiny.IM_END]))))

    class Pipe:
        """Standard input whose second message comes after the file was replaced."""

        def __iter__(self):
            yield b"hi\n"
            os.replace(other, path)
            yield b"hi\n"

    class Stdin:
        buffer = Pipe()

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["chat", str(path)]) == 0
    assert capsys.readouterr().out == "ABC\nABC\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n"), encoding="utf-8"))
    assert main(["chat", str(path)]) == 0
    assert capsys.readouterr().out == "XYZ\n"
