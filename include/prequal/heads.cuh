// Heads of tokens, normalised to length sqrt(D) and turned: y = R (x / |x| * gamma * sqrt(D)), and the gradient.
//
// A few lanes own a head, which stays in their registers; a thread takes its columns of the head in several tokens. fp32
// from the load to the store.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "prequal/add_teams.cuh"
#include "prequal/dispatch.h"
#include "prequal/head_plan.h"
#include "prequal/launch.h"
#include "prequal/norm.cuh"
#include "prequal/vec.cuh"

namespace prequal::heads {

// Parts (q, k, v) of H heads for each of N tokens.
template <class T>
struct Packed {
  T* at;
  int64_t token, part, head;  // strides in elements

  __device__ __forceinline__ T* of(int64_t of_token, int of_part, int of_head) const {
    return at + of_token * token + of_part * part + of_head * head;
  }
};

// [H, D], of x's dtype or fp32.
template <class T>
struct Gamma {
  Parameter<T> rows;
  int64_t stride;

  __device__ __forceinline__ float at(int head, int column) const {
    const int64_t place = head * stride + column;
    return rows.same ? to_float(rows.same[place]) : rows.full[place];
  }
};

enum class Turn { none, table, coords };

// The angle of each pair of a token: rows of tables, or coordinates times frequencies.
template <class T>
struct Angles {
  Parameter<T> cos, sin;                // [N, D/2]
  int64_t stride;                       // of both, from token to token
  bool whole;                           // rows of 16-byte words
  const int32_t* coords;                // [N, 4]: batch, x, y, z
  int64_t coord_token, coord_axis;      // strides
  float frequency[most_pairs_an_axis];  // of the pairs of an axis
  int an_axis;                          // pairs
};

// In units of pi, reduced in fp64: an fp32 angle of thousands has its digits before the point. sincospif needs no
// reduction of its own, and so no memory for one.
template <class T>
__device__ __forceinline__ float2 turn_by_coords(const Angles<T>& a, int64_t token, int pair) {
  if (pair >= 3 * a.an_axis) return {1.0f, 0.0f};
  const int axis = pair / a.an_axis;
  const int32_t place = a.coords[token * a.coord_token + (axis + 1) * a.coord_axis];
  const float angle = __fmul_rn(static_cast<float>(place), a.frequency[pair - axis * a.an_axis]);
  const double turns = static_cast<double>(angle) * 0.15915494309189535;  // 1 / (2 pi)
  float2 out;
  sincospif(2.0f * static_cast<float>(turns - rint(turns)), &out.y, &out.x);
  return out;
}

template <Turn turn, class T>
__device__ __forceinline__ float2 turn_of(const Angles<T>& a, int64_t token, int pair) {
  if constexpr (turn == Turn::table) {
    const int64_t at = token * a.stride + pair;
    if (a.cos.same) return {to_float(a.cos.same[at]), to_float(a.sin.same[at])};
    return {a.cos.full[at], a.sin.full[at]};
  } else if constexpr (turn == Turn::coords) {
    return turn_by_coords(a, token, pair);
  } else {
    return {1.0f, 0.0f};
  }
}

// N neighbours of a row of a table.
template <class T, int N>
__device__ __forceinline__ void neighbours(float (&value)[N], const Parameter<T>& table, int64_t at, bool whole) {
  const auto get = [&](const auto* from) {
    using U = std::remove_cvref_t<decltype(*from)>;
    constexpr int step = N < widest<U> ? N : widest<U>;
    if (whole) {
#pragma unroll
      for (int first = 0; first < N; first += step) {
        const Vec<U, step> some = load<step>(from + at + first);
#pragma unroll
        for (int i = 0; i < step; ++i) value[first + i] = to_float(some.at[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = to_float(from[at + i]);
    }
  };
  table.same ? get(table.same) : get(table.full);
}

// A length below eps counts as eps.
struct Length {
  float least, most;  // eps squared, 1 / eps

  static Length of(double eps) { return {static_cast<float>(eps * eps), static_cast<float>(1.0 / eps)}; }
};

template <class T>
struct Forward {
  Packed<const T> from;
  Packed<T> to;
  Gamma<T> gamma[2];  // of the parts that are normalised
  Angles<T> angles;
  int64_t tokens;
  int heads;   // a part
  int parts;   // that are read and written
  int normed;  // the first so many of them; the others are copied
  int dim;
  Length length;
  float root;  // sqrt(D)
  bool exact;  // round to T before turning
};

template <class T>
struct Backward {
  Packed<const T> grad;
  Packed<const T> x;
  Packed<T> dx;
  Gamma<T> gamma[2];
  Angles<T> angles;
  float* dgamma;  // [teams, normed, H, D], sums over a team's tokens
  int64_t tokens;
  int heads, parts, normed, dim;
  Length length;
  float root;
};

// Sums over `lanes` neighbours, a power of two; everyone gets them.
template <int N>
__device__ __forceinline__ void sum_over(float (&value)[N], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += __shfl_xor_sync(0xffffffffu, value[i], step);
  }
}

// sqrt(D) / |x|. As torch.nn.functional.normalize: a length below eps counts as eps. A NaN stays one.
template <class A>
__device__ __forceinline__ float scale_of(float squares, const A& a) {
  return squares < a.length.least ? a.root * a.length.most : a.root * rsqrtf(squares);
}

// Items == 2: the second access lies half a head further on, which is where the partners of the half layout are.
template <int Items>
__device__ __forceinline__ int column_of(int item, int lane, int vec, int dim) {
  return lane * vec + (Items == 2 && item == 1 ? dim / 2 : 0);
}

// Number i of a thread's pairs: its columns in the values that it holds, as one row of Items * N.
template <bool Interleaved, int N>
struct Pair {
  static __device__ constexpr int first(int i) { return Interleaved ? 2 * i : i; }
  static __device__ constexpr int second(int i) { return Interleaved ? 2 * i + 1 : N + i; }
};

// The first pair of a thread in one access, among those of the head. Half layout: both accesses have the same.
template <bool Interleaved, int Items>
__device__ __forceinline__ int first_pair(int item, int lane, int vec, int dim) {
  return Interleaved ? column_of<Items>(item, lane, vec, dim) / 2 : lane * vec;
}

template <class T, bool Interleaved, int Items>
inline constexpr int pairs_of = Items * widest<T> / 2;

// cos and sin of a thread's pairs.
template <Turn turn, class T, bool Interleaved, int Items>
__device__ __forceinline__ void angles_of(const Angles<T>& a, int64_t token, int lane, int dim,
                                          float (&cos)[pairs_of<T, Interleaved, Items>],
                                          float (&sin)[pairs_of<T, Interleaved, Items>]) {
  constexpr int pairs = pairs_of<T, Interleaved, Items>;
  constexpr int runs = Interleaved ? Items : 1, length = pairs / runs;  // pairs that follow each other
#pragma unroll
  for (int run = 0; run < runs; ++run) {
    const int pair = first_pair<Interleaved, Items>(run, lane, widest<T>, dim);
    if constexpr (turn == Turn::table) {
      float c[length], s[length];
      neighbours(c, a.cos, token * a.stride + pair, a.whole);
      neighbours(s, a.sin, token * a.stride + pair, a.whole);
#pragma unroll
      for (int i = 0; i < length; ++i) cos[run * length + i] = c[i], sin[run * length + i] = s[i];
    } else {
#pragma unroll
      for (int i = 0; i < length; ++i) {
        const float2 found = turn_of<turn>(a, token, pair + i);
        cos[run * length + i] = found.x, sin[run * length + i] = found.y;
      }
    }
  }
}

// A whole access of neighbours of gamma, for a kernel that knows its dtype.
template <bool Full, class T>
__device__ __forceinline__ void gamma_of(float (&value)[widest<T>], const Gamma<T> (&gamma)[2], int part, int place) {
  constexpr int N = widest<T>;
  if constexpr (Full) {
    const float* from = part == 0 ? gamma[0].rows.full : gamma[1].rows.full;
#pragma unroll
    for (int first = 0; first < N; first += widest<float>) {
      const Packet<float> four = load_packet<false, true>(from, place + first, place + N);
#pragma unroll
      for (int i = 0; i < widest<float>; ++i) value[first + i] = four[i];
    }
  } else {
    const T* from = part == 0 ? gamma[0].rows.same : gamma[1].rows.same;
    const Packet<T> some = load_packet<false, true>(from, place, place + N);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = some[i];
  }
}

// Blocks that registers must leave room for on an SM. Half layout of halves has twice the angles: at 64 registers it would need
// a frame on the stack. So would any head of halves in code before sm_90's (48 bytes, by the compiler's count): one block less.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int fewer_of_halves = 1;
#else
inline constexpr int fewer_of_halves = 0;
#endif
template <class T, int Items, Turn turn>
inline constexpr int least_blocks = sizeof(T) == 4         ? 4
                                    : Items == 1           ? 4 - fewer_of_halves
                                    : turn == Turn::coords ? 2
                                                           : 3 - fewer_of_halves;

// A thread keeps its columns of one head, and so their gamma, for AtOnce tokens, all loaded before the first is used. The
// angles of the block's tokens are in shared memory, computed or loaded once for all heads. Instructions, not bytes, are
// what a kernel like this comes up against: 21 an element, counted, where a thread took heads of one token instead and
// worked out the place and the gamma of each; so places are pointers that step, and divisions are multiplications.
template <class T, bool Interleaved, int Items, Turn turn, int AtOnce>
__global__ void __launch_bounds__(256, (least_blocks<T, Items, turn>))
    norm_heads(const Forward<T> a, const HeadPlan plan, uint32_t by_pairs /* inverse of D/2 */) {
  constexpr int N = widest<T>, pairs = pairs_of<T, Interleaved, Items>;
  extern __shared__ float4 shared[];  // cos, then sin, of the block's tokens, D/2 each
  const int half = a.dim / 2, all_tokens = plan.tokens * AtOnce;
  float* const cos_of = reinterpret_cast<float*>(shared);
  float* const sin_of = cos_of + all_tokens * half;
  const int lane = threadIdx.x & (plan.lanes - 1), slot = threadIdx.x >> plan.lane_bits;
  const int local = quotient(slot, plan.inverse), head = blockIdx.y * plan.heads + slot - local * plan.heads;
  const int part = (head >= a.heads) + (head >= 2 * a.heads), own = head - part * a.heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * all_tokens, left = a.tokens - first;
  const bool works = local < plan.tokens && lane * N < a.dim / Items && head < a.parts * a.heads;
  const int tokens =
      works ? static_cast<int>(left < all_tokens ? left : all_tokens) : 0;  // token i: local + i * plan.tokens

  Packet<T> x[AtOnce][Items] = {};
  {
    const T* from = a.from.of(first + local, part, own) + lane * N;
    const int64_t step = plan.tokens * a.from.token;
#pragma unroll
    for (int i = 0; i < AtOnce; ++i, from += step) {
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        if (local + i * plan.tokens < tokens) x[i][item] = load_packet<false>(from, item * half, a.dim);
      }
    }
  }
  float gamma[Items][N] = {};
  if (tokens > 0 && part < a.normed) {
    const int place = own * static_cast<int>(part == 0 ? a.gamma[0].stride : a.gamma[1].stride) + lane * N;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      a.gamma[0].rows.full ? gamma_of<true>(gamma[item], a.gamma, part, place + item * half)
                           : gamma_of<false>(gamma[item], a.gamma, part, place + item * half);
    }
  }
  if constexpr (turn != Turn::none) {
    const int count = left < all_tokens ? static_cast<int>(left) * half : all_tokens * half;
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
      const int of = quotient(at, by_pairs);
      const float2 found = turn_of<turn>(a.angles, first + of, at - of * half);
      cos_of[at] = found.x, sin_of[at] = found.y;
    }
    __syncthreads();
  }

