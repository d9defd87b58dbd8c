// lesson_gemv: the arithmetics of chapter 07 in the frame that the runtime ships (common/stream_gemv.cuh), so that only the arithmetic differs.
//
// Computes   y[rows] = W[rows x cols] . x[cols] at batch 1; W in INT4 with an FP16 scale a group, x in FP16.
// Moves      rows * cols / 2 bytes of codes and rows * cols / 128 * 2 of scales, each once; x is kilobytes.
// Weights    the runtime's bundles (decode/gemv_int4.cu), copied and kept in a ring as there. Lane (g, t) = (lane / 4, lane % 4) of a
//            warp holds words 4t .. 4t + 3 of rows g and g + 8, which is 64 weights a block.
// Path       says what x looks like in shared memory and how a block is multiplied:
//              kRecord     bytes of x a group, a multiple of 16
//              kPrepared   x comes as records from an earlier kernel; else every CTA makes them for itself with prepare()
//              kLaneParts  the four lanes of a quad hold parts of their rows' sums (tensor cores have added them already)
//              prepare(x4, record)        all 32 lanes: FP16 elements 4 * lane .. + 3 of a group -> its record
//              multiply(words, record)    the products of rows g and g + 8
// Barriers and shared memory as in stream_gemv.cuh. nanoqwen/lessons/gemv.py computes stages, parts and bytes of each launch and hands
//            them over as constants; static_asserts compare.
// Tuned for  the seven projections of the 7B, by what the runtime's own GEMV had taught. Group 128 only: it is the format's default
//            and fills a lane's 16-byte loads.
// Lost       a frame made for this chapter: single blocks, copied four at a time and so not in whole lines; two ring stages; the next
//            kernel allowed to start only after the wait; and groups of x prepared two at a time, each pair a round trip to L2, of which
//            a warp has five before the down projection. All arithmetics looked alike in it, and none was near the memory's rate.
#pragma once

#include "constants.cuh"
#include "gemv_input.cuh"
#include "int4_block.cuh"
#include "int4_unpack.cuh"
#include "stream_gemv.cuh"

namespace nanoqwen {
namespace lesson {

static_assert(kGroup == 128, "a lane takes four words of a row of a group");

// What a lane holds of a block.
struct Words {
  uint4 top, bottom;  // rows g and g + 8
  u32 scales;         // FP16 bits of their scales, row g in the low half
};

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four FP16 numbers as FP32.
__device__ __forceinline__ void as_floats(uint2 x4, float (&v)[4]) {
  v[0] = low_half(x4.x), v[1] = high_half(x4.x), v[2] = low_half(x4.y), v[3] = high_half(x4.y);
}

// Bytes of eight neighbouring values, four held by an even lane and four by the odd one after it, in the order in which unpack_bytes
// shows the weights: an even lane receives 0, 4, 1, 5 and an odd one 2, 6, 3, 7.
__device__ __forceinline__ u32 byte_order(u32 mine) {
  const bool odd = lane_id() & 1;
  const u32 other = __shfl_xor_sync(kFullMask, mine, 1);
  return odd ? __byte_perm(other, mine, 0x7362) : __byte_perm(mine, other, 0x5140);
}

// [policies]
// The two policies that stream_gemv asks for. The weights: how a block is held is the same for every path ...
template <class PathOf, int kRowCount, int kCols>
struct Weights {
  using Path = PathOf;
  using Fragment = Words;
  static constexpr int kRows = kRowCount, kBlocks = kCols / kGroup, kRecord = Path::kRecord;
  static constexpr int kBundleBytes = kBundle * Int4Block::kBytes;
  static constexpr bool kLaneParts = Path::kLaneParts;

  const u8* bundles;

  __device__ __forceinline__ Words load(const u8* bundle, int j) const {
    const uint4* mine = reinterpret_cast<const uint4*>(bundle + Int4Block::codes(j)) + lane_id();
    return {mine[0], mine[kWarp], *reinterpret_cast<const u32*>(bundle + Int4Block::scales(j) + lane_id() / 4 * 4)};
  }

  // ... and how it is multiplied is what the paths are about.
  __device__ __forceinline__ float2 multiply(const Words& words, const u8* record) const { return Path::multiply(words, record); }
};

// And x: read from L2 by every CTA, all of a warp's groups at once, one round trip; then made into records.
template <class W>
struct MadeInput {
  static constexpr int kPieces = (W::kBlocks + kGemvWarps - 1) / kGemvWarps;  // groups of a warp
  const uint2* x;

  __device__ __forceinline__ void prepare() {}

