"""A conversation: the turns so far, and a prompt that begins with all the ids of the turn before.

The model has no memory of its own. Every turn sends the whole conversation again, and what makes that cheap is that the
engine still holds the keys and values of its beginning: only the new ids are computed. For that the ids of one request must
be the exact beginning of the next, so a reply re-enters the prompt as the ids that the model produced, not as its text cut
into tokens a second time (which can differ: many id sequences spell the same text).

    session = ChatSession(engine, tokenizer, system="You are terse.")
    for piece in session.say("hi"):
        print(piece.text, end="")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

from nanoqwen.engines.base import Engine
from nanoqwen.errors import InputError
from nanoqwen.generate import Generation, generate
from nanoqwen.sampling import GREEDY, SamplingParams
from nanoqwen.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """A question and its reply. `signed` is the whole request as the template wrote it, `reply.prompt_ids` are its ids."""

    question: str
    signed: str
    reply: Generation

    @property
    def came_to_nothing(self) -> bool:
        """Whether the reply was broken off before its first id."""
        result = self.reply.result
        return result.finish_reason == "cancelled" and not result.ids


class ChatSession:
    """Turns of one conversation on one engine.

    `system` replaces the template's default system prompt. Several sessions may take turns on one engine; each computes its
    conversation anew where another left something else. Raises InputError at once for a tokenizer without the markers that
    its chat template needs.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._system = system
        self._turns: list[Turn] = []
        tokenizer.encode_chat([*self.messages, {"role": "user", "content": "x"}])

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as {"role", "content"}, the reply in the making included."""
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in self._kept_turns():
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.reply.result.text}]
        return messages

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        for turn in self._turns[-1:]:
            turn.reply.close()
        self._turns = []

    def preview(self, text: str) -> tuple[str, list[int]]:
        """The prompt that `say(text)` would send: rendered, and as ids. Changes nothing."""
        signed, ids = self._request(text)
        return self._tokenizer.chat_template.text(signed), ids

    def say(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        params: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> Generation:
        """The model's reply to `text`: a Generation to iterate.

        A reply that is broken off (Ctrl-C, or the next `say` comes early) stays in the conversation as far as it got; one
        without a single id is forgotten together with its question. Raises InputError for an empty message and ContextError
        when the conversation no longer fits; the session is then as before, so a shorter message may follow.
        """
        signed, ids = self._request(text)
        reply = generate(self._engine, self._tokenizer, ids, max_tokens=max_tokens, params=params, stop=stop, reuse=True)
        turns = self._kept_turns()
        for turn in self._turns[-1:]:
            turn.reply.close()
        self._turns = [*turns, Turn(text, signed, reply)]
        return reply

    def _kept_turns(self) -> list[Turn]:
        return [turn for turn in self._turns if not turn.came_to_nothing]

    def _request(self, text: str) -> tuple[str, list[int]]:
        """The conversation with `text` as its next message: signed, and as ids that begin with those of the last request."""
        if not text.strip():
            raise InputError("the message is empty; type something")
        template = self._tokenizer.chat_template
        signed = template.signed([*self.messages, {"role": "user", "content": text}])
        for known, ids in self._known_beginnings():
            if signed.startswith(known):
                return signed, ids + template.ids(signed[len(known) :])
        return signed, template.ids(signed)  # the first turn, or a template that rewrites earlier ones

    def _known_beginnings(self) -> Iterator[tuple[str, list[int]]]:
        """Beginnings of the conversation whose ids are known already, the longest first."""
        for turn in self._kept_turns()[-1:]:
            result = turn.reply.result
            # A reply that was cut (a stop string, a hidden marker, half a character) is not what its ids spell.
            if self._tokenizer.decode(result.ids) == result.text:
                yield turn.signed + result.text, result.prompt_ids + result.ids
            yield turn.signed, result.prompt_ids
