// gemv_pipes: how many lanes of one SM finish an instruction each clock, for the instructions that the INT4 GEMVs are made of.
//
// Computes   nothing of use: eight independent chains a thread, each a long run of one instruction that needs the result before it.
//            32 warps with eight chains hide every latency, so the clock counts what the pipe takes.
// Launch     one CTA of 1,024 threads on each SM. cycles[cta] is the time from one barrier to the next, of `rounds` * 64 instructions a thread (tensor cores: 16).
// Check      tests/unit/test_lessons_gemv_cuda.py looks into the machine code: the loop must hold that instruction 64 times (tensor cores: 16).
#include "int4_unpack.cuh"
#include "ptx.cuh"

namespace nanoqwen {
namespace pipes {

constexpr int kThreads = 1024, kChains = 8, kSteps = 8;

// [pipes]
template <class Step>
__device__ __forceinline__ void run(u32* out, long long* cycles, int rounds, u32 k, u32 m, Step step) {
  u32 v[kChains];
  for (int c = 0; c < kChains; ++c) v[c] = threadIdx.x * kChains + c;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) {
#pragma unroll
    for (int j = 0; j < kSteps * kChains; ++j) step(v[j % kChains], k, m);
  }
  __syncthreads();
  const long long end = clock64();
  u32 sum = 0;
  for (int c = 0; c < kChains; ++c) sum ^= v[c];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
// [/pipes]

__device__ __forceinline__ void i2f(u32& v, u32, u32) {
  asm volatile("{.reg .f32 f; cvt.rn.f32.s32 f, %0; mov.b32 %0, f;}" : "+r"(v));
}
__device__ __forceinline__ void f16_to_f32(u32& v, u32, u32) {
  asm volatile("{.reg .f32 f; .reg .f16 h, g; mov.b32 {h, g}, %0; cvt.f32.f16 f, h; mov.b32 %0, f;}" : "+r"(v));
}
__device__ __forceinline__ void lop3(u32& v, u32 k, u32 m) { asm volatile("lop3.b32 %0, %0, %1, %2, 0x6A;" : "+r"(v) : "r"(k), "r"(m)); }
__device__ __forceinline__ void prmt(u32& v, u32 k, u32 m) { asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(v) : "r"(k), "r"(m)); }
__device__ __forceinline__ void shift(u32& v, u32 k, u32) { asm volatile("shf.r.wrap.b32 %0, %0, %1, 7;" : "+r"(v) : "r"(k)); }
__device__ __forceinline__ void imad(u32& v, u32 k, u32 m) { asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(v) : "r"(k), "r"(m)); }
__device__ __forceinline__ void dp4a(u32& v, u32 k, u32 m) { asm volatile("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(v) : "r"(k), "r"(m)); }
__device__ __forceinline__ void hfma2(u32& v, u32 k, u32 m) { asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(k), "r"(m)); }
__device__ __forceinline__ void ffma(u32& v, u32 k, u32 m) {
  asm volatile("{.reg .f32 a, b, c; mov.b32 a, %0; mov.b32 b, %1; mov.b32 c, %2; fma.rn.f32 a, a, b, c; mov.b32 %0, a;}" : "+r"(v) : "r"(k), "r"(m));
}

// Tensor cores: four accumulators of four registers, and 16 instructions a round.
template <class Step>
__device__ __forceinline__ void run_tensor(u32* out, long long* cycles, int rounds, u32 k, u32 m, Step) {
  decltype(Step::zero()) acc[4][4] = {};
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) {
#pragma unroll
    for (int j = 0; j < 16; ++j) Step::mma(acc[j % 4], k, m);
  }
  __syncthreads();
  const long long end = clock64();
  u32 sum = 0;
  for (int c = 0; c < 16; ++c) sum ^= static_cast<u32>(static_cast<int>(acc[c / 4][c % 4]));
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}

struct F16 {
  static __device__ __forceinline__ float zero() { return 0.0f; }
  static __device__ __forceinline__ void mma(float (&acc)[4], u32 k, u32 m) { mma_f16(acc, k, m, k, m, m, k); }
};
struct S8 {
  static __device__ __forceinline__ int zero() { return 0; }
  static __device__ __forceinline__ void mma(int (&acc)[4], u32 k, u32 m) { mma_s8(acc, k, m, k, m, m, k); }
};

}  // namespace pipes
}  // namespace nanoqwen

#define NANOQWEN_PIPE(name, step)                                                                                              \
  extern "C" __global__ void __launch_bounds__(nanoqwen::pipes::kThreads, 1) pipe_##name(u32* out, long long* cycles, int rounds, u32 k, u32 m) { \
    nanoqwen::pipes::run(out, cycles, rounds, k, m, [](u32& v, u32 a, u32 b) { nanoqwen::pipes::step(v, a, b); });            \
  }
#define NANOQWEN_TENSOR_PIPE(name, kind)                                                                                       \
  extern "C" __global__ void __launch_bounds__(nanoqwen::pipes::kThreads, 1) pipe_##name(u32* out, long long* cycles, int rounds, u32 k, u32 m) { \
    nanoqwen::pipes::run_tensor(out, cycles, rounds, k, m, nanoqwen::pipes::kind{});                                          \
  }

NANOQWEN_PIPE(i2f, i2f)
NANOQWEN_PIPE(f16_to_f32, f16_to_f32)
NANOQWEN_PIPE(lop3, lop3)
NANOQWEN_PIPE(prmt, prmt)
NANOQWEN_PIPE(shift, shift)
NANOQWEN_PIPE(imad, imad)
NANOQWEN_PIPE(dp4a, dp4a)
NANOQWEN_PIPE(hfma2, hfma2)
NANOQWEN_PIPE(ffma, ffma)
NANOQWEN_TENSOR_PIPE(hmma, F16)
NANOQWEN_TENSOR_PIPE(imma, S8)
