"""Any map-style dataset becomes addressable, with augmentation that can be repeated."""

import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dtrain.data.dataset import Dataset
from dtrain.data.stream import as_source
from dtrain.errors import WordsError


class Squares:
    """(i, i squared), by index."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < 20:
            raise IndexError(index)
        return np.float64(index), index * index


class Named(Squares):
    classes = ("a", "b", "c")

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((2, 3), float(index)), "label": index % 3}


class Noisy(Squares):
    """An augmentation from all three generators people use."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()]), index


def take(source: Dataset, index: list[int], epoch: int = 0) -> dict[str, Tensor]:
    return source.take(np.array(index), np.full(len(index), epoch))


def all_inputs(source: Dataset) -> list[float]:
    return take(source, list(range(len(source))))["inputs"].tolist()


def test_training_and_held_out_samples_share_the_dataset_out() -> None:
    source = Dataset(Squares(), holdout=0.25)
    heldout = source.holdout()
    assert heldout is not None
    assert (len(source), len(heldout)) == (15, 5)
    assert sorted(all_inputs(source) + all_inputs(heldout)) == list(range(20))
    assert all_inputs(heldout) != list(range(15, 20)), (
        "datasets tend to be sorted by class, so the end is not held out as it is"
    )
    assert Dataset(Squares(), holdout=0).holdout() is None


def test_inputs_stay_with_their_targets() -> None:
    batch = take(Dataset(Squares()), list(range(18)))
    assert torch.equal(batch["inputs"] ** 2, batch["targets"].float())
    assert batch["inputs"].dtype == torch.float32, "64-bit floats become 32-bit ones"


def test_a_dataset_of_its_own_can_be_held_out() -> None:
    source = Dataset(Squares(), holdout_dataset=Squares())
    assert (len(source), len(source.holdout() or [])) == (20, 20)


def test_mappings_are_read_by_the_names_of_their_keys() -> None:
    source = Dataset(Named(), inputs="image", targets="label")
    batch = take(source, [0, 1, 2])
    assert batch["inputs"].shape == (3, 2, 3)
    assert torch.equal(batch["inputs"][:, 0, 0] % 3, batch["targets"].float())
    assert source.facts == {
        "inputs": [2, 3],
        "kind": "float32",
        "outputs": 3,
        "vocab": 3,
        "class_names": ["a", "b", "c"],
    }


def test_several_inputs_reach_the_model_by_name() -> None:
    batch = take(Dataset(Named(), inputs=["image", "label"], targets="label"), [2, 0])
    assert batch["inputs"].keys() == {"image", "label"}
    assert torch.equal(batch["inputs"]["label"], batch["targets"])


def test_a_key_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(WordsError, match=r"data\.dataset: sample \d+ has image, label\. Type data\.inputs=<"):
        take(Dataset(Named()), [0])
    with pytest.raises(WordsError, match=r"data\.dataset: sample \d+ has 2 parts"):
        take(Dataset(Squares(), inputs=5), [0])
    with pytest.raises(WordsError, match=r"data\.dataset: sample \d+ has image, label. data.inputs=\[image,mask\] and"):
        take(Dataset(Named(), inputs=["image", "mask"], targets="label"), [0])


@pytest.mark.parametrize(
    "sample", [torch.ones(4), np.ones(4), [5, 7, 9], "some text", 3, None], ids=lambda sample: type(sample).__name__
)
def test_a_sample_of_one_part_is_not_cut_into_input_and_target(sample: Any) -> None:
    kind = "None" if sample is None else f"one {type(sample).__name__}"
    with pytest.raises(WordsError, match=rf"data\.dataset: sample \d+ is {kind}, without a target\. Return \(input"):
        take(Dataset([sample] * 4), [0])


def test_a_row_of_which_two_entries_are_named_has_parts() -> None:
    assert take(Dataset([[5, 7, 9]] * 4, inputs=0, targets=2), [0])["targets"].tolist() == [9]


