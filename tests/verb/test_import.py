"""`dtrain import` as a user types it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from imported import FILES

from dtrain.__main__ import main
from dtrain.errors import WordsError

run = importlib.import_module("dtrain.verb.import").run
DS = str(FILES / "ds_zero2_offload.json")


def test_what_is_printed_is_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["import", DS]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["batch"] == 256
    assert "DeepSpeed" in printed.splitlines()[1]
    path = tmp_path / "mine.yaml"
    path.write_text(printed)
    assert main(["plan", f"recipe={path}"]) == 2, "no default takes the place of their model and data"
    assert "leaves model to you" in capsys.readouterr().err
    assert main(["plan", f"recipe={path}", "model=gpt", "data=text", "data.holdout=0.1"]) == 0
    assert "256 samples" in capsys.readouterr().out


def test_to_writes_it_and_prints_the_lists(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    to = tmp_path / "mine.yaml"
    assert main(["import", str(FILES / "torchtune_full.yaml"), f"to={to}"]) == 0
    printed = capsys.readouterr().out
    assert [line.split(" (")[0] for line in printed.splitlines() if not line.startswith(" ")][1:4] == [
        "carried over",
        "not needed here",
        "refused, and what to type instead",
    ]
    assert printed.splitlines()[-1].startswith(f"next  dtrain recipe={to} ")
    assert "out=/data/runs/llama3_1_8B" in printed.splitlines()[-1] and "'data=<" in printed.splitlines()[-1]
    assert yaml.safe_load(to.read_text())["steps"] == 1500
    assert main(["import", str(FILES / "torchtune_full.yaml"), f"to={to}"]) == 0, "the same again is no harm"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    to = tmp_path / "mine.yaml"
    to.write_text("steps: 3\n")
    with pytest.raises(WordsError, match="another file is there already"):
        run([DS, f"to={to}"])
    assert to.read_text() == "steps: 3\n"


def test_as_says_whose_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "num_workers": 2}))
    with pytest.raises(WordsError, match="Type as="):
        run([str(path)])
    assert run([str(path), "as=deepspeed"]) == 0
    assert "num_workers = 2: DeepSpeed has no such key" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "import takes one file or URL, not none. Type dtrain import ds_config.json."),
        (["a.json", "b.json"], "one file or URL, not 2"),
        ([DS, "too=x"], "Did you mean to?"),
        ([DS, "--as=deepspeed"], "Did you mean as?"),
        ([DS, "as=deepsped"], "Did you mean deepspeed?"),
        ([DS, "to="], "to= is empty"),
        ([DS, "as=ray", "as=deepspeed"], "was given before"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["import", str(tmp_path / "no.json")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    with fsspec.open("memory://imported/ds.json", "wb") as file:
        file.write(Path(DS).read_bytes())
    assert main(["import", "memory://imported/ds.json", "to=memory://imported/mine.yaml"]) == 0
    assert "next  dtrain recipe=memory://imported/mine.yaml" in capsys.readouterr().out


def test_nothing_is_started_for_it() -> None:
    """No torch and no Hydra: an import is over before they would be there."""
    code = "import sys\nfrom dtrain.__main__ import main\nmain(sys.argv[1:])\nsys.exit(bool({'torch', 'hydra', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, "import", DS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_trust_is_named_without_what_it_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tune.yaml"
    path.write_text("model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2\n")
    for words in ([str(path)], [str(path), f"to={tmp_path}/mine.yaml"]):
        assert run(words) == 0
        output = capsys.readouterr().out
        assert "trust=[torchtune]" in output and "lets any code of torchtune run with your permissions" in output


@pytest.mark.parametrize(
    "text",
    ["base_model: org/model\nadapter: lora\n", '{"per_device_train_batch_size": 8, "model_name_or_path": "org/model"}'],
)
def test_models_of_the_hub_need_no_trust(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert run([str(path), *(["as=axolotl"] if "adapter" in text else [])]) == 0
    output = capsys.readouterr().out
    assert "model.name=org/model" in output and "trust" not in output
