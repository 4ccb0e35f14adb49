// y = silu(gate) * up, element by element.   gate, up [..., I] or one x [..., 2 I] -> y [..., I], fresh or in gate.
// A block owns a chunk of a row (gated.cuh), a thread 16 bytes of each tensor, twice.
// Bytes: 3 * numel(y) * sizeof(T); backward, which computes silu again instead of keeping it, 5 * numel(y) * sizeof(T).
// Numerics: fp32 between the load and the store; halves take exp and the division from the special function units.
// exact_rounding: silu by expf and an IEEE division, rounded to T before the product, as the eager chain does.
#include <tuple>

#include "ops.h"
#include "prequal/gated.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"swiglu"> {};

}  // namespace

Buffer swiglu(const Context& context, const Tensor& gate /*[..., I]*/, const Tensor& up /*[..., I]*/,
              bool exact_rounding) {
  return gated::forward<gated::Silu>(context, gate, up, exact_rounding);
}

void swiglu_(const Context& context, const Tensor& gate /*[..., I], becomes y*/, const Tensor& up /*[..., I]*/,
             bool exact_rounding) {
  gated::forward_in_place<gated::Silu>(context, gate, up, exact_rounding);
}

Buffer swiglu_packed(const Context& context, const Tensor& x /*[..., 2 I]*/, bool interleaved, bool exact_rounding) {
  return gated::forward_packed<gated::Silu>(context, x, interleaved, exact_rounding);
}

std::tuple<Buffer, Buffer> swiglu_backward(const Context& context, const Tensor& grad /*[..., I]*/,
                                           const Tensor& gate /*[..., I]*/, const Tensor& up /*[..., I]*/) {
  return gated::backward<gated::Silu>(context, grad, gate, up);
}

Buffer swiglu_packed_backward(const Context& context, const Tensor& grad /*[..., I]*/, const Tensor& x /*[..., 2 I]*/,
                              bool interleaved) {
  return gated::backward_packed<gated::Silu>(context, grad, x, interleaved);
}

}  // namespace prequal::ops
