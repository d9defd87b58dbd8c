// page_open: the sequence takes a page; the page-boundary variant of the decode graph begins with it.
//
// Computes   zeros in the page of the step's position, in every layer, keys and values. A page that another sequence left behind may hold
//            anything, NaN included, and 0 * NaN is NaN: attention relies on finite rows. Which page that is the host has written into the
//            block table; it may do so several steps ahead.
// Moves      2 * layers * page bytes (0.9 MB for the 7B), once in 16 tokens.
// Launch     2 * layers CTAs of 256 threads.
#include "constants.cuh"
#include "kv_page.cuh"
#include "step.cuh"

using namespace nanoqwen;

// pool: [layer][K, V][page][kPageHalves], `pool_pages` pages each.
extern "C" __global__ void __launch_bounds__(256) page_open(u16* pool, int pool_pages, const Step* step, const int* block_table) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int number = block_table[step->position / kPageTokens];
  uint4* page = reinterpret_cast<uint4*>(pool + (static_cast<size_t>(blockIdx.x) * pool_pages + number) * kPageHalves);
  for (int i = threadIdx.x; i < kPageHalves / 8; i += 256) page[i] = make_uint4(0, 0, 0, 0);
}
