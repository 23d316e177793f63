"""The jobs of a sweep: each once, judged for the part of the machine that its slot has."""

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import yaml

from dtrain.cluster import Cluster
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.sweep import begun, folder, jobs
from dtrain.sweep.folder import Description
from dtrain.sweep.study import Study

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
    with pytest.raises(WordsError) as raised:
        judged("seed=range(3,1)", "steps=5,0", "optim.lrr=1,2", on=Cluster(0, 2))
    said = "\n".join(raised.value.problems)
    assert "an empty range" in said and "steps=0" in said and "has no lrr" in said


def test_values_that_are_wrong_together_are_named() -> None:
    with pytest.raises(WordsError) as raised:
        judged("strategy=ddp,fsdp", "devices=1,2", "batch=7,8", "seed=0,1", on=Cluster(0, 2))
    (problem,) = raised.value.problems
    assert problem.startswith("batch=7 does not split") and problem.endswith(" (jobs with batch=7 devices=2)")


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("model.activation=relu,tanh,", 'Type model.activation=relu,tanh for several values, or "model.act'),
        (
            "model.activation=choise(relu,tanh)",
            "Type 'model.activation=choice(a,b)' for several values, or \"model.act",
        ),
        ("model.activation=choice(relu,tanh", "Type 'model.activation=choice(a,b)' for several values, or \"model.act"),
        ("+data.name=ünï,b", """Type "data.name='ünï',b" for several values, or "data.name='ünï,b'" for the text"""),
    ],
)
def test_a_list_that_cannot_be_read_is_no_text_beside_other_words_of_several_values(word: str, typed: str) -> None:
    for more in ([], ["seed=0,1"]):
        with pytest.raises(WordsError) as raised:
            jobs.read([*WORDS, word, *more])
        assert "is one text. " + typed in raised.value.problems[0], raised.value.problems
    jobs.read([*WORDS, "seed=0,1", "data.name='ünï,b'"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optim.lr=interval(1e-4,1e-2)"], "optim.lr: an interval has no end of values"),
        (["seed=range(0,101)", "data.seed=range(0,100)"], "-m: 10,100 jobs, and a grid has at most 10,000"),
        (["seed=0,1", "sweep.search=tpe"], "it does not say how many jobs. Type sweep.trials=100"),
        (["seed=0,1", "sweep.search=tpe", "sweep.trials=3"], "the space has 2 jobs. Type sweep.trials=2"),
        (["optim.lr=interval(0,1)", "sweep.search=cmaes", "sweep.trials=3"], "two intervals or more, not 1"),
        (["seed=0,1", "sweep.begin=[{seed:0}]"], "sweep.begin: a grid tries all values"),
        (["seed=0,1", "sweep.search=tpe", "sweep.trials=2", "sweep.begin=[{seed:2}]"], "seed=2 is not in the space"),
        (["seed=0,1", "sweep.search=tpe", "sweep.trials=2", "sweep.begin=[{sed:1}]"], "sed is not swept. Did you mean"),
        (["seed=0,1", "sweep.metric=eval_f2"], "sweep.metric=eval_f2: no job writes this figure. Did you mean eval_"),
        (["seed=0,1", "sweep.metric=[eval_loss,loss]"], "sweep.search=grid has 1 of them, not 2"),
        (["seed=0,1", "sweep.search=nsga2", "sweep.trials=2"], "sweep.search=nsga2 has 2 of them, not 1"),
        (["seed=0,1", "sweep.search=nsga2", "sweep.metric=[loss,loss]", "sweep.trials=2"], "nsga2 has 2 of them, not 1"),
        (["seed=0,1", "sweep.metric=eval_loss", "data.holdout_part=0"], "nothing is held out"),
        (["seed=0,1", "sweep.metric=eval_loss", "data.holdout_part=0", "evaluate.sets.dev.seed=2"],
         "Type sweep.metric=eval_dev_loss, or sweep.metric=loss."),
        (["seed=0,1", "sweep.goal=low"], "sweep.goal=low: allowed: min, max"),
        (["seed=0,1", "sweep.goal=max"], "the best eval_loss is the lowest"),
        (["seed=0,1", "sweep.goal=[min,min]"], "2 for 1 metrics"),
        (["model.width=interval(0,8)", "sweep.search=random", "sweep.trials=3"], "model.width=0"),
        (["optim=adamw,sgd", "optim.momentun=0.5,0.9"], "Did you mean optim.momentum?"),
        (["optim=adamw,sgd", "optim.momentum=0.5,2"], "optim.momentum=2 (command line)"),
        (["optim=adamw,sgd", "optim.momentum=interval(0,2)", "sweep.search=tpe", "sweep.trials=2"], "optim.momentum=2"),
    ],
)  # fmt: skip
def test_mistakes_of_a_search_are_told_before_its_first_job(words: list[str], sentence: str) -> None:
    with pytest.raises(WordsError) as raised:
        judged(*words, on=Cluster(0, 2))
    assert any(sentence in problem for problem in raised.value.problems), raised.value.problems


