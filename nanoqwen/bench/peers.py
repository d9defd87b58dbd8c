"""Peers on the same machine: llama.cpp's own benchmark program, run in the same command and put into the same receipt.

``llama-bench`` measures prompt processing (pp) and text generation (tg) and answers in JSON. What differs from our protocol
is named in the result, not hidden in a footnote: it draws its own random ids, and its generation begins with an empty cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from nanoqwen.bench.gguf import embedding_bytes
from nanoqwen.bench.protocol import Protocol, mbu

NAME = "llama.cpp"
TIMEOUT_S = 1800
DEVIATIONS = (
    "llama-bench draws its own random token ids; it cannot be given ours. In a dense model the ids do not change the work",
    "its generation starts from an empty cache, ours behind the prompt, so it reads less KV cache",
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
    """The command line: all layers on the GPU with flash attention, or none."""
    where = ["-ngl", "99", "-fa", "1"] if on_gpu else ["-ngl", "0"]
    return [
        tool.program, "-m", tool.gguf, "-p", str(protocol.prompt_tokens), "-n", str(protocol.gen_tokens), "-r", str(protocol.runs), *where, "-o", "json",
    ]  # fmt: skip


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
    embedding = embedding_bytes(tool.gguf)
    if embedding is None:
        results["mbu_note"] = "not given: the table of tensors in the GGUF file could not be read"
    else:  # a step reads one row of the embedding, and everything else
        results["bytes_per_token"] = results["file_bytes"] - embedding
        results["mbu"] = mbu(results["bytes_per_token"], results["itl_ms"], ceiling_gb_s)
    return results, samples


def parse(text: str, protocol: Protocol) -> tuple[dict, dict]:
    """(results, samples) from the JSON that ``llama-bench -o json`` writes. Raises Skipped for anything else."""
    try:
        rows = json.loads(text)
        prompt = next(r for r in rows if r["n_prompt"] == protocol.prompt_tokens and not r["n_gen"])
        generated = next(r for r in rows if r["n_gen"] == protocol.gen_tokens and not r["n_prompt"])
        prefill_ms = prompt["avg_ns"] / 1e6
        itl_ms = generated["avg_ns"] / 1e6 / protocol.gen_tokens
        results = {
            "model": generated["model_type"],
            "bits_per_weight": round(8 * generated["model_size"] / generated["model_n_params"], 3),
            "kv_type": _kv_type(generated),
            "build": f"{generated.get('build_number', '?')} ({generated.get('build_commit', '?')})",
            "backend": generated.get("backends") or generated.get("gpu_info") or "unknown",
            "gpu_layers": generated.get("n_gpu_layers"),
            "ttft_ms": round(prefill_ms, 4),
            "itl_ms": round(itl_ms, 4),
            "tokens_per_s": round(1e3 / itl_ms, 2),
            "mbu": None,
            "file_bytes": generated["model_size"],
            "deviations": list(DEVIATIONS),
        }
        return results, {"prompt": prompt, "generation": generated}
    except StopIteration:
        raise Skipped(f"llama-bench's answer has no pp{protocol.prompt_tokens} and tg{protocol.gen_tokens}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise Skipped(f"llama-bench's answer cannot be read ({type(error).__name__}: {error})") from None


def _kv_type(row: dict) -> str:
    keys, values = row["type_k"].upper(), row["type_v"].upper()
    names = {"F16": "FP16", "F32": "FP32"}
    return names.get(keys, keys) if keys == values else f"{names.get(keys, keys)} keys, {names.get(values, values)} values"
