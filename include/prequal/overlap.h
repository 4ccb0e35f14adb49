// Whether tensors that a kernel writes share memory, told from pointers and strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>

#include "prequal/error.h"
#include "prequal/tensor.h"

namespace prequal {

// One past the last byte, from the first.
inline int64_t extent_bytes(const Tensor& x) {
  if (x.numel() == 0) return 0;
  int64_t last = 0;
  for (int dim = 0; dim < x.rank; ++dim) last += (x.shape[dim] - 1) * x.stride[dim];
  return (last + 1) * x.itemsize;
}

// `step` bytes, to be gone any number of times up to `most`.
struct Walk {
  int64_t step, most;
};

// The widest first; each step once.
class Walks {
 public:
  void add(int64_t step, int64_t most) {
    if (step == 0 || most == 0) return;
    int place = 0;
    while (place < count_ && at_[place].step > step) ++place;
    if (place < count_ && at_[place].step == step) {
      at_[place].most += most;
      return;
    }
    for (int i = count_++; i > place; --i) at_[i] = at_[i - 1];
    at_[place] = {step, most};
  }

  // True where the walks can add up to `target`; a search of more than `patience` places counts as one that found it.
  bool reach(int64_t target) const {
    int patience = 10'000;
    return reach(target, 0, patience);
  }

 private:
  bool reach(int64_t target, int first, int& patience) const {
    if (target == 0) return true;
    if (target < 0 || first == count_) return false;
    int64_t rest = 0, divisor = 0;  // of the narrower ones: their sum at most, and what divides all of them
    for (int i = first + 1; i < count_; ++i) {
      rest += at_[i].step * at_[i].most;
      divisor = std::gcd(divisor, at_[i].step);
    }
    const int64_t step = at_[first].step;
    const int64_t least = std::max<int64_t>(0, target - rest + step - 1) / step;
    for (int64_t times = std::min(at_[first].most, target / step); times >= least; --times) {
      if (--patience < 0) return true;
      const int64_t left = target - times * step;
      if (left == 0 || (divisor != 0 && left % divisor == 0 && reach(left, first + 1, patience))) return true;
    }
    return false;
  }

  std::array<Walk, 2 * max_rank + 1> at_{};
  int count_ = 0;
};

// True where no two elements of a tensor share memory. Two do where the steps from one to the other add up to nothing: one
// or more in some dimension, and any number, forwards or backwards, in those after it.
inline bool is_apart(const Tensor& x) {
  if (x.numel() == 0 || x.contiguous_from(0)) return true;
  for (int once = 0; once < x.rank; ++once) {
    if (x.shape[once] == 1) continue;
    if (x.stride[once] == 0) return false;
    Walks walks;
    walks.add(x.stride[once], x.shape[once] - 2);
    int64_t target = -x.stride[once];
    for (int dim = once + 1; dim < x.rank; ++dim) {
      walks.add(x.stride[dim], 2 * (x.shape[dim] - 1));
      target += (x.shape[dim] - 1) * x.stride[dim];
    }
    if (walks.reach(target)) return false;
  }
  return true;
}

// True where two tensors share no memory.
inline bool are_apart(const Tensor& a, const Tensor& b) {
  const int64_t a_bytes = extent_bytes(a), b_bytes = extent_bytes(b);
  if (a_bytes == 0 || b_bytes == 0) return true;
  const auto* a_first = a.as<const char>();
  const auto* b_first = b.as<const char>();
  if (a_first + a_bytes <= b_first || b_first + b_bytes <= a_first) return true;

  // A byte of a is one of b: b's walks are gone back from its last byte, so that all of them go one way.
  Walks walks;
  walks.add(1, a.itemsize - 1 + b.itemsize - 1);
  for (const Tensor* x : {&a, &b}) {
    for (int dim = 0; dim < x->rank; ++dim) walks.add(x->stride[dim] * x->itemsize, x->shape[dim] - 1);
  }
  return !walks.reach(b_first - a_first + b_bytes - 1);
}

// What a launcher writes into must lie in places of its own: every element,
inline void must_be_apart(const Tensor& x, const char* argument) {
  if (!is_apart(x)) wrong_value(argument, "a place of its own for every element, since it is written", "shared ones");
}

// and all of it, apart from another argument that is written or read.
inline void must_be_apart(const Tensor& x, const char* argument, const Tensor& written, const char* name) {
  if (are_apart(x, written)) return;
  wrong_value(argument, std::string("memory apart from that of ") + name + ", which is written", "shared memory");
}

}  // namespace prequal
