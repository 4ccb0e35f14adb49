// How a row operation is spread over threads: a pure function of the row, so the CPU tests cover every width.
#pragma once

#include <cstdint>

#include "prequal/occupancy.h"

namespace prequal {

enum class RowKind {
  warp,   // a row a warp or 8 or 16 lanes of one, several rows a block, the row in registers
  block,  // a row a block, the row in registers
  loop    // streamed, or read again: no plan in registers
};

struct RowPlan {
  RowKind kind;
  int items;    // accesses a thread holds in registers (1, 2, 4); 1 for loop
  int threads;  // a block
  int rows;     // a block
};

// A cluster of 8 is what every GPU with clusters can hold; 16 are asked for, and not every GPU has a GPC that wide.
inline constexpr int largest_cluster = 16;

// Rows that no team holds: read again. Rows in registers that are wider than a block may hold are streamed where that has
// room, else these.
inline constexpr RowPlan row_in_loop{RowKind::loop, 1, 1024, 1};

// Rows in registers. width: elements a row; vec: elements an access. A leftover of idle threads costs a whole block's
// slot, so threads follow the row. two, four: accesses of a row up to which a thread of a block has 2, and 4.
constexpr RowPlan row_plan(int64_t width, int vec, int two, int four) {
  const int64_t accesses = (width + vec - 1) / vec;
  const auto split = [&](int64_t by) { return (accesses + by - 1) / by; };
  if (accesses <= 32 * 4) return {RowKind::warp, accesses <= 32 ? 1 : accesses <= 2 * 32 ? 2 : 4, 128, 4};
  if (accesses <= two) return {RowKind::block, 2, whole_warps(split(2)), 1};
  if (accesses <= four) return {RowKind::block, 4, whole_warps(split(4)), 1};
  return row_in_loop;
}

// Rows of up to 16 accesses, by lanes of a warp: a whole warp leaves half its lanes or more idle. bf16 [524288, 64]:
// rms_norm 92.6 us by warps and 34.5 by 8 lanes; [262144, 128] 49.4 and 34.6 by 16.
constexpr int widest_part = 16;
constexpr RowPlan part_plan(int64_t width, int vec) {
  const int lanes = (width + vec - 1) / vec <= 8 ? 8 : 16;
  return {RowKind::warp, 1, 128, 128 / lanes};
}

// Rows that come through shared memory (ring.cuh), some of them asked for ahead.
struct StreamPlan {
  int blocks;   // a row: a cluster's size; 1 without one; 0 where no plan has room
  int threads;  // a block
  int stages;   // rows in the shared memory of a block, the one that is worked on among them
  int shared;   // bytes a block
  int per_sm;   // blocks a multiprocessor by shared memory
};

// What an SM gives to each of `blocks` resident ones: 1 KB of each is the system's, 3 more are for static variables.
constexpr int shared_for(int blocks, int shared_sm, int shared_block) {
  const int each = shared_sm / blocks - 4096;
  return each < shared_block - 3072 ? each : shared_block - 3072;
}

// items: accesses a thread takes of a row. inputs: tensors that are read. most: threads a block may have. largest: the
// widest cluster, 1 for none. shared_*: bytes of a multiprocessor, and what a block may ask for. resident: blocks a
// multiprocessor that registers leave room for, at so many threads. The narrowest cluster that leaves room for two
// blocks that each have two rows on their way besides the one that is written and the one that is summed; else for one on
// its way; else for one block.
template <class Resident>
constexpr StreamPlan stream_plan(int64_t width, int vec, bool ragged, int items, int inputs, int most, int largest,
                                 int shared_sm, int shared_block, Resident&& resident) {
  const int64_t accesses = (width + vec - 1) / vec + (ragged ? 1 : 0);  // one that begins within a word has one more
  struct Want {
    int per_sm, stages;
  };
  for (const Want want : {Want{2, 4}, Want{2, 3}, Want{1, 4}, Want{1, 3}}) {
    for (int blocks = 1; blocks <= largest; blocks *= 2) {
      const int64_t own = (accesses + blocks - 1) / blocks;
      const int64_t threads = whole_warps((own + items - 1) / items);
      if (threads > most) continue;
      const int64_t stage = inputs * (threads * items + 1) * 16;
      if (want.stages * stage > shared_for(want.per_sm, shared_sm, shared_block)) continue;
      const int by_registers = resident(static_cast<int>(threads));
      if (by_registers < want.per_sm) continue;
      int per_sm = want.per_sm, stages = want.stages;
      while (per_sm < by_registers && stages * stage <= shared_for(per_sm + 1, shared_sm, shared_block)) ++per_sm;
      return {blocks, static_cast<int>(threads), stages, static_cast<int>(stages * stage), per_sm};
    }
  }
  return {0, 0, 0, 0, 0};
}

// Teams that share rows which are streamed. Rows `vec` apart begin alike, whatever the stride, so a team that has a second
// row is one of a multiple of `vec`.
constexpr int64_t streamed_teams(int64_t rows, int64_t resident, int vec) {
  return rows <= resident ? rows : resident / vec * vec;
}

// For gradients in registers: rows of a warp. Else the rows are streamed; else row_in_loop.
constexpr bool gradient_in_warp(int64_t width, int vec) { return (width + vec - 1) / vec <= 32; }

// How many teams (warps, blocks, clusters) share the rows of a gradient. Each leaves a row of partial sums of the
// parameters, written and read once more: at 16 rows a team that is 8 bytes on 96 or more.
//
// Few rows get a team each: 64 of 4,096 columns took rms_norm's 16.8 us by 4 teams and 7.5 by 64.
constexpr int64_t gradient_teams(int64_t rows, int64_t resident, int vec) {
  const int64_t fewest = rows < 1024 ? (rows < 64 ? rows : 64) : (rows + 15) / 16;
  const int64_t teams = (fewest + vec - 1) / vec * vec;
  return streamed_teams(rows, teams < resident ? teams : resident, vec);
}

}  // namespace prequal
