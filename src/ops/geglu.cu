// y = gelu(gate) * up, element by element.   gate, up [..., I] or one x [..., 2 I] -> y [..., I], fresh or in gate
// A block owns a chunk of a row (gated.cuh), a thread 16 bytes of each tensor, twice.
// Bytes: 3 numel(y) sizeof(T); backward, which computes gelu again instead of keeping it, 5 numel(y) sizeof(T).
// Numerics: fp32 inside. "tanh" is x sigmoid(2 u), for halves by the special function units; "none" is erff.
// exact_rounding: torch's formula, rounded to T before the product, as the eager chain does.
#include <string>
#include <tuple>

#include "ops.h"
#include "prequal/gated.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"geglu"> {};

template <class Body>
auto by_form(const std::string& approximate, Body&& body) {
  if (approximate == "tanh") return body.template operator()<gated::GeluTanh>();
  if (approximate == "none") return body.template operator()<gated::GeluErf>();
  wrong_value("approximate", "'tanh' or 'none'", "'" + approximate + "'");
}

}  // namespace

Buffer geglu(const Context& context, const Tensor& gate /*[..., I]*/, const Tensor& up /*[..., I]*/,
             const std::string& approximate, bool exact_rounding) {
  return by_form(approximate,
                 [&]<template <bool> class Act>() { return gated::forward<Act>(context, gate, up, exact_rounding); });
}

void geglu_(const Context& context, const Tensor& gate /*[..., I], becomes y*/, const Tensor& up /*[..., I]*/,
            const std::string& approximate, bool exact_rounding) {
  by_form(approximate,
          [&]<template <bool> class Act>() { gated::forward_in_place<Act>(context, gate, up, exact_rounding); });
}

Buffer geglu_packed(const Context& context, const Tensor& x /*[..., 2 I]*/, const std::string& approximate,
                    bool interleaved, bool exact_rounding) {
  return by_form(approximate, [&]<template <bool> class Act>() {
    return gated::forward_packed<Act>(context, x, interleaved, exact_rounding);
  });
}

std::tuple<Buffer, Buffer> geglu_backward(const Context& context, const Tensor& grad /*[..., I]*/,
                                          const Tensor& gate /*[..., I]*/, const Tensor& up /*[..., I]*/,
                                          const std::string& approximate) {
  return by_form(approximate,
                 [&]<template <bool> class Act>() { return gated::backward<Act>(context, grad, gate, up); });
}

Buffer geglu_packed_backward(const Context& context, const Tensor& grad /*[..., I]*/, const Tensor& x /*[..., 2 I]*/,
                             const std::string& approximate, bool interleaved) {
  return by_form(approximate, [&]<template <bool> class Act>() {
    return gated::backward_packed<Act>(context, grad, x, interleaved);
  });
}

}  // namespace prequal::ops
