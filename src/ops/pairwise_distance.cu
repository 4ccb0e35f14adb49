// sum[i, j] = sum over d of |a[i, d] - b[j, d]|^p, or the maximum; a [N, D], b [M, D]; then its root, its least j
// (pairwise_argmin), or all j at most r^2: how many (pairwise_within_counts), and which (pairwise_within_fill).
// A block owns 128 rows of a and of b, 16 dimensions at a time in shared memory, a thread 8 x 8 sums; but for distances
// it walks over the rows of b, and no [N, M] is stored. Bytes: a and b once a tile; written N M 4, or 12 a row or pair.
// Numerics: fp32, d ascending, each step rounded on its own, as the reference does, so that answers are equal.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/launch.h"
#include "prequal/overlap.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"pairwise_distance"> {};

enum class Norm { one, two, most };

constexpr int threads = 256;
constexpr int side = 128;        // rows of a, and of b, of a tile
constexpr int depth = 16;        // dimensions in shared memory
constexpr int pitch = side + 4;  // of a dimension: words of 16 bytes stay aligned
constexpr int across = 16;       // threads of a tile's row
constexpr int own = 8;           // rows of a, and of b, of a thread: four and four, 64 apart
constexpr int blocks_an_sm = 2;  // 64 sums and 16 operands a thread leave no room for a third
constexpr int waves = 4;  // of blocks where a walk is cut into segments, so that the last one is short. Not tuned
constexpr int64_t most_rows = 0x7fffff00;
constexpr uint64_t nobody = ~uint64_t{0};

template <class T>
struct Points {
  const T* at;     // [count, D]
  int64_t stride;  // from row to row
  int count;
};

template <class T>
struct Pair {
  Points<T> a;  // [N, D]
  Points<T> b;  // [M, D]
  int dims;
};

struct Shared {
  float a[depth][pitch];
  float b[depth][pitch];
};

using Sums = float[own][own];

// Of a thread: its i-th row or column in the tile.
__device__ __forceinline__ int row_at(int i) {
  return i / 4 * (side / 2) + static_cast<int>(threadIdx.x) / across * 4 + i % 4;
}
__device__ __forceinline__ int column_at(int j) {
  return j / 4 * (side / 2) + static_cast<int>(threadIdx.x) % across * 4 + j % 4;
}

template <Norm P>
__device__ __forceinline__ float further(float sum, float x, float y) {
  const float difference = sub(x, y);
  if constexpr (P == Norm::two) {
    return add(sum, mul(difference, difference));
  } else if constexpr (P == Norm::one) {
    return add(sum, fabsf(difference));
  } else {
    const float size = fabsf(difference);
    return size > sum || size != size ? size : sum;  // NaN stays
  }
}

template <class T>
__device__ __forceinline__ void fetch(float (&to)[depth][pitch], const Points<T>& x, int first_row, int first_dim,
                                      int dims) {
#pragma unroll
  for (int e = threadIdx.x; e < side * depth; e += threads) {
    const int d = e % depth, r = e / depth;
    const bool there = r < x.count - first_row && d < dims - first_dim;
    to[d][r] = there ? to_float(x.at[static_cast<int64_t>(first_row + r) * x.stride + first_dim + d]) : 0.0f;
  }
}

// All threads. What lies outside of a or b counts as zeros.
template <Norm P, class T>
__device__ __forceinline__ void sum_tile(Sums& sum, Shared& shared, const Pair<T>& of, int row, int column) {
#pragma unroll
  for (int i = 0; i < own; ++i) {
#pragma unroll
    for (int j = 0; j < own; ++j) sum[i][j] = 0.0f;
  }
  for (int first = 0; first < of.dims; first += depth) {
    __syncthreads();  // all have read what was there
    fetch(shared.a, of.a, row, first, of.dims);
    fetch(shared.b, of.b, column, first, of.dims);
    __syncthreads();
    const int some = min(depth, of.dims - first);
#pragma unroll 1
    for (int d = 0; d < some; ++d) {
      float x[own], y[own];
#pragma unroll
      for (int half = 0; half < own; half += 4) {
        const auto four_x = load<4>(&shared.a[d][row_at(half)]), four_y = load<4>(&shared.b[d][column_at(half)]);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[half + i] = four_x.at[i], y[half + i] = four_y.at[i];
      }
#pragma unroll
      for (int i = 0; i < own; ++i) {
#pragma unroll
        for (int j = 0; j < own; ++j) sum[i][j] = further<P>(sum[i][j], x[i], y[j]);
      }
    }
  }
}

