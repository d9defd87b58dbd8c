// int4_unpack.cuh: one ValueShuffle word (eight signed 4-bit codes) becomes
// arithmetic operands, five ways.
//
// Computes  word (32 bits, layout id 1) -> its codes c[0..7], each in [-8, 7],
//           as half2 pairs, FP16 bit patterns, FP32 or INT8. No scale: one
//           serves 128 weights and is cheaper after the sum than before it.
// Moves     nothing. Registers in, registers out; no memory, no barrier, no
//           step across lanes. Every lane does the same work.
// Layout    code i sits at bit {0, 16, 4, 20, 8, 24, 12, 28}[i], which is
//           quant.shuffle_bits of config/nanoqwen.yaml:
//
//             bit  31..28 27..24 23..20 19..16 | 15..12 11..8  7..4  3..0
//             code   c7     c5     c3     c1   |   c6    c4     c2    c0
//
//           so `word >> 4*j & 0x000F000F` holds the pair (c[2j], c[2j+1]),
//           one code in each 16-bit half.
// Trick     a two's-complement nibble with its top bit flipped is c + 8, a
//           plain number from 0 to 15. The FP16 ways flip that bit in the
//           LOP3 that isolates the nibble, and remove the 8 later.
// Pairs     a half2 is held as the 32 bits it is, lower half first. Operands
//           of tensor cores are the same, and this file needs no header of
//           the CUDA toolkit: NVRTC compiles it on a machine that has none.
//
// Cost      SASS instructions for eight weights, before any multiply; counted
//           by tests/unit/test_int4_unpack_cuda.py:
//
// unpack_bias          9   1 SHF, 4 LOP3, 2 HADD2, 2 HFMA2    half2
// unpack_subnormal     5   1 SHF, 4 LOP3                      FP16 patterns
// unpack_prmt         11   1 SHF, 2 LOP3, 4 PRMT, 4 HADD2     half2
// unpack_sign_extend  23   15 shifts, 8 I2FP                  FP32
// unpack_bytes         3   1 SHF, 2 LOP3                      INT8
//
// Lost      `(word & mask) ^ flip` in plain C++. An instruction carries one
//           32-bit immediate; rather than keep the other in a register, nvcc
//           13.0 makes two LOP3 of it, inside loops too. and_xor insists.
#pragma once

namespace nanoqwen {
namespace int4 {  // CUDA's vector type of this name is ::int4 from here

using u32 = unsigned int;

// The layout that this file takes apart. A kernel compares it with the layout
// id of the pack file that it was compiled for.
constexpr int kLayoutId = 1;

// [instructions]
// (a & mask) ^ flip as a single LOP3. The instruction looks every bit up in a
// truth table of eight entries. Write the expression with 0xF0, 0xCC and 0xAA,
// which is what the three inputs look like over the eight cases, and it
// computes its own table.
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 flip) {
    constexpr int table = (0xF0 & 0xCC) ^ 0xAA;
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, %4;"
        : "=r"(d) : "r"(a), "r"(mask), "r"(flip), "n"(table));
    return d;
}

