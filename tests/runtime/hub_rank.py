"""One rank of test_downloads.py, started with URL FOLDER: it loads what its run names, and ends.

URL is a stand-in for the hub, and FOLDER/NODE the hub's cache on the rank's node.
"""

import os
import sys
from pathlib import Path

import datasets
from huggingface_hub import constants, hf_api

from rlhf.config.schema.run import RunConfig
from rlhf.models.build import build_actor
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import load_or_train_tokenizer
from rlhf.runtime import launcher
from rlhf.runtime.rendezvous import Rendezvous


def load_inputs(meeting: Rendezvous, config: RunConfig) -> None:
    """In the place of Rendezvous.start_process_group."""
    tokenizer = load_or_train_tokenizer(config.model, key="model", texts=())
    model = build_actor(ModelSource.from_config(config.model, key="model"), tokenizer, seed=1)
    sys.stdout.write(f"{sum(p.double().sum().item() for p in model.parameters())}\n")
    meeting._monitor.announce_success()
    sys.exit()


url, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False
for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
    place = getattr(constants, name).replace("https://huggingface.co", f"{url}/{rank}")
    setattr(constants, name, place)
hf_api.api.endpoint = constants.ENDPOINT
constants.HF_HUB_CACHE = f"{folder}/{rank // int(os.environ['LOCAL_WORLD_SIZE'])}"
Rendezvous.start_process_group = load_inputs  # type: ignore[method-assign]
if rank == 0:
    launcher.run_rank(Path(folder, "run"), launcher.build_stderr_reporter())
else:
    launcher.join_started_ranks()
