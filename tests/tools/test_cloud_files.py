"""Task files for SkyPilot and Kubeflow Trainer: up to date, and valid for both."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf.base.errors import ConfigError
from tools.cloud_files import EXAMPLE, write

ROOT = Path(__file__).parents[2]
CLOUD = ROOT / "examples" / "cloud"

# The keys of SkyPilot's schema of a task (sky/utils/schemas.py of 0.14.1) and their types.
SKYPILOT = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": dict,
    "volumes": dict,
    "envs": dict,
    "setup": str,
    "run": str,
}


def test_files_are_those_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("examples/cloud"), EXAMPLE)
    for name in ("skypilot.yaml", "trainjob.yaml"):
        found, written = ((root / "examples/cloud" / name).read_text() for root in (tmp_path, ROOT))
        assert found == written, f"python -m tools.cloud_files examples/cloud {' '.join(EXAMPLE)}"


def test_skypilot_starts_the_command_of_the_dry_run_on_every_node() -> None:
    task = yaml.safe_load((CLOUD / "skypilot.yaml").read_text())
    assert {key: type(value) for key, value in task.items()} == SKYPILOT
    assert task["resources"] == {"accelerators": "H100:8"}
    dry_run = (
        "python -m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=8 "
        "--master-addr=10.0.0.1 --master-port=29500 launch.py"
    )
    node = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    printed = 'python() { printf "%q " python "$@"; }\n' + task["run"]
    said = subprocess.check_output(["bash", "-euc", printed], env=os.environ | node, text=True)
    assert shlex.split(said) == [
        *dry_run.split(),
        *EXAMPLE,
        "run_dir=/shared/runs/default",
        "resume=auto",
    ]


def test_the_first_line_names_the_file_and_the_versions_are_pinned(tmp_path: Path) -> None:
    folder = tmp_path / "my files"
    write(folder, EXAMPLE)
    for name, command in (("skypilot", "sky launch"), ("trainjob", "kubectl apply -f")):
        first, *_ = (folder / f"{name}.yaml").read_text().splitlines()
        assert first == f"# {command} '{folder}/{name}.yaml'"
    task = yaml.safe_load((folder / "skypilot.yaml").read_text())
    assert task["setup"] == "pip install -c constraints.txt -e .\n"


def test_trainjob_is_one_of_kubeflow_trainer() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = yaml.safe_load((CLOUD / "trainjob.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job  # it drops keys that it does not know
    assert (read.api_version, read.kind) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert read.spec.trainer.command[:2] == ["torchrun", "launch.py"]
    assert (read.spec.trainer.num_nodes, read.spec.trainer.num_proc_per_node) == (2, 8)


def test_torchrun_reads_its_options_from_pet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    given = {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_PORT": "29400"}
    for name, value in {**given, "MASTER_ADDR": "rlhf-node-0-0.rlhf"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    job = yaml.safe_load((CLOUD / "trainjob.yaml").read_text())
    options = parse_args(job["spec"]["trainer"]["command"][1:])
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
    assert (options.master_addr, options.master_port) == ("rlhf-node-0-0.rlhf", 29400)
    assert options.training_script == "launch.py"


def test_names_and_texts_of_the_user_reach_the_files(tmp_path: Path) -> None:
    overrides = ["hardware=8xa100_80g", "data=local", "data.path='it is, here'", "run_dir=/x/y"]
    write(tmp_path, overrides)
    sky, job = (
        yaml.safe_load((tmp_path / f"{n}.yaml").read_text()) for n in ("skypilot", "trainjob")
    )
    assert sky["resources"] == {"accelerators": "A100-80GB:8"}
    words = shlex.split(sky["run"].replace("\\\n", ""))
    assert words[:5] == [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=8",
    ]
    assert words[6:] == [*overrides, "resume=auto"]
    assert job["spec"]["trainer"]["command"] == ["torchrun", "launch.py", *overrides, "resume=auto"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=2", "one process needs no launcher"),
        ("ppo.kl_coef=1", "did you mean ppo.kl_ctl"),
        ("hardware=4090", "did you mean hardware=rtx_4090_24g"),
    ],
)
def test_wrong_overrides_write_nothing(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "new", [override])
    assert not (tmp_path / "new").exists()
