"""Numbers that prose needs, computed where the package computes them: a page names a fact, it does not type it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from nanoqwen.book.receipts import available, receipt
from nanoqwen.book.source import book_root
from nanoqwen.book.sizes import sizes
from nanoqwen.config import Dims, load_settings
from nanoqwen.engines import HOPPER
from nanoqwen.errors import InputError
from nanoqwen.kv import page_bytes
from nanoqwen.model import bytes_per_token, flops_per_token, kv_bytes_per_token


@lru_cache(maxsize=1)
def quoted() -> dict[str, Any]:
    """``book/quoted.yml``: what others reported, with its source."""
    import yaml

    return yaml.safe_load((book_root() / "book" / "quoted.yml").read_text(encoding="utf-8"))


def limit_ms(total_bytes: int, gb_per_s: float) -> float:
    """Milliseconds that ``total_bytes`` take at ``gb_per_s`` (10**9 bytes a second): no step can be faster."""
    return total_bytes / (gb_per_s * 1e9) * 1e3


@lru_cache(maxsize=1)
def facts() -> dict[str, str]:
    """Name -> text of every fact that the role ``{fact}`` knows. Bytes are decimal (GB = 10**9) unless the text says KiB."""
    settings, dims = load_settings(), Dims.qwen2_5_coder_7b()
    empty = bytes_per_token(dims, settings.quant.group, 0)
    bench = settings.benchmark
    context = bench.prompt_tokens
    full = bytes_per_token(dims, settings.quant.group, context)
    bandwidth = quoted()["bandwidth_gb_s"]
    graph_ms = next(row["ms_per_token"] for row in quoted()["articles"]["rows"] if row["engine"] == "graph")
    return {
        "layers": str(dims.num_layers),
        "hidden": str(dims.hidden),
        "mlp": str(dims.intermediate),
        "query-heads": str(dims.num_heads),
        "kv-heads": str(dims.num_kv_heads),
        "head-dim": str(dims.head_dim),
        "vocab": f"{dims.vocab:,}",
        "group": str(settings.quant.group),
        "page-tokens": str(settings.kv.page_tokens),
        "page-kib": f"{page_bytes(dims, settings.kv) // 1024}",
        "kv-kib-per-token": f"{kv_bytes_per_token(dims) // 1024}",
        "gb-per-token": f"{empty['total'] / 1e9:.2f}",
        "gb-int4": f"{empty['int4'] / 1e9:.2f}",
        "gb-scales": f"{empty['scales'] / 1e9:.2f}",
        "gb-lm-head": f"{empty['lm_head'] / 1e9:.2f}",
        "gflop-per-token": f"{flops_per_token(dims, context) / 1e9:.0f}",
        "bench-prompt": str(bench.prompt_tokens),
        "bench-gen": str(bench.gen_tokens),
        "bench-warmup": str(bench.warmup),
        "h100-gb-s": f"{bandwidth['H100 SXM']:,}",
        "h200-gb-s": f"{bandwidth['H200']:,}",
        "mb-cache-bench": f"{full['kv'] / 1e6:.0f}",
        "limit-ms-h100": f"{limit_ms(full['total'], bandwidth['H100 SXM']):.2f}",
        "limit-ms-h200": f"{limit_ms(full['total'], bandwidth['H200']):.2f}",
        "article-gb-s": f"{empty['total'] / 1e6 / graph_ms:.0f}",
        "article-share": f"{100 * empty['total'] / 1e6 / graph_ms / bandwidth['H100 SXM']:.0f}",
        "graph-prompts": str(settings.ladder.graph_prompts),
        "graph-match": f"{settings.ladder.graph_min_token_match * 100:g}",
        **_articles(),
        **sizes(),
        **_measured(),
    }


def _articles() -> dict[str, str]:
    """What the articles report, and the pinned peer."""
    rows = {row["engine"]: row for row in quoted()["articles"]["rows"]}
    peer, gguf = quoted()["llama_cpp"], quoted()["gguf"]
    return {
        **{f"article-{engine}-ms": f"{row['ms_per_token']:g}" for engine, row in rows.items()},
        **{f"article-{engine}-ttft-ms": f"{row['ttft_ms']:g}" for engine, row in rows.items() if "ttft_ms" in row},
        "llama-build": peer["build"], "llama-source": peer["source_package"], "gguf-gb": f"{gguf['gb']:g}",
    }  # fmt: skip


def _measured() -> dict[str, str]:
    """Facts of the end-to-end receipt, if there is one of a Hopper card."""
    if "e2e" not in available():
        return {}
    made = receipt("e2e")
    fastest = min((found for name, found in made.results["engines"].items() if name in HOPPER), key=lambda found: found["itl_ms"], default=None)
    if fastest is None:
        return {}
    return {"measured-device": made.device, "measured-ms": f"{fastest['itl_ms']:.2f}", "measured-share": f"{100 * fastest['mbu']:.0f}"}


def fact(name: str) -> str:
    """The text of one fact. Raises InputError for a name that is none."""
    try:
        return facts()[name]
    except KeyError:
        raise InputError(f"no fact is called {name!r}; there are: {', '.join(facts())}") from None
