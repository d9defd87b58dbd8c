"""The chat template: messages to a prompt, with the template's control markers told apart from typed text.

A checkpoint ships a Jinja template that writes a conversation as one text, in ChatML for Qwen::

    <|im_start|>user
    hi<|im_end|>
    <|im_start|>assistant

Encoding that text with markers recognised everywhere would let a message that *contains* `<|im_end|>` close its own turn.
So the two sources of text are kept apart from the start: before the template is compiled, every marker among its own
literals is replaced by a private *sign* that nobody can type (a random number between two noncharacters). Messages are not
touched, so whatever the template does to them (trim, split, compare) works as its author meant. In the result, signs are
control ids and everything between two signs is plain text, however the messages spell or split a marker.

Each stretch between two signs is encoded as a whole, template text and message text together, because that is how the
model was trained: the newline after `user` and a newline that begins the message are one token.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoqwen.errors import InputError

if TYPE_CHECKING:
    from nanoqwen.tokenizer import Tokenizer

#: What Qwen2.5 adds when a conversation has no system message.
DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

#: Used when a checkpoint has no template: what Qwen2.5's own writes for a conversation without tools.
CHATML = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A compiled chat template. `notes` holds what a user should be told about where it came from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.notes: list[str] = []
        source = tokenizer.meta.get("chat_template")
        if source is None:
            source = CHATML
            self.notes.append("the checkpoint has no chat template: using the built-in ChatML of Qwen2.5")
        self._texts: list[str] = []  # the marker that sign number k stands for
        # Known markers, and whatever else looks like one: if such a text reaches the prompt, a marker is missing.
        known = sorted(tokenizer.markers, key=len, reverse=True)
        self._marker = re.compile("|".join([*map(re.escape, known), r"<\|[^|<>\s]+\|>"]))
        nonce = secrets.token_hex(8)
        self._sign_format = f"\ufdd0{nonce}:%d\ufdd1"
        self._sign = re.compile(f"\ufdd0{nonce}:(\\d+)\ufdd1")

        environment = _environment()
        try:
            tree = environment.parse(source)
            self._sign_literals(tree)
            self._template = environment.from_string(tree)
            self._original = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(
                f"{tokenizer.source}: the chat template cannot be read ({error}); use `generate` with a prompt of your own"
            ) from None
        named = {key: tokenizer.meta.get(key) for key in ("bos_token", "eos_token", "pad_token")}
        self._named = {key: text for key, text in named.items() if text is not None}
        self._check_markers_are_literals()

    def signed(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The prompt with a sign in place of each control marker that the template wrote.

        Raises InputError for messages that are not {"role": word, "content": text}, and when the template refuses them.
        """
        _check_messages(messages)
        named = {key: self._with_signs(text) for key, text in self._named.items()}
        return self._render(self._template, messages, add_generation_prompt, named)

    def text(self, signed: str) -> str:
        """A signed prompt as people write it."""
        return self._sign.sub(lambda match: self._texts[int(match[1])], signed)

    def ids(self, signed: str) -> list[int]:
        """The ids of a signed prompt. Raises InputError when the tokenizer lacks a marker that the template wrote."""
        pieces = self._sign.split(signed)  # text, sign number, text, sign number, ..., text
        written = [self._texts[int(number)] for number in pieces[1::2]]
        missing = [text for text in dict.fromkeys(written) if text not in self._tokenizer.markers]
        if missing:
            raise InputError(
                f"{self._tokenizer.source}: chat needs the control markers {', '.join(missing)}, which this tokenizer lacks; "
                "use `generate` instead"
            )
        ids = self._tokenizer.encode(pieces[0])
        for marker, piece in zip(written, pieces[2::2]):
            ids.append(self._tokenizer.markers[marker])
            ids += self._tokenizer.encode(piece)
        return ids

    def _render(self, template: jinja2.Template, messages: Messages, add_generation_prompt: bool, named: Mapping[str, str]) -> str:
        context = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **named}
        try:
            return template.render(context)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InputError(f"the chat template refused these messages: {self.text(str(error))}") from None

    def _with_signs(self, text: str) -> str:
        return self._marker.sub(lambda match: self._sign_of(match[0]), text)

    def _sign_of(self, marker: str) -> str:
        if marker not in self._texts:
            self._texts.append(marker)
        return self._sign_format % self._texts.index(marker)

    def _sign_literals(self, node: nodes.Node) -> None:
        """Put signs into the literals that reach the prompt.

        Left alone are those that messages are searched for or compared with, as in `'</think>' in message.content`: there
        the template reads typed text, and typed text holds no signs.
        """
        if isinstance(node, nodes.TemplateData):
            node.data = self._with_signs(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = self._with_signs(node.value)
        elif isinstance(node, (nodes.Compare, nodes.Test)):
            return
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):  # text.split(marker)
            self._sign_literals(node.node)
        elif isinstance(node, nodes.Filter) and node.name == "replace":  # text | replace(marker, "")
            self._sign_literals(node.node)
        else:
            for child in node.iter_child_nodes():
                self._sign_literals(child)

    def _check_markers_are_literals(self) -> None:
        """Refuse a template that builds markers from pieces, such as '<|' + role + '|>': they would pass for typed text."""
        probe = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        try:
            signed = self.signed(probe)
            original = self._render(self._original, probe, True, self._named)
        except InputError:
            return  # it wants other messages than the probe's; it will say so when it is used
        if self.text(signed) != original or len(self._sign.findall(signed)) != len(self._marker.findall(original)):
            raise InputError(
                f"{self._tokenizer.source}: the chat template builds its control markers from pieces, so nanoqwen cannot tell them "
                "from typed text; use `generate --special` with a prompt of your own"
            )


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise InputError("a chat needs at least one message")
    for k, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f'message {k} must be {{"role": ..., "content": ...}} with two texts, got {message!r}')
        if not re.fullmatch(r"[\w-]+", message["role"]):
            raise InputError(f"message {k}: the role must be one word such as user, got {message['role']!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates expect it from transformers: trimmed blocks, `break`, `tojson`, `raise_exception`, `strftime_now`.

    Sandboxed, because a template is code that came with a download.
    """

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def strftime_now(pattern):
        from datetime import datetime

        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
