// paths [B, T] and scores [B] as viterbi_decode.cu has them, of more than 32 states and a matrix that does not change.
// A block, or a cluster of blocks, owns a sequence; a thread holds its share of some columns of the matrix in registers.
// There, only what is best is found, and kept (4 B T S bytes). Back, the one origin of each step is looked for: the lowest
// state whose candidate is equal to what was best, so the path is the one that origins would have made.
// Bytes: B T S sizeof(T) read twice, and the transitions; B T S 4 written and read; B T 8 and B 4 written.
// Numerics: as viterbi_decode.cu.
#include <algorithm>
#include <stdexcept>

#include "prequal/launch.h"
#include "prequal/state_shares.h"
#include "prequal/team.cuh"
#include "viterbi_decode_kept.h"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"viterbi_decode"> {};

}  // namespace
}  // namespace prequal::ops

namespace prequal::ops::viterbi {
namespace {

constexpr int64_t most_kept = int64_t{1} << 30;  // bytes of the workspace
constexpr int fixed_shared = 1024;               // what a block has besides
constexpr int streamed_threads = 1024;
constexpr int streamed_ahead = 8;  // values of the matrix in flight a thread
constexpr unsigned nobody = 0x7fffffffu;

// How a sequence lies over threads and blocks, and its shared memory, in floats.
struct Plan {
  int width;         // columns of a block, at most
  int margin;        // in front of the scores, where a band begins before the first state
  int stride;        // of the scores of a step
  int pitch;         // of a block's columns in whole warps, where they are streamed
  int blocks;        // of a cluster
  int threads;       // of a block that take steps; more may walk back
  int walkers;       // warps
  int shared_bytes;  // two rows of scores, then what the kernels say
};

// ---- back --------------------------------------------------------------------------------------------------------

// Every warp walks its share of the steps. It does not know yet where the path enters them, so it begins `overlap` steps
// behind, at the best state there: paths that end in different states mostly are one after few steps. Then the shares are
// joined from the last to the first, and where the path enters a share elsewhere, it is walked again until both walks meet.
constexpr int overlap = 32;

// Of the walkers of a sequence.
struct Shares {
  int* entered;  // the state at the last step of a share
  int* left;     // and at the step before its first
};

// Value `which`, by selections that depend on each other no more than they must; an index would take it through memory.
template <int N>
__device__ __forceinline__ float chosen(const float (&value)[N], int which) {
  if constexpr (N == 1) {
    return value[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half[i] = which & 1 ? value[2 * i + 1] : value[2 * i];
    return chosen(half, which / 2);
  }
}

// Of up to 32 `Candidates` states, whose matrix stands in shared memory and is filled up with lowest. Scores are read `ahead`
// steps before their turn, so that a step waits for shared memory, an addition and a vote only.
template <class T, int Candidates>
struct Near {
  static constexpr int pitch = 32 * Candidates + 1, ahead = 12 / Candidates;
  const float* kept;  // [T, S], of the sequence
  const T* emissions;
  int64_t step_stride, state_stride;
  const float* moves_to;  // [S, pitch]
  int64_t* path;          // [T]
  int states;

  // From step `from`, where the path is at state `at`, to step `to`; what is behind `written` is not written down. Again:
  // until the path that was written before is met, then `nobody`.
  template <bool Again>
  __device__ int walk(int from, int to, int at, int written) const {
    const int lane = threadIdx.x % 32;
    const auto read = [&](int step, float(&rows)[Candidates], T(&added)[Candidates]) {
      step = max(step, 0);
#pragma unroll
      for (int c = 0; c < Candidates; ++c) {
        const int state = min(32 * c + lane, states - 1);
        rows[c] = kept[static_cast<int64_t>(step) * states + state];
        added[c] = emissions[step * step_stride + state * state_stride];
      }
    };
    float here[Candidates], rows[ahead][Candidates];
    T added[ahead][Candidates];
    int before[ahead];
    read(from, here, added[0]);
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      read(from - 1 - i, rows[i], added[i]);
      if constexpr (Again) before[i] = static_cast<int>(path[max(from - i, 0)]);
    }
#pragma unroll 1
    for (int first = from; first > to; first -= ahead) {
      float next_rows[ahead][Candidates];
      T next_added[ahead][Candidates];
      int next_before[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        read(first - ahead - 1 - i, next_rows[i], next_added[i]);
        if constexpr (Again) next_before[i] = static_cast<int>(path[max(first - ahead - i, 0)]);
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int step = first - i;
        if (step <= to) break;
        if constexpr (Again) {
          if (before[i] == at) return static_cast<int>(nobody);
        }
        if (lane == 0 && step <= written) path[step] = at;
        const float best = __shfl_sync(whole_warp, chosen(here, at / 32), at % 32);
        const float* move = moves_to + at * pitch + lane;
        unsigned found = nobody;
#pragma unroll
        for (int c = Candidates - 1; c >= 0; --c) {
          const float candidate = add(add(rows[i][c], to_float(added[i][c])), move[32 * c]);
          found = candidate == best ? static_cast<unsigned>(32 * c + lane) : found;
          here[c] = rows[i][c];
        }
        found = __reduce_min_sync(whole_warp, found);
        at = best > lowest ? static_cast<int>(found) : 0;
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if constexpr (Again) before[i] = next_before[i];
#pragma unroll
        for (int c = 0; c < Candidates; ++c) rows[i][c] = next_rows[i][c], added[i][c] = next_added[i][c];
      }
    }
    return at;
  }
};

// Of any number of states, and of a band the states within it only: all is read where it lies, when its turn comes.
template <class T>
struct Far {
  static constexpr int together = 4;  // candidates of a lane whose values are in flight
  const float* kept;                  // [T, S], of the sequence
  const T* emissions;
  int64_t step_stride, state_stride;
  const void* moves;  // [S, S], at `first`
  DType dtype;
  int64_t first, from_stride, to_stride;
  int64_t* path;  // [T]
  int states, band;

