// A CUDA device without a GPU, for a CPU build of torch: tensors that say cuda:0 and whose memory is
// the host's. Every operation on them runs as on a GPU up to the dispatcher (autograd, autocast,
// decompositions), and then on the CPU; or, with shapes_only, not at all, unless it only takes few
// integers: ids, masks and positions decide shapes. It refuses what a GPU refuses, and tells gpu.py
// of each launch, copy and host sync. Load it before torch is imported: torch looks for the hooks of
// CUDA once. Until pretend_start there is no GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
using torch::jit::Stack;

namespace {

// ---------------------------------------------------------------- what gpu.py sets and reads

// In the order of Event in gpu.py.
enum Kind : int { LAUNCH, SYNC, TO_DEVICE, TO_DEVICE_PINNED, TO_HOST, TO_HOST_PINNED };
using Listener = void (*)(int kind, const char* operation);
Listener listener = nullptr;
bool is_on = false;
bool shapes_only = false;
DeviceIndex num_devices = 0;
constexpr int64_t FEW = 1 << 20;  // integers that are computed with shapes_only
constexpr DeviceIndex MOST_DEVICES = 3;  // autograd starts a thread for each, once

void tell(Kind kind, const char* operation) {
  if (listener) listener(kind, operation);
}

// ---------------------------------------------------------------- memory

struct Memory {
  std::atomic<int64_t> used{0}, peak{0}, limit{INT64_MAX};
} memory;

std::mutex pinned_mutex;
std::unordered_map<const char*, size_t> pinned;  // blocks of pinned host memory

constexpr size_t FILLED = 1 << 24;

std::set<const void*>* captured_blocks = nullptr;  // allocated in the capture: the graph keeps them

int64_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }  // as torch's allocator

struct Block {
  void* data;
  size_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memory.used -= rounded(block->bytes);
  std::free(block->data);
  delete block;
}

DeviceIndex& current() {
  static thread_local DeviceIndex device = 0;
  return device;
}

struct OnDevice {  // for a scope
  DeviceIndex before = current();
  explicit OnDevice(DeviceIndex index) { current() = index; }
  ~OnDevice() { current() = before; }
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(DeviceType::CUDA, current());
    if (bytes == 0) return {nullptr, device};
    int64_t wanted = rounded(bytes), used = memory.used += wanted;
    if (used > memory.limit) {
      memory.used -= wanted;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                       wanted >> 20, " MiB. GPU 0 has a total capacity of ",
                       memory.limit.load() >> 20, " MiB of which ",
                       (memory.limit - used + wanted) >> 20, " MiB is free.");
    }
    for (int64_t seen = memory.peak; seen < used && !memory.peak.compare_exchange_weak(seen, used);) {
    }
    // Fresh memory is not zero, as a GPU's is not: it begins with NaN. The rest is not touched, so
    // that large buffers take no memory of the host. With shapes_only few integers are 0 until they
    // are computed.
    bool is_small = bytes <= FEW * sizeof(int64_t);
    void* data = shapes_only && is_small ? std::calloc(bytes, 1) : std::malloc(bytes);
    TORCH_CHECK(data != nullptr, "the host has no memory left for its pretended GPU");
    if (!shapes_only) std::memset(data, 0xff, std::min(bytes, FILLED));
    if (captured_blocks) captured_blocks->insert(data);
    return {data, new Block{data, bytes}, &free_block, device};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    if (!shapes_only) std::memcpy(target, source, bytes);
  }
};
DeviceAllocator allocator;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<char*>(data));
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(data)] = bytes;
    return {data, data, &free_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  for (auto& [start, bytes] : pinned)
    if (start <= data && data < start + bytes) return true;
  return false;
}

// ---------------------------------------------------------------- copies that the host awaits

// Copies to pinned memory arrive when the host waits for the device, and not before.
std::vector<std::pair<at::Tensor, at::Tensor>> underway;

void deliver() {
  for (auto& [target, value] : std::exchange(underway, {})) target.copy_(value);
}

