// Values that say themselves which layer they belong to.
//
// A word written in layer step n (numbered through all tokens since the buffers were made) carries n & 1 in its lowest bit. The word is
// written exactly once a step, and nobody writes it for step n + 1 before everybody has read it in step n (README.md has the proof for
// each array). So a reader of step n finds either the value of step n - 1, with the other bit, and looks again, or the one it wants.
// No fence, no counter, no acquire: a word needs nothing but itself. The bit costs half a unit in the last place of an FP32 number.
//
// With kValidate = false the same words are exchanged behind counters with release and acquire: the plain version, to compare with.
#pragma once

#include "grid.cuh"
#include "plan.cuh"

namespace nanoqwen {

struct Args {
  const LayerPointers* layers;
  const u16* embedding;
  const u16* final_norm;
  const u8* head;
  const float2* rope;
  const u32* allowed;
  int* step;  // struct Step
  int* told;
  const int* block_table;
  u16* pool;  // [layer][K, V][page][kPageHalves]
  int pool_pages;
  int split_pages, splits;  // a split of attention has so many pages at least; at most so many splits
  int tokens;               // to decode in this launch
  int chooses;              // 1: the largest logit is the next token; 0: step->next_token only
  u32* words;               // kExchangeWords, zero at first
  u32* counts;              // kCountWords, zero at first
  u32* serial;              // tokens decoded since then
  float2* candidates;       // [kCtas]
  float* logits;
  u32* error;   // in the host's memory
  u32* stamps;  // [kCtas][kLayers][kEvents], then u64 [kCtas][4]
};

// Of one layer step: which bit, which counters.
struct Turn {
  u32 tag;
  u32* counts;  // of this set and layer
};

__device__ __forceinline__ u32 tag_of(u32 serial, int layer) { return (serial * kLayers + layer + 1) & 1; }
__device__ __forceinline__ u32* counts_of(const Args& a, u32 serial, int layer) { return a.counts + (serial & 1) * kSetWords + layer * kSlots * kLineWords; }

// [tag]
__device__ __forceinline__ u32 tagged(float v, u32 tag) {
  const u32 bits = __float_as_uint(v);
  return kValidate ? (bits & ~1u) | tag : bits;
}
// The lowest bit says whether any of these words is of another step.
__device__ __forceinline__ u32 differs(u32 v, u32 tag) { return v ^ tag; }
__device__ __forceinline__ u32 differs(uint2 v, u32 tag) { return (v.x ^ tag) | (v.y ^ tag); }
__device__ __forceinline__ u32 differs(uint4 v, u32 tag) { return (v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag); }
template <class Vector>
__device__ __forceinline__ bool stale(const Vector& v, u32 tag) { return kValidate && !kNoExchange && (differs(v, tag) & 1); }
// [/tag]

// The number in a word. With an even number of layers a layer has the same tag in every token, and the bit may stay; with an odd number it
// would make two runs of the same token differ in their last bits.
__device__ __forceinline__ float as_float(u32 word) { return __uint_as_float(kValidate && kLayers % 2 ? word & ~1u : word); }
__device__ __forceinline__ float4 as_floats(uint4 v) { return make_float4(as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w)); }

__device__ __forceinline__ void load_words(u32& v, const u32* p) { v = load_relaxed(p); }
__device__ __forceinline__ void load_words(uint2& v, const u32* p) { v = load_relaxed2(p); }
__device__ __forceinline__ void load_words(uint4& v, const u32* p) { v = load_relaxed4(p); }