  template <bool Again>
  __device__ int walk(int from, int to, int at, int written) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int step = from; step > to; --step) {
      if constexpr (Again) {
        if (path[step] == at) return static_cast<int>(nobody);
        __syncwarp();  // all have read it
      }
      if (lane == 0 && step <= written) path[step] = at;
      const float* row = kept + static_cast<int64_t>(step - 1) * states;
      const T* added = emissions + (step - 1) * step_stride;
      const float best = row[states + at];
      const int begin = max(at - band, 0) + lane, end = min(at + band + 1, states);
      unsigned found = nobody;
      by_dtype(moves, dtype, [&]<class W>(const W* all) {
        const W* column = all + first + at * to_stride;
#pragma unroll 1
        for (int i = begin; i < end; i += 32 * together) {
          float candidate[together];
#pragma unroll
          for (int c = 0; c < together; ++c) {
            const int state = min(i + 32 * c, end - 1);  // the last one again changes nothing
            candidate[c] = add(add(row[state], to_float(added[state * state_stride])),
                               to_float(__ldg(column + state * from_stride)));
          }
#pragma unroll
          for (int c = 0; c < together; ++c) {
            if (candidate[c] == best) found = min(found, static_cast<unsigned>(min(i + 32 * c, end - 1)));
          }
        }
      });
      found = __reduce_min_sync(whole_warp, found);
      at = best > lowest ? static_cast<int>(found) : 0;
    }
    return at;
  }
};

// Of a warp: the lowest of the lanes' best states.
__device__ __forceinline__ void best_of_lanes(float& best, int& at) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float value = __shfl_xor_sync(whole_warp, best, step);
    const int place = __shfl_xor_sync(whole_warp, at, step);
    if (value > best || (value == best && place < at)) best = value, at = place;
  }
}

