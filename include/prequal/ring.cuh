// Rows on their way: a block asks for the rows after the one it works on, and they arrive in its shared memory without
// passing through registers (cp.async, sm_80 and later). What is in flight is then no matter of occupancy.
//
// Rows may begin at any address. A team's rows lie so many rows apart that all of them begin alike (row_step), so what is
// odd about an address is settled once: the thread's columns are whole words of the *output*, and an input that begins
// otherwise is shifted when it is read.
#pragma once

#include <cstdint>

#include "prequal/vec.cuh"

namespace prequal {

// 16 bytes, of which `bytes` (0 to 16) are read and the rest becomes zero. Both addresses are whole words.
__device__ __forceinline__ void copy_async(Word* to, const void* from, int bytes) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// This thread's copies have arrived, but for the last `pending` groups.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
  }
}

// Elements of a row before its first whole word's begin: 0 to widest<T> - 1.
template <class T>
__device__ __forceinline__ int elements_past(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
}

// The columns of a thread of a block that has `first_word` words of the row before its own: whole words of a row that
// begins `past` elements into one. Column -past is the first; those below 0 and at or past the width are no columns.
template <class T, bool Ragged, int Items>
struct Columns {
  int first;  // of the thread's first item
  int width;

  __device__ Columns(int first_word, int past, int width)
      : first((first_word + static_cast<int>(threadIdx.x)) * widest<T> - (Ragged ? past : 0)), width(width) {}

  __device__ __forceinline__ int of(int item) const { return first + item * static_cast<int>(blockDim.x) * widest<T>; }
  // All of an item's columns: without Ragged an item has all or none.
  __device__ __forceinline__ bool whole(int item) const {
    return (!Ragged || of(item) >= 0) && of(item) + widest<T> <= width;
  }
  // The same for one column, where the item may be in part one.
  __device__ __forceinline__ bool part(int item, int i) const { return Ragged ? has(item, i) : whole(item); }
  __device__ __forceinline__ bool has(int item, int i) const {
    return static_cast<unsigned>(of(item) + i) < static_cast<unsigned>(width);
  }
};

// A row that is written: a pointer of the thread that goes from one of its rows to the next. The columns are whole words of
// one output; another that begins otherwise (in place, x and its residual where they lie) is written by elements.
template <class T, bool Ragged, int Items>
class RowOut {
 public:
  // row: [H], the team's first
  __device__ RowOut(T* row, int64_t jump /* elements to the team's next row */,
                    const Columns<T, Ragged, Items>& columns)
      : at_(row + columns.first), jump_(jump), words_(!Ragged || reinterpret_cast<uintptr_t>(at_) % 16 == 0) {}

  __device__ __forceinline__ void write(int item, const Packet<T>& value, const Columns<T, Ragged, Items>& columns) {
    T* to = at_ + item * static_cast<int>(blockDim.x) * widest<T>;
    if (words_ && columns.whole(item)) {
      *reinterpret_cast<uint4*>(to) = bits_as<uint4>(value.word);
    } else if constexpr (Ragged) {
#pragma unroll
      for (int i = 0; i < widest<T>; ++i) {
        if (columns.has(item, i)) to[i] = value.element(i);
      }
    }
  }
  __device__ __forceinline__ void next() { at_ += jump_; }

 private:
  T* at_;
  int64_t jump_;
  bool words_;
};

template <class T, bool Ragged, int Items, int Inputs>
class Ring {
 public:
  // Shared memory of a block, in words, by stage and input: its items, and the next word of a shifted row.
  __device__ static int words() { return blockDim.x * Items + (Ragged ? 1 : 0); }

  __device__ Ring(Word* memory, int stages, int inputs, int first_word)
      : own_(memory + threadIdx.x),
        end_(own_ + stages * inputs * words()),
        asked_(own_),
        now_(own_),
        next_(own_),
        inputs_(inputs),
        stages_(stages),
        first_word_(first_word) {}