template <Norm P>
__device__ __forceinline__ float finished(float sum, bool squared) {
  if constexpr (P == Norm::two) {
    return squared ? sum : __fsqrt_rn(sum);
  } else {
    return squared ? mul(sum, sum) : sum;
  }
}

template <Norm P, class T>
__global__ void __launch_bounds__(threads, blocks_an_sm)
    distance_kernel(Pair<T> of, float* distance /*[N, M]*/, bool squared, bool whole_words) {
  __shared__ alignas(16) Shared shared;
  const int column = static_cast<int>(blockIdx.x) * side;
  const int tiles = (of.a.count - 1) / side + 1;
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int row = tile * side;
    Sums sum;
    sum_tile<P>(sum, shared, of, row, column);
#pragma unroll
    for (int i = 0; i < own; ++i) {
      if (row_at(i) >= of.a.count - row) continue;
      float* to = distance + static_cast<int64_t>(row + row_at(i)) * of.b.count + column;
#pragma unroll
      for (int half = 0; half < own; half += 4) {
        Vec<float, 4> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.at[j] = finished<P>(sum[i][half + j], squared);
        if (whole_words) {
          if (column_at(half) < of.b.count - column) store(to + column_at(half), four);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (column_at(half + j) < of.b.count - column) to[column_at(half + j)] = four.at[j];
          }
        }
      }
    }
  }
}

// products = sqrt(max(0, a + b - 2 products)): a thread has four columns, of every row that is its block's.
template <bool Ragged>
__global__ void __launch_bounds__(threads)
    products_kernel(float* products /*[N, M]*/, int64_t stride, const float* of_a /*[N]*/, const float* of_b /*[M]*/,
                    int rows, int columns, bool squared) {
  constexpr int N = widest<float>;
  const int column = static_cast<int>(blockIdx.x * threads + threadIdx.x) * N;
  const auto b = load_packet<Ragged, true>(of_b, column, columns);
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const auto z = load_packet<Ragged>(products + row * stride, column, columns);
    const float a = of_a[row];
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float sum = sub(add(a, b[i]), 2.0f * z[i]);  // 2 z is exact
      out[i] = finished<Norm::two>(sum < 0.0f ? 0.0f : sum, squared);
    }
    store_packet<Ragged>(products + row * stride, column, columns, pack<float>(out));
  }
}

// ---- walks over the rows of b: block (x, y) has tile x of a's rows and segment y of b's -----------------------------

// The upper half of a key is a squared distance, whose bits are in the order of the floats (NaN, which arithmetic makes
// 0x7fffffff, above infinity), the lower one the row of b: the least key is the nearest, the lowest among equals.
template <class T>
__global__ void __launch_bounds__(threads, blocks_an_sm)
    argmin_kernel(Pair<T> of, int64_t segment, uint64_t* found /*[N, segments]*/) {
  __shared__ alignas(16) Shared shared;
  const int row = static_cast<int>(blockIdx.x) * side;
  const auto begin = static_cast<int>(blockIdx.y * segment);
  const auto end = static_cast<int>(min(begin + segment, static_cast<int64_t>(of.b.count)));
  uint32_t least[own];
  int where[own];
#pragma unroll
  for (int i = 0; i < own; ++i) least[i] = ~0u, where[i] = -1;
  for (int column = begin; column < end; column += side) {
    Sums sum;
    sum_tile<Norm::two>(sum, shared, of, row, column);
#pragma unroll
    for (int j = 0; j < own; ++j) {
      if (column_at(j) >= end - column) continue;
#pragma unroll
      for (int i = 0; i < own; ++i) {
        const uint32_t bits = __float_as_uint(sum[i][j]);
        if (bits < least[i])
          least[i] = bits, where[i] = column + column_at(j);  // columns rise: the first of equals stays
      }
    }
  }
#pragma unroll
  for (int i = 0; i < own; ++i) {
    uint64_t key = static_cast<uint64_t>(least[i]) << 32 | static_cast<uint32_t>(where[i]);
#pragma unroll
    for (int step = across / 2; step > 0; step /= 2) key = min(key, __shfl_xor_sync(0xffffffffu, key, step, across));
    if (threadIdx.x % across == 0 && row_at(i) < of.a.count - row) {
      found[static_cast<int64_t>(row + row_at(i)) * gridDim.y + blockIdx.y] = key;
    }
  }
}

