// Packed loads and stores, and the casts between storage and fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "prequal/ragged.h"

namespace prequal {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// To storage and back: a rounding that the eager chain makes.
template <class T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

// N values moved as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

// 16 bytes: the widest access of one thread on sm_80 to sm_90.
template <class T>
inline constexpr int widest = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Vec<T, N>& value) {
  *reinterpret_cast<Vec<T, N>*>(to) = value;
}

inline bool aligned(const void* pointer, int64_t stride_bytes, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 && stride_bytes % bytes == 0;
}

// std::bit_cast, which does not take CUDA's halves: their copy constructors are not trivial.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- 16 bytes of a row -------------------------------------------------------------------------------------------

// Values in storage, two halves a register: taken apart as 16-bit values they would take a register each.
template <class T>
struct Packet {
  Word word;

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word.at[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? word.at[i / 2] & 0xffff0000u : word.at[i / 2] << 16);
    } else {
      const float2 two = __half22float2(bits_as<__half2>(word.at[i / 2]));
      return i % 2 ? two.y : two.x;
    }
  }

  __device__ __forceinline__ T element(int i) const {
    if constexpr (sizeof(T) == 4) {
      return bits_as<T>(word.at[i]);
    } else {
      return bits_as<T>(static_cast<uint16_t>(word.at[i / 2] >> (i % 2 * 16)));
    }
  }

  // Of an element that is zero.
  __device__ __forceinline__ void set(int i, T value) {
    if constexpr (sizeof(T) == 4) {
      word.at[i] = bits_as<uint32_t>(value);
    } else {
      word.at[i / 2] |= static_cast<uint32_t>(bits_as<uint16_t>(value)) << (i % 2 * 16);
    }
  }
};

// Two values are rounded by one instruction.
template <class T>
__device__ __forceinline__ Packet<T> pack(const float (&value)[widest<T>]) {
  Packet<T> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      out.word.at[i] = __float_as_uint(value[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      out.word.at[i] = bits_as<uint32_t>(__floats2bfloat162_rn(value[2 * i], value[2 * i + 1]));
    } else {
      out.word.at[i] = bits_as<uint32_t>(__floats2half2_rn(value[2 * i], value[2 * i + 1]));
    }
  }
  return out;
}

// The compiler forgets what it knew of packets: else it keeps their fp32 values from one use to the next, across a
// barrier, and runs out of registers where the packets themselves have room.
template <class T, int Items>
__device__ __forceinline__ void keep_packed(Packet<T> (&packets)[Items]) {
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    uint32_t(&at)[4] = packets[item].word.at;
    asm volatile("" : "+r"(at[0]), "+r"(at[1]), "+r"(at[2]), "+r"(at[3]));
  }
}

// Constant: not written during the kernel, so that the compiler may move the load across stores.
template <bool Constant>
__device__ __forceinline__ Word load_word(const Word* from) {
  // by value: memcpy out of the memory itself knows nothing of its alignment, and becomes sixteen loads of a byte
  const uint4 word = Constant ? __ldg(reinterpret_cast<const uint4*>(from)) : *reinterpret_cast<const uint4*>(from);
  return {{word.x, word.y, word.z, word.w}};
}

// Ragged: any address, any width. Else the row and its width are made of whole words, and a column is one's first.
// Columns at and past `width` come as zero and are not written.
template <bool Ragged, bool Constant = false, class T>
__device__ __forceinline__ Packet<T> load_packet(const T* row /*[width]*/, int column, int width) {
  constexpr int N = widest<T>;
  Packet<T> out{};
  if constexpr (Ragged) {
    const auto address = reinterpret_cast<uintptr_t>(row + column);
    const unsigned shift = address % 16;
    if (words_inside(column, width, N, shift != 0)) {
      const auto* words = reinterpret_cast<const Word*>(address - shift);
      const Word low = load_word<Constant>(words);
      // the second word is the next lane's first: it comes from L1
      out.word = straddle(low, shift ? load_word<Constant>(words + 1) : low, shift);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i < width) out.set(i, row[column + i]);
      }
    }
  } else {
    if (column < width) out.word = load_word<Constant>(reinterpret_cast<const Word*>(row + column));
  }
  return out;
}

// Ragged: every lane of the warp calls, with columns that follow each other from lane to lane.
template <bool Ragged, class T>
__device__ __forceinline__ void store_packet(T* row /*[width]*/, int column, int width, const Packet<T>& value) {
  constexpr int N = widest<T>;
  if constexpr (Ragged) {
    const unsigned past = reinterpret_cast<uintptr_t>(row + column) % 16;  // the same for every lane
    const unsigned shift = (16 - past) % 16;
    Word next;
#pragma unroll
    for (int i = 0; i < 4; ++i) next.at[i] = __shfl_down_sync(0xffffffffu, value.word.at[i], 1);

    const int first = static_cast<int>(shift) / static_cast<int>(sizeof(T));
    const RaggedStore which = ragged_store(threadIdx.x % 32, column, width, N, first);
    if (which.word) {
      *reinterpret_cast<uint4*>(row + column + first) = bits_as<uint4>(straddle(value.word, next, shift));
    }
    if (which.low || which.high) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (column + i < width && (i < first ? which.low : which.high)) row[column + i] = value.element(i);
      }
    }
  } else {
    if (column < width) *reinterpret_cast<uint4*>(row + column) = bits_as<uint4>(value.word);
  }
}

// A parameter of x's dtype or fp32; the choice is the same for every thread.
template <class T>
struct Parameter {
  const T* same;      // [H] or null
  const float* full;  // [H] or null

  __host__ __device__ explicit operator bool() const { return same || full; }

  template <bool Ragged, int N>
  __device__ __forceinline__ void get(float (&value)[N], int column, int width) const {
    if (same) {
      const Packet<T> w = load_packet<Ragged, true>(same, column, width);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = w[i];
    } else {
#pragma unroll
      for (int half = 0; half < N; half += widest<float>) {
        const Packet<float> w = load_packet<Ragged, true>(full, column + half, width);
#pragma unroll
        for (int i = 0; i < widest<float>; ++i) value[half + i] = w[i];
      }
    }
  }
};

}  // namespace prequal
