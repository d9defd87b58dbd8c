"""Checkpoint in, ``.nanoqwen`` out: read a block of rows, quantise it, write it, forget it.

Peak memory does not depend on the checkpoint: a few blocks of about half a million weights are in flight at any time, whatever
the model's size. Worker threads read and convert (numpy releases the interpreter lock); this thread collects their blocks
in order and hands them to the writer, so the bytes do not depend on the number of threads, on how the checkpoint was
sharded, or on where it lies.

    Checkpoint.read_rows --> int4 or int4_search | FP16 --> PackWriter --> OUT (written beside, then renamed)
        BF16 rows              in worker threads               in order
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanoqwen import __version__
from nanoqwen.checkpoint import BLOCK_VALUES, Checkpoint, open_checkpoint
from nanoqwen.checkpoint.safetensors_io import to_float32
from nanoqwen.config import load_settings
from nanoqwen.errors import InputError
from nanoqwen.int4 import FP16_MAX
from nanoqwen.int4_search import packer
from nanoqwen.model import TensorSpec, pick_group
from nanoqwen.packwriter import PackWriter, check_target

Progress = Callable[[int, int, str], None]

#: More threads than this no longer help: the one thread that writes becomes the limit.
MAX_THREADS = 8
#: Blocks in flight a thread: one being converted, one done and waiting for its turn.
BLOCKS_A_THREAD = 2


@dataclass(frozen=True)
class PackReport:
    """What ``pack`` did: the file, its bytes, the bytes of weights that were read, seconds, group size, and the notes."""

    path: Path
    bytes: int
    source_bytes: int
    seconds: float
    group: int
    notes: list[str]


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one tensor, ready to write. ``words`` and ``scales`` of an INT4 tensor, or FP16 ``values``."""

    spec: TensorSpec
    source_bytes: int
    words: np.ndarray | None = None
    scales: np.ndarray | None = None
    values: np.ndarray | None = None


def pack(
    source: str | Path,
    out: str | Path,
    *,
    group: int | None = None,
    method: str = "absmax",
    progress: Progress | None = None,
    threads: int | None = None,
) -> PackReport:
    """Quantise and pack the checkpoint at ``source`` (folder, index or hub name) into the file ``out``.

    ``group`` is the number of weights a scale; left out, the first allowed size that divides every input dimension.
    ``method`` chooses the scales: "absmax", or "mse", which searches them (``int4_search``).
    ``progress`` is called as (bytes read, bytes in all, tensor name). An existing ``out`` is replaced at the very end, and is
    untouched by any failure.

    Raises InputError, one line, for everything that can be wrong with source or target: see ``open_checkpoint``, ``PackWriter``,
    and here for weights that are NaN, infinite, or too large (named by tensor and index).
    """
    started = time.perf_counter()
    out = Path(out).expanduser()
    check_target(out)  # before a download starts
    packer(method)  # likewise: an unknown method is refused
    _keep_freed_memory()
    notes: list[str] = []
    with open_checkpoint(source, notes=notes) as checkpoint:
        _refuse_own_input(out, checkpoint)
        chosen = _choose_group(checkpoint, group, notes)
        dtypes = {spec.name: checkpoint.source_dtype(spec.name) for spec in checkpoint.specs}
        meta = metadata(checkpoint, chosen, method)
        with PackWriter(out, checkpoint.dims, chosen, checkpoint.specs, meta, checkpoint.tokenizer_bytes, dtypes) as writer:
            done, total = 0, checkpoint.stored_bytes
            with closing(blocks(checkpoint, chosen, threads or default_threads(), method)) as stream:
                for block in stream:
                    if block.spec.int4:
                        writer.write_int4(block.spec.name, block.words, block.scales)
                    else:
                        writer.write_fp16(block.spec.name, block.values)
                    done += block.source_bytes
                    if progress:
                        progress(done, total, block.spec.name)
    return PackReport(out, writer.header.file_bytes, total, time.perf_counter() - started, chosen, notes)


