"""The model card, checkpoint/README.md, written from training.json so that no number in it is typed by hand.

    python -m nanoqwen.demo.card            rewrite the card of the embedded checkpoint
"""

from __future__ import annotations

import json
import textwrap

from . import checkpoint_dir, training_record

_CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
language: [code]
---

# nanoqwen demo checkpoint

A Qwen2 of {parameters:.1f} million parameters, trained from nothing on Python source, so that the nanoqwen runtime has a real model to
run without a download. It continues Python, fills in gaps and answers short requests in ChatML. It is a test subject and a teaching
aid: it knows common textbook functions, because it was taught them; the rest of what it writes looks like Python more often than it
works.

## Architecture

`Qwen2ForCausalLM`: {layers} layers, hidden {hidden}, {heads} query heads and {kv_heads} KV head of {head_dim}, MLP {mlp}, {rows}
embedding rows, untied head, q/k/v bias, RMSNorm eps {eps}, RoPE theta {theta:g}, context {context}, weights in BF16. The tokenizer is a
byte-level BPE of {bpe_size} entries in Qwen2's form, one digit a token, followed by the nine control tokens of Qwen2.5-Coder.

## Data

{train_files:,} Python files ({train_mb:.0f} MB) of the {package_count} installed packages whose own metadata names permissive licences and
no other (BSD, MIT, Apache-2.0, PSF, ISC and the like). The largest:

{packages}

All of them, with the packages refused, are in `training.json`. Files were deduplicated, tests and vendored copies left out, licence
headers cut off; files whose header names a copyleft or proprietary licence were dropped whatever their package says. The same files'
small functions and classes were also shown on their own, as fill-in-the-middle documents, and as answers to requests made of their
docstrings.

A seeded generator of textbook functions (`nanoqwen/demo/textbook`, our own synthetic data, {lessons:,} renderings) makes up
{textbook:.1%} of the tokens seen and about 15% of the chats, which are {chat:.1%}. One file in a hundred was held out by the hash of its
content, and so were the standard library's `{modules}`.

## Training

{tokens:.2f} billion tokens, {device}, driver {driver}, torch {torch}.

{stages}

{changes}The last stage reads rows of the full context and computes three steps of four with the seven projections rounded to INT4 in groups of
{group} (scale = fp16(absmax / 7), codes in [-8, 7]), gradients passing straight through, so that packing costs little. `training.json`
holds every setting, the loss curves, greedy samples, and the SHA-256 of each source file at the time.

## Held-out loss

{scores}

{protocol}

`python -m nanoqwen.demo.evaluate` recomputes the rows of `heldout/` and prints them beside the recorded ones.

## Limits

Far too small to be useful: outside the textbook it invents names, loses the thread and repeats itself; its fill-in-the-middle gets the
easy holes. It has met English only in comments and docstrings. It was trained on others' code, in many passes, and may repeat passages
of it. Do not run what it writes without reading it.

## Licence

The weights are released under this project's MIT licence. The training sources keep their own licences; none of them is in this
directory. The modules in `heldout/` are Python's, under the licence beside them.
"""


def stages_of(record: dict) -> list[dict]:
    """The record's stages in the order in which they ran. A record's earlier stages hang below it."""
    stages = []
    while record:
        stages.insert(0, record)
        record = record.get("earlier_stage")
    return stages


def card(record: dict) -> str:
    """The card's Markdown for a training record."""
    shape, corpus, results, stages = record["shape"], record["corpus"], record["results"], stages_of(record)
    seen = {key: sum(stage["tokens_seen"][key] for stage in stages) for key in record["tokens_seen"]}
    packages = ["| package | version | licence | files | MB |", "|---|---|---|---|---|"]
    for row in sorted(corpus["packages"], key=lambda r: -r["bytes"])[:15]:
        packages.append(f"| {row['name']} | {row['version']} | {row['licence']} | {row['files']} | {row['bytes'] / 1e6:.1f} |")
    lines = ["| stage | date | tokens, M | minutes | train loss | validation loss |", "|---|---|---|---|---|---|"]
    for number, stage in enumerate(stages, 1):
        lines.append(f"| {number} | {stage['date']} | {stage['tokens_seen']['total'] / 1e6:.0f} | {stage['timing']['train_s'] / 60:.1f} "
                     f"| {stage['final']['train']:.3f} | {stage['final']['validation']:.3f} |")
    scores = ["| text | precision | loss per token | perplexity | bits per byte |", "|---|---|---|---|---|"]
    for label, rows in (("all held-out files", results["held_out"]), ("`heldout/`", {p: r["together"] for p, r in results["sample"].items()})):
        for precision, row in rows.items():
            scores.append(f"| {label} | {precision} | {row['loss']:.4f} | {row['perplexity']:.3f} | {row['bits_per_byte']:.4f} |")
    changed = sorted(name.removeprefix("nanoqwen/demo/") for earlier, later in zip(stages, stages[1:]) for name in later["sources"]
                     if earlier["sources"].get(name, later["sources"][name]) != later["sources"][name])
    changes = f"Between the stages these sources of `nanoqwen/demo` changed: {', '.join(f'`{name}`' for name in changed)}." if changed else ""
    wrap = lambda text: textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)  # noqa: E731
    return _CARD.format(
        **shape | {"parameters": shape["parameters"] / 1e6}, bpe_size=record["recipe"]["bpe_size"], train_files=corpus["train_files"],
        train_mb=corpus["train_bytes"] / 1e6, package_count=len(corpus["packages"]), packages="\n".join(packages),
        lessons=corpus["textbook_renderings"], textbook=seen["textbook"] / seen["total"], chat=seen["chat"] / seen["total"],
        modules="`, `".join(name.split("/")[1][:-3] for name in corpus["held_out_modules"]), tokens=seen["total"] / 1e9,
        device=record["device"]["name"], driver=record["device"]["driver"], torch=record["device"]["torch"], stages="\n".join(lines), group=128,
        scores="\n".join(scores), protocol=wrap(results["protocol"]["description"]),
        changes=changes and wrap(changes) + "\n\n")


def main() -> int:
    record = json.loads(training_record().read_text(encoding="utf-8"))
    (checkpoint_dir() / "README.md").write_text(card(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
