"""One rank, in this very process."""

import os

from dtrain.launcher import run_here
from dtrain.planned import Plan
from dtrain.result import Result


class Inline:
    def command(self, plan: Plan) -> str:
        return "this process"

    def launch(self, plan: Plan) -> Result:
        for variable in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(variable, None)
        return run_here(plan)
