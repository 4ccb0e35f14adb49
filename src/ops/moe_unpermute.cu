// y[t] = sum over j of weights[t, j] * yp[row_map[t, j]], without the dropped ones (-1).   yp [R, H] -> y [T, H]
// A warp owns a token and goes through its row once, all k rows at a time. Backward: so, too, with a part of grad in
// registers for all k rows; rows of yp that no token has get zeros.
// Bytes: T k H sizeof(T) read, T H sizeof(T) written; backward T (2 k + 1) H sizeof(T), T (k + 1) H without weights' gradient.
// Numerics: fp32, in the order of j, product and sum rounded each; one rounding at the store. No atomics.
#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>

#include "ops.h"
#include "prequal/access.cuh"
#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/launch.h"
#include "prequal/reduce.cuh"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"moe_unpermute"> {};

constexpr int most_chosen = 32;  // a lane has one each
constexpr int64_t widest_row = int64_t{1} << 30;
constexpr int threads = 256, warps = threads / 32;
constexpr int items = 4;  // accesses of a row that a lane works on
constexpr unsigned whole_warp = 0xffffffffu;

// Where the rows of a token lie, and what they count.
struct Choice {
  const void* row_map;  // [T, k]
  const void* weights;  // [T, k] or null: all of them one
  bool wide;            // row_map of int64, else int32
  DType dtype;          // of weights
  int64_t token_stride, choice_stride, weight_token_stride, weight_choice_stride;
  int64_t tokens, rows;  // T, R
  int chosen;            // k

  // -1 where there is no such row.
  __device__ __forceinline__ int64_t row_at(int64_t token, int j) const {
    const int64_t place = token * token_stride + j * choice_stride;
    const int64_t found =
        wide ? static_cast<const int64_t*>(row_map)[place] : static_cast<const int32_t*>(row_map)[place];
    return found >= 0 && found < rows ? found : -1;
  }
  __device__ __forceinline__ float weight_at(int64_t token, int j) const {
    if (!weights) return 1.0f;
    const int64_t place = token * weight_token_stride + j * weight_choice_stride;
    if (dtype == DType::f32) return static_cast<const float*>(weights)[place];
    if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(weights)[place]);
    return to_float(static_cast<const __half*>(weights)[place]);
  }
};

constexpr int rows_ahead = 2;  // of a token, on their way at a time

template <class T, bool Words>
__global__ void __launch_bounds__(threads, 3)
    unpermute_kernel(Choice a, const T* yp /*[R, H]*/, int64_t stride, T* y /*[T, H]*/, int width) {
  using Of = Access<T, Words>;
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (token >= a.tokens) return;

  const int64_t own_row = lane < a.chosen ? a.row_at(token, lane) : -1;
  const float own_weight = own_row >= 0 ? a.weight_at(token, lane) : 0.0f;
  constexpr int step = 32 * Of::values;
  for (int begin = 0; begin < width; begin += items * step) {
    const int first = begin + lane * Of::values;
    float sum[items][Of::values] = {};
    for (int j = 0; j < a.chosen; j += rows_ahead) {
      typename Of::Held held[rows_ahead][items];
#pragma unroll
      for (int next = 0; next < rows_ahead; ++next) {
        const int64_t row = __shfl_sync(whole_warp, own_row, (j + next) % 32);
        const T* from = yp + row * stride + first;
#pragma unroll
        for (int item = 0; item < items; ++item) {
          const bool there = row >= 0 && j + next < a.chosen && first + item * step < width;
          held[next][item] = there ? Of::read(from + item * step) : Of::none();
        }
      }
#pragma unroll
      for (int next = 0; next < rows_ahead; ++next) {
        const float weight = __shfl_sync(whole_warp, own_weight, (j + next) % 32);
        if (j + next >= a.chosen) break;
#pragma unroll
        for (int item = 0; item < items; ++item) {
#pragma unroll
          for (int i = 0; i < Of::values; ++i) {
            sum[item][i] = add(sum[item][i], mul(weight, Of::value(held[next][item], i)));
          }
        }
      }
    }
#pragma unroll
    for (int item = 0; item < items; ++item) {
      if (first + item * step < width) Of::write(y + token * width + (first + item * step), sum[item]);
    }
  }
}

// taken[r] = 1 for the rows that a token has.
__global__ void __launch_bounds__(threads) mark_kernel(Choice a, uint8_t* taken /*[R]*/) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= a.tokens * a.chosen) return;
  const int64_t row = a.row_at(i / a.chosen, static_cast<int>(i % a.chosen));
  if (row >= 0) taken[row] = 1;
}

