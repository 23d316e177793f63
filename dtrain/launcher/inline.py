"""One rank, in this very process."""

import os
import traceback

from dtrain.errors import DtrainError, RankError
from dtrain.launcher import run_rank
from dtrain.plan import Plan
from dtrain.result import Result


class Inline:
    def command(self, plan: Plan) -> str:
        return "this process"

    def launch(self, plan: Plan) -> Result:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(variable, None)
        try:
            return run_rank(plan)
        except (DtrainError, KeyboardInterrupt):
            raise
        except BaseException as error:  # torch has exceptions that are no Exception
            raise RankError(f"rank 0 failed\n{traceback.format_exc()}") from error
