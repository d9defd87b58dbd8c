// One row of the embedding, wherever it lies.
//
// A model with a tied head multiplies with the embedding at the end of every token, so it is stored in the head's tiles
// ([tile][slice][16 rows][32], lm_head.cu); an untied one is only looked up and stays row-major.
#pragma once

#include "constants.cuh"
#include "ptx.cuh"

namespace nanoqwen {

// Elements i and i + 1 (i even) of `token`'s row, as two halves.
__device__ __forceinline__ u32 embedding_pair(const u16* embedding, int token, int i) {
  size_t at = static_cast<size_t>(token) * kHidden + i;
  if constexpr (kTiedHead) at = ((static_cast<size_t>(token / 16) * (kHidden / 32) + i / 32) * 16 + token % 16) * 32 + i % 32;
  return *reinterpret_cast<const u32*>(embedding + at);
}

}  // namespace nanoqwen
