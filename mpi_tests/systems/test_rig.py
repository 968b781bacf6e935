"""The rig replaces any earlier one, is removed completely, and explains in one line why it cannot be set up."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from mpi_tests import rig
from mpi_tests.helpers.documents import command_with
from mpi_tests.helpers.launch import ROOT, watched
from mpi_tests.rig import Rig, RigError, UnavailableError, is_hydra, job_environment, on

pytestmark = pytest.mark.shares_cores

# If a process exits at once, Open MPI's daemon may miss its exit, and mpirun hangs.
SLOWLY = "sleep 1; "
COMMAND = (sys.executable, "-m", "mpi_tests.rig")
NETNS = Path("/run/netns")


@pytest.fixture
def allowed():
    """Skip the test if this machine does not support a rig."""
    try:
        with Rig(hosts=1):
            pass
    except UnavailableError as error:
        pytest.skip(str(error))


def act(*arguments, **environment):
    return watched([*COMMAND, *arguments], job_environment() | environment, 60)


def namespaces():
    return sorted(path.name for path in NETNS.glob("rig*"))


def all_gone():
    with rig.lock():  # another process may have started a rig
        return namespaces() == [] and not rig.STATE.exists()


def refusal(*arguments, **environment):
    result = act(*arguments, **environment)
    assert result.returncode == 1
    assert all_gone()
    assert result.stderr.count("\n") == 1
    return result.stderr.rstrip().removeprefix("error: ")


def wait_for(happened):
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    status = Path("/proc", str(pid), "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_hosts_have_names_and_memory_of_their_own(allowed):
    with Rig(hosts=2, rate="none"):
        for host in ("rig1", "rig2"):
            command = on(host, "sh", "-c", "hostname; touch /dev/shm/of_$(hostname); ls /dev/shm; getent hosts rig2")
            words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            assert words == [host, f"of_{host}", "10.77.0.2", "rig2"]
        memory = on("rig2", "ls", "/dev/shm")
        assert subprocess.run(memory, capture_output=True, text=True, check=True).stdout == "of_rig2\n"
        rig.lose("rig2")
        assert subprocess.run(memory, capture_output=True, text=True, check=True).stdout == ""
    assert all_gone()


def test_a_rig_that_died_leaves_nothing_behind(allowed):
    """Half of the rig is missing, a file has the name of a namespace, and a process is still running."""
    with rig.lock():
        Rig(hosts=3).up()
        survivor = subprocess.Popen(on("rig2", "sh", "-c", "echo there; sleep 1000"), stdout=subprocess.PIPE, text=True)
        assert survivor.stdout.readline() == "there\n"
        rig.ip("netns", "del", "rig3")
        (NETNS / "rig7").touch()
        (rig.STATE / "hosts").unlink()
        Rig(hosts=2).up()
        survivor.communicate(timeout=30)
        assert survivor.returncode == -9
        assert namespaces() == ["rig0", "rig1", "rig2"]
        rig.down()
        rig.down()
    assert all_gone()


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_run_that_is_ended(allowed, signal):
    """On SIGTERM the run takes its rig down; after a SIGKILL, the next start does."""
    running = subprocess.Popen(
        [*COMMAND, "run", "--hosts", "2", "--", "sleep", "1000"], env=job_environment(), cwd=ROOT
    )
    wait_for(lambda: {"rig1", "rig2"} <= set(namespaces()) and len(rig.processes("rig2")) > 2)
    pids = rig.processes("rig1") + rig.processes("rig2")
    subprocess.run(["kill", f"-{signal}", str(running.pid)], check=True)
    running.wait(30)
    if signal == "KILL":
        with Rig(hosts=1):
            assert namespaces() == ["rig0", "rig1"]
    assert all_gone()
    assert not [pid for pid in pids if alive(pid)]


def test_a_run_ends_as_its_command_does(allowed):
    assert act("run", "--hosts", "2", "--", "sh", "-c", SLOWLY).returncode == 0
    assert act("run", "--hosts", "2", "--", "sh", "-c", f"{SLOWLY} exit 3").returncode == 3
    assert all_gone()


def test_up_and_down(allowed):
    assert act("up", "--hosts", "2").stdout.startswith("the rig is up: mpi_tests/rig_agent.sh rig1 mpirun --hostfile ")
    assert act("down").returncode == 0
    assert all_gone()


def test_64_ranks_on_eight_hosts(allowed, tmp_path):
    """The hostfile is the example, with the names of the hosts edited."""
    assert command_with("8x8") == "mpirun --hostfile hostfiles/8x8.txt -np 64 python train.py"
    example = ROOT / "hostfiles" / f"8x8{'.mpich' if is_hydra() else ''}.txt"
    (tmp_path / "hosts").write_text(example.read_text().replace("node", "rig"))
    with Rig(hosts=8, slots=8) as hosts:
        result = hosts.launch("sh", "-c", f"{SLOWLY} hostname", hostfile=tmp_path / "hosts")
    assert Counter(result.stdout.split()) == {f"rig{number}": 8 for number in range(1, 9)}, result.stderr


def test_bad_input(allowed):
    assert refusal("up", "--hosts", "0") == refusal("run", "--hosts", "0", "--", "true") == "--hosts 0: pass 1 to 200"
    assert refusal("up", "--slots", "-1") == "--slots -1: pass 1 or more"
    assert refusal("up", "--rate", "fast").endswith('tbf: illegal value for "rate": "fast"')


def test_without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="needs root"):
        rig.lock()


def test_without_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match=r"needs ip, tc, nsenter, .* install iproute2"):
        rig.lock()


def test_without_a_limit_of_rates(allowed, tmp_path):
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2")
    (tmp_path / "tc").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert refusal("up", **environment).endswith("Error: Specified qdisc kind is unknown.")
    assert act("run", "--hosts", "1", "--rate", "none", "--", "sleep", "1", **environment).returncode == 0


def test_a_broken_ip_is_no_reason_to_skip(allowed):
    with pytest.raises(RigError, match="no-such-action") as caught:
        rig.ip("no-such-action")
    assert not isinstance(caught.value, UnavailableError)


def test_hosts_have_a_rate_and_a_part_of_the_cores_each(allowed):
    """The part is a limit: a host whose processes compute all the time gets no more."""
    program = "import time; s, b = time.time(), time.process_time()"
    program += "; [sum(range(100)) for _ in iter(lambda: time.time() < s + 1, False)]"
    program += "; print(time.process_time() - b)"
    with Rig(hosts=2, rate="1gbit,300mbit", cpu="none,0.5") as hosts:
        rates = [
            re.findall(r"rate (\S+)", subprocess.check_output(["tc", "-n", f"rig{n}", "qdisc", "show"], text=True))
            for n in (1, 2)
        ]
        assert rates == [["1Gbit"], ["300Mbit"]]
        hosts.set_rate(1, "100mbit")
        assert "rate 100Mbit" in subprocess.check_output(["tc", "-n", "rig1", "qdisc", "show"], text=True)
        for fraction in (0.5, 0.25):
            hosts.set_cpu(2, fraction)
            used_s = float(subprocess.check_output(on("rig2", sys.executable, "-c", program), text=True))
            assert used_s < 1.2 * fraction * os.cpu_count() / 2
    assert all_gone()


def test_a_link_has_a_rate_each_way(allowed):
    """So much goes from one host to another, while both send to a third at their own rates."""
    receive = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        while connection.recv(1 << 16):
            pass
        connection.close()
"""
    send = """
import socket, sys, time
rates = []
for number in sys.argv[1:]:
    with socket.create_connection((f"rig{number}", 5001)) as connection:
        begin_s = time.monotonic()
        sent = sum(connection.send(bytes(1 << 16)) for _ in iter(lambda: time.monotonic() < begin_s + 1, False))
    rates.append(8e-6 * sent / (time.monotonic() - begin_s))
print(*rates)
"""
    with Rig(hosts=3, rate="500mbit", links=["1-3=50mbit"]):
        servers = [
            subprocess.Popen(on(f"rig{n}", sys.executable, "-c", receive), stdout=subprocess.PIPE) for n in (1, 2, 3)
        ]
        for server in servers:
            assert server.stdout.readline() == b"ready\n"
        for sender, others in ((1, (2, 3)), (3, (2, 1))):
            output = subprocess.check_output(on(f"rig{sender}", sys.executable, "-c", send, *others), text=True)
            fast, slow = map(float, output.split())
            assert slow < 75 < 100 < fast, output
    for server in servers:  # ended with their hosts
        server.communicate(timeout=10)
    assert all_gone()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--link", "1-5=1gbit"], "--link 1-5=1gbit: pass two hosts from 1 to 4 and a rate, as 1-2=100mbit"),
        (["--link", "2-2=1gbit"], "--link 2-2=1gbit: pass two hosts from 1 to 4 and a rate, as 1-2=100mbit"),
        (["--link", "2=1gbit"], "--link 2=1gbit: pass two hosts from 1 to 4 and a rate, as 1-2=100mbit"),
        (["--rate", "1gbit,1gbit,1gbit"], "--rate 1gbit,1gbit,1gbit: pass one for all hosts, or 4 separated by commas"),
        (["--cpu", "1,2,1,1"], "--cpu 2: pass fractions above 0, up to 1, or none"),
        (["--cpu", "half"], "--cpu half: pass fractions above 0, up to 1, or none"),
    ],
)
def test_values_of_hosts_that_do_not_fit_are_refused(flags, words):
    assert refusal("up", *flags) == words
