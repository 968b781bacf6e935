"""The host's name, addresses and network interfaces."""

import fcntl
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from collectives.doctor import child
from collectives.doctor.finding import Finding, Setting, note, ok

SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
RESOLVE = "import socket; print(socket.gethostbyname(socket.gethostname()))"


class Interface(NamedTuple):
    name: str
    address: str  # IPv4, "" if it has none
    mbit_s: int | None  # where the system tells

    def __str__(self) -> str:
        speed = "speed unknown" if self.mbit_s is None else f"{self.mbit_s / 1000:g} Gbit/s"
        return f"{self.name} {self.address} ({speed})"


def interfaces(setting: Setting) -> list[Interface]:
    """Those that are up and have an address, less the loopback."""
    folder = setting.root / "sys/class/net"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = [Interface(name, address(name), speed(folder / name)) for name in names if name != "lo"]
    return [interface for interface in found if interface.address]


def address(name: str) -> str:
    """An interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def speed(folder: Path) -> int | None:
    """In Mbit/s; virtual interfaces have none, or say -1."""
    try:
        mbit_s = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit_s if mbit_s > 0 else None


def network(setting: Setting) -> Iterator[Finding]:
    """What leads to other hosts."""
    found = [str(interface) for interface in interfaces(setting)] + fabrics(setting.root)
    if found:
        yield ok(", ".join(found))
    else:
        yield note("no interface with an address, other than loopback", "bring one up to run ranks on several hosts")


def fabrics(root: Path) -> list[str]:
    """InfiniBand ports and their rates."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/rate"))
    return [f"{port.parents[2].name} port {port.parent.name} ({port.read_text().strip()})" for port in ports]


def host_name(setting: Setting) -> Iterator[Finding]:
    """Whether the host's own name leads to an address that others can use."""
    name = socket.gethostname()
    ended = child.run([sys.executable, "-c", RESOLVE], setting.limit_s)
    remedy = f"give {name} its address in /etc/hosts or the DNS, or name the interface to mpirun"
    if ended.how:
        yield note(f"{name} cannot be resolved: {ended}", remedy)
    elif ended.output.startswith("127.") and interfaces(setting):
        yield note(f"{name} is {ended.output.strip()}, which other hosts cannot reach", remedy)
    else:
        yield ok(f"{name} is {ended.output.strip()}")
