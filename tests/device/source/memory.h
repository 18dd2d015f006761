// Memory of devices, which the host cannot touch, and pinned memory, which copies use after they were asked for.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <cstring>
#include <memory>
#include <vector>

#include "order.h"

namespace fake_cuda {

constexpr size_t PAGE = 4096;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::map<c10::DeviceIndex, int64_t> current_streams;

inline StreamKey key_of(c10::DeviceIndex device, int64_t number) { return (int64_t(device) << 32) | number; }
inline StreamKey key_now(c10::DeviceIndex device) { return key_of(device, current_streams[device]); }

struct Block {
    char* start;
    size_t bytes, mapped;
    c10::DeviceIndex device = 0;
    StreamKey stream = 0;  // that had asked for it
    int opened = 0;        // how many on the host may touch it now
    StreamKey writer = -1;
    uint64_t written = 0;
    std::string wrote;  // the writer's operation
    std::map<StreamKey, uint64_t> readers;
    std::vector<StreamKey> recorded;  // by record_stream
};

using Blocks = std::map<char*, Block>;
inline Blocks& device_blocks() { static Blocks* one = new Blocks; return *one; }
inline Blocks& pinned_blocks() { static Blocks* one = new Blocks; return *one; }

inline Block* find(Blocks& blocks, const void* place) {
    auto after = blocks.upper_bound((char*)place);
    if (after == blocks.begin()) return nullptr;
    Block& block = std::prev(after)->second;
    return (char*)place < block.start + std::max<size_t>(block.bytes, 1) ? &block : nullptr;
}

inline bool overlaps(Blocks& blocks, char* start, size_t bytes) {
    auto next = blocks.lower_bound(start);
    return find(blocks, start) || (next != blocks.end() && next->first < start + bytes);
}

inline Block& make_block(Blocks& blocks, size_t bytes) {
    size_t mapped = (bytes + PAGE) / PAGE * PAGE;
    void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "fake CUDA: no memory");
    memset(start, 0xFF, mapped);  // NaN, where somebody reads it before it is written
    return blocks[(char*)start] = Block{(char*)start, bytes, mapped};
}

inline void free_block(Blocks& blocks, void* start) {
    auto found = blocks.find((char*)start);
    munmap(start, found->second.mapped);
    blocks.erase(found);
}

// -- devices ----------------------------------------------------------------------------------------------------------

inline void check_freed(const Block& block, StreamKey stream, uint64_t number) {
    auto& recorded = block.recorded;
    if (stream < 0 || stream == block.stream || std::find(recorded.begin(), recorded.end(), stream) != recorded.end())
        return;
    if (!has_happened(order().streams[block.stream], stream, number) && !has_happened(order().host, stream, number))
        race("device memory is freed while another stream may use it, without record_stream (last written by " +
             block.wrote + ")");
}

inline void free_device(void* start) {
    Locked locked;
    Block& block = device_blocks().at((char*)start);
    check_freed(block, block.writer, block.written);
    for (auto& [stream, number] : block.readers) check_freed(block, stream, number);
    count("device bytes", -long(block.bytes));
    free_block(device_blocks(), start);
}

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        Locked locked;
        Block& block = make_block(device_blocks(), bytes);
        mprotect(block.start, block.mapped, PROT_NONE);
        block.device = current_device;
        block.stream = key_now(current_device);
        count("device bytes", long(bytes));
        auto& counts = order().counts;
        counts["most device bytes"] = std::max(counts["most device bytes"], counts["device bytes"]);
        return {block.start, block.start, &free_device, c10::Device(c10::DeviceType::CUDA, current_device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fake CUDA: copy_data"); }
};
inline DeviceAllocator device_allocator;

// While this exists the host may touch the device memory at `place`.
struct Opened {
    explicit Opened(const void* place) {
        Locked locked;
        block = find(device_blocks(), place);
        if (block && block->opened++ == 0) mprotect(block->start, block->mapped, PROT_READ | PROT_WRITE);
    }
    ~Opened() {
        Locked locked;
        if (block && --block->opened == 0) mprotect(block->start, block->mapped, PROT_NONE);
    }
    Opened(const Opened&) = delete;

   private:
    Block* block;
};

// Operation `number` of a stream, of this name, reads or writes the device memory at `place`.
inline void note_use(const void* place, StreamKey stream, uint64_t number, bool writes, const std::string& name) {
    Locked locked;
    Block* block = find(device_blocks(), place);
    if (!block) return;
    auto ordered = [&](StreamKey other, uint64_t its) {
        return other < 0 || other == stream || has_happened(order().streams[stream], other, its) ||
               has_happened(order().host, other, its);
    };
    if (!ordered(block->writer, block->written))
        race(name + " uses device memory that " + block->wrote + " of another stream writes, with no event between");
    if (!writes) {
        block->readers[stream] = number;
        return;
    }
    for (auto& [reader, its] : block->readers)
        if (!ordered(reader, its))
            race(name + " writes device memory that another stream still reads, with no event between");
    block->writer = stream;
    block->written = number;
    block->wrote = name;
    block->readers.clear();
}

// -- copies that were asked for and use pinned memory later -----------------------------------------------------------

struct Copy {
    StreamKey stream;
    uint64_t number;
    char* host;
    std::vector<char> values;
    bool to_host;
};
inline std::vector<Copy>& copies() { static auto* one = new std::vector<Copy>; return *one; }

inline void end_copy(const Copy& copy) {
    if (copy.to_host)
        memcpy(copy.host, copy.values.data(), copy.values.size());
    else if (memcmp(copy.host, copy.values.data(), copy.values.size()))
        race("host memory was changed while an asynchronous copy to the device could still read it (" +
             std::to_string(copy.values.size()) + " bytes)");
}

// The host waits for all that is in `clock`.
inline void host_waits(const Clock& clock) {
    merge(order().host, clock);
    std::erase_if(copies(), [&](const Copy& copy) {
        bool ends = has_happened(clock, copy.stream, copy.number);
        if (ends) end_copy(copy);
        return ends;
    });
}

// A copy of this stream will use `bytes` of pinned memory: earlier copies there must be ordered before it.
inline void note_host_use(StreamKey stream, char* start, size_t bytes, bool writes) {
    std::erase_if(copies(), [&](const Copy& copy) {
        bool apart = copy.host >= start + bytes || start >= copy.host + copy.values.size();
        if (apart || !(writes || copy.to_host)) return false;
        bool ordered = has_happened(order().streams[stream], copy.stream, copy.number);
        if (ordered)
            end_copy(copy);
        else
            race("two asynchronous copies use the same host memory, with no event between");
        return ordered;
    });
}

inline void free_pinned(void* start) {
    Locked locked;
    Block& block = pinned_blocks().at((char*)start);
    // torch's own allocator keeps the memory until the copy has ended
    std::erase_if(copies(), [&](const Copy& copy) {
        bool inside = copy.host >= block.start && copy.host < block.start + block.bytes;
        if (inside) end_copy(copy);
        return inside;
    });
    free_block(pinned_blocks(), start);
}

struct PinnedAllocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        Locked locked;
        char* start = make_block(pinned_blocks(), bytes).start;
        return {start, start, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* place) {
    Locked locked;
    return find(pinned_blocks(), place);
}

}  // namespace fake_cuda
