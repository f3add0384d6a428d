"""Sign checkpoints with SHA-256 and a key, and judge them before a load.

    python examples/signed_checkpoints.py [root]

Saving and loading jobs share the key; see docs/cookbook.md for public keys and key services.
"""

from __future__ import annotations

import hmac
import os
import sys
from pathlib import Path

import torch

from ckpt_core import CheckpointManager, TrainState, UntrustedCheckpointError


def key() -> bytes:
    """Read the key from the environment, never from the storage that it protects."""
    return bytes.fromhex(os.environ["RUN_KEY"])


def sign(name: str, manifest: bytes) -> bytes:
    del name  # the manifest contains the step
    return hmac.digest(key(), manifest, "sha256")


def judge(name: str, manifest: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, sign(name, manifest))


def main(root: str = "signed") -> None:
    os.environ.setdefault("RUN_KEY", "5e" * 32)  # a real job gets its key from outside
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(
        root,
        checksum="sha256",  # a signature is worth no more than the checksums that it covers
        sign_manifest=sign,
        verify_manifest=judge,
        verify="full",  # compares these checksums, not only the CRC-32 of loaded bytes
    ) as checkpoints:
        done = checkpoints.resume(state) or 0
        for step in (done + 1, done + 2):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = checkpoints.save(step, state)
            print(f"step {step} has the manifest sha256:{saved.result().manifest_sha256}")
        (Path(root) / saved.name / "manifest.json.sig").write_bytes(b"somebody else's")
        try:
            checkpoints.load(state, name=saved.name)
        except UntrustedCheckpointError as error:
            print(f"refused: {error}")
        print(f"resumed: step {checkpoints.resume(state)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
