"""The mathematics: pure functions of tensors, independent of config, tokenizer and rank."""
