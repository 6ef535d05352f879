"""Two ranks that share each sequence compute what one rank computes."""

from pathlib import Path

import pytest
import torch

from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.models.build import build_actor
from rlhf.options.sequence_parallel.models import (
    SequenceShardModel,
    build_sequence_parallel_attention,
)
from tests.models_on_disk import small_tokenizer, source_of
from tests.runs import TORCHRUN, python


@pytest.mark.slow
def test_parts_add_up_to_the_whole_loss_and_gradient(tmp_path: Path) -> None:
    run = python(
        *TORCHRUN,
        "-m",
        "tests.options.sequence_parallel.sequence_shard_rank",
        tmp_path,
        OMP_NUM_THREADS=1,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == 8
    for result in found.values():
        one, two = result["losses"]
        assert two == pytest.approx(one, rel=1e-5)
        assert result["error"] < 1e-5 * result["largest"]


@pytest.mark.parametrize("heads", [(3, 3, 8), (4, 3, 8)], ids=["queries", "key-value heads"])
def test_heads_that_cannot_be_divided_are_refused(heads: tuple[int, int, int]) -> None:
    with pytest.raises(CapabilityError, match=r"^zero\.sequence_parallel_size=2: .*attention head"):
        build_sequence_parallel_attention(max, heads, ranks=Ranks(0, 2), size=2, sequences=1)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt2", {}),  # its parts are not in the table of families
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_models_that_see_more_than_positions_are_refused(
    family: str, fields: dict[str, object]
) -> None:
    model = build_actor(source_of(family, fields=fields), small_tokenizer(), seed=1)
    with pytest.raises(CapabilityError, match=r"sft\.max_tokens=16 cannot share sequences"):
        SequenceShardModel(model, part=0, parts=2, tokens=16)
