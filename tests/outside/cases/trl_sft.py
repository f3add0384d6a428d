"""trl's own `sft.py`, unchanged, by the launcher: full fine-tuning of a tiny Llama."""

from tests.outside.language import run_trl

text = [f"the {animal} sees {number} dogs" for animal in ("cat", "cow", "fox") for number in range(8)]
run_trl("sft", [{"text": each} for each in text], ["--dataset_text_field", "text", "--max_length", "16"])
