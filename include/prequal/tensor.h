// A tensor as a kernel launcher sees it: pointer, dtype, device, shape, strides. A view that owns nothing.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "prequal/error.h"

namespace prequal {

enum class DType : uint8_t { f16, bf16, f32, f64, i8, i16, i32, i64, u8, boolean, e4m3, e5m2, other };

constexpr int64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16: return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
    case DType::e4m3:
    case DType::e5m2: return 1;
    case DType::other: break;
  }
  return 0;
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::f32: return "float32";
    case DType::f64: return "float64";
    case DType::i8: return "int8";
    case DType::i16: return "int16";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u8: return "uint8";
    case DType::boolean: return "bool";
    case DType::e4m3: return "float8_e4m3fn";
    case DType::e5m2: return "float8_e5m2";
    case DType::other: break;
  }
  return "another dtype";
}

// More dimensions than this is a refusal ("rank"), not a wrong call.
inline constexpr int max_rank = 8;

struct Tensor {
  static constexpr int cpu = -1;

  void* data = nullptr;
  DType dtype = DType::other;
  int itemsize = 0;  // bytes; known even where the dtype is `other`
  int device = cpu;  // CUDA ordinal, or cpu
  int rank = 0;
  std::array<int64_t, max_rank> shape{};
  std::array<int64_t, max_rank> stride{};  // in elements

  int64_t numel() const {
    int64_t total = 1;
    for (int dim = 0; dim < rank; ++dim) total *= shape[dim];
    return total;
  }

  // Sizes of 1 may have any stride.
  bool contiguous_from(int first) const {
    int64_t expected = 1;
    for (int dim = rank - 1; dim >= first; --dim) {
      if (shape[dim] == 0) return true;
      if (shape[dim] != 1 && stride[dim] != expected) return false;
      expected *= shape[dim];
    }
    return true;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int dim = 0; dim < tensor.rank; ++dim) text += (dim ? ", " : "") + std::to_string(tensor.shape[dim]);
  return text + "]";
}

// Leading dimensions as one: row r of x [..., H] starts at r * stride elements.
struct Rows {
  int64_t count = 1;
  int64_t stride = 0;
};

// Refused("rows") where no single stride walks all rows; Refused("unit_stride") where a row itself is strided.
inline Rows rows_of(const Tensor& x) {
  const int last = x.rank - 1;
  if (x.shape[last] > 1 && x.stride[last] != 1) throw Refused{"unit_stride"};
  Rows rows{1, x.shape[last]};
  bool first = true;
  for (int dim = last - 1; dim >= 0; --dim) {
    if (x.shape[dim] == 1) continue;
    if (first) {
      rows.stride = x.stride[dim];
      first = false;
    } else if (x.stride[dim] != rows.count * rows.stride) {
      throw Refused{"rows"};
    }
    rows.count *= x.shape[dim];
    if (rows.count == 0) return {0, x.shape[last]};
  }
  return rows;
}

class Allocator {
 public:
  virtual void* allocate(Tensor& like) = 0;  // fills like.data, returns the owner
  virtual void release(void* owner) = 0;
  virtual ~Allocator() = default;
};

// Memory from the framework's allocator. Freed when it leaves scope (stream-ordered: the allocator reuses it on the
// same stream only) unless the binding takes it to be an output.
class Buffer {
 public:
  Buffer(Allocator& allocator, const Tensor& like) : view_(like), allocator_(&allocator) {
    owner_ = allocator_->allocate(view_);
  }
  Buffer(Buffer&& other) noexcept
      : view_(other.view_), allocator_(other.allocator_), owner_(std::exchange(other.owner_, nullptr)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (owner_) allocator_->release(owner_);
  }

  const Tensor& view() const { return view_; }
  void* take() { return std::exchange(owner_, nullptr); }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  Tensor view_;
  Allocator* allocator_;
  void* owner_;
};

// Where a launcher works: the device of its arguments (already current), the caller's stream, torch's memory.
struct Context {
  int device;
  void* stream;  // cudaStream_t
  Allocator& allocator;

  // Contiguous.
  Buffer empty(std::initializer_list<int64_t> shape, DType dtype) const {
    Tensor like;
    for (int64_t size : shape) like.shape[like.rank++] = size;
    return empty(like, dtype);
  }

  // Contiguous, of the shape of another tensor.
  Buffer empty_like(const Tensor& other) const { return empty(other, other.dtype); }

  // Contiguous, of the shape of another tensor.
  Buffer empty(Tensor like, DType dtype) const {
    like.dtype = dtype;
    like.itemsize = static_cast<int>(item_size(dtype));
    like.device = device;
    int64_t step = 1;
    for (int dim = like.rank - 1; dim >= 0; --dim) {
      like.stride[dim] = step;
      step *= like.shape[dim] > 1 ? like.shape[dim] : 1;
    }
    return Buffer(allocator, like);
  }
};

}  // namespace prequal
