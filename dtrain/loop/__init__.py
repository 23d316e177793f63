"""The parts of the training loop that `train.py` calls."""
