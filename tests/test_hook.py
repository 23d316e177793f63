"""What a hook returns: an event, and figures of its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.errors import WordsError
from dtrain.hook import figure, gives_none, numbers, plain
from dtrain.hook.sample import Sample
from dtrain.loop.metrics import Log
from dtrain.storage.jsonl import Journal
from dtrain.testing.faults import AtStep


def test_numbers_are_figures_and_the_rest_is_not() -> None:
    said = plain(
        {
            "f1": torch.tensor(0.5),
            "eval_auc": 1,
            "right": True,
            "text": "seen",
            "ghp_a0AZia6zaaU8PLlLmsQlD5Mb4XhpOYNhj0cm": 1.0,
        },
        "Mine",
    )
    assert {figure(name): value for name, value in numbers(said).items()} == {"eval_f1": 0.5, "eval_auc": 1.0}


@pytest.mark.parametrize("said", [[1], 3.0, {1: 2.0}])
def test_what_is_no_mapping_of_names_is_refused(said: Any) -> None:
    with pytest.raises(WordsError, match=r"^hook Mine returned a (list|float|dict), .* Let it return None, or a dict"):
        plain(said, "Mine")


@pytest.mark.parametrize("value", [torch.ones(2), object(), {"deep": {1, 2}}])
def test_what_no_event_can_hold_is_named(value: Any) -> None:
    with pytest.raises(
        WordsError, match=r"^hook Mine returned margins as an? (Tensor|object|dict), of which no event can be made"
    ):
        plain({"margins": value}, "Mine")


@pytest.mark.parametrize("name", ["step", "time", "event"])
def test_what_every_event_has_is_not_for_a_hook_to_say(name: str) -> None:
    with pytest.raises(WordsError, match=f"^hook Mine returned {name}, which every event has"):
        plain({name: 1}, "Mine")


def test_an_event_may_hold_a_name(tmp_path: Path) -> None:
    log = object.__new__(Log)
    log._events = Journal(str(tmp_path / "events.jsonl"))
    log.event("mine", name="head", f1=0.5)
    log._events.close()
    assert '"event": "mine", "name": "head", "f1": 0.5' in (tmp_path / "events.jsonl").read_text()


def test_a_hook_states_that_it_gives_no_figure() -> None:
    class Own:
        every = 1

        def __call__(self, info: Any) -> None: ...

    class Quiet(Own):
        about = {"figures": {}}  # noqa: RUF012

    assert (
        not gives_none(Own())
        and gives_none(Quiet())
        and gives_none(AtStep("kill", 1))
        and gives_none(Sample(1, "a", 1, 0.0))
    )