__global__ void __launch_bounds__(threads) nearest_kernel(const uint64_t* found /*[N, segments]*/, int segments,
                                                          int rows, float* dist2 /*[N]*/, int64_t* idx /*[N]*/) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (row >= rows) return;
  uint64_t least = nobody;
  for (int i = 0; i < segments; ++i) least = min(least, found[row * segments + i]);
  dist2[row] = least == nobody ? __uint_as_float(0x7f800000u) : __uint_as_float(static_cast<uint32_t>(least >> 32));
  idx[row] = least == nobody ? -1 : static_cast<int64_t>(least & 0xffffffffu);
}

template <class T>
__global__ void __launch_bounds__(threads, blocks_an_sm)
    count_kernel(Pair<T> of, float limit, int64_t segment, int64_t* counts /*[N, segments]*/) {
  __shared__ alignas(16) Shared shared;
  const int row = static_cast<int>(blockIdx.x) * side;
  const auto begin = static_cast<int>(blockIdx.y * segment);
  const auto end = static_cast<int>(min(begin + segment, static_cast<int64_t>(of.b.count)));
  int count[own] = {};
  for (int column = begin; column < end; column += side) {
    Sums sum;
    sum_tile<Norm::two>(sum, shared, of, row, column);
#pragma unroll
    for (int j = 0; j < own; ++j) {
      if (column_at(j) >= end - column) continue;
#pragma unroll
      for (int i = 0; i < own; ++i) count[i] += sum[i][j] <= limit;
    }
  }
#pragma unroll
  for (int i = 0; i < own; ++i) {
#pragma unroll
    for (int step = across / 2; step > 0; step /= 2) count[i] += __shfl_xor_sync(0xffffffffu, count[i], step, across);
    if (threadIdx.x % across == 0 && row_at(i) < of.a.count - row) {
      counts[static_cast<int64_t>(row + row_at(i)) * gridDim.y + blockIdx.y] = count[i];
    }
  }
}

__global__ void __launch_bounds__(threads)
    nobody_kernel(int64_t* idx /*[total]*/, float* dist2 /*[total]*/, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; at < total; at += step) {
    idx[at] = -1;
    dist2[at] = __uint_as_float(0x7f800000u);
  }
}

struct Starts {
  const int64_t* at;  // [N, segments]
  int64_t of_row, of_segment;
};

// Neighbours of a row in the order of b: the 16 threads that share a row count theirs before each other's, the lower 64
// columns of the tile before the upper ones.
template <class T>
__global__ void __launch_bounds__(threads, blocks_an_sm)
    fill_kernel(Pair<T> of, float limit, int64_t segment, Starts starts, int64_t total, int64_t* idx /*[total]*/,
                float* dist2 /*[total]*/) {
  __shared__ alignas(16) Shared shared;
  const int row = static_cast<int>(blockIdx.x) * side, lane = static_cast<int>(threadIdx.x) % across;
  const auto begin = static_cast<int>(blockIdx.y * segment);
  const auto end = static_cast<int>(min(begin + segment, static_cast<int64_t>(of.b.count)));
  int before[own] = {};  // of a row and this segment, in the tiles before
  for (int column = begin; column < end; column += side) {
    Sums sum;
    sum_tile<Norm::two>(sum, shared, of, row, column);
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const bool exists = row_at(i) < of.a.count - row;
      unsigned near = 0;
#pragma unroll
      for (int j = 0; j < own; ++j) {
        near |= static_cast<unsigned>(exists && column_at(j) < end - column && sum[i][j] <= limit) << j;
      }
      if (__ballot_sync(0xffffffffu, near != 0) == 0) continue;
      const int mine = __popc(near & 15u) | __popc(near >> 4) << 16;  // of both halves at once: 64 at most
      int upto = mine;
#pragma unroll
      for (int step = 1; step < across; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, upto, step, across);
        if (lane >= step) upto += left;
      }
      const int all = __shfl_sync(0xffffffffu, upto, across - 1, across);
      const int first = upto - mine;
      if (near != 0) {
        const int64_t start = starts.at[(row + row_at(i)) * starts.of_row + blockIdx.y * starts.of_segment] + before[i];
        int64_t low = start + (first & 0xffff), high = start + (all & 0xffff) + (first >> 16);
#pragma unroll
        for (int j = 0; j < own; ++j) {
          if (!(near >> j & 1)) continue;
          const int64_t place = j < 4 ? low++ : high++;
          if (place < 0 || place >= total) continue;  // starts that are none of these points
          idx[place] = column + column_at(j);
          dist2[place] = sum[i][j];
        }
      }
      before[i] += (all & 0xffff) + (all >> 16);
    }
  }
}

