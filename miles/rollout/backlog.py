"""What comes before new prompts: prompts that a rollout did not use, and unfinished groups.

Together with the source it is the whole stream of work, so its state is what a checkpoint holds.
"""

from dataclasses import dataclass
from typing import Any

from miles.config.errors import ConfigError, Problem
from miles.config.root import MilesConfig
from miles.contracts.hooks import DataSource, load_hook
from miles.contracts.types import Group, Prompt, Sample, Status
from miles.rollout.sample_codec import (
    groups_from_plain,
    groups_to_plain,
    prompt_from_plain,
    prompt_to_plain,
)


@dataclass(eq=False)
class Work:
    """A group on its way."""

    prompt: Prompt
    unfinished: tuple[Sample, ...] = ()
    """What an earlier rollout left of it."""
    group: Group | None = None
    """Set when generation has returned."""

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    @property
    def aborted(self) -> bool:
        return any(s.status is Status.ABORTED for s in self.group or ())


class Backlog:
    """Hands out work: unfinished groups first, then prompts that came back, then new ones."""

    def __init__(self, config: MilesConfig, source: DataSource) -> None:
        self._config = config
        self._source = source
        self._choose = load_hook("buffer_filter_path", config.hooks.buffer_filter_path)
        self._unused: list[Prompt] = []
        self._unfinished: list[Group] = []

    def take(self, num_groups: int) -> list[Work]:
        """Exactly so many; of each kind in order of ``group_id``."""
        # An earlier run may have left tokens that a deterministic one must not depend on.
        keep = not self._config.rollout.deterministic_rollout
        groups = self._choose_unfinished(num_groups)
        works = [Work(group[0].prompt, tuple(group) if keep else ()) for group in groups]
        num_unused = min(num_groups - len(works), len(self._unused))
        works += [Work(prompt) for prompt in self._unused[:num_unused]]
        del self._unused[:num_unused]
        works += [Work(prompt) for prompt in self._source.next(num_groups - len(works))]
        return works

    def give_back(self, work: Work) -> None:
        """Work that was not used: with its tokens where they are of use, else as a prompt."""
        if self._tokens_are_of_use(work):
            self._unfinished.append(list(work.group or ()))
            self._unfinished.sort(key=lambda group: group[0].group_id)
        else:
            self._unused.append(work.prompt)
            self._unused.sort(key=lambda prompt: prompt.group_id)

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the source's state included."""
        return {
            "source": self._source.state_dict(),
            "unused": [prompt_to_plain(p) for p in self._unused],
            "unfinished": groups_to_plain(self._unfinished),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ConfigError`` when the state does not fit the data or the group size."""
        unfinished = groups_from_plain(state["unfinished"])
        wanted = self._config.data.n_samples_per_prompt
        for group in unfinished:
            if len(group) != wanted:
                remedy = f"the checkpoint has unfinished groups of {len(group)}; keep that number"
                raise ConfigError([Problem("--n-samples-per-prompt", wanted, remedy)])
        self._source.load_state_dict(state["source"])
        self._unused = [prompt_from_plain(p) for p in state["unused"]]
        self._unfinished = unfinished

    def _tokens_are_of_use(self, work: Work) -> bool:
        rollout = self._config.rollout
        if not rollout.partial_rollout or rollout.deterministic_rollout:
            return False
        if rollout.mask_offpolicy_in_partial_rollout and not work.aborted:
            return False  # a finished group of old tokens would train nothing
        return any(sample.response_length for sample in work.group or ())

    def _choose_unfinished(self, num_groups: int) -> list[Group]:
        chosen = self._unfinished[:num_groups]
        if self._choose is not None and self._unfinished:
            chosen = self._choose(list(self._unfinished), num_groups)
            known = {id(group) for group in self._unfinished}
            if len(chosen) > num_groups or len({id(g) for g in chosen} & known) < len(chosen):
                remedy = f"it must return at most {num_groups} groups of the buffer, each once"
                path = self._config.hooks.buffer_filter_path
                raise ConfigError([Problem("--buffer-filter-path", path, remedy)])
        taken = {id(group) for group in chosen}
        self._unfinished = [group for group in self._unfinished if id(group) not in taken]
        return chosen
