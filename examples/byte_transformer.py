"""Model and data of train_lm.py: a small transformer on the bytes of Python's standard library."""

import hashlib
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

# Under --simulate, on a CPU: PyTorch computes this operation one worker after the other, and warns. Nothing is wrong.
warnings.filterwarnings("ignore", "There is a performance drop.*scaled_dot_product_flash_attention_for_cpu")


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Bytes `[B, T]` -> logits `[B, T, 256]`; the embedding is the output layer too."""

    def __init__(self, seq_len: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def read_corpus() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The standard library as bytes (uint8): training files, every tenth file held out, and what it was."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [(root / path).read_bytes() for path in paths if not left_out & set(path.parts)]
    held_out = b"".join(files[::10])
    train = b"".join(file for i, file in enumerate(files) if i % 10)
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    facts = {"corpus_sha256": digest, "files": len(files), "train_bytes": len(train), "held_out_bytes": len(held_out)}
    return *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out)), facts


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The text in pieces, `[seq_len]` bytes and their targets: each byte's target is the next one."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self.seq_len
        piece = self.text[first : first + self.seq_len + 1].long()
        return piece[:-1], piece[1:]


def baselines(train: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Bits per byte of the training split's byte frequencies, alone and given the byte before."""
    train = train.long()
    unigram = torch.bincount(train, minlength=256).double() + 1
    unigram /= unigram.sum()
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256**2).view(256, 256).double()
    bigram = (pairs + unigram) / (pairs.sum(1, keepdim=True) + 1)  # one pseudo-count, shared as the unigrams are
    return {
        "unigram": -unigram[targets].log2().mean().item(),
        "bigram": -bigram[inputs, targets].log2().mean().item(),
    }
