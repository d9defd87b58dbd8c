// sample: the next id, drawn as nanoqwen/sampling.py draws it: temperature, top-k, top-p, then the inverse of the distribution.
//
// Computes   from the logits of argmax.cu and one random number of the host: the same kept set in the same order as the host's sampler, so a
//            seed gives the same text, unless a sum lies within rounding of a limit. -1 from argmax stays -1.
// Method     Weights are integers: exp((logit - largest) / temperature) in units of 2^-44. Sums of integers do not depend on their order, so
//            any split over threads gives the same bits, and the sum of 2^19 of them still fits into 64.
//            Everything else is one search, `select`: the largest key such that the elements with that key or a larger one measure at
//            least a target. With logits for keys and 1 as the measure it is top-k; with weights as the measure, top-p; with
//            places for keys it cuts equals at the edge of top-p, and with weights again it is the draw.
// Moves      vocab * 4 bytes, twice, in L2.
// Launch     one cluster of 8 CTAs, 512 threads each. A thread holds the keys of its ids in registers, and their weights in shared memory:
//            kRows * 4 KiB (152 KiB for the 7B).
// Barriers   cluster_barrier, reached by all threads of the cluster: once at the start, since no CTA may write into another before that one
//            runs; then once in each sum over the cluster, which also has one __syncthreads. Branches around them depend on values that
//            all threads have in common.
//            A sum has two sets of slots that take turns: a CTA can only be a sum ahead of another that still reads.
#include "allowed.cuh"
#include "cluster.cuh"
#include "constants.cuh"
#include "ptx.cuh"
#include "step.cuh"

namespace nanoqwen {

constexpr int kCluster = 8, kSampleThreads = 512, kSampleWarps = kSampleThreads / kWarp;
constexpr int kRows = (kVocabRows + kCluster * kSampleThreads - 1) / (kCluster * kSampleThreads);  // ids of a thread, kSampleThreads apart
static_assert(kRows * kSampleThreads * 8 <= 220 * 1024, "the weights of a CTA's ids fit into its shared memory");
static_assert(kSampleWarps <= kWarp, "a warp adds up the warps");

constexpr double kUnit = 17592186044416.0;  // 2^44: the weight of the largest logit
static_assert(kVocabRows <= 1 << 19, "the sum of all weights fits into 64 bits");

// [rule]
struct Rule {
  double sharpness;  // 1 / temperature
  double top_p;      // 1 keeps all
  double top_k;      // a whole number; 0 keeps all
};
// [/rule]

// Whole numbers in the order of the logits; 0 is below them all and means: not kept.
__device__ __forceinline__ u32 key_of(float logit) {
  const u32 bits = __float_as_uint(logit + 0.0f);  // -0 becomes +0: they are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 weight_of(float logit, float largest, double sharpness) {
  return static_cast<u64>(exp((static_cast<double>(logit) - static_cast<double>(largest)) * sharpness) * kUnit + 0.5);
}

__device__ __forceinline__ u64 warp_sum(u64 v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kFullMask, v, step);
  return v;
}

constexpr int kDigits = 3;  // `select` asks for three sums at once

struct Sums {
  u64 of_warp[kDigits][kSampleWarps];
  u64 of_cta[2][kDigits][kCluster];  // the sets that take turns
};

// v[n] summed over all threads of the cluster, in all of them.
template <int kCount>
__device__ __forceinline__ void cluster_sum(u64 (&v)[kCount], Sums& shared, int& turn) {
  static_assert(kCount <= kDigits, "there is room for that many");
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const u64 sum = warp_sum(v[n]);
    if (lane_id() == 0) shared.of_warp[n][warp_id()] = sum;
  }
  __syncthreads();
  if (warp_id() < kCount) {
    const u64 sum = warp_sum(lane_id() < kSampleWarps ? shared.of_warp[warp_id()][lane_id()] : 0);
    if (lane_id() < kCluster) store_to_cta(&shared.of_cta[turn][warp_id()][cluster_rank()], lane_id(), sum);
  }
  cluster_barrier();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    v[n] = 0;
    for (int cta = 0; cta < kCluster; ++cta) v[n] += shared.of_cta[turn][n][cta];
  }
  turn ^= 1;
}

struct Found {
  u32 key;    // 0: all elements together do not reach the target
  u64 above;  // what the elements with larger keys measure
};

