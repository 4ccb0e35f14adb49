// q, k -> x / max(|x|, eps) * gamma * sqrt(D), v as it is.   q [N, H, D], kv [L, 2, H, D], gamma [H, D]
// A few lanes own a head; a thread takes a lane of several heads of a token (heads.cuh). One launch for q, one for kv.
// Bytes: 2 (N + L) H D sizeof(T) in place, 2 L H D sizeof(T) more with a fresh result.
// Numerics: fp32 from the load to the one rounding at the store.
#include <cmath>
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/heads.cuh"
#include "prequal/overlap.h"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"qk_rms_norm_cross"> {};

void check(const Tensor& q, const Tensor& kv, const Tensor& q_gamma, const Tensor& k_gamma) {
  if (q.rank != 3) wrong_value("q", "shape [N, H, D]", shape_of(q));
  const int64_t count = q.shape[1], dim = q.shape[2];
  if (dim % 2 != 0) wrong_value("q", "an even D", shape_of(q));
  if (kv.rank != 4 || kv.shape[1] != 2 || kv.shape[2] != count || kv.shape[3] != dim) {
    std::string wanted("shape [L, 2, ");
    wanted.append(std::to_string(count)).append(", ").append(std::to_string(dim)).append("]");
    wrong_value("kv", wanted, shape_of(kv));
  }
  if (kv.dtype != q.dtype) wrong_type("kv", std::string(name_of(q.dtype)) + " like q", name_of(kv.dtype));
  heads::must_be_heads(q_gamma, "q_gamma", count, dim, q_gamma.dtype);
  heads::must_be_heads(k_gamma, "k_gamma", count, dim, q_gamma.dtype);
  heads::must_fit(count, dim);
}

template <class T>
void norm_one(const Context& context, const Tensor& from, const Tensor& to, const Tensor& gamma, int parts,
              double eps) {
  heads::Alignment<T> alignment;
  heads::Forward<T> a{};
  a.gamma[0] = a.gamma[1] = alignment.gamma(gamma, from.dtype);
  a.from = alignment.template packed<const T>(from);
  a.to = alignment.template packed<T>(to);
  a.tokens = from.shape[0], a.heads = static_cast<int>(from.shape[from.rank - 2]);
  a.dim = static_cast<int>(from.shape[from.rank - 1]);
  a.parts = parts, a.normed = 1;
  a.length = heads::Length::of(eps), a.root = std::sqrt(static_cast<float>(a.dim));
  heads::run<heads::Turn::none>(context, a, true, alignment.whole());
}

template <class T>
void gradient_of_one(const Context& context, const Tensor& grad, const Tensor& x, const Tensor& gamma, int parts,
                     double eps, const Tensor& dx, const Buffer& dgamma) {
  heads::Alignment<T> alignment;
  heads::Backward<T> a{};
  a.gamma[0] = a.gamma[1] = alignment.gamma(gamma, x.dtype);
  a.grad = alignment.template packed<const T>(grad);
  a.x = alignment.template packed<const T>(x);
  a.dx = alignment.template packed<T>(dx);
  a.tokens = x.shape[0], a.heads = static_cast<int>(x.shape[x.rank - 2]), a.dim = static_cast<int>(x.shape[x.rank - 1]);
  a.parts = parts, a.normed = 1;
  a.length = heads::Length::of(eps), a.root = std::sqrt(static_cast<float>(a.dim));
  const Buffer* const gammas[2] = {&dgamma, nullptr};
  heads::gradients<heads::Turn::none>(context, a, true, alignment.whole(), gammas);
}

// Where the kernels do not go, before anything is allocated or written.
template <class T>
void must_serve(std::initializer_list<const Tensor*> heads_of, std::initializer_list<const Tensor*> gammas) {
  heads::Alignment<T> alignment;
  for (const Tensor* x : heads_of) alignment.template packed<const T>(*x);
  for (const Tensor* gamma : gammas) alignment.gamma(*gamma, (*heads_of.begin())->dtype);
}

}  // namespace

