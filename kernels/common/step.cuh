// What changes from token to token, in device memory: a captured graph keeps its arguments and reads these.
//
// The last kernel of a step writes what the next step reads, so a step can follow another without the host in between. Whoever wants
// another token or position writes them here before the launch.
#pragma once

#include "ptx.cuh"

namespace nanoqwen {

struct Step {
  int token;       // the token to decode
  int position;    // its position; the cache holds `position` tokens before it
  int next_token;  // the id chosen after it; -1: a logit was not finite
};

// One thread, at the end of a step: `id` was chosen. `told` lies in the host's memory, an int a position; the host reads
// told[position] when this step has finished.
// [advance]
__device__ __forceinline__ void advance(Step* step, int* told, int id) {
  told[step->position] = id;
  step->next_token = id;
  step->token = id < 0 ? 0 : id;  // after a -1 the host drops the steps that it launched ahead; they still need a row to read
  step->position += 1;
}
// [/advance]

}  // namespace nanoqwen
