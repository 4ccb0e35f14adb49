"""The likeliest path through the states of a hidden Markov model or a linear-chain CRF, and its score."""

import torch
from torch import Tensor

from prequal import constraints as c
from prequal.contracts import Exact
from prequal.registry import BadCall, Sample, op

from ._moe import INTEGERS
from ._rows import FLOATS, normal, wide_of

MOST_STATES, MOST_STEPS = 2048, 2**30  # of the kernel
PER = ("auto", "sequence", "step")


def ties(device, *shape, of=0):
    """Few values, multiples of 1/4: sums have no rounding and many candidates are equal."""
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * of)
    return (torch.randint(-2, 3, shape, generator=generator) / 4).to(torch.float32).to(device)


def samples(device):
    make = normal(device)

    def call(batch, steps, states, dtype=torch.float32):
        return make(batch, steps, states, dtype=dtype), make(states, states, of=1), make(states, of=2)

    yield Sample("quick", call(3, 7, 5))
    for batch, steps, states in (
        *((1, 1, 1), (2, 5, 1), (3, 1, 4), (2, 33, 2), (5, 130, 3), (9, 17, 8), (4, 129, 8), (2, 40, 9), (3, 257, 16)),
        *((2, 300, 13), (1, 9, 17), (2, 131, 32), (3, 31, 31), (2, 20, 33), (3, 19, 64), (1, 40, 127), (2, 9, 256)),
        *((1, 11, 300), (1, 4, 1025), (67, 3, 16), (131, 5, 6)),
    ):
        yield Sample(f"{batch} x {steps} x {states}", call(batch, steps, states))
    for dtype in FLOATS:
        name = c.short(dtype)
        for states in (6, 16, 27, 50):
            x, move, first = call(5, 21, states, dtype)
            yield Sample(f"{name} {states} states", (x, move, first))
            yield Sample(f"{name} {states} states, all of it", (x, move.to(dtype), first.to(dtype)))
        wide = make(6, 24, 40, dtype=dtype)
        move = make(12, 12, of=1)
        yield Sample(f"{name} slices", (wide[::2, 3:, 5:17], move))
        yield Sample(f"{name} misaligned", (wide[:, :, 1:13], move))
        yield Sample(f"{name} steps last", (make(2, 12, 24, dtype=dtype).mT, move.t()))
        yield Sample(f"{name} one sequence for all", (wide[:1, :, :12].expand(5, 24, 12), move))
    for states in (4, 8, 16, 30, 40):
        x, move = ties(device, 6, 40, states), ties(device, states, states)
        named = f"{states} states"
        yield Sample(f"ties, {named}", (x, move))
        yield Sample(f"all equal, {named}", (torch.zeros_like(x), torch.zeros_like(move)))
        lengths = torch.tensor([40, 0, 1, 39, 17, 2], device=device)
        ends = {"end_scores": make(states, of=3), "lengths": lengths}
        yield Sample(f"lengths and ends, {named}", (make(6, 40, states), move, make(states)), ends)
        own = {"end_scores": make(6, states, of=3), "lengths": lengths.int() + 1 - lengths.int() % 2}
        yield Sample(f"a start and an end of each, {named}", (x, move, make(6, states, of=4)), own)
        yield Sample(f"moves a sequence, {named}", (x, ties(device, 6, states, states, of=1)))
        per_step = ties(device, 40, states, states, of=2)
        yield Sample(f"moves a step, {named}", (x, per_step), {"lengths": lengths})
        yield Sample(f"a band of 1, {named}", (make(6, 40, states), move), {"band": 1})
        yield Sample(f"a band of 0, {named}", (make(6, 40, states), move), {"band": 0})
        yield Sample(f"a band that is wide, {named}", (x, move), {"band": 999})
        closed = move.masked_fill(make(states, states, of=5) > 0, -torch.inf)
        yield Sample(f"closed moves, {named}", (x, closed))
        yield Sample(f"nowhere to go, {named}", (x, torch.full_like(move, -torch.inf)))
        odd = x.clone()
        odd[0, 3, 1], odd[1, 5] = torch.nan, torch.nan
        odd[2, 7, 2], odd[3, 0], odd[4, 9] = torch.inf, -torch.inf, -torch.inf
        yield Sample(f"not finite, {named}", (odd, closed.masked_fill(ties(device, states, states) == 0.5, torch.nan)))
    square = make(7, 7, 12), make(7, 12, 12, of=1)
    yield Sample("as many sequences as steps, moves a sequence", square, {"transitions_per": "sequence"})
    yield Sample("as many sequences as steps, moves a step", square, {"transitions_per": "step"})
    x, move, first = call(5, 21, 12)
    lengths = torch.tensor([-3, 99, 7, 2**40, 21], device=device)
    yield Sample("lengths beyond the steps", (x, move), {"lengths": lengths})
    yield Sample("every second length", (x, move), {"lengths": torch.arange(10, device=device)[::2]})
    yield Sample("no score", (x, move, first), {"return_score": False})
    yield Sample("no sequences", (x[:0], move, first))
    yield Sample("no steps", (x[:, :0], move, first))
    yield Sample("float64", (x.double(), move, first))
    yield Sample("float64 moves", (x, move.double()))
    yield Sample("float64 start", (x, move, first.double()))
    yield Sample("2,049 states", (make(1, 2, 2049), make(1, 2049).expand(2049, 2049)))


