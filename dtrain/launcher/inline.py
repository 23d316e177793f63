"""One rank, in this process."""

import os

from dtrain.cluster.allocation import OF_RANKS
from dtrain.launcher.rank import run_here
from dtrain.planned import Plan
from dtrain.result import Result


class Inline:
    def describe(self, plan: Plan) -> str:
        return "this process"

    def launch(self, plan: Plan) -> Result:
        for variable in OF_RANKS:
            os.environ.pop(variable, None)
        return run_here(plan)
