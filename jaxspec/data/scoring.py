"""What judges the responses of a run, made of its config and its data."""

import importlib.util
import itertools

from jaxspec import mesh as meshes
from jaxspec.config.settings import Config
from jaxspec.data.problem_source import Problems
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import listed, shown
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import Rows, Scorer

MOST_WORKERS = 8
"""Processes where nothing says how many."""
_LISTED = 5
"""Rows named in a message."""


def scorer_of(config: Config, *sources: Problems) -> Scorer:
    """What judges the responses of a run; its workers, if it has any, are ready, and can read all
    reference answers of the sources.

    Raises:
      ConfigError: the user's function cannot be imported; the verifier is not installed or not
        sound; it cannot read some answers, which are listed.
    """
    settings = config.reward
    verifies = settings.verifier != "exact" and "answer" in settings.all_parts
    require(
        settings.verifier != "math" or importlib.util.find_spec("math_verify") is not None,
        "reward.verifier math needs math-verify, which is not installed: in a checkout run bash"
        " launch/venv.sh math, elsewhere pip install math-verify; or set --reward.verifier exact",
    )
    pool = None
    if verifies or settings.function:
        workers = settings.workers or min(MOST_WORKERS, max(1, meshes.cores() - 1))
        pool = RewardPool(workers, settings.deadline, settings.function)
    style, parts = config.data.answer_style, settings.all_parts
    scorer = Scorer(style, parts, settings.all_weights, pool, settings.verifier, settings.rows)
    try:
        if pool is not None:
            pool([])  # hears whether the function was imported
        scorer(Rows((), (), (), ()))
    except PoolError as error:
        what = f"reward.function {settings.function}" if settings.function else "reward.verifier"
        raise ConfigError(f"{what}: {error}") from error
    for source in sources if verifies else ():
        places, answers = zip(*source.references(), strict=True)
        bad = scorer.unreadable(answers)
        first = [f"{places[row]}: {shown(answers[row])}" for row in itertools.islice(bad, _LISTED)]
        require(
            not bad,
            f"{len(bad)} reference answers cannot be read by reward.verifier {settings.verifier}:"
            f" {listed(first)}{' and others' * (len(bad) > _LISTED)}; correct or remove them, or"
            " choose another verifier",
        )
    return scorer
