"""What the trained checkpoint can do: held-out perplexity and greedy samples, in three precisions.

    python -m nanoqwen.demo.evaluate            recompute the held-out sample's perplexity on this machine and compare with training.json

Perplexity protocol. A text is encoded as it is (no token in front). Windows of WINDOW tokens begin every STRIDE tokens; each window scores
the tokens that no earlier window scored, so every token but a file's first is predicted once, all but the first window's with at least
WINDOW - STRIDE tokens of context. Loss is natural-log loss per predicted token; perplexity is its exponential; bits per byte divides the
total loss in bits by the UTF-8 bytes of the text.

Precisions. `fp32`: the file's BF16 weights, all arithmetic float32. `fp16`: weights and activations float16, the residual stream too; RMSNorm
statistics and the softmax over the vocabulary in float32. `int4`: the seven projections rounded to INT4 in groups of 128, everything else
rounded to FP16, arithmetic float32: what a .nanoqwen file holds.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import checkpoint_dir, heldout_dir, training_record
from .network import Qwen2, load_checkpoint
from .tokenizer import control_ids

WINDOW, STRIDE = 1024, 512  # the stride must be smaller: a window's first token is context only
PRECISIONS = ("fp32", "fp16", "int4")

COMPLETIONS = (
    "def fibonacci(n):", "def is_prime(n):", "def factorial(n):\n", "def gcd(a, b):\n", "def binary_search(items, target):\n", "def reverse_string(s):\n",
    "def count_words(text):\n", "def quicksort(items):", 'def mean(values):\n    """', "class Stack:\n", "def read_json(path):\n",
    'def is_palindrome(s):\n    """Check whether a string is a palindrome."""\n', "import math\n\n\ndef distance(p, q):\n",
)
CHATS = ("Write a function fibonacci: Return the n-th Fibonacci number.", "Write a function that checks whether a number is prime.",
         "Write a function flatten: Flatten a list of lists into a single list.", "How do I write a function that reverses a string?", "Who are you?")
HOLES = (("def largest(items):\n    best = items[0]\n    for item in items:\n", "            best = item\n    return best\n"),
         ("def add(a, b):\n    return ", "\n\n\nprint(add(2, 3))\n"))


def load(folder: Path, precision: str, device: str) -> Qwen2:
    """The checkpoint in one of PRECISIONS, ready to evaluate."""
    net = load_checkpoint(folder, device).eval()
    if precision == "int4":
        return net.as_int4()
    return net.half() if precision == "fp16" else net


def windows(ids: list[int]) -> list[tuple[list[int], int]]:
    """(window, how many of its last tokens it scores) for a text's ids, as the protocol says."""
    out, scored = [], 1  # a file's first token is predicted by nothing
    for begin in range(0, len(ids), STRIDE):
        end = min(begin + WINDOW, len(ids))
        if end > scored:
            out.append((ids[begin:end], end - scored))
        scored = max(scored, end)
        if end == len(ids):
            return out
    return out


@torch.no_grad()
def total_loss(net: Qwen2, texts_ids: list[list[int]], device: str, batch: int = 64) -> tuple[float, int]:
    """(total loss in nats, predicted tokens) over several texts. Windows of one length run together; the result does not depend on it."""
    by_length: dict[int, list] = {}
    for ids in texts_ids:
        for window, scores in windows(ids):
            by_length.setdefault(len(window), []).append((window, scores))
    loss, count = 0.0, 0
    for length, group in sorted(by_length.items()):
        for i in range(0, len(group), batch):
            part = group[i:i + batch]
            rows = torch.tensor([window for window, _ in part], device=device)
            each = net(rows[:, :-1], rows[:, 1:]).double()
            for row, (_, scores) in zip(each, part):
                loss += row[length - 1 - scores:].sum().item()
                count += scores
    return loss, count


def score(net: Qwen2, tokenizer: Tokenizer, texts: list[str], device: str) -> dict:
    """Loss, perplexity and bits per byte of the texts together."""
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    loss, count = total_loss(net, encoded, device)
    size = sum(len(text.encode()) for text in texts)
    return {"loss": loss / count, "perplexity": math.exp(loss / count), "bits_per_byte": loss / math.log(2) / size, "tokens": count, "bytes": size}


@torch.no_grad()
def loss_by_position(net: Qwen2, tokenizer: Tokenizer, texts: list[str], device: str, parts: int = 8) -> dict:
    """Mean loss over equal parts of the full context, on texts that fill it: whether tokens far back still help."""
    length = net.shape.context
    encoded = [ids for ids in (tokenizer.encode(t, add_special_tokens=False).ids for t in texts) if len(ids) > length]
    if not encoded:
        return {"texts": 0}
    rows = torch.stack([net(torch.tensor([ids[:length]], device=device), torch.tensor([ids[1:length + 1]], device=device))[0] for ids in encoded])
    return {"texts": len(encoded), "tokens_a_part": length // parts, "loss": rows.double().view(len(encoded), parts, -1).mean(dim=(0, 2)).tolist()}


@torch.no_grad()
def largest_values(net: Qwen2, tokenizer: Tokenizer, texts: list[str], device: str) -> dict:
    """The largest magnitudes on the way through the network, against FP16's limit of 65,504."""
    peak = {"residual": 0.0, "mlp_inner": 0.0, "attention_score": 0.0, "logit": 0.0}

    def note(key: str, value: torch.Tensor) -> None:
        peak[key] = max(peak[key], value.abs().max().item())

    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: net.shape.context]
        x = net.model.embed_tokens(torch.tensor([ids], device=device))
        cos, sin = net.cos[: len(ids)], net.sin[: len(ids)]
        for layer in net.model.layers:
            normed, attention = layer.input_layernorm(x), layer.self_attn
            q = attention.q_proj(normed).view(len(ids), -1, net.shape.head_dim)
            k = attention.k_proj(normed).view(len(ids), -1, net.shape.head_dim)
            note("attention_score", q.norm(dim=-1).max() * k.norm(dim=-1).max() / net.shape.head_dim ** 0.5)  # an upper bound
            x = x + attention(normed, cos, sin)
            normed = layer.post_attention_layernorm(x)
            note("mlp_inner", torch.nn.functional.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed))
            x = x + layer.mlp(normed)
            note("residual", x)
        note("logit", net.head(x))
    return peak