  float squares[AtOnce] = {};
#pragma unroll
  for (int i = 0; i < AtOnce; ++i) {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
#pragma unroll
      for (int k = 0; k < N; ++k) squares[i] += x[i][item][k] * x[i][item][k];
    }
    keep_packed(x[i]);
  }
  sum_over(squares, plan.lanes);
  if (tokens == 0) return;

  T* to = a.to.of(first + local, part, own) + lane * N;
  const int64_t step = plan.tokens * a.to.token;
  if (part >= a.normed) {
#pragma unroll
    for (int i = 0; i < AtOnce; ++i, to += step) {
      if (local + i * plan.tokens >= tokens) break;
#pragma unroll
      for (int item = 0; item < Items; ++item) store_packet<false>(to, item * half, a.dim, x[i][item]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < AtOnce; ++i, to += step) {
    if (local + i * plan.tokens >= tokens) break;
    const float scale = scale_of(squares[i], a);
    float value[Items][N];
#pragma unroll
    for (int item = 0; item < Items; ++item) {
#pragma unroll
      for (int k = 0; k < N; ++k) value[item][k] = x[i][item][k] * (gamma[item][k] * scale);
    }
    if constexpr (turn != Turn::none) {
      if (a.exact) {
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          const Packet<T> at_store = pack<T>(value[item]);  // two values an instruction
#pragma unroll
          for (int k = 0; k < N; ++k) value[item][k] = at_store[k];
        }
      }
      constexpr int runs = Interleaved ? Items : 1, length = pairs / runs, word = length < 4 ? length : 4;
#pragma unroll
      for (int k = 0; k < pairs; k += word) {
        const int at =
            (local + i * plan.tokens) * half + k % length + first_pair<Interleaved, Items>(k / length, lane, N, a.dim);
        const Vec<float, word> cos = load<word>(cos_of + at), sin = load<word>(sin_of + at);
#pragma unroll
        for (int j = 0; j < word; ++j) {
          const int pair = k + j;
          float& left_of = Interleaved ? value[2 * pair / N][2 * pair % N] : value[0][pair];
          float& right_of = Interleaved ? value[2 * pair / N][2 * pair % N + 1] : value[Items - 1][pair];
          const float one = left_of, two = right_of;
          left_of = one * cos.at[j] - two * sin.at[j];
          right_of = two * cos.at[j] + one * sin.at[j];
        }
      }
    }
#pragma unroll
    for (int item = 0; item < Items; ++item) store_packet<false>(to, item * half, a.dim, pack<T>(value[item]));
  }
}

