"""Several processes: every operation, every failure, the launcher, and leftovers."""

import concurrent.futures
import fcntl
import os
import pathlib
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from typing import Any

import pytest
from on_mesh import mesh_of

from jax_cp_dispatch import launch as launcher
from jax_cp_dispatch._ranks.processes import open_files, segment
from jax_cp_dispatch._ranks.processes.connect import ConnectionInfo, connect_all, new_token
from jax_cp_dispatch._ranks.processes.meeting import JobMember, meet

PROGRAMS = pathlib.Path(__file__).parents[1] / "processes"
sys.path.insert(0, str(PROGRAMS))

import gemms  # noqa: E402


def command(program, *arguments, processes=2, devices=1, grace=30.0):
    options = [f"--processes={processes}", f"--devices={devices}", f"--grace={grace}"]
    module = ["-m", "jax_cp_dispatch.launch"]
    return [sys.executable, *module, *options, str(program), *arguments]


def launch(*arguments, **options):
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, timeout=1200
    )


def in_shared_memory():
    """Except what Python's multiprocessing in other programs of this machine makes."""
    others = "sem.mp-", "psm_"
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


@pytest.mark.parametrize(
    "devices, asked, number", [(1, ["test_every_method_of_the_products"], 1), (2, [], 15)]
)
def test_every_operation(tmp_path, monkeypatch, devices, asked, number):
    """GEMMs have the same bits as in this one process. Cached programs would not meet."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    path = str(tmp_path / "gemms.npz")
    gemms.write(
        path, mesh_of(2 * devices), [] if asked else gemms.scaled_programs(4, is_short=True)
    )
    done = launch(PROGRAMS / "suite.py", "--short", path, *asked, devices=devices)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for process in range(2):
        assert f"[{process}] all {number} ok\n" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_every_failure():
    """One trial of each kind; the last ones kill a process each, and the others survive."""
    before = in_shared_memory()
    # The others still have many deadlines to wait for when the first process has been killed.
    done = launch(PROGRAMS / "failures.py", processes=4, grace=1000)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr[-4000:]
    for process in range(4):
        kinds = "late", "raises", "shapes", "operation", "version", "metadata", "batch", "stop"
        for kind in kinds:
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    for process in range(3):
        for kind in "kill", "gemm late", "gemm shapes", "gemm method", "gemm stop":
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    for process in range(2):
        for kind in "gemm kill", "ring late", "ring shapes":
            assert f"[{process}] {kind}: 1 of 1" in done.stdout, done.stdout
    assert in_shared_memory() <= before


def test_training_ends_when_a_process_is_killed_and_resumes_bit_by_bit(tmp_path):
    """The others get an error that names the process; the launcher names it too."""
    lost, steps = 1, 4
    program = PROGRAMS / "lost_in_training.py", str(tmp_path), str(steps)
    killed = launch(*program, str(lost), processes=3, grace=60)
    assert killed.returncode == 128 + signal.SIGKILL, killed.stdout + killed.stderr[-4000:]
    (pid,) = re.findall(rf"launch: process {lost} \(pid (\d+)\) ended with SIGKILL", killed.stderr)
    ended = rf"expected ranks \[\d\] of process {lost} \(pid {pid}\), seen: it has ended"
    assert re.search(rf"\[0\] .*{ended}", killed.stderr), killed.stderr[-4000:]
    resumed = launch(*program, processes=3)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr[-4000:]
    losses = [re.findall(r"step (\d+): (\S+)", done.stdout) for done in (killed, resumed)]
    assert [[step for step, _ in found] for found in losses] == [["1", "2", "3"], ["3", "4"]]
    assert losses[0][-1] == losses[1][0]  # step 3, before and after


@pytest.mark.parametrize("wrong", ["host", "version"])
def test_processes_that_cannot_share_memory(wrong):
    done = launch(PROGRAMS / "choices.py", wrong)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"[0] {wrong} ok\n" in done.stdout
    assert f"[1] {wrong} ok\n" in done.stdout


def test_mistakes_at_the_start_are_reported(monkeypatch):
    """Without these errors, every process would silently compute alone, or on more devices."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    done = launch("-m", "mistakes")
    assert done.returncode == 0, done.stderr
    said = [
        f"[{n}] {what} is reported" for n in range(2) for what in ("devices", "forgotten", "late")
    ]
    assert sorted(done.stdout.splitlines()) == said


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("how", [[], ["explicitly"], ["goes_on"]])
def test_process_0_leaves_last(tmp_path, how):
    """Without the launcher, whatever work the others have: it hosts JAX's service."""
    codes, said = run_job(tmp_path, how)
    assert codes == [0, 0], said
    assert said[1][0] == "done\n"


