"""The accelerators for which programs are compiled without a device, by their topologies."""

import dataclasses
import pathlib
from typing import Any

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jaxlib import xla_client

# As XLA describes a device of this kind. Without `driver_version`, it records no custom call in
# command buffers.
_H100 = pathlib.Path(__file__).with_name("h100.txtpb")


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind.

    Attributes:
      name: for tables.
      platform: "tpu" or "cuda".
      topology: in the words of the platform's compiler.
    """

    name: str
    platform: str
    topology: str

    def devices(self) -> list[Any]:
        """Returns devices that can compile, not run.

        Raises:
          RuntimeError: the platform's compiler is not installed.
        """
        if self.platform == "tpu":
            _load_tpu_compiler()
            return topologies.get_topology_desc(self.topology, platform="tpu").devices
        config = _H100.read_text()
        described = topologies.get_topology_desc(
            "h100", platform="cuda", target_config=config, topology=self.topology
        )
        return described.devices

    def lower(self, traced: Any) -> Any:
        if self.platform == "tpu":
            return traced.lower()
        return traced.lower(lowering_platforms=(self.platform,))


def _load_tpu_compiler() -> None:
    """Loads libtpu, and gives it JAX's partitioner of functions with sharding rules.

    With TPUs, JAX does so when it finds them. These are JAX's own names, without any promise.
    """
    if xla_client.pjrt_plugin_loaded("tpu"):
        return
    path = xla_bridge.get_tpu_library_path()  # pyright: ignore[reportPrivateImportUsage]
    if path is None:
        raise RuntimeError("libtpu is not installed")
    plugin = xla_client.load_pjrt_plugin_dynamically("tpu", path)
    for callback in xla_bridge._plugin_callbacks:
        callback(c_api=plugin)


TARGETS = {
    target.name: target
    for target in (
        Target("TPU v5e 2x2", "tpu", "v5e:2x2"),
        Target("TPU v5e 4x8", "tpu", "v5e:4x8"),
        Target("TPU v5p 2x2x2", "tpu", "v5p:2x2x2"),
        Target("TPU v6e 2x4", "tpu", "v6e:2x4"),
        Target("8 H100", "cuda", "1x1x8"),
    )
}


def versions() -> dict[str, str]:
    """Returns the versions of JAX and of the compilers."""
    from importlib import metadata

    names = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt")
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        found.setdefault(dist.metadata["Name"], dist.version)  # the first on the path is imported
    return {name: found[name] for name in names if name in found} | {"jax": jax.__version__}
