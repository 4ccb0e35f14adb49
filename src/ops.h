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
std::tuple<Buffer, Buffer> knn(const Context&, const Tensor& queries, const Tensor& references, int64_t k,
                               const std::optional<Tensor>& query_ptr, const std::optional<Tensor>& reference_ptr,
                               std::optional<double> radius, const std::optional<Tensor>& index);
std::tuple<Buffer, Buffer, Buffer> radius(const Context&, const Tensor& queries, const Tensor& references, double r,
                                          int64_t max_neighbors, const std::optional<Tensor>& query_ptr,
                                          const std::optional<Tensor>& reference_ptr,
                                          const std::optional<Tensor>& index);
Buffer knn_index(const Context&, const Tensor& references, const std::optional<Tensor>& reference_ptr);
Buffer knn_gather(const Context&, const Tensor& queries, const Tensor& references, const Tensor& values,
                  const std::optional<Tensor>& query_ptr, const std::optional<Tensor>& reference_ptr,
                  const std::optional<Tensor>& index);
Buffer knn_interpolate(const Context&, const Tensor& queries, const Tensor& references, const Tensor& values, int64_t k,
                       const std::optional<Tensor>& query_ptr, const std::optional<Tensor>& reference_ptr,
                       const std::optional<Tensor>& index);

}  // namespace prequal::ops
