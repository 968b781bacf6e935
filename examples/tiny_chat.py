"""Write a folder with a tiny Llama that has a tokenizer and a chat template, and 20 conversations to tune it on.

python examples/tiny_chat.py chat
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from models.config import ModelConfig
from models.decoder import Decoder
from training.weights.export import save_hugging_face

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

OPPOSITES = (
    "hot cold, big small, fast slow, old new, full empty, wet dry, early late, high low, open shut, near far, "
    "light dark, hard soft, rich poor, thick thin, loud quiet, up down, in out, on off, yes no, left right"
)


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a token for each byte, and no longer ones
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[1]}))
    size = tokenizer.get_vocab_size()
    sizes = {"vocab_size": size, "block_size": 128, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_kv_head": 2}
    llama = {"has_rms_norms": True, "embeds_positions": False, "is_gated": True, "activation": "silu", "tied": False}
    save_hugging_face(Decoder(ModelConfig(family="llama", **sizes, **llama)), folder)


def conversations() -> list[dict]:
    """Return questions for opposites with their answers, one or two in a conversation."""
    pairs = [pair.split() for pair in OPPOSITES.split(", ")]
    rows = []
    for number in range(20):
        chosen = pairs[number : number + 1 + number % 2]
        turns = [(f"What is the opposite of {word}?", f"It is {other}.") for word, other in chosen]
        roles = [{"user": question, "assistant": answer} for question, answer in turns]
        rows.append({"messages": [{"role": role, "content": words} for turn in roles for role, words in turn.items()]})
    return rows


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write(target)
    (target / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    print(f"{target}: a Llama, its tokenizer and template, and 20 conversations")
