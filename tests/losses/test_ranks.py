"""A vocabulary spread over processes gives the answer of one."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from formula_of_the_loss import ALONE, OPTIONS, SMALL, chosen, close, data, formula, with_gradients
from torch import Tensor

import prequal


def as_rank(rank: int, file: str, sizes: list[int]) -> None:
    """A process of its own."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    first, classes = sum(sizes[:rank]), sum(sizes)
    mine = slice(first, first + sizes[rank])
    even = len(set(sizes)) == 1
    place = {"process_group": dist.group.WORLD, "vocabulary": None if even else (first, classes)}
    cpu = torch.device("cpu")
    hidden, weight, target = data(cpu, classes=classes)
    for choice in [*ALONE, tuple(OPTIONS)]:
        whole = chosen(choice, cpu, classes)
        part = {k: v[mine] if isinstance(v, Tensor) else v for k, v in whole.items()}
        for reduction in ("mean", "none"):
            want = with_gradients(formula, hidden, weight, target, reduction=reduction, **whole)
            want = [x[mine] if i >= 2 else x for i, x in enumerate(want)]
            got = with_gradients(
                prequal.linear_cross_entropy,
                hidden,
                weight[mine],
                target,
                reduction=reduction,
                max_workspace_bytes=SMALL // 2,
                **part,
                **place,
            )
            close(got, want)
        both = prequal.linear_cross_entropy(hidden, weight[mine], target, return_lse=True, **part, **place)
        close(both, formula(hidden, weight, target, **whole))
    one = hidden.clone()
    one[2] = math.nan
    loss = prequal.linear_cross_entropy(one, weight[mine], target, reduction="none", **place)
    assert loss.isnan().nonzero().tolist() == [[2]]
    with pytest.raises(ValueError, match=f"target: expected classes 0 to {classes - 1}"):
        prequal.linear_cross_entropy(hidden, weight[mine], torch.full_like(target, classes), **place)
    for wrong in (3, "ab", (0.0, classes), (0, 1, classes), (torch.zeros(()).long(), classes)):
        with pytest.raises(TypeError, match=r"vocabulary: expected \(first, classes\), two ints, got"):
            prequal.linear_cross_entropy(hidden, weight[mine], target, process_group=dist.group.WORLD, vocabulary=wrong)
    outside = dist.new_group([0])
    if rank != 0:
        with pytest.raises(ValueError, match="process_group: expected a group that this process is in"):
            prequal.linear_cross_entropy(hidden, weight[mine], target, process_group=outside)
    with pytest.raises(ValueError, match=r"vocabulary: expected \(first, classes\)"):
        prequal.linear_cross_entropy(
            hidden, weight[mine], target, process_group=dist.group.WORLD, vocabulary=(classes, classes)
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[12, 12], [9, 1, 17]], ids=str)
def test_a_vocabulary_spread_over_ranks_gives_the_answer_of_one(sizes, all_ranks):
    all_ranks(sizes)


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])
