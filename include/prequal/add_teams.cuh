// The last step of a gradient by columns: each team (a warp, a block, a cluster) left a row of partial sums.
#pragma once

#include <cstdint>

#include "prequal/reduce.cuh"
#include "prequal/vec.cuh"

namespace prequal {

// The sums of the teams, added in a fixed order. A block takes 32 columns, 32 threads a column.
template <class T>
__global__ void __launch_bounds__(1024)
    add_teams(const float* __restrict__ partial /*[teams, stride]*/, T* __restrict__ out /*[H]*/, int64_t teams,
              int64_t stride, int width) {
  __shared__ float scratch[32][33];
  const int column = blockIdx.x * 32 + threadIdx.x % 32, slice = threadIdx.x / 32;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 4
    for (int64_t team = slice; team < teams; team += 32) sum += partial[team * stride + column];
  }
  scratch[slice][threadIdx.x % 32] = sum;
  __syncthreads();

  sum = warp_sum(scratch[threadIdx.x % 32][slice]);
  const int own = blockIdx.x * 32 + slice;
  if (threadIdx.x % 32 == 0 && own < width) out[own] = from_float<T>(sum);
}

}  // namespace prequal