void wait_for(const char* operation) {
  tell(SYNC, operation);
  deliver();
}

// ---------------------------------------------------------------- devices, streams and hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device to) const override {
    Device before = getDevice();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return {DeviceType::CUDA, current()}; }
  void setDevice(Device to) const override { current() = to.index() < 0 ? current() : to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { setDevice(to); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return MOST_DEVICES; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for("stream"); }
  void synchronizeEvent(void*) const override { wait_for("event"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return is_on; }
  bool isBuilt() const override { return is_on; }
  bool isAvailable() const override { return is_on; }
  bool hasPrimaryContext(DeviceIndex) const override { return is_on; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return current(); }
  DeviceIndex getCurrentDevice() const override { return current(); }
  void setCurrentDevice(DeviceIndex device) const override { current() = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current(), device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex) const override { wait_for("device"); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, current()}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name

// ---------------------------------------------------------------- graphs

struct Recorded {
  c10::OperatorHandle operation;
  Stack arguments;
  std::vector<at::Tensor> results;  // empty if the operation writes to its arguments
};
struct Outside {  // memory that a graph reads or writes and does not keep
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  std::string use;
};
struct Graph {
  std::vector<Recorded> operations;
  std::set<const void*> blocks;
  std::unordered_map<c10::StorageImpl*, Outside> outside;
};
std::vector<std::unique_ptr<Graph>> graphs;
Graph* captured = nullptr;

void refuse_in_capture(const char* what, const std::string& operation) {
  TORCH_CHECK(captured == nullptr, "CUDA error: operation not permitted when stream is capturing (",
              what, " by ", operation, ")");
}

// ---------------------------------------------------------------- running an operation

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DeviceType::CUDA;
}

// The memory of a tensor as a tensor of the CPU, or its shape as a tensor without memory.
at::Tensor stand_in(const at::Tensor& tensor, DeviceType type) {
  auto* impl = tensor.unsafeGetTensorImpl();
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  // It keeps the tensor: gloo may still read it when the caller has dropped it.
  auto* keeper = new c10::Storage(impl->unsafe_storage());
  c10::DataPtr data(type == DeviceType::CPU ? storage->mutable_data() : nullptr, keeper,
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, Device(type));
  auto alias = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(data),
      c10::GetAllocator(type == DeviceType::Meta ? DeviceType::Meta : DeviceType::CPU), true);
  auto key = type == DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(alias), c10::DispatchKeySet(key), tensor.dtype());
  auto* made = result.unsafeGetTensorImpl();
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (impl->is_wrapped_number()) made->set_wrapped_number(true);
  return result;
}

struct Aliases {
  DeviceType type;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // original, stand-in

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor) && (type == DeviceType::CPU || tensor.dim() == 0)) return tensor;
    for (auto& [original, made] : pairs)
      if (original.is_same(tensor)) return made;
    pairs.emplace_back(tensor, stand_in(tensor, type));
    return pairs.back().second;
  }
};

// Replace every tensor and device in a value.
IValue mapped(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& of) {
  if (value.isTensor()) return of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(of(each));
    return list;
  }
  if (value.isList()) {
    auto given = value.toList();
    c10::impl::GenericList list(given.elementType());
    for (size_t i = 0; i < given.size(); ++i) list.push_back(mapped(given.get(i), of));
    return list;
  }
  return value;
}

void visit(const IValue& value, const std::function<void(const at::Tensor&)>& see) {
  if (value.isTensor()) return see(value.toTensor());
  if (value.isList())
    for (const IValue& each : value.toListRef()) visit(each, see);
}

// True for a tensor whose values matter even if only shapes are computed.
bool is_exact(const at::Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), true) && tensor.numel() <= FEW;
}

