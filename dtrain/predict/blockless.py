"""Says which words change nothing for a model without blocks, the units of remat and compile."""

from dtrain.config.facts import fact
from dtrain.planned import Plan


def notes(plan: Plan, *, blocks: bool) -> list[str]:
    """A sentence for each such word, if the model has no `blocks`."""
    parts = {"remat": plan.remat, "compile": plan.compile}
    idle = [name for name, part in parts.items() if not blocks and fact(part, "keeps", "all") != "all"]
    return [
        f"{name} changes nothing: the model has no blocks. Put its layers into an nn.ModuleList or an nn.Sequential."
        for name in idle
    ]
