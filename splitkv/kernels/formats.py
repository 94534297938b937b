"""Numbers of one byte: what the bytes of a quantised cache mean, and how numbers become such bytes.

A cache of them comes to the kernels as bytes, with its format as a constant: every format can then be read on every
GPU, and in Triton's interpreter. Each of their numbers is a float16 too.
"""

import triton
import triton.language as tl

PLAIN: tl.constexpr = tl.constexpr(0)  # not quantised: the elements are what they are
E4M3: tl.constexpr = tl.constexpr(1)  # float8_e4m3fn: no infinities, NaN is 0x7f and 0xff
E5M2: tl.constexpr = tl.constexpr(2)  # float8_e5m2: the upper half of a float16
INT8: tl.constexpr = tl.constexpr(3)
E4M3_FNUZ: tl.constexpr = tl.constexpr(4)  # no infinities, no negative zero: 0x80 is NaN
E5M2_FNUZ: tl.constexpr = tl.constexpr(5)


@triton.jit
def decode_bytes(code, FORMAT: tl.constexpr):
    """The float16 that each byte stands for, by integer operations that every target has."""
    if FORMAT == INT8:
        return code.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        word = code.to(tl.int16)
        if FORMAT == E5M2:
            return (word << 8).to(tl.float16, bitcast=True)
        elif FORMAT == E5M2_FNUZ:
            # Half of what a float16 with these upper bits is; where that is infinite or none, an exponent less.
            upper = (word & 0x7F) << 8
            half = upper.to(tl.float16, bitcast=True) * 0.5
            size = tl.where(upper >= 0x7C00, (upper - 0x0400).to(tl.float16, bitcast=True), half)
            number = tl.where(word >= 0x80, -size, size)
            return tl.where(word == 0x80, float("nan"), number).to(tl.float16)
        else:
            # A float16 with the same mantissa and exponent field is smaller by the difference of their biases.
            bits = ((word & 0x80) << 8) | ((word & 0x7F) << 7)
            if FORMAT == E4M3:
                number = bits.to(tl.float16, bitcast=True) * 256.0
                return tl.where((word & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
            else:
                number = bits.to(tl.float16, bitcast=True) * 128.0
                return tl.where(word == 0x80, float("nan"), number).to(tl.float16)


@triton.jit
def decoded(raw, FORMAT: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Elements of a cache as numbers to compute with; those of a plain cache as they are."""
    if FORMAT == PLAIN:
        return raw
    elif PTX:
        return decode_bytes_ptx(raw, FORMAT).to(dtype)
    else:
        return decode_bytes(raw, FORMAT).to(dtype)


def _assembly(low: tuple[int, int], high: tuple[int, int]) -> tuple[tl.constexpr, tl.constexpr, tl.constexpr]:
    """Instructions of NVIDIA's sm_89 and newer by which the bytes of a word become float16, of E4M3, E5M2 and INT8.

    $2 is the word; `low` tells which of its bytes, counted from 0, become the halves of $0, and `high` those of $1.
    """
    (a, b), (c, d) = low, high
    sort = "mov.b32 sorted, $2" if (a, b, c, d) == (0, 1, 2, 3) else f"prmt.b32 sorted, $2, 0, 0x{d}{c}{b}{a}"
    e4m3 = f"""
        {{
        .reg .b32 sorted;
        .reg .b16 first, second;
        {sort};
        mov.b32 {{first, second}}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        }}
        """
    e5m2 = f"""
        prmt.b32 $0, $2, 0, 0x{b}4{a}4;
        prmt.b32 $1, $2, 0, 0x{d}4{c}4;
        """
    # Below the upper byte of 1024 a byte b is the number 1024 + b: 1152 + the integer, if its sign bit was flipped.
    int8 = f"""
        {{
        .reg .b32 shifted, magic, bias;
        mov.b32 magic, 0x64646464;
        mov.b32 bias, 0x64806480;
        xor.b32 shifted, $2, 0x80808080;
        prmt.b32 $0, shifted, magic, 0x4{b}4{a};
        prmt.b32 $1, shifted, magic, 0x4{d}4{c};
        sub.rn.f16x2 $0, $0, bias;
        sub.rn.f16x2 $1, $1, bias;
        }}
        """
    return tl.constexpr(e4m3), tl.constexpr(e5m2), tl.constexpr(int8)


E4M3_IN_TURN, E5M2_IN_TURN, INT8_IN_TURN = _assembly((0, 1), (2, 3))
E4M3_PAIRS, E5M2_PAIRS, INT8_PAIRS = _assembly((0, 2), (1, 3))


@triton.jit
def decode_bytes_ptx(code, FORMAT: tl.constexpr):
    """As decode_bytes, four at a time by instructions of NVIDIA's sm_89 and newer; the formats that these GPUs have."""
    ASM: tl.constexpr = E4M3_IN_TURN if FORMAT == E4M3 else E5M2_IN_TURN if FORMAT == E5M2 else INT8_IN_TURN
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [code], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def decode_pairs(pairs, FORMAT: tl.constexpr):
    """The float16 numbers of the lower and of the upper byte of 16-bit integers, on NVIDIA's sm_89 and newer.

    Two bytes of a row go through shared memory together: matrix operands whose rows must be turned for the product
    (those of values) can be loaded so in pieces of 16 bits, but not of 8.
    """
    ASM: tl.constexpr = E4M3_PAIRS if FORMAT == E4M3 else E5M2_PAIRS if FORMAT == E5M2 else INT8_PAIRS
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def largest(FORMAT: tl.constexpr):
    """The largest finite number of a format."""
    if FORMAT == E4M3:
        return 448.0
    elif FORMAT == E4M3_FNUZ:
        return 240.0
    elif FORMAT == INT8:
        return 127.0
    else:
        return 57344.0


@triton.jit
def encode_bytes(x, FORMAT: tl.constexpr):
    """float32 numbers as bytes of a format: to nearest, ties to even; beyond the largest finite number (infinities too)
    that number; NaN as NaN, or 0 where the format has none (INT8)."""
    if FORMAT == INT8:
        # Adding and taking away 1.5 · 2^23 rounds to an integer. -128 is a number too.
        bounded = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
        return ((bounded + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 3 if FORMAT == E4M3 or FORMAT == E4M3_FNUZ else 2
        IEEE_BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
        BIAS: tl.constexpr = IEEE_BIAS + 1 if FORMAT == E4M3_FNUZ or FORMAT == E5M2_FNUZ else IEEE_BIAS
        SHIFT: tl.constexpr = 23 - MANTISSA
        sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
        size = tl.minimum(tl.abs(x), largest(FORMAT))
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
        # Below the least normal number all are equally far apart; added to 2^23 times that distance, a float32 is
        # rounded to it, and the last bits count the distances. The first normal number comes out right too.
        MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
        magic = (tl.zeros_like(bits) + MAGIC).to(tl.float32, bitcast=True)
        subnormal = (size + magic).to(tl.uint32, bitcast=True) - MAGIC
        code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
        if BIAS == IEEE_BIAS:
            code = tl.where(x == x, code, 0x7F) | sign
        else:
            code = tl.where(x == x, tl.where(code == 0, 0, code | sign), 0x80)
        return code.to(tl.uint8)
