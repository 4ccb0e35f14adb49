// y = x W^T + b, and relu(x W^T + b).   x [..., K], W [M, K], b [M] -> y [..., M]
// No kernel of ours: the product is torch's, with the bias and bias+ReLU epilogues of cuBLASLt
// (python/prequal/ops/linear_bias.py). What stands here is the door that every fast path goes through: a right call on a
// device whose gate is open is counted and let through, every other one is refused as elsewhere.
#include <string>

#include "ops.h"
#include "prequal/dispatch.h"

namespace prequal::ops {
namespace {

void door(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (x.rank < 1) wrong_value("x", "at least one dimension", "a 0-dimensional tensor");
  if (weight.rank != 2 || weight.shape[1] != x.shape[x.rank - 1]) {
    wrong_value("weight", "shape [M, " + std::to_string(x.shape[x.rank - 1]) + "]", shape_of(weight));
  }
  if (weight.dtype != x.dtype) wrong_type("weight", std::string(name_of(x.dtype)) + " like x", name_of(weight.dtype));
  if (bias.rank != 1 || bias.shape[0] != weight.shape[0]) {
    wrong_value("bias", "shape [" + std::to_string(weight.shape[0]) + "]", shape_of(bias));
  }
  if (bias.dtype != x.dtype) wrong_type("bias", std::string(name_of(x.dtype)) + " like x", name_of(bias.dtype));
  dispatch(x.dtype, Floats{}, [&]<class T>() {});
}

}  // namespace

void linear_bias(const Context&, const Tensor& x /*[..., K]*/, const Tensor& weight /*[M, K]*/,
                 const Tensor& bias /*[M]*/) {
  door(x, weight, bias);
}

void linear_relu(const Context&, const Tensor& x /*[..., K]*/, const Tensor& weight /*[M, K]*/,
                 const Tensor& bias /*[M]*/) {
  door(x, weight, bias);
}

}  // namespace prequal::ops
