"""A small BERT of Hugging Face on film reviews, with Paceline: the plain model, and shares by speed.

The model is made from a config; nothing is downloaded. It needs transformers: pip install 'paceline[examples]'

paceline run --workers 4 examples/hugging_face/train.py
"""

import argparse

import torch
from torch.utils.data import Subset
from transformers import BertConfig, BertForSequenceClassification

import paceline as pl
from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=60_614, help="training examples to use")
    chosen = parser.parse_args()

    task = tasks.load("sst2")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    torch.manual_seed(0)
    model = BertForSequenceClassification(config(words=int(task.train[:][0].max()) + 1))  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    with pl.Run(model, optimizer, dataset, **pl.recipes.uneven(batch=BATCH)) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(model(input_ids=x, attention_mask=x > 0, labels=y).loss)
            optimizer.step()

        with run.consensus():
            if run.fleet.rank == 0:
                found = task.evaluate(Logits(model))
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


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
