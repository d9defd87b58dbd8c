// page_open: the sequence takes a page; the page-boundary variant of the decode graph begins with it.
//
// Computes   block_table[position / page_tokens] = page, and zeros in that page of every layer, keys and values. A page that another
//            sequence left behind may hold anything, NaN included, and 0 * NaN is NaN: attention relies on finite rows.
// Moves      2 * layers * page bytes (0.9 MB for the 7B), once in 16 tokens.
// Launch     2 * layers CTAs of 256 threads.
#include "constants.cuh"
#include "kv_page.cuh"
#include "step.cuh"

using namespace nanoqwen;

// pool: [layer][K, V][page][kPageHalves], `pool_pages` pages each.
extern "C" __global__ void __launch_bounds__(256) page_open(u16* pool, int pool_pages, const Step* step, int* block_table) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) block_table[step->position / kPageTokens] = step->page;
  uint4* page = reinterpret_cast<uint4*>(pool + (static_cast<size_t>(blockIdx.x) * pool_pages + step->page) * kPageHalves);
  for (int i = threadIdx.x; i < kPageHalves / 8; i += 256) page[i] = make_uint4(0, 0, 0, 0);
}
