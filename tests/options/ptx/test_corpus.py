"""The corpus beside PPO: blocks that hold every token once, whatever the text came in."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import datasets
import pytest

from rlhf.base.errors import DataError
from rlhf.config.choices import Template
from rlhf.config.freeze import to_run_config
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import DataConfig
from rlhf.options.ptx.corpus import build_ptx_blocks, cut_into_blocks, cut_texts, load_ptx_texts
from tests.conftest import Compose

TEXTS = [f"text number {n} of many" for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def config(compose: Compose) -> DataConfig:
    return to_run_config(compose(["data.eval_share=0.25", "data.template=plain"])).data


def test_blocks_are_cut_and_the_remainder_dropped() -> None:
    assert cut_into_blocks([[1, 2, 3], [4], [5, 6, 7, 8]], block_tokens=3) == [[1, 2, 3], [4, 5, 6]]
    assert cut_into_blocks([[1, 2, 3, 4, 5, 6]], block_tokens=3) == [[1, 2, 3], [4, 5, 6]]
    assert cut_into_blocks([[1], [2]], block_tokens=3) == [[1, 2]]
    assert cut_into_blocks([], block_tokens=3) == []


def test_every_token_is_in_one_block(tokenizer) -> None:
    texts = TEXTS * 60  # more than are tokenised at once
    blocks = cut_texts(texts, Encoder(tokenizer), block_tokens=7)
    assert {len(block) for block in blocks} == {7}
    whole = tokenizer.eos_token.join(texts) + tokenizer.eos_token
    decoded = tokenizer.decode(list(chain(*blocks)))
    assert whole.startswith(decoded)
    assert len(tokenizer(whole.removeprefix(decoded)).input_ids) < 7


def write_jsonl(folder: Path) -> Path:
    lines = [json.dumps({"id": str(n), "text": text}) for n, text in enumerate(TEXTS)]
    (folder / "c.jsonl").write_text("\n".join([*lines, json.dumps({"id": "x", "text": None})]))
    return folder / "c.jsonl"


def write_txt(folder: Path) -> Path:
    (folder / "c.txt").write_text("\n\n".join(TEXTS) + "\n\n\n")
    return folder / "c.txt"


def write_parquet(folder: Path) -> Path:
    datasets.Dataset.from_dict({"number": [1] * 20, "words": TEXTS}).to_parquet(
        folder / "c.parquet"
    )
    return folder / "c.parquet"


def write_saved(folder: Path) -> Path:
    train = datasets.Dataset.from_dict({"text": TEXTS})
    held_out = datasets.Dataset.from_dict({"text": ["never read"]})
    both = datasets.DatasetDict({"test": held_out, "train": train})
    both.save_to_disk(folder / "saved")
    return folder / "saved"


def write_folder(folder: Path) -> Path:
    (folder / "several").mkdir()
    (folder / "several" / "a.txt").write_text("\n\n".join(TEXTS[:5]))
    (folder / "several" / "b.txt").write_text("\n\n".join(TEXTS[5:]))
    (folder / "several" / "README.md").write_text("not text to learn")
    return folder / "several"


@pytest.mark.parametrize(
    "write", [write_jsonl, write_txt, write_parquet, write_saved, write_folder]
)
def test_text_is_read_and_a_share_held_out(
    config: DataConfig, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    config.ptx_path = str(write(tmp_path))
    train, held_out = load_ptx_texts(config, seed=1)
    assert sorted([*train, *held_out]) == sorted(TEXTS)
    assert len(held_out) == 5
    assert load_ptx_texts(config, seed=1) == (train, held_out)
    assert load_ptx_texts(config, seed=2) != (train, held_out)


def test_the_column_that_is_named_is_read(config: DataConfig, tmp_path: Path) -> None:
    config.ptx_path, config.ptx_column = str(write_jsonl(tmp_path)), "id"
    train, held_out = load_ptx_texts(config, seed=1)
    assert sorted([*train, *held_out]) == sorted([*map(str, range(20)), "x"])


def test_repeated_texts_are_not_held_out_and_trained_on(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("\n\n".join(TEXTS * 3))
    config.ptx_path = str(tmp_path / "c.txt")
    train, held_out = load_ptx_texts(config, seed=1)
    assert (len(train), len(held_out)) == (15, 5)
    config.deduplicate = False
    assert len(list(chain(*load_ptx_texts(config, seed=1)))) == 60


def test_without_a_path_the_sft_examples_are_taken(config: DataConfig, tokenizer) -> None:
    part = PhaseData(
        [Record(prompt="p:", chosen=" c", rejected=" r"), Record(text="t"), Record(prompt="q")],
        [Record(text="held out")],
    )
    blocks = build_ptx_blocks(config, part, tokenizer, block_tokens=4, seed=1)
    end = tokenizer.eos_token_id
    ids = [*tokenizer("p:").input_ids, *tokenizer(" c").input_ids, end]
    ids += [*tokenizer("t").input_ids, end]
    assert blocks.train == [ids[i : i + 4] for i in range(0, len(ids) - 3, 4)]
    assert blocks.eval == []


def test_sft_examples_keep_their_template(config: DataConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config.template = Template.chat
    part = PhaseData([Record(prompt="\n\nHuman: a\n\nAssistant:", chosen=" b")], [])
    blocks = build_ptx_blocks(config, part, tokenizer, block_tokens=99, seed=1)
    assert tokenizer.decode(blocks.train[0]) == "[user]a[assistant]b" + tokenizer.eos_token


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"data\.ptx_path: .*none\.jsonl: .*no such file or folder here"),
        ("empty.txt", "\n\n \n", "holds no text"),
        ("numbers.jsonl", '{"a": 1, "b": 2}', r"row 1: no text in column 'text'.*columns a, b"),
        ("mixed.jsonl", '{"text": "a"}\n{"text": [1]}', r"row 2: no text in column 'text'"),
        ("rows.jsonl", "[1]", "row 1: of type int; a row must be an object"),
    ],
)
def test_what_is_no_text_is_refused(
    config: DataConfig, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    config.ptx_path = str(tmp_path / name)
    with pytest.raises(DataError, match=message):
        load_ptx_texts(config, seed=1)


def test_bytes_that_are_no_text_are_refused(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    config.ptx_path = str(tmp_path / "c.txt")
    with pytest.raises(DataError, match=r"data\.ptx_path: .*c\.txt: not UTF-8 text"):
        load_ptx_texts(config, seed=1)
    config.ptx_path = str(tmp_path)
    (tmp_path / "c.txt").rename(tmp_path / "c.bin")
    with pytest.raises(DataError, match=r"no file that can be read; supported: \.txt, \.jsonl"):
        load_ptx_texts(config, seed=1)


def test_no_corpus_at_all_is_refused(config: DataConfig, tokenizer) -> None:
    for part in (None, PhaseData([Record(prompt="a question alone")], [])):
        with pytest.raises(DataError, match=r"data\.ptx_path=null.*set data\.ptx_path"):
            build_ptx_blocks(config, part, tokenizer, block_tokens=4, seed=1)
