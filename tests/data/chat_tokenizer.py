"""A small `tokenizer.json` with a chat template, made for tests."""

import json

TEMPLATE = (
    "{%- for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_tokenizer(folder, template=TEMPLATE):
    """Saves a byte-level tokenizer with three control tokens, which end a text in two ways."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat and the hat and the bat"] * 4, trainer)
    names = ("<|text|>", "<|start|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    values = {"eos_token": {"content": "<|text|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    ids = [tokenizer.token_to_id(name) for name in ("<|end|>", "<|text|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path
