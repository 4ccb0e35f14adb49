// act(gate) * up, element by element, and its gradient: the kernels of swiglu and geglu.
//
// A block takes a chunk of a row; rows that follow each other without a gap are one row. Packed input holds gate and up
// in one tensor [..., 2 I]: as halves, which are two strided tensors, or interleaved (gate 0, up 0, gate 1, ...).
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/overlap.h"
#include "prequal/vec.cuh"

namespace prequal::gated {

// 1 / (1 + exp(-x)). Fast: the two special function units; its error of 2^-16 at |x| = 80 and less below is lost in the
// rounding to a half. Below -88 it is 0 where the formula gives less than 2^-126.
template <bool Fast>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (Fast) return __fdividef(1.0f, 1.0f + __expf(-x));
  return 1.0f / (1.0f + expf(-x));
}

// Each: value(x), eager(x), which is torch's formula with what it loses to cancellation, and value and slope at once.
template <bool Fast>
struct Silu {
  static constexpr bool fast = Fast;
  __device__ static float value(float x) {
    if constexpr (Fast) return __fdividef(x, 1.0f + __expf(-x));
    return eager(x);
  }
  __device__ static float eager(float x) { return x / (1.0f + expf(-x)); }
  __device__ static void gradient(float x, float& value, float& slope) {
    const float s = sigmoid<Fast>(x);
    value = x * s;
    slope = s * (1.0f + x * (1.0f - s));
  }
};

inline constexpr float beta = 0.7978845608028654f;  // sqrt(2 / pi)
inline constexpr float kappa = 0.044715f;
inline constexpr float root_half = 0.7071067811865476f;
inline constexpr float density_at_zero = 0.3989422804014327f;  // 1 / sqrt(2 pi)

// 0.5 x (1 + tanh(u)) is x sigmoid(2 u), which does not cancel where tanh is near -1.
template <bool Fast>
struct GeluTanh {
  static constexpr bool fast = Fast;
  __device__ static float value(float x) { return x * sigmoid<Fast>(2.0f * beta * (x + kappa * x * x * x)); }
  __device__ static float eager(float x) { return 0.5f * x * (1.0f + tanhf(beta * (x + kappa * x * x * x))); }
  __device__ static void gradient(float x, float& value, float& slope) {
    const float s = sigmoid<Fast>(2.0f * beta * (x + kappa * x * x * x));
    value = x * s;
    slope = s + value * (1.0f - s) * (2.0f * beta * (1.0f + 3.0f * kappa * x * x));
  }
};

template <bool Fast>
struct GeluErf {
  static constexpr bool fast = Fast;
  __device__ static float value(float x) { return 0.5f * x * (1.0f + erff(x * root_half)); }
  __device__ static float eager(float x) { return value(x); }
  __device__ static void gradient(float x, float& value, float& slope) {
    const float cdf = 0.5f * (1.0f + erff(x * root_half));
    const float density = density_at_zero * (Fast ? __expf(-0.5f * x * x) : expf(-0.5f * x * x));
    value = x * cdf;
    slope = cdf + x * density;
  }
};

// Rows of one length; `stride` elements from row to row.
template <class T>
struct Rows {
  T* at;
  int64_t stride;
};

template <class T>
struct Shape {
  int64_t rows;
  int64_t width;   // of the result
  int64_t chunks;  // of a row
};

inline constexpr int threads = 256;
inline constexpr int items = 2;  // accesses a thread and tensor

template <class T>
inline constexpr int chunk_width = threads * items * widest<T>;

// body(row, column of the chunk, columns left in the row from there)
template <class T, class Body>
__device__ __forceinline__ void each_chunk(const Shape<T>& shape, Body&& body) {
  const int64_t total = shape.rows * shape.chunks;
  for (int64_t chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64_t row = chunk / shape.chunks, column = (chunk - row * shape.chunks) * chunk_width<T>;
    const int64_t left = shape.width - column;
    body(row, column, static_cast<int>(left < (1 << 29) ? left : 1 << 29));
  }
}

