from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules

from dtrain.build import giving
from dtrain.config import files
from dtrain.config.facts import about, fact
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape
from dtrain.predict.schedule import (
    Action,
    actions,
    bubble,
    first_rounds,
    in_flight,
    length_of,
    spots,
    timeline,
    transfers,
)
from dtrain.resolve.pipeline import check_microbatches

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


SCHEDULES = files.groups()["pipeline"]


def shape_of(word: str, stages: int | None = None) -> PipelineShape:
    facts = about(files.node("pipeline", word))
    return PipelineShape(word, stages or facts["stages"], facts["layout"])


def of_torch(word: str, pp: int, stages: int, count: int) -> list[list[tuple[str, int, int]]]:
    """The order torch's own class makes for every rank, its overlapped pairs one after the other."""
    kind = getattr(schedules, fact(shape_of(word).order, "runner"))
    schedule: Any = object.__new__(kind)
    schedule.__dict__ |= {
        "_n_microbatches": count,
        "pp_group_size": pp,
        "_num_stages": pp * stages,
        "num_stages": pp * stages,
    }
    schedule.__dict__ |= {
        "_has_backward": True,
        "scale_grads": False,
        "n_local_stages": stages,
        "_stages": [SimpleNamespace()] * stages,
    }
    schedule.number_of_rounds = max(1, count // pp)
    schedule.microbatches_per_round = count // schedule.number_of_rounds
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return [_run(schedule, rank, count) for rank in range(pp)]
    orders = []
    for rank in range(pp):
        computed = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        flat = [one for action in computed for one in (action.sub_actions or (action,))]
        orders.append([(LETTERS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in flat])
    return orders


def _run(schedule: Any, rank: int, count: int) -> list[tuple[str, int, int]]:
    """What a schedule of one stage per rank asks of its stage: the order it prints of 1f1b counts microbatches otherwise."""
    done: list[tuple[str, int, int]] = []
    stage = MagicMock(stage_index=rank, is_first=rank == 0, is_last=rank == schedule._num_stages - 1)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: done.append(("F", rank, index))
    stage.backward_one_chunk.side_effect = lambda index, *_, **__: done.append(("B", rank, index))
    schedule._stage = stage
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(schedule, name, MagicMock())
    schedule._check_inputs = lambda *_: ([()] * count, [{}] * count)
    schedule._step_microbatches()
    return done


@pytest.mark.parametrize("word", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 6, 8, 16, 24])
def test_the_order_is_torchs(word: str, pp: int, count: int) -> None:
    if check_microbatches(shape_of(word), count, pp):
        pytest.skip("refused")
    for stages in (2, 3) if fact(shape_of(word).order, "more") else (shape_of(word).stages,):
        shape = shape_of(word, stages)
        assert [[tuple(action) for action in actions(shape, pp, count, rank)] for rank in range(pp)] == of_torch(
            word, pp, stages, count
        )


MULTI = [word for word in SCHEDULES if shape_of(word).stages > 1]


@pytest.mark.parametrize("word", MULTI)
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (3, 6), (4, 8)])
def test_a_rank_begins_to_receive_where_torch_has_it(word: str, pp: int, count: int) -> None:
    shape, kinds = shape_of(word), schedules._ComputationType
    owners = shape.owners(pp)
    begun = {
        rank: [schedules._Action(stage, kinds(kind), index) for kind, stage, index in actions(shape, pp, count, rank)]
        for rank in range(pp)
    }
    ours = {name: kind for kind, name in LETTERS.items()} | {"<": "RECV_F", ">": "RECV_B"}
    for rank, theirs in schedules._add_send_recv(begun, lambda stage: owners[stage], len(owners)).items():  # type: ignore[arg-type]
        mine = [
            each for each in transfers(shape, pp, count, rank) if each.kind != ">" or owners[each.stage + 1] != rank
        ]
        assert [(ours[kind], stage, index) for kind, stage, index in mine] == [
            (each.computation_type.name, each.stage_index, each.microbatch_index)
            for each in theirs
            if not each.computation_type.name.startswith("SEND")
        ]


@pytest.mark.parametrize("word", SCHEDULES)
def test_every_microbatch_goes_forth_and_back_through_every_stage(word: str) -> None:
    shape, pp, count = shape_of(word), 4, 8
    done = [action for rank in range(pp) for action in actions(shape, pp, count, rank)]
    assert len(done) == len(set(done))
    expected = {(stage, microbatch) for stage in range(pp * shape.stages) for microbatch in range(count)}
    assert {action[1:] for action in done if action.kind == "F"} == expected
    assert {action[1:] for action in done if action.kind in "BI"} == expected
    assert {action[1:] for action in done if action.kind in "BW"} == expected
    assert in_flight(shape, pp, count) == tuple(most for most in in_flight(shape, pp, count) if 1 <= most <= count)


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (8, 32), (4, 4)])
def test_the_bubble_of_gpipe_and_1f1b_is_the_papers(pp: int, count: int) -> None:
    for word in ("gpipe", "1f1b"):
        assert timeline(shape_of(word), pp, count).bubble == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize(("pp", "count", "stages"), [(4, 8, 2), (4, 16, 4), (8, 32, 2)])
