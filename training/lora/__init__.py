"""LoRA: fine-tuning by low-rank adapters beside linear layers, whose own weights stay as they are."""