__device__ __forceinline__ int place(int item, int vec) { return (item * threads + threadIdx.x) * vec; }

template <class Act, bool Exact, class T>
__device__ __forceinline__ float product(float gate, float up) {
  return (Exact ? rounded<T>(Act::eager(gate)) : Act::value(gate)) * up;
}

template <class Act, bool Exact, class T, bool Ragged>
__global__ void __launch_bounds__(threads)
    apart(Rows<const T> gate /*[rows, I]*/, Rows<const T> up /*[rows, I]*/, Rows<T> out /*[rows, I]*/, Shape<T> shape) {
  constexpr int N = widest<T>;
  each_chunk(shape, [&](int64_t row, int64_t column, int left) {
    const T* g = gate.at + row * gate.stride + column;
    const T* u = up.at + row * up.stride + column;
    T* to = out.at + row * out.stride + column;

    Packet<T> a[items], b[items];
#pragma unroll
    for (int item = 0; item < items; ++item) {
      a[item] = load_packet<Ragged>(g, place(item, N), left);
      b[item] = load_packet<Ragged>(u, place(item, N), left);
    }
#pragma unroll
    for (int item = 0; item < items; ++item) {
      float value[N];
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = product<Act, Exact, T>(a[item][i], b[item][i]);
      store_packet<Ragged>(to, place(item, N), left, pack<T>(value));
    }
  });
}

// Interleaved: two packets of pairs make one of results.
template <class Act, bool Exact, class T, bool Ragged>
__global__ void __launch_bounds__(threads)
    interleaved(Rows<const T> x /*[rows, 2 I]*/, Rows<T> out /*[rows, I]*/, Shape<T> shape) {
  constexpr int N = widest<T>;
  each_chunk(shape, [&](int64_t row, int64_t column, int left) {
    const T* pairs = x.at + row * x.stride + 2 * column;
    T* to = out.at + row * out.stride + column;

    Packet<T> two[items][2];
#pragma unroll
    for (int item = 0; item < items; ++item) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        two[item][half] = load_packet<Ragged>(pairs, 2 * place(item, N) + half * N, 2 * left);
      }
    }
#pragma unroll
    for (int item = 0; item < items; ++item) {
      float value[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Packet<T>& of = two[item][i / (N / 2)];
        value[i] = product<Act, Exact, T>(of[2 * i % N], of[2 * i % N + 1]);
      }
      store_packet<Ragged>(to, place(item, N), left, pack<T>(value));
    }
  });
}

template <class Act>
__device__ __forceinline__ void differentiate(float grad, float& gate, float& up) {
  float value, slope;
  Act::gradient(gate, value, slope);
  gate = grad * up * slope;
  up = grad * value;
}

template <class Act, class T, bool Ragged>
__global__ void __launch_bounds__(threads)
    gradient_apart(Rows<const T> grad /*[rows, I]*/, Rows<const T> gate /*[rows, I]*/, Rows<const T> up /*[rows, I]*/,
                   Rows<T> dgate /*[rows, I]*/, Rows<T> dup /*[rows, I]*/, Shape<T> shape) {
  constexpr int N = widest<T>;
  each_chunk(shape, [&](int64_t row, int64_t column, int left) {
    Packet<T> a[items], b[items], c[items];
#pragma unroll
    for (int item = 0; item < items; ++item) {
      a[item] = load_packet<Ragged>(gate.at + row * gate.stride + column, place(item, N), left);
      b[item] = load_packet<Ragged>(up.at + row * up.stride + column, place(item, N), left);
      c[item] = load_packet<Ragged>(grad.at + row * grad.stride + column, place(item, N), left);
    }
#pragma unroll
    for (int item = 0; item < items; ++item) {
      float g[N], u[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        g[i] = a[item][i], u[i] = b[item][i];
        differentiate<Act>(c[item][i], g[i], u[i]);
      }
      store_packet<Ragged>(dgate.at + row * dgate.stride + column, place(item, N), left, pack<T>(g));
      store_packet<Ragged>(dup.at + row * dup.stride + column, place(item, N), left, pack<T>(u));
    }
  });
}

