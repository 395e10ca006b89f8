"""`python -m jax_cp_dispatch COMMAND`: what the package does without writing a program."""

import argparse
import sys

from jax_cp_dispatch.demo import run as demo


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
    return demo.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
