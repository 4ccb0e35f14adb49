// quantize_fp8(swiglu(gate, up)), by token or blocks of 128 columns.   gate, up [..., I] -> q [..., I], scale
// Who shares a scale owns it, as of quantize_fp8 (quantize.cuh); the product stays in registers, rounded to T.
// Bytes: numel (2 sizeof(T) + 1) and the scales; rows that no block holds are computed twice.
// Numerics: swiglu's, its rounding to T among them; then those of quantize_fp8: the same bits as of one after the other.
#include <optional>
#include <string>
#include <tuple>

#include "ops.h"
#include "prequal/gated.cuh"
#include "prequal/quantize.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"swiglu_quantize_fp8"> {};

// silu(gate) * up. exact: as the argument of swiglu.
template <class T>
struct Product {
  using Value = T;
  static constexpr bool by_warp = false;
  static constexpr bool in_registers = sizeof(T) == 2;
  gated::Rows<const T> gate, up;  // [rows, I]
  bool exact;

  __device__ __forceinline__ Product begin_at(int64_t row, int64_t column) const {
    return {{kept(gate.at + row * gate.stride + column), gate.stride},
            {kept(up.at + row * up.stride + column), up.stride},
            exact};
  }

  template <bool Ragged>
  __device__ __forceinline__ Packet<T> packet(int column, int width) const {
    constexpr int N = widest<T>;
    const Packet<T> a = load_packet<Ragged>(gate.at, column, width);
    const Packet<T> b = load_packet<Ragged>(up.at, column, width);
    float value[N];
    if (exact) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = gated::product<gated::Silu<false>, true, T>(a[i], b[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = gated::product<gated::Silu<sizeof(T) == 2>, false, T>(a[i], b[i]);
    }
    return pack<T>(value);
  }
};

}  // namespace

std::tuple<Buffer, Buffer> swiglu_quantize_fp8(const Context& context, const Tensor& gate /*[..., I]*/,
                                               const Tensor& up /*[..., I]*/, const std::string& granularity,
                                               DType dtype, bool exact_rounding,
                                               const std::optional<double>& scale_upper_bound, bool ue8m0,
                                               const std::string& scale_layout) {
  const quantize::Options options(granularity, dtype, scale_upper_bound, ue8m0, scale_layout);
  const int64_t width = gated::width_of(gate, "gate");
  gated::must_be_like(up, "up", gate, "gate");
  gated::must_be_of(up, "up", gate, "gate");
  if (width > quantize::widest_row) throw Refused{"size"};

  std::optional<Buffer> q, scale;
  dispatch(gate.dtype, Floats{}, [&]<class T>() {
    Product<T> from{gated::rows_at<const T>(gate), gated::rows_at<const T>(up), exact_rounding};
    quantize::Result to = options.results(context, gate, q, scale);
    if (scale->view().numel() == 0) return;

    const bool gaps = to.rows > 1 && (from.gate.stride != width || from.up.stride != width);
    if (options.joins_rows(gaps, width)) to.width *= to.rows, to.rows = 1;
    const auto begins_at_word = [&](const gated::Rows<const T>& rows) {
      return aligned(rows.at, to.rows > 1 ? rows.stride * static_cast<int64_t>(sizeof(T)) : 0, 16);
    };
    const bool words = width % widest<T> == 0 && begins_at_word(from.gate) && begins_at_word(from.up);
    quantize::by_format(dtype, [&]<Fp8 F>() {
      if (options.groups) {
        quantize::by_group<F>(context, from, to, words);
      } else {
        quantize::by_token<F>(context, from, to, words);
      }
    });
  });
  return {std::move(*q), std::move(*scale)};
}

}  // namespace prequal::ops
