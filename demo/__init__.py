"""How the demo checkpoint comes about: text, tokenizer, training in plain torch, export."""
