// (a, b) -> (a cos - b sin, b cos + a sin) for each pair.   q [(B,) T, Hq, D], k [(B,) T, Hk, D], tables [S, R / 2]
// A block owns a token; a thread a place (16 bytes; half layout: and their partners) of every so many heads.
// Bytes: 2 (numel(q) + numel(k)) sizeof(T), in place of the rotated part alone; the tables once a token.
// Numerics: fp32 from the load to the store. exact_rounding: the products are rounded to T before their sum.
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/launch.h"
#include "prequal/overlap.h"
#include "prequal/rope_plan.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"rope"> {};

// Of q or k, from which it reads and to which it writes.
template <class T>
struct Heads {
  const T* from;
  T* to;
  int64_t from_batch, from_token, from_head;  // strides in elements
  int64_t to_batch, to_token, to_head;
  int count;
};

// One of the tables, in q's dtype or fp32; the choice is the same for every thread.
template <class T>
class Table {
 public:
  const T* same;      // [S, columns] or null
  const float* full;  // [S, columns] or null
  int64_t stride;     // from row to row
  bool whole;         // 16-byte rows: neighbours come as one access

  // Neighbours of one row.
  template <int N>
  __device__ __forceinline__ void get(float (&value)[N], int64_t row, int column) const {
    const int64_t at = row * stride + column;
    if (same) {
      neighbours(value, same + at);
    } else {
      neighbours(value, full + at);
    }
  }

