// The shapes in which the four projections of prefill are compiled (gemm_int4.cuh), for the sources that pair them with an epilogue.
//
// Wide       two consumer warpgroups, 256 rows an item, tiles of up to 128 tokens; 3 weight stages of 256 columns, 7 slabs of X.
// Middle     three warpgroups, up to 64 tokens; 3 weight stages, 8 slabs.
// Narrow     prompts of up to 32 tokens, bound by memory: three consumer warpgroups for up to 24 row tiles an item, so that the host can cut the rows
//            into as many items as there are SMs; 4 weight stages, of which only the item's own row tiles are filled.
// Launch     of each: min(SMs, items) CTAs of Shape::kThreads, one on an SM; dynamic shared memory Shape::kShared.
#pragma once

#include "gemm_epilogues.cuh"

namespace nanoqwen {

using Wide = GemmShape<2, 3, 7, 128, 32, 64, 128>;
using WideQkv = GemmShape<2, 3, 7, 128, 64, 80, 128>;
using Narrow = GemmShape<3, kGroup == 128 ? 4 : 3, 6, 32, 8, 16, 32>;  // smaller groups have more scales
using Middle = GemmShape<3, 3, 8, 64, 64>;

}  // namespace nanoqwen

#define NANOQWEN_GEMM(Shape) extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
