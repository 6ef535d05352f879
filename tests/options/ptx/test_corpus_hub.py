"""A corpus of the hub: data.ptx_path with its configuration name; no network here."""

from __future__ import annotations

from collections.abc import Callable

import datasets
import pytest
from omegaconf import DictConfig

from rlhf.config.freeze import to_run_config
from rlhf.options.ptx.corpus import load_ptx_texts


def test_a_corpus_of_the_hub_has_its_configuration(
    compose: Callable[[list[str]], DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.DatasetDict:
        calls.append((args, kwargs))
        rows = [{"page": f"text {n}", "id": n} for n in range(4)]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    named = ["data.ptx_path=org/wiki", "data.ptx_subset=raw", "data.ptx_column=page"]
    train, held_out = load_ptx_texts(to_run_config(compose(named)).data, seed=1)
    assert calls == [(("org/wiki",), {"name": "raw", "revision": None})]
    assert sorted([*train, *held_out]) == [f"text {n}" for n in range(4)]
