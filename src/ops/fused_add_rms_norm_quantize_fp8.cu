// sum = x + residual, quantize_fp8(rms_norm(sum, weight)).   x, residual [..., H] -> q, sum [..., H], scale, weight [H]
// A warp or a block owns a row, held in registers from its load to its codes; others go by two kernels (norm_quantize.cuh).
// Bytes: numel (3 sizeof(T) + 1), the weight and the scales; by two kernels 2 numel sizeof(T) more.
// Numerics: fused_add_rms_norm's, its roundings to T among them; then those of quantize_fp8.
#include <optional>
#include <string>
#include <tuple>

#include "ops.h"
#include "prequal/norm_quantize.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"fused_add_rms_norm_quantize_fp8"> {};

}  // namespace

std::tuple<Buffer, Buffer, Buffer> fused_add_rms_norm_quantize_fp8(
    const Context& context, const Tensor& x /*[..., H]*/, const Tensor& residual /*[..., H]*/,
    const std::optional<Tensor>& weight /*[H]*/, double eps, const std::string& granularity, DType dtype,
    double weight_offset, bool exact_rounding, const std::optional<double>& scale_upper_bound, bool ue8m0,
    const std::string& scale_layout) {
  const quantize::Options options(granularity, dtype, scale_upper_bound, ue8m0, scale_layout);
  const int64_t width = norm::width_of(x, "x");
  norm::must_be_like(residual, "residual", x, "x");
  if (residual.dtype != x.dtype) {
    wrong_type("residual", std::string(name_of(x.dtype)) + " like x", name_of(residual.dtype));
  }
  norm::must_fit(weight, "weight", width, "x");
  if (width > norm::widest_row) throw Refused{"size"};

  std::optional<Buffer> q, scale, sum;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Forward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.x = alignment.template rows<const T>(x);
    a.other = alignment.template rows<const T>(residual);
    const quantize::Result to = options.results(context, x, q, scale);
    sum.emplace(context.empty_like(x));
    if (scale->view().numel() == 0) return;

    a.sum = {sum->template as<T>(), width};
    a.rows = to.rows, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    a.eps = static_cast<float>(eps), a.offset = static_cast<float>(weight_offset), a.exact = exact_rounding;
    norm_quantize::run<true>(context, a, to, options, x, alignment.whole());
  });
  return {std::move(*q), std::move(*scale), std::move(*sum)};
}

}  // namespace prequal::ops
