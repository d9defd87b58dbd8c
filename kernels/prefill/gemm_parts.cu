// gemm_parts: products of prefill whose FP32 sums the next kernel adds up, in as many parts as CTAs shared an item (gemm_shapes.cuh).
//
// A source for each epilogue: NVRTC compiles them side by side.
#include "gemm_shapes.cuh"

using namespace nanoqwen;

NANOQWEN_GEMM(Wide) gemm_parts(const Work work, const Operands o, const PartsOut out) { gemm_int4(work, o, out, Wide{}); }
NANOQWEN_GEMM(Middle) gemm_parts_middle(const Work work, const Operands o, const PartsOut out) { gemm_int4(work, o, out, Middle{}); }
NANOQWEN_GEMM(Few) gemm_parts_few(const Work work, const Operands o, const PartsOut out) { gemm_int4(work, o, out, Few{}); }
