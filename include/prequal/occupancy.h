// Threads in warps, and how many blocks are resident: pure functions, so the CPU tests cover them.
#pragma once

#include <cstdint>

namespace prequal {

constexpr int whole_warps(int64_t threads) { return static_cast<int>((threads + 31) / 32 * 32); }

// Blocks that an SM's 65,536 registers and 1,536 threads (sm_86, sm_89; others hold more) have room for; registers are
// handed out in units of 256 a warp.
constexpr int blocks_by_registers(int registers, int threads) {
  const int a_warp = (registers * 32 + 255) / 256 * 256;
  const int by_registers = 65536 / (a_warp * ((threads + 31) / 32));
  const int by_threads = 1536 / threads;
  const int blocks = by_registers < by_threads ? by_registers : by_threads;
  return blocks < 1 ? 1 : blocks > 16 ? 16 : blocks;
}

}  // namespace prequal
