"""Compile ahead: torch.compile's autotuning is most of a benchmark's time, and knows nothing of other processes.

Several processes each compile a share of the cases; what they found lies in inductor's cache on disk when the benchmark
asks for it. Nothing is timed here, and what fails here fails again, and is reported, where it is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from prequal.registry import OPS

from .cases import cases_of, chosen_ops
from .runner import bound_call, compiled

Say = Callable[[str], None]


MOST_JOBS, MEMORY_A_JOB = 12, 8 * 2**30  # a context of each on the GPU, and the tensors of a case


def fitting_jobs(processors: int, memory: int) -> int:
    """How many processes a machine has room for: half its processors, so that each has one to compile and one to spare,
    and 8 GiB of the GPU's memory each."""
    return max(1, min(MOST_JOBS, processors // 2, memory // MEMORY_A_JOB))


def compile_ahead(ops: Sequence[str], tier: str, jobs: int, say: Say) -> None:
    """Wait for `jobs` processes that compile the cases of these ops between them. Ctrl-C ends them too."""
    jobs = min(jobs, sum(case.compiled is not None for case in cases_of(chosen_ops(ops), tier)))
    if jobs < 2:
        return
    say(f"torch.compile: {jobs} processes compile ahead")
    module = [sys.executable, "-m", __name__, ",".join(ops), tier]
    null = subprocess.DEVNULL
    running = [subprocess.Popen([*module, f"{part}/{jobs}"], stdout=null, stderr=null) for part in range(jobs)]
    try:
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.kill()


def compile_share(ops: Sequence[str], tier: str, share: int, shares: int, device: torch.device) -> int:
    """How many cases of this share were compiled."""
    done = 0
    wanted = [case for case in cases_of(chosen_ops(ops), tier) if case.compiled is not None]
    for case in wanted[share::shares]:
        op = OPS[case.op]
        try:
            args = op.bind(case.make(device), case.named)
            assert case.compiled is not None
            with torch.no_grad():
                bound_call(op, compiled(case.compiled), args, case.named)()
            done += 1
        except Exception as error:  # reported where it is measured
            print(f"{case.op}: {case.name}: {error}", file=sys.stderr)
    return done


def main(words: Sequence[str]) -> int:
    ops, tier, share = words
    part, parts = map(int, share.split("/"))
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are the parallelism
    compile_share(ops.split(","), tier, part, parts, torch.device("cuda", torch.cuda.current_device()))
    return 0


if __name__ == "__main__":
    from prequal import ops as _ops  # noqa: F401  declares them

    raise SystemExit(main(sys.argv[1:]))
