"""viterbi_decode: batches of an HMM's and a tagger's size, a long sequence, and the states of a pitch tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.cases import Case, Other, Peer
from prequal.bench.rows import each, normal, short
from prequal.registry import Cost

# B, T, S
SHAPES = (
    (64, 1024, 16),
    (1024, 256, 8),
    (64, 1024, 32),
    (64, 1024, 64),
    (16, 512, 128),
    (4, 512, 360),
    (1, 65_536, 16),
)
# One launch a step and more: what takes longer than this many steps is not waited for.
MOST_STEPS = 4096


@prequal.viterbi_decode.cost
def _(log_emissions, log_transitions, log_initial, *, lengths, end_scores, transitions_per, band, return_score):
    # Lengths are on the device: with them nothing is known to be read. Else every emission is, and the matrix of every
    # step but the first; of one matrix those within the band, so none is counted where there is one.
    (batch, steps), size = log_emissions.shape[:2], log_emissions.element_size()
    written = batch * (steps * 8 + ((8 if size == 8 else 4) if return_score else 0))
    if lengths is not None or batch == 0 or steps == 0:
        return Cost(written)
    read = log_emissions.numel() * size
    if band is None and steps > 1:
        whole = log_transitions.numel() * log_transitions.element_size()
        each_step = log_transitions.dim() == 3 and (
            transitions_per == "step" or (transitions_per == "auto" and log_transitions.shape[0] != batch)
        )
        read += whole // steps * (steps - 1) if each_step else whole
    return Cost(read + written)


def eager(log_emissions: Tensor, log_transitions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The loop that one writes: a launch or more a step, there and back."""
    x, steps = log_emissions.float(), log_emissions.shape[1]
    score, origins = x[:, 0], []
    for t in range(1, steps):
        best, origin = (score.unsqueeze(2) + log_transitions).max(1)
        score = best + x[:, t]
        origins.append(origin)
    scores, state = score.max(1, keepdim=True)
    path = [state]
    for origin in reversed(origins):
        state = origin.gather(1, state)
        path.append(state)
    return torch.cat(path[::-1], 1), scores.squeeze(1)


def of_paths(paths: Tensor, args: Any) -> Tensor:
    """[B]: what whole paths score, in float64."""
    x, moves = args[0].double(), args[1].double()
    return x.gather(2, paths.unsqueeze(2)).sum((1, 2)) + moves[paths[:, :-1], paths[:, 1:]].sum(1)


def as_good(got: Any, want: Any, args: Any) -> str | None:
    """Paths that score as much: another order of sums may part equal ones."""
    theirs, ours = (of_paths(paths.long(), args) for paths in (got[0] if isinstance(got, tuple) else got, want[0]))
    worse = int((theirs < ours - 1e-5 * ours.abs() - 1e-3).sum())
    return f"{worse} of {len(ours)} paths score less" if worse else None


def torbi() -> Callable[..., Any]:
    import torbi as package

    def decode(x: Tensor, moves: Tensor, *rest: Any) -> Tensor:
        # from column to row; it writes into the emissions
        own, uniform = x.float().clone(), x.new_zeros(x.shape[2], dtype=torch.float32)
        device = x.device.index
        return package.from_probabilities(own, None, moves.t().contiguous(), uniform, log_probs=True, gpu=device)

    return decode


def pytorch_crf() -> Callable[..., Any]:
    from torchcrf import CRF

    crfs: dict[tuple[int, torch.device], Any] = {}

    def decode(x: Tensor, moves: Tensor, *rest: Any) -> Tensor:
        key = x.shape[2], x.device
        if key not in crfs:
            crfs[key] = CRF(x.shape[2], batch_first=True).to(x.device)
            torch.nn.init.zeros_(crfs[key].start_transitions)
            torch.nn.init.zeros_(crfs[key].end_transitions)
        crfs[key].transitions.data = moves
        return torch.tensor(crfs[key].decode(x.float()), device=x.device)

    return decode


def is_short(args: Any) -> str | None:
    steps = args[0].shape[1]
    return None if steps <= MOST_STEPS else f"a loop of {steps:,} steps"


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for quick, (batch, steps, states) in each(SHAPES):

            def make(device: torch.device, batch=batch, steps=steps, states=states, dtype=dtype) -> tuple[Any, ...]:
                x = normal(device, batch, steps, states, dtype=dtype)
                return x, normal(device, states, states, dtype=torch.float32)

            yield Case(
                "viterbi_decode",
                f"{short(dtype)} [{batch}, {steps}, {states}]",
                make,
                quick=quick and dtype == torch.float32,
                others=[Other("torch eager", eager, as_good)] if steps <= MOST_STEPS else [],
            )


PEERS = (
    Peer("torbi", "viterbi_decode", torbi, as_good),
    Peer("torchcrf", "viterbi_decode", pytorch_crf, as_good, is_short),
)
