"""Kernels that numpy and torch compute with on other CPUs, by the environment variables that choose them here.

How a sum is rounded depends on them. `python tests/kernels.py` prints a line for each that this CPU can run and would not choose itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2": "avx2",
    "OPENBLAS_CORETYPE=Zen ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41": "avx2",
    "OPENBLAS_CORETYPE=SkylakeX ATEN_CPU_CAPABILITY=avx512": "avx512f",
}
"""Variables -> the instructions they need. OPENBLAS_CORETYPE is for numpy's wheel, the others for torch's (ATen, MKL, oneDNN)."""
REPORT = """
import hashlib, json, numpy, threadpoolctl, torch
draw = numpy.random.default_rng(0).standard_normal
x, w = draw((33, 200)).astype("f4"), draw((200, 70)).astype("f4")
y, image, kernel = torch.from_numpy(x) @ torch.from_numpy(w), torch.from_numpy(x[:, :75].copy()).view(33, 3, 5, 5), torch.ones(8, 3, 3, 3) / 3
bits = [(x @ w).tobytes(), y.numpy().tobytes(), torch.conv2d(image, kernel).numpy().tobytes(), y.softmax(1).numpy().tobytes()]
(blas,) = {library["architecture"] for library in threadpoolctl.threadpool_info() if library["internal_api"] == "openblas"}
print(json.dumps([blas, torch.backends.cpu.get_cpu_capability(), *(hashlib.sha256(part).hexdigest() for part in bits)]))
"""


def able() -> list[str]:
    """The KERNELS whose instructions this CPU has."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return [variables for variables, needed in KERNELS.items() if needed in flags]


def report(variables: str = "") -> list[str]:
    """The names that OpenBLAS and ATen give their kernels under these variables, and digests of what numpy and torch compute with them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(pair.split("=") for pair in variables.split())}
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    return list(json.loads(done.stdout))


if __name__ == "__main__":
    own = report()
    print(*(variables for variables in able() if report(variables) != own), sep="\n")
