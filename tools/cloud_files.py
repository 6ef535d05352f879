"""Write task files for clouds from the commands that ``launcher.dry_run=true`` prints.

    python -m tools.cloud_files FOLDER OVERRIDE...

writes FOLDER/skypilot.yaml and FOLDER/trainjob.yaml (Kubeflow Trainer) for ``python launch.py
OVERRIDE...``. The files in examples/cloud are made from ``EXAMPLE``.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.base.command import run_to_exit_code
from rlhf.base.errors import ConfigError, RlhfError
from rlhf.config.choices import Device
from rlhf.config.hydra_errors import explain_hydra_error, to_hydra_override
from rlhf.config.schema.run import RunConfig
from rlhf.runtime.launch_mode import Program, launch_commands
from tools.docs.pages import composed

CONF = Path(__file__).parents[1] / "conf"
EXAMPLE = ["hardware=8xh100_80g", "hardware.nodes=2", "model=qwen3_8b", "data=rm_static"]
SHARED = "/shared"  # the same folder on all nodes: runs and tokenised data
# Cards of conf/hardware whose name at SkyPilot is not the part before "-".
SKYPILOT_CARDS = {"A100-80G": "A100-80GB", "V100-32G": "V100-32GB"}


def skypilot(config: RunConfig, overrides: Sequence[str], file: Path) -> str:
    """Return a SkyPilot task (https://docs.skypilot.co/en/stable/reference/yaml-spec.html)."""
    hardware = config.hardware
    card = hardware.name.split(" x ")[-1]
    asked = f"cpus: {hardware.ranks_per_node}+"
    if hardware.device is Device.cuda:
        name = SKYPILOT_CARDS.get(card, card.partition("-")[0])
        asked = f"accelerators: {name}:{hardware.ranks_per_node}"
    here = {
        "--node-rank=0": '--node-rank="$SKYPILOT_NODE_RANK"',
        "--master-addr=FIRST": '--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"',
    }
    words = [here.get(word, shlex.quote(word)) for word in _command(config, overrides)]
    run = " \\\n    ".join([" ".join(words[:3]), *words[3:]])
    return f"""# sky launch {shlex.quote(str(file))}
# The volume rlhf must be one that all nodes can write: SkyPilot's access_mode ReadWriteMany.
name: rlhf
workdir: .
num_nodes: {hardware.nodes}
resources:
  {asked}
volumes:
  {SHARED}: rlhf
envs:
  RLHF_CACHE: {SHARED}/cache
setup: |
  pip install -c constraints.txt -e .
run: |
  {run}
"""


def trainjob(config: RunConfig, overrides: Sequence[str], file: Path) -> str:
    """Return a TrainJob of Kubeflow Trainer, which starts torchrun with PET_* variables."""
    hardware = config.hardware
    command = _command(config, overrides)
    words = ["torchrun", *(word for word in command[3:] if not word.startswith("--"))]
    resource = "nvidia.com/gpu" if hardware.device is Device.cuda else "cpu"
    return f"""# kubectl apply -f {shlex.quote(str(file))}
# PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT are torchrun's
# options; the runtime torch-distributed sets them on every pod.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: rlhf
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: IMAGE  # with this repository, installed, as its working directory
    numNodes: {hardware.nodes}
    numProcPerNode: {hardware.ranks_per_node}
    resourcesPerNode:
      limits:
        {resource}: {hardware.ranks_per_node}
    command: {json.dumps(words)}
    env:
      - {{name: RLHF_CACHE, value: {SHARED}/cache}}
  runtimePatches:
    - manager: rlhf.example/shared-folder
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        volumes:
                          - name: shared
                            persistentVolumeClaim: {{claimName: rlhf}}  # ReadWriteMany
                          - name: shm  # NCCL needs more than the 64 MB of a container
                            emptyDir: {{medium: Memory}}
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: shared, mountPath: {SHARED}}}
                              - {{name: shm, mountPath: /dev/shm}}
"""


def _command(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Return the dry run's command for the first node, with FIRST as the first node's address."""
    launcher = replace(config.launcher, master_addr="FIRST", hostfile=None)
    place = [] if config.run_dir else [f"run_dir={SHARED}/runs/{config.name}"]
    if config.resume is None:  # a task that the cloud starts again continues its run
        place.append("resume=auto")
    program = Program("python", "launch.py", [*overrides, *place])
    return launch_commands(replace(config, launcher=launcher), program, {})[0]


def write(folder: Path, overrides: Sequence[str]) -> None:
    """Write skypilot.yaml and trainjob.yaml into ``folder``.

    Raises:
        ConfigError: if the overrides are wrong, or start one process, which needs no launcher.
    """
    words = [to_hydra_override(word) for word in overrides]
    try:
        config = composed(CONF, *words)
    except RlhfError:
        raise
    except Exception as error:
        raise explain_hydra_error(error, words) or error from error
    if config.hardware.nodes == config.hardware.ranks_per_node == 1:
        raise ConfigError(
            "hardware.nodes=1 with hardware.ranks_per_node=1: one process needs no launcher; "
            "choose a node of several GPUs, such as hardware=8xh100_80g"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in (("skypilot", skypilot), ("trainjob", trainjob)):
        file = folder / f"{name}.yaml"
        file.write_text(render(config, overrides, file), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_to_exit_code(lambda: write(Path(sys.argv[1]), sys.argv[2:])))