// The share of the warp that is number `mine` of `walkers`, from state `at_the_end` of the last step.
template <class Walker>
__device__ __forceinline__ void walk_share(const Walker& walker, int length, int at_the_end, int mine, int walkers,
                                           Shares shares) {
  const int lane = threadIdx.x % 32, steps = max(length - 1, 0);
  const int share = max((steps + walkers - 1) / walkers, overlap);
  const int begin = mine * share, end = min(begin + share, steps);
  if (mine >= walkers || begin >= steps) return;
  const int from = min(end + overlap, steps);
  int at = at_the_end;
  if (from < steps) {
    float best = lowest;
    at = lane;
    for (int state = lane; state < walker.states; state += 32) {
      const float score = add(walker.kept[static_cast<int64_t>(from) * walker.states + state],
                              to_float(walker.emissions[from * walker.step_stride + state * walker.state_stride]));
      if (score > best) best = score, at = state;
    }
    best_of_lanes(best, at);
  }
  at = walker.template walk<false>(from, end, at, -1);
  const int left = walker.template walk<false>(end, begin, at, end);
  if (lane == 0) shares.entered[mine] = at, shares.left[mine] = left;
}

// By one warp, when all shares are there.
template <class Walker>
__device__ __forceinline__ void join_shares(const Walker& walker, int length, int at_the_end, int walkers,
                                            Shares shares) {
  if (length == 0) return;
  const int steps = length - 1, share = max((steps + walkers - 1) / walkers, overlap);
  const int used = (steps + share - 1) / share;
  int at = used > 0 ? shares.left[used - 1] : at_the_end;
  for (int i = used - 2; i >= 0; --i) {
    const int entered = at;
    at = shares.left[i];
    if (shares.entered[i] == entered) continue;
    const int last = (i + 1) * share;
    const int left = walker.template walk<true>(last, i * share, entered, last);
    if (left != static_cast<int>(nobody)) at = left;
  }
  if (threadIdx.x % 32 == 0) walker.path[0] = at;
}

__device__ __forceinline__ void pad_path(const Decode& a, int64_t sequence, int length) {
  int64_t* path = a.paths + sequence * a.steps;
  for (int64_t step = length + static_cast<int64_t>(threadIdx.x); step < a.steps; step += blockDim.x) path[step] = -1;
}

// By all blocks of a cluster.
template <class T>
__device__ __forceinline__ void walk_back_together(const Decode& a, const Plan& plan, int64_t sequence, int length,
                                                   int at_the_end) {
  const int rank = cluster::rank(), warps = blockDim.x / 32;
  const Far<T> walker{a.kept + sequence * a.steps * a.states,
                      static_cast<const T*>(a.emissions) + sequence * a.batch_stride,
                      a.step_stride,
                      a.state_stride,
                      a.moves,
                      a.moves_dtype,
                      sequence * a.sequence_stride,
                      a.from_stride,
                      a.to_stride,
                      a.paths + sequence * a.steps,
                      a.states,
                      a.band};
  int* of_all = static_cast<int*>(a.origins) + sequence * 2 * plan.walkers;
  const Shares shares{of_all, of_all + plan.walkers};
  walk_share(walker, length, at_the_end, rank * warps + static_cast<int>(threadIdx.x) / 32, plan.walkers, shares);
  cluster::arrive();
  cluster::wait();
  if (rank != 0) return;
  if (threadIdx.x < 32) join_shares(walker, length, at_the_end, plan.walkers, shares);
  pad_path(a, sequence, length);
}

// By the first warp: where the path ends, and its score.
__device__ __forceinline__ int last_state(const Decode& a, int64_t sequence, int length, const float* score /*[S]*/,
                                          bool writes) {
  float best = lowest;
  int at = threadIdx.x;
  for (int state = threadIdx.x; state < a.states && length > 0; state += 32) {
    const float value = add(score[state], a.last(sequence, state));
    if (value > best) best = value, at = state;
  }
  best_of_lanes(best, at);
  if (threadIdx.x == 0 && a.scores && writes) a.scores[sequence] = length > 0 ? best : 0.0f;
  return at;
}

// ---- there -------------------------------------------------------------------------------------------------------

// The scores of a step arrive from all blocks of a cluster: of odd steps they are counted by the second barrier. A block sends
// those of a step only when it has all of the step before, which every block sent after its last look at what they replace.
__device__ __forceinline__ void open_cluster(uint64_t (&arrived)[2], int states) {
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : arrived) {
      cluster::make_barrier(&barrier);
      cluster::expect_bytes(&barrier, 4 * states);
    }
  }
  cluster::arrive();
  cluster::wait();
}

