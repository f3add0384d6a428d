"""Define a byte-level GPT of 3.3 million parameters, with dropout, untied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.demo.plan import Plan

SEED = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    vocabulary: int = 256
    context: int = 128
    width: int = 256
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(config.dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Return the mean cross-entropy of the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.bytes(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def make_model() -> GPT:
    """Build a model with the same weights on every rank and in every phase."""
    torch.manual_seed(SEED)
    return GPT(GPTConfig())


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def make_scheduler(
    optimizer: torch.optim.Optimizer, plan: Plan, *, calls_per_step: int = 1
) -> torch.optim.lr_scheduler.LambdaLR:
    """Build a scheduler with a short warm-up, then a cosine down to a tenth.

    Accelerate calls the scheduler once per rank at every step; `calls_per_step` compensates for that.
    """

    def factor(calls: int) -> float:
        step = calls / calls_per_step
        warmup = plan.steps / 8
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / (plan.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_deterministic(rank: int) -> None:
    """Fix the order of every sum, and seed each rank differently (dropout)."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED + 1 + rank)
