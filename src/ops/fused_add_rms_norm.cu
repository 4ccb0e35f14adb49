// sum = x + residual, y = rms_norm(sum), last dimension.   x, residual [..., H] -> y, sum [..., H], weight [H] or none
// A warp, a block or a cluster owns a row, held in registers (norm.cuh). In place who read an element writes it.
// Bytes: 4 numel sizeof(T) + H sizeof(weight). Backward is rms_norm_backward of the sum.
// Numerics: the sum is rounded once, as it is returned, and y is the norm of that; else as rms_norm.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/norm.cuh"
#include "prequal/overlap.h"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"fused_add_rms_norm"> {};

// y and sum: [rows, H] of their own strides. Null: fresh ones, which `make` gives once the call is known to be right.
template <class Out>
void add_and_norm(const Context& context, const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                  double eps, double weight_offset, bool exact_rounding, Out&& out) {
  const int64_t width = norm::width_of(x, "x");
  norm::must_be_like(residual, "residual", x, "x");
  if (residual.dtype != x.dtype)
    wrong_type("residual", std::string(name_of(x.dtype)) + " like x", name_of(residual.dtype));
  norm::must_fit(weight, "weight", width, "x");
  if (width > norm::widest_row) throw Refused{"size"};

  dispatch(x.dtype, Floats{}, [&]<class T>() {
    norm::Alignment<T> alignment(width);
    norm::Forward<T> a{};
    a.weight = alignment.parameter(weight, x.dtype);
    a.x = alignment.template rows<const T>(x);
    a.other = alignment.template rows<const T>(residual);
    const auto [y, sum] = out();
    a.y = alignment.template rows<T>(y);
    a.sum = alignment.template rows<T>(sum);
    a.rows = rows_of(x).count, a.width = static_cast<int>(width);
    a.inverse = 1.0f / static_cast<float>(width);
    if (a.rows == 0 || width == 0) return;

    a.eps = static_cast<float>(eps), a.offset = static_cast<float>(weight_offset), a.exact = exact_rounding;
    if (alignment.whole()) {
      norm::run<norm::Kind::rms, true, T, false>(context, a);
    } else {
      norm::run<norm::Kind::rms, true, T, true>(context, a);
    }
  });
}

}  // namespace

std::tuple<Buffer, Buffer> fused_add_rms_norm(const Context& context, const Tensor& x /*[..., H]*/,
                                              const Tensor& residual /*[..., H]*/,
                                              const std::optional<Tensor>& weight /*[H]*/, double eps,
                                              double weight_offset, bool exact_rounding) {
  std::optional<Buffer> y, sum;
  add_and_norm(context, x, residual, weight, eps, weight_offset, exact_rounding, [&] {
    y.emplace(context.empty_like(x));
    sum.emplace(context.empty_like(x));
    return std::pair(y->view(), sum->view());
  });
  return {std::move(*y), std::move(*sum)};
}

void fused_add_rms_norm_(const Context& context, const Tensor& x /*[..., H], becomes y*/,
                         const Tensor& residual /*[..., H], becomes the sum*/,
                         const std::optional<Tensor>& weight /*[H]*/, double eps, double weight_offset,
                         bool exact_rounding) {
  add_and_norm(context, x, residual, weight, eps, weight_offset, exact_rounding, [&] {
    must_be_apart(x, "x");
    must_be_apart(residual, "residual");
    must_be_apart(residual, "residual", x, "x");
    if (weight && !(are_apart(x, *weight) && are_apart(residual, *weight))) throw Refused{"aliasing"};
    return std::pair(x, residual);
  });
}

}  // namespace prequal::ops
