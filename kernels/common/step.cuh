// What changes from token to token, in device memory: a captured graph keeps its arguments and reads these.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

struct Step {
  int token;      // the token to decode
  int position;   // its position; the cache holds `position` tokens before it
  int page;       // physical page of logical page position / page_tokens, used by the page-boundary variant only
  int next_token; // written by argmax
};

}  // namespace nanoqwen
