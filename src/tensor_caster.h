// torch.Tensor -> prequal::Tensor and back: the only file that knows both worlds.
//
// Through the DLPack C exchange API where torch has it (>= 2.10): 0.15-0.46 us for two tensors on an H200 host, against
// 8.6 through __dlpack__() and 1.4 a tensor through attributes. Through the attributes otherwise. Neither synchronises.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "dlpack_abi.h"
#include "prequal/tensor.h"

namespace prequal {

namespace nb = nanobind;

// A call that is fine, and not for the native path: the answer comes by another road.
struct Detour {
  const char* why;
};

// What the boundary needs of torch, handed over once by prequal's Python side (so that the module imports without torch).
struct Torch {
  PyObject* module = nullptr;
  PyTypeObject* tensor_type = nullptr;
  PyTypeObject* parameter_type = nullptr;
  PyObject* dispatch_modes = nullptr;  // () -> int
  PyObject* is_neg = nullptr;          // Tensor.is_neg, unbound
  PyObject* requires_grad = nullptr;   // Tensor.requires_grad, the descriptor
  descrgetfunc get_requires_grad = nullptr;
  PyObject* grad_enabled = nullptr;    // () -> bool
  PyObject* forward_ad = nullptr;      // the dict of torch.autograd.forward_ad
  PyObject* current_stream = nullptr;  // (int) -> int, for torch < 2.10
  PyObject* out_of_memory = nullptr;   // exception type
  PyObject* dtypes[static_cast<int>(DType::other)] = {};
  const dlpack::ExchangeApi* api = nullptr;
};

inline Torch& torch() {
  static Torch state;
  return state;
}

// Interned attribute names: a lookup by an interned name is a pointer comparison.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* device = PyUnicode_InternFromString("device");
  PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_meta = PyUnicode_InternFromString("is_meta");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* element_size = PyUnicode_InternFromString("element_size");
  PyObject* current_level = PyUnicode_InternFromString("_current_level");
};

inline const Names& names() {
  static const Names all;
  return all;
}

inline nb::object attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