  __device__ __forceinline__ void deliver(u8* records, float*) {
    uint2 x4[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int group = static_cast<int>(warp_id()) + p * kGemvWarps;
      x4[p] = group < W::kBlocks ? x[group * kWarp + lane_id()] : make_uint2(0, 0);
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int group = static_cast<int>(warp_id()) + p * kGemvWarps;
      if (group < W::kBlocks) W::Path::prepare(x4[p], records + group * W::kRecord);  // the whole warp
    }
    __syncthreads();  // all threads: the records are complete
  }
};
// [/policies]

template <class W>
__device__ __forceinline__ auto input_of(const u8* x, Barrier* landed) {
  if constexpr (W::Path::kPrepared) {
    return CopiedInput<W::kBlocks * W::kRecord>{x, landed};
  } else {
    return MadeInput<W>{reinterpret_cast<const uint2*>(x)};
  }
}

// [resident]
// The same loop without loads: each warp takes the bundles of its first ring and multiplies them again and again, `bundles` times one.
// out[CTA][warp] keeps the compiler from leaving the products out.
template <class W, int kStages>
__device__ __forceinline__ void resident(const u8* weights, const u8* x, float* out, int bundles) {
  using Shape = StreamShape<W, kGemvCtas, kGemvWarps, kStages>;
  Barrier* const barriers = reinterpret_cast<Barrier*>(stream_shared + Shape::kBarriersAt);
  Barrier* const landed = barriers + 1 + warp_id();
  u8* const ring_memory = stream_shared + warp_id() * kStages * W::kBundleBytes;
  u8* const records = stream_shared + Shape::kRecordsAt;
  if (lane_id() == 0) {
    if (warp_id() == 0) barrier_init(barriers, 1);
    barrier_init(landed, 1);
    fence_barrier_init();
    barrier_arrive_expect(landed, kStages * W::kBundleBytes);
    bulk_copy(ring_memory, weights + static_cast<size_t>(blockIdx.x * kGemvWarps + warp_id()) * (kStages * W::kBundleBytes), kStages * W::kBundleBytes, landed);
  }
  __syncthreads();  // the barriers exist
  auto input = input_of<W>(x, barriers);
  input.deliver(records, nullptr);
  barrier_wait(landed, 0);

  const W policy{weights};
  float top = 0.0f, bottom = 0.0f;
  int slice = 0, stage = 0;
#pragma unroll 1
  for (int i = 0; i < bundles; ++i) {
    Words held[kBundle];
#pragma unroll
    for (int j = 0; j < kBundle; ++j) held[j] = policy.load(ring_memory + stage * W::kBundleBytes, j);
#pragma unroll
    for (int j = 0; j < kBundle; ++j) {
      const float2 sums = policy.multiply(held[j], records + slice * W::kRecord);
      top += sums.x;
      bottom += sums.y;
      slice = slice + 1 == W::kBlocks ? 0 : slice + 1;
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  top = warp_sum(top + bottom);
  if (lane_id() == 0) out[blockIdx.x * kGemvWarps + warp_id()] = top;
}
// [/resident]

}  // namespace lesson
}  // namespace nanoqwen

#define NANOQWEN_LESSON_GEMV(name, PathOf, rows, cols)                                                                        \
  extern "C" __global__ void __launch_bounds__(nanoqwen::kGemvWarps * nanoqwen::kWarp, 1)                                     \
      name(const u8* bundles, const u8* x, float* out) {                                                  \
    using namespace nanoqwen;                                                                                                 \
    using W = lesson::Weights<PathOf, rows, cols>;                                                                            \
    using Shape = StreamShape<W, kGemvCtas, kGemvWarps, lesson::name##_stages>;                                               \
    static_assert(Shape::kParts == lesson::name##_parts, "the reader adds as many parts");                                    \
    static_assert(Shape::kShared <= lesson::name##_shared, "the launch gives enough bytes");                                  \
    const auto input = [=](Barrier* landed) { return lesson::input_of<W>(x, landed); };                                       \
    stream_gemv<W, kGemvCtas, kGemvWarps, lesson::name##_stages>(W{bundles}, input, out);                                     \
  }

// A path: its four shapes (q and o are one, k and v, gate and up), and its loop on weights that stay in shared memory.
#define NANOQWEN_LESSON_PATH(name, PathOf)                                                                                    \
  NANOQWEN_LESSON_GEMV(name##_q, PathOf, kQSize, kHidden)                                                                     \
  NANOQWEN_LESSON_GEMV(name##_k, PathOf, kKvSize, kHidden)                                                                    \
  NANOQWEN_LESSON_GEMV(name##_gate, PathOf, kIntermediate, kHidden)                                                           \
  NANOQWEN_LESSON_GEMV(name##_down, PathOf, kHidden, kIntermediate)                                                           \
  extern "C" __global__ void __launch_bounds__(nanoqwen::kGemvWarps * nanoqwen::kWarp, 1)                                     \
      name##_resident(const u8* bundles, const u8* x, float* out, int count) {                            \
    using namespace nanoqwen;                                                                                                 \
    lesson::resident<lesson::Weights<PathOf, kIntermediate, kHidden>, lesson::name##_gate_stages>(bundles, x, out, count);    \
  }

static_assert(nanoqwen::kQSize == nanoqwen::kHidden, "one kernel serves q and o");
