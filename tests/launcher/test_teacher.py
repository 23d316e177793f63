"""What is told of a teacher before any rank starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small
import yaml
from safetensors.torch import save_file
from taught import STUDENT, teach
from tokenizers import Tokenizer, models

from dtrain.config.trust import refusal
from dtrain.errors import StoreError, WordsError
from dtrain.launcher.run import finished
from dtrain.launcher.teacher import problems, vocabulary


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("teacher") / "run")


def told(place: Path | str, *words: str) -> list[str]:
    return list(problems(small.plan(*STUDENT, f"objective.teacher={place}", *words)))


def huggingface(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    save_file({"a": small.torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def vocabulary_file(path: Path, *names: str) -> Path:
    Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0])).save(str(path))
    return path


def test_a_run_and_a_folder_of_the_same_vocabulary_are_taken(teacher: Path, tmp_path: Path) -> None:
    assert told(teacher, "model.vocab=13") == []
    assert told(f"{teacher}/checkpoints/step-00000003", "model.vocab=13") == []
    assert told(huggingface(tmp_path / "llama", vocab_size=13), "model.vocab=13") == []
    assert told(huggingface(tmp_path / "vlm", text_config={"vocab_size": 13}), "model.vocab=13") == []


def test_a_teacher_that_is_not_there(tmp_path: Path) -> None:
    huggingface(tmp_path / "teacher-7b")
    (text,) = told(tmp_path / "teacher-7")
    assert text.startswith(f"objective.teacher={tmp_path}/teacher-7: ") and "nothing is there" in text
    assert text.endswith(f"Did you mean {tmp_path}/teacher-7b?")


def test_a_name_of_the_hub_that_is_a_folder_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface(tmp_path / "large")
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("dtrain.weights.owner.is_ours", lost)
    (text,) = told(f"{tmp_path.name}/larg")
    assert "no folder is there, and the hub is far" in text and text.endswith(f"Did you mean {tmp_path.name}/large?")


def lost(url: str) -> bool:
    raise StoreError("the hub is far")


def test_weights_without_a_description(teacher: Path, tmp_path: Path) -> None:
    folder = huggingface(tmp_path / "bare")
    (folder / "config.json").unlink()
    (text,) = told(folder)
    assert "no config.json beside the weights says what model they are of. Type a run of dtrain" in text
    copy = Path(shutil.copytree(teacher, tmp_path / "copy"))
    (copy / "plan.yaml").write_text("{a: [")
    assert "it is damaged" in told(copy)[0]
    (copy / "plan.yaml").write_text("steps: 3")
    assert "it names no model" in told(copy)[0]
    (copy / "plan.yaml").unlink()
    assert "it does not exist" in told(copy)[0]
    shutil.rmtree(copy / "checkpoints/step-00000003")
    assert told(copy) != []


def test_another_vocabulary(teacher: Path, tmp_path: Path) -> None:
    (text,) = told(teacher, "model.vocab=16")
    assert f"objective.teacher={teacher}: its vocabulary has 13 tokens, that of the model 16. Name a teacher" in text
    assert told(teacher, "data.outputs=16") == [text] and told(teacher) == []
    student = huggingface(tmp_path / "student", vocab_size=13)
    words = ("model=hf", f"model.name={student}", *[word for word in STUDENT if not word.startswith("model.")])
    place = huggingface(tmp_path / "llama", vocab_size=14)
    plan = small.plan(*words, f"objective.teacher={place}")
    assert vocabulary(plan) == 13 and "has 14 tokens, that of the model 13" in next(iter(problems(plan)))
    changed = small.plan(*words, f"objective.teacher={place}", "model.config={vocab_size: 14}")
    assert list(problems(changed)) == []


def test_the_tokens_of_another_tokenizer(tmp_path: Path) -> None:
    mine = vocabulary_file(tmp_path / "tokenizer.json", "<unk>", "a", "b")
    place = huggingface(tmp_path / "llama", vocab_size=3)
    text = [word for word in STUDENT if not word.startswith(("data", "trust"))]
    words = (*text, "data=text", "data.path=stdlib", f"data.tokenizer={mine}", f"objective.teacher={place}")
    assert list(problems(small.plan(*words))) == []
    vocabulary_file(place / "tokenizer.json", "<unk>", "b", "a")
    (said,) = problems(small.plan(*words))
    assert said.endswith(
        f"its tokenizer is another: token 1 is 'b' there, 'a' here. Type data.tokenizer={place}/tokenizer.json."
    )
    (same,) = problems(small.plan(*words, f"data.tokenizer={tmp_path}", "data=chat", "data.path=a.jsonl"))
    assert same == said
    vocabulary_file(place / "tokenizer.json", "<unk>", "a", "b")
    assert list(problems(small.plan(*words))) == []


def test_a_run_goes_on_with_its_teacher_wherever_that_is_now(tmp_path: Path) -> None:
    begun, moved, other = (
        small.plan(*STUDENT, f"out={tmp_path}", f"objective.teacher={place}")
        for place in ("a/large", "b/large", "a/it")
    )
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "plan.yaml").write_text(begun.document())
    assert finished(begun) is None and finished(moved) is None
    with pytest.raises(
        WordsError, match=r"holds a run with another objective\. objective\.teacher is a/large there, a/it here\."
    ):
        finished(other)


def test_a_run_goes_on_with_model_and_tokenizer_wherever_they_are_now(tmp_path: Path) -> None:
    def placed(folder: str, tokenizer: str = "tok") -> Any:
        words = ("model=hf", f"model.name={folder}/llama", f"data.tokenizer={folder}/{tokenizer}")
        return small.plan("data=chat", "data.path=a.jsonl", f"out={tmp_path}", *words)

    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "plan.yaml").write_text(placed("s3://a").document())
    assert finished(placed("s3://a/b")) is None
    with pytest.raises(WordsError, match=r"another data\. data\.tokenizer is s3://a/tok there, s3://b/else here\."):
        finished(placed("s3://b", "else"))


def test_code_that_is_not_trusted_and_an_adapter(teacher: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(teacher, tmp_path / "copy"))
    plan = yaml.safe_load((copy / "plan.yaml").read_text())
    plan["model"] = {"_target_": "theirs.Net", "inner": {"_target_": "os.system"}}
    (copy / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert [text.split(": ", 1)[1] for text in told(copy)] == [
        refusal("model._target_", "theirs.Net"), refusal("model._target_", "os.system"),
    ]  # fmt: skip
    plan["model"] = {"_target_": "dtrain.build.given", "of": "model"}
    (copy / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert "its model was an object passed to dtrain.run" in told(copy)[0]
    place = next((copy / "checkpoints").glob("*/*/COMMIT.json"))
    commit = json.loads(place.read_text())
    commit["facts"]["adapter"] = {"kind": "lora"}
    place.write_text(json.dumps(commit))
    assert "it holds an adapter (lora), not a model. Export it first: dtrain checkpoint export" in told(copy)[0]