inline nb::object method(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_VectorcallMethod(name, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

inline nb::object invoke(PyObject* callable) {
  PyObject* value = PyObject_CallNoArgs(callable);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

inline std::string python_type(nb::handle object) {
  return nb::cast<std::string>(nb::object(object.type().attr("__name__")));
}

// ---- torch.Tensor -> Tensor -----------------------------------------------------------------------------------

inline DType dtype_of(dlpack::DataType type) {
  if (type.lanes != 1) return DType::other;
  switch (type.code * 100 + type.bits) {
    case dlpack::floating * 100 + 16: return DType::f16;
    case dlpack::floating * 100 + 32: return DType::f32;
    case dlpack::floating * 100 + 64: return DType::f64;
    case dlpack::brain * 100 + 16: return DType::bf16;
    case dlpack::integer * 100 + 8: return DType::i8;
    case dlpack::integer * 100 + 16: return DType::i16;
    case dlpack::integer * 100 + 32: return DType::i32;
    case dlpack::integer * 100 + 64: return DType::i64;
    case dlpack::unsigned_integer * 100 + 8: return DType::u8;
    case dlpack::boolean * 100 + 8: return DType::boolean;
    case dlpack::float8_e4m3fn * 100 + 8: return DType::e4m3;
    case dlpack::float8_e5m2 * 100 + 8: return DType::e5m2;
    default: return DType::other;
  }
}

inline dlpack::DataType dlpack_of(DType type) {
  const auto bits = static_cast<uint8_t>(8 * item_size(type));
  switch (type) {
    case DType::f16:
    case DType::f32:
    case DType::f64: return {dlpack::floating, bits, 1};
    case DType::bf16: return {dlpack::brain, bits, 1};
    case DType::u8: return {dlpack::unsigned_integer, bits, 1};
    case DType::boolean: return {dlpack::boolean, bits, 1};
    case DType::e4m3: return {dlpack::float8_e4m3fn, bits, 1};
    case DType::e5m2: return {dlpack::float8_e5m2, bits, 1};
    default: return {dlpack::integer, bits, 1};
  }
}

inline Tensor view_by_exchange(PyObject* object) {
  dlpack::DLTensor from;
  if (torch().api->view_from_object(object, &from) != 0) {
    PyErr_Clear();  // sparse, meta, functorch-wrapped: torch says what and why on the road that can take them
    throw Detour{"foreign"};
  }

  Tensor to;
  if (from.device.type == dlpack::device_cuda) {
    to.device = from.device.index;
  } else if (from.device.type != dlpack::device_cpu) {
    throw Detour{"foreign"};
  }
  if (from.rank > max_rank) throw Refused{"rank"};
  to.dtype = dtype_of(from.dtype);
  to.itemsize = (from.dtype.bits * from.dtype.lanes + 7) / 8;
  to.rank = from.rank;
  int64_t step = 1;
  for (int dim = from.rank - 1; dim >= 0; --dim) {
    to.shape[dim] = from.shape[dim];
    to.stride[dim] = from.strides ? from.strides[dim] : step;
    step *= from.shape[dim];
  }
  to.data = static_cast<char*>(from.data) + from.byte_offset;
  return to;
}

inline Tensor view_by_attributes(PyObject* object) {
  if (attribute(object, names().is_cpu).ptr() != Py_True && attribute(object, names().is_cuda).ptr() != Py_True) {
    throw Detour{"foreign"};
  }
  Tensor to;
  nb::object stride;
  try {
    stride = method(object, names().stride);
    to.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(method(object, names().data_ptr)));
  } catch (nb::python_error&) {
    throw Detour{"foreign"};
  }
  const nb::object dtype = attribute(object, names().dtype);
  for (int code = 0; code < static_cast<int>(DType::other); ++code) {
    if (torch().dtypes[code] == dtype.ptr()) to.dtype = static_cast<DType>(code);
  }
  to.itemsize = nb::cast<int>(method(object, names().element_size));
  to.device = nb::cast<int>(method(object, names().get_device));
  const nb::object shape = attribute(object, names().shape);
  const auto rank = static_cast<int>(nb::len(shape));
  if (rank > max_rank) throw Refused{"rank"};
  to.rank = rank;
  for (int dim = 0; dim < rank; ++dim) {
    to.shape[dim] = nb::cast<int64_t>(shape[dim]);
    to.stride[dim] = nb::cast<int64_t>(stride[dim]);
  }
  return to;
}

// True inside torch.autograd.forward_ad.dual_level(): a tensor may then carry a tangent that requires_grad does not show.
inline bool forward_level_open() {
  PyObject* level = PyDict_GetItem(torch().forward_ad, names().current_level);  // borrowed
  return level && PyLong_AsLong(level) >= 0;
}

// Both through the descriptors that were looked up once: on the hot path a lookup costs as much as the question.
inline bool requires_grad(PyObject* tensor) {
  const Torch& state = torch();
  PyObject* value = state.get_requires_grad(state.requires_grad, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
  if (!value) throw nb::python_error();
  return nb::steal(value).ptr() == Py_True;
}

inline bool is_negated(PyObject* tensor) {
  PyObject* value = PyObject_Vectorcall(torch().is_neg, &tensor, 1, nullptr);
  if (!value) throw nb::python_error();
  return nb::steal(value).ptr() == Py_True;
}

// Of a number's place: most objects there are of an exact type, and told at once.
inline bool is_torch_tensor(nb::handle object) {
  if (PyLong_CheckExact(object.ptr()) || PyFloat_CheckExact(object.ptr()) || !torch().tensor_type) return false;
  return PyObject_IsInstance(object.ptr(), reinterpret_cast<PyObject*>(torch().tensor_type)) == 1;
}

// `admitted`: the call comes from torch.library, below autograd, functorch and the modes, or from the gate.
inline Tensor tensor_from_python(nb::handle object, const char* argument, bool admitted) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  const bool exact = type == torch().tensor_type || type == torch().parameter_type;
  if (!exact) {
    const int derived = PyObject_IsInstance(object.ptr(), reinterpret_cast<PyObject*>(torch().tensor_type));
    if (derived != 1) {
      PyErr_Clear();
      wrong_type(argument, "a torch.Tensor", python_type(object));
    }
    if (!admitted) throw Detour{"subclass"};
  }
  // A tensor without requires_grad is the common case: the grad mode is only asked where it matters.
  if (!admitted && requires_grad(object.ptr()) && invoke(torch().grad_enabled).ptr() == Py_True) throw Detour{"grad"};
  // The exchange hands out the bits of a pending negation (the imaginary part of a conjugate) without a word about it.
  if (is_negated(object.ptr())) throw Refused{"negation"};

  Tensor view = torch().api ? view_by_exchange(object.ptr()) : view_by_attributes(object.ptr());
  if (!view.data && view.numel() != 0) throw Detour{"foreign"};  // a FakeTensor has a shape and no memory
  return view;
}

// ---- Tensor -> torch.Tensor -----------------------------------------------------------------------------------

inline void raise_allocation(const std::string& kind, const std::string& message) {
  const bool memory = kind == "MemoryError" || message.find("out of memory") != std::string::npos;
  PyErr_SetString(memory && torch().out_of_memory ? torch().out_of_memory : PyExc_RuntimeError, message.c_str());
  throw nb::python_error();
}

class ExchangeAllocator final : public Allocator {
 public:
  void* allocate(Tensor& like) override {
    dlpack::DLTensor prototype{};
    prototype.device = {dlpack::device_cuda, like.device};
    prototype.rank = like.rank;
    prototype.dtype = dlpack_of(like.dtype);
    prototype.shape = like.shape.data();
    dlpack::ManagedTensor* made = nullptr;
    struct Error {
      std::string kind, message;
    } error;
    const auto keep = [](void* context, const char* kind, const char* message) {
      *static_cast<Error*>(context) = {kind ? kind : "", message ? message : ""};
    };
    if (torch().api->allocate(&prototype, &made, &error, keep) != 0) {
      PyErr_Clear();
      raise_allocation(error.kind, error.message.empty() ? "torch could not allocate" : error.message);
    }
    like.data = static_cast<char*>(made->tensor.data) + made->tensor.byte_offset;
    return made;
  }

  void release(void* owner) override {
    auto* made = static_cast<dlpack::ManagedTensor*>(owner);
    if (made->deleter) made->deleter(made);
  }
};

class AttributeAllocator final : public Allocator {
 public:
  void* allocate(Tensor& like) override {
    nb::list shape;
    for (int dim = 0; dim < like.rank; ++dim) shape.append(like.shape[dim]);
    const nb::handle module = torch().module;
    const nb::handle dtype = torch().dtypes[static_cast<int>(like.dtype)];
    const std::string device = "cuda:" + std::to_string(like.device);
    nb::object made = module.attr("empty")(shape, nb::arg("dtype") = dtype, nb::arg("device") = device.c_str());
    like.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(method(made.ptr(), names().data_ptr)));
    return made.release().ptr();
  }

  void release(void* owner) override { Py_DECREF(static_cast<PyObject*>(owner)); }
};

inline Allocator& allocator() {
  static ExchangeAllocator by_exchange;
  static AttributeAllocator by_attributes;
  if (torch().api) return by_exchange;
  return by_attributes;
}

inline nb::object to_python(Buffer&& buffer) {
  void* owner = buffer.take();
  if (!torch().api) return nb::steal(static_cast<PyObject*>(owner));
  void* object = nullptr;
  if (torch().api->object_from_managed(static_cast<dlpack::ManagedTensor*>(owner), &object) != 0) {
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

template <class... Buffers>
nb::object to_python(std::tuple<Buffers...>&& buffers) {
  return std::apply([](auto&... each) { return nb::object(nb::make_tuple(to_python(std::move(each))...)); }, buffers);
}

inline void* current_stream(int device) {
  if (torch().api) {
    void* stream = nullptr;
    if (torch().api->current_stream(dlpack::device_cuda, device, &stream) != 0) throw nb::python_error();
    return stream;
  }
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(nb::handle(torch().current_stream)(device)));
}

}  // namespace prequal
