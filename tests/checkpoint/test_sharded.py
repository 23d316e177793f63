"""Checkpoints: saved on one mesh, read on any other, bit by bit; what is damaged is named; nothing valid is ever thrown away."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import PARTS, STRATEGIES, mesh_of, on_mesh, on_resident_mesh
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.errors import PreflightError, StoreError
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.optim.ema import EMA
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape
from dtrain.precision import LossScale
from dtrain.storage import store
from dtrain.storage.attempts import folder, listed

SINGLE, FSDP = PARTS["strategy"], STRATEGIES["fsdp"]
LAYOUTS: dict[str, tuple[dict[str, int], Any]] = {
    "single": ({"dp_shard": 1}, SINGLE),
    "ddp 2": ({"dp_replicate": 2}, STRATEGIES["ddp"]),
    "fsdp 2": ({"dp_shard": 2}, STRATEGIES["fsdp"]),
    "hsdp 4": ({"dp_replicate": 2, "dp_shard": 2}, STRATEGIES["fsdp"]),
}
ADAMW = {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def state_on(
    mesh: Mesh,
    strategy: Any = SINGLE,
    *,
    seed: int = 0,
    steps: int = 2,
    optim: Any = ADAMW,
    part: Any = PARTS["model"],
    ema: bool = False,
    **changed: Any,
) -> TrainState:
    """A small model after `steps` steps on gradients of its own."""
    model = construct({**part, **changed}, facts={"vocab": 13}, seed=seed)
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=seed, pipeline=PipelineShape())
    average = EMA(model, 0.9) if ema else None
    state = TrainState(model, build(optim, model=model), None, LossScale(8.0 + seed, growth=100), average)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 0.1 * (step + 1)
        state.optimizer.step()
        if average:
            average.update()
        state.step += 1
    return state


def whole(state: TrainState) -> dict[str, list[float]]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist()
        for name, t in state.tensors().items()
    }


def sharded(mesh: Mesh, out: Path | str, *, resume: str = "auto", every: int = 1, keep: int | None = None) -> Sharded:
    return Sharded(out=str(out), mesh=mesh, resume=resume, every=every, keep=keep)


def commit(checkpoint: Sharded, state: TrainState) -> str:
    """Save and wait: the URL of what is committed then."""
    url = checkpoint.save(state)
    checkpoint.wait()
    return url


def alone(work: Callable[[Mesh], Any]) -> Any:
    """Of the one rank that this process is."""
    with mesh_of(dp_shard=1) as mesh:
        return work(mesh)


# any mesh reads what any other wrote

MUON = {**ADAMW, "_target_": "dtrain.optim.muon.build", "momentum": 0.95, "adamw_lr": None}
UNTIED = PARTS["model"] | {"tied": False}
MIXTURE = {
    "_target_": "dtrain.model.moe.MoE",
    "vocab": 13,
    "layers": 1,
    "heads": 2,
    "width": 8,
    "hidden": 12,
    "experts": 4,
    "active": 2,
    "shared": 1,
}
SPLIT: dict[str, tuple[dict[str, int], Any]] = {
    "single": ({"dp_shard": 1}, SINGLE),
    "tp 2": ({"tp": 2}, STRATEGIES["ddp"]),
    "ddp 2 x tp 2": ({"dp_replicate": 2, "tp": 2}, STRATEGIES["ddp"]),
    "fsdp 2 x tp 2": ({"dp_shard": 2, "tp": 2}, STRATEGIES["fsdp"]),
    "pp 2 x fsdp 2": ({"pp": 2, "dp_shard": 2}, STRATEGIES["fsdp"]),
    "pp 2 x ddp 2": ({"pp": 2, "dp_replicate": 2}, STRATEGIES["ddp"]),
}
SPREAD: dict[str, tuple[dict[str, int], Any]] = {
    "single": ({"dp_shard": 1}, SINGLE),
    "ddp 4, ep 2": ({"dp_replicate": 4, "ep": 2}, STRATEGIES["ddp"]),
    "fsdp 4, ep 2": ({"dp_shard": 4, "ep": 2}, STRATEGIES["fsdp"]),
    "fsdp 2": ({"dp_shard": 2}, STRATEGIES["fsdp"]),
}
CASES: dict[str, tuple[dict[str, tuple[dict[str, int], Any]], dict[str, Any]]] = {
    "adamw": (LAYOUTS, {}),
    "muon": ({name: LAYOUTS[name] for name in ("single", "fsdp 2")}, {"optim": MUON}),
    "split matrices and layers, average": (SPLIT, {"part": UNTIED, "ema": True}),
    "experts, average": (SPREAD, {"part": MIXTURE, "ema": True}),
}
"""Layouts that read each other's checkpoints, and what their state is made of."""
Written = Callable[[str], tuple[dict[str, Path], dict[str, dict[str, list[float]]]]]


