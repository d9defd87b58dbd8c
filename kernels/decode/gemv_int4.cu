// gemv_int4: y[rows] = W[rows x cols] . x[cols], W in INT4 (ValueShuffle, one FP16 scale a group and row), batch 1.
//
// Computes   FP32 sums of exact integer products: codes (4 bits) times activations (16-bit fixed point, activations.cuh).
// Moves      rows * cols / 2 bytes of codes + rows * cols / group * 2 of scales, each once; x is kilobytes.
// Warps      kGemvWarps a CTA, all alike; barriers and shared memory as in stream_gemv.cuh.
// Layout     re-tiled at upload: codes [tile][group][16 rows][group / 8 words], scales [tile][group][16]. A block is then 1 KiB that a
//            warp reads in two requests of 512 contiguous bytes, lane (g, t) taking kLaneWords words of rows g and g + 8, and a warp's
//            share of the matrix is one contiguous stream.
// Lost       row-major as in the file (8 rows x 64 bytes a request): the same inner loop, much slower, since every request
//            opens eight DRAM pages for 64 bytes each.
// Tensor     m16n8k32, signed bytes. A: `word << 4` and `word` under 0xF0F0F0F0 are 16 times the weights' nibbles as bytes, three
// cores      instructions for eight weights. B: column n holds x's high bytes when n is even and low bytes when odd, so every lane of a
//            quad ends with both sums of its two rows, and 256 * high + low is the exact integer dot product of the group.
// Tuned for  28 x (4608, 3584, 37888 rows) x 3584 and 3584 x 18944.
#include "activations.cuh"
#include "constants.cuh"
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
  static_assert(kCols % kGroup == 0, "groups divide the input dimension");
  using Vector = typename LaneVector<kLaneWords>::type;

  struct Fragment {
    Vector top, bottom;        // words of rows g and g + 8
    u16 top_scale, bottom_scale;  // FP16 bits
  };

  const u32* codes;
  const u16* scales;
  const u8* activations;  // fixed-point records, one a group (activations.cuh)
  u64 policy;

  __device__ __forceinline__ Fragment load(int block) const {
    const Vector* mine = reinterpret_cast<const Vector*>(codes + static_cast<size_t>(block) * (2 * kGroup)) + lane_id();
    const u16* scale = scales + static_cast<size_t>(block) * kTileRows + lane_id() / 4;
    Fragment f;
    f.top = load_stream(mine, policy);
    f.bottom = load_stream(mine + kWarp, policy);  // eight rows further
    f.top_scale = load_stream(scale, policy);
    f.bottom_scale = load_stream(scale + 8, policy);
    return f;
  }

  __device__ __forceinline__ void multiply(const Fragment& f, const u8* record, float& top, float& bottom) const {
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
    top += static_cast<float>(sums[0] * 256 + sums[1]) * (half_to_float(f.top_scale) * scale);
    bottom += static_cast<float>(sums[2] * 256 + sums[3]) * (half_to_float(f.bottom_scale) * scale);
  }
};
// [/weights]

#define NANOQWEN_GEMV(name, rows, cols, parts)                                                                                    \
  extern "C" __global__ void __launch_bounds__(kGemvWarps * kWarp, kGemvCtasPerSm) name(                                    \
      const u32* codes, const u16* scales, const u8* records, float* out) {                                                     \
    using W = Int4Weights<rows, cols>;                                                                                      \
    static_assert(StreamShape<W, kGemvCtas, kGemvWarps>::kParts == parts, "the reader adds as many parts");                 \
    const W weights{codes, scales, records, evict_first_policy()};                                                          \
    stream_gemv<W, kGemvCtas, kGemvWarps, kGemvPrefetch>(weights, out);                                                    \
  }

}  // namespace nanoqwen

using namespace nanoqwen;

NANOQWEN_GEMV(gemv_qkv, kQSize + 2 * kKvSize, kHidden, kQkvParts)
NANOQWEN_GEMV(gemv_o, kHidden, kQSize, kOParts)
NANOQWEN_GEMV(gemv_gate_up, 2 * kIntermediate, kHidden, kGateUpParts)
NANOQWEN_GEMV(gemv_down, kHidden, kIntermediate, kDownParts)
