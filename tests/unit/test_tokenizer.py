"""nanoqwen/tokenizer.py: the ids are the original's, markers are no text, bytes come back."""

from __future__ import annotations

import time
import unicodedata

import numpy as np
import pytest
import tokenizers

import qwen_vocab
import textkit
import tiny
from nanoqwen.errors import InputError
from nanoqwen.tokenizer import FIM_ENDS, StreamDecoder, Tokenizer, byte_letters

FAMILY = "👩\u200d💻"  # a person and a laptop with a joiner between them: 11 bytes, shown as one picture


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return textkit.tiny_tokenizer()


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.from_parts(textkit.as_bytes(textkit.trained_spec()))


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    raw = qwen_vocab.qwen_tokenizer_json()
    if raw is None:
        pytest.skip(qwen_vocab.SKIP_REASON)
    return Tokenizer.from_parts(raw)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*map(decoder.push, ids), decoder.flush()]


# ------------------------------------------------------------------------------------------- ids of the real vocabulary

@pytest.mark.parametrize(
    "text, ids",
    [
        ("->", [405]),
        ("(x):\n", [2075, 982]),
        ("1234", [16, 17, 18, 19]),
        ("def f(x):\n    return x\n", [750, 282, 2075, 982, 262, 470, 856, 198]),
        ("It's", [2132, 594]),
        ("a\nb", [64, 198, 65]),
        ("a\r\nb", [64, 319, 65]),
        ("hello", [14990]),
        (" hello", [23811]),
        ("hello ", [14990, 220]),
        ("<|im_end|>", [27, 91, 318, 6213, 91, 29]),
        ("e\u0301", [963]),
        ("é", [963]),
        (FAMILY, [145233, 378, 235, 145851]),
        ("\ufeffabc", [3225, 13683]),
        ("", []),
    ],
)
def test_qwen_ids(qwen, text, ids):
    assert qwen.encode(text) == ids
    assert qwen.decode(ids) == unicodedata.normalize("NFC", text)


def test_qwen_sizes_and_markers(qwen):
    assert qwen.size == qwen.id_limit == 151_665
    assert qwen.banned_ids == ()
    assert sorted(qwen.stop_ids) == [151_643, 151_645]
    assert [qwen.markers[f"<|fim_{part}|>"] for part in ("prefix", "middle", "suffix", "pad")] == [151_659, 151_660, 151_661, 151_662]
    assert [qwen.markers[text] for text in ("<|repo_name|>", "<|file_sep|>")] == [151_663, 151_664]


def test_qwen_fill_in_the_middle(qwen):
    prompt = qwen.encode("<|fim_prefix|>def f():\n    return <|fim_suffix|>\n<|fim_middle|>", special=True)
    assert [token for token in prompt if token > 151_642] == [151_659, 151_661, 151_660]
    assert qwen.end_ids(prompt) == {151_643, 151_645, 151_662, 151_663, 151_664}
    assert qwen.end_ids(qwen.encode("def f():")) == {151_643, 151_645}


def test_qwen_streams_an_emoji_whole(qwen):
    assert stream(qwen, [145233, 378, 235, 145851]) == ["👩", "", "\u200d", "💻", ""]


def test_qwen_long_run_without_spaces(qwen):
    start = time.perf_counter()
    ids = qwen.encode("a" * 100_000)
    assert len(ids) == 12_500
    assert time.perf_counter() - start < 2


# --------------------------------------------------------------------------------- the same rules, on vocabularies we own

@pytest.mark.parametrize("spelling", ["pairs", "spaces"])
def test_both_spellings_of_merges(spelling):
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(tiny.tokenizer(merges=spelling)))
    assert tokenizer.encode("winner 15") == [119, 256, 110, 257, 32, 49, 53]


def test_splitting_rules():
    """Merges exist for all of these pairs; the splitter decides which of them may happen."""
    spec = textkit.spec_with_merges("- >", ") :", "): Ċ", "( x", "1 2", "č Ċ", "' s", "I t", "h i", "Ġ hi", "hi Ġ", "Ċ Ċ")
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(spec))

    def pieces(text: str) -> list[str]:
        return [tokenizer.token_text(token) for token in tokenizer.encode(text)]

    assert pieces("->") == ["->"]
    assert pieces("(x):\n") == ["(x", "):\n"]  # punctuation takes the line end along
    assert pieces("1212") == ["1", "2", "1", "2"]  # a digit is a token, whatever the merges say
    assert pieces("It's") == ["It", "'s"]
    assert pieces("hi hi") == ["hi", " hi"]  # a space belongs to the word after it
    assert pieces("hi ") == ["hi", " "]  # and at the end it stands alone
    assert pieces("a\r\nb") == ["a", "\r\n", "b"]  # CRLF stays CRLF
    assert pieces("a\nb") == ["a", "\n", "b"]
    assert pieces("\n\n") == ["\n\n"]


