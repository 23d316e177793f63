"""Handwritten digits as a map-style dataset: scikit-learn's 1,797 images of 8x8 pixels (UCI optical recognition test
set).
"""

from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset

from dtrain.errors import PreflightError


class Digits(TensorDataset):
    """Images [1, 8, 8] in [0, 1], labels 0..9."""

    classes = 10
    about: ClassVar = {"inputs": [1, 8, 8], "targets": []}

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise PreflightError("the digits come with scikit-learn. Type: pip install 'dtrain[digits]'") from None
        digits = load_digits()
        super().__init__(
            torch.from_numpy(digits.images.astype(np.float32))[:, None] / 16, torch.from_numpy(digits.target)
        )
