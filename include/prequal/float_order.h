// Floats as unsigned integers in the same order, so that one integer maximum is a comparison of floats.
#pragma once

#include <bit>
#include <cstdint>

#include "prequal/host_device.h"

namespace prequal {

// Below every float, and of none.
inline constexpr uint32_t below_all = 0;

// Zeros of both signs are one, NaN of any sign and payload is one and above infinity: as a sort of torch's has it.
PREQUAL_HD uint32_t in_order(float x) {
#ifdef __CUDA_ARCH__
  // The sum of -0 and +0 is +0, and a NaN that an addition makes is 0x7fffffff (PTX ISA, add.f32).
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
#else
  const uint32_t bits = x != x ? 0x7fffffffu : x == 0.0f ? 0u : std::bit_cast<uint32_t>(x);
#endif
  // all bits of a negative number, the sign of another: a shift and one operation of logic
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

PREQUAL_HD float from_order(uint32_t order) {
  const uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

}  // namespace prequal
