"""Chapter 07's kernels on the card: one INT4 GEMV in several arithmetics (kernels/lessons/gemv_*.cu), its weights and its exact result.

All paths read the runtime's own bundles through the runtime's own frame (kernels/common/stream_gemv.cuh); only what is done with a block
differs. ``Path``, ``PATHS`` and the constants of their launches can be had anywhere; ``Card`` needs a Hopper GPU, and CuPy is imported with it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.constants import BUNDLE, STREAM_MOST, TILE_ROWS, LaunchShape, Stream, constants_header, int4_block_bytes
from nanoqwen.int4 import SHIFTS
from nanoqwen.model import PROJECTIONS, block_schema
from nanoqwen.synthetic import recipe, stream_key

GROUP = 128
BUNDLE_BYTES = BUNDLE * int4_block_bytes(GROUP)
#: Weights that a lane multiplies in a bundle.
LANE_WEIGHTS = BUNDLE * TILE_ROWS * GROUP // 32
QUANTISE = "lesson_quantise"


@dataclass(frozen=True)
class Path:
    """One arithmetic. Kernels in ``source`` are called ``kernel`` and a shape; ``record`` bytes of x a group in shared memory; ``marker``
    the machine instruction that multiplies, by which the loop is found; ``prepared``: a kernel of its own quantises x first."""

    name: str
    label: str
    source: str
    record: int
    marker: str
    prepared: bool = False

    @property
    def kernel(self) -> str:
        return f"lesson_{self.name}"


PATHS = (
    Path("sign_extend", "sign extension, FP32", "lessons/gemv_sign_extend.cu", 4 * GROUP, "FFMA"),
    Path("prmt", "prmt, half2", "lessons/gemv_half2.cu", 2 * GROUP, "HFMA2"),
    Path("bias", "bias, half2", "lessons/gemv_half2.cu", 2 * GROUP, "HFMA2"),
    Path("tensor", "subnormal, tensor core", "lessons/gemv_tensor.cu", 2 * GROUP + 16, "HMMA"),
    Path("dp4a", "dp4a, quantised before", "lessons/gemv_dp4a.cu", GROUP + 16, "IDP", prepared=True),
    Path("dp4a_fused", "dp4a, quantised inside", "lessons/gemv_dp4a.cu", GROUP + 16, "IDP"),
    Path("digits", "two digits, tensor core", "lessons/gemv_digits.cu", 2 * GROUP + 16, "IMMA"),
)
SOURCES = tuple(dict.fromkeys(path.source for path in PATHS))
PIPES_SOURCE = "lessons/gemv_pipes.cu"
#: Kernel of gemv_pipes.cu -> (machine instruction, how many of them its loop holds).
PIPES = {
    "ffma": ("FFMA", 64), "hfma2": ("HFMA2", 64), "lop3": ("LOP3", 64), "shift": ("SHF", 64), "prmt": ("PRMT", 64), "i2f": ("I2FP", 64),
    "f16_to_f32": ("HADD2", 64), "imad": ("IMAD", 64), "dp4a": ("IDP", 64), "hmma": ("HMMA", 16), "imma": ("IMMA", 16),
}  # fmt: skip
#: Projection -> the shape that its kernels are named for.
SHAPE_OF = {"q": "q", "k": "k", "v": "k", "o": "q", "gate": "gate", "up": "gate", "down": "down"}
SHAPES = tuple(dict.fromkeys(SHAPE_OF.values()))


def shapes(dims: Dims) -> dict[str, tuple[int, int]]:
    """{"q": (rows, columns), ...}: the seven projections of a layer."""
    found = {spec.name.split(".")[-2]: spec.shape for spec in block_schema(dims, 0) if spec.int4}
    return {name.removesuffix("_proj"): found[name] for name in PROJECTIONS}


def matrix_bytes(rows: int, cols: int) -> int:
    """Bytes of codes and scales of one matrix."""
    return rows * cols // 2 + rows * cols // GROUP * 2


def stream(path: Path, dims: Dims, shape: LaunchShape, name: str) -> Stream:
    """How projection ``name`` is launched: the runtime's own arithmetic, with the path's records."""
    rows, cols = shapes(dims)[name]
    return shape.stream(rows, cols // GROUP, int4_block_bytes(GROUP), path.record, STREAM_MOST)


def header(dims: Dims, shape: LaunchShape) -> str:
    """``constants.cuh`` for the lessons: the runtime's, and stages, parts and shared bytes of every path and shape."""
    lines = []
    for path in PATHS:
        for name in SHAPES:
            launch, prefix = stream(path, dims, shape, name), f"{path.kernel}_{name}"
            lines.append(f"constexpr int {prefix}_stages = {launch.stages}, {prefix}_parts = {launch.parts}, {prefix}_shared = {launch.shared};")
    body = "\n".join(lines)
    return f"{constants_header(dims, GROUP, shape)}\nnamespace nanoqwen {{\nnamespace lesson {{\n\n{body}\n\n}}  // namespace lesson\n}}  // namespace nanoqwen\n"