def test_what_is_not_map_style_is_refused() -> None:
    with pytest.raises(WordsError, match=r"generator is not map-style.*give its items an index.*data=stream"):
        Dataset(x for x in range(3))
    with pytest.raises(WordsError, match=r"DataLoader is not map-style.*Give the dataset it reads from"):
        Dataset(DataLoader(Squares()))


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(WordsError, match="list has no samples"):
        Dataset([])
    with pytest.raises(WordsError, match=r"data\.workers=-1"):
        Dataset(Squares(), workers=-1)
    with pytest.raises(WordsError, match="Return several parts as a mapping"):
        take(Dataset([((torch.ones(2), torch.ones(2)), 1)] * 3), [0])


class OwnGenerator(Squares):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.generator.random(3), index


def test_samples_that_cannot_be_repeated_are_still_the_same_data() -> None:
    source = OwnGenerator()
    assert Dataset(source).fingerprint == Dataset(source).fingerprint


def test_augmentation_depends_on_sample_and_epoch_alone() -> None:
    source = Dataset(Noisy(), holdout=0)
    first = take(source, [4, 9])["inputs"]
    random.random(), np.random.random(), torch.rand(3)
    assert torch.equal(take(source, [9, 4])["inputs"].flip(0), first)
    assert not torch.equal(take(source, [4, 9], epoch=1)["inputs"], first)
    assert (first[0] != first[1]).all()


def test_tensors_are_read_as_a_whole_batch() -> None:
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 4
    source = Dataset(TensorDataset(x, y), holdout=0)
    batch = take(source, list(range(20)))
    assert sorted(batch["inputs"][:, 0].tolist()) == x[:, 0].tolist()
    assert torch.equal(batch["targets"], (batch["inputs"][:, 0] / 2).long() % 4)
    assert source.facts == {"inputs": [2], "kind": "float32", "outputs": 4, "vocab": 4}
    assert source.loading == "block"


def test_float_targets_say_how_many_outputs_there_are() -> None:
    assert Dataset(TensorDataset(torch.ones(9, 2), torch.ones(9, 3))).facts["outputs"] == 3
    assert "outputs" not in Dataset(Squares()).facts, "counting the classes would mean reading everything"
    assert Dataset(Squares(), outputs=7).facts["outputs"] == 7


def test_other_data_has_another_fingerprint() -> None:
    x = torch.arange(20.0)[:, None]
    fingerprints = [
        Dataset(dataset).fingerprint for dataset in (Squares(), Noisy(), TensorDataset(x, x), TensorDataset(x + 1, x))
    ]
    assert len(set(fingerprints)) == 4
    assert Dataset(Noisy()).fingerprint == fingerprints[1]


def test_a_bare_dataset_is_wrapped_and_a_source_is_not() -> None:
    source = Dataset(Squares())
    assert as_source(source) is source
    assert len(as_source(Squares())) == 18


class Several(torch.utils.data.Dataset[Any]):
    """Only batches of samples."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.ones(2), index) for index in indices]


def test_a_dataset_of_batches_alone_is_refused_with_what_to_add() -> None:
    with pytest.raises(WordsError, match=r"Several is not map-style.*def __getitem__"):
        Dataset(Several())


class Overstated:
    """Says that it has one sample more than it has."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[float, float]:
        return [(float(place), 0.0) for place in range(8)][index]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_not_there_is_named_with_the_length(workers: int) -> None:
    source = Dataset(Overstated(), holdout=0, workers=workers)
    with pytest.raises(
        IndexError,
        match=r"Overstated has no sample 8, but its __len__ is 9, so it must have samples 0 to 8 \(list index out of range\)",
    ):
        source.take(np.arange(9), np.zeros(9, dtype=np.int64))


