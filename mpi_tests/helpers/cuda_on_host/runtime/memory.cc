// Memory: device memory is in files, which other processes can open; new and freed memory holds implausible numbers.

#include "state.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t PAGE = 4096;
static const int POISON = 0x7f;             // in every byte: a large number, or a NaN
static const size_t KEPT_BYTES = 64 << 20;  // of freed memory, reused by the next allocation of equal size

// The header of an allocation, shared by its processes.
struct Control {
    std::atomic<long> num_opened;
};

struct Allocation {
    File file;
    size_t nbytes;
    int device;
    Control* control;
    int num_opened = 0;  // times that this process has opened another one's memory; 0 for its own
    char* begin() const { return reinterpret_cast<char*>(control) + PAGE; }
};

static std::map<uintptr_t, Allocation>& allocations = *new std::map<uintptr_t, Allocation>;
static std::map<uintptr_t, size_t>& pinned = *new std::map<uintptr_t, size_t>;
static std::multimap<std::pair<int, size_t>, Allocation>& freed =
    *new std::multimap<std::pair<int, size_t>, Allocation>;
static size_t freed_bytes = 0, used_bytes = 0;
static const size_t LIMIT_BYTES = static_cast<size_t>(setting("CUDA_ON_HOST_MEMORY_MB", 2048)) << 20;

File new_file(size_t nbytes) {
    int descriptor = memfd_create("CUDA on the host", MFD_CLOEXEC);
    if (descriptor < 0) return {};
    if (posix_fallocate(descriptor, 0, nbytes)) return close(descriptor), File{};
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), descriptor);
    return {descriptor, path};
}

void* map_file(const std::string& path, size_t nbytes) {
    int file = open(path.c_str(), O_RDWR);
    if (file < 0) return nullptr;
    void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return address == MAP_FAILED ? nullptr : address;
}

template <typename T>
static auto holding(std::map<uintptr_t, T>& table, const void* pointer, size_t (*size)(const T&)) {
    auto found = table.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (found == table.begin()) return table.end();
    --found;
    return reinterpret_cast<uintptr_t>(pointer) < found->first + size(found->second) ? found : table.end();
}
static auto allocation_of(const void* pointer) {
    return holding<Allocation>(allocations, pointer, [](const Allocation& allocation) { return allocation.nbytes; });
}
static bool is_pinned(const void* pointer) {
    return holding<size_t>(pinned, pointer, [](const size_t& size) { return size; }) != pinned.end();
}
bool is_pageable(const void* pointer, Lock&) {
    return allocation_of(pointer) == allocations.end() && !is_pinned(pointer);
}

API long standin_num_allocations() {
    Lock held(lock);
    long number = 0;
    for (auto& [address, allocation] : allocations) number += !allocation.num_opened;
    return number;
}
API long standin_num_opened_memory() {
    Lock held(lock);
    long number = 0;
    for (auto& [address, allocation] : allocations) number += allocation.num_opened;
    return number;
}

API Error cudaMemGetInfo(size_t* left, size_t* total) {
    Lock held(lock);
    *total = LIMIT_BYTES;
    *left = LIMIT_BYTES - used_bytes;
    return SUCCESS;
}

API Error cudaMalloc(void** pointer, size_t nbytes) {
    Lock held(lock);
    touch();
    if (sticky) return fail(sticky);
    if (Error error = refuse_in_capture(held)) return fail(error);
    *pointer = nullptr;
    if (nbytes == 0) return SUCCESS;
    if (used_bytes + nbytes > LIMIT_BYTES) return fail(OUT_OF_MEMORY);
    Allocation allocation;
    if (auto again = freed.find({current_device(), nbytes}); again != freed.end()) {
        allocation = again->second;
        freed_bytes -= nbytes;
        freed.erase(again);
    } else {
        File file = new_file(PAGE + nbytes);
        auto control = file.path.empty() ? nullptr : static_cast<Control*>(map_file(file.path, PAGE + nbytes));
        if (!control) return fail(OUT_OF_MEMORY);
        allocation = {file, nbytes, current_device(), control};
        memset(allocation.begin(), POISON, nbytes);
    }
    *pointer = allocation.begin();
    used_bytes += nbytes;
    allocations[reinterpret_cast<uintptr_t>(*pointer)] = allocation;
    return SUCCESS;
}

API Error cudaFree(void* pointer) {
    if (!pointer) return SUCCESS;
    Lock held(lock);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations.end() || found->second.num_opened) return fail(INVALID_VALUE);
    Allocation allocation = found->second;
    if (Error error = finish_device(allocation.device, held)) return fail(error);
    allocations.erase(reinterpret_cast<uintptr_t>(pointer));
    used_bytes -= allocation.nbytes;
    memset(pointer, POISON, allocation.nbytes);
    if (long number = allocation.control->num_opened)
        return misuse(
            "%zu bytes of memory are freed that other processes have opened %ld times", allocation.nbytes, number
        );
    if (freed_bytes + allocation.nbytes <= KEPT_BYTES) {
        freed_bytes += allocation.nbytes;
        freed.emplace(std::make_pair(allocation.device, allocation.nbytes), allocation);
    } else {
        close(allocation.file.descriptor);
        munmap(allocation.control, PAGE + allocation.nbytes);
    }
    return SUCCESS;
}

