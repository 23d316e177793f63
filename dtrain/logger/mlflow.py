"""MLflow, by its own client: a server, or a folder or database without one (`logger.mlflow.uri=sqlite:///runs.db`)."""

import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker, flat

MOST_METRICS, MOST_PARAMS = 1000, 100
"""In one call."""
LONGEST_PARAM, LONGEST_TAG = 6000, 5000
IDENTITY = "dtrain.id"
STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}
"""Status of a run -> MLflow's, FAILED for the others."""
DATABASES = ("sqlite:", "mysql", "postgresql", "mssql")
TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow knows tables."""


@dataclass(kw_only=True)
class Mlflow(Tracker):
    uri: str | None = None
    experiment: str | None = None
    variables: ClassVar[Mapping[str, str]] = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }  # fmt: skip
    _client: Any = field(default=None, init=False)
    _id: str = field(default="", init=False)

    def lacks(self) -> str:
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        if not uri.startswith(DATABASES) or importlib.util.find_spec("sqlalchemy"):
            return ""
        return (
            "a database on this host needs all of MLflow. Type: pip install mlflow, or "
            "logger.mlflow.uri=http://<host>:<port> for a server."
        )

    def connect(self, run: Run) -> int:
        from mlflow import MlflowClient

        self._client = MlflowClient(self.uri)
        self._id = run.known.get("run_id") or self._found(run) or self._created(run)
        run.known["run_id"] = self._id
        there = self._client.get_run(self._id)
        self._client.update_run(self._id, status="RUNNING")
        self._describe(run, there.data.params)
        return int(there.data.metrics.get("step", 0))

    def send(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now, metrics = int(time.time() * 1000), list[Any]()
        for row in rows:
            if len(metrics) + len(row.values) > MOST_METRICS:
                self._client.log_batch(self._id, metrics=metrics)
                metrics = []
            # the step at last: what stores one number after the other has then all of that row
            ordered = sorted(row.values.items(), key=lambda item: item[0] == "step")
            metrics += [Metric(name, float(value), now, row.step) for name, value in ordered]
        self._client.log_batch(self._id, metrics=metrics)

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        file = f"{name}.json"
        self._client.log_dict(self._id, {"columns": ["step", "text"], "data": [list(line) for line in lines]}, file)
        self._client.set_tag(self._id, TABLES, json.dumps([{"path": file, "type": "table"}]))

    def refer(self, step: int, url: str) -> None:
        self._client.set_tag(self._id, "checkpoint", url)

    def finish(self, result: Mapping[str, Any]) -> str:
        for key, value in flat(result).items():
            self._client.set_tag(self._id, f"result.{key}", str(value)[:LONGEST_TAG])
        self._client.set_terminated(self._id, STATUS.get(result["status"], "FAILED"))
        return ""

    def _experiment(self) -> str:
        if identity := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identity
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dtrain"
        there = self._client.get_experiment_by_name(name)
        if there is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # another job of a sweep was first
                there = self._client.get_experiment_by_name(name)
                if there is None:
                    raise
        return str(there.experiment_id)

    def _found(self, run: Run) -> str:
        """The id of a run that was created before a kill; empty."""
        found = self._client.search_runs([self._experiment()], f"tags.`{IDENTITY}` = '{run.id}'")
        return str(found[0].info.run_id) if found else ""

    def _created(self, run: Run) -> str:
        tags = {IDENTITY: run.id, **dict.fromkeys(run.tags, "true")}
        made = self._client.create_run(
            self._experiment(), run_name=run.name, tags=tags | ({"group": run.group} if run.group else {})
        )
        return str(made.info.run_id)

    def _describe(self, run: Run, there: Mapping[str, str]) -> None:
        """Log the settings that are not there."""
        from mlflow.entities import Param

        new = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.flat.items() if key not in there]
        for first in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + MOST_PARAMS])
