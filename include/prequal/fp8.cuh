// FP8 of packets: their largest value, and their codes, by the instructions where there are some (fp8.h has the bits).
#pragma once

#include "prequal/fp8.h"
#include "prequal/vec.cuh"

namespace prequal {

// The compiler forgets how a pointer into global memory was made: else it makes those that follow anew, from 64-bit indices,
// where each is the one before and a step.
template <class T>
__device__ __forceinline__ T* kept(T* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

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

// 8 codes of a row, from its column `first` on; those past the row are zero.
struct alignas(8) Codes8 {
  uint32_t at[2];
};

template <bool Ragged>
__device__ __forceinline__ Codes8 load_codes(const uint8_t* row /*[width]*/, int64_t first, int64_t width) {
  Codes8 codes{};
  if constexpr (Ragged) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < width) codes.at[i / 4] |= static_cast<uint32_t>(row[first + i]) << (i % 4 * 8);
    }
  } else {
    if (first < width) codes = *reinterpret_cast<const Codes8*>(row + first);
  }
  return codes;
}

// Every FP8 number is a half: an e5m2 one is a half's upper byte, and for e4m3 sm_89 and later have an instruction.
template <Fp8 F>
__device__ __forceinline__ void floats_of(const Codes8& codes, float (&value)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = codes.at[i / 2] >> (i % 2 * 16);
    if constexpr (F == Fp8::e5m2) {
      const float2 two = __half22float2(bits_as<__half2>(__byte_perm(pair, 0, 0x1404)));
      value[2 * i] = two.x, value[2 * i + 1] = two.y;
    } else {
#if __CUDA_ARCH__ >= 890
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
      const float2 two = __half22float2(bits_as<__half2>(halves));
      value[2 * i] = two.x, value[2 * i + 1] = two.y;
#else
      value[2 * i] = from_fp8<F>(pair & 0xffu), value[2 * i + 1] = from_fp8<F>(pair >> 8 & 0xffu);
#endif
    }
  }
}

// The codes of a packet: 8 bytes of a half's, 4 of fp32's.
template <class T>
struct alignas(widest<T>) Codes {
  static constexpr int words = widest<T> / 4;
  uint32_t at[words];
};

template <class T>
__device__ __forceinline__ Divisor divisor_of(float by, float most) {
  if constexpr (sizeof(T) == 2) return short_divisor_for(by, most);
  return divisor_for(by, most);
}

// divided(value): the quotient of one value.
template <Fp8 F, class T, class Divided>
__device__ __forceinline__ Codes<T> codes_of(const Packet<T>& x, Divided&& divided) {
  Codes<T> out;
#pragma unroll
  for (int i = 0; i < Codes<T>::words; ++i) {
    const uint32_t low = to_fp8_pair<F>(divided(x[4 * i]), divided(x[4 * i + 1]));
    const uint32_t high = to_fp8_pair<F>(divided(x[4 * i + 2]), divided(x[4 * i + 3]));
    out.at[i] = low | high << 16;
  }
  return out;
}

template <Fp8 F, class T>
__device__ __forceinline__ Codes<T> fast_codes(const Packet<T>& x, const Divisor& divisor) {
  return codes_of<F>(x, [&](float value) {
    if constexpr (sizeof(T) == 2) return short_quotient(value, divisor);
    return quotient(value, divisor);
  });
}

// Of packets, the first of which has the divisor by(0): store(item, codes). Any divisor and any value: whatever IEEE says of
// their division. Rare, so that there are instructions for one packet, and the packets take turns.
template <Fp8 F, class T, int Items, class By, class Store>
__device__ __forceinline__ void any_codes(Packet<T> (&x)[Items], By&& by, Store&& store) {
#pragma unroll 1
  for (int item = 0; item < Items; ++item) {
    const float divisor = by(item);
    store(item, codes_of<F>(x[0], [&](float value) { return div(value, divisor); }));
#pragma unroll
    for (int i = 1; i < Items; ++i) x[i - 1] = x[i];
  }
}

// Of packets that share a divisor, which are spent after it. One question for all of them.
template <Fp8 F, class T, int Items, class Store>
__device__ __forceinline__ void each_codes(Packet<T> (&x)[Items], const Divisor& divisor, Store&& store) {
  if (divisor.inverse != 0.0f) {
#pragma unroll
    for (int item = 0; item < Items; ++item) store(item, fast_codes<F>(x[item], divisor));
  } else {
    any_codes<F>(x, [&](int) { return divisor.by; }, store);
  }
}

// row + column begins at a word of the codes, or with Ragged anywhere. Ragged: every lane of the warp calls, `Lanes`
// neighbours with columns that follow each other, and stores the word that begins within its own codes (ragged.h).
template <bool Ragged, int Lanes = 32, class T>
__device__ __forceinline__ void store_codes(uint8_t* row /*[width]*/, int column, int width, const Codes<T>& codes) {
  constexpr int N = widest<T>;
  uint8_t* to = row + column;
  if constexpr (!Ragged) {
    // as words: of bytes, the compiler takes apart what was put together
    if (column < width) *reinterpret_cast<Codes<T>*>(to) = codes;
  } else {
    const unsigned past = reinterpret_cast<uintptr_t>(to) % N;  // the same for neighbours
    const unsigned shift = (N - past) % N;
    Word both{};
#pragma unroll
    for (int i = 0; i < Codes<T>::words; ++i) {
      both.at[i] = codes.at[i];
      both.at[Codes<T>::words + i] = __shfl_down_sync(0xffffffffu, codes.at[i], 1, Lanes);
    }
    const int lane = threadIdx.x % Lanes, first = static_cast<int>(shift);
    const RaggedStore which =
        ragged_store(lane == 0 ? 0 : 32 - Lanes + lane, column, width, N, first);  // the last is 31
    if (which.word) {
      const Word word = straddle(both, Word{}, shift);
      Codes<T> out;
#pragma unroll
      for (int i = 0; i < Codes<T>::words; ++i) out.at[i] = word.at[i];
      *reinterpret_cast<Codes<T>*>(to + first) = out;
    }
    if (which.low || which.high) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i < width && (i < first ? which.low : which.high)) {
          to[i] = static_cast<uint8_t>(codes.at[i / 4] >> (i % 4 * 8));
        }
      }
    }
  }
}

