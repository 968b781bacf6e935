// NVRTC on top of a C++ compiler: a "cubin" is a shared object.  The first process that needs one compiles it into the
// folder CUDA_ON_HOST_CACHE.

#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

enum Result {
    SUCCESS,
    OUT_OF_MEMORY,
    PROGRAM_CREATION_FAILURE,
    INVALID_INPUT,
    INVALID_PROGRAM,
    INVALID_OPTION,
    COMPILATION
};

struct Program {
    std::string source;
    std::vector<std::string> expressions = {};        // names of template instances
    std::map<std::string, std::string> lowered = {};  // their names in the object
    std::string object = {}, log = {};
};

static std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

static std::string hexadecimal(size_t number) {
    std::stringstream text;
    text << std::hex << number;
    return text.str();
}

// The kernels that are not templates: the name before the first parenthesis after each of these words.
static std::vector<std::string> kernels_of(const std::string& source) {
    static const std::string words = "extern \"C\" __global__ ", spaces = " \t\n*&";
    std::vector<std::string> names;
    for (size_t at = source.find(words); at != source.npos; at = source.find(words, at + 1)) {
        size_t end = source.find_last_not_of(spaces, source.find('(', at) - 1);
        size_t begin = source.find_last_of(spaces, end) + 1;
        names.push_back(source.substr(begin, end + 1 - begin));
    }
    return names;
}

// CuPy's headers, but not those of a CUDA toolkit that it has found.
static bool is_cupys(const std::string& option) { return option.find("/cupy/") != std::string::npos; }

static std::string translated(Program& program) {
    bool has_headers = program.source.find("#include <cupy/") != std::string::npos;
    std::stringstream code;
    code << "#include \"device/" << (has_headers ? "cupy.h" : "ours.h") << "\"\n#line 1\n"
         << program.source << "\n#include \"device/entry.h\"\n";
    for (auto& name : kernels_of(program.source)) code << "ENTRY(" << name << ", " << name << ")\n";
    for (auto& expression : program.expressions) {
        std::string name = "instance_" + hexadecimal(std::hash<std::string>()(expression));
        program.lowered[expression] = name;
        code << "ENTRY(" << name << ", " << expression << ")\n";
    }
    return code.str();
}

static std::string includes() {
    std::string here = getenv("CUDA_ON_HOST_SOURCES");
    return " -I'" + here + "' -I'" + here + "/device/include'";
}

static const char* const FLAGS = " -std=c++17 -O0 -w -ffp-contract=off -fno-strict-aliasing -shared -fPIC";

static std::string compiler() { return std::string(getenv("CUDA_ON_HOST_COMPILER")) + FLAGS + includes(); }

// Precompile the header of our kernels, as parsing it takes most of their compilation.  GCC looks for the result beside
// the kernel's source, and ignores it if it does not fit; other compilers do not look for it.
static void precompile_header() {
    std::string folder = std::string(getenv("CUDA_ON_HOST_CACHE")) + "/device";
    mkdir(folder.c_str(), 0700);
    int file = open((folder + "/ours.lock").c_str(), O_CREAT | O_RDWR, 0600);
    flock(file, LOCK_EX);
    std::string path = folder + "/ours.h.gch", part = folder + "/ours.part";
    std::string header = std::string(getenv("CUDA_ON_HOST_SOURCES")) + "/device/ours.h";
    if (access(path.c_str(), R_OK)) {
        std::string command = compiler() + " -x c++-header '" + header + "' -o '" + part + "' 2> /dev/null";
        if (system(command.c_str()) == 0) rename(part.c_str(), path.c_str());
    }
    close(file);
}

// Compile a program unless its object is cached.  Returns the path of the object without its suffix.
static std::string compiled(const std::string& code, const std::string& options) {
    std::string base =
        std::string(getenv("CUDA_ON_HOST_CACHE")) + "/" + hexadecimal(std::hash<std::string>()(code + options));
    int file = open((base + ".lock").c_str(), O_CREAT | O_RDWR, 0600);
    flock(file, LOCK_EX);
    if (access((base + ".so").c_str(), R_OK)) {
        std::ofstream(base + ".cc") << code;
        if (code.find("device/ours.h") != std::string::npos) precompile_header();
        std::string command =
            compiler() + options + " '" + base + ".cc' -o '" + base + ".part' 2> '" + base + ".log'";
        if (system(command.c_str()) == 0) rename((base + ".part").c_str(), (base + ".so").c_str());
    }
    close(file);
    return base;
}

API const char* nvrtcGetErrorString(int result) {
    static const char* const words[] = {
        "NVRTC_SUCCESS",
        "NVRTC_ERROR_OUT_OF_MEMORY",
        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "NVRTC_ERROR_INVALID_INPUT",
        "NVRTC_ERROR_INVALID_PROGRAM",
        "NVRTC_ERROR_INVALID_OPTION",
        "NVRTC_ERROR_COMPILATION",
    };
    return words[result];
}
API int nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 9, SUCCESS; }
API int nvrtcGetNumSupportedArchs(int* number) { return *number = 2, SUCCESS; }
API int nvrtcGetSupportedArchs(int* architectures) { return architectures[0] = 80, architectures[1] = 90, SUCCESS; }
API int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**, const char**) {
    return *program = new Program{source}, SUCCESS;
}
API int nvrtcDestroyProgram(Program** program) { return delete *program, SUCCESS; }
API int nvrtcAddNameExpression(Program* program, const char* expression) {
    return program->expressions.push_back(expression), SUCCESS;
}
API int nvrtcCompileProgram(Program* program, int count, const char** given) {
    std::string options;
    for (int i = 0; i < count; i++)
        if (!strncmp(given[i], "-D", 2) || (!strncmp(given[i], "-I", 2) && is_cupys(given[i])))
            options += std::string(" '") + given[i] + "'";
    if (program->source.empty()) return program->object = "none", SUCCESS;  // CuPy's query of the compiler's version
    std::string base = compiled(translated(*program), options);
    program->log = content(base + ".log");
    program->object = content(base + ".so");
    return program->object.empty() ? COMPILATION : SUCCESS;
}
API int nvrtcGetLoweredName(Program* program, const char* expression, const char** name) {
    auto found = program->lowered.find(expression);
    if (found == program->lowered.end()) return INVALID_INPUT;
    return *name = found->second.c_str(), SUCCESS;
}
static int size_of(const std::string& text, size_t* size) { return *size = text.size() + 1, SUCCESS; }
static int copy(const std::string& text, char* to) { return memcpy(to, text.c_str(), text.size() + 1), SUCCESS; }
API int nvrtcGetCUBINSize(Program* program, size_t* size) { return size_of(program->object, size); }
API int nvrtcGetCUBIN(Program* program, char* to) { return copy(program->object, to); }
API int nvrtcGetPTXSize(Program* program, size_t* size) { return size_of(program->object, size); }
API int nvrtcGetPTX(Program* program, char* to) { return copy(program->object, to); }
API int nvrtcGetProgramLogSize(Program* program, size_t* size) { return size_of(program->log, size); }
API int nvrtcGetProgramLog(Program* program, char* to) { return copy(program->log, to); }
