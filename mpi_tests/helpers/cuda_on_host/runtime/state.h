// Shared declarations of the stand-in for CUDA: streams, events, memory, and CUDA's errors.
//
// One lock guards all of it.  Work itself runs outside the lock, on a thread of its stream.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

using Error = int;

enum : Error {  // cudaError_t; those of the driver have the same numbers
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ILLEGAL_STATE = 401,
    INVALID_HANDLE = 400,
    SYMBOL_NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
};

using Lock = std::unique_lock<std::mutex>;
using Number = uint64_t;  // of an operation on its stream, or of a recording of an event, from 1 on

struct Stream;
struct Capture;
using Clock = std::map<Stream*, Number>;  // of a capture: the last operation of each stream before a point

struct File {  // memory that lives as long as a process has it open; other processes open it by its path
    int descriptor = -1;
    std::string path;
};

// The progress of an event; of an interprocess event, in shared memory.
struct Counts {
    std::atomic<Number> recorded, reached, wanted;
    std::atomic<double> reached_at_s;
};

struct Event {
    int device;
    unsigned flags;
    Counts* counts;
    File file;                   // of an interprocess event
    bool opened = false;         // created by another process
    Capture* capture = nullptr;  // the capture of its last recording
    Clock clock = {};
};

struct Work {
    std::function<void(Stream&, Number)> run;
    std::vector<std::pair<Stream*, Number>> after;  // by the rules of the legacy default stream
};

struct Recording {  // a recording of an event in a stream's queue
    Counts* counts;
    Number number, position;
};

struct Stream {
    int device;
    unsigned flags;
    int priority;
    bool alive = true;
    std::deque<Work> queue = {};
    std::deque<Recording> recordings = {};
    Number pushed = 0, done = 0;
    Number wanted = 0;  // a caller waits up to this operation: then there is no lag
    Capture* capture = nullptr;
};

struct Capture {
    Stream* origin;
    unsigned long id;
    int mode;
    Error broken = SUCCESS;
    std::vector<std::function<void(Stream&, Number)>> nodes = {};
    std::map<Stream*, Clock> clocks = {};
};

// state.cc
extern std::mutex& lock;
extern std::condition_variable& changed;
extern std::atomic<Error> sticky;       // the error of a failed operation: all later calls fail with it
Error fail(Error);                      // set the next result of cudaGetLastError
Error misuse(const char* format, ...);  // undefined behaviour: counted, reported, and refused
Error injected(const char* function);  // the error that a test has requested for this call, once
double now_s();
long setting(const char* name, long value);

// devices.cc
int num_devices();
int current_device();
void touch();  // mark the current device as used: its first use creates a context

// streams.cc
Stream* stream_of(void* handle, Lock&);  // null if there is none
Error push(Stream*, Lock&, std::function<void(Stream&, Number)>);
void finish(Stream&, Number until, Lock&);
Error finish_device(int device, Lock&);
bool is_capturing(Lock&);
Error refuse_in_capture(Lock&);  // for calls forbidden during a capture in global mode; they end the capture
Error broken(Capture*, Error);   // end a capture with an error

// memory.cc
bool is_pageable(const void*, Lock&);
File new_file(size_t nbytes);  // without a path if there is no memory
void* map_file(const std::string& path, size_t nbytes);

// faults.cc
void guarded(const std::function<void()>&);  // run a function; a fault ends it and becomes the sticky error

void count_wait();
