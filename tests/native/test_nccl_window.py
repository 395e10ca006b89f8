"""The handlers of exchanges between GPUs without one: with fakes of CUDA, NCCL and XLA's extension.

None of them runs here, so this shows the order of calls, what is passed to them, and every error,
not that they do what their headers say.
"""

import os
import pathlib

import jaxlib
import pytest
from test_native import COMPILER, ROOT, compile_, run

HERE = pathlib.Path(__file__).parent
# TEST_JAXLIB_INCLUDE names headers of a newer jaxlib than the one that is installed.
HEADERS = pathlib.Path(
    os.environ.get("TEST_JAXLIB_INCLUDE", pathlib.Path(jaxlib.__path__[0], "include"))
)
FFI = f"-I{HERE}", f"-I{HERE / 'fake_cuda'}", "-isystem", HEADERS
SOURCES = [
    *(f"ffi/{name}.cc" for name in ("common", "dispatch_call", "cuda/dispatch_call")),
    *("ffi/cuda/dispatch.cc", "ffi/cuda/nccl_window.cc", "cuda/errors.cc", "cuda/memory.cc"),
    *("dispatch/messages.cc", "numerics/rows.cc"),
]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Returns the program, beside the fakes of NCCL, "new" and "old"."""
    folder = tmp_path_factory.mktemp("window")
    fake = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", HERE / "fake_nccl.cc"]
    compile_(folder, *fake, "-o", "new")
    compile_(folder, *fake, "-DFAKE_NCCL_IS_OLD", "-o", "old")
    units = [HERE / "nccl_window_rehearsal.cc", *(ROOT / "csrc" / name for name in SOURCES)]
    (folder / "unit.cc").write_text("".join(f'#include "{unit}"\n' for unit in units))
    compile_(folder, *FFI, "unit.cc", "-pthread", "-ldl", "-o", "rehearsal")
    return folder / "rehearsal"


def test_stages_of_calls_and_their_errors(rehearsal):
    done = run(rehearsal, rehearsal.with_name("new"))
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_without_nccl_or_with_an_old_one(rehearsal):
    refused = "dispatch over axis 'cp': "
    missing = run(rehearsal).stdout
    assert missing.startswith(f"{refused}NCCL cannot be opened (libnccl.so.2: ")
    old = run(rehearsal, rehearsal.with_name("old")).stdout
    assert old.startswith(f"{refused}NCCL has no ncclGetPeerDevicePointer, but windows need 2.29 ")
    for message in (missing, old):
        assert message.endswith("Pass another implementation, such as 'xla'.\n")


def test_declared_structs_are_those_of_xla(tmp_path):
    if not (HEADERS / "xla/ffi/api/collectives_c_api.h").is_file():
        pytest.skip("the headers of this jaxlib, older than 0.11.2, have no collectives extension")
    compile_(tmp_path, *FFI, "-fsyntax-only", HERE / "xla_collectives.cc")
