"""Kullback-Leibler divergence of two models' next tokens, which never has all logits in fp32; of logits that are split
over the vocabulary, small all-reduces replace gathering [N, V].
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.errors import WordsError
from dtrain.mesh.sharding import local, offset
from dtrain.objective.vocabulary import chunks


def divergence(student: Tensor, teacher: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """KL(softmax(teacher / temperature) || softmax(student / temperature)) in nats, fp32 [N], 0 where a token does not
    count; the same on all ranks. Its gradient is that of the student.

    `student`, `teacher` [..., V] are whole, or split in their last dim over a mesh of one axis; `counts` [...] bool.
    Raises WordsError unless V is the same.
    """
    if student.shape != teacher.shape:
        raise WordsError(
            f"objective.teacher: its logits are {list(teacher.shape)}, those of the model {list(student.shape)}. Name "
            "a teacher with the vocabulary of the data, or give the model the teacher's (model.vocab, vocab_size)."
        )
    group = student.device_mesh.get_group() if isinstance(student, DTensor) else None
    rows, theirs = (each.flatten(0, -2) for each in (local(student), _beside(student, teacher)))
    apart: Tensor = _Divergence.apply(rows, theirs, counts.flatten(), temperature, group)  # type: ignore
    return apart


@torch.no_grad()
def _beside(student: Tensor, teacher: Tensor) -> Tensor:
    """The teacher's logits for the part of the vocabulary that this rank has of the student's."""
    if isinstance(teacher, DTensor):
        if isinstance(student, DTensor) and student.placements == teacher.placements:
            return local(teacher)
        teacher = teacher.full_tensor()
    if not isinstance(student, DTensor):
        return teacher
    return teacher.narrow(-1, offset(student)[-1], local(student).shape[-1])


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_NV: Tensor, teacher_NV: Tensor, counts_N: Tensor, T: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        both = student_NV, teacher_NV
        largest_2N = student_NV.new_full((2, len(counts_N)), -torch.inf, dtype=torch.float32)
        if student_NV.shape[1]:  # else the vocabulary has fewer tokens than there are ranks
            largest_2N = torch.stack([logits_NV.amax(1).float() / T for logits_NV in both])
        if group is not None:
            dist.all_reduce(largest_2N, op=dist.ReduceOp.MAX, group=group)
        sums_2N = torch.empty_like(largest_2N)
        for rows in chunks(student_NV):
            for logits_NV, largest_N, sums_N in zip(both, largest_2N, sums_2N, strict=True):
                sums_N[rows] = (logits_NV[rows].float() / T - largest_N[rows, None]).exp_().sum(1)
        if group is not None:
            dist.all_reduce(sums_2N, group=group)
        whole_2N = largest_2N + sums_2N.log()
        apart_N = torch.empty_like(whole_2N[0])
        for rows in chunks(student_NV):
            mine, theirs = (
                logits_NV[rows].float() / T - whole_N[rows, None]
                for logits_NV, whole_N in zip(both, whole_2N, strict=True)
            )
            # a token of probability zero adds nothing, also where both models mask it by -inf
            apart_N[rows] = ((theirs - mine) * theirs.exp()).masked_fill_(theirs == -torch.inf, 0.0).sum(1)
        if group is not None:
            dist.all_reduce(apart_N, group=group)
        ctx.save_for_backward(student_NV, teacher_NV, whole_2N, counts_N)
        ctx.temperature = T
        return apart_N * counts_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        student_NV, teacher_NV, (mine_N, theirs_N), counts_N = ctx.saved_tensors
        T, out_NV = ctx.temperature, torch.empty_like(student_NV)
        scale_N = gradient_N * counts_N / T
        for rows in chunks(student_NV):
            mine = (student_NV[rows].float() / T - mine_N[rows, None]).exp_()
            theirs = (teacher_NV[rows].float() / T - theirs_N[rows, None]).exp_()
            out_NV[rows] = mine.sub_(theirs).mul_(scale_N[rows, None])
        return out_NV, None, None, None, None