inline constexpr int most_pairs = widest_head / 2 / 32;  // of a lane, where a warp owns a head

// Any address, any even width: a warp owns a head, and moves it element by element.
template <class T, Turn turn>
__global__ void __launch_bounds__(256) norm_heads_singly(const Forward<T> a, bool interleaved) {
  const int lane = threadIdx.x % 32, heads = a.parts * a.heads, half = a.dim / 2;
  const int64_t all = a.tokens * heads;
  const auto warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const auto warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t at = warp; at < all; at += warps) {
    const int64_t token = at / heads;
    const int head = static_cast<int>(at - token * heads), part = head / a.heads, own = head - part * a.heads;
    const T* from = a.from.of(token, part, own);
    T* to = a.to.of(token, part, own);
    float first[most_pairs] = {}, second[most_pairs] = {}, squares[1] = {};
#pragma unroll
    for (int i = 0; i < most_pairs; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= half) continue;
      first[i] = to_float(from[interleaved ? 2 * pair : pair]);
      second[i] = to_float(from[interleaved ? 2 * pair + 1 : half + pair]);
      squares[0] += first[i] * first[i] + second[i] * second[i];
    }
    sum_over(squares, 32);
    const float scale = scale_of(squares[0], a);
#pragma unroll
    for (int i = 0; i < most_pairs; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= half) continue;
      const int left = interleaved ? 2 * pair : pair, right = interleaved ? 2 * pair + 1 : half + pair;
      float one = first[i], two = second[i];
      if (part < a.normed) {
        one *= scale * (part == 0 ? a.gamma[0].at(own, left) : a.gamma[1].at(own, left));
        two *= scale * (part == 0 ? a.gamma[0].at(own, right) : a.gamma[1].at(own, right));
        if constexpr (turn != Turn::none) {
          if (a.exact) one = rounded<T>(one), two = rounded<T>(two);
          const float2 by = turn_of<turn>(a.angles, token, pair);
          const float turned = one * by.x - two * by.y;
          two = two * by.x + one * by.y;
          one = turned;
        }
      }
      to[left] = from_float<T>(one), to[right] = from_float<T>(two);
    }
  }
}

