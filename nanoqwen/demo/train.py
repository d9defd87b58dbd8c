"""Train the embedded checkpoint from nothing: corpus, tokenizer, weights, held-out sample, results. One command.

    python -m nanoqwen.demo.train --out out --seed 0

It needs a GPU with some 30 GB of free memory for the full recipe (eleven minutes on an H200) and no network. `out` receives
`checkpoint/`, `heldout/` and `training.json`, as they lie in this package. `--tiny` runs the same steps in minutes on a CPU, for a model
that knows nothing.

The recipe has two stages. *Main*: Muon and AdamW at one learning rate, constant after a short warm-up, then falling linearly to zero over
the last part of the steps, with more functions and chats in the batches while it falls. Rows of 1,024 tokens first; the last fifth of the
steps reads rows of the full context, so that the context in config.json is one the model has seen. There every second step computes with
the projections rounded to INT4, gradients passing straight through. *Finish*: a short stage at a low rate, three steps of four under that
rounding, so that the packed model is as good as the unpacked. `--finish-from EARLIER_OUT` runs the second stage alone on the result of an
earlier run, and keeps that run's account in `training.json` under `earlier_stage`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import evaluate, streams
from .corpus import build_corpus
from .network import Qwen2, Shape, describe, load_checkpoint, save_checkpoint
from .optim import learning_rate, optimisers
from .tokenizer import BPE_SIZE, bpe_of, control_ids, train_bpe, write_tokenizer

SAMPLE = ("bisect", "colorsys", "heapq", "shlex", "textwrap")  # of the modules held out by name, those that ship with the checkpoint


@dataclass(frozen=True)
class Stage:
    """One stage of a run. Shares are of its steps, counted from the end."""

    steps: int
    lr: float  # peak
    warmup: int  # steps
    decay_share: float  # the learning rate falls, the final mix is read
    long_share: float  # rows of the full context
    int4_share: float  # steps rounded to INT4, except every `int4_cycle`-th
    int4_cycle: int


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run. Lengths in tokens."""

    main: Stage = Stage(6600, 4e-3, 100, decay_share=0.4, long_share=0.2, int4_share=0.2, int4_cycle=2)
    finish: Stage = Stage(500, 6e-4, 20, decay_share=1.0, long_share=1.0, int4_share=1.0, int4_cycle=4)
    batch_tokens: int = 262_144
    row: int = 1024
    weight_decay: float = 0.1
    clip: float = 1.0
    variants: int = 4
    lessons: int = 8000
    bpe_bytes: int = 40_000_000  # text that the tokenizer is trained on, at most
    bpe_size: int = BPE_SIZE


TINY = Recipe(Stage(8, 4e-3, 2, 0.4, 0.2, 0.2, 2), Stage(4, 6e-4, 1, 1.0, 1.0, 1.0, 4), batch_tokens=4096, row=128, variants=2, lessons=300)
TINY_SHAPE = Shape(hidden=128, layers=2, heads=1, mlp=256, context=1024)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def device_facts(device: str) -> dict:
    """What the run was done on."""
    facts = {"name": platform.machine(), "torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda, "driver": None}
    if device == "cuda":
        facts["name"] = torch.cuda.get_device_name()
        query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False)
        facts["driver"] = query.stdout.split("\n")[0].strip() or None
    return facts


