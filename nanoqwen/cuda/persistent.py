"""The persistent kernel on a card: its binary, its buffers, and launches of it.

Beside the weights and the pages it needs a few hundred kilobytes of its own, through which its CTAs exchange what they have computed. They are
zero at first and belong to the kernel from then on: a launch goes on where the one before it ended. So two kernels of one model need
two sets, and no two launches of one set may run at once, which one stream takes care of.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import cupy
import numpy as np
from cuda.bindings import driver

from nanoqwen.cuda.constants import LaunchShape
from nanoqwen.cuda.decode import DecodeBuffers
from nanoqwen.cuda.launch import Launch, check, load_now
from nanoqwen.cuda.persistent_plan import POINTERS, SPLIT_PAGES, SPLITS, compile_persistent
from nanoqwen.cuda.weights import DeviceModel
from nanoqwen.errors import DeviceError

#: What ``persistent_sizes`` tells, in its order.
SIZES = (
    "words", "counts", "args", "shared", "units", "ctas", "threads", "events", "splits", "own", "qkv_at", "vector_at", "o_at", "inner_at", "down_at",
    "qkv_parts", "o_parts", "down_parts",
)  # fmt: skip
#: Words of the watchdog's message, and where each warp's own begin (``wait_watched`` in kernels/persistent/exchange.cuh).
ERROR_WORDS, WHERE_AT = 64, 8
#: What the publisher waited for, by its code; and what another warp waits for, by the upper byte of its word (``WaitCode``).
CODES = {
    110: "its own CTA", 111: "a row tile of its own CTA", 121: "attention's result of another CTA", 122: "another CTA's part of o",
    123: "another CTA's part of the inner vector", 124: "another CTA's part of down", 125: "the end of the token",
}  # fmt: skip
WAITS = {0: "nothing yet", 1: "its publisher", 2: "a unit of the ring", 3: "a tile buffer", 4: "words of other CTAs", 5: "its neighbours", 6: "an empty buffer", 7: "a copy", 8: "the next token"}


class Args(ctypes.Structure):
    """``Args`` of kernels/persistent/exchange.cuh, which is passed by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "final_norm", "head", "rope", "allowed", "step", "told", "block_table", "pool")),
        *((name, ctypes.c_int) for name in ("pool_pages", "split_pages", "splits", "tokens", "chooses")),
        *((name, ctypes.c_void_p) for name in ("words", "counts", "serial", "candidates", "logits", "error", "stamps")),
    ]


