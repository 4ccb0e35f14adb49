// Quantisation of rows to FP8: the kernels of quantize_fp8 and of what makes its values itself (swiglu_quantize_fp8).
//
// A source gives packets of a row's values: from memory, or computed. What shares a scale is held in registers between its
// largest value and its codes: a row by a warp or a block, 128 columns by 16 lanes (fp32: 32), 128 x 128 by a block. Rows
// that no block holds are asked for twice, and so is a tensor, the second time from its end, which L2 may still have.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "prequal/dispatch.h"
#include "prequal/fp8.cuh"
#include "prequal/launch.h"
#include "prequal/row_plan.h"

namespace prequal::quantize {

inline constexpr int block = 128;  // columns, and of a tile rows, that share a scale

constexpr int64_t blocks_of(int64_t size) { return (size + block - 1) / block; }

// Values that lie in memory.
template <class T>
struct Plain {
  using Value = T;
  static constexpr bool by_warp = true;       // has kernels for short rows, a warp each; what is computed has not
  static constexpr bool in_registers = true;  // has kernels that hold a row
  const T* at;                                // [rows, H]
  int64_t stride;                             // elements from row to row

  // The same from (row, column) on.
  __device__ __forceinline__ Plain begin_at(int64_t row, int64_t column) const {
    return {kept(at + row * stride + column), stride};
  }
  // Of the first row.
  template <bool Ragged>
  __device__ __forceinline__ Packet<T> packet(int column, int width) const {
    return load_packet<Ragged>(at, column, width);
  }
};

// Where codes and scales go.
struct Result {
  uint8_t* q;          // [rows, H], contiguous
  float* scale;        // a place a group
  const float* given;  // the same, or null: found
  int64_t rows;
  int64_t width;
  float bound;  // of a scale that is found
  bool ue8m0;
  bool by_column;  // the place of group g of row r of groups is g * rows + r, not r * groups + g

  __device__ __forceinline__ int64_t place(int64_t row, int64_t group, int64_t rows_of_groups, int64_t groups) const {
    return by_column ? group * rows_of_groups + row : row * groups + group;
  }
  // finite: the largest |x| of the group that is finite
  template <Fp8 F>
  __device__ __forceinline__ float scale_from(float finite) const {
    return scale_for(finite, Fp8Format<F>::largest, bound, ue8m0);
  }
};

// A scale and what divides by it, of values that a team shares: `join` gives every thread the largest of all threads'.
// given(): the scale, where it is.
template <Fp8 F, class T, int Items, class Given, class Join>
__device__ __forceinline__ Divisor shared_divisor(Packet<T> (&held)[Items], const Result& to, Given&& given,
                                                  Join&& join) {
  float most = largest_of(held);
  if (to.given) return divisor_of<T>(given(), warp_max(most));  // of this warp's values: its lanes store together
  most = join(most);
  float finite = most;
  if (most == INFINITY) {
    keep_packed(held);  // else what the first search made of them waits in registers for this one
    finite = join(largest_finite_of(held));
  }
  return divisor_of<T>(to.scale_from<F>(finite), most);
}

// ---- a row a scale -----------------------------------------------------------------------------------------------------

// Threads of a block that has its row in `Items` packets a thread (row_plan), and the blocks that its registers leave room
// for on a multiprocessor.
template <int Items>
constexpr int most_threads(RowKind kind) {
  return kind == RowKind::warp ? 128 : Items == 2 ? 256 : 1024;
}
template <int Items>
constexpr int least_blocks(RowKind kind, bool computed) {
  return kind == RowKind::warp ? 8 : Items == 2 ? (computed ? 5 : 6) : 1;  // 6 blocks of what is computed spill
}

template <Fp8 F, class Source, bool Ragged, int Items, RowKind kind>
__global__ void __launch_bounds__((most_threads<Items>(kind)), (least_blocks<Items>(kind, !Source::by_warp)))
    token(const Source from, const Result to) {
  using T = typename Source::Value;
  constexpr bool warps = kind == RowKind::warp;
  __shared__ BlockMax::Shared shared;
  BlockMax whole(shared);
  const int threads = warps ? 32 : blockDim.x, thread = warps ? threadIdx.x % 32 : threadIdx.x;
  const int teams = warps ? blockDim.x / 32 : 1, team = warps ? threadIdx.x / 32 : 0;
  const int first = thread * widest<T>, left = static_cast<int>(to.width) - first;
  const auto column = [&](int item) { return item * threads * widest<T>; };  // from the first on
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * teams + team; row < to.rows;
       row += static_cast<int64_t>(gridDim.x) * teams) {
    const Source here = from.begin_at(row, first);
    Packet<T> held[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) held[item] = here.template packet<Ragged>(column(item), left);

    const Divisor divisor = shared_divisor<F>(
        held, to, [&] { return to.given[row]; },
        [&](float value) {
          if constexpr (warps) return warp_max(value);
          return whole.of(value);
        });
    keep_packed(held);

    uint8_t* q = kept(to.q + row * to.width + first);
    each_codes<F>(held, divisor,
                  [&](int item, const Codes<T>& codes) { store_codes<Ragged>(q, column(item), left, codes); });
    if (thread == 0) to.scale[row] = divisor.by;
  }
}

