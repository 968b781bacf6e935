"""NVIDIA's run-time compiler, which needs neither a GPU nor a driver.

It runs in a separate process, as this one may have loaded the stand-in's libraries of the same names (`cuda_on_host`).

Source: NVRTC documentation, "User Interface": https://docs.nvidia.com/cuda/nvrtc/.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path


def library() -> Path | None:
    """Return the path of the library in the wheel nvidia-cuda-nvrtc-cu12, or None if it is not installed."""
    spec = find_spec("nvidia.cuda_nvrtc") if find_spec("nvidia") else None
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in Path(folder).glob("lib/libnvrtc.so.*")), None)


def ptx(source: str, names: Sequence[str], options: Sequence[str]) -> str:
    """Return the PTX of template instances; if `options` name a device's sm_, also compile machine code.

    Raises: ValueError with the compiler's messages.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(compile_here, source, names, options).result()


def compile_here(source: str, names: Sequence[str], options: Sequence[str]) -> str:
    nvrtc = ctypes.CDLL(str(library()))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    for name in names:
        assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
    flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    if failed:
        raise ValueError(text(nvrtc, "ProgramLog", program))
    for name in names:
        assert nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(ctypes.c_char_p())) == 0, name
    return text(nvrtc, "PTX", program)


def text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    content = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, content) == 0
    return content.value.decode()
