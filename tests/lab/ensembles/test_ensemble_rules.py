"""What the members of a reward model change; bad_commands.txt has what is refused."""

from rlhf.config.choices import Phase
from rlhf.config.effects import effect_of, values_that_affect
from rlhf.config.typed import to_run_config
from tests.conftest import Compose


def test_only_averaged_weights_change_the_training(compose: Compose) -> None:
    """Runs that combine the same members in other ways share one reward phase."""

    def read(combine: str) -> dict[str, object]:
        config = to_run_config(compose(["reward.members=5", f"reward.combine={combine}"]))
        return values_that_affect(config, frozenset({Phase.reward}))

    assert read("mean") == read("worst") == read("uncertainty")
    assert read("warm") != read("mean")
    assert not effect_of("reward.combine").is_inherited
