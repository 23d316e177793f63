from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

trainer = Trainer(
    max_epochs=3,
    devices=-1,
    strategy=FSDPStrategy(
        sharding_strategy="SHARD_GRAD_OP",
        cpu_offload=True,
        activation_checkpointing_policy={nn.TransformerEncoderLayer},
        state_dict_type="sharded",
    ),
    precision=16,
    max_time={"hours": 3, "minutes": 30},
    val_check_interval=0.25,
    limit_val_batches=0.5,
    fast_dev_run=False,
    deterministic=True,
    acelerator="gpu",
)