template <class Act, class T, bool Ragged>
__global__ void __launch_bounds__(threads)
    gradient_interleaved(Rows<const T> grad /*[rows, I]*/, Rows<const T> x /*[rows, 2 I]*/, Rows<T> dx /*[rows, 2 I]*/,
                         Shape<T> shape) {
  constexpr int N = widest<T>;
  each_chunk(shape, [&](int64_t row, int64_t column, int left) {
    // A packet of pairs a thread, not one of results: the packets that a warp stores must follow each other.
    const T* pairs = x.at + row * x.stride + 2 * column;
    const T* from = grad.at + row * grad.stride + column;
    T* to = dx.at + row * dx.stride + 2 * column;
    Packet<T> two[2 * items];
    float g[2 * items][N / 2];
#pragma unroll
    for (int item = 0; item < 2 * items; ++item) {
      const int at = place(item, N);
      two[item] = load_packet<Ragged>(pairs, at, 2 * left);
      Vec<T, N / 2> some{};
      if constexpr (Ragged) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          if (at / 2 + i < left) some.at[i] = from[at / 2 + i];
        }
      } else {
        if (at / 2 < left) some = load<N / 2>(from + at / 2);
      }
#pragma unroll
      for (int i = 0; i < N / 2; ++i) g[item][i] = to_float(some.at[i]);
    }
#pragma unroll
    for (int item = 0; item < 2 * items; ++item) {
      float out[N];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        out[2 * i] = two[item][2 * i], out[2 * i + 1] = two[item][2 * i + 1];
        differentiate<Act>(g[item][i], out[2 * i], out[2 * i + 1]);
      }
      store_packet<Ragged>(to, place(item, N), 2 * left, pack<T>(out));
    }
  });
}

// ---- launching -----------------------------------------------------------------------------------------------------

inline dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff))); }

// A tensor's rows, or the left or right half of each.
template <class T>
Rows<T> rows_at(const Tensor& x, int64_t first = 0) {
  return {x.as<T>() + first, rows_of(x).stride};
}

template <class T, class... R>
bool words(const Shape<T>& shape, const R&... tensors) {
  const int64_t size = sizeof(T);
  return shape.width % widest<T> == 0 && (aligned(tensors.at, shape.rows > 1 ? tensors.stride * size : 0, 16) && ...);
}

// Rows without gaps are one row. `times`: columns of a tensor for each column of the result.
template <class T, class... R>
Shape<T> shape_for(int64_t rows, int64_t width, bool gaps) {
  Shape<T> shape{rows, width, 0};
  if (!gaps) shape.width *= shape.rows, shape.rows = 1;
  shape.chunks = (shape.width + chunk_width<T> - 1) / chunk_width<T>;
  return shape;
}

inline int64_t width_of(const Tensor& x, const char* argument) {
  if (x.rank < 1) wrong_value(argument, "at least one dimension", "a 0-dimensional tensor");
  return x.shape[x.rank - 1];
}

inline int64_t half_of(const Tensor& x) {
  const int64_t width = width_of(x, "x");
  if (width % 2 != 0) wrong_value("x", "an even last dimension, gate and up", shape_of(x));
  return width / 2;
}

inline void must_be_like(const Tensor& x, const char* argument, const Tensor& other, const char* name) {
  const bool same = x.rank == other.rank && std::equal(x.shape.begin(), x.shape.begin() + x.rank, other.shape.begin());
  if (!same) wrong_value(argument, "the shape " + shape_of(other) + " of " + name, shape_of(x));
}

inline void must_be_of(const Tensor& x, const char* argument, const Tensor& other, const char* name) {
  if (x.dtype != other.dtype) {
    wrong_type(argument, std::string(name_of(other.dtype)) + " like " + name, name_of(x.dtype));
  }
}

inline Tensor half_shaped(Tensor x, int64_t width) {
  x.shape[x.rank - 1] = width;
  return x;
}

