// lm_head: logits[vocab] = H[vocab x hidden] . y, H in FP16, batch 1.
//
// Computes   FP32 sums on tensor cores. y = high + low, two FP16 numbers that carry 22 bits of it: B's even columns hold the high parts and
//            the odd columns the low parts, so one m16n8k16 multiplies both and the two sums are added in FP32.
// Moves      vocab * hidden * 2 bytes (1.09 GB for the 7B, a quarter of a token), each once.
// Warps      as stream_gemv.cuh; a block is 16 rows x 32 columns: 16 bytes a lane and row.
//            Eight consecutive halves of a row are two A fragments of a lane; the inner dimension is permuted accordingly in B.
#include "constants.cuh"
#include "stream_gemv.cuh"

namespace nanoqwen {

struct HalfWeights {
  static constexpr int kRows = kVocabRows, kBlocks = kHidden / 32, kRecord = 128;
  static_assert(kHidden % 32 == 0, "a block is 32 columns");

  struct Fragment {
    uint4 top, bottom;  // eight halves of rows g and g + 8
  };

  const u16* head;    // re-tiled: [tile][slice][16 rows][32]
  const u8* activations;  // y: [slice][high, low][32] halves
  u64 policy;

  __device__ __forceinline__ Fragment load(int block) const {
    const uint4* mine = reinterpret_cast<const uint4*>(head + static_cast<size_t>(block) * (32 * kTileRows)) + lane_id();
    return {load_stream(mine, policy), load_stream(mine + kWarp, policy)};
  }

  __device__ __forceinline__ void multiply(const Fragment& f, const u8* record, float& top, float& bottom) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const uint4 x = *reinterpret_cast<const uint4*>(record + (g & 1) * 64 + t * 16);
    float sums[4] = {0, 0, 0, 0};
    mma_f16(sums, f.top.x, f.bottom.x, f.top.y, f.bottom.y, x.x, x.y);
    mma_f16(sums, f.top.z, f.bottom.z, f.top.w, f.bottom.w, x.z, x.w);
    top += sums[0] + sums[1];
    bottom += sums[2] + sums[3];
  }
};

}  // namespace nanoqwen

using namespace nanoqwen;

extern "C" __global__ void __launch_bounds__(kGemvWarps* kWarp, kGemvCtasPerSm) lm_head(const u16* head, const u8* halves, float* logits) {
  static_assert(StreamShape<HalfWeights, kGemvCtas, kGemvWarps>::kParts == kHeadParts, "argmax adds as many parts");
  const HalfWeights weights{head, halves, evict_first_policy()};
  stream_gemv<HalfWeights, kGemvCtas, kGemvWarps, kGemvPrefetch>(weights, logits);
}