class PersistentKernel:
    """The kernel for one model on one card. ``size`` has what the kernel says of itself (``SIZES``), ``use`` its registers.

    ``settings`` are overrides of ``persistent_plan.SETTINGS``. Raises DeviceError, in one line that names the graph engine, for a model that
    the kernel does not take and for a card that cannot hold all its CTAs at once. ``allow_spill``: also a build whose registers do not suffice,
    for a diagnosis; its results are not to be trusted.
    """

    def __init__(
        self, weights: DeviceModel, shape: LaunchShape, cache: Path | None, settings: dict[str, int | bool] | None = None, *, allow_spill: bool = False
    ) -> None:
        dims = weights.dims
        binary = compile_persistent(dims, weights.group, shape, cache, settings, allow_spill=allow_spill)
        self.use = binary.kernels["persistent"]
        cupy.cuda.runtime.free(0)  # creates CuPy's context, the one that the driver calls below then use
        image = np.frombuffer(binary.cubin, dtype=np.uint8)
        self._module = check(driver.cuModuleLoadData(image.ctypes.data))
        self._functions = {name: check(driver.cuModuleGetFunction(self._module, name.encode("ascii"))) for name in ("persistent", "persistent_sizes")}
        for function in self._functions.values():
            load_now(function)
        self.size = self._sizes()
        if self.size["args"] != ctypes.sizeof(Args):
            raise DeviceError(f"the persistent kernel takes {self.size['args']} bytes of arguments, not {ctypes.sizeof(Args)}: kernels/ and nanoqwen/ are of two versions")
        self._make_room()

        layers = [
            [x.data.ptr for x in (layer.qkv.bundles, layer.o.bundles, layer.gate_up.bundles, layer.down.bundles, layer.input_norm, layer.post_norm, layer.q_bias, layer.k_bias, layer.v_bias)]
            for layer in weights.layers
        ]
        assert len(layers[0]) == POINTERS
        self._weights = weights  # pointers into them are all that the card has
        self.layers = cupy.asarray(np.array(layers, dtype=np.uint64))
        self.words, self.counts, self.serial = (cupy.zeros(n, dtype=np.uint32) for n in (self.size["words"], self.size["counts"], 1))
        self.candidates = cupy.zeros((self.size["ctas"], 2), dtype=np.float32)
        stamped = bool((settings or {}).get("kStamps"))
        self.stamps = cupy.zeros(self.size["ctas"] * (dims.num_layers * self.size["events"] + 8) if stamped else 1, dtype=np.uint32)
        # The host's memory: it can be read when the context is gone.
        self.error = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * ERROR_WORDS), dtype=np.uint32, count=ERROR_WORDS)
        self.error[:] = 0
        cupy.cuda.runtime.deviceSynchronize()

    def _sizes(self) -> dict[str, int]:
        """The kernel's own constants, from the card."""
        told, stream = cupy.zeros(len(SIZES), dtype=np.int32), cupy.cuda.Stream.null
        Launch(self._functions, "persistent_sizes", (1,), 32, [told], overlap=False)(stream)
        stream.synchronize()
        return dict(zip(SIZES, map(int, told.get())))

    # [room]
    def _make_room(self) -> None:
        """Shared memory for a CTA on every SM, and a look whether the card can have them all at once: a CTA that is not there would be waited for."""
        function, size = self._functions["persistent"], self.size
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, size["shared"]))
        each = check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, size["threads"], size["shared"]))
        kinds, device = driver.CUdevice_attribute, check(driver.cuCtxGetDevice())
        sms, together = (check(driver.cuDeviceGetAttribute(kind, device)) for kind in (kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kinds.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH))
        room = each * sms if together else 0
        if room < size["ctas"]:
            raise DeviceError(f"the persistent kernel needs {size['ctas']} CTAs on the card at once, this one holds {room}; use --engine graph")
    # [/room]

    def launch(self, buffers: DecodeBuffers, pool: cupy.ndarray, tokens: int, *, chooses: bool = True, split_pages: int = SPLIT_PAGES) -> Launch:
        """The launch that decodes ``tokens`` tokens from the step in ``buffers`` on, all of whose pages must be in its block table by then.

        ``chooses``: each next token is the one with the largest logit, told like those of ``argmax``; otherwise one token's logits are left,
        and its step as ``argmax`` leaves it for ``sample``. ``split_pages``: the fewest pages of a split of attention.
        """
        w, b = self._weights, buffers
        assert chooses or tokens == 1
        args = Args(
            *(x.data.ptr for x in (self.layers, w.embedding, w.final_norm, w.head, b.rope, b.allowed, b.step)), b.told.ctypes.data, b.block_table.data.ptr,
            pool.data.ptr, pool.shape[2], split_pages, SPLITS, tokens, int(chooses),
            *(x.data.ptr for x in (self.words, self.counts, self.serial, self.candidates, b.logits)), self.error.ctypes.data, self.stamps.data.ptr,
        )  # fmt: skip
        return Launch(self._functions, "persistent", (self.size["ctas"],), self.size["threads"], [args], shared=self.size["shared"], overlap=False, cooperative=True)

    def story(self) -> str | None:
        """Which CTA waited for what when the watchdog ended the kernel, or None: it did not."""
        code, cta, detail = (int(x) for x in self.error[:3])
        if not code:
            return None
        where = [int(x) for x in self.error[WHERE_AT : WHERE_AT + self.size["threads"] // 32 - 1]]
        common = max(set(where), key=where.count)
        return (
            f"the persistent kernel stood still: CTA {cta} waited for {CODES.get(code, f'code {code}')} ({detail}), most of its warps for "
            f"{WAITS.get(common >> 24, 'something')} ({common & 0xFFFFFF}); the driver has ended this process's work on the card: start it again, with --engine graph if it happens twice"
        )