std::tuple<Buffer, Buffer> qk_rms_norm_cross(const Context& context, const Tensor& q /*[N, H, D]*/,
                                             const Tensor& kv /*[L, 2, H, D]*/, const Tensor& q_gamma /*[H, D]*/,
                                             const Tensor& k_gamma /*[H, D]*/, double eps) {
  check(q, kv, q_gamma, k_gamma);
  std::optional<Buffer> new_q, new_kv;
  dispatch(q.dtype, Floats{}, [&]<class T>() {
    must_serve<T>({&q, &kv}, {&q_gamma, &k_gamma});
    new_q.emplace(context.empty_like(q));
    new_kv.emplace(context.empty_like(kv));
    norm_one<T>(context, q, new_q->view(), q_gamma, 1, eps);
    norm_one<T>(context, kv, new_kv->view(), k_gamma, 2, eps);
  });
  return {std::move(*new_q), std::move(*new_kv)};
}

void qk_rms_norm_cross_inplace(const Context& context, const Tensor& q /*[N, H, D], written*/,
                               const Tensor& kv /*[L, 2, H, D], written*/, const Tensor& q_gamma /*[H, D]*/,
                               const Tensor& k_gamma /*[H, D]*/, double eps) {
  check(q, kv, q_gamma, k_gamma);
  dispatch(q.dtype, Floats{}, [&]<class T>() {
    must_serve<T>({&q, &kv}, {&q_gamma, &k_gamma});
    must_be_apart(q, "q");
    must_be_apart(kv, "kv");
    must_be_apart(kv, "kv", q, "q");
    for (const Tensor* x : {&q, &kv}) {
      if (!(are_apart(*x, q_gamma) && are_apart(*x, k_gamma))) throw Refused{"aliasing"};
    }
    norm_one<T>(context, q, q, q_gamma, 1, eps);
    norm_one<T>(context, kv, kv, k_gamma, 1, eps);
  });
}

std::tuple<Buffer, Buffer, Buffer, Buffer> qk_rms_norm_cross_backward(
    const Context& context, const Tensor& grad_q /*[N, H, D]*/, const Tensor& grad_kv /*[L, 2, H, D]*/,
    const Tensor& q /*[N, H, D]*/, const Tensor& kv /*[L, 2, H, D]*/, const Tensor& q_gamma /*[H, D]*/,
    const Tensor& k_gamma /*[H, D]*/, double eps) {
  check(q, kv, q_gamma, k_gamma);
  norm::must_be_like(grad_q, "grad_q", q, "q");
  norm::must_be_like(grad_kv, "grad_kv", kv, "kv");
  if (grad_q.dtype != q.dtype) wrong_type("grad_q", std::string(name_of(q.dtype)) + " like q", name_of(grad_q.dtype));
  if (grad_kv.dtype != q.dtype)
    wrong_type("grad_kv", std::string(name_of(q.dtype)) + " like kv", name_of(grad_kv.dtype));
  std::optional<Buffer> dq, dkv, dq_gamma, dk_gamma;
  dispatch(q.dtype, Floats{}, [&]<class T>() {
    must_serve<T>({&grad_q, &grad_kv, &q, &kv}, {&q_gamma, &k_gamma});
    dq.emplace(context.empty_like(q));
    dkv.emplace(context.empty_like(kv));
    dq_gamma.emplace(context.empty_like(q_gamma));
    dk_gamma.emplace(context.empty_like(k_gamma));
    gradient_of_one<T>(context, grad_q, q, q_gamma, 1, eps, dq->view(), *dq_gamma);
    gradient_of_one<T>(context, grad_kv, kv, k_gamma, 2, eps, dkv->view(), *dk_gamma);
  });
  return {std::move(*dq), std::move(*dkv), std::move(*dq_gamma), std::move(*dk_gamma)};
}

}  // namespace prequal::ops
