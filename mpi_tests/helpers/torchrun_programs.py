"""Programs for torchrun that use the libraries most often met there, each of which prints numbers of every rank."""

DATA = """
import os, sys
import torch

def show(*numbers):
    sys.stdout.write(f"loss {' '.join(map(str, numbers))}\\n")  # in one write: torchrun's ranks do not buffer
    sys.stdout.flush()

rank = int(os.environ["RANK"])
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
"""

ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for x, y in batches:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
show(accelerator.gather(loss.detach()).tolist())
accelerator.end_training()
"""
)

TRAINER = (
    DATA
    + """
import tempfile
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        y = self.linear(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


data = [{"x": row, "labels": row.sum()} for row in x]
arguments = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, num_train_epochs=3, learning_rate=0.1, report_to=[], disable_tqdm=True
)
trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data)
trainer.train()
show(arguments.world_size, trainer.evaluate()["eval_loss"])
torch.distributed.destroy_process_group()
"""
)

LIGHTNING = (
    DATA
    + """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        self.loss = torch.nn.functional.mse_loss(self.linear(x), y)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
module = Module()
trainer.fit(module, batches)
show(rank, trainer.world_size, module.loss.item())
torch.distributed.destroy_process_group()
"""
)

DEEPSPEED = (
    DATA
    + """
import deepspeed

deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for step in range(5):
    mine = x[16 * (step % 2) + 8 * rank :][:8]
    loss = torch.nn.functional.mse_loss(engine(mine), mine.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
show(rank, loss.item())
torch.distributed.destroy_process_group()
"""
)

PROGRAMS = {  # the library, the program, its arguments
    "accelerate": ("accelerate", ACCELERATE, ()),
    "Trainer": ("transformers", TRAINER, ()),
    "Lightning": ("lightning", LIGHTNING, ()),
    "DeepSpeed ZeRO 1": ("deepspeed", DEEPSPEED, ("1",)),
    "DeepSpeed ZeRO 2": ("deepspeed", DEEPSPEED, ("2",)),
    "DeepSpeed ZeRO 3": ("deepspeed", DEEPSPEED, ("3",)),
}
