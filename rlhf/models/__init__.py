"""Load and build models and tokenizers; AutoModel and AutoTokenizer are called only here."""