def test_a_length_that_the_class_states_is_the_one_there_is() -> None:
    class Faces(list[tuple[float, float]]):
        about: ClassVar = {"samples": 8}

    whole, other = Faces([(1.0, 1.0)] * 8), Faces([(1.0, 1.0)] * 5)
    assert len(Dataset(whole, holdout=0.25)) == 6 and len(Dataset(whole, holdout_dataset=other).holdout() or ()) == 5
    with pytest.raises(WordsError, match="Faces states samples = 8 in its about, but its __len__ is 5"):
        Dataset(other)


class Unlisted(Squares):
    def __len__(self) -> int:
        raise OSError("no index file")


class Worded(Squares):
    def __len__(self) -> int:
        return "20"  # type: ignore[return-value]


@pytest.mark.parametrize(("dataset", "why"), [(Unlisted(), "OSError: no index file"), (Worded(), "TypeError: 'str'")])
def test_a_length_that_cannot_be_had_is_refused(dataset: Any, why: str) -> None:
    with pytest.raises(WordsError, match=rf"__len__ of {type(dataset).__name__} fails \({why}.*an integer >= 1"):
        Dataset(dataset)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_draws_by_sample_and_pass_alone(workers: int) -> None:
    from data.rows import Rows, masked

    given: dict[str, Any] = {"inputs": "input_ids", "targets": "labels", "pad": 0, "length": 8, "holdout": 0.25}
    source = Dataset(Rows(), transform=masked, workers=workers, **given)
    plain = Dataset(Rows(), **given)
    index = np.arange(len(source))
    first, again, later = (source.take(index, index * 0 + epoch)["inputs"] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    alone = torch.cat([source.take(index[n : n + 1], np.zeros(1, int))["inputs"] for n in (5, 2)])
    assert torch.equal(alone, first[[5, 2]])
    before = plain.take(index, index * 0)["inputs"]
    assert bool(((first == before) | (first == 12)).all()) and not torch.equal(first, before)
    held, plain_held = source.holdout(), plain.holdout()
    assert held is not None and plain_held is not None
    place = np.arange(len(held))
    assert torch.equal(held.take(place, place * 0)["inputs"], plain_held.take(place, place * 0)["inputs"])


def _fails(sample: Any, generator: Any) -> Any:
    if sample[1] == 2:
        raise ValueError("no twos")
    return sample


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (lambda sample: sample, r"data.transform: .*lambda>\(sample\) cannot be called with \(sample, generator\)"),
        (_fails, r"data.transform fails for sample 2, epoch 0 \(ValueError: no twos, in .*test_dataset.py:\d+\)"),
        (lambda sample, generator: None, "data.transform: what it returns for sample 2 is None, without a target"),
        (
            lambda sample, generator: (sample[0], "a"),
            "data.transform: what it returns for sample 2: the target is text",
        ),
        (lambda sample, generator: (sample[0][: int(sample[1])], 1), "data.transform: samples have the shapes"),
    ],
)
def test_a_transform_that_fails_is_named_with_its_sample(transform: Any, sentence: str) -> None:
    samples = [(torch.ones(4), number) for number in range(4)]
    with pytest.raises(WordsError, match=sentence):
        Dataset(samples, transform=transform, holdout=0).take(np.arange(4), np.zeros(4, int))


def test_a_transform_that_is_no_function_is_refused() -> None:
    with pytest.raises(WordsError, match=r"data.transform: an int cannot be called with \(sample, generator\)"):
        Dataset(TensorDataset(torch.ones(4, 2), torch.ones(4)), transform=3)  # type: ignore[arg-type]


def test_a_third_part_of_a_sample_is_not_left_out_in_silence() -> None:
    rows = TensorDataset(torch.randn(8, 3), torch.ones(8, 3), torch.randn(8, 1))
    with pytest.raises(WordsError, match=r"a sample of TensorDataset has 3 parts.*data\.inputs=0 data\.targets=1"):
        _ = Dataset(rows).facts
    assert Dataset(rows, inputs=0, targets=2).facts["outputs"] == 1
    assert Dataset(rows, transform=lambda sample, generator: (sample[0], sample[2])).facts["outputs"] == 1
