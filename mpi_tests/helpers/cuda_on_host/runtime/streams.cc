// Streams: each runs its operations in order, on a thread of its own, and lags behind the requests.
//
// Before each operation a stream sleeps for a random time, up to CUDA_ON_HOST_DELAY_US, unless a caller waits for that
// operation, here or in another process.  A caller that waits is fast; one that forgets to wait is too early.

#include "state.h"

#include <atomic>

#include <cstdlib>
#include <random>
#include <thread>
#include <unistd.h>

using namespace std::chrono_literals;

enum : unsigned { NON_BLOCKING = 1 };
static const auto POLL = 200us;  // interval for events of other processes

static std::atomic<long> delay_us{setting("CUDA_ON_HOST_DELAY_US", 1000)};
static std::set<Stream*>& streams = *new std::set<Stream*>;           // live ones
static std::map<int, Stream*>& legacy = *new std::map<int, Stream*>;  // by device: its default stream
static thread_local std::map<int, Stream*> per_thread;

API void standin_set_delay(long us) { delay_us = us; }

static double draw_s() {
    static thread_local std::mt19937 random(setting("CUDA_ON_HOST_SEED", 0) + getpid() + gettid());
    return std::uniform_real_distribution<double>(0, 1e-6)(random) * delay_us;
}

// Another process may wait for an event recorded in this stream's queue.
static void hear(Stream& stream) {
    for (auto& recording : stream.recordings)
        if (recording.counts->wanted >= recording.number) stream.wanted = std::max(stream.wanted, recording.position);
}

static void lag(Stream& stream, Number number, Lock& held) {
    for (double end = now_s() + draw_s(); now_s() < end; changed.wait_for(held, POLL)) {
        hear(stream);
        if (stream.wanted >= number) return;
    }
}

void finish(Stream& stream, Number until, Lock& held) {
    stream.wanted = std::max(stream.wanted, until);
    changed.notify_all();
    changed.wait(held, [&] { return stream.done >= until; });
}

static void serve(Stream& stream) {
    Lock held(lock);
    for (;;) {
        changed.wait(held, [&] { return !stream.queue.empty() || !stream.alive; });
        if (stream.queue.empty()) return;  // destroyed
        Number number = stream.done + 1;
        Work work = std::move(stream.queue.front());
        stream.queue.pop_front();
        lag(stream, number, held);
        for (auto [other, until] : work.after) finish(*other, until, held);
        held.unlock();
        guarded([&] { work.run(stream, number); });
        held.lock();
        stream.done = number;
        while (!stream.recordings.empty() && stream.recordings.front().position <= number) stream.recordings.pop_front();
        changed.notify_all();
    }
}

static Stream* make(int device, unsigned flags, int priority) {
    auto stream = new Stream{device, flags, priority};  // never deleted, so that stale handles are detected
    std::thread([stream] { serve(*stream); }).detach();
    return stream;
}

Stream* stream_of(void* handle, Lock&) {
    touch();
    if (auto number = reinterpret_cast<uintptr_t>(handle); number <= 2) {
        auto& defaults = number == 2 ? per_thread : legacy;
        auto& stream = defaults[current_device()];
        if (!stream) streams.insert(stream = make(current_device(), 0, 0));
        return stream;
    }
    auto stream = static_cast<Stream*>(handle);
    return streams.count(stream) ? stream : nullptr;
}

// The legacy default stream runs after all earlier work on blocking streams, and before all later work on them.
static void order(Stream& stream, Work& work) {
    auto found = legacy.find(stream.device);
    Stream* first = found == legacy.end() ? nullptr : found->second;
    if (first == &stream) {
        for (Stream* other : streams)
            if (other != first && other->device == stream.device && !(other->flags & NON_BLOCKING) &&
                other->done < other->pushed)
                work.after.emplace_back(other, other->pushed);
    } else if (first && !(stream.flags & NON_BLOCKING) && first->done < first->pushed) {
        work.after.emplace_back(first, first->pushed);
    }
}

Error push(Stream* stream, Lock& held, std::function<void(Stream&, Number)> run) {
    if (Error error = sticky) return error;
    if (!stream) return INVALID_HANDLE;
    if (Capture* capture = stream->capture) {
        if (capture->broken) return CAPTURE_INVALIDATED;
        capture->nodes.push_back(std::move(run));
        capture->clocks[stream][stream]++;
        return SUCCESS;
    }
    if (!(stream->flags & NON_BLOCKING) && is_capturing(held)) {
        auto found = legacy.find(stream->device);
        if (found != legacy.end() && found->second == stream) return refuse_in_capture(held), CAPTURE_IMPLICIT;
    }
    Work work{std::move(run), {}};
    order(*stream, work);
    stream->queue.push_back(std::move(work));
    stream->pushed++;
    changed.notify_all();
    return SUCCESS;
}

Error finish_device(int device, Lock& held) {
    if (Error error = refuse_in_capture(held)) return error;
    std::vector<std::pair<Stream*, Number>> ends;  // a snapshot: other streams may continue
    for (Stream* stream : streams)
        if (stream->device == device) ends.emplace_back(stream, stream->pushed);
    for (auto [stream, until] : ends) finish(*stream, until, held);
    return sticky;
}

API Error cudaStreamCreateWithPriority(void** handle, unsigned flags, int priority) {
    Lock held(lock);
    touch();
    Stream* stream = make(current_device(), flags, std::min(0, std::max(-5, priority)));
    streams.insert(stream);
    *handle = stream;
    return fail(sticky);
}
API Error cudaStreamCreateWithFlags(void** handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}
API Error cudaStreamCreate(void** handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
API Error cudaStreamDestroy(void* handle) {
    Lock held(lock);
    auto stream = static_cast<Stream*>(handle);
    if (!streams.erase(stream)) return fail(INVALID_HANDLE);
    stream->alive = false;  // its thread ends after its work
    changed.notify_all();
    return SUCCESS;
}
static std::atomic<long> waits;  // number of the host's waits for a device
void count_wait() { waits++; }
API long standin_num_waits() { return waits; }

API Error cudaStreamSynchronize(void* handle) {
    count_wait();
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    if (stream->capture) return broken(stream->capture, CAPTURE_UNSUPPORTED);
    finish(*stream, stream->pushed, held);
    return fail(sticky);
}
API Error cudaStreamQuery(void* handle) {
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    if (stream->capture) return broken(stream->capture, CAPTURE_UNSUPPORTED);
    if (sticky) return fail(sticky);
    return stream->done == stream->pushed ? SUCCESS : NOT_READY;
}
API Error cudaStreamGetFlags(void* handle, unsigned* flags) {
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    return *flags = stream->flags, SUCCESS;
}
API Error cudaStreamGetPriority(void* handle, int* priority) {
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    return *priority = stream->priority, SUCCESS;
}
API Error cudaLaunchHostFunc(void* handle, void (*run)(void*), void* argument) {
    Lock held(lock);
    return fail(push(stream_of(handle, held), held, [=](Stream&, Number) { run(argument); }));
}
API Error cudaStreamAddCallback(void* handle, void (*run)(void*, Error, void*), void* argument, unsigned) {
    Lock held(lock);
    return fail(push(stream_of(handle, held), held, [=](Stream&, Number) { run(handle, SUCCESS, argument); }));
}
