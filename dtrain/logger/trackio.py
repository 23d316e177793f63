"""Trackio, by its own client: a database of this user, or a Space of Hugging Face or a server that shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker, flat


@dataclass(kw_only=True)
class Trackio(Tracker):
    project: str | None = None
    space: str | None = None
    server: str | None = None
    _run: Any = field(default=None, init=False)

    def connect(self, run: Run) -> int:
        import trackio

        if self._run is not None:
            self._run.finish()
        project = self.project or "dtrain"
        run.known.setdefault("name", self._free(project, run))
        config = {**run.config, "id": run.id, "tags": [*run.tags]}
        self._run = trackio.init(
            project, run.known["name"], group=run.group or None, space_id=self.space, server_url=self.server,
            config=config, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return max(0, int(self._run._next_step) - 1)  # which it has asked its server

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({name: value for name, value in row.values.items() if name != "step"}, step=row.step)

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        import trackio

        table = trackio.Table(columns=["step", "text"], data=[list(line) for line in lines])
        self._run.log({name: table}, step=lines[-1][0])

    def finish(self, result: Mapping[str, Any]) -> str:
        if result["status"] != "killed":
            self._run.alert("result", text="\n".join(f"{key}: {value}" for key, value in flat(result).items()))
        self._run.finish()
        self._run = None
        return ""

    def _free(self, project: str, run: Run) -> str:
        """The name of the run, with its id if another run has that name: trackio tells runs apart by their names."""
        import trackio

        try:
            there = {each.name: each.config or {} for each in trackio.Api().runs(project)}
        except ValueError:  # there is no such project yet
            return run.name
        return run.name if there.get(run.name, {"id": run.id}).get("id") == run.id else f"{run.name} {run.id}"
