"""A learning rate that goes down and up."""


class Saw:
    def __init__(self, steps: int, teeth: int) -> None:
        self.length = max(1, steps // teeth)

    def factor(self, step: int) -> float:
        return 1.0 - (step % self.length) / self.length