// ---- right calls ---------------------------------------------------------------------------------------------------

void must_be_points(const Tensor& a, const Tensor& b) {
  for (const auto& [x, argument] : {std::pair{&a, "a"}, std::pair{&b, "b"}}) {
    switch (x->dtype) {
      case DType::f16:
      case DType::bf16:
      case DType::f32:
      case DType::f64: break;
      case DType::other: throw Refused{"dtype"};  // a float8, or no float: the reference tells them apart
      default: wrong_type(argument, "a floating dtype", name_of(x->dtype));
    }
  }
  if (a.rank != 2) wrong_value("a", "shape [N, D]", shape_of(a));
  if (b.rank != 2 || b.shape[1] != a.shape[1]) {
    wrong_value("b", "shape [M, " + std::to_string(a.shape[1]) + "]", shape_of(b));
  }
  if (b.dtype != a.dtype) wrong_type("b", std::string(name_of(a.dtype)) + " like a", name_of(b.dtype));
}

template <class T>
Pair<T> pair_of(const Tensor& a, const Tensor& b) {
  if (a.shape[0] > most_rows || b.shape[0] > most_rows || a.shape[1] > most_rows) throw Refused{"size"};
  const auto points = [](const Tensor& x) {
    if (x.shape[1] > 1 && x.stride[1] != 1) throw Refused{"unit_stride"};
    return Points<T>{x.as<const T>(), x.stride[0], static_cast<int>(x.shape[0])};
  };
  return {points(a), points(b), static_cast<int>(a.shape[1])};
}

int64_t tiles_of(int64_t rows) { return (rows + side - 1) / side; }

float limit_of(double radius) {
  if (!(radius >= 0)) wrong_value("radius", "a number from 0", std::to_string(radius));
  const auto single = static_cast<float>(radius);
  return single * single;
}

// [N, segments] of walks of so many rows of b each.
int64_t segments_of(const Tensor& b, int64_t segment) {
  if (segment < 1) wrong_value("segment", "1 to " + std::to_string(INT64_MAX), std::to_string(segment));
  return b.shape[0] == 0 ? 0 : (b.shape[0] - 1) / segment + 1;
}

}  // namespace

