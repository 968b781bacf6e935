// Work that accesses unmapped memory ends as on a GPU: with a sticky error.

#include "state.h"

#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <initializer_list>

static thread_local sigjmp_buf escape;
static thread_local bool is_guarded = false;
static struct sigaction before[64];

static void on_signal(int number, siginfo_t*, void*) {
    if (is_guarded) siglongjmp(escape, number == SIGFPE ? LAUNCH_FAILURE : ILLEGAL_ADDRESS);
    sigaction(number, &before[number], nullptr);  // not from our work: it recurs, and reaches the earlier handler
}

static void install() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(number, &action, &before[number]);
}

// Signal handlers have a stack of their own, as the kernel's may be exhausted.
static void prepare_thread() {
    static const size_t STACK_BYTES = 64 << 10;
    stack_t stack = {};
    stack.ss_sp = malloc(STACK_BYTES);
    stack.ss_size = STACK_BYTES;
    sigaltstack(&stack, nullptr);
}

void guarded(const std::function<void()>& run) {
    static bool installed = (install(), true);
    static thread_local bool prepared = (prepare_thread(), true);
    if (!installed || !prepared) return;
    if (sticky.load()) return;
    if (int error = sigsetjmp(escape, 1)) {
        sticky = error;
    } else {
        is_guarded = true;
        run();
    }
    is_guarded = false;
}

// For kernels: end the work with an error.
API void standin_trap(Error error) { siglongjmp(escape, error); }
