// paths [B, T]: the best path through the states of log_emissions [B, T, S] under log_transitions, and its score [B].
// Up to 16 states 8 or 32 lanes own a sequence, up to 32 three warps, else a block or a cluster (viterbi_decode_kept.cu).
// The same launch walks back: the state that each came from waits in a workspace, [B, T, S] bytes or 16-bit integers.
// Bytes: B T S sizeof(T) and the transitions read, B T 8 and B 4 written; the workspace is written and read once more.
// Numerics: fp32, max(score + transition) + emission: two roundings a step, as the reference has them. NaN never wins.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "ops.h"
#include "prequal/launch.h"
#include "viterbi_decode_kept.h"

namespace prequal::ops {
namespace {

using namespace viterbi;

struct Unit : FileOf<"viterbi_decode"> {};

constexpr int64_t most_states = 2048, most_steps = int64_t{1} << 30;
constexpr int few_states = 32;      // a warp holds them
constexpr int few_threads = 32;     // sequences do not wait for each other's blocks
constexpr int many_threads = 1024;  // of the block that owns a sequence
// Sequences a multiprocessor up to which a chain is known to be faster: a step of 4 takes 374 cycles, of 5 warps alone 808.
constexpr int chain_a_multiprocessor = 4;
constexpr int few_chunk = 4096;        // bytes of origins that a warp walks back over at a time
constexpr int many_chunk = 32 * 1024;  // of a block: 8 steps of 2,048 states
constexpr int fixed_shared = 1024;     // what a block has besides: 16 bytes of the kernel

// ---- up to 32 states ---------------------------------------------------------------------------------------------

// `States` places for states, the last of them perhaps empty; the states that a state may come from go to `Parts` lanes.
template <int States, int Parts>
struct Few {
  static constexpr int lanes = States * Parts;           // of a sequence
  static constexpr int sequences = few_threads / lanes;  // of a warp
  static constexpr int each = States / Parts;            // candidates of a lane
  static constexpr int row = States * sequences;         // bytes of a step
  static constexpr int chunk = few_chunk / row;          // steps
  // Emissions in flight a lane: 8 steps ahead, of 32 candidates 4, where a step takes longer.
  static constexpr int ahead = each > 8 ? 4 : 8;
  // Whole chunks, and room for what the last round of `ahead` steps writes behind the end.
  static constexpr int64_t rows(int64_t steps) { return (steps + ahead + chunk - 1) / chunk * chunk; }
};

template <class T, int States, int Parts>
__global__ void __launch_bounds__(few_threads) few_kernel(Decode a) {
  using Of = Few<States, Parts>;
  static_assert(Parts == 1 || Parts == 2);
  const int lane = threadIdx.x % Of::lanes, group = threadIdx.x / Of::lanes;
  const int state = lane % States, part = lane / States;
  const int64_t asked = static_cast<int64_t>(blockIdx.x) * Of::sequences + group;
  const bool there = asked < a.batch;
  const int64_t sequence = there ? asked : 0;
  const int length = there ? a.length_of(sequence) : 0;
  const int longest = __reduce_max_sync(whole_warp, length);
  const bool real = state < a.states;

  float move[Of::each];
#pragma unroll
  for (int i = 0; i < Of::each; ++i) {
    const int from = part * Of::each + i;
    move[i] = lowest;
    if (real && from < a.states && abs(from - state) <= a.band) {
      move[i] =
          value_at(a.moves, a.moves_dtype, sequence * a.sequence_stride + from * a.from_stride + state * a.to_stride);
    }
  }

  // Places behind the end stand for the last one: what is read there moves no score, and nothing waits for a branch.
  const T* emission =
      static_cast<const T*>(a.emissions) + sequence * a.batch_stride + min(state, a.states - 1) * a.state_stride;
  const int last_step = max(length - 1, 0);
  const int step_bytes = static_cast<int>(a.step_stride * static_cast<int64_t>(sizeof(T)));  // `few` says that it fits
  const auto emission_at = [&](int step) {  // one multiplication; of a 64-bit stride it takes three
    const char* at = reinterpret_cast<const char*>(emission) + static_cast<int64_t>(min(step, last_step)) * step_bytes;
    return *reinterpret_cast<const T*>(at);
  };
  float score = lowest;
  if (real && length > 0) score = add(to_float(emission[0]), a.first(sequence, state));

  uint8_t* origins = static_cast<uint8_t*>(a.origins) + blockIdx.x * a.rows * Of::row;
  uint8_t* to = origins + group * States + state;  // a row a step; no step leads to the first
  *to = 0;
  to += Of::row;
  T held[Of::ahead];
  if (longest > 1) {
#pragma unroll
    for (int i = 0; i < Of::ahead; ++i) held[i] = emission_at(1 + i);
  }
#pragma unroll 1
  for (int first = 1; first < longest; first += Of::ahead) {
    T next[Of::ahead];
#pragma unroll
    for (int i = 0; i < Of::ahead; ++i) next[i] = emission_at(first + Of::ahead + i);
#pragma unroll
    for (int i = 0; i < Of::ahead; ++i) {
      float candidate[Of::each];
#pragma unroll
      for (int c = 0; c < Of::each; ++c) {
        candidate[c] = add(__shfl_sync(whole_warp, score, part * Of::each + c, Of::lanes), move[c]);
      }
      const float mine = greatest(candidate);
      const float other = Parts == 2 ? __shfl_xor_sync(whole_warp, mine, States) : lowest;
      const float best = Parts == 2 ? fmaxf(mine, other) : mine;
      const float after = add(best, to_float(held[i]));
      if (first + i < length) score = after;

      // No later step waits for what follows: of equal candidates the lowest, of equal halves the lower.
      int origin = 0;
#pragma unroll
      for (int c = Of::each - 1; c > 0; --c) origin = candidate[c] == mine ? c : origin;
      const bool found = best > lowest;
      origin = candidate[0] == mine || !found ? 0 : origin;
      bool wins = true;  // by selections: with && a step had six branches
      if constexpr (Parts == 2) {
        const int lower = static_cast<int>(!found) | static_cast<int>(mine == best);
        const int upper = static_cast<int>(found) & static_cast<int>(!(other >= best));
        wins = (part == 0 ? lower : upper) != 0;
      }
      if (wins) *to = static_cast<uint8_t>(part * Of::each + origin);
      to += Of::row;
    }
#pragma unroll
    for (int i = 0; i < Of::ahead; ++i) held[i] = next[i];
  }

  float best = real ? fmaxf(add(score, a.last(sequence, state)), lowest) : lowest;
  int at = state;
#pragma unroll
  for (int step = States / 2; step > 0; step /= 2) {
    const float value = __shfl_xor_sync(whole_warp, best, step);
    const int place = __shfl_xor_sync(whole_warp, at, step);
    if (value > best || (value == best && place < at)) best = value, at = place;
  }
  if (there && a.scores && lane == 0) a.scores[sequence] = length > 0 ? best : 0.0f;

  // Back: all lanes of a sequence walk alike, each keeps the state of one step, and they are written together.
  static_assert(Of::chunk % Of::lanes == 0);
  constexpr int words_a_lane = few_chunk / 16 / few_threads;
  __shared__ uint4 words[few_chunk / 16];
  const auto* bytes = reinterpret_cast<const uint8_t*>(words) + group * States;
  int64_t* path = a.paths + sequence * a.steps;
  const int64_t written = static_cast<int64_t>(longest) * (Of::row / 16);
  uint4 raw[words_a_lane];
  const auto load_chunk = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < words_a_lane; ++i) {
      const int64_t place = static_cast<int64_t>(chunk) * (few_chunk / 16) + i * few_threads + threadIdx.x;
      raw[i] = place < written ? reinterpret_cast<const uint4*>(origins)[place] : uint4{};
    }
  };
  __syncwarp();  // origins are those of other lanes
  const int chunks = (longest + Of::chunk - 1) / Of::chunk;
  if (chunks > 0) load_chunk(chunks - 1);
#pragma unroll 1
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < words_a_lane; ++i) words[i * few_threads + threadIdx.x] = raw[i];
    __syncwarp();
    if (chunk > 0) load_chunk(chunk - 1);
    const int begin = chunk * Of::chunk, last = min(longest - begin, Of::chunk) - 1;
