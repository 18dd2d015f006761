// Devices, streams and events, and how torch finds them.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>

#include "memory.h"

namespace fake_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int DEVICES = 2;
constexpr int UNREADY_ANSWERS = 2;  // of an event that is asked whether it has happened

struct Event {
    Clock clock;
    int asked = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static StreamKey key(const Stream& stream) { return key_of(stream.device_index(), stream.id()); }
    static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
    static Stream stream(Device device, int64_t number) {
        return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index(device)), number);
    }

    static bool is_beside(DeviceIndex device) { return current_streams[device] != 0; }

    DeviceType type() const override { return DeviceType::CUDA; }
    DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
    void setDevice(Device device) const override { current_device = index(device); }
    void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        setDevice(device);
        return before;
    }

    Stream getStream(Device device) const override { return stream(device, current_streams[index(device)]); }
    Stream getDefaultStream(Device device) const override { return stream(device, 0); }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream getNewStream(Device device, int) const override {
        static std::atomic<int64_t> next{1};
        return stream(device, next++);
    }
    Stream exchangeStream(Stream wanted) const override {
        Stream before = getStream(wanted.device());
        current_streams[wanted.device_index()] = wanted.id();
        return before;
    }
    bool queryStream(const Stream& stream) const override {
        Locked locked;
        auto its = [&](const Copy& copy) { return copy.stream == key(stream); };
        return std::none_of(copies().begin(), copies().end(), its);
    }
    void synchronizeStream(const Stream& stream) const override {
        Locked locked;
        count("synchronisations");
        host_waits(Clock(order().streams[key(stream)]));
    }
    void synchronizeDevice(const DeviceIndex device) const override {
        Locked locked;
        count("synchronisations");
        Clock all;
        for (auto& [key, clock] : order().streams)
            if (DeviceIndex(key >> 32) == device) merge(all, clock);
        host_waits(all);
    }

    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
        Locked locked;
        if (!*event) *event = new Event;
        *(Event*)*event = Event{order().streams[key(stream)]};
    }
    void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
    void block(void* event, const Stream& stream) const override {
        Locked locked;
        if (event) merge(order().streams[key(stream)], ((Event*)event)->clock);
    }
    bool queryEvent(void* event) const override {
        Locked locked;
        if (event && ((Event*)event)->asked++ < UNREADY_ANSWERS) return false;
        if (event) host_waits(((Event*)event)->clock);
        return true;
    }
    void synchronizeEvent(void* event) const override {
        Locked locked;
        count("synchronisations");
        if (event) host_waits(((Event*)event)->clock);
    }
    double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
    void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
        Locked locked;
        if (Block* block = find(device_blocks(), memory.get())) block->recorded.push_back(key(stream));
    }
};
inline Guard guard;

}  // namespace fake_cuda

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    std::string showConfig() const override { return "fake CUDA"; }
    long versionCuDNN() const override { return 0; }
    int getNumGPUs() const override { return fake_cuda::DEVICES; }
    DeviceIndex deviceCount() const override { return fake_cuda::DEVICES; }
    DeviceIndex current_device() const override { return fake_cuda::current_device; }
    DeviceIndex getCurrentDevice() const override { return fake_cuda::current_device; }
    void setCurrentDevice(DeviceIndex device) const override { fake_cuda::current_device = device; }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
    DeviceIndex exchangeDevice(DeviceIndex device) const override {
        return fake_cuda::guard.exchangeDevice(Device(kCUDA, device)).index();
    }
    void deviceSynchronize(DeviceIndex device) const override { fake_cuda::guard.synchronizeDevice(device); }
    const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
    Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
    Allocator* getPinnedMemoryAllocator() const override { return &fake_cuda::pinned_allocator; }
    Allocator* getCUDADeviceAllocator() const override { return &fake_cuda::device_allocator; }
    bool isPinnedPtr(const void* place) const override { return fake_cuda::is_pinned(place); }
    Device getDeviceFromPtr(void* place) const override {
        fake_cuda::Locked locked;
        fake_cuda::Block* block = fake_cuda::find(fake_cuda::device_blocks(), place);
        return Device(kCUDA, block ? block->device : 0);
    }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace fake_cuda {

using at::CUDAHooks;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
inline at::HostAllocatorRegistry<at::kCUDA> register_pinned(&pinned_allocator);
inline const bool register_allocator = (c10::SetAllocator(DeviceType::CUDA, &device_allocator), true);

}  // namespace fake_cuda
