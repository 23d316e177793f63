"""From words to a plan, for whoever trains: one run, or a job of a sweep."""

from dtrain.cluster import Cluster
from dtrain.config.facts import fact
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.errors import WordsError
from dtrain.launcher import apart
from dtrain.planned import Plan
from dtrain.resolve import resolve

OF_VERBS = {
    "verify": "verify", "expect": "verify", "predict": "predict",
    **{f"evaluate.{name}": "evaluate as=lm_eval" for name in ("tasks", "tasks_path", "tokenizer", "shots", "limit",
    "context", "batch")},
}  # fmt: skip
"""Key, or what stands before its first dot -> the verb that alone uses it."""


def decide(config: Config, cluster: Cluster) -> Plan:
    """Resolve the plan. Raises WordsError also for words that training does not use."""
    plan = resolve(config, cluster, apart.shapes_of)
    typed = [key for key, source in config.sources.items() if source == typed_at()]
    unused = {key: verb for key in typed if (verb := OF_VERBS.get(key) or OF_VERBS.get(key.split(".")[0]))}
    if unused:
        raise WordsError(
            *(
                f"{key} ({typed_at()}): only {verb} uses it. Type dtrain {verb} <the words>, or leave {key} out."
                for key, verb in unused.items()
            )
        )
    return plan


def decide_for_slot(config: Config, cluster: Cluster) -> Plan:
    """The plan of a job of a sweep, which runs where its worker does. Raises WordsError."""
    plan = decide(config, cluster)
    if fact(plan.launcher, "where") == "elsewhere":
        word = f"launcher={config.choices['launcher']}"
        raise WordsError(
            f"{word} ({config.sources.get('launcher', 'default')}): a job of a sweep runs where its worker does. Type "
            f"{word} beside -m, neither swept nor in a recipe: it starts workers."
        )
    return plan
