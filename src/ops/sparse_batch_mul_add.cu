// y = x * gate[b] + residual, b = batch of the token.   x, residual, y [N, C], gate [B, C]
// A warp or a block owns a token (sparse.cuh). Backward: a block takes tokens that follow each other.
// Bytes: 3 N C sizeof(T), and the rows [B, C], which caches hold; backward 3 N C sizeof(T), and the sums of the blocks.
// Numerics: fp32 from the load to the one rounding at the store.
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/overlap.h"
#include "prequal/sparse.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"sparse_batch_mul_add"> {};

template <class Out>
void mul_add(const Context& context, const Tensor& x, const Tensor& gate, const Tensor& residual,
             const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr, Out&& out) {
  sparse::must_be_tokens(x, "x");
  sparse::must_modulate(gate, "gate", x);
  sparse::must_be_like(residual, "residual", x, "x");
  const sparse::Batches batches = sparse::batches_of(batch, ptr, x.shape[0], gate.shape[0]);
  sparse::must_fit(x, gate);

  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const int64_t width = x.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Forward<T> a{};
    a.gate = alignment.modulation(gate, x.dtype);
    a.x = alignment.template rows<const T>(x);
    a.residual = alignment.template rows<const T>(residual);
    a.total = alignment.template rows<T>(out());
    a.rows = x.shape[0], a.width = static_cast<int>(width);
    if (a.rows == 0 || width == 0) return;
    a.batches = batches;
    sparse::run<true, false>(context, a, alignment.whole());
  });
}

}  // namespace

Buffer sparse_batch_mul_add(const Context& context, const Tensor& x /*[N, C]*/, const Tensor& gate /*[B, C]*/,
                            const Tensor& residual /*[N, C]*/, const std::optional<Tensor>& batch /*[N]*/,
                            const std::optional<Tensor>& ptr /*[B + 1]*/) {
  std::optional<Buffer> y;
  mul_add(context, x, gate, residual, batch, ptr, [&] {
    y.emplace(context.empty_like(x));
    return y->view();
  });
  return std::move(*y);
}

void sparse_batch_mul_add_(const Context& context, const Tensor& x /*[N, C]*/, const Tensor& gate /*[B, C]*/,
                           const Tensor& residual /*[N, C], written*/, const std::optional<Tensor>& batch /*[N]*/,
                           const std::optional<Tensor>& ptr /*[B + 1]*/) {
  mul_add(context, x, gate, residual, batch, ptr, [&] {
    must_be_apart(residual, "residual");
    must_be_apart(x, "x", residual, "residual");
    bool apart = are_apart(residual, gate);
    if (batch) apart = apart && are_apart(residual, *batch);
    if (ptr) apart = apart && are_apart(residual, *ptr);
    if (!apart) throw Refused{"aliasing"};
    return residual;
  });
}

std::tuple<Buffer, Buffer> sparse_batch_mul_add_backward(const Context& context, const Tensor& grad /*[N, C]*/,
                                                         const Tensor& x /*[N, C]*/, const Tensor& gate /*[B, C]*/,
                                                         const std::optional<Tensor>& batch /*[N]*/,
                                                         const std::optional<Tensor>& ptr /*[B + 1]*/, bool gate_grad) {
  sparse::must_be_tokens(x, "x");
  sparse::must_be_like(grad, "grad", x, "x");
  sparse::must_modulate(gate, "gate", x);
  const sparse::Batches batches = sparse::batches_of(batch, ptr, x.shape[0], gate.shape[0]);
  sparse::must_fit(x, gate);

  std::optional<Buffer> dx, dgate;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const int64_t width = x.shape[1];
    sparse::Alignment<T> alignment(width);
    sparse::Backward<T> a{};
    a.gate = alignment.modulation(gate, x.dtype);
    a.grad = alignment.template rows<const T>(grad);
    a.gated = alignment.template rows<const T>(x);
    dx.emplace(context.empty_like(x));
    dgate.emplace(context.empty({gate_grad ? gate.shape[0] : 0, width}, gate.dtype));
    a.dgated = {dx->template as<T>(), width};
    a.rows = x.shape[0], a.width = static_cast<int>(width);
    a.batches = batches;
    sparse::gradients<true, false>(context, a, alignment.whole(), {nullptr, nullptr, gate_grad ? &*dgate : nullptr});
  });
  return {std::move(*dx), std::move(*dgate)};
}

}  // namespace prequal::ops
