"""Create fresh Debian roots with debootstrap, with this machine's mirror and pip settings, and run commands in them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi_tests.helpers.launch import ROOT

LIMIT_S = 3600
# Copied to another path, as the root's packages overwrite this one.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
COPIED = {path: path for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")} | {CERTIFICATES: "/root/cert.pem"}


def check_possible() -> None:
    """Exit with one line if this machine cannot create a root."""
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("error: needs root and debootstrap: apt-get install debootstrap")


def mirror() -> str:
    """Return the URL of apt's Debian mirror."""
    lines = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True)
    mirrors = [line for line in lines.stdout.split() if line.rstrip("/").endswith("/debian")]
    if not mirrors:
        sys.exit("error: apt has no Debian mirror whose URL ends in /debian: add one to its sources")
    return mirrors[0]


def make_root(root: Path, suite: str, packages: Sequence[str], clone: str) -> None:
    """Create a fresh Debian with some packages, this machine's pip configuration, and a clone of this checkout."""
    if root.exists():
        shutil.rmtree(root)  # safe: its mounts ended with the processes' mount namespaces
    root.mkdir(parents=True)
    recipe = Path("/usr/share/debootstrap/scripts", suite)
    script = [] if recipe.exists() else [str(recipe.with_name("sid"))]  # for suites newer than debootstrap
    options = ["--variant=minbase", *([f"--include={','.join(packages)}"] if packages else [])]
    words = ["debootstrap", *options, suite, str(root), mirror(), *script]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    for path, name in COPIED.items():
        if Path(path).exists():
            Path(f"{root}{name}").unlink(missing_ok=True)
            shutil.copy(path, f"{root}{name}")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{root}{clone}"], check=True)


def pip_folders() -> Iterator[str]:
    """Yield the local folders of wheels and packages in pip's configuration."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    for word in sorted(set(re.findall(r"(?:(?<=file://)|(?<![\w/:]))/[^\s'\"/][^\s'\"]*", settings))):
        folder = Path(word).parent if Path(word).name == "simple" else Path(word)
        if folder.is_dir():
            yield str(folder)


def run_inside(root: Path, folder: str, command: str, log: Path, limit_s: float = LIMIT_S) -> int:
    """Run a command in a folder of a root; its processes and mounts end with it.  Return its exit status."""
    bound = ("/dev", "/sys", *pip_folders())
    binds = [f"mkdir -p {root}{path} && mount --rbind {path} {root}{path}" for path in bound]
    inside = shlex.quote(f"cd {folder} && {command}; exit $?")  # a shell is process 1, as few other programs can be
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc"]
    words += ["bash", "-ec", "\n".join([*binds, f"exec chroot {root} bash -c {inside}"])]
    own = {name: value for name, value in os.environ.items() if re.match("PIP_|.*_proxy$", name, re.IGNORECASE)}
    own["PIP_CERT"] = COPIED[CERTIFICATES]
    env = own | {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
    with log.open("a") as file:
        print(f"\n$ {command}", file=file, flush=True)
        try:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            return subprocess.run(words, env=env, timeout=limit_s, **streams).returncode
        except subprocess.TimeoutExpired:
            return 124
