"""Stand-ins for what a benchmark measures: an engine whose steps are counted, a card's clock, and a llama-bench."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nanoqwen.engines.base import Engine
from nanoqwen.synthetic import synthetic_dims

DIMS = synthetic_dims("demo")


class CountingEngine(Engine):
    """The next token is the position; ``log`` lists what was asked for."""

    name = "cpu"

    def __init__(self, limit: int = 4096) -> None:
        super().__init__(DIMS, 128, device="a counter", description="counts", context_limit=limit)
        self.log: list[tuple] = []

    def _next(self, position: int) -> np.ndarray:
        logits = np.zeros(self.dims.vocab, dtype=np.float32)
        logits[position % self.dims.vocab] = 1
        return logits

    def _prefill(self, ids):
        self.log.append(("prefill", len(ids)))
        return self._next(self.position + len(ids))

    def _decode(self, token):
        self.log.append(("decode", token))
        return self._next(self.position + 1)

    def _rewind(self, position):
        self.log.append(("rewind", position))

    def _close(self):
        pass


class CardEngine(CountingEngine):
    """The same with the insides that ``nanoqwen.bench.card`` looks at: named launches that advance a ``Card``'s clock. ``placed`` counts how
    often the scalars of a step were written."""

    def __init__(self, name: str, card: Card, limit: int = 4096) -> None:
        super().__init__(limit)
        self.name, self._stream, self.card = name, object(), card
        self.placed = 0
        names = [("embed", "embed"), ("gemv_qkv", "qkv_gemv"), ("gemv_o", "o_proj"), ("gemv_qkv", "qkv_gemv"), ("lm_head", "lm_head")]
        self._launches = {opens: [Launch(n, region, card) for n, region in names] for opens in (True, False)}
        self._graphs = {opens: self._capture(launches) for opens, launches in self._launches.items()} if name == "graph" else {}

    def _capture(self, launches):
        return SimpleNamespace(launch=lambda stream: [launch(stream) for launch in launches])

    def _place(self, token, position):
        self.placed += 1

    def run_ahead(self, token, count):
        self.log.append(("run ahead", count))
        for _ in range(count):
            self._graphs[False].launch(self._stream)

    def drop_ahead(self):
        self.log.append(("drop ahead",))


class Launch:
    """Takes one millisecond of the card's time; a head takes two."""

    def __init__(self, name: str, region: str, card: Card) -> None:
        self.name, self.region, self.card = name, region, card

    def __call__(self, stream):
        self.card.now += 2.0 if self.name == "lm_head" else 1.0


class Card:
    """A clock in milliseconds, and the part of CuPy that reads it."""

    def __init__(self) -> None:
        self.now = 0.0
        card = self

        class Event:
            def record(self, stream):
                self.at = card.now

            def synchronize(self):
                pass

        self.cupy = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: b.at - a.at))


ROW = {
    "build_commit": "abc1234", "build_number": 7000, "gpu_info": "", "backends": "CPU", "model_type": "qwen2 7B Q4_K - Medium",
    "model_size": 4_677_000_000, "model_n_params": 7_616_000_000, "n_gpu_layers": 0, "type_k": "f16", "type_v": "f16", "flash_attn": 1,
}  # fmt: skip


def rows(prompt: int = 32, gen: int = 8) -> list[dict]:
    """What llama-bench answers for two runs at two depths: 40 ms for the prompt, 4 ms a token, half as much again behind a context that is the
    other's."""
    def row(n_prompt: int, n_gen: int, depth: int, ns: int) -> dict:
        return {**ROW, "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": depth, "avg_ns": ns, "samples_ns": [ns - 1000, ns + 1000]}

    return [row(prompt, 0, 0, 40_000_000), row(0, gen, 0, 3_000_000 * gen), row(prompt, 0, prompt, 60_000_000), row(0, gen, prompt, 4_000_000 * gen)]


def fake_llama_bench(folder: Path, body: str | None = None) -> Path:
    """A program that notes its arguments in ``arguments.json`` and answers for the lengths it is given, or runs ``body``."""
    path = folder / "llama-bench"
    body = body or (
        "at = lambda o: int(sys.argv[sys.argv.index(o) + 1])\n"
        "json.dump(sys.argv[1:], open(__file__.replace('llama-bench', 'arguments.json'), 'w', encoding='utf-8'))\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from benchkit import rows\n"
        "print(json.dumps(rows(at('-p'), at('-n'))))\n"
    )
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return path


SHAPE = {"block_count": 28, "embedding_length": 3584, "attention.head_count": 28, "attention.head_count_kv": 4}


def write_gguf(path: Path, tensors: dict[str, int], shape: dict[str, int | list[int]] = SHAPE) -> Path:
    """A GGUF file with keys of many kinds and tensors at the given offsets; no data behind the table. ``shape`` are the keys of a qwen2."""
    text = lambda s: struct.pack("<Q", len(s)) + s.encode("utf-8")  # noqa: E731
    keys = text("general.name") + struct.pack("<I", 8) + text("tiny")
    keys += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    keys += text("size") + struct.pack("<II", 4, 99) + text("general.architecture") + struct.pack("<I", 8) + text("qwen2")
    for name, value in shape.items():
        many = isinstance(value, list)
        keys += text(f"qwen2.{name}") + (struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value) if many else struct.pack("<II", 4, value))
    table = b"".join(text(name) + struct.pack("<IQQIQ", 2, 4, 4, 12, offset) for name, offset in tensors.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 4 + len(shape)) + keys + table)
    return path
