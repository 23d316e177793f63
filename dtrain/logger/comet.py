"""Comet, by its own client. Offline, its archives are under <out>/comet until `comet upload` sends them."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker, flat
from dtrain.secrets import screen
from dtrain.storage import store

ARCHIVES = "comet"


@dataclass(kw_only=True)
class Comet(Tracker):
    project: str | None = None
    workspace: str | None = None
    mode: str = "auto"
    variables: ClassVar[Mapping[str, str]] = {"COMET_LOGGING_CONSOLE": "ERROR"}
    _client: Any = field(default=None, init=False)
    _run: Run | None = field(default=None, init=False)
    _last: int = field(default=0, init=False)

    def lacks(self) -> str:
        if self.mode == "offline" or os.environ.get("COMET_API_KEY") or Path("~/.comet.config").expanduser().exists():
            return ""
        return "it has no key. Set COMET_API_KEY, type comet login, or logger.comet.mode=offline to send later."

    def connect(self, run: Run) -> int:
        import comet_ml

        if self._client is not None:
            self._client.end()
        is_online = self.mode != "offline"
        key = hashlib.sha256(f"{run.out} {run.id}".encode()).hexdigest()[:40]
        config = comet_ml.ExperimentConfig(
            name=run.name, tags=[*run.tags], offline_directory=None if is_online else str(self._archives()),
            log_code=False, log_git_metadata=False, log_git_patch=False, log_env_details=False, parse_args=False,
            auto_output_logging=False, auto_param_logging=False, auto_metric_logging=False,
            display_summary_level=0,
        )  # fmt: skip
        self._client = comet_ml.start(
            project_name=self.project, workspace=self.workspace, experiment_key=key, online=is_online,
            mode="get_or_create", experiment_config=config,
        )  # fmt: skip
        self._client.log_parameters(run.flat)
        self._client.log_other("group", run.group)
        self._run = run
        self._last = self._there(key) if is_online else int(run.known.get("sent", 0))
        return self._last

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._client.log_metrics(dict(row.values), step=row.step)
            self._last = row.step

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        self._client.log_table(f"{name}.csv", [list(line) for line in lines], headers=["step", "text"])

    def refer(self, step: int, url: str) -> None:
        self._client.log_other("checkpoint", url)

    def finish(self, result: Mapping[str, Any]) -> str:
        self._client.log_others({f"result.{key}": value for key, value in flat(result).items()})
        self._client.end()
        self._client = None
        if self.mode != "offline":
            return ""
        assert self._run
        self._run.known["sent"] = self._last  # an archive is written at its end
        return f"type comet upload {screen.typed(str(self._archives()))}/*.zip to send it"

    def _there(self, key: str) -> int:
        """The last step of the experiment."""
        import comet_ml

        there = comet_ml.API().get_experiment_by_key(key)
        steps = there.get_metrics("step") if there else []
        return max((int(float(each["metricValue"])) for each in steps), default=0)

    def _archives(self) -> Path:
        return store.local_path(self.out) / ARCHIVES if store.is_local(self.out) else Path(ARCHIVES).absolute()
