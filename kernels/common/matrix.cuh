// Shared-memory tiles for the tensor cores, and FP32 numbers carried as two FP16 parts.
#pragma once

#include "mbarrier.cuh"

namespace nanoqwen {

// Four 8x8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8. Lane (g, t) of a quad receives row g,
// elements 2t and 2t + 1 of each tile.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// The same, each tile transposed: lane (g, t) receives rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// (a, b) = high + low, two FP16 pairs that together carry 22 bits of each.
__device__ __forceinline__ void split_pair(float a, float b, u32& high, u32& low) {
  high = pack_half2(a, b);
  low = pack_half2(a - low_half(high), b - high_half(high));
}

}  // namespace nanoqwen