// Of `Columns` columns a thread has the candidates of `Rows` states: `Parts` lanes share a column, four states at a time, so
// that a warp reads neighbouring words. Of a band these states begin where that of the thread's first column does.
template <class T, int Columns, int Parts, int Rows, int Blocks, int Threads>
__global__ void __launch_bounds__(Threads) kept_kernel(Decode a, Plan plan) {
  if constexpr (Blocks > 1 && !cluster::exist) __trap();
  constexpr int ahead = Columns * Rows <= 32 ? 8 : 4;  // steps that emissions are read before their own
  static_assert(Parts <= 32 && Parts % Columns == 0 && Rows % 4 == 0 && ahead % 2 == 0);
  extern __shared__ __align__(16) float scores[];
  __shared__ int at_the_end;
  __shared__ uint64_t arrived[2];
  const int rank = Blocks > 1 ? cluster::rank() : 0;
  const int64_t sequence = blockIdx.x / Blocks;
  const int length = a.length_of(sequence);
  const int part = threadIdx.x % Parts, group = threadIdx.x / Parts;
  const int first_column = first_state(a.states, Columns, Blocks, rank);
  const int past = min(first_state(a.states, Columns, Blocks, rank + 1), a.states);  // the block's own end there
  const int column = first_column + group * Columns;
  const int base = plan.margin > 0 ? (column - a.band) & ~3 : 0;  // the first state it reads

  float move[Columns][Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const int from = base + (r / 4 * Parts + part) * 4 + r % 4;
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int to = column + c;
      move[c][r] = lowest;
      if (from >= 0 && from < a.states && to < a.states && abs(from - to) <= a.band) {
        move[c][r] =
            value_at(a.moves, a.moves_dtype, sequence * a.sequence_stride + from * a.from_stride + to * a.to_stride);
      }
    }
  }
  float* moves_to = scores + 2 * plan.stride;  // [S, pitch], for the walk back
  if constexpr (Blocks == 1) {
    constexpr int places = Parts * Rows, pitch = places + 1;
    for (int i = threadIdx.x; i < places * a.states; i += blockDim.x) {
      const int from = i / a.states, to = i % a.states;
      const int64_t place = sequence * a.sequence_stride + from * a.from_stride + to * a.to_stride;
      const bool open = from < a.states && abs(from - to) <= a.band;
      moves_to[to * pitch + from] = open ? value_at(a.moves, a.moves_dtype, place) : lowest;
    }
  }

  // Which of its columns a lane has after the exchange below, and which of the lanes that then have the same it is.
  int own = 0;
#pragma unroll
  for (int half = Columns / 2, bit = 1; half > 0; half /= 2, bit *= 2) own += part & bit ? half : 0;
  const int state = column + own, twin = part / Columns;
  const bool real = state < past;
  const T* emission =
      static_cast<const T*>(a.emissions) + sequence * a.batch_stride + min(state, a.states - 1) * a.state_stride;
  const int last_step = max(length - 1, 0),
            step_bytes = static_cast<int>(a.step_stride * static_cast<int64_t>(sizeof(T)));
  const auto emission_at = [&](int step) {  // one multiplication; of a 64-bit stride it takes three
    const char* from =
        reinterpret_cast<const char*>(emission) + static_cast<int64_t>(min(step, last_step)) * step_bytes;
    return *reinterpret_cast<const T*>(from);
  };
  float* keep = a.kept + sequence * a.steps * a.states + state;

  // Places without a state are lowest, for good.
  for (int i = threadIdx.x; i < 2 * plan.stride; i += blockDim.x) scores[i] = lowest;
  __syncthreads();
  if (length > 0) {
    const T* first = static_cast<const T*>(a.emissions) + sequence * a.batch_stride;
    for (int j = threadIdx.x; j < a.states; j += blockDim.x) {
      scores[plan.margin + j] = add(a.first(sequence, j), to_float(first[j * a.state_stride]));
    }
    if (real && twin == 0) *keep = a.first(sequence, state);
  }
  if constexpr (Blocks > 1) {
    open_cluster(arrived, a.states);
  } else {
    __syncthreads();
  }

  // Others only walk back. In a cluster those are the warps that have no state: what they saw nobody would wait for, so that
  // two more steps could be there before they look at a barrier, which then says what it said before.
  const bool steps_too = Blocks > 1 ? first_column + static_cast<int>(threadIdx.x / 32 * 32) / Parts * Columns < past
                                    : static_cast<int>(threadIdx.x) < plan.threads;
  T held[ahead];
  if (length > 1 && steps_too) {
#pragma unroll
    for (int i = 0; i < ahead; ++i) held[i] = emission_at(1 + i);
  }
  int phase = 0;
