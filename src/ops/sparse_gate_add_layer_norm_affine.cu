// total = h * gate[b] + residual, y = layer_norm(total) * (scale[b] + 1) + shift[b].   h, residual [N, C], rows [B, C]
// A warp or a block owns a token, held in registers (sparse.cuh). Backward: a block takes tokens that follow each other.
// Bytes: 4 N C sizeof(T), and the rows [B, C], which caches hold; backward 6 N C sizeof(T), and the sums of the blocks.
// Numerics: fp32 from load to store; the sum is rounded once, and normalised as it is stored.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/sparse.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"sparse_gate_add_layer_norm_affine"> {};

}  // namespace

std::tuple<Buffer, Buffer> sparse_gate_add_layer_norm_affine(
    const Context& context, const Tensor& h /*[N, C]*/, const Tensor& gate /*[B, C]*/,
    const Tensor& residual /*[N, C]*/, const Tensor& scale /*[B, C]*/, const Tensor& shift /*[B, C]*/,
    const std::optional<Tensor>& batch /*[N]*/, const std::optional<Tensor>& ptr /*[B + 1]*/, double eps,
    bool add_one) {
  sparse::must_be_tokens(h, "h");
  sparse::must_modulate(gate, "gate", h);
  sparse::must_be_like(residual, "residual", h, "h");
  norm::must_be_like(scale, "scale", gate, "gate");
  sparse::must_be_like(shift, "shift", scale, "scale");
  const sparse::Batches batches = sparse::batches_of(batch, ptr, h.shape[0], gate.shape[0]);
  sparse::must_fit(h, gate);

  std::optional<Buffer> y, total;
  dispatch(h.dtype, Floats{}, [&]<class T>() {
    const int64_t width = h.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Forward<T> a{};
    a.gate = alignment.modulation(gate, h.dtype);
    a.scale = alignment.modulation(scale, h.dtype);
    a.shift = alignment.modulation(shift, h.dtype);
    a.x = alignment.template rows<const T>(h);
    a.residual = alignment.template rows<const T>(residual);
    y.emplace(context.empty_like(h));
    total.emplace(context.empty_like(h));
    a.rows = h.shape[0], a.width = static_cast<int>(width);
    if (a.rows == 0 || width == 0) return;

    a.y = {y->template as<T>(), width};
    a.total = {total->template as<T>(), width};
    a.batches = batches;
    a.eps = static_cast<float>(eps), a.offset = add_one ? 1.0f : 0.0f;
    sparse::run<true, true>(context, a, alignment.whole());
  });
  return {std::move(*y), std::move(*total)};
}

std::tuple<Buffer, Buffer, Buffer, Buffer, Buffer> sparse_gate_add_layer_norm_affine_backward(
    const Context& context, const Tensor& grad /*[N, C]*/, const Tensor& grad_total /*[N, C]*/,
    const Tensor& h /*[N, C]*/, const Tensor& gate /*[B, C]*/, const Tensor& total /*[N, C]*/,
    const Tensor& scale /*[B, C]*/, const std::optional<Tensor>& batch /*[N]*/,
    const std::optional<Tensor>& ptr /*[B + 1]*/, double eps, bool add_one, bool gate_grad, bool scale_grad,
    bool shift_grad) {
  sparse::must_be_tokens(h, "h");
  sparse::must_be_like(grad, "grad", h, "h");
  sparse::must_be_like(grad_total, "grad_total", h, "h");
  sparse::must_be_like(total, "total", h, "h");
  sparse::must_modulate(gate, "gate", h);
  norm::must_be_like(scale, "scale", gate, "gate");
  const sparse::Batches batches = sparse::batches_of(batch, ptr, h.shape[0], gate.shape[0]);
  sparse::must_fit(h, gate);

  std::optional<Buffer> dh, dresidual, dgate, dscale, dshift;
  dispatch(h.dtype, Floats{}, [&]<class T>() {
    const int64_t width = h.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Backward<T> a{};
    a.gate = alignment.modulation(gate, h.dtype);
    a.scale = alignment.modulation(scale, h.dtype);
    a.grad = alignment.template rows<const T>(grad);
    a.grad_total = alignment.template rows<const T>(grad_total);
    a.x = alignment.template rows<const T>(total);
    a.gated = alignment.template rows<const T>(h);
    dh.emplace(context.empty_like(h));
    dresidual.emplace(context.empty_like(h));
    const auto sums = [&](bool asked, const Tensor& of) {
      return context.empty({asked ? of.shape[0] : 0, width}, of.dtype);
    };
    dgate.emplace(sums(gate_grad, gate));
    dscale.emplace(sums(scale_grad, scale));
    dshift.emplace(sums(shift_grad, scale));
    a.dgated = {dh->template as<T>(), width};
    a.dx = {dresidual->template as<T>(), width};
    a.rows = h.shape[0], a.width = static_cast<int>(width);
    a.batches = batches;
    a.eps = static_cast<float>(eps), a.offset = add_one ? 1.0f : 0.0f;
    const auto wanted = [](bool asked, const std::optional<Buffer>& of) { return asked ? &*of : nullptr; };
    sparse::gradients<true, true>(context, a, alignment.whole(),
                                  {wanted(scale_grad, dscale), wanted(shift_grad, dshift), wanted(gate_grad, dgate)});
  });
  return {std::move(*dh), std::move(*dresidual), std::move(*dgate), std::move(*dscale), std::move(*dshift)};
}

}  // namespace prequal::ops