#pragma unroll 1
    for (int first = last / Of::lanes * Of::lanes; first >= 0; first -= Of::lanes) {
      const uint8_t* row = bytes + first * Of::row;
      const int left = length - begin - first;
      int kept = -1;
#pragma unroll
      for (int i = Of::lanes - 1; i >= 0; --i) {
        kept = i == lane && i < left ? at : kept;
        const int origin = row[i * Of::row + at];
        at = i < left ? origin : at;
      }
      const int step = begin + first + lane;
      if (there && step < a.steps) path[step] = kept;
    }
  }
  const int rest = (longest + Of::lanes - 1) / Of::lanes * Of::lanes;
  for (int step = rest + lane; there && step < a.steps; step += Of::lanes) path[step] = -1;
}

template <class T, int States, int Parts>
void run_few(const Context& context, Decode& a) {
  using Of = Few<States, Parts>;
  const int64_t blocks = (a.batch + Of::sequences - 1) / Of::sequences;
  a.rows = Of::rows(a.steps);
  const Buffer origins = context.empty({blocks, a.rows, Of::row}, DType::u8);
  a.origins = origins.as<void>();
  launch<few_kernel<T, States, Parts>>(context, dim3(static_cast<unsigned>(blocks)), dim3(few_threads), a);
}

// ---- 17 to 32 states ---------------------------------------------------------------------------------------------