#pragma unroll 1
  for (int first = 1; first < length && steps_too; first += ahead) {
    T next[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) next[i] = emission_at(first + ahead + i);
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      // Of one block, steps behind the end are taken and not written down: with a branch a step of 64 states takes 319
      // cycles instead of 303.
      const bool there = first + i < length;
      if constexpr (Blocks > 1) {
        if (!there) break;
      }
      const float4* before = reinterpret_cast<const float4*>(scores + i % 2 * plan.stride + plan.margin + base) + part;
      float best[Columns];
#pragma unroll
      for (int r = 0; r < Rows; r += 4) {
        const float4 from = before[r / 4 * Parts];
#pragma unroll
        for (int c = 0; c < Columns; ++c) {
          const float(&of)[Rows] = move[c];
          const float low = fmaxf(add(from.x, of[r]), add(from.y, of[r + 1]));
          const float four = fmaxf(low, fmaxf(add(from.z, of[r + 2]), add(from.w, of[r + 3])));
          best[c] = r == 0 ? four : fmaxf(best[c], four);
        }
      }
      // Lanes give each other half of their columns until one is left, then its halves.
      int bit = 1;
#pragma unroll
      for (int half = Columns / 2; half > 0; half /= 2, bit *= 2) {
#pragma unroll
        for (int c = 0; c < half; ++c) {
          const bool upper = (part & bit) != 0;
          const float given = upper ? best[c] : best[c + half], stays = upper ? best[c + half] : best[c];
          best[c] = fmaxf(stays, __shfl_xor_sync(whole_warp, given, bit));
        }
      }
#pragma unroll
      for (; bit < Parts; bit *= 2) best[0] = fmaxf(best[0], __shfl_xor_sync(whole_warp, best[0], bit));

      const float top = fmaxf(best[0], lowest);
      const float after = add(top, to_float(held[i]));
      float* to = scores + (1 - i % 2) * plan.stride + plan.margin + state;
      keep += a.states;
      if constexpr (Blocks > 1) {
        if (real && twin == 0) *keep = top;
        uint64_t& barrier = arrived[1 - i % 2];
        if (real) {
#pragma unroll
          for (int to_rank = twin; to_rank < Blocks; to_rank += Parts / Columns) {
            cluster::send(to_rank, to, after, &barrier);
          }
        }
        cluster::wait_for_bytes(&barrier, phase);
        if (threadIdx.x == 0) cluster::expect_bytes(&barrier, 4 * a.states);
        if (i % 2 == 1) phase ^= 1;
      } else {
        if (real && twin == 0 && there) *to = after, *keep = top;
        asm volatile("bar.sync 1, %0;" ::"r"(plan.threads) : "memory");
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) held[i] = next[i];
  }

  __syncthreads();
  if (threadIdx.x < 32) {
    const float* ends = scores + max(length - 1, 0) % 2 * plan.stride + plan.margin;
    const int at = last_state(a, sequence, length, ends, rank == 0);
    if (threadIdx.x == 0) at_the_end = at;
  }
  if constexpr (Blocks > 1) {  // what was kept is seen by all blocks
    cluster::arrive();
    cluster::wait();
    walk_back_together<T>(a, plan, sequence, length, at_the_end);
  } else {
    __shared__ int entered[Threads / 32], left[Threads / 32];
    __syncthreads();
    const Near<T, Parts * Rows / 32> walker{a.kept + sequence * a.steps * a.states,
                                            static_cast<const T*>(a.emissions) + sequence * a.batch_stride,
                                            a.step_stride,
                                            a.state_stride,
                                            moves_to,
                                            a.paths + sequence * a.steps,
                                            a.states};
    const int walkers = blockDim.x / 32;
    walk_share(walker, length, at_the_end, threadIdx.x / 32, walkers, {entered, left});
    __syncthreads();
    if (threadIdx.x < 32) join_shares(walker, length, at_the_end, walkers, {entered, left});
    pad_path(a, sequence, length);
  }
}

