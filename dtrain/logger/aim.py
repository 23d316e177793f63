"""Aim, by its own client: a repository, as a folder or at the address of a server (`aim://host:53800`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker, flat, nested


@dataclass(kw_only=True)
class Aim(Tracker):
    repo: str | None = None
    experiment: str | None = None
    _run: Any = field(default=None, init=False)

    def connect(self, run: Run) -> int:
        import aim
        from aim.storage.context import Context

        if self._run is not None:
            self._run.close()
        known = run.known.get("hash")  # which aim chooses
        if not (self.repo or "").startswith("aim://"):
            aim.Repo.from_path(self.repo or ".", init=True)
        self._run = aim.Run(
            known, repo=self.repo, experiment=self.experiment, force_resume=known is not None,
            system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False,
        )  # fmt: skip
        self._run["dtrain"] = run.id
        run.known["hash"] = self._run.hash
        self._run.name = run.name
        self._run["config"], self._run["group"] = run.config, run.group
        for tag in run.tags:
            self._run.add_tag(tag)
        steps = self._run.get_metric("step", Context({}))
        return int(steps.last_step()) if steps else 0

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            # the step at last, as it says that the row is whole; what is sent again takes the place of what is there
            for name, value in sorted(row.values.items(), key=lambda item: item[0] == "step"):
                self._run.track(value, name=name, step=row.step)

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        import aim

        for step, text in lines:
            self._run.track(aim.Text(text), name=name, step=step)

    def refer(self, step: int, url: str) -> None:
        self._run["checkpoint"] = {"step": step, "url": url}

    def finish(self, result: Mapping[str, Any]) -> str:
        self._run["result"] = nested(flat(result))
        self._run.close()
        self._run = None
        return ""