template <class T>
struct Backward {
  const T* grad;  // [T, H]
  const T* yp;    // [R, H]
  int64_t grad_stride, yp_stride;
  T* dyp;                // [R, H]
  void* dweights;        // [T, k] of the dtype of weights, or null
  const uint8_t* taken;  // [R]
  int width;
};

template <class T, bool Words>
__global__ void __launch_bounds__(threads, 3) unpermute_backward_kernel(Choice a, Backward<T> b) {
  using Of = Access<T, Words>;
  const int lane = threadIdx.x % 32;
  const int64_t all_warps = static_cast<int64_t>(gridDim.x) * warps;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  constexpr int step = 32 * Of::values;

  for (int64_t token = warp; token < a.tokens; token += all_warps) {
    const int64_t own_row = lane < a.chosen ? a.row_at(token, lane) : -1;
    const float own_weight = own_row >= 0 ? a.weight_at(token, lane) : 0.0f;
    float own_dot = 0.0f;
    for (int begin = 0; begin < b.width; begin += items * step) {
      const int first = begin + lane * Of::values;
      typename Of::Held grad[items];
#pragma unroll
      for (int item = 0; item < items; ++item) {
        const int column = first + item * step;
        grad[item] = column < b.width ? Of::read(b.grad + token * b.grad_stride + column) : Of::none();
      }
#pragma unroll 1
      for (int j = 0; j < a.chosen; ++j) {  // one at a time: two take 127 registers, for 80
        const int64_t row = __shfl_sync(whole_warp, own_row, j);
        const float weight = __shfl_sync(whole_warp, own_weight, j);
        if (row < 0) continue;
        typename Of::Held value[items];
#pragma unroll
        for (int item = 0; item < items; ++item) {
          const int column = first + item * step;
          value[item] = b.dweights && column < b.width ? Of::read(b.yp + row * b.yp_stride + column) : Of::none();
        }
        float dot = 0.0f;
#pragma unroll
        for (int item = 0; item < items; ++item) {
          float share[Of::values];
#pragma unroll
          for (int i = 0; i < Of::values; ++i) {
            const float own = Of::value(grad[item], i);
            dot += own * Of::value(value[item], i);
            share[i] = mul(own, weight);
          }
          if (first + item * step < b.width) Of::write(b.dyp + row * b.width + first + item * step, share);
        }
        if (!b.dweights) continue;
        dot = warp_sum(dot);
        if (lane == j) own_dot += dot;
      }
    }
    if (!b.dweights || lane >= a.chosen) continue;
    const int64_t place = token * a.chosen + lane;
    if (a.dtype == DType::f32) {
      static_cast<float*>(b.dweights)[place] = own_dot;
    } else if (a.dtype == DType::bf16) {
      static_cast<__nv_bfloat16*>(b.dweights)[place] = from_float<__nv_bfloat16>(own_dot);
    } else {
      static_cast<__half*>(b.dweights)[place] = from_float<__half>(own_dot);
    }
  }

  const float zeros[Of::values] = {};
  for (int64_t row = warp; row < a.rows; row += all_warps) {
    if (b.taken[row]) continue;
    for (int column = lane * Of::values; column < b.width; column += step) {
      Of::write(b.dyp + row * b.width + column, zeros);
    }
  }
}

Choice choice_of(const Tensor& yp, const Tensor& row_map, const std::optional<Tensor>& weights) {
  if (yp.rank != 2) wrong_value("yp", "shape [R, H]", shape_of(yp));
  if (row_map.dtype != DType::i32 && row_map.dtype != DType::i64) {
    wrong_type("row_map", "int32 or int64", name_of(row_map.dtype));
  }
  if (row_map.rank != 2) wrong_value("row_map", "shape [T, k]", shape_of(row_map));
  if (weights) {
    if (weights->dtype > DType::f64 && weights->dtype != DType::other) {
      wrong_type("weights", "a floating dtype", name_of(weights->dtype));
    }
    if (weights->rank != 2 || weights->shape[0] != row_map.shape[0] || weights->shape[1] != row_map.shape[1]) {
      wrong_value("weights", "the shape " + shape_of(row_map) + " of row_map", shape_of(*weights));
    }
  }
  if (yp.shape[1] > widest_row || row_map.shape[1] > most_chosen) throw Refused{"size"};
  if (yp.shape[1] > 1 && yp.stride[1] != 1) throw Refused{"unit_stride"};
  if (weights && weights->dtype != DType::f32 && weights->dtype != yp.dtype) throw Refused{"dtype"};

  Choice a{};
  a.row_map = row_map.data, a.wide = row_map.dtype == DType::i64;
  a.token_stride = row_map.stride[0], a.choice_stride = row_map.stride[1];
  a.tokens = row_map.shape[0], a.chosen = static_cast<int>(row_map.shape[1]), a.rows = yp.shape[0];
  if (weights) {
    a.weights = weights->data, a.dtype = weights->dtype;
    a.weight_token_stride = weights->stride[0], a.weight_choice_stride = weights->stride[1];
  }
  return a;
}

