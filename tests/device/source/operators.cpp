// torch's operators on the fake CUDA devices. All but copies are computed on the CPU, at once (at::native::cpu_fallback).
// Copies are asynchronous in the most hostile order that CUDA allows:
// - to the device: the source must stay as it is until its stream is waited for; else it is a race;
// - to pinned memory: it holds 0xFF until its stream is waited for.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include "device.h"

namespace fake_cuda {

using at::Tensor;
using Optional = std::optional<Tensor>;

thread_local int inside = 0;  // operators on the CPU: their copies are no operations of a stream
thread_local std::string operation;
thread_local int pending_error = 0;  // of a function that Python has called: torch's binding leaves it

// An operator that begins or ends; `name` is that of the outermost one.
struct Inside {
    explicit Inside(const std::string& name) : outer(operation) {
        if (!inside++) operation = name;
    }
    ~Inside() {
        inside--;
        operation = outer;
    }

   private:
    std::string outer;
};

void note(const Tensor& tensor, StreamKey stream, uint64_t number, bool writes) {
    if (tensor.defined() && tensor.is_cuda() && tensor.has_storage() && tensor.storage().data())
        note_use(tensor.storage().data(), stream, number, writes, operation);
}

void note_result(const Tensor& tensor) {
    Locked locked;
    StreamKey stream = key_now(tensor.device().index());
    note(tensor, stream, begin_operation(stream), true);
}

// -- memory -----------------------------------------------------------------------------------------------------------

Device chosen(std::optional<Device> device) {
    return device && device->has_index() ? *device : Device(DeviceType::CUDA, current_device);
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool> pin,
                           std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
    c10::DeviceGuard on(chosen(device));
    c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard on(chosen(device));
    c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto* storage = self.storage().unsafeGetStorageImpl();
    size_t before = storage->nbytes();
    size_t needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    if (before < needed) {
        c10::DeviceGuard on(self.device());
        c10::DataPtr larger = device_allocator.allocate(needed);
        if (before) {
            Opened to(larger.get()), from(storage->data());
            memcpy(larger.get(), storage->data(), before);
        }
        storage->set_data_ptr_noswap(std::move(larger));
        storage->set_nbytes(needed);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
    guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// -- copies -----------------------------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU, which may be used while the memory is Opened.
Tensor on_cpu(const Tensor& tensor) {
    if (!tensor.is_cuda()) return tensor;
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void copy_values(const Tensor& to, const Tensor& from) {
    Opened opened_to(to.storage().data()), opened_from(from.storage().data());
    on_cpu(to).copy_(on_cpu(from));
}

// As in torch, the source's stream waits for the destination's before the copy, and the other way after it.
void copy_on_devices(const Tensor& to, const Tensor& from) {
    Locked locked;
    count("kernels");
    StreamKey source = key_now(from.device().index()), target = key_now(to.device().index());
    if (source != target) merge(order().streams[source], order().streams[target]);
    uint64_t number = begin_operation(source);
    note(from, source, number, false);
    note(to, source, number, true);
    if (source != target) merge(order().streams[target], order().streams[source]);
    copy_values(to, from);
}

void copy_bytes_to_device(StreamKey stream, uint64_t number, char* device, char* host, size_t bytes, bool waits) {
    count("copies to the device");
    count("bytes to the device", bytes);
    memcpy(device, host, bytes);
    if (waits) {
        count("blocking copies to the device");
        host_waits(Clock(order().streams[stream]));
    } else if (is_pinned(host)) {
        copies().push_back({stream, number, host, std::vector<char>(host, host + bytes), false});
    }  // else CUDA has read the memory when the call returns
}

void copy_bytes_to_host(StreamKey stream, uint64_t number, char* device, char* host, size_t bytes, bool waits) {
    count("copies to the host");
    count("bytes to the host", bytes);
    if (waits || !is_pinned(host)) {
        count("blocking copies to the host");
        host_waits(Clock(order().streams[stream]));
        memcpy(host, device, bytes);
    } else {
        copies().push_back({stream, number, host, std::vector<char>(device, device + bytes), true});
        memset(host, 0xFF, bytes);
    }
}

// Between the host and a device, of tensors that are the same memory but for that.
void copy_bytes(const Tensor& to, const Tensor& from, bool waits) {
    Locked locked;
    const Tensor& device = to.is_cuda() ? to : from;
    StreamKey stream = key_now(device.device().index());
    uint64_t number = begin_operation(stream);
    note(device, stream, number, to.is_cuda());
    char* host = (char*)(to.is_cuda() ? from : to).data_ptr();
    if (is_pinned(host)) note_host_use(stream, host, to.nbytes(), !to.is_cuda());
    Opened opened(device.storage().data());
    if (Guard::is_beside(device.device().index())) count("copies on other streams");
    auto copy = to.is_cuda() ? copy_bytes_to_device : copy_bytes_to_host;
    copy(stream, number, (char*)device.data_ptr(), host, to.nbytes(), waits);
}

bool are_alike(const Tensor& a, const Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.sizes() == b.sizes() &&
           a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj();
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
    if (self.is_same(given) || self.numel() == 0) return self;
    Tensor from = given.sizes() == self.sizes() ? given : given.expand_as(self);
    if (inside) {
        copy_values(self, from);
        return self;
    }
    std::string outer = std::exchange(operation, "aten::copy_");
    if (self.is_cuda() && from.is_cuda()) {
        copy_on_devices(self, from);
    } else if (are_alike(self, from)) {
        copy_bytes(self, from, !non_blocking);
    } else {  // as copy_requires_temporaries in torch's ATen/native/cuda/Copy.cu
        Tensor there = self.is_contiguous() ? self : at::empty(self.sizes(), self.options());
        there.copy_(from.to(self.scalar_type()).contiguous(), non_blocking);
        if (!there.is_same(self)) self.copy_(there, non_blocking);
    }
    operation = outer;
    return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
    Tensor target = to;
    return copy_(target, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
    if (to.sizes() != self.sizes()) resize_(to, self.sizes(), std::nullopt);
    return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
    Tensor host = at::empty({}, self.options().device(at::kCPU));
    return copy_(host, self.reshape({}), false).item();
}

// -- all other operators ----------------------------------------------------------------------------------------------

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& call) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) call(value.toTensor());
    } else if (value.isList()) {  // also of tensors
        for (const c10::IValue& each : value.toListRef()) each_tensor(each, call);
    }
}

// Arguments of an operator that lie on the stack, from `first` on.
struct Arguments {
    const c10::FunctionSchema& schema;
    const torch::jit::Stack& stack;
    size_t first;

