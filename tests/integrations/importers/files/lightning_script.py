import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from mine import Faces, Net

GPUS = 4
checkpoint = ModelCheckpoint(
    dirpath="checkpoints", monitor="val_loss", mode="min", save_top_k=1, every_n_train_steps=500
)


def main(args):
    trainer = L.Trainer(
        accelerator="gpu",
        devices=GPUS,
        num_nodes=2,
        strategy="ddp_find_unused_parameters_true",
        precision="bf16-mixed",
        max_steps=10_000,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="norm",
        val_check_interval=1000,
        log_every_n_steps=50,
        max_time="00:12:30:00",
        default_root_dir=args.out,
        callbacks=[checkpoint, LearningRateMonitor(), EarlyStopping(monitor="val_loss", patience=5)],
        logger=[TensorBoardLogger("logs", name="faces"), WandbLogger(project="faces")],
        sync_batchnorm=True,
    )
    trainer.fit(Net(), Faces())