// ---- backward ----------------------------------------------------------------------------------------------------
//
// With xhat = x / |x|, u = the gradient turned back and gw = u gamma sqrt(D):
//   dx = (gw - xhat sum(gw xhat)) / |x|   (below eps: gw / eps),   dgamma = sum over tokens of u xhat sqrt(D)
// A thread keeps its columns of one head over all tokens of its team, so their sums are registers.

template <class T, bool Interleaved, int Items, Turn turn>
__global__ void __launch_bounds__(256, 2) head_gradients(const Backward<T> a, const HeadPlan plan) {
  constexpr int N = widest<T>, pairs = pairs_of<T, Interleaved, Items>;
  const int lane = threadIdx.x & (plan.lanes - 1), slot = threadIdx.x >> plan.lane_bits;
  const int local = quotient(slot, plan.inverse), head = blockIdx.y * plan.heads + slot - local * plan.heads;
  const bool here = local < plan.tokens && lane * N < a.dim / Items && head < a.parts * a.heads;
  const int part = (head >= a.heads) + (head >= 2 * a.heads), own = head - part * a.heads;
  const int64_t team = static_cast<int64_t>(blockIdx.x) * plan.tokens + local;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * plan.tokens;
  const bool normed = here && part < a.normed;

  float dgamma[Items][N] = {};
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * plan.tokens; first < a.tokens; first += teams) {
    const int64_t token = first + local;
    const bool works = here && token < a.tokens;
    Packet<T> x[Items] = {}, grad[Items] = {};
    if (works) {
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        const int column = column_of<Items>(item, lane, N, a.dim);
        grad[item] = load_packet<false>(a.grad.of(token, part, own), column, a.dim);
        if (normed) x[item] = load_packet<false>(a.x.of(token, part, own), column, a.dim);
      }
    }
    float u[Items * N];
