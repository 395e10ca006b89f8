"""Brings up the transport between the processes of a job, and says what it chose and why."""

import hashlib
import os
import pathlib
import socket
import warnings
from typing import NamedTuple

import jax

from jax_cp_dispatch import runtime
from jax_cp_dispatch.cpu_devices import keep_freed_memory
from jax_cp_dispatch.gpu import connect_gpus
from jax_cp_dispatch.job import is_in_job, place_in_job, tell_and_hear
from jax_cp_dispatch.processes import coordination
from jax_cp_dispatch.processes.choice import TransportChoice, remember, transport_choice
from jax_cp_dispatch.processes.connect import Card, connect_all, new_token
from jax_cp_dispatch.processes.programs import watch_programs
from jax_cp_dispatch.processes.segment import listen, make_segment


class _Introduction(NamedTuple):
    """What every process tells all others first."""

    version: str  # of all that has to agree
    host: str
    host_name: str  # for people
    user: int
    pid: int
    socket_name: str
    token: str


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 120.0,
) -> TransportChoice:
    """Joins this process to the others of its job, so that exchanges reach their ranks.

    Call once in every process, before JAX is used: instead of `jax.distributed.initialize`, or
    after it. Without arguments it takes what `python -m jax_cp_dispatch.launch` has set; where
    there is no job it does nothing. Processes of one host and one user get shared memory; of
    several hosts, XLA's collectives (`implementation="xla"`), with a warning. Processes with GPUs
    get what `gpu.connect_gpus` chooses.

    Where it starts JAX's coordination itself, it also sets `jax_enable_recoverability`, so that
    JAX does not end this process when another one is lost, and gloo for collectives on CPU. With
    shared memory JAX's compilation cache on disk is turned off, since programs that came from it
    would not meet those that another process compiled.

    Args:
      coordinator_address, num_processes, process_id: as of `jax.distributed.initialize`.
      timeout: seconds to wait for each of the other processes.
    Returns:
      The implementation that programs over several processes get, and why.
    Raises:
      RuntimeError: another process did not come, or is of another version; then in all processes.
      ValueError: the environment variable `JAX_CP_DISPATCH_SEGMENT_BYTES` is no number of bytes.
    """
    known = transport_choice()
    if known is not None and known.implementation != "in_process":
        return known
    if not is_in_job() and not coordination.start(
        coordinator_address, num_processes, process_id, timeout
    ):
        return remember(TransportChoice("in_process", "this process belongs to no job of several"))
    process, count = place_in_job()
    if count == 1:
        return remember(TransportChoice("in_process", "the job has one process"))
    if _is_on_gpus():
        return remember(TransportChoice(*connect_gpus(timeout=timeout)))
    choice = remember(_choose(process, timeout))
    if choice.implementation == "xla" and process == 0:
        warnings.warn(f"jax_cp_dispatch: {choice.reason}", UserWarning, stacklevel=2)
    return choice


def _is_on_gpus() -> bool:
    if getattr(jax.config, "jax_platforms", None) == "cpu":  # known before JAX has started
        return False
    return jax.default_backend() == "gpu"


def _choose(process: int, timeout: float) -> TransportChoice:
    listener, socket_name = listen()
    with listener:
        own = _Introduction(
            _version(), _host(), socket.gethostname(), os.getuid(), os.getpid(), socket_name,
            new_token(),
        )  # fmt: skip
        heard = tell_and_hear("initialize", "introduction", own, timeout)
        others = [_Introduction(*fields) for fields in heard]
        _check_versions(others)
        reason = _why_not_shared_memory(others)
        if reason is not None:
            return TransportChoice("xla", f"{reason}; XLA's collectives move rows between them")
        segment = make_segment()
        failed, neighbours = "", []
        try:
            cards = [Card(other.socket_name, other.token) for other in others]
            neighbours = connect_all(listener, process, cards, segment, timeout)
            runtime.native.start_shared_memory(process, *segment, neighbours)
        except (OSError, ValueError) as error:
            failed = f"process {process} cannot share memory with the others: {error}"
    watch_programs()
    # All or none: a choice that differs between processes would leave some waiting.
    for failure in tell_and_hear("initialize", "shared_memory", failed, timeout):
        if failure:
            return TransportChoice("xla", f"{failure}; XLA's collectives move rows between them")
    keep_freed_memory()  # else what arrives comes into fresh pages, at several times the price
    return TransportChoice(
        "shared_memory",
        f"the {len(others)} processes of the job run on host {own.host_name} as user {own.user}",
    )


def _version() -> str:
    extension = pathlib.Path(str(runtime.native.__file__)).read_bytes()
    return (
        f"jax_cp_dispatch, build {hashlib.sha256(extension).hexdigest()[:12]}; "
        f"jax {jax.__version__}"
    )


def _host() -> str:
    """Equal for processes that can share memory: the running system, and its network as we see it,
    of which the names of sockets are a part."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _check_versions(others: list[_Introduction]) -> None:
    for other, introduction in enumerate(others):
        if introduction.version != others[0].version:
            raise RuntimeError(
                f"initialize: process {other} (pid {introduction.pid} on {introduction.host_name}) "
                f"is another program version. Expected, as in process 0: {others[0].version}. "
                f"Seen: {introduction.version}. Install the same versions for all processes."
            )


def _why_not_shared_memory(others: list[_Introduction]) -> str | None:
    first = others[0]
    for other, introduction in enumerate(others):
        if introduction.host != first.host:
            return (
                f"process {other} runs on host {introduction.host_name}, process 0 on host "
                f"{first.host_name} (or in another container), and memory is shared on one host"
            )
        if introduction.user != first.user:
            return (
                f"process {other} runs as user {introduction.user}, process 0 as user "
                f"{first.user}, and memory is shared by one user"
            )
    return None
