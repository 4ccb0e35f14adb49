// FP8 of both formats, and the division by a scale: the arithmetic, which the CPU tests cover. fp8.cuh has the instructions
// that some architectures have for it; these are the bits that all of them give.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "prequal/host_device.h"

namespace prequal {

enum class Fp8 { e4m3, e5m2 };

// e4m3 is torch's e4m3fn: no infinity, and one NaN of each sign. Ours is the positive one, in either format 0x7f.
template <Fp8 F>
struct Fp8Format {
  static constexpr int mantissa = F == Fp8::e4m3 ? 3 : 2, bias = F == Fp8::e4m3 ? 7 : 15;
  static constexpr float largest = F == Fp8::e4m3 ? 448.0f : 57344.0f;
  static constexpr uint32_t largest_code = F == Fp8::e4m3 ? 0x7e : 0x7b;
  static constexpr float smallest_normal = F == Fp8::e4m3 ? 0x1p-6f : 0x1p-14f;
  static constexpr float unit = F == Fp8::e4m3 ? 0x1p14f : 0x1p7f;  // whose last bit in fp32 is the smallest subnormal
};

inline constexpr uint32_t fp8_nan = 0x7f;

PREQUAL_HD uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

PREQUAL_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

PREQUAL_HD float div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

PREQUAL_HD float fma_of(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

inline constexpr uint32_t infinity_bits = 0x7f800000u;

// ---- conversion ------------------------------------------------------------------------------------------------------

// Round to nearest, ties to even; beyond the largest number that number, infinity too.
template <Fp8 F>
PREQUAL_HD uint32_t to_fp8(float value) {
  using Format = Fp8Format<F>;
  constexpr int shift = 23 - Format::mantissa;
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (size > infinity_bits) return fp8_nan;
  if (float_of(size) >= Format::largest) return sign | Format::largest_code;
  if (float_of(size) < Format::smallest_normal) {  // the addition rounds to whole subnormals, and counts them
    return sign | (bits_of(add(float_of(size), Format::unit)) & 0xffu);
  }
  constexpr uint32_t below_half = (1u << (shift - 1)) - 1, rebias = static_cast<uint32_t>(127 - Format::bias)
                                                                    << Format::mantissa;
  return sign | (((size + below_half + (size >> shift & 1u)) >> shift) - rebias);
}

template <Fp8 F>
PREQUAL_HD float from_fp8(uint32_t code) {
  using Format = Fp8Format<F>;
  const uint32_t sign = (code & 0x80u) << 24, size = code & 0x7fu;
  if (F == Fp8::e4m3 ? size == 0x7fu : size > 0x7cu) return float_of(0x7fc00000u);
  if (F == Fp8::e5m2 && size == 0x7cu) return float_of(sign | infinity_bits);
  // as bits of a float of a tiny exponent, subnormals included, brought up by a power of two
  constexpr float up = F == Fp8::e4m3 ? 0x1p120f : 0x1p112f;
  return mul(float_of(sign | size << (23 - Format::mantissa)), up);
}

// ---- scales ------------------------------------------------------------------------------------------------------------

// Below it 1 / scale would not be finite.
inline constexpr float smallest_scale = 0x1p-126f;

// amax: the largest finite |x| of what shares the scale, 0 where there is none. bound: an upper bound of the scale, +inf for
// none; with ue8m0 a power of two, as the scale then is (round_down).
PREQUAL_HD float scale_for(float amax, float largest, float bound, bool ue8m0) {
  float scale = amax > 0.0f ? div(amax, largest) : 1.0f;
  if (scale < smallest_scale) scale = smallest_scale;
  if (ue8m0) scale = float_of((bits_of(scale) + 0x7fffffu) & infinity_bits);  // up to a power of two
  return scale < bound ? scale : bound;
}

// To a power of two, of a positive normal number or infinity.
PREQUAL_HD float round_down(float value) { return float_of(bits_of(value) & infinity_bits); }

// ---- x / scale -----------------------------------------------------------------------------------------------------------

// `by`, and its reciprocal rounded to nearest; 0 where quotient() is not for this divisor and these values.
struct Divisor {
  float by, inverse;
};

// Where quotient() rounds as a division does, of every |value| <= most that is not too small to matter: nothing in it
// overflows, and of a quotient from 2^-18 on (half the smallest subnormal is 2^-10 or 2^-17) no remainder is below
// 2^-84 * 2^-23 * 2^-41 = 2^-148, so that none is rounded.
PREQUAL_HD bool divides_fast(float by, float most) {
  return by >= 0x1p-84f && by <= 0x1p84f && most <= mul(by, 0x1p30f);
}

PREQUAL_HD Divisor divisor_for(float by, float most) {
#ifdef __CUDA_ARCH__
  return {by, divides_fast(by, most) ? __frcp_rn(by) : 0.0f};
#else
  return {by, divides_fast(by, most) ? 1.0f / by : 0.0f};
#endif
}

// value / by, rounded to nearest, in three operations: what nvcc makes of a division, with the reciprocal taken out of the
// loop. The CPU tests hold it against division on the quotients that lie closest to the middle of two numbers, which are
// what a correction could miss. The remainder is q by - value, of the sign that lets the quotient of a zero keep its own.
PREQUAL_HD float quotient(float value, const Divisor& divisor) {
  const float near = mul(value, divisor.inverse);
  return fma_of(fma_of(near, divisor.by, -value), -divisor.inverse, near);
}

// Of any value and any divisor: whatever IEEE says.
PREQUAL_HD float any_quotient(float value, const Divisor& divisor) { return div(value, divisor.by); }

}  // namespace prequal
