// The entry point of a kernel for the stand-in: binding copies the kernel's arguments.

template <typename... Arguments>
static std::function<void()> bound(void (*kernel)(Arguments...), void** pointers) {
    std::tuple<std::decay_t<Arguments>...> arguments;
    int i = 0;
    std::apply(
        [&](auto&... each) { (std::memcpy(static_cast<void*>(&each), pointers[i++], sizeof each), ...); }, arguments
    );
    return [kernel, arguments] { std::apply(kernel, arguments); };
}

#define ENTRY(name, ...) \
    extern "C" void bind_##name(void** pointers, std::function<void()>* body) { *body = bound(&__VA_ARGS__, pointers); }