@pytest.mark.parametrize("how, code", [("raises", 1), ("exits", 3)])
def test_a_failure_of_process_0_ends_the_others(tmp_path, how, code):
    """They would wait for it without end in an XLA collective."""
    codes, said = run_job(tmp_path, [how])
    assert codes == [code, -signal.SIGABRT], said
    assert said[1][0] == ""
    named = {
        "raises": "RuntimeError: process 0 fails",
        "exits": "process 0 ends with exit status 3",
    }
    assert named[how] in said[0][1]


def run_job(tmp_path, how):
    """Runs ends.py in two processes without the launcher; returns exit codes and outputs."""
    address = free_address()
    job = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "ends.py", address, "2", str(process), tmp_path, *how],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate(timeout=1200) for process in job]
    return [process.returncode for process in job], said


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


def test_processes_meet():
    places = [JobMember(process, 3, "a", "name of a") for process in range(3)]
    assert meet_all(places, 30.0) == [True] * 3
    places[1] = places[1]._replace(host="b")
    assert meet_all(places, 30.0) == [False] * 3
    assert meet_all([JobMember(0, 1, "a", "name of a")], 30.0) == [True]


def test_missing_processes_are_named():
    places = [JobMember(process, 4, "a", "name of a") for process in range(4)]
    for told in meet_all(places[:2], 1.0):
        assert "waited 1 s at 127.0.0.1:" in told
        assert "for process 2, process 3 of 4, which did not join" in told
    for process, told in enumerate(meet_all(places[1:], 1.0)):
        assert f"process {process + 1} waited 1 s for process 0 at 127.0.0.1:" in told


def test_processes_of_another_job_are_named():
    places = [JobMember(0, 2, "a", "name of a"), JobMember(1, 3, "b", "name of b")]
    for told in meet_all(places, 30.0):
        assert "process 1 of 3 on host name of b joined a job of 2 processes" in told
    places = [JobMember(0, 3, "a", "name of a"), *[JobMember(1, 3, "b", "name of b")] * 2]
    for told in meet_all(places, 30.0):
        assert "two processes, on hosts name of b and name of b, joined as process 1" in told


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
                meet(f"127.0.0.1:{port}", JobMember(1, 2, "a", "name of a"), 0.0)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:port", ":1234"])
def test_an_address_has_a_port(address):
    with pytest.raises(RuntimeError, match="it needs to be host:port of process 0"):
        meet(address, JobMember(1, 2, "a", "name of a"), 1.0)


def test_the_launcher_forwards_output_and_ends_all_processes(tmp_path):
    """It prints each process's output, returns the first nonzero code, and ends stuck processes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "print(os.environ['JAX_PROCESS_ID'], sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES'])\n"
        "sys.stdout.flush()\n"
        f"told = pathlib.Path({str(tmp_path / 'told')!r})\n"
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    told.touch()\n"
        "    time.sleep(1000)\n"
        "while not told.exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    done = launch(program, "--an", "argument", devices=3, grace=0.5)
    assert done.returncode == 7
    assert "[0] 0 ['--an', 'argument'] 3\n" in done.stdout
    assert "[1] 1 ['--an', 'argument'] 3\n" in done.stdout


@pytest.mark.parametrize("grace", ["nan", "inf", "-inf", "-1"])
def test_a_grace_that_is_no_time_is_refused(capsys, grace):
    with pytest.raises(SystemExit) as end:
        launcher.main([f"--grace={grace}", "missing.py"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    message = f"error: --grace is {grace}; it needs to be a number of seconds from 0"
    assert message in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    "limits, output, processes, message",
    [
        ("ulimit -n 24", "/dev/null", 8, "cannot start 8 processes: Too many open files."),
        ("true", "/dev/full", 2, "cannot write the output: No space left on device."),
    ],
)
def test_the_launcher_says_what_the_system_lacks(tmp_path, limits, output, processes, message):
    """In one line, with exit code 2; a full output ends no process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib\n"
        "print('x' * 100_000)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / os.environ['JAX_PROCESS_ID']).touch()\n"
    )
    command = f"{limits}; exec {sys.executable} -m jax_cp_dispatch.launch --processes={processes}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {program} > {output}"],
        stderr=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"launch: {message}" in done.stderr
    if output == "/dev/full":
        assert all((tmp_path / str(process)).exists() for process in range(processes))


