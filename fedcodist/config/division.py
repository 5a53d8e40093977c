"""`data.division_per_seed`: every seed divides the data among clients in another way.

Seeds that are trained in one program share their data, but FedSDD's paper has a division for each seed.
With this setting a run has one seed, and `data.seed` + `seed` takes the place of `data.seed`.
`fedcodist.report` and `experiments.studies` count runs that differ only in their seed as one method's.
"""

from ml_collections import ConfigDict


def divided(config: ConfigDict) -> ConfigDict:
    """Returns the config with the `data.seed` of its seed, or as it is where seeds share a division.

    Applied again it changes nothing.

    Raises:
      ValueError: names `seeds` if there are several.
      TypeError: names the setting if it is neither True nor False.
    """
    per_seed = config.data.get("division_per_seed", False)
    if not isinstance(per_seed, bool):
        raise TypeError(f"data.division_per_seed must be True or False, got {per_seed!r}.")
    if not per_seed:
        return config
    if config.seeds != 1:
        raise ValueError(
            f"seeds must be 1 with data.division_per_seed, since seeds of one program share their data, "
            f"got {config.seeds}; run them one by one, with --config.seed=0, 1, ... and a folder each."
        )
    of_seed = config.copy_and_resolve_references()
    of_seed.data.seed = config.data.seed + config.seed
    of_seed.data.division_per_seed = False
    return of_seed
