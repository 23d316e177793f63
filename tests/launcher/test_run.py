"""What a run leaves where another one has taken its place."""

from pathlib import Path

import pytest

from dtrain.errors import LeaseError
from dtrain.launcher import run
from dtrain.storage import lease


def test_a_run_that_lost_its_lease_leaves_no_failure(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with lease.hold(out) as token:
        lease._write(out, token + 1, {**lease._record(), "id": "another run"})
        with pytest.raises(LeaseError, match="taken over by another run"):
            run._leave(out, {"error": "of the run before"})
    assert not (tmp_path / "run" / "failure.json").exists()
