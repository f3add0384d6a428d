"""One tiny model of each of ten families, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_DECODER, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_DECODER, num_local_experts=4)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=96, **_ENCODER)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **_ENCODER)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=96,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_DECODER, head_dim=8)),
    "deepseek": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**_DECODER, "num_key_value_heads": 4},
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    ),
}


def made(family: str) -> Any:
    """Return a model whose every tensor is other than a fresh one's."""
    torch.manual_seed(7)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model
