// q = x / scale in FP8, scale = amax / largest of a tensor, a token or a block.   x [..., H] -> q [..., H], scale
// Who shares a scale owns it: a warp or a block a row, 16 or 32 lanes 128 columns, a block a tile (quantize.cuh).
// Bytes: numel (sizeof(T) + 1) and the scales; of a tensor numel (2 sizeof(T) + 1), since its largest value comes first.
// Numerics: fp32, every operation rounded once: the bits of the reference. dequantize_fp8: a product, and a rounding.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "ops.h"
#include "prequal/quantize.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"quantize_fp8"> {};

using quantize::blocks_of;
using quantize::Plain;
using quantize::Result;

template <Fp8 F, class T>
void by_tensor(const Context& context, const Plain<T>& from, const Result& to, bool aligned_words) {
  const int64_t chunks = to.rows * ((to.width + quantize::chunk_width<T> - 1) / quantize::chunk_width<T>);
  const auto run = [&]<bool Ragged>() {
    constexpr int threads = quantize::tensor_threads;
    std::optional<Buffer> amax;
    dim3 parts(1);
    if (!to.given) {
      constexpr auto first = quantize::tensor_amax<T, Ragged>;
      parts = quantize::grid_of(std::min(chunks, resident_blocks<first>(context, threads)));
      amax.emplace(context.empty({static_cast<int64_t>(parts.x)}, DType::f32));
      launch<first>(context, parts, dim3(threads), from, to, amax->template as<float>());
    }
    constexpr auto second = quantize::tensor<F, T, Ragged>;
    const dim3 grid = quantize::grid_of(std::min(chunks, resident_blocks<second>(context, threads)));
    launch<second>(context, grid, dim3(threads), from, to,
                   static_cast<const float*>(amax ? amax->template as<float>() : nullptr), static_cast<int>(parts.x));
  };
  if (aligned_words) {
    run.template operator()<false>();
  } else {
    run.template operator()<true>();
  }
}

