// Sums over a warp, in an order that depends on nothing but the number of values: two runs agree bit for bit.
#pragma once

namespace prequal {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Several sums at once: lane i gets that of value i % Sums. Halving what is left to sum at each of the first steps takes
// 5 shuffles for 2 values and 6 for 4, where one after the other takes 10 and 20.
template <int Sums>
__device__ __forceinline__ float warp_sums(const float (&value)[Sums]) {
  static_assert(Sums == 1 || Sums == 2 || Sums == 4);
  float left[Sums];
#pragma unroll
  for (int i = 0; i < Sums; ++i) left[i] = value[i];
#pragma unroll
  for (int step = 1; step < Sums; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < Sums / 2 / step; ++i) {
      const float mine = upper ? left[2 * i + 1] : left[2 * i], theirs = upper ? left[2 * i] : left[2 * i + 1];
      left[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, step);
    }
  }
#pragma unroll
  for (int step = Sums; step < 32; step *= 2) left[0] += __shfl_xor_sync(0xffffffffu, left[0], step);
  return left[0];
}

// The sums that warp_sums left in the lanes, for every lane.
template <int Sums>
__device__ __forceinline__ void spread(float (&value)[Sums], float own) {
  if constexpr (Sums == 1) {
    value[0] = own;
  } else {
#pragma unroll
    for (int i = 0; i < Sums; ++i) value[i] = __shfl_sync(0xffffffffu, own, i);
  }
}

}  // namespace prequal
