import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from mine import Faces, Net, collate
from torch.utils.data import DataLoader
from transformers import get_scheduler

EPOCHS = 3
set_seed(42)
plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True, use_orig_params=False)
accelerator = Accelerator(
    mixed_precision="bf16",
    gradient_accumulation_steps=4,
    fsdp_plugin=plugin,
    log_with="tensorboard",
    project_dir="runs/faces",
    even_batches=False,
)
model = Net(width=64)
loader = DataLoader(Faces(), batch_size=8, shuffle=True, collate_fn=collate, num_workers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.1, betas=(0.9, 0.95))
scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=10, num_training_steps=len(loader) * EPOCHS)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _epoch in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
