"""Emulate several hosts on one machine, with rate-limited links, for multi-node jobs.  Needs root.

python -m mpi_tests.rig run --hosts 4 --slots 2 --rate 1gbit -- python -m collectives.bench
python -m mpi_tests.rig run --hosts 4 --slots 1 --rate 1gbit,1gbit,300mbit,1gbit --cpu 1,1,0.5,0.25 -- python train.py
python -m mpi_tests.rig run --hosts 4 --slots 2 --rate 1gbit --link 1-3=100mbit --link 1-4=100mbit -- python train.py
python -m mpi_tests.rig up --hosts 4 --slots 2 --rate 100mbit
python -m mpi_tests.rig down

A host is a network namespace with an address, a hostname and a /dev/shm of its own: rig1, rig2, ...; a bridge in one
more namespace, rig0, connects them.  `tc` limits the rate at which each host sends and receives, or by `--link` sends
to another host, and a control group its CPU time, a fraction of its part of the machine's cores.  mpirun runs on rig1
and starts the ranks of the other hosts through `rig_agent.sh` in place of ssh.
"""

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from mpi_tests.helpers.cpu_limit import CPULimit
from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, watched

STATE = Path("/run/collectives-rig")  # rig_agent.sh uses the same path
HOSTFILE = STATE / "hostfile"
LOCK = STATE.with_name("collectives-rig.lock")
AGENT = ROOT / "mpi_tests" / "rig_agent.sh"
SWITCH = "rig0"
NETWORK = "10.77.0"
MOST_HOSTS = 200
# Burst size of a link at any rate: small, so that short messages are limited, too, but large enough for one offloaded
# bundle of packets, as segmenting longer bundles would cost a sixth of the rate.
BURST_BYTES, BUNDLE_BYTES = 20480, 16384
QUEUED_BUNDLES = 64  # on their way to one host, beyond which TCP sends no faster
NO_LIMIT = "100gbit"  # for a class of htb, which must have a rate
LINK = re.compile(r"(\d+)-(\d+)=(\w+)")
TOOLS = ("ip", "tc", "nsenter", "unshare", "mount", "hostname")
# Messages of ip and tc on a kernel without namespaces, veth, bridge or tbf, or in a container that may not use them.
BARRED = ("Operation not permitted", "Operation not supported", "Unknown device type", "qdisc kind is unknown")


class RigError(Exception):
    """The rig cannot be set up; the message gives the reason."""


class UnavailableError(RigError):
    """This machine does not support a rig."""


