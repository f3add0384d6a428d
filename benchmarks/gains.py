"""What compression gains, by class of tensor, on states that a real training has saved.

    python -m benchmarks.gains --seconds 40 --json out.json

A byte-level GPT of 4 layers, and the same with 8 experts in each layer of which a token takes 2, are
trained with AdamW on the text of this repository, in one thread, and saved by this package. What it stored
is then compressed in blocks of 1 MiB on one core, class by class.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, final

import numpy as np
import torch
import zstandard
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.command import positive, tell
from benchmarks.machine import in_words, machine_facts
from benchmarks.training import one_thread
from ckpt_core import CheckpointManager, TrainState
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable

_WIDTH, _LAYERS, _HEADS, _CONTEXT, _BATCH = 256, 4, 4, 64, 8
_EXPERTS, _CHOSEN = 8, 2
_LEAST_SECONDS = 0.1
_LOW_BIT = Path(sys.prefix) / "low-bit"
"""Where `make setup` puts libraries of quantised states."""

Pair = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


@final
class Experts(nn.Module):
    """A mixture of experts: each token goes through those that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(_feed_forward() for _ in range(_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, context, width), as is the result."""
        shares, chosen = self.router(x).softmax(-1).topk(_CHOSEN)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            taken = chosen == number
            rows = taken.any(-1)
            if rows.any():
                out[rows] += expert(x[rows]) * (shares * taken).sum(-1)[rows][:, None]
        return out


@final
class Block(nn.Module):
    """Attention and what follows it, with residuals."""

    def __init__(self, follows: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.follows = follows

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, context, width), as is the result."""
        batch, length, width = x.shape
        heads = (
            self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.follows(self.norms[1](x))


@final
class Gpt(nn.Module):
    """A transformer over bytes."""

    def __init__(self, follows: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, _WIDTH), nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(Block(follows()) for _ in range(_LAYERS)))
        self.head = nn.Linear(_WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, context, 256) for tokens of shape (batch, context)."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


def _feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))


