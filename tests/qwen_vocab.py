"""The real Qwen2.5 tokenizer for tests, where one can be found; nothing is downloaded.

`NANOQWEN_QWEN_TOKENIZER` names a file: a Qwen2.5 `tokenizer.json`, or `qwen.tiktoken`, the rank file of the same vocabulary.
Without it, the rank file inside an installed `dashscope` package is used (`pip install --no-deps dashscope` is enough).
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
from functools import lru_cache
from pathlib import Path

import tiny
from nanoqwen.tokenizer import byte_letters

#: The 22 added tokens of Qwen2.5, ids 151643 to 151664. Those from <tool_call> on are not flagged "special" in its tokenizer.json.
MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
UNFLAGGED = MARKERS[14:]

SKIP_REASON = "no Qwen2.5 vocabulary here: set NANOQWEN_QWEN_TOKENIZER to a tokenizer.json or qwen.tiktoken, or install dashscope"


@lru_cache
def qwen_tokenizer_json() -> bytes | None:
    """Qwen2.5's `tokenizer.json`, converted if only the rank file is there; None where there is neither."""
    named = os.environ.get("NANOQWEN_QWEN_TOKENIZER")
    path = Path(named) if named else _dashscope_ranks()
    if path is None:
        return None
    if path.suffix == ".json":
        return path.read_bytes()
    return json.dumps(from_ranks(path)).encode()


def _dashscope_ranks() -> Path | None:
    spec = importlib.util.find_spec("dashscope")  # found, not imported
    ranks = Path(spec.origin).parent / "resources" / "qwen.tiktoken" if spec and spec.origin else None
    return ranks if ranks and ranks.exists() else None


def from_ranks(path: Path) -> dict:
    """`tokenizer.json` from lines of "base64 rank". A rank is a token's id and the priority of the merge that makes it.

    A rank file has no merges. The merge that made a token is found by running BPE on its bytes with lower ranks only: what is
    left are its two halves.
    """
    lines = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [[spell(half) for half in _halves(token, ranks)] for token in ranks if len(token) > 1]
    spec = tiny.tokenizer()
    spec["model"].update(vocab={spell(token): rank for token, rank in ranks.items()}, merges=merges)
    spec["added_tokens"] = [added_token(len(ranks) + k, text, special=text not in UNFLAGGED) for k, text in enumerate(MARKERS)]
    return spec


def added_token(token_id: int, text: str, special: bool = True) -> dict:
    """An entry of `added_tokens` as Qwen writes it."""
    return {"id": token_id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    parts, limit = [bytes([byte]) for byte in token], ranks[token]
    while len(parts) > 2:
        rank, k = min((ranks.get(a + b, limit), k) for k, (a, b) in enumerate(zip(parts, parts[1:])))
        assert rank < limit, f"no merge makes {token!r}"
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    return parts
