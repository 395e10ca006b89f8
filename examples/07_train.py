"""Trains a byte-level transformer on packed documents, over data, context and tensor axes.

Uses Flax NNX, optax, Grain and orbax (`pip install "jax_cp_dispatch[train]"`) and 8 virtual CPU
devices, 2 x 2 x 2. The parts are in `training/`. Writes checkpoints, a history and a picture.

    python examples/07_train.py                      # 100 steps, one or two minutes
    python examples/07_train.py --algorithm zigzag --folder ~/notes --pattern "*.md"
    python examples/07_train.py --steps 200 --resume # continue from the last checkpoint
    python examples/07_train.py --check              # compare with one device; kill and resume
    python -m jax_cp_dispatch.launch --processes 4 --devices 2 examples/07_train.py --mesh 1 4 2
"""

import argparse
import math
import pathlib
import time

import jax
from training import check, failures, report
from training.data import DataConfig, make_loader
from training.model import ModelConfig
from training.sharding import ORDERS, Sharded, make_mesh
from training.state import Checkpoints, create, make_optimizer, make_step

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--algorithm", choices=tuple(ORDERS), default="placed", help="of attention")
    add("--steps", type=int, default=None, help="in total (100; with --check 50)")
    add("--folder", help="of the documents (Python's standard library)")
    add("--pattern", default="*.py", help="of the files in the folder (*.py)")
    mesh = {"metavar": ("DATA", "CONTEXT", "TENSOR"), "help": "devices of each axis (2 2 2)"}
    add("--mesh", type=int, nargs=3, default=[2, 2, 2], **mesh)
    add("--batch", type=int, default=4, help="rows of a batch (4)")
    add("--columns", type=int, default=None, help="tokens of a row (2048; with --check 512)")
    add("--layers", type=int, default=2)
    add("--dtype", default="bfloat16", help="of activations; --check compares in float32")
    add("--rate", type=float, default=3e-3, help="learning rate (3e-3)")
    add("--seed", type=int, default=0, help="of parameters and shuffling")
    add("--workers", type=int, default=2, help="processes of the loader (2)")
    out = pathlib.Path("build/train")
    add("--out", type=pathlib.Path, default=out, help="folder of the results (build/train)")
    add("--save-every", type=int, default=20, help="steps between checkpoints (20)")
    add("--resume", action="store_true", help="from the last checkpoint in --out")
    add("--check", action="store_true", help="verify a run instead")
    options = parser.parse_args()
    defaults = {"steps": (100, 50), "columns": (2048, 512)}
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.check])
    data, context, tensor = options.mesh
    if options.batch % data or options.columns % (2 * context * tensor):
        parser.error("--batch has to be a multiple of DATA, --columns of 2 x CONTEXT x TENSOR")
    return options


def train(options: argparse.Namespace, model: ModelConfig, data: DataConfig) -> None:
    mesh = make_mesh(*options.mesh)
    ops = Sharded(mesh, options.algorithm)
    loader = make_loader(data)
    compilations = report.Compilations("train_step")
    with jax.set_mesh(mesh):
        structure, state = create(model, make_optimizer(options.rate), options.seed)
        step = make_step(structure, ops, jax.tree.map(lambda x: x.sharding, state))
        checkpoints, first = Checkpoints(options.out / "checkpoints"), 0
        if options.resume:
            first, state = checkpoints.restore(state, loader)
            if first >= options.steps:
                raise SystemExit(f"The checkpoint is of step {first}. Pass a larger --steps.")
        else:
            checkpoints.check_empty()
        run = report.Run(options.out, options.steps, first)
        for number in range(first + 1, options.steps + 1):
            began = time.perf_counter()
            batch = next(loader)
            in_order = batch.pop("imbalance_in_order")
            state, metrics = step(state, ops.put(batch))
            run.record({**metrics, "imbalance_in_order": in_order}, began)
            if number % options.save_every == 0 or number == options.steps:
                checkpoints.save(number, state, loader)
    assert len(compilations.seconds) == 1, compilations.seconds
    if jax.process_index() > 0:
        return
    report.draw(run.history, options.algorithm, options.out / "train.png")
    print(f"JAX compiled the step once, in {sum(compilations.seconds):.1f} s: verified")
    print(f"history, picture and checkpoints: {options.out}")


def main() -> None:
    options = parse()
    if cpd.initialize().implementation == "in_process":  # not one of several processes
        start_cpu_devices(math.prod(options.mesh))  # virtual ones, before JAX starts
    model = ModelConfig(layers=options.layers, dtype=options.dtype)
    data = DataConfig(
        folder=options.folder,
        pattern=options.pattern,
        batch=options.batch,
        columns=options.columns,
        order=ORDERS[options.algorithm],
        data=options.mesh[0],
        context=options.mesh[1],
        workers=options.workers,
        seed=options.seed,
    )
    if options.check:
        check.compare(options, model, data)
        failures.kill_and_resume(options)
        failures.lose_a_process(options)
    else:
        train(options, model, data)


if __name__ == "__main__":  # the workers of the loader import this file
    main()
