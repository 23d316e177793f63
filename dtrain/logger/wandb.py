"""Weights & Biases, by its own client. Offline, its files are under <out>/wandb until `wandb sync` sends them.

An offline run is written anew at each start, from the rows of the run, so that one folder has all of it.
"""

import netrc
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker, flat
from dtrain.secrets import screen
from dtrain.storage import store

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
HOST = "https://api.wandb.ai"
SECONDS = 60.0
"""For an answer of the server as a run begins."""


@dataclass(kw_only=True)
class Wandb(Tracker):
    """`artifacts`: of which checkpoints it gets the URL, as an artifact with a reference."""

    project: str | None = None
    entity: str | None = None
    mode: str = "auto"
    artifacts: str = "none"
    variables: ClassVar[Mapping[str, str]] = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    _client: Any = field(default=None, init=False)
    _committed: dict[int, str] = field(default_factory=dict, init=False)

    @property
    def _mode(self) -> str:
        return os.environ.get("WANDB_MODE", "online") if self.mode == "auto" else self.mode

    def lacks(self) -> str:
        if self._mode != "online" or any(os.environ.get(name) for name in KEYS) or self._is_logged_in():
            return ""
        return "it has no key. Set WANDB_API_KEY, type wandb login, or logger.wandb.mode=offline to send later."

    def connect(self, run: Run) -> int:
        import wandb

        if self._client is not None:
            self._client.finish(exit_code=1)
        is_offline = self._mode == "offline"
        if is_offline:
            for folder in self._written(run.id):
                shutil.rmtree(folder)
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, save_code=False, disable_job_creation=True,
            symlink=False, init_timeout=SECONDS, x_stats_pid=os.getppid(),
        )  # fmt: skip
        self._client = wandb.init(
            id=run.id, resume=None if is_offline else "allow", project=self.project, entity=self.entity,
            mode=self._mode, dir=self._folder(), name=run.name, group=run.group or None, tags=[*run.tags] or None,
            config=run.config, settings=settings,
        )  # fmt: skip
        return max(0, int(self._client.starting_step) - 1)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._client.log(dict(row.values), step=row.step, commit=True)

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        import wandb

        table = wandb.Table(columns=["step", "text"], data=[list(line) for line in lines])
        self._client.log({name: table}, commit=False)  # it goes with the next row

    def refer(self, step: int, url: str) -> None:
        self._committed[step] = url
        if self.artifacts == "all":
            self._refer(step)

    def finish(self, result: Mapping[str, Any]) -> str:
        best = [each["step"] for each in (result.get("best") or {}).values()] or [max(self._committed, default=0)]
        if self.artifacts == "best":
            for step in best:
                self._refer(step)
        self._client.summary.update({f"result.{key}": value for key, value in flat(result).items()})
        folder, is_offline = Path(self._client.dir).parent, self._client.offline
        self._client.finish(exit_code=int(result["status"] in ("failed", "killed")))
        self._client = None
        return f"type wandb sync {screen.typed(str(folder))} to send it" if is_offline else ""

    def _is_logged_in(self) -> bool:
        """Whether netrc has a key of the server."""
        host = urlsplit(os.environ.get("WANDB_BASE_URL", HOST)).hostname or ""
        try:
            return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            return False

    def _refer(self, step: int) -> None:
        import wandb

        url = self._committed.get(step, "")
        if not url or (store.is_local(url) and not store.exists(url)):  # newer ones have taken its place
            return
        artifact = wandb.Artifact(f"{self._client.id}-checkpoint", type="model", metadata={"step": step})
        artifact.add_reference(
            Path(url).absolute().as_uri() if store.is_local(url) else url, name="checkpoint", checksum=False
        )
        self._client.log_artifact(artifact, aliases=[f"step-{step}"])

    def _folder(self) -> str | None:
        """The folder for its files; None: where the client has them."""
        return str(store.local_path(self.out)) if store.is_local(self.out) else None

    def _written(self, run: str) -> list[Path]:
        """Offline folders of this run that have not been sent."""
        place = Path(self._folder() or os.environ.get("WANDB_DIR") or ".")
        return [each for each in place.glob(f"*wandb/offline-run-*-{run}") if not [*each.glob("*.synced")]]
