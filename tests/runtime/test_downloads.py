"""Two nodes of two ranks download a model once each, from a stand-in for the hub."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.runtime import downloads
from tests.conftest import Compose
from tests.local_server import LocalServer
from tests.models_on_disk import save_base, small_tokenizer
from tests.runs import free_port, start

pytestmark = pytest.mark.slow

HUB_RANK = Path(__file__).with_name("hub_rank.py")
COMMIT = "0" * 40


class Hub(LocalServer):
    """A hub with the model org/tiny, whose files are in a folder; some ranks may not read it."""

    def __init__(self, files: Path) -> None:
        super().__init__(Files)
        self.files = files
        self.requests: list[tuple[int, str, str]] = []  # rank, method, file
        self.refused: set[int] = set()  # ranks


class Files(BaseHTTPRequestHandler):
    """Answers /RANK/org/tiny/resolve/REVISION/FILE, and what the hub's API says of the model."""

    server: Hub

    def do_HEAD(self) -> None:
        rank, _, place = self.path[1:].partition("?")[0].partition("/")
        self.server.requests.append((int(rank), self.command, place.rpartition("/")[2]))
        is_refused = int(rank) in self.server.refused
        found = None if is_refused else self.find(place)
        content = found or b""
        self.send_response(404 if found is None else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Error-Code", "RepoNotFound" if is_refused else "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD

    def find(self, place: str) -> bytes | None:
        files = [path for path in self.server.files.iterdir() if path.is_file()]
        contents = {path.name: path.read_bytes() for path in files}
        match place.split("/"):
            case ["org", "tiny", "resolve", _, name]:
                return contents.get(name)
            case ["api", "models", "org", "tiny", *rest] if rest[:1] in ([], ["revision"]):
                return json.dumps({"id": "org/tiny", "sha": COMMIT}).encode()
            case ["api", "models", "org", "tiny", "tree", _]:
                return json.dumps(
                    [
                        {"type": "file", "path": n, "size": len(c), "oid": sha1(c).hexdigest()}
                        for n, c in contents.items()
                    ]
                ).encode()
        return None

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = save_base(tmp_path / "org", "llama", small_tokenizer())
    (tmp_path / "org" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "org", max_shard_size="20KB")
    with Hub(tmp_path / "org").serving() as server:
        yield server


def run_ranks(hub: Hub, folder: Path, compose: Compose) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of two ranks on each of two nodes."""
    words = ["experiment=smoke", "model=pretrained", "model.path=org/tiny", "phase=sft"]
    words += ["hardware.nodes=2", "hardware.ranks_per_node=2", "launcher.master_addr=localhost"]
    (folder / "run").mkdir()
    write_frozen_config(to_run_config(compose(words)), folder / "run")
    job = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = free_port()
    command = [HUB_RANK, hub.url, folder]
    ranks = [start(*command, cwd=folder, RANK=i, LOCAL_RANK=i % 2, **job) for i in range(4)]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *end) for rank, end in zip(ranks, ends, strict=True)]


REWARD_MODEL = ["model@reward_model=pretrained", "reward_model.path=org/scorer"]


@pytest.mark.parametrize(
    ("words", "finished", "expected"),
    [
        ([], [], ["tokenizer org/tiny", "CausalLM org/tiny"]),
        ([], ["sft"], ["tokenizer org/tiny"]),
        ([], ["sft", "reward", "ppo"], []),
        (
            ["phase=ppo", *REWARD_MODEL, "ppo.teacher_path=org/teacher"],
            [],
            [
                *("tokenizer org/tiny", "CausalLM org/tiny"),
                *("tokenizer org/scorer", "SequenceClassification org/scorer"),
                *("tokenizer org/teacher", "CausalLM org/teacher"),
            ],
        ),
        (
            ["data=hub", "data.path=[org/one,org/two]", "phase=sft", "model.tokenizer=tests"],
            [],
            ["data org/one", "data org/two", "CausalLM org/tiny"],
        ),
    ],
)
def test_what_is_downloaded(
    words: list[str],
    finished: list[str],
    expected: list[str],
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A folder of this machine is not downloaded, nor what finished phases have read."""
    asked: list[str] = []

    def record(name: str, place: Callable[..., object]) -> None:
        monkeypatch.setattr(downloads, name, lambda *args, **_: asked.append(str(place(*args))))

    record("load_pretrained", lambda kind, source, _: f"{kind.__name__[12:]} {source.path}")
    record("load_or_train_tokenizer", lambda model: f"tokenizer {model.tokenizer or model.path}")
    record("load_tokenizer", lambda place: f"tokenizer {place}")
    record("find_tables", lambda dataset, _: f"data {dataset.path}")
    monkeypatch.setattr(
        downloads,
        "unfinished_phases",
        lambda config, _: [phase for phase in config.phase.order if phase not in finished],
    )
    smoke = ["experiment=smoke", "model=pretrained", "model.path=org/tiny", "plan=off"]
    downloads.download_inputs(to_run_config(compose([*smoke, *words])), tmp_path)
    assert asked == expected


def test_each_node_downloads_once(hub: Hub, tmp_path: Path, compose: Compose) -> None:
    ends = run_ranks(hub, tmp_path, compose)
    assert [code for code, *_ in ends] == [0] * 4, ends
    for rank in (1, 2, 3):
        assert (tmp_path / "run" / "logs" / f"rank_{rank}.txt").read_text() == ends[0][1]
    assert {rank for rank, *_ in hub.requests} == {0, 2}
    downloads = Counter(request for request in hub.requests if request[1] == "GET")
    weights = [path.name for path in hub.files.glob("*.safetensors")]
    assert len(weights) > 1
    assert {downloads[rank, "GET", name] for rank in (0, 2) for name in weights} == {1}


def test_a_node_that_cannot_download_ends_all_ranks(
    hub: Hub, tmp_path: Path, compose: Compose
) -> None:
    hub.refused = {2}
    ends = run_ranks(hub, tmp_path, compose)
    assert [code for code, *_ in ends] == [2] * 4, ends
    reason = "error: model.path=org/tiny is not a local folder, and a tokenizer could not be loaded"
    texts = [complaint for *_, complaint in ends]
    assert [text.count(reason) for text in texts] == [1, 0, 1, 0], "once on each node"
    for rank in (1, 3):
        assert reason in (tmp_path / "run" / "logs" / f"rank_{rank}.txt").read_text()