// Rows wider than a block holds: asked for twice, `asked` accesses of a thread at a time.
template <Fp8 F, class Source, bool Ragged>
__global__ void __launch_bounds__(1024) token_twice(const Source from, const Result to) {
  using T = typename Source::Value;
  constexpr int asked = Source::by_warp ? 4 : 1;  // what is computed has registers for one
  __shared__ BlockMax::Shared shared;
  BlockMax whole(shared);
  const int width = static_cast<int>(to.width), step = blockDim.x * widest<T>;
  for (int64_t row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const Source here = from.begin_at(row, 0);
    const auto each = [&](auto&& body) {
      for (int first = threadIdx.x * widest<T>; first - static_cast<int>(threadIdx.x) * widest<T> < width;
           first += asked * step) {
        Packet<T> held[asked];
#pragma unroll
        for (int item = 0; item < asked; ++item) held[item] = here.template packet<Ragged>(first + item * step, width);
        body(held, first);
      }
    };
    float most = 0.0f;
    each([&](Packet<T>(&x)[asked], int) { most = fmaxf(most, largest_of(x)); });
    Divisor divisor;
    if (to.given) {
      divisor = divisor_of<T>(to.given[row], warp_max(most));  // as in shared_divisor
    } else {
      float finite = most = whole.of(most);
      if (most == INFINITY) {
        finite = 0.0f;
        each([&](Packet<T>(&x)[asked], int) { finite = fmaxf(finite, largest_finite_of(x)); });
        finite = whole.of(finite);
      }
      divisor = divisor_of<T>(to.scale_from<F>(finite), most);
    }
    each([&](Packet<T>(&x)[asked], int first) {
      each_codes<F>(x, divisor, [&](int item, const Codes<T>& codes) {
        store_codes<Ragged>(to.q + row * to.width, first + item * step, width, codes);
      });
    });
    if (threadIdx.x == 0) to.scale[row] = divisor.by;
  }
}

// ---- 128 columns a scale -------------------------------------------------------------------------------------------------

template <class T>
inline constexpr int group_lanes = block / widest<T>;

// The codes of `Items` groups of this thread's lanes, of which each lane makes one scale. given(item) and keep(item, scale):
// of this lane's item. store(item, codes).
template <Fp8 F, class T, int Items, class Given, class Keep, class Store>
__device__ __forceinline__ void group_codes(Packet<T> (&held)[Items], const Result& to, Given&& given, Keep&& keep,
                                            Store&& store) {
  constexpr int lanes = group_lanes<T>, share = lanes / Items;
  constexpr unsigned all = 0xffffffffu;
  const int mine = threadIdx.x % lanes / share;
  const float most = group_largest<lanes>(held);
  float scale;
  if (to.given) {
    scale = given(mine);
  } else {
    float finite = most;
    if (__any_sync(all, most == INFINITY)) {
      keep_packed(held);  // as in shared_divisor
      float value[Items];
#pragma unroll
      for (int item = 0; item < Items; ++item) value[item] = largest_finite_in(held[item]);
      finite = group_max<lanes>(value);
    }
    scale = to.scale_from<F>(finite);
  }
  if (threadIdx.x % share == 0) keep(mine, scale);
  const Divisor own = divisor_of<T>(scale, most);
  keep_packed(held);
  if (__all_sync(all, own.inverse != 0.0f)) {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const auto of_item = [&](float value) { return __shfl_sync(all, value, item * share, lanes); };
      const Divisor divisor{sizeof(T) == 2 ? 0.0f : of_item(own.by), of_item(own.inverse), of_item(own.rest)};
      store(item, fast_codes<F>(held[item], divisor));
    }
  } else {
    any_codes<F>(held, [&](int item) { return __shfl_sync(all, own.by, item * share, lanes); }, store);
  }
}

