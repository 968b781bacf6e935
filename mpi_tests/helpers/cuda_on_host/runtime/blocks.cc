// A fiber runs threads of a block one after another, until one of them comes to a barrier: then another fiber goes on
// with the next thread.  When all have come, each fiber continues.  A kernel without barriers so takes one fiber.

#include "blocks.h"
#include "state.h"

#include <memory>
#include <sys/mman.h>
#include <ucontext.h>

extern "C" {
__thread Place standin_thread, standin_block, standin_block_size, standin_grid_size;
}

static const size_t STACK_BYTES = 256 << 10;

struct Fiber {
    ucontext_t context;
    Place thread;
    bool has_ended = false;
    void* stack;

    Fiber()
        : stack(
              mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
          ) {}
};

// The fibers of one block at a time, on one thread of the host.
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;  // of all blocks that have been run here
    Fiber* running = nullptr;
    ucontext_t home;
    const std::function<void()>* body;
    unsigned next, count;  // of the block's threads

    void run_threads() {
        while (next < count) {
            unsigned number = next++;
            Place size = standin_block_size;
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

    void wait() {
        running->thread = standin_thread;
        swapcontext(&running->context, &home);
    }

    void run(const std::function<void()>& kernel) {
        body = &kernel;
        next = 0;
        count = standin_block_size.x * standin_block_size.y * standin_block_size.z;
        size_t used = 0;
        while (next < count) start(used++);
        for (bool some = true; some;) {
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
        fiber.has_ended = false;
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

API void standin_syncthreads() { current.wait(); }

void run_grid(Place grid, Place block, const std::function<void()>& body) {
    standin_block_size = block;
    standin_grid_size = grid;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                standin_block = {x, y, z};
                current.run(body);
            }
}