@op(samples=samples, contract=Exact(ties="the lowest state"))
def viterbi_decode(
    log_emissions: Tensor,
    log_transitions: Tensor,
    log_initial: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    end_scores: Tensor | None = None,
    transitions_per: str = "auto",
    band: int | None = None,
    return_score: bool = True,
) -> tuple[Tensor, Tensor]:
    """The path of the highest score through the states of each sequence: Viterbi decoding of an HMM or a CRF.

    The score of a path s is ``log_initial[s[0]] + sum(log_emissions[t, s[t]]) + sum(log_transitions[s[t - 1], s[t]]) +
    end_scores[s[-1]]``: log-probabilities of an HMM, or any scores, as those of a CRF.

    Args:
        log_emissions: [B, T, S], floating: what each state scores at each step.
        log_transitions: [S, S], floating, from a state (row) to a state (column); or [B, S, S], a matrix a sequence; or
            [T, S, S], a matrix a step: that of step t leads from step t - 1 to t, that of step 0 is not used.
        log_initial: [S] or [B, S], floating, or None for zeros: what is added at the first step.
        lengths: [B], int32 or int64, or None: how many steps a sequence has; the others are padding. Less than 0 counts
            as 0, more than T as T.
        end_scores: [S] or [B, S], floating, or None for zeros: what is added at the last step of a sequence.
        transitions_per: "auto", "sequence" or "step": what the first of three dimensions of log_transitions is. "auto"
            tells by its size, and raises where B and T are both that size. Of [S, S] nothing is to be told.
        band: None, or from 0: moves from state i to j with ``|i - j| > band`` count as -inf, whatever log_transitions
            has there.
        return_score: False: scores is empty.

    Returns:
        paths: [B, T], int64: the state at each step; -1 at padding.
        scores: [B], float32 (float64 for float64 emissions): the score of the path, 0 for a sequence of length 0. [0]
            where return_score is False.

    Each step is ``max(score[i] + log_transitions[i, j]) + log_emissions[t, j]``: two roundings, in float32 (float64).
    Among equals the lowest state is taken, at the last step as on the way. -inf is a value like others: where no path
    has a higher score than -inf, the states are still in range, by the same rule of ties. NaN counts as -inf, also
    where a sum makes it.

    The gradient of scores flows along the path: 1 to each value that the score is the sum of. paths have none.

    Raises:
        TypeError: not tensors; scores that are no floats; lengths not int32 or int64; transitions_per no str, band no
            int, return_score no bool.
        ValueError: log_emissions not [B, T, S] with S from 1; shapes that do not fit them; three dimensions of
            log_transitions whose first is both B and T under "auto"; another transitions_per; a negative band; two
            devices.

    Contract: Exact: both paths add the same numbers in the same order.

    Source: Viterbi, Error bounds for convolutional codes and an asymptotically optimum decoding algorithm, 1967;
    Rabiner, A tutorial on hidden Markov models, 1989.
    """
    wide = wide_of(log_emissions)
    batch, steps, states = log_emissions.shape
    per = kind_of(log_emissions, log_transitions, transitions_per)
    here = torch.arange(states, device=log_emissions.device)
    if steps == 0:
        scores = log_emissions.new_zeros((batch if return_score else 0,), dtype=wide)
        return log_emissions.new_zeros((batch, 0), dtype=torch.int64), scores
    x, moves = log_emissions.to(wide), log_transitions.to(wide)
    if band is not None:
        moves = moves.masked_fill((here[:, None] - here).abs() > band, -torch.inf)
    score = x[:, 0] if log_initial is None else x[:, 0] + log_initial.to(wide)
    origins = []
    for t in range(1, steps):
        best = at_most_infinite(score.unsqueeze(2) + (moves[t] if per == "step" else moves)).max(dim=1)
        after, origin = best.values + x[:, t], best.indices
        if lengths is not None:  # behind its last step a sequence stands still
            runs = (lengths > t).unsqueeze(1)
            after, origin = torch.where(runs, after, score), torch.where(runs, origin, here)
        score = after
        origins.append(origin)
    last = at_most_infinite(score if end_scores is None else score + end_scores.to(wide)).max(dim=1)

    state = last.indices.unsqueeze(1)
    path = [state]
    for origin in reversed(origins):
        state = origin.gather(1, state)
        path.append(state)
    paths, scores = torch.cat(path[::-1], dim=1), last.values
    if lengths is not None:
        at = torch.arange(steps, device=paths.device)
        paths = torch.where(at < lengths.unsqueeze(1), paths, -1)
        scores = torch.where(lengths > 0, scores, 0.0)
    return paths, scores if return_score else scores.new_empty((0,))


