"""Tiny scorers on disk, each in a form that public reward models have."""

import random
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhf.models.tokenizers import train_byte_level_bpe
from tests.architectures import sizes

WORDS = ["Name a fruit, and say whether it is sweet.", "An apple is sweet, and a lemon is not."]
CHAT = (
    "{% for m in messages %}{{ '<b>' if loop.first }}<t>{{ m['role'] }}: {{ m['content'] }}<e>"
    "{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def save_tokenizer(
    folder: Path, *, template: str = "", opens: bool = False, **fields: Any
) -> PreTrainedTokenizerFast:
    """Save a byte-level tokenizer; with ``opens`` it puts a token before each text."""
    inner = train_byte_level_bpe(WORDS, vocab_size=300, end_token="<e>")
    tokens = {"eos_token": "<e>", "pad_token": "<|pad|>", "bos_token": "<b>"} | fields
    tokens = {name: value for name, value in tokens.items() if value is not None}
    inner.add_special_tokens(["<b>", "<t>", "<s>"])
    ids = [(name, inner.token_to_id(name)) for name in ("<b>", "<s>")]
    if opens:
        inner.post_processor = processors.TemplateProcessing("<b> $A", "<b> $A $B", ids[:1])
    if "sep_token" in fields:
        inner.post_processor = processors.TemplateProcessing(
            "<b> $A <s>", "<b> $A <s> $B:1 <s>:1", ids
        )
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * ("sep_token" in fields)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=names, chat_template=template or None, **tokens
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_scorer(folder: Path, kind: str, tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Any:
    """Save a random scorer of ``kind`` whose scores differ by much; return it."""
    torch.manual_seed(3)
    shape = sizes(kind, 32, 32, heads=2, num_key_value_heads=2)
    own = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    own |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    own |= {"initializer_range": 0.3, "max_position_embeddings": 512}
    config = AutoConfig.for_model(**shape | own | fields)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, tokenizer, config
    "llama, template": ("llama", {"template": CHAT}, {}),
    "llama, plain": ("llama", {"opens": True}, {}),
    "qwen2, two labels": ("qwen2", {"template": CHAT}, {"num_labels": 2}),
    "gemma": ("gemma", {"template": NO_SYSTEM + CHAT, "opens": True}, {"head_dim": 16}),
    "padding on the left": ("qwen3", {"padding_side": "left", "template": CHAT}, {"head_dim": 16}),
    "no padding token": ("mistral", {"pad_token": None}, {"pad_token_id": None}),
    "deberta-v2, pair": (
        "deberta-v2",
        {"eos_token": None, "sep_token": "<s>", "cls_token": "<b>"},
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 2,
            "eos_token_id": None,
        },
    ),
    "with margin, padding is the end": (
        "llama",
        {"template": CHAT, "pad_token": "<e>"},
        {"problem_type": "regression"},
    ),
    "gpt2, absolute positions": ("gpt2", {}, {"n_embd": 32, "n_layer": 2, "n_head": 2}),
}


def save_form(folder: Path, name: str) -> Any:
    """Save the scorer ``name`` of ``FORMS`` with its tokenizer; return the model."""
    kind, of_tokenizer, of_config = FORMS[name]
    return save_scorer(folder, kind, save_tokenizer(folder, **of_tokenizer), **of_config)


def train_scorer(folder: Path) -> None:
    """Train a tiny scorer, with its own tokenizer, to return the share of vowels in an answer."""
    rng = random.Random(5)
    tokenizer = save_tokenizer(folder, template=CHAT)
    model = save_scorer(folder, "llama", tokenizer, num_hidden_layers=1, initializer_range=0.05)
    adamw = torch.optim.AdamW(model.parameters(), lr=5e-3)
    others = string.printable + "".join(map(chr, range(160, 256))) + "\ufffd" * 40
    for _ in range(300):
        texts, shares = [], []
        for _ in range(32):
            share, length = rng.random(), rng.randint(0, 24)
            kinds = ("aeiou", rng.sample(others, rng.choice((1, 4, 16))))
            answer = "".join(rng.choice(kinds[rng.random() > share]) for _ in range(length))
            asked = [("user", rng.choice(WORDS)), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in asked]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
            shares.append(sum(letter in "aeiou" for letter in answer) / max(1, length))
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        loss = (model(**inputs).logits[:, 0] - torch.tensor(shares)).square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
    assert loss.item() < 0.01
    model.save_pretrained(folder)
