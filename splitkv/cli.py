"""The command line, `python -m splitkv`: its commands are modules with `add_arguments(parser)` and `main(args)`.

Exit codes: 0, all is well; 1, something is wrong and was said; 2, the command line itself was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import splitkv

COMMANDS = {
    "demo": ("splitkv.demo", "decode real and generated data here, and show how right and how fast it is"),
    "doctor": ("splitkv.doctor", "what was found here, what is wrong, and what decode would launch for given sizes"),
    "bench": ("splitkv.bench.cli", "time decode here beside its peers and the limit of the memory"),
    "tune": ("splitkv.bench.tune", "measure tile sizes on this GPU, for Workspace.allocate(..., tiles=...)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, sys.argv's by default, and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="splitkv",
        description="Split-KV attention for the decode step of LLM inference.",
        epilog="Exit codes: 0, all is well; 1, something is wrong; 2, the command line is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"splitkv {splitkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        if argv[:1] == [name]:  # a command is imported where it is run
            importlib.import_module(module).add_arguments(command)
            command.set_defaults(parser=command)
    args = parser.parse_args(argv)
    code: int = importlib.import_module(COMMANDS[args.command][0]).main(args)
    return code
