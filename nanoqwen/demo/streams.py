"""Documents to token streams, token streams to rows of a batch.

Five streams, mixed by the row: whole files; fill-in-the-middle documents; functions and classes on their own; the textbook;
chats. Each exists in several variants (other files turned into fill-in-the-middle, other holes, other chats, another order), so that a text
seen again is rarely seen the same way. Documents are joined by <|endoftext|>.

A row of the files stream may begin anywhere. A row of any other stream begins where a document begins: that is how a prompt meets
the model, at position 0, with nothing before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from . import textbook
from .corpus import SourceFile
from .snippets import MAX_ANSWER_LINES, Snippet, answer, conversation, definitions, fim_pieces, request
from .tokenizer import control_ids

STREAMS = ("files", "fim", "snippets", "textbook", "chat")
FIM_SHARE = 0.22  # of the documents of each variant
TEXTBOOK_SHARE_OF_CHATS = 0.15

# Share of each batch's rows: while the learning rate is constant, and while it falls.
MIX_MAIN = {"files": 0.64, "fim": 0.20, "snippets": 0.12, "textbook": 0.012, "chat": 0.028}
MIX_FINAL = {"files": 0.42, "fim": 0.20, "snippets": 0.19, "textbook": 0.028, "chat": 0.162}

_worker: dict = {}


def start_worker(bpe_json: str) -> None:
    """Initialiser of the pool's processes: each gets the tokenizer."""
    bpe = Tokenizer.from_str(bpe_json)
    _worker["encode"] = lambda text: bpe.encode(text, add_special_tokens=False).ids
    _worker["ids"] = control_ids(bpe.get_vocab_size())


def cut_for_prompt(text: str, rng: random.Random) -> tuple[str, str]:
    """(head, tail) to be encoded apart, one time in three, else (text, "").

    A prompt ends where its author stopped typing, often inside what is one token in running text: `):` of a signature and the newline
    after it. Cut there, or anywhere, some documents show the model both spellings.
    """
    if rng.random() > 0.35:
        return text, ""
    at = text.index("\n") if rng.random() < 0.6 else rng.randrange(len(text))
    return text[:at], text[at:]


def encode_document(job: tuple) -> list[tuple[str, np.ndarray]]:
    """(stream, payload, rng key, chance of FIM) -> [(stream, ids uint16)]. A payload is a text, or the messages of a chat."""
    stream, payload, key, fim_chance = job
    encode, ids = _worker["encode"], _worker["ids"]
    rng = random.Random(key)
    end = ids["<|endoftext|>"]
    if stream == "chat":
        out = []
        for role, content in payload:
            out += [ids["<|im_start|>"], *encode(f"{role}\n{content}"), ids["<|im_end|>"], *encode("\n")]
        return [("chat", np.array(out + [end], np.uint16))]
    if rng.random() >= fim_chance:
        head, tail = cut_for_prompt(payload, rng) if stream in ("snippets", "textbook") else (payload, "")
        return [(stream, np.array(encode(head) + encode(tail) + [end], np.uint16))]
    return [("fim", np.array([ids["<|fim_prefix|>"], *encode(prefix), ids["<|fim_suffix|>"], *encode(suffix),
                              ids["<|fim_middle|>"], *encode(middle), end], np.uint16))
            for prefix, suffix, middle in fim_pieces(payload, rng)]


def extract(texts: list[str], pool) -> list[Snippet]:
    """The distinct small functions and classes of all texts."""
    found = {s.source: s for batch in pool.map(definitions, texts, chunksize=64) for s in batch}
    return [found[source] for source in sorted(found)]


def _chats(pairs: list[tuple], rng: random.Random) -> list[list[tuple[str, str]]]:
    """Conversations of one to three turns over shuffled (kind, name, sentence, source) pairs of request and answer."""
    pairs, chats = list(pairs), []
    rng.shuffle(pairs)
    while pairs:
        turns = [pairs.pop() for _ in range(min(len(pairs), rng.choices((1, 2, 3), (75, 20, 5))[0]))]
        chats.append(conversation([(request(kind, name, sentence, rng), answer(source)) for kind, name, sentence, source in turns], rng))
    return chats