// The largest key such that the elements with that key or a larger one measure at least `target`. Two bits a round, from the top: of the
// four digits that may come next, take the largest that reaches it. key(row) and measure(row) are those of this thread's elements;
// keys of 0 never count. kBits is even.
// [select]
template <int kBits, class Key, class Measure>
__device__ __forceinline__ Found select(u64 target, Key key, Measure measure, Sums& shared, int& turn) {
  Found found{0, 0};
#pragma unroll 1
  for (int shift = kBits - 2; shift >= 0; shift -= 2) {
    u64 digit[kDigits] = {0, 0, 0};  // what the elements measure whose next digit is 1, 2, 3
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const u32 next = (key(row) ^ found.key) >> shift;  // below 4: the digits so far are those found
      if (next - 1 < 3) {
        const u64 m = measure(row);
        digit[0] += next == 1 ? m : 0;
        digit[1] += next == 2 ? m : 0;
        digit[2] += next == 3 ? m : 0;
      }
    }
    cluster_sum(digit, shared, turn);
#pragma unroll
    for (int d = 3; d > 0; --d) {
      if (found.above + digit[d - 1] >= target) {
        found.key |= static_cast<u32>(d) << shift;
        break;
      }
      found.above += digit[d - 1];
    }
  }
  return found;
}
// [/select]

__device__ constexpr int even_bits(int n) {  // bits that hold 0..n, rounded up to an even number
  int bits = 0;
  while (n >> bits) bits += 2;
  return bits;
}

}  // namespace nanoqwen

using namespace nanoqwen;

// random: 64 bits a position, of which the upper 53 are a number in [0, 1).
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kSampleThreads, 1)
sample(const float* logits, const u32* allowed, const Rule* rule, const u64* random, Step* step, int* told) {
  extern __shared__ u64 weights[];  // [row][thread]
  __shared__ Sums shared;
  constexpr int kPlaceBits = even_bits(kVocabRows);
  const int first = (blockIdx.x * kRows) * kSampleThreads + threadIdx.x;
  int turn = 0;
  const auto place = [&](int row) { return static_cast<u32>(kVocabRows - first - row * kSampleThreads); };  // larger for lower ids, at least 1

  allow_next_kernel();
  wait_for_previous_kernel();
  const int best = step->next_token, position = step->position;
  if (best < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) advance(step, told, -1);
    return;
  }
  cluster_barrier();  // all CTAs run, and all have read the step that the last one will change
  const double sharpness = rule->sharpness, top_p = rule->top_p;
  const u64 top_k = static_cast<u64>(rule->top_k);
  const float largest = logits[best];

#pragma unroll 4
  for (int row = 0; row < kRows; ++row) {
    const int id = first + row * kSampleThreads;
    weights[row * kSampleThreads + threadIdx.x] = id < kVocabRows ? weight_of(logits[id], largest, sharpness) : 0;
  }
  u32 keys[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int id = first + row * kSampleThreads;
    keys[row] = id < kVocabRows && is_allowed(allowed, id) ? key_of(logits[id]) : 0;
  }
  const auto weight = [&](int row) { return weights[row * kSampleThreads + threadIdx.x]; };  // only its own thread touches it
  const auto one = [](int) { return 1; };
  const auto kept_key = [&](int row) { return keys[row]; };
  const auto kept_place = [&](int row) { return keys[row] ? place(row) : 0; };
  const auto kept_weight = [&] {
    u64 sum[1] = {0};
#pragma unroll
    for (int row = 0; row < kRows; ++row) sum[0] += keys[row] ? weight(row) : 0;
    cluster_sum(sum, shared, turn);
    return sum[0];
  };

  if (top_k > 0) {  // those equal to the k-th all stay
    const u32 last = select<32>(top_k, kept_key, one, shared, turn).key;
#pragma unroll
    for (int row = 0; row < kRows; ++row) keys[row] = keys[row] < last ? 0 : keys[row];
  }

  if (top_p < 1) {
    const u64 all = kept_weight();
    const u64 wanted = static_cast<u64>(ceil(top_p * static_cast<double>(all)));
    const u64 target = wanted < 1 ? 1 : wanted > all ? all : wanted;
    const Found edge = select<32>(target, kept_key, weight, shared, turn);
    // All above the edge stay; of those equal to it the lowest ids, as many as reach the target.
    u64 equals[2] = {0, 0};  // how many, and their weights
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      equals[0] += keys[row] == edge.key;
      equals[1] += keys[row] == edge.key ? weight(row) : 0;
    }
    cluster_sum(equals, shared, turn);
    const u64 each = equals[1] / equals[0];
    const u64 needed = (target - edge.above + each - 1) / each;
    const auto edge_place = [&](int row) { return keys[row] == edge.key ? place(row) : 0; };
    const u32 last = needed < equals[0] ? select<kPlaceBits>(needed, edge_place, one, shared, turn).key : 1;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (keys[row] < edge.key || (keys[row] == edge.key && place(row) < last)) keys[row] = 0;
  }

  const u64 drawn = __umul64hi(random[position], kept_weight());  // below the sum, so some id is reached
  const u32 chosen = select<kPlaceBits>(drawn + 1, kept_place, weight, shared, turn).key;
  if (blockIdx.x == 0 && threadIdx.x == 0) advance(step, told, kVocabRows - static_cast<int>(chosen));
}
