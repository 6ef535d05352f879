"""The files with the output of ranks; test_launcher.py has what ranks write to them."""

import socket
from pathlib import Path

import pytest

from rlhf.base.errors import RlhfError
from rlhf.runtime.rank_output import describe_rank, redirect_output

HOST = socket.gethostname()


def test_a_rank_is_named_with_its_file(tmp_path: Path) -> None:
    assert describe_rank(3, tmp_path) == f"rank 3 on {HOST} ({tmp_path}/logs/rank_3.txt)"
    assert describe_rank(3, None) == f"rank 3 on {HOST}", "another node knows the folder"
    assert describe_rank(0, tmp_path) == f"rank 0 on {HOST}", "which prints on the terminal"


@pytest.mark.parametrize("name", ["logs", "logs/rank_1.txt"])
def test_output_goes_through_no_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RlhfError, match=f"{link}.* link"):
        redirect_output(tmp_path / "run", 1)
