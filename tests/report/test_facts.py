"""Texts of files that are not trusted, as a page shows them."""

from pathlib import Path

import pytest
from reported import job

from dtrain import secrets
from dtrain.report import facts, runs
from dtrain.report.of_run import seconds


def test_secrets_and_control_characters_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2-9")
    secrets._scan[0] = 0.0
    assert facts.shown("token hunter2-hunter2-9 of \x1b[31m\nb\u202e") == "token *** of \\x1b[31m\\nb\\u202e"
    assert facts.shown_value("logger.w.api_key", "0123456789abcdef") == "***"
    assert facts.shown_value("x", "${secret:logger.w.api_key}") == "***"
    assert len(facts.shown("x" * 100_000)) == facts.LONGEST
    assert facts.stack("a\n\x1b[0m\tb") == "a\n\\x1b[0m\tb"
    assert len(facts.stack("x" * 100_000)) <= facts.LONGEST_STACK + 3


def test_causes_that_differ_in_numbers_are_alike() -> None:
    one = "step 25: the gradient norm is inf (loss 1.767e+29, gradient norm inf; samples 1, 2). The state is saved."
    other = "step 7: the gradient norm is inf (loss 4.4e+26, gradient norm inf; samples 3, 9). The state is saved."
    assert facts.alike(one) == facts.alike(other) != facts.alike("ValueError: planned")
    assert facts.alike("CUDA out of memory. Tried 2 GiB") == facts.alike("CUDA out of memory. Tried 3 GiB")


def test_a_plan_that_would_grow_when_it_is_read_is_left_out(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
    ]
    (tmp_path / "plan.yaml").write_text("\n".join(levels))
    assert facts.plan(str(tmp_path)) == []
    (tmp_path / "plan.yaml").write_text("a: {b: 1, c: null, _about_: x, api_key: abcdefgh12345678}\n1: 2\n")
    assert ("a.b", "1") in facts.plan(str(tmp_path)) and ("a.api_key", "***") in facts.plan(str(tmp_path))
    (tmp_path / "plan.yaml").write_text("\x00{")
    assert facts.plan(str(tmp_path)) == []


def test_a_failure_has_its_cause_from_the_best_source_there_is(tmp_path: Path) -> None:
    def cause(name: str, **more: object) -> tuple[str, str]:
        place = job(tmp_path / name, "1", **more)  # type: ignore[arg-type]
        return facts.cause(runs.below(str(place))[0], facts.events(str(place)))

    assert cause("finished") == ("", "")
    written = {"failure.json": '{"error": "ValueError: planned", "traceback": "a\\nb"}'}
    assert cause("raised", status="failed", files=written) == ("ValueError: planned", "a\nb")
    assert cause("died", status="", files=written)[0] == "ValueError: planned"
    for damaged in ("[", '{"error": 1, "traceback": []}', '"x"'):
        assert cause(f"damaged{len(damaged)}", status="failed", files={"failure.json": damaged}) == (
            "its process ended without a word",
            "",
        )
    assert cause("alone", status="")[0] == "its process ended without a word"


def test_the_time_of_a_run_leaves_out_what_lies_between_its_starts() -> None:
    def at(time: float, event: str, **more: float) -> dict[str, object]:
        return {"time": time, "event": event, **more}

    first = [at(101, "built"), at(102, "started"), at(110, "committed")]
    second = [at(501, "built"), at(502, "started"), at(505, "evaluated")]
    asked = at(111, "interrupted", wall_seconds=11.5)
    assert seconds([]) is None
    assert seconds([*first, asked]) == 11.5
    assert seconds([*first, asked, *second]) == 11.5 + 4, "it runs"
    assert seconds([*first, asked, *second, at(506, "finished", wall_seconds=17.0)]) == 17
    assert seconds([*first, *second]) == 9 + 4, "the first start was killed"
