"""Text to token ids and back: byte-level BPE, control markers kept apart from what people type.

Three facts explain this file.

*A token is a string of bytes.* Qwen's vocabulary is a byte-level BPE: any text is first UTF-8, and every one of the
256 bytes has a token, so nothing is ever unknown. `tokenizer.json` writes bytes as visible letters (a space is `Ġ`);
`token_bytes` undoes that, and all decoding here goes through bytes. A character may be cut into several tokens, so a
stream of tokens is a stream of *bytes*: `StreamDecoder` waits until a character is whole.

*A control marker is an id, not a text.* `<|im_end|>` is one id that ends a turn. The same ten letters typed by a
person are ordinary text and must stay six ordinary tokens, or a message could end its own turn and forge the next.
The `tokenizers` library looks for markers in everything it encodes, so it is given the vocabulary *without* them;
markers are recognised here, and only where the caller asks (`special=True`, or text that a chat template wrote).

*Ids beyond the tokenizer are padding.* The 7B has 152,064 embedding rows and 151,665 tokens. The rest have no text and
are never emitted: `id_limit` and `banned_ids` tell the sampler which ids stand for something.

There is no BOS, no space put in front, no newline translation. The one change made to a text is the checkpoint's own
normaliser: NFC, so `e` followed by U+0301 comes back as the single letter `é`.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import cached_property
from typing import Any, Iterable, Mapping, Sequence

import tokenizers

from nanoqwen.errors import InputError

#: End a reply where no `stop_ids` are given: the one closes a turn, the other a text. (A pack lists its own, from all files
#: of the checkpoint that name one.)
REPLY_ENDS = ("<|im_end|>", "<|endoftext|>")
#: A prompt with one of these asks to fill a hole ...
FIM_PROMPT = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
#: ... and then these end the reply too: the hole is full, or the model goes on to another file.
FIM_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


# [byte-letters]
def byte_letters() -> dict[int, str]:
    """GPT-2's table, 256 entries: each byte as one visible letter.

    Bytes that print in Latin-1 stand for themselves; the others (controls, the two blanks, the soft hyphen) take the
    letters from U+0100 on, in order. So byte 0x20, the space, is `Ġ` and byte 0x0A, the newline, is `Ċ`.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(0x100 + k) for k, byte in enumerate(hidden)}}


BYTE_OF_LETTER = {letter: byte for byte, letter in byte_letters().items()}
# [/byte-letters]


