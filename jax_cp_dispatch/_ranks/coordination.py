"""Starts JAX's coordination of a job, so that it shuts down in order and errors name a process."""

import contextlib
import fcntl
import json
import os
import resource
import secrets
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._jax_private import (
    distributed,
    get_distributed_runtime_client,
    get_distributed_runtime_service,
    xla_bridge,
)
from jax_cp_dispatch._ranks.job import is_in_job
from jax_cp_dispatch._text import warn_caller

# ---- Connects the processes of a job on one host by checked sockets, and makes their segments.

SEGMENT_BYTES = "JAX_CP_DISPATCH_SEGMENT_BYTES"


# Address space. Memory is only allocated where rows are written.
_DEFAULT_BYTES = 256 << 30


_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Segment(NamedTuple):
    """Memory of one process that the others of its job read."""

    fd: int
    num_bytes: int


def make_segment() -> Segment:
    """Creates a segment.

    It has no name in any file system, so the system frees it when the last process that maps it
    ends, whatever the cause. Its size is sealed: once checked, it cannot change.
    """
    num_bytes = segment_bytes()
    fd = os.memfd_create(
        f"jax_cp_dispatch-{secrets.token_hex(8)}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return Segment(fd, num_bytes)


def segment_bytes() -> int:
    """Returns the address space of one segment, from the environment or the default."""
    text = os.environ.get(SEGMENT_BYTES, str(_DEFAULT_BYTES))
    if not text.isdigit() or not 0 < int(text) < 1 << 46:
        raise ValueError(
            f"initialize: {SEGMENT_BYTES} is {text!r}; it needs to be a number of bytes of "
            "address space, below 2**46."
        )
    return int(text)


def check_segment(process: int, fd: int, num_bytes: int) -> None:
    """Rejects a segment of another process whose properties are not as announced."""
    status = os.fstat(fd)
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    found = (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size, seals & _SEALS)
    needed = (os.getuid(), 0o600, num_bytes, _SEALS)
    if found != needed:
        raise PermissionError(
            f"process {process} sent a segment with (user, mode, bytes, seals) {found}; it needs "
            f"to be {needed}"
        )


def listen() -> tuple[socket.socket, str]:
    """Opens a socket for the other processes; returns it and its name, which cannot be guessed.

    The name is not in the file system, so nothing is left behind. The system identifies the peer of
    a connection (see `user_and_pid`).
    """
    name = f"jax_cp_dispatch-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(128)
    return listener, name


def user_and_pid(connection: socket.socket) -> tuple[int, int]:
    """Returns user and process id of the peer, as known to the system."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = (int.from_bytes(raw[i : i + 4], "little", signed=True) for i in (0, 4, 8))
    return user, pid


_HELLO = struct.Struct("<i32s")  # process, and the token of the process it connects to
_SEGMENT = struct.Struct("<q")  # bytes
_SLICE_SECONDS = 0.2  # between checks whether another process has given up


class ConnectionInfo(NamedTuple):
    """How the other processes of its job reach a process."""

    socket_name: str
    token: str  # of 32 bytes, as hexadecimal digits


class Neighbour(NamedTuple):
    """A connected process. The extension reads the fields by name."""

    process: int
    pid: int
    socket_fd: int
    pid_fd: int  # -1: the system provides none
    segment_fd: int
    segment_bytes: int


def new_token() -> str:
    return secrets.token_hex(32)


def connect_all(
    listener: socket.socket,
    process: int,
    peers: Mapping[int, ConnectionInfo],
    segment: tuple[int, int],
    timeout: float,
    check_others: Callable[[], None] = lambda: None,
) -> list[Neighbour]:
    """Connects to the processes before this one, and waits for those after it.

    Args:
      peers: of all processes to connect, this one included.
      check_others: raises an OSError when another process has given up; called while waiting.
    Raises:
      OSError: a process cannot be reached within `timeout` seconds, or belongs to another user.
    """
    end = time.monotonic() + timeout
    connections: dict[int, socket.socket] = {}
    try:
        for other in sorted(other for other in peers if other < process):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[other] = connection
            connection.settimeout(_left(end))
            connection.connect("\0" + peers[other].socket_name)
            _check_user(connection, other)
            connection.sendall(_HELLO.pack(process, bytes.fromhex(peers[other].token)))
        while len(connections) < len(peers) - 1:
            check_others()
            listener.settimeout(min(_SLICE_SECONDS, _left(end)))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() < end:
                    continue
                missing = sorted(peers.keys() - connections.keys() - {process})
                raise TimeoutError(
                    f"processes {missing} did not connect in {timeout:g} s"
                ) from None
            other = _greeted_by(connection, process, peers[process].token, end)
            if other is None or other in connections or other not in peers or other <= process:
                connection.close()  # not a process of the job
            else:
                connections[other] = connection
        return [
            _exchange_segments(connections[other], other, segment, end)
            for other in sorted(connections)
        ]
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _check_user(connection: socket.socket, other: int | str) -> None:
    user, _ = user_and_pid(connection)
    if user != os.getuid():
        raise PermissionError(f"process {other} belongs to user {user}, this one to {os.getuid()}")


def _greeted_by(connection: socket.socket, process: int, token: str, end: float) -> int | None:
    """Returns the process at the other end if it is of this user and knows the token."""
    connection.settimeout(min(5.0, _left(end)))
    try:
        _check_user(connection, "?")
        hello = connection.recv(_HELLO.size + 1)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    other, shown = _HELLO.unpack(hello)
    return other if secrets.compare_digest(shown, bytes.fromhex(token)) else None


def _exchange_segments(
    connection: socket.socket, other: int, segment: tuple[int, int], end: float
) -> Neighbour:
    connection.settimeout(_left(end))
    fd, num_bytes = segment
    socket.send_fds(connection, [_SEGMENT.pack(num_bytes)], [fd])
    message, fds, _, _ = socket.recv_fds(connection, _SEGMENT.size + 1, 1)
    if len(message) != _SEGMENT.size or len(fds) != 1:
        raise ConnectionError(f"process {other} closed the connection before its segment came")
    os.set_inheritable(fds[0], False)
    (other_bytes,) = _SEGMENT.unpack(message)
    check_segment(other, fds[0], other_bytes)
    _, pid = user_and_pid(connection)
    try:
        pid_fd = os.pidfd_open(pid)
    except OSError:  # old kernel or other namespace: the socket's end of file shows the exit too
        pid_fd = -1
    connection.setblocking(False)
    return Neighbour(other, pid, connection.detach(), pid_fd, fds[0], other_bytes)


# ---- Lets a job's processes meet before JAX's coordination starts, to name a missing process.
#
# If a job is incomplete at its deadline, JAX ends the process without naming the missing one. JAX's
# service must also know from the start whether the loss of one process ends all others.

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


# ---- Ends a job in order: the process that hosts JAX's coordination service leaves last.
#
# JAX ends a process whose service is gone. JAX's own shutdown barrier does not help: it also
# holds a
# process that has failed, while others wait for its exit.

_ENDED = "jax_cp_dispatch/ended"
_POLL_SECONDS = 0.05
_SILENT_SECONDS = 30.0
_LONGEST_SECONDS = 300.0  # as JAX's barrier

_pid_fds: dict[int, int] = {}  # of processes of this host


def watch_process(process: int, pid_fd: int) -> None:
    """Watches for the end of `process`, whatever its cause. Keeps a copy of the descriptor."""
    if pid_fd >= 0:
        _pid_fds[process] = os.dup(pid_fd)


def end_in_order() -> None:
    """Makes JAX's shutdown in process 0 wait for all other live processes, up to five minutes.

    It does not wait if an exception ends process 0. Python shows no exit status to a program at its
    end, so `sys.exit(1)` waits as well; docs/decisions/process_0_waits_at_its_end.md says why.
    """
    state: Any = distributed.global_state
    shut_down, pid = state.shutdown, os.getpid()

    def shut_down_in_order():
        try:
            if state.client is not None and os.getpid() == pid:
                if state.process_id != 0:
                    state.client.key_value_set(f"{_ENDED}/{state.process_id}", "")
                elif getattr(sys, "last_exc", getattr(sys, "last_value", None)) is None:
                    _wait_for_others(state.client, state.num_processes)
        finally:
            shut_down()

    state.shutdown = shut_down_in_order


def _wait_for_others(client: Any, num_processes: int) -> None:
    begin, has_said = time.monotonic(), False
    ended: set[int] = set()
    while True:
        ended |= {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(_ENDED)}
        running = [p for p in range(1, num_processes) if p not in ended and not _has_died(p)]
        waited = time.monotonic() - begin
        if not running:
            break
        if waited > _LONGEST_SECONDS:
            _say(f"process 0 has waited {waited:.0f} s and leaves; JAX ends processes {running}")
            return
        if not has_said and waited > _SILENT_SECONDS:
            has_said = True
            _say(
                f"process 0 is done and waits for processes {running} because it hosts JAX's "
                f"coordination service, {_LONGEST_SECONDS:.0f} s at most"
            )
        time.sleep(_POLL_SECONDS)
    # A process leaves the service just after it reports its end. This call returns when all have
    # left.
    client.get_live_nodes([0, *(p for p in ended if not _has_died(p))])


def _say(text: str) -> None:
    print(f"jax_cp_dispatch: {text}", file=sys.stderr, flush=True)


def _has_died(process: int) -> bool:
    pid_fd = _pid_fds.get(process)
    if pid_fd is None:
        return False
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(0))


# Set by the launcher, which hosts the coordination service itself. If process 0 hosted it, its end
# would end all others, because JAX ends a process whose service is gone. The value is the address
# of the first meeting.
HOSTED_BY_LAUNCHER = "JAX_CP_DISPATCH_HOSTED_COORDINATION"
_NUM_PROCESSES = "JAX_NUM_PROCESSES"
_PROCESS_ID = "JAX_PROCESS_ID"


def job_environment(
    address: str, meeting: str, num_processes: int, process_id: int
) -> dict[str, str]:
    """Returns the variables from which `start` finds the job in a process of the launcher."""
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        _NUM_PROCESSES: str(num_processes),
        _PROCESS_ID: str(process_id),
        HOSTED_BY_LAUNCHER: meeting,
    }


def host_service(address: str, num_processes: int) -> Any:
    """Starts the coordination service of a job, in a process outside the job."""
    return get_distributed_runtime_service(
        address, num_processes, shutdown_timeout=5, recoverable=True
    )


def start(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    host: str,
    timeout: float,
) -> bool:
    """Joins the job given by the arguments or the environment; returns whether there is one.

    On one host, JAX does not end a process because another one ended; this package reports the loss
    instead. Over several hosts JAX's watchdog ends it.

    Args:
      host: an id of the host; equal for all processes of one host.
      timeout: seconds to wait for the other processes.
    Raises:
      RuntimeError: a process did not join; raised in all that did. Or JAX has already started here,
        or this process may open too few files.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if num_processes is None and _NUM_PROCESSES in os.environ:
        num_processes = int(os.environ[_NUM_PROCESSES])
    if process_id is None and _PROCESS_ID in os.environ:
        process_id = int(os.environ[_PROCESS_ID])
    if address is None and num_processes is None and process_id is None:
        return False
    if num_processes != 1 and xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "initialize: JAX has already started in this process, with the devices of this process "
            "alone. Call initialize before jax.devices(), before you create an array, and before "
            "any other use of JAX."
        )
    is_one_host = False  # here only JAX knows the other processes
    meeting = os.environ.get(HOSTED_BY_LAUNCHER)
    if address is not None and num_processes is not None and process_id is not None:
        own = JobMember(process_id, num_processes, host, socket.gethostname())
        is_one_host = meet(meeting or address, own, timeout)
        if is_one_host:
            check_open_files(num_processes, max(jax.config.values["jax_num_cpu_devices"], 1))
    if jax.config.values["jax_cpu_collectives_implementation"] in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if meeting and address is not None and process_id is not None:
        _start_client(address, num_processes or 1, process_id, timeout)
        return True
    jax.config.update("jax_enable_recoverability", is_one_host)
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        initialization_timeout=max(1, round(timeout)),
        shutdown_timeout_seconds=0,  # each process leaves independently
    )
    end_in_order()
    return True


