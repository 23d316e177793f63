"""One rank, in this process."""

import os

from dtrain.launcher import run_here
from dtrain.planned import Plan
from dtrain.result import Result

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip
"""Variables of an outer launcher that this process is no rank of."""


class Inline:
    def describe(self, plan: Plan) -> str:
        return "this process"

    def launch(self, plan: Plan) -> Result:
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        return run_here(plan)