def jobs_of_variant(files: list[SourceFile], snippets: list[Snippet], lessons: list, variant: int, seed: int) -> list[tuple]:
    """All documents of one variant as arguments of `encode_document`."""
    rng = random.Random(f"{seed}/{variant}")
    jobs = [("files", f.text, f"{seed}/{variant}/{f.digest}", FIM_SHARE) for f in files]
    jobs += [("snippets", rng.choice((s.source, s.source, s.bare)), f"{seed}/{variant}/{i}/{copy}", FIM_SHARE)
             for i, s in enumerate(snippets) for copy in range(3 if s.closed else 1)]
    jobs += [("textbook", lesson.source, f"{seed}/{variant}/{i}/{copy}", 0.3) for i, lesson in enumerate(lessons) for copy in range(2)]
    library = [(s.kind, s.name, s.sentence, rng.choice((s.source, s.bare))) for s in snippets
               if s.sentence and not s.name.startswith("_") and s.source.count("\n") <= MAX_ANSWER_LINES
               for _ in range(2 if s.closed else 1)]
    wanted = round(len(library) * TEXTBOOK_SHARE_OF_CHATS / (1 - TEXTBOOK_SHARE_OF_CHATS))
    ours = [(x.kind, x.name, x.sentence, rng.choice((x.source, x.bare))) for x in rng.choices(lessons, k=wanted)]
    return jobs + [("chat", messages, "", 0.0) for messages in _chats(library + ours, rng)]


@dataclass
class Stream:
    """One stream's tokens, all variants one after the other, and where the documents of each variant begin."""

    tokens: np.ndarray  # uint16
    starts: list[np.ndarray]  # int64, one array a variant, absolute
    ends: list[int]

    def row_offsets(self, variant: int, length: int, anywhere: bool) -> np.ndarray:
        """Where the rows of length + 1 tokens begin that cover one variant."""
        starts, end = self.starts[variant], self.ends[variant]
        last = end - length - 1
        if anywhere:
            return np.arange(starts[0], last + 1, length)
        offsets, at = [], int(starts[0])
        while at <= last:
            offsets.append(at)
            cut = int(starts[np.searchsorted(starts, at + length, side="right") - 1])  # begin of the document that the row cuts off
            at = cut if cut > at else at + length
        return np.array(offsets, np.int64)


def build_streams(files: list[SourceFile], snippets: list[Snippet], lessons: list, variants: int, seed: int, pool) -> dict[str, Stream]:
    """Encode every variant. `pool` must have been started with `start_worker`."""
    chunks: dict[str, list[list[np.ndarray]]] = {name: [] for name in STREAMS}
    for variant in range(variants):
        documents: dict[str, list[np.ndarray]] = {name: [] for name in STREAMS}
        for part in pool.imap(encode_document, jobs_of_variant(files, snippets, lessons, variant, seed), chunksize=256):
            for name, ids in part:
                documents[name].append(ids)
        for name in STREAMS:
            random.Random(f"{seed}/{variant}/{name}").shuffle(documents[name])
            chunks[name].append(documents[name])
    streams = {}
    for name, per_variant in chunks.items():
        lengths = [np.array([len(d) for d in documents], np.int64) for documents in per_variant]
        base, starts, ends = 0, [], []
        for sizes in lengths:
            starts.append(base + np.concatenate(([0], np.cumsum(sizes)[:-1])))
            base += int(sizes.sum())
            ends.append(base)
        streams[name] = Stream(np.concatenate([d for documents in per_variant for d in documents]), starts, ends)
    return streams


def rows_per_stream(mix: dict[str, float], rows: int) -> dict[str, int]:
    """`rows` split by `mix`, by largest remainder."""
    exact = {name: share / sum(mix.values()) * rows for name, share in mix.items()}
    counts = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[: rows - sum(counts.values())]:
        counts[name] += 1
    return counts


class Feed:
    """Row offsets for one stream at one row length, epoch after epoch, each epoch another variant in another order."""

    def __init__(self, stream: Stream, name: str, length: int, seed: int):
        self.stream, self.name, self.length = stream, name, length
        self.rng, self.epoch, self.queue = np.random.default_rng([seed, STREAMS.index(name), length]), 0, np.empty(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        while len(self.queue) < count:
            variant = self.epoch % len(self.stream.starts)
            offsets = self.stream.row_offsets(variant, self.length, anywhere=self.name == "files")
            if not len(offsets):
                raise ValueError(f"stream {self.name} is shorter than one row of {self.length} tokens")
            self.queue = np.concatenate((self.queue, self.rng.permutation(offsets)))
            self.epoch += 1
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken


def lessons(count: int, seed: int) -> list:
    """The textbook's renderings."""
    return textbook.generate(count, seed)