    void each(const std::function<void(const Tensor&, bool writes)>& call) const {
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            const auto* alias = schema.arguments()[i].alias_info();
            bool writes = alias && alias->isWrite();
            each_tensor(stack[first + i], [&](const Tensor& tensor) { call(tensor, writes); });
        }
    }

    std::optional<Device> device() const {
        std::optional<Device> found;
        each([&](const Tensor& tensor, bool) { if (tensor.is_cuda() && !found) found = tensor.device(); });
        return found;
    }

    // The message is torch's. Numbers in tensors may come from the CPU, and so may indices.
    void check(Device device) const {
        bool indexes = schema.name() == "aten::index" || schema.name() == "aten::index_put_";
        each([&](const Tensor& tensor, bool) {
            bool fits = tensor.device() == device || (tensor.is_cpu() && (tensor.dim() == 0 || indexes));
            TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, ", device,
                        " and ", tensor.device(), "! (", schema.name(), ")");
        });
    }

    void note_uses(Device device) const {
        Locked locked;
        StreamKey stream = key_now(device.index());
        uint64_t number = begin_operation(stream);
        for (bool pass : {false, true})  // what it reads first
            each([&](const Tensor& tensor, bool writes) { if (writes == pass) note(tensor, stream, number, writes); });
    }
};

// As C10_CUDA_KERNEL_LAUNCH_CHECK.
void check_launch() {
    int error = std::exchange(pending_error, 0);
    TORCH_CHECK(!error, "CUDA error ", error, " of an earlier call, at the launch of ", operation);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    bool outermost = !inside;
    {
        Inside now(schema.name());
        Arguments arguments{schema, *stack, stack->size() - schema.arguments().size()};
        std::optional<Device> device = outermost ? arguments.device() : std::nullopt;
        if (device) {
            Locked locked;
            count("kernels");
            check_launch();
            arguments.check(*device);
            arguments.note_uses(*device);
        }
        at::native::cpu_fallback(op, stack);
    }
    if (!outermost) return;
    std::string outer = std::exchange(operation, schema.name());
    size_t first = stack->size() - schema.returns().size();
    for (size_t i = 0; i < schema.returns().size(); i++)
        if (!schema.returns()[i].alias_info())
            each_tensor((*stack)[first + i], [](const Tensor& made) { if (made.is_cuda()) note_result(made); });
    operation = outer;
}