inline constexpr int group_threads = 128;

template <class T>
inline constexpr int group_items = sizeof(T) == 2 ? 8 : 4;  // groups of a thread; 8 of fp32 that is computed spill

// The groups of a thread's lanes lie below each other, in rows that follow: one division tells where. In a single row
// they lie a block's groups apart.
template <Fp8 F, class Source, bool Ragged>
__global__ void __launch_bounds__(group_threads, Source::by_warp ? 8 : 7) groups(const Source from, const Result to) {
  using T = typename Source::Value;
  constexpr int lanes = group_lanes<T>, at_once = group_threads / lanes, Items = group_items<T>;
  const bool single = to.rows == 1;
  const int64_t in_row = blocks_of(to.width);
  const int64_t units =
      single ? (in_row + at_once * Items - 1) / (at_once * Items) * at_once : (to.rows + Items - 1) / Items * in_row;
  const int64_t step_row = single ? 0 : 1, step_column = single ? at_once * block : 0;  // from item to item
  const int64_t step_place = single ? at_once : to.by_column ? 1 : in_row;
  const int column = threadIdx.x % lanes * widest<T>;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * at_once; first < units;
       first += static_cast<int64_t>(gridDim.x) * at_once) {
    const int64_t unit = first + threadIdx.x / lanes;
    int64_t row = 0, group = first * Items + threadIdx.x / lanes, below;
    if (single) {
      below = group < in_row ? (in_row - group + at_once - 1) / at_once : 0;
    } else {
      const int64_t rows =
          units <= 0xffffffffll ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(in_row) : unit / in_row;
      row = rows * Items, group = unit - rows * in_row;
      below = unit < units ? to.rows - row : 0;
    }
    const int items = static_cast<int>(min(below, static_cast<int64_t>(Items)));
    const int64_t room = to.width - group * block - column;  // from this thread's first packet to the row's end
    const auto left = [&](int item) {
      return static_cast<int>(min(room - item * step_column, static_cast<int64_t>(block - column)));
    };
    int has = items;  // packets of this thread
    if constexpr (!Ragged) {
      if (single) {
        has = static_cast<int>(min((room + at_once * block - 1) / (at_once * block), static_cast<int64_t>(items)));
      } else if (room <= 0) {
        has = 0;
      }
    }

    Packet<T> held[Items];
    Source here = from.begin_at(row, group * block + column);
    const auto take = [&](auto&& inside) {
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        held[item] = inside(item) ? here.template packet<Ragged>(0, Ragged ? left(item) : 1) : Packet<T>{};
        here = here.begin_at(step_row, step_column);
      }
    };
    if (has == Items) {
      take([](int) { return true; });
    } else {
      take([&](int item) { return item < has; });
    }

    const int64_t place = to.place(row, group, to.rows, in_row);
    uint8_t* q = kept(to.q + row * to.width + group * block + column);
    group_codes<F>(
        held, to, [&](int item) { return item < items ? to.given[place + item * step_place] : 1.0f; },
        [&](int item, float scale) {
          if (item < items) to.scale[place + item * step_place] = scale;
        },
        [&](int item, const Codes<T>& codes) {
          store_codes<Ragged, lanes>(q, 0, item >= has ? 0 : Ragged ? left(item) : 1, codes);
          q = kept(q + step_row * to.width + step_column);
        });
  }
}

// ---- 128 x 128 a scale ---------------------------------------------------------------------------------------------------

inline constexpr int tile_items = 8;

template <class T>
inline constexpr int tile_threads = block * group_lanes<T> / tile_items;