@torch.no_grad()
def greedy(net: Qwen2, ids: list[int], stops: set[int], device: str, limit: int = 160) -> tuple[list[int], str]:
    """(new ids without the stop id, 'stop' or 'length'): the most likely token again and again. No cache: short prompts only."""
    out: list[int] = []
    while len(out) < limit:
        best = int(net(torch.tensor([ids + out], device=device))[0, -1].float().argmax())
        if best in stops:
            return out, "stop"
        out.append(best)
    return out, "length"


def parsable(text: str) -> str:
    """The longest run of whole lines from the start of `text` that is valid Python ('' if not even one line is)."""
    lines = text.rstrip("\n").split("\n")
    for end in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:end]))
            return "\n".join(lines[:end])
        except (SyntaxError, ValueError):
            continue
    return ""


def samples(net: Qwen2, tokenizer: Tokenizer, device: str) -> list[dict]:
    """Greedy samples: prompts to continue, requests to answer, holes to fill. `tokenizer` knows the control tokens."""
    ids = {text: tokenizer.token_to_id(text) for text in control_ids()}
    stops = {ids["<|endoftext|>"], ids["<|im_end|>"], ids["<|fim_prefix|>"], ids["<|file_sep|>"]}
    plain = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    out = []

    def run(kind: str, prompt, prompt_ids: list[int]) -> None:
        new, why = greedy(net, prompt_ids, stops, device)
        text = tokenizer.decode(new, skip_special_tokens=False)
        row = {"kind": kind, "prompt": prompt, "text": text, "tokens": len(new), "finish": why}
        if kind == "completion":
            whole = parsable(prompt + text)
            row["valid_python"] = why == "stop" and whole == (prompt + text).rstrip("\n")
            row["parsable_lines"] = len(whole.split("\n")) if whole else 0
        out.append(row)

    from .snippets import DEFAULT_SYSTEM
    for prompt in COMPLETIONS:
        run("completion", prompt, plain(prompt))
    for user in CHATS:
        run("chat", user, plain(f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"))
    for prefix, suffix in HOLES:
        run("fill", [prefix, suffix], plain(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"))
    return out


def _protocol() -> str:
    """The protocol's text from the top of this file, with the numbers in place of their names."""
    text = " ".join(__doc__.split("Perplexity protocol. ")[1].split())
    return text.replace("WINDOW - STRIDE", str(WINDOW - STRIDE)).replace("WINDOW", str(WINDOW)).replace("STRIDE", str(STRIDE))


def read_sample(folder: Path) -> dict[str, str]:
    """The held-out sample's files by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def evaluate(checkpoint: Path, sample: dict[str, str], device: str, held_out: list[str] | None = None, with_samples: bool = False) -> dict:
    """Everything that training.json says about quality. `held_out`: the texts of the whole held-out split, where they are at hand."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    result: dict = {"protocol": {"window": WINDOW, "stride": STRIDE, "description": _protocol()}, "sample": {}, "held_out": {}, "samples": {}}
    for precision in PRECISIONS:
        net = load(checkpoint, precision, device)
        result["sample"][precision] = {name: score(net, tokenizer, [text], device) for name, text in sample.items()}
        result["sample"][precision]["together"] = score(net, tokenizer, list(sample.values()), device)
        if held_out:
            result["held_out"][precision] = score(net, tokenizer, held_out, device)
        if with_samples and precision != "fp16":
            result["samples"][precision] = samples(net, tokenizer, device)
        if precision == "fp32":
            result["largest_values"] = largest_values(net, tokenizer, list(sample.values()), device)
            result["loss_by_position"] = loss_by_position(net, tokenizer, held_out or list(sample.values()), device)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanoqwen.demo.evaluate", description="Recompute the held-out sample's perplexity.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", action="store_true", help="also print greedy samples")
    options = parser.parse_args(arguments)
    recorded = json.loads(training_record().read_text(encoding="utf-8"))["results"]["sample"]
    result = evaluate(checkpoint_dir(), read_sample(heldout_dir()), options.device, with_samples=options.samples)
    print(f"{'file':14} {'precision':9} {'perplexity':>10} {'recorded':>10} {'bits/byte':>10}")
    for precision, files in result["sample"].items():
        for name, row in files.items():
            print(f"{name:14} {precision:9} {row['perplexity']:10.4f} {recorded[precision][name]['perplexity']:10.4f} {row['bits_per_byte']:10.4f}")
    for precision, rows in result["samples"].items():
        for row in rows:
            print(f"--- {precision} {row['kind']}: {row['prompt']!r} ({row['finish']})\n{row['text']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
