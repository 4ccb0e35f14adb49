// prequal._native: one line an op, then what runtime/ needs to watch and steer them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "binding.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace prequal;

namespace {

OpState& op_at(int index) {
  if (index < 0 || index >= state().count) throw nb::index_error("op: expected an index into ops()");
  return state().ops[index];
}

int device_at(int index) {
  if (index < 0 || index >= max_devices) throw nb::index_error("device: expected a CUDA ordinal below 64");
  return index;
}

// torch, and what of it is not public: handed over by prequal.registry
void attach(nb::handle module, nb::handle dispatch_modes, nb::object current_stream) {
  Torch& torch_side = torch();
  torch_side.module = module.inc_ref().ptr();
  torch_side.tensor_type = reinterpret_cast<PyTypeObject*>(nb::object(module.attr("Tensor")).release().ptr());
  torch_side.parameter_type =
      reinterpret_cast<PyTypeObject*>(nb::object(module.attr("nn").attr("Parameter")).release().ptr());
  torch_side.dispatch_modes = dispatch_modes.inc_ref().ptr();
  torch_side.forward_ad = nb::object(module.attr("autograd").attr("forward_ad").attr("__dict__")).release().ptr();
  const nb::object tensor_type = module.attr("Tensor");
  torch_side.is_neg = nb::object(tensor_type.attr("is_neg")).release().ptr();
  torch_side.requires_grad = nb::object(tensor_type.attr("requires_grad")).release().ptr();
  torch_side.get_requires_grad =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(torch_side.requires_grad), Py_tp_descr_get));
  if (!torch_side.get_requires_grad) throw nb::type_error("torch.Tensor.requires_grad: expected a descriptor");
  torch_side.grad_enabled = nb::object(module.attr("is_grad_enabled")).release().ptr();
  torch_side.current_stream = current_stream.release().ptr();
  torch_side.out_of_memory = nb::object(module.attr("OutOfMemoryError")).release().ptr();
  for (int code = 0; code < static_cast<int>(DType::other); ++code) {
    torch_side.dtypes[code] = nb::object(module.attr(name_of(static_cast<DType>(code)))).release().ptr();
  }
}

// True where torch offers the DLPack C exchange API in a version this module reads, and it is wanted.
bool use_exchange_api(bool wanted) {
  torch().api = nullptr;
  if (!wanted || !torch().tensor_type) return false;
  nb::object capsule = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(torch().tensor_type)),
                                   "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return false;
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) {
    PyErr_Clear();
    return false;
  }
  while (api && api->version.major > 1) api = api->previous;
  if (!api || api->version.major != 1 || !api->view_from_object) return false;
  torch().api = api;  // lives as long as torch
  return true;
}

// How many kernels the files of each basename launch.
std::map<std::string, int> kernel_counts() {
  std::map<std::string, int> counts;
  for (const Kernel& kernel : kernels()) ++counts[kernel.basename];
  return counts;
}

// Loads the kernels of these files, of None all, on the current context of this device: no later launch of theirs loads a
// module. How many there are.
int preload(int device, const std::optional<std::string>& basename) {
  int loaded = 0;
  try {
    DeviceGuard guard(device_at(device));
    for (const Kernel& kernel : kernels()) {
      if (basename && *basename != kernel.basename) continue;
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel.function), "preload");
      ++loaded;
    }
  } catch (const CudaFailure& error) {
    throw std::runtime_error("preload on cuda:" + std::to_string(device) + ": " + error.what());
  }
  return loaded;
}

}  // namespace

