"""``synthetic:NAME`` where a FILE is expected.

A small synthetic model becomes a real ``.nanoqwen`` file in the user's cache, which every engine opens. A large one is only
planned: header and tensor table are there, payloads are not, because a Hopper card makes those itself, bit for bit
the same (``nanoqwen.engines.synthetic``). The tokenizer is that of the shipped checkpoint; random weights say nothing with any.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanoqwen import __version__, cache
from nanoqwen.config import Dims
from nanoqwen.default_model import CHECKPOINT, cached_pack
from nanoqwen.errors import InputError
from nanoqwen.model import TensorSpec, pick_group, schema
from nanoqwen.packfile import PackFile, Progress
from nanoqwen.packwriter import PackWriter, plan
from nanoqwen.synthetic import recipe, stream_key, synthetic_dims, values, words

PREFIX = "synthetic:"
#: Above this many bytes no file is made: the numpy twin of the recipe is there to be read and compared, not to be fast.
LARGEST_FILE = 500_000_000
#: Values that are made at once: 32 MB of 64-bit hashes.
_BLOCK_VALUES = 1 << 22


def is_synthetic(file: object) -> bool:
    """Whether a FILE argument names a synthetic model."""
    return isinstance(file, str) and file.startswith(PREFIX)


def dims_of(file: str) -> Dims:
    """Dimensions of ``synthetic:NAME``. Raises InputError listing the names."""
    return synthetic_dims(file.removeprefix(PREFIX))


def planned(file: str) -> PackFile:
    """The file as it would be: header, table, tokenizer and metadata without payloads. ``path`` is the name itself."""
    dims = dims_of(file)
    tokenizer, meta = _text(file)
    header, entries, _ = plan(dims, meta["quantise"]["group"], schema(dims), meta, tokenizer, {})
    return PackFile(Path(file), None, header, {e.name: e for e in entries}, meta, tokenizer)


def is_planned(pack: PackFile) -> bool:
    """Whether ``pack`` is a plan: it has no payloads to read."""
    return is_synthetic(str(pack.path))


def is_small(file: str) -> bool:
    """Whether this model is made as a file."""
    return planned(file).header.file_bytes <= LARGEST_FILE


def too_large(file: str) -> str:
    """What a file of this model would take, and where the model runs without one, in one line."""
    pack = planned(file)
    weights = sum(e.rows * e.cols for e in pack.tensors.values())
    return (
        f"{file} would be a file of {pack.header.file_bytes / 1e9:.2f} GB, and {4 * weights / 1e9:.1f} GB of memory as FP32 on the CPU, so it is not "
        f"made here; a Hopper card makes it without a file (--engine graph or eager), and {PREFIX}demo runs on any machine"
    )


def ensure_synthetic_pack(file: str, *, seed: int = 0, notes: list[str] | None = None, progress: Progress | None = None) -> Path:
    """Path of a small synthetic model as a ``.nanoqwen`` file, written into the cache when it is not there yet.

    The name holds a hash of the recipe's sources. Raises InputError for an unknown name, for a model that is too large
    (``too_large``), and when no cache folder can be written.
    """
    notes = [] if notes is None else notes
    pack = planned(file)
    if pack.header.file_bytes > LARGEST_FILE:
        raise InputError(too_large(file))
    name = f"nanoqwen-synthetic-{file.removeprefix(PREFIX)}-{_digest(pack, seed)}.nanoqwen"
    if found := cached_pack(name, os.environ):
        return found
    path = cache.cache_folder(os.environ, notes) / name
    dims, group, done = pack.dims, pack.group_size, 0
    with PackWriter(path, dims, group, schema(dims), pack.meta, pack.tokenizer_bytes, {}) as out:
        for spec in schema(dims):
            for first, last in _row_blocks(spec):
                if spec.int4:
                    out.write_int4(spec.name, *int4_rows(spec, dims, group, first, last, seed))
                else:
                    out.write_fp16(spec.name, fp16_rows(spec, dims, first, last, seed))
                done += (last - first) * spec.cols
                if progress:
                    progress(done, sum(s.rows * s.cols for s in schema(dims)), spec.name)
    notes.append(f"made {file} as {path} ({pack.header.file_bytes:,} bytes); later runs reuse it")
    return path


def int4_rows(spec: TensorSpec, dims: Dims, group: int, first: int, last: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``first`` to ``last`` of a projection: words uint32 [rows, cols // 8], scales float16 [rows, cols // group]."""
    r, rows = recipe(spec, dims), last - first
    per_row, scales_a_row = spec.cols // 8, spec.cols // group
    codes = words(stream_key(seed, spec.name), first * per_row, rows * per_row)
    scales = values(stream_key(seed, spec.name + ".scales"), first * scales_a_row, rows * scales_a_row, r.size, r.centre)
    return codes.reshape(rows, per_row), scales.reshape(rows, scales_a_row)


def fp16_rows(spec: TensorSpec, dims: Dims, first: int, last: int, seed: int = 0) -> np.ndarray:
    """Rows ``first`` to ``last`` of an FP16 tensor, float16 [rows, cols]."""
    r = recipe(spec, dims)
    return values(stream_key(seed, spec.name), first * spec.cols, (last - first) * spec.cols, r.size, r.centre).reshape(last - first, spec.cols)


def _row_blocks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_VALUES // spec.cols)
    for first in range(0, spec.rows, step):
        yield first, min(first + step, spec.rows)


def _text(file: str) -> tuple[bytes, dict]:
    """The shipped tokenizer, and metadata that says what this is. Without end ids: random text has no end of its own."""
    dims, path = dims_of(file), CHECKPOINT / "tokenizer.json"
    try:
        tokenizer = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: the tokenizer of the embedded checkpoint is not in this installation") from None
    spec = json.loads(tokenizer)
    entries = 1 + max(*spec["model"]["vocab"].values(), *(t["id"] for t in spec["added_tokens"]))
    return tokenizer, {
        "producer": f"nanoqwen {__version__}",
        "source": {"name": file},
        "quantise": {"method": "synthetic", "group": pick_group(dims)},
        "notes": ["seeded random weights (nanoqwen/synthetic.py): the text means nothing, the bytes read are the real model's"],
        "stop_ids": [],
        "tokenizer_entries": entries,
        "added_tokens": [],
    }


def _digest(pack: PackFile, seed: int) -> str:
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256(f"{seed}:{pack.dims}:{json.dumps(pack.meta, sort_keys=True)}".encode())
    for path in (package / "synthetic.py", package / "synthetic_pack.py", package / "int4.py", package / "packwriter.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
