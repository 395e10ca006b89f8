"""Two hosts on one machine: network namespaces with their own names, addresses and shared memory.

Needs root. Every host is a network namespace. A program on it also gets its own name (a UTS
namespace), and its own /dev/shm and /etc/hosts (a mount namespace). One pair of virtual interfaces
with addresses in 10.77.0.0/24 joins the hosts; they reach nothing else.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ADDRESSES = "10.77.0.1", "10.77.0.2"


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

    def cut(self) -> None:
        """Takes the network between the hosts down."""
        _run(f"ip -n {self.names[1]} link set veth down")

    def mend(self) -> None:
        _run(f"ip -n {self.names[1]} link set veth up")

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
                [
                    "ip",
                    "netns",
                    "exec",
                    self.names[host],
                    "unshare",
                    "-u",
                    "-m",
                    "sh",
                    "-ec",
                    script,
                ],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Process(popen, output))
        return self.started[-1]

    def pause(self) -> None:
        time.sleep(0.05)

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