def test_no_space_or_bos_is_added(tok):
    assert tok.encode("hello") == list(b"hello")
    assert tok.encode(" hello ") == list(b" hello ")
    assert tok.encode("") == []


def test_input_is_normalised_to_nfc(tok):
    assert tok.encode("e\u0301") == tok.encode("é") == [0xC3, 0xA9]
    assert tok.decode(tok.encode("e\u0301")) == "é"


def test_equal_to_the_library(trained):
    """Plain and special text, against the tokenizers library reading the same file whole."""
    library = tokenizers.Tokenizer.from_str(textkit.as_bytes(textkit.trained_spec()).decode())
    parts = ["<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim_pad|>", "<|im_", "end|>", "<", "|>", "user", "\n", "\n\n", "  ", "\r\n", "\t",
             "It's", "12", "é", "e\u0301", "中文", FAMILY, "->", "def read(path):"]  # fmt: skip
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(parts, size=rng.integers(1, 12)))
        assert trained.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids, repr(text)
    plain = [part for part in parts if part not in trained.markers]
    for _ in range(300):
        text = " ".join(rng.choice(plain, size=rng.integers(1, 12)))  # the spaces keep markers from forming
        assert trained.encode(text) == library.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "\n" * 100_000, "xyzzy" * 20_000, "é" * 50_000, "<|im_start" * 10_000])
def test_long_runs_are_not_quadratic(trained, text):
    start = time.perf_counter()
    ids = trained.encode(text, special=True)
    assert time.perf_counter() - start < 2
    assert trained.decode(ids) == text


def test_settings_that_change_texts_are_ignored():
    """Truncation, padding, dropout and a BOS-adding post-processor that a training run left in the file."""
    spec = tiny.tokenizer()
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258, "pad_type_id": 0,
                       "pad_token": "<|endoftext|>"}  # fmt: skip
    spec["model"]["dropout"] = 0.9
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [258], "tokens": ["<|endoftext|>"]}},
    }
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(spec))
    for _ in range(20):
        assert tokenizer.encode("winner 15") == [119, 256, 110, 257, 32, 49, 53]


# ---------------------------------------------------------------------------------------------------------------- markers

def test_marker_text_is_plain_unless_asked_for(tok):
    assert tok.encode("<|im_end|>") == list(b"<|im_end|>")
    assert tok.encode("<|im_end|>", special=True) == [260]
    assert tok.encode("a<|im_end|>\nb", special=True) == [97, 260, 10, 98]


def test_unflagged_markers_are_plain_text_too(trained):
    for marker, token in trained.markers.items():
        assert token not in trained.encode(marker)
        assert trained.decode(trained.encode(marker)) == marker
        assert trained.encode(marker, special=True) == [token]


def test_longer_marker_wins():
    spec = textkit.spec_with_merges(markers=("<|im|>", "<|im|>2"))
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(spec))
    assert tokenizer.encode("<|im|>2<|im|>", special=True) == [257, 256]


def test_added_tokens_of_tokenizer_config():
    """They may stand in tokenizer_config.json alone; the pack then lists them in its metadata."""
    listed = [{"id": 258, "content": "<|endoftext|>", "special": True}, {"id": 260, "content": "<|im_end|>", "special": True}]
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(tiny.tokenizer(markers=False)), {"added_tokens": listed})
    assert tokenizer.markers == {"<|endoftext|>": 258, "<|im_end|>": 260}
    assert tokenizer.encode("a<|im_end|>", special=True) == [97, 260]
    assert tokenizer.decode([97, 260]) == "a<|im_end|>"
    assert (tokenizer.size, tokenizer.banned_ids) == (261, (259,))


def test_no_added_tokens_at_all():
    """The end id of the config has no text then: the model may say it, nothing prints it."""
    meta = {"stop_ids": [{"id": 260, "text": None, "from": "config.json"}]}
    tokenizer = Tokenizer.from_parts(textkit.as_bytes(tiny.tokenizer(markers=False)), meta)
    assert (tokenizer.size, tokenizer.id_limit, tokenizer.banned_ids) == (258, 261, (258, 259))
    assert tokenizer.stop_ids == (260,)
    assert stream(tokenizer, [65, 260]) == ["A", "", ""]
    with pytest.raises(InputError, match="id 260 has no token: the tokenizer has 258 entries"):
        tokenizer.decode([260])


def test_stop_ids_come_from_the_pack_or_from_the_markers(tok):
    assert sorted(tok.stop_ids) == [258, 260]
    assert textkit.tiny_tokenizer(stop_ids=[{"id": 260, "text": "<|im_end|>", "from": "config.json"}]).stop_ids == (260,)


def test_fill_in_the_middle_has_more_ends(trained):
    prompt = trained.encode("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", special=True)
    assert trained.end_ids(prompt) == {*trained.stop_ids, *(trained.markers[text] for text in FIM_ENDS)}
    assert trained.end_ids(trained.encode("<|fim_prefix|>")) == set(trained.stop_ids)  # typed, not meant


