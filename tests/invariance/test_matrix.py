"""The matrix of docs/mesh.md says what the tests hold, no more and no less."""

from pathlib import Path

from invariance.matrix import matrix

PAGE = (Path(__file__).parent.parent.parent / "docs/mesh.md").read_text()


def test_the_matrix_of_the_readme_is_made_of_the_tests() -> None:
    assert matrix() in PAGE, (
        "run: PYTHONPATH=tests python tests/invariance/matrix.py, and put what it prints into docs/mesh.md"
    )
