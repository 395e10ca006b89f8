"""Lets a job's processes meet before JAX's coordination starts, to name a missing process.

If a job is incomplete at its deadline, JAX ends the process without naming the missing one. JAX's
service must also know from the start whether the loss of one process ends all others.
"""

import contextlib
import json
import socket
import time
from typing import NamedTuple

_MAX_BYTES = 1 << 16
_GREETING_SECONDS = 5.0
_RETRY_SECONDS = 0.1


class JobMember(NamedTuple):
    """A process of the job, as described by itself."""

    process: int
    num_processes: int
    host: str  # equal for processes of one host
    host_name: str  # for messages


def meet(address: str, own: JobMember, timeout: float) -> bool:
    """Waits until all processes of the job have joined; returns whether all run on one host.

    Process 0 listens on the port of `address`. The port is free again when this returns.

    Raises:
      RuntimeError: a process did not join within `timeout` seconds, or two belong to different
        jobs. Raised in all processes that joined.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RuntimeError(
            f"initialize: coordinator_address is {address!r}; it needs to be host:port of process "
            "0, for example 10.0.0.1:1234."
        )
    if own.process == 0:
        return _gather(address, int(port), own, timeout)
    return _join(host.strip("[]"), int(port), address, own, timeout)


def _gather(address: str, port: int, own: JobMember, timeout: float) -> bool:
    came: list[tuple[socket.socket, JobMember]] = []
    end = time.monotonic() + timeout
    with _listener(address, port) as listener:
        try:
            wrong = ""
            while not wrong and len(came) < own.num_processes - 1 and time.monotonic() < end:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                member = _read_member(connection)
                if member is None:
                    connection.close()  # not a process of the job
                    continue
                wrong = _why_not(member, own, [other for _, other in came])
                came.append((connection, member))
            missing = sorted(
                set(range(1, own.num_processes)) - {member.process for _, member in came}
            )
            if missing and not wrong:
                names = ", ".join(f"process {process}" for process in missing)
                wrong = (
                    f"process 0 waited {timeout:g} s at {address} for {names} of "
                    f"{own.num_processes}, which did not join. Start every process of the job. "
                    "Check whether the missing one raised an error, and whether it can reach this "
                    "address."
                )
            is_one_host = all(member.host == own.host for _, member in came)
            reply = json.dumps({"wrong": wrong, "is_one_host": is_one_host}) + "\n"
            for connection, _ in came:
                _tell(connection, reply)
        finally:
            for connection, _ in came:
                connection.close()
    if wrong:
        raise RuntimeError(f"initialize: {wrong}")
    return is_one_host


def _listener(address: str, port: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        if address.startswith("127."):
            return socket.create_server(("127.0.0.1", port))
        return socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise RuntimeError(
            f"initialize: process 0 cannot listen on port {port} of {address} ({error}). Choose "
            "a free port."
        ) from error


def _why_not(member: JobMember, own: JobMember, others: list[JobMember]) -> str:
    if member.num_processes != own.num_processes or not 0 < member.process < own.num_processes:
        return (
            f"process {member.process} of {member.num_processes} on host {member.host_name} joined "
            f"a job of {own.num_processes} processes. Pass the same num_processes in all of them, "
            "and process_id from 0."
        )
    for other in others:
        if member.process == other.process:
            return (
                f"two processes, on hosts {other.host_name} and {member.host_name}, joined as "
                f"process {member.process}. Pass a different process_id in each."
            )
    return ""


def _join(host: str, port: int, address: str, own: JobMember, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(
                (host, port), timeout=max(end - time.monotonic(), 0.001)
            ) as connection:
                connection.sendall((json.dumps(own) + "\n").encode())
                connection.settimeout(timeout + _GREETING_SECONDS)  # process 0 may have just joined
                reply = json.loads(_read_line(connection))
                wrong, is_one_host = str(reply["wrong"]), bool(reply["is_one_host"])
            break
        except (OSError, ValueError, KeyError, TypeError) as error:  # not up yet, or not ours
            if time.monotonic() > end:
                why = error if isinstance(error, OSError) else "another program answers there"
                raise RuntimeError(
                    f"initialize: process {own.process} waited {timeout:g} s for process 0 at "
                    f"{address} ({why}). Start process 0. Check whether it raised an error, and "
                    "whether this host can reach the address."
                ) from error
            time.sleep(_RETRY_SECONDS)
    if wrong:
        raise RuntimeError(f"initialize: {wrong}")
    return is_one_host


def _read_member(connection: socket.socket) -> JobMember | None:
    connection.settimeout(_GREETING_SECONDS)
    try:
        process, num_processes, host, host_name = json.loads(_read_line(connection))
        return JobMember(int(process), int(num_processes), str(host), str(host_name))
    except (OSError, ValueError, TypeError):
        return None


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_MAX_BYTES - len(line)) if len(line) < _MAX_BYTES else b""
        if not part:
            raise ConnectionError("it sent nothing that belongs to a job")
        line += part
    return line


def _tell(connection: socket.socket, reply: str) -> None:
    with contextlib.suppress(OSError):  # it has ended; JAX's coordination will report it
        connection.sendall(reply.encode())
