// Modules and kernels: functions of the driver.  A module is a shared object made by nvrtc.cc.

#include "state.h"
#include "blocks.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

// A kernel's entry point from `device/entry.h`: it copies the arguments, and runs the kernel for one thread at a time.
using Body = std::function<void()>;
using Bind = void (*)(void** arguments, Body* body);

struct Function {
    Bind bind;
    int device;
    std::string name;
};
struct Module {
    void* library;
    int device;
};
static std::set<Function*>& functions = *new std::set<Function*>;
static std::map<std::string, long>& launches = *new std::map<std::string, long>;  // number of launches by kernel

API long standin_num_launches(const char* name) {
    Lock held(lock);
    long number = 0;
    for (auto& [kernel, count] : launches)
        if (!*name || kernel == name) number += count;
    return number;
}

static size_t length_of(const char* image) {
    auto header = reinterpret_cast<const Elf64_Ehdr*>(image);
    return header->e_shoff + header->e_shnum * header->e_shentsize;
}

API Error cuModuleLoadData(Module** module, const void* image) {
    touch();
    auto bytes = static_cast<const char*>(image);
    if (memcmp(bytes, ELFMAG, SELFMAG)) return fail(INVALID_VALUE);
    int file = memfd_create("kernels", MFD_CLOEXEC);
    size_t length = length_of(bytes);
    if (write(file, bytes, length) != static_cast<ssize_t>(length)) return close(file), fail(OUT_OF_MEMORY);
    std::string path = "/proc/self/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "CUDA on the host: %s\n", dlerror());
    // The file stays open: the loader would take a later file of the same name for this library.
    if (!library) return fail(INVALID_VALUE);
    *module = new Module{library, current_device()};
    return SUCCESS;
}
API Error cuModuleUnload(Module*) { return SUCCESS; }  // its kernels may still be queued
API Error cuModuleGetFunction(Function** function, Module* module, const char* name) {
    Lock held(lock);
    void* bind = dlsym(module->library, (std::string("bind_") + name).c_str());
    if (!bind) return fail(SYMBOL_NOT_FOUND);
    *function = new Function{reinterpret_cast<Bind>(bind), module->device, name};
    functions.insert(*function);
    return SUCCESS;
}
API Error cuFuncGetAttribute(int* value, int attribute, Function*) {
    enum { MAX_THREADS = 0, SHARED_BYTES = 1, NUM_REGISTERS = 4 };
    *value = attribute == MAX_THREADS ? 1024 : attribute == NUM_REGISTERS ? 32 : 0;
    return SUCCESS;
}
API Error cuFuncSetAttribute(Function*, int, int) { return SUCCESS; }

API Error cuLaunchKernel(
    Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
    void* handle, void** arguments, void**
) {
    Lock held(lock);
    if (Error error = injected("cuLaunchKernel")) return fail(error);
    Stream* stream = stream_of(handle, held);
    if (!stream || !functions.count(function)) return fail(INVALID_HANDLE);
    if (stream->device != current_device() || function->device != stream->device) return fail(INVALID_HANDLE);
    Dim3 grid{gx, gy, gz}, block{bx, by, bz};
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024) return fail(INVALID_VALUE);
    Body body;
    function->bind(arguments, &body);
    Error error = push(stream, held, [=](Stream&, Number) { run_grid(grid, block, body); });
    if (!error) launches[function->name]++;
    return fail(error);
}
API Error cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, Function*, int, size_t) {
    return *number = 2, SUCCESS;
}
API Error cuOccupancyMaxPotentialBlockSize(int* grid, int* block, Function*, void*, size_t, int) {
    return *grid = 4, *block = 256, SUCCESS;
}
