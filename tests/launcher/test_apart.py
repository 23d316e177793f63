"""A model that is traced in a process of its own: the same shapes, kept until something changes, and a run's layout."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pool import ranks
from small import CPUS, composed, plan

from dtrain import secrets
from dtrain.build import giving
from dtrain.cluster import Cluster
from dtrain.cluster.allocation import External
from dtrain.errors import StoreError, WordsError
from dtrain.launcher import apart, process, zygote
from dtrain.planned import Plan
from dtrain.predict.shapes import Shapes
from dtrain.resolve import resolve
from dtrain.storage import caching, store
from dtrain.tracing import shapes_of
from dtrain.train import train

CODE = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        print("built")
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)
"""
WORDS = (
    "model._target_=towers.Model", "trust=[towers]", "data=synthetic", "data.inputs=[512]", "data.outputs=3",
    "objective=regression", "devices=2", "batch=8", "precision=bf16",
)  # fmt: skip
LIBRARIES = 379
"""MiB of a rank that no layout has: cluster.context of a CPU."""
SIZES = {
    "GPT2": "vocab_size=128 n_layer=4 n_head=4 n_embd=128 resid_pdrop=0.0 embd_pdrop=0.0 attn_pdrop=0.0",
    "Llama": "vocab_size=128 num_hidden_layers=4 num_attention_heads=4 hidden_size=128 intermediate_size=256",
}
FAMILIES = {
    "own": ("model._target_=own.Model", "trust=[own]", *WORDS[2:5], "batch=64"),
    **{
        name: (
            f"model._target_=transformers.{target}", f"model.config._target_=transformers.{name}Config",
            *(f"model.config.{size}" for size in SIZES[name].split()), "trust=[transformers]", "data=synthetic",
            "objective=next_token", "data.vocab=128", "data.sequence=32", "batch=64",
        )
        for name, target in (("GPT2", "GPT2LMHeadModel"), ("Llama", "LlamaForCausalLM"))
    },
}  # fmt: skip
"""Models without plans for tensor parallelism and pipelines, and one with both."""
SEQUENTIAL = """
from torch import nn

def Model():
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(512, 3))
"""


