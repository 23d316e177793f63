"""dtrain's own ranks, with a note of what was started."""

from pathlib import Path
from typing import ClassVar

from dtrain.launcher.local import Local
from dtrain.planned import Plan
from dtrain.result import Result


class Noted:
    about: ClassVar = {"where": "here"}

    def describe(self, plan: Plan) -> str:
        return f"noted, {plan.world} ranks"

    def launch(self, plan: Plan) -> Result:
        Path(plan.out).mkdir(parents=True, exist_ok=True)
        (Path(plan.out) / "noted").write_text(self.describe(plan))
        return Local(restarts=0, silence=15.0, wait=60.0, address=None, here=None).launch(plan)
