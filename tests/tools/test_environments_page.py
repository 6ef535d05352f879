"""The table of environments: how one is tried, and what the page must show."""

from rlhf.options.environments.keys import EnvironmentKind
from tools.docs.environments_page import Trial, try_environment


def test_an_environment_is_played_twice() -> None:
    trial = try_environment(EnvironmentKind.blackjack, None)
    assert trial == Trial("blackjack", 2, "optimum -0.046556", True)
