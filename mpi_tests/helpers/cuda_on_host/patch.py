"""Overwrite the functions of the CUDA runtime in CuPy's extension module by jumps to the stand-in's.

Source: System V ABI, "Symbol Table"; AMD64 Architecture Programmer's Manual, volume 3, MOV and JMP.
"""

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SYMBOL_TABLE, FUNCTION = 2, 2
READ_WRITE_EXECUTE = 7


class Symbol(NamedTuple):
    """A function of a module: its name, its offset from the module's base, and its size in bytes."""

    name: str
    offset: int
    nbytes: int


def functions(path: Path) -> Iterator[Symbol]:
    """Yield the functions that a module defines."""
    data = path.read_bytes()
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    nbytes, count, _ = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * nbytes) for i in range(count)]
    for _, kind, _, _, begin, length, strings, *_ in sections:
        if kind != SYMBOL_TABLE:
            continue
        names_at = sections[strings][4]
        for at in range(begin, begin + length, 24):
            name, info, _, section, value, size = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == FUNCTION and section and size:
                end = data.index(b"\0", names_at + name)
                yield Symbol(data[names_at + name : end].decode(), value, size)


def base_of(path: Path) -> int:
    """Return the base address of a loaded module."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, *_, name = line.split()
        if name == str(path) and int(offset, 16) == 0:
            return int(addresses.split("-")[0], 16)
    raise LookupError(f"{path} is not loaded")


def jump_to(address: int) -> bytes:
    return b"\x49\xbb" + struct.pack("<Q", address) + b"\x41\xff\xe3"  # mov r11, address; jmp r11


def refuse(name: int, refusal: int) -> bytes:
    """Return the machine code that calls `refusal` with a function's name."""
    return b"\x48\xbf" + struct.pack("<Q", name) + jump_to(refusal)  # mov rdi, name


def overwrite(address: int, code: bytes) -> None:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = address & -mmap.PAGESIZE
    if mprotect(page, address + len(code) - page, READ_WRITE_EXECUTE):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.memmove(address, code, len(code))


keep: list = []  # keeps the names alive that refusals print


def patch(path: Path, library: ctypes.CDLL) -> tuple[set[str], set[str]]:
    """Redirect the module's CUDA functions to the library's; return the names of redirected and of refused ones."""
    base = base_of(path)
    refusal = address_of(library, "standin_unsupported")
    supported, unsupported = set(), set()
    for symbol in functions(path):
        if not (symbol.name.startswith("cuda") and symbol.name[4:5].isupper()):
            continue
        ours = address_of(library, symbol.name)
        name = ctypes.create_string_buffer(symbol.name.encode())
        keep.append(name)
        code = jump_to(ours) if ours else refuse(ctypes.addressof(name), refusal or 0)
        if len(code) <= symbol.nbytes:
            overwrite(base + symbol.offset, code)
            (supported if ours else unsupported).add(symbol.name)
    return supported, unsupported


def address_of(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
