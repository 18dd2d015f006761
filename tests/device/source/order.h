// The order of operations. A stream counts its operations, and its clock says how many of each stream's have happened
// before its next one. What is not ordered by clocks is a race, whether it does harm in this run or not.
#pragma once
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

namespace fake_cuda {

using StreamKey = int64_t;                    // device << 32 | number of the stream on it
using Clock = std::map<StreamKey, uint64_t>;  // stream -> how many of its operations have happened

struct Order {
    std::recursive_mutex mutex;  // of everything in this library
    std::map<StreamKey, Clock> streams;
    Clock host;  // what the host has waited for
    std::string races;
    std::map<std::string, long> counts;
};

// It is never destroyed: Python frees tensors after this library's destructors have run.
inline Order& order() {
    static Order* one = new Order;
    return *one;
}

struct Locked : std::lock_guard<std::recursive_mutex> {
    Locked() : lock_guard(order().mutex) {}
};

inline void count(const std::string& what, long more = 1) { order().counts[what] += more; }

inline void race(const std::string& what) {
    fprintf(stderr, "fake CUDA: race: %s\n", what.c_str());
    if (order().races.size() < 10'000) order().races += what + "\n";
}

inline void merge(Clock& into, const Clock& other) {
    for (auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}

inline bool has_happened(const Clock& clock, StreamKey stream, uint64_t number) {
    auto found = clock.find(stream);
    return found != clock.end() && found->second >= number;
}

// The number of the stream's next operation, which begins now.
inline uint64_t begin_operation(StreamKey stream) { return ++order().streams[stream][stream]; }

}  // namespace fake_cuda
