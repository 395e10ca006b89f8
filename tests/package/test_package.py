"""The package as a whole: public names, versions, and installation."""

import importlib.metadata
import inspect
import pathlib

import pytest

import jax_cp_dispatch
from jax_cp_dispatch._ranks import runtime

SOURCE = pathlib.Path(inspect.getfile(jax_cp_dispatch)).parent


def test_version_matches_the_distribution():
    try:
        installed = importlib.metadata.version("jax_cp_dispatch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed: this is its source tree")
    assert installed == jax_cp_dispatch.__version__


def test_type_information_is_installed():
    assert (SOURCE / "py.typed").is_file()
    assert (SOURCE / "_cpu.pyi").is_file()


GOOD = {
    "jax_version": "0.10.2",
    "jaxlib_version": "0.12.0.1",
    "built_ffi": (0, 3),
    "installed_ffi": (0, 5),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"jax_version": "0.9.2"}, r"found jax 0.9.2 but needs jax>=0.10.2"),
        ({"jaxlib_version": "0.10.1"}, r"found jaxlib 0.10.1 but needs jaxlib>=0.10.2"),
        ({"built_ffi": (0, 6)}, r"built with XLA FFI headers 0.6 but jaxlib 0.12.0.1 offers 0.5"),
        ({"built_ffi": (1, 0)}, r"built with XLA FFI headers 1.0 but jaxlib"),
    ],
)
def test_unsupported_versions_are_rejected_at_import(change, message):
    with pytest.raises(ImportError, match=message):
        runtime.check_versions(**{**GOOD, **change})


def test_supported_versions():
    runtime.check_versions(**GOOD)
    runtime.check_versions(**{**GOOD, "installed_ffi": None, "jax_version": "0.11.0.dev20260101"})


def test_built_with_the_oldest_supported_headers():
    """With newer headers, the CPU backend of an older jaxlib would not start."""
    from jax_cp_dispatch import _cpu

    assert _cpu.ffi_api_version() == (0, 3)
