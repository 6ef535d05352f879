"""Secrets and control characters do not reach terminals and files."""

import sys
import time

import pytest

from rlhf.base.safe_text import print_traceback, redact, strip_control_characters

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data.path=https://me:pw@host/x.jsonl", "data.path=https://[redacted]@host/x.jsonl"),
        ("HF_TOKEN=abc python launch.py", "HF_TOKEN=[redacted] python launch.py"),
        ("hydra.job.env_set.WANDB_API_KEY=abc", "hydra.job.env_set.WANDB_API_KEY=[redacted]"),
        ("{'AWS_SECRET': 'a b', 'x': 1}", "{'AWS_SECRET': [redacted], 'x': 1}"),
        (r'{"password":"x \"y\" z","a":1}', '{"password":[redacted],"a":1}'),
        ("--db 'pwd=hunter2'", "--db 'pwd=[redacted]'"),
        ("DB_PASS=hunter2 PGPASSWD='a b'", "DB_PASS=[redacted] PGPASSWD=[redacted]"),
        ("user: me\n  password: hunter2\n", "user: me\n  password: [redacted]\n"),
        ("- password: 'a b'", "- password: [redacted]"),
        ("{user: me, client_secret: abc, x: 1}", "{user: me, client_secret: [redacted], x: 1}"),
        ("postgres://u:p@ss@h/db", "postgres://[redacted]@h/db"),
        (f"git+https://{'aB3' * 8}@github.com/x", "git+https://[redacted]@github.com/x"),
        ("https://h/x?token=abc&page=2", "https://h/x?token=[redacted]&page=2"),
        ("https://h/x?a=1&api-key=abc", "https://h/x?a=1&api-key=[redacted]"),
        ("https://h/x?key=abc#top", "https://h/x?key=[redacted]#top"),
        ("https://h/x?sv=1&sig=a%2Fb%3D", "https://h/x?sv=1&sig=[redacted]"),
        ("https://h/x?X-Amz-Signature=0ab", "https://h/x?X-Amz-Signature=[redacted]"),
        ("Authorization: Bearer abcd1234", "Authorization: Bearer [redacted]"),
        ("'authorization': 'Basic dTpwYXNz'", "'authorization': 'Basic [redacted]'"),
        ("xoxb-1234-5678-abcdef", "[redacted]"),
        (f"AIza{'aB3-_' * 7}", "[redacted]"),
        (f"glpat-{'aB3-_' * 4}", "[redacted]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln-bmF0", "[redacted]"),
        ("db_password=abc, then", "db_password=[redacted], then"),
        ("ppo.api_key=abc", "ppo.api_key=[redacted]"),
        (f"the token hf_{'aB3' * 10} is invalid", "the token [redacted] is invalid"),
        (f"sk-{'aB3' * 8}", "[redacted]"),
        (f"sk-proj-{'a_B-3' * 8}", "[redacted]"),
        (f"ghp_{'aB3' * 12}", "[redacted]"),
        (f"tracking.entity={SHA}", "tracking.entity=[redacted]"),
    ],
)
def test_what_looks_like_a_secret_is_redacted(text: str, shown: str) -> None:
    assert redact(text, {}) == shown == redact(shown, {})


@pytest.mark.parametrize(
    "text",
    [
        "model.end_token=<|end|> model.vocab_size=300 ppo.policy_loss=token_mean",
        f"model.revision={SHA}",
        f"model:\n  revision: {SHA}\n",
        f"~/.cache/hub/snapshots/{SHA}/config.json",
        "Type `wandb login`, set WANDB_API_KEY, or use tracking=wandb_offline.",
        "launcher.master_addr=host:29500 data.path=/data/sk-learn/ask-me-anything-dataset",
        "http://127.0.0.1:9 is not reachable; mail me@host",
        f"data.key=a {SHA[:39]} model-00001-of-00002.safetensors eyJ.eyJ {'Zm9vYmFy' * 8}",
        "The password: type it. An endpoint with a bearer token, or basic gpt2-medium.",
        "pad_token: <|pad|>, rewards.judge.token_variable=MY_TOKEN, pwd=/home/me OLDPWD=/tmp",
        "ssh://git@host/x https://me@host/x?page=2&keys=3 a?b=c",
        '{"url":"http://host:80","mail":"me@host"}',
        "secret: must be one of a, b",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact(text, {"HOME": "ordinary text", "SSH_KEY": "/data", "A_KEY": "ppo"}) == text


def test_long_text_made_to_be_slow_is_not() -> None:
    for piece in ("eyJ-", "pwd=' ", "\n", "://a:", "&", "bearer ", "a", "a_", ', password: "'):
        started = time.process_time()
        redact(piece * 20_000, {})
        assert time.process_time() - started < 5, piece


def test_secrets_of_the_environment_are_known_by_value() -> None:
    environment = {"MY_TOKEN": "correct horse", "USER": "somebody else", "DB_PASS": "~.secret"}
    text = redact("401 for correct horse of somebody else, ~.secret", environment)
    assert text == "401 for [redacted] of somebody else, [redacted]"


def test_terminals_get_no_commands() -> None:
    assert (
        strip_control_characters("a\x1b]0;title\x07\x1b[2Jb\r\u202ec\n\t語")
        == "a�]0;title��[2Jb��c\n\t語"
    )


def test_a_traceback_shows_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct horse")
    try:
        raise ValueError("\x1b[31mhttps://me:pw@host and correct horse")
    except ValueError:
        print_traceback(*sys.exc_info())
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: �[31mhttps://[redacted]@host and [redacted]\n")