class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes: `size` (highest token id + 1), `markers` {text: id} of all added tokens, `stop_ids` (ids that end a
    reply), `id_limit` and `banned_ids` (below the limit, all ids but the banned ones stand for something).
    """

    def __init__(self, spec: dict, meta: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.meta = meta
        model = spec.get("model") or {}
        self._letters: dict[int, str] = {token_id: letters for letters, token_id in model.get("vocab", {}).items()}
        added = [*(spec.get("added_tokens") or []), *(meta.get("added_tokens") or [])]
        self.markers: dict[str, int] = {token["content"]: int(token["id"]) for token in added}
        self._marker_text = {token_id: text for text, token_id in self.markers.items()}
        self._check_alphabet(model)

        # Hidden in generated text: what is flagged special, and all that looks like <|this|>. Qwen's fill-in-the-middle
        # markers are not flagged, so the flag alone would print them; <tool_call> is text that a program wants to see.
        self._hidden = {int(t["id"]) for t in added if t.get("special") or re.fullmatch(r"<\|.*\|>", t["content"])}
        ends = meta.get("stop_ids", [self.markers[text] for text in REPLY_ENDS if text in self.markers])
        self.stop_ids: tuple[int, ...] = tuple(int(end["id"] if isinstance(end, Mapping) else end) for end in ends)

        known = self._letters.keys() | self._marker_text.keys()
        self.size = max(known) + 1
        # An end id without a text (a config may name one) is never printed, but the model must be able to say it.
        meaningful = known | set(self.stop_ids)
        self.id_limit = max(meaningful) + 1
        self.banned_ids: tuple[int, ...] = tuple(sorted(set(range(self.id_limit)) - meaningful))

        longest_first = sorted(self.markers, key=len, reverse=True)
        self._marker_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._bpe = _plain_bpe(spec, source)

    @classmethod
    def from_pack(cls, pack) -> Tokenizer:
        """The tokenizer inside an open `.nanoqwen` file."""
        return cls.from_parts(pack.tokenizer_bytes, pack.meta, source=str(pack.path))

    @classmethod
    def from_parts(
        cls, tokenizer_bytes: bytes, meta: Mapping[str, Any] | None = None, source: str = "tokenizer.json"
    ) -> Tokenizer:
        """From the bytes of a `tokenizer.json`; `source` names the file in messages.

        `meta` may hold "stop_ids" (ids, or {"id": ...} entries), "added_tokens" ({"id", "content", "special"}: those
        that only `tokenizer_config.json` lists), "chat_template", and "bos_token", "eos_token", "pad_token" for the
        template. Raises InputError for anything that is not a byte-level BPE with a token for every byte.
        """
        try:
            spec = json.loads(tokenizer_bytes)
        except (ValueError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: the tokenizer is not JSON ({error}); download the checkpoint's tokenizer.json again") from None
        if not isinstance(spec, dict):
            raise InputError(f"{source}: the tokenizer is not a JSON object; download the checkpoint's tokenizer.json again")
        return cls(spec, meta or {}, source)

    def _check_alphabet(self, model: dict) -> None:
        if model.get("type") != "BPE":
            raise InputError(f"{self.source}: the tokenizer is of type {model.get('type')!r}; nanoqwen reads byte-level BPE, as Qwen2 ships it")
        foreign = set("".join(self._letters.values())) - BYTE_OF_LETTER.keys()
        ordinary = (letters for token_id, letters in self._letters.items() if token_id not in self._marker_text)
        if foreign and any(foreign.intersection(letters) for letters in ordinary):
            raise InputError(f"{self.source}: the vocabulary is not byte-level ({min(foreign)!r} stands for no byte), as Qwen2's is")
        missing = BYTE_OF_LETTER.keys() - self._letters.values()
        if missing:  # the library drops such bytes without a word
            byte = min(BYTE_OF_LETTER[letter] for letter in missing)
            raise InputError(f"{self.source}: no token for byte 0x{byte:02X}, so text holding it would vanish; the tokenizer file is damaged")
        taken = next((t for t in self._marker_text if self._letters.get(t, self._marker_text[t]) != self._marker_text[t]), None)
        if taken is not None:
            raise InputError(f"{self.source}: id {taken} is both the marker {self._marker_text[taken]!r} and the token {self._letters[taken]!r}")

    # ------------------------------------------------------------------------------------------------ text to ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`. With `special`, marker text such as `<|fim_prefix|>` becomes its control id; without, it is text.

        The empty text has no ids. Raises InputError for a lone surrogate (a byte that was not UTF-8 when it was read).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            bad = f"character {error.start} of the text is not valid Unicode (U+{ord(text[error.start]):04X})"
            raise InputError(f"{bad}; was it read from a file that is not UTF-8?") from None
        if not special:
            return self._bpe.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for k, piece in enumerate(self._marker_pattern.split(text)):  # text, marker, text, marker, ..., text
            if k % 2:
                ids.append(self.markers[piece])
            elif piece:
                ids += self.encode(piece)
        return ids

    # ------------------------------------------------------------------------------------------------ ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; a marker's are those of its text. Raises InputError for an id without a token."""
        if token_id in self._marker_text:
            return self._marker_text[token_id].encode("utf-8")
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in self._letters[token_id])
        except KeyError:
            raise InputError(f"id {token_id} has no token: the tokenizer has {self.size} entries, the rest is padding") from None

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of `ids`, valid UTF-8 or not."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, markers included. U+FFFD stands for bytes that are no UTF-8; `decode_bytes` has them exactly."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """One token as text, for lists and messages; part of a character shows as U+FFFD."""
        return self.decode([token_id])

    def is_hidden(self, token_id: int) -> bool:
        """Whether generated text leaves this id out: control markers, and end ids that have no text at all."""
        return token_id in self._hidden or token_id in self.stop_ids

    def end_ids(self, prompt_ids: Sequence[int]) -> frozenset[int]:
        """The ids that end the reply to this prompt: `stop_ids`, and after a fill-in-the-middle prompt also FIM_ENDS."""
        fills_hole = {self.markers.get(text) for text in FIM_PROMPT}.intersection(prompt_ids)
        extra = [self.markers[text] for text in FIM_ENDS if text in self.markers] if fills_hole else []
        return frozenset((*self.stop_ids, *extra))

    # ------------------------------------------------------------------------------------------------------- chat

    @cached_property
    def chat_template(self):
        """The checkpoint's ChatTemplate, compiled at first use; its `notes` say when the built-in one stands in."""
        from nanoqwen.chat_template import ChatTemplate  # jinja2 is loaded only where someone chats

        return ChatTemplate(self)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt that the chat template writes for `messages` ({"role", "content"}), as text to look at."""
        template = self.chat_template
        return template.text(template.signed(messages, add_generation_prompt))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of `render_chat`, where only the template's own markers are control ids, never a message's."""
        template = self.chat_template
        return template.ids(template.signed(messages, add_generation_prompt))


class StreamDecoder:
    """Tokens in, text out, never half a character.

    `push` returns the text that has become certain and holds back the bytes of a character that is not whole yet; its cost
    does not grow with the length of the text. U+FFFD appears for bytes that can no longer become UTF-8, at the moment that is
    certain: a wrong next byte, or `flush`, which says that nothing follows. So all pieces joined, `flush` included, equal
    `Tokenizer.decode` of all ids, except that control markers are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" in the middle of a character."""
        if self._tokenizer.is_hidden(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End of the text: U+FFFD if a character was cut short, "" otherwise."""
        return self._utf8.decode(b"", final=True)


def _plain_bpe(spec: dict, source: str) -> tokenizers.Tokenizer:
    """The library's tokenizer without markers, and without what would change a text unasked.

    Truncation and padding settings stay in files of people who trained with them, dropout is for training, and a
    post-processor may add a BOS.
    """
    removed = {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    plain = {**spec, **removed, "model": {**spec["model"], "dropout": None}}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception for every fault in the file
        raise InputError(f"{source}: the tokenizer cannot be read ({error}); download the checkpoint's tokenizer.json again") from None
