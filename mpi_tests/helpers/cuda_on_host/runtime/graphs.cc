// CUDA graphs: a capture records work instead of running it; each launch of a graph runs all of it in the order of its
// capture.

#include "state.h"

static std::set<Capture*>& captures = *new std::set<Capture*>;  // in progress

struct Graph {
    std::vector<std::function<void(Stream&, Number)>> nodes;
};

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

bool is_capturing(Lock&) { return !captures.empty(); }

Error refuse_in_capture(Lock&) {
    Error error = SUCCESS;
    for (Capture* capture : captures)
        if (capture->mode == GLOBAL) error = broken(capture, CAPTURE_UNSUPPORTED);
    return error;
}

Error broken(Capture* capture, Error error) { return fail(capture->broken = error); }

API Error cudaStreamBeginCapture(void* handle, int mode) {
    Lock held(lock);
    static unsigned long id = 0;
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    if (handle == nullptr || handle == reinterpret_cast<void*>(1)) return fail(CAPTURE_UNSUPPORTED);
    if (stream->capture) return fail(ILLEGAL_STATE);
    stream->capture = new Capture{stream, ++id, mode};  // never deleted: events refer to it
    stream->capture->clocks[stream] = {};
    captures.insert(stream->capture);
    return SUCCESS;
}

API Error cudaStreamEndCapture(void* handle, Graph** graph) {
    Lock held(lock);
    *graph = nullptr;
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    Capture* capture = stream->capture;
    if (!capture || capture->origin != stream) return fail(ILLEGAL_STATE);
    captures.erase(capture);
    Error error = capture->broken ? CAPTURE_INVALIDATED : SUCCESS;
    Clock& known = capture->clocks[stream];
    for (auto& [other, clock] : capture->clocks) {
        if (!error && known[other] < clock[other]) error = CAPTURE_UNJOINED;
        other->capture = nullptr;
    }
    if (error) return fail(error);
    *graph = new Graph{capture->nodes};
    return SUCCESS;
}

API Error cudaStreamIsCapturing(void* handle, int* status) {
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    *status = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
    return SUCCESS;
}
API Error cudaStreamGetCaptureInfo_v2(void* handle, int* status, unsigned long* id, void**, void**, size_t*) {
    Lock held(lock);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    *status = stream->capture ? 1 : 0;
    if (id && stream->capture) *id = stream->capture->id;
    return SUCCESS;
}

API Error cudaGraphInstantiate(Graph** executable, Graph* graph, unsigned long) {
    return *executable = new Graph(*graph), SUCCESS;
}
API Error cudaGraphUpload(Graph*, void*) { return SUCCESS; }
API Error cudaGraphLaunch(Graph* graph, void* handle) {
    Lock held(lock);
    auto nodes = graph->nodes;
    return fail(push(stream_of(handle, held), held, [nodes](Stream& stream, Number number) {
        for (auto& node : nodes) node(stream, number);
    }));
}
API Error cudaGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
API Error cudaGraphExecDestroy(Graph* graph) { return delete graph, SUCCESS; }
