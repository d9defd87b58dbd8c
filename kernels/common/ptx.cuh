// Named primitives: one PTX instruction each, with what it does and what it does not promise.
//
// No CUDA header is included anywhere in this folder. NVRTC then needs no toolkit on the machine, and a
// reader sees every type and conversion that the kernels use.

#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

namespace nanoqwen {

constexpr u32 kWarp = 32;
constexpr u32 kFullMask = 0xFFFFFFFFu;
constexpr float kLargestFloat = 3.4028234663852886e38f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FC00000); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kLargestFloat; }  // false for NaN too

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kWarp; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / kWarp; }

// After it the compiler knows nothing of x but that it is an int.
__device__ __forceinline__ void keep_opaque(int& x) { asm volatile("" : "+r"(x)); }

// ---------------------------------------------------------------------------------------------- FP16
// A half is carried as its 16 bits; arithmetic happens in FP32.

__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// Rounds to nearest, ties to even; beyond 65504 becomes infinity.
__device__ __forceinline__ u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float low_half(u32 pair) { return half_to_float(static_cast<u16>(pair & 0xFFFF)); }
__device__ __forceinline__ float high_half(u32 pair) { return half_to_float(static_cast<u16>(pair >> 16)); }

// ------------------------------------------------------------------------------------- global memory
// Weights are read once a token: keep them out of L1, and let L2 drop them before the few kilobytes of
// activations that the next kernel wants. `.nc` promises that nobody writes them while the kernel runs.

__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint4 load_stream(const uint4* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
  return v;
}

// ------------------------------------------------------------------------- programmatic dependent launch
// A kernel launched with the programmatic attribute may start while the kernel before it still runs.

// [dependent_launch]
// Wait until every earlier kernel of the stream has finished and its writes are visible. Nothing that an
// earlier kernel writes may be read before this; weights may. Without the attribute it returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next kernel's CTAs to start as soon as every CTA of this kernel has said so or exited and there is
// room for them. It publishes nothing: the next kernel still waits for this one to finish before it reads. So it may
// be said first, before this kernel's own wait: a kernel finishes only after the one before it did, whose results are then
// visible to all that wait. A kernel of the stream may thus start while several before it still run, as far as SMs have room.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// [/dependent_launch]

// ------------------------------------------------------------------------------------- tensor cores

// acc[16x8] += A[16x32] . B[32x8], signed 8-bit operands, exact 32-bit integer sums. Thread (g, t) = (lane / 4,
// lane % 4) holds A rows g (a0, a2) and g + 8 (a1, a3), columns 4t..4t+3 (a0, a1) and 16 + 4t.. (a2, a3); B column g,
// rows 4t..4t+3 (b0) and 16 + 4t.. (b1); acc (row g, columns 2t, 2t + 1), (row g + 8, the same).
__device__ __forceinline__ void mma_s8(int (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// acc[16x8] += A[16x16] . B[16x8], FP16 operands, FP32 sums. Thread (g, t) holds A rows g (a0, a2) and g + 8 (a1, a3),
// columns 2t, 2t + 1 (a0, a1) and 8 + 2t.. (a2, a3); B column g, rows 2t, 2t + 1 (b0) and 8 + 2t.. (b1).
__device__ __forceinline__ void mma_f16(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------------------------------- warp sums

__device__ __forceinline__ float warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kFullMask, v, step);
  return v;
}

// Over the four lanes of a quad; all of them get it.
__device__ __forceinline__ float quad_sum(float v) {
  for (int step = 2; step > 0; step /= 2) v += __shfl_xor_sync(kFullMask, v, step);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(kFullMask, v, step));
  return v;
}

}  // namespace nanoqwen
