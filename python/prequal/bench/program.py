"""What programs that measure share: a device by its name, numbers of a quick form, turns in time, and who answered."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

import prequal

from .device import Call, Cuda, Host
from .stats import Spread


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, for `device_named`."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=default, help="cuda, cuda:1 or cpu")


def _device(name: str) -> str:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cuda or cpu, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"expected a device of this machine, got {name!r}; there is no CUDA here")
    return name


def a_file(text: str) -> pathlib.Path:
    """Of an option that names a file to write: told before minutes of measuring, not after."""
    if not can_be_a_file(text):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {text!r}")
    return pathlib.Path(text)


def can_be_a_file(text: str) -> bool:
    path = pathlib.Path(text).resolve()
    return path.parent.is_dir() and not path.is_dir()


def device_named(name: str) -> Any:
    """What measures there. A GPU is the current one from then on."""
    if name == "cpu":
        return Host()
    chosen = torch.device(name)
    torch.cuda.set_device(torch.cuda.current_device() if chosen.index is None else chosen)
    return Cuda()


def fill_numbers(
    parser: argparse.ArgumentParser, args: argparse.Namespace, numbers: Mapping[str, tuple[float, float]]
) -> None:
    """Those that were not given, by name: in full, and with --quick. All are at least 1."""
    for name, (full, quick) in numbers.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
        if not getattr(args, name) >= 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")


def in_turns(
    device: Any,
    calls: Mapping[str, Call],
    rounds: int,
    runs: int,
    *,
    walls: bool = True,
    done: Callable[[int], None] = lambda number: None,
) -> dict[str, dict[str, Any]]:
    """Times of each by name: device_us, wall_us unless not asked for, and peak_bytes.

    Every round gives each its turn, of two calls that are not timed and `runs` that are, and starts with another one
    than the last. `done` is told its number.
    """
    names = list(calls)
    for call in calls.values():
        for _ in range(3):
            call()
    kinds = ("device_us", "wall_us") if walls else ("device_us",)
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            device.device_us(calls[name], 2)
            for kind in kinds:
                found[name][kind] += getattr(device, kind)(calls[name], runs)
        done(number + 1)
    return {
        name: {kind: Spread.of(times).json() for kind, times in row.items()}
        | {"peak_bytes": device.peak_bytes(calls[name])}
        for name, row in found.items()
    }


def who_answers(call: Call) -> dict[str, str]:
    """Of each op in one call: `fast`, or the reasons why not."""
    prequal.reset_stats()
    call()
    found = {}
    for op, devices in prequal.stats().items():
        reasons = sorted({reason for row in devices.values() for reason in row["reference"]})
        found[op] = "; ".join(reasons) or "fast"
    return found
