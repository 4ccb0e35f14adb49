// What the kernels of the kNN family read and write: point clouds, segments of a batch, rows of values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "prequal/knn_tree.h"
#include "prequal/tensor.h"

namespace prequal::ops::spatial {

using tree::Point;

inline constexpr unsigned whole_warp = 0xffffffffu;

// Halves are computed in float: T is float for them, double for doubles.
struct Cloud {  // [count, dims], any strides
  const void* data;
  int64_t count;
  int64_t row;     // elements
  int64_t column;  // elements
  DType dtype;
  int dims;  // 2 or 3

  template <class T>
  __device__ __forceinline__ Point<T> at(int64_t i) const {
    if constexpr (sizeof(T) == 8) {
      return from<double, T>(i);
    } else {
      switch (dtype) {  // the same for every thread
        case DType::f16: return from<__half, T>(i);
        case DType::bf16: return from<__nv_bfloat16, T>(i);
        default: return from<float, T>(i);
      }
    }
  }

  __device__ __forceinline__ void prefetch(int64_t i) const {
    const int size = dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<const char*>(data) + i * row * size));
  }

  template <class S, class T>
  __device__ __forceinline__ Point<T> from(int64_t i) const {
    const S* p = static_cast<const S*>(data) + i * row;
    return {static_cast<T>(p[0]), static_cast<T>(p[column]), dims == 3 ? static_cast<T>(p[2 * column]) : T(0)};
  }
};

// CSR pointers of a batch, as the caller has them on the device. What they hold is not trusted: they only bound
// comparisons of indices, never addresses.
struct Pointers {
  const void* data;  // [segments + 1] int32 or int64, any stride; null: one segment that holds everything
  int64_t segments;
  int64_t stride;  // elements
  bool wide;

  __device__ __forceinline__ int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }

  // The segment that holds this row: as many as end at or before it; `segments` behind the last.
  __device__ __forceinline__ int64_t segment_of(int64_t row) const {
    int64_t low = 0, high = segments;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (at(middle + 1) <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// The references [begin, end) that a query may see.
struct Range {
  int64_t begin, end;
};

__device__ __forceinline__ Range visible(const Pointers& queries, const Pointers& references, int64_t query) {
  const int64_t segment = queries.segment_of(query);
  if (segment >= queries.segments || query < queries.at(0)) return {0, 0};
  return {references.at(segment), references.at(segment + 1)};
}

struct ValueRows {
  const char* from;  // [M, row_bytes], rows row_stride bytes apart
  char* to;          // [N, row_bytes]
  int64_t row_bytes;
  int64_t row_stride;
  int word;  // bytes moved at once: 1, 2, 4, 8 or 16
  int fill;  // byte of a row that has no neighbour
};

template <class Word>
__device__ __forceinline__ void copy_row(const ValueRows& values, int64_t query, int nearest) {
  Word fill;
  memset(&fill, values.fill, sizeof(Word));
  const auto* from = reinterpret_cast<const Word*>(values.from + nearest * values.row_stride);
  auto* to = reinterpret_cast<Word*>(values.to + query * values.row_bytes);
  const int64_t words = values.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t w = threadIdx.x % 32; w < words; w += 32) to[w] = nearest == tree::nobody ? fill : from[w];
}

// By the warp together.
__device__ __forceinline__ void copy_row(const ValueRows& values, int64_t query, int nearest) {
  switch (values.word) {  // the same for every thread
    case 16: return copy_row<uint4>(values, query, nearest);
    case 8: return copy_row<uint64_t>(values, query, nearest);
    case 4: return copy_row<uint32_t>(values, query, nearest);
    case 2: return copy_row<uint16_t>(values, query, nearest);
    default: return copy_row<uint8_t>(values, query, nearest);
  }
}

}  // namespace prequal::ops::spatial
