// gemm_digits: products of prefill for up to 8 and up to 16 tokens whose X comes as digits (gemm_digits.cuh), each with what follows it (gemm_epilogues.cuh).
//
// gemm_parts_digits     q, k and v behind a norm, and down behind quantise_tiles: FP32 sums in parts.
// gemm_swiglu_digits    gate and up behind a norm, with silu(gate) * up behind them: whole items, the other operand of the row tile in the same warp.
#include "gemm_digits.cuh"
#include "gemm_epilogues.cuh"

using namespace nanoqwen;

#define NANOQWEN_DIGITS extern "C" __global__ void __launch_bounds__(kWarp * kDigitWarps, 1)

NANOQWEN_DIGITS gemm_parts_digits8(const Work work, const DigitOperands o, const PartsOut out) { gemm_digits<8>(work, o, out); }
NANOQWEN_DIGITS gemm_parts_digits16(const Work work, const DigitOperands o, const PartsOut out) { gemm_digits<16>(work, o, out); }
NANOQWEN_DIGITS gemm_swiglu_digits8(const Work work, const DigitOperands o, const SwigluDirect out) { gemm_digits<8>(work, o, out); }
NANOQWEN_DIGITS gemm_swiglu_digits16(const Work work, const DigitOperands o, const SwigluDirect out) { gemm_digits<16>(work, o, out); }
