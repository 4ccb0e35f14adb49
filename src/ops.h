// Every launcher: the table of contents of the native side. The meaning of each is its PyTorch reference,
// python/prequal/ops/<basename>.py.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "prequal/tensor.h"

namespace prequal::ops {

// src/ops/rms_norm.cu
Buffer rms_norm(const Context&, const Tensor& x, const std::optional<Tensor>& weight, double eps, double weight_offset,
                bool exact_rounding);
std::tuple<Buffer, Buffer> rms_norm_backward(const Context&, const Tensor& grad, const Tensor& x,
                                             const std::optional<Tensor>& weight, double eps,
                                             const std::optional<Tensor>& added, double weight_offset,
                                             bool weight_grad);

// src/ops/fused_add_rms_norm.cu
std::tuple<Buffer, Buffer> fused_add_rms_norm(const Context&, const Tensor& x, const Tensor& residual,
                                              const std::optional<Tensor>& weight, double eps, double weight_offset,
                                              bool exact_rounding);
void fused_add_rms_norm_(const Context&, const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                         double eps, double weight_offset, bool exact_rounding);

// src/ops/layer_norm.cu
Buffer layer_norm(const Context&, const Tensor& x, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps);
std::tuple<Buffer, Buffer, Buffer> layer_norm_backward(const Context&, const Tensor& grad, const Tensor& x,
                                                       const std::optional<Tensor>& weight, double eps,
                                                       bool weight_grad, bool bias_grad);

// src/ops/swiglu.cu
Buffer swiglu(const Context&, const Tensor& gate, const Tensor& up, bool exact_rounding);
void swiglu_(const Context&, const Tensor& gate, const Tensor& up, bool exact_rounding);
Buffer swiglu_packed(const Context&, const Tensor& x, bool interleaved, bool exact_rounding);
std::tuple<Buffer, Buffer> swiglu_backward(const Context&, const Tensor& grad, const Tensor& gate, const Tensor& up);
Buffer swiglu_packed_backward(const Context&, const Tensor& grad, const Tensor& x, bool interleaved);

// src/ops/geglu.cu
Buffer geglu(const Context&, const Tensor& gate, const Tensor& up, const std::string& approximate, bool exact_rounding);
void geglu_(const Context&, const Tensor& gate, const Tensor& up, const std::string& approximate, bool exact_rounding);
Buffer geglu_packed(const Context&, const Tensor& x, const std::string& approximate, bool interleaved,
                    bool exact_rounding);
std::tuple<Buffer, Buffer> geglu_backward(const Context&, const Tensor& grad, const Tensor& gate, const Tensor& up,
                                          const std::string& approximate);
Buffer geglu_packed_backward(const Context&, const Tensor& grad, const Tensor& x, const std::string& approximate,
                             bool interleaved);

// src/ops/quantize_fp8.cu
std::tuple<Buffer, Buffer> quantize_fp8(const Context&, const Tensor& x, const std::string& granularity, DType dtype,
                                        const std::optional<Tensor>& scale,
                                        const std::optional<double>& scale_upper_bound, bool ue8m0,
                                        const std::string& scale_layout);
Buffer dequantize_fp8(const Context&, const Tensor& q, const Tensor& scale, const std::string& granularity, DType dtype,
                      const std::string& scale_layout);

// src/ops/rms_norm_quantize_fp8.cu
std::tuple<Buffer, Buffer> rms_norm_quantize_fp8(const Context&, const Tensor& x, const std::optional<Tensor>& weight,
                                                 double eps, const std::string& granularity, DType dtype,
                                                 double weight_offset, bool exact_rounding,
                                                 const std::optional<double>& scale_upper_bound, bool ue8m0,
                                                 const std::string& scale_layout);

// src/ops/fused_add_rms_norm_quantize_fp8.cu
std::tuple<Buffer, Buffer, Buffer> fused_add_rms_norm_quantize_fp8(
    const Context&, const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight, double eps,
    const std::string& granularity, DType dtype, double weight_offset, bool exact_rounding,
    const std::optional<double>& scale_upper_bound, bool ue8m0, const std::string& scale_layout);

// src/ops/swiglu_quantize_fp8.cu
std::tuple<Buffer, Buffer> swiglu_quantize_fp8(const Context&, const Tensor& gate, const Tensor& up,
                                               const std::string& granularity, DType dtype, bool exact_rounding,
                                               const std::optional<double>& scale_upper_bound, bool ue8m0,
                                               const std::string& scale_layout);

// src/ops/rope.cu
std::tuple<Buffer, Buffer> rope(const Context&, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                const std::optional<Tensor>& positions, bool interleaved,
                                const std::optional<int64_t>& rotary_dim, bool inverse, bool exact_rounding);
void rope_(const Context&, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
           const std::optional<Tensor>& positions, bool interleaved, const std::optional<int64_t>& rotary_dim,
           bool inverse, bool exact_rounding);

// src/ops/qk_rms_norm_rope_qkv.cu
Buffer qk_rms_norm_rope_qkv(const Context&, const Tensor& qkv, const Tensor& q_gamma, const Tensor& k_gamma,
                            const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                            const std::optional<Tensor>& coords, double eps, bool interleaved, bool exact_rounding,
                            double base);
void qk_rms_norm_rope_qkv_inplace(const Context&, const Tensor& qkv, const Tensor& q_gamma, const Tensor& k_gamma,
                                  const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                                  const std::optional<Tensor>& coords, double eps, bool interleaved,
                                  bool exact_rounding, double base);
std::tuple<Buffer, Buffer, Buffer> qk_rms_norm_rope_qkv_backward(const Context&, const Tensor& grad, const Tensor& qkv,
                                                                 const Tensor& q_gamma, const Tensor& k_gamma,
                                                                 const std::optional<Tensor>& cos,
                                                                 const std::optional<Tensor>& sin,
                                                                 const std::optional<Tensor>& coords, double eps,
                                                                 bool interleaved, double base);

// src/ops/qk_rms_norm_cross.cu
std::tuple<Buffer, Buffer> qk_rms_norm_cross(const Context&, const Tensor& q, const Tensor& kv, const Tensor& q_gamma,
                                             const Tensor& k_gamma, double eps);
void qk_rms_norm_cross_inplace(const Context&, const Tensor& q, const Tensor& kv, const Tensor& q_gamma,
                               const Tensor& k_gamma, double eps);
std::tuple<Buffer, Buffer, Buffer, Buffer> qk_rms_norm_cross_backward(const Context&, const Tensor& grad_q,
                                                                      const Tensor& grad_kv, const Tensor& q,
                                                                      const Tensor& kv, const Tensor& q_gamma,
                                                                      const Tensor& k_gamma, double eps);

// src/ops/sparse_layer_norm_affine.cu
Buffer sparse_layer_norm_affine(const Context&, const Tensor& x, const Tensor& scale, const Tensor& shift,
                                const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr, double eps,
                                bool add_one);
std::tuple<Buffer, Buffer, Buffer> sparse_layer_norm_affine_backward(const Context&, const Tensor& grad,
                                                                     const Tensor& x, const Tensor& scale,
                                                                     const std::optional<Tensor>& batch,
                                                                     const std::optional<Tensor>& ptr, double eps,
                                                                     bool add_one, bool scale_grad, bool shift_grad);

// src/ops/sparse_batch_mul_add.cu
Buffer sparse_batch_mul_add(const Context&, const Tensor& x, const Tensor& gate, const Tensor& residual,
                            const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr);
void sparse_batch_mul_add_(const Context&, const Tensor& x, const Tensor& gate, const Tensor& residual,
                           const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr);
std::tuple<Buffer, Buffer> sparse_batch_mul_add_backward(const Context&, const Tensor& grad, const Tensor& x,
                                                         const Tensor& gate, const std::optional<Tensor>& batch,
                                                         const std::optional<Tensor>& ptr, bool gate_grad);

// src/ops/sparse_gate_add_layer_norm_affine.cu
std::tuple<Buffer, Buffer> sparse_gate_add_layer_norm_affine(const Context&, const Tensor& h, const Tensor& gate,
                                                             const Tensor& residual, const Tensor& scale,
                                                             const Tensor& shift, const std::optional<Tensor>& batch,
                                                             const std::optional<Tensor>& ptr, double eps,
                                                             bool add_one);
std::tuple<Buffer, Buffer, Buffer, Buffer, Buffer> sparse_gate_add_layer_norm_affine_backward(
    const Context&, const Tensor& grad, const Tensor& grad_total, const Tensor& h, const Tensor& gate,
    const Tensor& total, const Tensor& scale, const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr,
    double eps, bool add_one, bool gate_grad, bool scale_grad, bool shift_grad);

// src/ops/cross_entropy.cu
Buffer cross_entropy_stats(const Context&, const Tensor& logits, const Tensor& target,
                           const std::optional<Tensor>& class_weight, int64_t first_class, double softcap);
void cross_entropy_gradient_(const Context&, const Tensor& logits, const Tensor& lse, const Tensor& target,
                             const Tensor& coefficients, const std::optional<Tensor>& class_weight, int64_t first_class,
                             double softcap);
void cross_entropy_chunk_(const Context&, const Tensor& logits, const Tensor& stats, const Tensor& target,
                          const Tensor& coefficients, const std::optional<Tensor>& class_weight, int64_t first_class,
                          double softcap);
void scale_unless_one_(const Context&, const Tensor& x, const Tensor& factor);

// src/ops/linear_gelu.cu
void linear_gelu(const Context&, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::string& approximate, bool exact_rounding);

// src/ops/linear_bias.cu
void linear_bias(const Context&, const Tensor& x, const Tensor& weight, const Tensor& bias);
void linear_relu(const Context&, const Tensor& x, const Tensor& weight, const Tensor& bias);

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

// src/ops/moe_route.cu
std::tuple<Buffer, Buffer, Buffer> moe_route(const Context&, const Tensor& logits, int64_t k, const std::string& score,
                                             bool renormalize, const std::optional<Tensor>& bias,
                                             const std::optional<int64_t>& groups,
                                             const std::optional<int64_t>& topk_groups, double scale);

// src/ops/moe_permute.cu
std::tuple<Buffer, Buffer, Buffer> moe_permute(const Context&, const Tensor& x, const Tensor& experts,
                                               const Tensor& counts, const std::optional<int64_t>& capacity);

// src/ops/moe_unpermute.cu
Buffer moe_unpermute(const Context&, const Tensor& yp, const Tensor& row_map, const std::optional<Tensor>& weights);
std::tuple<Buffer, Buffer> moe_unpermute_backward(const Context&, const Tensor& grad, const Tensor& yp,
                                                  const Tensor& row_map, const std::optional<Tensor>& weights,
                                                  bool weights_grad);

// src/ops/viterbi_decode.cu
std::tuple<Buffer, Buffer> viterbi_decode(const Context&, const Tensor& log_emissions, const Tensor& log_transitions,
                                          const std::optional<Tensor>& log_initial,
                                          const std::optional<Tensor>& lengths, const std::optional<Tensor>& end_scores,
                                          const std::string& transitions_per, const std::optional<int64_t>& band,
                                          bool return_score);

// src/ops/topk_rows.cu
void topk_rows_(const Context&, const Tensor& best, const Tensor& idx, const Tensor& products,
                const std::optional<Tensor>& row_terms, const std::optional<Tensor>& column_terms,
                const std::string& metric, int64_t first_index, bool fresh);

// src/ops/row_norms.cu
Buffer row_norms(const Context&, const Tensor& x, const std::string& form);

// src/ops/topk_products.cu
std::tuple<Buffer, Buffer> topk_products(const Context&, const Tensor& queries, const Tensor& corpus, int64_t k,
                                         const std::optional<Tensor>& column_terms, const std::string& metric,
                                         int64_t first_index);

// src/ops/pairwise_distance.cu
Buffer pairwise_direct(const Context&, const Tensor& a, const Tensor& b, double p, bool squared);
void pairwise_from_products_(const Context&, const Tensor& products, const Tensor& a_squares, const Tensor& b_squares,
                             bool squared);
std::tuple<Buffer, Buffer> pairwise_argmin(const Context&, const Tensor& a, const Tensor& b);
Buffer pairwise_within_counts(const Context&, const Tensor& a, const Tensor& b, double radius, int64_t segment);
std::tuple<Buffer, Buffer> pairwise_within_fill(const Context&, const Tensor& a, const Tensor& b, double radius,
                                                const Tensor& starts, int64_t total, int64_t segment);

// src/ops/message_passing.cu
std::tuple<Buffer, Buffer, Buffer> message_passing_csr(
    const Context&, const Tensor& x, const Tensor& row_ptr, const Tensor& column, const std::optional<Tensor>& edge,
    const std::optional<Tensor>& edge_weight, const std::optional<Tensor>& t_row_ptr,
    const std::optional<Tensor>& t_column, const std::optional<Tensor>& t_edge, const std::optional<Tensor>& previous,
    const std::string& reduce, bool keep, int64_t longest, int64_t t_longest);
std::tuple<Buffer, Buffer> message_passing_csr_backward(
    const Context&, const Tensor& grad, const Tensor& x, const Tensor& row_ptr, const Tensor& column,
    const std::optional<Tensor>& edge, const std::optional<Tensor>& edge_weight, const Tensor& t_row_ptr,
    const Tensor& t_column, const Tensor& t_edge, const Tensor& arg, const Tensor& state,
    const std::optional<Tensor>& previous, const std::string& reduce, bool weight_grad, int64_t t_longest);

}  // namespace prequal::ops