def corpus() -> Tensor:
    """Return the text of this repository, as bytes of dtype uint8."""
    files = sorted(Path(__file__).parents[1].glob("common/**/*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


@final
class Trained:
    """A model in training on the text of this repository.

    Attributes:
        optimizer: AdamW.
        state: what is saved.
        steps: so far.
        loss: of the last step, in nats.
    """

    def __init__(
        self,
        follows: Callable[[], nn.Module] = _feed_forward,
        *,
        eight_bit: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._model, self._text = Gpt(follows).to(dtype), corpus()
        make: Any = torch.optim.AdamW
        if eight_bit:
            sys.path.append(str(_LOW_BIT))
            from torchao.optim import AdamW8bit as make  # noqa: N813
        self.optimizer = make(self._model.parameters(), lr=6e-4)
        self.state = TrainState(model=self._model, optimizer=self.optimizer)
        self.steps, self.loss = 0, float("nan")

    def step(self) -> None:
        """Train one step."""
        starts = torch.randint(len(self._text) - _CONTEXT - 1, (_BATCH,))
        rows = torch.stack([self._text[start : start + _CONTEXT + 1] for start in starts]).long()
        logits = self._model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps, self.loss = self.steps + 1, loss.item()


class Gain(NamedTuple):
    """What a codec makes of a class of tensors, in blocks of 1 MiB on one core; MB/s of plain bytes."""

    ratio: float
    compress: float
    restore: float


def codecs(itemsize: int) -> dict[str, Pair]:
    """Return what compresses a block, and what restores it, by name."""
    found: dict[str, Pair] = {}
    restore = zstandard.ZstdDecompressor().decompress
    for level in (1, 3):
        compress = zstandard.ZstdCompressor(level=level).compress
        found[f"zstd-{level}"] = compress, restore
        if itemsize > 1:
            found[f"planes+zstd-{level}"] = (
                lambda block, compress=compress: compress(_transposed(block, itemsize)),
                lambda block: _transposed(restore(block), len(restore(block)) // itemsize),
            )
    if importlib.util.find_spec("lz4"):
        import lz4.frame

        found["lz4"] = lz4.frame.compress, lz4.frame.decompress
    return found


def _transposed(block: bytes, columns: int) -> bytes:
    return np.frombuffer(block, np.uint8).reshape(-1, columns).T.tobytes()


def measure(blocks: Sequence[bytes], pair: Pair) -> Gain:
    """Compress all blocks and restore them.

    Raises:
        RuntimeError: what was restored differs.
    """
    compressed, taken = _timed(pair[0], blocks)
    restored, taken_back = _timed(pair[1], compressed)
    if restored != list(blocks):
        raise RuntimeError("what was restored differs")
    size = sum(map(len, blocks))
    return Gain(size / sum(map(len, compressed)), size / taken / 1e6, size / taken_back / 1e6)


def _timed(do: Callable[[bytes], bytes], blocks: Sequence[bytes]) -> tuple[list[bytes], float]:
    """Return what came out, and seconds of a processor: neighbours on the machine do not count."""
    begun, repeats = time.thread_time(), 0
    while not repeats or time.thread_time() < begun + _LEAST_SECONDS:
        found, repeats = [do(block) for block in blocks], repeats + 1
    return found, (time.thread_time() - begun) / repeats


def stored(checkpoint: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield key, dtype and bytes of each stored tensor; of dtype "" what else there is."""
    for table in sorted(checkpoint.glob("chunks-*.json.z")):
        for chunk in ChunkTable.from_bytes(table.read_bytes(), source=str(table)):
            with (checkpoint / chunk.path).open("rb") as file:
                if chunk.payload_bytes is None:
                    file.seek(chunk.offset)
                    yield chunk.key, "", file.read(chunk.size_bytes)
                else:
                    file.seek(chunk.payload_offset or 0)
                    yield chunk.key, str(chunk.dtype).removeprefix("torch."), file.read(chunk.payload_bytes)


def class_of(key: str, dtype: str) -> str:
    """Name the class of a tensor."""
    if not dtype or dtype not in {"float32", "bfloat16"}:
        return "generators and small values"
    part = "experts" if ".experts." in key else "embeddings" if "embedding." in key else "weights"
    if key.startswith("optimizer"):
        moment = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}.get(key.rpartition(".")[2])
        return "generators and small values" if moment is None else f"{moment} of {part}"
    return f"{part}, fp32"


def blocks_of(contents: Sequence[bytes]) -> list[bytes]:
    """Cut tensors into blocks of 1 MiB, as they are compressed."""
    return [each[at : at + BLOCK_BYTES] for each in contents for at in range(0, len(each), BLOCK_BYTES)]


def gains_of(trained: Trained, root: Path) -> dict[str, tuple[int, dict[str, Gain]]]:
    """Save, and return bytes and gains of each class."""
    with CheckpointManager(root) as manager:
        name = manager.save(trained.steps, trained.state).result().name
    classes: dict[str, list[bytes]] = defaultdict(list)
    for key, dtype, content in stored(root / name):
        found = class_of(key, dtype)
        classes[found].append(content)
        if found.endswith(", fp32"):
            rounded = torch.frombuffer(bytearray(content), dtype=torch.float32).bfloat16()
            classes[found.replace("fp32", "bf16")].append(rounded.view(torch.uint8).numpy().tobytes())
    result = {}
    for name, contents in sorted(classes.items()):
        itemsize = 2 if name.endswith("bf16") else 1 if name.startswith("generators") else 4
        blocks = blocks_of(contents)
        found_gains = {codec: measure(blocks, pair) for codec, pair in codecs(itemsize).items()}
        result[name] = sum(map(len, blocks)), found_gains
    return result


def low_bit_gains(trained: Trained) -> tuple[int, dict[str, Gain]]:
    """Return bytes and gains of the codes of an 8-bit optimizer."""
    states = trained.optimizer.state.values()
    codes = [each.codes for state in states for each in state.values() if hasattr(each, "codes")]
    blocks = blocks_of([code.numpy().tobytes() for code in codes])
    return sum(map(len, blocks)), {codec: measure(blocks, pair) for codec, pair in codecs(1).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gains", description=__doc__)
    parser.add_argument("--seconds", type=positive, default=40.0, help="of training, each (default 40)")
    parser.add_argument("--json", type=Path, help="write everything that was measured there")
    options = parser.parse_args(arguments)
    makes: Mapping[str, Callable[[], Trained]] = {
        "GPT": Trained,
        "mixture of experts": partial(Trained, Experts),
    } | ({"8-bit AdamW": partial(Trained, eight_bit=True)} if _LOW_BIT.is_dir() else {})
    found: dict[str, Any] = {}
    with one_thread(), TemporaryDirectory(prefix="bench-") as directory:
        print(in_words(machine_facts(Path(directory), torch.device("cpu"))))
        for name, make in makes.items():
            trained, until = make(), time.monotonic() + options.seconds
            while time.monotonic() < until:
                trained.step()
            tell(f"{name}: {trained.steps} steps, loss {trained.loss:.2f}")
            low_bit = name.startswith("8")
            gains = {"codes": low_bit_gains(trained)} if low_bit else gains_of(trained, Path(directory, name))
            found[name] = {"steps": trained.steps, "loss": trained.loss, "classes": gains}
            for kind, (size, each) in gains.items():
                cells = (
                    f"{codec} {g.ratio:.2f} ({g.compress:.0f}, {g.restore:.0f})" for codec, g in each.items()
                )
                print(f"{name}: {kind}, {size / 1e6:.1f} MB:", "; ".join(cells))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=lambda gain: gain._asdict()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