template <Fp8 F, class T>
void by_tile(const Context& context, const Plain<T>& from, const Result& to, int64_t matrix_rows, bool aligned_words) {
  const int64_t matrices = to.rows / matrix_rows;
  const auto at_most = [](int64_t blocks, int64_t most) { return static_cast<unsigned>(std::min(blocks, most)); };
  const dim3 grid(at_most(blocks_of(to.width), 0x7fffffff), at_most(blocks_of(matrix_rows), 65'535),
                  at_most(matrices, 65'535));
  const dim3 threads(quantize::tile_threads<T>);
  if (aligned_words) {
    launch<quantize::tiles<F, T, false>>(context, grid, threads, from, to, matrix_rows, matrices);
  } else {
    launch<quantize::tiles<F, T, true>>(context, grid, threads, from, to, matrix_rows, matrices);
  }
}

// ---- and back --------------------------------------------------------------------------------------------------------

struct Scaled {
  const uint8_t* q;    // [rows, H]
  int64_t stride;      // elements from row to row
  const float* scale;  // as quantize_fp8 gives them
  int64_t rows;
  int width;
  int64_t matrix_rows;  // of a matrix of blocks; 1 where rows have scales of their own, 0 where all share one
  int64_t rows_of_scales, groups;
  int group_shift;    // 2^group_shift columns share a scale
  unsigned across;    // blocks a row, or a group of rows
  int columns_shift;  // 2^columns_shift threads side by side in a row
  bool by_column;
};

// A thread takes 8 codes twice: its loads are whole sectors of a warp's and its stores whole lines.
inline constexpr int back_threads = 256, back_codes = 8, back_items = 2;

// Where a thread's row and columns are takes no division but one of 32 bits, and a code is two instructions with its
// product: with three divisions of 64 bits a thread and codes taken apart in integers, bf16 [16384, 4096] took 88 us.
template <Fp8 F, class T, bool Ragged>
__global__ void __launch_bounds__(back_threads) back(const Scaled a, T* out /*[rows, H]*/) {
  constexpr int N = back_codes, n = widest<T>;
  const unsigned down = blockIdx.x / a.across, chunk = blockIdx.x - down * a.across;
  const int side = 1 << a.columns_shift, place = static_cast<int>(threadIdx.x) & (side - 1);
  const int64_t row =
      (static_cast<int64_t>(down) << (8 - a.columns_shift)) + (static_cast<int>(threadIdx.x) >> a.columns_shift);
  if (row >= a.rows) return;

  const uint8_t* from = a.q + row * a.stride;
  const auto column = [&](int item) { return static_cast<int64_t>(chunk * back_items + item) * side + place; };
  Codes8 codes[back_items];
#pragma unroll
  for (int item = 0; item < back_items; ++item) {
    codes[item] = load_codes<Ragged>(from, column(item) * N, a.width);
  }
  int64_t scales_row = row;
  if (a.matrix_rows > 1) {
    const int64_t matrix = row < a.matrix_rows ? 0 : row / a.matrix_rows;
    scales_row = matrix * blocks_of(a.matrix_rows) + (row - matrix * a.matrix_rows) / quantize::block;
  }

  T* to = out + row * a.width;
#pragma unroll
  for (int item = 0; item < back_items; ++item) {
    const int64_t first = column(item) * N;
    if (first >= a.width) return;
    const int64_t group = first >> a.group_shift;
    const int64_t at = a.matrix_rows == 0 ? 0
                       : a.by_column      ? group * a.rows_of_scales + scales_row
                                          : scales_row * a.groups + group;
    const float scale = __ldg(a.scale + at);
    float value[N];
    floats_of<F>(codes[item], value);
#pragma unroll
    for (int i = 0; i < N; i += n) {
      float part[n];
#pragma unroll
      for (int j = 0; j < n; ++j) part[j] = __fmul_rn(value[i + j], scale);
      const Packet<T> packet = pack<T>(part);
      if constexpr (Ragged) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
          if (first + i + j < a.width) to[first + i + j] = packet.element(j);
        }
      } else {
        store_packet<false>(to, static_cast<int>(first) + i, a.width, packet);
      }
    }
  }
}

}  // namespace

std::tuple<Buffer, Buffer> quantize_fp8(const Context& context, const Tensor& x /*[..., H]*/,
                                        const std::string& granularity, DType dtype,
                                        const std::optional<Tensor>& scale /*as the result's*/,
                                        const std::optional<double>& scale_upper_bound, bool ue8m0,
                                        const std::string& scale_layout) {
  quantize::must_be_granularity(granularity, false);
  if (!is_fp8(dtype)) wrong_value("dtype", "float8_e4m3fn or float8_e5m2", name_of(dtype));
  const float bound = quantize::bound_of(scale_upper_bound, ue8m0);
  const bool by_column = quantize::is_by_column(scale_layout);
  quantize::must_have_rows(x, "x", granularity);
  if (scale) {
    quantize::must_be_scales(*scale, x, "x", granularity, by_column);
    if (scale_upper_bound) wrong_value("scale_upper_bound", "none beside a scale that is given", "one");
    if (ue8m0) wrong_value("ue8m0", "none beside a scale that is given", "one");
  }
  const int last = x.rank - 1;
  if (x.shape[last] > quantize::widest_row) throw Refused{"size"};

  std::optional<Buffer> q, found;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const Rows rows = rows_of(x);
    q.emplace(context.empty(x, dtype));
    found.emplace(context.empty(quantize::scales_of(x, granularity, by_column), DType::f32));
    Result to{q->template as<uint8_t>(),
              found->template as<float>(),
              scale ? scale->template as<const float>() : nullptr,
              rows.count,
              x.shape[last],
              bound,
              ue8m0,
              by_column};
    if (found->view().numel() == 0) return;

    Plain<T> from{x.as<const T>(), rows.stride};
    const bool gaps = rows.count > 1 && rows.stride != to.width;
    const auto aligned_words = [&] {
      return to.width % widest<T> == 0 &&
             aligned(x.data, to.rows > 1 ? from.stride * static_cast<int64_t>(sizeof(T)) : 0, 16);
    };
    const auto as_one_row = [&] { to.width *= to.rows, to.rows = 1; };
    quantize::by_format(dtype, [&]<Fp8 F>() {
      // a token of one group of columns: a warp that had it by itself left half of its lanes idle
      const bool one_group = granularity == "token" && to.width > 0 && to.width <= quantize::block;
      if (granularity == "block_1x128" || one_group) {
        if (!gaps && (!by_column || one_group) && to.width % quantize::block == 0) as_one_row();
        return quantize::by_group<F>(context, from, to, aligned_words());
      }
      if (granularity == "token") return quantize::by_token<F>(context, from, to, aligned_words());
      if (granularity == "block_128x128") {
        return by_tile<F>(context, from, to, x.shape[last - 1], aligned_words());
      }
      if (!gaps) as_one_row();
      // what a block holds in registers takes one launch
      const bool held = to.rows == 1 && quantize::plan_for<Plain<T>>(to.width).kind != RowKind::loop;
      if (held) return quantize::by_token<F>(context, from, to, aligned_words());
      by_tensor<F>(context, from, to, aligned_words());
    });
  });
  return {std::move(*q), std::move(*found)};
}

