// Events: a wait covers the work recorded at the time of the call, here or in another process; none if never recorded.

#include "state.h"

#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

using namespace std::chrono_literals;

enum : unsigned { NO_TIMING = 2, INTERPROCESS = 4 };
static const size_t FILE_BYTES = 4096;
static const auto POLL = 100us;
static const double LONGEST_WAIT_S = setting("CUDA_ON_HOST_LONGEST_WAIT_S", 100);

static std::set<Event*>& events = *new std::set<Event*>;  // live ones
static long num_opened = 0;

API long standin_num_opened_events() {
    Lock held(lock);
    return num_opened;
}

static Event* event_of(void* handle) {
    auto event = static_cast<Event*>(handle);
    return events.count(event) ? event : nullptr;
}

static void reach(Counts& counts, Number number) {
    counts.reached_at_s = now_s();
    for (Number before = counts.reached; before < number;)
        if (counts.reached.compare_exchange_weak(before, number)) break;
}

// Wait without the lock.  `is_wanted` tells whether a caller waits for later work.
static void await(Counts& counts, Number number, const std::function<bool()>& is_wanted) {
    for (double end = now_s() + LONGEST_WAIT_S; counts.reached < number && !sticky;) {
        if (is_wanted() && counts.wanted < number) {
            counts.wanted = number;
            Lock held(lock);
            changed.notify_all();
        }
        if (now_s() > end) {
            misuse(
                "an event has not come for %g s: recorded %lu times, reached %lu", LONGEST_WAIT_S,
                counts.recorded.load(), counts.reached.load()
            );
            return;
        }
        Lock held(lock);
        if (counts.reached < number) changed.wait_for(held, POLL);
    }
}

API Error cudaEventCreateWithFlags(void** handle, unsigned flags) {
    Lock held(lock);
    touch();
    if (sticky) return fail(sticky);
    if ((flags & INTERPROCESS) && !(flags & NO_TIMING)) return fail(INVALID_VALUE);
    auto event =
        new Event{current_device(), flags, nullptr, {}};  // never deleted: work may refer to it, and stale handles
    if (flags & INTERPROCESS) {
        event->file = new_file(FILE_BYTES);
        if (event->file.path.empty()) return fail(OUT_OF_MEMORY);
        event->counts = static_cast<Counts*>(map_file(event->file.path, FILE_BYTES));
    } else {
        event->counts = new Counts();
    }
    events.insert(event);
    *handle = event;
    return SUCCESS;
}
API Error cudaEventCreate(void** handle) { return cudaEventCreateWithFlags(handle, 0); }
API Error cudaEventDestroy(void* handle) {
    Lock held(lock);
    Event* event = event_of(handle);
    if (!event) return fail(INVALID_HANDLE);
    events.erase(event);
    if (event->opened)
        num_opened--;
    else if (event->file.descriptor >= 0)
        close(event->file.descriptor);
    return SUCCESS;
}

API Error cudaEventRecord(void* handle, void* stream_handle) {
    Lock held(lock);
    if (Error error = injected("cudaEventRecord")) return fail(error);
    Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle, held);
    if (!event || !stream) return fail(INVALID_HANDLE);
    if (!event->opened && event->device != stream->device) return fail(INVALID_HANDLE);
    if (Capture* capture = stream->capture) {
        if (event->flags & INTERPROCESS) return broken(capture, CAPTURE_UNSUPPORTED);
        event->capture = capture;
        event->clock = capture->clocks[stream];
        return SUCCESS;
    }
    event->capture = nullptr;
    Counts* counts = event->counts;
    Number number = counts->recorded + 1;
    Error error = push(stream, held, [=](Stream&, Number) { reach(*counts, number); });
    if (error) return fail(error);
    stream->recordings.push_back({counts, number, stream->pushed});
    counts->recorded = number;
    return SUCCESS;
}
API Error cudaEventRecordWithFlags(void* handle, void* stream, unsigned) { return cudaEventRecord(handle, stream); }

// In a capture: later work on the stream depends on the work before the event's recording.
static Error join(Stream& stream, Event& event) {
    Capture* capture = event.capture ? event.capture : stream.capture;
    if (event.capture != capture || (stream.capture && stream.capture != capture))
        return broken(capture, CAPTURE_ISOLATION);
    stream.capture = capture;
    for (auto [other, number] : event.clock) {
        Number& known = capture->clocks[&stream][other];
        known = std::max(known, number);
    }
    return SUCCESS;
}

API Error cudaStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
    Lock held(lock);
    if (Error error = injected("cudaStreamWaitEvent")) return fail(error);
    Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle, held);
    if (!event || !stream) return fail(INVALID_HANDLE);
    if (event->capture || stream->capture) return fail(join(*stream, *event));
    Counts* counts = event->counts;
    Number number = counts->recorded;
    if (number == 0) return fail(sticky);
    return fail(push(stream, held, [=](Stream& stream, Number position) {
        await(*counts, number, [&, position] {
            Lock held(lock);
            return stream.wanted >= position;
        });
    }));
}
API Error cudaEventSynchronize(void* handle) {
    count_wait();
    Lock held(lock);
    Event* event = event_of(handle);
    if (!event) return fail(INVALID_HANDLE);
    if (event->capture) return broken(event->capture, CAPTURE_UNSUPPORTED);
    Number number = event->counts->recorded;
    held.unlock();
    await(*event->counts, number, [] { return true; });
    return fail(sticky);
}
API Error cudaEventQuery(void* handle) {
    Lock held(lock);
    Event* event = event_of(handle);
    if (!event) return fail(INVALID_HANDLE);
    if (event->capture) return broken(event->capture, CAPTURE_UNSUPPORTED);
    if (sticky) return fail(sticky);
    return event->counts->reached >= event->counts->recorded ? SUCCESS : NOT_READY;
}
API Error cudaEventElapsedTime(float* ms, void* first, void* last) {
    Lock held(lock);
    Event *begin = event_of(first), *end = event_of(last);
    if (!begin || !end || begin->device != end->device) return fail(INVALID_HANDLE);
    for (Event* event : {begin, end}) {
        if ((event->flags & NO_TIMING) || !event->counts->recorded) return fail(INVALID_HANDLE);
        if (event->counts->reached < event->counts->recorded) return NOT_READY;
    }
    *ms = 1e3f * static_cast<float>(end->counts->reached_at_s - begin->counts->reached_at_s);
    return SUCCESS;
}
API Error cudaEventElapsedTime_v2(float* ms, void* first, void* last) { return cudaEventElapsedTime(ms, first, last); }

struct Handle {
    char text[64];
};
API Error cudaIpcGetEventHandle(Handle* handle, void* given) {
    Lock held(lock);
    Event* event = event_of(given);
    if (!event) return fail(INVALID_HANDLE);
    if (!(event->flags & INTERPROCESS) || event->opened) return fail(INVALID_VALUE);
    memset(handle, 0, sizeof *handle);
    snprintf(handle->text, sizeof handle->text, "%s", event->file.path.c_str());
    return SUCCESS;
}
API Error cudaIpcOpenEventHandle(void** handle, Handle given) {
    Lock held(lock);
    touch();
    auto counts = static_cast<Counts*>(map_file(given.text, FILE_BYTES));
    if (!counts) return fail(INVALID_VALUE);
    auto event = new Event{current_device(), NO_TIMING | INTERPROCESS, counts, {-1, given.text}, true};
    events.insert(event);
    num_opened++;
    *handle = event;
    return SUCCESS;
}
