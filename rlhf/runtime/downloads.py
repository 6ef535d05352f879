"""Download what a run reads from the hub once on each node, before the node's ranks read it.

The functions that load models, tokenizers and data sets download them here, with their errors.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase, Source
from rlhf.config.roles import starting_models, tokenizer_base
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import list_datasets
from rlhf.data.tables import find_tables
from rlhf.methods import methods_in_use
from rlhf.models.pretrained import load_pretrained
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import load_or_train_tokenizer, load_tokenizer, tokenizer_place
from rlhf.options.scorers.costs import list_scorers
from rlhf.run.results import reused_phases
from rlhf.runtime.phase_runs import unfinished_phases

TRAINED_IN = {"model": Phase.sft, "reward_model": Phase.reward}


def download_inputs(config: RunConfig, run_dir: Path) -> None:
    """Download the data sets, tokenizers and models of the hub that unfinished phases read."""
    data, order = config.data, config.phase.order
    phases = {*unfinished_phases(config, run_dir)} - {*reused_phases(config)}
    if phases and data.source is Source.hub and not config.environment.is_used:
        for dataset in list_datasets(data):
            find_tables(dataset, data.source, key="data.path")
    if Phase.ppo in phases and data.ptx_path is not None:
        from rlhf.options.ptx.corpus import find_ptx_tables

        find_ptx_tables(data)
    has_tokenizer = config.from_run is not None or (run_dir / "tokenizer").exists()
    used = {key: model for phase in order for key, model in starting_models(config, phase)}
    for key, model in used.items() if phases else ():
        is_read = not has_tokenizer or key != tokenizer_base(config)[0]
        if is_read and _is_on_hub(tokenizer_place(model, key=key)[1]):
            load_or_train_tokenizer(model, key=key, texts=())
        if TRAINED_IN[key] in phases or TRAINED_IN[key] not in order:
            _download_model(ModelSource.from_config(model, key=key))
    if Phase.ppo in phases and any(_is_on_hub(m.path) for m in list_scorers(config).values()):
        from rlhf.options.scorers.text_scorer import read_scorer_forms

        read_scorer_forms(config)  # reads the shapes of the weights, which downloads them
    for method in methods_in_use(config):
        for group, model in filter(None, (method.reference(config, p) for p in phases)):
            source = ModelSource.from_config(replace(model, revision=None), key=group)
            if _is_on_hub(source.path):
                load_tokenizer(str(source.path), key=f"{group}_path")
                _download_model(source)


def _download_model(source: ModelSource) -> None:
    import transformers

    if _is_on_hub(source.path):
        is_scorer = source.key.startswith("reward_model")
        name = "AutoModelForSequenceClassification" if is_scorer else "AutoModelForCausalLM"
        # Memory-mapped weights are downloaded, but not read.
        load_pretrained(getattr(transformers, name), source, {}, mapped=True)


def _is_on_hub(place: str | None) -> bool:
    return place is not None and not expand_user_path(place, key="path").exists()


def read_cache_only() -> None:
    """Make libraries in this process read the cache of the hub; child processes are not changed."""
    import datasets
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