// A tensor on the device with what a CPU kernel computed, if one did.
at::Tensor adopted(const at::Tensor& made, DeviceIndex index) {
  OnDevice there(index);
  auto result = at::detail::empty_strided_generic(made.sizes(), made.strides(), &allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  made.scalar_type());
  if (made.device().type() == DeviceType::CPU && made.numel() > 0) {
    size_t extent = at::detail::computeStorageNbytes(made.sizes(), made.strides(), made.itemsize());
    std::memcpy(result.storage().mutable_data(), made.data_ptr(), extent);
  }
  return at::Tensor(std::move(result));
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

at::Tensor view_of(const at::Tensor& original, const at::Tensor& shape, c10::Storage storage) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), original.unsafeGetTensorImpl()->key_set(),
      shape.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(),
                                                      shape.storage_offset());
  return result;
}

// What a kernel did to the shape of an argument, or to the size of its memory.
void follow_resize(const at::Tensor& original, const at::Tensor& made) {
  auto* impl = original.unsafeGetTensorImpl();
  if (made.storage().nbytes() <= original.storage().nbytes()) {
    if (original.sizes() != made.sizes() || original.strides() != made.strides() ||
        original.storage_offset() != made.storage_offset())
      impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    return;
  }
  auto fresh = adopted(made, original.device().index());
  impl->set_storage_keep_dtype(fresh.storage());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
}

// The tensor as a captured operation knows it: an address. Memory from outside of the capture is
// not kept, and may be freed or moved before a replay.
at::Tensor remembered(const at::Tensor& tensor, const std::string& operation) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.storage().nbytes() == 0) return tensor;
  if (!on_device(tensor) && !is_pinned(tensor.storage().data())) return tensor;
  c10::Storage storage = tensor.storage();
  auto* impl = storage.unsafeGetStorageImpl();
  if (!captured->blocks.count(storage.data())) {
    std::ostringstream use;
    use << tensor.scalar_type() << " " << tensor.sizes() << " of " << operation;
    captured->outside.emplace(impl, Outside{storage.getWeakStorageImpl(), storage.data(), use.str()});
    storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
        c10::DataPtr(impl->mutable_data(), tensor.device()), nullptr, false));
  }
  return view_of(tensor, tensor, storage);
}

// Add an operation to the graph; its arguments and results become addresses.
void record(const c10::OperatorHandle& operation, const Stack& given, const Stack& results) {
  const std::string& name = operation.schema().name();
  auto address = [&](const at::Tensor& each) { return remembered(each, name); };
  Recorded recorded{operation, {}, {}};
  for (const IValue& each : given) recorded.arguments.push_back(mapped(each, address));
  if (!operation.schema().is_mutable())
    for (const IValue& each : results)
      visit(each, [&](const at::Tensor& made) { recorded.results.push_back(address(made)); });
  captured->operations.push_back(std::move(recorded));
}

// What a graph would read or write although it was freed or moved since the capture; or nothing.
std::string lost_memory(const Graph& graph) {
  for (auto& [_, each] : graph.outside) {
    auto storage = each.storage.lock();
    if (!storage) return each.use + " was freed";
    if (storage->data() != each.data) return each.use + " has moved";
  }
  return "";
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return false;
  for (const auto& each : schema.returns())
    if (each.alias_info()) return true;
  return false;
}