def test_more_stages_on_a_rank_divide_the_bubble(pp: int, count: int, stages: int) -> None:
    """(p - 1) / m of the time of one rank's work becomes that divided by v (arXiv 2104.04473, section 2.2.2)."""
    line = timeline(shape_of("interleaved_1f1b", stages), pp, count)
    waits = line.bubble / (1 - line.bubble)
    assert waits == pytest.approx((pp - 1) / (count * stages))


def test_zero_bubble_schedules_wait_less() -> None:
    pp, count = 4, 16
    bubbles = {word: timeline(shape_of(word), pp, count).bubble for word in SCHEDULES}
    assert (
        bubbles["zbv"]
        == bubbles["dualpipev"]
        == bubbles["interleaved_zero_bubble"]
        < bubbles["interleaved_1f1b"]
        < bubbles["1f1b"]
    )


@pytest.mark.parametrize("word", SCHEDULES)
def test_the_bubble_of_many_microbatches_is_that_of_all_of_them(word: str) -> None:
    for count in (4, 16, 18, 64, 67, 128):
        if check_microbatches(shape_of(word), count, 4):
            continue
        assert bubble(shape_of(word), 4, count) == pytest.approx(
            timeline(shape_of(word), 4, count).bubble, abs=0.005
        ), count


@pytest.mark.parametrize("word", SCHEDULES)
@pytest.mark.parametrize(("pp", "count"), [(2, 17), (3, 64), (4, 48), (6, 128)])
def test_the_first_rounds_stand_for_a_step_of_many_microbatches(word: str, pp: int, count: int) -> None:
    """Also where the last round is not full, ends are heavier, and what a rank sends is under way for a while."""
    shape = shape_of(word)
    if check_microbatches(shape, count, pp):
        pytest.skip("refused")
    few, stages = first_rounds(shape, count, pp), pp * shape.stages
    forward = (1.2, *[1.0] * (stages - 2), 1.3)
    assert few < count
    assert length_of(shape, pp, count, forward, 0.05, 1.0) == pytest.approx(
        timeline(shape, pp, count, forward, 0.05, 1.0).length, rel=0.01
    )
    if not fact(shape.order, "keeps"):
        assert in_flight(shape, pp, few) == in_flight(shape, pp, count)
        assert all(set(spots(shape, pp, few, rank)) == set(spots(shape, pp, count, rank)) for rank in range(pp))


def test_what_waits_for_its_backward() -> None:
    assert in_flight(shape_of("gpipe"), 4, 8) == (8, 8, 8, 8)
    assert in_flight(shape_of("1f1b"), 4, 8) == (4, 3, 2, 1)
    assert in_flight(shape_of("looped_bfs"), 2, 4) == (4, 4, 4, 4)


def test_nothing_travels_between_two_stages_of_one_rank() -> None:
    assert timeline(shape_of("zbv"), 1, 4, hop=5.0).length == timeline(shape_of("zbv"), 1, 4).length
    assert timeline(shape_of("zbv"), 2, 4, hop=5.0).length > timeline(shape_of("zbv"), 2, 4).length


def test_unequal_stages_wait_for_the_slowest() -> None:
    even, uneven = timeline(shape_of("1f1b"), 2, 8), timeline(shape_of("1f1b"), 2, 8, (1.0, 3.0))
    assert uneven.length > 2 * even.length
    assert uneven.bubble > even.bubble


class Backwards:
    """What `zbv` and others are not: each backward before its forward."""

    def order(self, pp: int, stages: int, count: int, rank: int) -> list[Action]:
        return [Action(kind, rank, microbatch) for kind in "BF" for microbatch in range(count)]


class Waiting:
    """Both ranks begin with what the other one would have to begin with."""

    def order(self, pp: int, stages: int, count: int, rank: int) -> list[Action]:
        first, last = range(count // 2), range(count // 2, count)
        halves = (first, last) if rank else (last, first)
        return [Action(kind, rank, microbatch) for half in halves for kind in "FB" for microbatch in half]


@pytest.mark.parametrize(("order", "sentence"), [(Backwards, "before its F"), (Waiting, "its ranks deadlock")])
def test_an_order_that_cannot_be_run_is_refused(order: type, sentence: str) -> None:
    shape = PipelineShape("mine", order={"_target_": "dtrain.build.given", "of": "order"})
    with giving({"order": order}), pytest.raises(WordsError, match=sentence):
        timeline(shape, 2, 4)