# ------------------------------------------------------------------------------------------------------ bytes and streams

def test_every_byte_comes_back(tok):
    for byte in range(256):
        assert tok.token_bytes(byte) == bytes([byte])
    assert tok.decode_bytes(range(256)) == bytes(range(256))


def test_byte_letters_are_gpt2s():
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert byte_letters() == convert.bytes_to_unicode()


def test_any_text_comes_back(tok, trained):
    blocks = [chr(start) for start in range(0, 0x110000, 0x80) if not 0xD800 <= start < 0xE000]
    odd = ["ᚠ", "\U0010ffff", "\ue000", "\ufdd0", "\ufffd", "\0", "a\0b", "\ufeff", "e\u0301", FAMILY, "\r", "\u2028", "a b"]
    texts = [*blocks, *odd]
    for text in texts:
        for tokenizer in (tok, trained):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == unicodedata.normalize("NFC", text), repr(text)


def test_qwen_any_text_comes_back(qwen):
    assert len(qwen.encode("ᚠ")) == 2
    for start in [*range(0, 0xD800, 0x40), *range(0xE000, 0x110000, 0x40)]:
        text = chr(start)
        assert qwen.decode(qwen.encode(text)) == unicodedata.normalize("NFC", text), repr(text)
    for byte in range(256):
        assert qwen.token_bytes(qwen._bpe.token_to_id(byte_letters()[byte])) == bytes([byte])


def test_stream_never_shows_half_a_character(tok):
    ids = tok.encode(f"x{FAMILY}é中y")
    pieces = stream(tok, ids)
    assert "".join(pieces) == f"x{FAMILY}é中y"
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:6] == ["x", "", "", "", "👩", ""]


def test_stream_of_bytes_that_are_no_text(tok):
    assert stream(tok, [0xC3, 0x41]) == ["", "\ufffdA", ""]  # certain when the next byte is wrong
    assert stream(tok, [0xFF, 0x41]) == ["\ufffd", "A", ""]  # certain at once
    assert stream(tok, [0xF0, 0x9F]) == ["", "", "\ufffd"]  # certain only at the end
    rng = np.random.default_rng(1)
    for _ in range(500):
        ids = rng.integers(0x70, 0x100, size=8).tolist()
        assert "".join(stream(tok, ids)) == tok.decode(ids) == bytes(ids).decode("utf-8", "replace")


def test_stream_leaves_markers_out(trained):
    ids = trained.encode("a<|im_end|><|fim_pad|><tool_call>b", special=True)
    assert "".join(stream(trained, ids)) == "a<tool_call>b"  # a call is text that a program reads
    assert trained.decode(ids) == "a<|im_end|><|fim_pad|><tool_call>b"


def test_stream_costs_the_same_at_any_length(tok):
    """200,000 tokens: decoding everything again at each token would take hours."""
    decoder = StreamDecoder(tok)
    start = time.perf_counter()
    text = "".join(decoder.push(97 + k % 26) for k in range(200_000))
    assert time.perf_counter() - start < 5
    assert len(text) == 200_000


def test_padding_ids_have_no_text(tok):
    for call in (tok.token_bytes, tok.token_text, lambda token: tok.decode([token])):
        with pytest.raises(InputError, match="id 300 has no token: the tokenizer has 261 entries"):
            call(300)


# ----------------------------------------------------------------------------------------------------------------- faults

def test_lone_surrogate_is_named(tok):
    with pytest.raises(InputError, match=r"character 2 .* \(U\+DCFF\)"):
        tok.encode("ab\udcff")


def spoiled(**model) -> bytes:
    spec = tiny.tokenizer()
    spec["model"].update(model)
    return textkit.as_bytes(spec)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"{", "the tokenizer is not JSON"),
        (b"\xff\xfe{}", "the tokenizer is not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "type None"),
        (spoiled(type="Unigram"), "type 'Unigram'"),
        (spoiled(vocab={**tiny.tokenizer()["model"]["vocab"], "▁the": 300}), "not byte-level"),
        (spoiled(vocab={k: v for k, v in tiny.tokenizer()["model"]["vocab"].items() if v != 0x41}), "no token for byte 0x41"),
        (spoiled(merges=[["i", "zz"]]), "cannot be read"),
        (spoiled(vocab={**tiny.tokenizer()["model"]["vocab"], "ab": 260}), "id 260 is both the marker '<|im_end|>' and the token 'ab'"),
    ],
)
def test_unusable_tokenizers_are_refused(raw, message):
    with pytest.raises(InputError, match=message) as caught:
        Tokenizer.from_parts(raw, source="model.nanoqwen")
    assert str(caught.value).startswith("model.nanoqwen: ")
    assert "\n" not in str(caught.value)
