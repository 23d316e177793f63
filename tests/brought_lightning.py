"""A LightningModule as people write it, on a stand-in for Lightning's class, and its data."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class LightningModule(nn.Module):
    """What the real one has without a Trainer."""

    automatic_optimization = True
    current_epoch = 0

    def log(self, *_: object, **__: object) -> None:
        raise AssertionError("without a Trainer it only warns")

    def on_train_epoch_end(self) -> None: ...


LightningModule.__module__ = "lightning.pytorch.core.module"


class Lit(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = 2 * cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self(x), y))
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Hooked(Lit):
    def on_train_epoch_end(self) -> None:
        raise AssertionError("nothing calls it")


class Late(Lit):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Faces:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()