// ---- the largest |x| ---------------------------------------------------------------------------------------------------

// Two halves in a register.
template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// The largest |x| of the even and of the odd values of packets. NaN is no number, so max leaves it out; infinity it does
// not.
template <class T, int Items>
__device__ __forceinline__ Pair<T> largest_pair(const Packet<T> (&x)[Items]) {
  auto most = bits_as<Pair<T>>(0u);  // not the first value: NaN among the first would stay where all are
#pragma unroll
  for (int item = 0; item < Items; ++item) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __hmax2(most, bits_as<Pair<T>>(x[item].word.at[i] & 0x7fff7fffu));
  }
  return most;
}

template <class T>
__device__ __forceinline__ float float_of_half(const Pair<T>& pair, bool upper) {
  const Packet<T> packet{{{bits_as<uint32_t>(pair)}}};
  return upper ? packet[1] : packet[0];
}

template <class T, int Items>
__device__ __forceinline__ float largest_of(const Packet<T> (&x)[Items]) {
  if constexpr (std::is_same_v<T, float>) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < Items * widest<T>; ++i) most = fmaxf(most, fabsf(x[i / widest<T>][i % widest<T>]));
    return most;
  } else {
    const Pair<T> most = largest_pair(x);
    return fmaxf(float_of_half<T>(most, false), float_of_half<T>(most, true));
  }
}

template <class T>
__device__ __forceinline__ float largest_in(const Packet<T>& x) {
  const Packet<T> one[1] = {x};
  return largest_of(one);
}

// The same of what is finite.
template <class T, int Items>
__device__ __forceinline__ float largest_finite_of(const Packet<T> (&x)[Items]) {
  if constexpr (std::is_same_v<T, float>) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < Items * widest<T>; ++i) {
      const float size = fabsf(x[i / widest<T>][i % widest<T>]);
      if (size < INFINITY && size > most) most = size;
    }
    return most;
  } else {
    constexpr uint32_t infinity = std::is_same_v<T, __half> ? 0x7c007c00u : 0x7f807f80u;
    auto most = bits_as<Pair<T>>(0u);
#pragma unroll
    for (int i = 0; i < Items * 4; ++i) {
      const uint32_t size = x[i / 4].word.at[i % 4] & 0x7fff7fffu;
      most = __hmax2(most, bits_as<Pair<T>>(size & __vcmpltu2(size, infinity)));
    }
    return fmaxf(float_of_half<T>(most, false), float_of_half<T>(most, true));
  }
}

template <class T>
__device__ __forceinline__ float largest_finite_in(const Packet<T>& x) {
  const Packet<T> one[1] = {x};
  return largest_finite_of(one);
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
  static_assert(Items == 1 || Items == 2 || Items == 4 || Items == 8);
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

// The same of halves, two items a register from the first step on.
template <int Lanes, class T, int Items>
__device__ __forceinline__ float group_largest(const Packet<T> (&held)[Items]) {
  if constexpr (std::is_same_v<T, float>) {
    float value[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) value[item] = largest_in(held[item]);
    return group_max<Lanes>(value);
  } else {
    // in integers: a choice between two structs would be made in memory
    const auto max_of = [](uint32_t a, uint32_t b) {
      return bits_as<uint32_t>(__hmax2(bits_as<Pair<T>>(a), bits_as<Pair<T>>(b)));
    };
    constexpr int pairs = Items > 1 ? Items / 2 : 1;
    uint32_t left[pairs];
    const auto own = [&](int item) {
      const Packet<T> one[1] = {held[item]};
      return bits_as<uint32_t>(largest_pair(one));
    };
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      if constexpr (Items == 1) {
        left[i] = own(i);
      } else {  // the even values of both items, and the odd
        const uint32_t a = own(2 * i), b = own(2 * i + 1);
        left[i] = max_of(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
      }
    }
    int step = Lanes / 2;
#pragma unroll
    for (int half = pairs / 2; half > 0; half /= 2, step /= 2) {
      const bool upper = threadIdx.x & step;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const uint32_t mine = upper ? left[i + half] : left[i], theirs = upper ? left[i] : left[i + half];
        left[i] = max_of(mine, __shfl_xor_sync(0xffffffffu, theirs, step));
      }
    }
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (; step > 0; step /= 2) left[0] = max_of(left[0], __shfl_xor_sync(0xffffffffu, left[0], step));
    const auto most = bits_as<Pair<T>>(left[0]);
    if constexpr (Items == 1) return fmaxf(float_of_half<T>(most, false), float_of_half<T>(most, true));
    return float_of_half<T>(most, upper);
  }
}

}  // namespace prequal