class Batches:
    """Batches on the device: rows of every stream in the proportions of a mix, and the count of what was drawn."""

    def __init__(self, data: dict[str, streams.Stream], recipe: Recipe, device: str):
        self.recipe, self.device, self.data = recipe, device, data
        self.tokens = {name: torch.from_numpy(s.tokens.view("int16")).to(device) for name, s in data.items()}
        self.feeds: dict[tuple[str, int], streams.Feed] = {}
        self.seen = dict.fromkeys(data, 0)

    def next(self, length: int, mix: dict[str, float], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, targets), int64 [rows, length]."""
        parts, span = [], torch.arange(length + 1, device=self.device)
        for name, count in streams.rows_per_stream(mix, self.recipe.batch_tokens // length).items():
            if count:
                feed = self.feeds.setdefault((name, length), streams.Feed(self.data[name], name, length, seed))
                offsets = torch.from_numpy(feed.take(count)).to(self.device, non_blocking=True)
                parts.append(self.tokens[name][offsets[:, None] + span])
                self.seen[name] += count * length
        rows = torch.cat(parts).long()
        return rows[:, :-1], rows[:, 1:]


def prepare(recipe: Recipe, seed: int, workers: int, max_files: int | None, bpe: Tokenizer | None, say) -> tuple:
    """(bpe, streams, corpus, held-out rows, account): everything before the first gradient, on the CPU. Trains a BPE if none is given."""
    fork = multiprocessing.get_context("fork")  # before CUDA is touched
    with fork.Pool(workers) as pool:
        corpus = build_corpus(pool, max_files)
        say(f"corpus: {corpus.account['train_files']} files, {corpus.account['train_bytes'] / 1e6:.1f} MB, "
            f"held out {corpus.account['held_out_files']} files, {corpus.account['held_out_bytes'] / 1e6:.2f} MB")
        snippets = streams.extract([f.text for f in corpus.train], pool)
        say(f"functions and classes: {len(snippets)}, self-contained {sum(s.closed for s in snippets)}, with a request {sum(bool(s.sentence) for s in snippets)}")
    lessons = streams.lessons(recipe.lessons, seed)
    if bpe is None:
        texts, size = [], 0
        for file in sorted(corpus.train, key=lambda f: f.digest):
            size += len(file.text)
            if size > recipe.bpe_bytes:
                break
            texts.append(file.text)
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        bpe = train_bpe(texts + [s.source for s in snippets if s.closed] + [lesson.source for lesson in lessons], recipe.bpe_size)
        say("tokenizer trained")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with fork.Pool(workers, streams.start_worker, (bpe.to_str(),)) as pool:
        data = streams.build_streams(corpus.train, snippets, lessons, recipe.variants, seed, pool)
        held_jobs = [("files", f.text, "", 0.0) for f in corpus.held_out]
        held_rows = [ids for part in pool.map(streams.encode_document, held_jobs) for _, ids in part]
    account = corpus.account | {
        "definitions": len(snippets), "self_contained_definitions": sum(s.closed for s in snippets), "textbook_renderings": len(lessons),
        "tokens_per_variant": {name: len(s.tokens) // recipe.variants for name, s in data.items()},
        "documents_per_variant": {name: sum(map(len, s.starts)) // recipe.variants for name, s in data.items()},
    }
    say("streams: " + ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in account["tokens_per_variant"].items()) + " tokens a variant")
    return bpe, data, corpus, held_rows, account


def optimise(net: Qwen2, batches: Batches, held_rows: list, recipe: Recipe, stage: Stage, seed: int, device: str, say) -> list[dict]:
    """Train `net` in place for one stage; returns the points of its loss curve."""
    long_from, final_from, int4_from = (stage.steps - round(stage.steps * share) for share in (stage.long_share, stage.decay_share, stage.int4_share))
    every = max(1, stage.steps // 100 if stage.steps > 1000 else stage.steps // 20)
    opts = optimisers(net, stage.lr, recipe.weight_decay)
    held = [torch.from_numpy(ids[: recipe.row + 1].astype("int64")) for ids in held_rows if len(ids) > recipe.row][:128]
    held = torch.stack(held).to(device) if held else None
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    curve, running, since, began = [], torch.zeros((), device=device), 0, time.perf_counter()
    for step in range(stage.steps):
        ids, targets = batches.next(net.shape.context if step >= long_from else recipe.row,
                                    streams.MIX_FINAL if step >= final_from else streams.MIX_MAIN, seed)
        net.set_int4(step >= int4_from and step % stage.int4_cycle != 0)
        with autocast:
            loss = net(ids, targets).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
        rate = stage.lr * learning_rate(step, stage.steps, stage.decay_share, stage.warmup)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        running, since = running + loss.detach(), since + 1
        if (step + 1) % every == 0 or step + 1 == stage.steps:
            net.set_int4(False)
            validation = None
            if held is not None:
                with torch.no_grad(), autocast:
                    validation = net(held[:, :-1], held[:, 1:]).mean().item()
            point = {"step": step + 1, "tokens": (step + 1) * recipe.batch_tokens, "train": running.item() / since, "validation": validation,
                     "lr": rate, "gradient_norm": norm.item(), "seconds": time.perf_counter() - began}
            curve.append(point)
            running, since = torch.zeros((), device=device), 0
            if (step + 1) // every % 5 == 0 or step + 1 == stage.steps or step < 3 * every:
                say(f"step {step + 1}: train {point['train']:.4f} validation {validation or float('nan'):.4f} norm {point['gradient_norm']:.2f} "
                    f"{point['seconds']:.0f} s {point['tokens'] / point['seconds'] / 1e6:.2f} M tokens/s")
    net.set_int4(False)
    return curve


def copy_sample(folder: Path) -> None:
    """The held-out modules that ship with the checkpoint, byte for byte, and Python's licence where the installation has it."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in SAMPLE:
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    if (library / "LICENSE.txt").exists():
        (folder / "LICENSE.txt").write_bytes((library / "LICENSE.txt").read_bytes())