class Card:
    """The kernels, loaded, and a stream. ``Card.matrix`` makes weights, ``Card.launches`` the launches of a path over them."""

    def __init__(self, dims: Dims, cache=None) -> None:
        import cupy

        from nanoqwen.cuda.launch import Kernels

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.cp, self.dims = cupy, dims
        self.sms, self.l2_bytes, self.device = properties["multiProcessorCount"], properties["l2CacheSize"], properties["name"].decode()
        self.shape = LaunchShape(self.sms)
        self.kernels = Kernels(header(dims, self.shape), cache, [*SOURCES, PIPES_SOURCE, "setup/synthetic.cu"])
        self.stream = cupy.cuda.Stream(non_blocking=True)
        assert load_settings().quant.group == GROUP

    def launch(self, name: str, grid: int, threads: int, args: list, shared: int = 0, overlap: bool = True):
        """A ``Launch`` whose integers are passed as C ints."""
        from nanoqwen.cuda.launch import Launch

        values = [ctypes.c_int(a) if isinstance(a, int) else a for a in args]
        return Launch(self.kernels, name, (grid,), threads, values, shared=shared, overlap=overlap)

    def weights(self, name: str, seed: int = 0):
        """(codes uint32 [rows, cols / 8], scales float16 [rows, cols / 128]) of projection ``name``, seeded as ``synthetic:7b`` is."""
        cp = self.cp
        spec = next(s for s in block_schema(self.dims, 0) if s.name.endswith(f".{name}_proj.weight"))
        r = recipe(spec, self.dims)
        codes = cp.zeros((spec.rows, spec.cols // 8), dtype=cp.uint32)
        scales = cp.zeros((spec.rows, spec.cols // GROUP), dtype=cp.float16)
        cp.cuda.Device().synchronize()  # a non-blocking stream does not wait for the zeros
        fills = (("fill_words", codes, "", ()), ("fill_values", scales, ".scales", (ctypes.c_float(r.size), ctypes.c_float(r.centre))))
        for kernel, out, suffix, more in fills:
            args = [out, ctypes.c_longlong(out.size), ctypes.c_uint64(stream_key(seed, spec.name + suffix)), *more]
            self.launch(kernel, 1024, 256, args, overlap=False)(self.stream)
        self.stream.synchronize()
        return codes, scales

    def bundles(self, codes, scales, copies: int = 1):
        """The matrix as the runtime keeps it, ``copies`` times one after the other: uint32 [copies, bundles, 1056]."""
        from nanoqwen.cuda.weights import tile_int4

        cp = self.cp
        one = tile_int4(codes, scales).bundles
        out = cp.empty((copies, *one.shape), dtype=cp.uint32)
        out[...] = one
        cp.cuda.Device().synchronize()
        return out

    def exact(self, codes, scales, x):
        """float64 [rows]: the product of the same four-bit weights, in FP64, a thousand rows at a time."""
        cp = self.cp
        out = cp.empty(len(codes), dtype=cp.float64)
        shifts, x64 = cp.asarray(SHIFTS, dtype=cp.uint32), x.astype(cp.float64)
        for first in range(0, len(codes), 1024):
            part = codes[first : first + 1024]
            nibbles = (part[:, :, None] >> shifts & 15).astype(cp.int8)
            weights = ((nibbles ^ 8) - 8).reshape(len(part), -1, GROUP) * scales[first : first + 1024, :, None].astype(cp.float64)
            out[first : first + 1024] = (weights.reshape(len(part), -1) * x64).sum(axis=1)
        return out

    def activations(self, cols: int, seed: int = 0):
        """float16 [cols], standard normal."""
        import numpy as np

        return self.cp.asarray(np.random.default_rng(seed).normal(0, 1, cols).astype(np.float16))

    def launches(self, path: Path, name: str, bundles, x, out, *, records=None, overlap: bool = True) -> list:
        """The launches of one product of projection ``name`` with ``x``: the GEMV, after its quantisation if the path has one.

        ``bundles`` uint32 [bundles, 1056]; ``out`` float32 [parts, rows] starts as zeros. ``overlap`` False: no kernel may begin before
        the one before it has ended.
        """
        plan, kernel = stream(path, self.dims, self.shape, name), f"{path.kernel}_{SHAPE_OF[name]}"
        self.kernels.allow_shared(kernel, plan.shared)
        found = [self.quantise(x, records, overlap)] if path.prepared else []
        source = records if path.prepared else x
        return [*found, self.launch(kernel, plan.grid, 32 * self.shape.gemv_warps, [bundles, source, out], plan.shared, overlap)]

    def resident(self, path: Path, bundles, x, out, count: int):
        """The launch of the loop without loads, on gate's weights: every warp multiplies ``count`` bundles. ``x``: records if the path has them
        prepared. ``out`` float32, one for each warp."""
        plan, kernel = stream(path, self.dims, self.shape, "gate"), f"{path.kernel}_resident"
        assert len(bundles) >= self.sms * self.shape.gemv_warps * plan.stages
        self.kernels.allow_shared(kernel, plan.shared)
        return self.launch(kernel, self.sms, 32 * self.shape.gemv_warps, [bundles, x, out, count], plan.shared, overlap=False)

    def quantise(self, x, records, overlap: bool = True):
        """The launch that dp4a needs first: x to INT8 records."""
        groups = x.size // GROUP
        return self.launch(QUANTISE, -(-groups // 4), 128, [x, records, groups], overlap=overlap)

    def records(self, cols: int):
        """Room for the INT8 records of ``cols`` activations."""
        return self.cp.zeros(cols // GROUP * (GROUP + 16), dtype=self.cp.uint8)

    def parts(self, name: str):
        """float32 [parts, rows] of zeros for projection ``name``; the same for every path."""
        return self.cp.zeros((stream(PATHS[0], self.dims, self.shape, name).parts, shapes(self.dims)[name][0]), dtype=self.cp.float32)

    def product(self, path: Path, name: str, bundles, x):
        """float32 [rows]: one product, run and waited for."""
        out, records = self.parts(name), self.records(x.size)
        self.cp.cuda.Device().synchronize()
        for launch in self.launches(path, name, bundles, x, out, records=records):
            launch(self.stream)
        self.stream.synchronize()
        return out.sum(axis=0)