// The grid: across, down, and the matrices. matrix_rows: of each of them.
template <Fp8 F, class T, bool Ragged>
__global__ void __launch_bounds__(tile_threads<T>, 1024 / tile_threads<T>)
    tiles(const Plain<T> from, const Result to, int64_t matrix_rows, int64_t matrices) {
  constexpr int lanes = group_lanes<T>, at_once = tile_threads<T> / lanes;
  __shared__ BlockMax::Shared shared;
  BlockMax whole(shared);
  const int64_t in_row = blocks_of(to.width), in_matrix = blocks_of(matrix_rows);
  const int column = threadIdx.x % lanes * widest<T>, first_row = threadIdx.x / lanes;
  const auto tile = [&](int64_t matrix, int64_t down, int64_t group) {
    const int64_t top = matrix * matrix_rows + down * block;
    const int left = static_cast<int>(min(to.width - group * block, static_cast<int64_t>(block))) - column;
    const int rows = static_cast<int>(min(matrix_rows - down * block, static_cast<int64_t>(block)));
    const int has = Ragged || left > 0 ? (rows - first_row + at_once - 1) / at_once : 0;  // packets of this thread

    Packet<T> held[tile_items];
    Plain<T> here = from.begin_at(top + first_row, group * block + column);
    const auto take = [&](auto&& inside) {
#pragma unroll
      for (int item = 0; item < tile_items; ++item) {
        held[item] = inside(item) ? here.template packet<Ragged>(0, Ragged ? left : 1) : Packet<T>{};
        here = here.begin_at(at_once, 0);
      }
    };
    if (has == tile_items) {
      take([](int) { return true; });
    } else {
      take([&](int item) { return item < has; });
    }

    const auto place = [&] { return to.place(matrix * in_matrix + down, group, matrices * in_matrix, in_row); };
    const Divisor divisor =
        shared_divisor<F>(held, to, [&] { return to.given[place()]; }, [&](float value) { return whole.of(value); });
    keep_packed(held);

    uint8_t* q = kept(to.q + (top + first_row) * to.width + group * block + column);
    each_codes<F>(held, divisor, [&](int item, const Codes<T>& codes) {
      store_codes<Ragged, lanes>(q, 0, item >= has ? 0 : Ragged ? left : 1, codes);
      q = kept(q + at_once * to.width);
    });
    if (threadIdx.x == 0) to.scale[place()] = divisor.by;
  };
  for (int64_t matrix = blockIdx.z; matrix < matrices; matrix += gridDim.z) {
    for (int64_t down = blockIdx.y; down < in_matrix; down += gridDim.y) {
      for (int64_t group = blockIdx.x; group < in_row; group += gridDim.x) tile(matrix, down, group);
    }
  }
}

// ---- a tensor a scale ----------------------------------------------------------------------------------------------------

inline constexpr int tensor_threads = 256;
inline constexpr int tensor_items = 4;

template <class T>
inline constexpr int chunk_width = tensor_threads * tensor_items * widest<T>;

// body(row, column of the chunk, columns from there to its end, at most a chunk's): this block's chunks, or the last first.
template <class T, bool backwards, class Body>
__device__ __forceinline__ void each_chunk(const Result& to, Body&& body) {
  const int64_t in_row = (to.width + chunk_width<T> - 1) / chunk_width<T>, total = to.rows * in_row;
  for (int64_t turn = blockIdx.x; turn < total; turn += gridDim.x) {
    const int64_t chunk = backwards ? total - 1 - turn : turn;
    const int64_t row = chunk / in_row, first = (chunk - row * in_row) * chunk_width<T>;
    body(row, first, static_cast<int>(min(to.width - first, static_cast<int64_t>(chunk_width<T>))));
  }
}

__device__ __forceinline__ int chunk_column(int item, int vec) {
  return (item * tensor_threads + static_cast<int>(threadIdx.x)) * vec;
}

// The largest finite |x| of what each block has: no atomics, and nothing to set to zero before.
template <class T, bool Ragged>
__global__ void __launch_bounds__(tensor_threads, 6)
    tensor_amax(const Plain<T> from, const Result to, float* amax /*[gridDim.x]*/) {
  __shared__ BlockMax::Shared shared;
  BlockMax whole(shared);
  float finite = 0.0f;
  each_chunk<T, false>(to, [&](int64_t row, int64_t first, int left) {
    const Plain<T> here = from.begin_at(row, first);
    Packet<T> held[tensor_items];
#pragma unroll
    for (int item = 0; item < tensor_items; ++item) {
      held[item] = here.template packet<Ragged>(chunk_column(item, widest<T>), left);
    }
    float most = largest_of(held);
    if (most == INFINITY) {
      keep_packed(held);  // as in shared_divisor
      most = largest_finite_of(held);
    }
    finite = fmaxf(finite, most);
  });
  finite = whole.of(finite);
  if (threadIdx.x == 0) amax[blockIdx.x] = finite;
}

