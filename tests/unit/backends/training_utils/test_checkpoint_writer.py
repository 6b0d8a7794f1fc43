from miles.backends.training_utils.checkpoint_writer import derived_seed


def test_seeds_of_ranks_and_steps_differ() -> None:
    seeds = {derived_seed(s, i, r) for s in range(3) for i in range(5) for r in range(4)}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**63 for seed in seeds)