bool begins_with(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// Operations whose result's shape or value the host has to wait for.
bool waits(const std::string& name, const Stack& arguments) {
  static const std::set<std::string> waiting = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
      "aten::is_nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount"};
  if (waiting.count(name)) return true;
  if (!begins_with(name, "aten::index") && !begins_with(name, "aten::_index_put_impl_") &&
      !begins_with(name, "aten::_unsafe_index"))
    return false;
  bool has_mask = false;
  if (arguments.size() > 1)
    visit(arguments[1], [&](const at::Tensor& index) {
      has_mask |= index.defined() && on_device(index) &&
                  (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    });
  return has_mask;
}

bool takes_host_indices(const std::string& name) {
  return begins_with(name, "aten::index") || begins_with(name, "aten::_index_put_impl_");
}

void compute(const c10::OperatorHandle& operation, Stack& arguments, DeviceType type) {
  auto key = type == DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  operation.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
}

bool takes_exact_values(const Stack& arguments) {
  bool has_any = false, are_exact = true;
  for (const IValue& value : arguments)
    visit(value, [&](const at::Tensor& each) {
      if (!each.defined()) return;
      has_any = true;
      are_exact &= is_exact(each);
    });
  return has_any && are_exact;
}

bool has_meta_kernel(const c10::OperatorHandle& operation) {
  return operation.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
         operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         operation.hasKernelForDispatchKey(
             c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Run the operation on stand-ins of its arguments, and put its results on the device.
Stack on_stand_ins(const c10::OperatorHandle& operation, const Stack& given, DeviceType type,
                   DeviceIndex index) {
  const auto& schema = operation.schema();
  Aliases aliases{type, {}};
  Stack arguments;
  for (size_t i = 0; i < given.size(); ++i) {
    IValue value = mapped(given[i], [&](const at::Tensor& each) { return aliases.of(each); });
    if (value.isDevice()) value = Device(type);
    if (schema.arguments()[i].name() == "pin_memory") value = IValue();
    arguments.push_back(std::move(value));
  }
  compute(operation, arguments, type);
  for (auto& [original, made] : aliases.pairs)
    if (on_device(original)) follow_resize(original, made);
  auto to_device = [&](const at::Tensor& made) -> at::Tensor {
    if (!made.defined()) return made;
    for (auto& [original, alias] : aliases.pairs)
      if (alias.is_same(made)) return original;
    for (auto& [original, alias] : aliases.pairs)
      if (on_device(original) && same_storage(alias, made)) return view_of(original, made, original.storage());
    return adopted(made, index);
  };
  Stack results;
  for (const IValue& each : arguments) results.push_back(mapped(each, to_device));
  return results;
}

void push(Stack* stack, size_t num_arguments, Stack results) {
  torch::jit::drop(*stack, num_arguments);
  for (IValue& each : results) stack->push_back(std::move(each));
}

void run(const c10::OperatorHandle& operation, Stack* stack) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  size_t num_arguments = schema.arguments().size();
  Stack given(stack->end() - num_arguments, stack->end());

  std::optional<DeviceIndex> index;
  bool has_host = false;
  for (size_t i = 0; i < given.size(); ++i) {
    bool may_be_host = i == 1 && takes_host_indices(name);
    visit(given[i], [&](const at::Tensor& each) {
      if (!each.defined()) return;
      if (!on_device(each)) {
        has_host |= each.dim() > 0 && !may_be_host && each.device().type() == DeviceType::CPU;
        return;
      }
      TORCH_CHECK(!index || *index == each.device().index(),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "cuda:", int(index.value_or(0)), " and ", each.device(), "! (", name, ")");
      index = each.device().index();
    });
    if (given[i].isDevice() && given[i].toDevice().type() == DeviceType::CUDA && !index)
      index = given[i].toDevice().has_index() ? given[i].toDevice().index() : current();
  }
  bool is_collective = begins_with(name, "c10d::");
  TORCH_CHECK(!has_host || is_collective,
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:", int(index.value_or(0)), " and cpu! (", name, ")");
  DeviceIndex place = index.value_or(current());
  if (is_view(schema))  // shapes alone: no launch
    return push(stack, num_arguments, on_stand_ins(operation, given, DeviceType::CPU, place));
  if (waits(name, given)) {
    refuse_in_capture("a wait", name);
    tell(SYNC, name.c_str());
  }
  if (takes_host_indices(name) && given.size() > 1)
    visit(given[1], [&](const at::Tensor& each) {
      if (!each.defined() || on_device(each)) return;
      refuse_in_capture("a copy of pageable memory", name);
      tell(TO_DEVICE, name.c_str());
    });
  tell(LAUNCH, name.c_str());
  if (captured == nullptr || shapes_only) {
    bool computes = !shapes_only || takes_exact_values(given) || !has_meta_kernel(operation) ||
                    is_collective;
    auto type = computes ? DeviceType::CPU : DeviceType::Meta;
    return push(stack, num_arguments, on_stand_ins(operation, given, type, place));
  }
  // A captured operation runs when the graph is replayed; until then its results hold NaN.
  Stack results = on_stand_ins(operation, given, DeviceType::Meta, place);
  record(operation, given, results);
  push(stack, num_arguments, std::move(results));
}

void fallback(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  run(operation, stack);
}

// ---------------------------------------------------------------- operations with rules of their own

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  OnDevice there(device && device->has_index() ? device->index() : current());
  return at::Tensor(at::detail::empty_generic(size, &allocator,
                                              c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                              c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  OnDevice there(device && device->has_index() ? device->index() : current());
  return at::Tensor(at::detail::empty_strided_generic(size, stride, &allocator,
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                      c10::dtype_or_default(dtype)));
}

// oneDNN's product of 16-bit matrices reads past rows of odd length, where fresh memory has NaN. A
// GPU's does not: it gets rows without padding.
void product(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  for (auto value = stack->end() - 2; value != stack->end(); ++value) {
    auto matrix = value->toTensor();
    bool is_padded = matrix.stride(1) == 1 && matrix.stride(0) > matrix.size(1);
    if (matrix.itemsize() == 2 && is_padded) *value = matrix.contiguous();
  }
  run(operation, stack);
}

// A GPU multiplies 16-bit matrices into fp32 sums; for a CPU torch has no such product.
at::Tensor product_in_fp32(const at::Tensor& a, const at::Tensor& b, at::ScalarType wanted) {
  return at::mm(a.to(wanted), b.to(wanted));
}

at::Tensor& product_in_fp32_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType wanted,
                                at::Tensor& out) {
  return at::mm_out(out, a.to(wanted), b.to(wanted));
}

// A GPU's softmax can read fp16 and write fp32. A CPU's cannot: its input is converted before, and
// the gradient of its input after.
void softmax(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  auto& input = (*stack)[stack->size() - 3];
  if (stack->back().toBool()) input = input.toTensor().to(at::kFloat);
  stack->back() = false;
  run(operation, stack);
}

void softmax_gradient(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  auto own = (*stack)[stack->size() - 4].toTensor().scalar_type();
  auto wanted = stack->back().toScalarType();
  stack->back() = own;
  run(operation, stack);
  if (wanted != own) stack->back() = stack->back().toTensor().to(wanted);
}

void copy_boxed(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
  Stack given(stack->end() - 3, stack->end());
  at::Tensor target = given[0].toTensor(), source = given[1].toTensor();
  bool is_async = given[2].toBool();
  if (on_device(target) && on_device(source)) return run(operation, stack);
  const at::Tensor& host = on_device(target) ? source : target;
  bool pinned_memory = is_pinned(host.storage().data());
  bool to_device = on_device(target);
  if (!pinned_memory) refuse_in_capture("a copy of pageable memory", "aten::copy_");
  // A copy waits for the device unless its host memory is pinned and it is asked not to.
  tell(to_device ? (pinned_memory ? TO_DEVICE_PINNED : TO_DEVICE)
                 : (pinned_memory ? TO_HOST_PINNED : TO_HOST),
       pinned_memory && is_async ? "async" : "waits");
  if (captured && !shapes_only) {
    record(operation, given, {});
    return push(stack, 3, {target});
  }
  if (shapes_only && !is_exact(source)) {
    if (!to_device && target.numel()) target.zero_();
    return push(stack, 3, {target});
  }
  if (to_device) deliver();  // the device makes its copies one after the other
  push(stack, 3, on_stand_ins(operation, given, DeviceType::CPU, current()));
  if (!(pinned_memory && is_async)) return deliver();
  if (to_device) return;
  underway.emplace_back(target, target.clone());
  if (target.is_floating_point()) target.fill_(NAN);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  refuse_in_capture("a wait", "aten::_local_scalar_dense");
  wait_for("aten::_local_scalar_dense");
  if (shapes_only && !is_exact(tensor)) return at::Scalar(0);
  return stand_in(tensor, DeviceType::CPU).item();
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needs = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(),
                                                            tensor.storage_offset());
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needs > storage->nbytes()) {
    c10::DataPtr fresh = allocator.allocate(needs);
    if (storage->nbytes()) allocator.copy_data(fresh.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(needs);
  }
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return tensor;
}

at::Tensor& set_source(at::Tensor& tensor, at::Storage source) {
  int64_t length = source.nbytes() / tensor.itemsize();
  return set_storage(tensor, source, 0, c10::SymIntArrayRef{c10::SymInt(length)}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  return set_tensor(tensor, empty({0}, tensor.scalar_type(), {}, tensor.device(), {}, {}));
}

void record_stream(at::Tensor&, at::Stream) {}

// The attention that a GPU would choose, if only shapes are computed; the CPU has no such kernels.
int64_t attention_of(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                     const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                     bool) {
  if (!shapes_only) return int64_t(at::SDPBackend::math);
  bool is_flash = !mask && query.scalar_type() != at::kFloat && query.size(-1) <= 256;
  return int64_t(is_flash ? at::SDPBackend::flash_attention
                          : at::SDPBackend::efficient_attention);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", &product_in_fp32);
  m.impl("mm.dtype_out", &product_in_fp32_out);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_boxed>());
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("mm", torch::CppFunction::makeFromBoxedFunction<&product>());
  m.impl("_softmax", torch::CppFunction::makeFromBoxedFunction<&softmax>());
  m.impl("_softmax_backward_data", torch::CppFunction::makeFromBoxedFunction<&softmax_gradient>());
  // A GPU has a kernel for it; torch's fallback takes five operations.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Torch warns that the kernels of NCCL, which a CPU build lacks, are replaced.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} silence;
c10::WarningHandler* const told = c10::WarningUtils::get_warning_handler();
const bool is_silent = (c10::WarningUtils::set_warning_handler(&silence), true);

// Collectives of tensors on the device are those of gloo on the same memory.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_",
        "gather_", "scatter_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
const bool is_heard = (c10::WarningUtils::set_warning_handler(told), true);

}  // namespace

// ---------------------------------------------------------------- called from gpu.py

extern "C" {
void pretend_load() {
  static Guard guard;
  c10::SetAllocator(DeviceType::CUDA, &allocator, 255);
  c10::impl::registerDeviceGuard(DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_of);
}
void pretend_start(int devices, int64_t limit, Listener told) {
  num_devices = devices;
  memory.limit = limit;
  memory.peak = memory.used.load();
  listener = told;
  is_on = true;
}
void pretend_stop() {
  is_on = false;
  listener = nullptr;
}
void pretend_limit(int64_t bytes) { memory.limit = bytes; }
void pretend_shapes_only(int on) { shapes_only = on; }
int64_t pretend_used() { return memory.used; }
int64_t pretend_peak() { return memory.peak; }
void pretend_reset_peak() { memory.peak = memory.used.load(); }
int pretend_current() { return current(); }
void pretend_set_device(int device) { current() = device; }
int pretend_capture() {
  graphs.push_back(std::make_unique<Graph>());
  captured = graphs.back().get();
  captured_blocks = &captured->blocks;
  return graphs.size() - 1;
}
void pretend_end_capture() {
  captured = nullptr;
  captured_blocks = nullptr;
}
// Return the error of a replay; nullptr if it has none.
const char* pretend_replay(int number) {
  static std::string error;
  try {
    error = lost_memory(*graphs[number]);
    if (!error.empty()) return error.c_str();
    for (Recorded& each : graphs[number]->operations) {
      Stack results = on_stand_ins(each.operation, each.arguments, DeviceType::CPU, current());
      if (each.results.empty()) continue;  // written to its arguments
      size_t next = 0;
      for (const IValue& value : results)
        visit(value, [&](const at::Tensor& tensor) {
          const at::Tensor& kept = each.results[next++];
          if (tensor.defined()) std::memcpy(kept.data_ptr(), tensor.data_ptr(), tensor.nbytes());
        });
    }
    return nullptr;
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
  }
}
void pretend_forget(int number) { graphs[number].reset(); }
}