Buffer dequantize_fp8(const Context& context, const Tensor& q /*[..., H]*/, const Tensor& scale /*as of quantize_fp8*/,
                      const std::string& granularity, DType dtype, const std::string& scale_layout) {
  quantize::must_be_granularity(granularity, false);
  const bool by_column = quantize::is_by_column(scale_layout);
  quantize::must_have_rows(q, "q", granularity);
  quantize::must_be_scales(scale, q, "q", granularity, by_column);
  if (!is_fp8(q.dtype)) throw Refused{"dtype"};
  const int last = q.rank - 1;
  if (q.shape[last] > quantize::widest_row) throw Refused{"size"};

  std::optional<Buffer> out;
  dispatch(dtype, Floats{}, [&]<class T>() {
    const Rows rows = rows_of(q);
    out.emplace(context.empty(q, dtype));
    Scaled a{};
    a.q = q.as<const uint8_t>(), a.stride = rows.stride, a.scale = scale.as<const float>();
    a.rows = rows.count, a.width = static_cast<int>(q.shape[last]);
    if (a.rows == 0 || a.width == 0) return;

    a.by_column = by_column;
    a.groups = granularity == "token" ? 1 : blocks_of(a.width);
    a.group_shift = granularity == "token" ? 31 : 7;
    static_assert(quantize::block == 1 << 7);
    if (granularity == "block_128x128") {
      a.matrix_rows = q.shape[last - 1];
      a.rows_of_scales = a.rows / a.matrix_rows * blocks_of(a.matrix_rows);
    } else if (granularity != "tensor") {
      a.matrix_rows = 1, a.rows_of_scales = a.rows;
    }
    const int packets = (a.width + back_codes - 1) / back_codes;
    while (a.columns_shift < 8 && 1 << a.columns_shift < packets) ++a.columns_shift;
    const int of_block = back_items << a.columns_shift, rows_of_block = back_threads >> a.columns_shift;
    a.across = static_cast<unsigned>((packets + of_block - 1) / of_block);
    const int64_t blocks = (a.rows + rows_of_block - 1) / rows_of_block * a.across;
    if (blocks > 0x7fffffff) throw Refused{"size"};

    const bool words = a.width % 8 == 0 && aligned(q.data, a.rows > 1 ? a.stride : 0, 8);
    quantize::by_format(q.dtype, [&]<Fp8 F>() {
      const dim3 grid(static_cast<unsigned>(blocks));
      if (words) {
        launch<back<F, T, false>>(context, grid, dim3(back_threads), a, out->template as<T>());
      } else {
        launch<back<F, T, true>>(context, grid, dim3(back_threads), a, out->template as<T>());
      }
    });
  });
  return std::move(*out);
}

}  // namespace prequal::ops