def default_threads() -> int:
    """Worker threads: the processors this process may use, up to MAX_THREADS."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_THREADS)


# [metadata]
def metadata(checkpoint: Checkpoint, group: int, method: str = "absmax") -> dict:
    """The JSON section of a pack file. No dates and no paths: the same checkpoint gives the same bytes wherever it lies.

    The name of the source is therefore known only when the checkpoint was given by its hub name.
    """
    text = checkpoint.text
    return {
        "producer": f"nanoqwen {__version__}",
        "source": {
            "name": checkpoint.hub_name,
            "revision": checkpoint.revision,
            "architecture": checkpoint.architecture,
            "torch_dtype": checkpoint.torch_dtype,
        },
        "quantise": {"method": method, "group": group},
        "defaults": checkpoint.defaults,
        "notes": list(checkpoint.notes),
        "generation": text.generation,
        "stop_ids": text.stop_ids,
        "chat_template": text.chat_template,
        "chat_template_from": text.chat_template_from,
        "tokenizer_entries": text.entries,
        "added_tokens": text.added_tokens,
        **text.named_tokens,
    }
# [/metadata]


# [blocks]
def blocks(checkpoint: Checkpoint, group: int, threads: int, method: str = "absmax") -> Iterator[Block]:
    """Every tensor in file order, as converted blocks of rows. At most ``threads * BLOCKS_A_THREAD`` are in memory."""
    waiting: deque[Future[Block]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
    try:
        for spec, first, last in row_ranges(checkpoint.specs):
            waiting.append(pool.submit(convert, checkpoint, spec, first, last, group, method))
            if len(waiting) == threads * BLOCKS_A_THREAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
# [/blocks]


def row_ranges(specs: list[TensorSpec]) -> Iterator[tuple[TensorSpec, int, int]]:
    """(tensor, first row, last row exclusive), each about BLOCK_VALUES values; a vector is one range of its length."""
    for spec in specs:
        total = spec.shape[0]
        rows = max(1, BLOCK_VALUES // spec.cols) if len(spec.shape) == 2 else total
        for first in range(0, total, rows):
            yield spec, first, min(first + rows, total)


def convert(checkpoint: Checkpoint, spec: TensorSpec, first: int, last: int, group: int, method: str = "absmax") -> Block:
    """Read rows ``first`` to ``last`` of one tensor and bring them into the form in which the file stores them."""
    stored = checkpoint.read_stored(spec.name, first, last)
    weights = to_float32(stored, checkpoint.source_dtype(spec.name))
    if spec.int4:
        words, scales = packer(method)(weights, group, spec.name, first)
        return Block(spec, stored.nbytes, words=words, scales=scales)
    return Block(spec, stored.nbytes, values=to_fp16(weights, spec.name, first))


def to_fp16(values: np.ndarray, name: str, first_row: int = 0) -> np.ndarray:
    """float32 [rows, cols] or [n] -> float16 of the same shape, rounded to nearest even.

    Raises InputError with the index and the value for NaN, infinity, and magnitudes that FP16 cannot hold.
    """
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(half))[0])
        value = float(values[index])
        at = list(index) if values.ndim == 1 else [index[0] + first_row, index[1]]
        if not np.isfinite(value):
            raise InputError(f"{name}: value at {at} is {value}; the checkpoint is damaged, download it again")
        raise InputError(
            f"{name}: value at {at} is {value:.6g}, beyond the largest FP16 number {FP16_MAX:g}; this tensor is stored as FP16, "
            "so the checkpoint cannot be packed"
        )
    return half


def _keep_freed_memory() -> None:
    """Let the C library reuse the memory of one block for the next, rather than return it to the system and ask again.

    glibc gives large blocks back at once, and the system clears every page it hands out anew: 400,000 page faults a gigabyte,
    a third of the processor's time. It stops doing so for sizes up to the largest block it has seen freed (`mallopt`,
    "dynamic mmap threshold", at most 32 MiB); this block is never touched, so it costs no memory itself.
    """
    np.empty(31 << 20, np.uint8)  # freed as soon as it is made


def _refuse_own_input(out: Path, checkpoint: Checkpoint) -> None:
    """The output must not replace a file of the checkpoint itself."""
    if out.exists() and any(out.samefile(path) for path in checkpoint.folder.iterdir() if path.is_file()):
        if not _is_pack(out):
            raise InputError(f"{out}: is a file of the checkpoint; choose another name for the output")


def _is_pack(path: Path) -> bool:
    magic = load_settings().format.magic
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


def _choose_group(checkpoint: Checkpoint, requested: int | None, notes: list[str]) -> int:
    chosen, usual = pick_group(checkpoint.dims, requested), load_settings().quant.group
    if requested is None and chosen != usual:
        odd = next(spec for spec in checkpoint.specs if spec.int4 and spec.cols % usual)
        notes.append(f"group size {chosen} in place of {usual}: {odd.name} has an input dimension of {odd.cols}")
    return chosen