// Byte k of the result is the byte that hex digit k of the selector names:
// 0 to 3 are those of a, 4 to 7 those of b.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// a - b in both halves. Subnormal numbers count.
__device__ __forceinline__ u32 hsub2(u32 a, u32 b) {
    u32 d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// a * b + c in both halves, rounded once, after the sum.
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// [/instructions]

// [bias]
// pair[j] = (c[2j], c[2j+1]) as half2, through a bias of 1024.
//
// Between 1024 and 2048 neighbouring FP16 numbers are 1 apart, so the pattern
// 0x6400 | n is the number 1024 + n. One LOP3 makes n = c + 8 and sets the
// 0x6400: the half is 1032 + c, and subtracting 1032 leaves c. Exact: the
// operands are integers below 2048, and so is their difference.
//
// Codes that lie four bits higher stay there. Their half is 1024 + 16 (c + 8),
// at most 1264, and x / 16 - 72 is c. Exact, because a fused multiply-add
// rounds only its result, and the result is a small integer. So two pairs need
// no shift and the other two share one.
//
// 9 instructions: 1 SHF, 4 LOP3, 2 HADD2, 2 HFMA2.
__device__ __forceinline__ void unpack_bias(u32 word, u32 (&pair)[4]) {
    constexpr u32 bias = 0x64086408u;       // 1032, twice
    constexpr u32 sixteenth = 0x2C002C00u;  // 1/16
    constexpr u32 offset = 0xD480D480u;     // -72 = -(1024 / 16 + 8)
    const u32 upper = word >> 8;
    const u32 p0 = and_xor(word, 0x000F000Fu, 0x64086408u);
    const u32 p1 = and_xor(word, 0x00F000F0u, 0x64806480u);
    const u32 p2 = and_xor(upper, 0x000F000Fu, 0x64086408u);
    const u32 p3 = and_xor(upper, 0x00F000F0u, 0x64806480u);
    pair[0] = hsub2(p0, bias);
    pair[1] = hfma2(p1, sixteenth, offset);
    pair[2] = hsub2(p2, bias);
    pair[3] = hfma2(p3, sixteenth, offset);
}
// [/bias]

// [subnormal]
// bits[j] = FP16 patterns of the pair (c[2j] + 8, c[2j+1] + 8), in units of
// 2^-24 for even j and of 2^-20 for odd j: operands for a tensor core, with no
// floating-point instruction spent on them.
//
// With all exponent bits zero, an FP16 pattern n is the subnormal number
// n * 2^-24, and tensor cores take subnormal inputs at full value. Here n is
// c + 8, or 16 (c + 8) in the pairs that were not shifted: at most 240, below
// the 1024 where exponent bits begin. Exact.
//
// The caller owes two corrections, both outside the inner loop. The +8: start
// the accumulator at -8 times the sum of the activations, in the same units.
// The units: 2^24 goes into the group's FP32 scale, and activations beside odd
// pairs come as x / 16 (exact unless |x| is below 2^-10, and then off by no
// more than 2^-25). A product of 4 and 11 bits is exact in FP32.
//
// 5 instructions: 1 SHF, 4 LOP3. Not for HFMA2: its factor would have to be
// 2^24, which FP16 does not have.
__device__ __forceinline__ void unpack_subnormal(u32 word, u32 (&bits)[4]) {
    const u32 upper = word >> 8;
    bits[0] = and_xor(word, 0x000F000Fu, 0x00080008u);
    bits[1] = and_xor(word, 0x00F000F0u, 0x00800080u);
    bits[2] = and_xor(upper, 0x000F000Fu, 0x00080008u);
    bits[3] = and_xor(upper, 0x00F000F0u, 0x00800080u);
}
// [/subnormal]

// [prmt]
// pair[j] = (c[2j], c[2j+1]) as half2, the exponent put in by permuting bytes.
//
// Two LOP3 make four bytes each of n = c + 8: of c0, c4, c1, c5 from the low
// nibbles (byte 0 first) and of c2, c6, c3, c7 from the high ones. The codes
// of a pair are two bytes apart, so one PRMT picks both and puts a byte of
// 0x64 above each. That is 1024 + n again, and the same exact subtraction.
//
// 11 instructions: 1 SHF, 2 LOP3, 4 PRMT, 4 HADD2.
__device__ __forceinline__ void unpack_prmt(u32 word, u32 (&pair)[4]) {
    constexpr u32 bias = 0x64086408u;  // 1032, twice
    constexpr u32 exponent = 0x64646464u;
    const u32 low = and_xor(word, 0x0F0F0F0Fu, 0x08080808u);
    const u32 high = and_xor(word >> 4, 0x0F0F0F0Fu, 0x08080808u);
    pair[0] = hsub2(prmt(low, exponent, 0x4240), bias);
    pair[1] = hsub2(prmt(high, exponent, 0x4240), bias);
    pair[2] = hsub2(prmt(low, exponent, 0x4341), bias);
    pair[3] = hsub2(prmt(high, exponent, 0x4341), bias);
}
// [/prmt]

// [sign-extend]
// value[i] = c[i] as FP32. What one writes first; here to be measured against.
//
// A left shift puts the nibble at the top of the word, an arithmetic shift
// right by 28 brings it back with its sign, a conversion makes a float of the
// integer. Every step is exact. Nothing is shared between the eight weights,
// so the cost is paid eight times (code 7 is on top already: no left shift).
//
// 23 instructions: 15 shifts (the compiler writes left ones as IMAD.SHL) and
// 8 I2FP.
__device__ __forceinline__ void unpack_sign_extend(u32 word,
                                                   float (&value)[8]) {
    constexpr int shift[8] = {0, 16, 4, 20, 8, 24, 12, 28};
    for (int i = 0; i < 8; ++i) {
        const int code = static_cast<int>(word << (28 - shift[i])) >> 28;
        value[i] = static_cast<float>(code);
    }
}
// [/sign-extend]

// [bytes]
// bytes[0] = 16 * (c0, c4, c1, c5) and bytes[1] = 16 * (c2, c6, c3, c7) as
// signed bytes, byte 0 first: operands of dp4a and of integer tensor cores.
// The activations must come as INT8 in the same order of columns.
//
// A nibble in the upper half of a byte is worth 16 times as much, sign and
// all: two's complement needs no flip and no zero point. 16 c lies in
// [-128, 112], so bytes hold it exactly; the 16 goes into the group's scale.
//
// 3 instructions: 1 SHF, 2 LOP3.
__device__ __forceinline__ void unpack_bytes(u32 word, u32 (&bytes)[2]) {
    bytes[0] = (word << 4) & 0xF0F0F0F0u;
    bytes[1] = word & 0xF0F0F0F0u;
}
// [/bytes]

}  // namespace int4
}  // namespace nanoqwen
