"""A small BERT of Hugging Face on film reviews, with plain torch: DistributedDataParallel around the model.

The model is made from a config; nothing is downloaded. It needs transformers: pip install 'paceline[examples]'

torchrun --nproc-per-node 4 examples/hugging_face/train_torch.py
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import BertConfig, BertForSequenceClassification

from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=60_614, help="training examples to use")
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    task = tasks.load("sst2")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    torch.manual_seed(0)
    model = BertForSequenceClassification(config(words=int(task.train[:][0].max()) + 1))  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            ddp(input_ids=x, attention_mask=x > 0, labels=y).loss.backward()
            optimizer.step()

    if dist.get_rank() == 0:
        found = task.evaluate(Logits(model))
        print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")
    del ddp  # if it were the last to hold the group, its end could wait for a thread that waits for Python's lock
    dist.destroy_process_group()


def config(words: int) -> BertConfig:
    """A BERT of 0.2 million parameters and its words, without dropout, which would be other noise on every worker."""
    return BertConfig(
        vocab_size=words,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )


class Logits(torch.nn.Module):
    """The model as the task evaluates it: from numbers of words to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=x, attention_mask=x > 0).logits
        return logits


if __name__ == "__main__":
    main()
