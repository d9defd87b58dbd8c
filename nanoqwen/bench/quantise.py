"""What the two quantisation methods cost in quality: ``python -m nanoqwen.bench.quantise``.

The embedded checkpoint is packed with ``absmax`` and with ``mse``, at every group size, and each file predicts the held-out modules that the
checkpoint ships, as ``nanoqwen eval perplexity`` does; its own weights in FP32 come first. Beside the perplexity stands what the search
minimises: the error of the projections' weights, relative to their size.

The group sizes are there because of how this checkpoint was made. Its last stage computed with projections rounded by absmax in groups of 128, so
it knows that one rounding; the others are new to it, and only among those do the two methods meet on equal terms.

Nothing is timed, so a busy machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch

from nanoqwen.bench.receipts import write_receipt
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.config import load_settings
from nanoqwen.demo import checkpoint_dir, heldout_dir
from nanoqwen.evals.perplexity import STRIDE, WINDOW, Score, Text, score_texts, together
from nanoqwen.int4 import dequantize
from nanoqwen.int4_search import METHODS
from nanoqwen.pack import pack
from nanoqwen.packfile import PackFile, open_pack
from nanoqwen.reference import ReferenceModel
from nanoqwen.tokenizer import Tokenizer

NAME = "quantise_methods"
COMMAND = "python -m nanoqwen.bench.quantise"
SOURCES = (
    "nanoqwen/bench/quantise.py",
    "nanoqwen/evals/perplexity.py",
    "nanoqwen/int4.py",
    "nanoqwen/int4_search.py",
    "nanoqwen/reference.py",
    "nanoqwen/demo/checkpoint/model.safetensors",
    "nanoqwen/demo/checkpoint/tokenizer.json",
)


def held_out_texts(tokenizer: Tokenizer) -> list[Text]:
    """The held-out modules, in the order of their names."""
    texts = []
    for path in sorted(heldout_dir().glob("*.py")):
        raw = path.read_text(encoding="utf-8")
        texts.append(Text(path.name, tokenizer.encode(raw), len(raw.encode("utf-8"))))
    return texts


def weight_error(file: PackFile, folder: Path) -> float:
    """Root mean square error of all projections' weights, divided by their root mean square."""
    error = size = 0.0
    with open_checkpoint(folder, notes=[]) as checkpoint:
        for spec in checkpoint.specs:
            if spec.int4:
                exact = checkpoint.read(spec.name)
                words, scales = file.int4(spec.name)
                difference = dequantize(words, scales, file.group_size) - exact
                error += float(np.square(difference, dtype=np.float64).sum())
                size += float(np.square(exact, dtype=np.float64).sum())
    return (error / size) ** 0.5


def rounded(score: Score) -> dict:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in score.as_dict().items() if key != "name"}


def measure(folder: Path) -> tuple[dict, list[dict]]:
    """(results by name of the weights, "fp32" or method_group, and a sample a text) of the checkpoint in ``folder``."""
    results, samples = {}, []

    def note(label: str, model: ReferenceModel, texts: list[Text], **more: float) -> None:
        scores = score_texts(model, texts)
        samples.extend({"weights": label, "text": score.name, **rounded(score)} for score in scores)
        results[label] = {**rounded(together(scores)), **more}

    texts = held_out_texts(Tokenizer.from_parts((folder / "tokenizer.json").read_bytes()))
    note("fp32", ReferenceModel.from_checkpoint(folder), texts, weight_error=0.0)
    for group, method in product(load_settings().quant.allowed_groups, METHODS):
        with tempfile.TemporaryDirectory(prefix="nanoqwen-bench-") as temporary:
            path = Path(temporary) / f"{method}.nanoqwen"
            pack(folder, path, method=method, group=group)
            with open_pack(path) as file:
                note(f"{method}_{group}", ReferenceModel.from_pack(file, weights="resident"), texts, weight_error=round(weight_error(file, folder), 5))
    return results, samples


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the receipt, print where it is and what it says."""
    argparse.ArgumentParser(prog=COMMAND, description="Perplexity of the embedded checkpoint, packed by each method.").parse_args(arguments)
    results, samples = measure(checkpoint_dir())
    protocol = {
        "checkpoint": "the embedded one", "texts": "the held-out modules it ships", "window": WINDOW, "stride": STRIDE,
        "cache": "FP16 for packed files, FP32 for the checkpoint", "device": "cpu", "runs": 1, "why_one_run": "nothing is random and nothing is timed",
    }  # fmt: skip
    path = write_receipt(NAME, COMMAND, results, samples, SOURCES, protocol, versions={"torch": torch.__version__})
    print(f"{path}\n{json.dumps(results, indent=2)}")


if __name__ == "__main__":
    main()
