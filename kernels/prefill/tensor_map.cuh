// Tensor copies: the copy engine reads a box of a matrix and lays its rows into shared memory one after the other.
//
// The map is made on the host (nanoqwen/cuda/tensor_map.py) and is a kernel argument, `const __grid_constant__`. A layer's pool of keys, or of
// values, is a matrix of FP16 with a row a (page, KV head, token) and kHeadDim columns; a box is 16 rows, one slice of a page, by 64 columns. So
// a slice with rows of 256 bytes arrives as two pieces with rows of 128 bytes, which is what wgmma reads.
#pragma once

#include "constants.cuh"
#include "mbarrier.cuh"

namespace nanoqwen {

// What the driver wrote: nobody else reads it but the copy engine.
struct __align__(64) TensorMap {
  u64 opaque[16];
};

constexpr int kBoxColumns = 64, kBoxRows = kPageTokens, kBoxBytes = 2 * kBoxColumns * kBoxRows;

// The box whose first element is (column, row). Returns at once; the barrier counts kBoxBytes, as it counts a bulk copy's. One thread.
__device__ __forceinline__ void tensor_copy(u32 shared, const TensorMap* map, int column, int row, Barrier* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(b)) : "memory");
}

// Before the first copy that uses it: a kernel's arguments lie in memory that the copy engine reads for itself.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

}  // namespace nanoqwen
