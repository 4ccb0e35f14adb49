// y = (x - mean) * rsqrt(var + eps) * weight + bias, last dimension.   x [..., H] -> y [..., H], weight, bias [H]
// A warp, a block or a cluster owns a row, held in registers (norm.cuh). Backward: parameters by row, then team.
// Bytes: 2 numel sizeof(T) + H (sizeof(weight) + sizeof(bias)); backward 3 numel sizeof(T), and the sums of the teams.
// Numerics: fp32 from the load to the one rounding at the store; the variance is a sum of squares about the mean.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/norm_gradient.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"layer_norm"> {};

}  // namespace

Buffer layer_norm(const Context& context, const Tensor& x /*[..., H]*/, const std::optional<Tensor>& weight /*[H]*/,
                  const std::optional<Tensor>& bias /*[H]*/, double eps) {
  const int64_t width = norm::width_of(x, "x");
  norm::must_fit(weight, "weight", width, "x");
  norm::must_fit(bias, "bias", width, "x");
  if (width > norm::widest_row) throw Refused{"size"};

  std::optional<Buffer> y;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Forward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.bias = alignment.parameter(bias, x.dtype);
    a.x = alignment.template rows<const T>(x);
    y.emplace(context.empty_like(x));
    a.rows = rows_of(x).count, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    if (a.rows == 0 || width == 0) return;

    a.y = {y->as<T>(), width};
    a.eps = static_cast<float>(eps);
    if (alignment.whole()) {
      norm::run<norm::Kind::layer, false, T, false>(context, a);
    } else {
      norm::run<norm::Kind::layer, false, T, true>(context, a);
    }
  });
  return std::move(*y);
}

std::tuple<Buffer, Buffer, Buffer> layer_norm_backward(const Context& context, const Tensor& grad /*[..., H]*/,
                                                       const Tensor& x /*[..., H]*/,
                                                       const std::optional<Tensor>& weight /*[H]*/, double eps,
                                                       bool weight_grad, bool bias_grad) {
  const int64_t width = norm::width_of(x, "x");
  norm::must_be_like(grad, "grad", x, "x");
  norm::must_fit(weight, "weight", width, "x");
  if (width > norm::widest_row) throw Refused{"size"};
  if (grad.dtype != x.dtype) throw Refused{"dtype"};

  std::optional<Buffer> dx, dweight, dbias;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Backward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.grad = alignment.template rows<const T>(grad);
    a.x = alignment.template rows<const T>(x);
    dx.emplace(context.empty_like(x));
    const DType dtype = weight ? weight->dtype : x.dtype;
    dweight.emplace(context.empty({weight_grad ? width : 0}, dtype));
    dbias.emplace(context.empty({bias_grad ? width : 0}, dtype));
    a.rows = rows_of(x).count, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    if (width == 0) return;

    a.dx = {dx->template as<T>(), width};
    a.eps = static_cast<float>(eps);
    norm::gradient<norm::Kind::layer>(context, a, alignment.whole(), weight_grad ? &*dweight : nullptr,
                                      bias_grad ? &*dbias : nullptr);
  });
  return {std::move(*dx), std::move(*dweight), std::move(*dbias)};
}

}  // namespace prequal::ops
