"""Token ids of the three phases: the same ending in all of them, and nothing lost in silence."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase, Template, Unpaired
from rlhf.data.encoding import Encoder
from rlhf.data.records import Message, Record
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import Limit, TokenData, cache_key, tokenise
from rlhf.models.tokenizers import train_tokenizer

TEXTS = ["\n\nHuman: say kiwi\n\nAssistant:", " kiwi", " plum and fig", "some text"]
LIMITS = {
    Phase.sft: Limit("sft.max_tokens", 200),
    Phase.reward: Limit("reward.max_tokens", 200),
    Phase.dpo: Limit("dpo.max_tokens", 30),
    Phase.ppo: Limit("rollout.max_prompt_tokens", 100),
}
PAIR = Record(prompt=TEXTS[0], chosen=TEXTS[1], rejected=TEXTS[2])


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


def read(part: PhaseData, phase: Phase, tokenizer, cache_dir: Path) -> TokenData:
    return tokenise(part, phase, tokenizer, limit=LIMITS[phase], cache_dir=cache_dir)


@pytest.mark.parametrize("pads_with_end", [False, True])
def test_every_phase_ends_a_response_alike(
    tokenizer, tmp_path: Path, *, pads_with_end: bool
) -> None:
    if pads_with_end:
        tokenizer = train_tokenizer(TEXTS, vocab_size=300)
        tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    part = PhaseData([PAIR], [PAIR])
    sft, pair, prompt = (
        read(part, phase, tokenizer, tmp_path).train[0]
        for phase in (Phase.sft, Phase.reward, Phase.ppo)
    )
    assert sft["ids"] == pair["chosen_ids"]
    assert sft["ids"][: sft["prompt_tokens"]] == prompt["ids"]
    assert sft["ids"].count(end) == pair["rejected_ids"].count(end) == 1
    assert sft["ids"][-1] == pair["rejected_ids"][-1] == end
    assert tokenizer.decode(sft["ids"][:-1]) == TEXTS[0] + TEXTS[1]


def test_what_does_not_fit_is_counted(tokenizer, tmp_path: Path) -> None:
    records = [
        PAIR,
        PAIR._replace(chosen=" kiwi" * 200),
        Record(prompt=TEXTS[0], chosen=TEXTS[1]),
        Record(text="x"),
    ]
    part = PhaseData(records, [])
    by_phase = {phase: read(part, phase, tokenizer, tmp_path) for phase in Phase}
    counted = {p: {w: n for w, n in d.left_out.items() if n} for p, d in by_phase.items()}
    assert counted == {
        Phase.sft: {"longer than sft.max_tokens=200": 1},
        Phase.reward: {"no pair of responses": 2, "longer than reward.max_tokens=200": 1},
        Phase.ppo: {"no prompt": 1},
        Phase.dpo: {"no pair of responses": 2, "longer than dpo.max_tokens=30": 1},
    }
    assert [len(data.train) + sum(data.left_out.values()) for data in by_phase.values()] == [4] * 4
    assert by_phase[Phase.reward].train["row"][:] == [0]


def test_single_responses_have_grades_and_pairs_count_as_both_marks(
    tokenizer, tmp_path: Path
) -> None:
    asked = Record(prompt="\n\nHuman: Hi\n\nAssistant:", chosen=" ok")
    records = [
        asked._replace(grade=True),
        asked._replace(chosen=" no", grade=False),
        asked._replace(chosen=" fine", grade=2.5),
        asked._replace(rejected=" never"),
        asked,
    ]
    part = PhaseData(records, records[:1])
    found = {}
    for feedback in Unpaired:
        data = tokenise(part, feedback, tokenizer, limit=Limit("k", 99), cache_dir=tmp_path)
        rows = data.train[:]
        texts = [
            tokenizer.decode(ids[n:-1])
            for ids, n in zip(rows["ids"], rows["prompt_tokens"], strict=True)
        ]
        found[feedback] = list(zip(rows["row"], texts, rows["grade"], strict=True))
        assert rows["length"] == [len(ids) for ids in rows["ids"]]
        assert all(ids[-1] == tokenizer.eos_token_id for ids in rows["ids"])
        assert data.left_out == {f"no {feedback[:-1]}": 2}
    assert found[Unpaired.marks] == [
        (0, " ok", 1.0),
        (1, " no", 0.0),
        (3, " ok", 1.0),
        (3, " never", 0.0),
    ]
    assert found[Unpaired.scores] == [(0, " ok", 1.0), (1, " no", 0.0), (2, " fine", 2.5)]


def test_lengths_and_prompts_of_pairs_are_told(tokenizer, tmp_path: Path) -> None:
    other = PAIR._replace(prompt="\n\nHuman: some text\n\nAssistant:")
    records = [PAIR, other, PAIR._replace(chosen=" some text"), PAIR._replace(chosen=" x" * 300)]
    part = PhaseData(records, [])
    data = read(part, Phase.reward, tokenizer, tmp_path).train
    assert data["group"][:] == [0, 1, 0]
    pairs = zip(data["chosen_ids"], data["rejected_ids"], strict=True)
    assert data["length"][:] == [max(map(len, pair)) for pair in pairs]
    sft = read(part, Phase.sft, tokenizer, tmp_path).train
    assert sft["length"][:] == [len(ids) for ids in sft["ids"]]


def test_the_cache_is_keyed_by_all_that_changes_it(tokenizer) -> None:
    def key(part: PhaseData, phase: Phase, tokenizer=tokenizer, limit: int = 10, **more) -> str:
        return cache_key(part, phase, tokenizer, limit=limit, **more)

    def episode_of(role: str) -> PhaseData:
        said = [("user", "kiwi"), ("assistant", "kiwi"), (role, "plum"), ("assistant", "fig")]
        return PhaseData([PAIR._replace(seed=1, turns=tuple(Message(*e) for e in said))], [])

    part = PhaseData([PAIR], [])
    keys = {
        key(part, Phase.sft),
        key(part, Phase.sft, limit=11),
        key(part, Phase.reward),
        key(PhaseData([], [PAIR]), Phase.sft),
        key(PhaseData([PAIR._replace(chosen=" fig")], []), Phase.sft),
        key(part, Phase.sft, train_tokenizer(["entirely different text"], vocab_size=280)),
        key(episode_of("user"), Phase.sft),
        key(episode_of("tool"), Phase.sft),
    }
    for template in ("{{ 1 }}", "{{ 2 }}"):
        other = train_tokenizer(TEXTS, vocab_size=300)
        other.chat_template = template
        keys |= {key(part, Phase.sft, other, template=Template.chat)}
        assert key(part, Phase.sft, other) == key(part, Phase.sft), "plain turns need no template"
    assert len(keys) == 10


def test_the_cache_is_read_back(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PhaseData([PAIR], [PAIR])
    first = read(part, Phase.sft, tokenizer, tmp_path)
    monkeypatch.setattr(Encoder, "encode_pieces", lambda *_: pytest.fail("tokenised again"))
    assert read(part, Phase.sft, tokenizer, tmp_path).train[:] == first.train[:]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def change_owner(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(path, 4242, -1)


DAMAGES = [
    ("train/data*.arrow", flip_a_byte, "it is not what was written"),
    ("eval/data*.arrow", lambda path: os.truncate(path, 8), "it is not what was written"),
    ("left_out.json", Path.unlink, "is missing"),
    ("manifest.json", Path.unlink, "it has no manifest.json"),
    ("manifest.json", lambda path: path.write_text("[]"), "is damaged"),
    ("train", lambda path: (path / "more.arrow").write_text(""), "more.arrow"),
    ("train/data*.arrow", change_owner, "another user"),
    ("eval", change_owner, "another user"),
    ("left_out.json", lambda path: path.chmod(0o666), "another user"),
    ("train/data*.arrow", replace_by_link, "is a link"),
    ("train", replace_by_link, "is a link"),
    ("", replace_by_link, "is a link"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_a_cache_that_cannot_be_trusted_is_made_anew(
    tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    def read_again() -> list[object]:
        data = read(part, Phase.sft, tokenizer, tmp_path)
        return [data.train[:], data.eval[:], data.left_out]

    part = PhaseData([PAIR], [PAIR])
    sound = read_again()
    (folder,) = (each for each in tmp_path.glob("tokens/*") if each.is_dir())
    (path,) = folder.glob(name) if name else [folder]
    damage(path)
    assert read_again() == sound
    (line,) = (each for each in capfd.readouterr().err.splitlines() if "recomputed" in each)
    assert line.startswith(f"data.cache_dir={tmp_path}: the token ids in {folder} are recomputed: ")
    assert reason in line
    assert read_again() == sound
    assert "recomputed" not in capfd.readouterr().err, "the new cache is sound"


def test_a_cache_that_cannot_be_used_is_refused(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, problem in (
        ("open", ".*another user owns it, or can write to it; chown"),
        ("file", "cannot be used"),
    ):
        place = tmp_path / name
        with pytest.raises(DataError, match=rf"^data\.cache_dir={place} {problem}"):
            read(PhaseData([PAIR], [PAIR]), Phase.sft, tokenizer, place)


def test_a_cache_is_trusted_whatever_the_umask(
    tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            read(PhaseData([PAIR], []), Phase.sft, tokenizer, tmp_path / "a" / "cache")
    finally:
        os.umask(before)
    assert "recomputed" not in capfd.readouterr().err