bool in_words(const Tensor& x) {
  return x.shape[1] * x.itemsize % 16 == 0 && aligned(x.data, x.stride[0] * x.itemsize, 16);
}

dim3 blocks_for(int64_t count, int each) { return dim3(static_cast<unsigned>((count + each - 1) / each)); }

}  // namespace

Buffer moe_unpermute(const Context& context, const Tensor& yp /*[R, H]*/, const Tensor& row_map /*[T, k]*/,
                     const std::optional<Tensor>& weights /*[T, k]*/) {
  const Choice a = choice_of(yp, row_map, weights);
  std::optional<Buffer> y;
  dispatch(yp.dtype, Floats{}, [&]<class T>() {
    const int width = static_cast<int>(yp.shape[1]);
    const int64_t stride = yp.stride[0];
    y.emplace(context.empty({a.tokens, width}, yp.dtype));
    if (a.tokens == 0 || width == 0) return;
    const dim3 grid = blocks_for(a.tokens, warps);
    if (in_words(yp)) {
      launch<unpermute_kernel<T, true>>(context, grid, dim3(threads), a, yp.as<const T>(), stride, y->as<T>(), width);
    } else {
      launch<unpermute_kernel<T, false>>(context, grid, dim3(threads), a, yp.as<const T>(), stride, y->as<T>(), width);
    }
  });
  return std::move(*y);
}

std::tuple<Buffer, Buffer> moe_unpermute_backward(const Context& context, const Tensor& grad /*[T, H]*/,
                                                  const Tensor& yp /*[R, H]*/, const Tensor& row_map /*[T, k]*/,
                                                  const std::optional<Tensor>& weights /*[T, k]*/, bool weights_grad) {
  if (yp.rank != 2) wrong_value("yp", "shape [R, H]", shape_of(yp));
  if (row_map.rank == 2 && (grad.rank != 2 || grad.shape[0] != row_map.shape[0] || grad.shape[1] != yp.shape[1])) {
    const std::string wanted = std::to_string(row_map.shape[0]) + ", " + std::to_string(yp.shape[1]);
    wrong_value("grad", "shape [" + wanted + "]", shape_of(grad));
  }
  if (grad.dtype != yp.dtype) wrong_type("grad", std::string(name_of(yp.dtype)) + " like yp", name_of(grad.dtype));
  const Choice a = choice_of(yp, row_map, weights);
  if (grad.shape[1] > 1 && grad.stride[1] != 1) throw Refused{"unit_stride"};

  std::optional<Buffer> dyp, dweights;
  dispatch(yp.dtype, Floats{}, [&]<class T>() {
    const bool asks = weights && weights_grad;
    dyp.emplace(context.empty({a.rows, yp.shape[1]}, yp.dtype));
    dweights.emplace(context.empty({asks ? a.tokens : 0, a.chosen}, weights ? weights->dtype : DType::f32));
    const Buffer taken = context.empty({a.rows}, DType::u8);
    if (a.rows > 0) {
      const auto stream = static_cast<cudaStream_t>(context.stream);
      check(cudaMemsetAsync(taken.as<uint8_t>(), 0, static_cast<size_t>(a.rows), stream), "memset");
      if (const int64_t all = a.tokens * a.chosen; all > 0) {
        launch<mark_kernel>(context, blocks_for(all, threads), dim3(threads), a, taken.as<uint8_t>());
      }
    }

    Backward<T> b{};
    b.grad = grad.as<const T>(), b.grad_stride = grad.stride[0];
    b.yp = yp.as<const T>(), b.yp_stride = yp.stride[0];
    b.dyp = dyp->template as<T>(), b.dweights = asks ? dweights->view().data : nullptr;
    b.taken = taken.as<const uint8_t>(), b.width = static_cast<int>(yp.shape[1]);
    const int64_t work = std::max(a.tokens, a.rows);
    if (work == 0) return;
    const auto run = [&]<bool Words>(std::bool_constant<Words>) {
      constexpr auto kernel = unpermute_backward_kernel<T, Words>;
      const int64_t wanted = (work + warps - 1) / warps;
      const int64_t blocks = std::min(wanted, 4 * resident_blocks<kernel>(context, threads));
      launch<kernel>(context, dim3(static_cast<unsigned>(blocks)), dim3(threads), a, b);
    };
    if (in_words(yp) && in_words(grad)) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
  return {std::move(*dyp), std::move(*dweights)};
}

}  // namespace prequal::ops
