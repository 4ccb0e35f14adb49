// q, k -> R (x / max(|x|, eps) * gamma * sqrt(D)), v as it is.   qkv [N, 3, H, D], gamma [H, D], tables [N, D / 2]
// A few lanes own a head; a thread takes a lane of several heads of a token, which share its angles (heads.cuh).
// Bytes: 4 N H D sizeof(T) in place, 6 with a fresh result; the tables once a token, or 12 bytes of coordinates.
// Numerics: fp32 from the load to the store. exact_rounding: the normalised value is rounded to T before it is turned.
#include <cmath>
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/heads.cuh"
#include "prequal/overlap.h"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"qk_rms_norm_rope_qkv"> {};

using heads::Turn;

void check(const Tensor& qkv, const Tensor& q_gamma, const Tensor& k_gamma, const std::optional<Tensor>& cos,
           const std::optional<Tensor>& sin, const std::optional<Tensor>& coords) {
  if (qkv.rank != 4 || qkv.shape[1] != 3) wrong_value("qkv", "shape [N, 3, H, D]", shape_of(qkv));
  const int64_t tokens = qkv.shape[0], count = qkv.shape[2], dim = qkv.shape[3];
  if (dim % 2 != 0) wrong_value("qkv", "an even D", shape_of(qkv));
  heads::must_be_heads(q_gamma, "q_gamma", count, dim, q_gamma.dtype);
  heads::must_be_heads(k_gamma, "k_gamma", count, dim, q_gamma.dtype);
  if (coords) {
    if (cos) wrong_type("cos", "None beside coords", "Tensor");
    if (sin) wrong_type("sin", "None beside coords", "Tensor");
    if (coords->dtype != DType::i32) wrong_type("coords", "int32", name_of(coords->dtype));
    if (coords->rank != 2 || coords->shape[0] != tokens || coords->shape[1] != 4) {
      wrong_value("coords", "shape [" + std::to_string(tokens) + ", 4]", shape_of(*coords));
    }
  } else {
    if (!cos) wrong_type("cos", "a torch.Tensor where coords is None", "NoneType");
    if (!sin) wrong_type("sin", "a torch.Tensor where coords is None", "NoneType");
    if (cos->rank != 2 || cos->shape[0] != tokens || cos->shape[1] != dim / 2) {
      std::string wanted("shape [");
      wanted.append(std::to_string(tokens)).append(", ").append(std::to_string(dim / 2)).append("]");
      wrong_value("cos", wanted, shape_of(*cos));
    }
    norm::must_be_like(*sin, "sin", *cos, "cos");
    if (sin->dtype != cos->dtype)
      wrong_type("sin", std::string(name_of(cos->dtype)) + " like cos", name_of(sin->dtype));
  }
  heads::must_fit(count, dim);
}

template <class T>
heads::Angles<T> angles_of(const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                           const std::optional<Tensor>& coords, int64_t dim, double base, DType dtype) {
  heads::Angles<T> out{};
  if (coords) {
    out.coords = coords->as<const int32_t>();
    out.coord_token = coords->stride[0], out.coord_axis = coords->stride[1];
    const int an_axis = pairs_an_axis(static_cast<int>(dim));
    for (int i = 0; i < an_axis; ++i) {
      out.frequency[i] = static_cast<float>(std::pow(base, -static_cast<double>(i) / an_axis));
    }
    out.an_axis = an_axis;
    return out;
  }
  for (const Tensor* table : {&*cos, &*sin}) {
    if (table->stride[1] != 1 && table->shape[1] > 1) throw Refused{"unit_stride"};
  }
  if (cos->shape[0] > 1 && cos->stride[0] != sin->stride[0]) throw Refused{"rows"};
  out.cos = heads::Alignment<T>::parameter(*cos, dtype);
  out.sin = heads::Alignment<T>::parameter(*sin, dtype);
  out.stride = cos->stride[0];
  const int64_t step = cos->shape[0] > 1 ? out.stride * cos->itemsize : 0;
  out.whole = aligned(cos->data, step, 16) && aligned(sin->data, step, 16);
  return out;
}

template <class Out>
void norm_and_turn(const Context& context, const Tensor& qkv, const Tensor& q_gamma, const Tensor& k_gamma,
                   const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                   const std::optional<Tensor>& coords, double eps, bool interleaved, bool exact, double base,
                   int parts, Out&& out) {
  check(qkv, q_gamma, k_gamma, cos, sin, coords);
  dispatch(qkv.dtype, Floats{}, [&]<class T>() {
    heads::Alignment<T> alignment;
    heads::Forward<T> a{};
    a.gamma[0] = alignment.gamma(q_gamma, qkv.dtype);
    a.gamma[1] = alignment.gamma(k_gamma, qkv.dtype);
    a.angles = angles_of<T>(cos, sin, coords, qkv.shape[3], base, qkv.dtype);
    a.from = alignment.template packed<const T>(qkv);
    a.to = alignment.template packed<T>(out());
    a.tokens = qkv.shape[0], a.heads = static_cast<int>(qkv.shape[2]), a.dim = static_cast<int>(qkv.shape[3]);
    a.parts = parts, a.normed = 2;
    a.length = heads::Length::of(eps), a.root = std::sqrt(static_cast<float>(a.dim)), a.exact = exact;
    if (coords) {
      heads::run<Turn::coords>(context, a, interleaved, alignment.whole());
    } else {
      heads::run<Turn::table>(context, a, interleaved, alignment.whole());
    }
  });
}

}  // namespace

