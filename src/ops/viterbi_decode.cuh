// What the kernels of viterbi_decode share: a call as they see it, and the values that they read.
#pragma once

#include <cmath>

#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/vec.cuh"

namespace prequal::ops::viterbi {

inline constexpr unsigned whole_warp = 0xffffffffu;
inline constexpr float lowest = -INFINITY;

__device__ __forceinline__ float value_at(const void* from, DType dtype, int64_t place) {
  if (dtype == DType::f32) return static_cast<const float*>(from)[place];
  if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(from)[place]);
  return to_float(static_cast<const __half*>(from)[place]);
}

// Calls body(pointer) with the type that is pointed at.
template <class Body>
__device__ __forceinline__ void by_dtype(const void* from, DType dtype, Body&& body) {
  if (dtype == DType::f32) return body(static_cast<const float*>(from));
  if (dtype == DType::bf16) return body(static_cast<const __nv_bfloat16*>(from));
  body(static_cast<const __half*>(from));
}

// What is added at the first or at the last step.
struct Ends {
  const void* at;  // [S], [B, S] or null
  DType dtype;
  int64_t batch_stride, state_stride;

  __device__ __forceinline__ float operator()(int64_t sequence, int state) const {
    return at ? value_at(at, dtype, sequence * batch_stride + state * state_stride) : 0.0f;
  }
};

struct Decode {
  const void* emissions;  // [B, T, S]
  DType dtype;
  int64_t batch_stride, step_stride, state_stride;
  const void* moves;  // [S, S], [B, S, S] or [T, S, S]
  DType moves_dtype;
  int64_t sequence_stride, matrix_stride;  // of moves, from sequence to sequence and from step to step; 0: the same
  int64_t from_stride, to_stride;
  Ends first, last;
  const void* lengths;  // [B] or null
  bool wide;            // int64, else int32
  int64_t length_stride;
  int64_t batch;
  int steps, states, band;
  int64_t rows;    // of a warp or a sequence in the workspace
  void* origins;   // [B, rows, S]
  float* kept;     // [B, T, S] or null: the best of the candidates of each step
  int64_t* paths;  // [B, T]
  float* scores;   // [B] or null

  __device__ __forceinline__ int length_of(int64_t sequence) const {
    if (!lengths) return steps;
    const int64_t place = sequence * length_stride;
    const int64_t said =
        wide ? static_cast<const int64_t*>(lengths)[place] : static_cast<const int32_t*>(lengths)[place];
    return static_cast<int>(min(max(said, int64_t{0}), static_cast<int64_t>(steps)));
  }
};

// A tree: its depth is what a step waits for. fmaxf takes the other one of a NaN.
template <int N>
__device__ __forceinline__ float greatest(const float (&value)[N]) {
  if constexpr (N == 1) {
    return value[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half[i] = fmaxf(value[i], value[i + N / 2]);
    return greatest(half);
  }
}

}  // namespace prequal::ops::viterbi
