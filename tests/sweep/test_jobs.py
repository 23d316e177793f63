"""The jobs of a sweep: each once, judged for the part of the machine that its slot has."""

from pathlib import Path

import pytest

from dtrain.cluster import Cluster
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.sweep import folder, jobs
from dtrain.sweep.folder import Description

WORDS = ["model=mlp", "data=synthetic", "objective=regression", "sweep.out=s"]
GPUS = Cluster(gpus=8, cpus=64, memory=80 << 30, gpu="NVIDIA H100 80GB HBM3", capability=9.0)


def judged(*words: str, on: Cluster) -> jobs.Judged:
    return jobs.judged(jobs.read([*WORDS, *words]), on, resolve)


def visible(of: jobs.Judged, slot: int) -> str | None:
    return jobs.decided(of.jobs[0], "s", of, resolve, slot).environment.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("words", "on", "slots", "seen"),
    [
        (("devices=2",), GPUS, 4, ["0,1", "2,3", "4,5", "6,7"]),
        (("devices=1",), GPUS, 8, [str(number) for number in range(8)]),
        (("devices=1", "sweep.parallel=2"), GPUS, 2, ["0,1,2,3", "4,5,6,7"]),
        (("devices=1", "sweep.parallel=16"), GPUS, 16, [*map(str, range(8)), *map(str, range(8))]),
        ((), Cluster(gpus=0, cpus=8), 9, [None] * 9),
        (("devices=2", "strategy=ddp"), Cluster(gpus=0, cpus=8), 4, [None] * 4),
        ((), Cluster(gpus=0, cpus=64, memory=1 << 30), 12, [None]),
        ((), Cluster(gpus=0, cpus=1), 1, [None]),
    ],
)
def test_slots_share_the_machine(
    words: tuple[str, ...], on: Cluster, slots: int, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = judged("seed=0,1", *words, on=on)
    assert found.slots == slots
    assert [visible(found, slot) for slot in range(len(seen))] == seen


def test_a_slot_never_trains_elsewhere_than_the_machine_would() -> None:
    found = judged("seed=0,1", "devices=1", "sweep.parallel=16", on=GPUS)
    assert jobs.decided(found.jobs[0], "s", found, resolve, 9).plan.device == "cuda"


def test_a_jobs_config_states_the_threads_of_its_slot() -> None:
    found = judged("seed=0,1", "sweep.parallel=2", on=Cluster(gpus=0, cpus=8))
    decided = jobs.decided(found.jobs[0], "s", found, resolve, 0)
    assert decided.plan.threads == 4 and "\nthreads: 4" in decided.config


def test_jobs_that_mean_the_same_are_one_and_names_are_those_of_values() -> None:
    names = [job.name.rpartition("-")[0] for job in judged("optim.lr=1e-3,0.001,3e-3", on=Cluster(0, 2)).jobs]
    assert names == ["optim.lr-0.001", "optim.lr-0.003"]
    loggers = judged("log.every=1,2", on=Cluster(0, 2)).jobs
    assert len({job.digest for job in loggers}) == 2, "also what changes no number is swept"
    wide = judged("model.width=8,16", "steps=5", on=Cluster(0, 2)).jobs
    fixed = judged("steps=5,6", "model.width=8", on=Cluster(0, 2)).jobs
    assert {job.digest for job in wide} & {job.digest for job in fixed}, "whatever is swept, a job is what it computes"


def test_the_mistakes_of_all_jobs_are_told_at_once() -> None:
    with pytest.raises(WordsError) as raised:
        judged("optim=adamw,sdg", "steps=5,0", "sweep.fail=never", on=Cluster(0, 2))
    said = "\n".join(raised.value.problems)
    assert "sgd" in said and "steps=0" in said and len(raised.value.problems) == len(set(raised.value.problems))


def test_another_space_joins_a_sweep_and_other_words_do_not(tmp_path: Path) -> None:
    root = str(tmp_path)
    folder.join(root, Description({"steps": "5", "log.every": "1"}, [{"seed": [0, 1]}]))
    both = folder.join(root, Description({"steps": "5", "log.every": "2"}, [{"seed": [0, 1, 2]}]))
    assert both.spaces == [{"seed": [0, 1]}, {"seed": [0, 1, 2]}] and folder.read(root) == both
    swept = folder.join(root, Description({}, [{"steps": [5, 9], "seed": [0]}]))
    assert len(swept.spaces) == 3, "a word of all jobs became one of several values"
    for words, sentence in (
        ({"steps": "6"}, "steps is 6 here and 5 there"),
        ({"steps": "5", "batch": "4"}, "batch is 4 here and not given there"),
    ):
        with pytest.raises(WordsError, match=sentence):
            folder.join(root, Description(words, [{"seed": [0]}]))
    assert folder.read(root) == swept


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("format: 2\nwords: {}\nspaces: []", "format 2 is of a newer dtrain"),
        ("format: 1\nwords: {a: 1}\nspaces: []", "it is no sweep"),
        ("format: 1\nwords: {}\nspaces: {}", "spaces is no list"),
        ("- 1", "it is no sweep"),
        ("{", "it is no sweep"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(Exception, match=sentence):
        folder.read(str(tmp_path))


def test_a_sweep_of_somebody_else_has_the_rights_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "format: 1\nwords: {trust: '[os]', steps: '5'}\nspaces:\n- {sweep.out: [a, b]}\n"
    )
    with pytest.raises(WordsError) as raised:
        jobs.again(str(tmp_path), [])
    assert any("trust cannot come from a recipe" in problem for problem in raised.value.problems)
    assert any("sweep.out=a" in problem and "it cannot be swept" in problem for problem in raised.value.problems)
