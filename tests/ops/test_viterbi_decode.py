"""viterbi_decode against all paths, NumPy, librosa and pytorch-crf; at ties, padding and what is not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import prequal
from compiled_once import is_compiled_once
from prequal.bench.replacement import observe
from prequal.ops.viterbi_decode import ties

INF, NAN = float("inf"), float("nan")
# Below, at and past what a group of 8 lanes, a warp, the registers of a block and those of a cluster hold.
STATES = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 257]


def normal(device, *shape, of=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * of)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)


def by_numpy(x, moves, first=None, ends=None, lengths=None, per="all", band=None):
    """One sequence, step and state after the other, in float32; the first of equal ones, NaN as -inf."""
    x, moves = x.float().cpu().numpy(), moves.float().cpu().numpy()
    batch, steps, states = x.shape
    paths, scores = np.full((batch, steps), -1), np.zeros(batch, dtype=np.float32)
    i = np.arange(states)
    for b in range(batch):
        length = steps if lengths is None else min(max(int(lengths[b]), 0), steps)
        if length == 0:
            continue
        row = dict.fromkeys(("first", "ends"), 0.0)
        for name, value in (("first", first), ("ends", ends)):
            if value is not None:
                row[name] = (value if value.dim() == 1 else value[b]).float().cpu().numpy()
        with np.errstate(invalid="ignore"):
            score, origins = (x[b, 0] + row["first"]).astype(np.float32), []
            for t in range(1, length):
                move = moves if per == "all" else moves[b] if per == "sequence" else moves[t]
                if band is not None:
                    move = np.where(abs(i[:, None] - i) <= band, move, np.float32(-np.inf))
                candidates = (score[:, None] + move).astype(np.float32)
                candidates[np.isnan(candidates)] = -np.inf
                origins.append(candidates.argmax(0))
                score = candidates.max(0) + x[b, t]
            score = (score + row["ends"]).astype(np.float32)
        score[np.isnan(score)] = -np.inf
        paths[b, length - 1], scores[b] = score.argmax(), score.max()
        for t in range(length - 1, 0, -1):
            paths[b, t - 1] = origins[t - 1][paths[b, t]]
    return paths, scores


def is_right(found, want):
    paths, scores = (x.cpu().numpy() for x in found)
    np.testing.assert_array_equal(paths, want[0])
    np.testing.assert_array_equal(scores, want[1])


def score_of(path, x, moves, first, ends):
    """In float64."""
    total = first[path[0]] + ends[path[-1]] + sum(x[t, s] for t, s in enumerate(path))
    return float(total + sum(moves[a, b] for a, b in itertools.pairwise(path)))


def test_no_path_is_better(device):
    """All 3^5 of them, with a start and an end."""
    x, moves = normal(device, 4, 5, 3), normal(device, 3, 3)
    first, ends = normal(device, 3, of=1), normal(device, 3, of=2)
    paths, scores = prequal.viterbi_decode(x, moves, first, end_scores=ends)
    wide = [value.double().cpu() for value in (moves, first, ends)]
    for b in range(4):
        one = x[b].double().cpu()
        every = {path: score_of(path, one, *wide) for path in itertools.product(range(3), repeat=5)}
        best = max(every, key=lambda path: every[path])
        assert tuple(paths[b].tolist()) == best
        assert float(scores[b]) == pytest.approx(every[best], rel=1e-5)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (2, 2), (3, 9), (5, 37)])
def test_it_is_what_numpy_says(device, batch, steps, states):
    x, moves, first = normal(device, batch, steps, states), normal(device, states, states), normal(device, states)
    is_right(prequal.viterbi_decode(x, moves, first), by_numpy(x, moves, first))
    if device.type == "cuda":
        assert prequal.stats()["viterbi_decode"][str(device)] == {"fast": 1, "reference": {}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("states", [5, 16, 30, 100])
def test_halves_are_added_in_float32(device, dtype, states):
    x, moves = normal(device, 3, 50, states, dtype=dtype), normal(device, states, states, dtype=dtype)
    paths, scores = prequal.viterbi_decode(x, moves)
    assert scores.dtype == torch.float32
    is_right((paths, scores), by_numpy(x, moves))


@pytest.mark.parametrize("states", STATES)
def test_ties_go_to_the_lowest_state(device, states):
    x, moves = ties(device, 4, 40, states), ties(device, states, states)
    x[3], equal = 0.0, torch.zeros_like(moves)
    is_right(prequal.viterbi_decode(x, moves), by_numpy(x, moves))
    paths, _ = prequal.viterbi_decode(x[3:], equal)
    assert (paths == 0).all()
    x[3, 20, states // 2 :] = 1.0  # in the middle all but those below are equal
    paths, _ = prequal.viterbi_decode(x[3:], equal)
    assert paths[0].nonzero().flatten().tolist() == ([20] if states > 1 else [])
    assert int(paths[0, 20]) == states // 2


@pytest.mark.parametrize("states", [3, 8, 16, 29, 70])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_sequence_ends_at_its_length(device, states, dtype):
    """Beside each other in one call, and each alone without its padding; lengths on either side of a round of steps."""
    steps, moves, ends = 141, normal(device, states, states), normal(device, states)
    said = [0, 1, 2, 8, 9, 10, 16, 17, 32, 33, 127, 128, 129, 140, 141, 142, -1]
    x = normal(device, len(said), steps, states)
    lengths = torch.tensor(said, dtype=dtype, device=device)
    paths, scores = prequal.viterbi_decode(x, moves, lengths=lengths, end_scores=ends)
    is_right((paths, scores), by_numpy(x, moves, ends=ends, lengths=said))
    for b, length in enumerate(min(max(n, 0), steps) for n in said):
        alone, score = prequal.viterbi_decode(x[b : b + 1, :length], moves, end_scores=ends)
        assert torch.equal(paths[b, :length], alone[0])
        assert torch.equal(scores[b], score[0])
        assert (paths[b, length:] == -1).all()


@pytest.mark.parametrize("states", [4, 16, 32, 50])
def test_padding_is_not_looked_at(device, states):
    x, moves = normal(device, 3, 20, states), normal(device, states, states)
    lengths = torch.tensor([20, 7, 0], device=device)
    want = prequal.viterbi_decode(x, moves, lengths=lengths)
    for value in (NAN, INF, -INF):
        odd = x.clone()
        odd[1, 7:], odd[2] = value, value
        found = prequal.viterbi_decode(odd, moves, lengths=lengths)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("states", [4, 8, 16, 32, 50])
@pytest.mark.parametrize("per", ["sequence", "step"])
@pytest.mark.parametrize("steps", [6, 13])
def test_matrices_of_sequences_and_of_steps(device, states, per, steps):
    """As many sequences as steps, too."""
    x, moves = normal(device, 6, steps, states), normal(device, 6 if per == "sequence" else steps, states, states)
    found = prequal.viterbi_decode(x, moves, transitions_per=per)
    is_right(found, by_numpy(x, moves, per=per))
    if steps != 6:
        told = prequal.viterbi_decode(x, moves)
        assert torch.equal(told[0], found[0])
    same = prequal.viterbi_decode(x, moves[:1].expand_as(moves), transitions_per=per)
    assert torch.equal(same[0], prequal.viterbi_decode(x, moves[0])[0])


def test_the_matrix_of_the_first_step_is_not_used(device):
    x, moves = normal(device, 3, 5, 4), normal(device, 5, 4, 4)
    want, _ = prequal.viterbi_decode(x, moves)
    moves[0] = NAN
    assert torch.equal(prequal.viterbi_decode(x, moves)[0], want)


@pytest.mark.parametrize("states", [4, 16, 27, 33, 90])
@pytest.mark.parametrize("band", [0, 1, 5, 1000])
def test_a_band_closes_what_lies_outside(device, states, band):
    x, moves = normal(device, 3, 30, states), normal(device, states, states)
    paths, scores = prequal.viterbi_decode(x, moves, band=band)
    is_right((paths, scores), by_numpy(x, moves, band=band))
    assert int((paths[:, 1:] - paths[:, :-1]).abs().max()) <= band


@pytest.mark.parametrize("states", [2, 8, 16, 30, 40])
def test_values_that_are_not_finite_have_the_stated_answer(device, states):
    x, moves = ties(device, 6, 30, states), ties(device, states, states)
    x[0, 3, 1], x[1, 5], x[2, 29], x[3, 0] = NAN, NAN, NAN, -INF
    x[4, 9, 0], x[5, 4] = INF, -INF
    moves[0, 1], moves[1, 0] = -INF, NAN
    is_right(prequal.viterbi_decode(x, moves), by_numpy(x, moves))
    moves[:] = -INF
    paths, scores = prequal.viterbi_decode(x, moves)
    assert (paths[:, :-1] == 0).all()
    assert (scores == -INF).all()
    moves[:] = INF  # and -inf, together NaN
    is_right(prequal.viterbi_decode(x, moves), by_numpy(x, moves))


def test_a_closed_move_is_not_taken(device):
    """Left to right, as a forced alignment goes: the path never falls and ends at the last state."""
    states, steps = 12, 60
    moves = torch.full((states, states), -INF, device=device)
    moves[range(states), range(states)] = 0.0
    moves[range(states - 1), range(1, states)] = 0.0
    first = torch.full((states,), -INF, device=device)
    first[0] = 0.0
    paths, _ = prequal.viterbi_decode(normal(device, 4, steps, states), moves, first, end_scores=first.flip(0))
    steps_taken = paths[:, 1:] - paths[:, :-1]
    assert (paths[:, 0] == 0).all()
    assert (paths[:, -1] == states - 1).all()
    assert ((steps_taken == 0) | (steps_taken == 1)).all()


def test_the_answer_is_that_of_librosa():
    sequence = pytest.importorskip("librosa.sequence")
    probabilities = normal("cpu", 1, 40, 9).double().softmax(2)
    moves = normal("cpu", 9, 9).double().softmax(1)
    first = normal("cpu", 9).double().softmax(0)
    want, score = sequence.viterbi(probabilities[0].T.numpy(), moves.numpy(), p_init=first.numpy(), return_logp=True)
    paths, scores = prequal.viterbi_decode(probabilities.log(), moves.log(), first.log())
    assert paths[0].tolist() == want.tolist()
    assert float(scores[0]) == pytest.approx(np.asarray(score).item(), rel=1e-9)  # one, in an array of either rank


def test_the_answer_is_that_of_a_crf():
    """pytorch-crf: transitions from row to column, a start and an end of the batch, and a mask for lengths."""
    crf = pytest.importorskip("torchcrf").CRF(7, batch_first=True)
    x, lengths = normal("cpu", 5, 23, 7), torch.tensor([23, 1, 9, 22, 4])
    want = crf.decode(x, torch.arange(23) < lengths[:, None])
    ends = crf.end_transitions.detach()
    with torch.no_grad():
        paths, _ = prequal.viterbi_decode(x, crf.transitions, crf.start_transitions, lengths=lengths, end_scores=ends)
    assert [path[:n].tolist() for path, n in zip(paths, lengths, strict=True)] == want


@pytest.mark.parametrize("states", [6, 16, 45])
def test_an_hmm_in_logarithms_is_that_of_librosa_in_float32(device, states):
    """Closed moves and states, a start of one state; librosa has float64 and, for zeros, the least positive number."""
    sequence = pytest.importorskip("librosa.sequence")
    x, moves = normal(device, 3, 60, states).softmax(2), normal(device, states, states)
    near = (torch.arange(states)[:, None] - torch.arange(states)).abs() <= 2
    moves = moves.masked_fill(~near.to(device), -INF).softmax(1)
    first = torch.zeros(states, device=device)
    first[states // 2] = 1.0
    paths, scores = prequal.viterbi_decode(x.log(), moves.log(), first.log())
    inputs = moves.double().cpu(), first.double().cpu()
    for b in range(3):
        whole = (inputs[0] / inputs[0].sum(1, keepdim=True)).numpy()  # librosa wants sums of 1 in float64
        want, score = sequence.viterbi(x[b].double().cpu().T.numpy(), whole, p_init=inputs[1].numpy(), return_logp=True)
        assert paths[b].tolist() == want.tolist()
        assert float(scores[b]) == pytest.approx(np.asarray(score).item(), rel=1e-5)


def test_an_empty_batch_and_empty_sequences(device):
    moves = normal(device, 4, 4)
    paths, scores = prequal.viterbi_decode(normal(device, 0, 5, 4), moves)
    assert (paths.shape, scores.shape) == ((0, 5), (0,))
    paths, scores = prequal.viterbi_decode(normal(device, 3, 0, 4), moves)
    assert paths.shape == (3, 0)
    assert scores.tolist() == [0.0] * 3


def test_without_a_score_the_path_is_the_same(device):
    x, moves = normal(device, 3, 20, 16), normal(device, 16, 16)
    paths, scores = prequal.viterbi_decode(x, moves, return_score=False)
    assert torch.equal(paths, prequal.viterbi_decode(x, moves)[0])
    assert scores.shape == (0,)


def arguments(per, lengths, shared):
    matrices = {"all": (), "sequence": (3,), "step": (5,)}[per]
    rows = () if shared else (3,)
    made = [normal("cpu", *shape, of=7).double() for shape in ((3, 5, 4), (*matrices, 4, 4), (*rows, 4), (*rows, 4))]
    named = {"lengths": lengths, "transitions_per": "auto"}
    return [value.requires_grad_() for value in made], named


@pytest.mark.parametrize("per", ["all", "sequence", "step"])
@pytest.mark.parametrize("lengths", [None, [5, 0, 2]])
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_of_a_score_is_that_of_the_reference(per, lengths, shared):
    inputs, named = arguments(per, None if lengths is None else torch.tensor(lengths), shared)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def scores(function):
        x, moves, first, ends = inputs
        return function(x, moves, first, end_scores=ends, **named)[1]

    found = torch.autograd.grad(scores(prequal.viterbi_decode), inputs, weights)
    want = torch.autograd.grad(scores(prequal.viterbi_decode.op.reference), inputs, weights)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)

    def total(*values):
        return prequal.viterbi_decode(*values[:3], end_scores=values[3], **named)[1]

    assert torch.autograd.gradcheck(total, inputs)


def test_without_a_score_there_is_a_gradient_of_zero():
    x = normal("cpu", 2, 3, 4).requires_grad_()
    _, scores = prequal.viterbi_decode(x, normal("cpu", 4, 4), return_score=False)
    (found,) = torch.autograd.grad(scores.sum(), x, allow_unused=True, materialize_grads=True)
    assert (found == 0).all()


@pytest.mark.parametrize("per", ["all", "sequence", "step"])
@pytest.mark.parametrize("asks", [False, True])
def test_it_is_compiled_once_for_every_size(device, per, asks):
    """B, T and S apart; also where a start of each sequence has as many sequences as states, and where T comes to S."""

    def call(x, moves, first, ends, lengths):
        return prequal.viterbi_decode(
            x, moves, first, end_scores=ends, lengths=lengths, band=3, transitions_per="auto" if per == "all" else per
        )

    def sizes():
        for batch, steps, states in ((3, 7, 5), (4, 6, 9), (6, 11, 6), (7, 8, 8), (5, 5, 4)):
            matrices = {"all": (), "sequence": (batch,), "step": (steps,)}[per]
            x, moves = normal(device, batch, steps, states), normal(device, *matrices, states, states)
            first, ends = normal(device, states), normal(device, batch, states, of=1)
            lengths = torch.arange(batch, device=device) + 1
            yield *(value.requires_grad_(asks) for value in (x, moves, first, ends)), lengths

    is_compiled_once(call, sizes())


@pytest.mark.parametrize("states", [3, 16, 32, 60])
def test_a_long_sequence_is_walked_back_in_pieces(device, states):
    """Past one, two and three of the pieces that a kernel holds at a time."""
    x, moves = ties(device, 2, 1030, states), ties(device, states, states)
    lengths = torch.tensor([1030, 517], device=device)
    is_right(prequal.viterbi_decode(x, moves, lengths=lengths), by_numpy(x, moves, lengths=lengths.tolist()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "states", [1, 5, 8, 11, 16, 24, 32, 48, 65, 128, 129, 256, 257, 512, 513, 632, 633, 1024, 1025, 2048]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_width_has_the_answer_of_the_reference(cuda, states, dtype):
    x, moves = normal(cuda, 9, 40, states, dtype=dtype), normal(cuda, states, states)
    lengths = torch.tensor([40, 39, 0, 1, 2, 8, 9, 17, 33], device=cuda)
    # 60 is the widest band whose columns a thread holds; 61 and 200 are past it.
    for named in ({}, {"lengths": lengths}, {"band": 3}, {"band": 60, "lengths": lengths}, {"band": 61}, {"band": 200}):
        found = prequal.viterbi_decode(x, moves, **named)
        want = prequal.viterbi_decode.op.reference(x, moves, **named)
        assert prequal.viterbi_decode.op.contract.compare(found, want) is None
    assert prequal.stats()["viterbi_decode"][str(cuda)] == {"fast": 6, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("states", [*range(129, 146), *range(160, 170), *range(192, 198), 225, 257])
@pytest.mark.parametrize("band", [None, 0, 7, 60])
def test_every_block_of_a_cluster_takes_part(cuda, states, band):
    """Numbers of states that do not come out even, of which the last block has few; steps enough to be left behind."""
    x, moves = ties(cuda, 5, 700, states), ties(cuda, states, states)
    lengths = torch.tensor([700, 1, 0, 513, 2], device=cuda)
    for named in ({}, {"lengths": lengths}):
        found = prequal.viterbi_decode(x, moves, band=band, **named)
        want = prequal.viterbi_decode.op.reference(x, moves, band=band, **named)
        assert prequal.viterbi_decode.op.contract.compare(found, want) is None
    assert prequal.stats()["viterbi_decode"][str(cuda)] == {"fast": 2, "reference": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("states", [20, 32, 50, 100, 200, 300, 600])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 10, 31, 32, 33, 34, 64, 65, 129, 257])
def test_every_number_of_steps_has_the_answer_of_the_reference(cuda, states, steps):
    """At and past rounds, chunks and pieces of steps; of few values, so that ties are many."""
    x, moves = ties(cuda, 3, steps, states), ties(cuda, states, states)
    lengths = torch.tensor([steps, steps - 1, steps // 2], device=cuda)
    for named in ({}, {"lengths": lengths}):
        found = prequal.viterbi_decode(x, moves, **named)
        want = prequal.viterbi_decode.op.reference(x, moves, **named)
        assert prequal.viterbi_decode.op.contract.compare(found, want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("states", [24, 64, 128, 200, 300, 700])
@pytest.mark.parametrize("band", [None, 7])
def test_what_is_not_finite_has_the_answer_of_the_reference(cuda, states, band):
    x, moves = ties(cuda, 4, 40, states), ties(cuda, states, states)
    x[0, 3, 1], x[1, 5], x[2, 39], x[3, 0] = NAN, NAN, NAN, -INF
    x[0, 9, 0], x[1, 20], x[2, 11, states - 1] = INF, -INF, INF
    moves[0, 1], moves[1, 0], moves[states - 1, 5] = -INF, NAN, INF
    for matrix in (moves, torch.full_like(moves, -INF), moves.masked_fill(ties(cuda, states, states, of=1) > 0, -INF)):
        found = prequal.viterbi_decode(x, matrix, band=band)
        want = prequal.viterbi_decode.op.reference(x, matrix, band=band)
        assert prequal.viterbi_decode.op.contract.compare(found, want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("states", [24, 64, 128, 200, 300, 700])
def test_matrices_of_sequences_and_their_views_have_the_answer_of_the_reference(cuda, states):
    x = normal(cuda, 3, 30, states + 5)[:, :, 3 : 3 + states]
    for moves in (ties(cuda, 3, states, states), ties(cuda, 3, states, states + 1).bfloat16()[:, :, 1:]):
        for matrix in (moves, moves.mT, moves[0], moves[0].t()):
            found = prequal.viterbi_decode(x, matrix)
            want = prequal.viterbi_decode.op.reference(x, matrix)
            assert prequal.viterbi_decode.op.contract.compare(found, want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("states", [64, 160])
def test_a_workspace_that_would_be_too_large_is_done_without(cuda, states):
    """One sequence many times over, up to 2^30 bytes of kept scores and past them: each path is that of the one."""
    x, moves = ties(cuda, 1, 64, states), ties(cuda, states, states)
    want = prequal.viterbi_decode.op.reference(x, moves)
    most = 2**30 // (4 * 64 * states)
    for batch in (most, most + 1):
        paths, scores = prequal.viterbi_decode(x.expand(batch, 64, states), moves)
        assert (paths == want[0]).all()
        assert (scores == want[1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("states", [8, 16, 32, 64, 100, 200, 300, 700])
@pytest.mark.parametrize("steps", [1, 1000])
def test_there_and_back_is_one_launch(cuda, states, steps):
    x, moves = normal(cuda, 3, steps, states), normal(cuda, states, states)
    ends, lengths = normal(cuda, states), torch.tensor([steps, 0, 1], device=cuda)
    found = observe(lambda: prequal.viterbi_decode(x, moves, ends, lengths=lengths, end_scores=ends, band=4))
    assert found.launches == 1


@pytest.mark.gpu
@pytest.mark.parametrize("states", [16, 24, 40, 100, 200, 300, 600])
def test_a_captured_graph_reads_lengths_when_it_is_replayed(cuda, states):
    """Lengths are not looked at by the host, so a replay has those of its time, longer ones too."""
    steps = 70
    x, moves = normal(cuda, 4, steps, states), normal(cuda, states, states)
    lengths = torch.tensor([1, 0, 3, 2], device=cuda)
    prequal.viterbi_decode(x, moves, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paths, scores = prequal.viterbi_decode(x, moves, lengths=lengths)
    for said in ([steps, 0, 35, 69], [0, steps, 1, 64]):
        lengths.copy_(torch.tensor(said))
        graph.replay()
        torch.cuda.synchronize()
        is_right((paths, scores), by_numpy(x, moves, lengths=said))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "steps", "states"),
    [(64, 1024, 16), (10_007, 65, 7), (4099, 33, 16), (1001, 70, 24), (300, 70, 64), (300, 20, 130)],
)
def test_many_sequences_have_the_answer_of_the_reference(cuda, batch, steps, states):
    x, moves = ties(cuda, batch, steps, states), ties(cuda, states, states)
    found, want = prequal.viterbi_decode(x, moves), prequal.viterbi_decode.op.reference(x, moves)
    assert prequal.viterbi_decode.op.contract.compare(found, want) is None


@pytest.mark.gpu
@pytest.mark.parametrize("states", [2, 16, 24, 40])
def test_a_million_steps_have_the_answer_of_numpy(cuda, states):
    """The program in NumPy looks at 2^20 steps one after the other; states of few values, so that ties are many."""
    x, moves = ties(cuda, 1, 1 << 20, states), ties(cuda, states, states)
    is_right(prequal.viterbi_decode(x, moves), by_numpy(x, moves))


@pytest.mark.gpu
@pytest.mark.parametrize("states", [5, 16, 24, 64])
@pytest.mark.parametrize(("steps", "apart"), [(9, 1 << 28), (3, 1 << 30)])
def test_emissions_beyond_two_to_the_31_values(cuda, states, steps, apart):
    """Strides of a view: the last steps lie past 2^31 values, and of 2^30 values a step is past 2^31 - 1 bytes."""
    memory = torch.zeros((1 << 31) + (1 << 20), dtype=torch.bfloat16, device=cuda)
    x = memory.as_strided((1, steps, states), (0, apart, 1))
    x.copy_(normal(cuda, 1, steps, states))
    moves = normal(cuda, states, states)
    is_right(prequal.viterbi_decode(x, moves), by_numpy(x, moves))


@pytest.mark.gpu
@pytest.mark.parametrize("states", [16, 24, 64, 200])
def test_calls_on_two_streams_do_not_share_their_workspace(cuda, states):
    moves = normal(cuda, states, states)
    inputs = [normal(cuda, 50, 200 + i, states) for i in range(4)]
    wants = [prequal.viterbi_decode.op.reference(x, moves) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _, (x, want, stream) in itertools.product(range(5), zip(inputs, wants, streams, strict=True)):
        with torch.cuda.stream(stream):
            found.append((prequal.viterbi_decode(x, moves), want))
    torch.cuda.synchronize()
    assert all(prequal.viterbi_decode.op.contract.compare(got, want) is None for got, want in found)