def at_most_infinite(x: Tensor) -> Tensor:
    """-inf for NaN."""
    return torch.where(x.isnan(), -torch.inf, x)


def kind_of(log_emissions: Tensor, log_transitions: Tensor, transitions_per: str) -> str:
    """ "all", "sequence" or "step": whose matrices they are."""
    if log_transitions.dim() == 2:
        return "all"
    if transitions_per != "auto":
        return transitions_per
    return "sequence" if log_transitions.shape[0] == log_emissions.shape[0] else "step"


@viterbi_decode.check
def _(log_emissions, log_transitions, log_initial, *, lengths, end_scores, transitions_per, band, return_score):
    given = {"log_emissions": log_emissions, "log_transitions": log_transitions, "log_initial": log_initial}
    given |= {"lengths": lengths, "end_scores": end_scores}
    present = {name: x for name, x in given.items() if x is not None or name in ("log_emissions", "log_transitions")}
    for name, x in present.items():
        c.is_tensor(name, x)
    if not isinstance(transitions_per, str):
        raise TypeError(f"transitions_per: expected a str, got {type(transitions_per).__name__}")
    if band is not None:
        c.in_range("band", band, 0, torch.iinfo(torch.int32).max)
    c.is_bool("return_score", return_score)
    c.same_device(**given)
    for name, x in present.items():
        if name != "lengths":
            c.is_floating(name, x)
    if transitions_per not in PER:
        raise ValueError(f"transitions_per: expected 'auto', 'sequence' or 'step', got {transitions_per!r}")
    if log_emissions.dim() != 3 or log_emissions.shape[2] == 0:
        raise ValueError(f"log_emissions: expected shape [B, T, S], S from 1, got {list(log_emissions.shape)}")
    batch, steps, states = log_emissions.shape
    if log_transitions.dim() == 2:
        c.has_shape("log_transitions", log_transitions, (states, states))
    else:
        is_matrices("log_transitions", log_transitions, batch, steps, states, transitions_per)
    for name in ("log_initial", "end_scores"):
        if (x := given[name]) is not None and not is_row(x, batch, states):
            raise ValueError(f"{name}: expected shape [{states}] or [{batch}, {states}], got {list(x.shape)}")
    if lengths is not None:
        if lengths.dtype not in INTEGERS:
            raise TypeError(f"lengths: expected int32 or int64, got {c.short(lengths.dtype)}")
        c.has_shape("lengths", lengths, (batch,))