def test_the_launcher_forwards_signals(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told')))\n"
        "print('up')\ntime.sleep(1000)\n"
    )
    job = subprocess.Popen(command(program), stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    job.send_signal(signal.SIGTERM)
    assert sorted(job.communicate(timeout=1200)[0].splitlines()) == ["[0] told", "[1] told"]
    assert job.returncode == 128 + signal.SIGTERM


def test_too_few_open_files_are_refused_before_gloo_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax, jax_cp_dispatch\njax_cp_dispatch.initialize()\njax.devices()\n")
    limit = resource.RLIMIT_NOFILE, (24, 24)
    done = subprocess.run(
        command(program, processes=4, grace=5),
        preexec_fn=lambda: resource.setrlimit(*limit),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    said = "RuntimeError: initialize: this process may open 24 files; with 4 processes it needs"
    assert done.returncode == 1 and said in done.stderr and "epoll" not in done.stderr


def test_open_files_of_collectives_are_counted(monkeypatch):
    """Between all devices: 8 devices connect to 15 others each."""
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (100, 4096))
    warned = "may open 100 files. XLA's collectives over all devices of 2 processes need about"
    with pytest.warns(RuntimeWarning, match=warned):
        open_files.check_open_files(2, 8)
    with pytest.raises(RuntimeError, match=r"with 64 processes it needs \d+ or more. Raise the"):
        open_files.check_open_files(64, 1)
    unlimited = open_files.resource.RLIM_INFINITY
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (unlimited, unlimited))
    open_files.check_open_files(64, 64)


def test_a_segment_is_private_unnamed_and_of_fixed_size(monkeypatch):
    monkeypatch.setenv(segment.SEGMENT_BYTES, str(1 << 20))
    before = in_shared_memory()
    fd, num_bytes = segment.make_segment()
    status = os.fstat(fd)
    assert num_bytes == status.st_size == 1 << 20
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    assert in_shared_memory() == before
    segment.check_segment(1, fd, num_bytes)
    with pytest.raises(PermissionError, match="process 1 sent a segment with"):
        segment.check_segment(1, fd, num_bytes + 1)
    os.fchmod(fd, 0o644)
    with pytest.raises(PermissionError):
        segment.check_segment(1, fd, num_bytes)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.fchmod(unsealed, 0o600)
    os.ftruncate(unsealed, 10)
    with pytest.raises(PermissionError):
        segment.check_segment(1, unsealed, 10)
    assert fcntl.fcntl(unsealed, fcntl.F_GET_SEALS) == 0
    os.close(fd)
    os.close(unsealed)


@pytest.mark.parametrize("text", ["", "much", "-5", "0", str(1 << 60)])
def test_segment_bytes_must_be_a_number(monkeypatch, text):
    monkeypatch.setenv(segment.SEGMENT_BYTES, text)
    with pytest.raises(ValueError, match="JAX_CP_DISPATCH_SEGMENT_BYTES is"):
        segment.segment_bytes()


def test_unauthenticated_connections_are_rejected():
    """Connections without the token, or without a message, are ignored; the wait has a deadline."""
    listener, name = segment.listen()
    peers = {0: ConnectionInfo(name, new_token()), 1: ConnectionInfo("nobody", new_token())}
    strangers = []
    for greeting in (b"", b"\1\0\0\0" + bytes(32), b"short", b"\1\0\0\0" + bytes(99)):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + name)
        if greeting:
            stranger.send(greeting)
        else:
            stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not connect"):
        connect_all(listener, 0, peers, segment.make_segment(), timeout=1.0)
    assert segment.listen()[1] != name
