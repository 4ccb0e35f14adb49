// y = x * rsqrt(mean(x^2) + eps) * (weight + offset), last dimension.   x [..., H] -> y [..., H], weight [H] or none
// A warp, a block or a cluster owns a row, held in registers (norm.cuh). Backward: dweight by row, then by team.
// Bytes: 2 numel sizeof(T) + H sizeof(weight); backward 3 numel sizeof(T), 4 with `added`, and the sums of the teams.
// Numerics: fp32 from the load to the one rounding at the store, to two with exact_rounding; sums in a fixed order.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/norm_gradient.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"rms_norm"> {};

}  // namespace

Buffer rms_norm(const Context& context, const Tensor& x /*[..., H]*/, const std::optional<Tensor>& weight /*[H]*/,
                double eps, double weight_offset, bool exact_rounding) {
  const int64_t width = norm::width_of(x, "x");
  norm::must_fit(weight, "weight", width, "x");
  if (width > norm::widest_row) throw Refused{"size"};

  std::optional<Buffer> y;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Forward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.x = alignment.template rows<const T>(x);
    y.emplace(context.empty_like(x));
    a.rows = rows_of(x).count, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    if (a.rows == 0 || width == 0) return;

    a.y = {y->as<T>(), width};
    a.eps = static_cast<float>(eps), a.offset = static_cast<float>(weight_offset), a.exact = exact_rounding;
    if (alignment.whole()) {
      norm::run<norm::Kind::rms, false, T, false>(context, a);
    } else {
      norm::run<norm::Kind::rms, false, T, true>(context, a);
    }
  });
  return std::move(*y);
}

std::tuple<Buffer, Buffer> rms_norm_backward(const Context& context, const Tensor& grad /*[..., H]*/,
                                             const Tensor& x /*[..., H]*/, const std::optional<Tensor>& weight /*[H]*/,
                                             double eps, const std::optional<Tensor>& added /*[..., H]*/,
                                             double weight_offset, bool weight_grad) {
  const int64_t width = norm::width_of(x, "x");
  norm::must_be_like(grad, "grad", x, "x");
  norm::must_fit(weight, "weight", width, "x");
  if (added) norm::must_be_like(*added, "added", x, "x");
  if (width > norm::widest_row) throw Refused{"size"};
  if (grad.dtype != x.dtype || (added && added->dtype != x.dtype)) throw Refused{"dtype"};

  std::optional<Buffer> dx, dweight;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Backward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.grad = alignment.template rows<const T>(grad);
    a.x = alignment.template rows<const T>(x);
    if (added) a.more = alignment.template rows<const T>(*added);
    dx.emplace(context.empty_like(x));
    dweight.emplace(context.empty({weight_grad ? width : 0}, weight ? weight->dtype : x.dtype));
    a.rows = rows_of(x).count, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    if (width == 0) return;

    a.dx = {dx->template as<T>(), width};
    a.eps = static_cast<float>(eps), a.offset = static_cast<float>(weight_offset);
    norm::gradient<norm::Kind::rms>(context, a, alignment.whole(), weight_grad ? &*dweight : nullptr, nullptr);
  });
  return {std::move(*dx), std::move(*dweight)};
}

}  // namespace prequal::ops