  // row: [H], the team's first. past: of the output's rows.
  __device__ __forceinline__ void input(int k, const T* row, int64_t jump, int width, int past) {
    const auto begin = reinterpret_cast<uintptr_t>(row);
    const int apart = Ragged ? elements_past(row) - past : 0;
    shift_[k] = static_cast<unsigned>((apart + widest<T>) % widest<T>) * sizeof(T);
    const int64_t from = static_cast<int64_t>(begin / 16) - (apart < 0 ? 1 : 0) + first_word_ + threadIdx.x;
    at_[k] = reinterpret_cast<const char*>(from * 16);
    jump_[k] = jump * static_cast<int64_t>(sizeof(T));
    left_[k] = static_cast<int>(static_cast<int64_t>(begin) + static_cast<int64_t>(width) * sizeof(T) - from * 16);
    // a word before the row's first is no part of it
    if (Ragged && apart < 0 && first_word_ + threadIdx.x == 0) before_ |= 1u << k;
  }

  // Ask for the team's next row. One group, also where there is none.
  __device__ __forceinline__ void ask(bool is_there) {
    if (is_there) {
#pragma unroll
      for (int k = 0; k < Inputs; ++k) {
        if (k >= inputs_) continue;
        Word* to = asked_ + k * words();
        const auto copy = [&](int word, bool before) {
          const int left = left_[k] - word * 16;
          copy_async(to + word, at_[k] + word * 16, before || left <= 0 ? 0 : left < 16 ? left : 16);
        };
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          copy(item * static_cast<int>(blockDim.x), Ragged && item == 0 && (before_ >> k & 1));
        }
        if (Ragged && threadIdx.x == 0) copy(words() - 1, false);
        at_[k] += jump_[k];
      }
    }
    commit_copies();
    asked_ = after(asked_);
  }

  // The team's first row is there.
  __device__ __forceinline__ void arrive_first() {
    wait_for_copies(stages_ - 2);
    if constexpr (Ragged) __syncthreads();
  }

  // The row after the one that is written is there, and nobody reads the one before that any more.
  __device__ __forceinline__ void arrive() {
    wait_for_copies(stages_ - 3);
    // A thread reads what itself copied; of a shifted row the next thread's word too
    if constexpr (Ragged) __syncthreads();
  }

  // ahead: of the next row, else of the one that is written.
  __device__ __forceinline__ Packet<T> packet(bool ahead, int k, int item,
                                              const Columns<T, Ragged, Items>& columns) const {
    const Word* at = (ahead ? next_ : now_) + k * words() + item * static_cast<int>(blockDim.x);
    Packet<T> out;
    out.word = load_word<false>(at);
    if constexpr (Ragged) {
      if (shift_[k]) out.word = straddle(out.word, load_word<false>(at + 1), shift_[k]);
      if (columns.of(item) < 0) {  // what is behind the row's end is zero by its copy
        Packet<T> inside{};
#pragma unroll
        for (int i = 0; i < widest<T>; ++i) {
          if (columns.has(item, i)) inside.set(i, out.element(i));
        }
        out = inside;
      }
    }
    return out;
  }

  __device__ __forceinline__ void next() {
    now_ = next_;
    next_ = after(next_);
  }

 private:
  __device__ __forceinline__ Word* after(Word* stage) const {
    Word* next = stage + inputs_ * words();
    return next == end_ ? own_ : next;
  }

  Word *own_, *end_;            // the thread's first word of the first stage, and of the stage after the last
  Word *asked_, *now_, *next_;  // of the stage that a row is asked for into, of the row written, of the one after it
  int inputs_, stages_, first_word_;
  const char* at_[Inputs];  // where this thread's first word of the row to ask for next begins
  int64_t jump_[Inputs];    // bytes
  int left_[Inputs];        // bytes from there to the row's end
  unsigned shift_[Inputs];  // bytes
  unsigned before_ = 0;     // inputs of which this thread's first word lies before the row
};

// A parameter's values at the thread's columns, which stay; `none` where there is no parameter.
template <class T, bool Ragged, int Items>
__device__ __forceinline__ void get_parameter(float (&value)[Items][widest<T>], const Parameter<T>& of, float offset,
                                              float none, const Columns<T, Ragged, Items>& columns) {
  const auto each = [&](auto&& at) {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
#pragma unroll
      for (int i = 0; i < widest<T>; ++i) value[item][i] = columns.has(item, i) ? at(columns.of(item) + i) : none;
    }
  };
  if (of.same) {
    each([&](int column) { return to_float(of.same[column]) + offset; });
  } else if (of.full) {
    each([&](int column) { return of.full[column] + offset; });
  } else {
    each([&](int) { return none; });
  }
}

}  // namespace prequal