def refuse_alone(op: str) -> None:
    """Rejects a call in a process of the launcher that has not joined the others."""
    if HOSTED_BY_LAUNCHER not in os.environ or os.environ.get(_NUM_PROCESSES) == "1":
        return
    if not is_in_job():
        raise RuntimeError(
            f"{op}: the launcher started {os.environ.get(_NUM_PROCESSES)} processes, but this one "
            "has not joined the others and would compute alone. Call jax_cp_dispatch.initialize() "
            "in every process, before JAX is used."
        )


def _start_client(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Does what `jax.distributed.initialize` does in every process except the first."""
    state = distributed.global_state
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    client = get_distributed_runtime_client(
        address, process_id, init_timeout=max(1, round(timeout)), use_compression=True
    )
    client.connect()
    state.client = client
    state.initialize_preemption_sync_manager()


# ---- Open files, counted before gloo runs into their limit.

# Counted on jax 0.10.2: JAX's client and its coordination, and gloo's device.
_OF_JAX, _OF_GLOO = 7, 4
_PER_NEIGHBOUR = 4  # its socket, its segment, and its process, watched twice
_SPARE = 1


def check_open_files(num_processes: int, num_devices: int) -> None:
    """Refuses a limit with which JAX cannot start; warns of one too small for XLA's collectives.

    Args:
      num_processes: of this job, on this host.
      num_devices: of each.
    Raises:
      RuntimeError: this process may open too few files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    others = num_processes - 1
    need = len(os.listdir("/proc/self/fd")) + _OF_JAX + _OF_GLOO + _PER_NEIGHBOUR * others + _SPARE
    if limit < need:
        raise RuntimeError(
            f"initialize: this process may open {limit} files; with {num_processes} processes it "
            f"needs {need} or more. Raise the limit: ulimit -n 1024."
        )
    # Each device connects to all others.
    need += num_devices * (num_devices * num_processes - 1)
    if limit < need:
        warn_caller(
            f"initialize: this process may open {limit} files. XLA's collectives over all devices "
            f"of {num_processes} processes need about {need}, and fail with fewer. Raise the "
            f"limit: ulimit -n {max(1024, 2 * need)}.",
            RuntimeWarning,
        )
