"""`python -m jax_cp_dispatch COMMAND`: the demonstration, the doctor, plans, the bench."""

import argparse
import sys
from typing import NoReturn

from jax_cp_dispatch import bench_command as bench, demo, doctor, plan_command as plan


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the list of all."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def main() -> int:
    parser = _Parser(
        prog="python -m jax_cp_dispatch",
        description=__doc__,
        epilog="python -m jax_cp_dispatch.launch runs a program in several processes of this host.",
    )
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
    plan_parser = commands.add_parser(
        "plan",
        help="compare layouts and algorithms for your document lengths",
        description="Plans causal attention of a batch from its document lengths. Compares work, "
        "moved rows and bytes of each layout, and the predicted times of all algorithms.",
    )
    plan.add_arguments(plan_parser)
    bench_parser = commands.add_parser(
        "bench",
        help="measure this machine against its limits and the alternatives",
        description="Measures movement, attention and GEMMs. Compares each with the limit measured "
        "in the same run (memcpy, a matrix product), and with what XLA offers.",
    )
    bench.add_arguments(bench_parser)
    options = parser.parse_args()
    commands_by_name = {"bench": bench, "demo": demo, "doctor": doctor, "plan": plan}
    return commands_by_name[options.command].main(options)


if __name__ == "__main__":
    sys.exit(main())
