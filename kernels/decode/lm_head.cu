// lm_head: logits[vocab] = H[vocab x hidden] . y, H in FP16, batch 1.
//
// Computes   FP32 sums on tensor cores. y = high + low, two FP16 numbers that carry 22 bits of it: B's even columns hold the high parts and
//            the odd columns the low parts, so one m16n8k16 multiplies both and the two sums are added in FP32.
// Moves      vocab * hidden * 2 bytes (1.09 GB for the 7B, a quarter of a token), each once.
// Warps      as stream_gemv.cuh; a block is 16 rows x 32 columns: 16 bytes a lane and row.
//            Eight consecutive halves of a row are two A fragments of a lane; the inner dimension is permuted accordingly in B.
#include "constants.cuh"
#include "gemv_input.cuh"
#include "stream_gemv.cuh"

namespace nanoqwen {

struct HalfWeights {
  static constexpr int kRows = kVocabRows, kBlocks = kHidden / 32, kBlockBytes = 32 * kTileRows * 2, kBundleBytes = kBundle * kBlockBytes, kRecord = 128;
  static constexpr bool kLaneParts = false;
  static_assert(kHidden % 32 == 0, "a block is 32 columns");

  struct Fragment {
    uint4 top, bottom;  // eight halves of rows g and g + 8
  };

  const u8* bundles;      // re-tiled: [tile][slice][16 rows][32 halves], padded to whole bundles

  __device__ __forceinline__ Fragment load(const u8* bundle, int j) const {
    const uint4* mine = reinterpret_cast<const uint4*>(bundle + j * kBlockBytes) + lane_id();
    return {mine[0], mine[kWarp]};
  }

  __device__ __forceinline__ float2 multiply(const Fragment& f, const u8* record) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const uint4 x = *reinterpret_cast<const uint4*>(record + (g & 1) * 64 + t * 16);
    float sums[4] = {0, 0, 0, 0};
    mma_f16(sums, f.top.x, f.bottom.x, f.top.y, f.bottom.y, x.x, x.y);
    mma_f16(sums, f.top.z, f.bottom.z, f.top.w, f.bottom.w, x.z, x.w);
    return make_float2(sums[0] + sums[1], sums[2] + sums[3]);
  }
};

}  // namespace nanoqwen

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kGemvWarps* kWarp, 1) lm_head(const u8* bundles, const u8* halves, float* logits) {  // halves: y as [slice][high, low][32]
  using Shape = StreamShape<HalfWeights, kGemvCtas, kGemvWarps, kHeadStages>;
  static_assert(Shape::kParts == kHeadParts, "argmax adds as many parts");
  static_assert(Shape::kShared <= kHeadShared, "the launch gives enough bytes");
  const auto input = [=](Barrier* landed) { return CopiedInput<HalfWeights::kBlocks * HalfWeights::kRecord>{halves, landed}; };
  stream_gemv<HalfWeights, kGemvCtas, kGemvWarps, kHeadStages>(HalfWeights{bundles}, input, logits);
}
