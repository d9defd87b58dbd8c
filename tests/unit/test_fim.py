"""Fill in the middle: the form of the prompt, that users' text cannot forge it, and where the reply ends."""

from __future__ import annotations

import pytest
import qwen_vocab
import textkit

from nanoqwen.errors import InputError
from nanoqwen.fim import fim_ids, split_at
from nanoqwen.generate import generate
from nanoqwen.tokenizer import FIM_PROMPT, Tokenizer


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.from_parts(textkit.as_bytes(textkit.trained_spec()))


def test_the_form(trained):
    before, after, middle = (trained.markers[f"<|fim_{part}|>"] for part in ("prefix", "suffix", "middle"))
    ids = fim_ids(trained, "def f():\n    return ", "\n")
    assert ids == [before, *trained.encode("def f():\n    return "), after, *trained.encode("\n"), middle]
    assert trained.decode(ids) == "<|fim_prefix|>def f():\n    return <|fim_suffix|>\n<|fim_middle|>"
    assert ids == trained.encode(trained.decode(ids), special=True)


def test_one_side_may_be_empty(trained):
    assert trained.decode(fim_ids(trained, "", "x")) == "<|fim_prefix|><|fim_suffix|>x<|fim_middle|>"
    assert trained.decode(fim_ids(trained, "x", "")) == "<|fim_prefix|>x<|fim_suffix|><|fim_middle|>"
    with pytest.raises(InputError, match="nothing around the gap"):
        fim_ids(trained, "", "")


@pytest.mark.parametrize("marker", [*FIM_PROMPT, "<|fim_pad|>", "<|im_end|>", "<|endoftext|>"])
def test_marker_letters_in_a_users_text_stay_letters(trained, marker):
    ids = fim_ids(trained, f"a{marker}b", f"{marker}")
    assert trained.decode(ids) == f"<|fim_prefix|>a{marker}b<|fim_suffix|>{marker}<|fim_middle|>"
    assert [token for token in ids if token in trained.markers.values()] == [trained.markers[name] for name in FIM_PROMPT]


def test_the_two_texts_are_encoded_apart(trained):
    """An accent after the gap is not composed with the letter before it, and no token spans the gap."""
    ids = fim_ids(trained, "e", "\u0301")
    assert ids[1:2] == trained.encode("e") and ids[3:-1] == trained.encode("\u0301")


def test_a_tokenizer_without_the_markers_is_refused_by_name():
    with pytest.raises(InputError, match=r"model.nanoqwen: the tokenizer has no <\|fim_prefix\|>, no <\|fim_suffix\|>, no <\|fim_middle\|>"):
        tokenizer = textkit.tiny_tokenizer()
        tokenizer.source = "model.nanoqwen"
        fim_ids(tokenizer, "a", "b")
    partly = Tokenizer.from_parts(textkit.as_bytes(textkit.spec_with_merges(markers=("<|fim_prefix|>", "<|fim_suffix|>"))))
    with pytest.raises(InputError, match=r"has no <\|fim_middle\|>;"):
        fim_ids(partly, "a", "b")


def test_qwen_ids():  # F15
    raw = qwen_vocab.qwen_tokenizer_json()
    if raw is None:
        pytest.skip(qwen_vocab.SKIP_REASON)
    qwen = Tokenizer.from_parts(raw)
    ids = fim_ids(qwen, "def f():\n    return ", "\n")
    assert (ids[0], ids[-1], ids.index(151_661)) == (151_659, 151_660, len(ids) - 3)
    assert qwen.end_ids(ids) == {151_643, 151_645, 151_662, 151_663, 151_664}


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<|im_end|>"])
def test_the_reply_ends_with_the_gap(trained, end):  # F15
    ids, x = fim_ids(trained, "def f():\n    return ", "\n"), trained.encode("x")[0]
    result = generate(textkit.scripted({ids[-1]: x, x: trained.markers[end]}, vocab=1024), trained, ids, max_tokens=5).run()
    assert (result.text, result.ids, result.finish_reason, result.stopped_by) == ("x", [x], "stop", end)


def test_the_cursor():
    assert split_at("a@@b", "@@") == ("a", "b")
    assert split_at("@@\nb", "@@") == ("", "\nb")
    assert split_at("a", "a") == ("", "")
    with pytest.raises(InputError, match="'@@' is not in the text"):
        split_at("ab", "@@")
    with pytest.raises(InputError, match="'@@' is in the text 2 times"):
        split_at("a@@b@@", "@@")