# What follows compares one size with another and no more of them than it must: under torch.compile each comparison is
# a condition under which the code that was compiled holds, and sizes in a set or in a text are constants of it.


def is_row(x: Tensor, batch: int, states: int) -> bool:
    """[S] or [B, S]."""
    if x.dim() == 1:
        return x.shape[0] == states
    return x.dim() == 2 and x.shape[0] == batch and x.shape[1] == states


def is_matrices(name: str, x: Tensor, batch: int, steps: int, states: int, per: str) -> None:
    """[B, S, S], or [T, S, S], or either where it can be told which."""
    sizes = {"auto": (batch, steps), "sequence": (batch,), "step": (steps,)}[per]
    square = x.dim() == 3 and x.shape[1] == states and x.shape[2] == states
    if not square or not any(x.shape[0] == size for size in sizes):
        first = " or ".join(str(size) for size in sizes)
        shown = f"[{states}, {states}], [{first}" if per == "auto" else f"[{first}"
        raise ValueError(f"{name}: expected shape {shown}, {states}, {states}], got {list(x.shape)}")
    if per == "auto" and batch == steps:
        raise ValueError(f"transitions_per: expected 'sequence' or 'step' where B and T are both {batch}, got {per!r}")


viterbi_decode.kernel(
    needs=[
        c.at_most("log_emissions", 2, MOST_STATES),
        c.at_most("log_emissions", 1, MOST_STEPS),
        c.at_most("log_emissions", 0, 2**31 - 1),
        c.dtype_in("log_emissions", *FLOATS),
        c.dtype_in("log_transitions", *FLOATS),
        c.Need(
            "dtype",
            "log_initial and end_scores in float32, float16, bfloat16",
            lambda args: all(
                args[name] is None or args[name].dtype in FLOATS for name in ("log_initial", "end_scores")
            ),
        ),
    ]
)


@viterbi_decode.fake
def _(log_emissions, log_transitions, log_initial, *, lengths, end_scores, transitions_per, band, return_score):
    batch, steps, _ = log_emissions.shape
    paths = log_emissions.new_empty((batch, steps), dtype=torch.int64)
    return paths, log_emissions.new_empty((batch if return_score else 0,), dtype=wide_of(log_emissions))


@viterbi_decode.backward(keeps=(0,))
def _(saved, kept, grad_paths, grad_scores):
    """What the score is the sum of, counted by the path. index_put adds in a fixed order."""
    (paths,), x = kept, saved["log_emissions"]
    batch, steps, states = x.shape
    if not saved["return_score"] or steps == 0:
        return {name: torch.zeros_like(value) for name, value in saved.items() if name in saved.wanted}
    at = paths.clamp(min=0)
    share = grad_scores.unsqueeze(1) * (paths >= 0)  # [B, T]

    def summed(places: Tensor, values: Tensor, like: Tensor) -> Tensor:
        flat = values.new_zeros(like.numel()).index_put((places.reshape(-1),), values.reshape(-1), accumulate=True)
        return flat.view(like.shape).to(like.dtype)

    rows = torch.arange(batch, device=x.device)
    found = {}
    if "log_emissions" in saved.wanted:
        found["log_emissions"] = share.new_zeros(x.shape).scatter(2, at.unsqueeze(2), share.unsqueeze(2)).to(x.dtype)
    if "log_transitions" in saved.wanted:
        moves = saved["log_transitions"]
        places = at[:, :-1] * states + at[:, 1:]
        per = kind_of(x, moves, saved["transitions_per"])
        if per != "all":
            matrix = rows.unsqueeze(1) if per == "sequence" else torch.arange(1, steps, device=x.device)
            places = places + matrix * states**2
        found["log_transitions"] = summed(places, share[:, 1:], moves)
    last = paths.ge(0).sum(1, keepdim=True).sub(1).clamp(min=0)
    for name, place in (("log_initial", at[:, 0]), ("end_scores", at.gather(1, last).squeeze(1))):
        if name in saved.wanted:
            value = saved[name]
            found[name] = summed(place if value.dim() == 1 else place + rows * states, share[:, 0], value)
    return found


