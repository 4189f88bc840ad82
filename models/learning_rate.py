"""Learning rate of a configuration that names none: by the parameters of the model that it trains."""

from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError
from antiphon.core.learning_rate import rate_by_size
from antiphon.models.codec import model_folder
from antiphon.models.directory import count_parameters


def with_learning_rate(config: RunConfig) -> RunConfig:
    """Return the configuration with a learning rate, its own or that of the model's size.

    It stays without where the model cannot be read here: the check before a run says why.
    """
    folder = model_folder(config.model.path)
    if config.learner.learning_rate is not None or folder is None:
        return config
    try:
        rate = rate_by_size(count_parameters(folder), adapters=bool(config.learner.lora.rank))
    except ConfigError:
        return config
    learner = config.learner.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"learner": learner})
