// gemm_swiglu: gate and up of prefill with silu(gate) * up behind them (gemm_shapes.cuh).
//
// A source for each epilogue: NVRTC compiles them side by side.
#include "gemm_shapes.cuh"

using namespace nanoqwen;

NANOQWEN_GEMM(Wide) gemm_swiglu(const Work work, const Operands o, const SwigluOut out) { gemm_int4(work, o, out, Wide{}); }
NANOQWEN_GEMM(Middle) gemm_swiglu_middle(const Work work, const Operands o, const SwigluDirect out) { gemm_int4(work, o, out, Middle{}); }
NANOQWEN_GEMM(Few) gemm_swiglu_few(const Work work, const Operands o, const SwigluDirect out) { gemm_int4(work, o, out, Few{}); }
