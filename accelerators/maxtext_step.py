"""A training step of MaxText's Llama with this package's attention, as one of the programs.

Needs MaxText (`./run maxtext`). The state and the batch are shapes, made as MaxText's own
`train_compile` makes them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax.linen import partitioning
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]
from shapes import HEAD_SIZE, HEADS, KV_HEADS, TOKENS, Shapes

from jax_cp_dispatch.adapters import maxtext_attention

OPTIONS: dict[str, Any] = {
    **{"run_name": "compiled", "base_output_directory": "/nowhere", "enable_checkpointing": False},
    **{"skip_jax_distributed_system": True, "log_config": False, "dataset_type": "synthetic"},
    **{"packing": True, "max_segments_per_seq": 8, "attention": "dot_product"},
    **{"base_num_decoder_layers": 2, "base_num_query_heads": HEADS, "head_dim": HEAD_SIZE},
    **{"base_num_kv_heads": KV_HEADS, "base_emb_dim": 1024, "base_mlp_dim": 4096},
    **{"vocab_size": 32768, "remat_policy": "minimal"},
}


class Step(NamedTuple):
    """A step with zigzag attention: one row of documents on all devices."""

    shapes: Shapes

    def trace(self) -> Any:
        num_ranks = self.shapes.num_ranks
        options = OPTIONS | {
            "ici_context_parallelism": num_ranks,
            "per_device_batch_size": 1 / num_ranks,
            "max_target_length": TOKENS * num_ranks,
            # Known for its number of devices alone.
            **{"compile_topology": f"v5e-{num_ranks}", "compile_topology_num_slices": 1},
        }
        said = [f"{name}={value}" for name, value in options.items()]
        config = pyconfig.initialize(["compiled", *said])
        devices = maxtext_utils.create_device_mesh(config, self.shapes.mesh.devices.flatten())
        mesh = jax.sharding.Mesh(devices, config.mesh_axes)
        inputs, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
        parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
        data = sharding.get_input_data_sharding(config, mesh)
        step, *placed, _, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, state, model, config, parameters
        )
        jitted = jax.jit(
            step, in_shardings=placed[0], out_shardings=placed[1], donate_argnums=donated
        )
        rules = partitioning.axis_rules(config.logical_axis_rules)  # pyright: ignore[reportPrivateImportUsage]
        attention = maxtext_attention(algorithm="zigzag", implementation="xla")
        with jax.set_mesh(mesh), rules, attention:
            return jitted.trace(*inputs)


PROGRAMS: dict[str, Callable[[Shapes], Step]] = {"MaxText's Llama, a step": Step}
