"""Tensor maps: what the copy engine must know of a matrix in device memory to fetch boxes of it (kernels/prefill/tensor_map.cuh).

The driver writes a map; its 128 bytes are opaque, and are passed to a kernel by value. A map holds an address, so it is written anew when
what it points at has moved. Whoever has launched with it before is not concerned: a launch copies its arguments, and a captured graph too.
"""

from __future__ import annotations

import ctypes

import cupy
from cuda.bindings import driver

from nanoqwen.config import Dims, load_settings
from nanoqwen.cuda.launch import check

#: Columns of a box: 128 bytes of FP16, a row of wgmma's swizzled tiles.
BOX_COLUMNS = 64


class TensorMap(ctypes.Structure):
    """A map that kernels take as an argument. Points nowhere until ``point_at``."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]

    def point_at(self, pool: cupy.ndarray, dims: Dims) -> None:
        """Describe ``pool``, FP16 [pages, page_tokens * kv_size]: keys or values of one layer. It becomes a matrix with a row a (page, KV head, token);
        a box is the tokens of one page by ``BOX_COLUMNS``. Pages are swizzled already, so the copy is plain. Raises DeviceError when the driver
        refuses (rows of 2^32 and more)."""
        page_tokens, columns = load_settings().kv.page_tokens, dims.head_dim
        ctypes.memmove(self.opaque, _encoded(pool.data.ptr, pool.size // columns, columns, page_tokens), ctypes.sizeof(self))


def _encoded(address: int, rows: int, columns: int, box_rows: int) -> int:
    """Where the driver left the map's 128 bytes."""
    kinds, u32, u64 = driver, driver.cuuint32_t, driver.cuuint64_t
    found = check(driver.cuTensorMapEncodeTiled(
        kinds.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, u32(2), address, [u64(columns), u64(rows)], [u64(2 * columns)], [u32(BOX_COLUMNS), u32(box_rows)],
        [u32(1), u32(1)], kinds.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, kinds.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        kinds.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B, kinds.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ))  # fmt: skip
    return int(found.getPtr())