def stage_record(name: str, options, recipe: Recipe, seen: dict, account: dict, curve: list, timing: dict, earlier: dict | None) -> dict:
    """What training.json says of one stage; the stage before it, without its results, hangs below."""
    room = Path(__file__).resolve().parent
    given = {"--variants": options.variants, "--max-files": options.max_files, "--finish-from": options.finish_from and "EARLIER_OUT"}
    command = f"python -m nanoqwen.demo.train --out OUT --seed {options.seed}" + "".join(f" {key} {value}" for key, value in given.items() if value)
    return {
        "stage": name, "command": command + (" --tiny" if options.tiny else ""), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_facts(options.device), "seed": options.seed, "recipe": asdict(recipe),
        "mix": {"main": streams.MIX_MAIN, "final": streams.MIX_FINAL, "fim_share_of_documents": streams.FIM_SHARE},
        "tokens_seen": {"total": sum(seen.values()), **seen}, "epochs": {key: seen[key] / account["tokens_per_variant"][key] for key in seen},
        "corpus": account, "timing": timing, "curve": curve, "final": {"train": curve[-1]["train"], "validation": curve[-1]["validation"]},
        "sources": {f"nanoqwen/demo/{p.relative_to(room).as_posix()}": file_hash(p) for p in sorted(room.rglob("*.py"))},
        "earlier_stage": earlier and {key: value for key, value in earlier.items() if key not in ("results", "files", "shape")},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanoqwen.demo.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint/, heldout/ and training.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that read and encode")
    parser.add_argument("--max-files", type=int, help="read only about this many source files, for trials")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="the same steps with a toy model, for a CPU")
    parser.add_argument("--variants", type=int, help="how many variants of the streams to build (default: the recipe's)")
    parser.add_argument("--finish-from", type=Path, help="skip the main stage: take tokenizer and weights from the `--out` of an earlier run")
    options = parser.parse_args(arguments)
    recipe, shape = TINY if options.tiny else Recipe(), TINY_SHAPE if options.tiny else Shape()
    recipe = replace(recipe, variants=options.variants or recipe.variants)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    begun, marks = [began], {}  # of the stage

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    def mark(name: str) -> None:
        marks[name] = round(time.perf_counter() - begun[0] - sum(marks.values()), 1)

    copy_sample(options.out / "heldout")  # first of all: an installation without these modules should fail now, not at the end
    earlier, bpe = None, None
    if options.finish_from:
        earlier = json.loads((options.finish_from / "training.json").read_text(encoding="utf-8"))
        bpe = bpe_of(options.finish_from / "checkpoint")
    bpe, data, corpus, held_rows, account = prepare(recipe, options.seed, options.workers, options.max_files, bpe, say)
    checkpoint = options.out / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    write_tokenizer(bpe, checkpoint, shape.context)
    mark("prepare_s")
    torch.manual_seed(options.seed)
    if options.finish_from:
        net = load_checkpoint(options.finish_from / "checkpoint")
    else:
        net = Qwen2(shape)
        net.initialise(options.seed)
    net.to(options.device)
    if options.device == "cuda":
        net.compile_parts()
    record = earlier
    for name in ("finish",) if options.finish_from else ("main", "finish"):
        batches = Batches(data, recipe, options.device)
        curve = optimise(net, batches, held_rows, recipe, getattr(recipe, name), options.seed, options.device, say)
        mark("train_s")
        record = stage_record(name, options, recipe, batches.seen, account, curve, dict(marks), record)
        marks.clear()
        begun[0] = time.perf_counter()
    save_checkpoint(net, checkpoint, control_ids(recipe.bpe_size))
    sample = evaluate.read_sample(options.out / "heldout")
    results = evaluate.evaluate(checkpoint, sample, options.device, [f.text for f in corpus.held_out], with_samples=True)
    mark("evaluate_s")
    record["timing"] |= marks
    record |= {"shape": describe(net.shape), "results": results, "files": {
        str(p.relative_to(options.out)): file_hash(p) for folder in ("checkpoint", "heldout") for p in sorted((options.out / folder).iterdir())}}
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    together = {p: round(r["together"]["perplexity"], 3) for p, r in results["sample"].items()}
    say(f"done: held-out sample perplexity {together}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
