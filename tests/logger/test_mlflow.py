"""MLflow, in a folder: read back by its own client."""

from pathlib import Path

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.mlflow import Mlflow


def test_a_database_needs_more_than_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install mlflow" in Mlflow(out=str(tmp_path), steps=1).lacks()
    assert Mlflow(out=str(tmp_path), steps=1, uri="http://localhost:5000").lacks() == ""


@pytest.mark.campaign("kills")
def test_a_killed_run_is_one_run_with_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/store"
    killed_and_ended(Mlflow, tmp_path, uri=uri, experiment="x", tags=["t"])
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "name"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "loss")] == [*STEPS]
    assert [each.step for each in client.get_metric_history(run.info.run_id, "eval_loss")] == [10]
    assert run.data.params["optim.lr"] == "0.5" and run.data.params["words.steps"] == "9"
    assert (run.data.tags["checkpoint"], run.data.tags["t"], run.data.tags["result.loss"]) == (
        f"{tmp_path}/checkpoint",
        "true",
        "0.05",
    )
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["sample.json"]
