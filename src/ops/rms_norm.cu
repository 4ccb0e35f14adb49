// y = x * rsqrt(mean(x^2) + eps) * weight, over the last dimension.   x [..., H] -> y [..., H], weight [H] or none.
// Short rows: a warp owns a row. Longer: a block owns a row. The row stays in registers, so each byte is read once.
// Bytes: 2 * numel * sizeof(T) + H * sizeof(weight); beyond 32,768 halves or 16,384 floats the row is read twice (the
// second time from L2).
// Numerics: everything between the load and the one rounding at the store is fp32; sums in a fixed order.
#include <algorithm>
#include <optional>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/reduce.cuh"
#include "prequal/row_plan.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Shape {
  int64_t rows;
  int width;
  int64_t x_stride;  // elements from row to row
  float eps;
};

// A weight of x's dtype or fp32; the choice is the same for every thread.
template <class T>
struct Weight {
  const T* same;      // [H] or null
  const float* full;  // [H] or null

  template <int N>
  __device__ __forceinline__ void scale(float (&value)[N], int column) const {
    if (same) {
      const Vec<T, N> w = load<N>(same + column);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] *= to_float(w.at[i]);
    } else if (full) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] *= full[column + i];
    }
  }
};

template <class T, int N>
__device__ __forceinline__ float sum_of_squares(const Vec<T, N>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += to_float(x.at[i]) * to_float(x.at[i]);
  return sum;
}

template <class T, int N>
__device__ __forceinline__ void write(T* y, const Vec<T, N>& x, float rstd, const Weight<T>& weight, int column) {
  float value[N];
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = to_float(x.at[i]) * rstd;
  weight.template scale<N>(value, column);

  Vec<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.at[i] = from_float<T>(value[i]);
  store(y + column, out);
}

// One row of at most Items accesses a thread, by `threads` threads of which this is number `thread`.
template <class T, int N, int Items, class Sum>
__device__ __forceinline__ void row_in_registers(const T* x, T* y, const Weight<T>& weight, const Shape& shape,
                                                 int thread, int threads, Sum&& sum_over_row) {
  Vec<T, N> held[Items];
  float sum = 0.0f;
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    const int column = (item * threads + thread) * N;
    if (column < shape.width) held[item] = load<N>(x + column);
  }
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    if ((item * threads + thread) * N < shape.width) sum += sum_of_squares(held[item]);
  }

  const float rstd = rsqrtf(sum_over_row(sum) / shape.width + shape.eps);

#pragma unroll
  for (int item = 0; item < Items; ++item) {
    const int column = (item * threads + thread) * N;
    if (column < shape.width) write(y, held[item], rstd, weight, column);
  }
}

template <class T, int N, int Items>
__global__ void warp_rows(const T* x /*[rows, H]*/, T* y /*[rows, H]*/, Weight<T> weight, Shape shape) {
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < shape.rows; row += step) {
    row_in_registers<T, N, Items>(x + row * shape.x_stride, y + row * shape.width, weight, shape, lane, 32,
                                  [](float sum) { return warp_sum(sum); });
  }
}

// Resident blocks decide: bf16 [16384, 4096] took 69.7 us at no more than 40 registers (6 blocks of 256 threads on an SM of
// sm_90), 77.8 at 48, 72.6 at 32; a persistent grid that holds the weight and fetches the next row ahead, 73.5 at best.
// 4 items of 8 halves want 72, and a block of 1024 may have 64.
template <class T, int N, int Items>
__global__ void __launch_bounds__(Items == 2 ? 512 : 1024, Items == 2 ? 3 : 1)
    block_rows(const T* __restrict__ x /*[rows, H]*/, T* __restrict__ y /*[rows, H]*/, Weight<T> weight, Shape shape) {
  __shared__ float scratch[2][32];
  int turn = 0;  // two scratch rows: the next sum may begin before every thread has read this one
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x, turn ^= 1) {
    row_in_registers<T, N, Items>(x + row * shape.x_stride, y + row * shape.width, weight, shape, threadIdx.x,
                                  blockDim.x, [&](float sum) { return block_sum(sum, scratch[turn]); });
  }
}