// A warp does nothing but the steps; two follow it a chunk behind, find the origins, and join them to maps: which state at a
// piece's begin each state at its end came from. Back, one thread goes from piece to piece, then each piece has a thread.
struct Chain {
  static constexpr int states = 32, threads = 3 * 32;       // a leader and two followers
  static constexpr int chunk = 32, pieces = 2, piece = 16;  // steps; a follower has a piece of each chunk
  static constexpr int ring = 4 * chunk;                    // steps: the leader writes one chunk while another is read
  static constexpr int ahead = 8;                           // steps that emissions are read before their own
  static constexpr int maps = 4096 / states;                // that one thread walks over at a time
  static constexpr int64_t all_pieces(int64_t steps) { return (steps + chunk - 2) / chunk * pieces; }
};

template <class T>
__global__ void __launch_bounds__(Chain::threads) chain_kernel(Decode a) {
  using Of = Chain;
  constexpr int States = Of::states;
  __shared__ __align__(16) float scores[Of::ring][States];
  __shared__ float bests[Of::ring][States];
  __shared__ __align__(16) uint8_t maps[Of::maps][States];
  __shared__ int at_the_end;
  const int64_t sequence = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = a.length_of(sequence);
  const int chunks = (max(length, 1) - 1 + Of::chunk - 1) / Of::chunk;
  const T* emissions = static_cast<const T*>(a.emissions) + sequence * a.batch_stride;
  uint8_t* origins = static_cast<uint8_t*>(a.origins) + sequence * a.rows * States;  // [T, States], then maps
  uint8_t* joined = origins + static_cast<int64_t>(a.steps) * States;
  const auto move_of = [&](int from, int to) {
    const bool open = from < a.states && to < a.states && abs(from - to) <= a.band;
    const int64_t place = sequence * a.sequence_stride + from * a.from_stride + to * a.to_stride;
    return open ? value_at(a.moves, a.moves_dtype, place) : lowest;
  };
  if (warp == 0) {
    const bool real = lane < a.states && length > 0;
    scores[0][lane] = real ? add(to_float(emissions[lane * a.state_stride]), a.first(sequence, lane)) : lowest;
  }
  __syncthreads();

  if (warp == 0) {
    float move[States];
#pragma unroll
    for (int i = 0; i < States; ++i) move[i] = move_of(i, lane);
    const T* emission = emissions + min(lane, a.states - 1) * a.state_stride;
    const auto emission_at = [&](int step) { return emission[min(step, length - 1) * a.step_stride]; };
    T held[Of::ahead];
    if (length > 1) {
#pragma unroll
      for (int i = 0; i < Of::ahead; ++i) held[i] = emission_at(1 + i);
    }
    int first = 1;
#pragma unroll 1
    for (; first < length; first += Of::ahead) {
      T next[Of::ahead];
#pragma unroll
      for (int i = 0; i < Of::ahead; ++i) next[i] = emission_at(first + Of::ahead + i);
      // Places in the ring: only the last of a round may be at its begin again.
      const int begin = (first - 1) % Of::ring, over = (begin + Of::ahead) % Of::ring;
#pragma unroll
      for (int i = 0; i < Of::ahead; ++i) {
        const float4* before = reinterpret_cast<const float4*>(scores[begin + i]);
        float best = lowest;
#pragma unroll
        for (int c = 0; c < States; c += 4) {
          const float4 from = before[c / 4];
          const float low = fmaxf(add(from.x, move[c]), add(from.y, move[c + 1]));
          const float four = fmaxf(low, fmaxf(add(from.z, move[c + 2]), add(from.w, move[c + 3])));
          best = c == 0 ? four : fmaxf(best, four);
        }
        best = fmaxf(best, lowest);
        const int to = i + 1 < Of::ahead ? begin + i + 1 : over;
        const float after = add(best, to_float(held[i]));
        bests[to][lane] = best;
        if (first + i < length) scores[to][lane] = after;
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < Of::ahead; ++i) held[i] = next[i];
      if (over % Of::chunk == 0) __syncthreads();  // a chunk is there
    }
    if ((first - 1) % Of::chunk != 0) __syncthreads();
    __syncthreads();  // the followers have the last one
  } else {
    const int mine = warp - 1;  // of the pieces of a chunk
    float move[States];
#pragma unroll
    for (int i = 0; i < States; ++i) move[i] = move_of(i, lane);
    __syncthreads();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int begin = chunk * Of::chunk + mine * Of::piece;
      int map = lane;
#pragma unroll 2
      for (int i = 0; i < Of::piece; ++i) {
        const int step = begin + 1 + i;
        const float4* before = reinterpret_cast<const float4*>(scores[(step - 1) % Of::ring]);
        const float best = bests[step % Of::ring][lane];
        int origin = 0;
#pragma unroll
        for (int c = States - 4; c >= 0; c -= 4) {  // the lowest of equal ones is the last to be seen
          const float4 from = before[c / 4];
          origin = add(from.w, move[c + 3]) == best ? c + 3 : origin;
          origin = add(from.z, move[c + 2]) == best ? c + 2 : origin;
          origin = add(from.y, move[c + 1]) == best ? c + 1 : origin;
          origin = add(from.x, move[c]) == best ? c : origin;
        }
        origin = best > lowest ? origin : 0;
        if (step < length) {
          origins[static_cast<int64_t>(step) * States + lane] = static_cast<uint8_t>(origin);
        } else {
          origin = lane;
        }
        map = __shfl_sync(whole_warp, map, origin);
      }
      joined[(static_cast<int64_t>(chunk) * Of::pieces + mine) * States + lane] = static_cast<uint8_t>(map);
      __syncthreads();
    }
  }

  if (warp == 0) {
    float best = lowest;
    if (lane < a.states) {
      best = fmaxf(add(scores[max(length - 1, 0) % Of::ring][lane], a.last(sequence, lane)), lowest);
    }
    int at = lane;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float value = __shfl_xor_sync(whole_warp, best, step);
      const int place = __shfl_xor_sync(whole_warp, at, step);
      if (value > best || (value == best && place < at)) best = value, at = place;
    }
    if (lane == 0) {
      at_the_end = at;
      if (a.scores) a.scores[sequence] = length > 0 ? best : 0.0f;
    }
  }
  __syncthreads();

  // From piece to piece: where each ends is the path there.
  int64_t* path = a.paths + sequence * a.steps;
  const int pieces = chunks * Of::pieces, last = length - 1;
  int at = at_the_end;
