"""Train one replica of torchft's DDP over gloo, and print each step that the replicas left have committed.

python benchmarks/helpers/torchft_replica.py NAME LIGHTHOUSE BATCH_SIZE
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from models.config import ModelConfig
from models.decoder import Decoder


def batches(size: int, length: int) -> Any:
    text = torch.from_numpy(np.frombuffer(Path("LICENSE").read_bytes(), np.uint8).astype(np.int64))
    while True:
        begins = torch.randint(len(text) - length - 1, (size, 1)) + torch.arange(length + 1)
        yield text[begins[:, :-1]], text[begins[:, 1:]]


def main(name: str, lighthouse: str, batch_size: int) -> None:
    torch.set_num_threads(1)
    gpt = Decoder(ModelConfig())
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    model: Any = DistributedDataParallel(manager, gpt)
    optimizer: Any = Optimizer(manager, torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True))
    pair: tuple[Tensor, Tensor]
    for pair in batches(batch_size, gpt.config.block_size):
        optimizer.zero_grad()  # begins the quorum of the living replicas
        model(*pair)[1].backward()
        optimizer.step()  # unless a replica has died
        print(f"step {manager.current_step()} of {manager.num_participants()} replicas", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
