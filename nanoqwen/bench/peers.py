"""Peers on the same machine: llama.cpp's own benchmark program, run in the same command and put into the same receipt.

``llama-bench`` measures prompt processing (pp) and text generation (tg), each at the context depths that it is given, and answers in JSON.
The prompt is taken at depth 0 and the generation behind as many tokens as our prompt has. What differs from our protocol all the same is
named in the result, not hidden in a footnote. The page ``book/compare_llama_cpp.md`` names the build that this was written for.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass

from nanoqwen.bench.gguf import cache_bytes_per_token, embedding_bytes
from nanoqwen.bench.protocol import Protocol, mbu, spread

NAME = "llama.cpp"
TIMEOUT_S = 1800
DEVIATIONS = (
    "llama-bench draws its own random token ids; it cannot be given ours. In a dense model the ids do not change the work",
    "it times evaluations alone: the next id is a random number, so nothing is chosen from the logits and no text is made; ours includes the choice",
    "its warm-up is one prompt and one token, so the first of its timed runs may pay for what ours did before",
    "Q4_K and the like store more than 4 bits a weight and quantise the output head too: compare the bits per weight",
)


class Skipped(Exception):
    """The peer could not be measured; str() says in one line what is missing."""


@dataclass(frozen=True)
class Tool:
    """A ``llama-bench`` that exists, and the model file for it."""

    program: str
    gguf: str


def find(program: str | None, gguf: str | None) -> Tool | None:
    """The tool, None when no peer was asked for. Raises Skipped naming what is missing."""
    if program is None and gguf is None:
        return None
    if program is None:
        raise Skipped(f"--gguf {gguf} was given without --llama-bench PATH, the program of llama.cpp that measures it")
    found = shutil.which(os.path.expanduser(program))
    if found is None:
        raise Skipped(f"{program}: no such program; build llama.cpp, then name its build/bin/llama-bench")
    if gguf is None:
        raise Skipped("--llama-bench needs --gguf FILE, the model as llama.cpp reads it")
    if not os.path.isfile(os.path.expanduser(gguf)):
        raise Skipped(f"{gguf}: no such file; convert the same checkpoint with llama.cpp's convert_hf_to_gguf.py and llama-quantize")
    return Tool(found, os.path.expanduser(gguf))


def command(tool: Tool, protocol: Protocol, on_gpu: bool) -> list[str]:
    """The command line: all layers on the GPU with flash attention, or none. Both lengths are measured at both depths."""
    where = ["-ngl", "99", "-fa", "1"] if on_gpu else ["-ngl", "0"]
    lengths = ["-p", str(protocol.prompt_tokens), "-n", str(protocol.gen_tokens), "-d", f"0,{protocol.prompt_tokens}"]
    return [tool.program, "-m", tool.gguf, *lengths, "-r", str(protocol.runs), *where, "-o", "json"]


def run(tool: Tool, protocol: Protocol, on_gpu: bool, ceiling_gb_s: float | None) -> tuple[dict, dict]:
    """(results, samples) of the peer. Raises Skipped when it fails, takes too long, or answers what cannot be read."""
    words = command(tool, protocol, on_gpu)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace", timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Skipped(f"{tool.program} did not finish in {TIMEOUT_S} s") from None
    except OSError as error:
        raise Skipped(f"{tool.program} cannot be run: {error.strerror}") from None
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise Skipped(f"{tool.program} ended with status {done.returncode}: {last.strip()}")
    results, samples = parse(done.stdout, protocol)
    embedding, cache = embedding_bytes(tool.gguf), cache_bytes_per_token(tool.gguf)
    if embedding is None or cache is None or results["kv_type"] != "FP16":
        results["mbu_note"] = "not given: the GGUF file does not tell what a step reads"
    else:  # one row of the embedding, everything else, and the cache, at the same context as ours
        results["bytes_per_token"] = results["file_bytes"] - embedding + cache * protocol.middle
        results["mbu"] = mbu(results["bytes_per_token"], results["itl_ms"], ceiling_gb_s)
    return results, samples


def parse(text: str, protocol: Protocol) -> tuple[dict, dict]:
    """(results, samples) from the JSON that ``llama-bench -o json`` writes. Raises Skipped for anything else."""
    try:
        rows = json.loads(text)
        prompt = next(r for r in rows if (r["n_prompt"], r["n_gen"], r["n_depth"]) == (protocol.prompt_tokens, 0, 0))
        generated = next(r for r in rows if (r["n_prompt"], r["n_gen"], r["n_depth"]) == (0, protocol.gen_tokens, protocol.prompt_tokens))
        prefill = [ns / 1e6 for ns in prompt["samples_ns"]]
        steps = [ns / 1e6 / protocol.gen_tokens for ns in generated["samples_ns"]]
        itl_ms = statistics.median(steps)
        results = {
            "model": generated["model_type"],
            "bits_per_weight": round(8 * generated["model_size"] / generated["model_n_params"], 3),
            "kv_type": _kv_type(generated),
            "build": f"{generated.get('build_number', '?')} ({generated.get('build_commit', '?')})",
            "backend": generated.get("backends") or generated.get("gpu_info") or "unknown",
            "gpu_layers": generated.get("n_gpu_layers"),
            "flash_attention": generated.get("flash_attn"),
            "depth": generated["n_depth"],
            "ttft_ms": round(statistics.median(prefill), 4),
            "itl_ms": round(itl_ms, 4),
            "tokens_per_s": round(1e3 / itl_ms, 2),
            "mbu": None,
            "file_bytes": generated["model_size"],
            "spread": {"ttft_ms": spread(prefill), "itl_ms": spread(steps)},
            "deviations": list(DEVIATIONS),
        }
        return results, {"prompt": prompt, "generation": generated}
    except StopIteration:
        wanted = f"pp{protocol.prompt_tokens} and tg{protocol.gen_tokens} @ d{protocol.prompt_tokens}"
        raise Skipped(f"llama-bench's answer has no {wanted}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise Skipped(f"llama-bench's answer cannot be read ({type(error).__name__}: {error})") from None


def _kv_type(row: dict) -> str:
    keys, values = row["type_k"].upper(), row["type_v"].upper()
    names = {"F16": "FP16", "F32": "FP32"}
    return names.get(keys, keys) if keys == values else f"{names.get(keys, keys)} keys, {names.get(values, values)} values"
