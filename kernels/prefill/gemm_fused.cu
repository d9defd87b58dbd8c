// gemm_qkv and gemm_residual: products of prefill whose K is whole, with bias, RoPE and pages, or the residual, behind them (gemm_shapes.cuh).
//
// A source for each epilogue: NVRTC compiles them side by side.
#include "gemm_shapes.cuh"

using namespace nanoqwen;

NANOQWEN_GEMM(WideQkv) gemm_qkv(const Work work, const Operands o, const QkvOut out) { gemm_int4(work, o, out, WideQkv{}); }
NANOQWEN_GEMM(Wide) gemm_residual(const Work work, const Operands o, int rows, float* residual, const float* factor) { gemm_int4(work, o, ResidualOut(rows, residual, factor), Wide{}); }
