"""PyTorch on the same card: its own INT4 kernel and ``torch.compile``, run in the same command and put into the same receipt.

What is measured is the decoder of ``torch_decoder.py``, of the dimensions of the model beside it, by the same protocol. Before anything is
timed it is shown to compute the right thing, in two steps: eagerly at small dimensions against a dense FP32 evaluation of the same weights,
and at full size the compiled step against the eager one. ``torch`` is imported where it is used, so this file can be imported anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoqwen import model
from nanoqwen.bench.peers import Skipped
from nanoqwen.bench.protocol import Protocol, mbu, prompt_ids, spread
from nanoqwen.config import Dims

if TYPE_CHECKING:
    import torch

    from nanoqwen.bench.torch_decoder import Decoder

NAME = "torch"
#: The files of the repository that a receipt with this peer rests on, beside those of its mode.
SOURCES = ("nanoqwen/bench/peer_torch.py", "nanoqwen/bench/torch_decoder.py")
#: What torch.compile is asked for: the settings of its mode "reduce-overhead", a CUDA graph, and the tuning of each generated kernel, which
#: also makes a generated kernel of the output head's product with one vector.
OPTIONS = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
OLDEST = (8, 0)  # compute capability: BF16 tensor cores
#: Largest relative error (of the norm of a row of logits) that BF16 activations may cause: 2 layers against FP32, all layers against another
#: order of rounding. Measured: 0.006 for 2 layers and 0.017 for 28. Empty slots of the cache
#: that are seen give 0.08, missing angles or another head 0.28 and more, codes in another order 1.
LIMIT_SMALL, LIMIT_FULL = 0.03, 0.1
COMPILE_STEPS = 3  # the first compiles and runs, the second records the graph, the third replays it
SINGLE_STEPS = 16
DEVIATIONS = (
    "BF16 activations and a BF16 cache, because the kernel takes no FP16; ours are FP16",
    "asymmetric INT4: a BF16 scale and a BF16 zero point a group, where ours has an FP16 scale alone; more bytes a token",
    "the output head and the embedding are BF16, as large as ours",
    "a static cache of the run's own length, in which a step also reads the slots that are still empty; ours grows by pages to the model's context",
    "random weights of the same shapes and of its own, so its ids are not ours",
    "the prompt runs eagerly, through the same INT4 kernel, which is made for few rows; the time to the first token tells little about PyTorch",
    "all steps are enqueued without waiting for an id, and the ids are read once at the end; ours arrive one by one",
)


def find(asked: bool, engines: Sequence[str], device: str | None, dims: Dims, group: int) -> str | None:
    """The device to measure on, None when the peer was not asked for. Raises Skipped naming what is missing."""
    if not asked:
        return None
    if set(engines) == {"cpu"} or device == "cpu":
        raise Skipped("PyTorch's INT4 decoder is measured on an NVIDIA GPU, beside an engine that runs there; give --engine graph, eager or reference")
    import torch

    from nanoqwen.bench.torch_decoder import refused

    where = device or "cuda"
    if not torch.cuda.is_available():
        raise Skipped(f"PyTorch {torch.__version__} sees no NVIDIA GPU, and its INT4 decoder is measured on one")
    if torch.cuda.get_device_capability(where) < OLDEST:
        raise Skipped(f"{torch.cuda.get_device_name(where)} has no BF16 tensor cores, which PyTorch's INT4 kernel uses")
    if missing := [op for op in ("_convert_weight_to_int4pack", "_weight_int4pack_mm") if not hasattr(torch.ops.aten, op)]:
        raise Skipped(f"PyTorch {torch.__version__} has no {missing[0]}; use 2.5 or newer")
    if reason := refused(dims, group):
        raise Skipped(f"PyTorch: {reason}")
    return where


def run(dims: Dims, group: int, protocol: Protocol, device: str, ceiling_gb_s: float | None, options: dict | None = None) -> tuple[dict, dict]:
    """(results, samples) of the peer on ``device``, the step compiled with ``options`` (default: ``OPTIONS``). Raises Skipped when anything in
    PyTorch fails or the decoder does not compute what it should."""
    import torch

    try:
        with torch.no_grad():
            return _run(dims, group, protocol, torch.device(device), ceiling_gb_s, OPTIONS if options is None else options)
    except Skipped:
        raise
    except Exception as error:  # a compiler, a driver or the memory; the rest of the run has been measured and is worth keeping
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise Skipped(f"PyTorch {torch.__version__}: {type(error).__name__}: {first}") from error


def _run(dims: Dims, group: int, protocol: Protocol, device: torch.device, ceiling_gb_s: float | None, options: dict) -> tuple[dict, dict]:
    import torch

    from nanoqwen.bench.torch_decoder import Decoder, Weights

    small = disagreement(small_dims(dims, group), group, device)
    _must(small, LIMIT_SMALL, "its INT4 decoder at small dimensions and a dense evaluation of the same weights")
    slots = -(-(protocol.prompt_tokens + protocol.gen_tokens) // 8) * 8
    started = time.perf_counter()
    decoder = Decoder(Weights(dims, group, device), slots)
    prompt = prompt_ids(dims.vocab, protocol.prompt_tokens, protocol.seed)
    eager = _eager_step(decoder, prompt)
    build_s = time.perf_counter() - started

    step = torch.compile(decoder.step, fullgraph=True, options=options)
    decoder.prefill(_tensor(prompt, device))
    _wait(device)
    started = time.perf_counter()
    compiled = step().clone()
    for _ in range(COMPILE_STEPS - 1):
        step()
    _wait(device)
    compile_s = time.perf_counter() - started
    full = _error(compiled, eager)
    _must(full, LIMIT_FULL, "its compiled decode step and the eager one")

    runs = [one_run(decoder, step, prompt, protocol.gen_tokens) for _ in range(protocol.warmup + protocol.runs)][protocol.warmup :]
    ttft, itl = spread([r["ttft_ms"] for r in runs]), spread([r["itl_ms"] for r in runs])
    in_graph = bool(options.get("triton.cudagraphs")) and device.type == "cuda" and not _graphs_skipped()
    nbytes = decoder.bytes_of_weights() + model.kv_bytes_per_token(dims) * protocol.middle
    results = {
        "description": "PyTorch INT4 (tinygemm), BF16 activations, static cache; the step compiled "
        + ("into one CUDA graph" if in_graph else "without a CUDA graph") + ", the prompt eager",
        "model": f"qwen2, {dims.num_layers} layers, INT4 group {group} with zero points",
        "bits_per_weight": round(8 * decoder.stored_bytes() / sum(s.rows * s.cols for s in model.schema(dims)), 3),
        "kv_type": "BF16",
        "build": torch.__version__,
        "versions": _versions(),
        "backend": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "compile": {"fullgraph": True, **options},
        "cuda_graph": in_graph,
        "depth": protocol.prompt_tokens,
        "ttft_ms": ttft["median"],
        "itl_ms": itl["median"],
        "tokens_per_s": round(1e3 / itl["median"], 2),
        "mbu": mbu(nbytes, itl["median"], ceiling_gb_s),
        "bytes_per_token": nbytes,
        "itl_unchained_ms": _one_by_one(decoder, step, prompt, min(SINGLE_STEPS, protocol.gen_tokens - 1)),
        "spread": {"ttft_ms": ttft, "itl_ms": itl},
        "same_ids_in_every_run": all(r["ids"] == runs[0]["ids"] for r in runs),
        "setup": {"build_s": round(build_s, 2), "compile_s": round(compile_s, 2)},
        "check": {"small_against_dense": round(small, 5), "compiled_against_eager": round(full, 5)},
        "deviations": list(DEVIATIONS),
    }  # fmt: skip
    return results, {"runs": [{"ttft_ms": round(r["ttft_ms"], 4), "itl_ms": round(r["itl_ms"], 4)} for r in runs]}


def one_run(decoder: Decoder, step: Callable, prompt: list[int], gen_tokens: int) -> dict:
    """Prefill ``prompt`` and generate ``gen_tokens`` tokens; wall clock: {"ttft_ms", "itl_ms", "ids"}."""
    clock, device = time.perf_counter, decoder.position.device
    _wait(device)
    started = clock()
    decoder.prefill(_tensor(prompt, device))
    int(decoder.ids[len(prompt)])  # the host has the first id
    first = clock()
    for _ in range(gen_tokens - 1):
        step()
    ids = decoder.ids[len(prompt) : len(prompt) + gen_tokens].tolist()
    ended = clock()
    return {"ttft_ms": (first - started) * 1e3, "itl_ms": (ended - first) * 1e3 / (gen_tokens - 1), "ids": ids}


# ------------------------------------------------------------------------------------------------------------- right


def small_dims(dims: Dims, group: int) -> Dims:
    """Two layers that keep the heads of ``dims``, few enough of everything else to be evaluated densely in no time."""
    heads = 4 * dims.gqa_ratio  # 4 heads of 64 or 128 are a multiple of every group
    return replace(dims, num_layers=2, hidden=4 * group, intermediate=8 * group, num_heads=heads, num_kv_heads=4, vocab=1024, max_position=64)


def disagreement(dims: Dims, group: int, device: str | torch.device, prompt_tokens: int = 21, steps: int = 6) -> float:
    """Largest relative error of the decoder's logits, behind a prompt and at each step after it, against ``ReferenceModel`` in FP32 with the
    same weights dequantised, on the same ids. Eager, on ``device``."""
    import torch

    from nanoqwen.bench.torch_decoder import Decoder, Weights
    from nanoqwen.reference import ReferenceModel

    with torch.no_grad():
        weights = Weights(dims, group, device)
        decoder = Decoder(weights, prompt_tokens + steps + 1)
        found = [decoder.prefill(_tensor(prompt_ids(dims.vocab, prompt_tokens), weights.device)), *(decoder.step() for _ in range(steps))]
        ids = decoder.ids[: prompt_tokens + steps]
    dense = ReferenceModel(weights.dense(), kv_dtype=torch.float32).forward(ids, 0)
    return _error(torch.cat(found), dense[prompt_tokens - 1 :])


def _eager_step(decoder: Decoder, prompt: list[int]) -> torch.Tensor:
    decoder.prefill(_tensor(prompt, decoder.position.device))
    return decoder.step()


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm, of the worst row; NaN when either has one."""
    return float(((found.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1)).max())


def _must(error: float, limit: float, what: str) -> None:
    if not error < limit:  # NaN too
        raise Skipped(f"PyTorch: {what} differ by {error:.3g} of the logits (limit {limit}), so its speed means nothing")


# ------------------------------------------------------------------------------------------------------------- parts


def _one_by_one(decoder: Decoder, step: Callable, prompt: list[int], steps: int) -> float:
    """Median milliseconds of a step when the host waits for each id."""
    import statistics

    decoder.prefill(_tensor(prompt, decoder.position.device))
    times = []
    for at in range(len(prompt), len(prompt) + steps):
        int(decoder.ids[at])
        before = time.perf_counter()
        step()
        int(decoder.ids[at + 1])
        times.append((time.perf_counter() - before) * 1e3)
    return round(statistics.median(times), 4)


def _graphs_skipped() -> bool:
    """Whether PyTorch said that it left a CUDA graph out; it does so without an error."""
    from torch._dynamo.utils import counters

    return bool(counters["inductor"]["cudagraph_skips"])


def _versions() -> dict[str, str]:
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return {name: value for name, value in found.items() if value}


def _tensor(ids: list[int], device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(ids, dtype=torch.int64, device=device)


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