// amax: what tensor_amax left, [parts]; of a scale that is given there is none.
template <Fp8 F, class T, bool Ragged>
__global__ void __launch_bounds__(tensor_threads, 5)
    tensor(const Plain<T> from, const Result to, const float* amax /*[parts]*/, int parts) {
  __shared__ BlockMax::Shared shared;
  BlockMax whole(shared);
  float scale;
  if (to.given) {
    scale = to.given[0];
  } else {
    float finite = 0.0f;
    for (int part = threadIdx.x; part < parts; part += tensor_threads) finite = fmaxf(finite, amax[part]);
    scale = to.scale_from<F>(whole.of(finite));
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) to.scale[0] = scale;
  each_chunk<T, true>(to, [&](int64_t row, int64_t first, int left) {
    const Plain<T> here = from.begin_at(row, first);
    Packet<T> held[tensor_items];
#pragma unroll
    for (int item = 0; item < tensor_items; ++item) {
      held[item] = here.template packet<Ragged>(chunk_column(item, widest<T>), left);
    }
    const Divisor divisor = divisor_of<T>(scale, warp_max(largest_of(held)));  // as in shared_divisor
    uint8_t* q = to.q + row * to.width + first;
    each_codes<F>(held, divisor, [&](int item, const Codes<T>& codes) {
      store_codes<Ragged>(q, chunk_column(item, widest<T>), left, codes);
    });
  });
}

// ---- launching -----------------------------------------------------------------------------------------------------

inline dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, 0x7fffffff))); }

template <class Body>
void by_format(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::e4m3: return body.template operator()<Fp8::e4m3>();
    case DType::e5m2: return body.template operator()<Fp8::e5m2>();
    default: wrong_value("dtype", "float8_e4m3fn or float8_e5m2", name_of(dtype));
  }
}

inline int threads_for(int64_t width, int64_t each /* columns a thread */) {
  return whole_warps(std::clamp<int64_t>((width + each - 1) / each, 1, 1024));
}

template <class Source>
RowPlan plan_for(int64_t width) {
  constexpr int vec = widest<typename Source::Value>;
  const RowPlan plan = Source::in_registers ? row_plan(width, vec, 256, 4096) : row_in_loop;
  if (plan.kind == RowKind::loop) return {RowKind::loop, 1, threads_for(width, vec), 1};
  if (plan.kind == RowKind::warp && !Source::by_warp) return {RowKind::block, 2, threads_for(width, 2 * vec), 1};
  return plan;
}

// aligned_words: every row begins at a 16-byte word, and is made of such.
template <Fp8 F, class Source>
void by_token(const Context& context, const Source& from, const Result& to, bool aligned_words) {
  using T = typename Source::Value;
  const RowPlan plan = plan_for<Source>(to.width);
  const auto start = [&]<auto kernel>() {
    launch<kernel>(context, grid_of((to.rows + plan.rows - 1) / plan.rows), dim3(plan.threads), from, to);
  };
  const auto by_alignment = [&]<int Items, RowKind kind>() {
    if constexpr (Source::in_registers && (kind != RowKind::warp || Source::by_warp)) {
      if (aligned_words) return start.template operator()<token<F, Source, false, Items, kind>>();
      return start.template operator()<token<F, Source, true, Items, kind>>();
    }
    throw std::logic_error("quantize: a plan that this source has no kernel for");
  };
  switch (plan.kind) {
    case RowKind::warp:
      if (plan.items == 1) return by_alignment.template operator()<1, RowKind::warp>();
      return by_alignment.template operator()<4, RowKind::warp>();
    case RowKind::block:
      if (plan.items == 2) return by_alignment.template operator()<2, RowKind::block>();
      return by_alignment.template operator()<4, RowKind::block>();
    case RowKind::loop:
      if (aligned_words) return start.template operator()<token_twice<F, Source, false>>();
      return start.template operator()<token_twice<F, Source, true>>();
  }
  throw std::logic_error("quantize: row_plan made a plan that no kernel follows");
}

template <Fp8 F, class Source>
void by_group(const Context& context, const Source& from, const Result& to, bool aligned_words) {
  using T = typename Source::Value;
  constexpr int64_t at_once = group_threads / group_lanes<T>, a_block = at_once * group_items<T>;
  const int64_t in_row = blocks_of(to.width), down = (to.rows + group_items<T> - 1) / group_items<T>;
  const dim3 grid = grid_of(to.rows == 1 ? (in_row + a_block - 1) / a_block : (down * in_row + at_once - 1) / at_once);
  if (aligned_words) {
    launch<groups<F, Source, false>>(context, grid, dim3(group_threads), from, to);
  } else {
    launch<groups<F, Source, true>>(context, grid, dim3(group_threads), from, to);
  }
}