@pytest.fixture
def towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "towers.py"
    path.write_text(CODE.replace("WIDTH", "512"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(apart, "_known", {})
    monkeypatch.delitem(sys.modules, "towers", raising=False)
    return path


def decided() -> Plan:
    return resolve(composed(*WORDS), CPUS, apart.shapes_of)


def test_shapes_come_back_from_json() -> None:
    for words in ("model=gpt", "model=moe"):
        shapes = shapes_of(plan(words, "data=synthetic", "strategy=single"))
        assert apart._typed(Shapes, json.loads(json.dumps(asdict(shapes)))) == shapes


def answers(**held: Any) -> apart.Answer:
    shapes = asdict(shapes_of(plan("model=mlp", "data=synthetic", "objective=regression")))
    answer: apart.Answer = json.loads(json.dumps({"copies": shapes, "shards": shapes, "files": {}, **held}))
    return answer


def test_a_model_is_traced_only_where_there_is_a_layout_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Plan]()
    shapes = shapes_of(plan("model=mlp", "data=synthetic", "objective=regression"))
    trace = lambda one: (asked.append(one), shapes)[1]  # noqa: E731
    mine = WORDS[0], *WORDS[1:6], "batch=8"
    around = Cluster(gpus=0, cpus=8, external=External(rank=1, world=4, local_world=2))
    for words, cluster in ((("devices=2", "strategy=ddp"), CPUS), (("devices=1",), CPUS), ((), around)):
        resolve(composed(*mine, *words), cluster, trace)
    assert not asked
    assert "parameters need about" in resolve(composed(*mine, "devices=2"), CPUS, trace).why["strategy"]
    assert asked


@pytest.mark.parametrize("devices", [2, 4])
def test_ddp_is_kept_where_it_fits_and_no_axis_is_chosen_that_the_model_might_not_take(devices: int) -> None:
    words = "data=synthetic", "objective=next_token", "data.vocab=128", "data.sequence=64"
    shapes = shapes_of(plan("model=gpt", "model.layers=4", *words))
    mine = composed(*WORDS[:2], *words, f"devices={devices}", "batch=16")
    found = set[str]()
    for more in (0, 12, 16, 24, 1000):
        cluster = Cluster(gpus=0, cpus=8, memory=devices * (LIBRARIES + more << 20))
        decided = resolve(mine, cluster, lambda _: shapes)
        found.add(decided.strategy["_target_"].split(".")[2])
        assert decided.mesh.dp_replicate * decided.mesh.dp_shard == devices
        assert ("which is more" in decided.why["strategy"]) == (more == 0)
    assert decided.batch.accumulate == 1 and "ddp (auto: strategy=ddp, " in decided.why["strategy"]
    assert len(found) > 1
    assert resolve(composed(*WORDS[:2], *words, "devices=2", "mesh.tp=2"), CPUS, lambda _: shapes).mesh.tp == 2


def test_a_model_that_cannot_be_traced_gets_ddp_and_the_reason(towers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_asked", lambda plan: {name: {"error": "no such model"} for name in apart.HELD})
    assert decided().why["strategy"] == "ddp (auto: 2 ranks, and its layouts cannot be compared: no such model)"
    assert not [*towers.parent.glob("cache/dtrain/shapes/*.json")]


def test_a_model_that_cannot_be_sharded_keeps_ddp(towers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answers(shards={"error": "complex"})
    monkeypatch.setattr(apart, "_asked", lambda plan: answer)
    least = resolve(composed(*WORDS), Cluster(gpus=0, cpus=8, memory=1), apart.shapes_of)
    assert least.strategy["_target_"] == "dtrain.strategy.ddp.DDP"
    words = "data=synthetic", "objective=regression", "trust=[strange]", "model._target_=strange.Complex"
    with pytest.raises(WordsError, match="spectrum holds complex numbers"):
        shapes_of(plan(*words, "strategy=fsdp"))


def test_an_object_of_the_caller_is_not_traced(towers: Path) -> None:
    with giving({"model": object}), pytest.raises(WordsError, match="exists in this process alone"):
        apart.shapes_of(plan("data=synthetic"))


@pytest.fixture
def asked(towers: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that a process was asked for; it answers with the shapes of another model."""
    plans = list[Plan]()

    def ask(one: Plan) -> apart.Answer:
        plans.append(one)
        time.sleep(0.05)
        return answers(files={str(towers): apart._state(str(towers))})

    monkeypatch.setattr(apart, "_asked", ask)
    return plans


def again(*words: str) -> Plan:
    """What another process decides."""
    apart._known.clear()
    return resolve(composed(*WORDS, *words), CPUS, apart.shapes_of)


def test_an_answer_is_kept_until_a_file_changes(towers: Path, asked: list[Plan]) -> None:
    for count, change, words in (
        (1, "", ()), (1, "", ("optim.lr=0.1", "batch=4", "seed=2")), (2, "# changed", ()), (2, "", ()),
        (3, "", ("data.inputs=[256]",)),
    ):  # fmt: skip
        if change:
            towers.write_text(towers.read_text() + change)
        assert "parameters need about" in again(*words).why["strategy"]
        assert len(asked) == count


def test_two_at_once_ask_once_and_one_that_waits_too_long_asks_itself(
    towers: Path, asked: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, one = towers.parent / "cache/both", plan("data=synthetic")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: apart._shared(stem, one), range(2))
    assert first == second and len(asked) == 1
    monkeypatch.setattr(apart, "SECONDS", 0)
    with caching.locked(stem):
        assert apart._shared(stem, one) == first
    assert len(asked) == 2


def test_an_entry_that_is_no_answer_is_replaced(towers: Path, asked: list[Plan]) -> None:
    again()
    (kept,) = towers.parent.glob("cache/dtrain/shapes/*.json")
    whole = kept.read_text()
    assert apart._kept(str(kept))
    for entry in (
        "", "[]", "{}", "[" * 10_000, "NaN", '{"copies": {"error": 1}}', '{"copies": {"blocks": "none"}}', whole[:-9],
        whole.replace('"tokens": 1', '"tokens": "1"'), whole.replace('"tokens"', '"token"'), whole.replace('"files"', '"file"'),
    ):  # fmt: skip
        kept.write_text(entry)
        assert apart._kept(str(kept)) is None, entry[:100]
    again()
    assert kept.read_text() == whole and len(asked) == 2


def test_an_entry_that_is_no_file_and_a_cache_that_takes_none_are_gone_without(
    towers: Path, asked: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = again()
    (kept,) = towers.parent.glob("cache/dtrain/shapes/*.json")
    kept.unlink()
    os.mkfifo(kept)
    assert again() == good
    monkeypatch.setattr(store, "write", refuse)  # the disk is full
    kept.unlink(missing_ok=True)
    assert again() == good and not kept.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(towers))
    assert again() == good
    assert len(asked) == 4


def refuse(*_: Any) -> None:
    raise StoreError("no room")


def test_no_process_is_asked_for_a_run_that_is_refused(asked: list[Plan]) -> None:
    for words, message in (
        (("launcher._target_=evil.Launcher",), "evil is not trusted"),
        (("logger.mine._target_=evil.Logger",), "evil is not trusted"),
        (("trust=[]",), "towers is not trusted"),
        (("batch=-1",), "batch=-1"),
        (("data=jsonl",), "needs data.targets"),
        (("data.outputs=few",), "few"),
    ):
        with pytest.raises(WordsError, match=message):
            again(*words)
    assert not asked


def prints(folder: Path) -> None:
    os.write(1, b"a model")


def forks(folder: Path) -> None:
    if not (pid := os.fork()):
        time.sleep(600)
    (folder / "pid").write_text(str(pid))


def kills(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(folder: Path) -> None:
    raise SystemExit(3)


def hangs(folder: Path) -> None:
    forks(folder)
    time.sleep(600)


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        (prints, ""), (forks, ""), (kills, "ended with code -9"), (leaves, "ended with code 3"),
        (hangs, "takes longer than 0.6 s"),
    ],
)  # fmt: skip
def test_whatever_a_model_does_the_process_that_decides_goes_on(
    deed: Callable[[Path], None],
    reason: str,
    towers: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shapes = shapes_of(plan("model=mlp", "data=synthetic", "objective=regression"))
    monkeypatch.setattr(apart, "trace_here", lambda _: (deed(towers.parent), shapes)[1])
    if deed is hangs:
        monkeypatch.setattr(apart, "SECONDS", 0.6)
        monkeypatch.setattr(apart, "SLOW", 0.4)
    with zygote.kept():
        zygote.begin(threads=True)
        began = time.monotonic()
        decided = again()
    assert time.monotonic() - began < 60
    assert (reason or "parameters need about") in decided.why["strategy"]
    said = capfd.readouterr()
    assert "a model" not in said.out + said.err
    assert ("strategy=auto builds the model" in said.err) == (deed is hangs)
    for pid in towers.parent.glob("pid"):
        assert process.is_gone(int(pid.read_text()), 10)


def test_the_reason_holds_no_secret(towers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets.know("hunter2hunter2")
    monkeypatch.setattr(apart, "_asked", lambda plan: answers(copies={"error": "no hunter2hunter2 here"}))
    assert "hunter2" not in decided().why["strategy"]


@pytest.mark.campaign("commands")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_of_what_is_chosen_has_the_loss_of_one_rank(
    family: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(SEQUENTIAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    plain = "steps=1", "schedule.warmup=0", "logger=[]", "hook=[]", "optim.eps=1e-5"
    words = *FAMILIES[family], *plain, f"devices={devices}"
    found, losses = set[str](), list[float]()
    for more in (5, 1000):
        cluster = Cluster(gpus=0, cpus=8, memory=devices * (LIBRARIES + more << 20))
        decided = resolve(composed(*words, f"out={tmp_path}/{more}"), cluster, shapes_of)
        found.add(decided.strategy["_target_"].split(".")[2])
        losses.append(ranks(devices, train, decided)[0].loss)
    assert "ddp" in found and len(found) == 2
    alone = resolve(composed(*words, "devices=1", f"out={tmp_path}/alone"), CPUS)
    assert losses == pytest.approx([ranks(1, train, alone)[0].loss] * 2, rel=1e-5)


@pytest.mark.campaign("commands")
def test_a_run_gets_the_layout_that_a_plan_shows(towers: Path) -> None:
    traced = resolve(composed(*WORDS), CPUS, shapes_of)
    assert "parameters need about" in traced.why["strategy"]
    assert decided() == traced
    answer = json.loads(next(towers.parent.glob("cache/dtrain/shapes/*.json")).read_text())
    assert str(towers) in answer["files"]
    towers.write_text(CODE.replace("WIDTH", "256"))
    apart._known.clear()
    assert "cannot be compared: the forward fails" in decided().why["strategy"]