// Its schema does not say that it changes the statistics, so that the fallback would lose the change.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(const Tensor& x, const Optional& weight, const Optional& bias,
                                                     const Optional& mean, const Optional& var, bool training,
                                                     double momentum, double eps) {
    auto host = [](const Optional& t) { return t && t->defined() ? Optional(t->cpu()) : std::nullopt; };
    std::string outer = std::exchange(operation, "aten::native_batch_norm");
    std::tuple<Tensor, Tensor, Tensor> made;
    {
        Inside now(operation);
        Locked locked;
        count("kernels");
        StreamKey stream = key_now(x.device().index());
        uint64_t number = begin_operation(stream);
        note(x, stream, number, false);
        for (auto* each : {&mean, &var})
            if (*each) note(**each, stream, number, training);
        Optional new_mean = host(mean), new_var = host(var);
        auto [y, saved_mean, saved_var] = at::native_batch_norm(x.cpu(), host(weight), host(bias), new_mean, new_var,
                                                                training, momentum, eps);
        if (training && new_mean) mean->copy_(*new_mean), var->copy_(*new_var);
        made = {y.to(x.device()), saved_mean.to(x.device()), saved_var.to(x.device())};
    }
    for (const Tensor& each : {std::get<0>(made), std::get<1>(made), std::get<2>(made)}) note_result(each);
    operation = outer;
    return made;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty_memory_format);
    library.impl("empty_strided", empty_strided);
    library.impl("resize_", resize_);
    library.impl("record_stream", record_stream);
    library.impl("copy_", copy_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar_dense);
    library.impl("native_batch_norm", native_batch_norm);
    library.impl("as_strided", at::cpu::as_strided_symint);
    library.impl("view", [](const Tensor& tensor, c10::SymIntArrayRef size) {
        return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
    });
    library.impl("_reshape_alias", [](const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
        return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
    });
    library.impl("set_.source_Storage", [](Tensor& tensor, at::Storage source) -> Tensor& {
        return at::native::set_(tensor, source);
    });
    library.impl("set_.source_Storage_storage_offset",
                 [](Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) -> Tensor& { return at::cpu::set_(tensor, source, offset, size, stride); });
    library.impl("set_.source_Tensor", [](Tensor& tensor, const Tensor& source) -> Tensor& {
        return at::native::set_tensor_(tensor, source);
    });
    // torch would divide them into parts of CUDA's, or into one for each tensor
    for (const char* name : {"convolution", "convolution_backward", "_foreach_copy_", "_foreach_add_.List",
                             "_foreach_sub_.List", "_foreach_mul_.Scalar"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace fake_cuda

// DistributedDataParallel asks for one, for its log. These times are those at which the host asked.
namespace c10d {

struct FakeCudaTimer : Timer {
    explicit FakeCudaTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event start, Event end) override {
        return getTimeRef(end) - getTimeRef(start);
    }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeCudaTimer);

}  // namespace c10d

// -- what Python calls ------------------------------------------------------------------------------------------------

extern "C" {

void fake_cuda_synchronize(int device) { fake_cuda::guard.synchronizeDevice(device); }

int fake_cuda_fail(int error) { return fake_cuda::pending_error = error; }

// cudaHostRegister and cudaHostUnregister: pinned memory that is not the allocator's. The answers are CUDA's.
int fake_cuda_register(char* start, size_t bytes, unsigned) {
    fake_cuda::Locked locked;
    if (fake_cuda::overlaps(fake_cuda::pinned_blocks(), start, bytes)) return fake_cuda_fail(712);
    fake_cuda::pinned_blocks()[start] = fake_cuda::Block{start, bytes, bytes};
    return 0;
}
int fake_cuda_unregister(char* start) {
    fake_cuda::Locked locked;
    return fake_cuda::pinned_blocks().erase(start) ? 0 : fake_cuda_fail(713);
}

// The races since the last call, one a line.
const char* fake_cuda_take_races() {
    fake_cuda::Locked locked;
    static std::string taken;
    taken = std::exchange(fake_cuda::order().races, "");
    return taken.c_str();
}

long fake_cuda_count(const char* what) {
    fake_cuda::Locked locked;
    return fake_cuda::order().counts[what];
}
}
