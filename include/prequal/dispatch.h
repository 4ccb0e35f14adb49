// From a dtype known at run time to a C++ type known at compile time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "prequal/tensor.h"

namespace prequal {

template <DType D>
struct TypeOf;
template <>
struct TypeOf<DType::f32> {
  using type = float;
};
template <>
struct TypeOf<DType::f16> {
  using type = __half;
};
template <>
struct TypeOf<DType::bf16> {
  using type = __nv_bfloat16;
};
template <>
struct TypeOf<DType::f64> {
  using type = double;
};

template <DType... D>
struct DTypes {};
using Floats = DTypes<DType::f32, DType::f16, DType::bf16>;

// Calls body.operator()<T>() for the listed dtype; an unlisted one is a counted refusal, never a wrong answer.
template <DType... D, class Body>
void dispatch(DType dtype, DTypes<D...>, Body&& body) {
  const bool listed = ((dtype == D && (body.template operator()<typename TypeOf<D>::type>(), true)) || ...);
  if (!listed) throw Refused{"dtype"};
}

}  // namespace prequal