#pragma unroll 1
  for (int end = pieces; end > 0; end -= Of::maps) {
    const int begin = max(end - Of::maps, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < (end - begin) * (States / 16); i += Of::threads) {
      reinterpret_cast<uint4*>(maps)[i] = reinterpret_cast<const uint4*>(joined)[begin * (States / 16) + i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 4
      for (int piece = end - 1; piece >= begin; --piece) {
        const int first = piece * Of::piece;
        if (first < last) path[min(first + Of::piece, last)] = at;
        at = maps[piece - begin][at];
      }
    }
  }
  if (threadIdx.x == 0 && length > 0) path[0] = at;
  __syncthreads();
  for (int piece = threadIdx.x; piece < pieces; piece += Of::threads) {
    const int first = piece * Of::piece;
    int step = min(first + Of::piece, last);
    if (first >= last) continue;
    int state = static_cast<int>(path[step]);
#pragma unroll 1
    for (; step > first + 1; --step) {
      state = origins[static_cast<int64_t>(step) * States + state];
      path[step - 1] = state;
    }
  }
  for (int64_t step = length + static_cast<int64_t>(threadIdx.x); step < a.steps; step += Of::threads) path[step] = -1;
}

template <class T>
void run_chain(const Context& context, Decode& a) {
  a.rows = a.steps + Chain::all_pieces(std::max(a.steps, 1));
  const Buffer origins = context.empty({a.batch, a.rows, Chain::states}, DType::u8);
  a.origins = origins.as<void>();
  launch<chain_kernel<T>>(context, dim3(static_cast<unsigned>(a.batch)), dim3(Chain::threads), a);
}