def save_on(mesh: Mesh, out: Path, strategy: Any, **made_of: Any) -> dict[str, list[float]]:
    state = state_on(mesh, strategy, **made_of)
    commit(sharded(mesh, out), state)
    return whole(state)


def read_all(mesh: Mesh, outs: dict[str, Path], strategy: Any, **made_of: Any) -> dict[str, Any]:
    """Step, scale and tensors of each checkpoint, all read into one state, which is spoilt before each."""
    state, read = state_on(mesh, strategy, steps=0, **made_of), {}
    for name, out in outs.items():
        state.optimizer.state.clear()
        for tensor in state.tensors().values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
        state.step, state.scale = 0, LossScale(9.0, growth=100)
        assert sharded(mesh, out).restore(state) is not None
        read[name] = state.step, state.scale.value, whole(state)
    return read


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A case -> a checkpoint of each of its layouts, and the tensors of its ranks. Each is written once."""

    @cache
    def write(case: str) -> tuple[dict[str, Path], dict[str, dict[str, list[float]]]]:
        layouts, made_of = CASES[case]
        folder, tensors = tmp_path_factory.mktemp("written"), {}
        for name, (degrees, strategy) in layouts.items():
            work = partial(save_on, out=folder / name, strategy=strategy, **made_of)
            tensors[name] = {key: values for rank in on_resident_mesh(work, **degrees) for key, values in rank.items()}
        return {name: folder / name for name in layouts}, tensors

    return write


@pytest.mark.often(
    "adamw-fsdp 2",
    "muon-fsdp 2",
    "split*average-single",
    "*average-pp 2 x fsdp 2",
    "*average-ddp 2 x tp 2",
    "experts, average-fsdp 4, ep 2",
)
@pytest.mark.parametrize(("case", "layout"), [(case, layout) for case in CASES for layout in CASES[case][0]])
def test_any_mesh_reads_what_any_other_wrote(case: str, layout: str, written: Written) -> None:
    """Weights, the optimizer's state and the average, bit for bit."""
    outs, tensors = written(case)
    layouts, made_of = CASES[case]
    degrees, strategy = layouts[layout]
    ranks = on_resident_mesh(partial(read_all, outs=outs, strategy=strategy, **made_of), **degrees)
    for source in outs:
        names = set()
        for step, scale, read in (rank[source] for rank in ranks):
            assert (step, scale) == (2, 8.0)
            assert [name for name in read if read[name] != tensors[source][name]] == [], source
            names |= read.keys()
        assert names == tensors[source].keys()


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_written_once(case: str, written: Written) -> None:
    outs, tensors = written(case)
    for layout, out in outs.items():
        committed = find(str(out))[1]
        assert committed["tensors"].keys() == tensors[layout].keys()
        counts = {key: torch.zeros(facts["shape"], dtype=torch.int8) for key, facts in committed["tensors"].items()}
        for piece in committed["pieces"]:
            counts[piece["name"]][
                tuple(slice(a, a + n) for a, n in zip(piece["offset"], piece["shape"], strict=True))
            ] += 1
        assert [key for key, count in counts.items() if not (count == 1).all()] == [], layout


