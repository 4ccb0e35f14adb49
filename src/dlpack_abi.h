// The DLPack 1.3 binary interface, as far as prequal uses it: written from the specification
// (https://dmlc.github.io/dlpack/latest/c_api.html). Layout only; the names are ours.
#pragma once

#include <cstdint>

namespace prequal::dlpack {

inline constexpr int32_t device_cpu = 1;
inline constexpr int32_t device_cuda = 2;

enum Code : uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  brain = 4,
  complex = 5,
  boolean = 6,
  float8_e4m3fn = 10,
  float8_e5m2 = 12
};

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct DLTensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensorVersioned
  Version version;
  void* manager;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  DLTensor tensor;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(DLTensor* prototype, ManagedTensor** out, void* error_context, SetError set_error);
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out);
  int (*view_from_object)(void* object, DLTensor* out);  // may be null
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

}  // namespace prequal::dlpack
