"""The README's capability matrix, made of the tables that the tests run. `python tests/invariance/matrix.py` prints it."""

from invariance.layouts import AXES, FAST, PRECISIONS, REFUSED, SLOW, STRATEGIES, combinations

HEAD = {
    "data": "data axes", "tp": "`mesh.tp`", "pp": "`mesh.pp`", "cp": "`mesh.cp`, ring", "ulysses": "`mesh.cp`, ulysses", "ep": "`mesh.ep`",
}  # fmt: skip


def matrix() -> str:
    """A row for each strategy, a column for each axis: the precisions in which it was held against one process, or why it is refused."""
    proven: dict[tuple[str, str], list[str]] = {}
    for case in combinations():
        proven.setdefault((case.strategy, case.axis), []).append(case.precision)
    lines = [f"| strategy | {' | '.join(HEAD[axis] for axis in AXES)} |", "|---|" + "---|" * len(AXES)]
    lines += [
        f"| `{strategy}` | {' | '.join(_cell(strategy, axis, proven) for axis in AXES)} |"
        for strategy in ("single", *STRATEGIES)
    ]
    layouts = sum(len(listed) for table in (FAST, SLOW) for listed in table.values())
    lines += [
        "",
        f"CPU: proven on gloo, in {', '.join(PRECISIONS)}. Beside these, {layouts} layouts of up to three axes over {len(FAST)} models in fp32.",
    ]
    return "\n".join(lines)


def _cell(strategy: str, axis: str, proven: dict[tuple[str, str], list[str]]) -> str:
    if (strategy, axis) in REFUSED:
        return f"refused: {REFUSED[strategy, axis][1]}"
    found = proven[strategy, axis]
    return "CPU" if tuple(found) == PRECISIONS else f"CPU: {', '.join(found)}"


if __name__ == "__main__":
    print(matrix())