// ---- more states, and matrices that change from step to step ------------------------------------------------------

// How the states of a block's sequence lie over its threads, and what its shared memory holds.
struct Layout {
  int width;         // threads of a part: the states, in whole warps, 1,024 at most
  int parts;         // of the states that a state may come from
  int slice;         // states of a part
  int origin_rows;   // steps that are walked back over at a time
  bool staged;       // transitions stand in shared memory
  int shared_bytes;  // scores twice, what the parts found, then transitions or, later, origins
};

constexpr int pairs_of(int parts, int width) { return parts > 1 ? parts * width : 0; }

inline Layout layout_of(int states, bool stationary, int shared_bytes) {
  Layout layout{};
  layout.width = std::min(whole_warps(states), many_threads);
  layout.parts = many_threads / layout.width;
  layout.slice = (states + layout.parts - 1) / layout.parts;
  const int kept = 2 * states * 4 + pairs_of(layout.parts, layout.width) * 8;
  layout.staged = stationary && kept + int64_t{4} * states * states <= shared_bytes;
  const int area = std::max(layout.staged ? 4 * states * states : 0, many_chunk);
  layout.origin_rows = area / (2 * states);
  layout.shared_bytes = kept + area;
  return layout;
}

template <class W, bool staged>
__global__ void __launch_bounds__(many_threads) many_kernel(Decode a, Layout layout) {
  extern __shared__ float shared[];
  __shared__ int at_the_end;
  const int pairs = layout.parts > 1 ? layout.parts * layout.width : 0;
  float* scores = shared;                                 // [2, S]
  float* found = scores + 2 * a.states;                   // [parts, width]
  int* found_at = reinterpret_cast<int*>(found + pairs);  // [parts, width]
  float* area = reinterpret_cast<float*>(found_at + pairs);
  const int64_t sequence = blockIdx.x;
  const int length = a.length_of(sequence);
  const int part = threadIdx.x / layout.width, lane = threadIdx.x % layout.width;
  const auto emission_at = [&](int step, int state) {
    return value_at(a.emissions, a.dtype, sequence * a.batch_stride + step * a.step_stride + state * a.state_stride);
  };

  if constexpr (staged) {
    const int64_t origin = sequence * a.sequence_stride;
    for (int i = threadIdx.x; i < a.states * a.states; i += many_threads) {
      area[i] = value_at(a.moves, a.moves_dtype, origin + i / a.states * a.from_stride + i % a.states * a.to_stride);
    }
  }
  if (length > 0) {
    for (int state = threadIdx.x; state < a.states; state += many_threads) {
      scores[state] = add(emission_at(0, state), a.first(sequence, state));
    }
  }
  __syncthreads();

  auto* origins = static_cast<uint16_t*>(a.origins) + sequence * a.rows * a.states;
#pragma unroll 1
  for (int step = 1; step < length; ++step) {
    const float* before = scores + (step - 1) % 2 * a.states;
    float* after = scores + step % 2 * a.states;
    const W* moves = static_cast<const W*>(a.moves) + sequence * a.sequence_stride + step * a.matrix_stride;
    float best = lowest;
    int at = 0;
    const auto search = [&](int state) {
      best = lowest, at = 0;
      const int begin = max(part * layout.slice, state - a.band);
      const int end = min(min((part + 1) * layout.slice, a.states), state + a.band + 1);
#pragma unroll 8
      for (int from = begin; from < end; ++from) {
        float move;
        if constexpr (staged) {
          move = area[from * a.states + state];
        } else {
          move = to_float(moves[from * a.from_stride + state * a.to_stride]);
        }
        const float candidate = add(before[from], move);
        if (candidate > best) best = candidate, at = from;
      }
    };
    const auto settle = [&](int state, float emission) {
      after[state] = add(best, emission);
      origins[static_cast<int64_t>(step - 1) * a.states + state] = static_cast<uint16_t>(at);
    };
    if (layout.parts > 1) {  // then a thread of a part has one state at most
      const bool mine = part < layout.parts && lane < a.states;
      const float emission = mine && part == 0 ? emission_at(step, lane) : 0.0f;
      if (mine) {
        search(lane);
        found[threadIdx.x] = best, found_at[threadIdx.x] = at;
      }
      __syncthreads();
      if (mine && part == 0) {
        for (int i = 1; i < layout.parts; ++i) {
          const int place = i * layout.width + lane;
          if (found[place] > best) best = found[place], at = found_at[place];
        }
        settle(lane, emission);
      }
    } else {
      for (int state = threadIdx.x; state < a.states; state += many_threads) {
        const float emission = emission_at(step, state);
        search(state);
        settle(state, emission);
      }
    }
    __syncthreads();
  }

  if (threadIdx.x < 32) {
    float best = lowest;
    int at = threadIdx.x;
    for (int state = threadIdx.x; state < a.states && length > 0; state += 32) {
      const float score = add(scores[(length - 1) % 2 * a.states + state], a.last(sequence, state));
      if (score > best) best = score, at = state;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float value = __shfl_xor_sync(whole_warp, best, step);
      const int place = __shfl_xor_sync(whole_warp, at, step);
      if (value > best || (value == best && place < at)) best = value, at = place;
    }
    if (threadIdx.x == 0) {
      at_the_end = at;
      if (a.scores) a.scores[sequence] = length > 0 ? best : 0.0f;
    }
  }

  // Back: the block brings rows of origins, one thread walks over them.
  auto* rows = reinterpret_cast<uint16_t*>(area);  // [origin_rows, S]
  int64_t* path = a.paths + sequence * a.steps;
  __syncthreads();
  int at = at_the_end;
#pragma unroll 1
  for (int end = length - 1; end > 0; end -= layout.origin_rows) {
    const int begin = max(end - layout.origin_rows, 0);  // rows begin to end - 1, of the steps behind them
    const int count = (end - begin) * a.states;
    const uint16_t* source = origins + static_cast<int64_t>(begin) * a.states;
    for (int i = threadIdx.x; i < count; i += many_threads) rows[i] = source[i];
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 4
      for (int row = end - 1; row >= begin; --row) {
        path[row + 1] = at;
        at = rows[(row - begin) * a.states + at];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && length > 0) path[0] = at;
  for (int64_t step = length + static_cast<int64_t>(threadIdx.x); step < a.steps; step += many_threads) path[step] = -1;
}

template <class W, bool staged>
void run_many(const Context& context, Decode& a, const Layout& layout) {
  a.rows = std::max(a.steps - 1, 1);
  const Buffer origins = context.empty({a.batch, a.rows, a.states}, DType::i16);
  a.origins = origins.as<void>();
  const dim3 grid(static_cast<unsigned>(a.batch));
  launch_with_shared<many_kernel<W, staged>>(context, grid, dim3(many_threads), layout.shared_bytes, a, layout);
}

// ---- what a right call is ----------------------------------------------------------------------------------------

void is_floating(const char* argument, const Tensor& x) {
  const bool floating = x.dtype <= DType::f64 || is_fp8(x.dtype);  // the reference takes FP8
  if (!floating && x.dtype != DType::other) wrong_type(argument, "a floating dtype", name_of(x.dtype));
}

bool serves(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

// [S] or [B, S].
Ends ends_of(const char* argument, const std::optional<Tensor>& x, int64_t batch, int64_t states) {
  if (!x) return {};
  const bool one = x->rank == 1 && x->shape[0] == states;
  if (!one && !(x->rank == 2 && x->shape[0] == batch && x->shape[1] == states)) {
    const std::string of = std::to_string(states);
    wrong_value(argument, "shape [" + of + "] or [" + std::to_string(batch) + ", " + of + "]", shape_of(*x));
  }
  return {x->data, x->dtype, one ? 0 : x->stride[0], x->stride[x->rank - 1]};
}

enum class Per { all, sequence, step };

Per whose(const Tensor& moves, int64_t batch, int64_t steps, int64_t states, const std::string& per) {
  const auto text = [](int64_t size) { return std::to_string(size); };
  const std::string matrix = text(states) + ", " + text(states) + "]";
  const bool square = moves.rank >= 2 && moves.shape[moves.rank - 2] == states && moves.shape[moves.rank - 1] == states;
  if (moves.rank == 2) {
    if (!square) wrong_value("log_transitions", "shape [" + matrix, shape_of(moves));
    return Per::all;
  }
  const bool sequences = per != "step", each_step = per != "sequence";
  const bool fits =
      moves.rank == 3 && ((sequences && moves.shape[0] == batch) || (each_step && moves.shape[0] == steps));
  if (!square || !fits) {
    const std::string first = per == "sequence" ? "shape [" + text(batch)
                              : per == "step"   ? "shape [" + text(steps)
                                                : "shape [" + matrix + ", [" + text(batch) + " or " + text(steps);
    wrong_value("log_transitions", first + ", " + matrix, shape_of(moves));
  }
  if (per == "auto" && batch == steps) {
    wrong_value("transitions_per", "'sequence' or 'step' where B and T are both " + text(batch), "'" + per + "'");
  }
  return sequences && moves.shape[0] == batch ? Per::sequence : Per::step;
}

}  // namespace

std::tuple<Buffer, Buffer> viterbi_decode(const Context& context, const Tensor& log_emissions /*[B, T, S]*/,
                                          const Tensor& log_transitions /*[S, S], [B, S, S] or [T, S, S]*/,
                                          const std::optional<Tensor>& log_initial /*[S] or [B, S]*/,
                                          const std::optional<Tensor>& lengths /*[B]*/,
                                          const std::optional<Tensor>& end_scores /*[S] or [B, S]*/,
                                          const std::string& transitions_per, const std::optional<int64_t>& band,
                                          bool return_score) {
  const Tensor& x = log_emissions;
  if (band && (*band < 0 || *band > INT32_MAX)) wrong_value("band", "0 to 2147483647", std::to_string(*band));
  is_floating("log_emissions", x);
  is_floating("log_transitions", log_transitions);
  if (log_initial) is_floating("log_initial", *log_initial);
  if (end_scores) is_floating("end_scores", *end_scores);
  if (transitions_per != "auto" && transitions_per != "sequence" && transitions_per != "step") {
    wrong_value("transitions_per", "'auto', 'sequence' or 'step'", "'" + transitions_per + "'");
  }
  if (x.rank != 3 || x.shape[2] == 0) wrong_value("log_emissions", "shape [B, T, S], S from 1", shape_of(x));
  const int64_t batch = x.shape[0], steps = x.shape[1], states = x.shape[2];
  const Per per = whose(log_transitions, batch, steps, states, transitions_per);

  Decode a{};
  a.first = ends_of("log_initial", log_initial, batch, states);
  a.last = ends_of("end_scores", end_scores, batch, states);
  if (lengths) {
    if (lengths->dtype != DType::i32 && lengths->dtype != DType::i64) {
      wrong_type("lengths", "int32 or int64", name_of(lengths->dtype));
    }
    if (lengths->rank != 1 || lengths->shape[0] != batch) {
      wrong_value("lengths", "shape [" + std::to_string(batch) + "]", shape_of(*lengths));
    }
    a.lengths = lengths->data, a.wide = lengths->dtype == DType::i64, a.length_stride = lengths->stride[0];
  }
  if (states > most_states || steps > most_steps || batch > INT32_MAX) throw Refused{"size"};
  const bool served = serves(log_transitions.dtype) && (!log_initial || serves(log_initial->dtype)) &&
                      (!end_scores || serves(end_scores->dtype));
  if (!served) throw Refused{"dtype"};
  dispatch(x.dtype, Floats{}, [&]<class T>() {});

  Buffer paths = context.empty({batch, steps}, DType::i64),
         scores = context.empty({return_score ? batch : 0}, DType::f32);
  if (batch > 0) {
    a.emissions = x.data, a.dtype = x.dtype;
    a.batch_stride = x.stride[0], a.step_stride = x.stride[1], a.state_stride = x.stride[2];
    const Tensor& moves = log_transitions;
    a.moves = moves.data, a.moves_dtype = moves.dtype;
    a.sequence_stride = per == Per::sequence ? moves.stride[0] : 0;
    a.matrix_stride = per == Per::step ? moves.stride[0] : 0;
    a.from_stride = moves.stride[moves.rank - 2], a.to_stride = moves.stride[moves.rank - 1];
    a.batch = batch, a.steps = static_cast<int>(steps), a.states = static_cast<int>(states);
    a.band = static_cast<int>(std::min(band.value_or(states), states));
    a.paths = paths.as<int64_t>(), a.scores = return_score ? scores.as<float>() : nullptr;
    const bool few = states <= few_states && per != Per::step && a.step_stride * item_size(x.dtype) <= INT32_MAX;
    if (few) {
      dispatch(x.dtype, Floats{}, [&]<class T>() {
        const bool chain = batch <= int64_t{chain_a_multiprocessor} * multiprocessors(context);
        if (states <= 8) return run_few<T, 8, 1>(context, a);
        if (states <= 16) return run_few<T, 16, 2>(context, a);
        chain ? run_chain<T>(context, a) : run_few<T, 32, 1>(context, a);
      });
    } else if (per == Per::step || !decode_kept(context, a)) {
      const Layout layout = layout_of(a.states, per != Per::step, shared_memory(context).block - fixed_shared);
      if (layout.staged) {
        run_many<float, true>(context, a, layout);
      } else {
        dispatch(moves.dtype, Floats{}, [&]<class W>() { run_many<W, false>(context, a, layout); });
      }
    }
  }
  return {std::move(paths), std::move(scores)};
}

}  // namespace prequal::ops
