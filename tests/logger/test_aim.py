"""Aim, in a repository of its own: read back by its own client."""

from pathlib import Path

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.aim import Aim

pytestmark = pytest.mark.campaign("kills")


def test_a_killed_run_is_one_run_with_each_row_once(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim")
    (tmp_path / "repo").mkdir()
    killed_and_ended(Aim, tmp_path, repo=str(tmp_path / "repo"), tags=["t"])
    repo = aim.Repo.from_path(str(tmp_path / "repo"))
    (name,) = repo.list_all_runs()
    run = aim.Run(name, repo=repo, force_resume=True, capture_terminal_logs=False, system_tracking_interval=None)
    nothing = aim.storage.context.Context({})
    assert run.get_metric("loss", nothing).data.items_list()[0] == [*STEPS]
    assert run.get_metric("eval_loss", nothing).data.items_list()[0] == [10]
    assert run["config"]["optim"] == {"lr": 0.5} and run["result"]["loss"] == 0.05
    run.close()
