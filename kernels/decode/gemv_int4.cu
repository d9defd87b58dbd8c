// gemv_int4: y[rows] = W[rows x cols] . x[cols], W in INT4 (ValueShuffle, one FP16 scale a group and row), batch 1.
//
// Computes   FP32 sums of exact integer products: codes (4 bits) times activations (16-bit fixed point, activations.cuh).
// Moves      rows * cols / 2 bytes of codes + rows * cols / group * 2 of scales, each once; x is kilobytes.
// Warps      kGemvWarps a CTA, all alike; barriers and shared memory as in stream_gemv.cuh.
// Layout     re-tiled at upload into blocks of 16 rows x one group, each its codes and then its scales (int4_block.cuh); four of them, a bundle,
//            are 4 KiB + 128 bytes for groups of 128. A warp's share of the matrix is one contiguous stream, and one bulk copy brings codes
//            and scales. Lane (g, t) reads kLaneWords words of rows g and g + 8.
// Lost       row-major as in the file (8 rows x 64 bytes a request): the same inner loop, much slower, since every request
//            opens eight DRAM pages for 64 bytes each.
// Tensor     m16n8k32, signed bytes. A: `word << 4` and `word` under 0xF0F0F0F0 are 16 times the weights' nibbles as bytes, three
// cores      instructions for eight weights. B: column n holds x's high bytes when n is even and low bytes when odd, so every lane of a
//            quad ends with both sums of its two rows, and 256 * high + low is the exact integer dot product of the group.
// Tuned for  28 x (4608, 3584, 37888 rows) x 3584 and 3584 x 18944.
#include "activations.cuh"
#include "constants.cuh"
#include "gemv_input.cuh"
#include "int4_block.cuh"
#include "int4_unpack.cuh"
#include "stream_gemv.cuh"

namespace nanoqwen {

template <int kWords> struct LaneVector;
template <> struct LaneVector<4> { using type = uint4; };
template <> struct LaneVector<2> { using type = uint2; };
template <> struct LaneVector<1> { using type = u32; };

// [weights]
template <int kRowCount, int kCols>
struct Int4Weights {
  static constexpr int kRows = kRowCount, kBlocks = kCols / kGroup, kRecord = kRecordBytes;
  static constexpr bool kLaneParts = false;
  static_assert(kCols % kGroup == 0, "groups divide the input dimension");
  using Vector = typename LaneVector<kLaneWords>::type;

  static constexpr int kBundleBytes = kBundle * Int4Block::kBytes;

  struct Fragment {
    Vector top, bottom;  // words of rows g and g + 8
    u32 scales;          // FP16 bits of their scales, row g in the low half
  };

  const u8* bundles;

  __device__ __forceinline__ Fragment load(const u8* bundle, int j) const {
    const Vector* mine = reinterpret_cast<const Vector*>(bundle + Int4Block::codes(j)) + lane_id();
    return {mine[0], mine[kWarp], *reinterpret_cast<const u32*>(bundle + Int4Block::scales(j) + lane_id() / 4 * 4)};
  }

  __device__ __forceinline__ float2 multiply(const Fragment& f, const u8* record) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const uint2* x = reinterpret_cast<const uint2*>(record + (g & 1) * kGroup + t * 8 * kLaneWords);
    const u32* words_top = reinterpret_cast<const u32*>(&f.top);
    const u32* words_bottom = reinterpret_cast<const u32*>(&f.bottom);
    int sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kLaneWords; ++i) {
      u32 a[2], b[2];
      int4::unpack_bytes(words_top[i], a);
      int4::unpack_bytes(words_bottom[i], b);
      mma_s8(sums, a[0], b[0], a[1], b[1], x[i].x, x[i].y);
    }
    const float scale = *reinterpret_cast<const float*>(record + 2 * kGroup);
    return make_float2(static_cast<float>(sums[0] * 256 + sums[1]) * (low_half(f.scales) * scale),
                       static_cast<float>(sums[2] * 256 + sums[3]) * (high_half(f.scales) * scale));
  }
};
// [/weights]

#define NANOQWEN_WEIGHTS(rows, cols, prefix)                                                   \
  using W = Int4Weights<rows, cols>;                                                           \
  using Shape = StreamShape<W, kGemvCtas, kGemvWarps, prefix##Stages>;                         \
  static_assert(Shape::kParts == prefix##Parts, "the reader adds as many parts");              \
  static_assert(Shape::kShared <= prefix##Shared, "the launch gives enough bytes");

// y = W . RMSNorm(residual + parts): the norm in front of a projection is part of it (gemv_input.cuh).
#define NANOQWEN_NORM_GEMV(name, rows, cols, prefix)                                                                              \
  extern "C" __global__ void __launch_bounds__(kGemvWarps * kWarp, 1)                                                             \
      name(const u8* bundles, const float* residual, const float* parts, int part_count, const u16* gain, float* sum, float* out) { \
    NANOQWEN_WEIGHTS(rows, cols, prefix)                                                                                          \
    const auto input = [=](Barrier*) { return NormedInput<kGemvWarps>{residual, parts, part_count, gain, sum, {}}; };             \
    stream_gemv<W, kGemvCtas, kGemvWarps, prefix##Stages>(W{bundles}, input, out);                                                \
  }

// y = W . x, x as records.
#define NANOQWEN_GEMV(name, rows, cols, prefix)                                                                       \
  extern "C" __global__ void __launch_bounds__(kGemvWarps * kWarp, 1) name(const u8* bundles, const u8* x, float* out) { \
    NANOQWEN_WEIGHTS(rows, cols, prefix)                                                                              \
    const auto input = [=](Barrier* landed) { return CopiedInput<W::kBlocks * W::kRecord>{x, landed}; };              \
    stream_gemv<W, kGemvCtas, kGemvWarps, prefix##Stages>(W{bundles}, input, out);                                    \
  }

}  // namespace nanoqwen

using namespace nanoqwen;

NANOQWEN_NORM_GEMV(gemv_qkv, kQSize + 2 * kKvSize, kHidden, kQkv)
NANOQWEN_GEMV(gemv_o, kHidden, kQSize, kO)
NANOQWEN_NORM_GEMV(gemv_gate_up, 2 * kIntermediate, kHidden, kGateUp)
NANOQWEN_GEMV(gemv_down, kHidden, kIntermediate, kDown)
