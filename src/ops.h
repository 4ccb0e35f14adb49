// Every launcher: the table of contents of the native side. The meaning of each is its PyTorch reference,
// python/prequal/ops/<basename>.py.
#pragma once

#include <optional>
#include <tuple>

#include "prequal/tensor.h"

namespace prequal::ops {

// src/ops/rms_norm.cu
Buffer rms_norm(const Context&, const Tensor& x, const std::optional<Tensor>& weight, double eps);

// src/ops/knn.cu
std::tuple<Buffer, Buffer> knn(const Context&, const Tensor& queries, const Tensor& references, int64_t k);
Buffer knn_gather(const Context&, const Tensor& queries, const Tensor& references, const Tensor& values);

}  // namespace prequal::ops
