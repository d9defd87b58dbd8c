"""The one source of constants, as frozen dataclasses.

``config/nanoqwen.yaml`` holds every constant once. ``load_settings()`` turns it into ``Settings``; the
dimensions of a model (``Dims``) come from there for the 7B, from a checkpoint's ``config.json`` when a
checkpoint is packed, and from the header of a ``.nanoqwen`` file when one is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nanoqwen.errors import InputError

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Dims:
    """Dimensions of a Qwen2 decoder.

    ``hidden`` is the width of the residual stream, ``intermediate`` of the MLP; ``num_heads`` query heads
    share ``num_kv_heads`` key/value heads of ``head_dim`` each (GQA); ``vocab`` counts embedding rows,
    which may exceed the tokenizer's entries; ``tied`` says that the output head is the embedding matrix.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    rope_theta: float = 1_000_000.0
    rms_eps: float = 1e-6
    tied: bool = False

    @property
    def q_size(self) -> int:
        """Width of the concatenated query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one key/value head (7 for the 7B)."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def qwen2_5_coder_7b(cls) -> Dims:
        """The model of the book, from ``config/nanoqwen.yaml``."""
        return load_settings().models["qwen2.5-coder-7b"]

    def problems(self) -> list[str]:
        """Why these dimensions cannot be a Qwen2 decoder; empty when they can."""
        found = []
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab", "max_position"):
            if getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not found and self.num_heads % self.num_kv_heads:
            found.append(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if not found and self.head_dim % 2:
            found.append(f"head_dim is {self.head_dim}, RoPE needs an even number")
        if not 0 < self.rope_theta < float("inf"):
            found.append(f"rope_theta is {self.rope_theta}, it must be positive and finite")
        if not 0 <= self.rms_eps < 1:
            found.append(f"rms_eps is {self.rms_eps}, it must be in [0, 1)")
        return found


@dataclass(frozen=True)
class FormatSpec:
    """Fixed sizes and tags of the ``.nanoqwen`` format, in bytes."""

    magic: bytes
    version: int
    header_bytes: int
    entry_bytes: int
    name_bytes: int
    align_bytes: int
    storage_fp16: int
    storage_int4: int


@dataclass(frozen=True)
class QuantSpec:
    """Symmetric group-wise INT4: code range, group sizes, and where each nibble sits in its word."""

    bits: int
    code_min: int
    code_max: int
    group: int
    allowed_groups: tuple[int, ...]
    layout_id: int
    shuffle_bits: tuple[int, ...]


@dataclass(frozen=True)
class KVSpec:
    """The paged KV cache: tokens a page, bytes a value, required multiple of a page's bytes."""

    page_tokens: int
    value_bytes: int
    page_align_bytes: int


@dataclass(frozen=True)
class LadderSpec:
    """Thresholds of the validation ladder."""

    tiers: tuple[str, ...]
    unit_max_rel_error: float
    layer_max_rel_error: float
    graph_min_token_match: float
    graph_prompts: int
    graph_tokens: int
    edge_lengths: tuple[int, ...]


@dataclass(frozen=True)
class BenchmarkSpec:
    """The end-to-end protocol; lengths in tokens."""

    name: str
    batch: int
    prompt_tokens: int
    gen_tokens: int
    warmup: int
    greedy: bool
    lock_clocks: bool


@dataclass(frozen=True)
class Settings:
    """All of ``config/nanoqwen.yaml``."""

    format: FormatSpec
    quant: QuantSpec
    kv: KVSpec
    models: dict[str, Dims]
    ladder: LadderSpec
    benchmark: BenchmarkSpec


def repo_root() -> Path | None:
    """The clone this package runs from, or None when it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "config" / "nanoqwen.yaml").is_file() and (root / "pyproject.toml").is_file() else None


def data_path(kind: str, *parts: str) -> Path:
    """Path of a file that lives beside the package in the clone and inside it in a wheel.

    ``kind`` is ``"config"`` or ``"kernels"``. Raises InputError when the installation lacks the file.
    """
    root = repo_root()
    base = root / kind if root else _PACKAGE / "_data" / kind
    path = base.joinpath(*parts)
    if not path.exists():
        raise InputError(f"{path} is missing: the installation of nanoqwen is incomplete, install it again")
    return path


def _build(cls: type, section: str, values: dict, **fixed: object) -> object:
    """``cls(**values)`` with lists made tuples; a missing or unknown key is named."""
    wanted = set(cls.__dataclass_fields__)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()} | fixed
    if missing := sorted(wanted - set(given)):
        raise InputError(f"config/nanoqwen.yaml: section {section} lacks {', '.join(missing)}")
    if unknown := sorted(set(given) - wanted):
        raise InputError(f"config/nanoqwen.yaml: section {section} has unknown key {', '.join(unknown)}")
    return cls(**given)


@lru_cache(maxsize=1)
def load_settings() -> Settings:
    """Read and check ``config/nanoqwen.yaml`` (once a process).

    Raises InputError naming the section and key when one is missing or unknown.
    """
    import yaml

    raw = yaml.safe_load(data_path("config", "nanoqwen.yaml").read_text(encoding="utf-8"))
    fmt = raw["format"]
    return Settings(
        format=_build(FormatSpec, "format", fmt, magic=fmt["magic"].encode("ascii")),
        quant=_build(QuantSpec, "quant", raw["quant"]),
        kv=_build(KVSpec, "kv", raw["kv"]),
        models={name: _build(Dims, f"models.{name}", dims) for name, dims in raw["models"].items()},
        ladder=_build(LadderSpec, "ladder", raw["ladder"]),
        benchmark=_build(BenchmarkSpec, "benchmark", raw["benchmark"]),
    )
