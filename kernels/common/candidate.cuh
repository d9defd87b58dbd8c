// A candidate for the greedy choice, and which of two wins: every engine must break ties alike, so that their tokens are equal.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

struct Candidate {
  float value;
  int index;  // -1: a logit was not finite
};

// -1 wins over everything; then the larger value; then the smaller index.
__device__ __forceinline__ Candidate better(Candidate a, Candidate b) {
  if (a.index < 0 || b.index < 0) return {0.0f, -1};
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.index < b.index ? a : b;
}

__device__ __forceinline__ Candidate best_of_warp(Candidate c) {
  for (int step = 16; step > 0; step /= 2)
    c = better(c, {__shfl_xor_sync(kFullMask, c.value, step), __shfl_xor_sync(kFullMask, c.index, step)});
  return c;
}

}  // namespace nanoqwen
