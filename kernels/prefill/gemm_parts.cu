// gemm_parts: products of prefill whose FP32 sums the next kernel adds up, K split over CTAs or not (gemm_shapes.cuh).
//
// A source for each epilogue: NVRTC compiles them side by side.
#include "gemm_shapes.cuh"

using namespace nanoqwen;

NANOQWEN_GEMM(Wide) gemm_parts(const Work work, const Operands o, int rows, float* out) { gemm_int4(work, o, PartsOut(rows, out), Wide{}); }
NANOQWEN_GEMM(Middle) gemm_parts_middle(const Work work, const Operands o, int rows, float* out) { gemm_int4(work, o, PartsOut(rows, out), Middle{}); }
NANOQWEN_GEMM(Narrow) gemm_parts_narrow(const Work work, const Operands o, int rows, float* out) { gemm_int4(work, o, PartsOut(rows, out), Narrow{}); }