Buffer pairwise_direct(const Context& context, const Tensor& a /*[N, D]*/, const Tensor& b /*[M, D]*/, double p,
                       bool squared) {
  must_be_points(a, b);
  if (!(p >= 1)) wrong_value("p", "a number from 1", std::to_string(p));
  std::optional<Buffer> out;
  dispatch(a.dtype, Floats{}, [&]<class T>() {
    const auto of = pair_of<T>(a, b);
    const bool most = p > std::numeric_limits<double>::max();
    if (p != 1 && p != 2 && !most) throw Refused{"norm"};
    out.emplace(context.empty({a.shape[0], b.shape[0]}, DType::f32));
    if (a.shape[0] == 0 || b.shape[0] == 0) return;
    const dim3 grid(static_cast<unsigned>(tiles_of(b.shape[0])),
                    static_cast<unsigned>(std::min<int64_t>(tiles_of(a.shape[0]), 65'535)));
    const bool words = b.shape[0] % 4 == 0;
    auto* to = out->template as<float>();
    if (p == 1) {
      launch<distance_kernel<Norm::one, T>>(context, grid, dim3(threads), of, to, squared, words);
    } else if (p == 2) {
      launch<distance_kernel<Norm::two, T>>(context, grid, dim3(threads), of, to, squared, words);
    } else {
      launch<distance_kernel<Norm::most, T>>(context, grid, dim3(threads), of, to, squared, words);
    }
  });
  return std::move(*out);
}

void pairwise_from_products_(const Context& context, const Tensor& products /*[N, M], written*/,
                             const Tensor& a_squares /*[N]*/, const Tensor& b_squares /*[M]*/, bool squared) {
  if (products.dtype != DType::f32 && products.dtype != DType::f64) {
    if (products.dtype == DType::other) throw Refused{"dtype"};
    wrong_type("products", "float32 or float64", name_of(products.dtype));
  }
  if (products.rank != 2) wrong_value("products", "shape [N, M]", shape_of(products));
  const auto must_be_squares = [&](const Tensor& x, const char* argument, int dim) {
    if (x.dtype != products.dtype) {
      wrong_type(argument, std::string(name_of(products.dtype)) + " like products", name_of(x.dtype));
    }
    if (x.rank != 1 || x.shape[0] != products.shape[dim]) {
      wrong_value(argument, "shape [" + std::to_string(products.shape[dim]) + "]", shape_of(x));
    }
  };
  must_be_squares(a_squares, "a_squares", 0);
  must_be_squares(b_squares, "b_squares", 1);
  must_be_apart(products, "products");
  must_be_apart(a_squares, "a_squares", products, "products");
  must_be_apart(b_squares, "b_squares", products, "products");

  if (products.dtype != DType::f32) throw Refused{"dtype"};
  const int64_t rows = products.shape[0], columns = products.shape[1];
  if (rows > most_rows || columns > 1 << 30) throw Refused{"size"};
  const auto strided = [](const Tensor& x) {
    const int last = x.rank - 1;
    return x.shape[last] > 1 && x.stride[last] != 1;
  };
  if (strided(products) || strided(a_squares) || strided(b_squares)) throw Refused{"unit_stride"};
  if (rows == 0 || columns == 0) return;
  constexpr int N = widest<float>;
  const int64_t across_columns = (columns - 1) / (threads * N) + 1;
  // as many blocks of rows as fill the device several times over: each loads its part of b's squares once
  const int64_t wanted = 16 * int64_t{multiprocessors(context)} / across_columns + 1;
  const dim3 grid(static_cast<unsigned>(across_columns),
                  static_cast<unsigned>(std::min<int64_t>({rows, wanted, 65'535})));
  auto* z = products.as<float>();
  const auto *of_a = a_squares.as<const float>(), *of_b = b_squares.as<const float>();
  const bool whole = aligned(z, products.stride[0] * 4, 16) && columns % N == 0 && aligned(of_b, 0, 16);
  if (whole) {
    launch<products_kernel<false>>(context, grid, dim3(threads), z, products.stride[0], of_a, of_b,
                                   static_cast<int>(rows), static_cast<int>(columns), squared);
  } else {
    launch<products_kernel<true>>(context, grid, dim3(threads), z, products.stride[0], of_a, of_b,
                                  static_cast<int>(rows), static_cast<int>(columns), squared);
  }
}

std::tuple<Buffer, Buffer> pairwise_argmin(const Context& context, const Tensor& a /*[N, D]*/,
                                           const Tensor& b /*[M, D]*/) {
  must_be_points(a, b);
  std::optional<Buffer> dist2, idx;
  dispatch(a.dtype, Floats{}, [&]<class T>() {
    const auto of = pair_of<T>(a, b);
    const int64_t rows = a.shape[0];
    dist2.emplace(context.empty({rows}, DType::f32));
    idx.emplace(context.empty({rows}, DType::i64));
    if (rows == 0) return;
    const int64_t row_tiles = tiles_of(rows), column_tiles = std::max<int64_t>(1, tiles_of(b.shape[0]));
    const int64_t wanted = std::max<int64_t>(1, int64_t{waves} * blocks_an_sm * multiprocessors(context) / row_tiles);
    const int64_t segment = side * ((column_tiles - 1) / std::min(wanted, column_tiles) + 1);
    const int64_t segments = segments_of(b, segment);
    std::optional<Buffer> found;
    if (segments > 0) {
      found.emplace(context.empty({rows, segments}, DType::i64));
      const dim3 grid(static_cast<unsigned>(row_tiles), static_cast<unsigned>(segments));
      launch<argmin_kernel<T>>(context, grid, dim3(threads), of, segment, found->template as<uint64_t>());
    }
    const dim3 grid(static_cast<unsigned>((rows - 1) / threads + 1));
    launch<nearest_kernel>(
        context, grid, dim3(threads), static_cast<const uint64_t*>(found ? found->template as<uint64_t>() : nullptr),
        static_cast<int>(segments), static_cast<int>(rows), dist2->template as<float>(), idx->template as<int64_t>());
  });
  return {std::move(*dist2), std::move(*idx)};
}

Buffer pairwise_within_counts(const Context& context, const Tensor& a /*[N, D]*/, const Tensor& b /*[M, D]*/,
                              double radius, int64_t segment) {
  must_be_points(a, b);
  const float limit = limit_of(radius);
  const int64_t segments = segments_of(b, segment);
  std::optional<Buffer> counts;
  dispatch(a.dtype, Floats{}, [&]<class T>() {
    const auto of = pair_of<T>(a, b);
    if (segments > 65'535) throw Refused{"segments"};
    counts.emplace(context.empty({a.shape[0], segments}, DType::i64));
    if (a.shape[0] == 0 || segments == 0) return;
    const dim3 grid(static_cast<unsigned>(tiles_of(a.shape[0])), static_cast<unsigned>(segments));
    launch<count_kernel<T>>(context, grid, dim3(threads), of, limit, segment, counts->template as<int64_t>());
  });
  return std::move(*counts);
}

std::tuple<Buffer, Buffer> pairwise_within_fill(const Context& context, const Tensor& a /*[N, D]*/,
                                                const Tensor& b /*[M, D]*/, double radius,
                                                const Tensor& starts /*[N, segments]*/, int64_t total,
                                                int64_t segment) {
  must_be_points(a, b);
  const float limit = limit_of(radius);
  const int64_t segments = segments_of(b, segment);
  if (starts.dtype != DType::i64) wrong_type("starts", "int64", name_of(starts.dtype));
  if (starts.rank != 2 || starts.shape[0] != a.shape[0] || starts.shape[1] != segments) {
    wrong_value("starts", "shape [" + std::to_string(a.shape[0]) + ", " + std::to_string(segments) + "]",
                shape_of(starts));
  }
  constexpr int64_t most_total = int64_t{1} << 56;
  if (total < 0 || total > most_total) {
    wrong_value("total", "0 to " + std::to_string(most_total), std::to_string(total));
  }
  std::optional<Buffer> idx, dist2;
  dispatch(a.dtype, Floats{}, [&]<class T>() {
    const auto of = pair_of<T>(a, b);
    if (segments > 65'535) throw Refused{"segments"};
    idx.emplace(context.empty({total}, DType::i64));
    dist2.emplace(context.empty({total}, DType::f32));
    if (total == 0) return;
    auto* to_idx = idx->template as<int64_t>();
    auto* to_dist2 = dist2->template as<float>();
    const int64_t blocks = std::min<int64_t>((total - 1) / threads + 1, 16 * int64_t{multiprocessors(context)});
    launch<nobody_kernel>(context, dim3(static_cast<unsigned>(blocks)), dim3(threads), to_idx, to_dist2, total);
    if (a.shape[0] == 0 || segments == 0) return;
    const dim3 grid(static_cast<unsigned>(tiles_of(a.shape[0])), static_cast<unsigned>(segments));
    const Starts at{starts.as<const int64_t>(), starts.stride[0], starts.stride[1]};
    launch<fill_kernel<T>>(context, grid, dim3(threads), of, limit, segment, at, total, to_idx, to_dist2);
  });
  return {std::move(*idx), std::move(*dist2)};
}

}  // namespace prequal::ops
