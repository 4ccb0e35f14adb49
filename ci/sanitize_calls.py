"""One call of every op on every sample, for compute-sanitizer: small, and each path through every kernel."""

from __future__ import annotations

import torch

import prequal
from prequal.registry import OPS

device = torch.device("cuda", torch.cuda.current_device())
prequal.qualify([name for name, op in OPS.items() if op.contract.kind == "bitwise"])  # else the reference answers
for name, op in OPS.items():
    for sample in op.samples(device):
        getattr(prequal, name)(*sample.args, **sample.kwargs)
    torch.cuda.synchronize()
    print(name, prequal.stats()[name], flush=True)
