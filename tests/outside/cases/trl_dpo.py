"""trl's own `dpo.py`, unchanged, by the launcher: LoRA on a tiny Llama."""

from tests.outside.language import run_trl

rows = [
    {"prompt": f"the cat sees {number}", "chosen": "three dogs", "rejected": "no cow"} for number in range(24)
]
run_trl("dpo", rows, ["--use_peft", "--lora_r", "2", "--lora_alpha", "4", "--max_length", "24"])
