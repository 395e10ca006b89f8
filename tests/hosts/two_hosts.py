"""Jobs over two hosts, made of network namespaces: ends, transports and failures.

    python tests/hosts/two_hosts.py [--jobs 20] [CASE ...]

Needs root, and is not part of the test suite: it takes some minutes, mostly to wait for JAX's
watchdog. Every wait has a deadline. Prints a line for each case; exits with 1 if a case fails.

Every host is a network namespace. A program on it also gets its own name (a UTS namespace), and its
own /dev/shm and /etc/hosts (a mount namespace). One pair of virtual interfaces with addresses in
10.77.0.0/24 joins the hosts; they reach nothing else.
"""

import argparse
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ADDRESSES = "10.77.0.1", "10.77.0.2"
PROGRAM = str(pathlib.Path(__file__).parent / "program.py")
LIMIT = 240.0  # seconds for any job


class Done(NamedTuple):
    """The exit code of a process (negative for a signal), its output, and its duration."""

    code: int
    text: str
    seconds: float


class Process(NamedTuple):
    """A process that runs on a host."""

    popen: subprocess.Popen
    output: pathlib.Path


class TwoHosts:
    """Creates the hosts on entry; on exit, ends processes that still run and removes the hosts."""

    def __init__(self):
        self.names = [f"cpd{os.getpid()}-{letter}" for letter in "ab"]
        self.started: list[Process] = []
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        if os.getuid() != 0:
            sys.exit("two hosts: needs root, for network namespaces")
        try:
            for host, name in enumerate(self.names):
                _run(f"ip netns add {name}")
                _run(f"ip -n {name} link set lo up")
                if host == 1:
                    peer = f"peer name veth netns {name}"
                    _run(f"ip link add veth netns {self.names[0]} type veth {peer}")
                self.set_hosts_file(host, "".join(map("{} {}\n".format, ADDRESSES, self.names)))
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _run(f"ip -n {name} address add {address}/24 dev veth")
                _run(f"ip -n {name} link set veth up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.end_all()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        self.folder.cleanup()

    def set_hosts_file(self, host: int, lines: str) -> None:
        """Sets /etc/hosts for programs that are started from now on."""
        text = f"127.0.0.1 localhost\n{lines}"
        pathlib.Path(self.folder.name, f"hosts{host}").write_text(text)

    def set_network(self, state: str) -> None:
        """Takes the network between the hosts "up" or "down"."""
        _run(f"ip -n {self.names[1]} link set veth {state}")

    def start(self, host: int, arguments: list[str], environment: dict[str, str]) -> Process:
        """Starts a Python program on a host."""
        output = pathlib.Path(self.folder.name, f"output{len(self.started)}")
        hosts_file = pathlib.Path(self.folder.name, f"hosts{host}")
        script = (
            f"hostname {self.names[host]}; mount -t tmpfs tmpfs /dev/shm; "
            f"mount --bind {hosts_file} /etc/hosts; "
            f"exec {shlex.join([sys.executable, '-u', *arguments])}"
        )
        with output.open("wb") as file:
            popen = subprocess.Popen(
                [*f"ip netns exec {self.names[host]} unshare -u -m sh -ec".split(), script],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Process(popen, output))
        return self.started[-1]

    def wait(self, processes: list[Process], limit: float) -> list[Done]:
        """Waits until all have ended; kills those that still run after `limit` seconds."""
        begin = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < len(processes) and time.monotonic() < begin + limit:
            for i, process in enumerate(processes):
                if i not in ended and process.popen.poll() is not None:
                    ended[i] = time.monotonic() - begin
            time.sleep(0.02)
        self.end_all()
        return [
            Done(process.popen.returncode, process.output.read_text(), ended.get(i, limit))
            for i, process in enumerate(processes)
        ]

    def end_all(self) -> None:
        for process in self.started:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


class Job:
    """The processes of one job, the first half on the first host."""

    ports = iter(range(20000, 30000))

    def __init__(self, hosts: TwoHosts, kind: str, *options: str, num_processes=2, devices=2):
        self.hosts, self.kind, self.options = hosts, kind, options
        self.num_processes, self.devices = num_processes, devices
        self.address = f"{ADDRESSES[0]}:{next(self.ports)}"

    def start(self, process: int, *options: str) -> Process:
        arguments = [self.address, str(self.num_processes), str(process), self.kind]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
            "PJRT_NPROC": str(2 * self.devices + 2),
        }
        return self.hosts.start(
            2 * process // self.num_processes,
            [PROGRAM, *arguments, *self.options, *options],
            environment,
        )

    def run(self, *last: str) -> list[Done]:
        """Runs all processes to their end; `last` holds options of the last one."""
        every = [self.start(p) for p in range(self.num_processes - 1)]
        every.append(self.start(self.num_processes - 1, *last))
        return self.hosts.wait(every, LIMIT)


def expect_success(all_done: list[Done]) -> None:
    for process, done in enumerate(all_done):
        assert done.code == 0, f"process {process} ended with {done.code}:\n{done.text[-3000:]}"
        assert done.text.endswith("done\n"), f"process {process}:\n{done.text[-3000:]}"


