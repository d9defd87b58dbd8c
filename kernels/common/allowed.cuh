// Which ids may be chosen: a bit an id. Rows of the head past the tokenizer's entries are padding, and an id below may have no token.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

// The lanes of a warp ask for 32 ids that follow each other, and share one word.
__device__ __forceinline__ bool is_allowed(const u32* allowed, int id) { return allowed[id / 32] >> id % 32 & 1; }

}  // namespace nanoqwen
