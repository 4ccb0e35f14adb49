// What the kernels of the kNN family read and write: point clouds, segments of a batch, rows of values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

 private:
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

}  // namespace prequal::ops::spatial
