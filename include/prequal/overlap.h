// Whether tensors that a kernel writes share memory, as far as that can be proven from pointers and strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "prequal/tensor.h"

namespace prequal {

// One past the last byte, from the first.
inline int64_t extent_bytes(const Tensor& x) {
  if (x.numel() == 0) return 0;
  int64_t last = 0;
  for (int dim = 0; dim < x.rank; ++dim) last += (x.shape[dim] - 1) * x.stride[dim];
  return (last + 1) * x.itemsize;
}

// True where no two elements of a tensor are one: each dimension, from the narrowest stride on, steps over all before
// it.
inline bool is_apart(const Tensor& x) {
  std::array<int, max_rank> by_stride{};
  int dims = 0;
  for (int dim = 0; dim < x.rank; ++dim) {
    if (x.shape[dim] == 0) return true;
    if (x.shape[dim] == 1) continue;
    int place = dims++;
    for (; place > 0 && x.stride[by_stride[place - 1]] > x.stride[dim]; --place)
      by_stride[place] = by_stride[place - 1];
    by_stride[place] = dim;
  }
  int64_t reach = 0;
  for (int place = 0; place < dims; ++place) {
    const int dim = by_stride[place];
    if (x.stride[dim] <= reach) return false;
    reach += (x.shape[dim] - 1) * x.stride[dim];
  }
  return true;
}

// True where two tensors share no memory: their extents are apart, or both are slices of one packed row, beside each
// other in the last dimensions and walking the dimensions before by the same strides.
inline bool are_apart(const Tensor& a, const Tensor& b) {
  const int64_t a_bytes = extent_bytes(a), b_bytes = extent_bytes(b);
  if (a_bytes == 0 || b_bytes == 0) return true;
  const auto* a_first = a.as<const char>();
  const auto* b_first = b.as<const char>();
  if (a_first + a_bytes <= b_first || b_first + b_bytes <= a_first) return true;
  if (a.rank != b.rank || a.itemsize != b.itemsize) return false;

  const auto walk = [](const Tensor& x, int dim) { return x.shape[dim] > 1 ? x.stride[dim] : 0; };
  int outer = 0;
  while (outer < a.rank && a.shape[outer] == b.shape[outer] && walk(a, outer) == walk(b, outer)) ++outer;
  // From the last of the common dimensions backwards: the slices must lie within one step of the narrowest of them.
  for (; outer > 0; --outer) {
    int64_t step = 0;
    for (int dim = 0; dim < outer; ++dim) {
      if (a.shape[dim] > 1) step = step == 0 ? a.stride[dim] : std::min(step, a.stride[dim]);
    }
    if (step <= 0) continue;
    bool whole_steps = true;
    for (int dim = 0; dim < outer; ++dim) whole_steps &= a.shape[dim] == 1 || a.stride[dim] % step == 0;
    if (!whole_steps) continue;
    Tensor one_a = a, one_b = b;
    for (int dim = 0; dim < outer; ++dim) one_a.shape[dim] = one_b.shape[dim] = 1;
    const int64_t bytes = step * a.itemsize, apart = b_first - a_first;
    const int64_t at = (apart % bytes + bytes) % bytes;  // where b's slice begins within a's step
    if (std::abs(apart) < bytes && at >= extent_bytes(one_a) && at + extent_bytes(one_b) <= bytes) return true;
  }
  return false;
}

}  // namespace prequal
