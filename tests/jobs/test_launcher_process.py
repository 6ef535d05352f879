"""The user's allocator stays as it is."""

import os

import pytest

from rlhf.base.command import set_cuda_allocator


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
    ],
)
def test_the_users_allocator_stays(
    given: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_cuda_allocator()
    assert os.environ == given | added
