// Checks of dtypes that several ops make of their arguments.
#pragma once

#include <string>

#include "prequal/error.h"
#include "prequal/tensor.h"

namespace prequal {

inline void must_be_floating(const Tensor& x, const char* argument) {
  switch (x.dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64: return;
    case DType::other: throw Refused{"dtype"};  // a float8, or no float: the reference tells them apart
    default: wrong_type(argument, "a floating dtype", name_of(x.dtype));
  }
}

// In the dtype that `other` is computed in.
inline void must_be_wide(const Tensor& x, const char* argument, const std::string& shape, bool fits,
                         const Tensor& other, const char* name) {
  const DType wide = other.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (x.dtype != wide) {
    wrong_type(argument, std::string(name_of(wide)) + " for " + name + " of " + name_of(other.dtype), name_of(x.dtype));
  }
  if (!fits) wrong_value(argument, "shape [" + shape + "]", shape_of(x));
}

}  // namespace prequal
