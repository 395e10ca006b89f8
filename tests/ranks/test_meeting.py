"""How the processes of a job find each other, and the shared memory that they exchange."""

import concurrent.futures
import fcntl
import os
import socket
import stat
from typing import Any

import pytest
from launching import free_address, in_shared_memory

from jax_cp_dispatch._ranks import sockets  # inner: a protocol without users
from jax_cp_dispatch._ranks.sockets import JobMember, ProcessInfo, Segment, connect_all, meet


def meet_all(places, timeout):
    """Returns each process's result of the meeting, or its error message."""
    address = free_address()

    def meet_one(place) -> Any:
        try:
            return meet(address, place, timeout)
        except RuntimeError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(meet_one, places))


def member(process, count=3, host="a"):
    return JobMember(process, count, host, f"name of {host}")


def test_processes_meet():
    places = [member(process) for process in range(3)]
    assert meet_all(places, 30.0) == [True] * 3
    assert meet_all([places[0], member(1, host="b"), places[2]], 30.0) == [False] * 3
    assert meet_all([member(0, 1)], 30.0) == [True]


def test_missing_processes_are_named():
    places = [member(process, 4) for process in range(4)]
    for error in meet_all(places[:2], 1.0):
        assert "waited 1 s at 127.0.0.1:" in error
        assert "for process 2, process 3 of 4, which did not join" in error
    for process, error in enumerate(meet_all(places[1:], 1.0)):
        assert f"process {process + 1} waited 1 s for process 0 at 127.0.0.1:" in error


def test_processes_of_another_job_are_named():
    for error in meet_all([member(0, 2), member(1, 3, "b")], 30.0):
        assert "process 1 of 3 on host name of b joined a job of 2 processes" in error
    for error in meet_all([member(0, 2), member(2, 2, "b")], 30.0):
        assert "process 2 of 2 on host name of b joined a job of 2 processes" in error
    for error in meet_all([member(0), *[member(1, host="b")] * 2], 30.0):
        assert "two processes, on hosts name of b and name of b, joined as process 1" in error


def test_a_port_of_another_program_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n")

        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            threads.submit(answer)
            with pytest.raises(RuntimeError, match=r"\(another program answers there\)"):
                meet(f"127.0.0.1:{port}", member(1, 2), 0.0)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:port", ":1234"])
def test_an_address_has_a_port(address):
    with pytest.raises(RuntimeError, match="it needs to be host:port of process 0"):
        meet(address, member(1, 2), 1.0)


def test_a_segment_is_private_unnamed_and_of_fixed_size(monkeypatch):
    monkeypatch.setenv(sockets.SEGMENT_BYTES, str(1 << 20))
    before = in_shared_memory()
    fd, num_bytes = sockets.make_segment()
    status = os.fstat(fd)
    assert num_bytes == status.st_size == 1 << 20
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    assert in_shared_memory() == before
    sockets.check_segment(1, Segment(fd, num_bytes))
    with pytest.raises(PermissionError, match="process 1 sent a segment with"):
        sockets.check_segment(1, Segment(fd, num_bytes + 1))
    os.fchmod(fd, 0o644)
    with pytest.raises(PermissionError):
        sockets.check_segment(1, Segment(fd, num_bytes))
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.fchmod(unsealed, 0o600)
    os.ftruncate(unsealed, 10)
    with pytest.raises(PermissionError):
        sockets.check_segment(1, Segment(unsealed, 10))
    assert fcntl.fcntl(unsealed, fcntl.F_GET_SEALS) == 0
    os.close(fd)
    os.close(unsealed)


@pytest.mark.parametrize("text", ["", "much", "-5", "0", str(1 << 60)])
def test_segment_bytes_must_be_a_number(monkeypatch, text):
    monkeypatch.setenv(sockets.SEGMENT_BYTES, text)
    with pytest.raises(ValueError, match="JAX_CP_DISPATCH_SEGMENT_BYTES is"):
        sockets.make_segment()


TOKEN = "ab" * 32


def info(socket_name):
    return ProcessInfo("", "", "", "", 0, 0, socket_name, TOKEN, "")


def test_unauthenticated_connections_are_rejected():
    """Connections without the token, or without a message, are ignored; the wait has a deadline."""
    listener, name = sockets.listen()
    peers = {0: info(name), 1: info("nobody")}
    strangers = []
    for greeting in (b"", b'[1, "00"]\n', b"short\n", b"[1]\n", b"{}\n"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + name)
        if greeting:
            stranger.send(greeting)
        else:
            stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not connect"):
        connect_all(listener, 0, peers, sockets.make_segment(), timeout=1.0)
    assert sockets.listen()[1] != name


def test_a_process_that_ends_before_its_segment_comes_is_named():
    listener, name = sockets.listen()
    peers = {0: info(name), 1: info("nobody")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect("\0" + name)
        other.send(f'[1, "{TOKEN}"]\n'.encode())
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="process 1 closed the connection before its"):
            connect_all(listener, 0, peers, sockets.make_segment(), timeout=30.0)
