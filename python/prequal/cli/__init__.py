"""`prequal COMMAND`: exit code 0 for success, 2 for wrong use, others as each command says."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import prequal

# name -> (module below prequal.cli, one line). Imported when chosen: doctor must start where torch cannot.
COMMANDS = {
    "doctor": ("doctor", "what this worker is, and for each op which path serves and why"),
    "qualify": ("qualify", "run both paths of every op on this worker, compare them, and write a lock"),
    "lock": ("lock", "explain a qualification lock"),
    "bench": ("bench", "measure ops beside eager, torch.compile and peers; evidence, charts, and a check of both"),
    "ablate": ("ablate", "run a workload of yours with each op off in turn: what each is worth there"),
    "transfer-labels": ("transfer_labels", "label a mesh from a few thousand of its points"),
}

# These compute; the others must work where nothing can.
NEED_TORCH = frozenset({"qualify", "transfer-labels"})


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="prequal", description="CUDA kernels for PyTorch, qualified on this worker.")
    parser.add_argument("--version", action="version", version=f"prequal {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen in NEED_TORCH and prequal._cause is not None:
        print(f"prequal {chosen}: {prequal._cause}; `prequal doctor` says more", file=sys.stderr)
        return 2
    run = None
    for name, (module_name, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name == chosen:
            module = importlib.import_module(f"prequal.cli.{module_name}")
            module.add_arguments(command)
            run = module.run
    args = parser.parse_args(argv)
    assert run is not None  # a command was chosen, or parse_args has left
    try:
        code = int(run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # whoever read the output has gone; what is still buffered must not raise once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE


def _version() -> str:
    from prequal import __version__

    return __version__
