"""sentence-transformers' trainer on two data sets, by `enable_trainer`."""

from __future__ import annotations

from pathlib import Path

from tests.outside.language import make_model
from tests.outside.probe import OURS, RESUME


def main() -> None:
    """Train. `datasets` hashes functions with all that their module holds: nothing stands outside."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    words = Transformer(str(make_model(Path("model").absolute())))
    model = SentenceTransformer(modules=[words, Pooling(16)], device="cpu")
    data = {
        name: Dataset.from_dict(
            {
                "anchor": [f"the {name} sees {n} dogs" for n in range(size)],
                "positive": [f"{n} dogs {name}" for n in range(size)],
            }
        )
        for name, size in (("cat", 24), ("fox", 12))
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir="out",
        max_steps=12,
        per_device_train_batch_size=4,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        batch_sampler="no_duplicates",
        multi_dataset_batch_sampler="proportional",
        seed=42,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
    )
    if OURS:
        import accelerate_ckpt

        accelerate_ckpt.enable_trainer(trainer)
    trainer.train(resume_from_checkpoint=RESUME)


main()