class Rig:
    """Context manager of emulated hosts with `slots` slots each; a second rig waits for the first to go down.

    `rate` and `cpu` are one for all hosts, or, separated by commas, each host's; cpu is a fraction, or "none".  `links`
    are rates between two hosts, counted from 1, each way, as "1-3=100mbit".
    """

    def __init__(self, hosts=4, slots=2, rate="1gbit", cpu="none", links=()):
        if not 1 <= hosts <= MOST_HOSTS:
            raise RigError(f"--hosts {hosts}: pass 1 to {MOST_HOSTS}")
        if slots < 1:
            raise RigError(f"--slots {slots}: pass 1 or more")
        self.hosts, self.slots = hosts, slots
        self.rates, self.cpus = split_values("rate", rate, hosts), split_values("cpu", cpu, hosts)
        for fraction in self.cpus:
            check_fraction(fraction)
        self.links = rates_of_links(links, hosts)

    def __enter__(self):
        self.lock = lock()
        try:
            self.up()
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, *_):
        down()
        self.lock.close()

    def up(self):
        """Set up the rig, replacing any existing one."""
        down()
        try:
            self.connect()
            self.describe()
        except BaseException:
            down()
            raise

    def connect(self):
        for name in (SWITCH, *self.names):
            ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names, 1):
            port = f"port{number}"
            ip("link", "add", port, "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up", "gso_max_size", BUNDLE_BYTES)
            ip("-n", name, "link", "set", "lo", "up")
            switch, host = link_of(number)
            limit(*switch, self.rates[number - 1])
            if self.links[number]:
                limit_by_dest(*host, self.rates[number - 1], self.links[number])
            else:
                limit(*host, self.rates[number - 1])

    def describe(self):
        """Write the files that the agent and mpirun read."""
        for name in self.names:
            memory_of(name).mkdir(parents=True)
            run("mount", "-t", "tmpfs", "tmpfs", str(memory_of(name)))
        for number, fraction in enumerate(self.cpus, 1):
            if fraction != "none":
                self.set_cpu(number, fraction)
        addresses = [f"{NETWORK}.{number} {name}\n" for number, name in enumerate(self.names, 1)]
        (STATE / "hosts").write_text("".join(["127.0.0.1 localhost\n", *addresses]))
        (STATE / "cores").write_text(str(max(1, (os.cpu_count() or 1) // self.hosts)))
        slots = ":" if is_hydra() else " slots="
        HOSTFILE.write_text("".join(f"{name}{slots}{self.slots}\n" for name in self.names))

    def set_rate(self, number, rate):
        """Change the rate of a host, counted from 1, which has one, and no links of other rates."""
        for namespace, device in link_of(number):
            limit(namespace, device, rate, "change")

    def set_cpu(self, number, fraction):
        """Limit the CPU time of a host, counted from 1, to a fraction of its part of the machine's cores."""
        group = CPULimit(f"collectives-rig{number}", float(fraction) * (os.cpu_count() or 1) / self.hosts)
        (STATE / f"rig{number}" / "tasks").write_text(str(group.tasks))

    @property
    def names(self):
        return [f"rig{number}" for number in range(1, self.hosts + 1)]

    def launch(self, *command, env=None, timeout=240, hostfile=HOSTFILE):
        """Launch a command on all slots of the rig, as `launch.launch` does on this machine."""
        env = job_environment() | (env or {})
        return watched(self.mpirun(*command, env=env, hostfile=hostfile), env, timeout)

    def mpirun(self, *command, env, hostfile=HOSTFILE):
        """Return the command line that runs `command` on all slots; it exports our variables of `env` to all hosts."""
        ours = [name for name in env if name.startswith("COLLECTIVES_")]
        flags = [] if is_hydra() else [word for name in ours for word in ("-x", name)]
        return on("rig1", find_mpirun(), "--hostfile", hostfile, "-n", self.hosts * self.slots, *flags, *command)


def on(host, *command):
    """Return the command line that runs `command` on one host."""
    return [str(AGENT), host, shlex.join(map(str, command))]


def job_environment():
    python = Path(sys.executable).parent
    return environment() | {"PATH": f"{python}:{os.environ['PATH']}"}


def is_hydra():
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=False)
    return "HYDRA" in version.stdout


def refuse():
    """Raise UnavailableError if this machine does not support a rig."""
    if os.geteuid() != 0:
        raise UnavailableError("the rig needs root, to make network namespaces")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise UnavailableError(f"the rig needs {', '.join(missing)} on the PATH: install iproute2 and util-linux")


def ip(*arguments):
    run("ip", *arguments)


def split_values(flag, values, hosts):
    """Return the value of each host, from one for all or from a list."""
    words = values.split(",")
    if len(words) not in (1, hosts):
        raise RigError(f"--{flag} {values}: pass one for all hosts, or {hosts} separated by commas")
    return words * (hosts // len(words))


def check_fraction(fraction):
    try:
        is_valid = fraction == "none" or 0 < float(fraction) <= 1
    except ValueError:
        is_valid = False
    if not is_valid:
        raise RigError(f"--cpu {fraction}: pass fractions above 0, up to 1, or none")


def rates_of_links(links, hosts):
    """Return, by host, counted from 1, the rates at which it sends to some others.

    >>> rates_of_links(["1-3=100mbit"], hosts=3)
    {1: {3: '100mbit'}, 2: {}, 3: {1: '100mbit'}}
    """
    rates = {number: {} for number in range(1, hosts + 1)}
    for text in links:
        match = LINK.fullmatch(text)
        ends = {int(match[1]), int(match[2])} if match else set()
        if len(ends) != 2 or not ends <= rates.keys():
            raise RigError(f"--link {text}: pass two hosts from 1 to {hosts} and a rate, as 1-2=100mbit")
        for source, dest in (sorted(ends), sorted(ends, reverse=True)):
            rates[source][dest] = match[3]
    return rates


def link_of(number):
    """Return both ends of the link of a host, counted from 1: namespace and device."""
    return (SWITCH, f"port{number}"), (f"rig{number}", "eth0")


def limit(namespace, device, rate, action="add"):
    """Limit the outgoing rate of `device`."""
    if rate != "none":
        shape = ("tbf", "rate", rate, "burst", f"{BURST_BYTES}b", "latency", "50ms")
        run("tc", "-n", namespace, "qdisc", action, "dev", device, "root", *shape)


def limit_by_dest(namespace, device, rate, rates):
    """Limit the outgoing rate of `device`, and the part of it that goes to each host in `rates`."""
    qdisc, cls, filters = (("tc", "-n", namespace, kind, "add", "dev", device) for kind in ("qdisc", "class", "filter"))
    rate = NO_LIMIT if rate == "none" else rate

    def add_class(parent, name, rate):
        burst = f"{BURST_BYTES}b"
        speed = ("rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", BUNDLE_BYTES)
        run(*cls, "parent", parent, "classid", name, "htb", *speed)

    run(*qdisc, "root", "handle", "1:", "htb", "default", MOST_HOSTS + 1)
    add_class("1:", f"1:{MOST_HOSTS + 2}", rate)
    for number, own in {MOST_HOSTS + 1: rate, **rates}.items():
        add_class(f"1:{MOST_HOSTS + 2}", f"1:{number}", own)
        run(*qdisc, "parent", f"1:{number}", "pfifo", "limit", QUEUED_BUNDLES)
    for number in rates:
        dest = ("u32", "match", "ip", "dst", f"{NETWORK}.{number}", "flowid", f"1:{number}")
        run(*filters, "parent", "1:", "protocol", "ip", *dest)


def run(*command):
    """Run a command; raise RigError with its message if it fails."""
    command = [*map(str, command)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        complaint = " ".join((result.stderr or result.stdout).split())
        error = UnavailableError if any(word in complaint for word in BARRED) else RigError
        raise error(f"the rig can't be made: {shlex.join(command)}: {complaint}")


def down():
    """Remove a rig, even one that is only partly set up: processes, namespaces with their links, files."""
    for path in Path("/run/netns").glob("rig*"):
        if re.fullmatch(r"rig\d+", path.name):
            end_processes(path.name)
            ip("netns", "del", path.name)
    for path in STATE.glob("*/shm"):
        if path.is_mount():
            run("umount", "--lazy", str(path))
    for path in STATE.glob("*/tasks"):
        Path(path.read_text()).parent.rmdir()
    shutil.rmtree(STATE, ignore_errors=True)


def lose(host):
    """Have a host lose all that it has: its processes, and its memory."""
    end_processes(host)
    for path in memory_of(host).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def memory_of(host):
    """Return the folder that is a host's /dev/shm."""
    return STATE / host / "shm"


def end_processes(namespace, patience_s=10):
    deadline = time.monotonic() + patience_s
    while pids := processes(namespace):
        if time.monotonic() > deadline:
            raise RigError(f"processes {pids} in {namespace} don't end")
        for pid in pids:
            kill(pid)
        time.sleep(0.05)


def processes(namespace):
    result = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in result.stdout.split()]


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def lock():
    """Wait until no other process uses the rig."""
    refuse()
    file = LOCK.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another process to release the rig", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def bring_up(flags):
    with lock():
        rig = Rig(flags.hosts, flags.slots, flags.rate, flags.cpu, flags.link)
        rig.up()
    agent = os.path.relpath(AGENT)
    print(f"the rig is up: {agent} rig1 mpirun --hostfile {HOSTFILE} -n {flags.hosts * flags.slots} ...")


def take_down(_):
    with lock():
        down()


def run_on(flags):
    with Rig(flags.hosts, flags.slots, flags.rate, flags.cpu, flags.link) as rig:
        env = job_environment()
        return subprocess.run(rig.mpirun(*flags.command, env=env), env=env, check=False).returncode


def main():
    flags = parse()
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # unwinds the stack, which takes the rig down
    try:
        sys.exit(flags.act(flags))
    except (RigError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def parse():
    parser = argparse.ArgumentParser(
        "python -m mpi_tests.rig", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True, metavar="run | up | down")
    runs = actions.add_parser("run", help="set up the rig, run a command on every slot, remove the rig")
    ups = actions.add_parser("up", help="set up the rig, replacing any existing one")
    actions.add_parser("down", help="remove the rig, even one that is only partly set up").set_defaults(act=take_down)
    for action, act in (runs, run_on), (ups, bring_up):
        action.set_defaults(act=act)
        action.add_argument("--hosts", type=int, default=4, help="number of hosts (%(default)s)")
        action.add_argument("--slots", type=int, default=2, help="slots per host (%(default)s)")
        text = "rate of each host's link and direction in tc's format, or none; one, or one a host (%(default)s)"
        action.add_argument("--rate", default="1gbit", help=text)
        text = "fraction of its part of the cores that a host gets, or none; one, or one a host (%(default)s)"
        action.add_argument("--cpu", default="none", help=text)
        text = "two hosts, counted from 1, and the rate between them each way; may be passed several times"
        action.add_argument("--link", action="append", default=[], metavar="A-B=RATE", help=text)
    runs.add_argument("command", nargs="+", metavar="-- command", help="command of every rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
