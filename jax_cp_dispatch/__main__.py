"""`python -m jax_cp_dispatch COMMAND`: the demonstration and the doctor."""

import argparse
import sys

from jax_cp_dispatch.demo import run as demo
from jax_cp_dispatch.doctor import run as doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_cp_dispatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo_parser = commands.add_parser(
        "demo",
        help="plan attention of real documents, run it on virtual CPU devices and check it",
        description="Packs real documents, plans balanced causal attention, runs it forward and "
        "backward over virtual CPU devices and checks everything against dense attention.",
    )
    demo.add_arguments(demo_parser)
    doctor_parser = commands.add_parser(
        "doctor",
        help="report what this machine offers and lacks, and test each transport",
        description="Checks versions, devices, GPUs, shared memory and limits. Reports what is "
        "missing and how to get it. Tests every available transport. Exits with 1 if something is "
        "wrong.",
    )
    doctor.add_arguments(doctor_parser)
    options = parser.parse_args()
    return {"demo": demo, "doctor": doctor}[options.command].main(options)


if __name__ == "__main__":
    sys.exit(main())