// Of more states than registers hold: a thread has one column and a slice of the states that it may come from. The block's
// columns of the matrix stand in shared memory, or are read from L2 at every step.
template <class T, bool Staged>
__global__ void __launch_bounds__(streamed_threads, 1) streamed_kernel(Decode a, Plan plan) {
  if constexpr (!cluster::exist) __trap();
  extern __shared__ __align__(16) float scores[];
  __shared__ int at_the_end;
  __shared__ uint64_t arrived[2];
  const int rank = cluster::rank();
  const int64_t sequence = blockIdx.x / plan.blocks;
  const int length = a.length_of(sequence);
  const int pitch = plan.pitch, parts = streamed_threads / pitch;  // a row of the block's columns, in whole warps
  const int part = threadIdx.x / pitch, lane = threadIdx.x % pitch;
  const int slice = ((a.states + parts - 1) / parts + 3) / 4 * 4;
  const int state = rank * plan.width + lane;
  const bool real = lane < plan.width && state < a.states && part < parts;
  float* found = scores + 2 * plan.stride;  // [parts, pitch]
  float* moves = found + parts * pitch;     // [S, pitch]
  const T* emissions = static_cast<const T*>(a.emissions) + sequence * a.batch_stride;
  float* kept = a.kept + sequence * a.steps * a.states;
  const int64_t matrix = sequence * a.sequence_stride;

  for (int i = threadIdx.x; i < 2 * plan.stride; i += streamed_threads) scores[i] = lowest;
  if constexpr (Staged) {
    for (int i = threadIdx.x; i < a.states * pitch; i += streamed_threads) {
      const int from = i / pitch, to = rank * plan.width + i % pitch;
      const bool open = i % pitch < plan.width && to < a.states && abs(from - to) <= a.band;
      moves[i] = open ? value_at(a.moves, a.moves_dtype, matrix + from * a.from_stride + to * a.to_stride) : lowest;
    }
  }
  __syncthreads();
  if (length > 0) {
    for (int j = threadIdx.x; j < a.states; j += streamed_threads) {
      scores[j] = add(a.first(sequence, j), to_float(emissions[j * a.state_stride]));
    }
    if (real && part == 0) kept[state] = a.first(sequence, state);
  }
  open_cluster(arrived, a.states);

  // No more than its band reaches, but as far as those of its neighbours, so that a warp mostly stays together.
  const int warp_state = state & ~31;
  const bool banded = a.band < a.states;
  const int begin = max(part * slice, (max(warp_state - a.band, 0)) & ~3);
  const int end = min(min((part + 1) * slice, a.states), banded ? warp_state + 32 + a.band : a.states);
#pragma unroll 1
  for (int step = 1; step < length; ++step) {
    const float* before = scores + (step - 1) % 2 * plan.stride;
    T emission{};
    if (real && part == 0) emission = emissions[step * a.step_stride + state * a.state_stride];
    float best = lowest;
    // `next` gives the moves from one state after the other.
    const auto search = [&](auto&& next) {
      int from = begin;
#pragma unroll 1
      for (; from + streamed_ahead <= end; from += streamed_ahead) {
        float move[streamed_ahead];
#pragma unroll
        for (int i = 0; i < streamed_ahead; ++i) move[i] = next(from + i);
#pragma unroll
        for (int i = 0; i < streamed_ahead; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(before + from + i);
          const float low = fmaxf(add(four.x, move[i]), add(four.y, move[i + 1]));
          best = fmaxf(best, fmaxf(low, fmaxf(add(four.z, move[i + 2]), add(four.w, move[i + 3]))));
        }
      }
#pragma unroll 1
      for (; from < end; ++from) best = fmaxf(best, add(before[from], next(from)));
    };
    if (real) {
      if constexpr (Staged) {
        search([&](int from) { return moves[from * pitch + lane]; });
      } else {
        by_dtype(a.moves, a.moves_dtype, [&]<class W>(const W* all) {
          const W* at = all + matrix + state * a.to_stride + begin * a.from_stride;
          const auto read = [&] {
            const float move = to_float(__ldg(at));
            at += a.from_stride;
            return move;
          };
          if (banded) {
            search([&](int from) {
              const float move = read();
              return abs(from - state) <= a.band ? move : lowest;
            });
          } else {
            search([&](int) { return read(); });
          }
        });
      }
      found[part * pitch + lane] = best;
    }
    __syncthreads();
    if (real && part == 0) {
      for (int i = 1; i < parts; ++i) best = fmaxf(best, found[i * pitch + lane]);
      kept[static_cast<int64_t>(step) * a.states + state] = best;
      const float after = add(best, to_float(emission));
      for (int to_rank = 0; to_rank < plan.blocks; ++to_rank) {
        cluster::send(to_rank, scores + step % 2 * plan.stride + state, after, &arrived[step % 2]);
      }
    }
    cluster::wait_for_bytes(&arrived[step % 2], (step - 1) / 2 % 2);
    if (threadIdx.x == 0) cluster::expect_bytes(&arrived[step % 2], 4 * a.states);
  }

  __syncthreads();
  if (threadIdx.x < 32) {
    const float* ends = scores + max(length - 1, 0) % 2 * plan.stride;
    const int at = last_state(a, sequence, length, ends, rank == 0);
    if (threadIdx.x == 0) at_the_end = at;
  }
  cluster::arrive();  // what was kept is seen by all blocks
  cluster::wait();
  walk_back_together<T>(a, plan, sequence, length, at_the_end);
}

