// Devices: CUDA_ON_HOST_DEVICES of them; each thread has a current one.

#include "state.h"

#include <cstdio>
#include <cstring>

static thread_local int current = 0;
static std::atomic<unsigned long> contexts{0};

int num_devices() {
    static const int number = setting("CUDA_ON_HOST_DEVICES", 1);
    return number;
}
int current_device() { return current; }
void touch() { contexts |= 1ul << current; }

// One bit for each device that the process has used since the last call.
API unsigned long standin_contexts() { return contexts.exchange(0); }

API Error cudaDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
API Error cudaRuntimeGetVersion(int* version) { return *version = 12090, SUCCESS; }
API Error cudaGetDeviceCount(int* count) { return *count = num_devices(), SUCCESS; }
API Error cudaGetDevice(int* device) { return *device = current, SUCCESS; }
API Error cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}

API Error cudaDeviceGetAttribute(int* value, int attribute, int device) {
    enum {
        MAX_THREADS = 1,
        WARP = 10,
        MULTIPROCESSORS = 16,
        MAJOR = 75,
        MINOR = 76,
        MEMORY_POOLS = 115,
        MULTICAST = 132
    };
    if (device < 0 || device >= num_devices()) return fail(INVALID_DEVICE);
    static const std::map<int, int> values{
        {MAX_THREADS, 1024}, {WARP, 32},        {MULTIPROCESSORS, 4}, {MAJOR, 9},
        {MINOR, 0},          {MEMORY_POOLS, 0}, {MULTICAST, 0},
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 1 : found->second;
    return SUCCESS;
}
API Error cudaGetDeviceProperties_v2(char* properties, int device) {
    if (device < 0 || device >= num_devices()) return fail(INVALID_DEVICE);
    memset(properties, 0, 1024);
    strcpy(properties, "CUDA on the host");
    return SUCCESS;
}
API Error cudaGetDeviceProperties(char* properties, int device) {
    return cudaGetDeviceProperties_v2(properties, device);
}
API Error cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}
API Error cudaDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, SUCCESS; }
API Error cudaDeviceEnablePeerAccess(int, unsigned) { return SUCCESS; }
API Error cudaDeviceDisablePeerAccess(int) { return SUCCESS; }
API Error cudaDeviceGetLimit(size_t* value, int) { return *value = 1 << 20, SUCCESS; }
API Error cudaDeviceSetLimit(int, size_t) { return SUCCESS; }
API Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, SUCCESS; }
API Error cudaDeviceSynchronize() {
    count_wait();
    Lock held(lock);
    touch();
    return fail(finish_device(current, held));
}
API Error cudaProfilerStart() { return SUCCESS; }
API Error cudaProfilerStop() { return SUCCESS; }

// The driver's contexts, one per device.
static void* context_of(int device) { return reinterpret_cast<void*>(0x1000ul + device); }
API Error cuInit(unsigned) { return SUCCESS; }
API Error cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
API Error cuCtxGetCurrent(void** context) { return *context = context_of(current), SUCCESS; }
API Error cuCtxSetCurrent(void* context) {
    return cudaSetDevice(static_cast<int>(reinterpret_cast<uintptr_t>(context) - 0x1000));
}
API Error cuCtxGetDevice(int* device) { return *device = current, SUCCESS; }
API Error cuDeviceGet(int* device, int ordinal) { return *device = ordinal, SUCCESS; }
API Error cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
API Error cuDeviceGetAttribute(int* value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
API Error cuDevicePrimaryCtxRetain(void** context, int device) { return *context = context_of(device), SUCCESS; }
API Error cuDevicePrimaryCtxRelease(int) { return SUCCESS; }
