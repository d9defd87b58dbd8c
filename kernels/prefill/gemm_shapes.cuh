// The shapes in which the four projections of prefill are compiled (gemm_int4.cuh), for the sources that pair them with an epilogue.
//
// Wide       two consumer warpgroups, 256 rows an item, tiles of up to 128 tokens; 3 weight stages of 256 columns, 7 slabs of X.
// Middle     up to 64 tokens: three consumer warpgroups, up to 24 row tiles an item, so that the rows can be cut into as many whole items as there are
//            SMs; 3 weight stages, 8 slabs.
// Few        up to 32 tokens: as Middle, with smaller slabs, which leaves room for a fourth weight stage. A product of a warpgroup takes as long for 8
//            tokens as for 64, so one width serves.
// Launch     as many CTAs as the plan says (nanoqwen/cuda/prefill_plan.py) of Shape::kThreads, one on an SM; dynamic shared memory Shape::kShared.
#pragma once

#include "gemm_epilogues.cuh"
#include "gemm_int4.cuh"

namespace nanoqwen {

// Smaller groups have more scales: two widths fit into the registers, and one weight stage less into shared memory.
template <int kGroupSize> struct WideFor { using Shape = GemmShape<2, 3, 7, 128, 64, 128>; };
template <> struct WideFor<128> { using Shape = GemmShape<2, 3, 7, 128, 64, 96, 128>; };

using Wide = WideFor<kGroup>::Shape;
using Middle = GemmShape<3, 3, 8, 64, 64>;
using Few = GemmShape<3, kGroup == 128 ? 4 : 3, 6, 32, 32>;

}  // namespace nanoqwen

#define NANOQWEN_GEMM(Shape) extern "C" __global__ void __launch_bounds__(Shape::kThreads, 1)
