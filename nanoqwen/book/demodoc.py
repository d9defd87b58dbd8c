"""What the page about the embedded checkpoint says in numbers, from the record that its training wrote and from receipts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from nanoqwen import demo
from nanoqwen.book.display import Html, figure, table
from nanoqwen.book.receipts import receipt
from nanoqwen.config import Dims, load_settings
from nanoqwen.errors import InputError
from nanoqwen.int4_search import METHODS


@lru_cache(maxsize=1)
def record() -> dict[str, Any]:
    """``nanoqwen/demo/training.json``. Raises InputError when it does not exist."""
    path = demo.training_record()
    if not path.is_file():
        raise InputError(f"{path.name} is missing: the embedded checkpoint has no training record")
    return json.loads(path.read_text(encoding="utf-8"))


def made() -> str:
    """Device, date and command of the training run, for captions."""
    given = record()
    return f"{given['device']['name']}, {given['date']}, `{given['command']}`"


def shape() -> str:
    """Dimensions beside those of the 7B."""
    small, big = record()["shape"], Dims.qwen2_5_coder_7b()
    rows = [
        ("layers", small["layers"], big.num_layers),
        ("hidden size", small["hidden"], big.hidden),
        ("query heads", small["heads"], big.num_heads),
        ("KV heads", small["kv_heads"], big.num_kv_heads),
        ("head size", small["head_dim"], big.head_dim),
        ("MLP size", small["mlp"], big.intermediate),
        ("embedding rows", small["rows"], big.vocab),
        ("context", small["context"], big.max_position),
    ]
    return table([(name, f"{a:,}", f"{b:,}") for name, a, b in rows], head=["", "embedded", "Qwen2.5-Coder-7B"]).markdown()


def data() -> str:
    """What it read: files, and the packages most of them came from."""
    corpus = record()["corpus"]
    largest = sorted(corpus["packages"], key=lambda p: -p["bytes"])[:12]
    rows = [(f"{p['name']} {p['version']}", p["licence"], f"{p['files']:,}", f"{p['bytes'] / 1e6:.1f}") for p in largest]
    rest = len(corpus["packages"]) - len(largest)
    caption = f"{corpus['train_files']:,} files, {corpus['train_bytes'] / 1e6:.0f} MB in all; {rest} smaller packages are in the record."
    return table(rows, head=["package", "licence", "files", "MB"], caption=caption).markdown()


def stages() -> list[dict[str, Any]]:
    """The records of the training runs in order, the last one's own without the results."""
    given = record()
    return [run for run in (given.get("earlier_stage"), given) if run]


def training() -> str:
    """The runs in a table, one column each."""
    runs = stages()

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return (name, *(value(run) for run in runs))

    rows = [
        row("tokens seen, millions", lambda run: f"{run['tokens_seen']['total'] / 1e6:,.0f}"),
        row("tokens a step", lambda run: f"{run['recipe']['batch_tokens']:,}"),
        row("minutes of training", lambda run: f"{run['timing']['train_s'] / 60:.1f}"),
        row("training loss at the end", lambda run: f"{run['final']['train']:.3f}"),
        row("validation loss at the end", lambda run: f"{run['final']['validation']:.3f}"),
    ]
    head = ["", *(f"stage {i}" for i in range(1, len(runs) + 1))]
    caption = f"{record()['shape']['parameters'] / 1e6:.1f} million parameters. " + "; ".join(f"stage {i}: `{run['command']}`" for i, run in enumerate(runs, 1))
    return table(rows, head=head, caption=f"{caption}. {runs[-1]['device']['name']}, {runs[-1]['date']}.").markdown()


def loss() -> str:
    """Held-out loss in each precision."""
    results = record()["results"]
    names = {"fp32": "FP32", "fp16": "FP16", "int4": "INT4, as packed"}
    sample = {precision: files["together"] for precision, files in results["sample"].items()}
    rows = [
        (text, names[precision], f"{row['loss']:.4f}", f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}")
        for text, scores in (("held-out files", results["held_out"]), ("five shipped modules", sample))
        for precision, row in scores.items()
    ]
    return table(rows, head=["text", "precision", "loss a token", "perplexity", "bits a byte"], caption=made()).markdown()


def methods() -> str:
    """Held-out perplexity and weight error of the two quantisation methods at each group size, from their receipt."""
    measured = receipt("quantise_methods")
    names = {"fp32": ("FP32", "")} | {
        f"{method}_{group}": (f"INT4, `{method}`", group) for group in load_settings().quant.allowed_groups for method in METHODS
    }
    rows = [
        (*names[key], f"{row['weight_error']:.1%}" if row["weight_error"] else "0", f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}")
        for key, row in measured.results.items()
    ]
    return table(rows, head=["weights", "group", "error of the weights", "perplexity", "bits a byte"], caption=f"Five shipped modules. {measured.caption()}").markdown()


def curve() -> Html:
    """The loss curve as a figure."""
    import matplotlib.pyplot as plt

    from nanoqwen.book import palette
    from nanoqwen.book.style import use_style

    use_style()
    points, before = [], 0
    for run in stages():
        points += [point | {"tokens": point["tokens"] + before} for point in run["curve"]]
        before += run["tokens_seen"]["total"]
    millions = [p["tokens"] / 1e6 for p in points]
    fig, ax = plt.subplots()
    ax.plot(millions, [p["train"] for p in points], color=palette.ENGINE["cpu"], linewidth=1.2, label="training batches")
    if points[-1]["validation"] is not None:
        ax.plot(millions, [p["validation"] for p in points], color=palette.ACCENT, label="held-out files")
    ax.set_xlabel("tokens seen, millions")
    ax.set_ylabel("loss a token, nats")
    ax.grid(axis="y")
    ax.legend()
    first, last = points[0], points[-1]
    spoken = f"Training loss falls from {first['train']:.2f} to {last['train']:.2f} over {millions[-1]:,.0f} million tokens."
    return figure(fig, title="loss of the embedded checkpoint while it was trained", alt=spoken, caption=made())


def samples() -> str:
    """Greedy INT4 samples, unedited: the prompt and what the model makes of it."""
    out = []
    for row in record()["results"]["samples"]["int4"]:
        if row["kind"] == "completion":
            out.append(_listing(row["prompt"] + row["text"]))
        elif row["kind"] == "chat":
            out.append(f"> {row['prompt']}\n\n{_listing(row['text'], 'text')}")
    return "\n\n".join(out)


def _listing(text: str, language: str = "python") -> str:
    """A code block; what no Python lexer accepts is shown as plain text."""
    from pygments.lexers import PythonLexer
    from pygments.token import Error

    if language == "python" and any(kind is Error for kind, _ in PythonLexer().get_tokens(text)):
        language = "text"
    return f"`````{language}\n{text.rstrip()}\n`````"


PARTS = {"shape": shape, "data": data, "training": training, "loss": loss, "methods": methods, "curve": curve, "samples": samples}


def demo_part(name: str) -> Html | str:
    """One part of the page, Markdown or a figure. Raises ValueError for another name."""
    if name not in PARTS:
        raise ValueError(f"no part is called {name!r}; there are: {', '.join(PARTS)}")
    return PARTS[name]()
