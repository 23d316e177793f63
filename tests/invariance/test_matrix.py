"""The README's matrix says what the tests hold, no more and no less."""

from pathlib import Path

from invariance.matrix import matrix

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def test_the_matrix_of_the_readme_is_made_of_the_tests() -> None:
    assert matrix() in README, (
        "run: PYTHONPATH=tests python tests/invariance/matrix.py, and put what it prints into the README"
    )