#pragma unroll
    for (int k = 0; k < Items * N; ++k) u[k] = grad[k / N][k % N];
    if constexpr (turn != Turn::none) {
      if (works && normed) {
        float cos[pairs], sin[pairs];
        angles_of<turn, T, Interleaved, Items>(a.angles, token, lane, a.dim, cos, sin);
#pragma unroll
        for (int k = 0; k < pairs; ++k) {
          float& left = u[Pair<Interleaved, N>::first(k)];
          float& right = u[Pair<Interleaved, N>::second(k)];
          const float one = left, two = right;
          left = one * cos[k] + two * sin[k];
          right = two * cos[k] - one * sin[k];
        }
      }
    }
    float gw[Items * N], sum[2] = {};
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      float gamma[N] = {};
      if (normed) {
        const int place = own * static_cast<int>(part == 0 ? a.gamma[0].stride : a.gamma[1].stride) +
                          column_of<Items>(item, lane, N, a.dim);
        a.gamma[0].rows.full ? gamma_of<true>(gamma, a.gamma, part, place)
                             : gamma_of<false>(gamma, a.gamma, part, place);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        gw[item * N + k] = u[item * N + k] * gamma[k] * a.root;
        sum[0] += x[item][k] * x[item][k];
        sum[1] += gw[item * N + k] * x[item][k];
      }
    }
    sum_over(sum, plan.lanes);
    if (!works) continue;

    const bool short_of = sum[0] < a.length.least;
    const float inverse = short_of ? a.length.most : rsqrtf(sum[0]);
    const float along = short_of ? 0.0f : sum[1] * inverse * inverse;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      float value[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        value[k] = inverse * (gw[item * N + k] - x[item][k] * along);
        dgamma[item][k] += u[item * N + k] * (x[item][k] * inverse * a.root);
      }
      const Packet<T> out = normed ? pack<T>(value) : grad[item];
      store_packet<false>(a.dx.of(token, part, own), column_of<Items>(item, lane, N, a.dim), a.dim, out);
    }
  }
  if (!normed) return;

  float* mine = a.dgamma + ((team * a.normed + part) * a.heads + own) * a.dim;
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    const int column = column_of<Items>(item, lane, N, a.dim);
#pragma unroll
    for (int k = 0; k < N; ++k) mine[column + k] = dgamma[item][k];
  }
}