@pytest.mark.parametrize(("search", "package"), [("tpe", "optuna"), ("cmaes", "cmaes")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    search: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.sweep.study.find_spec", lambda name: None)
    words = ["optim.lr=interval(0,1)", "clip=interval(1,2)", "sweep.trials=3", f"sweep.search={search}"]
    with pytest.raises(WordsError, match=rf"{package} is not installed. Type pip install 'dtrain\[optuna\]'"):
        judged(*words, on=Cluster(0, 2))
    assert judged("seed=0,1", on=Cluster(0, 2)).jobs, "a grid needs none"


@pytest.mark.parametrize(
    ("words", "metrics", "goals"),
    [
        ([], ("eval_loss",), ("min",)),
        (["data.holdout_part=0"], ("loss",), ("min",)),
        (["objective=classification", "checkpoint.best=eval_accuracy"], ("eval_accuracy",), ("max",)),
        (["sweep.metric=loss"], ("loss",), ("min",)),
        (["ema=0.9", "sweep.metric=eval_ema_loss"], ("eval_ema_loss",), ("min",)),
        (["objective=classification", "sweep.search=nsga2", "sweep.trials=2", "sweep.metric=[loss,eval_accuracy]"],
         ("loss", "eval_accuracy"), ("min", "max")),
    ],
)  # fmt: skip
def test_the_metric_is_what_is_held_out_and_the_objective_says_which_way(
    words: list[str], metrics: tuple[str, ...], goals: tuple[str, ...]
) -> None:
    study = judged("seed=0,1", *words, on=Cluster(0, 2)).study
    assert (study.metrics, study.goals) == (metrics, goals)


def test_words_that_exist_only_under_another_are_left_out_where_they_do_not() -> None:
    found = judged("optim=sgd,adamw", "optim.momentum=0,0.9", "optim.nesterov=false", "seed=1,2", on=Cluster(0, 2)).jobs
    assert [dict(job.values) for job in found] == [
        {"optim": "sgd", "optim.momentum": 0, "seed": 1}, {"optim": "sgd", "optim.momentum": 0, "seed": 2},
        {"optim": "sgd", "optim.momentum": 0.9, "seed": 1}, {"optim": "sgd", "optim.momentum": 0.9, "seed": 2},
        {"optim": "adamw", "seed": 1}, {"optim": "adamw", "seed": 2},
    ]  # fmt: skip
    assert all(("optim.nesterov=false" in job.words) == (job.values["optim"] == "sgd") for job in found)


def test_the_first_jobs_of_a_grid_and_intervals_of_integers() -> None:
    assert [job.values["seed"] for job in judged("seed=range(0,99)", "sweep.trials=3", on=Cluster(0, 2)).jobs] == [
        0,
        1,
        2,
    ]
    words = ["batch=interval(1,8)", "optim.lr=interval(1,8)", "sweep.search=random", "sweep.trials=2"]
    axes = jobs.read([*WORDS, *words]).space
    assert [getattr(axis, "whole", None) for axis in axes] == [True, False]


def test_a_search_in_a_folder_goes_on_with_the_same_words_and_more_trials_alone(tmp_path: Path) -> None:
    root, space = str(tmp_path), {"optim.lr": "tag(log,interval(0.001,1))", "seed": [0, 1]}
    first = Study("tpe", 0, 10, ("eval_loss",), ("min",), (), 4)
    folder.join(root, Description({"steps": "5"}, [space], first))
    both = folder.join(root, Description({"steps": "5"}, [space], replace(first, trials=30, ahead=2)))
    assert folder.read(root) == both and (both.study.trials, both.study.ahead) == (30, 4)
    assert folder.join(root, Description({"steps": "5"}, [space], first)).study.trials == 30
    for words, spaces, study, sentence in (
        ({"steps": "6"}, space, first, "steps is 6 here and 5 there"),
        ({"steps": "5"}, {**space, "seed": [0, 1, 2]}, first, "seed is 0,1,2 here and 0,1 there"),
        (
            {"steps": "5"},
            {"seed": [0, 1]},
            first,
            r"optim.lr is not swept here and tag\(log,interval\(0.001,1\)\) there",
        ),
        ({"steps": "5"}, space, replace(first, seed=3), "sweep.seed is 3 here and 0 there"),
        ({"steps": "5"}, space, replace(first, method="random"), "sweep.search is random here and tpe there"),
        ({"steps": "5"}, {"seed": [0, 1]}, Study(), "sweep.search is grid here and tpe there"),
    ):
        with pytest.raises(WordsError, match=sentence):
            folder.join(root, Description(words, [spaces], study))
    assert folder.read(root) == both


STUDY = (
    "{method: grid, seed: 0, trials: null, metrics: [], goals: [], begin: [], ahead: 2, stop: halving, rung: 5, "
    "factor: 3}"
)


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
        ("format: 1\nwords: {}\nspaces: []", "spaces is no list"),
        ("format: 1\nwords: {}\nspaces: [{5: [1]}]", "5 in spaces has no list of values"),
        ("format: 1\nwords: {}\nspaces: [{optim.lr: []}]", "optim.lr in spaces has no list of values"),
        (f"format: 1\nwords: {{}}\nspaces: [{{seed: [1]}}]\nstudy: {STUDY}", "study has 0 metrics"),
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
        begun.again(str(tmp_path), [])
    assert any("trust cannot come from a recipe" in problem for problem in raised.value.problems)
    assert any("sweep.out=a" in problem and "it cannot be swept" in problem for problem in raised.value.problems)


def test_who_takes_part_in_a_sweep_at_a_url_types_where_its_jobs_run() -> None:
    study = yaml.safe_load(STUDY)
    words = {"model": "mlp", "launcher": "ssh", "launcher.options": "-oProxyCommand=x", "checkpoint.keep": "3"}
    sweep = {
        "format": 1,
        "words": words,
        "spaces": [{"seed": [1, 2]}],
        "study": {**study, "metrics": ["loss"], "goals": ["min"]},
    }
    fsspec.filesystem("memory").pipe_file("/shared/sweep.yaml", yaml.safe_dump(sweep).encode())
    with pytest.raises(WordsError, match=r"launcher\.options cannot come from a recipe from elsewhere"):
        begun.again("memory://shared", [])
    (request,) = begun.again("memory://shared", ["launcher=inline"])
    assert {str(word) for word in request.words} == {"model=mlp", "checkpoint.keep=3", "launcher=inline"}
    with pytest.raises(WordsError, match=r"steps=3.*: the words of a sweep are those of its sweep.yaml"):
        begun.again("memory://shared", ["launcher=inline", "steps=3"])


def test_what_a_sweep_at_a_url_may_not_say_is_typed_as_it_says_it() -> None:
    study = {**yaml.safe_load(STUDY), "metrics": ["loss"], "goals": ["min"]}
    words, spaces = {"data.path": "/here/a.txt"}, [{"seed": [1, 2], "data.tokenizer": ["/here/a", "/here/b"]}]
    sweep = {"format": 1, "words": words, "spaces": spaces, "study": study}
    fsspec.filesystem("memory").pipe_file("/local/sweep.yaml", yaml.safe_dump(sweep).encode())
    with pytest.raises(WordsError) as raised:
        begun.again("memory://local", [])
    assert all(f"Type {key}=<value> if you mean it" in str(raised.value) for key in ("data.path", "data.tokenizer"))
    (request,) = begun.again("memory://local", ["data.path=/here/a.txt", "data.tokenizer=/here/a,/here/b"])
    assert [str(word) for word in request.words] == ["data.path=/here/a.txt"]
    assert [axis.key for axis in request.space] == ["data.tokenizer", "seed"]
    with pytest.raises(WordsError, match=r"Leave it out, or type it as it is there: data\.path=/here/a\.txt\."):
        begun.again("memory://local", ["data.path=/here/b.txt", "data.tokenizer=/here/a,/here/b"])