// ---- where which of them answers ------------------------------------------------------------------------------------

// Where the walkers of a cluster meet: no more of them than have a share.
Buffer shares_of(const Context& context, Decode& a, Plan& plan, int warps) {
  plan.walkers = std::clamp((a.steps + overlap - 1) / overlap, 1, warps);
  Buffer shares = context.empty({a.batch, 2, plan.walkers}, DType::i32);
  a.origins = shares.as<void>();
  return shares;
}

// Whether the states that the band of so many neighbouring columns reaches, from a multiple of four on, are no more than that.
constexpr bool fits_band(int64_t band, int columns, int most) { return 2 * band + columns + 3 <= most; }

template <class T, int Columns, int Parts, int Rows, int Blocks, int Threads>
bool run_kept(const Context& context, Decode& a) {
  constexpr auto kernel = kept_kernel<T, Columns, Parts, Rows, Blocks, Threads>;
  constexpr int most_shared = 32 * 1024;
  if constexpr (Blocks > 1) {
    struct Class;
    if (!has_clusters<kernel>(context)) return false;
    if (resident_clusters<kernel, Blocks, Class>(context, Threads, most_shared) == 0) return false;
  }
  Plan plan{};
  if (a.states <= Columns * (Blocks - 1)) throw std::logic_error("viterbi_decode: a block would have no state");
  plan.width = most_states(a.states, Columns, Blocks);
  plan.threads = whole_warps(plan.width / Columns * Parts);
  // A band may begin up to `band` and 3 places before the first state, and end behind those of the last, idle, threads.
  const bool banded = Blocks > 1 && a.band < a.states && fits_band(a.band, Columns, Parts * Rows);
  plan.margin = banded ? (a.band + 7) / 4 * 4 : 0;
  const int reach = plan.margin > 0 ? Blocks * plan.width + 32 * Columns : 0;
  plan.stride = plan.margin + reach + Parts * Rows;
  if (plan.threads > Threads) throw std::logic_error("viterbi_decode: more states than a block has room for");
  plan.shared_bytes = 2 * plan.stride * 4;
  if constexpr (Blocks == 1) plan.shared_bytes += a.states * (Parts * Rows + 1) * 4;
  const dim3 grid(static_cast<unsigned>(a.batch * Blocks));
  if constexpr (Blocks == 1) {
    // Where blocks do not share a multiprocessor, more warps than take steps walk back: 64 x 1,024 x 64 in 172 us, not 195.
    const int spare = static_cast<int>(multiprocessors(context) / a.batch) * Threads;
    const dim3 block(static_cast<unsigned>(std::clamp(spare, plan.threads, Threads)));
    launch_with_shared<kernel>(context, grid, block, plan.shared_bytes, a, plan);
  } else {
    const Buffer shares = shares_of(context, a, plan, Blocks * plan.threads / 32);
    launch_clusters<kernel>(context, Blocks, grid, dim3(static_cast<unsigned>(plan.threads)), plan.shared_bytes, a,
                            plan);
  }
  return true;
}

