// How a row operation is spread over threads: a pure function of the row, so the CPU tests cover every width.
#pragma once

#include <cstdint>

#include "prequal/occupancy.h"

namespace prequal {

enum class RowKind {
  warp,     // a row a warp, several rows a block, the row in registers
  block,    // a row a block, the row in registers
  cluster,  // a row a cluster of blocks, the row in the registers of all of them
  loop      // a row a block, read twice
};

struct RowPlan {
  RowKind kind;
  int items;    // accesses a thread holds in registers (1, 2, 4); 1 for loop
  int threads;  // a block
  int rows;     // a block; 1 for a cluster
  int blocks;   // a row: the cluster's size, else 1
};

inline constexpr int largest_cluster = 8;  // what every GPU with clusters can hold

// width: elements a row; vec: elements an access. A leftover of idle threads costs a whole block's slot, so threads
// follow the row. 128 to 512 threads with 2 to 4 accesses each keeps enough loads in flight for the copy rate.
// most: threads of a block with 4 accesses each; what a kernel's registers allow.
constexpr RowPlan row_plan(int64_t width, int vec, bool clusters, int most) {
  const int64_t accesses = (width + vec - 1) / vec;
  const auto split = [&](int64_t by) { return (accesses + by - 1) / by; };
  if (accesses <= 32 * 4) return {RowKind::warp, accesses <= 32 ? 1 : accesses <= 2 * 32 ? 2 : 4, 128, 4, 1};
  // 2 accesses a thread until the block would pass 512 threads
  if (accesses <= 512 * 2) return {RowKind::block, 2, whole_warps(split(2)), 1, 1};
  if (accesses <= (clusters && most > 512 ? 512 : most) * 4) {
    return {RowKind::block, 4, whole_warps(split(4)), 1, 1};
  }
  if (clusters && accesses <= largest_cluster * 1024 * 4) {
    // blocks like those of shorter rows, several on an SM: one waits for the sum while another loads
    int blocks = 4;
    while (blocks < largest_cluster && accesses > blocks * 512 * 2) blocks *= 2;
    const int items = accesses <= blocks * 512 * 2 ? 2 : 4;
    return {RowKind::cluster, items, whole_warps(split(blocks * items)), 1, blocks};
  }
  return {RowKind::loop, 1, 1024, 1, 1};
}

// For gradients, where a thread also keeps fp32 sums of its columns over all rows of its block: 2 accesses a thread,
// and small blocks, since registers are what limits how many are resident.
constexpr RowPlan gradient_plan(int64_t width, int vec, bool clusters) {
  const int64_t accesses = (width + vec - 1) / vec;
  const auto split = [&](int64_t by) { return (accesses + by - 1) / by; };
  if (accesses <= 32) return {RowKind::warp, 1, 128, 4, 1};
  if (accesses <= 256 * 2) return {RowKind::block, 2, whole_warps(split(2)), 1, 1};
  if (clusters && accesses <= largest_cluster * 512 * 2) {
    int blocks = 2;
    while (blocks < largest_cluster && accesses > blocks * 256 * 2) blocks *= 2;
    return {RowKind::cluster, 2, whole_warps(split(2 * blocks)), 1, blocks};
  }
  if (accesses <= 512 * 2) return {RowKind::block, 2, whole_warps(split(2)), 1, 1};
  return {RowKind::loop, 1, 512, 1, 1};
}

// How many teams (warps, blocks, clusters) share the rows of a gradient. Each leaves a row of partial sums of the
// parameters, written and read once more: at 16 rows a team that is 8 bytes on 96 or more.
constexpr int64_t gradient_teams(int64_t rows, int64_t resident) {
  const int64_t fewest = (rows + 15) / 16;
  const int64_t teams = fewest < resident ? fewest : resident;
  return teams > 0 ? teams : 1;
}

}  // namespace prequal