def test_what_was_saved_without_an_average_is_read_with_one_and_back(tmp_path: Path) -> None:
    """The average begins as the weights; and a run without it passes it over."""

    def work(mesh: Mesh) -> None:
        state = state_on(mesh, STRATEGIES["fsdp"])
        commit(sharded(mesh, tmp_path / "without"), state)
        resumed = state_on(mesh, STRATEGIES["fsdp"], seed=1, steps=0, ema=True)
        sharded(mesh, tmp_path / "without").restore(resumed)
        values = whole(resumed)
        averages = {name: values[name] for name in values if name.startswith("ema.")}
        assert averages and all(value == values[name.replace("ema.", "model.", 1)] for name, value in averages.items())
        averaged = state_on(mesh, STRATEGIES["fsdp"], ema=True)
        commit(sharded(mesh, tmp_path / "with"), averaged)
        plain = state_on(mesh, STRATEGIES["fsdp"], seed=1, steps=0)
        sharded(mesh, tmp_path / "with").restore(plain)
        assert whole(plain) == {name: values for name, values in whole(averaged).items() if not name.startswith("ema.")}

    on_mesh(work, dp_shard=2)


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_every_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path: Path, optim: str) -> None:
    parts = {
        "sgd": PARTS["optim"],
        "adafactor": {
            "_target_": "dtrain.optim.adafactor.build",
            "lr": 0.01,
            "beta2_decay": -0.8,
            "d": 1.0,
            "weight_decay": 0.1,
        },
    }

    def work(mesh: Mesh) -> bool:
        strategy = STRATEGIES["fsdp"]
        commit(sharded(mesh, tmp_path), state_on(mesh, strategy, steps=2, optim=parts[optim]))
        resumed = state_on(mesh, strategy, seed=1, steps=0, optim=parts[optim])
        sharded(mesh, tmp_path).restore(resumed)
        uninterrupted = state_on(mesh, strategy, steps=3, optim=parts[optim])
        for parameter in resumed.model.parameters():
            parameter.grad = parameter.detach() + 0.1 * 3
        resumed.optimizer.step()
        return whole(resumed) == whole(uninterrupted)

    assert on_mesh(work, dp_shard=2) == [True, True]


def test_every_rank_writes_what_it_holds_and_no_more(written: Written) -> None:
    outs, _ = written("adamw")
    sizes = {name: [path.stat().st_size for path in out.rglob("*.safetensors")] for name, out in outs.items()}
    assert [len(sizes[name]) for name in LAYOUTS] == [1, 1, 2, 2], "copies are written by one rank"
    assert max(sizes["fsdp 2"]) < 0.6 * sizes["single"][0]


