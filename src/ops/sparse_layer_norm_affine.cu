// y = (x - mean) * rsqrt(var + eps) * (scale[b] + 1) + shift[b], b = batch of the token.   x [N, C], scale, shift [B, C]
// A warp or a block owns a token, held in registers (sparse.cuh). Backward: a block takes tokens that follow each other.
// Bytes: 2 N C sizeof(T), and the rows [B, C], which caches hold; backward 3 N C sizeof(T), and the sums of the blocks.
// Numerics: fp32 from the load to the one rounding at the store; the variance is a sum of squares about the mean.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/sparse.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"sparse_layer_norm_affine"> {};

}  // namespace

Buffer sparse_layer_norm_affine(const Context& context, const Tensor& x /*[N, C]*/, const Tensor& scale /*[B, C]*/,
                                const Tensor& shift /*[B, C]*/, const std::optional<Tensor>& batch /*[N]*/,
                                const std::optional<Tensor>& ptr /*[B + 1]*/, double eps, bool add_one) {
  sparse::must_be_tokens(x, "x");
  sparse::must_modulate(scale, "scale", x);
  sparse::must_be_like(shift, "shift", scale, "scale");
  const sparse::Batches batches = sparse::batches_of(batch, ptr, x.shape[0], scale.shape[0]);
  sparse::must_fit(x, scale);

  std::optional<Buffer> y;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const int64_t width = x.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Forward<T> a{};
    a.scale = alignment.modulation(scale, x.dtype);
    a.shift = alignment.modulation(shift, x.dtype);
    a.x = alignment.template rows<const T>(x);
    y.emplace(context.empty_like(x));
    a.rows = x.shape[0], a.width = static_cast<int>(width);
    if (a.rows == 0 || width == 0) return;

    a.y = {y->as<T>(), width};
    a.batches = batches;
    a.eps = static_cast<float>(eps), a.offset = add_one ? 1.0f : 0.0f;
    sparse::run<false, true>(context, a, alignment.whole());
  });
  return std::move(*y);
}

std::tuple<Buffer, Buffer, Buffer> sparse_layer_norm_affine_backward(
    const Context& context, const Tensor& grad /*[N, C]*/, const Tensor& x /*[N, C]*/, const Tensor& scale /*[B, C]*/,
    const std::optional<Tensor>& batch /*[N]*/, const std::optional<Tensor>& ptr /*[B + 1]*/, double eps, bool add_one,
    bool scale_grad, bool shift_grad) {
  sparse::must_be_tokens(x, "x");
  sparse::must_be_like(grad, "grad", x, "x");
  sparse::must_modulate(scale, "scale", x);
  const sparse::Batches batches = sparse::batches_of(batch, ptr, x.shape[0], scale.shape[0]);
  sparse::must_fit(x, scale);

  std::optional<Buffer> dx, dscale, dshift;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const int64_t width = x.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Backward<T> a{};
    a.scale = alignment.modulation(scale, x.dtype);
    a.grad = alignment.template rows<const T>(grad);
    a.x = alignment.template rows<const T>(x);
    dx.emplace(context.empty_like(x));
    dscale.emplace(context.empty({scale_grad ? scale.shape[0] : 0, width}, scale.dtype));
    dshift.emplace(context.empty({shift_grad ? scale.shape[0] : 0, width}, scale.dtype));
    a.dx = {dx->template as<T>(), width};
    a.rows = x.shape[0], a.width = static_cast<int>(width);
    a.batches = batches;
    a.eps = static_cast<float>(eps), a.offset = add_one ? 1.0f : 0.0f;
    const sparse::Wanted wanted{scale_grad ? &*dscale : nullptr, shift_grad ? &*dshift : nullptr, nullptr};
    sparse::gradients<false, true>(context, a, alignment.whole(), wanted);
  });
  return {std::move(*dx), std::move(*dscale), std::move(*dshift)};
}

}  // namespace prequal::ops
