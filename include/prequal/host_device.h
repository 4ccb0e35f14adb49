// Arithmetic that both sides of the bus compute, and that the CPU tests therefore cover.
#pragma once

#include <concepts>

#ifdef __CUDACC__
#define PREQUAL_HD __host__ __device__ __forceinline__
#else
#define PREQUAL_HD inline
#endif

namespace prequal {

// Each operation rounds once, in float or in double: no contraction into FMA, so host, device and the PyTorch reference
// agree bit for bit.
template <std::floating_point T>
PREQUAL_HD T sub(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return __fsub_rn(a, b);
  return __dsub_rn(a, b);
#else
  return a - b;
#endif
}

template <std::floating_point T>
PREQUAL_HD T mul(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return __fmul_rn(a, b);
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

template <std::floating_point T>
PREQUAL_HD T add(T a, T b) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return __fadd_rn(a, b);
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

}  // namespace prequal
