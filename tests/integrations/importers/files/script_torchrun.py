import argparse
from itertools import islice

import torch
from mine import Faces, Net
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    init_process_group("gloo")
    torch.manual_seed(7)
    model = DistributedDataParallel(Net(width=64))
    data = Faces()
    loader = iter(DataLoader(data, batch_size=args.batch_size, sampler=DistributedSampler(data)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    for _ in range(args.steps):
        (x, y), *_ = islice(loader, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
