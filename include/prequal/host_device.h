// Arithmetic that both sides of the bus compute, and that the CPU tests therefore cover.
#pragma once

#ifdef __CUDACC__
#define PREQUAL_HD __host__ __device__ __forceinline__
#else
#define PREQUAL_HD inline
#endif

namespace prequal {

// Each operation rounds once: no contraction into FMA, so host, device and the PyTorch reference agree bit for bit.
PREQUAL_HD float sub(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

PREQUAL_HD float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

PREQUAL_HD float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

PREQUAL_HD double sub(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dsub_rn(a, b);
#else
  return a - b;
#endif
}

PREQUAL_HD double mul(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

PREQUAL_HD double add(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

}  // namespace prequal