def test_there_is_no_pickle_in_any_file(tmp_path: Path) -> None:
    alone(lambda mesh: commit(sharded(mesh, tmp_path), state_on(mesh)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"rank-00000-0000.safetensors", "COMMIT.json"}
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
        else:  # safetensors: the length of a JSON header, the header, and raw numbers up to the end
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            end = max(facts["data_offsets"][1] for name, facts in header.items() if name != "__metadata__")
            assert 8 + length + end == len(data)


# storage


def roundtrip(mesh: Mesh, out: str) -> bool:
    state, other = state_on(mesh, STRATEGIES["fsdp"]), state_on(mesh, STRATEGIES["fsdp"], seed=1, steps=0)
    checkpoint = sharded(mesh, out, keep=1)
    for _ in range(2):
        url = commit(checkpoint, state)
        state.step += 1
    mesh.barrier()  # rank 0 has tidied up
    assert store.children(store.join(out, "checkpoints")) == ["step-00000003"]
    read = sharded(mesh, out).restore(other)
    assert read is not None
    assert (read["url"], read["step"]) == (url, 3)
    return whole(state) == whole(other)


def test_memory_holds_checkpoints() -> None:
    assert on_mesh(lambda mesh: roundtrip(mesh, "memory://run"), dp_shard=1) == [True]


def test_s3_holds_checkpoints(s3: str) -> None:
    assert on_mesh(lambda mesh: roundtrip(mesh, f"{s3}/run"), dp_shard=2) == [True, True]


def test_nothing_is_left_in_the_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    def work(mesh: Mesh) -> list[str]:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        roundtrip(mesh, "memory://scratch")
        return [path.name for path in tmp_path.iterdir()]

    assert alone(work) == []


# damage


def two_steps(mesh: Mesh, out: Path) -> tuple[Path, Path]:
    state, checkpoint = state_on(mesh), sharded(mesh, out)
    one = commit(checkpoint, state)
    state.step += 1
    return Path(one), Path(commit(checkpoint, state))


def test_a_damaged_checkpoint_is_named_and_an_older_one_is_used(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> tuple[int, list[str], str]:
        _, newest = two_steps(mesh, tmp_path)
        (newest / "COMMIT.json").write_text("{")
        state, checkpoint = state_on(mesh, seed=1, steps=0), sharded(mesh, tmp_path)
        checkpoint.restore(state)
        return state.step, checkpoint.damaged, str(newest)

    step, (sentence,), newest = alone(work)
    assert step == 2
    assert newest in sentence


@pytest.mark.parametrize("reader", ["restore", "load_weights", "load_state"])
def test_every_reader_prints_once_which_checkpoint_is_damaged_and_which_step_is_used(
    tmp_path: Path, reader: str
) -> None:
    def work(mesh: Mesh) -> str:
        state, checkpoint, printed = state_on(mesh, FSDP), sharded(mesh, tmp_path), io.StringIO()
        commit(checkpoint, state)
        state.step += 1
        newest = Path(commit(checkpoint, state))
        if mesh.rank == 0:
            path = sorted(newest.glob("*.safetensors"))[-1]
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        mesh.barrier()
        source = () if reader == "restore" else (str(tmp_path),)
        with contextlib.redirect_stderr(printed):
            getattr(sharded(mesh, tmp_path), reader)(*source, state_on(mesh, FSDP, steps=0))
        return printed.getvalue()

    first, second = on_mesh(work, dp_shard=2)
    assert first.count("\n") == 1 and first.startswith("note: ") and second == ""
    assert "checkpoints/step-00000003/" in first and first.endswith("Step 2 is used instead.\n")


@pytest.mark.parametrize(("degrees", "strategy"), [LAYOUTS["single"], LAYOUTS["fsdp 2"]], ids=["single", "fsdp 2"])
def test_bytes_that_changed_are_found_by_one_rank_and_passed_over_by_all(
    tmp_path: Path, degrees: dict[str, int], strategy: Any
) -> None:
    """The older checkpoint is used; without one, no tensor is touched and resume=must says why."""

    def two(mesh: Mesh) -> dict[str, list[float]]:
        state = state_on(mesh, strategy)
        commit(sharded(mesh, tmp_path), state)
        saved = whole(state)
        with torch.no_grad():
            state.model.get_parameter("norm.weight").zero_()
        state.step += 1
        commit(sharded(mesh, tmp_path), state)
        return saved

    saved = on_mesh(two, **degrees)
    (shard, *_) = sorted((tmp_path / "checkpoints" / "step-00000003").rglob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)

    def work(mesh: Mesh) -> tuple[list[str], bool, str, bool]:
        state, checkpoint = state_on(mesh, strategy, seed=1, steps=0), sharded(mesh, tmp_path)
        checkpoint.restore(state)
        older = (state.step, whole(state)) == (2, saved[mesh.rank])
        mesh.barrier()
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002", ignore_errors=True)
        fresh = state_on(mesh, strategy, seed=1, steps=0)
        before = whole(fresh)
        with pytest.raises(PreflightError) as caught:
            sharded(mesh, tmp_path, resume="must").restore(fresh)
        after = whole(fresh)
        return (
            checkpoint.damaged,
            older,
            str(caught.value),
            all(after[name] == values for name, values in before.items()),
        )

    for damaged, older, message, untouched in on_mesh(work, **degrees):
        assert older
        assert untouched
        assert len(damaged) == 1
        for sentence in (message, *damaged):
            assert f"{shard}: its bytes are not those that were saved" in sentence


def test_a_save_that_died_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the commit, and while it is written."""

    def died(*_: Any, **__: Any) -> None:
        raise StoreError.during("create", "COMMIT.json", "the disk is full")

    def work(mesh: Mesh) -> tuple[int, int]:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path)
        commit(checkpoint, state)
        state.step += 1
        with monkeypatch.context() as patch:
            patch.setattr(store, "publish", died)
            with pytest.raises(StoreError, match="the disk is full"):
                commit(checkpoint, state)
        read = state_on(mesh, seed=1, steps=0)
        sharded(mesh, tmp_path).restore(read)
        commit(checkpoint, state)  # the next attempt has a folder of its own
        again = state_on(mesh, seed=1, steps=0)
        sharded(mesh, tmp_path).restore(again)
        return read.step, again.step

    assert alone(work) == (2, 3)
    (attempt,) = (tmp_path / "checkpoints" / "step-00000003").iterdir()
    assert (attempt / "COMMIT.json").exists(), "what the dead save left went when the next one stood"


def test_a_rank_that_cannot_write_stops_all_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mesh: Mesh) -> str:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        state = state_on(mesh, STRATEGIES["fsdp"])
        if mesh.rank == 1:
            monkeypatch.setattr(store, "put", full)
        with pytest.raises(StoreError) as caught:
            commit(sharded(mesh, tmp_path), state)
        return str(caught.value)

    for message in on_mesh(work, dp_shard=2):
        assert "rank 1" in message
        assert "No space left on device" in message
    assert not list((tmp_path / "checkpoints").iterdir()), "nothing is left of it"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 64}, "blocks.0.feed_forward.gate.weight is [48, 32] there, [64, 32] here"),
        ({"layers": 3}, "missing: model.blocks.2"),
        ({"layers": 1}, "left over: model.blocks.1"),
        ({"tied": False}, "missing: model.head.weight"),
    ],
)
def test_another_model_is_refused_by_the_names_of_its_tensors(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    def work(mesh: Mesh) -> str:
        commit(sharded(mesh, tmp_path), state_on(mesh))
        with pytest.raises(StoreError) as caught:
            sharded(mesh, tmp_path).restore(state_on(mesh, seed=1, steps=0, **changed))
        return str(caught.value)

    assert message in alone(work)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> str:
        commit(sharded(mesh, tmp_path), state_on(mesh, optim=PARTS["optim"]))
        with pytest.raises(StoreError) as caught:
            sharded(mesh, tmp_path).restore(state_on(mesh, seed=1, steps=0))
        return str(caught.value)

    assert "missing: optim." in alone(work)


# what is kept


def kept(out: Path) -> list[int]:
    return sorted(one.step for one in listed(str(out)))


@pytest.mark.parametrize(("keep", "steps"), [(1, [6]), (2, [5, 6]), (None, [2, 3, 4, 5, 6]), (0, [6])])
def test_the_newest_checkpoints_stay(tmp_path: Path, keep: int | None, steps: list[int]) -> None:
    def work(mesh: Mesh) -> None:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path, keep=keep)
        for _ in range(5):
            commit(checkpoint, state)
            state.step += 1

    alone(work)
    assert kept(tmp_path) == steps


def test_what_was_never_committed_counts_for_nothing(tmp_path: Path) -> None:
    """Three runs died while saving; the last good checkpoints stay all the same."""

    def work(mesh: Mesh) -> None:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path, keep=2)
        commit(checkpoint, state)
        for step in (3, 4, 5):
            (Path(folder(str(tmp_path), step)) / "died").mkdir(parents=True)
        state.step = 6
        commit(checkpoint, state)

    alone(work)
    valid = [one.step for one in listed(str(tmp_path)) if one.is_committed]
    assert sorted(valid) == [2, 6]


def test_a_damaged_newer_checkpoint_never_costs_the_good_ones(tmp_path: Path) -> None:
    """The newest is damaged, the run goes on from an older one and saves: what it saved must stay."""

    def work(mesh: Mesh) -> int:
        _, newest = two_steps(mesh, tmp_path)
        shutil.move(newest, Path(folder(str(tmp_path), 9)) / newest.name)
        damaged = Path(folder(str(tmp_path), 9)) / newest.name / "COMMIT.json"
        damaged.write_text("{")
        state, checkpoint = state_on(mesh, seed=1, steps=0), sharded(mesh, tmp_path, keep=1)
        checkpoint.restore(state)
        assert state.step == 2
        state.step = 4
        commit(checkpoint, state)
        again = state_on(mesh, seed=1, steps=0)
        sharded(mesh, tmp_path, resume="must").restore(again)
        return again.step

    assert alone(work) == 4


def test_one_step_is_saved_once(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> bool:
        state, checkpoint = state_on(mesh), sharded(mesh, tmp_path)
        first = commit(checkpoint, state)
        resumed = sharded(mesh, tmp_path)
        resumed.restore(state)
        return first == commit(checkpoint, state) == resumed.save(state)

    assert alone(work)
    assert kept(tmp_path) == [2]


def test_checkpoints_come_every_so_many_steps(tmp_path: Path) -> None:
    with_mesh: Any = None
    assert [
        step for step in range(1, 10) if Sharded(out="x", mesh=with_mesh, resume="auto", every=3, keep=1).due(step)
    ] == [3, 6, 9]
    assert not any(Sharded(out="x", mesh=with_mesh, resume="auto", every=0, keep=1).due(step) for step in range(1, 10))


# where to go on


def test_resume_says_what_must_and_must_not_be_there(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        state = state_on(mesh)
        assert sharded(mesh, tmp_path, resume="never").restore(state) is None
        with pytest.raises(PreflightError, match="Type resume=auto"):
            sharded(mesh, tmp_path, resume="must").restore(state)
        commit(sharded(mesh, tmp_path), state)
        with pytest.raises(PreflightError, match="Type out=<another place>"):
            sharded(mesh, tmp_path, resume="never").restore(state)
        assert sharded(mesh, tmp_path, resume="must").restore(state)

    alone(work)


def test_weights_alone_come_from_a_run_a_step_or_an_attempt(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        state = state_on(mesh)
        url = commit(sharded(mesh, tmp_path), state)
        for source in (str(tmp_path), url, url.rsplit("/", 1)[0]):
            other = state_on(mesh, seed=1, steps=0)
            sharded(mesh, "memory://elsewhere").load_weights(source, other)
            assert other.step == 0, "position and optimizer are fresh"
            weights = {name: values for name, values in whole(state).items() if name.startswith("model.")}
            assert whole(other) == weights
            assert find(source)[0] == url
        with pytest.raises(StoreError, match="there is no committed one"):
            find(str(tmp_path / "none"))

    alone(work)


def test_a_frozen_weight_is_kept_as_well(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> bool:
        state = state_on(mesh, steps=0)
        state.model.embed.weight.requires_grad_(False)
        state.optimizer = build(ADAMW, model=state.model)
        commit(sharded(mesh, tmp_path), state)
        other = state_on(mesh, seed=1, steps=0)
        other.model.embed.weight.requires_grad_(False)
        other.optimizer = build(ADAMW, model=other.model)
        sharded(mesh, tmp_path).load_weights(str(tmp_path), other)
        return torch.equal(state.model.embed.weight, other.model.embed.weight)

    assert alone(work)