template <class Act, bool Exact, class T>
void start_apart(const Context& context, const Rows<const T>& gate, const Rows<const T>& up, const Rows<T>& to,
                 int64_t rows, int64_t width) {
  const bool gaps = rows > 1 && (gate.stride != width || up.stride != width || to.stride != width);
  const Shape<T> shape = shape_for<T>(rows, width, gaps);
  const dim3 grid = grid_of(shape.rows * shape.chunks);
  if (words(shape, gate, up, to)) {
    launch<apart<Act, Exact, T, false>>(context, grid, dim3(threads), gate, up, to, shape);
  } else {
    launch<apart<Act, Exact, T, true>>(context, grid, dim3(threads), gate, up, to, shape);
  }
}

template <class Act, bool Exact, class T>
void start_interleaved(const Context& context, const Rows<const T>& x, T* out, int64_t rows, int64_t width) {
  const Shape<T> shape = shape_for<T>(rows, width, rows > 1 && x.stride != 2 * width);
  const Rows<T> to{out, width};
  const dim3 grid = grid_of(shape.rows * shape.chunks);
  if (words(shape, x, to)) {
    launch<interleaved<Act, Exact, T, false>>(context, grid, dim3(threads), x, to, shape);
  } else {
    launch<interleaved<Act, Exact, T, true>>(context, grid, dim3(threads), x, to, shape);
  }
}

template <class Act, class T>
void start_gradient_apart(const Context& context, const Rows<const T>& grad, const Rows<const T>& gate,
                          const Rows<const T>& up, const Rows<T>& dgate, const Rows<T>& dup, int64_t rows,
                          int64_t width) {
  const bool gaps = rows > 1 && (grad.stride != width || gate.stride != width || up.stride != width ||
                                 dgate.stride != width || dup.stride != width);
  const Shape<T> shape = shape_for<T>(rows, width, gaps);
  const dim3 grid = grid_of(shape.rows * shape.chunks);
  if (words(shape, grad, gate, up, dgate, dup)) {
    launch<gradient_apart<Act, T, false>>(context, grid, dim3(threads), grad, gate, up, dgate, dup, shape);
  } else {
    launch<gradient_apart<Act, T, true>>(context, grid, dim3(threads), grad, gate, up, dgate, dup, shape);
  }
}

template <class Act, class T>
void start_gradient_interleaved(const Context& context, const Rows<const T>& grad, const Rows<const T>& x,
                                const Rows<T>& dx, int64_t rows, int64_t width) {
  const Shape<T> shape = shape_for<T>(rows, width, rows > 1 && (grad.stride != width || x.stride != 2 * width));
  const dim3 grid = grid_of(shape.rows * shape.chunks);
  if (words(shape, grad, x, dx)) {
    launch<gradient_interleaved<Act, T, false>>(context, grid, dim3(threads), grad, x, dx, shape);
  } else {
    launch<gradient_interleaved<Act, T, true>>(context, grid, dim3(threads), grad, x, dx, shape);
  }
}

// ---- the five launchers of an activation ---------------------------------------------------------------------------
//
// activation(body): body.operator()<Act>() with Act<true> or Act<false>; a template over speed, as halves take the fast
// one.

template <template <bool> class Act, class T, class Body>
void by_rounding(bool exact, Body&& body) {
  if (exact) {
    body.template operator()<Act<false>, true>();
  } else {
    body.template operator()<Act<sizeof(T) == 2>, false>();
  }
}

// out(): the tensor that the result is written into, asked for once the call is known to be right.
template <template <bool> class Act, class Out>
void forward_into(const Context& context, const Tensor& gate, const Tensor& up, bool exact, Out&& out) {
  const int64_t width = width_of(gate, "gate");
  must_be_like(up, "up", gate, "gate");
  must_be_of(up, "up", gate, "gate");
  dispatch(gate.dtype, Floats{}, [&]<class T>() {
    const auto g = rows_at<const T>(gate), u = rows_at<const T>(up);
    const auto to = rows_at<T>(out());
    const int64_t rows = rows_of(gate).count;
    if (rows == 0 || width == 0) return;
    by_rounding<Act, T>(exact,
                        [&]<class A, bool Exact>() { start_apart<A, Exact, T>(context, g, u, to, rows, width); });
  });
}

