"""Spared libraries: what transformers imports for functions that nothing here calls.

Importing one of its models also gets its scores for assisted generation (scikit-learn, and pandas with
it) and its losses for object detection (scipy.optimize): three seconds of CPU in each engine and learner.
"""


def spare_unused_libraries() -> None:
    """Have transformers, which must not have been used yet, do without them."""
    from transformers import utils

    for name in ("is_sklearn_available", "is_scipy_available"):
        if hasattr(utils, name):  # another release may ask otherwise; then nothing is spared
            setattr(utils, name, _unavailable)


def _unavailable() -> bool:
    return False
