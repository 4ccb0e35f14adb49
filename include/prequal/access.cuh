// What a lane reads and writes of a row at a time, whether or not the row is made of whole words.
#pragma once

#include <type_traits>

#include "prequal/vec.cuh"

namespace prequal {

// One access of a lane: 16 bytes, or, of rows that are not made of whole words, one value. Held as it is stored: in fp32 a
// packet of halves takes twice the registers.
template <class T, bool Words>
struct Access {
  static constexpr int values = Words ? widest<T> : 1;
  using Held = std::conditional_t<Words, Packet<T>, T>;

  __device__ __forceinline__ static Held none() {
    if constexpr (Words) {
      return {};
    } else {
      return from_float<T>(0.0f);
    }
  }
  __device__ __forceinline__ static Held read(const T* from) {
    if constexpr (Words) {
      return {load_word<true>(reinterpret_cast<const Word*>(from))};
    } else {
      return *from;
    }
  }
  __device__ __forceinline__ static float value(const Held& held, int i) {
    if constexpr (Words) {
      return held[i];
    } else {
      return to_float(held);
    }
  }
  __device__ __forceinline__ static void write(T* to, const float (&value)[values]) {
    if constexpr (Words) {
      *reinterpret_cast<uint4*>(to) = bits_as<uint4>(pack<T>(value).word);
    } else {
      *to = from_float<T>(value[0]);
    }
  }
};

}  // namespace prequal
