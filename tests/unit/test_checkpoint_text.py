"""What a checkpoint says about text: tokenizer, added tokens, end ids, chat template (cases A16, A19, E05, E07)."""

from __future__ import annotations

import tiny
from opening import opened, refused
from tiny import ABSENT, Sizes


def test_tokenizer_is_required_and_must_be_usable(tmp_path):
    path = tiny.make(tmp_path) / "tokenizer.json"
    path.unlink()
    refused(tmp_path, "no tokenizer.json")
    tiny.write_json(tmp_path / "vocab.json", {})
    refused(tmp_path, "no tokenizer.json", "vocab.json and merges.txt are not read")
    path.write_bytes(b"{")
    refused(tmp_path, "tokenizer.json", "not valid JSON")
    tiny.write_json(path, {**tiny.tokenizer(), "model": {"type": "Unigram", "vocab": [["a", 0.0]]}})
    refused(tmp_path, "tokenizer.json", "no BPE vocabulary", "Unigram")
    model = {**tiny.tokenizer()["model"], "continuing_subword_prefix": "##"}
    tiny.write_json(path, {**tiny.tokenizer(), "model": model})
    refused(tmp_path, "tokenizer.json", "continuing_subword_prefix is '##'")
    tiny.write_json(path, {**tiny.tokenizer(), "pre_tokenizer": {"type": "Nonsense"}})
    refused(tmp_path, "tokenizer.json", "tokenizers library cannot load it")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    sizes = Sizes(vocab=256)
    refused(tiny.make(tmp_path, sizes, config=tiny.config(sizes, eos_token_id=10)), "tokenizer.json", "260", "256 rows")


def test_a_smaller_tokenizer_is_padding(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path))
    checkpoint.close()
    assert checkpoint.text.entries == 261 and checkpoint.dims.vocab == 512 and notes == []


def test_an_end_id_without_text_is_told(tmp_path):
    checkpoint, notes = opened(tiny.make(tmp_path, tokenizer=tiny.tokenizer(markers=False)))
    checkpoint.close()
    assert checkpoint.text.entries == 258
    assert any("end id 260" in note and "has no token text" in note for note in notes)
    assert {"id": 260, "text": None, "from": "generation_config.json, config.json"} in checkpoint.stop_ids


def test_added_tokens_only_in_the_tokenizer_config_are_found(tmp_path):
    decoder = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tiny.tokenizer()["added_tokens"]}
    side = tiny.tokenizer_config(added_tokens_decoder=decoder)
    checkpoint, notes = opened(tiny.make(tmp_path, tokenizer=tiny.tokenizer(markers=False), tokenizer_config=side))
    checkpoint.close()
    assert notes == [] and checkpoint.text.entries == 261
    assert [(t["id"], t["content"], t["special"]) for t in checkpoint.text.added_tokens] == [
        (258, "<|endoftext|>", True), (259, "<|im_start|>", True), (260, "<|im_end|>", True)]  # fmt: skip
    assert [s["text"] for s in checkpoint.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_two_texts_for_one_added_token_are_refused(tmp_path):
    side = tiny.tokenizer_config(added_tokens_decoder={"260": {"content": "<|other|>", "special": True}})
    refused(tiny.make(tmp_path, tokenizer_config=side), "token 260", "'<|im_end|>'", "'<|other|>'")
    side = tiny.tokenizer_config(added_tokens_decoder={"260": {"special": True}})
    refused(tiny.make(tmp_path, tokenizer_config=side), "added token", "lacks its id or content")


def test_end_ids_come_from_every_file_that_names_one(tmp_path):
    """E07: config says one id, the tokenizer another, there is no generation_config.json: both stop."""
    checkpoint, notes = opened(tiny.make(
        tmp_path, config=tiny.config(eos_token_id=258), generation_config=ABSENT,
        tokenizer_config=tiny.tokenizer_config(eos_token={"content": "<|im_end|>", "special": True})))  # fmt: skip
    checkpoint.close()
    assert checkpoint.stop_ids == [
        {"id": 258, "text": "<|endoftext|>", "from": "config.json"}, {"id": 260, "text": "<|im_end|>", "from": "tokenizer_config.json"}]  # fmt: skip
    assert notes == ["the checkpoint has no generation_config.json"]


def test_qwen2_end_markers_stop_even_when_no_file_names_them(tmp_path):
    checkpoint, _ = opened(tiny.make(
        tmp_path, config=tiny.config(eos_token_id=260), generation_config=tiny.generation_config(eos_token_id=ABSENT)))  # fmt: skip
    checkpoint.close()
    assert {s["id"] for s in checkpoint.stop_ids} == {258, 260}
    assert "Qwen2's end marker" in next(s["from"] for s in checkpoint.stop_ids if s["id"] == 258)


def test_no_end_id_anywhere_is_told(tmp_path):
    checkpoint, notes = opened(tiny.make(
        tmp_path, config=tiny.config(eos_token_id=ABSENT), generation_config={}, tokenizer=tiny.tokenizer(markers=False),
        tokenizer_config=tiny.tokenizer_config(eos_token=None)))  # fmt: skip
    checkpoint.close()
    assert checkpoint.stop_ids == [] and any("no file names an end id" in note for note in notes)


def test_where_the_chat_template_comes_from(tmp_path):
    own = "{{ messages[0].content }}"
    side = tiny.tokenizer_config(chat_template=ABSENT)
    cases = [
        (dict(), tiny.CHAT_TEMPLATE, "tokenizer_config.json", 0),
        (dict(chat_template_file=own, tokenizer_config=side), own, "chat_template.jinja", 0),
        (dict(chat_template_file=own), own, "chat_template.jinja", 1),
        (dict(chat_template_file=tiny.CHAT_TEMPLATE), tiny.CHAT_TEMPLATE, "chat_template.jinja", 0),
        (dict(tokenizer_config=side), None, None, 1),
        (dict(tokenizer_config=ABSENT), None, None, 2),
        (dict(tokenizer_config=tiny.tokenizer_config(chat_template=[
            {"name": "tool_use", "template": "t"}, {"name": "default", "template": own}])), own, "tokenizer_config.json", 1),
    ]  # fmt: skip
    for k, (pieces, template, source, told) in enumerate(cases):
        checkpoint, notes = opened(tiny.make(tmp_path / str(k), **pieces))
        checkpoint.close()
        assert (checkpoint.chat_template, checkpoint.text.chat_template_from) == (template, source)
        assert len(notes) == told, notes
    refused(tiny.make(tmp_path / "odd", tokenizer_config=tiny.tokenizer_config(chat_template=5)), "tokenizer_config.json", "chat_template is a int")