template <class T, bool Staged, int Blocks>
bool run_streamed(const Context& context, Decode& a) {
  constexpr auto kernel = streamed_kernel<T, Staged>;
  struct Class;
  if (!has_clusters<kernel>(context)) return false;
  const int most_shared = shared_memory(context).block - fixed_shared;
  Plan plan{};
  plan.blocks = Blocks;
  plan.width = most_states(a.states, 1, Blocks);
  plan.pitch = whole_warps(plan.width);
  plan.stride = (a.states + 3) / 4 * 4;
  const int parts = streamed_threads / plan.pitch;
  const int64_t area = parts * plan.pitch + (Staged ? int64_t{a.states} * plan.pitch : 0);
  if ((2 * plan.stride + area) * 4 > most_shared) return false;
  plan.shared_bytes = static_cast<int>(2 * plan.stride + area) * 4;
  if (resident_clusters<kernel, Blocks, Class>(context, streamed_threads, most_shared) == 0) return false;
  const Buffer shares = shares_of(context, a, plan, Blocks * streamed_threads / 32);
  const dim3 grid(static_cast<unsigned>(a.batch * Blocks));
  launch_clusters<kernel>(context, Blocks, grid, dim3(streamed_threads), plan.shared_bytes, a, plan);
  return true;
}

template <class T>
bool run(const Context& context, Decode& a) {
  // By what was measured (docs/viterbi.md): 64 states with 8 states a column 368 cycles a step, with 16 303; 128 states with 2
  // columns a thread 693, with 4 611; bands with 4 or 16 blocks 1,917 and 1,848, with 8 1,595.
  if (a.states <= 64) return run_kept<T, 2, 4, 16, 1, 512>(context, a);
  if (a.states <= 128) return run_kept<T, 4, 8, 16, 1, 512>(context, a);
  if (fits_band(a.band, 4, 128)) return run_kept<T, 4, 8, 16, 8, 512>(context, a);
  if (a.states <= 256) return run_kept<T, 2, 8, 32, 4, 256>(context, a);
  if (a.states <= 512) return run_kept<T, 2, 16, 32, 8, 512>(context, a);
  return run_streamed<T, true, 16>(context, a) || run_streamed<T, true, 8>(context, a) ||
         run_streamed<T, false, 16>(context, a) || run_streamed<T, false, 8>(context, a);
}

}  // namespace

bool decode_kept(const Context& context, Decode& a) {
  const int64_t values = a.batch * a.steps * a.states;
  if (values == 0 || values > most_kept / 4 || a.step_stride * item_size(a.dtype) > INT32_MAX) return false;
  // Before memory is asked for.
  if (a.states > 128 && !has_clusters<streamed_kernel<float, false>>(context)) return false;
  const Buffer kept = context.empty({a.batch, a.steps, a.states}, DType::f32);
  a.kept = kept.as<float>();
  bool done = false;
  dispatch(a.dtype, Floats{}, [&]<class T>() { done = run<T>(context, a); });
  return done;
}

}  // namespace prequal::ops::viterbi