Buffer qk_rms_norm_rope_qkv(const Context& context, const Tensor& qkv /*[N, 3, H, D]*/,
                            const Tensor& q_gamma /*[H, D]*/, const Tensor& k_gamma /*[H, D]*/,
                            const std::optional<Tensor>& cos /*[N, D/2]*/,
                            const std::optional<Tensor>& sin /*[N, D/2]*/,
                            const std::optional<Tensor>& coords /*[N, 4]*/, double eps, bool interleaved,
                            bool exact_rounding, double base) {
  std::optional<Buffer> fresh;
  norm_and_turn(context, qkv, q_gamma, k_gamma, cos, sin, coords, eps, interleaved, exact_rounding, base, 3, [&] {
    fresh.emplace(context.empty_like(qkv));
    return fresh->view();
  });
  return std::move(*fresh);
}

void qk_rms_norm_rope_qkv_inplace(const Context& context, const Tensor& qkv /*[N, 3, H, D], written*/,
                                  const Tensor& q_gamma /*[H, D]*/, const Tensor& k_gamma /*[H, D]*/,
                                  const std::optional<Tensor>& cos /*[N, D/2]*/,
                                  const std::optional<Tensor>& sin /*[N, D/2]*/,
                                  const std::optional<Tensor>& coords /*[N, 4]*/, double eps, bool interleaved,
                                  bool exact_rounding, double base) {
  norm_and_turn(context, qkv, q_gamma, k_gamma, cos, sin, coords, eps, interleaved, exact_rounding, base, 2, [&] {
    must_be_apart(qkv, "qkv");
    bool apart = are_apart(qkv, q_gamma) && are_apart(qkv, k_gamma);
    for (const auto* other : {&cos, &sin, &coords}) apart = apart && (!*other || are_apart(qkv, **other));
    if (!apart) throw Refused{"aliasing"};
    return qkv;
  });
}

std::tuple<Buffer, Buffer, Buffer> qk_rms_norm_rope_qkv_backward(
    const Context& context, const Tensor& grad /*[N, 3, H, D]*/, const Tensor& qkv /*[N, 3, H, D]*/,
    const Tensor& q_gamma /*[H, D]*/, const Tensor& k_gamma /*[H, D]*/, const std::optional<Tensor>& cos /*[N, D/2]*/,
    const std::optional<Tensor>& sin /*[N, D/2]*/, const std::optional<Tensor>& coords /*[N, 4]*/, double eps,
    bool interleaved, double base) {
  check(qkv, q_gamma, k_gamma, cos, sin, coords);
  norm::must_be_like(grad, "grad", qkv, "qkv");
  if (grad.dtype != qkv.dtype) wrong_type("grad", std::string(name_of(qkv.dtype)) + " like qkv", name_of(grad.dtype));
  std::optional<Buffer> dqkv, dq_gamma, dk_gamma;
  dispatch(qkv.dtype, Floats{}, [&]<class T>() {
    heads::Alignment<T> alignment;
    heads::Backward<T> a{};
    a.gamma[0] = alignment.gamma(q_gamma, qkv.dtype);
    a.gamma[1] = alignment.gamma(k_gamma, qkv.dtype);
    a.angles = angles_of<T>(cos, sin, coords, qkv.shape[3], base, qkv.dtype);
    a.grad = alignment.template packed<const T>(grad);
    a.x = alignment.template packed<const T>(qkv);
    dqkv.emplace(context.empty_like(qkv));
    dq_gamma.emplace(context.empty_like(q_gamma));
    dk_gamma.emplace(context.empty_like(k_gamma));
    a.dx = alignment.template packed<T>(dqkv->view());
    a.tokens = qkv.shape[0], a.heads = static_cast<int>(qkv.shape[2]), a.dim = static_cast<int>(qkv.shape[3]);
    a.parts = 3, a.normed = 2;
    a.length = heads::Length::of(eps), a.root = std::sqrt(static_cast<float>(a.dim));
    const Buffer* const gammas[2] = {&*dq_gamma, &*dk_gamma};
    if (coords) {
      heads::gradients<Turn::coords>(context, a, interleaved, alignment.whole(), gammas);
    } else {
      heads::gradients<Turn::table>(context, a, interleaved, alignment.whole(), gammas);
    }
  });
  return {std::move(*dqkv), std::move(*dq_gamma), std::move(*dk_gamma)};
}

}  // namespace prequal::ops