NB_MODULE(_native, m) {
  def<ops::rms_norm>(m, "rms_norm", {"x", "weight", "eps", "weight_offset", "exact_rounding"});
  def<ops::rms_norm_backward>(m, "rms_norm_backward",
                              {"grad", "x", "weight", "eps", "added", "weight_offset", "weight_grad"});
  def<ops::fused_add_rms_norm>(m, "fused_add_rms_norm",
                               {"x", "residual", "weight", "eps", "weight_offset", "exact_rounding"});
  def<ops::fused_add_rms_norm_>(m, "fused_add_rms_norm_",
                                {"x", "residual", "weight", "eps", "weight_offset", "exact_rounding"});
  def<ops::layer_norm>(m, "layer_norm", {"x", "weight", "bias", "eps"});
  def<ops::layer_norm_backward>(m, "layer_norm_backward", {"grad", "x", "weight", "eps", "weight_grad", "bias_grad"});
  def<ops::swiglu>(m, "swiglu", {"gate", "up", "exact_rounding"});
  def<ops::swiglu_>(m, "swiglu_", {"gate", "up", "exact_rounding"});
  def<ops::swiglu_packed>(m, "swiglu_packed", {"x", "interleaved", "exact_rounding"});
  def<ops::swiglu_backward>(m, "swiglu_backward", {"grad", "gate", "up"});
  def<ops::swiglu_packed_backward>(m, "swiglu_packed_backward", {"grad", "x", "interleaved"});
  def<ops::geglu>(m, "geglu", {"gate", "up", "approximate", "exact_rounding"});
  def<ops::geglu_>(m, "geglu_", {"gate", "up", "approximate", "exact_rounding"});
  def<ops::geglu_packed>(m, "geglu_packed", {"x", "approximate", "interleaved", "exact_rounding"});
  def<ops::geglu_backward>(m, "geglu_backward", {"grad", "gate", "up", "approximate"});
  def<ops::geglu_packed_backward>(m, "geglu_packed_backward", {"grad", "x", "approximate", "interleaved"});
  def<ops::quantize_fp8>(m, "quantize_fp8",
                         {"x", "granularity", "dtype", "scale", "scale_upper_bound", "ue8m0", "scale_layout"});
  def<ops::dequantize_fp8>(m, "dequantize_fp8", {"q", "scale", "granularity", "dtype", "scale_layout"});
  def<ops::rms_norm_quantize_fp8>(m, "rms_norm_quantize_fp8",
                                  {"x", "weight", "eps", "granularity", "dtype", "weight_offset", "exact_rounding",
                                   "scale_upper_bound", "ue8m0", "scale_layout"});
  def<ops::fused_add_rms_norm_quantize_fp8>(m, "fused_add_rms_norm_quantize_fp8",
                                            {"x", "residual", "weight", "eps", "granularity", "dtype", "weight_offset",
                                             "exact_rounding", "scale_upper_bound", "ue8m0", "scale_layout"});
  def<ops::swiglu_quantize_fp8>(
      m, "swiglu_quantize_fp8",
      {"gate", "up", "granularity", "dtype", "exact_rounding", "scale_upper_bound", "ue8m0", "scale_layout"});
  def<ops::rope>(m, "rope",
                 {"q", "k", "cos", "sin", "positions", "interleaved", "rotary_dim", "inverse", "exact_rounding"});
  def<ops::rope_>(m, "rope_",
                  {"q", "k", "cos", "sin", "positions", "interleaved", "rotary_dim", "inverse", "exact_rounding"});
  def<ops::qk_rms_norm_rope_qkv>(
      m, "qk_rms_norm_rope_qkv",
      {"qkv", "q_gamma", "k_gamma", "cos", "sin", "coords", "eps", "interleaved", "exact_rounding", "base"});
  def<ops::qk_rms_norm_rope_qkv_inplace>(
      m, "qk_rms_norm_rope_qkv_inplace",
      {"qkv", "q_gamma", "k_gamma", "cos", "sin", "coords", "eps", "interleaved", "exact_rounding", "base"});
  def<ops::qk_rms_norm_rope_qkv_backward>(
      m, "qk_rms_norm_rope_qkv_backward",
      {"grad", "qkv", "q_gamma", "k_gamma", "cos", "sin", "coords", "eps", "interleaved", "base"});
  def<ops::qk_rms_norm_cross>(m, "qk_rms_norm_cross", {"q", "kv", "q_gamma", "k_gamma", "eps"});
  def<ops::qk_rms_norm_cross_inplace>(m, "qk_rms_norm_cross_inplace", {"q", "kv", "q_gamma", "k_gamma", "eps"});
  def<ops::qk_rms_norm_cross_backward>(m, "qk_rms_norm_cross_backward",
                                       {"grad_q", "grad_kv", "q", "kv", "q_gamma", "k_gamma", "eps"});
  def<ops::sparse_layer_norm_affine>(m, "sparse_layer_norm_affine",
                                     {"x", "scale", "shift", "batch", "ptr", "eps", "add_one"});
  def<ops::sparse_layer_norm_affine_backward>(
      m, "sparse_layer_norm_affine_backward",
      {"grad", "x", "scale", "batch", "ptr", "eps", "add_one", "scale_grad", "shift_grad"});
  def<ops::sparse_batch_mul_add>(m, "sparse_batch_mul_add", {"x", "gate", "residual", "batch", "ptr"});
  def<ops::sparse_batch_mul_add_>(m, "sparse_batch_mul_add_", {"x", "gate", "residual", "batch", "ptr"});
  def<ops::sparse_batch_mul_add_backward>(m, "sparse_batch_mul_add_backward",
                                          {"grad", "x", "gate", "batch", "ptr", "gate_grad"});
  def<ops::sparse_gate_add_layer_norm_affine>(
      m, "sparse_gate_add_layer_norm_affine",
      {"h", "gate", "residual", "scale", "shift", "batch", "ptr", "eps", "add_one"});
  def<ops::sparse_gate_add_layer_norm_affine_backward>(
      m, "sparse_gate_add_layer_norm_affine_backward",
      {"grad", "grad_total", "h", "gate", "total", "scale", "batch", "ptr", "eps", "add_one", "gate_grad", "scale_grad",
       "shift_grad"});
  def<ops::cross_entropy_stats>(m, "cross_entropy_stats",
                                {"logits", "target", "class_weight", "first_class", "softcap"});
  def<ops::cross_entropy_gradient_>(
      m, "cross_entropy_gradient_",
      {"logits", "lse", "target", "coefficients", "class_weight", "first_class", "softcap"});
  def<ops::cross_entropy_chunk_>(
      m, "cross_entropy_chunk_",
      {"logits", "stats", "target", "coefficients", "class_weight", "first_class", "softcap"});
  def<ops::scale_unless_one_>(m, "scale_unless_one_", {"x", "factor"});
  def<ops::linear_gelu>(m, "linear_gelu", {"x", "weight", "bias", "approximate", "exact_rounding"});
  def<ops::linear_bias>(m, "linear_bias", {"x", "weight", "bias"});
  def<ops::linear_relu>(m, "linear_relu", {"x", "weight", "bias"});
  def<ops::knn>(m, "knn", {"queries", "references", "k", "query_ptr", "reference_ptr", "radius", "index"});
  def<ops::radius>(m, "radius", {"queries", "references", "r", "max_neighbors", "query_ptr", "reference_ptr", "index"});
  def<ops::knn_index>(m, "knn_index", {"references", "reference_ptr"});
  def<ops::knn_gather>(m, "knn_gather", {"queries", "references", "values", "query_ptr", "reference_ptr", "index"});
  def<ops::knn_interpolate>(m, "knn_interpolate",
                            {"queries", "references", "values", "k", "query_ptr", "reference_ptr", "index"});
  def<ops::moe_route>(m, "moe_route",
                      {"logits", "k", "score", "renormalize", "bias", "groups", "topk_groups", "scale"});
  def<ops::moe_permute>(m, "moe_permute", {"x", "experts", "counts", "capacity"});
  def<ops::moe_unpermute>(m, "moe_unpermute", {"yp", "row_map", "weights"});
  def<ops::moe_unpermute_backward>(m, "moe_unpermute_backward", {"grad", "yp", "row_map", "weights", "weights_grad"});
  def<ops::viterbi_decode>(m, "viterbi_decode",
                           {"log_emissions", "log_transitions", "log_initial", "lengths", "end_scores",
                            "transitions_per", "band", "return_score"});
  def<ops::topk_rows_>(m, "topk_rows_",
                       {"best", "idx", "products", "row_terms", "column_terms", "metric", "first_index", "fresh"});
  def<ops::row_norms>(m, "row_norms", {"x", "form"});
  def<ops::topk_products>(m, "topk_products", {"queries", "corpus", "k", "column_terms", "metric", "first_index"});
  def<ops::pairwise_direct>(m, "pairwise_direct", {"a", "b", "p", "squared"});
  def<ops::pairwise_from_products_>(m, "pairwise_from_products_", {"products", "a_squares", "b_squares", "squared"});
  def<ops::pairwise_argmin>(m, "pairwise_argmin", {"a", "b"});
  def<ops::pairwise_within_counts>(m, "pairwise_within_counts", {"a", "b", "radius", "segment"});
  def<ops::pairwise_within_fill>(m, "pairwise_within_fill", {"a", "b", "radius", "starts", "total", "segment"});
  def<ops::message_passing_csr>(m, "message_passing_csr",
                                {"x", "row_ptr", "column", "edge", "edge_weight", "t_row_ptr", "t_column", "t_edge",
                                 "previous", "reduce", "keep", "longest", "t_longest"});
  def<ops::message_passing_csr_backward>(
      m, "message_passing_csr_backward",
      {"grad", "x", "row_ptr", "column", "edge", "edge_weight", "t_row_ptr", "t_column", "t_edge", "arg", "state",
       "previous", "reduce", "weight_grad", "t_longest"});

  m.def("ops", [] {
    nb::list all;
    for (int i = 0; i < state().count; ++i) all.append(state().ops[i].name);
    return all;
  });
  m.def("attach", &attach, "torch"_a, "dispatch_modes"_a, "current_stream"_a.none());
  m.def("use_exchange_api", &use_exchange_api, "wanted"_a);
  m.def("why", [] { return std::string(why); });
  m.def("admit", [](bool trial) { admission = trial ? Admission::trial : Admission::served; }, "trial"_a);
  m.def(
      "set_gate",
      [](int op, int device, bool open) {
        auto& gate = op_at(op).gate[device_at(device)];
        if (gate.load() != Gate::failed) gate.store(open ? Gate::open : Gate::ask);
      },
      "op"_a, "device"_a, "open"_a);
  m.def("failure", [](int op, int device) { return op_at(op).failure[device_at(device)]; }, "op"_a, "device"_a);
  m.def("scoped_flags", [](int change) { return state().scoped_flags += change; }, "change"_a);
  m.def(
      "fast_calls", [](int op, int device) { return op_at(op).fast_calls[device_at(device)].load(); }, "op"_a,
      "device"_a);
  // Seconds that this many gate checks with their counter take, on an op of its own: what benchmarks/gate.py reports.
  m.def(
      "time_gate",
      [](int64_t calls) {
        static OpState probe;
        probe.gate[0].store(Gate::open);
        const auto start = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < calls; ++i) {
          if (serves(probe, 0)) count_served(probe, 0);
        }
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (probe.fast_calls[0].exchange(0) != static_cast<uint64_t>(calls)) throw std::logic_error("time_gate");
        return taken.count();
      },
      "calls"_a);
  m.def("kernels", &kernel_counts);
  m.def("preload", &preload, "device"_a, "basename"_a.none());
  m.def("runtime_version", [] {
    int version = 0;
    cudaRuntimeGetVersion(&version);
    return version;
  });
}