template <template <bool> class Act>
Buffer forward(const Context& context, const Tensor& gate, const Tensor& up, bool exact) {
  std::optional<Buffer> y;
  forward_into<Act>(context, gate, up, exact, [&] { return y.emplace(context.empty_like(gate)).view(); });
  return std::move(*y);
}

// Into gate: who read an element writes it, and a neighbour that moves a ragged one for it has it from its register.
template <template <bool> class Act>
void forward_in_place(const Context& context, const Tensor& gate, const Tensor& up, bool exact) {
  forward_into<Act>(context, gate, up, exact, [&] {
    must_be_apart(gate, "gate");
    must_be_apart(up, "up", gate, "gate");
    return gate;
  });
}

template <template <bool> class Act>
Buffer forward_packed(const Context& context, const Tensor& x, bool is_interleaved, bool exact) {
  const int64_t width = half_of(x);
  std::optional<Buffer> out;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const auto both = rows_at<const T>(x);
    out.emplace(context.empty(half_shaped(x, width), x.dtype));
    const int64_t rows = rows_of(x).count;
    if (rows == 0 || width == 0) return;
    by_rounding<Act, T>(exact, [&]<class A, bool Exact>() {
      T* to = out->template as<T>();
      if (is_interleaved) {
        start_interleaved<A, Exact, T>(context, both, to, rows, width);
      } else {
        start_apart<A, Exact, T>(context, both, rows_at<const T>(x, width), {to, width}, rows, width);
      }
    });
  });
  return std::move(*out);
}

template <template <bool> class Act>
std::tuple<Buffer, Buffer> backward(const Context& context, const Tensor& grad, const Tensor& gate, const Tensor& up) {
  const int64_t width = width_of(gate, "gate");
  must_be_like(up, "up", gate, "gate");
  must_be_of(up, "up", gate, "gate");
  must_be_like(grad, "grad", gate, "gate");
  if (grad.dtype != gate.dtype) throw Refused{"dtype"};
  std::optional<Buffer> dgate, dup;
  dispatch(gate.dtype, Floats{}, [&]<class T>() {
    const auto d = rows_at<const T>(grad), g = rows_at<const T>(gate), u = rows_at<const T>(up);
    dgate.emplace(context.empty_like(gate));
    dup.emplace(context.empty_like(gate));
    const int64_t rows = rows_of(gate).count;
    if (rows == 0 || width == 0) return;
    start_gradient_apart<Act<sizeof(T) == 2>, T>(context, d, g, u, {dgate->template as<T>(), width},
                                                 {dup->template as<T>(), width}, rows, width);
  });
  return {std::move(*dgate), std::move(*dup)};
}

template <template <bool> class Act>
Buffer backward_packed(const Context& context, const Tensor& grad, const Tensor& x, bool is_interleaved) {
  const int64_t width = half_of(x);
  must_be_like(grad, "grad", half_shaped(x, width), "the result");
  if (grad.dtype != x.dtype) throw Refused{"dtype"};
  std::optional<Buffer> dx;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const auto d = rows_at<const T>(grad), both = rows_at<const T>(x);
    dx.emplace(context.empty_like(x));
    const int64_t rows = rows_of(x).count;
    if (rows == 0 || width == 0) return;
    T* to = dx->template as<T>();
    if (is_interleaved) {
      start_gradient_interleaved<Act<sizeof(T) == 2>, T>(context, d, both, {to, 2 * width}, rows, width);
    } else {
      start_gradient_apart<Act<sizeof(T) == 2>, T>(context, d, both, rows_at<const T>(x, width), {to, 2 * width},
                                                   {to + width, 2 * width}, rows, width);
    }
  });
  return std::move(*dx);
}

}  // namespace prequal::gated
