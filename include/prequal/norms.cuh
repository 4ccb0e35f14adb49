// Euclidean norms of rows, from the sums of their squares.
#pragma once

#include "prequal/vec.cuh"

namespace prequal {

enum class NormForm { norm, inverse, square };

template <class T>
__device__ __forceinline__ void add_squares(float& sum, const Packet<T>& packet) {
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) sum = fmaf(packet[i], packet[i], sum);
}

// inverse: of what is below the smallest normal number, zero. NaN stays.
template <NormForm F>
__device__ __forceinline__ float norm_of_squares(float sum) {
  constexpr float tiny = 1.17549435e-38f;  // 2^-126
  if constexpr (F == NormForm::square) {
    return sum;
  } else {
    const float norm = sqrtf(sum);
    if constexpr (F == NormForm::norm) return norm;
    return norm < tiny ? 0.0f : 1.0f / norm;
  }
}

}  // namespace prequal
