// FP8 of packets: their largest value, and their codes, by the instructions where there are some (fp8.h has the bits).
#pragma once

#include "prequal/fp8.h"
#include "prequal/vec.cuh"

namespace prequal {

// Two codes, the first in the low byte. sm_89 and later have an instruction for it.
template <Fp8 F>
__device__ __forceinline__ uint32_t to_fp8_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  if constexpr (F == Fp8::e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(both) : "f"(first), "f"(second));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(both) : "f"(first), "f"(second));
  }
  return both;
#else
  return to_fp8<F>(first) | to_fp8<F>(second) << 8;
#endif
}

// The codes of a packet: 8 bytes of a half's, 4 of fp32's.
template <class T>
struct Codes {
  static constexpr int words = widest<T> / 4;
  uint32_t at[words];
};

template <Fp8 F, class T>
__device__ __forceinline__ Codes<T> codes_of(const Packet<T>& x, const Divisor& divisor) {
  Codes<T> out;
  const auto fill = [&](auto&& divided) {
#pragma unroll
    for (int i = 0; i < Codes<T>::words; ++i) {
      const uint32_t low = to_fp8_pair<F>(divided(x[4 * i]), divided(x[4 * i + 1]));
      const uint32_t high = to_fp8_pair<F>(divided(x[4 * i + 2]), divided(x[4 * i + 3]));
      out.at[i] = low | high << 16;
    }
  };
  if (divisor.inverse != 0.0f) {
    fill([&](float value) { return quotient(value, divisor); });
  } else {
    fill([&](float value) { return any_quotient(value, divisor); });
  }
  return out;
}

// row + column begins at a word of the codes, or with Ragged anywhere: then by what divides its address.
template <bool Ragged, class T>
__device__ __forceinline__ void store_codes(uint8_t* row /*[width]*/, int column, int width, const Codes<T>& codes) {
  constexpr int N = widest<T>;
  uint8_t* to = row + column;
  if constexpr (!Ragged) {
    if (column < width) store(to, bits_as<Vec<uint8_t, N>>(codes));
  } else {
    const auto address = reinterpret_cast<uintptr_t>(to);
    if (column + N > width) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i < width) to[i] = static_cast<uint8_t>(codes.at[i / 4] >> (i % 4 * 8));
      }
    } else if (address % 4 == 0) {
#pragma unroll
      for (int i = 0; i < Codes<T>::words; ++i) reinterpret_cast<uint32_t*>(to)[i] = codes.at[i];
    } else if (address % 2 == 0) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(codes.at[i / 2] >> (i % 2 * 16));
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = static_cast<uint8_t>(codes.at[i / 4] >> (i % 4 * 8));
    }
  }
}

// ---- the largest |x| ---------------------------------------------------------------------------------------------------

// Of a packet. NaN is no number, so max leaves it out; infinity it does not. Two halves a time.
template <class T>
__device__ __forceinline__ float largest_in(const Packet<T>& x) {
  if constexpr (std::is_same_v<T, float>) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) most = fmaxf(most, fabsf(x[i]));
    return most;
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair most = bits_as<Pair>(0u);  // not the first value: NaN among the first would stay where all are
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __hmax2(most, bits_as<Pair>(x.word.at[i] & 0x7fff7fffu));
    const Packet<T> pair{{{bits_as<uint32_t>(most)}}};
    return fmaxf(pair[0], pair[1]);
  }
}

template <class T>
__device__ __forceinline__ float largest_finite_in(const Packet<T>& x) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    const float size = fabsf(x[i]);
    if (size < INFINITY && size > most) most = size;
  }
  return most;
}

// Of numbers that are not negative the bits are in the same order, and for those a warp has one instruction.
__device__ __forceinline__ float warp_max(float value /* >= 0 */) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

// Of a block, for every thread; two turns, as of BlockTeam.
class BlockMax {
 public:
  struct Shared {
    float at[2][32];
  };
  __device__ explicit BlockMax(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ float of(float value /* >= 0 */) {
    value = warp_max(value);
    if (threadIdx.x % 32 == 0) shared_.at[turn_][threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const float all = lane < static_cast<int>(blockDim.x) / 32 ? shared_.at[turn_][lane] : 0.0f;
    turn_ ^= 1;
    return warp_max(all);
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// Of groups of `Lanes` neighbours, `Items` groups at once: lane i of a group gets the maximum of item
// i / (Lanes / Items). Half of what is left is given away at each of the first steps.
template <int Lanes, int Items>
__device__ __forceinline__ float group_max(const float (&value)[Items]) {
  static_assert(Items == 1 || Items == 2 || Items == 4);
  float left[Items];
#pragma unroll
  for (int i = 0; i < Items; ++i) left[i] = value[i];
  int step = Lanes / 2;
#pragma unroll
  for (int half = Items / 2; half > 0; half /= 2, step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? left[i + half] : left[i], theirs = upper ? left[i] : left[i + half];
      left[i] = fmaxf(mine, __shfl_xor_sync(0xffffffffu, theirs, step));
    }
  }
#pragma unroll
  for (; step > 0; step /= 2) left[0] = fmaxf(left[0], __shfl_xor_sync(0xffffffffu, left[0], step));
  return left[0];
}

}  // namespace prequal
