"""The embedded checkpoint: a small Qwen2, really trained, and the code that trained it.

A runtime for a 7B model is hard to try without the 7B model. This room holds an 11-million-parameter one with the
same anatomy (grouped-query attention with heads of 128, biased q/k/v, SwiGLU, RMSNorm, RoPE theta 1e6, a byte-level
BPE in Qwen2's form, ChatML), trained from nothing on permissively licensed Python, so that every chapter, test and
command of the repository has a real model at once and offline.

    checkpoint/     the model as a Hugging Face directory, with its card (README.md)
    heldout/        five modules it never saw, so that its perplexity can be recomputed on a laptop
    training.json   what the training command wrote: corpus, settings, loss curve, results, samples

The way from source files to those three, one module a step:

    corpus.py       which installed packages may be read, which of their files are worth reading, what is held out
    snippets.py     functions and classes out of files; fill-in-the-middle; questions and answers
    textbook/       a seeded generator of small textbook functions
    tokenizer.py    trains the BPE and writes the tokenizer's files
    streams.py      documents -> token streams -> rows of a batch
    network.py      the model in training form, and its INT4 twin
    optim.py        Muon for the matrices, AdamW for the rest, the learning-rate schedule
    evaluate.py     perplexity and samples per precision; also a command: python -m nanoqwen.demo.evaluate
    train.py        all of it in order: python -m nanoqwen.demo.train --help
    card.py         the model card, from training.json

To reproduce: on a machine with one H100 or H200, with torch, transformers, tokenizers and safetensors installed,

    python -m nanoqwen.demo.train --out out --seed 0

reads whatever permissively licensed Python is installed there, trains both stages, and fills `out` with the three items above.
Other packages or versions give another corpus and so another model; `training.json` names those that were read. The checkpoint
here came from two runs on one H200: the main stage, then the finish stage alone (`--finish-from`), with more spellings in the
textbook and more ways of asking in the chats. `training.json` holds the account of both, and the hashes of the sources of each.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

_ROOM = Path(__file__).resolve().parent


def checkpoint_dir() -> Path:
    """The embedded checkpoint: a directory that `transformers.AutoModelForCausalLM.from_pretrained` accepts."""
    return _ROOM / "checkpoint"


def heldout_dir() -> Path:
    """The held-out sample: a few modules of Python's standard library and their licence notice."""
    return _ROOM / "heldout"


def training_record() -> Path:
    """The JSON file that the training command wrote."""
    return _ROOM / "training.json"
