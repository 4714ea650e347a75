"""Text to tokens and back: tokenizer, chat prompt, decoding, stop strings, completion parser."""
