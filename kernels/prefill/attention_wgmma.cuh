// The two matrix products of attention, as wgmma wants them: A (queries, shares) in registers, B (keys, values) in shared memory.
//
// Both B operands are pages as they lie in the cache. A tensor copy (tensor_map.cuh) puts 64 dimensions of a token into 128 bytes of shared
// memory, tokens one after the other; the cache's own swizzle, chunk c of a row at c ^ (token % 8), is the 128-byte swizzle of wgmma.
//   keys     K-major (b_descriptor, wgmma.cuh): N is tokens, K is dimensions. Eight tokens are 1024 bytes; the next 16 dimensions are 32 bytes further.
//   values   MN-major, "transposed": N is dimensions, K is tokens. A block of 64 dimensions by 8 tokens is 1024 bytes; the next 8 tokens follow,
//            the next 64 dimensions are a half tile further.
#pragma once

#include "wgmma.cuh"

namespace nanoqwen {

// Descriptor of values: `half_bytes` from 64 dimensions to the next 64, 1024 from 8 tokens to the next 8, swizzle 128. The next 16 tokens begin
// 2048 bytes later.
__device__ __forceinline__ u64 value_descriptor(u32 address, u32 half_bytes) {
  return (1ull << 62) | (64ull << 32) | (static_cast<u64>(half_bytes / 16) << 16) | ((address & 0x3FFFF) >> 4);
}

// kAdd: D += A . B, else D = A . B. kTransposed: B is MN-major. Asynchronous, like all products of wgmma.cuh.

template <bool kAdd, bool kTransposed>
__device__ __forceinline__ void attention_wgmma(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred add; setp.ne.u32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kAdd)), "n"(static_cast<int>(kTransposed)));
}

template <bool kAdd, bool kTransposed>
__device__ __forceinline__ void attention_wgmma(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred add; setp.ne.u32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kAdd)), "n"(static_cast<int>(kTransposed)));
}

}  // namespace nanoqwen
