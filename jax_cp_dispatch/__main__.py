"""`python -m jax_cp_dispatch COMMAND`: what the package does without writing a program."""

import argparse
import sys

from jax_cp_dispatch.demo import run as demo
from jax_cp_dispatch.doctor import run as doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_cp_dispatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo_parser = commands.add_parser(
        "demo",
        help="plan, move, attend and check real documents on virtual CPU devices",
        description="Packs real documents, plans balanced causal attention, runs it forward and "
        "backward over virtual CPU devices and checks everything against dense attention.",
    )
    demo.add_arguments(demo_parser)
    doctor_parser = commands.add_parser(
        "doctor",
        help="what this machine offers, what is missing, and a test of each transport",
        description="Looks at versions, devices, GPUs, shared memory and limits, says what is "
        "missing and how to get it, and moves rows by every transport that is available. Exits "
        "with 1 if something is wrong.",
    )
    doctor.add_arguments(doctor_parser)
    options = parser.parse_args()
    return {"demo": demo, "doctor": doctor}[options.command].main(options)


if __name__ == "__main__":
    sys.exit(main())