 private:
  template <int N, class U>
  __device__ __forceinline__ void neighbours(float (&value)[N], const U* from) const {
    constexpr int step = N < widest<U> ? N : widest<U>;
    if (whole) {
#pragma unroll
      for (int first = 0; first < N; first += step) {
        const Vec<U, step> some = load<step>(from + first);
#pragma unroll
        for (int i = 0; i < step; ++i) value[first + i] = to_float(some.at[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = to_float(from[i]);
    }
  }
};

template <class T>
struct Rotation {
  Heads<T> q, k;
  Table<T> cos, sin;
  const void* positions;                   // [T], [1, T] or [B, T], or null for the token's own number
  bool wide_positions;                     // int64, else int32
  int64_t position_batch, position_token;  // strides
  int64_t table_rows;
  int64_t tokens;  // a batch
  int64_t total;   // tokens of all batches
  int rotary, dim;
  bool inverse, exact, in_place;
};

template <class T>
__device__ __forceinline__ int64_t position_of(const Rotation<T>& a, int64_t batch, int64_t token) {
  if (!a.positions) return token;
  const int64_t at = batch * a.position_batch + token * a.position_token;
  return a.wide_positions ? static_cast<const int64_t*>(a.positions)[at] : static_cast<const int32_t*>(a.positions)[at];
}

// As one access of 16 bytes, or, where heads do not begin at those, one by one.
template <class T, int N>
__device__ __forceinline__ void load_values(const T* from, float (&value)[N]) {
  if constexpr (N == widest<T>) {
    const Packet<T> packet = load_packet<false>(from, 0, N);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = packet[i];
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = to_float(from[i]);
  }
}

template <class T, int N>
__device__ __forceinline__ void store_values(T* to, const float (&value)[N]) {
  if constexpr (N == widest<T>) {
    store_packet<false>(to, 0, N, pack<T>(value));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = from_float<T>(value[i]);
  }
}

template <class T>
__device__ __forceinline__ void rotate(float& first, float& second, float cos, float sin, bool exact) {
  const float a = first, b = second;
  if (exact) {
    first = rounded<T>(mul(a, cos)) - rounded<T>(mul(b, sin));
    second = rounded<T>(mul(b, cos)) + rounded<T>(mul(a, sin));
  } else {
    first = a * cos - b * sin;
    second = b * cos + a * sin;
  }
}

// N elements of a head are a place. Half layout: place p < R/2/N and the one R/2 further on. Interleaved: the pairs of
// place p.
template <class T, int N, bool Interleaved>
__global__ void __launch_bounds__(1024, 1) rotate_tokens(const Rotation<T> a, int places, int heads_at_once) {
  constexpr int pairs = Interleaved ? N / 2 : N;
  const int place = threadIdx.x % places, first_head = threadIdx.x / places;
  const int heads = a.q.count + a.k.count;
  for (int64_t at = blockIdx.x; at < a.total; at += gridDim.x) {
    const int64_t batch = at / a.tokens, token = at - batch * a.tokens;
    const auto from = [&](const Heads<T>& x, int head) {
      return x.from + batch * x.from_batch + token * x.from_token + head * x.from_head;
    };
    const auto to = [&](const Heads<T>& x, int head) {
      return x.to + batch * x.to_batch + token * x.to_token + head * x.to_head;
    };

    float cos[pairs], sin[pairs];
    const int64_t position = position_of(a, batch, token);
    if (a.rotary > 0 && position >= 0 && position < a.table_rows) {  // tables of nothing have no memory
      a.cos.get(cos, position, place * pairs);
      a.sin.get(sin, position, place * pairs);
    } else {
#pragma unroll
      for (int i = 0; i < pairs; ++i) cos[i] = sin[i] = __int_as_float(0x7fffffff);  // NaN: nobody can miss it
    }
    if (a.inverse) {
#pragma unroll
      for (int i = 0; i < pairs; ++i) sin[i] = -sin[i];
    }

    if (first_head < heads_at_once) {
      for (int head = first_head; head < heads; head += heads_at_once) {
        const bool is_q = head < a.q.count;
        const T* source = is_q ? from(a.q, head) : from(a.k, head - a.q.count);
        T* target = is_q ? to(a.q, head) : to(a.k, head - a.q.count);
        if constexpr (Interleaved) {
          float x[N];
          load_values<T, N>(source + place * N, x);
#pragma unroll
          for (int i = 0; i < pairs; ++i) rotate<T>(x[2 * i], x[2 * i + 1], cos[i], sin[i], a.exact);
          store_values<T, N>(target + place * N, x);
        } else {
          float x[N], y[N];
          load_values<T, N>(source + place * N, x);
          load_values<T, N>(source + a.rotary / 2 + place * N, y);
#pragma unroll
          for (int i = 0; i < N; ++i) rotate<T>(x[i], y[i], cos[i], sin[i], a.exact);
          store_values<T, N>(target + place * N, x);
          store_values<T, N>(target + a.rotary / 2 + place * N, y);
        }
      }
    }

    // what is not rotated, where it is not there already
    if (a.in_place || a.rotary == a.dim) continue;
    const int rest = a.dim - a.rotary;
    for (int i = threadIdx.x; i < heads * rest; i += blockDim.x) {
      const int head = i / rest, column = a.rotary + i % rest;
      const bool is_q = head < a.q.count;
      const T* source = is_q ? from(a.q, head) : from(a.k, head - a.q.count);
      T* target = is_q ? to(a.q, head) : to(a.k, head - a.q.count);
      target[column] = source[column];
    }
  }
}

struct Call {
  int64_t batches, tokens;
  int rotary;
};

Call check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
           const std::optional<Tensor>& positions, const std::optional<int64_t>& rotary_dim) {
  if (q.rank != 3 && q.rank != 4)
    wrong_value("q", "shape [tokens, heads, D] or [batch, tokens, heads, D]", shape_of(q));
  if (k.rank != q.rank) wrong_value("k", std::to_string(q.rank) + " dimensions like q", shape_of(k));
  const int heads = q.rank - 2;
  for (int dim = 0; dim < q.rank; ++dim) {
    if (dim == heads || k.shape[dim] == q.shape[dim]) continue;
    wrong_value("k", "the shape of q but for the heads, " + shape_of(q), shape_of(k));
  }
  if (k.dtype != q.dtype) wrong_type("k", std::string(name_of(q.dtype)) + " like q", name_of(k.dtype));

  const int64_t dim = q.shape[q.rank - 1];
  const int64_t rotary = rotary_dim.value_or(dim);
  if (rotary < 0 || rotary > dim || rotary % 2 != 0) {
    wrong_value("rotary_dim", "an even number from 0 to " + std::to_string(dim), std::to_string(rotary));
  }
  const auto is_table = [&](const Tensor& table, const char* name) {
    if (table.rank == 2 && (table.shape[1] == rotary / 2 || table.shape[1] == rotary)) return;
    std::string wanted("shape [rows, ");
    wanted.append(std::to_string(rotary / 2)).append("] or [rows, ").append(std::to_string(rotary)).append("]");
    wrong_value(name, wanted, shape_of(table));
  };
  is_table(cos, "cos");
  is_table(sin, "sin");
  if (sin.dtype != cos.dtype) wrong_type("sin", std::string(name_of(cos.dtype)) + " like cos", name_of(sin.dtype));
  if (sin.shape != cos.shape) wrong_value("sin", "the shape " + shape_of(cos) + " of cos", shape_of(sin));

  const int64_t tokens = q.shape[heads - 1], batches = q.rank == 4 ? q.shape[0] : 1;
  if (positions) {
    if (positions->dtype != DType::i32 && positions->dtype != DType::i64) {
      wrong_type("positions", "int32 or int64", name_of(positions->dtype));
    }
    const bool one = positions->rank == 1 && positions->shape[0] == tokens;
    const bool each = q.rank == 4 && positions->rank == 2 && positions->shape[1] == tokens &&
                      (positions->shape[0] == batches || positions->shape[0] == 1);
    if (!one && !each) {
      std::string wanted("shape [");
      wanted.append(std::to_string(tokens)).append("]");
      if (q.rank == 4) {
        wanted.append(", [1, ").append(std::to_string(tokens)).append("]");
        wanted.append(" or [").append(std::to_string(batches)).append(", ").append(std::to_string(tokens)).append("]");
      }
      wrong_value("positions", wanted, shape_of(*positions));
    }
  } else if (cos.shape[0] < tokens) {
    wrong_value("cos", "at least " + std::to_string(tokens) + " rows, one a token", shape_of(cos));
  }
  if (dim > 2048 || q.shape[heads] > 65536 || k.shape[heads] > 65536) throw Refused{"size"};
  return {batches, tokens, static_cast<int>(rotary)};
}

template <class T>
Heads<T> heads_of(const Tensor& from, const Tensor& to) {
  const int last = from.rank - 1;
  const auto batch = [&](const Tensor& x) { return x.rank == 4 ? x.stride[0] : 0; };
  return {from.as<const T>(),
          to.as<T>(),
          batch(from),
          from.stride[last - 2],
          from.stride[last - 1],
          batch(to),
          to.stride[last - 2],
          to.stride[last - 1],
          static_cast<int>(from.shape[last - 1])};
}

// Every head's place is a whole access of N elements.
template <class T, int N>
bool steps(const Tensor& x) {
  constexpr int64_t size = sizeof(T);
  for (int dim = 0; dim + 1 < x.rank; ++dim) {
    if (x.shape[dim] > 1 && x.stride[dim] % N != 0) return false;
  }
  return aligned(x.data, 0, static_cast<int>(N * size));
}

template <class T>
Table<T> table_of(const Tensor& table, DType dtype) {
  if (table.stride[1] != 1 && table.shape[1] > 1) throw Refused{"unit_stride"};
  Table<T> out{};
  if (table.dtype == dtype) {
    out.same = table.as<const T>();
  } else if (table.dtype == DType::f32) {
    out.full = table.as<const float>();
  } else {
    throw Refused{"dtype"};
  }
  out.stride = table.stride[0];
  out.whole = aligned(table.data, table.shape[0] > 1 ? out.stride * table.itemsize : 0, 16);
  return out;
}

template <class Out>
void rotate_all(const Context& context, const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                const std::optional<Tensor>& positions, bool interleaved, const std::optional<int64_t>& rotary_dim,
                bool inverse, bool exact, bool in_place, Out&& out) {
  const Call call = check(q, k, cos, sin, positions, rotary_dim);
  dispatch(q.dtype, Floats{}, [&]<class T>() {
    Rotation<T> a{};
    a.cos = table_of<T>(cos, q.dtype);
    a.sin = table_of<T>(sin, q.dtype);
    for (const Tensor* x : {&q, &k}) {
      if (x->stride[x->rank - 1] != 1 && x->shape[x->rank - 1] > 1) throw Refused{"unit_stride"};
    }
    const auto [new_q, new_k] = out();
    a.q = heads_of<T>(q, new_q);
    a.k = heads_of<T>(k, new_k);
    a.dim = static_cast<int>(q.shape[q.rank - 1]);
    a.rotary = call.rotary;
    a.tokens = call.tokens, a.total = call.batches * call.tokens;
    a.table_rows = cos.shape[0];
    a.inverse = inverse, a.exact = exact && cos.dtype == q.dtype;
    if (positions) {
      a.positions = positions->data, a.wide_positions = positions->dtype == DType::i64;
      a.position_token = positions->stride[positions->rank - 1];
      a.position_batch = positions->rank == 2 && positions->shape[0] > 1 ? positions->stride[0] : 0;
    }
    const int heads = a.q.count + a.k.count;
    a.in_place = in_place;
    if (a.total == 0 || heads == 0 || a.dim == 0 || (in_place && a.rotary == 0)) return;

    constexpr int vec = widest<T>;
    const bool wide = steps<T, vec>(q) && steps<T, vec>(k) && steps<T, vec>(new_q) && steps<T, vec>(new_k) &&
                      (interleaved ? a.rotary : a.rotary / 2) % vec == 0;
    const auto start = [&]<int N, bool Interleaved>() {
      const RopePlan plan = rope_plan(heads, a.rotary, N, Interleaved);
      if (plan.threads == 0) throw std::logic_error("rope: a head of more places than a block has threads");
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>(a.total, 0x7fffffff)));
      launch<rotate_tokens<T, N, Interleaved>>(context, grid, dim3(plan.threads), a, plan.places, plan.heads);
    };
    if (interleaved) {
      wide ? start.template operator()<vec, true>() : start.template operator()<2, true>();
    } else {
      wide ? start.template operator()<vec, false>() : start.template operator()<1, false>();
    }
  });
}

}  // namespace