API Error cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
    Lock held(lock);
    touch();
    if (posix_memalign(pointer, PAGE, nbytes ? nbytes : 1)) return fail(OUT_OF_MEMORY);
    memset(*pointer, POISON, nbytes);
    pinned[reinterpret_cast<uintptr_t>(*pointer)] = nbytes;
    return SUCCESS;
}
API Error cudaMallocHost(void** pointer, size_t nbytes) { return cudaHostAlloc(pointer, nbytes, 0); }
API Error cudaFreeHost(void* pointer) {
    if (!pointer) return SUCCESS;
    Lock held(lock);
    auto found = pinned.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == pinned.end()) return fail(INVALID_VALUE);
    if (Error error = finish_device(current_device(), held)) return fail(error);
    memset(pointer, POISON, found->second);
    pinned.erase(found);
    free(pointer);
    return SUCCESS;
}
API Error cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
    Lock held(lock);
    pinned[reinterpret_cast<uintptr_t>(pointer)] = nbytes;
    return SUCCESS;
}
API Error cudaHostUnregister(void* pointer) {
    Lock held(lock);
    return fail(pinned.erase(reinterpret_cast<uintptr_t>(pointer)) ? SUCCESS : INVALID_VALUE);
}

struct Attributes {  // cudaPointerAttributes
    int type, device;
    void *device_pointer, *host_pointer;
};
API Error cudaPointerGetAttributes(Attributes* attributes, const void* pointer) {
    enum { UNREGISTERED, HOST, DEVICE };
    Lock held(lock);
    auto address = const_cast<void*>(pointer);
    *attributes = {UNREGISTERED, -2, nullptr, address};
    if (auto found = allocation_of(pointer); found != allocations.end())
        *attributes = {DEVICE, found->second.device, address, nullptr};
    else if (is_pinned(pointer))
        *attributes = {HOST, current_device(), address, address};
    return SUCCESS;
}

// Copies from pageable memory read it at once; copies to it are complete when the call returns.
API Error cudaMemcpyAsync(void* target, const void* source, size_t nbytes, int, void* handle) {
    Lock held(lock);
    if (Error error = injected("cudaMemcpyAsync")) return fail(error);
    Stream* stream = stream_of(handle, held);
    if (!stream) return fail(INVALID_HANDLE);
    bool from_pageable = is_pageable(source, held), to_pageable = is_pageable(target, held);
    if (stream->capture && to_pageable) return broken(stream->capture, CAPTURE_UNSUPPORTED);
    std::function<void(Stream&, Number)> copy = [=](Stream&, Number) { memmove(target, source, nbytes); };
    if (from_pageable) {
        std::string content(static_cast<const char*>(source), nbytes);
        copy = [=](Stream&, Number) { memcpy(target, content.data(), nbytes); };
    }
    Error error = push(stream, held, copy);
    if (!error && to_pageable) finish(*stream, stream->pushed, held);
    return fail(error ? error : sticky.load());
}
API Error cudaMemcpy(void* target, const void* source, size_t nbytes, int kind) {
    Error error = cudaMemcpyAsync(target, source, nbytes, kind, nullptr);
    Lock held(lock);
    bool in_devices = allocation_of(target) != allocations.end() && allocation_of(source) != allocations.end();
    Stream* stream = stream_of(nullptr, held);
    if (!error && !in_devices) finish(*stream, stream->pushed, held);
    return fail(error ? error : sticky.load());
}
API Error cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, void* stream) {
    return cudaMemcpyAsync(target, source, nbytes, 4, stream);
}
API Error cudaMemcpyPeer(void* target, int, const void* source, int, size_t nbytes) {
    return cudaMemcpy(target, source, nbytes, 4);
}
API Error cudaMemsetAsync(void* target, int value, size_t nbytes, void* handle) {
    Lock held(lock);
    return fail(push(stream_of(handle, held), held, [=](Stream&, Number) { memset(target, value, nbytes); }));
}
API Error cudaMemset(void* target, int value, size_t nbytes) { return cudaMemsetAsync(target, value, nbytes, nullptr); }

// A handle is of a whole allocation, wherever the pointer is in it.
struct Handle {
    char text[64];
};
API Error cudaIpcGetMemHandle(Handle* handle, void* pointer) {
    Lock held(lock);
    auto found = allocation_of(pointer);
    if (found == allocations.end() || found->second.num_opened) return fail(INVALID_VALUE);
    memset(handle, 0, sizeof *handle);
    snprintf(handle->text, sizeof handle->text, "%zu %s", found->second.nbytes, found->second.file.path.c_str());
    return SUCCESS;
}
API Error cudaIpcOpenMemHandle(void** pointer, Handle handle, unsigned) {
    Lock held(lock);
    touch();
    size_t nbytes;
    char path[64];
    if (sscanf(handle.text, "%zu %63s", &nbytes, path) != 2) return fail(INVALID_VALUE);
    for (auto& [address, allocation] : allocations) {
        if (allocation.file.path != path) continue;
        if (!allocation.num_opened) return fail(INVALID_CONTEXT);  // the process's own memory
        allocation.num_opened++;
        return *pointer = allocation.begin(), SUCCESS;
    }
    auto control = static_cast<Control*>(map_file(path, PAGE + nbytes));
    if (!control) return fail(INVALID_VALUE);
    control->num_opened++;
    Allocation allocation{{-1, path}, nbytes, current_device(), control, 1};
    *pointer = allocation.begin();
    allocations[reinterpret_cast<uintptr_t>(*pointer)] = allocation;
    return SUCCESS;
}
API Error cudaIpcCloseMemHandle(void* pointer) {
    Lock held(lock);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations.end() || !found->second.num_opened) return fail(INVALID_VALUE);
    if (--found->second.num_opened) return SUCCESS;
    found->second.control->num_opened--;
    munmap(found->second.control, PAGE + found->second.nbytes);  // work that still accesses it faults
    allocations.erase(found);
    return SUCCESS;
}