template <class T, int N>
__global__ void loop_rows(const T* x /*[rows, H]*/, T* y /*[rows, H]*/, Weight<T> weight, Shape shape) {
  __shared__ float scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x, turn ^= 1) {
    const T* from = x + row * shape.x_stride;
    T* to = y + row * shape.width;

    float sum = 0.0f;
    for (int column = threadIdx.x * N; column < shape.width; column += blockDim.x * N) {
      sum += sum_of_squares(load<N>(from + column));
    }
    const float rstd = rsqrtf(block_sum(sum, scratch[turn]) / shape.width + shape.eps);

    for (int column = threadIdx.x * N; column < shape.width; column += blockDim.x * N) {
      write(to, load<N>(from + column), rstd, weight, column);
    }
  }
}

template <class T, int N>
void launch_rows(const Context& context, const T* x, T* y, const Weight<T>& weight, const Shape& shape) {
  const RowPlan plan = row_plan(shape.width, N);
  const int64_t blocks = (shape.rows + plan.rows - 1) / plan.rows;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff)));
  const dim3 block(plan.threads);

  switch (plan.kind) {
    case RowKind::warp:
      switch (plan.items) {
        case 1: return launch<warp_rows<T, N, 1>>(context, grid, block, x, y, weight, shape);
        case 2: return launch<warp_rows<T, N, 2>>(context, grid, block, x, y, weight, shape);
        case 4: return launch<warp_rows<T, N, 4>>(context, grid, block, x, y, weight, shape);
      }
      break;
    case RowKind::block:
      switch (plan.items) {
        case 2: return launch<block_rows<T, N, 2>>(context, grid, block, x, y, weight, shape);
        case 4: return launch<block_rows<T, N, 4>>(context, grid, block, x, y, weight, shape);
      }
      break;
    case RowKind::loop: return launch<loop_rows<T, N>>(context, grid, block, x, y, weight, shape);
  }
  throw std::logic_error("rms_norm: row_plan made a plan that no kernel follows");
}

}  // namespace

Buffer rms_norm(const Context& context, const Tensor& x /*[..., H]*/, const std::optional<Tensor>& weight /*[H]*/,
                double eps) {
  if (x.rank < 1) wrong_value("x", "at least one dimension", "a 0-dimensional tensor");
  const int64_t width = x.shape[x.rank - 1];
  if (weight && (weight->rank != 1 || weight->shape[0] != width)) {
    wrong_value("weight", "shape [" + std::to_string(width) + "] to match the last dimension of x", shape_of(*weight));
  }
  if (width > 0x7fffffff) throw Refused{"size"};

  std::optional<Buffer> y;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    Weight<T> scale{};
    if (weight) {
      if (weight->stride[0] != 1 && width > 1) throw Refused{"unit_stride"};
      if (weight->dtype == x.dtype) {
        scale.same = weight->as<const T>();
      } else if (weight->dtype == DType::f32) {
        scale.full = weight->as<const float>();
      } else {
        throw Refused{"dtype"};
      }
    }
    const Rows rows = rows_of(x);
    y.emplace(context.empty_like(x));
    if (rows.count == 0 || width == 0) return;

    const Shape shape{rows.count, static_cast<int>(width), rows.stride, static_cast<float>(eps)};
    constexpr int vec = widest<T>;
    const bool wide = width % vec == 0 && aligned(x.data, rows.stride * static_cast<int64_t>(sizeof(T)), 16) &&
                      (!scale.same || aligned(scale.same, 0, 16));
    if (wide) {
      launch_rows<T, vec>(context, x.as<const T>(), y->as<T>(), scale, shape);
    } else {
      launch_rows<T, 1>(context, x.as<const T>(), y->as<T>(), scale, shape);
    }
  });
  return std::move(*y);
}

}  // namespace prequal::ops
