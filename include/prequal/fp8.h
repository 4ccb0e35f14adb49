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

// ---- x / scale -----------------------------------------------------------------------------------------------------------

// `by`, and its reciprocal: rounded to nearest for quotient(), in two parts for short_quotient(). The first part is 0
// where neither is for this divisor and these values.
struct Divisor {
  float by, inverse, rest;
};

// Where quotient() rounds as a division does, of every |value| <= most that is not too small to matter: nothing in it
// overflows, and of a quotient from 2^-18 on (half the smallest subnormal is 2^-10 or 2^-17) no remainder is below
// 2^-84 * 2^-23 * 2^-41 = 2^-148, so that none is rounded.
PREQUAL_HD bool divides_fast(float by, float most) {
  return by >= 0x1p-84f && by <= 0x1p84f && most <= mul(by, 0x1p30f);
}

PREQUAL_HD Divisor divisor_for(float by, float most) {
#ifdef __CUDA_ARCH__
  return {by, divides_fast(by, most) ? __frcp_rn(by) : 0.0f, 0.0f};
#else
  return {by, divides_fast(by, most) ? 1.0f / by : 0.0f, 0.0f};
#endif
}

// value / by, rounded to nearest, in three operations: what nvcc makes of a division, with the reciprocal taken out of the
// loop. The CPU tests hold it against division on the quotients that lie closest to the middle of two numbers, which are
// what a correction could miss. The remainder is q by - value, of the sign that lets the quotient of a zero keep its own.
PREQUAL_HD float quotient(float value, const Divisor& divisor) {
  const float near = mul(value, divisor.inverse);
  return fma_of(fma_of(near, divisor.by, -value), -divisor.inverse, near);
}

// Of values of at most 11 significant bits, as halves are: two operations, whose result is the quotient times 1 to
// 1 + 2^-40, rounded. It is not always the float that a division gives, but always one of the same FP8 number. That number
// changes where a quotient passes the middle of two FP8 numbers by half a last bit of fp32. No quotient of 11 bits by 24
// lies on such an edge, and all lie at least 2^-36 of themselves away but one: 2^n by (2 - 2^-23) 2^m at half of the
// smallest subnormal, 2^-48 above its edge, and what is here is never below the quotient. The CPU tests go through every
// significand of 11 bits and every edge, with the divisors next to it.
//
// near: 1 / by, within 2^-23 of itself, which is what the instruction promises.
PREQUAL_HD Divisor short_divisor_from(float by, float near, float most) {
  const float below = mul(near, 1.0f - 0x1p-22f);  // than 1 / by: else the rest of a zero could be of the other sign
  const float rest = mul(fma_of(-by, below, 1.0f), mul(near, 1.0f + 0x1p-20f));
  return {by, divides_fast(by, most) ? below : 0.0f, rest};
}

PREQUAL_HD Divisor short_divisor_for(float by, float most) {
#ifdef __CUDA_ARCH__
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(by));
  return short_divisor_from(by, near, most);
#else
  return short_divisor_from(by, 1.0f / by, most);
#endif
}

PREQUAL_HD float short_quotient(float value, const Divisor& divisor) {
  return fma_of(value, divisor.inverse, mul(value, divisor.rest));
}

// ---- scales ------------------------------------------------------------------------------------------------------------

// Below it 1 / scale would not be finite.
inline constexpr float smallest_scale = 0x1p-126f;

// largest is 7 * 2^n, and no quotient of a float by that lies within 2^-28 of itself of the middle of two floats: three
// operations round it as a division does. One that is smaller than a scale may be is rounded otherwise, and not used.
// amax: the largest finite |x| of what shares the scale, 0 where there is none. bound: an upper bound of the scale, +inf for
// none; with ue8m0 a power of two, as the scale then is (round_down).
PREQUAL_HD float scale_for(float amax, float largest, float bound, bool ue8m0) {
  float scale = amax > 0.0f ? quotient(amax, {largest, 1.0f / largest, 0.0f}) : 1.0f;
  if (scale < smallest_scale) scale = smallest_scale;
  if (ue8m0) scale = float_of((bits_of(scale) + 0x7fffffu) & infinity_bits);  // up to a power of two
  return scale < bound ? scale : bound;
}

// To a power of two, of a positive normal number or infinity.
PREQUAL_HD float round_down(float value) { return float_of(bits_of(value) & infinity_bits); }

}  // namespace prequal
