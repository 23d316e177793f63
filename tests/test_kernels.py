"""The variables under which `.ci/run` repeats the tests of numbers do choose other kernels."""

import itertools

import pytest
from kernels import able, report

NAMES = {"Haswell": "Haswell", "Zen": "Haswell", "SkylakeX": "SkylakeX"}
"""What OpenBLAS was asked for -> what it calls its kernels: a Zen has those of Haswell."""


@pytest.mark.campaign("commands")
def test_variables_choose_the_kernels_and_so_the_bits() -> None:
    """Of OpenBLAS in numpy, of ATen, MKL and oneDNN in torch."""
    if len(able()) < 2:
        pytest.skip("this CPU has one kind of kernels")
    reports = {variables: report(variables) for variables in able()}
    for variables, (blas, aten, *_) in reports.items():
        asked = dict(pair.split("=") for pair in variables.split())
        assert (blas, aten) == (NAMES[asked["OPENBLAS_CORETYPE"]], asked["ATEN_CPU_CAPABILITY"].upper())
    digests = [digest[2:] for digest in reports.values()]
    for first, second in itertools.pairwise(digests):
        assert first != second