// Any address, any even width: a warp owns a head of every so many tokens.
template <class T, Turn turn>
__global__ void __launch_bounds__(256, 2) head_gradients_singly(const Backward<T> a, bool interleaved, int64_t teams) {
  const int lane = threadIdx.x % 32, heads = a.parts * a.heads, half = a.dim / 2;
  const auto warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t team = warp / heads;
  if (team >= teams) return;
  const int head = static_cast<int>(warp - team * heads), part = head / a.heads, own = head - part * a.heads;
  const bool normed = part < a.normed;

  float left_sum[most_pairs] = {}, right_sum[most_pairs] = {};
  for (int64_t token = team; token < a.tokens; token += teams) {
    const T* from = a.x.of(token, part, own);
    const T* grad = a.grad.of(token, part, own);
    T* to = a.dx.of(token, part, own);
    float x[2][most_pairs] = {}, u[2][most_pairs] = {}, gw[2][most_pairs] = {}, sum[2] = {};
#pragma unroll
    for (int i = 0; i < most_pairs; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= half) continue;
      const int left = interleaved ? 2 * pair : pair, right = interleaved ? 2 * pair + 1 : half + pair;
      u[0][i] = to_float(grad[left]), u[1][i] = to_float(grad[right]);
      if (!normed) continue;
      x[0][i] = to_float(from[left]), x[1][i] = to_float(from[right]);
      const float2 by = turn_of<turn>(a.angles, token, pair);
      const float one = u[0][i], two = u[1][i];
      u[0][i] = one * by.x + two * by.y;
      u[1][i] = two * by.x - one * by.y;
      gw[0][i] = u[0][i] * (part == 0 ? a.gamma[0].at(own, left) : a.gamma[1].at(own, left)) * a.root;
      gw[1][i] = u[1][i] * (part == 0 ? a.gamma[0].at(own, right) : a.gamma[1].at(own, right)) * a.root;
      sum[0] += x[0][i] * x[0][i] + x[1][i] * x[1][i];
      sum[1] += gw[0][i] * x[0][i] + gw[1][i] * x[1][i];
    }
    sum_over(sum, 32);
    const bool short_of = sum[0] < a.length.least;
    const float inverse = short_of ? a.length.most : rsqrtf(sum[0]);
    const float along = short_of ? 0.0f : sum[1] * inverse * inverse;
#pragma unroll
    for (int i = 0; i < most_pairs; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= half) continue;
      const int left = interleaved ? 2 * pair : pair, right = interleaved ? 2 * pair + 1 : half + pair;
      to[left] = from_float<T>(normed ? inverse * (gw[0][i] - x[0][i] * along) : u[0][i]);
      to[right] = from_float<T>(normed ? inverse * (gw[1][i] - x[1][i] * along) : u[1][i]);
      left_sum[i] += u[0][i] * (x[0][i] * inverse * a.root);
      right_sum[i] += u[1][i] * (x[1][i] * inverse * a.root);
    }
  }
  if (!normed) return;

  float* mine = a.dgamma + ((team * a.normed + part) * a.heads + own) * a.dim;
