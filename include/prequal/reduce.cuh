// Sums over a warp and over a block, in an order that depends on nothing but the block's size: two runs agree bit for bit.
#pragma once

namespace prequal {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Every thread gets the sum. Threads: a multiple of 32, at most 1024. Callable once per __shared__ scratch and barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch /* [32] */) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  value = warp_sum(value);
  if (warps == 1) return value;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();

  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

}  // namespace prequal
