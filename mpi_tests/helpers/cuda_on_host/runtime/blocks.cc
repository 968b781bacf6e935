// A fiber runs threads of a block one after another, until one of them reaches a barrier: then another fiber continues
// with the next thread.  When all threads have arrived, each fiber resumes.  A kernel without barriers needs one fiber.
//
// Blocks run one after another, too, until a thread sleeps because it waits for another block or device: then all
// remaining blocks start at once, each on a host thread.

#include "blocks.h"
#include "state.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <ucontext.h>

extern "C" {
__thread Dim3 standin_thread, standin_block, standin_block_size, standin_grid_size;
}

static const size_t STACK_BYTES = 256 << 10;

struct Fiber {
    ucontext_t context;
    Dim3 thread;
    bool has_ended = false, sleeps = false;  // if neither, it is at a barrier
    void* stack;

    Fiber()
        : stack(
              mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
          ) {}
};

// The fibers of one block at a time, on one thread of the host.
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;  // reused by all blocks that run here
    Fiber* running = nullptr;
    ucontext_t home;
    const std::function<void()>* body;
    unsigned next, count;  // threads of the block

    void run_threads() {
        while (next < count) {
            unsigned number = next++;
            Dim3 size = standin_block_size;
            standin_thread = {number % size.x, number / size.x % size.y, number / size.x / size.y};
            (*body)();
        }
        running->has_ended = true;
    }

    void resume(Fiber& fiber) {
        running = &fiber;
        standin_thread = fiber.thread;
        swapcontext(&home, &fiber.context);
    }

    void wait(bool sleeps) {
        running->thread = standin_thread;
        running->sleeps = sleeps;
        swapcontext(&running->context, &home);
    }

    // Run all threads up to a barrier or to their end.
    void wake(size_t used) {
        for (bool some = true; some;) {
            some = false;
            for (size_t i = 0; i < used; i++)
                if (!fibers[i]->has_ended && fibers[i]->sleeps) {
                    some = true;
                    resume(*fibers[i]);
                }
            if (some) std::this_thread::yield();
        }
    }

    void run(const std::function<void()>& kernel) {
        body = &kernel;
        next = 0;
        count = standin_block_size.x * standin_block_size.y * standin_block_size.z;
        size_t used = 0;
        while (next < count) start(used++);
        for (bool some = true; some;) {
            wake(used);
            some = false;
            for (size_t i = 0; i < used; i++)
                if (!fibers[i]->has_ended) {
                    some = true;
                    resume(*fibers[i]);
                }
        }
    }

    void start(size_t number) {
        if (number == fibers.size()) fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers[number];
        fiber.has_ended = fiber.sleeps = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack, 0, STACK_BYTES};
        fiber.context.uc_link = &home;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(begin), 0);
        resume(fiber);
    }

    static void begin();
};

static thread_local Block current;

void Block::begin() { current.run_threads(); }

// The blocks of a kernel.
struct Grid {
    Dim3 size, block_size;
    const std::function<void()>& body;
    std::atomic<unsigned> next{0};
    std::mutex starting;
    std::vector<std::thread> others;

    unsigned count() const { return size.x * size.y * size.z; }
    void run_blocks(unsigned most);
    void start_others();
};
static thread_local Grid* grid;

void Grid::run_blocks(unsigned most) {
    grid = this;
    standin_block_size = block_size;
    standin_grid_size = size;
    for (unsigned number; most-- && (number = next++) < count();) {
        standin_block = {number % size.x, number / size.x % size.y, number / size.x / size.y};
        current.run(body);
    }
}

void Grid::start_others() {
    std::lock_guard<std::mutex> held(starting);
    if (!others.empty()) return;
    for (unsigned missing = count() - std::min(next.load(), count()); missing--;)
        others.emplace_back([this] { run_blocks(1); });
}

API void standin_syncthreads() { current.wait(false); }
API void standin_sleep() {
    grid->start_others();
    current.wait(true);
}

void run_grid(Dim3 size, Dim3 block_size, const std::function<void()>& body) {
    Grid blocks{size, block_size, body};
    blocks.run_blocks(blocks.count());
    for (auto& other : blocks.others) other.join();
}