std::tuple<Buffer, Buffer> rope(const Context& context, const Tensor& q /*[(B,) T, Hq, D]*/,
                                const Tensor& k /*[(B,) T, Hk, D]*/, const Tensor& cos /*[S, R/2] or [S, R]*/,
                                const Tensor& sin /*like cos*/,
                                const std::optional<Tensor>& positions /*[T], [1, T] or [B, T]*/, bool interleaved,
                                const std::optional<int64_t>& rotary_dim, bool inverse, bool exact_rounding) {
  std::optional<Buffer> new_q, new_k;
  rotate_all(context, q, k, cos, sin, positions, interleaved, rotary_dim, inverse, exact_rounding, false, [&] {
    new_q.emplace(context.empty_like(q));
    new_k.emplace(context.empty_like(k));
    return std::pair(new_q->view(), new_k->view());
  });
  return {std::move(*new_q), std::move(*new_k)};
}

void rope_(const Context& context, const Tensor& q /*[(B,) T, Hq, D], rotated*/,
           const Tensor& k /*[(B,) T, Hk, D], rotated*/, const Tensor& cos /*[S, R/2] or [S, R]*/,
           const Tensor& sin /*like cos*/, const std::optional<Tensor>& positions /*[T], [1, T] or [B, T]*/,
           bool interleaved, const std::optional<int64_t>& rotary_dim, bool inverse, bool exact_rounding) {
  rotate_all(context, q, k, cos, sin, positions, interleaved, rotary_dim, inverse, exact_rounding, true, [&] {
    must_be_apart(q, "q");
    must_be_apart(k, "k");
    must_be_apart(k, "k", q, "q");
    for (const Tensor* x : {&q, &k}) {
      const bool apart = are_apart(*x, cos) && are_apart(*x, sin) && (!positions || are_apart(*x, *positions));
      if (!apart) throw Refused{"aliasing"};
    }
    return std::pair(q, k);
  });
}

}  // namespace prequal::ops