@viterbi_decode.bad_calls
def _(device):
    x, move = torch.ones(2, 3, 4, device=device), torch.ones(4, 4, device=device)
    moves, first, lengths = torch.ones(3, 4, 4, device=device), move[0], torch.ones(2, dtype=torch.int64, device=device)
    yield BadCall(([1.0], move), TypeError, r"log_emissions: expected a torch.Tensor, got list")
    yield BadCall((x, None), TypeError, r"log_transitions: expected a torch.Tensor, got NoneType")
    yield BadCall((x, move, 1.0), TypeError, r"log_initial: expected a torch.Tensor, got float")
    yield BadCall((x.long(), move), TypeError, r"log_emissions: expected a floating dtype, got int64")
    yield BadCall((x, move.long()), TypeError, r"log_transitions: expected a floating dtype, got int64")
    yield BadCall((x, move, first.long()), TypeError, r"log_initial: expected a floating dtype, got int64")
    yield BadCall(
        (x, move), TypeError, r"end_scores: expected a floating dtype, got int64", {"end_scores": first.long()}
    )
    yield BadCall((x[0], move), ValueError, r"log_emissions: expected shape \[B, T, S\], S from 1, got \[3, 4\]")
    yield BadCall((x[..., :0], move), ValueError, r"log_emissions: expected shape .*, S from 1, got \[2, 3, 0\]")
    yield BadCall((x, move[1:]), ValueError, r"log_transitions: expected shape \[4, 4\], got \[3, 4\]")
    yield BadCall((x, first), ValueError, r"log_transitions: expected shape \[4, 4\], \[2 or 3, 4, 4\], got \[4\]")
    wrong = torch.ones(5, 4, 4, device=device)
    yield BadCall((x, wrong), ValueError, r"log_transitions: .* \[4, 4\], \[2 or 3, 4, 4\], got \[5, 4, 4\]")
    match = r"log_transitions: expected shape \[2, 4, 4\], got \[3, 4, 4\]"
    yield BadCall((x, moves), ValueError, match, {"transitions_per": "sequence"})
    match = r"log_transitions: expected shape \[3, 4, 4\], got \[2, 4, 4\]"
    yield BadCall((x, moves[1:]), ValueError, match, {"transitions_per": "step"})
    match = r"transitions_per: expected 'sequence' or 'step' where B and T are both 2, got 'auto'"
    yield BadCall((x[:, 1:], moves[1:]), ValueError, match)
    match = r"transitions_per: expected 'auto', 'sequence' or 'step', got 'batch'"
    yield BadCall((x, move), ValueError, match, {"transitions_per": "batch"})
    yield BadCall((x, move), TypeError, r"transitions_per: expected a str, got int", {"transitions_per": 1})
    yield BadCall((x, move, first[1:]), ValueError, r"log_initial: expected shape \[4\] or \[2, 4\], got \[3\]")
    yield BadCall((x, move), ValueError, r"end_scores: expected shape .*, got \[3, 4\]", {"end_scores": moves[0, 1:]})
    yield BadCall((x, move), TypeError, r"lengths: expected int32 or int64, got float32", {"lengths": lengths.float()})
    yield BadCall((x, move), ValueError, r"lengths: expected shape \[2\], got \[1\]", {"lengths": lengths[1:]})
    yield BadCall((x, move), ValueError, r"band: expected 0 to 2147483647, got -1", {"band": -1})
    yield BadCall((x, move), TypeError, r"band: expected an int, got float", {"band": 1.0})
    yield BadCall((x, move), TypeError, r"return_score: expected a bool, got int", {"return_score": 1})