#pragma unroll
  for (int i = 0; i < most_pairs; ++i) {
    const int pair = i * 32 + lane;
    if (pair >= half) continue;
    mine[interleaved ? 2 * pair : pair] = left_sum[i];
    mine[interleaved ? 2 * pair + 1 : half + pair] = right_sum[i];
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------

// Tokens that a thread takes: 4 accesses are under way at a time.
template <int Items>
inline constexpr int at_once = 4 / Items;

// Calls body.operator()<Interleaved, Items>() with what holds the head: where a warp has too few lanes for one access
// each, two. False where rows are not whole words.
template <Turn turn, class T, class Body>
bool with_layout(int dim, bool interleaved, bool whole, Body&& body) {
  constexpr int N = widest<T>;
  if (!whole || dim % N != 0) return false;
  if (turn != Turn::none && !interleaved) {
    if (dim % (2 * N) != 0) return false;
    if constexpr (turn != Turn::none) body.template operator()<false, 2>();
  } else if (dim <= 32 * N) {
    body.template operator()<true, 1>();
  } else {
    if (dim % (2 * N) != 0) return false;
    if constexpr (widest_head > 32 * N) body.template operator()<true, 2>();
  }
  return true;
}

template <Turn turn, class T>
void run(const Context& context, const Forward<T>& a, bool interleaved, bool whole) {
  const int heads = a.parts * a.heads;
  if (a.tokens == 0 || heads == 0 || a.dim == 0) return;
  const bool served = with_layout<turn, T>(a.dim, interleaved, whole, [&]<bool Interleaved, int Items>() {
    constexpr int many = at_once<Items>;
    const HeadPlan plan = head_plan(a.dim, widest<T>, Items, heads);
    const int tokens = plan.tokens * many, half = a.dim / 2;
    const dim3 grid(static_cast<unsigned>((a.tokens + tokens - 1) / tokens), static_cast<unsigned>(plan.chunks));
    const int shared = turn == Turn::none ? 0 : 2 * tokens * half * static_cast<int>(sizeof(float));
    launch_with_shared<norm_heads<T, Interleaved, Items, turn, many>>(context, grid, dim3(plan.threads), shared, a,
                                                                      plan, inverse_of(half));
  });
  if (served) return;
  launch<norm_heads_singly<T, turn>>(context, norm::grid_of((a.tokens * heads + 7) / 8), dim3(256), a, interleaved);
}

// dx, and dgamma of the normalised parts, each [H, D].
template <Turn turn, class T>
void gradients(const Context& context, Backward<T>& a, bool interleaved, bool whole, const Buffer* const (&dgamma)[2]) {
  const int heads = a.parts * a.heads, size = a.heads * a.dim;
  if (size == 0) return;
  std::optional<Buffer> partial;
  int64_t teams = 0;
  const auto start = [&](int64_t count) {
    teams = count;
    partial.emplace(context.empty({teams, int64_t{1} * a.normed * size}, DType::f32));
    a.dgamma = partial->template as<float>();
  };
  if (a.tokens > 0) {
    const bool served = with_layout<turn, T>(a.dim, interleaved, whole, [&]<bool Interleaved, int Items>() {
      constexpr auto kernel = head_gradients<T, Interleaved, Items, turn>;
      const HeadPlan plan = head_plan(a.dim, widest<T>, Items, heads);
      const int64_t resident = std::max<int64_t>(1, resident_blocks<kernel>(context, plan.threads) / plan.chunks);
      const int64_t blocks =
          std::min((gradient_teams(a.tokens, resident * plan.tokens, 1) + plan.tokens - 1) / plan.tokens, resident);
      start(blocks * plan.tokens);
      launch<kernel>(context, dim3(static_cast<unsigned>(blocks), plan.chunks), dim3(plan.threads), a, plan);
    });
    if (!served) {
      constexpr auto kernel = head_gradients_singly<T, turn>;
      const int64_t resident = std::max<int64_t>(1, resident_blocks<kernel>(context, 256) * 8 / heads);
      start(gradient_teams(a.tokens, resident, 1));
      launch<kernel>(context, norm::grid_of((teams * heads + 7) / 8), dim3(256), a, interleaved, teams);
    }
  }
  for (int part = 0; part < a.normed; ++part) {
    const Buffer& out = *dgamma[part];
    dispatch(out.view().dtype, Floats{}, [&]<class P>() {
      launch<add_teams<P>>(context, dim3((size + 31) / 32), dim3(1024),
                           static_cast<const float*>(a.dgamma + (teams ? int64_t{1} * part * size : 0)),
                           out.template as<P>(), teams, int64_t{1} * a.normed * size, size);
    });
  }
}

// ---- what the launchers share ------------------------------------------------------------------------------------

inline void must_be_heads(const Tensor& gamma, const char* argument, int64_t heads, int64_t dim, DType dtype) {
  if (gamma.rank != 2 || gamma.shape[0] != heads || gamma.shape[1] != dim) {
    std::string wanted("shape [");
    wanted.append(std::to_string(heads)).append(", ").append(std::to_string(dim)).append("]");
    wrong_value(argument, wanted, shape_of(gamma));
  }
  if (gamma.dtype != dtype) wrong_type(argument, std::string(name_of(dtype)) + " like q_gamma", name_of(gamma.dtype));
}

inline void must_fit(int64_t heads, int64_t dim) {
  if (dim % 2 != 0 || dim > widest_head || heads > 65536) throw Refused{"size"};
}

// Gathers whether every head begins at a 16-byte word, and how far into a token its offsets reach.
template <class T>
class Alignment {
 public:
  // x: [N, H, D] or [N, parts, H, D]
  template <class U>
  Packed<U> packed(const Tensor& x) {
    const int last = x.rank - 1;
    if (x.shape[last] > 1 && x.stride[last] != 1) throw Refused{"unit_stride"};
    bool steps = aligned(x.data, 0, 16);
    int64_t reach = 0;
    for (int dim = 0; dim < last; ++dim) {
      if (x.shape[dim] > 1) steps = steps && x.stride[dim] * x.itemsize % 16 == 0;
      if (dim > 0) reach += x.shape[dim] * x.stride[dim];
    }
    whole_ = whole_ && steps && reach < farthest;
    return {x.as<U>(), x.stride[0], x.rank == 4 ? x.stride[1] : 0, x.stride[last - 1]};
  }

  Gamma<T> gamma(const Tensor& rows, DType dtype) {
    if (rows.shape[1] > 1 && rows.stride[1] != 1) throw Refused{"unit_stride"};
    Gamma<T> out{parameter(rows, dtype), rows.stride[0]};
    whole_ = whole_ && aligned(rows.data, rows.shape[0] > 1 ? out.stride * rows.itemsize : 0, 16);
    whole_ = whole_ && rows.shape[0] * out.stride < farthest;
    return out;
  }

  static Parameter<T> parameter(const Tensor& rows, DType dtype) {
    Parameter<T> out{};
    if (rows.dtype == dtype) {
      out.same = rows.as<const T>();
    } else if (rows.dtype == DType::f32) {
      out.full = rows.as<const float>();
    } else {
      throw Refused{"dtype"};
    }
    return out;
  }

  bool whole() const { return whole_; }

 private:
  static constexpr int64_t farthest = int64_t{1} << 30;
  bool whole_ = true;
};

}  // namespace prequal::heads
