"""Print the script of a SLURM job without submitting the job."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rlhf.base.errors import USER_ERROR, ConfigError

# Options that the Hydra plugin gives to submitit's constructor, and options that submitit takes
# under their own names; all other options get the prefix slurm_.
FOR_THE_EXECUTOR = ("_target_", "submitit_folder", "max_num_timeout")
SHARED = (
    "name nodes tasks_per_node gpus_per_node cpus_per_task mem_gb timeout_min stderr_to_stdout"
).split()


class ShowScript(Callback):
    """A Hydra callback that prints the sbatch script and exits if launcher.dry_run=true."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Print the script or the error, then exit: Hydra ignores other exceptions of callbacks."""
        if not config.launcher.dry_run:
            return
        try:
            sys.stdout.write(sbatch_script(config))
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(USER_ERROR) from error
        raise SystemExit(0)


def sbatch_script(config: DictConfig) -> str:
    """Return the script that sbatch would get for one job.

    Raises:
        ConfigError: if SLURM or submitit is not installed here, or refuses an option.
    """
    given = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(given, dict)
    try:
        import submitit

        executor: Any = submitit.AutoExecutor(folder=given["submitit_folder"], cluster="slurm")
        options = {
            (str(name) if name in SHARED else f"slurm_{name!s}"): value
            for name, value in given.items()
            if name not in FOR_THE_EXECUTOR
        }
        executor.update_parameters(**options)
    except ImportError as error:
        raise ConfigError(
            'hydra/launcher=submitit_slurm needs submitit: pip install -e ".[slurm]"'
        ) from error
    except (RuntimeError, NameError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"hydra/launcher=submitit_slurm: {reason}") from error
    slurm = executor._executor
    return str(slurm._make_submission_file_text(slurm._submitit_command_str, ""))