// Of x [..., H] and a granularity: the shape of its scales.
inline Tensor scales_of(const Tensor& x, const std::string& granularity, bool by_column) {
  Tensor like = x;
  const int last = x.rank - 1;
  if (granularity == "tensor") {
    like.rank = 1, like.shape[0] = 1;
    return like;
  }
  like.shape[last] = granularity == "token" ? 1 : blocks_of(x.shape[last]);
  if (granularity == "block_128x128") like.shape[last - 1] = blocks_of(x.shape[last - 1]);
  if (by_column) std::rotate(like.shape.begin(), like.shape.begin() + last, like.shape.begin() + last + 1);
  return like;
}

inline void must_have_rows(const Tensor& x, const char* argument, const std::string& granularity) {
  if (x.rank < 1) wrong_value(argument, "at least one dimension", "a 0-dimensional tensor");
  if (granularity == "block_128x128" && x.rank < 2) {
    wrong_value(argument, "at least two dimensions for 'block_128x128'", shape_of(x));
  }
}

inline void must_be_granularity(const std::string& granularity, bool rows_only) {
  if (granularity == "token" || granularity == "block_1x128") return;
  if (!rows_only && (granularity == "tensor" || granularity == "block_128x128")) return;
  const char* expected = rows_only ? "'token' or 'block_1x128'" : "'tensor', 'token', 'block_1x128' or 'block_128x128'";
  wrong_value("granularity", expected, "'" + granularity + "'");
}

inline bool is_by_column(const std::string& layout) {
  if (layout == "row") return false;
  if (layout == "column") return true;
  wrong_value("scale_layout", "'row' or 'column'", "'" + layout + "'");
}

// As float32, with ue8m0 a power of two.
inline float bound_of(const std::optional<double>& bound, bool ue8m0) {
  if (!bound) return INFINITY;
  if (!(*bound >= static_cast<double>(smallest_scale))) {
    wrong_value("scale_upper_bound", "at least 2^-126", std::to_string(*bound));
  }
  const auto rounded = static_cast<float>(*bound);
  return ue8m0 ? round_down(rounded) : rounded;
}

inline constexpr int64_t widest_row = int64_t{1}
                                      << 30;  // columns are counted in int, with room for a step past the end

// What a fused producer is asked for beside its values.
struct Options {
  bool groups;  // of 128 columns; else a row a scale
  DType dtype;
  float bound;
  bool ue8m0, by_column;

  Options(const std::string& granularity, DType dtype, const std::optional<double>& bound, bool ue8m0,
          const std::string& layout)
      : groups(granularity == "block_1x128"), dtype(dtype), bound(bound_of(bound, ue8m0)), ue8m0(ue8m0) {
    must_be_granularity(granularity, true);
    if (!is_fp8(dtype)) wrong_value("dtype", "float8_e4m3fn or float8_e5m2", name_of(dtype));
    by_column = is_by_column(layout);
  }

  // The results, of the shapes that those of x have.
  Result results(const Context& context, const Tensor& x, std::optional<Buffer>& q,
                 std::optional<Buffer>& scale) const {
    q.emplace(context.empty(x, dtype));
    scale.emplace(context.empty(scales_of(x, groups ? "block_1x128" : "token", by_column), DType::f32));
    return {q->as<uint8_t>(), scale->as<float>(), nullptr, rows_of(x).count, x.shape[x.rank - 1], bound, ue8m0,
            by_column};
  }

  // Rows of whole groups that follow each other without a gap are one row.
  bool joins_rows(bool gaps, int64_t width) const { return groups && !gaps && !by_column && width % block == 0; }
};

inline void must_be_scales(const Tensor& scale, const Tensor& x, const char* argument, const std::string& granularity,
                           bool by_column) {
  if (scale.dtype != DType::f16 && scale.dtype != DType::bf16 && scale.dtype != DType::f32 &&
      scale.dtype != DType::f64 && !is_fp8(scale.dtype) && scale.dtype != DType::other) {
    wrong_type("scale", "a floating dtype", name_of(scale.dtype));
  }
  const Tensor like = scales_of(x, granularity, by_column);
  const bool same =
      scale.rank == like.rank && std::equal(like.shape.begin(), like.shape.begin() + like.rank, scale.shape.begin());
  if (!same && !(granularity == "tensor" && scale.rank == 0)) {
    wrong_value("scale", "shape " + shape_of(like) + " for " + granularity + " scales of " + argument, shape_of(scale));
  }
  if (scale.dtype != DType::f32) throw Refused{"dtype"};
  if (!scale.contiguous_from(0)) throw Refused{"unit_stride"};
}

}  // namespace prequal::quantize