// [settle]
// v[i] = the words at address(i), for those i that this lane needs; all loads are on their way before the first is looked at, and only
// lanes with stale words load again. Words that are not needed stay what they were. In two halves, so that other loads may follow the
// first: `ask_words` returns which words are wanted; `settle_words` waits for them, and all lanes of the warp must call it.
//
// "Before the first is looked at" is ptxas's to decide. Conditions between the loads, or a test that takes a predicate for every vector, made it put
// the tests between the loads: three trips to L2 for each look instead of one. So what is needed is settled before the first load, and tests are
// arithmetic on words until the last one. (The receipt persistent_instructions counts loads that wait for their neighbours all the same.)
template <int kCount, class Vector, class Needs, class Address>
__device__ __forceinline__ u32 ask_words(Vector (&v)[kCount], const Needs& needs, const Address& address) {
  int wanted = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) wanted |= needs(i) ? 1 << i : 0;
  keep_opaque(wanted);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (wanted >> i & 1) load_words(v[i], address(i));
  return wanted;
}

template <int kCount, class Vector, class Address>
__device__ __forceinline__ void settle_words(Vector (&v)[kCount], u32 wanted, u32 tag, const Address& address) {
  jitter<kJitter>();
  if (!kValidate || kNoExchange) return;
  int left[kCount];  // the lowest bit of each: this lane still waits for v[i]
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = wanted >> i;
#pragma unroll 1
  while (true) {
    int any = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      left[i] &= differs(v[i], tag);
      keep_opaque(left[i]);
      any |= left[i];
    }
    if (!any_lane(any & 1)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (left[i] & 1) load_words(v[i], address(i));
  }
}

template <int kCount, class Vector, class Needs, class Address>
__device__ __forceinline__ void read_words(Vector (&v)[kCount], u32 tag, const Needs& needs, const Address& address) {
  settle_words(v, ask_words(v, needs, address), tag, address);
}
// [/settle]

// Until a counter has reached `target`. One thread. Everything before the last arrival is visible in the plain version, nothing in the other.
__device__ __forceinline__ bool reached(const u32* count, u32 target) {
  return kNoExchange || static_cast<int>((kValidate ? load_relaxed(count) : load_acquire(count)) - target) >= 0;
}

// -------------------------------------------------------------------------------------------------------------- forward progress
// Every other wait of the kernel ends when its CTA's publisher gets on: it waits for all tiles of its consumers, which wait for the producer,
// and for all other CTAs. So the publisher alone counts cycles, and when it has waited for kPatience (two seconds at 2 GHz) it writes
// what it knows into the host's memory and traps: the launch ends with an error instead of hanging.

constexpr u64 kPatience = 2000000000ull * kPatienceSeconds;
constexpr int kErrorWords = 64;  // code, CTA, detail, layer; then at 8: `where` of each warp

// [watchdog]
template <class Done>
__device__ __forceinline__ void wait_watched(const Done& done, const Args& a, const Shared& s, u32 code, u32 detail) {
  if (done()) return;
  const u64 start = cycles();
  while (!done()) {
    if (cycles() - start > kPatience) {
      if (lane_id() == 0) {
        a.error[1] = blockIdx.x, a.error[2] = detail;
#pragma unroll 1
        for (int w = 0; w <= kConsumers; ++w) a.error[8 + w] = s.fixed.where[w];
        fence_system();
        a.error[0] = code;
        fence_system();
      }
      __syncwarp(__activemask());
      trap();
    }
  }
}
// [/watchdog]

// ------------------------------------------------------------------------------------------------------------------ stamps

enum Event {
  kLayerBegins, kHaveX, kHaveDigits, kQkvDone, kHaveQuery, kSplitDone, kVectorDone, kHaveVector, kODone, kHaveO, kGateUpDone, kHaveInner, kInnerDigits, kDownDone,
  kQkvOut, kVectorSeen, kOOut, kOSeen, kInnerOut, kInnerSeen, kDownOut, kDownSeen,  // the publisher's
  kRingFull, kInFlight,                                                         // cycles that the producer waited for room, and for landings
  kEvents
};

__device__ __forceinline__ void stamp(const Args& a, int layer, Event event) {
  if constexpr (kStamps) a.stamps[(blockIdx.x * kLayers + layer) * kEvents + event] = static_cast<u32>(cycles());
}

}  // namespace nanoqwen
