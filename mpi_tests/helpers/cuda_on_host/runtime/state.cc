#include "state.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

// Never destroyed: the threads of streams run until the process exits.
std::mutex& lock = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::atomic<Error> sticky{SUCCESS};
static std::atomic<long> num_misuses{0};
static thread_local Error last = SUCCESS;

Error fail(Error error) {
    if (error != SUCCESS && error != NOT_READY) last = error;
    return error;
}

Error misuse(const char* format, ...) {
    num_misuses++;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "CUDA on the host, process %d: %s\n", getpid(), text);
    return fail(ILLEGAL_STATE);
}

// A call of a function returns an error after a number of successful ones.
static std::map<std::string, std::pair<long, Error>>& injections = *new std::map<std::string, std::pair<long, Error>>;
API void standin_inject(const char* function, long successes, Error error) {
    Lock held(lock);
    injections[function] = {successes, error};
}
Error injected(const char* function) {
    auto found = injections.find(function);
    if (found == injections.end() || found->second.first-- > 0) return SUCCESS;
    Error error = found->second.second;
    injections.erase(found);
    return error;
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

long setting(const char* name, long value) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : value;
}

API long standin_num_misuses() { return num_misuses.exchange(0); }

API Error cudaGetLastError() {
    Error error = last ? last : sticky.load();
    last = SUCCESS;
    return error;
}
API Error cudaPeekAtLastError() { return last ? last : sticky.load(); }

static const std::map<Error, std::pair<const char*, const char*>>& errors() {
    static const auto& table = *new std::map<Error, std::pair<const char*, const char*>>{
        {SUCCESS, {"cudaSuccess", "no error"}},
        {INVALID_VALUE, {"cudaErrorInvalidValue", "invalid argument"}},
        {OUT_OF_MEMORY, {"cudaErrorMemoryAllocation", "out of memory"}},
        {INVALID_CONFIGURATION, {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
        {INVALID_DEVICE, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
        {INVALID_CONTEXT, {"cudaErrorDeviceUninitialized", "invalid device context"}},
        {INVALID_HANDLE, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
        {ILLEGAL_STATE, {"cudaErrorIllegalState", "what CUDA does not define; see standard error"}},
        {SYMBOL_NOT_FOUND, {"cudaErrorSymbolNotFound", "named symbol not found"}},
        {NOT_READY, {"cudaErrorNotReady", "device not ready"}},
        {ILLEGAL_ADDRESS, {"cudaErrorIllegalAddress", "an illegal memory access was encountered"}},
        {MISALIGNED_ADDRESS, {"cudaErrorMisalignedAddress", "misaligned address"}},
        {LAUNCH_FAILURE, {"cudaErrorLaunchFailure", "unspecified launch failure"}},
        {NOT_SUPPORTED, {"cudaErrorNotSupported", "operation not supported"}},
        {CAPTURE_UNSUPPORTED,
         {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
        {CAPTURE_INVALIDATED,
         {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
        {CAPTURE_UNJOINED, {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
        {CAPTURE_ISOLATION,
         {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
        {CAPTURE_IMPLICIT,
         {"cudaErrorStreamCaptureImplicit",
          "operation would make the legacy stream depend on a capturing blocking stream"}},
    };
    return table;
}
static const std::pair<const char*, const char*>& words(Error error) {
    static const auto& unknown = *new std::pair<const char*, const char*>{"cudaErrorUnknown", "unknown error"};
    auto found = errors().find(error);
    return found == errors().end() ? unknown : found->second;
}
API const char* cudaGetErrorName(Error error) { return words(error).first; }
API const char* cudaGetErrorString(Error error) { return words(error).second; }
API Error cuGetErrorName(Error error, const char** name) { return *name = words(error).first, SUCCESS; }
API Error cuGetErrorString(Error error, const char** text) { return *text = words(error).second, SUCCESS; }

API Error standin_unsupported(const char* name) {
    fprintf(stderr, "CUDA on the host: %s is not there\n", name);
    return fail(NOT_SUPPORTED);
}