def ends(hosts: TwoHosts, num_jobs: int) -> str:
    """Ends well, whichever process has work left, and however much."""
    for _ in range(num_jobs):
        num_processes = random.choice([2, 4])
        work = [f"--work={random.choice([0, 0.1, 3, 6])}" for _ in range(2)]
        job = Job(hosts, "ends", work[0], num_processes=num_processes, devices=1)
        expect_success(job.run(work[1]))
    return f"{num_jobs} jobs of {num_jobs} ended well"


def checkpoint(hosts: TwoHosts, _) -> str:
    expect_success(Job(hosts, "ends").run("--work=15"))
    return "15 s of work after process 0 was done"


def inside(hosts: TwoHosts, _) -> str:
    for num_processes in 2, 4:
        expect_success(Job(hosts, "inside", num_processes=num_processes).run())
    return "groups inside a process and inside a host have the package's transport"


def begun(hosts: TwoHosts) -> list[Process]:
    """Starts a job whose hosts exchange for ever."""
    job = Job(hosts, "for ever")
    both = [job.start(process) for process in range(2)]
    end = time.monotonic() + LIMIT
    while not all("begun" in process.output.read_text() for process in both):
        said = [process.output.read_text()[-2000:] for process in both]
        assert all(process.popen.poll() is None for process in both), said
        assert time.monotonic() < end, f"it has not begun within {LIMIT} s"
        time.sleep(0.05)
    return both


def network(hosts: TwoHosts, _) -> str:
    """The network goes down permanently while both hosts exchange."""
    both = begun(hosts)
    hosts.set_network("down")
    try:
        all_done = hosts.wait(both, LIMIT)
    finally:
        hosts.set_network("up")
    for process, done in enumerate(all_done):
        assert done.code != 0 and done.seconds < LIMIT, f"process {process}: {done}"
    return f"both ended after {max(done.seconds for done in all_done):.0f} s"


def killed(hosts: TwoHosts, _) -> str:
    both = begun(hosts)
    both[1].popen.send_signal(signal.SIGKILL)
    done = hosts.wait(both, LIMIT)[0]
    assert done.code == 1 and done.seconds < 30, done
    assert "Error" in done.text, done.text
    return f"the other process got an error and ended after {done.seconds:.1f} s"


def alike(hosts: TwoHosts, num_jobs: int) -> str:
    """If memory cannot be shared, all processes learn it soon and get the same answer."""
    for kind, reason in ("one host", "Connection refused"), ("small files", "File too large"):
        num_processes = 2 if kind == "one host" else 4
        all_done = Job(hosts, kind, num_processes=num_processes, devices=1).run()
        expect_success(all_done)
        choices = {
            line for done in all_done for line in done.text.splitlines() if "choice: " in line
        }
        assert len(choices) == 1 and reason in choices.pop(), all_done
    return "one answer"


def missing(hosts: TwoHosts, num_jobs: int) -> str:
    for absent in 0, 1, 2:
        job = Job(hosts, "ends", "--timeout=8", num_processes=3, devices=1)
        here = [process for process in range(3) if process != absent]
        for done in hosts.wait([job.start(process) for process in here], LIMIT):
            assert done.code == 1 and "RuntimeError: initialize: " in done.text, done
            assert f"process {absent}" in done.text.splitlines()[-1], done
    return "named by all others"


def unreachable(hosts: TwoHosts, num_jobs: int) -> str:
    """A host name that resolves to the host itself, as Debian's installer writes it."""
    hosts.set_hosts_file(1, f"127.0.1.1 {hosts.names[1]}\n")
    try:
        for done in Job(hosts, "ends", devices=1).run():
            assert done.code == 1 and "RuntimeError: initialize: " in done.text, done
            assert "127.0.1.1" in done.text.splitlines()[-1], done
    finally:
        hosts.set_hosts_file(1, "".join(map("{} {}\n".format, ADDRESSES, hosts.names)))
    return "rejected by all"


def costs(hosts: TwoHosts, num_jobs: int) -> str:
    lines = []
    for num_processes in 2, 4:
        devices = 4 // num_processes
        all_done = Job(hosts, "costs", num_processes=num_processes, devices=devices).run()
        expect_success(all_done)
        lines += [line for line in all_done[0].text.splitlines() if " MB per rank: " in line]
    return "\n  ".join(["time of XLA's collectives on this machine", *lines])


CASES = ends, checkpoint, inside, alike, missing, unreachable, killed, network, costs


def main() -> None:
    names = [case.__name__ for case in CASES]
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(names))
    parser.add_argument("--jobs", type=int, default=20, help="of the case 'ends' (default: 20)")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(names):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so the hosts are removed
    failed = False
    with TwoHosts() as hosts:
        for case in CASES:
            if options.cases and case.__name__ not in options.cases:
                continue
            try:
                print(f"{case.__name__}: {case(hosts, options.jobs)}", flush=True)
            except AssertionError as error:
                failed = True
                print(f"{case.__name__}: FAILED\n{error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
